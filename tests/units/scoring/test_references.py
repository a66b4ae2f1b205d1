"""References: in less memory, updated from the policy, or the policy's own model with other adapters."""

import copy
import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.testing import assert_close

from checkpointed import layers as layers_of
from closeness import assert_near
from scoring_reference import assert_scores
from torchrl_llm_kl import Adapters, LogProbScorer, Ragged, RetrieveKL, ScoreOptions, make_algorithm
from torchrl_llm_kl.scoring import ReferenceUpdater, prepare_reference
from toy_models import FORWARD, tiny_model
from toy_rollouts import plain_log_probs

ROWS = [torch.tensor(row) for row in ([5, 9, 11, 2, 40, 3], [5, 9, 11, 2, 7, 8, 1], [60, 2])]
IDS, BATCH = ROWS[0], Ragged.from_list(ROWS)
ONE = Ragged.from_list([IDS])


def reference_of(policy: nn.Module, **options: Any) -> Any:
    return prepare_reference(copy.deepcopy(policy), **options)


def moved(model: nn.Module, by: float = 0.1, seed: int = 0) -> nn.Module:
    """A copy of a model with other weights."""
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += by * torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
    return model


def kl(policy: Any, reference: LogProbScorer) -> Tensor:
    return LogProbScorer(policy).evaluate(ONE, reference=reference).kl.values[1:]


