"""Translation of Trinity-RFT's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from torchrl_llm_kl._foreign import CHOICES, TRINITY
from torchrl_llm_kl._registry import Spec, flatten
from torchrl_llm_kl.advantages import advantage_spec
from torchrl_llm_kl.algorithms.elsewhere._translation import New, Reader, Translation, read_mapping
from torchrl_llm_kl.algorithms.presets import get_algorithm
from torchrl_llm_kl.estimators import ScheduledCoefficient
from torchrl_llm_kl.losses import spec_of

if TYPE_CHECKING:
    from torchrl_llm_kl.advantages import AdvantageName

#: Defaults of Trinity's loss constructors. They apply if some arguments are given. Otherwise `default_args` applies.
_CONSTRUCTOR = {"rec": {"epsilon_low_prime": 0.4, "epsilon_high_prime": 0.4}}
_DEFAULT_ARGS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0},
    "mix": {"clip_low": 0.2, "clip_high": 0.2},
    "rec": {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
#: Losses that need a clip range if any of their arguments is given.
_NEED_CLIP = ("ppo", "gspo", "mix", "mix_chord")
#: The aggregation of Trinity's constructors if `policy_loss_fn_args` leaves it out.
_OWN_AGGREGATION = {"gspo": "seq-mean-token-mean"}
#: Arguments of `mix_chord` -> arguments of its `ScheduledCoefficient`.
_SCHEDULE = {"mu_peak": "peak", "mu_valley": "valley", "mu_warmup_steps": "warmup", "mu_decay_steps": "decay"}
#: Algorithms without an entropy loss in Trinity's defaults.
_WITHOUT_ENTROPY = ("sft", "asymre", "raft", "sppo", "on_policy_distill", "jsd")
#: Objectives that ignore Trinity's `loss_agg_mode`.
_WITHOUT_AGGREGATION = ("dpo", "rec")
_P = "algorithm.policy_loss_fn_args."


def from_trinity(config: str | os.PathLike[str] | Mapping[str, object]) -> Translation:
    """Translate a configuration of Trinity-RFT 0.6.

    Args:
        config: a whole configuration or its section ``algorithm``, as the path of a YAML file, YAML text, or a mapping.

    Returns:
        A :class:`Translation` that reproduces Trinity's algorithm with its defaults. The aggregation is ``token-mean`` for
        every algorithm. One answer is sampled unless ``repeat_times`` is given. ``dapo`` clips at 0.2 on both sides.
        ``docs/differences.md`` lists the differences of the losses that no setting removes.

    Raises:
        ValueError: for an unknown algorithm or function, or arguments that Trinity refuses.

    Example:
        >>> translation = from_trinity('''
        ... algorithm:
        ...   algorithm_type: grpo
        ...   repeat_times: 8
        ...   kl_loss_fn_args: {kl_coef: 0.01}
        ...   optimizer: {lr: 1e-6}
        ... ''')
        >>> translation.algorithm, translation.overrides["group_size"], translation.overrides["kl_loss_coeff"]
        ('grpo', 8, 0.01)
        >>> [row.name for row in translation.outside if row.given]
        ['algorithm.optimizer.lr']
    """
    settings = read_mapping(config, "a configuration of Trinity-RFT")
    if "algorithm" not in settings and any(f"algorithm.{name}" in TRINITY for name in settings):
        settings = {"algorithm": settings}
    reader = Reader("Trinity-RFT", TRINITY, flatten(settings))
    # An explicit null equals a missing setting in Trinity.
    for name in [name for name, value in reader.given.items() if value is None and name in TRINITY]:
        if TRINITY[name].place == "override" and TRINITY[name].default is None:
            reader.out(name, "nothing to do: null is Trinity's default")
    kind = reader["algorithm.algorithm_type"]
    if kind == "cpt":
        raise ValueError("cpt trains on all tokens: use make_algorithm('sft', actor, masking_strategy='generic').")
    algorithm = reader.preset("algorithm.algorithm_type")
    preset = get_algorithm(algorithm)
    objective = _read_objective(reader, "ppo" if kind == "dapo" else preset.spec.name)
    if preset.advantage is not None:
        _read_advantage(reader, preset.advantage)
    trains: dict[str, object] = {"kl_loss": preset.kl_loss, "kl_reward": "none"}
    if kind == "dpo":
        for name in [name for name in reader.given if name.startswith("algorithm.kl_loss_fn")]:
            reader.refuse(name, "the objective is KL-regularised already, and Trinity adds another KL")
    else:
        _read_kl(reader, "kl_loss", trains)
    _read_kl_reward(reader, trains)
    _read_entropy(reader)
    _read_aggregation(reader, objective)
    if kind == "raft":
        reader.overrides["keep_best"] = False  # Trinity trains on all answers that its workflow returns
    _mixture(reader, preset.schema)
    reader.verls_corrections("algorithm.rollout_correction.")
    if reader["algorithm.bypass_old_logprobs"] and preset.on_policy and kind != "raft":
        reader.place("outside", "algorithm.bypass_old_logprobs")
    else:
        reader.out("algorithm.bypass_old_logprobs", "nothing to do: old log-probs are scored here")
    if reader["algorithm.repeat_times"] is None:
        reader.given.pop("algorithm.repeat_times")
    if kind in ("sft", "dpo", "raft"):
        reader.out("algorithm.repeat_times", "a setting of the sampler")
    else:
        reader.group(algorithm, "algorithm.repeat_times")
    return reader.finish(algorithm, reader.sample("model.temperature", "model.top_p", "model.top_k"))


def _arguments(reader: Reader, spec: Spec, prefix: str) -> dict[str, object]:
    """Trinity's arguments of a function, under the names of our hyper-parameters. A null keeps the default."""
    given: dict[str, object] = {}
    # Arguments with two names come first, so that a bound of one side replaces a bound of both sides.
    for name, own in sorted(_own_names(reader, prefix).items(), key=lambda item: -len(item[1])):
        if own and set(own) <= {*spec.hyper}:
            reader.take(name, f"{spec.name}'s")
            if reader[name] is not None or own == ["clip_ratio_c"]:
                given |= dict.fromkeys(own, reader[name])
    return given


