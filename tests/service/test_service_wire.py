"""Requests, replies and errors between clients and replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from torchrl_llm_kl.service._errors import ServiceError, ServiceOverloaded, portable
from torchrl_llm_kl.service._wire import Reply, Request, Settings

# What the first release sent: clients and replicas of different releases must understand one another.
PACKED_REQUEST = (
    b'J\x00\x00\x00[[4, true, 0.5, false, "bfloat16", true, true, 3, "me/7", 2], [32, 24, 1]]'
    b"\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
    b"\x05\x00\x00\x00\x00\x00\x00\x00`\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00d"
)
PACKED_WIDE_REQUEST = (
    b'@\x00\x00\x00[[8, false, 1.0, true, null, false, false, null, "", 0], [8, 8]]'
    b"\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00"
)
PACKED_REPLY = b"\x10\x00\x00\x00[[4, 4], [8, 8]]\x00\x00\x00\xbf\x00\x00\x10\xc0\x00\x00\xc0?\x00\x00\x00\x00"
PACKED_WIDE_REPLY = b"\r\x00\x00\x00[[8, 0], [8]]\x9a\x99\x99\x99\x99\x99\xb9\xbf"


def test_bytes_on_the_wire() -> None:
    mask = torch.tensor([False, True, True, False, False, True])
    settings = Settings(0.5, False, "bfloat16", True, True)
    tokens, lengths = torch.tensor([5, 0, 96, 7, 1, 2]), torch.tensor([3, 0, 1, 2])
    request = replace(Request.of(tokens, lengths, mask, settings, version=3, caller="me/7"), newest=2)
    assert request.pack() == PACKED_REQUEST
    wide = Request.of(torch.tensor([2**40]), torch.tensor([1]), None, Settings(), version=None, caller="")
    assert wide.pack() == PACKED_WIDE_REQUEST
    reply = Reply(np.array([-0.5, -2.25], np.float32), np.array([1.5, 0.0], np.float32), 4)
    assert reply.pack() == PACKED_REPLY
    assert Reply(np.array([-0.1]), None, 0).pack() == PACKED_WIDE_REPLY


def test_bytes_from_the_wire() -> None:
    found = Request.unpack(PACKED_REQUEST)
    assert found.tokens.tolist() == [5, 0, 96, 7, 1, 2]
    assert found.lengths.tolist() == [3, 0, 1, 2]
    assert found.flat_mask().tolist() == [False, True, True, False, False, True]
    assert found.settings == Settings(0.5, False, "bfloat16", True, True)
    assert (found.version, found.caller, found.newest) == (3, "me/7", 2)
    assert Request.unpack(PACKED_WIDE_REQUEST).tokens.tolist() == [2**40]
    reply = Reply.unpack(PACKED_REPLY)
    assert reply.entropy is not None
    assert (reply.log_prob.tolist(), reply.entropy.tolist(), reply.version) == ([-0.5, -2.25], [1.5, 0.0], 4)
    assert Reply.unpack(PACKED_WIDE_REPLY).log_prob.tolist() == [-0.1]


@pytest.mark.parametrize("top", [96, 2**31 - 1, 2**40])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_requests_survive_packing(top: int, masked: bool, deterministic: bool) -> None:
    tokens, lengths = torch.tensor([5, 0, top, 7, 1, 2]), torch.tensor([3, 0, 1, 2])
    mask = torch.tensor([False, True, True, False, False, True]) if masked else None
    settings = Settings(0.5, False, "bfloat16", True, True, deterministic)
    packed = Request.of(tokens, lengths, mask, settings, version=3, caller="me").pack()
    assert type(packed) is bytes
    found = Request.unpack(packed)
    assert torch.equal(torch.cat(found.rows()), tokens)
    assert [len(row) for row in found.rows()] == lengths.tolist()
    assert found.flat_mask().tolist() == (mask.tolist() if masked else [False, True, True, False, False, True])
    assert (found.settings, found.version, found.caller, found.num_tokens) == (settings, 3, "me", 6)


def test_a_request_is_hardly_larger_than_its_tokens() -> None:
    """4 bytes and a mask bit per token, 8 bytes per sequence, and less than 200 bytes for everything else."""
    tokens = torch.arange(4096) % 97
    packed = Request.of(tokens, torch.full((8,), 512), tokens > 3, Settings(), version=None, caller="me").pack()
    assert len(packed) < 4 * 4096 + 8 * 8 + 4096 // 8 + 200


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_replies_survive_packing(dtype: type) -> None:
    reply = Reply(np.array([-0.1, -2.5], dtype), np.array([1.5, 0.0], dtype), 4)
    packed = reply.pack()
    assert type(packed) is bytes
    found = Reply.unpack(packed)
    assert found.log_prob.dtype == dtype
    assert found.log_prob.tolist() == reply.log_prob.tolist()
    assert found.entropy is not None
    assert found.entropy.tolist() == [1.5, 0.0]
    assert found.version == 4
    assert Reply.unpack(Reply(reply.log_prob, None, 0).pack()).entropy is None


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (torch.tensor([1.5, 2.0]), None, "token ids must be whole numbers"),
        (torch.tensor([True, False]), None, "token ids must be whole numbers"),
        (torch.tensor([1, 2]), torch.ones(2), "the mask must be boolean"),
    ],
)
def test_invalid_requests(tokens: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Request.of(tokens, torch.tensor([2]), mask, Settings(), version=None, caller="")


class Unpicklable(ValueError):
    def __init__(self, message: str, *, where: object) -> None:
        super().__init__(message)
        self.where = where


def test_errors_that_cannot_be_pickled_keep_their_message() -> None:
    assert isinstance(portable(ServiceOverloaded("full")), ServiceOverloaded)
    found = portable(Unpicklable("too long", where=lambda: None))
    assert type(found) is ServiceError
    assert str(found) == "Unpicklable: too long"
