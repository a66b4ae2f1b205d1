"""The policy loss: an actor, an objective and further terms on the entries of a TensorDict."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives.common import LossModule
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_finite, check_not_a_name, finite_total, masked_mean, send, to_host
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.losses._arithmetic import LARGEST_LOG_RATIO, Aggregation
from torchrl_llm_kl.losses._inputs import (
    INPUTS,
    KEYS,
    MASKS,
    OF_SAMPLER,
    PER_OUTCOME,
    PER_ROW,
    PER_TOKEN,
    LossInputs,
    dummy_inputs,
)
from torchrl_llm_kl.losses._objective import LossTerm, Once, Terms, get_objective, spec_of
from torchrl_llm_kl.losses._parts import (
    Correction,
    Part,
    RolloutArgs,
    TermPart,
    device_of,
    name_of,
    rollout_corrections,
)
from torchrl_llm_kl.losses._token_loss import LossOutput, TokenLoss, as_mask, merge_metrics, with_graph
from torchrl_llm_kl.losses.corrections import apply_correction, correction_metrics, mismatch_metrics
from torchrl_llm_kl.ragged import own_leaves
from torchrl_llm_kl.rollouts import (
    TOKENS_FULL,
    MaskingStrategy,
    ModelInterface,
    ResponseTokens,
    TokenisingOptions,
    find_key,
    find_log_probs,
    mismatch,
    per_sequence,
    per_token,
    read_top_k,
    require_key,
    top_k_entries,
)
from torchrl_llm_kl.scoring import (
    Images,
    KeptTokens,
    LogProbScorer,
    Model,
    ModelOrScorer,
    RequestFields,
    RoutedExperts,
    Sampling,
    ScoredStep,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    ScorerSlot,
    ScoringContext,
    check_distributions,
    check_vocabularies,
    log_probs_only,
    read_fields,
    warn_of_mismatch,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.losses import ObjectiveName, PolicyArgs

_KEYS: dict[str, NestedKey] = {"tokens": TOKENS_FULL, **KEYS}
_KEYS |= {name: name for name in ("loss_mask", "denominators", "kept", "top_k", "routed_experts", "images")}
# Names of torchrl's GRPOLoss.
_KEY_ALIASES = {"action": "tokens", "sample_log_prob": "old_log_prob", "ref_log_probs": "ref_log_prob"}
_LOG_PROBS = (*OF_SAMPLER, "ref_log_prob")
# A teacher's probabilities add up to 1 within this; log-probs in float16 over k = 1024 to 0.005.
_MASS_TOLERANCE = 0.02
# Below this share of a teacher's probability a top k gives a warning.
_LITTLE_MASS = 0.9
_NEUTRAL = ScoreOptions()
# The options of the actor that a loss leaves to its user.
_CHOSEN = ("sampling", "dtype", "deterministic", "memory", "entropy")
# Of the scorer, which has checked the log-probs itself.
_COMPUTED = ("entropy", "kl", "teacher_divergence")
_RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_q05": 0.05, "ratio_median": 0.5, "ratio_q95": 0.95, "ratio_max": 1.0}


class PolicyLoss(TokenLoss):
    r"""A policy loss for language models: an objective, further terms, and their aggregation over tokens.

    Current log-probs come from the scoring engine with gradient: shared prompts are forwarded once, the head runs on
    masked-in tokens only, and ``[B, T, V]`` never exists. Rollouts may be padded, nested or lazily stacked, with any number of
    batch dimensions.

    Args:
        actor: any model that a :class:`~torchrl_llm_kl.LogProbScorer` takes, or such a scorer with its own settings.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`, or a function of the same protocol.

    Keyword Args:
        terms: :class:`~torchrl_llm_kl.losses.KLToReference`, :class:`~torchrl_llm_kl.losses.KLToSampler`,
            :class:`~torchrl_llm_kl.losses.DivergenceToTeacher`, :class:`~torchrl_llm_kl.losses.EntropyBonus`, or functions of
            the protocol of objectives.
        corrections: factors of the objective, or functions that return them: :class:`~torchrl_llm_kl.losses.ImportanceWeights`,
            :class:`~torchrl_llm_kl.losses.RejectionMask`, :class:`~torchrl_llm_kl.losses.OffPolicySequenceMask`,
            :class:`~torchrl_llm_kl.losses.TopEntropyMask`. verl's settings (``rollout_is="token"``, ``rollout_rs=...``) add
            theirs; see :func:`~torchrl_llm_kl.losses.rollout_corrections`.
        aggregation: see :func:`~torchrl_llm_kl.losses.aggregate`; by default the objective's own.
        max_len: the longest possible response in tokens; required by ``seq-mean-token-sum-norm``, refused without it.
        masking_strategy: which tokens are trained. ``"sft"``: the response of each step; ``"rlhf"``: all assistant turns,
            earlier ones too; ``"generic"``: all but the first token of each sequence. An optional entry ``loss_mask``
            removes tokens from these.
        reference: a model or scorer with the same vocabulary, for an exact KL, and for reference log-probs that the data
            lacks; refused if no part reads either. Its parameters are not trained. For a distillation with
            ``distribution="exact"`` it is the teacher.
        options: how the policy is scored, such as ``ScoreOptions(Sampling(0.7, top_k=50), dtype=torch.bfloat16)``: log-probs,
            entropies and KLs are over what temperature, top-k, top-p and min-p of its ``sampling`` leave, and what the sampler
            recorded (entry ``kept``) is replayed where the data holds it. ``entropy=True`` reports the policy's entropy even
            if no part of the loss needs it, at the cost of another sum over the vocabulary. A scorer has its own.
        tokens_per_batch: see :class:`~torchrl_llm_kl.LogProbScorer`. A service as the reference has its own ``max_tokens``
            instead.
        functional: keep the actor's parameters apart from its module, under ``actor_network_params``, as torchrl's losses
            do. The default False is required for FSDP and costs nothing.
        hyper: the objective's hyper-parameters. Numbers are buffers: saved, and changed in place by assignment
            (``loss.clip_high = 0.3``), as is ``loss.kl_to_ref_coeff``. Required entries and reported names follow such changes.

    Keys (``set_keys``): ``tokens`` (or ``action``), ``old_log_prob`` (``sample_log_prob``), ``ref_log_prob``
    (``ref_log_probs``), ``sampler_log_prob``, ``advantage``, ``expert_mask``, ``loss_mask``, ``selected``, ``pair_id``,
    ``chosen``, ``reference_point``, ``match_id``, ``denominators``, ``kept`` (the parent of ``"counts"`` and ``"ids"``),
    ``top_k`` (a teacher's, the key of :class:`~torchrl_llm_kl.TopK`; a list of keys for several teachers),
    ``routed_experts``, ``images``. An entry is also found on the other side of ``"next"``; ``top_k``, ``kept`` and
    ``routed_experts`` are read below ``"next"`` first, where an env writes them. Log-probs are also found under
    ``"response"`` without a ``"full"``, as TorchRL's wrappers store them. Where the data holds ``routed_experts``
    ``[*B, T, L, k]``, the actor, a mixture of experts, uses these experts; see ``docs/routing.md``.

    Outputs:
        A :class:`~torchrl_llm_kl.losses.LossOutput`: ``loss_<name>`` for each term, 0-dim (per token with aggregation
        ``"none"``), whose sum is ``out.total_loss``; and metrics over the masked-in tokens, without graph: the objective's
        own, ``ESS``, ``ratio_*`` quantiles, ``kl_to_sampler``, ``kl_to_ref``, ``entropy``, ``num_tokens``,
        ``num_sequences``; with corrections also :func:`~torchrl_llm_kl.losses.correction_metrics`; for data with
        ``sampler_log_prob`` also :func:`~torchrl_llm_kl.losses.mismatch_metrics`, of
        ``old_log_prob`` or else of the current policy.

    Raises:
        TypeError: for an unknown hyper-parameter.
        ValueError: if one is out of range, or an argument has no effect; on data, if lengths differ or a masked-in number is
            not finite.
        KeyError: on data, if a required entry is missing.

    Warns:
        SamplerMismatchWarning: if the actor is a wrapper that is known to sample otherwise than is scored.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm_kl.losses import EntropyBonus, PolicyLoss
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> full = torch.tensor([[3, 4, 5], [3, 4, 6]])
        >>> tokens = TensorDict(prompt=full[:, :2], full=full, batch_size=[2])
        >>> data = TensorDict(tokens=tokens, advantage=torch.tensor([1.0, -1.0]), batch_size=[2])
        >>> loss = PolicyLoss(model, "gpg", terms=[EntropyBonus(0.01)])
        >>> sorted(key for key in loss(data).keys() if key.startswith("loss_"))
        ['loss_entropy', 'loss_objective']

    .. seealso:: :meth:`count`, for losses of micro-batches that add up to the batch's, and :meth:`batch_inputs`, for
        objectives that compare an answer with the whole batch.
    """

    _AcceptedKeys = make_dataclass(
        "_AcceptedKeys",
        [(name, NestedKey, key) for name, key in _KEYS.items()],
        bases=(LossModule._AcceptedKeys,),
        namespace={"__module__": __name__, "__qualname__": "PolicyLoss._AcceptedKeys"},  # for pickle
    )

    actor_network: nn.Module
    actor_network_params: Any
    target_actor_network_params: Any

    def __init__(
        self,
        actor: ModelOrScorer,
        objective: ObjectiveName | Callable[..., Terms] = "ppo",
        *,
        terms: Sequence[Part | Callable[..., Terms]] = (),
        corrections: Sequence[Correction | Callable[..., tuple[Tensor, dict[str, Tensor]]]] = (),
        aggregation: Aggregation | None = None,
        max_len: int | None = None,
        masking_strategy: MaskingStrategy = "sft",
        reference: Model | LogProbScorer | None = None,
        options: ScoreOptions | None = None,
        tokens_per_batch: int | None = None,
        functional: bool = False,
        **hyper: Unpack[PolicyArgs],
    ) -> None:
        check_not_a_name(actor=actor, reference=reference)
        function = get_objective(objective) if isinstance(objective, str) else objective
        spec = spec_of(function)
        own: Json = dict(hyper)
        rollout: Json = {name: own.pop(name) for name in RolloutArgs.__annotations__ if name in own}
        if spec is not None:
            spec.check_used(own)
            aggregation = aggregation or spec.aggregation
        factors = [x if isinstance(x, Part) else Correction(x) for x in (*corrections, *rollout_corrections(**rollout))]
        parts = [term if isinstance(term, Part) else TermPart(term) for term in terms]
        for name, kind, given in (("terms", TermPart, parts), ("corrections", Correction, factors)):
            wrong = [x for x in given if not isinstance(x, kind)]
            if wrong:
                other = "corrections" if name == "terms" else "terms"
                raise TypeError(f"{name} must not hold a {type(wrong[0]).__name__}: pass it in {other}=.")
        super().__init__(aggregation=aggregation or "token-mean", max_len=max_len, masking_strategy=masking_strategy)
        self._options, self._tokens_per_batch, self._functional = ScoreOptions(), tokens_per_batch, functional
        self._set_models(actor, reference, options)
        self.objective = TermPart(function, **own)
        self.terms, self.corrections = nn.ModuleList(parts), nn.ModuleList(factors)
        self._little_mass: set[NestedKey] = set()  # teachers that a warning was given for
        exposed: dict[str, tuple[Part, str]] = {name: (self.objective, name) for name in self.objective.names}
        for part in self._parts[1:]:
            prefix = name_of(part.function).removesuffix("_bonus")
            exposed |= {f"{prefix}_{name}": (part, name) for name in part.names}
        self._check_reference()
        if reference is not None and self._needs.isdisjoint(("ref_log_prob", "kl", "teacher_divergence")):
            raise ValueError("reference has no effect: no part of the loss compares with it. Leave reference out.")
        self._check_max_len(self._dry_run()[1])
        self._expose(exposed)
        if self._needs & {"advantage", "old_log_prob"}:  # of samples of the policy
            warn_of_mismatch(self.actor_network, self.sampling, trains=True, stacklevel=2)

    def _set_models(
        self, actor: ModelOrScorer, reference: Model | LogProbScorer | None, options: ScoreOptions | None
    ) -> None:
        self._slot, self._reference_slot, self._sharp_slot = ScorerSlot(), ScorerSlot(), ScorerSlot()
        self._given_scorer = None
        if isinstance(actor, LogProbScorer):
            asked = {"tokens_per_batch": self._tokens_per_batch is not None, "functional": self._functional}
            if changed := [name for name, given in asked.items() if given]:
                raise ValueError(f"actor is a scorer with its own settings: set {changed} there.")
            self._given_scorer, actor = actor, actor.model
        if options not in (None, _NEUTRAL):
            self.options = options
        if not isinstance(actor, nn.Module):
            raise TypeError(
                f"actor must be a torch module or a LogProbScorer, got {type(actor).__name__}: train the model in this process."
            )
        if self._functional:
            self.convert_to_functional(actor, "actor_network", create_target_params=False)
        else:
            self.actor_network = actor
        check_vocabularies(actor, reference)
        self.__dict__["_reference"] = reference  # no submodule: its parameters are not trained
        if not isinstance(reference, nn.Module):  # cheap to check now
            self._reference_scorer  # noqa: B018
        temperature = self.sampling.temperature
        if isinstance(reference, LogProbScorer) and reference.options.temperature != temperature:
            raise ValueError(
                f"the policy is scored at temperature {temperature:g} and the reference at "
                f"{reference.options.temperature:g}: a KL compares the two at one temperature, the sampler's."
            )

    @property
    def scorer(self) -> Scorer:
        """The scorer of the actor."""
        settings = {"options": self._options, "tokens_per_batch": self._tokens_per_batch}
        return self._given_scorer or self._slot.get(self.actor_network, **settings)

    @property
    def options(self) -> ScoreOptions:
        """How the actor is scored: its own options if it is a scorer."""
        return self._options if self._given_scorer is None else self._given_scorer.options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        if self._given_scorer is not None:
            raise ValueError("actor is a scorer with its own settings: set its options there.")
        self._options = check_actor_options(options)

    @property
    def sampling(self) -> Sampling:
        """How the scored tokens were sampled."""
        return self.options.sampling

    @property
    def reference(self) -> Model | LogProbScorer | None:
        """The reference model or scorer, None if there is none."""
        return self.__dict__["_reference"]

    def _like_the_actor(self, slot: ScorerSlot, model: Model, **changes: Any) -> Scorer:
        """The scorer of a model with the actor's settings, over all tokens, but for ``changes``."""
        given, sampling = self._given_scorer, self.sampling.of_reference
        own: dict[str, object] = {"options": self.options.but(**{"sampling": sampling, "entropy": False, **changes})}
        if getattr(model, "log_probs_only", False) is not True:  # a remote model plans its own batches
            own["tokens_per_batch"] = self._tokens_per_batch if given is None else given.tokens_per_batch
        return slot.get(model, **own)

    @property
    def _reference_scorer(self) -> Scorer | None:
        reference = self.reference
        if reference is None or isinstance(reference, LogProbScorer):
            return reference
        return self._like_the_actor(self._reference_slot, reference, adapters=True)

    @property
    def _sharp_scorer(self) -> Scorer:
        """The scorer of the actor at half the temperature."""
        model = self.actor_network if self._given_scorer is None else self._given_scorer.model
        return self._like_the_actor(self._sharp_slot, model, sampling=Sampling(self.sampling.temperature / 2))

    @property
    def once(self) -> Once | None:
        """The input that :meth:`batch_inputs` computes once for a whole batch; None if the objective has none."""
        spec = spec_of(self.objective.function)
        return None if spec is None else spec.once

    @property
    def _parts(self) -> list[Part]:
        return [self.objective, *self.terms, *self.corrections]

    @property
    def _needs(self) -> set[str]:
        """The inputs that the parts require under their current hyper-parameters."""
        return {name for part in self._parts for name in part.needs}

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that a part of the loss requires, or reads if the data holds them."""
        possible = [part.reads(there) for part in self._parts for there in (INPUTS, ())]
        return frozenset().union(*(reads.among(INPUTS) for reads in possible))

    @property
    def _teachers(self) -> list[NestedKey]:
        """The key of each teacher's top k."""
        key = self.tensor_keys.top_k
        return key if isinstance(key, list) else [key]

    def _check_reference(self) -> None:
        if self.sampling.truncates and self._needs & {"outcomes", "teacher_divergence"}:
            raise ValueError(
                f"a distillation with {self.sampling}: a teacher's tokens that are left out would have no probability and no "
                "gradient, so the divergence to it is not defined. Pass Sampling(temperature) alone, and for an "
                "objective that compares with the sampler leave nothing out when sampling."
            )
        exact = self._needs & {"kl", "teacher_divergence"}
        if not exact:
            return
        if len(exact) > 1:
            raise ValueError(
                "an exact KL to the reference and an exact divergence to a teacher need two other models, and reference= is "
                "one: distil from the teacher's top k (distribution='top_k'), or take another estimator of the KL."
            )
        if self.reference is None:
            model = "reference model" if "kl" in exact else "teacher"
            raise ValueError(f"an exact KL is computed from both models: pass the {model} as reference=.")
        check_distributions(self.actor_network, getattr(self.reference, "model", None), self.reference)

    def _exact(self) -> dict[str, Any]:
        """Reference, direction and mixture of an exact divergence that a part needs."""
        if "kl" in self._needs:
            return {"reference": self._reference_scorer}
        betas = {float(part.hyper.get("beta", 0.5)) for part in self._parts if "teacher_divergence" in part.needs}
        if not betas:
            return {}
        if len(betas) > 1:
            raise ValueError(f"exact distillations with beta {sorted(betas)}: expected one beta for all.")
        (beta,) = betas
        ends: dict[float, dict[str, object]] = {0.0: {"direction": "forward"}, 1.0: {"direction": "reverse"}}
        chosen = ends.get(beta, {"direction": "jensen_shannon", "beta": beta})
        return {"reference": self._reference_scorer, **chosen}

    def set_keys(self, **kwargs: Any) -> None:
        """Change where entries are read. The names are listed under *Keys* above.

        An optional entry that changes the loss (``loss_mask``, ``expert_mask``, ``selected``, ``sampler_log_prob``,
        ``pair_id``, ``chosen``, ``routed_experts``) is required once it is set to another key than its default.
        """
        renamed = {_KEY_ALIASES.get(name, name): key for name, key in kwargs.items()}
        if len(renamed) != len(kwargs):
            raise TypeError(f"got an entry under two of its names: {', '.join(kwargs)}.")
        super().set_keys(**renamed)
        if "top_k" in renamed:
            self._dry_run(len(self._teachers))  # each has a weight

    @property
    def _of_data(self) -> set[str]:
        """The inputs that no model computes."""
        return {*KEYS, "teacher_outcomes"} - (set() if self.reference is None else {"ref_log_prob"})

    @property
    def _data_keys(self) -> list[NestedKey]:
        needs = self._needs & self._of_data
        keys = [getattr(self.tensor_keys, name) for name in KEYS if name in needs]
        if "teacher_outcomes" in needs:
            keys += [entry for key in self._teachers for entry in top_k_entries(key)]
        return keys

    @property
    def out_keys(self) -> list[NestedKey]:
        """The terms as ``loss_<name>``, and the metrics."""
        given = self.__dict__.get("_out_keys")
        return self._dry_run()[0] if given is None else given

    @out_keys.setter
    def out_keys(self, values: Sequence[NestedKey] | None) -> None:
        self.__dict__["_out_keys"] = None if values is None else list(values)

    def _dry_run(self, teachers: int | None = None) -> tuple[list[NestedKey], list[Aggregation]]:
        """The outputs under the current hyper-parameters and the aggregation of each term, by a dry run on dummy tokens."""
        weights = [found for part in self._parts if (found := part.hyper.get("teacher_weights"))]
        teachers = teachers or (len(weights[0]) if weights else 1)
        inputs = dummy_inputs(teachers=teachers, device=device_of(*self._parts))
        with torch.no_grad():
            terms, metrics = self._terms(inputs)
        names = [term.name for term in terms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two terms of the loss are called {name!r}: give them different names.")
        known = {"log_prob", "mask", *self._needs}
        if self.options.entropy:
            known.add("entropy")
        if known & {"kl", "teacher_divergence"}:
            known.add("ref_log_prob")  # scored along with an exact KL
        common = common_metrics(LossInputs(**{name: value for name, value in inputs.given.items() if name in known}))
        keys: list[NestedKey] = [*(f"loss_{name}" for name in names), *merge_metrics(terms, {**common, **metrics})]
        return keys, [self._mode(term) for term in terms]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> LossOutput:
        """The loss of a batch, a micro-batch or a single trajectory, which is not changed; see the class."""
        td, response, data, top_ids = self._read(tensordict, check=True)
        inputs = self._score(response, data, self._replayed(td), top_ids)
        response.check_finite(self._named(inputs.given, _COMPUTED))
        self._check_teachers(response, inputs)
        terms, metrics = self._terms(inputs)
        return self._output(td, response, terms, {**common_metrics(inputs, response.counts), **metrics})

    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        _, response, data, _ = self._read(td)
        zeros = torch.zeros_like(response.mask, dtype=torch.float32)
        filled = {"log_prob": zeros} | {name: zeros for name in PER_TOKEN if name not in (*MASKS, *OF_SAMPLER)}
        filled |= dict.fromkeys(PER_OUTCOME, zeros.new_zeros(*zeros.shape, len(self._teachers), 1))
        if "old_log_prob" not in data:  # the place of the sampler's own may be taken by it
            filled["old_log_prob"] = zeros
        return self._terms(self._inputs(response, {**data, **filled}))[0]

    @staticmethod
    def _inputs(response: ResponseTokens, given: Mapping[str, Tensor]) -> LossInputs:
        """The record of gathered tensors, which are 0 outside the mask, and of numbers of sequences."""
        gathered = {name: value for name, value in given.items() if name not in PER_ROW}
        rows = {name: given[name] for name in PER_ROW if name in given}
        inputs = LossInputs.of_clean(mask=response.mask, **gathered)
        return inputs.replace(**rows) if rows else inputs

    def batch_inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Store what the objective takes from a whole batch with each row: ``reference_point`` or ``match_id``, if it has one.

        Call it on the batch of an optimiser step, before :meth:`count` and before splitting. It scores the batch with the
        current policy, without gradient. For ``kto`` it scores mismatched prompts and answers (see
        :func:`~torchrl_llm_kl.rollouts.mismatch`), with the policy and with ``reference``. With several ranks, each takes its
        own batch.

        Args:
            tensordict: the batch of an optimiser step.

        Returns:
            ``tensordict``, with a new entry ``[*B]`` (``set_keys``); unchanged for other objectives.

        Raises:
            ValueError: for ``kto`` without ``reference``.
        """
        once = self.once
        if once is None:
            return tensordict
        td, response, data, _ = self._read(tensordict, without=once.name, check=not once.mismatched)
        replayed = RequestFields() if once.mismatched else self._replayed(td)
        if once.mismatched:
            if self._reference_scorer is None:
                raise ValueError(
                    f"{name_of(self.objective.function)} scores mismatched prompts and answers with the reference: pass the "
                    f"model as reference=, or store {once.name!r} yourself ({once.function.__name__})."
                )
            response = ResponseTokens(*mismatch(response.tokens, response.flat_mask))
            data = {}
        with torch.no_grad():
            inputs = self._score(response, data, replayed)
        response.check_finite(self._named(inputs.given, _COMPUTED))
        value = once.function(inputs)
        key = getattr(self.tensor_keys, once.name)
        own_leaves(tensordict, key)  # do not write into the storage of a replay buffer
        return tensordict.set(key, value.reshape(td.batch_size).to(td.device or value.device))

    def _read(
        self, tensordict: TensorDictBase, *, without: str | None = None, check: bool = False
    ) -> tuple[TensorDictBase, ResponseTokens, dict[str, Tensor], Tensor | None]:
        """The data with its batch dimensions, its trained tokens, and the inputs that it holds for them but one.

        With a distillation also the ids of the outcomes at all tokens, ``[N, M, k]``. ``check`` that numbers are finite.
        """
        td, located, responses = self._read_tokens(tensordict)
        tokens, within = located.tokens, None if responses is None else responses.host_mask
        who, asked = name_of(self.objective.function), self.reads | {*_LOG_PROBS}
        places: dict[str, NestedKey] = {}
        for name in [name for name in KEYS if name in asked and name != without]:
            key = getattr(self.tensor_keys, name)
            place = find_log_probs(td, key) if name in _LOG_PROBS else find_key(td, key)
            if place is not None:
                places[name] = place
        there = {*INPUTS} - {*KEYS} | {*places}
        needs = {name for part in self._parts for name in part.reads(there).required} & self._of_data - {without}
        for name in [name for name in KEYS if name in asked and name != without and name not in places]:
            if name in needs or self._is_set(name):
                advice = f"Add the entry, or say where it is with set_keys({name}=...)."
                if self.once is not None and self.once.name == name:
                    advice = f"batch_inputs(batch) computes it from a whole batch. {advice}"
                require_key(td, getattr(self.tensor_keys, name), f"{who} needs {name}", advice)
        flat: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for name, place in places.items():
            if name in PER_ROW:
                value = per_sequence(td, place)
                if value is None:
                    raise ValueError(f"{place!r} must hold one value for each sequence: it is read as {name}.")
                rows[name] = value
                continue
            fill, repeats = 0.0 if name in MASKS else math.nan, name not in _LOG_PROBS
            flat[name] = per_token(td, place, tokens, within, fill=fill, repeats=repeats).detach()
        teachers = read_top_k(td, self._teachers, tokens, within) if "teacher_outcomes" in needs else None
        flat |= {name: as_mask(flat[name], getattr(self.tensor_keys, name)) for name in MASKS if name in flat}
        mask, old = located.mask, None
        for name in [name for name in OF_SAMPLER if name in flat]:
            value, key = flat[name], places[name]
            zeros = self._reader.marks_zeros(key)
            if name != "old_log_prob" and not zeros:
                continue  # NaN already, which changes no mask
            unscored = self._reader.unscored(value, tokens, responses, key)
            if "expert_mask" in flat:  # no policy sampled those tokens
                unscored = unscored & ~flat["expert_mask"]
            flat[name] = torch.where(unscored, math.nan, value) if zeros else value
            if name == "old_log_prob" and any(name in part.reads(there).among(flat) for part in self._parts):
                old, mask = (value, unscored), mask > unscored  # and not
        # One copy shows which tokens are left out, and that the numbers of the others are finite.
        named = self._named(flat, flat) if check else {}
        checked = [torch.where(mask, torch.stack(list(named.values())), 0)] if named else []
        total = finite_total(*checked).reshape(1)
        host_mask, total = to_host(mask, total) if old is not None else (located.host_mask, to_host(total)[0])
        if old is not None and host_mask.sum() < located.host_mask.sum():
            value, unscored = old
            self._reader.warn_of_unscored(value, located.mask & unscored, tokens, places["old_log_prob"])
        response = ResponseTokens(tokens, mask, host_mask)
        if check:
            if not math.isfinite(total):
                response.check_finite({name: response.gather(x) for name, x in named.items()})
            self._check_rows(response, rows)
        data = {**response.gather_each(flat), **rows}
        if teachers is None:
            return td, response, data, None
        return td, response, {**data, "teacher_outcomes": response.gather(teachers.log_probs)}, teachers.ids

    def _named(self, given: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Those of ``names`` that a part reads and that must be finite; a NaN ``sampler_log_prob`` was not computed.

        At experts' tokens, a part that separates experts from the policy reads only the current log-probs.
        """
        experts, named = given.get("expert_mask"), dict[str, Tensor]()
        for name in [name for name in PER_TOKEN if name in names and name in given and name not in MASKS]:
            readers, value = [part for part in self._parts if name in part.reads(given).among(given)], given[name]
            if not readers or not value.is_floating_point():
                continue
            if experts is not None and all(part.leaves_out_experts for part in readers):
                value = value.masked_fill(experts, 0)
            if name == "sampler_log_prob":
                value = value.masked_fill(value.isnan(), 0)
            key = getattr(self.tensor_keys, name, None)
            named[name if key is None else f"{name} ({key!r})"] = value
        return named

    def _check_rows(self, response: ResponseTokens, rows: Mapping[str, Tensor]) -> None:
        """Reject NaN and infinite numbers of sequences."""
        for name, value in rows.items():
            if value.is_floating_point():
                check_finite(
                    {f"{name} ({getattr(self.tensor_keys, name)!r})": value},
                    read=response.mask.any(-1),
                    place="sequence {}".format,
                    advice="Fix the entry, or mask the sequence out.",
                )

    def _check_teachers(self, response: ResponseTokens, inputs: LossInputs) -> None:
        """Reject a teacher's outcomes that do not add up to 1; warn once of a top k that holds little of it."""
        log_p, mask = inputs.get("teacher_outcomes"), inputs.mask.unsqueeze(-1)
        if log_p is None:
            return
        mass = log_p.exp().sum(-1)
        wrong = mask & ~((mass - 1).abs() < _MASS_TOLERANCE)  # NaN too
        captured = torch.where(mask, -log_p[..., -1].expm1(), 0).sum((0, 1)) / mask.sum().clamp(min=1)
        some_wrong, some, *means = torch.stack([wrong.any().to(mass), mask.any().to(mass), *captured]).tolist()
        if some_wrong:
            place, teacher = divmod(int(wrong.flatten().nonzero()[0]), len(self._teachers))
            found = float(mass[wrong][0])
            raise ValueError(
                f"the probabilities below {self._teachers[teacher]!r} add up to {found:.4g} at {response.place(place)}, not "
                "to 1. The teacher did not score this token (compare its scope and assistant_only with masking_strategy), or "
                "rest_log_prob is not the log-prob of all other tokens."
            )
        for key, mean in zip(self._teachers, means, strict=True):
            if some and mean < _LITTLE_MASS and key not in self._little_mass:
                self._little_mass.add(key)
                warnings.warn(
                    f"the top k below {key!r} holds {mean:.2f} of the teacher's probability on average, and the rest counts as "
                    "one outcome: the divergence is far below that over all tokens. Raise the teacher's top_k=.",
                    stacklevel=3,
                )

    def _replayed(self, td: TensorDictBase) -> RequestFields:
        """The images, and the sampler's records, read by the extras of the transforms."""
        keys = self.tensor_keys
        extras = KeptTokens(keys.kept), RoutedExperts(keys.routed_experts), Images(keys.images)
        context = ScoringContext(
            self.actor_network, self.options, ModelInterface(), TokenisingOptions(), keys.old_log_prob
        )
        fields = read_fields(extras, ScoredStep(context, td, td, lambda: self._reader.locate(td)))
        if "routing" not in fields and self._is_set("routed_experts"):
            require_key(td, keys.routed_experts, "a replay of routing", "Store it, or leave its key as it was.")
        return fields

    def _score(
        self,
        response: ResponseTokens,
        data: Mapping[str, Tensor],
        replayed: RequestFields,
        top_ids: Tensor | None = None,
    ) -> LossInputs:
        """The inputs, with those that the models compute; ``replayed`` are fields of the actor's request."""
        self._check_reference()
        needs, reference, sampling = self._needs, self._reference_scorer, self.sampling
        ref_here = "ref_log_prob" in needs and "ref_log_prob" not in data
        exact = self._exact()
        over_kept = ref_here and sampling.truncates and sampling.reference == "kept"
        apart = over_kept and log_probs_only(self.reference)  # a model in another process is sent the kept tokens
        if over_kept and not apart:
            exact = {"reference": reference}
        if apart and "kept" not in replayed:
            exact = {"return_kept": True}
        if "sharp_log_prob" in needs and sampling.truncates and "kept" not in replayed:
            raise ValueError(
                f"{name_of(self.objective.function)} scores at half the temperature, where {sampling} leaves other "
                "tokens: replay what the sampler kept (RecordKept), or sample without truncation."
            )
        fields: RequestFields = {**replayed, "top_ids": top_ids}
        own = self.actor_network_params if self._functional else None
        with contextlib.nullcontext() if own is None else own.to_module(self.actor_network):
            scores = self.scorer.evaluate(
                ScoreRequest.of(response.tokens, response.host_mask, **fields),
                entropy=self.options.entropy or "entropy" in needs,
                grad=torch.is_grad_enabled(),
                **exact,
            )
            ref = scores.ref_log_prob
            if ref is None and reference is not None and ref_here:
                kept = replayed.get("kept", scores.kept) if apart else None
                images = replayed.get("images")
                ref = reference.score(ScoreRequest.of(response.tokens, response.host_mask, kept=kept, images=images))
            sharp = None
            if "sharp_log_prob" in needs:
                sharp = self._sharp_scorer.score(ScoreRequest.of(response.tokens, response.host_mask, **replayed))
        found = {
            "log_prob": scores.log_prob,
            "entropy": scores.entropy,
            "kl" if "kl" in needs else "teacher_divergence": scores.kl,
            "outcomes": scores.outcomes,
            "ref_log_prob": None if "ref_log_prob" in data else ref,
            "sharp_log_prob": sharp,
        }
        out = {name: response.gather(x.values) for name, x in found.items() if x is not None}
        trained = list(self.actor_network.parameters() if own is None else own.values(True, True))
        # An objective may read any one of these alone.
        read = [name for name in ("log_prob", "outcomes", "teacher_divergence") if name in out]
        out |= {name: with_graph(out[name], trained) for name in read}
        return self._inputs(response, {**data, **out})

    def _terms(self, inputs: LossInputs) -> tuple[list[LossTerm], dict[str, Tensor]]:
        """The corrected objective and all other terms; metrics of the corrections."""
        terms: Sequence[LossTerm] = self.objective(inputs)
        metrics: dict[str, Tensor] = {}
        mask, experts = inputs.mask, inputs.get("expert_mask")
        product = torch.ones_like(inputs.log_prob).detach() if self.corrections else inputs.log_prob
        correction: Correction
        for number, correction in enumerate(self.corrections, start=1):  # type: ignore[assignment]
            if experts is None or not correction.leaves_out_experts:
                weights, seen = correction(inputs)
            else:  # no policy sampled the experts' tokens: there is nothing to correct
                weights, seen = correction(inputs.within(~experts))
                weights = torch.where(mask & experts, 1, weights)
            terms = apply_correction(terms, weights, mask)
            metrics |= {name if name not in metrics else f"{name}_{number}": value for name, value in seen.items()}
            if weights.shape[:-1] == mask.shape[:-1]:  # not one weight for each pair
                product = product * weights.detach()
        if self.corrections:
            metrics |= correction_metrics(product, mask if experts is None else mask & ~experts)
        return [*terms, *(term for part in self.terms for term in part(inputs))], metrics


def check_actor_options(options: ScoreOptions) -> ScoreOptions:
    """``options``; an error if they hold what a loss decides."""
    if not isinstance(options, ScoreOptions):
        raise TypeError(f"options must be ScoreOptions(...), got {options!r:.60}.")
    for name, usual in vars(_NEUTRAL).items():
        if name not in _CHOSEN and (found := getattr(options, name)) != usual:
            raise ValueError(f"options has {name}={found!r}, which a loss decides: leave it out.")
    return options


@torch.no_grad()
def common_metrics(inputs: LossInputs, counts: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Metrics independent of the objective, and except the first two and the entropy of the tokens that are not experts'.

    ``num_tokens``, ``num_sequences`` (those with a masked-in token); with old log-probs ``ESS``, quantiles of the ratio to
    them and ``kl_to_sampler``; with the sampler's own the :func:`mismatch_metrics`; with reference log-probs ``kl_to_ref``;
    with entropies ``entropy``.
    """
    mask, experts = inputs.mask, inputs.get("expert_mask")
    sampled = mask if experts is None else mask & ~experts
    log_prob = inputs.log_prob
    old, own, ref = (inputs.get(name) for name in ("old_log_prob", "sampler_log_prob", "ref_log_prob"))
    num_tokens, num_sequences = (mask.sum(), mask.any(-1).sum()) if counts is None else counts
    metrics = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    # The sampler produced the tokens, so that k3 of KL(sampler || policy) is never negative.
    pairs = {"old": (log_prob, old), "sampler": (log_prob, old if own is None else own), "ref": (ref, log_prob)}
    pairs = {name: pair for name, pair in pairs.items() if not any(x is None for x in pair)}
    if pairs:
        above, below = (torch.stack(each) for each in zip(*pairs.values(), strict=True))
        used = sampled & (below > -torch.inf)  # NaN: not scored
        unused, used_tokens = ~used, used.flatten(1).sum(1)
        log_ratio = (above - below).clamp(max=LARGEST_LOG_RATIO)  # one token cannot make a mean infinite
        k3 = (torch.expm1(log_ratio) - log_ratio).masked_fill_(unused, 0).flatten(1).sum(1) / used_tokens.clamp(min=1)
        metrics |= {f"kl_to_{name}": mean for name, mean in zip(pairs, k3.unbind(), strict=True) if name != "old"}
        if "old" in pairs:
            metrics |= _ratio_metrics(log_ratio[0].masked_fill_(unused[0], -torch.inf), used_tokens[0])
    if own is not None:
        metrics |= mismatch_metrics(log_prob if old is None else old, own, sampled)
    entropy = inputs.get("entropy")
    if entropy is not None:
        metrics["entropy"] = masked_mean(entropy, mask)
    return metrics


def _ratio_metrics(log_ratio: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Of ``count`` log-ratios; all others are ``-inf``."""
    ordered = log_ratio.flatten().sort().values
    weight = (ordered - ordered[-1]).exp()  # the scale cancels; NaN without tokens
    size = (weight.sum() / torch.linalg.vector_norm(weight)).square() / count
    shares = send(torch.tensor(list(_RATIO_QUANTILES.values())), count.device)
    places = ((count - 1) * shares).round().long() - count  # from the end
    values = ordered[places].nan_to_num(neginf=0.0).exp()
    return {"ESS": size.nan_to_num(0.0).clamp(max=1), **dict(zip(_RATIO_QUANTILES, values.unbind(), strict=True))}
