"""The policy loss: an actor, an objective and further terms on the entries of a TensorDict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives.common import LossModule
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl.losses._arithmetic import Aggregation
from torchrl_llm_kl.losses._metrics import common_metrics, merge_metrics
from torchrl_llm_kl.losses._objective import (
    KEYS,
    MASKS,
    OF_SAMPLER,
    PER_OUTCOME,
    PER_TOKEN,
    InputKeys,
    LossInputs,
    LossTerm,
    Once,
    Terms,
    Weights,
    dummy_inputs,
    get_objective,
    spec_of,
)
from torchrl_llm_kl.losses._parts import Correction, Part, TermPart, device_of, number_of_teachers
from torchrl_llm_kl.losses._policy_inputs import EntryReader, PolicyBatch, PolicyScorers
from torchrl_llm_kl.losses._token_loss import LossOutput, TokenLoss, with_graph
from torchrl_llm_kl.losses.corrections import apply_correction, correction_metrics
from torchrl_llm_kl.ragged import own_leaves
from torchrl_llm_kl.rollouts import (
    TOKENS_FULL,
    MaskingStrategy,
    ModelInterface,
    ResponseTokens,
    TokenisingOptions,
    mismatch,
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
    ScoringContext,
    read_fields,
    warn_of_mismatch,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.losses import ObjectiveArgs

# Names of torchrl's GRPOLoss.
_KEY_ALIASES = {"action": "tokens", "sample_log_prob": "old_log_prob", "ref_log_probs": "ref_log_prob"}


class PolicyLoss(TokenLoss):
    r"""A policy loss for language models: an objective, further terms, and their aggregation over tokens.

    The scoring engine computes current log-probs with gradient. It forwards shared prompts once and runs the head only on
    masked-in tokens, so ``[B, T, V]`` never exists. Rollouts may be padded, nested or lazily stacked, with any number of batch
    dimensions.

    Args:
        actor: any model that a :class:`~torchrl_llm_kl.LogProbScorer` takes, or a scorer with its own settings.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`, or a function of the same protocol.

    Keyword Args:
        terms: :class:`~torchrl_llm_kl.losses.KLToReference`, :class:`~torchrl_llm_kl.losses.KLToSampler`,
            :class:`~torchrl_llm_kl.losses.DivergenceToTeacher`, :class:`~torchrl_llm_kl.losses.EntropyBonus`, or functions of
            the protocol of objectives.
        corrections: factors of the objective: :class:`~torchrl_llm_kl.losses.ImportanceWeights`,
            :class:`~torchrl_llm_kl.losses.RejectionMask`, :class:`~torchrl_llm_kl.losses.OffPolicySequenceMask`,
            :class:`~torchrl_llm_kl.losses.StalenessMask`, :class:`~torchrl_llm_kl.losses.TotalVariationMask`,
            :class:`~torchrl_llm_kl.losses.TopEntropyMask`, or functions that return weights and metrics.
            :func:`~torchrl_llm_kl.losses.rollout_corrections` translates verl's settings.
        aggregation: see :func:`~torchrl_llm_kl.losses.aggregate`. By default the objective's own.
        max_len: the longest possible response in tokens. Required by ``seq-mean-token-sum-norm``, refused by the others.
        masking_strategy: the tokens to train. ``"sft"``: the response of each step. ``"rlhf"``: all assistant turns, also
            earlier ones. ``"generic"``: all tokens except the first of each sequence. An optional entry ``loss_mask`` removes
            tokens from these.
        reference: a model or scorer with the same vocabulary, for an exact KL, and for reference log-probs that the data
            lacks. It is refused if no part reads either, and its parameters are not trained. For a distillation with
            ``distribution="exact"`` it is the teacher.
        options: how the policy is scored, such as ``ScoreOptions(Sampling(0.7, top_k=50), dtype=torch.bfloat16)``. Log-probs,
            entropies and KLs are over the tokens that temperature, top-k, top-p and min-p of ``sampling`` keep. If the data
            holds the tokens that the sampler kept (entry ``kept``), these are used. ``entropy=True`` reports the policy's
            entropy even if no part of the loss needs it, at the cost of another sum over the vocabulary. A scorer as the actor
            has its own options.
        tokens_per_batch: see :class:`~torchrl_llm_kl.LogProbScorer`. A service as the reference uses its own ``max_tokens``
            instead.
        functional: keep the actor's parameters apart from its module, under ``actor_network_params``, as torchrl's losses do.
            FSDP requires the default, False.
        hyper: the objective's hyper-parameters. Numbers are buffers. They are saved, and assignment changes them in place
            (``loss.clip_high = 0.3``), also those of terms (``loss.kl_to_ref_coeff``). Required entries and reported names
            follow such changes.

    Keys (``set_keys``): ``tokens`` (or ``action``), ``old_log_prob`` (``sample_log_prob``), ``ref_log_prob``
    (``ref_log_probs``), ``sampler_log_prob``, ``behavior_log_prob``, ``age``, ``advantage``, ``expert_mask``,
    ``message_role``, ``loss_mask``, ``selected``, ``pair_id``, ``chosen``, ``reference_point``, ``match_id``,
    ``denominators``, ``kept`` (the parent of ``"counts"`` and ``"ids"``), ``top_k`` (the key of a teacher's
    :class:`~torchrl_llm_kl.TopK`, or a list of keys for several teachers), ``routed_experts``, ``images``. An entry is also
    found on the other side of ``"next"``. ``top_k``, ``kept`` and ``routed_experts`` are first looked up under ``"next"``,
    where an env writes them. Log-probs are also found under ``"response"`` without a ``"full"``, as TorchRL's wrappers store
    them. If the data holds ``routed_experts`` ``[*B, T, L, k]``, the actor, a mixture of experts, uses these experts. See
    ``docs/routing.md``.

    Outputs:
        A :class:`~torchrl_llm_kl.losses.LossOutput`. It holds ``loss_<name>`` for each term, 0-dim, or per token with
        aggregation ``"none"``. Their sum is ``out.total_loss``. Metrics are over the masked-in tokens and have no graph: those
        of the objective, ``ESS``, ``ratio_*`` quantiles, ``kl_to_sampler``, ``kl_to_ref``, ``entropy``, ``num_tokens`` and
        ``num_sequences``. With corrections there are also :func:`~torchrl_llm_kl.losses.correction_metrics`. For data with
        ``sampler_log_prob`` there are also :func:`~torchrl_llm_kl.losses.mismatch_metrics`, compared with
        ``behavior_log_prob``, else ``old_log_prob``, else the current policy, and for data with ``behavior_log_prob`` the
        :func:`~torchrl_llm_kl.losses.staleness_metrics`.

    Raises:
        TypeError: for an unknown hyper-parameter.
        ValueError: if a hyper-parameter is out of range, or an argument has no effect. On data, if lengths differ or a
            masked-in number is not finite.
        KeyError: on data, if a required entry is missing.

    Warns:
        SamplerMismatchWarning: if the actor is a wrapper that is known to sample differently from how it is scored.

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

    .. seealso:: :meth:`count`, so that losses of micro-batches add up to the loss of the batch, and :meth:`batch_inputs`, for
        objectives that compare an answer with the whole batch.
    """

    @dataclass
    class _AcceptedKeys(InputKeys, LossModule._AcceptedKeys):
        tokens: NestedKey = TOKENS_FULL
        loss_mask: NestedKey = "loss_mask"
        denominators: NestedKey = "denominators"
        kept: NestedKey = "kept"
        top_k: NestedKey = "top_k"
        routed_experts: NestedKey = "routed_experts"
        images: NestedKey = "images"

    actor_network: nn.Module
    actor_network_params: Any
    target_actor_network_params: Any

    def __init__(
        self,
        actor: ModelOrScorer,
        objective: str | Callable[..., Terms] = "ppo",
        *,
        terms: Sequence[TermPart | Callable[..., Terms]] = (),
        corrections: Sequence[Correction | Callable[..., Weights]] = (),
        aggregation: Aggregation | None = None,
        max_len: int | None = None,
        masking_strategy: MaskingStrategy = "sft",
        reference: Model | LogProbScorer | None = None,
        options: ScoreOptions | None = None,
        tokens_per_batch: int | None = None,
        functional: bool = False,
        **hyper: Unpack[ObjectiveArgs],
    ) -> None:
        check_not_a_name(actor=actor, reference=reference)
        own_settings = functional or tokens_per_batch is not None or options not in (None, ScoreOptions())
        if isinstance(actor, LogProbScorer) and own_settings:
            raise ValueError("actor is a scorer with its own settings: set options and tokens_per_batch there.")
        function = get_objective(objective) if isinstance(objective, str) else objective
        spec = spec_of(function)
        spec.check_used(hyper)
        parts = [term if isinstance(term, Part) else TermPart(term) for term in terms]
        factors = [x if isinstance(x, Part) else Correction(x) for x in corrections]
        mode = aggregation or spec.aggregation
        super().__init__(aggregation=mode, max_len=max_len, masking_strategy=masking_strategy)
        self._spec = spec
        self._scorers = PolicyScorers(actor, reference, options, tokens_per_batch)
        # The module is registered, not the scorer: its parameters are saved, and DDP and FSDP find them.
        self._functional, model = functional, actor.model if isinstance(actor, LogProbScorer) else actor
        if functional:
            self.convert_to_functional(model, "actor_network", create_target_params=False)
        else:
            self.actor_network = model
        self.objective = TermPart(function, **hyper)
        self.terms, self.corrections = nn.ModuleList(parts), nn.ModuleList(factors)
        self._little_mass: set[NestedKey] = set()  # keys of teachers that were already warned of
        exposed: dict[str, tuple[Part[object], str]] = {name: (self.objective, name) for name in self.objective.stored}
        for part in self._parts[1:]:
            prefix = part.name.removesuffix("_bonus")
            exposed |= {f"{prefix}_{name}": (part, name) for name in part.stored}
        self._scorers.check_needs(self.actor_network, self._needs)
        if {"kl_to_ref", "kl_to_sampler"} <= {part.name for part in parts if "kl" in part.needs}:
            raise ValueError(
                "two exact KLs need two other models, and reference= is one: choose another estimator for one."
            )
        if reference is not None and self._needs.isdisjoint(("ref_log_prob", "kl", "teacher_divergence")):
            raise ValueError("reference has no effect: no part of the loss compares with it. Leave reference out.")
        # The aggregation of a term is known only from a run of the formula.
        self._check_max_len(self._dry_run()[1])
        self._expose(exposed)
        if self._needs & {"advantage", "old_log_prob"}:  # the loss then trains on samples of the policy
            warn_of_mismatch(self.actor_network, self.sampling, trains=True, stacklevel=2)

    @property
    def scorer(self) -> Scorer:
        """The scorer of the actor."""
        return self._scorers.of_actor(self.actor_network)

    @property
    def options(self) -> ScoreOptions:
        """How the actor is scored. A scorer as the actor has its own options."""
        return self._scorers.options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        self._scorers.options = options

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of the scored tokens."""
        return self.options.sampling

    @property
    def reference(self) -> Model | LogProbScorer | None:
        """The reference model or scorer, or None."""
        return self._scorers.reference

    @property
    def once(self) -> Once | None:
        """The input that :meth:`batch_inputs` computes once for a whole batch. None if the objective needs no such input."""
        return self._spec.once

    @property
    def _parts(self) -> list[Part[object]]:
        return [self.objective, *self.terms, *self.corrections]

    @property
    def _needs(self) -> set[str]:
        """The inputs that the parts require with their current hyper-parameters."""
        return {name for part in self._parts for name in part.needs}

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that any part of the loss requires, or reads if the data holds them."""
        return self._entries.asked

    @property
    def _entries(self) -> EntryReader:
        # Built for each call, since keys, hyper-parameters and the reference may change.
        of_data = frozenset({*KEYS, "teacher_outcomes"} - (set() if self.reference is None else {"ref_log_prob"}))
        required = frozenset(name for name in KEYS if self._is_set(name))
        keys, reader = vars(self.tensor_keys), self._reader
        return EntryReader(self._parts, keys, reader, of_data, required, self.once, self._little_mass)

    def set_keys(self, **kwargs: object) -> None:
        """Change the keys of entries. The names are listed under *Keys* above.

        Some optional entries change the loss: ``loss_mask``, ``expert_mask``, ``selected``, ``sampler_log_prob``, ``pair_id``,
        ``chosen`` and ``routed_experts``. Such an entry becomes required when its key is changed.
        """
        renamed = {_KEY_ALIASES.get(name, name): key for name, key in kwargs.items()}
        super().set_keys(**renamed)
        if "top_k" in renamed:
            self._dry_run(len(self._entries.teachers))  # checks that there is a weight for each teacher

    @property
    def _data_keys(self) -> list[NestedKey]:
        needs = self._needs & self._entries.of_data
        keys = [key for name, key in vars(self.tensor_keys).items() if name in KEYS and name in needs]
        if "teacher_outcomes" in needs:
            keys += [entry for key in self._entries.teachers for entry in top_k_entries(key)]
        return keys

    @property
    def out_keys(self) -> list[NestedKey]:
        """The names of the terms, ``loss_<name>``, and of the metrics."""
        given = self.__dict__.get("_out_keys")
        return self._dry_run()[0] if given is None else given

    @out_keys.setter
    def out_keys(self, values: Sequence[NestedKey] | None) -> None:
        self.__dict__["_out_keys"] = None if values is None else list(values)

    def _dry_run(self, teachers: int | None = None) -> tuple[list[NestedKey], list[Aggregation]]:
        """The names of the outputs and the aggregation of each term, by a dry run on dummy tokens."""
        teachers = teachers or next(filter(None, (number_of_teachers(part.settings) for part in self._parts)), 1)
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
            known.add("ref_log_prob")  # computed along with an exact KL
        common = common_metrics(LossInputs(**{name: value for name, value in inputs.given.items() if name in known}))
        keys: list[NestedKey] = [*(f"loss_{name}" for name in names), *merge_metrics(terms, {**common, **metrics})]
        return keys, [self._mode(term) for term in terms]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> LossOutput:
        """The loss of a batch, a micro-batch or a single trajectory. The data is not changed. See the class."""
        batch = self._read(tensordict, check=True)
        inputs = self._score(batch, self._replayed(batch.td))
        terms, metrics = self._terms(inputs)
        metrics = {**common_metrics(inputs, batch.response.counts), **metrics}
        return self._output(batch.td, batch.response, terms, metrics)

    def _read(self, tensordict: TensorDictBase, *, without: str | None = None, check: bool = False) -> PolicyBatch:
        """Read the trained tokens, and the inputs that the data holds for them."""
        return self._entries.read(*self._read_tokens(tensordict), without=without, check=check)

    def _score(self, batch: PolicyBatch, replayed: RequestFields) -> LossInputs:
        """The record of all inputs, including those that the models compute. ``replayed`` are fields of the request."""
        own = self.actor_network_params if self._functional else None
        with contextlib.nullcontext() if own is None else own.to_module(self.actor_network):
            computed = self._scorers.compute(self.actor_network, self._parts, batch, replayed)
        trained = list(self.actor_network.parameters() if own is None else own.values(True, True))
        # An objective may read only one of these, and every trained parameter needs a gradient.
        for name in ("log_prob", "outcomes", "teacher_divergence"):
            if name in computed:
                computed[name] = with_graph(computed[name], trained)
        inputs = batch.inputs(computed)
        self._entries.check_scored(batch.response, inputs)
        return inputs

    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        batch = self._read(td)
        # Masks of terms do not depend on values, so zeros stand for whatever a model would compute.
        zeros = torch.zeros_like(batch.response.mask, dtype=torch.float32)
        filled = {"log_prob": zeros} | {name: zeros for name in PER_TOKEN if name not in (*MASKS, *OF_SAMPLER)}
        filled |= dict.fromkeys(PER_OUTCOME, zeros.new_zeros(*zeros.shape, len(self._entries.teachers), 1))
        if "old_log_prob" not in batch.data:  # KLToSampler falls back to it
            filled["old_log_prob"] = zeros
        return self._terms(batch.inputs(filled))[0]

    def batch_inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute ``reference_point`` or ``match_id`` from a whole batch, and store it with each row.

        Call it on the batch of an optimiser step, before :meth:`count` and before splitting. It scores the batch with the
        current policy, without gradient. For ``kto`` it scores mismatched prompts and answers (see
        :func:`~torchrl_llm_kl.rollouts.mismatch`) with the policy and with ``reference``. With several ranks, each rank uses
        its own batch.

        Args:
            tensordict: the batch of an optimiser step.

        Returns:
            ``tensordict`` with a new entry ``[*B]`` (``set_keys``), or unchanged if the objective needs no such input.

        Raises:
            ValueError: for ``kto`` without ``reference``.
        """
        once = self.once
        if once is None:
            return tensordict
        batch = self._read(tensordict, without=once.name, check=not once.mismatched)
        td = batch.td
        replayed = RequestFields() if once.mismatched else self._replayed(td)
        if once.mismatched:
            if self.reference is None:
                what = f"{self.objective.name} scores mismatched prompts and answers with the reference"
                raise ValueError(f"{what}: pass it as reference=, or store {once.name!r} ({once.function.__name__}).")
            batch = PolicyBatch(td, ResponseTokens(*mismatch(batch.response.tokens, batch.response.flat_mask)), data={})
        with torch.no_grad():
            value = once.function(self._score(batch, replayed))
        key = vars(self.tensor_keys)[once.name]
        own_leaves(tensordict, key)  # do not write into the storage of a replay buffer
        return tensordict.set(key, value.reshape(td.batch_size).to(td.device or value.device))

    def _replayed(self, td: TensorDictBase) -> RequestFields:
        """The images and the sampler's records, read by the same extras that transforms use."""
        keys = self.tensor_keys
        extras = KeptTokens(keys.kept), RoutedExperts(keys.routed_experts), Images(keys.images)
        interface, tokenising = ModelInterface(), TokenisingOptions()
        context = ScoringContext(self.actor_network, self.options, interface, tokenising, keys.old_log_prob)
        fields = read_fields(extras, ScoredStep(context, td, td, lambda: self._reader.locate(td)))
        if "routing" not in fields and self._is_set("routed_experts"):
            require_key(td, keys.routed_experts, "a replay of routing", "Store it, or leave its key as it was.")
        return fields

    def _terms(self, inputs: LossInputs) -> tuple[list[LossTerm], dict[str, Tensor]]:
        """The corrected objective and all other terms, and the metrics of the corrections."""
        terms: Sequence[LossTerm] = self.objective(inputs)
        metrics: dict[str, Tensor] = {}
        mask, experts = inputs.mask, inputs.get("expert_mask")
        product = torch.ones_like(inputs.log_prob).detach() if self.corrections else inputs.log_prob
        corrections = cast("Sequence[Correction]", self.corrections)
        for number, correction in enumerate(corrections, start=1):
            if experts is None or not correction.leaves_out_experts:
                weights, seen = correction(inputs)
            else:  # no policy sampled the experts' tokens, so they are not corrected
                weights, seen = correction(inputs.within(~experts))
                weights = torch.where(mask & experts, 1, weights)
            terms = apply_correction(terms, weights, mask)  # several corrections multiply
            metrics |= {name if name not in metrics else f"{name}_{number}": value for name, value in seen.items()}
            if weights.shape[:-1] == mask.shape[:-1]:  # a weight per pair has no place in a product over tokens
                product = product * weights.detach()
        if self.corrections:
            metrics |= correction_metrics(product, mask if experts is None else mask & ~experts)
        return [*terms, *(term for part in self.terms for term in part(inputs))], metrics
