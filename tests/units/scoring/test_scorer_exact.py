"""Scores and gradients equal the plain model's, one sequence at a time. Includes defects of torchrl's wrappers."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import (
    SHARED,
    FullLogits,
    assert_gradients,
    assert_scores,
    body_tokens,
    conversation,
    ids,
    plain_log_probs,
    random_mask,
    random_sequences,
)
from torchrl_llm_kl import _private
from torchrl_llm_kl.head import _operators
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer, _attention
from toy_models import FAMILIES, FORWARD, VOCAB_SIZE, tiny_model

ROWS = conversation()
BATCH = Ragged.from_list(ROWS)


@pytest.mark.parametrize("family", FAMILIES)
def test_defect_01_02_32_33_equals_one_sequence_at_a_time(family):
    model, sequences = tiny_model(family), random_sequences(20, 1, 0, 7, 33, 2, 12, 12)
    for tokens_per_batch, keep, temperature in [(1, 0.5, 0.7), (40, 0.1, 1.3), (8192, None, 1.0)]:
        mask = None if keep is None else random_mask(sequences, keep=keep)
        scorer = LogProbScorer(model, temperature=temperature, tokens_per_batch=tokens_per_batch, head_chunk=5)
        assert scorer.path == "head"
        got = scorer.score(sequences, mask)
        assert_near(got.values, plain_log_probs(model, sequences, mask, temperature=temperature).detach(), **FORWARD)
    assert (got.values.dtype, got.values.requires_grad) == (torch.float32, False)
    assert torch.equal(got.lengths, sequences.lengths)
    for tokens_per_batch in (7, 64, 8192):
        scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
        assert scorer.shares_prefixes
        assert_scores(scorer, model, ROWS)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])  # with and without biases; a layer that is not nn.Linear
def test_linear_layers_in_onednn(monkeypatch, family):
    """They are used only without gradient and autocast. The model is restored afterwards, also after an error."""
    for module in (_private, _attention):
        monkeypatch.setattr(module, "FEWEST_PRODUCTS", 0)
    products = []
    counted = lambda *args: products.append(found := _private.onednn_linear(*args)) or found  # noqa: E731
    monkeypatch.setattr(_attention, "onednn_linear", counted)
    model = tiny_model(family)

    def state():
        return model.config._attn_implementation, [set(vars(module)) for module in model.modules()]

    scorer, before = LogProbScorer(model), state()
    layers = sum(type(module) is nn.Linear for module in model.base_model.modules())
    products.clear()
    assert_scores(scorer, model, ROWS)
    assert [x is not None for x in products] == [True] * layers
    products.clear()
    scorer.score(BATCH, grad=True)
    scorer.score(BATCH, deterministic=True) if family == "qwen2" else None
    assert not products
    scorer.score(BATCH, dtype=torch.bfloat16)
    assert [x is not None for x in products] == [False] * layers
    assert state() == before
    monkeypatch.setattr(_attention, "attend_block", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(BATCH)
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_plain_models(family):
    """Each gradient is the sum over separately forwarded sequences, also through shared prefixes."""
    model, batch = tiny_model(family).double(), Ragged.from_list([*ROWS[:6], *random_sequences(1, 0, 14).to_list()])
    mask, parameters = random_mask(batch, keep=0.6), list(model.parameters())
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = (plain_log_probs(model, batch, mask, temperature=0.8) * weights).sum()
    want = torch.autograd.grad(plain, parameters, allow_unused=True)
    for tokens_per_batch in (9, 8192):
        scorer = LogProbScorer(model, temperature=0.8, tokens_per_batch=tokens_per_batch, head_chunk=3)
        assert scorer.shares_prefixes
        found = (scorer.score(batch, mask, grad=True).values * weights).sum()
        assert_gradients(torch.autograd.grad(found, parameters, allow_unused=True), want)


def test_sequences_without_tokens_to_score_are_not_forwarded_and_others_are_trimmed():
    model, seen, sequences = tiny_model(), [], random_sequences(10, 20, 8)
    model.get_decoder().register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    mask = torch.zeros(38, dtype=torch.bool)
    mask[[3, 4, 30 + 6]] = True  # sequence 0, up to position 4; sequence 2, position 6
    LogProbScorer(model, probe=False).score(sequences, mask)
    (call,) = seen
    first, _, third = sequences.to_list()
    assert call["input_ids"].tolist() == [third[:6].tolist(), [*first[:4].tolist(), 0, 0]]
    assert call["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda scorer: pickle.loads(pickle.dumps(scorer))])
def test_a_copy_scores_the_same_and_new_weights_take_effect_at_once(clone):
    scorer, sequences = LogProbScorer(tiny_model("gemma2"), temperature=0.6), random_sequences(9, 5)
    twin = clone(scorer)
    assert twin.model is not scorer.model
    assert twin.path == "head"
    assert torch.equal(twin.score(sequences).values, scorer.score(sequences).values)
    twin.model.load_state_dict(tiny_model("gemma2", seed=1).state_dict())
    want = plain_log_probs(tiny_model("gemma2", seed=1), sequences, temperature=0.6).detach()
    assert_near(twin.score(sequences).values, want, **FORWARD)
    with torch.enable_grad():
        assert twin.score(sequences).values.grad_fn is None, "without grad no graph is kept"


def test_with_grad_the_logits_are_not_held(monkeypatch):
    """The graph saves no tensor of vocabulary size. The head's own small budget is set to 0 here."""
    monkeypatch.setattr(_operators, "_KEPT_BYTES", 0)
    model, shapes = tiny_model(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        LogProbScorer(model, probe=False, head_chunk=16).score(random_sequences(30, 30), grad=True)
    assert shapes
    assert not [shape for shape in shapes if shape[-1:] == (VOCAB_SIZE,) and shape != (VOCAB_SIZE, 32)]


# ------------------------------------------------------------------ products in half precision on float32 weights
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_equals_the_plain_model_under_autocast(family):
    model = tiny_model(family, initializer_range=0.1)
    scorer = LogProbScorer(model, dtype=torch.bfloat16)
    assert (scorer.path, scorer.shares_prefixes) == ("head", True)
    found = scorer.score(BATCH).values
    assert {found.dtype, *(parameter.dtype for parameter in model.parameters())} == {torch.float32}
    assert_close(found, plain_log_probs(model, BATCH).detach(), atol=0.08, rtol=0)
    assert not torch.equal(found, LogProbScorer(model).score(BATCH).values), "no part ran in bfloat16"


def test_gradients_flow_through_half_precision_and_a_head_that_is_more_than_linear_stays_in_float32():
    model, gradients, seen = tiny_model("llama", initializer_range=0.1), [], []
    for dtype in (torch.bfloat16, None):
        scorer = LogProbScorer(model, dtype=dtype)
        # The products of both heads are in float32 here, so the KL of a model to itself has the body's rounding alone.
        kl = scorer.evaluate(BATCH, reference=LogProbScorer(model)).kl.values
        assert kl.abs().max() < 1e-3
        assert bool(kl.any()) == (dtype is not None)
        total = scorer.score(Ragged.from_list(ROWS[:4]), grad=True).values.sum()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.999
    assert gradients[0].dtype == torch.float32
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    LogProbScorer(model, dtype=torch.bfloat16, probe=False).score(BATCH)
    assert set(seen) == {(torch.float32, torch.float32)}


# ------------------------------------------------------------------ defects, by their numbers
@pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
def test_defect_03_position_ids_are_integers_and_defect_04_they_count_from_the_first_real_token():
    """The mask and the positions are passed by keyword."""
    model, seen = FullLogits(tiny_model()), []
    scorer = LogProbScorer(model)
    model.register_forward_pre_hook(lambda _, __, keywords: seen.append(keywords), with_kwargs=True)
    scorer.score(random_sequences(5, 3))
    assert seen[-1]["position_ids"].dtype == torch.long
    assert seen[-1]["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert seen[-1]["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2"])
def test_defect_03_04_learned_positions_of_left_padded_data_and_defect_35_zero_outside_the_mask(family):
    model, sequences = tiny_model(family), random_sequences(12, 3, 7)
    keep = sequences.padding_mask(side="left")
    padded = Ragged.from_padded(sequences.to_padded(side="left", value=96), mask=keep)
    for mask in (sequences.positions > 0, random_mask(sequences)):
        got = LogProbScorer(model).score(padded, mask).restore()
        want = sequences.like(plain_log_probs(model, sequences, mask).detach()).to_padded(side="left")
        assert_near(got, want, **FORWARD)
        assert torch.equal(got != 0, sequences.like(mask).to_padded(side="left")), "exactly 0 elsewhere"


def test_defect_34_pad_equal_to_eos_does_not_strip_the_sampled_end_token():
    eos, free = 5, tiny_model()
    model = tiny_model(eos_token_id=eos, pad_token_id=eos)
    free.load_state_dict(model.state_dict())
    sequences = Ragged.from_list([torch.tensor([eos, 7, 8, eos, 9, eos]), torch.tensor([3, eos])])
    got = LogProbScorer(model).score(sequences)
    assert_near(got.values, plain_log_probs(free, sequences).detach(), **FORWARD)
    assert all((row[1:] < 0).all() for row in got.to_list())


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "opt"])
def test_defect_36_log_sum_exp_is_float32_in_a_bfloat16_model(family):
    """The error is at most that of the model's own logits in float32, and far less than that of a bfloat16 log-softmax."""
    model, sequences = tiny_model(family).to(torch.bfloat16), random_sequences(*[30] * 12)
    truth_model, columns = copy.deepcopy(model).double(), []
    with torch.no_grad():
        for ids in sequences.to_list():
            logits, exact = (m(input_ids=ids[None]).logits[0, :-1] for m in (model, truth_model))
            chosen = [x.log_softmax(-1).gather(-1, ids[1:, None]).double() for x in (exact, logits.float(), logits)]
            columns.append(torch.cat(chosen, -1))
    truth, upcast, narrow = torch.cat(columns).unbind(-1)
    got = torch.cat([row[1:] for row in LogProbScorer(model).score(sequences).to_list()]).double()
    assert (got - truth).square().mean().sqrt() <= 1.05 * (upcast - truth).square().mean().sqrt()
    # The log-sum-exp alone: against the same bfloat16 logits, summed exactly.
    assert (got - upcast).abs().mean() < 0.5 * (narrow - upcast).abs().mean()


