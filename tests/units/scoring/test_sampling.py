"""Scores under a truncated sampler equal masked softmaxes of the plain model's logits. A mismatch with a sampler is found."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import GenerationConfig, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from closeness import assert_near, needs_equal_rows
from scoring_reference import FullLogits, ids, make_scorer, random_mask, random_sequences
from torchrl_llm_kl import LogProbScorer, RememberedModel, RetrieveLogProb, Sampling, ScoreOptions
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import SamplerMismatchWarning, ScoreRequest, as_sampling, warn_of_mismatch
from torchrl_llm_kl.scoring._wrapper import mismatch_of, sampler_of
from toy_models import FORWARD, VOCAB_SIZE, tiny_model

SAMPLINGS = [
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(0.5, min_p=0.1),
    Sampling(0.9, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(2.0, top_p=0.999),  # nearly all: whole rows of the head
]
CASES = [*((sampling, "packed") for sampling in SAMPLINGS), (SAMPLINGS[3], "padded"), (SAMPLINGS[3], "full")]
# Float32 results of a float64 model.
ROUNDED = {"size": 16, "dtype": torch.float32}


def plain_logits(model, row):
    """Logits that predict each token except the first, ``[T - 1, V]``."""
    return model(input_ids=row[None]).logits[0, :-1]


def keep_of(logits, sampling, targets):
    """The mask of the tokens that transformers' warpers keep, plus the sampled tokens."""
    scores = logits.detach() / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.isfinite().scatter(1, targets[:, None], True)


def expected(model, rows, sampling, ref=None, keeps=None):
    """Log-prob, entropy, two moments, and with ``ref`` KL and reference log-prob of predicted tokens, ``[N, 4 or 6]``."""
    out = []
    for i, row in enumerate(rows):
        logits, targets = plain_logits(model, row), row[1:]
        keep = keep_of(logits, sampling, targets) if keeps is None else keeps[i]
        log_p = (logits / sampling.temperature).masked_fill(~keep, -math.inf).log_softmax(-1)
        p, finite = log_p.exp(), log_p.masked_fill(~keep, 0.0)
        entropy = -(p * finite).sum(-1)
        discriminator = (p.square() * (entropy[:, None] + finite)).sum(-1)
        columns = [finite.gather(1, targets[:, None])[:, 0], entropy, p.square().sum(-1), discriminator]
        if ref is not None:
            logits = plain_logits(ref, row).detach() / sampling.temperature
            if sampling.reference == "kept":
                logits = logits.masked_fill(~keep, -math.inf)
            log_q = logits.log_softmax(-1)
            kl = (p * (finite - log_q).masked_fill(~keep, 0.0)).sum(-1)
            columns += [kl, log_q.gather(1, targets[:, None])[:, 0]]
        out.append(torch.stack(columns, -1))
    return torch.cat(out)


