"""What the record of TensorRT-LLM's interface allows."""

from __future__ import annotations

import os
from typing import Any

from tests.helpers.trtllm_records import NEWEST, STAND_IN, record

RECORD: dict[str, Any] = record(os.environ.get(STAND_IN, NEWEST))
REFUSED = 666


def bound(
    name: str, overloads: list[list[str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, of the first overload that takes them. Raises TypeError if none does."""
    for parameters in overloads:
        names = [one.rstrip("=") for one in parameters if one not in ("*", "**")]
        first_keyword = parameters.index("*") if "*" in parameters else len(names)
        values = dict(zip(names[:first_keyword], args, strict=False))
        required = {one for one in parameters if one not in ("*", "**") and not one.endswith("=")}
        known = kwargs.keys() <= {*names} or "**" in parameters
        if (
            len(args) <= first_keyword
            and known
            and not values.keys() & kwargs.keys()
            and required <= values.keys() | kwargs.keys()
        ):
            return values | kwargs
    raise TypeError(
        f"{name}(): incompatible arguments ({len(args)} by position; {', '.join(kwargs)}): takes {overloads}"
    )


class Bound:
    """Has the attributes and calls that are recorded of a class of the bindings."""

    _name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = RECORD["bindings"][self._name]
        self._attributes = {*spec["attributes"]}
        self._values = bound(self._name, spec["init"], args, kwargs)

    def __init_subclass__(cls) -> None:
        cls._name = cls._name or cls.__name__
        recorded = RECORD["bindings"].get(cls._name, {"methods": {}})  # a release may have removed the class
        for name, overloads in recorded["methods"].items():
            if (made := cls.__dict__.get(name)) is not None:
                setattr(cls, name, _checked(f"{cls._name}.{name}", overloads, made))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._attributes:
            return self._values.get(name)
        raise AttributeError(f"'{self._name}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._attributes:
            self._values[name] = value
        else:
            raise AttributeError(f"'{self._name}' object has no attribute '{name}'")


def _checked(name: str, overloads: list[list[str]], method: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, **bound(name, overloads, args, kwargs))

    return call


class Fields:
    """Has the recorded fields of a configuration of the LLM API (pydantic's), and refuses others."""

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - {field.rstrip("=") for field in fields(type(self).__name__)}:
            raise ValueError(
                f"{type(self).__name__}: Extra inputs are not permitted: {', '.join(sorted(unknown))}"
            )
        self.__dict__.update(values)


def fields(name: str) -> list[str]:
    """Return the fields of a class, those of its bases included."""
    spec = RECORD["python"].get(name)
    return (
        []
        if spec is None
        else [*spec["fields"], *(field for base in spec["bases"] for field in fields(base))]
    )


def called(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return bound(f"{name}.{method}", [RECORD["python"][name]["methods"][method]], args, kwargs)


def answer(
    prompt: list[int], max_tokens: int, end_id: int | None, min_tokens: int, stops: list[list[int]]
) -> list[int]:
    """Return the prompt backwards, up to an end or its longest."""
    assert all(type(token) is int for token in prompt), "tokens are Python's integers"
    assert type(max_tokens) is int and max_tokens > 0
    tokens: list[int] = []
    for token in prompt[::-1][:max_tokens]:
        tokens.append(token)
        if len(tokens) >= min_tokens and (
            token == end_id or any(tokens[-len(stop) :] == stop for stop in stops)
        ):
            break
    return tokens
