"""Tests of the env: the order of prompts and groups, several turns, rewards in a collector, and the KL."""

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, set_list_to_stack
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter, check_env_specs

from closeness import assert_near
from refused import refused
from task_lab import BOT, END, HERMES, add, call, last_user, make_tokenizer, scripted_policy
from torchrl_llm_kl import FunctionReward, KLComputation, RetrieveKL, RetrieveLogProb, RewardError, make_algorithm
from torchrl_llm_kl.masks import PLAIN_TEMPLATE
from torchrl_llm_kl.tasks import PromptOrder, Turns, make_env, whole_groups
from toy_models import FORWARD
from toy_rollouts import make_model, make_policy, plain_log_probs, response_log_probs, steps
from toy_tokenizer import CHATML, build_bos_tokenizer

ROWS = [{"question": f"q{i}", "answer": f"a{i}", "row": i} for i in range(5)]
SUMS = [{"question": "1 2", "answer": "It is 4."}, {"question": "5 5", "answer": "It is 10."}]
#: Of the first sum, turn by turn.
ANSWERS = ["See " + call("add", a=1, b=2), call("add", a=3, b=1), "It is 4."]


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(answer == metadata["answer"])


def odd_rows(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(metadata["row"] % 2)


def answers_questions(prompt: str) -> str:
    """The right answer to even questions."""
    number = int(last_user(prompt)[1:])
    return f"a{number}" if number % 2 == 0 else "?"


def adds(prompt: str) -> str:
    """Call `add` for the two numbers, then for a sum of 3 and 1, and answer with the last result."""
    said = last_user(prompt)
    if not said.startswith("<tool_response>"):
        a, b = said.split()
        return "See " + call("add", a=int(a), b=int(b))
    result = said.removeprefix("<tool_response>").removesuffix("</tool_response>")
    return call("add", a=3, b=1) if result == "3" else f"It is {result}."


def task_env(rows: Any, reward: Any, tokenizer: Any, **kwargs: Any) -> Any:
    """Call :func:`make_env` with the fields of its records as arguments."""
    names = (("seed", "start", "rank", "world_size"), ("max_turns", "tools", "reply", "tool_parser"))
    order, turns = ({name: kwargs.pop(name) for name in own if name in kwargs} for own in names)
    records = {"order": PromptOrder(**order), "turns": Turns(**turns) if turns else None}
    return make_env(rows, reward, tokenizer, **records, **kwargs)


def tool_env(tokenizer: Any, reward: Any = lambda *_: 1.0, **kwargs: Any) -> Any:
    settings = {"tools": [add], "max_turns": 3, "group_size": 1, "num_prompts": 2, "seed": None}
    return task_env(kwargs.pop("rows", SUMS), reward, tokenizer, **{**settings, **kwargs})


def collected(env: Any, policy: Any, turns: int) -> list[TensorDictBase]:
    """Collect the rows of an env."""
    size = env.batch_size.numel()
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=size, total_dialog_turns=turns)
    found = [row for batch in collector for row in steps(batch)]
    collector.shutdown()
    return found


def numbers(rows: list[TensorDictBase], *key: str) -> list[float]:
    return [row[key].item() for row in rows]


def of_next(rows: list[TensorDictBase], name: str) -> list[float]:
    return numbers(rows, "next", name)


def queries(rows: list[TensorDictBase]) -> list[str]:
    return [row["query"] for row in rows]


def episodes(rows: list[TensorDictBase]) -> dict[int, list[TensorDictBase]]:
    return {run: [row for row in rows if int(row["run"]) == run] for run in sorted({int(row["run"]) for row in rows})}


