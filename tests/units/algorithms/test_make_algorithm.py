"""``make_algorithm``: accepted settings under all their names, and refused ones."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from test_prepare import READ
from torch import nn

from refused import refused
from torchrl_llm_kl import LogProbScorer, Sampling, ScoreOptions
from torchrl_llm_kl.algorithms import ALGORITHMS, Algorithm, AlgorithmParts, UnknownAlgorithmError, make_algorithm
from torchrl_llm_kl.estimators import PIKLCoefficient
from torchrl_llm_kl.losses import ImportanceWeights, KLPlacementWarning, LossInputs, LossTerm, RejectionMask
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue, SamplerLogProbs
from toy_tasks import TabularCritic, chain
from toy_training import made as made_by_lab

TASK = chain()


def made(name: str | Algorithm = "grpo", **settings: Any) -> AlgorithmParts:
    return make_algorithm(name, TASK.policy(), **{"reference": TASK.policy(), **settings})


def numbers(parts: AlgorithmParts, *names: str) -> list[float]:
    """Attributes of the loss, as numbers."""
    return [round(float(getattr(parts.loss, name)), 6) for name in names]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_parts_are_those_of_the_preset(name: str) -> None:
    preset = ALGORITHMS[name]
    needs_reference = preset.use_reference or preset.schema == "distill"
    assert preset.needs_reference == needs_reference
    given: dict[str, Any] = {"reference": TASK.policy()} if needs_reference else {}
    given |= {"critic": TabularCritic(TASK)} if preset.use_critic else {}
    given |= {"max_len": 2} if name == "dr_grpo" else {}
    parts = make_algorithm(name, TASK.policy(), **given)
    assert parts.algorithm == replace(preset, max_len=given.get("max_len"))
    assert parts.schema.name == preset.schema
    assert parts.loss.objective.function.__name__ == preset.objective
    assert [term.function.__name__ for term in parts.loss.terms] == (["kl_to_ref"] if preset.kl_loss != "none" else [])
    assert (parts.critic_loss is not None) == preset.use_critic
    assert isinstance(parts.value_transform, RetrieveValue) == preset.use_critic
    assert (parts.advantage is None) == (preset.advantage is None)
    assert parts.advantage is None or parts.advantage.spec.name == preset.advantage
    assert (parts.selection is not None) == (name == "raft")
    scoring = {(True, True): RetrieveKL, (False, False): type(None)}.get(READ[name], RetrieveLogProb)
    assert type(parts.kl_transform) is scoring
    order = [parts.kl_transform, parts.value_transform, parts.advantage, parts.selection]
    assert parts.transforms == [part for part in order if part is not None]


def test_fields_and_hyper_parameters_find_their_place() -> None:
    args: dict[str, Any] = {"advantage_args": {"epsilon": 0.01, "std": "batch"}}
    args["objective_args"] = {"mu": 0.3, "clip_high": 0.4}
    parts = made("mix", **args, kl_loss_coeff=0.2, entropy_coeff=0.05)
    assert numbers(parts, "mu", "clip_low", "clip_high") == [0.3, 0.2, 0.4]
    assert numbers(parts, "kl_to_ref_coeff", "entropy_coeff") == [0.2, 0.05]
    assert parts.advantage.hyper == {"std": "batch", "epsilon": 0.01}
    assert parts.algorithm.objective_args == {"mu": 0.3, "clip_high": 0.4}
    assert ALGORITHMS["mix"].objective_args == {}
    changes: dict[str, Any] = {"objective": "cispo", "aggregation": "seq-mean-token-sum"}
    changes |= {"kl_loss": "exact", "kl_loss_coeff": 0.2, "kl_reward": "k1", "kl_reward_coeff": 0.3}
    changes |= {"entropy_coeff": 0.4, "leave_out_experts": True, "advantage": "grpo"}
    clip, args = {"clip_high": 0.1, "clip_low": 0.9}, {"std": "batch", "epsilon": 1e-3}
    parts = made(**changes, objective_args=clip, advantage_args=args)
    assert changes.items() <= vars(parts.algorithm).items()
    assert parts.loss.aggregation == "seq-mean-token-sum"
    assert numbers(parts, "clip_low", "clip_high") == [0.9, 0.1]
    assert parts.advantage.hyper == {"std": "batch", "epsilon": 1e-3}
    # Another objective or advantage leaves the old one's settings.
    parts = made("ppo", advantage="rloo", use_critic=False)
    assert parts.algorithm.advantage_args == {}
    assert ALGORITHMS["ppo"].advantage_args == {"whiten": True}
    parts = made("grpo", objective="gspo", advantage="dr_grpo", objective_args={"clip_low": 0.1})
    assert parts.loss.objective.function.__name__ == "gspo"
    assert parts.loss.aggregation == "seq-mean-token-mean"
    assert numbers(parts, "clip_low") == [0.1]


def test_a_reference_and_a_critic_are_needed_where_something_reads_them() -> None:
    without = made("grpo", reference=None, kl_loss="none")
    assert not without.algorithm.use_reference
    assert isinstance(without.kl_transform, RetrieveLogProb)
    logged = made("dapo", use_reference=True)  # the KL is logged only
    assert isinstance(logged.kl_transform, RetrieveKL)
    assert len(logged.loss.terms) == 0
    assert made("grpo", advantage="gae", critic=TabularCritic(TASK)).critic_loss is not None
    assert made("ppo", advantage="rloo").critic_loss is None
    # A user's own preset.
    kl: dict[str, Any] = {"use_reference": True, "kl_reward": "k1", "kl_reward_coeff": 0.3}
    mine = Algorithm("mine", "cispo", {"clip_high": 0.5}, "rloo", **kl)
    parts = made(mine, group_size=2, objective_args={"clip_high": 0.6})
    assert numbers(parts, "clip_high") == [0.6]
    assert parts.algorithm.name == "mine"


def test_an_objective_may_be_a_function_that_is_not_registered() -> None:
    def capped(inputs: LossInputs, *, cap: float = 2.0) -> tuple[LossTerm, ...]:
        value = -inputs.advantage * inputs.log_ratio.detach().exp().clamp(max=cap) * inputs.log_prob
        return (LossTerm("objective", value, inputs.mask),)

    args: Any = {"cap": 3.0}
    for parts in (
        made("grpo", objective=capped, objective_args=args, group_key="query"),
        made(Algorithm("mine", capped, args, "grpo", kl_loss="k2"), group_key="query"),
    ):
        assert parts.algorithm.spec.needs == {"advantage", "old_log_prob"}
        assert numbers(parts, "cap") == [3.0]
        td = parts.prepare(TASK.sample(TASK.policy(), 16, torch.Generator().manual_seed(0), 2))
        assert parts.loss(td).total_loss.isfinite()
    with pytest.raises(ValueError, match="top_k=4 has no effect on objective='capped'"):
        made("grpo", objective=capped, top_k=4)


def test_arguments_for_the_loss_and_the_masks() -> None:
    own = {"tokens_per_batch": 64, "corrections": [RejectionMask("seq_max_k3", high=0.2)]}
    args = {"options": ScoreOptions(entropy=True), "loss_args": own}
    parts = made("dr_grpo", reference=None, max_len=7, **args)
    assert "divergence='seq_max_k3'" in repr(parts.loss.corrections)
    assert parts.loss.max_len == 7
    assert parts.loss.options.entropy
    assert parts.loss.scorer.tokens_per_batch == 64
    parts = made("ppo", critic=TabularCritic(TASK), masking_strategy="rlhf", options=ScoreOptions(Sampling(0.5)))
    assert parts.loss.masking_strategy == parts.critic_loss.masking_strategy == "rlhf"
    assert parts.loss.scorer.options.temperature == 0.5
    # An exact KL is given the reference and does not train it.
    reference = TASK.policy()
    parts = made(reference=reference, kl_loss="exact")
    assert parts.loss.reference is reference
    assert not any(p is reference.table for p in parts.loss.parameters())
    assert made(kl_loss="k2").loss.reference is None


def test_the_kl_of_whole_sequences_reaches_the_loss_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLPlacementWarning)
        parts = {name: made(kl_loss=name, kl_level="sequence", kl_loss_coeff=0.3) for name in ("exact", "k1", "k3")}
    for name, each in parts.items():
        (term,) = each.loss.terms
        assert (term.settings["level"], term.settings["estimator"]) == ("sequence", name)
        assert round(float(term.coeff), 6) == 0.3
        assert ("next", "log_probs", "full") in each.loss.in_keys
    with pytest.raises(ValueError, match="level='sequence' takes estimator='exact', 'k1' or 'k3', got 'k2'"):
        made(kl_loss="k2", kl_level="sequence")


def test_old_log_probs_have_the_temperature_of_an_actor_that_is_a_scorer() -> None:
    actor = LogProbScorer(TASK.policy(), temperature=0.5)
    parts = make_algorithm("rloo", actor, reference=TASK.policy(), group_key="query")
    out = parts.loss(parts.prepare(TASK.sample(actor.model, 32, torch.Generator().manual_seed(0), 2)))
    torch.testing.assert_close(out["ratio_min"], torch.tensor(1.0))
    torch.testing.assert_close(out["ratio_max"], torch.tensor(1.0))
    torch.testing.assert_close(out["kl_to_ref"], torch.tensor(0.0), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"actor is a scorer with its own settings: set options and"):
        make_algorithm("rloo", actor, reference=TASK.policy(), options=ScoreOptions(Sampling(0.7)))
    # An advantage may have keys beside the mask's.
    args = {"keys": {"reward": "score"}, "lam": 0.5}
    parts = made("ppo", critic=TabularCritic(TASK), masking_strategy="rlhf", advantage_args=args)
    assert parts.advantage.hyper == {"lam": 0.5, "whiten": True}
    assert parts.advantage.keys["mask"] == ("masks", "all_assistant_mask")
    assert parts.advantage.keys["reward"] == "score"


def test_a_top_k_replaces_the_advantage() -> None:
    jsd, distill = ("jsd", {"advantage_args": {}}, 0.5), "on_policy_distill"
    given = (distill, {"objective_args": {"beta": 0.7}}, 0.7)
    for name, settings, beta in (("gkd", {}, 0.5), jsd, (distill, {}, 1.0), given):
        parts, without = made(name, top_k=2, **settings), made(name, top_k=0)
        assert (parts.algorithm.objective, parts.loss.distribution, parts.advantage) == ("distill", "top_k", None)
        assert numbers(parts, "beta") == [beta]
        assert without.algorithm.objective == ("distill" if name == "gkd" else "ppo")
        assert name != "gkd" or without.loss.distribution == "exact"
    # The teacher's top k may be in the data.
    parts, given = made("gkd", top_k=2), made("gkd", reference="data", top_k=2)
    data = parts.prepare(TASK.sample(TASK.policy(), 16, torch.Generator().manual_seed(0)))
    assert given.kl_transform is None
    torch.testing.assert_close(given.loss(given.prepare(data)).total_loss, parts.loss(data).total_loss)


def token_log_probs(model: nn.Module, td: TensorDictBase) -> torch.Tensor:
    """Log-probs of the response tokens from one plain forward; float64 ``[B, T - 1]``, 0 at padding."""
    full = td["tokens", "full"]
    each = model(full)[0][:, :-1].double().log_softmax(-1).gather(-1, full[:, 1:, None]).squeeze(-1)
    return each.masked_fill(~td["masks", "all_attention_mask"][:, 1:], 0)


@pytest.mark.parametrize("coeff", [0.5, PIKLCoefficient(init=0.5, target=0.1)], ids=["number", "module"])
def test_a_weight_subtracts_the_kl_from_the_reward(coeff: Any) -> None:
    actor, uniform = TASK.policy(), TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))
    parts = make_algorithm("grpo", actor, reference=uniform, group_key="query", kl_reward_coeff=coeff)
    assert (parts.algorithm.kl_loss, parts.algorithm.kl_reward) == ("k2", "k1")
    assert "kl_reward='k1', kl_reward_coeff=" in repr(parts)
    td = TASK.sample(actor, 32, torch.Generator().manual_seed(0), 2)
    outcome = td["next", "reward"].sum(-1)
    kl = (token_log_probs(actor, td) - token_log_probs(uniform, td)).sum(-1)
    charged = parts.prepare(td)["next", "reward"].sum((1, 2))
    torch.testing.assert_close(charged.double(), outcome.double() - 0.5 * kl, atol=1e-5, rtol=1e-5)
    assert made("opo", kl_reward_coeff=0.5, group_size=2).algorithm.kl_loss == "none"
    # The estimator is the preset's, or the given one.
    assert made("grpo", kl_loss_coeff=0.5).algorithm.kl_loss == "k2"
    assert made("grpo", kl_reward_coeff=0.5, kl_reward="k3").algorithm.kl_reward == "k3"
    mine = Algorithm("mine", "ppo", advantage="rloo", kl_loss="k3+", kl_loss_coeff=0.2)
    assert made(mine, kl_loss_coeff=0.5).algorithm.kl_loss == "k3+"
    # The coefficient is the default again, without effect.
    assert made(mine, kl_loss="none", kl_reward="k1").algorithm.kl_loss_coeff == 1e-3


def test_a_weight_adds_the_kl_to_the_loss_and_needs_a_reference() -> None:
    actor, uniform = TASK.policy(), TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))
    with pytest.raises(ValueError, match="dapo: it compares with a reference model: pass reference="):
        make_algorithm("dapo", actor, kl_loss_coeff=0.5)
    parts = make_algorithm("dapo", actor, reference=uniform, group_key="query", kl_loss_coeff=0.5)
    assert "kl_loss='k2', kl_loss_coeff=0.5" in repr(parts)
    td = TASK.sample(actor, 32, torch.Generator().manual_seed(0), 2)
    difference = token_log_probs(actor, td) - token_log_probs(uniform, td)
    expected = 0.5 * (difference.square() / 2).sum() / td["masks", "all_attention_mask"][:, 1:].sum()
    found = parts.loss(parts.prepare(td))["loss_kl_to_ref"]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_weight_of_0_adds_no_kl() -> None:
    """A sweep over weights may begin at 0, and 0 is accepted together with "none"."""
    actor = TASK.policy()
    for given in ({"kl_loss_coeff": 0.0}, {"kl_loss": "none", "kl_loss_coeff": 0.0}, {"kl_reward_coeff": 0}):
        found = make_algorithm("dapo", actor, **given).algorithm
        assert (found.kl_loss, found.kl_reward) == ("none", "none")
    with pytest.raises(ValueError, match=r"kl_loss_coeff=0.5 has no effect with kl_loss='none'"):
        make_algorithm("dapo", actor, kl_loss="none", kl_loss_coeff=0.5)


NO_REFERENCE: dict[str, Any] = {"reference": None}
CORRECTED: Any = {"corrections": [ImportanceWeights()]}
test_settings_without_effect = refused(
    lambda name, settings: made(name, **settings),
    ("dpo", {"kl_reward_coeff": 0.1}, "kl_reward='k1' has no effect: nothing reads the reward"),
    ("sft", {"advantage_args": {"gamma": 0.5}}, "advantage_args has no effect without an advantage"),
    ("dpo", {"advantage": "grpo"}, "advantage='grpo' has no effect: dpo reads none"),
    ("dapo", {**NO_REFERENCE, "leave_out_experts": True}, "leave_out_experts has no effect without a KL in the loss"),
    ("gkd", {"use_reference": True}, "use_reference=True has no effect: the teacher is scored anyway"),
    ("grpo", {"repeat_times": 8}, "repeat_times has no effect in make_algorithm"),
    ("sft", {**NO_REFERENCE, "gen_model": TASK.policy()}, "gen_model has no effect: sft scores no log-probs"),
    ("pass_at_k", {"advantage_args": {"epsilon": 0.5}}, "pass_at_k: epsilon=0.5 has no effect with"),
    ("topr", {"group_size": 2}, "it compares no answers: leave out group_key and group_size"),
    ("grpo", {"kl_loss": "none"}, "it uses no reference: leave it out"),
    ("grpo", {"critic": TabularCritic(TASK)}, "it has no critic: leave critic= out"),
    ("grpo", {"top_k": 4}, "top_k=4 has no effect on objective='ppo'"),
    (Algorithm("mine", "gpg"), {"kl_loss_coeff": torch.tensor(1e-3), "kl_loss": "none"}, "has no effect with kl_loss="),
)


def test_an_advantage_may_go_to_an_entry_that_the_loss_reads_later() -> None:
    parts = made("opo", reference=None, group_key="query", advantage_args={"keys": {"advantage": "other"}})
    parts.loss.set_keys(advantage="other")
    td = parts.prepare(TASK.sample(TASK.policy(), 16, torch.Generator().manual_seed(0), 2))
    assert parts.loss(td).total_loss.isfinite()


def test_a_correction_brings_the_log_probs_that_the_sampler_stored() -> None:
    """``kl_transform`` moves them before it writes the trainer's log-probs; the weights are the ratio of the two, by hand."""
    sampler, actor = TASK.policy(), TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))
    td = TASK.sample(sampler, 32, torch.Generator().manual_seed(0), 2)
    stored = torch.nn.functional.pad(token_log_probs(sampler, td), (1, 0)).float().detach()
    td["log_probs"] = TensorDict(full=stored, batch_size=[32])
    correction = ImportanceWeights(high=None)
    parts = make_algorithm("dapo", actor, group_key="query", loss_args={"corrections": [correction]})
    assert any(isinstance(extra, SamplerLogProbs) for extra in parts.kl_transform.extras)
    out = parts.loss(parts.prepare(td.clone()))
    real = td["masks", "all_attention_mask"][:, 1:]
    ratio = (token_log_probs(actor, td) - token_log_probs(sampler, td)).exp()[real]
    torch.testing.assert_close(out["weight_mean"].double(), ratio.mean(), atol=1e-5, rtol=1e-5)
    # With a reference, and where an env has applied the transform.
    parts = make_algorithm("grpo", actor, reference=sampler, group_key="query", loss_args=CORRECTED)
    scored = parts.kl_transform(td.clone())
    assert {("next", name, "full") for name in ("sampler_log_probs", "ref_log_probs")} <= set(scored.keys(True, True))
    out = parts.loss(parts.prepare(scored))
    torch.testing.assert_close(out["weight_mean"].double(), ratio.mean(), atol=1e-5, rtol=1e-5)
    assert not any(isinstance(extra, SamplerLogProbs) for extra in made("grpo").kl_transform.extras)
    # The trainer's own log-probs are not taken for the sampler's.
    bare = RetrieveLogProb(actor, log_probs_full_key=("log_probs", "full"))(td.exclude("log_probs"))
    for each in (parts, make_algorithm("dapo", actor, group_key="query", loss_args=CORRECTED)):
        with pytest.raises(KeyError, match=r"the sampler's log-probs: expected them .*return_log_probs=True"):
            each.prepare(bare.clone())


