"""The site in a browser: no other hosts, a working search, and no sideways scrolling on a phone."""

import functools
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from built_site import Site
from inspector_tab import needs_chromium

playwright = pytest.importorskip("playwright.sync_api", reason="no chromium to test in: playwright is not installed")
pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

pytestmark = [needs_chromium, pytest.mark.slow]  # with the site's build, a minute
PHONE = {"width": 390, "height": 844}
PAGES = ["", "start", "concepts", "algorithms", "losses", "ray", "papers", "api", "reference/losses", "elsewhere"]
PAGES += ["benchmarks/RESULTS", "notebooks/start", "CHANGELOG"]


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(browser: Any, address: str, site: Site) -> Iterator[Callable[..., Any]]:
    """Opens a page in its own window. Afterwards asserts that no other host was contacted and no script failed."""
    contexts, asked, errors, root = [], [], [], site.folder.as_uri()

    def answered(response: Any) -> None:
        if response.status >= 400:
            errors.append(f"{response.status} {response.url}")

    def opened(path: str, disk: bool = False, **settings: Any) -> Any:
        contexts.append(context := browser.new_context(**settings))
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", answered)
        page.goto(f"{root if disk else address}/{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith((address, root, "data:", "blob:", "about:"))] == []
    assert errors == []


@pytest.mark.parametrize("path", PAGES)
def test_a_phone_needs_no_sideways_scrolling(visit: Callable[..., Any], path: str) -> None:
    page = visit(f"{path or 'index'}.html", viewport=PHONE, is_mobile=True, device_scale_factor=2)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = "all => all.filter(x => x.getBoundingClientRect().right > innerWidth + 1 && !x.closest('table')).length"
    assert page.eval_on_selector_all(".md-content img, .md-content p, .md-content h1", wide) == 0


FOUND = {
    "RetrieveKL": "reference/transforms.html#torchrl_llm_kl.transforms.RetrieveKL",
    "PIKLCoefficient": "reference/estimators.html#torchrl_llm_kl.estimators.PIKLCoefficient",
    "distillation": "distillation.html",
}


@pytest.mark.parametrize(("query", "target"), FOUND.items(), ids=FOUND)
@pytest.mark.parametrize("disk", [False, True], ids=["served", "disk"])
def test_search_finds_names_and_pages(visit: Callable[..., Any], query: str, target: str, disk: bool) -> None:
    page = visit("index.html", disk=disk)
    page.locator(".md-search__input").click()
    page.keyboard.type(query)  # the search follows the keys
    page.locator(".md-search-result__link").first.wait_for()
    found = page.eval_on_selector_all(".md-search-result__link", "links => links.slice(0, 12).map(link => link.href)")
    assert any(target in re.sub(r"\?h=[^#]*", "", link) for link in found), found


#: Words that people type -> the page that should come first.
FIRST = {
    "KL explodes": "debugging.html",
    "NaN loss": "debugging.html",
    "GRPO": "algorithms.html",
    "temperature": "sampling.html",
    "vllm": "vllm.html",
    "own reward": "own_task.html",
}


@pytest.mark.parametrize(("query", "target"), FIRST.items(), ids=FIRST)
def test_the_right_page_comes_first(visit: Callable[..., Any], query: str, target: str) -> None:
    page = visit("index.html")
    page.locator(".md-search__input").click()
    page.keyboard.type(query)
    first = page.locator(".md-search-result__item > .md-search-result__link").first
    playwright.expect(first).to_have_attribute("href", re.compile(target))


@pytest.mark.parametrize("path", PAGES)
def test_no_table_or_code_is_wider_than_its_column(visit: Callable[..., Any], path: str) -> None:
    page = visit(f"{path or 'index'}.html", viewport={"width": 1400, "height": 900})
    right = page.eval_on_selector(".md-content__inner", "column => column.getBoundingClientRect().right")
    wide = "(all, right) => all.filter(x => x.getBoundingClientRect().right > right + 2).map(x => x.innerText.slice(0, 80))"
    assert page.eval_on_selector_all(".md-content table:not(.highlighttable), .md-content pre", wide, right) == []


def test_on_a_phone_a_row_of_a_table_is_a_card(visit: Callable[..., Any]) -> None:
    page = visit("which_kl.html", viewport=PHONE, is_mobile=True)
    cell = page.locator("td[data-label=use]").first
    label = cell.evaluate("cell => getComputedStyle(cell, '::before').content")
    assert (label, cell.evaluate("cell => getComputedStyle(cell).display")) == ('"use" ": "', "block")


def test_a_click_enlarges_a_picture(visit: Callable[..., Any]) -> None:
    page = visit("start.html")
    page.locator("a.enlarge").first.click()
    page.wait_for_url("**/demo_curves.png")


def test_a_result_leads_to_the_name(visit: Callable[..., Any]) -> None:
    page = visit("reference/transforms.html#torchrl_llm_kl.transforms.RetrieveKL")
    heading = page.locator('[id="torchrl_llm_kl.transforms.RetrieveKL"]')
    assert "RetrieveKL" in heading.inner_text()
    playwright.expect(heading).to_be_in_viewport()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_starts_in_the_systems_scheme_and_the_reader_can_switch(visit: Callable[..., Any], scheme: str) -> None:
    page = visit("concepts.html", color_scheme=scheme)
    first, other = ("default", "slate") if scheme == "light" else ("slate", "default")
    assert page.get_attribute("body", "data-md-color-scheme") == first
    page.locator("label.md-header__button:not([hidden])[for^=__palette]").first.click()
    playwright.expect(page.locator("body")).to_have_attribute("data-md-color-scheme", other)


def test_formulas_pictures_and_outputs_are_shown(visit: Callable[..., Any], site: Site) -> None:
    box = visit("reference/losses.html").locator("math").first.bounding_box()
    assert (box["width"] > 10, box["height"] > 8) == (True, True)
    page = visit("concepts.html")
    page.wait_for_load_state("networkidle")
    widths = page.eval_on_selector_all(".md-content img", "images => images.map(image => image.naturalWidth)")
    assert [width > 500 for width in widths] == [True] * 5
    page = visit("notebooks/start.html")
    assert page.locator(".md-content img").count() >= 1
    assert "top_k" in page.inner_text(".md-content")
    assert sum(path.stat().st_size for path in Path(site.folder).rglob("*") if path.is_file()) < 60_000_000
