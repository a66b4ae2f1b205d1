"""Preference losses by hand: pairs in any order of rows, options, losses without a reference, losses of a whole batch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import called, tensor as f64
from objective_cases import PAIRS, rows_of
from project import tables
from refused import refused
from torchrl_llm_kl import losses

CLOSE = {"rtol": 2e-6, "atol": 1e-7}


def column(values: list[float]) -> Tensor:
    return f64(values).unsqueeze(-1)


def pair() -> dict[str, Tensor]:
    """Log-ratios that sum to 1 over the chosen answer's 2 tokens and to -2 over the rejected one's 3."""
    ref = f64([[-1.0, -2.0, -3.0], [-2.5, -1.5, -4.0]])
    log_prob = ref + f64([[0.4, 0.6, 50.0], [-0.5, -0.5, -1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return {"log_prob": log_prob.requires_grad_(), "mask": mask, "ref_log_prob": ref}


def rows(*ratios: float) -> dict[str, Tensor]:
    """One token per answer with the given log-ratio."""
    ref = torch.full((len(ratios), 1), -3.0, dtype=torch.float64)
    log_prob = (ref + column(list(ratios))).requires_grad_()
    return {"log_prob": log_prob, "mask": torch.ones_like(ref).bool(), "ref_log_prob": ref}


def free(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: data[key] for key in ("log_prob", "mask")}


def flags(*values: int) -> Tensor:
    return torch.tensor(values) == 1


def mean(term: losses.LossTerm) -> Tensor:
    return losses.aggregate(term.value, term.mask, "seq-mean-token-sum")


def gradient(value: Tensor, data: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(value.sum(), data["log_prob"], retain_graph=True)[0]


def numbers(term: losses.LossTerm) -> dict[str, float]:
    return {name: round(metric.item(), 9) for name, metric in term.metrics.items()}


def assert_pair(term: losses.LossTerm, data: Any, value: list[float], *slopes: float, **close: float) -> None:
    """Check the values, and the gradients of both answers' tokens."""
    close = close or CLOSE
    assert_close(term.value.detach(), column(value), **close)
    on_chosen, *on_rejected = slopes if len(slopes) > 2 else (slopes[0], *[slopes[1]] * 3)
    assert_close(gradient(term.value, data), f64([[on_chosen, on_chosen, 0.0], on_rejected]), **close)


ALPHA = {"f_divergence": "alpha_divergence"}
BY_HAND, WITHOUT_A_REFERENCE = tables(__file__).values()


@pytest.mark.parametrize(("name", "hyper", "value", "on_chosen", "on_rejected"), BY_HAND + WITHOUT_A_REFERENCE)
def test_by_hand(name: str, hyper: dict[str, Any], value: float, on_chosen: float, on_rejected: float) -> None:
    data = pair()
    given = free(data) if name in ("cpo", "simpo") else data  # without a reference
    point = {key: torch.tensor(x) for key, x in hyper.items() if key == "reference_point"}
    term, *more = called(losses.get_objective(name), **given, **hyper | point)
    assert bool(more) == (name == "cpo")
    assert term.name == "objective"
    assert term.mask.tolist() == [[True]]
    assert_pair(term, data, [value], on_chosen, on_rejected, rtol=1e-6, atol=1e-7)


def test_each_pair_has_its_own_loss_and_rewards() -> None:
    """The leads are 2 and -1. (Trinity adds them up to one pair, with a loss of 0.3133.) A tie counts as half right."""
    (term,) = called(losses.dpo, **rows(1.5, -0.5, -0.25, 0.75), beta=1.0)
    assert_close(term.value.detach(), column([0.1269280, 1.3132617]), rtol=1e-6, atol=1e-7)
    assert_close(mean(term).item(), 0.7200949, rtol=1e-6, atol=1e-7)
    assert (numbers(term)["reward_accuracy"], numbers(term)["reward_margin"]) == (0.5, 0.5)
    # Chosen 1 and 3, rejected -1 and 5 nats above the reference; the third is not a pair.
    data = rows(1.0, -1.0, 3.0, 5.0, 3.0, 3.0)
    data["mask"][5] = False
    expected = {"chosen_reward": 1.0, "rejected_reward": 1.0, "reward_margin": 0.0, "reward_accuracy": 0.5}
    assert numbers(called(losses.dpo, **data, beta=0.5)[0]) == expected
    # Two ties; a tie, a right order and a wrong one; a tie and a right order.
    for differences, share in (((0.5, 0.5, 0.0, 0.0), 0.5), ((0, 0, 2, 1, 1, 2), 0.5), ((0.5, 0.5, 1.0, 0.5), 0.75)):
        assert called(losses.dpo, **rows(*differences))[0].metrics["reward_accuracy"] == share


