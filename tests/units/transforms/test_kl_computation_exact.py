"""``KLComputation(estimator="exact")``: the KL of each token is read, not estimated; numbers by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from layouts import lay_out
from torchrl_llm_kl import KLComputation

GEN, REF, EXACT = ("log_probs", "full"), ("ref_log_probs", "full"), ("exact_kl", "full")

# The first tokens are the prompt's: no KL there. Log-probs whose difference is another number, so that a mix-up shows.
KL = [[0.0, 0.5, 0.25, 0.125], [0.0, 2.0], [0.0, 0.0, 1.5]]
LOG_PROBS = [[0.0, -1.0, -2.0, -3.0], [0.0, -0.5], [0.0, 0.0, -4.0]]
REF_LOG_PROBS = [[0.0, -8.0, -8.0, -8.0], [0.0, -8.0], [0.0, 0.0, -8.0]]
OUTCOMES = [1.0, -3.0, 0.5]
COEFF = 0.5
LAST = [[0.0, -0.25, -0.125, 0.9375], [0.0, -4.0], [0.0, 0.0, -0.25]]  # outcome on the last token, minus KL / 2
BROADCAST = [[1.0, 0.75, 0.875, 0.9375], [-3.0, -4.0], [0.5, 0.5, -0.25]]


def tensors(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def pad(rows: list[list[float]], value: float = 0.0) -> Tensor:
    return pad_sequence(tensors(rows), batch_first=True, padding_value=value, padding_side="left")


def data_of(
    form: str, kl: list[list[float]] = KL, *, inside_next: bool = True, log_probs: bool = True
) -> TensorDictBase:
    """The three sequences; padding holds what must not be read."""
    entries: dict[Any, Any] = {EXACT: kl, **({GEN: LOG_PROBS, REF: REF_LOG_PROBS} if log_probs else {})}
    if form == "padded":
        entries = {key: pad(rows, 77.0) for key, rows in entries.items()}
    elif form == "rows in a dense TensorDict":
        entries = {key[0]: lazy_stack([TensorDict(full=row) for row in tensors(rows)]) for key, rows in entries.items()}
    entries["reward"] = torch.tensor(OUTCOMES)[:, None]
    if inside_next:
        entries = {("next", *key) if isinstance(key, tuple) else ("next", key): rows for key, rows in entries.items()}
    data = lay_out(form, entries, KL)
    if form == "padded":
        data["masks"] = TensorDict(all_attention_mask=pad([[1.0] * len(row) for row in KL]).bool(), batch_size=[3])
    return data


def rows_of(td: TensorDictBase, key: Any) -> list[Tensor]:
    value = td.get(key, as_list=True)
    return [row.reshape(len(row)) for row in (value if isinstance(value, list) else value.unbind())]


def expected(rows: list[list[float]], form: str) -> list[Tensor]:
    return list(pad(rows)) if form == "padded" else tensors(rows)


FORMS = ["padded", "strided", "jagged", "lazy", "rows in a dense TensorDict"]


@pytest.mark.parametrize("form", FORMS)
def test_values(form: str) -> None:
    """Inside and outside "next", with and without log-probs beside it, with both placements of the outcome."""
    for inside_next, log_probs, placement in itertools.product([True, False], [True, False], ["last", "broadcast"]):
        transform = KLComputation(estimator="exact", coeff=COEFF, reward_placement=placement)
        out = transform(data_of(form, inside_next=inside_next, log_probs=log_probs))
        out = out["next"] if inside_next else out
        for key, want in (("kl_penalty", KL), ("reward", LAST if placement == "last" else BROADCAST)):
            assert_close(rows_of(out, key), expected(want, form), rtol=0, atol=0)
        if form in ("strided", "jagged"):
            assert out["kl_penalty"].layout == out["reward"].layout == getattr(torch, form)


def test_the_entry_of_the_step_itself_serves_too() -> None:
    """As the log-probs: ``"next"`` first, then the root."""
    data = TensorDict({EXACT: pad(KL), "next": {"reward": torch.zeros(3, 1)}}, batch_size=[3]).auto_batch_size_(1)
    transform = KLComputation(estimator="exact")
    assert transform(data)["next", "kl_penalty"].tolist() == pad(KL).tolist()
    data["next", "exact_kl"] = TensorDict(full=2 * pad(KL), batch_size=[3])
    assert transform(data)["next", "kl_penalty"].tolist() == (2 * pad(KL)).tolist()


def test_the_outcome_sits_on_the_last_token_of_the_assistant() -> None:
    data = TensorDict(
        tokens=Tokens(prompt=torch.tensor([5]), full=torch.tensor([5, 6, 7])),
        masks=Masks(all_assistant_mask=torch.tensor([False, True, False])),
        next=TensorDict({EXACT: torch.tensor([0.0, 0.5, 0.0]), "reward": torch.tensor([2.0])}),
    )
    out = KLComputation(estimator="exact", coeff=COEFF)(data)["next"]
    assert out["reward"].squeeze(-1).tolist() == [0.0, 1.75, 0.0]


def test_a_reward_for_each_token_stays_where_it_is() -> None:
    data = TensorDict({EXACT: torch.tensor([[0.0, 0.5]]), "reward": torch.tensor([[[1.0], [3.0]]])}, batch_size=[1])
    assert KLComputation(estimator="exact", coeff=COEFF)(data)["reward"].tolist() == [[[1.0], [2.75]]]


def test_rounding_below_zero_is_kept() -> None:
    data = TensorDict({EXACT: torch.tensor([[0.0, -1e-3, -1e-9]])}, batch_size=[1])
    out = KLComputation(estimator="exact", add_to_reward=False)(data)
    assert torch.equal(out["kl_penalty"], data[EXACT])
    assert out.get("reward", None) is None


def test_the_entry_is_copied_and_widened() -> None:
    data = TensorDict({EXACT: torch.tensor([[0.0, 0.5]]).bfloat16()}, batch_size=[1])
    assert KLComputation(estimator="exact")(data)["kl_penalty"].dtype == torch.float32
    data = TensorDict({EXACT: torch.tensor([[0.0, 0.5]])}, batch_size=[1])
    KLComputation(estimator="exact")(data)["kl_penalty"].zero_()
    assert data[EXACT].tolist() == [[0.0, 0.5]]


def test_a_leading_run_of_nan_is_not_scored() -> None:
    kl = torch.tensor([[torch.nan, 0.5, 0.25]], requires_grad=True)
    out = KLComputation(estimator="exact", coeff=COEFF)(TensorDict({EXACT: kl}, batch_size=[1]))
    assert out["kl_penalty"].tolist() == [[0.0, 0.5, 0.25]]
    out["reward"].sum().backward()
    assert kl.grad is not None
    assert kl.grad.tolist() == [[0.0, -0.5, -0.5]]


@pytest.mark.parametrize("form", ["padded", "lazy"])
def test_the_gradient_flows_through_kl_and_reward(form: str) -> None:
    rows = [torch.tensor(row, requires_grad=True) for row in KL[:2]]
    if form == "lazy":
        data: TensorDictBase = lazy_stack([TensorDict({EXACT: row}) for row in rows])
    else:
        mask = torch.tensor([[True] * 4, [False, False, True, True]])
        padded = pad_sequence(rows, batch_first=True, padding_side="left", padding_value=9.0)
        data = TensorDict({EXACT: padded, ("masks", "all_attention_mask"): mask}, batch_size=[2])
    out = KLComputation(estimator="exact", coeff=COEFF)(data)
    kl, reward = (torch.cat(rows_of(out, key)).sum() for key in ("kl_penalty", "reward"))
    grads = torch.autograd.grad(3 * kl + reward, rows)
    for row, grad in zip(rows, grads, strict=True):
        assert_close(grad, torch.full_like(row, 2.5))  # 3 of the KL, -0.5 of the reward


def test_one_padded_and_one_nested() -> None:
    """The KL has the form of the policy's log-probs, where those are there."""
    data = TensorDict({GEN: pad(LOG_PROBS, -9.0), EXACT: torch.nested.as_nested_tensor(tensors(KL))}, batch_size=[3])
    out = KLComputation(estimator="exact", padding_side="left")(data)
    assert out["kl_penalty"].tolist() == pad(KL).tolist()


