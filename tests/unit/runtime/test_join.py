"""From what ranks say when they join to a run that can be loaded; and what rank 0 makes of it.

Without MPI.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.comms.control import RankControl, Timeouts
from mpillm.comms.messages import ARRIVED, RELEASE, Arrival, JoinReport, Rank0At, Setup
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.errors import ExitCode, Failure
from mpillm.options.fields import DEADLINES
from mpillm.options.options import parse_run, parse_serve
from mpillm.options.run_config import RunConfig
from mpillm.phases import PHASES, Phase
from mpillm.report.console import Console
from mpillm.runtime.join import plan_run, prepare
from mpillm.runtime.own_code import code_digest, reports_code
from mpillm.runtime.rank0 import Rank0
from mpillm.runtime.run_session import announced
from mpillm.runtime.session import Session
from tests.helpers.configured import DUMMY


def joined(config: RunConfig | None, n: int = 3, **of_rank_1: Any) -> dict[int, JoinReport]:
    """Return the reports of `n` ranks that were started alike, except for `of_rank_1`."""
    alike = JoinReport(
        "node", 100, 5.0, {"mpillm": "1.0", "MPI": "Some MPI 1"}, "", config.digest() if config else ""
    )
    reports = {rank: alike._replace(pid=100 + rank, started=5.0 + rank) for rank in range(n)}
    return reports | {1: reports[1]._replace(**of_rank_1)}


def nowhere() -> Path:
    raise AssertionError("no run directory is needed")


def test_a_run_is_planned_and_prepared() -> None:
    config = parse_run(
        [
            *DUMMY,
            "--model_path",
            "tiny-llama",
            "--dataset",
            "synthetic",
            "--num_samples",
            "70",
            "--scenarios",
            "Server",
            "--server_target_qps",
            "9",
        ]
    )
    planned = plan_run(config, joined(config, host="other"))
    assert [rank.node for rank in planned.plan.ranks] == ["node", "other", "node"]
    assert [(core.instance, core.rank) for core in planned.cores] == [(0, 1), (1, 2)]
    assert planned.gpus == {} and {rank.device for rank in planned.plan.ranks} == {None}, "there are none"
    prepared = prepare(planned, nowhere)
    assert len(prepared.dataset) == 70
    assert prepared.settings.to_json()["target_qps"] == 9
    more = [*prepared.announcement(), "servers: a \\\n    b"]
    lines = announced(planned, Path("x"), more)
    assert max(map(len, lines[0].splitlines())) <= 80 < len(lines[0]), "a terminal's width"
    head = " ".join(lines[0].split())
    assert head.startswith("mpillm ") and head.endswith(
        "ranks: 3, nodes: 2, aggregated, core dummy, model tiny-llama, Some MPI 1"
    )
    assert lines[-1] == "  servers: a \\\n      b", "a command line in several lines"
    assert any(line.startswith("  data set ") and ": 70 samples" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "scenario", "means"),
    [
        ("llama2-70b", "SingleStream", ""),
        ("llama2-70b-interactive", "Offline", "; the test is llama2-70b's, "),
    ],
)
def test_a_scenario_that_no_round_has_is_reported(
    tmp_path: Path, name: str, scenario: str, means: str
) -> None:
    words = ["--core_type=dummy", f"--benchmarks={name}", "--model_scale=tiny", f"--scenarios={scenario}"]
    config = parse_run([*words, "--round=v6.0"])  # LoadGen gives its own seeds to the first test of a process
    lines = prepare(plan_run(config, joined(config)), lambda: tmp_path).announcement()
    message = f"no round has {scenario} of {name}: the result can't be submitted{means}"
    assert any(message in line for line in lines)


def test_errors_of_a_command_line_are_reported_once() -> None:
    wrong = {
        rank: report._replace(usage_error="--x: no such option") for rank, report in joined(None).items()
    }
    with pytest.raises(ConfigError) as error:
        plan_run(None, wrong)
    assert str(error.value) == "--x: no such option"
    config = parse_run([*DUMMY])
    with pytest.raises(ConfigError) as error:
        plan_run(config, joined(config, usage_error="--x: no such option"))
    assert str(error.value) == "rank 1: --x: no such option"
    without = {r: report._replace(host="n2") for r, report in joined(config, 4).items() if r > 1}
    without = {
        r: report._replace(usage_error="--model_path: no such folder") for r, report in without.items()
    }
    with pytest.raises(ConfigError) as error:
        plan_run(config, joined(config, 4) | without)
    assert str(error.value) == "host n2 (ranks 2-3): --model_path: no such folder"


def test_ranks_must_be_alike() -> None:
    config, other = parse_run([*DUMMY]), parse_run([*DUMMY, "--max_output_len", "7"])
    with pytest.raises(ConfigError, match=r"^rank 1 runs MPI Another 2, rank 0 Some MPI 1$"):
        plan_run(config, joined(config, versions={"mpillm": "1.0", "MPI": "Another 2"}))
    there = joined(config, 4, host="n2", versions={"mpillm": "1.0", "MPI": "Another 2"})
    with pytest.raises(ConfigError, match=r"^rank 1 on n2 runs MPI Another 2, rank 0 on node Some"):
        plan_run(config, there)
    with pytest.raises(
        ConfigError,
        match=r"rank 1 was started with another configuration than rank 0: rank 1: --max_output_len is"
        r" 7 there",
    ):
        plan_run(config, joined(config, digest=other.digest(), values=other.values))


def test_speculative_decoding_where_rules_or_the_core_forbid_it() -> None:
    guesses = ["--speculative_config", "decoding_type:NGram,max_draft_len:4", "--device", "cpu"]
    tiny = ["--model_path", "tiny-llama", "--load_format", "dummy"]
    config = parse_run([*tiny, *guesses])
    (core,) = plan_run(config, joined(config, 2)).cores
    assert core.engine.speculative_config == {"decoding_type": "NGram", "max_draft_len": 4}
    named = "--speculative_config: MLPerf's rules forbid speculative decoding for llama2-70b: they allow it"
    for options, why in (
        (["--benchmarks", "llama2-70b", "--model_scale", "tiny"], named),
        (
            ["--benchmarks", "deepseek-r1-interactive", "--model_scale", "tiny"],
            "--speculative_config: MLPerf's rules allow deepseek-r1-interactive speculative decoding with the"
            " head of deepseek-ai/DeepSeek-R1",
        ),
    ):
        config = parse_run([*options, *guesses])
        with pytest.raises(ConfigError) as error:
            plan_run(config, joined(config, 2))
        assert str(error.value).startswith(why) and "speculative_config" in error.value.about


def test_a_core_that_hands_nothing_over_is_not_disaggregated() -> None:
    core = ["--core_type", "tests.helpers.plugin_cores:Echo"]
    config = parse_run([*core, "--mode", "disaggregated"])
    why = r"plugin_cores:Echo: it has no KV cache to hand over, so its instances can't be disaggregated"
    with pytest.raises(ConfigError, match=why):
        plan_run(config, joined(config, 3))
    config = parse_run(core)
    assert len(plan_run(config, joined(config, 3)).plan.instances) == 2


def test_another_number_of_ranks_than_the_options_say_is_an_error() -> None:
    config = parse_run([*DUMMY, "--world_size", "4"])
    assert len(plan_run(config, joined(config, 4)).plan.ranks) == 4
    with pytest.raises(ConfigError) as error:
        plan_run(config, joined(config, 3))
    assert str(error.value) == "--world_size 4: the launcher has started 3 ranks"
    assert error.value.about == ("world_size",)


def test_tuned_steps_require_chunked_context() -> None:
    tuned = ["--enable_max_num_tokens_tuning", "true", "--device", "cpu"]
    torch = ["--model_path", "tiny-llama", "--load_format", "dummy"]
    config = parse_run([*torch, *tuned, "--enable_chunked_context", "true"])
    (core,) = plan_run(config, joined(config, 2)).cores
    assert core.engine.enable_max_num_tokens_tuning
    named = "--enable_max_num_tokens_tuning"
    config = parse_run([*torch, *tuned])
    with pytest.raises(ConfigError, match=f"^{named} has no effect without --enable_chunked_context true$"):
        plan_run(config, joined(config, 2))


def test_the_tokens_of_a_stop_word_are_named() -> None:
    """Its text ends no answer in which it has other tokens."""
    torch = ["--model_path", "tiny-llama", "--load_format", "dummy", "--dataset", "synthetic"]
    config = parse_run([*torch, "--stop_words", r'["#\n", [5]]'])
    (note,) = [note for note in plan_run(config, joined(config, 2)).notes if "stop_words" in note]
    assert note.startswith(r'--stop_words "#\n" ends an answer as tokens [35, 10], not where other tokens')
    config = parse_run([*torch, "--stop_words", "[[5]]"])
    assert not any("stop_words" in note for note in plan_run(config, joined(config, 2)).notes)


def test_outliving_a_loss_is_refused_where_it_is_impossible() -> None:
    """The default of `serve` gives a note in the plan; an explicit option is an error."""
    why = "Some MPI 1 does not outlive a lost rank; Open MPI 5 does (ULFM)"
    config = parse_serve([*DUMMY])
    planned = plan_run(config, joined(config), serves=True)
    assert not planned.outlives_losses
    assert f"a lost instance ends this server: {why}" in planned.notes
    for parse in (parse_run, parse_serve):
        config = parse([*DUMMY, "--on_instance_loss", "continue"])
        with pytest.raises(ConfigError) as error:
            plan_run(config, joined(config), serves=parse is parse_serve)
        assert str(error.value) == f"--on_instance_loss continue: {why}"
    config = parse_serve([*DUMMY])
    able = joined(config)
    able = {
        r: report._replace(versions={"mpillm": "1.0", "MPI": "Open MPI v5.0.11"})
        for r, report in able.items()
    }
    planned = plan_run(config, able, serves=True)
    assert planned.outlives_losses and not planned.notes


def test_a_bad_data_set_is_found_before_a_directory_is_made(tmp_path: Path) -> None:
    config = parse_run([*DUMMY, "--dataset_path", str(tmp_path / "none.jsonl")])
    planned = plan_run(config, joined(config))
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        prepare(planned, nowhere)


class Loopback:
    """Is a transport of rank 0 that only notes what is sent."""

    rank = 0

    def __init__(self) -> None:
        self.handlers: dict[Tag, Any] = {}
        self.sent: list[tuple[int, Tag, Any]] = []

    def send(self, dest: int, tag: Tag, buffer: Any) -> None:
        self.sent.append((dest, tag, buffer))


class Run:
    """Is rank 0 of a run in `directory`, with ranks that arrive when the test says so."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        self.config = parse_run(
            [*DUMMY, "--dataset", "synthetic", "--num_samples", "70", "--log_dir", str(directory), *words]
        )
        self.transport: Any = Loopback()
        control = RankControl(self.transport, SimpleNamespace(phase="join"), Timeouts(DEADLINES))  # type: ignore[arg-type]
        self.out, self.err = io.StringIO(), io.StringIO()
        self.rank0 = Rank0(control, 3, self.config, 0.0, Console(self.out, self.err), Session)

    def arrive(self, phase: Phase, reports: dict[int, Any]) -> list[Any]:
        """Return what the ranks are released with."""
        self.transport.sent.clear()
        for rank, report in reports.items():
            assert self.transport.sent == []
            self.transport.handlers[Tag.ARRIVED](
                Envelope(rank, Tag.ARRIVED, ARRIVED.write(Arrival(phase, report)))
            )
        assert [(dest, tag) for dest, tag, _ in self.transport.sent] == [
            (rank, Tag.RELEASE) for rank in range(3)
        ]
        return [RELEASE.read(buffer) for _, _, buffer in self.transport.sent]

    def result(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return made


def test_a_rank_of_rank_0s_host_reports_rank_0(tmp_path: Path) -> None:
    """Another rank could not kill a stopped rank 0."""
    run = Run(tmp_path / "run")
    elsewhere = {rank: report._replace(pids=f"h{rank % 2}") for rank, report in joined(run.config).items()}
    assert {release.value.rank0.reporter for release in run.arrive("join", elsewhere)} == {2}


def test_rank_0_has_a_session_when_all_have_joined(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.rank0.session is None
    released = run.arrive("join", joined(run.config))
    assert run.rank0.session is not None
    (setup,) = {(r.phase, r.value.log_dir, r.value.rank0) for r in released}
    assert setup == ("join", str(tmp_path / "run"), Rank0At("node", 100, "", None))
    assert isinstance(released[0].value, Setup) and len(released[0].value.plan.ranks) == 3
    assert {"plan.json", "config.json", "ranks.json", "disagg.yaml", "user.conf"} <= {
        path.name for path in run.directory.iterdir()
    }
    assert run.rank0.control.ranks[1].describe() == "rank 1 (executor, instance 0), node, pid 101"
    assert run.arrive("load", {0: None, 1: {0: "http://a:1"}, 2: None})[0] == ("load", {0: "http://a:1"})
    assert run.out.getvalue().count("all ranks agree") == 1


def test_a_failure_is_reported_and_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.arrive("join", joined(run.config))
    run.rank0.failed((Failure("broken", 2, "trace"),), ExitCode.NOT_READY)
    result = run.result()
    assert (result["status"], result["phase"], result["exit_code"]) == ("FAILED", "load", ExitCode.NOT_READY)
    assert result["failures"] == [{"rank": 2, "cause": "broken", "traceback": "trace"}]
    assert (result["samples"], result["mode"], result["world_size"], list(result["phases_s"])) == (
        0,
        "aggregated",
        3,
        ["join"],
    )
    error = run.err.getvalue()
    assert "phase 'load'" in error and "broken" in error and "rank_0002.log" in error


def test_who_was_ended_by_another_ones_loss_is_not_named_beside_it(tmp_path: Path) -> None:
    """Open MPI 5.0 crashes where it hears of a loss while it makes a communicator."""
    run = Run(tmp_path / "run")
    run.arrive("join", joined(run.config))
    logs = tmp_path / "run" / "ranks"
    logs.mkdir(exist_ok=True)
    crash = "Fatal Python error: Segmentation fault\n[vm:7] [ 5] libmpi.so.40(ompi_comm_set_rank_failed+0x4c)"
    (logs / "rank_0001.log").write_text(crash)
    (logs / "rank_0002.log").write_text("rank 2, pid 8: run\n")
    ended = tuple(Failure("the process has ended", rank, code=5, ended=True) for rank in (1, 2))
    run.rank0.failed(ended, ExitCode.INSTANCE_LOST)
    assert [failure["rank"] for failure in run.result()["failures"]] == [2]
    assert "rank 1" not in run.err.getvalue()
    run.rank0.failed(ended[:1], ExitCode.INSTANCE_LOST)
    assert [failure["rank"] for failure in run.result()["failures"]] == [1], "who is there alone"


def test_a_wrong_option_leaves_no_directory(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--scenarios", "Server")  # without a rate
    with pytest.raises(ConfigError, match="--server_target_qps"):
        run.arrive("join", joined(run.config))
    run.rank0.failed((Failure("…", code=ExitCode.USAGE),), ExitCode.USAGE)
    assert not (tmp_path / "run").exists()


def test_phases_have_deadlines_and_methods() -> None:
    from mpillm.roles.role import Role

    assert tuple(DEADLINES) == PHASES
    assert all(hasattr(Role, phase) for phase in PHASES[1:])


def test_other_code_of_the_same_version_is_named() -> None:
    """Only the first rank of a node reads its code."""
    config = parse_run(DUMMY)
    there = joined(config, 4, host="n2", code="b")
    there[0] = there[0]._replace(code="a")
    with pytest.raises(ConfigError, match=r"^rank 1 on n2 has other code of mpillm 1\.0 than"):
        plan_run(config, there)
    there[1] = there[1]._replace(code="a")
    plan_run(config, there)


def test_a_digest_of_the_code(tmp_path: Path) -> None:
    for name in ("mpillm/a.py", "mpillm/b/c.py", "launch/d.py", "disagg/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    first = code_digest(tmp_path)
    (tmp_path / "mpillm/a.pyc").write_text("made by Python")
    assert code_digest(tmp_path) == first
    (tmp_path / "mpillm/b/c.py").write_text("x = 2\n")
    second = code_digest(tmp_path)
    (tmp_path / "mpillm/b/c.py").rename(tmp_path / "mpillm/b/f.py")
    assert len({first, second, code_digest(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("rank", "place", "here", "expected"),
    [(0, 0, 2, True), (2, 0, 2, True), (3, 1, 2, False), (2, 0, 4, False)],
)
def test_the_first_rank_of_each_of_several_nodes_reports_its_code(
    rank: int, place: int, here: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"SIZE": 4, "RANK": rank, "LOCAL_RANK": place, "LOCAL_SIZE": here}
    for name, value in names.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert reports_code() == expected


def test_the_data_set_line_names_what_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "Hello"}\n')

    def line(*words: object) -> str:
        config = parse_run([*map(str, words), "--dataset_path", str(tmp_path / "own.jsonl")])
        return prepare(plan_run(config, joined(config, 2)), lambda: tmp_path).dataset_lines()[0]

    assert "sent as text (no --model_path): the servers" in line("--url", "h:1")
    (model := tmp_path / "model").mkdir()
    assert f"sent as text ({model} has no tokenizer): the" in line("--url", "h:1", "--model_path", model)
    preset = line("--core_type", "triton_grpc", "--model_path", "tiny-llama")
    assert preset.endswith("5 tokens, which are bytes: tiny-llama has no tokenizer")
    assert line("--core_type", "torch", "--model_path", "tiny-llama").endswith(" 5 tokens")
