"""A small server that returns the log-probs of prompts from a toy model, as vLLM and SGLang document it.

It runs in threads of this process (:class:`PromptServer`), computes with plain transformers, and has a switch for each known
trap of the servers.

``make engines`` compared the switches with vLLM 0.32.0. The server behaves as with ``max_logprobs``, ``key``, ``seed`` and
``fails``. It does not behave as with ``forbids``, ``cache``, ``salts``, ``retokenises`` and ``starts``.
``recomputes`` is SGLang's. ``odd`` and ``delay`` imitate a proxy and a busy server.
"""

import contextlib
import json
import math
import random
import socket
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from toy_models import tiny_model

MODEL = "toy"
FIXED = {
    "cache": "",  # "null": tokens in the cache have no scores; "missing": no entries; "stale": numbers of other requests
    "salts": True,  # whether cache_salt keeps requests apart
    "recomputes": True,  # whether logprob_start_len recomputes what is in the cache
    "retokenises": False,  # whether one token comes back as another
    "starts": False,  # whether a start token is added
    "adds": 0.0,  # added to all log-probs
    "forbids": None,  # a token whose logit is -inf
    "fails": [],  # statuses of the next replies; 0 drops the connection
    "delay": 0.0,  # seconds of each reply
    "seed": 0,  # seed of the model
    "max_logprobs": 20,
    "key": None,
    "odd": False,  # whether to answer with JSON of another form
}


class Refused(Exception):
    """A request that the server refuses, as opposed to an error in this file."""


@cache
def served(seed):
    return tiny_model(seed=seed).double()


def logprobs(position):
    """As vLLM sends them."""
    ranked = enumerate(position.items(), start=1)
    return {str(i): {"logprob": max(x, -9999.0), "rank": rank, "decoded_token": f"<{i}>"} for rank, (i, x) in ranked}


class Toy:
    """The prefix cache, and the log-probs."""

    def __init__(self):
        self.switches = dict(FIXED)
        self.requests = []
        self.cached = set()
        self.lock = threading.Lock()

    def positions(self, ids, k):
        """At each position the log-probs of the token and of the ``k`` best tokens, by id. None for the first position."""
        s = self.switches
        if not all(0 <= token < 97 for token in ids):
            raise Refused("Token id is out of vocabulary")
        if len(ids) > 64:
            raise Refused("This model's maximum context length is 64 tokens")
        with torch.no_grad():
            logits = served(s["seed"])(torch.tensor([ids])).logits[0, :-1]
        if s["forbids"] is not None:
            logits[:, s["forbids"]] = -torch.inf
        log_probs = logits.log_softmax(-1) + s["adds"]
        best = zip(ids[1:], log_probs, log_probs.topk(k).indices.tolist(), strict=True)
        return [None, *({i: float(row[i]) for i in (token, *others)} for token, row, others in best)]

    def in_cache(self, ids, salt):
        """The number of leading tokens that are in the cache from earlier requests."""
        with self.lock:
            known = [n for n in range(len(ids)) if (salt, *ids[:n]) in self.cached]
            self.cached |= {(salt, *ids[:n]) for n in range(1, len(ids) + 1)}
        return max(known, default=0) if self.switches["cache"] else 0

    def vllm(self, body):
        s = self.switches
        if body["model"] != MODEL:
            raise FileNotFoundError(f"The model `{body['model']}` does not exist.")
        if body["max_tokens"] < 1 or body["prompt_logprobs"] > s["max_logprobs"]:
            raise Refused("Requested prompt logprobs is greater than max allowed")
        sent = body["prompt"]
        ids = ([0] if s["starts"] else []) + [96 if s["retokenises"] and t == 5 else t for t in sent]
        found = self.positions(ids, body["prompt_logprobs"])
        cached = self.in_cache(ids, body.get("cache_salt") if s["salts"] else None)
        for t in range(1, cached):
            if s["cache"] == "null":
                found[t] = None
            elif s["cache"] == "stale":
                found[t] = {token: -20 * random.random() for token in found[t] or ()}
        if s["cache"] == "missing":
            found = [None, *found[max(cached, 1) :]]
        entries = [position and logprobs(position) for position in found]
        choice = {"index": 0, "text": "<1>", "prompt_logprobs": entries}
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return {"object": "text_completion", "model": MODEL, "choices": [choice]}

    def sglang(self, body):
        s = self.switches
        ids = ([0] if s["starts"] else []) + [96 if s["retokenises"] and t == 5 else t for t in body["input_ids"]]
        start, k = body.get("logprob_start_len", -1), body["top_logprobs_num"]
        assert body["return_logprob"]
        found = self.positions(ids, max(k, 1))
        cached = self.in_cache(ids, None)
        if s["recomputes"] and start == 0:
            cached = 0  # all of the input is computed again
        first = len(ids) - 1 if start < 0 else max(start, cached if s["cache"] == "missing" else 0)
        entries = [[None, ids[first], None]]
        tops = [None]
        for t in range(first + 1, len(ids)):
            position = found[t] or {}
            gone = s["cache"] == "null" and t < cached
            value = None if gone or math.isinf(position[ids[t]]) else position[ids[t]]
            entries.append([value, ids[t], None])
            best = sorted(((x, i, None) for i, x in position.items() if x > -math.inf), reverse=True)[:k]
            tops.append(None if gone else best)
        info = {"prompt_tokens": len(ids), "cached_tokens": cached, "input_token_logprobs": entries}
        if k:
            info["input_top_logprobs"] = tops
        return {"text": "", "meta_info": info}


