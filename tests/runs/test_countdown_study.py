"""The study: its cells, results that survive an interruption, statistics by hand, the true KL by enumeration, a quick run."""

import math
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from torchrl.collectors.llm import LLMCollector

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("omegaconf")

import countdown_study
from cli_files import read_jsonl, write_jsonl
from closeness import assert_near
from countdown import study
from countdown.direct import direct_batches
from countdown.model import as_policy, build_model, build_tokenizer, render_prompt, warm_up
from countdown.study import DEMO, SHORT, Cell, Results, placement_cells, target_cells
from countdown.task import Problem, all_problems, make_env
from project import PROJECT
from torchrl_llm_kl import RetrieveKL

DOCS = PROJECT / "docs"
HERE = torch.backends.cpu.get_cpu_capability()


def row(cell: Cell, seed: int, scale=SHORT, processor=HERE, **measured):
    return {"cell": asdict(cell), "seed": seed, "processor": processor, "scale": asdict(scale), **measured}


def test_each_cell_and_each_seed_is_there_once():
    """Settings were chosen on other seeds than those that are reported."""
    seeds = [*study.TUNING_SEEDS, *study.TARGET_SEEDS, *study.PLACEMENT_SEEDS]
    assert len(set(seeds)) == len(seeds)
    assert (len(study.TARGET_SEEDS), len(study.PLACEMENT_SEEDS)) == (10, 5)
    cells = placement_cells()
    assert len({str(cell) for cell in cells}) == len(set(cells)) == len(cells) == 25
    plain = {(cell.placement, cell.coefficient) for cell in cells if cell.sampler == "temperature 1"}
    for placement in ("k1 in the reward", "k2 in the loss", "k3 in the loss", "exact in the loss"):
        assert {weight for where, weight in plain if where == placement} >= {"pi", 0.03, 0.1, 0.3}
    assert ("none", 0.0) in plain
    samplers = {"temperature 1", "temperature 0.7, scored at 1", "temperature 0.7", "top 3, scored without"}
    assert {cell.sampler for cell in cells} == samplers


def test_results_are_found_again_by_processor_and_only_the_missing_ones_run(tmp_path):
    """A line that a kill cut off is run again."""
    path = tmp_path / "results.jsonl"
    one, two = target_cells()
    results = Results(path)
    results.append(row(one, 3, kl=0.1))
    results.append(row(two, 3, kl=0.2))
    again = Results(path)
    assert again.missing([one, two], [3, 4], SHORT) == [(one, 4), (two, 4)]
    assert again.find(two, SHORT) == {3: row(two, 3, kl=0.2)}
    assert again.find(two, replace(SHORT, steps=7)) == {}, "another size is another run"
    whole = path.read_bytes()
    for cut in (1, 10, whole.index(b"\n")):  # the last: an object without its line end
        path.write_bytes(whole + whole[:cut])
        results = Results(path)
        assert len(results.rows) == 2
        assert path.read_bytes() == whole
        results.append(row(one, 2))
        assert [each["seed"] for each in read_jsonl(path)] == [3, 3, 2]
    results = Results(tmp_path / "others.jsonl")
    for processor, seed, accuracy, kl in (("A", 10, 0.5, 0.4), ("A", 11, 0.7, 0.6), ("B", 10, 0.9, 0.5)):
        measured = {"accuracy_before": 0.25, "accuracy_after": accuracy, "kl_last_half": kl, "swing": 1.5}
        results.append(row(one, seed, processor=processor, **measured))
    assert results.missing([one], [10, 11], SHORT) == [(one, 10), (one, 11)], "nothing ran on this processor"
    assert set(results.find(one, SHORT)) == {10, 11}, "the processor with most runs"
    _, _, a, b, both = study.processor_table(results, [10, 11], SHORT).splitlines()
    assert a == "| A | 2 | 25.0% (25.0% to 25.0%) | 60.0% (50.0% to 70.0%) | 0.50 (0.40 to 0.60) | 1.5 (1.5 to 1.5) |"
    assert b.startswith("| B | 1 | 25.0% (25.0% to 25.0%) | 90.0% (90.0% to 90.0%) | 0.50 (0.50 to 0.50) |")
    assert both.startswith("| all | 3 | 25.0% (25.0% to 25.0%) | 70.0% (50.0% to 90.0%) |")


