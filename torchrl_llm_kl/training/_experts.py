"""Answers of experts from a file, which are trained beside the policy's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm_kl.datasets import from_completions, from_conversations, read_rows
from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.training._ranks import padded_rows
from torchrl_llm_kl.training._samplers import keyed_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Names of the columns of a prompt and of its answer, the first that a file has.
_PROMPTS, _ANSWERS = ("prompt", "question"), ("completion", "answer", "response")


class ExpertRows:
    """Rows of experts for each step of a run, in a new random order in each pass over the file.

    Args:
        path: a file with ``messages``, or with a prompt (``prompt`` or ``question``) and an answer (``completion``,
            ``answer`` or ``response``), which become a conversation.
        tokenizer: the policy's tokenizer.

    Keyword Args:
        count: the number of rows in a step.
        seed: the seed of the order.
        system_prompt: the first message of conversations that have none.

    Raises:
        DataError: if no row can be used.

    Example:
        >>> experts = ExpertRows("solutions.jsonl", tokenizer, count=4, seed=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        count: int,
        seed: int = 0,
        system_prompt: str | None = None,
    ) -> None:
        self.count, self.seed = count, seed
        first = next(iter(read_rows(path))).value
        columns = list(first) if isinstance(first, Mapping) else ["messages"]
        if "messages" in columns:
            data = from_conversations(path, tokenizer, system_prompt=system_prompt)
        else:
            prompt, answer = (
                next((name for name in names if name in columns), names[0]) for names in (_PROMPTS, _ANSWERS)
            )
            data = from_completions(
                path, tokenizer, prompt_key=prompt, completion_key=answer, as_chat=True, system_prompt=system_prompt
            )
        self.rows = data.unbind(0)

    def of_step(self, step: int) -> list[TensorDictBase]:
        """The rows of a step. They depend only on its number."""
        places = range(step * self.count, (step + 1) * self.count)
        return [self.rows[self._order(place // len(self.rows))[place % len(self.rows)]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        return torch.randperm(len(self.rows), generator=keyed_generator(self.seed, epoch)).tolist()

    def beside(self, own: TensorDictBase, step: int) -> TensorDictBase:
        """Append the experts' rows of a step to the policy's own.

        Args:
            own: the entries that losses read, dense, ``[B]``.
            step: the number of finished steps.

        Returns:
            ``[B + count]`` rows. ``"expert_mask"`` is True for the experts, whose other entries are 0.
        """
        rows = self.of_step(step)
        device = own["tokens", "full"].device
        width = own["tokens", "prompt"].shape[-1]
        firsts, lengths = ([len(row["tokens", part]) for row in rows] for part in ("prompt", "full"))
        prompt = max(width, *firsts)
        answer = max(own["tokens", "full"].shape[-1] - width, *(n - p for n, p in zip(lengths, firsts, strict=True)))

        def placed(key: NestedKey) -> Tensor:
            """An entry of the experts' rows in the padded width of all rows."""
            sides = [(prompt - p, prompt + answer - (prompt - p) - n) for n, p in zip(lengths, firsts, strict=True)]
            return torch.stack([pad(row[key], side) for row, side in zip(rows, sides, strict=True)]).to(device)

        keys = (("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"))
        written = {key: placed(key) for key in keys}
        # All prompts of a batch end in one column.
        written["tokens", "prompt"] = written["tokens", "full"][:, :prompt]
        own = padded_rows(own.set(("masks", "all_assistant_mask"), _trained(own)), prompt, answer)
        out = TensorDict(batch_size=[len(own) + len(rows)])
        for key in own.keys(True, True):
            theirs = written.get(key, own[key].new_zeros(len(rows), *own[key].shape[1:]))
            out.set(key, torch.cat([own[key], theirs.to(own[key].dtype)]))
        number = torch.arange(len(out), device=device)
        out.set("expert_mask", number >= len(own))
        if has_entry(own, "loss_mask"):  # its zeros would leave the experts out
            out["loss_mask"][len(own) :] = True
        return out


def _trained(own: TensorDictBase) -> Tensor:
    """The mask of the policy's own tokens in its answers."""
    key: NestedKey = ("masks", "all_assistant_mask")
    if has_entry(own, key):
        return own[key]
    mask = own["masks", "all_attention_mask"].clone()
    mask[:, : own["tokens", "prompt"].shape[-1]] = False
    return mask
