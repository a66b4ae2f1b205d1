"""Inputs of a scorer: every form of token ids and masks, settings, TorchRL's wrappers, and bad input."""

import copy
import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near
from scoring_reference import FakeBackend, engine, plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl import LogProbScorer, PolicyLoss, make_algorithm
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.ragged._ragged import Rows
from torchrl_llm_kl.scoring import RememberedModel, Sampling, ScoreOptions, ScoreRequest, placeholders
from torchrl_llm_kl.scoring._fields import ExpertIds, KeptIds, TokenIntegers, WeightVersions
from torchrl_llm_kl.scoring._images import ImageField, RowImages
from torchrl_llm_kl.scoring._options import SHARED
from torchrl_llm_kl.scoring._request import FIELDS
from torchrl_llm_kl.transforms import ExactKL, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD, tiny_model
from toy_tokenizer import build_tokenizer

ROWS = [[3, 5, 7, 9], [], [5], [3, 5, 8]]
TOKENS = Ragged.from_list([torch.tensor(row, dtype=torch.long) for row in ROWS])
PAD = 5  # also a token
LEFT = torch.tensor([[3, 5, 7, 9], [PAD] * 4, [PAD, PAD, PAD, 5], [PAD, 3, 5, 8]])
LEFT_REAL = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1]])
RIGHT = torch.tensor([[3, 5, 7, 9], [PAD] * 4, [5, PAD, PAD, PAD], [3, 5, 8, PAD]])
RIGHT_REAL = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=16)


@pytest.fixture(scope="module")
def scorer(model):
    return LogProbScorer(model)


@pytest.fixture(scope="module")
def want(model):
    return plain_log_probs(model, TOKENS).detach()


