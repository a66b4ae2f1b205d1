"""vLLM in float32 as a reference, a sampler and a teacher. The last test kills the server and starts another model."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from engine_contract import EngineContract, Served, evaluated
from seeded import PROMPTS, ZEPHYR, Rollout, make_prompts, make_tokenizer, sample, trained
from torchrl_llm_kl import LogProbScorer, Ragged, diagnose, make_algorithm
from torchrl_llm_kl.service import HTTPEngine, ScoringService, ServiceError, ServiceTimeout
from vllm_server import CONTEXT, MAX_LOGPROBS, MODEL, VllmServer, make, sampled, save, serving
from waits import LONG

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[VllmServer]:
    with serving(checkpoints / "dense") as found:
        yield found


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return make("dense")


@pytest.fixture(scope="module")
def rollout(server: VllmServer) -> Rollout:
    return server.sample(make_prompts(PROMPTS, 0))


# ------------------------------------------------------------------ a reference
class TestContract(EngineContract):
    @pytest.fixture
    def served(self, server: VllmServer, policy: nn.Module) -> Served:
        scorer = LogProbScorer(policy)
        return Served(server.url, MODEL, scorer, policy.config.vocab_size, CONTEXT, MAX_LOGPROBS, tolerance=3e-5)

    def test_the_longest_prompts(self, served: Served) -> None:
        """One token less than the context, since a server samples at least one."""
        rows = Ragged.from_list([torch.arange(n) % served.vocab for n in (CONTEXT - 1, 200, CONTEXT - 1)])
        served.assert_right(served.engine(), rows, top_k=3)

    def test_rounding_errors_are_those_of_float32(self, served: Served, measured: dict[str, Any]) -> None:
        """The server is as far from float64 as the scorer here is."""
        rows = served.rows(3, 40, 60)
        mask = rows.positions > 0
        truth = LogProbScorer(make("dense").double()).score(rows, mask).values.double()
        both = served.scorer.score(rows, mask).values, evaluated(served.engine(), rows, mask).log_prob.values
        ours, theirs = ((x.double() - truth).abs().max().item() for x in both)
        measured["log-probs of prompts, largest distance to float64"] = f"{theirs:.2g}, ours {ours:.2g}"
        assert theirs < 4 * ours < 1e-3


def prompt_log_probs(server: VllmServer, prompt: list[int], **options: Any) -> list[dict[str, Any] | None]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1, **options}
    answer = server.post("/v1/completions", **body)
    assert isinstance(answer, dict), answer
    return list(answer["choices"][0]["prompt_logprobs"])


def test_switches_of_the_tests_own_server(server: VllmServer) -> None:
    """This version has none of these traps of ``prompt_server.py``, whose docstring lists all switches."""
    assert server.version() == "0.32.0"
    prompt = [(7 * i) % 190 for i in range(150)]
    plain = prompt_log_probs(server, prompt)
    assert plain[0] is None
    assert all(plain[1:]), "cache: each token has its log-prob"
    server.post("/v1/completions", model=MODEL, prompt=prompt, max_tokens=4)  # now the cache holds it
    assert prompt_log_probs(server, prompt) == plain, "cache: it is not read, with or without a salt"
    assert prompt_log_probs(server, prompt, cache_salt="a") == plain
    for options in ({"temperature": 0.3}, {"top_k": 2}, {"logit_bias": {"7": 50.0}}, {"repetition_penalty": 1.5}):
        assert prompt_log_probs(server, prompt, **options) == plain, "forbids: prompts skip them"
    decimals = {len(str(x["logprob"]).partition(".")[2]) for at in plain[1:] for x in at.values()}
    assert max(decimals) > 6, "decimals: full floats"
    answer = server.post("/v1/completions", model=MODEL, prompt=prompt, max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == prompt, "retokenises, starts: ids come back as they were"


# ------------------------------------------------------------------ a sampler
def test_log_probs_of_the_servers_samples(rollout: Rollout, policy: nn.Module, measured: dict[str, Any]) -> None:
    rows, mask, theirs = sampled(rollout)
    off = LogProbScorer(policy).score(rows, mask).values[mask].double() - theirs
    measured["log-probs of samples, float32"] = f"rms {off.square().mean().sqrt():.2g}, largest {off.abs().max():.2g}"
    assert off.square().mean().sqrt() < 1e-5


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_log_probs_are_raw_whatever_is_sampled(server: VllmServer, policy: nn.Module, settings: dict[str, Any]) -> None:
    rows, mask, theirs = sampled(server.sample(make_prompts(2, 1), **settings))
    off = LogProbScorer(policy).score(rows, mask).values[mask] - theirs
    assert off.square().mean().sqrt() < 1e-5


def test_a_batch_of_the_server_has_no_fault(rollout: Rollout, policy: nn.Module) -> None:
    diagnosis = diagnose(rollout.batch(), policy=policy, tokenizer=make_tokenizer())
    assert diagnosis.faults == (), diagnosis


def faulty(name: str, server: VllmServer, policy: nn.Module, rollout: Rollout) -> tuple[TensorDictBase, nn.Module]:
    """A batch of the server with a fault, and the trainer's policy."""
    if name == "stale_weights":
        return rollout.batch(), trained(policy, rollout, 3, 0)
    if name == "chat_template":
        own = [p for p in make_prompts(PROMPTS, 0) for _ in range(8)]
        return replace(server.sample(make_prompts(PROMPTS, 0, ZEPHYR)), prompts=own).batch(), policy
    settings = {"wrong_temperature": {"temperature": 0.8}, "top_k": {"top_k": 10}}[name]
    return server.sample(make_prompts(PROMPTS, 0), **settings).batch(), policy


