"""``templates``: the rendered text with what is masked in, in brackets or in colour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_files import Cli, error_of
from toy_tokenizer import build_tokenizer

MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def saved(folder: Path, template: str | None, **special: Any) -> Path:
    build_tokenizer(template, ("<user>", "<assistant>", "<system>"), **special).save_pretrained(folder)
    return folder


def test_brackets_without_colour_and_colour_without_brackets(cli: Cli, model: str) -> None:
    lines = cli("templates", model).stdout.splitlines()
    # 18: twice "It is 4." and the end-of-turn token
    assert lines[0] == f"{model}: 5 messages, 116 tokens, 18 masked in"
    assert lines[1] == "turns found by: the template's loop over the messages"
    assert "[[It is 4.<|im_end|>]]" in lines
    assert "[[It is 8.<|im_end|>]]" in lines
    assert sum("[[" in line for line in lines) == 2
    assert "turn 1: 9 tokens, the last is '<|im_end|>' (id 256)" in lines
    assert lines[-1] == "The end-of-turn token is masked in, as the model must emit it."
    text = cli("templates", model, env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}).stdout
    assert "\x1b[1;32mIt is 4.<|im_end|>\x1b[0m" in text
    assert "[[" not in text
    plain = cli("templates", model, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    assert "[[It is 4.<|im_end|>]]" in plain


def test_generation_blocks_are_named(cli: Cli, tmp_path: Path) -> None:
    found = json.loads(cli("templates", saved(tmp_path, MARKED, eos_token="<end>"), "--json").stdout)
    assert found["located_by"] == "marks"
    assert [found["text"][slice(*turn["characters"])] for turn in found["turns"]] == ["It is 4.<end>", "It is 8.<end>"]
    assert [turn["last_token"] for turn in found["turns"]] == ["<end>", "<end>"]
    assert found["num_masked_in"] == sum(turn["num_tokens"] for turn in found["turns"]) == 18


def test_a_template_without_end_of_turn_and_system_role(cli: Cli, tmp_path: Path) -> None:
    lines = cli("templates", saved(tmp_path, NO_SYSTEM)).stdout.splitlines()
    assert lines[2] == "without the system message, which the template refuses: no system role"
    assert "<user>What is 2 + 2?<assistant>[[It is 4.]]<user>And twice that?<assistant>[[It is 8.]]" in lines
    assert "2 of 2 turns end in no special token" in lines[-1]


def test_a_conversation_of_one_s_own(cli: Cli, tmp_path: Path, model: str) -> None:
    """A list, an object, or the first line of several; what is wrong with one, or with the tokenizer, is said."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    path, whole = tmp_path / "chat.json", json.dumps({"messages": messages})
    for text in (json.dumps(messages), whole, f"{whole}\n{{}}"):
        path.write_text(text)
        assert "[[bc<|im_end|>]]" in cli("templates", model, "--conversation", path).stdout
    for content, text in (
        (b"nonsense", "is not JSON"),
        (b"", "is not JSON"),
        (b"{}", "no messages"),
        (b"[]", "no messages"),
        (b'[{"role": "user", "content": "\xe9"}]', "is not UTF-8"),
        (b'[{"role": "user"}]', "refuses this conversation"),
    ):
        path.write_bytes(content)
        assert text in error_of(cli("templates", model, "--conversation", path, code=2))
    assert "cannot read" in error_of(cli("templates", model, "--conversation", tmp_path / "none.json", code=2))
    assert "chat template" in error_of(cli("templates", saved(tmp_path, None), code=2))
    assert "there is no folder" in error_of(cli("templates", tmp_path / "none", code=2))


def test_escape_sequences_of_a_conversation_do_not_reach_the_terminal(cli: Cli, tmp_path: Path, model: str) -> None:
    messages = [{"role": "user", "content": "\x1b[2J"}, {"role": "assistant", "content": "a\u202eb"}]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    for env in ({}, {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}):
        text = cli("templates", model, "--conversation", tmp_path / "chat.json", env=env).stdout
        assert "\\u{1b}[2J" in text
        assert "a\\u{202e}b" in text
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
