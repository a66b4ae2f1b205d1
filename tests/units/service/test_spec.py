"""Descriptions of models, and what a client sends to another process."""

import copy
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch

from remote_models import Slow, model
from torchrl_llm_kl.service import RemoteModel, ScoringService, ServiceConfigError
from torchrl_llm_kl.service._source import describe_source
from torchrl_llm_kl.service._spec import ServiceSpec


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


def test_factories_differ_by_name_and_arguments():
    long, other = np.zeros(5000), np.eye(1, 5000, 2500)[0]
    factories = [Loader(0).load, Loader(1).load, Loader(0), Loader(1)]
    factories += [partial(of_array, long), partial(of_array, other)]
    factories += [model, make_another, partial(model, seed=1), partial(model, seed=2), partial(Slow, 0.1)]
    described = [describe_source(None, factory) for factory in factories]
    assert len(set(described)) == len(factories), described
    assert "remote_models.model" in described[6]
    alike = {1: Loader(1).load, 4: partial(of_array, long.copy()), 8: partial(model, seed=1)}
    for i, factory in alike.items():
        assert describe_source(None, factory) == described[i]
    assert describe_source(None, lambda: model(1)) == describe_source(None, lambda: model(2)), "code alone"
    assert not any(" at 0x" in text for text in described)


def test_models_differ_by_their_weights():
    swapped = model()
    with torch.no_grad():
        swapped.lm_head.weight[[0, 1]] = swapped.lm_head.weight[[1, 0]].clone()  # keeps the sum
    one, same, other, third = (describe_source(each, None) for each in (model(), model(), model(seed=1), swapped))
    assert one == same
    assert one not in (other, third)


def spec(**given):
    return ServiceSpec("name", "source", {"max_tokens": 1, "hang_after": 900.0}, **given)


def test_a_model_given_by_value_is_not_sent_to_other_clients():
    """Nor is the code of a factory: they only find the service."""
    for remote in (RemoteModel(spec(), make=model), RemoteModel(spec(factory=b"its code"))):
        assert len(pickle.dumps(remote)) < 2000 < len(pickle.dumps(model()))
        sent, near = pickle.loads(pickle.dumps(remote)), copy.deepcopy(remote)
        assert (sent.connection.make, sent.spec.factory) == (None, None)
        assert sent.spec.config == remote.spec.config
        assert (near.connection.make, near.spec) == (remote.connection.make, remote.spec), "it may hand the model in"


def test_what_clients_of_one_name_must_share():
    strategy = object()  # may be written in many ways
    mine = spec(num_replicas=2, options={"num_cpus": 1, "scheduling_strategy": strategy}, address="here")
    mine.check_config(spec(num_replicas=2, options={"num_cpus": 1}, factory=b"its code", id="another").config)
    for message, wanted in {
        "'name' is in use with another configuration: model: it has 'source', requested 'other'. Ch": {
            "model": "other"
        },
        "max_tokens: it has 1, requested 2; num_replicas: it has 2, requested 3": {"num_replicas": 3, "max_tokens": 2},
        "num_gpus: it has None, requested 1": {"num_gpus": 1},
        "detached: it has False, requested True": {"detached": True},
    }.items():
        with pytest.raises(ServiceConfigError, match=message):
            mine.check_config({**mine.config, **wanted})


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for given in ({"factory": model}, {"model": model()}):
        with pytest.raises(ImportError, match=r"run pip install '\.\[ray\]' in the checkout"):
            ScoringService(**given)


REFUSED = {
    "num_replicas must be a whole number of at least 1, got 0": {"num_replicas": 0},
    "num_replicas must be a whole number of at least 1, got 1.5": {"num_replicas": 1.5},
    "num_replicas must be a whole number of at least 1, got True": {"num_replicas": True},
    "max_tokens must be a whole number of at least 1": {"max_tokens": 0},
    "max_queue must be a whole number": {"max_queue": "4"},
    "max_wait must be a number of seconds": {"max_wait": -1.0},
    "timeout must be a number of seconds, got '5'": {"timeout": "5"},
    "timeout must be a number of seconds, got inf": {"timeout": float("inf")},
    "timeout must be greater than 0, got 0": {"timeout": 0},
    "hang_after must be greater than 0, got 0": {"hang_after": 0},
    "tokens_per_batch must be at least 1": {"tokens_per_batch": 0},
    "memory must be at least 0, got -1": {"memory": -1},
    "lifetime must be one of None, 'detached', got 'long'": {"lifetime": "long"},
    "name must be a string": {"name": ""},
    "name must be a string without ':'": {"name": "a:b"},
    "name must be a string .*5": {"name": 5},
    "namespace must be a string": {"namespace": ""},
    "exactly one of them": {"factory": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_arguments_are_refused_before_actors_start(message):
    with pytest.raises(ValueError, match=message):
        ScoringService(**{"factory": model, **REFUSED[message]})
    with pytest.raises(TypeError, match="ScoringService has no argument 'num_tpus'"):
        ScoringService(factory=model, num_tpus=1)
