"""The fused kernel of the head: liger-kernel's own in Triton's interpreter, and fakes that show when it is used.

Without liger-kernel the tests of its kernel are skipped. ``tests/device`` runs them on a GPU.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_near
from fused_head import CASES, SIZES, honest, in_torch, results, take_fake, take_real
from head_reference import make_head, make_targets
from torchrl_llm_kl import LogProbScorer, Sampling
from torchrl_llm_kl.head import Truncation, _fused, fused_failure, fused_obstacle, linear_log_prob
from torchrl_llm_kl.head._fused import fused_log_prob
from toy_models import tiny_model

CPU = torch.device("cpu")
ROWS = [[*range(3, 25), 30, 31, 32], [*range(3, 25), 40, 41], [5, 6, 7]]


def half_head(n: int = 20) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = make_head(n=n, h=24, v=600, dtype=torch.bfloat16)
    return hidden, weight


# ---------------------------------------------------------------------- the kernel of liger-kernel


@pytest.fixture(params=["fake", "real"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake shows that its own tests pass without liger-kernel."""
    if request.param == "fake":
        take_fake(monkeypatch, honest)
    else:
        take_real(monkeypatch, CPU)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_against_float64(kernel: None, case: str) -> None:
    truth, found = results(in_torch, torch.float64, CPU, case), results(fused_log_prob, torch.float32, CPU, case)
    # Logits are sums of 24 products of up to 4 * 4. The weight's gradient adds 37 positions, the hidden one's 301 tokens.
    for name, terms, size in (("log_prob", 24, 60.0), ("hidden", 301, 60.0), ("weight", 37, 60.0)):
        assert_near(found[name], truth[name], terms=terms, size=size, dtype=torch.float32, msg=name)


def test_no_more_error_than_plain_torch_in_half_precision(kernel: None) -> None:
    dtype = torch.bfloat16
    truth, found, other = (
        results(function, each, CPU, "plain")
        for function, each in ((in_torch, torch.float64), (fused_log_prob, dtype), (in_torch, dtype))
    )
    given = dict(zip(("hidden", "weight"), make_head(**SIZES, dtype=dtype), strict=False))
    assert found["log_prob"].dtype == torch.float32
    assert all(found[name].dtype == dtype for name in given)
    for name, want in truth.items():
        errors = [(each[name].double() - want).square().mean().sqrt() for each in (found, other)]
        # Blocks of positions are rounded one by one, as in the tiles.
        assert errors[0] <= (1.05 if name == "log_prob" else 2**0.5) * errors[1], name


def test_targets_outside_the_vocabulary_have_nan(kernel: None) -> None:
    hidden, weight = half_head()
    targets = make_targets(20, 600)
    targets[3], targets[4], targets[5] = -1, 600, -100
    found = linear_log_prob(hidden, weight, targets, fused=True).log_prob
    assert found.isnan().nonzero().squeeze(1).tolist() == [3, 4, 5]


def test_the_check_passes(kernel: None) -> None:
    hidden, weight = half_head()
    for options in ({}, {"soft_cap": 5.0}, {"temperature": 2.0}):
        assert fused_obstacle(hidden, weight, **options) is None
        assert fused_failure(hidden, weight, **options) is None
    with torch.inference_mode():
        assert fused_failure(hidden.clone(), weight) is None