FORMS = {
    "lists": (ROWS, None),
    "tuples": (tuple(map(tuple, ROWS)), None),
    "tensors": ([torch.tensor(row, dtype=torch.int32) for row in ROWS], None),
    "left": (LEFT, LEFT_REAL),
    "right": (RIGHT, RIGHT_REAL.bool()),
    "batch dimensions": (LEFT.reshape(2, 2, 4), LEFT_REAL.reshape(2, 2, 4).float()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(scorer, want, form):
    ids, attention = FORMS[form]
    got = scorer.score(ids, attention_mask=attention)
    assert_near(got.values, want, **FORWARD)
    assert got.lengths.tolist() == [4, 0, 1, 3]
    restored = got.restore()
    if attention is None:
        assert [row.shape for row in restored] == [torch.Size([len(row)]) for row in ROWS]
    else:
        assert restored.shape == ids.shape
        assert not restored[~attention.bool()].any()
        assert_near(restored[attention.bool()], want, **FORWARD)


# Tokens 2 and 3 of the first row, 1 of the last.
MASK_ROWS = [[False, False, True, True], [], [False], [False, True, False]]
FLAT = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
LEFT_MASK = torch.zeros(4, 4, dtype=torch.bool).masked_scatter(LEFT_REAL > 0, FLAT)


@pytest.mark.parametrize(
    ("ids", "attention", "mask"),
    [
        (ROWS, None, MASK_ROWS),
        (ROWS, None, FLAT),
        (LEFT, LEFT_REAL, LEFT_MASK),
        (LEFT, LEFT_REAL, FLAT),
        (LEFT, LEFT_REAL, [torch.tensor(row, dtype=torch.bool) for row in MASK_ROWS]),
        (TOKENS, None, MASK_ROWS),
        (TOKENS, None, TOKENS.like(FLAT)),
        (LEFT, LEFT_REAL, TOKENS.like(FLAT)),
    ],
)
def test_every_form_of_the_mask(scorer, want, ids, attention, mask):
    got = scorer.evaluate(ids, mask, attention_mask=attention, entropy=True)
    assert_near(got.log_prob.values, torch.where(FLAT, want, 0), **FORWARD)
    assert ((got.entropy.values > 0) == FLAT).all()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_mask(scorer, want, layout):
    """A nested mask works with every form of token ids."""
    some = [0, 2, 3]
    rows, marks = ([torch.tensor(x[i]) for i in some] for x in (ROWS, MASK_ROWS))
    mask = torch.nested.as_nested_tensor(marks, layout=layout)
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    got = [scorer.score(ids, mask) for ids in (rows, Ragged.from_list(rows), nested)]
    got.append(scorer.score(LEFT[some], mask, attention_mask=LEFT_REAL[some]))
    for each in got:
        assert_near(each.values, torch.where(FLAT, want, 0), **FORWARD)
    assert got[2].restore().is_nested


FIVE, NONE = random_sequences(3, 0, 2), torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize(
    ("ids", "mask", "attention", "error", "message"),
    [
        (LEFT, None, None, ValueError, r"token ids \(4, 4\) may be padded: pass attention_mask="),
        (LEFT, None, LEFT_REAL * 2, ValueError, "must hold 1 at tokens and 0 at padding"),
        (ROWS, None, LEFT_REAL, ValueError, "attention_mask= belongs to a padded tensor"),
        (LEFT, LEFT_MASK | (LEFT_REAL == 0), LEFT_REAL, ValueError, "the mask selects padding"),
        (LEFT, LEFT_MASK.long(), LEFT_REAL, TypeError, r"boolean, got torch.int64: pass mask.bool\(\)\."),
        (FIVE, FLAT[None, :5], None, ValueError, r"the mask has shape \(1, 5\), expected \(5,\)"),
        (FIVE, torch.arange(5) == 3, None, ValueError, "first token of sequence 2, which has no prefix"),
        (ROWS, MASK_ROWS[1:], None, ValueError, r"rows of \[0, 1, 3\] tokens: expected \[4, 0, 1, 3\]"),
        *(
            (Ragged.from_list([values]), None, None, ValueError, "token ids must be flat integers")
            for values in (torch.rand(4), torch.ones(4).bool(), torch.ones(4, 2).long())
        ),
        (Ragged(NONE, NONE, Rows([], torch.Size([0]))), None, None, ValueError, "one sequence, got a batch of 0"),
        ("text", None, None, TypeError, "expected a Ragged, token id lists, .* got str"),
        ([[3], [5, 7, 97]], None, None, ValueError, "id 97 at sequence 1, position 2 is outside the vocabulary of 97"),
        ([[3], [5, 7, -100]], None, None, ValueError, "id -100 at sequence 1, position 2"),
    ],
)
def test_bad_input(scorer, ids, mask, attention, error, message):
    with pytest.raises(error, match=message):
        scorer.score(ids, mask, attention_mask=attention)


# ------------------------------------------------------------------ settings
NAME = "Qwen/Qwen2-0.5B"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (LogProbScorer, "model must be a model,"),
        (PolicyLoss, "actor must be a model,"),
        (lambda name: make_algorithm("grpo", name), "actor must be a model,"),
        (lambda x: make_algorithm("grpo", tiny_model(), reference=x), "reference must be a model or 'base' or 'data',"),
        (RetrieveLogProb, "model must be a model or 'from_collector',"),
        (lambda name: RetrieveLogProb(tiny_model(), extras=[ExactKL(name)]), "reference must be a model,"),
        (lambda name: RetrieveKL(tiny_model(), name), "ref_model must be a model or 'base',"),
        (KLRewardTransform, "ref_model must be a model,"),
    ],
)
def test_the_name_of_a_model(make, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError)) as error:
        make(NAME)
    message = str(error.value)
    assert message.startswith(expected)
    assert message.endswith(f"load it first, AutoModelForCausalLM.from_pretrained('{NAME}').")
    if make is LogProbScorer:
        for model in (None, lambda ids: ids):
            found = type(model).__name__
            with pytest.raises(TypeError, match=f"or a module that returns logits, got {found}"):
                LogProbScorer(model)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("temperature", -1.0, ValueError, "temperature must be a finite number .*, got -1.0"),
        ("sampling", 0.7, TypeError, "sampling must be a Sampling"),
        ("tokens_per_batch", 0, ValueError, "tokens_per_batch must be at least 1, got 0"),
        ("dtype", torch.int8, ValueError, "dtype must be one of torch.bfloat16, .*torch.float64, got torch.int8"),
        ("adapters", 3, TypeError, "adapters must be True, False or a name, got 3"),
        ("adapters", False, ValueError, "has no PEFT adapters to switch off"),
        ("beta", 1.0, ValueError, "beta must be greater than 0 and less than 1, got 1.0"),
    ],
)
def test_settings_are_checked_at_once_and_when_set_later(name, value, error, message):
    model, rows = tiny_model(), random_sequences(5, 3)
    with pytest.raises(error, match=message):
        LogProbScorer(model, **{name: value})
    if name == "tokens_per_batch":
        return
    scorer = LogProbScorer(model)
    before, values = scorer.options, scorer.score(rows).values
    with pytest.raises(error, match=message):
        scorer.options = scorer.options.but(**{name: value})
    assert scorer.options == before
    assert torch.equal(scorer.score(rows).values, values)


