"""A teacher with another tokenizer: its log-probs against sums over all sequences of its tokens, in float64."""

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from byte_texts import RandomTeacher, probability, small_tokenizer, starts_with, tokenisations
from closeness import assert_near
from torchrl_llm_kl import RetrieveKL, make_algorithm
from torchrl_llm_kl.masks import TextMismatchError
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import ByteScorer, ByteTeacher, LogProbScorer
from toy_models import FORWARD, tiny_model
from toy_tokenizer import build_bos_tokenizer, build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
STUDENT = ("a", "b", "c", "ab", "ca", "abc")
TEACHER = ("a", "b", "c", "bc", "aa", "ba", "bca", "ca", "cab")
#: Rounding of float64 sums of up to 1,000 products of 8 probabilities. Log-probs are at most 64 nats.
EXACT: dict[str, Any] = {"terms": 8192, "size": 64.0}


def scorer_of(model: Any, teacher: Any, student: Any, **settings: Any) -> ByteScorer:
    return ByteTeacher(model, teacher, student, **settings).make_scorer()


def by_enumeration(scorer: ByteScorer, model: RandomTeacher, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probs of the student's tokens, from the definition: shared boundaries by hand, sums by recursion."""
    student, teacher = scorer.model.student, scorer.model.bytes
    text = student.text(answer)
    own = teacher.encode(text)
    ends = [sum(len(teacher.texts[i]) for i in own[: n + 1]) for n in range(len(own))]
    start = list(scorer.model.prompt(prompt))
    logs = [0.0]
    for n in range(1, len(answer) + 1):
        at = len(student.text(answer[:n]))
        whole = sum(end <= at for end in ends)  # the teacher's own tokens before this boundary
        # The last boundary that both share, and the teacher's own tokens up to it.
        borders = [len(student.text(answer[:k])) for k in range(n + 1)]
        shared = max((border for border in borders if border in ends), default=0)
        before = sum(end <= shared for end in ends)
        if at in ends:
            logs.append(math.log(probability(model, start, own[:whole])))
        else:
            inside = starts_with(model, teacher.texts, [*start, *own[:before]], text[shared:at])
            logs.append(math.log(probability(model, start, own[:before])) + math.log(inside))
    return [after - before for before, after in pairwise(logs)]


def answers(count: int, length: int, *, seed: int = 0, vocab: int = len(STUDENT)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for _ in range(count)]


def score(scorer: ByteScorer, prompt: list[int], rows: list[list[int]], **options: Any) -> Any:
    mask = [[False] * len(prompt) + [True] * len(row) for row in rows]
    return scorer.bounds([prompt + row for row in rows], mask, **options)


def of_answers(values: Ragged, prompt: list[int]) -> list[list[float]]:
    return [row[len(prompt) :].tolist() for row in values.to_list()]


# ------------------------------------------------------------------ enumeration


@pytest.mark.parametrize("seed", range(4))
def test_log_probs_are_sums_over_all_sequences_of_the_teachers_tokens(seed: int) -> None:
    """Answers of random student's tokens, most of which the student's own tokenizer would not produce."""
    model, prompt = RandomTeacher(10, seed=seed), [1, 0]
    scorer = scorer_of(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), tolerance=0, covers=10_000)
    rows = answers(12, 5, seed=seed)
    scores = score(scorer, prompt, rows)
    want = [by_enumeration(scorer, model, prompt, row) for row in rows]
    assert_near(of_answers(scores.log_prob, prompt), want, **EXACT)
    assert_near(scores.lower.values, scores.log_prob.values, **EXACT)
    assert_near(scores.upper.values, scores.log_prob.values, **EXACT)
    assert bool((scores.log_prob.values <= 1e-12).all())
    # The data holds boundaries inside the teacher's tokens, and several of its tokens inside a chunk.
    chunks = [row[len(prompt) :].tolist() for row in scores.chunk.to_list()]
    assert any(max(map(row.count, row)) > 2 for row in chunks)


