"""Descriptions of models, and what a client sends to another process."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
from remote_models import model, slow
from torch import nn

from torchrl_llm_kl.service import RemoteModel, ScoringService
from torchrl_llm_kl.service._lifecycle import HeldModel, ServiceSpec, describe_source


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
