"""The inspector's page in a real browser: numbers, controls, keys, hostile text, no requests, contrast, a narrow window."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from inspector_tab import NAN, TOKENIZER, Tab, batch, encode, needs_chromium
from torchrl_llm_kl import Ragged, inspect_tokens
from torchrl_llm_kl.diagnostics import TokenColumns
from toy_tokenizer import Words

pytestmark = needs_chromium

INF = math.inf


def means(columns: TokenColumns, name: str) -> list[float]:
    parts = columns.columns[name].split(columns.tokens.lengths.tolist())
    return [float(part[~part.isnan()].double().mean()) for part in parts]


# ---------------------------------------------------------------------- numbers


def test_the_numbers_of_every_token_equal_the_tensors(tab: Tab, columns: TokenColumns) -> None:
    row = 5  # two turns
    start, end = columns.tokens.offsets[row].item(), columns.tokens.offsets[row + 1].item()
    tab.open(row)
    read = tab.page.evaluate(
        """() => [...document.querySelectorAll(".tokens [data-i]")].map((span) => {
             span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
             const cells = [...document.querySelectorAll("#card dd")].map((cell) => [cell.dataset.name, cell.textContent]);
             return [document.querySelector("#card .where").textContent, Object.fromEntries(cells)];
           })"""
    )
    assert len(read) == end - start
    given = columns.columns
    expected = {
        **given,
        "mismatch": given["old_log_prob"] - given["sampler_log_prob"],
        "drift": given["log_prob"] - given["old_log_prob"],
    }
    for i, (where, shown) in enumerate(read):
        token, scored = int(columns.tokens.values[start + i]), bool(columns.mask[start + i])
        assert f"id {token} ·" in where
        assert f"token {i + 1} of {end - start}" in where
        if not scored:
            assert shown == {}
            continue
        assert set(shown) == {*expected, "reward"}
        for name, values in expected.items():
            assert float(shown[name]) == float(str(np.float32(values[start + i]))), name  # the shortest such decimal
        assert torch.tensor(float(shown["reward"])) == columns.rows["reward"][row]
        assert f"{columns.places[start + i] + 1} of the answer" in where
        assert f"turn {columns.turns[start + i] + 1}" in where


def test_numbers_that_are_rare(show: Callable[..., Tab], tmp_path: Path) -> None:
    values = [0.0, INF, -INF, NAN, 1e-45, -3.4028234663852886e38, 0.1, 16777216.0, -0.0]
    tokens = Ragged.from_list([torch.arange(len(values))])
    columns = TokenColumns(tokens, tokens.positions > 0, {"advantage": torch.tensor(values)})
    inspect_tokens(columns, Words(*"abcdefghi"), path := tmp_path / "x.html")
    tab = show(path)
    for i, value in enumerate(values):
        tab.token(i).hover()
        shown = tab.card()
        if i == 0 or math.isnan(value):
            assert shown == {}
        else:
            assert torch.tensor(shown["advantage"]) == torch.tensor(value)
    classes = tab.classes()
    assert classes[3] == {"t", "none"}
    assert "w5" in classes[1]
    assert "c5" in classes[2]


def test_colours_follow_the_number(tab: Tab, columns: TokenColumns) -> None:
    tab.page.select_option("#quantity", "advantage")
    scale = float(tab.page.locator("#legend .scale span").last.inner_text().removeprefix("≥ "))
    for row in (0, 1, 2):
        tab.open(row)
        first = int(columns.mask[columns.tokens.offsets[row] :].nonzero()[0])
        value = float(columns.columns["advantage"][columns.tokens.offsets[row] + first])
        step = min(5, int(abs(value) / scale * 5))
        classes = tab.classes()
        assert classes[first] - {"t"} == ({f"{'w' if value > 0 else 'c'}{step}"} if step else set())
        assert classes[0] == {"t", "out", "special"}


def test_clipped_tokens_are_those_without_gradient(tab: Tab, columns: TokenColumns) -> None:
    tab.page.select_option("#quantity", "clipped")
    part = columns.columns
    log_prob = part["log_prob"].clone().requires_grad_()
    ratio, advantage = (log_prob - part["old_log_prob"]).exp(), part["advantage"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    (gradient,) = torch.autograd.grad(surrogate[columns.mask].sum(), log_prob)
    clipped = (gradient == 0) & columns.mask
    kept = ((ratio > 1.28) | (ratio < 0.8)) & ~clipped & columns.mask  # beyond the bounds, with a gradient
    rows = sorted({int(columns.tokens.sequence_ids[found.nonzero()[0]]) for found in (clipped, kept)})
    for row in rows:
        start, end = columns.tokens.offsets[row : row + 2].tolist()
        tab.open(row)
        classes = tab.classes()
        assert [("gone" in names) for names in classes] == clipped[start:end].tolist()
        assert [("c2" in names) for names in classes] == kept[start:end].tolist()


def test_charts_show_means_by_position_and_by_turn(tab: Tab, columns: TokenColumns) -> None:
    label = tab.page.locator("#by-position").get_attribute("aria-label")
    assert label == "Mean of KL to the reference (exact) by position in the answer"
    turn = [float(columns.columns["kl"][columns.turns == t].double().mean()) for t in (0, 1)]
    dots = tab.page.eval_on_selector_all("#by-turn circle", "dots => dots.map(dot => Number(dot.getAttribute('cy')))")
    top, zero = 8.0, 86.0  # of the largest value, and of 0: the chart's margins within 104 pixels
    assert [(zero - y) / (zero - top) for y in dots] == pytest.approx([value / max(turn) for value in turn], abs=1e-4)
    path = tab.page.locator("#by-position path").get_attribute("d")
    places = columns.places
    expected = [float(columns.columns["kl"][places == place].double().mean()) for place in range(int(places.max()) + 1)]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert [(zero - y) / (zero - top) for y in heights] == pytest.approx(
        [v / max(expected) for v in expected], abs=2e-3
    )


# ---------------------------------------------------------------------- controls


def test_the_list_is_sorted(tab: Tab, columns: TokenColumns) -> None:
    lengths = columns.tokens.lengths.tolist()
    gap = (columns.columns["old_log_prob"] - columns.columns["sampler_log_prob"]).abs()
    keys = {
        "reward": columns.rows["reward"].tolist(),
        "kl": means(columns, "kl"),
        "length": columns.tokens.like(columns.mask.long()).sum().tolist(),
        "worst": [float(part.nan_to_num().abs().max()) for part in columns.columns["kl"].split(lengths)],
        "mismatch": [float(part[~part.isnan()].double().mean()) for part in gap.split(lengths)],
    }
    for by, values in keys.items():
        button = tab.page.locator(f"[data-sort={by}]")
        button.click()
        assert tab.rows() == sorted(range(12), key=lambda row, values=values: (-values[row], row)), by
        button.click()
        assert tab.rows() == sorted(range(12), key=lambda row, values=values: (values[row], row)), by
        assert "ascending" in button.get_attribute("aria-label")


def test_the_list_is_filtered_by_text(tab: Tab) -> None:
    tab.page.fill("#search", "THE DUCKS")
    tab.wait_for("#count", "4 of 12 rollouts")
    assert tab.rows() == [4, 5, 6, 7]
    tab.open(5)
    hits = tab.page.locator(".t.hit").all_inner_texts()
    assert "".join(hits).lower().strip() == "the ducks"
    tab.page.fill("#search", "no such text")
    tab.wait_for("#count", "0 of 12 rollouts")
    assert tab.rows() == []
    tab.page.fill("#search", "")
    tab.wait_for("#count", "12 rollouts")


def test_the_list_and_the_colours_are_filtered_by_a_threshold(tab: Tab, columns: TokenColumns) -> None:
    kl = columns.columns["kl"].split(columns.tokens.lengths.tolist())
    largest = [float(part.nan_to_num().max()) for part in kl]
    threshold = sorted(largest)[8]
    tab.page.fill("#threshold", repr(threshold))
    expected = [row for row in range(12) if largest[row] >= threshold]
    assert tab.rows() == expected
    tab.open(expected[0])
    weak = [i for i, value in enumerate(kl[expected[0]].tolist()) if value < threshold]
    assert [i for i, names in enumerate(tab.classes()) if "weak" in names] == weak


def test_jumps_to_the_worst_tokens(tab: Tab, columns: TokenColumns) -> None:
    kl = columns.columns["kl"]
    order = kl.nan_to_num(nan=-1).argsort(descending=True)
    tab.page.click("#tab-worst")
    shown = tab.page.locator("#worst button").all()
    assert len(shown) == 200
    shown[1].click()
    second = int(order[1])
    row = int(columns.tokens.sequence_ids[second])
    tab.wait_for_rollout(row)
    tab.page.wait_for_selector(".t:focus")
    assert tab.focused() == int(columns.tokens.positions[second])
    # n and p walk through the worst of the open rollout.
    start, end = columns.tokens.offsets[row : row + 2].tolist()
    worst = kl[start:end].nan_to_num(nan=-1).argsort(descending=True).tolist()
    at = worst.index(tab.focused())
    tab.page.keyboard.press("n")
    assert tab.focused() == worst[at + 1]
    tab.page.keyboard.press("p")
    assert tab.focused() == worst[at]
    tab.token(worst[0]).hover()
    assert f"worst 1 of {int(columns.mask[start:end].sum())}" in tab.page.inner_text("#card .where")


def test_keys(tab: Tab, columns: TokenColumns) -> None:
    page = tab.page
    assert tab.heading() == "Rollout 0"
    for key, row in (("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        tab.wait_for_rollout(row)
    page.keyboard.press("n")
    focused = tab.focused()
    assert not page.locator("#card").is_hidden()
    page.keyboard.press("ArrowRight")
    assert tab.focused() == focused + 1
    page.keyboard.press("Home")
    assert tab.focused() == 0
    page.keyboard.press("u")
    start, end = columns.tokens.offsets[1:3].tolist()
    scored = columns.mask[start:end].nonzero().flatten().tolist()
    assert not tab.token(0).is_visible()
    assert tab.focused() == scored[0]  # the focus is not lost with the hidden token
    page.keyboard.press("End")
    assert tab.focused() == scored[-1]
    page.keyboard.press("Home")
    assert tab.focused() == scored[0]
    gap = next(i for i, after in pairwise(scored) if after > i + 1)
    for _ in range(scored.index(gap) + 1):
        page.keyboard.press("ArrowRight")
    assert tab.focused() == scored[scored.index(gap) + 1]
    page.keyboard.press("u")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("jkd?")  # letters belong to the field
    assert page.input_value("#search") == "jkd?"
    page.fill("#search", "")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "search"
    page.keyboard.press("c")
    assert page.input_value("#quantity") == "mismatch"
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("d")
    assert page.evaluate(background) != light
    assert page.get_attribute("#dark", "aria-pressed") == "true"
    page.focus("#list")
    page.keyboard.press("ArrowDown")
    tab.wait_for_rollout(2)
    assert page.get_attribute("#list", "aria-activedescendant") == "row-2"


def test_what_is_focusable_has_a_name_and_a_role(tab: Tab) -> None:
    tab.page.keyboard.press("n")
    unnamed = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, [role=listbox], [role=img]")].filter((node) =>
             !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length)).map((node) => node.id)"""
    )
    assert unnamed == []
    label = tab.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.search(r", id \d+ · token \d+ of \d+ · ", label)


