"""``RetrieveKL`` beside torchrl's on the same rollouts: the KL must agree, then time and peak memory are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torchrl.envs.llm.transforms.kl import RetrieveKL as TorchRLRetrieveKL

from benchmarks.data import Batch, grouped, independent
from benchmarks.measure import Measured, alternate
from benchmarks.models import qwen2, wrapper
from torchrl_llm_kl import RetrieveKL

VOCAB = 32_000
WORKLOADS: dict[str, Callable[[], Batch]] = {
    "4 prompts x 4 answers": lambda: grouped(4, 4, VOCAB),
    "4 prompts x 16 answers": lambda: grouped(4, 16, VOCAB),
    "16 sequences of 100..800": lambda: independent(16, VOCAB),
}


def compare(batch: Batch, *, hidden: int = 512, layers: int = 6, repeats: int = 2) -> dict[str, Measured]:
    """Score under two models and compute the KL, as a transform in torchrl and here."""
    policy, reference = qwen2(VOCAB, hidden=hidden, layers=layers), qwen2(VOCAB, hidden=hidden, layers=layers, seed=1)
    gen, ref = wrapper(policy, "log_probs"), wrapper(reference, "ref_log_probs")
    # Without no_grad torchrl keeps the graph of both models (`detach` is never read there) and needs twice the memory.
    theirs = torch.no_grad()(TorchRLRetrieveKL(gen, ref, assistant_only=False, add_to_reward=False))
    ours = RetrieveKL(gen, ref, add_to_reward=False)
    data = batch.padded()
    _check_agreement(theirs(data.copy()), ours(data.copy()), data)
    return alternate(
        {"torchrl": lambda: theirs(data.copy()), "here": lambda: ours(data.copy())}, repeats=repeats, warm_up=0
    )


def _check_agreement(theirs: TensorDictBase, ours: TensorDictBase, data: TensorDictBase) -> None:
    """Where both score: the response. Rotary positions make torchrl's padding on the left harmless."""
    response = data["masks", "all_attention_mask"].clone()
    response[:, : data["tokens", "prompt"].shape[1]] = False
    found, expected = ours["next", "kl_penalty"], theirs["next", "kl_penalty"]
    if expected.is_nested:
        expected = torch.nested.to_padded_tensor(expected, 0.0)
    difference = (found - expected)[response].abs().max()
    assert difference < 1e-4, f"the two libraries disagree by {difference}: the comparison would be worthless"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name, make in WORKLOADS.items():
        batch = make()
        result = compare(batch)
        slower, larger = result["torchrl"].ratios(result["here"])
        print(
            f"{name} ({batch.tokens} tokens, {batch.source}): torchrl {result['torchrl'].seconds:.1f} s, "
            f"{result['torchrl'].peak_mib:.0f} MiB; here {result['here'].seconds:.1f} s, {result['here'].peak_mib:.0f} MiB; "
            f"{slower:.1f}x faster, {larger:.1f}x smaller"
        )
