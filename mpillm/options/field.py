"""Fields: the values that can be configured, and where each has an effect."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

from disagg.errors import ConfigError, nearest
from disagg.yaml_text import is_text, plain, value_text

if TYPE_CHECKING:  # this TypeVar has defaults: `Field` alone is a Field of any type
    from typing import TypedDict

    from typing_extensions import Self, TypeVar, Unpack

    class _FieldParameters(TypedDict, total=False):
        disallow_default: bool
        disallow_argparse: bool | None
        argparse_opts: Mapping[str, Any] | None
        from_environ: str | None
        autoconf_strategy: AutoConfStrategy
        choices: tuple[str, ...]
        group: str
        aliases: tuple[str, ...]
        effect: Effect

    T = TypeVar("T", default=Any)
    V = TypeVar("V")
else:
    from typing import TypeVar

    T = TypeVar("T")


ANY = object()
"""In `Use.needs`: any value."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a value. An empty field means all: all commands, cores, scenarios or loads."""

    commands: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    needs: tuple[str, Any] | None = None  # another option or build flag, and the value that it must have
    loads: tuple[str, ...] = ()  # what makes the load: see `RunConfig.load`


@dataclasses.dataclass(frozen=True)
class Effect:
    """All uses of a value. Without uses, it is accepted but never used."""

    uses: tuple[Use, ...] = (Use(),)
    measured: bool = True  # a run's results depend on the value: setting it without effect is an error
    instead: str = ""  # what replaces a value without uses


EVERYWHERE = Effect()


class AutoConfStrategy(enum.Enum):
    """How a value combines with the value of a lower source."""

    Replace = "replace"
    DictUpdate = "dict_update"  # dictionaries: key by key


_MAX_CHARS = 1000  # of a value, or a reason, in a message


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."


class Reason(ValueError):
    """Why a text is not a valid value; the message adds the expected form."""


