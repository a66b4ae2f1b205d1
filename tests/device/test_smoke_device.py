"""A step of GRPO on an accelerator, and its reference on another: what each other test of this folder looks at in detail."""

from __future__ import annotations

import pytest
import torch

from parity import CPU, gradients, same_on_both
from policy_batches import batch
from torchrl_llm_kl import PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import KLToReference
from toy_models import tiny_model

pytestmark = pytest.mark.smoke


@same_on_both()
def test_a_step_of_grpo(model_at, at):
    model = tiny_model().double().to(model_at)
    second = torch.device(model_at.type, torch.accelerator.device_count() - 1) if model_at != CPU else CPU
    reference = tiny_model(seed=1).double().to(second)
    data = RetrieveKL(model, reference, coeff=0.1)(batch().exclude("next").to(at))
    out = PolicyLoss(model, terms=[KLToReference(0.1)])(data)
    return data, out, gradients(out.total_loss, model)


def test_the_package_names_no_accelerator_that_is_absent(sim):
    from torchrl_llm_kl.training._models import check_device

    assert check_device(None).type == "sim"
    with pytest.raises(Exception, match=r"cuda.* is not a device of this process .* which has cpu, sim:0, sim:1"):
        check_device("cuda:1")
