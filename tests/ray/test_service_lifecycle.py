"""Descriptions of models, and what a client sends to another process."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from remote_models import model, slow
from torchrl_llm_kl.service import RemoteModel, ScoringService
from torchrl_llm_kl.service.control._spec import HeldModel, ServiceSpec, describe_source


def make_another() -> nn.Module:
    return model(seed=1)


def closure(seed: int) -> object:
    return lambda: model(seed=seed)


class Loader:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def load(self) -> nn.Module:
        return model(self.seed)

    def __call__(self) -> nn.Module:
        return self.load()


def of_array(values: np.ndarray) -> nn.Module:
    return model(int(values.sum()))


def test_factories_differ_by_name_code_and_arguments() -> None:
    long = np.zeros(5000)
    other = long.copy()
    other[2500] = 1
    factories = [
        Loader(0).load,
        Loader(1).load,
        Loader(0),
        Loader(1),
        partial(of_array, long),
        partial(of_array, other),
        model,
        make_another,
        partial(model, seed=1),
        partial(model, seed=2),
        partial(slow, 0.1),
        closure(1),
        closure(2),
        lambda: model(seed=1),
        lambda: model(seed=2),
    ]
    described = [describe_source(None, factory) for factory in factories]
    assert len(set(described)) == len(factories), described
    assert "remote_models.model" in described[6]
    assert describe_source(None, partial(model, seed=1)) == described[8]
    assert describe_source(None, closure(1)) == described[11]
    assert describe_source(None, Loader(1).load) == described[1]
    assert describe_source(None, partial(of_array, long.copy())) == described[4]
    assert not any(" at 0x" in text for text in described)


def test_models_differ_by_their_weights() -> None:
    one = model()
    assert describe_source(one, None) == describe_source(model(), None)
    assert describe_source(one, None) != describe_source(model(seed=1), None)
    swapped = model()
    weight = swapped.lm_head.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]].clone()  # keeps the sum
    assert describe_source(one, None) != describe_source(swapped, None)


def test_a_model_given_by_value_is_not_sent_to_other_clients() -> None:
    def spec(make: object) -> ServiceSpec:
        return ServiceSpec("name", make, "source", {"max_tokens": 1})  # type: ignore[arg-type]

    held, made = RemoteModel(spec(HeldModel(model()))), RemoteModel(spec(model))
    assert len(pickle.dumps(held)) < 2000 < len(pickle.dumps(model()))
    assert pickle.loads(pickle.dumps(held)).spec.make_model is None
    assert pickle.loads(pickle.dumps(made)).spec.make_model is model
    assert copy.deepcopy(held).spec.make_model is held.spec.make_model


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-llm-kl\[ray\]'"):
        ScoringService(factory=model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas must be at most max_replicas, got 3 and 2"),
        ({"num_replicas": 2, "max_replicas": 1}, "min_replicas must be at most max_replicas, got 2 and 1"),
        ({"min_replicas": 0}, "min_replicas must be a whole number of at least 1, got 0"),
        ({"hang_after": 0}, "must be greater than 0 seconds, got 0 and 600"),
        ({"lease": "long"}, "lease must be a number of seconds"),
        ({"expect": 5}, "expect must be a fingerprint, as fingerprint_of"),
    ],
    ids=str,
)
def test_invalid_arguments_of_the_life_cycle(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoringService(factory=model, **arguments)  # type: ignore[arg-type]


def test_a_spec_plans_its_control_actor() -> None:
    spec = ServiceSpec("name", model, "source", {"hang_after": 900.0}, num_replicas=4, min_replicas=2, lease=5.0)
    assert (spec.plan.slots, spec.plan.least, spec.plan.lease) == (4, 2, 5.0)
    assert spec.plan.hang_after == 60.0, "a process answers while its model works, so silence is no work"
