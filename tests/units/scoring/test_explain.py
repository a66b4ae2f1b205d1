"""The numbers of an explanation equal those of a plain forward. The numbers of its route are counted by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_near, rows_keep_their_bits
from scoring_reference import FakeBackend, FullLogits, engine
from torchrl_llm_kl import LogProbScorer, Sampling
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import ScoreRequest, _attention
from toy_models import FORWARD, VOCAB_SIZE, tiny_model

#: Two answers to one prompt of 22 tokens, and another sequence.
ROWS = [[*range(3, 25), 30, 31, 32], [*range(3, 25), 40, 41], [5, 6, 7]]
TRUNCATED = Sampling(0.7, top_k=5)


def plain(model: Any, row: int, token: int) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ROWS[row][:token]])).logits[0, -1]


@pytest.mark.parametrize("sampling", [Sampling(), TRUNCATED, Sampling(top_k=1)], ids=str)
@pytest.mark.parametrize(
    ("settings", "batch", "attended"),
    [
        # Depth first: the prompt of 22 tokens and the first answer, 24 forwarded tokens; then the second answer's first.
        ({"tokens_per_batch": 16}, (1, 2), (23, 16)),
        ({}, (0, 1), (23, 0)),
        ({"tokens_per_batch": 30, "share_prefixes": False}, (1, 3), (23, 0)),
    ],
    ids=["two packs", "one pack", "padded"],
)
def test_against_a_plain_forward(settings: Any, batch: Any, attended: Any, sampling: Sampling) -> None:
    model, row, token = tiny_model(), 1, 23
    scorer = LogProbScorer(model, **settings)
    logits = plain(model, row, token)
    scaled = logits / sampling.temperature
    order = scaled.argsort(descending=True).tolist()
    kept = order[: sampling.top_k or VOCAB_SIZE]
    added = 41 not in kept
    assert added == (sampling.top_k == 1), "the last case shows a token that the sampler leaves out"
    normaliser = scaled[kept + [41] * added].logsumexp(-1)
    with torch.random.fork_rng():
        found = scorer.explain(ROWS, row, token, sampling=sampling)
    kind = "pack" if settings.get("share_prefixes", True) else "micro-batch"
    assert (found.path, found.kind, found.token_id) == ("head", kind, 41)
    assert ((found.batch, found.batches), (found.attended, found.elsewhere)) == (batch, attended)
    assert (found.kept, found.is_kept, found.in_mask, found.sampling) == (len(kept), not added, True, sampling)
    for got, want in (
        (found.logit, logits[41]),
        (found.log_normaliser, normaliser),
        (found.log_prob, scaled[41] - normaliser),
        (found.plain, scaled[41] - normaliser),
    ):
        assert_near(torch.tensor(got), want, **FORWARD)
    assert found.log_prob == float(scorer.score(ROWS, sampling=sampling).values[len(ROWS[0]) + token])
    assert found.difference == found.log_prob - found.plain
    table = str(found)
    shown = "41, token 23 of sequence 1", f"{found.log_prob:.6f}", f"{batch[0] + 1} of {batch[1]}", str(sampling)
    assert all(each in table for each in shown)
    assert ("share_prefixes=False" in table) == ("share_prefixes" in settings)


def test_a_difference_shows() -> None:
    """The model's logits depend on the number of sequences in a forward, so the explanation shows a difference."""
    inner = tiny_model()

    class Odd(FullLogits):
        def forward(self, input_ids: Tensor) -> tuple[Tensor]:  # type: ignore[override]
            (logits,) = super().forward(input_ids)
            return (logits * (1 + (len(input_ids) > 1)),)

    with pytest.warns(UserWarning, match="full forward"):
        scorer = LogProbScorer(Odd(inner))
    found = scorer.explain(ROWS, 0, 24)
    logits = plain(inner, 0, 24)
    assert (found.path, found.kind) == ("full", "micro-batch")
    assert "Odd does not expose its body and head" in found.why
    assert_near(torch.tensor(found.logit), 2 * logits[32], **FORWARD)
    assert_near(torch.tensor(found.plain), logits.log_softmax(-1)[32], **FORWARD)
    assert_near(torch.tensor(found.difference), (2 * logits).log_softmax(-1)[32] - found.plain, **FORWARD)


