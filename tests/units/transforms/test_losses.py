"""torchrl's losses on entries written by the transforms, and ``PolicyLoss`` beside them: one plain forward per sequence.

Recipes for rollouts (``padded``: whether they are):

* the actor: ``TransformersWrapper(..., input_mode="tokens", generate=False, pad_output=padded)``; another ``input_mode``
  tokenises the conversation again: other tokens than were sampled, which ``GRPOLoss`` refuses for their number.
* ``GRPOLoss(actor, masking_strategy="sft", ...)`` needs nothing but the rollout; ``"rlhf"``, ``SFTLoss`` and
  ``DistillationLoss`` need ``("masks", "all_assistant_mask")``, which a rollout leaves empty (see ``mark_responses``).
  Not ``"generic"``: it counts the prompts, where the transforms write 0 by default, and first tokens.
* ``GRPOLoss``: ``set_keys(sample_log_prob=("next", "log_probs", "full"))``, what ``RetrieveKL`` or a ``RetrieveLogProb``
  of the policy wrote. The advantage is ``[1, 1]`` for each sequence; one for each token works for padded rollouts as it
  is, and must be padded on the left of nested ones.
* ``SFTLoss``, ``DistillationLoss``: ``set_keys(history="tokens")``. They hand the actor nothing but this entry: its
  tokenizer needs a pad token of its own.

Conversations without tokens: masks from ``render_conversations``, padded on the left if ``padded``; ``input_mode="history"``
and one chat template for the actor and the transform's model. Data without ``"next"`` has the entries one level up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import DistillationLoss, GRPOLoss, SFTLoss

from torchrl_llm_kl import KLComputation, PolicyLoss, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.masks import render_conversations
from toy_rollouts import OUTCOMES, collect, flat, make_policy, make_scoring_wrapper, steps

ADVANTAGES = (1.0, -0.5, 2.0, 0.25)
KL_COEFF = 0.7
ROLLOUTS: dict[tuple[bool, bool], TensorDictBase] = {}  # the tests share them


REWARD_COEFF = 0.3
RESPONSE_LENGTHS = [3, 6, 1, 2]


def rollouts(
    tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, *, padded: bool, combined: bool = True
) -> TensorDictBase:
    """Four rollouts ``[4]``, prompts and responses all of different lengths, scored in the env.

    ``combined``: by ``RetrieveKL``, else by two ``RetrieveLogProb`` and a ``KLComputation``.
    """
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    policy.generate_kwargs["eos_token_id"] = [tokenizer.eos_token_id, *range(0, 256, 5)]  # some stop early
    gen = make_scoring_wrapper(policy_model, tokenizer, pad_output=padded, log_probs_key="log_probs")
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs")
    transforms: list[Transform] = [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation(coeff=REWARD_COEFF)]
    if combined:
        transforms = [RetrieveKL(gen, ref, coeff=REWARD_COEFF)]
    data = flat(collect(tokenizer, policy, *transforms, envs=4))
    assert [len(s.ids) - s.start for s in sequences(data)] == RESPONSE_LENGTHS
    return mark_responses(data)


def mark_responses(data: TensorDictBase) -> TensorDictBase:
    """Write the assistant mask, which torchrl's rollouts leave empty: what follows the prompt and is no padding."""
    for step in data.unbind(0):
        mask = step["masks", "all_attention_mask"].clone()
        mask[: len(step["tokens", "prompt"])] = False
        step["masks", "all_assistant_mask"] = mask
    return data


class Tokens(NamedTuple):
    """One sequence without padding; its response begins at ``start``."""

    ids: Tensor
    start: int


def sequences(data: TensorDictBase) -> list[Tokens]:
    """What was sampled, by the bookkeeping of the rollout alone."""
    out = []
    for step in steps(data):
        attended = step["masks", "all_attention_mask"]
        prompt = attended[: len(step["tokens", "prompt"])]
        out.append(Tokens(step["tokens", "full"][attended], int(prompt.sum())))
    return out


def responses(model: nn.Module, tokens: Sequence[Tokens]) -> list[Tensor]:
    """Log-probs of each response's tokens under the plain model, with their graph."""
    out = []
    for ids, start in tokens:
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        out.append(torch.stack([log_probs[t - 1, ids[t]] for t in range(start, len(ids))]))
    return out


