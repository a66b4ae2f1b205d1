"""A teacher with another tokenizer, as a distribution over the student's tokens.

Both tokenisations of an answer have the same bytes. Where both have a boundary, the text is cut into chunks. A chunk has the
log-prob of the teacher's own tokens. A student's boundary inside a chunk has the teacher's probability that its text goes on
with the bytes up to there: a sum over all of its tokens that agree with these bytes, also over several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.masks import PromptTranslator, TokenBytes, Tokenizer, chunks, pair_specials
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._byte_sums import Chunk, Covers, Distributions, Place
from torchrl_llm_kl.scoring._byte_tokens import Divergence, Method, NextTokenProbs, NextTokens, tokens_of
from torchrl_llm_kl.scoring._model import locked
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._protocol import Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest, Sequences, TokenMask, read_request
from torchrl_llm_kl.scoring._scorer import LogProbScorer
from torchrl_llm_kl.scoring._scores import Columns, Scores, join_columns

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchrl_llm_kl.scoring._options import Changes

Prompt = Callable[[list[int]], Sequence[int]]


class ByteScores(NamedTuple):
    """The teacher's log-probs of the student's tokens with their bounds, in nats and in the layout of the sequences.

    Args:
        log_prob: the log-probs, ``values [N]``. Their sum over a chunk is exact.
        lower: a lower bound of each log-prob of the exact sum over the teacher's tokens, ``[N]``.
        upper: an upper bound, ``[N]``. Both equal ``log_prob`` where no cover was omitted.
        chunk: the number of each token's chunk within its sequence, int64 ``[N]``. -1 at tokens that are not scored.
        spelled: the number of scored special tokens without counterpart. The teacher scores the letters of their names.
    """

    log_prob: Ragged
    lower: Ragged
    upper: Ragged
    chunk: Ragged
    spelled: int


class ByteTeacher:
    r"""A teacher, or another reference, whose tokenizer differs from the student's. Pass it wherever a reference is accepted.

    The student's token with the bytes ``b`` after the text ``s`` gets ``log P(s + b) - log P(s)``. ``P(s)`` is the teacher's
    probability that its answer begins with ``s``. It is conditional on the teacher's own tokens of ``s`` up to the last
    boundary that both tokenisations share. From there on it is the sum over all sequences of the teacher's tokens that agree
    with ``s``. At a shared boundary it is the probability of the teacher's own tokens. Three facts follow. The log-probs add
    up to the teacher's log-prob of its own tokens over each chunk between shared boundaries. None of them is positive. A
    teacher with the student's tokenizer gives its usual log-probs.

    The condition on the teacher's own tokens before a chunk is a choice. If no token of the teacher begins with another one,
    ``P(s)`` is the probability of the string ``s`` at every boundary. If the teacher never produces another tokenisation of a
    text, the sum over an answer with its end token is the log-prob of the string. In general it is a lower bound, since the
    string has other tokenisations.

    A text that begins with ``ab`` begins with ``a`` too, so the probabilities of the student's tokens ``a`` and ``ab`` overlap,
    and over its vocabulary they can add up to more than 1. The mean log-ratio of the student to an exact teacher over whole
    answers is the KL between the two distributions of texts, less the entropy of the student's tokenisations of a text. Use
    the estimator k1 in rewards and k2 in losses: k3 assumes probabilities that add up to 1.

    Improbable beginnings of a sequence of tokens inside a chunk are not continued. The probability of such a beginning bounds
    that of all its continuations, so the omitted rest is known. :meth:`ByteScorer.bounds` returns both bounds.

    The answer must have the same bytes under both tokenizers. A prompt may have other tokens and another template.

    Args:
        teacher: a transformers model in this process. A wrapper of it is fine.
        tokenizer: the teacher's tokenizer, a fast one of transformers.
        student_tokenizer: the student's tokenizer.

    Keyword Args:
        prompt: a function from the student's token ids of a prompt, or of the turns between two answers, to the
            teacher's. By default the teacher's tokenizer tokenises their text, after its BOS if it adds one. Special tokens
            are replaced by their counterparts. ``"template"`` renders the messages of the prompt with the teacher's chat
            template, see :class:`~torchrl_llm_kl.masks.PromptTranslator`.
        specials: the teacher's id for some of the student's special tokens. By default tokens of one name, and EOS and BOS,
            correspond. The teacher scores the letters of a sampled special token without counterpart.
        tolerance: beginnings with less than this share of the probability of the chunk's last inner boundary are not
            continued. 0 continues all.
        covers: the most beginnings that are continued in a chunk, besides the teacher's own tokens.
        lookahead: for distributions over the student's vocabulary, continue the teacher's tokens with a larger probability
            until the student's next token is decided, see :meth:`ByteScorer.next_tokens`. Each of them needs a forward of one
            more token, except the teacher's own tokens. 1 continues only those, 0 all.
        method: how a loss compares whole distributions, see :meth:`ByteScorer.compare`: ``"bytes"``, or GOLD's and P-KL's
            heuristics ``"gold"`` and ``"projected"``.

    Raises:
        TypeError: if a tokenizer is not a fast one.
        ValueError: for a number out of range.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> def tokenizer(*merges):
        ...     vocabulary = dict(a=0, b=1) | {x + y: 2 + i for i, (x, y) in enumerate(merges)}
        ...     backend = Tokenizer(models.BPE(vocabulary, list(merges)))
        ...     backend.decoder = decoders.ByteLevel()
        ...     return PreTrainedTokenizerFast(tokenizer_object=backend)
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 3),)
        >>> teacher = ByteTeacher(Uniform(), tokenizer(("a", "b")), tokenizer())  # the teacher has a, b and ab
        >>> teacher.make_scorer().score([[1, 0, 1]]).values.exp()  # a: a or ab. b: ab of both
        tensor([1.0000, 0.6667, 0.5000])

    Source: T. Vieira et al., "From Language Models over Tokens to Language Models over Characters" (arXiv 2412.03719), and
    B. Phan et al. (arXiv 2410.09303), for the sum over the shortest sequences of tokens that cover a string.
    """

    log_probs_only = True  # its logits belong to another vocabulary: see check_distributions

    def __init__(
        self,
        teacher: nn.Module,
        tokenizer: Tokenizer,
        student_tokenizer: Tokenizer,
        *,
        prompt: Prompt | Literal["template"] | None = None,
        specials: Mapping[int, int] | None = None,
        tolerance: float = 1e-2,
        covers: int = 64,
        lookahead: float = 1.0,
        method: Method = "bytes",
    ) -> None:
        check_range(0, 1, tolerance=tolerance, lookahead=lookahead)
        if method not in get_args(Method):
            raise ValueError(f"method is {method!r}: expected one of {', '.join(map(repr, get_args(Method)))}.")
        check_range(0, covers=covers)
        pairs = pair_specials(student_tokenizer, tokenizer, specials)
        if unknown := sorted({*pairs.values()} - {*tokenizer.get_vocab().values()}):
            raise ValueError(f"specials has the ids {unknown}, which the teacher's tokenizer does not have.")
        # Not `model`: its vocabulary must not be compared with the policy's. The tokenizer is that of the scored ids.
        self.teacher, self.tokenizer = teacher, student_tokenizer
        self.student = TokenBytes(student_tokenizer, pairs)
        # A counterpart may be a token that the teacher's tokenizer does not call special.
        own = TokenBytes(tokenizer).specials.keys() | set(pairs.values())
        self.bytes = TokenBytes(tokenizer, {index: index for index in own})
        self.spelled = self.student.specials.keys() - pairs.keys()
        if prompt not in (None, "template") and not callable(prompt):
            raise ValueError(f"prompt is {prompt!r}: expected 'template' or a function of token ids.")
        # The start of a sequence, and the turns between two answers.
        self.prompt: Prompt = partial(self._as_text, start=True)
        self.between: Prompt = self._as_text
        if prompt == "template":
            translator = PromptTranslator(student_tokenizer, tokenizer)
            self.prompt, self.between = translator, translator.between
        elif callable(prompt):
            self.prompt = self.between = prompt
        self.tolerance, self.covers, self.lookahead, self.method = tolerance, covers, lookahead, method
        self.tables = NextTokens(self.student, self.bytes, self.spelled)
        # A prompt= function decides itself whether its ids begin with BOS.
        bos = tokenizer.bos_token_id
        adds_bos = prompt is None and bos is not None and bos in tokenizer("").input_ids[:1]
        self.start = [bos] if adds_bos else []

    def make_scorer(self, **settings: Any) -> ByteScorer:
        """A scorer with these settings of :class:`LogProbScorer`."""
        return ByteScorer(self, **settings)

    def _as_text(self, ids: list[int], *, start: bool = False) -> list[int]:
        text = self.student.text(ids)
        if start and self.student.adds_space:  # nobody wrote the space at the start
            text = re.sub("^([^\x00-\xff]*) ", r"\1", text)
        return self.bytes.encode(text, exact=False, start=start)


class ByteScorer(Scorer):
    """The scorer of a :class:`ByteTeacher`. It takes the student's token ids, and the teacher gets no gradient.

    Args:
        model: the teacher.
        options: how to score. ``temperature`` divides the teacher's logits.

    Keyword Args:
        settings: settings of :class:`LogProbScorer`, such as ``tokens_per_batch``.

    Raises:
        ValueError: if the teacher runs in another backend, or is sharded over ranks. When it scores, also if the tokenizers
            do not represent an answer by the same bytes (:class:`~torchrl_llm_kl.masks.TextMismatchError`), or the teacher's
            prompt is empty.

    Example:
        >>> scorer = ByteTeacher(teacher, teacher_tokenizer, tokenizer).make_scorer()  # doctest: +SKIP
        >>> scores = scorer.bounds(ids, mask)  # doctest: +SKIP
        >>> (scores.upper.values - scores.lower.values).max()  # doctest: +SKIP
        tensor(0.0012)
    """

    model: ByteTeacher
    offers = frozenset({"temperature", "adapters", "dtype", "remember", "top_k"})
    place = "a teacher with another tokenizer"
    instead = "it has log-probs of the sampled tokens and a top k"

    def __init__(self, model: ByteTeacher, options: ScoreOptions | None = None, **settings: Any) -> None:
        self.model = model
        self._inner = LogProbScorer(model.teacher, options, **settings)
        # Another backend returns no distributions. Ranks would need equally many forwards.
        if self._inner.path == "wrapper" or self._inner._ranks(None).groups:
            kind = type(model.teacher).__name__
            raise ValueError(f"{kind} is in another backend or sharded over ranks: pass the plain transformers model.")
        self.options, self.path = self._inner.options, self._inner.path

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`."""
        options = self.options if options is None else options
        self.check(options, request, reference=reference)
        check_range(0, self.model.tables.size, top_k=options.top_k)
        if options.top_k and self.model.method != "bytes":
            raise ValueError(f"method={self.model.method!r} compares whole distributions: leave out top_k=.")
        with self._scored(request, options) as (pieces, distributions):
            columns = self._top(pieces, distributions, options.top_k) if options.top_k else {}
        elements, values = _log_probs(pieces, distributions)
        return Scores.spread(request.layout, elements, values[:, 0], **columns)

    def bounds(
        self, sequences: Sequences | ScoreRequest, mask: TokenMask | None = None, **changes: Unpack[Changes]
    ) -> ByteScores:
        """The log-probs with a lower and an upper bound, and the chunks.

        Args:
            sequences: token ids or a request, as for :meth:`Scorer.score`.
            mask: as for :meth:`Scorer.score`.

        Keyword Args:
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.
        """
        options, request = self.options.but(**changes), read_request(sequences, mask, None)
        self.check(options, request)
        with self._scored(request, options) as (pieces, distributions):
            elements, values = _log_probs(pieces, distributions)
        number = torch.full_like(request.layout.values, -1)
        for chunk in pieces:
            number[chunk.elements] = chunk.number
        log_prob, lower, upper = (Scores.spread(request.layout, elements, each).log_prob for each in values.unbind(1))
        special = torch.tensor(sorted(self.model.spelled), dtype=torch.long)
        spelled = int(torch.isin(request.tokens.values[request.mask], special).sum())
        return ByteScores(log_prob, lower, upper, request.layout.like(number), spelled)

    def next_tokens(
        self, sequences: Sequences | ScoreRequest, mask: TokenMask | None = None, **changes: Unpack[Changes]
    ) -> tuple[Tensor, Tensor]:
        """The teacher's distribution over the student's vocabulary at each scored token.

        The student's next token is the longest one with which the teacher's text goes on. These events exclude each other, so
        the probabilities add up to 1, less the share of texts that begin with no token of the student.

        Args:
            sequences: token ids or a request, as for :meth:`Scorer.score`.
            mask: as for :meth:`Scorer.score`.

        Keyword Args:
            changes: fields of :class:`ScoreOptions` for this call, and ``temperature``.

        Returns:
            The probabilities ``[n, V]`` at the ``n`` scored tokens, and a bound ``[n]`` of their error: the share of the
            teacher's texts for which the student's token is not decided, at most 1. It is 0 with ``lookahead=0``,
            ``tolerance=0`` and enough ``covers``.
        """
        options, request = self.options.but(**changes), read_request(sequences, mask, None)
        self.check(options, request)
        with self._scored(request, options) as (pieces, distributions):
            return self._next(distributions)(tokens_of(pieces))

    def compare(self, student: LogProbScorer, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """The scores of a student, with its divergence to this teacher in ``kl``. The gradient is the student's.

        Args:
            student: the scorer of the student.
            request: the tokens to score.
            options: how to score the student. ``direction`` and ``beta`` choose the divergence.

        With ``method="bytes"`` each token has the divergence over the student's vocabulary, from :meth:`next_tokens`. With
        ``"gold"`` and ``"projected"`` the first token of a chunk has the divergence of the chunk, and the others 0.
        """
        self.check(self.options, request)
        if options.sampling.truncates or request.kept is not None:
            raise ValueError(
                "a divergence to a teacher with another tokenizer needs all tokens: leave out top_k, top_p and kept."
            )
        scores, states = student.run_with_states(request, options)
        beta = {"forward": 0.0, "reverse": 1.0}.get(options.direction, options.beta)
        teacher = self.model
        with self._scored(request, self.options) as (pieces, distributions), torch.set_grad_enabled(options.grad):
            log_prob = scores.log_prob.values
            divergence = Divergence(teacher.tables, distributions, log_prob, states, beta, self._next(distributions))
            elements, values = divergence(teacher.method, pieces)
        return scores._replace(kl=Scores.spread(request.layout, elements, values).log_prob)

    def _next(self, distributions: Distributions) -> NextTokenProbs:
        teacher = self.model
        return NextTokenProbs(teacher.tables, distributions, teacher.lookahead, teacher.tolerance)

    def _top(self, pieces: Sequence[Chunk], distributions: Distributions, k: int) -> Columns:
        """The columns of the most probable tokens."""
        probs_of = self._next(distributions)
        parts = []
        for some in distributions.tiles(tokens_of(pieces)) if pieces else [[]]:
            probs = probs_of(some)[0]
            top, ids = probs.topk(k, -1)
            rest = 1 - top.sum(-1)
            parts.append({"top_indices": ids, "top_log_probs": top.log(), "tail_log_prob": rest.clamp(min=0).log()})
        return join_columns(parts)

    # ------------------------------------------------------------------ the teacher's request

    @contextmanager
    def _scored(self, request: ScoreRequest, options: ScoreOptions) -> Iterator[tuple[list[Chunk], Distributions]]:
        """The chunks with their probabilities, and the teacher's distributions. Empty without scored tokens."""
        rows, mask, pieces = self._aligned(request)
        # Later forwards continue the keys and values of the first one.
        neutral = options.but(remember=True, top_k=0, grad=False)
        with locked(self.model.teacher), torch.no_grad():
            try:
                distributions = Distributions(self._inner, len(self.model.bytes.texts), rows, mask, neutral)
                Covers(distributions, self.model.bytes, self.model.tolerance).fill(pieces)
                yield pieces, distributions
            finally:
                if not options.remember:
                    self._inner.forget()

    def _aligned(self, request: ScoreRequest) -> tuple[list[list[int]], list[bool], list[Chunk]]:
        """The teacher's tokens of each sequence with an answer, their mask, and all chunks."""
        teacher, tokens = self.model, request.tokens
        request.check_ids(None)  # the size of the student's head is unknown here
        rows, mask, pieces = list[list[int]](), list[bool](), list[Chunk]()
        scored = request.mask.tolist()
        for start, stop in pairwise(tokens.offsets.tolist()):
            if not any(scored[start:stop]):
                continue
            row, number = list(teacher.start), len(pieces)
            mask += [False] * len(row)
            for answers, group in groupby(range(start, stop), key=scored.__getitem__):
                elements = list(group)
                if not answers and elements[-1] == stop - 1:  # nothing scored follows
                    break
                ids = tokens.values[elements].tolist()
                if answers and not row:
                    raise ValueError(
                        f"the teacher has no token before {request.locate(elements[0])}: pass a prompt= that returns at least "
                        "one token, such as the teacher's BOS."
                    )
                if answers:
                    theirs = teacher.bytes.encode(teacher.student.text(ids))
                    for each in self._chunks(elements, ids, theirs, Place(len(rows), len(row)), len(mask)):
                        each.number = len(pieces) - number
                        pieces.append(each)
                else:
                    theirs = list((teacher.prompt if elements[0] == start else teacher.between)(ids))
                    # The student's BOS may already have become the teacher's.
                    theirs = theirs[1:] if row == teacher.start and theirs[:1] == row else theirs
                row += theirs
                mask += [answers] * len(theirs)
            rows.append(row)
        return rows, mask, pieces

    def _chunks(
        self, elements: list[int], ids: list[int], own: list[int], place: Place, element: int
    ) -> Iterator[Chunk]:
        """The chunks of one answer, whose teacher's tokens begin at a place, and at an element of the request."""
        teacher = self.model
        spans, theirs, text = teacher.student.spans(ids), teacher.bytes.spans(own), teacher.student.text(ids)
        for (a, b), (c, d) in chunks(spans, theirs):
            begin, end = theirs[c][0], theirs[d - 1][1]
            ends = [stop - begin for _, stop in spans[a:b] if stop < end]
            inner = text[begin : begin + max(ends, default=0)]
            start = place._replace(own=place.own + c)
            yield Chunk(0, elements[a:b], start, own[c:d], element + c, ends, inner, teacher.covers)


def _log_probs(pieces: Sequence[Chunk], distributions: Distributions) -> tuple[Tensor, Tensor]:
    """The flat elements ``[K]`` of the student's tokens, and their log-probs with the bounds ``[K, 3]``."""
    elements = torch.tensor([element for chunk in pieces for element in chunk.elements], dtype=torch.long)
    values = [each for chunk in pieces for each in chunk.scores(distributions.log_prob)]
    return elements, torch.tensor(values, dtype=distributions.log_prob.dtype).reshape(-1, 3)
