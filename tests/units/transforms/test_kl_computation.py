"""``KLComputation``: hand-computed numbers for each estimator, coefficient, reward form and layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL
from torchrl_llm_kl.estimators import (
    AdaptiveKLCoefficient,
    FixedKLCoefficient,
    available_estimators,
)

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")


def nest(rows: list[Tensor], layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.as_nested_tensor([row.clone() for row in rows], layout=layout)


def rows_of(td: TensorDictBase, key: Any) -> list[list[float]]:
    """The rows of an entry, one number for each token, however it is stored."""
    value = td.get(key, as_list=True)
    rows = list(value) if isinstance(value, list) else list(value.unbind())
    return [row.reshape(len(row)).tolist() for row in rows]


def close(found: list[list[float]], expected: list[list[float]], **kwargs: Any) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    for a, b in zip(found, expected, strict=True):
        assert_close(torch.tensor(a), torch.tensor(b), **kwargs)


# ------------------------------------------------------------------ estimators

# d = log_prob - ref_log_prob = 0.5, -1, 0.25, -4
LOG_PROBS, REF_LOG_PROBS = [-1.0, -2.0, -0.5, -5.0], [-1.5, -1.0, -0.75, -1.0]
K3 = [0.1065307, 0.7182818, 0.0288008, 49.5981500]  # exp(-d) - 1 + d
VALUES = {
    "none": [0.0, 0.0, 0.0, 0.0],
    "k1": [0.5, -1.0, 0.25, -4.0],
    "k2": [0.125, 0.5, 0.03125, 8.0],
    "k3": K3,
    "low_var_kl": [*K3[:3], 10.0],
    "abs": [0.5, 1.0, 0.25, 4.0],
    "corrected_k3": K3,  # on-policy: every ratio is 1
}


def one(reward: float | None = None, **more: Tensor) -> TensorDictBase:
    entries = {GEN: torch.tensor([LOG_PROBS]), REF: torch.tensor([REF_LOG_PROBS])}
    data = TensorDict(next=TensorDict({**entries, **more}, batch_size=[1]), batch_size=[1])
    if reward is not None:
        data["next", "reward"] = torch.tensor([[reward]])
    return data


def test_the_table_holds_every_estimator() -> None:
    named = {name.rstrip("+") for name in available_estimators()} - {"exact"}
    assert named == set(VALUES)


@pytest.mark.parametrize("name", [name for name in available_estimators() if name != "exact"])
def test_values_of_an_estimator(name: str) -> None:
    """``+`` changes the gradient alone. Equal log-probs have no KL, whatever they are."""
    values = VALUES[name.rstrip("+")]
    transform = KLComputation(estimator=name, coeff=0.5)
    data = transform(one(reward=2.0))["next"]
    close(rows_of(data, "kl_penalty"), [values])
    close(rows_of(data, "reward"), [[*(-0.5 * v for v in values[:-1]), 2.0 - 0.5 * values[-1]]])
    for equal in (torch.tensor([[-30.0, -1e-7, 0.0]]), torch.tensor([[-2.5]])):
        out = transform(TensorDict({GEN: equal, REF: equal.clone()}, batch_size=[1]))
        assert out["kl_penalty"].tolist() == out["reward"].squeeze(-1).tolist() == [[0.0] * equal.shape[1]]


def test_an_estimator_of_ones_own() -> None:
    def chi(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        return 3 * ref_log_prob - log_prob + 100 * old_log_prob

    data = KLComputation(estimator=chi)(one())["next"]
    # 3 * ref - gen + 100 * gen
    close(rows_of(data, "kl_penalty"), [[-103.5, -201.0, -51.75, -498.0]])


def test_a_poorer_dtype_is_widened_and_a_wider_one_kept() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        data = one(reward=2.0)
        data["next", GEN], data["next", REF] = (data["next", k].to(dtype) for k in (GEN, REF))
        out = KLComputation()(data)["next"]
        assert out["kl_penalty"].dtype == out["reward"].dtype == expected
        close(rows_of(out, "kl_penalty"), [VALUES["k1"]])


OLD = [-1.0, -2.5, -0.25, -7.0]
# min(exp(log_prob - old), 2) * k3, the ratios being 1, exp(0.5), exp(-0.25), exp(2)
CORRECTED = [0.1065307, 1.1842465, 0.0224301, 99.1963000]


def test_corrected_k3_with_the_log_probs_of_the_sampler() -> None:
    transform = KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"), coeff=0.1)
    data = transform(one(reward=1.0, **{"old": TensorDict(full=torch.tensor([OLD]), batch_size=[1])}))["next"]
    close(rows_of(data, "kl_penalty"), [CORRECTED])
    close(rows_of(data, "reward"), [[-0.01065307, -0.11842465, -0.00224301, -8.91963]])


def test_log_probs_of_the_sampler_come_from_outside_next_too() -> None:
    """A rollout holds the policy's own entries at the root, those of transforms in ``"next"``."""
    data = one()
    data["log_probs", "sampled"] = torch.tensor([OLD])
    transform = KLComputation(estimator="corrected_k3", old_log_probs_key=("log_probs", "sampled"))
    close(rows_of(transform(data)["next"], "kl_penalty"), [CORRECTED])


