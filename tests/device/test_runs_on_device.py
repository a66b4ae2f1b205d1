"""Whole runs: a rollout, its diagnosis, a training run and its continuation, rows of a dataset."""

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from transformers import LogitsProcessorList

from parity import gradients, same_on_both, to
from seeded import clean, make_tokenizer
from torchrl_llm_kl import RecordKept, RetrieveLogProb, Sampling, ScoreOptions, diagnose, make_algorithm
from torchrl_llm_kl.datasets import from_completions
from torchrl_llm_kl.diagnostics import inspect_tokens
from torchrl_llm_kl.training import random_state, set_random_state
from toy_models import OUTPUTS, tiny_model
from toy_rollouts import make_env, make_model, make_policy, make_tokenizer as chat_tokenizer
from train_lab import ANSWERS, assert_same_run, build_lab, go, steps_in


def test_a_run_and_its_continuation(device, tmp_path, monkeypatch):
    """An interrupted and continued run equals an uninterrupted one to the last bit."""
    monkeypatch.setattr("torchrl_llm_kl.training._report.plot_curves", lambda *_, **__: None, raising=False)
    lab = build_lab(tmp_path)
    three = ("run.steps=3", "evaluation.every=0", "optimizer.warmup_steps=0")
    go(lab, tmp_path / "whole", *three)
    monkeypatch.setenv("INTERRUPT_AT", str(ANSWERS + 3))  # in the second step
    go(lab, tmp_path / "run", *three)
    assert steps_in(tmp_path / "run")[-1] == "step-000002"
    monkeypatch.delenv("INTERRUPT_AT")
    go(lab, tmp_path / "run", *three)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("algorithm", ["grpo", "gigpo", "mix"])
def test_conversations_experts_and_batches_ahead(device, tmp_path, monkeypatch, algorithm):
    """The rows of a run are on the device of the model, whatever the env keeps on the CPU."""
    monkeypatch.setattr("torchrl_llm_kl.training._report.plot_curves", lambda *_, **__: None, raising=False)
    lab = build_lab(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def again(messages, metadata):\n    return 'Sure?' if len(messages) < 4 else None\n"
    )
    (tmp_path / "experts.jsonl").write_text('{"question": "say 1", "answer": "b"}\n')
    changes = ["run.steps=3", "evaluation.every=2", "optimizer.warmup_steps=0", f"algorithm.name={algorithm}"]
    changes += ["turns.max=3", f"turns.reply={tmp_path / 'mine.py'}:again", "algorithm.max_staleness=1"]
    changes += [f"data.experts={tmp_path / 'experts.jsonl'}"] if algorithm == "mix" else []
    result, _ = go(lab, tmp_path / "run", *changes)
    assert [row["turns"] for row in result.rows] == [2.0] * 3
    assert result.rows[-1]["age"] == 1


def test_random_numbers_of_each_device_are_saved_and_restored(device):
    devices = [torch.device(device.type, i) for i in range(torch.accelerator.device_count())]
    torch.rand(1, device=device)  # the process uses the device
    state = random_state()
    first = [torch.rand(3, device=each).tolist() for each in devices]
    set_random_state(state)
    assert [torch.rand(3, device=each).tolist() for each in devices] == first


@pytest.mark.filterwarnings("ignore")
@same_on_both(size=0.001)  # float32, and quotients of small differences
def test_the_doctor_and_the_inspector(model_at, at, tmp_path):
    model, rollout = clean("qwen2", 0)
    found = diagnose(rollout.batch().to(at), policy=to(model, model_at), tokenizer=make_tokenizer())
    page = tmp_path / "page.html"
    inspect_tokens(rollout.batch(slice(4)).to(at), make_tokenizer(), page, policy=to(model, model_at))
    assert "<html" in page.read_text()
    return found.measures, len(found.findings)


@same_on_both()
def test_rows_of_a_dataset(model_at, at):
    rows = [{"prompt": f"say {i}", "completion": "yes" * (i + 1)} for i in range(3)]
    tokenizer = chat_tokenizer()
    model = make_model(tokenizer, seed=0).double().to(model_at)
    parts = make_algorithm("sft", model)
    data = parts.prepare(from_completions(rows, tokenizer).to(at))
    out = parts.loss(data)
    return out, gradients(out.total_loss, model)


def test_kept_tokens_of_a_sampler_are_recorded_and_replayed(device):
    sampling = Sampling(0.8, top_p=0.8)
    prompts = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]])
    model = tiny_model().to(device)
    record = RecordKept(sampling)
    how = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0, "logits_processor": LogitsProcessorList([record])}
    out = model.generate(input_ids=prompts.to(device), **OUTPUTS, **how)
    data = TensorDict(tokens=TensorDict(full=out.sequences, prompt=prompts.to(device), batch_size=[2]), batch_size=[2])
    data["masks", "all_attention_mask"] = torch.ones_like(out.sequences, dtype=torch.bool)
    data["masks", "all_assistant_mask"] = torch.arange(9, device=device).expand(2, 9) >= 4
    scored = RetrieveLogProb(model, options=ScoreOptions(sampling))(record.write(data))["log_probs", "full"][:, 4:]
    drawn = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, out.sequences[:, 4:, None]).squeeze(-1)
    assert_close(scored, drawn, rtol=1e-4, atol=1e-4)


def test_a_chat_env_collects_on_the_device(device):
    tokenizer = chat_tokenizer()
    model, reference = (make_model(tokenizer, seed=seed).to(device) for seed in range(2))
    parts = make_algorithm("grpo", model, reference=reference, group_size=2)
    torch.manual_seed(0)
    env = make_env(tokenizer, parts.kl_transform, envs=4, group=2)
    data = env.rollout(1, make_policy(model, tokenizer, pad_output=True)).reshape(-1)
    out = parts.loss(parts.prepare(data))
    out.total_loss.backward()
    assert float(out["ratio_max"]) == pytest.approx(1, abs=1e-4)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