class Handler(BaseHTTPRequestHandler):
    server: "PromptServer"
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/get_model_info":
            self.reply(200, {"model_path": MODEL})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        toy = self.server.toy
        toy.requests.append(body)
        time.sleep(toy.switches["delay"])
        with toy.lock:
            status = toy.switches["fails"].pop(0) if toy.switches["fails"] else 200
        if status == 0:
            self.close_connection = True
            return None
        if status == 299:
            return self.reply(200, None, b"<html>not JSON</html>")
        if status != 200:
            return self.reply(status, {"error": {"message": "switched off", "code": status}})
        if toy.switches["key"] and self.headers["Authorization"] != f"Bearer {toy.switches['key']}":
            return self.reply(401, {"error": "Unauthorized"})
        try:
            answer = {"/v1/completions": toy.vllm, "/generate": toy.sglang}[self.path](body)
        except (Refused, FileNotFoundError) as error:
            return self.reply(400 if isinstance(error, Refused) else 404, {"error": {"message": str(error)}})
        self.reply(200, {"detail": "ok"} if toy.switches["odd"] else answer)

    def reply(self, status, content, data=b""):
        data = data or json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class PromptServer(ThreadingHTTPServer):
    """The server, and its switches."""

    daemon_threads = True

    def __init__(self, port=0, handler=Handler):
        super().__init__(("127.0.0.1", port), handler)
        self.toy, self._open = Toy(), list[socket.socket]()
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @contextlib.contextmanager
    def set(self, **switches):
        """Context in which switches differ from their defaults."""
        assert switches.keys() <= FIXED.keys()
        self.change(**{**FIXED, **switches})
        try:
            yield
        finally:
            self.change(**FIXED)

    def change(self, **switches):
        """Change switches until the end of the context."""
        toy = self.toy
        toy.switches = json.loads(json.dumps({**toy.switches, **switches}))  # its own lists
        toy.requests, toy.cached = [], set()

    def requests(self):
        """Bodies of the requests since the last change of a switch."""
        return self.toy.requests

    def process_request(self, request, client_address):
        self._open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        pass  # a client that has gone

    def close(self):
        """End like a killed process, with all open connections."""
        self.shutdown()
        self.server_close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
