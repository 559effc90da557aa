"""Resolution of values: fields, their bindings to parameters of classes, and the current configuration.

Names and behavior follow nv-mitten's `nvmitten.configurator`: its documentation, its published source and its
users' code. This code is mpillm's. A parameter gets its value from the first of these that has one:

1. the argument in the call itself;
2. the command line;
3. the environment variable of a field with `from_environ`;
4. the `Configuration` whose `autoapply()` was entered last in this thread (an outer one has no effect);
5. the field's default, and then the parameter's own default.

Outside `autoapply()`, a class is an ordinary class. `Cls.from_fields()` still determines its fields' values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from disagg.errors import ConfigError, nearest
from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME
from mpillm.options.flags import OVERLAYS
from mpillm.options.sources import (
    OptionValue,
    Source,
    command_line_values,
    default_values,
    environment_values,
    from_environment,
)

if TYPE_CHECKING:
    from mpillm.options.run_config import RunConfig

T = TypeVar("T", bound=type)
V = TypeVar("V")
_BOUND = "_mitten_bound_fields"  # nv-mitten's name, which its users also read


class Configuration(UserDict):  # type: ignore[type-arg]
    """Values by field.

    `options` (texts by name) and `environ` override them. By default, both are this process's. `where`: place
    of the values, for messages.
    """

    def __init__(
        self,
        values: Mapping[Any, Any] | None = None,
        *,
        where: str = "configuration",
        options: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(values or {})
        self.where = where
        self.options = options
        self.environ = environ

    def subset(self, ctx: Iterable[Hashable], applicable: Iterable[Field]) -> Configuration:
        """Return the values of `applicable` fields, by name, in the dictionary at the path of keys `ctx`.

        Raises KeyError naming a missing key of the path.
        """
        values: Any = self.data
        for key in ctx:
            if not isinstance(values, Mapping) or key not in values:
                raise KeyError(f"the configuration has no {key!r} at {tuple(ctx)}")
            values = values[key]
        return Configuration({field.name: values[field.name] for field in applicable if field.name in values})

    @contextlib.contextmanager
    def autoapply(self) -> Iterator[None]:
        """In the `with` block, give `@autoconfigure`d classes their values, in this thread only."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def resolve(self, fields: Iterable[Field]) -> dict[Field, OptionValue]:
        """Return the values of `fields` from all sources; a field without a value is left out."""
        fields = list(fields)
        texts = option_texts(fields, sys.argv[1:]) if self.options is None else self.options
        defaults = default_values(field for field in fields if field.default is not None)
        own = {
            field.name: OptionValue(self.data[field], Source.FILE, self.where)
            for field in fields
            if field in self.data
        }
        layers = (defaults, own, *_of_user(fields, texts, self.environ))
        values = {field: _merged(field, layers) for field in fields}
        return {field: value for field, value in values.items() if value is not None}

    def configure(self, cls: type, passed: Iterable[str] = ()) -> dict[str, Any]:
        """Return arguments for `cls` by parameter, except the `passed` parameters.

        Raises ConfigError if a field that disallows its default has no value.
        """
        missing = {field: name for field, name in bound_fields(cls).items() if name not in set(passed)}
        values = self.resolve(missing)
        for field, name in missing.items():
            if field.disallow_default and (field not in values or values[field].source is Source.DEFAULT):
                option = f" (environment variable {field.from_environ})" if field.from_environ else ""
                option = f" (--{field.name})" if field.is_option else option
                raise ConfigError(
                    f"{cls.__name__} needs a value for {name}: {field.name}{option} is not set,"
                    " and has no default"
                )
        return {name: values[field].value for field, name in missing.items() if field in values}


_current: ContextVar[Configuration | None] = ContextVar("configuration", default=None)


def current() -> Configuration | None:
    """Return the configuration in force in this thread."""
    return _current.get()


def in_force(config: RunConfig) -> Configuration:
    """Return the values of a run as a configuration, which no other source overrides."""
    values = {
        BY_NAME[name]: value for name, value in config.values.items() if value is not None and name in BY_NAME
    }
    return Configuration(values, options={}, environ={})


@contextlib.contextmanager
def applied(config: RunConfig) -> Iterator[None]:
    """In the `with` block, the values of a run are in force. A ConfigError also names their sources."""
    with config.explained(), in_force(config).autoapply():
        yield


def configured(cls: Callable[[], V], config: RunConfig) -> V:
    """Return an instance of an `@autoconfigure`d class from the values of a run."""
    with applied(config):
        return cls()


