"""``prepare``: what it writes, its errors, and that it runs a model once, and only if its scores are read.

Also: a loss logs no number that cannot change.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from refused import refused
from torchrl_llm_kl import Moments, RetrieveKL, RetrieveLogProb, ScoreOptions
from torchrl_llm_kl.algorithms import ALGORITHMS, SCHEMAS, AlgorithmParts, SchemaError, make_algorithm
from toy_tasks import TabularCritic, TabularPolicy, chain
from toy_training import FORWARDS_OF_THE_BATCH, made, rows_of_all, total

TASK = chain()


class Counting(TabularPolicy):
    """Counts its forward passes."""

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


def counted(name: str, **settings: Any) -> tuple[AlgorithmParts, Counting, Counting]:
    """An algorithm with its actor and reference, neither called yet."""
    actor, reference = counting(), counting()
    parts = made(name, actor, reference, **settings)
    actor.calls = reference.calls = 0
    return parts, actor, reference


def uniform() -> TabularPolicy:
    return TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))


def grpo(actor: Any = None, **settings: Any) -> AlgorithmParts:
    given = {"reference": uniform(), "group_key": "query", **settings}
    return make_algorithm("grpo", TASK.policy() if actor is None else actor, **given)


IN_REWARD: dict[str, Any] = {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": 0.5}


@pytest.mark.parametrize("name", ["grpo", "rloo", "opmd", "raft"])
def test_groups_of_one_answer_are_refused(name: str) -> None:
    """Every advantage would be 0, and so every gradient."""
    own: dict[str, Any] = {"kl_loss": "none"}
    message = f"^group_size is 1, and {name} compares the answers to a prompt: use at least 2"
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, TASK.policy(), group_size=1, **own)
    data = rollouts()
    data["query"] = torch.arange(16)
    with pytest.raises(ValueError, match="found 16 groups of one answer"):
        make_algorithm(name, TASK.policy(), **own).prepare(data)
    data["query"][0] = 1  # a group of two
    make_algorithm(name, TASK.policy(), **own).prepare(data)
    actor = counting()  # the error comes before any model runs
    with pytest.raises(KeyError, match="the group is missing: expected 'task'"):
        make_algorithm(name, actor, group_key="task", **own).prepare(rollouts())
    assert actor.calls == 0


def test_log_probs_are_those_of_policy_and_reference() -> None:
    prompts, answers = torch.tensor([0, 1, 1]), torch.tensor([TASK.answers.index(x) for x in ((1, 0), (3,), (2, 3))])
    data = TASK.batch(prompts, answers)
    data["query"] = prompts
    batch = grpo().prepare(data)
    thirteenth = -torch.tensor([13.0] * 3, dtype=torch.float64).log()
    for name, expected in (("log_probs", TASK.reference[prompts, answers]), ("ref_log_probs", thirteenth)):
        found = batch["next", name, "full"]
        torch.testing.assert_close(found.double().sum(-1), expected, rtol=1e-5, atol=1e-5)
        assert not found[:, 0].any()  # prompt
        assert found[1, 1]
        assert not found[1, 2]  # padding


def test_kl_in_the_reward_is_subtracted_only_once() -> None:
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
    once = parts.kl_transform(rollouts())
    for env in (once, once.exclude(("next", "log_probs"))):
        torch.testing.assert_close(parts.prepare(env.clone())["next", "reward"], once["next", "reward"])
    # A KL that the env scored and did not charge is charged.
    batch = parts.prepare(RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(rollouts()))
    torch.testing.assert_close(batch["advantage"], parts.prepare(rollouts())["advantage"])
    torch.testing.assert_close(parts.prepare(batch)["next", "reward"].squeeze(-1).sum(-1), expected)


def test_advantages_follow_the_current_rewards() -> None:
    """A batch is prepared again after its rewards changed."""
    parts = grpo()
    batch = parts.prepare(rollouts())
    # The reference may be in the data.
    of_data = grpo(reference="data")
    assert of_data.kl_transform is None
    kept = batch.exclude("advantage", "denominators")
    torch.testing.assert_close(total(of_data.loss(of_data.prepare(kept))), total(parts.loss(batch)))
    advantage = batch["advantage"].clone()
    batch["next", "reward"] *= -1
    torch.testing.assert_close(parts.prepare(batch)["advantage"], -advantage)


def test_raft_trains_only_the_best_of_each_group() -> None:
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


def test_old_log_probs_are_kept_but_for_those_of_torchrls_wrappers() -> None:
    """For data with and without ``"next"``."""
    actor = TASK.policy()
    parts = make_algorithm("dapo", actor, group_key="query")
    flat, root = rollouts(), rollouts()
    flat["reward"] = flat.pop("next")["reward"]
    for data in (flat, root):
        data["log_probs"] = TensorDict(full=torch.full((16, 3), -9.0), batch_size=[16])
    expected = parts.prepare(rollouts())["next", "log_probs", "full"]
    torch.testing.assert_close(parts.prepare(root)["next", "log_probs", "full"], expected)
    batch = parts.prepare(flat)
    old = batch["log_probs", "full"].clone()
    torch.testing.assert_close(old, expected)
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


# ---------------------------------------------------------------------- log-probs of the policy that sampled
def sampled(reward: str = "outcome") -> tuple[TensorDict, torch.Tensor]:
    """Rollouts whose log-probs a buffer's transform wrote when they were stored, and those log-probs."""
    batch = RetrieveLogProb(TASK.policy(), log_probs_full_key=("log_probs", "full"))(rollouts())
    if reward == "tokens":
        ends = batch["masks", "all_attention_mask"].sum(-1, keepdim=True) - 1
        batch["next", "reward"] = torch.zeros(16, 3).scatter(1, ends, batch["next", "reward"]).unsqueeze(-1)
    return batch, batch["next", "log_probs", "full"].clone()


