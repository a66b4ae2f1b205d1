"""A teacher with another tokenizer as a distribution over the student's vocabulary, and other divergences to such a teacher.

The student's next token is the longest one with which the teacher's text goes on. These events exclude each other, so their
probabilities add up to 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl.estimators import top_k_divergence
from torchrl_llm_kl.masks import TokenBytes
from torchrl_llm_kl.scoring._byte_sums import Chunk, Distributions, Place
from torchrl_llm_kl.scoring._scores import TokenStates

#: How whole distributions over two vocabularies are compared.
Method = Literal["bytes", "gold", "projected"]
# The smallest probability of a token. No text of the teacher may go on with a token that the student's tokenizer never uses.
_SMALLEST = 1e-12
_MOST_TABLES = 512
# NeMo-RL's weights of the teacher's tokens that spell a student's token, and their number.
_DECAY, _SPELLED = 0.1, 4


@dataclass(frozen=True, eq=False)
class Table:
    """The student's next token for each of the teacher's tokens that agree with the bytes so far.

    Args:
        tokens: the teacher's tokens with a next token of their own, ``[k]``. None for all, in order of their ids.
        ids: the student's longest token so far for each, or its vocabulary's size without one, ``[k]``.
        live: True if the teacher's next tokens decide, ``[k]``.
        other: the student's token for all other tokens. None if no other one agrees.
    """

    tokens: Tensor | None
    ids: Tensor
    live: Tensor
    other: int | None

    @cached_property
    def columns(self) -> Mapping[int, int] | range:
        """The column of each token."""
        return range(len(self.ids)) if self.tokens is None else {x: i for i, x in enumerate(self.tokens.tolist())}

    @cached_property
    def live_columns(self) -> Tensor:
        """The columns of live tokens."""
        return self.live.nonzero().squeeze(-1)


@dataclass(frozen=True)
class NextTokens:
    """Tables of the student's next token.

    Args:
        student: the bytes of the student's tokens.
        teacher: the bytes of the teacher's tokens.
        without: tokens of the student that are left out, such as special tokens without a counterpart.
    """

    student: TokenBytes
    teacher: TokenBytes
    without: Collection[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The student's token of each text."""
        allowed = ((text, [i for i in ids if i not in self.without]) for text, ids in self.student.ids_of.items())
        return {text: ids[0] for text, ids in allowed if ids}

    @cached_property
    def _letters(self) -> dict[str, list[str]]:
        """The beginnings of the student's tokens, and the next letters of each."""
        letters: dict[str, dict[str, None]] = defaultdict(dict)
        for text in self.ids:
            for n, letter in enumerate(text):
                letters[text[:n]][letter] = None
        return {text: list(each) for text, each in letters.items()}

    @cached_property
    def _tables(self) -> dict[tuple[str, str], Table]:
        return {}

    @cached_property
    def order(self) -> Tensor:
        """The teacher's tokens, sorted by text."""
        return torch.tensor(self.teacher.order)

    @cached_property
    def common(self) -> Tensor:
        """The ids of tokens with the same text, the student's and the teacher's, ``[2, M]``."""
        theirs = self.teacher.ids_of
        pairs = [(own, theirs[text][0]) for text, own in self.ids.items() if text in theirs]
        return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T

    @cached_property
    def projection(self) -> Tensor:
        """The weights of the teacher's tokens for each token of the student, sparse ``[V, W]`` with rows that add up to 1.

        A token with the same text has the weight 1. Otherwise the teacher's tokens that spell the text have geometric weights.
        """
        entries = list[tuple[int, int, float]]()
        for text, own in self.ids.items():
            spelled = self.teacher.ids_of.get(text, [])[:1] or self.teacher.encode(text, exact=False)[:_SPELLED]
            total = sum(_DECAY**i for i in range(len(spelled)))
            entries += [(own, token, _DECAY**i / total) for i, token in enumerate(spelled)]
        rows, columns, weights = zip(*entries, strict=True)
        size, values = (self.size, len(self.teacher.texts)), torch.tensor(weights)
        return torch.sparse_coo_tensor(torch.tensor([rows, columns]), values, size, check_invariants=True).coalesce()

    @property
    def size(self) -> int:
        """The size of the student's vocabulary."""
        return len(self.student.texts)

    def longest(self, text: str) -> int:
        """The longest token with which a text begins, or :attr:`size`."""
        return next((self.ids[text[:n]] for n in range(len(text), 0, -1) if text[:n] in self.ids), self.size)

    def table(self, given: str, pending: str) -> Table:
        """The table after the bytes ``given``, with which the teacher's token begins, or after ``pending`` of the student's."""
        key = given, pending
        if key not in self._tables:
            if len(self._tables) == _MOST_TABLES:
                self._tables.clear()
            self._tables[key] = self._new_table(given, pending)
        return self._tables[key]

    def _new_table(self, given: str, pending: str) -> Table:
        columns, texts = self.teacher.columns(given), self.teacher.sorted_texts
        first, other = columns.start, self.longest(pending)
        ids = torch.full((columns.stop - first,), other)
        live = torch.zeros(len(ids), dtype=torch.bool)
        waiting = [""]
        for more in waiting:  # from short to long, so that the longest token stays
            here = self.teacher.columns(given + more)
            if here.start == here.stop:
                continue
            if more and pending + more in self.ids:
                ids[here.start - first : here.stop - first] = self.ids[pending + more]
            letters = self._letters.get(pending + more, [])
            waiting += [more + letter for letter in letters]
            # A token that ends here leaves the student's next token open. It stands before all tokens that go on.
            last = bisect_right(texts, given + more, here.start, here.stop) if letters and given + more else here.start
            live[here.start - first : last - first] = True
        if given:
            return Table(self.order[columns], ids, live, None)
        if pending:  # few tokens continue it
            own = ((ids != other) | live).nonzero().squeeze(-1)
            return Table(self.order[own], ids[own], live[own], other)
        every = torch.full((len(self.teacher.texts),), other), torch.zeros(len(self.teacher.texts), dtype=torch.bool)
        return Table(None, every[0].index_copy(0, self.order, ids), every[1].index_copy(0, self.order, live), other)