def sampled_rows(model, sampling, count=4, length=9):
    """Rows whose tokens after the first are drawn from the truncated sampler."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([ids(3, seed) for seed in range(count)])
    for _ in range(length - 3):
        logits = model(input_ids=rows).logits[:, -1].detach()
        keep = keep_of(logits, sampling, logits.argmax(-1))
        probs = (logits / sampling.temperature).masked_fill(~keep, -math.inf).softmax(-1)
        rows = torch.cat([rows, probs.multinomial(1, generator=generator)], 1)
    return list(rows)


def assert_same_gradients(found, want, model):
    pairs = [torch.autograd.grad(total, list(model.parameters()), allow_unused=True) for total in (found, want)]
    assert_close(*pairs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sampling", "kind"), CASES, ids=str)
def test_values_and_gradients(sampling, kind):
    model = tiny_model("gemma2" if kind == "packed" else "qwen2").double()
    rows = sampled_rows(model, sampling)
    scorer = make_scorer(model, kind, sampling=sampling)
    assert scorer.path == ("full" if kind == "full" else "head")
    mask = torch.tensor([False, False, False] + [True] * 6).repeat(4)
    few = sampling is not SAMPLINGS[-1]
    found = scorer.evaluate(Ragged.from_list(rows), mask, entropy=True, moments=few, grad=True)
    want = expected(model, rows, sampling).reshape(4, 8, 4)[:, 2:].reshape(-1, 4)
    got = torch.stack([found.log_prob.values, found.entropy.values], -1)[mask]
    assert_near(got, want[:, :2].to(got.dtype), **ROUNDED)
    if few:
        moments = torch.stack([found.collision.values, found.discriminator.values], -1)[mask]
        assert_close(moments.double(), want[:, 2:].detach(), atol=1e-5, rtol=1e-4)
    else:
        with pytest.raises(ValueError, match="leaves too many tokens"):
            scorer.evaluate(Ragged.from_list(rows), mask, moments=True)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=want.dtype)
    assert_same_gradients((weights * got).sum(), (weights * want[:, :2]).sum(), model)


@pytest.mark.parametrize("reference", ["whole", "kept"])
@pytest.mark.parametrize("kind", ["head", "full"])
def test_exact_kl(reference, kind):
    """The KL of a model to itself is 0 over the kept tokens, and -log of the kept mass over the whole vocabulary."""
    sampling = Sampling(0.8, top_k=8, top_p=0.9, reference=reference)
    model, ref = tiny_model().double(), tiny_model(seed=1).double()
    rows = sampled_rows(model, sampling)
    scorer = make_scorer(model, kind, sampling=sampling)
    for other in (ref, model):
        reference_scorer = make_scorer(other, kind, temperature=0.8)
        found = scorer.evaluate(Ragged.from_list(rows), reference=reference_scorer, entropy=True)
        want = expected(model, rows, sampling, other)[:, [0, 1, 4, 5]]
        columns = (found.log_prob, found.entropy, found.kl, found.ref_log_prob)
        got = torch.stack([each.values for each in columns], -1)[found.kl.positions > 0]
        assert_near(got.double(), want, **ROUNDED)
        assert float(got[:, 2].min()) >= -1e-9
    assert bool((got[:, 2] > 1e-3).any()) == (reference == "whole")


@needs_equal_rows
def test_deterministic():
    """Scores are the same to the last bit in any batch."""
    model, sampling = tiny_model(), Sampling(top_k=6)
    rows = sampled_rows(model, sampling)
    scorer = LogProbScorer(model, sampling=sampling, deterministic=True)
    together = scorer.score(Ragged.from_list(rows)).to_list()
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(scorer.score(Ragged.from_list([row])).values, found)
    with pytest.raises(ValueError, match="deterministic=True excludes images, kept= and return_kept=True"):
        scorer.evaluate(rows, return_kept=True)


def test_cache_and_store_know_the_sampler(tmp_path):
    model, rows = tiny_model(), Ragged.from_list([ids(30, 0)])
    wanted = {}
    for sampling in (Sampling(), Sampling(top_k=60), Sampling(top_k=70), Sampling(0.5, top_k=60)):
        wanted[sampling] = LogProbScorer(model, sampling=sampling).score(rows).values
    scorer, memory = LogProbScorer(model), RememberedModel(model, tmp_path)
    for sampling in [*wanted, *wanted]:
        scorer.options = scorer.options.but(sampling=sampling)
        assert_near(scorer.score(rows, remember=True).values, wanted[sampling], **FORWARD)
        assert_near(memory.make_scorer(sampling=sampling).score(rows).values, wanted[sampling], **FORWARD)
    assert memory.store.tokens_recalled == 4 * 29


def test_a_token_that_the_sampler_would_not_draw():
    """The scorer keeps such tokens, and warns once with their share."""
    model, rows, sampling = tiny_model().double(), [ids(20, 0)], Sampling(top_k=2)
    scorer = LogProbScorer(model, sampling=sampling)
    message = r"% of the 19 tokens are not among those that Sampling\(top_k=2\) leaves"
    with pytest.warns(SamplerMismatchWarning, match=message):
        found = scorer.score(Ragged.from_list(rows)).values[1:]
    assert_near(found.double(), expected(model, rows, sampling)[:, 0], **ROUNDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.score(Ragged.from_list(rows))


def random_record(tokens, seed=0):
    """A record with 1 to 6 kept ids for each token, including the token itself."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.cat([token[None], torch.randint(VOCAB_SIZE, (int(n),), generator=generator)]).unique()
        for token, n in zip(tokens.values, torch.randint(6, tokens.values.shape, generator=generator), strict=True)
    ]
    return Kept(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))


