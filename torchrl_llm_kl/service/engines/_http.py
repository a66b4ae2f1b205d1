""":class:`HTTPEngine`: log-probs from a vLLM or SGLang server.

The behaviour of the servers, with sources of November 2026:

- vLLM, ``POST /v1/completions`` with ``prompt`` as token ids and ``prompt_logprobs`` (docs.vllm.ai,
  ``entrypoints/openai/completion/protocol``): ``choices[0].prompt_logprobs`` is a list with one entry per token, null for
  the first; each maps ids (as strings) to ``{"logprob", "rank", "decoded_token"}``: the token and the most probable ones.
  ``-inf`` is sent as -9999.0 (``clamp_prompt_logprobs``). ``max_logprobs`` (20 by default) limits the top k.
- vLLM's ``logprobs_mode`` (``vllm/config/model.py``) is of *sampled* tokens: log-probs of prompts are raw in both modes, since
  they skip the sampler's processors (``_get_prompt_logprobs_dict`` of 0.32.0).
- vLLM does not cache log-probs and skips its prefix cache for such requests (``usage/v1_guide``, since pull request 13949);
  before, the combination was refused or crashed (issues 3251, 8268, 13409), and values of other requests at cached positions
  are reported (issue 42019, open). ``cache_salt`` gives a request its own prefix cache.
- SGLang, ``POST /generate`` (docs.sglang.io, ``basic_usage/sampling_params``): ``input_ids``, ``return_logprob``,
  ``logprob_start_len`` (-1, the default: none of the input), ``top_logprobs_num``. ``meta_info.input_token_logprobs`` is a list
  of ``[log-prob, id, text]`` from position ``logprob_start_len`` on. The first log-prob is null, since the logits before it
  are not cached. A start of 0 computes the whole input again (strands-sglang issue 34). ``input_top_logprobs`` has the same
  form. Log-probs of the input are raw (sglang pull request 36213).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import ssl
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import urlsplit

import httpcore
import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service._errors import ServiceConfigError, ServiceError, ServiceTimeout
from torchrl_llm_kl.service.engines._engine import Engine

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: Token ids of the probe, which every model of interest has.
_PROBE = list(range(1, 13))
#: Log-probs of the probe that differ by more nats come from another model, or are wrong: rounding is smaller.
_TOLERANCE = 0.1
_CLAMPED = -9999.0  # vLLM sends this for -inf
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
#: Without these values, temperature, penalties or truncation of the model's generation config could enter log-probs.
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

#: Log-probs at one position by token id. Empty if there are none.
Position = dict[int, float]


class HTTPEngine(Engine):
    """An engine for a model that a vLLM or SGLang server holds.

    Pass it as the factory of a service, which shares the server between collectors. Each sequence is one HTTP request, sent
    up to its last scored token. The engine sends token ids, never text, and compares them with the ids that come back.

    Log-probs are at temperature 1, since both servers compute log-probs of prompts at temperature 1. At its start the engine
    scores a short probe twice: the numbers must be stable. After a call that opened a connection or repeated a request, it
    scores the probe again, and raises an error if the server came back with another model. A proxy that keeps its own
    connections hides such a change.

    Args:
        url: of the server, such as ``"http://10.0.0.7:8000"``.

    Keyword Args:
        model: its name at the server (``--served-model-name``). SGLang serves one model, whose path is compared with it.
        dialect: ``"vllm"`` (``/v1/completions`` with ``prompt_logprobs``) or ``"sglang"`` (``/generate``).
        api_key_env: environment variable of the replica that holds the key. All clients of the service could read an
            argument, since they compare factories.
        timeout: seconds until the server must answer all requests of a batch, retries included. With less than the
            service's timeout, callers see the reason.
        concurrency: the most HTTP requests at a time.
        interface: keys and tokenizer of the model, for clients that tokenise.

    Raises:
        ServiceError: if the server answers with errors or with numbers that cannot be right.
        ServiceTimeout: if it does not answer in time.
        ServiceConfigError: if it has another model.
        ValueError: for a request that the server refuses, and for options that it lacks: temperatures, entropy, ``dtype``,
            ``adapters``, ``deterministic``. ``remember`` has no effect, since the server has its own cache.

    Example:
        >>> server = partial(HTTPEngine, "http://10.0.0.7:8000", model="qwen3-8b")  # doctest: +SKIP
        >>> service = ScoringService(factory=server, name="reference", num_cpus=0.1)  # doctest: +SKIP
    """

    offers = frozenset({"top_k"})
    instead = (
        "its log-probs are of all tokens at temperature 1, under its own --dtype and the adapter that model= names. Serve "
        "the transformers model for other scores"
    )

    def __init__(
        self,
        url: str,
        *,
        model: str,
        dialect: Literal["vllm", "sglang"] = "vllm",
        api_key_env: str | None = None,
        timeout: float = 60.0,
        concurrency: int = 16,
        interface: ModelInterface | None = None,
    ) -> None:
        check_choice(("vllm", "sglang"), dialect=dialect)
        self._http = _Http(url, api_key_env)
        self.place = str(self._http)
        self._dialect = _Vllm(model) if dialect == "vllm" else _Sglang()
        self._timeout, self._interface = timeout, interface or ModelInterface()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="http")
        until = time.monotonic() + timeout
        if dialect == "sglang" and (served := self._http.served_model(until)) not in (model, None):
            raise ServiceConfigError(f"{self._http} serves {served!r}, expected model={model!r}.")
        self._reference = self._score_probe(until)
        self._compare(self._score_probe(until), "the log-probs of one sequence changed between two requests")

    # ------------------------------------------------------------------ scores

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :meth:`Engine.run`."""
        top_k, deadline, renewed = options.top_k, time.monotonic() + self._timeout, self._http.renewed
        masks = request.mask.split(request.tokens.lengths.tolist())
        jobs = []
        for i, (row, chosen) in enumerate(zip(request.tokens.to_list(), masks, strict=True)):
            if where := chosen.nonzero().squeeze(-1).tolist():
                tokens = row.tolist()[: where[-1] + 1]
                jobs.append(_Job(f"sequence {i}", tokens, where, top_k, deadline))
        scored = zip(jobs, self._threads.map(self._positions, jobs), strict=True)
        scored_positions = [(job.tokens[t], positions[t]) for job, positions in scored for t in job.scored]
        if self._http.renewed != renewed:
            self._compare(self._score_probe(deadline), "it came back with another model")
        elements = request.mask.nonzero().squeeze(-1)
        log_prob = torch.tensor([position[token] for token, position in scored_positions])
        request.check_finite(elements, log_prob)
        top = _top([position for _, position in scored_positions], top_k) if top_k else {}
        return Scores.spread(request.layout, elements, log_prob, **top)

    def _positions(self, job: _Job) -> list[Position]:
        """Returns checked log-probs at each position of a sequence, empty where the server did not score it."""
        missing: list[int] = []
        for start in dict.fromkeys(self._dialect.starts(job.scored[0])):
            content = self._http.post(self._dialect.path, self._dialect.body(job, start), job)
            try:
                positions, ids = self._dialect.read(json.loads(content), job.tokens, start)
            except (AttributeError, LookupError, TypeError, ValueError):
                raise ServiceError(
                    f"{self._http} answers in another form, {content[:80]!r}. Pass its dialect=."
                ) from None
            if ids != job.tokens[start:]:
                raise ServiceError(
                    f"{self._http} scored other tokens than were sent for {job.name}, {ids[:9]} in place of "
                    f"{job.tokens[start:][:9]}. Look for a proxy that sends text, or a start token that the server adds."
                )
            missing = [t for t in job.scored if job.tokens[t] not in positions[t]]
            if not missing:
                return positions
        raise ServiceError(
            f"{self._http} returned no log-prob for {len(missing)} of {len(job.scored)} tokens of {job.name}, "
            f"first at position {missing[0]}. {self._dialect.advice}"
        )

    # ------------------------------------------------------------------ the probe

    def _score_probe(self, deadline: float) -> list[Position]:
        job = _Job("the probe", _PROBE, [*range(1, len(_PROBE))], 2, deadline)
        return self._positions(job)[1:]

    def _compare(self, scored: list[Position], what: str) -> None:
        """Compares the probe's log-probs with the first ones."""
        tokens, both = _PROBE[1:], (self._reference, scored)
        values = torch.tensor([[at[token] for token, at in zip(tokens, each, strict=True)] for each in both])
        worst = float(values.clamp(min=_CLAMPED).diff(dim=0).abs().max())
        if not worst <= _TOLERANCE:  # NaN too
            raise ServiceError(f"{self._http}: {what}, by {worst:.3g} nats. Create the service again to accept it.")

    # ------------------------------------------------------------------ the rest of an engine

    def interface(self) -> tuple[ModelInterface, bool]:
        """See :meth:`Engine.interface`. The model is not a TorchRL wrapper."""
        return self._interface, False


