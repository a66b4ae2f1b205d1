"""The scorer: token ids in, log-probs out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name, check_range, finite_total, to_host
from torchrl_llm_kl._typing import asked, has
from torchrl_llm_kl.scoring._cache import PrefixKVCache
from torchrl_llm_kl.scoring._context import Context
from torchrl_llm_kl.scoring._explain import Explanation, explain
from torchrl_llm_kl.scoring._forks import has_state
from torchrl_llm_kl.scoring._images import ImageModel
from torchrl_llm_kl.scoring._invariant import PACK, check_pack, drops, obstacle
from torchrl_llm_kl.scoring._model import (
    Inspection,
    Route,
    Setup,
    check_base_is_frozen,
    check_has_adapters,
    frequency_switches,
    is_compiled,
    is_offloaded,
    is_on_meta,
    locked,
    model_device,
    placeholders,
    position_limit,
    vocab_size,
)
from torchrl_llm_kl.scoring._options import Changes, ScoreOptions
from torchrl_llm_kl.scoring._passes import ScoringRun
from torchrl_llm_kl.scoring._probe import choose_route, find_variance
from torchrl_llm_kl.scoring._protocol import MakesScorer, Model, Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest, Sequences, TokenMask, not_text, read_request
from torchrl_llm_kl.scoring._routing import Routers, Routing
from torchrl_llm_kl.scoring._scores import Scores, TokenStates, kept_of
from torchrl_llm_kl.scoring._wrapper import (
    SamplerMismatchWarning,
    is_wrapper,
    log_probs_only,
    score_wrapper,
    scoring_version,
    unwrap,
)
from torchrl_llm_kl.scoring._wrapping import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


class LogProbScorer(Scorer):
    r"""Per-token :math:`\log \pi(\text{token} \mid \text{prefix})` of given token ids under a language model.

    Sequences are laid end to end without padding. A prefix that several of them share (the prompt of a group of
    answers, the earlier turns of a conversation) goes through the model once. The head runs only at positions that
    predict a scored token. The softmax is computed in float32, one tile of positions and tokens at a time, so
    ``[B, T, V]`` never exists. A short probe checks this fast path at construction. If it does not reproduce the
    model's own log-probs, the scorer warns and uses the model's own forward. See :attr:`path`.

    Without gradient the model is scored in evaluation mode, and its mode is restored afterwards. Dropout would turn the
    KL of a model with itself into noise. Scorers of one model wait for each other. Do not run the model in another thread
    during a score.

    Args:
        model: a transformers causal LM, or a TorchRL wrapper around one (only its weights matter, so ``generate=True`` is
            fine), or a wrapper of another backend, which is scored through its own forward, or any module that takes
            ``input_ids`` and returns logits (as an attribute, under a key, or first in a tuple).
        options: how to score.

    Keyword Args:
        tokens_per_batch: the most tokens in one forward. By default 1024 on a CPU, where more is slower, and 16384
            elsewhere. It is halved, with a warning, whenever a forward runs out of memory.
        head_chunk: the most positions whose whole logits are held at once, if the head is not a plain linear layer.
        probe: False skips the check of the fast path.
        share_prefixes: False scores every sequence separately, in padded micro-batches of similar length. Models that
            cannot attend within a pack always run this way. Models that drop layers at random, or checkpoint them in their
            own code, do so for gradients, with a warning.
        context_parallel: the ranks that score each batch together. All of them are given the same batch. Each one forwards its
            share of every sequence, and stores only the activations, keys and values of that share. All ranks return all
            scores. The gradient of a loss of the scores is the mean of the ranks' gradients, as DDP and FSDP compute it.
        changes: fields of ``options``, and ``temperature``.

    Attributes:
        model: the scored module, or the wrapper of another backend.
        memory: the cache of ``remember``. Its ``limit`` in bytes may be set.
        forwards: number of packs and micro-batches forwarded so far. It grows during a call.

    Raises:
        TypeError: if ``model`` is none of the above, or an option has another type.
        ValueError: if a number is out of range, another backend cannot follow an option, or the model cannot be scored
            with ``deterministic=True``. The message gives the reason.

    Warns:
        SamplerMismatchWarning: once, if ``sampling`` drops more than one percent of the scored tokens.

    Example:
        >>> from torchrl_llm_kl import Ragged
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 4),)
        >>> scorer = LogProbScorer(Uniform())  # warns: no separate body and head
        >>> scorer.score([[0, 1, 2], [3]]).to_list()
        [tensor([ 0.0000, -1.3863, -1.3863]), tensor([0.])]
        >>> scorer.evaluate([[0, 1]], entropy=True).entropy.to_list()
        [tensor([0.0000, 1.3863])]
    """

    # Slots refuse misspelt settings, which would have no effect.
    __slots__ = (
        *("_complaint", "_inspection", "_memory", "_model", "_proof", "_route", "_warned", "_wrapper"),
        *(
            "context",
            "forwards",
            "head_chunk",
            "instead",
            "offers",
            "place",
            "probe",
            "share_prefixes",
            "tokens_per_batch",
        ),
    )

    offers: frozenset[str]
    place: str
    instead: str

    def __init__(
        self,
        model: nn.Module,
        options: ScoreOptions | None = None,
        *,
        tokens_per_batch: int | None = None,
        head_chunk: int = 1024,
        probe: bool = True,
        share_prefixes: bool = True,
        context_parallel: Context | ProcessGroup | DeviceMesh | None = None,
        **changes: Unpack[Changes],
    ) -> None:
        check_not_a_name(model=model)
        inner = unwrap(model) if is_wrapper(model) else None
        self._model = model if inner is None else inner
        # The slots hide the class attributes of the same names.
        self.offers, self.place, self.instead = Scorer.offers, Scorer.place, Scorer.instead
        if not isinstance(self.model, nn.Module) and not is_wrapper(self.model):
            raise TypeError(f"model must be a wrapper or a module that returns logits, got {type(model).__name__}.")
        if is_wrapper(self.model):
            self.offers = frozenset({"grad"})
            self.place = f"{type(self.model).__name__}, whose backend returns log-probs, not logits"
            # vLLM's logprobs_mode applies to sampled tokens. Log-probs of a prompt are the model's own.
            self.instead = "score the transformers model"
        options = (options or ScoreOptions()).but(**changes)
        check_range(1, tokens_per_batch=tokens_per_batch, head_chunk=head_chunk)
        self._memory = PrefixKVCache(options.memory)
        self.options = options
        self.tokens_per_batch, self.head_chunk = tokens_per_batch, head_chunk
        self.probe, self.share_prefixes = probe, share_prefixes
        self.context = Context.of(context_parallel)
        self.forwards = 0
        self._proof: tuple[object, ...] = ()  # the settings for which `deterministic` was checked
        self._route: Route | None = None
        self._inspection: Inspection | None = None
        self._complaint: str | None = None  # why the scorer uses the model's own forward
        self._warned: set[type[Warning]] = set()
        self._wrapper: nn.Module | None = None  # the scoring version of another backend's wrapper
        if is_wrapper(self.model):
            self._wrapper = scoring_version(self.model)
            return
        # Weights on the meta device are loaded later. The first score then chooses the route.
        if not is_on_meta(self._inspect().modules):
            self._route = self._choose_route()
        if options.deterministic and self._route is not None:
            self._setup(torch.device("cpu"), options.but(grad=False))

    @property
    def model(self) -> Any:
        """The scored model. It cannot be replaced, since it is checked at construction."""
        return self._model

    @property
    def memory(self) -> PrefixKVCache:
        """The cache of ``remember``."""
        return self._memory

    def check(
        self, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: Scorer | None = None
    ) -> None:
        """See :meth:`Scorer.check`. Also checks that the adapters exist and that training leaves a reference unchanged."""
        super().check(options, request, reference=reference)
        if options.adapters is not True:
            check_has_adapters(self.model, options.adapters)
            check_base_is_frozen(self.model)

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are forwarded once. False for models that can neither run packs nor continue a state."""
        return self.share_prefixes and self._route is not None and self._route.sharing is not None

    @property
    def path(self) -> Literal["head", "full", "wrapper"] | None:  # type: ignore[override]
        """The route for log-probs. None before the first score if the weights were on the meta device."""
        if self._wrapper is not None:
            return "wrapper"
        return None if self._route is None else self._route.path

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`."""
        return self._run(request, self.options if options is None else options, reference)

    def run_with_states(self, request: ScoreRequest, options: ScoreOptions) -> tuple[Scores, TokenStates]:
        """As :meth:`run`, and keep the states from which whole distributions of the scored tokens can be computed."""
        states = TokenStates()
        return self._run(request, options, None, states), states

    def _run(
        self, request: ScoreRequest, options: ScoreOptions, reference: Scorer | None, states: TokenStates | None = None
    ) -> Scores:
        scorers = [self] if reference is None else [self, cast(LogProbScorer, reference)]
        ranks, tokens, kept = self._ranks(reference), request.layout, request.kept
        # Any rank may refuse its data. All ranks must learn that before the first collective operation.
        with ranks.together():
            if states is not None and self.context is not None:
                raise ValueError("distributions of a scorer with context_parallel are spread over ranks: leave it out.")
            if tokens.num_sequences == 0 and not ranks.groups:
                raise ValueError("expected at least one sequence, got a batch of 0, which has nothing to score.")
            self._check_together(request, options, reference)
            for scorer in scorers:
                scorer._check_request(request)
            routings = [self._routing(request, request.routing, options.record_routing)]
            if reference is not None:
                routings.append(scorers[1]._routing(request, request.ref_routing))
            if request.images is not None:
                if ranks.groups:
                    raise ValueError("images with ranks (a wrapped or sharded model, context_parallel): leave one out.")
                scored = request.mask & (request.tokens.values != ImageModel.of(self.model).token)
                request = replace(request, mask=scored)
        finds_kept = options.return_kept and kept is None
        owners = [scorer._inspection or scorer.model for scorer in scorers]
        with locked(*owners), nullcontext() if options.grad else torch.no_grad():
            if self._wrapper is None:
                changed = options.but(return_kept=finds_kept)
                elements, columns = ScoringRun(scorers, ranks, request, routings, changed, states)()
            else:
                device, budget = tokens.values.device, self.tokens_per_batch or 8192
                elements, log_probs = score_wrapper(self._wrapper, request, device, budget, options.grad)
                columns = {"log_prob": log_probs}
            # One copy for all columns, instead of one synchronisation each.
            if tokens.values.device.type == "cpu" and not options.grad:
                columns = dict(zip(columns, to_host(*columns.values()), strict=True))
            added, log_prob = columns.pop("added", None), columns["log_prob"]
            share = [] if added is None or not added.numel() else [added.float().mean()]
            # The check of finiteness and the share of added tokens are read in one synchronisation.
            total, *share = to_host(finite_total(log_prob.detach()), *share)
            with ranks.together():
                if not math.isfinite(total):
                    request.check_finite(elements, log_prob)
            if sum(share) > 0.01:
                self._warn_once(
                    f"{float(sum(share)):.1%} of the {len(elements)} tokens are not among those that {options.sampling} "
                    "leaves: they were sampled otherwise, or by a policy that has changed since. Score with the sampler's own "
                    "settings, and replay what it kept (kept=, RecordKept) where several updates use one batch.",
                    SamplerMismatchWarning,
                    stacklevel=4,
                )
        chosen = columns.pop("routing", None)
        if finds_kept:
            kept = kept_of(columns, elements, tokens.values.shape[0])
        scores = Scores.spread(tokens, elements, **columns)
        if chosen is not None:
            scores = scores._replace(routing=tokens.like(chosen.to(tokens.values.device)))
        return scores._replace(kept=kept) if options.return_kept else scores

    def explain(
        self,
        sequences: Sequences | ScoreRequest,
        row: int,
        token: int,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        **changes: Unpack[Changes],
    ) -> Explanation:
        """Explain the log-prob of one token, and compare it with the model's own forward of its sequence.

        Args:
            sequences: token ids or a request, as for :meth:`score`.
            row: the index of the sequence, from 0.
            token: the index of the token in the sequence, from 1. The first token has no prefix.
            mask: as for :meth:`score`.

        Keyword Args:
            attention_mask: as for :meth:`score`.
            changes: fields of :class:`ScoreOptions`, and ``temperature``.

        Returns:
            Numbers in nats, which print as a table. They have no gradient. The cache is neither read nor written.

        Raises:
            ValueError: for the reasons of :meth:`score`, or if the token does not exist, or the model is sharded or belongs
                to another backend.

        Example:
            >>> class Uniform(torch.nn.Module):
            ...     def forward(self, input_ids):
            ...         return (torch.zeros(*input_ids.shape, 4),)
            >>> explained = LogProbScorer(Uniform()).explain([[0, 1, 2], [3, 1]], row=0, token=2)
            >>> print(f"{explained.log_prob:.4f} {explained.difference:.4f} {explained.attended}")
            -1.3863 0.0000 2
        """
        request = read_request(sequences, mask, attention_mask)
        return explain(self, request, row, token, self.options.but(**changes))

    def forget(self) -> None:
        """See :meth:`Scorer.forget`."""
        self.memory.clear()

    def _ranks(self, reference: Scorer | None) -> Ranks:
        if isinstance(reference, LogProbScorer) and reference.context != self.context:
            raise ValueError("the scorer and its reference have different context_parallel=: pass one group to both.")
        context = None if self.context is None else self.context.group
        return Ranks([self.model] if reference is None else [self.model, reference.model], context)

    def together(self, reference: Scorer | None = None) -> AbstractContextManager[None]:
        """See :meth:`Scorer.together`."""
        return self._ranks(reference).together()

    def _check_together(self, request: ScoreRequest, options: ScoreOptions, reference: Scorer | None) -> None:
        """Raise a ValueError for options and fields that cannot be combined."""
        self.check(options, request, reference=reference)
        kept, exact, grad, adapters = request.kept is not None, options.deterministic, options.grad, options.adapters
        restricted = kept or options.sampling.truncates
        mixes = reference is not None and options.direction == "jensen_shannon"
        if options.top_k and restricted:
            raise ValueError("top_k= needs all tokens, but sampling= or kept= drops some: score the two separately.")
        if (mixes or request.top_ids is not None) and restricted:
            raise ValueError("top_ids= and 'jensen_shannon' need whole distributions: leave out sampling= and kept=.")
        if options.return_kept and not restricted:
            raise ValueError(f"return_kept=True needs a sampling= that drops tokens, got {options.sampling}.")
        if exact and (kept or options.return_kept or request.images is not None):
            raise ValueError("deterministic=True excludes images, kept= and return_kept=True: leave one out.")
        if grad and exact and drops(self.model):
            raise ValueError("deterministic=True, but the model drops activations at random: call its eval().")
        if grad and options.recompute:
            self._check_recomputes(request, options)
        if self.context is not None:
            self._check_context(options)
        if grad and isinstance(self.model, nn.Module) and is_offloaded(self.model):
            raise ValueError("grad=True, but the model is offloaded, which has no backward: pass grad=False.")
        if grad and adapters is not True:
            raise ValueError(f"grad=True with adapters={adapters!r}, a reference: pass grad=False or adapters=True.")
        if reference is not None:
            self._check_reference(options, reference)
        elif request.ref_routing is not None:
            raise ValueError("ref_routing= needs a reference: pass reference= too.")

    def _check_recomputes(self, request: ScoreRequest, options: ScoreOptions) -> None:
        """Raise a ValueError if a forward in the backward would not repeat the first one."""
        reasons = {
            "of deterministic=True": options.deterministic,
            "of context_parallel": self.context is not None,
            "of images": request.images is not None,
            "the scorer takes the model's full forward": self.path != "head",
            "the model drops activations at random: call its eval()": drops(self.model),
            "the model is compiled": self._inspect().of(is_compiled),
            "the model is sharded or wrapped for ranks": bool(self._ranks(None).groups),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(
                f"recompute=True is not possible, because {reason}. Leave it out.".replace("because of", "with")
            )

    def _check_context(self, options: ScoreOptions) -> None:
        """Raise a ValueError if ranks cannot share the forward of a sequence."""
        whole = ("deterministic", "return_kept", "record_routing")
        reasons = [f"{name}=True needs whole sequences on a rank" for name in whole if vars(options)[name]]
        if self.path != "head":
            reasons.append(f"{type(self.model).__name__} is scored by its own forward")
        elif self._inspect().of(is_compiled):
            reasons.append(f"{type(self.model).__name__} has compiled parts")
        if reasons:
            raise ValueError(f"context_parallel, but {reasons[0]}: leave one out.")

    def _check_reference(self, options: ScoreOptions, reference: Scorer) -> None:
        """Raise a ValueError if the KL would measure more than the difference of the two models."""
        if not isinstance(reference, LogProbScorer) or log_probs_only(reference.model):
            raise ValueError(f"an exact KL needs whole distributions, not {reference.place}: {reference.instead}.")
        theirs = reference.options
        reference.check(theirs)
        if theirs.sampling.truncates:
            raise ValueError(f"the KL may be infinite, since the reference drops tokens: {theirs.sampling}.")
        # A temperature for one call applies to both models. Otherwise each model has its own.
        if options.temperature == self.options.temperature != theirs.temperature:
            raise ValueError(
                f"the policy is scored at temperature {options.temperature} and the reference at {theirs.temperature}: use "
                "one temperature for both."
            )
        ours, other = self._rounding(options), reference._rounding(theirs)
        if ours != other:
            raise ValueError(
                f"the policy uses {ours} and the reference {other}: their KL would include rounding. "
                "Use the same setting for both."
            )

    def _routing(self, request: ScoreRequest, record: Tensor | None, records: bool = False) -> Routing | None:
        """The replay or the record of this model's routing, None without either."""
        if record is None and not records:
            return None
        routers = Routers.of(self.model)
        return Routing(routers, None if record is None else routers.read(record, request), records)

    def _check_request(self, request: ScoreRequest) -> None:
        """Raise a ValueError for tokens outside the model's vocabulary, and for sequences that are too long."""
        if self._wrapper is not None:
            return request.check_ids(None)
        name, facts = type(self.model).__name__, self._inspect()
        if is_on_meta(facts.modules):
            raise ValueError(f"{name} has weights on the meta device, which hold no numbers: load them.")
        request.check_ids(facts.of(vocab_size))
        forbidden = dict(facts.of(placeholders))
        if request.images is not None:
            forbidden.pop(ImageModel.of(self.model).token, None)
        if (problem := not_text(request.tokens, forbidden)) is not None:
            raise problem
        request.check_lengths(facts.of(position_limit))

    def _rounding(self, options: ScoreOptions) -> str:
        """The settings that change the rounding of scores, as text."""
        size = f", tokens_per_batch={self.tokens_per_batch or PACK}" if options.deterministic else ""
        return f"deterministic={options.deterministic}{size}"

    def _inspect(self) -> Inspection:
        """The facts about the model. They are read again after a change."""
        if self._inspection is None or not self._inspection.holds():
            self._inspection = Inspection(self.model)
        return self._inspection

    def _setup(self, default: torch.device, options: ScoreOptions) -> Setup:
        """The settings of a call. A model without parameters runs on the device ``default``."""
        if self._route is None:
            self._route = self._choose_route()
        facts = self._inspect()
        device = model_device(facts, default)
        shared = self.shares_prefixes and not facts.of(frequency_switches)
        if self._route.sharing == "forks" and facts.of(is_compiled):
            shared = False  # torch.compile would compile again for each length of a state
        route = self._route if shared else replace(self._route, sharing=None)
        # An autocast context around the call changes the scores like ``dtype``, also those in the cache.
        outer = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        setup = Setup(facts, route, device, options if outer is None else options.but(dtype=options.dtype or outer))
        if options.deterministic:
            self._prove(setup)
        return setup

    def _prove(self, setup: Setup) -> None:
        """Raise a ValueError if a score depends on the other sequences of its call."""
        check_pack(self.tokens_per_batch)
        size = self.tokens_per_batch or PACK
        reason = obstacle(setup, probe=self.probe, share_prefixes=self.share_prefixes)
        # A change of one of these settings needs another proof.
        proof = torch.get_num_threads(), setup.device, setup.options.dtype, setup.options.adapters, size
        if reason is None and proof != self._proof:
            with locked(self.model):
                reason = find_variance(replace(setup, options=setup.options.but(grad=False)), size)
        if reason is not None:
            raise ValueError(f"deterministic=True, but {type(self.model).__name__} {reason}.")
        self._proof = proof

    def _choose_route(self) -> Route:
        with locked(self.model):
            route, complaint = choose_route(self.model, probe=self.probe, dtype=self.options.dtype)
        self._complaint = complaint
        if complaint:
            warnings.warn(
                f"LogProbScorer takes the model's full forward, which needs more time and memory: {complaint}.",
                stacklevel=3,
            )
        elif route.sharing is None and self.share_prefixes and has_state(self.model):
            warnings.warn(
                f"LogProbScorer forwards a prompt again with each answer to it: the state of {type(self.model).__name__} after "
                "a prefix cannot be continued (transformers' cache of the model does not reproduce its own log-probs). "
                "share_prefixes=False silences this warning.",
                stacklevel=3,
            )
        return route

    def _warn_apart(self, reason: str, where: str = "needs a gradient") -> None:
        """Warn once that some calls do not share prefixes."""
        self._warn_once(
            f"{reason} LogProbScorer can share no prefixes where {type(self.model).__name__} {where}: each sequence is "
            "forwarded separately, with padding. share_prefixes=False silences this warning.",
            UserWarning,
            stacklevel=7,
        )

    def _warn_once(self, message: str, kind: type[Warning], stacklevel: int) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, kind, stacklevel=stacklevel)


#: A model of this process, or its scorer.
ModelOrScorer: TypeAlias = nn.Module | LogProbScorer


class ScorerSlot:
    """Holds the scorer of a model. Builds it on first use, and again after a change of the model or the settings.

    Copies and pickles start empty, so that they never score the original's model.
    """

    def __init__(self) -> None:
        self._sources: tuple[object, object] = (None, None)
        self._settings: dict[str, object] = {}
        self._scorer: Scorer | None = None

    def get(self, model: Model, **settings: object) -> Scorer:
        """The scorer for these settings. It is built again if the model, the weights in a wrapper or a setting changed."""
        # The model inside a wrapper may be replaced without a new wrapper.
        sources = (model, asked(model, "model", object))
        same = all(a is b for a, b in zip(self._sources, sources, strict=True))
        if self._scorer is None or not same or settings != self._settings:
            make: Callable[..., Scorer] = partial(LogProbScorer, cast(nn.Module, model))
            if has(model, "make_scorer"):  # a model in another process, or one whose scores are stored
                make = cast(MakesScorer, model).make_scorer
            self._scorer = make(**settings)
            self._sources, self._settings = sources, settings
        return self._scorer

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
