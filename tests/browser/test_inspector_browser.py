"""The inspector's page in a real browser: numbers, controls, keys, hostile text, no requests, contrast, a narrow window."""

import csv
import json
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspector_tab import NAN, TOKENIZER, Tab, batch, encode, needs_chromium, span
from torchrl_llm_kl import Ragged
from torchrl_llm_kl.diagnostics import TokenColumns
from toy_tokenizer import Words

pytestmark = needs_chromium

INF = math.inf
Show = Callable[..., Tab]


def parts_of(columns: TokenColumns, name: str) -> list[torch.Tensor]:
    """A column, or the difference of two columns, split into rollouts."""
    name, _, less = name.partition(" - ")
    values = columns.columns[name] - (columns.columns[less] if less else 0)
    return list(values.split(columns.tokens.lengths.tolist()))


def means(parts: list[torch.Tensor]) -> list[float]:
    return [float(part[~part.isnan()].double().mean()) for part in parts]


def scale_of(tab: Tab) -> float:
    return float(tab.page.locator("#legend .scale span").last.inner_text().removeprefix("≥ "))


def shade(value: float, scale: float) -> set[str]:
    """The CSS class of a number's colour: warm above 0, cold below 0, in five steps."""
    step = min(5, int(abs(value) / scale * 5))
    return {f"{'w' if value > 0 else 'c'}{step}"} if step else set()


def letters(*rows: list[int], mask: Any = None, rewards: list[float] | None = None, **values: Any) -> TokenColumns:
    """A batch of these ids. By default, all tokens but the first of each row are scored, and the entropy is random."""
    tokens = Ragged.from_list([torch.tensor(row, dtype=torch.long) for row in rows])
    columns = {name: torch.as_tensor(x) for name, x in values.items()} or {"entropy": torch.rand(len(tokens.values))}
    mask = tokens.positions > 0 if mask is None else mask
    return TokenColumns(tokens, mask, columns, {} if rewards is None else {"reward": torch.tensor(rewards)})


@pytest.mark.smoke
def test_the_numbers_of_every_token_equal_the_tensors(tab: Tab, columns: TokenColumns) -> None:
    row = 5  # two turns
    tab.open(row)
    read = tab.page.evaluate(
        """() => [...document.querySelectorAll(".tokens [data-i]")].map((span) => {
             span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
             const cells = [...document.querySelectorAll("#card dd")].map((cell) => [cell.dataset.name, cell.textContent]);
             return [document.querySelector("#card .where").textContent, Object.fromEntries(cells)];
           })"""
    )
    given, at = columns.columns, span(columns, row)
    assert len(read) == at.stop - at.start
    old = given["old_log_prob"]
    expected = {**given, "mismatch": old - given["sampler_log_prob"], "drift": given["log_prob"] - old}
    for i, (where, shown) in enumerate(read, at.start):
        assert f"id {columns.tokens.values[i]} ·" in where
        assert f"token {i - at.start + 1} of {len(read)}" in where
        if not columns.mask[i]:
            assert shown == {}
            continue
        assert set(shown) == {*expected, "reward"}
        for name, values in expected.items():
            assert float(shown[name]) == float(str(np.float32(values[i]))), name  # the shortest such decimal
        assert torch.tensor(float(shown["reward"])) == columns.rows["reward"][row]
        assert f"{columns.places[i] + 1} of the answer" in where
        assert f"turn {columns.turns[i] + 1}" in where


def test_the_list_shows_the_end_of_the_prompt_and_the_answer(show: Show) -> None:
    """All prompts begin with the same words and differ in the last one."""
    start = "Answer the question that follows in a few words, and think before you do. "
    words = Words(start, "One?", "Two?", " Yes", "No")
    mask = torch.tensor([False, False, True, True] * 2)
    tab = show(letters([0, 1, 3, 4], [0, 2, 4, 4], mask=mask), words)
    answers, prompts = zip(
        *(text.split(" ← ") for text in tab.page.locator("#list .row p").all_inner_texts()), strict=True
    )
    assert answers == ("YesNo", "NoNo")
    assert [prompt.split("you do. ")[1] for prompt in prompts] == ["One?", "Two?"]


