"""Code blocks of the documentation: the Python of each page runs; commands, options and configurations exist."""

import ast
import base64
import importlib
import re
import shlex
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensordict
import torch
import transformers
import typer
import yaml
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory

import torchrl_llm_kl
from code_blocks import PAGES, all_blocks, save_checkpoint
from fake_vllm import FakeVllm
from image_models import image_model, image_processor
from project import PROJECT
from torchrl_llm_kl import Advantage, RetrieveKL, Sampling, diagnostics, make_algorithm
from torchrl_llm_kl.advantages._registry import _REGISTRY as ADVANTAGES
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.cli._commands import app
from torchrl_llm_kl.estimators import _per_token
from torchrl_llm_kl.estimators._coefficients import _CONTROLLERS as CONTROLLERS
from torchrl_llm_kl.estimators._per_token import _REGISTRY as ESTIMATORS
from torchrl_llm_kl.losses._objective import _REGISTRY as OBJECTIVES
from toy_rollouts import collect, flat, make_env, make_model, make_policy, make_tokenizer


def prompts_of(questions: list[str]) -> TensorDict:
    chats = [[{"role": "user", "content": question}] for question in questions]
    size = [len(chats)]
    return TensorDict(history=ChatHistory(prompt=History.from_chats(chats), batch_size=size), batch_size=size)


class World:
    """A tiny policy, its reference and their samples. Each of ``PARTS`` is made when first asked for."""

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = PARTS[name](self)
        return value

    def new_model(self, seed: int) -> Any:
        model = make_model(self.tokenizer, seed=seed)
        model.generation_config.eos_token_id = self.tokenizer.eos_token_id
        return model

    def sample(self, *, pad_output: bool) -> Any:
        """Eight answers to each of two questions, with the sampler's log-probs and a reward."""
        torch.manual_seed(0)
        rows = _sampler(self, pad_output)(prompts_of(["Why?"] * 8 + ["How many eggs?"] * 8))
        rows["next"] = TensorDict(reward=torch.rand(16, 1), batch_size=[16])
        return rows

    def with_kl(self, rows: Any) -> Any:
        """Adds log-probs of policy and reference, and their KL."""
        return RetrieveKL(self.model, self.reference, add_to_reward=False)(rows)


def _sampler(world: World, pad_output: bool = False) -> TransformersWrapper:
    """A sampler of up to six tokens from the whole distribution."""
    policy = make_policy(world.model, world.tokenizer, pad_output=pad_output)
    policy.generate_kwargs |= Sampling().generate_kwargs(max_new_tokens=6)
    return policy


def _batch(world: World) -> Any:
    rows = Advantage("grpo", group_size=8)(world.with_kl(world.rollouts.clone()))
    return lazy_stack(list(rows.unbind(0)))


def _adapted(world: World) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(world.new_model(4), config)
    adapted.add_adapter("ref", config)
    return adapted


PARTS: dict[str, Callable[[World], Any]] = {
    "tokenizer": lambda world: make_tokenizer(),
    "model": lambda world: world.new_model(0),
    "reference": lambda world: world.new_model(1).requires_grad_(False),
    "sampler": _sampler,
    "optimizer": lambda world: torch.optim.AdamW(world.model.parameters(), lr=1e-4),
    "rollouts": lambda world: world.sample(pad_output=False),
    "batch": _batch,
    "grpo": lambda world: make_algorithm("grpo", world.model, reference=world.reference, group_size=8),
    "buffer": lambda world: ReplayBuffer(storage=LazyStackStorage(64), batch_size=8),
    "adapted": _adapted,
}

#: Page -> the parts of the world that its prose introduces, maybe under another name. All other pages make what they use.
PREAMBLES = {
    "README.md": "model reference tokenizer",
    "docs/algorithms.md": "actor=model reference optimizer",
    "docs/cli.md": "batch",
    "docs/debugging.md": "batch model reference tokenizer",
    "docs/doctor.md": "batch policy=model reference tokenizer buffer",
    "docs/elsewhere.md": "actor=model reference",
    "docs/inspector.md": "batch tokenizer model reference step_100=model",
    "benchmarks/KL_STUDY.md": "model reference batch",
    "docs/logging.md": "parts=grpo tokenizer",
    "docs/extend.md": "model reference batch",
    "docs/losses.md": "model reference share=batch grpo optimizer buffer",
    "docs/recipes.md": "reference teacher=reference model tokenizer",
    "docs/resuming.md": "model reference",
    "docs/scoring.md": "ref_model=reference policy=adapted buffer",
    "docs/torchrl.md": "policy=model reference",
    **dict.fromkeys(("docs/ray.md", "docs/routing.md"), ""),
}


