"""The workloads' constants as options, their tiny forms, and what becomes of them in LoadGen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.preprocessed.loader import loader_of
from mpillm.data.tiny_dataset import write_dataset
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.engine.shape.families.known import FAMILIES
from mpillm.engine.shape.find_model import PRESETS
from mpillm.engine.shape.model_info import model_info
from mpillm.loadgen.settings import LoadGenConfig, load_settings
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.options.workload_options import defaults_of
from mpillm.submission.references import read_references
from tests.helpers.engine_configs import engine_config

# What MLPerf Inference says: LoadGen's model, samples, longest answer, TTFT and TPOT limits of Server in ms.
OFFICIAL = {
    "llama2-70b": ("llama2-70b", 24576, 1024, 2000, 200),
    "llama2-70b-interactive": ("llama2-70b-interactive", 24576, 1024, 450, 40),
    "mixtral-8x7b": ("mixtral-8x7b", 15000, 1024, 2000, 200),
    "llama3.1-405b": ("llama3_1-405b", 8313, 2000, 6000, 175),
    "llama3.1-405b-interactive": ("llama3_1-405b-interactive", 8313, 2000, 4500, 80),
    "llama3.1-8b": ("llama3_1-8b", 13368, 128, 2000, 100),
    "llama3.1-8b-interactive": ("llama3_1-8b-interactive", 13368, 128, 500, 30),
    # It has no Server test: the limits are what LoadGen has for every model.
    "llama3.1-8b-edge": ("llama3_1-8b-edge", 5000, 128, 100, 100),
    "deepseek-r1": ("deepseek-r1", 4388, 20000, 2000, 80),
    "deepseek-r1-interactive": ("deepseek-r1-interactive", 4388, 20000, 1500, 15),
    "gpt-oss-120b": ("gpt-oss-120b", 6396, 10240, 3000, 80),
    "gpt-oss-120b-interactive": ("gpt-oss-120b-interactive", 6396, 10240, 2000, 15),
}


SERVER = ["--core_type", "dummy", "--scenarios", "Server", "--server_target_qps", "5"]


def options(name: str, *more: str, scenario: str = "Server") -> RunConfig:
    return parse_run(["--benchmarks", name, "--scenarios", scenario, *more])


def loadgen(config: RunConfig, n_samples: int) -> dict[str, Any]:
    """Return LoadGen's settings from a process of their own, because it reads its own values once in a
    process."""
    script = (
        "import json, sys\nfrom disagg.errors import ConfigError\nfrom mpillm.options.options import"
        " parse_run\n"
        "from mpillm.loadgen.settings import LoadGenConfig, load_settings\n"
        "try:\n    settings = load_settings(LoadGenConfig.from_run(parse_run(json.loads(sys.argv[1]))),"
        " int(sys.argv[2]))\n"
        "    t = settings.test\n"
        "    more = {n: getattr(t, n) for n in ('use_token_latencies', 'sample_concatenate_permutation',"
        " 'ttft_latency')}\n"
        "    print(json.dumps(settings.to_json() | more | {'user_conf': settings.user_conf,"
        " 'notes': settings.notes}))\n"
        "except ConfigError as error:\n    print(json.dumps({'error': str(error)}))\n"
    )
    argv = [
        word
        for name, one in config.option_values.items()
        if one.where == "command line"
        for word in as_option(name, one.value)
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argv), str(n_samples)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def as_option(name: str, value: Any) -> list[str]:
    return [f"--{name}", BY_NAME[name].text(value)]


def test_the_names_are_the_fields() -> None:
    assert tuple(workloads.WORKLOADS) == tuple(OFFICIAL)
    with pytest.raises(ConfigError, match="there is no workload llama2-70 "):
        workloads.get("llama2-70")


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_values(name: str) -> None:
    model, n_samples, max_output_len, ttft, tpot = OFFICIAL[name]
    config = options(name, "--server_target_qps", "8")
    assert config.where("max_output_len") == f"workload {name}" and not config.is_user_set("max_output_len")
    assert config.max_output_len == max_output_len and config.min_output_len == (
        2 if name == "mixtral-8x7b" else 1
    )
    assert (
        config.temperature == (1 if name.startswith("gpt-oss") else 0)
        and config.end_ids
        and config.core_type == "torch"
    )
    assert config.stop_words == ([[13, 13940, 28832, 13]] if name == "mixtral-8x7b" else None)
    settings = loadgen(config, n_samples)
    assert settings["model"] == model and settings["performance_sample_count"] == n_samples
    assert (settings["ttft_latency_ms"], settings["tpot_latency_ms"]) == (ttft, tpot)
    assert (
        settings["min_duration_ms"] == 600_000
        and settings["use_token_latencies"]
        and settings["sample_concatenate_permutation"]
    )
    # Nothing is laid over LoadGen's own but the rate, of which LoadGen has one for no system.
    assert settings["user_conf"].splitlines()[1:] == ["# options", f"{model}.Server.target_qps = 8.0"]
    assert "has 100 samples, but a test of" in loadgen(config, 100)["error"]


@pytest.mark.parametrize(
    "name", ["llama2-70b", "mixtral-8x7b", "llama3.1-405b", "llama3.1-8b", "deepseek-r1", "gpt-oss-120b"]
)
def test_official_values_offline(name: str) -> None:
    settings = loadgen(options(name, "--offline_expected_qps", "37.5", scenario="Offline"), OFFICIAL[name][1])
    assert (
        settings["min_query_count"] == OFFICIAL[name][1]
        and settings["target_qps"] == 37.5
        and settings["ttft_latency_ms"] is None
    )


def test_an_accuracy_run_with_a_data_set_of_its_own() -> None:
    """gpt-oss-120b: 4,395 samples and longer answers; TEST07's has 990 samples."""
    config = options("gpt-oss-120b", "--test_mode", "AccuracyOnly", scenario="Offline")
    assert (config.max_output_len, config.max_seq_len) == (32768, 98304 + 32768)
    assert "needs 4395" in loadgen(config, 4394)["error"] and "error" not in loadgen(config, 4395)
    config = options("gpt-oss-120b", "--compliance_test", "TEST07", scenario="Offline")
    assert config.max_output_len == 10240 and loadgen(config, 990)["performance_sample_count"] == 990
    with pytest.raises(ConfigError, match="gpt-oss-120b needs TEST07 and TEST09"):
        options("gpt-oss-120b", "--compliance_test", "TEST06")