def test_infinities_nan_and_extreme_numbers_are_shown_exactly(show: Show) -> None:
    values = [0.0, INF, -INF, NAN, 1e-45, -3.4028234663852886e38, 0.1, 16777216.0, -0.0]
    tab = show(letters(list(range(len(values))), advantage=values), Words(*"abcdefghi"))
    for i, value in enumerate(values):
        tab.token(i).hover()
        if i == 0 or math.isnan(value):
            assert tab.card() == {}
        else:
            assert torch.tensor(tab.card()["advantage"]) == torch.tensor(value)
    _, infinite, negative, unknown, *_ = tab.classes()
    assert ("w5" in infinite, "c5" in negative, unknown) == (True, True, {"t", "none"})


def test_colours_follow_the_number_and_clipped_tokens_have_no_gradient(tab: Tab, columns: TokenColumns) -> None:
    tab.page.select_option("#quantity", "advantage")
    scale, advantages = scale_of(tab), parts_of(columns, "advantage")
    for row in (0, 1, 2):
        tab.open(row)
        first = int(columns.mask[span(columns, row)].nonzero()[0])
        classes = tab.classes()
        assert classes[first] - {"t"} == shade(float(advantages[row][first]), scale)
        assert classes[0] == {"t", "out", "special"}
    tab.page.select_option("#quantity", "clipped")
    part = columns.columns
    log_prob = part["log_prob"].clone().requires_grad_()
    ratio, advantage = (log_prob - part["old_log_prob"]).exp(), part["advantage"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    (gradient,) = torch.autograd.grad(surrogate[columns.mask].sum(), log_prob)
    clipped = (gradient == 0) & columns.mask
    kept = ((ratio > 1.28) | (ratio < 0.8)) & ~clipped & columns.mask  # beyond the bounds, with a gradient
    for row in sorted({int(columns.tokens.sequence_ids[found.nonzero()[0]]) for found in (clipped, kept)}):
        tab.open(row)
        for name, found in (("gone", clipped), ("c2", kept)):
            assert [name in names for names in tab.classes()] == found[span(columns, row)].tolist()


def test_charts_show_means_by_position_and_by_turn(tab: Tab, columns: TokenColumns) -> None:
    label = tab.page.locator("#by-position").get_attribute("aria-label")
    assert label == "Mean of KL to the reference (exact) by position in the answer"
    dots = [float(dot.get_attribute("cy")) for dot in tab.page.locator("#by-turn circle").all()]
    path = tab.page.locator("#by-position path").get_attribute("d")
    lines = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    top, zero = 8.0, 86.0  # of the largest value, and of 0: the chart's margins within 104 pixels
    for heights, groups, bound in ((dots, columns.turns, 1e-4), (lines, columns.places, 2e-3)):
        mean = [float(columns.columns["kl"][groups == i].double().mean()) for i in range(int(groups.max()) + 1)]
        assert [(zero - y) / (zero - top) for y in heights] == pytest.approx([x / max(mean) for x in mean], abs=bound)


def test_the_list_is_sorted(tab: Tab, columns: TokenColumns) -> None:
    kl, gaps = parts_of(columns, "kl"), parts_of(columns, "old_log_prob - sampler_log_prob")
    keys = {
        "reward": columns.rows["reward"].tolist(),
        "kl": means(kl),
        "length": columns.tokens.like(columns.mask.long()).sum().tolist(),
        "worst": [float(part.nan_to_num().abs().max()) for part in kl],
        "mismatch": means([gap.abs() for gap in gaps]),
    }
    for by, values in keys.items():
        button = tab.page.locator(f"[data-sort={by}]")
        for sign in (-1, 1):
            button.click()
            assert tab.rows() == sorted(range(12), key=lambda row, x=values, s=sign: (s * x[row], row)), by
        assert "ascending" in button.get_attribute("aria-label")


def test_the_list_and_the_colours_are_filtered_by_text_and_a_threshold(tab: Tab, columns: TokenColumns) -> None:
    for text, rows in (("THE DUCKS", [4, 5, 6, 7]), ("no such text", []), ("", list(range(12)))):
        tab.page.fill("#search", text)
        tab.wait_for("#count", f"{len(rows)} of 12 rollouts" if text else "12 rollouts")
        assert sorted(tab.rows()) == rows
        if text == "THE DUCKS":
            tab.open(5)
            assert "".join(tab.page.locator(".t.hit").all_inner_texts()).lower().strip() == "the ducks"
    kl = parts_of(columns, "kl")
    largest = [float(part.nan_to_num().max()) for part in kl]
    threshold = sorted(largest)[8]
    tab.page.fill("#threshold", repr(threshold))
    first, *_ = expected = [row for row in range(12) if largest[row] >= threshold]
    assert tab.rows() == expected
    tab.open(first)
    weak = [i for i, value in enumerate(kl[first].tolist()) if value < threshold]
    assert [i for i, names in enumerate(tab.classes()) if "weak" in names] == weak


def test_jumps_to_the_worst_tokens(tab: Tab, columns: TokenColumns) -> None:
    kl = columns.columns["kl"].nan_to_num(nan=-1)
    tab.page.click("#tab-worst")
    assert tab.page.locator("#worst button").count() == 200
    tab.page.click("#worst button >> nth=1")
    second = int(kl.argsort(descending=True)[1])
    row = int(columns.tokens.sequence_ids[second])
    tab.wait_for_rollout(row)
    tab.page.wait_for_selector(".t:focus")
    assert tab.focused() == int(columns.tokens.positions[second])
    # n and p walk through the worst of the open rollout.
    worst = kl[span(columns, row)].argsort(descending=True).tolist()
    at = worst.index(tab.focused())
    for key, i in (("n", at + 1), ("p", at)):
        tab.page.keyboard.press(key)
        assert tab.focused() == worst[i]
    tab.token(worst[0]).hover()
    assert f"worst 1 of {int(columns.mask[span(columns, row)].sum())}" in tab.page.inner_text("#card .where")


def test_keyboard_shortcuts(tab: Tab, columns: TokenColumns) -> None:
    page, press = tab.page, tab.page.keyboard.press
    assert page.inner_text("#heading") == "Rollout 0"
    for key, row in (("j", 1), ("j", 2), ("k", 1)):
        press(key)
        tab.wait_for_rollout(row)
    press("n")
    focused = tab.focused()
    assert not page.locator("#card").is_hidden()
    scored = columns.mask[span(columns, 1)].nonzero().flatten().tolist()
    # u hides what is not scored; the focus is not lost with a hidden token.
    first, *_, last = scored
    for key, place in (("ArrowRight", focused + 1), ("Home", 0), ("u", first), ("End", last), ("Home", first)):
        press(key)
        assert tab.focused() == place
    assert not tab.token(0).is_visible()
    gap = next(i for i, after in pairwise(scored) if after > i + 1)
    for _ in range(scored.index(gap) + 1):
        press("ArrowRight")
    assert tab.focused() == scored[scored.index(gap) + 1]
    press("u")
    press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("jkd?")  # letters belong to the field
    assert page.input_value("#search") == "jkd?"
    page.fill("#search", "")
    press("Escape")
    assert page.evaluate("document.activeElement.id") != "search"
    press("c")
    assert page.input_value("#quantity") == "mismatch"
    for key, visible in (("?", True), ("Escape", False)):
        press(key)
        assert page.locator("#keys").is_visible() is visible
    press("d")  # test_text_on_every_colour_is_readable checks the colours
    assert page.get_attribute("#dark", "aria-pressed") == "true"
    page.focus("#list")
    press("ArrowDown")
    tab.wait_for_rollout(2)
    assert page.get_attribute("#list", "aria-activedescendant") == "row-2"


def test_focusable_elements_have_names_and_the_select_shows_its_longest_name(tab: Tab) -> None:
    tab.page.keyboard.press("n")
    unnamed = """nodes => nodes.filter((node) =>
      !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length)).map((node) => node.id)"""
    focusable = "button, select, input, [role=listbox], [role=img]"
    assert tab.page.eval_on_selector_all(focusable, unnamed) == []
    label = tab.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.search(r", id \d+ · token \d+ of \d+ · ", label)
    select, width = tab.page.locator("#quantity"), "select => select.offsetWidth"
    shown = select.evaluate(width)
    select.evaluate("select => { select.id = ''; select.style.width = 'max-content'; }")  # its style has no limit now
    assert shown >= tab.page.locator("select").first.evaluate(width)


def test_a_long_list_contains_only_visible_rows(show: Show) -> None:
    tab = show(letters(*[[1, 2]] * 3000), Words("a", "b", "c"))
    assert tab.page.locator("#list .row").count() < 40
    tab.page.evaluate("document.querySelector('#list').scrollTop = 56 * 2990")
    tab.page.wait_for_selector("#row-2999")
    assert tab.page.locator("#list .row").count() < 40
    tab.open(2995)


def test_rollouts_without_scored_tokens_or_without_any(show: Show) -> None:
    columns = letters([0, 1], [], [2], mask=torch.zeros(3, dtype=torch.bool), rewards=[1.0, NAN, INF])
    tab = show(columns, Words("a", "b", "c"))
    for row, text in ((1, ""), (2, "c"), (0, "ab")):
        tab.open(row)
        assert tab.page.inner_text(".tokens") == text
        tab.page.keyboard.press("n")
    for quantity in ("reward", "mask", "entropy"):
        tab.page.select_option("#quantity", quantity)
    tab.page.click("[data-sort=reward]")
    assert tab.rows() == [2, 0, 1]  # infinity, 1, none


def test_two_batches_side_by_side(show: Show, columns: TokenColumns) -> None:
    other = batch(seed=1)  # the same tokens, other numbers
    tab = show(columns, TOKENIZER, other=other, names=("step 1", "step 9"))
    tab.open(3)
    assert tab.page.locator(".pane").count() == 2
    assert "step 9" in tab.page.locator(".pane >> nth=1").inner_text()
    kl = [parts_of(each, "kl")[3] for each in (columns, other)]
    scored = columns.mask[span(columns, 3)].nonzero().flatten().tolist()
    tab.token(scored[2]).hover()
    assert [torch.tensor(float(text)) for text in tab.texts("#card dd[data-name=kl]")] == [x[scored[2]] for x in kl]
    assert "twin" in tab.classes(1)[scored[2]]
    tab.page.check("#difference")
    scale = scale_of(tab)
    for classes in (tab.classes(0), tab.classes(1)):
        for at in scored:
            assert classes[at] - {"t"} == shade(float(kl[1][at] - kl[0][at]), scale)
    tab.page.uncheck("#difference")
    before, after = (means(parts_of(each, "kl")) for each in (columns, other))
    tab.page.click("[data-sort=change]")
    assert tab.rows() == sorted(range(12), key=lambda row: before[row] - after[row])


def test_answers_that_differ_show_from_where(show: Show) -> None:
    tab = show(letters([0, 1, 2, 3], [4, 1]), Words(*"abcdefg"), other=letters([0, 1, 5, 3], [6, 1]))
    assert "the first 2 tokens agree" in tab.page.locator(".pane >> nth=1").inner_text()
    assert tab.page.locator(".tokens >> nth=0").inner_text() == "aanswerbdiffers from herecd"
    tab.open(1)
    assert "No rollout of B has this prompt." in tab.page.inner_text("#panes")
    assert "1 of B without counterpart" in tab.page.inner_text("#about")


HOSTILE = (
    *("<script>window.hacked = 1</script>", "</script><script>window.hacked = 2</script>", "<!--", "-->"),
    *("<img src=x onerror='window.hacked = 3'>", "<style>body { display: none }</style>", "{{ 7 * 7 }}"),
    *("${window.hacked = 4}", "\u202egnirts", "a\u200bb\u2066c", "\ud83d", "\udc00x", "x" * 10_000, "שלום"),
    *("\x00\x1b[31m", "__proto__", "constructor", '" onmouseover="window.hacked = 5', "e" + "\u0301" * 200),
)


def test_hostile_text_is_only_text(show: Show) -> None:
    ids = list(range(len(HOSTILE)))
    columns = letters(ids, ids[::-1])
    tab = show(columns, Words(*HOSTILE), title=HOSTILE[1], other=columns, names=(HOSTILE[1], HOSTILE[4]))
    for name in ("entropy", "mask"):
        tab.page.select_option("#quantity", name)
    tab.page.click("#tab-worst")
    tab.page.select_option("#quantity", "entropy")
    for i in ids:
        tab.token(i).hover()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.title() == HOSTILE[1]
    shown = tab.texts(".tokens >> nth=0 >> [data-i]")
    assert [shown[0], shown[12], shown[14]] == [HOSTILE[0], HOSTILE[12], "\\u{0}\\u{1b}[31m"]
    assert shown[8:12] == ["\\u{202e}gnirts", "a\\u{200b}b\\u{2066}c", "\\u{d83d}", "\\u{dc00}x"]
    tab.token(12).hover()
    assert "10000 characters" in tab.page.inner_text("#card")
    assert tab.page.locator("#card").bounding_box()["height"] < 400
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.page.click("#tab-rollouts")
    tab.page.fill("#search", "</script>")
    tab.page.wait_for_selector(".t.hit")


def test_parts_of_characters_are_bytes_and_found_as_text(show: Show) -> None:
    ids = [encode(text) for text in ("a: 🦆 quack", "b: no bird", "c: lone \u00e9")]
    columns = letters(ids[0], ids[1] + ids[0][3:5], ids[2])  # the second ends with half a duck
    tab = show(TokenColumns(columns.tokens, columns.mask))
    assert tab.texts(".tokens [data-i]")[3:7] == ["\\xf0", "\\x9f", "\\xa6", "\\x86"]
    for text, rows in (("🦆 Q", [0]), ("É", [2])):
        tab.page.fill("#search", text)
        tab.wait_for("#count", "1 of 3 rollouts")
        assert tab.rows() == rows
        assert tab.page.locator(".t.hit").count() == 6 * (rows == [0])


def test_the_policy_stops_scripts_and_requests(tab: Tab) -> None:
    """Negative control for the tests above: scripts and requests would be detected, and they are blocked."""
    tried = tab.page.evaluate(
        """async () => {
             const out = [], attempt = async (act) => { try { await act(); } catch (error) { out.push(error.name); } };
             await attempt(() => { document.body.innerHTML = "<p>x</p>"; });
             const script = document.createElement("script");
             await attempt(() => { script.textContent = "window.hacked = 1"; });
             document.body.append(script);
             await attempt(() => fetch("https://example.com/"));
             return out;
           }"""
    )
    assert tried == ["TypeError", "TypeError", "TypeError"]
    assert tab.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in message for message in tab.messages)
    tab.messages.clear()


