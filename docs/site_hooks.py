"""Hooks of the site's build (``mkdocs.yml``): pages outside ``docs/``, links to them, pages of the API, notebooks.

The Markdown files are written for GitHub, where a link is relative to the file. The site has the same pages in the same places,
with four additions:

- ``CHANGELOG.md``, ``CONTRIBUTING.md``, the README and the reports in ``benchmarks/`` are pages at the path that they have in
  the repository, and other files that a page links to (tests, tutorials) are pages below ``source/`` with their text. With a
  ``Repository`` among the project's URLs, links to such files lead there instead.
- each layer has a page of its docstrings, ``reference/LAYER.md``; names in the text link to it.
- a notebook is a page with its outputs;
- the Markdown of each page lies beside it, and ``llms.txt`` lists these files.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import build_api
import site_notebooks

PROJECT = Path(__file__).parents[1]
#: Pages outside ``docs/``: path in the repository -> path in the site. A README at the top would be its front page.
PAGES = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "README.md": "source/overview.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "benchmarks/RAY.md": "benchmarks/RAY.md",
    "benchmarks/profile.md": "benchmarks/profile.md",
    "benchmarks/PRECISION.md": "benchmarks/PRECISION.md",
    "benchmarks/KL_STUDY.md": "benchmarks/KL_STUDY.md",
    "benchmarks/GSM8K.md": "benchmarks/GSM8K.md",
    "benchmarks/STALENESS.md": "benchmarks/STALENESS.md",
    "benchmarks/TOKENIZERS.md": "benchmarks/TOKENIZERS.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".md": "markdown"}
#: Code, which is not changed, or the target of a link or a picture.
LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<open>\]\()(?P<target>[^)\s]+)(?P<close>\))", re.DOTALL | re.MULTILINE
)

# ---------------------------------------------------------------------- paths


def in_site(path: str) -> str:
    """The site's path of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return path if path.endswith(".png") else f"source/{path}.md"


def in_repository(page: str) -> str:
    """The repository's path of a page of the site."""
    return next((path for path, place in PAGES.items() if place == page), f"docs/{page}")


def is_local(target: str) -> bool:
    """Whether a link leads to another file of the repository."""
    return not re.match(r"[a-z]+:|#|/", target)


def links(text: str, path: str) -> Iterator[str]:
    """The files of the repository that the page at ``path`` links to."""
    for match in LINK.finditer(text):
        target = match["target"]
        if target and is_local(target):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target.split("#")[0]))


def with_site_links(text: str, path: str, place: str, repository: str | None) -> str:
    """Rewrite the links of the page at ``path`` in the repository for ``place`` in the site."""

    def rewrite(match: re.Match[str]) -> str:
        if match["code"] or not is_local(match["target"]):
            return match[0]
        target, mark, anchor = match["target"].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if repository and is_source(target):
            return f"{match['open']}{repository}/blob/main/{target}{mark}{anchor}{match['close']}"
        relative = posixpath.relpath(in_site(target), posixpath.dirname(place) or ".")
        return f"{match['open']}{relative}{mark}{anchor}{match['close']}"

    return LINK.sub(rewrite, text)


def is_source(path: str) -> bool:
    """Whether a file of the repository is neither a page nor a picture."""
    return path not in PAGES and not path.startswith("docs/") and not path.endswith(".png")


# ---------------------------------------------------------------------- files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the layers of the reference and the repository's address."""
    fill_in_layers(config.nav or [])
    if not config.repo_url:
        config.repo_url = repository_url() or ""
    return config


def fill_in_layers(nav: list[Any]) -> None:
    """Replace the entry ``reference`` by a page for each layer."""
    for entry in nav:
        for children in entry.values() if isinstance(entry, dict) else ():
            if isinstance(children, list):
                fill_in_layers(children)
    if "reference" in nav:
        at = nav.index("reference")
        nav[at : at + 1] = [f"reference/{layer}.md" for layer in build_api.ORDER]


