"""Masks, losses, gradients, transforms and whole runs on real text, against numbers by hand."""

import copy
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from torch import Tensor
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs.llm.transforms.kl import RetrieveKL as TorchRLRetrieveKL

from benchmarks.models import wrapper
from real_model import GEMMA_TURNS, Answers, RealModel, taken
from torchrl_llm_kl import (
    KLComputation,
    KLRewardTransform,
    PolicyLoss,
    RetrieveKL,
    RetrieveLogProb,
    Sampling,
    from_conversations,
    from_pairs,
    inspect_tokens,
    make_algorithm,
    make_env,
)
from torchrl_llm_kl.diagnostics._quantities import token_texts
from torchrl_llm_kl.masks import PLAIN_TEMPLATE
from torchrl_llm_kl.tasks import PromptOrder
from torchrl_llm_kl.training import make_sampler, read_config, train
from train_lab import figures, same, weights

#: Nats of a float32 log-prob, as in test_real_scores.py.
LARGEST = 2e-4


def with_template(real: RealModel, template: str) -> Any:
    tokenizer = copy.deepcopy(real.tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def other(real: RealModel) -> Any:
    """A reference whose final norm is 1 % larger."""
    model = real.load()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01).add_(0.01)
    return model


@pytest.fixture(scope="module")
def adapted(real: RealModel) -> Any:
    """The model with adapters that change its log-probs by some hundredths of a nat."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(real.load(), settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    return model.eval()


def worked(real: RealModel, number: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Question: {row['question']}\nAnswer: "},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in real.questions[:number]
    ]


# ------------------------------------------------------------------ masks


def test_masks_of_gemmas_turns(real: RealModel) -> None:
    """By hand: the assistant's tokens lie between ``<start_of_turn>model\\n`` and ``<end_of_turn>``, which they include."""
    tokenizer, (row,) = with_template(real, GEMMA_TURNS), worked(real, 1)
    turns = [*row["messages"], {"role": "user", "content": "Are you sure? ½ × 100 = 50 🤔"}, row["messages"][1]]
    (data,) = from_conversations([{"messages": turns}], tokenizer)
    ids, mask = data["tokens", "full"].tolist(), data["masks", "all_assistant_mask"].tolist()
    start, end = (tokenizer.convert_tokens_to_ids(f"<{name}_of_turn>") for name in ("start", "end"))
    header = [start, *tokenizer("model\n", add_special_tokens=False)["input_ids"]]
    expected, inside = [], False
    for place, token in enumerate(ids):
        inside = inside or ids[max(0, place - len(header)) : place] == header
        expected.append(inside)
        inside = inside and token != end
    assert mask == expected
    assert ids.count(tokenizer.bos_token_id) == 1
    answer = "".join(tokenizer.decode(token) for token, each in zip(ids, mask, strict=True) if each)
    assert answer.replace("▁", " ").count("####") == 2


def test_masks_of_plain_text(real: RealModel) -> None:
    """The text is the prompt followed by the answer, after one BOS."""
    tokenizer, rows = with_template(real, PLAIN_TEMPLATE), worked(real, 6)
    for data, row in zip(from_conversations(rows, tokenizer), rows, strict=True):
        prompt, answer = (message["content"] for message in row["messages"])
        ids, mask = data["tokens", "full"], data["masks", "all_assistant_mask"]
        assert ids.tolist() == real.tokenizer(prompt + answer)["input_ids"]
        # The space before the answer is a part of its first token.
        assert real.tokenizer.decode(ids[mask]) == f" {answer}"


# ------------------------------------------------------------------ losses


def padded_log_probs(model: Any, answers: Answers) -> Tensor:
    """Float64 log-probs of the answers with a graph, ``[N]``."""
    rows = []
    for row, start in zip(answers.rows, answers.prompts, strict=True):
        logits = model(input_ids=row[None], logits_to_keep=torch.arange(start - 1, len(row) - 1)).logits[0]
        rows.append(taken(logits, row))
    return torch.cat(rows)


