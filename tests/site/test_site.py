"""The site builds without a warning; every link and anchor resolves, nothing is fetched, every public name has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from built_site import PROJECT, Page, Site
from scripts import script

pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

pytestmark = pytest.mark.slow  # the build takes half a minute


api = script("docs/build_api.py")
hooks = script("docs/site_hooks.py")
NAMES = [(layer, name) for layer in api.ORDER for name in api.public_names(layer)]


def test_every_page_of_the_docs_is_in_the_site(site: Site) -> None:
    pages = {path.stem for path in PROJECT.glob("docs/*.md")} - {"index"}
    assert [page for page in sorted(pages) if not (site.folder / page / "index.html").is_file()] == []
    for outside in ("CHANGELOG", "CONTRIBUTING", "benchmarks/RESULTS", "benchmarks/RAY", "benchmarks/profile"):
        assert (site.folder / outside / "index.html").is_file()


def test_every_link_leads_somewhere(site: Site) -> None:
    """Files and anchors, found in the HTML alone."""
    broken, checked = [], 0
    for page in site.pages.values():
        if page.path.name == "404.html":
            continue  # its links are from the root of a server
        for target in [*page.links, *page.loads]:
            if re.match(r"[a-z]+:", target):
                continue
            path, anchor = site.resolve(page, target)
            checked += 1
            there = path.is_file() and (not anchor or path.suffix != ".html" or anchor in site.pages[path].anchors)
            if not there:
                broken.append(f"{page.path.relative_to(site.folder)}: {target}")
    assert broken == []
    assert checked > 5000


def test_nothing_is_fetched_from_elsewhere(site: Site) -> None:
    for page in site.pages.values():
        assert [source for source in page.loads if re.match(r"[a-z]+:|//", source)] == []
    for sheet in site.folder.rglob("*.css"):
        assert not re.search(r"@import|url\((?!['\"]?data:)['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


def test_every_public_name_has_an_anchor_and_a_link_in_the_table_of_names(site: Site) -> None:
    anchors = {anchor for layer in api.ORDER for anchor in site.page(f"reference/{layer}").anchors}
    names = {f"torchrl_llm_kl.{layer}.{name}" for layer, name in NAMES}
    assert (names | {f"torchrl_llm_kl.{layer}" for layer in api.ORDER}) - anchors == set()
    assert names - {target.partition("#")[2] for target in site.page("api").links} == set()


def test_no_markup_of_docstrings_is_left(site: Site) -> None:
    """Roles, double backticks and tables of reStructuredText are converted, formulas are MathML."""
    raw = re.compile(r":(?:class|func|meth|attr|mod|data|exc|math):|``|={5}|\\pi|\.\. \w+::|>>> ")
    for layer in api.ORDER:
        page = site.page(f"reference/{layer}")
        assert [found[0] for text in page.text if (found := raw.search(text))] == [], layer
    assert "<math" in (site.folder / "reference" / "losses" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("losses", "Schulman et al. 2017 (arXiv 1707.06347), eq. 7"),  # which a decorator appends
        ("losses", "the mode"),
        ("losses", "Every"),
        ("transforms", "gen_log_probs_full_key"),
        ("estimators", "KL estimators, the exact KL"),
    ],
)
def test_the_reference_has_the_texts_of_the_running_program(site: Site, layer: str, text: str) -> None:
    source = (site.folder / "reference" / layer / "index.html").read_text(encoding="utf-8")
    assert text in re.sub(r"<[^>]+>", "", source)


def test_the_variants_of_an_objective_are_functions(site: Site) -> None:
    """They are assigned, not defined."""
    source = (site.folder / "reference" / "losses" / "index.html").read_text(encoding="utf-8")
    heading = source.split('id="torchrl_llm_kl.losses.dapo"')[1][:4000]
    assert "clip_high" in re.sub(r"<[^>]+>", "", heading)


def test_names_in_the_text_link_to_the_reference(site: Site) -> None:
    targets = site.page("losses").links
    assert any(target.endswith("reference/losses/#torchrl_llm_kl.losses.PolicyLoss") for target in targets)


def test_files_that_pages_link_to_are_pages(site: Site) -> None:
    text = site.page("source/tutorials/countdown_grpo.py").path.read_text(encoding="utf-8")
    assert "schedule.step()" in re.sub(r"<[^>]+>", "", text)


UNCHANGED = "`f[i](x.md)` [a](#b) [c](https://d.e)"


@pytest.mark.parametrize(
    ("text", "path", "place", "repository", "expected"),
    [
        ("[a](../README.md#x)", "docs/cli.md", "cli.md", None, "[a](source/overview.md#x)"),
        ("[a](../tests/x.py)", "docs/cli.md", "cli.md", None, "[a](source/tests/x.py.md)"),
        ("[a](../tests/x.py)", "docs/cli.md", "cli.md", "https://host/r", "[a](https://host/r/blob/main/tests/x.py)"),
        ("[a](docs/ray.md)", "CONTRIBUTING.md", "CONTRIBUTING.md", None, "[a](ray.md)"),
        ("![a](results.png)", "benchmarks/RESULTS.md", "benchmarks/RESULTS.md", None, "![a](results.png)"),
        ("![a](../docs/x.png)", "benchmarks/RAY.md", "benchmarks/RAY.md", None, "![a](../x.png)"),
        ("[a](docs/ray.md)", "README.md", "source/overview.md", None, "[a](../ray.md)"),
        ("[a](notebooks/b.ipynb)", "docs/start.md", "start.md", None, "[a](notebooks/b.md)"),
        (UNCHANGED, "docs/cli.md", "cli.md", None, UNCHANGED),
        ("```\n[a](../b.py)\n```", "docs/cli.md", "cli.md", None, "```\n[a](../b.py)\n```"),
    ],
)
def test_links_are_rewritten(text: str, path: str, place: str, repository: str | None, expected: str) -> None:
    assert hooks.with_site_links(text, path, place, repository) == expected


def test_names_are_linked_once_in_a_section() -> None:
    text = "<h2>A <code>X</code></h2><p><code>X</code> <code>X</code> <a><code>Y</code></a></p><h2>B</h2><code>X</code>"
    link = '<autoref identifier="p.X" optional><code>X</code></autoref>'
    expected = f"<h2>A <code>X</code></h2><p>{link} <code>X</code> <a><code>Y</code></a></p><h2>B</h2>{link}"
    assert hooks.with_links(text, {"X": "p.X", "Y": "p.Y"}) == expected


def test_tables_of_docstrings_become_markdown() -> None:
    found = script("docs/site_docstrings.py").as_table("  ", "==== =====", "  a    b", "  x    y | z\n  long w")
    assert found.splitlines() == ["  | a | b |", "  | --- | --- |", "  | x | y \\| z |", "  | long | w |"]


def test_pages_are_in_the_order_of_the_navigation(site: Site) -> None:
    home: Page = site.pages[Path(site.folder) / "index.html"]
    assert "Start" in "".join(home.text)
    assert site.printed.count("WARNING") == 0