def _own_names(reader: Reader, prefix: str) -> dict[str, list[str]]:
    """Map Trinity's arguments of a function to the names of our hyper-parameters."""
    rows = {name: reader.rows.get(name) for name in reader.given if name.startswith(prefix)}
    return {name: row.own_names if row else [name.removeprefix(prefix)] for name, row in rows.items()}


def _has_loss_args(reader: Reader) -> bool:
    """Whether `policy_loss_fn_args` is given. Trinity then does not use its `default_args`."""
    return any(name.startswith(_P) or (name == _P[:-1] and value is not None) for name, value in reader.given.items())


def _read_objective(reader: Reader, default: str) -> str:
    """Set the objective and its hyper-parameters, and return the objective's name."""
    name = reader["algorithm.policy_loss_fn"] or default
    fallback = f"{_P}fallback_to_policy_gradient"
    if name == "ppo" and reader.given.get(fallback):
        reader.take(fallback)
        for path, names in _own_names(reader, _P).items():
            if names and set(names) <= {*spec_of(name).hyper}:
                reader.out(path, "nothing to do: the ratio is 1, and nothing is clipped")
        name = "ppo_on_policy"
    spec = spec_of(name)
    notes = {"sapo": "Trinity has no gradient through the gate", "dpo": "Trinity adds the batch up to one pair"}
    reader.take("algorithm.policy_loss_fn", notes.get(name, ""))
    schedule: dict[str, object] = {}
    for key, own_name in _SCHEDULE.items() if name == "mix_chord" else ():
        if f"{_P}{key}" in reader.given:
            schedule[own_name] = reader.take(f"{_P}{key}", "of a `ScheduledCoefficient`: call `update` after each step")
    written, own = _has_loss_args(reader), _arguments(reader, spec, _P)
    if schedule:
        own["mu"] = New(ScheduledCoefficient, **schedule)
    if written and name in _NEED_CLIP and not {"clip_low", "clip_high"} <= own.keys():
        raise ValueError(f"Trinity's {name} needs clip_range (or _low and _high) if policy_loss_fn_args is given.")
    own = _effective(spec, {**(_CONSTRUCTOR if written else _DEFAULT_ARGS).get(name, {}), **own})
    reader.overrides["objective"] = name
    reader.objective.update(own)
    return str(name)


def _effective(spec: Spec, own: dict[str, object]) -> dict[str, object]:
    """Leave out the hyper-parameters that the others make ineffective. Trinity ignores them too."""
    unused = spec.unused(own)
    return {key: value for key, value in own.items() if key not in unused}


def _read_advantage(reader: Reader, default: str) -> None:
    """Set the advantage and its hyper-parameters."""
    given = reader.take("algorithm.advantage_fn")
    renamed = CHOICES["Trinity-RFT", "", "algorithm.advantage_fn"]
    spec = advantage_spec(cast("AdvantageName", renamed[given].here if given in renamed else given or default))
    own = _effective(spec, _arguments(reader, spec, "algorithm.advantage_fn_args."))
    if spec.name == "gae":
        own["whiten"] = True  # Trinity always whitens
    reader.overrides["advantage"] = spec.name
    reader.advantage.update(own)


