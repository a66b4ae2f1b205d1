"""The KL of whole sequences, by enumerating every sequence of three words. Sums replace samples, so only rounding is left."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl.losses import KLToReference, LossInputs, PolicyLoss
from torchrl_llm_kl.losses._arithmetic import prefix_sum
from torchrl_llm_kl.losses.terms import kl_to_ref
from torchrl_llm_kl.transforms import RetrieveLogProb
from toy_tasks import TabularPolicy, Task, chain

V, LENGTH = 3, 3
#: Every sequence of tokens, and the index of the prefix before each token: one, three and nine prefixes.
TOKENS = torch.cartesian_prod(*[torch.arange(V)] * LENGTH)
PREFIX = torch.stack([torch.zeros(V**3, dtype=torch.long), 1 + TOKENS[:, 0], 4 + 3 * TOKENS[:, 0] + TOKENS[:, 1]], -1)
EXACT = {"rtol": 1e-12, "atol": 1e-13}


class Tree:
    """Three policies with one distribution for each prefix. A token 0 ends its sequence, so lengths are one to three."""

    def __init__(self, seed: int, distance: float, ends: bool = True) -> None:
        rng = torch.Generator().manual_seed(seed)
        old, ref, step = torch.randn(3, 13, V, generator=rng, dtype=torch.float64).unbind()
        self.logits = (old + distance * step).requires_grad_()
        self.policy, self.old, self.ref = (x.log_softmax(-1) for x in (self.logits, old, ref))
        ended = (TOKENS == 0).cumsum(-1) - (TOKENS == 0).long() > 0
        self.mask = ~ended if ends else torch.ones_like(ended)

    def log_probs(self, of: Tensor) -> Tensor:
        return torch.where(self.mask, of[PREFIX, TOKENS], 0)

    def probability(self, of: Tensor) -> Tensor:
        """The probability of each row. Rows that differ only after the end share the probability of their sequence."""
        shared = V ** (~self.mask).sum(-1)
        return self.log_probs(of).sum(-1).exp() / shared

    def sequence_kl(self) -> Tensor:
        """The KL of whole sequences, from its definition."""
        log_ratio = (self.log_probs(self.policy) - self.log_probs(self.ref)).sum(-1)
        return (self.probability(self.policy) * log_ratio).sum()

    def kl(self) -> Tensor:
        """The exact KL at each prefix."""
        return (self.policy.exp() * (self.policy - self.ref)).sum(-1)[PREFIX]

    def inputs(self, **changes: Tensor) -> LossInputs:
        own = {"old_log_prob": self.log_probs(self.old), "ref_log_prob": self.log_probs(self.ref), "kl": self.kl()}
        return LossInputs(self.log_probs(self.policy), self.mask, **{**own, **changes})

    def values(self, **hyper: Any) -> Tensor:
        """The term's value for every sequence."""
        (term,) = kl_to_ref(self.inputs(), **hyper)
        return torch.where(term.mask, term.value, 0).sum(-1)

    def mean(self, **hyper: Any) -> Tensor:
        """The mean over sequences of the sampler."""
        return (self.probability(self.old) * self.values(**hyper)).sum()

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]


def test_prefix_sum_by_hand() -> None:
    value, mask = torch.tensor([[1.0, torch.nan, 3.0, 4.0]]), torch.tensor([[True, False, True, True]])
    assert prefix_sum(value, mask).tolist() == [[1.0, 1.0, 4.0, 8.0]]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k3"])
def test_value_and_gradient_are_those_of_the_kl_of_whole_sequences(estimator: str, distance: float, ends: bool) -> None:
    for seed in range(4):
        tree = Tree(seed, distance, ends)
        expected = tree.sequence_kl()
        mean = tree.mean(estimator=estimator, level="sequence")
        assert_close(mean, expected, **EXACT)
        assert_close(tree.gradient(mean), tree.gradient(expected), **EXACT)


@pytest.mark.parametrize(("distance", "value_is_right"), [(0.0, True), (1.0, False)])
def test_the_kl_of_each_position_lacks_the_gradient_of_reaching_its_prefix(
    distance: float, value_is_right: bool
) -> None:
    """The negative control. On-policy only the gradient is wrong, off-policy the value too."""
    for seed in range(4):
        tree = Tree(seed, distance)
        expected, mean = tree.sequence_kl(), tree.mean(estimator="exact")
        assert torch.isclose(mean, expected, rtol=1e-9).item() == value_is_right
        wrong = (tree.gradient(mean) - tree.gradient(expected))[:4]  # the last token is the prefix of none
        assert wrong.abs().max() > 0.01
        if value_is_right:
            assert_close(tree.gradient(mean)[4:], tree.gradient(expected)[4:], **EXACT)


def test_the_exact_kl_has_the_least_variance() -> None:
    """Standard deviations over the sampler's sequences, as a share of k1's."""
    shares: dict[str, list[float]] = {"exact": [], "k3": []}
    for seed in range(20):
        tree = Tree(seed, 0.3, ends=False)
        weight = tree.probability(tree.old)

        def spread(estimator: str, tree: Tree = tree, weight: Tensor = weight) -> float:
            values = tree.values(estimator=estimator, level="sequence").detach()
            return math.sqrt((weight * (values - (weight * values).sum()).square()).sum())

        for name, each in shares.items():
            each.append(spread(name) / spread("k1"))
    means = {name: sum(each) / len(each) for name, each in shares.items()}
    assert means["exact"] < 0.6 < means["k3"] < 1.0, means


