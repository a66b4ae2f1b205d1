"""The masks of all chat templates that packages ship are right or raise an error. None is silently wrong."""

import tarfile
from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("trl", reason="the conversations come from TRL's pairs")

import template_corpus
from template_oracle import CONVERSATIONS, OPTIONS, Template, check, expected_spans
from torchrl_llm_kl.masks import render_conversation
from toy_tokenizer import CHATML

TEMPLATES = template_corpus.templates()


@cache
def template(name: str) -> Template:
    return Template(name, TEMPLATES[name])


@pytest.mark.skipif(not TEMPLATES, reason=template_corpus.HOW_TO)
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_mask_is_silently_wrong(name):
    if not template(name).is_chat:
        pytest.skip("does not show both a question and its answer")
    outcomes = {kind: check(template(name), kind) for kind in CONVERSATIONS}
    assert not {kind: outcome for kind, outcome in outcomes.items() if outcome.status == "silent"}
    assert any(outcome.status == "right" for outcome in outcomes.values())


QUESTION = {"role": "user", "content": "what is it?"}
ANSWER = {"role": "assistant", "content": "it rains9"}
SCHEMA = [{"type": "function", "function": {"name": "weather", "description": "?", "parameters": {}}}]


def with_call(arguments: object) -> list[dict[str, object]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain7"}
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, result, ANSWER]


def in_parts(message: dict[str, str]) -> dict[str, object]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


#: Two forms of one conversation.
FORMS = {
    "arguments as JSON text": (with_call({"city": "Oslo5"}), with_call('{"city": "Oslo5"}')),
    "content in parts": ([QUESTION, ANSWER], [in_parts(QUESTION), in_parts(ANSWER)]),
    "an empty list of calls": ([QUESTION, ANSWER], [QUESTION, {**ANSWER, "tool_calls": []}]),
}


@pytest.mark.skipif(not TEMPLATES, reason=template_corpus.HOW_TO)
@pytest.mark.parametrize("name", TEMPLATES)
def test_forms_of_one_conversation_are_rendered_alike(name):
    if not template(name).is_chat:
        pytest.skip("does not show both a question and its answer")
    tokenizer = template(name).tokenizer

    def rendered(messages):
        try:
            return render_conversation(tokenizer, messages, tools=SCHEMA if len(messages) > 2 else None).text
        except Exception as error:  # the template or the masks refuse the conversation
            return type(error).__name__

    for form, (one, other) in FORMS.items():
        assert rendered(one) == rendered(other), form


@pytest.mark.skipif(not TEMPLATES, reason=template_corpus.HOW_TO)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_written_or_reported(name):
    if not template(name).is_chat:
        pytest.skip("does not show both a question and its answer")
    reasoning = [{**ANSWER, "reasoning_content": word} for word in ("thought8", "second6")]
    for messages, words in (
        ([QUESTION, reasoning[0], QUESTION, reasoning[1]], {"thought8": (1, "reasoning"), "second6": (3, "reasoning")}),
        (with_call({"city": "Oslo5"}), {"Oslo5": (1, "tool_calls"), "rain7": (2, "content")}),
    ):
        try:
            found = render_conversation(template(name).tokenizer, messages, tools=SCHEMA if len(words) == 2 else None)
        except Exception:
            continue
        lost = {(each.message, each.field) for each in found.lost}
        assert {word for word, place in words.items() if place in lost} == {w for w in words if w not in found.text}


@pytest.mark.skipif(not TEMPLATES, reason=template_corpus.HOW_TO)
def test_the_corpus_is_complete():
    packages = {f"{template_corpus.slug(package)}-{version}" for package, version, _ in template_corpus.PACKAGES}
    assert {name.partition("__")[0] for name in TEMPLATES} == packages
    assert len(TEMPLATES) > 400


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
INST = (
    "{% for m in messages %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)
BETWEEN = (
    "{% for m in messages %}{{ '' if loop.first else '<end>' }}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<end><assistant>{% endif %}"
)
ALWAYS = "{% for m in messages %}<start><{{ m.role }}>{{ m.content }}<end>{% endfor %}<start><assistant>"
TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}</tool>{% else %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% if m.tool_calls %}<tool>{% else %}{{ m.content }}<end>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"
)
BY_HAND = [
    (CHATML, "multi", ["Hello there<|im_end|>", "Hi<|im_end|>"]),
    (CHATML, "empty first", ["<|im_end|>", "Bye bye<|im_end|>"]),
    (CHATML, "spaces", ["  Hello  <|im_end|>", "\nBye\n\n<|im_end|>"]),
    (CHATML, "prompted", ["Hello<|im_end|>", "Bye bye<|im_end|>"]),
    (CHATML, "two in a row", ["Hello<|im_end|>", "there<|im_end|>", "Bye bye<|im_end|>"]),
    (PHI, "multi", ["Hello there<|end|>", "Hi<|end|>"]),
    (THINKS, "reasoning", ["3<|im_end|>", "two and two\n</think>\n\n4<|im_end|>"]),
    (INST, "short", ["a<EOS>", ".<EOS>"]),
    (BETWEEN, "multi", ["Hello there<end>", "Hi"]),
    (ALWAYS, "multi", ["Hello there<end>", "Hi<end>"]),
    (TOOLS, "tools", ['<call>{"a": 1, "b": 2}</call><tool>', "It is 3.<end>", "Welcome<end>"]),
]


