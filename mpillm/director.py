"""Rank 0's view of a run: checks and plans when all have joined, tells the person, and writes the run directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import disagg
from disagg import WorldPlan
from disagg.errors import ConfigError
from mpillm import __version__
from mpillm.comms.control import Coordinator
from mpillm.comms.transport import Transport
from mpillm.compliance import prepare_audit
from mpillm.config import RunConfig, run_name
from mpillm.cores import BackendRegistry
from mpillm.dataset import Dataset
from mpillm.devices import assign
from mpillm.errors import STORAGE_ERRORS, ExitCode, Failure, RunError
from mpillm.factory import core_configs, routing_notes
from mpillm.json_files import write_json
from mpillm.loadgen.logs import advice, unsatisfied, verdict
from mpillm.loadgen.settings import LoadGenConfig, LoadGenSettings, load_settings
from mpillm.loadgen.sut import LoadGenTest
from mpillm.planning import Setup, disagg_config
from mpillm.report.console import Console, rank_list
from mpillm.report.outputs import Outputs
from mpillm.report.result import failures_json, summary_rows, test_result
from mpillm.report.run_directory import OF_AN_EARLIER_RUN, lock, unused
from mpillm.roles.base import RouteMap
from mpillm.roles.harness import Harness, Sampling
from mpillm.samples import load_samples
from mpillm.tokenizer import ByteTokenizer, Tokenizer


class Director:
    """`phase_done` is the coordinator's callback; what it raises ends the run."""

    def __init__(self, config: RunConfig | None, size: int) -> None:
        self._config = config
        self._size = size
        self.coordinator: Coordinator | None = None
        self._console = Console()
        self._log_dir: Path | None = None
        self._plan: WorldPlan | None = None
        self._dataset: Dataset | None = None
        self._tokenizer: Tokenizer | None = None
        self._outputs: Outputs | None = None
        self._harness: Harness | None = None
        self._settings: LoadGenSettings | None = None
        self._audit = ""  # LoadGen's audit.config, of a compliance run
        self._result: dict[str, Any] = {"status": "FAILED"}
        self._phases_s: dict[str, float] = {}
        self._last_start = time.time()
        self._progress_at = 0.0

    # --- the phases ---

    def phase_done(self, phase: str, seconds: float, reports: dict[int, Any]) -> Any:
        """All ranks have done `phase`; what this returns is given to all of them."""
        note, value = "", None
        if phase == "join":
            value, note = self._joined(reports)
        elif phase == "ready":
            startup = time.time() - self._last_start
            self._result["startup_s"] = round(startup, 4)
            note = f"{startup:.2f} s after the last rank was started"
        elif phase == "drain":
            note = self._drained(reports)
        self._phases_s[phase] = round(seconds, 4)
        self._console.phase(phase, seconds, note)
        return self._stopped() if phase == "stop" else value

    def poll(self) -> bool:
        """Draw the progress bar during the test."""
        now = time.monotonic()
        harness = self._harness
        if harness is not None and harness.totals.started and now - self._progress_at > 0.1:
            self._progress_at = now
            totals = harness.totals
            if harness.in_flight or not totals.samples:
                steady = bool(self._config and self._config.show_steady_state_progress)
                self._console.progress(totals.samples, totals.issued, totals.tokens, time.perf_counter() - totals.started, steady)
        return False

    def make_harness(self, route: Transport, ranks: RouteMap) -> Harness:
        """The harness role: it lives on rank 0, as the director does."""
        config, dataset, plan = self._config, self._dataset, self._plan
        log_dir, settings = self._log_dir, self._settings
        assert config is not None and dataset is not None and plan is not None and log_dir is not None and settings is not None
        self._harness = Harness(
            route,
            ranks[plan.leader_rank],
            dataset,
            Sampling(config.max_output_len, config.min_output_len, config.temperature, config.top_k, config.top_p, config.seed),
            lambda: LoadGenTest(settings.test, len(dataset), log_dir, self._audit),
            self._outputs.add if self._outputs else None,
            plan.instances[0].role == "ctx",
        )
        return self._harness

    # --- join: everything that can be checked before anything is loaded ---

    def _joined(self, reports: dict[int, Any]) -> tuple[Setup, str]:
        self._last_start = max(report["started"] for report in reports.values())
        self._check_agreement(reports)
        config = self._config
        assert config is not None
        yaml = disagg_config(config, self._size)
        plan = self._plan = disagg.plan(yaml, self._size, [reports[rank]["host"] for rank in range(self._size)])
        if self.coordinator is not None:
            for rank, state in enumerate(self.coordinator.ranks):
                me = plan.ranks[rank]
                state.label = f"rank {rank} ({', '.join(me.roles)}{f', instance {me.instance}' if me.instance is not None else ''})"
        gpus = [tuple(reports[rank]["gpus"]) for rank in range(self._size)]
        own = assign(config.device, plan, gpus) if BackendRegistry.uses_gpus(config.core_type) else {}
        cores = core_configs(config, plan, [instance.leader for instance in plan.instances], own)
        models = [BackendRegistry.check(core) for core in cores]
        self._dataset, self._tokenizer = load_samples(config, models, lambda: self._run_directory(config))
        settings = self._settings = load_settings(LoadGenConfig.from_run(config), len(self._dataset))
        self._result["loadgen"] = settings.to_json()
        self._make_run_directory(config, disagg.dump(yaml), plan, reports)
        nodes = len({rank.node for rank in plan.ranks})
        model = f", model {Path(config.model_path).name}" if config.model_path else ""
        self._console.line(
            f"mpillm {__version__}: ranks: {self._size}, nodes: {nodes}, {yaml.mode}, core {config.core_type}{model},"
            f" {reports[0]['versions']['MPI']}"
        )
        self._console.line()
        self._console.line(disagg.table(plan))
        self._console.line(f"  run directory {path_shown(self._log_dir)}")
        for note in routing_notes(config, yaml):
            self._console.line(f"  {note}")
        if any(core.enable_kv_cache_reuse for core in cores):
            self._console.line("  KV cache reuse is on: MLPerf forbids it, so this is no result to submit")
        self._console.line(f"  data set {self._dataset.name}: {len(self._dataset)} samples, {len(self._dataset.tokens)} tokens")
        if self._has_text and self._dataset.texts and isinstance(self._tokenizer, ByteTokenizer):
            self._console.line(
                f"  no tokenizer.json in {config.model_path}: each byte of a prompt is a token, and the answers mean nothing"
            )
        if config.workload is not None:
            self._console.line(f"  workload {config.workload.title}: LoadGen's {settings.describe()}")
            if config.workload.scaled:
                self._console.line(f"  scaled down: {config.workload.scaled}")
        if own:
            name = next(gpus[rank][gpu.device].name for rank, gpu in own.items())
            self._console.line(f"  GPUs: {len(own)} ({name})")
        return Setup(plan, str(self._log_dir), (reports[0]["host"], reports[0]["pid"]), own), "all ranks agree"

    def _check_agreement(self, reports: dict[int, Any]) -> None:
        errors: dict[str, list[int]] = {}
        for rank, report in reports.items():
            if report["error"]:
                errors.setdefault(report["error"], []).append(rank)
        if errors:
            everywhere = len(errors) == 1 and len(next(iter(errors.values()))) == self._size
            raise ConfigError("\n".join(error if everywhere else f"{rank_list(ranks)}: {error}" for error, ranks in errors.items()))
        mine = reports[0]
        assert self._config is not None
        for rank, report in reports.items():
            for name, version in report["versions"].items():
                if version != mine["versions"][name]:
                    raise ConfigError(f"rank {rank} runs {name} {version}, rank 0 {mine['versions'][name]}")
        other = {rank: report for rank, report in reports.items() if report["digest"] != mine["digest"]}
        if other:
            first = min(other)
            difference = self._config.difference(other[first]["values"])
            raise ConfigError(
                f"{rank_list(list(other))} {'was' if len(other) == 1 else 'were'} started with another configuration than rank 0: "
                + (f"rank {first}: {difference}" if difference else f"the contents of {self._config.disagg_config} differ")
            )

    def _make_run_directory(self, config: RunConfig, yaml: str, plan: WorldPlan, reports: dict[int, Any]) -> None:
        assert self._dataset is not None and self._tokenizer is not None and self._settings is not None
        path = self._run_directory(config)
        try:
            (path / "disagg.yaml").write_text(yaml, encoding="utf-8")
            (path / "user.conf").write_text(self._settings.user_conf, encoding="utf-8")
            self._audit = prepare_audit(config.compliance_test, config.audit_conf, path)
            write_json(path / "plan.json", plan.to_json())
            write_json(path / "config.json", config.to_json())
            joined = [{"rank": rank, **{k: report[k] for k in ("host", "pid", "versions")}} for rank, report in sorted(reports.items())]
            write_json(path / "ranks.json", joined)
            for name in OF_AN_EARLIER_RUN:
                (path / name).unlink(missing_ok=True)
            if config.save_outputs or self._has_text:
                self._outputs = Outputs(self._dataset, self._tokenizer, path / "outputs.jsonl" if config.save_outputs else None)
        except OSError as error:
            raise _unwritable(config, path, error) from error

    def _run_directory(self, config: RunConfig) -> Path:
        """Made when it is first asked for."""
        if self._log_dir is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = Path(config.log_dir) if config.log_dir else unused(Path("build/runs") / f"{stamp}-{run_name(config)}")
            try:
                str(path.absolute()).encode()
            except UnicodeEncodeError:
                raise ConfigError(f"--log_dir {str(path)!r}: no name in UTF-8, which LoadGen needs; name another folder") from None
            if (path / "config.json").exists() and not (path / "plan.json").exists():
                raise ConfigError(f"--log_dir {path}: its config.json is a model's or an engine's, not a run's; name another folder")
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock(path)
            except OSError as error:
                raise _unwritable(config, path, error) from error
            self._log_dir = path.absolute()
        return self._log_dir

    @property
    def _has_text(self) -> bool:
        """Whether answers can be shown as text: the model has a folder, and so a tokenizer."""
        return bool(self._config and self._config.model_path and Path(self._config.model_path).is_dir())

    # --- the end ---

    def _drained(self, reports: dict[int, Any]) -> str:
        assert self._harness is not None and self._config is not None and self._log_dir is not None
        if self._outputs:
            self._outputs.close()
        result = verdict(self._log_dir, self._config.test_mode)
        if result is None:
            raise RunError(Failure(f"LoadGen's logs in {self._log_dir} are missing or incomplete: is the disk full?"))
        self._result |= {"status": result, "loadgen_result": result, "loadgen_unsatisfied": unsatisfied(self._log_dir)}
        self._result["loadgen_advice"] = advice(self._log_dir) if result == "INVALID" else []
        self._result |= test_result(self._harness, reports)
        assert self._plan is not None
        machines = {self._plan.ranks[rank].node: report["machine"] for rank, report in sorted(reports.items()) if report["machine"]}
        write_json(self._log_dir / "machines.json", machines)
        return f"{self._result['samples']} of {self._harness.totals.issued} samples answered"

    def _stopped(self) -> int:
        """Everything has ended well: the last lines, and the exit code."""
        result, config = self._result, self._config
        assert config is not None and self._harness is not None
        self._write_result()
        if self._outputs and self._has_text:
            self._console.answers(self._outputs.shown())
        self._console.summary(summary_rows(result, config, path_shown(self._log_dir)))
        invalid = config.require_valid and result["loadgen_result"] != "VALID"
        return int(ExitCode.TEST_FAILED if invalid else ExitCode.DONE)

    def failed(self, failures: tuple[Failure, ...]) -> int:
        """Tell the person, once, and write what there is; the exit code."""
        phase = self.coordinator.phase if self.coordinator else "join"
        codes = [f.code for f in failures if f.code is not None]
        code = int(codes[0]) if codes else int(ExitCode.TEST_FAILED if phase in ("test", "drain", "stop") else ExitCode.NOT_READY)
        self._result |= {"status": "FAILED", "phase": phase, "exit_code": code, "failures": failures_json(failures)}
        see = ""
        if self._log_dir is not None:
            ranks = sorted({f.rank for f in failures if f.rank is not None})
            see = path_shown(self._log_dir / "ranks" / f"rank_{ranks[0]:04d}.log" if len(ranks) == 1 else self._log_dir)
        when = f"in phase '{phase}'" if code != ExitCode.USAGE else "before anything was loaded"
        self._console.failure(when, failures, see, self._describe)
        if self._log_dir is not None:
            try:
                self._write_result()
            except OSError as error:
                self._console.line(f"  result.json in {self._log_dir} can't be written: {error.strerror}")
        return code

    def _describe(self, rank: int) -> str:
        return self.coordinator.ranks[rank].describe() if self.coordinator else f"rank {rank}"

    def _write_result(self) -> None:
        assert self._log_dir is not None and self._config is not None
        config = self._config
        head = {
            "status": self._result["status"],
            "loadgen_result": None,
            "scenario": config.scenario,
            "test_mode": config.test_mode,
            "mode": self._plan_mode(),
            "core_type": config.core_type,
            "model": config.model_path,
            "workload": config.workload.title if config.workload else None,
            "world_size": self._size,
            "samples": self._harness.totals.samples if self._harness else 0,
            "errors": self._harness.totals.errors if self._harness else 0,
            "retried": 0,
        }
        write_json(self._log_dir / "result.json", head | self._result | {"phases_s": self._phases_s})

    def _plan_mode(self) -> str:
        assert self._plan is not None
        return "aggregated" if self._plan.instances[0].role == "executor" else "disaggregated"


def path_shown(path: Path | None) -> str:
    """Relative to the current directory where that is shorter."""
    return os.path.relpath(path) if path and path.is_relative_to(Path.cwd()) else str(path)


def _unwritable(config: RunConfig, path: Path, error: OSError) -> RunError:
    message = config.with_sources(f"the run directory {path} (--log_dir) can't be written: {error.strerror}")
    return RunError(Failure(message, code=_storage_code(error)))


def _storage_code(error: OSError) -> ExitCode | None:
    """A directory that can't be written is a wrong option; a disk that is full is not."""
    return None if error.errno in STORAGE_ERRORS else ExitCode.USAGE
