"""The README configuration and the loop of docs/torchrl.md run on a tiny checkpoint. Loops and test names in docs are right."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from code_blocks import all_blocks, run_example, save_checkpoint
from project import PROJECT
from torchrl_llm_kl import Diagnosis, PolicyLoss, diagnose
from torchrl_llm_kl.training import read_config, train
from toy_rollouts import make_tokenizer
from toy_tokenizer import build_bos_tokenizer


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("build", "family"), [(make_tokenizer, "qwen2"), (build_bos_tokenizer, "llama")], ids=["plain", "adds_bos"]
)
def test_the_loop_in_torchrls_own_env_runs(tmp_path: Path, capsys: Any, build: Callable[[], Any], family: str) -> None:
    torch.manual_seed(0)
    run_example(tmp_path, build(), family)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    (_, entropy, kl), (*_, moved) = ([float(x) for x in re.findall(r"[\d.]+(?:e[-+]\d+)?", line)] for line in lines)
    assert entropy > 1, "the first batch shows something"
    assert kl == 0, "policy and reference are the same checkpoint"
    assert 0 < moved < 1e-3


@pytest.mark.smoke
def test_the_tests_that_the_docs_name_exist() -> None:
    files = list((PROJECT / "tests").rglob("*.py"))
    known = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    known |= {name for path in files for name in (path.name, path.stem)}
    pages = [*(PROJECT / "docs").glob("*.md"), *PROJECT.glob("*.md"), *(PROJECT / ".ci").glob("*.py")]
    named = {(page.name, name) for page in pages for name in re.findall(r"\btest_\w+(?:\.py)?", page.read_text())}
    assert len(named) > 10
    gone = {each for each in named if not any(name.startswith(each[1]) for name in known)}
    assert gone == set()


def test_the_doctor_finds_no_older_weights_in_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampler and trainer are the same module. Only rows with sampled pad tokens differ, which torchrl's wrapper drops."""
    found: list[Diagnosis] = []
    forward = PolicyLoss.forward

    def look(self: PolicyLoss, data: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(diagnose(data, policy=self.actor_network, tokenizer=make_tokenizer()))
        return forward(self, data, *args, **kwargs)

    monkeypatch.setattr(PolicyLoss, "forward", look)
    for seed in range(3):
        torch.manual_seed(seed)
        run_example(tmp_path)
    differ = [each.measures["mismatch/rms"] > 0.002 for each in found]
    assert any(differ), "no pad token was sampled in 3,000 tokens"
    assert ["stale_weights" in {finding.cause for finding in each.findings} for each in found] == [False] * 6
    assert [[x.cause for x in each.faults] for each in found] == [["few_tokens"] * differs for differs in differ]


@pytest.mark.parametrize("page", ["README.md", "docs/train.md"])
def test_the_three_lines_of_yaml_train(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the prompt and the reward function of the page, and a tiny checkpoint in place of the hub's."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model")
    config = next(block.code for block in all_blocks("yaml") if block.page == page)
    assert len(config.splitlines()) == 3
    prompt = re.search(r"# (\{.*\}), \.\.\.", config).group(1)
    if page == "README.md":
        function = re.search(r"# (def .*)", config).group(1)
    else:
        function = next(block.code for block in all_blocks("python") if block.page == page)
    Path("config.yaml").write_text(config.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model")))
    Path("prompts.jsonl").write_text(f"{prompt}\n" * 12)
    Path("rewards.py").write_text(function)
    small = ["run.steps=1", "data.num_prompts=2", "data.group_size=2", "sampler.max_new_tokens=4", "run.out=out"]
    result = train(read_config("config.yaml", small))
    assert (result.outcome, result.step) == ("finished", 1)
    assert (tmp_path / "out" / "final").is_dir()


def test_the_readme_is_short_and_states_its_limits_first() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert text.index("**Status.**") < text.index("pip install") < text.index("```yaml") < text.index("```python")


def test_every_loop_clears_its_gradients() -> None:
    """Looks at every optimiser step in code blocks of the docs, tutorial scripts and docstrings."""
    found = {}
    docs = [*PROJECT.glob("docs/*.md"), *PROJECT.glob("docs/*.py"), *PROJECT.glob("torchrl_llm_kl/**/*.py")]
    for path in [PROJECT / "README.md", *docs]:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(r"(?:^ *(?:>>>|\.\.\.) .*\n)+", text, re.MULTILINE)
        found |= {f"{path.relative_to(PROJECT)}, block {i}": block for i, block in enumerate(blocks)}
    for path in PROJECT.glob("tutorials/**/*.py"):
        functions = re.split(r"\n(?=def |class )", path.read_text(encoding="utf-8"))
        found |= {f"{path.relative_to(PROJECT)}, function {i}": function for i, function in enumerate(functions)}
    checked = {name: code for name, code in found.items() if re.search(r"\boptim(?:i[sz]er)?\.step\(\)", code)}
    assert len({name.partition(",")[0] for name in checked}) >= 6, list(checked)
    for name, code in checked.items():
        steps = re.findall(r"\.step\(\)", re.sub(r"schedule.*\.step\(\)", "", code))
        assert len(re.findall(r"zero_grad\(", code)) == len(steps), name