class _Part(NamedTuple):
    """A part of the distribution at a student's token: the teacher's tokens at one place."""

    token: int  # the index of the student's token
    place: Place
    given: str
    pending: str
    log_p: float


class NextTokenProbs:
    """The probabilities of the student's next tokens.

    Args:
        tables: the tables of the next token.
        distributions: the teacher's distributions.
        lookahead: continue the teacher's tokens whose probability is larger, until the student's token is decided. Tokens
            that were forwarded before are always continued.
        tolerance: the same for tokens after which the student's token has not begun, such as those that end exactly at the
            student's place.
    """

    def __init__(self, tables: NextTokens, distributions: Distributions, lookahead: float, tolerance: float) -> None:
        self._tables, self._distributions = tables, distributions
        self._lookahead, self._tolerance = lookahead, min(lookahead, tolerance)
        # Neighbouring tokens continue each other's places, so each distribution is computed once for all of them.
        self._rows: dict[Place, Tensor] = {}

    def __call__(self, tokens: Sequence[tuple[Chunk, int]]) -> tuple[Tensor, Tensor]:
        """The probabilities ``[n, V]`` at some tokens, given as a chunk and the number of the token in it.

        Also returns a bound ``[n]`` of the error of each probability: the share of the teacher's texts for which the student's
        token is not decided.
        """
        parts = [part for i, (chunk, number) in enumerate(tokens) for part in _first_parts(i, chunk, number)]
        self._probs = self._distributions.log_prob.new_zeros(len(tokens), self._tables.size + 1)
        self._undecided = self._probs.new_zeros(len(tokens))
        while parts:
            unknown = dict.fromkeys(part.place for part in parts if part.place not in self._distributions)
            if unknown:
                self._distributions.forward([*unknown], ahead=True)
            parts = [part for tile in self._distributions.tiles(parts) for part in self._add(tile)]
        self._rows.clear()
        # The others stand for the teacher's tokens that end before the student's token, and for omitted covers.
        total = self._probs.sum(1).clamp(min=_SMALLEST)
        omitted = self._probs.new_tensor([_omitted(chunk, number) for chunk, number in tokens])
        return self._probs[:, :-1] / total[:, None], (self._undecided / total + omitted).clamp(max=1.0)

    def _add(self, parts: Sequence[_Part]) -> list[_Part]:
        """Add parts, and return the parts that continue them."""
        new = [place for place in dict.fromkeys(part.place for part in parts) if place not in self._rows]
        if new:
            self._rows.update(zip(new, self._distributions.log_probs(new).to(self._probs), strict=True))
        total = torch.tensor([part.log_p for part in parts], dtype=self._probs.dtype, device=self._probs.device).exp()
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, part in enumerate(parts):
            groups[part.given, part.pending].append(i)
        longer = []
        for key, rows in groups.items():
            table, some = self._tables.table(*key), [parts[i] for i in rows]
            log_probs = torch.stack([self._rows[part.place] for part in some])
            if table.tokens is not None:
                log_probs = log_probs[:, table.tokens.to(log_probs.device)]
            own = log_probs[:, : len(table.ids)].exp() * total[rows, None]
            places = self._continued(table, some, own)
            for row, column in places:
                part, token = some[row], column if table.tokens is None else int(table.tokens[column])
                place = self._distributions.after(part.place, token)
                text = part.pending + self._tables.teacher.texts[token][len(part.given) :]
                longer.append(_Part(part.token, place, "", text, math.log(float(own[row, column]))))
            index, ids = torch.tensor([part.token for part in some]).to(own.device), table.ids.to(own.device)
            width = self._probs.new_zeros(len(rows), self._probs.shape[1])
            if table.other is not None:
                width[:, table.other] = (total[rows] - own.sum(1)).clamp(min=0)
            own[[row for row, _ in places], [column for _, column in places]] = 0
            live = table.live_columns.to(own.device)
            self._undecided.index_add_(0, index, own[:, live].sum(1))
            own[:, live[ids[live] == self._tables.size]] = 0  # no token of the student yet
            self._probs.index_add_(0, index, width.scatter_add_(1, ids.expand(len(rows), -1), own))
        return longer

    def _continued(self, table: Table, parts: Sequence[_Part], probs: Tensor) -> list[tuple[int, int]]:
        """The rows and columns whose next token the teacher's next tokens decide, and that are continued."""
        live = table.live_columns
        begun = table.ids[live] != self._tables.size
        chosen = set[tuple[int, int]]()
        for columns, least in ((live[begun], self._lookahead), (live[~begun], self._tolerance)):
            if least < 1.0 and len(columns):
                likely = (probs[:, columns.to(probs.device)] > least).nonzero().cpu()
                chosen |= {(row, int(columns[column])) for row, column in likely.tolist()}
        for row, part in enumerate(parts):
            for token in self._distributions.known(part.place):
                if token in table.columns and table.live[column := table.columns[token]] and probs[row, column] > 0:
                    chosen.add((row, column))
        return sorted(chosen)


