"""The chat model that needs no download."""

import torch
from torch.testing import assert_close

from torchrl_llm_kl import tiny_chat_model


def test_sampled_answers_decode_and_encode_to_the_same_ids() -> None:
    model, tokenizer = tiny_chat_model()
    messages = [{"role": "user", "content": "Hi!"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    for row in model.generate(prompt.expand(8, -1), do_sample=True, top_k=0, max_new_tokens=40):
        answer = row[: int((row != tokenizer.pad_token_id).sum())]
        assert tokenizer(tokenizer.decode(answer))["input_ids"] == answer.tolist()


def test_special_tokens_other_than_the_end_are_improbable_under_any_seed() -> None:
    for seed in range(5):
        model, tokenizer = tiny_chat_model(seed=seed)
        tokens = torch.randint(len(tokenizer), (4, 50), generator=torch.Generator().manual_seed(seed))
        p = model(tokens).logits.softmax(-1)
        assert p[..., :3].max() < 1e-3
        assert p[..., tokenizer.eos_token_id].mean() > 1e-3, "answers end"


def test_the_seed_decides_the_weights_and_the_global_generator_stays() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    (one, _), (same, _), (other, _) = tiny_chat_model(), tiny_chat_model(), tiny_chat_model(seed=1)
    assert_close(torch.rand(2), expected, rtol=0, atol=0)
    assert_close(one.state_dict(), same.state_dict(), rtol=0, atol=0)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
