"""What a page says, and that it is whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "link", "br", "line", "polyline", "rect", "wbr"}


class Wellformed(HTMLParser):
    """Reads a page; every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self._goes_on = False  # a word that may break here is one word
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._goes_on = tag == "wbr"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        self._goes_on = False
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & {*self.open}:
            if self._goes_on:
                data = self.words.pop() + data
            self.words.append(data)


def words(path: Path) -> str:
    return " ".join(" ".join(Wellformed(path.read_text()).words).split())


def loads_nothing(text: str) -> bool:
    """Tell whether a page needs no other file."""
    element = re.search(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=(?!\"data:,)", text)
    return not element and not re.search(r"@import|url\(", text)


def embedded(text: str) -> str:
    """Return the JSON that a page carries for its script."""
    return text.partition('id="data">')[2].partition("</script>")[0]


EVIL = (
    "\"'><script>alert(1)</script><x-evil onload=alert(1) a='\"`="
    "</style></title></svg>--><!-- &#60; javascript:x %s"
)
"""What no page may take for HTML."""


class _Parts(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: set[tuple[str, str]] = set()
        self.links: set[str] = set()
        self.scripts = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts |= {(tag, ""), *((tag, name) for name, _ in attrs)}
        self.links |= {str(value) for name, value in attrs if name in ("href", "src", "action", "xlink:href")}
        self.scripts += tag == "script"

    def handle_comment(self, data: str) -> None:
        self.parts.add(("comment", data[:20]))


def check_made_of(text: str, honest: str) -> None:
    """Check that a page has no element, attribute, comment or link that data made.

    `honest`: pages of the same kind.
    """
    made, known = _Parts(text), _Parts(honest)
    more = made.parts - known.parts - {("wbr", "")}  # where a long word may break
    assert not more, more
    assert made.scripts == 3, "the data, uPlot and page.js"
    for link in made.links:
        assert not re.match(r"(?!data:,)[^/?#]*:", link), link


def poisoned(value: Any) -> Any:
    """Return JSON with EVIL behind every text in it, and with EVIL as a name of every object."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    if isinstance(value, dict):
        made = {name: poisoned(one) for name, one in value.items()}
        return made | {name + EVIL: poisoned(one) for name, one in [*value.items()][:1]}
    return value


def leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in JSON that is no list or object; of a list to those in its first."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else None
    )
    if items is None:
        yield way
        return
    for name, one in items:
        yield from leaves(one, (*way, name))


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """Return JSON with another value at the end of a way."""
    if not way:
        return new
    made = {**value} if isinstance(value, dict) else [*value]
    made[way[0]] = replaced(value[way[0]], way[1:], new)
    return made


def report_steps(report: str) -> dict[str, str]:
    """Return the status of each step of a cluster report."""
    return dict(re.findall(r"^== \d+\. ([^:]+): (\w+), ", report, re.MULTILINE))