def test_a_tensorclass_of_log_probs_holds_it_too() -> None:
    data = TensorDict(exact_kl=LogProbs(full=pad(KL), batch_size=[3]), batch_size=[3])
    assert KLComputation(estimator="exact")(data)["kl_penalty"].tolist() == pad(KL).tolist()


# ------------------------------------------------------------------ errors

WRITER = r"RetrieveLogProb\(policy, reference=reference\)"


def test_a_missing_entry() -> None:
    data = data_of("padded")
    message = rf"Exact KL not found.*\('mine', 'full'\).*in 'next': exact_kl.full.*{WRITER}"
    with pytest.raises(ValueError, match=message):
        KLComputation(estimator="exact", exact_kl_key=("mine", "full"))(data)
    assert data["next"].get("kl_penalty", None) is None


@pytest.mark.parametrize(("form", "bad"), [("padded", torch.inf), ("lazy", -torch.inf), ("jagged", torch.nan)])
def test_an_entry_that_is_not_finite(form: str, bad: float) -> None:
    data = data_of(form, [*KL[:2], [0.0, bad, 1.5]])
    message = rf"exact KL under \('exact_kl', 'full'\) is {bad} at sequence 2, position 1: .*{WRITER}"
    with pytest.raises(ValueError, match=message):
        KLComputation(estimator="exact")(data)
    assert data["next"].get("kl_penalty", None) is None


def test_another_length_than_the_log_probs() -> None:
    data = data_of("lazy", [KL[0], [0.0] * 5, KL[2]])
    with pytest.raises(ValueError, match=rf"Sample 1 .*shape=torch.Size\(\[2\]\), exact_kl\[1\].*\(\[5\]\).*{WRITER}"):
        KLComputation(estimator="exact")(data)


def test_an_entry_without_a_token_dimension() -> None:
    with pytest.raises(ValueError, match=r"\('exact_kl', 'full'\) to have a token dimension"):
        KLComputation(estimator="exact")(TensorDict({EXACT: torch.zeros(3)}, batch_size=[3]))