def moved(factor: float = 0.3) -> Counting:
    """The policy after some updates."""
    actor = counting()
    with torch.no_grad():
        actor.table.mul_(factor)
    return actor


def references() -> tuple[Counting, torch.Tensor]:
    """A reference that is uniform over tokens, and its log-probs of the rollouts."""
    return moved(0.0), torch.where(sampled()[1] != 0, -torch.tensor(float(TASK.vocab)).log(), 0)


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
    """Also for rewards per token, and with a token that the sampler did not score, whose KL is 0."""
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


@pytest.mark.filterwarnings("ignore:KL estimator 'exact' in the reward")
def test_stored_log_probs_stay_where_moments_or_an_exact_kl_are_scored() -> None:
    """Moments and the KL come from the current models, the log-probs stay the sampler's."""
    reference, of_reference = references()
    of_now = RetrieveLogProb(moved(), log_probs_full_key=("log_probs", "full"), extras=[Moments()])(rollouts())
    for given in ({}, {"reference": reference, "use_reference": True}):
        data, stored = sampled()
        batch = make_algorithm("optimal_token_baseline", moved(), group_key="query", **given).prepare(data)
        assert torch.equal(batch["next", "log_probs", "full"], stored)
        torch.testing.assert_close(batch["next", "moments", "collision"], of_now["next", "moments", "collision"])
    torch.testing.assert_close(batch["next", "kl_penalty"], stored - of_reference)
    data, stored = sampled()
    parts = grpo(moved(), reference=reference, **IN_REWARD | {"kl_reward": "exact"})
    expected = RetrieveKL(moved(), reference, estimator="exact", coeff=0.5)(rollouts())
    for uncharged in (data, RetrieveKL(moved(), reference, add_to_reward=False)(rollouts())):
        batch = parts.prepare(uncharged)
        for key in ("kl_penalty", "reward"):
            torch.testing.assert_close(batch["next", key], expected["next", key])
    assert torch.equal(data["next", "log_probs", "full"], stored)


