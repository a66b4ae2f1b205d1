"""The head, and outputs of losses, in a compiled function: one graph and one operator per sweep, for any number of rows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from head_reference import PAIR, N, V, make_head, make_targets
from torchrl_llm_kl.head import Truncation, linear_log_prob, linear_outcomes, linear_pair, logits_kl
from torchrl_llm_kl.losses import LossOutput

CHUNK = {"chunk": (3, 40)}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def log_prob(h, w, b, rh, rw, rb, targets, temperature=1.0):
    return linear_log_prob(h, w, targets, bias=b, temperature=temperature, **CHUNK)[0]


def pair(h, w, b, rh, rw, rb, targets, **options):
    return linear_pair(h, w, rh, rw, targets, bias=b, ref_bias=rb, entropy=True, **CHUNK, **options)


def truncated(h, w, b, rh, rw, rb, targets):
    targets = (h @ w.T + b).argmax(-1)
    return sum(linear_log_prob(h, w, targets, bias=b, truncation=Truncation(9, 0.7), entropy=True))


def outcomes(h, w, b, rh, rw, rb, targets):
    ids = torch.stack([targets, (targets + 1) % V, (targets + 40) % V], -1)
    out = linear_outcomes(h, w, targets, ids, bias=b, entropy=True, soft_cap=4.0, **CHUNK)
    return out.log_prob + out.entropy + (out.outcomes * torch.tensor([0.5, -1.0, 2.0, 3.0])).sum(-1)


FUNCTIONS = {
    "log_prob": log_prob,
    "log_prob_and_entropy": lambda h, w, b, rh, rw, rb, targets: sum(
        linear_log_prob(h * 2, w, targets, bias=b, entropy=True, soft_cap=4.0, **CHUNK)
    ),
    "pair": lambda *args: sum(pair(*args, **PAIR)),
    "jensen_shannon": lambda h, w, b, rh, rw, rb, _: (
        linear_pair(h, w, rh, rw, direction="jensen_shannon", beta=0.3, **CHUNK).kl
    ),
    "from_logits": lambda h, w, b, rh, rw, rb, _: logits_kl(h @ w.T, rh @ rw.T, **CHUNK),
    "truncated": truncated,
    "outcomes": outcomes,
}


def arguments(n=N, dtype=torch.float64):
    tensors = [t for seed in (1, 2) for t in make_head(seed, n=n, dtype=dtype, grad=True)]
    return (*tensors, make_targets(n))


def assert_alike(compiled, run, args):
    """Check that values and gradients are equal."""
    found = []
    for fn in (compiled, run):
        value = fn(*args)
        upstream = torch.linspace(-1, 2, len(value), dtype=value.dtype)
        found.append((value, *torch.autograd.grad(value, args[:6], upstream, allow_unused=True)))
    assert_close(*found)


@pytest.mark.parametrize("name", [pytest.param("log_prob", marks=pytest.mark.smoke), *[*FUNCTIONS][1:]])
def test_same_values_and_gradients_in_one_graph_for_any_number_of_positions(name):
    """The first number is compiled as a constant, the second as a dynamic size."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
    for n in (7, 12, 55):
        assert_alike(compiled, FUNCTIONS[name], arguments(n))
    assert counter.frame_count == 2
    for temperature in (0.5, 1.3) if name == "log_prob" else ():
        found, want = (run(*arguments(), temperature) for run in (compiled, log_prob))
        assert_close(found, want)


def test_graph_has_one_operator_for_all_tiles():
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        torch.compile(log_prob, backend=counter, fullgraph=True)(*arguments(200))
    assert counter.op_count < 10 < 200 / CHUNK["chunk"][0]


@pytest.mark.parametrize("fullgraph", [True, False], ids=["autocast", "a graph break between two sweeps"])
def test_autocast_and_graph_breaks(fullgraph):
    def run(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fullgraph):
            out = pair(*args)
        if not fullgraph:
            torch._dynamo.graph_break()
        return out.kl + out.log_prob + log_prob(*args)

    args = arguments(dtype=torch.float32 if fullgraph else torch.float64)
    assert_alike(torch.compile(run, backend="aot_eager", fullgraph=fullgraph), run, args)


WHOLE = [0.0, 1.0, 0.0, 0.0, 0.0]  # the last two: keep targets, restrict the reference
POLICY, REFERENCE = [1.7, 0.6, 5.0], [1.7, 1.3, 0.0]


@pytest.mark.parametrize(
    ("shares", "truncation", "with_targets", "with_ids"),
    [
        ([1.0, 0.0], WHOLE, True, True),
        ([0.0, 1.0], WHOLE, False, False),
        ([0.7, 0.3], WHOLE, True, False),
        ([1.0, 0.0], [5.0, 0.9, 0.1, 1.0, 1.0], False, True),
        ([0.7, 0.3], WHOLE, False, True),
    ],
    ids=str,
)
def test_operators_keep_the_contract_of_torch(shares, truncation, with_targets, with_ids):
    """Declared shapes, dtypes, strides, aliases and mutations match the actual ones."""
    ops = torch.ops.torchrl_llm_kl
    *tensors, targets = (t.detach() for t in arguments())
    ids = torch.stack([targets, (targets + 1) % V], -1).unsqueeze(1)
    everything = [targets if with_targets else None, *tensors[:5], None, None, None, ids if with_ids else None]
    settings = ([3, 40], [1.0, *shares, *truncation, *POLICY, *REFERENCE], torch.float64, torch.float64)
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


def test_an_output_of_a_loss_can_be_made_and_read_in_a_compiled_function():
    @torch.compile(fullgraph=True, backend="eager")
    def f(x):
        out = LossOutput(loss_a=2 * x, loss_b=-x, ESS=x * 0 + 1)
        return out, out.total_loss

    out, total = f(torch.tensor(3.0))
    assert type(out) is LossOutput
    assert total == out.mean(reduce=True) == 3
