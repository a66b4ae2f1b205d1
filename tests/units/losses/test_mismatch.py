"""Corrections of a sampler that differs from the trainer: expectations by enumeration, layouts, and batches without a token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from peers import sampled, verl
from policy_batches import batch
from torchrl_llm_kl.losses import (
    Divergence,
    ImportanceWeights,
    KLToReference,
    PolicyLoss,
    RejectionMask,
    apply_correction,
    correction_metrics,
    gpg,
    importance_weights,
    rejection_mask,
    rollout_corrections,
)
from toy_models import tiny_model

VOCAB = 3
SEQUENCES = list(itertools.product(range(VOCAB), repeat=2))
EXACTLY = {"rtol": 1e-10, "atol": 1e-13}


class Pair:
    """Sampler, trainer and policy over all sequences of two tokens, the second token depending on the first; float64."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        shape = (VOCAB + 1, VOCAB)  # row 0: the first token; row 1 + a: the second after a
        logits = torch.randn(shape, generator=rng, dtype=torch.float64)
        self.sampler = (logits + 0.6 * torch.randn(shape, generator=rng, dtype=torch.float64)).log_softmax(-1)
        self.trainer = logits.log_softmax(-1)
        self.logits = logits.clone().requires_grad_()  # of the policy: the trainer before its first step
        self.advantage = torch.randn(len(SEQUENCES), generator=rng, dtype=torch.float64)

    @staticmethod
    def of_tokens(table: Tensor) -> Tensor:
        """Log-probs of both tokens of every sequence; ``[9, 2]``."""
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in SEQUENCES])

    @property
    def ratios(self) -> list[tuple[float, float]]:
        """Trainer over sampler, of both tokens."""
        return [tuple(x.exp().tolist()) for x in (self.of_tokens(self.trainer) - self.of_tokens(self.sampler))]  # type: ignore[misc]

    @property
    def sampled(self) -> Tensor:
        """The probability that the sampler draws a sequence; ``[9]``."""
        return self.of_tokens(self.sampler).sum(-1).exp()

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logits)[0]

    def mean_gradient(self, weigh: Callable[..., tuple[Tensor, Any]], **hyper: Any) -> Tensor:
        """Of the corrected policy gradient, over what the sampler draws. Old log-probs and weights have a graph to pass."""
        now = self.of_tokens(self.logits.log_softmax(-1))
        mask = torch.ones_like(now, dtype=torch.bool)
        (term,) = gpg(now, mask, advantage=self.advantage[:, None].expand_as(now))
        old, sampler = self.of_tokens(self.logits.log_softmax(-1)), self.of_tokens(self.sampler)
        weights, _ = weigh(old, sampler, mask, **hyper)
        assert not weights.requires_grad
        (term,) = apply_correction([term], weights, mask)
        return self.gradient((self.sampled[:, None] * term.value).sum())

    def expected(self, weights: list[tuple[float, float]]) -> Tensor:
        """The gradient with these weights of both tokens, written out: a sum over sequences and tokens."""
        now = self.of_tokens(self.logits.log_softmax(-1))
        terms = [
            -self.sampled[i] * self.advantage[i] * weights[i][t] * now[i, t]
            for i in range(len(SEQUENCES))
            for t in range(2)
        ]
        return self.gradient(torch.stack(terms).sum())


def levels(level: str, r: tuple[float, float]) -> tuple[float, float]:
    """The unbounded weights of both tokens by hand."""
    if level == "token":
        return r
    whole = r[0] * r[1] if level == "sequence" else math.sqrt(r[0] * r[1])
    return whole, whole


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("truncate", None, None),
        ("truncate", None, 1.1),
        ("truncate", 0.9, 1.3),
        ("mask", 0.7, 1.2),
        ("mask", 0.8, None),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_weights_of_every_level_and_mode(
    level: str, mode: str, low: float | None, high: float | None, seed: int
) -> None:
    pair = Pair(seed)
    least, most = (0.0 if low is None else low), (math.inf if high is None else high)
    bound = {
        "truncate": lambda w: min(max(w, least), most),
        "mask": lambda w: w if least <= w <= most else 0.0,
    }[mode]
    expected = [tuple(map(bound, levels(level, r))) for r in pair.ratios]
    hyper = {"level": level, "mode": mode, "low": low, "high": high}
    assert_close(pair.mean_gradient(importance_weights, **hyper), pair.expected(expected), **EXACTLY)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_without_bounds_the_sequence_weight_gives_the_trainers_policy_gradient(seed: int) -> None:
    """E_sampler[w A grad log pi] = grad E_policy[A], which the product of both ratios alone achieves."""
    pair = Pair(seed)
    now = pair.of_tokens(pair.logits.log_softmax(-1)).sum(-1).exp()
    expected = pair.gradient(-(now * pair.advantage).sum())
    assert_close(pair.mean_gradient(importance_weights, level="sequence", high=None), expected, **EXACTLY)
    for level in ("token", "geometric"):
        assert (pair.mean_gradient(importance_weights, level=level, high=None) - expected).abs().max() > 1e-3


