"""Scores of a file equal a plain forward in float64, are counted exactly, and are stored."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cli_files import CHATS, Cli, error_of, read_jsonl, write_jsonl
from closeness import assert_near
from template_pairs import assistant, user
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.cli._score import mean_of_answers
from toy_models import FORWARD
from toy_rollouts import make_model, make_tokenizer

KEYS = {"index", "num_tokens", "num_scored", "log_prob", "ref_log_prob", "kl"}


def log_softmax(name: str, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs of every next token from the model's own forward in float64, ``[T - 1, V]``."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).double()
    with torch.no_grad():
        return (model(input_ids=ids.unsqueeze(0)).logits[0, :-1].double() / temperature).log_softmax(-1)


def by_hand(model: str, reference: str, ids: Tensor, mask: Tensor, temperature: float) -> dict[str, float]:
    p, q = (log_softmax(name, ids, temperature) for name in (model, reference))
    chosen = ids[1:, None]
    log_prob, ref = (x.gather(1, chosen)[:, 0][mask[1:]] for x in (p, q))
    d = log_prob - ref
    values = {"log_prob": log_prob, "ref_log_prob": ref, "k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}
    values |= {"abs": d.abs(), "exact": (p.exp() * (p - q)).sum(-1)[mask[1:]]}
    return {name: float(value.sum()) for name, value in values.items()}


def chat_ids(question: str, answer: str) -> tuple[Tensor, Tensor]:
    """A conversation on ChatML, byte by byte, and the mask of the answer with its end token."""
    tokenizer = make_tokenizer()
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    parts = [tokenizer(text).input_ids for text in (prompt, f"{answer}<|im_end|>", "\n")]
    mask = [i == 1 for i, part in enumerate(parts) for _ in part]
    return torch.tensor([i for part in parts for i in part]), torch.tensor(mask)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", CHATS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scores.jsonl"


def answered(text: str) -> dict[str, Any]:
    return {"messages": [user("hi"), assistant(text)]}


def changed(checkpoints: Path, folder: Path, change: Callable[[Tensor], Any]) -> Path:
    """A copy of the model with other weights of its last norm."""
    shutil.copytree(checkpoints / "model", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        change(model.model.norm.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_their_sums_are_those_of_a_plain_forward(cli, data, out, model, reference, temperature):
    names = ["k1", "k2", "k3", "abs", "exact"]
    words = ["score", model, data, "--reference", reference, "--temperature", temperature, "--out", out, "--json"]
    found = json.loads(cli(*words, "--estimator", "k1,k2,k3", "--estimator", "abs,exact").stdout)
    records = read_jsonl(out)
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    for record, chat in zip(records, CHATS, strict=True):
        assert set(record) == KEYS
        assert list(record["kl"]) == names
        ids, mask = chat_ids(*(message["content"] for message in chat["messages"]))
        expected = by_hand(model, reference, ids, mask, temperature)
        assert (record["num_tokens"], record["num_scored"]) == (len(ids), int(mask.sum()))
        values = {**record["kl"], "log_prob": record["log_prob"], "ref_log_prob": record["ref_log_prob"]}
        for name, value in expected.items():
            exponent = 15.0 if name == "k3" else 0.0  # the largest ratio is exp(15)
            terms = FORWARD["terms"] * len(ids)
            assert_near(values[name], value, terms=terms, size=16, exponent=exponent, dtype=torch.float32, msg=name)
    tokens = sum(record["num_scored"] for record in records)
    assert (found["scored"], found["scored_tokens"], found["skipped"]) == (4, tokens, {})
    for name in names:
        total, answers = sum(record["kl"][name] for record in records), found["answers"]["all"]
        assert answers[f"KL {name}"]["per_token"] == pytest.approx(total / tokens)
        assert answers[f"KL {name}"]["per_answer"] == pytest.approx(total / 4)


def test_scores_of_each_token(cli: Cli, tmp_path: Path, out: Path, model: str, reference: str) -> None:
    data = write_jsonl(tmp_path / "chats.jsonl", CHATS[:1])
    cli("score", model, data, "--reference", reference, "--out", out, "--per-token")
    (record,) = read_jsonl(out)
    ids, mask = chat_ids("hi", "hello")
    p, q = (log_softmax(name, ids, 1.0) for name in (model, reference))
    assert record["input_ids"] == ids.tolist()
    assert record["mask"] == mask.int().tolist()
    chosen = {"log_probs": p.gather(1, ids[1:, None])[:, 0], "ref_log_probs": q.gather(1, ids[1:, None])[:, 0]}
    for key, values in {**chosen, "exact_kl": (p.exp() * (p - q)).sum(-1)}.items():
        assert_near(record[key], torch.cat([torch.zeros(1), values]) * mask, **FORWARD, dtype=torch.float32)
    # The output is data itself: token ids and the mask of what was scored.
    again = tmp_path / "again.jsonl"
    cli("score", model, out, "--reference", reference, "--out", again)
    assert_near(read_jsonl(again)[0]["kl"], record["kl"], **FORWARD, dtype=torch.float32)


def test_the_summary_and_its_omissions(cli, tmp_path, data, out, model):
    """One answer has no standard error, no reference means no KL, and two vocabularies have no exact KL."""
    one = write_jsonl(tmp_path / "one.jsonl", CHATS[:1])
    found = json.loads(cli("score", model, one, "--json").stdout)["answers"]["all"]
    assert found["log_prob"]["per_token_error"] is None
    assert found["perplexity"]["value"] == pytest.approx(math.exp(-found["log_prob"]["per_token"]))
    text = cli("score", model, one, "--out", out).stdout
    assert set(read_jsonl(out)[0]) == KEYS - {"ref_log_prob", "kl"}
    assert ("nan" in text, "KL" in text, "perplexity" in text) == (False, False, True)
    wider = make_model(make_tokenizer(), seed=2)
    wider.resize_token_embeddings(wider.config.vocab_size + 4)
    wider.save_pretrained(tmp_path / "wider")
    words = ["score", model, data, "--reference", tmp_path / "wider", "--out", out]
    cli(*words)
    assert list(read_jsonl(out)[0]["kl"]) == ["k1", "k3"]
    assert "cannot be scored: " in error_of(cli(*words, "--estimator", "exact", code=2))
    wider.resize_token_embeddings(2 * wider.config.vocab_size)
    wider.save_pretrained(tmp_path / "wider")
    assert "they differ by more than padding" in error_of(cli(*words, code=2))
    # counts 1, 2, 3 and sums 2, 2, 5. Mean per token 9 / 6; residuals 0.5, -1, 0.5; s.e. sqrt(1.5 * 3 / 2) / 6
    expected = {
        "per_token": 1.5,
        "per_token_error": math.sqrt(1.5 * 3 / 2) / 6,
        "per_answer": 3.0,
        "per_answer_error": math.sqrt(3.0 / 3),  # the variance of 2, 2, 5 is 3
    }
    assert mean_of_answers([1, 2, 3], [2.0, 2.0, 5.0])._asdict() == pytest.approx(expected)


def test_pairs_are_summed_separately_and_token_ids_need_no_tokenizer(cli, tmp_path, out, model):
    pairs = [{"prompt": "a", "chosen": "bcd", "rejected": "ef"}, {"prompt": "g", "chosen": "h", "rejected": ""}]
    result = cli("score", model, write_jsonl(tmp_path / "pairs.jsonl", pairs), "--out", out)
    found = [(r["index"], r["answer"], r.get("num_scored")) for r in read_jsonl(out)]
    assert found == [(0, "chosen", 3), (0, "rejected", 2), (1, "chosen", 1), (1, "rejected", None)]
    counts = [line for line in result.stdout.splitlines() if "answers: " in line]
    assert counts == ["all answers: 3", "chosen answers: 2", "rejected answers: 1"]
    assert "skipped 1, empty: line 2 (rejected): no text to score" in result.stdout
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "bare")
    data = write_jsonl(tmp_path / "ids.jsonl", [{"tokens": [5, 6, 7, 8], "prompt_length": 2}])
    cli("score", tmp_path / "bare", data, "--out", tmp_path / "of_ids")
    log_probs = log_softmax(model, torch.tensor([5, 6, 7, 8]), 1.0)
    expected = float(log_probs[1, 7] + log_probs[2, 8])
    assert_near(read_jsonl(tmp_path / "of_ids")[0]["log_prob"], expected, **FORWARD, dtype=torch.float32)


def calls_of_the_scorer(monkeypatch: pytest.MonkeyPatch, interrupted: int = 0) -> list[Any]:
    """Record the scorer's calls from now on, with Ctrl-C at one of them."""
    calls, own = [], LogProbScorer.run

    def run(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return own(*args, **options)

    monkeypatch.setattr(LogProbScorer, "run", run)
    return calls


ROWS = [*CHATS, "not json", *CHATS, {"messages": []}, *CHATS]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_run_continues_byte_for_byte(cli, tmp_path, monkeypatch, model, reference, at):
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"

    def score(out: Path, interrupted: int = 0, code: int = 0) -> tuple[Any, int]:
        words = ["--reference", reference, "--batch-tokens", 16]  # 4 * 16 tokens: two or three answers in a batch
        with monkeypatch.context() as patch:
            calls = calls_of_the_scorer(patch, interrupted)
            return cli("score", model, data, *words, "--out", out, code=code), len(calls)

    result, every = score(whole)
    parts.write_text("of an earlier run")
    (tmp_path / "parts.jsonl.store").mkdir()
    assert "the same command continues" in error_of(score(parts, at, code=130)[0])
    assert parts.read_text() == "of an earlier run"
    again, rest = score(parts)
    assert (again.stdout, rest) == (result.stdout, every - (at - 1))
    assert parts.read_bytes() == whole.read_bytes()


SAME = ["", "--estimator k1", "--limit 2", "--batch-tokens 512", "--per-token", "no reference"]
NEW = ["more data", "--temperature 2", "--dtype bfloat16", "--reference {model}", "weights", "template"]


@pytest.mark.parametrize("change", SAME + NEW)
def test_stored_scores_are_reused_if_nothing_relevant_changed(
    cli, tmp_path, monkeypatch, checkpoints, data, model, reference, change
) -> None:
    """Scores are the same as without a store, and the scorer is called only if something is new."""
    store, name, found, fresh = tmp_path / "store", Path(model), tmp_path / "found", tmp_path / "fresh"
    cli("score", model, data, "--reference", reference, "--store", store)
    more = [] if change == "no reference" else ["--reference", reference]
    if change == "more data":
        write_jsonl(data, [answered("new"), *CHATS])
    elif change in ("weights", "template"):
        name = changed(checkpoints, tmp_path / "other", lambda weight: weight[0].add_(1e-3 * (change == "weights")))
        template = name / "chat_template.jinja"
        if change == "template":
            template.write_text(template.read_text().replace("im_start", "im_begin"))
    elif change.startswith("--"):
        more += change.format(model=model).split()
    calls = calls_of_the_scorer(monkeypatch)
    cli("score", name, data, *more, "--out", found, "--store", store)
    assert len(calls) == (change in NEW)
    cli("score", name, data, *more, "--out", fresh)
    assert len(read_jsonl(found)) == len(read_jsonl(fresh))
    for one, other in zip(read_jsonl(found), read_jsonl(fresh), strict=True):
        assert set(one) == set(other)
        assert_near(one["log_prob"], other["log_prob"], **FORWARD, dtype=torch.float32)
        for estimator, value in other.get("kl", {}).items():
            assert_near(one["kl"][estimator], value, **(FORWARD | {"size": 16, "exponent": 15.0}), dtype=torch.float32)


def test_skipped_rows_are_counted_with_their_reason(cli, tmp_path, out, model, data):
    bad: list[Any] = [{"messages": "hi"}, {"messages": [{"content": "no role"}]}, {"text": "no layout"}, "[1, 2]"]
    # The text "" is no row.
    rows = [CHATS[0], {"messages": []}, '{"messages": [', "", {"messages": [user("hi")]}, answered("x" * 600)]
    rows += [*bad, CHATS[1]]
    mixed = write_jsonl(tmp_path / "rows.jsonl", rows)
    result = cli("score", model, mixed, "--out", out, "--json")
    found = json.loads(result.stdout)
    assert found["scored"] == 2
    counts = {reason: held["count"] for reason, held in found["skipped"].items()}
    assert counts == {"empty": 1, "malformed": 5, "no assistant turn": 1, "too long": 1}
    first = [text.split(":")[0] for text in found["skipped"]["malformed"]["first"]]
    assert first == ["line 3", "line 7", "line 8", "line 9", "line 10"]
    assert found["skipped"]["too long"]["first"][0].startswith("line 6: 623 tokens, at most 512")
    records = read_jsonl(out)
    assert [record["index"] for record in records] == list(range(10))
    assert [record["index"] for record in records if "skipped" not in record] == [0, 9]
    text = cli("score", model, mixed).stdout
    assert "skipped 5, malformed: line 3: is not JSON" in text
    lengths = [len(chat_ids(*(m["content"] for m in chat["messages"]))[0]) for chat in CHATS]
    found = json.loads(cli("score", model, data, "--max-length", sorted(lengths)[1], "--json").stdout)
    assert (found["scored"], found["skipped"]["too long"]["count"]) == (2, 2)
    cli("score", model, data, "--limit", 3, "--out", tmp_path / "three")
    assert [record["index"] for record in read_jsonl(tmp_path / "three")] == [0, 1, 2]
    nothing = write_jsonl(tmp_path / "nothing.jsonl", [{"messages": []}])
    assert "nothing in" in cli("score", model, nothing, code=1).stderr.splitlines()[-1]  # after the progress


def test_bad_arguments_are_one_line_errors(cli: Cli, tmp_path: Path, data: Path, model: str, reference: str) -> None:
    (tmp_path / "folder").mkdir()
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"question": "hi", "answer": "ho"}])
    pair = [model, data, "--reference", reference]
    for words, text in (
        ([model, tmp_path / "none.jsonl"], "there is no file"),
        ([model, write_jsonl(tmp_path / "blank.jsonl", ["", " "])], "no row"),
        ([model, wrong], f"line 1 of {wrong} has the columns answer, question; expected `messages`"),
        ([tmp_path / "folder", data], "holds no tokenizer"),
        ([tmp_path / "absent", data], "cannot load the tokenizer"),
        ([model, data, "--estimator", "k3"], "add --reference MODEL"),
        ([*pair, "--estimator", "k33"], "Did you mean 'k3'?"),
        ([*pair, "--estimator", "corrected_k3"], "Known: k1, k2"),
        ([model, data, "--temperature", "0"], "temperature must be a finite number of at least 1e-06"),
        ([model, data, "--temperature", "warm"], "(see torchrl-llm-kl score --help)"),
        ([model, data, "--dtype", "float8"], "float8"),
        ([model, data, "--out", tmp_path / "no" / "scores.jsonl"], "create it first"),
        ([model, data, "--out", tmp_path / "folder"], "is a directory (see torchrl-llm-kl score --help)"),
        ([model, data, "--limit", "0"], "(see torchrl-llm-kl score --help)"),
        ([model], "Missing argument"),
        ([model, data, "--device", "cuda:99"], "cuda:99' is not a device of this process"),
    ):
        assert text in error_of(cli("score", *words, code=2)), (words, text)


