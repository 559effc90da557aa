"""Checks between the join of all ranks and the load phase.

This module does not use MPI. It writes only the data set of a scaled-down workload.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import disagg
from disagg import DisaggConfig, WorldPlan
from disagg.errors import ConfigError
from mpillm.comms.messages import JoinReport
from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.cores.capabilities import ResetsPrefixCache, TransfersKv
from mpillm.cores.registry import BackendRegistry
from mpillm.data.dataset import Dataset
from mpillm.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from mpillm.devices import OwnGpu, assign
from mpillm.loadgen.settings import LoadGenConfig, LoadGenSettings, load_settings
from mpillm.options.disagg_yaml import disagg_config, world_plan
from mpillm.options.fields.effects import RUN, SERVE
from mpillm.options.fields.topology import PROMPTS_ALONE
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import check_unused
from mpillm.programs.load_clients.kinds import CONVERSATIONS
from mpillm.report.requests_file import check_requests_file
from mpillm.report.speculation import fixed_acceptance
from mpillm.runtime.choose_samples import load_samples
from mpillm.runtime.core_configs import (
    check_flags,
    check_handoff,
    core_configs,
    effective_yaml,
    with_settings,
)
from mpillm.runtime.plan_memory import idle_gpus, share_lines
from mpillm.runtime.yaml_effects import check_yaml
from mpillm.workloads.rounds import why_not


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: configuration, ranks, GPUs, cores."""

    config: RunConfig
    reports: dict[int, JoinReport]  # by rank
    plan: WorldPlan
    yaml: DisaggConfig  # with the resolved values
    gpus: dict[int, OwnGpu]  # by rank; empty: the ranks use CPUs
    cores: list[CoreConfig]  # of the instances' root ranks
    models: list[Any]  # result of the check of each core: `ModelInfo`, or None
    notes: list[str]  # on parts of the configuration without effect
    outlives_losses: bool  # the run continues after the loss of an instance
    server_gpus: dict[int, tuple[int, ...]]  # GPUs of the server that a rank owns, by rank


@dataclass(frozen=True)
class RunSamples:
    """A planned run, and its samples."""

    planned: RunPlan
    dataset: Dataset
    tokenizer: Tokenizer

    @property
    def shows_text(self) -> bool:
        """Whether the console displays responses: only a model's tokens can be displayed as text."""
        return isinstance(self.tokenizer, FileTokenizer)

    @property
    def _has_servers(self) -> bool:
        return BackendRegistry.get(self.planned.config.core_type).is_client

    def dataset_lines(self) -> list[str]:
        """Return the lines that describe the data set."""
        dataset = self.dataset
        size = f"{dataset.n_tokens.sum()} tokens"
        if dataset.turns is not None and dataset.turns.are_generated:  # then it has only first prompts
            begins_anew = [not one.n_inherited for one in dataset.turns.conversations]
            first = dataset.turns.first[:-1][begins_anew]
            size = f"{dataset.n_tokens[first].sum()} tokens in first turns"
        if dataset.sends_text:
            has_messages = self.planned.config.endpoint_type != "completions"
            form = "messages" if has_messages else "text"
            path = self.planned.config.model_path
            why = f" ({path} has no tokenizer)" if path else " (no --model_path)"
            size = f"sent as {form}{'' if has_messages else why}: the servers count tokens (usage)"
        elif dataset.texts and isinstance(self.tokenizer, ByteTokenizer) and self._has_servers:
            size += f", which are bytes: {self.planned.config.model_path} has no tokenizer"
        line = f"data set {dataset.name}: {len(dataset)} samples, {size}"
        return [line, dataset.note] if dataset.note else [line]


@dataclass(frozen=True)
class RunSetup(RunSamples):
    """Run that can be loaded, and LoadGen's settings for it."""

    settings: LoadGenSettings

    def announcement(self) -> list[str]:
        """Return the lines before the load phase, after the plan's notes."""
        planned, config = self.planned, self.planned.config
        lines = []
        if any(core.engine.scheduler.enable_kv_cache_reuse for core in planned.cores):
            lines.append("KV cache reuse is on: MLPerf forbids it, so this result can't be submitted")
        lines += [*self.dataset_lines(), *self.settings.notes]
        if config.workload is not None:
            lines.append(f"workload {config.workload.title}: LoadGen's {self.settings.describe()}")
            lines += _of_round(config, self.settings)
            if config.workload.scaled:
                lines.append(f"scaled down: {config.workload.scaled}")
            if config.goodput:
                lines.append("limits of --goodput, not the workload's: the result can't be submitted")
        if not (config.audit_conf or config.compliance_test):  # these change the test
            lines += self.settings.forecast.lines()
        if planned.gpus:
            names = Counter(planned.reports[rank].gpus[gpu.device].name for rank, gpu in planned.gpus.items())
            kinds = names if len(names) == 1 else (f"{n} {name}" for name, n in names.items())
            lines.append(f"GPUs: {len(planned.gpus)} ({', '.join(kinds)})")
        return lines


