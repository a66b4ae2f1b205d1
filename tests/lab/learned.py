"""Results of the learning tests by algorithm, for the table of the documentation.

``pi*`` is ``pi_ref exp(r / beta)`` over whole answers, enumerated; TV the total variation to it, at most, over prompts.
"""

_REWARDS = "best answer > 0.9; pi* within TV 0.03 (KL in the reward), 0.035 (KL in the loss, independent tokens)"

_LINEAR = """
    grpo dr_grpo dapo rloo reinforce_plus_plus topr cispo gspo luspo sapo dro opmd asymre sppo rec opo
    fipo ctpo reinforce_plus_plus_baseline
"""

LEARNED: dict[str, str] = {
    **dict.fromkeys(_LINEAR.split(), _REWARDS),
    "ppo": "best answer > 0.9; pi* within TV 0.03 (KL in the reward), its soft values within 0.1",
    **dict.fromkeys(("clip_b", "clip_v"), "best answer > 0.9; pi* within TV 0.03 (KL in the reward)"),
    "optimal_token_baseline": "best answer > 0.9; pi* (KL in the reward) and optimum with a KL in the loss within TV 0.03",
    "ctpo_kl": "pi* within TV 0.04 (KL of whole answers in the loss); with the KL of tokens it is 0.15 away",
    "maxrl": "right answer > 0.9; gradient of the truncated log-probability, enumerated",
    "rae": "best answer > 0.9 of two roles whose rewards are 5 apart",
    "vapo": "best answer > 0.9; without advantages, the distribution of right answers within TV 0.03",
    "echo": "what others say, which the policy never samples, > 0.9; with weight 0 < 0.03",
    "a2po": "pi* within TV 0.01, also from answers of the reference",
    "tpo": "odds of the preferences within TV 0.01",
    "iw_opd": "teacher within TV 0.03; KL below a tenth",
    "pass_at_k": "best answer among 4 > 0.99; optimum of the best of two with a KL within TV 0.03",
    "gdpo": "best answer > 0.9 by a reward a thousandth of a noisy one; added up, it is not learned",
    "sft": "distribution of the data within TV 0.03",
    "raft": "best answer > 0.9",
    "dpo": "pi* of the reward of the preferences within TV 0.01 (with the forward KL, its optimum)",
    "simpo": "odds of the preferences within TV 0.01",
    "cpo": "odds of the preferences within TV 0.01",
    "orpo": "optimum of two answers within TV 0.01",
    "kto": "desirable answer > 0.9",
    "bco": "pi* of the odds of the labels within TV 0.01",
    "mix": "experts' answer, which the policy never samples, > 0.9; without them < 0.03",
    "mix_chord": "experts' answer, which the policy never samples, > 0.9; without them < 0.03",
    "multi_step_grpo": "best trajectory > 0.9; optimum with a KL within TV 0.04",
    "gigpo": "best trajectory > 0.9; optimum with a KL within TV 0.03",
    "on_policy_distill": "teacher within TV 0.03; KL below a tenth",
    "jsd": "teacher within TV 0.03; KL below a tenth",
    "gkd": "teacher within TV 0.03, from other answers too; KL below a tenth",
}
