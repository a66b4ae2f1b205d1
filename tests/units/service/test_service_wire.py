"""Requests, replies and errors between clients and replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.service._errors import ProtocolError, ServiceError, ServiceOverloaded, portable
from torchrl_llm_kl.service._wire import Reply, Request, Settings

# Clients and replicas of releases with this protocol must understand one another: a change needs a new version.
PACKED_REQUEST = (
    b'KLRL\x04\x00\x01\x00\xdc\x00\x00\x00{"sequences":4,"tokens":6,"token_bytes":4,"masked":true,"settings":{"temperature":0.5,'
    b'"adapters":false,"dtype":"bfloat16","entropy":true,"remember":true},"version":3,"caller":"me/7","newest":2,"deaths":0,'
    b'"kept":null}    '
    b"\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
    b"\x05\x00\x00\x00\x00\x00\x00\x00`\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00d"
)
PACKED_WIDE_REQUEST = (
    b'KLRL\x04\x00\x01\x00\x84\x00\x00\x00{"sequences":1,"tokens":1,"token_bytes":8,"masked":false,"settings":{},"version":null,'
    b'"caller":"","newest":0,"deaths":0,"kept":null}\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00'
)
PACKED_REPLY = (
    b'KLRL\x04\x00\x02\x00d\x00\x00\x00{"scores":2,"score_bytes":4,"entropy":true,"top_k":0,"top_k_bytes":4,"version":4,'
    b'"weights":""}      '
    b"\x00\x00\x00\xbf\x00\x00\x10\xc0\x00\x00\xc0?\x00\x00\x00\x00"
)
PACKED_WIDE_REPLY = (
    b'KLRL\x04\x00\x02\x00d\x00\x00\x00{"scores":1,"score_bytes":8,"entropy":false,"top_k":0,"top_k_bytes":4,"version":0,'
    b'"weights":""}     '
    b"\x9a\x99\x99\x99\x99\x99\xb9\xbf"
)
PACKED_TOP_K = (
    b'KLRL\x04\x00\x02\x00d\x00\x00\x00{"scores":1,"score_bytes":4,"entropy":false,"top_k":2,"top_k_bytes":2,"version":1,'
    b'"weights":""}     '
    b"\x00\x00\x00\xbf\x00\x00@\xc0\x07\x00\x00\x00,\x01\x00\x00\x00\xb8\x00\xbc"
)
# Two tokens kept at the second token of the first sequence, one at its third and two at the last token.
PACKED_REPLAY = (
    b'KLRL\x04\x00\x01\x00\x84\x00\x00\x00{"sequences":4,"tokens":6,"token_bytes":4,"masked":true,"settings":{},"version":null,'
    b'"caller":"","newest":0,"deaths":0,"kept":[3,5]}'
    b"\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
    b"\x05\x00\x00\x00\x00\x00\x00\x00`\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00"
    b"\x02\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\t\x00\x00\x00`\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00d"
)
# Before there were versions.
UNVERSIONED = b"\x10\x00\x00\x00[[4, 4], [8, 8]]\x00\x00\x00\xbf\x00\x00\x10\xc0\x00\x00\xc0?\x00\x00\x00\x00"
TOP_K = Reply(
    np.array([-0.5], np.float32),
    None,
    1,
    np.array([[7, 300]], np.int32),
    np.array([[-0.5, -1.0]], np.float16),
    np.array([-3.0], np.float32),
)


def test_bytes_on_the_wire() -> None:
    mask = torch.tensor([False, True, True, False, False, True])
    settings = Settings(0.5, False, "bfloat16", True, True)
    tokens, lengths = torch.tensor([5, 0, 96, 7, 1, 2]), torch.tensor([3, 0, 1, 2])
    request = replace(Request.of(tokens, lengths, mask, settings, version=3, caller="me/7"), newest=2)
    assert request.pack() == PACKED_REQUEST
    wide = Request.of(torch.tensor([2**40]), torch.tensor([1]), None, Settings(), version=None, caller="")
    assert wide.pack() == PACKED_WIDE_REQUEST
    # The first token has a record too, which is not sent: it is not scored.
    kept = Kept(torch.tensor([8, 0, 9, 96, 2, 3]), torch.tensor([0, 1, 3, 4, 4, 4, 6]))
    replay = Request.of(tokens, lengths, mask, Settings(), version=None, caller="", kept=kept)
    assert replay.pack() == PACKED_REPLAY
    reply = Reply(np.array([-0.5, -2.25], np.float32), np.array([1.5, 0.0], np.float32), 4)
    assert reply.pack() == PACKED_REPLY
    assert Reply(np.array([-0.1]), None, 0).pack() == PACKED_WIDE_REPLY
    assert TOP_K.pack() == PACKED_TOP_K


def test_bytes_from_the_wire() -> None:
    found = Request.unpack(PACKED_REQUEST)
    assert found.tokens.tolist() == [5, 0, 96, 7, 1, 2]
    assert found.lengths.tolist() == [3, 0, 1, 2]
    assert found.flat_mask().tolist() == [False, True, True, False, False, True]
    assert found.settings == Settings(0.5, False, "bfloat16", True, True)
    assert (found.version, found.caller, found.newest) == (3, "me/7", 2)
    assert found.replay is None
    assert Request.unpack(PACKED_WIDE_REQUEST).tokens.tolist() == [2**40]
    found = Request.unpack(PACKED_REPLAY)
    assert found.replay is not None
    assert (found.replay.counts.tolist(), found.replay.ids.tolist()) == ([2, 1, 2], [0, 9, 96, 2, 3])
    kept = found.replay.kept(found.flat_mask())
    assert (kept.ids.tolist(), kept.offsets.tolist()) == ([0, 9, 96, 2, 3], [0, 0, 2, 3, 3, 3, 5])
    reply = Reply.unpack(PACKED_REPLY)
    assert reply.entropy is not None
    assert (reply.log_prob.tolist(), reply.entropy.tolist(), reply.version) == ([-0.5, -2.25], [1.5, 0.0], 4)
    assert Reply.unpack(PACKED_WIDE_REPLY).log_prob.tolist() == [-0.1]
    top = Reply.unpack(PACKED_TOP_K)
    assert top.top_ids is not None
    assert top.top_log_probs is not None
    assert top.rest_log_prob is not None
    assert (top.top_ids.tolist(), top.top_log_probs.tolist()) == ([[7, 300]], [[-0.5, -1.0]])
    assert (top.rest_log_prob.tolist(), top.version) == ([-3.0], 1)


edited, edited_replay = PACKED_REQUEST.replace, PACKED_REPLAY.replace


def speaks(kind: type, version: int) -> bytes:
    packed = PACKED_REQUEST if kind is Request else PACKED_REPLY
    return packed[:4] + version.to_bytes(2, "little") + packed[6:]


@pytest.mark.parametrize(
    ("read", "packed", "message"),
    [
        (Request, speaks(Request, 1), "client speaks version 1 .* replica version 4: .* side of the client"),
        (Request, speaks(Request, 5), "client speaks version 5 .* replica version 4: .* side of the replica"),
        (Request, speaks(Request, 3), "client speaks version 3 .* replica version 4: .* side of the client"),
        (Reply, speaks(Reply, 1), "replica speaks version 1 .* client version 4: .* side of the replica"),
        (Reply, speaks(Reply, 5), "replica speaks version 5 .* client version 4: .* side of the client"),
        (Reply, UNVERSIONED, "expected b'KLRL' and a protocol version .* the replica has a release without versions"),
        (Request, b"", "a request of 0 bytes"),
        (Request, PACKED_REPLY, r"expected a request \(kind 1\), got a message of kind 2"),
        (Request, [1], "expected a request as bytes, got list"),
        (Request, PACKED_REQUEST[:-1], "a request has 56 bytes for 4 sequences and 6 tokens, expected 57"),
        (Request, PACKED_REQUEST + b"x", "a request has 58 bytes for 4 sequences and 6 tokens, expected 57"),
        (Reply, PACKED_REPLY[:-1], "a reply has 15 bytes for 2 scores and their top 0, expected 16"),
        (Request, PACKED_REQUEST[:40], "declares a head of 220"),
        (Request, edited(b"\xdc\x00\x00\x00{", b"\xff\xff\xff\xff{"), "head of 4294967295, expected at most"),
        (Request, edited(b'{"seq', b'["seq'), "no valid JSON"),
        (Request, edited(b"0.5", b"NaN"), "no valid JSON: NaN is not a number"),
        (Request, edited(b"0.5", b"0.0"), "temperature must be a positive number, got 0.0"),
        (Request, edited(b"0.5", b"9e9").replace(b"9e9", b'"1"'), "temperature must be .* got '1'"),
        (Request, edited(b"false", b"[[1]]"), r"adapters must be True, False or a name .* got \[\[1\]\]"),
        (Request, edited(b'"bfloat16"', b'"autograd"'), "name of a floating-point type .* got 'autograd'"),
        (Request, edited(b'py":true', b'py":1234'), "entropy must be True or False, got 1234"),
        (Request, edited(b'"version":3', b'"version":-'), "no valid JSON"),
        (Request, edited(b'"version":3,', b'"version":-3'), "no valid JSON"),
        (Request, edited(b'"newest":2', b'"newest":{'), "no valid JSON"),
        (Request, edited(b'"newest"', b'"oldest"'), "a request has no field 'newest'"),
        (Request, edited(b'"me/7"', b"123456"), "caller of a request is 123456, expected a string"),
        (Request, edited(b"    \x03\x00", b"    \x07\x00"), "sequence of length 7, expected 0 to its 6 tokens"),
        (Request, edited(b"    \x03\x00", b"    \x04\x00"), "add up to 7, expected its 6 tokens"),
        (Request, PACKED_REQUEST[:-1] + b"e", "the mask of a request has bits after its 6 tokens"),
        (Request, edited_replay(b"[3,5]", b"[4,4]"), "kept tokens for 4 tokens, expected its 3 scored ones"),
        (Request, edited_replay(b"[3,5]", b"[3,6]"), r"6 tokens with \[3, 6\] kept ones, expected 93"),
        (Request, edited_replay(b"[3,5]", b"[3.5]"), r"kept of a request is \[3\.5\], expected two whole numbers"),
        (Request, edited_replay(b"[3,5]", b'"3,5"'), "kept of a request is '3,5', expected two whole numbers"),
        (Request, edited_replay(b"[3,5]", b"[-3]5"), "no valid JSON"),
        (Request, edited_replay(b"[3,5]", b"[-3] "), r"kept of a request is \[-3\], expected two whole"),
        (
            Request,
            edited_replay(b"\x01\x00\x00\x00\x02\x00\x00\x00\x00", b"\x02\x00\x00\x00\x02\x00\x00\x00\x00"),
            "numbers of kept tokens of a request add up to 6, expected its 5",
        ),
        (
            Request,
            edited_replay(b"\x01\x00\x00\x00\x02\x00\x00\x00\x00", b"\xff\xff\xff\xff\x02\x00\x00\x00\x00"),
            "a request has -1 kept tokens for one token, expected at least 0",
        ),
        (Request, edited_replay(b"\t\x00\x00\x00", b"\t\x00\x00\xff"), "token id -16777207 among the kept"),
        (Reply, PACKED_TOP_K.replace(b"\x07\x00\x00\x00", b"\x07\x00\x00\xff"), "token id -16777209 among the top 2"),
    ],
)
def test_messages_that_cannot_be_read(read: Any, packed: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read.unpack(packed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": float("inf")}, "temperature must be a positive number, got inf"),
        ({"temperature": 10**400}, "temperature must be a positive number, got 1000"),
        ({"temperature": True}, "temperature must be a positive number, got True"),
        ({"adapters": ""}, "adapters must be True, False or a name of 1 to 256"),
        ({"adapters": 1}, "adapters must be True, False"),
        ({"adapters": "\ud800"}, "adapters must be True, False"),
        ({"top_k": 1025}, "top_k must be a whole number from 0 to 1024, got 1025"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"top_k_dtype": "float64"}, "top_k_dtype must be 'float32' or 'float16'"),
        ({"keep_top_k": -1}, r"keep_top_k must be a whole number below 2\^31, 0 for all tokens, got -1"),
        ({"keep_top_k": 2.0}, "keep_top_k must be a whole number"),
        ({"keep_top_k": 2**40}, r"below 2\^31, 0 for all tokens, got 1099511627776"),
        ({"keep_top_p": 0.0}, r"keep_top_p must lie in \(0, 1\], got 0.0"),
        ({"keep_top_p": True}, "keep_top_p must lie"),
        ({"keep_min_p": float("nan")}, r"keep_min_p must lie in \[0, 1\], got nan"),
        ({"keep_min_p": "1"}, "keep_min_p must lie"),
        ({"keep_top_k": 3, "top_k": 2}, "most probable of all tokens, and Sampling"),
        ({"dtype": ["bfloat16"]}, "dtype must be the name"),
        ({"dtype": "int64"}, "dtype must be the name"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings).checked()


def test_a_reply_to_another_request() -> None:
    reply = Reply(np.zeros(2, np.float32), None, 0)
    reply.check_answers(2, Settings())
    TOP_K.check_answers(1, Settings(top_k=2))
    for count, settings in ((3, Settings()), (2, Settings(entropy=True)), (2, Settings(top_k=4))):
        with pytest.raises(ProtocolError, match="it answers another request"):
            reply.check_answers(count, settings)


@pytest.mark.parametrize(("dtype", "per_token"), [(np.float32, 8), (np.float16, 6)])
def test_bytes_of_the_top_k(dtype: type, per_token: int) -> None:
    """``8k + 4`` a token beside its log-prob, ``6k + 4`` in float16, and less than 130 for everything else."""
    n, k = 500, 64
    top = (np.zeros((n, k), np.int32), np.zeros((n, k), dtype), np.zeros(n, np.float32))
    assert len(Reply(np.zeros(n, np.float32), None, 0, *top).pack()) - n * (4 + per_token * k + 4) in range(130)


def test_a_request_is_hardly_larger_than_its_tokens() -> None:
    """4 bytes and a mask bit per token, 8 bytes per sequence, and less than 200 bytes for everything else."""
    tokens = torch.arange(4096) % 97
    packed = Request.of(tokens, torch.full((8,), 512), tokens > 3, Settings(), version=None, caller="me").pack()
    assert len(packed) < 4 * 4096 + 8 * 8 + 4096 // 8 + 200


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
