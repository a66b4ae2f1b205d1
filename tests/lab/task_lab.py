"""A scripted policy: a real wrapper around a toy model, whose sampler is forced to take given tokens."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrl.modules.llm import TransformersWrapper
from transformers import LogitsProcessor

from toy_rollouts import make_model, make_policy
from toy_tokenizer import build_tokenizer

#: A template that shows tools, calls and results as Hermes' and Qwen's templates do.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOT = "<|im_start|>assistant\n"
END = "<|im_end|>"


def make_tokenizer(template: str = HERMES, **kwargs: Any) -> Any:
    return build_tokenizer(template, pad_token="<|pad|>", **kwargs)


class Script(LogitsProcessor):
    """Forces the tokens of ``answer(prompt)``, and the end token after them."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], str]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.before: Tensor | None = None
        self.todo: list[list[int]] = []
        self.prompts: list[str] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.before is None or not torch.equal(input_ids[:, :-1], self.before):
            texts = [self.tokenizer.decode(row[row != self.tokenizer.pad_token_id]) for row in input_ids]
            self.prompts += texts
            answers = [self.answer(text) for text in texts]
            self.todo = [[*self.tokenizer(a).input_ids, self.tokenizer.eos_token_id] for a in answers]
        self.before = input_ids.clone()
        forced = torch.full_like(scores, -torch.inf)
        for row, todo in enumerate(self.todo):
            forced[row, todo.pop(0) if todo else self.tokenizer.pad_token_id] = 0.0
        return forced


def scripted_policy(
    tokenizer: Any, answer: Callable[[str], str], *, pad_output: bool = False, model: Any = None, **kwargs: Any
) -> TransformersWrapper:
    """A policy in text mode that writes ``answer(prompt)``. Its script is ``policy.script``."""
    model = make_model(tokenizer, seed=0) if model is None else model
    policy = make_policy(model, tokenizer, pad_output=pad_output, **{"input_mode": "text", **kwargs})
    script = Script(tokenizer, answer)
    policy.generate_kwargs |= {"logits_processor": [script], "do_sample": False, "max_new_tokens": 120}
    object.__setattr__(policy, "script", script)
    return policy


def last_user(prompt: str) -> str:
    """The last message before the answer."""
    return prompt.removesuffix(BOT).split("<|im_start|>")[-1].partition("\n")[2].removesuffix(END + "\n")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def call(name: str, **arguments: Any) -> str:
    """A tool call in Hermes' format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