def test_an_interactive_benchmark_is_a_server_test_by_default() -> None:
    config = parse_run(["--benchmarks", "llama2-interactive", "--model_scale", "tiny"])
    assert (config.scenario, config.where("scenarios")) == (
        "Server",
        "workload llama2-70b-interactive (tiny)",
    )
    config = parse_run(["--benchmarks", "llama2-70b", "--model_scale", "tiny"])
    assert (config.scenario, config.where("scenarios")) == ("Offline", "default")


@pytest.mark.parametrize("scenario", ["SingleStream", "Offline"])
def test_scenarios_that_no_round_has(scenario: str) -> None:
    """NVIDIA's harness runs them, and files of its submitters name them."""
    for name in ("llama2-70b", "llama2-70b-interactive"):
        config = options(name, scenario=scenario)
        assert (config.scenario, config.workload and config.workload.name) == (scenario, name)


def test_a_person_goes_before_the_workload() -> None:
    config = options(
        "llama2-70b", "--max_output_len", "7", "--model_path", "llama2-70b", "--load_format", "dummy"
    )
    assert (config.max_output_len, config.model_path) == (7, "llama2-70b") and config.is_user_set(
        "max_output_len"
    )
    assert options("llama2-70b", "--dataset", "synthetic").dataset == "synthetic"
    with pytest.raises(ConfigError, match="exclude each other"):
        options("llama2-70b", "--dataset", "synthetic", "--dataset_path", "x")


@pytest.mark.parametrize("name", OFFICIAL)
def test_presets_fit_the_workloads(name: str) -> None:
    """Lengths, end tokens and stop words are those of the preset with the full model's shape, and of the tiny
    one."""
    preset = name.removesuffix("-interactive")
    scales = ("full", "tiny") if (PRESETS / f"{preset}.json").is_file() else ("tiny",)
    for scale in scales:
        workload = workloads.get(name, scale)
        defaults = {field.name: value for field, value in defaults_of(workload, "Server").items()}
        model_path = preset if scale == "full" else workload.model_path
        info = model_info(
            engine_config(model_path, max_seq_len=defaults["max_seq_len"], stop_words=workload.stop_words)
        )
        assert (
            info.end_ids == workload.end_ids
            and info.max_seq_len == workload.max_input_len + workload.max_output_len
        )
        assert info.config.n_kv_heads % workload.tensor_parallelism == 0


