"""Small scores: rows that attend in one call, and facts about a model that are read once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import random_sequences
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.scoring import _attention, _scorer
from torchrl_llm_kl.scoring._attention import PackLayout, PackPiece, hooked
from torchrl_llm_kl.scoring._model import Inspection
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE, tiny_model


def plain(model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    """The log-probs of each row after its first token, from a forward of only this row, in the model's dtype."""
    logits = [model(input_ids=row[None]).logits[0, :-1] for row in rows]
    return [x.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1) for x, row in zip(logits, rows, strict=True)]


def prompted(prompt: int, *lengths: int) -> list[Tensor]:
    first, *rest = random_sequences(prompt, *lengths, seed=2).to_list()
    return [torch.cat([first, each]) for each in rest]


SHAPES = {
    "equal": (random_sequences(32, 32, 32, 32).to_list(), 1),
    "unequal": (random_sequences(9, 31, 16, 24).to_list(), 4),
    "one": (random_sequences(17).to_list(), 1),
    "answers": (prompted(20, 7, 7, 7), 2),
    "unequal answers": (prompted(20, 3, 12, 7, 3), 4),
    "answers and others": ([*prompted(20, 3, 12), *random_sequences(9, 9).to_list()], 4),
    "far from equal": (random_sequences(60, 5, 6).to_list(), 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "family", ["gpt2", "qwen2", "gemma2", "gpt_oss", "mistral"]
)  # also soft caps, sinks and windows
@pytest.mark.parametrize("tokens_per_batch", [None, 23])
def test_values_and_gradients_in_float64(shape: str, family: str, tokens_per_batch: int | None) -> None:
    """Padding of a batch of pieces changes nothing, also where a pack ends inside of a row."""
    model, rows = tiny_model(family).double(), SHAPES[shape][0]
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the default has no float64
    scorer, parameters = LogProbScorer(model, tokens_per_batch=tokens_per_batch), list(model.parameters())
    assert scorer.shares_prefixes
    want, found = plain(model, rows), scorer.score(rows, grad=True).to_list()
    # Norms and rotary positions of the other families are computed in float32.
    dtype = torch.float64 if family == "gpt2" else torch.float32
    for each in (found, scorer.score(rows).to_list()):
        assert_near(torch.cat([x[1:] for x in each]), torch.cat(want), dtype=dtype, **FORWARD)
    gradients = [
        torch.cat([x.flatten() for x in torch.autograd.grad(torch.cat(each).square().sum(), parameters)])
        for each in ([x[1:] for x in found], want)
    ]
    assert_near(*gradients, dtype=dtype, terms=BACKWARD["terms"], size=256.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_in_one_call(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each layer, prefix and length."""
    model, (rows, each_layer) = tiny_model("qwen2"), SHAPES[shape]
    scorer, calls, attend = LogProbScorer(model), list[Any](), _attention.attend_block

    def counted_attend(*args: Any) -> Tensor:
        calls.append(args)
        return attend(*args)

    monkeypatch.setattr(_attention, "attend_block", counted_attend)
    scorer.score(rows)
    assert len(calls) == each_layer * model.config.num_hidden_layers


def test_batches_of_pieces() -> None:
    """A batch has at most 2048 keys. A prefix from an earlier pack counts, and another prefix is another batch."""
    kept = [(torch.zeros(1, 2, 1000, 4), torch.zeros(1, 2, 1000, 4))]
    ends = [0, 20, 40, 60, 64, 69]
    outside = [[kept], [kept], [kept], [], []]
    pieces = [PackPiece(a, b, -1, past) for a, b, past in zip(ends[:-1], ends[1:], outside, strict=True)]
    pieces.append(PackPiece(69, 71, 4, []))
    pieces += [PackPiece(71, 75, -1, []), PackPiece(75, 77, 4, [])]
    batches, order = _attention._batches(PackLayout(pieces), torch.device("cpu"))
    assert [batch.pieces for batch in batches] == [[0, 1], [2], [3, 6], [4], [5, 7]]
    assert [batch.followed for batch in batches] == [[], [], [], [(0, 4)], []]
    assert [batches[i].places for i in (0, 1, 3)] == [slice(0, 40), slice(40, 60), slice(64, 69)]
    assert [batches[i].places.tolist() for i in (2, 4)] == [[60, 61, 62, 63, 71, 72, 73, 74], [69, 70, 75, 76]]
    joined = [*range(64), *range(71, 75), *range(64, 71), 75, 76]
    assert order is not None
    assert [joined[place] for place in order.tolist()] == [*range(77)]
    apart, places = _attention._batches(PackLayout(pieces), torch.device("cpu"), together=False)
    assert [batch.pieces for batch in apart] == [[i] for i in range(8)]
    assert places is None


# ---------------------------------------------------------------------- facts about the model


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Inspection]:
    made: list[Inspection] = []

    class Counted(Inspection):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            made.append(self)

    monkeypatch.setattr(_scorer, "Inspection", Counted)
    return made


def test_a_model_that_does_not_change_is_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer step, a change of the mode and a score in another dtype change no fact."""
    made, model = counted(monkeypatch), tiny_model("qwen2")
    scorer, rows = LogProbScorer(model), random_sequences(5, 7).to_list()
    for grad in (False, True, False):
        assert_close([x[1:] for x in scorer.score(rows, grad=grad).to_list()], plain(model, rows))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        model.train(not model.training)
        scorer.score(rows, dtype=torch.bfloat16)
    assert len(made) == 1


def replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, VOCAB_SIZE, bias=False)


def wrap_layer(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.down_proj = nn.Sequential(layer.down_proj, nn.Dropout(0.0))


def add_adapters(model: Any) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def change_class(model: Any) -> None:
    """As FSDP2 does, with another forward."""
    kind = type(model.model.norm)

    class Doubled(kind):  # type: ignore[misc,valid-type]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2.0 * super().forward(hidden_states)

    model.model.norm.__class__ = Doubled


def own_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp.gate_proj
    usual = layer.forward
    layer.forward = lambda x: 2.0 * usual(x)


def set_factor(model: Any) -> None:
    model.config.logits_scaling = 2.0
    usual = model.forward

    def forward(*args: Any, **options: Any) -> Any:
        out = usual(*args, **options)
        out.logits = out.logits / 2.0
        return out

    model.forward = forward


@pytest.mark.parametrize("change", [replace_head, wrap_layer, add_adapters, change_class, own_forward, set_factor])
def test_after_a_change_the_model_is_inspected_again(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "FEWEST_PRODUCTS", 0)  # replaces the forwards of linear layers
    made, model, rows = counted(monkeypatch), tiny_model("qwen2"), random_sequences(5, 7, 12).to_list()
    scorer = LogProbScorer(model)
    before = scorer.score(rows).values
    change(model)
    model.eval()
    with torch.no_grad():
        want = plain(model, rows)
    found = scorer.score(rows)
    assert_close([x[1:] for x in found.to_list()], want)
    assert (found.values - before).abs().max() > 1e-3 or change is wrap_layer
    assert len(made) == 2


def test_checkpoints_and_limits_after_a_change() -> None:
    model, rows = tiny_model("qwen2"), random_sequences(12, 7).to_list()
    scorer = LogProbScorer(model)
    scorer.score(rows)
    model.config.max_position_embeddings = 11
    with pytest.raises(ValueError, match="sequence 0 has 12 tokens, the model allows 11"):
        scorer.score(rows)
    model.config.max_position_embeddings = 64
    assert not scorer._inspect().of(hooked)
    model.gradient_checkpointing_enable()
    assert len(scorer._inspect().of(hooked)) >= model.config.num_hidden_layers
    with torch.device("meta"):
        model.lm_head.weight = nn.Parameter(torch.empty(VOCAB_SIZE, model.config.hidden_size))
    with pytest.raises(ValueError, match="weights on the meta device"):
        scorer.score(rows)


def test_a_compiled_layer_is_noticed() -> None:
    model = tiny_model("qwen2")
    scorer = LogProbScorer(model)
    before = scorer._inspect()
    assert scorer._inspect() is before
    model.model.layers[0].compile(backend="eager")
    assert scorer._inspect() is not before
    norm = model.model.norm
    norm.forward = norm.forward  # an attribute that exists already
    assert len(scorer._inspect().of(hooked)) == 1
    norm.forward = torch.compile(norm.forward, backend="eager")
    assert len(scorer._inspect().of(hooked)) == 2
