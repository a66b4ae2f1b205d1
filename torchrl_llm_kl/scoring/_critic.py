"""A critic: a language model's body with a scalar head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name, send
from torchrl_llm_kl._typing import asked, call_of
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._model import (
    head_weight,
    placeholders,
    position_limit,
    text_config,
    vocab_size,
)
from torchrl_llm_kl.scoring._plans import plan_micro_batches
from torchrl_llm_kl.scoring._request import ScoreRequest, not_text
from torchrl_llm_kl.scoring._wrapping import is_sharded, most_of_ranks


class TokenCritic(nn.Module):
    r"""Predicts the value of each token's prefix: the expected return from that token on, before it is drawn.

    Args:
        model: a transformers model, with or without PEFT adapters. Its body is used in place, not copied. Do not share a
            body with the policy, since both losses would train it.

    Keyword Args:
        hidden_size: width of the body's output. By default it is read from the model's head or its configuration.
        tokens_per_batch: maximum number of tokens in one forward, including padding.

    Attributes:
        body: the model without its head.
        head: a linear map to one number, initialised to 0.

    Example:
        >>> from transformers import Qwen2Config, Qwen2Model
        >>> body = Qwen2Model(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> critic = TokenCritic(body)
        >>> critic(Ragged.from_list([torch.tensor([1, 2, 3])])).to_list()
        [tensor([0., 0., 0.], grad_fn=<SplitWithSizesBackward0>)]
    """

    def __init__(self, model: nn.Module, *, hidden_size: int | None = None, tokens_per_batch: int = 8192) -> None:
        check_not_a_name(model=model)
        super().__init__()
        model = _without_peft(model)
        hidden_size = _width(model) if hidden_size is None else hidden_size
        self.body = asked(model, "base_model", nn.Module, model)
        parameter = next(self.body.parameters(), torch.zeros(0))
        self.head = nn.Linear(hidden_size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.tokens_per_batch = tokens_per_batch

    def forward(self, tokens: Ragged, mask: Tensor | None = None) -> Ragged:
        """Values of the tokens' prefixes.

        Args:
            tokens: ids; ``values [N]``.
            mask: the tokens to evaluate, bool ``[N]``. By default all except the first of each sequence, which has no prefix.

        Returns:
            ``tokens.like(values)``: float32 ``[N]``, in the unit of the reward; 0 where the mask is False.

        Raises:
            ValueError: if a token id is outside the vocabulary or a sequence is too long for the model; the message
                names the sequence.
        """
        after_first = tokens.positions > 0
        mask = after_first if mask is None else mask.to(after_first.device) & after_first
        out = torch.zeros(tokens.values.shape[0], device=self.head.weight.device)
        if tokens.num_sequences:
            request = ScoreRequest.of(tokens, mask)
            request.check_ids(vocab_size(self.body))
            if not_text(request.tokens, placeholders(self.body)):
                raise ValueError("The tokens contain image placeholders, but a TokenCritic evaluates only text.")
            request.check_lengths(position_limit(self.body))
            packs = list(plan_micro_batches(request.forward_lengths, self.tokens_per_batch))
            if is_sharded(self):  # layers gather weights from all ranks: each rank forwards equally often
                packs += packs[:1] * (most_of_ranks(len(packs)) - len(packs))
            for rows in packs:
                ids, real, slots, elements = (send(part, out.device) for part in request.padded(rows)[:4])
                hidden = self.body(input_ids=ids, attention_mask=real).last_hidden_state
                # The hidden state at position t - 1 represents the prefix of token t.
                out = out.index_copy(0, elements, self.head(hidden.flatten(0, 1)[slots]).squeeze(-1).float())
        return tokens.like(out.to(tokens.values.device))


def _without_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model. Its layers keep their adapters."""
    inner = call_of(model, "get_base_model")
    if not isinstance(inner, nn.Module):
        return model
    if asked(asked(model, "active_peft_config", object), "is_prompt_learning", bool):
        raise ValueError(f"{type(model).__name__} learns a prompt, which its body lacks: train LoRA adapters.")
    return inner


def _width(model: nn.Module) -> int:
    """The input width of the head. It can differ from ``hidden_size``: OPT-350m's body projects its output."""
    weight = head_weight(model)
    if weight is not None and weight.ndim == 2:
        return weight.shape[1]
    for name in ("word_embed_proj_dim", "hidden_size"):
        width = asked(text_config(model), name, int)
        if width is not None:
            return width
    raise ValueError(f"{type(model).__name__} has no head and no config.hidden_size: pass hidden_size=.")
