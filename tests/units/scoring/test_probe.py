"""The probe of the fast path and of packs. If it fails, the scorer warns or pads, and its scores stay right."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_near
from scoring_reference import (
    Recurrent,
    assert_scores,
    body_tokens,
    conversation,
    ids,
    plain_log_probs,
    random_mask,
    random_sequences,
)
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import _model
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE, altered, tiny_model


def scaling_its_logits(factor: float) -> nn.Module:
    """A Qwen2 whose forward scales the logits by a factor that is not in its configuration."""
    model = tiny_model()

    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * factor
            return output

    model.__class__ = Scaled
    return model


def test_a_wrong_head_path_is_detected():
    model = scaling_its_logits(1.05)
    message = r"full forward.*head of Scaled.*largest difference 0\.\d+, tolerance"
    with pytest.warns(UserWarning, match=message) as caught:
        scorer = LogProbScorer(model, temperature=0.9, tokens_per_batch=30, head_chunk=4)
    assert len(caught) == 1
    assert scorer.path == "full"

    sequences = random_sequences(11, 1, 0, 5, 20)
    mask, parameters = random_mask(sequences), list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = scorer.score(sequences, mask, grad=True).values
        assert LogProbScorer(scaling_its_logits(2.0), probe=False).path == "head", "which is trusted"
    want = plain_log_probs(model, sequences, mask, temperature=0.9)
    assert_near(got, want, **FORWARD)
    assert_near(*(torch.autograd.grad(value.sum(), parameters) for value in (got, want)), **BACKWARD)


@pytest.mark.parametrize(
    "form",
    [
        lambda logits: (logits, "cache"),
        lambda logits: [logits],
        lambda logits: {"logits": logits},
        lambda logits: SimpleNamespace(logits=logits, loss=None),
        lambda logits: logits,
    ],
    ids=["tuple", "list", "mapping", "object", "tensor"],
)
def test_any_module_that_returns_logits(form):
    model, sequences = Recurrent(), random_sequences(11, 1, 0, 5)
    want = plain_log_probs(model, sequences).detach()
    model.form = form
    with pytest.warns(UserWarning, match="Recurrent does not expose its body and head"):
        scorer = LogProbScorer(model)
    assert scorer.path == "full"
    assert_near(scorer.score(sequences).values, want, **FORWARD)


def test_a_model_that_returns_no_logits_or_sees_the_future():
    with pytest.warns(UserWarning, match="Recurrent does not expose"):
        scorer = LogProbScorer(Recurrent(form=lambda logits: "nothing"))
    with pytest.raises(TypeError, match="'logits', or a tuple that starts with it, got str"):
        scorer.score(random_sequences(4))

    class Peeking(Recurrent):
        def forward(self, input_ids):
            embedded = self.embedding(input_ids)
            return self.form(self.head(embedded + embedded.mean(1, keepdim=True)))

        def get_input_embeddings(self):
            return self.embedding

    with pytest.warns(UserWarning, match="is the model causal"):
        LogProbScorer(Peeking())


def returning_tuples() -> nn.Module:
    model = tiny_model()
    body = model.get_decoder()

    class Whole(type(model)):
        def forward(self, *args, **kwargs):
            return self.lm_head(self.model(*args, **kwargs)[0]), None

    class Body(type(body)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).to_tuple()

    model.__class__, body.__class__ = Whole, Body
    assert isinstance(model(input_ids=torch.tensor([[1, 2]])), tuple)
    return model


def numbering_positions_in_its_own_way() -> nn.Module:
    """Like RoBERTa, whose first position is not 0: the scorer must not pass position_ids."""
    model = tiny_model("gpt2")
    body = model.get_decoder()

    class FromTwo(type(body)):
        def forward(self, input_ids, position_ids=None, **kwargs):
            if position_ids is None:
                position_ids = torch.arange(2, 2 + input_ids.shape[1]).expand_as(input_ids)
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

    body.__class__ = FromTwo
    return model


def embedding_more_than_it_predicts() -> nn.Module:
    """Like models with an extra token for padding or audio."""
    model = tiny_model("llama")
    weight = model.model.embed_tokens.weight.data
    model.model.embed_tokens = nn.Embedding.from_pretrained(torch.cat([weight, torch.randn(40, 32)]))
    return model


@pytest.mark.parametrize(
    "make", [returning_tuples, numbering_positions_in_its_own_way, embedding_more_than_it_predicts]
)
def test_unusual_models_of_transformers(make):
    model = make()
    scorer = LogProbScorer(model)
    assert (scorer.path, scorer.shares_prefixes) == ("head", make is not numbering_positions_in_its_own_way)
    assert_scores(scorer, model, group())


def test_the_model_stays_as_it_was():
    """Modes, configuration, hooks and random numbers, even if its forward fails. Without gradient dropout is off."""
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].eval()

    def state():
        of_modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        gradients = [p.grad for p in model.parameters()]
        return of_modules, gradients, model.config.to_dict(), torch.get_rng_state().tolist()

    before, sequences = state(), random_sequences(12)
    scorer = LogProbScorer(model)
    assert scorer.path == "head"
    calm = scorer.score(sequences).values
    assert state() == before
    assert torch.equal(LogProbScorer(model.eval()).score(sequences).values, calm)
    model.train()
    assert not torch.equal(scorer.score(sequences, grad=True).values, calm), "with gradient the model keeps its mode"
    model.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LogProbScorer(model)
    assert all(module.training for module in model.modules())


def test_weights_on_the_meta_device_are_probed_at_the_first_score():
    real, sequences = tiny_model("qwen2"), random_sequences(9, 4)
    with torch.device("meta"):
        model = tiny_model("qwen2")
    scorer = LogProbScorer(model)
    assert scorer.path is None
    with pytest.raises(ValueError, match=r"weights on the meta device, which hold no numbers: load them"):
        scorer.score(sequences)
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert_scores(scorer, real, sequences.to_list())
    assert scorer.path == "head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling"), ("cohere", "logit_scale")],
)
def test_the_probe_misses_no_logit_processing(family, name, dtype, monkeypatch):
    """One entry of the configuration is hidden from the fast path. The probe must notice it, also in bfloat16."""
    monkeypatch.setattr(_model, "_FACTORS", {k: v for k, v in _model._FACTORS.items() if k != name})
    monkeypatch.setattr(_model, "_SOFT_CAPS", tuple(cap for cap in _model._SOFT_CAPS if cap != name))
    with pytest.warns(UserWarning, match="do not reproduce the model's own log-probs"):
        assert LogProbScorer(tiny_model(family).to(dtype)).path == "full"


def group(length: int = 40) -> list[Tensor]:
    prompt = ids(length, 0)
    return [torch.cat([prompt, ids(n, n)]) for n in (9, 4, 13)] + [ids(11, 5)]


@pytest.mark.parametrize(
    ("family", "window"), [("phimoe", 15), ("phimoe", 20), ("mistral", 15), ("gemma2", 20), ("qwen2", 20)]
)
def test_windows_in_the_mask_or_in_the_attention(family: str, window: int) -> None:
    """Phimoe passes no window to its attention, and the probe's sequences are shorter than the window."""
    own: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else {}
    model = tiny_model(family, sliding_window=window, max_position_embeddings=128, **own)
    scorer = LogProbScorer(model)
    assert scorer.shares_prefixes == (family != "phimoe")
    assert_scores(scorer, model, group())


