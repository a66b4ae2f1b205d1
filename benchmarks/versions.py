"""Memory of eight versions of a model's weights, by the way it is trained: ``python -m benchmarks.versions``."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from torchrl_llm_kl.scoring import WeightHistory

KEEP = 8
SIZES = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}


def model_of(dtype: torch.dtype) -> PreTrainedModel:
    """A random model of 7.8 million parameters."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **heads)).to(dtype)


def with_adapters() -> nn.Module:
    """The same model with LoRA adapters of rank 16."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model_of(torch.float32), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def megabytes(model: nn.Module, lr: float) -> tuple[float, float]:
    """The memory of the weights, and of ``KEEP`` versions of them after updates by AdamW."""
    trained = [x for x in model.parameters() if x.requires_grad]
    history, optimizer = WeightHistory(model, keep=KEEP), torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    for version in range(KEEP + 1):
        history.record(version)
        for weight in trained:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return sum(x.numel() * x.itemsize for x in model.parameters()) / 2**20, history.num_bytes / 2**20


def main() -> None:
    """Print a table in Markdown."""
    print("| training | learning rate | model, MiB | eight versions, MiB | ratio |")
    print("|---|---|---|---|---|")
    cases = [("all weights, float32", model_of(torch.float32), 1e-6), ("LoRA, rank 16, float32", with_adapters(), 1e-5)]
    cases += [("all weights, bfloat16", model_of(torch.bfloat16), lr) for lr in (1e-5, 1e-6)]
    for name, model, lr in cases:
        own, versions = megabytes(model, lr)
        print(f"| {name} | {lr:g} | {own:.1f} | {versions:.1f} | {versions / own:.2f} |")


if __name__ == "__main__":
    main()
