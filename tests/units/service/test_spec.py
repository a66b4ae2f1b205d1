"""Descriptions of models, configurations of drivers with one name, and invalid arguments."""

import math
import sys
from dataclasses import dataclass
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from remote_models import Slow, model
from torchrl_llm_kl.service import ScoringService, ServiceConfigError
from torchrl_llm_kl.service._service import describe_source
from torchrl_llm_kl.service._spec import ServiceSpec, Settings


def make_another():
    return model(seed=1)


class Loader:
    def __init__(self, seed):
        self.seed = seed

    def load(self):
        return model(self.seed)

    __call__ = load


def of_array(values):
    return model(int(values.sum()))


@dataclass
class Weights:
    """Its repr shows only the ends of a long tensor. The repr of a TensorDict shows no numbers."""

    values: torch.Tensor


def test_factories_differ_by_name_and_arguments():
    long, other = np.zeros(5000), np.eye(1, 5000, 2500)[0]
    factories = [Loader(0).load, Loader(1).load, Loader(0), Loader(1)]
    factories += [partial(of_array, long), partial(of_array, other)]
    tensors = torch.zeros(5000), torch.tensor(other)
    hidden = [partial(of_array, wrap(x)) for wrap in (Weights, lambda x: TensorDict(x=x)) for x in tensors]
    factories += [model, make_another, partial(model, seed=1), partial(model, seed=2), partial(Slow, 0.1)]
    described = [describe_source(None, factory) for factory in [*factories, *hidden]]
    assert len(set(described)) == len(described), described
    assert describe_source(None, partial(of_array, Weights(torch.zeros(5000)))) == described[len(factories)]
    assert "remote_models.model" in described[6]
    alike = {1: Loader(1).load, 4: partial(of_array, long.copy()), 8: partial(model, seed=1)}
    for i, factory in alike.items():
        assert describe_source(None, factory) == described[i]
    assert describe_source(None, lambda: model(1)) == describe_source(None, lambda: model(2)), (
        "they differ only in their code"
    )
    assert not any(" at 0x" in text for text in described)


def test_models_differ_by_their_weights():
    swapped = model()
    with torch.no_grad():
        swapped.lm_head.weight[[0, 1]] = swapped.lm_head.weight[[1, 0]].clone()  # keeps the sum
    one, same, other, third = (describe_source(each, None) for each in (model(), model(), model(seed=1), swapped))
    assert one == same
    assert one not in (other, third)


def test_drivers_of_one_name_must_share_a_configuration():
    def spec(source="source", **given):
        return ServiceSpec("name", source, Settings(max_tokens=1), **given)

    mine = spec(num_replicas=2, options={"num_cpus": 1, "runtime_env": {"pip": []}})
    mine.check_same(spec(num_replicas=2, options={"num_cpus": 1}, factory=b"its code", id="another"))
    for message, other in {
        "'name' is in use with another configuration: model: it has 'source', requested 'other'. Ch": {
            "source": "other"
        },
        "num_replicas: it has 2, requested 3": {"num_replicas": 3},
        "num_gpus: it has None, requested 1": {"options": {"num_cpus": 1, "num_gpus": 1}},
        "detached: it has False, requested True": {"detached": True},
    }.items():
        with pytest.raises(ServiceConfigError, match=message):
            mine.check_same(spec(**{"num_replicas": 2, "options": {"num_cpus": 1}, **other}))


def test_without_ray_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for given in ({"factory": model}, {"model": model()}):
        with pytest.raises(ImportError, match=r"run pip install '\.\[ray\]' in the checkout"):
            ScoringService(**given)


REFUSED = {
    "num_replicas must be at least 1, got 0": {"num_replicas": 0},
    "timeout must be greater than 0, got 0": {"timeout": 0},
    "max_wait must be at least 0, got -1": {"max_wait": -1},
    "memory must be at least 0, got nan": {"memory": math.nan},
    "lifetime must be one of None, 'detached', got 'long'": {"lifetime": "long"},
    "pass the model, or factory=": {"factory": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_arguments_are_refused_before_actors_start(message):
    with pytest.raises(ValueError, match=message):
        ScoringService(**{"factory": model, **REFUSED[message]})


@pytest.mark.parametrize("wait", [-1.0, math.nan])
def test_an_invalid_wait_is_refused_before_the_push(wait):
    """After the push, an error would look as if the weights had stayed the same."""
    with pytest.raises(ValueError, match="wait must be at least 0, got"):
        object.__new__(ScoringService).update_weights(model(), wait=wait)


CONFIG = {"name": "reference", "factory": "remote_models:model", "arguments": {"seed": 1}}


def test_the_application_of_a_configuration():
    """As ``serve run`` calls it."""
    pytest.importorskip("ray.serve")
    from torchrl_llm_kl.service import app

    made = app({**CONFIG, "max_tokens": 128})
    deployment = made._bound_deployment
    (spec,) = deployment.init_args
    assert (spec.name, spec.settings.max_tokens, spec.detached, deployment.name) == ("reference", 128, True, "Replica")
    found = cloudpickle.loads(spec.factory)()
    assert torch.equal(found.lm_head.weight, model(seed=1).lm_head.weight)
    for wrong in ({"max_token": 1}, {"model": "x"}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            app({**CONFIG, **wrong})
