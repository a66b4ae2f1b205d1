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

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import DistillationLoss, GRPOLoss, SFTLoss

from loss_cases import (
    CORRUPTIONS,
    REWARD_COEFF,
    Tokens,
    close,
    close_gradients,
    corrupt,
    k3_values,
    responses,
    rollouts,
    sequences,
    slot_count,
    trainable,
)
from torchrl_llm_kl import PolicyLoss, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.masks import render_conversations
from toy_rollouts import OUTCOMES, make_scoring_wrapper

ADVANTAGES = (1.0, -0.5, 2.0, 0.25)
KL_COEFF = 0.7
BETA = 0.3
ROLLOUTS: dict[tuple[bool, bool], TensorDictBase] = {}  # the tests share them


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


@in_layout(True)
def test_off_policy_with_clipping(lab: Lab) -> None:
    """An actor that has moved since it sampled: ratios from the sampling log-probs, clipped on both sides."""
    data = lab.data()
    tokens = sequences(data)
    log_probs = responses(lab.model, tokens)
    with torch.no_grad():
        old = responses(lab.policy_model, tokens)
    terms, clipped = [], []
    for advantage, new_row, old_row in zip(ADVANTAGES, log_probs, old, strict=True):
        for new, was in zip(new_row, old_row, strict=True):
            ratio = (new - was).exp()
            clipped.append("low" if ratio < 0.8 else "high" if ratio > 1.28 else "no")
            # A clipped token is a constant where clipping makes the objective worse.
            if advantage > 0 and ratio > 1.28:
                ratio = ratio.new_tensor(1.28)
            if advantage < 0 and ratio < 0.8:
                ratio = ratio.new_tensor(0.8)
            terms.append(-ratio * advantage)
    assert set(clipped) == {"low", "high", "no"}
    want = torch.stack(terms).sum() / 12

    out = lab.grpo(clip_epsilon=(0.2, 0.28))(data)
    close(out.loss_objective, want)
    # Again over every position: 12 of them are responses.
    close(out.clip_fraction, (12 - clipped.count("no")) / slot_count(data, common_width=True))
    close_gradients(out.loss_objective, want, lab.model)


def kl_of(lab: Lab, data: TensorDictBase) -> list[Tensor]:
    with torch.no_grad():
        pairs = zip(*(responses(m, sequences(data)) for m in (lab.policy_model, lab.ref_model)), strict=True)
        return [gen - ref for gen, ref in pairs]


@pytest.mark.parametrize(("padded", "combined"), [(False, True), (True, False)], indirect=["padded"])
def test_kl_in_the_reward_summed_over_the_sequence(on_policy: Lab, combined: bool) -> None:
    """The reward of a sequence is ``outcome - coeff * KL``; its advantage is the difference from the batch's mean."""
    data = on_policy.data(combined=combined)
    returns = torch.stack([step["next", "reward"].sum() for step in data.unbind(0)])
    data["advantage"] = (returns - returns.mean()).reshape(4, 1, 1)

    want_returns = [
        outcome - REWARD_COEFF * kl.sum() for outcome, kl in zip(OUTCOMES, kl_of(on_policy, data), strict=True)
    ]
    baseline = sum(want_returns) / 4
    log_probs = responses(on_policy.model, sequences(data))
    pairs = list(zip(want_returns, log_probs, strict=True))
    surrogate = -sum((value - baseline) * row.sum() for value, row in pairs) / 12

    out = on_policy.grpo()(data)
    close(out.loss_objective, -sum((value - baseline) * len(row) for value, row in pairs) / 12)
    close_gradients(out.loss_objective, surrogate, on_policy.model)


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


def check_minor_sft(lab: Lab, data: TensorDictBase) -> None:
    """``-log sigmoid(beta * (mean log-prob - mean reference log-prob))`` of each sequence."""
    log_probs, ref = lab.plain(sequences(data))
    margins = [row.sum() / len(row) - ref_row.sum() / len(row) for row, ref_row in zip(log_probs, ref, strict=True)]
    want = sum(softplus(-BETA * margin) for margin in margins) / 4

    out = lab.sft(loss_function="minor_sft", beta=BETA)(data)
    close(out.loss_sft, want)
    close_gradients(out.loss_sft, want, lab.model)


def check_reverse_distillation(lab: Lab, data: TensorDictBase) -> None:
    """Toward the reference, on tokens of the student."""
    log_probs, ref = lab.plain(sequences(data))
    want = mean_of_means(k3_values(log_probs, ref))

    out = lab.distillation()(data)
    close(out.loss_distill, want)
    close(out.kl_to_teacher, want)
    close_gradients(out.loss_distill, want, lab.model)


def check_forward_distillation(lab: Lab, data: TensorDictBase) -> None:
    """The roles exchanged, as if the teacher had sampled."""
    log_probs, ref = lab.plain(sequences(data))
    want = mean_of_means(k3_values(ref, log_probs))

    out = lab.distillation(kl_direction="forward")(data)
    close(out.loss_distill, want)
    close_gradients(out.loss_distill, want, lab.model)


CHECKS = [check_sft, check_minor_sft, check_reverse_distillation, check_forward_distillation]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_rollouts(lab: Lab, check: Callable[[Lab, TensorDictBase], None]) -> None:
    check(lab, lab.data())


@in_layout(False)
@pytest.mark.parametrize(
    ("check", "how"), list(zip(CHECKS, ["ref zero", "mask shifted", *CORRUPTIONS[::2]], strict=True))
)
def test_the_checks_notice(lab: Lab, check: Callable[[Lab, TensorDictBase], None], how: str) -> None:
    data = corrupt(lab.data(), how)
    with pytest.raises(AssertionError):
        check(lab, data)


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


@in_layout(False)
def test_conversations_distillation(lab: Lab) -> None:
    teacher = make_scoring_wrapper(lab.ref_model, lab.tokenizer, pad_output=lab.padded, input_mode="history")
    transform = RetrieveLogProb(teacher, log_probs_full_key=("teacher_log_probs", "full"))
    data = transform(conversations(lab.tokenizer, lab.padded))
    loss = DistillationLoss(lab.actor("history"))
    loss.set_keys(teacher_log_prob=("teacher_log_probs", "full"))
    out = loss(data)

    want = mean_of_means(k3_values(*lab.plain(written_out(lab.tokenizer))))
    close(out.loss_distill, want)
    close_gradients(out.loss_distill, want, lab.model)
