""":class:`HTTPEngine`: log-probs from a vLLM or SGLang server.

What the servers do, and where that is written (looked up in 2026-11):

- vLLM, ``POST /v1/completions`` with ``prompt`` as token ids and ``prompt_logprobs`` (docs.vllm.ai,
  ``entrypoints/openai/completion/protocol``): ``choices[0].prompt_logprobs`` is a list with one entry per token, null for
  the first; each maps ids (as strings) to ``{"logprob", "rank", "decoded_token"}``: the token and the most probable ones.
  ``-inf`` is sent as -9999.0 (``clamp_prompt_logprobs``). ``max_logprobs`` (20 by default) limits the top k.
- vLLM's ``logprobs_mode`` (``vllm/config/model.py``): raw log-probs by default, before temperature and other processing.
- vLLM does not cache log-probs and skips its prefix cache for such requests (``usage/v1_guide``, since pull request 13949);
  before, the combination was refused or crashed (issues 3251, 8268, 13409), and values of other requests at cached positions
  are reported (issue 42019, open). ``cache_salt`` gives a request a prefix cache of its own.
- SGLang, ``POST /generate`` (docs.sglang.io, ``basic_usage/sampling_params``): ``input_ids``, ``return_logprob``,
  ``logprob_start_len`` (-1, the default: none of the input), ``top_logprobs_num``. ``meta_info.input_token_logprobs`` is a list
  of ``[log-prob, id, text]`` from position ``logprob_start_len`` on. The first log-prob is null, since the logits before it
  are not cached; 0 computes the whole input again (strands-sglang issue 34). ``input_top_logprobs`` likewise. Log-probs of the
  input are raw (sglang pull request 36213).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, Scores
from torchrl_llm_kl.service._errors import ServiceConfigError, ServiceError, ServiceTimeout

_T = TypeVar("_T")
_LOG = logging.getLogger("torchrl_llm_kl.service")
#: Log-probs of the same tokens that differ by more nats are not rounding: another model, or wrong numbers.
_TOLERANCE = 0.1
_CLAMPED = -9999.0
_ABOVE_ZERO = 1e-3  # nats by which rounding may lift a log-prob above 0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_GRACE = 1.0  # seconds after the deadline for a thread to give up by itself, which names and TLS handshakes do not
#: Bytes of an answer: a page without scores, and one entry of a token's scores, of which 100 are usual.
_PAGE, _ENTRY = 2**20, 256
_TRIES_AFTER_500 = 3  # an internal error may come from the request: do not repeat it for long
#: No temperature, penalty or truncation from the model's generation config may enter log-probs.
_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

#: Log-probs by token id at one position; None without any.
Position = dict[int, float] | None


class HTTPEngine:
    """An engine for a model that a vLLM or SGLang server holds.

    Pass it as the factory of a service, which shares the server between collectors, batches nothing and retries. Each
    sequence is one HTTP request, sent up to its last scored token; token ids are sent and compared with those that come
    back, never text.

    The first scores are of a short probe: twice at temperature 1 and once at 2. They show whether the server applies the
    temperature, how it rounds, and whether its numbers are stable. After a call that opened a connection or repeated a
    request, the probe is scored again: a server that came back with another model is an error. (A proxy that keeps its
    own connections hides that.)

    Args:
        url: of the server, such as ``"http://10.0.0.7:8000"``.

    Keyword Args:
        model: its name at the server; SGLang serves one model, whose path is compared.
        dialect: ``"vllm"`` (``/v1/completions`` with ``prompt_logprobs``) or ``"sglang"`` (``/generate``).
        api_key_env: environment variable of the replica with the key. (An argument would be visible to all clients of the
            service, which compare factories.)
        timeout: seconds for all requests of a batch, from the first connection to the last byte, retries included; less than
            the service's, whose callers then see the reason.
        concurrency: the most requests at a time.
        probe: token ids that every model of interest has.
        interface: keys and tokenizer for clients that tokenise.

    Attributes:
        temperatures: ``"tempered"`` if the server's log-probs are at the request's temperature; ``"raw"`` if they are always at
            temperature 1: then other temperatures are refused, since the normaliser needs all logits.
        precision: largest rounding error of the server's decimals, in nats; 0.0 if it sends full floats.

    Raises:
        ServiceError: if the server answers with errors or with numbers that cannot be right.
        ServiceTimeout: if it has not answered in full in time.
        ServiceError: if its answer has more bytes than what was requested can have, a log-prob that is no number of at most
            0, or two of one token.
        ServiceConfigError: if it has another model.
        ValueError: for a request that it refuses, and for settings that it does not have: entropy, ``dtype``, ``adapters``,
            ``deterministic``. ``remember`` has no effect: the server has its own cache.

    Example:
        >>> server = partial(HTTPEngine, "http://10.0.0.7:8000", model="qwen3-8b")  # doctest: +SKIP
        >>> service = ScoringService(factory=server, name="reference", num_cpus=0.1)  # doctest: +SKIP
    """

    offers = frozenset({"temperature", "top_k"})
    instead = (
        "its log-probs are of all tokens, under its own --dtype and the adapter that model= names. Serve the transformers "
        "model for what else is needed"
    )

    temperatures: Literal["raw", "tempered"] = "raw"
    precision: float = 0.0

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        dialect: Literal["vllm", "sglang"] = "vllm",
        api_key_env: str | None = None,
        timeout: float = 60.0,
        concurrency: int = 16,
        probe: Sequence[int] = range(1, 13),
        interface: ModelInterface | None = None,
    ) -> None:
        check_choice(("vllm", "sglang"), dialect=dialect)
        check_range(1, concurrency=concurrency)
        check_range(above=0, timeout=timeout)
        if dialect == "vllm" and not model:
            raise ValueError("model must be the model's name at the server (its --served-model-name).")
        key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not key:
            raise ValueError(f"api_key_env: the environment variable {api_key_env!r} is not set in this process.")
        self._http = _Http(url, key)
        self.place = str(self._http)
        self._dialect: _Dialect = _Vllm(model or "") if dialect == "vllm" else _Sglang()
        self._timeout, self._interface = timeout, interface or ModelInterface()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="http")
        self._probe = [int(token) for token in probe]
        if len(self._probe) < 2:
            raise ValueError(f"probe must have at least two token ids, got {self._probe}.")
        if dialect == "sglang" and model is not None:
            self._check_model(model)
        self._measure()

    # ------------------------------------------------------------------ scores

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :class:`Engine`."""
        top_k, sequences, mask = options.top_k, request.tokens, request.mask
        if options.temperature != 1.0 and self.temperatures == "raw":
            raise ValueError(
                f"temperature={options.temperature:g}, but the server's log-probs are at temperature 1 whatever is "
                "requested, and cannot be converted without all logits. Score at temperature 1, or start vLLM with "
                "--logprobs-mode processed_logprobs."
            )
        temperature = options.temperature if self.temperatures == "tempered" else 1.0
        deadline, renewed = time.monotonic() + self._timeout, self._http.renewed
        masks = mask.split(sequences.lengths.tolist())
        jobs = []
        for i, (row, chosen) in enumerate(zip(sequences.to_list(), masks, strict=True)):
            where = chosen.nonzero().squeeze(-1).tolist()
            if where:
                job = _Job(f"sequence {i}", row.tolist()[: where[-1] + 1], where, temperature, top_k, deadline)
                jobs.append((self._threads.submit(self._positions, job), job))
        positions: list[tuple[int, dict[int, float]]] = []
        try:
            for answer, job in jobs:
                found = self._awaited(answer, job.deadline)
                positions += [(job.tokens[t], found[t] or {}) for t in job.scored]
        except BaseException:
            for answer, _ in jobs:
                answer.cancel()
            raise
        if self._http.renewed != renewed:
            self._compare(self._score_probe(1.0, deadline), "it came back with another model")
        elements = mask.nonzero().squeeze(-1)
        log_prob = torch.tensor([found[token] for token, found in positions])
        request.check_finite(elements, log_prob)
        top = _top([found for _, found in positions], top_k) if top_k else {}
        return Scores.spread(request.layout, elements, log_prob, **top)

    def _awaited(self, answer: Future[_T], deadline: float) -> _T:
        """The result of a thread, wherever it is stuck."""
        wait([answer], max(deadline - time.monotonic(), 0.0) + _GRACE)
        if not answer.done():
            raise ServiceTimeout(f"{self._http} cannot be reached in time. Raise timeout=, or look at its log.")
        return answer.result()

    def _positions(self, job: _Job) -> list[Position]:
        """Log-probs at each position of a sequence from its first scored token on, checked."""
        problem = ""
        for start in dict.fromkeys(self._dialect.starts(job.scored[0])):
            body = self._dialect.body(job, start)
            reply = self._http.post(self._dialect.path, body, job)
            try:
                found, ids = self._dialect.read(reply, job.tokens, start)
            except (AttributeError, LookupError, TypeError, ValueError):
                raise ServiceError(
                    f"{self._http} answers in another form than this dialect: {str(reply)[:80]!r}. Pass the right dialect=."
                ) from None
            if ids != job.tokens[start:]:
                raise ServiceError(
                    f"{self._http} scored other tokens than were sent for {job.name}: {_difference(job.tokens[start:], ids)} "
                    "It must take token ids as they are: check for a proxy that sends text, or a start token that it adds."
                )
            missing = [t for t in job.scored if found[t] is None]
            if not missing:
                return found
            problem = (
                f"{self._http} returned no log-prob for {len(missing)} of {len(job.scored)} tokens of {job.name}, "
                f"first at position {missing[0]}: {self._dialect.advice}"
            )
        raise ServiceError(problem)

    # ------------------------------------------------------------------ the probe

    def _measure(self) -> None:
        """Score the probe: how the server treats temperatures, how it rounds, and what this model's scores are."""
        plain, again, hot = (self._score_probe(temperature) for temperature in (1.0, 1.0, 2.0))
        self._reference = plain
        self._compare(again, "the log-probs of one sequence changed between two requests")
        ratios = [
            (hot[t][i] - hot[t][j]) / (plain[t][i] - plain[t][j])
            for t in range(len(plain))
            for i in plain[t].keys() & hot[t].keys()
            for j in plain[t].keys() & hot[t].keys()
            if i < j and 10 * _TOLERANCE < abs(plain[t][i] - plain[t][j]) < -_CLAMPED / 2
        ]
        # Of two tokens' log-probs the difference is that of their logits over the temperature.
        kinds = {round(2 * ratio) for ratio in ratios} or {2}
        if kinds not in ({1}, {2}):
            raise ServiceError(
                f"{self._http}: log-probs at temperature 2 are neither those at 1 nor of halved logits (ratios "
                f"{min(ratios):.3g} to {max(ratios):.3g}): another processor is active at the server."
            )
        self.temperatures = "raw" if kinds == {2} else "tempered"
        values = [x for position in (*plain, *again, *hot) for x in position.values()]
        self.precision = rounding(values)
        if self.precision:
            _LOG.warning("%s rounds log-probs: errors up to %g nats.", self._http, self.precision)

    def _score_probe(self, temperature: float, deadline: float | None = None) -> list[dict[int, float]]:
        until = deadline or time.monotonic() + self._timeout
        job = _Job("the probe", self._probe, [*range(1, len(self._probe))], temperature, 2, until)
        found = self._awaited(self._threads.submit(self._positions, job), until)
        return [position or {} for position in found[1:]]

    def _compare(self, found: list[dict[int, float]], what: str) -> None:
        """Compare the probe's log-probs with those at the start."""
        pairs = zip(self._probe[1:], self._reference, found, strict=True)
        worst = max(abs(max(old[t], -1e4) - max(new[t], -1e4)) for t, old, new in pairs)
        if not worst <= _TOLERANCE:  # NaN too
            raise ServiceError(f"{self._http}: {what}, by {worst:.3g} nats. Create the service again to accept it.")

    def _check_model(self, model: str) -> None:
        deadline = time.monotonic() + self._timeout
        found = self._awaited(self._threads.submit(self._http.get, "/get_model_info", deadline), deadline)
        served = (found or {}).get("model_path", model)
        if served != model:
            raise ServiceConfigError(f"{self._http} serves {served!r}, expected model={model!r}.")

    # ------------------------------------------------------------------ the rest of an engine

    def progress(self) -> int:
        """Number of replies."""
        return self._http.replies

    def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer for clients that tokenise; the model is no TorchRL wrapper."""
        return self._interface, False

    def cached_tokens(self) -> tuple[int, int]:
        """Nothing: the server has its own cache."""
        return 0, 0

    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises a TypeError: the weights are the server's."""
        raise TypeError(f"the weights of {self._http} are not in this process: update them at the server.")

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Raises a TypeError: the weights are the server's."""
        self.check_weights(weights)

    def close(self) -> None:
        """End the threads; requests under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def rounding(values: Sequence[float]) -> float:
    """Largest error of numbers that all have at most six decimals: half the last one; 0.0 if they have more.

    Example:
        >>> rounding([-1.25, -0.5]), rounding([-1.2345678, -0.5])
        (0.005, 0.0)
    """
    for decimals in range(7):
        if all(abs(x - round(x, decimals)) <= 1e-9 * max(abs(x), 1.0) for x in values if math.isfinite(x)):
            return 0.5 * 10.0**-decimals
    return 0.0


def _top(positions: Sequence[Mapping[int, float]], k: int) -> dict[str, Tensor]:
    """The ``k`` most probable tokens, and the log of the others' total probability, from the server's rounded numbers."""
    best = [sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))[:k] for found in positions]
    if short := [len(some) for some in best if len(some) < k]:
        raise ServiceError(f"the server returned {min(short)} tokens for top_k={k}: raise its limit (--max-logprobs).")
    ids = torch.tensor([[token for token, _ in some] for some in best]).reshape(-1, k)
    values = torch.tensor([[value for _, value in some] for some in best], dtype=torch.float64).reshape(-1, k)
    rest = torch.log1p(-values.exp().sum(-1).clamp(max=1.0))
    return {"top_indices": ids, "top_log_probs": values.float(), "tail_log_prob": rest.float()}


def _difference(sent: Sequence[int], found: Sequence[int]) -> str:
    if len(sent) != len(found):
        return f"{len(sent)} were sent, {len(found)} came back."
    at = next(i for i, (one, other) in enumerate(zip(sent, found, strict=True)) if one != other)
    return f"{sent[at]} was sent, {found[at]} came back."


# ------------------------------------------------------------------ dialects


@dataclass(frozen=True)
class _Job:
    """One sequence to score."""

    name: str
    tokens: list[int]
    scored: list[int]  # positions of the scored tokens
    temperature: float
    top_k: int
    deadline: float  # of time.monotonic()


class _Dialect(Protocol):
    path: str
    advice: str  # what to do about positions without log-probs

    def starts(self, first: int) -> tuple[int, ...]:
        """The first position to request, in the order of the tries, if log-probs are needed from ``first`` on."""

    def body(self, job: _Job, start: int) -> dict[str, Any]:
        """The request."""

    def read(self, reply: Any, tokens: list[int], start: int) -> tuple[list[Position], list[int]]:
        """Log-probs at each position of the sequence, and the ids that the server scored from ``start`` on."""


class _Vllm:
    path = "/v1/completions"
    advice = "start vLLM with --no-enable-prefix-caching, or a version that recomputes cached prompts."

    def __init__(self, model: str) -> None:
        self._model = model

    def starts(self, first: int) -> tuple[int, ...]:
        return (0,)

    def body(self, job: _Job, start: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": job.tokens,
            "max_tokens": 1,  # the least
            "temperature": job.temperature,
            "prompt_logprobs": max(job.top_k, 1),
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,  # no other request's prefix
            "stream": False,
            **_PLAIN,
        }

    def read(self, reply: Any, tokens: list[int], start: int) -> tuple[list[Position], list[int]]:
        choice = reply["choices"][0]
        found: list[Position] = [
            None if entry is None else _position((int(token), x["logprob"]) for token, x in entry.items())
            for entry in choice["prompt_logprobs"] or ()
        ]
        if len(found) < len(tokens):  # which ones are missing is unknown
            return [None] * len(tokens), tokens
        # Earlier versions do not return the ids, but each entry holds that of its own token.
        ids = choice.get("prompt_token_ids") or tokens + [-1] * (len(found) - len(tokens))
        pairs = zip(ids, found, strict=True)
        return found, [token if entry is None or token in entry else next(iter(entry), -1) for token, entry in pairs]


class _Sglang:
    path = "/generate"
    advice = "it did not recompute them with logprob_start_len=0 either, or the token is forbidden (log-prob -inf)."

    def starts(self, first: int) -> tuple[int, ...]:
        # The entry at the start is null: begin one token before. Tokens before it may come from the server's cache.
        return max(first - 1, 0), 0

    def body(self, job: _Job, start: int) -> dict[str, Any]:
        return {
            "input_ids": job.tokens,
            "sampling_params": {"temperature": job.temperature, "max_new_tokens": 0, **_PLAIN},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": job.top_k,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def read(self, reply: Any, tokens: list[int], start: int) -> tuple[list[Position], list[int]]:
        info = reply["meta_info"]
        entries: list[Any] = info["input_token_logprobs"] or []
        tops: list[Any] = info.get("input_top_logprobs") or [None] * len(entries)
        if len(entries) < len(tokens) - start:  # only the tokens that were not in its cache
            absent = len(tokens) - start - len(entries)
            entries = [[None, token, None] for token in tokens[start : start + absent]] + entries
            tops = [None] * absent + tops
        found: list[Position] = [None] * start
        for (value, token, *_), top in zip(entries, tops, strict=True):
            position = _position((int(other), x) for x, other, *_ in top or () if x is not None)
            found.append(None if value is None else {**position, int(token): _number(value)})
        return found, [int(token) for _, token, *_ in entries]


def _position(entries: Iterable[tuple[int, Any]]) -> dict[int, float]:
    """Log-probs by token."""
    found: dict[int, float] = {}
    for token, value in entries:
        if token in found:
            raise ServiceError(
                f"the server sent two log-probs of token {token} at one position: look for a faulty proxy."
            )
        found[token] = _number(value)
    return found


def _number(value: Any) -> float:
    """A log-prob; -inf where the server has clamped it, NaN where its weights are broken."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value > _ABOVE_ZERO:
        raise ServiceError(
            f"the server sent the log-prob {str(value)[:40]}, expected a number of at most 0: look for another processor of "
            "log-probs at the server, or a faulty proxy."
        )
    return -math.inf if value <= _CLAMPED else float(value)


