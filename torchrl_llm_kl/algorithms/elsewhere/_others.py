"""Translation of the configurations of prime-rl, NeMo-RL and slime."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from torchrl_llm_kl._foreign import NEMO, PRIME, SLIME
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.algorithms.elsewhere._translation import NOT_APART, Reader, Translation, read_mapping, resolved
from torchrl_llm_kl.algorithms.elsewhere._trl import UNCLAMPED_K3
from torchrl_llm_kl.losses import ROLES, ImportanceWeights, OffPolicySequenceMask, RejectionMask

# ------------------------------------------------------------------ prime-rl

_ALGO, _LOSS, _TRAIN = "orchestrator.algo.", "trainer.loss.", "orchestrator.train.sampling."


def from_prime_rl(config: str | os.PathLike[str] | Mapping[str, object]) -> Translation:
    """Translate a configuration of prime-rl 0.8, for its command ``rl``.

    Args:
        config: the path of a TOML file, or a mapping. Missing settings have prime-rl's defaults.

    Returns:
        A :class:`Translation` that reproduces prime-rl's algorithm with its defaults: ``r - mean``, the trust region of 0.2 in
        probability, the squared log-ratio, and the mean over tokens.

    Raises:
        ValueError: for an algorithm or a loss that prime-rl does not know.

    Example:
        >>> translation = from_prime_rl({"orchestrator": {"group_size": 8, "algo": {"type": "max_rl"}}})
        >>> translation.algorithm, translation.overrides["objective"], translation.overrides["objective_args"]["clip_low"]
        ('maxrl', 'mask_ipo', 0.2)
    """
    if not isinstance(config, Mapping):
        import tomllib

        config = cast("Mapping[str, object]", tomllib.loads(Path(config).read_text(encoding="utf-8")))
    reader = Reader("prime-rl", PRIME, flatten(config))
    algorithm = reader.preset(f"{_ALGO}type")
    reader.overrides["aggregation"] = "token-mean"
    if algorithm == "echo" or reader[f"{_LOSS}type"] == "custom":
        note = "echo has PPO's surrogate here" if algorithm == "echo" else "pass it to PolicyLoss"
        reader.refuse(f"{_LOSS}type", note)
    elif algorithm not in ("on_policy_distill", "sft"):
        reader.choose(f"{_LOSS}type")
    names = {role: f"{_ALGO}roles.{role}.alpha" for role in ROLES}
    weights = {role: name for role, name in names.items() if name in reader.given}
    if algorithm == "echo" and weights:
        shares = {role: reader.take(name) for role, name in weights.items()}
        reader.objective["mu"] = mu = max(shares.values())
        if len(shares) > 1:
            reader.objective["roles"] = {role: share / mu for role, share in shares.items()}
            for name in weights.values():
                reader.refuse(name, "prime-rl divides all roles by their joint tokens, `roles` each by its own")
    reader.group(algorithm, "orchestrator.group_size")
    return reader.finish(algorithm, reader.sample(f"{_TRAIN}temperature"))


# ------------------------------------------------------------------ NeMo-RL

_G, _E, _F = "grpo.", "grpo.adv_estimator.", "loss_fn."
_P = "policy.generation."


def nemo_kl(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor | None = None,
    *,
    kind: str = "k3",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """NeMo-RL's KL in the loss: ``exp(x - sg(x))`` times an estimate from clamped log-ratios, with a clamped result.

    The factor is 1 in value and adds the gradient of the sampling probability. If the policy sampled the tokens, the mean
    gradient of ``"k1"`` and ``"k3"`` is the reverse KL's. The gradient is 0 if a clamp is active.
    """
    free = ref_log_prob - log_prob
    log_ratio = free if input_clamp is None else free.clamp(-input_clamp, input_clamp)
    weight = torch.where(log_ratio == free, (log_prob - log_prob.detach()).exp(), 1)
    estimates = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(log_ratio) - log_ratio}
    value = weight * estimates[kind]
    return value if output_clamp is None else value.clamp(-output_clamp, output_clamp)


def from_nemo_rl(config: str | os.PathLike[str] | Mapping[str, object]) -> Translation:
    """Translate a configuration of NeMo-RL 0.6, for ``run_grpo``.

    Args:
        config: the path of a YAML file, YAML text, or a mapping. Missing settings have NeMo-RL's defaults.

    Returns:
        A :class:`Translation`. By default NeMo-RL divides by the deviation of the *other* answers. That is refused here: set
        ``use_leave_one_out_baseline`` or ``normalize_rewards`` to False.

    Raises:
        ValueError: for an unknown advantage, estimator or kind of importance sampling.

    Example:
        >>> translation = from_nemo_rl({"grpo": {"normalize_rewards": False}, "loss_fn": {"ratio_clip_max": 0.28}})
        >>> translation.algorithm, translation.overrides["advantage"], translation.overrides["objective_args"]
        ('grpo', 'rloo', {'clip_low': 0.2, 'clip_high': 0.28, 'clip_ratio_c': None})
    """
    given = flatten(read_mapping(config, "a configuration of NeMo-RL"))
    # The advantage's settings refer to the general ones by default.
    given = resolved(given, NEMO, lambda name, value: value == f"${{{name.replace(_E, _G)}}}")
    reader = Reader("NeMo-RL", NEMO, given)
    algorithm = reader.preset(f"{_E}name")
    _nemo_advantage(reader)
    flags = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "force_on_policy_ratio": "gpg"}
    flags |= {"disable_ppo_ratio": "gpg", "positive_example_nll_weight": "vapo"}
    objective = next((own for flag, own in flags.items() if reader.take(f"{_F}{flag}")), "ppo")
    reader.choose(f"{_F}disable_ppo_ratio", objective)
    for name, own in (("ratio_clip_c", "clip_ratio_c"), ("positive_example_nll_weight", "mu")):
        if reader[f"{_F}{name}"] and own not in reader.objective:
            reader.refuse(f"{_F}{name}", f"{objective} has no {own} here")
    by_token = reader.take(f"{_F}token_level_loss")
    reader.overrides |= {"aggregation": "token-mean" if by_token else "seq-mean-token-mean", "kl_loss": "none"}
    if reader.take(f"{_F}reference_policy_kl_penalty"):
        reader.copy(f"{_F}reference_policy_kl_penalty")
        kind = reader.take(f"{_F}reference_policy_kl_type")
        reader.known("reference_policy_kl_type", kind, ("k1", "k2", "k3"))
        clamps = {own: reader.take(f"{_F}kl_{own}_value") for own in ("input_clamp", "output_clamp")}
        reader.overrides["kl_loss"] = partial(nemo_kl, kind=kind, **clamps)
    if reader.take(f"{_F}use_importance_sampling_correction"):
        _nemo_corrections(reader)
    reader.group(algorithm, f"{_G}num_generations_per_prompt")
    return reader.finish(algorithm, reader.sample(f"{_P}temperature", f"{_P}top_p", f"{_P}top_k"))


def _nemo_advantage(reader: Reader) -> None:
    kind = reader[f"{_E}name"]
    if kind == "reinforce_plus_plus" and not reader.take(f"{_E}minus_baseline"):
        reader.overrides["advantage"] = "reinforce_plus_plus"
    if kind not in ("grpo", "gdpo"):
        return
    names = ("normalize_rewards", "use_leave_one_out_baseline")
    scales, leaves = (f"{_G if reader[_E + name] is None else _E}{name}" for name in names)
    scaled, left_out = reader.take(scales), reader.take(leaves)
    if kind == "grpo" and not scaled:
        reader.overrides["advantage"] = "rloo" if left_out else "dr_grpo"
    elif left_out:
        reader.refuse(leaves, "with normalize_rewards it divides by the deviation of the other answers")
    elif not scaled:
        reader.refuse(scales, NOT_APART)


def _nemo_corrections(reader: Reader) -> None:
    prefix = f"{_F}truncated_importance_sampling_"
    kind = reader.take(f"{prefix}type")
    reader.known("truncated_importance_sampling_type", kind or "tis", ("tis", "icepop", "seq-mask-tis"))
    low, high = (reader.take(f"{prefix}{name}") or None if kind else None for name in ("ratio_min", "ratio"))
    if kind == "seq-mask-tis" and low and high:  # NeMo-RL demands both
        # k1 is minus the log-ratio, so the bounds swap.
        reader.correct(RejectionMask, divergence="seq_mean_k1", low=-math.log(high), high=-math.log(low))
        low = high = None
    level = "sequence" if reader[f"{_F}sequence_level_importance_ratios"] else "token"
    mode = "mask" if kind == "icepop" else "truncate"
    reader.correct(ImportanceWeights, level=level, mode=mode, low=low, high=high)


# ------------------------------------------------------------------ slime


def from_slime(arguments: Mapping[str, object]) -> Translation:
    """Translate arguments of slime 0.3.

    Args:
        arguments: the attributes of slime's ``args``, with underscores (``{"eps_clip": 0.2, "use_kl_loss": True}``). Missing
            arguments have slime's defaults. Arguments of Megatron and SGLang belong to the run.

    Returns:
        A :class:`Translation` that reproduces slime's algorithm with its defaults: GRPO without KL, and the mean over each
        answer's mean.

    Raises:
        ValueError: for an advantage, loss or estimator that slime does not know.

    Example:
        >>> translation = from_slime({"n_samples_per_prompt": 8, "eps_clip_high": 0.28, "grpo_std_normalization": False})
        >>> translation.algorithm, translation.overrides["advantage"], translation.overrides["objective_args"]["clip_high"]
        ('grpo', 'dr_grpo', 0.28)
    """
    reader = Reader("slime", SLIME, arguments)
    reader.place(
        "outside",
        *(name for name in arguments if name not in SLIME),
        note="set it in Megatron, SGLang or your training loop",
    )
    loss = reader.take("loss_type")
    reader.known("loss_type", loss, ("policy_loss", "sft_loss"))
    by_token = reader.take("calculate_per_token_loss")
    reader.overrides["aggregation"] = "token-mean" if by_token else "seq-mean-token-mean"
    if loss == "sft_loss":
        return reader.finish("sft")
    algorithm = reader.preset("advantage_estimator")
    own = reader.overrides
    own["kl_loss"] = "none"
    reader.copy("eps_clip", *(["eps_clip_high"] if reader["eps_clip_high"] is not None else []))
    if own["objective"] != "ppo" and reader["eps_clip_c"] is not None:
        reader.refuse("eps_clip_c", f"{own['objective']} has no dual clip here")
    # slime whitens any advantage if asked. Here whitening belongs to the advantage.
    whitens = str(own["advantage"]).startswith("reinforce_plus_plus")
    if own["advantage"] == "grpo":
        if not reader.take("grpo_std_normalization") or reader["n_samples_per_prompt"] == 1:
            own["advantage"] = "dr_grpo"
        if not reader.take("rewards_normalization"):
            own["advantage"] = "reinforce"
    if own["advantage"] != "gae" and bool(reader.take("normalize_advantages")) != whitens:
        how = "always" if whitens else "not"
        reader.refuse("normalize_advantages", f"{own['advantage']} is {how} whitened over the batch here")
    if reader.take("use_kl_loss"):
        estimator, unbiased = reader.choose("kl_loss_type").here, reader.take("use_unbiased_kl")
        own["kl_loss"] = UNCLAMPED_K3 if unbiased else estimator
        if unbiased and estimator != "k3":
            reader.refuse("use_unbiased_kl", f"only k3 is multiplied by the ratio here, not {estimator}")
        reader.copy("kl_loss_coef")
    reader.copy("entropy_coef")
    if reader.take("use_tis"):
        low, high = reader.take("tis_clip_low") or None, reader.take("tis_clip")
        reader.correct(ImportanceWeights, level="token", mode="truncate", low=low, high=high)
    if reader.take("use_opsm"):
        reader.correct(OffPolicySequenceMask, delta=reader.take("opsm_delta"))
    reader.group(algorithm, "n_samples_per_prompt")
    return reader.finish(algorithm, reader.sample("rollout_temperature", "rollout_top_p", "rollout_top_k"))
