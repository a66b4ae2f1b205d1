"""``prepare`` runs the models whose scores something reads, and a loss logs no number that cannot change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from test_prepare import counting, uniform

from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmParts, make_algorithm
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb
from toy_tasks import TabularCritic, chain
from toy_training import total

TASK = chain()

#: Which scores a preset reads beside the current log-probs: of the policy that sampled, of the reference or teacher. The
#: objectives of opmd, and of rec without clipping, weights and regulariser, have no ratio; the loss of gkd scores the teacher.
READ: dict[str, tuple[bool, bool]] = {
    name: read
    for read, names in {
        (True, True): """
            ppo grpo rloo reinforce_plus_plus topr cispo gspo sapo mix mix_chord on_policy_distill jsd
            multi_step_grpo gigpo reinforce_plus_plus_baseline pass_at_k gdpo
        """,
        (True, False): """
            dr_grpo dapo sppo luspo dro optimal_token_baseline clip_b clip_v
        """,
        (False, True): """
            opmd rec dpo kto bco
        """,
        (False, False): """
            asymre sft raft gkd opo simpo cpo orpo
        """,
    }.items()
    for name in names.split()
}
#: These compute a number of the whole batch with the current policy, anew whenever a batch is prepared: of the answers and, for
#: kto, of mismatched ones, which the reference scores too. So kto's loss has the reference, and would score it itself.
FORWARDS_OF_THE_BATCH = {"kto": (1, 1), "bco": (1, 0)}


def data(rows: int = 16, seed: int = 0, *, labels: bool = False) -> TensorDictBase:
    """Rollouts for any schema: groups, pairs, experts, trajectories of one step."""
    found = TASK.sample(TASK.policy(), rows, torch.Generator().manual_seed(seed), 4)
    found["next", "reward"] += torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed))
    found["expert_mask"] = torch.arange(rows) % 4 == seed % 4
    found["run"], found["step"] = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    found["state"] = found["query"].clone()
    if labels:
        found["chosen"] = torch.arange(rows) % 3 == seed % 3
    return found


def made(name: str, actor: Any, reference: Any, **settings: Any) -> AlgorithmParts:
    preset = ALGORITHMS[name]
    given: dict[str, Any] = {"reference": reference} if preset.needs_reference else {}
    given |= {"critic": TabularCritic(TASK)} if preset.use_critic else {}
    given |= {"max_len": 2} if name == "dr_grpo" else {}
    if preset.schema == "trajectory":
        given["advantage_args"] = {"keys": {"run": "run", "step": "step"}}
    return make_algorithm(name, actor, **given | settings)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "gkd"])
def test_prepare_scores_what_is_read(name: str) -> None:
    old, ref = READ[name]
    actor, reference = counting(), counting()
    parts = made(name, actor, reference)
    actor.calls = reference.calls = 0
    policy_again, reference_again = FORWARDS_OF_THE_BATCH.get(name, (0, 0))
    batch = parts.prepare(data(labels=name in FORWARDS_OF_THE_BATCH))
    assert (actor.calls, reference.calls) == (old + policy_again, ref + reference_again)
    entries = set(batch.keys(True, True))
    assert (("next", "log_probs", "full") in entries) == old
    assert (("next", "ref_log_probs", "full") in entries) == ref
    for key, needed in (("log_probs", old), ("ref_log_probs", ref and name != "kto")):
        if needed:  # without the entry the advantage or the loss fails
            less = batch.exclude(("next", key))
            with pytest.raises(KeyError, match=key):
                parts.loss(less if parts.advantage is None else parts.advantage(less))
    actor.calls = reference.calls = 0
    out = parts.loss(parts.prepare(batch))  # nothing is scored again
    assert reference.calls == reference_again
    assert actor.calls == 1 + policy_again  # the current log-probs
    assert ("ESS" in out, "kl_to_ref" in out) == (old, ref)


def test_a_reference_without_use_is_scored_once_for_the_log() -> None:
    actor, reference = counting(), counting()
    parts = make_algorithm("asymre", actor, reference=reference, use_reference=True, group_key="query")
    actor.calls = reference.calls = 0
    out = parts.loss(parts.prepare(data()))
    assert (actor.calls, reference.calls) == (1, 1)
    assert "kl_to_ref" in out


def test_an_exact_kl_scores_the_reference_in_the_loss_alone() -> None:
    for name, old in (("grpo", True), ("opmd", False), ("dpo", False)):
        actor, reference = counting(), counting()
        parts = made(name, actor, reference, kl_loss="exact")
        actor.calls = reference.calls = 0
        batch = parts.prepare(data())
        assert (actor.calls > 0, reference.calls) == (old, 0)
        out = parts.loss(batch)
        assert reference.calls == 1
        assert float(out["kl_to_ref"]) == pytest.approx(0, abs=1e-6)
    parts = made("jsd", counting(), reference := counting(), kl_loss="exact", use_reference=True)
    reference.calls = 0
    parts.prepare(data())
    assert reference.calls == 1  # for the advantage


def test_a_distillation_scores_the_teacher_once() -> None:
    """From whole distributions in the loss, from a top k when a batch is prepared."""
    for name, settings, when in (
        ("gkd", {}, "loss"),
        ("gkd", {"top_k": 3}, "prepare"),
        ("on_policy_distill", {"top_k": 3}, "prepare"),
        ("jsd", {"top_k": 3, "kl_loss": "k2", "use_reference": True}, "prepare"),
        ("gkd", {"kl_loss": "k2"}, "loss"),
    ):
        actor, teacher = counting(), counting()
        parts = made(name, actor, teacher, **settings)
        actor.calls = teacher.calls = 0
        batch = parts.prepare(data())
        assert (actor.calls, teacher.calls) == (0, when == "prepare")
        entries = set(batch.keys(True, True))
        assert (("next", "top_k", "ids") in entries) == (when == "prepare")
        out = parts.loss(parts.prepare(batch))
        assert (actor.calls, teacher.calls) == (1, 1)
        assert ("captured_mass" in out) == (when == "prepare")
        if when == "prepare":
            parts.prepare(batch.exclude(("next", "top_k")))  # the log-probs are there, the top k is not
            assert teacher.calls == 2


def test_a_kl_in_the_reward_scores_both() -> None:
    for name in ("opmd", "dpo", "rec"):
        kl_transform = made(name, TASK.policy(), TASK.policy(), kl_reward="k1", kl_loss="none").kl_transform
        assert isinstance(kl_transform, RetrieveKL)
        assert kl_transform.add_to_reward


@pytest.mark.parametrize("name", ["dpo", "opmd"])
def test_the_reference_alone_gives_the_numbers_of_both(name: str) -> None:
    parts = made(name, TASK.policy(), uniform())
    assert isinstance(parts.kl_transform, RetrieveLogProb)
    out = parts.loss(parts.prepare(data()))
    both = RetrieveKL(TASK.policy(), uniform(), add_to_reward=False)(data())
    again = parts.prepare(both)  # what the env scored is kept
    assert torch.equal(again["next", "ref_log_probs", "full"], both["next", "ref_log_probs", "full"])
    torch.testing.assert_close(total(parts.loss(again)), total(out))
    assert set(out.keys()) < set(parts.loss(again).keys())  # the sampler's log-probs are there: ESS is logged


def test_the_base_model_of_adapters_alone() -> None:
    peft = pytest.importorskip("peft")
    from test_models_of_algorithms import batch, with_lora

    from toy_models import tiny_model

    actor = with_lora()
    assert isinstance(actor, peft.PeftModel)
    found = make_algorithm("dpo", actor, reference="base").prepare(batch())
    expected = make_algorithm("dpo", actor, reference=tiny_model(seed=0)).prepare(batch())
    key = ("next", "ref_log_probs", "full")
    torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    own = RetrieveLogProb(actor)(batch())["next", "log_probs", "full"]
    assert (own - found[key]).abs().max() > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_metric_is_constant_by_construction(name: str) -> None:
    """Over batches of several sizes, with a policy that has moved far since they were prepared."""
    assert set(READ) == set(ALGORITHMS)
    rows: list[dict[str, float]] = []
    for seed, size in enumerate((16, 32, 64, 48)):
        actor = TASK.policy()
        parts = made(name, actor, uniform(), loss_args={"log_entropy": True})
        batch = parts.prepare(data(size, seed, labels=name in FORWARDS_OF_THE_BATCH))
        batch["loss_mask"] = batch.get("loss_mask", torch.ones(size, dtype=torch.bool)).reshape(-1)
        batch["loss_mask"] &= torch.arange(size) % 8 > 1
        with torch.no_grad():
            actor.table.add_(2.5 * torch.randn(actor.table.shape, generator=torch.Generator().manual_seed(seed)))
        for loss in filter(None, (parts.loss, parts.critic_loss)):
            if loss is parts.critic_loss:
                with torch.no_grad():
                    loss.critic_network.values.table.add_(0.1 * seed)
            rows.append({key: float(value) for key, value in loss(batch).detach().items()})
    allowed = {
        # A bound that can be set in place: reading it on the device to leave this out would be a host sync.
        "cispo": {"clip_fraction_low"},
        # Its advantages are not negative, other advantages of this objective are.
        "pass_at_k": {"clip_fraction_low", "clip_fraction_dual"},
        # A KL below 0 counts as 0, which it is for these answers.
        "kto": {"reference_point"},
    }.get(name, set())
    constant = {key for key in {k for row in rows for k in row} if len({row[key] for row in rows if key in row}) == 1}
    assert constant == allowed


@pytest.mark.parametrize("name", ["clip_b", "clip_v", "optimal_token_baseline"])
def test_what_an_env_did_not_score_is_added(name: str) -> None:
    """A transform in the env wrote log-probs alone; the advantage reads entropies or moments too."""
    parts = made(name, TASK.policy(), None)
    expected = parts.prepare(data())["advantage"]
    batch = RetrieveLogProb(TASK.policy(), log_probs_full_key=("log_probs", "full"))(data())
    assert ("next", "log_probs", "full") in batch.keys(True)
    torch.testing.assert_close(parts.prepare(batch)["advantage"], expected)
