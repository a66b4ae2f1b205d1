"""Pytest plugin: every hub name that torchrl's tests load is a tiny random model with a byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from toy_models import tiny_model
from toy_tokenizer import build_tokenizer

#: Beside the 256 bytes: the special tokens of torchrl's chat template for Qwen.
_SPECIAL = ("<|im_start|>", "<|endoftext|>")
_SIZES = {"vocab_size": 260, "max_position_embeddings": 1024}


def _tokenizer(name: str, **_: Any) -> Any:
    return build_tokenizer(extra_special_tokens=_SPECIAL, name_or_path=name)


def _model(name: str, **_: Any) -> Any:
    return tiny_model("qwen2", **_SIZES)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: no test reaches a hub, and no model is larger than a megabyte."""
    import transformers

    config.addinivalue_line("markers", "timeout: set by torchrl's conftest; not enforced")
    transformers.AutoTokenizer.from_pretrained = staticmethod(_tokenizer)
    transformers.AutoModelForCausalLM.from_pretrained = staticmethod(_model)
    opt = transformers.OPTConfig
    sizes = tiny_model("opt", **_SIZES).config.to_diff_dict()
    transformers.OPTConfig = lambda **settings: opt(**{**sizes, **settings})  # OPTConfig() has 125M parameters


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    """Without vLLM, the tests that take nothing but a tokenizer from it run all the same."""
    if fixturedef.argname != "vllm_instance":
        return None
    result = (_model(""), _tokenizer(""))
    fixturedef.cached_result = (result, fixturedef.cache_key(request), None)
    return result
