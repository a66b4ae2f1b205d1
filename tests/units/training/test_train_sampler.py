"""Tests of the sampler of a run: the arguments of ``generate``, equal prompts, and the ends of answers."""

import math
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDictBase

from image_models import image_model
from torchrl_llm_kl import Sampling
from torchrl_llm_kl.diagnostics import diagnose
from torchrl_llm_kl.tasks import PromptOrder, make_env
from torchrl_llm_kl.training import ModelError, chat_tokenizer, make_sampler
from torchrl_llm_kl.training._samplers import AnswerNoise
from toy_models import stateful_model, tiny_model, with_lora
from toy_rollouts import make_model, make_tokenizer
from toy_tokenizer import build_tokenizer

#: Prompts of three lengths, so that those of two groups are padded.
PROMPTS = ["hi", "a longer one", "the longest of the three"]
#: The last two have sliding windows of fewer tokens than a prompt.
ATTENTION = ("qwen2", "gpt2", "mistral", "gpt_oss")


def answers(
    model: Any, tokenizer: Any, sampling: Sampling | None, *, length: int = 6, end: list[str] | None = None
) -> TensorDictBase:
    """The first step on the prompts, with seed 0."""
    with tensordict.set_list_to_stack(True):
        order = PromptOrder(seed=None)
        env = make_env(PROMPTS, lambda q, a, m: 0.0, tokenizer, group_size=4, num_prompts=3, order=order)
        sampler = make_sampler(model, tokenizer, max_new_tokens=length, sampling=sampling, end=end or ())
        torch.manual_seed(0)
        return env.rollout(1, sampler).reshape(-1)


def test_each_setting_reaches_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrl's constructor drops min-p, also when it makes a new version."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, seed=0)
    sampler = make_sampler(model, tokenizer, max_new_tokens=6, sampling=Sampling(0.7, top_p=0.9, min_p=0.2))
    expected = {"do_sample": True, "temperature": 0.7, "top_k": None, "top_p": 0.9, "min_p": 0.2, "max_new_tokens": 6}
    for each in (sampler, sampler.get_new_version()):
        assert expected.items() <= each.generate_kwargs.items()
    kept = make_sampler(model, tokenizer, max_new_tokens=6, sampling=Sampling(top_k=3))
    assert kept.generate_kwargs["top_k"] == 3


def test_min_p_1_is_greedy() -> None:
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
    """The samples equal those of ``generate`` over all rows. RecurrentGemma keeps its states in its layers, not in a cache."""
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


@pytest.mark.parametrize("group_size", [3, 4])
def test_positions_with_planes_are_not_taken_for_rows(group_size: int) -> None:
    """The positions of Qwen2-VL are ``[4, rows, tokens]``. Their four planes must not be taken for four rows."""
    tokenizer = make_tokenizer()
    model: Any = image_model("qwen2_vl")
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with tensordict.set_list_to_stack(True):
        env = make_env(["hi"], lambda q, a, m: 0.0, tokenizer, group_size=group_size, num_prompts=1)
        torch.manual_seed(0)
        step = env.rollout(1, make_sampler(model, tokenizer, max_new_tokens=4, sampling=Sampling())).reshape(-1)
    width = step["tokens", "prompt"].shape[-1]
    torch.manual_seed(0)
    ends = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "pad_token_id": tokenizer.pad_token_id}
    mask = step["masks", "all_attention_mask"][:, :width].long()
    assert torch.equal(
        step["tokens", "full"], model.generate(input_ids=step["tokens", "prompt"], attention_mask=mask, **ends)
    )


