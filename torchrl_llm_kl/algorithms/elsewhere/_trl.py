"""Translation of TRL's configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from torchrl_llm_kl._foreign import TRAINING, TRL, Foreign, read_table
from torchrl_llm_kl._registry import did_you_mean, no_such
from torchrl_llm_kl.algorithms.elsewhere._translation import New, Reader, Translation
from torchrl_llm_kl.estimators import AdaptiveEntropyCoefficient, corrected_k3
from torchrl_llm_kl.losses import ImportanceWeights, OffPolicySequenceMask, TopEntropyMask, spec_of
from torchrl_llm_kl.scoring import Sampling

if TYPE_CHECKING:
    from transformers import TrainingArguments

Trainer = Literal["grpo", "rloo", "dpo", "kto", "sft", "cpo", "orpo", "gkd", "distillation", "tpo", "a2po", "iw_opd"]
#: k3 times the ratio to the sampler, without Trinity's clamp of the ratio.
UNCLAMPED_K3 = partial(corrected_k3, ratio_max=math.inf)


def from_trl(config: TrainingArguments | Mapping[str, object], *, trainer: Trainer = "grpo") -> Translation:
    """Translate a configuration of TRL 1.16.

    Args:
        config: a ``GRPOConfig``, ``RLOOConfig``, ``DPOConfig``, ``KTOConfig``, ``SFTConfig`` or ``DistillationConfig``, a
            ``CPOConfig``, ``ORPOConfig``, ``GKDConfig``, ``TPOConfig``, ``A2POConfig`` or ``IWOPDConfig`` of
            ``trl.experimental``, or a mapping with the settings of one of them. In a configuration object, the settings that
            differ from TRL's defaults count as given.

    Keyword Args:
        trainer: the trainer whose settings a mapping holds.

    Returns:
        A :class:`Translation` that reproduces TRL's algorithm with its defaults: no KL, ``loss_type="dapo"``, advantages over
        the standard deviation plus 1e-4, and the sequence mask on vLLM's log-probs.

    Raises:
        TypeError: for any other configuration. TRL's own subclasses of these count as other ones, since their loss differs.
        ValueError: for a value that TRL does not know.

    Example:
        >>> translation = from_trl({"beta": 0.04, "epsilon_high": 0.28, "learning_rate": 1e-6, "num_generations": 8})
        >>> translation.algorithm, translation.overrides["objective_args"]["clip_high"], translation.overrides["kl_loss_coeff"]
        ('dapo', 0.28, 0.04)
        >>> [(row.name, row.note) for row in translation.outside]
        [('learning_rate', 'set it in your optimiser or its schedule')]
        >>> from_trl({"num_generation": 8}).refused[0].note
        "TRL has no such setting. Did you mean 'num_generations'?"
    """
    if not isinstance(config, Mapping):
        trainer, config = _trainer_of(config), _changed_settings(config)
    if trainer not in get_args(Trainer):
        hint = _removed(trainer) or did_you_mean(trainer, TRL)
        raise ValueError(no_such("unknown trainer", trainer, get_args(Trainer), hint=hint))
    reader = Reader("TRL", {**_training_rows(), **TRAINING, **TRL[trainer]}, config)
    return _READ[trainer](reader)


_REMOVED = {row["name"]: row["note"] for row in read_table("elsewhere/removed.csv")}
_CLASSES = {"distillation": "Distillation", "iw_opd": "IWOPD"}


def _removed(name: str) -> str:
    """The end of a message about a trainer that TRL removed, or whose loss is not available here."""
    note = _REMOVED.get(name)
    return f" TRL's {name.upper()} is not translated: {note}." if note else ""


def _trainer_of(config: object) -> Trainer:
    """The trainer of a configuration. Users' subclasses have the trainer of their base, TRL's own subclasses do not."""
    kinds: dict[str, Trainer] = {f"{_CLASSES.get(name, name.upper())}Config": name for name in get_args(Trainer)}
    for base in type(config).__mro__:
        if base.__name__ in kinds:
            return kinds[base.__name__]
        if base.__module__.partition(".")[0] == "trl":
            break
    name = type(config).__name__
    hint = _removed(name.removesuffix("Config").lower())
    raise TypeError(f"from_trl takes {', '.join(kinds)} or a mapping of settings, got {name}.{hint}")


def _training_rows() -> dict[str, Foreign]:
    """Rows for all of transformers' TrainingArguments."""
    from transformers import TrainingArguments

    note = "an argument of transformers' trainer: it belongs to the training loop"
    return {f.name: Foreign("TRL", f.name, None, "outside", "", note) for f in dataclasses.fields(TrainingArguments)}