def _top(positions: Sequence[Mapping[int, float]], k: int) -> dict[str, Tensor]:
    """Computes the ``k`` most probable tokens, and the log-prob of the rest, from the server's rounded numbers."""
    best = [sorted(position.items(), key=lambda entry: (-entry[1], entry[0]))[:k] for position in positions]
    if short := [len(some) for some in best if len(some) < k]:
        raise ServiceError(f"the server returned {min(short)} tokens for top_k={k}. Raise its limit (--max-logprobs).")
    pairs = torch.tensor(best, dtype=torch.float64).reshape(-1, k, 2)
    ids, values = pairs[..., 0].long(), pairs[..., 1]
    rest = torch.log1p(-values.exp().sum(-1).clamp(max=1.0))
    return {"top_indices": ids, "top_log_probs": values.float(), "tail_log_prob": rest.float()}


# ------------------------------------------------------------------ dialects


@dataclass(frozen=True)
class _Job:
    """One sequence to score."""

    name: str
    tokens: list[int]
    scored: list[int]  # positions of the scored tokens
    top_k: int
    deadline: float  # of time.monotonic()


class _VllmChoice(TypedDict):
    prompt_logprobs: list[dict[str, dict[str, float]] | None] | None  # by token id
    prompt_token_ids: list[int]


