"""The model of a replica: weights that change, and requests that fail."""

from __future__ import annotations

import pytest
import torch
from remote_models import model
from tensordict import TensorDict
from torch import nn

from torchrl_llm_kl.service import WeightVersionError
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._engine import TransformersEngine
from torchrl_llm_kl.service._wire import Reply, Request, Settings, state_dict_of


class Wrapper(nn.Module):
    input_mode = "tokens"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


def test_weights_in_every_form() -> None:
    inner = model(seed=3)
    expected = inner.state_dict()
    wrapper = Wrapper(inner)
    core = ScoringCore(TransformersEngine(model()))
    for version, weights in enumerate(
        [inner, wrapper, TensorDict.from_module(wrapper), wrapper.state_dict(), expected], start=1
    ):
        core.update_weights({name: torch.zeros_like(value) for name, value in expected.items()}, version)
        core.update_weights(state_dict_of(weights), version)
        found = core.engine.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(TypeError, match="weights must be a module, a TensorDict or a mapping"):
        state_dict_of([1])


def test_weights_that_do_not_fit_change_nothing() -> None:
    core = ScoringCore(TransformersEngine(model()))
    before = {name: value.clone() for name, value in core.engine.model.state_dict().items()}
    good = {name: value + 1 for name, value in before.items()}
    name = "lm_head.weight"
    bad = {
        "holds values that are not finite": good[name].clone().fill_(torch.inf),
        "the model has shape": torch.zeros(2),
        "weights must be tensors, got list": [1.0],
    }
    for message, value in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            core.update_weights({**good, name: value}, 1)
    with pytest.raises(KeyError, match="no weight 'nowhere'"):
        core.update_weights({**good, "nowhere": torch.zeros(1)}, 1)
    assert core.version == 0
    core.update_weights(before, 3)
    with pytest.raises(WeightVersionError, match="version 2 of the weights was pushed after version 3"):
        core.update_weights(good, 2)
    assert core.version == 3
    assert all(torch.equal(core.engine.model.state_dict()[key], value) for key, value in before.items())


def test_nan_scores_fail_only_their_request() -> None:
    made = model()
    with torch.no_grad():
        made.model.embed_tokens.weight[13] = torch.nan
    core = ScoringCore(TransformersEngine(made))

    def request(*tokens: int) -> Request:
        return Request.of(torch.tensor(tokens), torch.tensor([len(tokens)]), None, Settings(), version=None, caller="")

    good, bad, other = core.score([request(1, 2, 3), request(1, 13, 3), request(4, 5)])
    assert isinstance(good, Reply)
    assert isinstance(other, Reply)
    assert isinstance(bad, ValueError)
    assert "log-prob is nan at sequence 0, position 1 (token 13)" in str(bad)
