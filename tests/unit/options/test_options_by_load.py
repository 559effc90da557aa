"""Options that only LoadGen, a load client or conversations use: elsewhere each is an error."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.experiments.commands import find_max_qps
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse_run, parse_serve
from mpillm.options.unused_options import check_unused
from tests.helpers.every_option import text_of

LOADGEN: tuple[str, ...] = ()
CLIENT = ("--harness=aiperf",)
CONVERSATIONS = ("--harness=conversations", "--dataset_path=talks.jsonl")
LOADS = {"LoadGen": LOADGEN, "client": CLIENT, "conversations": CONVERSATIONS}

ALL = {*LOADS}
PROMPTS = {"LoadGen", "client"}
OWN = {"LoadGen", "conversations"}

# The loads that use an option, and more options that it needs.
TABLE: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "test_mode": (PROMPTS, ()),
    "round": (PROMPTS, ()),
    "user_conf": (PROMPTS, ()),
    "audit_conf": ({"LoadGen"}, ()),
    "min_duration": (PROMPTS, ()),
    "min_query_count": (PROMPTS, ()),
    "max_query_count": (PROMPTS, ("--scenarios=Server",)),
    "max_duration": (ALL, ("--scenarios=Server",)),
    "server_target_qps": (ALL, ("--scenarios=Server",)),
    "offline_expected_qps": (PROMPTS, ()),
    "goodput": (ALL, ("--scenarios=Server",)),
    "require_valid": ({"LoadGen"}, ()),
    "compliance_test": ({"LoadGen"}, ()),
    "cache_salt": (OWN, ()),
    "harness_args": ({"client"}, ()),
    "concurrency": ({"client", "conversations"}, ()),
    "harness_memory_limit": ({"client"}, ()),
    "num_conversations": ({"conversations"}, ()),
    "synthetic_conversations": ({"conversations"}, ()),
    "history": ({"conversations"}, ()),
    "burstiness": ({"conversations"}, ("--scenarios=Server", "--server_target_qps=5")),
    "trace_speed": ({"conversations"}, ()),
    "shuffle": ({"conversations"}, ()),
    "max_input_len": ({"conversations"}, ()),
    "max_delay": ({"conversations"}, ()),
    "trace_columns": ({"conversations"}, ()),
    "request_cancellation_rate": ({"conversations"}, ()),
    "request_cancellation_delay": ({"conversations"}, ("--request_cancellation_rate=5",)),
    "ramp_up": ({"conversations"}, ()),
    "endpoint_type": (OWN, ("--url=h:1",)),
    "extra_body": (OWN, ("--url=h:1",)),
    "extra_headers": (OWN, ("--url=h:1",)),
    "endpoint_path": (OWN, ("--url=h:1",)),
    "lora_modules": (OWN, ("--url=h:1",)),
    "save_outputs": (OWN, ()),
    "requests_file": (OWN, ()),
    "show_steady_state_progress": (OWN, ()),
    "max_local_prefill_length": (
        {"conversations"},
        ("--mode=disaggregated", "--enable_kv_cache_reuse=true"),
    ),
}
_TEXTS = {"audit_conf": __file__, "history": "generated", "requests_file": "a.csv", "endpoint_type": "chat"}
_OF_A_TEST = ("test", "other harness", "conversations")


def words(name: str) -> list[str]:
    field = next(field for field in FIELDS if field.name == name)
    return [f"--{name}={_TEXTS.get(name) or text_of(field)}", *TABLE[name][1]]


def test_the_table_has_all_options_of_a_test() -> None:
    assert {field.name for field in FIELDS if field.group in _OF_A_TEST} - {"harness"} <= TABLE.keys()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", TABLE)
def test_a_load_uses_an_option_or_refuses_it(name: str, load: str) -> None:
    options = [*LOADS[load], *words(name)]
    if load == "conversations" and name == "synthetic_conversations":
        options.remove("--dataset_path=talks.jsonl")
    if load in TABLE[name][0]:
        if (load, name) == ("client", "test_mode"):  # scored from the report, which AIPerf's does not allow
            options[0] = "--harness=inference-endpoint"
        assert not [line for line in check_unused(parse_run(options), "run") if f"--{name} " in line]
        return
    is_only_of_conversations = TABLE[name][0] == {"conversations"}
    why = "without" if load == "LoadGen" or is_only_of_conversations else "with"
    with pytest.raises(ConfigError, match=rf"--{name} .* has no effect {why} --harness"):
        parse_run(options)


def test_the_message_names_the_loads() -> None:
    with pytest.raises(ConfigError) as error:
        parse_run([*CONVERSATIONS, "--min_duration=600s"])
    assert str(error.value) == (
        "--min_duration 600.0 has no effect with --harness conversations (it is for LoadGen and load clients)"
    )


def test_conversations_by_time_stamps_have_no_ramp_up() -> None:
    options = [*CONVERSATIONS, "--scenarios=Server", "--ramp_up=60"]
    with pytest.raises(ConfigError, match=r"--ramp_up 60\.0 has no effect without --server_target_qps"):
        parse_run(options)
    for args in ([*options, "--server_target_qps=5"], [*CONVERSATIONS, "--ramp_up=60"]):
        assert not check_unused(parse_run(args), "run")
    find_max_qps.parse(["-n=2", *CONVERSATIONS, "--goodput=ttft:5", "--ramp_up=60", "--burstiness=2"])


def test_a_search_for_the_rate_of_conversations_uses_min_duration() -> None:
    _, args, config = find_max_qps.parse(["-n=2", *CONVERSATIONS, "--goodput=ttft:5", "--min_duration=40"])
    assert config.min_duration == 40 and "--min_duration=40" in args
    with pytest.raises(ConfigError, match=r"--min_query_count 7 has no effect with --harness conversations"):
        find_max_qps.parse(["-n=2", *CONVERSATIONS, "--goodput=ttft:5", "--min_query_count=7"])


def test_a_load_client_of_disaggregated_servers_uses_the_runs_endpoint_and_its_requests() -> None:
    options = ["--trtllm_server_urls=h:1,h:2", "--mode=disaggregated", "--core_type=trtllm_disagg"]
    parse_run([*CLIENT, *options, '--extra_headers={"X-Tenant": "a"}', "--endpoint_path=/v2"])


def test_serve_names_options_of_runs_and_refuses_none() -> None:
    config = parse_serve(["--mode=disaggregated", "--enable_kv_cache_reuse", "--max_local_prefill_length=64"])
    assert check_unused(config, "serve") == [
        "no effect on serve (it is for run): --max_local_prefill_length 64"
    ]


def test_only_conversations_may_find_their_prompts_in_a_cache() -> None:
    assert parse_run([*CONVERSATIONS]).allows_cached_prompts
    assert not parse_run([]).allows_cached_prompts
    assert parse_run(["--enable_kv_cache_reuse", "true"]).allows_cached_prompts
