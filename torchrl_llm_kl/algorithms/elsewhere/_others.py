"""The configurations of prime-rl, NeMo-RL and slime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl._foreign import NEMO, PRIME, SLIME
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.algorithms.elsewhere._translation import Reader, Translation, read_mapping, read_scalar
from torchrl_llm_kl.algorithms.elsewhere._trl import UNCLAMPED_K3
from torchrl_llm_kl.losses import ImportanceWeights, OffPolicySequenceMask, RejectionMask
from torchrl_llm_kl.scoring import Sampling

# ------------------------------------------------------------------ prime-rl

_ALGO, _LOSS, _TRAIN = "orchestrator.algo.", "trainer.loss.", "orchestrator.train.sampling."


def from_prime_rl(config: str | os.PathLike[str] | Mapping[str, object]) -> Translation:
    """Translate a configuration of prime-rl 0.8, of its command ``rl``.

    Args:
        config: the path of a TOML file, or a mapping. What it leaves out has prime-rl's default.

    Returns:
        A :class:`Translation`, which does what prime-rl does with these settings, by its defaults too: ``r - mean``, the trust
        region of 0.2 in probability, the squared log-ratio, the mean over tokens.

    Raises:
        ValueError: for an algorithm or a loss that prime-rl does not know either.

    Example:
        >>> found = from_prime_rl({"orchestrator": {"group_size": 8, "algo": {"type": "max_rl"}}})
        >>> found.algorithm, found.overrides["objective"], found.overrides["clip_low"]
        ('maxrl', 'mask_ipo', 0.2)
    """
    if not isinstance(config, Mapping):
        import tomllib

        config = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    reader = Reader("prime-rl", PRIME, flatten(config))
    choice = reader.choose(f"{_ALGO}type")
    kind, algorithm = reader[f"{_ALGO}type"], choice.here
    reader.overrides["aggregation"] = "token-mean"
    loss = reader[f"{_LOSS}type"]
    if kind in ("opd", "opsd", "sft"):
        reader.out(f"{_LOSS}type", f"{kind} has its own loss")
    elif kind == "echo" or loss == "custom":
        note = (
            "the policy's part of echo is PPO's surrogate here" if kind == "echo" else "pass the function to PolicyLoss"
        )
        reader.refuse(f"{_LOSS}type", note)
    else:
        reader.choose(f"{_LOSS}type")
    reader.group(algorithm, "orchestrator.group_size")  # type: ignore[arg-type]
    sampling = Sampling(float(reader[f"{_TRAIN}temperature"]))
    if f"{_TRAIN}temperature" in reader.given:
        reader.place("sampling", f"{_TRAIN}temperature")
    reader.overrides["temperature"] = sampling.temperature
    return reader.finish(algorithm, sampling)  # type: ignore[arg-type]


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
    """NeMo-RL's KL in the loss: ``exp(x - sg(x))`` times an estimate of clamped log-ratios, clamped.

    The weight is 1, and adds the gradient of the sampling probability: for the policy's own tokens the mean gradient of
    ``"k1"`` and ``"k3"`` is the reverse KL's. There is no gradient where a clamp is active.
    """
    free = ref_log_prob - log_prob
    log_ratio = free if input_clamp is None else free.clamp(-input_clamp, input_clamp)
    weight = torch.where(log_ratio == free, (log_prob - log_prob.detach()).exp(), 1)
    estimates = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(log_ratio) - log_ratio}
    value = weight * estimates[kind]
    return value if output_clamp is None else value.clamp(-output_clamp, output_clamp)


def from_nemo_rl(config: str | os.PathLike[str] | Mapping[str, object]) -> Translation:
    """Translate a configuration of NeMo-RL 0.6, of ``run_grpo``.

    Args:
        config: the path of a YAML file, YAML, or a mapping. What it leaves out has NeMo-RL's default.

    Returns:
        A :class:`Translation`. By default NeMo-RL divides by the deviation of the *other* answers, which is refused: set
        ``use_leave_one_out_baseline`` or ``normalize_rewards`` to False.

    Raises:
        ValueError: for an unknown advantage, estimator or kind of importance sampling.

    Example:
        >>> found = from_nemo_rl({"grpo": {"normalize_rewards": False}, "loss_fn": {"ratio_clip_max": 0.28}})
        >>> found.algorithm, found.overrides["advantage"], found.overrides["clip_high"], found.refused
        ('grpo', 'rloo', 0.28, ())
    """
    given = flatten(read_mapping(config, "a configuration of NeMo-RL"))
    given = {name: value for name, value in given.items() if not (isinstance(value, str) and value.startswith("${"))}
    reader = Reader("NeMo-RL", NEMO, given)
    choice = reader.choose(f"{_E}name")
    algorithm: Any = choice.here
    _nemo_advantage(reader, reader[f"{_E}name"])
    if reader.overrides["advantage"] == "reinforce_plus_plus":
        algorithm = "reinforce_plus_plus"
    _nemo_objective(reader)
    reader.overrides["kl_loss"] = "none"
    if reader.take(f"{_F}reference_policy_kl_penalty"):
        reader.copy(f"{_F}reference_policy_kl_penalty", "kl_loss_coeff")
        kind = reader.take(f"{_F}reference_policy_kl_type")
        reader.known("reference_policy_kl_type", kind, ("k1", "k2", "k3"))
        clamps = {own: reader.take(f"{_F}kl_{own}_value") for own in ("input_clamp", "output_clamp")}
        reader.overrides["kl_loss"] = partial(nemo_kl, kind=kind, **clamps)
    if reader.take(f"{_F}use_importance_sampling_correction"):
        _nemo_corrections(reader)
    reader.group(algorithm, f"{_G}num_generations_per_prompt")
    return reader.finish(algorithm, reader.sample(f"{_P}temperature", f"{_P}top_p", f"{_P}top_k"))


def _nemo_advantage(reader: Reader, name: str) -> None:
    def own(setting: str) -> tuple[str, Any]:
        nearer = f"{_E}{setting}"
        key = nearer if reader[nearer] is not None else f"{_G}{setting}"
        return key, reader[key]

    if name == "reinforce_plus_plus" and not reader.take(f"{_E}minus_baseline"):
        reader.overrides["advantage"] = "reinforce_plus_plus"
    if name not in ("grpo", "gdpo"):
        return
    (scales, scaled), (leaves_out, left_out) = own("normalize_rewards"), own("use_leave_one_out_baseline")
    reader.take(scales)
    reader.take(leaves_out)
    if name == "grpo" and not scaled:
        reader.overrides["advantage"] = "rloo" if left_out else "dr_grpo"
    elif left_out:
        reader.refuse(leaves_out, "beside normalize_rewards it divides by the deviation of the others")
    elif not scaled:
        reader.refuse(scales, "without the division the rewards are not normalised apart: add them up, use dr_grpo")


def _nemo_objective(reader: Reader) -> None:
    flags = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "force_on_policy_ratio": "gpg"}
    flags |= {"disable_ppo_ratio": "gpg"}
    objective = next((own for flag, own in flags.items() if reader.take(f"{_F}{flag}")), "ppo")
    if objective == "ppo" and reader[f"{_F}positive_example_nll_weight"]:
        objective = "vapo"
        reader.copy(f"{_F}positive_example_nll_weight", "mu")
    elif reader[f"{_F}positive_example_nll_weight"]:
        reader.refuse(f"{_F}positive_example_nll_weight", f"{objective} has no likelihood beside it: terms=")
    reader.overrides["objective"] = objective
    if objective != "gpg":
        reader.copy(f"{_F}ratio_clip_min", "clip_low")
        reader.copy(f"{_F}ratio_clip_max", "clip_high")
    if objective in ("ppo", "vapo"):
        reader.copy(f"{_F}ratio_clip_c", "clip_ratio_c")
    elif reader[f"{_F}ratio_clip_c"] is not None:
        reader.refuse(f"{_F}ratio_clip_c", f"{objective} has no dual clip here")
    by_token = reader.take(f"{_F}token_level_loss")
    reader.overrides["aggregation"] = "token-mean" if by_token else "seq-mean-token-mean"


def _nemo_corrections(reader: Reader) -> None:
    prefix = f"{_F}truncated_importance_sampling_"
    kind = reader.take(f"{prefix}type")
    reader.known("truncated_importance_sampling_type", kind, (None, "tis", "icepop", "seq-mask-tis"))
    level = "sequence" if reader[f"{_F}sequence_level_importance_ratios"] else "token"
    bounds: dict[str, Any] = {"low": None, "high": None}
    if kind is not None:
        bounds = {"low": reader.take(f"{prefix}ratio_min") or None, "high": reader.take(f"{prefix}ratio")}
    if kind == "seq-mask-tis":
        low, high = (None if x is None else float(torch.tensor(x).double().log()) for x in bounds.values())
        reader.correct(RejectionMask, divergence="seq_mean_k1", low=-high if high else None, high=-low if low else None)
        bounds = {"low": None, "high": None}
    reader.correct(ImportanceWeights, level=level, mode="mask" if kind == "icepop" else "truncate", **bounds)


# ------------------------------------------------------------------ slime


def from_slime(arguments: Sequence[str] | Mapping[str, object]) -> Translation:
    """Translate arguments of slime 0.3.

    Args:
        arguments: those of its command line (``["--eps-clip", "0.2", "--use-kl-loss"]``), or a mapping of their names with
            underscores. What is left out has slime's default; those of Megatron and SGLang belong to the run.

    Returns:
        A :class:`Translation`, which does what slime does with these settings, by its defaults too: GRPO without KL, the mean
        of each answer's mean.

    Raises:
        ValueError: for an advantage, loss or estimator that slime does not know either.

    Example:
        >>> found = from_slime(["--n-samples-per-prompt", "8", "--eps-clip-high", "0.28", "--disable-grpo-std-normalization"])
        >>> found.algorithm, found.overrides["advantage"], found.overrides["clip_high"], found.overrides["aggregation"]
        ('grpo', 'dr_grpo', 0.28, 'seq-mean-token-mean')
    """
    given = dict(arguments) if isinstance(arguments, Mapping) else _slime_arguments(arguments)
    reader = Reader("slime", SLIME, given)
    for name in [name for name in given if name not in SLIME]:
        reader.place("outside", name, note="of Megatron, SGLang or the run")
    loss = reader.take("loss_type")
    reader.known("loss_type", loss, ("policy_loss", "sft_loss", "custom_loss"))
    if loss == "custom_loss":
        reader.refuse("loss_type", "pass the function to PolicyLoss")
    by_token = reader.take("calculate_per_token_loss")
    reader.overrides["aggregation"] = "token-mean" if by_token else "seq-mean-token-mean"
    if loss == "sft_loss":
        return reader.finish("sft")
    algorithm: Any = reader.choose("advantage_estimator").here
    own = reader.overrides
    low, high = reader.take("eps_clip"), reader["eps_clip_high"]
    own |= {"clip_low": low, "clip_high": low if high is None else reader.take("eps_clip_high")}
    if own["objective"] != "ppo" and reader["eps_clip_c"] is not None:
        reader.refuse("eps_clip_c", f"{own['objective']} has no dual clip here")
    _slime_advantage(reader)
    own["kl_loss"] = "none"
    if reader.take("use_kl_loss"):
        estimator = reader.choose("kl_loss_type").here
        unbiased = reader.take("use_unbiased_kl")
        own["kl_loss"] = UNCLAMPED_K3 if unbiased else estimator
        if unbiased and estimator != "k3":
            reader.refuse("use_unbiased_kl", f"times the ratio here is k3 alone, not {estimator}")
        reader.copy("kl_loss_coef", "kl_loss_coeff")
    if reader.take("kl_coef"):
        reader.refuse("kl_coef", "")
    reader.copy("entropy_coef", "entropy_coeff")
    if reader.take("use_tis"):
        low_high = {"low": reader.take("tis_clip_low") or None, "high": reader.take("tis_clip")}
        reader.correct(ImportanceWeights, level="token", mode="truncate", **low_high)
    if reader.take("use_opsm"):
        reader.correct(OffPolicySequenceMask, delta=reader.take("opsm_delta"))
    reader.group(algorithm, "n_samples_per_prompt")
    return reader.finish(algorithm, reader.sample("rollout_temperature", "rollout_top_p", "rollout_top_k"))


def _slime_advantage(reader: Reader) -> None:
    own, scaled = reader.overrides, reader["n_samples_per_prompt"] > 1
    whitens = own["advantage"].startswith("reinforce_plus_plus")
    if own["advantage"] == "grpo":
        if not (reader.take("grpo_std_normalization") and scaled):
            own["advantage"] = "dr_grpo"
        if not reader.take("rewards_normalization"):
            own["advantage"] = "reinforce"
    if own["advantage"] != "gae" and bool(reader["normalize_advantages"]) != whitens:
        what = "always whitened here" if whitens else "not whitened over the batch here"
        reader.refuse("normalize_advantages", f"the advantage {own['advantage']} is {what}")
    elif whitens:
        reader.take("normalize_advantages")


def _slime_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags and values of a command line, by name."""
    found: dict[str, Any] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            found[name] = read_scalar(value) if value else True
        elif name and found[name] is True:
            found[name] = read_scalar(word)
        else:
            raise ValueError(f"expected '--name value' or '--flag', got {word!r}.")
    for flag in ("grpo_std_normalization", "rewards_normalization"):
        if found.pop(f"disable_{flag}", None):
            found[flag] = False
    return found