def test_a_record_of_the_sampler_and_a_token_outside_the_mask() -> None:
    model, scorer = tiny_model(), LogProbScorer(tiny_model())
    mask = [[False] * 24 + [True], [False] * 24, [False] * 3]
    counts = torch.tensor([0] * 24 + [3] + [0] * 27)
    kept = Kept(torch.tensor([2, 32, 50]), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    request = ScoreRequest.of(ROWS, mask, kept=kept)
    found = scorer.explain(request, 0, 24, sampling=TRUNCATED)
    want = (plain(model, 0, 24)[[2, 32, 50]] / 0.7).log_softmax(-1)[1]
    assert (found.kept, found.is_kept, found.in_mask) == (3, True, True)
    assert_near(torch.tensor([found.log_prob, found.plain]), want.expand(2), **FORWARD)
    outside = scorer.explain(request, 1, 22)
    want = plain(model, 1, 22).log_softmax(-1)[40]
    assert (outside.kept, outside.in_mask) == (VOCAB_SIZE, False)
    assert "no: its score is 0" in str(outside)
    assert_near(torch.tensor([outside.log_prob, outside.plain]), want.expand(2), **FORWARD)


def test_experts_are_replayed_by_both() -> None:
    model = tiny_model("mixtral")
    scorer = LogProbScorer(model)
    record = torch.rand(52, 3, 6, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    found, own = (scorer.explain(ScoreRequest.of(ROWS, routing=routing), 0, 24) for routing in (record, None))
    assert found.log_prob == float(scorer.score(ScoreRequest.of(ROWS, routing=record)).values[24])
    assert_near(torch.tensor(found.log_prob), torch.tensor(found.plain), **FORWARD)
    assert abs(found.log_prob - own.log_prob) > 1e-3


def test_what_is_refused() -> None:
    scorer, wrapper = LogProbScorer(tiny_model()), LogProbScorer(FakeBackend(engine(tiny_model())))
    for asked, row, token, message in [
        (scorer, 3, 1, "token 1 of sequence 3 has no log-prob: the lengths are .25, 24, 3."),
        (scorer, 2, 3, "token 3 of sequence 2 has no log-prob"),
        (wrapper, 0, 1, "explain needs a whole model in this process"),
    ]:
        with pytest.raises(ValueError, match=message):
            asked.explain(ROWS, row, token)


@pytest.mark.parametrize("length", [8, 9, 10])
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_sequence(length: int) -> None:
    """With longrope other frequencies apply from 9 tokens on, where the last token counts too."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    model = tiny_model("llama", head_dim=8, max_position_embeddings=64, rope_parameters=rope)
    row = torch.tensor(ROWS[0][:length])
    with torch.no_grad():
        log_probs = model(input_ids=row[None]).logits[0].log_softmax(-1)
        cut = model(input_ids=row[None, :-1]).logits[0].log_softmax(-1)
    for token in (length - 1, 4):
        found = LogProbScorer(model).explain([row], row=0, token=token)
        for got in (found.plain, found.log_prob):
            assert_near(torch.tensor(got), log_probs[token - 1, row[token]], **FORWARD)
        if length == 9:  # a forward without the last token has the others
            assert (log_probs[token - 1] - cut[token - 1])[row[token]].abs() > 0.01


@pytest.mark.parametrize(
    ("family", "settings", "head", "attention"),
    [
        (
            "qwen2",
            {},
            "tiles, since the fused kernel does not run on cpu",
            "piece by piece, since the variable-length kernel",
        ),
        ("gemma2", {}, "tiles, since the fused kernel", "piece by piece, since the variable-length kernel has no"),
        ("qwen2", {"deterministic": True}, "tiles, since the fused kernel", "blocks of a fixed size"),
        ("qwen2", {"share_prefixes": False}, "tiles, since the fused kernel", "the model's own"),
        ("qwen2", {"probe": False}, "tiles, since the scorer has probe=False", "the model's own"),
    ],
    ids=["piece by piece", "soft-cap", "deterministic", "padded", "without a probe"],
)
def test_the_kernels_of_head_and_attention(family: str, settings: Any, head: str, attention: str) -> None:
    model: Any = tiny_model(family, **({"attn_logit_softcapping": 2.0} if family == "gemma2" else {}))
    model.set_attn_implementation("eager")
    if "deterministic" in settings and not rows_keep_their_bits():
        pytest.skip("deterministic=True is refused on this machine")
    found = LogProbScorer(model, **settings).explain(ROWS, 1, 23)
    assert found.head.startswith(head)
    assert found.attention.startswith(attention)
    assert found.head in str(found)
    assert found.attention in str(found)


def test_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted: Any = tiny_model()
    adapted.lm_head.register_forward_hook(lambda module, args, out: out + 0.0)
    assert (
        LogProbScorer(adapted).explain(ROWS, 1, 23).head == "whole logits, since the head is more than a linear layer"
    )
    with pytest.warns(UserWarning, match="full forward"):
        whole = LogProbScorer(FullLogits(tiny_model()))
    assert whole.explain(ROWS, 1, 23).head == "the model's own"
    packed = LogProbScorer(tiny_model())
    monkeypatch.setattr(_attention, "takes_varlen", lambda query: True)
    monkeypatch.setattr(_attention, "varlen_attn", lambda query, *_, **__: torch.zeros_like(query))
    assert packed.explain(ROWS, 1, 23).attention == "all pieces in one variable-length kernel"
