"""Groups of answers with a reward that a tiny policy can earn, and the loss of a batch from plain forwards."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchrl.envs import EnvBase, Transform

from closeness import assert_near
from toy_models import FORWARD
from toy_rollouts import Rewarded, make_env, steps

GROUP = 4
ROWS = 2 * GROUP


def of_response(step: TensorDictBase, values: Tensor) -> Tensor:
    """The values at the sampled tokens, without padding."""
    start = len(step["tokens", "prompt"])
    return values[start:][step["masks", "all_attention_mask"][start:]]


def response(step: TensorDictBase) -> Tensor:
    """The sampled tokens."""
    return of_response(step, step["tokens", "full"])


def even_share(step: TensorDictBase) -> Tensor:
    """The share of the sampled tokens whose id is even."""
    return (response(step) % 2 == 0).float().mean()


def _even_shares(batch: TensorDictBase) -> Tensor:
    return torch.stack([even_share(step) for step in steps(batch)])


def group_env(tokenizer: Any, *transforms: Transform, rows: int = ROWS, group: int = GROUP, **options: Any) -> EnvBase:
    """A chat env that poses each query ``group`` times in a row, ``rows`` at a step, and rewards even tokens."""
    return make_env(tokenizer, *transforms, envs=rows, group=group, reward=Rewarded(_even_shares), **options)


def scored(model: nn.Module, batch: TensorDictBase) -> list[Tensor]:
    """Log-probs of the sampled tokens of each row, with graph, from a plain forward padded on the right."""
    rows = [step["tokens", "full"][step["masks", "all_attention_mask"]] for step in steps(batch)]
    logits = model(input_ids=pad_sequence(rows, True)).logits.log_softmax(-1)
    all_ = [x[: len(ids) - 1].gather(-1, ids[1:, None])[:, 0] for x, ids in zip(logits, rows, strict=True)]
    return [values[-len(response(step)) :] for values, step in zip(all_, steps(batch), strict=True)]


def without_graph(model: nn.Module, batch: TensorDictBase) -> list[Tensor]:
    """:func:`scored` without a graph."""
    with torch.no_grad():
        return scored(model, batch)


def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards centred and scaled in each group, by hand."""
    found = []
    for start in range(0, len(rewards), GROUP):
        own = rewards[start : start + GROUP]
        found += [(x - statistics.mean(own)) / (statistics.stdev(own) + 1e-6) for x in own]
    return found


def plain_loss(
    model: nn.Module, batch: Any, old: Any, ref: Any, *, kl_coeff: float, clip: tuple[float, float] = (0.2, 0.2)
) -> Tensor:
    """Means over the sampled tokens of PPO's dual-clipped surrogate plus ``kl_coeff`` times k2 to the reference."""
    objective, kl = [], []
    for step, new_row, old_row, ref_row in zip(steps(batch), scored(model, batch), old, ref, strict=True):
        advantage = float(step["advantage"].flatten()[0])
        for now, was, base in zip(new_row, old_row, ref_row, strict=True):
            ratio = (now - was).exp()
            value = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip[0], 1 + clip[1]))
            objective.append(torch.min(value, torch.tensor(-3.0 * advantage)) if advantage < 0 else value)
            kl.append((now - base) ** 2 / 2)
    return torch.stack(objective).mean() + kl_coeff * torch.stack(kl).mean()


def assert_ratios(out: TensorDictBase, ratio: float = 1.0) -> None:
    """Every token of a loss has this ratio, up to the rounding of a forward."""
    assert_near((out["ratio_min"], out["ratio_max"]), (torch.tensor(ratio), torch.tensor(ratio)), **FORWARD)
