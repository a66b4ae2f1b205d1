"""The transform that reads the inputs of an advantage from a batch by key, and writes the result."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.envs import Transform
from typing_extensions import Unpack

from torchrl_llm_kl._foreign import read_table
from torchrl_llm_kl._numerics import check_choice, check_finite, check_range, send, widen
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.advantages._registry import advantage_spec, get_advantage
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

_ENTRIES = list(read_table("advantages/entries.csv"))
#: The default key of each input and output. The mask, ``run`` and ``step`` have no default key, as
#: :class:`~torchrl_llm_kl.advantages.Advantage` explains.
DEFAULT_KEYS: dict[str, NestedKey] = {row["name"]: unravel_key(tuple(row["entry"].split("."))) for row in _ENTRIES}
#: Input -> how to get its entry, for the message about a missing entry.
_WRITERS = {row["name"]: row["advice"] for row in _ENTRIES if row["advice"]}


def _require(td: TensorDictBase, key: NestedKey, name: str) -> NestedKey:
    """Return the key of an input, on either side of ``"next"``. The error for a missing entry has advice."""
    corrected = f"keys={{{name!r}: {'[...]' if name == 'rewards' else '...'}}}"
    advice = f"{_WRITERS[name]}, or pass {corrected}." if name in _WRITERS else f"Correct {corrected}."
    return require_key(td, key, f"the {name} is missing", f"{_WRITERS[name]}." if name == "group" else advice)


class Advantage(Transform):
    r"""Write the advantage of every sequence, or of every token, of a batch.

    Groups and statistics are taken from one batch, so apply the transform to whole groups. It works in a replay buffer on
    extend (``append_transform(Advantage(...), invert=True)``), on sample if samples are whole groups, and in a direct call. In
    an env it raises an error.

    Args:
        name: one of :func:`~torchrl_llm_kl.advantages.available_advantages`.

    Keyword Args:
        group_key: for advantages that compare within groups, an entry that is equal for the sequences of a group (integers,
            strings, or the tokens of the prompt). Default ``"query"``, as for torchrl's ``MCAdvantage``.
        group_size: the number of consecutive sequences of the flattened batch that form a group, instead of ``group_key``. Use
            it if each prompt is repeated. For trajectories, the number of consecutive envs of a rollout ``[*envs, steps]``. If
            the data has prompts or the entry ``"query"``, they must be equal within a group.
        layout: ``"sequence"`` writes one number per sequence. Its shape is the reward's if the reward is one number too
            (``[*B, 1]`` or ``[*B, 1, 1]``), otherwise ``[*B, 1]``. ``"token"`` writes this number on each response token and 0
            elsewhere, ``[*B, T, 1]`` in the layout of the tokens. Advantages of tokens have only this layout.
        keys: input or output -> key, which overrides :data:`~torchrl_llm_kl.advantages.DEFAULT_KEYS`. A missing entry is
            looked up on the other side of ``"next"``. ``"rewards"`` (for ``gdpo``) may be a list of keys, one for each reward.
        hyper: hyper-parameters of the advantage, which its function documents.

    Shapes:
        A reward is one number per sequence, or one per token, as ``KLRewardTransform`` writes it. The sum of token rewards
        without padding (``("masks", "all_attention_mask")``) is the outcome. For advantages of tokens, an outcome is placed on
        the last response token.
        Several rewards are one entry ``[*B, R]``, or a list of keys.
        Other per-token inputs hold one number per token, or only the rows of the response, as for the losses. Response tokens
        are True in the entry ``keys={"mask": ...}``. By default they are the response of each step, as for
        ``PolicyLoss(masking_strategy="sft")`` and ``RetrieveValue``.
        Trajectories lie along the last dimension of the batch and end at ``("next", "done")``. Alternatively
        ``keys={"run": ..., "step": ...}`` identify the trajectory of a step and its position in it.

    Raises:
        TypeError: for an unknown hyper-parameter.
        ValueError: if an input is NaN or infinite, a reward fits neither sequences nor tokens, a per-token input holds one
            number per sequence, the prompts of ``group_size`` rows differ, or arguments contradict the advantage or each other.
        KeyError: if an entry is missing. The message lists the entries of the batch.

    Warns:
        UserWarning: if rows with the same ``group_key`` have different prompts, as turns of a conversation do.

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
        self.kept = None if spec.kept is None else RunningNumbers()
        self.keys = self._resolve_keys(keys or {})
        self.group_key, self.group_size = self._check_group(group_key, group_size), group_size
        read = [key for name in self.keys if name not in spec.outputs for key in self._keys_of(name)]
        self.in_keys = read if self.group_key is None else [*read, self.group_key]
        self.out_keys = [self.keys[key] for key in spec.outputs]

    def _resolve_keys(self, given: Mapping[str, NestedKey]) -> dict[str, NestedKey]:
        """The keys that are read and written: the defaults, overridden by ``given``."""
        # The mean log-prob is computed from token log-probs and the length from the mask. The group has arguments of its own.
        own = {"group", "mask", "length", self.spec.kept}
        names = {"old_log_prob" if name == "mean_log_prob" else name for name in self.inputs} - own
        known = {*names, *self.spec.outputs, *(["mask"] if self._reads_tokens else [])}
        for name in given.keys() - known:
            hint = " Pass group_key=." if name == "group" and "group" in self.inputs else ""
            raise ValueError(no_such(f"{self.spec.name} has no key", name, sorted(known), hint=hint))
        return {**{name: key for name, key in DEFAULT_KEYS.items() if name in known}, **given}

    def _keys_of(self, name: str) -> list[NestedKey]:
        """The keys of an input. There are several if each reward has its own entry."""
        key = self.keys[name]
        return key if isinstance(key, list) else [key]

    def _check_group(self, key: NestedKey | None, size: int | None) -> NestedKey | None:
        """The entry that identifies groups. None if a size is given, or the advantage does not compare groups."""
        if "group" not in self.inputs and (key is not None or size is not None):
            raise ValueError(f"{self.spec.name} does not compare groups: leave out group_key and group_size.")
        if key is not None and size is not None:
            raise ValueError(f"got both group_key={key!r} and group_size={size}: pass one of them.")
        check_range(1, group_size=size)
        return DEFAULT_KEYS["group"] if "group" in self.inputs and key is None and size is None else key

    # ------------------------------------------------------------------ where TorchRL calls it

    if TYPE_CHECKING:

        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase: ...

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the transform to a batch: on a direct call, or when a replay buffer is sampled."""
        # One number per sequence is computed on the host. All inputs are copied there at once.
        device = self._device(tensordict)
        data = tensordict if self.spec.kind == "token" else self._on_host(tensordict, device)
        response = self._locate(data) if self._reads_tokens else None
        compute = self._of_tokens if self.spec.kind == "token" else self._of_rows
        results = compute(data, response)
        # A sample of a replay buffer shares its rows with the storage, which must not change.
        own_leaves(tensordict, *self.out_keys)
        for key, values in zip(self.out_keys, results, strict=True):
            if response is not None and self.layout == "token":
                rows = response.tokens.like(values.unsqueeze(-1))
                tensordict = self._write(tensordict, key, rows, data is tensordict)
            else:
                tensordict.set(unravel_key(key), send(values, device))
        return tensordict

    def _write(self, td: TensorDictBase, key: NestedKey, rows: Ragged, here: bool) -> TensorDictBase:
        """Store ``[N, 1]`` as ``[*B, T, 1]`` in the layout of the tokens. ``here``: the tokens were read from ``td`` itself."""
        mask = self.keys.get("mask", TOKENS_FULL)
        tokens = None if here else read_ragged(td, find_key(td, mask) or mask)
        if tokens is None:
            return write_ragged(td, key, rows.slots(), rows.container)
        return write_ragged(td, key, send(rows.slots(), tokens.values.device), tokens.container)

    def _reward_column(self, td: TensorDictBase) -> Any:
        """The entry of the reward, or of the first reward. None without a reward."""
        name = "rewards" if "rewards" in self.inputs else "reward"
        key = find_key(td, self._keys_of(name)[0]) if name in self.keys else None
        return None if key is None else read_column(td, key)

    def _device(self, td: TensorDictBase) -> torch.device:
        """The device of the rewards, where the result is written."""
        column = self._reward_column(td)
        column = column[0] if isinstance(column, list) else column
        return torch.device("cpu") if column is None else column.device

    def _on_host(self, td: TensorDictBase, device: torch.device) -> TensorDictBase:
        """The batch with all inputs on the CPU. The batch itself if its rewards are there."""
        if device.type == "cpu":
            return td
        interface = ModelInterface()
        read = [*self.in_keys, DEFAULT_KEYS["group"], ("next", "done"), *interface.token_keys]
        return on_host(td, [key for key in map(partial(find_key, td), read) if key is not None])[0]

    def check_groups(self, td: TensorDictBase) -> None:
        """Raise as :meth:`forward` does if groups, trajectories or baselines are missing or wrong, without models or results.

        Also raises a ValueError if each group has only one answer, since nothing would be compared.
        """
        td = self._on_host(td, self._device(td))
        # Reading an input checks it. These inputs need no model.
        names = [name for name in ("group", "run", "step", "state", "baseline") if name in self.inputs]
        ids = {name: self._row_input(td, name, None) for name in names}
        if "group" not in ids:
            return
        group = ids["group"].cpu()
        members = torch.stack([group, ids["run"].cpu() if "run" in ids else torch.arange(len(group))])
        answers = members.unique(dim=1).shape[1]
        if answers == len(group.unique()):
            raise ValueError(f"found {answers} groups of one answer: collect several answers to each prompt.")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on ``extend`` if the transform was appended with ``invert=True``. It passes None while
        # torchrl's MCAdvantage waits for whole groups.
        return None if next_tensordict is None else self.forward(next_tensordict)

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Called only by envs, which pass one step at a time."""
        raise RuntimeError(f"{self!r} needs a whole batch, but an env passes one step: append it to the replay buffer.")

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
        """The tokens of the given mask. By default the response of each step, as for losses and critics."""
        key = self.keys.get("mask")
        if key is None:
            response = locate(td).response
        else:
            key = _require(td, key, "mask")
            slots, attention = read_ragged(td, key), read_ragged(td, ATTENTION_MASK)
            if slots is not None and attention is not None and same_rows(slots.container, attention.container):
                slots = read_ragged(td, key, ATTENTION_MASK)  # leave out padding, as for the tokens
            assert slots is not None
            tokens = slots.like(slots.values.reshape(-1))
            response = ResponseTokens(tokens, tokens.values.bool())
        if response.is_empty:
            raise ValueError(f"the mask is empty: {key or 'the response'} has no tokens. Pass keys={{'mask': ...}}.")
        return response

    def _of_tokens(self, td: TensorDictBase, response: ResponseTokens | None) -> list[Tensor]:
        """The results at every token, ``[N]`` each."""
        assert response is not None
        names = [name for name in self.inputs if name not in ("mask", *self.spec.per_sequence)]
        given = {name: response.gather(self._token_input(td, name, response)) for name in names}
        response.check_finite({f"the {name}": x for name, x in given.items()})
        for name in self.spec.per_sequence:
            given[name] = self._row_input(td, name, response).to(response.mask.device)
        results = self._function(**given, mask=response.mask, **self.hyper)
        return [response.scatter(x) for x in (results if isinstance(results, tuple) else (results,))]

    def _token_input(self, td: TensorDictBase, name: str, response: ResponseTokens) -> Tensor:
        """Read one number per token, ``[N]``."""
        key = _require(td, self.keys[name], name)
        if name == "reward":
            return token_reward(read_column(td, key), response.tokens, response.host_mask, "last").values.squeeze(-1)
        # `per_token` would repeat a sequence's number on its tokens. For a value or a log-prob that is a mistake.
        if per_sequence(td, key) is not None and response.mask.shape[1] > 1:
            raise ValueError(f"the {name} must hold one number per token, found one per sequence under {key!r}.")
        return per_token(td, key, response.tokens, response.host_mask)

    # ------------------------------------------------------------------ one number per sequence

    def _of_rows(self, td: TensorDictBase, response: ResponseTokens | None) -> list[Tensor]:
        """The result in its layout: one number per sequence, or one at every token, ``[N]``."""
        given = {name: self._row_input(td, name, response) for name in self.inputs}
        device = given["rewards" if "rewards" in given else "reward"].device
        result = self._function(**{name: x.to(device) for name, x in given.items()}, **self.hyper)
        # The averages change at each call, so a batch must pass once.
        if self.kept is not None:
            result, after = result
            self.kept.update(self._roles(td), after)
        assert isinstance(result, Tensor)
        if self.layout == "token":
            assert response is not None
            return [response.broadcast(result)]
        return [result.reshape(*td.batch_size, *self._features(td))]

    def _row_input(self, td: TensorDictBase, name: str, response: ResponseTokens | None) -> Tensor:
        """Read one number per sequence, ``[S]``, or ``[S, R]`` for several rewards."""
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
            if "role" not in self.inputs:  # agents of a group have different prompts
                _check_neighbours(td, self.group_size, trajectories=self.spec.kind == "trajectory")
            return groups
        given = self.group_key if name == "group" else self.keys.get(name)
        if given is None:  # the position in the batch is the default
            return _runs_along_time(td) if name == "run" else torch.arange(rows)
        value = read_column(td, _require(td, given, name))
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
        """The name of the agent of each row."""
        column = leaves(read_column(td, _require(td, self.keys["role"], "role")))
        names = [name for x in column for name in (x.reshape(-1).tolist() if isinstance(x, Tensor) else [x])]
        return names * td.batch_size.numel() if len(names) == 1 else names

    def _several_rewards(self, td: TensorDictBase) -> Tensor:
        """Read rewards from one entry each, or from one entry with all of them, ``[S, R]``."""
        keys, rows = self._keys_of("rewards"), td.batch_size.numel()
        places = [_require(td, key, "rewards") for key in keys]
        columns: list[Any] = [read_column(td, place) for place in places]
        if isinstance(self.keys["rewards"], list):
            each = [outcomes(td, x, f"the reward {key!r}") for key, x in zip(keys, columns, strict=True)]
            numbers = torch.stack([x.to(each[0].device) for x in each], 1)
        else:
            column = torch.stack(columns[0]) if isinstance(columns[0], list) else columns[0]
            if column.is_nested or column.ndim < 2 or column.numel() != rows * column.shape[-1]:
                raise ValueError(f"the rewards under {places[0]!r} must be [*B, R], R numbers for {rows} sequences.")
            tokens = read_column(td, ("tokens", "full"))
            if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.shape[-1] == column.shape[-1] > 1:
                advice = f"if it is one reward per token, pass keys={{'rewards': [{places[0]!r}]}}."
                warnings.warn(f"{places[0]!r} holds as many rewards as a row has tokens: {advice}", stacklevel=5)
            numbers = widen(column.detach())[0].reshape(rows, -1)
        check_finite(
            {"a reward": numbers},
            place=lambda at: f"sequence {at // numbers.shape[1]}, reward {at % numbers.shape[1]}",
            advice="Fix the entry, or drop the row.",
        )
        return numbers

    def _features(self, td: TensorDictBase) -> tuple[int, ...]:
        """The shape of one row's advantage: the shape of its reward if that is a single number, otherwise ``(1,)``."""
        reward = self._reward_column(td)
        if isinstance(reward, list):
            shape = reward[0].shape if all(row.numel() == 1 for row in reward) else torch.Size()
        else:
            shape = torch.Size() if reward.is_nested else reward.shape[td.batch_dims :]
        return shape if shape and shape.numel() == 1 else (1,)


