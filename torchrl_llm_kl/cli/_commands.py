"""The commands and their options. Other modules do the work and import torch, so that help and completion stay fast."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrl_llm_kl._registry import install_hint
from torchrl_llm_kl.cli._console import (
    EXIT_CODES,
    FOUND,
    INTERRUPTED,
    PROGRAM,
    AsJson,
    ColumnNames,
    CommandError,
    Group,
    MinP,
    ScoreArguments,
    Temperature,
    TopK,
    TopP,
    column_names,
    console,
    print_json,
    print_table,
    say,
    takes,
)

app = typer.Typer(
    name=PROGRAM,
    cls=Group,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)

Batch = Annotated[
    Path,
    typer.Argument(
        help="Rollouts: a JSONL, JSON or Parquet file of any framework, a file of save_batch or torch.save, or a folder of "
        "td.save."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Load pickled objects. They can run any code, so only use it for your own files."),
]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        typer.main.get_command(app).main(args=None if arguments is None else list(arguments), prog_name=PROGRAM)
    # The group exits the process itself in standalone mode.
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="TORCHRL_LLM_KL_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """KL-regularised post-training of language models: tables, scores of a file, a doctor for batches."""
    if context.invoked_subcommand is None:
        raise CommandError(f"name a command. {PROGRAM} --help lists them.")


# ------------------------------------------------------------------ tables


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="A preset. Default: list all.")] = None, as_json: AsJson = False
) -> None:
    """List the presets, or show one with its requirements, its settings and the source of each value."""
    # Imports inside commands keep torch, which takes seconds, out of help and completion.
    from torchrl_llm_kl.cli._tables import show_algorithm, show_algorithms

    if name is None:
        show_algorithms(as_json)
    else:
        show_algorithm(name, as_json)


@app.command()
def estimators(as_json: AsJson = False) -> None:
    """List the KL estimators: bias, gradients, and where each may be used."""
    from torchrl_llm_kl.cli._tables import show_estimators

    show_estimators(as_json)


@app.command("check-loss")
def check_a_loss(
    place: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="A loss, or the name of an objective.")],
    as_json: AsJson = False,
) -> None:
    """Find out which divergence a loss estimates and whose gradient it has. Exits with 1 if it has a fault."""
    from torchrl_llm_kl.diagnostics import check_loss
    from torchrl_llm_kl.training import load_function

    report = check_loss(load_function(place) if ":" in place else place)
    print_json(vars(report)) if as_json else print(report)
    if report.findings:
        raise typer.Exit(FOUND)


@app.command()
def version(
    everything: Annotated[
        bool, typer.Option("--all", help="Include packages and the machine, for a bug report.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the version."""
    from torchrl_llm_kl.cli._tables import show_version

    show_version(everything, as_json)


# ------------------------------------------------------------------ scores


@app.command("score")
@takes(ScoreArguments)
def score_answers(**given: Any) -> None:
    """Score the answers in a file: log-prob, perplexity, and KL to a reference with standard errors."""
    from torchrl_llm_kl.cli._score import score_file

    score_file(ScoreArguments(**given))


# ------------------------------------------------------------------ batches


