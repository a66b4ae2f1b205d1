"""``PolicyLoss`` on what torchrl's generating wrappers store: log-probs of the response alone, in each of their layouts."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torch.testing import assert_close
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

from closeness import assert_near
from layouts import at_responses, joined, tokens
from torchrl_llm_kl import KLRewardTransform, PolicyLoss
from toy_models import FORWARD
from toy_rollouts import plain_log_probs, steps

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
def test_every_layout_of_a_transformers_wrapper(lab, padded, input_mode, num_samples, side):
    """On policy every ratio is 1; the first token of each response, which the wrapper never scores, is left out."""
    torch.manual_seed(1)
    options = {} if num_samples is None else {"num_samples": num_samples}
    wrapper = lab.policy(padded, input_mode=input_mode, return_log_probs=True, **options)
    data = wrapper(prompts(lab.tokenizer, input_mode))
    assert data.get(("log_probs", "full"), None) is None
    count = 0  # response tokens but the first of each
    for row in steps(data):
        count += int(row["masks", "all_attention_mask"][-len(row["tokens", "response"]) :].sum()) - 1
    data.set("advantage", torch.ones(*data.batch_size, 1))
    if side == "next":
        data.set("next", data.select("log_probs"))
        del data["log_probs"]
    with pytest.warns(UserWarning, match="'response'.* holds exactly 0 for the first generated token"):
        out = PolicyLoss(lab.gen_model)(data)
    assert out["num_tokens"] == count > 0
    assert_near((out["ratio_min"], out["ratio_max"]), (torch.tensor(1.0), torch.tensor(1.0)), **FORWARD)


# ------------------------------------------------------------------ engines' layouts, by hand
PROMPTS, RESPONSES = [[7, 8, 9], [5]], [[11, 12], [13, 14, 15]]
WHOLE = [torch.tensor(row) for row in joined(PROMPTS, RESPONSES)]


def stored(model: nn.Module, layout: str, where: str, shift: float = SHIFT) -> TensorDictBase:
    """Two sequences with old log-probs ``shift`` below the model's, of the response alone, without a first 0.

    Padding of log-probs holds the padding token, as vLLM's wrapper fills it.
    """
    old = [plain_log_probs(model, row)[len(p) :] - shift for row, p in zip(WHOLE, PROMPTS, strict=True)]
    key = "log_probs__response" if where == "root" else "next__log_probs__response"
    entries = {key: old, "advantage": torch.tensor([[1.0], [-2.0]])}
    return tokens(layout, PROMPTS, RESPONSES, fill=151643.0, **entries)


@pytest.mark.parametrize(
    ("layout", "where"), [("padded", "root"), ("nested", "next"), ("lazy", "root"), ("lazy", "next")]
)
def test_values_and_gradients(policy_model: nn.Module, layout: str, where: str) -> None:
    """Every ratio is exp(0.3) = 1.35: clipped at 1.1 for the two tokens of advantage 1, not for the three of -2."""
    loss = PolicyLoss(policy_model, "ppo", clip_low=0.2, clip_high=0.1, clip_ratio_c=None)
    value = loss(stored(policy_model, layout, where))["loss_objective"]
    ratio = torch.tensor(SHIFT).exp()
    assert_near(value.detach(), (2 * -1.1 + 3 * 2 * ratio) / 5, terms=64, size=1)
    log_probs = policy_model(input_ids=WHOLE[1][None]).logits[0, :-1].float().log_softmax(-1)
    want = log_probs.gather(-1, WHOLE[1][1:, None]).sum() * 2 * ratio / 5
    (got,), (expected,) = (torch.autograd.grad(x, policy_model.lm_head.weight) for x in (value, want))
    assert_near(got, expected, terms=64 * 64, size=1)


def test_full_wins_over_response(policy_model: nn.Module) -> None:
    data = stored(policy_model, "nested", "root", shift=9.0)
    full = [plain_log_probs(policy_model, row) for row in WHOLE]
    data.set(("log_probs", "full"), torch.nested.as_nested_tensor(full))
    assert_near(PolicyLoss(policy_model)(data)["ratio_max"], torch.tensor(1.0), **FORWARD)


def test_the_kl_in_the_reward_reads_either_side_of_next(policy_model: nn.Module, ref_model: nn.Module) -> None:
    found = [KLRewardTransform(ref_model)(stored(policy_model, "lazy", where)) for where in ("root", "next")]
    for root, below in zip(found[0].unbind(0), found[1].unbind(0), strict=True):
        assert_close(root["kl_penalty"], below["next", "kl_penalty"])
        assert root["kl_penalty"].abs().max() > 0.1


# ------------------------------------------------------------------ prompts without scores
def without_prompt_scores(model: nn.Module, layout: str) -> TensorDictBase:
    """As SGLang's wrapper stores it: 0 for the whole prompt, whose last token but one the assistant wrote."""
    masks = [torch.arange(len(p) + len(r)) >= max(len(p) - 2, 1) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    pairs = zip(WHOLE, PROMPTS, strict=True)
    rows = [plain_log_probs(model, row) * (torch.arange(len(row)) >= len(p)) for row, p in pairs]
    entries = {"advantage": torch.tensor([[1.0], [-2.0]]), "masks__all_assistant_mask": masks, "log_probs__full": rows}
    return tokens(layout, PROMPTS, RESPONSES, **entries)


def warned_of(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = run()
    return out, [str(w.message) for w in caught if "returned no scores of prompts" in str(w.message)]


@pytest.mark.parametrize(
    ("layout", "strategy", "left_out"), [("padded", "rlhf", 2), ("lazy", "generic", 2), ("lazy", "sft", 0)]
)
def test_prompts_without_scores_are_left_out(policy_model, layout, strategy, left_out):
    """Of the first prompt's tokens 1 and 2; the second prompt is a single token. A ratio of exp(log_prob) is below 1."""
    data, loss = without_prompt_scores(policy_model, layout), PolicyLoss(policy_model, masking_strategy=strategy)
    out, found = warned_of(lambda: loss(data))
    assert [f"the first {left_out} tokens of prompts" in text for text in found] == [True] * bool(left_out)
    assert out["num_tokens"] == 5
    assert_near((out["ratio_min"], out["ratio_max"]), (torch.tensor(1.0), torch.tensor(1.0)), **FORWARD)


@pytest.mark.parametrize(
    ("layout", "settings"), [("padded", {"scope": "full"}), ("lazy", {"assistant_only": False}), ("padded", {})]
)
def test_the_kl_of_prompts_without_scores_is_0(policy_model, ref_model, layout, settings):
    data, transform = without_prompt_scores(policy_model, layout), KLRewardTransform(ref_model, **settings)
    own = [plain_log_probs(policy_model, row) for row in WHOLE]
    if layout == "lazy":  # a response may begin with a token that is certain
        own[1][1] = data[1]["log_probs", "full"][1] = 0.0
    out, found = warned_of(lambda: transform(data))
    assert ["the first 2 tokens of prompts" in text for text in found] == [True] * bool(settings)
    kl = [gen - plain_log_probs(ref_model, row) for gen, row in zip(own, WHOLE, strict=True)]
    want = [row[len(prompt) :, None] for row, prompt in zip(kl, PROMPTS, strict=True)]
    assert_near(at_responses(out, "kl_penalty", PROMPTS, RESPONSES), want, **FORWARD)
