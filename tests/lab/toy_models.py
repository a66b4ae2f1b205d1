"""Tiny causal language models with random weights, one per family; each builds in milliseconds, without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 97
#: For :func:`closeness.assert_near`, of what a tiny model computes: sums of up to 64 terms; log-probs of up to 16 nats, and
#: gradients of their sums over up to 64 tokens, which add values of up to 32.
FORWARD: dict[str, Any] = {"terms": 64, "size": 16.0}
BACKWARD: dict[str, Any] = {"terms": 64 * 64, "size": 32.0}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
# A range large enough for distributions far from uniform and for positions to matter.
_WEIGHTS = {"initializer_range": 0.4}
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Of mixtures of experts.
_EXPERTS = {"num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
_GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2}


def _qwen2(**config: Any) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**config))


def _qwen3(**config: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 8, **config}))


def _llama(**config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**config))


def _mistral(**config: Any) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**{"sliding_window": 5, **config}))


def _gemma2(**config: Any) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    own = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "final_logit_softcapping": 4.0}
    return Gemma2ForCausalLM(Gemma2Config(**{**own, **config}))


def _granite(**config: Any) -> nn.Module:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**{"logits_scaling": 3.0, **config}))


def _cohere(**config: Any) -> nn.Module:
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**{"logit_scale": 0.25, **config}))


def _gpt2(**config: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    renamed = {"intermediate_size": "n_inner"}
    config = {renamed.get(name, name): value for name, value in config.items() if name != "num_key_value_heads"}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**dropout, **config}))


def _opt(**config: Any) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    renamed = {"intermediate_size": "ffn_dim", "initializer_range": "init_std"}
    config = {renamed.get(name, name): value for name, value in config.items() if name != "num_key_value_heads"}
    # OPT has no norm before the head: with the other families' range its logits would be ten times as large.
    config["init_std"] *= 0.5
    # The embedding is narrower than the body, as in OPT-350m: the decoder ends with a projection.
    return OPTForCausalLM(
        OPTConfig(**{"word_embed_proj_dim": 16, "dropout": 0.0, "do_layer_norm_before": False, **config})
    )


def _mixtral(**config: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**config))


def _qwen3_moe(**config: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    # The weights of a token's experts do not add up to 1, and the last layer alone is dense.
    own = {"head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": False, "mlp_only_layers": [2]}
    config = {**own, **config}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=config.pop("num_local_experts"), **config))


def _gpt_oss(**config: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = GptOssForCausalLM(GptOssConfig(**{"head_dim": 8, "sliding_window": 5, "rope_parameters": rope, **config}))
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            nn.init.normal_(parameter)
    return model


def _deepseek_v3(**config: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    own = {"moe_intermediate_size": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
    config = {**heads, **own, **config, "num_key_value_heads": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(n_routed_experts=config.pop("num_local_experts"), **config))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.3)  # part of the choice, not of the weights
    return model


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "llama": _llama,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "opt": _opt,
    "granite": _granite,
    "cohere": _cohere,
}

FAMILIES = tuple(_BUILDERS)

_BUILDERS |= {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek_v3}
#: Mixtures of experts, of three layers: in Qwen3-MoE the last and in DeepSeek-V3 the first one is dense.
EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def tiny_model(family: str = "qwen2", *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A float32 model of ``family`` in evaluation mode, deterministic in ``seed``.

    ``overrides`` are configuration entries, under the names that most families use (``hidden_size``,
    ``num_hidden_layers``, ``intermediate_size``, ``initializer_range``, ...).
    """
    sizes = {**_SIZES, **_GROUPED, **(_EXPERTS if family in EXPERT_FAMILIES else {})}
    config = {"vocab_size": VOCAB_SIZE, **sizes, **_WEIGHTS, **_NO_SPECIAL_TOKENS, **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _BUILDERS[family](**config).eval()