@app.command()
def check(
    batch: Batch,
    policy: Annotated[str | None, typer.Option(help="The model that sampled. Adds checks that score with it.")] = None,
    reference: Annotated[str | None, typer.Option(help="The reference model.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer. Adds checks of text and masks.")] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    attribute: Annotated[
        bool, typer.Option(help="Split the KL of sampler and policy into shares of its causes.")
    ] = False,
    column: ColumnNames = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Look for faults in a batch of rollouts. Exits with 1 if there is one, and with 4 if nothing was compared."""
    from torchrl_llm_kl.datasets import load_batch
    from torchrl_llm_kl.diagnostics import diagnose
    from torchrl_llm_kl.scoring import Sampling
    from torchrl_llm_kl.training import load_model, load_tokenizer

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    words = None if tokenizer is None else load_tokenizer(tokenizer)
    td = load_batch(batch, words, columns=column_names(column), trust=trust)
    own, other = (None if name is None else load_model(name) for name in (policy, reference))
    diagnosis = diagnose(td, policy=own, reference=other, tokenizer=words, sampling=sampling, attribute=attribute)
    out = console()
    if as_json:
        print_json(diagnosis.to_dict())
    elif out.is_terminal:
        out.print(diagnosis)
    else:
        print(diagnosis)
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


@app.command()
def inspect(
    batch: Batch,
    tokenizer: Annotated[str, typer.Option(help="The tokenizer of the batch: a folder, or a name on the hub.")],
    html: Annotated[Path | None, typer.Option(help="Write a page instead of printing.")] = None,
    other: Annotated[Path | None, typer.Option(help="A second batch to show beside the first.")] = None,
    policy: Annotated[str | None, typer.Option(help="A model. Adds its log-probs and entropy.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The reference model. Adds its log-probs and the exact KL.")
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    column: ColumnNames = None,
    trust: Trust = False,
) -> None:
    """Show the tokens of a batch with their log-probs, KL, advantage and mask."""
    from torchrl_llm_kl.datasets import load_batch
    from torchrl_llm_kl.diagnostics import Reading, inspect_tokens
    from torchrl_llm_kl.scoring import Sampling
    from torchrl_llm_kl.training import load_model, load_tokenizer

    if html is not None and not html.parent.is_dir():
        raise CommandError(f"the folder {html.parent} for {html.name} does not exist. Please create it first.")
    words, columns = load_tokenizer(tokenizer), column_names(column)
    td = load_batch(batch, words, columns=columns, trust=trust)
    beside = None if other is None else load_batch(other, words, columns=columns, trust=trust)
    own, known = (None if name is None else load_model(name) for name in (policy, reference))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    reading: Reading = {"policy": own, "reference": known, "sampling": sampling}
    page = inspect_tokens(td, words, html=html, other=beside, **reading)
    if html is not None:
        print(f"wrote {html}")
    else:
        page.print(console=console())


# ------------------------------------------------------------------ runs


@app.command("train")
def run_training(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.yaml]", help="The settings. --example prints a file to start from.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as optimizer.lr=1e-5.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print every setting with its meaning.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings, files and models, and print all settings.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over. By default a run with a checkpoint in its folder continues.")
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Change a setting of a run that resumes, such as optimizer.lr=1e-6. The change persists. Repeatable.",
        ),
    ] = None,
) -> None:
    """Train a model on prompts with a reward, near a reference. Exits with 1 if the KL or another figure blew up."""
    # omegaconf is in an optional extra. Name that extra instead of failing at an import.
    if importlib.util.find_spec("omegaconf") is None:
        raise CommandError(f"this command needs omegaconf: {install_hint('train')}.")
    if config is None and not example:
        raise CommandError(f"name the file with the settings. {PROGRAM} train --example > config.yaml writes one.")
    from torchrl_llm_kl.tasks import RewardError
    from torchrl_llm_kl.training import EngineError, example_config, load_inputs, read_config, train

    if example or config is None:
        print(example_config(), end="")
        return
    given = changes or []
    # Without a file, the first word is a change. A path may contain an equals sign too, as runs/lr=1e-5/config.yaml does.
    source = config if "=" not in config or Path(config).is_file() else None
    settings = read_config(source, given if source else [config, *given])
    if dry_run:
        settings = read_config(settings.to_dict(), change or ())
        with redirect_stdout(sys.stderr):  # a reward file may print when it is imported
            inputs = load_inputs(settings)
        print(settings.to_yaml(), end="")
        say(
            f"memory: at least {inputs.memory / 1e9:.3g} GB for weights, gradients and the optimiser's state, plus "
            f"activations, which micro-batches limit, and the sampler's caches. Disk: up to {inputs.disk / 1e9:.3g} GB."
        )
        return
    try:
        result = train(settings, fresh=fresh, changes=change or (), say=say)
    # Errors of a user's reward function or server, without a traceback of this package.
    except (EngineError, RewardError) as error:
        raise CommandError(str(error)) from error
    if result.final is not None and os.environ.get("RANK", "0") == "0":  # of several ranks one reports
        print_table(["", ""], [[label, figure] for label, figure in result.figures.items()])
        print(f"wrote {result.final}, the weights after step {result.chosen}")
        shown = {
            "run.html": "the run in one page",
            "curves.png": "the run's curves",
            "rollouts.html": "answers, token by token",
            "final/README.md": "the card",
        }
        for name, content in shown.items():
            if (path := result.final.parent / name).exists():
                print(f"see {path}: {content}")
    if result.outcome != "finished":
        raise typer.Exit(INTERRUPTED if result.outcome == "interrupted" else FOUND)


@app.command("runs")
def show_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="The folders run.out of the runs.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with the curves of all runs.")] = None,
) -> None:
    """Compare runs: their figures, the settings that differ, and with --html their curves in one page."""
    from torchrl_llm_kl.training import compare_runs

    if html is not None and not html.parent.is_dir():
        raise CommandError(f"the folder {html.parent} for {html.name} does not exist. Please create it first.")
    figures, settings = compare_runs(folders, html)
    print_table(figures[0], figures[1:], right=1)
    if len(settings) > 1:
        print()
        print_table(settings[0], settings[1:])
    if html is not None:
        print(f"wrote {html}")


# ------------------------------------------------------------------ serve, templates, demo


_SERVE_HEAD = """\
# An application of Ray Serve: `serve run FILE`, `serve deploy FILE`, or `serveConfigV2` of a KubeRay RayService.
# Clients use it by its name: torchrl_llm_kl.service.ScoringService(name="{name}").
"""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="The model: a folder on every node, or a name on the hub.")],
    write: Annotated[Path, typer.Option(help="The file to write. Replaces an earlier file.")],
    name: Annotated[str, typer.Option(help="Name of the service.")] = "reference",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights: auto (as saved), float32, bfloat16 or float16.")
    ] = "auto",
    replicas: Annotated[str, typer.Option(help="Number of replicas, or MIN:MAX for Serve to scale them.")] = "1",
    gpus: Annotated[float, typer.Option(help="GPUs of each replica.")] = 1.0,
) -> None:
    """Write the configuration of a scoring service for Ray's `serve run`, `serve deploy` and KubeRay."""
    import yaml

    lowest, _, highest = replicas.partition(":")
    if not lowest.isdigit() or (highest and not highest.isdigit()):
        raise CommandError(f"--replicas must be a number or MIN:MAX, got {replicas!r}.")
    number: dict[str, object] = {"num_replicas": int(lowest)}
    if highest:
        number = {"autoscaling_config": {"min_replicas": int(lowest), "max_replicas": int(highest)}}
    application = {
        "name": name,
        "route_prefix": None,
        "import_path": "torchrl_llm_kl.service:app",
        "args": {"name": name, "model": model, "dtype": dtype},
        "deployments": [{"name": "Replica", "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus}, **number}],
    }
    config = yaml.safe_dump({"proxy_location": "Disabled", "applications": [application]}, sort_keys=False)
    write.write_text(_SERVE_HEAD.format(name=name) + config, encoding="utf-8")
    say(f"wrote {write}: serve run {write}")


@app.command()
def templates(
    name: Annotated[str, typer.Argument(metavar="MODEL_OR_TOKENIZER", help="A folder, or a name on the hub.")],
    conversation: Annotated[
        Path | None, typer.Option(help="A JSON file of messages. Default: a short conversation of two turns.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Render a conversation with a model's chat template and show which tokens are masked in."""
    from torchrl_llm_kl.cli._templates import show_template

    show_template(name, conversation, as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Train a small model with the KL held at a target, in a checkout of the project. Passes changes on to train."""
    # Look beside the package first, then in the working directory, for an installed package in a checkout.
    for root_folder in (Path(__file__).parents[2], Path()):
        script = root_folder / "tutorials" / "countdown_demo.py"
        if script.is_file() and (root_folder / "torchrl_llm_kl").is_dir():
            raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)
    raise CommandError(
        "the demo is a tutorial, which an installed package does not contain. Run this command, or `make demo`, in a "
        "checkout of the project's sources."
    )