@pytest.mark.parametrize("name", PAIRS)
def test_rewards_and_orders_of_rows(name: str) -> None:
    """With ids of pairs, the order of rows does not matter."""
    objective = losses.get_objective(name)
    expected = {"chosen_reward": 0.5, "rejected_reward": -1.0, "reward_margin": 1.5, "reward_accuracy": 1.0}
    assert numbers(called(objective, **pair(), beta=0.5)[0]) == expected
    ids, is_chosen = torch.tensor([2**62, 2**62, -(2**62), -(2**62), 7, 7]), flags(1, 0, 1, 0, 1, 0)
    data = rows(1.5, -0.5, -0.25, 0.75, 0.3, 0.2)
    (neighbours,) = called(objective, **data, beta=0.4)
    slopes = gradient(mean(neighbours), data)
    for order in ([3, 0, 5, 1, 4, 2], [1, 0, 2, 3, 5, 4]):
        shuffled = {key: value.detach() for key, value in rows_of(data, order).items()}
        shuffled["log_prob"].requires_grad_()
        (term,) = called(objective, **shuffled, pair_id=ids[order], chosen=is_chosen[order], beta=0.4)
        # In the order of ids: the second pair, the third, the first.
        assert_close(term.value, neighbours.value[[1, 2, 0]])
        assert_close(gradient(mean(term), shuffled), slopes[order])
    turned = called(objective, **rows(1.5, -0.5), pair_id=ids[:2], chosen=~is_chosen[:2])[0]
    assert_close(turned.value, called(objective, **rows(-0.5, 1.5))[0].value)


def test_leading_batch_dimensions_are_one_list_of_rows() -> None:
    flat = rows(1.5, -0.5, -0.25, 0.75)
    nested = {key: value.view(2, 2, 1) for key, value in flat.items()}
    assert_close(called(losses.dpo, **nested)[0].value, called(losses.dpo, **flat)[0].value)
    ids, is_chosen = torch.tensor([[5, 9], [9, 5]]), torch.tensor([[True, False], [True, False]])
    crossed = called(losses.dpo, **nested, pair_id=ids, chosen=is_chosen)[0].value
    assert_close(crossed, called(losses.dpo, **rows(1.5, 0.75, -0.25, -0.5))[0].value)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_with_an_empty_answer_is_left_out(name: str) -> None:
    (whole,) = called(losses.get_objective(name), **rows(1.5, -0.5))
    for empty in ([2, 3], [2], [3]):
        data = rows(1.5, -0.5, -0.25, 0.75)
        data["mask"][empty] = False
        crossed = {**rows_of(data, [3, 0, 1, 2]), "pair_id": torch.tensor([2, 1, 1, 2]), "chosen": flags(0, 1, 0, 1)}
        for given in (data, crossed):
            (term,) = called(losses.get_objective(name), **given)
            assert term.mask.tolist() == [[True], [False]]
            assert term.value[1] == 0
            assert_close(mean(term), mean(whole))
            assert (gradient(term.value, data)[2:] == 0).all()
            assert_close(dict(term.metrics), dict(whole.metrics))