def _omitted(chunk: Chunk, number: int) -> float:
    """The probability of omitted covers of the bytes before a token, as a share of the others' probability."""
    inner = 0 < number <= len(chunk.ends)
    return math.exp(chunk.omitted[number - 1] - chunk.lower[number - 1]) if inner else 0.0


def _first_parts(token: int, chunk: Chunk, number: int) -> list[_Part]:
    """The parts of the distribution at a token of the student: one for each beginning of a cover of the bytes before it."""
    at = 0 if number == 0 else chunk.ends[number - 1] if number <= len(chunk.ends) else len(chunk.text)
    if number > len(chunk.ends):  # a token without bytes after the end of the chunk
        return [_Part(token, chunk.start._replace(own=chunk.start.own + len(chunk.ids)), "", "", 0.0)]
    if at == 0:
        return [_Part(token, chunk.start, "", "", 0.0)]
    before = chunk.lower[number - 1]
    return [
        _Part(token, node.place, chunk.text[node.at : at], "", node.log_p - before)
        for node in chunk.nodes
        if node.at < at
    ]


# ------------------------------------------------------------------ divergences over two vocabularies


def gold_divergence(log_q: Tensor, log_p: Tensor, common: Tensor, beta: float) -> Tensor:
    r"""GOLD's divergence of merged distributions: a generalised JSD of common tokens, and the sorted L1 of the others.

    The weight of the common tokens is their share of the teacher's vocabulary, and the others have the rest.

    Args:
        log_q: the student's log-probs of each chunk, ``[C, V]``: all tokens' log-probs at its last place, plus the log-probs
            of its other sampled tokens. Their exponentials add up to less than 1.
        log_p: the teacher's, ``[C, W]``.
        common: the ids of tokens with the same text, the student's and the teacher's, ``[2, M]``.
        beta: the teacher's share of the mixture, see :func:`~torchrl_llm_kl.estimators.top_k_divergence`.

    Source: TRL 1.16, GOLDTrainer, ``uld_use_hybrid_loss`` with ``uld_token_merge_strategy="bayesian"``.
    """
    least = math.log(1e-8)  # TRL's smallest probability of a common token
    matched = top_k_divergence(log_q[:, common[0]].clamp(min=least), log_p[:, common[1]].clamp(min=least), beta=beta)
    others = []
    for log_probs, ids in ((log_q, common[0]), (log_p, common[1])):
        out = torch.ones(log_probs.shape[1], dtype=torch.bool, device=log_probs.device).index_fill(0, ids, value=False)
        others.append(log_probs[:, out].exp().sort(-1, descending=True).values)
    width = max(each.shape[1] for each in others)
    q, p = (F.pad(each, (0, width - each.shape[1])) for each in others)
    share = common.shape[1] / log_p.shape[1]
    return share * matched + (1 - share) * (q - p).abs().sum(-1)


