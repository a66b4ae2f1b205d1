"""Advantages compared with Trinity-RFT 0.6.0, verl 0.9.1, TRL 1.16 (where their code follows its formulas) and torchrl.

The comparison runs where ``TORCHRL_LLM_KL_PEERS`` names a folder with their unpacked wheels.
"""

import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close
from torchrl.objectives.llm import MCAdvantage

from peers import folder, load
from torchrl_llm_kl.advantages import Advantage, get_advantage, jsd

FOLDER = "trinity.algorithm.advantage_fn"
GROUP = [4, 4, 9, 4, 9, 2, 2, 2, 2]
REWARD = torch.tensor([1.0, 0.5, 0.0, 3.0, 1.0, 0.25, -1.0, 0.75, 2.0])
CLOSE, ONE = {"rtol": 1e-5, "atol": 1e-6}, torch.ones(1)


@pytest.fixture
def trinity(monkeypatch: pytest.MonkeyPatch) -> Any:
    def group_by(items: list[Any], id_type: str) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for item in items:
            found.setdefault(item.eid.task if id_type == "task" else item.eid.rid, []).append(item)
        return found

    def get(name: str, class_name: str, **hyper: Any) -> Any:
        found = load(monkeypatch, "trinity", f"{FOLDER}.{name}", stubs=["verl", "trinity.common.experience"])
        if hasattr(found, "group_by"):
            monkeypatch.setattr(found, "group_by", group_by)
        return getattr(found, class_name)(**hyper)

    return get


TASK, RUN, STEP = [0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 0, 1, 1, 1, 2], [0, 1, 0, 0, 0, 0, 1, 2, 0]
IDS = {"group": torch.tensor(TASK), "run": torch.tensor(RUN), "step": torch.tensor(STEP)}


def experiences(task: list[int], run: list[int], step: list[int], reward: Tensor) -> list[Any]:
    return [
        SimpleNamespace(eid=SimpleNamespace(task=t, rid=(t, r), step=s), reward=x, action_mask=ONE, row=i, info=None)
        for i, (t, r, s, x) in enumerate(zip(task, run, step, reward.tolist(), strict=True))
    ]


def of_experiences(function: Any, items: list[Any]) -> Tensor:
    if hasattr(function, "process"):
        assert len(function.process(list(items))[0]) == len(items)
    else:
        for group in function.group_experiences(items).values():
            function.calculate_group_advantage("", group)
    out = torch.zeros(len(items))
    for item in items:
        out[item.row] = item.advantages.item()
    return out


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        *(("grpo", {"epsilon": 0.3}), ("grpo", {"epsilon": 0.3, "std": "batch"})),
        *(("opmd", {}), ("opmd", {"opmd_baseline": "logavgexp", "tau": 0.6}), ("asymre", {"baseline_shift": -0.3})),
        *(("rec", {}), ("rec", {"std_normalize": True, "epsilon": 0.4}), ("reinforce", {})),
        ("step_wise_grpo", {"epsilon": 0.3}),
        ("step_wise_grpo", {"epsilon": 0.3, "enable_step_norm": True}),
        ("step_wise_grpo", {"epsilon": 0.3, "std": "batch"}),
    ],
)
def test_advantages_of_outcomes_and_steps_equal_trinitys(trinity: Any, name: str, hyper: dict[str, Any]) -> None:
    steps, suffix = name == "step_wise_grpo", "GroupedAdvantage" if name in ("grpo", "rec") else "GroupAdvantage"
    class_name = "StepWiseGRPOAdvantageFn" if steps else name.upper() + suffix
    settings = {"std_cal_level" if key == "std" else key: value for key, value in hyper.items()}
    theirs = trinity(f"{'multi_step_grpo' if steps else name}_advantage", class_name, **settings)
    rows = list(range(len(GROUP)))
    want = of_experiences(theirs, experiences(*((TASK, RUN, STEP) if steps else (GROUP, rows, rows)), REWARD))
    inputs = IDS if steps else {} if name == "reinforce" else {"group": torch.tensor(GROUP)}
    assert_close(get_advantage(name)(reward=REWARD, **inputs, **hyper), want, **CLOSE)