class Leaking(nn.Module):
    """A decoder layer that leaks a part of each position into the next one, even across sequences."""

    def __init__(self, layer: nn.Module, share: float) -> None:
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        return self.layer(hidden + self.share * before, *args, **kwargs)


@pytest.mark.parametrize("head", ["as it is", "zero"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.02), (torch.float32, 0.02), (torch.float32, 1.0)])
def test_a_leak_below_half_precision_is_detected(dtype: torch.dtype, share: float, head: str) -> None:
    model = tiny_model("llama", initializer_range=0.02)
    model.model.layers[0] = Leaking(model.model.layers[0], share)
    if head == "zero":
        nn.init.zeros_(model.lm_head.weight)
    assert not LogProbScorer(model.to(dtype)).shares_prefixes
    if dtype == torch.float32:
        assert not LogProbScorer(model, dtype=torch.bfloat16).shares_prefixes


@pytest.mark.parametrize(
    ("family", "dtype", "width"),
    [
        ("qwen2", torch.bfloat16, 0.4),
        ("llama", torch.float16, 0.4),
        ("mistral", torch.bfloat16, 0.02),
        ("gemma2", torch.float32, 0.02),
        ("gpt2", torch.float16, 0.4),
        ("opt", torch.float64, 0.4),
    ],
)
def test_no_false_alarm_in_any_precision(family: str, dtype: torch.dtype, width: float) -> None:
    scorer = LogProbScorer(tiny_model(family, initializer_range=width).to(dtype))
    assert scorer.shares_prefixes
    assert scorer.path == "head"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert scorer.score(random_sequences(5)).values.dtype == wide


