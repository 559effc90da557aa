"""`--synthetic_conversations`: keys, spreads, and what is wrong with a value."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.options.fields import AllFields
from mpillm.options.synthetic_conversations import Normal, Uniform, sizes_of

FIELD = AllFields.synthetic_conversations


def test_values_and_defaults() -> None:
    text = "turns=3-8, input=200:40,output=150,system=1000,groups=4,prefix=500,delay=0.5-2"
    sizes = sizes_of(FIELD.parse(text, ""))
    assert (sizes.turns, sizes.input, sizes.output) == (Uniform(3, 8), Normal(200, 40), Normal(150))
    assert (sizes.delay, sizes.system, sizes.groups, sizes.prefix) == (Uniform(0.5, 2), 1000, 4, 500)
    defaults = sizes_of(FIELD.parse("turns=1", ""))
    assert (defaults.input, defaults.output) == (
        Normal(AllFields.input_mean.default),
        Normal(AllFields.output_mean.default),
    )
    assert (defaults.delay, defaults.system, defaults.groups, defaults.prefix) == (Normal(0), 0, 1, 0)


def test_a_log_normal_value_and_groups_of_different_sizes() -> None:
    sizes = sizes_of(
        FIELD.parse("input=lognormal:200:400,delay=lognormal:0.5:1,groups=3,prefix=4,zipf=1.5", "")
    )
    assert (sizes.input, sizes.delay, sizes.zipf) == (Normal(200, 400, True), Normal(0.5, 1, True), 1.5)
    text = "input 200 ± 400 (log-normal) and output 32 tokens in each turn; delay 0.5 ± 1 (log-normal) s;"
    assert text in sizes.describe() and sizes.describe().endswith("3 groups (Zipf, exponent 1.5)")


def test_a_value_becomes_a_text_and_a_value_again() -> None:
    """A file may have an object in place of the text."""
    value = FIELD.parse("turns=3-8,input=200:40,delay=1.5", "")
    assert FIELD.parse(FIELD.text(value), "") == value
    assert FIELD.check({"turns": "3-8", "input": "200:40", "delay": 1.5}, "f.py") == value


def test_the_description_names_distributions() -> None:
    sizes = sizes_of(FIELD.parse("turns=3-8,input=200:40,delay=1.5,system=7,prefix=9,groups=2", ""))
    assert sizes.describe() == (
        "3 to 8 (uniform) turns; input 200 ± 40 (normal) and output 32 tokens in each turn; delay 1.5 s;"
        " 7 tokens shared by all, 9 shared by each of 2 groups"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key ''"),
        ("turn=5", "no key 'turn' (did you mean 'turns'?): turns, input, output"),
        (
            "turns",
            "turns=: must be N, MEAN:STDEV, lognormal:MEAN:STDEV or MIN-MAX, whole numbers from 1 to 1000",
        ),
        ("turns=0", "turns=0: must be"),
        ("turns=2.5", "turns=2.5: must be"),
        ("turns=1001", "turns=1001: must be"),
        ("turns=3,turns=4", "turns occurs twice"),
        ("turns=8-3", "turns=8-3: must be"),
        ("input=-5", "input=-5: must be"),
        ("input=5:-1", "input=5:-1: must be"),
        ("input=nan", "input=nan: must be"),
        (
            "delay=-1",
            "delay=-1: must be N, MEAN:STDEV, lognormal:MEAN:STDEV or MIN-MAX, numbers from 0 to 1000000",
        ),
        ("delay=nan", "delay=nan: must be"),
        ("delay=inf", "delay=inf: must be"),
        ("system=10:2", "system=10:2: must be N, whole numbers from 0 to 16777216"),
        ("groups=4", "groups has no effect without prefix"),
        ("input=lognormal:200", "input=lognormal:200: must be"),
        ("input=lognormal:0:9", "input=lognormal:0:9: must be"),
        ("prefix=4,zipf=1", "zipf has no effect without groups"),
        ("groups=4,prefix=4,zipf=-1", "zipf=-1: must be N, numbers from 0 to 10"),
    ],
)
def test_a_wrong_value_is_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        FIELD.parse(text, "--synthetic_conversations")
    assert f"({why}" in str(error.value) and "such as turns=5,input=200:40" in str(error.value)
