"""The disaggregation YAML: what is read, what is refused, and how."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from disagg import ConfigError, DisaggConfig, ServerConfig, dump, load, parse, plan
from disagg.llm_args import LLM_ARGUMENTS
from disagg.schema import MOE_ARGUMENTS, READ, ROUTERS, RUN_WIDE, SERVER, TOP_LEVEL

# In the form of TensorRT-LLM's own test configurations: arguments at the top level are handed down.
TRTLLM = """
model: TinyLlama/TinyLlama-1.1B-Chat-v1.0
hostname: localhost
port: 8000
backend: "pytorch"
free_gpu_memory_fraction: 0.1
disable_overlap_scheduler: True
max_seq_len: 4096
max_retries: 2
context_servers:
  num_instances: 2
  router:
    type: kv_cache_aware
  max_batch_size: 16
  tensor_parallel_size: 2
  pipeline_parallel_size: 3
  context_parallel_size: 2
  kv_cache_config:
    enable_block_reuse: True
    event_buffer_max_size: 1024
    free_gpu_memory_fraction: 0.1
  urls:
      - "localhost:8001"
      - "localhost:8002"
generation_servers:
  num_instances: 1
  max_seq_len: 4096
  moe_config: {backend: CUTLASS}
  urls: ["node-7.cluster:8003"]
