"""Memory: the prefix cache, activation checkpoints, and forwards that run out of memory."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from checkpointed import enable, enable_and_wrap, enable_in_own_code, in_own_code, layers, wrap
from closeness import assert_near
from scoring_reference import SHARED, assert_gradients, assert_scores, body_tokens, conversation, ids, plain_log_probs
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FAMILIES, FORWARD, stateful_model, tiny_model, with_lora

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
    """The number of tokens that go through the body."""
    return body_tokens(scorer.model, lambda: scorer.score(Ragged.from_list([row]), mask, remember=True, **options))


def assert_exact(scorer: LogProbScorer, model: Any, rows: list[Tensor], mask: Tensor | None = None) -> None:
    batch = Ragged.from_list(rows)
    found, want = scorer.score(batch, mask, remember=True).values, plain_log_probs(model, batch, mask).detach()
    # Packs of a few tokens sum in another order than whole sequences.
    assert_near(found, want.to(found.dtype), **FORWARD, dtype=torch.float32)
    assert_held(scorer)


def assert_held(scorer: LogProbScorer) -> None:
    """The cache counts its bytes right and has at most its limit."""
    segments = [*scorer.memory._by_use]
    layers = [vars(layer).values() for each in segments if each.state is not None for layer in each.state.layers]
    held = [t for each in segments for pair in each.keys_values for t in pair]
    held += [t for x in layers for each in x for t in (each.values() if isinstance(each, dict) else [each])]
    held = [t for t in held if isinstance(t, Tensor)]
    assert scorer.memory.limit >= scorer.memory.num_bytes == sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_for_every_family(family: str) -> None:
    model = tiny_model(family)
    for tokens_per_batch in (7, None):
        scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
        assert scorer.shares_prefixes
        for a, b in zip(turns(1, 9, 6, 5), turns(2, 4, 7, 11), strict=True):
            assert_exact(scorer, model, [a, b])


def test_costs_by_hand(model: Any, scorer: LogProbScorer) -> None:
    # A last token is not forwarded before the next turn; its log-prob is cached.
    assert [cost(scorer, row) for row in turns(0, 10, 6, 6, 6)] == [9, 6, 6, 6]
    scorer, costs = LogProbScorer(model), []
    for before, row in zip([4, 10, 16, 22], turns(0, 10, 6, 6, 6), strict=True):
        mask = torch.arange(len(row)) >= before + 2  # the assistant's, after two tokens of the user's
        costs.append(cost(scorer, row, mask))
        assert_exact(scorer, model, [row], mask)
    assert costs == [9, 6, 6, 6]
    # Scoring again costs nothing.
    scorer, row, first = LogProbScorer(model), ids(20, 0), torch.arange(20) >= 12
    assert [cost(scorer, row, first) for _ in range(2)] == [19, 0]
    # Token 5 was never scored: its log-prob needs the hidden state of token 4, so all tokens from there on are forwarded.
    earlier = first | (torch.arange(20) == 5)
    assert [cost(scorer, row, earlier) for _ in range(2)] == [15, 0]
    # At another temperature the log-probs of old tokens need their hidden states, and the new turn needs its own.
    scorer, (first, second) = LogProbScorer(model), turns(0, 12, 6)
    cost(scorer, first)
    assert cost(scorer, second, torch.arange(18) >= 12, temperature=2.0) == 6
    assert [cost(scorer, first, temperature=hot) for hot in (2.0, 2.0, 1.0)] == [11, 0, 0]
    assert len(scorer.memory) == 2
    # The prompt and the first answer are cached; the two others need the prompt's end and their own five tokens.
    scorer, group = LogProbScorer(model), [torch.cat([ids(15, 0), ids(6, seed)]) for seed in (1, 2, 3)]
    assert_exact(scorer, model, group[:1])
    batch = Ragged.from_list(group)
    assert body_tokens(model, lambda: scorer.score(batch, remember=True)) == 1 + 5 + 5
    assert_exact(scorer, model, group)
    assert_exact(scorer, model, [torch.cat([row, ids(7, 9)]) for row in group])


REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 8))
CALL = st.tuples(st.lists(REQUEST, min_size=1, max_size=3), st.integers(0, 6))


@cache
def doubled(family: str) -> LogProbScorer:
    return LogProbScorer((tiny_model if family == "mistral" else stateful_model)(family).double(), memory=0)


@pytest.mark.parametrize("family", ["mistral", "lfm2"])
@settings(max_examples=6, deadline=None)
@given(st.lists(CALL, min_size=2, max_size=6), st.integers(0, 60), st.integers(3, 40))
def test_any_history_of_requests_and_temperatures_at_any_limit(
    family: str, history: Any, room: int, budget: int
) -> None:
    """Scores are right whatever was cached or evicted before, even for more temperatures than the cache keeps."""
    plain = doubled(family)
    settings: Any = {"memory": 2 * room * TOKEN_BYTES, "tokens_per_batch": budget, "probe": family != "mistral"}
    scorer = LogProbScorer(plain.model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request, i in history:
            rows = [torch.cat([ids(30, trunk)[:cut], ids(tail, 50 + cut)]) for trunk, cut, tail in request]
            batch, hot = Ragged.from_list(rows), 0.4 + 0.3 * i
            found = scorer.score(batch, temperature=hot, remember=True).values
            near = 1e-11 if family == "mistral" else 1e-6  # convolutions are computed in float32
            assert_close(found, plain.score(batch, temperature=hot).values, atol=near, rtol=near)
            assert_held(scorer)
    assert all(len(segment.log_probs) <= 4 for segment in scorer.memory._by_use)


def test_log_probs_are_kept_for_four_samplers(scorer: LogProbScorer) -> None:
    """Log-probs of tokens after the end of a turn, too."""
    (row,) = turns(0, 12)
    assert [cost(scorer, row, temperature=1 + i / 8) for i in range(6)] == [11] * 6
    assert [cost(scorer, row, temperature=1 + i / 8) for i in (5, 4, 3, 2)] == [0] * 4
    (segment,) = scorer.memory._by_use
    assert len(segment.log_probs) == len(segment.followers) == 4


def test_the_least_recently_used_is_evicted_first(model: Any) -> None:
    scorer = LogProbScorer(model, memory=30 * TOKEN_BYTES)
    a, b, c = (turns(seed, 13, 1)[1] for seed in (1, 2, 3))  # 13 tokens of each are cached
    for row in (a, b, a, c):  # no room for all three: b is evicted, a was used again
        assert_exact(scorer, model, [row])
    assert len(scorer.memory) == 2
    for row, tokens in ((a, 0), (c, 0), (b, 13)):
        twin = copy.copy(scorer)
        twin._memory = copy.deepcopy(scorer.memory)
        assert cost(twin, row) == tokens
    for room in (1, 5):
        scorer = LogProbScorer(model, memory=room * TOKEN_BYTES)
        with pytest.warns(UserWarning, match=r"memory of 0 MiB is too small .* 19 tokens take .* Raise memory="):
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


def test_adapters_and_autocast_clear_the_cache_and_temperatures_are_separate() -> None:
    """With an adapter switched off, another factor, and autocast around a call."""
    model = with_lora(tiny_model("llama"), target_modules="all-linear")
    scorer, (first, second) = LogProbScorer(model), turns(0, 12, 6)
    assert_exact(scorer, model, [first])
    with model.disable_adapter():
        assert_exact(scorer, model, [second])
    assert_exact(scorer, model, [second])
    scorer.options = scorer.options.but(adapters=False)
    assert_exact(scorer, tiny_model("llama"), [first])
    scorer.options = scorer.options.but(adapters=True)
    assert_exact(scorer, model, [first])
    rows = Ragged.from_list([first])
    scorer.options = scorer.options.but(temperature=0.5)
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


def test_threads_share_one_cache(scorer: LogProbScorer) -> None:
    plain = tiny_model("llama")

    def play(seed: int) -> None:
        for row in turns(seed, 6, 5, 4, 3):
            assert_exact(scorer, plain, [row])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(play, range(4)))


# ------------------------------------------------------------------ checkpoints: recomputed when the pack is gone
ROWS = conversation()
BATCH = Ragged.from_list(ROWS)
APART = sum(len(row) - 1 for row in ROWS)
WEIGHTS = torch.linspace(-1, 2, len(BATCH.values))


def backward(model: Any, **settings: Any) -> tuple[list[Tensor | None], int]:
    """The gradients of a weighted sum of all log-probs, and how often layers ran in the backward."""
    runs: list[int] = []
    found = LogProbScorer(model, **settings).score(BATCH, grad=True)
    for module in model.modules():  # the hooks go with the model
        if "Attention" in type(module).__name__:
            module.register_forward_hook(lambda *_: runs.append(1))
    (found.values * WEIGHTS).sum().backward()
    return [p.grad for p in model.parameters()], len(runs)


@cache
def plain_gradients(family: str = "llama") -> list[Tensor | None]:
    """Gradients of plain forwards of one sequence at a time."""
    model = tiny_model(family)
    (plain_log_probs(model, BATCH) * WEIGHTS).sum().backward()
    return [p.grad for p in model.parameters()]


WAYS = [enable, wrap, enable_and_wrap]


@pytest.mark.parametrize(
    ("family", "checkpointed", "reentrant"),
    [
        *((family, WAYS[i % 3], False) for i, family in enumerate(FAMILIES)),
        *zip(("llama", "gemma2", "gpt2"), WAYS, [True] * 3, strict=True),
    ],
)
def test_packs_under_checkpointing(checkpointed: Any, reentrant: bool, family: str) -> None:
    """The recomputation attends as the forward did. As many tokens go through the body, and gradients have equal bits."""
    for tokens_per_batch in (9, 8192):  # keys from earlier packs, and one pack
        model = tiny_model(family).train()
        checkpointed(model, reentrant)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="None of the inputs")  # torch, where the check needs no gradient
            got, runs = backward(model, tokens_per_batch=tokens_per_batch)
        assert runs > 0, "the layers did not run again"
        assert_gradients((p.grad for p in model.parameters()), plain_gradients(family))
        for a, b in zip(got, backward(tiny_model(family).train(), tokens_per_batch=tokens_per_batch)[0], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    scorer = LogProbScorer(model)
    assert body_tokens(model, lambda: scorer.score(BATCH, grad=True)) == SHARED


@pytest.mark.parametrize(
    ("checkpointed", "reentrant"),
    [(in_own_code, True), (in_own_code, False), (enable_in_own_code, False)],
)
def test_other_checkpoints_are_padded_with_one_warning(checkpointed: Any, reentrant: bool) -> None:
    for tokens_per_batch in (9, 8192):
        model = tiny_model("llama").train()
        checkpointed(model, reentrant)
        message = r"^Layers run in a checkpoint .* share no prefixes where LlamaForCausalLM"
        with pytest.warns(UserWarning, match=message) as caught:
            backward(model, tokens_per_batch=tokens_per_batch)
        assert sum("share no prefixes" in str(w.message) for w in caught) == 1
        assert_gradients((p.grad for p in model.parameters()), plain_gradients())
    scorer = LogProbScorer(model)
    with pytest.warns(UserWarning, match="share no prefixes"):
        scorer.score(BATCH, grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        assert body_tokens(model, lambda: scorer.score(BATCH, grad=True)) >= APART
        assert body_tokens(model, lambda: scorer.score(BATCH)) == SHARED, "without gradient nothing is recomputed"
        model.zero_grad()
        backward(model, share_prefixes=False)  # no warning where prefixes are not to be shared
    assert_gradients((p.grad for p in model.parameters()), plain_gradients())


@pytest.mark.parametrize("dropped", [False, True])
def test_autocast_and_dropout_are_recomputed(dropped: bool) -> None:
    """Under autocast, and under dropout with the same random numbers."""
    options: dict[str, Any] = {"attention_dropout": 0.4} if dropped else {}
    found = []
    for checkpointed in (False, True):
        model = tiny_model("llama", **options).train()
        if checkpointed:
            enable(model, False)
        scorer = LogProbScorer(model, dtype=torch.bfloat16)
        torch.manual_seed(3)
        (scorer.score(BATCH, grad=True).values * WEIGHTS).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_in_another_thread_leaves_the_model_as_before() -> None:
    """On a GPU the recomputation runs in a thread of autograd."""
    model = tiny_model("gemma2").train()
    enable(model, False)
    name, functions = model.config._attn_implementation, [x._gradient_checkpointing_func for x in layers(model)]
    total = (LogProbScorer(model).score(BATCH, grad=True).values * WEIGHTS).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert_gradients((p.grad for p in model.parameters()), plain_gradients("gemma2"))
    assert model.config._attn_implementation == name
    assert [x._gradient_checkpointing_func for x in layers(model)] == functions
    assert_scores(LogProbScorer(tiny_model("gemma2")), model.eval(), ROWS)


def test_two_forwards_before_their_backwards() -> None:
    """Each recomputation finds the pack of its own forward, and again if the graph is kept."""
    model = tiny_model("llama").train()
    enable(model, False)
    scorer = LogProbScorer(model, tokens_per_batch=16)
    first, second = (scorer.score(Ragged.from_list(rows), grad=True).values for rows in (ROWS[:4], ROWS[4:]))
    scorer.score(Ragged.from_list(ROWS[2:5]))
    totals = (first * WEIGHTS[: len(first)]).sum(), (second * WEIGHTS[len(first) :]).sum()
    for keep in (True, False):
        model.zero_grad()
        for total in totals:
            total.backward(retain_graph=keep)
        assert_gradients((p.grad for p in model.parameters()), plain_gradients())


# ------------------------------------------------------------------ out of memory: retried with half the tokens
ROW = torch.arange(50)


def scorer_with_room_for(tokens: int, error: Exception | None = None, **options: Any) -> LogProbScorer:
    """A scorer whose model's body raises an out-of-memory error on more than ``tokens`` tokens, including padding."""
    error = torch.OutOfMemoryError("CUDA out of memory (simulated)") if error is None else error
    model = tiny_model("qwen2")
    scorer = LogProbScorer(model, **options)

    def check(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].numel() > tokens:
            raise error

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    return scorer


