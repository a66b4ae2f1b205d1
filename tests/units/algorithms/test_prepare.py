"""``prepare``: its entries, that it scores once what something reads, and its errors for data that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_llm_kl import RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.algorithms import SCHEMAS, AlgorithmParts, Schema, SchemaError, make_algorithm
from toy_tasks import TabularCritic, TabularPolicy, chain
from toy_training import total

TASK = chain()


class Counting(TabularPolicy):
    """Counts its forwards."""

    calls = 0

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        return super().forward(input_ids)


def counting() -> Counting:
    model = Counting(TASK.vocab, TASK.longest)
    model.load_state_dict(TASK.policy().state_dict())
    return model


def rollouts(rows: int = 16, group_size: int = 2) -> TensorDict:
    return TASK.sample(TASK.policy(), rows, torch.Generator().manual_seed(0), group_size)


def uniform() -> TabularPolicy:
    return TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))


def grpo(actor: Any = None, **settings: Any) -> AlgorithmParts:
    given = {"reference": uniform(), "group_key": "query", **settings}
    return make_algorithm("grpo", TASK.policy() if actor is None else actor, **given)


IN_REWARD: dict[str, Any] = {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": 0.5}


@pytest.mark.parametrize("name", ["grpo", "rloo", "opmd", "raft"])
def test_groups_of_one_answer_are_refused(name: str) -> None:
    """Each advantage would be 0, and with it each gradient."""
    own: dict[str, Any] = {"kl_loss": "none"}
    message = f"^group_size is 1, and {name} compares the answers to a prompt: take at least 2"
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, TASK.policy(), group_size=1, **own)
    data = rollouts()
    data["query"] = torch.arange(16)
    with pytest.raises(ValueError, match="found 16 groups of one answer"):
        make_algorithm(name, TASK.policy(), **own).prepare(data)
    data["query"][0] = 1  # a group of two
    make_algorithm(name, TASK.policy(), **own).prepare(data)


# ---------------------------------------------------------------------- entries


def test_log_probs_are_those_of_policy_and_reference() -> None:
    prompts, answers = torch.tensor([0, 1, 1]), torch.tensor([TASK.answers.index(x) for x in ((1, 0), (3,), (2, 3))])
    data = TASK.batch(prompts, answers)
    data["query"] = prompts
    batch = grpo().prepare(data)
    thirteenth = -torch.tensor([13.0] * 3, dtype=torch.float64).log()
    for name, expected in (("log_probs", TASK.reference[prompts, answers]), ("ref_log_probs", thirteenth)):
        found = batch["next", name, "full"]
        torch.testing.assert_close(found.double().sum(-1), expected, rtol=1e-5, atol=1e-5)
        assert not found[:, 0].any()  # the prompt's
        assert found[1, 1]
        assert not found[1, 2]  # padding's


def test_kl_in_the_reward_is_taken_off_once_and_only_where_it_belongs() -> None:
    plain = rollouts()["next", "reward"].squeeze(-1)
    in_loss = grpo().prepare(rollouts())
    assert torch.equal(in_loss["next", "reward"].squeeze(-1), plain)
    parts = grpo(**IN_REWARD)
    batch = parts.prepare(rollouts())
    difference = batch["next", "log_probs", "full"] - batch["next", "ref_log_probs", "full"]
    expected = plain - 0.5 * difference.sum(-1)
    for again in (batch, parts.prepare(batch)):
        torch.testing.assert_close(again["next", "reward"].squeeze(-1).sum(-1), expected)
    # Nor is what the algorithm's own transform charged, in an env say; also where the log-probs are scored once more.
    assert parts.kl_transform is not None
    once = parts.kl_transform(rollouts())
    for env in (once, once.exclude(("next", "log_probs"))):
        torch.testing.assert_close(parts.prepare(env.clone())["next", "reward"], once["next", "reward"])
    # A KL that the env scored and did not charge is charged.
    batch = parts.prepare(RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(rollouts()))
    torch.testing.assert_close(batch["advantage"], parts.prepare(rollouts())["advantage"])
    torch.testing.assert_close(parts.prepare(batch)["next", "reward"].squeeze(-1).sum(-1), expected)


def test_advantages_are_of_the_rewards_that_are_there_now() -> None:
    """Of a batch that is prepared again; that it is not scored again: ``test_forwards.py``."""
    parts = grpo()
    batch = parts.prepare(rollouts())
    advantage = batch["advantage"].clone()
    batch["next", "reward"] *= -1
    torch.testing.assert_close(parts.prepare(batch)["advantage"], -advantage)


def test_log_probs_as_torchrls_wrappers_store_them_are_scored_anew() -> None:
    parts = make_algorithm("dapo", TASK.policy(), group_key="query")
    root = rollouts()
    root["log_probs"] = TensorDict(full=torch.full((16, 3), -9.0), batch_size=[16])
    found, expected = (parts.prepare(data)["next", "log_probs", "full"] for data in (root, rollouts()))
    torch.testing.assert_close(found, expected)


def test_the_reference_may_be_in_the_data() -> None:
    scored = grpo().prepare(rollouts())
    parts = grpo(reference="data")
    assert parts.kl_transform is None
    kept = scored.exclude("advantage", "denominators")
    torch.testing.assert_close(total(parts.loss(parts.prepare(kept))), total(grpo().loss(scored)))


def test_raft_trains_the_best_of_each_group_alone_keeps_the_given_mask_and_prepares_twice() -> None:
    parts = make_algorithm("raft", TASK.policy(), group_size=4)
    batch = parts.prepare(rollouts(group_size=4))
    rewards = batch["next", "reward"].reshape(4, 4)
    best = (rewards == rewards.amax(-1, keepdim=True)).flatten()
    assert torch.equal(batch["loss_mask"].flatten().bool(), best)
    alone = batch[best].exclude("denominators", "loss_mask")
    torch.testing.assert_close(parts.loss(batch)["loss_objective"], parts.loss(alone)["loss_objective"])
    rows, tokens = torch.arange(16) % 5 > 0, torch.arange(48).reshape(16, 3) % 7 > 0
    assert (best & ~rows).any()
    for given in (rows, rows.unsqueeze(-1), tokens):
        data = rollouts(group_size=4)
        data["loss_mask"] = given
        for layout in (data, torch.stack(list(data.unbind(0)))):
            batch = parts.prepare(parts.prepare(layout.clone()))
            found = torch.stack([row["loss_mask"] for row in batch.unbind(0)])
            assert found.dtype == torch.bool
            assert torch.equal(found, given & best.reshape(-1, *[1] * (given.ndim - 1)))
    nested = rollouts(group_size=4)
    lengths = (nested["masks", "all_attention_mask"].sum(-1) - 1).tolist()
    responses = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    nested["loss_mask"] = torch.nested.as_nested_tensor(responses)
    for row, own, keep in zip(parts.prepare(nested)["loss_mask"].unbind(), responses, best, strict=True):
        assert torch.equal(row, own & keep)


# ---------------------------------------------------------------------- once


def test_old_log_probs_of_data_without_next_are_kept() -> None:
    actor = TASK.policy()
    parts = make_algorithm("dapo", actor, group_key="query")
    flat = rollouts()
    flat["reward"] = flat.pop("next")["reward"]
    flat["log_probs"] = TensorDict(full=torch.full((16, 3), -9.0), batch_size=[16])  # torchrl's
    batch = parts.prepare(flat)
    old = batch["log_probs", "full"].clone()
    torch.testing.assert_close(old, parts.prepare(rollouts())["next", "log_probs", "full"])
    with torch.no_grad():
        actor.table.mul_(0.5)
    assert torch.equal(parts.prepare(batch)["log_probs", "full"], old)
    assert torch.equal(parts.prepare(batch[:5])["log_probs", "full"], old[:5])


def test_old_values_are_kept() -> None:
    critic = TabularCritic(TASK)
    parts = make_algorithm("ppo", TASK.policy(), reference=TASK.policy(), critic=critic)
    batch = parts.prepare(rollouts())
    advantage, values = batch["advantage"].clone(), batch["next", "state_value"].clone()
    with torch.no_grad():
        critic.values.table.add_(1.0)
    again = parts.prepare(batch)
    assert torch.equal(again["next", "state_value"], values)
    assert torch.equal(again["advantage"], advantage)
    fresh = rollouts()
    fresh["next", "state_value"] = torch.full((16, 3), 7.0)  # of another critic
    assert not torch.equal(parts.prepare(fresh)["next", "state_value"], torch.full((16, 3), 7.0))


def test_missing_groups_are_noticed_before_models_run() -> None:
    actor, reference = counting(), counting()
    parts = make_algorithm("grpo", actor, reference=reference, group_key="task")
    actor.calls = reference.calls = 0
    with pytest.raises(KeyError, match="the group is missing: expected 'task'"):
        parts.prepare(rollouts())
    assert actor.calls == reference.calls == 0


# ---------------------------------------------------------------------- log-probs of the policy that sampled


def sampled(reward: str = "outcome") -> tuple[TensorDict, torch.Tensor]:
    """Rollouts with log-probs that a buffer's transform scored when they were written, and those log-probs."""
    batch = RetrieveLogProb(TASK.policy(), log_probs_full_key=("log_probs", "full"))(rollouts())
    if reward == "tokens":
        ends = batch["masks", "all_attention_mask"].sum(-1, keepdim=True) - 1
        batch["next", "reward"] = torch.zeros(16, 3).scatter(1, ends, batch["next", "reward"]).unsqueeze(-1)
    return batch, batch["next", "log_probs", "full"].clone()


