"""A vLLM server on CPUs with a small random model. It is asked over HTTP, and its process group is killed at the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seeded import ANSWERS, LENGTH, Rollout, make_tokenizer
from torchrl_llm_kl import Ragged
from toy_models import tiny_model

ENGINES = "TORCHRL_LLM_KL_ENGINES"  # the folder of `make engines`
MODEL = "toy"
CONTEXT = 256
MAX_LOGPROBS = 64
#: vLLM's attention on CPUs needs heads of at least 32.
_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_HEADS |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.2}
#: Name -> family, seed and further configuration.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("qwen2", 0, {}),
    "other": ("qwen2", 1, {}),
    "mixture": ("qwen3_moe", 0, {"head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}),
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # to load weights from a folder, over HTTP
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def make(name: str) -> nn.Module:
    """A new float32 model."""
    family, seed, config = MODELS[name]
    return tiny_model(family, seed=seed, vocab_size=len(make_tokenizer()), **_HEADS, **config)


def save(model: nn.Module, folder: Path) -> Path:
    """Save a checkpoint that vLLM can load."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


class VllmServer:
    """The server's process, and requests to it."""

    def __init__(
        self, folder: Path, *arguments: str, port: int = 0, key: str = "", dtype: str = "float32", **environment: str
    ) -> None:
        if not port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.folder, self.key = folder, key
        python = Path(os.environ[ENGINES]) / "vllm" / "bin" / "python"
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager"]
        command += ["--max-model-len", str(CONTEXT), "--max-logprobs", str(MAX_LOGPROBS), "--enable-scale-out"]
        command += arguments
        self.log = Path(tempfile.mkdtemp(prefix="vllm-")) / "log"
        with self.log.open("wb") as log:
            env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": "", **environment}
            how = {"stdout": log, "stderr": log, "cwd": self.log.parent, "env": env, "start_new_session": True}
            self.process = subprocess.Popen(["nice", "-n", "5", *command], **how)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float = 900.0) -> None:
        begin = time.monotonic()
        while True:
            if self.process.poll() is not None or time.monotonic() - begin > seconds:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"vLLM did not start; the end of its log:\n{tail}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
            except OSError:
                time.sleep(0.5)
            else:
                break
        print(f"vLLM is up after {time.monotonic() - begin:.0f} s: {self.folder.name}", file=sys.stderr)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of the answer, or ``(status, text)`` of an error."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            text = urllib.request.urlopen(request, timeout=900).read()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        return json.loads(text) if text else None

    def version(self) -> str:
        return str(json.load(urllib.request.urlopen(f"{self.url}/version", timeout=30))["version"])

    def generate(self, prompt: Sequence[int], **sampling: Any) -> list[dict[str, Any]]:
        """The choices of ``/inference/v1/generate``, with token ids in and out."""
        # Missing settings would be taken from the checkpoint's generation_config.json.
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "max_tokens": LENGTH}
        body = {"token_ids": list(prompt), "sampling_params": {**plain, **sampling}}
        answer = self.post("/inference/v1/generate", **body)
        assert isinstance(answer, dict), answer
        return list(answer["choices"])

    def sample(self, prompts: Sequence[Tensor], seed: int = 0, answers: int = ANSWERS, **sampling: Any) -> Rollout:
        """Sample from this server, as :func:`seeded.sample` does from a model."""
        end = make_tokenizer().eos_token_id
        found = []
        for i, prompt in enumerate(prompts):
            how = {"n": answers, "seed": 10_000 * seed + 100 * i, "stop_token_ids": [end], **sampling}
            found += self.generate(prompt.tolist(), **how)
        rewards = torch.randn(len(found), generator=torch.Generator().manual_seed(seed))
        log_probs = [torch.tensor([at["logprob"] for at in choice["logprobs"]["content"]]) for choice in found]
        rows = [p for p in prompts for _ in range(answers)]
        return Rollout(rows, [torch.tensor(choice["token_ids"]) for choice in found], log_probs, rewards)

    def load(self, folder: Path) -> None:
        """Load the weights of a checkpoint, and drop the prefix cache."""
        assert self.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
        assert self.post("/reset_prefix_cache") == {"success": True}

    def close(self) -> None:
        """Kill all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(folder: Path, *arguments: str, **options: Any) -> Iterator[VllmServer]:
    server = VllmServer(folder, *arguments, **options)
    try:
        yield server
    finally:
        server.close()


def sampled(rollout: Rollout) -> tuple[Ragged, Tensor, Tensor]:
    """The sequences, the mask of the answers, and the sampler's log-probs of the answers."""
    pairs = list(zip(rollout.prompts, rollout.answers, strict=True))
    mask = torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in pairs])
    return Ragged.from_list([torch.cat(pair) for pair in pairs]), mask, torch.cat(rollout.log_probs).double()
