"""What is stated and has no effect, with servers and clients of the run's own, and through every command."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.experiments.bench import bench_endpoint
from mpillm.experiments.commands import ab, advise, find_max_qps, sweep
from mpillm.experiments.rate_tests import RateTests
from mpillm.options.field import Effect, Field
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.fields.effects import LOAD_CLIENTS
from mpillm.options.options import parse_run
from mpillm.options.unused_options import of_engine, unused_options
from mpillm.programs.servers.kinds import kind_of
from tests.helpers.every_option import beside, named, text_of

SERVERS = ("vllm", "sglang", "trtllm-serve", "tritonserver", "mpillm", "command:serve {port}")
HARNESSES = ("inference-endpoint", "aiperf", "guidellm", "vllm-bench", "command:load {url} {report}")
# They choose the core, what starts it or what makes the load, or name a file that is not there.
CHOOSE = (
    *("server", "harness", "core_type", "harness_type", "use_triton", "config_file", "llm_gen_config_path"),
    *("benchmarks", "test_mode", "compliance_test", "audit_conf", "user_conf", "disagg_config"),
)


def words_of(field: Field, **chosen: str) -> list[str]:
    """Return a command line with a value for an option, and what it needs."""
    return [
        f"--{name}={text}" for name, text in {**beside(field), **chosen, field.name: text_of(field)}.items()
    ]


def outcome(field: Field, words: Sequence[str]) -> str:
    """Return what `run` makes of the option."""
    try:
        config = parse_run(words)
    except ConfigError as error:
        return "error" if "has no effect" in str(error) else f"refused: {error}"
    return "line" if any(one.name == field.name for one in unused_options(config, "run")) else "effect"


@pytest.mark.parametrize("server", SERVERS)
def test_every_option_beside_a_server_of_the_runs_own(server: str) -> None:
    """Those of the engine have their effect where the kind takes them, and are errors elsewhere."""
    kind = kind_of(server)
    for field in FIELDS:
        if field.name in CHOOSE:
            continue
        found = outcome(field, words_of(field, server=server))
        if of_engine(field) and not found.startswith("refused"):
            expected = "effect" if kind.takes(field.name) else "error" if field.effect.measured else "line"
            assert found == expected, field.name
        if not field.effect.uses:
            assert found == ("error" if field.effect.measured else "line"), field.name


@pytest.mark.parametrize("harness", HARNESSES)
@pytest.mark.parametrize("core", ["dummy", "trtllm_endpoint"])
@pytest.mark.long
def test_every_option_beside_another_client(harness: str, core: str) -> None:
    """As without it, except options that load clients do not use."""
    for field in FIELDS:
        if field.name in CHOOSE:
            continue
        alone, beside_it = (
            outcome(field, words_of(field, **named(core), **more)) for more in ({}, {"harness": harness})
        )
        if beside_it.startswith("refused") and not alone.startswith("refused"):
            assert "harness" in beside_it, f"{field.name}: {beside_it}"
        elif "harness" not in beside(field):
            loads = {load for use in field.effect.uses for load in use.loads}
            is_unused = loads and LOAD_CLIENTS not in loads and alone == "effect"
            assert beside_it == ("error" if is_unused else alone), field.name


class Began(Exception):
    """A command would start its first run."""


def began(*_: Any, **__: Any) -> NoReturn:
    raise Began


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (ab, "run_pairs"), (sweep, "run_in"), (find_max_qps, "SearchRecord"), (advise, "_plans"):
        monkeypatch.setattr(*place, began)
    monkeypatch.setattr(RateTests, "prepare", lambda self: None)


# The words of each, with an option and what is beside it; None: it does not start runs of those.
COMMANDS: dict[str, Callable[[list[str]], list[str]]] = {
    "run-harness": lambda words: ["run-harness", "--dry_run", *words],
    "sbatch": lambda words: ["sbatch", "--dry_run", "--", "run", *words],
    "ab": lambda words: ["ab", "--seed 1", "--seed 2", *words],
    "sweep": lambda words: ["sweep", "--temperature", "0.5", "0.6", *words],
    "find-max-qps": lambda words: ["find-max-qps", *words],
    "plan": lambda words: ["plan", "--world_size=9", *words],
    "advise": lambda words: ["advise", *words],
}
# mpirun hands its words to run, which refuses them.


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.long
def test_commands_that_start_runs_refuse_what_a_run_would(
    command: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One option of each kind of effect, on a core that takes few options, and beside a server."""
    monkeypatch.chdir(tmp_path)
    kinds: dict[Effect, Field] = {}
    for field in FIELDS:
        if field.name not in (*CHOOSE, "seed", "temperature", "world_size", "dry_run", "log_dir", "nodes"):
            kinds.setdefault(field.effect, field)
    assert len(kinds) > 25
    for field in kinds.values():
        for chosen in ({"core_type": "dummy"}, {"server": "vllm"}):
            words = words_of(field, **chosen)
            if command == "find-max-qps":
                words = [
                    *(word for word in words if not word.startswith("--scenarios")),
                    "--scenarios=Server",
                ]
            expected = outcome(field, words)
            if expected.startswith("refused"):
                continue
            with (
                contextlib.redirect_stderr(io.StringIO()) as stderr,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                try:
                    code = main(COMMANDS[command](words))
                except Began:
                    code = 0
            named_in_vain = f"{field.name} " in stderr.getvalue() and "has no effect" in stderr.getvalue()
            assert (code == 2 and named_in_vain) == (expected == "error"), (
                field.name,
                words,
                stderr.getvalue(),
            )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("--speculative_config={decoding_type: NGram}", 2),
        ("--beam_width=4", 2),
        ("--harness=aiperf", 2),
        ("--enable_kv_cache_reuse=true", 0),
        ("--traffic_distribution_policy=kv_cache_aware", 0),
    ],
)
def test_advise_names_options_that_it_does_not_simulate(
    word: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it refuses the option, because the figures would be those of another test."""
    with contextlib.suppress(Began):
        assert main(["advise", "--model_path=tiny-llama", word]) == 2 == code
    output = capsys.readouterr()
    expected = "cannot simulate it" if code else "not simulated; predictions are of runs without it"
    assert expected in " ".join(f"{output.out} {output.err}".split()), output


def test_a_load_test_takes_its_own_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of runs are unknown to it."""
    own = {field.name for field in bench_endpoint.Options.declared()}
    others = [field for field in FIELDS if field.name not in own]
    assert len(others) > 80
    for field in others:
        assert main(["bench", "endpoint", "--null", f"--{field.name}={text_of(field)}"]) == 2
        assert f"unknown option --{field.name}" in capsys.readouterr().err
    assert BY_NAME["goodput"].name in own
