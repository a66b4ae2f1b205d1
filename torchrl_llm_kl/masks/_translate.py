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
    template must render these messages to the same text. A default system prompt belongs to a template, and is not translated.

    Args:
        source: the tokenizer of the prompts, with a chat template.
        target: the other tokenizer, with another chat template.

    Raises:
        ValueError: when it is called, for a text that the first template does not render from messages of text, or messages
            that the other template refuses or leaves out.

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
        """The token ids of the other tokenizer, for a prompt from the start of the conversation."""
        text = self._decoded(ids)
        messages = self._parsed(text, 0, set())
        if messages is None or _render(self._source, messages, prompt=True) != text:
            raise self._unknown(text)
        return self._ids(_render(self._target, messages, prompt=True), messages)

    def between(self, ids: list[int]) -> list[int]:
        """The same for a text that begins after an answer. The token that ended the answer may belong to the text."""
        text = self._decoded(ids)
        for end in {last for role, _, last in self._known if role == "assistant"}:
            # The rest of the answer's turn comes first.
            for said in (said for said in range(len(end) + 1) if text.startswith(end[said:])):
                messages = self._parsed(text, len(end) - said, set())
                if messages is not None and self._after_answer(self._source, messages) == end[:said] + text:
                    rest = self._after_answer(self._target, messages)
                    ends = [token for token in self._target.all_special_tokens if said and rest.startswith(token)]
                    return self._ids(rest.removeprefix(max(ends, key=len, default="")), messages)
        raise self._unknown(text)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._source.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _ids(self, text: str, messages: list[Message]) -> list[int]:
        for message in messages:
            if str(message["content"]).strip() not in text:
                raise ValueError(
                    f"the teacher's chat template leaves out the {message['role']} message {message['content']!r}."
                )
        return list(self._target(text, add_special_tokens=False).input_ids)

    def _unknown(self, text: str) -> ValueError:
        return ValueError(
            f"the chat template does not render {text[:60]!r}... from messages of text, so it cannot be translated: pass a "
            "function from the student's token ids to the teacher's as prompt=."
        )

    def _frames(self, role: str) -> Iterator[tuple[str, str]]:
        """The strings before and after a message, as the first one and as a later one."""
        for before in _BEFORE:
            try:
                whole = _render(self._source, [*before, {"role": role, "content": _CONTENT}], prompt=False)
                start = _render(self._source, before, prompt=False) if before else ""
            except ValueError:  # a template may forbid this order of roles
                continue
            if whole.startswith(start) and whole.count(_CONTENT) == 1:
                first, _, last = whole.removeprefix(start).partition(_CONTENT)
                yield first, last

    def _parsed(self, text: str, at: int, failed: set[int]) -> list[Message] | None:
        """The messages from a place on, up to the generation prompt. Places without such messages are added to ``failed``."""
        if text[at:] == self._end:
            return []
        for role, first, last in self._known if at not in failed else ():
            begin = at + len(first)
            if not text.startswith(first, at):
                continue
            end = text.find(last, begin) if last else len(text) - len(self._end)
            while end >= begin:
                rest = self._parsed(text, end + len(last), failed)
                if rest is not None:
                    return [{"role": role, "content": text[begin:end]}, *rest]
                end = text.find(last, end + 1) if last else -1
        failed.add(at)
        return None

    def _after_answer(self, tokenizer: Tokenizer, messages: list[Message]) -> str:
        """The rendering of messages after an answer, from the end of the answer on."""
        return _render(tokenizer, [*_BEFORE[2], *messages], prompt=True).rpartition(_ANSWER)[2]


def _render(tokenizer: Tokenizer, messages: list[Message], *, prompt: bool) -> str:
    try:
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)  # type: ignore[arg-type]
    except (TemplateError, TypeError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template refuses messages of {roles}: {error}") from error
    return str(text)
