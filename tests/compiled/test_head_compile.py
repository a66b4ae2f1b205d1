"""The head in a compiled function: one graph and one operator per sweep, for any number of positions."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from head_reference import PAIR, H, N, V, make_head, make_targets
from torchrl_llm_kl.estimators import exact_kl
from torchrl_llm_kl.head import linear_kl, linear_log_prob, linear_outcomes, linear_pair, linear_top_k, logits_kl

CHUNK = {"chunk": (3, 40)}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def log_prob(h, w, b, rh, rw, rb, targets):
    return linear_log_prob(h, w, targets, bias=b, **CHUNK)[0]


def log_prob_and_entropy(h, w, b, rh, rw, rb, targets):
    return torch.stack(linear_log_prob(h * 2, w, targets, bias=b, entropy=True, soft_cap=4.0, **CHUNK)).sum(0)


def pair(h, w, b, rh, rw, rb, targets):
    out = linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, entropy=True, **CHUNK, **PAIR)
    return torch.stack(out).sum(0)


def pair_with_one_output_used(h, w, b, rh, rw, rb, targets):
    return linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, entropy=True, direction="forward", **CHUNK)[1]


def jensen_shannon(h, w, b, rh, rw, rb, targets):
    return linear_kl(h, w, rh, rw, direction="jensen_shannon", beta=0.3, **CHUNK)


def from_logits(h, w, b, rh, rw, rb, targets):
    return logits_kl(h @ w.T, rh @ rw.T, **CHUNK)


def estimator(h, w, b, rh, rw, rb, targets):
    return exact_kl(h[None], rh[None], w, rw, bias=b, ref_bias=rb, chunk_size=3)[0]


def beside_top_k(h, w, b, rh, rw, rb, targets):
    top = linear_top_k(h, w, 5, bias=b, **CHUNK)
    return (h.sum(-1, keepdim=True) * top.log_probs).sum(-1) + top.tail_log_prob + top.indices.sum(-1)


def outcomes(h, w, b, rh, rw, rb, targets):
    ids = torch.stack([targets, (targets + 1) % V, (targets + 40) % V], -1)
    out = linear_outcomes(h, w, targets, ids, bias=b, entropy=True, soft_cap=4.0, **CHUNK)
    return out.log_prob + out.entropy + (out.outcomes * torch.tensor([0.5, -1.0, 2.0, 3.0])).sum(-1)


FUNCTIONS = [
    log_prob,
    log_prob_and_entropy,
    pair,
    pair_with_one_output_used,
    jensen_shannon,
    from_logits,
    estimator,
    beside_top_k,
    outcomes,
]


def arguments(n=N, dtype=torch.float64):
    tensors = [t for seed in (1, 2) for t in make_head(seed, n=n, dtype=dtype, grad=True)]
    return (*tensors, make_targets(n))


def value_and_gradients(fn, args):
    value = fn(*args)
    upstream = torch.linspace(-1, 2, len(value), dtype=value.dtype)
    return value, *torch.autograd.grad(value, args[:-1], upstream, allow_unused=True)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_same_values_and_gradients_in_one_graph_for_any_number_of_positions(fn):
    """The first number is compiled as a constant, the second as a dynamic size."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    for n in (7, 12, 55):
        args = arguments(n)
        assert_close(value_and_gradients(compiled, args), value_and_gradients(fn, args))
    assert counter.frame_count == 2


def test_graph_has_one_operator_for_all_tiles():
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        torch.compile(log_prob, backend=counter, fullgraph=True)(*arguments(200))
    assert 200 / CHUNK["chunk"][0] > 60
    assert counter.op_count < 10


def test_temperature_is_dynamic():
    def run(h, w, targets, temperature):
        return linear_log_prob(h, w, targets, temperature=temperature).log_prob

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    h, w, *_, targets = arguments()
    for temperature in (1.0, 0.5, 1.3):
        assert_close(compiled(h, w, targets, temperature), run(h, w, targets, temperature))


def test_autocast():
    h, w, _, rh, rw, _, targets = arguments(dtype=torch.float32)

    def run(h, w, rh, rw):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_pair(h, w, rh, rw, targets, **CHUNK)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got, want = compiled(h, w, rh, rw), run(h, w, rh, rw)
    assert_close(tuple(got), tuple(want))
    inputs = (h, w, rh, rw)
    assert_close(*(torch.autograd.grad((out.kl + out.log_prob).sum(), inputs) for out in (got, want)))


def test_graph_break_between_two_sweeps():
    def run(*args):
        value = pair(*args)
        torch._dynamo.graph_break()
        return value + log_prob(*args)

    args = arguments()
    compiled = torch.compile(run, backend="aot_eager")
    assert_close(value_and_gradients(compiled, args), value_and_gradients(run, args))


WHOLE = [0.0, 1.0, 0.0, 0.0, 0.0]  # the last two: keep targets, restrict the reference


SETTINGS = ([3, 40], True, [0.7, 0.3], WHOLE, torch.float64, torch.float64, [1.7, 0.6, 5.0, 1.7, 1.3, 0.0])


SHARES = [([1.0, 0.0], WHOLE), ([0.0, 1.0], WHOLE), ([0.7, 0.3], WHOLE), ([1.0, 0.0], [5.0, 0.9, 0.1, 1.0, 1.0])]


@pytest.mark.parametrize(
    ("shares", "truncation", "with_targets", "with_ids"),
    [(*some, i % 2 == 0, i in (0, 3)) for i, some in enumerate(SHARES)] + [([0.7, 0.3], WHOLE, False, True)],
    ids=str,
)
def test_operators_keep_the_contract_of_torch(shares, truncation, with_targets, with_ids):
    """Declared shapes, dtypes, strides, aliases and mutations match the actual ones."""
    ops = torch.ops.torchrl_llm_kl
    *tensors, targets = (t.detach() for t in arguments())
    ids = torch.stack([targets, (targets + 1) % V], -1).unsqueeze(1)
    everything = [targets if with_targets else None, *tensors[:5], None, None, None, ids if with_ids else None]
    settings = (*SETTINGS[:2], shares, truncation, *SETTINGS[4:])
    torch.library.opcheck(ops.head_forward, (everything, *settings))
    present = iter(ops.head_forward(everything, *settings))
    fields = [True, with_targets, with_targets, True, with_ids]
    result = [next(present) if field else None for field in fields]
    statistics = list(present)
    assert len(statistics) == (6 if min(shares) > 0 else 4) + (truncation != WHOLE)
    one = torch.ones(N, dtype=torch.float64)
    grads = [one, None, None, one, one.reshape(N, 1, 1).expand(N, 1, 3).clone() if with_ids else None]
    needed = [True, True, False, True, True, False]
    torch.library.opcheck(ops.head_backward, (everything, result, statistics, grads, needed, *settings))
    assert tensors[0].shape == (N, H)
    assert tensors[1].shape == (V, H)


@pytest.mark.parametrize("with_targets", [True, False])
def test_the_operator_of_top_k_keeps_the_contract_of_torch(with_targets):
    *tensors, targets = (t.detach() for t in arguments())
    inputs = [targets if with_targets else None, *tensors[:3], *[None] * 6]
    settings = (5, SETTINGS[0], False, [1.0, 0.0], WHOLE, torch.float64, None, SETTINGS[-1][:3])
    torch.library.opcheck(torch.ops.torchrl_llm_kl.head_top_k, (inputs, *settings))
