"""Distillation from a teacher's top k or its whole distribution: against one plain forward per sequence."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from by_hand import called
from closeness import assert_near
from head_reference import Sizes, collapse, gkd_of
from policy_batches import LENGTHS, PROMPT, batch, gradients, responses
from refused import refused
from torchrl_llm_kl import LogProbScorer, PolicyLoss, RetrieveLogProb, Sampling, ScoreOptions, TopK, make_algorithm
from torchrl_llm_kl.losses import DivergenceToTeacher, KLToReference, LossInputs, LossTerm, distill, get_objective
from toy_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:the top k below")
V = VOCAB_SIZE
EXACT: dict[str, Any] = {"distribution": "exact"}
TIGHT, LOOSE = {"atol": 1e-11, "rtol": 1e-10}, {"atol": 1e-6, "rtol": 1e-6}


def data(layout: str = "padded") -> TensorDictBase:
    return batch(layout=layout).exclude("next")


@pytest.fixture
def student() -> nn.Module:
    return tiny_model(seed=0).double()


@pytest.fixture
def teacher() -> nn.Module:
    return tiny_model(seed=1).double()


def distributions(model: nn.Module, temperature: float = 1.0) -> Tensor:
    """Log-probs of every token at each response position, with graph; ``[N, V]``."""
    return torch.cat([row["all"] for row in responses(model, batch(), temperature)])


def same_gradients(found: Tensor, want: Tensor, student: nn.Module) -> None:
    """Compare the gradients of a float64 model. Its norms compute in float32, so only the head's gradient is exact."""
    a, b = gradients(found, student), gradients(want, student)
    assert_close(a["lm_head.weight"], b["lm_head.weight"], atol=1e-12, rtol=1e-9)
    assert_close(a, b, atol=1e-6, rtol=1e-4)


def with_teacher(td: TensorDictBase, teacher: nn.Module, k: int, key: Any = "top_k") -> TensorDictBase:
    """The entries of a teacher in its own dtype, written row by row."""
    scorer, rows = LogProbScorer(teacher), []
    for row, length in zip(td.unbind(0), LENGTHS, strict=True):
        ids = row["tokens", "full"]
        found = scorer.evaluate([ids[:length]], [torch.arange(length) >= PROMPT], top_k=k)
        for name, entry in zip(("ids", "log_probs", "rest_log_prob"), found[4:7], strict=True):
            value = entry.values.new_zeros(len(ids), *entry.values.shape[1:])
            value[:length] = entry.values
            row = row.set((*((key,) if isinstance(key, str) else key), name), value)
        rows.append(row)
    return lazy_stack(rows)


def distilled(student: Any, td: TensorDictBase, **settings: Any) -> Tensor:
    return loss_of(student, **settings)(td)["loss_objective"]


def loss_of(student: Any, *, top_k: Any = "top_k", **settings: Any) -> PolicyLoss:
    loss = PolicyLoss(student, "distill", **settings)
    loss.set_keys(top_k=top_k)
    return loss


