"""The order of sources, over generated scenes."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.options.field import AutoConfStrategy, Field
from mpillm.options.mitten import Configuration, autoconfigure, bind
from mpillm.options.parsers import flag_dict

SOURCES = ("constructor", "command line", "environment", "context", "field default")


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw which sources set a value, and in how many nested contexts, for replaced and for merged values."""
    flags = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1)
    by_source = {source: draw(flags) for source in SOURCES if draw(st.booleans())}
    outer = [draw(st.none() | flags) for _ in range(draw(st.integers(0, 3)))]
    return {
        "by_source": by_source,
        "outer": outer,
        "merge": draw(st.booleans()),
        "in_context": draw(st.booleans()) or bool(outer),
    }


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(scenes())
def test_precedence(scene: dict[str, Any]) -> None:
    """The configurator agrees with a model of the order in four lines."""
    by_source, strategy = (
        scene["by_source"],
        AutoConfStrategy.DictUpdate if scene["merge"] else AutoConfStrategy.Replace,
    )
    text = {
        source: ",".join(f"{key}:{value}" for key, value in values.items())
        for source, values in by_source.items()
    }
    field = Field(
        "precedence_flags",
        from_string=flag_dict,
        from_environ="MPILLM_TEST_FLAGS",
        disallow_argparse=False,
        autoconf_strategy=strategy,
        default=by_source.get("field default"),
    )

    @autoconfigure
    @bind(field, "flags")
    class Thing:
        def __init__(self, flags: dict[str, Any] | None = None) -> None:
            self.flags = flags

    environ = {"MPILLM_TEST_FLAGS": text["environment"]} if "environment" in by_source else {}
    options = {"precedence_flags": text["command line"]} if "command line" in by_source else {}
    innermost = Configuration(
        {field: by_source["context"]} if "context" in by_source else {},
        options=options,
        environ=environ,
    )

    with contextlib.ExitStack() as stack:
        if scene["in_context"]:
            # contexts around the innermost one have no effect
            for values in scene["outer"]:
                stack.enter_context(Configuration({field: values} if values else {}).autoapply())
            stack.enter_context(innermost.autoapply())
        found = (Thing(by_source["constructor"]) if "constructor" in by_source else Thing()).flags

    layers = [by_source[source] for source in SOURCES[1:] if source in by_source]
    expected = None
    if layers:
        expected = dict(collections.ChainMap(*layers)) if scene["merge"] else layers[0]
    assert found == (
        by_source["constructor"] if "constructor" in by_source else expected if scene["in_context"] else None
    )
