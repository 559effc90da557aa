"""docs/howto/troubleshooting.md quotes messages as the program prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.advice import strings

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
OF_OTHERS = re.compile(r"\((Open MPI|from the system)\)")  # programs whose messages these are


def messages() -> list[str]:
    """Return the quoted messages of mpillm: the first column of the tables that have messages."""
    found = []
    for table in re.findall(r"^\| message .*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines():
            cell = row.split("|")[1]
            if not OF_OTHERS.search(cell):
                found += re.findall(r"`([^`]+)`", cell)
    return found


def constant_parts(message: str) -> list[str]:
    """Return what stays the same in all messages of a kind; … stands for the rest."""
    return [part for part in re.split(r"…", message) if len(part.strip(" .:;,()'")) >= 3]


def is_printed(part: str, source: str) -> bool:
    """Return whether one string has it, or two strings that the program joins."""

    def within(piece: str) -> bool:
        piece = piece.strip(" .:;,'")
        return len(piece) >= 3 and piece in source

    return within(part) or any(within(part[:i]) and within(part[i:]) for i in range(3, len(part) - 2))


@pytest.fixture(scope="module")
def source() -> str:
    return "\0".join(text.replace("`", "") for _, text in strings())


@pytest.mark.long
@pytest.mark.parametrize("message", messages())
def test_the_message_is_in_the_program(message: str, source: str) -> None:
    parts = constant_parts(message)
    assert parts, f"{message!r} is nothing but gaps"
    gone = [part for part in parts if not is_printed(part, source)]
    assert not gone, f"docs/howto/troubleshooting.md quotes {message!r}; no message of the program has {gone}"


def test_the_page_quotes_many_messages_and_the_readme_leads_to_it() -> None:
    assert len(messages()) >= 30
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "(docs/howto/troubleshooting.md)" in readme