def test_a_long_list_holds_only_what_is_seen(show: Callable[..., Tab], tmp_path: Path) -> None:
    tokens = Ragged.from_list([torch.tensor([1, 2])] * 3000)
    columns = TokenColumns(tokens, tokens.positions > 0, {"entropy": torch.rand(6000)})
    inspect_tokens(columns, Words("a", "b", "c"), path := tmp_path / "x.html")
    tab = show(path)
    assert tab.page.locator("#list .row").count() < 40
    tab.page.evaluate("document.querySelector('#list').scrollTop = 56 * 2990")
    tab.page.wait_for_selector("#row-2999")
    assert tab.page.locator("#list .row").count() < 40
    tab.open(2995)


def test_rollouts_without_scored_tokens_or_without_any(show: Callable[..., Tab], tmp_path: Path) -> None:
    tokens = Ragged.from_list([torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([2])])
    rewards = {"reward": torch.tensor([1.0, NAN, INF])}
    columns = TokenColumns(tokens, torch.zeros(3, dtype=torch.bool), {"entropy": torch.rand(3)}, rewards)
    inspect_tokens(columns, Words("a", "b", "c"), path := tmp_path / "x.html")
    tab = show(path)
    for row, text in ((1, ""), (2, "c"), (0, "ab")):
        tab.open(row)
        assert tab.page.inner_text(".tokens") == text
        tab.page.keyboard.press("n")
    for quantity in ("reward", "mask", "entropy"):
        tab.page.select_option("#quantity", quantity)
    tab.page.click("[data-sort=reward]")
    assert tab.rows() == [2, 0, 1]  # infinity, 1, none


