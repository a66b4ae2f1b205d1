"""Distillation from a teacher's top k or its whole distribution: against one plain forward per sequence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from closeness import assert_near, needs_equal_rows
from policy_batches import LENGTHS, PROMPT, batch, gradients
from torchrl_llm_kl import LogProbScorer, PolicyLoss, RetrieveLogProb, Sampling, make_algorithm
from torchrl_llm_kl.losses import DivergenceToTeacher, KLToReference, LossTerm, distill, get_objective
from toy_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:the top k below")
V = VOCAB_SIZE
BETAS = [0.0, 0.3, 1.0]


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.number = max([self.number, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def data(layout: str = "padded") -> TensorDictBase:
    return batch(layout=layout).exclude("next")


def wide(seed: int) -> nn.Module:
    return tiny_model(seed=seed).double()


def distributions(model: nn.Module, temperature: float = 1.0) -> Tensor:
    """Log-probs of every token at each response position, with graph; ``[N, V]``."""
    full = data()["tokens", "full"]
    rows = []
    for ids, length in zip(full, LENGTHS, strict=True):
        logits = model(input_ids=ids[:length].unsqueeze(0)).logits[0, PROMPT - 1 : -1] / temperature
        rows.append(logits.log_softmax(-1))
    return torch.cat(rows)


def collapse(log_p: Tensor, ids: Tensor) -> Tensor:
    listed = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)
    rest = log_p.masked_fill(listed, -1e30).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest.masked_fill(listed.all(-1, keepdim=True), -torch.inf)], -1)


def enumerated(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """GKD's divergence from probabilities; an outcome that neither has adds nothing."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.clamp(min=1e-300) / b.clamp(min=1e-300)).log(), 0.0).sum(-1)

    p, q = log_p.exp(), log_q.exp()
    m = beta * p + (1 - beta) * q
    return {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))


def same_gradients(found: Tensor, want: Tensor, student: nn.Module) -> None:
    """Of a model in float64; its norms compute in float32, so that only the head's gradient is that exact."""
    a, b = gradients(found, student), gradients(want, student)
    assert_close(a["lm_head.weight"], b["lm_head.weight"], atol=1e-12, rtol=1e-9)
    assert_close(a, b, atol=1e-6, rtol=1e-4)


def with_teacher(td: TensorDictBase, teacher: nn.Module, k: int, key: Any = "top_k") -> TensorDictBase:
    """The entries of a teacher in its own dtype, written row by row."""
    scorer, rows = LogProbScorer(teacher), []
    for row, length in zip(td.unbind(0), LENGTHS, strict=True):
        ids = row["tokens", "full"]
        mask = torch.zeros(length, dtype=torch.bool)
        mask[PROMPT:] = True
        found = scorer.evaluate([ids[:length]], [mask], top_k=k)
        for name, entry in zip(("ids", "log_probs", "rest_log_prob"), found[4:7], strict=True):
            value = entry.values.new_zeros(len(ids), *entry.values.shape[1:])
            value[:length] = entry.values
            row = row.set((*((key,) if isinstance(key, str) else key), name), value)
        rows.append(row)
    return lazy_stack(rows)