def environment() -> Mapping[str, str]:
    """Return the environment in force: the current configuration's, or this process's."""
    configuration = _current.get()
    return os.environ if configuration is None or configuration.environ is None else configuration.environ


def overlaid(field: Field, flags: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `flags` with the environment's overrides, for the class that owns the flags.

    A command's values already include the overrides, and come with an empty environment.
    """
    override = from_environment(field, OVERLAYS[field], environment())
    return {**(flags or {}), **(override.value if override else {})}


def _of_user(
    fields: Sequence[Field], texts: Mapping[str, str], environ: Mapping[str, str] | None
) -> tuple[dict[str, OptionValue], ...]:
    """Return the values of an environment and of a command line's texts. ConfigError for a wrong value."""
    return (
        environment_values(fields, os.environ if environ is None else environ),
        command_line_values(fields, texts),
    )


def _merged(field: Field, layers: Iterable[Mapping[str, OptionValue]]) -> OptionValue | None:
    """Return the value of `field` from layers, the lowest first; None if none has one."""
    value: OptionValue | None = None
    for layer in layers:
        if field.name in layer:
            value = layer[field.name].over(value, field.autoconf_strategy)
    return value


def parse_fields(fields: Iterable[Field], args: Sequence[str] | None = None) -> dict[str, Any]:
    """Return values by field name, from a command line and the environment.

    `args`: by default, this process's. Raises ConfigError if an option or a variable has a wrong value.
    """
    fields = list(fields)
    layers = _of_user(fields, option_texts(fields, sys.argv[1:] if args is None else args), None)
    values = {field.name: _merged(field, layers) for field in fields}
    return {name: value.value for name, value in values.items() if value is not None}


def option_texts(fields: Iterable[Field], argv: Sequence[str]) -> dict[str, str]:
    """Return the texts of `fields`, by name, in a command line that may also have other options."""
    parser = Parser(prog="mpillm", add_help=False)
    add_fields(parser, list(fields))
    return {name: text for name, text in vars(parser.parse_known(argv)[0]).items() if text is not None}


def bind(field: Field, arg_name: str | None = None, explicit: bool = True) -> Callable[[T], T]:
    """Decorate a class: its parameter `arg_name` (default: the field's name) receives the field's value.

    `explicit`: `__init__` must name the parameter in its signature; otherwise `**kwargs` may take it. Raises
    KeyError if the parameter is not named there, or the field is bound already.
    """

    def decorate(cls: T) -> T:
        own, name = dict(vars(cls).get(_BOUND, {})), arg_name or field.name
        if explicit and name not in (names := _parameters(cls)):
            raise KeyError(f"{cls.__name__} has no parameter {name}{nearest(name, names)}")
        if field in own:
            raise KeyError(f"{cls.__name__}: {field.name} is bound to {own[field]} already")
        setattr(cls, _BOUND, {field: name, **own})
        cls.from_fields = classmethod(_from_fields)  # type: ignore[attr-defined]
        if hasattr(cls, "immediate_dependencies") and not HelpInfo.has(cls):  # `cls` is an operation
            HelpInfo.add_configurable_operation(cls)
        return cls

    return decorate


def _parameters(cls: type) -> Collection[str]:
    """Return the parameters of `cls`, by name.

    A wrapper of a dataclass's `__init__` that takes any keyword has no parameters to read. Then the
    dataclass's fields are the parameters.
    """
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if dataclasses.is_dataclass(cls) and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return {*parameters, *(field.name for field in dataclasses.fields(cls) if field.init)}
    return parameters


def bound_fields(cls: type) -> dict[Field, str]:
    """Return the parameter of each field of `cls`, and of its bases if its `__init__` takes the parameter."""
    names = _parameters(cls)
    bound: dict[Field, str] = dict(vars(cls).get(_BOUND, {}))
    for base in cls.__mro__[1:]:
        bound_names = set(bound.values())
        for field, name in vars(base).get(_BOUND, {}).items():
            if name in names and name not in bound_names:
                bound.setdefault(field, name)
    return bound


def autoconfigure(cls: T) -> T:
    """Decorate a class, around `@bind` and `@dataclass`: `autoapply()` then supplies missing arguments."""
    plain = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        configuration = _current.get()
        if configuration is not None:
            passed = (*signature.bind_partial(self, *args, **kwargs).arguments, *kwargs)
            kwargs = {**configuration.configure(cls, passed), **kwargs}
        plain(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _from_fields(cls: type, /, *args: Any, config: Configuration | None = None, **kwargs: Any) -> Any:
    """Create an instance of a class with bound fields. `config`: by default the current one, if any."""
    if config is None:
        config = _current.get() or Configuration()
    passed = (*inspect.signature(cls).bind_partial(*args, **kwargs).arguments, *kwargs)
    with config.autoapply():
        return cls(*args, **{**config.configure(cls, passed), **kwargs})


def _path(keyspace: Hashable | Sequence[Hashable]) -> tuple[Hashable, ...]:
    return tuple(keyspace) if isinstance(keyspace, (list, tuple)) else (keyspace,)


class ConfigurationIndex:
    """Configurations by a path of keys: system, workload, scenario, setting, …"""

    def __init__(self, index_name: str = "ConfigurationIndex") -> None:
        """`index_name`: the index's name in error messages."""
        self.name = index_name
        self._configurations: dict[tuple[Hashable, ...], Configuration] = {}

    def register(self, keyspace: Hashable | Sequence[Hashable], config: Configuration) -> None:
        """Store `config` under a path or a single key. Raises ConfigError if the path is in use."""
        path = _path(keyspace)
        if path in self._configurations:
            raise ConfigError(f"{self.name} has a configuration {'/'.join(map(str, path))} already")
        self._configurations[path] = config

    def get(
        self, keyspace: Hashable | Sequence[Hashable], prefix: Sequence[Hashable] | None = None
    ) -> Configuration | None:
        """Return the configuration stored under the path, or None."""
        return self._configurations.get((*(prefix or ()), *_path(keyspace)))

    def load_module(
        self,
        module_path: str,
        prefix: Sequence[Hashable] | None = None,
        process_key: Callable[[Any], Hashable | Sequence[Hashable]] | None = None,
    ) -> None:
        """Store the configurations in a Python module's dictionary EXPORTS under its keys, which are paths.

        Raises ConfigError if the module has no such dictionary.
        """
        exports = getattr(importlib.import_module(module_path), "EXPORTS", None)
        if not isinstance(exports, dict):
            raise ConfigError(f"{module_path} has no dictionary EXPORTS of configurations")
        for key, values in exports.items():
            path = _path(process_key(key) if process_key else key)
            checked = {
                field: field.check(value, f"{module_path}: {field.name}")
                if isinstance(value, str) or field.from_string
                else value
                for field, value in values.items()
            }
            self.register((*(prefix or ()), *path), Configuration(checked, where=module_path))


class HelpInfo:
    """The fields that classes are bound to, and their --help."""

    _dependencies: dict[type, tuple[type, ...]] = {}  # noqa: RUF012 - a registry

    @classmethod
    def add_configurator_dependency(cls, user: type, used: type) -> None:
        """Record that `user` creates instances of `used`, so that fields of `used` count as `user`'s."""
        cls.add_configurator_dependencies(user, (used,))

    @classmethod
    def add_configurator_dependencies(cls, user: type, used: Iterable[type]) -> None:
        """Do as `add_configurator_dependency`, for several `used` classes."""
        cls._dependencies[user] = (*cls._dependencies.get(user, ()), *used)

    @classmethod
    def add_configurable_operation(cls, op: type) -> None:
        """Record the `immediate_dependencies()` of an operation. Raises ValueError without this method."""
        if not hasattr(op, "immediate_dependencies"):
            raise ValueError(f"{op.__name__} is not an operation: it has no immediate_dependencies()")
        cls.add_configurator_dependencies(op, op.immediate_dependencies() or ())

    @classmethod
    def has(cls, user: type) -> bool:
        """Return whether dependencies of a class have been recorded."""
        return user in cls._dependencies

    @classmethod
    def get_all_dependencies(cls, user: type) -> set[type]:
        """Return a class with all classes that it creates, directly or through others."""
        return set(cls._in_order([user]))

    @classmethod
    def _in_order(cls, classes: Iterable[type]) -> list[type]:
        waiting, seen = list(classes), dict[type, None]()
        while waiting:
            user = waiting.pop(0)
            if user not in seen:
                seen[user] = None
                waiting += sorted(cls._dependencies.get(user, ()), key=lambda used: used.__qualname__)
        return list(seen)

    @classmethod
    def fields(cls, classes: Iterable[type]) -> list[Field]:
        """Return the fields of classes and of the classes that they create, each once."""
        return list(dict.fromkeys(field for user in cls._in_order(classes) for field in bound_fields(user)))

    @classmethod
    def build_help_string(cls, classes: type | Iterable[type]) -> str:
        """Return the options of a class, or of several, by group, in the form of --help."""
        parser = Parser(prog="mpillm", add_help=False)
        add_fields(parser, cls.fields([classes] if isinstance(classes, type) else classes))
        return parser.format_help()