def test_statistics_by_hand():
    assert study.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 2.776 * math.sqrt(2.5 / 5)))
    assert study.interval([1.0, 3.0]) == pytest.approx((2.0, 12.706))
    said = [study.shown([0.25]), study.shown([0.5, 0.5], percent=True), study.shown([])]
    assert said == ["0.25", "50.0 ± 0.0 %", "not run"]
    a, b = {1: {"x": 0.5}, 2: {"x": 0.7}}, {2: {"x": 0.4}, 3: {"x": 0.0}}
    assert study.differences(a, b, "x") == pytest.approx([0.3])  # of the pair
    clear, unclear = [0.2, 0.21, 0.2], [0.2, -0.21, 0.1]
    assert study.verdict([0.2], 1) == "open: fewer than two seeds were run"
    assert [study.verdict(clear, sign) for sign in (1, -1, 0)] == ["agrees", "disagrees", "disagrees"]
    assert study.verdict(unclear, 1) == "not seen: the interval contains 0"
    assert study.verdict(unclear, 0) == "agrees: no difference seen"
    rows = [{"kl": kl, "coefficient": c} for kl, c in zip((0, 1, 2, 3, 4, 6), (9, 8, 2, 4, 1, 3), strict=True)]
    summary = study.target_summary(rows)
    assert (summary["kl_last_half"], summary["swing"]) == (pytest.approx(13 / 3), 4.0)


