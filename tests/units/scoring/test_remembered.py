"""Remembered scores: hits, misses, and the bits of a hit, which are those of the first computation."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near, rows_keep_their_bits
from scoring_reference import FakeBackend, body_tokens, engine, plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl import LogProbScorer, PolicyLoss, ScoreOptions, ScoreStore, prepare_reference
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import ReferenceUpdater, RememberedModel, Scorer, ScoreRequest, Scores, fingerprint_of
from torchrl_llm_kl.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD, tiny_model, with_lora
from toy_tokenizer import build_tokenizer

SEQUENCES = random_sequences(9, 1, 12, 0, 5)
EVERYTHING = int((SEQUENCES.positions > 0).sum())
Remember = Callable[..., Any]


@pytest.fixture
def remember(tmp_path: Path) -> Remember:
    """A scorer that remembers in the test's folder."""
    return lambda model, **settings: RememberedModel(model, tmp_path).make_scorer(**settings)


def forwards(model: nn.Module) -> list[int]:
    """A list that grows with each forward of the model."""
    calls: list[int] = []
    layers = [module for name, module in model.named_modules() if name.endswith("layers.0")]
    layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def is_forwarded(scorer: Any, calls: list[int], sequences: Any = SEQUENCES, **options: Any) -> bool:
    """Whether a call runs the model."""
    before = len(calls)
    scorer.evaluate(sequences, **options)
    return len(calls) > before


def wrapped(model: nn.Module, **tokenizer: Any) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=build_tokenizer(**tokenizer), generate=False, input_mode="tokens")


def assert_as_plain(scorer: Any, model: nn.Module, **settings: Any) -> torch.Tensor:
    """Two calls give the same bits as a scorer without a store."""
    want = LogProbScorer(model, **settings).score(SEQUENCES).values
    assert all(torch.equal(scorer.score(SEQUENCES).values, want) for _ in range(2))
    return want


def test_the_second_epoch_makes_no_forward(remember: Remember) -> None:
    model, mask = tiny_model(), random_mask(SEQUENCES)
    calls, scorer = forwards(model), remember(model, temperature=0.7)
    first = scorer.score(SEQUENCES, mask)
    assert_near(first.values, plain_log_probs(model, SEQUENCES, mask, temperature=0.7).detach(), **FORWARD)
    assert torch.equal(first.values, LogProbScorer(model, temperature=0.7).score(SEQUENCES, mask).values)
    done = len(calls)
    again = scorer.score(SEQUENCES, mask)
    assert torch.equal(again.values, first.values)
    assert again.values.dtype == first.values.dtype
    backwards = [row.tolist() for row in SEQUENCES.to_list()[::-1]]
    shuffled = scorer.score(backwards, Ragged.from_list(SEQUENCES.like(mask).to_list()[::-1]).values)
    assert torch.equal(torch.cat(shuffled.to_list()[::-1]), first.values)
    assert len(calls) == done
    assert scorer.model.store.tokens_recalled == 2 * int(mask.sum())


