"""Chromium, the built site, and the inspector's page of one batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from built_site import site  # noqa: F401
from inspector_tab import CHROMIUM, TOKENIZER, Tab, batch
from torchrl_llm_kl import inspect_tokens
from torchrl_llm_kl.diagnostics import TokenColumns
from waits import LONG


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    reason = "no chromium to test in: playwright is not installed"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    playwright.expect.set_options(timeout=1000 * LONG)  # a busy machine is no failure
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    """Opens the page of a batch, or an existing page. Afterwards asserts that there were no requests and no messages."""
    tabs: list[Tab] = []

    def open_page(what: Any, words: Any = TOKENIZER, *, scheme="light", width: int = 1300, **options: Any) -> Tab:
        path = what if isinstance(what, Path) else inspect_tokens(what, words, tmp_path / "x.html", **options).path
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab = Tab(context.new_page())
        tabs.append(tab)

        def answer(route: Any) -> None:
            if route.request.url == path.as_uri():
                route.continue_()
            else:
                tab.requests.append(route.request.url)
                route.abort()

        context.route("**/*", answer)
        tab.page.on("console", lambda message: tab.messages.append(message.text))
        tab.page.on("pageerror", lambda error: tab.messages.append(str(error)))
        tab.page.goto(path.as_uri())
        tab.page.wait_for_selector("html[data-ready]")
        return tab

    yield open_page
    for tab in tabs:
        tab.page.context.close()
        assert (tab.requests, tab.messages) == ([], [])


@pytest.fixture(scope="module")
def columns() -> TokenColumns:
    return batch()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, columns: TokenColumns) -> Path:
    return inspect_tokens(columns, TOKENIZER, tmp_path_factory.mktemp("page") / "one.html", clip_high=0.28).path


@pytest.fixture
def tab(show: Callable[..., Tab], path: Path) -> Tab:
    return show(path)