def test_answers_of_a_collector_are_rewarded(tokenizer: Any) -> None:
    policy = scripted_policy(tokenizer, answers_questions)
    reward = {"right": (2.0, right), "odd": (-0.5, odd_rows)}
    env = task_env(ROWS, reward, tokenizer, group_size=2, num_prompts=2, system_prompt="S", seed=None)
    found = collected(env, policy, 12)
    rows = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]
    assert queries(found) == [f"q{i}" for i in rows]
    assert numbers(found, "next", "rewards", "right") == [float(i % 2 == 0) for i in rows]
    assert numbers(found, "next", "rewards", "odd") == [float(i % 2) for i in rows]
    assert of_next(found, "reward") == [2.0 if i % 2 == 0 else -0.5 for i in rows]
    assert numbers(found, "group") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert of_next(found, "done") == [True] * 12
    row = found[4]
    assert row["metadata"] == {"answer": "a2", "row": 2}
    assert row["text", "prompt"] == f"<|im_start|>system\nS{END}\n<|im_start|>user\nq2{END}\n{BOT}"
    assert row["text", "response"] == f"a2{END}"
    assert "run" not in row
    assert set(policy.script.prompts) == {row["text", "prompt"] for row in found}


def test_history_mode(tokenizer: Any) -> None:
    template = {"chat_template": tokenizer.chat_template}
    policy = make_policy(make_model(tokenizer, seed=0), tokenizer, pad_output=False, **template)
    settings = {"group_size": 2, "input_mode": "history", "system_prompt": "S", "seed": None}
    torch.manual_seed(0)
    rows = collected(task_env(ROWS, lambda q, a, m: len(a), tokenizer, **settings), policy, 4)
    assert queries(rows) == ["q0", "q0", "q1", "q1"]
    assert [message.role for message in rows[0]["history"].prompt.unbind(0)] == ["system", "user"]
    assert rows[0]["text", "prompt"] == f"<|im_start|>system\nS{END}\n<|im_start|>user\nq0{END}\n{BOT}"
    assert all(x > 0 for x in of_next(rows, "reward"))
    data = ["a", [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]]
    with pytest.raises(ValueError, match=r"conversations of \[1, 2\] messages need input_mode='text'"):
        task_env(data, right, tokenizer, group_size=1, num_prompts=2, input_mode="history").reset()


def test_specs_the_order_of_transforms_and_a_failing_reward(tokenizer: Any) -> None:
    reward = {"right": right, "odd": odd_rows}
    check_env_specs(task_env(ROWS, reward, tokenizer, group_size=2, num_prompts=2))
    check_env_specs(task_env(ROWS, reward, tokenizer, group_size=2, max_turns=3, reply=lambda *_: "go on"))
    env = task_env(ROWS, lambda q, a, m: m["target"], tokenizer, group_size=2)
    with pytest.raises(RewardError, match=r"failed for all 2 answers of its first batch.*KeyError: 'target'"):
        collected(env, scripted_policy(tokenizer, lambda prompt: "x"), 4)
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    keys = [{"log_probs_full_key": (name, "full")} for name in ("log_probs", "ref_log_probs")]
    three = [RetrieveLogProb(model, **keys[0]), RetrieveLogProb(ref, **keys[1]), KLComputation()]
    reward = FunctionReward(right, timeout=None)  # with settings of one's own
    env = task_env(ROWS, reward, tokenizer, group_size=2, kl_transform=three)
    assert env.transform[0] is reward
    assert [type(t) for t in env.transform] == [FunctionReward, *map(type, three)]
    env = env.append_transform(StepCounter())
    row, _ = collected(env, scripted_policy(tokenizer, answers_questions, model=model), 2)
    assert row["next", "reward"].numel() == len(row["tokens", "full"])
    assert row["next", "step_count"].item() == 1


def posed(tokenizer: Any, steps: int, rows: Any = ROWS, **kwargs: Any) -> list[tuple[int, str]]:
    """The groups and questions of ``steps`` steps."""
    env = task_env(rows, right, tokenizer, **{"group_size": 2, "num_prompts": 2, **kwargs})
    found = []
    td = env.reset()
    for _ in range(steps):
        found += list(zip(td["group"].flatten().tolist(), td["query"], strict=True))
        assert env.reset()["query"] == td["query"], "what is not answered is posed again"
        td["text", "full"] = [prompt + "x" for prompt in td["text", "prompt"]]
        _, td = env.step_and_maybe_reset(td)
    return found


