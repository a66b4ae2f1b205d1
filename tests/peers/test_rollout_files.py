"""Files of rollouts that other frameworks wrote themselves: TRL's table of completions, and verl's dump of generations."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import folder
from torchrl_llm_kl.datasets import from_rollouts
from torchrl_llm_kl.tasks import tiny_chat_model


def test_the_table_of_completions_that_trl_writes(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="its trainer writes the table")
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    model, tokenizer = tiny_chat_model()
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        log_completions=True, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
    )  # fmt: skip

    def brief(completions: list[str], **others: object) -> list[float]:
        return [-0.5 * len(text) for text in completions]

    def even(completions: list[str], **others: object) -> list[float]:
        return [float(len(text) % 2 == 0) for text in completions]

    prompts = datasets.Dataset.from_list([{"prompt": "a b"}, {"prompt": "c d"}])
    trainer = trl.GRPOTrainer(model, [brief, even], args=config, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    (path,) = (tmp_path / "completions").glob("*.parquet")
    batch = from_rollouts(path, tokenizer)
    rows = pandas.read_parquet(path).to_dict("records")
    assert len(batch) == len(rows) == 4
    for td, row in zip(batch, rows, strict=True):
        assert tokenizer.decode(td["tokens", "full"]) == tokenizer.decode(
            tokenizer(row["prompt"] + row["completion"]).input_ids
        )
        assert td["next", "reward"].item() == pytest.approx(row["brief"] + row["even"])
        assert td["next", "rewards", "brief"].item() == pytest.approx(row["brief"])
        assert td["advantage"].tolist() == [pytest.approx(row["advantage"])] * len(td["tokens", "full"])


def test_the_dump_that_verl_writes(tmp_path: Path) -> None:
    """The function is taken out of verl's trainer, whose module needs GPUs."""
    source = (folder("verl") / "trainer/ppo/ray_trainer.py").read_text(encoding="utf-8")
    (dump,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    )
    dump.decorator_list = []
    names: dict[str, Any] = {"os": os, "json": json}
    exec(ast.unparse(dump), names)
    given = {"inputs": ["a b", "c d"], "outputs": [" c", " e"], "gts": ["c", "d"], "scores": [1.0, 0.0]}
    given |= {"reward_extra_infos_dict": {"acc": [1, 0]}, "dump_path": str(tmp_path), "global_steps": 3}
    names["_write_generations"](**given)
    _, tokenizer = tiny_chat_model()
    batch = from_rollouts(tmp_path / "3.jsonl", tokenizer)
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert [tokenizer.decode(row["tokens", "response"]) for row in batch] == [" c", " e"]
    assert torch.equal(batch["metadata", "acc"], torch.tensor([1, 0]))
