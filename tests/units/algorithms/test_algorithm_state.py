"""What an algorithm saves: a run that is saved, rebuilt and continued equals one that never stopped, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from torchrl_llm_kl import AdaptiveEntropyCoefficient, FixedKLCoefficient, ScheduledCoefficient, estimators
from torchrl_llm_kl.algorithms import AlgorithmParts, make_algorithm
from torchrl_llm_kl.scoring import ReferenceUpdater
from toy_tasks import TabularCritic, chain, mixed, unlikely

TASK = chain()


def ziegler() -> estimators.AdaptiveKLCoefficient:
    return estimators.AdaptiveKLCoefficient(0.3, target=0.05, horizon=200)


def in_reward(coefficient: nn.Module) -> dict[str, Any]:
    return {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": coefficient}


class Run:
    """A training run with all that it must save. ``name``: one of :data:`KINDS`."""

    def __init__(self, name: str) -> None:
        self.name = name
        algorithm, make_settings = KINDS[name]
        start = unlikely(TASK) if algorithm == "mix_chord" else TASK.policy()
        self.actor, self.reference = start, TASK.policy()
        self.critic = TabularCritic(TASK) if algorithm == "ppo" else None
        settings = make_settings() | ({} if algorithm == "ppo" else {"group_key": "query"})
        self.parts = make_algorithm(algorithm, self.actor, critic=self.critic, reference=self.reference, **settings)
        self.coefficient = settings.get("kl_reward_coeff", settings.get("kl_loss_coeff"))
        self.entropy = settings.get("entropy_coeff")
        moves = name == "moving reference"
        self.updater = ReferenceUpdater(self.reference, self.actor, decay=0.7) if moves else None
        trained = [p for loss in self.parts.losses for p in loss.parameters()]
        self.optimiser = torch.optim.Adam(trained, lr=0.1)
        self.rng = torch.Generator().manual_seed(5)
        self.seen: list[dict[str, Tensor]] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            experts = self.name == "schedule"
            data = mixed(TASK, self.actor, self.rng) if experts else TASK.sample(self.actor, 64, self.rng, 8)
            batch = self.parts.prepare(data)
            metrics = {}
            for part in self.parts.minibatches(batch, 2, generator=self.rng):
                self.optimiser.zero_grad()
                for loss in self.parts.losses:
                    out = loss(part)
                    out.total_loss.backward()
                    metrics |= {str(key): value.detach() for key, value in out.items()}
                self.optimiser.step()
            if self.name == "schedule":
                self.parts.loss.mu.update()
            if self.coefficient is not None:
                kl = metrics["kl_to_ref"] if "in the loss" in self.name else batch["next", "kl_penalty"]
                self.coefficient.update(kl.sum(-1).mean() if kl.ndim else kl, n=64)
            if self.entropy is not None:
                self.entropy.update(metrics["entropy"])
            if self.updater is not None:
                self.updater.step()
            self.seen.append(metrics)

    @property
    def saved(self) -> dict[str, Any]:
        """The objects that have a state, by name."""
        models = {"actor": self.actor, "reference": self.reference, "critic": self.critic}
        found = {"models": nn.ModuleDict({name: each for name, each in models.items() if each is not None})}
        found |= {"optimiser": self.optimiser, "parts": self.parts}
        return found if self.updater is None else {**found, "updater": self.updater}

    def state(self) -> dict[str, Any]:
        return {"rng": self.rng.get_state(), **{name: each.state_dict() for name, each in self.saved.items()}}

    def load(self, state: dict[str, Any]) -> None:
        self.rng.set_state(state["rng"])
        for name, each in self.saved.items():
            each.load_state_dict(state[name])


def in_loss(coefficient: nn.Module, **more: Any) -> dict[str, Any]:
    return {"kl_loss": "k2", "kl_loss_coeff": coefficient, **more}


KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "KL in the loss": ("grpo", lambda: in_loss(ziegler(), entropy_coeff=AdaptiveEntropyCoefficient(target=3.0))),
    "PI control in the reward": ("grpo", lambda: in_reward(estimators.PIKLCoefficient(0.3, target=0.05, warmup=2))),
    "dual ascent in the loss": ("grpo", lambda: in_loss(estimators.DualKLCoefficient(0.3, target=0.05, warmup=2))),
    "schedule": ("mix_chord", lambda: {"objective_args": {"mu": ScheduledCoefficient(0.6, warmup=2, decay=4)}}),
    "critic": ("ppo", lambda: in_reward(ziegler())),
    "moving reference": ("grpo", lambda: in_reward(ziegler())),
}


def through_a_file(run: Run, again: Run, folder: Path) -> None:
    torch.save(run.state(), folder)
    again.load(torch.load(folder, weights_only=True))


def through_distributed_checkpoint(run: Run, again: Run, folder: Path) -> None:
    """The checkpoint saves and loads the states of objects with ``state_dict`` and ``load_state_dict``."""
    dcp.save({"rng": run.rng.get_state(), **run.saved}, checkpoint_id=folder, no_dist=True)
    # A new optimiser has no state to load into before its first step; torch's dcp.state_dict.get_optimizer_state_dict fills it.
    for group in again.optimiser.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    again.optimiser.step()
    again.optimiser.zero_grad()
    state = {"rng": again.rng.get_state(), **again.saved}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    again.rng.set_state(state["rng"])


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key], key


@pytest.mark.parametrize("save", [through_a_file, through_distributed_checkpoint], ids=["torch.save", "dcp"])
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, save: Callable[..., None], tmp_path: Path) -> None:
    """And when any one part of its state is not loaded, the run ends differently."""
    whole, first, resumed, forgetful = (Run(name) for _ in range(4))
    whole.train(5)
    first.train(3)
    save(first, resumed, tmp_path / "saved")
    state, fresh = first.state(), forgetful.state()
    state |= {key: fresh[key] for key in ("parts", "updater") if key in fresh}
    state["models"] |= {key: value for key, value in fresh["models"].items() if key.startswith("reference")}
    forgetful.load(state)
    first.train(1)  # must not change what was saved
    resumed.train(2)
    forgetful.train(2)
    models = whole.saved["models"].state_dict()
    assert_equal(models, resumed.saved["models"].state_dict())
    assert_equal(whole.parts.state_dict(), resumed.parts.state_dict())
    for metrics, others in zip(whole.seen[3:], resumed.seen, strict=True):
        assert_equal(metrics, others)
    assert any(not torch.equal(value, forgetful.state()["models"][key]) for key, value in models.items())


def test_the_state_by_hand() -> None:
    """It holds numbers only, no weights."""
    coefficient = ziegler()
    settings = {"reference": TASK.policy(), "critic": TabularCritic(TASK), **in_reward(coefficient)}
    parts = make_algorithm("ppo", TASK.policy(), **settings)
    parts.loss.clip_high = 0.28
    parts.critic_loss.clip_value = 0.5  # type: ignore[union-attr]
    coefficient.update(1.0, n=50)  # 0.3 * (1 + 0.2 * 50 / 200)
    state = parts.state_dict()
    assert state.pop("algorithm") == "ppo"
    assert all(value.numel() == 1 for value in state.values())
    found = {key: round(float(value), 6) for key, value in state.items()}
    want = {"loss.objective.clip_high": 0.28, "critic_loss.error.clip_value": 0.5}
    assert want.items() <= found.items()
    (kl,) = [key for key in state if "coeff.value" in key]
    assert kl == "kl_transform.transforms.2.coeff.value"
    assert found[kl] == pytest.approx(0.315)
    coefficient.update(1.0, n=50)
    parts.loss.clip_high = 0.3
    assert float(state[kl]) == pytest.approx(0.315), "a copy"
    assert float(state["loss.objective.clip_high"]) == pytest.approx(0.28)


def grpo(**settings: Any) -> AlgorithmParts:
    return make_algorithm("grpo", TASK.policy(), **{"reference": TASK.policy(), "group_size": 2, **settings})


def test_functional_actors_and_shared_coefficients() -> None:
    """A coefficient that is used in two places is still one object after loading."""
    shared = FixedKLCoefficient(0.25)
    both = {**in_reward(shared), "kl_loss": "k2", "kl_loss_coeff": shared}
    parts = grpo(loss_args={"functional": True}, **both)
    state = parts.state_dict()
    assert all(value.numel() == 1 for key, value in state.items() if key != "algorithm")
    assert sum("coeff.value" in key for key in state) == 2
    shared.value.fill_(0.5)
    parts.load_state_dict(state)
    assert float(shared()) == 0.25


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """A value of None is left out."""
    parts = grpo()
    before = parts.state_dict()
    for key, value, message in (
        ("loss.objective.clip_high", None, r"fit 'grpo'.*Missing key.* \"loss.objective.clip_high\""),
        ("loss.objective.clip", torch.tensor(1.0), r"Unexpected key.* \"loss.objective.clip\""),
        ("algorithm", "dapo", "expected the state of 'grpo', got the state of 'dapo'"),
        ("algorithm", None, "expected the state of 'grpo', got the state of None"),
        ("loss.objective.clip_high", torch.zeros(2), r"size mismatch for loss.objective.clip_high: .*\[2\]"),
        ("loss.objective.clip_high", 0.3, "loss.objective.clip_high.*float"),
    ):
        state = {**parts.state_dict(), key: value}
        state["loss.objective.clip_low"] += 0.1
        with pytest.raises(ValueError, match=f"(?s){message}"):
            parts.load_state_dict({name: each for name, each in state.items() if each is not None})
        assert_equal(parts.state_dict(), before)
    # The state of a run with a KL in the loss, loaded into a run without one.
    message = r"(?s)the saved run's arguments.*Unexpected key.* \"loss.terms.0.coeff\", \"kl_transform.transforms.2.co"
    with pytest.raises(ValueError, match=message):
        grpo(kl_loss="none", reference=None).load_state_dict(before)
