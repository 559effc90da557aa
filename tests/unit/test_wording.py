"""Names and texts use the field's plain terms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CODE = [path for name in ("mpillm", "launch", "disagg") for path in sorted((ROOT / name).rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_START = r"(?:^|[.;:!?]\s+)"
_MAX_WORDS = 35  # of a sentence
_SEGMENT = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

# A name is matched segment by segment: `n_told` has n and told.
NAMES = (
    "told|said|asked|heard|shown|stated",
    "found|tells?|says?|asks?|hears?|owed|owes?|knows",
    "wanted|given|taken|held|kept|made|meant|drawn|leaving|coming|moving|begun|gone",
    "rooms?|wings?|half|halves|near|guess(es|ed|ing)?|doorbells?|errands?|lifelines?|handovers?",
    "most|least",
    "mine|ours|theirs|them|there|who|whom|whose|what|whole|rest|meanwhile|besides?",
)
# asyncio's name, a key of result.json, a term of statistics, an option, and what it reads
ALLOWED = {"accepted_guesses", "connection_made", "half_width", "most", "whole_number"}
# Docstrings, comments and messages. The number: how often a pattern may match. It may only shrink.
TEXTS = {
    _START + r"Of (?!course\b)[a-z0-9`'\"]": 0,
    r"\b(tells?|told|hears?|heard|owes?|owed|says?|said|wants?)\b": 9,
    r"\b(nobody|somebody|whoever)\b": 1,
    r"\bat once\b": 1,
    r", too\b": 1,
    r"(?<!there )\b(is|are|was|were) no (?!longer|more)[a-z]": 0,
}
HISTORY = re.compile(r"\bno longer\b|\bit (said|was|had|took)\b|\bwhere (it|they) (was|were)\b")


class Words(NamedTuple):
    """The words of the code, each with its place."""

    names: list[tuple[str, str]]  # of each class, function, parameter, variable and attribute
    texts: list[tuple[str, str]]  # comments, and strings of four words or more
    classes: set[str]


@pytest.fixture(scope="module")
def words() -> Words:
    found = Words([], [], set())
    for path in CODE:
        source, file = path.read_bytes(), path.relative_to(ROOT)
        for node in ast.walk(ast.parse(source)):
            place = f"{file}:{getattr(node, 'lineno', 1)}"
            found.names.extend((place, name) for name in _names(node))
            if isinstance(node, ast.ClassDef):
                found.classes.add(node.name)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
                found.texts.append((place, " ".join(node.value.split())))
        found.texts.extend(
            (f"{file}:{token.start[0]}", token.string.lstrip("#: "))
            for token in tokenize.tokenize(io.BytesIO(source).readline)
            if token.type == tokenize.COMMENT
        )
    return found


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            yield name


@pytest.mark.parametrize("pattern", NAMES)
def test_names(words: Words, pattern: str) -> None:
    forbidden = re.compile(pattern)
    matches = [
        f"{place} {name}"
        for place, name in words.names
        if name not in ALLOWED
        and any(forbidden.fullmatch(segment.lower()) for segment in _SEGMENT.findall(name))
    ]
    assert matches == []


def test_no_class_is_named_by_a_participle(words: Words) -> None:
    nouns = {
        "Embedding",
        "Mapping",
        "Sampling",
        "Staging",
        "Routing",
        "Setting",
        "String",
        "Padding",
        "Scaling",
        "Ending",
    }
    participle = re.compile("_?[A-Z][a-z]+(ed|ing)|_?(Found|Told|Given|Taken|Held|There|Under|Own|More)")
    assert [name for name in sorted(words.classes - nouns) if participle.fullmatch(name)] == []


@pytest.mark.parametrize(("pattern", "limit"), TEXTS.items())
def test_texts(words: Words, pattern: str, limit: int) -> None:
    forbidden = re.compile(pattern)
    matches = [f"{place} {text}" for place, text in words.texts if forbidden.search(text)]
    assert len(matches) <= limit, "\n".join(matches)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    """No fronted `Of`, no history in the changelog, no sentence over 35 words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*|#\d])", text)
    sentences = [
        sentence
        for block in blocks
        if not block.lstrip().startswith("|")
        for sentence in re.split(r"[.:!?]\s", block)
    ]
    assert [one for one in sentences if len(one.split()) > _MAX_WORDS] == []
    assert re.search(r"(^|[.;:!?]\s+)Of [a-z`]", text, re.MULTILINE) is None
    assert page.name != "CHANGELOG.md" or HISTORY.search(text) is None
