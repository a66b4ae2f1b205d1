"""What all scorers share: their options, the ways to call them, and the refusal of what one cannot do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._images import RowImages
from torchrl_llm_kl.scoring._options import Changes, ScoreOptions
from torchrl_llm_kl.scoring._request import RequestFields, RoutedExperts, ScoreRequest, Sequences, TokenMask
from torchrl_llm_kl.scoring._sampling import Sampling
from torchrl_llm_kl.scoring._scores import Scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: What may be asked of a scorer beside log-probs of the model's own distribution, by the name under which it is asked.
FEATURES = frozenset(
    {
        *("temperature", "truncation", "adapters", "dtype", "deterministic", "grad", "reference"),
        *("entropy", "top_k", "moments", "return_kept", "record_routing", *ScoreRequest.optional()),
    }
)
_NEUTRAL = ScoreOptions()
_FIELDS = Changes.__annotations__.keys() - {"memory"}


class Scorer(ABC):
    """Scores token ids under a model, here or elsewhere.

    The fields of :class:`ScoreOptions` (and the temperature of its ``sampling``) are attributes too, which may be set at any
    time: the next call follows, and a value that the constructor would refuse is refused.

    Attributes:
        model: what is scored.
        path: the route for log-probs.
        offers: the :data:`FEATURES` that it has; a call that asks for another raises an error.
        place: where it scores, for these errors, and ``instead``, what to do instead.

    Example:
        >>> class Uniform(Scorer):
        ...     path = "exact"
        ...     def __init__(self):
        ...         self.options = ScoreOptions()
        ...     def run(self, request, options=None, *, reference=None):
        ...         elements = request.mask.nonzero().squeeze(-1)
        ...         return Scores.spread(request.layout, elements, torch.full(elements.shape, -1.5))
        >>> Uniform().score([[3, 4, 5]]).to_list()
        [tensor([ 0.0000, -1.5000, -1.5000])]
    """

    model: Any
    path: str | None
    offers: frozenset[str] = FEATURES
    place: str = "this scorer"
    instead: str = "score the transformers model in this process, with a LogProbScorer"

    temperature: float
    sampling: Sampling
    adapters: bool | str
    dtype: torch.dtype | None
    deterministic: bool

    @property
    def options(self) -> ScoreOptions:
        """How it scores where a call does not say otherwise."""
        options: ScoreOptions = self.__dict__["_options"]
        return options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        self.check(options)
        self.__dict__["_options"] = options

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS and "_options" in self.__dict__:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        declared = any(name in (*vars(kind), *vars(kind).get("__annotations__", ())) for kind in type(self).__mro__)
        if name in _FIELDS or (name == "memory" and not declared):  # a LogProbScorer has its cache there
            self.options = self.options.but(**{name: value})
            return
        if not declared and (near := get_close_matches(name, _FIELDS, 1, 0.85)):
            raise AttributeError(f"a {type(self).__name__} has no setting {name!r}. Did you mean {near[0]!r}?")
        if name == "model" and "model" in self.__dict__:
            raise AttributeError("model is fixed: a scorer checks its model when it is built. Build a new one.")
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ scores

    @abstractmethod
    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """The scores of a request; nats, exactly 0 where the mask is False.

        Args:
            request: what is scored.
            options: how; by default :attr:`options`.

        Keyword Args:
            reference: the scorer of a model with the same vocabulary: adds its log-probs and the exact KL to it. It runs
                without gradient, at the temperature of the options.
        """

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Callable[[], Scores]:
        """Start to score, and return a function that waits for the scores; a model of this process runs when it is called."""
        return partial(self.run, request, options)

    def score(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        kept: Kept | None = None,
        routing: RoutedExperts | None = None,
        images: ImageRows | RowImages | None = None,
        **changes: Unpack[Changes],
    ) -> Ragged:
        """Log-probs of the masked-in tokens.

        Args:
            sequences: see :meth:`ScoreRequest.of`.
            mask: see :meth:`ScoreRequest.of`.

        Keyword Args:
            attention_mask: see :meth:`ScoreRequest.of`.
            kept: see :meth:`ScoreRequest.of`.
            routing: see :meth:`ScoreRequest.of`.
            images: see :meth:`ScoreRequest.of`.
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.

        Returns:
            The log-probs as ``values [N]``: nats, float32 on the device of ``sequences``; exactly 0 where the mask is False.
            ``restore()`` converts them to the form of ``sequences`` (padded, nested or a list), with 0 at padding.

        Raises:
            TypeError: if ``sequences`` or a row has another type.
            ValueError: for a batch without sequences; if the mask selects padding or a first token, a sequence is too long for
                the model, a token id is outside its vocabulary, or a log-prob is not finite (each message names the sequence);
                if the attention mask is missing or not a mask of the token ids; if the scorer lacks what is asked.

        Example:
            >>> from torchrl_llm_kl import LogProbScorer
            >>> class Uniform(torch.nn.Module):
            ...     def forward(self, input_ids):
            ...         return (torch.zeros(*input_ids.shape, 4),)
            >>> ids, real = torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
            >>> LogProbScorer(Uniform()).score(ids, attention_mask=real).restore()
            tensor([[ 0.0000, -1.3863, -1.3863],
                    [ 0.0000, -1.3863,  0.0000]])
        """
        return self.evaluate(
            sequences, mask, attention_mask=attention_mask, kept=kept, routing=routing, images=images, **changes
        ).log_prob

    def evaluate(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        reference: Scorer | None = None,
        kept: Kept | None = None,
        top_ids: Tensor | None = None,
        routing: RoutedExperts | None = None,
        ref_routing: RoutedExperts | None = None,
        images: ImageRows | RowImages | None = None,
        **changes: Unpack[Changes],
    ) -> Scores:
        """Log-probs, and the other scores that the options ask for, from one forward of the body.

        Args:
            sequences: see :meth:`ScoreRequest.of`.
            mask: see :meth:`ScoreRequest.of`.

        Keyword Args:
            attention_mask: see :meth:`ScoreRequest.of`.
            reference: see :meth:`run`.
            kept: see :meth:`ScoreRequest.of`.
            top_ids: see :meth:`ScoreRequest.of`.
            routing: see :meth:`ScoreRequest.of`.
            ref_routing: see :meth:`ScoreRequest.of`.
            images: see :meth:`ScoreRequest.of`.
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.

        Returns:
            The requested scores, None for the others; nats, exactly 0 where the mask is False.

        Raises:
            ValueError: as :meth:`score`; or if the vocabularies or the temperatures differ, the reference truncates, or a
                scored token is not among its ``kept``; with routing, if the model is dense, of another family, sharded,
                compiled or of another backend, or the record has other tokens, layers or experts.

        Example:
            >>> from torchrl_llm_kl import LogProbScorer
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
        """
        with self.together(reference):
            options = self.options.but(**changes)
            fields = RequestFields(kept=kept, top_ids=top_ids, routing=routing, ref_routing=ref_routing, images=images)
            request = ScoreRequest.of(sequences, mask, attention_mask=attention_mask, **fields)
        return self.run(request, options, reference=reference)

    def forget(self) -> None:  # noqa: B027
        """Clear the cache of ``remember=True``. Only needed after a few weights were changed through ``.data``."""

    def together(self, reference: Scorer | None = None) -> AbstractContextManager[None]:
        """A context whose errors all ranks raise that score together."""
        return nullcontext()

    # ------------------------------------------------------------------ what it cannot do

    def check(
        self, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: Scorer | None = None
    ) -> None:
        """Raise a ValueError that says what is asked for and not among :attr:`offers`."""
        check_offers(self, options, request, reference=reference)


class MakesScorer(Protocol):
    """A model that makes its own scorers: it is in another process, or its scores are remembered."""

    def make_scorer(self, *, options: ScoreOptions) -> Scorer:
        """A scorer with these options."""


#: What can be scored: a transformers model, a wrapper of TorchRL's, or a model that makes its own scorers.
Model: TypeAlias = nn.Module | MakesScorer


class Offers(Protocol):
    """What answers requests: a scorer, or a service's engine."""

    offers: frozenset[str]
    place: str
    instead: str


def check_offers(
    scorer: Offers, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: object = None
) -> None:
    """Raise a ValueError for what is asked of a scorer, or of a service's engine, and not among its ``offers``."""
    asked: dict[str, object] = {} if request is None else dict.fromkeys(request.recorded, "...")
    asked |= {"reference": "..."} if reference is not None else {}
    if options.sampling.truncates:
        asked["truncation"] = options.sampling
    for name in FEATURES & _FIELDS:
        if (value := getattr(options, name)) != getattr(_NEUTRAL, name):
            asked[name] = value
    if lacking := sorted(asked.keys() - scorer.offers):
        found = ", ".join(f"{'sampling' if name == 'truncation' else name}={_shown(asked[name])}" for name in lacking)
        raise ValueError(f"{found} cannot be had from {scorer.place}: {scorer.instead}.")


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Sampling) or value == "..." else repr(value)
