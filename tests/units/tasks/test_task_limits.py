"""Answers of any text: transformers' parser gets none that would take it minutes."""

from __future__ import annotations

import time
from typing import Any

from torchrl_llm_kl.tasks._tools import Dialog


class Template:
    """A tokenizer whose ``response_template`` finds as many calls as an answer has brackets."""

    chat_template = "{{ messages }}"
    response_template = True

    def parse_response(self, text: str, prefix: str, tools: Any) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"name": "f", "arguments": {}}] * text.count("<")}


def dialog() -> Dialog:
    found = Dialog.__new__(Dialog)
    found.tools, found._parser, found.tokenizer = type("Tools", (), {"schemas": []})(), None, Template()
    return found


def test_the_tokenizers_parser_is_bounded() -> None:
    assert len(dialog().parse("", "<" * 10).calls) == 10
    (call,) = dialog().parse("", "<" * 1001).calls
    assert call.error == "an answer has at most 1000 calls"
    begin = time.process_time()
    (call,) = dialog().parse("", "<tool_call></tool_call>" * 50_000).calls
    assert "1,150,000 characters is too long" in call.error
    assert time.process_time() - begin < 1
