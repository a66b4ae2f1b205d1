"""torchrl's ``GRPOTrainer`` with the transforms and ``PolicyLoss``: each update equals plain forwards'."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Transform
from torchrl.trainers import MixedPrecisionOptimizationStepper
from torchrl.trainers.algorithms import GRPOTrainer

from group_rollouts import GROUP, ROWS, even_share, group_env, grpo_advantages, of_response, plain_loss, without_graph
from torchrl_llm_kl import Advantage, KLComputation, PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import KLToReference
from toy_rollouts import make_policy, make_scoring_wrapper, steps

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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="GRPOTrainer is an experimental")
            parts = {"collector": collector, "loss_module": loss, "optimizer": optimizer, "replay_buffer": buffer}
            settings = {"num_epochs": EPOCHS, "clip_norm": None, "total_frames": batches * ROWS, **settings}
            trainer = GRPOTrainer(**parts, empty_replay_buffer_on_weight_update=True, progress_bar=False, **settings)
        trainer.register_op("process_optim_batch", self._note)
        weights = self.model.parameters
        trainer.register_op("post_optim", lambda: self.after.append([p.detach().clone() for p in weights()]))
        return trainer

    def transforms(self, where: str) -> list[Any]:
        policy, reference = (
            make_scoring_wrapper(model, self.tokenizer, pad_output=self.padded, log_probs_key=key)
            for model, key in ((self.model, "log_probs"), (self.ref_model, "ref_log_probs"))
        )
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
    # The trainer extends the buffer again in each epoch: scored there, old log-probs are from the epoch's first policy.
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
            want.data.copy_(found)  # rounding does not add up
    assert clipped > 0, "the clip range must matter"
    check_advantages(lab)
    check_log(trainer)


def check_advantages(lab: Lab) -> None:
    """In each epoch: rewards by hand, of the sampled tokens, centred and scaled among the answers to a query."""
    per_epoch = ROWS // MINIBATCH
    for first in range(0, len(lab.seen), per_epoch):
        rows = [step for batch in lab.seen[first : first + per_epoch] for step in steps(batch)]
        groups = {query: [row for row in rows if row["query"] == query] for query in {row["query"] for row in rows}}
        assert [len(group) for group in groups.values()] == [GROUP] * (ROWS // GROUP)
        for group in groups.values():
            want = grpo_advantages([float(even_share(row)) for row in group])
            found = torch.tensor([float(row["advantage"]) for row in group])
            assert_close(found, torch.tensor(want), atol=1e-5, rtol=0)


def check_log(trainer: GRPOTrainer) -> None:
    """Each number of the loss, averaged over the updates of a batch; rewards and the KL once for each update."""
    logged = trainer._log_dict
    assert {"loss_objective", "loss_kl_to_ref", "kl_to_ref", "kl_to_sampler", "clip_fraction", "ESS"} <= set(logged)
    assert all(math.isfinite(float(x)) for values in logged.values() for x in values)
    assert len(logged["loss_objective"]) == BATCHES
    assert len(logged["reward_mean"]) == BATCHES * EPOCHS * ROWS // MINIBATCH


# ------------------------------------------------------------------ what GRPOTrainer itself cannot do
class GradNormAlways(MixedPrecisionOptimizationStepper):
    """The stepper whose metrics always have a gradient norm: 0 for micro-batches without an optimiser step."""

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        metrics = super().step(trainer, sub_batch)
        return metrics.set("grad_norm", metrics.get("grad_norm", torch.tensor(0.0)))


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_gradient_accumulation(lab: Lab) -> None:
    """torchrl averages ``grad_norm``, which only every n-th micro-batch has; the table has the stepper that helps.

    It also divides each loss by n: losses that add up to the batch's (``PolicyLoss.count``) have 1 / n of its gradient.
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


class Counts(Transform):
    """Writes the denominators of what is extended."""

    def __init__(self, loss: PolicyLoss) -> None:
        super().__init__()
        self.__dict__["loss"] = loss

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.loss.count(tensordict)

    _call = forward