@pytest.mark.parametrize(
    ("padded", "side"), [("old", "left"), ("gen", "right"), ("ref", "left"), ("gen old", "left"), ("ref old", "right")]
)
def test_log_probs_of_the_sampler_in_another_layout(padded: str, side: Any) -> None:
    """The ones named are padded, without a mask; the others nested."""
    entries = {}
    for name, values in (("gen", LOG_PROBS), ("ref", REF_LOG_PROBS), ("old", OLD)):
        rows = [torch.tensor(values), torch.tensor(values[:2])]
        dense = pad_sequence(rows, batch_first=True, padding_side=side, padding_value=-77.0)
        entries[name] = dense if name in padded.split() else nest(rows)
    transform = KLComputation("gen", "ref", estimator="corrected_k3", old_log_probs_key="old", padding_side=side)
    out = transform(TensorDict(entries, batch_size=[2]))
    short = CORRECTED[:2]
    if "gen" in padded:
        short = [0.0, 0.0, *short] if side == "left" else [*short, 0.0, 0.0]
    close(rows_of(out, "kl_penalty"), [CORRECTED, short])


# ------------------------------------------------------------------ coefficients


def test_every_kind_of_coefficient() -> None:
    numbers = 0.3, torch.tensor(0.3), torch.tensor([0.3])
    for coeff in (*numbers, FixedKLCoefficient(0.3), AdaptiveKLCoefficient(0.3, 1.0, 10.0)):
        data = KLComputation(coeff=coeff)(one(reward=2.0))["next"]
        close(rows_of(data, "reward"), [[-0.15, 0.3, -0.075, 3.2]])
        close(rows_of(data, "kl_penalty"), [VALUES["k1"]])


def test_an_adaptive_coefficient_is_read_at_every_call_and_saved() -> None:
    coeff = AdaptiveKLCoefficient(init=0.2, target=6.0, horizon=100)
    transform = KLComputation(coeff=coeff)
    close(rows_of(transform(one())["next"], "reward"), [[-0.1, 0.2, -0.05, 0.8]])
    coeff.update(12.0, n=10)  # 0.2 * (1 + 0.2 * 10 / 100) = 0.204
    close(rows_of(transform(one())["next"], "reward"), [[-0.102, 0.204, -0.051, 0.816]])
    transform.coeff.update(0.0, n=50)  # 0.204 * (1 - 0.2 * 50 / 100) = 0.1836
    close(rows_of(transform(one())["next"], "reward"), [[-0.0918, 0.1836, -0.0459, 0.7344]])
    other = KLComputation(coeff=AdaptiveKLCoefficient(init=0.9, target=6.0, horizon=100))
    other.load_state_dict(transform.state_dict())
    close(rows_of(other(one())["next"], "reward"), [[-0.0918, 0.1836, -0.0459, 0.7344]])


