"""Advantages of trajectories of several sequences, such as the turns of an agent: one number per step.

The functions share their inputs, positional in the order of each signature. Rows may be in any order.

Args:
    reward: reward of each step, ``[B]``. An outcome is on the last step, and 0 on all others.
    group: integers ``[B]``, equal for trajectories that attempt the same task.
    run: integers ``[B]``, equal for the steps of one trajectory. They may restart in each group.
    step: position in the trajectory, integers ``[B]``. Only their order matters.
    state: integers ``[B]``, equal for steps that begin in the same environment state. Compared only within a group.

Returns:
    ``[B]``, float32 or wider, without graph.

Raises:
    ValueError: if an input is not ``[B]``, shapes differ, a trajectory has two rows of the same step, or a
        hyper-parameter is out of range.
    TypeError: if an input is missing, ``group``, ``run``, ``step`` or ``state`` is not of an integer dtype, or for an unknown
        hyper-parameter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import Amount, Fraction
from torchrl_llm_kl.advantages._group import Groups, grpo, joined, normalised
from torchrl_llm_kl.advantages._registry import advantage
from torchrl_llm_kl.advantages._token import estimate


@advantage("step_wise_grpo", "trajectory")
def step_wise_grpo(
    reward: Tensor,
    group: Tensor,
    run: Tensor,
    step: Tensor,
    *,
    epsilon: Amount = 1e-6,
    std: Literal["group", "batch"] = "group",
    std_threshold: Amount | None = None,
    enable_step_norm: bool = False,
) -> Tensor:
    r"""The GRPO advantage of a trajectory's last reward within its group, on each of its steps.

    Rewards of earlier steps are ignored.

    Hyper-parameters:
        epsilon: added to ``sigma``.
        std: ``sigma`` of the last rewards of the ``"group"`` or the ``"batch"``. Trinity: ``std_cal_level``.
        std_threshold: groups whose standard deviation is at most this get 0, as in :func:`~torchrl_llm_kl.advantages.grpo`.
        enable_step_norm: divide by the number of steps, so that every trajectory has the same weight.

    Returns:
        ``[B]``. Exactly 0 for a task with one trajectory, and for a task whose last rewards are equal.

    Example:
        >>> reward = torch.tensor([0.0, 0.0, 2.0, 4.0])
        >>> run, step = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
        >>> step_wise_grpo(reward, torch.zeros_like(run), run, step, enable_step_norm=True)
        tensor([-0.2357, -0.2357, -0.2357,  0.7071])

    Source: Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826), multi-step GRPO; after rLLM.
    """
    runs = Trajectories(group, run, step)
    last = runs.last
    result = runs.broadcast(grpo(reward[last], group[last], epsilon=epsilon, std=std, std_threshold=std_threshold))
    return result / runs.rows.size if enable_step_norm else result


@advantage("gigpo", "trajectory", only_with={"epsilon": ("fnorm", ("std",))})
def gigpo(
    reward: Tensor,
    group: Tensor,
    run: Tensor,
    step: Tensor,
    state: Tensor,
    *,
    omega: float = 1.0,
    gamma: Fraction = 1.0,
    fnorm: Literal["none", "std"] = "none",
    epsilon: Amount = 1e-6,
) -> Tensor:
    r"""``A_E + omega * A_S``: the trajectory compared within its task, and the step compared with steps from the same state.

    ``A_E`` compares the summed rewards of trajectories. ``A_S`` compares the discounted returns from a step on, among all steps
    of the task's trajectories that began in the same state.

    Hyper-parameters:
        omega: weight of ``A_S``.
        gamma: discount per step of the returns in ``A_S``. The paper uses 0.95.
        fnorm: ``"std"`` divides both by the standard deviation of their group plus ``epsilon``. ``"none"`` does not.
        epsilon: only for ``fnorm="std"``.

    Returns:
        ``[B]``. ``A_S`` is 0 for a state with a single step, ``A_E`` for a task with a single trajectory.

    Example:
        >>> run, step, state = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([5, 6, 5, 7])
        >>> gigpo(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros_like(run), run, step, state, gamma=0.8, omega=0.5)
        tensor([ 0.7000,  0.5000, -0.7000, -0.5000])

    Source: Feng et al. 2025 (GiGPO, arXiv 2505.10978), section 4.
    """
    runs = Trajectories(group, run, step)

    def relative(x: Tensor, among: Tensor) -> Tensor:
        groups = Groups(among)
        centred = groups.centred(x)
        return centred if fnorm == "none" else normalised(centred, groups.std(x), epsilon)

    episode = runs.broadcast(relative(runs.rows.sum(reward)[runs.last], group[runs.last]))
    return episode + omega * relative(runs.discounted(reward, gamma), joined(group, state))


class Trajectories:
    """Rows in any order, each one step of a trajectory.

    Attributes:
        rows: :class:`Groups` of the rows of each trajectory.
        place: index of each row in its trajectory, ``[B]``.
        last: True at the last step of each of the ``R`` trajectories, bool ``[B]``.
    """

    def __init__(self, group: Tensor, run: Tensor, step: Tensor) -> None:
        self.rows = Groups(joined(group, run))
        self.place = self.rows.rank(step)  # equal steps have equal places
        if len(joined(self.rows.ids, self.place).unique()) != len(step):
            raise ValueError("Two rows are the same step of a trajectory. Pass each step once.")
        self.last = self.place == self.rows.size - 1

    def broadcast(self, per_run: Tensor) -> Tensor:
        """Repeat one number per trajectory, ``[R]`` in the order of ``last``, on each of its steps, ``[B]``."""
        at_id = torch.empty_like(per_run).index_put((self.rows.ids[self.last],), per_run)
        return at_id[self.rows.ids]

    def discounted(self, reward: Tensor, gamma: float) -> Tensor:
        """The discounted sum of the rewards from each step on, ``[B]``."""
        where = (self.rows.ids, self.place)
        shape = (len(self.rows.sizes), int(self.rows.sizes.max()) if len(reward) else 0)
        table = reward.new_zeros(shape).index_put(where, reward)
        present = torch.zeros(shape, dtype=torch.bool, device=reward.device)
        present = present.index_put(where, torch.ones_like(self.last))
        return estimate(table, torch.zeros_like(table), present, gamma, 1.0)[0][where]
