"""What a scorer takes: token ids and masks of every form; and bad input, which raises an error that names its remedy."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers

from closeness import assert_near
from scoring_reference import plain_log_probs, random_sequences
from torchrl_llm_kl import KLRewardTransform, PolicyLoss, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.ragged._containers import Rows
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    ReferenceUpdater,
    RememberedModel,
    Sampling,
    fingerprint_of,
    placeholders,
    prepare_reference,
)
from torchrl_llm_kl.service.client import _remote
from toy_models import FORWARD, tiny_model

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
    with torch.no_grad():
        return plain_log_probs(model, TOKENS)


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
    if attention is None:
        assert [row.shape for row in got.restore()] == [torch.Size([len(row)]) for row in ROWS]
    else:
        restored, real = got.restore(), attention.bool()
        assert restored.shape == ids.shape
        assert not restored[~real].any()
        assert_near(restored[real], want, **FORWARD)


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
    ],
)
def test_every_form_of_the_mask(scorer, want, ids, attention, mask):
    got = scorer.evaluate(ids, mask, attention_mask=attention, entropy=True)
    assert_near(got.log_prob.values, torch.where(FLAT, want, 0), **FORWARD)
    assert ((got.entropy.values > 0) == FLAT).all()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_mask(scorer, want, layout):
    """With ids of every form."""
    some = [0, 2, 3]
    rows, marks = ([torch.tensor(x[i]) for i in some] for x in (ROWS, MASK_ROWS))
    mask = torch.nested.as_nested_tensor(marks, layout=layout)
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    got = [scorer.score(ids, mask) for ids in (rows, Ragged.from_list(rows), nested)]
    got.append(scorer.score(LEFT[some], mask, attention_mask=LEFT_REAL[some]))
    for each in got:
        assert_near(each.values, torch.where(FLAT, want, 0), **FORWARD)
    assert got[2].restore().is_nested
    with pytest.raises(ValueError, match=r"one bool for each token, rows of \[4, 1, 3\], got rows of \[4, 1\]"):
        scorer.score(rows, torch.nested.as_nested_tensor(marks[:2], layout=layout))


@pytest.mark.parametrize(
    ("ids", "mask", "attention", "error", "message"),
    [
        (LEFT, None, None, ValueError, r"token ids of shape \(4, 4\) may be padded: pass attention_mask="),
        (LEFT[0], None, LEFT_REAL[0], ValueError, r"a tensor \[\*B, T\], got shape \(4,\)"),
        (LEFT, None, LEFT_REAL[:, 1:], ValueError, r"shape \(4, 4\) of the token ids, got \(4, 3\)"),
        (LEFT, None, LEFT_REAL * 2, ValueError, "must hold 1 at tokens and 0 at padding"),
        (ROWS, None, LEFT_REAL, ValueError, "attention_mask= belongs to a padded tensor"),
        (LEFT, LEFT_MASK | (LEFT_REAL == 0), LEFT_REAL, ValueError, "the mask selects padding: sequence 1, slot 0"),
        (LEFT, LEFT_MASK.long(), LEFT_REAL, TypeError, "mask must be boolean, got torch.int64"),
        (LEFT, LEFT_MASK[:, 1:], LEFT_REAL, ValueError, r"one entry for each token, \(8,\), got \(4, 3\)"),
        (ROWS, MASK_ROWS[1:], None, ValueError, r"rows of \[4, 0, 1, 3\], got rows of \[0, 1, 3\]"),
        (ROWS, [[1, 0, 1, 1], [], [0], [0, 1, 0]], None, (TypeError, ValueError), "boolean|rows"),
        ([3, 5, 7], None, None, TypeError, "expected a list of rows of numbers, found 3 as row 0"),
        ([[3, 5], ["a"]], None, None, TypeError, r"found \['a'\] as row 1"),
        ([[3, 5], [0.5]], None, None, ValueError, r"torch.float32 at row 1"),
        ([[0.5, 2.0]], None, None, ValueError, "token ids must be a flat integer tensor .* torch.float32"),
        ([], None, None, ValueError, "at least one row"),
        ("text", None, None, TypeError, "sequences must be a Ragged, a list of token id lists, .* got str"),
        ({"input_ids": LEFT}, None, None, TypeError, "got dict"),
    ],
)
def test_bad_input(scorer, ids, mask, attention, error, message):
    with pytest.raises(error, match=message):
        scorer.score(ids, mask, attention_mask=attention)


def test_a_served_model_takes_every_form(monkeypatch):
    """Nothing is sent: the requests hold the flat tokens."""
    sent = []
    monkeypatch.setattr(_remote, "Exchange", lambda replicas, router, whole, timeout: sent.append(whole))
    remote = SimpleNamespace(router=None, version=None, replicas=None, timeout=1.0)
    scorer = _remote.RemoteScorer(remote, _remote.Settings(temperature=1.0, adapters=True, dtype=None, remember=False))
    for ids, attention in FORMS.values():
        scorer.begin(ids, attention_mask=attention)
    scorer.begin(LEFT, LEFT_MASK, attention_mask=LEFT_REAL)
    masks = [part.mask.tolist() for part in sent]
    assert masks == [[False, True, True, True, False, False, True, True]] * len(FORMS) + [FLAT.tolist()]


# ------------------------------------------------------------------ settings


NAME = "Qwen/Qwen2-0.5B"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((make, "model must be a model,") for make in (LogProbScorer, fingerprint_of, prepare_reference)),
        (lambda name: RememberedModel(name, "unused"), "model must be a model,"),
        (lambda name: ReferenceUpdater(tiny_model(), name, decay=0.9), "policy must be a model,"),
        (PolicyLoss, "actor must be a model,"),
        (lambda name: make_algorithm("grpo", name, reference=tiny_model()), "actor must be a model,"),
        (lambda name: make_algorithm("grpo", name), "actor must be a model,"),
        (lambda x: make_algorithm("grpo", tiny_model(), reference=x), "reference must be a model or 'base' or 'data',"),
        (RetrieveLogProb, "model must be a model or 'from_collector',"),
        (lambda name: RetrieveLogProb(tiny_model(), reference=name), "reference must be a model,"),
        (lambda name: RetrieveKL(name, tiny_model()), "gen_model must be a model or 'from_collector',"),
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
            with pytest.raises(TypeError, match=f"or another torch module that returns logits, got {found}"):
                LogProbScorer(model)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *(
            ("temperature", value, ValueError, f"temperature must be a positive number, got {value}")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        ("temperature", "1", ValueError, "temperature must be a number"),
        ("sampling", 0.7, TypeError, "sampling must be a Sampling"),
        ("tokens_per_batch", 0, ValueError, "tokens_per_batch must be at least 1, got 0"),
        ("head_chunk", 0, ValueError, "head_chunk must be at least 1, got 0"),
        *(
            ("dtype", value, ValueError, f"must be a floating-point type such as torch.bfloat16, got {value}")
            for value in (torch.int8, torch.bool, "bfloat16")
        ),
        ("adapters", 3, TypeError, "adapters must be True, False or a name, got 3"),
        ("adapters", False, ValueError, "has no PEFT adapters to switch off"),
        ("memory", -1, ValueError, "memory must be at least 0, got -1"),
    ],
)
def test_settings_are_checked_at_once_and_when_set_later(name, value, error, message):
    model, rows = tiny_model(), random_sequences(5, 3)
    with pytest.raises(error, match=message):
        LogProbScorer(model, **{name: value})
    scorer = LogProbScorer(model)
    before, values = getattr(scorer, name), scorer.score(rows).values
    later = "memory is the scorer's cache, got -1: set memory.limit" if name == "memory" else message
    with pytest.raises(TypeError if name == "memory" else error, match=later):
        setattr(scorer, name, value)
    assert getattr(scorer, name) is before or getattr(scorer, name) == before
    assert torch.equal(scorer.score(rows).values, values)


def test_settings_set_later_are_followed_and_others_fixed():
    rows = random_sequences(9, 6)
    changes = {"dtype": torch.bfloat16, "sampling": Sampling(0.5), "tokens_per_batch": 4, "share_prefixes": False}
    for name, value in changes.items():
        scorer, built = LogProbScorer(tiny_model()), LogProbScorer(tiny_model(), **{name: value})
        setattr(scorer, name, value)
        assert torch.equal(scorer.score(rows).values, built.score(rows).values)
        assert scorer.forwards == built.forwards
    for name, value, message in (("model", tiny_model(seed=1), "model is fixed"), ("path", "full", "path")):
        with pytest.raises(AttributeError, match=message):
            setattr(scorer, name, value)


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
        (lambda: transformers.Gemma3Config(), {262144: IMAGE}),
        (lambda: transformers.LlavaConfig(image_token_index=0), {0: IMAGE}),
        (lambda: transformers.LlavaOnevisionConfig(), {151646: IMAGE, 151647: VIDEO}),
        (lambda: transformers.GraniteSpeechConfig(), {49155: AUDIO}),
        (lambda: transformers.VoxtralConfig(), {}),  # None
        (lambda: transformers.VoxtralConfig(audio_token_id=24), {24: AUDIO}),
        (lambda: transformers.Qwen2_5OmniConfig(), {151655: IMAGE, 151656: VIDEO, 151646: AUDIO}),
        (lambda: transformers.Qwen2Config(), {}),
        (lambda: SimpleNamespace(image_token_id=[5, 6], text=3), {5: IMAGE, 6: IMAGE}),
    ],
)
def test_families_with_tokens_that_stand_for_what_is_not_text(make, expected):
    assert placeholders(SimpleNamespace(config=make())) == expected


NONE = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "message"),
    [
        (random_sequences(3, 0, 2), torch.ones(5), TypeError, "boolean, got torch.float32: pass mask.bool()."),
        *(
            (random_sequences(3, 0, 2), torch.zeros(shape).bool(), ValueError, f"for each token, (5,), got {shape}")
            for shape in ((4,), (1, 5))
        ),
        (
            random_sequences(3, 0, 2),
            torch.arange(5) == 3,
            ValueError,
            "the first token of sequence 2: it has no prefix",
        ),
        (random_sequences(3, 0, 2), torch.arange(5) == 3, ValueError, "Set the mask to False"),
        *(
            (Ragged.from_list([values]), None, ValueError, "token ids must be a flat integer tensor")
            for values in (torch.rand(4), torch.ones(4).bool(), torch.ones(4, 2).long())
        ),
        (Ragged(NONE, NONE, Rows(NONE, torch.Size([0]))), None, ValueError, "at least one sequence, got a batch of 0"),
    ],
)
def test_form_of_tokens_and_mask(scorer, tokens, mask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        scorer.score(tokens, mask)


@pytest.mark.parametrize(("bad_id", "family"), [(97, "qwen2"), (-100, "qwen2"), (2**40, "gpt2")])
def test_id_outside_the_vocabulary(bad_id, family):
    sequences = random_sequences(4, 6)
    sequences.values[6] = bad_id
    with pytest.raises(ValueError, match=rf"token id {bad_id} at sequence 1, position 2.*\[0, 96\].*vocabulary of 97"):
        LogProbScorer(tiny_model(family)).score(sequences)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt"])
def test_longer_than_the_models_positions(family):
    scorer = LogProbScorer(tiny_model(family, max_position_embeddings=16))
    assert scorer.score(random_sequences(16, 3)).values.isfinite().all()
    with pytest.raises(ValueError, match=r"sequence 1 has 17 tokens .* allows 16 positions: truncate"):
        scorer.score(random_sequences(3, 17))
    mask = torch.arange(43) == 42  # a long sequence that is not scored
    assert scorer.score(random_sequences(40, 3), mask).values[42] < 0