@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.scoring.SamplerMismatchWarning")
@pytest.mark.parametrize(("sampling", "kind"), CASES, ids=str)
def test_kept_tokens_can_be_returned(sampling, kind):
    """``kept`` equals the tokens of transformers' warpers plus the sampled one. Its replay has the same scores."""
    model = tiny_model().double()
    tokens = random_sequences(9, 4, 1, 7)
    mask = random_mask(tokens, keep=0.7)
    scorer = make_scorer(model, kind, sampling=sampling, tokens_per_batch=8)
    for grad in (False, True):
        found = scorer.evaluate(tokens, mask, return_kept=True, grad=grad)
        kept = found.kept
        assert_near(found.log_prob.values, scorer.score(tokens, mask).values, **ROUNDED)
    assert kept.offsets.shape == (len(tokens.values) + 1,)
    assert not kept.offsets.diff()[~mask].any()
    keeps = [keep_of(plain_logits(model, row), sampling, row[1:]) for row in tokens.to_list()]
    want = torch.cat([torch.nn.functional.pad(keep, (0, 0, 1, 0)) for keep in keeps]) & mask[:, None]
    for found_ids, keep in zip(kept.ids.split(kept.offsets.diff().tolist()), want, strict=True):
        assert sorted(found_ids.tolist()) == keep.nonzero().squeeze(-1).tolist()
    again = scorer.evaluate(ScoreRequest.of(tokens, mask, kept=kept), return_kept=True)
    assert torch.equal(again.kept.ids, kept.ids)
    assert torch.equal(again.kept.offsets, kept.offsets)
    assert_near(again.log_prob.values, found.log_prob.values, **ROUNDED)


@pytest.mark.parametrize("kind", ["packed", "padded", "full", "cached"])
def test_replay(kind):
    """A replay scores over any recorded tokens. Its results do not enter the cache."""
    model, ref = tiny_model().double(), tiny_model(seed=1).double()
    tokens = random_sequences(9, 4, 1, 7)
    mask, record = random_mask(tokens, keep=0.7), random_record(tokens)
    scorer = make_scorer(model, kind, sampling=Sampling(0.7, top_k=3, reference="kept"), tokens_per_batch=8)
    cached = kind == "cached"
    own = scorer.score(tokens, remember=cached).values
    found = scorer.evaluate(ScoreRequest.of(tokens, mask, kept=record), entropy=True, grad=not cached, remember=cached)
    keep = torch.zeros(tokens.values.shape[0], VOCAB_SIZE, dtype=torch.bool)
    keep[record.rows, record.ids] = True
    keeps = [kept[1:] for kept in tokens.like(keep).to_list()]
    want = expected(model, tokens.to_list(), Sampling(0.7), keeps=keeps)[mask[tokens.positions > 0], :2]
    got = torch.stack([found.log_prob.values, found.entropy.values], -1)[mask]
    assert_near(got, want.to(got.dtype), **ROUNDED)
    if cached:
        assert_near(scorer.score(tokens, remember=True).values, own, **ROUNDED)
    else:
        assert_same_gradients(got.sum(), want.sum(), model)
        kl = scorer.evaluate(
            ScoreRequest.of(tokens, mask, kept=record), reference=make_scorer(ref, kind, temperature=0.7)
        ).kl.values
        assert float(kl.min()) >= -1e-9