@pytest.mark.parametrize("fnorm", ["none", "std"])
def test_gigpo_equals_trinitys(trinity: Any, fnorm: str) -> None:
    """Every task has its own runs and states, because Trinity compares equal states of different tasks."""
    hyper = {"omega": 0.4, "gamma": 0.7, "fnorm": fnorm, **({"epsilon": 0.2} if fnorm == "std" else {})}
    theirs = trinity("gigpo_advantage", "GiGPOAdvantageFn", **{"epsilon": 0.0, **hyper})
    state = [5, 6, 5, 6, 8, 8, 7, 8, 9]
    items = experiences(TASK, RUN, STEP, REWARD)
    for item, s in zip(items, state, strict=True):
        item.eid.rid = f"{item.eid.task}/{item.eid.rid[1]}"
        item.info = {"step_reward": item.reward, "env_state_hash": s}
    got = get_advantage("gigpo")(REWARD, **IDS, state=torch.tensor(state), **hyper)
    assert_close(got, of_experiences(theirs, items), **CLOSE)


def token_batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.tensor([6, 3, 5, 1]).unsqueeze(-1)
    names = ("token_level_rewards", "values", "old_log_probs", "teacher_logprobs")
    numbers = {name: torch.randn(4, 6, generator=rng) * mask for name in names}
    return {**numbers, "response_mask": mask, "reward_baselines": torch.randn(4, generator=rng)}


def of_batch(function: Any, batch: dict[str, Tensor], group: list[int] | None = None) -> dict[str, Tensor]:
    given = {key: x.float() if x.dtype == torch.bool else x.clone() for key, x in batch.items()}
    function(SimpleNamespace(batch=given, non_tensor_batch={"uid": group}))
    return given


@pytest.mark.parametrize(
    ("name", "class_name", "inputs", "hyper"),
    [
        ("ppo", "PPOAdvantageFn", "token_level_rewards values", {"gamma": 0.9, "lam": 0.7}),
        ("reinforce_plus_plus", "REINFORCEPLUSPLUSAdvantageFn", "token_level_rewards", {"gamma": 0.8}),
        ("on_policy_distill", "OnPolicyDistillAdvantage", "old_log_probs teacher_logprobs", {"kl_coef": 0.3}),
    ],
)
def test_token_advantages(trinity: Any, name: str, class_name: str, inputs: str, hyper: dict[str, float]) -> None:
    """The mask has no holes. The value after the last token is 0 in both."""
    batch = token_batch()
    mask = batch["response_mask"]
    theirs = of_batch(trinity(f"{name}_advantage", class_name, **hyper), batch)
    given = {**hyper, "whiten": True} if name == "ppo" else hyper
    found = get_advantage("gae" if name == "ppo" else name)(*(batch[key] for key in inputs.split()), mask, **given)
    ours, target = found if name == "ppo" else (found, None)
    assert_close(ours, theirs["advantages"] * mask, **CLOSE)
    assert target is None or torch.allclose(target, theirs["returns"] * mask, **CLOSE)


def test_remax_and_rloo_equal_trinitys(trinity: Any) -> None:
    batch, group = token_batch(), [1, 1, 0, 1]
    mask, outcome = batch["response_mask"], torch.tensor([1.0, -0.5, 2.0, 0.25])
    last = torch.tensor([5, 2, 4, 0])
    batch["token_level_rewards"] = torch.zeros(4, 6).index_put((torch.arange(4), last), outcome)
    theirs = of_batch(trinity("remax_advantage", "REMAXAdvantageFn"), batch)
    ours = get_advantage("remax")(outcome, batch["reward_baselines"])
    assert_close(ours.unsqueeze(-1) * mask, theirs["advantages"], **CLOSE)
    theirs = of_batch(trinity("rloo_advantage", "RLOOAdvantageFn"), batch, group)
    ours = get_advantage("rloo")(outcome, torch.tensor(group))
    several = torch.tensor([True, True, False, True])  # Trinity: a single row has its reward
    assert_close((ours.unsqueeze(-1) * mask)[several], theirs["advantages"][several], **CLOSE)


def test_trinitys_jsd_rewards_tokens_that_the_teacher_dislikes(trinity: Any) -> None:
    """It is never negative. A token becomes likelier if student and teacher differ, in either direction."""
    student, teacher = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True]])
    batch = {"old_log_probs": student, "teacher_logprobs": teacher, "response_mask": mask}
    theirs = of_batch(trinity("jsd_advantage", "JSDAdvantage", lambda_coef=0.3), batch)["advantages"]
    ours = jsd(student, teacher, mask, beta=0.3)
    assert (theirs > 0).all()
    assert (ours > 0).tolist() == [[True, False]]
    # With equal probabilities the policy gradient follows the difference: away from the teacher.
    assert theirs[0, 1] > theirs[0, 0]


