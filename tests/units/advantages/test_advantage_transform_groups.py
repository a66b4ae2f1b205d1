"""``group_size`` takes consecutive rows for answers to one prompt: data that shows otherwise is refused."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torch.nn.functional import pad

from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms import make_algorithm
from toy_models import tiny_model

MESSAGE = r"group_size=4: sequences 0 and 1 would be compared as answers to one prompt, and their prompt differs\. If rows are"


def conversations(*, padding: str = "right") -> Any:
    """Two prompts, two conversations each, of two turns: 8 rows; the second prompt of each holds the first turn."""
    rows = []
    for conversation, turn in itertools.product(range(4), range(2)):
        said = [10 + conversation, 3, 8] if turn else []
        prompt = torch.tensor([5 + conversation // 2, 9, *said])
        full = torch.cat([prompt, torch.tensor([10 + conversation, 3 + turn])])
        gap = 7 - len(full)
        sides = (gap, 0) if padding == "left" else (0, gap)
        tokens = {"full": pad(full, sides), "prompt": pad(prompt, (gap, 0)) if padding == "left" else prompt}
        masks = {"all_attention_mask": pad(torch.ones_like(full), sides) > 0}
        reward = torch.tensor([float(conversation == turn)])
        rows.append(TensorDict({"tokens": tokens, "masks": masks, "next": {"reward": reward}}))
    return (torch.stack if padding == "left" else lazy_stack)(rows)


def first_turns() -> Any:
    return lazy_stack(list(conversations().unbind(0))[::2])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_turns_are_not_answers_to_one_prompt(padding: str) -> None:
    names: tuple[Any, ...] = ("grpo", "dr_grpo", "rloo", "opmd", "asymre", "rec", "best_of_group")
    for name in names:
        with pytest.raises(ValueError, match=MESSAGE + r".* use the algorithm multi_step_grpo .*, or pass group_key="):
            Advantage(name, group_size=4)(conversations(padding=padding))


@pytest.mark.parametrize("name", ["grpo", "raft"])
def test_presets_refuse_them_before_models_run(name: Any) -> None:
    reference = {"reference": tiny_model()} if name not in ("dapo", "raft") else {}
    parts = make_algorithm(name, tiny_model(), group_size=4, **reference)
    with pytest.raises(ValueError, match=MESSAGE):
        parts.prepare(conversations())


def test_whole_conversations_are_compared() -> None:
    """Conversations 0 and 1 answer prompt 5, and end with rewards 0 and 1."""
    parts = make_algorithm("multi_step_grpo", tiny_model(), reference=tiny_model(), group_size=2)
    advantage = parts.prepare(conversations(padding="left").reshape(4, 2))["advantage"].reshape(4, 2)
    torch.testing.assert_close(advantage[:2], torch.tensor([[-0.7071] * 2, [0.7071] * 2]), atol=1e-4, rtol=0)
    shuffled = conversations(padding="left").reshape(4, 2)[torch.tensor([0, 2, 1, 3])]
    message = r"group_size=2: sequences 0 and 2 would .* prompt differs\. Otherwise put the"
    with pytest.raises(ValueError, match=message):
        Advantage("step_wise_grpo", group_size=2)(shuffled)


@pytest.mark.parametrize("layout", ["lazy", "dense"])
def test_answers_to_one_prompt_are_compared_whatever_their_padding(layout: str) -> None:
    data = first_turns()  # rewards 1, 0, 0, 0
    if layout == "dense":
        for row, gap in zip(data.tensordicts, (0, 3, 1, 2), strict=True):  # each row padded in its own way
            for key in (("tokens", "full"), ("masks", "all_attention_mask"), ("tokens", "prompt")):
                row[key] = pad(row[key], (gap, 0))
    found = Advantage("dr_grpo", group_size=2)(data)["advantage"].flatten()
    assert found.tolist() == [0.5, -0.5, 0, 0]
    with pytest.raises(ValueError, match="sequences 0 and 2 would be compared"):
        Advantage("dr_grpo", group_size=4)(data)


@pytest.mark.parametrize("query", [torch.tensor([3, 3, 4, 4]), ["a", "a", "b", "b"]], ids=str)
def test_the_query_is_compared_too(query: Any) -> None:
    data = TensorDict(
        next=TensorDict(reward=torch.tensor([[0.0], [2.0], [0.0], [4.0]]), batch_size=[4]), batch_size=[4]
    )
    data["query"] = query if isinstance(query, torch.Tensor) else NonTensorStack(*query)
    assert Advantage("dr_grpo", group_size=2)(data.clone())["advantage"].flatten().tolist() == [-1, 1, -2, 2]
    with pytest.raises(ValueError, match=r"sequences 0 and 2 would be compared .* their entry 'query' differs"):
        Advantage("dr_grpo", group_size=4)(data)
    data["query"] = torch.rand(4)  # not an identity: it tells nothing
    assert Advantage("dr_grpo", group_size=4)(data)["advantage"].sum() == 0


def test_prompts_as_text_are_compared() -> None:
    data = TensorDict(next=TensorDict(reward=torch.zeros(2, 1), batch_size=[2]), batch_size=[2])
    data["text"] = TensorDict(prompt=NonTensorStack("two?", "three?"), batch_size=[2])
    with pytest.raises(ValueError, match="sequences 0 and 1 would be compared as answers to one prompt"):
        Advantage("grpo", group_size=2)(data)


def test_data_that_shows_no_prompt_is_taken_at_its_word() -> None:
    data = conversations().exclude(("tokens", "prompt"))
    found = Advantage("dr_grpo", group_size=4)(data)["advantage"].flatten().tolist()
    assert found == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]  # rewards 1, 0, 0, 1


def test_turns_that_share_a_key_are_told() -> None:
    data = conversations()
    data["query"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    message = r"rows of one group \(group_key='query'\) have different prompts"
    with pytest.warns(UserWarning, match=message + ".* multi_step_grpo"):
        Advantage("grpo")(data)
    per_token: tuple[Any, ...] = ("reinforce_plus_plus_baseline", "optimal_token_baseline")
    for name in per_token:
        with pytest.warns(UserWarning, match=message):
            Advantage(name).check_groups(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = first_turns()
        first["query"] = torch.tensor([0, 0, 1, 1])
        Advantage("grpo")(first)


def test_as_many_rewards_as_tokens_are_told() -> None:
    tokens = TensorDict(full=torch.randint(3, 9, (4, 5)), prompt=torch.full((4, 2), 3), batch_size=[4])
    reward = torch.arange(20.0).reshape(4, 5)
    data = TensorDict(tokens=tokens, next=TensorDict(reward=reward, batch_size=[4]), batch_size=[4])
    with pytest.warns(UserWarning, match="holds 5 rewards for each sequence, as many as a row has tokens"):
        Advantage("gdpo", group_size=4)(data)
