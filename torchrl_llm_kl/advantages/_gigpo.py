"""Groups within groups: trajectories of a task, and steps from the same state."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.advantages._groups import Groups, join, normalised
from torchrl_llm_kl.advantages._registry import advantage
from torchrl_llm_kl.advantages._trajectories import Trajectories

__all__ = ["gigpo"]


@advantage(
    "gigpo",
    "trajectory",
    obsolete={
        "step_reward_key": "rewards are given, not looked up; a transform reads keys={'reward': ...}",
        "env_state_hash_key": "states are given, not looked up; a transform reads keys={'state': ...}",
    },
    source="Feng et al. 2025 (GiGPO, arXiv 2505.10978), section 4",
)
def gigpo(
    reward: Tensor,
    group: Tensor,
    run: Tensor,
    step: Tensor,
    state: Tensor,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    fnorm: str = "none",
    epsilon: float = 1e-6,
) -> Tensor:
    r"""``A_E + omega * A_S``: the trajectory among those of its task, and the step among steps from the same state.

    ``A_E`` compares the sums of rewards of whole trajectories. ``A_S`` compares discounted returns from a step on with those
    of all steps, of any trajectory of the same task, that began in the same state.

    Args:
        reward: immediate reward of each step; ``[B]``. For an outcome, 0 on all steps but the last.
        group: which trajectories try the same task; integers ``[B]``.
        run: which trajectory a step is of; integers ``[B]``, that may start again in each group.
        step: where in the trajectory; integers ``[B]``.
        state: which environment state the step began in; integers ``[B]``. States are compared within a group only.

    Keyword Args:
        omega: weight of ``A_S``.
        gamma: discount per step of the returns in ``A_S``. The paper uses 0.95.
        fnorm: divide both by the standard deviation of their group plus ``epsilon`` (``"std"``), or not (``"none"``).
        epsilon: only for ``fnorm="std"``.

    Returns:
        ``[B]``, without graph. ``A_S`` is 0 for a state that only one step began in, ``A_E`` for a task with one trajectory.

    Raises:
        ValueError: if shapes differ, a trajectory has two rows of the same step, or a hyper-parameter is out of range.

    Example:
        >>> import torch
        >>> run, step, state = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([5, 6, 5, 7])
        >>> gigpo(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros_like(run), run, step, state, gamma=0.8, omega=0.5)
        tensor([ 0.7000,  0.5000, -0.7000, -0.5000])

    Source: Feng et al. 2025 (GiGPO, arXiv 2505.10978), section 4.
    """
    check_choice(("none", "std"), fnorm=fnorm)
    check_range(0.0, 1.0, gamma=gamma)
    check_range(0.0, epsilon=epsilon)
    runs = Trajectories(group, run, step)

    def relative(x: Tensor, among: Tensor) -> Tensor:
        groups = Groups(among)
        centred = groups.centred(x)
        return centred if fnorm == "none" else normalised(centred, groups.std(x), epsilon)

    episode = runs.broadcast(relative(runs.at_last(runs.rows.sum(reward)), runs.group))
    return episode + omega * relative(runs.discounted(reward, gamma), join(group, state))