@pytest.mark.parametrize("trajectory_return", ["sum", None])
def test_grpo_equals_torchrls_mc_advantage(trajectory_return: str | None) -> None:
    """Groups of three trajectories of one step each, with the trajectory's return and with the step's reward."""
    rng = torch.Generator().manual_seed(1)
    reward = torch.randn(6, 1, 1, generator=rng)
    query = torch.tensor([8, 3, 8, 8, 3, 3])
    after = TensorDict(reward=reward, done=torch.ones(6, 1, 1).bool(), batch_size=[6, 1])
    data = TensorDict(query=query[:, None], next=after, batch_size=[6, 1])
    theirs = MCAdvantage(grpo_size=3, trajectory_return=trajectory_return).inv(data.clone())
    ours = Advantage("grpo", epsilon=0.0)(data.clone())
    want = theirs["advantage"].reshape(6)[theirs["query"].flatten().argsort(stable=True)]
    got = ours["advantage"].reshape(6)[query.argsort(stable=True)]
    assert ours["advantage"].shape == reward.shape
    assert_close(got, want)
    one_trajectory_each = Advantage("step_wise_grpo", epsilon=0.0)(data.clone())
    assert_close(one_trajectory_each["advantage"], ours["advantage"])


# ------------------------------------------------------------------ verl
@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load(monkeypatch, "verl", "verl.trainer.ppo.core_algos", stubs=("omegaconf",))
    monkeypatch.setattr(module.verl_F, "get_device_name", lambda: "cpu", raising=False)
    return module


LENGTHS = torch.tensor([3, 1, 4, 2, 4, 2, 3, 1, 5])
RESPONSE = (torch.arange(5) < LENGTHS.unsqueeze(-1)).float()
ON_LAST = torch.zeros(9, 5, dtype=torch.float64).index_put((torch.arange(9), LENGTHS - 1), REWARD.double())
INDEX = np.array(GROUP)


def of_verl(function: Any, mask: Tensor = RESPONSE, **given: Any) -> Tensor:
    """The first result of a function of verl, in float64."""
    given = {"token_level_rewards": ON_LAST.clone(), "index": INDEX, **given}
    return function(response_mask=mask.double(), **given)[0]


def test_opo_and_reinforce_plus_plus_baseline_equal_verls(verl: Any) -> None:
    want = of_verl(verl.compute_opo_outcome_advantage)
    got = get_advantage("opo")(REWARD.double(), torch.tensor(GROUP), LENGTHS)
    assert_close(got.unsqueeze(-1) * RESPONSE, want)
    want = of_verl(verl.compute_reinforce_plus_plus_baseline_outcome_advantage)
    got = get_advantage("reinforce_plus_plus_baseline")(REWARD.double(), torch.tensor(GROUP), RESPONSE.bool())
    assert_close(got, want)


@pytest.mark.parametrize("std", [False, True])
def test_pass_at_k_equals_verls(verl: Any, std: bool) -> None:
    settings, own = {"norm_adv_by_std_in_grpo": std}, {"std_normalize": True, "epsilon": 0.3} if std else {}
    want = of_verl(verl.compute_grpo_passk_outcome_advantage, epsilon=0.3, config=settings)
    got = get_advantage("pass_at_k")(REWARD.double(), torch.tensor(GROUP), **own)
    assert_close(got.unsqueeze(-1) * RESPONSE, want)
    with pytest.raises(ValueError, match="at least 2 samples"):  # here 0
        of_verl(verl.compute_grpo_passk_outcome_advantage, index=np.arange(9), config=settings)


def test_gdpo_equals_verls_if_every_response_has_one_token(verl: Any) -> None:
    """verl whitens over tokens. The paper and this package whiten over sequences."""
    second = torch.tensor([0.5, 1.0, -2.0, 0.5, 3.0, 1.0, 0.0, 4.0, 2.0], dtype=torch.float64)
    one = torch.ones(9, 1)
    given = {
        "config": {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.7, 0.4]},
        "non_tensor_batch": {"a": REWARD.numpy(), "b": second.numpy()},
        "batch": {"prompts": torch.zeros(9, 2), "attention_mask": torch.ones(9, 3, dtype=torch.long)},
    }
    want = of_verl(verl.compute_gdpo_outcome_advantage, one, token_level_rewards=REWARD[:, None], epsilon=0.3, **given)
    rewards = torch.stack([REWARD.double(), second], 1)
    got = get_advantage("gdpo")(rewards, torch.tensor(GROUP), reward_weights=[0.7, 0.4], epsilon=0.3)
    # verl's epsilon is not in the deviation of the batch.
    plain = get_advantage("grpo")
    total = sum(w * plain(r, torch.tensor(GROUP), epsilon=0.3) for w, r in zip((0.7, 0.4), rewards.T, strict=True))
    assert_close(got * (total.std() + 0.3) / total.std(), want.squeeze(1), rtol=1e-5, atol=1e-6)


