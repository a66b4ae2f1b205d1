"""Commands in this process. tests/runs/test_interpreters.py starts them in processes of their own."""

import importlib.util
import io
import json
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from tensordict import TensorDict, TensorDictBase, lazy_stack
from typer.testing import CliRunner

from cli_files import FULL, Cli, Mischief, batch, error_of, save
from project import PROJECT
from template_pairs import assistant, user
from torchrl_llm_kl import __version__, diagnostics, save_batch
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.cli import _commands, _console, _tables, main
from torchrl_llm_kl.cli._commands import app
from torchrl_llm_kl.cli._console import cells_of
from torchrl_llm_kl.diagnostics import Finding
from torchrl_llm_kl.estimators import contracts
from torchrl_llm_kl.scoring import Sampling
from torchrl_llm_kl.training import progress
from toy_tokenizer import build_tokenizer

COMMANDS = (
    "algorithms",
    "estimators",
    "version",
    "score",
    "check",
    "check-loss",
    "inspect",
    "train",
    "serve",
    "templates",
    "demo",
)


def raising(error: BaseException) -> Any:
    def show(*_: Any) -> None:
        raise error

    return show


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (_console.CommandError("no such\n thing: make one."), 2, "no such thing: make one."),
        (ValueError("found 1, expected 2."), 2, "found 1, expected 2."),
        (KeyError("no entry 'x'."), 2, "no entry 'x'."),
        (OSError(28, "No space left on device"), 2, "[Errno 28] No space left on device"),
        (AttributeError("no attribute"), 3, "AttributeError: no attribute (unexpected, "),
        (ValueError(), 3, "ValueError: no message (unexpected, "),
        (KeyboardInterrupt(), 130, "interrupted."),
        (typer.Exit(7), 7, None),
    ],
)
def test_exit_codes(cli, monkeypatch, error, code, text):
    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", raising(error))
    result = cli("version", code=code)
    assert text in error_of(result) if text else not result.stderr


def test_warnings_and_usage_errors_are_one_line(cli, monkeypatch, capsys):
    show = "torchrl_llm_kl.cli._tables.show_version"
    with monkeypatch.context() as patch:
        patch.setattr(show, lambda *_: warnings.warn("take\ncare", stacklevel=1))
        assert cli("version").stderr == "torchrl-llm-kl: warning: take care\n"
        patch.setattr(show, raising(ValueError("wrong")))
        for words, env in ((["--debug", "version"], {}), (["version"], {"TORCHRL_LLM_KL_DEBUG": "1"})):
            assert isinstance(CliRunner().invoke(app, words, env=env).exception, ValueError)
    assert error_of(cli(code=2)) == "name a command. torchrl-llm-kl --help lists them."
    assert "'scor'" in error_of(cli("scor", code=2))
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"torchrl-llm-kl {__version__}\n"
    assert main(["algorithms", "grpoo"]) == 2
    assert "Did you mean 'grpo'?" in capsys.readouterr().err
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else own(name))
    assert main(["version"]) == 2
    said = "torchrl-llm-kl: the command line needs typer: run pip install '.[cli]' in the checkout of torchrl-llm-kl.\n"
    assert capsys.readouterr().err == said


