"""The built site, with the links, anchors and text of its pages."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from os import environ
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from project import PROJECT


def build(folder: Path) -> str:
    """Build the site into a folder, with warnings as errors, as ``make docs`` does. Returns the output of the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"mkdocs build --strict failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stderr


CODE = ("code", "pre", "script", "style")


class Page(HTMLParser):
    """A page's anchors, the targets of its links, the resources that it loads, and its text outside code."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self._code = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if name := found.get("id") or (found.get("name") if tag == "a" else None):
            self.anchors.add(name)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag in ("img", "script", "iframe") and found.get("src"):
            self.loads.append(str(found["src"]))
        elif tag == "link" and found.get("href") and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(str(found["href"]))
        self._code += tag in CODE

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in CODE

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


@dataclass
class Site:
    """A built site: its root folder, and the output of the build."""

    folder: Path
    printed: str

    @cached_property
    def pages(self) -> dict[Path, Page]:
        """Path of each page -> the page."""
        return {path: Page(path) for path in sorted(self.folder.rglob("*.html"))}

    def page(self, name: str) -> Page:
        """``"concepts"`` -> ``concepts.html``."""
        return self.pages[self.folder / f"{name}.html"]

    def resolve(self, page: Page, target: str) -> tuple[Path, str]:
        """The file and the anchor that a relative link leads to."""
        place, anchor = urldefrag(target)
        path = (page.path.parent / unquote(place)).resolve() if place else page.path
        return (path / "index.html" if path.is_dir() else path), unquote(anchor)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built once for all tests of a run. ``TORCHRL_LLM_KL_SITE`` can name a built site instead."""
    if built := environ.get("TORCHRL_LLM_KL_SITE"):
        return Site(Path(built).resolve(), "")
    folder = tmp_path_factory.mktemp("site")
    return Site(folder, build(folder))
