"""Rollouts with the entries of torchrl's losses, and the same numbers from one plain forward per sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.envs import Transform

from torchrl_llm_kl import KLComputation, RetrieveKL, RetrieveLogProb
from toy_rollouts import collect, flat, make_policy, make_scoring_wrapper, steps

REWARD_COEFF = 0.3
RESPONSE_LENGTHS = [3, 6, 1, 2]


def rollouts(
    tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, *, padded: bool, combined: bool = True
) -> TensorDictBase:
    """Four rollouts ``[4]``, prompts and responses all of different lengths, scored in the env.

    ``combined``: by ``RetrieveKL``, else by two ``RetrieveLogProb`` and a ``KLComputation``.
    """
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    policy.generate_kwargs["eos_token_id"] = [tokenizer.eos_token_id, *range(0, 256, 5)]  # some stop early
    gen = make_scoring_wrapper(policy_model, tokenizer, pad_output=padded, log_probs_key="log_probs")
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs")
    transforms: list[Transform] = [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation(coeff=REWARD_COEFF)]
    if combined:
        transforms = [RetrieveKL(gen, ref, coeff=REWARD_COEFF)]
    data = flat(collect(tokenizer, policy, *transforms, envs=4))
    assert [len(s.ids) - s.start for s in sequences(data)] == RESPONSE_LENGTHS
    return mark_responses(data)


def mark_responses(data: TensorDictBase) -> TensorDictBase:
    """Write the assistant mask, which torchrl's rollouts leave empty: what follows the prompt and is no padding."""
    for step in data.unbind(0):
        mask = step["masks", "all_attention_mask"].clone()
        mask[: len(step["tokens", "prompt"])] = False
        step["masks", "all_assistant_mask"] = mask
    return data


class Tokens(NamedTuple):
    """One sequence without padding; its response begins at ``start``."""

    ids: Tensor
    start: int


def sequences(data: TensorDictBase) -> list[Tokens]:
    """What was sampled, by the bookkeeping of the rollout alone."""
    out = []
    for step in steps(data):
        attended = step["masks", "all_attention_mask"]
        prompt = attended[: len(step["tokens", "prompt"])]
        out.append(Tokens(step["tokens", "full"][attended], int(prompt.sum())))
    return out


def responses(model: nn.Module, tokens: Sequence[Tokens]) -> list[Tensor]:
    """Log-probs of each response's tokens under the plain model, with their graph."""
    out = []
    for ids, start in tokens:
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        out.append(torch.stack([log_probs[t - 1, ids[t]] for t in range(start, len(ids))]))
    return out


def k3_values(sampled: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Schulman's k3, ``ratio - 1 - log ratio``, of tokens sampled from ``sampled``; one tensor for each sequence."""
    return [(o - s).exp() - 1 - (o - s) for s, o in zip(sampled, other, strict=True)]


def slot_count(data: TensorDictBase, *, common_width: bool) -> int:
    """Positions that torchrl averages over: prompts and padding too."""
    widths = [len(step["tokens", "full"]) for step in steps(data)]
    return len(widths) * max(widths) if common_width else sum(widths)


def trainable(model: nn.Module, *, noise: float = 0.0) -> nn.Module:
    """A copy to train, with weights that have moved by ``noise`` since it sampled."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def close(found: Tensor, want: Tensor | float) -> None:
    """Equal up to the rounding of float32 forwards that are batched differently."""
    assert_close(found.detach(), torch.as_tensor(want).detach(), rtol=1e-4, atol=2e-5)


def close_gradients(loss: Tensor, want: Tensor, model: nn.Module) -> None:
    """Backpropagate ``loss``: every parameter has the gradient of ``want``, which is finite and not zero."""
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(want, list(parameters.values()))
    model.zero_grad()
    loss.backward()
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
        size = gradient.abs().max().item()
        assert size > 0, f"{name} has no part in the loss: the oracle tests nothing there"
        assert_close(parameter.grad, gradient, rtol=0, atol=1e-3 * size, msg=lambda m, name=name: f"{name}: {m}")


CORRUPTIONS = ["ref shifted", "ref zero", "gen and ref swapped", "mask shifted"]


def corrupt(data: TensorDictBase, how: str) -> TensorDictBase:
    """Make the mistake that a check has to notice."""
    for step in data.unbind(0):
        gen, ref = step["next", "log_probs", "full"], step["next", "ref_log_probs", "full"]
        mask = step["masks", "all_assistant_mask"]
        if how == "ref shifted":
            step["next", "ref_log_probs", "full"] = ref.roll(-1)
        elif how == "ref zero":
            step["next", "ref_log_probs", "full"] = torch.zeros_like(ref)
        elif how == "gen and ref swapped":
            step["next", "log_probs", "full"], step["next", "ref_log_probs", "full"] = ref, gen
        elif how == "mask shifted":
            step["masks", "all_assistant_mask"] = mask.roll(-1)
        else:
            raise ValueError(how)
    return data