def _of_round(config: RunConfig, settings: LoadGenSettings) -> list[str]:
    """Return lines on the rounds of MLPerf in which the run's workload is valid."""
    assert config.workload is not None
    if settings.round is None:
        return ["LoadGen has the seeds of no round known here: the result can't be submitted"]
    name = settings.round.name
    if config.scenario not in config.workload.scenarios:
        line = f"no round has {config.scenario} of {config.workload.name}: the result can't be submitted"
        plain = config.workload.interactive_of
        return [f"{line}; the test is {plain}'s, whose limits alone Interactive changes" if plain else line]
    if why := why_not(config.workload, config.accuracy_target, name):
        return [f"LoadGen has the seeds of round {name}, where this result does not count: {why}"]
    return [f"round {name} (LoadGen's seeds), which has {config.workload.benchmark(config.accuracy_target)}"]


def plan_run(config: RunConfig | None, reports: dict[int, JoinReport], *, serves: bool = False) -> RunPlan:
    """Plan the run. Raises ConfigError if the ranks differ, or cannot run the configuration.

    `config`: rank 0's configuration; None if rank 0's command line is wrong.
    """
    config = _agreed(config, reports)
    ranks = range(len(reports))
    if config.instance_run is None and config.world_size not in (None, len(ranks)):
        message = f"{config.named('world_size')}: the launcher has started {len(ranks)} ranks"
        raise ConfigError(message, about=["world_size"])
    core_class = BackendRegistry.get(config.core_type)
    yaml = disagg_config(config, len(ranks), core_class.is_client)
    notes = [*filter(None, [config.passed_over()]), *check_unused(config, SERVE if serves else RUN)]
    if config.traffic_distribution_policy == PROMPTS_ALONE:
        notes.append(f"{config.named('traffic_distribution_policy')} is taken as load_balancing")
    policy = config.entry_section.traffic_distribution_policy
    if policy == "conversation" and not serves and not config.has_conversations:
        notes.append(f"policy conversation acts as load_balancing without --harness {CONVERSATIONS}")
    if config.acceptance_length is not None:
        notes.append(f"{fixed_acceptance(config.acceptance_length)}: this result can't be submitted")
    if config.requests_file:
        check_requests_file(config.requests_file)
    notes += check_yaml(config)
    nodes = [reports[rank].host for rank in ranks]
    plan = world_plan(config, yaml, len(ranks), nodes)
    visible = [reports[rank].gpus for rank in ranks]
    gpus = assign(config.device, plan, visible) if core_class.uses_gpus else {}
    server_gpus: dict[int, tuple[int, ...]] = {}
    if config.server:
        from mpillm.runtime import own_servers  # few runs start servers

        server_gpus = own_servers.gpus_of_servers(config, plan, visible)
        notes += own_servers.server_lines(plan, own_servers.server_specs(config, plan, server_gpus))
    notes += idle_gpus(plan, visible, {**{rank: (gpu.device,) for rank, gpu in gpus.items()}, **server_gpus})
    check_flags(config, plan)
    cores = core_configs(config, plan, [instance.root_rank for instance in plan.instances], gpus)
    with config.explained():
        cores = with_settings(config, plan, cores)
        models = [core_class.check(core) for core in cores]
    notes += _stop_word_lines(config, models[0])
    _check_abilities(config, core_class, plan, cores)
    check_handoff(cores, models)
    yaml = effective_yaml(config, yaml, plan, cores)
    if not core_class.is_client:  # servers have their own limits of requests
        notes += share_lines(cores)
    outlives_losses = config.on_instance_loss == "continue"
    if outlives_losses and (why := _why_a_loss_ends_it(plan, reports[0].versions["MPI"], bool(gpus), serves)):
        if config.is_user_set("on_instance_loss"):
            raise ConfigError(f"{config.named('on_instance_loss')}: {why}", about=["on_instance_loss"])
        outlives_losses = False
        notes.append(f"a lost instance ends this server: {why}")
    plan = plan.on_devices({rank: gpu.device for rank, gpu in gpus.items()}, server_gpus)
    return RunPlan(config, reports, plan, yaml, gpus, cores, models, notes, outlives_losses, server_gpus)


