"""The inspector without a browser: token texts, summaries by hand, pairs, the data of the page, notebook and terminal."""

import base64
import html
import io
import json
import math
import re
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_llm_kl import Ragged, inspect_tokens
from torchrl_llm_kl.diagnostics import TokenColumns, read_columns
from torchrl_llm_kl.diagnostics._quantities import (
    Quantity,
    Side,
    available,
    pair_rollouts,
    position_bins,
    scale_of,
    step_of,
    token_texts,
    visible,
)
from toy_models import tiny_model
from toy_rollouts import OUTCOMES, collect, make_model, make_policy, make_tokenizer
from toy_tokenizer import Words, build_tokenizer

NAN, INF = math.nan, math.inf
LETTERS = Words(*"abcdefghij")


def columns_of(rows: Any, rewards: list[float] | None = None, **columns: list[float]) -> TokenColumns:
    """A batch of these ids. The first token of each row is its prompt."""
    tokens = Ragged.from_list([torch.tensor(row) for row in rows])
    given = {name: torch.as_tensor(values) for name, values in columns.items()}
    reward = {} if rewards is None else {"reward": torch.tensor(rewards)}
    return TokenColumns(tokens, tokens.positions > 0, given, reward)


def test_tokens_of_a_byte_level_tokenizer_are_its_text() -> None:
    tokenizer = build_tokenizer(merges=[("Ġ", "h"), ("h", "i")])
    text = "hi hi\n🦆 <|im_start|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert [token.text for token in texts[:3]] == ["hi", " h", "i"]
    duck = [token for token in texts if token.data]
    assert b"".join(token.data for token in duck).decode() == "🦆"
    assert [token.text for token in duck] == ["\\xf0", "\\x9f", "\\xa6", "\\x86"]
    assert (texts[-1].text, texts[-1].special) == ("<|im_start|>", True)


PIECES = [("▁the", "the", " the", b""), ("the", "the", "the", b""), ("<0x0A>", "\n", "\n", b"")]
PIECES += [("<0xE2>", "\ufffd", "\\xe2", b"\xe2"), ("Ġâ", " \ufffd", " \\xe2", b" \xe2"), ("\ufffd",) * 3 + (b"",)]


@pytest.mark.parametrize(("piece", "decoded", "text", "data"), PIECES)
def test_pieces_of_other_tokenizers(piece: str, decoded: str, text: str, data: bytes) -> None:
    one = SimpleNamespace(convert_ids_to_tokens=lambda ids: [piece], decode=lambda ids: decoded)
    (token,) = token_texts(one, [7])
    assert (token.text, token.data) == (text, data)


def test_invisible_characters_and_unknown_ids_are_escaped() -> None:
    assert visible("a\u202eb\u200bc\x1b[31m\ud83d") == "a\\u{202e}b\\u{200b}c\\u{1b}[31m\\u{d83d}"
    assert visible("é 🦆\n\tש") == "é 🦆↵\n→\tש"
    assert [token.text for token in token_texts(Words("a"), [0, 5])] == ["a", "⟨id 5⟩"]
    assert token_texts(build_tokenizer(), [100_000])[0].text == "⟨id 100000⟩"


def test_quantities_by_hand() -> None:
    side = Side(
        columns_of(
            [[0, 1, 2], [0, 3]],
            log_prob=[9.0, -1.0, -2.0, 9.0, -1.0],
            old_log_prob=[9.0, -1.5, -2.0, 9.0, -0.5],
            sampler_log_prob=[9.0, -1.25, NAN, 9.0, -0.25],
            ref_log_prob=[9.0, -1.0, -1.0, 9.0, -1.0],
            advantage=[9.0, 1.0, 1.0, 9.0, 1.0],
        ),
        0.2,
        0.28,
    )
    found = {quantity.name: quantity for quantity in available([side])}
    assert list(found) == ["kl", "mismatch", "drift", "advantage", "log_prob", "clipped", "mask"]
    expected = {"drift": [NAN, 0.5, 0, NAN, -0.5], "mismatch": [NAN, -0.25, NAN, NAN, -0.25]}
    expected["kl"] = [NAN, 0, math.e - 2, NAN, 0]  # k3 of log pi - log ref = -1: e - 1 - 1
    for name, values in expected.items():
        torch.testing.assert_close(side.values(found[name]), torch.tensor(values), equal_nan=True)
    drift, kl = found["drift"], found["kl"]
    assert "k3" in kl.label
    assert side.clipped.tolist() == [0, 2, 0, 0, 1]  # the last, with a positive advantage, keeps its gradient
    mean, largest = side.summary(kl)
    torch.testing.assert_close(mean, torch.tensor([(math.e - 2) / 2, 0]))
    torch.testing.assert_close(largest, torch.tensor([math.e - 2, 0]))
    mean, largest = side.summary(drift)  # a mean of sizes: the signed numbers would cancel over rollouts
    assert (mean.tolist(), largest.tolist()) == ([0.25, 0.5], [0.5, 0.5])
    assert [(row, at) for row, at, _ in side.worst(drift, 3)] == [(0, 1), (1, 1), (0, 2)]
    assert position_bins([side]) == (1, 2)
    torch.testing.assert_close(side.profile(drift, side.source.places, 2), torch.tensor([0.5, 0.0]))


