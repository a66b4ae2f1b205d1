"""A teacher with another tokenizer as a distribution over the student's vocabulary, against sums over all sequences."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from byte_texts import RandomTeacher, small_tokenizer, starts_with
from closeness import assert_near
from torchrl_llm_kl import PolicyLoss, Sampling, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.scoring import ByteScorer, ByteTeacher, LogProbScorer, ScoreOptions, ScoreRequest
from toy_models import tiny_model

Method = Literal["bytes", "gold", "projected"]

pytestmark = pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
STUDENT = ("a", "b", "c", "ab", "ca", "abc", "bca")
TEACHER = ("a", "b", "c", "bc", "aa", "ba", "bca", "ca", "cab")
#: Rounding of float64 sums of up to 1,000 products of 8 probabilities.
EXACT: dict[str, Any] = {"terms": 8192, "size": 1.0}
PROMPT = [1, 0]


def scorer_of(model: Any, teacher: Any = TEACHER, student: Any = STUDENT, **settings: Any) -> ByteScorer:
    return ByteTeacher(model, small_tokenizer(*teacher), small_tokenizer(*student), **settings).make_scorer()


def answers(count: int, length: int, *, seed: int = 0, vocab: int = len(STUDENT)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for _ in range(count)]


def masked(rows: list[list[int]]) -> tuple[list[list[int]], list[list[bool]]]:
    return [PROMPT + row for row in rows], [[False] * len(PROMPT) + [True] * len(row) for row in rows]


def answers_as_data(rows: list[list[int]]) -> TensorDict:
    """Padded rows of one length, whose answers begin after the prompt."""
    full = torch.tensor(rows)
    tokens = TensorDict(full=full, prompt=full[:, : len(PROMPT)], batch_size=[len(rows)])
    return TensorDict(tokens=tokens, batch_size=[len(rows)])


def longest_token(scorer: ByteScorer, model: RandomTeacher, prefix: list[int], text: str) -> list[float]:
    """The probability that each of the student's tokens is the longest one that follows ``text``, from its definition.

    A token follows as the longest one if its text follows, and none of the shortest longer tokens does.
    """
    texts, teacher = scorer.model.student.texts, scorer.model.bytes.texts
    follows = {piece: starts_with(model, teacher, prefix, text + piece) for piece in texts}
    out = []
    for piece in texts:
        longer = [other for other in texts if other != piece and other.startswith(piece)]
        nearest = [other for other in longer if not any(x != other and other.startswith(x) for x in longer)]
        out.append(
            (follows[piece] - sum(follows[other] for other in nearest)) / starts_with(model, teacher, prefix, text)
        )
    return out


def by_enumeration(scorer: ByteScorer, model: RandomTeacher, row: list[int]) -> list[list[float]]:
    """The distribution at each token of an answer, given the teacher's own tokens up to the last shared boundary."""
    student, teacher = scorer.model.student, scorer.model.bytes
    own = teacher.encode(student.text(row))
    ends = [len(teacher.text(own[:n])) for n in range(len(own) + 1)]
    out = []
    for n in range(len(row)):
        at = len(student.text(row[:n]))
        shared = max(border for k in range(n + 1) if (border := len(student.text(row[:k]))) in ends)
        prefix = [*scorer.model.prompt(PROMPT), *own[: ends.index(shared)]]
        out.append(longest_token(scorer, model, prefix, student.text(row)[shared:at]))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_those_of_the_longest_token(seed: int) -> None:
    """With lookahead 0 nothing is undecided, and the probabilities add up to 1: both vocabularies have the same letters."""
    model = RandomTeacher(10, seed=seed)
    scorer = scorer_of(model, tolerance=0, covers=10_000, lookahead=0)
    rows = answers(6, 5, seed=seed)
    probs, undecided = scorer.next_tokens(*masked(rows))
    want = torch.tensor([each for row in rows for each in by_enumeration(scorer, model, row)], dtype=torch.float64)
    assert_near(probs, want, **EXACT)
    assert_near(probs.sum(1), torch.ones(len(probs)).double(), **EXACT)
    assert float(undecided.abs().max()) == 0


@pytest.mark.parametrize(("lookahead", "tolerance"), [(0.01, 0), (0.2, 0), (1.0, 0), (0, 0.3), (1.0, 0.3)])
def test_the_undecided_probability_bounds_the_error(lookahead: float, tolerance: float) -> None:
    model, rows = RandomTeacher(10, seed=5), answers(8, 5, seed=4)
    scorer = scorer_of(model, tolerance=tolerance, covers=10_000, lookahead=lookahead)
    probs, undecided = scorer.next_tokens(*masked(rows))
    want = torch.tensor([each for row in rows for each in by_enumeration(scorer, model, row)], dtype=torch.float64)
    assert bool(((probs - want).abs() <= undecided[:, None] + 1e-9).all())
    assert float((probs - want).abs().max()) > 1e-3
    assert_near(probs.sum(1), torch.ones(len(probs)).double(), **EXACT)


