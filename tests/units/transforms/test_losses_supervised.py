"""``SFTLoss`` and ``DistillationLoss`` on entries written by the transforms, against one plain forward per sequence.

Both losses read the masks ``("masks", "all_assistant_mask")`` and ``("masks", "all_attention_mask")`` from the data. Write
them, always: without the first both tokenise the conversation again, and torchrl's chat templates leave the end-of-turn
token out of the assistant's span, which the transforms have in it. ``SFTLoss`` does not mask the reference, so that the
whole log-prob of that token would enter the KL; padded, both losses fail on the mask's length.

Rollouts (``padded``: whether they are):

* the masks: see ``mark_responses``.
* the actor: ``TransformersWrapper(..., input_mode="tokens", generate=False, pad_output=padded)`` and
  ``loss.set_keys(history="tokens")``: the losses hand nothing but this entry to the actor, which scores the tokens that
  were sampled. The tokenizer needs a pad token of its own, since without an attention mask the actor takes it as padding.

Conversations that hold no tokens:

* the masks: from ``render_conversations``, padded on the left if ``padded``.
* the actor and the transform's model: ``input_mode="history"``, ``pad_output=padded``, on one chat template.

The reference is read from ``("next", "ref_log_probs", "full")``; on data without ``"next"`` the transform writes one level
up: ``set_keys(ref_log_prob=("ref_log_probs", "full"))``. A teacher is ``RetrieveLogProb(teacher,
log_probs_full_key=("teacher_log_probs", "full"))``, or any entry by ``set_keys(teacher_log_prob=...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import DistillationLoss, SFTLoss

from loss_cases import (
    CORRUPTIONS,
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
from torchrl_llm_kl import RetrieveLogProb
from torchrl_llm_kl.masks import render_conversations
from toy_rollouts import make_scoring_wrapper

KL_COEFF = 0.7
BETA = 0.3


class Lab:
    """The models, and losses with the recipe for rollouts."""

    def __init__(self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, padded: bool) -> None:
        self.tokenizer, self.policy_model, self.ref_model, self.padded = tokenizer, policy_model, ref_model, padded
        self.model = trainable(policy_model, noise=0.02)

    def data(self) -> TensorDictBase:
        return rollouts(self.tokenizer, self.policy_model, self.ref_model, padded=self.padded)

    def actor(self, input_mode: str = "tokens") -> Any:
        return make_scoring_wrapper(self.model, self.tokenizer, pad_output=self.padded, input_mode=input_mode)

    def sft(self, **kwargs: Any) -> SFTLoss:
        loss = SFTLoss(self.actor(), **kwargs)
        loss.set_keys(history="tokens")
        return loss

    def distillation(self, **kwargs: Any) -> DistillationLoss:
        loss = DistillationLoss(self.actor(), **kwargs)
        loss.set_keys(history="tokens", teacher_log_prob=("next", "ref_log_probs", "full"))
        return loss

    def plain(self, tokens: list[Tokens]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of the responses, with their graph, and under the reference."""
        with torch.no_grad():
            ref = responses(self.ref_model, tokens)
        return responses(self.model, tokens), ref


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded)


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


CHECKS: list[Callable[[Lab, TensorDictBase], None]] = [
    check_sft,
    check_minor_sft,
    check_reverse_distillation,
    check_forward_distillation,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_rollouts(lab: Lab, check: Callable[[Lab, TensorDictBase], None]) -> None:
    check(lab, lab.data())


# Minor SFT reads the sum of the reference's log-probs: a shift is nothing to it.
NOTICED = [(c, how) for c in CHECKS for how in CORRUPTIONS if (c, how) != (check_minor_sft, "ref shifted")]


@pytest.mark.parametrize(
    ("check", "how"), NOTICED, ids=[f"{c.__name__.removeprefix('check_')}-{h}" for c, h in NOTICED]
)
def test_the_check_notices(lab: Lab, check: Callable[[Lab, TensorDictBase], None], how: str) -> None:
    data = corrupt(lab.data(), how)
    with pytest.raises(AssertionError):
        check(lab, data)


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