def test_help_and_page_name_commands_and_options_that_exist(cli: Cli) -> None:
    whole = cli("--help", env={"COLUMNS": "300"}).stdout
    text = " ".join(whole.split())
    assert all(f" {name} " in text for name in COMMANDS)
    assert "0 success, 1 a check found something" in text
    assert "--install-completion" in text
    page = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    helps = {name: cli(name, "--help", env={"COLUMNS": "300"}).stdout for name in COMMANDS}
    assert all("Usage: torchrl-llm-kl" in text for text in helps.values())
    options = {name: set(re.findall(r"--[a-z][\w-]*", text)) for name, text in {**helps, "": whole}.items()}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page)) <= set().union(*options.values())
    assert all(f"`{name} " in page or f"`{name}`" in page for name in COMMANDS)
    documented = page[page.index("## score") : page.index("## check")]
    of_score = options["score"] - {"--help", "--json"}
    assert {option for option in of_score if option not in documented} == set()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_tables_and_numbers_in_a_pipe_and_on_a_terminal(monkeypatch, capsys):
    """In a pipe, lines are never cut. Numbers that are not finite become null."""
    _console.print_table(["name", "number"], [["a", "1"], ["b" * 300, "23"]], right=1)
    lines = ["name" + " " * 296 + "  number", "a" + " " * 299 + "       1", "b" * 300 + "      23"]
    assert capsys.readouterr().out.splitlines() == lines
    _console.print_json({"a": [float("nan"), float("inf"), 1.5], "b": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": "x"}
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    _console.print_table(["name", "text"], [["a", "word " * 30]])
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("word") == 30


def test_colours_and_progress_follow_the_stream(monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not _console.shows_colour()
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert _console.shows_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _console.shows_colour()
    clock, said = [0.0], []
    monkeypatch.setattr("torchrl_llm_kl.training._report.time.monotonic", lambda: clock[0])
    with progress("score", 2000, done=1, stream=sys.stderr) as advance:
        for seconds in (2.0, 9.9, 10.1, 19.0, 20.2):
            clock[0] = seconds
            advance(f"at {seconds}", 300)
            said.append(capsys.readouterr().err)
    lines = "score: 901 of 2,000, 10 s  at 10.1\n", "score: 1,501 of 2,000, 20 s  at 20.2\n"
    assert said == ["", "", lines[0], "", lines[1]]
    out = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    with progress("score", 20, stream=out) as advance:
        advance("5 [b]tokens scored", 20)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert all(part in text for part in ("20/20", "5 [b]tokens scored"))
    before = len(out.getvalue())
    with progress("score", 20, shown=False, stream=out) as advance:
        advance("5 tokens scored", 20)
    assert len(out.getvalue()) == before


def test_the_demo_passes_changes_to_train(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a checkout, the error says where the demo is."""
    seen: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(words)
        return subprocess.CompletedProcess(words, 130)

    monkeypatch.setattr(_commands.subprocess, "run", run)
    cli("demo", "algorithm.name=dapo", "--dry-run", code=130)
    assert Path(seen[0][1]).resolve() == PROJECT / "tutorials" / "countdown_demo.py"
    assert seen[0][2:] == ["algorithm.name=dapo", "--dry-run"]
    monkeypatch.setattr(_commands, "__file__", str(tmp_path / "torchrl_llm_kl" / "cli" / "_commands.py"))
    monkeypatch.chdir(tmp_path)
    assert "in a checkout of the project's sources" in error_of(cli("demo", code=2))


def test_all_algorithms_are_listed_with_their_settings(cli: Cli) -> None:
    lines = cli("algorithms").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ALGORITHMS)
    models = {line.split()[0]: line.split("  ")[-1].strip() for line in lines[1:]}
    expected = {"ppo": "reference, critic", "dapo": "none", "grpo": "reference", "gkd": "teacher"}
    assert {name: models[name] for name in expected} == expected
    text, parts = cli("algorithms", "ppo").stdout, ("advantage.whiten", "Schulman et al. 2016 (arXiv 1506.02438)")
    assert all(part in text for part in (*parts, "reference, critic"))
    assert error_of(cli("algorithms", "grpoo", code=2)).partition(". ")[2].startswith("Did you mean 'grpo'? Known: ")
    for name, preset in ALGORITHMS.items():
        found = json.loads(cli("algorithms", name, "--json").stdout)
        settings = found["settings"]
        want = {field: getattr(preset, field) for field in ("objective", "kl_loss", "repeat_times")}
        for part in ("objective", "advantage"):
            want |= {f"{part}.{key}": value for key, value in getattr(preset, f"{part}_args").items()}
        assert {key: settings[key]["value"] for key in want} == want, name
        assert {field: settings[field]["source"] for field in preset.sources} == dict(preset.sources), name
        assert all(row["source"] for row in settings.values()), name
        assert ("critic" in found["needs"]["models besides the policy"]) == preset.use_critic, name
    settings = json.loads(cli("algorithms", "dapo", "--json").stdout)["settings"]
    assert (settings["objective.clip_low"]["value"], settings["objective.clip_high"]["value"]) == (0.2, 0.28)


def test_a_loss_is_checked(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def half(log_prob, ref_log_prob):\n    return (log_prob - ref_log_prob) / 2\n", encoding="utf-8")
    out = cli("check-loss", f"{file}:half", code=1).stdout
    assert "value: 0.5 * reverse KL\ngradient: 0\n" in out
    assert "no_gradient: the value estimates the reverse KL" in out
    found = json.loads(cli("check-loss", "ppo", "--json").stdout)
    assert (found["fits"]["gradient"], found["findings"]) == ({"-advantage": 1.0}, {})
    assert "has no function 'whole'" in error_of(cli("check-loss", f"{file}:whole", code=2))
    assert "unknown objective 'pppo'" in error_of(cli("check-loss", "pppo", code=2))


def test_estimators_versions_and_cells_of_a_markdown_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(cli("version", "--all", "--json").stdout)
    assert found["python"] == platform.python_version()
    packages = {"torchrl-llm-kl", "torch", "tensordict", "torchrl", "transformers", "ray", "peft"}
    assert {*packages, "platform", "accelerator"} <= set(found)
    assert "torch " in cli("version", "--all").stdout
    monkeypatch.setattr(_tables, "_PACKAGES", ("no-such-package",))
    assert json.loads(cli("version", "--all", "--json").stdout)["no-such-package"] == "not installed"
    assert cells_of("| a | b |\n|---|---|\n| `x` |  |\n| **y** | z |\n") == (["a", "b"], [["x", ""], ["y", "z"]])
    lines = cli("estimators").stdout.splitlines()
    names = [contract.name for contract in contracts()]
    assert [line.split()[0] for line in lines[3 : len(names) + 3]] == names
    start = lines.index("Tokens that another policy, old, sampled:") + 3
    assert [line.split()[0] for line in lines[start : start + len(names)]] == names
    assert lines[start + names.index("corrected_k3")].split() == ["corrected_k3", "yes", "KL(p‖q)"]
    assert "  for corrected_k3 while no clamp is active" in lines
    assert ("KL(p‖q)" in lines[4], "*" in lines[4]) == (True, False)  # k1
    found = {row["name"]: row for row in json.loads(cli("estimators", "--json").stdout)}
    assert found["k3"]["unbiased"] is True
    assert (found["k3"]["loss_gradient"], found["k1"]["reward"]) == ("KL(q‖p)", "yes")


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
COLOURS = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": None}


def saved(folder: Path, template: str | None, **special: Any) -> Path:
    build_tokenizer(template, ("<user>", "<assistant>", "<system>"), **special).save_pretrained(folder)
    return folder


def test_masked_in_text_has_brackets_or_colour(cli: Cli, model: str) -> None:
    lines = cli("templates", model).stdout.splitlines()
    # 18: twice "It is 4." and the end-of-turn token
    assert lines[0] == f"{model}: 5 messages, 116 tokens, 18 masked in"
    assert lines[1] == "turns found by: the template's loop over the messages"
    assert [line for line in lines if "[[" in line] == ["[[It is 4.<|im_end|>]]", "[[It is 8.<|im_end|>]]"]
    assert "turn 1: 9 tokens, the last is '<|im_end|>' (id 256)" in lines
    assert lines[-1] == "The end-of-turn token is masked in, as the model must emit it."
    text = cli("templates", model, env=COLOURS).stdout
    assert "\x1b[1;32mIt is 4.<|im_end|>\x1b[0m" in text
    assert "[[" not in text
    plain = cli("templates", model, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    assert "[[It is 4.<|im_end|>]]" in plain


def test_generation_blocks_and_incomplete_templates(cli: Cli, tmp_path: Path) -> None:
    found = json.loads(cli("templates", saved(tmp_path, MARKED, eos_token="<end>"), "--json").stdout)
    turns = [(found["text"][slice(*turn["characters"])], turn["last_token"]) for turn in found["turns"]]
    assert (found["located_by"], turns) == ("marks", [("It is 4.<end>", "<end>"), ("It is 8.<end>", "<end>")])
    assert found["num_masked_in"] == sum(turn["num_tokens"] for turn in found["turns"]) == 18
    lines = cli("templates", saved(tmp_path, NO_SYSTEM)).stdout.splitlines()
    assert lines[2] == "without the system message, which the template refuses: no system role"
    assert "<user>What is 2 + 2?<assistant>[[It is 4.]]<user>And twice that?<assistant>[[It is 8.]]" in lines
    assert "2 of 2 turns end in no special token" in lines[-1]


def test_a_conversation_from_a_file_is_escaped(cli, tmp_path, model):
    """A list, an object, or the first line of a JSONL file. Bad files and tokenizers are named."""
    messages = [user("a"), assistant("bc")]
    path, whole = tmp_path / "chat.json", json.dumps({"messages": messages})
    for text in (json.dumps(messages), whole, f"{whole}\n{{}}"):
        path.write_text(text)
        assert "[[bc<|im_end|>]]" in cli("templates", model, "--conversation", path).stdout
    for content, text in (
        (b"nonsense", "line 1 is not JSON"),
        (b"3", "expected an object"),
        (b"{}", "no messages"),
        (b"[]", "no messages"),
        (b'[{"role": "user", "content": "\xe9"}]', "cannot read"),
        (b'[{"role": "user"}]', "refuses this conversation"),
    ):
        path.write_bytes(content)
        assert text in error_of(cli("templates", model, "--conversation", path, code=2))
    assert "there is no file" in error_of(cli("templates", model, "--conversation", tmp_path / "none.json", code=2))
    assert "chat template" in error_of(cli("templates", saved(tmp_path, None), code=2))
    assert "cannot load the tokenizer" in error_of(cli("templates", tmp_path / "none", code=2))
    path.write_text(json.dumps([user("\x1b[2J"), assistant("a\u202eb")]))
    for env in ({}, COLOURS):
        text = cli("templates", model, "--conversation", path, env=env).stdout
        assert all(escaped in text for escaped in ("\\u{1b}[2J", "a\\u{202e}b"))
        assert not any(raw in text for raw in ("\x1b[2J", "\u202e"))


def test_untrusted_files_and_bad_tokens_are_refused(cli: Cli, tmp_path: Path) -> None:
    torch.save({"tokens": Mischief(tmp_path / "hacked")}, tmp_path / "batch.pt")
    assert "can run any code" in error_of(cli("check", tmp_path / "batch.pt", code=2))
    assert "does not exist" in error_of(cli("check", tmp_path / "absent.pt", code=2))
    assert not (tmp_path / "hacked").exists()
    for content, message in (
        ({"unrelated": FULL}, "tokens"),
        ({"tokens": {"full": FULL.float(), "prompt": FULL[:, :2]}}, "expected integer token ids"),
        ({"tokens": FULL}, "expected a nested TensorDict"),
    ):
        torch.save(content, tmp_path / "batch.pt")
        assert message in error_of(cli("check", tmp_path / "batch.pt", code=2))


def stub(monkeypatch: pytest.MonkeyPatch, *causes: str) -> dict[str, Any]:
    """Replace the doctor by one with these findings. Returns its arguments."""
    seen: dict[str, Any] = {}

    def diagnose(td: TensorDictBase, **given: Any) -> diagnostics.Diagnosis:
        seen.update(given, td=td)
        return diagnostics.Diagnosis(findings=tuple(Finding(cause, 0.9, {}, "Change it.") for cause in causes))

    monkeypatch.setattr(diagnostics, "diagnose", diagnose, raising=False)
    return seen


def test_check_passes_its_arguments_and_exits_with_1_for_faults(cli, tmp_path, monkeypatch, model, reference):
    """Exit code 0 for a clean batch and for notes, 1 for faults."""
    path = save("dict", tmp_path / "batch.pt", batch())
    result = cli("check", path, "--policy", model, "--reference", reference, "--json", code=1)
    assert json.loads(result.stdout)["findings"]  # the log-probs in the batch are made up
    assert cli("inspect", path, "--tokenizer", model).stdout.strip()
    cli("inspect", path, "--tokenizer", model, "--html", tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8").lower()
    seen = stub(monkeypatch)
    assert "no fault, 0 notes" in cli("check", path).stdout
    assert torch.equal(seen["td"]["tokens", "full"], FULL)
    defaults = {"policy": None, "reference": None, "tokenizer": None, "sampling": Sampling()}
    assert {key: seen[key] for key in defaults} == defaults
    cli(
        "check",
        path,
        "--policy",
        model,
        "--reference",
        reference,
        "--tokenizer",
        model,
        "--temperature",
        0.5,
        "--top-k",
        3,
    )
    assert not torch.equal(seen["policy"].lm_head.weight, seen["reference"].lm_head.weight)
    assert (bool(seen["tokenizer"].chat_template), seen["sampling"]) == (True, Sampling(0.5, top_k=3))
    rows = [TensorDict(tokens=TensorDict(prompt=FULL[0, :2], full=FULL[0, :n]), query="why?") for n in (4, 5)]
    save_batch(lazy_stack(rows), tmp_path / "rows.pt")
    cli("check", tmp_path / "rows.pt")
    assert [row["tokens", "full"].tolist() for row in seen["td"].unbind(0)] == [[3, 4, 5, 6], [3, 4, 5, 6, 7]]
    stub(monkeypatch, "off_by_one")
    assert "[off_by_one]" in cli("check", path, code=1).stdout
    (found,) = json.loads(cli("check", path, "--json", code=1).stdout)["findings"]
    assert found["cause"] == "off_by_one"
    stub(monkeypatch, "no_spread")  # a note
    assert "[no_spread]" in cli("check", path).stdout


def test_the_inspector_gets_both_batches(cli: Cli, tmp_path: Path, seen: dict[str, Any], model: str) -> None:
    one = save("dict", tmp_path / "one.pt", batch())
    two = save("memmap", tmp_path / "two", batch(advantage=torch.tensor([1.0, -1.0])))
    assert cli("inspect", one, "--tokenizer", model).stdout == "the tokens\n"
    defaults = {"html": None, "other": None, "sampling": Sampling(), "policy": None, "reference": None}
    assert {key: seen[key] for key in defaults} == defaults
    cli(
        "inspect",
        one,
        "--tokenizer",
        model,
        "--policy",
        model,
        "--reference",
        model,
        "--temperature",
        0.5,
        "--top-k",
        3,
    )
    assert seen["policy"].config.vocab_size == seen["reference"].config.vocab_size
    assert seen["sampling"] == Sampling(0.5, top_k=3)
    page = tmp_path / "page.html"
    assert cli("inspect", one, "--tokenizer", model, "--html", page, "--other", two).stdout == f"wrote {page}\n"
    assert seen["html"] == page
    assert torch.equal(seen["other"]["advantage"], torch.tensor([1.0, -1.0]))
    words = (one, "--tokenizer", model, "--html", tmp_path / "no" / "page.html")
    assert "create it first" in error_of(cli("inspect", *words, code=2))
    assert "Missing option" in error_of(cli("inspect", one, code=2))


def test_the_configuration_of_a_service_fits_the_schema_of_serve(cli: Cli, tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    file = tmp_path / "config.yaml"
    for replicas, expected in (
        ("2", {"num_replicas": 2}),
        ("1:4", {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}),
    ):
        cli("serve", "a/model", "--write", str(file), "--name", "teacher", "--replicas", replicas, "--gpus", "0.5")
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        schema.ServeDeploySchema.model_validate(config)
        (application,) = config["applications"]
        (deployment,) = application["deployments"]
        assert application["import_path"] == "torchrl_llm_kl.service:app"
        assert application["args"] == {"name": "teacher", "model": "a/model", "dtype": "auto"}
        assert deployment == {"name": "Replica", "ray_actor_options": {"num_cpus": 1, "num_gpus": 0.5}, **expected}
    error = cli("serve", "m", "--write", str(file), "--replicas", "many", code=2).stderr
    assert "--replicas must be a number or MIN:MAX, got 'many'" in error