def _changed_settings(config: TrainingArguments) -> dict[str, object]:
    """The settings of a configuration that differ from a configuration without arguments."""
    fields = [f for f in dataclasses.fields(config) if f.init]
    default: object = None
    # The constructor fails if it names an accelerator that this machine lacks. Then compare with the plain defaults.
    with warnings.catch_warnings(), contextlib.suppress(TypeError, ValueError, RuntimeError):
        warnings.simplefilter("ignore")
        default = type(config)(output_dir=config.output_dir, use_cpu=config.use_cpu, bf16=config.bf16)
    plain = {f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default for f in fields}
    values = {f.name: getattr(config, f.name) for f in fields}
    return {
        name: value
        for name, value in values.items()
        if value != (plain[name] if default is None or name in ("output_dir", "use_cpu") else getattr(default, name))
        and value is not dataclasses.MISSING
    }


# ------------------------------------------------------------------ GRPO


def _read_grpo(reader: Reader) -> Translation:
    kind, level = reader["loss_type"], reader.choose("importance_sampling_level").here
    algorithm = reader.preset("loss_type")
    objective, aggregation = str(reader.overrides["objective"]), str(reader.overrides["aggregation"])
    if level == "sequence" and objective in ("ppo", "dapo", "dr_grpo"):
        objective = "luspo" if kind == "luspo" else "gspo"
        algorithm = "gspo" if kind == "grpo" else algorithm
    elif level == "sequence" and kind != "vespo":
        reader.refuse("importance_sampling_level", f"{kind} has the ratio of each token here")
    reader.overrides["objective"] = objective
    if kind == "dr_grpo":  # its loss divides by the maximal length
        reader.copy("max_completion_length")
        if reader["max_completion_length"] is None:
            reader.refuse("max_completion_length", "the loss divides by it: pass a number")
    _grpo_bounds(reader, kind, objective)
    _grpo_advantage(reader)
    _grpo_kl(reader, level)
    _grpo_entropy(reader, aggregation)
    _grpo_corrections(reader, kind)
    reader.group(algorithm, "num_generations")
    return reader.finish(algorithm, reader.sample("temperature", "top_p", "top_k", "min_p"))


def _clip_bounds(reader: Reader) -> tuple[float, float]:
    """TRL's epsilon and epsilon_high, which is epsilon by default."""
    low, high = reader.take("epsilon"), reader.take("epsilon_high")
    return low, low if high is None else high


def _grpo_bounds(reader: Reader, kind: str, objective: str) -> None:
    if objective in ("sapo", "vespo"):
        return
    if objective == "cispo":
        name = "epsilon" if reader["epsilon_high"] is None else "epsilon_high"
        bound = reader.take(name)
        reader.objective["clip_low"] = 1.0  # TRL clips the weight only from above
        if bound >= 1:
            reader.objective["clip_high"] = bound - 1
        else:
            reader.refuse(name, f"TRL's cispo bounds the weight itself, here 1 + clip_high does: {bound} is below 1")
    else:
        low, high = _clip_bounds(reader)
        reader.objective.update(clip_low=low, clip_high=high)
        if objective in ("ppo", "dapo", "dr_grpo"):
            reader.objective["clip_ratio_c"] = None  # TRL has no dual clip unless delta is given
        delta = reader["delta"]
        if delta is not None and objective in ("gspo", "luspo"):
            reader.refuse("delta", "a sequence's ratio has no dual clip here")
        elif delta is not None and delta < 1 + high:
            reader.refuse("delta", f"it bounds gains too, below 1 + epsilon_high = {1 + high:g}: pass at least that")
        elif delta is not None:
            reader.copy("delta")


def _grpo_advantage(reader: Reader) -> None:
    if reader["multi_objective_aggregation"] != "sum_then_normalize":
        reader.choose("multi_objective_aggregation")
        if reader["reward_weights"] is not None:
            reader.copy("reward_weights")
        return
    reader.out("reward_weights", "weigh the rewards before they are added up")
    scale = reader["scale_rewards"]
    reader.choose("scale_rewards", {True: "group", False: "none"}[scale] if isinstance(scale, bool) else scale)


def _grpo_kl(reader: Reader, level: str) -> None:
    reader.overrides["kl_loss"] = "none"
    if reader.take("beta") == 0:
        return
    if reader["use_bias_correction_kl"] and level == "sequence":
        reader.refuse("use_bias_correction_kl", "TRL multiplies the KL by the sequence's ratio")
        return
    reader.overrides["kl_loss"] = UNCLAMPED_K3 if reader.take("use_bias_correction_kl") else "k3"
    reader.overrides["kl_loss_coeff"] = reader["beta"]