def test_the_policy_loss_and_its_gradient(real: RealModel, measured: dict[str, Any]) -> None:
    """PPO's clipped ratio against float64 by hand, with the gradient of the tied head and of two layers."""
    answers = real.sampled(prompts=2, answers=2, tokens=10)
    mask, advantage = answers.mask, torch.tensor([1.5, -0.5, 0.7, -1.2])
    names = (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.17.self_attn.q_proj.weight",
    )
    old = real.truth(answers) + 0.1 * torch.sin(torch.arange(len(mask), dtype=torch.float64))

    wide = copy.deepcopy(real.wide)
    trained = [wide.get_parameter(name).requires_grad_(True) for name in names]
    ratio = (padded_log_probs(wide, answers) - old)[mask].exp()
    weight = advantage.double().repeat_interleave(10)
    expected = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
    gradients = torch.autograd.grad(expected, trained)

    policy = real.load()
    batch = answers.batch()
    full = torch.zeros(batch["tokens", "full"].shape)
    full[batch["masks", "all_assistant_mask"]] = old[mask].float()
    batch["next", "log_probs", "full"], batch["advantage"] = full, advantage[:, None]
    ours = [policy.get_parameter(name).requires_grad_(True) for name in names]
    loss = PolicyLoss(policy, "ppo")(batch)
    loss["loss_objective"].backward()
    assert loss["loss_objective"].item() == pytest.approx(expected.item(), abs=2e-5)
    distances = []
    for parameter, truth in zip(ours, gradients, strict=True):
        assert parameter.grad is not None
        distances.append(((parameter.grad.double() - truth).norm() / truth.norm()).item())
    measured["gradient of the loss, relative distance to float64"] = ", ".join(f"{each:.1g}" for each in distances)
    assert max(distances) < 1e-4


def test_the_first_losses_of_sft_and_dpo(real: RealModel, other: Any) -> None:
    tokenizer, policy = with_template(real, PLAIN_TEMPLATE), real.load().requires_grad_(True)
    data = from_conversations(worked(real, 3), tokenizer)
    sft = make_algorithm("sft", policy)
    answers = Answers(
        [row["tokens", "full"] for row in data], [int((~row["masks", "all_assistant_mask"]).sum()) for row in data]
    )
    log_probs = real.truth(answers)
    loss = sft.loss(sft.prepare(data))["loss_objective"]
    assert loss.item() == pytest.approx(-log_probs[answers.mask].mean().item(), abs=2e-5)

    questions = real.questions[3:5]
    pairs = [
        {"prompt": f"Question: {row['question']}\nAnswer: ", "chosen": row["answer"], "rejected": "It is 7.\n#### 7"}
        for row in questions
    ]
    dpo = make_algorithm("dpo", policy, reference=other, objective_args={"beta": 0.2})
    data = from_pairs(pairs, tokenizer)
    flat = data.reshape(-1)
    answers = Answers(
        [row["tokens", "full"] for row in flat], [int((~row["masks", "all_assistant_mask"]).sum()) for row in flat]
    )
    sums = []
    for model in (real.wide, other):
        rows = (taken(logits, row).sum() for logits, row in real.logits(model, answers))
        sums.append(torch.stack(list(rows)))
    margin = 0.2 * (sums[0] - sums[1]).view(2, 2) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss = dpo.loss(dpo.prepare(data).reshape(-1))["loss_objective"]
    assert loss.item() == pytest.approx(torch.nn.functional.softplus(-margin).mean().item(), abs=2e-4)
    assert abs(loss.item() - math.log(2)) > 1e-3, "the models differ"


def test_the_reference_without_adapters(real: RealModel, adapted: Any) -> None:
    """``reference="base"`` is the model before the adapters, and only the adapters get a gradient."""
    answers = real.sampled(prompts=2, answers=2, tokens=10)
    parts = make_algorithm("grpo", adapted, reference="base", group_key="group", kl_loss="k2", kl_loss_coeff=0.1)
    batch = answers.batch()
    batch["next", "reward"], batch["group"] = torch.tensor([[1.0], [0.0], [0.0], [1.0]]), torch.tensor([0, 0, 1, 1])
    prepared = parts.prepare(batch)
    where, mask = batch["masks", "all_assistant_mask"], answers.mask
    base = prepared["next", "ref_log_probs", "full"][where]
    assert_close(base.double(), real.truth(answers)[mask], atol=LARGEST, rtol=0)
    moved = prepared["next", "log_probs", "full"][where] - base
    assert 1e-3 < moved.abs().max() < 3
    loss = parts.loss(prepared)
    assert loss["loss_kl_to_ref"].item() == pytest.approx(0.1 * moved.double().square().mean().item() / 2, rel=1e-2)
    loss["loss_objective"].backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    adapted.zero_grad(set_to_none=True)