FOUR, OF_EACH = (1.5, -0.5, -0.25, 0.75), "rows, expected one of each"
test_rows_that_are_no_pairs = refused(
    lambda ratios, ids, chosen: called(losses.dpo, **rows(*ratios), pair_id=ids and torch.tensor(ids), chosen=chosen),
    (FOUR, [1, 1, 7, 7], flags(1, 0, 1, 1), f"pair_id 7 has 2 chosen and 0 rejected {OF_EACH}"),
    (FOUR, [1, 1, 7, 8], flags(1, 0, 1, 0), f"pair_id 7 has 1 chosen and 0 rejected {OF_EACH}"),
    (FOUR, [3, 3, 3, 3], flags(1, 0, 1, 0), f"pair_id 3 has 2 chosen and 2 rejected {OF_EACH}"),
    (FOUR, [1, 2, 1, 2], None, "pass both pair_id and chosen, or neither"),
    (FOUR, [1, 1], flags(1, 0, 1, 0), r"pair_id has shape \(2,\), expected \[\*B\] for a mask of shape \(4, 1\)"),
    (FOUR[:3], None, None, "got 3: the last has no partner"),
    (FOUR[:2], [1, 1], torch.tensor([1, 0]), TypeError, r"chosen must be boolean, got torch\.int64"),
)


# ---------------------------------------------------------------------- options of the family
def test_ld_alpha_counts_the_tokens_beyond_the_shorter_answer_less() -> None:
    """The rejected answer's third token has the log-ratio -1. With a factor of 1/4, delta is 1 + 1.25."""
    data = pair()
    (term,) = called(losses.dpo, **data, beta=0.5, ld_alpha=0.25)
    assert_pair(term, data, [0.2811501], -0.1225425, 0.1225425, 0.1225425, 0.0306356)
    assert numbers(term)["rejected_reward"] == -0.625
    (term,) = called(losses.sppo_hard, **data, beta=0.1, ld_alpha=0.25)
    assert_pair(term, data, [30.0625], -8.0, 7.5, 7.5, 1.875)


def test_ld_alpha_counts_trained_tokens_of_the_pair_in_any_order() -> None:
    """Masked-out tokens are not counted, and the id names the partner."""
    ratio = torch.tensor([[1.0, 9.0, 2.0, 4.0], [1.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 9.0, 4.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]]).bool()
    ref, ids = torch.full((4, 4), -9.0), torch.tensor([8, 3, 3, 8])
    given = {"ref_log_prob": ref, "pair_id": ids, "chosen": flags(1, 0, 1, 0), "beta": 0.01}
    settings: list[Any] = [{"ld_alpha": 0.5}, {"ld_alpha": 1.0}, {}]
    part, all_of_it, whole = (called(losses.hinge, ref + ratio, mask, **given, **x)[0].value for x in settings)
    # Pair 3: 1 + 0.5 * 3 against 1. Pair 8: three tokens each, 7 against 9.
    assert_close(part, 1 - 0.01 * torch.tensor([[1.5], [-2.0]]))
    assert_close(whole, all_of_it)


@pytest.mark.parametrize(
    ("f", "hyper"),
    [
        (lambda u: u * u.log(), {"f_divergence": "reverse_kl"}),
        (lambda u: -u.log(), {"f_divergence": "forward_kl"}),
        (lambda u: u * u.log() - (1 + u) * ((1 + u) / 2).log(), {"f_divergence": "js_divergence"}),
        (lambda u: (u**0.7 - 0.7 * u - 0.3) / (0.3 * -0.7), {**ALPHA, "f_alpha": 0.3}),
    ],
)
def test_the_lead_uses_the_derivative_of_the_divergence(f: Any, hyper: dict[str, Any]) -> None:
    """Each f is from table 1 of the f-DPO paper. Autograd computes its derivative."""
    u = f64([[0.3], [1.9]]).requires_grad_()
    (slope,) = torch.autograd.grad(f(u).sum(), u)
    (term,) = called(losses.hinge, **rows(*u.detach().log().flatten().tolist()), beta=0.1, **hyper)
    assert_close(term.value.item(), 1 - 0.1 * (slope[0] - slope[1]).item())
    for f_alpha, limit in ((1e-6, "reverse_kl"), (1.0, "forward_kl")):  # alpha lies between the KLs
        value = called(losses.dpo, **pair(), **ALPHA, f_alpha=f_alpha)[0].value
        assert_close(value, called(losses.dpo, **pair(), f_divergence=limit)[0].value, rtol=1e-5, atol=0)


