"""transformers' continuous batching as a sampler: its log-probs belong to the distribution that it samples from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from seeded import Rollout, make_model, make_prompts, make_tokenizer
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling, diagnose

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(0.7, top_k=10), Sampling(top_p=0.8)], ids=str)
def test_log_probs_belong_to_the_sampled_distribution(sampling: Sampling | None) -> None:
    """By default continuous batching keeps all tokens, while ``generate`` keeps the 50 most probable ones."""
    policy: Any = make_model("qwen2", 0)
    prompts, end = [p for p in make_prompts(24, 0) for _ in range(4)], make_tokenizer().eos_token_id
    chosen = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")} if sampling else {}
    how = GenerationConfig(do_sample=True, max_new_tokens=12, eos_token_id=end, pad_token_id=end, **chosen)
    cache = ContinuousBatchingConfig(return_logprobs=True, num_blocks=64, max_batch_tokens=256)
    torch.manual_seed(0)
    found = policy.generate_batch([p.tolist() for p in prompts], how, cache, warmup=False)
    answers = [found[f"req_{i}"] for i in range(len(prompts))]
    assert not any(answer.error for answer in answers)
    tokens, log_probs = ([torch.tensor(getattr(x, name)) for x in answers] for name in ("generated_tokens", "logprobs"))
    mask = torch.cat([torch.arange(len(p) + len(a)) >= len(p) for p, a in zip(prompts, tokens, strict=True)])
    rows = Ragged.from_list([torch.cat(pair) for pair in zip(prompts, tokens, strict=True)])
    scores = LogProbScorer(policy, sampling=sampling).score(rows, mask)
    torch.testing.assert_close(scores.values[mask], torch.cat(log_probs), rtol=0, atol=1e-4)
    batch = Rollout(prompts, tokens, log_probs, torch.arange(len(prompts)).float()).batch()
    assert diagnose(batch, policy=policy, tokenizer=make_tokenizer(), sampling=sampling).faults == ()
