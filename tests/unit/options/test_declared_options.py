"""`option`: a field that takes its name, group and effect from the class that declares it."""

from __future__ import annotations

from mpillm.options.field import EVERYWHERE, Effect, Field, Options, option
from mpillm.options.parsers import positive

NOWHERE = Effect((), measured=False)


class _Of(Options, group="oven", effect=NOWHERE):
    trays = option("how many", positive, default=2)
    label = option("its name", group="kitchen", effect=EVERYWHERE)
    heat = Field("heat_of_oven", "a field of its own", group="stove")


def test_an_option_is_a_field_of_its_class() -> None:
    assert isinstance(_Of.trays, Field)
    assert (_Of.trays.name, _Of.trays.group, _Of.trays.effect) == ("trays", "oven", NOWHERE)
    assert _Of.trays.parse("3", "--trays") == 3
    assert _Of.trays.default == 2


def test_an_option_may_have_its_own_group_and_effect() -> None:
    assert (_Of.label.name, _Of.label.group, _Of.label.effect) == ("label", "kitchen", EVERYWHERE)


def test_a_field_keeps_its_declared_values() -> None:
    assert (_Of.heat.name, _Of.heat.group, _Of.heat.effect) == ("heat_of_oven", "stove", EVERYWHERE)


def test_all_are_declared_in_order() -> None:
    assert [field.name for field in _Of.declared()] == ["trays", "label", "heat_of_oven"]