def test_bounds_by_hand() -> None:
    """The forward KL is 0.1838, the ratios are 3 and 1/2, and the log-probs of 0.2 and 0.1 are below -1.2."""
    teacher = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().expand(1, 2, 3)
    mask, old = torch.ones(1, 2, dtype=torch.bool), -torch.tensor([[3.0, 0.5]], dtype=torch.float64).log()
    plain = 0.7 * math.log(0.7 / 0.4) + 0.2 * math.log(0.5) + 0.1 * math.log(0.5)
    higher = 0.7 * math.log(0.7 / 0.4) + math.exp(-1.2) * (-1.2 - math.log(0.4))
    cases: list[tuple[dict[str, Any], list[float], list[list[float]]]] = [
        ({"ratio_max": 2.0}, [2 * plain, plain / 2], [[-1.4, -0.4, -0.2], [-0.35, -0.1, -0.05]]),
        ({"value_max": 0.1}, [0.1, 0.1], [[0.0] * 3] * 2),
        ({"value_max": 0.2, "ratio_max": 9.0}, [3 * plain, plain / 2], [[-2.1, -0.6, -0.3], [-0.35, -0.1, -0.05]]),
        ({"log_prob_min": -1.2}, [higher] * 2, [[-0.7, -math.exp(-1.2), 0.0]] * 2),
    ]
    for hyper, value, gradient in cases:
        student = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log().expand(1, 2, 3).clone().requires_grad_()
        inputs = {"outcomes": student, "teacher_outcomes": teacher, "old_log_prob": old}
        (term,) = called(distill, torch.zeros_like(old), mask, **inputs, beta=0.0, **hyper)
        assert_close(term.value.detach(), torch.tensor([value], dtype=torch.float64))
        (found,) = torch.autograd.grad(term.value.sum(), student)
        assert_close(found, torch.tensor([gradient], dtype=torch.float64))
        assert_close(term.metrics["captured_mass"].item(), 0.9)  # of the teacher as it is
    inputs = {"teacher_divergence": mask.double(), "old_log_prob": 0 * old}
    (term,) = called(distill, -old, mask, **inputs, **EXACT, ratio_max=2.0)
    assert_close(term.value, torch.tensor([[2.0, 0.5]], dtype=torch.float64))
    with pytest.raises(ValueError, match="distill needs old_log_prob: pass old_log_prob="):
        distill(LossInputs(old, mask, outcomes=teacher, teacher_outcomes=teacher), ratio_max=2.0)


@pytest.mark.parametrize(
    ("k", "beta"), [(1, 0.0), (5, 0.3), (V, 1.0), (5, 1.0), (V, 0.3), (None, 0.0), (None, 0.3), (None, 1.0)]
)
def test_value_and_gradient_in_float64(student: nn.Module, teacher: nn.Module, k: int | None, beta: float) -> None:
    """Compared with enumeration over the whole vocabulary. ``k = V`` and a local teacher are exact."""
    settings = {"distribution": "exact", "reference": teacher} if k is None else {}
    out = PolicyLoss(student, "distill", beta=beta, **settings)(with_teacher(data(), teacher, k) if k else data())
    log_q, log_p = distributions(student), distributions(teacher).detach()
    ids = log_p.topk(k or V, -1).indices
    want = gkd_of(collapse(log_q, ids), collapse(log_p, ids), float(torch.tensor(beta))).mean()
    assert_close(out["loss_objective"], want, **TIGHT)
    same_gradients(out["loss_objective"], want, student)
    assert ("captured_mass" in out) == (k is not None)
    if k:
        captured = log_p.gather(-1, ids).exp().sum(-1).mean()
        assert_close(out["captured_mass"], captured, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("layout", "beta"), [("padded", 0.0), ("nested", 0.3), ("lazy", 1.0)])
def test_entries_written_by_the_transform(model: nn.Module, reference: nn.Module, layout: str, beta: float) -> None:
    """In float32 and any layout. With every token listed, value and gradients equal the exact divergence."""
    exact = distilled(model, data(layout), beta=beta, distribution="exact", reference=reference)
    out = distilled(model, RetrieveLogProb(reference, extras=[TopK(V)])(data(layout)), beta=beta)
    assert_near(out, exact, terms=V)
    assert_near(gradients(out, model), gradients(exact, model), terms=64 * 64, size=1)
    assert distilled(model, RetrieveLogProb(reference, extras=[TopK(3)])(data(layout)), beta=beta) < out


def test_temperature_divides_the_logits_of_both(student: nn.Module, teacher: nn.Module) -> None:
    options = ScoreOptions(Sampling(0.6))
    td = RetrieveLogProb(teacher, options=options, extras=[TopK(V)])(data())
    out = distilled(student, td, beta=0.3, options=options)
    want = gkd_of(distributions(student, 0.6), distributions(teacher, 0.6).detach(), 0.3).mean()
    assert_close(out, want, **LOOSE)  # entries are float32