def _grpo_entropy(reader: Reader, aggregation: str) -> None:
    adaptive, coeff = reader["use_adaptive_entropy"], reader["entropy_coef"]
    if not adaptive and coeff == 0:
        return
    name = "use_adaptive_entropy" if adaptive else "entropy_coef"
    if aggregation != "token-mean":
        reader.refuse(name, f"TRL averages the entropy over tokens, here it is {aggregation} like the loss")
    elif reader["top_entropy_quantile"] < 1:
        reader.refuse(name, "with top_entropy_quantile TRL's bonus covers only the chosen tokens, here it covers all")
    elif adaptive:
        names = {"entropy_coef": "init", "entropy_target": "target", "entropy_coef_delta": "delta"}
        names |= {"entropy_coef_min": "low", "entropy_coef_max": "high"}
        reader.take(name)
        settings = {own: reader.take(name) for name, own in names.items()}
        reader.overrides["entropy_coeff"] = New(AdaptiveEntropyCoefficient, **settings)
    else:
        reader.copy("entropy_coef")


def _grpo_corrections(reader: Reader, kind: str) -> None:
    use, correction = "use_vllm", "vllm_importance_sampling_correction"
    vllm = reader[use] and reader[correction]
    if reader["off_policy_mask_threshold"] is not None:
        if vllm:
            reader.refuse("off_policy_mask_threshold", "TRL compares with vLLM's log-probs, here with old ones")
        else:
            reader.correct(OffPolicySequenceMask, delta=reader.take("off_policy_mask_threshold"))
    fraction = reader["top_entropy_quantile"]
    if fraction == 0:
        reader.refuse("top_entropy_quantile", "0 keeps only one token: pass a fraction above 0")
    elif fraction < 1:
        reader.correct(TopEntropyMask, fraction=reader.take("top_entropy_quantile"))
    if not reader[use]:
        return
    reader.take(use)
    if vllm and kind == "vespo":
        reader.refuse(correction, "TRL multiplies these weights into the sequence's weight")
    elif reader.take(correction):
        _vllm_weights(reader)


def _vllm_weights(reader: Reader) -> None:
    prefix = "vllm_importance_sampling_"
    given = reader.take(f"{prefix}mode")
    known = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]
    reader.known(f"{prefix}mode", given, known)
    level, _, mode = given.partition("_")
    high = f"{prefix}clip_max" if reader[f"{prefix}cap"] is None else f"{prefix}cap"
    low, high = reader.take(f"{prefix}clip_min"), reader.take(high)
    reader.correct(ImportanceWeights, level=level, mode=mode, low=low, high=high)


# ------------------------------------------------------------------ RLOO


def _rloo(reader: Reader) -> Translation:
    reader.overrides |= {"objective": "ppo", "aggregation": "seq-mean-token-sum"}
    low, high = _clip_bounds(reader)
    reader.objective.update(clip_low=low, clip_high=high, clip_ratio_c=None)
    # An answer is reused if several optimiser steps follow one generation.
    steps, accumulated = (reader[name] or 1 for name in ("steps_per_generation", "gradient_accumulation_steps"))
    reused = "num_iterations" if reader["num_iterations"] > 1 else "steps_per_generation"
    if reader["num_iterations"] > 1 or steps > accumulated:
        reader.refuse(reused, "TRL clips the ratio of the whole answer, here of each token: equal only on policy")
    reader.overrides["kl_loss"] = "none"
    if reader.take("beta") != 0:
        reader.overrides |= {"kl_reward": "k1", "kl_reward_coeff": reader["beta"]}
    reader.group("rloo", "num_generations")
    return reader.finish("rloo", reader.sample("temperature", "top_p", "top_k", "min_p"))


# ------------------------------------------------------------------ preferences, and experts' answers