@pytest.mark.parametrize(("tolerance", "covers"), [(1e-3, 0), (1e-3, 1), (0.2, 64), (0, 2)])
def test_omitted_covers_are_inside_the_bounds(tolerance: float, covers: int) -> None:
    """The chunk's sum stays exact. A bound is wider than rounding somewhere, or the test would show nothing."""
    model, prompt = RandomTeacher(10, seed=5), [1, 0]
    tokenizers = small_tokenizer(*TEACHER), small_tokenizer(*STUDENT)
    scorer = scorer_of(model, *tokenizers, tolerance=tolerance, covers=covers)
    rows = answers(24, 6, seed=1)
    scores = score(scorer, prompt, rows)
    want = torch.tensor([by_enumeration(scorer, model, prompt, row) for row in rows], dtype=torch.float64)
    got, lower, upper = (
        torch.tensor(of_answers(each, prompt), dtype=torch.float64)
        for each in (scores.log_prob, scores.lower, scores.upper)
    )
    assert bool((lower <= want + 1e-12).all())
    assert bool((want <= upper + 1e-12).all())
    assert bool((got <= 1e-12).all())
    assert float((upper - lower).max()) > 1e-3
    assert float((got - want).abs().max()) > 1e-3
    number = scores.chunk.values[scores.chunk.values >= 0].reshape(len(rows), -1)
    for row, other, chunk in zip(got, want, number, strict=True):
        sums = [torch.zeros(7, dtype=torch.float64).index_add(0, chunk, each) for each in (row, other)]
        assert_near(*sums, **EXACT)


def test_prefixes_of_a_prefix_free_teacher_have_their_exact_probability() -> None:
    """No token begins with another one, so each text has one tokenisation, and boundaries are certain.

    The log-prob of a student's token is then ``log P(s + b) - log P(s)`` for whole strings.
    """
    teacher, prompt = small_tokenizer("b", "bb", "a", "ba", "c"), [0]
    model = RandomTeacher(6, allowed=lambda _: {1, 2, 3, 4, 5})  # never "b", with which others begin
    scorer = scorer_of(model, teacher, small_tokenizer(*STUDENT), tolerance=0)
    rows = [[0, 1, 0, 2, 1, 1], [3, 1, 4, 1, 1], [1, 3, 1, 0]]  # a b a c b b | ab b ca b b | b ab b a
    for row in rows:
        student, start = scorer.model.student, scorer.model.prompt(prompt)
        texts = [student.text(row[:n]) for n in range(len(row) + 1)]
        exact = [starts_with(model, scorer.model.bytes.texts, start, text) for text in texts]
        want = [math.log(after / before) for before, after in pairwise(exact)]
        assert_near(of_answers(score(scorer, prompt, [row]).log_prob, prompt), [want], **EXACT)


def test_a_teacher_of_characters_gives_a_token_the_product_of_its_characters() -> None:
    """The teacher's tokens refine the student's. Over all texts of three characters the probabilities add up to 1."""
    letters = small_tokenizer("a", "b", "c", eos=None)
    model, prompt = RandomTeacher(3), [2]
    scorer = scorer_of(model, letters, small_tokenizer(*STUDENT, eos=None))
    total = 0.0
    for text in map("".join, product("abc", repeat=3)):
        own = next(tokenisations([*STUDENT], text))
        scores = score(scorer, prompt, [list(own)])
        want = math.log(probability(model, prompt, ["abc".index(letter) for letter in text]))
        assert_near(float(scores.log_prob.values.sum()), want, **EXACT)
        total += math.exp(float(scores.log_prob.values.sum()))
    assert_near(total, 1.0, **EXACT)


