"""A remembered model as the reference of transforms and losses: the same entries, and no forward in the second epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from closeness import assert_near
from torchrl_llm_kl import KLRewardTransform, PolicyLoss, RememberedModel, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import KLToReference
from toy_models import FORWARD
from toy_rollouts import collect, flat, make_policy, steps

ENTRIES = [("next", "ref_log_probs", "full"), ("next", "kl_penalty"), ("next", "reward")]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    calls: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.mark.parametrize("padded", [None, True, False], ids=["model", "padded wrapper", "nested wrapper"])
def test_the_second_epoch_over_a_replay_buffer_makes_no_forward(
    tokenizer: Any, policy_model: Any, ref_model: Any, wrapped: Any, padded: bool | None, tmp_path: Path
) -> None:
    gen, ref = (policy_model, ref_model) if padded is None else wrapped(padded)
    data = flat(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=bool(padded)), envs=3))
    buffer = ReplayBuffer(storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=3)
    buffer.extend(data)
    plain = RetrieveKL(gen, ref, coeff=0.3)
    reference = RememberedModel(ref, tmp_path)
    buffer.append_transform(RetrieveKL(gen, reference, coeff=0.3))
    want = {str(step["tokens", "full"].tolist()): step for step in steps(plain(data.clone()))}

    def epoch() -> None:
        for step in steps(buffer.sample()):
            expected = want[str(step["tokens", "full"].tolist())]
            for key in ENTRIES:
                assert_near(step[key], expected[key], **FORWARD)

    epoch()
    assert reference.store.tokens_recalled == 0
    with counted(ref_model) as calls:
        for _ in range(2):
            epoch()
    assert not calls


def test_other_transforms_and_losses_take_it(policy_model: Any, ref_model: Any, tmp_path: Path) -> None:
    full = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))

    def data() -> TensorDict:
        return TensorDict(
            {
                "tokens": {"full": full, "prompt": full[:, :2].clone()},
                "masks": {
                    "all_attention_mask": torch.ones_like(full, dtype=torch.bool),
                    "all_assistant_mask": torch.arange(6).expand(2, 6) >= 2,
                },
                "log_probs": {"full": torch.full((2, 6), -1.0)},
                "advantage": torch.ones(2, 6, 1),
                "next": TensorDict({"reward": torch.zeros(2, 1)}, [2]),
            },
            [2],
        )

    reference = RememberedModel(ref_model, tmp_path)
    for make, key in (
        (lambda model: RetrieveLogProb(model, entropy_key=("entropy", "full")), ("next", "entropy", "full")),
        (lambda model: KLRewardTransform(model, coef=0.1), ("next", "reward")),
    ):
        assert torch.equal(make(reference)(data())[key], make(ref_model)(data())[key])
    kl = []
    for model in (ref_model, reference, reference):
        loss = PolicyLoss(policy_model, terms=[KLToReference(0.5, "k2")], reference=model)
        kl.append(loss(data())["loss_kl_to_ref"].item())
    assert_near(kl[1], kl[0], dtype=torch.float32, **FORWARD)
    assert kl[1] == kl[2]
    assert reference.store.tokens_recalled > 0
    assert not reference.make_scorer().score(full, attention_mask=torch.ones_like(full)).values.requires_grad


def test_an_exact_kl_is_refused(policy_model: Any, ref_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RememberedModel, remembered on disk, returns log-probs only"):
        RetrieveKL(policy_model, RememberedModel(ref_model, tmp_path), estimator="exact")