"""


def test_a_trtllm_file_is_read_with_everything_in_its_place() -> None:
    config = parse(TRTLLM)
    context, generation = config.context_servers, config.generation_servers
    assert context is not None and generation is not None
    assert (config.model, config.backend, config.hostname, config.port) == (
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "pytorch",
        "localhost",
        8000,
    )
    assert config.options == {"max_retries": 2}
    assert config.mode == "disaggregated"
    assert config.sections == (("context_servers", context), ("generation_servers", generation))
    assert context.ranks_per_instance == 12
    assert config.n_workers == 2 * 12 + 1
    assert context.router == {"type": "kv_cache_aware"}
    assert context.kv_cache_config["event_buffer_max_size"] == 1024
    assert context.urls == ("localhost:8001", "localhost:8002")
    assert (context.max_seq_len, generation.max_seq_len) == (4096, 4096)
    assert context.extra == {"free_gpu_memory_fraction": 0.1, "disable_overlap_scheduler": True}
    assert generation.extra == {
        "moe_config": {"backend": "CUTLASS"},
        "free_gpu_memory_fraction": 0.1,
        "disable_overlap_scheduler": True,
    }


# LLM arguments of TensorRT-LLM's newest llm_args.py that were unknown here once, one that no release has, and
# a mapping.
@pytest.mark.parametrize(
    "key",
    [
        "batch_wait_timeout_iters",
        "model_kwargs",
        "sleep_config",
        "use_cute_dsl_bf16_gemm",
        "pp_partition",
        "an_argument_of_tomorrow",
    ],
)
def test_any_other_key_at_the_top_level_is_handed_down(key: str) -> None:
    """Unknown arguments are handed down, as extract_disagg_cfg of TensorRT-LLM does it."""
    for value in (1, {"num_hidden_layers": 2}):
        config = parse(f"{key}: {json.dumps(value)}\ncontext_servers: {{}}\ngeneration_servers: {{}}")
        assert [server.extra for _, server in config.sections] == [{key: value}] * 2


def test_every_llm_argument_may_stand_at_the_top_level_and_in_a_section() -> None:
    for key in sorted(
        LLM_ARGUMENTS - set(SERVER) - set(READ) - set(RUN_WIDE) - set(TOP_LEVEL) - set(MOE_ARGUMENTS)
    ):
        (inside,) = (server for _, server in parse(f"executors: {{{key}: [1]}}").sections)
        (handed_down,) = (server for _, server in parse(f"{key}: [1]\nexecutors: {{}}").sections)
        assert inside.extra == handed_down.extra == {key: [1]}


@pytest.mark.parametrize("router", [*ROUTERS, "ROUND_ROBIN", "Kv_Cache_Aware"])
def test_routers_are_trtllms_in_any_case(router: str) -> None:
    config = parse(f"executors: {{router: {{type: {router}, use_tokens: false}}}}")
    assert config.executors is not None and config.executors.router == {
        "type": router.lower(),
        "use_tokens": False,
    }


LISTS = """
model: m
context_servers:
- {num_instances: 2, max_batch_size: 4}
- {tensor_parallel_size: 2}
generation_servers: {num_instances: 3}
"""


def test_a_section_may_be_a_list() -> None:
    config = parse(LISTS)
    names = ["context_servers[0]", "context_servers[1]", "generation_servers"]
    assert [name for name, _ in config.sections] == names
    assert (config.mode, config.n_workers) == ("disaggregated", 7)
    assert parse(dump(config)) == config
    made = plan(config, 8)
    assert [(one.role, one.section, len(one.ranks)) for one in made.instances] == [
        *[("ctx", names[0], 1)] * 2,
        ("ctx", names[1], 2),
        *[("gen", names[2], 1)] * 3,
    ]
    assert pickle.loads(pickle.dumps(made)) == made
    assert parse("executors: [{}, {}]").mode == "aggregated"
    changed = config.with_sections(lambda name, server: ServerConfig(max_num_tokens=len(name)))
    assert [server.max_num_tokens for _, server in changed.sections] == list(map(len, names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("executors: []", "executors: [] (a list); must be a mapping"),
        ("executors: [3]", "executors[0]: 3 (an integer); must be a mapping"),
        ("executors: [{}, {num_instances: 0}]", "executors[1].num_instances: 0 (an integer); must be"),
        ("executors: [{model: a}, {model: b}]", "executors[1].model: 'b' (a string); must be the same as"),
        ("context_servers: [{}]", "lacks generation_servers; must have both"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_named(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert expected in str(error.value)


def test_executors_make_an_aggregated_run() -> None:
    config = parse("executors: {num_instances: 3, tensor_parallel_size: 2}")
    assert config.mode == "aggregated"
    assert [name for name, _ in config.sections] == ["executors"]
    assert config.n_workers == 6


def test_model_and_backend_may_stand_in_a_section() -> None:
    assert parse("context_servers: {model: m}\ngeneration_servers: {model: m, backend: trt}") == DisaggConfig(
        model="m", backend="trt", context_servers=ServerConfig(), generation_servers=ServerConfig()
    )


def test_merge_keys_and_anchors_are_plain_yaml() -> None:
    config = parse(
        "context_servers: &c {num_instances: 2, dtype: auto}\ngeneration_servers: {<<: *c, num_instances: 5}"
    )
    assert config.generation_servers == ServerConfig(num_instances=5, extra={"dtype": "auto"})


@pytest.mark.parametrize(
    ("section", "expert_size"),
    [
        ("tensor_parallel_size: 8, moe_expert_parallel_size: 4", 4),
        # TensorRT-LLM's Mapping: what one leaves, the other takes
        ("tensor_parallel_size: 8, moe_tensor_parallel_size: 2", 4),
        ("tensor_parallel_size: 8, moe_tensor_parallel_size: 2, moe_expert_parallel_size: 4", 4),
        ("tensor_parallel_size: 8, moe_tensor_parallel_size: 2, moe_cluster_parallel_size: 4", 1),
        ("tensor_parallel_size: 8, moe_expert_parallel_size: null", 1),
    ],
)
def test_expert_parallel_size_as_in_trtllm(section: str, expert_size: int) -> None:
    executors = parse(f"executors: {{{section}}}").executors
    assert executors is not None and executors.moe_expert_parallel_size == expert_size


# Each text and what its message must say, besides the file.
BAD = [
    ('{model: "a\\0b", executors: {}}', "model: "),
    ("", "empty"),
    ("# only a comment", "empty"),
    ("- a\n- b", "(a list); must be a mapping"),
    ("just words", "(a string); must be a mapping"),
    ("executors: {a: [}", "line 1, column 17"),
    ("executors:\n  num_instances: 1\n\tmax_batch_size: 2", "line 3, column 1"),
    (
        "executors: {num_instances: 1, num_instances: 1}",
        "line 1, column 31: not valid YAML: duplicate key 'num_instances'",
    ),
    ("executors: {}\nexecutors: {}", "line 2, column 1"),
    ("executors: {}\n---\nexecutors: {}", "another document"),
    ("executors: {extra_arg: {1: 2}}", "executors.extra_arg: the key 1 (an integer); must be a string"),
    ("executors: {when: 2024-01-01}", "executors.when"),
    ("port: 2024-99-99", "month"),
    ("port: !!int ''", "does not fit its YAML type"),
    ("executors: {weight: .nan}", "executors.weight: nan"),
    ("executors: {a: &a [*a]}", "an alias refers to itself"),
    (
        "a: &a [0,0,0,0,0,0,0,0,0,0]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghij")),
        "more than 1000000 values; do its aliases repeat each other?",
    ),
    ("[" * 3000, "nested too deeply"),
    ("\0", "not valid YAML"),
    ("hostname: localhost", "lacks context_servers and generation_servers; must have both"),
    ("context_servers: {}", "lacks generation_servers; must have both"),
    ("generation_servers: {}", "lacks context_servers; must have both"),
    ("context_servers: {}\nexecutors: {}", "or only executors"),
    ("context_servers: {}\ngeneration_servers: {}\nexecutors: {}", "or only executors"),
    ("executors:", "executors: null; must be a mapping"),
    ("executors: 3", "executors: 3 (an integer); must be a mapping"),
    (
        "context_server: {}\ngeneration_servers: {}",
        "unknown section 'context_server' (did you mean 'context_servers'?)",
    ),
    ("generation_server: null", "unknown section 'generation_server' (did you mean 'generation_servers'?)"),
    (
        "prefill: {num_instances: 1}\nexecutors: {}",
        "unknown section 'prefill'; the sections are context_servers,",
    ),
    ("hostnam: a\nexecutors: {}", "unknown key 'hostnam' (did you mean 'hostname'?)"),
    (
        "trust_remote_cod: true\nexecutors: {}",
        "unknown key 'trust_remote_cod' (did you mean 'trust_remote_code'?)",
    ),
    (
        "executors: {enable_chunked_prefil: true}",
        "unknown key 'enable_chunked_prefil' (did you mean 'enable_chunked_prefill'?)",
    ),
    (
        "executors: {schedular_config: {}}",
        "unknown key 'schedular_config' (did you mean 'scheduler_config'?)",
    ),
    (
        "decoders: {tensor_parallel_size: 2}\nexecutors: {}",
        "unknown section 'decoders'; the sections are context_servers,",
    ),
    ("executors: {num_instance: 2}", "executors: unknown key 'num_instance' (did you mean 'num_instances'?)"),
    ("port: 0\nexecutors: {}", "port: 0 (an integer); must be an integer from 1 to 65535"),
    ("hostname: 'a b'\nexecutors: {}", "hostname: 'a b'"),
    ("model: 3\nexecutors: {}", "model: 3 (an integer); must be a string"),
    ("model: ''\nexecutors: {}", "model: '' (a string)"),
    ("schedule_style: best\nexecutors: {}", "must be one of context_first, generation_first"),
    (
        "executors: {tensor_parallel_size: two}",
        "executors.tensor_parallel_size: 'two' (a string); must be an integer, at least 1",
    ),
    ("executors: {tensor_parallel_size: true}", "executors.tensor_parallel_size: True (a boolean)"),
    ("executors: {tensor_parallel_size: 2.0}", "executors.tensor_parallel_size: 2.0 (a number)"),
    ("executors: {pipeline_parallel_size: null}", "executors.pipeline_parallel_size: null"),
    (
        "executors: {num_instances: 0}",
        "executors.num_instances: 0 (an integer); must be an integer, at least 1",
    ),
    ("executors: {num_instances: -1}", "executors.num_instances: -1"),
    ("executors: {max_batch_size: 0}", "executors.max_batch_size: 0"),
    # YAML 1.1: no float without a dot
    ("executors: {max_num_tokens: 1e3}", "executors.max_num_tokens: '1e3' (a string)"),
    ("max_seq_len: big\nexecutors: {}", "max_seq_len: 'big'"),
    (
        "max_seq_len: 8\nexecutors: {max_seq_len: 9}",
        "executors.max_seq_len: 9 (an integer); must be the same as at the top level, 8",
    ),
    ("model: a\nexecutors: {model: b}", "executors.model: 'b' (a string); must be the same as model, 'a'"),
    ("context_servers: {model: a}\ngeneration_servers: {model: b}", "generation_servers.model: 'b'"),
    ("executors: {kv_cache_config: 0.5}", "executors.kv_cache_config: 0.5 (a number); must be a mapping"),
    (
        "executors: {kv_cache_config: {free_gpu_memory_fraction: 1.5}}",
        "executors.kv_cache_config.free_gpu_memory_fraction: 1.5",
    ),
    (
        "executors: {kv_cache_config: {enable_block_reuse: 1}}",
        "executors.kv_cache_config.enable_block_reuse: 1 (an integer)",
    ),
    ("executors: {kv_cache_config: {tokens_per_block: 0}}", "executors.kv_cache_config.tokens_per_block: 0"),
    (
        "executors: {scheduler_config: {capacity_scheduler_policy: max_util}}",
        "scheduler_config.capacity_scheduler_policy: 'max_util'",
    ),
    (
        "executors: {scheduler_config: {context_chunking_policy: even}}",
        "executors.scheduler_config.context_chunking_policy: 'even'",
    ),
    ("executors: {scheduler_config: no}", "executors.scheduler_config: False (a boolean); must be a mapping"),
    ("executors: {max_beam_width: 0}", "executors.max_beam_width: 0"),
    (
        "{enable_chunked_prefill: 3, executors: {}}",
        "enable_chunked_prefill: 3 (an integer); must be true or false",
    ),
    (
        "executors: {cache_transceiver_config: {max_tokens_in_buffer: x}}",
        "executors.cache_transceiver_config.max_tokens_in_buffer",
    ),
    (
        "executors: {cache_transceiver_config: {backend: FOO}}",
        "executors.cache_transceiver_config.backend: 'FOO' (a string); must be one of DEFAULT, UCX, NIXL,",
    ),
    (
        "executors: {cache_transceiver_config: {max_token_in_buffer: 1}}",
        "executors.cache_transceiver_config: unknown key 'max_token_in_buffer' (did you mean",
    ),
    (
        "kv_cache_config: {enable_blok_reuse: true}\nexecutors: {}",
        "kv_cache_config: unknown key 'enable_blok_reuse' (did you mean 'enable_block_reuse'?)",
    ),
    (
        "conditional_disagg_config: {max_local_prefil_length: 1}\nexecutors: {}",
        "conditional_disagg_config: unknown key 'max_local_prefil_length' (did you mean",
    ),
    ("executors: {}\ndisagg_cluster: {}\ngeneration_servers: {}", "the sections are generation_servers and"),
    ("executors: {router: round_robin}", "executors.router: 'round_robin' (a string); must be a mapping"),
    (
        "executors: {router: {type: best}}",
        "executors.router.type: 'best' (a string); must be one of round_robin,",
    ),
    ("executors: {router: {type: [x]}}", "executors.router.type: ['x']"),
    ("executors: {urls: 'a:1'}", "executors.urls: 'a:1' (a string); must be a list"),
    ("executors: {urls: ['a:1', 'b:2']}", "executors.urls: 2 given; must be 1"),
    ("executors: {num_instances: 2, urls: ['a:1']}", "executors.urls: 1 given; must be 2"),
    ("executors: {urls: ['http://a:1']}", "executors.urls[0]: 'http://a:1'"),
    ("executors: {urls: ['a']}", "executors.urls[0]: 'a'"),
    ("executors: {urls: ['a:0']}", "executors.urls[0]: 'a:0'"),
    ("executors: {urls: ['a:65536']}", "executors.urls[0]: 'a:65536'"),
    ("executors: {urls: [8001]}", "executors.urls[0]: 8001 (an integer)"),
    (
        "executors: {num_instances: 2, urls: ['a:1', 'a:1']}",
        "executors.urls[1]: 'a:1' (a string); must be unique; executors.urls[0] has the same address",
    ),
    (
        "context_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['a:1']}",
        "context_servers.urls[0] has the same address",
    ),
    ("port: 81\nexecutors: {urls: ['localhost:81']}", "hostname and port has the same address"),
    (
        "executors: {tensor_parallel_size: 4, moe_expert_parallel_size: 3}",
        "must be a divisor of tensor_parallel_size, 4",
    ),
    ("executors: {moe_expert_parallel_size: 2}", "must be a divisor of tensor_parallel_size, 1"),
    (
        "executors: {tensor_parallel_size: 4, moe_tensor_parallel_size: 8}",
        "executors.moe_tensor_parallel_size: 8",
    ),
    (
        "executors: {tensor_parallel_size: 4, moe_tensor_parallel_size: 1, moe_expert_parallel_size: 2}",
        "must be tensor_parallel_size, 4",
    ),
]


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("context_servers: {num_instances: 0}\ngeneration_servers: {tensor_parallel_size: 2}", 2),
        ("context_servers: {}\ngeneration_servers: {num_instances: 0, urls: []}", 1),
        ("context_servers:\ngeneration_servers:", 2),
        ("disagg_cluster: {cluster_uri: 'http://a:1', minimal_instances: {context_servers: 2}}", 0),
        (
            "disagg_cluster: {cluster_uri: 'http://a:1'}\ngeneration_servers: {router: {type: conversation}}",
            1,
        ),
        ("context_servers: {cache_transceiver_config: {backend: ucx, new: 1}}\ngeneration_servers: {}", 2),
        ("{context_servers: , generation_servers: {cache_transceiver_config: {max_tokens_in_buffer: 0}}}", 2),
    ],
)
def test_what_trtllm_takes_is_read(text: str, workers: int) -> None:
    """As by its extract_disagg_cfg: generation alone, servers that register, and names of later releases."""
    config = parse(text, "some.yaml")
    assert config.n_workers == workers
    assert parse(dump(config)) == config
    if workers < 2 or "num_instances: 0" in text:
        with pytest.raises(ConfigError, match="no instances; a request needs a context instance and a gen"):
            plan(config, workers + 1)


@pytest.mark.parametrize(("text", "expected"), BAD)
def test_bad_input_is_named(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, "some.yaml")
    message = str(raised.value)
    assert message.startswith("some.yaml")
    assert expected in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\x00executors", "byte 0 (0xff) is not UTF-8"),
        (b"", "empty"),
        (b"\x7fELF\x02\x01\x01\x00", "not valid YAML"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "disagg.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(str(path))
    assert str(path) in str(raised.value)
    assert expected in str(raised.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as raised:
            load(str(path))
        assert str(path) in str(raised.value)


def test_a_file_may_have_a_byte_order_mark_and_any_letters(tmp_path: Path) -> None:
    path = tmp_path / "disagg.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + "model: модель\nexecutors: {}".encode())
    assert load(str(path)).model == "модель"


def test_dump_has_no_anchors_and_sections_share_nothing() -> None:
    text = dump(
        parse(
            "kv_cache_config: {max_tokens: 64}\nlora_config: {a: [1]}\ncontext_servers:"
            " {}\ngeneration_servers: {}"
        )
    )
    assert "&" not in text and "*" not in text
    assert yaml.safe_load(text)["generation_servers"]["lora_config"] == {"a": [1]}


def test_a_configuration_travels_by_pickle() -> None:
    config = parse(TRTLLM)
    assert pickle.loads(pickle.dumps(config)) == config