@dataclasses.dataclass(frozen=True, eq=False)
class Field(Generic[T]):
    """One value that can be configured. A field is equal only to itself.

    Its name has underscores; hyphens mean the same on the command line. Parameters after `*` are mpillm's.
    T is the value's type: the result of `from_string`, or else a text; without a default, it may also be
    None. An attribute of an `Options` class is the field itself; on an instance, it is the field's value.
    """

    name: str
    description: str = ""
    from_string: Callable[[str], Any] | None = None  # None: the text is the value
    disallow_default: bool = False  # a missing value is an error
    disallow_argparse: bool | None = None  # no command line option; None: True with `from_environ`
    argparse_opts: Mapping[str, Any] | None = None  # for `ArgumentParser.add_argument`
    from_environ: str | None = None  # an environment variable
    autoconf_strategy: AutoConfStrategy = AutoConfStrategy.Replace
    _: dataclasses.KW_ONLY
    default: Any = None  # None: no default
    choices: tuple[str, ...] = ()  # in any letter case
    group: str = "general"  # the heading in --help
    aliases: tuple[str, ...] = ()  # other names
    effect: Effect = EVERYWHERE  # where the value is used

    @overload
    def __get__(self, options: None, owner: type) -> Self: ...
    @overload
    def __get__(self, options: Options, owner: type) -> T: ...
    def __get__(self, options: object, owner: type) -> Self | T:
        return options[self] if isinstance(options, Options) else self

    if TYPE_CHECKING:

        @overload
        def but(
            self: Field[V | None],
            description: str | None = None,
            *,
            default: V,
            **more: Unpack[_FieldParameters],
        ) -> Field[V]: ...
        @overload
        def but(self, description: str | None = None, **more: Unpack[_FieldParameters]) -> Self: ...
        @overload
        def but(
            self, description: str | None = None, *, default: T, **more: Unpack[_FieldParameters]
        ) -> Self: ...

    def but(self, description: str | None = None, **more: Any) -> Any:
        """Return a field like this one, with another description, default, group or other parameters.

        Commands that share an option with `run` use this, for example for another default.
        """
        if description is not None:
            more["description"] = description
        return dataclasses.replace(self, **more)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    @property
    def is_option(self) -> bool:
        """Whether the command line may set the field."""
        return not (self.from_environ if self.disallow_argparse is None else self.disallow_argparse)

    @property
    def is_flag(self) -> bool:
        """Whether the option without a value means true."""
        return isinstance(self.default, bool) or self.from_string is bool

    @property
    def default_text(self) -> str:
        """The default as text for the command line; empty without a default."""
        return "" if self.default is None or self.default == {} else self.text(self.default)

    @property
    def _expected(self) -> str:
        reads = f"what {getattr(self.from_string, '__name__', self.name)} reads"
        return str(getattr(self.from_string, "expects", reads))

    def text(self, value: Any) -> str:
        """Return the text that `parse` reads as `value`."""
        if isinstance(value, bool):
            return str(value).lower()
        return str(getattr(self.from_string, "to_text", str)(value))

    def parse(self, text: str, source: str) -> Any:
        """Return the value of `text`. Raises ConfigError naming `source`, the text, and what is allowed."""
        if not is_text(text):
            raise ConfigError(f"{source} {_cut(ascii(text))}: not UTF-8 text, or with a null character")
        quoted = f"{source} {_cut(text) if text.strip() else repr(text)}"
        if self.choices and text not in self.choices:
            by_case = {choice.lower(): choice for choice in self.choices}
            if text.lower() in by_case:
                return by_case[text.lower()]
            raise ConfigError(f"{quoted}: not one of {', '.join(self.choices)}{nearest(text, self.choices)}")
        if self.from_string is bool:  # bool("false") is True
            if text.lower() not in ("true", "false", "1", "0"):
                raise ConfigError(f"{quoted}: expected true or false")
            return text.lower() in ("true", "1")
        if self.from_string is None and not text.strip():
            raise ConfigError(f"{quoted}: expected a text that is not empty")
        try:
            return self.from_string(text) if self.from_string else text
        except (ArithmeticError, ValueError, RecursionError) as error:
            why = f" ({_cut(str(error))})" if isinstance(error, Reason) else ""
            raise ConfigError(f"{quoted}: expected {self._expected}{why}") from None

    def check(self, value: Any, source: str) -> Any:
        """Return the checked value of an entry in a file. `parse` parses a text.

        Raises ConfigError naming `source`. None is a valid value if the field has no default.
        """
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None and self.default is not None:
            default = f", {self.default_text}" if self.default_text else ""
            raise ConfigError(f"{source} null: leave it out for its default{default}")
        if value is None:
            return value
        if isinstance(value, dict) and getattr(self.from_string, "reads_dict", False):
            return plain(value, source)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        try:
            text = value if isinstance(value, str) else self.text(value)
        # such as a number of hundreds of digits, or a list that contains itself
        except (ArithmeticError, ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: {error}") from None
        except (TypeError, AttributeError):  # `text` does not support the value's type
            raise ConfigError(f"{source} {value_text(value)}: expected {self._expected}") from None
        if self.from_string is None and not self.choices and not isinstance(value, str):
            raise ConfigError(f"{source} {_cut(text)}: expected a text; put it in quotes")
        return self.parse(text, source)


class FieldDeclaration(NamedTuple):
    """The arguments of `option`; the class adds name, group and effect."""

    arguments: tuple[Any, ...]
    more: Mapping[str, Any]


if TYPE_CHECKING:

    @overload
    def option(
        description: str, from_string: Callable[[str], V], *, default: Any, **more: Unpack[_FieldParameters]
    ) -> Field[V]: ...
    @overload
    def option(
        description: str, from_string: Callable[[str], V], **more: Unpack[_FieldParameters]
    ) -> Field[V | None]: ...
    @overload
    def option(description: str, *, default: str, **more: Unpack[_FieldParameters]) -> Field[str]: ...
    @overload
    def option(description: str, **more: Unpack[_FieldParameters]) -> Field[str | None]: ...


def option(*arguments: Any, **more: Any) -> Any:
    """Declare a field of an `Options` class, named like the attribute; see `Field` for the parameters.

    Group and effect default to those of the class.
    """
    return FieldDeclaration(arguments, more)


class Options:
    """A class whose attributes are fields. On an instance, the attributes are the fields' values."""

    def __init_subclass__(cls, group: str = "general", effect: Effect = EVERYWHERE) -> None:
        """`group`, `effect`: defaults for each field that `option` declares in this class."""
        for name, declared in list(vars(cls).items()):
            if isinstance(declared, FieldDeclaration):
                more = {"group": group, "effect": effect, **declared.more}
                setattr(cls, name, Field(name, *declared.arguments, **more))

    def __getitem__(self, field: Field[T]) -> T:
        """Return the value of `field`."""
        raise NotImplementedError(f"{type(self).__name__} declares fields and holds no values")

    @classmethod
    def declared(cls) -> list[Field]:
        """Return the fields of this class, then of its bases. A name occurs once: the nearest class wins."""
        fields: dict[str, Field] = {}
        for base in cls.__mro__:
            for field in vars(base).values():
                if isinstance(field, Field):
                    fields.setdefault(field.name, field)
        return list(fields.values())
