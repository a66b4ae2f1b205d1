"""``PolicyLoss`` on what torchrl's generating wrappers store: log-probs of the response alone, in each of their layouts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torch.testing import assert_close
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

from closeness import assert_near
from layouts import tokens
from torchrl_llm_kl import KLRewardTransform, PolicyLoss
from toy_models import FORWARD
from toy_rollouts import make_policy, plain_log_probs, steps

TEXTS = ["hi there, you", "a much longer prompt, please answer"]
SHIFT = 0.3


def prompts(tokenizer: Any, input_mode: str) -> TensorDictBase:
    if input_mode == "history":
        history = History.from_chats([[{"role": "user", "content": text}] for text in TEXTS])
        return TensorDict(history=ChatHistory(prompt=history, batch_size=[2]), batch_size=[2])
    if input_mode == "text":
        return TensorDict(text=Text(prompt=TEXTS, batch_size=[2]), batch_size=[2])
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    return lazy_stack([TensorDict(tokens=TensorDict(prompt=row)) for row in rows])


@pytest.mark.parametrize(
    ("padded", "input_mode", "num_samples", "side"),
    [
        (True, "history", None, "root"),
        (False, "history", 2, "next"),
        (True, "text", 2, "root"),
        (False, "text", None, "next"),
        (True, "tokens", None, "next"),
        (False, "tokens", 2, "root"),
    ],
    indirect=["padded"],
)
def test_every_layout_of_a_transformers_wrapper(
    tokenizer: Any, policy_model: nn.Module, padded: bool, input_mode: str, num_samples: int | None, side: str
) -> None:
    """On policy every ratio is 1; the first token of each response, which the wrapper never scores, is left out."""
    torch.manual_seed(1)
    options = {} if num_samples is None else {"num_samples": num_samples}
    policy = make_policy(
        policy_model, tokenizer, pad_output=padded, input_mode=input_mode, return_log_probs=True, **options
    )
    data = policy(prompts(tokenizer, input_mode))
    assert data.get(("log_probs", "full"), None) is None
    count = _scored_tokens(data)
    data.set("advantage", torch.ones(*data.batch_size, 1))
    if side == "next":
        data.set("next", data.select("log_probs"))
        del data["log_probs"]
    with pytest.warns(UserWarning, match="'response'.* holds exactly 0 for the first generated token"):
        out = PolicyLoss(policy_model)(data)
    assert out["num_tokens"] == count > 0
    assert_close((out["ratio_min"], out["ratio_max"]), (torch.tensor(1.0), torch.tensor(1.0)), rtol=0, atol=1e-4)


def _scored_tokens(data: TensorDictBase) -> int:
    """Response tokens but the first of each."""
    count = 0
    for row in steps(data):
        width = row["tokens", "response"].shape[0]
        count += int(row["masks", "all_attention_mask"][-width:].sum()) - 1
    return count


# ------------------------------------------------------------------ engines' layouts, by hand

PROMPTS = [torch.tensor([7, 8, 9]), torch.tensor([5])]
RESPONSES = [torch.tensor([11, 12]), torch.tensor([13, 14, 15])]
WHOLE = [torch.cat(pair) for pair in zip(PROMPTS, RESPONSES, strict=True)]


def stored(model: nn.Module, layout: str, where: str, shift: float = SHIFT) -> TensorDictBase:
    """Two sequences with old log-probs ``shift`` below the model's, of the response alone, without a first 0.

    Padding of log-probs holds the padding token, as vLLM's wrapper fills it.
    """
    old = [plain_log_probs(model, row)[len(p) :] - shift for row, p in zip(WHOLE, PROMPTS, strict=True)]
    key = "log_probs__response" if where == "root" else "next__log_probs__response"
    entries = {key: old, "advantage": torch.tensor([[1.0], [-2.0]])}
    return tokens(layout, [p.tolist() for p in PROMPTS], [r.tolist() for r in RESPONSES], fill=151643.0, **entries)


@pytest.mark.parametrize(
    ("layout", "where"), [("padded", "root"), ("nested", "next"), ("lazy", "root"), ("lazy", "next")]
)
def test_values_and_gradients(policy_model: nn.Module, layout: str, where: str) -> None:
    """Every ratio is exp(0.3) = 1.35: clipped at 1.1 for the two tokens of advantage 1, not for the three of -2."""
    policy_model.zero_grad()
    loss = PolicyLoss(policy_model, "ppo", clip_low=0.2, clip_high=0.1, clip_ratio_c=None)(
        stored(policy_model, layout, where)
    )
    ratio = torch.tensor(SHIFT).exp()
    assert_near(loss["loss_objective"].detach(), (2 * -1.1 + 3 * 2 * ratio) / 5, terms=64, size=1)
    loss["loss_objective"].backward()
    got = policy_model.lm_head.weight.grad.clone()
    policy_model.zero_grad()
    full = torch.cat([PROMPTS[1], RESPONSES[1]])
    log_probs = policy_model(input_ids=full[None]).logits[0, :-1].float().log_softmax(-1)
    (log_probs.gather(-1, full[1:, None]).sum() * 2 * ratio / 5).backward()
    assert_near(got, policy_model.lm_head.weight.grad, terms=64 * 64, size=1)


def test_full_wins_over_response(policy_model: nn.Module) -> None:
    data = stored(policy_model, "nested", "root", shift=9.0)
    full = [plain_log_probs(policy_model, row) for row in WHOLE]
    data.set(("log_probs", "full"), torch.nested.as_nested_tensor(full))
    out = PolicyLoss(policy_model)(data)
    assert_near(out["ratio_max"], torch.tensor(1.0), **FORWARD)


def test_neither_full_nor_response(policy_model: nn.Module) -> None:
    data = stored(policy_model, "nested", "root").exclude("log_probs")
    with pytest.raises(KeyError, match=r"ppo needs old_log_prob: expected \('next', 'log_probs', 'full'\)"):
        PolicyLoss(policy_model)(data)


def test_the_kl_in_the_reward_reads_either_side_of_next(policy_model: nn.Module, ref_model: nn.Module) -> None:
    found = [KLRewardTransform(ref_model)(stored(policy_model, "lazy", where)) for where in ("root", "next")]
    for root, below in zip(found[0].unbind(0), found[1].unbind(0), strict=True):
        assert_close(root["kl_penalty"], below["next", "kl_penalty"])
        assert root["kl_penalty"].abs().max() > 0.1


# ------------------------------------------------------------------ prompts without scores


def without_prompt_scores(model: nn.Module, layout: str) -> TensorDictBase:
    """As SGLang's wrapper stores it: 0 for the whole prompt, whose last token but one the assistant wrote."""
    data = stored(model, layout, "root", shift=0.0)
    masks = [torch.arange(len(p) + len(r)) >= max(len(p) - 2, 1) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    rows = [plain_log_probs(model, row) for row in WHOLE]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = 0
    if layout == "padded":
        real = data["masks", "all_attention_mask"]
        data["masks", "all_assistant_mask"] = torch.zeros_like(real).masked_scatter(real, torch.cat(masks))
        data["log_probs", "full"] = torch.zeros(2, 6).masked_scatter(real, torch.cat(rows))
        return data
    for step, mask, row in zip(data.unbind(0), masks, rows, strict=True):
        step["masks", "all_assistant_mask"], step["log_probs", "full"] = mask, row
    return data


@pytest.mark.parametrize(
    ("layout", "strategy", "left_out"), [("padded", "rlhf", 2), ("lazy", "generic", 2), ("lazy", "sft", 0)]
)
def test_prompts_without_scores_are_left_out(
    policy_model: nn.Module, layout: str, strategy: Any, left_out: int
) -> None:
    """Of the first prompt's tokens 1 and 2; the second prompt is a single token. A ratio of exp(log_prob) is below 1."""
    data, loss = without_prompt_scores(policy_model, layout), PolicyLoss(policy_model, masking_strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = loss(data)
    found = [str(w.message) for w in caught if "returned no scores of prompts" in str(w.message)]
    assert [f"the first {left_out} tokens of prompts" in text for text in found] == [True] * bool(left_out)
    assert out["num_tokens"] == 5
    assert_near((out["ratio_min"], out["ratio_max"]), (torch.tensor(1.0), torch.tensor(1.0)), **FORWARD)


@pytest.mark.parametrize(
    ("layout", "settings"), [("padded", {"scope": "full"}), ("lazy", {"assistant_only": False}), ("padded", {})]
)
def test_the_kl_of_prompts_without_scores_is_0(
    policy_model: nn.Module, ref_model: nn.Module, layout: str, settings: dict[str, Any]
) -> None:
    data, transform = without_prompt_scores(policy_model, layout), KLRewardTransform(ref_model, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = transform(data)
    assert any("the first 2 tokens of prompts" in str(w.message) for w in caught) == bool(settings)
    for step, prompt, response in zip(out.unbind(0), PROMPTS, RESPONSES, strict=True):
        ids, kl = torch.cat([prompt, response]), step["kl_penalty"].squeeze(-1)
        want = plain_log_probs(policy_model, ids) - plain_log_probs(ref_model, ids)
        want[: len(prompt)] = 0
        real = step["masks", "all_attention_mask"] if layout == "padded" else torch.ones(len(ids), dtype=torch.bool)
        assert_near(kl[real], want, **FORWARD)
