"""A teacher with another tokenizer, as a distribution over the student's tokens.

Both tokenisations of an answer have the same bytes. Where both have a boundary, the text is cut into chunks. A chunk has the
log-prob of the teacher's own tokens. A student's boundary inside a chunk has the teacher's probability that its text goes on
with the bytes up to there: a sum over all of its tokens that agree with these bytes, also over several tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.head import log_softmax
from torchrl_llm_kl.masks import TokenBytes, Tokenizer, chunks, pair_specials
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._passes import ScoringRun
from torchrl_llm_kl.scoring._protocol import Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest, Sequences, TokenMask, read_request
from torchrl_llm_kl.scoring._scorer import LogProbScorer
from torchrl_llm_kl.scoring._scores import Columns, Scores, States
from torchrl_llm_kl.scoring._wrapping import ErrorGuard

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchrl_llm_kl.scoring._options import Changes

# The most positions whose whole distributions are held at once.
_TILE = 64

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
            are replaced by their counterparts.
        specials: the teacher's id for some of the student's special tokens. By default tokens of one name, and EOS and BOS,
            correspond. The teacher scores the letters of a sampled special token without counterpart.
        tolerance: beginnings with less than this share of the probability of the chunk's last inner boundary are not
            continued. 0 continues all.
        covers: the most beginnings that are continued in a chunk, besides the teacher's own tokens.

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

    log_probs_only = True  # no distributions: see check_distributions

    def __init__(
        self,
        teacher: nn.Module,
        tokenizer: Tokenizer,
        student_tokenizer: Tokenizer,
        *,
        prompt: Prompt | None = None,
        specials: Mapping[int, int] | None = None,
        tolerance: float = 1e-3,
        covers: int = 64,
    ) -> None:
        check_range(0, 1, tolerance=tolerance)
        check_range(0, covers=covers)
        pairs = pair_specials(student_tokenizer, tokenizer, specials)
        # Not `model`: its vocabulary must not be compared with the policy's. The tokenizer is that of the scored ids.
        self.teacher, self.tokenizer = teacher, student_tokenizer
        self.student = TokenBytes(student_tokenizer, pairs)
        # A counterpart may be a token that the teacher's tokenizer does not call special.
        own = TokenBytes(tokenizer).specials.keys() | set(pairs.values())
        self.bytes = TokenBytes(tokenizer, {index: index for index in own})
        self.spelled = self.student.specials.keys() - pairs.keys()
        self.prompt = self._as_text if prompt is None else prompt
        self.tolerance, self.covers = tolerance, covers
        # A prompt= function decides itself whether its ids begin with BOS.
        bos = tokenizer.bos_token_id
        adds_bos = prompt is None and bos is not None and bos in tokenizer("").input_ids[:1]
        self.start = [bos] if adds_bos else []

    def make_scorer(self, **settings: Any) -> ByteScorer:
        """A scorer with these settings of :class:`LogProbScorer`."""
        return ByteScorer(self, **settings)

    def _as_text(self, ids: list[int]) -> list[int]:
        return self.bytes.encode(self.student.text(ids), exact=False)


# ------------------------------------------------------------------ sums over tokens


@dataclass(eq=False)
class SumsRun(ScoringRun):
    """A call that also computes the log of the total probability of sets of tokens.

    ``sets`` has lists of token ids by flat element, and ``sums`` gets their log-probs. Whole distributions are held only at
    these positions.
    """

    sets: Mapping[int, list[list[int]]] = field(default_factory=dict)
    sums: dict[int, list[float]] = field(default_factory=dict)

    def _read(self, guard: ErrorGuard, some: Tensor, targets: Tensor, states: list[States]) -> list[Columns]:
        # `some` has the elements of one pack. Another attempt after running out of memory overwrites its sums.
        asked = torch.tensor([i for i, element in enumerate(some.tolist()) if element in self.sets], dtype=torch.long)
        for rows in asked.split(_TILE):
            # On the host, since each set has another size: an accelerator would start many small kernels.
            log_probs = log_softmax(states[0].tempered(rows)).double().cpu()
            for element, row in zip(some[rows].tolist(), log_probs, strict=True):
                self.sums[element] = [float(row[ids].logsumexp(0)) for ids in self.sets[element]]
        return super()._read(guard, some, targets, states)


class SumsScorer(LogProbScorer):
    """The scorer of a teacher's own tokens, and of sets of them."""

    __slots__ = ("_run",)

    def score_sums(
        self, request: ScoreRequest, sets: Mapping[int, list[list[int]]], options: ScoreOptions
    ) -> tuple[Tensor, dict[int, list[float]]]:
        """The log-prob of each token ``[N]``, and the log of the total probability of each set at its flat element."""
        self._run = sets, dict[int, list[float]]()
        return self.run(request, options).log_prob.values, self._run[1]

    def _new_run(self, *args: Any) -> ScoringRun:
        run = SumsRun(*args)
        run.sets, run.sums = self._run
        return run