def _check_abilities(
    config: RunConfig, core_class: type[LLMCore], plan: WorldPlan, cores: list[CoreConfig]
) -> None:
    """Raise ConfigError for a handoff, speculative decoding or tuning that the core does not support."""
    if plan.instances[0].role != "executor" and not issubclass(core_class, TransfersKv):
        raise ConfigError(
            f"--core_type {config.core_type}: it has no KV cache to hand over, so its instances can't be"
            " disaggregated; name --mode aggregated",
            about=["core_type", "mode"],
        )
    for name in ("speculative_config", "acceptance_length"):
        if not core_class.speculates and not config.server and config.is_user_set(name):
            why = f"--{name}: the {config.core_type} core has no speculative decoding"
            raise ConfigError(why, about=[name])
    if config.reset_prefix_cache and not issubclass(core_class, ResetsPrefixCache):
        why = f"--reset_prefix_cache: the {config.core_type} core cannot empty a prefix cache"
        raise ConfigError(why, about=["reset_prefix_cache"])
    name = "enable_max_num_tokens_tuning"
    if not core_class.tunes_steps and any(core.engine.enable_max_num_tokens_tuning for core in cores):
        raise ConfigError(f"--{name} has no effect on the {config.core_type} core", about=[name])


def _stop_word_lines(config: RunConfig, model: Any) -> list[str]:
    """Return a line for each stop word in text that the core compares as tokens."""
    words = zip(config.stop_words or (), getattr(model, "stop_words", ()), strict=False)
    return [
        f"--stop_words {json.dumps(word)} ends an answer as tokens {list(tokens)}, not where other tokens"
        " make the same text"
        for word, tokens in words
        if isinstance(word, str)
    ]


def _why_a_loss_ends_it(plan: WorldPlan, mpi: str, on_gpus: bool, serves: bool) -> str:
    """Return why the run cannot continue without a lost instance; "" if it can."""
    disaggregated = plan.instances[0].role != "executor"
    if not mpi.startswith("Open MPI v5"):
        return f"{mpi} does not outlive a lost rank; Open MPI 5 does (ULFM)"
    if disaggregated and on_gpus:
        return "a handoff between GPUs does not outlive a lost rank; aggregated instances do"
    if disaggregated and serves:
        return "serve outlives the loss of an aggregated instance only"
    return ""


def prepare(planned: RunPlan, run_directory: Callable[[], Path]) -> RunSetup:
    """Read the data set and LoadGen's settings.

    Raises ConfigError if they do not fit the model, or each other. `run_directory()` is called only to write
    the data set of a scaled-down workload.
    """
    dataset, tokenizer = load_samples(planned.config, planned.models, run_directory)
    settings = load_settings(LoadGenConfig.from_run(planned.config), len(dataset))
    return RunSetup(planned, dataset, tokenizer, settings)


def _agreed(config: RunConfig | None, reports: dict[int, JoinReport]) -> RunConfig:
    """Return the configuration of all ranks.

    Raises ConfigError, which names the ranks with another configuration, other code or versions, or a wrong
    command line.
    """
    hosts = {rank: report.host for rank, report in reports.items()}
    errors: dict[str, list[int]] = {}
    for rank, report in reports.items():
        if report.usage_error:
            errors.setdefault(report.usage_error, []).append(rank)
    if errors or config is None:
        everywhere = [len(ranks) for ranks in errors.values()] == [len(reports)]
        raise ConfigError(
            "\n".join(
                error if everywhere else f"{disagg.rank_list(ranks, hosts)}: {error}"
                for error, ranks in errors.items()
            )
        )
    own = reports[0]
    for name, version in own.versions.items():
        others: dict[str, list[int]] = {}
        for rank, report in reports.items():
            if report.versions[name] != version:
                others.setdefault(report.versions[name], []).append(rank)
        if others:
            differing = "; ".join(
                f"{disagg.rank_list(ranks, hosts)} run{'s' if len(ranks) == 1 else ''} {name} {another}"
                for another, ranks in others.items()
            )
            raise ConfigError(f"{differing}, {disagg.rank_list([0], hosts)} {version}")
    if older := [rank for rank, report in reports.items() if report.code and report.code != own.code]:
        raise ConfigError(
            f"{disagg.rank_list(older, hosts)} {'has' if len(older) == 1 else 'have'} other code of mpillm"
            f" {own.versions['mpillm']} than rank 0: install the same files on all nodes"
        )
    other = {rank: report for rank, report in reports.items() if report.digest != own.digest}
    if other:
        first = min(other)
        difference = config.difference(other[first].values)
        contents = f"the contents of {config.disagg_config} differ"
        why = f"rank {first}: {difference}" if difference else contents
        raise ConfigError(
            f"{disagg.rank_list(other, hosts)} {'was' if len(other) == 1 else 'were'} started with"
            f" another configuration than rank 0: {why}"
        )
    return config
