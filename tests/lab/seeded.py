"""Faults seeded into real rollouts of small models. Each case returns a batch and the arguments of ``diagnose``.

``python docs/build_pages.py doctor`` tabulates the diagnoses, and ``test_seeded_faults.py`` tests them.
"""

import copy
import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from torchrl_llm_kl import Ragged, Sampling
from torchrl_llm_kl.diagnostics import TokenColumns
from toy_models import OUTPUTS, tiny_model
from toy_tokenizer import CHATML

#: Five families of models. The seed chooses the family in which a fault is seeded.
FAMILIES = ("qwen2", "llama", "gpt2", "gemma2", "qwen3")
PROMPTS, ANSWERS, LENGTH = 12, 8, 24
_MERGES = [(a, b) for a in "aeiou" for b in "bcdfghjklmnpqrstvwxz"]
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@lru_cache
def make_tokenizer() -> Any:
    """Printable characters and 100 pairs of letters. Encoding decoded text again can join neighbours into one token."""
    characters = [*string.printable[:95], "\n"]
    vocab = {token: i for i, token in enumerate([*characters, *("".join(pair) for pair in _MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def make_model(family: str, seed: int, **config: Any) -> nn.Module:
    return tiny_model(family, seed=seed, vocab_size=len(make_tokenizer()), max_position_embeddings=256, **config)


# ------------------------------------------------------------------ rollouts
@dataclass
class Rollout:
    """Rows of prompts, answers and the sampler's log-probs."""

    prompts: list[Tensor]
    answers: list[Tensor]
    log_probs: list[Tensor]
    rewards: Tensor

    def batch(self, rows: slice = slice(None)) -> TensorDictBase:
        """As a TorchRL wrapper stores it: nested tokens, the sampler's log-probs at the root."""
        prompts, each = self.prompts[rows], zip(self.prompts, self.answers, self.log_probs, strict=True)
        full, stored = zip(*((torch.cat([p, a]), torch.cat([p * 0.0, x.float()])) for p, a, x in each), strict=True)
        nested, out = torch.nested.nested_tensor, TensorDict(batch_size=[len(prompts)])
        out["tokens", "prompt"], out["tokens", "full"] = nested(prompts), nested(list(full[rows]))
        out["log_probs", "full"] = nested(list(stored[rows]))
        out["next", "reward"] = self.rewards[rows].unsqueeze(-1)
        return out


def make_prompts(number: int, seed: int, template: str = CHATML) -> list[Tensor]:
    """Rendered questions of random words."""
    rng, tokenizer = torch.Generator().manual_seed(seed), make_tokenizer()
    options: dict[str, Any] = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    out = []
    for _ in range(number):
        question = "".join(string.ascii_lowercase[i] for i in torch.randint(26, (8,), generator=rng).tolist())
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], **options)
        out.append(torch.tensor(tokenizer.encode(text, add_special_tokens=False)))
    return out


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Tensor], seed: int, *, raw: bool = False, answers: int = ANSWERS, **sampling: Any
) -> Rollout:
    """Answers of ``model.generate`` with log-probs under the sampling distribution, or with ``raw`` under the model."""
    tokenizer = make_tokenizer()
    rows = [p for p in prompts for _ in range(answers)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, True, -1, "left")
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        how = {"do_sample": True, "max_new_tokens": LENGTH, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
        how |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **OUTPUTS}
        out: Any = model.generate(padded.clamp(min=0), attention_mask=(padded >= 0).long(), **how)
    logits = torch.stack(out.logits if raw else out.scores, 1)
    drawn = out.sequences[:, padded.shape[1] :]
    log_probs = logits.float().log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    ended = (drawn == tokenizer.eos_token_id).long()
    lengths = ((ended.cumsum(1) - ended) == 0).sum(1).tolist()
    found = ([row[:n] for row, n in zip(values, lengths, strict=True)] for values in (drawn, log_probs))
    return Rollout(rows, *found, torch.randn(len(rows), generator=torch.Generator().manual_seed(seed)))


