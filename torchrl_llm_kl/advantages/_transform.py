"""The transform: reads the inputs of an advantage from a batch by key, and writes the result."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.envs import Transform
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_choice, check_finite, check_range, send, widen
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.advantages._registry import advantage_spec, check_hyperparameters, get_advantage
from torchrl_llm_kl.ragged import Ragged, on_host, own_leaves, read_column, read_ragged, same_rows, write_ragged
from torchrl_llm_kl.rollouts import (
    ATTENTION_MASK,
    TOKENS_FULL,
    ModelInterface,
    ResponseTokens,
    find_key,
    leaves,
    locate,
    outcomes,
    per_sequence,
    per_token,
    prompt_ids,
    require_key,
    sequence_ids_of,
    sequence_integers,
    sequence_sums,
    token_reward,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.advantages import AdvantageArgs, AdvantageName

Layout = Literal["sequence", "token"]

#: The default key of each input and output. The mask, ``run`` and ``step`` have none: see
#: :class:`~torchrl_llm_kl.advantages.Advantage`.
DEFAULT_KEYS: dict[str, NestedKey] = {
    "reward": ("next", "reward"),
    "rewards": ("next", "reward"),
    "group": "query",
    "baseline": "reward_baseline",
    "value": ("next", "state_value"),
    "old_log_prob": ("next", "log_probs", "full"),
    "teacher_log_prob": ("next", "ref_log_probs", "full"),
    "entropy": ("next", "entropy"),
    "collision": ("next", "moments", "collision"),
    "discriminator": ("next", "moments", "discriminator"),
    "state": "state",
    "role": "role",
    "advantage": "advantage",
    "value_target": "value_target",
}
#: Input -> the usual source of its entry, for the message about a missing one.
_WRITERS = {
    "reward": "Add a transform that writes rewards to the env",
    "rewards": "Store several rewards of each sequence, [*B, R], or name an entry for each",
    "group": "Pass group_key=, the entry that is equal for all answers to a prompt, or group_size= if they are consecutive",
    "baseline": "Answer each prompt greedily once and store that reward",
    "value": "Put RetrieveValue before",
    "old_log_prob": "Put RetrieveLogProb (or RetrieveKL) of the policy before",
    "teacher_log_prob": "Put RetrieveLogProb of the teacher before (RetrieveKL(policy, teacher) writes both)",
    "entropy": "Put RetrieveLogProb(..., extras=[Entropy()]) of the policy before",
    "collision": "Put RetrieveLogProb(..., extras=[Moments()]) of the policy before",
    "discriminator": "Put RetrieveLogProb(..., extras=[Moments()]) of the policy before",
    "state": "Store an integer or string that identifies the env's state before the step",
    "role": "Store an integer or string that names the agent of each sequence",
}


def _advice(name: str) -> str:
    """Advice for a missing input."""
    corrected = f"keys={{{name!r}: {'[...]' if name == 'rewards' else '...'}}}"
    if name not in _WRITERS:
        return f"Correct {corrected}."
    return f"{_WRITERS[name]}." if name == "group" else f"{_WRITERS[name]}, or pass {corrected}."


class Advantage(Transform):
    r"""Write the advantage of every sequence, or of every token, of a batch.

    Groups and statistics are of one batch, so apply the transform to whole groups: in a replay buffer on extend
    (``append_transform(Advantage(...), invert=True)``), on sample if samples are whole groups, or in a direct call. In an env
    it raises an error.

    Args:
        name: one of :func:`~torchrl_llm_kl.advantages.available_advantages`.

    Keyword Args:
        group_key: for advantages that compare within groups: an entry that is equal for the sequences of a group (integers,
            strings, or the tokens of the prompt). Default ``"query"``, as for torchrl's ``MCAdvantage``.
        group_size: instead of ``group_key``: the number of consecutive sequences of the flattened batch that form a group,
            as when each prompt is repeated; for trajectories, of consecutive envs of a rollout ``[*envs, steps]``. The prompts
            (of first steps) and the entry ``"query"`` are compared, if the data has them.
        layout: ``"sequence"``: one number per sequence, in the shape of the reward if that is one number too (``[*B, 1]`` or
            ``[*B, 1, 1]``), else ``[*B, 1]``. ``"token"``: that number on each response token and 0 elsewhere, ``[*B, T, 1]``
            in the layout of the tokens. Advantages of tokens have no other layout.
        keys: overrides of :data:`~torchrl_llm_kl.advantages.DEFAULT_KEYS`: input or output -> key. A missing entry is looked
            up on the other side of ``"next"``. ``"rewards"`` (for ``gdpo``) may be a list of keys, one for each reward.
        hyper: hyper-parameters of the advantage; see its function.

    Shapes:
        A reward is one number per sequence, or one per token (as ``KLRewardTransform`` writes it), whose sum without padding
        (``("masks", "all_attention_mask")``) is the outcome. For advantages of tokens, an outcome is placed on the last
        response token.
        Several rewards are one entry ``[*B, R]``, or a list of keys of rewards as above.
        Other per-token inputs hold one number per token, or rows of the response alone, as for the losses. Response tokens
        are True in ``keys={"mask": ...}`` if given; else the response of each step, as for
        ``PolicyLoss(masking_strategy="sft")`` and ``RetrieveValue``.
        Trajectories lie along the last dimension of the batch and end at ``("next", "done")``, unless
        ``keys={"run": ..., "step": ...}`` identify the trajectory of a step and its position in it.

    Raises:
        TypeError: for an unknown hyper-parameter.
        ValueError: if an input is NaN or infinite (names the sequence), a reward fits neither sequences nor tokens, a
            per-token input holds one number per sequence, ``group_size`` rows have different prompts, or arguments contradict
            the advantage or each other.
        KeyError: if an entry is missing (names it, lists the entries found, and gives advice).

    Warns:
        UserWarning: if rows of one ``group_key`` have different prompts, as turns of a conversation have.

    Example:
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
        name: AdvantageName,
        *,
        group_key: NestedKey | None = None,
        group_size: int | None = None,
        layout: Layout | None = None,
        keys: Mapping[str, NestedKey | list[NestedKey]] | None = None,
        **hyper: Unpack[AdvantageArgs],
    ) -> None:
        super().__init__()
        self._function = get_advantage(name)
        self.spec = spec = advantage_spec(self._function)
        self.hyper = dict(hyper)
        spec.check(self.hyper)
        spec.check_used(self.hyper)
        check_choice((None, *get_args(Layout)), layout=layout)
        if spec.kind == "token" and layout == "sequence":
            raise ValueError(f"{spec.name} has one number per token: layout must be 'token', got 'sequence'.")
        self.layout: Layout = "token" if spec.kind == "token" else layout or "sequence"
        self.inputs = (*spec.needs, *(key for key, cause in spec.optional.items() if self.hyper.get(cause) is not None))
        check_hyperparameters(self._function, self.inputs, self.hyper)
        self.kept = None if spec.kept is None else RunningNumbers()
        self.keys = self._resolve_keys(keys or {})
        self.group_key, self.group_size = self._check_group(group_key, group_size)
        read = [key for name in self.keys if name not in spec.outputs for key in self._keys_of(name)]
        self.in_keys = read if self.group_key is None else [*read, self.group_key]
        self.out_keys = [self.keys[key] for key in spec.outputs]

    def _resolve_keys(self, given: Mapping[str, NestedKey]) -> dict[str, NestedKey]:
        """The entries read and written: the defaults, overridden by ``given``."""
        # The mean log-prob is computed from the tokens', the length from the mask; group and mask have own arguments.
        own = {"group", "mask", "length", self.spec.kept}
        names = {"old_log_prob" if name == "mean_log_prob" else name for name in self.inputs} - own
        known = {*names, *self.spec.outputs, *(["mask"] if self._reads_tokens else [])}
        for name in given:
            if name not in known:
                hint = " Pass group_key=." if name == "group" and "group" in self.inputs else ""
                raise ValueError(no_such(f"{self.spec.name} has no key", name, sorted(known), hint=hint))
            if isinstance(given[name], list) and (name != "rewards" or not given[name]):
                raise ValueError(f"keys={{{name!r}: ...}} must be one key, got the list {given[name]!r}.")
        return {**{name: key for name, key in DEFAULT_KEYS.items() if name in known}, **given}

    def _keys_of(self, name: str) -> list[NestedKey]:
        """The entries of an input; several for rewards in entries of their own."""
        key = self.keys[name]
        return key if isinstance(key, list) else [key]

    def _check_group(self, key: NestedKey | None, size: int | None) -> tuple[NestedKey | None, int | None]:
        if "group" not in self.inputs:
            if key is not None or size is not None:
                raise ValueError(
                    f"{self.spec.name} does not compare within groups: leave out group_key and group_size."
                )
            return None, None
        if key is not None and size is not None:
            raise ValueError(f"got both group_key={key!r} and group_size={size}: pass one of them.")
        check_range(1, group_size=size)
        return (DEFAULT_KEYS["group"] if key is None and size is None else key), size

    # ------------------------------------------------------------------ where TorchRL calls it

    if TYPE_CHECKING:

        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase: ...

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch: on a direct call, or when a replay buffer is sampled."""
        self.check_writable(tensordict)
        # One number per sequence is computed on the host, which every input reaches in one copy.
        device = self._device(tensordict)
        data = tensordict if self.spec.kind == "token" else self._on_host(tensordict, device)
        response = self._locate(data) if self._reads_tokens else None
        compute = self._of_tokens if self.spec.kind == "token" else self._of_rows
        results = compute(data, response)
        own_leaves(tensordict, *self.out_keys)
        for key, values in zip(self.out_keys, results, strict=True):
            if response is not None and self.layout == "token":
                rows = response.tokens.like(values.unsqueeze(-1))
                tensordict = self._write(tensordict, key, rows, data is tensordict)
            else:
                tensordict.set(unravel_key(key), send(values, device))
        return tensordict

    def _write(self, td: TensorDictBase, key: NestedKey, rows: Ragged, here: bool) -> TensorDictBase:
        """Store ``[N, 1]`` as ``[*B, T, 1]`` in the layout of the tokens; ``here``: they were read from ``td`` itself."""
        tokens = None if here else read_ragged(td, self._tokens_key(td))
        if tokens is None:
            return write_ragged(td, key, rows.slots(), rows.container)
        return write_ragged(td, key, send(rows.slots(), tokens.values.device), tokens.container)

    def _tokens_key(self, td: TensorDictBase) -> NestedKey:
        """The entry whose layout the tokens have."""
        key = self.keys.get("mask")
        return TOKENS_FULL if key is None else find_key(td, key) or key

    def _device(self, td: TensorDictBase) -> torch.device:
        """Where the rewards are, and so the result."""
        keys = [key for name in ("rewards", "reward") if name in self.keys for key in self._keys_of(name)]
        key = find_key(td, keys[0]) if keys else None
        column = None if key is None else read_column(td, key)
        return (column[0] if isinstance(column, list) else column).device if column is not None else torch.device("cpu")

    def _on_host(self, td: TensorDictBase, device: torch.device) -> TensorDictBase:
        """The batch with all inputs on the CPU; itself if its rewards are there."""
        if device.type == "cpu":
            return td
        interface = ModelInterface()
        read = [*self.in_keys, DEFAULT_KEYS["group"], ("next", "done"), *interface.token_keys]
        return on_host(td, [key for key in map(partial(find_key, td), read) if key is not None])[0]

    def check_writable(self, td: TensorDictBase) -> None:
        """Raise a ValueError if the batch is empty, a RuntimeError if it is locked."""
        if td.batch_size.numel() == 0:
            raise ValueError(f"the batch is empty: a TensorDict of batch size {tuple(td.batch_size)}. Drop it.")
        if td.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict. Unlock it first: td.unlock_().")

    def check_groups(self, td: TensorDictBase) -> None:
        """Raise as :meth:`forward` does if groups, trajectories or baselines are missing or wrong; computes nothing else.

        Also raises a ValueError if each group has one answer alone, which would be compared with nothing.
        """
        td = self._on_host(td, self._device(td))
        names = [name for name in ("group", "run", "step", "state", "baseline") if name in self.inputs]
        ids = {name: self._row_input(td, name, None) for name in names}
        if "group" not in ids:
            return
        group = ids["group"].cpu()
        members = torch.stack([group, ids["run"].cpu() if "run" in ids else torch.arange(len(group))])
        answers = members.unique(dim=1).shape[1]
        if answers == len(group.unique()):
            raise ValueError(
                f"found {answers} groups of one answer, and {self.spec.name} compares the answers to a prompt: collect several "
                "and pass group_key= or group_size=."
            )

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on ``extend`` when the transform was appended with ``invert=True``. What torchrl's
        # MCAdvantage keeps until a group is whole arrives as None.
        return None if next_tensordict is None else self.forward(next_tensordict)

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Called only by envs, which have one step at a time."""
        raise RuntimeError(
            f"{self!r} needs all sequences of a batch, and an env has one step at a time: append it to the replay buffer "
            f"(with invert=True for on extend), or call it on the batch of a collector."
        )

    _step = _reset = transform_output_spec = _refuse

    def __repr__(self) -> str:
        group = {"group_key": self.group_key, "group_size": self.group_size, "layout": self.layout, **self.hyper}
        shown = [f"{key}={value!r}" for key, value in group.items() if value is not None]
        return f"{type(self).__name__}({', '.join([repr(self.spec.name), *shown])})"

    # ------------------------------------------------------------------ one number per token

    @property
    def _reads_tokens(self) -> bool:
        return self.layout == "token" or "mean_log_prob" in self.inputs or "length" in self.inputs

    def _locate(self, td: TensorDictBase) -> ResponseTokens:
        """The tokens of the given mask; by default the response of each step, as for losses and critics."""
        key = self.keys.get("mask")
        if key is None:
            response = locate(td).response
        else:
            key = require_key(td, key, "the mask is missing", _advice("mask"))
            slots, attention = read_ragged(td, key), read_ragged(td, ATTENTION_MASK)
            if slots is not None and attention is not None and same_rows(slots.container, attention.container):
                slots = read_ragged(td, key, ATTENTION_MASK)  # without padding, like the tokens
            assert slots is not None
            if slots.values.numel() != slots.values.shape[0]:
                shape = tuple(slots.values.shape[1:])
                raise ValueError(f"the mask must hold one number per token, found rows of {shape} under {key!r}.")
            tokens = slots.like(slots.values.reshape(-1))
            response = ResponseTokens(tokens, tokens.values.bool())
        if response.is_empty:
            raise ValueError(f"the mask is empty: {key or 'the response'} has no tokens. Pass keys={{'mask': ...}}.")
        return response

    def _of_tokens(self, td: TensorDictBase, response: ResponseTokens | None) -> list[Tensor]:
        """The results at every token; ``[N]`` each."""
        assert response is not None
        names = [name for name in self.inputs if name not in ("mask", *self.spec.per_sequence)]
        given = {name: response.gather(self._token_input(td, name, response)) for name in names}
        response.check_finite({f"the {name}": x for name, x in given.items()})
        for name in self.spec.per_sequence:
            given[name] = self._row_input(td, name, response).to(response.mask.device)
        results = self._function(**given, mask=response.mask, **self.hyper)
        return [response.scatter(x) for x in (results if isinstance(results, tuple) else (results,))]

    def _token_input(self, td: TensorDictBase, name: str, response: ResponseTokens) -> Tensor:
        """One number per token; ``[N]``."""
        key = require_key(td, self.keys[name], f"the {name} is missing", _advice(name))
        if name == "reward":
            return token_reward(read_column(td, key), response.tokens, response.host_mask, "last").values.squeeze(-1)
        # A loss may repeat a sequence's number on its tokens, but one value or log-prob for a whole sequence is a mistake.
        if per_sequence(td, key) is not None and response.mask.shape[1] > 1:
            raise ValueError(
                f"the {name} must hold one number per token, found one per sequence under {key!r}: pass another entry, "
                f"keys={{{name!r}: ...}}."
            )
        return per_token(td, key, response.tokens, response.host_mask)

    # ------------------------------------------------------------------ one number per sequence

    def _of_rows(self, td: TensorDictBase, response: ResponseTokens | None) -> list[Tensor]:
        """The result in its layout: one number per sequence, or at every token ``[N]``."""
        given = {name: self._row_input(td, name, response) for name in self.inputs}
        device = given["rewards" if "rewards" in given else "reward"].device
        result = self._function(**{name: x.to(device) for name, x in given.items()}, **self.hyper)
        if self.kept is not None:
            result, after = result
            self.kept.update(self._roles(td), after)
        assert isinstance(result, Tensor)
        if self.layout == "token":
            assert response is not None
            return [response.broadcast(result)]
        return [result.reshape(*td.batch_size, *self._features(td))]

    def _row_input(self, td: TensorDictBase, name: str, response: ResponseTokens | None) -> Tensor:
        """One number per sequence; ``[S]``, ``[S, R]`` for several rewards."""
        rows, what = td.batch_size.numel(), f"the {name}"
        if self.kept is not None and name == self.spec.kept:
            return self.kept.of(self._roles(td))
        if name == "length":
            assert response is not None
            return response.mask.sum(-1)
        if name == "rewards":
            return self._several_rewards(td)
        if name == "mean_log_prob":
            assert response is not None
            log_prob = self._token_input(td, "old_log_prob", response)
            response.check_finite({"the old_log_prob": response.gather(log_prob)})
            return response.mean(log_prob)
        if name == "group" and self.group_size is not None:
            groups = _groups_of_size(td, self.group_size, trajectories=self.spec.kind == "trajectory")
            if "role" not in self.inputs:  # agents have other prompts
                _check_neighbours(td, self.group_size, trajectories=self.spec.kind == "trajectory")
            return groups
        given = self.group_key if name == "group" else self.keys.get(name)
        if given is None:  # a trajectory's own place in the batch
            return _runs_along_time(td) if name == "run" else torch.arange(rows)
        value = read_column(td, require_key(td, given, f"{what} is missing", _advice(name)))
        if name == "step":
            return sequence_integers(value, rows, what)
        if name in ("group", "run", "state", "role"):
            ids = sequence_ids_of(value, rows, what)
            if name == "group" and self.spec.kind != "trajectory" and "role" not in self.inputs:
                _warn_of_turns(td, ids, given)
            return ids
        numbers = outcomes(td, value, what) if name == "reward" else sequence_sums(value, rows, what)
        check_finite({what: numbers}, place="sequence {}".format, advice="Fix the entry, or drop the row.")
        return numbers

    def _roles(self, td: TensorDictBase) -> list[Hashable]:
        """The names of the agents, one for each row."""
        key = require_key(td, self.keys["role"], "the role is missing", _advice("role"))
        names = [
            name
            for x in leaves(read_column(td, key))
            for name in (x.reshape(-1).tolist() if isinstance(x, Tensor) else [x])
        ]
        rows = td.batch_size.numel()
        if len(names) not in (1, rows):
            raise ValueError(f"the role must have one value for each of {rows} rows, found {len(names)}.")
        return names * rows if len(names) == 1 else names

    def _several_rewards(self, td: TensorDictBase) -> Tensor:
        """From an entry for each, or from one entry with all of them; ``[S, R]``."""
        columns, rows = [], td.batch_size.numel()
        for key in self._keys_of("rewards"):
            place = require_key(td, key, "the rewards are missing", _advice("rewards"))
            value = read_column(td, place)
            if isinstance(self.keys["rewards"], list):
                columns.append(outcomes(td, value, f"the reward {key!r}"))
                continue
            row = value if isinstance(value, Tensor) and not value.is_nested else None
            if isinstance(value, list) and len({leaf.shape for leaf in value}) == 1:
                row = torch.stack(value)
            if row is None or row.numel() != rows * row.shape[-1] or row.ndim < 2:
                shape = "rows of several lengths" if row is None else tuple(row.shape)
                raise ValueError(
                    f"the rewards under {place!r} must be [*B, R], R numbers for each of {rows} sequences, found {shape}. "
                    f"Pass keys={{'rewards': [...]}} for rewards in entries of their own."
                )
            tokens = read_column(td, ("tokens", "full"))
            if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.shape[-1] == row.shape[-1] > 1:
                warnings.warn(
                    f"{place!r} holds {row.shape[-1]} rewards for each sequence, as many as a row has tokens: a reward per "
                    f"token is one reward; pass keys={{'rewards': [{place!r}]}} for it.",
                    stacklevel=5,
                )
            columns += widen(row.detach())[0].reshape(rows, -1).unbind(1)
        numbers = torch.stack([column.to(columns[0].device) for column in columns], 1)
        check_finite(
            {"a reward": numbers},
            place=lambda at: f"sequence {at // numbers.shape[1]}, reward {at % numbers.shape[1]}",
            advice="Fix the entry, or drop the row.",
        )
        return numbers

    def _features(self, td: TensorDictBase) -> tuple[int, ...]:
        """The shape of one row's advantage: the reward's if that is a single number."""
        name = "rewards" if "rewards" in self.inputs else "reward"
        key = require_key(td, self._keys_of(name)[0], f"the {name} is missing", _advice(name))
        reward = read_column(td, key)
        shape = torch.Size()
        if isinstance(reward, list):
            shape = reward[0].shape if all(row.numel() == 1 for row in reward) else shape
        elif reward is not None and not reward.is_nested:
            shape = reward.shape[td.batch_dims :]
        return shape if shape and shape.numel() == 1 else (1,)


