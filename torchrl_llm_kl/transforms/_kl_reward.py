"""TorchRL's first KL transform: the policy's log-probs are in the data, the reference's are computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_llm_kl._numerics import check_finite, check_not_a_name
from torchrl_llm_kl.estimators import as_coefficient
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    Located,
    MissingEntryError,
    RewardPlacement,
    Scope,
    TokenisingOptions,
    describe_entries,
    find_log_probs,
    leading_unscored,
    per_token,
    read_result,
    response_mask,
    zeros_of_first_tokens,
)
from torchrl_llm_kl.scoring import (
    EntrySpec,
    Extra,
    Model,
    ScoredStep,
    ScoreOptions,
    ScorerSlot,
    ScoringContext,
    ScoringJob,
    check_replays,
)
from torchrl_llm_kl.transforms._base import RayVariant, ServiceBackend, Setting, in_env, resolve_factory, to_device
from torchrl_llm_kl.transforms._penalty import (
    LOG_PROB_ADVICE,
    Estimator,
    KLPenalty,
    check_pair,
    place_in,
    resolve_estimator,
)
from torchrl_llm_kl.transforms._retrieve_log_prob import ScoringTransform, check_is_model, over_kept

T = TypeVar("T")


def _check_estimator(estimator: Estimator) -> Estimator:
    if estimator == "exact":
        raise ValueError(
            "estimator='exact' needs the policy's whole distributions, which the data does not hold: use "
            "RetrieveKL(policy, reference, estimator='exact')."
        )
    return resolve_estimator(estimator)


def _check_reference(model: T) -> T:
    check_not_a_name(ref_model=model)
    check_is_model("ref_model", model)
    if getattr(model, "generate", False) is True:
        raise ValueError("The actor is configured to generate text, not compute the log-probs.")
    if getattr(model, "input_mode", "tokens") != "tokens":
        raise ValueError(
            "The ref_model must be configured to use tokens as input. Please set the `input_mode` argument to `tokens`."
        )
    return model


class KLRewardTransform(ScoringTransform, KLPenalty, metaclass=RayVariant):
    r"""Penalise the reward with the KL between the policy's log-probs in the data and a reference model's.

    Kept for scripts written against torchrl's class of this name; :class:`RetrieveKL` scores both models and needs no
    log-probs in the data. Append it after all transforms that write the reward.

    Args:
        ref_model: the reference, a wrapper with ``input_mode="tokens"`` and ``generate=False`` or a transformers model.

    Keyword Args:
        ref_model_factory: builds ``ref_model``.
        coef: a number of at least 0, a tensor or a coefficient module. Default 1.
        in_keys: the reward's key. Default ``["reward"]``.
        out_keys: where the penalised reward goes, and optionally the KL and the reference's log-probs. Default
            ``["reward", "kl_penalty", "ref_log_probs"]``.
        log_prob_key: the policy's log-probs, of the whole sequence. Default ``("log_probs", "full")``; where that is
            missing, the ``"response"`` entry beside it is used.
        add_to_reward, padding_side, estimator, reward_placement: see :class:`KLComputation`. ``"exact"`` is impossible: the
            policy is not run here.
        options: how the reference is scored; see :class:`RetrieveLogProb`. A truncating ``sampling`` is the policy's, for
            log-probs of its truncated distribution: the reference is scored at the same temperature, over all tokens or, with
            ``Sampling(reference="kept")``, over those that the sampler recorded.
        extras: how the request is filled from the data, such as a :class:`KeptTokens` with the key of that record, if it is not
            ``"kept"``; none that writes an entry. See :class:`RetrieveLogProb`.
        device, tokenizer, assistant_only, scope: see :class:`RetrieveLogProb`; of the reference.
        service_backend, service_backend_options, use_ray_service: see :class:`RetrieveLogProb`.

    All except ``device``, ``tokenizer`` and ``padding_side`` are attributes that may change at any time.

    Shapes:
        KL, reference log-probs and reward: ``[*B, T, 1]``, in the layout that :class:`RetrieveLogProb` of the reference has.

    Raises:
        ValueError: see :class:`RetrieveLogProb` and :class:`KLComputation`.
        KeyError: if the data has no log-probs of the policy, or lacks the recorded tokens that the reference is to be
            compared over.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> log_probs = TensorDict(full=torch.zeros(1, 4), batch_size=[1])
        >>> data = KLRewardTransform(model)(TensorDict(tokens=tokens, log_probs=log_probs, batch_size=[1]))
        >>> (data["kl_penalty"] + data["ref_log_probs"]).abs().sum().item()
        0.0
    """

    DEFAULT_IN_KEYS: tuple[NestedKey, ...] = ("reward",)

    estimator = Setting(_check_estimator)
    ref_model = Setting[Any](_check_reference)
    coef = Setting(as_coefficient)
    log_prob_full_key = Setting[NestedKey]()

    def __init__(
        self,
        ref_model: Model | None = None,
        *,
        ref_model_factory: Callable[[], Model] | None = None,
        coef: float | Tensor | nn.Module = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Tokenizer | None = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, object] | None = None,
        estimator: Estimator = "k1",
        reward_placement: RewardPlacement = "last",
        scope: Scope = "turn",
        options: ScoreOptions | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        ref_model = resolve_factory("ref_model", ref_model, ref_model_factory, default=None)
        if ref_model is None:
            raise ValueError(
                "Must provide exactly one of 'ref_model' or 'ref_model_factory'. Found neither: pass the reference model, or a "
                "function that builds it."
            )
        read = list(self.DEFAULT_IN_KEYS) if in_keys is None else list(in_keys)
        written = _three_keys(read, None if out_keys is None else list(out_keys))
        super().__init__()
        self.options, self.extras = options, extras
        self.estimator, self.reward_placement = estimator, reward_placement
        self.assistant_only, self.scope = assistant_only, scope
        if over_kept(self.options):
            check_replays(ref_model, what="a reference over what the policy keeps")
        self.ref_model = to_device(_check_reference(ref_model), device)
        self.in_keys = read
        self.reward_key, self.log_prob_full_key, self.add_to_reward = self.in_keys[0], log_prob_key, add_to_reward
        self.coef = coef
        self._tokenising = TokenisingOptions.make(tokenizer, None, padding_side)
        self._slot = ScorerSlot()
        self.out_keys = written
        self.declare()
        _ = self.scorer  # a model that cannot be scored raises

    # ------------------------------------------------------------------ keys and specs

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """In: the reward and the reference's inputs. Out: the penalised reward, the KL and the reference's log-probs."""
        context = self.context
        for extra in self.extras:
            if extra.specs(context) or extra.reference is not None:
                kind = type(extra).__name__
                raise ValueError(f"extras has {kind}, which needs the policy: use RetrieveKL, which runs it.")
        read = [extra.prompt for extra in self.extras if isinstance(extra.prompt, (str, tuple))]
        return [self.reward_key, *self._interface().in_keys, *read], list(self.out_keys)

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """KL and reference log-probs, and the penalised reward if it does not replace the reward."""
        reward_key, *others = self.out_keys
        new_reward = [reward_key] if self.add_to_reward and reward_key != self.reward_key else []
        return dict.fromkeys([*others, *new_reward], EntrySpec((1,)))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the penalised reward where it replaces the reward."""
        return super().transform_reward_spec(reward_spec) if self.out_keys[0] == self.reward_key else reward_spec

    @property
    def penalised_key(self) -> NestedKey:
        """The first of the ``out_keys``."""
        return self.out_keys[0]

    @property
    def pad_output(self) -> bool:
        """Whether the reference pads its output."""
        return bool(self._interface().pad_output)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer given, else the reference's; an AttributeError if there is none."""
        tokenizer = self._tokenising.tokenizer or self._interface().tokenizer
        if tokenizer is None:
            raise AttributeError(
                "The ref_model does not have a tokenizer. Please pass the tokenizer to the constructor."
            )
        return tokenizer

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Score the reference and compare."""
        located = self.locate(td)
        job = self.job(self.step(td, next_td, located))
        ref = job.in_place(self.scorer.run(job.request, self.scored.but(remember=in_env(self)))).log_prob
        gen, known = self._policy_log_probs(td, next_td, located)
        kl = ref.like(self.kl(gen, ref.values, gen, located.mask & known))
        reward_key, kl_key, ref_key = self.out_keys
        outputs = {key: x.like(x.values.unsqueeze(-1)) for key, x in ((kl_key, kl), (ref_key, ref))}
        if self.add_to_reward:
            outputs[reward_key] = self.penalised(next_td, kl, located.host_mask, self.coef)
        return outputs

    @property
    def scored(self) -> ScoreOptions:
        """The options of the reference, which samples nothing."""
        return super().scored.but(sampling=self.options.sampling.of_reference)

    @property
    def context(self) -> ScoringContext:
        """The settings that extras read: what the sampler kept only counts if the reference is compared over it."""
        options = self.options if over_kept(self.options) else self.scored
        return ScoringContext(
            self.ref_model, options, self._interface(), self._tokenising, self.log_prob_full_key, in_env(self)
        )

    def job(self, step: ScoredStep) -> ScoringJob:
        """The request: over the tokens that the policy's sampler recorded, if the reference is compared over these."""
        job = super().job(step)
        if over_kept(self.options) and job.request.kept is None:
            raise MissingEntryError(
                'Sampling(reference="kept") compares over the tokens that the sampler kept: expected them below "kept", or the '
                f"key of KeptTokens, found: {describe_entries(step.td)}. Record them (RecordKept), or take RetrieveKL, which "
                "runs the policy."
            )
        return job

    def _policy_log_probs(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> tuple[Tensor, Tensor]:
        """Log-probs of the policy at the located tokens, 0 at others, and a mask of the known ones; both ``[N]``.

        An engine's wrapper stores 0 or NaN for prompts that it did not score, and torchrl's 0 for the first generated token. A
        KL of ``0 - ref_log_prob`` would charge such a token with the reference's whole log-prob.
        """
        key, tokens, known = self.log_prob_full_key, located.tokens, torch.ones_like(located.mask)
        response = response_mask(td, tokens, self._interface())
        gen = read_result(td, next_td, key)
        if gen is not None:
            if torch.equal(gen.container.row_lengths, tokens.container.row_lengths) and gen.keep is None:
                gen = Ragged.from_slots(gen.slots(), tokens.container, tokens.keep)
            else:
                gen, _ = check_pair(gen, tokens, padding_side=self._tokenising.padding_side)
            values, unscored = gen.values, ~known
            if not self.assistant_only or self.scope == "full":
                unscored = leading_unscored(values, tokens)
                unscored = unscored if response is None else unscored & ~response
            text = "0 or NaN for the first {} tokens of prompts: its engine returned no scores of prompts. Those tokens are"
        else:
            place = find_log_probs(td, key)
            if place is None:
                raise MissingEntryError(
                    f"the policy's log-probs are missing: expected {key!r}, found: {describe_entries(td, next_td)}. Collect "
                    "with return_log_probs=True, put RetrieveLogProb before, or use RetrieveKL, which scores both."
                )
            key, values = place, per_token(td, place, tokens, response, repeats=False).float()
            known = ~values.isnan() if response is None else response
            unscored = zeros_of_first_tokens(values, known, tokens)
            text = "exactly 0 for the first generated token of {} sequences: torchrl never computes it. That token is"
        skipped = int((located.mask & unscored).sum())
        if skipped:
            warnings.warn(
                f"{key!r} holds {text.format(skipped)} left out of the KL; RetrieveKL scores every token.",
                stacklevel=2,
            )
        known = known & ~unscored
        values = torch.where(known & located.mask, values, 0).detach()
        name = f"the log-prob of the policy under {key!r}"
        check_finite({name: values}, place=place_in(located.tokens), advice=LOG_PROB_ADVICE)
        return values, known

    def _scored_model(self) -> Model:
        return self.ref_model


def _three_keys(in_keys: list[NestedKey], out_keys: list[NestedKey] | None) -> list[NestedKey]:
    """The keys of reward, KL and reference log-probs."""
    out = in_keys if out_keys is None else out_keys
    if len(out) == len(in_keys):
        out = [*out, "kl_penalty", "ref_log_probs"]
    if len(out) != len(in_keys) + 2:
        raise ValueError(
            "The out_keys must have the same length as the in_keys (plus two additional optional kl entries for logging)."
        )
    if len(in_keys) != 1:
        raise ValueError(f"Only one in_key/out_key is allowed, got in_keys={in_keys}, out_keys={out}.")
    return out