def test_settings_set_later_are_followed_and_others_fixed():
    rows = random_sequences(9, 6)
    changes = {"dtype": torch.bfloat16, "sampling": Sampling(0.5), "tokens_per_batch": 4, "share_prefixes": False}
    for name, value in changes.items():
        scorer, built = LogProbScorer(tiny_model()), LogProbScorer(tiny_model(), **{name: value})
        if name in ScoreOptions.__annotations__:
            scorer.options = scorer.options.but(**{name: value})
        else:
            setattr(scorer, name, value)
        assert torch.equal(scorer.score(rows).values, built.score(rows).values)
        assert scorer.forwards == built.forwards
    for name in ("model", "path", "temperature", "sampling", "memory", "temprature"):
        with pytest.raises(AttributeError, match=name):
            setattr(scorer, name, "full")


# ------------------------------------------------------------------ tokens
@pytest.mark.parametrize(("token", "share_prefixes"), [(0, True), (7, False)])
def test_a_token_that_stands_for_an_image_is_refused(token, share_prefixes, tmp_path):
    model, rows = tiny_model(), [[3, 4, 5], [8, token, 9]]
    model.config.image_token_id = None
    scorer = LogProbScorer(model, share_prefixes=share_prefixes)
    scorer.score(rows)  # text, as far as the configuration tells
    model.config.video_token_id = token
    remembered = RememberedModel(model, tmp_path).make_scorer()
    message = f"^token id {token} at sequence 1, position 1 is the model's video_token_id: it"
    for ask in (scorer.score, lambda rows: scorer.score(rows, grad=True), remembered.score):
        with pytest.raises(ValueError, match=message):
            ask(rows)
    assert scorer.score([[3, 4, 5], [8, 2, 9]]).values.isfinite().all()


IMAGE, VIDEO, AUDIO = "image_token_id", "video_token_id", "audio_token_id"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: transformers.Qwen2VLConfig(), {151655: IMAGE, 151656: VIDEO}),
        (lambda: transformers.LlavaConfig(image_token_index=0), {0: IMAGE}),
        (lambda: transformers.VoxtralConfig(audio_token_id=24), {24: AUDIO}),
        (lambda: transformers.Qwen2Config(), {}),
        (lambda: SimpleNamespace(image_token_id=[5, 6], text=3), {5: IMAGE, 6: IMAGE}),
    ],
)
def test_placeholders_of_each_family(make, expected):
    assert placeholders(SimpleNamespace(config=make())) == expected


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt"])
def test_longer_than_the_models_positions(family):
    scorer = LogProbScorer(tiny_model(family, max_position_embeddings=16))
    assert scorer.score(random_sequences(16, 3)).values.isfinite().all()
    with pytest.raises(ValueError, match=r"sequence 1 has 17 tokens, the model allows 16: truncate"):
        scorer.score(random_sequences(3, 17))
    mask = torch.arange(43) == 42  # a long sequence that is not scored
    assert scorer.score(random_sequences(40, 3), mask).values[42] < 0


# ------------------------------------------------------------------ wrappers of TorchRL
SETTINGS = {"tokenizer_kwargs": {"padding": True, "padding_side": "left"}}


@pytest.fixture
def module():
    return tiny_model()


@pytest.fixture
def backend(module):
    return engine(module)


@pytest.fixture
def remote(backend):
    return LogProbScorer(FakeBackend(backend, **SETTINGS))


