"""The options with which `certify` repeats a run on the dummy core."""

from __future__ import annotations

import pytest

from mpillm.commands.certify import on_dummy
from mpillm.options.options import parse_run
from mpillm.options.unused_options import check_unused

SERVER = ("--server", "vllm")
URL = ("--trtllm_server_urls", "h:1")


@pytest.mark.parametrize(
    "options",
    [
        SERVER,
        (*SERVER, "--tensor_parallelism", "4", "--clients_per_server", "2", "--server_nodes", "2"),
        (*SERVER, "--mode", "disaggregated", "--num_ctx_servers", "1", "--gen_tp_size", "2"),
        (*SERVER, "--on_instance_loss", "restart", "--server_args", "--enforce-eager "),
        (*URL, "--cache_salt", "test", "--profile", "true", "--reset_prefix_cache", "true"),
        (*URL, "--endpoint_type", "chat", "--extra_headers", '{"X-Tenant": "a"}'),
        ("--harness_type", "triton"),
        ("--max_num_tokens", "64", "--enable_chunked_context", "true", "--beam_width", "1"),
    ],
)
def test_options_of_other_cores_are_left_out(options: tuple[str, ...]) -> None:
    config = parse_run(on_dummy(["--max_output_len", "9", *options], 7))
    assert not check_unused(config, "run")
    assert (config.core_type, config.core_options, config.max_output_len) == ("dummy", {"output_mean": 7}, 9)
    assert config.mode == "aggregated" and (config.tensor_parallelism or 1) == 1


def test_the_layout_of_ranks_remains() -> None:
    options = ["--mode", "disaggregated", "--num_ctx_servers", "2", "--gen_tp_size", "2"]
    config = parse_run(on_dummy(options, 7))
    assert (config.mode, config.num_ctx_servers, config.gen_tp_size) == ("disaggregated", 2, 2)