def _one_rank() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def own(page: str, world: World) -> dict[str, Any]:
    """Names that only this page's prose introduces."""
    match page:
        case "README.md":
            torchrl_llm_kl.save_batch(world.batch, "rollouts.pt")
        case "docs/algorithms.md":
            return {"collector": [world.rollouts]}
        case "docs/doctor.md":
            return {"logger": SimpleNamespace(log=lambda measures: None)}
        case "docs/elsewhere.md":
            Path("grpo.yaml").write_text("algorithm:\n  algorithm_type: grpo\n  repeat_times: 8\n", encoding="utf-8")
        case "docs/inspector.md":
            return {"step_200": world.new_model(2)}
        case "docs/logging.md":
            coefficient = torchrl_llm_kl.FixedKLCoefficient(0.1)
            return {"collector": [world.batch], "loss": world.grpo.loss, "advance": print, "coefficient": coefficient}
        case "docs/losses.md":
            _one_rank()
            batch = world.batch.clone()
            for row in batch.unbind(0):
                row["next", "sampler_log_probs"] = row["log_probs"]
            labelled = [batch.clone().set("chosen", torch.arange(16) % 3 == 0) for _ in range(2)]
            return {"batch": batch, "other_model": world.new_model(3), "batches": labelled}
        case "docs/ray.md":
            import ray

            # The GPUs are pretended: a model without CUDA stays on the CPU.
            ray.init(num_cpus=8, num_gpus=4, include_dashboard=False)
            return {"env": make_env(world.tokenizer)}
        case "docs/recipes.md":
            policy = make_policy(world.model, world.tokenizer, pad_output=False)
            kl = RetrieveKL(world.model, world.reference, add_to_reward=False)
            given = {"data": flat(collect(world.tokenizer, policy, kl, envs=4)), "env": make_env(world.tokenizer)}
            return {**given, "padded": False, "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5])}
        case "docs/routing.md":
            experts = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 6
            request = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=experts)])  # what an engine returns
            answer = {"meta_info": {"routed_experts": base64.b64encode(experts.astype(np.int32).tobytes()).decode()}}
            return {"outputs": [request], "data": TensorDict(batch_size=[1]), "answer": answer, "layers": 3, "k": 2}
        case "docs/torchrl.md":
            from torchrl.trainers import MixedPrecisionOptimizationStepper

            return {"torch": torch, "MixedPrecisionOptimizationStepper": MixedPrecisionOptimizationStepper}
    return {}


def given(page: str) -> dict[str, Any]:
    """The names that a page's code uses without defining them."""
    world = World()
    parts = {name: part or name for name, _, part in (x.partition("=") for x in PREAMBLES.get(page, "").split())}
    return {**{name: getattr(world, part) for name, part in parts.items()}, **own(page, world)}


#: Why a block is not run -> how many such blocks there are.
NOT_RUN = {
    ("docs/distributed.md", "needs DeepSpeed"): 1,
    ("docs/distributed.md", "needs a Ray cluster with GPUs"): 1,
    ("docs/multi_turn.md", "needs a server of MCP"): 1,
    ("docs/ray.md", "needs eight GPUs"): 1,
    ("docs/ray.md", "needs a server of vLLM"): 1,
    ("docs/start.md", "needs the hub"): 1,
    ("docs/torchrl.md", "tests/units/in_torchrl composes it"): 1,
    ("docs/torchrl.md", "tests/ray and tests/runs run it in actors or processes"): 3,
    ("docs/routing.md", "needs a server of vLLM"): 1,
    ("docs/sampling.md", "needs a server of vLLM"): 1,
    ("docs/vllm.md", "needs vLLM and a GPU"): 1,
}
LANGUAGES = {"", "python", "bash", "console", "text", "yaml", "json", "diff", "toml"}

PYTHON = all_blocks("python")
WITH_PYTHON = sorted({block.page for block in PYTHON})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, which replaces every checkpoint of the hub."""
    save_checkpoint(folder := tmp_path_factory.mktemp("checkpoint"))
    return folder


#: A page may register its own function.
REGISTRIES = (OBJECTIVES, ADVANTAGES, ALGORITHMS, ESTIMATORS, CONTROLLERS)


@pytest.fixture
def surroundings(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, the tiny checkpoint for every name of the hub; settings are restored afterwards."""
    monkeypatch.chdir(tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):

        def load(name: Any, *args: Any, _original: Any = loader.from_pretrained, **kwargs: Any) -> Any:
            return _original(checkpoint if str(name).startswith("Qwen/") else name, *args, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", load)
    monkeypatch.setattr(
        transformers.AutoModelForImageTextToText, "from_pretrained", lambda name: image_model("qwen2_5_vl")
    )
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: image_processor("qwen2_5_vl"))
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "data", dict(registry))
    monkeypatch.setattr(_per_token, "_CONTRACTS", dict(_per_token._CONTRACTS))
    with tensordict.set_list_to_stack(True), torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        ray.shutdown()


#: A reader must import these, so the namespace starts without them.
LAYERS = (torchrl_llm_kl, torchrl_llm_kl.losses, torchrl_llm_kl.estimators, torchrl_llm_kl.scoring)
PUBLIC = {name for layer in LAYERS for name in layer.__all__} - {"grpo"}


