"""Bad input raises an error that names the sequence and the remedy."""

from __future__ import annotations

import re
import tempfile
import types

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

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
from toy_models import tiny_model


@pytest.fixture(scope="module")
def scorer():
    return LogProbScorer(tiny_model(max_position_embeddings=16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"temperature": -1.0}, "temperature must be a positive number, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a positive number, got nan"),
        ({"temperature": float("inf")}, "temperature must be a positive number, got inf"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1, got 0"),
        ({"head_chunk": 0}, "head_chunk must be at least 1, got 0"),
        ({"memory": -1}, "memory must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        LogProbScorer(tiny_model(), **arguments)


@pytest.mark.parametrize("model", [None, lambda ids: ids])
def test_not_a_model(model):
    with pytest.raises(TypeError, match=f"or another torch module that returns logits, got {type(model).__name__}"):
        LogProbScorer(model)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (LogProbScorer, "model must be a model,"),
        (fingerprint_of, "model must be a model,"),
        (prepare_reference, "model must be a model,"),
        (lambda name: RememberedModel(name, "unused"), "model must be a model,"),
        (lambda name: ReferenceUpdater(tiny_model(), name, decay=0.9), "policy must be a model,"),
        (PolicyLoss, "actor must be a model,"),
        (lambda name: make_algorithm("grpo", name, reference=tiny_model()), "actor must be a model,"),
        (lambda name: make_algorithm("grpo", name), "actor must be a model,"),
        (
            lambda name: make_algorithm("grpo", tiny_model(), reference=name),
            "reference must be a model or 'base' or 'data',",
        ),
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
        make("Qwen/Qwen2-0.5B")
    message = str(error.value)
    assert message.startswith(expected)
    assert message.endswith("load it first, AutoModelForCausalLM.from_pretrained('Qwen/Qwen2-0.5B').")


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("temperature", 0.0, ValueError, "temperature must be a positive number, got 0.0"),
        ("temperature", "1", ValueError, "temperature must be a number"),
        ("sampling", 0.7, TypeError, "sampling must be a Sampling"),
        ("tokens_per_batch", 0, ValueError, "tokens_per_batch must be at least 1, got 0"),
        ("head_chunk", 0, ValueError, "head_chunk must be at least 1, got 0"),
        ("dtype", torch.int8, ValueError, "dtype must be a floating-point type such as torch.bfloat16, got torch.int8"),
        ("dtype", "bfloat16", ValueError, "dtype must be a floating-point type such as torch.bfloat16, got bfloat16"),
        ("adapters", 3, TypeError, "adapters must be True, False or a name, got 3"),
        ("adapters", False, ValueError, "has no PEFT adapters to switch off"),
        ("memory", 0, TypeError, "memory is the scorer's cache, got 0: set memory.limit"),
        ("model", tiny_model(seed=1), AttributeError, "model is fixed"),
        ("path", "full", AttributeError, "path"),
    ],
)
def test_settings_set_later_are_checked(name, value, error, message):
    scorer, rows = LogProbScorer(tiny_model()), random_sequences(5, 3)
    before, values = getattr(scorer, name), scorer.score(rows).values
    with pytest.raises(error, match=message):
        setattr(scorer, name, value)
    assert getattr(scorer, name) is before or getattr(scorer, name) == before
    assert torch.equal(scorer.score(rows).values, values)


def test_settings_set_later_are_followed():
    rows = random_sequences(9, 6)
    changes = {"dtype": torch.bfloat16, "sampling": Sampling(0.5), "tokens_per_batch": 4, "share_prefixes": False}
    for name, value in changes.items():
        scorer, built = LogProbScorer(tiny_model()), LogProbScorer(tiny_model(), **{name: value})
        setattr(scorer, name, value)
        assert torch.equal(scorer.score(rows).values, built.score(rows).values)
        assert scorer.forwards == built.forwards


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("token", [0, 7])
def test_a_token_that_stands_for_an_image_is_refused(token, share_prefixes):
    model = tiny_model()
    rows, expected = Ragged.from_list([torch.tensor([3, 4, 5]), torch.tensor([8, token, 9])]), "video_token_id"
    model.config.image_token_id = None
    scorer = LogProbScorer(model, share_prefixes=share_prefixes)
    scorer.score(rows)  # text, as far as the configuration tells
    model.config.video_token_id = token
    for ask in (scorer.score, lambda rows: scorer.score(rows, grad=True), remembered(model)):
        with pytest.raises(
            ValueError, match=f"^token id {token} at sequence 1, position 1 is the model's {expected}: it"
        ):
            ask(rows)
    text = Ragged.from_list([torch.tensor([3, 4, 5]), torch.tensor([8, 2, 9])])
    assert_close(scorer.score(text).values, plain_log_probs(model, text).detach())