def lora(model: nn.Module, **config: Any) -> Any:
    """Add adapters that are far from 0. For a model that has adapters, return a configuration for further ones."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **config})
    return own if isinstance(model, peft.PeftModel) else peft.get_peft_model(model, own).eval()


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("gpt2", True), ("gemma2", False)])
def test_an_offloaded_reference_scores_the_same_with_two_layers_resident(family: str, tied: bool) -> None:
    policy = tiny_model(family, num_hidden_layers=5, tie_word_embeddings=tied)
    reference = reference_of(policy, offload_to="cpu")
    layers = layers_of(reference)
    at_rest = [list(layer.parameters()) for layer in layers]
    slots: dict[int, set[int]] = {}  # layer -> where its weights were while it ran

    def at_home(index: int) -> bool:
        return all(a is b for a, b in zip(layers[index].parameters(), at_rest[index], strict=True))

    def look(index: int) -> Any:
        def hook(*_: Any) -> None:
            here = {w.untyped_storage().data_ptr() for w in layers[index].parameters()}
            slots.setdefault(index, set()).update(here)
            assert not {w.untyped_storage().data_ptr() for w in at_rest[index]} & here
            assert all(at_home(i) for i in range(5) if i != index), "others hold their own weights"

        return hook

    scorer = LogProbScorer(reference, tokens_per_batch=8)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(look(index))
    assert scorer.path == "head"
    assert_scores(scorer, policy, ROWS, remember=True)
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert len(set().union(*slots.values())) == 2, "all layers share two places"
    assert all(map(at_home, range(5)))
    found = LogProbScorer(policy).evaluate(BATCH, reference=scorer).kl.values
    assert_near(found, torch.zeros_like(found), **FORWARD)


def test_changed_weights_and_errors_leave_nothing_stale() -> None:
    policy = tiny_model("llama", num_hidden_layers=3)
    scorer = LogProbScorer(reference_of(policy, offload_to="cpu"))
    scorer.score(BATCH, remember=True)
    attention = layers_of(scorer.model)[0].self_attn
    with attention.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        scorer.score(BATCH)
    assert not any(w.requires_grad for w in scorer.model.parameters())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    ReferenceUpdater(scorer, policy, reset_every=1).step()
    assert_scores(scorer, policy, ROWS, remember=True)


def test_bfloat16_beside_a_float32_policy() -> None:
    policy = tiny_model("qwen2")
    reference = reference_of(policy, dtype=torch.bfloat16, offload_to="cpu")
    assert {w.dtype for w in reference.parameters()} == {torch.bfloat16}
    frequencies = [model.get_decoder().rotary_emb.inv_freq for model in (reference, policy)]
    assert torch.equal(*frequencies), "rounded frequencies would shift positions"
    scores = LogProbScorer(policy).evaluate(BATCH, reference=LogProbScorer(reference))
    assert scores.kl.values.dtype == scores.ref_log_prob.values.dtype == torch.float32
    assert 0 < scores.kl.values.max() < 0.1
    assert {w.dtype for w in policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_int8_is_the_nearest_of_255_steps_of_each_row(offload: str | None) -> None:
    policy = tiny_model("llama")
    layers_of(policy)[0].mlp.up_proj.weight.data[3] = 0  # a row of zeros stays one
    reference = reference_of(policy, dtype=torch.int8, offload_to=offload)
    rounded, seen = copy.deepcopy(policy), 0
    for name, linear in rounded.get_decoder().layers.named_modules():
        if isinstance(linear, nn.Linear):
            for row in linear.weight.data:
                steps = torch.linspace(-1, 1, 255, dtype=torch.float64) * row.abs().max().double()
                row.copy_(steps[(row.double()[:, None] - steps).abs().argmin(1)])
            weight = reference.get_decoder().layers.get_submodule(name).weight
            assert (weight.dtype, weight.shape, int(weight.abs().max())) == (torch.int8, linear.weight.shape, 127)
            seen += 1
    assert seen == 14
    scorer = LogProbScorer(reference)
    assert_scores(scorer, rounded, ROWS)
    found = LogProbScorer(policy).evaluate(BATCH, reference=scorer)
    assert_near(found.ref_log_prob.values, scorer.score(BATCH).values, **FORWARD)
    assert 0 < found.kl.values.max() < 0.2
    own, eighth = ([w.nbytes for w in layers_of(model)[0].mlp.parameters()] for model in (policy, reference))
    assert sum(eighth) < 0.3 * sum(own)
    if offload is None:
        out = layers_of(reference)[0].mlp.up_proj(torch.ones(1, 32))
        assert (out.dtype, float(out[0, 3])) == (torch.float32, 0.0)


def test_what_cannot_be_prepared_is_refused() -> None:
    gpt2, llama = tiny_model("gpt2"), tiny_model("llama")
    offloaded, int8 = reference_of(llama, offload_to="cpu"), reference_of(llama, dtype=torch.int8)
    for error, message, call in [
        (TypeError, "floating-point type, got torch.int32", lambda: reference_of(llama, dtype=torch.int32)),
        (ValueError, "GPT2LM.* no nn.Linear .* use dtype=torch.bfloat16", lambda: reference_of(gpt2, dtype=torch.int8)),
        (TypeError, "no separate body and head", lambda: prepare_reference(nn.Linear(1, 1))),
        (ValueError, "wrapped, sharded or offloaded", lambda: prepare_reference(offloaded, offload_to="cpu")),
        (ValueError, "the model is offloaded", lambda: LogProbScorer(offloaded).score(BATCH, grad=True)),
        (ValueError, r"of the same names.*\.scale'", lambda: ReferenceUpdater(int8, llama, decay=0.5)),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(("decay", "dtype"), [(0.9, torch.float32), (0.999, torch.bfloat16), (0.999, torch.float64)])
def test_averages_of_a_drifting_policy(decay: float, dtype: torch.dtype) -> None:
    """The average of a policy at ``a + b t`` is ``a + b (t - (1 - d^t) d / (1 - d))``. In bfloat16 it is rounded once."""
    wide = torch.float32 if dtype == torch.float32 else torch.float64
    start = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    policy, reference = (nn.Linear(8, 8, bias=False, dtype=each) for each in (wide, dtype))
    policy.weight.data.copy_(start), reference.weight.data.copy_(start)
    updater, slope = ReferenceUpdater(reference, policy, decay=decay), 2.0**-12
    for step in range(1, 501):
        policy.weight.data.copy_(start + slope * step)
        updater.step()
    expected = start + slope * (500 - (1 - decay**500) * decay / (1 - decay))
    found = reference.weight.detach()
    if dtype == torch.bfloat16:
        assert_close(found, expected.bfloat16(), atol=0, rtol=2**-7)
    else:
        assert_close(found.double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-12, rtol=0)
    assert updater.steps == 500


def test_steps_between_averages_and_resets() -> None:
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    policy.weight.data.fill_(1.0), reference.weight.data.fill_(0.0)
    updater, found = ReferenceUpdater(reference, policy, decay=0.75, every=2, reset_every=5), []
    for _ in range(6):
        updater.step()
        found.append(reference.weight.item())
    assert found == [0.0, 0.25, 0.25, 0.4375, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_without_lag_by_hand(dtype: torch.dtype) -> None:
    """Weights of the policy 1/2, 1/3 and 1/5; corrections 1/4, 1/9 and 1/25. The third step resets, also the start."""
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False, dtype=dtype)
    policy.weight.data.fill_(1.0), reference.weight.data.fill_(1.0)
    updater, found = ReferenceUpdater(reference, policy, ema_power=1.0, bias_power=2.0, lag=1, reset_every=3), []
    for value in (5.0, 10.0, 13.0, 18.0):
        policy.weight.data.fill_(value)
        updater.step()
        found.append(reference.weight.item())
    # Averages 3, 3 + 7 / 3 and 13 + 5 / 5.
    expected = [3 + 4 / 4, 16 / 3 + 9 / 9, 13, 14 + 5 / 25]
    assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 2**-8)
    updater = ReferenceUpdater(reference, policy, ema_power=0.5, lag=14, every=2)  # a weight of 1/4, no correction
    policy.weight.data.fill_(2.0), reference.weight.data.fill_(1.0)
    updater.step(), updater.step()
    assert reference.weight.item() == 1.25
    updater = ReferenceUpdater(reference, policy, decay=0.75, bias_power=0.0, every=2)  # a full correction
    policy.weight.data.fill_(5.25)
    updater.step(), updater.step()
    assert reference.weight.item() == 2.25 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kl_is_0_after_a_reset_and_the_cache_knows(dtype: torch.dtype) -> None:
    policy = tiny_model("qwen2").to(dtype)
    reference = LogProbScorer(moved(policy))
    updater = ReferenceUpdater(reference, policy, decay=0.5, reset_every=2)
    before = reference.score(ONE, remember=True).values
    assert kl(policy, reference).min() > 1e-3
    updater.step()
    assert_near(reference.score(ONE, remember=True).values, reference.score(ONE).values, **FORWARD)
    assert (reference.score(ONE, remember=True).values - before).abs().max() > 1e-3
    updater.step()
    assert kl(policy, reference).abs().max() == 0
    of_policy = LogProbScorer(policy).score(ONE, remember=True).values
    assert torch.equal(reference.score(ONE, remember=True).values, of_policy)
    updater.step()
    assert kl(policy, reference).abs().max() == 0, "an average of equal weights is equal"


@pytest.mark.parametrize("own", [True, False], ids=["adapter of the policy's model", "separate model"])
def test_adapters_follow(own: bool) -> None:
    targets = ["q_proj", "up_proj"]
    policy = lora(tiny_model("qwen2"), target_modules=targets)
    if own:
        policy.add_adapter("ref", lora(policy, target_modules=targets))
    reference = LogProbScorer(policy, adapters="ref") if own else LogProbScorer(copy.deepcopy(policy))
    for name, parameter in reference.model.named_parameters():
        if "lora_" in name and (not own or ".ref." in name):
            parameter.data.mul_(2)
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
    assert all(torch.equal(weights[n], value) for n, value in trained.items())
    assert list(policy.active_adapters) == ["default"]


class Served:
    """Accepts weights like a service."""

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


@pytest.mark.parametrize("average", [{"decay": 0.9}, {"ema_power": 0.5, "bias_power": 0.2, "lag": 3}])
def test_state_is_saved_and_resumed_to_the_last_bit(average: dict[str, Any]) -> None:
    first, file = tiny_model("llama", num_hidden_layers=1), io.BytesIO()
    policies = [moved(first, seed=seed) for seed in range(6)]
    policy, reference, resumed = copy.deepcopy(first), copy.deepcopy(first), moved(first, seed=9)
    whole, updater = (
        ReferenceUpdater(each, policy, **average, every=2, reset_every=5) for each in (reference, resumed)
    )

    def run(updater: ReferenceUpdater, steps: range) -> None:
        for step in steps:
            policy.load_state_dict(policies[step].state_dict())
            updater.step()

    run(whole, range(4))
    torch.save(whole.state_dict(), file)
    run(whole, range(4, 6))
    file.seek(0)
    updater.load_state_dict(torch.load(file))
    assert updater.steps == 4
    run(updater, range(4, 6))
    assert all(map(torch.equal, reference.parameters(), resumed.parameters()))
    state, norm = whole.state_dict(), "model.norm.weight"
    rest = {n: v for n, v in state["weights"].items() if n != norm}
    for wrong in (rest, {**rest, norm: torch.zeros(1, 2)}):
        with pytest.raises(ValueError, match=r"another reference: model.norm.weight"):
            updater.load_state_dict({**state, "weights": wrong})
    start = {} if state["start"] else {norm: rest}
    with pytest.raises(ValueError, match=r"another reference: (lm_head|model)"):
        updater.load_state_dict({**state, "start": start})


def test_what_cannot_follow_is_refused() -> None:
    model, narrow = tiny_model("llama"), tiny_model("llama", vocab_size=50)
    for reference, options, message in [
        (None, {}, "pass decay= for an average"),
        (None, {"decay": 1.0}, "must be in .0, 1., got 1.0"),
        (None, {"decay": 0.5, "ema_power": 0.5}, "decay and ema_power both set"),
        (None, {"ema_power": -0.5}, "ema_power must be at least 0"),
        (None, {"decay": 0.5, "bias_power": -0.5}, "bias_power must be at least 0"),
        (None, {"reset_every": 4, "bias_power": 0.5}, "pass decay= for an average"),
        (None, {"decay": 0.5, "lag": 0}, "lag must be at least 1"),
        (None, {"reset_every": 0}, "reset_every must be at least 1, got 0"),
        (None, {"reset_every": 4, "every": 2}, "pass decay= for an average"),
        (model, {"decay": 0.5}, "share weights: pass a copy"),
        (tiny_model("llama", num_hidden_layers=1), {"decay": 0.5}, r"These differ: .'model.layers.1"),
        (narrow, {"decay": 0.5}, r"embed_tokens.weight: torch.float32.50, 32. cannot follow torch.float32.97"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(reference or copy.deepcopy(model), model, **options)
    with pytest.raises(TypeError, match=r"reference must be a model, got 'base': load it first"):
        ReferenceUpdater("base", model, decay=0.5)


def test_adapters_that_cannot_follow_are_refused() -> None:
    policy = lora(tiny_model("qwen2"))
    policy.add_adapter("ref", lora(policy))
    policy.add_adapter("wide", lora(policy, target_modules=["q_proj", "v_proj"]))
    policy.add_adapter("rank", lora(policy, r=2))
    policy.add_adapter("scaled", lora(policy, lora_alpha=32))  # the same weights times another factor: another model
    for adapters, message in [
        (False, "share weights: pass a copy"),
        ("default", "'default' must follow another active adapter, found .'default'"),
        ("wide", "of the same names.*v_proj"),
        ("rank", r"q_proj.lora_A.rank.weight: torch.float32.2, 32. cannot follow torch.float32.4, 32."),
        ("scaled", r"'scaled' scales weights by 8\.0, 'default' by 2\.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(LogProbScorer(policy, adapters=adapters), policy, decay=0.5)


def step() -> TensorDict:
    """A step with a prompt of two tokens and a reward of 1."""
    data = TensorDict(tokens=TensorDict(prompt=IDS[None, :2], full=IDS[None], batch_size=[1]), batch_size=[1])
    data["next"] = TensorDict(reward=torch.ones(1, 1), batch_size=[1])
    return data


def with_two_adapters() -> tuple[Any, Any]:
    """A model with the adapters "default" (active) and "ref", partly on other layers, and a copy with "ref" active."""
    model = lora(tiny_model("qwen2"), target_modules=["q_proj", "v_proj", "up_proj"])
    model.add_adapter("ref", lora(model, r=2, target_modules=["q_proj", "o_proj"]))
    alone = copy.deepcopy(model)
    alone.set_adapter("ref")
    return model, alone


@pytest.mark.parametrize(
    ("adapters", "native", "state"),
    [
        (False, False, "active"),
        (False, True, "raises"),
        ("ref", True, "active"),
        ("ref", False, "disabled"),
        ("ref", True, "disabled"),
        ("ref", False, "raises"),
    ],
)
def test_other_adapters_are_scored_and_the_models_own_restored(adapters: Any, native: bool, state: str) -> None:
    """For a PeftModel, and for transformers' own model with adapters (native)."""
    model, alone = with_two_adapters()
    model = model.get_base_model() if native else model
    want = plain_log_probs(alone if adapters else tiny_model("qwen2"), IDS)
    assert (want - plain_log_probs(model, IDS)).abs().max() > 0.05
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    if state == "disabled":
        for layer in model.modules():
            if hasattr(layer, "lora_A"):
                layer.enable_adapters(False)
    before = plain_log_probs(model, IDS)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    scorer = LogProbScorer(model, adapters=adapters)
    assert scorer.path == "head"
    if state == "raises":
        head = model.get_output_embeddings()
        with head.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            scorer.score(ONE)
    assert_near(scorer.score(ONE).values, want, **FORWARD)
    assert_near(LogProbScorer(model).score(ONE).values, before, **FORWARD)
    assert torch.equal(plain_log_probs(model, IDS), before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


def assert_adapters_are_separate(model: Any) -> None:
    """The adapter "ref" is scored as in a model where it is active, and "default" stays the active one."""
    alone = copy.deepcopy(model)
    alone.set_adapter("ref")
    want = {"ref": plain_log_probs(alone, IDS), "default": plain_log_probs(model, IDS)}
    assert (want["ref"] - want["default"]).abs().max() > 0.01
    for name, expected in want.items():
        assert_near(LogProbScorer(model, adapters=name).score(ONE).values, expected, **FORWARD)
    assert torch.equal(plain_log_probs(model, IDS), want["default"])


def test_whole_layers_of_a_named_adapter() -> None:
    """A head trained with ``modules_to_save`` belongs to the adapter too."""
    model = lora(tiny_model("qwen2"), modules_to_save=["lm_head"])
    model.add_adapter("ref", lora(model))
    next(p for n, p in model.named_parameters() if "modules_to_save.default" in n).data.mul_(1.5)
    assert_adapters_are_separate(model)


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_each_adapter_embeds_for_itself(tied: bool) -> None:
    """With ``trainable_token_indices`` each adapter has its own embeddings. A tied head reads the same rows."""
    tokens = {"trainable_token_indices": [9, 40]}
    model = lora(tiny_model("qwen2", tie_word_embeddings=tied), **tokens)
    model.add_adapter("ref", lora(model, **tokens))
    rng = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += torch.randn(parameter.shape, generator=rng)
    assert_adapters_are_separate(model)


TRAINED_BESIDE = {
    "bias='all'": (lambda model: lora(model, bias="all"), r"PeftModel.* trains 6 parameters outside its adapters"),
    "bias='lora_only'": (lambda model: lora(model, bias="lora_only"), r"trains 2 parameters .*\.base_layer\.bias: "),
    "norm": (lambda model: lora(model).requires_grad_(), r"each step would move the reference"),
}


@pytest.mark.parametrize("name", TRAINED_BESIDE)
def test_a_reference_that_training_would_move_is_refused(name: str) -> None:
    """The scorer refuses at construction, and later in the next call. Parameters of an adapter may be trained."""
    make, message = TRAINED_BESIDE[name]
    model = make(tiny_model("qwen2"))
    for adapters in (False, "default"):
        with pytest.raises(ValueError, match=message):
            LogProbScorer(model, adapters=adapters)
    with pytest.raises(ValueError, match=r"Freeze them .*or pass a frozen copy"):
        RetrieveKL(model, "base")(step())
    LogProbScorer(model).score(ONE)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name)
    scorer = LogProbScorer(model, adapters=False)
    assert_near(scorer.score(ONE).values, plain_log_probs(tiny_model("qwen2"), IDS), **FORWARD)
    model.get_base_model().model.norm.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"1 parameters .*model\.norm\.weight: each step"):
        scorer.score(ONE)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: each step"):
        LogProbScorer(model).evaluate(ONE, reference=scorer)


