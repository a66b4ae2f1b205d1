"""GRPO for trajectories of several steps that are rewarded at the end."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.advantages._grpo import grpo
from torchrl_llm_kl.advantages._registry import advantage
from torchrl_llm_kl.advantages._trajectories import Trajectories

__all__ = ["step_wise_grpo"]


@advantage(
    "step_wise_grpo",
    "trajectory",
    aliases={"std_cal_level": "std"},
    source="Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826), multi-step GRPO; after rLLM",
)
def step_wise_grpo(
    reward: Tensor,
    group: Tensor,
    run: Tensor,
    step: Tensor,
    *,
    epsilon: float = 1e-6,
    std: str = "group",
    std_threshold: float | None = None,
    enable_step_norm: bool = False,
) -> Tensor:
    r"""The GRPO advantage of a trajectory's last reward among those of its group, given to each of its steps.

    Args:
        reward: of each step; ``[B]``. Only that of the last step of each trajectory is read.
        group: which trajectories try the same task; integers ``[B]``.
        run: which trajectory a step is of; integers ``[B]``, that may start again in each group.
        step: where in the trajectory; integers ``[B]``.

    Keyword Args:
        epsilon: added to ``sigma``.
        std: ``sigma`` of the ``"group"`` or the ``"batch"``, of last rewards. Trinity: ``std_cal_level``.
        std_threshold: groups with a standard deviation of this or less get 0; see :func:`~torchrl_llm_kl.advantages.grpo`.
        enable_step_norm: divide by the number of steps of the trajectory, so that long ones do not weigh more.

    Returns:
        ``[B]``, without graph; exactly 0 for a task with one trajectory, and where all last rewards are equal.

    Raises:
        ValueError: if shapes differ, a trajectory has two rows of the same step, or a hyper-parameter is out of range.

    Example:
        >>> import torch
        >>> reward = torch.tensor([0.0, 0.0, 2.0, 4.0])
        >>> run, step = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
        >>> step_wise_grpo(reward, torch.zeros_like(run), run, step, enable_step_norm=True)
        tensor([-0.2357, -0.2357, -0.2357,  0.7071])

    Source: Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826), multi-step GRPO; after rLLM.
    """
    runs = Trajectories(group, run, step)
    last = grpo(runs.at_last(reward), runs.group, epsilon=epsilon, std=std, std_threshold=std_threshold)
    result = runs.broadcast(last)
    return result / runs.rows.size if enable_step_norm else result
