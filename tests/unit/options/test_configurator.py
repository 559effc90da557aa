"""The configurator: the examples of the reference text, and what nv-mitten's does."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.fields import save_outputs, seed, trtllm_runtime_flags
from mpillm.options.field import AutoConfStrategy, Field
from mpillm.options.mitten import (
    Configuration,
    ConfigurationIndex,
    HelpInfo,
    autoconfigure,
    bind,
    option_texts,
    parse_fields,
)
from mpillm.options.parsers import flag_dict, positive
from tests.helpers.configured import from_fields

FLAGS = "n_tokens:1337,my_cool_field:foobar"


@autoconfigure
@bind(trtllm_runtime_flags, "flags")
class LLMThing:
    def __init__(self, *args: Any, flags: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.flags = flags


CONFIG = {trtllm_runtime_flags: {"n_tokens": 42, "other_key": "value"}}


def test_reference_1_the_call_goes_before_everything(
    monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    command_line += [f"--trtllm_runtime_flags={FLAGS}"]
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "n_tokens:1")
    with Configuration(CONFIG).autoapply():
        assert LLMThing(flags={"foo": "bar"}).flags == {"foo": "bar"}
    assert LLMThing(flags={"foo": "bar"}).flags == {"foo": "bar"}


@pytest.mark.parametrize(
    "words", [[f"--trtllm_runtime_flags={FLAGS}"], ["--other", "x", "--trtllm-runtime-flags", FLAGS]]
)
def test_reference_2_the_command_line_replaces_the_context(command_line: list[str], words: list[str]) -> None:
    command_line += words
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 1337, "my_cool_field": "foobar"}


def test_reference_3_the_context() -> None:
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 42, "other_key": "value"}
    assert LLMThing().flags is None


def test_the_environment_is_laid_over_the_flags_of_three_classes_and_not_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "n_tokens:7,more:true")
    with Configuration(CONFIG).autoapply():
        assert LLMThing().flags == {"n_tokens": 42, "other_key": "value"}


def test_a_field_that_disallows_its_default() -> None:
    needed = Field("needed", disallow_default=True)

    @autoconfigure
    @bind(needed, "value")
    class Thing:
        def __init__(self, value: str = "default") -> None:
            self.value = value

    with Configuration().autoapply():
        with pytest.raises(
            ConfigError, match=r"Thing needs a value for value: needed \(--needed\) is not set"
        ):
            Thing()
        assert Thing("given").value == "given"
    assert from_fields(Thing, config=Configuration({needed: "x"})).value == "x"
    assert from_fields(Thing, config=Configuration(options={"needed": "y"})).value == "y"
    assert Thing().value == "default", "outside of a context a class is an ordinary one"


def test_dictionaries_can_be_merged() -> None:
    merged = Field("merged", from_string=flag_dict, autoconf_strategy=AutoConfStrategy.DictUpdate)
    found = Configuration({merged: {"a": 1, "b": 2}}, options={"merged": "b:3,c:4"}).resolve([merged])[merged]
    assert found.value == {"a": 1, "b": 3, "c": 4}
    assert {name: key.where for name, key in found.keys.items()} == {
        "a": "configuration",
        "b": "command line",
        "c": "command line",
    }


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


def takes_any_keyword(cls: Any) -> Any:
    """Decorate a class as NVIDIA's configuration classes are: its `__init__` ignores keywords that the
    dataclass does not know."""
    plain = cls.__init__

    def __init__(self: Any, **kwargs: Any) -> None:
        plain(self, **{name: value for name, value in kwargs.items() if name in cls.__dataclass_fields__})

    cls.__init__ = __init__
    return cls


def test_a_dataclass_whose_init_takes_any_keyword_inherits_bindings() -> None:
    first, second, third = Field("first"), Field("second", from_string=int), Field("third")

    @autoconfigure
    @bind(first, "one")
    @takes_any_keyword
    @dataclasses.dataclass
    class Parent:
        one: str = "parent"

    @autoconfigure
    @bind(second, "two")
    @takes_any_keyword
    @dataclasses.dataclass
    class Child(Parent):
        two: int = 0
        made: str = dataclasses.field(default="made", init=False)

    @autoconfigure
    @takes_any_keyword
    @dataclasses.dataclass
    class Grandchild(Child):
        three: str = "own"

    values: dict[Field, object] = {first: "x", second: 5, third: "z"}
    with Configuration(values).autoapply():
        assert Child() == Child(one="x", two=5)
        assert Grandchild(two=6, unknown=1) == Grandchild(one="x", two=6, three="own")  # type: ignore[call-arg]
    assert vars(from_fields(Grandchild, config=Configuration(values))) == {
        "one": "x",
        "two": 5,
        "three": "own",
    }
    assert HelpInfo.fields([Grandchild]) == [second, first]
    with pytest.raises(KeyError, match=r"Wrong has no parameter tow \(did you mean 'two'\?\)"):

        @autoconfigure
        @bind(third, "tow")
        @takes_any_keyword
        @dataclasses.dataclass
        class Wrong(Child): ...

    with pytest.raises(KeyError, match="Computed has no parameter made"):

        @autoconfigure
        @bind(third, "made")
        @takes_any_keyword
        @dataclasses.dataclass
        class Computed(Child): ...


def test_what_a_subclass_binds_to_another_field_is_no_longer_the_inherited_fields() -> None:
    theirs, mine = Field("theirs"), Field("mine")

    @autoconfigure
    @bind(theirs, "one")
    @dataclasses.dataclass
    class Parent:
        one: str = "parent"

    @autoconfigure
    @bind(mine, "one")
    @dataclasses.dataclass
    class Child(Parent): ...

    with Configuration({theirs: "theirs", mine: "mine"}).autoapply():
        assert (Parent().one, Child().one) == ("theirs", "mine")
    with Configuration({theirs: "theirs"}).autoapply():
        assert Child().one == "parent"


def test_a_subclass_without_the_parameter_has_no_use_for_the_binding() -> None:
    @autoconfigure
    class Fixed(LLMThing):
        def __init__(self) -> None:
            super().__init__(flags={"fixed": True})

    with Configuration(CONFIG).autoapply():
        assert Fixed().flags == {"fixed": True}


def test_from_fields_holds_for_what_is_made_inside() -> None:
    @bind(seed)
    class Outer:
        def __init__(self, seed: int = 0) -> None:
            self.seed, self.inner = seed, LLMThing()

    outer = Outer.from_fields(config=Configuration({**CONFIG, seed: 3}))  # type: ignore[attr-defined]
    assert (outer.seed, outer.inner.flags) == (3, CONFIG[trtllm_runtime_flags])


def test_a_binding_without_a_parameter() -> None:
    with pytest.raises(KeyError, match=r"Thing has no parameter valu \(did you mean 'value'\?\)"):

        @bind(Field("f"), "valu")
        class Thing:
            def __init__(self, value: int = 0) -> None: ...

    with pytest.raises(KeyError, match="Anything has no parameter hidden"):

        @bind(Field("f"), "hidden")
        class Anything:
            def __init__(self, **more: object) -> None: ...


def test_a_binding_that_is_not_explicit() -> None:
    field = Field("f")

    @autoconfigure
    @bind(field, "hidden", explicit=False)
    class Anything:
        def __init__(self, **more: object) -> None:
            self.more = more

    assert Anything().more == {}
    with Configuration({field: "x"}).autoapply():
        assert Anything().more == {"hidden": "x"}
        assert Anything(hidden="call").more == {"hidden": "call"}


def test_a_field_is_bound_once() -> None:
    field = Field("f")
    with pytest.raises(KeyError, match="Thing: f is bound to one already"):

        @bind(field, "two")
        @bind(field, "one")
        class Thing:
            def __init__(self, one: int = 0, two: int = 0) -> None: ...


def test_bindings_have_nv_mittens_name() -> None:
    assert LLMThing._mitten_bound_fields == {trtllm_runtime_flags: "flags"}  # type: ignore[attr-defined]


def test_a_subset_of_a_nested_configuration() -> None:
    number = Field("number", from_string=int)
    nested: Configuration = Configuration({"a": {"b": {"seed": 3, "number": 4, "other": 5}}})
    assert dict(nested.subset(["a", "b"], [seed, number, save_outputs])) == {"seed": 3, "number": 4}
    assert dict(nested.subset([], [seed])) == {}
    with pytest.raises(KeyError, match=r"no 'c' at \('a', 'c', 'b'\)"):
        nested.subset(["a", "c", "b"], [seed])
    with pytest.raises(KeyError, match="no 'x' at"):
        nested.subset(["a", "b", "seed", "x"], [seed])


def test_a_field_is_one_object_whatever_is_copied() -> None:
    assert copy.copy(seed) is seed
    assert copy.deepcopy({seed: [1]}) == {seed: [1]}


def test_bind_without_autoconfigure_has_from_fields() -> None:
    first, second = Field("first"), Field("second", from_string=int)

    @bind(first, "one")
    @bind(second)
    class Thing:
        def __init__(self, one: str = "none", second: int = 2, more: int = 3) -> None:
            self.values = (one, second, more)

    with Configuration({first: "context"}).autoapply():
        assert Thing().values == ("none", 2, 3)
        assert from_fields(Thing, more=4).values == ("context", 2, 4)
    assert from_fields(Thing, "call", config=Configuration({first: "x", second: 9})).values == ("call", 9, 3)


def test_contexts_nest_and_belong_to_a_thread() -> None:
    field = Field("field")

    @autoconfigure
    @bind(field)
    class Thing:
        def __init__(self, field: str = "default") -> None:
            self.field = field

    found = []
    with Configuration({field: "outer"}).autoapply():
        with pytest.raises(RuntimeError), Configuration({field: "inner"}).autoapply():
            found.append(Thing().field)
            with Configuration().autoapply():
                found.append(Thing().field)
            raise RuntimeError
        found.append(Thing().field)
        thread = threading.Thread(target=lambda: found.append(Thing().field))
        thread.start()
        thread.join()
    assert found == ["inner", "default", "outer", "default"]


def test_configure_gives_arguments() -> None:
    field, other = Field("field"), Field("other", from_string=int, default=3)

    @bind(field, "x")
    @bind(other)
    class Thing:
        def __init__(self, x: str, other: int) -> None: ...

    assert Configuration({field: "a"}).configure(Thing) == {"x": "a", "other": 3}
    assert Configuration({field: "a"}, options={"other": "5"}).configure(Thing) == {"x": "a", "other": 5}


def test_from_environ_removes_the_option_unless_kept(
    monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    alone = Field("data_dir", from_environ="DATA_DIR")
    both = Field("both_dir", from_environ="BOTH_DIR", disallow_argparse=False)
    hidden = Field("hidden_dir", disallow_argparse=True)
    assert [field.is_option for field in (alone, both, hidden)] == [False, True, False]
    monkeypatch.setenv("DATA_DIR", "from/environ")
    monkeypatch.setenv("BOTH_DIR", "from/environ")
    command_line += ["--data_dir", "x", "--both_dir", "y", "--hidden_dir", "z"]
    found = Configuration({alone: "context"}).resolve([alone, both, hidden])
    assert {field.name: item.value for field, item in found.items()} == {
        "data_dir": "from/environ",
        "both_dir": "y",
    }


def test_errors_are_value_errors_as_nv_mittens_are() -> None:
    with pytest.raises(ValueError, match="json has no dictionary EXPORTS"):
        ConfigurationIndex().load_module("json")
    assert issubclass(ConfigError, ValueError)


def test_a_wrong_value_names_the_environment_variable() -> None:
    field = Field("size", from_string=positive, from_environ="SIZE")
    with pytest.raises(
        ConfigError, match="environment variable SIZE 0: expected a whole number of at least 1"
    ):
        Configuration(environ={"SIZE": "0"}).resolve([field])


def test_parse_fields(monkeypatch: pytest.MonkeyPatch, command_line: list[str]) -> None:
    """Values come from the command line, and from the environment for fields that have a variable."""
    number, flag = Field("number", from_string=int), Field("flag", from_string=bool)
    here = Field("here", from_string=len, from_environ="HERE")
    fields: list[Field] = [number, flag, here]
    assert parse_fields(fields, []) == {}
    assert parse_fields(fields, ["--number", "13", "--flag", "--other", "x"]) == {"number": 13, "flag": True}
    monkeypatch.setenv("HERE", "four")
    assert parse_fields(fields, ["--here", "ignored"]) == {"here": 4}
    command_line += ["--number=7"]
    assert parse_fields(fields) == {"number": 7, "here": 4}
    with pytest.raises(ConfigError, match="--number x: expected what int reads"):
        parse_fields([number], ["--number=x"])


def test_dictionaries_of_the_environment_and_the_command_line_are_merged() -> None:
    field = Field(
        "flags",
        from_string=flag_dict,
        from_environ="FLAGS",
        disallow_argparse=False,
        autoconf_strategy=AutoConfStrategy.DictUpdate,
    )
    found = Configuration(
        {field: {"a": 0, "d": 4}}, options={"flags": "b:2"}, environ={"FLAGS": "a:1,b:1"}
    ).resolve([field])[field]
    assert found.value == {"a": 1, "b": 2, "d": 4}


def test_argparse_opts_and_bool() -> None:
    flag, word = Field("flag", from_string=bool), Field("word", argparse_opts={"metavar": "THING"})
    assert option_texts([flag, word], ["--flag", "--word=x", "--other", "y"]) == {"flag": "true", "word": "x"}
    assert Configuration(options={"flag": "true"}).resolve([flag])[flag].value is True
    assert Configuration(options={"flag": "False"}).resolve([flag])[flag].value is False
    with pytest.raises(ConfigError, match="--flag maybe: expected true or false"):
        Configuration(options={"flag": "maybe"}).resolve([flag])

    @bind(word)
    class Thing:
        def __init__(self, word: str) -> None: ...

    assert "--word THING" in HelpInfo.build_help_string([Thing])


def test_help_of_dependencies() -> None:
    mine, theirs = (
        Field("mine", "of the user", group="build"),
        Field("theirs", "of the used", group="harness"),
    )

    @bind(theirs)
    class Used:
        def __init__(self, theirs: str) -> None: ...

    @bind(mine)
    class User:
        def __init__(self, mine: str) -> None: ...

    HelpInfo.add_configurator_dependency(User, Used)
    HelpInfo.add_configurator_dependencies(User, {Used})
    assert HelpInfo.fields([User, Used]) == [mine, theirs]
    assert HelpInfo.get_all_dependencies(User) == {User, Used}
    assert HelpInfo.get_all_dependencies(Used) == {Used}
    assert (HelpInfo.has(User), HelpInfo.has(Used)) == (True, False)
    text = HelpInfo.build_help_string(User)
    assert text.index("build:") < text.index("--mine") < text.index("harness:") < text.index("--theirs")


def test_a_bound_operation_has_its_declared_dependencies() -> None:
    first, second = Field("first"), Field("second")

    @bind(first)
    class Before:
        def __init__(self, first: str) -> None: ...

    class Between:
        @classmethod
        def immediate_dependencies(cls) -> set[type]:
            return {Before}

    @bind(second)
    class After(Between):
        def __init__(self, second: str) -> None: ...

    assert HelpInfo.get_all_dependencies(After) == {After, Before}
    assert HelpInfo.get_all_dependencies(Between) == {Between}
    HelpInfo.add_configurable_operation(Between)
    assert HelpInfo.fields([Between]) == [first]
    with pytest.raises(ValueError, match="Before is not an operation"):
        HelpInfo.add_configurable_operation(Before)


def test_an_index_has_a_name_and_one_configuration_at_a_path() -> None:
    index = ConfigurationIndex("mine")
    assert (index.name, ConfigurationIndex().name) == ("mine", "ConfigurationIndex")
    index.register("key", Configuration({seed: 1}))
    index.register(("a", "b"), Configuration({seed: 2}))
    assert dict(index.get("key") or {}) == {seed: 1}
    assert dict(index.get(["b"], prefix=["a"]) or {}) == {seed: 2}
    assert index.get(["key"], prefix=None) is index.get("key")
    with pytest.raises(ValueError, match="mine has a configuration a/b already"):
        index.register(["a", "b"], Configuration())


def test_configuration_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpillm_test_exports.py").write_text(
        "from mpillm import fields\n"
        "EXPORTS = {'default': {fields.seed: 12, fields.save_outputs: True}, 'MaxP': {fields.seed: '16'},"
        " ('a', 'b'): {}}\n"
    )
    (tmp_path / "mpillm_test_wrong.py").write_text(
        "from mpillm import fields\nEXPORTS = {'default': {fields.seed: -1}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mpillm_test_any.py").write_text(
        "from mpillm.configurator import Field\nany_kind = Field('any_kind')\nEXPORTS = {'default':"
        " {any_kind: [1, 2]}}\n"
    )
    index = ConfigurationIndex()

    def values(key: list[str], prefix: Sequence[str] = ()) -> dict[Field, object]:
        found = index.get(key, prefix)
        assert found is not None
        return dict(found)

    prefix = ["my_system", "llama2-70b"]
    index.load_module("mpillm_test_exports", prefix=prefix)
    default = index.get(["default"], prefix=prefix)
    assert default is not None
    assert dict(default) == {seed: 12, save_outputs: True}
    assert values([*prefix, "MaxP"]) == {seed: 16}
    assert values(["a", "b"], prefix) == {}
    assert index.get(["MaxP"]) is None
    index.load_module("mpillm_test_any")
    assert list((index.get(["default"]) or {}).values()) == [[1, 2]], (
        "a field that reads no text takes any value"
    )
    index.register(["x"], Configuration({seed: 1}))
    assert values(["x"]) == {seed: 1}
    with pytest.raises(ConfigError, match="mpillm_test_wrong: seed -1: expected a whole number"):
        index.load_module("mpillm_test_wrong")
    with pytest.raises(ConfigError, match="json has no dictionary EXPORTS"):
        index.load_module("json")