def test_no_tensor_over_the_vocabulary() -> None:
    """Forward and backward at 15 positions of a vocabulary of 50,000. The head's gradient is the largest tensor."""
    small: dict[str, Any] = {"vocab_size": 50_000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    student, teacher = (tiny_model(seed=seed, **small) for seed in (0, 1))
    td, loss = RetrieveLogProb(teacher, extras=[TopK(8)])(data()), PolicyLoss(student, "distill")
    with Sizes() as sizes, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(td)["loss_objective"].backward()
    assert sizes.largest < sum(length - PROMPT for length in LENGTHS) * 50_000


# ---------------------------------------------------------------------- several teachers
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_several_teachers_are_a_weighted_sum(student: nn.Module, teacher: nn.Module, beta: float) -> None:
    """The teachers have different k, keys and weights."""
    td, log_q, weights = data(), distributions(student), (0.7, 0.2)
    want, captured = torch.zeros(()).double(), torch.zeros(()).double()
    teachers, keys = (teacher, tiny_model(seed=2).double()), ["one", ("second", "top")]
    for each, key, weight, k in zip(teachers, keys, weights, (3, 20), strict=True):
        td = with_teacher(td, each, k, key)
        log_p = distributions(each).detach()
        ids = log_p.topk(k, -1).indices
        want = want + weight * gkd_of(collapse(log_q, ids), collapse(log_p, ids), float(torch.tensor(beta))).mean()
        captured += weight / 0.9 * log_p.gather(-1, ids).exp().sum(-1).mean()
    loss = loss_of(student, beta=beta, top_k=keys, teacher_weights=weights)
    out = loss(td)
    assert_close(out["loss_objective"], want, atol=1e-11, rtol=1e-6)
    same_gradients(out["loss_objective"], want, student)
    assert_close(out["captured_mass"], captured, **LOOSE)
    assert set(loss.in_keys) >= {("one", "ids"), ("second", "top", "log_probs"), ("second", "top", "rest_log_prob")}
    loss.teacher_weights = None  # equal ones, 1 / M
    equal = sum(distilled(student, td, beta=beta, top_k=key).item() for key in keys)
    assert loss(td)["loss_objective"].item() == pytest.approx(equal / 2, rel=1e-9)


def test_a_term_beside_another_objective(student: nn.Module, teacher: nn.Module) -> None:
    td = with_teacher(batch().exclude(("next", "sampler_log_probs"), ("next", "ref_log_probs")), teacher, 4)
    loss = PolicyLoss(student, "ppo", terms=[DivergenceToTeacher(0.25, beta=1.0)])
    out = loss(td)
    assert_close(out["loss_divergence_to_teacher"], 0.25 * distilled(student, td, beta=1.0))
    assert_close(out["loss_objective"], PolicyLoss(student, "ppo")(td)["loss_objective"])
    loss.divergence_to_teacher_coeff, loss.divergence_to_teacher_beta = 0.5, 0.0
    out = loss(td)
    assert_close(out["loss_divergence_to_teacher"], 0.5 * distilled(student, td, beta=0.0))
    assert set(out.keys()) == set(loss.out_keys)


@pytest.mark.filterwarnings("ignore:the mask is empty")
@pytest.mark.parametrize(("aggregation", "distribution"), [("token-mean", "top_k"), ("seq-mean-token-mean", "exact")])
def test_micro_batches_add_up(student: nn.Module, teacher: nn.Module, aggregation: Any, distribution: Any) -> None:
    td = with_teacher(data(), teacher, 4).set("loss_mask", torch.tensor([1, 1, 0, 1, 1, 1]).bool())
    settings = {"distribution": distribution, "reference": teacher if distribution == "exact" else None}
    loss = PolicyLoss(student, "distill", aggregation=aggregation, **settings)
    whole = loss(td)["loss_objective"]
    counted = loss.count(td)
    parts = sum(loss(counted[rows])["loss_objective"] for rows in torch.tensor([4, 0, 2, 5, 1, 3]).split([1, 3, 2]))
    assert_close(parts, whole)
    same_gradients(parts, whole, student)
    empty = td.exclude("denominators").set("loss_mask", torch.zeros(6, dtype=torch.bool))
    nothing = distilled(student, empty, **settings)
    assert nothing == 0
    assert all((gradient == 0).all() for gradient in gradients(nothing, student).values())


def test_keys_and_outputs(model: nn.Module, reference: nn.Module) -> None:
    """Entries may be under "next", or begin with the first token of the response, as those of an inference engine."""
    loss, entries = PolicyLoss(model, "distill"), [("top_k", name) for name in ("ids", "log_probs", "rest_log_prob")]
    assert set(entries) <= set(loss.in_keys)
    assert set(loss.out_keys) == {"loss_objective", "captured_mass", "num_tokens", "num_sequences"}
    td = with_teacher(data("lazy"), reference, V)
    out = loss(td)
    assert set(out.keys()) == set(loss.out_keys)
    moved = td.exclude("top_k").set("next", TensorDict({"top_k": td["top_k"]}, batch_size=td.batch_size))
    assert_close(loss(moved)["loss_objective"], out["loss_objective"])
    short = [row.copy() for row in td.unbind(0)]
    for row in short:
        row["top_k"] = {name: value[PROMPT:] for name, value in row["top_k"].items()}
    assert torch.equal(loss(lazy_stack(short))["loss_objective"], out["loss_objective"])
    exact = PolicyLoss(model, "distill", distribution="exact", reference=reference)
    assert not set(entries) & set(exact.in_keys)
    assert set(exact(data()).keys()) == set(exact.out_keys)


def test_a_user_divergence(student: nn.Module, teacher: nn.Module) -> None:
    """A user's function that reads outcomes gets them. This one is the total variation."""

    def variation(inputs: LossInputs) -> tuple[LossTerm, ...]:
        difference = inputs.outcomes.exp() - inputs.teacher_outcomes.exp()
        return (LossTerm("variation", difference.abs().sum((-2, -1)) / 2, inputs.mask),)

    out = PolicyLoss(student, variation)(with_teacher(data(), teacher, V))
    want = (distributions(student).exp() - distributions(teacher).exp()).abs().sum(-1).mean() / 2
    assert_close(out["loss_variation"], want, atol=1e-7, rtol=1e-7)


def test_little_captured_mass_warns_once_for_each_teacher(model: nn.Module, reference: nn.Module) -> None:
    td = with_teacher(with_teacher(data(), reference, 1, "few"), tiny_model(seed=2), V, "all")
    loss = loss_of(model, top_k=["few", "all"])
    with pytest.warns(UserWarning, match=r"the top k below 'few' holds 0\.\d\d of the teacher's probability") as caught:
        loss(td)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(td)
        distilled(model, td, top_k="all")


def test_exact_distillations_with_two_betas(model: nn.Module, reference: nn.Module) -> None:
    terms = [DivergenceToTeacher(1.0, beta=0.2, **EXACT)]
    loss = PolicyLoss(model, "distill", beta=0.4, **EXACT, reference=reference, terms=terms)
    with pytest.raises(ValueError, match="expected one beta for all"):
        loss(data())
    loss.beta = 0.2
    out = loss(data())
    assert_close(out["loss_objective"], out["loss_divergence_to_teacher"])


# ---------------------------------------------------------------------- errors
def respelt(change: Callable[[Tensor], Tensor]) -> Callable[[TensorDictBase], TensorDictBase]:
    """Replace each row's ids by ``change(ids)``."""
    return lambda td: lazy_stack([row.set(("top_k", "ids"), change(row["top_k", "ids"])) for row in td.unbind(0)])


def placed(value: Any, *names: str) -> Callable[[TensorDictBase], TensorDictBase]:
    def place(td: TensorDictBase) -> TensorDictBase:
        for name in names:
            td[2]["top_k", name][PROMPT] = value
        return td

    return place


PLACE = rf"at sequence 2, position {PROMPT}"
test_data_that_is_no_teacher = refused(
    lambda spoil: PolicyLoss(tiny_model(seed=0), "distill")(spoil(with_teacher(data(), tiny_model(seed=1), 4))),
    (placed(0, "ids", "log_probs", "rest_log_prob"), rf"below 'top_k' add up to 5 {PLACE}, not to 1.*Compare"),
    (placed(torch.nan, "rest_log_prob"), rf"below 'top_k' add up to nan {PLACE}"),
    (lambda td: td.exclude("top_k"), KeyError, r"needs a teacher's top k.*\('top_k', 'ids'\).*TopK\(64\)"),
    (lambda td: td.exclude(("top_k", "rest_log_prob")), KeyError, r"'rest_log_prob'"),
    (respelt(lambda ids: ids[:, 1:]), r"hold \(3,\) and \(4,\) numbers per token: expected the same k"),
    (respelt(lambda ids: ids[:, 0]), r"must have shape \[tokens, k\], found \[tokens\]"),
    (respelt(lambda ids: ids.float()), r"holds torch.float32: expected integers"),
    (placed(V, "ids"), rf"top_ids holds token ids outside the student's vocabulary of {V}"),
)


ONE = torch.ones(1, 1)
PAIR = torch.full((1, 1, 2), 0.5).log()
BOTH = {"outcomes": PAIR, "teacher_outcomes": PAIR}
test_wrong_inputs = refused(
    lambda given: called(get_objective("distill"), ONE, ONE > 0, **given),
    ({"outcomes": PAIR}, r"distill needs teacher_outcomes: pass teacher_outcomes= to LossInputs, \[\*B, T, k \+ 1\]"),
    ({"outcomes": PAIR, "teacher_outcomes": PAIR[..., :1]}, r"outcomes has shape \(1, 1, 2\) but teacher_outcomes"),
    ({"outcomes": PAIR[0], "teacher_outcomes": PAIR[0]}, r"outcomes has shape \(1, 2\), expected \[\*B, T, k \+ 1\]"),
    ({**BOTH, "teacher_weights": [-1.0]}, r"at least 0, and not all 0, got \[-1.0\]"),
)
test_contradictory_settings = refused(
    lambda settings: loss_of(tiny_model(seed=0), **settings),
    (EXACT, r"an exact KL is computed from both models: pass the teacher as reference="),
    ({**EXACT, "terms": [KLToReference(0.1, "exact")], "reference": tiny_model(seed=1)}, "two other models, .* is one"),
    ({**EXACT, "log_prob_min": -1.0}, "log_prob_min=-1.0 has no effect with distribution='exact'"),
    ({"top_k": ["a", "b"], "teacher_weights": [1.0]}, "teacher_weights has 1 numbers for 2 teachers"),
)


def test_a_truncated_student_is_refused(model: nn.Module, reference: nn.Module) -> None:
    cut: Any = {"options": ScoreOptions(Sampling(0.7, top_k=20))}
    for make in (
        lambda: PolicyLoss(model, "distill", **cut),
        lambda: PolicyLoss(LogProbScorer(model, sampling=cut["options"].sampling), "distill"),
        lambda: PolicyLoss(model, "ppo", terms=[DivergenceToTeacher(0.1)], **cut),
        lambda: PolicyLoss(model, "distill", distribution="exact", reference=reference, **cut),
        lambda: make_algorithm("gkd", model, reference=reference, **cut),
        lambda: make_algorithm("on_policy_distill", model, reference=reference, top_k=4, **cut),
    ):
        with pytest.raises(ValueError, match=r"distillation with Sampling\(.*top_k=20\): .*Pass Sampling\(temper"):
            make()
