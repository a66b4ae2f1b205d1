"""A model whose scores are remembered on disk, its scorer, and the digest that identifies a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl._typing import asked, call_of, has
from torchrl_llm_kl.scoring._invariant import PACK
from torchrl_llm_kl.scoring._model import adapter_state, fingerprint as weights_state, locked
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._protocol import Model, Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._scorer import LogProbScorer, ScorerSlot
from torchrl_llm_kl.scoring._scores import Scores
from torchrl_llm_kl.scoring._store import KEY_BYTES, ScoreStore
from torchrl_llm_kl.scoring._wrapper import is_wrapper, log_probs_only, unwrap, vocabulary_of
from torchrl_llm_kl.scoring._wrapping import Ranks, unwrapped

# Increase this when scores change by more than rounding: earlier records are then no longer found.
_FORMAT = 1
# The range of each score, up to rounding. Other values are not stored.
_SPANS = {name: (-np.inf, 0.01) for name in ("log_prob", "ref_log_prob")}
_SPANS |= {name: (-0.01, np.inf) for name in ("entropy", "kl")}
# Attributes that transforms read from a TorchRL wrapper or a service's proxy, besides its keys.
_INTERFACE = {"interface", "input_mode", "generate", "return_log_probs", "pad_output", "layout"}
_INTERFACE |= {"tokenizer", "chat_template", "chat_template_name"}


class RememberedModel(nn.Module):
    """A model whose log-probs and entropies are remembered on disk. Sequences that were scored before need no forward.

    It is for frozen references, in later epochs over a replay buffer and in repeated runs. Pass it wherever a transform or a
    loss takes a reference. Processes may share the folder. Scores are looked up by weights, settings and tokens, so a change
    of any of them is a miss, even an in-place change of one weight. A remembered score has the bits of its first computation.
    A new computation may differ by rounding, except with ``deterministic=True``. If only some tokens of a sequence were
    scored, the sequence is forwarded for the others. Gradients, top-k, moments and an exact KL are not remembered.

    The weights are read at the first score, and again after they changed; see :func:`fingerprint_of`. A service reports the
    fingerprint of its weights at each call, so scores of earlier weights are misses after a push.

    Args:
        model: any model that a :class:`LogProbScorer` takes, or a :class:`~torchrl_llm_kl.service.RemoteModel`. A wrapper of
            another backend requires ``fingerprint``.
        store: a :class:`ScoreStore`, or a folder for one.

    Keyword Args:
        fingerprint: a text that identifies the weights, which are then not read. Pass another text whenever they change.

    Raises:
        TypeError: if ``model`` is a scorer, or its weights are not in this process and ``fingerprint`` is not given.
        ValueError: when it scores, if the model is wrapped or sharded over ranks.

    Example:
        >>> import tempfile
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 4),)
        >>> reference = RememberedModel(Uniform(), tempfile.mkdtemp())
        >>> scorer = reference.make_scorer()
        >>> for _ in range(2):
        ...     print(scorer.score([[0, 1, 2]]).to_list(), reference.store.tokens_recalled)
        [tensor([ 0.0000, -1.3863, -1.3863])] 0
        [tensor([ 0.0000, -1.3863, -1.3863])] 2
    """

    log_probs_only = True  # no distributions: see check_distributions
    place = "remembered on disk"

    def __init__(
        self, model: Model, store: ScoreStore | str | os.PathLike[str], *, fingerprint: str | None = None
    ) -> None:
        super().__init__()
        if isinstance(model, LogProbScorer):
            raise TypeError("model is a scorer: pass its model. Set options on the transform or loss.")
        self.store = store if isinstance(store, ScoreStore) else ScoreStore(store)
        self._stated = fingerprint
        self._read: tuple[object, str] = (None, "")  # the state of the weights, and their fingerprint
        self._tokenizer: tuple[object, str] = (None, "")
        self.model: Any = model
        if fingerprint is None and not has(model, "make_scorer"):
            module_of(model)

    @property
    def replays(self) -> bool:
        """Whether the model can be scored over recorded tokens. Such scores are not remembered."""
        return not log_probs_only(self.model) or asked(self.model, "replays", bool) is True

    def __getattr__(self, name: str) -> Any:
        of_wrapper = name in _INTERFACE or name.endswith(("_key", "_keys"))
        return getattr(self.model, name) if of_wrapper else super().__getattr__(name)

    def make_scorer(self, **settings: object) -> RememberedScorer:
        """A scorer with these settings of :class:`LogProbScorer` or of the service's scorer."""
        return RememberedScorer(self, settings)

    def forget(self) -> None:
        """Read the weights again at the next score. Needed only after a few weights were changed through ``.data``."""
        self._read = None, ""

    def weights(self) -> tuple[int | None, str] | None:
        """The version and the fingerprint of the current weights, or None while a service changes them.

        Only the weights of a service have a version.
        """
        if isinstance(self.model, nn.Module) and Ranks([self.model]).groups:
            raise ValueError(
                f"{type(self.model).__name__} is wrapped or sharded over ranks: use a model in one process."
            )
        if self._stated is not None:
            return None, f"stated {self._stated}"
        if has(self.model, "make_scorer"):
            version_and_digest: tuple[int | None, str] | None = self.model.fingerprint()
            return version_and_digest
        module = module_of(self.model)
        state = weights_state(module), structure(module)
        if state != self._read[0]:
            self._read = state, fingerprint_of(module)
        return None, f"{self._read[1]} {code_of(module)}"

    def vocabulary(self) -> str:
        """A digest of the tokenizer's vocabulary. It is empty if the model does not tokenize."""
        model = asked(self.model, "interface", object, self.model)
        tokenizer = asked(model, "tokenizer", object)
        if tokenizer is not self._tokenizer[0]:
            text = json.dumps([type(tokenizer).__name__, sorted(vocabulary_of(model).items())])
            self._tokenizer = tokenizer, blake2b(text.encode(), digest_size=16).hexdigest()
        return self._tokenizer[1]


