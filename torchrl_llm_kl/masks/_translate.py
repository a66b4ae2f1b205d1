"""Prompts in the chat template of one tokenizer, as token ids in the template of another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from torchrl_llm_kl.masks._messages import Message, Tokenizer

_CONTENT, _ANSWER = "k7zq question", "w3xv answer"
_BEFORE: tuple[list[Message], ...] = (
    [],
    [{"role": "user", "content": "question"}],
    [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}],
)


class PromptTranslator:
    r"""Renders the messages of a prompt with the chat template of another tokenizer.

    The messages are found by the strings that the first template writes before and after a message of each role. The first
    template must render these messages to the same text. A text that begins inside a conversation, after an answer and the
    token that ends it, is translated in the same way.

    Args:
        source: the tokenizer of the prompts, with a chat template.
        target: the other tokenizer, with another chat template.

    Raises:
        ValueError: when it is called, for a text that the first template does not render, such as one with tools.

    Example:
        >>> from torchrl_llm_kl.tasks import tiny_chat_model
        >>> source, target = tiny_chat_model()[1], tiny_chat_model()[1]
        >>> target.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
        >>> prompt = source.apply_chat_template([{"role": "user", "content": "Hi!"}], add_generation_prompt=True)
        >>> target.decode(PromptTranslator(source, target)(prompt["input_ids"]))
        '[user] Hi!\n[assistant] '
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self._source, self._target = source, target
        frames = {(role, *frame) for role in ("system", "user", "assistant", "tool") for frame in self._frames(role)}
        # The longest match first: a template may write a default system prompt before the first message.
        self._known = sorted(frames, key=lambda frame: -len(frame[1]))
        question = _BEFORE[1]
        self._end = _render(source, question, prompt=True).removeprefix(_render(source, question, prompt=False))

    def __call__(self, ids: list[int]) -> list[int]:
        """The token ids of the other tokenizer."""
        text: Any = self._source.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for before in (_BEFORE[0], _BEFORE[2]):
            for start in self._starts(text) if before else [0]:
                messages = self._parsed(text, start)
                if messages is not None and self._rest(self._source, before, messages)[0].endswith(text):
                    whole, first = self._rest(self._target, before, messages)
                    # The answer before this text ended with a token of its own.
                    return list(self._target(whole.removeprefix(first), add_special_tokens=False).input_ids)
        raise ValueError(
            f"the chat template does not render {text[:60]!r}... from messages of text, so it cannot be translated: pass a "
            "function from the student's token ids to the teacher's as prompt=."
        )

    def _frames(self, role: str) -> Iterator[tuple[str, str]]:
        """The strings before and after a message, as the first one and as a later one."""
        for before in _BEFORE:
            try:
                whole = _render(self._source, [*before, {"role": role, "content": _CONTENT}], prompt=False)
                start = _render(self._source, before, prompt=False) if before else ""
            except (TemplateError, TypeError, ValueError):  # a template may forbid this order of roles
                continue
            if whole.startswith(start) and whole.count(_CONTENT) == 1:
                first, _, last = whole.removeprefix(start).partition(_CONTENT)
                yield first, last

    def _starts(self, text: str) -> Iterator[int]:
        """The places where the first message may begin, after the rest of the answer's turn."""
        for end in {last for role, _, last in self._known if role == "assistant"}:
            yield from (len(end) - i for i in range(len(end) + 1) if text.startswith(end[i:]))

    def _parsed(self, text: str, at: int) -> list[Message] | None:
        """The messages from a place on, up to the generation prompt."""
        if text[at:] == self._end:
            return []
        for role, first, last in self._known:
            begin = at + len(first)
            if not text.startswith(first, at):
                continue
            end = text.find(last, begin) if last else len(text) - len(self._end)
            while end >= begin:
                rest = self._parsed(text, end + len(last))
                if rest is not None:
                    return [{"role": role, "content": text[begin:end]}, *rest]
                end = text.find(last, end + 1) if last else -1
        return None

    def _rest(self, tokenizer: Tokenizer, before: list[Message], messages: list[Message]) -> tuple[str, str]:
        """The text after an answer, and its first special token. Without an answer the whole text, and nothing."""
        text = _render(tokenizer, [*before, *messages], prompt=True)
        if not before:
            return text, ""
        rest = text[text.index(_ANSWER) + len(_ANSWER) :]
        ends = [token for token in tokenizer.all_special_tokens if rest.startswith(token)]
        return rest, max(ends, key=len, default="")


def _render(tokenizer: Tokenizer, messages: list[Message], *, prompt: bool) -> str:
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)  # type: ignore[arg-type]
    return str(text)