def _dpo(reader: Reader) -> Translation:
    given = reader["loss_type"]
    kinds = [given] if isinstance(given, str) else list(given)
    parts = [reader.choose("loss_type", kind) for kind in kinds or [None]]
    names: list[str] = []
    if len(parts) > 1 or parts[0].here == "sft":
        names = [part.here + "_norm" * ("objective_args.length_normalised" in part.overrides) for part in parts]
        reader.overrides["objective"] = "preference_sum"
        reader.objective["losses"] = names
        reader.objective.pop("length_normalised", None)
        if {"aot", "aot_unpaired"} & {*names}:
            reader.refuse("loss_type", "aot compares whole batches and cannot be summed with other losses")
        if reader["loss_weights"] is not None:
            reader.copy("loss_weights")
        if "sft" in names and reader["use_weighting"]:
            reader.refuse("use_weighting", "TRL weighs the likelihood too, here only the pairs are weighted")
        if reader["f_divergence_type"] != "reverse_kl":
            reader.refuse("f_divergence_type", "a sum of losses has the reverse KL here")
    spec = spec_of(str(reader.overrides["objective"]))
    reader.copy("beta")
    if reader["ld_alpha"] is not None:
        _option(reader, spec.hyper, "ld_alpha", "ld_alpha", reader["ld_alpha"])
    if reader["use_weighting"] and "sft" not in names:
        _option(reader, spec.hyper, "use_weighting", "weighting", "aligned")
    divergence, alpha = reader["f_divergence_type"], reader["f_alpha_divergence_coef"]
    if divergence != "reverse_kl" and "f_divergence" in spec.hyper:
        reader.take("f_divergence_type")
        if divergence == "alpha_divergence":
            reader.take("f_alpha_divergence_coef")
            if not 0 <= alpha <= 1:
                reader.refuse("f_alpha_divergence_coef", f"f_alpha = 1 - {alpha} must be in (0, 1]")
            elif alpha == 1:
                divergence = "reverse_kl"
            else:
                reader.objective["f_alpha"] = 1 - alpha
        reader.objective["f_divergence"] = divergence
    return reader.finish("dpo")


def _option(reader: Reader, accepted: Collection[str], name: str, own: str, value: object) -> None:
    if own in accepted:
        reader.take(name)
        reader.objective[own] = value
    else:
        reader.refuse(name, f"{reader.overrides['objective']} has no {own} here")


def _kto(reader: Reader) -> Translation:
    reader.choose("loss_type")
    reader.copy("beta", "desirable_weight", "undesirable_weight")
    return reader.finish("kto")


def _sft(reader: Reader) -> Translation:
    reader.choose("loss_type")
    reader.overrides["aggregation"] = "token-mean"
    return reader.finish("sft")


def _cpo(reader: Reader) -> Translation:
    preset = reader.preset("loss_type")
    if reader["alpha"] != 0:
        reader.copy("alpha")
    reader.copy("beta")
    if preset == "cpo":
        reader.copy("cpo_alpha")
        reader.objective["nll_aggregation"] = "token-mean"
    elif reader["loss_type"] == "simpo" and reader["cpo_alpha"] != 0:
        reader.refuse("cpo_alpha", "simpo has no likelihood term: 0, which alphapo implies, is SimPO's own loss")
    elif reader["loss_type"] == "simpo":
        reader.take("cpo_alpha")
    return reader.finish(preset)


def _orpo(reader: Reader) -> Translation:
    beta = reader.take("beta", "TRL's likelihood covers prompt and answer, here it covers only the answer")
    reader.objective.update(beta=beta, nll_aggregation="token-mean")
    return reader.finish("orpo")


def _gkd(reader: Reader) -> Translation:
    reader.copy("beta")
    reader.overrides["aggregation"] = "token-mean"
    reader.place("outside", "lmbda", "seq_kd")
    if "temperature" in reader.given:
        reader.place("sampling", "temperature")
    return reader.finish("gkd", Sampling(temperature=float(reader["temperature"])))


def _distillation(reader: Reader) -> Translation:
    reader.copy("beta")
    reader.overrides["aggregation"] = "token-mean"
    return reader.finish("gkd", reader.sample("temperature", "top_p", "top_k", "min_p"))


def _tpo(reader: Reader) -> Translation:
    reader.choose("loss_type")
    return reader.finish("tpo")


def _a2po(reader: Reader) -> Translation:
    reader.copy("beta2")
    return reader.finish("a2po", reader.sample("temperature", "top_p", "top_k"))


def _iw_opd(reader: Reader) -> Translation:
    reader.known("distillation_objective", reader["distillation_objective"], ("iw_opd", "jsd"))
    if reader.take("distillation_objective") == "jsd":
        reader.refuse("distillation_objective", "the divergence is gkd's: trainer='distillation'")
    reader.copy("iw_opd_gamma")
    return reader.finish("iw_opd", reader.sample("temperature", "top_p", "top_k"))


_RULES = (_read_grpo, _rloo, _dpo, _kto, _sft, _cpo, _orpo, _gkd, _distillation, _tpo, _a2po, _iw_opd)
_READ: dict[Trainer, Callable[[Reader], Translation]] = dict(zip(get_args(Trainer), _RULES, strict=True))
