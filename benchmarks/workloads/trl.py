"""Scoring and training compared with a plain forward and with TRL's GRPOTrainer, also with its head at scored positions."""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.agreement import largest_difference, tolerance_of
from benchmarks.data import Batch, grouped, independent, one_prompt
from benchmarks.measure import Contender, Measured
from benchmarks.models import ModelSize, checkpoint_layers, qwen2, tokenizer
from benchmarks.products import counts_of, products_of
from benchmarks.results import Outcome, Targets
from benchmarks.workloads.base import OURS, PRODUCTS, Settings, Workload
from benchmarks.workloads.loss import check_gradients, mib_of
from torchrl_llm_kl import LogProbScorer, PolicyLoss

SHIPPED, COMPACT, PLAIN = "TRL, as shipped", "TRL", "plain forward"
CLIP = 0.2

Step = Callable[[], Tensor]
Make = Callable[[Settings, int], Batch]


def score(make: Make, full: ModelSize, settings: Settings) -> Outcome:
    """All compute the log-probs of the responses, without gradient."""
    size = settings.size(full)
    batch, model = make(settings, size.vocab), qwen2(size, device=settings.device, dtype=settings.dtype)
    trainer, inputs = make_trainer(copy.deepcopy(model)), trl_inputs(batch, settings)
    scorer, (sequences, response) = LogProbScorer(model), batch.ragged(settings.device)
    mask = inputs["completion_mask"].bool()

    def theirs() -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, real, mask.shape[1])
        return found[mask]

    steps: dict[str, Step] = {
        COMPACT: partial(compacted, theirs),
        SHIPPED: theirs,
        PLAIN: lambda: plain_log_probs(model, inputs),
        OURS: lambda: scorer.score(sequences, response).values[response],
    }
    found = {name: step() for name, step in steps.items()}
    difference = max(_same(found[OURS], found[name], settings) for name in steps if name != OURS)
    runs = {**steps, PRODUCTS: products_of(model, batch)}
    took = _alternate(settings, {name: Contender(lambda _, run=run: run()) for name, run in runs.items()})
    return Outcome(
        f"{len(batch.prompts)} sequences, {batch.tokens:,} tokens ({batch.source}); {size}",
        took.pop(COMPACT),
        took.pop(OURS),
        difference,
        products=took.pop(PRODUCTS),
        others=took,
        counts=counts_of(model, batch),
    )


def train(make: Make, full: ModelSize, checkpoint: bool, settings: Settings) -> Outcome:
    """All compute GRPO's clipped objective and the gradients of all parameters."""
    size = settings.size(full)
    batch = make(settings, size.vocab)
    model = qwen2(size, device=settings.device, dtype=settings.dtype).train()
    inputs = trl_inputs(batch, settings)
    trainer = make_trainer(copy.deepcopy(model))
    if checkpoint:
        for each in (model, trainer.model):
            checkpoint_layers(each)
    loss = PolicyLoss(model, "ppo", clip_low=CLIP, clip_high=CLIP, clip_ratio_c=None)
    data = _rollouts(batch, inputs, settings.device)

    def theirs() -> Tensor:
        return backward_of(trainer._compute_loss(trainer.model, inputs))

    models = {COMPACT: trainer.model, SHIPPED: trainer.model, PLAIN: model, OURS: model}
    steps: dict[str, Step] = {
        COMPACT: partial(compacted, theirs),
        SHIPPED: theirs,
        PLAIN: lambda: backward_of(clipped_loss(plain_log_probs(model, inputs), inputs)),
        OURS: lambda: backward_of(loss(data.copy()).total_loss),
    }
    values, gradients = {}, {}
    for name, step in steps.items():
        models[name].zero_grad(set_to_none=True)
        values[name] = step()
        gradients[name] = {key: value.grad.clone() for key, value in models[name].named_parameters()}
        models[name].zero_grad(set_to_none=True)
    others = [name for name in steps if name != OURS]
    difference = max(_same(values[OURS], values[name], settings) for name in others)
    of_gradients = max(check_gradients(gradients[OURS], gradients[name], settings.dtype) for name in others)
    products = products_of(model, batch, train=True, forwards=2 if checkpoint else 1)
    contenders = {
        name: Contender(lambda _, step=step: step(), prepare=partial(models[name].zero_grad, set_to_none=True))
        for name, step in steps.items()
    }
    contenders[PRODUCTS] = Contender(lambda _: products())
    took = _alternate(settings, contenders)
    return Outcome(
        f"{len(batch.prompts)} sequences, {batch.tokens:,} tokens ({batch.source}); {size}",
        took.pop(COMPACT),
        took.pop(OURS),
        difference,
        notes=(
            f"gradients differ by {of_gradients:.1e} of the largest",
            f"{mib_of(model):.0f} MiB of each peak are gradients",
        ),
        products=took.pop(PRODUCTS),
        others=took,
    )


def _alternate(settings: Settings, contenders: dict[str, Contender]) -> dict[str, Measured]:
    """TRL as shipped runs once, since it takes longer than all others together, and no target depends on it."""
    shipped = contenders.pop(SHIPPED)
    return settings.alternate({SHIPPED: shipped}, repeats=1) | settings.alternate(contenders)