class _VllmReply(TypedDict):
    choices: list[_VllmChoice]


class _Vllm:
    path = "/v1/completions"
    advice = "Start vLLM with --no-enable-prefix-caching, or a version that recomputes cached prompts."

    def __init__(self, model: str) -> None:
        self._model = model

    def starts(self, first: int) -> tuple[int, ...]:
        return (0,)

    def body(self, job: _Job, start: int) -> dict[str, object]:
        # vLLM samples at least one token.
        fixed = {"max_tokens": 1, "return_token_ids": True, "stream": False, **_PLAIN}
        scores = {"prompt_logprobs": max(job.top_k, 1), "cache_salt": uuid.uuid4().hex}  # read no other prefix
        return {"model": self._model, "prompt": job.tokens, **scores, **fixed}

    def read(self, reply: _VllmReply, tokens: list[int], start: int) -> tuple[list[Position], list[int]]:
        """Returns log-probs at each position of the sequence, and the ids that the server scored from ``start`` on."""
        choice = reply["choices"][0]
        entries = [entry or {} for entry in choice["prompt_logprobs"] or ()]
        if len(entries) < len(tokens):  # it is unknown which ones are missing
            return [{}] * len(tokens), tokens
        positions = [_position((int(token), x["logprob"]) for token, x in entry.items()) for entry in entries]
        return positions, list(choice["prompt_token_ids"])


#: A log-prob, a token id, and its text.
_Entry = tuple[float | None, int, str | None]


class _SglangInfo(TypedDict):
    input_token_logprobs: list[_Entry] | None
    input_top_logprobs: NotRequired[list[list[_Entry] | None] | None]


class _Sglang:
    path = "/generate"
    advice = "It did not recompute them with logprob_start_len=0 either, or the token is forbidden (log-prob -inf)."

    def starts(self, first: int) -> tuple[int, ...]:
        # The entry at the start is null, so begin one token earlier. A start of 0 computes cached tokens again.
        return max(first - 1, 0), 0

    def body(self, job: _Job, start: int) -> dict[str, object]:
        sampling = {"max_new_tokens": 0, **_PLAIN}
        scores = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": job.top_k}
        fixed = {"return_text_in_logprobs": False, "stream": False}
        return {"input_ids": job.tokens, "sampling_params": sampling, **scores, **fixed}

    def read(self, reply: Mapping[str, _SglangInfo], tokens: list[int], start: int) -> tuple[list[Position], list[int]]:
        info = reply["meta_info"]
        entries = info["input_token_logprobs"] or []
        tops = info.get("input_top_logprobs") or [None] * len(entries)
        absent = len(tokens) - len(entries)  # tokens that were not requested, or are in the server's cache
        positions: list[Position] = [{}] * absent
        for (value, token, *_), top in zip(entries, tops, strict=True):
            positions.append(_position((other, x) for x, other, *_ in top or ()) | _position([(token, value)]))
        return positions, tokens[start:absent] + [token for _, token, *_ in entries]