def contrast(*colours: tuple[float, ...]) -> float:
    """The contrast of two sRGB colours from their relative luminances, as in WCAG 2.2."""
    linear = [[c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour] for colour in colours]
    low, high = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in linear)
    return (high + 0.05) / (low + 0.05)


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
def test_text_on_every_colour_is_readable(show: Show, path: Path, scheme: str, switched: bool) -> None:
    """WCAG 2.2 AA requires a contrast of at least 4.5. Tested in the system's scheme and after the switch."""
    tab = show(path, scheme="light" if switched else scheme)
    if switched:
        tab.page.keyboard.press("d")
    tab.page.keyboard.press("n")
    found = tab.page.evaluate(STYLES)
    assert len(found) > 100
    assert len({background for name, _, background in found if re.search(r"\b[wc]\d\b", name)}) == 10
    for name, *colours in found:
        numbers = [tuple(int(c) / 255 for c in re.findall(r"\d+", text)[:3]) for text in colours]
        assert contrast(*numbers) >= 4.5, (name, colours)
    body = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", body))) < 200) is (scheme == "dark")


def test_a_narrow_window_shows_all(show: Show, path: Path) -> None:
    tab = show(path, width=390)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.token(0).bounding_box()["y"] < 600, "the tokens are on the first screen"
    assert not tab.page.locator("#list").is_visible()
    tab.page.click("#menu")
    tab.open(4)
    assert not tab.page.locator("#list").is_visible()
    tab.page.click("#menu")
    tab.page.keyboard.press("n")
    box = tab.page.locator("#card").bounding_box()
    assert 0 <= box["x"] <= 390 - box["width"]
    assert box["y"] + box["height"] <= 800
    outside = """nodes => nodes.filter((node) => node.getClientRects().length &&
      node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.id || node.className)"""
    assert tab.page.eval_on_selector_all("button, select, input, .t", outside) == []


