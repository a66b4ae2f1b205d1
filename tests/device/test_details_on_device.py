"""Parts that must not wait for the device, and features of devices: resident layers, little memory, CUDA's kernels."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from head_reference import make_head, make_targets, pair
from parity import no_sync, to
from scoring_reference import conversation
from simulated import memory_limit
from torchrl_llm_kl import AdaptiveKLCoefficient, DualKLCoefficient, LogProbScorer, Ragged, prepare_reference
from torchrl_llm_kl.estimators import PIKLCoefficient
from torchrl_llm_kl.head import linear_top_k
from torchrl_llm_kl.masks import mask_from_prompt_lengths
from torchrl_llm_kl.rollouts import read_denominators, write_denominators
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.scoring._model import Inspection, Route, Setup
from torchrl_llm_kl.scoring._packs import PackedPass
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._scores import HeadReading
from torchrl_llm_kl.scoring._tree import PrefixTree
from toy_models import tiny_model

ROWS = conversation()
HALF = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------- nothing waits
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_does_not_wait(device, dtype, direction):
    heads, options = (make_head(1, dtype=dtype), make_head(2, dtype=dtype)), {"entropy": True, "direction": direction}
    want, want_top = pair(*heads, make_targets(), beta=0.3, **options), linear_top_k(*heads[0][:2], 5)
    policy, ref = ([x.to(device).requires_grad_() for x in head] for head in heads)
    targets = make_targets().to(device)
    with no_sync(device):
        got = pair(policy, ref, targets, chunk=(3, 17), beta=0.3, **options)
        torch.stack(list(got)).sum().backward()
        top = linear_top_k(*policy[:2], 5, chunk=(3, 17))
    size = 1e-4 if dtype == torch.float32 else 0.05
    for found, wanted in zip([*got, top.log_probs], [*want, want_top.log_probs], strict=True):
        assert_close(found.cpu(), wanted, rtol=size, atol=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forward_of_a_pack_does_not_wait(device, dtype):
    model = tiny_model("llama", hidden_size=64).to(device, dtype)
    batch = Ragged.from_list(ROWS)
    LogProbScorer(model).score(batch)  # builds everything that is built once
    request = ScoreRequest.of(batch, None)
    tree = PrefixTree.build(request.tokens, request.forward_lengths)
    packed = PackedPass(Setup(Inspection(model), Route("head"), device), request, tree, 40)
    targets = [request.tokens.values[some].to(device) for some in packed.elements]
    with no_sync(device), torch.no_grad():
        for index, wanted in enumerate(targets):
            HeadReading(packed.run(index), wanted, ScoreOptions(entropy=True)).columns()


@pytest.mark.parametrize("kind", [partial(AdaptiveKLCoefficient, horizon=100), PIKLCoefficient, DualKLCoefficient])
def test_an_update_of_a_coefficient_does_not_wait(device, kind):
    coefficient, kl = kind(0.2, 6.0).to(device), torch.tensor(12.0, device=device)
    coefficient.update(kl, 10)
    with no_sync(device):
        coefficient.update(kl, 10)
        coefficient.update(6.0, 10)
        coefficient()


def test_a_mask_from_lengths_is_on_the_device(device):
    mask = mask_from_prompt_lengths(torch.tensor([1]), torch.tensor([2], device=device))
    assert mask.device == device
    assert mask.tolist() == [False, True]


def test_rows_with_different_denominators_give_nan(device):
    """On the CPU they raise an error. On a device the comparison would be a sync, so the denominators become NaN."""
    counts = {("policy", "token-mean"): 7.0, ("kl", "seq-mean-token-sum"): 3.0}
    data = TensorDict(batch_size=[2], device=device)
    numbers = {key: torch.tensor(count) for key, count in counts.items()}
    write_denominators(data, "n", *to((numbers, torch.tensor(5.0)), device))
    assert read_denominators(data, "n", list(counts)) == {"policy": 7, "kl": 3}
    data["n", "batch"] = torch.tensor([5.0, 6.0])
    found = read_denominators(data, "n", list(counts))
    assert all(x.isnan() for x in found.values())


# ---------------------------------------------------------------------- memory
def test_an_offloaded_reference_keeps_two_layers_and_the_head_on_the_device(device):
    sizes: dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    policy: Any = tiny_model("llama", tie_word_embeddings=False, **sizes)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    scorer = LogProbScorer(prepare_reference(copy.deepcopy(policy), offload_to=device))
    batch = Ragged.from_list(ROWS)
    for _ in range(3):
        found = scorer.score(batch).values
    layer = sum(x.numel() * x.element_size() for x in policy.model.layers[0].parameters())
    assert torch.accelerator.max_memory_allocated() - before < 4 * layer
    assert_close(found, LogProbScorer(policy).score(batch).values, atol=1e-4, rtol=1e-4)


def test_out_of_memory_halves_the_budget(sim):
    model = tiny_model("llama", intermediate_size=1024).to(sim)
    scorer, batch = LogProbScorer(model), Ragged.from_list(ROWS)
    want = scorer.score(batch).values
    before = torch.accelerator.memory_allocated()
    with memory_limit(before + 1_000_000), pytest.warns(UserWarning, match="out of memory: LogProbScorer continues"):
        found = scorer.score(batch).values
    assert scorer.tokens_per_batch < 16384
    assert_close(found, want, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- the kernel for packs in half precision
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gpt2", "opt", "cohere"])  # no soft-capping
def test_the_kernel_for_packs_is_as_exact_as_padding(device, family, dtype):
    if device.type != "cuda":
        pytest.skip("a kernel of CUDA (make test-device DEVICE=cuda)")
    sizes: dict[str, Any] = {"hidden_size": 64, "initializer_range": 0.1}  # heads of 16
    model = tiny_model(family, **sizes).to(device, dtype)
    scorer, padded = LogProbScorer(model, tokens_per_batch=30), LogProbScorer(model, share_prefixes=False)
    assert scorer.shares_prefixes
    batch = to(Ragged.from_list(ROWS), device)
    packed, apart = scorer.score(batch, remember=True).values, padded.score(batch).values
    exact = LogProbScorer(tiny_model(family, **sizes).to(device)).score(batch).values
    assert (packed - exact).abs().max() < 2 * (apart - exact).abs().max() + 1e-3
    totals = (each.score(batch, grad=True).values.sum() for each in (scorer, padded))
    found = (torch.autograd.grad(total, list(model.parameters())) for total in totals)
    a, b = (torch.cat([g.float().flatten() for g in gradients]) for gradients in found)
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99