# ---------------------------------------------------------------------- two batches


def test_two_batches_side_by_side(show: Callable[..., Tab], tmp_path: Path, columns: TokenColumns) -> None:
    other = batch(seed=1)  # the same tokens, other numbers
    path = tmp_path / "x.html"
    inspect_tokens(columns, TOKENIZER, path, other=other, names=("step 1", "step 9"))
    tab = show(path)
    tab.open(3)
    assert tab.page.locator(".pane").count() == 2
    assert "step 9" in tab.page.locator(".pane >> nth=1").inner_text()
    start, end = columns.tokens.offsets[3:5].tolist()
    i = int(columns.mask[start:end].nonzero()[2])
    tab.token(i).hover()
    shown = tab.page.eval_on_selector_all("#card dd[data-name=kl]", "cells => cells.map(cell => cell.textContent)")
    pair = (columns.columns["kl"][start + i], other.columns["kl"][start + i])
    assert [torch.tensor(float(text)) for text in shown] == list(pair)
    assert "twin" in tab.classes(1)[i]
    tab.page.check("#difference")
    change = other.columns["kl"][start:end] - columns.columns["kl"][start:end]
    scale = float(tab.page.locator("#legend .scale span").last.inner_text().removeprefix("≥ "))
    for classes in (tab.classes(0), tab.classes(1)):
        for at in columns.mask[start:end].nonzero().flatten().tolist():
            step = min(5, int(abs(float(change[at])) / scale * 5))
            assert classes[at] - {"t"} == ({f"{'w' if change[at] > 0 else 'c'}{step}"} if step else set())
    tab.page.uncheck("#difference")
    mean = [b - a for a, b in zip(means(columns, "kl"), means(other, "kl"), strict=True)]
    tab.page.click("[data-sort=change]")
    assert tab.rows() == sorted(range(12), key=lambda row: -mean[row])


