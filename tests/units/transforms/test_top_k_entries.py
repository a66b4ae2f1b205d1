"""The top k of a model's distribution beside the log-probs: a teacher for distillation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.envs import check_env_specs
from torchrl.modules.llm.policies.common import LogProbs

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, RetrieveLogProb
from toy_models import FORWARD, VOCAB_SIZE, tiny_model
from toy_rollouts import make_env, make_policy, make_scoring_wrapper, steps

K = 5
IDS, LOG_PROBS, REST = ("top_k", "ids"), ("top_k", "log_probs"), ("top_k", "rest_log_prob")


def data(seed: int = 0, *, dense: bool = True) -> TensorDictBase:
    """Two rows with prompts of two tokens; ragged rows in a lazy stack."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(VOCAB_SIZE, (2, 6), generator=rng)
    if dense:
        return TensorDict({"tokens": {"full": full, "prompt": full[:, :2].clone()}}, [2])
    rows = (full[0], full[1, :4])
    return lazy_stack([TensorDict({"tokens": {"full": row, "prompt": row[:2]}}) for row in rows])


@torch.no_grad()
def distribution(model: nn.Module, row: Tensor) -> Tensor:
    """Log-probs of all tokens at each position after the first, in float64; ``[T - 1, V]``."""
    wide = tiny_model(seed=0).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return wide(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(("k", "dense"), [(1, True), (K, False), (VOCAB_SIZE, True)])
def test_against_the_whole_distribution(k: int, dense: bool) -> None:
    model = tiny_model(seed=0)
    found = RetrieveLogProb(model, top_k=k)(data(dense=dense))
    for step, given in zip(found.unbind(0), data(dense=dense).unbind(0), strict=True):
        log_p = distribution(model, given["tokens", "full"])[1:]
        expected, ids = log_p.sort(-1, descending=True)
        assert step[IDS].dtype == torch.int64
        assert torch.equal(step[IDS][2:], ids[:, :k])
        assert_close(step[LOG_PROBS][2:], expected[:, :k].float(), atol=1e-4, rtol=0)
        # Exact where one minus a sum of float32 would be 0.
        assert_close(step[REST][2:].double(), expected[:, k:].logsumexp(-1), atol=1e-4, rtol=0, check_dtype=False)
        assert step[REST][2:].isneginf().tolist() == [k == VOCAB_SIZE] * len(ids)
        for key in (IDS, LOG_PROBS, REST):
            assert not step[key][:2].any()
            assert not step[key].requires_grad


def test_nothing_is_written_by_default() -> None:
    assert "top_k" not in RetrieveLogProb(tiny_model(seed=0))(data())
    transform = RetrieveLogProb(tiny_model(seed=0))
    transform.top_k, transform.top_k_key = K, ("teacher", "top")
    found = transform(data())
    assert found["teacher", "top", "ids"].shape == (2, 6, K)
    assert set(transform.out_keys) == {
        ("log_probs", "full"),
        *(("teacher", "top", x) for x in ("ids", "log_probs", "rest_log_prob")),
    }


@pytest.mark.parametrize(("mode", "padded"), [("direct", False), ("env", True)], indirect=["padded"])
def test_specs_and_layouts(mode: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    teacher = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs")
    transform = RetrieveLogProb(teacher, top_k=K)
    env = make_env(tokenizer, transform, envs=2, turns=2)
    spec = env.full_observation_spec
    assert spec[IDS].dtype == torch.int64
    assert spec[LOG_PROBS].dtype == spec[REST].dtype == torch.float32
    assert tuple(spec[LOG_PROBS].shape[1:]) == tuple(spec[IDS].shape[1:]) == (-1, K)
    for step in steps(env.reset()):
        assert [tuple(step[key].shape) for key in (IDS, LOG_PROBS, REST)] == [(0, K), (0, K), (0,)]
        assert step[IDS].dtype == torch.int64
    torch.manual_seed(0)
    rollout = env.rollout(2, make_policy(policy_model, tokenizer, pad_output=padded))
    if mode == "direct":
        rollout = transform.clone()(rollout)
    scorer = LogProbScorer(ref_model)
    for step in steps(rollout):
        full, scored = step["tokens", "full"], step["next", "ref_log_probs", "full"] != 0
        real = step["masks", "all_attention_mask"]
        assert scored.any()
        expected = scorer.evaluate([full[real]], [scored[real]], top_k=K)
        for key, values in zip(
            (IDS, LOG_PROBS, REST), (expected.top_indices, expected.top_log_probs, expected.tail_log_prob), strict=True
        ):
            assert_near(step["next"][key][real], values.values, **FORWARD)
            assert not step["next"][key][~scored].any()


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
def test_check_env_specs(tokenizer: Any, ref_model: Any) -> None:
    teacher = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, input_mode="text")
    check_env_specs(make_env(tokenizer, RetrieveLogProb(teacher, top_k=K), envs=2, turns=2, input_mode="text"))


def test_beside_the_log_probs_of_a_policy() -> None:
    """TorchRL's policies write a tensorclass under ``"log_probs"``, which takes no other entries."""
    rows = data(dense=False)
    for step in rows.tensordicts:
        step["log_probs"] = LogProbs(full=torch.zeros(len(step["tokens", "full"])))
    found = RetrieveLogProb(tiny_model(seed=0), top_k=K)(rows)
    copy = lazy_stack([step.clone() for step in found.unbind(0)]).clone()
    assert copy[1][LOG_PROBS].shape == (4, K)
    assert copy[1]["log_probs", "full"].ne(0).sum() == 2


def kl_of_top_k(step: TensorDictBase, student: Tensor) -> Tensor:
    """``KL(teacher || student)`` over the top k and the rest as one more outcome."""
    ids, teacher, rest = step[IDS], step[LOG_PROBS], step[REST]
    inside = student.gather(-1, ids)
    outside = student.scatter(-1, ids, -torch.inf).logsumexp(-1)
    both = (teacher.exp() * (teacher - inside)).sum(-1)
    return both + torch.where(rest.isneginf(), 0.0, rest.exp() * (rest - outside).nan_to_num())


def test_a_teacher_for_distillation() -> None:
    """The KL over k + 1 outcomes grows with k up to the exact one, which ``k = V`` gives."""
    teacher, student = tiny_model(seed=0), tiny_model(seed=1)
    row = data()["tokens", "full"][0]
    log_p, log_q = distribution(teacher, row)[1:], distribution(student, row)[1:]
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    found = []
    for k in (1, 4, 16, VOCAB_SIZE):
        step = RetrieveLogProb(teacher, top_k=k)(data())[0]
        kept = TensorDict(
            {key: step[key][2:].double() if key != IDS else step[key][2:] for key in (IDS, LOG_PROBS, REST)}
        )
        found.append(kl_of_top_k(kept, log_q))
    assert all((a <= b + 1e-4).all() for a, b in pairwise(found))
    assert (found[0] >= 0).all()
    assert_close(found[-1], exact, atol=1e-4, rtol=0)


def test_a_top_k_that_is_refused() -> None:
    for k in (-1, 2.0, True):
        with pytest.raises(ValueError, match="top_k must be a whole number of at least 0"):
            RetrieveLogProb(tiny_model(seed=0), top_k=k)
    with pytest.raises(ValueError, match=r"98.*97"):
        RetrieveLogProb(tiny_model(seed=0), top_k=VOCAB_SIZE + 1)(data())
