"""Tests of the study: it resumes, its true KL equals enumeration, and its page shows its figures."""

import math
from dataclasses import asdict
from statistics import fmean

import pytest
import torch

pytest.importorskip("rich")

import countdown_study as study
import staleness_study as stale
from cli_files import read_jsonl
from countdown.model import build_model, build_tokenizer, render_prompt
from countdown.task import Problem, all_problems
from countdown_study import STUDIES, Cell, Scale
from project import PROJECT

QUICK = Scale(steps=3, warmup_steps=25, num_prompts=2, group_size=3, held_out=8, samples=2)
#: One cell of each kind that runs its own way.
FEW = [Cell("placement", coefficient=0.0), Cell("placement", kl_reward="k1", temperature=0.7, scored_at=0.7)]
FEW += [Cell("placement", kl_loss="k2", coefficient=0.1, top_k=3), Cell("placement", kl_loss="exact")]


def test_a_study_resumes_and_repeats_an_interrupted_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "placement", (FEW, range(20, 21), QUICK))
    path = tmp_path / "results.jsonl"
    study.main("placement", jobs=0, results=path)
    rows = read_jsonl(path)
    assert [row["cell"] for row in rows] == [asdict(cell) for cell in FEW]
    assert all(math.isfinite(row[key]) for row in rows for key in study.COLUMNS)
    assert rows[0]["true_kl"] > 0
    assert [row["coefficient_end"] > 0 for row in rows] == [False, True, True, True]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:50])  # killed while it wrote the last run
    capsys.readouterr()
    study.main("placement", jobs=0, results=path)
    printed = capsys.readouterr().out
    assert "1 of 4 runs are missing" in printed
    assert read_jsonl(path) == rows, "a run depends only on its cell and seed"
    assert f"| kl_loss=exact coefficient=pi | 1 | {rows[3]['true_kl']:.2f} |" in printed
    path.write_text("".join(path.read_text()).replace(rows[0]["processor"], "another"))
    study.main("placement", jobs=0, results=path, seeds=range(0))
    assert "| 1 |" in capsys.readouterr().out, "the table shows the processor that ran most"


def test_intervals_by_hand():
    assert study.shown([1.0, 2.0, 3.0, 4.0, 5.0], "{:.3f}") == f"3.000 ± {2.776 * math.sqrt(2.5 / 5):.3f}"
    assert study.shown([1.0, 3.0], "{:.2f}") == "2.00 ± 12.71"
    assert [study.shown([0.25], "{:.1%}"), study.shown([], "{:.2f}")] == ["25.0%", "not run"]


def test_the_page_has_the_figures_of_the_results():
    page = (PROJECT / "benchmarks" / "KL_STUDY.md").read_text(encoding="utf-8")
    cells, seeds, scale = STUDIES["placement"]
    assert len(set(cells)) == 25
    for cell in cells:
        runs = study.read(study.RESULTS, cell, scale)
        assert set(runs) >= set(seeds)
        figures = [study.shown([runs[seed][key] for seed in seeds], "{:.2f}") for key in ("true_kl", "kl_estimated")]
        assert f"| 5 of 5 | {figures[0]} | {figures[1]} |" in page, cell
    cells, seeds, scale = STUDIES["target"]
    pi, ziegler = (study.read(study.RESULTS, cell, scale) for cell in cells)
    for seed in seeds:
        assert f"| {seed} | {pi[seed]['kl_last_half']:.3f} | {ziegler[seed]['kl_last_half']:.3f} |" in page
    assert f"KL {study.shown([pi[seed]['kl_last_half'] for seed in seeds], '{:.2f}')}." in page
    apart = fmean(pi[seed]["accuracy_after"] - ziegler[seed]["accuracy_after"] for seed in seeds)
    assert f"10 pairs: {100 * apart:.1f} ±" in page


def test_the_true_kl_against_an_exact_sum_and_an_independent_estimate():
    """With a single token no prefix is sampled, so a plain sum must give the same number."""
    problems = all_problems(9)[:6]
    tokenizer = build_tokenizer(all_problems(9))
    torch.manual_seed(0)
    policy, reference = models = build_model(tokenizer), build_model(tokenizer)
    with torch.no_grad():
        policy.lm_head.weight *= 3
    want = 0.0
    for problem in problems:
        ids = torch.tensor([tokenizer(render_prompt(problem, tokenizer))["input_ids"]])
        p, q = (model(input_ids=ids).logits[0, -1].double().softmax(-1) for model in models)
        want += float((p * (p / q).log()).sum()) / len(problems)
    kl, right = study.true_kl(policy, reference, tokenizer, problems, samples=2, seed=0, length=1)
    assert want > 0.1
    assert (kl, right) == (pytest.approx(want, rel=1e-4), 0.0)
    assert study.true_kl(policy, policy, tokenizer, problems, samples=1, seed=0)[0] == 0.0
    # over several tokens: the mean log-ratio of sampled answers, an independent estimate
    problems = [Problem((3, 5), 8, "+")] * 50
    policy, reference = build_model(tokenizer), build_model(tokenizer)
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        reference.lm_head.weight += 0.02 * torch.randn_like(reference.lm_head.weight)
    kl, _ = study.true_kl(policy, reference, tokenizer, problems, samples=8, seed=1, length=4)
    ids = torch.tensor([tokenizer(render_prompt(problems[0], tokenizer))["input_ids"]] * 400)
    width = ids.shape[1]
    with torch.no_grad():
        padding = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        tokens = policy.generate(ids, do_sample=True, top_k=0, max_new_tokens=4, **padding)
        chosen = tokens[:, width:, None]
        models = policy, reference
        log_p, log_q = (m(tokens).logits[:, width - 1 : -1].log_softmax(-1).gather(-1, chosen) for m in models)
    estimates = (log_p - log_q).sum((1, 2))
    error = float(estimates.std()) / 20
    assert 3 * error < kl
    assert abs(kl - float(estimates.mean())) < 5 * error


# ------------------------------------------------------------------ stale answers


def test_the_study_of_stale_answers_resumes_and_draws(tmp_path, monkeypatch, capsys):
    cells = [stale.Cell(0, "none", 0.5), stale.Cell(2, "exact old", 0.5), stale.Cell(2, "decoupled", 0.5)]
    monkeypatch.setattr(stale, "CELLS", cells)
    monkeypatch.setattr(stale, "SCALE", QUICK)
    monkeypatch.setattr(stale, "gettempdir", lambda: tmp_path)
    path = tmp_path / "results.jsonl"
    stale.main(0, path, range(30, 31), QUICK)
    rows = read_jsonl(path)
    assert [stale.Cell(**row["cell"]) for row in rows] == cells
    assert rows[0]["staleness"] == 0 < min(row["staleness"] for row in rows[1:])
    assert (tmp_path / "staleness.png").stat().st_size > 10_000
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    stale.main(0, path, range(30, 31), QUICK)
    assert read_jsonl(path) == rows
    assert "1 of 3 runs are missing" in capsys.readouterr().out


def test_the_page_of_stale_answers_has_the_figures_of_the_results():
    page = (PROJECT / "benchmarks" / "STALENESS.md").read_text(encoding="utf-8")
    results = stale.read(PROJECT / "benchmarks" / "staleness_study.jsonl")
    assert {cell for cell, _ in results} == set(stale.CELLS)
    assert stale.table(results) in page
