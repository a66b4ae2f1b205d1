"""Runs of several turns: tokens stay as they were sampled, and each is charged, rewarded and trained once."""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close

pytest.importorskip("omegaconf")
from cli_files import write_jsonl
from task_lab import call, make_tokenizer
from torchrl_llm_kl import Sampling
from torchrl_llm_kl.tasks import PromptOrder, Turns, join_turns, make_env, turn_counts, turn_figures, whole_episodes
from torchrl_llm_kl.training import ConfigError, Run, load_inputs, make_sampler, read_config, step_figures, train
from torchrl_llm_kl.training._build import plan_algorithm
from torchrl_llm_kl.training._inputs import check_inputs_stay
from torchrl_llm_kl.training._samplers import AnswerNoise
from toy_rollouts import make_model
from toy_tokenizer import build_bos_tokenizer
from train_lab import assert_same_run, ended_after

CODE = '''
asked = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    asked.append((a, b))
    return a + b


def again(messages, metadata):
    """Ask again after every other answer."""
    return "Sure?" if sum(map(ord, messages[-1]["content"])) % 2 == 0 else None


def never(messages, metadata):
    return True


rewarded = []


def vowels(question, answer, metadata):
    rewarded.append(answer)
    return sum(letter in "aeiou" for letter in answer) / 6
'''


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    tokenizer = make_tokenizer()
    for part in (make_model(tokenizer, 0), tokenizer):
        part.save_pretrained(folder / "model")
    write_jsonl(folder / "prompts.jsonl", ({"question": f"say {i}"} for i in range(20)))
    (folder / "mine.py").write_text(CODE)
    return folder


def settings(lab: Path, out: Path, *changes: str, algorithm: str = "grpo") -> Any:
    source = {
        "model": {"name": str(lab / "model")},
        "data": {"prompts": str(lab / "prompts.jsonl"), "num_prompts": 2, "group_size": 4, "held_out_share": 0.2},
        "reward": f"{lab / 'mine.py'}:vowels",
        "turns": {"max": 3, "reply": f"{lab / 'mine.py'}:again"},
        "sampler": {"max_new_tokens": 5},
        "algorithm": {"name": algorithm, "minibatches": 2, "micro_batch": 3},
        "kl": {"target": 0.5},
        "optimizer": {"lr": 3e-3},
        "evaluation": {"every": 2, "batch_size": 3},
        "logging": {"doctor_every": 0},
        "checkpoints": {"every": 1, "keep": 10},
        "run": {"steps": 4, "out": str(out), "threads": 1},
    }
    return read_config(source, changes)


@pytest.fixture(autouse=True)
def stacked() -> Any:
    with tensordict.set_list_to_stack(True):
        yield


def scripted(tokenizer: Any, ids: list[list[list[int]]]) -> Any:
    """A sampler whose turn ``n`` gives row ``i`` the token ids ``ids[n][i]``."""
    sampler: Any = make_sampler(make_model(tokenizer, 0), tokenizer, max_new_tokens=8)
    turns = iter(ids)
    seen: list[list[list[int]]] = []

    def generate(prompts: list[list[int]]) -> list[torch.Tensor]:
        seen.append([list(prompt) for prompt in prompts])
        return [torch.tensor(row) for row in next(turns)]

    object.__setattr__(sampler, "_generate", generate)
    object.__setattr__(sampler, "seen", seen)
    return sampler


# ------------------------------------------------------------------ the tokens of a conversation


#: The answers that were replied to.
SAID: list[str] = []


def two_turns(reward: Any = lambda q, a, m: float(len(a)), **more: Any) -> tuple[TensorDictBase, Any, Any]:
    """Two conversations, of two turns and of one, with a tokenizer that merges "ab" and "b<newline>"."""
    tokenizer = make_tokenizer(merges=[("a", "b"), ("Ġ", "a")])
    a, b, end = (tokenizer.get_vocab()[token] for token in ("a", "b", "<|im_end|>"))
    sampler = scripted(tokenizer, [[[a, b, a], [b, end]], [[b, a, b, end]]])

    def reply(messages: list[Any], metadata: Any) -> str | None:
        SAID.append(messages[-1]["content"])
        return " a?" if messages[-1]["content"] == "aba" else None

    env = make_env(["x", "y"], reward, tokenizer, num_prompts=2, group_size=1, order=PromptOrder(seed=None),
                   turns=Turns(3, reply=reply, **more))  # fmt: skip
    return whole_episodes(env, sampler), sampler, tokenizer