def test_the_mean_log_ratio_is_the_kl_of_texts_less_the_entropy_of_tokenisations() -> None:
    """All answers of a student that ends after three letters, against a teacher of letters, which has one tokenisation.

    One letter is also the beginning of longer tokens, so over the student's vocabulary the probabilities exceed 1.
    """
    vocabulary, prompt = [*STUDENT, ""], [2]

    def allowed(prefix: tuple[int, ...]) -> set[int]:
        room = 3 - sum(len(vocabulary[i]) for i in prefix[1:])
        return {i for i in range(6) if len(vocabulary[i]) <= room} or {6}

    student, letters = RandomTeacher(7, seed=4, allowed=allowed), RandomTeacher(4)
    scorer = scorer_of(letters, small_tokenizer("a", "b", "c"), small_tokenizer(*STUDENT))
    texts = ["".join(letter) for letter in product("abc", repeat=3)]
    mean = kl = entropy = 0.0
    for text in texts:
        rows = [[*tokens, 6] for tokens in tokenisations(STUDENT, text)]
        own = [probability(student, prompt, row) for row in rows]
        teacher = probability(letters, prompt, [*("abc".index(letter) for letter in text), 3])
        for row, p in zip(rows, own, strict=True):
            mean += p * (math.log(p) - float(score(scorer, prompt, [row]).log_prob.values.sum()))
            entropy -= p * math.log(p / sum(own))
        kl += sum(own) * math.log(sum(own) / teacher)
    assert_near(mean, kl - entropy, **EXACT)
    assert entropy > 0.1
    first = [float(score(scorer, prompt, [[token]]).log_prob.values[-1].exp()) for token in range(7)]
    longer = sum(probability(letters, prompt, ["abc".index(x) for x in text]) for text in ("ab", "ca", "abc"))
    assert_near(sum(first), 1 + longer, **EXACT)


@pytest.mark.parametrize("canonical", [True, False])
def test_a_finished_text_has_its_exact_probability_if_the_teacher_has_one_tokenisation_of_it(canonical: bool) -> None:
    """The sum over an answer with its end is the probability of the string, over all of its tokenisations.

    A teacher that also uses other tokenisations gives the string more than that.
    """
    tokenizer = small_tokenizer(*TEACHER)
    texts = [*TEACHER, ""]

    def allowed(prefix: tuple[int, ...]) -> set[int]:
        """Tokens after which the tokens after the prompt are still the tokenizer's own."""
        tokens = prefix[1:]
        longer = ["".join(texts[i] for i in (*tokens, token)) for token in range(9)]
        return {9, *(token for token in range(9) if tokenizer(longer[token]).input_ids == [*tokens, token])}

    model, prompt = RandomTeacher(10, seed=2, allowed=allowed if canonical else None), [0]
    student = small_tokenizer(*STUDENT)
    scorer = scorer_of(model, tokenizer, student, tolerance=0, covers=10_000)
    for row in ([3, 2, 0, 6], [5, 4, 6], [1, 2, 0, 0, 1, 6]):  # 6 is the student's end, 9 the teacher's
        text = scorer.model.student.text(row[:-1])
        exact = sum(probability(model, prompt, [*each, 9]) for each in tokenisations(TEACHER, text))
        total = float(score(scorer, prompt, [row]).log_prob.values.sum())
        if canonical:
            assert_near(total, math.log(exact), **EXACT)
        else:
            assert total < math.log(exact) - 1e-6


# ------------------------------------------------------------------ the scorer


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_next"])
def test_one_tokenizer_gives_the_usual_log_probs(family: str) -> None:
    from toy_models import stateful_model

    vocab = 8
    make = stateful_model if family == "qwen3_next" else tiny_model
    model = make(family, vocab_size=vocab)
    tokenizer = small_tokenizer(*STUDENT)
    rows = [torch.tensor(tokenizer("abcabcaab" * 2 + "a" * i).input_ids) for i in range(3)]
    got = scorer_of(model, tokenizer, tokenizer).score(rows)
    assert_near(got.values, LogProbScorer(model).score(rows).values, **FORWARD)