def test_token_rewards_beside_a_kl_of_another_transform() -> None:
    """They must not be taken for rewards from which the KL was already subtracted."""
    scored = RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(sampled("tokens")[0])
    parts = grpo(**IN_REWARD)
    with pytest.raises(ValueError, match=r"kl_reward='k1': another transform wrote .*kl_reward='none'"):
        parts.prepare(scored.clone())
    plain = scored["next", "reward"].squeeze(-1) - 0.5 * scored["next", "kl_penalty"]
    del scored["next", "kl_penalty"]  # the remedy in the message
    torch.testing.assert_close(parts.prepare(scored)["next", "reward"].squeeze(-1), plain)


# ---------------------------------------------------------------------- schemas
def test_all_problems_are_reported_at_once() -> None:
    data = rollouts()
    data["tokens", "full"] = data["tokens", "full"].float()
    del data["next", "reward"]
    data["masks", "all_attention_mask"] = data["masks", "all_attention_mask"].long()
    data["query"] = torch.rand(16)
    with pytest.raises(SchemaError, match="does not fit the schema 'experience'") as caught:
        grpo().prepare(data)
    message = str(caught.value)
    for part in (
        r"('tokens', 'full'): expected integers, found torch.float32",
        r"('next', 'reward') [*B, 1] or [*B, T, 1] is missing: the outcome",
        r"('masks', 'all_attention_mask'): expected booleans, found torch.int64",
        r"'query': expected integers or strings, found torch.float32",
    ):
        assert part in message
    assert message.count("\n  - ") == 4


def changed(key: Any, value: Any) -> TensorDictBase:
    data = rollouts()
    data[key] = value
    return data


test_data_that_a_schema_refuses = refused(
    lambda schema, data: SCHEMAS[schema].check(data),
    ("sft", rollouts().exclude(("tokens", "full")), r"\('tokens', 'full'\) \[\*B, T\] is missing: the sampled prompt"),
    ("mix", changed("expert_mask", torch.zeros(16, 3) > 0), r"'expert_mask': .* one value for each of the 16"),
    ("dpo", rollouts()[:7], r"found 7 sequences, expected pairs: chosen, rejected"),
    ("experience", changed(("next", "reward"), torch.ones(16, 1) > 0), r"expected numbers, found torch.bool"),
    error=SchemaError,
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_data_that_a_schema_accepts(schema: str) -> None:
    data = rollouts()
    data["expert_mask"] = torch.zeros(16, 1, dtype=torch.bool)
    data["chosen"] = torch.ones(16, dtype=torch.bool)
    data["step"] = torch.arange(16)
    for layout in (data, data.reshape(4, 4), torch.stack(list(data.unbind(0)))):
        SCHEMAS[schema].check(layout)
    reward = data.pop(("next", "reward"))
    data["reward"] = reward  # data without "next"
    SCHEMAS[schema].check(data)


def test_pairs_may_be_named() -> None:
    data = rollouts()[:7]
    data["pair_id"] = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    SCHEMAS["dpo"].check(data)  # a single answer is the loss's error
    lines = SCHEMAS["mix"].table().splitlines()
    assert lines[2] == "| `tokens, full` | `[*B, T]` | integer | the sampled prompt and response |"
    assert "| `expert_mask` | `[*B]` | boolean | True for the answers of experts |" in lines
    assert sum("(optional)" in line for line in lines) == 7


def labelled() -> TensorDict:
    data = rollouts().exclude(("next", "reward"))
    data["chosen"] = torch.arange(16) % 3 == 0
    return data


def test_ktos_reference_point_is_computed_before_the_batch_is_split() -> None:
    """It is a KL: 0 if the actor is the reference, otherwise not."""
    for name, actor, reference in (("kto", uniform(), TASK.policy()), ("bco", TASK.policy(), uniform())):
        parts = make_algorithm(name, actor, reference=reference, objective_args={"beta": 0.3})
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


# ---------------------------------------------------------------------- which models run
#: Which scores a preset reads beside the current log-probs: of the policy that sampled, of the reference or teacher. The
#: objectives of opmd, and of rec without clipping, weights and regulariser, have no ratio; the loss of gkd scores the teacher.
#: Lines of presets: those that read both, the policy, the reference, none of them.
LINES = """
ppo grpo rloo reinforce_plus_plus topr cispo gspo sapo mix mix_chord on_policy_distill jsd multi_step_grpo gigpo gdpo \
    reinforce_plus_plus_baseline pass_at_k iw_opd
dr_grpo dapo fipo ctpo ctpo_kl sppo luspo dro optimal_token_baseline clip_b clip_v vapo maxrl rae echo
opmd rec dpo kto bco a2po
asymre sft raft gkd opo simpo cpo orpo tpo
"""
BOTH_OR_NONE = [(True, True), (True, False), (False, True), (False, False)]
READ = {x: read for names, read in zip(LINES.strip().split("\n"), BOTH_OR_NONE, strict=True) for x in names.split()}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("gkd", "ctpo_kl")])
def test_prepare_scores_what_is_read(name: str) -> None:
    old, ref = READ[name]
    parts, actor, reference = counted(name)
    policy_again, reference_again = FORWARDS_OF_THE_BATCH.get(name, (0, 0))
    batch = parts.prepare(rows_of_all(name=name))
    assert (actor.calls, reference.calls) == (old + policy_again, ref + reference_again)
    entries = set(batch.keys(True, True))
    assert (("next", "log_probs", "full") in entries) == old
    assert (("next", "ref_log_probs", "full") in entries) == ref
    for key, needed in (("log_probs", old), ("ref_log_probs", ref and name != "kto")):
        if needed:  # without this entry the advantage or the loss must fail
            less = batch.exclude(("next", key))
            with pytest.raises(KeyError, match=key):
                parts.loss(less if parts.advantage is None else parts.advantage(less))
    actor.calls = reference.calls = 0
    out = parts.loss(parts.prepare(batch))  # nothing is scored again
    assert reference.calls == reference_again
    assert actor.calls == 1 + policy_again  # the current log-probs
    assert ("ESS" in out, "kl_to_ref" in out) == (old, ref)


