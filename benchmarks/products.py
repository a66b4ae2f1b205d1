"""The least work of a score or a step: the matrix products and the attention of the distinct tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import Batch
from benchmarks.results import Counts
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.scoring._tree import PrefixTree

PACK = 1024  # tokens of one product of the body, as in a pack on a CPU
TILE = 2**22  # numbers of one product of the head


def products_of(model: Any, batch: Batch, *, train: bool = False, forwards: int = 1) -> Callable[[], None]:
    """A function that computes the products of a batch, on random numbers.

    Each distinct token takes the products of all linear layers of the body, and attends to its prefix. Each token of an answer
    takes a product of the head. With ``train`` each product also has its two gradients. ``forwards`` repeats the forward of the
    body, as checkpoints do.
    """
    sequences, response = batch.ragged()
    request = ScoreRequest.of(sequences, response)  # the last token of a sequence predicts nothing
    tree = PrefixTree.build(request.tokens, request.forward_lengths)
    config, body = model.config, model.get_decoder()
    layers = [module.weight.detach() for module in body.modules() if isinstance(module, nn.Linear)]
    head, scored = model.get_output_embeddings().weight.detach(), int(response.sum())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A recurrent layer has no attention. The work on its state is left out.
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    attentions = sum("linear" not in kind for kind in kinds)
    segments = list(zip(tree.start.tolist(), tree.length.tolist(), strict=True))
    distinct = sum(length for _, length in segments)
    like = head.new_empty(0)

    def product(rows: int, weight: Tensor, times: int = 1) -> None:
        inputs = like.new_ones(rows, weight.shape[1])
        for _ in range(times):
            out = F.linear(inputs, weight)
        if train:
            out @ weight
            out.T @ inputs

    def attend(start: int, length: int) -> None:
        shape = (1, config.num_attention_heads, length, width)
        query = like.new_ones(shape).requires_grad_(train)
        key, value = (like.new_ones(*shape[:2], start + length, width).requires_grad_(train) for _ in "kv")
        mask = None if start == 0 else torch.ones(length, start + length, dtype=torch.bool).tril(start)
        for _ in range(forwards):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=start == 0)
        if train:
            torch.autograd.grad(out.sum(), (query, key, value))

    def run() -> None:
        with torch.set_grad_enabled(train):
            for start in range(0, distinct, PACK):
                for weight in layers:
                    product(min(PACK, distinct - start), weight, forwards)
            for start, length in segments:
                for _ in range(attentions):
                    attend(start, length)
            rows = max(128, TILE // head.shape[0])  # fewer would only wait for the weight
            for start in range(0, scored, rows):
                # The backward computes the logits again instead of storing them.
                product(min(rows, scored - start), head, 2 if train else 1)

    return run


def counts_of(model: Any, batch: Batch) -> dict[str, Counts]:
    """The work of padded rows, of the packing of TRL's asynchronous trainer, and of this library, counted from the batch.

    TRL's packing needs a kernel for CUDA, so only its plan is made here, of the whole batch in one pack.
    """
    from trl.experimental.async_grpo.packing import TreeRow

    sequences, response = batch.ragged()
    row, rows, masks = TreeRow(), sequences.to_list(), sequences.like(response).to_list()
    for ids, mask in zip(rows, masks, strict=True):
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": mask.float(), "advantage": 0.0}
        row.add({**sample, "group_id": 0})
    labelled = int((row.pack()["shift_labels"] != -100).sum())
    request = ScoreRequest.of(sequences, response)
    tree = PrefixTree.build(request.tokens, request.forward_lengths)
    pairs = (tree.length * tree.start + tree.length * (tree.length + 1) // 2).sum()
    width, scored = sum(max(map(len, each)) for each in (batch.prompts, batch.responses)), int(response.sum())
    every = {
        "padded rows": (len(rows) * width, len(rows) * width**2, scored),
        "TRL's packing": (len(row.tokens), row.load, labelled),
        "here": (tree.num_tokens, int(pairs), scored),
    }
    config, head = model.config, model.get_output_embeddings().weight.numel()
    body = sum(module.weight.numel() for module in model.get_decoder().modules() if isinstance(module, nn.Linear))
    each_pair = 2 * config.num_hidden_layers * config.hidden_size
    return {name: Counts(*each, each[0] * body + each[1] * each_pair + each[2] * head) for name, each in every.items()}
