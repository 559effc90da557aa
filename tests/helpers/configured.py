"""Configurations for tests, and instances of classes that `autoconfigure` decorated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeVar
from unittest import mock

import pytest

from mpillm.options.fields import BY_NAME
from mpillm.options.mitten import Configuration

DUMMY = ["--core_type", "dummy"]
T = TypeVar("T")


def from_fields(cls: type[T], /, *args: Any, **kwargs: Any) -> T:
    """Return ``cls.from_fields(…)``: the decorator adds it, which types can't express."""
    made: T = attrgetter("from_fields")(cls)(*args, **kwargs)
    return made


def built(cls: Any, **values: Any) -> Any:
    """Return an instance whose fields have these values, by their names."""
    with Configuration(
        {BY_NAME[name]: value for name, value in values.items()}, options={}, environ={}
    ).autoapply():
        return cls()


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield this process's command line: no words but a test's own, and no flags in the environment."""
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS", raising=False)
    with mock.patch("sys.argv", ["mpillm"]):
        yield sys.argv