# ---------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize(("k", "beta"), [(1, 0.0), (5, 0.3), (V, 1.0), (5, 1.0), (V, 0.3)])
def test_top_k_in_float64(k: int, beta: float) -> None:
    """Enumeration over the whole vocabulary; ``k = V`` is the exact divergence."""
    student, teacher = wide(0), wide(1)
    td = with_teacher(data(), teacher, k)
    out = PolicyLoss(student, "distill", beta=beta)(td)
    with torch.no_grad():
        log_p = distributions(teacher)
    log_q, ids = distributions(student), log_p.topk(k, -1).indices
    want = enumerated(collapse(log_q, ids), collapse(log_p, ids), float(torch.tensor(beta))).mean()
    assert_close(out["loss_objective"], want, atol=1e-11, rtol=1e-10)
    same_gradients(out["loss_objective"], want, student)
    captured = log_p.gather(-1, ids).exp().sum(-1).mean()
    assert_close(out["captured_mass"], captured, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_distribution_of_a_local_teacher(beta: float) -> None:
    student, teacher = wide(0), wide(1)
    out = PolicyLoss(student, "distill", beta=beta, distribution="exact", reference=teacher)(data())
    want = enumerated(distributions(student), distributions(teacher).detach(), float(torch.tensor(beta))).mean()
    assert_close(out["loss_objective"], want, atol=1e-11, rtol=1e-10)
    same_gradients(out["loss_objective"], want, student)
    assert "captured_mass" not in out


@pytest.mark.parametrize(("layout", "beta"), [("padded", 0.0), ("nested", 0.3), ("lazy", 1.0)])
def test_what_the_transform_wrote(layout: str, beta: float) -> None:
    """Float32, any layout: with every token listed, value and gradients of the exact divergence."""
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    exact = PolicyLoss(student, "distill", beta=beta, distribution="exact", reference=teacher)(data(layout))
    td = RetrieveLogProb(teacher, top_k=V)(data(layout))
    out = PolicyLoss(student, "distill", beta=beta)(td)
    assert_near(out["loss_objective"], exact["loss_objective"], terms=V)
    found = gradients(out["loss_objective"], student)
    assert_near(found, gradients(exact["loss_objective"], student), terms=64 * 64, size=1)
    few = PolicyLoss(student, "distill", beta=beta)(RetrieveLogProb(teacher, top_k=3)(data(layout)))
    assert few["loss_objective"] < out["loss_objective"]


@pytest.mark.parametrize("given", [{"temperature": 0.6}, {"sampling": Sampling(0.6)}], ids=["temperature", "sampling"])
def test_temperature_divides_the_logits_of_both(given: dict[str, Any]) -> None:
    student, teacher = wide(0), wide(1)
    td = RetrieveLogProb(teacher, top_k=V, **given)(data())
    out = PolicyLoss(student, "distill", beta=0.3, **given)(td)
    want = enumerated(distributions(student, 0.6), distributions(teacher, 0.6).detach(), 0.3).mean()
    assert_close(out["loss_objective"], want, atol=1e-6, rtol=1e-6)  # entries are float32


@pytest.mark.filterwarnings("ignore:LogProbScorer takes")
@pytest.mark.parametrize("route", ["full", pytest.param("deterministic", marks=needs_equal_rows), "no_prefixes"])
def test_other_routes_of_the_engine(route: str) -> None:
    """Logits of a model whose head cannot be called alone, fixed tiles, and padded micro-batches."""

    class Whole(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
            return (self.inner(input_ids, attention_mask=attention_mask).logits,)

    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    td = with_teacher(with_teacher(data(), teacher, 6, "one"), tiny_model(seed=2), 40, "two")
    actor: Any = {"full": Whole(student), "no_prefixes": LogProbScorer(student, share_prefixes=False)}.get(
        route, student
    )
    options: Any = {"top_k_key": ["one", "two"], "beta": 0.3}
    expected = PolicyLoss(student, "distill", **options)(td)["loss_objective"]
    found = PolicyLoss(actor, "distill", **options, deterministic=route == "deterministic")(td)["loss_objective"]
    assert_near(found, expected, terms=V)
    assert_near(gradients(found, student), gradients(expected, student), terms=64 * 64, size=1)


def test_no_tensor_over_the_vocabulary() -> None:
    """Forward and backward of the head at 15 positions of a vocabulary of 50,000; a head's own gradient is the largest."""
    small: dict[str, Any] = {"vocab_size": 50_000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    student, teacher = (tiny_model(seed=seed, **small) for seed in (0, 1))
    td = RetrieveLogProb(teacher, top_k=8)(data())
    loss = PolicyLoss(student, "distill")
    with Largest() as largest, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(td)["loss_objective"].backward()
    positions = sum(length - PROMPT for length in LENGTHS)
    assert largest.number < positions * 50_000


# ---------------------------------------------------------------------- several teachers


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_several_teachers_are_a_weighted_sum(beta: float) -> None:
    """Different k, keys and weights, in one sweep of the head."""
    student, teachers = wide(0), (wide(1), wide(2))
    td, keys, weights, ks = data(), ["one", ("second", "top")], (0.7, 0.2), (3, 20)
    for teacher, key, k in zip(teachers, keys, ks, strict=True):
        td = with_teacher(td, teacher, k, key)
    loss = PolicyLoss(student, "distill", beta=beta, top_k_key=keys, teacher_weights=weights)
    out = loss(td)
    log_q = distributions(student)
    want, captured = torch.zeros(()).double(), torch.zeros(()).double()
    for teacher, weight, k in zip(teachers, weights, ks, strict=True):
        log_p = distributions(teacher).detach()
        ids = log_p.topk(k, -1).indices
        want = want + weight * enumerated(collapse(log_q, ids), collapse(log_p, ids), float(torch.tensor(beta))).mean()
        captured += weight / 0.9 * log_p.gather(-1, ids).exp().sum(-1).mean()
    assert_close(out["loss_objective"], want, atol=1e-11, rtol=1e-6)
    same_gradients(out["loss_objective"], want, student)
    assert_close(out["captured_mass"], captured, atol=1e-6, rtol=1e-6)
    assert set(loss.in_keys) >= {("one", "ids"), ("second", "top", "log_probs"), ("second", "top", "rest_log_prob")}
    loss.teacher_weights = None  # equal ones, 1 / M
    equal = sum(PolicyLoss(student, "distill", beta=beta, top_k_key=key)(td)["loss_objective"].item() for key in keys)
    assert loss(td)["loss_objective"].item() == pytest.approx(equal / 2, rel=1e-9)


def test_what_the_weighted_sum_trains_towards() -> None:
    """Forward KLs: the gradient of the KL to the weighted mean. Reverse KLs: to the normalised geometric mean."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 1, 6, generator=rng).double().requires_grad_()
    teachers = torch.randn(1, 1, 2, 6, generator=rng).double().log_softmax(-1)
    weights = (0.35, 0.65)
    none, mask, log_prob = torch.full((1, 1, 2, 1), -torch.inf), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    mean = (weights[0] * teachers[..., 0, :].exp() + weights[1] * teachers[..., 1, :].exp()).log()
    geometric = (weights[0] * teachers[..., 0, :] + weights[1] * teachers[..., 1, :]).log_softmax(-1)
    for beta, target in ((0.0, mean), (1.0, geometric)):
        log_q = logits.log_softmax(-1)
        (term,) = distill(
            log_prob,
            mask,
            outcomes=torch.cat([log_q.unsqueeze(-2).expand(1, 1, 2, 6), none], -1),
            teacher_outcomes=torch.cat([teachers, none], -1),
            beta=beta,
            teacher_weights=weights,
        )
        want = enumerated(log_q, target, beta)
        assert_close(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (term.value, want)))


def test_one_teacher_without_its_dimension() -> None:
    outcomes, teacher = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    mask = torch.ones(3, 4, dtype=torch.bool)
    one, other = (
        distill(torch.zeros(3, 4), mask, outcomes=a, teacher_outcomes=b)[0]
        for a, b in ((outcomes, teacher), (outcomes.unsqueeze(2), teacher.unsqueeze(2)))
    )
    assert torch.equal(one.value, other.value)
    assert torch.equal(one.metrics["captured_mass"], other.metrics["captured_mass"])


# ---------------------------------------------------------------------- conventions of losses


def test_a_term_beside_another_objective() -> None:
    student, teacher = wide(0), wide(1)
    td = with_teacher(batch().exclude(("next", "sampler_log_probs"), ("next", "ref_log_probs")), teacher, 4)
    alone = PolicyLoss(student, "distill", beta=1.0)(td)
    loss = PolicyLoss(student, "ppo", terms=[DivergenceToTeacher(0.25, beta=1.0)])
    out = loss(td)
    assert_close(out["loss_divergence_to_teacher"], 0.25 * alone["loss_objective"])
    assert_close(out["loss_objective"], PolicyLoss(student, "ppo")(td)["loss_objective"])
    loss.divergence_to_teacher_coeff = 0.5
    loss.divergence_to_teacher_beta = 0.0
    forward = PolicyLoss(student, "distill", beta=0.0)(td)["loss_objective"]
    assert_close(loss(td)["loss_divergence_to_teacher"], 0.5 * forward)
    assert set(loss(td).keys()) == set(loss.out_keys)


@pytest.mark.parametrize(("aggregation", "distribution"), [("token-mean", "top_k"), ("seq-mean-token-mean", "exact")])
def test_micro_batches_add_up(aggregation: Any, distribution: Any) -> None:
    student, teacher = wide(0), wide(1)
    td = with_teacher(data(), teacher, 4)
    td["loss_mask"] = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    reference = teacher if distribution == "exact" else None
    loss = PolicyLoss(
        student, "distill", aggregation=aggregation, max_len=5, distribution=distribution, reference=reference
    )
    whole = loss(td)["loss_objective"]
    counted = loss.count(td)
    parts = sum(loss(counted[rows])["loss_objective"] for rows in torch.tensor([4, 0, 2, 5, 1, 3]).split([1, 3, 2]))
    assert_close(parts, whole)
    same_gradients(parts, whole, student)


def test_masked_tokens_may_hold_anything() -> None:
    student, teacher = wide(0), wide(1)
    td = with_teacher(data(), teacher, 4)
    td["loss_mask"] = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    want = PolicyLoss(student, "distill")(td)["loss_objective"]
    for row in (1, 4):
        td[row]["top_k", "log_probs"].fill_(torch.nan)
        td[row]["top_k", "rest_log_prob"].fill_(torch.inf)
    out = PolicyLoss(student, "distill")(td)
    assert torch.equal(out["loss_objective"], want)
    assert all(x.isfinite().all() for x in gradients(out["loss_objective"], student).values())


@pytest.mark.filterwarnings("ignore:the mask is empty")
@pytest.mark.parametrize("distribution", ["top_k", "exact"])
def test_an_empty_mask_has_a_gradient_of_0(distribution: Any) -> None:
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    td = with_teacher(data(), teacher, 4)
    td["loss_mask"] = torch.zeros(6, dtype=torch.bool)
    reference = teacher if distribution == "exact" else None
    out = PolicyLoss(student, "distill", distribution=distribution, reference=reference)(td)
    assert out["loss_objective"] == 0
    out["loss_objective"].backward()
    assert all((p.grad == 0).all() for p in student.parameters())


def test_keys_and_outputs() -> None:
    loss = PolicyLoss(tiny_model(seed=0), "distill")
    entries = [("top_k", name) for name in ("ids", "log_probs", "rest_log_prob")]
    assert set(entries) <= set(loss.in_keys)
    assert set(loss.out_keys) == {"loss_objective", "captured_mass", "num_tokens", "num_sequences"}
    td = with_teacher(data(), tiny_model(seed=1), V)
    assert set(loss(td).keys()) == set(loss.out_keys)
    moved = td.exclude("top_k").set("next", TensorDict({"top_k": td["top_k"]}, batch_size=td.batch_size))
    assert_close(loss(moved)["loss_objective"], loss(td)["loss_objective"])
    exact = PolicyLoss(tiny_model(seed=0), "distill", distribution="exact", reference=tiny_model(seed=1))
    assert not set(entries) & set(exact.in_keys)
    assert set(exact(data()).keys()) == set(exact.out_keys)


def test_rows_of_the_response_alone() -> None:
    """An inference engine's entries begin with the first token of the response."""
    student, teacher = wide(0), wide(1)
    td = with_teacher(data("lazy"), teacher, 4)
    short = lazy_stack(
        [
            row.exclude("top_k").set("top_k", {name: value[PROMPT:] for name, value in row["top_k"].items()})
            for row in td.unbind(0)
        ]
    )
    loss = PolicyLoss(student, "distill")
    assert torch.equal(loss(short)["loss_objective"], loss(td)["loss_objective"])


def test_a_divergence_of_ones_own() -> None:
    """A function that takes outcomes gets them: here the total variation."""

    def variation(
        log_prob: Tensor, mask: Tensor, *, outcomes: Tensor, teacher_outcomes: Tensor
    ) -> tuple[LossTerm, ...]:
        return (LossTerm("variation", (outcomes.exp() - teacher_outcomes.exp()).abs().sum((-2, -1)) / 2, mask),)

    student, teacher = wide(0), wide(1)
    out = PolicyLoss(student, variation)(with_teacher(data(), teacher, V))
    want = (distributions(student).exp() - distributions(teacher).exp()).abs().sum(-1).mean() / 2
    assert_close(out["loss_variation"], want, atol=1e-7, rtol=1e-7)


def test_little_captured_mass_warns_once_for_each_teacher() -> None:
    student = tiny_model(seed=0)
    td = with_teacher(with_teacher(data(), tiny_model(seed=1), 1, "few"), tiny_model(seed=2), V, "all")
    loss = PolicyLoss(student, "distill", top_k_key=["few", "all"])
    with pytest.warns(UserWarning, match=r"the top k below 'few' holds 0\.\d\d of the teacher's probability") as caught:
        loss(td)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(td)
        PolicyLoss(student, "distill", top_k_key="all")(td)


# ---------------------------------------------------------------------- errors


def spoilt(td: TensorDictBase, change: Callable[[TensorDictBase], Any]) -> TensorDictBase:
    """With what ``change`` makes of each row's ids, which then have several widths."""
    return lazy_stack([row.set(("top_k", "ids"), change(row["top_k", "ids"])) for row in td.unbind(0)])


def placed(td: TensorDictBase, value: Any, *names: str) -> TensorDictBase:
    for name in names:
        td[2]["top_k", name][PROMPT] = value
    return td


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda td: placed(td, 0, "ids", "log_probs", "rest_log_prob"),
            ValueError,
            rf"below 'top_k' add up to 5 at sequence 2, position {PROMPT}, not to 1.*did not score",
        ),
        (
            lambda td: placed(td, torch.nan, "rest_log_prob"),
            ValueError,
            rf"below 'top_k' add up to nan at sequence 2, position {PROMPT}",
        ),
        (lambda td: td.exclude("top_k"), KeyError, r"needs a teacher's top k.*\('top_k', 'ids'\).*top_k=64"),
        (lambda td: td.exclude(("top_k", "rest_log_prob")), KeyError, r"'rest_log_prob'"),
        (
            lambda td: spoilt(td, lambda ids: ids[:, 1:]),
            ValueError,
            r"hold \(3,\) and \(4,\) numbers per token: expected the same k",
        ),
        (
            lambda td: spoilt(td, lambda ids: ids[:, 0]),
            ValueError,
            r"must have 1 dimension after the tokens, found none",
        ),
        (lambda td: spoilt(td, lambda ids: ids.float()), ValueError, r"holds torch.float32: expected integers"),
        (
            lambda td: placed(td, V, "ids"),
            ValueError,
            rf"top_ids holds the token id {V}, outside the vocabulary of {V}",
        ),
    ],
)
def test_data_that_is_no_teacher(spoil: Any, error: Any, message: str) -> None:
    td = spoil(with_teacher(data(), tiny_model(seed=1), 4))
    with pytest.raises(error, match=message):
        PolicyLoss(tiny_model(seed=0), "distill")(td)