def repository_url() -> str | None:
    """The project's repository, if ``pyproject.toml`` names it."""
    block = re.search(
        r"^\[project\.urls\]\n(.*?)(?=^\[|\Z)", (PROJECT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    found = re.search(r'^(?:Repository|Source)\s*=\s*"([^"]+)"', block[1], re.MULTILINE) if block else None
    return found[1].rstrip("/") if found else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(PROJECT / path)))
    for layer in build_api.ORDER:
        files.append(File.generated(config, f"reference/{layer}.md", content=reference(layer)))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            add_notebook(file, files, config)
    linked = sorted(
        {path for file in files.documentation_pages() for path in links(text_of(file), in_repository(file.src_uri))}
    )
    for path in linked:
        if not (PROJECT / path).is_file() or path.startswith("docs/") or path in PAGES:
            continue  # it is in docs/ already, or it is wrong and MkDocs reports it
        if path.endswith(".png"):
            files.append(File.generated(config, path, abs_src_path=str(PROJECT / path)))
        elif not config.repo_url:
            files.append(File.generated(config, in_site(path), content=as_page(path)))
    return files


def text_of(file: File) -> str:
    """The Markdown of a page."""
    return file.content_string if file.abs_src_path is None else Path(file.abs_src_path).read_text(encoding="utf-8")


def as_page(path: str) -> str:
    """A page with the text of a source file, which the search leaves out."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n``````{language}\n{text}\n``````\n"


def add_notebook(file: File, files: Files, config: MkDocsConfig) -> None:
    """Add the page of a notebook and the pictures in its outputs."""
    stem = file.src_uri.removesuffix(".ipynb")
    text, pictures = site_notebooks.to_markdown(Path(str(file.abs_src_path)), posixpath.basename(stem))
    files.append(File.generated(config, f"{stem}.md", content=text))
    for name, content in pictures.items():
        files.append(File.generated(config, posixpath.join(posixpath.dirname(stem), name), content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links as they are in the site; names of ``api.md`` link to the reference; the search ranks guides first."""
    place = page.file.src_uri
    if place.startswith(("reference/", "benchmarks/")) or place in ("api.md", "CHANGELOG.md", "papers.md"):
        page.meta.setdefault("search", {"boost": 0.1})
    if place == "index.md":
        page.meta["hide"] = ["navigation", "toc"]  # room for three cards in a row
    if place == "api.md":
        markdown = with_references(markdown)
    if place.startswith(("notebooks/", "reference/", "source/")) and place not in PAGES.values():
        return markdown
    return with_site_links(markdown, in_repository(place), place, config.repo_url or None)


# ---------------------------------------------------------------------- the reference


def reference(layer: str) -> str:
    """The page of a layer's docstrings. Names that another layer defines link to its page."""
    module = f"{build_api.torchrl_llm_kl.__name__}.{layer}"
    options = "members: false, show_root_heading: false, show_root_toc_entry: false"
    parts = [f"# {layer} {{#{module}}}\n\n::: {module}\n    options: {{{options}}}\n"]
    for name, thing in build_api.public_names(layer).items():
        home = build_api.home_of(layer, name, thing)
        if home == layer:
            parts.append(f"::: {module}.{name}\n")
        else:
            own = f"{module}.{name}".removesuffix(f"{layer}.{name}") + f"{home}.{name}"
            parts.append(f"## `{name}` {{#{module}.{name}}}\n\nDefined in `{home}`: [`{name}`][{own}].\n")
    return "\n".join(parts)


