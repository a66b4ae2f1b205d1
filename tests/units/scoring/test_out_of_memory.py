"""A forward that runs out of memory is retried with half the tokens."""

from typing import Any

import pytest
import torch

from closeness import assert_near
from scoring_reference import ids, plain_log_probs
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FORWARD, tiny_model

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


def assert_plain(found: Ragged, *rows: torch.Tensor) -> None:
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


def of_torch() -> Exception:
    """What the CPU's allocator really raises."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    return caught.value


ALLOCATORS = {
    "cpu": of_torch(),
    "cpu of Windows": RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you"),
    "metal": RuntimeError("MPS backend out of memory (MPS allocated: 8.99 GB, other allocations: 0.02 GB)."),
    "metal, one buffer": RuntimeError("Invalid buffer size: 24.00 GiB"),
    "driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
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