def test_pairs_are_weighted_by_their_probability() -> None:
    """The mean log-probs are -1 and -10/3, and 0.4 and 2.3 / 3 relative to the policy's own answers (WPO)."""
    data = pair()
    (plain,) = called(losses.dpo, **data, beta=0.5)
    (term,) = called(losses.dpo, **data, beta=0.5, weighting="probability")
    assert_close(term.metrics["weight_mean"].item(), math.exp(-13 / 3))
    assert_close(term.value, math.exp(-13 / 3) * plain.value)
    sharp = f64([[-0.2, -1.0, 7.0], [-2.5, -1.2, -4.0]])
    (term,) = called(losses.dpo, **data, sharp_log_prob=sharp, beta=0.5, weighting="aligned")
    assert_close(term.metrics["weight_mean"].item(), math.exp(0.4 + 2.3 / 3))
    assert_close(gradient(term.value, data), math.exp(0.4 + 2.3 / 3) * gradient(plain.value, data))
    data = rows(0.5, 0.2, 0.7, 0.1)
    product, alone = (called(losses.apo_zero, **data, weighting=x)[0].value for x in ("probability", "none"))
    assert_close(product, alone * column([math.exp(-5.3), math.exp(-5.2)]))


def test_cpo_is_dpo_without_a_reference_and_the_likelihood_of_the_chosen() -> None:
    """The log-probs are -0.6 - 1.4 = -2 and -10."""
    data = pair()
    term, nll = called(losses.cpo, **free(data))
    assert_pair(term, data, [0.3711007], -0.0310026, 0.0310026)
    assert (nll.name, nll.weight, nll.aggregation) == ("nll", 1.0, None)
    assert nll.mask.tolist() == [[True, True, False], [False] * 3]
    assert_close(nll.value[nll.mask].tolist(), [0.6, 1.4])
    assert_close(mean(nll).item(), 2.0)
    other = called(losses.cpo, **free(data), nll_coeff=0.3, nll_aggregation="token-mean")[1]
    assert (other.weight, other.aggregation) == (0.3, "token-mean")
    without = called(losses.dpo, **data | {"ref_log_prob": torch.zeros(2, 3)}, beta=0.5)[0].value
    assert_close(called(losses.cpo, **free(data), beta=0.5)[0].value, without)


def test_tpo_compares_two_answers_and_imitates_the_third() -> None:
    """Two triples with leads of 2 and -1 nats. The third answers have two tokens and one token."""
    log_prob = f64([[-1.0, -0.5], [-3.0, -0.5], [-0.2, -0.4], [-2.0, 9.0], [-1.0, 9.0], [-0.7, 9.0]]).requires_grad_()
    mask = torch.tensor([[1, 1]] * 3 + [[1, 0]] * 3).bool()
    term, nll = losses.tpo(losses.LossInputs(log_prob, mask), beta=0.5, nll_coeff=0.3)
    assert_close(term.value.detach(), column([math.log1p(math.exp(-1.0)), math.log1p(math.exp(0.5))]))
    assert (nll.name, nll.weight, nll.aggregation) == ("nll", 0.3, "token-mean")
    assert_close(nll.value[nll.mask].detach(), f64([0.2, 0.4, 0.7]))
    total = term.value.sum() + (nll.value * nll.mask).sum()
    (found,) = torch.autograd.grad(total, log_prob)
    a, b = 0.5 / (1 + math.exp(1.0)), 0.5 / (1 + math.exp(-0.5))
    assert_close(found, f64([[-a, -a], [a, a], [-1.0, -1.0], [-b, 0.0], [b, 0.0], [-1.0, 0.0]]))
    # TPO-L: leads of 1 and -1 per token, less a margin; other functions of the lead; more dimensions.
    settings: list[tuple[dict[str, Any], list[float]]] = [
        ({"margin": 0.3, "length_normalised": True}, [math.log1p(math.exp(-0.2)), math.log1p(math.exp(0.8))]),
        ({"loss": "hinge"}, [0.0, 1.5]),
        ({"loss": "ipo"}, [1.0, 4.0]),
        ({"label_smoothing": 0.1}, [math.log1p(math.exp(-1.0)) + 0.1, math.log1p(math.exp(0.5)) - 0.05]),
    ]
    for hyper, expected in settings:
        (term, nll) = called(losses.tpo, log_prob.view(2, 3, 2), mask.view(2, 3, 2), beta=0.5, **hyper)
        assert_close(term.value.detach(), column(expected))
        assert nll.mask[:, 2].sum() == nll.mask.sum() == 3
    with pytest.raises(ValueError, match=r"expected rows chosen, rejected, third, chosen, \.\.\., got 4 rows"):
        losses.tpo(losses.LossInputs(log_prob[:4], mask[:4]))