def projected_divergence(q: Tensor, log_p: Tensor, projection: Tensor, beta: float) -> Tensor:
    r"""P-KL: the KL between the teacher and the student's distribution projected on the teacher's vocabulary.

    Args:
        q: the mean of the student's probabilities over the tokens of each chunk, ``[C, V]``.
        log_p: the mean of the teacher's log-probs over its tokens, ``[C, W]``.
        projection: the weights of the teacher's tokens for each token of the student, sparse ``[V, W]``.
        beta: 0 for the KL from the teacher, as in the paper, 1 for the KL from the student.

    Source: Sreenivas et al. 2026 (X-Token, arXiv 2605.21699) and NeMo-RL, ``CrossTokenizerDistillationLossFn``, over the whole
    vocabulary of the teacher.
    """
    if beta not in (0.0, 1.0):
        raise ValueError(f"the method 'projected' is a KL: pass beta=0, or 1 for the reverse KL, got {beta:g}.")
    log_p = log_p.clamp(min=math.log(_SMALLEST))  # a token that the teacher's head lacks
    projected = torch.sparse.mm(projection.t(), q.t()).t()
    log_q = (projected / (projected.sum(-1, keepdim=True) + 1e-10) + 1e-10).log()
    return ((log_p.exp() * (log_p - log_q)) if beta == 0 else (log_q.exp() * (log_q - log_p))).sum(-1)