class RunningNumbers(nn.Module):
    """Numbers by name that an advantage keeps between batches. A new name has 0."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[Hashable, Tensor] = {}

    def of(self, names: Iterable[Hashable]) -> Tensor:
        """The number of each name."""
        return torch.stack([self.numbers.get(name, torch.zeros(())) for name in names])

    def update(self, names: Iterable[Hashable], numbers: Tensor) -> None:
        """Replace the number of each name. Equal names have equal numbers."""
        self.numbers |= dict(zip(names, numbers.detach().cpu().unbind(), strict=True))

    def get_extra_state(self) -> list[tuple[Hashable, float]]:
        """Return pairs of a name and its number."""
        return [(name, float(number)) for name, number in self.numbers.items()]

    def set_extra_state(self, state: Iterable[tuple[Hashable, float]]) -> None:
        """Restore the result of :meth:`get_extra_state`."""
        self.numbers = {name: torch.tensor(number) for name, number in state}


# ------------------------------------------------------------------ groups and trajectories by position in the batch


def _groups_of_size(td: TensorDictBase, size: int, *, trajectories: bool) -> Tensor:
    """Number the groups of ``size`` consecutive rows, or of trajectories along the last dimension, int64 ``[S]``."""
    rows, steps = td.batch_size.numel(), 1
    if trajectories:
        steps = td.batch_size[-1]
        done = _done_flags(td)
        ends_early = done is not None and bool(done.reshape(-1, steps)[:, :-1].any())
        if td.batch_dims < 2 or ends_early:
            raise ValueError("group_size needs one trajectory in each row of [*envs, steps]: pass group_key=.")
    units = rows // steps
    if units % size:
        what = "trajectories" if trajectories else "sequences"
        raise ValueError(f"{units} {what} do not divide into groups of group_size={size}: pass whole groups.")
    return torch.arange(rows) // steps // size


_TURNS = "For turns of conversations use the algorithm multi_step_grpo (the advantage step_wise_grpo)."


def _check_neighbours(td: TensorDictBase, size: int, *, trajectories: bool) -> None:
    """Raise if the data shows that ``size`` consecutive rows or trajectories do not answer one prompt."""
    rows = torch.arange(td.batch_size.numel())
    if trajectories:
        rows = rows[:: td.batch_size[-1]]  # compare first steps
    key = find_key(td, DEFAULT_KEYS["group"])
    query = None if key is None else sequence_ids_of(read_column(td, key), td.batch_size.numel(), "the query")
    for what, ids in (("entry 'query'", query), ("prompt", prompt_ids(td))):
        if ids is None:
            continue
        ids = ids.to(rows.device)[rows].reshape(-1, size)
        differs = (ids != ids[:, :1]).reshape(-1)
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            pair = f"{int(rows[at - at % size])} and {int(rows[at])}"
            raise ValueError(
                f"group_size={size} would compare sequences {pair}, and their {what} differs. {_TURNS} Otherwise put "
                "the answers to a prompt next to one another, or pass group_key=."
            )


def _warn_of_turns(td: TensorDictBase, group: Tensor, key: NestedKey) -> None:
    """Warn if rows of a group have different prompts, since turns of a conversation are not answers to one prompt."""
    prompts = prompt_ids(td)
    if prompts is None:
        return
    # More distinct (group, prompt) pairs than groups: some group has several prompts.
    pairs = torch.stack([group.cpu(), prompts.cpu()]).unique(dim=1)
    if pairs.shape[1] > len(pairs[0].unique()):
        warnings.warn(f"rows of one group (group_key={key!r}) have different prompts. {_TURNS}", stacklevel=4)


def _runs_along_time(td: TensorDictBase) -> Tensor:
    """Number the trajectories along the last dimension. They end where ``("next", "done")`` is True. Int64 ``[S]``."""
    done = _done_flags(td)
    if done is None and td.batch_dims < 2:
        raise ValueError("cannot tell trajectories apart: pass keys={'run': ..., 'step': ...}, or rows [*envs, steps].")
    rows = td.batch_size.numel()
    line = torch.arange(rows) // (td.batch_size[-1] if td.batch_dims > 1 else rows)
    if done is None:
        return line
    # Count the ends before each row. The row that ends a trajectory still belongs to it.
    ended_before = done.long().cumsum(0) - done.long()
    return line * (rows + 1) + ended_before.cpu()


def _done_flags(td: TensorDictBase) -> Tensor | None:
    key = find_key(td, ("next", "done"))
    return None if key is None else sequence_sums(read_column(td, key), td.batch_size.numel(), "('next', 'done')") > 0