def modern_bert() -> nn.Module:
    """A decoder without separate body and head, whose last layer has a window of 16 tokens."""
    from transformers import AutoModelForCausalLM, ModernBertDecoderConfig

    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "local_attention": 32}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(ModernBertDecoderConfig(**ends, **sizes, **layers)).eval()


WINDOWS: dict[str, Callable[[], nn.Module]] = {
    "modern_bert": modern_bert,
    "mistral": partial(tiny_model, "mistral", sliding_window=16),
    "gemma2": partial(tiny_model, "gemma2", sliding_window=16, layer_types=["full_attention", "sliding_attention"]),
}


@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
@pytest.mark.parametrize(("name", "probe"), [*((name, True) for name in WINDOWS), ("mistral", False)])
def test_padding_outside_a_window_has_no_gradient(name: str, probe: bool) -> None:
    """In float64, eager attention of a position with only padding in its window is NaN. The rows have 60 and 3 tokens."""
    model: Any = WINDOWS[name]().double()
    model.set_attn_implementation("eager")
    batch = Ragged.from_list([ids(60, 1), ids(3, 2)])
    found = LogProbScorer(model, share_prefixes=False, probe=probe).score(batch, grad=True).values
    want = plain_log_probs(model, batch)
    assert_near(found.float(), want, **FORWARD)
    got, expected = (torch.autograd.grad(x.sum(), list(model.parameters())) for x in (found, want))
    assert_near(list(got), list(expected), **BACKWARD, dtype=torch.float32)


def with_its_own_mask() -> nn.Module:
    """A body that passes its own mask to every layer."""
    model = tiny_model("llama")
    forward = model.model.forward

    def masked(*args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        t = input_ids.shape[1]
        own = torch.full((t, t), -torch.inf).triu(1).expand(input_ids.shape[0], 1, t, t)
        return forward(*args, input_ids=input_ids, **{**kwargs, "attention_mask": own})

    model.model.forward = masked
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_its_own_mask,
        # Convolutions and recurrences would see the previous sequence.
        lambda: altered("llama", lambda m: setattr(m.model.layers[0], "mlp", Leaking(m.model.layers[0].mlp, 1.0))),
        lambda: altered("llama", lambda m: setattr(m, "_is_stateful", True)),
        lambda: altered("llama", lambda m: nn.init.zeros_(m.model.embed_tokens.weight)),  # they prove nothing
    ],
    ids=["own mask", "state along the row", "declared state", "zeros"],
)
def test_bodies_that_cannot_be_packed_are_padded(make: Any) -> None:
    scorer = LogProbScorer(make())
    assert (scorer.path, scorer.shares_prefixes) == ("head", False)
    assert_scores(scorer, tiny_model("llama") if make is with_its_own_mask else scorer.model, conversation())


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_of_all_layers_or_by_kind(nested: bool) -> None:
    """The length of the whole sequence decides the frequencies, even if only the first tokens are scored."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    if nested:
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    own: dict[str, Any] = {"query_pre_attn_scalar": 8, "sliding_window": 5} if nested else {}
    own |= {"max_position_embeddings": 128, "head_dim": 8, "rope_parameters": rope}
    model = tiny_model("gemma3_text" if nested else "llama", **own)
    scorer, batch = LogProbScorer(model), Ragged.from_list([*group(), ids(17, 3), ids(16, 4)])
    for mask in (batch.positions > 0, (batch.positions > 0) & (batch.positions < 9)):
        assert_near(scorer.score(batch, mask).values, plain_log_probs(model, batch, mask).detach(), **FORWARD)


def test_layerdrop_is_scored_without_packs() -> None:
    model, rows = tiny_model("opt", layerdrop=0.5).train(), group(20)
    scorer, batch = LogProbScorer(model, tokens_per_batch=16), Ragged.from_list(rows)
    assert scorer.shares_prefixes
    with pytest.warns(UserWarning, match=r"^Layers are dropped at random: .* share no prefixes where OPTForCausalLM"):
        assert body_tokens(model, lambda: scorer.score(batch, grad=True)) == sum(len(row) - 1 for row in rows)
