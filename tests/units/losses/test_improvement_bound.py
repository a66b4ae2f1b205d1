"""The bound on the error of a predicted change of reward, on tasks whose every answer is enumerated."""

import math
from collections.abc import Iterator

import pytest
import torch
from test_sequence_kl import LENGTH, PREFIX, TOKENS, Tree
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import KLToSampler, LossInputs, improvement_bound
from torchrl_llm_kl.losses._metrics import step_metrics


def outcomes(distance: float, seeds: int) -> Iterator[tuple[float, float, float, float]]:
    """Change of the expected reward, its prediction, and the bound with the KLs of either direction."""
    for seed in range(seeds):
        tree = Tree(seed, distance, ends=bool(seed % 2))
        rng = torch.Generator().manual_seed(seed)
        # All or nothing is the worst case of rewards from 0 to 1.
        reward = (torch.rand(len(PREFIX), generator=rng) > 0.5).double() if seed % 3 else torch.rand(27, generator=rng)
        # Rows of one sequence, which differ only after its end, have one reward.
        reward = torch.stack([reward[_same(tree, row)].mean() for row in range(len(PREFIX))])
        new, old = tree.probability(tree.policy).detach(), tree.probability(tree.old)
        change = ((new - old) * reward).sum()
        ratio = (tree.log_probs(tree.policy) - tree.log_probs(tree.old)).detach().exp()
        surrogate = (old * ((ratio - 1) * tree.mask).sum(-1) * reward).sum()
        bounds = []
        for p, q, of_p in ((tree.policy, tree.old, new), (tree.old, tree.policy, old)):
            per_prefix = (p.exp() * (p - q)).sum(-1).detach()
            summed = (of_p * (per_prefix[PREFIX] * tree.mask).sum(-1)).sum()
            reached = per_prefix[PREFIX[tree.mask]]
            bounds.append(float(improvement_bound(reached.max(), summed, LENGTH)))
        yield float(change), float(surrogate), *bounds


def _same(tree: Tree, row: int) -> Tensor:
    shown = torch.where(tree.mask, TOKENS, -1)
    return (shown == shown[row]).all(-1)


@pytest.mark.parametrize("distance", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_the_bound_is_never_exceeded(distance: float) -> None:
    for change, surrogate, forward, backward in outcomes(distance, 60):
        assert abs(change - surrogate) <= min(forward, backward) + 1e-12


def test_the_bound_certifies_the_improvement_of_close_policies() -> None:
    """It is not vacuous: a surrogate above the bound proves that the reward rises. 90 of these 200 steps raise it."""
    certified = [change for change, surrogate, bound, _ in outcomes(0.01, 200) if surrogate > bound]
    assert len(certified) > 50
    assert min(certified) > 0
    assert all(bound < 0.1 for *_, bound in outcomes(0.03, 50))
    assert any(bound > 1 for *_, bound in outcomes(3.0, 50))  # large steps are not certified


def test_the_worst_case_of_two_tokens_is_within_a_factor_of_four() -> None:
    """By hand: both tokens move from 1/2 to 1/2 + e, and only equal tokens are rewarded.

    The reward rises by 2 e^2. The surrogate of the first order is 0, and KL = 2 e^2 in both directions, up to e^4.
    """
    e = 1e-3
    kl = torch.tensor((0.5 + e) * math.log(1 + 2 * e) + (0.5 - e) * math.log(1 - 2 * e), dtype=torch.float64)
    error = (0.5 + e) ** 2 + (0.5 - e) ** 2 - 0.5
    assert error == pytest.approx(2 * e**2)
    assert 1.0 < float(improvement_bound(kl, 2 * kl, 2)) / error < 4.0


def test_the_figures_of_the_paper() -> None:
    """Answers of 4096 tokens with a largest KL of 1e-4: 35.0 from one theorem, and 8.2 from the other for a KL of 0.01."""
    largest = torch.tensor(1e-4, dtype=torch.float64)
    assert float(improvement_bound(largest, 4096 * largest, 4096)) == pytest.approx(34.95, abs=0.01)
    assert float(improvement_bound(largest, torch.tensor(0.01, dtype=torch.float64), 4096)) == pytest.approx(8.192)


def test_metrics_of_the_exact_kl_to_the_sampler_by_hand() -> None:
    """Two rows of two and of one token. The ratio of the first token, 2, weighs the KL of the second."""
    mask = torch.tensor([[True, True], [True, False]])
    log_prob = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    old = log_prob - torch.tensor([[2.0, 5.0], [3.0, torch.nan]], dtype=torch.float64).log()
    kl = torch.tensor([[0.001, 0.002], [0.03, 9.0]], dtype=torch.float64).requires_grad_()
    part = KLToSampler(0.5, "exact")
    assert sorted(part.needs) == ["kl"]  # and the log-probs of the sampler or the trainer
    (term,) = part(LossInputs(log_prob, mask, old_log_prob=old, kl=kl))
    assert_close(term.value[mask].tolist(), [0.001, 0.002, 0.03])
    (gradient,) = torch.autograd.grad(torch.where(mask, term.value, 0).sum(), kl)
    assert gradient.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert float(term.metrics["kl_to_sampler_max"]) == pytest.approx(0.03)
    summed = (0.001 + 2 * 0.002 + 0.03) / 2
    expected = 2 * 2 * math.sqrt(0.03 * summed)  # the other part is 0.113
    assert float(term.metrics["improvement_bound_sampled"]) == pytest.approx(expected)
    (term,) = part(LossInputs(log_prob, mask, old_log_prob=old.nan_to_num(0.0), kl=kl / 1e4, sampler_log_prob=old))
    assert float(term.metrics["kl_to_sampler_max"]) == pytest.approx(3e-6)


def test_rounding_and_empty_batches_give_numbers() -> None:
    """The KL of nearly equal policies may be negative by rounding."""
    kl = torch.tensor([[1e-6, -3e-6]])
    metrics = step_metrics(kl, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert all(value.isfinite() for value in metrics.values())
    assert float(metrics["improvement_bound_sampled"]) <= 4 / 3 * 2**1.5 * 1e-6
    none = step_metrics(kl[:0], kl[:0], kl[:0] > 0)
    assert [float(value) for value in none.values()] == [0.0, 0.0]
