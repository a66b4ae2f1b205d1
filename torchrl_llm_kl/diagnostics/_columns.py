"""Columns of a batch of rollouts: numbers per token, and numbers per sequence.

The doctor measures these columns, and the inspector shows them. Shapes: ``S`` sequences, ``N`` tokens of all sequences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection, unravel_key
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import TypedDict

from torchrl_llm_kl._numerics import NotFiniteError, widen
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.ragged import Ragged, on_host, read_column
from torchrl_llm_kl.rollouts import (
    Located,
    ModelInterface,
    Scope,
    TokenisingOptions,
    find_key,
    find_log_probs,
    leaves,
    locate,
    outcomes,
    per_token,
    prompt_ids,
    read_images,
    response_mask,
    sequence_integers,
    zeros_of_first_tokens,
)
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    ModelOrScorer,
    NotTextError,
    Sampling,
    ScoreRequest,
    as_sampling,
    log_probs_only,
)


@dataclass(frozen=True)
class Column:
    """A column of one number per token.

    Args:
        key: the entry where TorchRL's wrappers and this package's transforms and losses store the column. None for a column
            that is always computed.
        label: the name of the column on a page.
        unit: the unit of its numbers.
    """

    key: NestedKey | None
    label: str
    unit: str = "nats"


#: The columns by name, in the order in which a page shows them.
COLUMNS: Mapping[str, Column] = {
    "log_prob": Column(None, "log-prob now"),
    "old_log_prob": Column(("next", "log_probs", "full"), "log-prob old"),
    "sampler_log_prob": Column(("next", "sampler_log_probs", "full"), "log-prob sampler"),
    "ref_log_prob": Column(("next", "ref_log_probs", "full"), "log-prob reference"),
    "entropy": Column(("next", "entropy"), "entropy"),
    "kl": Column(None, "KL to the reference"),
    "kl_penalty": Column(("next", "kl_penalty"), "KL penalty"),
    "advantage": Column("advantage", "advantage", "reward"),
}
#: The entries that ``keys=`` replaces, by name.
_KEYS: dict[str, NestedKey] = {name: column.key for name, column in COLUMNS.items() if column.key is not None}
_KEYS["reward"] = ("next", "reward")
_OF_SAMPLER = ("sampler_log_prob", "old_log_prob")
#: Entries at the root in which an engine's wrapper stores the sampler's log-probs.
_OF_WRAPPER = (("log_probs", "full"), ("log_probs", "response"))
#: The entry in which :class:`~torchrl_llm_kl.tasks.FunctionReward` stores the rewards of its functions, by name.
_PARTS = ("next", "rewards")


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The tokens of a batch with their numbers.

    Args:
        tokens: ids of all tokens, including prompts, ``[N]``.
        mask: True at the assistant's tokens, bool ``[N]``.
        columns: numbers per token by name, float32 or wider ``[N]``, NaN where a token has no number. ``log_prob``,
            ``entropy`` and ``kl`` (exact) come from the given models. ``old_log_prob``, ``sampler_log_prob``,
            ``ref_log_prob``, ``kl_penalty`` and ``advantage`` come from the data. All except the advantage are in nats.
        rows: numbers per sequence by name, ``[S]``. ``reward`` is the outcome, and ``reward/<name>`` are its named parts.
        prompts: equal numbers for equal prompts, int64 ``[S]``. None if the data does not contain the prompts.
        sampled: False if the tokens were rendered from text.
        unread: with ``strict=False``, the error of each entry that does not fit the tokens, by column. An error of scoring is
            under ``log_prob``.
        has_images: whether rows have images.
        left_out: True for rows that are left out of training, bool ``[S]``. From the entry ``"left_out"``.
        several_versions: whether ``policy_version`` has more than one value, so that older weights are expected.
        unused: entries whose names look like log-probs, and which no column reads.
    """

    tokens: Ragged
    mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    prompts: Tensor | None = None
    sampled: bool = True
    unread: dict[str, ValueError] = field(default_factory=dict)
    has_images: bool = False
    left_out: Tensor | None = None
    several_versions: bool = False
    unused: tuple[str, ...] = ()

    @property
    def turns(self) -> Tensor:
        """The number of each token's assistant turn, from 0, or -1 outside turns. Int64 ``[N]``."""
        # A turn starts where the mask starts, and at the first token of a sequence.
        return self._count(self.mask & ~(pad(self.mask[:-1], (1, 0)) & (self.tokens.positions > 0)))

    @property
    def places(self) -> Tensor:
        """The number of each token among its sequence's masked-in tokens, from 0, or -1 outside the mask. Int64 ``[N]``."""
        return self._count(self.mask)

    def _count(self, marks: Tensor) -> Tensor:
        """The number of marks before each masked-in token in its sequence, or -1 outside the mask."""
        count = marks.long().cumsum(0)
        of_earlier = pad(count, (1, 0))[self.tokens.offsets[:-1]]
        return torch.where(self.mask, count - of_earlier[self.tokens.sequence_ids] - 1, -1)


