"""Regular expressions of the source tree, found in its syntax, and texts on which each may backtrack."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARSER = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_METHODS = ("match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split")
_ANCHORED = {"match", "fullmatch"}
# Other files need no parsing.
_RELEVANT = re.compile(
    rf"\bre\.|KnownFailure|reason=|\.(?:{'|'.join(_METHODS)})\b"
)  # other files need no parsing
_UNKNOWN = "x"  # stands for a part of a pattern that only a call has

Tree = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Use:
    """One pattern, and how it is applied."""

    where: str  # file:line
    pattern: str | bytes
    flags: int
    methods: frozenset[str]

    def apply(self, text: str) -> None:
        """Apply the pattern in each way that the source does."""
        compiled = re.compile(self.pattern, self.flags)
        data: Any = text.encode("latin-1", "replace") if isinstance(self.pattern, bytes) else text
        for method in self.methods & _ANCHORED:
            getattr(compiled, method)(data)
        if self.methods - _ANCHORED:
            for _ in compiled.finditer(data):
                pass


def uses(root: Path, packages: Sequence[str]) -> tuple[list[Use], list[str]]:
    """Return the patterns of all calls of `re`, and the places whose pattern is known only when they run."""
    files = {
        file: [*ast.walk(ast.parse(text))]
        for name in packages
        for file in (root / name).rglob("*.py")
        if _RELEVANT.search(text := file.read_text())
    }
    everywhere = _applied(itertools.chain.from_iterable(files.values()))
    found, unknown = [], []
    for file, nodes in files.items():
        here = _applied(nodes)
        names = {
            id(node.value): target.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
        }
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            where = f"{file.relative_to(root)}:{node.lineno}"
            if searched := _searched(node):
                found.append(Use(where, searched, 0, frozenset({"search"})))
            if not (method := _re_function(node.func)):
                continue
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            name = names.get(id(node), "")
            applied = here if name.startswith("_") else everywhere
            methods = {method} if method != "compile" else applied.get(name, set())
            try:
                pattern = _text(node.args[0], module)
                flags = _flags(node, method)
            except _NotConstant:
                unknown.append(where)
                continue
            found.append(Use(where, pattern, flags, frozenset(methods or _METHODS)))
    return found, unknown


def _re_function(function: ast.expr) -> str:
    match function:
        case ast.Attribute(ast.Name("re"), name) if name in (*_METHODS, "compile"):
            return name
    return ""


def _searched(call: ast.Call) -> str:
    """Return the pattern that an argument is, for a search in a program's log; "" if none is."""
    words = [word.value for word in call.keywords if word.arg == "reason"]
    if isinstance(call.func, ast.Name) and call.func.id == "KnownFailure":
        words += call.args[:1]
    return next((str(word.value) for word in words if isinstance(word, ast.Constant)), "")


def _applied(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Return the methods of patterns that are called on each name."""
    applied: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in _METHODS and isinstance(node.value, ast.Name):
            applied.setdefault(node.value.id, set()).add(node.attr)
    return applied


class _NotConstant(Exception):
    """The pattern depends on a call's arguments."""


def _text(node: ast.expr, module: str) -> str | bytes:
    """Return the text of an expression. Local names within an f-string become `_UNKNOWN`."""
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_text(part, module)) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, module) + _text(node.right, module)  # type: ignore[operator]
    if isinstance(node, ast.FormattedValue):
        try:
            return str(_evaluate(node.value, module))
        except NameError:
            return _UNKNOWN
    raise _NotConstant


def _flags(node: ast.Call, method: str) -> int:
    at = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(method, 2)
    given = [word.value for word in node.keywords if word.arg == "flags"] + node.args[at : at + 1]
    return int(eval(compile(ast.Expression(given[0]), "flags", "eval"), {"re": re})) if given else 0


def _evaluate(node: ast.expr, module: str) -> Any:
    return eval(compile(ast.Expression(node), module, "eval"), vars(importlib.import_module(module)))


# --- texts that make a pattern backtrack ---

_ODD = (*"\"'\\- 0a,./:=%[({\n_", '\\"', "a=", "a ")
_PROBES = "a0 -_.,:/=%'\"\\\n[]{}()<>;A|$*é"


def texts(use: Use) -> Iterator[tuple[str, str, str]]:
    """Yield (head, repeated part, tail): a head and tail that lead into and out of each repetition."""
    tree = _PARSER.parse(use.pattern, use.flags)
    heads, pumps, tails = {"": None}, dict.fromkeys(_ODD), dict.fromkeys(("\0", "a", "\n"))
    for before, body in _repetitions(list(tree), ""):
        heads[before] = None
        characters = _characters(body)
        pumps |= dict.fromkeys(characters)
        # The repetition may match all tails above.
        tails |= dict.fromkeys([one for one in _PROBES if one not in characters][:1])
        pumps[_sample(body)] = None
        pumps[before + _sample(body)] = None
    items = list(tree)
    for end in range(1, len(items) + 1):
        pumps[_sample(items[:end])] = None
    yield from itertools.product(heads, filter(None, pumps), tails)


def _repetitions(items: Tree, before: str) -> Iterator[tuple[str, Tree]]:
    """Yield each repetition at any depth, with a text that the pattern before it matches."""
    for op, value in items:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = value
            if most > 8:
                yield before, list(body)
            yield from _repetitions(list(body), before)
        elif name == "SUBPATTERN":
            yield from _repetitions(list(value[-1]), before)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _repetitions(list(branch), before)
        before += _sample([(op, value)])


def _sample(items: Tree) -> str:
    """Return a text that the items match, but for what they demand beside them."""
    made = ""
    for op, value in items:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            made += (_characters([(op, value)]) or [""])[0]
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            made += _sample(list(value[2])) * min(max(value[0], 1), value[1], 400)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            made += _sample(list(value[-1] if name == "SUBPATTERN" else value))
        elif name == "BRANCH":
            made += _sample(list(value[1][0]))
    return made


def _characters(items: Tree) -> list[str]:
    """Return the probed characters that match an item of one character."""
    if len(items) != 1:
        return []
    op, value = items[0]
    name = str(op)
    if name == "LITERAL":
        return [chr(value)]
    if name == "NOT_LITERAL":
        return [c for c in _PROBES if c != chr(value)]
    if name == "ANY":
        return [c for c in _PROBES if c != "\n"]
    if name == "SUBPATTERN":
        return _characters(list(value[-1]))
    if name != "IN":
        return []
    negated = str(value[0][0]) == "NEGATE"
    members = [c for c in _PROBES if _is_in(c, value[negated:]) != negated]
    own = [chr(v if str(o) == "LITERAL" else v[0]) for o, v in value if str(o) in ("LITERAL", "RANGE")]
    return members or own


def _is_in(character: str, members: Tree) -> bool:
    for op, value in members:
        name = str(op)
        if name == "LITERAL" and ord(character) == value:
            return True
        if name == "RANGE" and value[0] <= ord(character) <= value[1]:
            return True
        if name == "CATEGORY" and re.fullmatch(_CATEGORIES[str(value)], character):
            return True
    return False


_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
