"""Tests of the demo's task and parts, and of the settings of the tutorials."""

import re

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("omegaconf")
pytest.importorskip("rich")
pytest.importorskip("typer")
import countdown_demo
import gsm8k_text
from countdown.algorithms import build, label
from countdown.model import as_policy, build_model, build_tokenizer, render_prompt, warm_up
from countdown.settings import check_positive, read_settings
from countdown.task import Problem, all_problems, make_env, reward, solved, split_problems
from project import PROJECT
from torchrl_llm_kl import FixedKLCoefficient, RetrieveKL
from torchrl_llm_kl.training import load_inputs, loss_entries, read_config

PROBLEMS = all_problems(max_number=9)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(PROBLEMS)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer)
    first, *_, last = warm_up(model, tokenizer, PROBLEMS[:40], steps=30, seed=0)
    assert last < first
    model.zero_grad()
    return model


def test_the_task(tokenizer) -> None:
    """Tests right answers, rewards by hand, the split of the problems, and the tokens."""
    for problem in PROBLEMS:
        assert problem.is_solved_by(problem.answer(problem.operation)), problem
    wrong = ("<answer>3*5</answer>", "<answer>4+4</answer>", "3+5")  # the last without its tags
    assert not any(Problem((3, 5), 8, "+").is_solved_by(answer) for answer in wrong)
    metadata = {"numbers": [3, 5], "target": 15}
    for answer, value in (("<answer>3*5</answer>", 1.0), ("<answer>3+5</answer>", 0.1), ("3*5", 0.0)):
        assert reward("", answer, metadata) == value
        assert solved("", answer, metadata) == (value == 1.0)
    train, held_out = split_problems(all_problems(20), 200)
    assert len(held_out) == len(set(held_out)) == 200
    keys, others = ({(frozenset(p.numbers), p.target) for p in side} for side in (train, held_out))
    assert not keys & others
    assert len(train) + len(held_out) == len(all_problems(20))
    assert tokenizer.tokenize("<answer>3*5</answer>") == ["<answer>", "3", "*", "5", "</answer>"]
    assert len(tokenizer(render_prompt(Problem((3, 5), 15, "*"), tokenizer))["input_ids"]) < 24
    text = "anything at all: é 数 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(("name", "generation"), [("", False), ("qwen", True), ("llama", False)])
def test_policy_sees_the_prompts_of_the_warm_up(model, name, generation):
    """This includes model names and templates for which torchrl has a template of its own."""
    tokenizer = build_tokenizer(PROBLEMS)
    tokenizer.name_or_path = name
    if not generation:
        tokenizer.chat_template = re.sub("{% (end)?generation %}", "", tokenizer.chat_template)
    env = make_env(PROBLEMS[:40], tokenizer, num_prompts=3, group_size=2, seed=0)
    batch = env.rollout(1, as_policy(model, tokenizer))
    by_query = {p.query: p for p in PROBLEMS}
    for row in batch.reshape(-1).unbind(0):
        tokens = row["tokens", "prompt"]
        want = tokenizer(render_prompt(by_query[row["query"]], tokenizer))["input_ids"]
        assert tokens[tokens != tokenizer.pad_token_id].tolist() == want


def test_log_probs_and_the_gradient_of_the_loss_by_hand(tokenizer, model):
    """The loss gives the policy gradient: with one update per batch the ratio is 1, and nothing is clipped.

    Answers of a policy that has moved away from its reference, as the collector delivers them, prepared.
    """
    parts = build("grpo", model, build_model(tokenizer), coefficient=FixedKLCoefficient(0.1), max_new_tokens=14)
    env = make_env(PROBLEMS[:40], tokenizer, num_prompts=4, group_size=4, seed=0)
    kl = RetrieveKL(model, parts.kl_transform[1].model, coeff=0.1)
    kl.charged_key = "kl_charged"
    env = env.append_transform(kl)
    torch.manual_seed(1)
    batch = parts.prepare(label(env.rollout(1, as_policy(model, tokenizer)).reshape(-1), 4))
    for start in range(0, 16, 4):
        assert len(set(batch[start : start + 4]["query"])) == 1
    tokens, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    logits = model(input_ids=tokens, attention_mask=attention.long()).logits[:, :-1]
    log_prob = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    mask = attention[:, 1:].clone()
    mask[:, : batch["tokens", "prompt"].shape[-1] - 1] = False
    assert mask.any(-1).all()
    assert_close(batch["next", "log_probs", "full"][:, 1:], torch.where(mask, log_prob, 0.0), atol=1e-4, rtol=0)
    (-(log_prob * batch["advantage"])[mask].mean()).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert want.norm() > 0
    model.zero_grad()
    parts.loss(loss_entries(batch))["loss_objective"].backward()
    assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), want, atol=1e-5, rtol=1e-3)


def test_the_demo_warms_up_once_and_trains_by_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(countdown_demo, "all_problems", lambda: PROBLEMS)
    countdown_demo.prepare(tmp_path, steps=3)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    countdown_demo.prepare(tmp_path, steps=3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    assert {path.name for path in files} >= {"model", "prompts.jsonl", "held_out.jsonl", "chat_template.jinja"}
    monkeypatch.chdir(PROJECT)  # where the paths of the rewards begin
    place = [f"model.name={tmp_path / 'model'}", f"data.prompts={tmp_path / 'prompts.jsonl'}"]
    config = read_config("tutorials/countdown.yaml", [*place, f"data.held_out={tmp_path / 'held_out.jsonl'}"])
    for name in ("grpo", "dapo", "cispo"):
        config.algorithm.name = name
        assert len(load_inputs(config).prompts) == len(PROBLEMS) - len(split_problems(PROBLEMS)[1])


def test_settings_of_scripts():
    found = read_settings(gsm8k_text.Settings, ["beta=0.5", "seeds=[3]", "questions=null"])
    assert (found.beta, found.seeds, found.questions, found.layers) == (0.5, [3], None, 2)
    for change, message in (("bta=1", "Key 'bta' not in 'Settings'.*beta"), ("layers=two", "'two' .* Integer")):
        with pytest.raises(ValueError, match=message):
            read_settings(gsm8k_text.Settings, [change])
    check_positive(beta=1.0, lr=None)
    with pytest.raises(ValueError, match="lr is 0: expected more than 0"):
        check_positive(lr=0.0)
