"""A batch of rollouts as columns: one number for each token, and one for each sequence.

The doctor measures these columns and the inspector shows them. Shapes: ``S`` sequences, ``N`` tokens of all sequences together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
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
    locate,
    outcomes,
    per_token,
    prompt_ids,
    read_images,
    response_mask,
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
    """One number per token.

    Args:
        key: the entry of the data, where TorchRL's wrappers and this package's transforms and losses store it, or None for a
            column that is only computed.
        label: its name on a page.
        unit: of its numbers.
    """

    key: NestedKey | None
    label: str
    unit: str = "nats"


#: The columns by name, in the order of a page.
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
_KEYS = {name: column.key for name, column in COLUMNS.items() if column.key is not None} | {
    "reward": ("next", "reward")
}
#: Log-probs of the sampler, as an engine's wrapper stores them at the root.
_OF_WRAPPER = (("log_probs", "full"), ("log_probs", "response"))
#: Where :class:`~torchrl_llm_kl.tasks.FunctionReward` stores the rewards of its functions, by name.
_PARTS = ("next", "rewards")


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The tokens of a batch with all that is known of each.

    Args:
        tokens: ids of all tokens, prompts too, ``[N]``.
        mask: True at the assistant's tokens, bool ``[N]``.
        columns: numbers per token by name, float32 or wider ``[N]``; NaN where a token has none. ``log_prob``, ``entropy``
            and ``kl`` (exact) come from the given models; ``old_log_prob``, ``sampler_log_prob``, ``ref_log_prob``,
            ``kl_penalty`` and ``advantage`` from the data. All but the advantage are in nats.
        rows: numbers per sequence by name, ``[S]``: ``reward``, the outcome, and ``reward/<name>``, its named parts.
        prompts: equal numbers for equal prompts, int64 ``[S]``, or None if the data does not show the prompts.
        sampled: False if the tokens were rendered from text.
        unread: with ``strict=False``, the error of each entry that fits no token, by column; under ``log_prob``, the error of
            scoring.
        has_images: whether rows have images.
    """

    tokens: Ragged
    mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    prompts: Tensor | None = None
    sampled: bool = True
    unread: dict[str, ValueError] = field(default_factory=dict)
    has_images: bool = False

    @property
    def turns(self) -> Tensor:
        """The number of the assistant's turn that a token belongs to, from 0; -1 outside of all, int64 ``[N]``."""
        return self._count(self.mask & ~(pad(self.mask[:-1], (1, 0)) & (self.tokens.positions > 0)))

    @property
    def places(self) -> Tensor:
        """The number of a token among its sequence's masked-in tokens, from 0; -1 at all others, int64 ``[N]``."""
        return self._count(self.mask)

    def _count(self, marks: Tensor) -> Tensor:
        """How many marks a masked-in token has before it in its sequence; -1 at all others."""
        count = marks.long().cumsum(0)
        of_earlier = pad(count, (1, 0))[self.tokens.offsets[:-1]]
        return torch.where(self.mask, count - of_earlier[self.tokens.sequence_ids] - 1, -1)


class Reading(TypedDict, total=False):
    """How a batch is read, and the models that score it: the arguments of :func:`read_columns` and of its callers."""

    policy: ModelOrScorer | None
    reference: ModelOrScorer | None
    temperature: float
    sampling: Sampling | None
    keys: Mapping[str, NestedKey] | None
    scope: Scope
    options: TokenisingOptions | None


def check_reading(given: Reading) -> None:
    """Raise a TypeError for a name that is none of :class:`Reading`, a ValueError for a temperature out of range."""
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
    """Read a batch into columns on the CPU, and score it with the models that are given.

    Args:
        tensordict: rollouts, padded or nested, of any batch size.

    Keyword Args:
        policy: a model, wrapper or :class:`~torchrl_llm_kl.LogProbScorer`: adds ``log_prob`` and ``entropy``.
        reference: a model of the same kinds. It replaces ``ref_log_prob``, and with the policy adds ``kl``, exact.
        temperature: divides the logits; not for a scorer, which has its own.
        sampling: in its place. See :class:`~torchrl_llm_kl.Sampling`.
        keys: other entries than those of :data:`COLUMNS`, and of ``"reward"``, by name.
        scope: ``"full"``: all turns of the assistant; ``"turn"``: the last response of each row.
        options: how text and conversations are rendered where the data holds no tokens.
        strict: False leaves out entries that fit no token, and scores that are not finite, and says why in ``unread``.

    Raises:
        KeyError: if the data holds no tokens, or a name is not a column.
        ValueError: if the assistant's tokens cannot be told from the prompt, or an entry does not fit the tokens.

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
    # A person reads the result, so it is measured on the host. All entries come there in one copy.
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
    return TokenColumns(tokens, mask, columns, rows, prompts, located.sampled, unread, images is not None)


def _read_entries(
    td: TensorDictBase, located: Located, interface: ModelInterface, keys: Mapping[str, NestedKey]
) -> tuple[dict[str, Tensor], dict[str, ValueError]]:
    """The columns that the data holds, and the errors of entries that fit no token."""
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
    if "sampler_log_prob" in columns:  # torchrl's wrappers never compute the first token's
        never = zeros_of_first_tokens(columns["sampler_log_prob"], mask, tokens)
        columns["sampler_log_prob"] = columns["sampler_log_prob"].masked_fill(never, math.nan)
    return columns, unread


def _locate(td: TensorDictBase, interface: ModelInterface, scope: Scope, options: TokenisingOptions | None) -> Located:
    try:
        return locate(td, interface, scope=scope, options=options)
    except ValueError:
        if scope == "turn":
            raise
        return locate(td, interface, scope="turn", options=options)  # the data does not show earlier turns


def _find(td: TensorDictBase, name: str, key: NestedKey) -> NestedKey | None:
    """Where a column is. Log-probs at the root are the sampler's own, those under ``"next"`` a transform's."""
    if name == "old_log_prob":
        return key if read_column(td, key) is not None else None
    entry = find_log_probs(td, key) if name.endswith("log_prob") else find_key(td, key)
    if entry is None and name == "sampler_log_prob":
        for candidate in _OF_WRAPPER:
            column = read_column(td, candidate)
            if column is not None and any(row.numel() for row in column):  # an env's reset leaves empty rows
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
    """Columns of the models, NaN outside the mask."""

    def scorer(model: ModelOrScorer | None, sampling: Sampling) -> LogProbScorer | None:
        return model if model is None or isinstance(model, LogProbScorer) else LogProbScorer(model, sampling=sampling)

    own, other = scorer(policy, scored), scorer(reference, scored.of_reference)
    separate = {name: each for name, each in (("log_prob", own), ("ref_log_prob", other)) if each is not None}
    if not separate:
        return {}
    request = ScoreRequest.of(tokens, mask, images=images)
    if own is None or any(log_probs_only(each.model) for each in separate.values()):  # no distributions
        out = {name: each.score(request) for name, each in separate.items()}
    else:
        out = own.evaluate(request, entropy=True, reference=other).per_token
    return {name: widen(x.values)[0].masked_fill(~mask, math.nan) for name, x in out.items()}