def plain_log_softmax(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_a_transformer_in_packs_by_hand() -> None:
    """A boundary inside a token of a packed model: ``a`` of the teacher's ``aa``, and ``b`` of ``ba``.

    ``a`` is the start of ``a`` and ``aa``. ``ab`` is ``a`` and then ``b``, ``bc``, ``ba`` or ``bca``.
    """
    model = tiny_model(vocab_size=10).double()
    scorer = scorer_of(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT))
    prompt = [2, 2]
    rows = [[0, 0, 2], [0, 1, 0]]  # a a c = aa c, and a b a = a ba
    got = of_answers(score(scorer, prompt, rows).log_prob, prompt)
    first = plain_log_softmax(model, [2, 2, 4, 2])
    start = first[1, [0, 4]].logsumexp(0)
    assert_near(got[0], [float(x) for x in (start, first[1, 4] - start, first[2, 2])], **EXACT)
    second = plain_log_softmax(model, [2, 2, 0, 5])
    inside = second[2, [1, 3, 5, 6]].logsumexp(0)
    assert_near(got[1], [float(x) for x in (second[1, 0], inside, second[2, 5] - inside)], **EXACT)


def test_temperature_divides_the_teachers_logits() -> None:
    model, prompt, rows = RandomTeacher(10), [1, 0], answers(4, 5)
    tokenizers = small_tokenizer(*TEACHER), small_tokenizer(*STUDENT)
    got = score(scorer_of(model, *tokenizers), prompt, rows, temperature=2.0)
    with torch.no_grad():
        model.table /= 2
    assert_near(got.log_prob.values, score(scorer_of(model, *tokenizers), prompt, rows).log_prob.values, **EXACT)


def test_turns_between_answers_and_unscored_sequences() -> None:
    """Each answer follows the teacher's tokens of everything before it. A sequence without scored tokens is skipped."""
    model = RandomTeacher(10)
    student, teacher = small_tokenizer(*STUDENT), small_tokenizer(*TEACHER)
    scorer = scorer_of(model, teacher, student)
    row = [2, 0, 2, 6, 1, 2, 0, 0]  # c | a c <eos> | b c | a a
    mask = [[False, True, True, True, False, False, True, True], [False] * 3]
    got = scorer.bounds([row, [0, 1, 2]], mask)
    # The teacher's tokens: c | a c <eos> | bc | aa
    prefix = [2]
    want = [math.log(probability(model, prefix, [0])), math.log(probability(model, [2, 0], [2]))]
    want += [math.log(probability(model, [2, 0, 2], [9]))]
    prefix = [2, 0, 2, 9, 3]
    start = starts_with(model, [*TEACHER, ""], prefix, "a")
    want += [math.log(start), math.log(probability(model, prefix, [4]) / start)]
    values, other = got.log_prob.to_list()
    assert_near(values[torch.tensor(mask[0])].tolist(), want, **EXACT)
    assert other.tolist() == [0, 0, 0]
    assert got.chunk.to_list()[0].tolist() == [-1, 0, 1, 2, -1, -1, 3, 3]
    assert float(scorer.score([[0, 1, 2]], [[False] * 3]).values.abs().sum()) == 0


def test_the_prompt_of_another_template() -> None:
    model, rows = RandomTeacher(10), [[0, 2]]
    tokenizers = small_tokenizer(*TEACHER), small_tokenizer(*STUDENT)
    got = score(scorer_of(model, *tokenizers, prompt=lambda ids: [5, *ids, 5]), [1, 1], rows)
    want = [math.log(probability(model, [5, 1, 1, 5], [0])), math.log(probability(model, [5, 1, 1, 5, 0], [2]))]
    assert_near(of_answers(got.log_prob, [1, 1]), [want], **EXACT)


