"""Fields as attributes: the field on a class, a value of its type on an instance."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm import fields
from mpillm.options.command_line import Parser
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, FIELDS, AllFields
from mpillm.options.options import parse_run
from mpillm.options.parsers import positive
from mpillm.options.run_config import RunConfig
from mpillm.options.values import Values, collect

ROOT = Path(__file__).parents[3]


class Mine(Values):
    size = Field("size", "how many", positive, default=3)
    seed = AllFields.seed


class Derived(Mine):
    size = Field("size", "how many, here", positive)
    more = Field("more", "a word")


def test_a_field_on_the_class_and_its_value_on_an_instance() -> None:
    assert isinstance(Mine.size, Field) and Mine.seed is AllFields.seed is AllFields.seed
    made = collect(["--size", "5"], Mine, Parser(prog="mpillm x"))
    assert (made.size, made.seed, made[Mine.size]) == (5, 0, 5)
    assert parse_run(["--core_type", "dummy"])[AllFields.top_p] == 1.0


def test_a_class_of_another_kind_holds_the_field_itself() -> None:
    class Plain:
        size = Mine.size

    assert Plain().size is Mine.size  # type: ignore[call-overload]  # types know only classes of options


def test_a_subclass_declares_more_fields_and_other_ones_of_the_same_names() -> None:
    assert Derived.declared() == [Derived.size, Derived.more, Mine.seed]
    assert collect([], Derived, Parser(prog="mpillm x")).size is None


def test_a_field_but_with_another_default() -> None:
    """It reads the same values, and its type is that of a field with a default."""

    class More(Values):
        size = Mine.size.but(default=7)
        max_batch_size = AllFields.max_batch_size.but("requests at once", default=64, group="here")

    field = More.max_batch_size
    assert (field.name, field.description, field.group) == ("max_batch_size", "requests at once", "here")
    made = collect(["--size", "2"], More, Parser(prog="mpillm x"))
    total: int = made.max_batch_size + made.size
    assert total == 66
    with pytest.raises(ConfigError, match="--max_batch_size x: expected a whole number"):
        collect(["--max_batch_size", "x"], More, Parser(prog="mpillm x"))
    assert AllFields.max_batch_size.default is None, "the option of the runs stays as it is"


def test_every_field_is_an_attribute_of_its_name() -> None:
    assert all(getattr(AllFields, field.name) is field is getattr(fields, field.name) for field in FIELDS)
    assert not {field.name for field in FIELDS} & (vars(RunConfig).keys() | vars(Values).keys())


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.default is not None], ids=lambda field: field.name
)
def test_a_default_is_a_value_of_the_field(field: Field) -> None:
    read = field.check(field.default, "default")
    assert (read, type(read)) == (field.default, type(field.default))


@pytest.mark.parametrize("value", [{"ttft": None}, {"": []}, [[]], object(), {1: {2: 3}}])
def test_values_of_kinds_that_a_field_has_no_text_for(value: object) -> None:
    for field in FIELDS:
        with contextlib.suppress(ConfigError):  # some take a list, or a text
            field.check(value, "a file")


@pytest.mark.parametrize("text", ["a\0b", "half \ud800", "\udcff"])
def test_a_text_can_be_written(text: str) -> None:
    """A file can say what no command line can; a path of it raised errors of Python's."""
    for name in ("model_path", "log_dir", "system_name", "stop_words"):
        with pytest.raises(ConfigError, match=rf"^a file {name} .*: not UTF-8 text, or with a null"):
            BY_NAME[name].check(text, f"a file {name}")


@pytest.mark.slow
def test_mypy_knows_the_type_of_an_option(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(
        "from mpillm.options.run_config import RunConfig\n"
        "def read(config: RunConfig) -> None:\n"
        + "".join(
            f"    reveal_type(config.{name})\n"
            for name in ("max_batch_size", "seed", "scenarios", "mode", "model_path", "grace")
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", tmp_path / "uses.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert re.findall(r'Revealed type is "(.*)"', done.stdout.replace("builtins.", "")) == [
        "int | None",
        "int",
        "tuple[str, ...]",
        "str",
        "str | None",
        "float",
    ], done.stdout + done.stderr
