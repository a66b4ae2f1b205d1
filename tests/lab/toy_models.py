"""Tiny causal language models with random weights, one per family. Each builds in milliseconds, without a download."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 97
#: Arguments of :func:`closeness.assert_near` for results of a tiny model: sums of up to 64 terms, log-probs of up to 16 nats,
#: and gradients of their sums over up to 64 tokens, which add values of up to 32.
FORWARD: dict[str, Any] = {"terms": 64, "size": 16.0}
BACKWARD: dict[str, Any] = {"terms": 64 * 64, "size": 32.0}
#: Arguments of ``generate`` to return the logits of each step before (``logits``) and after (``scores``) its processors.
OUTPUTS: dict[str, Any] = dict.fromkeys(("return_dict_in_generate", "output_logits", "output_scores"), True)
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
_SIZES |= {"intermediate_size": 64, "num_key_value_heads": 2}
# Settings of all mixtures of experts.
_EXPERTS = {"num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
# The range is large, so that distributions are far from uniform and positions matter. There are no special tokens.
_COMMON = {"initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON |= {"vocab_size": VOCAB_SIZE, **_SIZES}
_GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "final_logit_softcapping": 4.0}
# The embedding is narrower than the body, as in OPT-350m: the decoder ends with a projection.
_OPT = {"word_embed_proj_dim": 16, "dropout": 0.0, "do_layer_norm_before": False}
# The weights of a token's experts do not add up to 1, and only the last layer is dense.
_QWEN3_MOE = {"head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": False, "mlp_only_layers": [2]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEPSEEK = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_DEEPSEEK |= {"moe_intermediate_size": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
#: Model type -> its own settings.
_DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": _GEMMA2,
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": _OPT,
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.25},
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": _QWEN3_MOE,
    "gpt_oss": {"head_dim": 8, "sliding_window": 5, "rope_parameters": _ROPE},
    "deepseek_v3": {**_DEEPSEEK, "num_key_value_heads": 4},
}
#: Families that only single tests use.
_OTHERS: dict[str, dict[str, Any]] = {
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "bloom": {},
    "gemma3_text": {},
}
_GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "head_dim": 8}
_GATED |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}  # the last layer is attention
_SCAN = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_QWEN3_NEXT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN3_NEXT |= {"shared_expert_intermediate_size": 16}
_MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
_NEMOTRON = {"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "expand": 2}
_NEMOTRON |= {"ssm_state_size": 8, "chunk_size": 8, "head_dim": 8}
_GRANITE = {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "shared_intermediate_size": 32}
_ZAMBA = {"mamba_d_state": 8, "n_mamba_heads": 2, "chunk_size": 8, "num_mem_blocks": 1, "mamba_ngroups": 1}
_ZAMBA |= {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3}
#: Model type -> its own settings. Layers carry a state or the inputs of a convolution from token to token.
_STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _GATED,
    "qwen3_next": _GATED | _QWEN3_NEXT,
    "olmo_hybrid": _GATED,
    "falcon_h1": _SCAN | {"mamba_d_ssm": 64, "head_dim": 8},
    "bamba": _SCAN | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "granitemoehybrid": _SCAN | _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": _NEMOTRON,
    "mamba2": _MAMBA2,
    "zamba2": _ZAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 8},
    # These do not continue a state of several tokens in transformers 5.23.
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    | {"num_experts_per_tok": 1, "use_mamba_kernels": False},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "head_dim": 8},
}
#: Mixtures of six experts, of which a token uses two. The first families are hybrid.
_SIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_GROUPS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
_ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_next": _GATED | _SIX,
    "qwen3_5_moe_text": _GATED | _SIX,
    "granitemoehybrid": _SCAN | _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "nemotron_h": _NEMOTRON | _GROUPS | {"hybrid_override_pattern": "ME*E", "moe_shared_expert_intermediate_size": 16},
    "lfm2_moe": _SIX
    | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "qwen2_moe": _SIX,
    "olmoe": _SIX,
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": _GROUPS | {"head_dim": 8, "first_k_dense_replace": 1},
}
#: Family -> names of settings that differ from those of most families. None if the family lacks the setting.
_RENAMED: dict[str, dict[str, str | None]] = {
    "gpt2": {"intermediate_size": "n_inner", "num_key_value_heads": None},
    "opt": {"intermediate_size": "ffn_dim", "initializer_range": "init_std", "num_key_value_heads": None},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}
FAMILIES = tuple(_DENSE)
#: Recurrent and convolutional models: those whose state can be continued, and the others.
FORKED_FAMILIES, UNFORKED_FAMILIES = tuple(_STATEFUL)[:10], tuple(_STATEFUL)[10:]
#: Mixtures of experts with three layers. In Qwen3-MoE the last layer is dense, in DeepSeek-V3 the first.
EXPERT_FAMILIES = tuple(_MIXTURES)
#: More mixtures of experts, for :func:`stateful_model` with ``experts=True``.
ROUTED_FAMILIES = tuple(_ROUTED)


def tiny_model(family: str = "qwen2", *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A float32 model of ``family`` in evaluation mode, deterministic in ``seed``.

    ``overrides`` are configuration entries, under the names that most families use (``hidden_size``,
    ``num_hidden_layers``, ``intermediate_size``, ``initializer_range``, ...).
    """
    settings = _COMMON | (_EXPERTS if family in _MIXTURES else {}) | (_DENSE | _MIXTURES | _OTHERS)[family] | overrides
    if family == "opt":  # without a norm before the head, its logits would be ten times as large with the others' range
        settings["initializer_range"] *= 0.5
    renamed = _RENAMED.get(family, {})
    config = {new: value for name, value in settings.items() if (new := renamed.get(name, name)) is not None}
    return _random(family, seed, config)


def stateful_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, experts: bool = False, **overrides: Any
) -> Any:
    """A model of :data:`FORKED_FAMILIES`, :data:`UNFORKED_FAMILIES` or, with ``experts``, :data:`ROUTED_FAMILIES`.

    Its weights are large enough for states to matter.
    """
    own = (_ROUTED if experts else _STATEFUL)[family]
    return _random(family, seed, _COMMON | {"initializer_range": 0.1} | own | overrides, dtype)


def _random(family: str, seed: int, config: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=dtype)
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if family == "gpt_oss" and name.endswith(("sinks", "bias")):
                nn.init.normal_(values)
            elif family == "deepseek_v3" and name.endswith("e_score_correction_bias"):
                nn.init.normal_(values, std=0.3)  # affects the choice of experts, not their weights
    return model.eval()


def altered(family: str, change: Callable[[Any], Any], **overrides: Any) -> nn.Module:
    """A model to which a change was applied."""
    model = tiny_model(family, **overrides)
    change(model)
    return model


def with_lora(model: nn.Module, **config: Any) -> Any:
    """The model with PEFT adapters far from 0. Without PEFT the test is skipped."""
    import pytest

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    own = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, **config}
    return peft.get_peft_model(model, peft.LoraConfig(**own)).eval()
