"""Samples answers from a transformers model: each sampled token counts, and earlier turns keep the tokens that were sampled."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, product
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.scoring import Sampling, truncate
from torchrl_llm_kl.tasks import active_rows, read_rows_of, write_answers
from torchrl_llm_kl.training._ranks import is_gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The positional arguments of a module's forward.
Arguments = tuple[object, ...]

# ------------------------------------------------------------------ prompts and answers of a batch


def prompt_ids(tokenizer: PreTrainedTokenizerBase, tensordict: TensorDictBase) -> tuple[list[str], list[list[int]]]:
    """The prompts of a batch as texts, and their token ids.

    The text of earlier turns keeps the ids that were sampled, which the env passes on. Only the text after them is tokenised.
    """
    texts = read_rows_of(tensordict, ("text", "prompt")) or []
    sampled = read_rows_of(tensordict, "sampled") if has_entry(tensordict, "sampled") else None
    out = []
    for text, (length, ids) in zip(texts, sampled or [(0, [])] * len(texts), strict=True):
        # Special tokens such as BOS belong to the start of a conversation only.
        out.append([*ids, *tokenizer(text[length:], add_special_tokens=not ids).input_ids])
    return texts, out


# ------------------------------------------------------------------ transformers


class _Sampler(TransformersWrapper):
    """A wrapper that passes all arguments to ``generate``, forwards equal prompts once, and keeps each sampled token.

    torchrl's constructor drops arguments that it does not list, such as ``min_p``. Its attention mask leaves out each padding
    token. Many tokenizers use one token for padding and for the end of an answer. With torchrl's mask the end would then never
    be trained. It also tokenises the text of earlier turns again.
    """

    generate_kwargs: dict[str, Any]

    def __init__(
        self, *args: object, generate_kwargs: Mapping[str, object], noise: AnswerNoise | None = None, **settings: object
    ) -> None:
        super().__init__(*args, generate_kwargs=generate_kwargs, **settings)
        self.generate_kwargs = {**generate_kwargs, **self.generate_kwargs}
        self.noise = noise

    def forward(self, tensordict: TensorDictBase, **kwargs: object) -> TensorDictBase:
        """Sample the answers and write them. Rows whose ``"_step"`` is False get empty answers."""
        if tensordict.ndim != 1 or kwargs:
            return super().forward(tensordict, **kwargs)
        texts, prompts = prompt_ids(self.tokenizer, tensordict)
        rows = [row for row, active in enumerate(active_rows(tensordict)) if active]
        if self.noise is not None:
            keys = answer_keys(tensordict)
            self.noise.start([keys[row] for row in rows])
        answers = [torch.zeros(0, dtype=torch.long, device=self.model.device)] * len(texts)
        for row, answer in zip(rows, self._generate([prompts[row] for row in rows]), strict=True):
            answers[row] = answer
        return write_answers(tensordict, self.tokenizer, texts, [torch.tensor(row) for row in prompts], answers)

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The token ids of an answer to each prompt, up to and including the token that ends it."""
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        padded = padded.to(self.model.device)
        settings = self.generate_kwargs
        if is_gathered(self.model):  # transformers would wait for the other ranks after each token
            settings = {**settings, "synced_gpus": False}
        with _equal_prompts_once(self.model):
            out: Any = self.model.generate(
                input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], **settings
            )
        full, width = out if isinstance(out, Tensor) else out["sequences"], padded["input_ids"].shape[1]
        ends = self.generate_kwargs.get("eos_token_id", self.model.generation_config.eos_token_id)
        ends = torch.as_tensor([] if ends is None else ends, dtype=full.dtype, device=full.device)
        ended = torch.isin(full[:, width:], ends).long()
        for stops, last in product(self.generate_kwargs.get("stopping_criteria", ()), range(width, full.shape[1])):
            ended[:, last - width] |= stops(full[:, : last + 1], None)
        real = ended.cumsum(-1) == ended  # True if no earlier token has ended the answer
        return [row[mask] for row, mask in zip(full[:, width:], real, strict=True)]


@contextmanager
def _equal_prompts_once(model: Any) -> Iterator[None]:
    """Let the first forward of ``generate`` run once for consecutive rows with equal prompts, and copy its states.

    Later forwards continue each row from its own copy. A model that keeps states outside of a ``DynamicCache`` is not changed.
    """
    from transformers import DynamicCache

    states: DynamicCache | None = None
    rows: Tensor | None = None  # the index of each row's prompt, for the hook after the first forward

    def before(_: nn.Module, args: Arguments, given: dict[str, object]) -> tuple[Arguments, dict[str, object]]:
        nonlocal states, rows
        own.pop().remove()  # the hooks are only for the first forward
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
        ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
        # Not isinstance: a subclass may hold states that `reorder_cache` does not copy.
        states = next((value for value in given.values() if type(value) is DynamicCache), None)
        if states is None or ids is None or not all(_has_rows(name, x, len(ids)) for name, x in tensors.items()):
            return args, given
        prompts = ids if mask is None else torch.cat([ids, mask], 1)
        _, rows = prompts.unique_consecutive(dim=0, return_inverse=True)
        # The first row of each run of equal prompts. The prepended -1 makes row 0 one of them.
        first = rows.diff(prepend=rows.new_full((1,), -1)) > 0
        return args, {**given, **{name: value[first] for name, value in tensors.items()}}

    def after(_: nn.Module, args: Arguments, output: Any) -> None:
        own.pop().remove()
        if rows is not None and states is not None:
            output.logits = output.logits[rows]
            states.reorder_cache(rows)  # type: ignore[arg-type]

    # PEFT's generate calls the base model's generate, so the hooks must be on the base model.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if model.config.model_type == "recurrent_gemma":  # it keeps states in its layers
        yield
        return
    own = [model.register_forward_hook(after), model.register_forward_pre_hook(before, with_kwargs=True)]
    try:
        yield
    finally:
        for hook in own:
            hook.remove()