def test_answers_to_one_prompt_are_a_group(tab: Tab, columns: TokenColumns) -> None:
    """The group shows mean and deviation of the rewards and is sorted by deviation. Its chips lead to the answers."""
    rewards = columns.rows["reward"].reshape(3, 4)
    tab.page.click("#tab-prompts")
    tab.page.click("#prompt-columns [data-sort=deviation]")
    order = rewards.std(1).argsort(descending=True).tolist()
    assert [text.split()[1] for text in tab.texts("#prompts b")] == [str(prompt) for prompt in order]
    mean, deviation = (f"{float(f(rewards[order[0]])):.3g}" for f in (torch.mean, torch.std))
    assert f"mean {mean} · deviation {deviation} ·" in tab.texts("#prompts button")[0]
    tab.page.click("#prompts button >> nth=0")
    tab.wait_for_rollout(4 * order[0])
    assert [float(text) for text in tab.texts("#group .chip")] == pytest.approx(rewards[order[0]].tolist(), rel=5e-3)
    tab.page.click("#group button >> nth=2")
    tab.wait_for_rollout(4 * order[0] + 2)
    assert tab.page.get_attribute("#group button >> nth=2", "aria-current") == "true"


def test_prompts_without_numbers_are_compared_by_tokens(show: Show) -> None:
    tab = show(letters([0, 1], [2, 1], [0, 2], rewards=[0.0, 0.5, 1.0]), Words("a", "b", "c"))
    assert tab.page.locator("#group button").count() == 2
    assert "mean 0.5 · deviation 0.707 · 0 to 1" in tab.page.inner_text("#group")
    tab.open(1)
    assert not tab.page.locator("#group").is_visible()