@dataclass(frozen=True)
class Divergence:
    """The divergence of a student to a teacher, from whole distributions of both.

    Args:
        tables: the tables of the next token.
        distributions: the teacher's distributions.
        log_prob: the student's log-probs of its tokens, in the layout of its request, ``[N]``.
        states: the states that predict these tokens.
        beta: the teacher's share of the mixture.
        next_tokens: the teacher's distribution over the student's vocabulary.
    """

    tables: NextTokens
    distributions: Distributions
    log_prob: Tensor
    states: TokenStates
    beta: float
    next_tokens: NextTokenProbs

    def __call__(self, method: Method, pieces: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Flat elements ``[n]`` of the student's tokens, and their values in nats, with gradient."""
        if not pieces:
            return torch.zeros(0, dtype=torch.long), self.log_prob[:0]
        if method == "bytes":
            elements = [element for chunk in pieces for element in chunk.elements]
            return torch.tensor(elements), self._in_tiles(self._of_bytes, tokens_of(pieces))
        make: Callable[[Sequence[Chunk]], Tensor]
        if method == "gold":
            make = partial(self._of_gold, self.tables.common)
        else:
            make = partial(self._of_projection, self.tables.projection)
        return torch.tensor([chunk.elements[0] for chunk in pieces]), self._in_tiles(make, pieces)

    def _in_tiles(self, make: Callable[[Any], Tensor], items: Sequence[Any]) -> Tensor:
        """Join the values of tiles. Their whole distributions are computed again in the backward."""
        tiles = self.distributions.tiles(items)
        return torch.cat([checkpoint(make, tile, use_reentrant=False) for tile in tiles])

    def _student(self, elements: Sequence[int]) -> Tensor:
        """The student's log-probs of all tokens, and ``-inf`` for tokens that its head lacks."""
        log_q = self.states.log_probs(elements)
        return F.pad(log_q, (0, max(0, self.tables.size - log_q.shape[1])), value=-torch.inf)

    def _of_bytes(self, tokens: Sequence[tuple[Chunk, int]]) -> Tensor:
        with torch.no_grad():
            probs = self.next_tokens(tokens)[0]
        log_q = self._student([chunk.elements[number] for chunk, number in tokens])
        log_p = F.pad(probs, (0, log_q.shape[1] - probs.shape[1])).clamp(min=_SMALLEST).log()
        return top_k_divergence(log_q, log_p.to(log_q), beta=self.beta)

    def _of_gold(self, common: Tensor, pieces: Sequence[Chunk]) -> Tensor:
        log_q = self._student([chunk.elements[-1] for chunk in pieces])
        log_p = self.distributions.log_probs([_own_places(chunk)[-1] for chunk in pieces]).to(log_q)
        # The chain rule: the other tokens of a chunk are sampled ones.
        own = torch.stack([self.log_prob[chunk.elements[:-1]].sum() for chunk in pieces]).to(log_q)
        others = [self.distributions.log_prob[i : i + len(x.ids) - 1].sum() for x in pieces for i in [x.element]]
        merged = log_q + own[:, None], log_p + torch.stack(others).to(log_q)[:, None]
        return gold_divergence(*merged, common.to(log_q.device), self.beta)

    def _of_projection(self, weights: Tensor, pieces: Sequence[Chunk]) -> Tensor:
        q = self._student([element for chunk in pieces for element in chunk.elements]).exp()
        log_p = self.distributions.log_probs([place for chunk in pieces for place in _own_places(chunk)]).to(q)
        q, log_p = (
            torch.stack([rows.mean(0) for rows in each[:, :size].split(lengths)])
            for each, size, lengths in (
                (q, weights.shape[0], [len(chunk.elements) for chunk in pieces]),
                (log_p, weights.shape[1], [len(chunk.ids) for chunk in pieces]),
            )
        )
        return projected_divergence(q, log_p, weights.to(q), self.beta)


def tokens_of(pieces: Sequence[Chunk]) -> list[tuple[Chunk, int]]:
    """Each token of the student, as a chunk and the number of the token in it."""
    return [(chunk, number) for chunk in pieces for number in range(len(chunk.elements))]


def _own_places(chunk: Chunk) -> list[Place]:
    return [chunk.start._replace(own=chunk.start.own + i) for i in range(len(chunk.ids))]
