"""From a name and models to something that trains."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

from tensordict import NestedKey
from torch import nn

from torchrl_llm_kl.advantages import Advantage, advantage_spec, get_advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._models import (
    check_loss_args,
    exact_reference,
    reference_to_score,
    scoring_settings,
    to_score,
)
from torchrl_llm_kl.algorithms._overrides import apply_overrides
from torchrl_llm_kl.algorithms._parts import AlgorithmParts
from torchrl_llm_kl.algorithms._schema import SCHEMAS
from torchrl_llm_kl.algorithms._selection import KeepBest
from torchrl_llm_kl.algorithms.presets import ALGORITHMS
from torchrl_llm_kl.losses import (
    EntropyBonus,
    KLPlacementWarning,
    KLToReference,
    PolicyLoss,
    TermPart,
    ValueLoss,
    check_placement,
)
from torchrl_llm_kl.rollouts import MaskingStrategy
from torchrl_llm_kl.scoring import LogProbScorer
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue
from torchrl_llm_kl.transforms._located import Scope

__all__ = ["UnknownAlgorithmError", "get_algorithm", "make_algorithm"]


class UnknownAlgorithmError(ValueError):
    """The name is not registered; the message lists those that are."""


def get_algorithm(name: str) -> Algorithm:
    """Look a preset up by name.

    Raises:
        UnknownAlgorithmError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> get_algorithm("dapo").objective
        'dapo'
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    near = difflib.get_close_matches(str(name), ALGORITHMS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownAlgorithmError(f"unknown algorithm {name!r}; known: {', '.join(sorted(ALGORITHMS))}.{hint}")


def make_algorithm(
    algorithm: str | Algorithm,
    actor: Any,
    *,
    reference: Any = None,
    critic: nn.Module | None = None,
    gen_model: Any = None,
    group_key: NestedKey | None = None,
    group_size: int | None = None,
    temperature: float = 1.0,
    masking_strategy: MaskingStrategy = "sft",
    max_len: int | None = None,
    loss_args: dict[str, Any] | None = None,
    **overrides: Any,
) -> AlgorithmParts:
    """An algorithm, ready to train an actor.

    Args:
        algorithm: a name in :data:`ALGORITHMS`, or a preset of one's own.
        actor: what :class:`~torchrl_llm_kl.losses.PolicyLoss` takes. Temperature and ``dtype`` of a scorer hold for the
            reference too.

    Keyword Args:
        reference: the frozen reference model, the teacher for distillation, or a scorer of it with the actor's temperature
            and ``dtype``; ``"base"`` for the actor without its PEFT adapters; ``"data"`` if the data holds
            ``("next", "ref_log_probs", "full")``.
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, for algorithms that have one.
        gen_model: what scores the policy's own tokens: the actor by default; ``"from_collector"`` for a
            :attr:`~AlgorithmParts.kl_transform` in the env of a collector with another copy of the policy.
        group_key: which entry is equal for all answers to a prompt; see :class:`~torchrl_llm_kl.advantages.Advantage`.
        group_size: instead, how many consecutive rows are.
        temperature: of the sampler; divides the logits of policy and reference.
        masking_strategy: which tokens count: ``"sft"``, ``"rlhf"`` or ``"generic"``.
        max_len: the longest response that is sampled, for objectives that divide by it (``dr_grpo``).
        loss_args: further arguments of :class:`~torchrl_llm_kl.losses.PolicyLoss`: ``corrections``, ``tokens_per_batch``,
            ``dtype`` (with which old log-probs and the reference's are scored too), ...
        overrides: fields of :class:`Algorithm`; hyper-parameters of its objective or its advantage; or keys of Trinity-RFT's
            ``algorithm`` section (``policy_loss_fn_args``, ``kl_loss_fn``, ...).

    Returns:
        :class:`AlgorithmParts`: ``prepare(batch)`` scores and writes advantages, ``loss(batch)`` is what to minimise.

    Raises:
        ValueError: if a model is missing that the algorithm needs, or one is given that nothing needs; if a scorer has other
            settings than the actor's.
        TypeError: if there is no such setting, or ``loss_args`` holds what is said to this function itself.

    Warns:
        KLPlacementWarning: if an estimator stands where its gradient is not that of the reverse KL.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> actor, reference = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config)
        >>> grpo = make_algorithm("grpo", actor, reference=reference, group_size=2, clip_high=0.28)
        >>> full = torch.tensor([[3, 4, 5], [3, 4, 6]])
        >>> tokens = TensorDict(prompt=full[:, :2], full=full, batch_size=[2])
        >>> reward = torch.tensor([[1.0], [0.0]])
        >>> batch = grpo.prepare(TensorDict(tokens=tokens, next=TensorDict(reward=reward, batch_size=[2]), batch_size=[2]))
        >>> batch["advantage"].squeeze(-1)
        tensor([ 0.7071, -0.7071])
        >>> out = grpo.loss(batch)
        >>> (out["loss_objective"] + out["loss_kl_to_ref"]).backward()
    """
    preset = get_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    preset = apply_overrides(preset, overrides)
    _check_models(preset, reference, critic)
    grouping = _grouping(preset, group_key, group_size)
    if critic is not None and masking_strategy == "generic":
        raise ValueError(
            "masking_strategy='generic' with a critic: values and returns are of what the assistant said, and prompts would "
            "be taught a return of 0. Use 'sft' or 'rlhf'"
        )
    loss_args = dict(loss_args or {})
    check_loss_args(loss_args)
    scoring = scoring_settings(actor, temperature, loss_args)  # one for old and current log-probs, and the reference's
    scored_reference = reference_to_score(actor, reference, scoring)
    check_placement(preset.kl_reward, "reward", stacklevel=2)
    check_placement(preset.kl_loss, "loss", stacklevel=2)

    settings: dict[str, Any] = {} if isinstance(actor, LogProbScorer) else {"temperature": temperature}
    scope: Scope = "full" if masking_strategy == "rlhf" else "turn"
    loss = PolicyLoss(
        actor,
        preset.objective,
        terms=_terms(preset),
        aggregation=preset.aggregation,
        max_len=max_len,
        masking_strategy=masking_strategy,
        reference=exact_reference(actor, reference, scoring) if preset.kl_loss == "exact" else None,
        **settings,
        **loss_args,
        **preset.objective_args,
    )
    advantage = _advantage(preset, masking_strategy, grouping)
    keys = {key for part in (loss, advantage) if part is not None for key in part.in_keys}
    kl_transform = _kl_transform(
        preset,
        to_score(actor if gen_model is None else gen_model, scoring, "actor" if gen_model is None else "gen_model"),
        scored_reference,
        reads_old=("next", "log_probs", "full") in keys,
        scope=scope,
        assistant_only=masking_strategy != "generic",
        **scoring,
    )
    return AlgorithmParts(
        preset,
        SCHEMAS[preset.schema],
        loss,
        kl_transform=kl_transform,
        value_transform=None if critic is None else RetrieveValue(critic, scope=scope),
        advantage=advantage,
        selection=KeepBest(**grouping) if preset.keep_best else None,
        critic_loss=None if critic is None else ValueLoss(critic, masking_strategy=masking_strategy),
    )


def _needs_reference(preset: Algorithm) -> bool:
    return preset.use_reference or preset.schema == "distill"


def _grouping(preset: Algorithm, key: NestedKey | None, size: int | None) -> dict[str, Any]:
    """How groups are told, for an algorithm that has some."""
    compares = preset.advantage is not None and "group" in advantage_spec(get_advantage(preset.advantage)).needs
    if compares or preset.keep_best:
        return {"group_key": key, "group_size": size}
    if key is not None or size is not None:
        raise ValueError(f"{preset.name} compares nothing within groups: leave out group_key and group_size")
    return {}


def _terms(preset: Algorithm) -> list[TermPart]:
    terms: list[TermPart] = []
    with warnings.catch_warnings():  # said where the caller is
        warnings.simplefilter("ignore", KLPlacementWarning)
        if preset.kl_loss != "none":
            terms.append(
                KLToReference(preset.kl_loss_coeff, preset.kl_loss, leave_out_experts=preset.leave_out_experts)
            )
    if preset.entropy_coeff != 0:
        terms.append(EntropyBonus(preset.entropy_coeff, leave_out_experts=preset.leave_out_experts))
    return terms


def _advantage(preset: Algorithm, masking_strategy: str, grouping: dict[str, Any]) -> Advantage | None:
    if preset.advantage is None:
        return None
    hyper = dict(preset.advantage_args)
    keys = dict(hyper.pop("keys", {}))
    if advantage_spec(get_advantage(preset.advantage)).kind == "token" and masking_strategy == "rlhf":
        keys = {"mask": ("masks", "all_assistant_mask"), **keys}
    return Advantage(preset.advantage, **grouping, keys=keys, **hyper)


def _kl_transform(
    preset: Algorithm, policy: Any, reference: Any, *, reads_old: bool, **scoring: Any
) -> RetrieveKL | RetrieveLogProb | None:
    if isinstance(reference, str) and reference == "data":
        return None
    if _needs_reference(preset):
        in_reward = preset.kl_reward != "none"
        return RetrieveKL(
            policy,
            reference,
            add_to_reward=in_reward,
            coeff=preset.kl_reward_coeff if in_reward else 1.0,
            estimator=preset.kl_reward if in_reward else "k1",
            **scoring,
        )
    return RetrieveLogProb(policy, log_probs_full_key=("log_probs", "full"), **scoring) if reads_old else None


def _check_models(preset: Algorithm, reference: Any, critic: Any) -> None:
    needs_reference = _needs_reference(preset)
    if needs_reference and reference is None:
        raise ValueError(
            f"{preset.name} compares with a {'teacher' if preset.schema == 'distill' else 'reference model'}: pass reference=, "
            "or reference='data' if the data holds ('next', 'ref_log_probs', 'full')"
            + ("" if preset.schema == "distill" else "; without one: use_reference=False, kl_loss='none'")
        )
    if reference is not None and not needs_reference:
        raise ValueError(
            f"{preset.name} has no use for a reference model: leave it out, or say use_reference=True and where the KL goes "
            "(kl_loss='k2' or kl_reward='k1')"
        )
    if isinstance(reference, str) and reference not in ("base", "data"):
        raise ValueError(f"reference must be a model, 'base' or 'data', got {reference!r}")
    if isinstance(reference, str) and reference == "data" and preset.kl_reward != "none":
        raise ValueError(
            f"kl_reward={preset.kl_reward!r} needs a reference model to score, got reference='data': pass the model, or put "
            "the KL into the reward before (KLRewardTransform) and say kl_reward='none'"
        )
    if preset.use_critic != (critic is not None):
        missing = f"{preset.name} trains a critic: pass critic=TokenCritic(model)"
        raise ValueError(missing if preset.use_critic else f"{preset.name} has no critic: leave critic= out")