def test_a_sum_of_preference_losses_and_the_likelihood() -> None:
    """Twice dpo, half of ipo per token and a quarter of bco_pair with z = 0, with the values of the table above."""
    data, given = pair(), {"losses": ["dpo", "sft", "ipo_norm", "bco_pair"], "weights": [2.0, 3.0, 0.5, 0.25]}
    term, nll = called(losses.preference_sum, **data, beta=0.5, **given)
    assert_pair(term, data, [0.6135502], -0.1462849, 0.1604877, rtol=2e-6, atol=2e-7)
    assert (nll.name, nll.weight, nll.aggregation) == ("nll", 3.0, "token-mean")
    assert_close(nll.value[nll.mask].tolist(), [0.6, 1.4])
    for name, smoothing in (("robust", 0.1), ("exo_pair", 0.1), ("discopop", None)):
        hyper: dict[str, Any] = {"tau": 0.5} if smoothing is None else {"label_smoothing": smoothing}
        (term,) = called(losses.preference_sum, **data, beta=0.5, losses=[name], **hyper)
        assert_close(term.value, called(losses.get_objective(name), **data, beta=0.5, **hyper)[0].value)
    weighted = called(losses.preference_sum, **data, losses=["dpo"], weighting="probability", ld_alpha=0.25)[0].value
    assert_close(weighted, called(losses.dpo, **data, weighting="probability", ld_alpha=0.25)[0].value)
    for bad, message in (
        ({"losses": ["dpoo"]}, "preference_sum has no loss 'dpoo'. Did you mean 'dpo'"),
        ({"losses": "dpo"}, "losses must be a list of at least one name, got 'dpo'"),
        ({"losses": []}, "losses must be a list of at least one name"),
        ({"weights": [1.0]}, "argument 2 is shorter"),
    ):
        with pytest.raises(ValueError, match=message):
            called(losses.preference_sum, **data, **bad)


