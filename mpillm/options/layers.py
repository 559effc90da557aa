"""The values of each source, as layers in the order of `Source`, and the resolved values."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.core_names import provided
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.rules import RULES, Trace, named_test
from mpillm.options.sources import (
    OptionValue,
    Source,
    command_line_values,
    default_values,
    environment_values,
)
from mpillm.options.workload_options import defaults_of


@dataclasses.dataclass(frozen=True)
class Layers:
    """The values of each source, by name. The defaults contain every option."""

    by_source: Mapping[Source, Mapping[str, OptionValue]]

    def sources_of(self, name: str) -> list[OptionValue]:
        """Return the values of an option, the lowest source first."""
        layers = (self.by_source.get(source, {}) for source in Source)
        return [layer[name] for layer in layers if name in layer]

    def value_of(self, field: Field) -> OptionValue:
        """Return the value of an option from the highest source."""
        return self.sources_of(field.name)[-1]

    def with_layer(self, source: Source, values: Mapping[str, OptionValue]) -> Layers:
        """Return these layers with further values of `source`."""
        return Layers({**self.by_source, source: {**self.by_source.get(source, {}), **values}})

    def unresolved_values(self) -> dict[str, OptionValue]:
        """Return each option's value from the highest source."""
        values: dict[str, OptionValue] = {}
        for source in Source:
            values |= self.by_source.get(source, {})
        return values

    def resolved(self, trace: Trace | None = None) -> dict[str, OptionValue]:
        """Return the resolved values, by name, after `RULES`.

        An option and its other names get one value, from the highest source. Within a source, the option's
        own name takes precedence. Runtime flags get their defaults. Keys of flags that are only options are
        removed. Raises ConfigError, naming the source, for a value that a flag cannot have here, and for two
        values that exclude each other.
        """
        values = self.unresolved_values()
        for rule in RULES:
            changes = rule.changes(values)
            if trace is not None:
                trace += [(rule, name, value) for name, value in changes.items() if values[name] != value]
            values |= changes
        return values


def user_layers(
    texts: Mapping[str, str], known: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> Layers:
    """Return the layers of user and command: the command line's texts, the environment, and the user's file.

    The lowest layer has the defaults of the `known` options. The command's `defaults` override these.
    """
    layers = Layers(
        {
            Source.DEFAULT: default_values(known)
            | _layer(defaults or {}, Source.DEFAULT, "default of this command"),
            Source.ENVIRONMENT: environment_values(known),
            Source.COMMAND_LINE: command_line_values(known, texts),
        }
    )
    if (path := layers.value_of(AllFields.config_file).value) is None:
        return layers
    # slow to import, and few commands have a configuration file
    reader = importlib.import_module(provided("READERS")["config_file"])
    keys = {field: layers.value_of(field) for field in reader.KEYS}
    chosen = {field: key.value for field, key in keys.items() if key.source > Source.FILE}
    if layers.value_of(AllFields.use_triton).value:
        chosen.setdefault(AllFields.harness_type, "triton")
    tests = (layers.value_of(field).value for field in (AllFields.test_mode, AllFields.compliance_test))
    return layers.with_layer(Source.FILE, reader.load(path, chosen, *tests))


def layers_of(
    texts: Mapping[str, str], known: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> Layers:
    """Return all layers except the disaggregation YAML's: the user's, the model's and the workload's."""
    layers = user_layers(texts, known, defaults)
    test = named_test.changes(layers.unresolved_values())
    benchmarks, scenarios = test["benchmarks"].value, test["scenarios"]
    if benchmarks is not None and len(benchmarks) == 1:
        workload = workloads.get(benchmarks[0], layers.value_of(AllFields.model_scale).value)
        values: dict[Field, Any] = {}
        scenario = scenarios.value[0]
        if scenario not in workload.scenarios and scenarios.source is Source.DEFAULT:
            scenario = workload.scenarios[0]  # the benchmark has only Server
            values[AllFields.scenarios] = (scenario,)
        values |= defaults_of(workload, scenario, layers.value_of(AllFields.test_mode).value)
        layers = layers.with_layer(
            Source.WORKLOAD, _layer(values, Source.WORKLOAD, f"workload {workload.title}")
        )
    file = layers.value_of(AllFields.llm_gen_config_path)
    if file.value is not None:
        from mpillm.options.generation_config import GenerationConfig  # slow to import

        try:
            values = GenerationConfig.from_file(file.value).values(file.value)
        except ConfigError as error:
            raise ConfigError(f"{error} (--llm_gen_config_path, {file.where})") from None
        layers = layers.with_layer(Source.GENERATION, _layer(values, Source.GENERATION, file.value))
    return layers


def _layer(values: Mapping[Field, Any], source: Source, where: str) -> dict[str, OptionValue]:
    return {field.name: OptionValue(value, source, where) for field, value in values.items()}