def test_one_tokenizer_without_overlaps_gives_its_own_distribution() -> None:
    """No token that the teacher uses begins with another one, so the longest token is the only one."""
    vocabulary = ("b", "a", "c", "ca", "cb")
    model = RandomTeacher(6, seed=2, allowed=lambda _: {0, 1, 3, 4, 5})
    row = [0, 3, 1, 4, 5]
    probs, undecided = scorer_of(model, vocabulary, vocabulary).next_tokens(*masked([row]))
    want = [model.next_probs([*PROMPT, *row[:n]]) for n in range(len(row))]
    assert_near(probs, torch.tensor(want, dtype=torch.float64), **EXACT)
    assert float(undecided.max()) == 0


def test_top_k_is_the_head_of_the_distribution() -> None:
    model, rows = RandomTeacher(10, seed=1), answers(3, 6, seed=2)
    scorer = scorer_of(model)
    probs = scorer.next_tokens(*masked(rows))[0]
    scores = scorer.evaluate(*masked(rows), top_k=3)
    at = torch.tensor([x for row in masked(rows)[1] for x in row])
    assert scores.top_indices is not None
    assert scores.top_log_probs is not None
    assert scores.tail_log_prob is not None
    ids, top, rest = (x.values[at] for x in (scores.top_indices, scores.top_log_probs, scores.tail_log_prob))
    want, order = probs.sort(-1, descending=True)
    assert torch.equal(ids[want[:, 2] > 0], order[:, :3][want[:, 2] > 0])  # ids without probability are arbitrary
    assert_near(top.exp(), want[:, :3], **EXACT)
    assert_near(rest.exp(), want[:, 3:].sum(-1), **EXACT)
    assert_near(scores.log_prob.values, scorer.score(*masked(rows)).values, **EXACT)


@pytest.mark.parametrize("rare", [0, 8])
def test_covers_that_end_at_a_boundary_are_continued_by_hand(rare: float) -> None:
    """The student writes ``b c``, and the teacher ``bc``. After ``b`` stand ``b``, which is likelier, and ``bc``.

    The share of ``b`` among them decides, however rare all of them are.
    """
    model = RandomTeacher(10, seed=1)
    with torch.no_grad():
        model.table[:, 1] += 4  # b
        model.table[:, [1, 3, 5, 6]] -= rare
    scorer = scorer_of(model)
    probs, error = scorer.next_tokens(*masked([[1, 2]]))
    start = list(scorer.model.prompt(PROMPT))
    p, after = model.next_probs(start), model.next_probs([*start, 1])
    whole = p[1] + p[3] + p[5] + p[6]  # b, bc, ba, bca
    assert p[1] > whole / 2
    # ba goes on with a, and after b come a or aa. They begin a, ab and abc of the student.
    want = (p[1] * (after[0] + after[4]) + p[5]) / whole
    assert_near(float(probs[1, 0] + probs[1, 3] + probs[1, 5]), want, terms=64, size=1.0)
    exact = by_enumeration(scorer, model, [1, 2])[1]
    assert bool(((probs[1] - torch.tensor(exact)).abs() <= error[1]).all())