def test_a_negative_coefficient_rewards_distance(policy_model: Any) -> None:
    """Only on purpose, through the class."""
    close(rows_of(KLComputation(coeff=FixedKLCoefficient(-1.0))(one())["next"], "reward"), [VALUES["k1"]])
    transform = KLComputation(coeff=0.5)
    for wrong in (
        partial(KLComputation, coeff=-1.0),
        partial(KLRewardTransform, policy_model, coef=-1.0),
        partial(RetrieveKL, policy_model, policy_model, coeff=-1.0),
        partial(setattr, transform, "coeff", -1.0),
    ):
        with pytest.raises(ValueError, match=r"at least 0, got -1.0: .* Pass FixedKLCoefficient\(-1.0\)"):
            wrong()
    assert transform.coeff() == 0.5


def test_a_tensor_that_changes_later_is_not_followed() -> None:
    value = torch.tensor(0.5)
    transform = KLComputation(coeff=value)
    value.fill_(7.0)
    close(rows_of(transform(one())["next"], "reward"), [[-0.25, 0.5, -0.125, 2.0]])


# ------------------------------------------------------------------ rewards

# d = (0.5, -1, 0.25) and (2, -1)
GEN_ROWS = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25, -4.0])]
REF_ROWS = [torch.tensor([-1.5, -1.0, -0.75]), torch.tensor([-2.25, -3.0])]
LAST = [[-0.25, 0.5, 0.875], [-1.0, -2.5]]  # 1 and -3 on the last token, minus d / 2
BROADCAST = [[0.75, 1.5, 0.875], [-4.0, -2.5]]


def pair(reward: Any = None, form: str = "nested", key: str = "reward") -> TensorDictBase:
    if form == "lazy":
        elements = [
            TensorDict({GEN: gen, REF: ref, **({} if reward is None else {key: reward[i]})})
            for i, (gen, ref) in enumerate(zip(GEN_ROWS, REF_ROWS, strict=True))
        ]
        return TensorDict(next=lazy_stack(elements), batch_size=[2])
    data = TensorDict({GEN: nest(GEN_ROWS), REF: nest(REF_ROWS)}, batch_size=[2])
    return TensorDict(next=data if reward is None else data.set(key, reward), batch_size=[2])


OUTCOME = torch.tensor([1.0, -3.0])
OUTCOMES = {
    "[B]": OUTCOME,
    "[B, 1]": OUTCOME[:, None],
    "[B, 1, 1]": OUTCOME[:, None, None],
    "nested [B, (1), 1]": nest([torch.tensor([[1.0]]), torch.tensor([[-3.0]])]),
    "whole numbers": torch.tensor([[1], [-3]]),
    "half precision": OUTCOME[:, None].bfloat16(),
}


def placed(data: Callable[[], TensorDictBase]) -> list[list[list[float]]]:
    """The rewards of both placements: the outcome on the last token, and on all."""
    out = [KLComputation(coeff=0.5, reward_placement=place)(data())["next"] for place in ("last", "broadcast")]
    return [rows_of(each, "reward") for each in out]


@pytest.mark.parametrize("form", list(OUTCOMES))
def test_outcome(form: str) -> None:
    for found, expected in zip(placed(lambda: pair(OUTCOMES[form])), (LAST, BROADCAST), strict=True):
        close(found, expected)
    out = KLComputation(coeff=0.5)(pair(OUTCOMES[form]))["next"]  # the default placement is the last token
    close(rows_of(out, "reward"), LAST)
    assert out["reward"].dtype == torch.float32
    assert [tuple(row.shape) for row in out["reward"].unbind()] == [(3, 1), (2, 1)]


def test_outcome_in_a_lazy_stack() -> None:
    for shape in ((), (1,), (1, 1)):
        found = placed(lambda shape=shape: pair([value.reshape(shape) for value in OUTCOME], form="lazy"))
        close(found[0], LAST)
        close(found[1], BROADCAST)


TOKEN_REWARDS = [torch.tensor([[0.1], [0.2], [3.0]]), torch.tensor([[-1.0], [0.7]])]
PENALISED = [[-0.15, 0.7, 2.875], [-2.0, 1.2]]


