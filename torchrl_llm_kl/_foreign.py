"""Settings of TRL, Trinity-RFT and verl: their names there and here, with their defaults and what becomes of them.

One table, for the hints of error messages, the translations (``algorithms.from_trl``, ...) and ``docs/elsewhere.md``. Read from
TRL 1.16.0, Trinity-RFT 0.6.0 and verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Library = Literal["TRL", "Trinity-RFT", "verl"]
#: Where a setting goes: ``override``: an argument of make_algorithm; ``sampling``: the distribution that tokens are drawn from;
#: ``outside``: the loop around the loss; ``refused``: nowhere.
Place = Literal["override", "sampling", "outside", "refused"]


@dataclass(frozen=True)
class Foreign:
    """A setting of another library.

    ``name`` is its path there; one that ends in ``.*`` stands for all below it. ``here`` is what it is called in this package,
    ``note`` what to do with it or why there is none.
    """

    library: Library
    name: str
    default: Any
    place: Place
    here: str = ""
    note: str = ""
    section: str = ""

    @property
    def leaf(self) -> str:
        """The last part of the path."""
        return self.name.rpartition(".")[2]


def _table(library: Library, section: str, *rows: Foreign) -> Mapping[str, Foreign]:
    """Rows by name, in order; a later row of a name replaces an earlier one."""
    return MappingProxyType({row.name: replace(row, library=library, section=section) for row in rows})


def _is(name: str, default: Any, here: str, note: str = "") -> Foreign:
    return Foreign("TRL", name, default, "override", here, note)


def _drawn(name: str, default: Any, here: str, note: str = "") -> Foreign:
    return Foreign("TRL", name, default, "sampling", here, note)


def _outside(note: str, **defaults: Any) -> tuple[Foreign, ...]:
    return tuple(
        Foreign("TRL", name.replace("__", "."), value, "outside", "", note) for name, value in defaults.items()
    )


def _refused(name: str, default: Any, note: str) -> Foreign:
    return Foreign("TRL", name, default, "refused", "", note)


# ------------------------------------------------------------------ what several of them share

_OPTIMIZER = "the optimiser and its schedule"
_LENGTH = "the sampler's limit, `max_new_tokens`; `max_len` where the loss divides by it"
_REFERENCE = "`ReferenceUpdater(..., decay=1 - alpha)` after every so many steps"
_MODEL = "load the model so"
_DATA = "prepare the data so"
_ENGINE = "start the sampler so"
_LOG = "log what `loss` returns"

# ------------------------------------------------------------------ TRL

_TRL_MODEL = (
    *_outside(_MODEL, model_init_kwargs=None, trust_remote_code=False),
    _refused("router_aux_loss_coef", None, "the balance of experts is a loss of the model's own: add its `aux_loss`"),
    *_outside(
        "models are scored without dropout; the actor's own mode decides in the loss: `actor.eval()`",
        disable_dropout=False,
    ),
)
_TRL_REFERENCE = _outside(_REFERENCE, sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512)
_TRL_ONLINE = (
    *_TRL_MODEL,
    _is("num_generations", 8, "group_size", "and `repeat_times`"),
    *_outside("of the evaluation loop", num_generations_eval=None),
    _is("max_completion_length", 512, "max_len", "where the loss divides by it; else `max_new_tokens` of the sampler"),
    *_outside(_DATA, shuffle_dataset=True, pad_to_multiple_of="auto"),
    *_outside(
        "rows per collected batch; `minibatches` and `micro_batches` split it",
        generation_batch_size=None,
        steps_per_generation=None,
    ),
    _drawn("temperature", 1.0, "temperature"),
    *(
        _drawn(name, default, f"Sampling.{name}", "of the sampler alone: TRL's log-probs are those of all tokens")
        for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", None))
    ),
    *_outside(
        "an argument of the sampler's `generate`, and not part of its log-probs, in TRL neither",
        generation_kwargs=None,
        repetition_penalty=1.0,
        cache_implementation=None,
    ),
    *_outside(_DATA, chat_template_kwargs=None),
    _is("use_vllm", False, "loss_args['corrections']", "log-probs of the sampler and of the trainer differ"),
    *_outside(
        _ENGINE,
        ds3_gather_for_generation=True,
        vllm_mode="colocate",
        vllm_model_impl="vllm",
        vllm_enable_sleep_mode=False,
        vllm_structured_outputs_regex=None,
        vllm_server_base_url=None,
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
        vllm_server_timeout=240.0,
        vllm_group_port=51216,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=None,
        vllm_tensor_parallel_size=1,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    ),
    *_outside("optimiser steps on the same batch: that many passes over `minibatches`", num_iterations=1),
    *_outside("write `loss_mask` 0 to answers without an end token", mask_truncated_completions=False),
    *_TRL_REFERENCE,
    *_outside(
        _LOG,
        log_completions=False,
        log_multimodal=True,
        num_completions_to_print=None,
        log_unique_prompts=False,
    ),
)
_ENTROPY = (
    "bounds and step of `AdaptiveEntropyCoefficient`; call its `update` with the metric `entropy` after each step"
)
_PREFERENCE_DATA = _outside(
    _DATA, dataset_num_proc=None, max_length=1024, pad_to_multiple_of="auto", activation_offloading=False
)
_STORED_REFERENCE = _outside(
    "`RememberedModel`, or `reference='data'`", precompute_ref_log_probs=False, precompute_ref_batch_size=None
)

#: Of preference trainers without a reference.
_TRL_PAIRS = (
    *_outside(_MODEL, model_init_kwargs=None, trust_remote_code=False, is_encoder_decoder=None),
    *_outside("models are scored without dropout; for the actor: `actor.eval()`", disable_dropout=True),
    *_outside(_DATA, dataset_num_proc=None, max_length=1024, max_completion_length=None),
    *_outside("of the evaluation loop", generate_during_eval=False),
)
_SFT = (
    *_TRL_MODEL[:-1],
    *_PREFERENCE_DATA,
    *_outside(
        _DATA,
        chat_template_path=None,
        dataset_text_field="text",
        dataset_kwargs=None,
        eos_token=None,
        truncation_mode="keep_start",
        shuffle_dataset=False,
        pad_token=None,
    ),
    *_outside(
        "nothing: rows are packed without padding",
        packing=False,
        packing_strategy="bfd",
        padding_free=False,
        eval_packing=None,
    ),
    *_outside("the tokens to train on: `masking_strategy`", completion_only_loss=None, assistant_only_loss=False),
    _is("loss_type", "nll", "objective", "`sft`; `dft` is `sft_is`"),
    _refused("label_smoothing_factor", 0.0, "the likelihood of the data alone"),
)

#: TRL's settings by trainer, without those of transformers' TrainingArguments.
TRL: Mapping[str, Mapping[str, Foreign]] = {
    "grpo": _table(
        "TRL",
        "GRPO",
        *_TRL_ONLINE,
        *_outside("`dtype=torch.float32` in `loss_args`", cast_lm_head_to_fp32=False),
        *_outside(_ENGINE, max_tool_calling_iterations=None),
        *_outside(_LOG, log_completions_hub_repo=None),
        _is("loss_type", "dapo", "objective", "and `aggregation`"),
        _is("importance_sampling_level", "token", "objective", "`gspo` for `sequence`"),
        _is("epsilon", 0.2, "clip_low", "and `clip_high`, unless `epsilon_high` is given"),
        _is("epsilon_high", None, "clip_high", "cispo: `clip_high + 1`"),
        _is("delta", None, "clip_ratio_c", "equal from `1 + epsilon_high` on"),
        _is("beta", 0.0, "kl_loss_coeff", "and `reference=`"),
        _is("use_bias_correction_kl", True, "kl_loss", "`corrected_k3` without its clamp; `k3` if False"),
        _is("sapo_temperature_neg", 1.05, "tau_neg"),
        _is("sapo_temperature_pos", 1.0, "tau_pos"),
        _is("vespo_k_pos", 2.0, "k_pos"),
        _is("vespo_lambda_pos", 3.0, "lambda_pos"),
        _is("vespo_k_neg", 3.0, "k_neg"),
        _is("vespo_lambda_neg", 2.0, "lambda_neg"),
        _is("scale_rewards", "group", "advantage", "`grpo`, or `dr_grpo` for none; `std`; 1e-4 is `advantage_epsilon`"),
        _is("multi_objective_aggregation", "sum_then_normalize", "advantage", "`gdpo` for `normalize_then_sum`"),
        _is("reward_weights", None, "reward_weights", "of `gdpo`; of a sum of rewards: weigh them before"),
        _is("top_entropy_quantile", 1.0, "TopEntropyMask", "`corrections` in `loss_args`; TRL interpolates a quantile"),
        _is("off_policy_mask_threshold", None, "OffPolicySequenceMask", "`corrections` in `loss_args`"),
        _is("entropy_coef", 0.0, "entropy_coeff", "TRL's is always a mean over tokens"),
        _is("use_adaptive_entropy", False, "entropy_coeff", "an `AdaptiveEntropyCoefficient`"),
        *(
            _is(name, default, "AdaptiveEntropyCoefficient", _ENTROPY)
            for name, default in (
                ("entropy_coef_min", 0.0),
                ("entropy_coef_max", 1.0),
                ("entropy_coef_delta", 0.005),
                ("entropy_target", 0.2),
            )
        ),
        _is("vllm_importance_sampling_correction", True, "ImportanceWeights", "`corrections` in `loss_args`"),
        _is("vllm_importance_sampling_mode", "sequence_mask", "ImportanceWeights(level=, mode=)"),
        _is("vllm_importance_sampling_clip_max", 3.0, "ImportanceWeights(high=)"),
        _is("vllm_importance_sampling_clip_min", None, "ImportanceWeights(low=)"),
        _is("vllm_importance_sampling_cap", None, "ImportanceWeights(high=)", "deprecated there"),
    ),
    "rloo": _table(
        "TRL",
        "RLOO",
        *_TRL_ONLINE,
        _is("num_generations", 2, "group_size", "and `repeat_times`"),
        _is("epsilon", 0.2, "clip_low", "and `clip_high`, unless `epsilon_high` is given"),
        _is("epsilon_high", None, "clip_high"),
        _is("beta", 0.05, "kl_reward_coeff", "of `kl_reward='k1'`, and `reference=`"),
        *_outside("weigh the rewards before they are added up", reward_weights=None),
        *_outside("clamp the reward of each answer before the KL", reward_clip_range=None),
        _refused("normalize_advantages", False, "no advantage is leave-one-out and scaled by the batch"),
    ),
    "dpo": _table(
        "TRL",
        "DPO",
        *_TRL_MODEL,
        *_outside("models are scored without dropout; for the actor: `actor.eval()`", disable_dropout=True),
        *_PREFERENCE_DATA,
        *_outside(_DATA, truncation_mode="keep_start", padding_free=False, pad_token=None),
        *_STORED_REFERENCE,
        _is("loss_type", ["sigmoid"], "objective", "`dpo` for `sigmoid`"),
        _refused("loss_weights", None, "an algorithm has one preference loss"),
        _is("beta", 0.1, "beta"),
        _is("label_smoothing", 0.0, "label_smoothing", "of `robust` and `exo_pair`; TRL's other losses ignore it"),
        _is("ld_alpha", None, "ld_alpha"),
        _is("f_divergence_type", "reverse_kl", "f_divergence"),
        _is("f_alpha_divergence_coef", 0.5, "f_alpha", "1 less TRL's"),
        _is("use_weighting", False, "weighting", "`aligned`"),
        _is("discopop_tau", 0.05, "tau"),
        *_TRL_REFERENCE,
    ),
    "kto": _table(
        "TRL",
        "KTO",
        *_TRL_MODEL,
        *_outside("models are scored without dropout; for the actor: `actor.eval()`", disable_dropout=True),
        *_PREFERENCE_DATA,
        *_STORED_REFERENCE,
        _is("loss_type", "kto", "objective", "`apo_zero_unpaired` is `kto` with an entry `reference_point` of 0"),
        _is("beta", 0.1, "beta"),
        _is("desirable_weight", 1.0, "desirable_weight"),
        _is("undesirable_weight", 1.0, "undesirable_weight"),
        *_TRL_REFERENCE,
    ),
    "sft": _table("TRL", "SFT", *_SFT),
    "cpo": _table(
        "TRL",
        "CPO",
        *_TRL_PAIRS,
        _is("loss_type", "sigmoid", "objective", "`cpo` for `sigmoid`, `simpo` for `simpo`"),
        _is("beta", 0.1, "beta"),
        _is("label_smoothing", 0.0, "label_smoothing"),
        _is("cpo_alpha", 1.0, "nll_coeff", "of the mean over tokens, as there; 0 for `alphapo`"),
        _is("simpo_gamma", 0.5, "margin", "of `simpo`"),
        _refused("alpha", 0.0, "no objective has AlphaPO's shape of the reward"),
    ),
    "orpo": _table(
        "TRL",
        "ORPO",
        *_TRL_PAIRS,
        *_outside(_DATA, padding_value=None),
        _is("beta", 0.1, "beta"),
    ),
    "gkd": _table(
        "TRL",
        "GKD",
        *_SFT,
        *_outside("of SFT alone: GKD's loss is the divergence", loss_type="nll", label_smoothing_factor=0.0),
        *_outside("models are scored without dropout; for the actor: `actor.eval()`", disable_dropout=True),
        _is("beta", 0.5, "beta"),
        _drawn("temperature", 0.9, "temperature", "of the sampler alone: TRL's divergence is at temperature 1"),
        *_outside("the sampler's limit", max_new_tokens=128),
        *_outside("the share of batches whose answers the student samples", lmbda=0.5),
        *_outside("sample the other answers from the teacher, and not from the data", seq_kd=False),
        *_outside("load the teacher so: `reference=`", teacher_model_name_or_path=None, teacher_model_init_kwargs=None),
    ),
}

#: What to do with some of transformers' TrainingArguments; all of them belong to the loop.
TRAINING: Mapping[str, Foreign] = _table(
    "TRL",
    "",
    *_outside(
        _OPTIMIZER,
        learning_rate=None,
        weight_decay=None,
        adam_beta1=None,
        adam_beta2=None,
        adam_epsilon=None,
        lr_scheduler_type=None,
        lr_scheduler_kwargs=None,
        warmup_ratio=None,
        warmup_steps=None,
        optim=None,
        optim_args=None,
    ),
    *_outside("`clip_grad_norm_` before `optimizer.step()`", max_grad_norm=None),
    *_outside("passes over the data", num_train_epochs=None, max_steps=None),
    *_outside("rows of a micro-batch: `micro_batches(batch, size=)`", per_device_train_batch_size=None),
    *_outside("micro-batches that add up to one step: `micro_batches`", gradient_accumulation_steps=None),
    *_outside(
        "of the actor: `gradient_checkpointing_enable()`", gradient_checkpointing=None, activation_checkpointing=None
    ),
    *_outside("autocast, or the model's dtype; scores are float32", bf16=None, fp16=None),
    *_outside("`torch.manual_seed`", seed=None, data_seed=None),
)

# ------------------------------------------------------------------ Trinity-RFT

_KL = (
    ("adaptive", False, "`AdaptiveKLCoefficient`; call its `update` after each step"),
    ("kl_coef", 1e-3, ""),
    ("target_kl", None, "`target` of `AdaptiveKLCoefficient`"),
    ("horizon", None, "`horizon` of `AdaptiveKLCoefficient`"),
)
_LOOP_OF_MIX = "the share of experts has its own mean here, whatever the batch sizes"

#: Settings of the section ``algorithm``, and the other sections.
TRINITY: Mapping[str, Foreign] = _table(
    "Trinity-RFT",
    "",
    _is("algorithm.algorithm_type", "ppo", "algorithm", "the preset"),
    _is("algorithm.repeat_times", 1, "repeat_times", "and `group_size`"),
    _is("algorithm.policy_loss_fn", None, "objective"),
    _is("algorithm.policy_loss_fn_args", None, "objective_args"),
    _is("algorithm.advantage_fn", None, "advantage"),
    _is("algorithm.advantage_fn_args", None, "advantage_args"),
    _is("algorithm.kl_loss_fn", None, "kl_loss"),
    *(_is(f"algorithm.kl_loss_fn_args.{name}", value, "kl_loss_coeff", note) for name, value, note in _KL),
    _is("algorithm.kl_penalty_fn", None, "kl_reward"),
    *(_is(f"algorithm.kl_penalty_fn_args.{name}", value, "kl_reward_coeff", note) for name, value, note in _KL),
    _is("algorithm.entropy_loss_fn", None, "entropy_coeff", "`none` for 0; `mix` leaves experts out"),
    _is("algorithm.entropy_loss_fn_args.entropy_coef", 0.0, "entropy_coeff"),
    _is("algorithm.loss_agg_mode", None, "aggregation", "Trinity's is `token-mean`, whatever the objective's own"),
    _is("algorithm.sample_strategy", None, "schema", "`mix`; the loop's buffer decides on others"),
    _is("algorithm.sample_strategy_args.expert_data_ratio", 0.5, "expert_data_ratio"),
    *_outside("pass the buffer to `mix_buffers`", algorithm__sample_strategy_args__sft_dataset_name=None),
    *_outside("drop stale rows from the buffer", algorithm__sample_strategy_args__max_staleness=None),
    *(
        Foreign("Trinity-RFT", f"algorithm.policy_loss_fn_args.{name}", None, "outside", "", _LOOP_OF_MIX)
        for name in (
            "use_dynamic_bsz",
            "ppo_mini_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ngpus_trainer",
            "train_batch_size_usual",
            "train_batch_size_expert",
        )
    ),
    _refused(
        "algorithm.advantage_fn_args.duplicate_experiences",
        False,
        "a transform keeps its rows: `informative_groups` selects which to keep",
    ),
    *_outside(_OPTIMIZER, **{"algorithm__optimizer__*": None}),
    *_outside("of the model's own forward", algorithm__enable_router_replay=False),
    *_outside(
        "Trinity reads the sampler's log-probs as old ones: `parts.loss.set_keys(old_log_prob=...)`, with their key",
        algorithm__bypass_old_logprobs=True,
    ),
    _is("algorithm.rollout_correction.*", None, "loss_args"),
    _drawn("model.temperature", 1.0, "temperature"),
    _drawn("model.top_p", 1.0, "Sampling.top_p", "of the sampler alone: Trinity's log-probs are those of all tokens"),
    _drawn("model.top_k", -1, "Sampling.top_k", "of the sampler alone; -1 is 0 here"),
    _is("model.max_response_tokens", None, "max_len", "where the loss divides by it; else `max_new_tokens`"),
    *_outside("the sampler's", model__repetition_penalty=1.0, model__logprobs=0),
    *_outside(_MODEL, **{"model__*": None}),
    *_outside("the loop's batches and data", **{"buffer__*": None}),
    *_outside(_ENGINE, **{"explorer__*": None, "synchronizer__*": None, "cluster__*": None, "service__*": None}),
    *_outside("the loop", **{"trainer__*": None, "stages__*": None, "data_processor__*": None}),
    *_outside(_LOG, **{"monitor__*": None, "log__*": None}),
    *_outside(
        "the run",
        mode="both",
        project="Trinity-RFT",
        group="",
        name="rft",
        checkpoint_root_dir="",
        checkpoint_job_dir="",
        ray_namespace="",
        continue_from_checkpoint=True,
        ignore_validator_suggestions=False,
        stages=None,
    ),
)

# ------------------------------------------------------------------ verl

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_STEPS = "`minibatches` are steps, `micro_batches` add up to one"
_UNUSED = "nothing: the engine packs rows, and never builds all logits"

#: verl's settings, by their path in its configuration.
VERL: Mapping[str, Foreign] = _table(
    "verl",
    "",
    _is("algorithm.adv_estimator", "gae", "advantage", "and the preset"),
    _is("algorithm.gamma", 1.0, "gamma"),
    _is("algorithm.lam", 1.0, "lam"),
    _is("algorithm.norm_adv_by_std_in_grpo", True, "advantage", "`dr_grpo` if False; `std_normalize` of `pass_at_k`"),
    _is("algorithm.use_kl_in_reward", False, "kl_reward"),
    _is("algorithm.kl_penalty", "kl", "kl_reward", "`kl` is `k1`, `mse` is `k2`; `k3` is clamped there: `low_var_kl`"),
    _is("algorithm.kl_ctrl.type", "fixed", "kl_reward_coeff", "`adaptive`: `AdaptiveKLCoefficient`"),
    _is("algorithm.kl_ctrl.kl_coef", 1e-3, "kl_reward_coeff"),
    _is("algorithm.kl_ctrl.horizon", 10000, "AdaptiveKLCoefficient(horizon=)", "call its `update` after each step"),
    _is("algorithm.kl_ctrl.target_kl", 0.1, "AdaptiveKLCoefficient(target=)"),
    _is("algorithm.gdpo_reward_weights", None, "reward_weights"),
    *_outside("a transform reads `keys={'rewards': [...]}`", algorithm__gdpo_reward_keys=None),
    *_outside("`informative_groups` selects the rows to keep", **{"algorithm__filter_groups__*": None}),
    _refused("algorithm.use_pf_ppo", False, "rows are not drawn again by their reward"),
    _refused("algorithm.pf_ppo.*", None, "rows are not drawn again by their reward"),
    _is("algorithm.rollout_correction.rollout_is", None, "loss_args['rollout_is']"),
    _is("algorithm.rollout_correction.rollout_is_threshold", 2.0, "loss_args['rollout_is_threshold']"),
    _is(
        "algorithm.rollout_correction.rollout_rs",
        None,
        "loss_args['rollout_rs']",
        "rejected tokens stay in the denominator here",
    ),
    _is("algorithm.rollout_correction.rollout_rs_threshold", None, "loss_args['rollout_rs_threshold']"),
    _refused(
        "algorithm.rollout_correction.bypass_mode",
        False,
        "read the sampler's log-probs as old ones, `set_keys(old_log_prob=...)`, and correct nothing",
    ),
    _refused("algorithm.rollout_correction.loss_type", "ppo_clip", "of `bypass_mode` alone"),
    _refused(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        False,
        "the mean weight of a micro-batch is not that of the batch",
    ),
    _is(f"{_ACTOR}.policy_loss.loss_mode", "vanilla", "objective", "`ppo` for `vanilla`, `gmpo` for `geo_mean`"),
    _is(f"{_ACTOR}.clip_ratio", 0.2, "clip_low", "and `clip_high`, only where `clip_ratio_low` and `_high` are null"),
    _is(f"{_ACTOR}.clip_ratio_low", 0.2, "clip_low"),
    _is(f"{_ACTOR}.clip_ratio_high", 0.2, "clip_high"),
    _is(f"{_ACTOR}.clip_ratio_c", 3.0, "clip_ratio_c"),
    _is(f"{_ACTOR}.tau_pos", 1.0, "tau_pos"),
    _is(f"{_ACTOR}.tau_neg", 1.05, "tau_neg"),
    _is(f"{_ACTOR}.policy_loss.clip_cov_ratio", 2e-4, "fraction"),
    _is(f"{_ACTOR}.policy_loss.clip_cov_lb", 1.0, "cov_low"),
    _is(f"{_ACTOR}.policy_loss.clip_cov_ub", 5.0, "cov_high"),
    _is(f"{_ACTOR}.policy_loss.kl_cov_ratio", 2e-4, "fraction"),
    _is(f"{_ACTOR}.policy_loss.ppo_kl_coef", 0.1, "objective_coeff"),
    _is(f"{_ACTOR}.policy_loss.dro_beta", None, "beta"),
    _is(f"{_ACTOR}.loss_agg_mode", "token-mean", "aggregation"),
    _is(f"{_ACTOR}.loss_scale_factor", None, "max_len", "of `seq-mean-token-sum-norm`"),
    _is(f"{_ACTOR}.entropy_coeff", 0, "entropy_coeff"),
    _is(f"{_ACTOR}.use_kl_loss", False, "kl_loss"),
    _is(f"{_ACTOR}.kl_loss_coef", 1e-3, "kl_loss_coeff"),
    _is(f"{_ACTOR}.kl_loss_type", "low_var_kl", "kl_loss", "`k3` is clamped there: `low_var_kl`"),
    *_outside(
        _STEPS,
        **{
            f"{_ACTOR}.{name}": default
            for name, default in (
                ("ppo_mini_batch_size", 256),
                ("ppo_micro_batch_size", None),
                ("ppo_micro_batch_size_per_gpu", None),
                ("use_dynamic_bsz", False),
                ("ppo_epochs", 1),
                ("shuffle", False),
                ("data_loader_seed", 42),
            )
        },
    ),
    *_outside("`tokens_per_batch` in `loss_args`", **{f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384}),
    *_outside("`clip_grad_norm_` before `optimizer.step()`", **{f"{_ACTOR}.grad_clip": 1.0}),
    *_outside(_OPTIMIZER, **{f"{_ACTOR}.optim.*": None}),
    *_outside(
        _UNUSED,
        **{
            f"{_ACTOR}.{name}": default
            for name, default in (
                ("use_prefix_grouper", False),
                ("use_torch_compile", True),
                ("use_fused_kernels", False),
                ("use_remove_padding", False),
                ("pad_to_length", False),
                ("entropy_from_logits_with_chunking", False),
                ("entropy_from_logits_chunk_size", 2048),
                ("entropy_checkpointing", False),
                ("calculate_entropy", False),
                ("calculate_sum_pi_squared", False),
            )
        },
    ),
    *_outside(
        "the model, its sharding and its checkpoints",
        **{f"{_ACTOR}.{name}.*": None for name in ("fsdp_config", "megatron", "checkpoint", "profiler", "qat")},
        **{f"{_ACTOR}.router_replay.*": None, f"{_ACTOR}.strategy": "fsdp", f"{_ACTOR}.rollout_n": None},
        **{f"{_ACTOR}.ulysses_sequence_parallel_size": 1, f"{_ACTOR}.freeze_vision_tower": False},
        **{
            "actor_rollout_ref.model.*": None,
            "actor_rollout_ref.hybrid_engine": True,
            "actor_rollout_ref.nccl_timeout": 600,
        },
    ),
    *_outside("the reference is scored as the actor is", **{"actor_rollout_ref.ref.*": None}),
    _is(f"{_ROLLOUT}.n", 1, "group_size", "and `repeat_times`"),
    _drawn(f"{_ROLLOUT}.temperature", 1.0, "temperature"),
    _drawn(f"{_ROLLOUT}.top_p", 1, "Sampling.top_p", "of the sampler alone: verl's log-probs are those of all tokens"),
    _drawn(f"{_ROLLOUT}.top_k", -1, "Sampling.top_k", "of the sampler alone; -1 is 0 here"),
    _is(f"{_ROLLOUT}.response_length", None, "max_len", "of `seq-mean-token-sum-norm`; else `max_new_tokens`"),
    *_outside(_ENGINE, **{f"{_ROLLOUT}.*": None}),
    _is("data.max_response_length", 512, "max_len", "of `seq-mean-token-sum-norm`; else `max_new_tokens`"),
    *_outside(_DATA, **{"data.*": None}),
    *_outside("`ValueLoss` and the critic's optimiser", **{"critic.*": None}),
    *_outside(
        "write the reward into `('next', 'reward')`",
        **{"reward.*": None, "reward_model.*": None, "custom_reward_function.*": None, "sandbox_fusion.*": None},
    ),
    _refused("distillation.*", None, "use the presets of distillation: `gkd`, `on_policy_distill`"),
    *_outside(
        "the run",
        **{
            f"{name}.*": None
            for name in ("trainer", "global_profiler", "ray_kwargs", "transfer_queue", "skip", "hydra")
        },
        **{"defaults": None},
    ),
)

#: All settings of all libraries.
FOREIGN: tuple[Foreign, ...] = (
    *(row for rows in TRL.values() for row in rows.values()),
    *TRAINING.values(),
    *TRINITY.values(),
    *VERL.values(),
)


def find_row(rows: Mapping[str, Foreign], name: str) -> Foreign | None:
    """The row of a setting, or of the nearest section that stands for all below it; None for an unknown one."""
    if name in rows:
        return rows[name]
    parts = name.split(".")
    sections = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((rows[section] for section in sections if section in rows), None)


def foreign_hint(name: str, known: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: what it is called here, if another library has it; else empty.

    ``known`` are the names that would be accepted: of several, those are said first.

    Example:
        >>> foreign_hint("kl_loss_coef")
        " verl's 'kl_loss_coef' is 'kl_loss_coeff' of make_algorithm."
    """
    accepted = set(known)
    said = []
    for library in ("TRL", "Trinity-RFT", "verl"):
        rows = [row for row in FOREIGN if row.library == library and row.leaf == name]
        if not any(row.here for row in rows):
            if rows:
                what = "belongs to the loop around the loss" if rows[0].place == "outside" else "has no counterpart"
                said.append(f" {library}'s {name!r} {what}: {rows[0].note}.")
            continue
        places: dict[str, list[Foreign]] = {}
        for row in sorted(rows, key=lambda row: (row.here == name, row.here not in accepted)):
            places.setdefault(row.here, []).append(row)
        (here, (first, *_)), *others = places.items()
        if here == name:  # under its own name everywhere: not for this algorithm
            continue
        more = [f"{', '.join(row.section for row in same)}: {other!r}" for other, same in others if same[0].section]
        of = " of make_algorithm" if here.isidentifier() and here.islower() and here not in accepted else " here"
        also = f" ({'; '.join(more)})" if more else ""
        note = f"{', ' if first.note.startswith('and ') else ': '}{first.note}" if first.note else ""
        said.append(f" {library}'s {name!r} is {here!r}{of}{also}{note}.")
    return "".join(said)