def test_infinities_are_the_worst_tokens_and_do_not_stretch_the_scale() -> None:
    side = Side(columns_of([[0] * 6], entropy=[0, 1.0, INF, NAN, 0.3, 0.7]), 0.2, 0.2)
    (entropy, _) = available([side])
    assert side.worst(entropy, 9) == [(0, at, pytest.approx(v)) for at, v in ((2, INF), (1, 1.0), (5, 0.7), (4, 0.3))]
    assert scale_of(entropy, [side]) == 1.0
    assert [step_of(v, 1.0) for v in (0.0, 0.19, 0.2, -0.99, 1.0, INF, -INF, NAN)] == [0, 0, 1, -4, 5, 5, -5, None]
    # Scales are round.
    for top, scale in ((0.0, 1.0), (0.9, 1.0), (1.1, 1.5), (3e-5, 3e-5), (51.0, 60.0)):
        side = Side(columns_of([[0, 1]], entropy=[0, top]), 0.2, 0.2)
        assert scale_of(available([side])[0], [side]) == pytest.approx(scale)


def test_rollouts_are_matched_by_tokens_then_by_prompt() -> None:
    one = Side(columns_of([[1, 2], [1, 3], [1, 4], [5, 2]]), 0.2, 0.2)
    other = Side(columns_of([[1, 9], [1, 3], [1, 2], [6, 2], [1, 8]]), 0.2, 0.2)
    assert pair_rollouts(one, other) == [2, 1, 0, -1]
    # A missing column leaves NaN.
    kl = Quantity("kl", "", "", "size", ("kl",))
    assert bool(one.values(kl).isnan().all())
    assert all(bool(part.isnan().all()) for part in one.summary(kl))
    assert one.worst(kl, 3) == []


def decode_page(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Decode the JSON and the binary elements independently of the page's script."""
    text = path.read_text(encoding="utf-8")
    (meta,) = re.findall(r'<script type="application/json" id="meta">(.*?)</script>', text, re.DOTALL)
    parts = re.findall(r'<script type="text/plain" id="([\w-]+)">(.*?)</script>', text)
    return json.loads(meta), {name: zlib.decompress(base64.b64decode(data), -15) for name, data in parts}


def test_the_list_is_given_where_answers_begin(tmp_path: Path) -> None:
    """The position of the first scored token of each rollout, or the length of a rollout without one."""
    tokens = Ragged.from_list([torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2]), torch.tensor([2, 0, 3])])
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0]).bool()
    columns = TokenColumns(tokens, mask, {"entropy": torch.ones(9)})
    inspect_tokens(columns, Words(*"abcd"), tmp_path / "x.html")
    assert decode_page(tmp_path / "x.html")[0]["sides"][0]["firsts"] == [2, 2, 1]