@pytest.mark.parametrize("ends", ["pad", "byte"])
def test_of_tokens_with_one_text_the_tokenizers_own_is_taken(ends: str) -> None:
    """The teacher's end is the student's pad by name and its EOS by role. ``<0x61>`` and ``a`` are both a."""
    if ends == "pad":
        student, teacher = small_tokenizer("a", "b", eos="<pad>"), small_tokenizer("a", "b", eos="<pad>")
        student.add_special_tokens({"eos_token": "<end>"})
        made = ByteTeacher(RandomTeacher(3), teacher, student)
        assert made.student.texts[2] == made.student.texts[3]
        assert made.tables.ids[made.student.texts[3]] == student.eos_token_id == 3
    else:
        backend = Tokenizer(models.BPE({"<0x61>": 0, "<0x62>": 1, "a": 2, "b": 3}, [], byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
        student = PreTrainedTokenizerFast(tokenizer_object=backend)
        made = ByteTeacher(RandomTeacher(3), small_tokenizer("a", "b"), student)
        assert made.tables.ids == {"a": 2, "b": 3}
        assert made.tables.common.T.tolist() == [[2, 0], [3, 1]]


def test_heads_that_are_smaller_than_their_tokenizers() -> None:
    """The teacher's head lacks its end token, and the student's head its last tokens: they have no probability."""
    rows = [[0, 1, 2, 0]]
    for method in ("bytes", "gold", "projected"):
        scorer = scorer_of(RandomTeacher(9), method=method)
        options = ScoreOptions(grad=True, direction="forward")
        request = ScoreRequest.of(masked(rows)[0], torch.tensor(masked(rows)[1][0]))
        scores = scorer.compare(LogProbScorer(tiny_model(vocab_size=6)), request, options)
        assert scores.kl is not None
        assert bool(torch.isfinite(scores.kl.values).all())
    probs = scorer_of(RandomTeacher(9)).next_tokens(*masked(rows))[0]
    assert float(probs[:, 7].max()) == 0


def test_scores_in_several_threads() -> None:
    """They share the teacher's cache, which is cleared while the model is locked."""
    scorer = ByteTeacher(tiny_model(vocab_size=10), small_tokenizer(*TEACHER), small_tokenizer(*STUDENT)).make_scorer()
    rows = [masked(answers(2, 12, seed=seed)) for seed in range(4)]
    want = [scorer.score(*each).values for each in rows]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda each: [scorer.score(*each).values for _ in range(4)], rows))
    assert all(torch.equal(values, one) for one, several in zip(want, got, strict=True) for values in several)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda scorer: scorer.score([[0, -1]]), "token id -1 at .* is outside the vocabulary"),
        (lambda scorer: scorer.evaluate([[0, 1]], top_k=9), "top_k must be at least 0 and at most 8, got 9"),
        (lambda scorer: scorer_of(RandomTeacher(10), prompt="tempalte"), "prompt is 'tempalte': expected 'template'"),
        (
            lambda scorer: scorer_of(RandomTeacher(10), specials={7: 99}),
            r"the ids \[99\], which the teacher's tokenizer",
        ),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(scorer_of(RandomTeacher(10)))


# ------------------------------------------------------------------ divergences


def plain_log_probs(model: Any, rows: list[list[int]]) -> Tensor:
    """Log-probs of all tokens at each token of the answers, from plain forwards in float64."""
    outs = [model(input_ids=torch.tensor([PROMPT + row]))[0][0].double().log_softmax(-1) for row in rows]
    return torch.cat([out[len(PROMPT) - 1 : -1] for out in outs])


def compared(method: Method, beta: float, rows: list[list[int]]) -> tuple[Any, ByteScorer, Any, list[Tensor]]:
    """A student, the scorer of its teacher, the divergence at the tokens of the answers, and its gradient."""
    student = tiny_model(vocab_size=9).double()
    scorer = scorer_of(RandomTeacher(10, seed=3), method=method)
    direction: Any = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen_shannon")
    options = ScoreOptions(direction=direction, grad=True, **({} if beta in (0, 1) else {"beta": beta}))
    request = ScoreRequest.of(masked(rows)[0], torch.tensor([x for row in masked(rows)[1] for x in row]))
    scores = scorer.compare(LogProbScorer(student), request, options)
    assert scores.kl is not None
    values = scores.kl.values[request.mask]
    weights = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)
    gradient = torch.autograd.grad((weights * values).sum(), [*student.parameters()])
    return student, scorer, values, [*gradient]


def check_gradient(student: Any, want: Tensor, gradient: list[Tensor]) -> None:
    weights = torch.linspace(0.5, 1.5, len(want), dtype=torch.float64)
    expected = torch.autograd.grad((weights * want).sum(), [*student.parameters()])
    for got, plain in zip(gradient, expected, strict=True):
        assert_near(got, plain, terms=8192, size=max(1.0, float(plain.abs().max())))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_over_the_students_vocabulary(beta: float) -> None:
    rows = answers(4, 5, seed=7)
    student, scorer, values, gradient = compared("bytes", beta, rows)
    teacher = scorer.next_tokens(*masked(rows))[0]
    log_q, p = plain_log_probs(student, rows), torch.nn.functional.pad(teacher, (0, 1)).clamp(min=1e-12)
    q, m = log_q.exp(), beta * p + (1 - beta) * log_q.exp()
    kl_p, kl_q = (p * (p.log() - m.log())).sum(-1), (q * (log_q - m.log())).sum(-1)
    ends = {0.0: (p * (p.log() - log_q)).sum(-1), 1.0: (q * (log_q - p.log())).sum(-1)}
    want = ends.get(beta, beta * kl_p + (1 - beta) * kl_q)
    assert_near(values, want, terms=8192, size=30.0)
    check_gradient(student, want, gradient)


