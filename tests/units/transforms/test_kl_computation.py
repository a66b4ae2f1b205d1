"""``KLComputation`` against hand-computed numbers: estimators, coefficients, forms of the reward, and layouts."""

from itertools import product
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torchrl.modules.llm.policies import LogProbs

from layouts import lay_out
from refused import setting_refused
from torchrl_llm_kl import KLComputation
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient, FixedKLCoefficient, available_estimators, get_estimator, k2
from toy_rollouts import rows_of

GEN, REF, EXACT = ("log_probs", "full"), ("ref_log_probs", "full"), ("exact_kl", "full")
NAN = float("nan")


def tensors(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def nest(rows: list[Tensor], layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.as_nested_tensor([row.clone() for row in rows], layout=layout)


def pad(rows: list[list[float]], value: float = 0.0, side: str = "left") -> Tensor:
    return pad_sequence(tensors(rows), batch_first=True, padding_value=value, padding_side=side)


def numbers(td: TensorDictBase, key: str) -> list[list[float]]:
    return [row.reshape(len(row)).tolist() for row in rows_of(td, key)]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert_close(tensors(found), tensors(expected))


# d = log_prob - ref_log_prob = 0.5, -1, 0.25, -4
LOG_PROBS, REF_LOG_PROBS, D = [-1.0, -2.0, -0.5, -5.0], [-1.5, -1.0, -0.75, -1.0], [0.5, -1.0, 0.25, -4.0]


def one(reward: float | None = None, **more: Tensor) -> TensorDictBase:
    entries = {GEN: torch.tensor([LOG_PROBS]), REF: torch.tensor([REF_LOG_PROBS])}
    data = TensorDict(next=TensorDict({**entries, **more}, batch_size=[1]), batch_size=[1])
    if reward is not None:
        data["next", "reward"] = torch.tensor([[reward]])
    return data


def own(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    return 3 * ref_log_prob - log_prob + 100 * old_log_prob


@pytest.mark.parametrize("name", [own, *(name for name in available_estimators() if name != "exact")])
def test_every_estimator(name: Any) -> None:
    """On policy, so the log-probs at sampling time are the policy's."""
    gen, ref = torch.tensor(LOG_PROBS), torch.tensor(REF_LOG_PROBS)
    values = (own if name is own else get_estimator(name))(gen, ref, gen).tolist()
    data = KLComputation(estimator=name, coeff=0.5)(one(reward=2.0))["next"]
    close(numbers(data, "kl_penalty"), [values])
    close(numbers(data, "reward"), [[*(-0.5 * v for v in values[:-1]), 2.0 - 0.5 * values[-1]]])


def test_narrow_dtypes_are_widened_and_wide_ones_kept() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        data = one(reward=2.0, exact_kl=TensorDict(full=torch.tensor([D]), batch_size=[1]))["next"].to(dtype)
        for estimator in ("k1", "exact"):
            out = KLComputation(estimator=estimator)(data.clone())
            assert out["kl_penalty"].dtype == out["reward"].dtype == expected
            close(numbers(out, "kl_penalty"), [D])


OLD = [-1.0, -2.5, -0.25, -7.0]
# min(exp(log_prob - old), 2) * k3, the ratios being 1, exp(0.5), exp(-0.25), exp(2)
CORRECTED = [0.1065307, 1.1842465, 0.0224301, 99.1963000]


def test_corrected_k3_with_the_log_probs_of_the_sampler() -> None:
    """The entry may be at the root or below "next". A leading NaN is not scored."""
    transform = KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"), coeff=0.1)
    data = one(reward=1.0)
    data["old", "full"] = torch.tensor([OLD])
    out = transform(data)["next"]
    close(numbers(out, "kl_penalty"), [CORRECTED])
    close(numbers(out, "reward"), [[-0.01065307, -0.11842465, -0.00224301, -8.91963]])
    data["next", "old", "full"] = torch.tensor([[NAN, *OLD[1:]]])
    close(numbers(transform(data)["next"], "kl_penalty"), [[0.0, *CORRECTED[1:]]])


K1 = [D, [-0.5, 1.0, -0.25, 7.0]]  # and the reward with an outcome of 3
K2 = [[0.125, 0.5, 0.03125, 8.0], [-0.625, -2.5, -0.15625, -37.0]]  # with a coefficient of 5
READ = [[0.0, 7.0, 5.0, 1.0], [0.0, -7.0, -5.0, 2.0]]


def test_the_estimator_can_change_and_copies_are_independent() -> None:
    def found(transform: KLComputation) -> list[list[float]]:
        out = transform(one(reward=3.0, exact_kl=TensorDict(full=torch.tensor(READ[:1]), batch_size=[1])))["next"]
        return [*numbers(out, "kl_penalty"), *numbers(out, "reward")]

    transform = KLComputation()
    transform.estimator = "exact"
    assert transform.in_keys == [EXACT, "reward"]
    assert found(transform) == READ
    with pytest.raises(ValueError, match=r"old_log_probs_key=.*'old'.*estimator='exact'"):
        transform.old_log_probs_key = ("old", "full")
    transform.estimator = "k1"
    assert transform.in_keys == [GEN, REF, "reward"]
    assert found(transform) == K1
    other = transform.clone()
    other.estimator, other.coeff = "k2", 5.0
    assert other.estimator is k2
    assert (found(transform), found(other)) == (K1, K2)
    assert list(other.state_dict()) == ["coeff.value"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("estimator", "k9", "unknown KL estimator 'k9'.*Known: none, k1"),
        ("estimator", "exact", "old_log_probs_key=.*'old'.* estimator='exact'"),
        ("reward_placement", "first", "reward_placement must be one of 'last', 'broadcast', got 'first'"),
        ("padding_side", "middle", "one of 'left', 'right', got 'middle'"),
        ("coeff", float("nan"), "must be a finite number of at least 0, got nan"),
    ],
)
def test_bad_settings_are_refused(name: str, value: Any, message: str) -> None:
    setting_refused(KLComputation, name, value, message, old_log_probs_key="old")


def test_keys_follow() -> None:
    transform = KLComputation(add_to_reward=False)
    assert (transform.in_keys, transform.out_keys) == ([GEN, REF], ["kl_penalty"])
    transform.kl_key, transform.reward_key, transform.gen_log_probs_full_key = "kl", "score", "mine"
    transform.add_to_reward = True
    assert (transform.in_keys, transform.out_keys) == (["mine", REF, "score"], ["kl", "score"])
    data = one(reward=3.0)["next"].rename_key_(GEN, "mine").rename_key_("reward", "score")
    out = transform(data.clone())
    assert [*numbers(out, "kl"), *numbers(out, "score")] == K1
    transform.add_to_reward = False
    assert transform.out_keys == ["kl"]
    out = transform(data.clone())
    assert (numbers(out, "kl"), out["score"].tolist()) == ([D], [[3.0]])
    assert transform(data.exclude("score")).get("score", None) is None


@pytest.mark.parametrize(
    ("padded", "side"), [("old", "left"), ("gen", "right"), ("ref", "left"), ("gen old", "left"), ("ref old", "right")]
)
def test_log_probs_of_the_sampler_in_another_layout(padded: str, side: Any) -> None:
    """The named entries are padded without a mask, and the others are nested."""
    entries = {}
    for name, values in (("gen", LOG_PROBS), ("ref", REF_LOG_PROBS), ("old", OLD)):
        rows = [values, values[:2]]
        entries[name] = pad(rows, -77.0, side) if name in padded.split() else nest(tensors(rows))
    transform = KLComputation("gen", "ref", estimator="corrected_k3", old_log_probs_key="old", padding_side=side)
    out = transform(TensorDict(entries, batch_size=[2]))
    short = CORRECTED[:2]
    if "gen" in padded:
        short = [0.0, 0.0, *short] if side == "left" else [*short, 0.0, 0.0]
    close(numbers(out, "kl_penalty"), [CORRECTED, short])


def test_every_kind_of_coefficient() -> None:
    """A tensor is copied, so later changes have no effect. A negative coefficient needs the explicit class."""
    changing = torch.tensor(0.3)
    kinds = 0.3, changing, torch.tensor([0.3]), FixedKLCoefficient(0.3), AdaptiveKLCoefficient(0.3, 1.0, 10.0)
    transforms = [KLComputation(coeff=coeff) for coeff in kinds]
    changing.fill_(7.0)
    for transform in transforms:
        data = transform(one(reward=2.0))["next"]
        close(numbers(data, "reward"), [[-0.15, 0.3, -0.075, 3.2]])
        close(numbers(data, "kl_penalty"), [D])
    close(numbers(KLComputation(coeff=FixedKLCoefficient(-1.0))(one())["next"], "reward"), [D])
    transforms[-1].coeff.update(5.0, n=1)  # the adaptive one, read at every call: 0.3 * (1 + 0.2 * 1 / 10) = 0.306
    close(numbers(transforms[-1](one())["next"], "reward"), [[-0.153, 0.306, -0.0765, 1.224]])


FOUR = [[0.5, -1.0, 0.25], [2.0], [-1.0, 3.0], [0.0, 1.0, -2.0, 4.0]]
OUTCOMES = [1.0, -3.0, 0.0, 2.0]
PENALTY = [[-0.5 * d for d in row] for row in FOUR]
REWARDS = {
    "last": [[*row[:-1], row[-1] + outcome] for row, outcome in zip(PENALTY, OUTCOMES, strict=True)],
    "broadcast": [[x + outcome for x in row] for row, outcome in zip(PENALTY, OUTCOMES, strict=True)],
}
LAYOUTS = ["padded", "padded [2, 2]", "nested", "jagged", "lazy", "lazy [2, 2]", "lazy [2, 2], dimension 1", "parts"]


def four(layout: str = "nested", read: str = "k1", reward: Any = None) -> TensorDictBase:
    """Four sequences with the entries to read. Padding holds numbers that must not be read."""
    rows = tensors(FOUR)
    entries: dict[Any, Any] = {EXACT: rows} if "exact" in read else {}
    if read != "exact":  # beside an exact KL, log-probs of another difference
        entries |= {GEN: [row - 5.0 if read == "k1" else -row.abs() for row in rows]}
        entries |= {REF: [torch.full_like(row, -5.0) for row in rows]}
    form, _, shape = layout.partition(" ")
    if form == "padded":
        entries["masks", "all_attention_mask"] = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    elif form == "parts":  # rows in a dense TensorDict
        entries = {key[0]: lazy_stack([TensorDict(full=row) for row in value]) for key, value in entries.items()}
    entries["reward"] = torch.tensor(OUTCOMES)[:, None] if reward is None else reward
    data = lay_out(form, entries, FOUR, fill=77.0)
    if not shape or form == "padded":
        return data.reshape(2, 2) if shape else data
    order, dim = ([0, 2, 1, 3], 1) if "1" in shape else ([0, 1, 2, 3], 0)
    parts = [data[i] for i in order]
    return lazy_stack([lazy_stack(parts[:2]), lazy_stack(parts[2:])], dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("read", ["k1", "exact", "exact beside log-probs"])
def test_layout_in_is_layout_out(layout: str, read: str) -> None:
    """At the root and below "next", with both placements of the outcome."""
    for inside, (placement, rewards) in product((True, False), REWARDS.items()):
        data = four(layout, read)
        shape = data.batch_size
        if inside:
            masks = {"masks": data["masks"]} if "masks" in data else {}
            data = TensorDict({"next": data.exclude("masks"), **masks}, batch_size=shape)
        out = KLComputation(estimator=read.split()[0], coeff=0.5, reward_placement=placement)(data)
        out = out["next"] if inside else out
        assert out.batch_size == shape
        for key, rows in (("kl_penalty", FOUR), ("reward", rewards)):
            want = list(pad(rows)) if "padded" in layout else tensors(rows)
            want = [row.unsqueeze(-1) for row in want] if key == "reward" else want
            assert_close(rows_of(out, key), want, rtol=0, atol=0)
            if layout in ("nested", "jagged"):
                assert out[key].layout == (torch.jagged if layout == "jagged" else torch.strided)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padded", [GEN, REF, EXACT])
def test_one_padded_and_one_nested(padded: Any, side: Any) -> None:
    """Without a mask, ``padding_side`` decides. The KL has the layout of the policy's log-probs."""
    data = four()
    if padded == EXACT:
        data[EXACT] = nest(tensors(FOUR))
    data[padded] = pad([row.tolist() for row in data[padded].unbind()], -88.0, side)
    out = KLComputation(coeff=0.5, padding_side=side, estimator="exact" if padded == EXACT else "k1")(data)
    for key, rows in (("kl_penalty", FOUR), ("reward", REWARDS["last"])):
        close(numbers(out, key), pad(rows, side=side).tolist() if padded == GEN else rows)


def placed(data: TensorDictBase) -> list[list[list[float]]]:
    """The rewards with the outcome on the last token, and on every token."""
    transforms = [KLComputation(coeff=0.5, reward_placement=place) for place in ("last", "broadcast")]
    return [numbers(transform(data.clone()), "reward") for transform in transforms]


def test_a_reward_per_token_is_not_moved() -> None:
    """For both placements. A missing reward is 0."""
    rows = [[0.125, 0.25, 3.0], [-1.0], [0.75, 0.5], [1.0, 2.0, 3.0, 5.0]]
    want = [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(rows, PENALTY, strict=True)]
    assert placed(four("lazy", reward=tensors(rows))) == [want] * 2
    assert placed(four("padded", reward=pad(rows).unsqueeze(-1))) == [pad(want).tolist()] * 2
    assert placed(four().exclude("reward")) == [PENALTY] * 2


def rollout(prompt_lengths: list[int]) -> TensorDictBase:
    """Two padded sequences: one token of padding left of the second, one right of the first."""
    full = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7]])
    root: dict[Any, Any] = {
        ("tokens", "full"): full,
        ("masks", "all_attention_mask"): full > 0,
        GEN: torch.tensor([[0.0, -1.0, -2.0, 9.0], [9.0, 0.0, -1.0, -3.0]]),
        REF: torch.tensor([[0.0, -3.0, -1.0, 7.0], [7.0, 0.0, -2.0, -1.0]]),
        "reward": torch.tensor([[1.0], [-3.0]]),
    }
    if prompt_lengths:
        root["tokens", "prompt"] = nest([row[:n] for row, n in zip(full, prompt_lengths, strict=True)])
    return TensorDict(root, batch_size=[2])