def with_references(markdown: str) -> str:
    """Link each name of ``api.md`` to the reference."""
    layer, lines = "", []
    for line in markdown.splitlines():
        if heading := re.match(r"## `(\w+)`", line):
            layer = heading[1]
        if listed := re.match(r"((?:Defined|Objectives|Advantages)\b.*?: )(.*)", line):
            line = listed[1] + re.sub(r"`(\w+)`", rf"[`\1`][torchrl_llm_kl.{layer}.\1]", listed[2])
        lines.append(re.sub(r"^\| (\*\*)?`(\w+)`(\*\*)? \|", rf"| \1[`\2`][torchrl_llm_kl.{layer}.\2]\3 |", line))
    return "\n".join(lines)


@cache
def linked_names() -> dict[str, str]:
    """Name -> identifier for names that text may link to. Names of formulas and algorithms are left out, as they are words."""
    found: dict[str, str] = {}
    for layer in build_api.ORDER:
        for name, thing in build_api.public_names(layer).items():
            if not re.fullmatch(r"[a-z0-9_]+", name) or "_" in name:
                found.setdefault(name, f"torchrl_llm_kl.{build_api.home_of(layer, name, thing)}.{name}")
    from torchrl_llm_kl.advantages import available_advantages
    from torchrl_llm_kl.algorithms import ALGORITHMS
    from torchrl_llm_kl.estimators import available_estimators
    from torchrl_llm_kl.losses import available_objectives

    words = {*available_advantages(), *ALGORITHMS, *available_estimators(), *available_objectives()}
    return {name: place for name, place in found.items() if name not in words}


# ---------------------------------------------------------------------- HTML

_TOKEN = re.compile(r"(<code>([^<]*)</code>|<(/?)(a|h[1-6]|pre|autoref)\b[^>]*>)")


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Convert formulas to MathML, and link the first mention of a public name in each section to the reference."""
    content = re.sub(
        r"<code>\$(.*?)\$</code>", lambda match: to_mathml(html.unescape(match[1])), content, flags=re.DOTALL
    )
    content = with_labels(_PICTURE.sub(r'<a class="enlarge" href="\2">\1</a>', content))
    if page.file.src_uri.startswith(("reference/", "source/")) or page.file.src_uri == "api.md":
        return content
    return with_links(content, linked_names())


_PICTURE = re.compile(r'(<img [^>]*src="([^"]+\.(?:png|svg))"[^>]*>)')  # a click opens the picture in its full size
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def with_labels(content: str) -> str:
    """Tables whose cells hold their column's title, which a phone shows beside the cell."""

    def label(match: re.Match[str]) -> str:
        titles = [
            re.sub(r"<[^>]+>", "", title).strip() for title in re.findall(r"<th.*?>(.*?)</th>", match[0], re.DOTALL)
        ]
        column = -1

        def cell(tag: re.Match[str]) -> str:
            nonlocal column
            column = -1 if tag[0] == "<tr>" else column + 1
            return tag[0] if tag[0] == "<tr>" or not titles[column] else f'<td data-label="{titles[column]}"{tag[1]}>'

        return re.sub(r"<tr>|<td([^>]*)>", cell, match[0])

    return _TABLE.sub(label, content)


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``, and the Markdown of each page beside it."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for path in [*sorted((PROJECT / "docs").glob("*.md")), *(PROJECT / path for path in PAGES)]:
        text, place = path.read_text(encoding="utf-8"), in_site(path.relative_to(PROJECT).as_posix())
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text, encoding="utf-8")
        lines.append(f"- [{text.splitlines()[0].lstrip('# ')}]({place})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def with_links(content: str, names: dict[str, str]) -> str:
    """Link each name in code once per section, but not in links, headings and blocks."""
    inside, seen = 0, set[str]()

    def replace(match: re.Match[str]) -> str:
        nonlocal inside
        name, closing, tag = match[2], match[3], match[4]
        if tag:
            inside += -1 if closing else 1
            if tag == "h2" and not closing:
                seen.clear()
            return match[0]
        if inside or name in seen or name not in names:
            return match[0]
        seen.add(name)
        return f'<autoref identifier="{names[name]}" optional>{match[0]}</autoref>'

    return _TOKEN.sub(replace, content)
