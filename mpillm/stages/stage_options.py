"""The options of stages: commands before a run or a server, each of which may be for several tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch.launcher import find_launcher
from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.layers import layers_of, user_layers
from mpillm.options.options import parse, with_all
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import Source
from mpillm.options.unused_options import unused_in_all, unused_option_lines


def parse_stage(
    argv: Sequence[str], parser: Parser, shown: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> RunConfig:
    """As `parse`, for a stage before a run or a server; tell of options that no command after it uses."""
    config = parse(argv, parser, shown, defaults)
    tell_idle([config])
    return config


def tell_idle(configs: Sequence[RunConfig]) -> None:
    """Tell, on one rank, of options without effect in all commands after a stage, for each of its tests."""
    launcher = find_launcher()
    if launcher is None or launcher.first:
        for line in unused_option_lines(unused_in_all(configs, "stage")):
            print(f"mpillm: note: {line}", file=sys.stderr)


def parse_each(argv: Sequence[str], parser: Parser, shown: Sequence[Field]) -> list[RunConfig]:
    """As `parse`, for every pair of a workload and a scenario: lists of them mean several tests."""
    known = with_all(shown)
    add_fields(parser, known, shown)
    options = parser.texts(argv)
    made = []
    for benchmark in user_layers(options, known).value_of(AllFields.benchmarks).value or (None,):
        named = options if benchmark is None else {**options, "benchmarks": benchmark}
        scenarios = user_layers(named, known).value_of(AllFields.scenarios)
        # by default the workload's, if it has none but Server
        tests = [] if scenarios.source is Source.DEFAULT else scenarios.value
        made += [layers_of({**named, "scenarios": scenario}, known) for scenario in tests] or [
            layers_of(named, known)
        ]
    return [RunConfig(layers) for layers in made]
