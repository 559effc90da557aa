"""Any configuration that is written is read back the same, by TensorRT-LLM's rules, too."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from disagg import ConfigError, DisaggConfig, ServerConfig, dump, parse
from disagg.yaml_text import is_text


@given(st.text(max_size=60) | st.text("{}[]:,&*!|>'\"%@-? \n\t#a0.<~", max_size=40))
def test_any_text_parses_or_is_a_config_error(text: str) -> None:
    try:
        config = parse(text)
    except ConfigError as error:
        assert str(error).startswith("<string>")
    else:
        assert config.n_workers >= 1


_names = st.text(min_size=1, max_size=12).filter(lambda s: s.strip() != "" and is_text(s))
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
# Argument names that are no key of a section and not nearly one.
_arguments = st.dictionaries(
    st.sampled_from(["dtype", "lora_config", "moe_config", "zzz", "été", "=", "<<", "yes"]),
    _values,
    max_size=4,
)
_limits = st.none() | st.integers(1, 10**6)


@st.composite
def _servers(draw: st.DrawFn, first_port: int) -> ServerConfig:
    n = draw(st.integers(1, 4))
    expert = draw(st.integers(1, 3))
    return ServerConfig(
        num_instances=n,
        tensor_parallel_size=expert * draw(st.integers(1, 3)),
        pipeline_parallel_size=draw(st.integers(1, 3)),
        context_parallel_size=draw(st.integers(1, 3)),
        moe_expert_parallel_size=expert,
        max_batch_size=draw(_limits),
        max_num_tokens=draw(_limits),
        max_seq_len=draw(_limits),
        kv_cache_config=draw(
            st.fixed_dictionaries({}, optional={"tokens_per_block": st.integers(1, 64), "other": _values})
        ),
        cache_transceiver_config=draw(st.sampled_from([{}, {"backend": "UCX"}])),
        router=draw(st.sampled_from([{}, {"type": "round_robin"}])),
        urls=draw(st.sampled_from([(), tuple(f"h{i}.x-y:{first_port + i}" for i in range(n))])),
        extra=draw(_arguments),
    )


@st.composite
def _configs(draw: st.DrawFn) -> DisaggConfig:
    sections: dict[str, Any]
    if draw(st.booleans()):
        sections = {"executors": draw(_servers(100))}
    else:
        sections = {"context_servers": draw(_servers(100)), "generation_servers": draw(_servers(200))}
    options = draw(
        st.fixed_dictionaries(
            {}, optional={"max_retries": st.integers(0, 9), "otlp_config": st.just({"a": [None, "b"]})}
        )
    )
    return DisaggConfig(
        "host-1",
        draw(st.integers(1, 65535)),
        model=draw(st.none() | _names),
        backend=draw(st.none() | _names),
        **sections,
        options=options,
    )


@given(_configs())
def test_round_trip(config: DisaggConfig) -> None:
    assert parse(dump(config)) == config


@pytest.mark.long
@given(_configs())
def test_a_dumped_file_obeys_trtllms_rules(config: DisaggConfig) -> None:
    """What TensorRT-LLM's extract_disagg_cfg and extract_ctx_gen_cfgs, restated here, would refuse is never
    written."""
    data = yaml.safe_load(dump(config))
    for name in {"context_servers", "generation_servers"} & set(data):
        section = data[name]
        assert not set(data) & set(section)
        if "urls" in section:
            assert len(section["urls"]) == section["num_instances"]
            assert all(len(url.split(":")) == 2 and int(url.split(":")[1]) for url in section["urls"])