def remembered(model):
    return lambda rows: RememberedModel(model, tempfile.mkdtemp()).make_scorer().score(rows)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: transformers.Qwen2VLConfig(), {151655: "image_token_id", 151656: "video_token_id"}),
        (lambda: transformers.Gemma3Config(), {262144: "image_token_id"}),
        (lambda: transformers.LlavaConfig(image_token_index=0), {0: "image_token_id"}),
        (lambda: transformers.LlavaOnevisionConfig(), {151646: "image_token_id", 151647: "video_token_id"}),
        (lambda: transformers.MllamaConfig(), {128256: "image_token_id"}),
        (lambda: transformers.GraniteSpeechConfig(), {49155: "audio_token_id"}),
        (lambda: transformers.VoxtralConfig(), {}),  # None
        (lambda: transformers.VoxtralConfig(audio_token_id=24), {24: "audio_token_id"}),
        (
            lambda: transformers.Qwen2_5OmniConfig(),
            {151655: "image_token_id", 151656: "video_token_id", 151646: "audio_token_id"},
        ),
        (lambda: transformers.Qwen2Config(), {}),
        (lambda: types.SimpleNamespace(image_token_id=[5, 6], text=3), {5: "image_token_id", 6: "image_token_id"}),
    ],
)
def test_families_with_tokens_that_stand_for_what_is_not_text(make, expected):
    assert placeholders(types.SimpleNamespace(config=make())) == expected


def test_first_token(scorer):
    mask = torch.zeros(9, dtype=torch.bool)
    mask[5] = True
    with pytest.raises(
        ValueError, match=r"mask selects the first token of sequence 2: it has no prefix.*Set the mask to False"
    ):
        scorer.score(random_sequences(5, 0, 4), mask)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(5), TypeError, "mask must be boolean, got torch.float32: pass mask.bool()."),
        (torch.zeros(4, dtype=torch.bool), ValueError, "one entry for each token, (5,), got (4,)"),
        (torch.zeros(1, 5, dtype=torch.bool), ValueError, "one entry for each token, (5,), got (1, 5)"),
    ],
)
def test_mask_form(scorer, mask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        scorer.score(random_sequences(5), mask)


@pytest.mark.parametrize("values", [torch.rand(4), torch.ones(4, dtype=torch.bool), torch.ones(4, 2, dtype=torch.long)])
def test_token_ids_form(scorer, values):
    with pytest.raises(ValueError, match="token ids must be a flat integer tensor"):
        scorer.score(Ragged.from_list([values]))


def test_no_sequences(scorer):
    none = torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="expected at least one sequence, got a batch of 0"):
        scorer.score(Ragged(none, none, Rows(none, torch.Size([0]))))


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


def test_a_long_sequence_that_is_not_scored_is_no_error(scorer):
    sequences = random_sequences(40, 3)
    mask = torch.zeros(43, dtype=torch.bool)
    mask[42] = True
    assert scorer.score(sequences, mask).values[42] < 0


def forbid(model: nn.Module, token: int) -> nn.Module:
    """The model gives ``token`` the logit -inf."""
    bias = torch.zeros(97).index_fill(0, torch.tensor([token]), float("-inf"))
    model.lm_head = nn.Linear(32, 97)
    model.lm_head.bias.data.copy_(bias)
    return model


def test_a_forbidden_token_raises_only_if_it_is_scored():
    sequences = Ragged.from_list([torch.tensor([3, 4, 5]), torch.tensor([8, 9, 50, 7])])
    scorer = LogProbScorer(forbid(tiny_model(), 50))
    with pytest.raises(
        ValueError,
        match=r"log-prob is -inf at sequence 1, position 2 \(token 50\): expected a finite number\. Mask the token",
    ):
        scorer.score(sequences)
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1]).bool()
    got = scorer.score(sequences, mask).values
    assert got.isfinite().all()
    assert_close(got[5], torch.tensor(0.0), rtol=0, atol=0)


def test_nan_weights_name_the_sequence():
    model = tiny_model()
    model.get_input_embeddings().weight.data[50] = float("nan")
    sequences = Ragged.from_list([torch.tensor([3, 4, 5]), torch.tensor([8, 9, 50, 7])])
    with pytest.raises(ValueError, match=r"log-prob is nan at sequence 1, position \d"):
        LogProbScorer(model, probe=False).score(sequences, grad=True)
