"""Options that do not go together are refused; a test's name and digest follow from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.cores.registry import check_core
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.options import parse_run, run_name
from mpillm.stages.commands import run_harness as in_turn
from tests.helpers.configured import DUMMY

CONVERSATIONS = ("--harness", "conversations")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--min_output_len", "9", "--max_output_len", "3"], ["--min_output_len 9", "--max_output_len 3"]),
        (["--dataset", "synthetic", "--dataset_path", "x"], ["--dataset_path", "exclude"]),
        (
            ["--core_type", "torch", "--context_chunking_policy", "equal_progress"],
            ["has no effect without --enable_chunked_context true"],
        ),
        (["--num_samples", "8"], ["--num_samples 8 has no effect without --dataset synthetic"]),
        (["--model_scale", "tiny"], ["--model_scale tiny has no effect without --benchmarks"]),
        (["--num_ctx_servers", "2"], ["--num_ctx_servers", "no meaning with mode aggregated (default)"]),
        (["--gen_tp_size", "2"], ["--gen_tp_size", "no meaning with mode aggregated (default)"]),
        (
            ["--mode", "disaggregated", "--tensor_parallelism", "2"],
            ["--tensor_parallelism", "no meaning with --mode disaggregated"],
        ),
        (["--core_type", "torch"], ["--model_path", "tiny-llama"]),
        (["--cache_salt", "conversation"], ["--cache_salt conversation needs --harness conversations"]),
        ([*CONVERSATIONS], ["name a file of conversations with --dataset_path"]),
        ([*CONVERSATIONS, "--dataset", "synthetic"], ["name a file of conversations with --dataset_path"]),
        (
            [*CONVERSATIONS, "--synthetic_conversations", "output=999"],
            ["output of 999 tokens is more than max_output_len 128 (default), where every answer ends; set"],
        ),
        (
            [*CONVERSATIONS, "--synthetic_conversations", "turns=2", "--dataset_path", "x"],
            ["groups=1,prefix=0,zipf=0 and --dataset_path x exclude each other"],
        ),
        (["--synthetic_conversations", "turns=2"], ["has no effect without --harness conversations"]),
        (
            [*CONVERSATIONS, "--dataset_path", "x", "--request_cancellation_delay", "1"],
            ["--request_cancellation_delay 1.0 has no effect without --request_cancellation_rate"],
        ),
        (
            ["--request_cancellation_rate", "5", "--on_instance_loss", "continue"],
            ["exclude each other: a lost request cannot be cancelled"],
        ),
        (["--history", "generated"], ["--history generated has no effect without --harness conversations"]),
        (["--endpoint_type", "chat"], ["--endpoint_type chat has no effect on the dummy core"]),
        (
            ["--endpoint_type", "responses", "--mode", "disaggregated"],
            ["--endpoint_type responses: context servers compute prompts of completions and chats only"],
        ),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_core(parse_run([*DUMMY, *argv]))
    assert all(word in str(error.value) for word in words)


def test_a_test_of_days_is_refused_with_both_readings() -> None:
    """NVIDIA's field of the same name counts milliseconds."""
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, "--min_duration", "600000"])
    message = str(error.value)
    assert (
        "--min_duration 600000: expected a duration of at most a day, as 600s, 10min or 600000ms; a bare"
        " number is seconds" in message
    )
    assert (
        "600000 s are 6.94 days" in message
        and "600000 ms, as NVIDIA's min_duration counts, are 10 min: write 600000ms" in message
    )
    with pytest.raises(ConfigError, match=r"\(100h are 4.17 days\)"):
        parse_run([*DUMMY, "--min_duration", "100h"])
    with pytest.raises(ConfigError, match="expected a duration"):
        parse_run([*DUMMY, "--min_duration", "9\n0q"])
    for text, seconds_ in {"600000ms": 600, "10min": 600, "10": 10}.items():
        assert parse_run([*DUMMY, "--min_duration", text]).min_duration == seconds_
    assert parse_run([*DUMMY, "--load_deadline", "1h"]).load_deadline == 3600


