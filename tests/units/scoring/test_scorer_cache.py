"""The prefix cache: a turn of a conversation costs its new tokens, and changed weights are never served old entries."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import body_tokens, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FAMILIES, FORWARD, tiny_model
from toy_rollouts import plain_log_probs

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, size, float32: the tiny Llama's


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def scorer(model: Any) -> LogProbScorer:
    return LogProbScorer(model)


def turns(seed: int, *lengths: int) -> list[Tensor]:
    """A conversation after each of its turns."""
    parts = [ids(length, 100 * seed + i) for i, length in enumerate(lengths)]
    return [torch.cat(parts[: i + 1]) for i in range(len(parts))]


def cost(scorer: LogProbScorer, row: Tensor, mask: Tensor | None = None, **options: Any) -> int:
    """How many tokens go through the body."""
    return body_tokens(scorer.model, lambda: scorer.score(Ragged.from_list([row]), mask, remember=True, **options))


def assert_exact(scorer: LogProbScorer, model: Any, rows: list[Tensor], mask: Tensor | None = None) -> None:
    batch = Ragged.from_list(rows)
    found = scorer.score(batch, mask, remember=True)
    asked = batch.like(batch.positions > 0 if mask is None else mask)
    for row, log_probs, wanted in zip(rows, found.to_list(), asked.to_list(), strict=True):
        # Packs of a few tokens sum in another order than whole sequences.
        expected = torch.where(wanted, plain_log_probs(model, row), 0.0).to(log_probs.dtype)
        assert_near(log_probs, expected, **FORWARD, dtype=torch.float32)
    assert scorer.memory.num_bytes <= scorer.memory.limit
    held = [t for s in scorer.memory._by_use for pair in s.keys_values for t in pair]
    assert scorer.memory.num_bytes == sum(t.numel() * t.element_size() for t in held)


def test_log_probs_of_a_float64_model_are_cached_in_float64() -> None:
    """The second call computes no log-prob, the third only the new tokens'."""
    scorer, (first, second) = LogProbScorer(tiny_model("llama").double()), turns(1, 9, 6)
    for row in (first, first, second):
        with torch.no_grad():
            every = scorer.model(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]).squeeze(1)
        found = scorer.score(Ragged.from_list([row]), remember=True).values
        assert_close(found[1:], every, atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_for_every_family(family: str) -> None:
    model = tiny_model(family)
    for tokens_per_batch in (7, None):
        scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
        assert scorer.shares_prefixes
        for a, b in zip(turns(1, 9, 6, 5), turns(2, 4, 7, 11), strict=True):
            assert_exact(scorer, model, [a, b])


def test_a_turn_costs_its_new_tokens(model: Any, scorer: LogProbScorer) -> None:
    # By hand: a last token is not forwarded. The next turn forwards it, and the one before it again, which predicts it.
    assert [cost(scorer, row) for row in turns(0, 10, 6, 6, 6)] == [9, 7, 7, 7]
    scorer, costs = LogProbScorer(model), []
    for before, row in zip([4, 10, 16, 22], turns(0, 10, 6, 6, 6), strict=True):
        mask = torch.arange(len(row)) >= before + 2  # the assistant's, after two tokens of the user's
        costs.append(cost(scorer, row, mask))
        assert_exact(scorer, model, [row], mask)
    assert costs == [9, 6, 6, 6]


def test_scoring_again_costs_one_token_and_those_never_scored_before(model: Any, scorer: LogProbScorer) -> None:
    (row,) = turns(0, 20)
    first = torch.arange(20) >= 12
    cost(scorer, row, first)
    # The last scored token was not forwarded, so the cache has no place for its log-prob: it is predicted again.
    assert cost(scorer, row, first) == 1
    assert cost(scorer, row, first & (torch.arange(20) < 19)) == 1
    # Token 5 was never scored: its log-prob needs the hidden state of token 4, so all tokens from there on are forwarded.
    earlier = first | (torch.arange(20) == 5)
    assert cost(scorer, row, earlier) == 15
    assert_exact(scorer, model, [row], earlier)
    assert cost(scorer, row, earlier) == 1


def test_a_group_of_answers_to_a_cached_prompt(model: Any, scorer: LogProbScorer) -> None:
    prompt = ids(15, 0)
    assert_exact(scorer, model, [torch.cat([prompt, ids(6, 1)])])
    group = [torch.cat([prompt, ids(6, seed)]) for seed in (1, 2, 3)]
    # The prompt and the first answer are cached; the two others need the prompt's end and their own five tokens.
    batch = Ragged.from_list(group)
    assert body_tokens(model, lambda: scorer.score(batch, remember=True)) == 1 + 5 + 5 + 1
    assert_exact(scorer, model, group)
    assert_exact(scorer, model, [torch.cat([row, ids(7, 9)]) for row in group])


REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 8))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(REQUEST, min_size=1, max_size=3), min_size=2, max_size=6), st.integers(0, 60), st.integers(3, 40)
)
def test_any_history_of_requests_at_any_limit(history: Any, room: int, budget: int) -> None:
    """Whatever was cached, evicted or cut before: the numbers equal the plain model's and the limit holds."""
    model = tiny_model("mistral")
    scorer = LogProbScorer(model, memory=room * TOKEN_BYTES, tokens_per_batch=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request in history:
            rows = [torch.cat([ids(30, trunk)[:cut], ids(tail, 50 + cut)]) for trunk, cut, tail in request]
            assert_exact(scorer, model, rows)


def test_the_least_recently_used_is_evicted_first(model: Any) -> None:
    scorer = LogProbScorer(model, memory=30 * TOKEN_BYTES)
    a, b, c = (turns(seed, 13, 1)[1] for seed in (1, 2, 3))  # 13 tokens of each are cached
    for row in (a, b, a, c):  # no room for all three: b is evicted, a was used again
        assert_exact(scorer, model, [row])
    assert len(scorer.memory) == 2
    for row, tokens in ((a, 1), (c, 1), (b, 13)):
        twin = copy.copy(scorer)
        twin.memory = copy.deepcopy(scorer.memory)
        assert cost(twin, row) == tokens
    for room in (1, 5):
        scorer = LogProbScorer(model, memory=room * TOKEN_BYTES)
        with pytest.warns(UserWarning, match=r"memory of 0 MiB is too small .* 19 tokens here .* raise memory="):
            assert_exact(scorer, model, [ids(20, 0)])
        assert len(scorer.memory) == 0


def one_step(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


CHANGES: dict[str, Any] = {
    "load_state_dict": lambda model: model.load_state_dict(tiny_model("llama", seed=1).state_dict()),
    "data in place": lambda model: [p.data.mul_(1.1) for p in model.parameters()],
    "data swapped": lambda model: [setattr(p, "data", p.data * 1.1) for p in model.parameters()],
    "optimiser": one_step,
    "one matrix": lambda model: model.model.layers[1].self_attn.q_proj.weight.data.copy_(torch.randn(32, 32)),
    "dtype": lambda model: model.double(),
    "replaced": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_never_served_old_entries(model: Any, scorer: LogProbScorer, change: str) -> None:
    first, second = turns(0, 12, 6)
    for row in (first, first, second):
        assert_exact(scorer, model, [row])
        CHANGES[change](model)
    assert_exact(scorer, model, [second])


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=2, max_size=8), st.integers(20, 60))
def test_one_cache_for_all_temperatures(history: Any, room: int) -> None:
    """Also for more temperatures than log-probs are kept for, and where entries are evicted in between."""
    model = tiny_model("mistral").double()
    scorer = LogProbScorer(model, memory=2 * room * TOKEN_BYTES)
    plain = LogProbScorer(model, memory=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (trunk, cut, tail), i in history:
            batch, hot = Ragged.from_list([torch.cat([ids(30, trunk)[:cut], ids(tail, 50 + cut)])]), 0.4 + 0.3 * i
            found = scorer.score(batch, temperature=hot, remember=True).values
            assert_close(found, plain.score(batch, temperature=hot).values, atol=1e-11, rtol=1e-11)
    assert scorer.memory.num_bytes <= scorer.memory.limit
    assert all(len(segment.log_probs) <= 4 for segment in scorer.memory._by_use)


def test_another_temperature_recomputes_log_probs_and_keeps_keys(scorer: LogProbScorer) -> None:
    first, second = turns(0, 12, 6)
    cost(scorer, first)
    # The new turn needs the hidden states from the last old token on; the log-probs of the old ones, all.
    assert cost(scorer, second, torch.arange(18) >= 12, temperature=2.0) == 6
    assert cost(scorer, first, temperature=2.0) == 11
    # A last token is in no entry: its log-prob needs the token before it.
    assert cost(scorer, first, temperature=2.0) == 1
    assert cost(scorer, first) == 1
    assert len(scorer.memory) == 2


def test_adapters_and_surroundings_clear_the_cache_and_another_temperature_has_other_log_probs() -> None:
    """An adapter switched off, its factor, and autocast around a call."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    model = peft.get_peft_model(tiny_model("llama"), config)
    scorer, (first, second) = LogProbScorer(model), turns(0, 12, 6)
    assert_exact(scorer, model, [first])
    with model.disable_adapter():
        assert_exact(scorer, model, [second])
    assert_exact(scorer, model, [second])
    assert_exact(LogProbScorer(model, adapters=False), tiny_model("llama"), [first])
    assert_exact(scorer, model, [first])
    rows = Ragged.from_list([first])
    scorer.temperature = 0.5
    want = LogProbScorer(model, temperature=0.5).score(rows).values
    assert_near(scorer.score(rows, remember=True).values, want, **FORWARD)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = scorer.score(rows, remember=True).values
    wide = scorer.score(rows, remember=True).values
    assert not torch.equal(narrow, wide)
    assert_near(wide, want, **FORWARD)
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 5.0)
    scaled = scorer.score(rows, remember=True).values
    assert (scaled - wide).abs().max() > 1e-3
    assert_near(scaled, scorer.score(rows).values, **FORWARD)


def test_what_is_not_cached(model: Any, scorer: LogProbScorer) -> None:
    (row,) = turns(0, 9)
    batch = Ragged.from_list([row])
    scorer.score(batch)
    assert scorer.memory.num_bytes == 0, "without remember"
    assert cost(scorer, row) == 8
    assert scorer.memory.num_bytes == 8 * TOKEN_BYTES
    assert cost(scorer, row, grad=True) == 8, "gradients never come from the cache"
    assert scorer.score(batch, grad=True, remember=True).values.requires_grad
    scorer.forget()
    assert (scorer.memory.num_bytes, len(scorer.memory)) == (0, 0)
    assert cost(scorer, row) == 8
    padded = LogProbScorer(model, share_prefixes=False)
    for each in turns(0, 9, 5):
        assert_exact(padded, model, [each])
    assert len(padded.memory) == 0


def test_threads_share_one_cache(model: Any, scorer: LogProbScorer) -> None:
    failures: list[BaseException] = []
    plain = tiny_model("llama")

    def play(seed: int) -> None:
        try:
            for row in turns(seed, 6, 5, 4, 3):
                assert_exact(scorer, plain, [row])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert not failures