def test_the_page_holds_the_numbers_of_an_environment_s_rollouts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    policy, reference = make_model(tokenizer, 0), make_model(tokenizer, 1)
    td = collect(tokenizer, make_policy(policy, tokenizer, pad_output=False), envs=2)
    inspection = inspect_tokens(td, tokenizer, tmp_path / "x.html", policy=policy, reference=reference)
    columns = read_columns(td, policy=policy, reference=reference)
    meta, parts = decode_page(tmp_path / "x.html")
    names = [name for name, *_ in meta["columns"]]
    assert {"log_prob", "ref_log_prob", "entropy", "kl"} <= set(names)
    offsets = columns.tokens.offsets.tolist()
    for row in range(2):
        part = slice(offsets[row], offsets[row + 1])
        data, mask = parts[f"r0-{row}"], columns.mask[part]
        count, length = int(mask.sum()), len(mask)
        assert [flag & 1 for flag in data[:length]] == mask.int().tolist()
        planes = np.frombuffer(data[length:], np.uint8).reshape(len(names), 4, count)
        values = np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<f4")[..., 0]
        for name, found in zip(names, values, strict=True):
            expected = columns.columns[name][part][mask].float().numpy()
            np.testing.assert_array_equal(found, expected, err_msg=name)
    numbers = np.ascontiguousarray(np.frombuffer(parts["ids0"], np.uint8).reshape(4, -1).T).view("<u4")[:, 0]
    assert [meta["tokenIds"][i] for i in numbers] == columns.tokens.values.tolist()
    stats = np.frombuffer(base64.b64decode(meta["sides"][0]["stats"]), "<f4").reshape(-1, 2)
    assert stats[0].tolist() == list(OUTCOMES[:2])
    assert stats[1].tolist() == columns.tokens.like(columns.mask.long()).sum().tolist()
    assert inspection.path == tmp_path / "x.html"


def test_no_text_leaves_its_script_element(tmp_path: Path) -> None:
    words = Words("</script><script>alert(1)</script>", "<!--", "\ud83d", "&amp;", "\u2028")
    inspect_tokens(columns_of([[0, 1, 2, 3, 4]]), words, tmp_path / "x.html", title="<b>\ud800</b>")
    meta, _ = decode_page(tmp_path / "x.html")
    assert meta["texts"] == list(words.words)
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in page
    assert "<title>&lt;b&gt;\\u{d800}&lt;/b&gt;</title>" in page


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match=r"columns are already read: pass \['policy'\] to read_columns"):
        inspect_tokens(columns_of([[0, 1]]), LETTERS, None, policy=tiny_model())
    with pytest.raises(ValueError, match="clip_low"):
        inspect_tokens(columns_of([[0, 1]]), LETTERS, None, clip_low=1.5)


def test_nothing_is_written_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inspection = inspect_tokens(columns_of([[0, 1]], entropy=[0.0, 1.0]), LETTERS, None)
    assert repr(inspection) == "Inspection(1 rollouts, not written)"
    assert not list(tmp_path.iterdir())
    assert inspection.write("y.html") == Path("y.html") == inspection.path


def test_a_notebook_shows_the_worst_rollouts_without_scripts() -> None:
    words = Words("<img src=x>", *"bcdefgh")
    columns = columns_of([[0, 1, 2], [0, 3, 4]], rewards=[1.0, 0.5], entropy=[0.0, 0.1, 0.2, 0.0, 2.0, 0.3])
    shown = inspect_tokens(columns, words, None)._repr_html_()
    assert shown.startswith('<iframe sandbox="" ')
    (page,) = re.findall(r'srcdoc="(.*?)"', shown, re.DOTALL)
    page = html.unescape(page)
    assert "<script" not in page
    assert "&lt;img src=x&gt;" in page
    assert page.index("Rollout 1") < page.index("Rollout 0")  # the worst first
    assert '<span class="t w5" title="2">d</span>' in page
    assert "reward 0.5, 2 tokens, entropy mean 1.15, largest 2 nats" in page


def test_a_terminal_shows_coloured_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = pytest.importorskip("rich.console")
    words = Words("prompt ", "fine ", "bad ", "\x1b[2J", "[bold]", "end")
    columns = columns_of([[0, 1, 2, 3, 4, 5]], entropy=[0.0, 0.01, 2.0, 0.3, 0.2, 0.1])
    console = rich.Console(record=True, width=200, force_terminal=True, color_system="truecolor", file=io.StringIO())
    inspection = inspect_tokens(columns, words, None)
    inspection.print(console=console)
    text = console.export_text(styles=True, clear=False)
    assert "48;2;189;65;42mbad " in text  # the strongest warm colour of the style sheet, #bd412a
    plain = console.export_text()
    assert all(part in plain for part in ("prompt fine bad \\u{1b}[2J[bold]end", "rollout 0"))
    console.print(inspection)
    assert "rollout 0" in console.export_text()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"run pip install '\.\[cli\]' in the checkout"):
        inspection.print()
