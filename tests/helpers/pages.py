"""What a page says, and that it is whole."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "line", "polyline", "rect", "wbr"}


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
