"""The messages between clients and replicas: requests and replies as plain bytes, weights as a mapping of tensors.

A message is a prefix of 12 bytes (a mark, the protocol version, the kind of message, the length of the head), a JSON head,
and arrays whose sizes follow from the head. Reading one checks all of it: the other side may have another release, and a
reader must take no more memory than the message has bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import Sampling
from torchrl_llm_kl.service._errors import ProtocolError

#: Version of the format below. A change that the other side would misread gets the next number.
PROTOCOL = 4
#: The most tokens of ``top_k``.
MAX_TOP_K = 1024

_PREFIX = struct.Struct("<4sHHI")  # mark, protocol, kind, bytes of the head
_MARK = b"KLRL"
_REQUEST, _REPLY = 1, 2
_READER = {_REQUEST: ("request", "client", "replica"), _REPLY: ("reply", "replica", "client")}
_MAX_HEAD = 2**14  # bytes
_MAX_TEXT = 256  # characters of a caller's or an adapter's name
_MAX_WHOLE = 2**63 - 1
_FLOAT_TYPES = {
    name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype) and found.is_floating_point
}


# ------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Settings:
    """How to score; requests with equal settings share a batch."""

    temperature: float = 1.0  # divides the logits
    adapters: bool | str = True  # False for the base model of a PEFT model; or one adapter's name
    dtype: str | None = None  # of the body, by autocast: "bfloat16"; None for the model's own
    entropy: bool = False  # whether to return entropies
    remember: bool = False  # whether to cache keys and values for requests that continue these sequences
    deterministic: bool = False  # whether scores must not depend on the other requests of a batch
    top_k: int = 0  # number of most probable tokens to return with their log-probs, and the log-prob of the rest
    top_k_dtype: str = "float32"  # of these log-probs in the reply; or "float16"
    keep_top_k: int = 0  # what the sampler of the tokens left: its top-k, 0 for all tokens
    keep_top_p: float = 1.0  # then top-p, 1 for all
    keep_min_p: float = 0.0  # then min-p, 0 for all

    @property
    def sampling(self) -> Sampling:
        """The temperature, and what the sampler left."""
        return Sampling(self.temperature, self.keep_top_k, self.keep_top_p, self.keep_min_p)

    def with_sampling(self, sampling: Sampling) -> Settings:
        """These settings, for tokens sampled so."""
        k, p, m = sampling.truncation
        return replace(self, temperature=sampling.temperature, keep_top_k=k, keep_top_p=p, keep_min_p=m)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """``dtype`` as torch's object; a ValueError if torch has no floating-point type of that name."""
        if self.dtype is None:
            return None
        found = _FLOAT_TYPES.get(self.dtype) if isinstance(self.dtype, str) else None
        if found is None:
            raise ValueError(
                f"dtype must be the name of a floating-point type such as 'bfloat16', got {_short(self.dtype)}."
            )
        return found

    def checked(self) -> Settings:
        """These settings; a ValueError that names the first one of a wrong type or outside its range."""
        number = self.temperature
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < _real(number) < math.inf:
            raise ValueError(f"temperature must be a positive number, got {_short(number)}.")
        if not isinstance(self.adapters, bool) and not _is_text(self.adapters, least=1):
            raise ValueError(
                f"adapters must be True, False or a name of 1 to {_MAX_TEXT} characters, got {_short(self.adapters)}."
            )
        for name in ("entropy", "remember", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {_short(getattr(self, name))}.")
        if not _is_whole(self.top_k, MAX_TOP_K):
            raise ValueError(f"top_k must be a whole number from 0 to {MAX_TOP_K}, got {_short(self.top_k)}.")
        if self.top_k_dtype not in ("float32", "float16"):
            raise ValueError(f"top_k_dtype must be 'float32' or 'float16', got {_short(self.top_k_dtype)}.")
        if not _is_whole(self.keep_top_k, 2**31 - 1):
            raise ValueError(
                f"keep_top_k must be a whole number below 2^31, 0 for all tokens, got {_short(self.keep_top_k)}."
            )
        shares = {"keep_top_p": self.keep_top_p, "keep_min_p": self.keep_min_p}
        for name, share in shares.items():
            if not (_is_share(share) and (name == "keep_min_p" or share > 0)):
                raise ValueError(
                    f"{name} must lie in {'[0' if name == 'keep_min_p' else '(0'}, 1], got {_short(share)}."
                )
        if self.top_k and self.sampling.truncates:
            raise ValueError(
                f"top_k={self.top_k} returns the most probable of all tokens, and {self.sampling} leaves some of them out."
            )
        _ = self.torch_dtype  # raises
        return replace(
            self, temperature=float(number), keep_top_p=float(self.keep_top_p), keep_min_p=float(self.keep_min_p)
        )


_DEFAULTS = Settings()
_NAMES = tuple(field.name for field in fields(Settings))


# ------------------------------------------------------------------ requests and replies


@dataclass(frozen=True, eq=False)
class Replay:
    """The tokens that a sampler kept at each of the ``K`` scored tokens of a request."""

    counts: np.ndarray  # int32 [K]
    ids: np.ndarray  # theirs, one token after another: int32 [M]

    @classmethod
    def of(cls, kept: Kept, mask: Tensor) -> Replay:
        """From those of all tokens; ``mask [N]`` is True at the scored ones. A ValueError for ids that are none."""
        chosen = kept.take(mask.nonzero().squeeze(-1))
        if len(chosen.ids) and not (int(chosen.ids.min()) >= 0 and int(chosen.ids.max()) < 2**31):
            raise ValueError(
                f"kept.ids holds token ids from {int(chosen.ids.min())} to {int(chosen.ids.max())}: expected 0 to 2^31 - 1."
            )
        return cls(chosen.offsets.diff().int().numpy(), chosen.ids.int().numpy())

    def take(self, chosen: np.ndarray) -> Replay:
        """Those of some scored tokens, given by a boolean ``[K]`` or by their numbers, in that order."""
        where = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        counts, ends = self.counts[where].astype(np.int64), np.cumsum(self.counts, dtype=np.int64)
        return Replay(self.counts[where], self.ids[spans(ends[where] - counts, counts)])

    def kept(self, mask: Tensor) -> Kept:
        """Those of all tokens, none where the ``mask [N]`` is False."""
        counts = torch.zeros(mask.shape[0], dtype=torch.long)
        counts[mask] = torch.from_numpy(self.counts.astype(np.int64))
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return Kept(torch.from_numpy(self.ids.astype(np.int64)), offsets)


@dataclass(frozen=True, eq=False)
class Request:
    """Sequences to score, concatenated."""

    tokens: np.ndarray  # int32 or int64 [N]
    lengths: np.ndarray  # int64 [S]
    mask: np.ndarray | None  # packed bits of a boolean [N]; None for all but the first token of each sequence
    settings: Settings
    version: int | None = None  # required version of the weights; None for any
    caller: str = ""  # the sender; batches are fair between callers
    newest: int = 0  # latest version that the caller has seen: a replica with an older one missed an update or lost it
    deaths: int = 0  # replicas that died while they held it: it shares no batch with others
    replay: Replay | None = None  # what the sampler kept at the scored tokens, to score over these alone

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor | None,
        settings: Settings,
        *,
        version: int | None,
        caller: str,
        kept: Kept | None = None,
    ) -> Request:
        """From flat integer tokens ``[N]``, lengths ``[S]``, a boolean mask ``[N]`` and what was kept at each token.

        A TypeError for other dtypes.
        """
        values = tokens.detach().cpu()
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"token ids must be whole numbers (int64), got {values.dtype}.")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"the mask must be boolean, got {mask.dtype}.")
        narrow = values.numel() == 0 or (int(values.max()) < 2**31 and int(values.min()) >= -(2**31))
        ids = (values.int() if narrow else values.long()).numpy()
        bits = None if mask is None else np.packbits(mask.detach().cpu().numpy())
        found = cls(ids, lengths.cpu().numpy(), bits, settings, version, caller)
        return found if kept is None else replace(found, replay=Replay.of(kept, found.flat_mask()))

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def rows(self) -> list[Tensor]:
        """Token ids of each sequence, int64."""
        return list(torch.from_numpy(self.tokens.astype(np.int64)).split(self.lengths.tolist()))

    def flat_mask(self) -> Tensor:
        """True at the tokens to score; ``[N]``."""
        if self.mask is not None:
            return torch.from_numpy(np.unpackbits(self.mask, count=self.num_tokens).astype(bool))
        starts = np.cumsum(self.lengths) - self.lengths
        mask = torch.ones(self.num_tokens, dtype=torch.bool)
        mask[torch.from_numpy(starts[self.lengths > 0])] = False
        return mask

    def digest(self) -> str:
        """Equal for requests of the same tokens, masks, settings and kept tokens."""
        found = hashlib.blake2b(json.dumps(astuple(self.settings)).encode(), digest_size=16)
        kept = () if self.replay is None else (self.replay.counts, self.replay.ids)
        for array in (self.lengths.astype(np.int64), self.tokens.astype(np.int64), self.mask, *kept):
            found.update(b"" if array is None else array.tobytes())
        return found.hexdigest()

    def pack(self) -> bytes:
        """The request as bytes: 4 or 8 for a token, 8 for a sequence, a bit for a token if there is a mask.

        A replay takes 4 for each scored token and for each one that was kept.
        """
        counts, ids = (None, None) if self.replay is None else (self.replay.counts, self.replay.ids)
        head = {
            "sequences": int(self.lengths.shape[0]),
            "tokens": self.num_tokens,
            "token_bytes": self.tokens.dtype.itemsize,
            "masked": self.mask is not None,
            "settings": {
                name: value for name in _NAMES if (value := getattr(self.settings, name)) != getattr(_DEFAULTS, name)
            },
            "version": self.version,
            "caller": self.caller,
            "newest": self.newest,
            "deaths": self.deaths,
            "kept": None if counts is None or ids is None else [int(counts.shape[0]), int(ids.shape[0])],
        }
        return _join(_REQUEST, head, self.lengths.astype(np.int64), self.tokens, counts, ids, self.mask)

    @classmethod
    def unpack(cls, packed: bytes) -> Request:
        """The request in ``packed``; a :class:`ProtocolError` says what is wrong with it."""
        head, arrays = _split(packed, _REQUEST)
        sequences, tokens = head.whole("sequences"), head.whole("tokens")
        width, masked = head.one_of("token_bytes", (4, 8)), head.flag("masked")
        given = head.take("settings")
        version, caller, newest = head.take("version"), head.text("caller"), head.whole("newest")
        deaths, kept = head.whole("deaths"), head.take("kept")
        if kept is not None and not (isinstance(kept, list) and len(kept) == 2 and all(map(_is_whole, kept))):
            raise head.wrong("kept", kept, "two whole numbers, of scored and of kept tokens, or null")
        if not isinstance(given, dict) or not given.keys() <= set(_NAMES):
            raise head.wrong("settings", given, f"an object with some of the names {', '.join(_NAMES)}")
        if version is not None and not _is_whole(version):
            raise head.wrong("version", version, "a whole number or null")
        head.end()
        try:
            settings = Settings(**given).checked()
        except ValueError as error:
            raise ProtocolError(f"a request holds invalid settings: {error}") from None
        bits = (tokens + 7) // 8 if masked else 0
        content = f"{sequences} sequences and {tokens} tokens" + (f" with {kept} kept ones" if kept else "")
        arrays.expect(sequences * 8 + tokens * width + 4 * sum(kept or ()) + bits, content)
        lengths, ids = arrays.next("<i8", sequences), arrays.next(f"<i{width}", tokens)
        replay = None if kept is None else Replay(*(arrays.next("<i4", count) for count in kept))
        mask = arrays.next("u1", bits) if masked else None
        if sequences and not (int(lengths.min()) >= 0 and int(lengths.max()) <= tokens):
            wrong = lengths[(lengths < 0) | (lengths > tokens)][0]
            raise ProtocolError(f"a request holds a sequence of length {wrong}, expected 0 to its {tokens} tokens.")
        if int(lengths.sum()) != tokens:
            raise ProtocolError(
                f"the lengths of a request add up to {int(lengths.sum())}, expected its {tokens} tokens."
            )
        if mask is not None and tokens % 8 and int(mask[-1]) & (0xFF >> tokens % 8):
            raise ProtocolError(f"the mask of a request has bits after its {tokens} tokens, expected zeros there.")
        found = cls(ids, lengths, mask, settings, version, caller, newest, deaths, replay)
        if replay is not None:
            found._check_replay(replay)
        return found

    def _check_replay(self, replay: Replay) -> None:
        """Raise a :class:`ProtocolError` unless the kept tokens belong to the scored ones."""
        counts, ids = replay.counts, replay.ids
        scored = int(self.flat_mask().sum())
        if counts.shape[0] != scored:
            raise ProtocolError(
                f"a request has kept tokens for {counts.shape[0]} tokens, expected its {scored} scored ones."
            )
        if scored and int(counts.min()) < 0:
            raise ProtocolError(f"a request has {int(counts.min())} kept tokens for one token, expected at least 0.")
        total = int(counts.sum(dtype=np.int64))
        if total != ids.shape[0]:
            raise ProtocolError(
                f"the numbers of kept tokens of a request add up to {total}, expected its {ids.shape[0]}."
            )
        if total and int(ids.min()) < 0:
            raise ProtocolError(f"a request holds token id {int(ids.min())} among the kept ones, expected at least 0.")