def test_answers_that_differ_show_from_where(show: Callable[..., Tab], tmp_path: Path) -> None:
    def one(*rows: list[int]) -> TokenColumns:
        tokens = Ragged.from_list([torch.tensor(row) for row in rows])
        return TokenColumns(tokens, tokens.positions > 0, {"entropy": torch.ones(len(tokens.values))})

    path = tmp_path / "x.html"
    inspect_tokens(one([0, 1, 2, 3], [4, 1]), Words(*"abcdefg"), path, other=one([0, 1, 5, 3], [6, 1]))
    tab = show(path)
    assert "the first 2 tokens agree" in tab.page.locator(".pane >> nth=1").inner_text()
    assert tab.page.locator(".tokens >> nth=0").inner_text() == "aanswerbdiffers from herecd"
    tab.open(1)
    assert "No rollout of B has this prompt." in tab.page.inner_text("#panes")
    assert "1 of B without counterpart" in tab.page.inner_text("#about")


# ---------------------------------------------------------------------- hostile text

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    "<!--",
    "-->",
    "<img src=x onerror='window.hacked = 3'>",
    "<style>body { display: none }</style>",
    "{{ 7 * 7 }}",
    "${window.hacked = 4}",
    "\u202egnirts",
    "a\u200bb\u2066c",
    "\ud83d",
    "\udc00x",
    "x" * 10_000,
    "שלום",
    "\x00\x1b[31m",
    "__proto__",
    "constructor",
    '" onmouseover="window.hacked = 5',
    "e" + "\u0301" * 200,
)