@pytest.mark.parametrize("name", OFFICIAL)
def test_tiny(name: str, tmp_path: Path) -> None:
    workload = workloads.get(name, "tiny")
    full = workloads.get(name)
    write_dataset(workload, tmp_path)
    loader = loader_of(tmp_path, workload)
    limits = PromptLimits(
        512,
        workload.max_input_len + workload.max_output_len,
        workload.max_output_len,
        None,
        workload.end_ids,
        workload.stop_words,
    )
    dataset = load_dataset(loader, ByteTokenizer(), limits)
    assert len(dataset) == full.n_samples // 512 and dataset.n_tokens.max() == workload.max_input_len
    assert (dataset.ignores_stop is not None) == (name == "mixtral-8x7b")
    if dataset.ignores_stop is not None:
        assert 0 < dataset.ignores_stop.sum() < len(dataset)
    references = read_references(workload, str(tmp_path / "references.jsonl"))
    assert len(references) == len(dataset) and all(
        tuple(row) == full.columns.references for row in references
    )

    config = options(name, "--model_scale", "tiny")
    # a preset's weights are random without it, and an engine may be given
    assert config.load_format == "auto"
    assert (
        config.where("min_duration") == f"workload {name} (tiny)"
        and config.min_output_len == full.min_output_len
    )
    settings = loadgen(config, len(dataset))
    model, _, _, ttft, tpot = OFFICIAL[name]
    assert settings["model"] == model and (settings["ttft_latency_ms"], settings["tpot_latency_ms"]) == (
        ttft,
        tpot,
    )
    assert settings["performance_sample_count"] == len(dataset) and settings["min_duration_ms"] == 0
    for word in (
        str(full.n_samples),
        full.hf_model,
        "performance_sample_count",
        "min_query_count",
        "min_duration",
    ):
        assert word in workload.scaled


@pytest.mark.parametrize("scenario", ["Offline", "Server", "SingleStream"])
def test_tiny_reduces_the_duration_of_each_scenario(scenario: str) -> None:
    """Every workload accepts every scenario."""
    for name in OFFICIAL:
        config = options(name, "--model_scale", "tiny", scenario=scenario)
        assert config.min_duration == 0 and config.where("min_query_count") == f"workload {name} (tiny)"


def test_tiny_single_stream() -> None:
    config = options("llama3.1-8b-edge", "--model_scale", "tiny", scenario="SingleStream")
    settings = loadgen(config, 9)
    assert (settings["min_duration_ms"], settings["min_query_count"]) == (0, 64)


def test_the_documented_sizes_of_tiny() -> None:
    tinies = [workloads.get(name, "tiny") for name in OFFICIAL]
    samples = [tiny.n_samples for tiny in tinies if not tiny.interactive_of]
    text = (Path(__file__).parents[3] / "docs/reference/workloads.md").read_text()
    assert f"samples: {', '.join(map(str, samples))}, in the order" in text
    (lengths,) = (line for line in text.splitlines() if line.startswith("| lengths |"))
    assert all(f"a {tiny.tiny_divisor:,}th" in lengths for tiny in tinies)


def test_user_conf_over_tiny_under_options(tmp_path: Path) -> None:
    conf = tmp_path / "user.conf"
    text = "*.Server.min_duration = 5000\n*.Server.target_qps = 3.5\nllama2-70b.*.min_query_count = 0x20"
    # as Windows' editor writes it: LoadGen would pass over the first key
    conf.write_text(text, encoding="utf-8-sig")
    settings = loadgen(
        options("llama2-70b", "--model_scale", "tiny", "--user_conf", str(conf), "--server_target_qps", "9"),
        48,
    )
    assert (settings["min_duration_ms"], settings["min_query_count"], settings["target_qps"]) == (5000, 32, 9)
    assert f"\n{text}\n" in settings["user_conf"]


@pytest.mark.long
def test_without_a_workload(tmp_path: Path) -> None:
    config = parse_run(SERVER)
    settings = loadgen(config, 160)
    assert (
        settings["model"] == "mpillm"
        and settings["min_query_count"] == 459
        and settings["min_duration_ms"] == 0
    )
    assert loadgen(config, 500)["min_query_count"] == 500, (
        "each sample once, where these are enough for early stopping"
    )
    assert (
        settings["ttft_latency_ms"] is None
        and settings["ttft_latency"] == 10**15
        and settings["use_token_latencies"]
    )
    offline = loadgen(parse_run(["--core_type", "dummy"]), 160)
    assert not offline["use_token_latencies"] and (offline["target_qps"], offline["min_query_count"]) == (
        1,
        160,
    )
    conf = tmp_path / "limits.conf"
    conf.write_text("*.Server.ttft_latency = 500\n")
    limited = loadgen(parse_run([*SERVER, "--user_conf", str(conf)]), 160)
    assert limited["ttft_latency_ms"] == 500 and limited["tpot_latency_ms"] is None
    assert (limited["min_duration_ms"], limited["min_query_count"]) == (0, 459), "a limit is no duration"
    conf.write_text("mpillm.*.min_duration = 7000\n*.*.min_query_count = 900\n")
    longer = loadgen(parse_run([*SERVER, "--user_conf", str(conf)]), 160)
    assert (longer["min_duration_ms"], longer["min_query_count"]) == (7000, 900)
    single = loadgen(parse_run(["--core_type", "dummy", "--scenarios", "SingleStream"]), 20)
    assert (single["target_qps"], single["min_query_count"]) == (None, 64)