def test_a_tool_between_two_turns_is_not_part_of_the_ratio() -> None:
    """By hand: ratios 2 and 3 around a masked-out token, and KLs of 0.5 and 0.25."""
    mask = torch.tensor([[True, False, True]])
    log_prob = torch.tensor([[-1.0, -9.0, -2.0]], dtype=torch.float64).requires_grad_()
    old = log_prob.detach() - torch.tensor([[2.0, 1e6, 3.0]], dtype=torch.float64).log()
    kl = torch.tensor([[0.5, torch.nan, 0.25]], dtype=torch.float64).requires_grad_()
    inputs = LossInputs(log_prob, mask, old_log_prob=old, kl=kl)
    (term,) = kl_to_ref(inputs, estimator="exact", level="sequence", coeff=0.1)
    assert_close(term.value.detach()[mask].tolist(), [0.5, 0.5])
    to_log_prob, to_kl = torch.autograd.grad(torch.where(mask, term.value, 0).sum(), [log_prob, kl], retain_graph=True)
    assert_close(to_log_prob.tolist(), [[0.5, 0.0, 0.0]])  # the last token is before no other
    assert_close(to_kl.tolist(), [[1.0, 0.0, 2.0]])
    (term,) = kl_to_ref(inputs, estimator="exact", level="sequence", ratio_max=1.5)
    assert_close(term.value.detach()[mask].tolist(), [0.5, 0.375])
    (to_log_prob,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert to_log_prob.tolist() == [[0.0, 0.0, 0.0]]


def test_a_bound_on_the_ratio_makes_the_value_too_small() -> None:
    for seed in range(4):
        tree = Tree(seed, 1.5, ends=False)
        bounded = tree.mean(estimator="exact", level="sequence", ratio_max=1.1)
        assert bounded < tree.sequence_kl() - 1e-3


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        *[
            ({"level": "sequence", "estimator": name}, "takes estimator='exact', 'k1' or 'k3', got")
            for name in ("k2", "k3+", "corrected_k3", "abs", lambda *x: x[0])
        ],
        ({"level": "token", "ratio_max": 2.0}, "ratio_max=2.0 has no effect with level='token'"),
        ({"level": "turn", "estimator": "exact"}, "level must be one of 'token', 'sequence', got 'turn'"),
        ({"level": "sequence", "estimator": "exact", "ratio_max": 0.0}, "ratio_max must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(hyper: dict[str, Any], message: str) -> None:
    for make in (lambda: kl_to_ref(Tree(0, 0.0).inputs(), **hyper), lambda: KLToReference(0.1, **hyper)):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.filterwarnings("error")
def test_the_part_reads_the_log_probs_of_the_sampler_and_does_not_warn() -> None:
    part = KLToReference(0.1, "k3", level="sequence", ratio_max=4.0)
    assert sorted(part.needs) == ["old_log_prob", "ref_log_prob"]
    assert sorted(KLToReference(0.1, "exact", level="sequence").needs) == ["kl", "old_log_prob"]
    part.ratio_max = 1.0
    tree = Tree(1, 1.0)
    expected = kl_to_ref(tree.inputs(), estimator="k3", level="sequence", ratio_max=1.0)[0]
    assert_close(part(tree.inputs())[0].value, expected.value)


def test_a_policy_loss_has_the_gradient_of_the_kl_of_whole_answers() -> None:
    """From a model to its gradient, off-policy, over every answer of one or two tokens to two prompts."""
    task, rng = chain(), torch.Generator().manual_seed(0)
    actor, sampler = (task.policy(0.7 * torch.randn(task.reference.shape, generator=rng).log_softmax(-1)) for _ in "ab")
    reference = task.policy()
    prompts, answers = (x.flatten() for x in torch.meshgrid(torch.arange(2), torch.arange(12 + 1), indexing="ij"))
    td = RetrieveLogProb(sampler, log_probs_full_key=("log_probs", "full"))(task.batch(prompts, answers))
    td["advantage"] = torch.zeros(td["tokens", "full"].shape)
    term = KLToReference(1.0, "exact", level="sequence")
    out = PolicyLoss(actor, "gpg", terms=[term], reference=reference, aggregation="none")(td)
    weight = task.log_probs(sampler).exp().flatten()
    mean = (weight * out["loss_kl_to_ref"].sum(-1)).sum()
    (actual,) = torch.autograd.grad(mean, actor.table)

    log_prob = answer_log_probs(task, actor)
    expected = (log_prob.exp() * (log_prob - task.log_probs(reference))).sum()
    (gradient,) = torch.autograd.grad(expected, actor.table)
    assert_near(mean, expected, terms=64, size=4.0, dtype=torch.float32)
    assert_near(actual, gradient, terms=64, size=4.0, dtype=torch.float32)


def answer_log_probs(task: Task, model: TabularPolicy) -> Tensor:
    """Log-probs of all answers by the chain rule, with gradient."""
    full, real = task._padded
    logits = model(input_ids=full.flatten(0, 1))[0].double().log_softmax(-1)
    each = logits[:, :-1].gather(-1, full.flatten(0, 1)[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.where(real.flatten(0, 1)[:, 1:], each, 0).sum(-1).reshape(full.shape[:2])
