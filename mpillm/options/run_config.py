"""The values of a run's options and of a YAML's sections, with their sources: identical on every rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from launch.masking import masked_value
from mpillm import workloads
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.effects import LOAD_CLIENTS, LOADGEN
from mpillm.options.layers import Layers
from mpillm.options.parsers import Secret
from mpillm.options.sources import COMMAND_LINE, OptionValue, Source
from mpillm.options.values import Values
from mpillm.programs.load_clients.kinds import CONVERSATIONS

if TYPE_CHECKING:  # slow to import, and few runs have a YAML
    from disagg import DisaggConfig
    from disagg.instances import ServedInstance
    from mpillm.options.disagg_values import YamlValue


@dataclass(frozen=True)
class InstanceRun:
    """A run that is one instance of a disaggregation YAML. Other runs share its mpirun."""

    instance: ServedInstance
    node_ranks: int  # ranks of that mpirun on this node, which share its CPU cores and memory


class RunConfig(Values, AllFields):
    """The values of all fields, and the source of each."""

    def __init__(self, layers: Layers) -> None:
        """Resolve the values of all sources. Raises ConfigError naming the source of a wrong value."""
        super().__init__(layers.resolved())
        self.layers = layers
        self.yaml: DisaggConfig | None = None
        self.yaml_lines: tuple[str, ...] = ()  # on the YAML's form and model, for the user
        self.sections: Mapping[str, RunConfig] = {}
        self.disagg_role = ""  # "context" or "generation", if the run is a context or generation server
        self.instance_run: InstanceRun | None = None
        self.launch_secret = ""  # shared by the servers that one mpirun has started

    @property
    def scenario(self) -> str:
        """LoadGen's scenario, for a command that has just one."""
        (scenario,) = self.scenarios
        return str(scenario)

    @property
    def load(self) -> str:
        """The source of the load: LOADGEN, LOAD_CLIENTS or CONVERSATIONS."""
        return LOADGEN if not self.harness else CONVERSATIONS if self.has_conversations else LOAD_CLIENTS

    @property
    def issues_all_at_once(self) -> bool:
        """Whether every request exists when the test starts: LoadGen's Offline."""
        return self.load == LOADGEN and self.scenario == "Offline"

    @property
    def has_conversations(self) -> bool:
        """Whether the load is that of conversations, in the place of LoadGen's."""
        return bool(self.harness == CONVERSATIONS)

    @property
    def allows_cached_prompts(self) -> bool:
        """Whether a prefix cache is allowed. MLPerf forbids one for LoadGen's single prompts."""
        return bool(self.enable_kv_cache_reuse) or self.has_conversations

    @property
    def benchmark(self) -> str | None:
        """The workload's name, for a command that has at most one workload."""
        return self.benchmarks[0] if self.benchmarks else None

    @property
    def benchmark_name(self) -> str | None:
        """The workload's name, with the accuracy target if the user set one: llama2-70b-99.9."""
        target = f"-{100 * self.accuracy_target:g}" if self.is_user_set("accuracy_target") else ""
        return self.benchmark and self.benchmark + target

    @property
    def workload(self) -> workloads.Workload | None:
        """The workload, at the scale of this command."""
        return workloads.get(self.benchmark, self.model_scale) if self.benchmark else None

    def with_yaml(self) -> RunConfig:
        """Return the configuration with the values of the disaggregation YAML that it names, if any.

        `yaml` is then the file's content. `sections` has the values of each section, which may differ.
        ConfigError names the file, or a different value of a higher source. A dry run ignores a missing file.
        """
        path = self.disagg_config
        if not path or (self.dry_run and not Path(path).exists()):
            return self
        from mpillm.options import disagg_values, published_yaml

        serves_model = self.core_type == "trtllm_disagg"
        try:
            yaml, form, lines = published_yaml.load(path)
            if serves_model and form:
                raise ConfigError(
                    f"{path} is {form}; servers of TensorRT-LLM read a disagg_config, which"
                    " generate-disagg-config writes",
                    about=["core_type"],
                )
            own = self.option_values[AllFields.model_path.name]
            if (
                not serves_model
                and own.source > Source.YAML
                and disagg_values.is_superseded(yaml.model, own.value)
            ):
                lines += (f"{self.named('model_path')} is used instead of {path}: model {yaml.model}",)
                yaml = replace(yaml, model=self.model_path)
            with_run_values = self._with_layer(
                disagg_values.of_the_run(yaml, path, serves_model, is_one_run=self.server_role is None)
            )
            sections = {
                name: with_run_values._with_layer(
                    disagg_values.of_a_section(name, server, path, is_one_run=self.server_role is None)
                )
                for name, server in yaml.sections
            }
        except ConfigError as error:
            raise type(error)(self.explain(error) + self.set_by("disagg_config")) from None
        with_run_values.yaml, with_run_values.sections = yaml, sections
        with_run_values.yaml_lines = lines
        # A value that all sections share is also the run's value.
        for name in with_run_values.option_values if sections else ():
            first, *others = (section.option_values[name] for section in sections.values())
            if all(other.value == first.value for other in others):
                with_run_values.option_values[name] = (
                    max(first, *others, key=lambda one: one.source) if others else first
                )
        return with_run_values

    def _with_layer(self, yaml: Mapping[str, YamlValue]) -> RunConfig:
        """Return the configuration with a YAML's values, which higher sources must not contradict."""
        from mpillm.options.disagg_values import same

        for name, (value, text) in yaml.items():
            own = self.option_values[name]
            if own.source > Source.YAML and not same(name, own.value, value.value):
                raise ConfigError(f"{self.named(name)}, but {value.where} is {text}: leave one of them out")
        values = {name: yaml_value.value for name, yaml_value in yaml.items()}
        return RunConfig(self.layers.with_layer(Source.YAML, values))

    def in_section(self, section: str) -> RunConfig:
        """Return the values that hold for the instances of a YAML's section."""
        return self.sections.get(section, self)

    @property
    def entry_section(self) -> RunConfig:
        """The values that hold for the instances where requests start."""
        return self.in_section(self.yaml.sections[0][0]) if self.yaml and self.sections else self

    @property
    def clients_of_a_server(self) -> int:
        """How many ranks are clients of each server that the run starts; 0: the run starts none."""
        if not self.server:
            return 0
        if self.server == "tritonserver" and not self.is_user_set("clients_per_server"):
            return self.triton_num_frontends_per_model
        return self.clients_per_server if self.is_user_set("clients_per_server") else self.server_nodes

    def passed_over(self) -> str:
        """Return a text about settings without effect in a file in NVIDIA's form; "" if there are none."""
        settings = [
            f"{name} {one.value}"
            for name, one in self.option_values.items()
            if name not in BY_NAME and one.source is Source.FILE
        ]
        return f"{self.config_file}: without effect here: {', '.join(settings)}" if settings else ""

    def named(self, name: str) -> str:
        """Return an option with its value, for messages; with its source unless that is the command line."""
        field = BY_NAME[name]
        value, where = masked_value(field.text(getattr(self, name))), self.where(name)
        return f"--{name} {value}" if where == COMMAND_LINE else f"{name} {value} ({where})"

    def set_by(self, *names: str) -> str:
        """Return lines for messages: the source of each option that is not set on the command line."""
        places = {
            (name, one.where): None
            for name in names
            for config in (self, *self.sections.values())
            if (one := config.option_values[name]).value
            and one.source not in (Source.DEFAULT, Source.COMMAND_LINE)
        }
        return "".join(f"\n{name} is set by {where}" for name, where in places)

    def explain(self, error: ConfigError) -> str:
        """Return the error's message, and where the options that it is about were set."""
        return str(error) + self.set_by(*error.about)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """In the `with` block, a ConfigError also names where its options were set."""
        try:
            yield
        except ConfigError as error:
            raise type(error)(self.explain(error)) from error

    def digest(self) -> str:
        """Return a hash of all values and of the YAML; it is equal on ranks with the same options."""
        import hashlib  # it loads OpenSSL, which takes milliseconds

        state = hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode())
        if self.yaml is not None:
            from disagg import dump

            state.update(dump(self.yaml).encode())
        return state.hexdigest()

    def difference(self, other: Mapping[str, Any]) -> str:
        """Return the first option whose value differs from `other`'s, with both values; "" if none does."""
        for name, value in self.values.items():
            if value != other.get(name):
                source, where = self.option_value(name).source, self.where(name)
                other_value, own_value = masked_value(other.get(name)), masked_value(value)
                return f"--{name} is {other_value!r} there and {own_value!r} here" + (
                    f" ({where})" if source is Source.YAML else ""
                )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return ``{name: {"value", "source"}}``.

        For a merged dictionary, "source" is by key. If a YAML's sections differ, both values are by section.
        """
        values = {}
        for name, own in self.option_values.items():
            each = {section: config.option_values[name] for section, config in self.sections.items()}
            differ = len({repr(one.value) for one in each.values()}) > 1
            value, source = own.value, _source(own)
            if differ:
                value, source = (
                    {section: one.value for section, one in each.items()},
                    {s: _source(one) for s, one in each.items()},
                )
            value = str(value) if isinstance(value, Secret) else masked_value(value)
            values[name] = {"value": value, "source": source}
        return values


def _source(one: OptionValue) -> Any:
    return {name: key.where for name, key in one.keys.items()} if one.keys else one.where