def test_defect_37_minus_infinity_is_masked_or_raises():
    """A scored -inf raises, since -inf minus -inf would be NaN. A masked one becomes 0."""
    model = tiny_model()
    model.lm_head = nn.Linear(32, 97)
    model.lm_head.bias.data[50] = -torch.inf
    scorer, sequences = LogProbScorer(model), Ragged.from_list([torch.tensor([1, 2]), torch.tensor([1, 50, 2])])
    message = r"log-prob is -inf at sequence 1, position 1 \(token 50\): expected a finite number\. Mask the token"
    with pytest.raises(ValueError, match=message):
        scorer.score(sequences)
    got = scorer.score(sequences, torch.tensor([0, 1, 0, 0, 1]).bool(), grad=True).values
    assert (got - got.detach()).eq(0).all()
    assert got[3] == 0
    got.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model = tiny_model()
    model.get_input_embeddings().weight.data[50] = float("nan")
    with pytest.raises(ValueError, match=r"log-prob is nan at sequence 1, position \d"):
        LogProbScorer(model, probe=False).score(sequences, grad=True)


# ------------------------------------------------------------------ shared prefixes
def test_each_shared_stretch_goes_through_the_body_once() -> None:
    # By hand, without each sequence's last token: 20 + 17 shared, 5 + 2 + 3 + 6 after it; 18 shared, 4 + 8; 10; 0.
    model = tiny_model("llama")
    scorer, apart = LogProbScorer(model), LogProbScorer(model, share_prefixes=False)
    for grad in (False, True):
        assert body_tokens(model, lambda grad=grad: scorer.score(BATCH, grad=grad)) == SHARED == 37 + 16 + 18 + 12 + 10
    assert not apart.shares_prefixes
    assert body_tokens(model, lambda: apart.score(BATCH)) == sum(len(row) - 1 for row in ROWS)
    assert torch.equal(scorer.score(BATCH).values, LogProbScorer(model).score(BATCH).values)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 12)), min_size=2, max_size=7))