def test_orpo_compares_odds() -> None:
    """The mean log-probs are -1 and -10/3, the odds 0.582 and 0.0370. A certain answer has a finite loss."""
    data = pair()
    term, nll = called(losses.orpo, **free(data))
    assert_pair(term, data, [0.0061627], -0.0047275, 0.0020659, rtol=2e-5, atol=1e-7)
    assert nll.aggregation == "seq-mean-token-mean"
    assert_close(losses.aggregate(nll.value, nll.mask, nll.aggregation).item(), 1.0)
    assert_close(term.metrics["reward_margin"].item(), 0.1 * 7 / 3)
    for certain in (0.0, -1e-9, -1e-4):
        log_prob = torch.tensor([[certain], [-2.0]], requires_grad=True)
        (term, _) = losses.orpo(losses.LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool)), beta=1.0)
        assert torch.autograd.grad(term.value.sum(), log_prob)[0].isfinite().all()
        odds = math.exp(max(-certain, 1e-7)) - 1  # of the other outcome
        assert_close(term.value.item(), math.log1p(odds / (math.exp(2) - 1)), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_the_likelihood_covers_chosen_answers_of_whole_pairs(name: str) -> None:
    data = free(rows(1.5, -0.5, -0.25, 0.75, 0.1, 0.2))
    data["mask"][2] = False
    ids, chosen = torch.tensor([4, 4, 9, 9, 1, 1]), flags(0, 1, 0, 1, 1, 0)
    term, nll = called(losses.get_objective(name), **data, pair_id=ids, chosen=chosen)
    assert nll.mask.flatten().tolist() == [False, True, False, False, True, False]
    assert term.mask.flatten().tolist() == [True, True, False]
    assert_close(mean(nll).item(), (3.5 + 2.9) / 2)


def test_kto_by_hand() -> None:
    """The log-ratio is 1 for the desirable answer and -2 for the undesirable one."""
    data, point = {**pair(), "chosen": flags(1, 0)}, {"reference_point": torch.full((2,), 0.5)}
    (term,) = called(losses.kto, **data, **point, beta=0.5, desirable_weight=1.3, undesirable_weight=0.7)
    assert_pair(term, data, [0.5691705, 0.1558901], -0.1599872, 0.0605867)
    expected = {"chosen_reward": 0.5, "rejected_reward": -1.0, "reward_margin": 1.5, "reference_point": 0.5}
    assert numbers(term) == expected
    assert_close(called(losses.kto, **data, **point, beta=0.5)[0].value, term.value / column([1.3, 0.7]))
    assert_close(called(losses.kto, **data, **point)[0].value, called(losses.kto, **data, **point, beta=0.1)[0].value)
    with_0 = called(losses.kto, **data, reference_point=torch.zeros(2), beta=0.4)[0].value
    assert_close(with_0.sum(), called(losses.apo_zero, **pair(), beta=0.4)[0].value.sum())
    data = rows(-3.0, 0.7, 4.0)  # the gradient is greatest at the reference point
    (term,) = called(losses.kto, **data, chosen=torch.ones(3).bool(), reference_point=torch.full((3,), 0.7), beta=1.0)
    found = gradient(term.value, data).flatten()
    assert found.argmin() == 1
    assert_close(found[1].item(), -0.25)


def test_bco_by_hand() -> None:
    data = {**pair(), "chosen": flags(1, 0)}
    (term,) = called(losses.bco, **data, reference_point=torch.full((2,), 0.5), beta=0.5)
    assert_pair(term, data, [0.5759394, 0.2519291], -0.2189117, 0.1113501)
    (own,) = called(losses.bco, **data, beta=0.5)  # half way: -0.5
    assert_pair(own, data, [0.3868710, 0.3868710], -0.1604107, 0.1604107)
    assert_close(own.metrics["reference_point"].item(), -0.5)
    assert_close(called(losses.bco, **data)[0].value, called(losses.bco, **data, beta=0.1)[0].value)
    assert_close(called(losses.bco_pair, **pair(), beta=0.5)[0].value.sum(), own.value.sum())


def test_real_classifies_the_answers_of_a_group() -> None:
    """With tau 1/2 the logits are log 2, log 3, -log 2 of one group and -log 3 of another. The last row has no tokens."""
    old = torch.full((5, 3), -9.0, dtype=torch.float64)
    scores = f64([[2.0, 4.0, 0.0], [3.0, 0.0, 9.0], [0.5, 9.0, 9.0], [1 / 3, 9.0, 9.0], [7.0, 9.0, 9.0]])
    scores[0, :2] = f64([1.0, 4.0])  # a mean of log 2 over two tokens
    scores[1, 0] = 3.0
    data = {"log_prob": (old + scores.clamp(min=0.1).log() / 2).requires_grad_(), "old_log_prob": old}
    data["mask"] = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]) == 1
    data["chosen"] = torch.tensor([True, False, False, True, True])
    group = torch.tensor([4, 4, 4, -7, 4])
    (term,) = called(losses.real, **data, match_id=group)
    assert term.mask.flatten().tolist() == [True] * 4 + [False]
    both = math.log(1 + 1 / 2) + math.log(1 + 3 + 1 / 2)
    assert_close(term.value[:4], column([both, both, both, math.log(1 + 3)]))
    assert term.metrics["reward_accuracy"] == 0.5
    (gradient,) = torch.autograd.grad(term.value[term.mask].sum(), data["log_prob"])
    # 1 / tau times the softmax with the anchor, times the three rows that hold the group's loss; halved for two tokens.
    want = [[-2 * 3 * (1 / 3) / 2] * 2 + [0], [2 * 3 * (2 / 3), 0, 0], [2 * 3 / 9, 0, 0], [-2 * 3 / 4, 0, 0], [0] * 3]
    assert_close(gradient, f64(want))
    assert_close(called(losses.real, **data, match_id=group, tau=0.5)[0].value, term.value)
    # Each answer is its own group: binary cross-entropy.
    (term,) = called(losses.real, **data)
    assert_close(term.value[:4], column([1 + 1 / 2, 1 + 3, 1 + 1 / 2, 1 + 3]).log())
    assert_close(called(losses.real, **data, tau=1.0)[0].value[1, 0].item(), math.log(1 + math.sqrt(3)))