def assert_plain(found: Ragged, *rows: Tensor) -> None:
    want = plain_log_probs(tiny_model("qwen2"), Ragged.from_list(list(rows))).detach()
    assert_near(found.values.detach(), want, **FORWARD)


@pytest.mark.parametrize(("share", "grad"), [(True, True), (True, False), (False, True)])
def test_the_budget_is_halved_until_it_fits_and_stays(share: bool, grad: bool) -> None:
    rows = [torch.cat([ids(20, 0), ids(n, n)]) for n in (3, 9, 6, 4, 7, 2)]
    scorer = scorer_with_room_for(40, tokens_per_batch=256, share_prefixes=share)
    with pytest.warns(UserWarning, match="out of memory: LogProbScorer continues with tokens_per_batch="):
        found = scorer.score(Ragged.from_list(rows), grad=grad)
    assert scorer.tokens_per_batch == 32
    assert_plain(found, *rows)
    # A call that fits leaves the budget to the device: one that the model moves to later has its own default.
    scorer = scorer_with_room_for(40, share_prefixes=share)
    scorer.score(Ragged.from_list([ROW[:9]]))
    assert scorer.tokens_per_batch is None


def test_a_single_sequence_is_cut_or_raises_the_devices_error() -> None:
    scorer = scorer_with_room_for(40, tokens_per_batch=64)
    with pytest.warns(UserWarning, match="out of memory"):
        assert_plain(scorer.score(Ragged.from_list([ROW])), ROW)
    assert scorer.tokens_per_batch == 32
    for share, room, left in ((False, 40, 32), (True, 12, 16)):
        scorer = scorer_with_room_for(room, tokens_per_batch=64, share_prefixes=share)
        with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError):
            scorer.score(Ragged.from_list([ROW]))
        assert scorer.tokens_per_batch == left