@dataclass(frozen=True, eq=False)
class Reply:
    """Scores at the ``K`` masked-in tokens of a request, in nats."""

    log_prob: np.ndarray  # float32 or float64 [K]
    entropy: np.ndarray | None  # same type, [K]; None if not requested
    version: int  # of the weights that they come from
    top_ids: np.ndarray | None = None  # the most probable tokens, in order: int32 [K, k]; None if not requested
    top_log_probs: np.ndarray | None = None  # theirs: float32 or float16 [K, k]
    rest_log_prob: np.ndarray | None = None  # log of the total probability of all other tokens: float32 [K]
    weights: str = ""  # digest of the push that made this version; empty before the first one

    def pack(self) -> bytes:
        """The reply as bytes; for the top ``k`` ``8k + 4`` a token, or ``6k + 4`` in float16."""
        ids, values, rest = self.top_ids, self.top_log_probs, self.rest_log_prob
        head = {
            "scores": int(self.log_prob.shape[0]),
            "score_bytes": self.log_prob.dtype.itemsize,
            "entropy": self.entropy is not None,
            "top_k": 0 if ids is None else int(ids.shape[1]),
            "top_k_bytes": 4 if values is None else values.dtype.itemsize,
            "version": self.version,
            "weights": self.weights,
        }
        return _join(_REPLY, head, self.log_prob, self.entropy, rest, ids, values)

    @classmethod
    def unpack(cls, packed: bytes) -> Reply:
        """The reply in ``packed``; a :class:`ProtocolError` says what is wrong with it."""
        head, arrays = _split(packed, _REPLY)
        count, width, entropy = head.whole("scores"), head.one_of("score_bytes", (4, 8)), head.flag("entropy")
        k, narrow = head.whole("top_k", MAX_TOP_K), head.one_of("top_k_bytes", (2, 4))
        version, weights = head.whole("version"), head.text("weights")
        head.end()
        top_k = (4 + k * (4 + narrow)) if k else 0
        arrays.expect(count * ((1 + entropy) * width + top_k), f"{count} scores and their top {k}")
        log_prob = arrays.next(f"<f{width}", count)
        entropies = arrays.next(f"<f{width}", count) if entropy else None
        if not k:
            return cls(log_prob, entropies, version, weights=weights)
        rest, ids = arrays.next("<f4", count), arrays.next("<i4", count * k).reshape(count, k)
        values = arrays.next(f"<f{narrow}", count * k).reshape(count, k)
        if count and int(ids.min()) < 0:
            raise ProtocolError(f"a reply holds token id {int(ids.min())} among the top {k}, expected at least 0.")
        return cls(log_prob, entropies, version, ids, values, rest, weights)

    def check_answers(self, count: int, settings: Settings) -> None:
        """Raise a :class:`ProtocolError` unless this replies to a request for ``count`` scores with ``settings``."""
        k = 0 if self.top_ids is None else int(self.top_ids.shape[1])
        found = (int(self.log_prob.shape[0]), self.entropy is not None, k)
        expected = (count, settings.entropy, settings.top_k)
        if found != expected:
            names = ("scores", "entropy", "top_k")
            raise ProtocolError(
                f"a reply holds {dict(zip(names, found, strict=True))}, expected "
                f"{dict(zip(names, expected, strict=True))}: it answers another request."
            )


