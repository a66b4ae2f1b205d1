"""Collects complete groups of episodes from the batches of a collector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count

from tensordict import TensorDictBase, lazy_stack

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.ragged import has_entry


def whole_groups(
    batches: Iterable[TensorDictBase],
    group_size: int,
    *,
    num_groups: int = 1,
) -> Iterator[TensorDictBase]:
    """Yield batches of complete groups of finished episodes.

    Episodes of several turns end at different steps, so a batch of a collector holds parts of episodes and of groups. The
    parts are kept until their group is complete. No step is dropped or repeated.

    Args:
        batches: the batches of a collector, ``[*envs, steps]`` or flattened. Each step occurs once, and the steps of an
            episode are in order. The integer entry ``"group"`` is equal for the rows of a group, and ``"run"`` for the steps
            of an episode. Without ``"run"`` each step is an episode.
        group_size: the number of episodes in a group.

    Keyword Args:
        num_groups: the number of groups in a yielded batch.

    Yields:
        Rows ``[R]``. Groups are in the order in which they were completed, the episodes of a group in the order of their
        numbers, and the steps of an episode in their own order.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> step = TensorDict(group=torch.tensor([[5, 5, 6], [5, 6, 6]]), batch_size=[2, 3])
        >>> step["run"] = torch.tensor([[10, 10, 12], [11, 13, 13]])
        >>> done = torch.tensor([[False, True, False], [True, False, True]])
        >>> step["next"] = TensorDict(done=done.unsqueeze(-1), batch_size=[2, 3])
        >>> [batch["run"].tolist() for batch in whole_groups([step], group_size=2)]  # run 12 is under way
        [[10, 10, 11]]
    """
    check_range(1, group_size=group_size, num_groups=num_groups)
    unnamed = count(-1, -1)  # negative, so that they differ from the numbers of "run"
    steps: dict[int, dict[int, list[TensorDictBase]]] = defaultdict(lambda: defaultdict(list))
    ended: dict[int, int] = defaultdict(int)
    complete: list[int] = []
    for batch in batches:
        for row in batch.reshape(-1).unbind(0):
            group = int(row["group"])
            steps[group][int(row["run"]) if has_entry(row, "run") else next(unnamed)].append(row)
            if bool(row["next", "done"].any()):
                ended[group] += 1
                if ended[group] == group_size:
                    complete.append(group)
        while len(complete) >= num_groups:
            taken, complete = complete[:num_groups], complete[num_groups:]
            runs = [steps.pop(group) for group in taken]
            for group in taken:
                del ended[group]
            yield lazy_stack(
                [row for group_runs in runs for run in sorted(group_runs, key=abs) for row in group_runs[run]]
            )