# What the CPU's allocator really raises.
with pytest.raises(RuntimeError) as _caught:
    torch.empty(2**48)
assert not isinstance(_caught.value, torch.OutOfMemoryError)
ALLOCATORS = {
    "cpu": _caught.value,
    "metal": RuntimeError("MPS backend out of memory (MPS allocated: 8.99 GB, other allocations: 0.02 GB)."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "xpu": torch.OutOfMemoryError("XPU out of memory."),
    "numpy": MemoryError("Unable to allocate 25.0 GiB"),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_allocator_is_out_of_memory(name: str) -> None:
    scorer = scorer_with_room_for(40, ALLOCATORS[name], tokens_per_batch=64)
    rows = [ROW[:25], ROW[25:]]
    with pytest.warns(UserWarning, match="out of memory: LogProbScorer continues with tokens_per_batch=32"):
        found = scorer.score(Ragged.from_list(rows), grad=name == "cpu")
    assert_plain(found, *rows)
    assert scorer.tokens_per_batch == 32
    tight = scorer_with_room_for(0, ALLOCATORS[name], tokens_per_batch=32)
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(type(ALLOCATORS[name])) as caught:
        tight.score(Ragged.from_list([ROW]))
    assert caught.value is ALLOCATORS[name]


@pytest.mark.parametrize("error", [RuntimeError("friends ran out of memory"), ValueError("CUDA out of memory")])
def test_another_error_is_raised(error: Exception) -> None:
    scorer = scorer_with_room_for(4, error, tokens_per_batch=64)
    with pytest.raises(type(error)) as caught:
        scorer.score(Ragged.from_list([ROW]))
    assert caught.value is error
    assert scorer.tokens_per_batch == 64