def test_hostile_text_is_only_text(show: Callable[..., Tab], tmp_path: Path) -> None:
    count = len(HOSTILE)
    tokens = Ragged.from_list([torch.arange(count), torch.arange(count).flip(0)])
    columns = TokenColumns(tokens, tokens.positions > 0, {"entropy": torch.rand(2 * count)})
    path, hostile = tmp_path / "x.html", HOSTILE[1]
    inspect_tokens(columns, Words(*HOSTILE), path, title=hostile, other=columns, names=(hostile, HOSTILE[4]))
    tab = show(path)
    for name in ("entropy", "mask"):
        tab.page.select_option("#quantity", name)
    tab.page.click("#tab-worst")
    tab.page.select_option("#quantity", "entropy")
    for i in range(count):
        tab.token(i).hover()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.title() == hostile
    shown = tab.page.locator(".tokens >> nth=0 >> [data-i]").all_text_contents()
    assert shown[0] == HOSTILE[0]
    assert shown[8:12] == ["\\u{202e}gnirts", "a\\u{200b}b\\u{2066}c", "\\u{d83d}", "\\u{dc00}x"]
    assert shown[12] == HOSTILE[12]
    assert shown[14] == "\\u{0}\\u{1b}[31m"
    tab.token(12).hover()
    assert "10000 characters" in tab.page.inner_text("#card")
    assert tab.page.locator("#card").bounding_box()["height"] < 400
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert tab.page.evaluate(wide)
    tab.page.click("#tab-rollouts")
    tab.page.fill("#search", "</script>")
    tab.page.wait_for_selector(".t.hit")


def test_parts_of_characters_are_bytes_and_found_as_text(show: Callable[..., Tab], tmp_path: Path) -> None:
    ids = [torch.tensor(encode(text)) for text in ("a: 🦆 quack", "b: no bird", "c: lone \u00e9")]
    ids[1] = torch.cat([ids[1], ids[0][3:5]])  # half a duck
    tokens = Ragged.from_list(ids)
    inspect_tokens(TokenColumns(tokens, tokens.positions > 0), TOKENIZER, path := tmp_path / "x.html")
    tab = show(path)
    assert tab.page.locator(".tokens [data-i]").all_text_contents()[3:7] == ["\\xf0", "\\x9f", "\\xa6", "\\x86"]
    tab.page.fill("#search", "🦆 Q")
    tab.wait_for("#count", "1 of 3 rollouts")
    assert tab.page.locator(".t.hit").count() == 6
    tab.page.fill("#search", "É")
    tab.wait_for("#count", "1 of 3 rollouts")
    assert tab.rows() == [2]


