"""The scorer: token ids in, log-probs out."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_choice, check_not_a_name, check_range
from torchrl_llm_kl.head import Direction, Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._cache import PrefixKVCache
from torchrl_llm_kl.scoring._invariant import PACK, check_pack, circumstances, drops, obstacle
from torchrl_llm_kl.scoring._model import (
    Route,
    Setup,
    check_adapters,
    check_has_adapters,
    frequency_switches,
    is_offloaded,
    is_on_meta,
    locked,
    model_device,
    placeholders,
    position_limit,
    vocab_size,
)
from torchrl_llm_kl.scoring._probe import choose_route, find_variance
from torchrl_llm_kl.scoring._request import Request, Sequences, TokenMask, not_text, read_sequences
from torchrl_llm_kl.scoring._routing import RoutedExperts, Routers, Routing
from torchrl_llm_kl.scoring._run import run
from torchrl_llm_kl.scoring._sampling import Sampled, SamplerMismatchWarning, Sampling, as_sampling
from torchrl_llm_kl.scoring._scores import SampledScores, Scores, Wanted, kept_of
from torchrl_llm_kl.scoring._wrapper import is_wrapper, log_probs_only, score_wrapper, scoring_version, unwrap
from torchrl_llm_kl.scoring._wrapping import Ranks

#: Bytes of keys and values that a scorer caches by default: 256 MiB.
DEFAULT_MEMORY = 256 * 2**20


# Settings that a wrapper of another backend cannot follow, and their values that change nothing.
_NEUTRAL: dict[str, Any] = {"sampling": Sampling(), "adapters": True, "deterministic": False, "dtype": None}


class LogProbScorer(Sampled):
    r"""Per-token :math:`\log \pi(\text{token} \mid \text{prefix})` of given token ids under a language model.

    Sequences are laid end to end without padding. A prefix that several of them share (the prompt of a group of
    answers, the earlier turns of a conversation) goes through the model once, the head runs only at positions that
    predict a scored token, and the softmax is computed in float32, a tile of positions and tokens at a time:
    ``[B, T, V]`` never exists. A short probe checks this fast path when the scorer is built. If it does not reproduce the
    model's own log-probs, the scorer warns and uses the model's own forward; see :attr:`path`.

    Without gradient the model is scored in evaluation mode, and its mode restored: dropout would turn the KL of a model
    with itself into noise. Scorers of one model wait for each other; do not run the model in another thread meanwhile.

    Settings may be set at any time, under their names: the next call follows, and a value that the constructor would refuse
    is refused.

    Args:
        model: a transformers causal LM; a TorchRL wrapper around one (only its weights matter: ``generate=True`` is
            fine); a wrapper of another backend, scored through its own forward; or any module that takes ``input_ids``
            and returns logits (as an attribute, under a key, or first in a tuple).

    Keyword Args:
        temperature: divides the logits, as the sampler's temperature did.
        sampling: the sampler's temperature, top-k, top-p and min-p, in place of ``temperature``: log-probs, entropies and KLs
            are those of what is left, renormalised; see :class:`Sampling`.
        tokens_per_batch: the most tokens in one forward. By default 1024 on a CPU, where more is slower, and 16384
            elsewhere. Halved, with a warning, whenever a forward runs out of memory.
        head_chunk: the most positions whose whole logits are held at once, if the head is not a plain linear layer.
        probe: False skips the check of the fast path.
        adapters: False disables the model's PEFT adapters while it is scored: the base model as a reference, without a
            second copy of the weights. A name scores with that adapter alone (a reference that is itself an adapter, for
            instance of an earlier stage of training); the active one is restored afterwards. Both are without gradient.
        share_prefixes: False scores every sequence separately, in padded micro-batches of similar length. Models that
            cannot attend within a pack always run so. Where a gradient is needed, so do models that drop layers at random or
            checkpoint them in a way that a scorer cannot follow (in the model's own code), with a warning.
        dtype: autocast dtype of the body, and of the products of a linear head; for instance ``torch.bfloat16`` on float32
            weights. All after the head's product stays float32.
        memory: the most bytes of keys and values that ``score(..., remember=True)`` may cache; the least recently used
            are evicted first. 0 disables the cache.
        deterministic: a sequence's scores are the same to the last bit in every call, whatever other sequences, order and
            cache it has, with and without ``grad`` (gradients are not). Float32 or float64 on a CPU, for one number of threads
            and one ``tokens_per_batch``, a multiple of 64, by default 256. Checked on the model, when the scorer is built and
            when one of these changes.

    Attributes:
        model: the module that is scored, or the wrapper of another backend.
        sampling: how the scored tokens were sampled.
        forwards: number of packs and micro-batches forwarded so far. It grows during a call.

    Raises:
        TypeError: if ``model`` is none of the above, or ``adapters`` is not True, False or a name.
        ValueError: if a number is out of range, a temperature is requested of another backend, or the model cannot be
            scored with ``deterministic=True``; the message says why.

    Example:
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 4),)
        >>> scorer = LogProbScorer(Uniform())  # warns: no separate body and head
        >>> scorer.score(Ragged.from_list([torch.tensor([0, 1, 2]), torch.tensor([3])])).to_list()
        [tensor([ 0.0000, -1.3863, -1.3863]), tensor([0.])]
        >>> scorer.evaluate(Ragged.from_list([torch.tensor([0, 1])]), entropy=True).entropy.to_list()
        [tensor([0.0000, 1.3863])]
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        sampling: Sampling | None = None,
        tokens_per_batch: int | None = None,
        head_chunk: int = 1024,
        probe: bool = True,
        adapters: bool | str = True,
        share_prefixes: bool = True,
        dtype: torch.dtype | None = None,
        memory: int = DEFAULT_MEMORY,
        deterministic: bool = False,
    ) -> None:
        check_not_a_name(model=model)
        inner = unwrap(model) if is_wrapper(model) else None
        self.model = model if inner is None else inner
        if not isinstance(self.model, nn.Module) and not is_wrapper(self.model):
            raise TypeError(
                "model must be a transformers causal LM, a TorchRL wrapper or another torch module that returns "
                f"logits, got {type(self.model).__name__}."
            )
        self.sampling = as_sampling(temperature, sampling)
        self.dtype, self.deterministic = dtype, deterministic
        self.tokens_per_batch, self.head_chunk = tokens_per_batch, head_chunk
        self.probe, self.adapters, self.share_prefixes = probe, adapters, share_prefixes
        check_range(0, memory=memory)
        self.memory = PrefixKVCache(memory)
        self.forwards = 0
        self._proof: tuple[Any, ...] = ()  # what `deterministic` was checked for
        self._route: Route | None = None
        self._warned_apart = self._warned_outside = False
        self._wrapper: Any = None  # scores in place of the model
        if is_wrapper(self.model):
            self._wrapper = scoring_version(self.model)
            return
        if not is_on_meta(self.model):
            self._route = self._choose_route()
        if deterministic and self._route is not None:
            self._setup(torch.device("cpu"), self.sampling, grad=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._checked(name, value))

    def _checked(self, name: str, value: Any) -> Any:
        """A new value of a setting, at construction or later; an error if it is none, or the model cannot follow it."""
        if name == "model" and "model" in self.__dict__:
            raise AttributeError("model is fixed: a scorer checks its model when it is built. Build a new one.")
        if name == "sampling":
            value = self._next_sampling(value) if "sampling" in self.__dict__ else value
        elif name in ("tokens_per_batch", "head_chunk"):
            check_range(1, **{name: value})
        elif name == "dtype" and not (value is None or (isinstance(value, torch.dtype) and value.is_floating_point)):
            raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, got {value}.")
        elif name == "memory" and not isinstance(value, PrefixKVCache):
            raise TypeError(
                f"memory is the scorer's cache, got {value!r}: set memory.limit, in bytes, for another size."
            )
        elif name == "adapters":
            check_adapters(value)
        if name in _NEUTRAL and is_wrapper(self.model):
            if name == "sampling":
                self._check_wrapper(value)
            elif value != _NEUTRAL[name]:
                raise ValueError(
                    f"{name}={value!r} cannot be applied by {type(self.model).__name__}, which is scored by its own backend: "
                    "build the scorer on the transformers model, or set it in the backend."
                )
        elif name == "adapters" and value is not True:
            check_has_adapters(self.model, value)
        return value

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are forwarded once; False for a model that cannot attend within a pack."""
        return self.share_prefixes and self._route is not None and self._route.packed

    @property
    def path(self) -> Literal["head", "full", "wrapper"] | None:
        """The route for log-probs; None until the first score if the weights are still on the meta device."""
        if self._wrapper is not None:
            return "wrapper"
        return None if self._route is None else self._route.path

    def score(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        temperature: float | None = None,
        kept: Kept | None = None,
        routing: RoutedExperts | None = None,
        grad: bool = False,
        remember: bool = False,
    ) -> Ragged:
        """Log-probs of the masked-in tokens.

        Args:
            sequences: token ids of an integer dtype: a :class:`~torchrl_llm_kl.Ragged` (``values [N]``), a list of rows
                (lists or tensors), a nested tensor, or a padded tensor ``[*B, T]`` with ``attention_mask``. Rows may be empty.
            mask: True at tokens to score; ``[N]`` bool, in the order of the tokens without padding; also a list of rows, a
                nested tensor, or ``[*B, T]`` for padded token ids. None scores every token but the first of each sequence,
                which has no prefix.

        Keyword Args:
            attention_mask: 1 or True at tokens, 0 or False at padding, which may be on either side; ``[*B, T]``. Required by,
                and only for, a padded tensor.
            temperature: divides the logits in this call; the scorer's own by default. The cache serves all temperatures.
            kept: see :meth:`evaluate`.
            routing: see :meth:`evaluate`.
            grad: keep the graph, so that the result is differentiable with respect to the model's parameters; logits
                are computed again in the backward instead of held. By default no part of the graph is kept.
            remember: cache keys, values and log-probs for later calls, so that the next turn of a conversation costs
                only its new tokens. A change of weights or settings clears the cache. No effect with ``grad`` or where
                :attr:`shares_prefixes` is False.

        Returns:
            The log-probs as ``values [N]``: nats, float32 on the device of ``sequences``; exactly 0 where the mask is False.
            ``restore()`` converts them to the form of ``sequences`` (padded, nested or a list), with 0 at padding.

        Raises:
            TypeError: if ``sequences`` or a row has another type.
            ValueError: if there is no sequence, the mask selects padding or a first token, a sequence is too long for the
                model, a token id is outside its vocabulary, or a log-prob is not finite (each message names the sequence);
                if the attention mask is missing or no mask of the token ids.

        Example:
            >>> class Uniform(torch.nn.Module):
            ...     def forward(self, input_ids):
            ...         return (torch.zeros(*input_ids.shape, 4),)
            >>> ids, real = torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
            >>> LogProbScorer(Uniform()).score(ids, attention_mask=real).restore()
            tensor([[ 0.0000, -1.3863, -1.3863],
                    [ 0.0000, -1.3863,  0.0000]])
        """
        options: dict[str, Any] = {"temperature": temperature, "kept": kept, "grad": grad, "remember": remember}
        options["routing"] = routing
        return self.evaluate(sequences, mask, attention_mask=attention_mask, **options).log_prob

    def evaluate(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        entropy: bool = False,
        top_k: int = 0,
        moments: bool = False,
        reference: LogProbScorer | None = None,
        direction: Direction = "reverse",
        beta: float = 0.5,
        top_ids: Tensor | None = None,
        temperature: float | None = None,
        kept: Kept | None = None,
        return_kept: bool = False,
        routing: RoutedExperts | None = None,
        ref_routing: RoutedExperts | None = None,
        record_routing: bool = False,
        grad: bool = False,
        remember: bool = False,
    ) -> Scores:
        """Log-probs, and other scores on request, from one forward of the body.

        Args:
            sequences: see :meth:`score`.
            mask: see :meth:`score`.

        Keyword Args:
            attention_mask: see :meth:`score`.
            temperature: see :meth:`score`; of the reference too.
            grad: see :meth:`score`.
            remember: see :meth:`score`; in the caches of both models.
            entropy: of the distribution over the whole vocabulary that each token was drawn from.
            top_k: number of most probable tokens to return, with the log of the total probability of all others. These
                have no gradient.
            moments: ``collision`` and ``discriminator`` of :class:`Scores`, for advantages; one more sweep of the head, without
                gradient.
            reference: the scorer of a model with the same vocabulary: adds its log-probs and the exact KL to it. It
                runs without gradient.
            direction: ``"reverse"`` is ``KL(model || reference)``, ``"forward"`` ``KL(reference || model)``,
                ``"jensen_shannon"`` a mean of both to their mixture; see :func:`~torchrl_llm_kl.head.linear_pair`.
            beta: the reference's share of that mixture, inside (0, 1).
            top_ids: ids at each token, ``[N, *M, k]``, whose log-probs are wanted too, with gradient, and that of all other
                tokens together: ``outcomes`` of :class:`Scores`, a student's side of a teacher's top ``k``. A negative id pads.
                Ids of masked-out tokens are ignored. Not with ``kept`` or a :attr:`sampling` that leaves tokens out.
            kept: for each of the ``N`` tokens those that its sampler could have drawn, as it recorded them: scores are over
                these instead of what :attr:`sampling` would leave now. Tokens outside the mask may have none.
            return_kept: give the scores an attribute ``kept``, the tokens that :attr:`sampling` leaves at each scored token: a
                model in another process can be scored over them.
            routing: of a mixture of experts (Mixtral, Qwen3-MoE, GPT-OSS, DeepSeek-V3), the ids of the experts that a sampler
                or an earlier call chose for each token, layer and slot: they are used again, and weighed by the model's
                current routers, with gradient. Integers ``[N, L, k]``, in the order of the tokens without padding; one array
                ``[T, L, k]`` for each sequence, without its last token if that was not forwarded (vLLM's ``routed_experts``);
                or ``[*B, T, L, k]`` for padded token ids. ``L`` is the number of layers with a router, or of all layers. -1
                leaves a token or a layer to the router.
            ref_routing: likewise of the reference; by default it routes by itself.
            record_routing: return what was chosen as ``routing`` of the scores.

        Returns:
            The requested scores, None for the others; nats, exactly 0 where the mask is False.

        Raises:
            ValueError: as :meth:`score`; or if the vocabularies or the temperatures differ, one of the models is of another
                backend, the reference truncates, or a scored token is not among its ``kept``; with ``routing`` or
                ``record_routing``, if the model is dense, of another family, sharded, compiled or of another backend, or the
                record has other tokens, layers or experts.

        Example:
            >>> from transformers import MixtralConfig, MixtralForCausalLM
            >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
            ...     num_attention_heads=2, num_key_value_heads=1, num_local_experts=4))
            >>> scorer, answers = LogProbScorer(model), [[3, 4, 5], [6, 7]]
            >>> first = scorer.evaluate(answers, record_routing=True)
            >>> first.routing.values.shape  # tokens, layers, experts of a token
            torch.Size([5, 2, 2])
            >>> again = scorer.score(answers, routing=first.routing, grad=True)
            >>> torch.equal(again.values, first.log_prob.values)
            True

        Warns:
            SamplerMismatchWarning: once, if more than one of a hundred tokens are not among those that :attr:`sampling` leaves.
        """
        scorers = [self] if reference is None else [self, reference]
        ranks = Ranks([scorer.model for scorer in scorers])
        kl: Any = {}
        if reference is not None:
            kl = {"kl": direction, "ref_kept": self.sampling.reference == "kept"}
            kl |= {"beta": beta} if direction == "jensen_shannon" else {}
        outcomes = () if top_ids is None else (*top_ids.shape[1:-1], top_ids.shape[-1] + 1)
        if return_kept and kept is None and not self.sampling.truncates:
            raise ValueError(
                f"return_kept=True with {self.sampling}, which leaves every token: there is nothing to return."
            )
        keeps = return_kept and kept is None
        wanted = Wanted(entropy, top_k=top_k, moments=moments, outcomes=outcomes, kept=keeps, **kl)
        with ranks.together():
            check_range(0, top_k=top_k)
            check_choice(get_args(Direction), direction=direction)
            if temperature is None:
                temperature = self.temperature
                self._check_temperatures(reference)
            sampling = replace(self.sampling, temperature=temperature)
            self._check_wanted(wanted, reference, grad, replayed=kept is not None)
            tokens, mask = read_sequences(sequences, mask, attention_mask)
            request = Request.build(tokens, mask, may_be_empty=bool(ranks.groups))
            request = request.with_top_ids(top_ids).with_kept(kept)
            for scorer in scorers:
                scorer._check_request(request)
            routings = [self._routing(request, routing, record_routing)]
            if reference is not None:
                routings.append(reference._routing(request, ref_routing))
            elif ref_routing is not None:
                raise ValueError("ref_routing= is the reference's routing, and no reference= is given.")
        with locked(*(scorer.model for scorer in scorers)), nullcontext() if grad else torch.no_grad():
            if self._wrapper is None:
                elements, columns = run(scorers, ranks, request, routings, wanted, sampling, grad, remember)
            else:
                self._check_wrapper(sampling, replayed=kept is not None)
                device, budget = tokens.values.device, self.tokens_per_batch or 8192
                elements, log_probs = score_wrapper(self._wrapper, request, device, budget, grad)
                columns = {"log_prob": log_probs}
            with ranks.together():
                request.check_finite(elements, columns["log_prob"])
            self._warn_outside(columns.pop("added", None), sampling)
        chosen = columns.pop("routing", None)
        kept = kept_of(columns, elements, tokens.values.shape[0]) if keeps else kept
        scores = (SampledScores if return_kept else Scores).spread(tokens, elements, **columns)
        if chosen is not None:
            scores = scores._replace(routing=tokens.like(chosen.to(tokens.values.device)))
        if return_kept:
            cast(SampledScores, scores).kept = kept
        return scores

    def forget(self) -> None:
        """Clear the cache of ``remember=True``. Only needed after a few weights were changed through ``.data``."""
        self.memory.clear()

    def _check_temperatures(self, reference: LogProbScorer | None) -> None:
        if reference is not None and reference.temperature != self.temperature:
            raise ValueError(
                f"the model is scored at temperature {self.temperature} and the reference at {reference.temperature}: a KL "
                "compares the two at one temperature, that of the sampler."
            )

    def _check_wrapper(self, sampling: Sampling, *, replayed: bool = False) -> None:
        if sampling.temperature != 1.0:
            raise ValueError(
                f"temperature={sampling.temperature} cannot be applied by {type(self.model).__name__}: its backend returns "
                "log-probs, not logits. Set the temperature in the backend and leave it 1.0 here."
            )
        if sampling.truncates or replayed:
            raise ValueError(
                f"{'kept tokens' if replayed else sampling} cannot be applied by {type(self.model).__name__}: its backend "
                "returns log-probs, not logits. Score the transformers model, or use log-probs that the backend returns for "
                "what it samples from (vLLM: logprobs_mode='processed_logprobs')."
            )

    def _warn_outside(self, added: Tensor | None, sampling: Sampling) -> None:
        """Warn once if many tokens are not among those that the sampler leaves."""
        if added is None or self._warned_outside or not added.numel():
            return
        share = float(added.float().mean())
        if share > 0.01:
            self._warned_outside = True
            warnings.warn(
                f"{share:.1%} of the {added.numel()} tokens are not among those that {sampling} leaves: they were sampled "
                "otherwise, or by a policy that has changed since. Score with the sampler's own settings, and replay what it "
                "kept (kept=, RecordKept) where several updates use one batch.",
                SamplerMismatchWarning,
                stacklevel=4,
            )

    def _check_wanted(
        self, wanted: Wanted, reference: LogProbScorer | None, grad: bool, *, replayed: bool = False
    ) -> None:
        """Raise a ValueError for scores that the two cannot compute together."""
        if wanted.top_k and (replayed or self.sampling.truncates):
            raise ValueError(
                "top_k= returns the most probable of all tokens, and sampling= or kept= leaves some out: score the two apart."
            )
        distils = (
            "top_ids=" if wanted.outcomes else "direction='jensen_shannon'" if wanted.kl == "jensen_shannon" else ""
        )
        if distils and (replayed or self.sampling.truncates):
            raise ValueError(
                f"{distils} with {'kept=' if replayed else self.sampling}: a teacher's tokens that are left out would have no "
                "probability and no gradient, so the divergence to it is not defined. Score the whole distribution for a "
                "distillation: without kept=, and with Sampling(temperature) or temperature= alone."
            )
        if replayed and self.deterministic:
            raise ValueError(
                "deterministic=True with kept=: sums over recorded tokens are not proved to be the same in every call. Score "
                "with sampling= alone, or without deterministic=True."
            )
        if wanted.kept and self.deterministic:
            raise ValueError(
                "deterministic=True with return_kept=True: the tokens that are left are not collected in packs of equal size. "
                "Score without deterministic=True."
            )
        if grad and self.deterministic and drops(self.model):
            raise ValueError(
                f"deterministic=True, but {type(self.model).__name__} drops activations at random: call its eval()."
            )
        for scorer in (self,) if reference is None else (self, reference):
            if wanted != Wanted() and log_probs_only(scorer.model):
                raise ValueError(
                    f"{type(scorer.model).__name__} returns log-probs only: entropy, top-k, moments and an exact KL need the "
                    "transformers model itself."
                )
        if reference is not None and reference.sampling.truncates:
            raise ValueError(
                f"the reference is scored with {reference.sampling}: a KL is infinite where it leaves out a token that the "
                'policy may draw. Score it without; Sampling(reference="kept") of the policy compares over what it keeps.'
            )
        if reference is not None and reference._rounding != self._rounding:
            raise ValueError(
                f"the model is scored with {self._rounding} and the reference with {reference._rounding}: their difference "
                "in rounding would count as KL. Give both the same."
            )
        if grad and isinstance(self.model, nn.Module) and is_offloaded(self.model):
            raise ValueError(
                f"grad=True, but {type(self.model).__name__} is offloaded: its layers leave the device before a backward. It "
                "is a reference, score it with grad=False."
            )
        if grad and self.adapters is not True:
            what = f"the adapter {self.adapters!r}" if self.adapters else "the base model"
            raise ValueError(
                f"grad=True with adapters={self.adapters!r}: {what} is a reference, score it with grad=False. A model is "
                "trained with its active adapters: adapters=True."
            )

    def _routing(self, request: Request, routing: RoutedExperts | None, record_routing: bool = False) -> Routing | None:
        """What to do with the routing of this model; None if nothing."""
        if routing is None and not record_routing:
            return None
        if self._wrapper is not None:
            raise ValueError(
                f"routing of {type(self.model).__name__} cannot be recorded or replayed, since its backend scores it: score "
                "the transformers model."
            )
        routers = Routers.of(self.model)
        return Routing(routers, None if routing is None else routers.read(routing, request), record_routing)

    def _check_request(self, request: Request) -> None:
        """Check a request against this model."""
        if self._wrapper is not None:
            return request.check_ids(None)
        if is_on_meta(self.model):
            raise ValueError(
                f"{type(self.model).__name__} has weights on the meta device, which hold no numbers: load them before "
                "scoring."
            )
        request.check_ids(vocab_size(self.model))
        if (problem := not_text(request.tokens, placeholders(self.model))) is not None:
            raise ValueError(problem)
        request.check_lengths(position_limit(self.model))

    @property
    def _rounding(self) -> str:
        """The settings that decide whether scores are invariant."""
        size = f", tokens_per_batch={self.tokens_per_batch or PACK}" if self.deterministic else ""
        return f"deterministic={self.deterministic}{size}"

    def _setup(self, default: torch.device, sampling: Sampling, grad: bool) -> Setup:
        """The settings of a call; ``default`` is the device of a model without parameters."""
        model = self.model
        if self._route is None:
            self._route = self._choose_route()
        packed = self.shares_prefixes and not frequency_switches(model)
        device = model_device(model, default)
        route = replace(self._route, packed=packed)
        outer = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        dtype = self.dtype or outer
        settings = (self.adapters, dtype, grad, self.deterministic, sampling.truncation)
        setup = Setup(model, route, device, sampling.temperature, *settings)
        if self.deterministic:
            self._prove(setup)
        return setup

    def _prove(self, setup: Setup) -> None:
        """Raise a ValueError if scores depend on the other sequences of a call."""
        check_pack(self.tokens_per_batch)
        size = self.tokens_per_batch or PACK
        found = obstacle(setup, probe=self.probe, share_prefixes=self.share_prefixes)
        proof = circumstances(setup, size)
        if found is None and proof != self._proof:
            with locked(self.model):
                found = find_variance(replace(setup, grad=False), size)
        if found is not None:
            raise ValueError(f"deterministic=True, but {type(self.model).__name__} {found}.")
        self._proof = proof

    def _choose_route(self) -> Route:
        with locked(self.model):
            route, complaint = choose_route(self.model, probe=self.probe, dtype=self.dtype)
        if complaint:
            warnings.warn(
                f"LogProbScorer takes the model's full forward, which needs more time and memory: {complaint}.",
                stacklevel=3,
            )
        return route

    def _warn_apart(self, reason: str) -> None:
        """Warn once that calls with gradient share no prefixes."""
        if not self._warned_apart:
            self._warned_apart = True
            warnings.warn(
                f"{reason} LogProbScorer can share no prefixes where {type(self.model).__name__} needs a gradient: each "
                "sequence is forwarded separately, with padding. share_prefixes=False silences this warning.",
                stacklevel=5,
            )


class ScorerSlot:
    """The scorer of a model, built on first use and again when the model or its settings change.

    Copies and pickles start empty, so that they never score the original's model.
    """

    def __init__(self) -> None:
        self._sources: tuple[Any, Any] = (None, None)
        self._settings: dict[str, Any] = {}
        self._scorer: LogProbScorer | None = None

    def get(self, model: Any, **settings: Any) -> LogProbScorer:
        """The scorer for these settings; a new one if the model, the weights in a wrapper or a setting changed."""
        sources = (model, getattr(model, "model", None))
        same = all(a is b for a, b in zip(self._sources, sources, strict=True))
        if self._scorer is None or not same or settings != self._settings:
            check_adapters(settings.get("adapters", True))
            make = getattr(model, "make_scorer", None)  # a model in another process
            self._scorer = LogProbScorer(model, **settings) if make is None else make(**settings)
            self._sources, self._settings = sources, settings
        return self._scorer

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