def _has_rows(name: str, value: Tensor, count: int) -> bool:
    """Whether the first dimension of an argument holds the ``count`` rows.

    The first dimension of an image-text model's positions holds planes, and there may be as many planes as rows.
    """
    return len(value) == count and (name != "position_ids" or value.ndim == 2)


def make_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    end: Sequence[str] = (),
    seed: int | None = None,
) -> TransformersWrapper:
    """A torchrl policy that samples answers from a transformers model, for :func:`~torchrl_llm_kl.tasks.make_env`.

    The policy records no log-probs, since the transforms compute them. The attention mask includes each sampled token up to
    the first one that ends the answer (``eos_token_id`` of the model's ``generation_config``, and ``end``), even if it is the
    padding token. Consecutive rows with the same prompt share its forward.

    Args:
        model: a transformers model, which is not copied.
        tokenizer: a tokenizer that has a padding token and pads on the left.

    Keyword Args:
        max_new_tokens: the longest answer, in tokens.
        sampling: the distribution of the tokens. None takes the most probable token.
        end: texts that also end an answer, which includes them. A text may be a special token, a part of a token, or several
            tokens.
        seed: draws each answer from a generator of its own, which depends on this seed, the prompt's number in the run, the
            answer's place in its group, and its turn. Any number of ranks or threads then gives the same answers. None
            draws from torch's default generator.

    Raises:
        ValueError: if the tokenizer has no padding token.

    Example:
        >>> sampler = make_sampler(model, tokenizer, max_new_tokens=64, sampling=Sampling())  # doctest: +SKIP
    """
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token, such as to tokenizer.eos_token.")
    drawn: dict[str, object] = {"do_sample": False, "repetition_penalty": 1.0}
    if sampling is not None:
        drawn = sampling.generate_kwargs() if seed is None else drawn
    from transformers.generation import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

    noise = None if sampling is None or seed is None else AnswerNoise(sampling, seed)
    if noise is not None:
        drawn["logits_processor"] = LogitsProcessorList([noise])
    if end:
        # generate needs an end token to pad the answers that have ended. A base model may have none.
        ids = (model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        drawn["eos_token_id"] = next(token for token in ids if token is not None)
        drawn["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, list(end))])
    return _Sampler(
        model,
        tokenizer=tokenizer,
        input_mode="text",
        generate=True,
        return_log_probs=False,  # torchrl's have temperature 1, and keep [B, T, V] logits in memory
        noise=noise,
        generate_kwargs={**drawn, "max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id},
        pad_output=True,  # plain tensors: prompts padded on the left, answers on the right
        device=model.device if model.device.type != "cpu" else None,
    )


# ------------------------------------------------------------------ random numbers of each answer


class AnswerNoise:
    """Draws each answer from a generator of its own. An answer then does not depend on the answers beside it.

    The most probable token after Gumbel noise is an exact sample: ``argmax(logits - log E)`` with exponential ``E`` has the
    softmax as its distribution. torch's ``multinomial`` draws a whole batch from one generator instead, so an answer would
    depend on the number of ranks and on the order in which batches are sampled.

    Args:
        sampling: the distribution of the tokens.
        seed: the seed of the run.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling, self.seed = sampling, seed
        self._generators: list[torch.Generator] = []

    def start(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Begin a batch with a key for each row, such as the numbers of the episode and of the turn."""
        self._generators = [keyed_generator(self.seed, *key) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Add the noise of the next token to the logits ``[B, V]``. It is a ``LogitsProcessor`` of transformers."""
        size = scores.shape[-1]
        drawn = [torch.empty(size, dtype=torch.float64).exponential_(generator=each) for each in self._generators]
        return truncate(scores, self.sampling).double() - torch.stack(drawn).log().to(scores.device)


def keyed_generator(*key: int) -> torch.Generator:
    """A generator that depends only on its key.

    Example:
        >>> first, second = (torch.rand(1, generator=keyed_generator(0, 7)) for _ in range(2))
        >>> bool(first == second)
        True
    """
    return torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(63))


def answer_keys(tensordict: TensorDictBase) -> list[tuple[int, ...]]:
    """A key for each row of an env's data: its prompt's number, its place in the group, and its turn."""
    groups = [int(group) for group in tensordict["group"].flatten()]
    turns = tensordict["step"].flatten().tolist() if has_entry(tensordict, "step") else [0] * len(groups)
    members: defaultdict[int, Iterator[int]] = defaultdict(count)
    return [(group, next(members[group]), turn) for group, turn in zip(groups, turns, strict=True)]