# ------------------------------------------------------------------ bytes


class _Head:
    """The fields of a message, each read once with its type and range."""

    def __init__(self, fields: dict[str, Any], what: str) -> None:
        self._fields, self._what = fields, what

    def take(self, name: str) -> Any:
        if name not in self._fields:
            raise ProtocolError(f"a {self._what} has no field {name!r}.")
        return self._fields.pop(name)

    def whole(self, name: str, most: int = _MAX_WHOLE) -> int:
        value = self.take(name)
        if not _is_whole(value, most):
            raise self.wrong(name, value, f"a whole number from 0 to {most}")
        return int(value)

    def one_of(self, name: str, choices: tuple[int, ...]) -> int:
        value = self.take(name)
        if not _is_whole(value) or value not in choices:
            raise self.wrong(name, value, f"one of {choices}")
        return int(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not _is_text(value):
            raise self.wrong(name, value, f"a string of at most {_MAX_TEXT} characters")
        return str(value)

    def wrong(self, name: str, value: Any, expected: str) -> ProtocolError:
        return ProtocolError(f"{name} of a {self._what} is {_short(value)}, expected {expected}.")

    def end(self) -> None:
        if self._fields:
            raise ProtocolError(f"a {self._what} has unknown fields: {_short(sorted(self._fields))}.")


class _Arrays:
    """The arrays of a message, in order."""

    def __init__(self, view: memoryview, what: str) -> None:
        self._view, self._what = view, what

    def expect(self, size: int, content: str) -> None:
        """Raise a :class:`ProtocolError` unless there are ``size`` bytes for the ``content``."""
        if self._view.nbytes != size:
            raise ProtocolError(f"a {self._what} has {self._view.nbytes} bytes for {content}, expected {size}.")

    def next(self, dtype: str, count: int) -> np.ndarray:
        end = np.dtype(dtype).itemsize * count
        found: np.ndarray = np.frombuffer(self._view[:end], dtype)
        self._view = self._view[end:]
        return found


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start, start + 1, ...`` for each start, ``length`` numbers of each.

    Example:
        >>> spans(np.array([4, 9]), np.array([2, 1])).tolist()
        [4, 5, 9]
    """
    before = np.cumsum(lengths) - lengths
    found: np.ndarray = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return found


def _join(kind: int, head: Mapping[str, object], *arrays: np.ndarray | None) -> bytes:
    """One object, which Ray sends faster than several. The head is padded so that the arrays are aligned."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % 8)
    little = [x.astype(x.dtype.newbyteorder("<"), copy=False) for x in arrays if x is not None]
    parts = [array.tobytes() for array in little]
    return b"".join((_PREFIX.pack(_MARK, PROTOCOL, kind, len(text)), text, *parts))


def _split(packed: bytes, kind: int) -> tuple[_Head, _Arrays]:
    what, sender, reader = _READER[kind]
    if not isinstance(packed, (bytes, bytearray)):
        raise ProtocolError(f"expected a {what} as bytes, got {type(packed).__name__}.")
    view = memoryview(packed)
    start = bytes(view[:4])
    if len(view) < _PREFIX.size or start != _MARK:
        raise ProtocolError(
            f"a {what} of {len(view)} bytes begins with {start!r}, expected {_MARK!r} and a protocol version (here "
            f"{PROTOCOL}): it is damaged, or the {sender} has a release without versions. Update torchrl_llm_kl there."
        )
    _, protocol, found, size = _PREFIX.unpack_from(view)
    if protocol != PROTOCOL:
        older = sender if protocol < PROTOCOL else reader
        raise ProtocolError(
            f"the {sender} speaks version {protocol} of the protocol, this {reader} version {PROTOCOL}: update "
            f"torchrl_llm_kl on the side of the {older}."
        )
    if found != kind:
        raise ProtocolError(f"expected a {what} (kind {kind}), got a message of kind {found}.")
    end = _PREFIX.size + size
    if size > _MAX_HEAD or end > len(view):
        raise ProtocolError(f"a {what} of {len(view)} bytes declares a head of {size}, expected at most {_MAX_HEAD}.")
    text = bytes(view[_PREFIX.size : end])
    try:
        fields = json.loads(text.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ProtocolError(f"the head of a {what} is no valid JSON: {error!s:.100}.") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"the head of a {what} is {_short(fields)}, expected a JSON object.")
    return _Head(fields, what), _Arrays(view[end:], what)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _is_whole(value: Any, most: int = _MAX_WHOLE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= _real(value) <= 1


def _is_text(value: Any, least: int = 0) -> bool:
    """Whether it is a string of at least ``least`` characters, all of which can be encoded."""
    if not isinstance(value, str) or not least <= len(value) <= _MAX_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _real(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    """A value in an error message; deep or long ones are cut."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------ weights


def state_dict_of(weights: Any) -> dict[str, Tensor]:
    """Tensors under their ``state_dict()`` names.

    ``weights`` is a module (for a TorchRL wrapper, its model is used), a TensorDict of parameters (nested, as in torchrl's
    collectors), or a mapping.
    """
    if isinstance(weights, nn.Module):
        inner = getattr(weights, "model", None)
        wrapped = hasattr(weights, "input_mode") and isinstance(inner, nn.Module)
        found = dict((inner if wrapped and inner is not None else weights).state_dict())
    elif isinstance(weights, TensorDictBase):
        found = {key: value.data for key, value in weights.flatten_keys(".").items()}
    elif isinstance(weights, Mapping):
        found = dict(weights)
    else:
        raise TypeError(
            f"weights must be a module, a TensorDict or a mapping of names to tensors, got {type(weights).__name__}."
        )
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights must be tensors, got {type(value).__name__} for {name!r}.")
    return found
