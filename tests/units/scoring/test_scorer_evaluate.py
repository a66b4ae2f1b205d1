"""Several scores from one pass: log-prob, entropy, top-k and the exact KL."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import SHARED, Recurrent, assert_gradients, body_tokens, conversation, random_sequences
from torchrl_llm_kl import LogProbScorer, Ragged, ScoreRequest
from toy_models import FAMILIES, FORWARD, VOCAB_SIZE, stateful_model, tiny_model, with_lora

pytestmark = pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
ROWS = conversation()
BATCH = Ragged.from_list(ROWS)
TOP_IDS = (7 * torch.arange(len(BATCH.values)).unsqueeze(-1) + torch.tensor([0, 13, 26, 39])) % VOCAB_SIZE
REQUEST = ScoreRequest.of(BATCH, top_ids=TOP_IDS)
EVERYTHING: dict[str, Any] = {"entropy": True, "top_k": 3, "moments": True}
HOT, SMALL = {"temperature": 0.7}, {"tokens_per_batch": 9, "head_chunk": 4}
CHUNKS = {"tokens_per_batch": 64, "head_chunk": 5}
LLAMA = partial(tiny_model, "llama")


def plain(model: Any, row: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probs of the whole vocabulary at tokens 1, 2, ... of a sequence, ``[T - 1, V]``."""
    out = model(input_ids=row[None])
    logits = out.logits if hasattr(out, "logits") else out[0]
    return (logits[0, :-1].float() / temperature).log_softmax(-1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def assert_exact(scorer: Any, reference: Any, temperature: float = 1.0, direction: Any = "reverse") -> None:
    mask = (BATCH.positions > 0) & (torch.arange(len(BATCH.values)) % 4 != 0)
    request = ScoreRequest.of(BATCH, mask, top_ids=TOP_IDS)
    got = scorer.evaluate(request, reference=reference, direction=direction, **EVERYTHING)
    assert_near(got.log_prob.values, scorer.score(BATCH, mask).values, **FORWARD)
    assert_near(got.ref_log_prob.values, reference.score(BATCH, mask).values, **FORWARD)
    alone = scorer.evaluate(request)  # in the sweep of the log-probs
    assert_near(alone.outcomes.values, got.outcomes.values, **FORWARD)
    assert all(not column.values[~mask].any() for name, column in got.per_token.items() if name != "routing")
    asked = mask[BATCH.positions > 0]  # of the places that predict
    p, q = (torch.cat([plain(x.model, row, temperature) for row in ROWS])[asked].detach() for x in (scorer, reference))
    assert_near(got.kl.values[mask], kl(p, q) if direction == "reverse" else kl(q, p), **FORWARD)
    assert_near(got.entropy.values[mask], -(p.exp() * p).sum(-1), **FORWARD)
    best, indices = p.topk(3)
    assert_near(got.top_log_probs.values[mask], best, **FORWARD)
    assert torch.equal(got.top_indices.values[mask], indices)
    assert_near(got.tail_log_prob.values[mask].exp(), 1 - best.exp().sum(-1), **FORWARD)
    of_ids = p.gather(-1, TOP_IDS[mask])
    assert_near(got.outcomes.values[mask][:, :-1], of_ids, **FORWARD)
    assert_near(got.outcomes.values[mask][:, -1].exp(), 1 - of_ids.exp().sum(-1), **FORWARD)
    total = p.exp().double()
    h = -(total * total.log()).sum(-1, keepdim=True)
    for found, moment in ((got.collision, total**2), (got.discriminator, total**2 * (h + total.log()))):
        assert_close(found.values[mask].double(), moment.sum(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_sums_over_the_whole_vocabulary(family: str) -> None:
    assert_exact(LogProbScorer(tiny_model(family)), LogProbScorer(tiny_model(family, seed=1)))


@pytest.mark.parametrize(
    ("policy", "reference", "direction", "settings", "ref_settings"),
    [
        (Recurrent, partial(Recurrent, 1), "forward", CHUNKS, {}),
        (Recurrent, LLAMA, "reverse", CHUNKS, {}),
        (LLAMA, Recurrent, "forward", CHUNKS, {}),
        (partial(tiny_model, "gemma2"), partial(tiny_model, "granite"), "reverse", {**HOT, **SMALL}, HOT),
        (partial(tiny_model, "gemma2"), partial(tiny_model, "granite"), "forward", {**HOT, **SMALL}, HOT),
        (LLAMA, tiny_model, "reverse", {"share_prefixes": False, "tokens_per_batch": 30}, {}),
        (LLAMA, tiny_model, "reverse", {}, {"share_prefixes": False}),
    ],
    ids=["both whole", "policy whole", "reference whole", "two families", "forward", "policy padded", "ref padded"],
)
def test_any_two_models(policy: Any, reference: Any, direction: Any, settings: Any, ref_settings: Any) -> None:
    scorers = LogProbScorer(policy(), **settings), LogProbScorer(reference(), **ref_settings)
    assert_exact(*scorers, settings.get("temperature", 1.0), direction)


@pytest.mark.parametrize("target", ["all-linear", ["lm_head", "q_proj"]])
def test_the_base_under_the_policys_own_adapters(target: Any) -> None:
    """One set of weights with and without adapters, also with an adapter on the head."""
    model, before = with_lora(tiny_model("llama"), target_modules=target), tiny_model("llama")
    got = LogProbScorer(model).evaluate(BATCH, reference=LogProbScorer(model, adapters=False)).kl.values
    want = torch.cat([kl(plain(model, row), plain(before, row)) for row in ROWS])
    assert_near(got[BATCH.positions > 0], want, **FORWARD)
    assert float(got.max()) > 0.01


@pytest.mark.parametrize(("make", "tokens_per_batch"), [(tiny_model, 11), (tiny_model, 8192), (Recurrent, 8192)])
def test_only_the_policy_gets_gradients(make: Any, tokens_per_batch: int) -> None:
    """On the full path logits are recomputed, where each saved tensor may be unpacked only once."""
    model, ref, rows = make(seed=0), make(seed=1), ROWS[:5]
    scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
    got = scorer.evaluate(Ragged.from_list(rows), entropy=True, top_k=2, reference=LogProbScorer(ref), grad=True)
    assert not got.ref_log_prob.values.requires_grad
    assert not got.top_log_probs.values.requires_grad
    parameters = list(model.parameters())
    loss = (got.kl.values + 0.3 * got.entropy.values - 0.2 * got.log_prob.values).sum()
    found = torch.autograd.grad(loss, [*parameters, *ref.parameters()], allow_unused=True)
    assert all(g is None for g in found[len(parameters) :])
    want = torch.zeros(())
    for row in rows:
        p = plain(model, row)
        chosen = p.gather(-1, row[1:, None]).sum()
        want = want + kl(p, plain(ref, row).detach()).sum() - 0.3 * (p.exp() * p).sum() - 0.2 * chosen
    assert_gradients(found[: len(parameters)], torch.autograd.grad(want, parameters))


def test_one_forward_of_each_body_and_conversations_that_go_on_use_both_caches() -> None:
    model, ref, row = LLAMA(), LLAMA(seed=1), torch.arange(30)
    scorer, reference = LogProbScorer(model), LogProbScorer(ref)
    for each in (model, ref):
        assert body_tokens(each, lambda: scorer.evaluate(REQUEST, reference=reference, **EVERYTHING)) == SHARED
    scorer.evaluate(Ragged.from_list([row[:20]]), reference=reference, remember=True)
    batch = Ragged.from_list([row])
    new = batch.positions >= 22
    want = kl(plain(model, row), plain(ref, row)).detach()

    def turn() -> None:
        got = scorer.evaluate(batch, new, reference=reference, entropy=True, remember=True)
        assert_near(got.kl.values[22:], want[21:], **FORWARD)

    assert body_tokens(ref, turn) == 29 - 19
    scorer.forget()  # one cache is empty: both models use only the hits that both caches have
    assert body_tokens(ref, turn) == 29
    itself = scorer.evaluate(BATCH, reference=scorer).kl.values
    assert_near(itself, torch.zeros_like(itself), size=16)


def test_a_temperature_of_one_call() -> None:
    """It applies to both models, whatever their own temperatures are."""
    models = tiny_model("llama"), tiny_model("llama", seed=1)
    scorer, reference = LogProbScorer(models[0], temperature=0.7), LogProbScorer(models[1])
    found = scorer.evaluate(REQUEST, reference=reference, temperature=1.6, **EVERYTHING)
    hot = [LogProbScorer(model, temperature=1.6) for model in models]
    expected = hot[0].evaluate(REQUEST, reference=hot[1], **EVERYTHING)
    pairs = zip(found.per_token.values(), expected.per_token.values(), strict=True)
    assert all(torch.equal(a.values, b.values) for a, b in pairs)
    assert_near(scorer.score(BATCH, temperature=1.6).values, expected.log_prob.values, **FORWARD)
    own = LogProbScorer(models[0], temperature=0.7).score(BATCH).values
    assert torch.equal(scorer.score(BATCH).values, own), "the scorer keeps its own"


def test_pairs_and_options_that_do_not_fit() -> None:
    model = LogProbScorer(tiny_model("llama"))
    wide = LogProbScorer(tiny_model("llama", vocab_size=VOCAB_SIZE + 3))
    for scorer, reference in ((model, wide), (wide, model)):
        with pytest.raises(ValueError, match="common vocabulary"):
            scorer.evaluate(BATCH, reference=reference)
    with pytest.raises(ValueError, match=r"scored at temperature 0\.7 and the reference at 1\.0"):
        LogProbScorer(model.model, temperature=0.7).evaluate(BATCH, reference=model)
    for options, message in [
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_k": VOCAB_SIZE + 1}, "98.*97"),
        ({"direction": "up"}, "direction must be one of 'reverse', 'forward', 'jensen_shannon', got 'up'"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.evaluate(BATCH, **options)


@pytest.mark.parametrize("make", [tiny_model, partial(stateful_model, "lfm2")], ids=["packed", "forked"])
@pytest.mark.parametrize("options", [{}, {"grad": True}, {"remember": True}], ids=str)
def test_nothing_to_score_is_all_zeros(make: Any, options: dict[str, bool]) -> None:
    """Sequences of one token or none, and a mask that is False everywhere."""
    scorer = LogProbScorer(make())
    for lengths in ((0,), (0, 0), (1, 1), (1, 0, 1), (5,)):
        batch, n = random_sequences(*lengths), sum(lengths)
        mask = torch.zeros(n, dtype=torch.bool) if lengths == (5,) else None
        request = ScoreRequest.of(batch, mask, top_ids=torch.zeros(n, 3, dtype=torch.long))
        got = scorer.evaluate(request, reference=scorer, **EVERYTHING, **options)
        assert (got.top_indices.values.shape, got.outcomes.values.shape) == ((n, 3), (n, 4))
        for column in (*got.per_token.values(), scorer.score(batch, mask, **options)):
            assert torch.equal(column.values, torch.zeros_like(column.values))
            assert len(column.values) == n


@pytest.mark.parametrize(("whole_logits", "temperature"), [(False, 1.0), (False, 0.5), (True, 0.5)])
def test_moments_of_three_tokens_by_hand(whole_logits: bool, temperature: float) -> None:
    """The probabilities are 1/2, 1/3, 1/6, or 9/14, 4/14, 1/14 at half the temperature. All other tokens have probability 0."""
    model: Any = Recurrent() if whole_logits else tiny_model("llama")
    head = model.head if whole_logits else model.lm_head
    nn.init.zeros_(head.weight)
    head.bias = nn.Parameter(torch.full((VOCAB_SIZE,), -torch.inf))
    head.bias.data[:3] = torch.tensor([3.0, 2.0, 1.0]).log()
    scorer = LogProbScorer(model, temperature=temperature, probe=False)
    got = scorer.evaluate(Ragged.from_list([torch.tensor([0, 2, 1])]), entropy=True, moments=True, grad=True)
    p = [1 / 2, 1 / 3, 1 / 6] if temperature == 1 else [9 / 14, 4 / 14, 1 / 14]
    h = -sum(x * math.log(x) for x in p)
    collision, discriminator = sum(x * x for x in p), sum(x * x * (h + math.log(x)) for x in p)
    assert_close(got.collision.values, torch.tensor([0, collision, collision]))
    assert_close(got.discriminator.values, torch.tensor([0, discriminator, discriminator]))
    grads = [each.values.requires_grad for each in (got.log_prob, got.collision, got.discriminator)]
    assert grads == [True, False, False]
    assert scorer.evaluate(Ragged.from_list([torch.tensor([0, 2])])).collision is None
