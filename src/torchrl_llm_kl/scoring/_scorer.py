"""The scorer: token ids in, log-probs out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._adapters import adapters_off, check_has_adapters
from torchrl_llm_kl.scoring._engine import Route, head_log_prob, score_micro_batch
from torchrl_llm_kl.scoring._locks import one_at_a_time
from torchrl_llm_kl.scoring._model import (
    evaluating,
    find_body,
    frequency_switch,
    is_on_meta,
    model_device,
    position_limit,
    vocab_size,
)
from torchrl_llm_kl.scoring._plan import plan_micro_batches
from torchrl_llm_kl.scoring._probe import choose_route
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._shared import shared_hidden
from torchrl_llm_kl.scoring._tree import PrefixTree, forward_tokens
from torchrl_llm_kl.scoring._wrapper import is_wrapper, prepare_wrapper, score_rows, unwrap

__all__ = ["LogProbScorer"]


class LogProbScorer:
    r"""Per-token :math:`\log \pi(\text{token} \mid \text{prefix})` of given token ids under a language model.

    Sequences of similar length share a forward, the head runs only at positions that predict a token to score, and the
    log-softmax is taken in float32, a chunk of positions at a time: ``[B, T, V]`` never exists. That fast path proves
    itself on a short probe when the scorer is built; where it does not reproduce the model's own log-probs, the scorer
    warns and takes the model's own forward. :attr:`path` says which.

    Without gradient the model is scored in evaluation mode, and its mode restored: dropout would make the KL of a model
    with itself noise. Scorers of one model take turns; do not run the model yourself in another thread meanwhile.

    Args:
        model: a transformers causal LM; a TorchRL wrapper around one (its weights are what counts: ``generate=True`` is
            fine); a wrapper of another backend, scored through its own forward; or any module that takes ``input_ids``
            and returns logits (as an attribute, under a key, or first in a tuple).

    Keyword Args:
        temperature: divides the logits, as the sampler's temperature did.
        tokens_per_batch: the most tokens in one forward, padding included. Halved, with a warning, whenever a forward runs
            out of memory.
        head_chunk: the most positions whose logits are held at once.
        probe: False trusts the fast path without proof.
        adapters: False switches the model's PEFT adapters off while it is scored, and on again afterwards: the base model
            as a reference that needs no second copy of the weights.
        share_prefixes: forward tokens that several sequences begin with (the prompt of a group of answers, the earlier
            turns of a conversation) once, and the rest on their keys and values. Without gradient only, and only for
            models that the probe has shown to give the same numbers that way; see :attr:`shares_prefixes`.

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
        tokens_per_batch: int = 8192,
        head_chunk: int = 1024,
        probe: bool = True,
        adapters: bool = True,
        share_prefixes: bool = True,
    ) -> None:
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"temperature must be a positive number, got {temperature}: greedy sampling has no log-prob"
            )
        for name, value in (("tokens_per_batch", tokens_per_batch), ("head_chunk", head_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.temperature = float(temperature)
        self.tokens_per_batch = tokens_per_batch
        self.head_chunk = head_chunk
        self.probe = probe
        self.adapters = adapters
        self.share_prefixes = share_prefixes
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
        return self.share_prefixes and self._route is not None and self._route.shared

    @property
    def path(self) -> Literal["head", "full", "wrapper"] | None:
        """How log-probs are computed."""
        if self._version is not None:
            return "wrapper"
        return None if self._route is None else self._route.path

    def score(self, sequences: Ragged, mask: Tensor | None = None, *, grad: bool = False) -> Ragged:
        """Log-probs of the tokens that ``mask`` asks for.

        Args:
            sequences: token ids without padding; ``values [N]`` of an integer dtype. Rows may be empty.
            mask: True at tokens to score; ``[N]`` bool, in the order of ``sequences.values``. None scores every token
                but the first of each sequence, which has no prefix.

        Keyword Args:
            grad: keep the graph, so that the result is differentiable to the model's parameters; each chunk of logits
                is computed again in the backward instead of held. By default nothing of the graph is kept.

        Returns:
            ``sequences.like(log_probs)``: nats, ``[N]`` float32 on the device of ``sequences``; exactly 0 where the
            mask is False.

        Raises:
            ValueError: if there is no sequence, the mask asks for a first token, a sequence is too long for the model,
                a token id is outside its vocabulary, or a log-prob that is asked for is not finite. Each message names
                the sequence.
        """
        if grad and not self.adapters:
            raise ValueError("grad=True with adapters=False: the base model is a reference, score it with grad=False")
        request = Request.build(sequences, mask)
        with ExitStack() as stack:
            stack.enter_context(one_at_a_time(self.model))
            if not self.adapters:
                stack.enter_context(adapters_off(self.model))
            if not grad:
                stack.enter_context(torch.no_grad())
                if isinstance(self.model, nn.Module):
                    stack.enter_context(evaluating(self.model))
            found = self._score_wrapper(request, sequences) if self._version is not None else self._score(request, grad)
            elements, log_probs = found
            if grad and self._version is not None and elements.numel() and not log_probs.requires_grad:
                raise ValueError(
                    f"grad=True, but the backend of {type(self.model).__name__} returns log-probs without a graph: "
                    "build the scorer on the transformers model that is trained, or pass grad=False"
                )
            out = torch.zeros(sequences.values.shape[0], dtype=torch.float32, device=log_probs.device)
            if elements.numel():
                request.check_finite(elements, log_probs)
                out = out.index_copy(0, elements.to(out.device), log_probs)
        return sequences.like(out.to(sequences.values.device))

    def _score(self, request: Request, grad: bool) -> tuple[Tensor, Tensor]:
        """The flat elements that are scored, and their log-probs."""
        if is_on_meta(self.model):
            raise ValueError(
                f"{type(self.model).__name__} has weights on the meta device, which hold no numbers: load them before scoring"
            )
        vocab = vocab_size(self.model)
        request.check_ids(vocab)
        request.check_lengths(position_limit(self.model))
        if self._route is None:
            self._route = self._choose_route()
        device = model_device(self.model, request.tokens.values.device)
        tree = None if grad else self._tree(request)
        while True:
            try:
                return self._collect(request, tree, grad, device)
            except torch.OutOfMemoryError:
                if self.tokens_per_batch <= int(request.forward_lengths.max()):
                    raise  # one sequence alone does not fit
            self._halve_budget()

    def _halve_budget(self) -> None:
        """After an out-of-memory error: smaller micro-batches, for this call and all later ones."""
        self.tokens_per_batch //= 2
        warnings.warn(
            f"out of memory: LogProbScorer goes on with tokens_per_batch={self.tokens_per_batch}. Set it to that or less "
            "to spare the attempt.",
            stacklevel=2,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _collect(
        self, request: Request, tree: PrefixTree | None, grad: bool, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        elements, parts = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, device=device)]
        for some, log_probs in (
            self._apart(request, grad, device) if tree is None else self._shared(request, tree, device)
        ):
            elements.append(some)
            parts.append(log_probs.to(device))
        return torch.cat(elements), torch.cat(parts)

    def _tree(self, request: Request) -> PrefixTree | None:
        """The prefix tree of the batch, where going through it spares the body a tenth of its tokens."""
        if not self.shares_prefixes or frequency_switch(self.model) is not None:
            return None
        tree = PrefixTree.build(request.tokens, request.forward_lengths)
        return tree if forward_tokens(tree) <= 0.9 * int(request.forward_lengths.sum()) else None

    def _shared(self, request: Request, tree: PrefixTree, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        body = find_body(self.model)
        assert body is not None, "the probe has run it"
        for elements, hidden in shared_hidden(
            body, request, tree, tokens_per_batch=self.tokens_per_batch, device=device
        ):
            targets = request.tokens.values[elements].to(hidden.device)
            yield (
                elements,
                head_log_prob(
                    self.model,
                    hidden,
                    targets,
                    temperature=self.temperature,
                    head_chunk=self.head_chunk,
                    recompute=False,
                ),
            )

    def _apart(self, request: Request, grad: bool, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._route is not None
        for rows in self._micro_batches(request.forward_lengths):
            yield (
                request.elements(rows),
                score_micro_batch(
                    self.model,
                    request.micro_batch(rows, device),
                    self._route,
                    temperature=self.temperature,
                    head_chunk=self.head_chunk,
                    recompute=grad,
                ),
            )

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        switch = frequency_switch(self.model)
        if switch is None:
            return plan_micro_batches(lengths, self.tokens_per_batch)
        sides = (torch.where(lengths <= switch, lengths, 0), torch.where(lengths > switch, lengths, 0))
        return [rows for side in sides for rows in plan_micro_batches(side, self.tokens_per_batch)]

    def _score_wrapper(self, request: Request, sequences: Ragged) -> tuple[Tensor, Tensor]:
        request.check_ids(None)
        device = sequences.values.device
        elements, parts = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, device=device)]
        for rows in plan_micro_batches(request.forward_lengths, self.tokens_per_batch):
            elements.append(request.elements(rows))
            parts.append(score_rows(self._version, request, rows, device).to(device))
        return torch.cat(elements), torch.cat(parts)

    def _check_adapters(self) -> None:
        if self._version is not None:
            raise ValueError(
                f"adapters=False, but the adapters of {type(self.model).__name__} are not in this process: build the scorer "
                "on the transformers model, or give the backend a reference model of its own"
            )
        check_has_adapters(self.model)

    def _choose_route(self) -> Route:
        verdict = choose_route(self.model, probe=self.probe)
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
