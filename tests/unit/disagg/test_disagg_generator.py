"""Configurations from flags and a world size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import ConfigError, dump, generate, parse, plan, ranks_for, with_hosts


def instances(mode: str, world_size: int | None, **flags: Any) -> list[int]:
    return [server.num_instances for _, server in generate(mode, world_size, **flags).sections]


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (3, [1, 1]),
        (4, [1, 2]),
        (5, [1, 3]),
        (6, [1, 4]),
        (7, [2, 4]),
        (13, [4, 8]),
        (8191, [2730, 5460]),
    ],
)
def test_a_third_of_the_workers_are_context(world_size: int, expected: list[int]) -> None:
    assert instances("disaggregated", world_size) == expected


@pytest.mark.parametrize(("world_size", "expected"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (8, 7)])
def test_every_worker_is_an_executor(world_size: int, expected: int) -> None:
    assert instances("aggregated", world_size) == [expected]


@pytest.mark.parametrize(
    ("world_size", "flags", "expected"),
    [
        (7, {"ctx_tp_size": 2}, [1, 4]),  # a third of 6 ranks is one instance of 2
        (7, {"gen_tp_size": 2}, [2, 2]),
        (8, {"gen_tp_size": 2}, [1, 3]),
        (14, {"ctx_tp_size": 2, "gen_tp_size": 4, "gen_pp_size": 2}, [2, 1]),
        (17, {"ctx_tp_size": 8, "gen_tp_size": 8}, [1, 1]),  # more than a third, but at least one
        (18, {"ctx_tp_size": 8, "gen_tp_size": 8}, [1, 1]),  # two control ranks, where one would not fit
        (8, {"control_ranks": 2}, [2, 4]),
        (8, {"control_ranks": 1}, [2, 5]),
        (11, {"num_ctx_servers": 4}, [4, 6]),
        (11, {"num_gen_servers": 4}, [6, 4]),
        (12, {"num_ctx_servers": 2, "gen_tp_size": 4}, [2, 2]),
        (12, {"num_gen_servers": 1, "gen_tp_size": 4, "ctx_pp_size": 3}, [2, 1]),
        (4, {"num_ctx_servers": 1, "num_gen_servers": 1}, [1, 1]),
        (4, {"num_ctx_servers": 2, "num_gen_servers": 1}, [2, 1]),
        (5, {"num_ctx_servers": 2, "num_gen_servers": 1}, [2, 1]),
        (None, {}, [1, 1]),
        (None, {"num_ctx_servers": 2, "num_gen_servers": 3, "ctx_tp_size": 4}, [2, 3]),
    ],
)
def test_flags_of_disaggregated_mode(
    world_size: int | None, flags: dict[str, int], expected: list[int]
) -> None:
    assert instances("disaggregated", world_size, **flags) == expected


def test_flags_of_aggregated_mode() -> None:
    assert instances("aggregated", 10, tensor_parallelism=2, pipeline_parallelism=2) == [2]
    assert instances("aggregated", 4, tensor_parallelism=3) == [1]
    assert instances("aggregated", None, num_executors=5) == [5]
    assert instances("aggregated", 3, num_executors=1) == [1]
    assert [instances("aggregated", 5, control_ranks=n) for n in (None, 1, 2)] == [[4], [4], [3]]


@pytest.mark.parametrize(
    ("mode", "world_size", "flags", "expected"),
    [
        ("disaggregated", 1, {}, "world size: 1;"),
        (
            "disaggregated",
            2,
            {"gen_tp_size": 2, "num_ctx_servers": 1},
            "world size: 2; 1 context instance of 1 rank and generation instances of 2 ranks do not fit; must"
            " be 4 ",
        ),
        ("disaggregated", 2, {}, "must be 3 "),
        (
            "disaggregated",
            9,
            {"num_ctx_servers": 1, "num_gen_servers": 2},
            "need 3 worker ranks, which do not fit; must be 4 or 5 ",
        ),
        ("disaggregated", 5, {"num_ctx_servers": 4}, "must be 6 "),
        ("disaggregated", 20, {"ctx_tp_size": 8, "gen_tp_size": 8}, "must be 18 or 25 "),
        ("aggregated", 9, {"num_executors": 1}, "must be 1 or 2 or 3 (1 or 2 ranks are control)"),
        ("aggregated", 2, {"control_ranks": 2}, "must be 3 (--control_ranks 2)"),
        ("aggregated", 1, {"control_ranks": 1}, "must be 2 (--control_ranks 1)"),
        ("disaggregated", 17, {"control_ranks": 2, "ctx_tp_size": 8, "gen_tp_size": 8}, "must be 18 "),
        ("aggregated", 9, {"control_ranks": 3}, "--control_ranks: 3 (an integer); must be 1 or 2"),
        ("aggregated", 1, {"tensor_parallelism": 2}, "must be 3 "),
        ("aggregated", 0, {}, "world size: 0 (an integer); must be"),
        (
            "aggregate",
            4,
            {},
            "--mode: 'aggregate'; must be aggregated or disaggregated (did you mean 'aggregated'?)",
        ),
        ("disaggregated", 5, {"ctx_tp_size": 0}, "--ctx_tp_size: 0"),
        ("disaggregated", None, {"num_gen_servers": 10**9}, "--num_gen_servers: 1000000000"),
        ("aggregated", 5, {"num_executors": True}, "--num_executors: True (a boolean)"),
        ("disaggregated", 5, {"moe_expert_parallelism": 2}, "must be a divisor of tensor_parallel_size, 1"),
        ("disaggregated", 5, {"first_worker_port": 65534}, "generation_servers.urls[1]: 'localhost:65536'"),
        ("disaggregated", 5, {"first_worker_port": 8000}, "hostname and port has the same address"),
    ],
)
def test_wrong_sizes_are_named(
    mode: str, world_size: int | None, flags: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        generate(mode, world_size, **flags)
    assert expected in str(raised.value)


def test_flags_reach_the_file() -> None:
    config = generate(
        "disaggregated",
        12,
        model="llama",
        port=9000,
        ctx_tp_size=2,
        gen_tp_size=4,
        moe_expert_parallelism=2,
        first_worker_port=7000,
    )
    assert (config.model, config.backend, config.hostname, config.port) == (
        "llama",
        "pytorch",
        "localhost",
        9000,
    )
    context, generation = config.context_servers, config.generation_servers
    assert context is not None and generation is not None
    assert [context.urls, generation.urls] == [("localhost:7000",), ("localhost:7001", "localhost:7002")]
    for server, tensor in ((context, 2), (generation, 4)):
        assert (server.tensor_parallel_size, server.moe_expert_parallel_size) == (tensor, 2)
        assert server.cache_transceiver_config == {"backend": "DEFAULT"}
    assert context.extra == {"disable_overlap_scheduler": True} and generation.extra == {}


def test_instances_are_put_on_hosts() -> None:
    config = with_hosts(generate("disaggregated", 4, first_worker_port=7000), "head", ["a", "b", "b"])
    assert config.hostname == "head" and parse(dump(config)) == config
    assert [url for _, server in config.sections for url in server.urls] == ["a:7000", "b:7001", "b:7002"]
    assert (
        with_hosts(generate("aggregated", 3), "head", ["a", "b"]).executors
        == generate("aggregated", 3).executors
    )


@pytest.mark.parametrize(("workers", "ranks"), [(1, 2), (2, 3), (3, 4), (8192, 8193)])
def test_the_ranks_for_a_number_of_workers(workers: int, ranks: int) -> None:
    assert (ranks_for(workers), ranks_for(workers, 2)) == (ranks, ranks + 1)
    executors = generate("aggregated", ranks).executors
    assert executors is not None and executors.num_instances == workers


def test_an_aggregated_file_needs_no_urls() -> None:
    config = generate("aggregated", 4)
    assert config.executors is not None
    assert config.executors.urls == ()
    assert config.executors.cache_transceiver_config == {}


_sizes = st.integers(1, 4)
_counts = st.none() | st.integers(1, 4)


@given(st.sampled_from(["aggregated", "disaggregated"]), st.integers(1, 40), _sizes, _sizes, _counts, _counts)
def test_what_is_generated_fits_and_what_is_proposed_works(
    mode: str, world_size: int, first: int, second: int, n_first: int | None, n_second: int | None
) -> None:
    flags: dict[str, Any] = {
        "ctx_tp_size": first,
        "gen_pp_size": second,
        "num_ctx_servers": n_first,
        "num_gen_servers": n_second,
    }
    if mode == "aggregated":
        flags = {"tensor_parallelism": first, "pipeline_parallelism": second, "num_executors": n_first}
    try:
        config = generate(mode, world_size, **flags)
    except ConfigError as error:
        proposed = str(error).split("must be ")[1].split(" (")[0].split(" or ")
        for number in proposed:
            plan(generate(mode, int(number), **flags), int(number))
    else:
        assert len(plan(config, world_size).ranks) == world_size
        assert parse(dump(config)) == config
