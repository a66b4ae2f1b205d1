"""The causes that the doctor names, in words, with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchrl_llm_kl._numerics import check_choice

#: What the doctor names: faults make numbers wrong; the last five are worth knowing.
Cause = Literal[
    "raw_log_probs", "wrong_temperature", "top_p", "top_k", "min_p", "scored_truncation", "stale_weights", "chat_template",
    "few_tokens", "off_by_one", "low_precision", "retokenised", "zeros", "adapter_off", "reference_is_policy", "nan",
    "empty_mask", "not_text", "unreadable", "other_sampling", "mismatch", "truncated_answers", "duplicated_prompts",
    "no_spread", "clipped", "zero_kl",
]  # fmt: skip

TITLES: Mapping[str, str] = {
    "raw_log_probs": "the sampler recorded raw log-probs, before its temperature and truncation",
    "wrong_temperature": "tokens are sampled at another temperature than they are scored at",
    "top_p": "the sampler truncates with top-p, the scorer does not",
    "top_k": "the sampler truncates with top-k, the scorer does not",
    "min_p": "the sampler truncates with min-p, the scorer does not",
    "scored_truncation": "the scorer truncates, the sampler's log-probs do not",
    "stale_weights": "the sampler's weights are not the trainer's",
    "few_tokens": "some tokens carry the whole mismatch, all others agree",
    "chat_template": "sampler and trainer see different prompts: another chat template",
    "off_by_one": "the sampler's log-probs are shifted against the tokens",
    "low_precision": "the sampler computes in low precision",
    "retokenised": "tokens were decoded and encoded again, or one was left out",
    "zeros": "log-probs are exactly 0 where nothing was computed",
    "adapter_off": "the sampler runs without the adapter",
    "reference_is_policy": "the reference is the policy",
    "nan": "log-probs are NaN or infinite",
    "not_text": "tokens stand for images, video or audio",
    "empty_mask": "no token is masked in",
    "unreadable": "log-probs do not fit the tokens",
    "other_sampling": "tokens are not samples of the scored distribution",
    "mismatch": "sampler and trainer disagree",
    "truncated_answers": "most answers are cut off",
    "duplicated_prompts": "some prompts have more answers than others",
    "no_spread": "groups whose rewards are all equal",
    "clipped": "most tokens are clipped",
    "zero_kl": "the KL to the reference is exactly 0",
}

REMEDIES: Mapping[str, str] = {
    "raw_log_probs": "Let the engine return log-probs after temperature and truncation (vLLM: --logprobs-mode "
    "processed_logprobs), or score the sampled tokens anew as they were sampled: RetrieveLogProb(policy, sampling=...).",
    "top_p": "Score what is sampled: sampling=Sampling(..., top_p=...), or sample with top_p=1.",
    "top_k": "Score what is sampled: sampling=Sampling(..., top_k=...), or sample from all tokens (transformers: top_k=0).",
    "min_p": "Score what is sampled: sampling=Sampling(..., min_p=...), or sample with min_p=0.",
    "scored_truncation": "Sample with the same truncation, or score without: temperature= in place of sampling=.",
    "stale_weights": "Push the weights to the sampler before it collects, or correct for them: "
    "PolicyLoss(corrections=[ImportanceWeights()]). A quantised sampler, or another model, looks the same.",
    "few_tokens": "Look at these tokens (inspect_tokens), or mask them out. If all from one on differ, the sampler saw other "
    "tokens before: torchrl's wrapper leaves a sampled pad token out, for one. Older weights would change every answer.",
    "chat_template": "Give sampler and trainer the same chat template, system prompt and add_generation_prompt, or pass the "
    "sampler's token ids on instead of text.",
    "low_precision": "Run sampler and trainer in one precision (dtype= of LogProbScorer), or correct for it: "
    "PolicyLoss(corrections=[ImportanceWeights()]).",
    "retokenised": "Pass the sampler's token ids on (('tokens', 'full')), all of them, instead of its text.",
    "zeros": "Have the engine return a score of every token, also where a prefix was cached, or compute them: RetrieveLogProb.",
    "adapter_off": "Send the adapter to the engine (a LoRA request), or merge it before the weights are pushed.",
    "reference_is_policy": "Pass a frozen copy (prepare_reference), or ref_model='base' for a policy with adapters.",
    "nan": "Look at the named column: a prompt that was cut to nothing, or an overflow in half precision.",
    "not_text": "Leave such sequences out, or have the engine that sampled them return their log-probs: here a model is scored "
    "on token ids alone.",
    "empty_mask": "Add ('masks', 'all_assistant_mask') or ('tokens', 'prompt'), or the tokenizer that rendered the tokens.",
    "unreadable": "Store one log-prob per token of ('tokens', 'full'), or rows of the response alone.",
    "other_sampling": "Compare the engine's sampling settings with temperature= and sampling= of the scorer; pass policy= to "
    "have them fitted.",
    "mismatch": "Pass policy= (and tokenizer=) to have the cause named.",
    "truncated_answers": "Raise max_new_tokens, or mask truncated answers out of the loss.",
    "duplicated_prompts": "Check the data loader: groups are made by equal prompts, so a repeated prompt makes a larger group.",
    "no_spread": "Group advantages are 0 there: choose prompts of other difficulty, or filter such groups, as DAPO does.",
    "clipped": "Fewer updates per batch, a smaller learning rate, or fresher samples.",
    "zero_kl": "As expected before the first update. Later, the reference follows the policy: pass a frozen copy.",
}
#: Confidence from which a fault counts.
SURE = 0.5


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        cause: one of :data:`Cause`.
        confidence: in [0, 1].
        evidence: the numbers that it rests on.
        remedy: what to change.
        severity: ``"fault"``: numbers are wrong; ``"note"``: worth knowing.
    """

    cause: str
    confidence: float
    evidence: dict[str, float | str]
    remedy: str
    severity: str = "fault"

    @property
    def title(self) -> str:
        """The cause in words."""
        return TITLES[self.cause]

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "cause": self.cause, "title": self.title, "confidence": self.confidence, "severity": self.severity,
            "evidence": dict(self.evidence), "remedy": self.remedy,
        }  # fmt: skip


def finding(
    cause: str, confidence: float, severity: str = "fault", remedy: str | None = None, **evidence: float | str
) -> Finding:
    """A finding with the remedy of its cause."""
    check_choice(get_args(Cause), cause=cause)
    return Finding(cause, max(0.0, min(float(confidence), 0.99)), evidence, remedy or REMEDIES[cause], severity)
