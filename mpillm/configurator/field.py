"""Fields: what can be configured."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from disagg.yaml_text import plain


class AutoConfStrategy(enum.Enum):
    """What a value does to one that is found below it."""

    Replace = "replace"
    DictUpdate = "dict_update"  # dictionaries: key by key


class Reason(ValueError):
    """Why a text is no value, for the message that says what was expected."""


@dataclasses.dataclass(frozen=True, eq=False)
class Field:
    """One thing that can be configured, and one object: fields are equal only to themselves.

    Its name is with underscores; hyphens mean the same on the command line. What stands behind `*` is our own.
    """

    name: str
    description: str = ""
    from_string: Callable[[str], Any] | None = None  # ValueError for a text that is no value; None: the text is the value
    disallow_default: bool = False  # a missing value is an error
    disallow_argparse: bool | None = None  # no option on the command line; None: just when there is `from_environ`
    argparse_opts: Mapping[str, Any] | None = None  # for `ArgumentParser.add_argument`
    from_environ: str | None = None  # an environment variable
    autoconf_strategy: AutoConfStrategy = AutoConfStrategy.Replace
    _: dataclasses.KW_ONLY
    default: Any = None  # None: none
    choices: tuple[str, ...] = ()  # upper and lower case are alike
    group: str = "general"  # the heading in --help
    aliases: tuple[str, ...] = ()  # other names
    overlay_environ: str | None = None  # an environment variable that is laid over the value, key by key

    def __copy__(self) -> Field:
        return self

    def __deepcopy__(self, _: Any) -> Field:
        return self

    @property
    def is_option(self) -> bool:
        """Whether the command line may set it."""
        return not (self.from_environ if self.disallow_argparse is None else self.disallow_argparse)

    @property
    def is_flag(self) -> bool:
        """Whether the option without a value means true."""
        return isinstance(self.default, bool) or self.from_string is bool

    @property
    def shown_default(self) -> str:
        """The default as the command line would have it; empty if there is none."""
        return "" if self.default is None or self.default == {} else self.text(self.default)

    def text(self, value: Any) -> str:
        """What `parse` reads as `value`."""
        return str(value).lower() if isinstance(value, bool) else str(getattr(self.from_string, "to_text", str)(value))

    def parse(self, text: str, source: str) -> Any:
        """The value of `text`; ConfigError naming `source`, the text, and what is allowed."""
        if self.choices and text not in self.choices:
            by_case = {choice.lower(): choice for choice in self.choices}
            if text.lower() in by_case:
                return by_case[text.lower()]
            raise ConfigError(f"{source} {text}: not one of {', '.join(self.choices)}{nearest(text, self.choices)}")
        if self.from_string is bool:  # bool("false") is True
            if text.lower() not in ("true", "false", "1", "0"):
                raise ConfigError(f"{source} {text}: expected true or false")
            return text.lower() in ("true", "1")
        if self.from_string is None and not text.strip():
            raise ConfigError(f"{source} '{text}': expected a text that is not empty")
        try:
            return self.from_string(text) if self.from_string else text
        except (ValueError, RecursionError) as error:
            expected = getattr(self.from_string, "expects", f"what {getattr(self.from_string, '__name__', self.name)} reads")
            why = f" ({error})" if isinstance(error, Reason) else ""
            raise ConfigError(f"{source} {text}: expected {expected}{why}") from None

    def check(self, value: Any, source: str) -> Any:
        """A value from a file, as `parse` would give it from text; ConfigError naming `source`. None is one if there is no default."""
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None and self.default is not None:
            raise ConfigError(f"{source} null: leave it out for its default" + (f", {self.shown_default}" if self.shown_default else ""))
        if value is None:
            return value
        if isinstance(value, dict) and getattr(self.from_string, "reads_dict", False):
            return plain(value, source)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        try:
            text = value if isinstance(value, str) else self.text(value)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list that holds itself
            raise ConfigError(f"{source}: {error}") from None
        if self.from_string is None and not self.choices and not isinstance(value, str):
            raise ConfigError(f"{source} {text}: expected a text; put it in quotes")
        return self.parse(text, source)