@pytest.mark.parametrize("name", ["kto", "bco"])
def test_answers_are_in_any_order_and_empty_ones_are_left_out(name: str) -> None:
    objective = losses.get_objective(name)
    data = {**rows(0.5, -0.25, 1.5, 0.75, 3.0), "chosen": flags(0, 1, 1, 0, 1)}
    data["reference_point"] = torch.full((5,), 0.2)
    data["mask"][4], data["reference_point"][4] = False, torch.nan
    (term,) = called(objective, **data, beta=0.3)
    assert term.mask.flatten().tolist() == [True, True, True, True, False]
    assert term.value[4] == 0
    assert gradient(term.value, data).isfinite().all()
    for reward in ("chosen_reward", "rejected_reward"):
        assert_close(term.metrics[reward].item(), 0.3 * 1.25 / 2)
    order = torch.tensor([3, 1, 0, 4, 2])
    assert_close(called(objective, **rows_of(data, order), beta=0.3)[0].value, term.value[order])
    nested = {key: x.unflatten(0, (1, 5)) for key, x in data.items()}
    assert_close(called(objective, **nested, beta=0.3)[0].value, term.value.unsqueeze(0))


def test_the_kl_of_mismatched_answers_is_at_least_0() -> None:
    """The log-ratios are 1 and -2. A third answer has no tokens."""
    data = {key: torch.cat([x, x[:1]]) for key, x in pair().items()}
    data["mask"][2] = False
    assert called(losses.kto_reference_point, **data).tolist() == [0.0, 0.0, 0.0]
    data["ref_log_prob"][1] -= 1.0
    assert_close(called(losses.kto_reference_point, **data).tolist(), [1.0, 1.0, 1.0])
    assert not called(losses.kto_reference_point, **data).requires_grad


def test_the_shift_of_bco_is_halfway_between_the_kinds() -> None:
    """For the log-ratios 1.5, -0.25, 0 and 1.25, the means of [1.5, 1.25] and [-0.25, 0] are 1.375 and -0.125."""
    data = rows(1.5, -0.25, 0.0, 1.25)
    one_kind = [([1, 1, 1, 1], 0.625), ([0, 0, 0, 0], 0.625)]
    for labels, expected in [([1, 0, 0, 1], 0.625), ([1, 1, 1, 0], (5 / 12 + 1.25) / 2), *one_kind]:
        found = called(losses.bco_reference_point, **data, chosen=flags(*labels))
        assert_close(found.tolist(), [expected] * 4)
        assert not found.requires_grad
    data = rows(1.5, -0.5, 2.5, 0.5, 9.0, 7.0)  # without labels rows are pairs
    data["mask"][4:] = False
    point = called(losses.bco_reference_point, **data)
    assert_close(point.tolist(), [1.0] * 6)
    own, of_batch = (called(losses.bco_pair, **data, **x)[0].value for x in ({}, {"reference_point": point}))
    assert_close(own, of_batch)


