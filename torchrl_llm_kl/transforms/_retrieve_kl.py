"""One transform that scores the policy and the reference and computes their KL."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import Compose, Transform

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl._typing import asked, has
from torchrl_llm_kl.masks import TemplateArgs, Tokenizer
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import Located, RewardPlacement, Scope, first_difference
from torchrl_llm_kl.scoring import (
    Extra,
    LogProbScorer,
    Model,
    RoutedExperts,
    SamplerMismatchWarning,
    ScoreOptions,
    Scores,
    ScoringJob,
    asked_of,
    check_distributions,
    check_extras,
    check_vocabularies,
    log_probs_only,
)
from torchrl_llm_kl.transforms._base import RayVariant, ServiceBackend, SharedSetting, StepMixin, resolve_factory
from torchrl_llm_kl.transforms._kl import Estimator, KLComputation
from torchrl_llm_kl.transforms._retrieve_log_prob import (
    RetrieveLogProb,
    check_options,
    check_scored_model,
    full_key_problem,
    no_record,
    over_kept,
)

_POLICY, _REFERENCE, _KL = range(3)
#: Extras of the policy, each used unless ``extras`` has one of its type.
_OF_POLICY: tuple[Extra, ...] = (*RetrieveLogProb.defaults, RoutedExperts())


class RetrieveKL(StepMixin, Compose, metaclass=RayVariant):
    r"""Write the log-probs of the policy and of the reference, their KL, and the penalised reward.

    The transform composes two :class:`RetrieveLogProb` and a :class:`KLComputation`. It locates the tokens once for both
    models and checks that both see the same tokens. Append it after all transforms that write the reward, because it turns the
    reward into one number per token.

    Args:
        gen_model: the policy, a wrapper with ``generate=False`` or a transformers model. The default ``"from_collector"``
            takes the policy of the collector that runs the env, at the first step.
        ref_model: the reference, also a wrapper or a transformers model. ``"base"`` is the policy with its PEFT adapters
            disabled, or with the adapter of ``Adapters("NAME", of="reference")`` among the ``extras``.

    Keyword Args:
        gen_model_factory: builds ``gen_model``.
        ref_model_factory: builds ``ref_model``.
        history_key: the key of the conversation, which is read if the data holds no tokens. Default ``"history"``.
        detach: with False the policy's log-probs have a gradient. The frozen reference's never do. Default True.
        gen_log_probs_full_key: where the policy's log-probs go. Default ``("log_probs", "full")``.
        ref_log_probs_full_key: where the reference's go. Default ``("ref_log_probs", "full")``.
        estimator: see :class:`KLComputation`. ``"exact"`` runs both models side by side and sums over the whole vocabulary at
            each token. Both models must have the same vocabulary.
        kl_key, add_to_reward, coeff, reward_placement: see :class:`KLComputation`.
        assistant_only, tokenizer_kwargs, device, tokenizer, padding_side, scope: settings of both models, see
            :class:`RetrieveLogProb`.
        options: how both models score, see :class:`RetrieveLogProb`. A truncating ``sampling`` applies to the policy. The
            reference is scored at the same temperature over all tokens. With ``Sampling(reference="kept")`` it is scored over
            the tokens that the policy keeps, and both models run side by side for every estimator. A reference in a service
            receives the options with each request.
        extras: extras of the policy, or of the reference if they have ``of="reference"``, see :class:`RetrieveLogProb`. An
            :class:`Adapters` applies to one model. The policy replays experts that a sampler recorded under
            ``"routed_experts"``, unless a :class:`RoutedExperts` changes that. The reference uses its own routing.
        service_backend, service_backend_options, use_ray_service: see :class:`RetrieveLogProb`.

    All arguments are attributes that may change at any time, except the models and the arguments that are fixed in
    :class:`RetrieveLogProb`. ``reward_key``, ``old_log_probs_key`` and ``charged_key`` of the :class:`KLComputation` are
    attributes too.

    Shapes:
        Log-probs and KL: float32 nats ``[*B, T]``. Reward: ``[*B, T, 1]``. All in the layout of a :class:`RetrieveLogProb` of
        the policy.

    Raises:
        ValueError: at construction, if a model generates, or the models differ in ``pad_output`` or in their vocabulary, or
            write to the same key. The vocabulary of a collector's policy is checked at the first step. On data, see
            :class:`RetrieveLogProb` and :class:`KLComputation`.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, next=TensorDict(reward=torch.ones(1, 1), batch_size=[1]), batch_size=[1])
        >>> data = RetrieveKL(model, model)(data)  # the KL of a model with itself is 0
        >>> data["next", "kl_penalty"].tolist(), data["next", "reward"].squeeze(-1).tolist()
        ([[0.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 1.0]])
    """

    fixed: ClassVar[frozenset[str]] = RetrieveLogProb.fixed | {"gen_model", "ref_model", "history_key"}

    assistant_only = SharedSetting[bool]((_POLICY, "assistant_only"), (_REFERENCE, "assistant_only"))
    scope = SharedSetting[Scope]((_POLICY, "scope"), (_REFERENCE, "scope"))
    detach = SharedSetting[bool]((_POLICY, "detach"))
    gen_log_probs_full_key = SharedSetting[NestedKey]((_POLICY, "log_probs_full_key"), (_KL, "gen_log_probs_full_key"))
    ref_log_probs_full_key = SharedSetting[NestedKey](
        (_REFERENCE, "log_probs_full_key"), (_KL, "ref_log_probs_full_key")
    )
    estimator = SharedSetting[Estimator]((_KL, "estimator"))
    coeff = SharedSetting[nn.Module]((_KL, "coeff"))
    add_to_reward = SharedSetting[bool]((_KL, "add_to_reward"))
    reward_placement = SharedSetting[RewardPlacement]((_KL, "reward_placement"))
    kl_key = SharedSetting[NestedKey]((_KL, "kl_key"))
    reward_key = SharedSetting[NestedKey]((_KL, "reward_key"))
    old_log_probs_key = SharedSetting["NestedKey | None"]((_KL, "old_log_probs_key"))
    charged_key = SharedSetting["NestedKey | None"]((_KL, "charged_key"))

    def __init__(
        self,
        gen_model: Model | str = "from_collector",
        ref_model: Model | str | None = None,
        *,
        gen_model_factory: Callable[[], Model] | None = None,
        ref_model_factory: Callable[[], Model] | None = None,
        assistant_only: bool = True,
        history_key: NestedKey = "history",
        tokenizer_kwargs: TemplateArgs | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Tokenizer | None = None,
        padding_side: str = "left",
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor | nn.Module = 1.0,
        use_ray_service: bool = False,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, object] | None = None,
        estimator: Estimator = "k1",
        reward_placement: RewardPlacement = "last",
        scope: Scope = "turn",
        options: ScoreOptions | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        options, extras = check_options(options), _check_extras(extras)
        gen_model = resolve_factory("gen_model", gen_model, gen_model_factory, default="from_collector")
        ref_model = resolve_factory("ref_model", ref_model, ref_model_factory)
        if estimator == "exact":  # check first, because the parts below would connect to a service for its settings
            check_distributions(gen_model, ref_model)
        ref_model = _check_models(gen_model, ref_model)
        if isinstance(gen_model, str):  # torchrl raises in this case, and RetrieveLogProb warns in the others
            for name, key in (("gen", gen_log_probs_full_key), ("ref", ref_log_probs_full_key)):
                if problem := full_key_problem(f"{name}_log_probs_full_key", key):
                    raise ValueError(problem)
        part = partial(
            RetrieveLogProb,
            tokenizer_kwargs=tokenizer_kwargs,
            tokenizer=tokenizer,
            padding_side=padding_side,
            service_backend="direct",  # a Ray variant has already replaced the models, so the parts must not
        )
        self._base = base = isinstance(ref_model, str)
        compared = gen_model if base else ref_model
        ref_options, ref_extras = self._of_reference(options), _of(extras, "reference")
        if base and asked_of(ref_options, ref_extras).adapters is True:
            raise ValueError('ref_model="base" with Adapters(True, of="reference") is the policy itself: its KL is 0.')
        with warnings.catch_warnings():  # the reference never samples, so its sampling settings do not matter
            warnings.simplefilter("ignore", SamplerMismatchWarning)
            reference = part(
                compared,
                log_probs_full_key=ref_log_probs_full_key,
                device=None if isinstance(compared, str) else device,
                options=ref_options,
                extras=ref_extras,
            )
        # The reference never samples, so its sampler is not compared later either.
        reference._compared = True
        policy = part(
            gen_model,
            log_probs_full_key=gen_log_probs_full_key,
            detach=detach,
            device=None if isinstance(gen_model, str) else device,
            options=options,
            extras=_of(extras, "policy"),
        )
        # Only the policy sampled, so only it replays recorded experts by default.
        policy.defaults = _OF_POLICY
        kl = KLComputation(gen_log_probs_full_key, ref_log_probs_full_key, padding_side=padding_side)
        super().__init__(policy, reference, kl)
        self.assistant_only, self.scope = assistant_only, scope
        self.kl_key, self.add_to_reward, self.coeff = kl_key, add_to_reward, coeff
        self.estimator, self.reward_placement = estimator, reward_placement
        for each in (policy, reference):
            each.read_conversation(history_key)
        self._extras, self._compared_vocabularies = extras, False
        if not isinstance(gen_model, str):
            self._check_vocabularies()
        self._check_side_by_side()

    # ------------------------------------------------------------------ settings

    @property
    def options(self) -> ScoreOptions:
        """How both models score. May be set."""
        options: ScoreOptions = self[_POLICY].options
        return options

    @options.setter
    def options(self, options: ScoreOptions) -> None:
        self[_REFERENCE].options = self._of_reference(check_options(options))
        self[_POLICY].options = options

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The extras of both models. May be set."""
        return self._extras

    @extras.setter
    def extras(self, extras: Sequence[Extra]) -> None:
        checked = _check_extras(extras)
        self[_POLICY].extras, self[_REFERENCE].extras = _of(checked, "policy"), _of(checked, "reference")
        self._extras = checked

    def clone(self) -> RetrieveKL:
        """A copy for another env, of this class and with the same models."""
        # Compose.clone would return a plain Compose.
        copied = Transform.clone(self)
        copied.transforms = nn.ModuleList(part.clone() for part in self)
        for part in copied:
            part.set_container(copied)
        return copied

    # ------------------------------------------------------------------ computation

    def arrange(self, data: Ragged) -> Ragged:
        """Convert an output to the layout that the policy's ``pad_output`` requests."""
        return self[_POLICY].arrange(data)

    def check_order(self) -> None:
        """Warn about a later transform that writes the reward."""
        self[_KL].check_order()

    @property
    def side_by_side(self) -> bool:
        """Whether one pass scores both models: for an exact KL, and for a KL over the tokens that the policy keeps."""
        return self.estimator == "exact" or over_kept(self.options)

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Locate the tokens once, score them under both models, and compute the KL."""
        gen, ref, kl = self.transforms
        self._check_vocabularies()
        located = gen.locate(td)
        # Sampled tokens are the same for both models. Rendered ones depend on the tokenizer and the template.
        if not located.sampled and not gen.tokenises_like(ref):
            _check_same_tokens(located, ref.locate(td))
        self._check_side_by_side()
        step = gen.step(td, next_td, located)
        job, ref_job = gen.job(step), ref.job(ref.step(td, next_td, located))
        outputs: dict[NestedKey, Ragged] = {}
        if kl.estimator == "exact":
            scores = gen.evaluate(_paired(job, ref_job), reference=ref.scorer)
            ref_log_prob, penalty = scores.ref_log_prob, kl.checked_exact(scores.kl, scores.log_prob)
        else:
            if over_kept(self.options):
                scores, ref_log_prob = _over_kept(gen, ref, job, ref_job, td)
            else:
                finish = ref.begin(ref_job)  # a remote reference scores while the policy runs here
                scores, ref_scores = gen.evaluate(job), finish()
                ref_log_prob, outputs = ref_scores.log_prob, ref.written(ref.step(td, next_td, located), ref_scores)
            penalty = kl.estimate(scores.log_prob, ref_log_prob, kl.read_old(td, next_td, scores.log_prob))
        outputs |= {gen.log_probs_full_key: scores.log_prob, ref.log_probs_full_key: ref_log_prob}
        return outputs | kl.charged(next_td, penalty, located.host_mask) | gen.written(step, scores)

    def _check_vocabularies(self) -> None:
        """Check the vocabularies once, as soon as both models are known."""
        if not self._compared_vocabularies and not self._base:
            check_vocabularies(*(part._scored_model() for part in self.transforms[:_KL]))
        self._compared_vocabularies = True

    def _check_side_by_side(self) -> None:
        """Raise a ValueError for settings that one pass over both models cannot follow."""
        if not self.side_by_side:
            return
        exact, reference = self.estimator == "exact", self[_REFERENCE]
        if exact:
            check_distributions(*(part.known_model for part in self.transforms[:_KL]))
        setting = "estimator='exact'" if exact else "Sampling(reference='kept')"
        written = [key for key in reference.entries if key != reference.log_probs_full_key]
        if written:
            raise ValueError(
                f"{setting} runs both models side by side, and an extra of the reference writes {written}. Leave it out."
            )
        prompts = [
            [extra.prompt for extra in part.extras if extra.prompt is not None] for part in self.transforms[:_KL]
        ]
        if prompts[0] != prompts[1]:
            advice = "an estimator such as 'k1'" if exact else "Sampling(reference='whole')"
            raise ValueError(
                f"{setting} runs both models side by side on the same tokens, but the policy has the prompts {prompts[0]} and "
                f"the reference {prompts[1]}. Use {advice}."
            )

    def _of_reference(self, options: ScoreOptions) -> ScoreOptions:
        """How the reference scores: at the policy's temperature, over all tokens."""
        options = options.but(sampling=options.sampling.of_reference)
        return options.but(adapters=False) if self._base else options