def test_a_resumed_run_continues_the_order_and_ranks_share_it(tokenizer: Any) -> None:
    whole = posed(tokenizer, 7, seed=3)
    order = PromptOrder(seed=3)
    assert whole == [(p, f"q{order.at(p, 5)}") for p in range(14) for _ in "ab"]
    assert posed(tokenizer, 4, seed=3, start=6) == whole[12:]
    one = posed(tokenizer, 3, num_prompts=4, start=2)
    ranks = [posed(tokenizer, 3, rank=rank, world_size=2, start=2) for rank in (0, 1)]
    assert one == [row for step in range(3) for rank in ranks for row in rank[4 * step : 4 * step + 4]]

    class Table(list):  # a data set, which is read by number
        column_names = ("question", "answer", "row")

    assert posed(tokenizer, 1, Table(ROWS), num_prompts=1, seed=None, start=3) == [(3, "q3")] * 2


def test_templates_and_system_prompts(tokenizer: Any) -> None:
    def texts(rows: list[Any], tokenizer: Any = tokenizer, **settings: Any) -> list[str]:
        found = task_env(rows, right, tokenizer, group_size=1, num_prompts=len(rows), seed=None, **settings)
        return found.reset()["text", "prompt"]

    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    for text, system in zip(texts([{"messages": own}, "p"], system_prompt="S"), ("own", "S"), strict=True):
        assert text.startswith(f"<|im_start|>system\n{system}{END}\n<|im_start|>user")
    template = "{{ mood }} {{ messages[0].content }}"
    assert texts(["a"], template_kwargs={"chat_template": template, "mood": "sad"}) == ["sad a"]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert texts(["a"], make_tokenizer(None), template_kwargs={"chat_template": plain}) == ["a"]


@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
def test_a_pickled_env_uses_the_same_prompts(tokenizer: Any, module: str) -> None:
    """Ray and the multi-process collectors pickle envs, also with lambdas and local functions."""
    dumps = pytest.importorskip(module).dumps
    settings: dict[str, Any] = {"group_size": 2, "num_prompts": 2, "seed": 1}
    reward: Any = {"right": right}
    if module == "cloudpickle":

        async def judge(question: str, answer: str, metadata: dict[str, Any]) -> float:
            return len(answer)

        reward = {"right": lambda q, a, m: right(q, a, m), "judge": judge}
        kl = RetrieveKL("from_collector", make_model(tokenizer, seed=1))
        settings |= {"tools": [add], "max_turns": 2, "kl_transform": kl}
    env = task_env(ROWS, reward, tokenizer, **settings)
    envs = env, pickle.loads(dumps(env))
    one, two = (collected(each, scripted_policy(tokenizer, answers_questions), 4) for each in envs)
    assert queries(one) == queries(two)
    assert len(set(queries(one))) == 2
    for name in reward:
        assert numbers(one, "next", "rewards", name) == numbers(two, "next", "rewards", name)