def test_a_second_derivative_is_an_error(kernel: None) -> None:
    """liger-kernel's backward has no graph, so the second derivative would lack terms."""
    hidden, weight = (x.requires_grad_() for x in half_head())
    log_prob = linear_log_prob(hidden, weight, make_targets(20, 600), fused=True).log_prob
    (gradient,) = torch.autograd.grad(log_prob.exp().sum(), [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().square().sum().backward()


def test_a_scorer_uses_the_kernel(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer's log-probs and gradients equal those of another one that does not use the kernel."""
    model: Any = tiny_model("llama").bfloat16()
    other = copy.deepcopy(model)
    with monkeypatch.context() as without:
        without.setattr(_fused, "_DEVICES", ())
        tiles = LogProbScorer(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer = LogProbScorer(model)
    assert scorer.explain(ROWS, 1, 23).head == "liger-kernel's fused kernel"
    assert tiles.explain(ROWS, 1, 23).head == "tiles, since the fused kernel does not run on cpu"
    found, want = scorer.score(ROWS, grad=True), tiles.score(ROWS, grad=True)
    # Both have the same hidden states. Another order of summation may round a logit to the neighbour in bfloat16.
    eps = torch.finfo(torch.bfloat16).eps
    assert (found.values - want.values).norm() <= eps * want.values.norm()
    weights = torch.linspace(-1.0, 2.0, len(found.values))
    for each in (found, want):
        (each.values * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (ours.grad - theirs.grad).float().norm() / theirs.grad.float().norm()
        assert difference <= 4 * eps, name


# ---------------------------------------------------------------------- when it is used


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install a fake kernel, and return a list that receives the number of positions of each call."""
    calls: list[int] = []

    def counted(hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(len(hidden))
        return honest(hidden, *args, **options)

    take_fake(monkeypatch, counted)
    return calls


@pytest.mark.filterwarnings("ignore:.*are not among those")
def test_only_log_probs_over_all_tokens_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    model: Any = tiny_model("gemma2").bfloat16()
    scorer = LogProbScorer(model)
    assert len(calls) == 2, "the probe checks the whole head, and the gradient of a part of its weight"
    calls.clear()
    scorer.score(ROWS)
    assert calls == [24 + 23 + 2], "one call for all tokens after the first of each sequence"
    calls.clear()
    for options in ({"entropy": True}, {"top_k": 3}, {"moments": True}):
        scorer.evaluate(ROWS, **options)
    for sampling in (Sampling(top_k=5), Sampling(0.7)):
        scorer.score(ROWS, sampling=sampling)
    scorer.evaluate(ROWS, reference=LogProbScorer(tiny_model("gemma2", seed=1).bfloat16(), probe=False))
    assert not calls
    assert "powers of 2" in scorer.explain(ROWS, 0, 3, sampling=Sampling(0.7)).head
    assert "over all tokens" in scorer.explain(ROWS, 0, 3, sampling=Sampling(top_k=5)).head
    scorer.score(ROWS, sampling=Sampling(0.5))
    assert calls


def test_heads_that_the_kernel_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    hidden, weight = half_head()
    for given, message in (
        ((hidden.float(), weight.float()), "not bfloat16"),
        ((hidden.half(), weight.half()), "not bfloat16"),
        ((hidden[:0], weight), "without positions"),
    ):
        assert message in (fused_obstacle(*given) or "")
    assert "not bfloat16" in (fused_obstacle(hidden, weight, product_dtype=torch.float32) or "")
    assert "rounds a logit twice" in (fused_obstacle(hidden, weight, bias=weight[:, 0]) or "")
    assert "0.7" in (fused_obstacle(hidden, weight, scale=0.7) or "")
    assert fused_obstacle(hidden, weight, scale=0.5, temperature=4.0) is None
    targets = make_targets(20, 600)
    for options, message in (
        ({"entropy": True}, "no entropy"),
        ({"truncation": Truncation(3)}, "all tokens"),
        ({"temperature": 3.0}, "powers of 2"),
    ):
        with pytest.raises(ValueError, match=f"fused=True.*{message}"):
            linear_log_prob(hidden, weight, targets, fused=True, **options)
    assert not calls
    monkeypatch.setattr(_fused, "_DEVICES", ("cuda",))
    assert fused_obstacle(hidden, weight) == "the fused kernel does not run on cpu"


def test_a_float32_model_keeps_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    scorer = LogProbScorer(tiny_model())
    scorer.score(ROWS)
    assert "not bfloat16" in scorer.explain(ROWS, 0, 3).head
    assert not calls


# ---------------------------------------------------------------------- a kernel that is wrong


class Alike(torch.autograd.Function):
    """The values of a loss, with the same gradient for every token, as in liger-kernel before 0.8.2."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[:1].expand_as(gradient)


def one_token_off(hidden: Tensor, weight: Tensor, targets: Tensor, *args: Any, **options: Any) -> Tensor:
    return honest(hidden, weight, (targets + 1) % len(weight), *args, **options)


def no_soft_cap(*args: Any, **options: Any) -> Tensor:
    return honest(*args, **{**options, "softcap": None})


def frozen_weight(hidden: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    return honest(hidden, weight.detach() + 0 * weight, *args, **options)


def first_without_gradient(*args: Any, **options: Any) -> Tensor:
    loss = honest(*args, **options)
    return torch.cat([loss[:1].detach(), loss[1:]])


def first_off(*args: Any, **options: Any) -> Tensor:
    loss = honest(*args, **options)
    return loss + 2.0 * (torch.arange(len(loss)) == 0)


@pytest.mark.parametrize("wrong", [first_without_gradient, first_off])
def test_the_check_reads_every_token(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    hidden, weight = half_head(40)
    take_fake(monkeypatch, wrong)
    assert "differences in values and gradients" in (fused_failure(hidden, weight) or "")


def does_not_compile(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("ptxas fatal: unresolved extern function")


@pytest.mark.parametrize(
    "wrong",
    [
        one_token_off,
        no_soft_cap,
        frozen_weight,
        does_not_compile,
        lambda *args, **options: Alike.apply(honest(*args, **options)),
        lambda *args, **options: honest(*args, **options) * torch.nan,
    ],
    ids=["token", "soft-cap", "weight", "compiler", "alike", "nan"],
)
def test_a_wrong_kernel_is_refused_with_a_warning(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    model: Any = tiny_model("gemma2").bfloat16()
    want = LogProbScorer(model).score(ROWS).values
    take_fake(monkeypatch, wrong)
    with pytest.warns(UserWarning, match="computes the head of Gemma2ForCausalLM in tiles, since liger-kernel") as seen:
        scorer = LogProbScorer(model)
    assert [warning.filename for warning in seen] == [__file__]
    assert torch.equal(scorer.score(ROWS).values, want)
    head = scorer.explain(ROWS, 1, 23).head
    assert head.startswith("tiles, since liger-kernel's fused kernel does not reproduce their values and gradients")
    assert ("ptxas" in head) == (wrong is does_not_compile)