@pytest.mark.parametrize("prompt_lengths", [[], [1, 2], [3, 3]])
def test_padding_is_zero_and_the_outcome_is_on_the_last_real_token(prompt_lengths: list[int]) -> None:
    """Rewards at padding are ignored. The mask of a rollout takes precedence over ``padding_side``."""
    data = rollout(prompt_lengths)
    last = [[0.0, -1.0, 1.5, 0.0], [0.0, 0.0, -0.5, -2.0]]
    assert placed(data) == [last, [[1.0, 0.0, 1.5, 0.0], [0.0, -3.0, -3.5, -2.0]]]
    one_nested = data.clone().set(REF, nest(tensors([[0.0, -3.0, -1.0], [0.0, -2.0, -1.0]])))
    for each in (data.clone(), one_nested):
        out = KLComputation(coeff=0.5, padding_side="left")(each)
        assert out["kl_penalty"].tolist() == [[0.0, 2.0, -1.0, 0.0], [0.0, 0.0, 1.0, -2.0]]
        assert out["reward"].squeeze(-1).tolist() == last
    data["reward"] = torch.tensor([[1.0, 2.0, 3.0, 99.0], [99.0, 4.0, 5.0, 6.0]]).unsqueeze(-1)
    assert placed(data) == [[[1.0, 1.0, 3.5, 0.0], [0.0, 4.0, 4.5, 7.0]]] * 2


