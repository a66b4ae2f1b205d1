"""The env of one turn: prompts, groups and their order, rewards under a collector, the KL after them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, set_list_to_stack
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter, check_env_specs

from task_lab import BOT, END, add, last_user, make_tokenizer, scripted_policy
from torchrl_llm_kl import FunctionReward, KLComputation, RetrieveKL, RetrieveLogProb, RewardError, make_algorithm
from torchrl_llm_kl.masks import MissingChatTemplateError
from torchrl_llm_kl.tasks import PromptOrder, make_env
from toy_rollouts import make_model, make_policy, response_log_probs, steps

ROWS = [{"question": f"q{i}", "answer": f"a{i}", "row": i} for i in range(5)]


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(answer == metadata["answer"])


def odd_rows(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(metadata["row"] % 2)


def answers_questions(prompt: str) -> str:
    """The right answer to even questions."""
    number = int(last_user(prompt)[1:])
    return f"a{number}" if number % 2 == 0 else "?"


def collected(env: Any, policy: Any, batches: int = 2) -> list[TensorDictBase]:
    size = env.batch_size.numel()
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=size, total_dialog_turns=batches * size)
    found = [batch.reshape(-1) for batch in collector]
    collector.shutdown()
    return found


def queries(batches: list[TensorDictBase]) -> list[str]:
    return [row["query"] for batch in batches for row in steps(batch)]


def numbers(batches: list[TensorDictBase], *key: str) -> list[float]:
    return [row[key].item() for batch in batches for row in steps(batch)]


# ------------------------------------------------------------------ prompts and rewards under a collector


def test_answers_of_a_collector_are_rewarded(tokenizer: Any) -> None:
    policy = scripted_policy(tokenizer, answers_questions)
    reward = {"right": (2.0, right), "odd": (-0.5, odd_rows)}
    env = make_env(ROWS, reward, tokenizer, group_size=2, num_prompts=2, system_prompt="S", seed=None)
    batches = collected(env, policy, 3)
    rows = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]
    assert queries(batches) == [f"q{i}" for i in rows]
    assert numbers(batches, "next", "rewards", "right") == [float(i % 2 == 0) for i in rows]
    assert numbers(batches, "next", "rewards", "odd") == [float(i % 2) for i in rows]
    assert numbers(batches, "next", "reward") == [2.0 if i % 2 == 0 else -0.5 for i in rows]
    assert numbers(batches, "group") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert numbers(batches, "next", "done") == [True] * 12
    row = batches[1][0]
    assert row["metadata"] == {"answer": "a2", "row": 2}
    assert row["text", "prompt"] == f"<|im_start|>system\nS{END}\n<|im_start|>user\nq2{END}\n{BOT}"
    assert row["text", "response"] == f"a2{END}"
    assert "run" not in row
    assert set(policy.script.prompts) == {r["text", "prompt"] for batch in batches for r in steps(batch)}


def test_history_mode(tokenizer: Any) -> None:
    policy = make_policy(
        make_model(tokenizer, seed=0), tokenizer, pad_output=False, chat_template=tokenizer.chat_template
    )
    settings = {"group_size": 2, "input_mode": "history", "system_prompt": "S", "seed": None}
    torch.manual_seed(0)
    batches = collected(make_env(ROWS, lambda q, a, m: len(a), tokenizer, **settings), policy)
    assert queries(batches) == ["q0", "q0", "q1", "q1"]
    row = batches[0][0]
    assert [message.role for message in row["history"].prompt.unbind(0)] == ["system", "user"]
    assert row["text", "prompt"] == f"<|im_start|>system\nS{END}\n<|im_start|>user\nq0{END}\n{BOT}"
    assert all(x > 0 for x in numbers(batches, "next", "reward"))
    rows = ["a", [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]]
    with pytest.raises(ValueError, match=r"as many messages in each conversation of a batch, found \[1, 2\].*'text'"):
        make_env(rows, right, tokenizer, group_size=1, num_prompts=2, input_mode="history").reset()


def test_the_specs_are_those_of_the_data(tokenizer: Any) -> None:
    reward = {"right": right, "odd": odd_rows}
    check_env_specs(make_env(ROWS, reward, tokenizer, group_size=2, num_prompts=2))
    several = make_env(ROWS, reward, tokenizer, group_size=2, max_turns=3, reply=lambda messages, metadata: "go on")
    check_env_specs(several)


def test_a_failing_reward_reaches_the_user_of_a_collector(tokenizer: Any) -> None:
    env = make_env(ROWS, lambda q, a, m: m["target"], tokenizer, group_size=2)
    with pytest.raises(RewardError, match=r"failed for all 2 answers of its first batch.*KeyError: 'target'"):
        collected(env, scripted_policy(tokenizer, lambda prompt: "x"))


# ------------------------------------------------------------------ the order of prompts


def posed(tokenizer: Any, steps: int, **kwargs: Any) -> list[tuple[int, str]]:
    """Groups and questions of an env that is answered ``steps`` times."""
    env = make_env(ROWS, right, tokenizer, **{"group_size": 2, "num_prompts": 2, **kwargs})
    found = []
    td = env.reset()
    for _ in range(steps):
        found += list(zip(td["group"].flatten().tolist(), td["query"], strict=True))
        td["text", "full"] = [prompt + "x" for prompt in td["text", "prompt"]]
        _, td = env.step_and_maybe_reset(td)
    return found


def test_a_run_continues_where_it_was_stopped_and_ranks_share_the_prompts(tokenizer: Any) -> None:
    whole = posed(tokenizer, 7, seed=3)
    order = PromptOrder(5, seed=3)
    assert whole == [(p, f"q{order[p]}") for p in range(14) for _ in "ab"]
    assert posed(tokenizer, 4, seed=3, start=6) == whole[12:]
    one = posed(tokenizer, 3, num_prompts=4, start=2)
    ranks = [posed(tokenizer, 3, rank=rank, world_size=2, start=2) for rank in (0, 1)]
    assert one == [row for step in range(3) for rank in ranks for row in rank[4 * step : 4 * step + 4]]


def test_an_unanswered_prompt_is_posed_again(tokenizer: Any) -> None:
    env = make_env(ROWS, right, tokenizer, group_size=1, seed=None)
    assert [env.reset()["query"][0] for _ in range(3)] == ["q0"] * 3
    td = env.reset()
    td["text", "full"] = [prompt + "x" for prompt in td["text", "prompt"]]
    env.step(td)
    assert [env.reset()["query"][0] for _ in range(2)] == ["q1"] * 2


def test_a_data_set_is_read_by_number(tokenizer: Any) -> None:
    class Table(list):
        column_names = ("question", "answer", "row")

    env = make_env(Table(ROWS), right, tokenizer, group_size=2, seed=None, start=3)
    assert env.reset()["query"] == ["q3", "q3"]


# ------------------------------------------------------------------ the KL


def test_the_kl_is_charged_after_the_reward(tokenizer: Any, padded: bool) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    policy = scripted_policy(tokenizer, answers_questions, pad_output=padded, model=model)
    kl = RetrieveKL("from_collector", ref, coeff=0.25)
    env = make_env(ROWS, {"right": (2.0, right)}, tokenizer, group_size=2, num_prompts=2, seed=None, kl_transform=kl)
    assert [type(transform) for transform in env.transform] == [FunctionReward, RetrieveKL]
    for batch in collected(env, policy):
        for row in steps(batch):
            kl_sum = (response_log_probs(model, row) - response_log_probs(ref, row)).sum()
            outcome = 2.0 * float(row["metadata"]["row"] % 2 == 0)
            assert abs(kl_sum) > 0.1
            assert_close(row["next", "reward"].sum(), outcome - 0.25 * kl_sum, atol=1e-4, rtol=0)
            assert row["next", "reward"].shape == (*row["tokens", "full"].shape, 1)
            assert row["next", "rewards", "right"].item() == outcome / 2


def test_several_transforms_come_in_their_order(tokenizer: Any) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    keys = [{"log_probs_full_key": (name, "full")} for name in ("log_probs", "ref_log_probs")]
    three = [RetrieveLogProb(model, **keys[0]), RetrieveLogProb(ref, **keys[1]), KLComputation()]
    env = make_env(ROWS, right, tokenizer, group_size=2, kl_transform=three)
    assert [type(t).__name__ for t in env.transform] == ["FunctionReward", *(type(t).__name__ for t in three)]
    env = env.append_transform(StepCounter())
    (batch,) = collected(env, scripted_policy(tokenizer, answers_questions, model=model), 1)
    assert batch[0]["next", "reward"].numel() == len(batch[0]["tokens", "full"])
    assert batch[0]["next", "step_count"].item() == 1


def test_an_algorithm_trains_on_the_task(tokenizer: Any) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    parts = make_algorithm("grpo", model, reference=ref, group_key="group", kl_loss_coeff=0.01)
    turn = iter(range(100))
    policy = scripted_policy(tokenizer, lambda prompt: "a0" if next(turn) % 2 else "?", model=model)
    env = make_env(ROWS[:1], right, tokenizer, group_size=4, kl_transform=parts.kl_transform)
    (batch,) = collected(env, policy, 1)
    assert numbers([batch], "next", "reward") == [0.0, 1.0, 0.0, 1.0]
    prepared = parts.prepare(batch)
    # (r - 1/2) / (sqrt(1/3) + 1e-6)
    assert prepared["advantage"].flatten().tolist() == pytest.approx([-0.8660, 0.8660, -0.8660, 0.8660], abs=1e-3)
    parts.loss(prepared).total_loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0


# ------------------------------------------------------------------ templates


def test_a_prompt_with_its_own_system_message_keeps_it(tokenizer: Any) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    settings = {"group_size": 1, "num_prompts": 2, "system_prompt": "S", "seed": None}
    texts = make_env([{"messages": own}, "p"], right, tokenizer, **settings).reset()["text", "prompt"]
    for text, system in zip(texts, ("own", "S"), strict=True):
        assert text.startswith(f"<|im_start|>system\n{system}{END}\n<|im_start|>user")


def test_variables_of_the_template(tokenizer: Any) -> None:
    template = "{{ mood }} {{ messages[0].content }}"
    env = make_env(["a"], right, tokenizer, group_size=1, template_kwargs={"chat_template": template, "mood": "sad"})
    assert env.reset()["text", "prompt"] == ["sad a"]


def test_a_base_model_gets_the_text_as_it_is() -> None:
    base = make_tokenizer(None)
    with pytest.raises(MissingChatTemplateError, match=r"has no chat template.*apply_template=False"):
        make_env(["a"], right, base)
    assert make_env(["a"], right, base, group_size=1, apply_template=False).reset()["text", "prompt"] == ["a"]
    with pytest.raises(ValueError, match="a prompt has 2 messages"):
        make_env(["a"], right, base, apply_template=False, system_prompt="S")


def test_a_begin_of_sequence_token_comes_once() -> None:
    """Whether the tokenizer adds one to what the template wrote, or not."""
    for adds in (True, False):
        bos = make_tokenizer("{{ bos_token }}{{ messages[0].content }}", bos_token="<|bos|>")
        if adds:
            processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos.bos_token_id)])
            bos.backend_tokenizer.post_processor = processor
        env = make_env(["a"], lambda *_: 1.0, bos, group_size=1)
        (batch,) = collected(env, scripted_policy(bos, lambda prompt: "x"), 1)
        want = [bos.bos_token_id, *bos("a", add_special_tokens=False).input_ids]
        assert batch[0]["tokens", "prompt"].tolist() == want, adds


# ------------------------------------------------------------------ copies and arguments


def test_a_copy_of_the_env_poses_the_same_prompts(tokenizer: Any) -> None:
    env = make_env(ROWS, right, tokenizer, group_size=2, num_prompts=2, seed=1)
    copy = pickle.loads(pickle.dumps(env))
    (one,), (two,) = (collected(e, scripted_policy(tokenizer, answers_questions), 1) for e in (env, copy))
    assert queries([one]) == queries([two])
    assert numbers([one], "next", "reward") == numbers([two], "next", "reward")


def test_an_env_travels_to_workers(tokenizer: Any) -> None:
    """As Ray and the multi-process collectors send it: with functions that have no name of their own."""
    cloudpickle = pytest.importorskip("cloudpickle")

    async def judge(question: str, answer: str, metadata: dict[str, Any]) -> float:
        return len(answer)

    reward = {"right": lambda q, a, m: right(q, a, m), "judge": judge}
    kl = RetrieveKL("from_collector", make_model(tokenizer, seed=1))
    env = make_env(ROWS, reward, tokenizer, group_size=2, tools=[add], max_turns=2, kl_transform=kl, seed=None)
    copy = pickle.loads(cloudpickle.dumps(env))
    (batch,) = collected(copy, scripted_policy(tokenizer, lambda prompt: "x"), 1)
    assert queries([batch]) == ["q0", "q0"]
    assert numbers([batch], "next", "rewards", "judge") == [1.0, 1.0]


def test_a_reward_of_ones_own_settings(tokenizer: Any) -> None:
    reward = FunctionReward(right, timeout=None)
    assert make_env(ROWS, reward, tokenizer, group_size=1).transform[0] is reward


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"start": -1}, "start must be at least 0"),
        ({"rank": 2, "world_size": 2}, "rank must be at least 0 and at most 1"),
        ({"input_mode": "tokens"}, "input_mode must be one of 'text', 'history'"),
        ({"input_mode": "history", "apply_template": False}, "apply_template=False is for"),
        ({"reward": FunctionReward(right), "reward_weights": {"a": 1.0}}, "reward_weights= belong to a function"),
    ],
)
def test_wrong_values(tokenizer: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(ROWS, **{"reward": right, "tokenizer": tokenizer, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kl_transform": print}, "kl_transform must be a transform"),
        ({"kl_transform": [print]}, "kl_transform must be a transform"),
        ({"reward": lambda answer: 1.0}, r"^reward is called with .* takes \(answer\)"),
        ({"tokenizer": torch.nn.Linear(1, 1)}, "^tokenizer must be a tokenizer of transformers, got Linear: load"),
        ({"tokenizer": "Qwen/Qwen3-0.6B"}, "^tokenizer must be .*, got 'Qwen/Qwen3-0.6B'"),
        ({"max_turns": 2, "reply": lambda messages: "more"}, r"^reply is called with \(messages, metadata\), and"),
        ({"max_turns": 2, "tools": [right], "tool_parser": lambda text, tools: []}, r"^tool_parser is .* \(text, t"),
    ],
)
def test_wrong_types(tokenizer: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_env(ROWS, **{"reward": right, "tokenizer": tokenizer, **kwargs})


def test_lists_must_be_stacks(tokenizer: Any) -> None:
    with set_list_to_stack(False), pytest.raises(RuntimeError, match=r"set_list_to_stack\(True\)"):
        make_env(ROWS, right, tokenizer)
