"""Options of stages: commands before a run or a server. A stage may be for several tests."""

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
    argv: Sequence[str], parser: Parser, fields: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> RunConfig:
    """Parse the options of a stage, and print a note about options that no later command uses."""
    config = parse(argv, parser, fields, defaults)
    print_unused_options([config])
    return config


def print_unused_options(configs: Sequence[RunConfig]) -> None:
    """Print, on one rank, the options without effect in all commands after a stage, for all of its tests."""
    launcher = find_launcher()
    if launcher is None or launcher.first:
        for line in unused_option_lines(unused_in_all(configs, "stage")):
            print(f"mpillm: note: {line}", file=sys.stderr)


def parse_each(argv: Sequence[str], parser: Parser, fields: Sequence[Field]) -> list[RunConfig]:
    """Parse the options for every pair of a workload and a scenario: lists of them mean several tests."""
    known = with_all(fields)
    add_fields(parser, known, fields)
    options = parser.texts(argv)
    layers = []
    for benchmark in user_layers(options, known).value_of(AllFields.benchmarks).value or (None,):
        named = options if benchmark is None else {**options, "benchmarks": benchmark}
        scenarios = user_layers(named, known).value_of(AllFields.scenarios)
        # The default is the workload's scenario, if it has only Server.
        tests = [] if scenarios.source is Source.DEFAULT else scenarios.value
        layers += [layers_of({**named, "scenarios": scenario}, known) for scenario in tests] or [
            layers_of(named, known)
        ]
    return [RunConfig(one) for one in layers]
