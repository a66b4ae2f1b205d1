"""Ceilings on habits of the package's docstrings and comments that readers stumble over, and on its names.

The figures are thermometers. A sentence that lowers one and reads worse is a defect.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from project import PROJECT

FILES = sorted((PROJECT / "torchrl_llm_kl").rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Pattern -> the most occurrences per 10,000 words of docstrings and comments.
CEILINGS = {
    r"\bwhat\b": 6,
    r"\balone\b": 1.5,
    r";": 60,
    r"(?:^|[.;:] )(?:Of|With|As|By) (?:what|the|a|an|its|each|those|all|so)\b[^.]*\.": 1.5,
    r"\b(?:likewise|thereof|of which|that of|those of|than that|is none|is no|are no|it is that|so that it|as does)\b": 4,
}


@cache
def comments(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [text.lstrip("#: ") for text in texts if not re.match(r"#\s*(noqa|type:|-{5}|!)", text)]


def docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return [re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", " ", text) for text in texts]


def code_lines(path: Path) -> int:
    """Lines that hold code, without docstrings."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [x for x in tokenize.generate_tokens(io.StringIO(text).readline) if x.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


@pytest.mark.parametrize(("pattern", "most"), CEILINGS.items(), ids=["what", "alone", "semicolon", "of", "inverted"])
def test_a_habit_stays_rare(pattern: str, most: float) -> None:
    texts = {path: [*docstrings(path), *comments(path)] for path in FILES}
    words = sum(len(text.split()) for each in texts.values() for text in each)
    where = Counter({path.name: sum(len(re.findall(pattern, t, re.MULTILINE)) for t in texts[path]) for path in FILES})
    assert 1e4 * where.total() / words <= most, where.most_common(8)


def test_comments_say_why_often_enough() -> None:
    assert 100 * sum(len(comments(path)) for path in FILES) / sum(map(code_lines, FILES)) >= 5.9


def test_names_have_one_meaning_and_a_role() -> None:
    homes = defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, DOCUMENTED[1:]) and not node.name.startswith("__"):
                homes[node.name].add(path)
    assert sum(len(paths) > 1 for paths in homes.values()) <= 30
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert len(re.findall(r"\bfound\b", text)) <= 200