test_impossible_settings = refused(
    lambda name, settings: made(name, **settings),
    ("grpo", NO_REFERENCE, r"compares with a reference model: pass reference=, or 'data'"),
    ("jsd", NO_REFERENCE, r"compares with a teacher: pass reference=, or 'data'"),
    ("gkd", {"reference": "data"}, r"compares whole distributions: pass the teacher as reference=, or top_k="),
    ("gkd", {"objective_args": {"distribution": "top_k"}}, r"distribution='top_k' contradicts top_k=0"),
    ("gkd", {"top_k": 4, "loss_args": CORRECTED}, r"top_k= cannot be scored beside old log-probs"),
    ("grpo", {"reference": "actor"}, r"reference must be a model or 'base' or 'data', got 'actor'"),
    ("grpo", {"reference": "data", "kl_reward": "k1"}, r"kl_reward= needs a reference model to score"),
    ("ppo", {}, r"it trains a critic: pass critic=TokenCritic\(model\)"),
    ("grpo", {"use_reference": False}, r"use_reference=False contradicts its KL or objective"),
    ("grpo", {"aggregation": "token_mean"}, r"aggregation must be .*, got 'token_mean'\. Did you mean 'token-mean'\?"),
    ("grpo", {"schema": "experiences"}, r"schema must be one of 'sft', 'dpo', 'unpaired', .*got 'experiences'"),
    ("grop", {}, UnknownAlgorithmError, r"unknown algorithm 'grop'\. Did you mean 'grpo'\? Known: ppo, grpo, "),
    ("gdpo", {"kl_reward": "k1"}, r"kl_reward='k1' needs one reward, gdpo reads several"),
)