def test_named_rewards_are_columns_and_rewards_a_histogram(show: Show) -> None:
    columns = letters(*[[1, 2]] * 6, rewards=[0.0, 0.0, 1.0, 1.0, 1.0, NAN])
    columns.rows["reward/format"] = torch.tensor([0.5, 0.25, 0.0, 0.125, 1.0, 0.75])
    tab = show(columns, Words("a", "b", "c"))
    tab.page.click("[data-sort='reward/format']")
    assert tab.rows() == [4, 5, 0, 1, 3, 2]
    tab.open(4)
    assert "format 1" in tab.page.inner_text("#facts")
    assert tab.texts("#rewards rect title") == ["2 rollouts with 0", "3 rollouts with 1"]
    low, high = (float(bar.get_attribute("height")) for bar in tab.page.locator("#rewards rect").all())
    assert low / high == pytest.approx(2 / 3)


def test_a_worst_token_is_listed_with_its_neighbours(show: Show) -> None:
    values = [0.0, 0.1, 0.2, 3.0, 0.1]
    tab = show(letters([0, 1, 2, 3, 4], entropy=values), Words("Why?", " It", " is", " half", " past"))
    tab.page.click("#tab-worst")
    assert tab.texts("#worst li:first-child .near > *") == ["Why? It is", " half", " past"]
    box, shown = (tab.page.locator(f"#worst .near >> nth=0{part}").bounding_box() for part in ("", " >> b"))
    assert box["x"] <= shown["x"] < shown["x"] + shown["width"] <= box["x"] + box["width"]


