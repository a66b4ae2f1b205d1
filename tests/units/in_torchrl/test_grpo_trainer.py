"""torchrl's ``GRPOTrainer``, with each update compared with plain forwards, and the loop of its sota GRPO recipe."""

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Transform
from torchrl.objectives.llm import MCAdvantage
from torchrl.trainers import MixedPrecisionOptimizationStepper
from torchrl.trainers.algorithms import GRPOTrainer

from group_rollouts import GROUP, ROWS, even_share, group_env, grpo_advantages, of_response, plain_loss, without_graph
from torchrl_llm_kl import Advantage, Doctor, KLComputation, PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, KLToSampler
from toy_rollouts import flat, make_policy, make_scoring_pair, steps

pytestmark = pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")
KL_COEFF = 0.3
LR = 1e-2
BATCHES, EPOCHS, MINIBATCH = 2, 2, 4


class Lab:
    """A policy to train, its reference, and a trainer around them."""

    def __init__(self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, padded: bool) -> None:
        self.tokenizer, self.ref_model, self.padded = tokenizer, ref_model, padded
        self.model, self.start = copy.deepcopy(policy_model), policy_model
        self.seen: list[TensorDictBase] = []
        self.after: list[list[Tensor]] = []

    def trainer(self, where: str = "env", **settings: Any) -> GRPOTrainer:
        transforms, batches = self.transforms(where), settings.pop("batches", BATCHES)
        policy = make_policy(self.model, self.tokenizer, pad_output=self.padded)
        env = group_env(self.tokenizer, *(transforms if where != "buffer" else []))
        turns = {"dialog_turns_per_batch": ROWS, "total_dialog_turns": batches * ROWS}
        collector = LLMCollector(env, policy=policy, flatten_data=True, **turns)
        how = {"sampler": SamplerWithoutReplacement(), "batch_size": settings.pop("batch_size", MINIBATCH)}
        buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), **how)
        buffer.append_transform(Advantage("grpo", group_size=GROUP), invert=True)
        if where == "buffer":  # the last one appended runs first on extend
            buffer.append_transform(transforms[0], invert=True)
        loss = settings.pop("loss_module", None) or PolicyLoss(self.model, "ppo", terms=[KLToReference(KL_COEFF)])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        parts = {"collector": collector, "loss_module": loss, "optimizer": optimizer, "replay_buffer": buffer}
        settings = {"num_epochs": EPOCHS, "clip_norm": None, "total_frames": batches * ROWS, **settings}
        trainer = GRPOTrainer(**parts, empty_replay_buffer_on_weight_update=True, progress_bar=False, **settings)
        trainer.register_op("process_optim_batch", self._note)
        weights = self.model.parameters
        trainer.register_op("post_optim", lambda: self.after.append([p.detach().clone() for p in weights()]))
        return trainer

    def transforms(self, where: str) -> list[Any]:
        policy, reference = make_scoring_pair(self.model, self.ref_model, self.tokenizer, pad_output=self.padded)
        if where == "parts":
            return [RetrieveLogProb(policy), RetrieveLogProb(reference), KLComputation(add_to_reward=False)]
        policy = "from_collector" if where == "env" else policy
        return [RetrieveKL(policy, reference, add_to_reward=False)]

    def _note(self, batch: TensorDictBase) -> TensorDictBase:
        self.seen.append(batch.clone())
        return batch


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded)


