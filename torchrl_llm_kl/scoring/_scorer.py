"""The scorer: token ids in, log-probs out."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._adapters import check_has_adapters
from torchrl_llm_kl.scoring._locks import one_at_a_time
from torchrl_llm_kl.scoring._memory import ConversationMemory
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import is_on_meta, model_device, position_limit, vocab_size
from torchrl_llm_kl.scoring._padded import Route
from torchrl_llm_kl.scoring._plan import plan_micro_batches
from torchrl_llm_kl.scoring._probe import choose_route
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._run import Runner, run
from torchrl_llm_kl.scoring._scores import Scores
from torchrl_llm_kl.scoring._states import Readings, Wanted
from torchrl_llm_kl.scoring._wrapper import is_wrapper, prepare_wrapper, score_rows, unwrap

__all__ = ["DEFAULT_MEMORY", "LogProbScorer"]

DEFAULT_MEMORY = 256 * 2**20


class LogProbScorer:
    r"""Per-token :math:`\log \pi(\text{token} \mid \text{prefix})` of given token ids under a language model.

    Sequences are laid end to end without padding, what they have in common from the start (the prompt of a group of
    answers, the earlier turns of a conversation) goes through the model once, the head runs only at positions that predict
    a token to score, and the softmax is taken in float32, a tile of positions and tokens at a time: ``[B, T, V]`` never
    exists. That fast path proves itself on a short probe when the scorer is built; where it does not reproduce the model's
    own log-probs, the scorer warns and takes the model's own forward. :attr:`path` says which.

    Without gradient the model is scored in evaluation mode, and its mode restored: dropout would make the KL of a model
    with itself noise. Scorers of one model take turns; do not run the model yourself in another thread meanwhile.

    Args:
        model: a transformers causal LM; a TorchRL wrapper around one (its weights are what counts: ``generate=True`` is
            fine); a wrapper of another backend, scored through its own forward; or any module that takes ``input_ids``
            and returns logits (as an attribute, under a key, or first in a tuple).

    Keyword Args:
        temperature: divides the logits, as the sampler's temperature did.
        tokens_per_batch: the most tokens in one forward. By default 1024 on a CPU, where more is slower, and 16384
            elsewhere. Halved, with a warning, whenever a forward runs out of memory.
        head_chunk: the most positions whose whole logits are held at once, where the head is no plain linear map.
        probe: False trusts the fast path without proof.
        adapters: False switches the model's PEFT adapters off while it is scored, and on again afterwards: the base model
            as a reference that needs no second copy of the weights.
        share_prefixes: False scores every sequence apart, in padded micro-batches of similar length. That is also what is
            done for models that cannot attend within a pack (see :attr:`shares_prefixes`), and with gradient for
            those whose layers are checkpointed.
        dtype: of the body, by autocast; for instance ``torch.bfloat16`` on float32 weights. The head stays in its own.
        memory: bytes of keys and values that ``score(..., remember=True)`` may hold; the least recently used go first. 0
            remembers nothing.

    Attributes:
        model: the module that is scored, or the wrapper of another backend.
        path: ``"head"``, ``"full"`` or ``"wrapper"``; None until the first score where the weights are still on the
            meta device.

    Raises:
        TypeError: if ``model`` is none of the above.
        ValueError: if a number is out of range, or a temperature is asked of another backend.

    Example:
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 4),)
        >>> scorer = LogProbScorer(Uniform())  # warns: no separate body and head
        >>> scorer.score(Ragged.from_list([torch.tensor([0, 1, 2]), torch.tensor([3])])).to_list()
        [tensor([ 0.0000, -1.3863, -1.3863]), tensor([0.])]
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        tokens_per_batch: int | None = None,
        head_chunk: int = 1024,
        probe: bool = True,
        adapters: bool = True,
        share_prefixes: bool = True,
        dtype: torch.dtype | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"temperature must be a positive number, got {temperature}: greedy sampling has no log-prob"
            )
        for name, value in (("tokens_per_batch", tokens_per_batch), ("head_chunk", head_chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, got {dtype}")
        if memory < 0:
            raise ValueError(f"memory must be a number of bytes, got {memory}")
        self.temperature = float(temperature)
        self.tokens_per_batch = tokens_per_batch
        self.head_chunk = head_chunk
        self.probe = probe
        self.adapters = adapters
        self.share_prefixes = share_prefixes
        self.dtype = dtype
        self.memory = ConversationMemory(memory)
        inner = unwrap(model) if is_wrapper(model) else None
        self.model = model if inner is None else inner
        self._route: Route | None = None
        self._version: Any = None
        if is_wrapper(self.model):
            self._version = self._adopt_wrapper()
        elif not isinstance(self.model, nn.Module):
            raise TypeError(
                "model must be a transformers causal LM, a TorchRL wrapper or another torch module that returns "
                f"logits, got {type(model).__name__}"
            )
        elif not is_on_meta(self.model):
            self._route = self._choose_route()
        if not adapters:
            self._check_adapters()

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are forwarded once; False also for a model that failed the probe of it."""
        return self.share_prefixes and self._route is not None and self._route.packed

    @property
    def path(self) -> Literal["head", "full", "wrapper"] | None:
        """How log-probs are computed."""
        if self._version is not None:
            return "wrapper"
        return None if self._route is None else self._route.path

    def score(
        self, sequences: Ragged, mask: Tensor | None = None, *, grad: bool = False, remember: bool = False
    ) -> Ragged:
        """Log-probs of the tokens that ``mask`` asks for.

        Args:
            sequences: token ids without padding; ``values [N]`` of an integer dtype. Rows may be empty.
            mask: True at tokens to score; ``[N]`` bool, in the order of ``sequences.values``. None scores every token
                but the first of each sequence, which has no prefix.

        Keyword Args:
            grad: keep the graph, so that the result is differentiable to the model's parameters; logits are computed
                again in the backward instead of held. By default nothing of the graph is kept.
            remember: keep keys, values and log-probs for calls to come, so that a conversation that goes on costs its new
                tokens only. What was remembered is never used for other weights: a change forgets it. No effect with
                ``grad``, nor where :attr:`shares_prefixes` is False.

        Returns:
            ``sequences.like(log_probs)``: nats, ``[N]`` float32 on the device of ``sequences``; exactly 0 where the
            mask is False.

        Raises:
            ValueError: if there is no sequence, the mask asks for a first token, a sequence is too long for the model,
                a token id is outside its vocabulary, or a log-prob that is asked for is not finite. Each message names
                the sequence.
        """
        return self._scores(sequences, mask, Wanted(), None, grad=grad, remember=remember).log_prob

    def evaluate(
        self,
        sequences: Ragged,
        mask: Tensor | None = None,
        *,
        entropy: bool = False,
        top_k: int = 0,
        reference: LogProbScorer | None = None,
        direction: Literal["reverse", "forward"] = "reverse",
        grad: bool = False,
        remember: bool = False,
    ) -> Scores:
        """Log-probs, and whatever else is asked for, from one forward of the body.

        Args:
            sequences: as for :meth:`score`.
            mask: as for :meth:`score`.

        Keyword Args:
            entropy: of the distribution over the whole vocabulary that each token was drawn from.
            top_k: how many of the most probable tokens to return, and the log-probability of all others together. These
                carry no gradient.
            reference: the scorer of a model with the same vocabulary: its log-probs, and the exact KL to it. It is run
                without gradient.
            direction: ``"reverse"`` is ``KL(model || reference)``, ``"forward"`` ``KL(reference || model)``.
            grad: as for :meth:`score`.
            remember: as for :meth:`score`, in the memories of both.

        Returns:
            One entry for each thing asked for, None for the others; nats, exactly 0 where the mask is False.

        Raises:
            ValueError: as :meth:`score`; if the vocabularies or the temperatures differ; or if one of the models is of
                another backend.

        Example:
            >>> class Uniform(torch.nn.Module):
            ...     def forward(self, input_ids):
            ...         return (torch.zeros(*input_ids.shape, 4),)
            >>> scorer = LogProbScorer(Uniform())  # warns: no separate body and head
            >>> scores = scorer.evaluate(Ragged.from_list([torch.tensor([0, 1])]), entropy=True, reference=scorer)
            >>> scores.entropy.to_list(), scores.kl.to_list()
            ([tensor([0.0000, 1.3863])], [tensor([0., 0.])])
        """
        if top_k < 0:
            raise ValueError(f"top_k must not be negative, got {top_k}")
        if direction not in ("reverse", "forward"):
            raise ValueError(f"unknown direction {direction!r}; expected 'reverse' or 'forward'")
        if reference is not None and reference.temperature != self.temperature:
            raise ValueError(
                f"the model is scored at temperature {self.temperature} and the reference at {reference.temperature}: a KL "
                "compares the two at one temperature, that of the sampler"
            )
        wanted = Wanted(entropy=entropy, kl=None if reference is None else direction, top_k=top_k)
        if wanted != Wanted():
            for scorer in (self, reference):
                if scorer is not None and scorer._version is not None:
                    raise ValueError(
                        f"{type(scorer.model).__name__} returns log-probs only: entropy, top-k and an exact KL need the "
                        "transformers model itself"
                    )
        return self._scores(sequences, mask, wanted, reference, grad=grad, remember=remember)

    def forget(self) -> None:
        """Drop what ``remember=True`` has kept. Needed only after a change of a few weights through ``.data``."""
        self.memory.clear()

    def _scores(
        self,
        sequences: Ragged,
        mask: Tensor | None,
        wanted: Wanted,
        reference: LogProbScorer | None,
        *,
        grad: bool,
        remember: bool,
    ) -> Scores:
        if grad and not self.adapters:
            raise ValueError("grad=True with adapters=False: the base model is a reference, score it with grad=False")
        request = Request.build(sequences, mask)
        scorers = [self] if reference is None else [self, reference]
        with one_at_a_time(*(scorer.model for scorer in scorers)):
            if self._version is not None:
                elements, found = self._score_wrapper(request, sequences, grad)
            else:
                runners = [scorer._runner(request) for scorer in scorers]
                try:
                    elements, found = run(runners, request, wanted, grad=grad, remember=remember)
                finally:
                    for scorer, runner in zip(scorers, runners, strict=True):
                        scorer.tokens_per_batch = runner.tokens_per_batch
            request.check_finite(elements, found.log_prob)
        return Scores.spread(sequences, elements, found)

    def _runner(self, request: Request) -> Runner:
        """Check a request and this model against each other."""
        if is_on_meta(self.model):
            raise ValueError(
                f"{type(self.model).__name__} has weights on the meta device, which hold no numbers: load them before scoring"
            )
        request.check_ids(vocab_size(self.model))
        request.check_lengths(position_limit(self.model))
        if self._route is None:
            self._route = self._choose_route()
        device = model_device(self.model, request.tokens.values.device)
        return Runner(
            model=self.model,
            route=self._route,
            device=device,
            temperature=self.temperature,
            adapters=self.adapters,
            dtype=self.dtype,
            packs=self.shares_prefixes,
            tokens_per_batch=self.tokens_per_batch or (1024 if device.type == "cpu" else 16384),
            head_chunk=self.head_chunk,
            memory=self.memory,
        )

    def _score_wrapper(self, request: Request, sequences: Ragged, grad: bool) -> tuple[Tensor, Readings]:
        request.check_ids(None)
        device = sequences.values.device
        elements, parts = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, device=device)]
        with Mode(grad).of(self.model):
            for rows in plan_micro_batches(request.forward_lengths, self.tokens_per_batch or 8192):
                elements.append(request.elements(rows))
                parts.append(score_rows(self._version, request, rows, device).to(device))
        log_probs = torch.cat(parts)
        if grad and log_probs.numel() and not log_probs.requires_grad:
            raise ValueError(
                f"grad=True, but the backend of {type(self.model).__name__} returns log-probs without a graph: "
                "build the scorer on the transformers model that is trained, or pass grad=False"
            )
        return torch.cat(elements), Readings(log_probs)

    def _check_adapters(self) -> None:
        if self._version is not None:
            raise ValueError(
                f"adapters=False, but the adapters of {type(self.model).__name__} are not in this process: build the scorer "
                "on the transformers model, or give the backend a reference model of its own"
            )
        check_has_adapters(self.model)

    def _choose_route(self) -> Route:
        with one_at_a_time(self.model):
            verdict = choose_route(self.model, probe=self.probe, dtype=self.dtype)
        if verdict.complaint:
            warnings.warn(
                f"LogProbScorer takes the model's full forward, which needs more time and memory: {verdict.complaint}.",
                stacklevel=3,
            )
        return verdict.route

    def _adopt_wrapper(self) -> Any:
        if self.temperature != 1.0:
            raise ValueError(
                f"temperature={self.temperature} cannot be applied by {type(self.model).__name__}: its backend returns "
                "log-probs, not logits. Set the temperature in the backend and leave it 1.0 here"
            )
        return prepare_wrapper(self.model)
