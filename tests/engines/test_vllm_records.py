"""Replays of vLLM's records of a mixture of experts: the experts of each token, and the tokens that its sampler kept.

Both need vLLM's second model runner, which needs Triton. Triton's interpreter runs the kernels here (``interpreted``).
"""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from cli_files import write_jsonl
from routed_by_hand import by_hand, perturbed
from seeded import make_prompts
from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveLogProb, RoutedExperts, Sampling
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest
from torchrl_llm_kl.training import Run, read_config
from torchrl_llm_kl.training._engine import Engine
from vllm_server import VllmServer, make, serving

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
SAMPLING = Sampling(0.7, top_k=5)


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[VllmServer]:
    options = ("--enable-return-routed-experts", "--return-sampling-mask", "--logprobs-mode", "processed_logprobs")
    with serving(checkpoints / "mixture", *options, PYTHONPATH=str(Path(__file__).with_name("interpreted"))) as found:
        yield found


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return make("mixture")


@pytest.fixture(scope="module")
def choices(server: VllmServer) -> list[tuple[Tensor, dict[str, Any]]]:
    """Prompts with two answers each. The last prompt has more than a block of the prefix cache."""
    prompts = [*make_prompts(3, 0), torch.arange(150)]
    settings = {"temperature": SAMPLING.temperature, "top_k": SAMPLING.top_k, "max_tokens": 12}
    answers = [server.generate(p.tolist(), n=2, seed=10 * i, **settings) for i, p in enumerate(prompts)]
    return [(p, choice) for p, choices in zip(prompts, answers, strict=True) for choice in choices]


def whole(choices: list[tuple[Tensor, dict[str, Any]]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sequences, which tokens are answers, and the server's log-probs of these."""
    rows = [torch.cat([prompt, torch.tensor(choice["token_ids"])]) for prompt, choice in choices]
    mask = torch.cat([torch.arange(len(row)) >= len(p) for row, (p, _) in zip(rows, choices, strict=True)])
    return rows, mask, torch.tensor([at["logprob"] for _, choice in choices for at in choice["logprobs"]["content"]])


def experts_of(choice: dict[str, Any]) -> Tensor:
    """``[T - 1, layers, k]``, as docs/routing.md reads it."""
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))))


def kept_of(choices: list[tuple[Tensor, dict[str, Any]]], mask: Tensor) -> Kept:
    """The kept ids of all tokens, as docs/sampling.md reads them."""
    masks = [ids for _, choice in choices for ids in choice["sampling_mask"]]
    counts = torch.zeros(len(mask), dtype=torch.long)
    counts[mask] = torch.tensor([len(ids) for ids in masks])
    return Kept(torch.tensor([i for ids in masks for i in ids]), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def test_experts_are_replayed(choices: list[tuple[Tensor, dict[str, Any]]], policy: nn.Module) -> None:
    """The same weights give the server's scores. Other routers give the scores of a plain forward with its experts."""
    rows, mask, theirs = whole(choices)
    records = [experts_of(choice) for _, choice in choices]
    assert [record.shape for record in records] == [(len(row) - 1, 3, 2) for row in rows]
    tokens = Ragged.from_list(rows)
    found = LogProbScorer(policy, sampling=SAMPLING).evaluate(ScoreRequest.of(tokens, mask, routing=records))
    torch.testing.assert_close(found.log_prob.values[mask], theirs, rtol=0, atol=1e-5)
    other = perturbed(policy)
    found = LogProbScorer(other).evaluate(ScoreRequest.of(tokens, mask, routing=records))
    routed = [record[:, :2].long() for record in records]  # the last layer is dense
    with torch.no_grad():
        want, _ = by_hand("qwen3_moe", other, rows, [torch.cat([x, x[-1:]]) for x in routed])
    torch.testing.assert_close(found.log_prob.values[mask], want[mask], rtol=0, atol=1e-5)
    own = LogProbScorer(other).score(tokens, mask).values[mask]
    assert (own - want[mask]).abs().max() > 0.1, "its own experts are others"


def test_experts_of_a_batch(server: VllmServer, policy: nn.Module) -> None:
    """As an entry of the data, which a transform replays."""
    prompts = make_prompts(2, 1)
    answers = [choice for p in prompts for choice in server.generate(p.tolist(), n=1, temperature=0.7, top_k=5, seed=1)]
    rows, mask, theirs = whole(list(zip(prompts, answers, strict=True)))
    batch = TensorDict(batch_size=[2])
    batch["tokens", "prompt"], batch["tokens", "full"] = map(torch.nested.nested_tensor, (prompts, rows))
    batch["routed_experts"] = torch.nested.as_nested_tensor([experts_of(x).int() for x in answers])
    scores = RetrieveLogProb(policy, options=ScoreOptions(SAMPLING), extras=[RoutedExperts()])
    found = scores(batch)["log_probs", "full"]
    torch.testing.assert_close(torch.cat(list(found.unbind()))[mask], theirs, rtol=0, atol=1e-5)


def test_kept_tokens_are_replayed(choices: list[tuple[Tensor, dict[str, Any]]], policy: nn.Module) -> None:
    rows, mask, theirs = whole(choices)
    kept, tokens = kept_of(choices, mask), Ragged.from_list(rows)
    assert kept.offsets.diff()[mask].eq(SAMPLING.top_k).all()
    scorer = LogProbScorer(policy, sampling=SAMPLING)
    replayed = scorer.evaluate(ScoreRequest.of(tokens, mask, kept=kept))
    torch.testing.assert_close(replayed.log_prob.values[mask], theirs, rtol=0, atol=1e-5)
    own = scorer.evaluate(tokens, mask, return_kept=True).kept
    assert own.ids.reshape(-1, 5).sort().values.equal(kept.ids.reshape(-1, 5).sort().values)


def test_a_run_replays_the_records(
    checkpoints: Path, server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's log-probs are the server's, over the tokens that it kept and with its experts."""
    write_jsonl(tmp_path / "prompts.jsonl", ({"question": f"say {i}"} for i in range(8)))
    (tmp_path / "mine.py").write_text("def length(question, answer, metadata):\n    return len(answer) / 20\n")
    source = {
        "model": {"name": str(checkpoints / "mixture")},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "num_prompts": 2, "group_size": 4},
        "reward": f"{tmp_path / 'mine.py'}:length",
        "sampler": {"max_new_tokens": 6, "temperature": 0.7, "top_k": 5, "engine": server.url},
        "evaluation": {"every": 0},
        "run": {"steps": 1, "out": str(tmp_path / "out"), "threads": 1},
    }
    monkeypatch.setattr(Engine, "load", lambda *_: None)  # this server cannot reload a mixture of experts
    run = Run(read_config(source), say=print)
    batch = run.sample()
    assert batch["routed_experts"].shape[-2:] == (3, 2)
    assert batch["kept", "counts"].amax() == 5
    gap = (batch["next", "log_probs", "full"] - batch["next", "sampler_log_probs", "full"]).abs()
    assert gap.nan_to_num().max() < 1e-4
    run.close()