def test_a_leading_run_of_nan_is_not_scored() -> None:
    """The KL is 0 where at least one model has NaN. The outcome stays on the last token."""
    gen = tensors([[NAN, NAN, -1.0, -2.0], [NAN, -1.0], [NAN, NAN]])
    ref = tensors([[NAN, -3.0, -3.0, -1.0], [NAN, NAN], [-1.0, -2.0]])
    data = TensorDict({GEN: nest(gen), REF: nest(ref), "reward": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3])
    out = KLComputation(coeff=0.5)(data)
    assert numbers(out, "kl_penalty") == [[0.0, 0.0, 2.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert numbers(out, "reward") == [[0.0, 0.0, -1.0, 1.5], [0.0, 2.0], [0.0, 3.0]]


def test_gradients_reach_only_scored_tokens() -> None:
    kl = torch.tensor([[NAN, 0.5, 0.25], [9.0, 2.0, 1.0]], requires_grad=True)
    mask = {("masks", "all_attention_mask"): torch.tensor([[True] * 3, [False, True, True]])}
    out = KLComputation(estimator="exact", coeff=0.5)(TensorDict({EXACT: kl, **mask}, batch_size=[2]))
    assert out["kl_penalty"].tolist() == [[0.0, 0.5, 0.25], [0.0, 2.0, 1.0]]
    (found,) = torch.autograd.grad(3 * out["kl_penalty"].sum() + out["reward"].sum(), kl)
    assert found.tolist() == [[0.0, 2.5, 2.5]] * 2  # 3 of the KL, -0.5 of the reward
    gen = torch.tensor([NAN, -1.0, -2.0], requires_grad=True)
    data = lazy_stack([TensorDict({GEN: gen, REF: torch.tensor([-1.0, -1.0, -3.0])})])
    (found,) = torch.autograd.grad(KLComputation(estimator="k2")(data)[0]["kl_penalty"].sum(), gen)
    assert found.tolist() == [0.0, 0.0, 1.0]  # d


def test_an_exact_kl_at_the_root_is_read() -> None:
    """``"next"`` takes precedence over the root. A tensorclass of log-probs may hold the entry."""
    data = TensorDict(exact_kl=LogProbs(full=pad(FOUR), batch_size=[4]), batch_size=[4])
    data["next"] = TensorDict(reward=torch.zeros(4, 1), batch_size=[4])
    transform = KLComputation(estimator="exact")
    assert transform(data)["next", "kl_penalty"].tolist() == pad(FOUR).tolist()
    data["next", "mine"] = TensorDict(full=3 * pad(FOUR), batch_size=[4])
    data["next", "exact_kl"] = TensorDict(full=2 * pad(FOUR), batch_size=[4])
    assert transform(data)["next", "kl_penalty"].tolist() == (2 * pad(FOUR)).tolist()
    transform.exact_kl_key = ("mine", "full")
    assert transform(data)["next", "kl_penalty"].tolist() == (3 * pad(FOUR)).tolist()


def test_the_exact_kl_is_copied_and_keeps_small_negative_values() -> None:
    data = TensorDict({EXACT: torch.tensor([[0.0, -1e-3, -1e-9]])}, batch_size=[1])
    kl = KLComputation(estimator="exact", add_to_reward=False)(data)["kl_penalty"]
    assert torch.equal(kl, data[EXACT])
    kl.zero_()
    assert data[EXACT][0, 1] == torch.tensor(-1e-3)
