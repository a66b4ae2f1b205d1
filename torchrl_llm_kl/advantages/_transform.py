"""The transform that reads what an advantage needs from a batch, and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Transform

from torchrl_llm_kl.advantages._entries import amounts, check_finite_rows, find, identities, integers, require
from torchrl_llm_kl.advantages._hyper import translate
from torchrl_llm_kl.advantages._keys import ADVICE, DEFAULT_KEYS, resolve_keys
from torchrl_llm_kl.advantages._membership import groups_of_size, runs_along_time
from torchrl_llm_kl.advantages._outcomes import outcomes
from torchrl_llm_kl.advantages._registry import advantage_spec, get_advantage
from torchrl_llm_kl.advantages._tokens import ResponseTokens
from torchrl_llm_kl.ragged import own_leaves

__all__ = ["Advantage", "Layout"]

Layout = Literal["sequence", "token"]


class Advantage(Transform):
    r"""Write the advantage of every sequence, or every token, of a batch.

    Groups and statistics are those of the batch at hand, so that the transform belongs where whole groups come together: in
    a replay buffer on extend (``append_transform(Advantage(...), invert=True)``), on sample if samples are whole groups, or
    called on a batch. In an env it is an error.

    Args:
        name: one of :func:`~torchrl_llm_kl.advantages.available_advantages`.

    Keyword Args:
        group_key: for advantages that compare within groups: the entry that is equal for the sequences of a group: integers,
            strings, or the tokens of the prompt. Default ``"query"``, as for torchrl's ``MCAdvantage``.
        group_size: instead of ``group_key``: consecutive sequences of the flattened batch, that many at a time, make a group,
            as when each prompt is repeated. For trajectories, consecutive envs of a rollout ``[*envs, steps]``.
        layout: ``"sequence"``: one number for each sequence, shaped as the reward if that is one number too (``[*B, 1]`` or
            ``[*B, 1, 1]``), else ``[*B, 1]``. ``"token"``: that number on each response token and 0 elsewhere, ``[*B, T, 1]``
            in the form of the tokens. Advantages of tokens have no other layout.
        keys: where entries are that have other keys than :data:`~torchrl_llm_kl.advantages.DEFAULT_KEYS`: input or output ->
            key. What is not found under its key is looked for inside of ``"next"`` (or outside, if the key begins with it).
        hyper: hyper-parameters of the advantage; see its function. Trinity-RFT's names are accepted.

    Shapes:
        A reward is one number for each sequence, or for each token (as ``KLRewardTransform`` writes it): then its sum, without
        padding (``("masks", "all_attention_mask")``), is the outcome, and for advantages of tokens an outcome sits on the
        last response token.
        Response tokens are those of ``keys={"mask": ...}`` if it is given; else the response of each step, as for
        ``PolicyLoss(masking_strategy="sft")`` and ``RetrieveValue``.
        Trajectories lie along the last dimension of the batch and end at ``("next", "done")``, unless
        ``keys={"run": ..., "step": ...}`` say which one, and where in it, a step is.

    Raises:
        TypeError: for a hyper-parameter that the advantage does not have.
        ValueError: if a reward is NaN or infinite (says the row) or of another width than sequences and tokens, or arguments
            contradict the advantage or each other.
        KeyError: if an entry is missing (says which, what was found, and what to do).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> data = TensorDict({
        ...     "query": torch.tensor([3, 8, 3, 3]),
        ...     ("next", "reward"): torch.tensor([[0.0], [1.0], [0.0], [3.0]]),
        ... }, batch_size=[4])
        >>> Advantage("rloo")(data)["advantage"].squeeze(-1)
        tensor([-1.5000,  0.0000, -1.5000,  3.0000])
    """

    def __init__(
        self,
        name: str,
        *,
        group_key: NestedKey | None = None,
        group_size: int | None = None,
        layout: Layout | None = None,
        keys: Mapping[str, NestedKey] | None = None,
        **hyper: Any,
    ) -> None:
        super().__init__()
        self._function = get_advantage(name)
        self.spec = advantage_spec(self._function)
        self.hyper = translate(self.spec, hyper)
        self.layout: Layout = _checked_layout(self.spec.name, self.spec.kind, layout)
        asked_for = [key for key, cause in self.spec.optional.items() if self.hyper.get(cause) is not None]
        self.inputs = (*self.spec.needs, *asked_for)
        self.keys = resolve_keys(self.spec, self.inputs, self.layout, keys)
        self.group_key, self.group_size = self._checked_group(group_key, group_size)
        read = [self.keys[key] for key in self.keys if key not in self.spec.outputs]
        grouped = [] if self.group_key is None else [self.group_key]
        self.in_keys = [*read, *grouped]
        self.out_keys = [self.keys[key] for key in self.spec.outputs]

    def _checked_group(self, key: NestedKey | None, size: int | None) -> tuple[NestedKey | None, int | None]:
        if "group" not in self.inputs:
            if key is not None or size is not None:
                raise ValueError(f"{self.spec.name} compares nothing within groups: leave out group_key and group_size")
            return None, None
        if key is not None and size is not None:
            raise ValueError(f"got both group_key={key!r} and group_size={size}: pass one of them")
        if size is not None and size < 1:
            raise ValueError(f"group_size must be at least 1, got {size}")
        return (DEFAULT_KEYS["group"] if key is None and size is None else key), size

    # ------------------------------------------------------------------ where TorchRL calls it

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch: on a direct call, or when a replay buffer is sampled."""
        self.check_writable(tensordict)
        tokens = ResponseTokens.of(tensordict, self.keys.get("mask")) if self._reads_tokens else None
        results = (
            self._of_tokens(tensordict, tokens) if self.spec.kind == "token" else self._of_rows(tensordict, tokens)
        )
        own_leaves(tensordict, *self.out_keys)
        for key, values in zip(self.out_keys, results, strict=True):
            if tokens is not None and self.layout == "token":
                tensordict = tokens.write(tensordict, key, values)
            else:
                tensordict.set(unravel_key(key), values)
        return tensordict

    def check_writable(self, td: TensorDictBase) -> None:
        """Raise unless there is something to calculate, and room to write it.

        Raises:
            ValueError: if the batch is empty.
            RuntimeError: if it is locked.
        """
        if td.batch_size.numel() == 0:
            raise ValueError(
                f"the batch is empty: a TensorDict of batch size {tuple(td.batch_size)} has no advantage, drop it"
            )
        if td.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict. Unlock it first: td.unlock_().")

    def check_groups(self, td: TensorDictBase) -> None:
        """Raise as :meth:`forward` does if groups, trajectories or baselines are missing or wrong; runs nothing else."""
        for name in ("group", "run", "step", "state", "baseline"):
            if name in self.inputs:
                self._row_input(td, name, None)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on ``extend`` when the transform was appended with ``invert=True``.
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(self._misplaced)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(self._misplaced)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Asked for by envs alone, where the transform cannot work."""
        raise RuntimeError(self._misplaced)

    @property
    def _misplaced(self) -> str:
        return (
            f"{self!r} needs all sequences of a batch, and an env has one step at a time: append it to the replay buffer "
            f"(with invert=True for on extend), or call it on the batch of a collector"
        )

    # ------------------------------------------------------------------ from entries to the function

    @property
    def _reads_tokens(self) -> bool:
        return self.layout == "token" or "mean_log_prob" in self.inputs

    def _of_tokens(self, td: TensorDictBase, tokens: ResponseTokens | None) -> list[Tensor]:
        assert tokens is not None
        given = {"mask": tokens.padded(tokens.mask)}
        for name in self.inputs:
            if name != "mask":
                read = tokens.read_reward if name == "reward" else tokens.read
                given[name] = tokens.padded(read(td, self.keys[name], f"the {name}", ADVICE[name]))
        results = self._function(**given, **self.hyper)
        return [tokens.flat(x) for x in (results if isinstance(results, tuple) else (results,))]

    def _of_rows(self, td: TensorDictBase, tokens: ResponseTokens | None) -> list[Tensor]:
        given = {name: self._row_input(td, name, tokens) for name in self.inputs}
        device = given["reward"].device
        result = self._function(**{name: x.to(device) for name, x in given.items()}, **self.hyper)
        assert isinstance(result, Tensor)
        if self.layout == "token":
            assert tokens is not None
            return [tokens.spread(result)]
        return [result.reshape(*td.batch_size, *_features(find(td, self.keys["reward"]), td.batch_size))]

    def _row_input(self, td: TensorDictBase, name: str, tokens: ResponseTokens | None) -> Tensor:
        """One number for each row; ``[S]``."""
        rows = td.batch_size.numel()
        what = f"the {name}"
        if name == "mean_log_prob":
            assert tokens is not None
            return tokens.mean(tokens.read(td, self.keys["old_log_prob"], "the old_log_prob", ADVICE["old_log_prob"]))
        if name == "group" and self.group_size is not None:
            return groups_of_size(td, self.group_size, trajectories=self.spec.kind == "trajectory")
        key = self.group_key if name == "group" else self.keys.get(name)
        if key is None:  # a trajectory's own place in the batch
            return runs_along_time(td) if name == "run" else torch.arange(rows)
        value = require(td, key, what, ADVICE[name])
        if name == "step":
            return integers(value, rows, what)
        if name in ("group", "run", "state"):
            return identities(value, rows, what)
        numbers = outcomes(td, value, what) if name == "reward" else amounts(value, rows, what)
        check_finite_rows(numbers, what)
        return numbers

    def __repr__(self) -> str:
        """The arguments that matter."""
        group = {"group_key": self.group_key, "group_size": self.group_size, "layout": self.layout, **self.hyper}
        shown = [f"{key}={value!r}" for key, value in group.items() if value is not None]
        return f"{type(self).__name__}({', '.join([repr(self.spec.name), *shown])})"


def _checked_layout(name: str, kind: str, layout: str | None) -> Layout:
    if layout is not None and layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    if kind == "token":
        if layout == "sequence":
            raise ValueError(f"{name} has a number for each token: layout must be 'token', got 'sequence'")
        return "token"
    return layout or "sequence"  # type: ignore[return-value]


def _features(reward: Any, batch_size: torch.Size) -> tuple[int, ...]:
    """The shape of one row's advantage: the reward's if that is a single number."""
    if isinstance(reward, list):
        shape = tuple(reward[0].shape) if all(row.numel() == 1 for row in reward) else ()
    else:
        shape = () if reward.is_nested else tuple(reward.shape[len(batch_size) :])
    return shape if shape and torch.Size(shape).numel() == 1 else (1,)
