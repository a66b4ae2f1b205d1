"""Run torchrl's own tests of its LLM transforms against this package's.

This module is a plugin of that run. It replaces every model of the hub by a tiny random model with a byte-level tokenizer.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from toy_models import tiny_model
from toy_tokenizer import build_tokenizer

HERE = Path(__file__).resolve().parent
SELECTED = ("llm/test_wrapper.py::TestKLTransforms", "llm/test_llm_objectives.py")
_IMPORT = "from torchrl.envs.llm.transforms.kl import"


def copy_with_swapped_import(checkout: Path, folder: Path) -> None:
    """Copy the tests and their conftests into ``folder``, with the transforms imported from this package."""
    (folder / "llm").mkdir()
    for name in ("conftest.py", "llm/conftest.py", "llm/test_wrapper.py", "llm/test_llm_objectives.py"):
        text = (checkout / "test" / name).read_text()
        if "test_" in name and _IMPORT not in text:
            raise ValueError(f"{name} imports no transform of torchrl.envs.llm.transforms.kl: is this torchrl 0.14?")
        (folder / name).write_text(text.replace(_IMPORT, "from torchrl_llm_kl import"))


def run(checkout: Path) -> dict[str, tuple[str, str]]:
    """Return each test's id (``Class.test[parameters]``), outcome (passed, failed, skipped) and last line of error.

    ``checkout`` is a folder with torchrl's repository (its ``test/llm``) at the installed version. The tests are copied, and
    only their import of the transforms is changed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_with_swapped_import(checkout, folder)
        report = folder / "report.xml"
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_run", "-p", "no:cacheprovider"]
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, f"--junitxml={report}", *SELECTED],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if not report.is_file():
            raise RuntimeError(f"torchrl's tests did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return dict(_outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return name, (outcome, (found.get("message") or "").strip().partition("\n")[0])
    return name, ("passed", "")


#: Beside the 256 bytes: the special tokens of torchrl's chat template for Qwen.
_SPECIAL = ("<|im_start|>", "<|endoftext|>")
_SIZES = {"vocab_size": 260, "max_position_embeddings": 1024}


def _tokenizer(name: str, **_: Any) -> Any:
    return build_tokenizer(extra_special_tokens=_SPECIAL, name_or_path=name)


def _model(name: str, **_: Any) -> Any:
    return tiny_model("qwen2", **_SIZES)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported, replace the loaders, so that no test reaches a hub or builds a large model."""
    import transformers

    config.addinivalue_line("markers", "timeout: set by torchrl's conftest; not enforced")
    transformers.AutoTokenizer.from_pretrained = staticmethod(_tokenizer)
    transformers.AutoModelForCausalLM.from_pretrained = staticmethod(_model)
    opt = transformers.OPTConfig
    sizes = tiny_model("opt", **_SIZES).config.to_diff_dict()
    transformers.OPTConfig = lambda **settings: opt(**{**sizes, **settings})  # OPTConfig() has 125M parameters


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    """Without vLLM, still run the tests that only take a tokenizer from it."""
    if fixturedef.argname != "vllm_instance":
        return None
    result = (_model(""), _tokenizer(""))
    fixturedef.cached_result = (result, fixturedef.cache_key(request), None)
    return result