def test_special_tokens_by_name_by_role_and_given() -> None:
    student = build_tokenizer(None, ["<|im_start|>", "<tool>"], eos_token="<|im_end|>")
    teacher = build_bos_tokenizer()
    own = {name: teacher.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>", "<eos>", "<unk>")}
    ids = {name: student.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>", "<tool>")}
    model = RandomTeacher(len(teacher))
    byte_teacher = ByteTeacher(model, teacher, student, specials={ids["<|im_end|>"]: own["<eos>"]})
    hi = student("hi").input_ids
    letters = teacher("hi", add_special_tokens=False).input_ids
    prompt = byte_teacher.prompt([ids["<|im_start|>"], *hi])
    assert prompt == [own["<|im_start|>"], *letters]
    assert byte_teacher.start == [teacher.bos_token_id]
    scorer = byte_teacher.make_scorer()
    got = scorer.bounds([[*hi, ids["<|im_end|>"]]], [[False, True, True]])
    start = [teacher.bos_token_id, letters[0]]
    # "i" is also a token of its byte, and reaches the boundary as the teacher's own token.
    want = [math.log(probability(model, start, letters[1:])), math.log(probability(model, [*start, letters[1]], [1]))]
    assert_near(got.log_prob.to_list()[0][1:].tolist(), want, **EXACT)
    assert got.spelled == 0
    spelled = scorer.bounds([[*hi, ids["<tool>"]]], [[False, True, True]])
    name = teacher("<tool>", add_special_tokens=False).input_ids
    want = math.log(probability(model, [*start, letters[1]], name))
    assert_near(float(spelled.log_prob.values[2]), want, **EXACT)
    assert spelled.spelled == 1


def test_characters_cut_by_bytes() -> None:
    """The student's tokens are single bytes. The teacher has the whole emoji, its halves, and other tokens that share bytes."""
    byte = build_tokenizer(None, [])
    alphabet = {i: piece for piece, i in byte.get_vocab().items()}
    duck = "".join(alphabet[i] for i in byte("🦆").input_ids)
    half = duck[:2]
    teacher = build_tokenizer(None, [], merges=[(duck[0], duck[1]), (duck[2], duck[3]), (half, duck[2:])])
    model = RandomTeacher(len(teacher), seed=3)
    scorer = scorer_of(model, teacher, byte, tolerance=0, covers=1000)
    row = byte("a🦆é").input_ids
    got = scorer.bounds([row], [[False] + [True] * 6])
    texts, start = scorer.model.bytes.texts, byte("a").input_ids
    text = "🦆".encode().decode("latin-1")
    sums = [1.0, *(starts_with(model, texts, start, text[:n]) for n in (1, 2, 3))]
    whole = scorer.model.bytes.encode(text)
    sums.append(probability(model, start, whole))
    want = [math.log(after / before) for before, after in pairwise(sums)]
    assert len(whole) == 1
    assert_near(got.log_prob.values[1:5].tolist(), want, **EXACT)
    # An answer that ends in the middle of a character: the teacher has tokens of its bytes.
    cut = scorer.bounds([row[:4]], [[False, True, True, True]])
    own = [byte("🦆").input_ids[i] for i in range(3)]
    assert_near(float(cut.log_prob.values.sum()), math.log(probability(model, start, own)), **EXACT)


def test_tokens_without_bytes_have_a_log_prob_of_zero() -> None:
    """Rows of the student's head that its tokenizer has no token for, at the start, inside and at the end of a chunk."""
    model, prompt = RandomTeacher(10), [1, 0]
    scorer = scorer_of(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT))
    plain = of_answers(score(scorer, prompt, [[2, 3, 1]]).log_prob, prompt)[0]  # c | ab | b = cab | b
    scores = score(scorer, prompt, [[9, 9, 2, 9, 3, 9, 1, 9]])
    assert_near(of_answers(scores.log_prob, prompt), [[0, 0, plain[0], 0, plain[1], 0, plain[2], 0]], **EXACT)
    assert of_answers(scores.chunk, prompt) == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert of_answers(score(scorer, prompt, [[9, 9]]).log_prob, prompt) == [[0, 0]]


@pytest.mark.parametrize(("covers", "small", "continued"), [(0, False, 0), (1, False, 1), (1, True, 0), (9, True, 0)])
def test_the_beginnings_that_are_continued_by_hand(covers: int, small: bool, continued: int) -> None:
    """The student writes ``c a b`` and the teacher ``cab``. Before ``b`` stand ``ca`` and ``cab``, or ``c`` and then ``a``.

    If ``c`` is not continued, its probability is the bound. It is 47 % of the probability of ``ca`` and ``cab``, and 32 % of
    that of all three. Only the first share decides.
    """
    model, prompt = RandomTeacher(10, seed=1), [1]
    p = model.next_probs(prompt)
    first, second = p[2] + p[7] + p[8], p[7] + p[8]  # c, ca, cab
    tolerance = p[2] / second * (1.01 if small else 0.99)
    assert p[2] / first < tolerance < 1
    scorer = scorer_of(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), tolerance=tolerance, covers=covers)
    after_c = model.next_probs([*prompt, 2])
    more = p[2] * sum(after_c[i] for i, text in enumerate(TEACHER) if text.startswith("a"))
    lower, upper = second + more * continued, second + (more if continued else p[2])
    got = of_answers(score(scorer, prompt, [[2, 0, 1]]).log_prob, prompt)[0]
    assert_near(got, [math.log(x) for x in (first, lower / first, p[8] / lower)], **EXACT)
    bounds = score(scorer, prompt, [[2, 0, 1]])
    assert_near(of_answers(bounds.upper, prompt)[0][1:], [math.log(upper / first), math.log(p[8] / lower)], **EXACT)
    assert_near(of_answers(bounds.lower, prompt)[0][1:], [math.log(lower / first), math.log(p[8] / upper)], **EXACT)