def moved() -> Counting:
    """The policy after updates."""
    actor = counting()
    with torch.no_grad():
        actor.table.mul_(0.3)
    return actor


def references() -> tuple[Counting, torch.Tensor]:
    """A reference that is uniform over tokens, and its log-probs of the rollouts."""
    reference = counting()
    with torch.no_grad():
        reference.table.zero_()
    return reference, torch.where(sampled()[1] != 0, -torch.tensor(float(TASK.vocab)).log(), 0)


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_stored_log_probs_stay_beside_a_reference(layout: str) -> None:
    data, stored = sampled()
    reference, of_reference = references()
    actor = moved()
    parts = make_algorithm("grpo", actor, reference=reference, group_key="query")
    actor.calls = reference.calls = 0
    batch = parts.prepare(data if layout == "padded" else lazy_stack(list(data.unbind(0))))
    assert (actor.calls, reference.calls > 0) == (0, True)
    assert torch.equal(batch["next", "log_probs", "full"], stored)
    torch.testing.assert_close(batch["next", "ref_log_probs", "full"], of_reference)
    torch.testing.assert_close(batch["next", "kl_penalty"], stored - of_reference)
    out, plain = parts.loss(batch), make_algorithm("dapo", moved(), group_key="query", objective="ppo")
    assert out["ESS"] < 0.99
    torch.testing.assert_close(out["ESS"], plain.loss(plain.prepare(sampled()[0]))["ESS"])
    actor.calls = reference.calls = 0
    parts.prepare(batch)
    assert actor.calls == reference.calls == 0