class Reading(TypedDict, total=False):
    """Arguments of :func:`read_columns` and of the functions that call it: models, sampling settings and keys."""

    policy: ModelOrScorer | None
    reference: ModelOrScorer | None
    temperature: float
    sampling: Sampling | None
    keys: Mapping[str, NestedKey] | None
    scope: Scope
    options: TokenisingOptions | None


def check_reading(given: Reading) -> None:
    """Raise a TypeError for a name that is not in :class:`Reading`, or a ValueError for a temperature out of range."""
    for name in given:
        if name not in Reading.__annotations__:
            raise TypeError(no_such("there is no argument", name, Reading.__annotations__))
    as_sampling(given.get("temperature", 1.0), given.get("sampling"))


@torch.no_grad()
def read_columns(
    tensordict: TensorDictBase,
    *,
    policy: ModelOrScorer | None = None,
    reference: ModelOrScorer | None = None,
    temperature: float = 1.0,
    sampling: Sampling | None = None,
    keys: Mapping[str, NestedKey] | None = None,
    scope: Scope = "full",
    options: TokenisingOptions | None = None,
    strict: bool = True,
) -> TokenColumns:
    """Read a batch into columns on the CPU, and score it with the given models.

    Args:
        tensordict: rollouts, padded or nested, of any batch size.

    Keyword Args:
        policy: a model, a wrapper or a :class:`~torchrl_llm_kl.LogProbScorer`. Adds ``log_prob`` and ``entropy``.
        reference: a model of the same kinds. Replaces ``ref_log_prob``. Together with the policy it adds the exact ``kl``.
        temperature: divides the logits. A scorer uses its own temperature instead.
        sampling: full sampling settings instead of ``temperature``. See :class:`~torchrl_llm_kl.Sampling`.
        keys: entries to read instead of the defaults in :data:`COLUMNS` and ``("next", "reward")``, by column name.
        scope: ``"full"`` for all turns of the assistant, ``"turn"`` for the last response of each row.
        options: how text and conversations are rendered if the data has no tokens.
        strict: if False, entries that do not fit the tokens and scores that are not finite are left out. ``unread`` then has
            their errors.

    Raises:
        KeyError: if the data has no tokens, or ``keys`` has an unknown column.
        ValueError: if the assistant's tokens cannot be separated from the prompt, or an entry does not fit the tokens.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 4, 5, 6]])
        >>> td = TensorDict(tokens=TensorDict(prompt=full[:, :2], full=full, batch_size=[1]), batch_size=[1])
        >>> td["next", "log_probs", "full"] = torch.tensor([[0.0, 0.0, -1.0, -2.0]])
        >>> columns = read_columns(td)
        >>> columns.columns["old_log_prob"].tolist(), columns.places.tolist()
        ([0.0, 0.0, -1.0, -2.0], [-1, -1, 0, 1])
    """
    for name in keys or ():
        if name not in _KEYS:
            raise KeyError(no_such("no column", name, _KEYS))
    interface = ModelInterface.of(policy.model if isinstance(policy, LogProbScorer) else policy)
    wanted = {**_KEYS, **(keys or {})}
    # The result is for people and is small, so it is computed on the CPU. All entries are copied there at once.
    entries = [find_key(tensordict, key) for key in interface.token_keys]
    entries += [_find(tensordict, name, key) for name, key in wanted.items()]
    (tensordict,) = on_host(tensordict, [key for key in entries if key is not None])
    located = _locate(tensordict, interface, scope, options)
    tokens, mask = located.tokens, located.mask
    reward = find_key(tensordict, wanted.pop("reward"))
    columns, unread = _read_entries(tensordict, located, interface, wanted)
    if strict and unread:
        raise next(iter(unread.values()))
    images = read_images(tensordict, "images") or located.images
    try:
        columns |= _scored(tokens, mask, images, policy, reference, as_sampling(temperature, sampling))
    except (NotFiniteError, NotTextError) as error:
        if strict:
            raise
        unread["log_prob"] = error
    rows: dict[str, Tensor] = {}
    if reward is not None:
        rows["reward"] = outcomes(tensordict, read_column(tensordict, reward), f"{reward!r}")
    parts = tensordict.get(_PARTS, None)
    for name in sorted(parts.keys()) if is_tensor_collection(parts) else ():
        rows[f"reward/{name}"] = outcomes(tensordict, read_column(tensordict, (*_PARTS, name)), name)
    prompts = prompt_ids(tensordict)
    sampled = located.sampled and bool(torch.as_tensor(tensordict.get("sampled", True)).all())
    return TokenColumns(
        tokens,
        mask,
        columns,
        rows,
        prompts,
        sampled,
        unread,
        images is not None,
        left_out=_left_out(tensordict),
        several_versions=_several_versions(tensordict),
        unused=() if any(name in columns for name in _OF_SAMPLER) else _unused_log_probs(tensordict, entries),
    )