def test_an_exact_kl_scores_the_reference_only_in_the_loss() -> None:
    for name, old in (("grpo", True), ("ctpo_kl", True), ("opmd", False), ("dpo", False)):
        parts, actor, reference = counted(name, kl_loss="exact")
        batch = parts.prepare(rows_of_all())
        assert (actor.calls > 0, reference.calls) == (old, 0)
        out = parts.loss(batch)
        assert reference.calls == 1
        assert float(out["kl_to_ref"]) == pytest.approx(0, abs=1e-6)
    parts, _, reference = counted("jsd", kl_loss="exact")
    parts.prepare(rows_of_all())
    assert reference.calls == 1  # by prepare, for the advantage
    # A reference that nothing else reads is scored once, for the log.
    actor, reference = counting(), counting()
    parts = make_algorithm("asymre", actor, reference=reference, use_reference=True, group_key="query")
    actor.calls = reference.calls = 0
    out = parts.loss(parts.prepare(rows_of_all()))
    assert (actor.calls, reference.calls) == (1, 1)
    assert "kl_to_ref" in out
    # A KL in the reward needs both models.
    for name in ("opmd", "rec"):
        kl_transform = made(name, TASK.policy(), TASK.policy(), kl_reward="k1", kl_loss="none").kl_transform
        assert isinstance(kl_transform, RetrieveKL)
        assert kl_transform.add_to_reward


