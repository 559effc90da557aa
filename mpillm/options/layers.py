"""The layers of an option's value, stacked in the order of `Level`.

The command line, over the environment, the user's file, the disaggregation YAML, the model's generation
config, the workload, and the command's defaults over those of the fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.core_names import brought
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.found import COMMAND_LINE, DEFAULT, Found, Level, Origin
from mpillm.options.mitten import Configuration
from mpillm.options.values import complete
from mpillm.options.workload_options import defaults_of, named_test


def of_the_user(options: Mapping[str, str], defaults: Mapping[Field, Any] | None) -> Configuration:
    """Return the layers of user and command: command line, the file that it names, the command's defaults."""
    commands = Configuration(defaults, origins=Origin(Level.DEFAULT, "default of this command"))
    own = Configuration(below=commands, options=options)
    if (path := found_for(own, AllFields.config_file).value) is not None:
        # takes time to import, and few commands have one
        reader = importlib.import_module(brought("READERS")["config_file"])
        given = {key: found_for(own, key) for key in reader.KEYS}
        if (
            found_for(own, AllFields.use_triton).value
            and given[AllFields.harness_type].origin.level <= Level.CONTEXT
        ):
            given[AllFields.harness_type] = Found("triton", COMMAND_LINE)
        file: Configuration = reader.load(
            path,
            {key: found.value for key, found in given.items() if found.origin.level > Level.CONTEXT},
            found_for(own, AllFields.test_mode).value,
            found_for(own, AllFields.compliance_test).value,
        )
        own.update(file)
        own.origins = file.origins
    return own


def found_for(own: Configuration, field: Field) -> Found:
    return own.resolve([field]).get(field, Found(None, DEFAULT))


def stated_values(
    options: Mapping[str, str], known: Sequence[Field], defaults: Mapping[Field, Any] | None
) -> dict[str, Found]:
    """Return each field's value and layer, from all layers but the YAML: see `disagg_values.lay_yaml`."""
    own, test = stack(options, defaults)
    others = [field for field in own if field not in known]  # of a file in NVIDIA's form: without effect here
    return complete(own, known) | test | complete(own, others)


def stack(
    options: Mapping[str, str], defaults: Mapping[Field, Any] | None
) -> tuple[Configuration, dict[str, Found]]:
    """Return all layers but the YAML, and the options that name the test, which all layers together state."""
    own = of_the_user(options, defaults)
    workload = Configuration(below=own.below)
    generation = own.below = Configuration(below=workload)
    test = named_test(
        found_for(own, AllFields.benchmarks),
        found_for(own, AllFields.scenarios),
        found_for(own, AllFields.accuracy_target),
    )
    benchmarks, scenarios = test["benchmarks"].value, test["scenarios"].value
    if benchmarks is not None and len(benchmarks) == 1:
        known_workload = workloads.get(benchmarks[0], found_for(own, AllFields.model_scale).value)
        if scenarios[0] not in known_workload.scenarios and test["scenarios"].origin.level < Level.WORKLOAD:
            scenarios = known_workload.scenarios[:1]  # of a benchmark that has none but Server
            test["scenarios"] = Found(scenarios, Origin(Level.WORKLOAD, f"workload {known_workload.title}"))
        workload.update(defaults_of(known_workload, scenarios[0], found_for(own, AllFields.test_mode).value))
        workload.origins = Origin(Level.WORKLOAD, f"workload {known_workload.title}")
    path, origin, _ = found_for(own, AllFields.llm_gen_config_path)
    if path is not None:
        from mpillm.options.generation_config import GenerationConfig  # its records take time to make

        try:
            generation.update(GenerationConfig.from_file(path).values(path))
        except ConfigError as error:
            raise ConfigError(f"{error} (--llm_gen_config_path, {origin.where})") from None
        generation.origins = Origin(Level.GENERATION, path)
    return own, test