class RunningNumbers(nn.Module):
    """Numbers by name that an advantage keeps between batches, 0 for a new name; its only state."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[Hashable, Tensor] = {}

    def of(self, names: Iterable[Hashable]) -> Tensor:
        """The number of each name."""
        return torch.stack([self.numbers.get(name, torch.zeros(())) for name in names])

    def update(self, names: Iterable[Hashable], numbers: Tensor) -> None:
        """Replace the number of each name, all of a name being equal."""
        self.numbers |= dict(zip(names, numbers.detach().cpu().unbind(), strict=True))

    def get_extra_state(self) -> list[tuple[Hashable, float]]:
        """Pairs of a name and its number."""
        return [(name, float(number)) for name, number in self.numbers.items()]

    def set_extra_state(self, state: Iterable[tuple[Hashable, float]]) -> None:
        """Take the numbers of :meth:`get_extra_state`."""
        self.numbers = {name: torch.tensor(number) for name, number in state}


# ------------------------------------------------------------------ groups and trajectories by position in the batch


def _groups_of_size(td: TensorDictBase, size: int, *, trajectories: bool) -> Tensor:
    """Groups of ``size`` consecutive rows, or of trajectories along the last dimension; int64 ``[S]``."""
    rows, steps = td.batch_size.numel(), 1
    if trajectories:
        if td.batch_dims < 2:
            shape = tuple(td.batch_size)
            raise ValueError(
                f"group_size needs trajectories [*envs, steps], found batch size {shape}: pass group_key=."
            )
        steps = td.batch_size[-1]
        done = _done_flags(td)
        if done is not None and bool(done.reshape(-1, steps)[:, :-1].any()):
            raise ValueError(
                "group_size needs one trajectory per env, and some end before the last step: pass group_key=."
            )
    units = rows // steps
    if units % size:
        what = "trajectories" if trajectories else "sequences"
        raise ValueError(
            f"{units} {what} do not divide into groups of group_size={size}: pass whole groups, or group_key=."
        )
    return torch.arange(rows) // steps // size


_TURNS = (
    "If rows are turns of conversations, use the algorithm multi_step_grpo (the advantage step_wise_grpo), which compares "
    "whole conversations"
)


def _check_neighbours(td: TensorDictBase, size: int, *, trajectories: bool) -> None:
    """Raise if the data shows that ``size`` consecutive rows, or trajectories, do not answer one prompt."""
    rows = torch.arange(td.batch_size.numel())
    if trajectories:
        rows = rows[:: td.batch_size[-1]]  # their first steps
    for what, ids in ((f"entry {DEFAULT_KEYS['group']!r}", _query_ids(td)), ("prompt", prompt_ids(td))):
        if ids is None:
            continue
        ids = ids.to(rows.device)[rows].reshape(-1, size)
        differs = (ids != ids[:, :1]).reshape(-1)
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            pair = f"{int(rows[at - at % size])} and {int(rows[at])}"
            raise ValueError(
                f"group_size={size}: sequences {pair} would be compared as answers to one prompt, and their {what} differs. "
                f"{'' if trajectories else f'{_TURNS}. '}Otherwise put the answers to a prompt next to one another, or pass "
                "group_key=."
            )


def _query_ids(td: TensorDictBase) -> Tensor | None:
    key = find_key(td, DEFAULT_KEYS["group"])
    try:
        return None if key is None else sequence_ids_of(read_column(td, key), td.batch_size.numel(), "the query")
    except (TypeError, ValueError):  # an entry of another kind
        return None


def _warn_of_turns(td: TensorDictBase, group: Tensor, key: NestedKey) -> None:
    """Warn if rows of a group have different prompts: turns of a conversation are not answers to one prompt."""
    prompts = prompt_ids(td)
    if prompts is None:
        return
    pairs = torch.stack([group.cpu(), prompts.cpu()]).unique(dim=1)
    if pairs.shape[1] > len(pairs[0].unique()):
        warnings.warn(
            f"rows of one group (group_key={key!r}) have different prompts, and are compared as answers to one. {_TURNS}.",
            stacklevel=4,
        )


def _runs_along_time(td: TensorDictBase) -> Tensor:
    """Trajectories along the last dimension that end where ``("next", "done")`` is True; int64 ``[S]``."""
    done = _done_flags(td)
    if done is None and td.batch_dims < 2:
        raise ValueError(
            f"cannot tell trajectories apart: found batch size {tuple(td.batch_size)} and no ('next', 'done'). Pass "
            f"keys={{'run': ..., 'step': ...}}, or a batch [*envs, steps]."
        )
    rows = td.batch_size.numel()
    line = torch.arange(rows) // (td.batch_size[-1] if td.batch_dims > 1 else rows)
    if done is None:
        return line
    ended_before = done.long().cumsum(0) - done.long()
    return line * (rows + 1) + ended_before.cpu()


def _done_flags(td: TensorDictBase) -> Tensor | None:
    key = find_key(td, ("next", "done"))
    return None if key is None else sequence_sums(read_column(td, key), td.batch_size.numel(), "('next', 'done')") > 0