def test_the_tables_by_hand_and_blocks_of_a_page(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    pi, ziegler = target_cells()
    values = {"accuracy_before": 0.5, "accuracy_after": 0.75, "swing": 2.0}
    results.append(row(pi, 10, DEMO, kl_last_half=0.54, **values))
    results.append(row(pi, 11, DEMO, kl_last_half=0.56, **{**values, "swing": 4.5}))
    results.append(row(ziegler, 10, DEMO, kl_last_half=0.6, **{**values, "accuracy_after": 0.7}))
    table = study.target_table(results, [10, 11, 12], DEMO)
    assert "| 10 | 0.540 | 0.600 | 2.0 | 2.0 | 50.0% | 75.0% | 70.0% |" in table
    assert "| 11 | 0.560 | not run | 4.5 | not run | 50.0% | 75.0% | not run |" in table
    assert "| 12 | not run | not run |" in table
    assert "PI control, 2 of 3 seeds run: the mean KL of the last half is within 10 % of the target in 1" in table
    assert "the coefficient within a factor of 4 after the first third in 1" in table
    assert "1 pairs: 5.0 %" in table
    results = Results(tmp_path / "claims.jsonl")
    for seed, (k1, k3) in enumerate([(0.70, 0.60), (0.72, 0.61), (0.71, 0.60)]):
        results.append(row(Cell("placement", kl_reward="k1"), seed, sampled_after=k1))
        results.append(row(Cell("placement", kl_loss="k3"), seed, sampled_after=k3))
    table = study.claims_table(results, SHORT)
    assert "| 3 | 10.7 ± 1.4 % | agrees |" in table
    assert table.count("open: fewer than two seeds were run") == 4
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    study.write_blocks(page, {"two": "2", "one": "1"})
    assert page.read_text() == "a\n<!-- one -->\n1\n<!-- end -->\nb\n<!-- two -->\n2\n<!-- end -->\n"
    with pytest.raises(ValueError, match="has no block <!-- three -->"):
        study.write_blocks(page, {"three": "3"})


def test_the_true_kl_of_one_token_is_exact_and_of_several_agrees_with_its_estimate():
    """A single token has the prompt as its only prefix: nothing is sampled, and a plain sum must give the same number."""
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
    kl, right = countdown_study.true_kl(policy, reference, tokenizer, problems, samples=2, seed=0, max_new_tokens=1)
    assert want > 0.1
    assert (kl, right) == (pytest.approx(want, rel=1e-4), 0.0)
    assert countdown_study.true_kl(policy, policy, tokenizer, problems, samples=1, seed=0)[0] == 0.0
    # over several tokens: the mean log-ratio of sampled answers, an independent estimate
    problems = [Problem((3, 5), 8, "+")] * 50
    policy, reference = build_model(tokenizer), build_model(tokenizer)
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        reference.lm_head.weight += 0.02 * torch.randn_like(reference.lm_head.weight)
    kl, _ = countdown_study.true_kl(policy, reference, tokenizer, problems, samples=8, seed=1, max_new_tokens=4)
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


#: One cell of each kind that runs its own way.
FEW = [{"coefficient": 0.0}, {"kl_reward": "k1", "temperature": 0.7, "scored_at": 0.7}, {"kl_loss": "exact"}]
FEW = [Cell("placement", **each) for each in (*FEW[:2], {"kl_loss": "k2", "coefficient": 0.1, "top_k": 3}, FEW[2])]


def invoke(study: str, *changes: str) -> str:
    with redirect_stdout(StringIO()) as output:
        countdown_study.main(study, changes)
    return output.getvalue()


def test_a_quick_study_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(countdown_study, "placement_cells", lambda: FEW)
    page, path = Path(shutil.copy(DOCS / "kl_study.md", tmp_path)), tmp_path / "results.jsonl"
    arguments = ("quick=true", "jobs=0", f"results={path}", f"folder={tmp_path}", f"docs={tmp_path}")
    invoke("placement", *arguments, "minutes=0", "seeds=[20]")
    assert not path.exists(), "no run starts after the time is up"
    assert re.search(r"(?s)0 of 4 runs.*4/4", invoke("placement", *arguments, "seeds=[20]"))
    rows = read_jsonl(path)
    assert [row["cell"] for row in rows] == [asdict(cell) for cell in FEW]
    assert all(math.isfinite(row[key]) for row in rows for key in ("true_kl", "kl_estimated", "sampled_after"))
    assert rows[0]["true_kl"] > 0
    assert ["coefficient_end" in row for row in rows[1:3]] == [True, False]
    write_jsonl(path, rows[:3])  # as if it had been killed in the last run
    assert "3 of 4 runs" in invoke("placement", *arguments, "seeds=[20]")
    assert read_jsonl(path)[3] == {**rows[3], "seconds": ANY}, "a run depends on its cell and seed alone"
    monkeypatch.setattr(countdown_study, "target_cells", lambda: target_cells()[:1])
    invoke("target", *arguments, "seeds=[10]")
    text = page.read_text(encoding="utf-8")
    assert "PI control, 1 of 10 seeds run" in text
    assert "| none | — | temperature 1 | 1 of 5 |" in text
    for name in ("kl_target.png", "kl_frontier.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_is_that_of_its_results(tmp_path):
    """``make study`` writes both; a change of one alone fails here."""
    page = Path(shutil.copy(DOCS / "kl_study.md", tmp_path))
    invoke("pages", f"docs={tmp_path}")
    assert page.read_text(encoding="utf-8") == (DOCS / "kl_study.md").read_text(encoding="utf-8")


def test_direct_batches_are_those_of_the_collector():
    """The studies go around env and collector: the same problems, tokens, rewards and scores."""
    torch.manual_seed(4)
    problems = all_problems(6)[:5]  # fewer than are posed: the order goes on with other permutations
    tokenizer = build_tokenizer(problems)
    policy, reference = build_model(tokenizer), build_model(tokenizer)
    for _ in warm_up(policy, tokenizer, problems, steps=25, seed=4, batch_size=8, lr=5e-3):
        pass  # the form of an answer, so that some have a reward
    task = {"num_prompts": 3, "group_size": 2, "seed": 5}
    env = make_env(problems, tokenizer, **task).append_transform(RetrieveKL("from_collector", reference, coeff=0.1))
    turns = {"dialog_turns_per_batch": 6, "total_dialog_turns": 18}
    collector = LLMCollector(env, policy=as_policy(policy, tokenizer), **turns, flatten_data=True)
    torch.manual_seed(3)
    expected = list(collector)
    collector.shutdown()
    torch.manual_seed(3)
    kl = RetrieveKL(policy, reference, coeff=0.1)
    found = list(direct_batches(kl, as_policy(policy, tokenizer), tokenizer, problems, steps=3, **task))
    assert len(found) == len(expected) == 3
    rewards = torch.cat([batch["next", "reward"].flatten(1).sum(-1) for batch in found])
    assert len(set(rewards.tolist())) > 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["text", "full"] == theirs["text", "full"]
        for key in (("tokens", "full"), ("masks", "all_attention_mask")):
            assert torch.equal(mine[key], theirs[key]), key
        assert torch.equal(mine["next", "success"], theirs["next", "success"])
        # the env's scorer goes on from the prompts that it remembers: sums over 128 hidden units in another order
        for name in ("reward", "kl_penalty", ("log_probs", "full"), ("ref_log_probs", "full")):
            assert_near(mine["next"].get(name), theirs["next"].get(name), terms=policy.config.hidden_size)
