"""Scores the trained tokens of a policy loss: the actor with gradient, its reference, and the actor at half the temperature."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm_kl.losses._inputs import INPUTS, KEYS
from torchrl_llm_kl.losses._parts import Part
from torchrl_llm_kl.losses._policy_read import PolicyBatch
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    Model,
    ModelOrScorer,
    RequestFields,
    Sampling,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    ScorerSlot,
    check_distributions,
    check_vocabularies,
    log_probs_only,
)

_NEUTRAL = ScoreOptions()
# The options of the actor that a loss leaves to its user.
_CHOSEN = ("sampling", "dtype", "deterministic", "memory", "entropy")


class PolicyScorers:
    """The scorers of a policy loss. The reference is no submodule of the loss: its parameters are not trained.

    Args:
        actor: the trained model, or a scorer of it with its own settings.
        reference: the model or scorer that the loss compares with.
        options: how the actor is scored.
        tokens_per_batch: of the actor's scorer.
    """

    def __init__(
        self,
        actor: ModelOrScorer,
        reference: Model | LogProbScorer | None,
        options: ScoreOptions | None,
        tokens_per_batch: int | None,
    ) -> None:
        self.given = actor if isinstance(actor, LogProbScorer) else None
        if self.given is not None and tokens_per_batch is not None:
            raise ValueError("actor is a scorer with its own settings: set ['tokens_per_batch'] there.")
        self.reference, self.tokens_per_batch = reference, tokens_per_batch
        self._options = ScoreOptions()
        self._slot, self._reference_slot, self._sharp_slot = ScorerSlot(), ScorerSlot(), ScorerSlot()
        if options not in (None, _NEUTRAL):
            self.options = options
        model = actor if self.given is None else self.given.model
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"actor must be a torch module or a LogProbScorer, got {type(actor).__name__}: train the model in this process."
            )
        check_vocabularies(model, reference)
        if not isinstance(reference, nn.Module):
            self.of_reference()  # cheap to check now
        temperature = self.options.temperature
        if isinstance(reference, LogProbScorer) and reference.options.temperature != temperature:
            raise ValueError(
                f"the policy is scored at temperature {temperature:g} and the reference at "
                f"{reference.options.temperature:g}: a KL compares the two at one temperature, the sampler's."
            )

    @property
    def options(self) -> ScoreOptions:
        """How the actor is scored: its own options if it is a scorer."""
        return self._options if self.given is None else self.given.options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        if self.given is not None:
            raise ValueError("actor is a scorer with its own settings: set its options there.")
        self._options = check_actor_options(options)

    def of_actor(self, actor: nn.Module) -> Scorer:
        """The scorer of the actor."""
        if self.given is not None:
            return self.given
        return self._slot.get(actor, options=self._options, tokens_per_batch=self.tokens_per_batch)

    def of_reference(self) -> Scorer | None:
        """The scorer of the reference, with the actor's settings."""
        if self.reference is None or isinstance(self.reference, LogProbScorer):
            return self.reference
        return self._like_the_actor(self._reference_slot, self.reference, adapters=True)

    def sharp(self, actor: nn.Module) -> Scorer:
        """The scorer of the actor at half the temperature."""
        model = actor if self.given is None else self.given.model
        return self._like_the_actor(self._sharp_slot, model, sampling=Sampling(self.options.temperature / 2))

    def _like_the_actor(self, slot: ScorerSlot, model: Model, **changes: Any) -> Scorer:
        """The scorer of a model with the actor's settings, over all tokens, but for ``changes``."""
        own = {"sampling": self.options.sampling.of_reference, "entropy": False, **changes}
        settings: dict[str, object] = {"options": self.options.but(**own)}
        if getattr(model, "log_probs_only", False) is not True:  # a remote model plans its own batches
            settings["tokens_per_batch"] = self.tokens_per_batch if self.given is None else self.given.tokens_per_batch
        return slot.get(model, **settings)

    # ------------------------------------------------------------------ one step

    def check_needs(self, actor: nn.Module, needs: Collection[str]) -> None:
        """Raise a ValueError if the inputs that parts need cannot be computed from these models."""
        needs = frozenset(needs)
        if self.options.sampling.truncates and needs & {"outcomes", "teacher_divergence"}:
            raise ValueError(
                f"a distillation with {self.options.sampling}: a teacher's tokens that are left out would have no probability "
                "and no gradient, so the divergence to it is not defined. Pass Sampling(temperature) only, and for an "
                "objective that compares with the sampler leave nothing out when sampling."
            )
        exact = needs & {"kl", "teacher_divergence"}
        if len(exact) > 1:
            raise ValueError(
                "an exact KL to the reference and an exact divergence to a teacher need two other models, and reference= is "
                "one: distil from the teacher's top k (distribution='top_k'), or take another estimator of the KL."
            )
        if exact and self.reference is None:
            model = "reference model" if "kl" in exact else "teacher"
            raise ValueError(f"an exact KL is computed from both models: pass the {model} as reference=.")
        if exact:
            check_distributions(actor, getattr(self.reference, "model", None), self.reference)

    def _exact(self, needs: Collection[str], parts: Sequence[Part]) -> dict[str, Any]:
        """Reference, direction and mixture of an exact divergence that a part needs."""
        if "kl" in needs:
            return {"reference": self.of_reference()}
        betas = {float(part.hyper.get("beta", 0.5)) for part in parts if "teacher_divergence" in part.needs}
        if not betas:
            return {}
        if len(betas) > 1:
            raise ValueError(f"exact distillations with beta {sorted(betas)}: expected one beta for all.")
        (beta,) = betas
        ends: dict[float, dict[str, object]] = {0.0: {"direction": "forward"}, 1.0: {"direction": "reverse"}}
        chosen = ends.get(beta, {"direction": "jensen_shannon", "beta": beta})
        return {"reference": self.of_reference(), **chosen}

    def compute(
        self,
        actor: nn.Module,
        parts: Sequence[Part],
        batch: PolicyBatch,
        replayed: RequestFields,
    ) -> dict[str, Tensor]:
        """The inputs that the models compute, gathered; ``replayed`` are fields of the request.

        Raises:
            ValueError: if an input cannot be computed from these models and this sampling.
        """
        there = {*INPUTS} - {*KEYS} | {*batch.data}
        needs = {name for part in parts for name in part.reads(there).required}
        self.check_needs(actor, needs)
        response, sampling, reference = batch.response, self.options.sampling, self.of_reference()
        ref_here = "ref_log_prob" in needs and "ref_log_prob" not in batch.data
        exact = self._exact(needs, parts)
        over_kept = ref_here and sampling.truncates and sampling.reference == "kept"
        apart = over_kept and log_probs_only(self.reference)  # a model in another process is sent the kept tokens
        if over_kept and not apart:
            exact = {"reference": reference}
        if apart and "kept" not in replayed:
            exact = {"return_kept": True}
        if "sharp_log_prob" in needs and sampling.truncates and "kept" not in replayed:
            raise ValueError(
                f"a weighting scores at half the temperature, where {sampling} leaves other tokens: replay what the sampler "
                "kept (RecordKept), or sample without truncation."
            )
        fields: RequestFields = {**replayed, "top_ids": batch.top_ids}
        request = ScoreRequest.of(response.tokens, response.host_mask, **replayed)
        scores = self.of_actor(actor).evaluate(
            ScoreRequest.of(response.tokens, response.host_mask, **fields),
            entropy=self.options.entropy or "entropy" in needs,
            grad=torch.is_grad_enabled(),
            **exact,
        )
        ref = scores.ref_log_prob
        if ref is None and reference is not None and ref_here:
            kept, images = replayed.get("kept", scores.kept) if apart else None, replayed.get("images")
            ref = reference.score(ScoreRequest.of(response.tokens, response.host_mask, kept=kept, images=images))
        computed = {
            "log_prob": scores.log_prob,
            "entropy": scores.entropy,
            "kl" if "kl" in needs else "teacher_divergence": scores.kl,
            "outcomes": scores.outcomes,
            "ref_log_prob": None if "ref_log_prob" in batch.data else ref,
            "sharp_log_prob": self.sharp(actor).score(request) if "sharp_log_prob" in needs else None,
        }
        return {name: response.gather(x.values) for name, x in computed.items() if x is not None}


def check_actor_options(options: ScoreOptions) -> ScoreOptions:
    """``options``; an error if they hold what a loss decides."""
    if not isinstance(options, ScoreOptions):
        raise TypeError(f"options must be ScoreOptions(...), got {options!r:.60}.")
    for name, usual in vars(_NEUTRAL).items():
        value = getattr(options, name)
        if name not in _CHOSEN and value != usual:
            raise ValueError(f"options has {name}={value!r}, which a loss decides: leave it out.")
    return options
