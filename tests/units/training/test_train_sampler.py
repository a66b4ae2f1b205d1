"""The policy that writes a run's answers: what reaches ``generate``, and prompts that are forwarded once."""

from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDictBase

from torchrl_llm_kl import Sampling
from torchrl_llm_kl.tasks import PromptOrder, make_env
from torchrl_llm_kl.training import make_sampler
from toy_models import stateful_model, tiny_model, with_lora
from toy_rollouts import make_model, make_tokenizer

#: Prompts of three lengths, so that those of two groups are padded.
PROMPTS = ["hi", "a longer one", "the longest of the three"]
#: The last two have sliding windows of fewer tokens than a prompt.
ATTENTION = ("qwen2", "gpt2", "mistral", "gpt_oss")


def answers(model: Any, tokenizer: Any, sampling: Sampling | None, group_size: int = 4) -> TensorDictBase:
    """The first step on the prompts, by torch's generator of seed 0."""
    with tensordict.set_list_to_stack(True):
        order = PromptOrder(seed=None)
        env = make_env(PROMPTS, lambda q, a, m: 0.0, tokenizer, group_size=group_size, num_prompts=3, order=order)
        sampler = make_sampler(model, tokenizer, max_new_tokens=6, sampling=sampling)
        torch.manual_seed(0)
        return env.rollout(1, sampler).reshape(-1)


def test_each_setting_reaches_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrl's constructor refuses a top-k of 0 and drops min-p, and so does that of a new version."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, seed=0)
    sampler = make_sampler(model, tokenizer, max_new_tokens=6, sampling=Sampling(0.7, top_p=0.9, min_p=0.2))
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.2, "max_new_tokens": 6}
    for each in (sampler, sampler.get_new_version()):
        assert expected.items() <= each.generate_kwargs.items()
    kept = make_sampler(model, tokenizer, max_new_tokens=6, sampling=Sampling(top_k=3))
    assert kept.generate_kwargs["top_k"] == 3


def test_a_min_p_of_1_leaves_the_most_probable_token() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    sampled, greedy = (answers(model, tokenizer, sampling) for sampling in (Sampling(min_p=1.0), None))
    assert torch.equal(sampled["tokens", "full"], greedy["tokens", "full"])


def _family(name: str, tokenizer: Any) -> Any:
    if name == "lora":
        return with_lora(make_model(tokenizer, seed=0))
    if name in ATTENTION:
        return tiny_model(name, vocab_size=len(tokenizer), max_position_embeddings=256)
    return stateful_model(name, vocab_size=len(tokenizer))


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        *((name, 3) for name in (*ATTENTION, "lora", "mamba2", "falcon_h1", "lfm2", "qwen3_5_text")),
        ("recurrent_gemma", 12),
    ],
)
def test_equal_prompts_are_forwarded_once(family: str, rows: int) -> None:
    """The samples are those of ``generate`` over all rows. RecurrentGemma keeps its states in its layers, not in a cache."""
    tokenizer = make_tokenizer()
    model = _family(family, tokenizer)
    inner = model.get_base_model() if family == "lora" else model
    counts: list[int] = []
    hook = inner.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(len(args[0])))
    step = answers(model, tokenizer, Sampling())
    hook.remove()
    assert counts == [rows, *[12] * (len(counts) - 1)]
    assert len(counts) > 1

    width = step["tokens", "prompt"].shape[-1]
    torch.manual_seed(0)
    plain = model.generate(
        input_ids=step["tokens", "prompt"],
        attention_mask=step["masks", "all_attention_mask"][:, :width].long(),
        **{"do_sample": True, "top_k": 0, "max_new_tokens": 6, "pad_token_id": tokenizer.pad_token_id},
    )
    assert torch.equal(step["tokens", "full"], plain)


def test_different_prompts_are_each_forwarded() -> None:
    """Equal rows that are not neighbours too: a row's states are those of its own prompt."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, seed=0)
    sampler = make_sampler(model, tokenizer, max_new_tokens=6)
    texts = ["hi", "a longer one", "hi", "hi"]
    with tensordict.set_list_to_stack(True):
        together = sampler(tensordict.TensorDict({("text", "prompt"): texts}, batch_size=[4]))
        alone = [sampler(tensordict.TensorDict({("text", "prompt"): [text]}, batch_size=[1])) for text in texts]
    for row, single in enumerate(alone):
        assert together["text", "response"][row] == single["text", "response"][0]