test_unknown_settings = refused(
    lambda settings: made(**settings),
    ({"clip_hihg": 0.1}, r"^grpo has no setting 'clip_hihg'\. Did you mean 'clip_high'\? Known: objective, .*std"),
    ({"clip_high": 0.3}, r"^clip_high is not a field of the preset: pass objective_args=\{'clip_high': \.\.\.\}\.$"),
    ({"objective": "opmd", "advantage": "opmd", "tau": 2}, r"pass objective_args=.* or advantage_args="),
    ({"policy_loss_fn": "ppo"}, r"has no .*'policy_loss_fn'\. Trinity-RFT's 'policy_loss_fn' is 'objective'"),
    error=TypeError,
)


def test_each_part_has_its_own_settings_and_they_are_merged_into_the_presets() -> None:
    softly: Any = {"opmd_baseline": "logavgexp", "tau": 2.0}
    parts = made("opmd", objective_args={"tau": 0.5}, advantage_args=softly)
    assert numbers(parts, "tau") == [0.5]
    assert parts.advantage.hyper["tau"] == 2.0
    parts = made("ppo", critic=TabularCritic(TASK), advantage_args={"lam": 0.9})
    assert parts.advantage.hyper == {"whiten": True, "lam": 0.9}  # the preset's and the override's
    mine = Algorithm("mine", "ppo", {"clip_low": 0.1, "clip_high": 0.3}, "grpo")
    assert numbers(made(mine, reference=None, objective_args={"clip_high": 0.4}), "clip_low", "clip_high") == [0.1, 0.4]
    changed = made(mine, reference=None, objective="cispo", objective_args={"clip_high": 0.4})
    assert changed.algorithm.objective_args == {"clip_high": 0.4}  # another objective does not keep them


def test_estimators_out_of_place_warn_when_the_algorithm_is_made() -> None:
    for settings, message in (
        ({"kl_loss": "k1"}, "'k1' in the loss: its mean gradient is zero"),
        ({"kl_loss": "k3"}, "'k3' in the loss: its mean gradient belongs to the forward KL"),
        ({"kl_loss": "none", "kl_reward": "k2"}, "'k2' in the reward: detached"),
    ):
        with pytest.warns(KLPlacementWarning, match=message) as caught:
            make_algorithm("grpo", TASK.policy(), reference=TASK.policy(), **settings)
        places = [Path(w.filename).name for w in caught if issubclass(w.category, KLPlacementWarning)]
        assert places == [Path(__file__).name]  # the warning points at the caller
    with warnings.catch_warnings():  # estimators in their place do not warn
        warnings.simplefilter("error", KLPlacementWarning)
        for name in ALGORITHMS:
            made_by_lab(name, TASK.policy(), TASK.policy())
        made(kl_loss="none", kl_reward="k1")
        made(kl_loss="exact")
