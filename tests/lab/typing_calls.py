"""Calls for ``test_public_names.py``. mypy must report each marked line, and accept all other lines."""

from tensordict import TensorDictBase
from torch import nn

from torchrl_llm_kl import Advantage, PolicyLoss, Sampling, ScoreOptions, get_estimator, get_objective, make_algorithm
from torchrl_llm_kl.advantages import get_advantage
from torchrl_llm_kl.algorithms import Algorithm, get_algorithm
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, LossInputs, LossTerm
from torchrl_llm_kl.transforms import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb


def mine(inputs: LossInputs) -> tuple[LossTerm, ...]:
    return (LossTerm("objective", -inputs.log_prob, inputs.mask),)


def right(model: nn.Module, batch: TensorDictBase) -> TensorDictBase:
    make_algorithm("grpo", model, reference=model, group_size=8, objective_args={"clip_high": 0.28}, kl_loss="k2")
    make_algorithm("grpo", model, reference=model, advantage_args={"std": "batch"})
    make_algorithm("ppo", model, reference=model, critic=model, objective_args={"clip_low": 0.1})
    make_algorithm(Algorithm("mine", "cispo", {"clip_high": 0.3}, "rloo", kl_reward="k1"), model, reference=model)
    RetrieveKL(model, model, estimator="k3+", scope="full", options=ScoreOptions(Sampling(0.7)))(batch)
    RetrieveLogProb(model, detach=False, options=ScoreOptions(memory=0))
    make_algorithm("dr_grpo", model, group_size=8, max_len=512, options=ScoreOptions(Sampling(0.7), deterministic=True))
    PolicyLoss(model, "gpg", options=ScoreOptions(Sampling(0.7, top_k=50), entropy=True), tokens_per_batch=4096)
    KLRewardTransform(model, coef=0.1, reward_placement="broadcast")
    Advantage("grpo", group_size=4, std="batch")
    terms = [KLToReference(0.1, "k2"), EntropyBonus(0.1)]
    PolicyLoss(model, "ppo", clip_low=0.1, aggregation="token-mean", terms=terms)
    PolicyLoss(model, "an_objective_of_mine")
    make_algorithm(Algorithm("mine", "an_objective_of_mine"), model)
    make_algorithm("grpo", model, reference=model, objective=mine)
    get_objective("gspo")
    get_objective("an_objective_of_mine")
    get_advantage("gae")
    get_estimator("low_var_kl")
    get_algorithm("dapo")
    return PolicyLoss(model, "gpg")(batch)


def wrong(model: nn.Module) -> None:
    make_algorithm("grpoo", model, reference=model)  # reported
    make_algorithm("grpo", model, reference=model, group_sise=8)  # reported
    make_algorithm("grpo", model, reference=model, objective_args={"clip_hihg": 0.28})  # reported
    make_algorithm("grpo", model, reference=model, advantage_args={"sdt": "batch"})  # reported
    make_algorithm("grpo", model, reference=model, advantage_args={"std": "bacth"})  # reported
    make_algorithm("grpo", model, reference=model, clip_high=0.28)  # reported
    make_algorithm("grpo", model, reference=model, kl_loss="k9")  # reported
    make_algorithm("grpo", model, reference=model, masking_strategy="response")  # reported
    make_algorithm("grpo", model, reference=model, aggregation="mean")  # reported
    make_algorithm("grpo", model, reference=model, temperature=0.7)  # reported
    make_algorithm("grpo", model, reference=model, options=Sampling(0.7))  # reported
    PolicyLoss(model, "ppo", options=Sampling(0.7))  # reported
    RetrieveKL(model, model, estimatr="k1")  # reported
    RetrieveKL(model, model, estimator="k9")  # reported
    RetrieveKL(model, model, scope="turns")  # reported
    RetrieveLogProb(model, temprature=0.7)  # reported
    KLComputation(reward_placement="first")  # reported
    KLRewardTransform(model, coeff=0.1)  # reported
    Advantage("gropo")  # reported
    Advantage("grpo", group_sise=4)  # reported
    Advantage("grpo", layout="tokens")  # reported
    PolicyLoss(model, "ppo", aggregation="mean")  # reported
    KLToReference(0.1, "k9")  # reported
    Algorithm("mine", 3)  # reported
    Algorithm("mine", "ppo", advantage="gropo")  # reported
    Algorithm("mine", "ppo", schema="experiences")  # reported
    Algorithm("mine", "ppo", kl_loss="k9")  # reported
    PolicyLoss(model, "ppo", sampling=Sampling(0.7))  # reported
    PolicyLoss(model, "ppo", top_k_key="top_k")  # reported
    PolicyLoss(model, "ppo", clip_hihg=0.28)  # reported
    get_advantage("gropo")  # reported
    get_estimator("k9")  # reported
    get_algorithm("grpoo")  # reported
