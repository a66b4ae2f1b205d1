"""The defects of torchrl 0.14.1's Ray classes, one by one, are absent here."""

import os
import pickle
import signal
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from load import names
from ray_lab import BY_VALUE, COEFF, GEN, REF, SERVED, SERVICE, VALUE, assert_same, local, remote
from torchrl_llm_kl import FixedKLCoefficient, RetrieveKL, RetrieveLogProb, Sampling
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.service import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb
from torchrl_llm_kl.service._remote import Connection

pytestmark = pytest.mark.usefixtures("transform_services")
SHARED = {"actor_name": SERVICE, **SERVED}
FACTORIES = {"gen_model_factory": GEN, "ref_model_factory": REF}


def rows_of(td, key):
    """The rows of an entry with or without padding."""
    return [row[key] for row in td.unbind(0)]


def data(seed=0):
    """Four responses of up to six tokens to prompts of three, with the policy's log-probs and a reward."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(200, (4, 9), generator=rng)
    tokens = {"full": full, "prompt": full[:, :3].clone()}
    masks = {"all_attention_mask": torch.arange(9) < torch.tensor([[9], [7], [5], [8]])}
    after = TensorDict(reward=torch.tensor([[1.0], [0.0], [2.0], [-1.0]]), batch_size=[4])
    log_probs = {"full": -torch.rand(4, 9, generator=rng)}
    return TensorDict({"tokens": tokens, "masks": masks, "log_probs": log_probs, "next": after}, batch_size=[4])


@pytest.mark.parametrize("make", [RayRetrieveKL, partial(RetrieveKL, service_backend="ray")], ids=["class", "argument"])
def test_defect_16_factories_beside_the_defaults(make):
    transform = make(**FACTORIES, coeff=COEFF, **SHARED)
    assert [part.scorer.path for part in list(transform)[:2]] == ["remote", "remote"]
    assert_same(transform(data()), local("RetrieveKL")(data()))


REFUSED = {
    "Cannot provide both 'gen_model' and 'gen_model_factory'": partial(RayRetrieveKL, GEN(), **FACTORIES),
    "Cannot provide both 'ref_model' and 'ref_model_factory'": partial(RayRetrieveKL, ref_model=GEN(), **FACTORIES),
    "an exact KL needs whole distributions": partial(RayRetrieveKL, **FACTORIES, estimator="exact"),
    "ref_model cannot be None": RayRetrieveKL,
    "Must provide exactly one of 'ref_model' or 'ref_model_factory'": RayKLRewardTransform,
    "reward_placement must be one": partial(RayRetrieveKL, ref_model_factory=REF, reward_placement="first"),
    "scope must be one of 'turn', 'full'": partial(RayRetrieveLogProb, model_factory=REF, scope="word"),
}


def test_defect_16_19_arguments_are_refused_at_construction():
    """No service of another configuration starts, and none ends."""
    made = set(names(""))
    assert made >= {SERVICE, f"{SERVICE}-gen"}
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            make(**SHARED)
    assert set(names("")) == made


def test_defect_17_21_a_model_by_value_whose_actor_is_killed_comes_back():
    transform, original = RayRetrieveLogProb(BY_VALUE(), **VALUE), RetrieveLogProb(BY_VALUE())
    assert_same(transform(data()), original(data()))
    before = transform.model.call("state").pid
    os.kill(before, signal.SIGKILL)
    assert_same(transform(data()), original(data()))
    assert transform.model.call("state").pid != before
    assert_same(transform(data(1)), original(data(1)))


REWARD = {"reward_placement": "broadcast"}
WRITES = {"options": ScoreOptions(Sampling(0.5)), "assistant_only": False}
ATTRIBUTES = {
    "RetrieveLogProb": WRITES,
    "RetrieveKL": {**WRITES, "coeff": FixedKLCoefficient(0.7), **REWARD},
    "KLRewardTransform": {**WRITES, "coef": 0.7, **REWARD},
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_defect_18_23_attributes(name):
    """An attribute written on the client can be read there, and changes the results as in the local class."""
    for attribute, value in ATTRIBUTES[name].items():
        variant, original = remote(name), local(name)
        was = variant(data())
        for transform in (variant, original):
            setattr(transform, attribute, value)
        assert getattr(variant, attribute) == value or isinstance(getattr(variant, attribute), torch.nn.Module)
        found = variant(data())
        assert_same(found, original(data()))
        numbers = [(rows_of(found, key), rows_of(was, key)) for key in found.keys(True, True) if key[0] == "next"]
        assert any(not torch.equal(a, b) for now, before in numbers for a, b in zip(now, before, strict=True))
    variant = remote(name)
    variant.note = "mine"
    assert pickle.loads(pickle.dumps(variant)).note == "mine"
    assert name != "RetrieveKL" or variant.coeff() == pytest.approx(COEFF)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_defect_24_an_unrelated_entry_is_not_sent(name, monkeypatch):
    transform, sizes, send = remote(name), [], Connection.send

    def weigh(connection, method, *args):
        sizes.append(len(pickle.dumps(args)))
        return send(connection, method, *args)

    transform(data())  # connected
    monkeypatch.setattr(Connection, "send", weigh)
    transform(data())
    small, large = sum(sizes), data()
    sizes.clear()
    large["pixels"] = torch.zeros(4, 2**19)
    large["next", "pixels"] = torch.zeros(4, 2**19)
    transform(large)
    assert 0 < small < 4096 * (2 if name == "RetrieveKL" else 1)
    assert abs(sum(sizes) - small) < 64
