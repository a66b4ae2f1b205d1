"""The fast path proves itself; otherwise the scorer warns and uses the model's own forward."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import assert_scores, plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE, tiny_model


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


class Recurrent(nn.Module):
    """A language model from another library: no configuration, no named parts, logits in ``form``."""

    def __init__(self, form=lambda logits: (logits, None)):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCAB_SIZE)
        self.form = form
        with torch.no_grad():
            self.head.weight.mul_(10)

    def forward(self, input_ids):
        return self.form(self.head(self.body(self.embedding(input_ids))[0]))


def test_a_wrong_head_path_is_detected():
    model = scaling_its_logits(1.05)
    with pytest.warns(
        UserWarning, match=r"full forward.*head of Scaled.*largest difference 0\.\d+, tolerance"
    ) as caught:
        scorer = LogProbScorer(model, temperature=0.9, tokens_per_batch=30, head_chunk=4)
    assert len(caught) == 1
    assert scorer.path == "full"

    sequences = random_sequences(11, 1, 0, 5, 20)
    mask = random_mask(sequences)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = scorer.score(sequences, mask, grad=True).values
    want = plain_log_probs(model, sequences, mask, temperature=0.9)
    assert_near(got, want, **FORWARD)

    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(want.sum(), parameters), strict=True
    ):
        assert_near(a, b, **BACKWARD)


def test_probe_false_trusts_the_head():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogProbScorer(scaling_its_logits(2.0), probe=False).path == "head"


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
    torch.manual_seed(0)
    model = Recurrent(form)
    with pytest.warns(UserWarning, match="Recurrent does not expose its body and head"):
        scorer = LogProbScorer(model)
    assert scorer.path == "full"
    sequences = random_sequences(11, 1, 0, 5)
    model.form = lambda logits: (logits,)
    with torch.no_grad():
        want = plain_log_probs(model, sequences)
    model.form = form
    assert_near(scorer.score(sequences).values, want, **FORWARD)


def test_a_transformers_model_that_returns_tuples():
    model = tiny_model()
    whole, body = model, model.get_decoder()

    class Whole(type(whole)):
        def forward(self, *args, **kwargs):
            return self.lm_head(self.model(*args, **kwargs)[0]), None

    class Body(type(body)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).to_tuple()

    whole.__class__, body.__class__ = Whole, Body
    assert isinstance(model(input_ids=torch.tensor([[1, 2]])), tuple)
    scorer = LogProbScorer(model)
    assert scorer.path == "head"
    assert_scores(scorer, model, random_sequences(11, 4).to_list())


def test_a_model_that_returns_no_logits():
    with pytest.warns(UserWarning, match="Recurrent does not expose"):
        scorer = LogProbScorer(Recurrent(lambda logits: "nothing"))
    with pytest.raises(TypeError, match="'logits', or a tuple that starts with it, got str"):
        scorer.score(random_sequences(4))


def test_a_model_that_numbers_positions_in_its_own_way():
    """Like RoBERTa, whose first position is not 0: the scorer must not pass position_ids."""
    model = tiny_model("gpt2")
    body = model.get_decoder()

    class FromTwo(type(body)):
        def forward(self, input_ids, position_ids=None, **kwargs):
            if position_ids is None:
                position_ids = torch.arange(2, 2 + input_ids.shape[1]).expand_as(input_ids)
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

    body.__class__ = FromTwo
    scorer = LogProbScorer(model)
    assert scorer.path == "head"
    assert_scores(scorer, model, random_sequences(11, 4).to_list())


def test_a_model_that_sees_the_future_is_reported():
    class Peeking(Recurrent):
        def forward(self, input_ids):
            embedded = self.embedding(input_ids)
            return self.form(self.head(embedded + embedded.mean(1, keepdim=True)))

        def get_input_embeddings(self):
            return self.embedding

    with pytest.warns(UserWarning, match="is the model causal"):
        LogProbScorer(Peeking())


def test_the_probe_leaves_the_model_as_it_was():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    config = model.config.to_dict()
    state = torch.get_rng_state()
    assert LogProbScorer(model).path == "head"
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_is_restored_when_the_probe_fails():
    class Broken(Recurrent):
        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids):
            raise RuntimeError("out of order")

    model = Broken().train()
    with pytest.raises(RuntimeError, match="out of order"):
        LogProbScorer(model)
    assert all(module.training for module in model.modules())


def test_without_gradient_dropout_is_off_and_the_mode_is_restored():
    model = tiny_model("gpt2", resid_pdrop=0.5)
    scorer, sequences = LogProbScorer(model), random_sequences(12)
    calm = scorer.score(sequences).values
    model.train()
    model.transformer.h[0].eval()
    assert torch.equal(scorer.score(sequences).values, calm)
    assert model.training
    assert not model.transformer.h[0].training
    assert not torch.equal(scorer.score(sequences, grad=True).values, calm), "with gradient the model keeps its mode"


def test_weights_on_the_meta_device_are_probed_at_the_first_score():
    with torch.device("meta"):
        model = tiny_model("qwen2")
    scorer = LogProbScorer(model)
    assert scorer.path is None
    with pytest.raises(ValueError, match=r"weights on the meta device, which hold no numbers: load them"):
        scorer.score(random_sequences(5))
    real = tiny_model("qwen2")
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():
        model.get_buffer(name).copy_(buffer)
    sequences = random_sequences(9, 4)
    with torch.no_grad():
        assert_near(scorer.score(sequences).values, plain_log_probs(real, sequences), **FORWARD)
    assert scorer.path == "head"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "opt", "granite"])
def test_other_dtypes_prove_themselves_too(family, dtype):
    scorer = LogProbScorer(tiny_model(family).to(dtype))
    assert scorer.path == "head"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert scorer.score(random_sequences(5)).values.dtype == wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling"), ("cohere", "logit_scale")],
)
def test_the_probe_misses_no_logit_processing(family, name, dtype, monkeypatch):
    """Hide one entry of the configuration from the fast path: the probe must notice, also in bfloat16."""
    from torchrl_llm_kl.scoring import _model

    monkeypatch.setattr(_model, "_FACTORS", {k: v for k, v in _model._FACTORS.items() if k != name})
    monkeypatch.setattr(_model, "_SOFT_CAPS", tuple(cap for cap in _model._SOFT_CAPS if cap != name))
    with pytest.warns(UserWarning, match="does not reproduce the model's own log-probs"):
        assert LogProbScorer(tiny_model(family).to(dtype)).path == "full"


def test_importing_the_scorer_imports_neither_transformers_nor_ray():
    program = (
        "import sys, torchrl_llm_kl.scoring; "
        "print([name for name in ('transformers', 'ray', 'torchrl') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "opt"])
def test_on_the_gpu(family):
    model, sequences = tiny_model(family), random_sequences(20, 1, 0, 7)
    mask = random_mask(sequences)
    want = LogProbScorer(model).score(sequences, mask).values
    scorer = LogProbScorer(model.cuda())
    assert scorer.path == "head"
    assert_close(scorer.score(sequences, mask).values, want, rtol=0, atol=1e-4)
    on_gpu = type(sequences).from_list([row.cuda() for row in sequences.to_list()])
    got = scorer.score(on_gpu, mask.cuda()).values
    assert got.is_cuda
    assert_close(got.cpu(), want, rtol=0, atol=1e-4)