K = {"k1": lambda r: -math.log(r), "k2": lambda r: math.log(r) ** 2 / 2, "k3": lambda r: r - 1 - math.log(r)}


@pytest.mark.parametrize("divergence", get_args(Divergence))
@pytest.mark.parametrize("seed", range(3))
def test_rejection_by_every_divergence(divergence: Any, seed: int) -> None:
    """Estimates written out for each token of each sequence; the bound is in the middle of them."""
    pair = Pair(seed)
    level, name = divergence.rsplit("_", 1)
    both = [tuple(map(K[name], r)) for r in pair.ratios]
    whole = {"seq_sum": sum, "seq_mean": lambda x: sum(x) / 2, "seq_max": max, "token": max}[level]
    if level in ("token", "seq_max"):
        values = sorted(max(map(abs, x)) if level == "seq_max" else abs(v) for x in both for v in x)
    else:
        values = sorted(abs(whole(x)) for x in both)
    values = sorted({round(v, 12) for v in values})
    middle = (values[len(values) // 2] + values[len(values) // 2 - 1]) / 2
    low = -middle if name == "k1" else None
    inside = lambda v: (low is None or v >= low) and v <= middle  # noqa: E731
    if level in ("token", "seq_max"):
        kept = [tuple(float(inside(v)) for v in x) for x in both]
        kept = kept if level == "token" else [(min(x), min(x)) for x in kept]
    else:
        kept = [(float(inside(whole(x))),) * 2 for x in both]
    assert 0 < sum(map(sum, kept)) < 18
    found = pair.mean_gradient(rejection_mask, divergence=divergence, low=low, high=middle)
    assert_close(found, pair.expected(kept), **EXACTLY)  # type: ignore[arg-type]


def test_the_geometric_mask_is_rejection_by_the_mean_of_k1() -> None:
    """The geometric mean of the ratio lies in [0.9, 1.2] where the mean of k1 lies in [-log 1.2, -log 0.9]."""
    old, sampler, mask = sampled(0)
    weights, _ = importance_weights(old, sampler, mask, level="geometric", mode="mask", low=0.9, high=1.2)
    kept, _ = rejection_mask(old, sampler, mask, divergence="seq_mean_k1", low=-math.log(1.2), high=-math.log(0.9))
    assert torch.equal(weights != 0, kept != 0)
    assert 0 < (weights != 0).sum() < mask.sum()


# ------------------------------------------------------------------ in a loss


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model()


def near(layout: str = "padded") -> Any:
    """The usual batch, with a sampler near the trainer."""
    data, noise = batch(layout=layout), torch.Generator().manual_seed(5)
    for row, old in enumerate(data["next", "log_probs", "full"].unbind() if layout != "lazy" else ()):
        data["next", "sampler_log_probs", "full"].unbind()[row].copy_(
            old + 0.4 * torch.randn(9, generator=noise)[: len(old)]
        )
    for step in data.unbind(0) if layout == "lazy" else ():
        old = step["next", "log_probs", "full"]
        step["next", "sampler_log_probs", "full"] = old + 0.4 * torch.randn(9, generator=noise)[: len(old)]
    return data


CORRECTIONS = {
    **{
        f"{level}-{mode}": lambda level=level, mode=mode: ImportanceWeights(level=level, mode=mode, low=0.6, high=1.4)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    },
    **{name: lambda name=name: RejectionMask(name, high=0.07) for name in get_args(Divergence)},
}


def loss_and_gradient(model: nn.Module, loss: PolicyLoss, data: Any) -> tuple[Any, Tensor]:
    model.zero_grad()
    out = loss(data)
    out.total_loss.backward()
    return out, model.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_padded_nested_and_ragged_rows_agree(model: nn.Module, name: str) -> None:
    loss = PolicyLoss(model, corrections=[CORRECTIONS[name]()])
    expected, gradient = loss_and_gradient(model, loss, near())
    assert expected["correction_ess"] < 1
    for layout in ("nested", "lazy"):
        found, again = loss_and_gradient(model, loss, near(layout))
        for key in sorted(expected.keys()):
            assert_near(found[key], expected[key], terms=64, size=1, exponent=8, msg=key)
        assert_near(again, gradient, terms=64, size=1)


IMPOSSIBLE = {
    **{name: lambda name=name: RejectionMask(name, high=1e-6) for name in get_args(Divergence)},
    **{
        f"{level}-mask": lambda level=level: ImportanceWeights(level=level, mode="mask", low=1e6, high=None)
        for level in ("token", "sequence", "geometric")
    },
}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_batch_without_an_accepted_token_is_a_zero_with_graph(model: nn.Module, name: str, aggregation: Any) -> None:
    """The sampler is far from the trainer at every token, and on one side of it."""
    data = batch()
    data["next", "sampler_log_probs", "full"] = data["next", "log_probs", "full"] - 2.0
    if name.endswith("k1"):  # k1 = sampler - trainer
        data["next", "sampler_log_probs", "full"] += 4.0
    loss = PolicyLoss(model, corrections=[IMPOSSIBLE[name]()], aggregation=aggregation)
    model.zero_grad()
    out = loss(data)
    assert out.total_loss == 0
    assert out.total_loss.requires_grad
    out.total_loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())  # 0, and so not NaN
    assert all(value.isfinite().all() for value in out.values())
    assert (out["rejected_fraction"], out["rejected_seq_fraction"], out["correction_ess"]) == (1, 1, 0)
    # other terms are not corrected
    both = PolicyLoss(model, corrections=[IMPOSSIBLE[name]()], terms=[KLToReference(0.1)], aggregation=aggregation)
    alone = PolicyLoss(model, terms=[KLToReference(0.1)], aggregation=aggregation)
    _, gradient = loss_and_gradient(model, both, data)
    assert_close(both(data).total_loss, alone(data)["loss_kl_to_ref"])
    assert gradient.any()


def test_metrics_of_the_product_by_hand() -> None:
    weights = torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 9.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    found = correction_metrics(weights.requires_grad_(), mask)
    # 2, 0, 1, 1, 1: a mean of 1, a mean square of 7/5
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {"rejected_fraction": 1 / 5, "rejected_seq_fraction": 1 / 2, "correction_ess": 5 / 7}
    )
    assert not any(value.requires_grad for value in found.values())
    for empty in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(0, 3, dtype=torch.bool)):
        assert all(value == 0 for value in correction_metrics(torch.ones(empty.shape), empty).values())
    assert correction_metrics(torch.full((1, 2), 1e30), torch.ones(1, 2) == 1)["correction_ess"] == 1
    with pytest.raises(ValueError, match=r"mask has shape \(3, 3\) but weights has shape \(3, 1\)"):
        correction_metrics(weights[:, :1], mask)