# ------------------------------------------------------------------ TRL


def make_trainer(model: Any) -> Any:
    """TRL's own trainer, for its two methods; it trains nothing by itself here."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not next(model.parameters()).is_cuda,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=1024,
        beta=0.0,
        epsilon=CLIP,
        loss_type="bnpo",
        report_to=[],
        disable_tqdm=True,
    )
    made = tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = Dataset.from_list([{"prompt": "a"}] * 4)
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=rows, processing_class=made
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def compacted(work: Step) -> Tensor:
    """``work()`` with TRL's head at scored positions only: on a CPU it scores all positions, elsewhere only these."""
    from trl.trainer import utils

    def compact(device: Any) -> bool:
        return sys._getframe(1).f_code.co_name == "_fused_forward" or original(device)

    original = utils._use_triton
    utils._use_triton = compact
    try:
        return work()
    finally:
        utils._use_triton = original


def trl_inputs(batch: Batch, settings: Settings) -> dict[str, Tensor]:
    """The batch as TRL pads it: prompts on the left, responses on the right; with log-probs of a sampler."""
    data, device = batch.padded(settings.device), settings.device
    width = data["tokens", "prompt"].shape[1]
    ids, real = data["tokens", "full"], data["masks", "all_attention_mask"].long()
    generator = torch.Generator().manual_seed(0)
    return {
        "prompt_ids": ids[:, :width],
        "prompt_mask": real[:, :width],
        "completion_ids": ids[:, width:],
        "completion_mask": real[:, width:],
        "advantages": torch.randn(len(ids), generator=generator).to(device),
        "old_per_token_logps": (-10.3 + 0.5 * torch.randn(real[:, width:].shape, generator=generator)).to(device),
    }


# ------------------------------------------------------------------ the same work, plainly and here


def plain_log_probs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """One padded forward, and the log-softmax of the scored positions: what a short script does."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    mask = inputs["completion_mask"].bool()
    with contextlib.nullcontext() if model.training else torch.no_grad():
        hidden = model.model(ids, attention_mask=real, position_ids=positions, use_cache=False).last_hidden_state
        hidden = hidden[:, -mask.shape[1] - 1 : -1][mask]
        log_probs = model.lm_head(hidden).float().log_softmax(-1)
        return log_probs.gather(-1, inputs["completion_ids"][mask].unsqueeze(-1)).squeeze(-1)


def clipped_loss(log_prob: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["completion_mask"].bool()
    advantage = inputs["advantages"].unsqueeze(-1).expand(mask.shape)[mask]
    ratio = (log_prob - inputs["old_per_token_logps"][mask]).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def _rollouts(batch: Batch, inputs: dict[str, Tensor], device: torch.device) -> TensorDict:
    data = batch.padded(device)
    old = torch.zeros_like(data["tokens", "full"], dtype=torch.float32)
    old[:, -inputs["old_per_token_logps"].shape[1] :] = inputs["old_per_token_logps"]
    data["next", "log_probs"] = {"full": torch.where(batch.padded_response().to(device), old, 0)}
    data["advantage"] = inputs["advantages"]
    return data


def backward_of(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach().reshape(1)


def _same(found: Tensor, expected: Tensor, settings: Settings) -> float:
    return largest_difference(found, expected, tolerance=tolerance_of(settings.dtype), what="log-probs or loss")


# ------------------------------------------------------------------ the comparisons


def _groups(settings: Settings, vocab: int) -> Batch:
    return grouped(2, 2, vocab) if settings.quick else grouped(4, 8, vocab)


def _long_prompt(settings: Settings, vocab: int) -> Batch:
    return one_prompt(2, 20, 8, vocab) if settings.quick else one_prompt(8, 1500, 64, vocab)


def _unrelated(settings: Settings, vocab: int) -> Batch:
    return independent(3, vocab, shortest=10, longest=30) if settings.quick else independent(12, vocab)


def _workloads() -> Iterator[Workload]:
    size = ModelSize(vocab=32_000, hidden=512, layers=4)
    kinds = [
        ("groups", "4 prompts x 8 answers", _groups, (4, 5, 3)),
        ("prompt", "8 answers of 64 tokens to a prompt of 1,500", _long_prompt, (6, 7, 5)),
        ("apart", "12 unrelated sequences of 100..800", _unrelated, (2.2, 2.2, 1.8)),
    ]
    for name, what, make, (scoring, step, checkpointed) in kinds:
        yield Workload(
            f"trl-score-{name}",
            f"Log-probs, {what}",
            partial(score, make, size),
            Targets(faster=scoring, share=0.9),
            peer=COMPACT,
        )
        for checkpoint, target in ((False, step), (True, checkpointed)):
            title = f"GRPO's loss, forward and backward{', checkpointed layers' if checkpoint else ''}, {what}"
            run = partial(train, make, size, checkpoint)
            name_of = f"trl-{'checkpoint' if checkpoint else 'step'}-{name}"
            yield Workload(name_of, title, run, Targets(faster=target, share=0.85), peer=COMPACT)


WORKLOADS = tuple(_workloads())
