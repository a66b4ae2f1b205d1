"""The messages between clients and replicas, and the chunks of pushed weights: arrays and plain values, which Ray sends."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl.scoring import FEATURES, ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service._errors import ProtocolError

#: Version of the messages. A change that the other side would misread gets the next number.
PROTOCOL = 11
#: The features of a scorer that a service offers.
ANSWERED = FEATURES - {"grad", "reference", "ref_routing", "return_kept", "record_routing"}
#: The scores of a reply.
COLUMNS = (
    *("log_prob", "entropy", "top_indices", "top_log_probs", "tail_log_prob"),
    *("collision", "discriminator", "outcomes"),
)
#: Bytes of a chunk of weights. A larger weight is a chunk of its own.
CHUNK = 256 * 2**20

#: Type, shape and bytes of weights by name. Replicas read numpy arrays in place, from the memory of Ray's object store.
Chunk = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


class Message(TypedDict):
    """A request to a replica."""

    protocol: int
    service: str  # id of the service that the client joined, empty for any
    id: str  # of this request, the same for all its tries
    arrays: dict[str, np.ndarray]
    options: dict[str, object]
    version: int | None  # the required version of the weights
    newest: int  # the latest version that the client has seen
    caller: str  # identifies the thread that waits for the answer
    tries: int  # replicas that ended while they held this request


class Reply(TypedDict):
    """The answer: scores at the ``K`` masked-in tokens of a request, in nats."""

    columns: dict[str, np.ndarray]  # [K, ...] each, by the names of :data:`COLUMNS`
    version: int  # of the weights


@dataclass(frozen=True, eq=False)
class Job:
    """A request as a replica reads it."""

    request: ScoreRequest
    options: ScoreOptions
    version: int | None
    caller: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.request.tokens.values.shape[0])


def read(message: Message) -> Job:
    """Reads the request from a message. Raises a :class:`ProtocolError` for a message of another release."""
    if message["protocol"] != PROTOCOL:
        older = "client" if message["protocol"] < PROTOCOL else "replica"
        raise ProtocolError(
            f"the client sends version {message['protocol']} of the messages, but this replica reads {PROTOCOL}. Update "
            f"torchrl_llm_kl on the side of the {older}."
        )
    request, options = ScoreRequest.from_arrays(message["arrays"]), ScoreOptions.from_dict(message["options"])
    return Job(request, options, message["version"], message["caller"])


def columns_of(scores: Scores, mask: Tensor) -> dict[str, Tensor]:
    """The scores at the tokens of ``mask [N]``, on the CPU. Log-probs and entropies of a float64 model stay float64."""
    columns = {}
    for name, value in scores.per_token.items():
        values = value.values.detach()[mask.to(value.values.device)].cpu()
        if name == "top_indices":
            columns[name] = values.int()
        elif name in COLUMNS:
            columns[name] = (
                values if name in ("log_prob", "entropy") and values.dtype == torch.float64 else values.float()
            )
    return columns


def scores_of(replies: list[Reply], request: ScoreRequest) -> Scores:
    """The scores of a request from the replies to its parts, in order."""
    first = replies[0]
    joined = {name: np.concatenate([reply["columns"][name] for reply in replies]) for name in first["columns"]}
    columns = {name: torch.from_numpy(values.copy()) for name, values in joined.items()}
    if "top_indices" in columns:
        columns["top_indices"] = columns["top_indices"].long()
    elements = request.mask.nonzero().squeeze(-1)
    return Scores.spread(request.layout, elements, **columns)._replace(version=first["version"])


# ------------------------------------------------------------------ weights


class PushedVersion(int):
    """The version of pushed weights: an ``int`` that :meth:`ScoringService.update_weights` returns.

    Attributes:
        missed: for each replica that did not take the weights in time, the reason. It loads them within a few seconds, and in
            any case before it answers a client that has seen this version.

    Example:
        >>> version = service.update_weights(policy)  # doctest: +SKIP
        >>> version, version.missed  # doctest: +SKIP
        (7, ())
    """

    missed: tuple[str, ...] = ()


def state_dict_of(weights: object) -> dict[str, Tensor]:
    """Returns tensors under their ``state_dict()`` names.

    Args:
        weights: a module, a mapping, or a TensorDict of parameters, nested as in torchrl's collectors. For a TorchRL wrapper
            the model inside it is used.
    """
    if isinstance(weights, nn.Module):
        inner = getattr(weights, "model", None)
        is_wrapper = hasattr(weights, "input_mode") and isinstance(inner, nn.Module)
        return dict((inner if is_wrapper and inner is not None else weights).state_dict())
    if isinstance(weights, TensorDictBase):
        return {key: value.data for key, value in weights.flatten_keys(".").items()}
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a module, a TensorDict or a mapping, got {type(weights).__name__}.")
    return dict(weights)


def chunks_of(weights: Iterable[tuple[str, Tensor]], *, size: int = CHUNK) -> Iterator[Chunk]:
    """Yields weights by name, in chunks of at most ``size`` bytes. A larger weight is a chunk of its own."""
    chunk: Chunk = {}
    held = 0
    for name, value in weights:
        data = tensor_bytes(value)
        if chunk and held + data.nbytes > size:
            yield chunk
            chunk, held = {}, 0
        chunk[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        held += data.nbytes
    if chunk:
        yield chunk


def tensor_bytes(value: Tensor) -> np.ndarray:
    """The bytes of the numbers, uint8 ``[M]``."""
    data: np.ndarray = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def tensors_of(chunk: Chunk) -> dict[str, Tensor]:
    """Returns the weights of a chunk. They share its read-only memory: do not write to them."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for name, (dtype, shape, data) in chunk.items():
            # torch takes no empty read-only array.
            flat = torch.from_numpy(data) if data.nbytes else torch.zeros(0, dtype=torch.uint8)
            tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return tensors
