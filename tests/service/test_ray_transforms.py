"""The Ray variants of the transforms: what they write is what the local classes write."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from remote_models import model
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close

from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.service import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb

REFERENCE = partial(model, seed=1)
CPUS = {"num_cpus": 0.1}


def data() -> TensorDictBase:
    rng = torch.Generator().manual_seed(0)
    full = torch.randint(97, (4, 9), generator=rng)
    attention = torch.arange(9) < torch.tensor([[9], [7], [5], [8]])
    out = TensorDict(
        {
            "tokens": {"full": full, "prompt": full[:, :3].clone()},
            "masks": {"all_attention_mask": attention},
            "log_probs": {"full": -torch.rand(4, 9, generator=rng)},
            "next": {"reward": torch.tensor([[1.0], [0.0], [2.0], [-1.0]])},
        },
        batch_size=[4],
    )
    out["next"].batch_size = [4]
    return out


def same(found: TensorDictBase, expected: TensorDictBase) -> None:
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert_close(found[key], expected[key], rtol=1e-6, atol=1e-6)


def remote_and_local(name: str) -> tuple[Any, Any]:
    if name == "RetrieveLogProb":
        return RayRetrieveLogProb(model_factory=REFERENCE, **CPUS), RetrieveLogProb(REFERENCE())
    if name == "RetrieveKL":
        settings: dict[str, Any] = {"coeff": 0.3, "temperature": 0.7}
        remote = RayRetrieveKL(model(), None, ref_model_factory=REFERENCE, **settings, **CPUS)
        return remote, RetrieveKL(model(), REFERENCE(), **settings)
    return RayKLRewardTransform(ref_model_factory=REFERENCE, coef=0.3, **CPUS), KLRewardTransform(REFERENCE(), coef=0.3)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"])
def test_the_same_numbers_and_picklable(name: str) -> None:
    remote, local = remote_and_local(name)
    expected = local(data())
    same(remote(data()), expected)
    same(pickle.loads(pickle.dumps(remote))(data()), expected)


def test_an_argument_of_the_local_class_makes_the_variant() -> None:
    transform = RetrieveKL(model(), ref_model_factory=REFERENCE, use_ray_service=True, actor_name="by-argument", **CPUS)
    assert isinstance(transform, RayRetrieveKL)
    same(transform(data()), RetrieveKL(model(), REFERENCE())(data()))
    assert not isinstance(RetrieveKL(model(), REFERENCE()), RayRetrieveKL)


def test_a_model_and_a_factory_are_refused() -> None:
    with pytest.raises(ValueError, match="Cannot provide both 'ref_model' and 'ref_model_factory'"):
        RayRetrieveKL(model(), model(), ref_model_factory=REFERENCE)