def test_two_corrections_log_their_product(model: nn.Module) -> None:
    parts = [ImportanceWeights(high=1.2), RejectionMask("seq_max_k2", high=0.2)]
    loss, seen = PolicyLoss(model, corrections=parts), []
    for part in parts:
        part.register_forward_hook(lambda _, args, out: seen.append((args[0]["mask"], out[0])))
    out = loss(near())
    (mask, one), (_, two) = seen[-2:]
    product = (one * two)[mask]
    assert out["rejected_fraction"].item() == pytest.approx((product == 0).double().mean().item())
    assert out["correction_ess"].item() == pytest.approx(
        (product.mean() ** 2 / product.square().mean()).item(), rel=1e-5
    )
    names = {"rejected_fraction", "rejected_seq_fraction", "correction_ess"}
    assert names <= set(loss.out_keys) <= set(out.keys())
    assert not names & set(PolicyLoss(model)(near()).keys())


def test_experts_are_not_in_the_metrics(model: nn.Module) -> None:
    data = near()
    data["expert_mask"] = torch.tensor([True, False, True, False, False, False])
    data["next", "sampler_log_probs", "full"][0::2] = -50.0
    data["next", "sampler_log_probs", "full"][1::2] = data["next", "log_probs", "full"][1::2]
    out = PolicyLoss(model, "mix", corrections=[RejectionMask("token_k2", high=0.1)])(data)
    own = [9 - 4, 7 - 4, 5 - 4, 9 - 4, 6 - 4, 8 - 4]
    assert out["rejected_fraction"].item() == pytest.approx(own[4] / (own[1] + own[3] + own[4] + own[5]))


