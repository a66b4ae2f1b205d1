"""References: in less memory (bfloat16, int8, layers in the host's memory), and following the policy (averages, resets)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, Ragged, ReferenceUpdater, prepare_reference
from toy_models import FORWARD, tiny_model
from toy_rollouts import plain_log_probs

ROWS = [torch.tensor(row) for row in ([5, 9, 11, 2, 40, 3], [5, 9, 11, 2, 7, 8, 1], [60, 2])]
IDS = ROWS[0]


def layers_of(model: Any) -> list[nn.Module]:
    body = model.get_decoder()
    return list(getattr(body, "layers", getattr(body, "h", None)))


def reference_of(policy: nn.Module, **options: Any) -> Any:
    return prepare_reference(copy.deepcopy(policy), **options)


def moved(model: nn.Module, by: float = 0.1, seed: int = 0) -> nn.Module:
    """A copy with other weights."""
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
    return model


def kl(policy: Any, reference: LogProbScorer) -> Tensor:
    found = LogProbScorer(policy).evaluate(Ragged.from_list([IDS]), reference=reference).kl
    assert found is not None
    return found.values[1:]


def lora(model: nn.Module, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **config}
    if not isinstance(model, peft.PeftModel):
        return peft.get_peft_model(model, peft.LoraConfig(**own)).eval()
    return peft.LoraConfig(**own)


# ------------------------------------------------------------------ in less memory


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("gpt2", True), ("gemma2", False)])
def test_an_offloaded_reference_scores_the_same_with_two_layers_resident(family: str, tied: bool) -> None:
    policy = tiny_model(family, num_hidden_layers=5, tie_word_embeddings=tied)
    reference = reference_of(policy, offload_to="cpu")
    layers = layers_of(reference)
    at_rest = [list(layer.parameters()) for layer in layers]
    slots: dict[int, set[int]] = {}  # layer -> where its weights were while it ran

    def look(index: int) -> Any:
        def hook(*_: Any) -> None:
            here = {w.untyped_storage().data_ptr() for w in layers[index].parameters()}
            slots.setdefault(index, set()).update(here)
            assert not {w.untyped_storage().data_ptr() for w in at_rest[index]} & here
            for i in set(range(5)) - {index}:
                pairs = zip(layers[i].parameters(), at_rest[i], strict=True)
                assert all(a is b for a, b in pairs), "layers other than the one that runs hold their own weights"

        return hook

    scorer = LogProbScorer(reference, tokens_per_batch=8)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(look(index))
    found = scorer.score(Ragged.from_list(ROWS), remember=True)
    assert scorer.path == "head"
    for row, ours in zip(ROWS, found.to_list(), strict=True):
        assert_near(ours, plain_log_probs(policy, row), **FORWARD)
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert len(set().union(*slots.values())) == 2, "all layers share two places"
    for layer, rest in zip(layers, at_rest, strict=True):
        assert all(a is b for a, b in zip(layer.parameters(), rest, strict=True))
    want = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=scorer).kl
    assert want is not None
    assert_near(want.values, torch.zeros_like(want.values), **FORWARD)


def test_changed_weights_and_errors_leave_nothing_stale() -> None:
    policy = tiny_model("llama", num_hidden_layers=3)
    scorer = LogProbScorer(reference_of(policy, offload_to="cpu"))
    rows = Ragged.from_list(ROWS)
    scorer.score(rows, remember=True)
    layers = layers_of(scorer.model)
    handle = layers[0].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(rows)
    handle.remove()
    assert not any(w.requires_grad for w in scorer.model.parameters())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    ReferenceUpdater(scorer, policy, reset_every=1).step()
    for row, ours in zip(ROWS, scorer.score(rows, remember=True).to_list(), strict=True):
        assert_near(ours, plain_log_probs(policy, row), **FORWARD)


def test_bfloat16_beside_a_float32_policy() -> None:
    policy = tiny_model("qwen2")
    reference = reference_of(policy, dtype=torch.bfloat16, offload_to="cpu")
    assert {w.dtype for w in reference.parameters()} == {torch.bfloat16}
    frequencies = reference.get_decoder().rotary_emb.inv_freq
    assert torch.equal(frequencies, policy.get_decoder().rotary_emb.inv_freq), (
        "rounded frequencies would shift positions"
    )
    scores = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=LogProbScorer(reference))
    assert scores.kl is not None
    assert scores.ref_log_prob is not None
    assert scores.kl.values.dtype == scores.ref_log_prob.values.dtype == torch.float32
    assert 0 < scores.kl.values.max() < 0.1
    assert [w.dtype for w in policy.parameters()] == [torch.float32] * len(list(policy.parameters()))


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_int8_is_the_nearest_of_255_steps_of_each_row(offload: str | None) -> None:
    policy = tiny_model("llama")
    reference = reference_of(policy, dtype=torch.int8, offload_to=offload)
    rounded = copy.deepcopy(policy)
    seen = 0
    with torch.no_grad():
        for name, linear in rounded.get_decoder().layers.named_modules():
            if isinstance(linear, nn.Linear):
                for row in linear.weight:
                    steps = torch.linspace(-1, 1, 255, dtype=torch.float64) * row.abs().max().double()
                    row.copy_(steps[(row.double()[:, None] - steps).abs().argmin(1)])
                weight = reference.get_decoder().layers.get_submodule(name).weight
                assert (weight.dtype, weight.shape, int(weight.abs().max())) == (torch.int8, linear.weight.shape, 127)
                seen += 1
    assert seen == 14
    scores = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=LogProbScorer(reference))
    assert scores.kl is not None
    assert scores.ref_log_prob is not None
    for row, ours in zip(ROWS, scores.ref_log_prob.to_list(), strict=True):
        assert_near(ours, plain_log_probs(rounded, row), **FORWARD)
    assert 0 < scores.kl.values.max() < 0.2
    own, eighth = (
        sum(w.numel() * w.element_size() for w in layers_of(m)[0].mlp.parameters()) for m in (policy, reference)
    )
    assert eighth < 0.3 * own


def test_a_row_of_zeros_in_int8_is_zeros() -> None:
    policy = tiny_model("llama")
    with torch.no_grad():
        layers_of(policy)[0].mlp.up_proj.weight.zero_()
    reference = reference_of(policy, dtype=torch.int8)
    out = layers_of(reference)[0].mlp.up_proj(torch.ones(1, 32))
    assert out.dtype == torch.float32
    assert not out.any()


def test_what_cannot_be_prepared_is_refused() -> None:
    gpt2, llama = tiny_model("gpt2"), tiny_model("llama")
    offloaded, int8 = reference_of(llama, offload_to="cpu"), reference_of(llama, dtype=torch.int8)
    cases: list[tuple[type[Exception], str, Any]] = [
        (
            TypeError,
            "dtype must be torch.int8 or a floating-point type, got torch.int32",
            lambda: reference_of(llama, dtype=torch.int32),
        ),
        (
            ValueError,
            r"GPT2LMHeadModel hold no nn.Linear .* use dtype=torch.bfloat16",
            lambda: reference_of(gpt2, dtype=torch.int8),
        ),
        (ValueError, "meta device: load them", lambda: prepare_reference(copy.deepcopy(llama).to("meta"))),
        (TypeError, "no separate body and head", lambda: prepare_reference(nn.Linear(1, 1))),
        (ValueError, "offloaded already", lambda: prepare_reference(offloaded, offload_to="cpu")),
        (
            ValueError,
            "grad=True, but LlamaForCausalLM is offloaded",
            lambda: LogProbScorer(offloaded).score(Ragged.from_list(ROWS), grad=True),
        ),
        (
            ValueError,
            r"q_proj.weight has dtype torch.int8, which cannot follow .* in bfloat16 or wider",
            lambda: ReferenceUpdater(int8, llama, decay=0.5),
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.gpu
def test_on_a_gpu_two_layers_and_the_head_are_resident() -> None:
    policy = tiny_model(
        "llama", num_hidden_layers=12, hidden_size=512, intermediate_size=2048, tie_word_embeddings=False
    )
    layer = sum(w.numel() * w.element_size() for w in layers_of(policy)[0].parameters())
    before = torch.cuda.memory_allocated()
    scorer = LogProbScorer(reference_of(policy, offload_to="cuda"))
    for _ in range(3):
        found = scorer.score(Ragged.from_list(ROWS))
    assert torch.cuda.max_memory_allocated() - before < 4 * layer
    for row, ours in zip(ROWS, found.to_list(), strict=True):
        assert_close(ours, plain_log_probs(policy, row), atol=1e-4, rtol=0)


# ------------------------------------------------------------------ averages and resets


@pytest.mark.parametrize(("decay", "dtype"), [(0.9, torch.float32), (0.999, torch.bfloat16), (0.999, torch.float64)])
def test_averages_of_a_drifting_policy(decay: float, dtype: torch.dtype) -> None:
    """A policy at ``a + b t`` after ``t`` steps: the average is ``a + b (t - (1 - d^t) d / (1 - d))``; a bfloat16 reference is
    that rounded once, where plain bfloat16 arithmetic would stand still."""
    policy, reference = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=dtype)
    if dtype == torch.float32:
        policy = policy.float()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    start = {name: value.detach().double().clone() for name, value in policy.named_parameters()}
    reference.load_state_dict({name: value.to(dtype) for name, value in start.items()})
    updater, slope = ReferenceUpdater(reference, policy, decay=decay), 2.0**-12
    with torch.no_grad():
        for step in range(1, 501):
            for name, parameter in policy.named_parameters():
                parameter.copy_(start[name] + slope * step)
            updater.step()
    want = 500 - (1 - decay**500) * decay / (1 - decay)
    for name, found in reference.named_parameters():
        expected = start[name] + slope * want
        if dtype == torch.bfloat16:
            assert_close(found.detach(), expected.bfloat16(), atol=0, rtol=2**-7)
        else:
            assert_close(found.detach().double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-12, rtol=0)
    assert updater.steps == 500


def test_a_resting_policy_is_reached_to_the_last_bits() -> None:
    """``r_t = p + d^t (r_0 - p)``: plain float32 arithmetic stops ``eps / (1 - d)`` before it."""
    policy = nn.Linear(32, 32)
    reference = moved(policy, by=0.01, seed=1)
    start = {name: value.detach().double().clone() for name, value in reference.named_parameters()}
    updater = ReferenceUpdater(reference, policy, decay=0.995)
    for _ in range(1000):
        updater.step()
    for (name, found), target in zip(reference.named_parameters(), policy.parameters(), strict=True):
        want = target.double() + 0.995**1000 * (start[name] - target.double())
        assert_close(found.double(), want, atol=1e-6, rtol=0)


def test_steps_between_averages_and_resets() -> None:
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    policy.weight.data.fill_(1.0), reference.weight.data.fill_(0.0)
    updater, found = ReferenceUpdater(reference, policy, decay=0.75, every=2, reset_every=5), []
    for _ in range(6):
        updater.step()
        found.append(reference.weight.item())
    assert found == [0.0, 0.25, 0.25, 0.4375, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kl_is_0_after_a_reset_and_the_cache_knows(dtype: torch.dtype) -> None:
    policy = tiny_model("qwen2").to(dtype)
    reference = LogProbScorer(moved(policy))
    rows = Ragged.from_list([IDS])
    updater = ReferenceUpdater(reference, policy, decay=0.5, reset_every=2)
    before = reference.score(rows, remember=True).values
    assert kl(policy, reference).min() > 1e-3
    updater.step()
    assert_near(reference.score(rows, remember=True).values, reference.score(rows).values, **FORWARD)
    assert (reference.score(rows, remember=True).values - before).abs().max() > 1e-3
    updater.step()
    assert kl(policy, reference).abs().max() == 0
    policy_scores = LogProbScorer(policy).score(rows, remember=True).values
    assert torch.equal(reference.score(rows, remember=True).values, policy_scores)
    updater.step()
    assert kl(policy, reference).abs().max() == 0, "an average of equal weights is equal"


@pytest.mark.parametrize("own", [True, False], ids=["adapter of the policy's model", "model of its own"])
def test_adapters(own: bool) -> None:
    policy = lora(tiny_model("qwen2"), target_modules=["q_proj", "up_proj"])
    if own:
        policy.add_adapter("ref", lora(policy, target_modules=["q_proj", "up_proj"]))
        reference = LogProbScorer(policy, adapters="ref")
    else:
        reference = LogProbScorer(copy.deepcopy(policy))
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            if "lora_" in name and (not own or ".ref." in name):
                parameter.mul_(2)
    updater = ReferenceUpdater(reference, policy, decay=0.75, reset_every=2)
    assert kl(policy, reference).max() > 1e-3
    weights = dict(policy.named_parameters())
    trained = {n: v.detach().clone() for n, v in weights.items() if ".ref." not in n}
    name = next(n for n in weights if "lora_A.default" in n)
    follows = dict(reference.model.named_parameters())[name.replace("default", "ref") if own else name]
    before = follows.detach().clone()
    updater.step()
    assert_close(follows, 0.75 * before + 0.25 * weights[name])
    updater.step()
    assert kl(policy, reference).abs().max() == 0
    for n, value in trained.items():
        assert torch.equal(weights[n], value), n
    assert list(policy.active_adapters) == ["default"]


class Served:
    """Takes weights as a service does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version = model, 3

    def update_weights(self, weights: Any) -> None:
        self.version += 1
        assert not self.model.load_state_dict(weights, strict=False).unexpected_keys


