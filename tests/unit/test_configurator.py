"""The configurator: the examples of the reference text, what nv-mitten's does, and the order of sources over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.configurator import AutoConfStrategy, Configuration, Field, HelpInfo, autoconfigure, bind
from mpillm.fields import trtllm_runtime_flags

FLAGS = "n_tokens:1337,my_cool_field:foobar"


@autoconfigure
@bind(trtllm_runtime_flags, "flags")
class LLMThing:
    def __init__(self, *args: Any, flags: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.flags = flags


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["mpillm"])
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS", raising=False)
    yield


CONFIG = {trtllm_runtime_flags: {"n_tokens": 42, "other_key": "value"}}


def test_reference_1_the_call_goes_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mpillm", f"--trtllm_runtime_flags={FLAGS}"])
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "n_tokens:1")
    with Configuration(CONFIG).autoapply():
        assert LLMThing(flags={"foo": "bar"}).flags == {"foo": "bar"}
    assert LLMThing(flags={"foo": "bar"}).flags == {"foo": "bar"}


@pytest.mark.parametrize("words", [[f"--trtllm_runtime_flags={FLAGS}"], ["--other", "x", "--trtllm-runtime-flags", FLAGS]])
def test_reference_2_the_command_line_replaces_the_context(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mpillm", *words])
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 1337, "my_cool_field": "foobar"}


def test_reference_3_the_context() -> None:
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 42, "other_key": "value"}
    assert LLMThing().flags is None


def test_the_environment_is_laid_over_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "n_tokens:7,more:true")
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 7, "other_key": "value", "more": True}


def test_a_field_that_disallows_its_default() -> None:
    needed = Field("needed", disallow_default=True)

    @autoconfigure
    @bind(needed, "value")
    class Thing:
        def __init__(self, value: str = "default") -> None:
            self.value = value

    with Configuration().autoapply():
        with pytest.raises(ConfigError, match=r"Thing needs a value for value: needed \(--needed\) is not set"):
            Thing()
        assert Thing("given").value == "given"
    assert Thing.from_fields(config=Configuration({needed: "x"})).value == "x"  # type: ignore[attr-defined]
    assert Thing.from_fields(config=Configuration(argv=["--needed", "y"])).value == "y"  # type: ignore[attr-defined]
    assert Thing().value == "default", "outside of a context a class is an ordinary one"


def test_dictionaries_can_be_merged() -> None:
    merged = Field("merged", from_string=trtllm_runtime_flags.from_string, autoconf_strategy=AutoConfStrategy.DictUpdate)
    found = Configuration({merged: {"a": 1, "b": 2}}, sources="file", argv=["--merged", "b:3,c:4"]).resolve([merged])[merged]
    assert found.value == {"a": 1, "b": 3, "c": 4}
    assert found.keys == {"a": "file", "b": "command line", "c": "command line"}


def test_dataclasses_inherit_bindings() -> None:
    first, second = Field("first"), Field("second", from_string=int)

    @autoconfigure
    @bind(first, "one")
    @dataclasses.dataclass
    class Parent:
        one: str = "parent"
        other: str = "unchanged"

    @autoconfigure
    @bind(second, "two")
    @dataclasses.dataclass
    class Child(Parent):
        two: int = 0
        own: str = "child"

    with Configuration({first: "x", second: 5}).autoapply():
        assert Child() == Child("x", "unchanged", 5, "child")
        assert Child(one="y").one == "y"
    assert set(HelpInfo.fields([Child])) == {first, second}
    assert "--second" in HelpInfo.build_help_string([Child])


def test_a_binding_without_a_parameter() -> None:
    with pytest.raises(TypeError, match=r"Thing has no parameter valu \(did you mean 'value'\?\)"):

        @autoconfigure
        @bind(Field("f"), "valu")
        class Thing:
            def __init__(self, value: int = 0) -> None: ...