ONE = torch.ones(1, 1)
PAIR = torch.full((1, 1, 2), 0.5).log()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"outcomes": PAIR}, r"distill needs teacher_outcomes: pass teacher_outcomes=, \[\*B, T, k \+ 1\]"),
    ({"distribution": "exact"}, r"distill needs teacher_divergence.*or change distribution='exact'"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR[..., :1]}, r"outcomes has shape \(1, 1, 2\) but teacher_outcomes"),
    ({"outcomes": PAIR[0], "teacher_outcomes": PAIR[0]}, r"outcomes has shape \(1, 2\), expected \(1, 1, k \+ 1\)"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR, "beta": 1.5}, "beta must be at least 0 and at most 1, got 1.5"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR, "distribution": "all"}, "distribution must be one of"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR, "teacher_weights": [1, 2]}, "2 numbers for 1 teachers"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR, "teacher_weights": [-1.0]}, "must not be negative"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR, "teacher_weights": [0.0]}, "nor all 0"),
    ({"distribution": "exact", "teacher_divergence": ONE, "teacher_weights": [1.0]}, "leave out teacher_weights"),
]


def test_wrong_inputs() -> None:
    for given, message in WRONG:
        with pytest.raises(ValueError, match=message):
            get_objective("distill")(ONE, ONE > 0, **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distribution": "exact"}, r"an exact KL is computed from both models: pass the teacher as reference="),
        (
            {"distribution": "exact", "terms": [KLToReference(0.1, "exact")], "reference": tiny_model(seed=1)},
            "need two other models, and reference= is one",
        ),
        ({"teacher_weights": [0.5, 0.5]}, "teacher_weights has 2 numbers for 1 teachers"),
        ({"top_k_key": ["a", "b"], "teacher_weights": [1.0]}, "teacher_weights has 1 numbers for 2 teachers"),
    ],
)
def test_contradictory_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLoss(tiny_model(seed=0), "distill", **settings)