def test_refusals():
    model, tokens = tiny_model(), random_sequences(5, 4)
    plain, warm, record = LogProbScorer(model), LogProbScorer(model, temperature=0.7), random_record(tokens)
    truncated, whole = LogProbScorer(model, sampling=Sampling(top_k=50)), {"reference": plain, "direction": "forward"}
    shifted, others = Kept(record.ids, record.offsets.roll(-1)), random_sequences(5, 4, seed=1)
    for message, call in [
        ("score the two separately", lambda: truncated.evaluate(tokens, top_k=3)),
        ("the reference drops tokens: Sampling", lambda: plain.evaluate(tokens, reference=truncated)),
        ("infinite where only the policy is truncated", lambda: truncated.evaluate(tokens, **whole)),
        ("two temperatures", lambda: LogProbScorer(model, temperature=0.5, sampling=Sampling(0.7))),
        ("return_kept=True needs a sampling= that drops tokens", lambda: warm.evaluate(tokens, return_kept=True)),
        (r"kept at sequence 0, position \d lacks the scored token", lambda: ScoreRequest.of(others, kept=record)),
        ("10 ascending offsets up to", lambda: plain.score(ScoreRequest.of(tokens, kept=shifted))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="must be a Sampling"):
        LogProbScorer(model, sampling={"top_k": 3})


@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
@pytest.mark.parametrize("kind", ["tiles", "logits", "replay"])
def test_a_distillation_needs_the_whole_distribution(kind):
    """A truncated student is refused. A temperature without truncation divides the student's logits."""
    model, tokens = tiny_model().double(), random_sequences(5, 4)
    top_ids = torch.tensor([3, 8]).expand(len(tokens.values), 2)
    scorer, kept = LogProbScorer(model), random_record(tokens)
    if kind != "replay":
        scorer = LogProbScorer(model if kind == "tiles" else FullLogits(model), sampling=Sampling(top_p=0.9))
        kept = None
    teacher = {"reference": LogProbScorer(tiny_model(seed=1).double()), "direction": "jensen_shannon"}
    for given, options in ((top_ids, {}), (None, teacher)):
        with pytest.raises(ValueError, match="need whole distributions: leave out sampling= and kept="):
            scorer.evaluate(ScoreRequest.of(tokens, top_ids=given, kept=kept), **options)
    warm = LogProbScorer(scorer.model, temperature=0.6).evaluate(ScoreRequest.of(tokens, top_ids=top_ids)).outcomes
    for row, outcomes in zip(tokens.to_list(), warm.to_list(), strict=True):
        log_p = (plain_logits(model, row) / 0.6).log_softmax(-1).detach()
        others = log_p.index_fill(-1, torch.tensor([3, 8]), -torch.inf).logsumexp(-1, keepdim=True)
        assert_close(outcomes[1:], torch.cat([log_p[:, [3, 8]], others], -1), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": 0.0}, "temperature must be a finite number of at least 1e-06, got 0.0"),
        ({"temperature": "1"}, "temperature must be a number, 1 or None to turn it off, got '1'"),
        ({"temperature": math.nan}, "temperature must be a finite number .*, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number .*, got inf"),
        ({"top_k": -2}, "top_k must be at least 0, got -2"),
        ({"top_k": 2.0}, "top_k must be a whole number, 0 or None to turn it off, got 2.0"),
        ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1, got 0.0"),
        ({"min_p": 1.1}, "min_p must be at least 0 and at most 1, got 1.1"),
        ({"reference": "own"}, "reference"),
    ],
)
def test_bad_settings(arguments, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**arguments)


def test_settings_in_other_forms():
    """None and -1 turn a setting off, two equal temperatures are one, and numpy's numbers become plain ones."""
    assert Sampling(None, None, None, None) == Sampling(top_k=-1) == Sampling()
    assert Sampling(top_k=-1, top_p=None, min_p=0.1) == Sampling(min_p=0.1)
    assert as_sampling(None, Sampling(0.5, top_p=None)) == as_sampling(0.5, None) == Sampling(0.5)
    assert as_sampling(1.0, Sampling(0.5)) == as_sampling(0.5, Sampling(0.5)) == Sampling(0.5)
    assert str(Sampling(0.5, top_p=0.9)) == "Sampling(temperature=0.5, top_p=0.9)"
    found = as_sampling(1.0, Sampling(np.float32(0.5), top_p=np.float32(0.75), min_p=np.float32(0.25)))
    assert found == Sampling(0.5, top_p=0.75, min_p=0.25)
    assert {type(found.temperature), type(found.top_p), type(found.min_p)} == {float}
    model = tiny_model()
    for settings in ({"temperature": None}, {"sampling": Sampling(None, top_k=-1, top_p=None, min_p=None)}):
        assert LogProbScorer(model, **settings).options.sampling == Sampling()
    transform = RetrieveLogProb(model, options=ScoreOptions(Sampling(None)))
    assert transform.scorer.options.temperature == 1.0
    transform.options = transform.options.but(temperature=0.5).but(temperature=None)
    assert transform.scorer.options.sampling == Sampling()
    scorer = LogProbScorer(model, temperature=0.5)
    scorer.options = scorer.options.but(temperature=None)
    assert scorer.options.sampling == Sampling()


