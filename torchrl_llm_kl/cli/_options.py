"""Options of several commands, and of ``score``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Temperature = Annotated[float, typer.Option(help="The sampler's temperature: divides the logits.")]


@dataclass(frozen=True)
class ScoreArguments:
    """The arguments of ``score``; ``docs/cli.md`` explains each."""

    model: Annotated[str, typer.Argument(help="The model: a folder, or a name on the hub.")]
    data: Annotated[
        Path,
        typer.Argument(help="JSONL or Parquet: conversations, prompts and completions, preferences, or token ids."),
    ]
    reference: Annotated[str | None, typer.Option(help="The model to compare with.")] = None
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            help="KL estimators: k1, k2, k3, low_var_kl, abs, exact; several by commas or repeats. Default: k1, k3, and exact "
            "where both vocabularies have one size."
        ),
    ] = None
    temperature: Temperature = 1.0
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a JSON line for each answer; an earlier file is replaced."),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder of remembered scores, which are not computed again. Default: beside --out."
        ),
    ] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with the tokens of the first answers.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first rows only.")] = None
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Skip longer sequences, in tokens. Default: the limit of the models.")
    ] = None
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in one forward. Default: 1024 on a CPU, 16384 on a GPU.")
    ] = None
    per_token: Annotated[bool, typer.Option("--per-token", help="Write token ids and scores of each token too.")] = (
        False
    )
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than the model's.")] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with the chat template of conversations. Default: the tokenizer's.",
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as saved), float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str | None, typer.Option(help="Such as cuda:1. Default: the accelerator, if there is one.")] = (
        None
    )
    as_json: AsJson = False

    @property
    def estimators(self) -> tuple[str, ...]:
        """The names of the KL estimators, each once."""
        names = (name.strip() for item in self.estimator or () for name in item.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def store_folder(self) -> Path | None:
        """The folder of remembered scores: beside the output, unless it is given."""
        return self.store or (self.out and self.out.with_name(f"{self.out.name}.store"))