def _check_extras(extras: Sequence[Extra]) -> tuple[Extra, ...]:
    checked = check_extras(extras)
    if any(extra.reference is not None for extra in checked):
        raise ValueError("extras has ExactKL: a RetrieveKL compares with its ref_model, use estimator='exact'.")
    return checked


def _of(extras: Sequence[Extra], model: str) -> list[Extra]:
    """The extras of one model."""
    return [extra for extra in extras if extra.of in (model, "both")]


def _paired(job: ScoringJob, ref_job: ScoringJob) -> ScoringJob:
    """The policy's job with the routing of the reference."""
    return job._replace(request=replace(job.request, ref_routing=ref_job.request.routing))


def _over_kept(
    gen: RetrieveLogProb, ref: RetrieveLogProb, job: ScoringJob, ref_job: ScoringJob, td: TensorDictBase
) -> tuple[Scores, Ragged | None]:
    """The policy's scores and the reference's log-probs over the tokens that the policy keeps."""
    # If both models return distributions, one pass truncates both to the same tokens. Otherwise each replays a record.
    if not any(log_probs_only(part._scored_model()) for part in (gen, ref)):
        scores = gen.evaluate(_paired(job, ref_job), reference=ref.scorer)
        return scores, scores.ref_log_prob
    kept = job.request.kept
    if kept is not None:
        finish = ref.begin(ref_job._replace(request=replace(ref_job.request, kept=kept)))
        return gen.evaluate(job), finish().log_prob
    # Without a record in the data, only a scorer in this process can return the tokens that the policy keeps.
    if not isinstance(gen.scorer, LogProbScorer):
        raise no_record(td)
    # Both models have the same prompt, so the policy's record also fits the reference's tokens.
    scores = gen.evaluate(job, return_kept=True)
    return scores, ref.begin(ref_job._replace(request=replace(ref_job.request, kept=scores.kept)))().log_prob