@pytest.mark.parametrize(("generate", "input_mode"), [(True, "history"), (False, "tokens")])
def test_transformers_wrapper_is_scored_through_its_weights(module, generate, input_mode):
    wrapper = TransformersWrapper(module, tokenizer=build_tokenizer(), generate=generate, input_mode=input_mode)
    scorer, sequences = LogProbScorer(wrapper, temperature=0.7), random_sequences(9, 1, 4)
    assert (scorer.path, scorer.model) == ("head", module)
    want = plain_log_probs(module, sequences, temperature=0.7).detach()
    assert_near(scorer.score(sequences).values, want, **FORWARD)


@pytest.mark.parametrize(
    ("tokens_per_batch", "key"), [(1, "log_probs"), (20, ("nested", "log_probs")), (8192, "log_probs")]
)
def test_another_backend_is_scored_through_its_own_forward(module, backend, tokens_per_batch, key):
    wrapper = FakeBackend(backend, log_probs_key=key, **SETTINGS)
    scorer = LogProbScorer(wrapper, tokens_per_batch=tokens_per_batch)
    assert (scorer.path, scorer.model) == ("wrapper", wrapper)
    sequences = random_sequences(12, 1, 0, 7, 9)
    mask = random_mask(sequences, keep=0.3)
    mask[12 + 1 : 12 + 1 + 7] = False  # nothing of sequence 3: not forwarded
    got = scorer.score(sequences, mask).values
    assert (got.dtype, got.requires_grad) == (torch.float32, False)
    assert_near(got, plain_log_probs(module, sequences, mask).detach(), **FORWARD)
    assert sum(map(len, backend.requests)) == 2


def test_defect_09_the_wrapper_is_never_mutated(backend):
    wrapper = FakeBackend(backend, **copy.deepcopy(SETTINGS))
    own = FakeBackend.DEFAULTS
    before = {name: copy.deepcopy(value) if name in own else value for name, value in vars(wrapper).items()}
    LogProbScorer(wrapper).score(random_sequences(6, 3))
    assert vars(wrapper) == before


def test_defect_34_tokens_equal_to_the_backends_padding_are_scored(module, remote):
    sequences = Ragged.from_list([torch.tensor([3, 5, 7, 5]), torch.tensor([5, 5])])
    assert_near(remote.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


OF_A_MODEL = {"temperature": 0.7, "sampling": Sampling(top_p=0.9), "adapters": "other", "deterministic": True}


@pytest.mark.parametrize(("name", "value"), [*OF_A_MODEL.items(), ("dtype", torch.bfloat16)])
def test_a_setting_that_a_backend_cannot_follow(module, backend, remote, name, value):
    sequences, shown = random_sequences(6), re.escape(f"{name}={value}")
    for ask in (
        lambda: LogProbScorer(FakeBackend(backend, **SETTINGS), **{name: value}),
        lambda: setattr(remote, "options", remote.options.but(**{name: value})),
        lambda: remote.score(sequences, **{name: value}),
    ):
        with pytest.raises(ValueError, match=f"{shown} is not supported by FakeBackend.*score the transformers model"):
            ask()
    assert_near(remote.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


def test_gradients_flow_if_the_backend_keeps_a_graph(module, backend, remote):
    remote.score(random_sequences(6), grad=True).values.sum().backward()
    assert module.lm_head.weight.grad.abs().sum() > 0
    backend.score = lambda ids: -torch.ones(len(ids))
    with pytest.raises(ValueError, match="grad=True, but FakeBackend returns log-probs without a graph"):
        remote.score(random_sequences(6), grad=True)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda n: torch.zeros(n - (n == 4)), r"log-probs of \[6, 3\] tokens for sequences of \[6, 4\]"),
        (lambda n: torch.full((n,), -torch.inf), "log-prob is -inf at sequence 2, position 3"),
    ],
)
def test_a_backend_that_returns_other_lengths_or_no_numbers(backend, remote, score, message):
    backend.score = lambda ids: score(len(ids))
    mask = None if "tokens" in message else torch.arange(11) == 10
    with pytest.raises(ValueError, match=message):
        remote.score(random_sequences(6, 1, 4), mask)