def test_a_counterpart_may_be_any_token() -> None:
    """The teacher ends its turns with a token that its tokenizer does not call special."""
    model = RandomTeacher(10)
    scorer = scorer_of(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), specials={6: 3})
    want = [math.log(probability(model, [1], [0])), math.log(probability(model, [1, 0], [3]))]
    assert_near(of_answers(score(scorer, [1], [[0, 6]]).log_prob, [1]), [want], **EXACT)


def test_a_prompt_has_the_space_before_a_text_once() -> None:
    """SentencePiece puts a space before a text, at its start and after BOS, but not between two answers."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    sentencepiece = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    ids = sentencepiece("ab b", add_special_tokens=False).input_ids
    assert sentencepiece.convert_ids_to_tokens(ids) == ["▁a", "b", "▁", "b"]
    made = ByteTeacher(RandomTeacher(len(pieces)), sentencepiece, sentencepiece)
    assert made.prompt(ids) == ids
    assert made.prompt([1, *ids]) == [1, *ids]
    assert made.between([vocabulary["ab"], 2]) == [vocabulary["ab"], 2]
    letters = small_tokenizer("a", "b", "Ġ", "ab", eos="</s>")
    made = ByteTeacher(RandomTeacher(5), letters, sentencepiece)
    assert made.prompt(ids) == [3, 2, 1]
    model = RandomTeacher(len(pieces))
    row = [1, *ids, vocabulary["ab"]]
    got = scorer_of(model, sentencepiece, sentencepiece).score([row], [[False] * 5 + [True]])
    assert_near(got.values[-1], LogProbScorer(model).score([row]).values[-1], **EXACT)


def test_one_bos_before_the_teachers_prompt() -> None:
    """The student's BOS becomes the teacher's. A function for the prompt decides itself."""
    tokenizer = build_bos_tokenizer()
    model = RandomTeacher(len(tokenizer))
    ids = tokenizer("ab").input_ids
    assert ids[0] == tokenizer.bos_token_id
    mask = [[False] * (len(ids) - 1) + [True]]
    want = LogProbScorer(model).score([ids], mask).values
    for row, scored in ((ids, mask), (ids[1:], [mask[0][1:]])):
        got = scorer_of(model, tokenizer, tokenizer).score([row], scored).values
        assert_near(got[-1:], want[-1:], **EXACT)
    bare = scorer_of(model, tokenizer, tokenizer, prompt=lambda ids: ids[1:]).score([ids], mask).values
    assert_near(bare[-1:], LogProbScorer(model).score([ids[1:]], [mask[0][1:]]).values[-1:], **EXACT)


def test_a_cache_changes_nothing() -> None:
    """In an env the transforms ask for a cache. Its log-probs would hide positions inside a chunk."""
    scorer = scorer_of(tiny_model(vocab_size=10).double(), small_tokenizer(*TEACHER), small_tokenizer(*STUDENT))
    rows = [[2, 2, *answer] for answer in answers(4, 6)]
    want = scorer.score(rows)
    for _ in range(2):
        assert_near(scorer.score(rows, remember=True).values, want.values, **EXACT)


# ------------------------------------------------------------------ errors


def test_a_text_that_the_teacher_cannot_represent_is_named() -> None:
    letters = small_tokenizer("a", "b")
    scorer = scorer_of(RandomTeacher(3), letters, small_tokenizer(*STUDENT))
    with pytest.raises(TextMismatchError, match=r"byte 1 differs, 'acb' becomes 'ab'"):
        scorer.score([[0, 0, 2, 1]], [[False, True, True, True]])


def test_what_it_does_not_offer() -> None:
    teacher = ByteTeacher(RandomTeacher(10), small_tokenizer(*TEACHER), small_tokenizer(*STUDENT))
    scorer = teacher.make_scorer()
    for changes in ({"entropy": True}, {"grad": True}, {"moments": True}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* is not supported by a teacher with another"):
            scorer.evaluate([[0, 1]], **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no token before"):
        ByteTeacher(
            RandomTeacher(10), small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), prompt=lambda _: []
        ).make_scorer().score([[0, 1]])
    with pytest.raises(ValueError, match="tolerance"):
        ByteTeacher(RandomTeacher(10), small_tokenizer(*TEACHER), small_tokenizer(*STUDENT), tolerance=2)


# ------------------------------------------------------------------ wherever a reference is accepted


def batch_of(rows: list[list[int]], prompt: int, layout: str) -> TensorDict:
    if layout == "padded":
        width = max(map(len, rows))
        full = torch.tensor([row + [6] * (width - len(row)) for row in rows])
        real = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
        answer = real & (torch.arange(width) >= prompt)
        masks = TensorDict(all_attention_mask=real, all_assistant_mask=answer, batch_size=[len(rows)])
        tokens = TensorDict(full=full, batch_size=[len(rows)])
        return TensorDict(tokens=tokens, masks=masks, batch_size=[len(rows)])
    parts = []
    for row in rows:
        ids = torch.tensor(row)
        masks = TensorDict(all_assistant_mask=torch.arange(len(row)) >= prompt)
        parts.append(TensorDict(tokens=TensorDict(full=ids), masks=masks))
    return lazy_stack(parts)


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_transform_and_an_algorithm_take_it_as_a_reference(layout: str) -> None:
    """The entries are the scorer's log-probs, and the KL is that of the student's log-probs to them."""
    model, student = RandomTeacher(10), tiny_model(vocab_size=7)
    teacher = ByteTeacher(model, small_tokenizer(*TEACHER), small_tokenizer(*STUDENT))
    rows = [[1, 0, *answer] for answer in ([0, 0, 2], [3, 1], [5, 4, 1, 1])]
    mask = [[False] * 2 + [True] * (len(row) - 2) for row in rows]
    want = [row.tolist() for row in teacher.make_scorer().score(rows, mask).to_list()]
    data = batch_of(rows, 2, layout)
    written = RetrieveKL(student, teacher, add_to_reward=False)(data)
    own = LogProbScorer(student).score(rows, mask).to_list()
    for i, row in enumerate(rows):
        got = [written[i][key, "full"][: len(row)] for key in ("ref_log_probs", "log_probs")]
        assert_near(got[0].tolist(), want[i], **FORWARD, dtype=torch.float32)
        kl = written[i]["kl_penalty"][: len(row)].flatten()
        assert_near(kl.tolist(), (own[i] - torch.tensor(want[i])).tolist(), **FORWARD, dtype=torch.float32)
    distil = make_algorithm("on_policy_distill", student, reference=teacher)
    loss = distil.loss(distil.prepare(batch_of(rows, 2, layout))).total_loss
    loss.backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in student.parameters())
    with pytest.raises(ValueError, match="ByteTeacher returns log-probs only"):
        RetrieveKL(student, teacher, estimator="exact")