def test_a_distillation_scores_the_teacher_once() -> None:
    """In the loss for whole distributions, in ``prepare`` for a top k."""
    for name, settings, when in (
        ("gkd", {}, "loss"),
        ("gkd", {"top_k": 3}, "prepare"),
        ("on_policy_distill", {"top_k": 3}, "prepare"),
        ("jsd", {"top_k": 3, "kl_loss": "k2", "use_reference": True}, "prepare"),
        ("gkd", {"kl_loss": "k2"}, "loss"),
    ):
        parts, actor, teacher = counted(name, **settings)
        batch = parts.prepare(rows_of_all())
        assert (actor.calls, teacher.calls) == (0, when == "prepare")
        entries = set(batch.keys(True, True))
        assert (("next", "top_k", "ids") in entries) == (when == "prepare")
        out = parts.loss(parts.prepare(batch))
        assert (actor.calls, teacher.calls) == (1, 1)
        assert ("captured_mass" in out) == (when == "prepare")
        if when == "prepare":
            parts.prepare(batch.exclude(("next", "top_k")))  # the log-probs are there, the top k is not
            assert teacher.calls == 2


@pytest.mark.parametrize("name", ["dpo", "opmd"])
def test_scoring_only_the_reference_gives_the_same_numbers(name: str) -> None:
    parts = made(name, TASK.policy(), uniform())
    assert isinstance(parts.kl_transform, RetrieveLogProb)
    out = parts.loss(parts.prepare(rows_of_all()))
    both = RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(rows_of_all())
    again = parts.prepare(both)  # what the env scored is kept
    assert torch.equal(again["next", "ref_log_probs", "full"], both["next", "ref_log_probs", "full"])
    torch.testing.assert_close(total(parts.loss(again)), total(out))
    assert set(out.keys()) < set(parts.loss(again).keys())  # the sampler's log-probs are there: ESS is logged


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_metric_is_constant_by_construction(name: str) -> None:
    """Batches have several sizes, and the policy has moved far since they were prepared."""
    assert set(READ) == set(ALGORITHMS)
    rows: list[dict[str, float]] = []
    for seed, size in enumerate((16, 32, 64, 48)):
        actor, rng = TASK.policy(), torch.Generator().manual_seed(seed)
        parts = made(name, actor, uniform(), options=ScoreOptions(entropy=True))
        batch = parts.prepare(rows_of_all(size, seed, name))
        size = len(batch)
        batch["loss_mask"] = batch.get("loss_mask", torch.ones(size, dtype=torch.bool)).reshape(-1)
        batch["loss_mask"] &= torch.arange(size) % 8 > 1
        with torch.no_grad():
            actor.table.add_(2.5 * torch.randn(actor.table.shape, generator=rng))
            if parts.critic_loss is not None:
                parts.critic_loss.critic_network.values.table.add_(0.1 * seed)
        for loss in parts.losses:
            found = loss(batch).detach()
            rows.append({key: float(value) for key, value in found.items()})
    allowed = {
        # A bound that can be set in place: reading it on the device to leave this out would be a host sync.
        "cispo": {"clip_fraction_low"},
        # Its advantages are not negative, other advantages of this objective are.
        "pass_at_k": {"clip_fraction_low", "clip_fraction_dual"},
        # No ratio of these answers is above 10.
        "fipo": {"clip_fraction_dual"},
        # A KL below 0 counts as 0, which it is for these answers.
        "kto": {"reference_point"},
    }.get(name, set())
    constant = {key for key in {k for row in rows for k in row} if len({row[key] for row in rows if key in row}) == 1}
    assert constant == allowed


@pytest.mark.parametrize("name", ["clip_v", "optimal_token_baseline"])
def test_what_an_env_did_not_score_is_added(name: str) -> None:
    """An env's transform wrote only log-probs; the advantage also reads entropies or moments."""
    parts = made(name, TASK.policy(), None)
    expected = parts.prepare(rows_of_all())["advantage"]
    batch = RetrieveLogProb(TASK.policy(), log_probs_full_key=("log_probs", "full"))(rows_of_all())
    assert ("next", "log_probs", "full") in batch.keys(True)
    torch.testing.assert_close(parts.prepare(batch)["advantage"], expected)