class RememberedScorer(Scorer):
    """The scorer of a :class:`RememberedModel`. It stores log-probs and entropies without gradient.

    Args:
        model: the model.
        settings: settings of the scorer that computes the missing scores.
    """

    model: RememberedModel

    def __init__(self, model: RememberedModel, settings: Mapping[str, object]) -> None:
        self.model, self._settings, self._slot = model, settings, ScorerSlot()
        self.options, self.path = self.inner.options, self.inner.path

    @property
    def inner(self) -> Scorer:
        """The scorer of the model itself."""
        scorer: Scorer = self._slot.get(self.model.model, **self._settings)
        return scorer

    def check(
        self, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: Scorer | None = None
    ) -> None:
        """Raise the errors of the model's own scorer."""
        self.inner.check(options, request, reference=reference)

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`."""
        options = self.options if options is None else options
        if reference is not None or not _is_stored(request, options):
            return self.inner.run(request, options, reference=reference)
        # The lock keeps updaters of this process from changing the weights between the fingerprint and the forward.
        with locked(self.inner.model) if self._here else nullcontext():
            return self._begin(request, options)()

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Callable[[], Scores]:
        """Look up the scores, and request the missing ones from a service."""
        options = self.options if options is None else options
        if self._here or not _is_stored(request, options):
            return partial(self.run, request, options)
        return self._begin(request, options)

    def forget(self) -> None:
        """Clear the scorer's cache and read the weights again at the next score. The store keeps its scores."""
        self.inner.forget()
        self.model.forget()

    @property
    def _here(self) -> bool:
        return isinstance(self.inner, LogProbScorer)

    def _begin(self, request: ScoreRequest, options: ScoreOptions) -> Callable[[], Scores]:
        inner, weights = self.inner, self.model.weights()
        if weights is None or not bool(request.mask.any()):
            return partial(inner.run, request, options)
        inner.check(options, request)
        version, lookup = weights[0], Lookup(self.model.store, request, self._contexts(inner, weights[1], options))
        if lookup.complete:
            return lambda: lookup.scores(version)
        start = inner.begin(lookup.missing(), options)

        def finish() -> Scores:
            try:
                scores = start()
            except ValueError:  # its sequence number counts the missing sequences: repeat for a number of the caller's
                return inner.run(request, options)
            if version is not None and scores.version != version:  # the weights were replaced meanwhile
                return inner.run(request, options)
            lookup.take(scores)
            if self.model.weights() == weights:
                lookup.store_new()
            return lookup.scores(version)

        return finish

    def _contexts(self, inner: Scorer, weights: str, options: ScoreOptions) -> dict[str, bytes]:
        """A key for each column, from everything but the tokens that a score depends on."""
        settings: dict[str, object] = {"temperature": options.temperature, "adapters": options.adapters}
        if options.sampling.truncates:
            settings["truncation"] = options.sampling.truncation
        dtype = options.dtype or (_autocast(inner.model) if self._here else None)
        settings["dtype"] = dtype and str(dtype)
        if options.deterministic:
            # Equal bits are promised only for one number of threads and one size of packs.
            size = asked(inner, "tokens_per_batch", int) or PACK
            settings["deterministic"] = (torch.__version__, torch.get_num_threads(), size)
        about = json.dumps([_FORMAT, weights, self.model.vocabulary(), settings], default=str)
        names = ["log_prob"] + ["entropy"] * options.entropy
        return {name: blake2b(f"{name} {about}".encode(), digest_size=32).digest() for name in names}


def _is_stored(request: ScoreRequest, options: ScoreOptions) -> bool:
    """Whether such scores are stored: log-probs and entropies that depend only on tokens and images."""
    return not (
        request.recorded.keys() - {"images"}
        or options.grad
        or options.record_routing
        or set(options.beside) - {"entropy"}
    )


def _autocast(model: Model) -> torch.dtype | None:
    """The autocast dtype around the call, on the model's device."""
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = "cpu" if weight is None else weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class Lookup:
    """The scores of a request: those in the store, and those that are computed.

    ``contexts`` has a digest of 32 bytes for each column, of everything but the tokens that its scores depend on.
    """

    def __init__(self, store: ScoreStore, request: ScoreRequest, contexts: Mapping[str, bytes]) -> None:
        self._store, self._request = store, request
        self._mask, self._lengths = request.mask.numpy(), request.tokens.lengths.tolist()
        rows = np.split(request.tokens.values.numpy().astype("<i8"), np.cumsum(self._lengths)[:-1])
        texts = [row.tobytes() for row in rows]
        if (images := request.images) is not None:
            digests = [b"".join(image.digest for image in row) for row in images.rows]
            texts = [text + more for text, more in zip(texts, digests, strict=True)]
        self._keys = {
            name: [blake2b(text, digest_size=KEY_BYTES, key=context).digest() for text in texts]
            for name, context in contexts.items()
        }
        # One value per token, NaN where the score is not known yet.
        self._known = {name: store.read(keys, self._lengths) for name, keys in self._keys.items()}
        self._new: dict[str, np.ndarray] = {}
        self._missing = self._mask & np.logical_or.reduce([np.isnan(values) for values in self._known.values()])
        wanted, missing = int(self._mask.sum()), int(self._missing.sum())
        store.tokens_seen += wanted
        store.tokens_recalled += wanted - missing

    @property
    def complete(self) -> bool:
        """Whether the store has all scores."""
        return not self._missing.any()

    def missing(self) -> ScoreRequest:
        """A request for the missing scores: the sequences that lack one, and the mask of their tokens that lack one."""
        sequence, mask = self._request.tokens.sequence_ids, torch.from_numpy(self._missing)
        rows = sequence[mask].unique()
        self._sent = replace(self._request.select(rows), mask=mask[torch.isin(sequence, rows)])
        return self._sent

    def take(self, scores: Scores) -> None:
        """Take the computed scores of :meth:`missing`. Scores from the store stay as they are."""
        for name, known in self._known.items():
            computed = scores.per_token[name].values.detach().cpu()[self._sent.mask].numpy()
            self._new[name] = np.full(len(known), np.nan, computed.dtype)
            self._new[name][self._missing] = computed
            self._new[name][~np.isnan(known)] = np.nan

    def store_new(self) -> None:
        """Store the computed scores."""
        for name, values in self._new.items():
            low, high = _SPANS[name]
            possible = np.isfinite(values) & (values >= low) & (values <= high)
            self._store.add(self._keys[name], self._lengths, np.where(possible, values, np.nan))

    def scores(self, version: int | None) -> Scores:
        """All scores of the request."""
        columns: dict[str, Tensor] = {}
        for name, known in self._known.items():
            values = np.where(np.isnan(known), self._new[name], known) if name in self._new else known
            columns[name] = torch.from_numpy(values[self._mask])
        elements = self._request.mask.nonzero().squeeze(-1)
        return Scores.spread(self._request.layout, elements, **columns)._replace(version=version)


# ------------------------------------------------------------------ the identity of a model


_CHUNK = 16 * 2**20  # bytes hashed at a time
# Attributes of modules that do not change scores, or that differ between equal models.
_IGNORED = {"training", "gradient_checkpointing", "name_or_path"}
_LIBRARIES = ("torch", "transformers", "peft")


def fingerprint_of(model: object) -> str:
    """A digest of a model's configuration and weights: 32 hexadecimal digits.

    It is equal for equal models in any process and on any device, wherever they were loaded from. It covers the configuration,
    the class and plain attributes of each module, the name, dtype, shape and bytes of each parameter and buffer, and the active
    PEFT adapters with their factors. The rotary frequencies of a transformers model are covered only by its configuration.
    Hashing runs at about 1 GB/s per CPU core, on up to 8 cores.

    Args:
        model: a module, or a TorchRL wrapper around one.

    Raises:
        TypeError: if the weights are not in this process.
        ValueError: if they are sharded over ranks.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = fingerprint_of(layer)
        >>> _ = torch.nn.init.zeros_(layer.bias)
        >>> len(before), fingerprint_of(layer) == before
        (32, False)
    """
    module = module_of(model)
    if Ranks([model, module]).groups:
        raise ValueError(f"{type(module).__name__} is sharded over ranks: take the fingerprint before it is sharded.")
    tensors = dict(_tensors(module))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        distinct = {_memory_place(tensor): tensor for tensor in tensors.values()}  # tied weights are read once
        digests = dict(zip(distinct, pool.map(_digest_of_tensor, distinct.values()), strict=True))
    whole = blake2b(structure(module).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digests[_memory_place(tensor)])
    return whole.hexdigest()


def module_of(model: object) -> nn.Module:
    """The module of a model or of a wrapper. Raises a TypeError if it is in another process."""
    check_not_a_name(model=model)
    module = unwrapped(unwrap(model) if is_wrapper(model) else model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(model).__name__} has no weights in this process: pass a text for them as fingerprint=.")
    return module


# ---------------------------------------------------------------------- tensors


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name. A tensor of several parts, such as a quantized one, is yielded by its parts."""
    named = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        of_library = type(part).__module__.split(".")[0] in _LIBRARIES
        if not (of_library and any(name.endswith("inv_freq") for name in part._buffers)):
            named |= {f"{prefix}.{name}": buffer for name, buffer in part._buffers.items() if buffer is not None}
    for name, tensor in named.items():
        yield from _parts(name, tensor.detach())


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not has(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, about = cast(Any, tensor).__tensor_flatten__()
    for part in inner:
        yield from _parts(f"{name}.{part} {about}", getattr(tensor, part))


def _memory_place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _digest_of_tensor(tensor: Tensor) -> bytes:
    digest, flat = blake2b(digest_size=16), tensor.detach().reshape(-1)
    for chunk in flat.split(max(1, _CHUNK // max(1, flat.element_size()))):
        digest.update(chunk.contiguous().cpu().view(torch.uint8).numpy())
    return digest.digest()


# ---------------------------------------------------------------------- everything else


def structure(model: nn.Module) -> str:
    """A text of everything but tensors on which scores depend: configuration, classes, plain attributes, adapters."""
    parts = [_config(model)]
    for name, module in model.named_modules():
        kind = type(module)
        plain = {}
        if not kind.__module__.startswith("transformers."):  # their attributes follow from the configuration
            plain = {
                key: value
                for key, value in vars(module).items()
                if key[0] != "_" and key not in _IGNORED and isinstance(value, (bool, int, float, str))
            }
        parts.append(f"{name} {kind.__module__}.{kind.__qualname__} {sorted(plain.items())}")
    return "\n".join([*parts, repr(adapter_state(model))])


def _config(model: nn.Module) -> str:
    config = asked(model, "config", object)
    settings = config if isinstance(config, dict) else call_of(config, "to_dict", {})
    return json.dumps(_lasting(settings), sort_keys=True, default=lambda value: type(value).__qualname__)


def _lasting(value: object) -> object:
    """The settings without the entries on where a model came from and how it runs."""
    if not isinstance(value, dict):
        return value
    drop = ("architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {str(key): _lasting(item) for key, item in value.items() if str(key)[0] != "_" and key not in drop}


def code_of(model: nn.Module) -> str:
    """The versions of the libraries that define a model's modules, and the code of all other forwards, as text."""
    code = set()
    for kind in {type(module) for module in model.modules()}:
        library = kind.__module__.split(".")[0]
        if library in _LIBRARIES:
            version = asked(sys.modules.get(library), "__version__", str)
            code |= set() if library == "torch" else {f"{library} {version}"}
        else:
            own = asked(kind.forward, "__code__", CodeType)
            code.add(f"{kind.__qualname__} {'' if own is None else _code(own)}")
    return " ".join(sorted(code))


def _code(code: CodeType) -> str:
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
