"""The messages between clients and replicas: arrays and plain values, which Ray sends; and weights by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.scoring import FEATURES, ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service._errors import ProtocolError

#: Version of the messages. A change that the other side would misread gets the next number.
PROTOCOL = 10
#: The most tokens of ``top_k``.
MAX_TOP_K = 1024
#: The features of a scorer that a service offers.
ANSWERED = FEATURES - {"grad", "reference", "ref_routing", "return_kept", "record_routing"}
#: The scores of a reply.
COLUMNS = (
    *("log_prob", "entropy", "top_indices", "top_log_probs", "tail_log_prob"),
    *("collision", "discriminator", "outcomes"),
)


class Message(TypedDict):
    """A request to a replica."""

    protocol: int
    service: str  # the id of the service that the client joined; empty for any
    arrays: dict[str, np.ndarray]
    options: Json
    version: int | None  # the required version of the weights
    newest: int  # the latest version that the client has seen
    caller: str  # identifies the thread that waits for the answer
    tries: int  # replicas that ended while they held this request


class Reply(TypedDict):
    """The answer: scores at the ``K`` masked-in tokens of a request, in nats."""

    columns: dict[str, np.ndarray]  # by the names of :data:`COLUMNS`; [K, ...]
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


def check_protocol(message: Message) -> None:
    """Raise a :class:`ProtocolError` for a message of another release."""
    if message["protocol"] != PROTOCOL:
        older = "client" if message["protocol"] < PROTOCOL else "replica"
        raise ProtocolError(
            f"the client sends version {message['protocol']} of the messages, this replica reads version {PROTOCOL}: update "
            f"torchrl_llm_kl on the side of the {older}."
        )


def read(message: Message) -> Job:
    """The request in a message."""
    request = ScoreRequest.from_arrays(message["arrays"])
    options = checked_top_k(ScoreOptions.from_dict(message["options"]))
    return Job(request, options, message["version"], message["caller"])


def checked_top_k(options: ScoreOptions) -> ScoreOptions:
    """The options; a ValueError if more tokens are asked for than a reply holds."""
    if options.top_k > MAX_TOP_K:
        raise ValueError(f"top_k must be at most {MAX_TOP_K} where a service answers, got {options.top_k}.")
    return options


def columns_of(scores: Scores, mask: Tensor) -> dict[str, Tensor]:
    """The scores at the tokens of ``mask [N]``, on the CPU; log-probs and entropies of a float64 model stay float64."""
    columns = {}
    for name, value in scores.per_token.items():
        if name in COLUMNS:
            values = value.values.detach()
            columns[name] = _narrow(name, values[mask.to(values.device)].cpu())
    return columns


def _narrow(name: str, values: Tensor) -> Tensor:
    """Scores in the type that a reply has for them."""
    if name == "top_indices":
        return values.int()
    return values if values.dtype == torch.float64 and name in ("log_prob", "entropy") else values.float()


def check_columns(columns: Mapping[str, Tensor], request: ScoreRequest, options: ScoreOptions) -> None:
    """Raise a RuntimeError unless an engine returned what was requested."""
    count, k = int(request.mask.sum()), options.top_k
    expected: dict[str, tuple[int, ...]] = {"log_prob": (count,)}
    expected |= {"entropy": (count,)} if options.entropy else {}
    expected |= {"top_indices": (count, k), "top_log_probs": (count, k), "tail_log_prob": (count,)} if k else {}
    expected |= {"collision": (count,), "discriminator": (count,)} if options.moments else {}
    if request.top_ids is not None:
        *shape, ids = request.top_ids.shape[1:]
        expected["outcomes"] = (count, *shape, ids + 1)
    shapes = {name: tuple(values.shape) for name, values in columns.items()}
    if shapes != expected:
        raise RuntimeError(f"the engine returned scores of the shapes {shapes}, expected {expected}.")


def scores_of(replies: list[Reply], request: ScoreRequest) -> Scores:
    """The scores of a request from the replies to its parts, in order."""
    first = replies[0]
    joined = {name: np.concatenate([reply["columns"][name] for reply in replies]) for name in first["columns"]}
    columns = {name: torch.from_numpy(values.copy()) for name, values in joined.items()}
    if "top_indices" in columns:
        columns["top_indices"] = columns["top_indices"].long()
    elements = request.mask.nonzero().squeeze(-1)
    return Scores.spread(request.layout, elements, **columns)._replace(version=first["version"])


def state_dict_of(weights: Any) -> dict[str, Tensor]:
    """Tensors under their ``state_dict()`` names.

    ``weights`` is a module (for a TorchRL wrapper, its model is used), a TensorDict of parameters (nested, as in torchrl's
    collectors), or a mapping.
    """
    if isinstance(weights, nn.Module):
        inner = getattr(weights, "model", None)
        wrapped = hasattr(weights, "input_mode") and isinstance(inner, nn.Module)
        tensors = dict((inner if wrapped and inner is not None else weights).state_dict())
    elif isinstance(weights, TensorDictBase):
        tensors = {key: value.data for key, value in weights.flatten_keys(".").items()}
    elif isinstance(weights, Mapping):
        tensors = dict(weights)
    else:
        raise TypeError(
            f"weights must be a module, a TensorDict or a mapping of names to tensors, got {type(weights).__name__}."
        )
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights must be tensors, got {type(value).__name__} for {name!r}.")
    return tensors
