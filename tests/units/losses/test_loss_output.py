"""The output of a loss: ``total_loss``, and reductions that cannot mix metrics with losses."""

import contextlib
import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from closeness import assert_near
from policy_batches import batch, gradients
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, LossOutput, PolicyLoss

# Reductions of a TensorDict over all of its entries, found by their `reduce` argument.
REDUCTIONS = ["amax", "amin", "max", "mean", "min", "nanmean", "nansum", "prod", "quantile", "std", "sum", "var"]


def make_loss(model: nn.Module, **settings: Any) -> PolicyLoss:
    return PolicyLoss(model, terms=[KLToReference(0.2), EntropyBonus(0.05)], **settings)


def by_name(out: Any) -> torch.Tensor:
    return out["loss_objective"] + out["loss_kl_to_ref"] + out["loss_entropy"]


def test_mean_with_reduce_trains_only_on_the_losses(model: nn.Module) -> None:
    loss = make_loss(model)
    out = loss(batch())
    assert out["num_tokens"] == 20  # far larger than any loss
    expected = gradients(by_name(loss(batch())), loss)
    for name in REDUCTIONS:
        if name in ("mean", "sum", "nanmean", "nansum"):
            found = getattr(out, name)(reduce=True)
            assert_close(found, by_name(out))
            assert_near(gradients(found, loss, keep=True), expected, terms=64, msg=name)
        else:
            with pytest.raises(TypeError, match=rf"^{name}\(reduce=True\) would mix .* use out.total_loss"):
                getattr(out, name)(*([0.5] if name == "quantile" else []), reduce=True)


def test_every_reduction_of_a_tensordict_is_listed() -> None:
    found = {*REDUCTIONS}
    for name in dir(TensorDict):
        with contextlib.suppress(TypeError, ValueError):  # what has no signature
            if not name.startswith("_") and "reduce" in inspect.signature(getattr(TensorDict, name)).parameters:
                found.add(name)
    assert sorted(found - {"cummax", "cummin"}) == REDUCTIONS


def test_total_loss_under_all_spellings(model: nn.Module) -> None:
    loss, data = make_loss(model), batch()
    out = loss(data)
    assert isinstance(out, TensorDict)
    for total in (out.total_loss, out["total_loss"], out.get("total_loss")):
        assert torch.equal(total, by_name(out))
    assert "total_loss" not in set(out.keys())  # so that loops over losses and metrics do not meet it
    by_prefix = sum(value for key, value in out.items() if key.startswith("loss_"))  # torchrl's trainers
    assert_close(by_prefix, out.total_loss)
    assert out.total_loss.requires_grad
    assert not out.detach().total_loss.requires_grad
    assert set(out.keys()) >= set(loss.out_keys)
    assert "chi2_token" in out  # of the sampler's log-probs, which not all data have
    loss.set_keys(advantage="A")
    assert_close(loss(data.rename_key_("advantage", "A")).total_loss, out.total_loss)
    doubled = tree_map(lambda x: 2 * x, out)
    assert type(doubled) is LossOutput
    assert_close(doubled.total_loss, 2 * out.total_loss)
    plain = TensorDict(dict(out.items()))
    for name in ("mean", "sum", "std"):  # reductions of each entry
        found, expected = getattr(out.double(), name)(), getattr(plain.double(), name)()
        assert_close(dict(found.items()), dict(expected.items()), equal_nan=True)
    assert_close(out.select("loss_entropy", "ESS").sum(reduce=True), out["loss_entropy"])


def test_total_loss_of_changed_and_stacked_outputs() -> None:
    out = LossOutput(loss_a=torch.tensor(2.0), ESS=torch.tensor(0.5), kl_loss_x=torch.tensor(9.0))
    assert out.total_loss == 2
    out["loss_mine"] = torch.tensor(-0.75)
    assert out.total_loss == out.mean(reduce=True) == out.sum(reduce=True) == 1.25
    a, b = (LossOutput(loss_a=torch.tensor(x), ESS=torch.tensor(100.0)) for x in (2.0, 5.0))
    for both in (torch.stack([a, b]), torch.stack([a, b]).clone().to(torch.float64).detach()):
        assert both.total_loss.tolist() == [2, 5]
        assert (both.mean(reduce=True), both.sum(reduce=True)) == (3.5, 7)
        assert both.sum(dim=0, reduce=True) == 7
        assert both.mean(dim=0)["ESS"] == 100  # metrics are averaged one by one


def test_a_loss_per_token_has_no_total(model: nn.Module) -> None:
    out, nested = (make_loss(model, aggregation="none")(batch(layout=layout)) for layout in ("padded", "nested"))
    for total in (lambda: out.total_loss, lambda: out["total_loss"], lambda: nested.mean(reduce=True)):
        with pytest.raises(ValueError, match=r"loss_objective has one value per token, also for padding"):
            total()