def test_a_key_that_loadgen_does_not_read(tmp_path: Path) -> None:
    """Generators of user.conf write performance_sample_count; published files have it."""
    conf = tmp_path / "user.conf"
    conf.write_text(
        "*.Server.performance_sample_count = 7\n*.Server.performance_sample_count_override = 9\n"
        "*.Server.target_qps = 51.52\n"
    )
    settings = loadgen(options("llama2-70b", "--user_conf", str(conf)), 24576)
    assert settings["notes"] == [
        f"--user_conf {conf}: performance_sample_count has no effect; LoadGen reads"
        " performance_sample_count_override"
    ]
    assert settings["performance_sample_count"] == 9


def test_goodput_replaces_the_workloads_limits(tmp_path: Path) -> None:
    conf = tmp_path / "user.conf"
    conf.write_text("*.Server.ttft_latency = 100\n*.Server.max_duration = 9000\n")
    more = ["--user_conf", str(conf), "--goodput", "ttft:500 e2el:9000", "--server_target_qps", "9"]
    for config in (options("llama2-70b", *more), parse_run([*SERVER[:4], *more])):
        settings = loadgen(config, 24576)
        assert (settings["ttft_latency_ms"], settings["tpot_latency_ms"]) == (500, None)
        assert "max_duration = 9000" in settings["user_conf"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "*.Server.target_qsp = 1",
            "user.conf:2: LoadGen takes no target_qsp from a user.conf (did you mean 'target_qps'?)",
        ),
        ("*.Sever.target_qps = 1", "user.conf:2: Sever is not a scenario (did you mean 'Server'?)"),
        ("target_qps = 1", "user.conf:2: target_qps is not a scenario"),
        (
            "*.Server.target_qps=1",
            "user.conf:2: '*.Server.target_qps=1' is not 'model.scenario.key = number'",
        ),
        (
            "*.Server.target_qps = fast",
            "user.conf:2: fast is not a number of at least 0, which target_qps takes",
        ),
        ("*.Server.target_qps = nan", "user.conf:2: nan is not a number"),
        ("*.Server.target_qps = -1.5", "user.conf:2: -1.5 is not a number"),
        ("*.Server.target_qps = 1_000.5", "user.conf:2: 1_000.5 is not a number"),
        (
            "*.Server.min_query_count = -5",
            "user.conf:2: -5 is not a whole number of at least 0, which min_query_count takes",
        ),
        ("*.Server.min_query_count = 24_576", "user.conf:2: 24_576 is not a whole number"),
        ("*.Server.min_query_count = 010", "user.conf:2: 010 is not a whole number"),
        (
            "*.Server.min_query_count = 99999999999999999999",
            "user.conf:2: 99999999999999999999 is not a whole number",
        ),
        ("*.*.min_duration = 6e5", "user.conf:2: 6e5 is not a whole number"),
        ("*.Server.target_latency = 1.5", "user.conf:2: 1.5 is not a whole number"),
        ("*.Server.target_qps = 1 # not more", "user.conf:2: '*.Server.target_qps = 1 # not more' is not"),
        ("*.Server.target_qps =", "user.conf:2: '*.Server.target_qps =' is not"),
    ],
)
def test_bad_user_conf(line: str, message: str, tmp_path: Path) -> None:
    conf = tmp_path / "user.conf"
    conf.write_text(f"*.Server.min_duration = 1\n{line}\n")
    assert message in refused(str(conf))


def refused(user_conf: str) -> str:
    """Return the message about a user.conf.

    It comes before LoadGen reads anything, so it may be in this process.
    """
    with pytest.raises(ConfigError) as error:
        load_settings(LoadGenConfig.from_run(options("llama2-70b", "--user_conf", user_conf)), 24576)
    return str(error.value)


def test_unreadable_user_conf(tmp_path: Path) -> None:
    assert "nowhere.conf: cannot be read: No such file" in refused("nowhere.conf")
    assert "Is a directory" in refused(str(tmp_path))


def test_every_default_is_a_field() -> None:
    for name in OFFICIAL:
        for scale in ("full", "tiny"):
            workload = workloads.get(name, scale)
            for scenario in workload.scenarios:
                for field, value in defaults_of(workload, scenario).items():
                    assert field in FIELDS and (value in (None, "") or field.check(value, "x") == value)


def test_the_page_names_the_engines_family_of_each_workload() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "workloads.md").read_text()
    rows = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("| `")]
    families = {row[0].strip(" `"): re.sub("[ -]", "", row[-1]).lower() for row in rows if len(row) == 9}
    assert families == {
        name: workload.architecture.removesuffix("ForCausalLM").lower()
        for name, workload in workloads.WORKLOADS.items()
        if workload.architecture in FAMILIES
    }