# ------------------------------------------------------------------ HTTP


class _Http:
    """A server, over connections that stay open, one for each thread.

    Attributes:
        renewed: number of new connections and repeated requests: after one, the server may be another process.
        replies: number of proper answers.
    """

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(
                f"url must be http:// or https:// with a host and without user or query, got {_public(url)!r}."
            )
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._local, self._lock = threading.local(), threading.Lock()
        self.renewed = self.replies = 0

    def __str__(self) -> str:
        return f"the server at {self._url}"

    def post(self, path: str, body: Mapping[str, Any], job: _Job) -> Any:
        """The JSON of the reply. Repeats a request without a proper answer until the deadline.

        Raises:
            ValueError: if the server refuses the request.
            ServiceTimeout: if there is no answer until the deadline.
            ServiceError: for any other answer, and for one of more bytes than what was requested can have.
        """
        data, pause, failures = json.dumps(body).encode(), _FIRST_PAUSE, 0
        limit = _PAGE + _ENTRY * len(job.tokens) * (job.top_k + 2)
        while True:
            try:
                status, text = self._exchange("POST", path, data, job.deadline, limit)
            except (OSError, http.client.HTTPException) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return self._parsed(text)
                why = f"HTTP {status}: {_message(text)}"
                failures += status == 500
                if status in (400, 413, 422):
                    raise ValueError(f"{self} refuses {job.name}: {why}")
                if failures >= _TRIES_AFTER_500 or (status < 500 and status not in (408, 425, 429)):
                    raise ServiceError(f"{self} answers with {why}")
            self._renew()
            if time.monotonic() + pause >= job.deadline:
                raise ServiceTimeout(f"{self} did not answer in time: {why}. Raise timeout=, or look at its log.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def get(self, path: str, deadline: float) -> dict[str, Any] | None:
        """A JSON object, or None if the server has no such page or does not answer."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, text = self._exchange("GET", path, None, deadline, _PAGE)
            found = self._parsed(text) if status == 200 else None
            return found if isinstance(found, dict) else None
        return None

    def _exchange(self, method: str, path: str, data: bytes | None, deadline: float, limit: int) -> tuple[int, bytes]:
        """Status and body; a TimeoutError at the deadline, a ServiceError for more than ``limit`` bytes."""
        left = max(deadline - time.monotonic(), 0.01)
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            connection = self._local.connection = kind(self._host, self._port, timeout=left)
            self._renew()
        try:
            connection.timeout = left
            if connection.sock is not None:
                connection.sock.settimeout(left)
            connection.request(method, self._base + path, data, self._headers)
            connection.response_class = partial(_Response, deadline=deadline, limit=limit)
            reply = connection.getresponse()
            if (reply.length or 0) > limit:
                raise _TooLong
            return reply.status, reply.read()
        except _TooLong:
            self._local.connection = None
            connection.close()
            raise ServiceError(
                f"{self} answers with more than {limit} bytes, the most that this request can have: check that it is the "
                "right server."
            ) from None
        except BaseException:
            self._local.connection = None
            connection.close()
            raise

    def _renew(self) -> None:
        with self._lock:
            self.renewed += 1

    def _parsed(self, text: bytes) -> Any:
        with self._lock:
            self.replies += 1
        try:
            return json.loads(text, object_pairs_hook=self._once)
        except (ValueError, RecursionError):
            raise ServiceError(f"{self} answers with something that is not JSON: {text[:80]!r}.") from None

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object of JSON; Python's own takes the last of several entries with one name."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ServiceError(f"{self} sent two entries named {twice[:40]!r} in one object: look for a faulty proxy.")
        return found


class _TooLong(Exception):
    """An answer has more bytes than what was requested can have."""


class _Response(http.client.HTTPResponse):
    """A response that is whole before a deadline, and of at most ``limit`` bytes, interim responses and headers included."""

    def __init__(self, sock: Any, *args: Any, deadline: float, limit: int, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_Limited(sock, self.fp.detach(), deadline, limit))


class _Limited(io.RawIOBase):
    """The bytes of a socket, until a deadline and up to a number."""

    def __init__(self, sock: Any, raw: io.RawIOBase, deadline: float, limit: int) -> None:
        self._sock, self._raw, self._deadline, self._left = sock, raw, deadline, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer is not complete")
        self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise _TooLong
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _message(text: bytes) -> str:
    """The message of an error reply: vLLM's ``error.message`` or ``message``, or its first characters."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(text)
        inner = found.get("error", found)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if message:
            return str(message)[:300]
    return text[:300].decode(errors="replace")


def _public(url: Any) -> str:
    """A URL without the password in it."""
    return str(url).rpartition("@")[2]
