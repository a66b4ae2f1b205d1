"""The scorer: every layout of the tokens, every score, every way to run a model."""

from typing import Any

import pytest
import torch
from torch import nn

from byte_texts import small_tokenizer
from checkpointed import enable
from image_models import IMAGE, image_model, num_placeholders, picture
from layouts import tokens
from parity import CPU, gradients, same_on_both, to
from scoring_reference import FakeBackend, FullLogits, conversation, engine, random_mask
from torchrl_llm_kl import ByteTeacher, LogProbScorer, Ragged, RememberedModel, Sampling, prepare_reference
from torchrl_llm_kl.scoring import ReferenceUpdater, ScoreRequest, TokenCritic
from toy_models import EXPERT_FAMILIES, FAMILIES, VOCAB_SIZE, tiny_model, with_lora

pytestmark = pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
BATCH = Ragged.from_list(conversation())
MASK = random_mask(BATCH)
TOP_IDS = (7 * torch.arange(len(BATCH.values)).unsqueeze(-1) + torch.tensor([0, 13, 26])) % VOCAB_SIZE
EVERYTHING: dict[str, Any] = {"entropy": True, "top_k": 3, "moments": True}
TRUNCATED = Sampling(0.9, top_k=20, top_p=0.9, min_p=0.02)
#: Settings of the scorer, and requested scores.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packs": ({"tokens_per_batch": 17}, EVERYTHING),
    "padded": ({"share_prefixes": False, "tokens_per_batch": 40}, EVERYTHING),
    "hot": ({"temperature": 0.7, "head_chunk": 5}, EVERYTHING),
    "top-k": ({"sampling": Sampling(0.7, top_k=5)}, {"entropy": True, "return_kept": True}),
    "top-p": ({"sampling": Sampling(1.3, top_p=0.8)}, {"entropy": True}),
    "top-p-whole": ({"sampling": Sampling(2.0, top_p=0.999)}, {"entropy": True}),
    "all-kinds": ({"sampling": TRUNCATED}, {"entropy": True, "moments": True}),
    "remember": ({"remember": True}, {}),
    "autocast": ({"dtype": torch.bfloat16}, {}),
}


def wide(family: str = "qwen2", seed: int = 0) -> nn.Module:
    """A model in float64, where the order of summation has no visible effect."""
    return tiny_model(family, seed=seed).double()


def everything(scorer: LogProbScorer, at: torch.device, **options: Any) -> Any:
    tokens_, mask, ids = to((BATCH, MASK, TOP_IDS), at)
    request = ScoreRequest.of(tokens_, mask, top_ids=ids if "top_k" in options else None)
    return scorer.evaluate(request, **options)


@pytest.mark.parametrize("case", CASES)
@same_on_both(size=lambda case: 2e-2 if case == "autocast" else 1e-5)
def test_scores(model_at, at, case):
    settings, asked = CASES[case]
    scorer = LogProbScorer(tiny_model("llama").to(model_at), **settings)
    return [everything(scorer, at, **asked) for _ in range(2 if case == "remember" else 1)]


@pytest.mark.parametrize("case", ["packs", "padded", "top-p", "all-kinds"])
@same_on_both(size=1e-5)
def test_gradients(model_at, at, case):
    settings, asked = CASES[case]
    model = wide("gemma2").to(model_at)
    keep = {name: x for name, x in asked.items() if name == "entropy"}
    return gradients(everything(LogProbScorer(model, **settings), at, grad=True, **keep), model)


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
@same_on_both(size=lambda family: 2e-4 if family in EXPERT_FAMILIES else 1e-5)  # experts have no float64 everywhere
def test_families(model_at, at, family):
    scorer = LogProbScorer((tiny_model if family in EXPERT_FAMILIES else wide)(family).to(model_at))
    return scorer.path, scorer.shares_prefixes, everything(scorer, at, **EVERYTHING)


@pytest.fixture
def convolutions_on_the_host(monkeypatch):
    """The simulated accelerator has no convolutions."""
    for kind in (nn.Conv2d, nn.Conv3d):

        def moved(self, x, weight, bias, own=kind._conv_forward):
            return own(self, x.cpu(), weight.cpu(), None if bias is None else bias.cpu()).to(x.device)

        monkeypatch.setattr(kind, "_conv_forward", moved)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm"])
@pytest.mark.filterwarnings("ignore:Image tokens attend")
@same_on_both(size=1e-4)
def test_scores_with_images(model_at, at, family, convolutions_on_the_host):
    model, images = image_model(family), [picture(family, 1), picture(family, 1), None, picture(family, 2)]
    count = num_placeholders(model, images[0])[0]
    rows = [[1, 7, *[IMAGE] * (count if image else 0), 8, *[20, 21] * 9, 30 + i] for i, image in enumerate(images)]
    weight = next(p for name, p in model.named_parameters() if "patch_embed" in name)
    scorer = LogProbScorer(model.to(model_at))
    ragged = Ragged.from_list([torch.tensor(row, device=at) for row in rows])
    found = scorer.score(ScoreRequest.of(ragged, images=images), grad=True).values
    assert found.device == at
    (gradient,) = torch.autograd.grad(found.sum(), [weight])
    largest = gradient.abs().max()
    return found, gradient / (10 * largest), largest.log() / 10  # each to a thousandth of the largest


