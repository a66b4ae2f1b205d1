"""The page on data: its code runs, and its tables name what there is."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args

import pytest
import tensordict
import transformers

from project import PROJECT
from torchrl_llm_kl.datasets import Encoder, Skip
from toy_rollouts import make_model, make_tokenizer

PAGE = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in one namespace, on a tiny model."""
    tokenizer = make_tokenizer()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda name: make_model(tokenizer, seed=0)
    )
    names: dict[str, Any] = {}
    with tensordict.set_list_to_stack(True):
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(code, names)
    assert names["pairs"].batch_size == (8, 2)
    assert len(names["answers"]) == 8
    assert len(names["buffer"]) == 8


def test_all_arguments_and_reasons_are_named() -> None:
    fields = {field.name for field in dataclasses.fields(Encoder)} - {"layout", "tokenizer"}
    assert [name for name in sorted(fields) if f"`{name}" not in PAGE] == []
    reasons = get_args(eval(Skip.__annotations__["reason"], vars(__import__(Skip.__module__, fromlist=["x"]))))
    assert len(reasons) == 6
    assert [reason for reason in reasons if f"`{reason}`" not in PAGE] == []
