"""A run whose reference is behind a service over Ray is the run with a reference of its own."""

import pytest

from train_lab import TARGET, build_lab, figures, settings

pytest.importorskip("ray")
from torchrl_llm_kl.training import Run, train
from torchrl_llm_kl.training._build import load_reference


def test_a_run_with_a_shared_reference(ray_cluster, tmp_path, monkeypatch):
    """Trains from a relative path, and resumes after one step. A second client keeps the service between the two runs."""
    lab, runs = build_lab(tmp_path), []

    def build(*args, **kwargs):
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    def config(name, steps, *changes):
        common = ["model.name=model", "optimizer.schedule=constant", "optimizer.warmup_steps=0", "evaluation.every=3"]
        common += ["evaluation.greedy=false", "evaluation.num_prompts=2", f"run.steps={steps}"]
        # In the loss: in the reward, a KL of 1e-7 in place of 0 would be all that differs in a group of equal rewards.
        kl = {**TARGET, "place": "loss", "coefficient": 0.1}
        return settings(lab, tmp_path / name, *common, *changes, kl=kl)

    monkeypatch.chdir(lab)
    train(config("own", 3), say=lambda line: None)
    other = load_reference(config("shared", 3, "reference.service=of-runs"))
    for steps in (1, 3):
        train(config("shared", steps, "reference.service=of-runs"), say=lambda line: None, build=build)
    for file, count in (("metrics.jsonl", 3), ("evaluations.jsonl", 2)):
        own, shared = (figures(tmp_path / name / file) for name in ("own", "shared"))
        shared = [row for row in shared if row["step"] != 1 or file == "metrics.jsonl"]  # the end of the first process
        assert len(own) == count
        assert own[-1]["kl"] != 0
        for row, want in zip(shared, own, strict=True):
            assert row == pytest.approx(want, abs=1e-3, rel=0.02)
    assert [run.step for run in runs] == [1, 3]
    assert other.fingerprint() is not None, "it serves the other client"
    for run in runs:
        with pytest.raises(Exception, match="was closed"):
            run.reference.fingerprint()
    other.close()
