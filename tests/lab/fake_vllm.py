"""The endpoints of ``vllm serve`` that docs/vllm.md calls, answered by a small model in this process."""

import io
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from toy_models import OUTPUTS


class FakeVllm:
    """Stands in for ``urllib.request.urlopen``. Samples at most six tokens for each answer.

    Args:
        folder: the checkpoint that it serves until ``/collective_rpc`` names another one.
    """

    def __init__(self, folder: Any) -> None:
        self.paths: list[str] = []
        self._lock = threading.Lock()
        self._load(folder)

    def __call__(self, request: urllib.request.Request | str, timeout: float) -> io.BytesIO:
        if isinstance(request, str):  # /health
            return io.BytesIO()
        assert isinstance(request.data, bytes)
        path = request.full_url.removeprefix("http://127.0.0.1:8000")
        return io.BytesIO(self.answer(path, request.data))

    def answer(self, path: str, body: bytes) -> bytes:
        """The body of the answer to a request."""
        self.paths.append(path)
        answer: dict[str, Any] = {
            "/inference/v1/generate": self._generate,
            "/collective_rpc": self._rpc,
            "/reset_prefix_cache": self._reset,
        }
        return json.dumps(answer[path](**json.loads(body))).encode()

    def _load(self, folder: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def _rpc(self, method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        assert method == "reload_weights"
        self._load(kwargs["weights_path"])
        return {"results": [None]}

    def _reset(self) -> dict[str, Any]:
        return {"success": True}

    @torch.no_grad()
    def _generate(self, token_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Log-probs of the model at temperature 1, as vLLM's default ``raw_logprobs``."""
        how = {name: sampling_params[name] for name in ("temperature", "top_p", "top_k", "min_p")}
        greedy = how["temperature"] == 0
        how = {"do_sample": False} if greedy else {"do_sample": True, **how}
        prompts = torch.tensor([token_ids] * sampling_params["n"])
        with self._lock, torch.random.fork_rng():  # callers ask in several threads
            if "seed" in sampling_params:
                torch.manual_seed(sampling_params["seed"])
            out: Any = self._model.generate(prompts, max_new_tokens=6, **how, **OUTPUTS)
        drawn = out.sequences[:, len(token_ids) :]
        log_probs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
        end = self._model.generation_config.eos_token_id
        choices = []
        for ids, values in zip(drawn.tolist(), log_probs.tolist(), strict=True):
            length = ids.index(end) + 1 if end in ids else len(ids)
            content = [{"logprob": value} for value in values[:length]]
            choices.append({"token_ids": ids[:length], "logprobs": {"content": content}})
        return {"choices": choices}


@contextmanager
def served(folder: Any) -> Iterator[tuple[str, FakeVllm]]:
    """A server on the loopback for other processes, and its address."""
    fake = FakeVllm(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = fake.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