def k3_values(sampled: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Schulman's k3, ``ratio - 1 - log ratio``, of tokens sampled from ``sampled``; one tensor for each sequence."""
    return [(o - s).exp() - 1 - (o - s) for s, o in zip(sampled, other, strict=True)]


def slot_count(data: TensorDictBase, *, common_width: bool) -> int:
    """Positions that torchrl averages over: prompts and padding too."""
    widths = [len(step["tokens", "full"]) for step in steps(data)]
    return len(widths) * max(widths) if common_width else sum(widths)


def trainable(model: nn.Module, *, noise: float = 0.0) -> nn.Module:
    """A copy to train, with weights that have moved by ``noise`` since it sampled."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def close(found: Tensor, want: Tensor | float) -> None:
    """Equal up to the rounding of float32 forwards that are batched differently."""
    assert_close(found.detach(), torch.as_tensor(want).detach(), rtol=1e-4, atol=2e-5)


def close_gradients(loss: Tensor, want: Tensor, model: nn.Module) -> None:
    """Backpropagate ``loss``: every parameter has the gradient of ``want``, which is finite and not zero."""
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(want, list(parameters.values()))
    model.zero_grad()
    loss.backward()
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
        size = gradient.abs().max().item()
        assert size > 0, f"{name} has no part in the loss: the oracle tests nothing there"
        assert_close(parameter.grad, gradient, rtol=0, atol=1e-3 * size, msg=lambda m, name=name: f"{name}: {m}")


CORRUPTIONS = ["ref shifted", "ref zero", "gen and ref swapped", "mask shifted"]


def corrupt(data: TensorDictBase, how: str) -> TensorDictBase:
    """Make the mistake that a check has to notice."""
    for step in data.unbind(0):
        gen, ref = step["next", "log_probs", "full"], step["next", "ref_log_probs", "full"]
        mask = step["masks", "all_assistant_mask"]
        if how == "ref shifted":
            step["next", "ref_log_probs", "full"] = ref.roll(-1)
        elif how == "ref zero":
            step["next", "ref_log_probs", "full"] = torch.zeros_like(ref)
        elif how == "gen and ref swapped":
            step["next", "log_probs", "full"], step["next", "ref_log_probs", "full"] = ref, gen
        elif how == "mask shifted":
            step["masks", "all_assistant_mask"] = mask.roll(-1)
        else:
            raise ValueError(how)
    return data


class Lab:
    """The models, rollouts, and torchrl's losses with their recipes on a copy of the policy, which may have moved."""

    def __init__(
        self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, padded: bool, noise: float
    ) -> None:
        self.tokenizer, self.policy_model, self.ref_model, self.padded = tokenizer, policy_model, ref_model, padded
        self.model = trainable(policy_model, noise=noise)

    def data(self, *, combined: bool = True) -> TensorDictBase:
        if (kind := (self.padded, combined)) not in ROLLOUTS:
            models = self.policy_model, self.ref_model
            ROLLOUTS[kind] = rollouts(self.tokenizer, *models, padded=self.padded, combined=combined)
        return ROLLOUTS[kind].clone().set("advantage", torch.tensor(ADVANTAGES).reshape(4, 1, 1))

    def actor(self, input_mode: str = "tokens") -> Any:
        return make_scoring_wrapper(self.model, self.tokenizer, pad_output=self.padded, input_mode=input_mode)

    def grpo(self, **kwargs: Any) -> GRPOLoss:
        loss = GRPOLoss(self.actor(), **{"masking_strategy": "sft", "entropy_bonus": False, **kwargs})
        loss.set_keys(sample_log_prob=("next", "log_probs", "full"))
        return loss

    def sft(self, **kwargs: Any) -> SFTLoss:
        loss = SFTLoss(self.actor(), **kwargs)
        loss.set_keys(history="tokens")
        return loss

    def distillation(self, **kwargs: Any) -> DistillationLoss:
        loss = DistillationLoss(self.actor(), **kwargs)
        loss.set_keys(history="tokens", teacher_log_prob=("next", "ref_log_probs", "full"))
        return loss

    def policy_loss(self, **kwargs: Any) -> PolicyLoss:
        return PolicyLoss(self.model, "ppo", clip_low=0.1, clip_high=0.3, terms=[KLToReference(KL_COEFF)], **kwargs)

    def plain(self, tokens: list[Tokens]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of the responses, with their graph, and under the reference."""
        with torch.no_grad():
            ref = responses(self.ref_model, tokens)
        return responses(self.model, tokens), ref


@pytest.fixture
def on_policy(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded, 0.0)


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded, 0.02)


# ------------------------------------------------------------------ GRPOLoss


def check_on_policy(lab: Lab, data: TensorDictBase, strategy: str) -> None:
    """The ratio is 1, so the objective is the mean of ``-advantage`` over responses of 3, 6, 1 and 2 tokens."""
    tokens = sequences(data)
    log_probs = responses(lab.model, tokens)
    with torch.no_grad():
        ref = responses(lab.ref_model, tokens)
    # torchrl divides the KL by every position, prompts and padding included: the same responses have a smaller KL when
    # the batch has a longer prompt. That the tokens line up shows in the sum.
    kl = torch.cat(k3_values(log_probs, ref)).sum() / slot_count(data, common_width=True)
    surrogate = -sum(a * row.sum() for a, row in zip(ADVANTAGES, log_probs, strict=True)) / 12

    out = lab.grpo(masking_strategy=strategy, kl_to_ref_coeff=KL_COEFF)(data)
    close(out.loss_objective, -(1.0 * 3 - 0.5 * 6 + 2.0 * 1 + 0.25 * 2) / 12)
    close(out.clip_fraction, 0.0)
    close(out.kl_to_ref, kl)
    close(out.loss_kl_to_ref, KL_COEFF * kl)
    close_gradients(out.loss_objective + out.loss_kl_to_ref, surrogate + KL_COEFF * kl, lab.model)


def in_layout(padded: bool) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("padded", [padded], ids=["padded" if padded else "nested"], indirect=True)


@pytest.mark.parametrize(
    ("padded", "strategy", "combined"), [(True, "sft", True), (False, "rlhf", False)], indirect=["padded"]
)
def test_on_policy_with_kl_in_the_loss(on_policy: Lab, strategy: str, combined: bool) -> None:
    check_on_policy(on_policy, on_policy.data(combined=combined), strategy)


@in_layout(False)
@pytest.mark.parametrize("how", CORRUPTIONS)
def test_the_check_notices(on_policy: Lab, how: str) -> None:
    data = corrupt(on_policy.data(), how)
    with pytest.raises(AssertionError):
        check_on_policy(on_policy, data, "rlhf")


def kl_of(lab: Lab, data: TensorDictBase) -> list[Tensor]:
    with torch.no_grad():
        pairs = zip(*(responses(m, sequences(data)) for m in (lab.policy_model, lab.ref_model)), strict=True)
        return [gen - ref for gen, ref in pairs]


def check_token_advantage(lab: Lab, data: TensorDictBase) -> None:
    """Each token's reward as its advantage: ``-coeff * KL``, and the outcome on the last token."""
    rewards = [-REWARD_COEFF * kl for kl in kl_of(lab, data)]
    for reward, outcome in zip(rewards, OUTCOMES, strict=True):
        reward[-1] += outcome
    log_probs = responses(lab.model, sequences(data))
    surrogate = -sum((reward * row).sum() for reward, row in zip(rewards, log_probs, strict=True)) / 12

    out = lab.grpo()(data)
    close(out.loss_objective, -sum(reward.sum() for reward in rewards) / 12)
    close_gradients(out.loss_objective, surrogate, lab.model)


def test_kl_in_the_reward_of_each_token(on_policy: Lab) -> None:
    data = on_policy.data()
    rewards = [step["next", "reward"] for step in data.unbind(0)]
    width = max(len(reward) for reward in rewards)
    for step, reward in zip(data.unbind(0), rewards, strict=True):
        step["advantage"] = torch.nn.functional.pad(reward, (0, 0, width - len(reward), 0))
    check_token_advantage(on_policy, data)


@in_layout(False)
@pytest.mark.xfail(strict=True, reason="GRPOLoss.forward pads `advantage` on the right, everything else on the left")
def test_nested_advantage_of_each_token_as_it_is(on_policy: Lab) -> None:
    data = on_policy.data()
    for step in data.unbind(0):
        step["advantage"] = step["next", "reward"]
    check_token_advantage(on_policy, data)


# ------------------------------------------------------------------ PolicyLoss


def by_hand(lab: Lab, data: TensorDictBase) -> Tensor:
    """PPO with 0.1 / 0.3 and a dual clip of 3, plus 0.7 k2, a mean over all response tokens."""
    models = lab.model, lab.policy_model, lab.ref_model
    tokens = sequences(data)
    values = []
    for i, (now, old, other) in enumerate(zip(*(responses(m, tokens) for m in models), strict=True)):
        ratio, advantage = (now - old.detach()).exp(), torch.tensor(ADVANTAGES[i])
        value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
        value = torch.minimum(value, -3 * advantage) if advantage < 0 else value
        values.append(value + 0.35 * (now - other.detach()).square())
    return torch.cat(values).mean()


def total(out: TensorDictBase) -> Tensor:
    return out["loss_objective"] + out["loss_kl_to_ref"]


def test_policy_loss(lab: Lab) -> None:
    data = lab.data()
    loss, want = total(lab.policy_loss()(data)), by_hand(lab, data)
    close(loss, want)
    close_gradients(loss, want, lab.model)


@pytest.mark.parametrize(
    ("padded", "strategy", "input_mode"),
    [(True, "sft", "history"), (False, "rlhf", "text"), (True, "rlhf", "tokens"), (False, "sft", "history")],
    indirect=["padded"],
)
def test_wrappers_as_actors(lab: Lab, strategy: Any, input_mode: str) -> None:
    """Whatever a wrapper reads, the sampled tokens are what is trained."""
    data = lab.data()
    actor = make_scoring_wrapper(lab.model, lab.tokenizer, pad_output=False, input_mode=input_mode)
    loss = PolicyLoss(
        actor, "ppo", clip_low=0.1, clip_high=0.3, terms=[KLToReference(KL_COEFF)], masking_strategy=strategy
    )
    close(total(loss(data)), by_hand(lab, data))


@in_layout(True)
def test_policy_loss_notices(lab: Lab) -> None:
    """The negative control: each mistake in the data changes the loss."""
    want = by_hand(lab, lab.data())
    for how in CORRUPTIONS:
        found = total(lab.policy_loss(masking_strategy="rlhf")(corrupt(lab.data(), how)))
        assert (found - want).abs() > 1e-3, how


@in_layout(False)
def test_policy_loss_out_of_a_replay_buffer(lab: Lab) -> None:
    data, loss = lab.data(), lab.policy_loss()
    loss.count(data)
    want = total(loss(data))
    buffer = ReplayBuffer(storage=LazyStackStorage(4), collate_fn=lambda x: x)
    buffer.extend(data)
    rows = [buffer[torch.tensor(index)] for index in ([2, 0], [3, 1])]
    close(sum(total(loss(part)) for part in rows), want)


@in_layout(True)
def test_an_algorithm_on_rollouts(lab: Lab) -> None:
    """Scored in the env already: nothing is scored again, and advantages are those of the outcome."""
    data = lab.data()
    parts = make_algorithm("grpo", lab.model, reference=lab.ref_model, group_key="pair", kl_loss_coeff=KL_COEFF)
    data["pair"] = torch.tensor([0, 0, 1, 1])
    before = [step["next", "log_probs", "full"].clone() for step in data.unbind(0)]
    batch = parts.prepare(data)
    for step, old in zip(batch.unbind(0), before, strict=True):
        assert torch.equal(step["next", "log_probs", "full"], old)
    rewards = torch.stack([step["next", "reward"].sum() for step in batch.unbind(0)]).reshape(2, 2)
    centred = rewards - rewards.mean(-1, keepdim=True)
    want = (centred / (rewards.std(-1, keepdim=True) + 1e-6)).flatten()
    close(torch.stack([step["advantage"].reshape(()) for step in batch.unbind(0)]), want)
    assert total(parts.loss(batch)).isfinite()


# ------------------------------------------------------------------ SFTLoss and DistillationLoss


def mean_of_means(rows: list[Tensor]) -> Tensor:
    """Over tokens, then over sequences."""
    return sum(row.sum() / len(row) for row in rows) / len(rows)


def check_sft(lab: Lab, data: TensorDictBase) -> None:
    """The KL's denominator is every position again: torchrl divides by it instead of taking the mean."""
    log_probs, ref = lab.plain(sequences(data))
    kl = torch.cat(k3_values(log_probs, ref)).sum() / slot_count(data, common_width=False)

    out = lab.sft(kl_to_ref_coeff=KL_COEFF)(data)
    close(out.loss_sft, -mean_of_means(log_probs))
    close(out.kl_to_ref, kl)
    close(out.loss_kl_to_ref, KL_COEFF * kl)
    close_gradients(out.loss_sft + out.loss_kl_to_ref, -mean_of_means(log_probs) + KL_COEFF * kl, lab.model)


def check_reverse_distillation(lab: Lab, data: TensorDictBase) -> None:
    """Toward the reference, on tokens of the student."""
    log_probs, ref = lab.plain(sequences(data))
    want = mean_of_means(k3_values(log_probs, ref))

    out = lab.distillation()(data)
    close(out.loss_distill, want)
    close(out.kl_to_teacher, want)
    close_gradients(out.loss_distill, want, lab.model)


CHECKS = [check_sft, check_reverse_distillation]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_rollouts(lab: Lab, check: Callable[[Lab, TensorDictBase], None]) -> None:
    check(lab, lab.data())


@in_layout(False)
@pytest.mark.parametrize("how", CORRUPTIONS)
def test_the_checks_notice(lab: Lab, how: str) -> None:
    for check in CHECKS:
        with pytest.raises(AssertionError):
            check(lab, corrupt(lab.data(), how))


@in_layout(True)
def test_distillation_of_prompts_too(lab: Lab) -> None:
    """``assistant_only=False`` on both sides: every token but the first, over a length that counts it."""
    data = lab.data()
    teacher = make_scoring_wrapper(lab.ref_model, lab.tokenizer, pad_output=lab.padded)
    RetrieveLogProb(teacher, assistant_only=False, log_probs_full_key=("ref_log_probs", "full"))(data)
    out = lab.distillation(assistant_only=False)(data)

    tokens = [Tokens(ids, 1) for ids, _ in sequences(data)]
    rows = k3_values(*lab.plain(tokens))
    want = sum(row.sum() / (len(row) + 1) for row in rows) / 4
    close(out.loss_distill, want)
    close_gradients(out.loss_distill, want, lab.model)


CHATS = [("hi", "yo"), ("hello there", "good day to you"), ("why?", "because")]


def conversations(tokenizer: Any, padded: bool) -> TensorDictBase:
    """Three conversations with their masks, and no tokens."""
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS]
    history = History.from_chats(chats)
    parts = ChatHistory(prompt=history[..., :-1], response=history[..., -1:], full=history)
    data = lazy_stack(list(TensorDict(history=parts, batch_size=[3]).unbind(0)))
    masks = [rendered.assistant_mask for rendered in render_conversations(tokenizer, chats)]
    width = max(len(mask) for mask in masks)
    for row, mask in zip(data.unbind(0), masks, strict=True):
        left = width - len(mask) if padded else 0
        row["masks", "all_assistant_mask"] = pad(mask, (left, 0))
        row["masks", "all_attention_mask"] = pad(torch.ones_like(mask), (left, 0))
    return data


def written_out(tokenizer: Any) -> list[Tokens]:
    """The conversations' tokens, and where the answers begin: each ends with the end-of-turn token."""
    out = []
    for question, answer in CHATS:
        prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        response = tokenizer.encode(f"{answer}<|im_end|>")
        out.append(Tokens(torch.tensor([*prompt, *response]), len(prompt)))
    return out


def history_slots(padded: bool) -> int:
    # A character is a token; so are two start markers, two end markers and the two newlines after those.
    widths = [len("user\n") + len("assistant\n") + 6 + len(question) + len(answer) for question, answer in CHATS]
    return len(widths) * max(widths) if padded else sum(widths)


@in_layout(True)
def test_conversations_sft(lab: Lab) -> None:
    scored = make_scoring_wrapper(
        lab.ref_model, lab.tokenizer, pad_output=lab.padded, input_mode="history", log_probs_key="ref_log_probs"
    )
    data = RetrieveLogProb(scored)(conversations(lab.tokenizer, lab.padded))
    loss = SFTLoss(lab.actor("history"), kl_to_ref_coeff=KL_COEFF)
    loss.set_keys(ref_log_prob=("ref_log_probs", "full"))
    out = loss(data)

    log_probs, ref = lab.plain(written_out(lab.tokenizer))
    kl = torch.cat(k3_values(log_probs, ref)).sum() / history_slots(lab.padded)
    close(out.loss_sft, -mean_of_means(log_probs))
    close(out.kl_to_ref, kl)
    close_gradients(out.loss_sft + out.loss_kl_to_ref, -mean_of_means(log_probs) + KL_COEFF * kl, lab.model)