def test_another_run_or_a_copy_finds_the_scores(remember: Remember, tmp_path: Path) -> None:
    first = RememberedModel(tiny_model(), tmp_path)
    scorer, plain = first.make_scorer(), LogProbScorer(tiny_model()).evaluate(SEQUENCES, entropy=True)
    log_probs = scorer.score(SEQUENCES).values
    want = scorer.evaluate(SEQUENCES, entropy=True)
    assert torch.equal(want.log_prob.values, log_probs)
    assert torch.equal(want.entropy.values, plain.entropy.values)
    for twin in (RememberedModel(tiny_model(), tmp_path), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        calls, scorer = forwards(twin.model), twin.make_scorer()
        assert not is_forwarded(scorer, calls, entropy=True)
        found = scorer.evaluate(SEQUENCES, entropy=True)
        assert torch.equal(found.log_prob.values, want.log_prob.values)
        assert torch.equal(found.entropy.values, want.entropy.values)


def test_only_what_is_missing_is_forwarded(remember: Remember) -> None:
    model, some = tiny_model(), random_mask(SEQUENCES, keep=0.3)
    scorer = remember(model)
    first = scorer.score(SEQUENCES, some).values
    both = scorer.score(SEQUENCES, SEQUENCES.positions > 0).values
    assert torch.equal(both[some], first[some])
    assert_near(both, plain_log_probs(model, SEQUENCES).detach(), **FORWARD)
    assert body_tokens(model, lambda: scorer.score([*SEQUENCES.to_list(), torch.tensor([3, 4, 5])])) == 2
    # Gradients and other scores come from the model.
    assert scorer.score(SEQUENCES, grad=True).values.requires_grad
    found = scorer.evaluate(SEQUENCES, top_k=3, moments=True, reference=LogProbScorer(tiny_model(seed=1)))
    assert None not in (found.top_indices, found.collision, found.kl)


def test_a_float64_model_and_a_padded_batch(remember: Remember) -> None:
    model = tiny_model().double()
    scorer, ids, real = remember(model), torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]]), torch.arange(8).reshape(2, 4) != 3
    first, again = (scorer.score(ids, attention_mask=real).restore() for _ in range(2))
    assert (first.dtype, first.shape) == (torch.float64, ids.shape)
    assert torch.equal(first, again)
    assert torch.equal(first, LogProbScorer(model).score(ids, attention_mask=real).restore())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one weight in place, as an optimiser": (
        lambda model: model.model.layers[1].mlp.down_proj.weight.detach()[3, 5].add_(0.5)
    ),
    "through data: no version counter moves": lambda model: [p.data.mul_(1.01) for p in model.parameters()],
    "replaced": lambda model: setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight * 1.5)),
    "configuration": lambda model: setattr(model.config, "logits_scaling", 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_misses(remember: Remember, change: str) -> None:
    model = tiny_model("granite")
    scorer, saved = remember(model), copy.deepcopy(model)
    before = scorer.score(SEQUENCES).values
    CHANGES[change](model)
    assert not torch.equal(assert_as_plain(scorer, model), before)
    old, calls = RememberedModel(saved, scorer.model.store).make_scorer(), forwards(saved)
    assert not is_forwarded(old, calls)
    assert torch.equal(old.score(SEQUENCES).values, before)


def test_weights_changed_from_outside_miss(remember: Remember) -> None:
    """Through ``.data`` (after ``forget``), by an updater, or as a wrapper's new model."""
    reference, policy, wrapper = tiny_model(seed=0), tiny_model(seed=1), wrapped(tiny_model())
    scorer = remember(reference)
    scorer.score(SEQUENCES)
    reference.model.layers[0].mlp.up_proj.weight.data[0, 1] += 3.0
    scorer.forget()
    assert_as_plain(scorer, reference)
    updater = ReferenceUpdater(reference, policy, decay=0.5)
    for _ in range(2):
        updater.step()
        assert_as_plain(scorer, reference)
    assert scorer.model.store.tokens_recalled == 3 * EVERYTHING  # of the second calls
    scorer = remember(wrapper)
    scorer.score(SEQUENCES)
    wrapper.model = tiny_model(seed=1)
    assert_as_plain(scorer, wrapper.model)


def test_adapters_miss(remember: Remember) -> None:
    model = with_lora(tiny_model())
    active = remember(model)
    first = active.score(SEQUENCES).values
    assert_as_plain(active.model.make_scorer(adapters=False), model, adapters=False)  # of one store
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 5.0)
    assert not torch.equal(assert_as_plain(active, model), first)


def test_another_tokenizer_misses(remember: Remember) -> None:
    def scored(**options: Any) -> int:
        scorer = remember(wrapped(tiny_model(), **options))
        scorer.score(SEQUENCES)
        return scorer.model.store.tokens_recalled

    assert [scored(), scored(), scored(merges=[("h", "i")]), scored()] == [0, EVERYTHING, 0, EVERYTHING]


def test_other_settings_and_other_tokens_miss(remember: Remember, tmp_path: Path) -> None:
    model = tiny_model()
    calls, reference = forwards(model), RememberedModel(model, tmp_path)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"dtype": torch.bfloat16}]
    settings += [{"deterministic": True}] if rows_keep_their_bits() else []
    for each in settings:
        scorer = reference.make_scorer(**each)
        assert is_forwarded(scorer, calls), each
        assert_as_plain(scorer, model, **each)
    for each in settings:
        assert not is_forwarded(reference.make_scorer(**each), calls)
    scorer, ids = reference.make_scorer(), SEQUENCES.values.clone()
    ids[1] += 1
    assert is_forwarded(scorer, calls, SEQUENCES.like(ids))
    narrow = reference.make_scorer(dtype=torch.bfloat16).score(SEQUENCES).values
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scorer.score(SEQUENCES).values, narrow)
        assert is_forwarded(scorer, calls, SEQUENCES.like(ids))


def test_scores_over_a_record_are_not_remembered(remember: Remember) -> None:
    """A record of kept tokens changes the distributions of the same sequence."""
    model = tiny_model()
    scorer, count = remember(model), len(SEQUENCES.values)
    own = SEQUENCES.values.repeat_interleave(2) + torch.tensor([0, 1]).repeat(count)
    kept = Kept(own % 97, torch.arange(count + 1) * 2)  # each token and the next id
    over = scorer.score(ScoreRequest.of(SEQUENCES, kept=kept))
    plain = assert_as_plain(scorer, model)
    assert not torch.allclose(over.values, plain)
    assert torch.equal(scorer.score(ScoreRequest.of(SEQUENCES, kept=kept)).values, over.values)