def _position(entries: Iterable[tuple[int, float | None]]) -> Position:
    """Reads log-probs by token. They are -inf where the server clamps, NaN for broken weights. Null values are left out."""
    log_probs = {token: -math.inf if x <= _CLAMPED else float(x) for token, x in entries if x is not None}
    if any(value > 1e-3 for value in log_probs.values()):  # rounding may lift it above 0
        raise ServiceError(
            f"the server sent the log-prob {max(log_probs.values())}, expected a number of at most 0. Look for another "
            "processor of log-probs at the server, or a faulty proxy."
        )
    return log_probs


# ------------------------------------------------------------------ HTTP


class _Http:
    """A server, and connections to it that stay open.

    Attributes:
        renewed: number of new connections and repeated requests. After each, the server may be another process.
    """

    def __init__(self, url: str, api_key_env: str | None) -> None:
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]  # without a password, which must not appear in errors
        if parts.scheme not in ("http", "https") or not place:
            raise ValueError(f"url must begin with http:// or https:// and a host, got {parts.scheme!r} and {place!r}.")
        self._url = f"{parts.scheme}://{place}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._headers: dict[bytes | str, bytes | str] = {"Content-Type": "application/json"}
        if api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env].strip()}"
        self._pool = httpcore.ConnectionPool(ssl.create_default_context(), max_connections=None)
        self.renewed = 0

    def __str__(self) -> str:
        return f"the server at {self._url}"

    def post(self, path: str, body: Mapping[str, object], job: _Job) -> bytes:
        """Returns the content of the reply. Repeats a request without a proper answer until the deadline.

        Raises:
            ValueError: if the server refuses the request.
            ServiceTimeout: without an answer until the deadline.
            ServiceError: for any other answer.
        """
        failures, pause = 0, 0.05
        while True:
            try:
                status, content = self._exchange("POST", path, job.deadline, json.dumps(body).encode())
                why = f"HTTP {status}: {content[:300].decode(errors='replace')}"
            except _FAILURES as error:
                status, why = 0, f"{type(error).__name__}: {error}"
            if status == 200:
                return content
            if status in (400, 413, 422):
                raise ValueError(f"{self} refuses {job.name}: {why}")
            failures += status == 500  # the request may cause it, so it is not repeated for long
            if (0 < status < 500 and status not in (408, 425, 429)) or failures == 3:
                raise ServiceError(f"{self} answers with {why}")
            if time.monotonic() + pause > job.deadline:
                raise ServiceTimeout(f"{self} did not answer in time: {why}. Raise timeout=, or look at its log.")
            time.sleep(pause)
            pause = min(2 * pause, 2.0)
            self.renew()

    def served_model(self, deadline: float) -> object:
        """Returns the path of SGLang's model, or None if the server has no such page or does not answer."""
        with contextlib.suppress(AttributeError, ValueError, *_FAILURES):
            return json.loads(self._exchange("GET", "/get_model_info", deadline)[1]).get("model_path")
        return None

    def _exchange(self, method: str, path: str, deadline: float, data: bytes = b"") -> tuple[int, bytes]:
        """Returns status and content of a reply. Each step (connect, write, read) must end by the deadline."""
        limits = dict.fromkeys(("connect", "read", "write", "pool"), max(deadline - time.monotonic(), 0.001))
        about = {"timeout": limits, "trace": self._trace}
        response = self._pool.request(method, self._url + path, headers=self._headers, content=data, extensions=about)
        return response.status, response.content

    def _trace(self, event: str, info: object) -> None:
        if event == "connection.connect_tcp.started":
            self.renew()

    def renew(self) -> None:
        """Notes that the next answer may come from another process."""
        self.renewed += 1