@pytest.mark.parametrize("form", ["nested", "lazy"])
def test_a_reward_for_each_token_stays_where_it_is(form: str) -> None:
    """Whatever the placement; with or without a feature dimension. Without a reward it is 0."""
    rewards = [nest(TOKEN_REWARDS)] if form == "nested" else [TOKEN_REWARDS, [row.squeeze(-1) for row in TOKEN_REWARDS]]
    for reward in rewards:
        for found in placed(lambda reward=reward: pair(reward, form=form)):
            close(found, PENALISED)
    for found in placed(lambda: pair(form=form)):
        close(found, [[-0.25, 0.5, -0.125], [-1.0, 0.5]])


def test_a_dense_reward_for_each_token() -> None:
    reward = torch.tensor([[[0.1], [0.2]], [[-1.0], [0.7]]])
    entries = {GEN: torch.stack([GEN_ROWS[0][:2], GEN_ROWS[1]]), REF: torch.stack([REF_ROWS[0][:2], REF_ROWS[1]])}
    for rewards in (reward, reward.squeeze(-1)):
        data = TensorDict(next=TensorDict({**entries, "reward": rewards}, batch_size=[2]), batch_size=[2])
        for found in placed(data.clone):
            close(found, [[-0.15, 0.7], [-2.0, 1.2]])


def test_add_to_reward_false_leaves_the_reward_alone() -> None:
    transform = KLComputation(add_to_reward=False, coeff=0.5)
    out = transform(pair(OUTCOME))["next"]
    assert out["reward"].tolist() == [1.0, -3.0]
    close(rows_of(out, "kl_penalty"), [[0.5, -1.0, 0.25], [2.0, -1.0]])
    assert transform(pair())["next"].get("reward", None) is None
    assert transform.out_keys == ["kl_penalty"]


def rollout(prompt_lengths: list[int]) -> TensorDictBase:
    """Two padded sequences: one token of padding left of the second, one right of the first."""
    gen = torch.tensor([[0.0, -1.0, -2.0, 9.0], [9.0, 0.0, -1.0, -3.0]])
    ref = torch.tensor([[0.0, -3.0, -1.0, 7.0], [7.0, 0.0, -2.0, -1.0]])
    attention = torch.tensor([[True, True, True, False], [False, True, True, True]])
    tokens = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7]])
    root = {("tokens", "full"): tokens, ("masks", "all_attention_mask"): attention}
    if prompt_lengths:
        root["tokens", "prompt"] = nest([row[:n] for row, n in zip(tokens, prompt_lengths, strict=True)])
    inner = TensorDict({GEN: gen, REF: ref, "reward": OUTCOME[:, None]}, batch_size=[2])
    return TensorDict({**root, "next": inner}, batch_size=[2])


@pytest.mark.parametrize("prompt_lengths", [[], [1, 2], [3, 3]])
def test_padding_holds_zero_and_the_outcome_sits_on_the_last_real_token(prompt_lengths: list[int]) -> None:
    out = KLComputation(coeff=0.5)(rollout(prompt_lengths))["next"]
    assert out["kl_penalty"].tolist() == [[0.0, 2.0, -1.0, 0.0], [0.0, 0.0, 1.0, -2.0]]
    last, everywhere = placed(lambda: rollout(prompt_lengths))
    assert last == [[0.0, -1.0, 1.5, 0.0], [0.0, 0.0, -0.5, -2.0]]
    assert everywhere == [[1.0, 0.0, 1.5, 0.0], [0.0, -3.0, -3.5, -2.0]]


def test_token_rewards_of_padded_sequences() -> None:
    """What a reward holds at padding counts for nothing."""
    data = rollout([])
    data["next", "reward"] = torch.tensor([[1.0, 2.0, 3.0, 99.0], [99.0, 4.0, 5.0, 6.0]]).unsqueeze(-1)
    assert placed(data.clone) == [[[1.0, 1.0, 3.5, 0.0], [0.0, 4.0, 4.5, 7.0]]] * 2


# ------------------------------------------------------------------ tokens that were not scored