def test_sft_learns(real: RealModel) -> None:
    """Adapters of rank 4, six steps of four worked solutions. The loss is that of the next, unseen four."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model, tokenizer = peft.get_peft_model(real.load(), settings).eval(), with_template(real, PLAIN_TEMPLATE)
    sft = make_algorithm("sft", model)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    data = from_conversations(worked(real, 28), tokenizer)
    held_out = []
    for step in range(7):
        with torch.set_grad_enabled(step < 6):
            if step in (0, 6):
                with torch.no_grad():
                    held_out.append(sft.loss(sft.prepare(data[24:]))["loss_objective"].item())
            if step < 6:
                sft.loss(sft.prepare(data[4 * step : 4 * step + 4]))["loss_objective"].backward()
                optimizer.step()
                optimizer.zero_grad()
    assert held_out[1] < held_out[0] - 0.1


# ------------------------------------------------------------------ transforms


def test_transforms_in_an_env_and_in_a_buffer(real: RealModel, other: Any, measured: dict[str, Any]) -> None:
    """Sampled answers in an env with ``RetrieveKL``. Then each transform in a replay buffer, against float64.

    The distance of torchrl's transform is only reported.
    """
    tokenizer, prompts = with_template(real, PLAIN_TEMPLATE), real.prompts[:2]

    def rollout(kl_transform: RetrieveKL | None) -> Any:
        torch.manual_seed(0)
        rows: Any = [{"prompt": prompt} for prompt in prompts]
        sizes: Any = {"num_prompts": 2, "group_size": 2, "order": PromptOrder(seed=None)}
        env = make_env(rows, lambda question, answer, metadata: 1.0, tokenizer, kl_transform=kl_transform, **sizes)
        sampler = make_sampler(real.model, tokenizer, max_new_tokens=8, sampling=Sampling())
        return env.rollout(1, sampler).reshape(-1)

    with tensordict.set_list_to_stack(True):
        batch, plain = rollout(RetrieveKL(real.model, other, coeff=0.3)), rollout(None)
    assert torch.equal(batch["tokens", "full"], plain["tokens", "full"])
    attended, width = batch["masks", "all_attention_mask"], batch["tokens", "prompt"].shape[-1]
    answer = attended & (torch.arange(attended.shape[-1]) >= width)
    ids = [row[mask] for row, mask in zip(batch["tokens", "full"], attended, strict=True)]
    answers = Answers(ids, [len(row) - int(mask.sum()) for row, mask in zip(ids, answer, strict=True)])
    for row, prompt in zip(ids, [prompts[i] for i in (0, 0, 1, 1)], strict=True):
        assert real.tokenizer.decode(row).startswith(f"<bos>{prompt}")
    one, two = (
        torch.cat([taken(*each) for each in real.logits(model, answers)])[answers.mask] for model in (real.wide, other)
    )
    last = answer & (answer.cumsum(-1) == answer.sum(-1, keepdim=True))
    reward = -0.3 * (one - two) + last[answer]

    def check(found: Any) -> None:
        for name, truth in (("log_probs", one), ("ref_log_probs", two)):
            values = found["next", name] if name == "ref_log_probs" and scalar(found) else found["next", name, "full"]
            assert_close(values.reshape(answer.shape)[answer].double(), truth, atol=LARGEST, rtol=0)
        penalty, rewards = (
            found["next", name].reshape(answer.shape)[answer].double() for name in ("kl_penalty", "reward")
        )
        assert_close(penalty, one - two, atol=2 * LARGEST, rtol=0)
        assert_close(rewards, reward, atol=LARGEST, rtol=0)

    def scalar(found: Any) -> bool:
        """Whether the reference's log-probs are one entry, as the legacy transform writes them."""
        return isinstance(found["next", "ref_log_probs"], Tensor)

    check(batch)
    wrapped = wrapper(real.model, "log_probs"), wrapper(other, "ref_log_probs")
    theirs = torch.no_grad()(TorchRLRetrieveKL(*wrapped, assistant_only=False, add_to_reward=False))(plain.copy())
    found = theirs["next", "log_probs", "full"]
    found = found.to_padded_tensor(0.0) if found.is_nested else found
    measured["torchrl's RetrieveKL, largest distance of a log-prob"] = (
        f"{(found.reshape(answer.shape)[answer].double() - one).abs().max():.2g}"
    )
    sampler, reference = (
        RetrieveLogProb(model, log_probs_full_key=(name, "full"))
        for model, name in ((real.model, "log_probs"), (other, "ref_log_probs"))
    )
    retrieve, legacy = RetrieveKL(real.model, other, coeff=0.3), KLRewardTransform(other, coef=0.3)
    for chain in ([retrieve], [sampler, reference, KLComputation(coeff=0.3)], [sampler, legacy]):
        in_order = SamplerWithoutReplacement(shuffle=False)
        buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4, sampler=in_order)
        for transform in chain:
            buffer.append_transform(transform)
        buffer.extend(plain)
        check(buffer.sample())


