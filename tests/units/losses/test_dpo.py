"""Preferences by hand: one pair each, in any order of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import LossTerm, aggregate, dpo, get_objective

FAMILY = [
    *("dpo", "robust", "hinge", "ipo", "exo_pair", "discopop", "apo_zero", "apo_down", "sppo_hard", "nca_pair"),
    *("bco_pair", "aot"),
]


def pair() -> dict[str, Tensor]:
    """Log-ratios that sum to 1 over the chosen answer's 2 tokens and to -2 over the rejected one's 3."""
    ratio = torch.tensor([[0.4, 0.6, 50.0], [-0.5, -0.5, -1.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.0, -2.0, -3.0], [-2.5, -1.5, -4.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return {"log_prob": (ref + ratio).requires_grad_(), "mask": mask, "ref_log_prob": ref}


def rows(ratios: list[float]) -> dict[str, Tensor]:
    """One token per answer with the given log-ratio."""
    ref = torch.full((len(ratios), 1), -3.0, dtype=torch.float64)
    ratio = torch.tensor(ratios, dtype=torch.float64).unsqueeze(-1)
    return {"log_prob": (ref + ratio).requires_grad_(), "mask": torch.ones_like(ref).bool(), "ref_log_prob": ref}


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def mean(term: LossTerm) -> Tensor:
    return aggregate(term.value, term.mask, "seq-mean-token-sum")


@pytest.mark.parametrize(
    ("name", "hyper", "value", "on_chosen", "on_rejected"),
    [
        ("dpo", {"beta": 0.5}, 0.2014133, -0.0912128, 0.0912128),
        ("dpo", {"beta": 0.5, "label_smoothing": 0.1}, 0.3514133, -0.0412128, 0.0412128),
        ("dpo", {"beta": 0.6, "length_normalised": True}, 0.4031860, -0.0995437, 0.0663624),
        ("robust", {"beta": 0.5, "label_smoothing": 0.1}, 0.0139133, -0.1537128, 0.1537128),
        ("robust", {"beta": 0.5}, 0.2014133, -0.0912128, 0.0912128),
        ("hinge", {"beta": 0.2}, 0.4, -0.2, 0.2),
        ("hinge", {"beta": 0.4}, 0.0, 0.0, 0.0),
        ("ipo", {"beta": 0.1}, 4.0, -4.0, 4.0),
        ("ipo", {"beta": 0.25}, 1.0, 2.0, -2.0),
        ("ipo", {"beta": 0.5, "length_normalised": True}, 1 / 36, 1 / 6, -1 / 9),
        ("apo_zero", {"beta": 0.5}, 0.6464821, -0.1175019, 0.0983060),
        ("sppo_hard", {"beta": 0.1}, 25.0, -8.0, 6.0),
        ("exo_pair", {"beta": 0.5, "label_smoothing": 0.1}, 0.0311388, -0.0519943, 0.0519943),
        ("exo_pair", {"beta": 0.5}, 0.7859173, -0.4031991, 0.4031991),
        ("discopop", {"beta": 0.2, "tau": 0.5}, 0.5230430, -0.0928379, 0.0928379),
        ("discopop", {"beta": 0.2}, 0.5488110, -0.1097594, 0.1097594),
        ("apo_down", {"beta": 0.5}, 0.8048849, 0.0429286, 0.0745732),
        ("nca_pair", {"beta": 0.5}, 1.1177463, -0.0331555, 0.0672354),
        ("bco_pair", {"beta": 0.5}, 0.7737420, -0.1604107, 0.1604107),
        ("bco_pair", {"beta": 0.5, "reference_point": torch.full((2,), 0.4)}, 0.8176377, -0.2127787, 0.1157376),
        ("aot", {"beta": 0.5, "label_smoothing": 0.1}, 0.3514133, -0.0412128, 0.0412128),
        ("aot", {"beta": 0.5, "reference_point": torch.full((2,), 0.75)}, 0.2811501, -0.1225425, 0.1225425),
        ("dpo", {"beta": 0.5, "f_divergence": "forward_kl"}, 0.0294416, -0.0053365, 0.1071873),
        ("dpo", {"beta": 0.5, "f_divergence": "js_divergence"}, 0.3391835, -0.0386803, 0.1266799),
        ("dpo", {"beta": 0.5, "f_divergence": "alpha_divergence", "f_alpha": 0.3}, 0.1526704, -0.0524453, 0.1289945),
        ("dpo", {"beta": 0.5, "f_divergence": "alpha_divergence"}, 0.1142442, -0.0327405, 0.1467327),
        ("hinge", {"beta": 0.3, "f_divergence": "js_divergence"}, 0.4559001, -0.0806824, 0.2642391),
        (
            "ipo",
            {"beta": 0.25, "f_divergence": "forward_kl", "length_normalised": True},
            0.1986892,
            0.1639807,
            -2.1957597,
        ),
        ("dpo", {"beta": 0.5, "weighting": "probability"}, 0.0026433, -0.0011971, 0.0011971),
        ("simpo", {}, 0.0252403, -0.0249244, 0.0166163),
        ("simpo", {"beta": 0.6, "margin": 0.4, "label_smoothing": 0.1}, 0.4132617, -0.0506824, 0.0337883),
    ],
)
def test_by_hand(name: str, hyper: dict[str, Any], value: float, on_chosen: float, on_rejected: float) -> None:
    data = pair()
    (term,) = get_objective(name)(**data, **hyper)
    assert term.name == "objective"
    assert_close(term.value.detach(), column([value]), rtol=1e-6, atol=1e-7)
    assert term.mask.tolist() == [[True]]
    (gradient,) = torch.autograd.grad(term.value.sum(), data["log_prob"])
    expected = torch.tensor([[on_chosen, on_chosen, 0.0], [on_rejected] * 3], dtype=torch.float64)
    assert_close(gradient, expected, rtol=2e-6, atol=1e-7)


def test_a_tie_is_no_success() -> None:
    (term,) = dpo(**rows([0.5, 0.5, 1.0, 0.5]))
    assert term.metrics["reward_accuracy"] == 0.5


def test_rewards_are_means_over_pairs() -> None:
    """Chosen 1 and 3, rejected -1 and 5 nats above the reference; the third pair is no pair."""
    data = rows([1.0, -1.0, 3.0, 5.0, 3.0, 3.0])
    data["mask"][5] = False
    found = {name: round(metric.item(), 6) for name, metric in dpo(**data, beta=0.5)[0].metrics.items()}
    assert found == {"chosen_reward": 1.0, "rejected_reward": 1.0, "reward_margin": 0.0, "reward_accuracy": 0.5}


def test_each_pair_has_its_own_loss() -> None:
    """Differences of 2 and -1: Trinity adds them up to one pair with 1, whose loss is 0.3133."""
    (term,) = dpo(**rows([1.5, -0.5, -0.25, 0.75]), beta=1.0)
    assert_close(term.value.detach(), column([0.1269280, 1.3132617]), rtol=1e-6, atol=1e-7)
    assert_close(mean(term).item(), 0.7200949, rtol=1e-6, atol=1e-7)
    assert_close(term.metrics["reward_accuracy"].item(), 0.5)
    assert_close(term.metrics["reward_margin"].item(), 0.5)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    """Both labels of a pair, each with its probability, instead of sampled ones."""
    right, flipped = rows([1.5, -0.5]), rows([-0.5, 1.5])
    robust = get_objective("robust")
    noisy = [robust(**data, beta=0.7, label_smoothing=0.2)[0].value for data in (right, flipped)]
    assert_close(0.8 * noisy[0] + 0.2 * noisy[1], dpo(**right, beta=0.7)[0].value)


@pytest.mark.parametrize("name", FAMILY)
def test_rewards_and_orders_of_rows(name: str) -> None:
    """With ids of pairs the order does not matter, and the flag says which answer is chosen."""
    objective = get_objective(name)
    (term,) = objective(**pair(), beta=0.5)
    found = {key: round(metric.item(), 9) for key, metric in term.metrics.items()}
    assert found == {"chosen_reward": 0.5, "rejected_reward": -1.0, "reward_margin": 1.5, "reward_accuracy": 1.0}
    ids = torch.tensor([2**62, 2**62, -(2**62), -(2**62), 7, 7])
    is_chosen = torch.tensor([True, False] * 3)
    data = rows([1.5, -0.5, -0.25, 0.75, 0.3, 0.2])
    (neighbours,) = objective(**data, beta=0.4)
    (gradient,) = torch.autograd.grad(mean(neighbours), data["log_prob"])
    for order in ([3, 0, 5, 1, 4, 2], [1, 0, 2, 3, 5, 4]):
        shuffled = {key: value.detach()[order] for key, value in data.items()}
        shuffled["log_prob"].requires_grad_()
        (term,) = objective(**shuffled, pair_id=ids[order], chosen=is_chosen[order], beta=0.4)
        # In the order of ids: the second pair, the third, the first.
        assert_close(term.value, neighbours.value[[1, 2, 0]])
        (found,) = torch.autograd.grad(mean(term), shuffled["log_prob"])
        assert_close(found, gradient[order])
    turned = objective(**rows([1.5, -0.5]), pair_id=ids[:2], chosen=~is_chosen[:2])[0]
    assert_close(turned.value, objective(**rows([-0.5, 1.5]))[0].value)


def test_leading_batch_dimensions_are_one_list_of_rows() -> None:
    flat = rows([1.5, -0.5, -0.25, 0.75])
    nested = {key: value.view(2, 2, 1) for key, value in flat.items()}
    expected = dpo(**flat)[0].value
    assert_close(dpo(**nested)[0].value, expected)
    ids, is_chosen = torch.tensor([[5, 9], [9, 5]]), torch.tensor([[True, False], [True, False]])
    crossed = dpo(**nested, pair_id=ids, chosen=is_chosen)[0].value
    assert_close(crossed, dpo(**rows([1.5, 0.75, -0.25, -0.5]))[0].value)


@pytest.mark.parametrize("name", FAMILY)
def test_a_pair_with_an_empty_answer_does_not_exist(name: str) -> None:
    (whole,) = get_objective(name)(**rows([1.5, -0.5]))
    for empty in ([2, 3], [2], [3]):
        data = rows([1.5, -0.5, -0.25, 0.75])
        data["mask"][empty] = False
        (term,) = get_objective(name)(**data)
        assert term.mask.tolist() == [[True], [False]]
        assert term.value[1] == 0
        assert_close(mean(term), mean(whole))
        (gradient,) = torch.autograd.grad(term.value.sum(), data["log_prob"])
        assert (gradient[2:] == 0).all()
        assert_close(dict(term.metrics), dict(whole.metrics))


def test_an_empty_answer_is_found_in_any_order() -> None:
    data = rows([0.75, 1.5, -0.5, -0.25])
    data["mask"][0] = False
    is_chosen = torch.tensor([False, True, False, True])
    (term,) = dpo(**data, pair_id=torch.tensor([2, 1, 1, 2]), chosen=is_chosen)
    assert term.mask.tolist() == [[True], [False]]
    assert_close(mean(term), mean(dpo(**rows([1.5, -0.5]))[0]))


NO_PAIRS: list[tuple[list[int] | None, list[bool] | None, str]] = [
    ([1, 1, 7, 7], [True, False, True, True], "pair_id 7 has 2 chosen and 0 rejected rows, expected one of each"),
    ([1, 1, 7, 8], [True, False, True, False], "pair_id 7 has 1 chosen and 0 rejected rows, expected one of each"),
    ([3, 3, 3, 3], [True, False, True, False], "pair_id 3 has 2 chosen and 2 rejected rows, expected one of each"),
    ([1, 2, 1, 2], None, "got pair_id without chosen: pass both"),
    (None, [True, False, True, False], "got chosen without pair_id: pass both"),
    ([1, 1], [True, False, True, False], r"dpo: pair_id has shape \(2,\), expected one value per sequence, \(4,\)"),
]


def test_rows_that_are_no_pairs() -> None:
    for ids, is_chosen, message in NO_PAIRS:
        given = {
            "pair_id": None if ids is None else torch.tensor(ids),
            "chosen": None if is_chosen is None else torch.tensor(is_chosen),
        }
        with pytest.raises(ValueError, match=message):
            dpo(**rows([1.5, -0.5, -0.25, 0.75]), **given)
    with pytest.raises(ValueError, match="got 3 rows: row 2 has no partner"):
        dpo(**rows([1.5, -0.5, -0.25]))
    with pytest.raises(TypeError, match=r"chosen must be boolean, got torch\.int64"):
        dpo(**rows([1.5, -0.5]), pair_id=torch.tensor([1, 1]), chosen=torch.tensor([1, 0]))
