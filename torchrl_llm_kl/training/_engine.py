"""A vLLM server that samples the answers of a run and gets the new weights after each step."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.scoring import Sampling
from torchrl_llm_kl.tasks import active_rows, write_answers
from torchrl_llm_kl.training._config import ConfigError, TrainConfig
from torchrl_llm_kl.training._models import save_policy
from torchrl_llm_kl.training._ranks import Ranks, is_gathered, whole, whole_weights
from torchrl_llm_kl.training._samplers import answer_keys, keyed_generator, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Requests that are under way at the same time. The server batches them.
_CONCURRENT = 64
#: Seconds for the start of a server and for an answer.
_LONG = 1800.0


class EngineError(RuntimeError):
    """The server cannot be started or asked, or answers in another form. The message gives the reason."""


@dataclass(frozen=True)
class Generated:
    """An answer of a server.

    Args:
        ids: token ids, int64 ``[R]``.
        log_probs: nats, ``[R]``.
        kept: the ids that the sampler kept at each token. None if the server does not record them.
        experts: the experts of each token of prompt and answer except the last, integers ``[P + R - 1, layers, k]``. None if
            the server does not record them.
    """

    ids: Tensor
    log_probs: Tensor
    kept: Sequence[Sequence[int]] | None = None
    experts: Tensor | None = None


class Engine:
    """Requests to one or several vLLM servers.

    Args:
        addresses: the addresses of the servers, with spaces between them. They were started with ``VLLM_SERVER_DEV_MODE=1``
            and ``--enable-scale-out``.

    Example:
        >>> Engine("http://one:8000/ http://two:8000").urls
        ('http://one:8000', 'http://two:8000')
    """

    def __init__(self, addresses: str) -> None:
        self.urls = tuple(url.rstrip("/") for url in addresses.split())

    def post(self, url: str, path: str, **body: object) -> Any:
        """The JSON of a server's answer.

        Raises:
            EngineError: if the server does not answer, or answers with an error.
        """
        headers = {"Content-Type": "application/json"}
        # From the environment, since settings are written into the folder of the run.
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_LONG) as reply:
                return json.loads(reply.read() or "null")  # vLLM answers some calls with an empty body
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            advice = ""
            if error.code == 404:  # the routes exist only with these two switches
                advice = " Start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out."
            raise EngineError(f"{url}{path} answered {error.code}: {text}.{advice}") from error
        except (OSError, HTTPException, ValueError) as error:  # a server that ends may send half of an answer
            raise EngineError(f"{url}{path} did not answer: {error}. Is the server running?") from error

    def generate(self, prompt: Sequence[int], settings: Json, group: int = 0) -> Generated:
        """Sample an answer to a prompt.

        Args:
            prompt: token ids.
            settings: ``sampling_params`` of vLLM.
            group: the number of the prompt, which decides the server. It then reads the prompt once for all answers.

        Raises:
            EngineError: if the server does not answer in the form of vLLM's token interface.
        """
        # One server for all answers to a prompt, whose prefix cache then holds the prompt.
        url = self.urls[group % len(self.urls)]
        answer = self.post(url, "/inference/v1/generate", token_ids=list(prompt), sampling_params=settings)
        try:
            (choice,) = answer["choices"]
            ids = list(choice["token_ids"])
            log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            kept, experts = choice.get("sampling_mask"), choice.get("routed_experts")
            if experts is not None:
                import numpy as np  # only mixtures of experts need it

                experts = torch.from_numpy(np.load(BytesIO(b64decode(experts))))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{url} answered in another form than vLLM 0.32: {str(answer)[:300]}") from error
        if len(ids) != len(log_probs):
            raise EngineError(f"{url} returned {len(log_probs)} log-probs for {len(ids)} tokens.")
        return Generated(torch.tensor(ids, dtype=torch.long), torch.tensor(log_probs), kept, experts)

    def load(self, folder: Path) -> None:
        """Load the weights of a folder that the servers can read, and drop the keys and values of the old weights."""
        for url in self.urls:
            self.post(url, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
            if self.post(url, "/reset_prefix_cache") != {"success": True}:
                raise EngineError(f"{url} kept the prefix cache of the old weights.")


# ------------------------------------------------------------------ a policy for the env


class EngineSampler(TensorDictModuleBase):
    """A torchrl policy whose answers come from an :class:`Engine`. It writes the engine's log-probs beside the tokens.

    Args:
        engine: the server.
        tokenizer: the policy's tokenizer. The server gets token ids only.

    Keyword Args:
        max_new_tokens: the longest answer, in tokens.
        sampling: the distribution of the tokens. None takes the most probable token.
        end: texts that also end an answer.
        ends: the ids of the policy's own end tokens.
        seed: the seed of the answers.

    Example:
        >>> sampler = EngineSampler(engine, tokenizer, max_new_tokens=64, sampling=Sampling(), seed=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        sampling: Sampling | None,
        end: Sequence[str] = (),
        ends: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.seed = engine, tokenizer, seed
        self.in_keys = [("text", "prompt")]
        self.out_keys = ["text", "tokens", "masks", ("log_probs", "full")]
        drawn = Sampling() if sampling is None else sampling  # a temperature of 0 makes it greedy
        # Missing settings would be taken from the checkpoint's generation_config.json.
        self.settings: Json = {
            "temperature": 0.0 if sampling is None else drawn.temperature,
            **{"top_k": drawn.top_k, "top_p": drawn.top_p, "min_p": drawn.min_p, "repetition_penalty": 1.0},
            **{"n": 1, "logprobs": 0, "max_tokens": max_new_tokens, "stop_token_ids": list(ends)},
            **{"stop": list(end), "include_stop_str_in_output": True, "skip_special_tokens": False},
        }
        self._threads = ThreadPoolExecutor(_CONCURRENT, "engine")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample the answers and write them. Rows whose ``"_step"`` is False get empty answers."""
        texts, prompts = prompt_ids(self.tokenizer, tensordict)
        rows = [row for row, active in enumerate(active_rows(tensordict)) if active]
        keys = answer_keys(tensordict)

        # A seed for each answer: a resumed run asks for the same one, whatever the order of the requests.
        def ask(row: int) -> Generated:
            seed = int(torch.randint(2**31, (1,), generator=keyed_generator(self.seed, *keys[row])))
            return self.engine.generate(prompts[row], {**self.settings, "seed": seed}, group=keys[row][0])

        asked = dict(zip(rows, self._threads.map(ask, rows), strict=True))
        empty = Generated(torch.zeros(0, dtype=torch.long), torch.zeros(0))
        answers = [asked.get(row, empty) for row in range(len(texts))]
        ids, log_probs = [each.ids for each in answers], [each.log_probs for each in answers]
        own = [torch.tensor(row) for row in prompts]
        out = write_answers(tensordict, self.tokenizer, texts, own, ids, log_probs=log_probs)
        if not has_entry(tensordict, "sampled"):  # rows of several turns are joined, without records
            _write_records(out, answers)
        return out


def _write_records(out: TensorDictBase, answers: Sequence[Generated]) -> None:
    """Write the kept ids and the experts that the server recorded, which transforms and losses replay."""
    mask, width = out["masks", "all_attention_mask"], out["tokens", "prompt"].shape[-1]
    # A record of some answers would be read as "nothing was kept" for the others.
    if all(each.kept is not None for each in answers):
        kept = [each.kept or [] for each in answers]
        counts = torch.zeros(mask.shape, dtype=torch.int32)
        for row, ids in enumerate(kept):
            counts[row, width : width + len(ids)] = torch.tensor([len(some) for some in ids])
        flat = [torch.tensor([i for some in ids for i in some], dtype=torch.int32) for ids in kept]
        out.set(("kept", "counts"), counts)
        out.set(("kept", "ids"), pad_sequence(flat, batch_first=True))
    if all(each.experts is not None for each in answers):
        experts = torch.zeros((*mask.shape, *answers[0].experts.shape[1:]), dtype=torch.int32)  # type: ignore[union-attr]
        for row, each in enumerate(answers):
            assert each.experts is not None
            experts[row, mask[row]] = torch.cat(
                [each.experts, each.experts[-1:]]
            ).int()  # none is chosen for the last token
        out.set("routed_experts", experts)


# ------------------------------------------------------------------ the weights of a server


class ServedWeights:
    """The weights of a server, which reads them from a folder. Of several ranks the first one writes and loads them.

    Args:
        engine: the server.
        policy: the model that is trained. Its adapters are merged into the saved weights.
        tokenizer: saved beside the weights.
        folder: the folder of the last versions. The server must be able to read it.

    Keyword Args:
        ranks: the ranks, which use one server.
        kept: the number of versions that stay on disk.

    Example:
        >>> weights = ServedWeights(engine, policy, tokenizer, Path("runs/x/engine"))  # doctest: +SKIP
        >>> weights.install(weights.take(3), 3)  # doctest: +SKIP
        3
    """

    def __init__(
        self,
        engine: Engine,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        *,
        ranks: Ranks | None = None,
        kept: int = 3,
    ) -> None:
        self.engine, self.policy, self.tokenizer, self.folder = engine, policy, tokenizer, folder.resolve()
        self.ranks, self.kept = Ranks() if ranks is None else ranks, kept
        # A separate group: the thread that samples must not mix its messages with the messages of the training.
        self._group = dist.new_group(backend="gloo") if self.ranks.count > 1 else None
        self._closed = Event()

    def take(self, version: int) -> Path:
        """Write the weights, and return their folder. All ranks call it."""
        path = self.folder / f"weights-{version}"
        # Adapters are merged from the gathered weights in place, so only whole models need a copy of all weights.
        sharded = any(isinstance(each, FSDPModule) for each in self.policy.modules())
        weights = whole_weights(self.policy) if sharded and not hasattr(self.policy, "peft_config") else None
        with whole(self.policy):
            if self.ranks.first:
                # A thread that samples ahead may still load one of the last versions.
                for old in self.folder.glob("weights-*"):
                    if not version - self.kept < int(old.name.partition("-")[2]) < version:
                        shutil.rmtree(old)
                save_merged(self.policy, self.tokenizer, path, weights=weights)
        return path

    def install(self, taken: object | None, version: int) -> int:
        """Let the server load them, after all ranks have their last answers and before one asks for the next."""
        version = self._smallest(version)
        if isinstance(taken, Path) and self.ranks.first:
            self.engine.load(taken)
        return self._smallest(version)  # the others wait for the load

    def _smallest(self, number: int) -> int:
        """The smallest number of all ranks. Waits for them."""
        if self._group is None:
            return number
        value = torch.tensor(number)
        work: Any = dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group, async_op=True)
        while not work.is_completed():
            # At the end of a run another rank may not begin this batch, and would never answer.
            if self._closed.wait(0.01):
                raise RuntimeError("the run has ended")
        work.wait()
        return int(value)

    def close(self) -> None:
        """End a wait for other ranks, and remove the weights on disk."""
        self._closed.set()
        if self.ranks.first:
            for folder in self.folder.glob("weights-*"):
                shutil.rmtree(folder, ignore_errors=True)


def save_merged(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Save a policy as a plain model. Adapters are merged into copies of their layers' weights.

    ``weights`` are the gathered weights of a sharded policy without adapters.

    Example:
        >>> save_merged(policy, tokenizer, Path("merged"))  # doctest: +SKIP
    """
    if not hasattr(policy, "peft_config"):
        save_policy(policy, tokenizer, folder, weights=weights)
        return
    merged: dict[str, Tensor] = {}
    adapted: Any = policy
    base = adapted.get_base_model()
    modules: dict[str, Any] = dict(base.named_modules())
    for name, module in modules.items():
        if hasattr(module, "get_delta_weight"):
            # PEFT's own merge changes the base weights, which come back with another rounding.
            delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            merged[f"{name}.weight"] = (module.get_base_layer().weight + delta).detach()
    # A sharded model's state_dict would split its weights again.
    own = dict(base.named_parameters()) if is_gathered(policy) else base.state_dict()
    state = {name.replace(".base_layer.", "."): values.detach() for name, values in own.items() if "lora_" not in name}
    base.save_pretrained(folder, state_dict={**state, **merged})
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------ starting a server


class StartedEngine(Engine):
    """A server of this run, which :meth:`close` ends.

    Args:
        command: the program and its first arguments, such as ``vllm serve {model}``.
        model: the folder of the model.
        log: the file of the server's output.
        arguments: further arguments.

    Raises:
        EngineError: if the server does not start. The message has the end of its log.
    """

    def __init__(self, command: str, model: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:  # the system chooses a free port
            port = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}")
        words = [word.replace("{model}", str(model)) for word in shlex.split(command)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        # By default vLLM returns log-probs before temperature and truncation.
        words += ["--logprobs-mode", "processed_logprobs", *arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as out:
                environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # lets clients replace the weights
                # A session of its own: Ctrl-C ends the step of the run first, and `close` ends all its processes.
                how: Any = {"stdout": out, "stderr": out, "env": environment, "start_new_session": True}
                self._process = subprocess.Popen(words, **how)
        except OSError as error:
            raise ConfigError(f"sampler.command is {command}: {error}. Install vLLM, or name its program.") from error
        try:
            self._wait(log)
        except BaseException:
            self.close()
            raise

    def _wait(self, log: Path) -> None:
        begin = time.monotonic()
        while self._process.poll() is None and time.monotonic() - begin < _LONG:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.urls[0]}/health", timeout=5).read()
                return
            time.sleep(0.5)
        tail = log.read_text(errors="replace")[-2000:]
        raise EngineError(f"the server did not start. The end of {log}:\n{tail}")

    def close(self) -> None:
        """End the server and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def check_engine(config: TrainConfig) -> None:
    """Check that the servers of a run answer, or that the program that starts one exists, before a run moves files.

    Raises:
        EngineError, ConfigError: if not.

    Example:
        >>> check_engine(config)  # doctest: +SKIP
    """
    if config.sampler.engine != "vllm":
        urls = Engine(config.sampler.engine).urls if config.sampler.is_server else ()
        try:
            for url in urls:
                urllib.request.urlopen(f"{url}/health", timeout=60).read()
        except OSError as error:
            raise EngineError(f"{' or '.join(urls)} does not answer: {error}. Is the server running?") from error
    elif shutil.which(program := shlex.split(config.sampler.command)[0]) is None:
        raise ConfigError(f"sampler.command names {program}, which does not exist: install vLLM, or name its program.")


def open_engine(
    config: TrainConfig,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    say: Callable[[str], None] = print,
) -> tuple[Engine, ServedWeights]:
    """The servers of a run, which get the policy's weights. The first rank starts one, if no address is given.

    Raises:
        EngineError: if a server cannot be started or asked.

    Example:
        >>> engine, weights = open_engine(config, policy, tokenizer, Ranks())  # doctest: +SKIP
    """
    settings, folder, ahead = config.sampler, Path(config.run.out, "engine"), config.algorithm.max_staleness
    engine = Engine("" if settings.engine == "vllm" else settings.engine)
    weights = ServedWeights(engine, policy, tokenizer, folder, ranks=ranks, kept=ahead + 2)
    start = weights.take(0)
    own: list[StartedEngine] = []

    def open_first() -> str:
        if engine.urls:
            engine.load(start)
        else:
            say(f"starting {settings.command.replace('{model}', str(start))}, whose output is in {folder / 'log'}.")
            own.append(StartedEngine(settings.command, start, folder / "log", settings.engine_args))
        return " ".join(own[0].urls if own else engine.urls)

    address = ranks.of_first(open_first)
    weights.engine = own[0] if own else Engine(address)
    return weights.engine, weights