def chunks_of(
    scorer: ByteScorer, rows: list[list[int]]
) -> list[tuple[int, list[int], list[int], list[int], list[int]]]:
    """By hand, from cumulative lengths: the row, the student's places and tokens, the teacher's places and tokens."""
    student, teacher, out = scorer.model.student, scorer.model.bytes, []
    for number, row in enumerate(rows):
        own = teacher.encode(student.text(row))
        ends = [
            [len(each.text(ids[: n + 1])) for n in range(len(ids))] for each, ids in ((student, row), (teacher, own))
        ]
        a = c = 0
        for end in sorted({*ends[0]} & {*ends[1]}):
            b, d = ends[0].index(end) + 1, ends[1].index(end) + 1
            out.append((number, [*range(a, b)], row[a:b], [*range(c, d)], own[c:d]))
            a, c = b, d
    return out


def at_chunks(student: Any, scorer: ByteScorer, rows: list[list[int]]) -> Iterator[tuple[int, Any, Any, Any, Any]]:
    """For each chunk: the index of its first token, and log-probs of all tokens and the tokens of both models."""
    teacher = scorer.model
    prefix = teacher.prompt(PROMPT)
    own = [teacher.bytes.encode(teacher.student.text(row)) for row in rows]
    theirs = [teacher.teacher(torch.tensor([[*prefix, *ids]]))[0][0].log_softmax(-1)[len(prefix) - 1 :] for ids in own]
    log_q, first = plain_log_probs(student, rows), torch.tensor([0, *map(len, rows)]).cumsum(0)
    for number, places, tokens, other, own_tokens in chunks_of(scorer, rows):
        begin = int(first[number]) + places[0]
        yield begin, log_q[begin : begin + len(places)], tokens, theirs[number][other].detach(), own_tokens


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gold_by_hand(beta: float) -> None:
    """Common tokens are a, b, c, ca, bca and the end. The student's others are ab, abc, and a row without a token."""
    rows = answers(4, 5, seed=8)
    student, scorer, values, gradient = compared("gold", beta, rows)
    common = torch.tensor([[0, 1, 2, 4, 6, 7], [0, 1, 2, 7, 6, 9]])
    want = torch.zeros(len(values), dtype=torch.float64)
    lengths = set()
    for at, log_q, tokens, log_p, own in at_chunks(student, scorer, rows):
        q = log_q[-1].exp() * log_q[range(len(tokens) - 1), tokens[:-1]].exp().prod()
        p = log_p[-1].exp() * log_p[range(len(own) - 1), own[:-1]].exp().prod()
        a, b = q[common[0]].clamp(min=1e-8), p[common[1]].clamp(min=1e-8)
        m = beta * b + (1 - beta) * a
        jsd = beta * (b * (b / m).log()).sum() + (1 - beta) * (a * (a / m).log()).sum()
        matched = {0.0: (b * (b / a).log()).sum(), 1.0: (a * (a / b).log()).sum()}.get(beta, jsd)
        others = q[[3, 5, 8]].sort(descending=True).values, p[[3, 4, 5, 8]].sort(descending=True).values
        unmatched = (torch.cat([others[0], torch.zeros(1).double()]) - others[1]).abs().sum()
        want = want.index_put((torch.tensor(at),), 0.6 * matched + 0.4 * unmatched)
        lengths.add((len(tokens), len(own)))
    assert {1} < {n for n, _ in lengths}
    assert max(n for _, n in lengths) > 1
    assert_near(values, want, terms=8192, size=1.0)
    check_gradient(student, want, gradient)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_projected_kl_by_hand(beta: float) -> None:
    """``ab`` is spelled ``a b`` by the teacher, and ``abc`` is ``a bc``: weights 1 / 1.1 and 0.1 / 1.1."""
    rows = answers(4, 5, seed=9)
    student, scorer, values, gradient = compared("projected", beta, rows)
    assert scorer.model.bytes.encode("abc") == [0, 3]
    weights = torch.zeros(9, 10, dtype=torch.float64)
    for own, spelled in ((0, [0]), (1, [1]), (2, [2]), (3, [0, 1]), (4, [7]), (5, [0, 3]), (6, [6]), (7, [9])):
        for i, token in enumerate(spelled):
            weights[own, token] = 0.1**i / sum(0.1**j for j in range(len(spelled)))
    want = torch.zeros(len(values), dtype=torch.float64)
    for at, log_q, _, log_p, _ in at_chunks(student, scorer, rows):
        projected, p = log_q.exp().mean(0) @ weights, log_p.mean(0)
        q = (projected / (projected.sum() + 1e-10) + 1e-10).log()
        value = (p.exp() * (p - q)).sum() if beta == 0 else (q.exp() * (q - p)).sum()
        want = want.index_put((torch.tensor(at),), value)
    # The weights are float32.
    assert_near(values, want, terms=8192, size=30.0, dtype=torch.float32)
    assert float(values.detach().abs().max()) > 0.1
    assert all(torch.isfinite(each).all() for each in gradient)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("projected", {}, "'projected' is a KL: pass beta=0"),
        ("gold", {"top_k": 3}, "method='gold' compares whole distributions"),
    ],
)
def test_settings_that_a_method_lacks(method: Method, settings: Any, message: str) -> None:
    teacher = scorer_of(RandomTeacher(10), method=method).model
    gkd = make_algorithm("gkd", tiny_model(vocab_size=9), reference=teacher, **settings)
    with pytest.raises(ValueError, match=message):
        gkd.loss(gkd.prepare(answers_as_data(masked(answers(2, 4))[0])))
    with pytest.raises(ValueError, match="method is 'uld': expected one of 'bytes', 'gold', 'projected'"):
        scorer_of(RandomTeacher(10), method="uld")


