"""Response masks from token bookkeeping alone: no text, no template."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mask_from_prompt_lengths"]


def mask_from_prompt_lengths(prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """Mask of the response tokens of sequences laid end to end.

    Nothing is read off the token ids: a sampled end token stays in the mask even when it is also the padding token.

    Args:
        prompt_lengths: number of prompt tokens of each sequence, integer ``[S]``.
        lengths: number of tokens (prompt and response) of each sequence, integer ``[S]``.

    Returns:
        Bool ``[N]`` with ``N = lengths.sum()``, on the device of ``lengths``: True from the first response token on.
        The first token of a sequence is never True, not even with an empty prompt: it has no prefix and no log-prob.

    Raises:
        ValueError: if the shapes differ or are not one-dimensional, or a sequence is shorter than its prompt.
        TypeError: if either tensor is not of an integer type.

    Example:
        >>> mask_from_prompt_lengths(torch.tensor([2, 0]), torch.tensor([4, 3])).tolist()
        [False, False, True, True, False, True, True]
    """
    if prompt_lengths.ndim != 1 or prompt_lengths.shape != lengths.shape:
        raise ValueError(
            f"prompt_lengths has shape {tuple(prompt_lengths.shape)} and lengths {tuple(lengths.shape)}; expected two "
            "tensors of one shape [S], one entry per sequence. Flatten batch dimensions first."
        )
    for name, value in (("prompt_lengths", prompt_lengths), ("lengths", lengths)):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {value.dtype}; expected an integer dtype. Pass {name}.long().")
    prompt_lengths = prompt_lengths.to(lengths.device)
    wrong = (prompt_lengths < 0) | (prompt_lengths > lengths)
    if wrong.any():
        sequence = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"sequence {sequence} has prompt length {int(prompt_lengths[sequence])} and length {int(lengths[sequence])}"
            "; expected 0 <= prompt length <= length. `lengths` counts prompt and response together."
        )
    starts = lengths.cumsum(0) - lengths
    first_response = starts + prompt_lengths.clamp(min=1)
    position = torch.arange(int(lengths.sum()), device=lengths.device)
    return position >= first_response.repeat_interleave(lengths)