def test_the_kl_in_the_reward_is_that_of_the_policy_that_sampled() -> None:
    """Also with a token that the sampler did not score, whose KL is 0, and with rewards per token."""
    reference, of_reference = references()
    for reward in ("outcome", "tokens"):
        data, stored = sampled(reward)
        data["next", "log_probs", "full"][3, 1] = torch.nan
        kl = stored - of_reference
        kl[3, 1] = 0
        parts = grpo(moved(), reference=reference, **IN_REWARD)
        batch = parts.prepare(data)
        expected = sampled("tokens")[0]["next", "reward"].squeeze(-1) - 0.5 * kl
        for _ in range(2):
            torch.testing.assert_close(batch["next", "reward"].squeeze(-1), expected)
            torch.testing.assert_close(batch["next", "kl_charged"], 0.5 * kl)
            assert torch.equal(batch["next", "log_probs", "full"].isnan().nonzero(), torch.tensor([[3, 1]]))
            batch = parts.prepare(batch)


@pytest.mark.parametrize("use_reference", [False, True])
def test_stored_log_probs_stay_where_moments_are_scored(use_reference: bool) -> None:
    """The advantage reads moments of the policy; the log-probs are those of the policy that sampled."""
    data, stored = sampled()
    reference, of_reference = references()
    given = {"reference": reference} if use_reference else {}
    parts = make_algorithm("optimal_token_baseline", moved(), use_reference=use_reference, group_key="query", **given)
    batch = parts.prepare(data)
    assert torch.equal(batch["next", "log_probs", "full"], stored)
    of_now = RetrieveLogProb(moved(), log_probs_full_key=("log_probs", "full"), moments_key="moments")(rollouts())
    torch.testing.assert_close(batch["next", "moments", "collision"], of_now["next", "moments", "collision"])
    if use_reference:
        torch.testing.assert_close(batch["next", "kl_penalty"], stored - of_reference)


