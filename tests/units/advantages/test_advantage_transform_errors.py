"""Errors of the transform: arguments, data that is missing or wrong, and rows that answer several prompts."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from test_advantage_transform import batch, conversations, with_moments
from torch.nn.functional import pad

from refused import refused
from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms import make_algorithm
from toy_models import tiny_model

NAN = float("nan")
REWARD, MOMENTS = ("next", "reward"), ("next", "moments")


test_arguments = refused(
    lambda name, settings: Advantage(name, **settings),
    ("reinforce", {"group_size": 2}, "reinforce does not compare groups"),
    ("grpo", {"group_key": "a", "group_size": 2}, "got both group_key='a' and group_size=2"),
    ("grpo", {"group_size": 0}, "group_size must be at least 1, got 0"),
    ("grpo", {"layout": "tokens"}, "layout must be one of .*got 'tokens'"),
    ("gae", {"layout": "sequence"}, "gae has one number per token: layout must be 'token'"),
    ("grpo", {"keys": {"value": "v"}}, "grpo has no key 'value'.*Known: advantage, reward"),
    ("grpo", {"keys": {"group": "g"}}, "no key 'group'. Pass group_key=. Known: "),
)


@pytest.mark.parametrize(
    ("name", "hyper", "drop", "message"),
    [
        ("grpo", {}, "query", r"the group is missing: expected 'query' in the TensorDict, found: .*Pass group_key="),
        ("gdpo", {"keys": {"rewards": [REWARD, "b"]}}, "none", r"rewards is missing: expected 'b'.*an entry for each"),
        ("gae", {}, ("next", "state_value"), r"the value is missing: .*Put RetrieveValue before"),
        ("jsd", {}, ("next", "ref_log_probs"), r"the teacher_log_prob is missing.*RetrieveKL\(policy, teacher\)"),
        ("gae", {"keys": {"mask": "m"}}, "none", "the mask is missing: expected 'm' in the TensorDict, found: "),
        ("gae", {}, ("tokens", "full"), r"nothing to score: .* or store \('tokens', 'full'\)"),
    ],
)
def test_entries_that_are_missing(name: str, hyper: dict[str, Any], drop: Any, message: str) -> None:
    data = with_moments("padded").exclude(drop)
    before = set(data.keys(True, True))
    with pytest.raises(KeyError, match=message):
        Advantage(name, **hyper)(data)
    assert set(data.keys(True, True)) == before


@pytest.mark.parametrize(("form", "bad"), [("lazy", NAN), ("nested", float("inf")), ("padded", NAN)])
def test_rewards_that_are_not_finite_name_their_sequence(form: str, bad: float) -> None:
    data = conversations(form)
    data["next", "reward"] = torch.tensor([[1.0], [bad], [2.0]])
    with pytest.raises(ValueError, match=f"the reward is {bad} at sequence 1: expected a finite number"):
        Advantage("rloo")(data)
    with pytest.raises(ValueError, match=f"the reward is {bad} at sequence 1, position 3"):
        Advantage("reinforce_plus_plus")(data)


def test_a_value_that_is_not_finite_names_its_token_and_padding_is_ignored() -> None:
    data = conversations("padded")
    value = data["next", "state_value"]
    value[0, 3:] = NAN
    value[1, :2] = NAN
    Advantage("gae")(data)
    value[2, 3] = NAN
    with pytest.raises(ValueError, match="the value is nan at sequence 2, position 3: expected a finite number"):
        Advantage("gae")(data)


def with_entry(name: str, key: Any, value: Any) -> None:
    data = batch().update({key: value, "run": torch.zeros(6, dtype=torch.long)})
    Advantage(name, keys={"run": "run", "step": "step"} if key == "step" else {})(data)


test_entries_of_another_kind = refused(
    with_entry,
    ("grpo", "query", torch.rand(6), TypeError, r"the group must be integers or strings, found torch\.float32"),
    ("step_wise_grpo", "step", torch.rand(6), ValueError, "integer for each of 6 rows, found 6"),
    ("step_wise_grpo", "step", torch.zeros(6, 2).long(), ValueError, "integer for each of 6 rows, found 12"),
    ("step_wise_grpo", "x", torch.zeros(6), ValueError, r"cannot tell trajectories apart: pass keys="),
    ("gdpo", ("next", "reward"), torch.zeros(6), ValueError, r"under \('next', 'reward'\) must be \[\*B, R\]"),
    ("gdpo", ("next", "reward"), torch.zeros(6, 4, 1), ValueError, r"must be \[\*B, R\], R numbers for 6"),
    ("gdpo", ("next", "reward"), NAN * torch.eye(6, 2), ValueError, "a reward is nan at sequence 0, reward 0"),
)


def test_entries_shorter_or_longer_than_the_tokens() -> None:
    data = conversations("padded")
    for shape, message in (
        ((3, 2), r"'state_value'.*: sequence 0 has 2 values and 5 tokens.*Pass one value per token"),
        ((3, 5, 2), r"'state_value'.* must hold one number per token, found rows of \(2,\) each"),
        ((3,), "the value must hold one number per token, found one per sequence under"),
    ):
        data["next", "state_value"] = torch.zeros(shape)
        with pytest.raises(ValueError, match=message):
            Advantage("gae")(data)
    data["next", "reward"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"the reward has shape \(3, 2\): .*Sequence 0 has 5 tokens"):
        Advantage("rloo")(data)


MESSAGE = r"group_size=4 would compare sequences 0 and 1, and their prompt differs\. For turns of conv"


def turns(*, padding: str = "right") -> Any:
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
    return lazy_stack(list(turns().unbind(0))[::2])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_turns_of_conversations_are_not_answers_to_one_prompt(padding: str) -> None:
    for name in ("grpo", "dr_grpo", "rloo", "opmd", "asymre", "rec", "best_of_group"):
        with pytest.raises(ValueError, match=MESSAGE + r".* use the algorithm multi_step_grpo .*, or pass group_key="):
            Advantage(name, group_size=4)(turns(padding=padding))


def test_whole_conversations_are_compared() -> None:
    """Conversations 0 and 1 answer prompt 5, and end with rewards 0 and 1."""
    parts = make_algorithm("multi_step_grpo", tiny_model(), reference=tiny_model(), group_size=2)
    advantage = parts.prepare(turns(padding="left").reshape(4, 2))["advantage"].reshape(4, 2)
    torch.testing.assert_close(advantage[:2], torch.tensor([[-0.7071] * 2, [0.7071] * 2]), atol=1e-4, rtol=0)
    shuffled = turns(padding="left").reshape(4, 2)[torch.tensor([0, 2, 1, 3])]
    message = r"group_size=2 would compare sequences 0 and 2, .* prompt differs\. "
    with pytest.raises(ValueError, match=message):
        Advantage("step_wise_grpo", group_size=2)(shuffled)


@pytest.mark.parametrize("layout", ["lazy", "dense"])
def test_padding_does_not_matter_to_answers_of_one_prompt(layout: str) -> None:
    data = first_turns()  # rewards 1, 0, 0, 0
    if layout == "dense":
        for row, gap in zip(data.tensordicts, (0, 3, 1, 2), strict=True):  # each row padded in its own way
            for key in (("tokens", "full"), ("masks", "all_attention_mask"), ("tokens", "prompt")):
                row[key] = pad(row[key], (gap, 0))
    found = Advantage("dr_grpo", group_size=2)(data)["advantage"].flatten()
    assert found.tolist() == [0.5, -0.5, 0, 0]
    with pytest.raises(ValueError, match="compare sequences 0 and 2"):
        Advantage("dr_grpo", group_size=4)(data)


@pytest.mark.parametrize("query", [torch.tensor([3, 3, 4, 4]), ["a", "a", "b", "b"]], ids=str)
def test_the_query_must_be_the_same_too(query: Any) -> None:
    reward = torch.tensor([[0.0], [2.0], [0.0], [4.0]])
    data = TensorDict(next=TensorDict(reward=reward, batch_size=[4]), batch_size=[4])
    data["query"] = query if isinstance(query, torch.Tensor) else NonTensorStack(*query)
    assert Advantage("dr_grpo", group_size=2)(data.clone())["advantage"].flatten().tolist() == [-1, 1, -2, 2]
    with pytest.raises(ValueError, match="compare sequences 0 and 2, and their entry 'query' differs"):
        Advantage("dr_grpo", group_size=4)(data)


def test_turns_that_share_a_key_are_an_error() -> None:
    data = turns()
    data["query"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    message = r"rows of one group \(group_key='query'\) have different prompts"
    with pytest.warns(UserWarning, match=message + ".* multi_step_grpo"):
        Advantage("grpo")(data)
    for name in ("reinforce_plus_plus_baseline", "optimal_token_baseline"):
        with pytest.warns(UserWarning, match=message):
            Advantage(name).check_groups(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = first_turns()
        first["query"] = torch.tensor([0, 0, 1, 1])
        Advantage("grpo")(first)


def test_as_many_rewards_as_tokens_are_an_error() -> None:
    tokens = TensorDict(full=torch.randint(3, 9, (4, 5)), prompt=torch.full((4, 2), 3), batch_size=[4])
    reward = torch.arange(20.0).reshape(4, 5)
    data = TensorDict(tokens=tokens, next=TensorDict(reward=reward, batch_size=[4]), batch_size=[4])
    with pytest.warns(UserWarning, match="holds as many rewards as a row has tokens"):
        Advantage("gdpo", group_size=4)(data)
