"""The site builds without warnings, all links resolve, nothing is fetched, and every public name is in it."""

import re
from collections import Counter

import pytest

from built_site import Site
from project import PROJECT, script

pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

pytestmark = pytest.mark.slow  # the build takes half a minute
api = script("docs/build_api.py")
hooks = script("docs/site_hooks.py")
NAMES = [(layer, name) for layer in api.ORDER for name in api.public_names(layer)]


def test_every_page_of_the_docs_is_in_the_site(site: Site) -> None:
    pages = {path.stem for path in PROJECT.glob("docs/*.md")} - {"index"}
    pages |= {"CHANGELOG", "CONTRIBUTING"}
    pages |= {f"benchmarks/{name}" for name in ("RESULTS", "RAY", "PRECISION", "KL_STUDY", "GSM8K", "profile")}
    assert [page for page in sorted(pages) if not (site.folder / f"{page}.html").is_file()] == []
    source = (site.folder / "index.html").read_text(encoding="utf-8")
    source = source[source.index('<nav class="md-nav md-nav--primary') :]  # the list of all pages
    links = re.findall(r'<a href="([^"#]+)" class="md-nav__link[^"]*"[^>]*>(.*?)</a>', source, re.DOTALL)
    links = [(place, re.sub(r"<[^>]+>|\s+", " ", title).strip()) for place, title in links if "://" not in place]
    for found in zip(*links, strict=True):
        assert len(found) > 50
        assert [each for each, count in Counter(found).items() if count > 1] == []
    assert "Five minutes" in "".join(site.pages[site.folder / "index.html"].text)
    assert "WARNING" not in site.printed


def test_each_page_lies_beside_its_markdown(site: Site) -> None:
    lines = (site.folder / "llms.txt").read_text(encoding="utf-8").splitlines()
    files = [match[1] for line in lines if (match := re.search(r"\]\((.+\.md)\)$", line))]
    assert len(files) > 45
    assert [file for file in files if not (site.folder / file).is_file()] == []


def test_every_link_leads_somewhere(site: Site) -> None:
    """Checks files and anchors in the built HTML."""
    broken, checked = [], 0
    for page in site.pages.values():
        if page.path.name == "404.html":
            continue  # this page's links start at a server's root
        for target in [*page.links, *page.loads]:
            if re.match(r"[a-z]+:", target):
                continue
            path, anchor = site.resolve(page, target)
            checked += 1
            if not (path.is_file() and (not anchor or path.suffix != ".html" or anchor in site.pages[path].anchors)):
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
    assert "<math" in (site.folder / "reference" / "losses.html").read_text(encoding="utf-8")


def text_of(site: Site, page: str, after: str = "") -> str:
    """The visible text of a page, starting at ``after`` in its source."""
    source = site.page(page).path.read_text(encoding="utf-8")
    return re.sub(r"<[^>]+>", "", source[source.index(after) :])


def test_the_reference_includes_texts_that_decorators_add(site: Site) -> None:
    losses = text_of(site, "reference/losses")
    appended = "Schulman et al. 2017 (arXiv 1707.06347), eq. 7"  # which a decorator adds
    assert [text for text in (appended, "the mode", "Every") if text not in losses] == []
    assert "gen_log_probs_full_key" in text_of(site, "reference/transforms")
    assert "KL estimators, the exact KL" in text_of(site, "reference/estimators")
    # The variants of an objective are assigned, not defined.
    assert "clip_high" in text_of(site, "reference/losses", 'id="torchrl_llm_kl.losses.dapo"')[:1500]


def test_names_in_the_text_link_to_the_reference_and_files_are_pages(site: Site) -> None:
    targets = site.page("losses").links
    assert any(target.endswith("reference/losses.html#torchrl_llm_kl.losses.PolicyLoss") for target in targets)
    assert "schedule.step()" in text_of(site, "source/tutorials/train_grpo.py")


UNCHANGED = "`f[i](x.md)` [a](#b) [c](https://d.e)"
LINKS = [
    ("[a](../README.md#x)", "docs/cli.md", "cli.md", "[a](source/overview.md#x)"),
    ("[a](../tests/x.py)", "docs/cli.md", "cli.md", "[a](source/tests/x.py.md)"),
    ("[a](docs/ray.md)", "CONTRIBUTING.md", "CONTRIBUTING.md", "[a](ray.md)"),
    ("![a](results.png)", "benchmarks/RESULTS.md", "benchmarks/RESULTS.md", "![a](results.png)"),
    ("![a](../docs/x.png)", "benchmarks/RAY.md", "benchmarks/RAY.md", "![a](../x.png)"),
    ("[a](docs/ray.md)", "README.md", "source/overview.md", "[a](../ray.md)"),
    ("[a](notebooks/b.ipynb)", "docs/start.md", "start.md", "[a](notebooks/b.md)"),
    (UNCHANGED, "docs/cli.md", "cli.md", UNCHANGED),
    ("```\n[a](../b.py)\n```", "docs/cli.md", "cli.md", "```\n[a](../b.py)\n```"),
]


def test_links_are_rewritten() -> None:
    for text, path, place, expected in LINKS:
        assert hooks.with_site_links(text, path, place, None) == expected
    hosted = hooks.with_site_links("[a](../tests/x.py)", "docs/cli.md", "cli.md", "https://host/r")
    assert hosted == "[a](https://host/r/blob/main/tests/x.py)"


def test_names_are_linked_once_in_a_section() -> None:
    text = "<h2>A <code>X</code></h2><p><code>X</code> <code>X</code> <a><code>Y</code></a></p><h2>B</h2><code>X</code>"
    link = '<autoref identifier="p.X" optional><code>X</code></autoref>'
    expected = f"<h2>A <code>X</code></h2><p>{link} <code>X</code> <a><code>Y</code></a></p><h2>B</h2>{link}"
    assert hooks.with_links(text, {"X": "p.X", "Y": "p.Y"}) == expected


def test_tables_of_docstrings_become_markdown() -> None:
    found = script("docs/site_docstrings.py").as_table("  ", "==== =====", "  a    b", "  x    y | z\n  long w")
    assert found.splitlines() == ["  | a | b |", "  | --- | --- |", "  | x | y \\| z |", "  | long | w |"]