@pytest.mark.parametrize(("source", "kind", "expected"), BY_HAND)
def test_the_oracle_finds_the_turns(source, kind, expected):
    tested, prompt = Template("toy", source), kind == "prompted"
    text = tested.render(tested.form(CONVERSATIONS[kind]), prompt)
    spans = expected_spans(tested, CONVERSATIONS[kind], prompt)
    assert [text[start:end] for start, end, _ in spans] == expected


def wrong_mask(fault):
    """A mask function with a fault: an offset of each span's start and end, or the name of another fault."""

    def mask(*args, **kwargs):
        rendered = render_conversation(*args, **kwargs)
        spans, tokens = rendered.assistant_spans, rendered.assistant_mask.clone()
        if fault == "crash":
            raise RuntimeError("boom")
        if fault == "last token":
            tokens[tokens.nonzero()[-1]] = False
            return replace(rendered, assistant_mask=tokens)
        left, right = (0, 0) if fault == "last turn" else fault
        spans = tuple((start + left, end + right) for start, end in spans)
        return replace(rendered, assistant_spans=spans[:-1] if fault == "last turn" else spans)

    return mask


WRONG = {"header": (-1, 0), "first character": (1, 0), "end token": (0, -1), "white space": (0, 1)}
WRONG |= {fault: fault for fault in ("last turn", "last token", "crash")}


@pytest.mark.parametrize("source", [CHATML, PHI, THINKS])
def test_a_wrong_mask_is_reported_as_silent(source):
    tested = Template("toy", source)
    assert check(tested, "multi").status == "right"
    assert {check(tested, "multi", wrong_mask(fault)).status for fault in WRONG.values()} == {"silent"}


def test_a_refusal_of_one_of_the_24_conversations_is_no_error_of_the_mask():
    refusing = "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    tested = Template("toy", refusing)
    assert check(tested, "single").status == "right"
    assert check(tested, "multi").status == "refused"
    assert "too long" in check(tested, "multi").reason
    assert len(CONVERSATIONS) == 24
    assert OPTIONS.keys() <= CONVERSATIONS.keys()


def test_templates_of_an_archive(tmp_path):
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    files = {
        "p/chat.jinja": loop,
        "p/other.jinja": "{{ documents }}",
        "p/Model-1B/tokenizer_config.json": f'{{"chat_template": "{loop}1"}}',
        "p/two.json": f'[{{"chat_template": [{{"name": "tool_use", "template": "{loop}2"}}]}}]',
        "p/lines.json": f'{{"model": {{"chat_template": ["{loop}", "3"]}}}}',
        "p/code.py": f'def f():\n    chat = "{loop}" "4" + "5"\n    return "no template of messages {{% %}}"\n',
        "p/tests/test_code.py": f'toy = "{loop}6"\n',
        "p/chat-template-automap.ts": f'[{{model: "library/x:1b",\n\t\tgguf: "{loop}7"}}]',
    }
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    with tarfile.open(tmp_path / "p.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "p", "p")
    ends = {"chat": "", "Model-1B": "1", "two.tool_use": "2", "lines": "3", "code.chat": "45", "x:1b": "7"}
    assert dict(template_corpus.extract(tmp_path / "p.tar.gz")) == {name: loop + end for name, end in ends.items()}


@pytest.mark.parametrize(
    ("separator", "prompt", "expected"),  # the prompt holds the space before the answer, or the model writes it
    [("", " ", ["Hello there</s>", "Hi</s>"]), (" ", "", [" Hello there</s>", " Hi</s>"])],
)
def test_the_white_space_of_the_prompt_is_not_the_models(separator, prompt, expected):
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% if not loop.last %}SEPARATOR{% endif %}{% else %}{{ SPACE + m.content + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}PROMPT{% endif %}"
    )
    source = source.replace("SEPARATOR", separator).replace("SPACE", repr(prompt)).replace("PROMPT", prompt)
    rendered = render_conversation(Template("toy", source).tokenizer, CONVERSATIONS["multi"])
    assert [rendered.text[start:end] for start, end in rendered.assistant_spans] == expected