def test_gdpo_equals_trls() -> None:
    """Executes the lines of TRL's trainer on three answers to each of three prompts, with TRL's epsilon."""
    text = (folder("trl") / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    branch = text[text.index('elif self.multi_objective_aggregation == "normalize_then_sum":') :]
    lines = branch[branch.index("\n") + 1 : branch.index("is_std_zero")].rstrip()
    rewards = torch.stack([REWARD, REWARD.flip(0) * 10], 1).double()
    weights = torch.tensor([0.7, 0.4], dtype=torch.float64)
    scope = {
        "torch": torch,
        "nanstd": lambda x, dim=None, keepdim=False: x.std(dim=dim, keepdim=keepdim),
        "rewards_per_func": rewards,
        "num_generations": 3,
        "self": SimpleNamespace(reward_funcs=[0, 1], reward_weights=weights),
        "device": "cpu",
        "unscorable_mask": torch.zeros(9, dtype=torch.bool),
    }
    exec(textwrap.dedent(lines), scope)
    got = get_advantage("gdpo")(rewards, torch.arange(9) // 3, reward_weights=weights.tolist(), epsilon=1e-4)
    assert_close(got, scope["advantages"])


@pytest.mark.parametrize(("handle_zero_tail", "turns"), [(False, False), (True, False), (True, True)])
def test_optimal_token_baseline_equals_verls(verl: Any, handle_zero_tail: bool, turns: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    log_p = (2 * torch.randn(9, 5, 6, generator=rng, dtype=torch.float64)).log_softmax(-1)
    log_prob, collision = log_p[..., 0], log_p.exp().square().sum(-1)
    reward, mask = torch.randn(9, 5, generator=rng, dtype=torch.float64), RESPONSE.clone()
    if turns:  # holes, which only its variant for several turns skips
        mask[torch.arange(9), torch.tensor([0, 3, 1, 0, 2, 4, 1, 3, 2])] = 0
    tail, ours = {"handle_zero_tail": handle_zero_tail}, get_advantage("optimal_token_baseline")
    given = {"token_level_rewards": reward, "old_log_probs": log_prob, "sum_pi_squared": collision}
    name = f"compute_{'multi_turn_' * turns}optimal_token_baseline_advantage"
    want = of_verl(getattr(verl, name), mask, **given, **tail)
    got = ours(reward, torch.tensor(GROUP), log_prob, collision, mask.bool(), **tail)
    some = mask.any(-1)
    assert_close(got[some], want[some], rtol=1e-6, atol=1e-6)


CLIPPED = [("clipb", {"mu": mu}) for mu in (0.7, 0.3)]
CLIPPED += [("clipv", {"mu": mu, "max_frac": share}) for mu, share in ((0.8, 1.0), (0.2, 0.1), (0.2, 0.01))]


@pytest.mark.parametrize(("name", "hyper"), CLIPPED)
def test_clip_b_and_clip_v_equal_trinitys(trinity: Any, name: str, hyper: dict[str, float]) -> None:
    """Trinity removes the tokens from the mask. Here their advantage is 0."""
    hyper, rng = {**hyper, "epsilon": 0.3}, torch.Generator().manual_seed(5)
    log_p = (2 * torch.randn(9, 5, 6, generator=rng)).log_softmax(-1)
    sampled = log_p[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    nec = (log_p.exp().square() * (entropy.unsqueeze(-1) + log_p)).sum(-1)
    batch = {"token_level_rewards": ON_LAST.float(), "response_mask": RESPONSE, "rollout_log_probs": sampled}
    batch |= {"old_log_probs": sampled, "entropys": entropy, "necs": nec}
    theirs = of_batch(trinity(f"{name}_advantage", f"Clip{name[-1].upper()}AdvantageFn", **hyper), batch, GROUP)
    more = {"discriminator": nec} if name == "clipv" else {}
    given = {"old_log_prob": sampled, "entropy": entropy, "mask": RESPONSE.bool(), **more}
    got = get_advantage(name.replace("clip", "clip_"))(REWARD, torch.tensor(GROUP), **given, **hyper)
    assert_close(got, theirs["advantages"] * theirs["response_mask"], **CLOSE)
    plain = get_advantage("grpo")(REWARD, torch.tensor(GROUP), epsilon=0.3).unsqueeze(-1) * RESPONSE
    assert 0 < int((got != plain).sum()) < int((plain < 0).sum())