@pytest.mark.parametrize("cause", ["wrong_temperature", "top_k", "stale_weights", "chat_template"])
def test_a_fault_of_the_server_is_named(cause: str, server: VllmServer, policy: nn.Module, rollout: Rollout) -> None:
    batch, trainer = faulty(cause, server, policy, rollout)
    diagnosis = diagnose(batch, policy=trainer, tokenizer=make_tokenizer())
    assert diagnosis.worst is not None, diagnosis
    assert diagnosis.worst.cause == cause, diagnosis


def grpo(begin: nn.Module, sampling: Any, push: Any) -> tuple[list[float], list[float]]:
    """Returns ``kl_to_ref`` and the rms mismatch of each step. With equal rewards, the policy returns to the reference."""
    torch.manual_seed(0)
    actor, reference = copy.deepcopy(begin), make("dense")
    parts = make_algorithm("grpo", actor, reference=reference, kl_loss_coeff=1.0, group_size=8)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    kl, mismatch = [], []
    for step in range(10):
        found = sampling(actor, step)
        rows, mask, theirs = sampled(found)
        off = LogProbScorer(actor).score(rows, mask).values[mask] - theirs
        mismatch.append(off.square().mean().sqrt().item())
        out = parts.loss(parts.prepare(replace(found, rewards=torch.zeros(len(found.prompts))).batch()))
        kl.append(float(out["kl_to_ref"]))
        out.total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        push(actor)
    return kl, mismatch


def test_grpo_with_weights_pushed_after_each_step(server, policy, rollout, tmp_path, checkpoints, measured):
    """By a checkpoint and a reload: transfers of weights need NCCL or CUDA IPC."""
    begin, prompts = trained(policy, rollout, 8, 1).requires_grad_(True), make_prompts(4, 5)

    def push(actor: nn.Module) -> None:
        server.load(save(actor, tmp_path))

    try:
        push(begin)
        served, mismatch = grpo(begin, lambda _, step: server.sample(prompts, step), push)
    finally:
        server.load(checkpoints / "dense")
    local, _ = grpo(begin, lambda actor, step: sample(actor, prompts, step), lambda _: None)
    measured["GRPO, kl_to_ref of ten steps"] = f"{[round(x, 4) for x in served]}, local {[round(x, 4) for x in local]}"
    measured["GRPO, largest rms mismatch of a step"] = f"{max(mismatch):.2g}"
    assert max(mismatch) < 1e-5
    for kl in (served, local):
        assert kl[-1] < 0.5 * kl[0]
    assert served[-1] == pytest.approx(local[-1], rel=0.5)


