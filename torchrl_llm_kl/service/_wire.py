"""The messages between clients and replicas: requests and replies as plain bytes, weights as a mapping of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import (
    FEATURES,
    REPLY,
    REQUEST,
    ProtocolError,
    ScoreOptions,
    ScoreRequest,
    Scores,
    is_whole,
    pack,
    short,
    unpack,
)

#: The most tokens of ``top_k``.
MAX_TOP_K = 1024
#: The most seconds of a timeout: no limit.
MAX_TIMEOUT = 1e9
#: What a request can ask for and a reply holds.
ANSWERED = FEATURES - {"grad", "reference", "ref_routing", "return_kept", "record_routing"}
# Scores of a reply: numpy's letter of their dtypes.
_COLUMNS = {
    "log_prob": "f",
    "entropy": "f",
    "top_indices": "i",
    "top_log_probs": "f",
    "tail_log_prob": "f",
    "collision": "f",
    "discriminator": "f",
    "outcomes": "f",
}


@dataclass(frozen=True, eq=False)
class Request:
    """A request to a replica."""

    scored: ScoreRequest
    options: ScoreOptions = ScoreOptions()  # noqa: RUF009  # frozen; requests with equal ones share a batch
    version: int | None = None  # required version of the weights; None for any
    caller: str = ""  # the sender; batches are fair between callers
    newest: int = 0  # latest version that the caller has seen: a replica with an older one missed an update or lost it
    suspect: bool = False  # whether a process died while it held it: it shares no batch with others
    timeout: float = MAX_TIMEOUT  # seconds until nobody waits for the answer

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.scored.tokens.values.shape[0])

    @property
    def num_sequences(self) -> int:
        """Sequences to score."""
        return int(self.scored.tokens.lengths.shape[0])

    def select(self, rows: np.ndarray) -> Request:
        """The request for some sequences, in that order."""
        return replace(self, scored=self.scored.select(torch.from_numpy(rows)))

    def digest(self) -> str:
        """Equal for requests of the same tokens, masks, options and records."""
        found = hashlib.blake2b(repr(self.options.to_dict()).encode(), digest_size=16)
        for name, array in self.scored.to_arrays().items():
            found.update(name.encode() + array.tobytes())
        return found.hexdigest()

    def pack(self) -> bytes:
        """The request as bytes."""
        head = {
            "options": self.options.to_dict(),
            "recorded": list(self.scored.recorded),
            "version": self.version,
            "caller": self.caller,
            "newest": self.newest,
            "suspect": self.suspect,
            "timeout": self.timeout,
        }
        return pack(REQUEST, head, self.scored.to_arrays())

    @classmethod
    def unpack(cls, packed: bytes) -> Request:
        """The request in ``packed``; a :class:`ProtocolError` says what is wrong with it."""
        head, arrays = unpack(packed, REQUEST)
        given, recorded, version = head.take("options"), head.take("recorded"), head.take("version")
        rest: Json = {"caller": head.text("caller"), "newest": head.whole("newest")}
        rest["suspect"] = head.flag("suspect")
        if version is not None and not is_whole(version):
            raise head.wrong("version", version, "a whole number or null")
        timeout = rest["timeout"] = head.take("timeout")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= MAX_TIMEOUT:
            raise head.wrong("timeout", timeout, f"a number of seconds from 0 to {MAX_TIMEOUT:g}")
        head.end()
        try:
            options = checked_top_k(ScoreOptions.from_dict(given))
        except ValueError as error:
            raise ProtocolError(f"a request holds invalid options: {error!s:.300}") from None
        try:
            scored = ScoreRequest.from_arrays(arrays.found)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise ProtocolError(f"{error!s:.300}") from None
        if recorded != list(scored.recorded):
            raise head.wrong("recorded", recorded, f"the fields {', '.join(scored.recorded)}")
        return cls(scored, options, version, **rest)


def checked_top_k(options: ScoreOptions) -> ScoreOptions:
    """The options; a ValueError if more tokens are asked for than a reply holds."""
    if options.top_k > MAX_TOP_K:
        raise ValueError(f"top_k must be at most {MAX_TOP_K} where a service answers, got {options.top_k}.")
    return options


@dataclass(frozen=True, eq=False)
class Reply:
    """Scores at the ``K`` masked-in tokens of a request, in nats."""

    columns: dict[str, Tensor]  # the fields of Scores that there are, by name: [K, ...]
    version: int  # of the weights that they come from

    @classmethod
    def of(cls, scores: Scores, mask: Tensor, version: int) -> Reply:
        """The scores at the tokens of ``mask [N]``, on the CPU."""
        found = {name: value.values.detach() for name, value in scores.per_token.items() if name in _COLUMNS}
        return cls({name: value[mask.to(value.device)].cpu() for name, value in found.items()}, version)

    def pack(self) -> bytes:
        """The reply as bytes; for the top ``k`` ``8k + 4`` a token."""
        arrays = {name: _narrow(name, values).numpy() for name, values in self.columns.items()}
        return pack(REPLY, {"version": self.version}, arrays)

    @classmethod
    def unpack(cls, packed: bytes) -> Reply:
        """The reply in ``packed``; a :class:`ProtocolError` says what is wrong with it."""
        head, arrays = unpack(packed, REPLY)
        version = head.whole("version")
        head.end()
        columns = {}
        for name in [name for name in _COLUMNS if name in arrays]:
            values = arrays.take(name, _COLUMNS[name], *arrays.found[name].shape)
            if name == "top_indices" and values.size and int(values.min()) < 0:
                raise ProtocolError(f"a reply holds token id {int(values.min())} among the top k, expected at least 0.")
            wide = np.float64 if values.dtype == np.float64 else np.float32
            columns[name] = torch.from_numpy(values.astype(np.int64 if name == "top_indices" else wide))
        arrays.end()
        return cls(columns, version)

    def check_answers(self, request: Request) -> None:
        """Raise a :class:`ProtocolError` unless this replies to ``request``."""
        options, count = request.options, int(request.scored.mask.sum())
        expected: dict[str, tuple[int, ...]] = {"log_prob": (count,)}
        expected |= {"entropy": (count,)} if options.entropy else {}
        if k := options.top_k:
            expected |= {"top_indices": (count, k), "top_log_probs": (count, k), "tail_log_prob": (count,)}
        if options.moments:
            expected |= {"collision": (count,), "discriminator": (count,)}
        if request.scored.top_ids is not None:
            *shape, ids = request.scored.top_ids.shape[1:]
            expected["outcomes"] = (count, *shape, ids + 1)
        found = {name: tuple(values.shape) for name, values in self.columns.items()}
        if found != expected:
            raise ProtocolError(f"a reply holds {short(found)}, expected {expected}: it answers another request.")

    def scores(self, layout: Ragged, elements: Tensor) -> Scores:
        """The scores at flat ``elements`` of ``layout``."""
        return Scores.spread(layout, elements, **self.columns)._replace(version=self.version)


def _narrow(name: str, values: Tensor) -> Tensor:
    """Scores in the type that a reply has for them."""
    if name == "top_indices":
        return values.int()
    return values if values.dtype == torch.float64 and name in ("log_prob", "entropy") else values.float()


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