def test_the_wrappers_first_zero_is_not_taken_for_certainty(model: nn.Module) -> None:
    """At the root, where torchrl's policy writes, exactly 0 for the first response token means that it was not scored."""
    data = near()
    several, first = [0, 1, 3, 4, 5], 4  # sequence 2 has one response token: nothing shows that its 0 is no score
    data["next", "sampler_log_probs", "full"][several, first] = torch.nan
    expected = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])(data)
    stored = data["next", "sampler_log_probs", "full"].clone()
    stored[several, first] = 0.0
    del data["next", "sampler_log_probs"]
    data["log_probs", "full"] = stored
    loss = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])
    loss.set_keys(sampler_log_prob=("log_probs", "full"))
    found = loss(data)
    for key in sorted(expected.keys()):
        assert_close(found[key], expected[key], msg=lambda text, key=key: f"{key}: {text}")


# ------------------------------------------------------------------ verl's numbers


def test_verls_share_of_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several criteria together."""
    helper, options, bounds = verl(monkeypatch), "token_k1,seq_max_k2,seq_mean_k3", "0.6_1.5,0.2,0.1"
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        _, theirs = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), options, bounds)
        inputs = {"old_log_prob": old, "sampler_log_prob": sampler, "mask": mask}
        weights = torch.ones_like(old)
        for part in rollout_corrections(rollout_rs=options, rollout_rs_threshold=bounds):
            weights = weights * part(inputs)[0]
        found = correction_metrics(weights, mask)
        for name in ("masked_fraction", "seq_masked_fraction"):
            mine = name.replace("masked", "rejected") if name.startswith("masked") else "rejected_seq_fraction"
            assert found[mine].item() == pytest.approx(theirs[f"rollout_rs_{name}"], abs=1e-6)


def test_verls_geometric_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's ppl_ratio of one sequence is the inverse of its geometric weight; its seq_mean_k1 the mask of that weight."""
    helper = verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        free, _ = importance_weights(old, sampler, mask, level="geometric", high=None)
        cut, _ = importance_weights(old, sampler, mask, level="geometric", high=1.1)
        for i in range(7):
            one = slice(i, i + 1)
            ratio = helper.compute_offpolicy_metrics(old[one], sampler[one], mask[one].double())["ppl_ratio"]
            assert free[i][mask[i]].tolist() == pytest.approx([1 / ratio] * int(mask[i].sum()), rel=1e-6)
            assert cut[i][mask[i]].tolist() == pytest.approx([min(1.1, 1 / ratio)] * int(mask[i].sum()), rel=1e-6)
        kept, _ = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), "seq_mean_k1", "0.8_1.2")
        hard, _ = importance_weights(old, sampler, mask, level="geometric", mode="mask", low=1 / 1.2, high=1 / 0.8)
        assert torch.equal(hard != 0, kept != 0)
        assert_close(hard, torch.where(kept != 0, free, 0))


def test_verls_whole_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and mask together, as verl's trainer calls them."""
    helper = verl(monkeypatch)
    settings: dict[str, Any] = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k3",
        "rollout_rs_threshold": 0.1,
    }
    seen: list[Tensor] = []
    monkeypatch.setattr(helper.DataProto, "from_dict", lambda tensors: seen.extend(tensors.values()), raising=False)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        _, kept, _ = helper.compute_rollout_correction_and_rejection_mask(old, sampler, mask.double(), **settings)
        weights = torch.ones_like(old)
        for part in rollout_corrections(**settings):
            weights = weights * part({"old_log_prob": old, "sampler_log_prob": sampler, "mask": mask})[0]
        assert_close(weights, seen[-1] * kept)


def test_the_geometric_level_as_a_setting() -> None:
    """Beside verl's two."""
    (one,) = rollout_corrections(rollout_is="geometric", rollout_is_threshold="0.9_1.1")
    assert repr(one) == repr(ImportanceWeights(level="geometric", mode="mask", low=0.9, high=1.1))
    (two,) = rollout_corrections(rollout_is="geometric")
    assert repr(two) == repr(ImportanceWeights(level="geometric", high=2.0))