def run_page(page: str) -> dict[str, Any]:
    """Run all blocks in order, in one namespace, and return it."""
    names = {"__name__": "page", **given(page)}
    assert set(names) & PUBLIC == set()
    for block in PYTHON:
        if block.page == page and block.reason is None:
            exec(compile("\n" * (block.line - 1) + block.code, str(PROJECT / page), "exec"), names)
    return names


#: Pages that start Ray are slow.
PARAMETERS = [pytest.param(page, marks=pytest.mark.slow if page == "docs/ray.md" else ()) for page in WITH_PYTHON]


@pytest.mark.parametrize("page", PARAMETERS)
def test_the_python_of_a_page_runs(
    page: str, surroundings: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "docs/vllm.md":
        monkeypatch.setattr(urllib.request, "urlopen", FakeVllm(checkpoint))
    if page == "docs/distributed.md":  # as torchrun sets them for one rank
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
    names = run_page(page)
    if page == "docs/data.md":
        assert names["pairs"].batch_size == (8, 2)
        assert len(names["answers"]) == len(names["buffer"]) == 8
    if page == "docs/start.md":
        assert names["batch"]["next", "reward"].mean() > 0.8, "the policy has learned to answer in digits"
    if page == "docs/off_policy.md":
        assert names["reward"] > 0.3, "the policy has learned to answer in digits"
    if page == "docs/vllm.md":
        assert names["out"]["mismatch_k3"] < 1e-6, "the server samples with the trainer's weights"
    if page == "docs/distillation.md":
        assert 0.6 < float(names["out"]["captured_mass"]) < 1
    if page in ("docs/contexts.md", "docs/multi_turn.md", "docs/own_task.md"):
        # Transforms score, since a wrapper would keep the logits of the whole vocabulary.
        assert not names["policy"].return_log_probs


def test_pages_diagnose_before_the_first_step(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step the doctor would report that the sampler has older weights."""
    pages = {page: "\n".join(block.code for block in PYTHON if block.page == page) for page in WITH_PYTHON}
    both = [page for page, code in pages.items() if "diagnose(" in code and ".step()" in code]
    assert both == ["docs/start.md"]
    events = Mock()
    for owner, name in ((diagnostics, "diagnose"), (torch.optim.AdamW, "step")):
        seen = Mock(side_effect=getattr(owner, name))
        events.attach_mock(seen, name)
        monkeypatch.setattr(owner, name, lambda *args, _seen=seen, **kwargs: _seen(*args, **kwargs))
    run_page("docs/start.md")
    assert [name for name, *_ in events.mock_calls] == ["diagnose", *["step"] * 25]


def test_few_blocks_are_not_run() -> None:
    assert Counter((block.page, block.reason) for block in all_blocks(*LANGUAGES) if block.reason) == NOT_RUN
    assert set(PREAMBLES) <= set(WITH_PYTHON)
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^```([\w.]*)", text, re.MULTILINE)) <= LANGUAGES


def test_blocks_that_are_not_run_import_what_exists() -> None:
    for block in [block for block in PYTHON if block.reason]:
        for node in ast.walk(ast.parse(block.code, block.page)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("torchrl", "torchrl_llm_kl"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), f"{block.page}:{block.line}"


_PROGRAMS = ("make", "torchrl-llm-kl", "python", "pip", "torchrun")
#: Options that typer adds to every program.
_OF_TYPER = {"--help", "--install-completion", "--show-completion"}


def test_every_command_exists() -> None:
    """Checks calls of our programs in shell blocks and in the text; CHANGELOG may name removed ones."""
    blocks = all_blocks("", "bash", "console")
    lines = [(f"{block.page}:{block.line + i}", x) for block in blocks for i, x in enumerate(block.code.splitlines())]
    found = [(where, line.removeprefix("$ ").strip()) for where, line in lines]
    found = [(where, text) for where, text in found if text.split(" ")[0] in _PROGRAMS]
    for page in [page for page in PAGES if page.name != "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        inline = re.findall(r"`((?:make|torchrl-llm-kl|python) [^`\n]+)`", text)
        found += [(str(page.relative_to(PROJECT)), words) for words in inline]
    assert {command.split(" ")[0] for _, command in found} == set(_PROGRAMS)
    assert [f"{where}: {command}: {fault}" for where, command in found if (fault := wrong_in(command))] == []


def wrong_in(command: str) -> set[str]:
    """The parts of a command that do not exist."""
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
    """Commands and options that the command line does not have."""
    program = typer.main.get_command(app)
    called = next((word for word in words if not word.startswith("-") and word != "COMMAND"), None)
    if called and called not in program.commands:
        return {called}
    parameters = [*program.params, *(program.commands[called].params if called else ())]
    known = _OF_TYPER | {name for parameter in parameters for name in parameter.opts}
    if called == "demo":  # passes its options on to train
        known |= {name for parameter in program.commands["train"].params for name in parameter.opts}
    return {word for word in words if word.startswith("--") and word.split("=")[0] not in known}


def test_configurations_parse() -> None:
    for block in all_blocks("yaml"):
        assert isinstance(yaml.safe_load(block.code), dict), f"{block.page}:{block.line}"
