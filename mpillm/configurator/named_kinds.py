"""Kinds of programs by name, each in a file of its own, and ``command:WORDS`` for any other."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast

from disagg.errors import nearest
from mpillm.configurator.parsers import expects

K = TypeVar("K")
PREFIX = "command:"


class NamedKinds(Generic[K]):
    """The kinds by name. Their files are read when one is wanted: each command has the names."""

    def __init__(self, built_in: Mapping[str, str], of_command: str) -> None:
        """`built_in`: ``module:NAME`` by the name of the kind; `of_command`: makes that of any command."""
        self._built_in = built_in
        self._of_command = of_command

    def kind_of(self, text: str) -> K:
        """Return a kind. Raises ValueError if there is none."""
        if text.startswith(PREFIX):
            make = self._load(self._of_command)
            return cast(K, make(shlex.split(text.removeprefix(PREFIX))))
        if text not in self._built_in:
            raise ValueError(nearest(text, self._built_in).strip(" ()") or "there is no such kind")
        return cast(K, self._load(self._built_in[text]))

    def parser(self) -> Callable[[str], str]:
        """Return what reads the option that names one: in any case, as the kind has it."""

        @expects(f"{', '.join(self._built_in)}, or {PREFIX}WORDS")
        def kind(text: str) -> str:
            if text.lower() in self._built_in:
                return text.lower()
            try:
                self.kind_of(text)
            except ValueError as error:
                from mpillm.configurator import Reason  # which reads parsers first

                raise Reason(str(error)) from None
            return text

        return kind

    def _load(self, place: str) -> Callable[[list[str]], object]:
        module, _, name = place.partition(":")
        found: Callable[[list[str]], object] = getattr(importlib.import_module(module), name)
        return found
