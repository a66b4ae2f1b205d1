"""Random heads for the tests of the head, and reference values from plain torch."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_llm_kl.head import linear_pair

N, H, V = 7, 13, 101
INF = float("inf")
# Every option differs from its default and from its sibling's, so that a swap or an omission shows.
OPTIONS = {"temperature": 1.7, "scale": 0.6, "soft_cap": 5.0}
PAIR = {**OPTIONS, "ref_scale": 1.3, "ref_soft_cap": 3.0}
REF_OPTIONS = {"temperature": 1.7, "scale": 1.3, "soft_cap": 3.0}  # for plain()
DIRECTIONS = ["reverse", "forward", "jensen_shannon"]


def make_head(seed=0, *, n=N, h=H, v=V, dtype=torch.float64, grad=False):
    rng = torch.Generator().manual_seed(seed)
    shapes = ((n, h), (v, h), (v,))
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def make_targets(n=N, v=V, seed=0):
    return torch.randint(v, (n,), generator=torch.Generator().manual_seed(seed))


def plain(hidden, weight, bias=None, *, temperature=1.0, scale=1.0, soft_cap=None):
    """All log-probs ``[N, V]`` in plain torch. Logits have the dtype of the inputs, and are upcast before all other steps."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return (logits / temperature).log_softmax(-1)


def at(log_p, targets):
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy_of(log_p):
    return -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)


def kl_of(log_p, log_q):
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -INF, 0.0)).sum(-1)


def jensen_shannon_of(log_p, log_q, beta):
    """The divergence from probabilities. ``log_p`` is the policy's, ``beta`` the reference's share of the mixture."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * q + (1 - beta) * p).log()
    return beta * kl_of(log_q, log_m) + (1 - beta) * kl_of(log_p, log_m)


def divergence_of(log_p, log_q, direction="reverse", beta=0.3):
    if direction == "jensen_shannon":
        return jensen_shannon_of(log_p, log_q, beta)
    return kl_of(log_p, log_q) if direction == "reverse" else kl_of(log_q, log_p)


def pair_of(log_p, log_q, targets, **options):
    """The outputs of ``linear_pair``, from all log-probs."""
    return divergence_of(log_p, log_q, **options), at(log_p, targets), at(log_q, targets), entropy_of(log_p)


def pair(policy, ref, targets=None, **options):
    """``linear_pair`` of two heads, with their biases if there are any."""
    biases = {"bias": policy[2], "ref_bias": ref[2]} if len(policy) == 3 else {}
    return linear_pair(*policy[:2], *ref[:2], targets, **biases, **options)


def linear_kl(*heads, **options):
    return linear_pair(*heads, **options).kl


def from_logits(logits, dtype=torch.float32):
    """Hidden states and weight whose product is exactly ``logits``."""
    logits = torch.as_tensor(logits, dtype=dtype)
    return torch.eye(len(logits), dtype=dtype), logits.T.contiguous()


class Sizes(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def largest(run):
    """The sizes of the largest tensor of ``run()``, and of the backward of its result."""
    with Sizes() as forward:
        out = run()
    with Sizes() as backward:
        out.masked_fill(out.isneginf(), 0.0).sum().backward()
    return forward.largest, backward.largest


def assert_same(got, want, inputs=(), weights=None):
    """Check that outputs agree, and the gradients of their weighted sum with respect to ``inputs``."""
    assert_close(tuple(got), tuple(want))
    if inputs:
        weights = [1.0] * len(want) if weights is None else weights
        sums = (sum((w * x).sum() for w, x in zip(weights, values, strict=True)) for values in (got, want))
        ours, theirs = (torch.autograd.grad(total, tuple(inputs), retain_graph=True) for total in sums)
        assert_close(ours, theirs)


def collapse(log_p, ids):
    """Log-probs of the ids, and of all other tokens together if there are any."""
    listed, others = log_p.gather(-1, ids), torch.ones_like(log_p).scatter(-1, ids, 0.0)
    rest = (log_p.exp() * others).sum(-1, keepdim=True).log()
    return listed if ids.shape[-1] == log_p.shape[-1] else torch.cat([listed, rest], -1)


def gkd_of(log_q, log_p, beta):
    """GKD's divergence of a student ``q`` and a teacher ``p``."""
    return {0.0: kl_of(log_p, log_q), 1.0: kl_of(log_q, log_p)}.get(beta, jensen_shannon_of(log_q, log_p, beta))