@pytest.mark.parametrize(
    "kind", ["PromptTuningConfig", "PrefixTuningConfig", "IA3Config", "LNTuningConfig", "TrainableTokensConfig"]
)
def test_parameters_of_every_kind_of_adapter_may_be_trained(kind: str) -> None:
    peft = pytest.importorskip("peft")
    settings = {
        "PromptTuningConfig": {"num_virtual_tokens": 2},
        "PrefixTuningConfig": {"num_virtual_tokens": 2},
        "IA3Config": {"target_modules": ["k_proj"], "feedforward_modules": []},
        "LNTuningConfig": {"target_modules": ["norm"]},
        "TrainableTokensConfig": {"target_modules": ["embed_tokens"], "token_indices": [9]},
    }[kind]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(tiny_model("qwen2"), config).eval()
    assert any(parameter.requires_grad for parameter in model.parameters())
    found = LogProbScorer(model, adapters=False).score(ONE).values
    assert_near(found, plain_log_probs(tiny_model("qwen2"), IDS), **FORWARD)


def test_adapters_that_are_refused() -> None:
    model, _ = with_two_adapters()
    for adapters, message in [
        (False, "grad=True with adapters=False"),
        ("ref", r"grad=True with adapters='ref', a reference.*adapters=True"),
    ]:
        with pytest.raises(ValueError, match=message):
            LogProbScorer(model, adapters=adapters).score(ONE, grad=True)
        with pytest.raises(ValueError, match=r"has no PEFT adapters to switch off.*get_peft_model"):
            LogProbScorer(tiny_model(), adapters=adapters)
    message = r"has the adapters \['default', 'ref'\], not 'old'"
    with pytest.raises(ValueError, match=message):
        LogProbScorer(model, adapters="old")
    with pytest.raises(TypeError, match="adapters must be True, False or a name, got None"):
        ScoreOptions(adapters=None)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its weights.*unmerge_adapter"):
        LogProbScorer(model, adapters=False)


@pytest.mark.filterwarnings("ignore:KL estimator 'k2' in the reward")
def test_a_policy_against_its_own_named_adapter() -> None:
    model, alone = with_two_adapters()
    data = step()
    transform = RetrieveKL(model, "base", extras=[Adapters("ref", of="reference")])
    found = transform(data.clone())
    assert_near(found["next", "log_probs", "full"][0, 2:], plain_log_probs(model, IDS)[2:], **FORWARD)
    options = {"reference": LogProbScorer(model, adapters="ref"), "group_size": 2}
    made = [make_algorithm("grpo", model, **options, **{kl: "k2"}) for kl in ("kl_reward", "kl_loss")]
    for each in (found, *(parts.kl_transform(data.clone()) for parts in made)):
        assert_near(each["next", "ref_log_probs", "full"][0, 2:], plain_log_probs(alone, IDS)[2:], **FORWARD)
    transform.options = transform.options.but(adapters=False)
    assert [part.scorer.options.adapters for part in transform.transforms[:2]] == [False, "ref"]
    with pytest.raises(ValueError, match=r"Adapters\(True, of=\"reference\"\) is the policy itself"):
        RetrieveKL(model, "base", extras=[Adapters(True, of="reference")])