# ------------------------------------------------------------------ the inspector


def test_the_inspector_shows_the_text_of_every_piece(real: RealModel, tmp_path: Path) -> None:
    """Spaces, newlines, accents, and characters that the vocabulary splits into bytes."""
    text = "½ × 3 = 1.5\n\n\tnaïve café 北京 🤔 𒀀𓀀 ​end  of   text"
    ids = torch.tensor(real.tokenizer(text)["input_ids"])
    texts = token_texts(real.tokenizer, ids[1:].tolist())
    assert b"".join(each.data or each.text.encode() for each in texts).decode() == text
    assert sum(bool(each.data) for each in texts) >= 4, "a character of several tokens"
    page = inspect_tokens(Answers([ids], [1]).batch(), real.tokenizer, tmp_path / "rollouts.html", policy=real.model)
    assert page.path is not None
    assert page.path.stat().st_size > 10_000


# ------------------------------------------------------------------ whole runs

REWARD = """
def right(question, answer, metadata):
    return float(answer.strip() == metadata["answer"])
"""


def write_run(folder: Path, real: RealModel) -> dict[str, Any]:
    rows = [{"prompt": f"3 + 4 = 7\n5 + 2 = 7\n6 + 3 = 9\n{a} + 2 = ", "answer": str(a + 2)} for a in range(1, 8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    return {
        "model": {"name": str(real.folder), "template": "plain"},
        "lora": {"r": 4},
        "data": {"prompts": str(folder / "prompts.jsonl"), "num_prompts": 2, "group_size": 3},
        "reward": f"{folder / 'rewards.py'}:right",
        "sampler": {"max_new_tokens": 3, "end": ["\n"]},
        "kl": {"place": "loss", "target": 0.2},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"every": 0},
        "logging": {"doctor_every": 0},
        "checkpoints": {"every": 1, "keep": 9},
        "run": {"steps": 3, "threads": 1},
    }


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_resumes_bit_equal(
    real: RealModel, tmp_path_factory: pytest.TempPathFactory, whole: Path, ended: signal.Signals
) -> None:
    folder = whole.parent
    out = tmp_path_factory.mktemp("ended") / "out"
    command = [sys.executable, "-m", "torchrl_llm_kl", "train", str(folder / "config.yaml"), f"run.out={out}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = out / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n")):
            time.sleep(0.05)
        process.send_signal(ended)
        process.wait(timeout=120)
    finally:
        process.kill()
    assert not (out / "final").exists()
    said: list[str] = []
    result = train(read_config(folder / "config.yaml", [f"run.out={out}"]), say=said.append)
    if ended == signal.SIGINT:
        assert re.match(r"resuming after step [12] of 3", said[0])
    assert result.outcome == "finished"
    assert figures(out / "metrics.jsonl") == figures(whole / "metrics.jsonl")
    names = [Path("checkpoints", "step-000003", "model"), Path("final")]
    assert all(same(weights(out / name), weights(whole / name)) for name in names)


@pytest.fixture(scope="module")
def whole(real: RealModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_run(folder, real)
    (folder / "config.yaml").write_text(json.dumps(source))  # JSON is YAML
    train(read_config(folder / "config.yaml", [f"run.out={folder / 'out'}"]), say=lambda line: None)
    return folder / "out"