def test_an_exact_kl_as_a_term() -> None:
    """The reverse KL to the teacher's distribution. A sampler that drops tokens is refused."""
    student, scorer, rows = tiny_model(vocab_size=8).double(), scorer_of(RandomTeacher(10)), answers(3, 4, seed=3)
    p = scorer.next_tokens(*masked(rows))[0].clamp(min=1e-12)
    log_q = plain_log_probs(student, rows)
    data = answers_as_data(masked(rows)[0])
    loss = PolicyLoss(student, "sft", terms=[KLToReference(1.0, "exact")], reference=scorer.model)
    assert_near(
        loss(data)["loss_kl_to_ref"].detach(), (log_q.exp() * (log_q - p.log())).sum(-1).mean(), terms=8192, size=30.0
    )
    options = ScoreOptions(Sampling(top_k=5))
    loss = PolicyLoss(student, "sft", terms=[KLToReference(1.0, "exact")], reference=scorer.model, options=options)
    with pytest.raises(ValueError, match="needs all tokens: leave out top_k, top_p"):
        loss(data)


@pytest.mark.parametrize("method", ["bytes", "gold", "projected"])
def test_a_batch_without_scored_tokens(method: Method) -> None:
    scorer = scorer_of(RandomTeacher(10), method=method)
    nothing = ScoreRequest.of([[1, 0, 2]], torch.zeros(3, dtype=torch.bool))
    options = ScoreOptions(grad=True, direction="forward")
    scores = scorer.compare(LogProbScorer(tiny_model(vocab_size=9)), nothing, options)
    assert scores.kl is not None
    assert scores.kl.values.tolist() == [0, 0, 0]
    if method == "bytes":
        top = scorer.evaluate(nothing, top_k=2).top_indices
        assert top is not None
        assert top.values.shape == (3, 2)


@pytest.mark.parametrize("top_k", [0, 8])
def test_gkd_with_another_tokenizer_learns_the_teachers_distribution(top_k: int) -> None:
    """A student with a table of logits for each last token learns the distribution of a teacher without memory."""
    table = torch.randn(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    class Memoryless(nn.Module):
        def __init__(self, logits: Tensor, *, trained: bool) -> None:
            super().__init__()
            self.logits = nn.Parameter(logits.clone(), requires_grad=trained)

        def forward(self, input_ids: Tensor) -> tuple[Tensor]:
            return (self.logits.expand(*input_ids.shape, -1),)

    student, model = Memoryless(torch.zeros(8).double(), trained=True), Memoryless(table, trained=False)
    teacher = ByteTeacher(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), lookahead=0, tolerance=0)
    gkd = make_algorithm("gkd", student, reference=teacher, top_k=top_k, objective_args={"beta": 0.0})
    # The first token of an answer has the same distribution in all rows.
    data = answers_as_data([[*PROMPT, token] for token in range(7)])
    optimizer = torch.optim.Adam(student.parameters(), lr=0.2)
    for _ in range(150):
        loss = gkd.loss(gkd.prepare(data.clone())).total_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    want = teacher.make_scorer().next_tokens([[*PROMPT, 0]], [[False, False, True]])[0][0]
    assert float((student.logits.softmax(-1) - want).abs().max()) < 0.005
    assert float((want - 1 / 8).abs().max()) > 0.1
