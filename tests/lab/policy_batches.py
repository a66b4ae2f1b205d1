"""Batches for PolicyLoss on a tiny model, and the expected outputs, from one plain forward per sequence."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from layouts import tokens
from toy_models import VOCAB_SIZE

PROMPT = 4
LENGTHS = (9, 7, 5, 9, 6, 8)  # prompt and response
NEXT = ("log_probs", "ref_log_probs", "sampler_log_probs")


def batch(seed: int = 0, *, layout: str = "padded") -> TensorDictBase:
    """Six sequences, pairs share a prompt, with log-probs as RetrieveKL writes them. ``layout``: padded, nested, or lazy."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(VOCAB_SIZE, (6, 9), generator=rng)
    full[1::2, :PROMPT] = full[::2, :PROMPT]
    numbers = {f"next__{key}__full": -torch.rand(6, 9, generator=rng) * 6 - 0.05 for key in NEXT}
    numbers["masks__all_assistant_mask"] = (torch.arange(9) >= PROMPT).expand(6, 9)
    entries: dict[Any, Any] = {key: [row[:n] for row, n in zip(x, LENGTHS, strict=True)] for key, x in numbers.items()}
    entries["advantage"] = torch.tensor([1.5, -0.7, 0.4, -2.0, 0.9, -0.3]).unsqueeze(-1)
    answers = [row[PROMPT:n] for row, n in zip(full.tolist(), LENGTHS, strict=True)]
    return tokens(layout, full[:, :PROMPT].tolist(), answers, **entries)


def responses(model: nn.Module, data: TensorDictBase, temperature: float = 1.0) -> list[dict[str, Tensor]]:
    """For each sequence's response the log-probs of the model with graph, entropies, and the entries of the data."""
    out = []
    for i, length in enumerate(LENGTHS):
        ids = data["tokens", "full"][i][:length]
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, PROMPT - 1 : -1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        all_log_probs = (wide / temperature).log_softmax(-1)
        log_prob = all_log_probs.gather(-1, ids[PROMPT:].unsqueeze(-1)).squeeze(-1)
        entry = {key: data["next", key, "full"][i][PROMPT:length] for key in NEXT if key in set(data["next"].keys())}
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        advantage = data["advantage"][i].expand_as(log_prob)
        out.append({"log_prob": log_prob, "entropy": entropy, "all": all_log_probs, "advantage": advantage, **entry})
    return out


def token_mean(model: Any, data: Any, value: Callable[[dict[str, Tensor]], Tensor], **kwargs: Any) -> Tensor:
    """The mean of a per-token formula over all response tokens."""
    return torch.cat([value(row) for row in responses(model, data, **kwargs)]).mean()


def gradients(loss: Tensor, model: nn.Module, *, keep: bool = False) -> dict[str, Tensor]:
    """The gradients of all parameters. ``keep`` keeps the graph for other parts of the loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=keep, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def total(out: TensorDictBase) -> Tensor:
    return sum(out[key] for key in set(out.keys()) if key.startswith("loss_"))


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor], *, rtol: float = 1e-3, atol: float = 2e-5) -> None:
    """Check that gradients from differently batched forwards agree, and are not all 0."""
    assert any(bool((x != 0).any()) for x in want.values())
    for name in want:
        assert_close(found[name], want[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_loss(found: Tensor, want: Tensor, model: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Check value and gradients of a part of a loss. The graphs stay for other parts."""
    assert_close(found, want, rtol=rtol, atol=atol)
    grads = (gradients(x, model, keep=True) for x in (found, want))
    assert_same(*grads, rtol=rtol, atol=atol)
