"""Every code block of the documentation: Python runs, page by page; commands, options and configurations exist."""

import ast
import importlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
import transformers
import typer
import yaml

import torchrl_llm_kl
from code_blocks import PAGES, all_blocks, save_checkpoint
from preambles import PREAMBLES, given
from project import PROJECT
from torchrl_llm_kl import diagnostics
from torchrl_llm_kl.cli._commands import app

#: Blocks that are not run, for reasons that hold on any machine without these, and how many there are.
NOT_RUN = {
    ("docs/distributed.md", "needs DeepSpeed"): 1,
    ("docs/ray.md", "needs eight GPUs"): 1,
    ("docs/ray.md", "needs a server of vLLM"): 1,
    ("docs/torchrl.md", "tests/units/configs composes it"): 1,
    ("docs/torchrl.md", "tests/ray and tests/runs run it in actors or processes"): 3,
    ("docs/routing.md", "needs a server of vLLM"): 1,
    ("docs/sampling.md", "needs a server of vLLM"): 1,
    ("docs/vllm.md", "needs a server of vLLM"): 2,
    ("docs/vllm.md", "needs vLLM and a GPU"): 2,
}
LANGUAGES = {"", "python", "bash", "console", "text", "yaml", "json", "diff", "toml"}

PYTHON = all_blocks("python")
WITH_PYTHON = sorted({block.page for block in PYTHON})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, which stands for any checkpoint of the hub."""
    save_checkpoint(folder := tmp_path_factory.mktemp("checkpoint"))
    return folder


@pytest.fixture
def surroundings(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the hub's names as the tiny checkpoint, and settings put back afterwards."""
    monkeypatch.chdir(tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):

        def load(name: Any, *args: Any, _original: Any = loader.from_pretrained, **kwargs: Any) -> Any:
            return _original(checkpoint if str(name).startswith("Qwen/") else name, *args, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", load)
    with tensordict.set_list_to_stack(True), torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        ray.shutdown()


def public_names() -> set[str]:
    """What a reader must import, and no preamble gives."""
    layers = (importlib.import_module(f"torchrl_llm_kl.{layer}") for layer in ("losses", "estimators", "scoring"))
    return {*torchrl_llm_kl.__all__, *(name for layer in layers for name in layer.__all__)} - {"grpo"}


def run_page(page: str) -> dict[str, Any]:
    """All blocks in order, in one namespace: the namespace."""
    names = {"__name__": "page", **given(page)}
    assert set(names) & public_names() == set()
    for block in PYTHON:
        if block.page == page and block.reason is None:
            exec(compile("\n" * (block.line - 1) + block.code, str(PROJECT / page), "exec"), names)
    return names


#: Those that start Ray are slow.
PARAMETERS = [pytest.param(page, marks=pytest.mark.slow if page == "docs/ray.md" else ()) for page in WITH_PYTHON]


@pytest.mark.parametrize("page", PARAMETERS)
def test_the_python_of_a_page_runs(page: str, surroundings: None) -> None:
    names = run_page(page)
    if page == "docs/data.md":
        assert names["pairs"].batch_size == (8, 2)
        assert len(names["answers"]) == len(names["buffer"]) == 8
    if page == "docs/distillation.md":
        assert 0.6 < float(names["out"]["captured_mass"]) < 1


def test_the_doctor_looks_before_the_first_step(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every page that trains and diagnoses with the policy: afterwards the step looks like a sampler's older weights."""
    pages = {page: "\n".join(block.code for block in PYTHON if block.page == page) for page in WITH_PYTHON}
    both = [page for page, code in pages.items() if "diagnose(" in code and ".step()" in code]
    assert both == ["docs/start.md"]
    events: list[str] = []
    step = torch.optim.AdamW.step
    for owner, name, original in ((diagnostics, "diagnose", diagnostics.diagnose), (torch.optim.AdamW, "step", step)):

        def seen(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            events.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, name, seen)
    run_page("docs/start.md")
    assert events == ["diagnose", "step", "step"]


def test_few_blocks_are_not_run() -> None:
    assert Counter((block.page, block.reason) for block in all_blocks(*LANGUAGES) if block.reason) == NOT_RUN
    assert set(PREAMBLES) <= set(WITH_PYTHON)
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^```([\w.]*)", text, re.MULTILINE)) <= LANGUAGES


def test_blocks_that_are_not_run_import_what_exists() -> None:
    for block in [block for block in PYTHON if block.reason]:
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("torchrl", "torchrl_llm_kl"):
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{block.page}:{block.line}"


_PROGRAMS = ("make", "torchrl-llm-kl", "python", "pip", "torchrun")
#: Options that typer adds to every program.
_OF_TYPER = {"--help", "--install-completion", "--show-completion"}


def commands() -> list[tuple[str, str]]:
    """Where and what: lines of shell blocks, and code in the text, that call a program of ours."""
    blocks = all_blocks("", "bash", "console")
    lines = [(f"{block.page}:{block.line + i}", x) for block in blocks for i, x in enumerate(block.code.splitlines())]
    found = [(where, line.removeprefix("$ ").strip()) for where, line in lines]
    found = [(where, text) for where, text in found if text.split(" ")[0] in _PROGRAMS]
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        inline = re.findall(r"`((?:make|torchrl-llm-kl|python) [^`\n]+)`", text)
        found += [(str(page.relative_to(PROJECT)), words) for words in inline]
    return found


def test_every_command_exists() -> None:
    found = commands()
    assert {command.split(" ")[0] for _, command in found} == set(_PROGRAMS)
    assert [f"{where}: {command}: {fault}" for where, command in found if (fault := wrong_in(command))] == []


def wrong_in(command: str) -> set[str]:
    """What a command names that is not there."""
    program, *words = shlex.split(command, comments=True)
    words = [word for word in words if word not in ("...", "|")]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        return {word for word in words if re.fullmatch("[a-z-]+", word)} - set(targets)
    if program == "torchrl-llm-kl":
        return wrong_words(words)
    if program == "python" and words[:2] == ["-m", "torchrl_llm_kl"]:
        return wrong_words(words[2:])
    if program == "python" and words[0] == "-m":
        module = PROJECT.joinpath(*words[1].split("."))  # tests/benchmarks would hide benchmarks from importlib
        return set() if module.with_suffix(".py").exists() or (module / "__main__.py").exists() else {words[1]}
    if program in ("python", "torchrun"):
        return {word for word in words if word.endswith(".py") and not (PROJECT / word).is_file()}
    section = (PROJECT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = {extra for word in words for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")}
    return extras - set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def wrong_words(words: list[str]) -> set[str]:
    """The commands and options that the command line has not."""
    program = typer.main.get_command(app)
    called = next((word for word in words if not word.startswith("-") and word != "COMMAND"), None)
    if called and called not in program.commands:  # type: ignore[attr-defined]
        return {called}
    parameters = [*program.params, *(program.commands[called].params if called else ())]  # type: ignore[attr-defined]
    known = _OF_TYPER | {name for parameter in parameters for name in parameter.opts}
    if called == "demo":  # passes its words on to train
        known |= {name for parameter in program.commands["train"].params for name in parameter.opts}  # type: ignore[attr-defined]
    return {word for word in words if word.startswith("--") and word.split("=")[0] not in known}


def test_configurations_parse() -> None:
    for block in all_blocks("yaml"):
        assert isinstance(yaml.safe_load(block.code), dict), f"{block.page}:{block.line}"
