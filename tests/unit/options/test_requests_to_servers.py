"""--reset_prefix_cache and --profile: where they have an effect, and where they are errors."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.options.options import parse_run, parse_serve

URL = ("--trtllm_server_urls", "a:1", "--core_type", "trtllm_endpoint")


@pytest.mark.parametrize("option", ["reset_prefix_cache", "profile"])
@pytest.mark.parametrize("server", [URL, ("--server", "vllm", "--model_path", "m"), ("--server", "sglang")])
def test_servers(option: str, server: tuple[str, ...]) -> None:
    assert getattr(parse_run([*server, f"--{option}"]), option) is True


def test_the_embedded_engine() -> None:
    assert parse_run(["--reset_prefix_cache"]).reset_prefix_cache
    assert parse_serve(["--reset_prefix_cache"]).reset_prefix_cache


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--core_type", "dummy", "--reset_prefix_cache"), "has no effect on the dummy core"),
        (("--core_type", "trtllm_hlapi", "--reset_prefix_cache"), "has no effect on the trtllm_hlapi core"),
        (("--profile",), "--profile true has no effect on the torch core"),
        (("--server", "tritonserver", "--profile"), "has no effect on the triton_grpc core"),
    ],
    ids=" ".join,
)
def test_cores_without_them(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run(args)


@pytest.mark.parametrize("args", [(*URL, "--reset_prefix_cache"), (*URL, "--profile")], ids=" ".join)
def test_serve_in_front_of_servers(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="serve does not pass it to servers behind it"):
        parse_serve(args)
