"""What a teacher thinks of each token that the student sampled."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["on_policy_distill"]


@advantage("on_policy_distill", "token", source="Agarwal et al. 2023 (GKD, arXiv 2306.13649); Thinking Machines 2025")
def on_policy_distill(old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, kl_coef: float = 1.0) -> Tensor:
    r"""``kl_coef * (teacher_log_prob - old_log_prob)``.

    Its policy gradient is minus that of :math:`KL(\pi \| \pi_{teacher})` at each position, prefixes taken as given. A
    token's effect on the KL of later positions is left out.

    Args:
        old_log_prob: nats, of the student, which sampled the tokens; ``[*B, T]``.
        teacher_log_prob: the same tokens under the teacher; same shape. Trinity: ``teacher_logprobs``.
        mask: response tokens; bool, same shape.

    Keyword Args:
        kl_coef: factor.

    Returns:
        ``[*B, T]``, without graph, 0 where the mask is False.

    Raises:
        ValueError: if the shapes differ or an input is missing.
        TypeError: if the mask is not boolean.

    Example:
        >>> import torch
        >>> student, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
        >>> on_policy_distill(student, teacher, torch.tensor([[True, True]]))
        tensor([[-0.5000,  1.5000]])

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 3, with the reverse KL; Thinking Machines, "On-policy
    distillation" (2025).
    """
    return kl_coef * (teacher_log_prob - old_log_prob)