@pytest.mark.filterwarnings("ignore:KL estimator 'exact' in the reward")
def test_an_exact_kl_is_of_the_models_and_leaves_stored_log_probs() -> None:
    data, stored = sampled()
    reference, _ = references()
    parts = grpo(moved(), reference=reference, **IN_REWARD | {"kl_reward": "exact"})
    expected = RetrieveKL(moved(), reference, estimator="exact", coeff=0.5)(rollouts())
    for uncharged in (data, RetrieveKL(moved(), reference, add_to_reward=False)(rollouts())):
        batch = parts.prepare(uncharged)
        for key in ("kl_penalty", "reward"):
            torch.testing.assert_close(batch["next", key], expected["next", key])
    assert torch.equal(data["next", "log_probs", "full"], stored)


# ---------------------------------------------------------------------- the KL in the reward, once


def test_token_rewards_beside_a_kl_of_another_transform() -> None:
    """They were taken for rewards that the KL was subtracted from."""
    scored = RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(sampled("tokens")[0])
    parts = grpo(**IN_REWARD)
    with pytest.raises(ValueError, match=r"kl_reward='k1': found one reward for each token and a KL.*kl_reward='none'"):
        parts.prepare(scored.clone())
    plain = scored["next", "reward"].squeeze(-1) - 0.5 * scored["next", "kl_penalty"]
    del scored["next", "kl_penalty"]  # as the message says
    torch.testing.assert_close(parts.prepare(scored)["next", "reward"].squeeze(-1), plain)


# ---------------------------------------------------------------------- schemas


def test_all_problems_are_reported_at_once() -> None:
    data = rollouts()
    data["tokens", "full"] = data["tokens", "full"].float()
    del data["next", "reward"]
    data["masks", "all_attention_mask"] = data["masks", "all_attention_mask"].long()
    data["query"] = torch.rand(16)
    data["next", "ref_log_probs"] = TensorDict(full=torch.zeros(16, 5), batch_size=[16])
    with pytest.raises(SchemaError) as caught:
        grpo().prepare(data)
    message = str(caught.value)
    for part in (
        "does not fit the schema 'experience'",
        r"('tokens', 'full'): expected integers, found torch.float32",
        r"('next', 'reward') [*B, 1] or [*B, T, 1] is missing: the outcome",
        r"('masks', 'all_attention_mask'): expected booleans, found torch.int64",
        r"'query': expected integers or strings, found torch.float32",
        r"('next', 'ref_log_probs', 'full'): sequence 0 has 5 values and 3 tokens",
    ):
        assert part in message
    assert message.count("\n  - ") == 5


def without(*keys: Any) -> TensorDictBase:
    return rollouts().exclude(*keys)


def changed(key: Any, value: Any) -> TensorDictBase:
    data = rollouts()
    data[key] = value
    return data