@lru_cache
def clean(family: str, seed: int) -> tuple[nn.Module, Rollout]:
    """A policy and its own samples, which nobody changes."""
    model = make_model(family, seed)
    return model, sample(model, make_prompts(PROMPTS, seed), seed)


def trained(model: nn.Module, rollout: Rollout, steps: int, seed: int) -> nn.Module:
    """A copy of a model after steps of REINFORCE with random advantages on its own samples."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(seed)
    for step in range(steps):
        pairs = list(zip(rollout.prompts, rollout.answers, strict=True))[step % 4 :: 8]
        ids = torch.nn.utils.rnn.pad_sequence([torch.cat(pair) for pair in pairs], True)
        loss = torch.zeros(())
        for (prompt, answer), logits in zip(pairs, model(input_ids=ids).logits, strict=True):
            log_probs = logits[len(prompt) - 1 :][: len(answer)].float().log_softmax(-1)
            advantage = torch.randn((), generator=rng)
            loss = loss - advantage * log_probs.gather(-1, answer[:, None]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


# ------------------------------------------------------------------ faults
Seeded = tuple[TensorDictBase, dict[str, Any]]
Fault = Callable[[str, int], Seeded]


def fault(
    doc: str,
    *,
    stored: Callable[[Rollout], dict[str, Any]] = lambda rollout: {},
    models: Callable[[nn.Module, Rollout, int], dict[str, Any]] = lambda model, rollout, seed: {},
    dtype: torch.dtype | None = None,
    template: str = CHATML,
    **sampling: Any,
) -> Fault:
    """A fault in the sampling (settings, dtype, template), in the stored entries, or in the models that score."""

    def seed_it(family: str, seed: int) -> Seeded:
        if sampling or dtype or template != CHATML:
            model, prompts = make_model(family, seed), make_prompts(PROMPTS, seed, template)
            rollout = sample(copy.deepcopy(model).to(dtype), prompts, seed, **sampling)
        else:
            model, rollout = clean(family, seed)
        # The trainer renders prompts with its own template.
        prompts = [p for p in make_prompts(PROMPTS, seed) for _ in range(ANSWERS)]
        batch = replace(rollout, **{"prompts": prompts, **stored(rollout)}).batch()
        return batch, {"policy": model, **models(model, rollout, seed)}

    seed_it.__doc__ = doc
    return seed_it


def stale_by(steps: int) -> Fault:
    """The sampler has the weights of some steps ago."""
    made = f"The policy has made {steps} step{'s' * (steps > 1)} of AdamW, at 0.001, since the sampler got its weights."
    return fault(made, models=lambda model, rollout, seed: {"policy": trained(model, rollout, steps, seed)})


def _encoded_again(rollout: Rollout) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    again = [tokenizer.encode(tokenizer.decode(answer), add_special_tokens=False) for answer in rollout.answers]
    answers = [torch.tensor(new[: len(old)]) for new, old in zip(again, rollout.answers, strict=True)]
    return {"answers": answers, "log_probs": [x[: len(a)] for x, a in zip(rollout.log_probs, answers, strict=True)]}


def _with_adapter(model: nn.Module, _: Rollout, seed: int) -> dict[str, Any]:
    import peft

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return {"policy": peft.get_peft_model(copy.deepcopy(model), config).eval()}


off_by_one = fault(
    "Log-probs are one position late.",
    stored=lambda rollout: {"log_probs": [torch.cat([x[:1] * 0, x[:-1]]) for x in rollout.log_probs]},
)
BESIDE = "Answers are decoded and encoded again; the log-probs of the sampled tokens stay beside them."
retokenised = fault(BESIDE, stored=_encoded_again)
chat_template = fault("The engine renders with another template; the trainer keeps its own.", template=ZEPHYR)
zeros = fault(
    "A cache of prefixes returns 0 for the first tokens of half the answers.",
    stored=lambda r: {"log_probs": [torch.cat([x[:6] * (i % 2), x[6:]]) for i, x in enumerate(r.log_probs)]},
)
raw_log_probs = fault(
    "Sampled and scored at temperature 0.7; the engine records log-probs of temperature 1.",
    models=lambda *_: {"temperature": 0.7},
    temperature=0.7,
    raw=True,
)
COLD = "Sampled at temperature 0.8, recorded there, scored at 1."
COLD_RAW = "Sampled at temperature 0.8, with raw log-probs recorded, scored at 1: all log-probs agree."
CUT = "Sampled with {}, and its renormalised log-probs recorded."
CUT_RAW = "Sampled with {}, with raw log-probs recorded: all log-probs agree."
BFLOAT16 = fault("The sampler runs in bfloat16, the trainer in float32.", dtype=torch.bfloat16)
ADAPTER_OFF = fault("The engine serves the base model, without the policy's adapter.", models=_with_adapter)
SAME = fault("The reference is the model that is trained.", models=lambda model, *_: {"reference": model})
#: Fault -> the function that seeds it, and the expected causes.
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "1 raw log-probs": (raw_log_probs, ("raw_log_probs",)),
    "2 wrong temperature": (fault(COLD, temperature=0.8), ("wrong_temperature",)),
    "2 wrong temperature, raw log-probs": (fault(COLD_RAW, temperature=0.8, raw=True), ("wrong_temperature",)),
    "3 top-p": (fault(CUT.format("top-p 0.9"), top_p=0.9), ("top_p",)),
    "3 top-p, raw log-probs": (fault(CUT_RAW.format("top-p 0.9"), top_p=0.9, raw=True), ("top_p",)),
    "4 top-k": (fault(CUT.format("top-k 10"), top_k=10), ("top_k",)),
    "4 top-k, raw log-probs": (fault(CUT_RAW.format("top-k 10"), top_k=10, raw=True), ("top_k",)),
    "5 weights of 1 step ago": (stale_by(1), ("stale_weights",)),
    "6 weights of 10 steps ago": (stale_by(10), ("stale_weights",)),
    "7 another chat template": (chat_template, ("chat_template",)),
    "8 off by one": (off_by_one, ("off_by_one",)),
    "9 bfloat16 sampler": (BFLOAT16, ("low_precision",)),
    "10 decoded and encoded again": (retokenised, ("retokenised",)),
    "11 cached zeros": (zeros, ("zeros",)),
    "12a adapter off": (ADAPTER_OFF, ("adapter_off",)),
    "12b the reference is the policy": (SAME, ("reference_is_policy",)),
}

#: Settings of clean batches, one for each family.
SETTINGS = (Sampling(), Sampling(0.7), Sampling(top_p=0.9), Sampling(1.2), Sampling(0.8, top_k=20))


def clean_batches(family: str, seed: int, number: int) -> Iterator[Seeded]:
    """Faultless batches of 4 prompts and 8 answers each, with a reference of other weights."""
    sampling = SETTINGS[FAMILIES.index(family)]
    model, reference = make_model(family, seed), make_model(family, seed + 1000)
    settings: dict[str, Any] = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    rollout = sample(model, make_prompts(4 * number, seed), seed, **settings)
    for i in range(number):
        given = {"policy": model, "reference": reference, "sampling": sampling}
        yield rollout.batch(slice(4 * ANSWERS * i, 4 * ANSWERS * (i + 1))), given


def columns_of(mask: list[list[int]], rows: Any = None, **named: list[list[float]]) -> TokenColumns:
    """A batch with these columns. Each sequence gets a first masked-out token as its prompt."""
    tokens = Ragged.from_list([torch.arange(len(row) + 1) for row in mask])
    flat = torch.cat([torch.tensor([0, *row]) for row in mask]).bool()
    padded = {name: [x for row in values for x in (math.nan, *row)] for name, values in named.items()}
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in padded.items()}
    return TokenColumns(tokens, flat, columns, rows or {})
