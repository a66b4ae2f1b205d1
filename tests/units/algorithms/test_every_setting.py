"""Each setting of each preset changes what is computed or required, or is refused with the reason."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl import RetrieveLogProb
from torchrl_llm_kl._registry import Spec, choices_of
from torchrl_llm_kl.advantages import advantage_spec
from torchrl_llm_kl.algorithms import ALGORITHMS, SCHEMAS, Algorithm, AlgorithmParts, Schema, make_algorithm
from torchrl_llm_kl.algorithms._algorithm import FIELDS, apply_overrides
from torchrl_llm_kl.losses import spec_of
from toy_tasks import TabularCritic, TabularPolicy, chain
from toy_training import rows_of_all, total

TASK = chain()
ROWS = 24
#: Values of the fields that are neither numbers nor flags.
VALUES: dict[str, tuple[Any, ...]] = {
    "objective": ("gpg", "sft"),
    "objective_args": (),  # each objective argument is tried by its own name
    "advantage": ("grpo", "rloo", "reinforce", None),
    "advantage_args": ({"gamma": 0.5},),
    "aggregation": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "none"),
    "max_len": (8,),
    "kl_loss": ("none", "k2", "k3+", "exact"),
    "kl_level": ("token", "sequence"),
    "kl_reward": ("none", "k1", "exact"),
    "schema": tuple(SCHEMAS),
    "top_k": (2,),
    "reward_weights": ((0.5, 1.5),),
    "roles": ({"tool": 0.5},),
    "teacher_weights": ((0.5,),),
    "generator": (torch.Generator(),),
    "losses": (("hinge",),),
    "weights": ((0.5,),),
}


def policy(seed: int, scale: float) -> TabularPolicy:
    model, rng = TASK.policy(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.table += scale * torch.randn(model.table.shape, generator=rng)
    return model


@cache
def data_for(schema: Schema, *, triples: bool) -> TensorDictBase:
    """Answers that a policy far from actor and reference sampled, so that most bounds bind somewhere."""
    rng = torch.Generator().manual_seed(3)
    td = rows_of_all(ROWS, name="tpo" if triples else "vapo")
    short = TASK.batch(torch.zeros(3, dtype=torch.long), torch.full((3,), TASK.answers.index((3,))))
    for key in (("tokens", "full"), ("masks", "all_attention_mask")):  # only one of the first group has a second token
        td[key][1:4] = short[key]
    if schema.paired:
        td.pop("chosen", None)
    if schema.name == "trajectory":
        td["run"], td["step"] = torch.arange(len(td)) // 2, torch.arange(len(td)) % 2
    if schema.name == "rewards":
        td["next", "reward"] = torch.cat([td["next", "reward"], torch.rand(len(td), 1, generator=rng)], -1)
    shape = td["tokens", "full"].shape
    td["message_role"], td["selected"] = torch.randint(4, shape, generator=rng), torch.rand(shape, generator=rng) > 0.5
    return RetrieveLogProb(policy(4, 2.5), log_probs_full_key=("log_probs", "full"))(td)


def built(preset: Algorithm, settings: Mapping[str, Any]) -> tuple[AlgorithmParts, TabularPolicy]:
    """The preset's parts, with a critic and a reference when it asks for them."""
    actor, own = policy(0, 1.0), dict(settings)
    if preset.name == "dr_grpo" and own.keys().isdisjoint(("max_len", "aggregation", "objective")):
        own["max_len"] = 4
    if preset.schema == "trajectory" and "advantage" not in own:
        own["advantage_args"] = {"keys": {"run": "run", "step": "step"}, **own.get("advantage_args", {})}
    changed = apply_overrides(preset, own)
    own |= {"reference": policy(1, 2.0)} if changed.needs_reference else {}
    own |= {"critic": TabularCritic(TASK)} if changed.use_critic else {}
    return make_algorithm(preset.name, actor, **own), actor


def outcome(name: str, **settings: Any) -> dict[str, Any]:
    """What the built parts require, and everything they compute from one batch."""
    parts, actor = built(ALGORITHMS[name], settings)
    loss = parts.loss
    found: dict[str, Any] = {
        "schema": parts.schema.entries,
        "read": tuple(map(str, loss.in_keys)),
        "written": tuple(map(str, loss.out_keys)),
        "summed": (loss.aggregation, loss.max_len, loss.objective.function.__name__),
        "transforms": [(type(part).__name__, str(part.in_keys), str(part.out_keys)) for part in parts.transforms],
    }
    td = data_for(parts.schema, triples=name == "tpo").clone()
    try:
        td = parts.prepare(td)
        outs = [each(td) for each in parts.losses]
        total(outs[0]).backward()
    except (ValueError, KeyError, RuntimeError) as error:  # another schema or aggregation requires other data or calls
        return found | {"error": f"{type(error).__name__}: {error}"}
    numbers = {str(key): x for key, x in td.items(True, True) if isinstance(x, Tensor)}
    numbers |= {key: x for out in outs for key, x in out.items()}
    numbers["gradient"] = actor.table.grad
    return found | {key: x.nan_to_num(77).tolist() for key, x in numbers.items() if x is not None}


def values(name: str, now: object, annotation: object = None) -> tuple[Any, ...]:
    """Values to try for a setting."""
    if name in VALUES:
        return VALUES[name]
    if choices := choices_of(annotation):
        return choices
    if isinstance(now, bool):
        return (not now,)
    return (0.4, 1.2, 3.0, 0.05) if now is None or now == 0 else (0.4, 1.2, 3.0, now / 2)


@cache
def first_with(part: str, name: str) -> str:
    """The first preset with an objective or an advantage: its settings are tried there."""
    return next(preset.name for preset in ALGORITHMS.values() if getattr(preset, part) == name)


def settings_of(preset: Algorithm) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A name, and the arguments of ``make_algorithm`` that set it to other values.

    Settings of an objective or an advantage that several presets share are those of the first one, unless a preset has its own.
    """
    for name in FIELDS:
        now = preset.summed if name == "aggregation" else getattr(preset, name)
        yield name, [{name: value} for value in values(name, now) if value != now]
    specs: dict[str, Spec] = {"objective": spec_of(preset.objective)}
    if preset.advantage is not None:
        specs["advantage"] = advantage_spec(preset.advantage)
    for part, spec in specs.items():
        given: Mapping[str, Any] = getattr(preset, f"{part}_args")
        if not given and first_with(part, spec.name) != preset.name:
            continue
        for name in spec.hyper:
            now = preset.distribution if name == "distribution" else given.get(name, spec.defaults.get(name))
            others = [value for value in values(name, now, spec.types.get(name)) if value != now]
            yield f"{part} {name}", [{f"{part}_args": {name: value}} for value in others]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_changes_something_or_is_refused(name: str) -> None:
    usual = outcome(name)
    assert "error" not in usual

    def counts(given: dict[str, Any]) -> bool:
        try:
            return outcome(name, **given) != usual
        except (ValueError, TypeError) as error:
            return bool(str(error))

    # Each value of a field; a bound that is a hyper-parameter may be beyond all numbers of the batch.
    settings = settings_of(ALGORITHMS[name])
    assert [x for x, others in settings if others and not (all if x in FIELDS else any)(map(counts, others))] == []
