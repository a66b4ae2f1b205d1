"""The interface of all scorers: options, methods, and the check of unsupported features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._options import Changes, ScoreOptions
from torchrl_llm_kl.scoring._request import FIELDS, ScoreRequest, Sequences, TokenMask, read_request
from torchrl_llm_kl.scoring._scores import Scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The features of scorers, beyond log-probs of the model's own distribution, by the name of their argument.
FEATURES = frozenset(
    {
        *("temperature", "truncation", "adapters", "dtype", "deterministic", "grad", "reference"),
        *("entropy", "top_k", "moments", "return_kept", "record_routing", *FIELDS),
    }
)
_NEUTRAL = ScoreOptions()


class Scorer(ABC):
    """Scores token ids under a model, in this process or another.

    The :attr:`options` are one frozen record. Set another one with ``scorer.options = scorer.options.but(temperature=0.7)``,
    or pass changes for one call.

    Attributes:
        model: the scored model.
        path: the route for log-probs.
        offers: the supported :data:`FEATURES`. A call that needs another feature raises an error.
        place: where the scorer runs, for the text of these errors.
        instead: the advice of these errors.

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

    __slots__ = ("__weakref__", "_options")

    model: Any
    path: str | None
    offers: frozenset[str] = FEATURES - {"versions"}
    place: str = "this scorer"
    instead: str = (
        "score the transformers model in this process, with a LogProbScorer, or a VersionedScorer for versions"
    )

    @property
    def options(self) -> ScoreOptions:
        """The default options of each call."""
        return self._options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        self.check(options)
        self._options = options

    # ------------------------------------------------------------------ scores

    @abstractmethod
    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """Score a request. All scores are in nats, and exactly 0 where the mask is False.

        Args:
            request: the tokens to score.
            options: how to score them. Default: :attr:`options`.

        Keyword Args:
            reference: the scorer of a model with the same vocabulary. It adds that model's log-probs and the exact KL to it.
                The reference runs without gradient, at the temperature of the options.
        """

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Callable[[], Scores]:
        """Start to score, and return a function that waits for the scores.

        A model in this process runs only when that function is called.
        """
        return partial(self.run, request, options)

    def score(
        self,
        sequences: Sequences | ScoreRequest,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        **changes: Unpack[Changes],
    ) -> Ragged:
        """Log-probs of the masked-in tokens.

        Args:
            sequences: token ids of any form that :meth:`ScoreRequest.of` takes, or a request, which also holds the mask and
                records of the tokens.
            mask: True at tokens to score. By default all tokens except the first of each sequence.

        Keyword Args:
            attention_mask: for padded token ids, 1 at tokens and 0 at padding.
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.

        Returns:
            The log-probs as ``values [N]``, in nats, float32 on the device of ``sequences``. They are exactly 0 where the mask
            is False. ``restore()`` converts them to the form of ``sequences`` (padded, nested or a list), with 0 at padding.

        Raises:
            TypeError: if ``sequences`` has another type.
            ValueError: if the batch has no sequences, the mask selects padding or a first token, a sequence is too long for
                the model, a token id is outside its vocabulary, or a log-prob is not finite. Each message names the sequence.
                Also if the attention mask is missing or does not match the ids, or the scorer lacks a requested feature.

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
        return self.evaluate(sequences, mask, attention_mask=attention_mask, **changes).log_prob

    def evaluate(
        self,
        sequences: Sequences | ScoreRequest,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        reference: Scorer | None = None,
        **changes: Unpack[Changes],
    ) -> Scores:
        """Log-probs and all other requested scores, from one forward of the body.

        Args:
            sequences: token ids or a request, as for :meth:`score`.
            mask: as for :meth:`score`.

        Keyword Args:
            attention_mask: as for :meth:`score`.
            reference: the scorer of a model to compare with, see :meth:`run`.
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.

        Returns:
            The requested scores, and None for the others. All are in nats, and exactly 0 where the mask is False.

        Raises:
            ValueError: for the reasons of :meth:`score`. Also if the vocabularies or the temperatures differ, the reference
                truncates, or ``kept`` lacks a scored token. With routing, if the model is dense, of another family, sharded,
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
            >>> again = scorer.score(ScoreRequest.of(answers, routing=first.routing), grad=True)
            >>> torch.equal(again.values, first.log_prob.values)
            True
        """
        with self.together(reference):
            options, request = self.options.but(**changes), read_request(sequences, mask, attention_mask)
        return self.run(request, options, reference=reference)

    def forget(self) -> None:  # noqa: B027
        """Clear the cache of ``remember=True``. Only needed after a change of a few weights through ``.data``."""

    def together(self, reference: Scorer | None = None) -> AbstractContextManager[None]:
        """A context for ranks that score together: an error on one rank is raised on all of them."""
        return nullcontext()

    # ------------------------------------------------------------------ unsupported features

    def check(
        self, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: Scorer | None = None
    ) -> None:
        """Raise a ValueError that names the requested features that are not in :attr:`offers`."""
        check_offers(self, options, request, reference=reference)


class MakesScorer(Protocol):
    """A model that makes its own scorers, since it runs in another process or its scores are stored."""

    def make_scorer(self, *, options: ScoreOptions) -> Scorer:
        """Make a scorer with these options."""


#: Models that can be scored: a transformers model, a TorchRL wrapper, or a model that makes its own scorers.
Model: TypeAlias = nn.Module | MakesScorer


class Offers(Protocol):
    """A scorer, or the engine of a service: anything that declares its features."""

    offers: frozenset[str]
    place: str
    instead: str


def check_offers(
    scorer: Offers, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: object = None
) -> None:
    """Raise a ValueError for requested features that are not in the ``offers`` of a scorer or an engine."""
    wanted: dict[str, object] = {} if request is None else dict.fromkeys(request.recorded, "...")
    wanted |= {"reference": "..."} if reference is not None else {}
    if options.sampling.truncates:
        wanted["truncation"] = options.sampling
    if options != _NEUTRAL:
        given, neutral = ({**vars(each), "temperature": each.temperature} for each in (options, _NEUTRAL))
        wanted |= {name: given[name] for name in FEATURES & given.keys() if given[name] != neutral[name]}
    lacking = sorted(wanted.keys() - scorer.offers)
    if lacking:
        shown = ", ".join(f"{'sampling' if name == 'truncation' else name}={wanted[name]!s}" for name in lacking)
        raise ValueError(f"{shown} is not supported by {scorer.place}: {scorer.instead}.")
