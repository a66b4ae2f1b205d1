"""The module that ties an actor, an objective and further terms to the entries of a TensorDict."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives.common import LossModule

from torchrl_llm_kl.losses._entries import Counted, check_finite_inputs, find_key, per_sequence, per_token, require_key
from torchrl_llm_kl.losses._metrics import common_metrics
from torchrl_llm_kl.losses._objective import INPUTS, PER_ROW, PER_TOKEN, LossTerm, ObjectiveName, get_objective, spec_of
from torchrl_llm_kl.losses._parts import Correction, Part, TermPart, dummies, name_of, try_out
from torchrl_llm_kl.losses._token_loss import TokenLoss, merged_metrics, zero_of
from torchrl_llm_kl.losses._tokens import MaskingStrategy, TokenReader
from torchrl_llm_kl.losses.corrections import apply_correction
from torchrl_llm_kl.scoring import LogProbScorer, ScorerSlot, Scores
from torchrl_llm_kl.transforms._interface import TOKENS_FULL

__all__ = ["PolicyLoss"]

# Names of torchrl's GRPOLoss.
_KEY_ALIASES = {"action": "tokens", "sample_log_prob": "old_log_prob", "ref_log_probs": "ref_log_prob"}
# What the actor's forward gives, not the data.
_FROM_ACTOR = ("log_prob", "mask", "entropy", "kl")
_FOR_METRICS = ("old_log_prob", "ref_log_prob", "sampler_log_prob")
_MASKS = ("expert_mask", "selected")


class PolicyLoss(TokenLoss):
    r"""A policy loss for language models: an objective, terms beside it, and how they are summed over tokens.

    Current log-probs come from the scoring engine with gradient: shared prompts are forwarded once, the head runs where a
    token counts, and ``[B, T, V]`` never exists. Reads rollouts as the transforms of this package and torchrl's collectors
    write them: padded, nested or lazily stacked, with any number of batch dimensions.

    Args:
        actor: a TorchRL wrapper around a transformers model, the model itself, any module that a
            :class:`~torchrl_llm_kl.LogProbScorer` takes, or such a scorer with its own settings.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`, or a function of the same protocol.

    Keyword Args:
        terms: further parts of the loss: :class:`~torchrl_llm_kl.losses.KLToReference`,
            :class:`~torchrl_llm_kl.losses.KLToSampler`, :class:`~torchrl_llm_kl.losses.EntropyBonus`, or functions of the
            protocol of objectives.
        corrections: what the objective is multiplied by: :class:`~torchrl_llm_kl.losses.ImportanceWeights`,
            :class:`~torchrl_llm_kl.losses.OffPolicySequenceMask`, :class:`~torchrl_llm_kl.losses.TopEntropyMask`.
        aggregation: see :func:`~torchrl_llm_kl.losses.aggregate`; by default the objective's own. Trinity:
            ``loss_agg_mode``.
        max_len: tokens, for ``seq-mean-token-sum-norm``: the longest response that is sampled. Needed there.
        masking_strategy: which tokens count: ``"sft"``: the response of each step; ``"rlhf"``: whatever the assistant said,
            in earlier turns too; ``"generic"``: all but the first of each sequence. The entry ``loss_mask``, where the data
            has it, takes away from these.
        reference: a model or scorer with the same vocabulary, for an exact KL, and for reference log-probs that the data
            does not hold. Its parameters are not the loss's.
        temperature: divides the logits, as the sampler's temperature did.
        tokens_per_batch: see :class:`~torchrl_llm_kl.LogProbScorer`.
        dtype: see :class:`~torchrl_llm_kl.LogProbScorer`.
        log_entropy: report the entropy of the policy although no part of the loss needs it: another sum over the vocabulary.
        functional: keep the actor's parameters apart from its module, under ``actor_network_params``, as torchrl's losses do.
            Default False, which is needed for FSDP and costs nothing.
        hyper: the objective's hyper-parameters, under its own names or Trinity's. Numbers are buffers: they are saved, and
            change in place by assignment (``loss.clip_high = 0.3``), as does ``loss.kl_to_ref_coeff``.

    Keys (``set_keys``): ``tokens`` (or ``action``), ``old_log_prob`` (``sample_log_prob``), ``ref_log_prob``
    (``ref_log_probs``), ``sampler_log_prob``, ``advantage``, ``expert_mask``, ``loss_mask``, ``selected``, ``pair_id``,
    ``chosen``, ``denominators``. Where an entry under ``"next"`` is missing, the one without ``"next"`` is taken.

    Outputs:
        ``loss_<name>`` for each term, 0-dim (per token with aggregation ``"none"``), to be added up; and metrics without
        graph, of the tokens that count: the objective's own, ``ESS``, ``ratio_*`` quantiles, ``kl_to_sampler``,
        ``kl_to_ref``, ``entropy``, ``num_tokens``, ``num_sequences``.

    Raises:
        TypeError: if there is no such hyper-parameter.
        ValueError: if one is out of range; on data, if lengths differ or a number that counts is not finite.
        KeyError: on data, if an entry that is needed is missing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> full = torch.tensor([[3, 4, 5], [3, 4, 6]])
        >>> tokens = TensorDict(prompt=full[:, :2], full=full, batch_size=[2])
        >>> data = TensorDict(tokens=tokens, advantage=torch.tensor([1.0, -1.0]), batch_size=[2])
        >>> loss = PolicyLoss(model, "gpg", terms=[EntropyBonus(0.01)])
        >>> sorted(key for key in loss(data).keys() if key.startswith("loss_"))
        ['loss_entropy', 'loss_objective']

    .. seealso:: :meth:`count`, for losses of micro-batches that add up to that of the batch.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        tokens: NestedKey = TOKENS_FULL
        old_log_prob: NestedKey = ("next", "log_probs", "full")
        ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")
        sampler_log_prob: NestedKey = ("next", "sampler_log_probs", "full")
        advantage: NestedKey = "advantage"
        expert_mask: NestedKey = "expert_mask"
        loss_mask: NestedKey = "loss_mask"
        selected: NestedKey = "selected"
        pair_id: NestedKey = "pair_id"
        chosen: NestedKey = "chosen"
        denominators: NestedKey = "denominators"

    actor_network: nn.Module
    actor_network_params: Any
    target_actor_network_params: Any

    def __init__(
        self,
        actor: Any,
        objective: ObjectiveName | Callable[..., tuple[LossTerm, ...]] = "ppo",
        *,
        terms: Sequence[Part | Callable[..., tuple[LossTerm, ...]]] = (),
        corrections: Sequence[Correction] = (),
        aggregation: str | None = None,
        max_len: int | None = None,
        masking_strategy: MaskingStrategy = "sft",
        reference: Any = None,
        temperature: float = 1.0,
        tokens_per_batch: int | None = None,
        dtype: torch.dtype | None = None,
        log_entropy: bool = False,
        functional: bool = False,
        **hyper: Any,
    ) -> None:
        objective = get_objective(objective) if isinstance(objective, str) else objective
        spec = spec_of(objective)
        if "loss_agg_mode" in hyper:
            if aggregation is not None:
                raise TypeError("'loss_agg_mode' and 'aggregation' are the same argument: pass one of them")
            aggregation = hyper.pop("loss_agg_mode")
        super().__init__(
            aggregation=aggregation or ("token-mean" if spec is None else spec.aggregation),
            max_len=max_len,
            masking_strategy=masking_strategy,
        )
        settings = {"temperature": temperature, "tokens_per_batch": tokens_per_batch, "dtype": dtype}
        self._given_scorer = actor if isinstance(actor, LogProbScorer) else None
        if self._given_scorer is not None:
            changed = [name for name, value in settings.items() if value != (1.0 if name == "temperature" else None)]
            if changed or functional:
                raise ValueError(
                    f"actor is a scorer, which has settings of its own: set {changed or 'functional'} there"
                )
            actor = self._given_scorer.model
        self._functional = functional
        if functional:
            self.convert_to_functional(actor, "actor_network", create_target_params=False)
        else:
            self.actor_network = actor
        self._settings: dict[str, Any] = settings
        self._slot = ScorerSlot()
        self.__dict__["_reference"] = reference  # no submodule: its parameters are not to be trained
        self._reference_slot = ScorerSlot()

        if spec is not None:
            hyper = spec.hyperparameters.translate(hyper, stacklevel=4)
        self.objective = TermPart(objective, **hyper)
        self.terms = nn.ModuleList(term if isinstance(term, Part) else TermPart(term) for term in terms)
        self.corrections = nn.ModuleList(corrections)
        self.log_entropy = log_entropy
        if isinstance(reference, LogProbScorer) and reference.temperature != self.scorer_temperature:
            raise ValueError(
                f"the policy is scored at temperature {self.scorer_temperature:g} and the reference at "
                f"{reference.temperature:g}: a KL compares the two at one temperature, that of the sampler"
            )
        if "kl" in self._needs and reference is None:
            raise ValueError("an exact KL is calculated from both models: pass the reference model as reference=")
        self._dry_names()  # raises for two terms of one name
        self._expose(self._exposed_names())

    # ------------------------------------------------------------------ what it is made of

    @property
    def _parts(self) -> list[Part]:
        return [self.objective, *self.terms, *self.corrections]

    @property
    def _needs(self) -> set[str]:
        """The inputs that a part requires under its current hyper-parameters."""
        return {name for part in self._parts for name in part.needs}

    @property
    def functional(self) -> bool:
        """Whether the actor's parameters are kept apart from its module."""
        return self._functional

    @property
    def reference(self) -> Any:
        """The reference model or scorer, None if there is none."""
        return self.__dict__["_reference"]

    def set_keys(self, **kwargs: Any) -> None:
        """Say where entries are. Names as under *Keys* above."""
        renamed = {_KEY_ALIASES.get(name, name): key for name, key in kwargs.items()}
        if len(renamed) != len(kwargs):
            raise TypeError(f"got an entry under two of its names: {', '.join(kwargs)}")
        super().set_keys(**renamed)

    def _exposed_names(self) -> dict[str, tuple[Part, str]]:
        named: dict[str, tuple[Part, str]] = {name: (self.objective, name) for name in self.objective.names}
        for part in (*self.terms, *self.corrections):
            prefix = name_of(part.function).removesuffix("_bonus")
            named |= {f"{prefix}_{name}": (part, name) for name in part.names}
        return named

    def _check_hyper(self, part: Part, hyper: Mapping[str, Any]) -> None:
        try_out(part, hyper)

    # ------------------------------------------------------------------ keys

    @property
    def _data_keys(self) -> list[NestedKey]:
        needs = self._data_needs
        return [getattr(self.tensor_keys, name) for name in (*PER_TOKEN, *PER_ROW) if name in needs]

    @property
    def out_keys(self) -> list[NestedKey]:
        """The terms as ``loss_<name>``, and the metrics."""
        given = self.__dict__.get("_out_keys")
        if given is not None:
            return given
        names, metrics = self._dry_names()
        return [*(f"loss_{name}" for name in names), *metrics]

    @out_keys.setter
    def out_keys(self, values: Sequence[NestedKey] | None) -> None:
        self.__dict__["_out_keys"] = None if values is None else list(values)

    @property
    def _data_needs(self) -> set[str]:
        given = {"ref_log_prob"} if self.reference is not None else set()
        return self._needs - given - set(_FROM_ACTOR)

    # ------------------------------------------------------------------ forward

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch, a micro-batch or a single trajectory.

        Args:
            tensordict: see the class; not changed.

        Returns:
            A TensorDict without batch dimensions: ``loss_<name>`` and metrics.
        """
        td, counted, inputs = self._read(tensordict)
        inputs |= self._score(counted, inputs)
        # A sampler's log-prob that is NaN is one that it did not give: importance weights take it for no difference.
        needs = self._needs
        needed = {name for part in (self.objective, *self.terms) for name in part.inputs} & needs
        read = {name: value for name, value in inputs.items() if name in needed or name == "log_prob"}
        check_finite_inputs(read, vars(self.tensor_keys), counted, unread=self._of_experts(inputs))
        terms, metrics = self._terms(inputs)
        return self._output(td, counted, terms, {**common_metrics(inputs), **metrics})

    def _of_experts(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Tokens at which the objective reads nothing but the policy's own log-probs."""
        return inputs.get("expert_mask") if "expert_mask" in self._needs else None

    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        return self._terms(self._read(td, only_masks=True)[2])[0]

    @property
    def _reader(self) -> TokenReader:
        return TokenReader.of(self.actor_network, self.tensor_keys.tokens, self.masking_strategy)

    def _read(
        self, tensordict: TensorDictBase, *, only_masks: bool = False
    ) -> tuple[TensorDictBase, Counted, dict[str, Tensor]]:
        """What the data holds for this loss: the tokens that count, and each input of one number per token or sequence."""
        td, tokens, mask, responses = self._count_tokens(tensordict)
        flat: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        who, data_needs = name_of(self.objective.function), self._data_needs
        taken = {name for part in self._parts for name in part.inputs} | set(_FOR_METRICS)
        for name in (*PER_TOKEN, *PER_ROW):
            if name in _FROM_ACTOR or name not in taken:
                continue
            key = getattr(self.tensor_keys, name)
            needed = name in data_needs
            found = require_key(td, key, name, who) if needed else find_key(td, key)
            if found is None:
                continue
            if name in PER_ROW:
                value = per_sequence(td, found)
                if value is None:
                    raise ValueError(f"{name} must hold one value for each sequence, see {found!r}")
                rows[name] = value
            else:
                fill = 0.0 if name in _MASKS else math.nan
                flat[name] = per_token(td, found, tokens, responses, fill=fill).detach()
            if name == "old_log_prob" and needed:
                mask = self._reader.without_unscored(mask, flat[name], tokens, found)
        counted = Counted(tokens, mask)
        inputs = {name: counted.gather(value) for name, value in flat.items()}
        inputs = {name: x.bool() if name in _MASKS else x for name, x in inputs.items()}
        if only_masks:
            zeros = torch.zeros(counted.mask.shape, device=counted.mask.device)
            dummies = {
                name: zeros
                for name in INPUTS
                if name not in PER_ROW and name not in ("mask", "expert_mask", "selected")
            }
            inputs = {**inputs, **dummies}
        return td, counted, {**inputs, **rows, "mask": counted.mask}

    def _score(self, counted: Counted, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the models say of the tokens that count."""
        needs = self._needs
        wants_entropy = self.log_entropy or "entropy" in needs
        grad = torch.is_grad_enabled()
        keep = torch.zeros_like(counted.tokens.values, dtype=torch.bool)
        keep[counted.elements] = True
        reference = self._reference_scorer
        exact = reference if "kl" in needs else None
        with self._parameters_in_place():
            scores: Scores = self.scorer.evaluate(
                counted.tokens, keep, entropy=wants_entropy, reference=exact, grad=grad
            )
            ref = scores.ref_log_prob
            if ref is None and reference is not None and "ref_log_prob" in needs and "ref_log_prob" not in inputs:
                ref = reference.score(counted.tokens, keep)
        found = {"log_prob": scores.log_prob, "entropy": scores.entropy, "kl": scores.kl}
        if "ref_log_prob" not in inputs:
            found["ref_log_prob"] = ref
        out = {name: counted.gather(values.values) for name, values in found.items() if values is not None}
        if grad and not out["log_prob"].requires_grad:  # nothing counts: a loss of 0 that can be differentiated
            out["log_prob"] = out["log_prob"] + zero_of(self._trained).to(out["log_prob"].device)
        return out

    def _terms(self, inputs: Mapping[str, Tensor]) -> tuple[list[LossTerm], dict[str, Tensor]]:
        terms: Sequence[LossTerm] = self.objective(inputs)
        metrics: dict[str, Tensor] = {}
        for correction in self.corrections:
            weights, seen = correction(inputs)
            terms = apply_correction(terms, weights, inputs["mask"])
            metrics |= seen
        return [*terms, *(term for part in self.terms for term in part(inputs))], metrics

    # ------------------------------------------------------------------ the actor

    @property
    def scorer(self) -> LogProbScorer:
        """The scorer of the actor."""
        return self._given_scorer or self._slot.get(self.actor_network, **self._settings)

    @property
    def scorer_temperature(self) -> float:
        """What divides the logits."""
        return self._settings["temperature"] if self._given_scorer is None else self._given_scorer.temperature

    @property
    def _reference_scorer(self) -> LogProbScorer | None:
        reference = self.reference
        if reference is None or isinstance(reference, LogProbScorer):
            return reference
        return self._reference_slot.get(reference, **self._settings)

    @contextlib.contextmanager
    def _parameters_in_place(self) -> Iterator[None]:
        if not self._functional:
            yield
            return
        with self.actor_network_params.to_module(self.actor_network):
            yield

    @property
    def _trained(self) -> Iterable[Tensor]:
        return self.actor_network_params.values(True, True) if self._functional else self.actor_network.parameters()

    # ------------------------------------------------------------------ names before there is data

    def _dry_names(self) -> tuple[list[str], list[str]]:
        """Names of terms and metrics, from two tokens that do not exist. Hyper-parameters out of range raise here."""
        inputs = dummies()
        with torch.no_grad():
            terms, metrics = self._terms(inputs)
        names = [term.name for term in terms]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two terms of the loss are called {twice.pop()!r}: give them different names")
        needs = self._needs
        known = {name: value for name, value in inputs.items() if name in needs or name in ("log_prob", "mask")}
        return names, list(merged_metrics(terms, {**common_metrics(known), **metrics}))
