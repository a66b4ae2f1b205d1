"""The critic: values of prefixes, and their clipped loss."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from by_hand import tensor
from closeness import assert_near
from policy_batches import LENGTHS, PROMPT, batch, gradients
from torchrl_llm_kl.losses import LossOutput, ValueInputs, ValueLoss, value_error
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import TokenCritic
from torchrl_llm_kl.transforms import RetrieveValue
from toy_models import tiny_model, with_lora

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
NAN = float("nan")


def make_critic(family: str = "qwen2", **kwargs: int) -> TokenCritic:
    critic = TokenCritic(tiny_model(family, seed=2), **kwargs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.init.normal_(critic.head.weight)
        nn.init.constant_(critic.head.bias, 0.3)
    return critic


def ragged(*rows: list[int] | range) -> Ragged:
    return Ragged.from_list([torch.tensor([*row]) for row in rows])


def value_of(critic: TokenCritic, ids: Tensor) -> Tensor:
    """The values before each token except the first, from one plain forward."""
    hidden = critic.body(input_ids=ids.unsqueeze(0)).last_hidden_state[0, :-1]
    return (hidden @ critic.head.weight.T + critic.head.bias).squeeze(-1)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gemma2"])  # OPT-350m projects its hidden states
def test_values_are_those_of_prefixes(family: str) -> None:
    """The value of a token does not depend on the token."""
    critic = make_critic(family, tokens_per_batch=12)  # several forwards
    tokens = ragged(range(1, 8), [5, 6], [9], range(3, 12), [1, 2, 3, 90])
    values = critic(tokens).to_list()
    for row, got in zip(tokens.to_list(), values, strict=True):
        assert got[0] == 0
        if len(row) > 1:
            assert_close(got[1:], value_of(critic, row), **CLOSE)
    assert_close(values[0][:4], values[4], **CLOSE)
    changed = critic(ragged([1, 2, 80, 4])).values
    assert_close(changed[:3], values[0][:3], **CLOSE)
    assert abs(changed[3] - values[0][3]) > 1e-3


def test_a_critic_with_adapters_trains_them() -> None:
    critic = TokenCritic(with_lora(tiny_model(seed=2)))
    nn.init.normal_(critic.head.weight)
    values = critic(ragged(range(1, 8))).values
    assert_close(values[1:], value_of(critic, torch.arange(1, 8)), **CLOSE)
    values.sum().backward()
    trained = {name for name, p in critic.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lora_A" in name for name in trained)
    assert all("lora" in name or name.startswith("head") for name in trained)
    plain = TokenCritic(tiny_model(seed=2))
    plain.head.load_state_dict(critic.head.state_dict())
    assert (plain(ragged(range(1, 8))).values - values).abs().max() > 1e-3


def test_an_untrained_critic_returns_0_and_refuses_invalid_tokens() -> None:
    critic = TokenCritic(tiny_model())
    assert (critic(ragged(range(5))).values == 0).all()
    with pytest.raises(ValueError, match="pass hidden_size="):
        TokenCritic(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"token id 97 at sequence 1, position 2 is outside the vocabulary"):
        critic(ragged([1, 2], [1, 2, 97]))
    with pytest.raises(ValueError, match=r"sequence 0 has 65 tokens, the model allows 64"):
        critic(ragged([1] * 65))
    for kind, name in ((ValueLoss, "critic"), (TokenCritic, "model")):
        with pytest.raises(TypeError, match=rf"{name} must be a model, got 'q': load it first"):
            kind("q")  # type: ignore[arg-type]


def test_values_are_read_without_dropout() -> None:
    critic = make_critic("gpt2")
    for module in critic.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    expected = RetrieveValue(critic.eval())(batch())["next", "state_value"]
    critic.train()
    critic.body.h[0].eval()
    modes = [module.training for module in critic.modules()]
    assert_close(RetrieveValue(critic)(batch())["next", "state_value"], expected)
    assert [module.training for module in critic.modules()] == modes


@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
def test_retrieve_value_and_value_loss(layout: str) -> None:
    critic, data = make_critic(), batch(layout=layout)
    RetrieveValue(critic)(data)
    values = [step["next", "state_value"] for step in data.unbind(0)]
    assert not any(row.requires_grad for row in values)
    expected, targets, rows = [], [], []
    for ids, length, row in zip(batch()["tokens", "full"], LENGTHS, values, strict=True):
        now = value_of(critic, ids[:length])[PROMPT - 1 :]
        assert_close(row[PROMPT:length], now.detach(), **CLOSE)
        assert (row[:PROMPT] == 0).all()
        expected.append(now)
        targets.append(now.detach() + torch.linspace(-1, 1, len(now)))
        rows.append(nn.functional.pad(targets[-1], (PROMPT, len(row) - length)))
    if layout == "lazy":
        for step, row in zip(data.tensordicts, rows, strict=True):
            step["value_target"] = row
    else:
        data["value_target"] = torch.stack(rows) if layout == "padded" else torch.nested.as_nested_tensor(rows)
    out = ValueLoss(critic, clip_value=0.2)(data)
    error = (torch.cat(expected) - torch.cat(targets)).square().mean() / 2
    assert_close(out["loss_critic"], error, **CLOSE)  # nothing has moved: nothing is clipped
    assert_near(gradients(out["loss_critic"], critic), gradients(error, critic), terms=64, size=8)
    assert out["value_clip_fraction"] == 0


def test_clipped_error_by_hand() -> None:
    value = torch.tensor([[1.0, 1.0, 0.1, -1.0, 5.0]], requires_grad=True)
    old, target = torch.tensor([[0.5, 0.5, 0.0, 0.0, NAN]]), torch.tensor([[2.0, 0.0, 1.0, 1.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    (term,) = value_error(ValueInputs(value, mask, target, old), clip_value=0.25)
    # Moved towards its target beyond the bound: (0.75 - 2)^2 / 2 without gradient. Away from it, inside: free.
    assert_close(term.value, torch.tensor([[0.78125, 0.5, 0.405, 2.0, 0.0]]))
    (gradient,) = torch.autograd.grad(term.value.sum(), value)
    assert_close(gradient, torch.tensor([[0.0, 1.0, -0.9, -2.0, 0.0]]))
    assert term.metrics["value_clip_fraction"] == 0.25
    assert_close(term.metrics["value_mean"].item(), (1 + 1 + 0.1 - 1) / 4)
    (free,) = value_error(ValueInputs(value, mask, target))
    assert_close(free.value, torch.tensor([[0.5, 0.5, 0.405, 2.0, 0.0]]))
    (half,) = value_error(ValueInputs(torch.full((1, 1), 500.0).half(), mask[:, :1], torch.zeros(1, 1).half()))
    assert half.value.item() == 125_000  # no overflow


def test_explained_variance_by_hand() -> None:
    for value, target, expected in (
        ([1.0, 3.0], [1.0, 2.0], 0.0),  # errors 0 and -1: variance 1/4; targets: 1/4
        ([1.5, 3.0], [1.0, 3.0], 1 - 0.0625 / 1),
        ([1.0, 2.0], [4.0, 5.0], 1.0),  # off by a constant
        ([2.0, 2.0], [5.0, 5.0], 1.0),  # nothing to explain, and nothing left
    ):
        mask = torch.tensor([[True, True, False]])
        (term,) = value_error(ValueInputs(tensor([[*value, 9.0]]), mask, tensor([[*target, 0.0]])))
        assert_close(term.metrics["explained_variance"].item(), expected)


def test_keys_buffers_and_errors() -> None:
    loss, data = ValueLoss(make_critic(), clip_value=0.3, coeff=0.5), batch()
    assert loss.in_keys == [("tokens", "full"), ("tokens", "prompt"), "value_target"]
    with pytest.raises(KeyError, match="ValueLoss needs value_target"):
        loss(data)
    data["returns"], data["next", "state_value"] = torch.ones(6, 9), torch.linspace(-1, 1, 54).reshape(6, 9)
    loss.set_keys(value_target="returns")
    assert loss.in_keys[-1] == "returns"
    out = loss(data)
    assert set(out.keys()) == set(loss.out_keys)
    assert out["value_clip_fraction"] > 0
    assert type(out) is LossOutput
    assert out.total_loss == out.mean(reduce=True) == out["loss_critic"]
    data["next", "returns"], data["state_value"] = data.pop("returns"), data.pop(("next", "state_value"))
    assert_close(loss(data)["loss_critic"], out["loss_critic"])
    buffer, loss.coeff = loss.coeff, 1.0
    assert loss.coeff is buffer
    assert_close(loss(data)["loss_critic"], 2 * out["loss_critic"])
    loss.clip_value = None
    free = ValueLoss(loss.critic_network, clip_value=None)(data.set("value_target", torch.ones(6, 9)))
    assert_close(loss(data)["loss_critic"], free["loss_critic"])
    loss.clip_value = 0.1
    assert copy.deepcopy(loss).to(torch.bfloat16).clip_value == torch.tensor(0.1)
    with pytest.raises(ValueError, match="clip_value must be at least 0, got -2"):
        loss.clip_value = -2.0
    with pytest.raises(ValueError, match="clip_value must be at least 0, got -1"):
        ValueLoss(make_critic(), clip_value=-1.0)