class Scaled(nn.Module):
    """Logits that depend on an attribute."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.weight = scale, nn.Parameter(torch.linspace(0, 1, 97))

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return ((self.weight * self.scale).expand(*input_ids.shape, 97),)


class Doubled(Scaled):
    __qualname__ = Scaled.__qualname__

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(input_ids)[0] * 2,)


@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
def test_models_with_equal_weights_and_other_code_miss(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    models = [Scaled(1.0), Scaled(2.0), Doubled(1.0), tiny_model(seed=0), tiny_model(seed=1)]
    found = [RememberedModel(model, store).make_scorer().score(SEQUENCES).values for model in models]
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    assert store.tokens_recalled == 0
    for model in models[3:]:
        assert_as_plain(RememberedModel(model, store).make_scorer(), model)
    assert store.tokens_recalled == 4 * EVERYTHING


def test_another_backend_needs_a_stated_fingerprint(tmp_path: Path) -> None:
    module = tiny_model()
    backend = engine(module)
    wrapper = FakeBackend(backend, tokenizer_kwargs={"padding": True})
    with pytest.raises(TypeError, match="FakeBackend has no weights in this process: pass a text"):
        RememberedModel(wrapper, tmp_path)
    scorer = RememberedModel(wrapper, tmp_path, fingerprint="step 100").make_scorer()
    first = scorer.score(SEQUENCES)
    assert_near(first.values, plain_log_probs(module, SEQUENCES).detach(), **FORWARD)
    sent = len(backend.requests)
    with pytest.raises(ValueError, match=r"temperature=2\.0 is not supported by FakeBackend"):
        scorer.options = scorer.options.but(temperature=2.0)
    assert torch.equal(scorer.score(SEQUENCES).values, first.values)
    assert len(backend.requests) == sent
    RememberedModel(wrapper, scorer.model.store, fingerprint="step 200").make_scorer().score(SEQUENCES)
    assert len(backend.requests) > sent
    with pytest.raises(ValueError, match="entropy=True is not supported by FakeBackend"):
        scorer.evaluate(SEQUENCES, entropy=True)


def test_errors_name_the_sequence_of_the_call_and_nan_is_never_stored(remember: Remember) -> None:
    model = tiny_model()
    scorer = remember(model)
    scorer.score([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="token id 97 at sequence 2, position 1"):
        scorer.score([[1, 2], [3, 4], [5, 97]])
    with pytest.raises(ValueError, match="the mask selects the first token of sequence 1"):
        scorer.score([[1, 2], [3, 4]], [[False, True], [True, True]])
    with pytest.raises(TypeError, match="model is a scorer: pass its model"):
        RememberedModel(LogProbScorer(model), "unused")
    stored = scorer.model.store.num_bytes
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="log-prob is nan"):
            scorer.score(SEQUENCES)
    assert scorer.model.store.num_bytes == stored


@pytest.mark.parametrize("stated", [None, "step 100"])
def test_a_model_over_several_ranks_is_refused(tmp_path: Path, stated: str | None) -> None:
    # Gloo has threads, one of which may wait for Python's lock when this one waits for its end.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        reference = RememberedModel(nn.parallel.DistributedDataParallel(tiny_model()), tmp_path, fingerprint=stated)
        with pytest.raises(ValueError, match="wrapped or sharded over ranks"):
            reference.make_scorer().score(SEQUENCES)
        with pytest.raises(ValueError, match="take the fingerprint before it is sharded"):
            fingerprint_of(reference.model)
    finally:
        torch.distributed.destroy_process_group()


class Service(Scorer):
    """A proxy of a service. Weights have versions, and a push may come at any time."""

    models: list[nn.Module]

    def __init__(self) -> None:
        self.models = [tiny_model(seed=0), tiny_model(seed=1)]
        self.version, self.requests = 0, 0
        self.options, self.path = ScoreOptions(), "remote"
        self.push_before_reply = self.push_after_reply = False

    def make_scorer(self, **settings: Any) -> "Service":
        return self

    def fingerprint(self) -> tuple[int, str] | None:
        return self.version, fingerprint_of(self.models[self.version])

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Callable[[], Scores]:
        self.requests += 1

        def finish() -> Scores:
            self.version |= self.push_before_reply
            version = self.version
            self.version |= self.push_after_reply
            return LogProbScorer(self.models[version]).run(request, options)._replace(version=version)

        return finish

    def run(self, request: ScoreRequest, options: Any = None, *, reference: Any = None) -> Scores:
        return self.begin(request, options)()


@pytest.mark.parametrize("when", ["push_before_reply", "push_after_reply"])
def test_a_push_during_a_call_stores_nothing_wrong(remember: Remember, when: str) -> None:
    service = Service()
    want = [LogProbScorer(model).score(SEQUENCES).values for model in service.models]
    scorer = remember(service)
    scorer.score(SEQUENCES.to_list()[:2])  # a part is known before the push
    setattr(service, when, True)
    finish = scorer.begin(ScoreRequest.of(SEQUENCES))
    assert service.requests == 2, "sent before the reply is awaited"
    during = finish()
    assert during.version == (1 if when == "push_before_reply" else 0)
    assert_near(during.log_prob.values, want[during.version], **FORWARD)
    setattr(service, when, False)
    for version in (1, 0, 1):
        service.version = version
        assert_near(scorer.score(SEQUENCES).values, want[version], **FORWARD)
    sent = service.requests
    scorer.score(SEQUENCES)
    assert service.requests == sent


def test_a_fingerprint_is_stable(tmp_path: Path) -> None:
    table = nn.Embedding.from_pretrained(torch.arange(6.0).view(2, 3))
    assert fingerprint_of(table) == "bced6b2db7f567f83a97d7bdaf773397", "also in other processes and releases"
    model = tiny_model()
    found = fingerprint_of(model)
    LogProbScorer(model).score(SEQUENCES)
    model.train().requires_grad_(False)
    model.save_pretrained(tmp_path)
    for same in (model, type(model).from_pretrained(tmp_path), wrapped(model)):
        assert fingerprint_of(same) == found
    with pytest.raises(NotImplementedError, match="no data"):
        fingerprint_of(nn.Linear(2, 2, device="meta"))


def test_any_change_of_a_tensor_changes_the_fingerprint() -> None:
    model = tiny_model()
    seen = {fingerprint_of(model)}
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        before = flat[-1].clone()
        flat[-1] = torch.nextafter(before, torch.tensor(9.0))
        seen.add(fingerprint_of(model))
        flat[-1] = before
    assert fingerprint_of(model) in seen
    int8 = prepare_reference(copy.deepcopy(model), dtype=torch.int8)
    others = [copy.deepcopy(model).bfloat16(), int8, tiny_model(rms_norm_eps=1e-3), tiny_model("llama")]
    others.append(nn.Sequential(model))
    seen |= {fingerprint_of(other) for other in others}
    assert len(seen) == 1 + len(list(model.parameters())) + len(others)


def test_tensors_that_are_views_scalars_or_empty() -> None:
    module, twin = nn.Module(), nn.Module()
    module.register_buffer("t", torch.arange(12.0).view(3, 4).t())
    module.register_buffer("scalar", torch.tensor(3))
    module.register_buffer("empty", torch.zeros(0, 2, dtype=torch.bfloat16))
    module.register_buffer("flags", torch.tensor([True, False]))
    for name, buffer in module.named_buffers():
        twin.register_buffer(name, buffer.contiguous().clone())
    assert fingerprint_of(module) == fingerprint_of(twin)
    twin.get_buffer("flags")[1] = True
    assert fingerprint_of(module) != fingerprint_of(twin)


def test_a_transform_and_a_loss_take_a_remembered_reference(tmp_path: Path) -> None:
    """The second time all scores come from the store."""
    policy, reference = tiny_model(seed=1), tiny_model()
    full = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    tokens = TensorDict(full=full, prompt=full[:, :3], batch_size=[2])
    data = TensorDict(tokens=tokens, next=TensorDict(reward=torch.ones(2, 1), batch_size=[2]), batch_size=[2])
    remembered = RememberedModel(reference, tmp_path)

    def scored(model: nn.Module) -> list[torch.Tensor]:
        kl = RetrieveKL(policy, model)(data.clone())["next", "kl_penalty"]
        legacy = KLRewardTransform(model)(RetrieveLogProb(policy)(data.clone()))["next", "ref_log_probs"]
        batch = data.clone().set("advantage", torch.ones(2, 1)).set(("log_probs", "full"), torch.zeros(2, 7))
        loss = PolicyLoss(policy, "ppo", terms=[KLToReference(0.1, estimator="k3")], reference=model)(batch)
        return [kl, legacy, loss["loss_kl_to_ref"].detach()]

    expected = scored(reference)
    for found, want in zip(scored(remembered), expected, strict=True):
        assert_near(found, want, **FORWARD)
    store = remembered.store
    seen, recalled = store.tokens_seen, store.tokens_recalled
    scored(remembered)
    assert store.tokens_seen - seen == store.tokens_recalled - recalled > 0