def test_a_served_reference() -> None:
    policy = tiny_model("llama")
    service = Served(copy.deepcopy(policy))
    updater = ReferenceUpdater(service, policy, decay=0.75, every=2, reset_every=3)
    start = policy.get_output_embeddings().weight.detach().clone()
    policy.load_state_dict(moved(policy).state_dict())
    now = policy.get_output_embeddings().weight.detach().clone()
    updater.step()
    assert service.version == 3
    updater.step()
    assert service.version == 4
    assert_close(service.model.get_output_embeddings().weight, 0.75 * start + 0.25 * now)
    updater.step()
    assert kl(policy, LogProbScorer(service.model)).abs().max() == 0
    state = copy.deepcopy(updater.state_dict())
    policy.load_state_dict(moved(policy, seed=4).state_dict())
    updater.step()
    updater.load_state_dict(state)
    assert_close(service.model.get_output_embeddings().weight, now)
    assert service.version == 7


def test_state_is_saved_and_resumed_to_the_last_bit() -> None:
    first = tiny_model("llama", num_hidden_layers=1)
    policies = [moved(first, seed=seed) for seed in range(6)]

    def run(updater: ReferenceUpdater, policy: nn.Module, steps: range) -> None:
        for step in steps:
            policy.load_state_dict(policies[step].state_dict())
            updater.step()

    options: Any = {"decay": 0.9, "every": 2, "reset_every": 5}
    policy, reference = copy.deepcopy(first), copy.deepcopy(first)
    whole = ReferenceUpdater(reference, policy, **options)
    run(whole, policy, range(4))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    run(whole, policy, range(4, 6))
    again, resumed = copy.deepcopy(first), moved(first, seed=9)
    file.seek(0)
    updater = ReferenceUpdater(resumed, again, **options)
    updater.load_state_dict(torch.load(file))
    assert updater.steps == 4
    run(updater, again, range(4, 6))
    for a, b in zip(reference.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    state = whole.state_dict()
    rest = {n: v for n, v in state["weights"].items() if n != "model.norm.weight"}
    with pytest.raises(KeyError, match=r"another reference: model.norm.weight"):
        updater.load_state_dict({**state, "weights": rest})
    with pytest.raises(ValueError, match=r"model.norm.weight: the reference has shape .*32,.*the state .*1, 2"):
        updater.load_state_dict({**state, "weights": {**rest, "model.norm.weight": torch.zeros(1, 2)}})


def test_what_cannot_follow_is_refused() -> None:
    model = tiny_model("llama")
    for options, message in [
        ({}, "the reference would never change: pass decay="),
        ({"decay": 1.0}, "decay .* less than 1, got 1.0"),
        ({"decay": -0.1}, "at least 0 .* got -0.1"),
        ({"decay": 0.5, "every": 0}, "every must be at least 1, got 0"),
        ({"reset_every": 0}, "reset_every must be at least 1, got 0"),
        ({"reset_every": 4, "every": 2}, "every=2 is the time between averages, and there is none"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(copy.deepcopy(model), model, **options)
    for reference, message in [
        (model, "share weights: make the reference a copy"),
        (tiny_model("gpt2"), "no counterpart of 'transformer.wte.weight' of the reference"),
        (tiny_model("llama", num_hidden_layers=1), "reference has no counterpart of 'model.layers.1"),
        (
            tiny_model("llama", vocab_size=50),
            r"embed_tokens.weight: the reference has shape \(50, 32\), the policy \(97",
        ),
        (tiny_model("llama").to("meta"), "meta device"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(reference, model, decay=0.5)
    with pytest.raises(TypeError, match=r"reference must be a model, got 'base': load it first"):
        ReferenceUpdater("base", model, decay=0.5)


def test_adapters_that_cannot_follow_are_refused() -> None:
    policy = lora(tiny_model("qwen2"))
    policy.add_adapter("ref", lora(policy))
    policy.add_adapter("wide", lora(policy, target_modules=["q_proj", "v_proj"]))
    policy.add_adapter("rank", lora(policy, r=2))
    policy.add_adapter("scaled", lora(policy, lora_alpha=32))  # the same weights times another factor: another model
    for adapters, message in [
        (False, "adapters=False: the base model never changes"),
        ("default", "'default' follows the policy's active adapter, and active are 'default': activate the one"),
        ("wide", "no counterpart of .*v_proj.*same targets"),
        ("rank", r"q_proj.lora_A.rank.weight: the reference has shape \(2, 32\), the policy \(4, 32\)"),
        ("scaled", r"'scaled' scales its weights by 8\.0, the policy's 'default' by 2\.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(LogProbScorer(policy, adapters=adapters), policy, decay=0.5)
    with pytest.raises(ValueError, match=r"no counterpart of .* of the"):
        ReferenceUpdater(tiny_model("qwen2"), policy, decay=0.5)