def test_three_turns(tokenizer: Any) -> None:
    seen: list[list[dict[str, Any]]] = []

    def reward(question: str, answer: str, metadata: dict[str, Any]) -> float:
        seen.append(metadata["messages"])
        return right(question, answer, metadata)

    rows = collected(tool_env(tokenizer, reward), scripted_policy(tokenizer, adds), 6)
    first, second = episodes(rows)[0], episodes(rows)[1]
    system = "<|im_start|>system\nTools: add <|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n1 2{END}\n{BOT}"
    for row, answer, result in zip(first, ANSWERS, ["3", "4", ""], strict=True):
        assert row["text", "prompt"] == prompt
        assert row["text", "response"] == answer + END
        prompt += answer + END
        prompt += f"\n<|im_start|>user\n<tool_response>{result}</tool_response>{END}\n{BOT}" if result else ""
        assert row["next", "text", "prompt"] == prompt
    assert [row["step"].item() for row in first] == [0, 1, 2]
    assert of_next(first, "reward") == [0.0, 0.0, 1.0]
    assert of_next(first, "terminated") == [False, False, True]
    assert of_next(first, "truncated") == [False] * 3
    # The second row ends after two turns and poses the next prompt, which is the first of the next epoch.
    assert of_next(second, "reward") == [0.0, 1.0]
    assert of_next(second, "done") == [False, True]
    (third,) = episodes(rows)[3]
    assert (third["query"], third["group"].item()) == ("5 5", 3)
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [[m["role"] for m in messages] for messages in seen] == [roles[:4], roles]
    assert seen[1][1]["content"] == "See"
    assert seen[1][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert seen[1][2]["content"] == "3"
    assert seen[1][-1] == {"role": "assistant", "content": "It is 4."}


def test_the_limit_of_turns_or_a_failing_template_ends_an_episode(tokenizer: Any, caplog: Any) -> None:
    """A malformed call does not end an episode."""
    policy = scripted_policy(tokenizer, lambda prompt: call("add", a=1, b=1))
    for run in episodes(collected(tool_env(tokenizer, max_turns=2), policy, 4)).values():
        assert of_next(run, "truncated") == [False, True]
        assert of_next(run, "terminated") == [False, False]
        assert of_next(run, "reward") == [0.0, 1.0]
        assert [m["role"] for m in run[-1]["next", "messages"]] == ["user", "assistant", "tool", "assistant"]
    odd = "{% for m in messages if m.content == '2' %}{{ raise_exception('no two') }}{% endfor %}"
    rows = collected(tool_env(tokenizer, template_kwargs={"chat_template": odd + HERMES}), policy, 2)
    assert of_next(rows, "truncated") == [True, True]
    assert of_next(rows, "reward") == [1.0, 1.0]
    assert "the template cannot continue row 0, whose episode ends: TemplateError: no two" in caplog.text
    damaged = '<tool_call>{"name": "add"'
    policy = scripted_policy(tokenizer, lambda prompt: "ok" if "<tool_response>" in prompt else damaged)
    run = episodes(collected(tool_env(tokenizer), policy, 4))[0]
    assert "<tool_response>Error: the call is not JSON" in run[1]["text", "prompt"]
    assert run[1]["text", "prompt"].startswith(run[0]["text", "full"])
    assert run[1]["next", "terminated"].item()
    assert run[1]["next", "messages"][1] == {"role": "assistant", "content": damaged}


def test_the_kl_counts_each_token_of_the_assistant_once_and_none_of_a_tool(tokenizer: Any, padded: bool) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    policy = scripted_policy(tokenizer, adds, pad_output=padded, model=model)
    kl = RetrieveKL("from_collector", ref, coeff=0.25, padding_side="left")
    env = tool_env(tokenizer, {"right": (2.0, right)}, kl_transform=kl)
    assert [type(transform) for transform in env.transform] == [FunctionReward, RetrieveKL]
    run, scored = episodes(collected(env, policy, 6))[0], ""
    for row, outcome in zip(run, (0.0, 0.0, 1.0), strict=True):
        difference = response_log_probs(model, row) - response_log_probs(ref, row)
        assert_close(row["next", "kl_penalty"], difference, atol=2e-5, rtol=0)
        charged = (row["next", "kl_penalty"] != 0) & row["masks", "all_attention_mask"]
        scored += tokenizer.decode(row["tokens", "full"][charged])
        assert abs(difference.sum()) > 0.1
        assert_close(row["next", "reward"].sum(), 2.0 * outcome - 0.25 * difference.sum(), atol=1e-4, rtol=0)
        assert row["next", "reward"].shape == (*row["tokens", "full"].shape, 1)
        assert row["next", "rewards", "right"].item() == outcome
    assert scored == "".join(answer + END for answer in ANSWERS)


def test_replies_of_a_user(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def reply(messages: list[dict[str, Any]], metadata: dict[str, Any]) -> str | None:
        said = messages[-1]["content"]
        return None if said == "bye" else f"{metadata['mood']} {said}"

    policy = scripted_policy(tokenizer, lambda prompt: {"hi": "a", "sad a": "b"}.get(last_user(prompt), "bye"))
    settings: Any = {"rows": [{"prompt": "hi", "mood": "sad"}], "tools": None, "num_prompts": 1}
    env = tool_env(tokenizer, lambda q, answer, m: len(answer), max_turns=4, reply=reply, **settings)
    rows = collected(env, policy, 3)
    assert [row["text", "response"] for row in rows] == [f"a{END}", f"b{END}", f"bye{END}"]
    assert of_next(rows, "done") == [False, False, True]
    assert of_next(rows, "reward") == [0.0, 0.0, 3.0]
    ended = tool_env(tokenizer, max_turns=2, reply=lambda m, _: "more", **settings)
    assert of_next(collected(ended, policy, 2), "truncated") == [False, True]
    (row,) = collected(tool_env(tokenizer, reply=lambda m, _: 1 / 0, **settings), policy, 1)
    assert row["next", "terminated"].item()
    assert "reply= failed in row 0, whose episode ends: ZeroDivisionError" in caplog.text


def test_training_on_whole_groups_of_episodes_of_several_lengths(tokenizer: Any) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    turn = iter(range(1000))

    def answer(prompt: str) -> str:  # of 1 to 3 turns
        return "It is 4." if next(turn) % 3 == 0 else "?"

    def reply(messages: list[dict[str, Any]], metadata: dict[str, Any]) -> str | None:
        return None if messages[-1]["content"] == "It is 4." else "So?"

    args = {"keys": {"run": "run", "step": "step"}}
    parts = make_algorithm("multi_step_grpo", model, reference=ref, group_key="group", advantage_args=args)
    env = tool_env(tokenizer, right, group_size=2, tools=None, reply=reply, kl_transform=parts.kl_transform)
    policy = scripted_policy(tokenizer, answer, model=model)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=16)
    seen: list[int] = []
    for batch in whole_groups(collector, group_size=2, num_groups=2):
        runs = episodes(list(batch.unbind(0)))
        groups = set(batch["group"].flatten().tolist())
        assert len(groups) == 2
        assert {run // 2 for run in runs} == groups
        for own in runs.values():
            assert [int(row["step"]) for row in own] == list(range(len(own)))
            assert of_next(own, "done") == [False] * (len(own) - 1) + [True]
        seen += sorted(groups)
        outcome = {run: float(own[-1]["next", "reward"].sum()) for run, own in runs.items()}
        prepared = parts.prepare(batch)
        for row in prepared.unbind(0):
            run = int(row["run"])
            difference = outcome[run] - outcome[run ^ 1]
            assert torch.sign(row["advantage"]).item() == (difference > 0) - (difference < 0)
        parts.loss(prepared).total_loss.backward()
    collector.shutdown()
    assert len(seen) == len(set(seen)) >= 2


TOOLS: dict[str, Any] = {"max_turns": 2, "tools": [add]}
HIDES = HERMES.replace("{{ m.content }}</tool_response>", "</tool_response>")


test_wrong_arguments = refused(
    lambda kwargs: task_env(ROWS, **{"reward": right, "tokenizer": make_tokenizer(), **kwargs}),
    ({"group_size": 0}, "group_size must be at least 1"),
    ({"rank": 2, "world_size": 2}, "rank must be at least 0 and at most 1"),
    ({"input_mode": "tokens"}, "input_mode must be one of 'text', 'history'"),
    ({"reward": lambda answer: 1.0}, TypeError, r"^reward is called with .* too many positional"),
    ({**TOOLS, "tool_parser": lambda text, tools: []}, TypeError, r"^tool_parser is called with \(text\).* 'tools'"),
    ({**TOOLS, "max_turns": 1}, "max_turns must be at least 2"),
    ({"max_turns": 2}, "several turns need tools= or reply="),
    ({"max_turns": 2, "reply": print, "tool_parser": print}, "tool_parser= needs tools="),
    ({**TOOLS, "input_mode": "history"}, "several turns need"),
    ({"tokenizer": make_tokenizer(None)}, "has no chat template"),
    ({**TOOLS, "tokenizer": make_tokenizer(HIDES)}, "does not render results of tools"),
)


def test_a_template_that_hides_tools_warns_and_plain_lists_are_refused(tokenizer: Any) -> None:
    with pytest.warns(UserWarning, match="does not show the tools"):
        tool_env(make_tokenizer(CHATML))
    with set_list_to_stack(False), pytest.raises(RuntimeError, match=r"set_list_to_stack\(True\)"):
        task_env(ROWS, right, tokenizer)


@pytest.mark.parametrize("input_mode", ["text", "history"])
def test_a_tokenizer_that_adds_bos(input_mode: Any) -> None:
    """The KL of a policy to its own weights is 0, in a batch with prompts of unequal lengths."""
    tokenizer = build_bos_tokenizer()
    model, reference = (make_model(tokenizer, seed=0) for _ in range(2))
    policy = make_policy(model, tokenizer, pad_output=True, input_mode=input_mode)
    rows = [{"question": "why" * n, "answer": ""} for n in (1, 4)]
    env = make_env(rows, lambda *_: 1.0, tokenizer, group_size=2, num_prompts=2, input_mode=input_mode)
    env = env.append_transform(RetrieveKL(model, reference, add_to_reward=False))
    found = collected(env, policy, 4)
    for row in found:
        messages = [{"role": "user", "content": row["query"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=input_mode == "text")
        answer = row["tokens", "response"][row["tokens", "response"] != tokenizer.pad_token_id]
        want = plain_log_probs(model, torch.cat([answer.new_tensor(prompt_ids), answer]))[len(prompt_ids) :]
        scored = row["next", "log_probs", "full"]
        assert_near(scored[scored != 0], want, **FORWARD)
    assert len({len(row["query"]) for row in found}) == 2


def test_prompts_in_parts_variables_and_system_prompts_of_a_row() -> None:
    """The template reads text contents only, as Qwen3's does, so that content in parts must be joined."""
    template = (
        "{% if thinking is defined %}[{{ thinking }}]{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if m.content is string else '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}]}]
    rows = [
        {"prompt": parts, "thinking": False},
        {"prompt": "3", "system": "Be brief.", "chat_template_kwargs": {"thinking": "yes"}},
        {"conversations": [{"from": "human", "value": "4"}]},
    ]
    env = make_env(rows, None, make_tokenizer(template), group_size=1, num_prompts=3, order=PromptOrder(seed=None))
    step = env.reset()
    assert list(step["text", "prompt"]) == [
        "[False]<user>1 + 2<assistant>",
        "[yes]<system>Be brief.<user>3<assistant>",
        "<user>4<assistant>",
    ]
    assert list(step["query"]) == ["1 + 2", "3", "4"]


def test_prompts_of_a_base_model_are_plain_text() -> None:
    """The policy adds BOS. Padding that looks like ordinary text is reported, since it would be removed from answers."""
    tokenizer = build_bos_tokenizer(None)
    rows = [{"prompt": "3 + 4 = 7\n5 + 2 =", "answer": "7"}]
    with set_list_to_stack(True):
        with pytest.raises(ValueError, match=r"no chat template.*PLAIN_TEMPLATE of torchrl_llm_kl\.masks"):
            make_env(rows, right, tokenizer)
        tokenizer.chat_template = PLAIN_TEMPLATE
        step = make_env(rows, right, tokenizer, group_size=1, system_prompt="Add.\n").reset()
        assert step["text", "prompt"] == ["Add.\n3 + 4 = 7\n5 + 2 ="]
        with pytest.raises(ValueError, match="cannot read messages back from plain text: pass input_mode='text'"):
            make_env(rows, right, tokenizer, input_mode="history")
        tokenizer.pad_token = "a"
        with pytest.warns(
            UserWarning, match=r"padding token 'a' looks like ordinary text.*pad_token=tokenizer.eos_token"
        ):
            make_env(rows, right, tokenizer)