def _read_kl(reader: Reader, place: str, trains: dict[str, object]) -> None:
    """Set the KL of one place from Trinity's `kl_loss_fn` or `kl_penalty_fn`."""
    name = f"algorithm.{'kl_loss_fn' if place == 'kl_loss' else 'kl_penalty_fn'}"
    estimator = reader.take(name) or trains[place]
    trains[place] = reader.overrides[place] = estimator
    if estimator == "none":
        return
    coeff = reader.take(f"{name}_args.kl_coef")
    if reader[f"{name}_args.adaptive"]:
        reader.take(f"{name}_args.adaptive")
        coeff = reader.adaptive(coeff, f"{name}_args.")
    reader.overrides[f"{place}_coeff"] = coeff


#: Advantages that Trinity computes in its trainer. Only these see the KL in the reward.
_IN_TRAINER = ("gae", "reinforce_plus_plus", "rloo", "remax", "on_policy_distill", "jsd", "clip_b", "clip_v")


def _read_kl_reward(reader: Reader, trains: dict[str, object]) -> None:
    given = reader["algorithm.advantage_fn"] or ""
    advantage = reader.overrides.get("advantage")
    by_verl = given.endswith("_verl") or reader["algorithm.algorithm_type"] == "grpo_verl"
    in_trainer = by_verl or advantage in _IN_TRAINER
    if advantage is None or (not in_trainer and reader["algorithm.kl_penalty_fn"] not in (None, "none")):
        note = "Trinity skips it for this advantage: pass kl_reward= to have it"
        for name in [name for name in reader.given if name.startswith("algorithm.kl_penalty_fn")]:
            reader.out(name, note)
        reader.overrides["kl_reward"] = "none"
    else:
        _read_kl(reader, "kl_reward", trains)


def _read_entropy(reader: Reader) -> None:
    kind = reader.take("algorithm.entropy_loss_fn")
    reader.known("entropy_loss_fn", kind or "none", ("none", "default", "mix"))
    coeff = "algorithm.entropy_loss_fn_args.entropy_coef"
    without = reader["algorithm.algorithm_type"] in _WITHOUT_ENTROPY
    if kind == "none" or (kind is None and without):
        reader.overrides["entropy_coeff"] = 0.0
    else:
        reader.copy(coeff)
    if kind == "mix" and (reader.overrides["entropy_coeff"] or reader.overrides.get("kl_loss", "none") != "none"):
        reader.overrides["leave_out_experts"] = True


def _read_aggregation(reader: Reader, objective: str) -> None:
    """Set the aggregation: `loss_agg_mode`, else the one in `policy_loss_fn_args`, else the objective's own."""
    mode = reader["algorithm.loss_agg_mode"] or "token-mean"
    reader.take("algorithm.loss_agg_mode")
    reader.overrides["aggregation"] = mode
    inner = f"{_P}loss_agg_mode"
    written = _has_loss_args(reader)
    if inner in reader.given:
        reader.out(inner, "no effect in Trinity: algorithm.loss_agg_mode replaces it")
    elif written and objective in _OWN_AGGREGATION and mode != _OWN_AGGREGATION[objective]:
        _two_means(reader, _OWN_AGGREGATION[objective], mode)
    elif objective in _WITHOUT_AGGREGATION and mode != "token-mean":
        _two_means(reader, "seq-mean-token-sum" if objective == "dpo" else "token-mean", mode)
    if objective == "dpo":
        reader.overrides["aggregation"] = "seq-mean-token-sum"
    if reader.overrides["aggregation"] == "seq-mean-token-sum-norm":
        reason = "Trinity divides only by the length, this package also by the number of sequences"
        if reader["model.max_response_tokens"] is None:
            reason = "it divides by the padded length: add model.max_response_tokens"
        reader.refuse("algorithm.loss_agg_mode", reason)


def _two_means(reader: Reader, own: str, others: str) -> None:
    """Refuse an aggregation of the objective that differs from the aggregation of the other terms."""
    advice = f"set loss_agg_mode to {own} and name it in policy_loss_fn_args too"
    reader.one_aggregation("algorithm.loss_agg_mode", "the objective", own, others, advice)


def _mixture(reader: Reader, schema: str) -> None:
    ratio = "algorithm.sample_strategy_args.expert_data_ratio"
    if schema == "mix":
        reader.take("algorithm.sample_strategy")
        reader.place("outside", ratio)
    elif reader["algorithm.sample_strategy"] is not None:
        reader.out("algorithm.sample_strategy", "the buffer of the loop decides which rows it draws")