def test_a_remote_wrapper_is_used_as_it_is(module, backend):
    """A new version of a remote wrapper would transfer the weights, so none is made."""

    class Remote:
        def __init__(self, local):
            self._remote_wrapper = local

        def get_new_version(self, **kwargs):
            raise AssertionError("the weights would travel")

        def __call__(self, tensordict):
            return self._remote_wrapper(tensordict)

    own = {"generate": False, "input_mode": "tokens", "input_key": ("tokens", "full"), "pad_output": False}
    sequences, scorer = random_sequences(6, 3), LogProbScorer(Remote(FakeBackend(backend, **own, padding_value=-1)))
    assert scorer.path == "wrapper"
    assert_near(scorer.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


# ------------------------------------------------------------------ zeros that torchrl fills in
def filled(module: nn.Module, cached: int) -> SimpleNamespace:
    """An engine with a prefix cache in blocks of ``cached`` tokens. It scores no cached tokens, so torchrl fills in 0.

    Like vLLM, it always computes a sequence's last token, which predicts no token of the sequence.
    """
    seen, backend = set(), engine(module)

    def score(ids):
        row = plain_log_probs(module, Ragged.from_list([ids])).detach()
        rows = ids.tolist()
        blocks = [tuple(rows[:end]) for end in range(cached, len(rows), cached)]
        hit = max((len(block) for block in blocks if block in seen), default=0)
        seen.update(blocks)
        return torch.where(torch.arange(len(row)) <= hit, 0.0, row) if hit else row

    backend.score = score
    return backend


@pytest.mark.parametrize("length", [9, 12, 13])
def test_zeros_of_a_cached_prefix_are_refused(length):
    """The second call finds the first blocks of 4 tokens in the cache. Its zeros must be refused."""
    sequences, end = random_sequences(length, 2), (length - 1) // 4 * 4
    scorer = LogProbScorer(FakeBackend(filled(tiny_model(), 4), **SETTINGS))
    want = plain_log_probs(tiny_model(), sequences).detach()
    assert_near(scorer.score(sequences).values, want, **FORWARD)
    message = f"FakeBackend returned log-probs of exactly 0 up to sequence 0, position {end}.*enable_prefix_caching=F"
    with pytest.raises(ValueError, match=message):
        scorer.score(sequences)
    mask = torch.arange(length + 2) == length - 1
    if end < length - 1:  # the zeros are at tokens that are not scored
        assert_near(scorer.score(sequences, mask).values, torch.where(mask, want, 0), **FORWARD)


@pytest.mark.parametrize("prompt", [2, 5])
def test_an_engine_without_scores_of_prompts(module, backend, remote, prompt):
    """Like SGLang's wrapper, the engine returns 0 for the whole prompt. A mask of only the response reads none of them."""
    sequences, mask = random_sequences(9), torch.arange(9) >= prompt
    row = plain_log_probs(module, sequences, mask).detach()
    backend.score = lambda ids: row[: len(ids)]
    with pytest.raises(ValueError, match=rf"exactly 0 up to sequence 0, position {prompt - 1}.* in its place 0, so"):
        remote.score(sequences)
    assert len(backend.requests) == 2
    assert_near(remote.score(sequences, mask).values, row, **FORWARD)
    assert len(backend.requests) == 3


class Counting(nn.Module):
    """A model in which ``n + 1`` follows ``n`` with a probability of exactly 1 in float32."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=100.0 * nn.functional.one_hot((input_ids + 1) % 10, 10))


def test_tokens_that_are_certain_have_zeros():
    """Certain tokens raise no false alarm in whole sequences, at the start, or in between."""
    module = Counting()
    backend = engine(module)
    scorer = LogProbScorer(FakeBackend(backend, **SETTINGS))
    sequences = Ragged.from_list([torch.arange(8), torch.tensor([3, 4, 5, 9, 0, 1]), torch.tensor([6, 6, 7, 8])])
    got = scorer.score(sequences)
    assert got.values.tolist() == plain_log_probs(module, sequences).tolist()
    assert got.values.tolist() == [0.0] * 11 + [-100.0, 0.0, 0.0, 0.0, -100.0, 0.0, 0.0]
    assert sum(map(len, backend.requests)) == 3 + 4  # two sequences are certain from their start
    assert scorer.score(Ragged.from_list([torch.tensor([4, 5])])).values.tolist() == [0.0, 0.0]


# ------------------------------------------------------------------ fields of a request and of the options

REQUEST = ScoreRequest.of([[3, 4, 5], [6, 7], [], [8, 9, 10, 11]], torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 1]).bool())
COUNTS = torch.tensor([0, 2, 0, 0, 1, 0, 0, 3, 1])  # of what was kept: at scored tokens alone
_PIXELS = [torch.full((1, 3, n, 4), float(n)) for n in (4, 6)]
_INTEGERS = torch.randint(5, (9, 2, 3), generator=torch.Generator().manual_seed(0))
#: A value of each kind of field.
VALUES = {
    TokenIntegers: _INTEGERS,
    ExpertIds: _INTEGERS,
    WeightVersions: torch.tensor([4, 4, 5, -1, -1, 0, 0, 7, 7]),
    KeptIds: Kept.of(torch.tensor([4, 20, 7, 21, 10, 22, 11]), COUNTS),
    ImageField: RowImages.of([{"pixel_values": x} for x in _PIXELS] + [None, {"pixel_values": _PIXELS[0]}], 4),
}


def rows(request: ScoreRequest, name: str) -> list[Any]:
    """A field as nested lists: one list for each sequence, with the value of each token."""
    value, tokens = getattr(request, name), request.tokens
    if isinstance(value, RowImages):
        return [[image.inputs["pixel_values"].tolist() for image in row] for row in value.rows]
    each = value.ids.split(value.offsets.diff().tolist()) if isinstance(value, Kept) else value
    flat = [x.tolist() for x in each]
    return [flat[a:b] for a, b in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True)]


def every(request: ScoreRequest) -> list[list[Any]]:
    masks = [x.bool() for x in request.tokens.like(request.mask.long()).to_list()]
    tensors = (request.tokens.to_list(), masks)
    return [*([row.tolist() for row in each] for each in tensors), *(rows(request, x) for x in FIELDS)]


def test_a_request_is_cut_joined_and_sent() -> None:
    request = replace(REQUEST, **{name: VALUES[type(kind)] for name, kind in FIELDS.items()})
    assert request.recorded.keys() == FIELDS.keys()
    whole = every(request)
    first, second = request.select(torch.tensor([3, 0])), request.select(torch.tensor([2, 1]))
    assert every(first) == [[part[3], part[0]] for part in whole]
    assert every(ScoreRequest.concat([first, second])) == [[part[i] for i in (3, 0, 2, 1)] for part in whole]
    for name in FIELDS:  # alone, too
        alone = replace(REQUEST, **{name: getattr(request, name)})
        for each, names in ((request, [*FIELDS]), (alone, [name])):
            found = ScoreRequest.from_arrays(each.to_arrays())
            assert found.recorded.keys() == set(names)
            assert all(rows(found, x) == rows(each, x) for x in names)


@pytest.mark.parametrize("other", [{"lengths": np.array([5, -2])}, {"mask": np.zeros(2, np.uint8)}])
def test_arrays_of_other_sizes_are_refused(other) -> None:
    """torch would write outside of its memory."""
    with pytest.raises(ValueError, match=r"3 tokens, .* mask bytes, lengths .*: expected"):
        ScoreRequest.from_arrays(ScoreRequest.of([[1, 2, 3]]).to_arrays() | other)


def test_a_request_holds_its_own_mask(scorer) -> None:
    with pytest.raises(TypeError, match="holds its own mask"):
        scorer.score(ScoreRequest.of(ROWS), MASK_ROWS)


#: A value of each option that is not its default, by name or by type.
OTHERS: dict[str, Any] = {"sampling": Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01, reference="kept")}
OTHERS["adapters"] = "old"
OTHERS |= {"dtype": torch.bfloat16, "direction": "forward", "beta": 0.25, "int": 3, "bool": True}


@pytest.mark.parametrize("name", [each.name for each in fields(ScoreOptions)])
def test_options_are_sent(name: str) -> None:
    """Options that decide the scores of given tokens are sent. The others belong to the process that scores."""
    kinds = {each.name: str(each.type) for each in fields(ScoreOptions)}
    options = ScoreOptions(**{name: OTHERS.get(name, OTHERS.get(kinds[name]))})
    assert options != ScoreOptions()
    found = ScoreOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert found == (options if name in SHARED else ScoreOptions())
    assert list(options.to_dict()) == [name] * (name in SHARED)