@pytest.mark.filterwarnings("ignore:.*full forward")
def test_unusable_checkpoints_are_refused(cli: Cli, tmp_path: Path, data: Path, checkpoints: Path, model: str) -> None:
    """A missing chat template, and weights that are not finite in the model or in the reference."""
    plain = shutil.copytree(checkpoints / "model", tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    assert "chat template" in error_of(cli("score", plain, data, code=2))
    folder = changed(checkpoints, tmp_path / "broken", lambda weight: weight.fill_(math.nan))
    found = error_of(cli("score", folder, data, code=2))
    assert found.startswith("rows 0 to 3 (from 0) cannot be scored: the model's log-prob is nan")
    for estimator in ("k1", "exact"):
        found = error_of(cli("score", model, data, "--reference", folder, "--estimator", estimator, code=2))
        assert re.search(r"cannot be scored by \S*broken: .*(is nan|is not finite)", found)


def test_the_page_gets_the_scores_of_the_first_answers(cli, tmp_path, data, out, seen, model, reference):
    cli("score", model, data, "--reference", reference, "--html", tmp_path / "page.html", "--per-token", "--out", out)
    assert seen["html"] == tmp_path / "page.html"
    columns, records = seen["batch"], read_jsonl(out)
    for name, key in (("log_prob", "log_probs"), ("ref_log_prob", "ref_log_probs"), ("kl", "exact_kl")):
        expected = torch.tensor([value for record in records for value in record[key]])
        assert_near(columns.columns[name][columns.mask], expected[columns.mask], **FORWARD)
        assert columns.columns[name][~columns.mask].isnan().all()
    assert columns.mask.int().tolist() == [value for record in records for value in record["mask"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out {0}/chats.jsonl", "DATA and --out are one file"),
        ("--html {0}/chats.jsonl", "DATA and --html are one file"),
        ("--out {0}/./folder/../chats.jsonl", "DATA and --out are one file"),
        ("--out {0}/scores --html {0}/scores", "--out and --html are one file"),
        ("--out {0}/scores --html {0}/scores.store", "--html and the folder of scores are one file"),
        ("--store {0}/chats.jsonl", "{0}/chats.jsonl' is a file"),
        ("--out {0}/notes", "{0}/notes.store holds no scores of an earlier run"),
    ],
)
def test_no_input_or_output_is_overwritten(cli, tmp_path, data, model, options, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes").write_text("mine")
    before = data.read_bytes()
    assert message.format(tmp_path) in error_of(cli("score", model, data, *options.format(tmp_path).split(), code=2))
    assert data.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "folder", "notes"]
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_template_from_a_file_gives_the_same_scores(cli, checkpoints: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "model", base := tmp_path / "base")
    (base / "chat_template.jinja").rename(template := tmp_path / "template.jinja")
    assert "--chat-template FILE" in error_of(cli("score", base, data, code=2))
    outs = [tmp_path / "own.jsonl", tmp_path / "given.jsonl"]
    cli("score", checkpoints / "model", data, "--out", outs[0])
    cli("score", base, data, "--out", outs[1], "--chat-template", template)
    assert read_jsonl(outs[1]) == read_jsonl(outs[0])
    assert "does not exist" in error_of(cli("score", base, data, "--chat-template", tmp_path / "nowhere", code=2))