@pytest.mark.parametrize(("padded", "where"), [(True, "env"), (False, "parts"), (False, "buffer")], indirect=["padded"])
def test_every_update_is_that_of_plain_forwards(lab: Lab, where: str) -> None:
    trainer = lab.trainer(where)
    shadow = copy.deepcopy(lab.model)
    torch.manual_seed(0)
    trainer.train()
    assert len(lab.seen) == BATCHES * EPOCHS * ROWS // MINIBATCH
    # The trainer extends the buffer in each epoch. Scored there, old log-probs belong to the epoch's first policy.
    per_score = ROWS // MINIBATCH if where == "buffer" else len(lab.seen) // BATCHES
    clipped = 0
    for number, batch in enumerate(lab.seen):
        if number % per_score == 0:  # the policy that is scored
            sampler = copy.deepcopy(shadow)
        old, ref = without_graph(sampler, batch), without_graph(lab.ref_model, batch)
        for step, row in zip(steps(batch), old, strict=True):
            assert_close(of_response(step, step["next", "log_probs", "full"]), row, atol=5e-5, rtol=0)
        loss = plain_loss(shadow, batch, old, ref, kl_coeff=KL_COEFF)
        shadow.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in shadow.parameters():
                parameter -= LR * parameter.grad
        now = without_graph(shadow, batch)
        clipped += sum(int(((a - b).exp() - 1).abs().gt(0.2).sum()) for a, b in zip(now, old, strict=True))
        for found, want in zip(lab.after[number], shadow.parameters(), strict=True):
            assert_close(found, want.detach(), atol=1e-5, rtol=1e-4)
            want.data.copy_(found)  # so that rounding does not accumulate
    assert clipped > 0, "the clip range must matter"
    # Advantages of each epoch: rewards by hand, of the sampled tokens, centred and scaled among the answers to a query.
    per_epoch = ROWS // MINIBATCH
    for first in range(0, len(lab.seen), per_epoch):
        rows = [step for batch in lab.seen[first : first + per_epoch] for step in steps(batch)]
        groups = {query: [row for row in rows if row["query"] == query] for query in {row["query"] for row in rows}}
        assert [len(group) for group in groups.values()] == [GROUP] * (ROWS // GROUP)
        for group in groups.values():
            want = grpo_advantages([float(even_share(row)) for row in group])
            found = torch.tensor([float(row["advantage"]) for row in group])
            assert_close(found, torch.tensor(want), atol=1e-5, rtol=0)
    logged = trainer._log_dict
    assert {"loss_objective", "loss_kl_to_ref", "kl_to_ref", "kl_to_sampler", "clip_fraction", "ESS"} <= set(logged)
    assert all(math.isfinite(float(x)) for values in logged.values() for x in values)
    assert len(logged["loss_objective"]) == BATCHES  # averaged over the updates of a batch
    assert len(logged["reward_mean"]) == BATCHES * EPOCHS * ROWS // MINIBATCH  # once for each update


class GradNormAlways(MixedPrecisionOptimizationStepper):
    """A stepper whose metrics always have a gradient norm, 0 for micro-batches without an optimiser step."""

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        metrics = super().step(trainer, sub_batch)
        return metrics.set("grad_norm", metrics.get("grad_norm", torch.tensor(0.0)))


class Counts(Transform):
    """Writes the denominators of extended data."""

    def __init__(self, loss: PolicyLoss) -> None:
        super().__init__()
        self.__dict__["loss"] = loss

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.loss.count(tensordict)

    _call = forward


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_gradient_accumulation(lab: Lab) -> None:
    """torchrl averages ``grad_norm``, which only every n-th micro-batch has, so this needs the stepper above.

    torchrl also divides each loss by n. Losses that add up to the batch's (``PolicyLoss.count``) have 1 / n of its gradient.
    """
    with pytest.raises(TypeError, match="NoneType"):
        Lab(lab.tokenizer, lab.start, lab.ref_model, padded=False).trainer(gradient_accumulation_steps=2).train()

    loss = PolicyLoss(lab.model, "ppo", terms=[KLToReference(KL_COEFF)])
    optimizer = torch.optim.SGD(lab.model.parameters(), lr=LR)
    stepper = GradNormAlways(optimizer, gradient_accumulation_steps=2, clip_norm=None)
    trainer = lab.trainer(optimization_stepper=stepper, loss_module=loss, num_epochs=1, batches=1)
    trainer.replay_buffer.insert_transform(0, Counts(loss), invert=True)  # after the advantages
    trainer.train()
    whole = lazy_stack([step for batch in lab.seen[:2] for step in steps(batch)])
    model = copy.deepcopy(lab.start)
    old, ref = without_graph(model, whole), without_graph(lab.ref_model, whole)
    plain_loss(model, whole, old, ref, kl_coeff=KL_COEFF).backward()
    for parameter, found in zip(model.parameters(), lab.after[1], strict=True):
        assert_close(found, parameter.detach() - LR * parameter.grad / 2, atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------ ``MCAdvantage`` and the loop of the sota recipe
def rollout(lab: Lab) -> tuple[TensorDictBase, list[float]]:
    """Eight answers to two queries, and their outcomes."""
    torch.manual_seed(0)
    policy = make_policy(lab.start, lab.tokenizer, pad_output=lab.padded)
    data = flat(group_env(lab.tokenizer).rollout(1, policy))
    return data, [float(even_share(step)) for step in steps(data)]


def advantages(data: TensorDictBase, buffer: ReplayBuffer) -> list[float]:
    """The stored advantages of the answers."""
    rows = [buffer._storage[i] for i in range(len(buffer))]
    found = {str(row["tokens", "full"].tolist()): float(row["advantage"]) for row in rows}
    return [found[str(step["tokens", "full"].tolist())] for step in steps(data)]


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_mc_advantage_waits_for_groups_that_are_then_scored(lab: Lab) -> None:
    """Transforms inserted at 0 run afterwards, on whole groups: the KL in the reward, then the advantage."""
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=GROUP)
    (kl,) = lab.transforms("buffer")
    kl.add_to_reward, kl.coeff = True, KL_COEFF
    for transform in (kl, Advantage("grpo", group_key="query"), Doctor(every=100, on_fault="log")):
        buffer.insert_transform(0, transform, invert=True)
    data, outcomes = rollout(lab)
    assert len({step["query"] for step in steps(data)}) == ROWS // GROUP
    # One answer to each query in turn, as collectors that work side by side deliver them.
    for number, row in enumerate(start + i for i in range(GROUP) for start in range(0, ROWS, GROUP)):
        buffer.extend(data[row : row + 1].clone())
        assert len(buffer) == (0 if number < ROWS - 2 else GROUP * (number - ROWS + 3))
    pairs = zip(outcomes, without_graph(lab.start, data), without_graph(lab.ref_model, data), strict=True)
    penalised = [outcome - KL_COEFF * float((a - b).sum()) for outcome, a, b in pairs]
    assert advantages(data, buffer) == pytest.approx(grpo_advantages(penalised), abs=1e-4)
    sample = buffer.sample(GROUP)
    assert all(torch.count_nonzero(row["next", "ref_log_probs", "full"]) for row in steps(sample))
    out = PolicyLoss(lab.start, "ppo", aggregation="seq-mean-token-mean")(sample)
    assert out["loss_objective"].isfinite()


@pytest.mark.parametrize("padded", [True], indirect=True)
def test_mc_advantage_feeds_the_loss(lab: Lab) -> None:
    """With one reward for each answer it equals ``grpo``. On policy the loss is minus its mean over tokens."""
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=ROWS)
    buffer.append_transform(lab.transforms("buffer")[0], invert=True)
    data, outcomes = rollout(lab)
    buffer.extend(data.clone().unsqueeze(-1))
    assert advantages(data, buffer) == pytest.approx(grpo_advantages(outcomes), abs=1e-4)
    batch = buffer[:]
    lengths = torch.tensor([float(len(row)) for row in without_graph(lab.start, batch)])
    per_row = torch.stack([row["advantage"].flatten()[0] for row in steps(batch)])
    loss = PolicyLoss(lab.start, "ppo")(batch)["loss_objective"]
    assert_close(loss.detach(), -(per_row * lengths).sum() / lengths.sum(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_synchronous_loop_earns_more(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """In ten batches of 32 answers the share of even bytes rises by more than a batch's noise, 0.5 / sqrt(192) = 0.036."""
    torch.manual_seed(0)
    rows = 32
    model, sampler = (copy.deepcopy(policy_model) for _ in range(2))  # the recipe's engine has its own weights
    how: dict[str, Any] = {"sampler": SamplerWithoutReplacement(), "batch_size": rows // 2}
    buffer = ReplayBuffer(storage=LazyStackStorage(rows), transform=MCAdvantage(grpo_size=GROUP), **how)
    pair = make_scoring_pair(sampler, ref_model, tokenizer)
    buffer.append_transform(RetrieveKL(*pair, add_to_reward=False), invert=True)
    policy = make_policy(sampler, tokenizer, pad_output=False)
    policy.generate_kwargs["top_k"] = 0
    how = {"dialog_turns_per_batch": rows, "total_dialog_turns": 10 * rows, "replay_buffer": buffer}
    env = group_env(tokenizer, rows=rows)
    collector = LLMCollector(env, policy=policy, track_policy_version=True, **how)
    terms = [KLToReference(1e-3), KLToSampler(1e-2), EntropyBonus(1e-4)]
    loss, optimizer = PolicyLoss(model, "ppo", terms=terms), torch.optim.Adam(model.parameters(), lr=3e-3)
    rewards, versions = [], []
    for data in collector:
        assert data is None  # it wrote to the buffer
        assert len(buffer) == rows
        rewards.append(float(torch.stack([even_share(step) for step in steps(buffer[:])]).mean()))
        versions.append(int(buffer[:]["next", "policy_version"].flatten()[0]))
        for batch in buffer:
            loss(batch).mean(reduce=True).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sampler.load_state_dict(model.state_dict())
        collector.increment_version()
        buffer.empty(empty_write_count=False)
    collector.shutdown()
    assert versions == list(range(10))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