def test_the_address_chooses_quantity_order_and_token(tab: Tab, columns: TokenColumns) -> None:
    largest = [float(part.nan_to_num().max()) for part in parts_of(columns, "entropy")]
    first, *_ = order = sorted(range(12), key=lambda row: -largest[row])
    addresses = {"#quantity=entropy&sort=worst": first, "#row=7&token=9": 7, "#row=99&token=x": first}
    for address, row in addresses.items():
        tab.page.evaluate("address => { location.hash = address; }", address)
        tab.wait_for_rollout(row)
    assert tab.rows() == order
    assert tab.page.input_value("#quantity") == "entropy"


read_strictly = partial(json.loads, parse_constant=pytest.fail)


def saved(tab: Tab, kind: str) -> list[dict[str, Any]]:
    """The rows of a file that the page saves."""
    with tab.page.expect_download() as download:
        tab.page.click(f"#{kind}")
    assert download.value.suggested_filename == f"rollouts.{kind}"
    with download.value.path().open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines) if kind == "csv" else map(read_strictly, lines))


def test_the_listed_rollouts_are_saved(tab: Tab, columns: TokenColumns) -> None:
    tab.page.fill("#search", "the ducks")
    tab.wait_for("#count", "4 of 12 rollouts")
    tab.page.click("[data-sort=reward]")
    order = sorted([4, 5, 6, 7], key=lambda row: -float(columns.rows["reward"][row]))
    rows, table = saved(tab, "jsonl"), saved(tab, "csv")
    assert [row["row"] for row in rows] == order
    for row in rows:
        part = span(columns, row["row"])
        assert row["ids"] == columns.tokens.values[part].tolist()
        assert row["text"] == TOKENIZER.decode(row["ids"])
        assert row["scored"] == columns.mask[part].tolist()
        assert row["reward"] == float(str(np.float32(columns.rows["reward"][row["row"]])))
        numbers = torch.tensor([math.nan if x is None else x for x in row["kl"]])
        assert torch.equal(numbers.nan_to_num(-1), columns.columns["kl"][part].nan_to_num(-1))
    assert [(int(row["row"]), row["text"]) for row in table] == [(row["row"], row["text"]) for row in rows]
    assert [float(row["kl_mean"]) for row in table] == [row["kl_mean"] for row in rows]


def test_saved_files_contain_no_formulas_and_only_valid_json(show: Show) -> None:
    tab = show(letters([0, 1, 2], advantage=[NAN, INF, 1.0]), Words('=HYPERLINK("x")', "\n", ","))
    (row,) = saved(tab, "jsonl")
    assert row["advantage"] == [None, "Infinity", 1.0]
    assert saved(tab, "csv")[0]["text"] == '\'=HYPERLINK("x")\n,'


def test_a_print_shows_the_open_rollout_in_light_colours(show: Show, path: Path) -> None:
    tab = show(path, scheme="dark")
    tab.page.emulate_media(media="print")
    for selector, visible in (("aside", False), (".bar", False), (".tokens", True)):
        assert tab.page.locator(selector).is_visible() is visible
    white = "node => getComputedStyle(node).backgroundColor === 'rgb(255, 255, 255)'"
    assert tab.page.eval_on_selector(".pane", white)
    assert tab.page.eval_on_selector("#detail", "node => getComputedStyle(node).overflow") == "visible"