@pytest.mark.smoke
def test_tokens_of_earlier_turns_stay_as_they_were_sampled() -> None:
    """The text "aba" would be tokenised as "ab", "a", which was not sampled."""
    SAID.clear()
    batch, sampler, tokenizer = two_turns()
    assert SAID == ["aba", "b", "bab"], "a conversation that has ended gets no reply"
    a, b, ab, end = (tokenizer.get_vocab()[token] for token in ("a", "b", "ab", "<|im_end|>"))
    assert tokenizer("aba").input_ids == [ab, a]
    (first, _), (second,) = sampler.seen
    added = tokenizer("<|im_end|>\n<|im_start|>user\n a?<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert second == [*first, a, b, a, *added]
    assert batch["run"].flatten().tolist() == [0, 0, 1]
    assert batch["step"].flatten().tolist() == [0, 1, 0]
    assert batch["next", "reward"].flatten().tolist() == [0.0, 3.0, 1.0]
    real = [
        row[mask].tolist()
        for row, mask in zip(batch["tokens", "full"], batch["masks", "all_attention_mask"], strict=True)
    ]
    assert real[1] == [*second, b, a, b, end]
    assert batch["text", "full"][1] == tokenizer.decode(real[1])


@pytest.mark.smoke
def test_a_conversation_has_one_bos() -> None:
    """The tokenizer adds BOS to each text, also to the text after an answer."""
    tokenizer = build_bos_tokenizer()
    a, eos = tokenizer.get_vocab()["a"], tokenizer.eos_token_id
    sampler = scripted(tokenizer, [[[a, eos]], [[a, eos]]])
    turns = Turns(2, reply=lambda messages, metadata: "more")
    env = make_env(["x"], lambda q, a, m: 1.0, tokenizer, num_prompts=1, group_size=1, turns=turns)
    whole_episodes(env, sampler)
    for (prompt,) in sampler.seen:
        assert [prompt[0], *prompt].count(tokenizer.bos_token_id) == 2


@pytest.mark.smoke
def test_each_answer_of_a_conversation_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    started: list[tuple[int, ...]] = []
    start = AnswerNoise.start

    def record(self: AnswerNoise, keys: Any) -> None:
        started.extend(keys)
        start(self, keys)

    monkeypatch.setattr(AnswerNoise, "start", record)
    sampler = make_sampler(make_model(tokenizer, 0), tokenizer, max_new_tokens=2, sampling=Sampling(), seed=0)
    turns = Turns(3, reply=lambda messages, metadata: "more")
    env = make_env(["x", "y"], lambda q, a, m: 1.0, tokenizer, num_prompts=2, group_size=2, turns=turns)
    whole_episodes(env, sampler)
    assert len(set(started)) == len(started) == 2 * 2 * 3


@pytest.mark.smoke
def test_a_conversation_as_one_row() -> None:
    batch, sampler, tokenizer = two_turns()
    a, b, end = (tokenizer.get_vocab()[token] for token in ("a", "b", "<|im_end|>"))
    joined = join_turns(batch, tokenizer)
    (first, other), (second,) = sampler.seen
    answers = joined["tokens", "response"].shape[-1]
    rows = zip(joined["tokens", "full"], *(joined["masks", name] for name in ("all_attention_mask", "all_assistant_mask")),
               joined["expert_mask"], strict=True)  # fmt: skip
    (ids, real, sampled, others), (short, short_real, short_sampled, none) = rows
    assert ids[real].tolist() == [*second, b, a, b, end]
    assert ids[sampled].tolist() == [a, b, a, b, a, b, end]
    assert ids[others].tolist() == second[len(first) + 3 :]
    assert short[short_real].tolist() == [*other, b, end]
    assert (short[short_sampled].tolist(), int(none.sum())) == ([b, end], 0)
    assert joined["tokens", "prompt"].shape[-1] == max(len(first), len(other))
    assert answers == len(second) + 4 - len(first)
    assert joined["turns"].flatten().tolist() == [2, 1]
    assert joined["next", "reward"].flatten().tolist() == [3.0, 1.0]
    assert joined["text", "full"][0] == tokenizer.decode(ids[real])
    assert joined["text", "full"][0] == joined["text", "prompt"][0] + joined["text", "response"][0]
    assert turn_figures(turn_counts(joined)) == turn_figures(turn_counts(batch)) == {"turns": 1.5}


@pytest.mark.smoke
def test_a_policy_that_tokenises_earlier_turns_again_is_refused() -> None:
    batch, _, tokenizer = two_turns()
    batch[0]["tokens", "full"].add_(1)
    with pytest.raises(ValueError, match=r"conversation 0: .* does not begin with the tokens of the turns before"):
        join_turns(batch, tokenizer)


@pytest.mark.smoke
def test_turns_are_joined_before_they_are_scored() -> None:
    batch, _, tokenizer = two_turns()
    batch["next", "log_probs", "full"] = torch.zeros(batch["tokens", "full"].shape)
    with pytest.raises(ValueError, match="join them first, then score"):
        join_turns(batch, tokenizer)


# ------------------------------------------------------------------ rows that have ended


@pytest.mark.smoke
def test_a_row_that_has_ended_calls_no_function_again() -> None:
    """The second conversation ends at once, the first at its limit of turns, whose calls are not run."""
    tokenizer = make_tokenizer()
    asked: list[int] = []

    def count(number: int) -> int:
        """Count.

        Args:
            number: a number.
        """
        asked.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    said: list[str] = []

    def reward(question: str, answer: str, metadata: Any) -> float:
        said.append(answer)
        return 1.0

    turns = [[call("count", number=n), "bye"] if n == 1 else [call("count", number=n)] for n in (1, 2, 3)]
    ids = [[[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in row] for row in turns]
    env = make_env(["x", "y"], reward, tokenizer, num_prompts=2, group_size=1, order=PromptOrder(seed=None),
                   turns=Turns(3, [count]))  # fmt: skip
    batch = whole_episodes(env, scripted(tokenizer, ids))
    assert (asked, said) == ([1, 2], ["bye", call("count", number=3)])
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True, False]
    assert batch["text", "response"][-1] == "bye<|im_end|>"
    assert turn_figures(turn_counts(batch)) == {"turns": 2.0, "tools/count": 0.5, "tool_errors": 0.5}
    assert turn_counts(join_turns(batch, tokenizer)) == turn_counts(batch)
    # The next episodes are those of the next prompts, also in the row that waited.
    again = whole_episodes(env, scripted(tokenizer, [[ids[0][1], ids[0][1]]]))
    assert again["group"].flatten().tolist() == [2, 3]


@pytest.mark.smoke
def test_names_that_the_policy_makes_up_are_one_figure() -> None:
    """A model may make up any number of names, which would each become a metric."""
    tokenizer = make_tokenizer()

    def count(number: int) -> int:
        """Count.

        Args:
            number: a number.
        """
        return number

    calls = [call("count", number=1), call("no/such", number=1), call("other", number=1), "<tool_call>{"]
    answers = [calls, ["bye"] * 4]
    ids = [[[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in row] for row in answers]
    env = make_env(list("abcd"), lambda q, a, m: 0.0, tokenizer, num_prompts=4, group_size=1, turns=Turns(2, [count]))
    batch = whole_episodes(env, scripted(tokenizer, ids))
    assert turn_figures(turn_counts(batch)) == {
        "turns": 2.0,
        "tools/count": 1 / 8,
        "tools/unknown": 3 / 8,
        "tool_errors": 0.75,
    }


@pytest.mark.smoke
def test_the_users_function_ends_a_conversation() -> None:
    batch, _, _ = two_turns(stop=lambda messages, metadata: messages[0]["content"] == "x")
    assert (batch["step"].flatten().tolist(), batch["next", "reward"].flatten().tolist()) == ([0, 0], [3.0, 1.0])


@pytest.mark.smoke
def test_figures_are_sums_over_the_turns_of_a_conversation() -> None:
    after = TensorDict(
        reward=torch.tensor([[0.0], [1.0], [3.0]]), kl_penalty=torch.tensor([[0.5, 0.5], [0.25, 0.0], [1.0, 1.0]])
    )
    batch = TensorDict(
        run=torch.tensor([[4], [4], [5]]), group=torch.tensor([[2], [2], [2]]), next=after, batch_size=[3]
    )
    figures = step_figures(batch)
    assert (figures["reward"], figures["kl"], figures["equal_rewards"]) == (2.0, 1.625, 0.0)


# ------------------------------------------------------------------ runs


def test_each_sampled_token_is_charged_once_in_both_kinds_of_rows(lab: Path, tmp_path: Path) -> None:
    """The KL of a conversation is the same in one row as in a row for each turn, and that of plain forwards."""
    kls, charged = {}, {}
    for name in ("grpo", "multi_step_grpo"):
        run = Run(settings(lab, tmp_path / name, algorithm=name), say=lambda line: None)
        with torch.no_grad():  # so that the KL is not 0
            for weight in run.policy.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
        for model in (run.policy, run.reference):  # in float32 two forwards differ by the processor's rounding
            model.double()
        batch = run.score(run.answers.take())
        ids, mask, kl = batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["next", "kl_penalty"]
        for row in range(len(batch)):
            own = ids[row][mask[row]].unsqueeze(0)
            with torch.no_grad():
                here, there = (
                    model(own).logits.double().log_softmax(-1)[0, :-1] for model in (run.policy, run.reference)
                )
            off = (here - there).gather(-1, own[0, 1:, None]).squeeze(-1)
            counted = kl[row][mask[row]]
            assert counted[0] == 0
            assert_close(counted[1:].double(), off * (counted[1:] != 0), atol=3e-6, rtol=0)
        runs = batch["run"].flatten() if name != "grpo" else torch.arange(len(batch))
        kls[name] = torch.zeros(8, dtype=kl.dtype).index_add_(0, runs - runs.min(), kl.sum(-1))
        charged[name] = int((kl != 0).sum())
        assert len(batch) == (8 if name == "grpo" else 8 + sum(batch["step"].flatten() > 0))
    assert_close(kls["grpo"], kls["multi_step_grpo"], atol=1e-5, rtol=0)
    assert charged["grpo"] == charged["multi_step_grpo"]


def test_a_turn_has_the_advantage_of_its_conversation(lab: Path, tmp_path: Path) -> None:
    """``multi_step_grpo`` gives each turn the advantage that ``grpo`` gives the row of the whole conversation."""
    rows = {}
    for name in ("grpo", "multi_step_grpo"):
        run = Run(
            settings(lab, tmp_path / name, "kl.place=none", "kl.target=null", algorithm=name), say=lambda line: None
        )
        rows[name] = run.sample()
    whole, turns = rows.values()
    assert len(turns) > len(whole)
    numbers = turns["run"].flatten() - turns["run"].min()
    assert whole["advantage"].abs().min() > 0
    assert_close(turns["advantage"].flatten(), whole["advantage"].flatten()[numbers], atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["grpo", "gigpo"])
def test_a_resumed_run_of_several_turns_equals_one_without_a_stop(lab: Path, tmp_path: Path, algorithm: str) -> None:
    whole = train(settings(lab, tmp_path / "whole", algorithm=algorithm), say=lambda line: None)
    assert all(1 < row["turns"] < 3 for row in whole.rows)
    (tmp_path / "cut").mkdir()
    out = ended_after(2, tmp_path / "whole", tmp_path / "cut")
    train(settings(lab, out, algorithm=algorithm), say=lambda line: None)
    assert_same_run(out, tmp_path / "whole")


def test_echo_trains_the_replies(lab: Path, tmp_path: Path) -> None:
    """The likelihood of the replies' tokens, which have neither KL nor advantage."""
    run = Run(settings(lab, tmp_path, "kl.target=null", "kl.place=none", algorithm="echo"), say=lambda line: None)
    batch = run.sample()
    replies = int(batch["expert_mask"].sum())
    assert replies > 0
    figures = Run(settings(lab, tmp_path, "kl.target=null", "kl.place=none", algorithm="echo"), say=print).take_step()
    assert figures["loss_observation"] > 0.1
    assert figures["answer_tokens"] == int((batch["masks", "all_assistant_mask"] & ~batch["expert_mask"]).sum())


def test_a_conversation_that_gets_too_long_ends(lab: Path, tmp_path: Path) -> None:
    """The second prompt of the first conversation has more tokens than the limit."""
    limit = len(two_turns()[1].seen[1][0])
    assert [int(step) for step in two_turns(max_tokens=limit)[0]["step"]] == [0, 1, 0]
    batch, sampler, _ = two_turns(max_tokens=limit - 1)
    assert [int(step) for step in batch["step"]] == [0, 0]
    assert batch["next", "truncated"].flatten().tolist() == [True, False]
    assert len(sampler.seen) == 1
    run = Run(settings(lab, tmp_path, "sampler.max_new_tokens=12"), say=lambda line: None)
    assert run.inputs.turns is not None
    assert run.inputs.turns.max_tokens == run.policy.config.max_position_embeddings - 12


def test_the_reward_of_each_turn(lab: Path, tmp_path: Path) -> None:
    run = Run(settings(lab, tmp_path, "turns.reward=each", algorithm="gigpo"), say=lambda line: None)
    batch = run.answers.take()
    for row in range(len(batch)):
        answer = batch["text", "response"][row].replace("<|im_end|>", "")
        assert batch["next", "reward"][row].item() == pytest.approx(sum(x in "aeiou" for x in answer) / 6)
    assert len(batch) > 8


@pytest.mark.smoke
def test_the_file_of_the_tools_is_an_input_of_the_run(lab: Path, tmp_path: Path) -> None:
    """A resumed run reports its changes, and the run may not move it."""
    for name in ("reply", "tools"):
        shutil.copy(lab / "mine.py", tmp_path / f"{name}.py")
    changes = [f"turns.tools=[{tmp_path}/tools.py:add]", f"turns.reply={tmp_path}/reply.py:again"]
    config = settings(lab, tmp_path, *changes)
    assert {str(tmp_path / f"{name}.py") for name in ("reply", "tools")} < load_inputs(config).files.keys()
    with pytest.raises(ConfigError, match=r"turns\.tools is .*tools\.py, which this run would move or replace"):
        check_inputs_stay(config, ("tools.py",))


@pytest.mark.smoke
def test_the_longest_row_has_the_answers_of_all_turns(lab: Path, tmp_path: Path) -> None:
    """Dr. GRPO divides by it. An answer has up to 5 tokens, and a conversation up to 3 answers."""
    for more, most in (([], 15), (["turns=null"], 5)):
        config = settings(lab, tmp_path, "kl.target=null", *more, algorithm="dr_grpo")
        assert plan_algorithm(config).algorithm.max_len == most


REFUSED = {
    "multi_step_grpo needs turns": (
        ["turns=null", "algorithm.name=multi_step_grpo"],
        "compares the turns of conv.*set turns",
    ),
    "one reward of a trajectory": (
        ["turns.reward=each", "algorithm.name=multi_step_grpo"],
        "ignores the rewards of earlier answers: set turns.reward=last, or choose gigpo",
    ),
    "nothing follows": (["turns.reply=null"], "the section turns: several turns need tools= or reply="),
    "no function": (["turns.reply={lab}/mine.py:agian"], "has no function 'agian'. Did you mean 'again'"),
    "one turn": (["turns.max=1"], "turns.max .*at least 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_turns_that_cannot_work_are_refused(lab: Path, tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        Run(settings(lab, tmp_path, *(change.format(lab=lab) for change in changes)))


# ------------------------------------------------------------------ random numbers of each answer


@pytest.mark.smoke
def test_answers_of_their_own_generators_have_the_distribution_of_the_model() -> None:
    """2,000 first tokens with top-k 4: each frequency is within 4.5 standard errors of its probability."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, 0)
    sampling = Sampling(0.7, top_k=4)
    sampler = make_sampler(model, tokenizer, max_new_tokens=1, sampling=sampling, seed=3)
    env = make_env(["hi"], lambda q, a, m: 0.0, tokenizer, group_size=400, num_prompts=1)
    tokens = torch.cat([env.rollout(1, sampler)["tokens", "response"].flatten() for _ in range(5)])
    ids = torch.tensor([tokenizer(env.reset()["text", "prompt"][0]).input_ids])
    with torch.no_grad():
        top = (model(ids).logits[0, -1].double() / 0.7).topk(4)
    counts, n = Counter(tokens.tolist()), len(tokens)
    assert counts.keys() <= set(top.indices.tolist())
    for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
        assert abs(counts[token] / n - p) < 4.5 * math.sqrt(p * (1 - p) / n)
    assert len(set(tokens[:400].tolist())) > 1


@pytest.mark.smoke
def test_an_answer_depends_on_its_own_number_only() -> None:
    """The prompts 2 and 3 of a run get the same answers in a batch of two prompts as in a batch of four."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, 0)
    prompts = [f"say {i}" for i in range(4)]
    sampler = make_sampler(model, tokenizer, max_new_tokens=6, sampling=Sampling(), seed=3)

    def answers(num_prompts: int, start: int) -> list[str]:
        order = PromptOrder(None, start)
        env = make_env(prompts, lambda q, a, m: 0.0, tokenizer, group_size=3, num_prompts=num_prompts, order=order)
        return list(env.rollout(1, sampler).reshape(-1)["text", "response"])

    assert answers(2, 2) == answers(4, 0)[6:]
    assert len(set(answers(4, 0))) > 6