def test_equal_prompts_that_are_not_neighbours_are_forwarded_separately() -> None:
    """Each row must continue the states of its own prompt."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer, seed=0)
    sampler = make_sampler(model, tokenizer, max_new_tokens=6)
    texts = ["hi", "a longer one", "hi", "hi"]
    with tensordict.set_list_to_stack(True):
        together = sampler(tensordict.TensorDict({("text", "prompt"): texts}, batch_size=[4]))
        alone = [sampler(tensordict.TensorDict({("text", "prompt"): [text]}, batch_size=[1])) for text in texts]
    for row, single in enumerate(alone):
        assert together["text", "response"][row] == single["text", "response"][0]


@pytest.mark.parametrize("end", [["\n"], ["ab", "<|im_start|>"], ["<|im_start|>"]])
def test_texts_that_end_an_answer(end: list[str]) -> None:
    """A text may be a part of a token or several tokens. Each answer ends at the first token that completes one.

    As in Gemma's tokenizer, runs of newlines are added tokens, which are not special.
    """
    tokenizer = build_tokenizer(pad_token="<|pad|>")
    tokenizer.add_tokens(["\n", "\n\n"])
    model: Any = make_model(tokenizer, seed=0)
    favoured = [tokenizer.get_vocab()[token] for token in ("a", "b", "\n\n", "<|im_start|>")]
    model.lm_head = Favouring(model.lm_head, favoured)
    step = answers(model, tokenizer, Sampling(), length=40, end=end)
    width = step["tokens", "prompt"].shape[-1]
    lengths = []
    for ids, mask in zip(
        step["tokens", "full"][:, width:], step["masks", "all_attention_mask"][:, width:], strict=True
    ):
        texts = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
        ended = [i for i, text in enumerate(texts) if any(each in text for each in [*end, "<|im_end|>"])]
        lengths.append(ended[0] + 1 if ended else len(ids))
        assert mask.tolist() == [i < lengths[-1] for i in range(len(ids))]
        assert set(ids[lengths[-1] :].tolist()) <= {tokenizer.pad_token_id}
    assert min(lengths) < 40
    diagnosis = diagnose(step, tokenizer=tokenizer, end=end)
    assert diagnosis.measures["answers/truncated"] == pytest.approx(sum(each == 40 for each in lengths) / 12)


class Favouring(torch.nn.Module):
    """A head whose logits of some tokens are higher."""

    def __init__(self, head: torch.nn.Module, tokens: list[int]) -> None:
        super().__init__()
        self.head, self.tokens = head, tokens

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).clone()
        logits[..., self.tokens] += 4.0
        return logits


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template.*model\.template=plain.*sampler\.end"):
        chat_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert chat_tokenizer(str(tmp_path)).chat_template == "{{ messages[0].content }}"


# ------------------------------------------------------------------ random numbers of each answer


def test_noise_samples_from_the_softmax() -> None:
    """Each frequency of 20,000 draws is within 4.5 standard deviations. The fourth token is cut off by top-k."""
    probabilities, draws = torch.tensor([0.5, 0.3, 0.2, 0.001]), 20_000
    noise = AnswerNoise(Sampling(top_k=3), 0)
    noise.start([(row,) for row in range(draws)])
    drawn = noise(torch.zeros(draws, 1), probabilities.log().expand(draws, -1)).argmax(-1)
    for token, p in enumerate([0.5, 0.3, 0.2, 0.0]):
        deviation = math.sqrt(draws * p * (1 - p))
        assert abs((drawn == token).sum().item() - draws * p) <= 4.5 * deviation


def test_noise_does_not_depend_on_the_answers_beside_it() -> None:
    noise, scores = AnswerNoise(Sampling(), 3), torch.zeros(3, 5)

    def drawn(*keys: tuple[int, ...]) -> list[torch.Tensor]:
        noise.start(keys)
        return [noise(torch.zeros(len(keys), 1), scores[: len(keys)]) for _ in range(3)]

    both, single = drawn((7, 0), (9, 1), (9, 0)), drawn((9, 1))
    for together, own in zip(both, single, strict=True):
        assert torch.equal(together[1:2], own)
    assert not torch.equal(both[0], both[1]), "each token has its own"
    assert len({float(value) for value in both[0].flatten()}) == both[0].numel(), "each answer too"