def test_generate_kwargs_refuses_another_distribution():
    model = tiny_model()
    for name, value in (("temperature", 2.0), ("top_k", 5), ("do_sample", False), ("repetition_penalty", 1.2)):
        with pytest.raises(ValueError, match=f"{name}={value} is not how .*Sampling.temperature=0.5.* samples"):
            Sampling(0.5).generate_kwargs(**{name: value})
    others = {"max_new_tokens": 3, "eos_token_id": [7, 8], "attention_mask": torch.ones(1, 3), "streamer": None}
    found = Sampling(0.5).generate_kwargs(temperature=0.5, **others)
    assert {name: found[name] for name in others} == others
    model.generate(torch.tensor([[3, 4, 5]]), **found)


class Wrapper:
    """The attributes of a wrapper that the comparison reads. The ``model`` of an engine's wrapper is None."""

    def __init__(self, model, generate=True, **generate_kwargs):
        self.model, self.generate, self.generate_kwargs = model, generate, generate_kwargs

    def get_new_version(self, **kwargs):
        raise NotImplementedError


def configured(**settings):
    model = tiny_model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


NUCLEUS = GenerationConfig(top_p=0.8)


@pytest.mark.parametrize(
    ("wrapper", "found"),
    [
        (Wrapper(configured(), do_sample=True), Sampling(top_k=50)),
        (Wrapper(configured(top_k=20, top_p=0.8, do_sample=True)), Sampling(top_k=20, top_p=0.8)),
        (Wrapper(configured(top_k=20), do_sample=True, top_k=0, min_p=0.1), Sampling(min_p=0.1)),
        (Wrapper(configured(), top_k=20), "greedy"),
        (Wrapper(configured(), generate=False), None),
        (Wrapper(configured(), generate=False, do_sample=True), Sampling(top_k=50)),
        (Wrapper(None, top_p=0.9), Sampling(top_p=0.9)),
        (Wrapper(None, temperature=0.0), "greedy"),
        (Wrapper(None, top_k=-1), Sampling()),
        (Wrapper(None, top_k=None, top_p=None, temperature=None), Sampling()),
        (Wrapper(configured(top_k=20, top_p=0.8, do_sample=True), top_k=None, min_p=None), Sampling(top_p=0.8)),
        (Wrapper(configured(temperature=0.5), do_sample=True, temperature=None, top_k=0), Sampling()),
        (Wrapper(configured(), do_sample=None), "greedy"),
        (Wrapper(configured(top_k=20, do_sample=True), generation_config=NUCLEUS), Sampling(1, 20, 0.8)),
        (tiny_model(), None),
    ],
)
def test_sampler_of(wrapper, found):
    assert sampler_of(wrapper) == found


def test_messages_of_a_mismatch():
    wrapper, wide = Wrapper(configured(), do_sample=True), Wrapper(configured(), do_sample=True, top_k=97)
    warm = Wrapper(configured(), do_sample=True, top_k=97, temperature=0.7)
    penalised = Wrapper(configured(repetition_penalty=1.1), do_sample=True, top_k=97)
    message = mismatch_of(wrapper, Sampling())
    assert message.startswith("sampler uses top_k=50, scorer top_k=0.")
    assert "generate_kwargs={'top_k': None, 'top_p': 1.0}" in message  # torchrl's wrapper takes no 0
    assert "sampling=Sampling(top_k=50)" in message
    # Greedy is fine for an evaluation, wrong for a policy gradient.
    for each, known in ((wrapper, Sampling(top_k=50)), (wide, Sampling()), (warm, Sampling(0.7))):
        assert mismatch_of(each, known) is None
    assert mismatch_of(Wrapper(configured()), Sampling()) is None
    assert "sampler is greedy" in mismatch_of(Wrapper(configured()), Sampling(), trains=True)
    assert "sampler uses top_k=50, scorer top_k=20" in mismatch_of(wrapper, Sampling(top_k=20))
    assert mismatch_of(warm, Sampling()).startswith("sampler uses temperature=0.7, scorer temperature=1.")
    assert "sampler uses top_p=1, scorer top_p=0.9" in mismatch_of(warm, Sampling(0.7, top_p=0.9))
    message = mismatch_of(penalised, Sampling())
    assert "repetition_penalty=1.1, which cannot be scored" in message
    assert "'repetition_penalty': 1.0" in message
    assert "sampling=" not in message
    with pytest.warns(SamplerMismatchWarning, match="top_k=50") as caught:
        warn_of_mismatch(wrapper, Sampling())
    assert caught[0].filename == __file__