# ---------------------------------------------------------------------- optimal transport
def test_aot_compares_leads_of_equal_rank() -> None:
    """The policy's leads are 3, 1, 2 and the reference's 0.5, 4, 1. Sorted, the differences are 1 - 0.5, 2 - 1, 3 - 4."""
    ref, log_prob = column([-1.0, -1.5, -1.0, -5.0, -2.0, -3.0]), column([-1.0, -4.0, -1.0, -2.0, -1.0, -3.0])
    data = {"log_prob": log_prob.requires_grad_(), "mask": torch.ones(6, 1, dtype=torch.bool), "ref_log_prob": ref}
    (term,) = called(losses.aot, **data, beta=1.0)
    leads = f64([-1.0, 0.5, 1.0])
    assert_close(term.value.detach().flatten(), torch.log1p((-leads).exp()))
    slope = -torch.sigmoid(-leads)
    assert_close(gradient(term.value, data).flatten(), torch.stack([slope, -slope], -1).flatten())
    point = called(losses.aot_reference_point, **data)
    assert_close(point.tolist(), [3.5, 3.5, -3.5, -3.5, 0.0, 0.0])
    assert_close(called(losses.aot, **data, reference_point=point, beta=1.0)[0].value, term.value)
    order, ids = torch.tensor([0, 3, 4, 1, 5, 2]), torch.tensor([2, 7, 5, 2, 5, 7])
    found = called(losses.aot_reference_point, **rows_of(data, order), pair_id=ids, chosen=flags(1, 0, 1, 0, 0, 1))
    assert_close(found, point[order])
    data = rows(1.5, -0.5, 0.75, -0.25, 9.0, 0.0)
    data["mask"][5] = False  # a pair that is left out has no rank
    assert_close(called(losses.aot, **data)[0].value[:2], called(losses.aot, **rows_of(data, slice(4)))[0].value)
    assert called(losses.aot_reference_point, **data)[4:].tolist() == [0.0, 0.0]


def test_aot_unpaired_compares_answers_of_equal_rank() -> None:
    """Chosen answers have 0.5, 3, 1 and rejected ones 2, -1, 0. Sorted, the differences are 0.5 + 1, 1 - 0, 3 - 2."""
    data = {**rows(0.5, 2.0, 3.0, 1.0, -1.0, 0.0), "chosen": flags(1, 0, 1, 1, 0, 0)}
    with pytest.raises(ValueError, match="match_id 1 has 1 chosen and 0 rejected rows"):
        called(losses.aot_unpaired, **rows_of(data, slice(3)) | {"mask": flags(1, 1, 0).unsqueeze(-1)})
    match = called(losses.aot_match, **data)
    assert match.tolist() == [0, 2, 2, 1, 0, 1]
    (term,) = called(losses.aot_unpaired, **data, beta=1.0)
    leads = f64([1.5, 1.0, 1.0])
    assert_close(term.value.detach().flatten(), torch.log1p((-leads).exp()))
    slope = -torch.sigmoid(-leads)
    expected = torch.stack([slope[0], -slope[2], slope[2], slope[1], -slope[0], -slope[1]])
    assert_close(gradient(term.value, data).flatten(), expected)
    smoothed = called(losses.aot_unpaired, **data, beta=1.0, label_smoothing=0.2)[0].value.detach().flatten()
    assert_close(smoothed, 0.8 * torch.log1p((-leads).exp()) + 0.2 * torch.log1p(leads.exp()))
    (whole,) = called(losses.aot_unpaired, **data)
    assert_close(whole.value, called(losses.aot_unpaired, **data, beta=0.1)[0].value)
    part = rows_of({**data, "match_id": match}, match != 1)
    assert_close(called(losses.aot_unpaired, **part)[0].value, whole.value[[0, 2]])