TRUNCATED = Sampling(0.7, top_k=20)


def test_a_truncated_student_is_refused() -> None:
    student, cut = tiny_model(seed=0), {"reference": tiny_model(seed=1), "sampling": TRUNCATED}
    for make in (
        lambda: PolicyLoss(student, "distill", sampling=TRUNCATED),
        lambda: PolicyLoss(LogProbScorer(student, sampling=TRUNCATED), "distill"),
        lambda: PolicyLoss(student, "ppo", terms=[DivergenceToTeacher(0.1)], sampling=TRUNCATED),
        lambda: PolicyLoss(student, "distill", distribution="exact", **cut),
        lambda: make_algorithm("gkd", student, **cut),
        lambda: make_algorithm("on_policy_distill", student, top_k=4, **cut),
    ):
        with pytest.raises(ValueError, match=r"a distillation with Sampling\(.*top_k=20\): .*Pass temperature="):
            make()


def test_exact_distillations_with_two_betas() -> None:
    terms = [DivergenceToTeacher(1.0, beta=0.2, distribution="exact")]
    loss = PolicyLoss(
        tiny_model(seed=0), "distill", beta=0.4, distribution="exact", reference=tiny_model(seed=1), terms=terms
    )
    with pytest.raises(ValueError, match="expected one beta for all"):
        loss(data())
    loss.beta = 0.2
    out = loss(data())
    assert_close(out["loss_objective"], out["loss_divergence_to_teacher"])