# ------------------------------------------------------------------ checks


def _check_models(gen_model: Model | str | None, ref_model: Model | str | None) -> Model | str:
    """Torchrl's checks, with its error texts, of the models that are known at construction. Returns the reference."""
    check_not_a_name("from_collector", gen_model=gen_model)
    check_not_a_name("base", ref_model=ref_model)
    if ref_model is None:
        raise ValueError(
            "ref_model cannot be None: pass the reference model, or 'base' for the policy without adapters."
        )
    if gen_model is None:
        raise ValueError(
            "gen_model cannot be None when not using 'from_collector': pass the policy or 'from_collector'."
        )
    named = {"generation model": gen_model, "reference model": ref_model}
    known = {name: model for name, model in named.items() if not isinstance(model, str)}
    paddings = [asked(model, "pad_output", object) for model in known.values() if has(model, "pad_output")]
    if len(set(paddings)) > 1:
        raise ValueError(
            f"pad_output mismatch: gen_model.pad_output={paddings[0]}, ref_model.pad_output={paddings[1]}. "
            "Both models must use the same padding strategy for KL computation."
        )
    for name, model in known.items():
        check_scored_model(model, name, "RetrieveKL")
    # A bare transformers model has no such key and cannot collide.
    keys = [asked(model, "log_probs_key", object) for model in known.values() if has(model, "log_probs_key")]
    if len(keys) == 2 and keys[0] == keys[1]:
        raise ValueError(
            "The generation and reference models must have different `log_prob_key` values to use the `RetrieveKL` transform."
        )
    return ref_model


def _check_same_tokens(gen: Located, ref: Located) -> None:
    pairs = {
        "tokens": (gen.tokens, ref.tokens),
        "assistant masks": (gen.tokens.like(gen.mask), ref.tokens.like(ref.mask)),
    }
    for name, (ours, theirs) in pairs.items():
        if (difference := first_difference(ours, theirs)) is not None:
            row, at = difference
            a, b = (x.to_list()[row][at : at + 4].tolist() for x in (ours, theirs))
            raise ValueError(
                f"the two models have different {name}, first at sequence {row}, position {at}: {a} and {b}. Give both the "
                "same tokenizer and chat template, or store the sampled tokens."
            )
