"""The properties of the simulated accelerator on which tests rely, and a step of GRPO on an accelerator."""

import pytest
import torch
from torch import nn

from parity import CPU, gradients, same_on_both
from policy_batches import batch
from simulated import memory_limit, watch
from torchrl_llm_kl import PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import KLToReference, aggregate
from torchrl_llm_kl.training._models import device_of_setting
from toy_models import tiny_model

pytestmark = pytest.mark.smoke


def test_tensors_of_two_devices_do_not_mix(device):
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number may be of the CPU
    assert x[torch.tensor([0, 2])].tolist() == [1.0] * 2  # and indices
    if torch.accelerator.device_count() > 1:
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, device=torch.device(device.type, 1))


def test_a_module_keeps_its_parameters_when_it_moves(device):
    module = nn.Linear(2, 2)
    weight = module.weight
    assert module.to(device).weight is weight
    weight.data = torch.zeros(2, 2)
    assert weight.device.type == "cpu"


def test_copies_and_waits_are_reported(sim):
    x = torch.arange(4.0, device=sim)
    mask = x > 1
    for do, kind in [
        (lambda: x.tolist(), "sync"),
        (lambda: bool(mask.any()), "sync"),
        (lambda: x[mask], "sync"),
        (lambda: x.index_put_((mask,), x[:2]), "sync"),
        (lambda: torch.ones(2).to(sim, non_blocking=True), "h2d"),
        (lambda: torch.ones(2).pin_memory().to(sim, non_blocking=True), "h2d_async"),
        (lambda: torch.accelerator.synchronize(), "sync"),
    ]:
        with watch() as record:
            do()
        assert {k: n for k, n in record.kinds.items() if k != "kernel"} == {kind: 1}
    with watch() as record:
        x[mask] = 0.0
        torch.where(mask, x, 1.0)
    assert "sync" not in record.kinds
    with watch() as record:
        aggregate(x[None], mask[None], "token-mean")
    assert any(place.startswith("losses/") for _, _, place in record.places), "a place is the line of the package"


def test_memory_has_a_peak_and_a_limit(device):
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1 << 20, device=device)
    assert torch.accelerator.memory_allocated() - before == 4 << 20
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4 << 20
    if device.type == "sim":
        with memory_limit(1 << 20), pytest.raises(torch.OutOfMemoryError, match="4194304 bytes"):
            torch.empty(1 << 20, device=device)


@same_on_both()
def test_a_step_of_grpo(model_at, at):
    model = tiny_model().double().to(model_at)
    second = torch.device(model_at.type, torch.accelerator.device_count() - 1) if model_at != CPU else CPU
    reference = tiny_model(seed=1).double().to(second)
    data = RetrieveKL(model, reference, coeff=0.1)(batch().exclude("next").to(at))
    out = PolicyLoss(model, terms=[KLToReference(0.1)])(data)
    return data, out, gradients(out.total_loss, model)


def test_a_difference_between_devices_fails(device):
    """A difference of a value or a gradient, one that depends on the place of the data, and a missing result."""

    def run(model_at, at, fault):
        there = model_at != CPU
        factor = {"value": there, "data": model_at != at}.get(fault, False) * 1e-3 + 1.0
        layer = nn.Linear(2, 1).double()
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        value = layer.to(model_at)(torch.ones(3, 2, dtype=torch.float64, device=at).to(model_at)).sum()
        slopes = gradients(value * (1.001 if fault == "gradient" and there else 1.0), layer)
        return {"value": value.detach() * factor, **({} if fault == "lost" and there else slopes)}

    test = same_on_both()(run)
    test(device, fault="none")
    messages = {"value": r"\.value, .* on (sim|cuda)", "gradient": "0.weight", "data": "on cpu", "lost": "other keys"}
    for fault, message in messages.items():
        with pytest.raises(AssertionError, match=message):
            test(device, fault=fault)


def test_the_package_names_no_accelerator_that_is_absent(sim):
    assert device_of_setting(None).type == "sim"
    with pytest.raises(Exception, match=r"cuda.* is not a device of this process .* which has cpu, sim:0, sim:1"):
        device_of_setting("cuda:1")