# ------------------------------------------------------------------ chunks


@dataclass(eq=False)
class _Chunk:
    """Tokens with the same bytes, and the probabilities of the student's boundaries among them, in nats."""

    number: int  # in its sequence
    elements: list[int]  # of the student's tokens, in the student's request
    row: list[int]  # the teacher's tokens of the sequence
    own: range  # the positions of the chunk in that row
    element: int  # of the first of them, in the teacher's request
    ends: list[int]  # the student's boundaries inside the chunk, in bytes
    text: str  # up to the last of them
    room: int  # how many more nodes may be forwarded
    lower: np.ndarray = field(init=False)
    omitted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.omitted = np.full(len(self.ends), -np.inf)
        # Tokens without bytes at the start of an answer are certain.
        self.lower = np.where(np.array(self.ends) > 0, -np.inf, 0.0)

    @property
    def ids(self) -> tuple[int, ...]:
        """The teacher's own tokens."""
        return tuple(self.row[self.own.start : self.own.stop])

    def scores(self, log_probs: Tensor) -> list[tuple[float, float, float]]:
        """The log-prob of each student's token with its bounds, given the teacher's log-probs of its own tokens."""
        own = math.fsum(log_probs[self.element : self.element + len(self.own)].tolist())
        # Usually one token ends at the end of the chunk. Tokens without bytes after it end there too.
        rest = [own] * (len(self.elements) - len(self.ends))
        lower = [0.0, *self.lower.tolist(), *rest]
        upper = [0.0, *np.logaddexp(self.lower, self.omitted).tolist(), *rest]
        # A difference is smallest from the upper bound before to the lower bound after.
        pairs = zip(pairwise(lower), pairwise(upper), strict=True)
        return [(after - before, after - most, top - before) for (before, after), (most, top) in pairs]

    def add(self, node: _Node, sums: Sequence[float], covers: list[tuple[int, int]]) -> list[_Node]:
        """Add the tokens that reach a boundary from a node, and return the nodes after shorter tokens."""
        later = self.after(node.at)
        count = len(self.ends[later])
        self.lower[later] = np.logaddexp(self.lower[later], node.log_p + np.array(sums[:count]))
        return [
            _Node(self, (*node.path, index), node.log_p + log_p, node.at + length)
            for (index, length), log_p in zip(covers, sums[count:], strict=True)
        ]

    def after(self, at: int) -> slice:
        """The boundaries after a byte."""
        return slice(int(np.searchsorted(self.ends, at, side="right")), None)


class _Node(NamedTuple):
    """The beginning of a cover: tokens that end before the last boundary of a chunk."""

    chunk: _Chunk
    path: tuple[int, ...]
    log_p: float
    at: int  # the byte where the last token ends