def test_the_policy_stops_scripts_and_requests(tab: Tab) -> None:
    """A control for the tests above: what they rule out would be seen, and is blocked."""
    tried = tab.page.evaluate(
        """async () => {
             const out = [];
             try { document.body.innerHTML = "<p>x</p>"; } catch (error) { out.push(error.name); }
             const script = document.createElement("script");
             try { script.textContent = "window.hacked = 1"; } catch (error) { out.push(error.name); }
             document.body.append(script);
             try { await fetch("https://example.com/"); } catch (error) { out.push(error.name); }
             return out;
           }"""
    )
    assert tried == ["TypeError", "TypeError", "TypeError"]
    assert tab.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in message for message in tab.messages)
    tab.messages.clear()


# ---------------------------------------------------------------------- looks


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of sRGB, as WCAG 2.2 defines it."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_by_hand() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast((119 / 255,) * 3, (1, 1, 1)) == pytest.approx(4.48, abs=0.01)  # #777 on white just fails


STYLES = """() => {
  const pane = document.querySelector(".tokens"), probe = document.createElement("span");
  pane.append(probe);
  const opaque = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
  };
  const names = ["t", "t out", "t none", "t weak", "t out special", "t special w5", "mark"];
  for (const side of "wc") for (let step = 1; step <= 5; step++) names.push(`t ${side}${step}`);
  const out = names.map((name) => {
    probe.className = name;
    return [name, getComputedStyle(probe).color, opaque(probe)];
  });
  probe.remove();
  const hasText = (node) => node.value || [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const tags = "button, label, p, h1, h2, b, small, span, dt, dd, summary, figcaption, input";
  for (const node of document.querySelectorAll(tags))
    if (node.getClientRects().length && hasText(node))
      out.push([node.id || node.className || node.tagName, getComputedStyle(node).color, opaque(node)]);
  for (const node of document.querySelectorAll("svg text"))
    out.push(["svg text", getComputedStyle(node).fill, opaque(node.closest("figure"))]);
  return out;
}"""


@pytest.mark.parametrize(("scheme", "switched"), [("light", False), ("dark", False), ("dark", True)])
def test_text_on_every_colour_is_readable(show: Callable[..., Tab], path: Path, scheme: str, switched: bool) -> None:
    """WCAG 2.2 AA: a contrast of at least 4.5, in the system's scheme and in that of the switch."""
    tab = show(path, scheme=("light" if scheme == "dark" else "dark") if switched else scheme)
    if switched:
        tab.page.keyboard.press("d")
    tab.page.keyboard.press("n")
    found = tab.page.evaluate(STYLES)
    assert len(found) > 100
    colours = {background for name, _, background in found if re.search(r"\b[wc]\d\b", name)}
    assert len(colours) == 10
    for name, colour, background in found:
        one, other = (tuple(int(c) / 255 for c in re.findall(r"\d+", text)[:3]) for text in (colour, background))
        assert contrast(one, other) >= 4.5, (name, colour, background)
    body = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", body))) < 200) is (scheme == "dark")


def test_a_narrow_window_shows_all(show: Callable[..., Tab], path: Path) -> None:
    tab = show(path, width=390, height=800)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    tab.open(4)
    tab.page.keyboard.press("n")
    box = tab.page.locator("#card").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= 800
    outside = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, .t")].filter((node) => node.getClientRects().length &&
             node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.id || node.className)"""
    )
    assert outside == []


def test_a_print_shows_the_open_rollout_in_light_colours(show: Callable[..., Tab], path: Path) -> None:
    tab = show(path, scheme="dark")
    tab.page.emulate_media(media="print")
    assert not tab.page.locator("aside").is_visible()
    assert not tab.page.locator(".bar").is_visible()
    assert tab.page.locator(".tokens").is_visible()
    pane = "getComputedStyle(document.querySelector('.pane')).backgroundColor"
    assert tab.page.evaluate(pane) == "rgb(255, 255, 255)"
    assert tab.page.evaluate("getComputedStyle(document.querySelector('#detail')).overflow") == "visible"