@pytest.mark.parametrize("layout", ["padded", "nested", "jagged", "list", "ragged"])
@same_on_both()
def test_layouts_of_the_tokens(model_at, at, layout):
    scorer = LogProbScorer(tiny_model().to(model_at))
    if layout in ("list", "ragged"):
        rows = to(conversation(), at)
        return scorer.score(rows if layout == "list" else Ragged.from_list(rows))
    data = tokens(layout).to(at)
    if layout == "padded":
        return scorer.score(data["tokens", "full"], attention_mask=data["masks", "all_attention_mask"])
    return scorer.score(data["tokens", "full"])


@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
@same_on_both()
def test_the_exact_kl(model_at, at, direction):
    model, reference = (wide(seed=seed).to(model_at) for seed in range(2))
    found = everything(LogProbScorer(model), at, reference=LogProbScorer(reference), direction=direction, grad=True)
    return found, gradients(found.kl, model)


@same_on_both()
def test_other_modules_and_wrappers(model_at, at):
    scorer = LogProbScorer(FullLogits(wide()).to(model_at))
    backend = LogProbScorer(FakeBackend(engine(tiny_model())))  # an engine whose log-probs are of the CPU
    return everything(scorer, at, entropy=True), everything(backend, at)


@pytest.mark.parametrize("how", ["bfloat16", "int8", "offloaded", "offloaded-int8"])
@same_on_both(size=lambda how: 2e-2 if how == "bfloat16" else 1e-5)
def test_references(model_at, at, how):
    dtype = {"bfloat16": torch.bfloat16, "offloaded": None}.get(how, torch.int8)
    offload = {"offload_to": model_at} if "offloaded" in how else {}
    model = prepare_reference(tiny_model("llama"), dtype=dtype, **offload)
    scorer = LogProbScorer(model if offload else model.to(model_at))
    return [everything(scorer, at, **EVERYTHING) for _ in range(2)][-1].log_prob


@pytest.mark.parametrize("kind", ["head", "full"])
@same_on_both()
def test_a_teacher_with_another_tokenizer(model_at, at, kind):
    model = tiny_model(vocab_size=8).double()
    teacher = small_tokenizer("a", "b", "c", "bc", "aa", "ba", "bca")
    scored = ByteTeacher(
        (model if kind == "head" else FullLogits(model)).to(model_at), teacher, small_tokenizer("a", "b", "c", "ab")
    )
    rows = Ragged.from_list([torch.tensor([2, 0, 1, 2, 0, 4]), torch.tensor([0, 1, 2, 3, 0, 0])])
    return scored.make_scorer().bounds(*to((rows, rows.positions > 1), at))


@same_on_both()
def test_adapters(model_at, at):
    torch.manual_seed(0)
    model = with_lora(wide("llama")).to(model_at)
    policy, base = LogProbScorer(model), LogProbScorer(model, adapters=False)
    found = everything(policy, at, reference=base, grad=True)
    return found, gradients(found.kl, model)


@same_on_both()
def test_checkpointing(model_at, at):
    model: Any = wide("llama").to(model_at).train()
    enable(model)
    return gradients(everything(LogProbScorer(model), at, grad=True), model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@same_on_both(size=2e-4)
def test_routing_is_recorded_and_replayed(model_at, at, family):
    model = tiny_model(family).to(model_at)
    recorded = everything(LogProbScorer(model), at, record_routing=True)
    replayed = LogProbScorer(model).score(ScoreRequest.of(to(BATCH, at), to(MASK, at), routing=recorded.routing))
    return recorded, replayed


@same_on_both()
def test_kept_tokens_are_replayed(model_at, at):
    policy, reference = (LogProbScorer(tiny_model(seed=seed).to(model_at), sampling=TRUNCATED) for seed in range(2))
    found = everything(policy, at, return_kept=True)
    return reference.evaluate(ScoreRequest.of(to(BATCH, at), to(MASK, at), kept=found.kept), entropy=True)


@same_on_both()
def test_scores_are_remembered_on_disk(model_at, at, tmp_path):
    folder = tmp_path / f"{model_at}-{at}".replace(":", "")
    model = RememberedModel(tiny_model().to(model_at), folder)
    return [everything(model.make_scorer(), at) for _ in range(2)]


@same_on_both()
def test_explanations(model_at, at):
    return vars(LogProbScorer(tiny_model().to(model_at)).explain(to(conversation(), at), row=2, token=30))


@same_on_both(size=1e-5)
def test_critics(model_at, at):
    critic = TokenCritic(wide()).to(model_at)
    nn.init.ones_(critic.head.weight)
    values = critic(to(BATCH, at), to(MASK, at))
    return values, gradients(values, critic)


@same_on_both()
def test_a_reference_follows_the_policy(model_at, at):
    policy, reference = (tiny_model(seed=seed).to(model_at) for seed in range(2))
    scorer = LogProbScorer(reference)
    before, updater = everything(scorer, at), ReferenceUpdater(reference, policy, decay=0.3, reset_every=2)
    averaged = (updater.step(), everything(scorer, at))
    return before, averaged, (updater.step(), everything(scorer, at))


@same_on_both()
def test_a_reference_on_the_second_device(model_at, at):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    reference = tiny_model(seed=1).to(CPU if model_at == CPU else torch.device(model_at.type, 1))
    return [everything(LogProbScorer(each), at) for each in (tiny_model().to(model_at), reference)]


def test_an_explanation_names_the_attention(device):
    """A small pack of pieces in float32 attends in one call, on any accelerator."""
    found = LogProbScorer(tiny_model().to(device)).explain(conversation(), row=2, token=30)
    assert found.attention.startswith("all pieces in one call with a mask, since the variable-length kernel needs half")