@pytest.mark.parametrize(
    ("schema", "data", "message"),
    [
        ("sft", without(("tokens", "full")), r"\('tokens', 'full'\) \[\*B, T\] is missing: prompt and response"),
        ("mix", rollouts(), r"'expert_mask' \[\*B\] is missing: True for the answers of experts"),
        ("mix", changed("expert_mask", torch.zeros(16)), r"'expert_mask': expected booleans, found torch.float32"),
        (
            "mix",
            changed("expert_mask", torch.zeros(16, 3) > 0),
            r"'expert_mask': expected one value for each of the 16",
        ),
        ("dpo", rollouts()[:7], r"found 7 sequences, expected pairs: chosen, rejected"),
        ("dpo", changed("chosen", torch.ones(16)), r"'chosen': expected booleans, found torch.float32"),
        ("experience", changed(("next", "reward"), torch.ones(16, 1) > 0), r"expected numbers, found torch.bool"),
        ("unpaired", rollouts(), r"'chosen' \[\*B\] is missing: True for a desirable answer"),
        ("experience", changed("loss_mask", torch.ones(16)), r"'loss_mask': expected booleans, found torch.float32"),
        ("trajectory", changed("step", torch.zeros(16)), r"'step': expected integers, found torch.float32"),
        ("trajectory", changed("step", torch.zeros(16, 2).long()), r"'step': expected one value for each of the 16"),
        ("trajectory", changed("state", torch.zeros(16)), r"'state': expected .*found torch.float32"),
        ("distill", changed("loss_mask", torch.ones(16, 4) > 0), r"'loss_mask': sequence 0 has 4 values and 3 tokens"),
    ],
)
def test_data_that_a_schema_refuses(schema: str, data: TensorDictBase, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        SCHEMAS[schema].check(data)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_data_that_a_schema_accepts(schema: str) -> None:
    data = rollouts()
    data["expert_mask"] = torch.zeros(16, 1, dtype=torch.bool)
    data["chosen"] = torch.ones(16, dtype=torch.bool)
    data["step"] = torch.arange(16)
    for layout in (data, data.reshape(4, 4), torch.stack(list(data.unbind(0)))):
        SCHEMAS[schema].check(layout)
    reward = data.pop(("next", "reward"))
    data["reward"] = reward  # without "next"
    SCHEMAS[schema].check(data)


def test_pairs_may_be_named_and_optional_entries_can_be_demanded() -> None:
    data = rollouts()[:7]
    data["pair_id"] = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    SCHEMAS["dpo"].check(data)  # the loss reports the single answer
    stricter: Schema = SCHEMAS["experience"].require("query")
    stricter.check(rollouts())
    with pytest.raises(SchemaError, match=r"'query' \[\*B\] is missing"):
        stricter.check(without("query"))
    SCHEMAS["experience"].check(without("query"))


def test_the_table_of_a_schema() -> None:
    lines = SCHEMAS["mix"].table().splitlines()
    assert lines[2] == "| `tokens, full` | `[*B, T]` | integer | prompt and response, as they were sampled |"
    assert "| `expert_mask` | `[*B]` | boolean | True for the answers of experts |" in lines
    assert sum("(optional)" in line for line in lines) == 7


# ---------------------------------------------------------------------- what an objective takes from the whole batch


def labelled() -> TensorDict:
    data = rollouts().exclude(("next", "reward"))
    data["chosen"] = torch.arange(16) % 3 == 0
    return data


def test_the_reference_point_is_computed_before_the_batch_is_split() -> None:
    """Of the reference itself the KL is 0; half way between the log-ratios of both kinds it is not."""
    for name, actor, reference in (("kto", uniform(), TASK.policy()), ("bco", TASK.policy(), uniform())):
        parts = make_algorithm(name, actor, reference=reference, beta=0.3)
        batch = parts.prepare(labelled(), count=True)
        assert batch["reference_point"].shape == (16,)
        assert len(batch["reference_point"].unique()) == 1
        assert batch["reference_point"][0] != 0
        whole = total(parts.loss(batch))
        torch.testing.assert_close(sum(total(parts.loss(rows)) for rows in batch.split(5)), whole)
    itself = make_algorithm("kto", uniform(), reference=uniform()).prepare(labelled())
    assert not itself["reference_point"].any()
    assert "reference_point" not in make_algorithm("dpo", TASK.policy(), reference=uniform()).prepare(rollouts())


def test_a_reference_in_the_data_cannot_score_mismatched_answers() -> None:
    parts = make_algorithm("kto", TASK.policy(), reference="data")
    data = labelled()
    data["next", "ref_log_probs", "full"] = -torch.ones(16, TASK.longest)
    with pytest.raises(KeyError, match=r"kto needs reference_point.*batch_inputs\(batch\) computes it"):
        parts.loss(parts.prepare(data))
    data["reference_point"] = torch.full((16,), 0.25)
    assert (parts.prepare(data)["reference_point"] == 0.25).all()
    assert total(parts.loss(data)).isfinite()
