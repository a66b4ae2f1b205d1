"""Random templates in the styles of real ones. Each turn has a correct mask (content and end token), or there is an error."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings, strategies as st

from project import tables
from template_pairs import assistant, message_of, user
from torchrl_llm_kl.masks import AssistantMaskError, render_conversation
from toy_tokenizer import build_tokenizer

SCAN = "{% for m in messages %}{% endfor %}"
WALKS, HEADERS, ENDS, PLACES, PROMPTS, CONTENTS, ONCE_WRONG = tables(__file__).values()
CHOICES = (["", SCAN], WALKS, HEADERS, ENDS, PLACES, PROMPTS, CONTENTS)


class Format(NamedTuple):
    scan: str
    walk: str
    header: str
    end: str
    place: str
    prompt: str
    content: str

    def template(self) -> str:
        body = HEADERS[self.header] + CONTENTS[self.content] + PLACES[self.place]
        header = HEADERS[self.header].replace("{{ m.role }}", "assistant")
        template = WALKS[self.walk] + PROMPTS[self.prompt].replace("HEADER", header)
        parts = body.replace("m.reasoning_content", "reasoning")
        parts = parts.replace("m.role", "role").replace("m.content", "content")
        template = template.replace("BODY_OF_PARTS", parts).replace("BODY", body)
        return self.scan + template.replace("END", ENDS[self.end])

    def turns(self, messages: list[dict]) -> list[str]:
        """The text that the model writes in each assistant turn."""
        turns = []
        shown = [m for m in messages if m["content"]] if self.walk == "without empty" else messages
        for at, message in enumerate(shown):
            final = at == len(shown) - 1
            content = message["content"]
            if self.content == "trimmed":
                content = content.strip()
            if self.content == "without thinking" and not final:
                content = content.split("</think>")[-1]
            if self.content == "reasoning" and final and message.get("reasoning_content"):
                content = f"<think>\n{message['reasoning_content']}</think>{content}"
            if self.prompt == "thinking":
                content = content.removeprefix("<think>\n")
            end = "" if self.place == "between" and final else ENDS[self.end]
            if message["role"] == "assistant":
                turns.append((content + end) if end else (content + end).rstrip())
        return [turn for turn in turns if turn]


formats = st.builds(Format, *(st.sampled_from(list(choices)) for choices in CHOICES))
answers = ["yes", "user", "assistant", " spaced ", "<think>\nhm</think>no", "", "é😀", "a: b", "[x]"]
roles = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=5)


def outcome(form: Format, messages: list[dict], prompt: bool, mask=render_conversation) -> str:
    try:
        rendered = mask(build_tokenizer(form.template()), messages, add_generation_prompt=prompt)
    except AssistantMaskError as error:
        return "error" if "sha256" in str(error) else f"an error without the template's name: {error}"
    turns = [rendered.text[start:end] for start, end in rendered.assistant_spans]
    return "right" if turns == form.turns(messages) else f"{turns}, not {form.turns(messages)}, in {rendered.text!r}"


@settings(max_examples=50, deadline=None)
@given(form=formats, roles=roles, data=st.data(), prompt=st.booleans())
def test_each_turn_is_right_or_an_error(form, roles, data, prompt):
    assume("assistant" in roles)
    assume(form.end != "none" or form.place != "closed")  # else <|closed|> is the only token that ends an answer
    messages = [{"role": role, "content": data.draw(st.sampled_from(answers))} for role in roles]
    for message in messages:
        if message["role"] == "assistant" and data.draw(st.booleans()):
            message["reasoning_content"] = "hm"
    assert outcome(form, messages, prompt) in ("right", "error")


TYPICAL = [user("Hi"), assistant("yes"), user("Bye"), assistant("no")]


@pytest.mark.parametrize("walk", WALKS)
def test_typical_formats_are_right(walk):
    """Errors everywhere would satisfy the property above. These templates must work."""
    prompts = itertools.cycle(("plain", "not twice", "thinking", "thinking", "plain", "not twice"))
    for scan, header, end in itertools.product(("", SCAN), HEADERS, ("eos", "other")):
        form = Format(scan, walk, header, end, "always", next(prompts), "plain")
        for messages in (TYPICAL, TYPICAL[:2], [{"role": "system", "content": "Be brief."}, *TYPICAL]):
            assert outcome(form, messages, False) == "right", form
    marked = Format("", walk, "chatml", "eos", "always", "plain", "marked")  # also where no message can be located
    assert outcome(marked, TYPICAL, False) == "right"


def shifted(left: int, right: int, last: int | None = None):
    def mask(*args, **kwargs):
        rendered = render_conversation(*args, **kwargs)
        spans = rendered.assistant_spans[:last]
        return replace(rendered, assistant_spans=tuple((a + left, b + right) for a, b in spans))

    return mask


def test_the_oracle_detects_wrong_masks():
    """Negative control with a lost turn, a header, a missing end token, and white space after it."""
    form = Format("", "slice", "chatml", "eos", "always", "plain", "plain")
    assert outcome(form, TYPICAL, False) == "right"
    for mask in (shifted(0, 0, -1), shifted(-len("assistant\n"), 0), shifted(0, -len("<|im_end|>")), shifted(0, 1)):
        assert outcome(form, TYPICAL, False, mask) not in ("right", "error")


@pytest.mark.parametrize("case", ONCE_WRONG)
def test_templates_whose_masks_were_once_silently_wrong(case):
    form = Format(SCAN if case["scan"] else "", *case["choices"])
    messages = [message_of(row) for row in case["messages"]]
    assert outcome(form, messages, case["prompt"]) in ("right", "error")