def _left_out(td: TensorDictBase) -> Tensor | None:
    """True for rows that are left out of training, bool ``[S]``. None without the entry ``left_out``."""
    column = read_column(td, "left_out")
    return None if column is None else sequence_integers(column, td.batch_size.numel(), "left_out").bool()


def _several_versions(td: TensorDictBase) -> bool:
    """Whether the rows, or the tokens of a row, have different policy versions."""
    key = find_key(td, "policy_version")
    values = () if key is None else leaves(read_column(td, key))
    versions = {str(v) for x in values for v in (x.flatten().tolist() if isinstance(x, Tensor) else [x])}
    return len(versions - {"None", "nan"}) > 1


def _unused_log_probs(td: TensorDictBase, read: Sequence[NestedKey | None]) -> tuple[str, ...]:
    """The entries that look like log-probs and are not in ``read``."""
    known = {unravel_key(key) for key in read if key is not None}
    names = (unravel_key(key) for key in td.keys(True, True))
    named = [key for key in names if re.search(r"log.?p(rob)?", "_".join(key) if isinstance(key, tuple) else key)]
    return tuple(sorted(repr(key) for key in named if key not in known))


def _read_entries(
    td: TensorDictBase, located: Located, interface: ModelInterface, keys: Mapping[str, NestedKey]
) -> tuple[dict[str, Tensor], dict[str, ValueError]]:
    """Read the stored columns. Also returns the errors of entries that do not fit the tokens."""
    tokens, mask = located.tokens, located.mask
    responses = response_mask(td, tokens, interface) if located.sampled else None
    columns: dict[str, Tensor] = {}
    unread: dict[str, ValueError] = {}
    for name, key in keys.items():
        entry = _find(td, name, key)
        if entry is None:
            continue
        within, repeats = mask if responses is None else responses, not name.endswith("log_prob")
        try:
            values = per_token(td, entry, tokens, within, fill=math.nan, repeats=repeats)
            (columns[name],) = widen(values.detach())
        except ValueError as error:
            unread[name] = error
    if "sampler_log_prob" in columns:  # torchrl's wrappers store 0 for the first token without computing it
        never = zeros_of_first_tokens(columns["sampler_log_prob"], mask, tokens)
        columns["sampler_log_prob"] = columns["sampler_log_prob"].masked_fill(never, math.nan)
    return columns, unread


def _locate(td: TensorDictBase, interface: ModelInterface, scope: Scope, options: TokenisingOptions | None) -> Located:
    try:
        return locate(td, interface, scope=scope, options=options)
    except ValueError:  # fails again below if the cause is another one
        if scope == "turn":
            raise
        return locate(td, interface, scope="turn", options=options)  # the data does not mark earlier turns


def _find(td: TensorDictBase, name: str, key: NestedKey) -> NestedKey | None:
    """Find the entry of a column. Log-probs at the root are the sampler's. A transform stores its own under ``"next"``."""
    if name == "old_log_prob":
        return key if read_column(td, key) is not None else None
    entry = find_log_probs(td, key) if name.endswith("log_prob") else find_key(td, key)
    if entry is None and name == "sampler_log_prob":
        for candidate in _OF_WRAPPER:
            column = read_column(td, candidate)
            if column is not None and any(row.numel() for row in column):  # the reset of an env leaves empty rows
                return candidate
    return entry


def _scored(
    tokens: Ragged,
    mask: Tensor,
    images: ImageRows | None,
    policy: ModelOrScorer | None,
    reference: ModelOrScorer | None,
    scored: Sampling,
) -> dict[str, Tensor]:
    """Score the tokens. Returns the columns of the models, NaN outside the mask."""

    def scorer(model: ModelOrScorer | None, sampling: Sampling) -> LogProbScorer | None:
        return model if model is None or isinstance(model, LogProbScorer) else LogProbScorer(model, sampling=sampling)

    own, other = scorer(policy, scored), scorer(reference, scored.of_reference)
    separate = {name: each for name, each in (("log_prob", own), ("ref_log_prob", other)) if each is not None}
    if not separate:
        return {}
    request = ScoreRequest.of(tokens, mask, images=images)
    # Another backend has no distributions, so entropy and exact KL are missing then.
    if own is None or any(log_probs_only(each.model) for each in separate.values()):
        out = {name: each.score(request) for name, each in separate.items()}
    else:
        out = own.evaluate(request, entropy=True, reference=other).per_token
    return {name: widen(x.values)[0].masked_fill(~mask, math.nan) for name, x in out.items()}
