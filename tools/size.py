"""``make size``: print the size of the code in each package, compared with the last release.

It counts Python's tokens and their lines, without comments, docstrings and blank lines. `TABLE` has the
numbers of the last release; ``python -m tools.size --write 0.2.0`` rewrites it for a release. No test uses
the sizes.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = Path("docs/size.txt")
PACKAGES = ("disagg", "launch", "mpillm")
PLUGIN_PACKAGES = tuple(
    f"mpillm/{name}"
    for name in ("experiments", "llmlib", "nvidia", "stages", "submission", "triton", "trtllm")
)  # no other package imports them: see `mpillm.core_names`

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Python 3.12 splits f-strings into tokens, unlike earlier versions; the count should be equal.
_BEGINS, _ENDS = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)


class Size(NamedTuple):
    """Size of a file, or of all files in a package."""

    lines: int = 0
    tokens: int = 0

    def __add__(self, other: object) -> Size:
        if not isinstance(other, Size):
            return NotImplemented
        return Size(self.lines + other.lines, self.tokens + other.tokens)


def size(source: str) -> Size:
    """Return the code lines and tokens of a file. Raises SyntaxError if it is not Python."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, False) is not None
    }
    lines: set[int] = set()
    tokens = depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NO_CODE or (token.type == tokenize.STRING and token.start in docstrings):
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        tokens += not depth
        depth += (token.type == _BEGINS) - (token.type == _ENDS)
    return Size(len(lines), tokens)


def package_sizes(root: Path) -> dict[str, Size]:
    """Return the size of each package, without its subpackages."""
    sizes: defaultdict[str, Size] = defaultdict(Size)
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            sizes[file.parent.relative_to(root).as_posix()] += size(file.read_text(encoding="utf-8"))
    return dict(sorted(sizes.items()))


def read_table(file: Path) -> tuple[str, dict[str, Size]]:
    """Return the release, and the sizes of its packages."""
    release, *rows = file.read_text(encoding="utf-8").splitlines()
    return release, {
        name: Size(int(lines), int(tokens)) for name, lines, tokens in (row.split() for row in rows)
    }


def write_table(file: Path, release: str, now: dict[str, Size]) -> None:
    """Write the file that `read_table` reads."""
    file.write_text(
        "\n".join([release, *(f"{name} {one.lines} {one.tokens}" for name, one in now.items())]) + "\n",
        encoding="utf-8",
    )


def table(release: str, before: dict[str, Size], now: dict[str, Size]) -> str:
    """Return a line for each package, one for all except plugin packages, and one for all."""
    both = {name: (before.get(name, Size()), now.get(name, Size())) for name in sorted({*before, *now})}
    for title, names in (
        ("core", [name for name in both if not name.startswith(PLUGIN_PACKAGES)]),
        ("all", [*both]),
    ):
        both[title] = (
            sum((before.get(name, Size()) for name in names), Size()),
            sum((now.get(name, Size()) for name in names), Size()),
        )
    width = max(map(len, both))
    columns = f"{'lines':>7}  {'before':>7}  {'tokens':>8}  {'before':>8}"
    rows = [f"{'':<{width}}  {columns}         before: {release}"]
    for name, (then, one) in both.items():
        change = (
            f"{one.tokens / then.tokens - 1:+7.1%}"
            if then.tokens and one.tokens
            else "    new"
            if one.tokens
            else "   gone"
        )
        sizes = f"{one.lines:>7,}  {then.lines:>7,}  {one.tokens:>8,}  {then.tokens:>8,}"
        rows.append(f"{name:<{width}}  {sizes}  {change}")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or write a release's sizes."""
    parser = argparse.ArgumentParser(
        description="Print lines and tokens of code in each package, compared with the last release."
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--write", metavar="RELEASE", help=f"write {TABLE} for this release instead")
    options = parser.parse_args(argv)
    now = package_sizes(options.root)
    if options.write:
        write_table(options.root / TABLE, options.write, now)
    else:
        print(table(*read_table(options.root / TABLE), now))


if __name__ == "__main__":
    main()