class ByteScorer(Scorer):
    """The scorer of a :class:`ByteTeacher`. It takes the student's token ids and returns only log-probs, without gradient.

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
    offers = frozenset({"temperature", "adapters", "dtype", "remember"})
    place = "a teacher with another tokenizer"
    instead = "it has only log-probs of the sampled tokens"

    def __init__(self, model: ByteTeacher, options: ScoreOptions | None = None, **settings: Any) -> None:
        self.model = model
        self._inner = SumsScorer(model.teacher, options, **settings)
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
        elements, values, _ = self._score(request, options)
        return Scores.spread(request.layout, elements, values[:, 0])

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
        elements, values, pieces = self._score(request, options)
        number = torch.full_like(request.layout.values, -1)
        for chunk in pieces:
            number[chunk.elements] = chunk.number
        log_prob, lower, upper = (Scores.spread(request.layout, elements, each).log_prob for each in values.unbind(1))
        special = torch.tensor(sorted(self.model.spelled), dtype=torch.long)
        spelled = int(torch.isin(request.tokens.values[request.mask], special).sum())
        return ByteScores(log_prob, lower, upper, request.layout.like(number), spelled)

    # ------------------------------------------------------------------ the teacher's request

    def _score(self, request: ScoreRequest, options: ScoreOptions) -> tuple[Tensor, Tensor, list[_Chunk]]:
        """Flat elements ``[K]``, their log-prob with its bounds ``[K, 3]``, and the chunks."""
        rows, mask, pieces = self._aligned(request)
        if not pieces:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, 3), pieces
        # Cached log-probs would skip positions whose whole distribution is needed.
        log_probs = self._log_probs(ScoreRequest.of(rows, torch.tensor(mask)), pieces, options.but(remember=False))
        scores = [score for chunk in pieces for score in chunk.scores(log_probs)]
        elements = torch.tensor([element for chunk in pieces for element in chunk.elements])
        return elements, torch.tensor(scores, dtype=log_probs.dtype), pieces

    def _aligned(self, request: ScoreRequest) -> tuple[list[list[int]], list[bool], list[_Chunk]]:
        """The teacher's tokens of each sequence with an answer, their mask, and all chunks."""
        teacher, tokens = self.model, request.tokens
        rows, mask, pieces = list[list[int]](), list[bool](), list[_Chunk]()
        scored = request.mask.tolist()
        for start, stop in pairwise(tokens.offsets.tolist()):
            if not any(scored[start:stop]):
                continue
            row, number = list(teacher.start), len(pieces)
            mask += [False] * len(row)
            for answers, group in groupby(range(start, stop), key=scored.__getitem__):
                elements = list(group)
                ids = tokens.values[elements].tolist()
                if answers and not row:
                    raise ValueError(
                        f"the teacher has no token before {request.locate(elements[0])}: pass a prompt= that returns at least "
                        "one token, such as the teacher's BOS."
                    )
                if answers:
                    theirs = teacher.bytes.encode(teacher.student.text(ids))
                    # Before `row` grows: chunks count their positions from its present end.
                    for each in self._chunks(elements, ids, theirs, row, len(mask)):
                        each.number = len(pieces) - number
                        pieces.append(each)
                else:
                    theirs = list(teacher.prompt(ids))
                    # The student's BOS may already have become the teacher's.
                    theirs = theirs[1:] if row == teacher.start and theirs[:1] == row else theirs
                row += theirs
                mask += [answers] * len(theirs)
            rows.append(row)
        return rows, mask, pieces

    def _chunks(
        self, elements: list[int], ids: list[int], own: list[int], row: list[int], element: int
    ) -> Iterator[_Chunk]:
        """The chunks of one answer, whose tokens the teacher's row will end with."""
        teacher, first = self.model, len(row)
        spans, theirs, text = teacher.student.spans(ids), teacher.bytes.spans(own), teacher.student.text(ids)
        for (a, b), (c, d) in chunks(spans, theirs):
            begin, end = theirs[c][0], theirs[d - 1][1]
            ends = [stop - begin for _, stop in spans[a:b] if stop < end]
            inner = text[begin : begin + max(ends, default=0)]
            yield _Chunk(0, elements[a:b], row, range(first + c, first + d), element + c, ends, inner, teacher.covers)

    # ------------------------------------------------------------------ the teacher's probabilities

    def _log_probs(self, request: ScoreRequest, pieces: list[_Chunk], options: ScoreOptions) -> Tensor:
        """Log-probs of the teacher's own tokens ``[N]``. Fills the chunks' probabilities."""
        # The teacher's own tokens are forwarded anyway, so each of them that begins before a boundary is a node.
        starts = [(chunk, i, start) for chunk in pieces for i, (start, _) in enumerate(self._spans(chunk))]
        nodes = {chunk.element + i: _Node(chunk, chunk.ids[:i], 0.0, start) for chunk, i, start in starts}
        covers = {element: self._covers(node) for element, node in nodes.items()}
        log_probs, sums = self._inner.score_sums(request, {e: sets for e, (sets, _) in covers.items()}, options)
        longer = list[_Node]()
        for element, node in nodes.items():
            before = math.fsum(log_probs[element - len(node.path) : element].tolist())
            after = node.chunk.add(node._replace(log_p=before), sums[element], covers[element][1])
            # The node after the teacher's own token is among `nodes` already.
            longer += [each for each in after if each.path != node.chunk.ids[: len(each.path)]]
        while chosen := self._chosen(longer):
            longer = self._forward(chosen, options)
        return log_probs

    def _spans(self, chunk: _Chunk) -> list[tuple[int, int]]:
        """The spans of the teacher's own tokens that begin before the last boundary."""
        return [span for span in self.model.bytes.spans(chunk.ids) if span[0] < len(chunk.text)]

    def _covers(self, node: _Node) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The tokens that reach each later boundary, and each shorter token by itself. Then the shorter tokens' lengths."""
        chunk, at = node.chunk, node.at
        # A token that ends exactly at the last boundary reaches it, so `inside` needs no longer ones.
        shorter = self.model.bytes.inside(chunk.text[at:])
        reach = [self.model.bytes.starting_with(chunk.text[at:end]) for end in chunk.ends[chunk.after(at)]]
        return [*reach, *([index] for index, _ in shorter)], shorter

    def _chosen(self, nodes: list[_Node]) -> list[_Node]:
        """The nodes to forward. The probability of each other node bounds the sum over its covers."""
        chosen = []
        least = math.log(self.model.tolerance) if self.model.tolerance else -math.inf
        for node in sorted(nodes, key=lambda node: -node.log_p):
            chunk, later = node.chunk, node.chunk.after(node.at)
            # The teacher's own tokens reach every boundary, so `lower` is finite here.
            if chunk.room > 0 and node.log_p > least + chunk.lower[-1]:
                chunk.room -= 1
                chosen.append(node)
            else:
                chunk.omitted[later] = np.logaddexp(chunk.omitted[later], node.log_p)
        return chosen

    def _forward(self, nodes: list[_Node], options: ScoreOptions) -> list[_Node]:
        """Forward the beginnings of covers, and return the longer ones."""
        # The last token is repeated: the distribution that predicts it is read.
        rows = [[*node.chunk.row[: node.chunk.own.start], *node.path, node.path[-1]] for node in nodes]
        last = [end - 1 for end in accumulate(map(len, rows))]
        mask = torch.zeros(last[-1] + 1, dtype=torch.bool)
        mask[last] = True
        covers = [self._covers(node) for node in nodes]
        sets = {element: each for element, (each, _) in zip(last, covers, strict=True)}
        _, sums = self._inner.score_sums(ScoreRequest.of(rows, mask), sets, options)
        parts = zip(nodes, last, covers, strict=True)
        return [longer for node, i, (_, shorter) in parts for longer in node.chunk.add(node, sums[i], shorter)]
