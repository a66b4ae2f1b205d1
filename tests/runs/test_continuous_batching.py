"""transformers' continuous batching as a sampler in this process: its log-probs are of what it sampled from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from seeded import Rollout, make_model, make_prompts, make_tokenizer
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling, diagnose

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def continuous(model: Any, **sampling: Any) -> Rollout:
    """Answers with their log-probs, 4 to each of 24 prompts."""
    prompts, end = [p for p in make_prompts(24, 0) for _ in range(4)], make_tokenizer().eos_token_id
    how = GenerationConfig(do_sample=True, max_new_tokens=12, eos_token_id=end, pad_token_id=end, **sampling)
    cache = ContinuousBatchingConfig(return_logprobs=True, num_blocks=64, max_batch_tokens=256)
    torch.manual_seed(0)
    found = model.generate_batch([p.tolist() for p in prompts], how, cache, warmup=False)
    answers = [found[f"req_{i}"] for i in range(len(prompts))]
    assert not any(answer.error for answer in answers)
    tokens, log_probs = ([torch.tensor(getattr(x, name)) for x in answers] for name in ("generated_tokens", "logprobs"))
    return Rollout(prompts, tokens, log_probs, torch.arange(len(prompts)).float())


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return make_model("qwen2", 0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=10), Sampling(top_p=0.8)], ids=str)
def test_log_probs_are_of_the_sampled_distribution(policy: nn.Module, sampling: Sampling) -> None:
    found = continuous(policy, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    pairs = list(zip(found.prompts, found.answers, strict=True))
    mask = torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in pairs])
    scores = LogProbScorer(policy, sampling=sampling).score(Ragged.from_list([torch.cat(pair) for pair in pairs]), mask)
    torch.testing.assert_close(scores.values[mask], torch.cat(found.log_probs), rtol=0, atol=1e-4)
    assert diagnose(found.batch(), policy=policy, tokenizer=make_tokenizer(), sampling=sampling).faults == ()


def test_its_default_keeps_all_tokens(policy: nn.Module) -> None:
    """Unlike ``generate``, whose default keeps 50."""
    assert diagnose(continuous(policy).batch(), policy=policy, tokenizer=make_tokenizer()).faults == ()
