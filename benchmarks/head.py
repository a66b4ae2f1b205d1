"""Compare the time of the linear head with the bare matrix product, torch's own fused head and the plain computation.

    python benchmarks/head.py --threads 1 --dtype float32 --vocab 32000 --hidden 512 --positions 1024

Runs of all candidates are interleaved, and the fastest run of each is reported, so that other load on the machine affects the
ratios less. With several threads on a shared machine, set OMP_WAIT_POLICY=passive. By default threads spin at the end of each
kernel, and so keep the threads that they wait for off the cores. This multiplies the time of all but large products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchrl_llm_kl.head import fused_failure, fused_obstacle, linear_log_prob, linear_pair, linear_top_k


def wait() -> None:
    """Wait until an accelerator has done all work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def fastest(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            wait()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def report(title: str, seconds: dict[str, float]) -> None:
    print(f"\n{title}")
    base = next(iter(seconds.values()))
    for name, value in seconds.items():
        print(f"  {name:<44} {value * 1e3:9.1f} ms {value / base:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunks", action="store_true", help="compare tile sizes only")
    parser.add_argument("--forward-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    hidden = torch.randn(args.positions, args.hidden, dtype=dtype, device=device)
    weight = (torch.randn(args.vocab, args.hidden, device=device) * args.hidden**-0.5 * 2).to(dtype)
    targets = torch.randint(args.vocab, (args.positions,), device=device)
    unfused = fused_obstacle(hidden, weight)
    ref_hidden, ref_weight = hidden + 0.1 * torch.randn_like(hidden), weight.clone()
    print(f"N={args.positions} H={args.hidden} V={args.vocab} {args.dtype} on {device}, {args.threads} thread(s)")
    print(f"fused kernel: {unfused or fused_failure(hidden[:64], weight) or 'equal to the tiles'}")

    def product() -> torch.Tensor:
        return hidden @ weight.T

    def plain() -> torch.Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))

    def torch_fused(options: object, h: torch.Tensor = hidden, w: torch.Tensor = weight) -> torch.Tensor:
        return F.linear_cross_entropy(h, w, targets, reduction="none", options=options)

    if args.chunks:
        candidates: dict[str, Callable[[], object]] = {"hidden @ weight.T": product}
        for n in (128, 256, 512, 1024):
            for v in (1024, 2048, 4096, 8192, 16384):
                if n <= args.positions:
                    candidates[f"{n} x {v}"] = lambda n=n, v=v: linear_log_prob(hidden, weight, targets, chunk=(n, v))
        report("tile sizes, no gradient", fastest(candidates, args.repeats))
        return

    candidates = {
        "hidden @ weight.T": product,
        "plain (h @ W.T).float().log_softmax.gather": plain,
        "linear_log_prob": lambda: linear_log_prob(hidden, weight, targets),
        "linear_log_prob, entropy": lambda: linear_log_prob(hidden, weight, targets, entropy=True),
        "linear_log_prob, soft_cap": lambda: linear_log_prob(hidden, weight, targets, soft_cap=30.0),
        "linear_top_k, 64": lambda: linear_top_k(hidden, weight, 64),
        "linear_pair, everything (two heads)": lambda: linear_pair(
            hidden, weight, ref_hidden, ref_weight, targets, entropy=True
        ),
    }
    if unfused is None:
        candidates["linear_log_prob, fused"] = lambda: linear_log_prob(hidden, weight, targets, fused=True)
    if hasattr(F, "linear_cross_entropy"):
        candidates["F.linear_cross_entropy"] = lambda: torch_fused(None)
        candidates["F.linear_cross_entropy, chunked"] = lambda: torch_fused(torch.nn.LinearCrossEntropyOptions())
    if dtype != torch.float32:
        candidates["linear_log_prob, float32 product"] = lambda: linear_log_prob(
            hidden, weight, targets, product_dtype=torch.float32
        )
    with torch.no_grad():
        report("no gradient", fastest(candidates, args.repeats))
    if args.forward_only:
        return

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def step(value: torch.Tensor) -> None:
        torch.autograd.grad(value.sum(), (h, w))

    candidates = {
        "plain": lambda: step((h @ w.T).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))),
        "linear_log_prob": lambda: step(linear_log_prob(h, w, targets).log_prob),
        "linear_log_prob, entropy": lambda: step(sum(linear_log_prob(h, w, targets, entropy=True))),
        "linear_pair, KL and log-prob": lambda: step(
            sum(linear_pair(h, w, ref_hidden, ref_weight, targets, entropy=True)[:2])
        ),
    }
    if unfused is None:
        candidates["linear_log_prob, fused"] = lambda: step(linear_log_prob(h, w, targets, fused=True).log_prob)
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        candidates["F.linear_cross_entropy"] = lambda: step(torch_fused(None, h, w))
        candidates["F.linear_cross_entropy, chunked"] = lambda: step(torch_fused(options, h, w))
    report("forward and backward, gradients of hidden and weight", fastest(candidates, args.repeats))


if __name__ == "__main__":
    main()
