"""The README's example runs as it stands, with a tiny checkpoint in place of the hub's; the loops of all docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from torch.testing import assert_close

from project import PROJECT
from torchrl_llm_kl import Diagnosis, PolicyLoss, diagnose
from toy_rollouts import make_model, make_tokenizer

README = PROJECT / "README.md"


def run_example(folder: Path, **changes: str) -> None:
    """Run the example on a tiny checkpoint in ``folder``, with some of its text changed: text -> new text."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.strip().splitlines()) <= 20, "the README promises a short example"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for old, new in {'"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(folder)), **changes}.items():
        assert old in example
        example = example.replace(old, new)
    before = tensordict.list_to_stack()
    try:
        exec(compile(example, "README.md", "exec"), {})
    finally:
        tensordict.set_list_to_stack(before).set()


def test_the_example_runs(tmp_path: Path, capsys: Any) -> None:
    run_example(tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("KL")]
    kl, clipped, tokens = (float(x) for x in re.findall(r"tensor\((.*?)\)", line))
    assert kl == 0.0, "policy and reference are the same checkpoint"
    assert clipped == 0.0, "nothing has moved since the answers were sampled"
    assert 8 <= tokens <= 8 * 64


def test_the_doctor_finds_no_older_weights_in_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampler and trainer are one module. torchrl's wrapper leaves sampled pad tokens out, so what follows one differs."""
    found: list[Diagnosis] = []
    forward = PolicyLoss.forward

    def look(self: PolicyLoss, data: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(diagnose(data, policy=self.actor_network, tokenizer=make_tokenizer()))
        return forward(self, data, *args, **kwargs)

    monkeypatch.setattr(PolicyLoss, "forward", look)
    for seed in range(3):
        torch.manual_seed(seed)
        run_example(tmp_path)
    assert len(found) == 3
    differ = [each for each in found if each.measures["mismatch/rms"] > 0.002]
    assert differ, "no pad token was sampled in 1,500 tokens"
    for each in found:
        assert "stale_weights" not in {finding.cause for finding in each.findings}, each
        assert [finding.cause for finding in each.faults] == (["few_tokens"] if each in differ else []), each


@pytest.mark.parametrize("forgotten", [False, True])
def test_gradients_of_the_examples_steps_do_not_add_up(
    forgotten: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step the gradient is that of the step's batch alone; without ``zero_grad`` it is not."""
    last: dict[str, Any] = {}
    forward, step = PolicyLoss.forward, torch.optim.AdamW.step
    errors = []

    def remember(self: PolicyLoss, *args: Any, **kwargs: Any) -> Any:
        last.update(loss=self, data=args[0].clone())
        return forward(self, *args, **kwargs)

    def compare(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        loss, parameters = last["loss"], [p for group in self.param_groups for p in group["params"]]
        own = torch.autograd.grad(forward(loss, last["data"]).total_loss, parameters)
        assert max(float(g.abs().max()) for g in own) > 1e-4
        errors.append(max(float((p.grad - g).abs().max()) for p, g in zip(parameters, own, strict=True)))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(PolicyLoss, "forward", remember)
    monkeypatch.setattr(torch.optim.AdamW, "step", compare)
    torch.manual_seed(0)
    changes = {"total_dialog_turns=8": "total_dialog_turns=24", "max_new_tokens=64": "max_new_tokens=6"}
    # Random rewards, so that no step is without gradient.
    changes["grpo.prepare(batch.reshape(-1))"] = "grpo.prepare(noisy(batch.reshape(-1)))"
    changes["tensordict.set_list_to_stack"] = "from test_readme import noisy; tensordict.set_list_to_stack"
    if forgotten:
        changes["optimizer.step(), optimizer.zero_grad()"] = "optimizer.step()"
    run_example(tmp_path, **changes)
    assert len(errors) == 3
    assert_close(errors[0], 0.0, atol=1e-6, rtol=0)
    assert all((error > 1e-4) == forgotten for error in errors[1:]), errors


def noisy(batch: Any) -> Any:
    """Random token rewards, so that no group has equal ones."""
    for row in batch.unbind(0):
        reward = row["next", "reward"]
        row["next", "reward"] = reward + torch.rand(reward.shape)
    return batch


def loops() -> list[Any]:
    """Every example with an optimiser step: code blocks of the docs, scripts of the tutorials, docstrings."""
    found = []
    for path in [
        README,
        *PROJECT.glob("docs/*.md"),
        *PROJECT.glob("docs/*.py"),
        *PROJECT.glob("torchrl_llm_kl/**/*.py"),
    ]:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(r"(?:^ *(?:>>>|\.\.\.) .*\n)+", text, re.MULTILINE)
        found += [pytest.param(block, id=f"{path.stem}-{i}") for i, block in enumerate(blocks)]
    for path in PROJECT.glob("tutorials/**/*.py"):
        functions = re.split(r"\n(?=def |class )", path.read_text(encoding="utf-8"))
        found += [pytest.param(function, id=f"{path.stem}-{i}") for i, function in enumerate(functions)]
    return [x for x in found if re.search(r"optimi[sz]er\.step\(\)|\boptim\.step\(\)", x.values[0])]


def test_there_are_loops_to_check() -> None:
    assert len({loop.id.rsplit("-", 1)[0] for loop in loops()}) >= 6, [loop.id for loop in loops()]


@pytest.mark.parametrize("code", loops())
def test_every_loop_clears_its_gradients(code: str) -> None:
    assert len(re.findall(r"zero_grad\(", code)) == len(
        re.findall(r"\.step\(\)", re.sub(r"schedule.*\.step\(\)", "", code))
    )
