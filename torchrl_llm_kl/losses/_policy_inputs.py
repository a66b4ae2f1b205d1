"""The inputs of a policy loss: the data's entries at the trained tokens, and the models' scores of these tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_finite, finite_total, to_host
from torchrl_llm_kl.losses._objective import INPUTS, KEYS, MASKS, OF_SAMPLER, PER_ROW, PER_TOKEN, LossInputs, Once
from torchrl_llm_kl.losses._parts import Part
from torchrl_llm_kl.losses._token_loss import as_mask
from torchrl_llm_kl.rollouts import (
    Located,
    ResponseTokens,
    TokenReader,
    find_key,
    find_log_probs,
    per_sequence,
    per_token,
    read_top_k,
    require_key,
)
from torchrl_llm_kl.scoring import (
    ByteScorer,
    ByteTeacher,
    Changes,
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

_LOG_PROBS = (*OF_SAMPLER, "behavior_log_prob", "ref_log_prob")
#: Inputs that the scorer computes without checking that they are finite. It checks log-probs itself.
COMPUTED = ("entropy", "kl", "teacher_divergence")
# A teacher's probabilities must add up to 1 within this tolerance. Rounding of float16 log-probs with k = 1024 stays below
# 0.005.
_MASS_TOLERANCE = 0.02
# A warning is issued if a teacher's top k holds less than this share of its probability.
_LITTLE_MASS = 0.9


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """The part of a batch that a policy loss reads.

    Args:
        td: the data with its batch dimensions.
        response: the trained tokens.
        data: input -> its values, gathered ``[S, T]`` and 0 outside the mask, or one per sequence ``[*B]``.
        top_ids: the ids of the teachers' outcomes at all tokens, ``[N, M, k]``.
    """

    td: TensorDictBase
    response: ResponseTokens
    data: dict[str, Tensor]
    top_ids: Tensor | None = None

    def inputs(self, computed: Mapping[str, Tensor]) -> LossInputs:
        """The record of these inputs and of the gathered inputs that the models computed."""
        given = {**self.data, **computed}
        rows = {name: given.pop(name) for name in PER_ROW if name in given}
        inputs = LossInputs.of_clean(mask=self.response.mask, **given)
        return inputs.replace(**rows) if rows else inputs


@dataclass(frozen=True)
class EntryReader:
    """Reads the entries that the parts of a loss need.

    Args:
        parts: the objective, terms and corrections.
        keys: where entries are, by the names of the ``tensor_keys`` of the loss.
        tokens: finds tokens, and log-probs that were not computed.
        of_data: the inputs that no model computes.
        required: optional entries whose key the user changed.
        once: the input that is computed from a whole batch.
        warned: keys of teachers that were already warned of.
    """

    parts: Sequence[Part[object]]
    keys: Mapping[str, NestedKey]
    tokens: TokenReader
    of_data: frozenset[str]
    required: frozenset[str]
    once: Once | None
    warned: set[NestedKey] = field(default_factory=set)

    @property
    def teachers(self) -> list[NestedKey]:
        """The key of each teacher's top k."""
        key = self.keys["top_k"]
        return key if isinstance(key, list) else [key]

    @property
    def asked(self) -> frozenset[str]:
        """The inputs that any part requires, or reads if the data holds them."""
        possible = [part.reads(there) for part in self.parts for there in (INPUTS, ())]
        return frozenset().union(*(reads.among(INPUTS) for reads in possible))

    def read(
        self,
        td: TensorDictBase,
        located: Located,
        responses: Located | None,
        *,
        without: str | None = None,
        check: bool = False,
    ) -> PolicyBatch:
        """Read the inputs that the data holds for the located tokens.

        Args:
            td: the data with its batch dimensions.
            located: all tokens, with a mask of the trained ones.
            responses: all tokens, with a mask of the responses. None for a strategy without responses.

        Keyword Args:
            without: an input that is not read.
            check: check that numbers are finite.

        Raises:
            KeyError: if a required entry is missing.
            ValueError: if a number is not finite, or an entry has another layout.
        """
        places, needs = self._places(td, without)
        within = None if responses is None else responses.host_mask
        flat: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for name, place in places.items():
            if name in PER_ROW:
                rows[name] = cast("Tensor", per_sequence(td, place))
                continue
            # Missing numbers are NaN, which the check of finiteness finds. Only other entries may have one value per row.
            fill, repeats = 0.0 if name in MASKS else math.nan, name not in _LOG_PROBS
            value = per_token(td, place, located.tokens, within, fill=fill, repeats=repeats).detach()
            flat[name] = as_mask(value, self.keys[name]) if name in MASKS else value
        teachers = read_top_k(td, self.teachers, located.tokens, within) if "teacher_outcomes" in needs else None
        response = self._trained(flat, places, located, responses, check=check)
        for name in [name for name, value in rows.items() if check and value.is_floating_point()]:
            entry, advice = f"{name} ({self.keys[name]!r})", "Fix the entry, or mask the sequence out."
            read = response.mask.any(-1)
            check_finite({entry: rows[name]}, read=read, place="sequence {}".format, advice=advice)
        data = {**response.gather_each(flat), **rows}
        if teachers is None:
            return PolicyBatch(td, response, data)
        data["teacher_outcomes"] = response.gather(teachers.log_probs)
        return PolicyBatch(td, response, data, teachers.ids)

    def _places(self, td: TensorDictBase, without: str | None) -> tuple[dict[str, NestedKey], set[str]]:
        """Input -> the entry that holds it, and the required inputs. Raises a KeyError if a required entry is missing."""
        # Corrections and metrics leave out experts, so this mask is read even if no part needs it.
        possible = self.asked.union(_LOG_PROBS, ["expert_mask"]) - {without}
        if find_log_probs(td, self.keys["behavior_log_prob"]) is not None:
            possible |= {"age"}  # metrics of older weights are grouped by it
        ordered = [name for name in KEYS if name in possible]
        places: dict[str, NestedKey] = {}
        for name in ordered:
            key = self.keys[name]
            place = find_log_probs(td, key) if name in _LOG_PROBS else find_key(td, key)
            if place is not None:
                places[name] = place
        there = {*INPUTS} - {*KEYS} | {*places}
        needs = {name for part in self.parts for name in part.reads(there).required}
        for name in ordered:
            if name not in places and name in (needs & self.of_data) | self.required:
                advice = f"Add the entry, or say where it is with set_keys({name}=...)."
                if self.once is not None and self.once.name == name:
                    advice = f"batch_inputs(batch) computes it from a whole batch. {advice}"
                require_key(td, self.keys[name], f"{self.parts[0].name} needs {name}", advice)
        return places, needs

    def _trained(
        self,
        flat: dict[str, Tensor],
        places: Mapping[str, NestedKey],
        located: Located,
        responses: Located | None,
        *,
        check: bool,
    ) -> ResponseTokens:
        """The trained tokens. If a part reads the old log-probs, tokens that the sampler did not score are left out.

        Log-probs of the sampler become NaN in ``flat`` where they were not computed.
        """
        mask, old = located.mask, None
        for name in [name for name in OF_SAMPLER if name in flat]:
            value, key = flat[name], places[name]
            zeros = self.tokens.marks_zeros(key)
            if name != "old_log_prob" and not zeros:
                continue  # unscored tokens are NaN already, and this input changes no mask
            unscored = self.tokens.unscored(value, located.tokens, responses, key)
            if "expert_mask" in flat:  # no policy sampled the experts' tokens
                unscored = unscored & ~flat["expert_mask"]
            flat[name] = torch.where(unscored, math.nan, value) if zeros else value
            if name == "old_log_prob" and any(name in part.reads(flat).among(flat) for part in self.parts):
                old, mask = (value, unscored), mask > unscored  # mask and not unscored
        # One copy to the host carries both the mask and the flag that all numbers are finite.
        named = self.named(flat, flat) if check else {}
        checked = [torch.where(mask, torch.stack(list(named.values())), 0)] if named else []
        total = finite_total(*checked).reshape(1)  # finite unless a number is not, or the sum overflows
        host_mask, total = to_host(mask, total) if old is not None else (located.host_mask, to_host(total)[0])
        if old is not None and host_mask.sum() < located.host_mask.sum():
            value, unscored = old
            self.tokens.warn_of_unscored(value, located.mask & unscored, located.tokens, places["old_log_prob"])
        response = ResponseTokens(located.tokens, mask, host_mask)
        if not math.isfinite(total):  # the slow check finds the number, or that only the sum overflowed
            response.check_finite({name: response.gather(x) for name, x in named.items()})
        return response

    def named(self, given: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """The inputs among ``names`` that a part reads and that must be finite. The keys also name their entries.

        A NaN ``sampler_log_prob`` was not computed, so it is allowed. At experts' tokens, a part that separates experts from
        the policy reads only the current log-probs.
        """
        experts, named = given.get("expert_mask"), dict[str, Tensor]()
        for name in [name for name in PER_TOKEN if name in names and name in given and name not in MASKS]:
            readers, value = [part for part in self.parts if name in part.reads(given).among(given)], given[name]
            if not readers or not value.is_floating_point():
                continue
            if experts is not None and all(part.leaves_out_experts for part in readers):
                value = value.masked_fill(experts, 0)
            if name == "sampler_log_prob":
                value = value.masked_fill(value.isnan(), 0)
            named[f"{name} ({self.keys[name]!r})" if name in KEYS else name] = value
        return named

    def check_scored(self, response: ResponseTokens, inputs: LossInputs) -> None:
        """Reject computed inputs that are not finite, and teachers' outcomes that do not add up to 1.

        Warns once for each teacher whose top k holds little of its probability.
        """
        response.check_finite(self.named(inputs.given, COMPUTED))
        log_p, mask = inputs.get("teacher_outcomes"), inputs.mask.unsqueeze(-1)
        if log_p is None:
            return
        mass = log_p.exp().sum(-1)
        wrong = mask & ~((mass - 1).abs() < _MASS_TOLERANCE)  # also True for NaN
        captured = torch.where(mask, -log_p[..., -1].expm1(), 0).sum((0, 1)) / mask.sum().clamp(min=1)
        some_wrong, some, *means = torch.stack([wrong.any().to(mass), mask.any().to(mass), *captured]).tolist()
        if some_wrong:
            place, teacher = divmod(int(wrong.flatten().nonzero()[0]), len(self.teachers))
            raise ValueError(
                f"the probabilities below {self.teachers[teacher]!r} add up to {float(mass[wrong][0]):.4g} at "
                f"{response.place(place)}, not to 1. Compare the teacher's scope and assistant_only with masking_strategy."
            )
        for key, mean in zip(self.teachers, means, strict=True):
            if some and mean < _LITTLE_MASS and key not in self.warned:
                self.warned.add(key)
                what = f"the top k below {key!r} holds {mean:.2f} of the teacher's probability on average"
                warnings.warn(f"{what}, so the divergence is far too small. Raise the teacher's top_k=.", stacklevel=4)


# ------------------------------------------------------------------ scores

_NEUTRAL = ScoreOptions()
# The options of the actor that the user of a loss may set. The loss sets the others.
_CHOSEN = ("sampling", "dtype", "deterministic", "memory", "entropy", "recompute")


class PolicyScorers:
    """The scorers of a policy loss. The reference is not a submodule of the loss, because its parameters are not trained.

    Args:
        actor: the trained model, or a scorer of it with its own settings.
        reference: the model or scorer that the loss compares with.
        options: how the actor is scored.
        tokens_per_batch: tokens per batch of the actor's scorer.
    """

    def __init__(
        self,
        actor: ModelOrScorer,
        reference: Model | LogProbScorer | None,
        options: ScoreOptions | None,
        tokens_per_batch: int | None,
    ) -> None:
        self.given = actor if isinstance(actor, LogProbScorer) else None
        self.reference, self.tokens_per_batch = reference, tokens_per_batch
        self._options = ScoreOptions() if options is None else check_actor_options(options)
        self._slot, self._reference_slot, self._sharp_slot = ScorerSlot(), ScorerSlot(), ScorerSlot()
        model = actor if self.given is None else self.given.model
        if not isinstance(model, nn.Module):
            raise TypeError(f"actor must be a module, got {type(model).__name__}: train the model in this process.")
        check_vocabularies(model, reference)
        if not isinstance(reference, nn.Module):
            self.of_reference()  # building it checks its settings, which is cheap for anything but a module
        temperature = self.options.temperature
        if isinstance(reference, LogProbScorer) and reference.options.temperature != temperature:
            both = f"{temperature:g} and the reference at {reference.options.temperature:g}"
            raise ValueError(f"the policy is scored at temperature {both}: a KL compares them at the sampler's.")

    @property
    def options(self) -> ScoreOptions:
        """How the actor is scored. A scorer as the actor has its own options."""
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

    def _like_the_actor(self, slot: ScorerSlot, model: Model, **changes: Unpack[Changes]) -> Scorer:
        """The scorer of a model with the actor's settings, over all tokens, except for ``changes``."""
        own: Changes = {"sampling": self.options.sampling.of_reference, "entropy": False, **changes}
        options = self.options.but(**own)
        if log_probs_only(model) and not isinstance(model, nn.Module):  # a remote model plans its own batches
            return slot.get(model, options=options)
        if self.given is None:
            return slot.get(model, options=options, tokens_per_batch=self.tokens_per_batch)
        size, context = self.given.tokens_per_batch, self.given.context
        return slot.get(model, options=options, tokens_per_batch=size, context_parallel=context)

    # ------------------------------------------------------------------ one step

    def check_needs(self, actor: nn.Module, needs: Collection[str]) -> None:
        """Raise a ValueError if these models cannot compute the inputs that the parts need."""
        needs = frozenset(needs)
        if self.options.sampling.truncates and needs & {"outcomes", "teacher_divergence"}:
            missing = "tokens that are left out have no probability"
            raise ValueError(f"a distillation with {self.options.sampling}: {missing}. Pass Sampling(temperature).")
        exact = needs & {"kl", "teacher_divergence"}
        if len(exact) > 1:
            raise ValueError("exact KLs to a reference and to a teacher need two other models, and reference= is one.")
        if exact and self.reference is None:
            model = "reference model" if "kl" in exact else "teacher"
            raise ValueError(f"an exact KL is computed from both models: pass the {model} as reference=.")
        if exact:
            inner = self.reference.model if isinstance(self.reference, LogProbScorer) else None
            check_distributions(actor, inner, None if isinstance(self.reference, ByteTeacher) else self.reference)

    def _exact(self, needs: Collection[str], parts: Sequence[Part[object]]) -> Changes | None:
        """Direction and mixture of the exact divergence that a part needs. None if no part needs one."""
        if "kl" in needs:
            return {}
        betas = {float(part.hyper.get("beta", 0.5)) for part in parts if "teacher_divergence" in part.needs}
        if not betas:
            return None
        if len(betas) > 1:
            raise ValueError(f"exact distillations with beta {sorted(betas)}: expected one beta for all.")
        (beta,) = betas
        # At the ends the mixture is one of the two distributions, and its divergence 0. The plain KLs take their place.
        ends: dict[float, Changes] = {0.0: {"direction": "forward"}, 1.0: {"direction": "reverse"}}
        return ends.get(beta, {"direction": "jensen_shannon", "beta": beta})

    def compute(
        self, actor: nn.Module, parts: Sequence[Part[object]], batch: PolicyBatch, replayed: RequestFields
    ) -> dict[str, Tensor]:
        """The gathered inputs that the models compute. ``replayed`` are fields of the request.

        Raises:
            ValueError: if an input cannot be computed with these models and this sampling.
        """
        there = {*INPUTS} - {*KEYS} | {*batch.data}
        needs = {name for part in parts for name in part.reads(there).required}
        self.check_needs(actor, needs)
        response, sampling, reference = batch.response, self.options.sampling, self.of_reference()
        ref_here = "ref_log_prob" in needs and "ref_log_prob" not in batch.data
        exact = self._exact(needs, parts)
        over_kept = ref_here and sampling.truncates and sampling.reference == "kept"
        # A model in another process cannot share the actor's pass over the head. It is sent the kept tokens.
        apart = over_kept and log_probs_only(self.reference)
        together = exact is not None or (over_kept and not apart)
        entropy = self.options.entropy or "entropy" in needs
        changes: Changes = {"entropy": entropy, "grad": torch.is_grad_enabled(), **(exact or {})}
        if apart and "kept" not in replayed:
            changes["return_kept"] = True
        if "sharp_log_prob" in needs and sampling.truncates and "kept" not in replayed:
            advice = "replay the tokens that the sampler kept (RecordKept)"
            raise ValueError(f"at half the temperature {sampling} leaves other tokens: {advice}.")
        fields: RequestFields = {**replayed, "top_ids": batch.top_ids}
        request, scorer = ScoreRequest.of(response.tokens, response.host_mask, **fields), self.of_actor(actor)
        if exact is not None and isinstance(reference, ByteScorer):
            scores = reference.compare(cast(LogProbScorer, scorer), request, scorer.options.but(**changes))
        else:
            scores = scorer.evaluate(request, reference=reference if together else None, **changes)
        # An exact KL computes the reference's log-probs along with it.
        ref = scores.ref_log_prob
        if ref is None and reference is not None and ref_here:
            kept, images = replayed.get("kept", scores.kept) if apart else None, replayed.get("images")
            ref = reference.score(ScoreRequest.of(response.tokens, response.host_mask, kept=kept, images=images))
        sharp = None
        if "sharp_log_prob" in needs:
            sharp = self.sharp(actor).score(ScoreRequest.of(response.tokens, response.host_mask, **replayed))
        computed = {
            "log_prob": scores.log_prob,
            "entropy": scores.entropy,
            "kl" if "kl" in needs else "teacher_divergence": scores.kl,
            "outcomes": scores.outcomes,
            "ref_log_prob": None if "ref_log_prob" in batch.data else ref,
            "sharp_log_prob": sharp,
        }
        return {name: response.gather(x.values) for name, x in computed.items() if x is not None}


def check_actor_options(options: ScoreOptions) -> ScoreOptions:
    """Return ``options``. Raise a ValueError if they contain a setting that the loss decides."""
    for name, usual in vars(_NEUTRAL).items():
        value = getattr(options, name)
        if name not in _CHOSEN and value != usual:
            raise ValueError(f"options has {name}={value!r}, which a loss decides: leave it out.")
    return options
