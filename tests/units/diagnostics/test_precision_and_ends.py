"""The doctor on rounding (noise of bfloat16 weights, a bfloat16 sampler) and on beginnings and ends of texts.

Thresholds were chosen on seeds from 100 on, and with a pre-trained model.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from seeded import ANSWERS, clean, make_model, make_prompts, make_tokenizer, sample
from torchrl_llm_kl import LogProbScorer, diagnose
from torchrl_llm_kl.diagnostics._rescored import COMMON_TEMPLATES, prompt_messages, renderers
from toy_rollouts import make_model as make_bos_model, plain_log_probs
from toy_tokenizer import CHATML, build_bos_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_noise_is_not_reported_as_older_weights(family: str) -> None:
    """With twelve layers, the decode of transformers and the packs differ by 0.05 nats on newer processors.

    Older processors have no bfloat16 products and round equally in all shapes.
    """
    model = make_model(family, 2, num_hidden_layers=12).to(torch.bfloat16)
    batch = sample(model, make_prompts(2, 2), 2).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer())
    assert diagnosis.faults == (), diagnosis
    assert diagnosis.forwards == (3 if diagnosis.measures["mismatch/rms"] > 0.04 else 0)


@pytest.mark.parametrize("common", [0.25, 0.0])
def test_a_bfloat16_sampler_whose_kernels_round_differently(common: float) -> None:
    """Both engines share a quarter of the rounding. Without a shared part, other weights are as likely."""
    model, rollout = clean("llama", 3)
    rows = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.answers, strict=True)]
    masks = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, rollout.prompts, strict=True)]

    def scored(dtype: torch.dtype) -> Tensor:
        scores = LogProbScorer(make_model("llama", 3).to(dtype)).score(rows, masks)
        return scores.values[torch.cat(masks)].double()

    exact = scored(torch.float32)
    own = scored(torch.bfloat16) - exact
    other = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))]
    recorded = exact + common * own + (1 - common**2) ** 0.5 * other
    biased = replace(rollout, log_probs=list((recorded - 0.02).split([len(answer) for answer in rollout.answers])))
    causes = {each.cause for each in diagnose(biased.batch(), policy=model).findings}
    assert "low_precision" not in causes, "rounding has no bias"
    lengths = [len(answer) for answer in rollout.answers]
    batch = replace(rollout, log_probs=list(recorded.split(lengths))).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer())
    assert diagnosis.worst is not None
    if not common:
        uncertain = {each.cause: each.confidence for each in diagnosis.findings if each.cause != "mismatch"}
        assert diagnosis.worst.cause != "low_precision", diagnosis
        assert uncertain["stale_weights"] > 0.3, diagnosis
    else:
        assert diagnosis.worst.cause == "low_precision", diagnosis
        assert 0.1 < diagnosis.worst.evidence["correlation"] < 0.4
        assert diagnosis.worst.evidence["size_of_rounding"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sampler_whose_products_are_in_bfloat16(family: str) -> None:
    """Autocast keeps the weights in float32, so its errors are not those of a bfloat16 copy."""
    model = make_model(family, 1)
    with torch.autocast("cpu", torch.bfloat16):
        batch = sample(model, make_prompts(4, 1), 1).batch()
    worst = diagnose(batch, policy=model).worst
    assert worst is not None
    assert (worst.cause, worst.confidence > 0.8) == ("low_precision", True), worst


@pytest.mark.parametrize("scale", [0.001, 0.02])
def test_changes_of_the_size_of_adapters_are_stale_weights(scale: float) -> None:
    """Random changes of rank 4. Their size, 0.02 or 0.4 nats, is below or above that of rounding, and uncorrelated with it."""
    model, rollout = clean("llama", 0)
    policy, rng = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                change = torch.randn(len(weight), 4, generator=rng) @ torch.randn(4, weight.shape[1], generator=rng)
                weight += change * (scale * weight.std() / change.std())
    worst = diagnose(rollout.batch(slice(32)), policy=policy).worst
    assert worst is not None
    assert (worst.cause, worst.confidence > 0.7) == ("stale_weights", True), worst


@pytest.mark.parametrize(
    ("size", "bias", "cause"),
    [(0.045, 0.0, "low_precision"), (0.1, 0.0, "mismatch"), (0.045, 0.03, "mismatch"), (0.6, 0.0, "mismatch")],
)
def test_rounding_and_other_weights_without_a_policy(size: float, bias: float, cause: str) -> None:
    """Two recorded log-probs of each token differ by noise. The causes of a biased or larger one cannot be told apart."""
    rollout = clean("llama", 0)[1]
    noise = [
        size * torch.randn(len(x), generator=torch.Generator().manual_seed(i)) for i, x in enumerate(rollout.log_probs)
    ]
    trainer = [(x + bias + each).clamp(max=-1e-3) for x, each in zip(rollout.log_probs, noise, strict=True)]
    batch = rollout.batch()
    batch["next", "sampler_log_probs"] = batch["log_probs"]
    batch["next", "log_probs"] = replace(rollout, log_probs=trainer).batch()["log_probs"]
    diagnosis = diagnose(batch)
    confidence = {each.cause: each.confidence for each in diagnosis.findings}
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == cause, diagnosis
    assert confidence.get("stale_weights", 0.0) < 0.5
    assert (confidence.get("low_precision", 0.0) > confidence.get("stale_weights", 0.0)) == (cause == "low_precision")


# ------------------------------------------------------------------ beginnings


def bos_batch(tokenizer: Any, model: Any, sampled: int, stored: int, template: str | None) -> TensorDict:
    """A batch that stores ``stored`` BOS tokens per prompt, with the log-probs after ``sampled`` BOS tokens."""
    rng, rows, log_probs, bos = torch.Generator().manual_seed(4), [], [], tokenizer.bos_token_id
    for i in range(12):
        question = "abcdefghijkl"[: 3 + i]
        if template is not None:
            messages = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(question, add_special_tokens=False)
        answer = torch.randint(262, 286, (12,), generator=rng).tolist()
        seen = plain_log_probs(model, torch.tensor([bos] * sampled + prompt + answer))[sampled:]
        rows.append((torch.tensor([bos] * stored + prompt), torch.tensor([bos] * stored + prompt + answer)))
        log_probs.append(torch.cat([torch.zeros(stored + len(prompt)), seen[len(prompt) :]]))
    prompts, full = zip(*rows, strict=True)
    out, nested = TensorDict(batch_size=[len(rows)]), torch.nested.nested_tensor
    out["tokens", "prompt"], out["tokens", "full"] = nested(list(prompts)), nested(list(full))
    out["log_probs", "full"] = nested(log_probs)
    return out


@pytest.mark.parametrize("template", [None, CHATML], ids=["text", "chatml"])
@pytest.mark.parametrize(
    ("sampled", "stored", "name"), [(2, 1, "more"), (1, 2, "less"), (1, 0, "more"), (0, 1, "less")]
)
def test_an_additional_or_missing_bos_is_named(sampled: int, stored: int, name: str, template: str | None) -> None:
    tokenizer = build_bos_tokenizer(template)
    model = make_bos_model(tokenizer, 0)
    batch = bos_batch(tokenizer, model, sampled, stored, template)
    diagnosis = diagnose(batch, policy=model, tokenizer=tokenizer)
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == "chat_template", diagnosis
    assert diagnosis.worst.evidence["sampler_s_prompt"] == f"one beginning-of-text token {name}"


@pytest.mark.parametrize("stored", [1, 2])
def test_the_policy_s_own_bos_is_tried_without_a_tokenizer(stored: int) -> None:
    tokenizer = build_bos_tokenizer()
    model = make_bos_model(tokenizer, 0)
    model.config.bos_token_id = tokenizer.bos_token_id
    batch = bos_batch(tokenizer, model, 3 - stored, stored, None)
    worst = diagnose(batch, policy=model).worst
    assert worst is not None
    assert (worst.cause, worst.confidence > 0.95) == ("chat_template", True), worst


@pytest.mark.parametrize(("stored", "seen"), [("ChatML", "Zephyr"), ("Gemma", "ChatML"), ("the text alone", "Alpaca")])
def test_templates_are_tried_if_the_tokenizer_has_none(stored: str, seen: str) -> None:
    """The message is read from the prompt by the markers of a common template, or is the whole prompt."""
    model, bare = make_model("llama", 0), make_tokenizer.__wrapped__()
    bare.chat_template = None
    rollout = sample(model, make_prompts(4, 0, COMMON_TEMPLATES[seen]), 0)
    prompts = [each for each in make_prompts(4, 0, COMMON_TEMPLATES[stored]) for _ in range(ANSWERS)]
    worst = diagnose(replace(rollout, prompts=prompts).batch(), policy=model, tokenizer=bare).worst
    assert worst is not None
    assert (worst.cause, worst.evidence["sampler_s_prompt"]) == ("chat_template", seen)
    assert worst.confidence > 0.95


def test_common_templates_keep_the_beginning_of_the_prompt() -> None:
    tokenizer = build_bos_tokenizer(None)
    bos = tokenizer.bos_token_id
    prompt = [
        bos,
        *tokenizer.encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False),
    ]
    messages = prompt_messages(tokenizer, prompt, bos)
    assert messages == [{"role": "user", "content": "abc"}]
    rendered = {name: render(prompt, messages) for name, render in renderers(tokenizer, bos)}
    assert rendered["ChatML"] == prompt
    assert rendered["the text alone"] == tokenizer.encode("abc")  # with one BOS


@pytest.mark.parametrize(("fades", "cause"), [(True, "chat_template"), (False, "stale_weights")])
def test_a_difference_that_fades_along_the_answers_is_another_prompt(fades: bool, cause: str) -> None:
    """No template explains the difference of 0.6 nats at the first tokens, or of 0.3 nats at all of them."""
    model, rollout = clean("llama", 0)
    rng, log_probs = torch.Generator().manual_seed(0), []
    for row in rollout.log_probs:
        place = torch.arange(len(row))
        size = 0.6 * 0.9**place if fades else torch.full((len(row),), 0.3)
        log_probs.append(row - (size * torch.randn(len(row), generator=rng)).abs())
    worst = diagnose(
        replace(rollout, log_probs=log_probs).batch(slice(32)), policy=model, tokenizer=make_tokenizer()
    ).worst
    assert worst is not None
    assert worst.cause == cause, worst


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("lengths", "cause"), [([5, 6, 7, 8, 8], "no_end_tokens"), ([8, 8, 8, 8, 6], "truncated_answers")]
)
def test_short_answers_without_end_tokens_are_not_truncated(lengths: list[int], cause: str) -> None:
    """No answer ends with an end token. 2 or 4 of the 5 answers are as long as the longest one."""
    full = [torch.arange(10, 12 + n) for n in lengths]
    tokens = {"prompt": torch.nested.nested_tensor([row[:2] for row in full]), "full": torch.nested.nested_tensor(full)}
    diagnosis = diagnose(TensorDict({"tokens": tokens}, batch_size=[5]), tokenizer=build_bos_tokenizer())
    found = {each.cause: each for each in diagnosis.findings}
    assert set(found) & {"no_end_tokens", "truncated_answers"} == {cause}
    assert found[cause].evidence["answers/truncated"] == 1
    assert ("padding token" in found[cause].remedy) == (cause == "no_end_tokens")


@pytest.mark.parametrize(("size", "stale"), [(0.06, False), (0.6, True)])
def test_a_policy_in_bfloat16_whose_sampler_rounds_differently(size: float, stale: bool) -> None:
    """The policy's own rounding is unknown. Small unbiased noise may be rounding, and larger noise is not."""
    model, rollout = clean("llama", 3)
    policy = model.to(torch.bfloat16)
    rows = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.answers, strict=True)]
    masks = torch.cat([torch.arange(len(r)) >= len(p) for r, p in zip(rows, rollout.prompts, strict=True)])
    own = LogProbScorer(policy).score(rows, masks).values[masks].double()
    noise = size * torch.randn(len(own), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    recorded = (own + noise - noise.square().mean() / 2).clamp(max=0)
    batch = replace(rollout, log_probs=list(recorded.split([len(answer) for answer in rollout.answers]))).batch()
    found = {each.cause: each.confidence for each in diagnose(batch, policy=policy).findings}
    assert (found.get("stale_weights", 0.0) > 0.5) == stale, found
    assert ("low_precision" in found) != stale, found