# ------------------------------------------------------------------ a teacher
def test_distillation_from_a_service_of_the_server(ray_cluster, server, rollout, measured):
    """Twenty steps of ``gkd`` are those with the same teacher here."""
    factory = partial(HTTPEngine, server.url, model=MODEL, timeout=LONG)
    with ScoringService(factory=factory, name="teacher", num_cpus=0.1, timeout=LONG) as service:
        losses = [distil(teacher, rollout) for teacher in (make("dense"), service.model)]
        service.shutdown()
    off = max(abs(a - b) for a, b in zip(*losses, strict=True))
    first, last = losses[0][0], losses[0][-1]
    measured["gkd, 20 steps: largest difference of the losses"] = f"{off:.2g}, first {first:.3g}, last {last:.3g}"
    assert off < 1e-5
    assert losses[0][-1] < 0.8 * losses[0][0]


def distil(teacher: Any, rollout: Rollout) -> list[float]:
    student = make("other")
    parts = make_algorithm("gkd", student, reference=teacher, top_k=MAX_LOGPROBS)
    optimizer = torch.optim.SGD(student.parameters(), lr=5.0)
    losses = []
    for step in range(20):
        out = parts.loss(parts.prepare(rollout.batch(slice(4 * step, 4 * step + 4))))
        losses.append(float(out.total_loss.detach()))
        out.total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ------------------------------------------------------------------ the last test: this server ends
def test_a_killed_server_comes_back_with_another_model(server, checkpoints, monkeypatch, measured):
    """With another model in bfloat16, processed log-probs, a key, and without a prefix cache."""
    rows = Ragged.from_list([torch.arange(1, 30)])
    first = HTTPEngine(server.url, model=MODEL, timeout=LONG)
    with_key = partial(HTTPEngine, server.url, model=MODEL, timeout=LONG, api_key_env="TOY_KEY")
    monkeypatch.setenv("TOY_KEY", "hush")
    keyed = with_key()  # this server ignores it
    server.close()
    first._timeout = 1.0
    with pytest.raises(ServiceTimeout, match="did not answer in time: ConnectError"):
        evaluated(first, rows)
    first._timeout = LONG
    options = ("--logprobs-mode", "processed_logprobs", "--no-enable-prefix-caching", "--api-key", "hush")
    with serving(checkpoints / "other", *options, port=server.port, key="hush", dtype="bfloat16") as again:
        with pytest.raises(ServiceError, match="HTTP 401"):
            evaluated(first, rows)
        with pytest.raises(ServiceError, match="it came back with another model, by"):
            evaluated(keyed, rows)
        found = with_key()
        want = LogProbScorer(make("other")).score(rows).values
        assert (evaluated(found, rows).log_prob.values - want).abs().max() < 0.2
        rollout = again.sample(make_prompts(PROMPTS, 0))
    # How far its log-probs are from a trainer's in float32, and in bfloat16; the doctor names the precision alone.
    rows, mask, theirs = sampled(rollout)
    for dtype in (torch.float32, torch.bfloat16):
        off = LogProbScorer(make("other").to(dtype)).score(rows, mask).values[mask].double() - theirs
        rms, k3 = off.square().mean().sqrt(), (torch.expm1(off) - off).mean()
        figures = f"rms {rms:.2g}, largest {off.abs().max():.2g}, k1 {-off.mean():.2g}, k3 {k3:.2g}"
        measured[f"log-probs of samples, bfloat16, to a trainer in {dtype}"] = figures
        assert 1e-3 < rms < 0.1
    diagnosis = diagnose(rollout.batch(), policy=make("other"), tokenizer=make_tokenizer())
    assert [each.cause for each in diagnosis.faults] == ["low_precision"], diagnosis