def test_a_leading_run_of_nan_is_not_scored() -> None:
    """Neither model's NaN becomes a KL, also where only one of them has it; the outcome stays on the last token."""
    nan = torch.nan
    gen = [torch.tensor([nan, nan, -1.0, -2.0]), torch.tensor([nan, -1.0]), torch.tensor([nan, nan])]
    ref = [torch.tensor([nan, -3.0, -3.0, -1.0]), torch.tensor([nan, nan]), torch.tensor([-1.0, -2.0])]
    data = TensorDict({GEN: nest(gen), REF: nest(ref), "reward": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3])
    out = KLComputation(coeff=0.5)(data)
    assert rows_of(out, "kl_penalty") == [[0.0, 0.0, 2.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows_of(out, "reward") == [[0.0, 0.0, -1.0, 1.5], [0.0, 2.0], [0.0, 3.0]]


def test_a_leading_run_of_nan_of_the_sampler_is_not_scored() -> None:
    data = one(**{"old": torch.tensor([[torch.nan, *OLD[1:]]])})
    out = KLComputation(estimator="corrected_k3", old_log_probs_key="old")(data)["next"]
    close(rows_of(out, "kl_penalty"), [[0.0, *CORRECTED[1:]]])


def test_a_token_that_is_not_scored_passes_no_gradient() -> None:
    gen = torch.tensor([[torch.nan, -1.0, -2.0]], requires_grad=True)
    data = TensorDict({GEN: gen, REF: torch.tensor([[-1.0, -1.0, -3.0]])}, batch_size=[1])
    KLComputation(estimator="k2")(data)["kl_penalty"].sum().backward()
    assert gen.grad is not None
    assert gen.grad.tolist() == [[0.0, 0.0, 1.0]]  # d


# ------------------------------------------------------------------ layouts

ROWS_D = [[0.5, -1.0, 0.25], [2.0], [-1.0, 3.0], [0.0, 1.0, -2.0, 4.0]]
FOUR_REF = [torch.full((len(row),), -5.0) for row in ROWS_D]
FOUR_GEN = [torch.tensor(row) - 5.0 for row in ROWS_D]
FOUR_OUTCOMES = [1.0, -3.0, 0.0, 2.0]
FOUR_REWARDS = [[-0.25, 0.5, 0.875], [-4.0], [0.5, -1.5], [0.0, -0.5, 1.0, 0.0]]


def element(i: int) -> TensorDictBase:
    return TensorDict({GEN: FOUR_GEN[i], REF: FOUR_REF[i], "reward": torch.tensor([FOUR_OUTCOMES[i]])})


def four(layout: str) -> TensorDictBase:
    """Four sequences in each layout; dense ones with the mask of their padding."""
    reward = torch.tensor(FOUR_OUTCOMES)[:, None]
    if layout == "lazy":
        return lazy_stack([element(i) for i in range(4)])
    if layout == "lazy [2, 2]":
        return lazy_stack([lazy_stack([element(0), element(1)]), lazy_stack([element(2), element(3)])])
    if layout == "lazy [2, 2] stacked along dimension 1":
        return lazy_stack([lazy_stack([element(0), element(2)]), lazy_stack([element(1), element(3)])], 1)
    if layout.startswith("dense"):
        gen, ref = (
            pad_sequence(rows, batch_first=True, padding_value=v) for rows, v in ((FOUR_GEN, 8.0), (FOUR_REF, 9.0))
        )
        mask = pad_sequence([torch.ones(len(row)).bool() for row in FOUR_GEN], batch_first=True)
        data = TensorDict({GEN: gen, REF: ref, ("masks", "all_attention_mask"): mask, "reward": reward}, batch_size=[4])
        return data.reshape(2, 2) if "[2, 2]" in layout else data
    kind = {"strided": torch.strided, "jagged": torch.jagged}[layout]
    return TensorDict({GEN: nest(FOUR_GEN, kind), REF: nest(FOUR_REF, kind), "reward": reward}, batch_size=[4])


LAYOUTS = ["dense", "dense [2, 2]", "strided", "jagged", "lazy", "lazy [2, 2]", "lazy [2, 2] stacked along dimension 1"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_in_is_layout_out(layout: str) -> None:
    """At the root and in "next"."""
    data = four(layout)
    root = (
        {"next": data.exclude("masks"), "masks": data["masks"]}
        if layout.startswith("dense")
        else {"next": data.clone()}
    )
    inside = TensorDict(root, batch_size=data.batch_size)
    transform = KLComputation(coeff=0.5)
    for out in (transform(inside)["next"], transform(data)):
        assert out.batch_size == data.batch_size
        if layout.startswith("dense"):
            assert out["kl_penalty"].shape == data[GEN].shape
            assert out["reward"].shape == (*data[GEN].shape, 1)
            for key, rows in (("kl_penalty", ROWS_D), ("reward", FOUR_REWARDS)):
                padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
                assert_close(out[key].reshape(4, 4), padded)
            continue
        if layout in ("strided", "jagged"):
            assert out["kl_penalty"].layout == out["reward"].layout == getattr(torch, layout)
            parts = list(zip(out["kl_penalty"].unbind(), out["reward"].unbind(), strict=True))
        else:
            flat = out if out.batch_dims == 1 else [out[i, j] for i in range(2) for j in range(2)]
            parts = [(step["kl_penalty"], step["reward"]) for step in flat]
        for (kl, reward), d, want in zip(parts, ROWS_D, FOUR_REWARDS, strict=True):
            assert_close(kl, torch.tensor(d))
            assert_close(reward, torch.tensor(want)[:, None])


@pytest.mark.parametrize("reward_shape", [(), (1,), (1, 1)])
def test_no_batch_dimension(reward_shape: tuple[int, ...]) -> None:
    for i in range(4):
        data = element(i).set("reward", torch.tensor(FOUR_OUTCOMES[i]).reshape(reward_shape))
        out = KLComputation(coeff=0.5)(TensorDict(next=data))["next"]
        assert out.batch_size == ()
        assert_close(out["kl_penalty"], torch.tensor(ROWS_D[i]))
        assert_close(out["reward"], torch.tensor(FOUR_REWARDS[i])[:, None])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padded", ["gen", "ref"])
def test_one_padded_and_one_nested(padded: str, side: Any) -> None:
    """Without a mask the argument places the padding; the KL has the form of the policy's log-probs."""
    gen, ref = (
        pad_sequence(rows, batch_first=True, padding_side=side, padding_value=-88.0) if name == padded else nest(rows)
        for name, rows in (("gen", FOUR_GEN), ("ref", FOUR_REF))
    )
    data = TensorDict({GEN: gen, REF: ref, "reward": torch.tensor(FOUR_OUTCOMES)}, batch_size=[4])
    out = KLComputation(coeff=0.5, padding_side=side)(data)
    if padded == "ref":
        close(rows_of(out, "kl_penalty"), ROWS_D)
        close(rows_of(out, "reward"), FOUR_REWARDS)
        return
    for key, rows in (("kl_penalty", ROWS_D), ("reward", FOUR_REWARDS)):
        want = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)
        assert_close(out[key].reshape(4, 4), want)


def test_one_padded_on_both_sides_and_one_nested() -> None:
    """A rollout's mask wins over a side."""
    data = rollout([])
    data["next", REF] = nest([torch.tensor([0.0, -3.0, -1.0]), torch.tensor([0.0, -2.0, -1.0])])
    out = KLComputation(coeff=0.5, padding_side="left")(data)["next"]
    assert out["kl_penalty"].tolist() == [[0.0, 2.0, -1.0, 0.0], [0.0, 0.0, 1.0, -2.0]]
    assert out["reward"].squeeze(-1).tolist() == [[0.0, -1.0, 1.5, 0.0], [0.0, 0.0, -0.5, -2.0]]


def test_jagged_and_strided_together() -> None:
    data = TensorDict({GEN: nest(FOUR_GEN, torch.jagged), REF: nest(FOUR_REF)}, batch_size=[4])
    out = KLComputation()(data)["kl_penalty"]
    assert out.layout == torch.jagged
    for row, want in zip(out.unbind(), ROWS_D, strict=True):
        assert_close(row, torch.tensor(want))