def test_any_tree_of_prefixes(shape: list[tuple[int, int, int]]) -> None:
    """Sequences are cut from four trunks at any length and continue with their own tails. Some are exact copies."""
    model = tiny_model("mistral")  # a sliding window shorter than most sequences
    rows = [torch.cat([ids(40, trunk)[:cut], ids(tail, 50 + trunk)]) for trunk, cut, tail in shape]
    assert_scores(LogProbScorer(model), model, rows)


@pytest.mark.parametrize(
    "own", [{"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": None}, {"sliding_window": 3}], ids=str
)
def test_soft_capped_scores_and_short_windows(own: dict[str, Any]) -> None:
    model: Any = tiny_model("gemma2", **own)
    model.set_attn_implementation("eager")  # the only attention of transformers with soft-capping
    scorer = LogProbScorer(model, tokens_per_batch=11)
    assert scorer.shares_prefixes
    assert_scores(scorer, model, ROWS)


# ------------------------------------------------------------------ the varlen kernel of GPUs
def slow_kernel(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *most: int, **options: Any
) -> Tensor:
    """The documented contract of ``varlen_attn``: the last query of a sequence attends to its last key."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert most == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    scale, window, groups = options["scale"], options["window_size"][0], query.shape[1] // key.shape[1]
    assert options["enable_gqa"] == (groups > 1)
    out = torch.empty_like(query)
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]]
        k, v = (t[key_ends[i] : key_ends[i + 1]].repeat_interleave(groups, 1) for t in (key, value))
        distance = torch.arange(len(k)) - (torch.arange(len(q)).unsqueeze(-1) + len(k) - len(q))
        seen = (distance <= 0) & ((distance >= -window) | (window < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[query_ends[i] : query_ends[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gpt2"])
def test_every_query_sees_its_own_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the indices passed to the GPU kernel, with a slow kernel of the same contract in its place."""
    assert not _attention.takes_varlen(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))
    monkeypatch.setattr(_attention, "takes_varlen", lambda query: True)
    monkeypatch.setattr(_attention, "varlen_attn", slow_kernel)
    model = tiny_model(family)
    for tokens_per_batch in (9, 30, 8192):
        scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
        assert scorer.shares_prefixes
        for turn in (ROWS, [torch.cat([row, ids(4, 11)]) for row in ROWS]):
            assert_scores(scorer, model, turn, remember=True)
