"""--acceptance_length: where it has an effect, and where it is an error."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.options.options import parse_run, parse_serve

LENGTH = ("--acceptance_length", "2.5")
DRAFTS = ("--speculative_config", "decoding_type:NGram,max_draft_len:4")


@pytest.mark.parametrize("server", ["vllm", "sglang", "trtllm-serve", "mpillm"])
def test_servers_that_the_run_starts(server: str) -> None:
    assert parse_run(["--server", server, "--model_path", "m", *LENGTH]).acceptance_length == 2.5


def test_the_embedded_engine() -> None:
    assert parse_run([*LENGTH, *DRAFTS]).acceptance_length == 2.5
    assert parse_serve([*LENGTH, *DRAFTS]).acceptance_length == 2.5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--trtllm_server_urls", "a:1", "--core_type", "trtllm_endpoint"),
            "the servers of --trtllm_server_urls a:1 run already; set their own setting",
        ),
        (("--server", "tritonserver"), "has no effect on a tritonserver server"),
        (("--server", "command:x {port}"), "has no effect on a command: server"),
        (("--core_type", "dummy"), "has no effect on the dummy core"),
        (("--core_type", "trtllm_hlapi"), "has no effect on the trtllm_hlapi core"),
        (("--test_mode", "AccuracyOnly"), "--test_mode AccuracyOnly exclude each other: the tokens are not"),
        (("--compliance_test", "TEST06"), "--compliance_test TEST06 exclude each other"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_where_no_length_can_be_set(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run([*args, *LENGTH])
    assert message in str(error.value) and "acceptance_length" in str(error.value)


@pytest.mark.parametrize("text", ["0.99", "0", "-1", "nan", "inf", "x"])
def test_values_that_are_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of at least 1"):
        parse_run(["--acceptance_length", text, *DRAFTS])