def test_a_test_must_end_before_its_deadline() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--min_duration 7200.0 must be less than --test_deadline 3600.0, which would end the"
        r" test first",
    ):
        parse_run([*DUMMY, "--min_duration", "2h", "--test_deadline", "1h"])
    assert parse_run([*DUMMY, "--min_duration", "2h", "--test_deadline", "3h"])
    assert parse_run([*DUMMY, "--min_duration", "30000"]).test_deadline == 60000
    assert parse_run([*DUMMY, "--min_duration", "5h"]).test_deadline == 36000, "answers come after it, too"
    assert parse_run([*DUMMY, "--min_duration", "2h"]).test_deadline == 21600


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--min_duration 10 --max_duration 5s", "--min_duration 10.0 is more than --max_duration 5.0"),
        ("--min_query_count 9 --max_query_count 8", "--min_query_count 9 is more than --max_query_count 8"),
        ("--min_output_len 9 --max_output_len 8", "--min_output_len 9 is more than --max_output_len 8"),
    ],
)
def test_a_least_is_at_most_the_most(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = [*DUMMY, "--scenarios", "Server", "--server_target_qps", "5", *words.split()]
    with pytest.raises(ConfigError, match=re.escape(why)):
        parse_run(server)
    assert main(["plan", "--world_size", "3", *server]) == 2
    assert why in capsys.readouterr().err


def test_the_digest_differs_between_configurations(tmp_path: Path) -> None:
    yaml = tmp_path / "disagg.yaml"
    yaml.write_text("executors: {num_instances: 1}\n")
    argv = [*DUMMY, "--disagg_config", str(yaml)]
    first = parse_run(argv)
    assert first.digest() == parse_run(argv).digest()
    other = parse_run([*argv, "--seed", "4"])
    assert first.digest() != other.digest()
    assert first.difference(other.values) == "--seed is 4 there and 0 here"
    assert first.difference(parse_run(argv).values) == ""
    yaml.write_text("executors: {num_instances: 1, moe_config: {}}\n")
    assert parse_run(argv).digest() != first.digest()  # also in what is no option


def test_run_names_are_file_names() -> None:
    assert run_name(parse_run([*DUMMY, "--scenarios", "Server"])) == "dummy-Server"
    assert run_name(parse_run(["--core_type", "my.mod:Core"])) == "my.mod_Core-Offline"
    assert run_name(parse_run([*DUMMY, "--model_path", "/models/Smol LM/"])) == "Smol_LM-Offline"


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "Smol-Offline"), (["--benchmarks=moe", "--scenarios=Server"], "mixtral-8x7b-Server")],
)
def test_a_test_of_run_harness_is_named_as_its_run(options: list[str], name: str) -> None:
    """Without a benchmark the model names it."""
    config = parse_run([*DUMMY, "--model_path=/models/Smol", *options])
    assert (in_turn.test_of(config, [], False).name, run_name(config)) == (name, name)
    assert in_turn.test_of(config, [], False).log_dir.name.endswith(f"-{name}")
    config = parse_run([*DUMMY, "--model_path=/models/Smol", *options, "--log_dir=mine"])
    assert (in_turn.test_of(config, [], True).log_dir, in_turn.test_of(config, [], False).log_dir) == (
        Path("mine") / name,
        Path("mine"),
    )


def test_a_run_is_one_test() -> None:
    for option, value in (("scenarios", "Offline,Server"), ("benchmarks", "llama2,moe")):
        with pytest.raises(
            ConfigError, match=f"--{option} .*: a run is one test of one workload; start it once for each"
        ):
            parse_run([*DUMMY, f"--{option}={value}"])
    with pytest.raises(ConfigError, match="--dry_run true: `python -m mpillm plan`"):
        parse_run([*DUMMY, "--dry_run"])


def test_a_full_size_configuration() -> None:
    """All fields are parsed and 8,192 worker ranks planned."""
    config = parse_run(
        ["--core_type", "dummy", "--mode", "disaggregated", "--ctx_tp_size", "8", "--gen_tp_size", "8"]
    )
    plan = disagg.plan(disagg_config(config, 8194), 8194, [f"node{i // 8}" for i in range(8194)])
    assert len(plan.ranks) == 8194
