"""Images on an accelerator: the same scores and gradients as on the CPU, from ids that are there already."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from image_models import IMAGE, image_model, num_placeholders, picture
from torchrl_llm_kl import LogProbScorer, Ragged

pytestmark = pytest.mark.filterwarnings("ignore:Image tokens attend")


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm"])
def test_scores_with_images(device, family, monkeypatch):
    for kind in (nn.Conv2d, nn.Conv3d):  # the simulated accelerator has no convolution
        own = kind._conv_forward

        def on_host(self, x, weight, bias, own=own):
            return own(self, x.cpu(), weight.cpu(), None if bias is None else bias.cpu()).to(x.device)

        monkeypatch.setattr(kind, "_conv_forward", on_host)
    model, images = image_model(family), [picture(family, 1), picture(family, 1), None, picture(family, 2)]
    count = num_placeholders(model, images[0])[0]
    rows = [[1, 7, *[IMAGE] * (count if image else 0), 8, *[20, 21] * 9, 30 + i] for i, image in enumerate(images)]
    weight = next(p for name, p in model.named_parameters() if "patch_embed" in name)

    def run(where):
        model.to(where)
        tokens = Ragged.from_list([torch.tensor(row, device=where) for row in rows])
        found = LogProbScorer(model).score(tokens, images=images, grad=True).values
        assert found.device.type == torch.device(where).type
        (gradient,) = torch.autograd.grad(found.sum(), [weight])
        return found.detach().cpu(), gradient.cpu()

    expected, found = run("cpu"), run(device)
    assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3 * float(expected[1].abs().max()))
