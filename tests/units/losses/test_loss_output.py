"""The output of a loss: ``total_loss``, and reductions that cannot mix metrics with losses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from closeness import assert_near
from policy_batches import batch, gradients
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, LossOutput, PolicyLoss, ValueLoss
from toy_models import tiny_model

# Reductions of a TensorDict over all of its entries, found by their `reduce` argument.
REDUCTIONS = ["amax", "amin", "max", "mean", "min", "nanmean", "nansum", "prod", "quantile", "std", "sum", "var"]
ARGS = {"quantile": (0.5,)}


def make_loss(**settings: Any) -> PolicyLoss:
    return PolicyLoss(tiny_model(seed=0), terms=[KLToReference(0.2), EntropyBonus(0.05)], **settings)


def by_name(out: TensorDictBase) -> torch.Tensor:
    return out["loss_objective"] + out["loss_kl_to_ref"] + out["loss_entropy"]


def test_the_line_of_torchrls_recipes_has_the_gradient_of_the_losses() -> None:
    loss, data = make_loss(), batch()
    out = loss(data)
    assert out["num_tokens"] == 20  # far larger than any loss
    expected = gradients(by_name(loss(data)), loss)
    for name in REDUCTIONS:
        if name in ("mean", "sum", "nanmean", "nansum"):
            found = getattr(out, name)(reduce=True)
            assert_close(found, by_name(out))
            assert_near(gradients(found, loss, keep=True), expected, terms=64, msg=name)
        else:
            with pytest.raises(TypeError, match=rf"^{name}\(reduce=True\) of a loss would mix .* use out.total_loss"):
                getattr(out, name)(*ARGS.get(name, ()), reduce=True)


def test_every_reduction_of_a_tensordict_is_listed() -> None:
    found = []
    for name in dir(TensorDict):
        if not name.startswith("_") and callable(getattr(TensorDict, name)):
            try:
                parameters = inspect.signature(getattr(TensorDict, name)).parameters
            except (TypeError, ValueError):
                continue
            if "reduce" in parameters:
                found.append(name)
    assert sorted({*found, *REDUCTIONS} - {"cummax", "cummin"}) == REDUCTIONS


def test_total_loss_under_both_spellings() -> None:
    out = make_loss()(batch())
    assert isinstance(out, TensorDict)
    assert torch.equal(out.total_loss, by_name(out))
    assert torch.equal(out["total_loss"], by_name(out))
    assert "total_loss" not in set(out.keys())  # so that loops over losses and metrics do not meet it
    assert out.total_loss.requires_grad
    assert not out.detach().total_loss.requires_grad


def test_total_loss_follows_a_term_that_is_added() -> None:
    out = LossOutput(loss_a=torch.tensor(2.0), ESS=torch.tensor(0.5), kl_loss_x=torch.tensor(9.0))
    assert out.total_loss == 2
    out["loss_mine"] = torch.tensor(-0.75)
    assert out.total_loss == out.mean(reduce=True) == out.sum(reduce=True) == 1.25


def test_outputs_of_micro_batches_can_be_stacked() -> None:
    a, b = (LossOutput(loss_a=torch.tensor(x), ESS=torch.tensor(100.0)) for x in (2.0, 5.0))
    for both in (torch.stack([a, b]), torch.stack([a, b]).clone().to(torch.float64).detach()):
        assert both.total_loss.tolist() == [2, 5]
        assert (both.mean(reduce=True), both.sum(reduce=True)) == (3.5, 7)
        assert both.sum(dim=0, reduce=True) == 7
        assert both.mean(dim=0)["ESS"] == 100  # metrics are averaged one by one


def test_reductions_of_each_entry_are_those_of_a_tensordict() -> None:
    out = make_loss()(batch())
    plain = TensorDict(dict(out.items()))
    for name in ("mean", "sum", "std"):
        found, expected = getattr(out.double(), name)(), getattr(plain.double(), name)()
        assert_close(dict(found.items()), dict(expected.items()), equal_nan=True)


def test_a_loss_per_token_has_no_total() -> None:
    out = make_loss(aggregation="none")(batch())
    for total in (lambda: out.total_loss, lambda: out["total_loss"], lambda: out.mean(reduce=True)):
        with pytest.raises(ValueError, match=r"loss_objective has one value per token \(aggregation 'none'\)"):
            total()
    nested = make_loss(aggregation="none")(batch(layout="nested"))
    with pytest.raises(ValueError, match="loss_objective has one value per token"):
        _ = nested.total_loss


def test_metrics_alone_have_no_total() -> None:
    out = make_loss()(batch())
    with pytest.raises(KeyError, match="is a loss: expected loss_<term>"):
        out.select("ESS", "entropy").mean(reduce=True)
    assert_close(out.select("loss_entropy", "ESS").sum(reduce=True), out["loss_entropy"])


def test_the_critic_too() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor(0.5))

        def forward(self, tokens: Any, mask: Any) -> Any:
            return tokens.like(torch.where(mask, self.bias, 0.0))

    data = batch()
    data["value_target"] = torch.full((6, 9), 2.0)
    loss = ValueLoss(Constant())
    out = loss(data)
    assert_close(out.mean(reduce=True), torch.tensor(1.125))  # (0.5 - 2)^2 / 2
    out.mean(reduce=True).backward()
    assert_close(loss.critic_network.bias.grad, torch.tensor(-1.5))


def test_it_is_a_tensordict_for_torchrl() -> None:
    loss, data = make_loss(), batch()
    out = loss(data)
    by_prefix = sum(value for key, value in out.items() if key.startswith("loss_"))  # torchrl's trainers
    assert_close(by_prefix, out.total_loss)
    assert_close(out.get("total_loss"), out["total_loss"])
    assert set(out.keys()) >= set(loss.out_keys)
    assert "chi2_token" in out  # of the sampler's log-probs, which not all data have
    loss.set_keys(advantage="A")
    assert_close(loss(data.rename_key_("advantage", "A")).total_loss, out.total_loss)
    doubled = tree_map(lambda x: 2 * x, out)
    assert type(doubled) is LossOutput
    assert_close(doubled.total_loss, 2 * out.total_loss)
