"""Which data set the options of a run mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from disagg.errors import ConfigError, about
from mpillm import workloads
from mpillm.data.dataset import Dataset
from mpillm.options.options import parse_run
from mpillm.runtime.choose_samples import load_samples
from tests.helpers.configured import DUMMY
from tests.helpers.data_frames import write_frame


class Model(NamedTuple):
    vocab_size: int = 512
    max_seq_len: int = 4096
    max_prompt_len: int | None = None


def load(tmp_path: Path, *words: object, models: tuple[Any, ...] = (Model(),)) -> Dataset:
    dataset, _ = load_samples(parse_run([str(word) for word in words]), models, lambda: tmp_path / "run")
    return dataset


def arrays(folder: Path, token: int = 7, n: int = 3) -> Path:
    np.save(folder / "input_ids_padded.npy", np.full((n, 4), token, np.int32))
    np.save(folder / "input_lens.npy", np.full(n, 4))
    return folder


TINY = ("--benchmarks", "mixtral-8x7b", "--model_scale", "tiny")


def test_a_tiny_workload_gets_its_data_set_once(tmp_path: Path) -> None:
    tiny = workloads.get("mixtral-8x7b", "tiny")
    assert len(load(tmp_path, *TINY)) == tiny.n_samples
    config = parse_run(list(TINY))
    load_samples(config, [Model()], lambda: tmp_path / "run")
    assert config.dataset_path == str(tmp_path / "run" / "dataset")
    assert config.where("dataset_path") == "workload mixtral-8x7b (tiny)" and not config.is_user_set(
        "dataset_path"
    )


def test_a_persons_own(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"input_tokens": [1, 2]}\n')
    for more in (TINY, DUMMY):
        assert load(tmp_path, *more, "--dataset_path", lines).tokens.tolist() == [1, 2]
        assert load(tmp_path, *more, "--dataset_path", arrays(tmp_path)).tokens.tolist() == [7] * 12
    write_frame(tmp_path / "any.pkl", {"tok_input": [[1, 2], [3]]})
    assert load(tmp_path, *DUMMY, "--dataset_path", tmp_path / "any.pkl").tokens.tolist() == [1, 2, 3]
    assert not (tmp_path / "run").exists()


def test_synthetic_and_builtin(tmp_path: Path) -> None:
    assert (
        load(tmp_path, *TINY, "--dataset", "synthetic", "--num_samples", 5, "--input_mean", 8).name
        == "synthetic"
    )
    assert load(tmp_path, *DUMMY).name == "prompts.jsonl"


@pytest.mark.parametrize("core", ["dummy", "trtllm_endpoint", "trtllm_disagg", "triton_grpc"])
def test_a_missing_folder_is_an_error_for_every_core(tmp_path: Path, core: str) -> None:
    """Also where the data set has token ids: the user names a model that is not there."""
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"input_tokens": [1, 2]}\n')
    for data in ((), ("--dataset_path", lines), ("--dataset", "synthetic")):
        for path, hint in (
            ("HuggingFaceTB/SmolLM2-135M-Instruct", "hf download HuggingFaceTB/SmolLM2-135M-Instruct"),
            ("DIR", "presets:"),
            ("tiny-lama", "did you mean 'tiny-llama'?"),
            (tmp_path / "nowhere", "presets:"),
        ):
            with pytest.raises(ConfigError) as error:
                load(tmp_path, "--core_type", core, "--model_path", path, *data)
            assert f"--model_path {path}: no such folder" in str(error.value) and hint in str(error.value)


def test_texts_without_a_tokenizer_go_to_servers_as_texts(tmp_path: Path) -> None:
    """Also with a preset's name: a real model of that name has another tokenizer than bytes."""
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"prompt": "Où"}\n')
    for model in ((), ("--model_path", "llama3.1-8b")):
        words = ("--url", "h:1", "--dataset_path", lines, *model)
        dataset = load(tmp_path, *words)
        assert dataset.sends_text and bytes(dataset.tokens.tolist()).decode() == "Où"
        for more in ("--save_outputs", "--test_mode=AccuracyOnly"):
            with pytest.raises(ConfigError, match=r"needs the tokens of answers: .*--model_path"):
                load(tmp_path, *words, more)
        assert load(tmp_path, *words, "--harness", "command:x {url} {report}").sends_text
        lines.write_text('{"prompt": "Où"}\n{"input_tokens": [1]}\n')
        with pytest.raises(ConfigError, match="a text has no tokens without it"):
            load(tmp_path, *words)
        lines.write_text('{"prompt": "Où"}\n')
    lines.write_text('{"prompt": "Où"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(ConfigError, match=r"own.jsonl.*--endpoint_type chat.*--model_path"):
        load(tmp_path, "--url", "h:1", "--dataset_path", lines)
    lines.write_text('{"input_tokens": [1, 400]}\n')
    assert not load(tmp_path, "--core_type", "openai", "--dataset_path", lines).sends_text
    drawn = load(tmp_path, "--core_type", "openai", "--dataset", "synthetic")
    assert not drawn.sends_text and "random token ids from 0 to 255: no tokenizer here" in drawn.note
    own = ("--server", "mpillm", "--model_path", "tiny-llama")
    lines.write_text('{"prompt": "Hi"}\n')
    assert not load(
        tmp_path, *own, "--dataset_path", lines, "--save_outputs"
    ).sends_text  # bytes are its tokens


def test_a_client_of_tokens_needs_a_tokenizer_for_texts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--core_type triton_grpc, without --model_path: no tokenizer; a text"
    ):
        load(tmp_path, "--core_type", "triton_grpc")
    assert load(tmp_path, "--core_type", "triton_grpc", "--dataset", "synthetic").name == "synthetic"


def test_a_workloads_own_folder_is_needed_for_text_only(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"input_tokens": [1, 2]}\n')
    words = (*DUMMY, "--benchmarks", "llama2-70b", "--dataset_path", lines)
    assert load(tmp_path, *words).tokens.tolist() == [1, 2]
    lines.write_text('{"prompt": "Hello"}\n')
    with pytest.raises(ConfigError, match=r"build/models/Llama-2-70b-chat-hf: no such folder.*has no tokens"):
        load(tmp_path, *words)


def test_a_folder_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"input_tokens": [1, 2]}\n')
    words = (*DUMMY, "--model_path", tmp_path)
    assert load(tmp_path, *words, "--dataset_path", lines).tokens.tolist() == [1, 2]
    assert len(load(tmp_path, *words, "--dataset", "synthetic", "--num_samples", 5)) == 5
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in it"):
        load(tmp_path, *words)


def test_the_narrowest_model_counts(tmp_path: Path) -> None:
    """A context and a generation instance may have different limits. A core without a model has none."""
    path = ("--dataset_path", arrays(tmp_path), "--max_output_len", 4)
    wide = Model(10**6, 10**6)
    assert len(load(tmp_path, *DUMMY, *path, models=(wide, Model(8, 8, 4), None))) == 3
    for narrow, message in (
        (Model(vocab_size=7), "sample 0 has token 7; the model's are 0 to 6"),
        (Model(max_seq_len=7), "does not fit max_seq_len 7"),
        (Model(max_prompt_len=3), "does not fit --max_num_tokens 3 without `--enable_chunked_context true`"),
    ):
        for models in ((narrow, wide), (None, wide, narrow)):
            with pytest.raises(ConfigError) as error:
                load(tmp_path, *DUMMY, *path, models=models)
            assert message in str(error.value) and "input_ids_padded.npy" in str(error.value)


def test_stop_words_of_a_data_set(tmp_path: Path) -> None:
    """They must be the run's, unless the run wants none: by `use_stop_tokens` of a generation config, or by
    empty stop words."""
    arrays(tmp_path)
    np.save(tmp_path / "stop_ids_padded.npy", np.array([[13, 13], [2, 2], [13, 13]], np.int32))
    data = (*DUMMY, "--dataset_path", tmp_path, "--end_ids", 2)
    with pytest.raises(
        ConfigError, match=r"sample 0 has stop word \[13, 13\]; the stop words .* \(--stop_words\) are: none"
    ):
        load(tmp_path, *data)
    ignores_stop = load(tmp_path, *data, "--stop_words", "[[13, 13]]").ignores_stop
    assert ignores_stop is not None and ignores_stop.tolist() == [False, True, False]
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"generation_config": {"use_stop_tokens": false}}')
    for none in (("--stop_words", "[]"), ("--llm_gen_config_path", generation)):
        assert load(tmp_path, *data, *none).ignores_stop is None


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("dataset_path: nowhere.jsonl", "dataset_path", "nowhere.jsonl"),
        ("max_output_len: 5000", "max_output_len", "5000"),
    ],
)
def test_what_does_not_fit_names_the_file_that_set_it(
    tmp_path: Path, text: str, option: str, value: str
) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text(f"core_type: dummy\n{text}\n")
    config = parse_run(["--config_file", str(yaml)])
    with pytest.raises(ConfigError) as error:
        load_samples(config, (Model(),), lambda: tmp_path)
    assert value in str(error.value)
    assert config.explain(error.value) == f"{error.value}\n{option} is set by {yaml}:2"
    config = parse_run(["--core_type", "dummy", *f"--{text}".replace(":", "").split()])
    assert config.explain(error.value) == str(error.value), "the user has the command line before them"


def test_only_the_options_that_an_error_is_about_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other options that its text mentions are not."""
    monkeypatch.chdir(tmp_path)
    Path("d.yaml").write_text("executors: {max_batch_size: 3}")
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("core_type: dummy\nmodel_path: runs/a\ndisagg_config: d.yaml\n")
    config = parse_run(["--config_file", str(yaml)])
    assert (
        config.explain(ConfigError("runs/a: --core_type dummy, model_path runs/a: no"))
        == "runs/a: --core_type dummy, model_path runs/a: no"
    )
    with pytest.raises(ConfigError) as error, about("max_batch_size", "seed"), about("model_path"):
        raise ConfigError("no", about=["model_path"])
    assert error.value.about == ("model_path", "max_batch_size", "seed")
    assert config.explain(error.value).splitlines() == [
        "no",
        f"model_path is set by {yaml}:2",
        "max_batch_size is set by d.yaml: executors.max_batch_size",
    ]


def test_end_tokens_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--end_ids 2,512 \(command line\): tiny-mixtral knows 512 tokens"):
        load(tmp_path, *TINY, "--end_ids", "2,512")


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_full_workload_names_its_missing_data_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = workloads.get(name)
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "--benchmarks", name, "--scenarios", "Server", models=(Model(201_088),))
    for word in (workload.dataset_path, "input_ids_padded.npy", "input_lens.npy", workload.frame_file):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("words", "use"),
    [
        (DUMMY, "UNUSED"),
        (("--core_type=torch", "--model_path=tiny-llama"), "SAMPLING"),
        (("--server=mpillm", "--model_path=tiny-llama"), "SAMPLING"),
        (("--url", "h:1"), "ALL"),
        (("--url", "h:1", "--endpoint_type=chat"), "ALL"),
        (("--url", "h:1", "--endpoint_type=responses"), "ALL"),
        (("--url", "h:1", "--harness=aiperf"), "UNUSED"),
        (("--url", "h:1", "--harness=conversations", "--endpoint_type=chat"), "ALL"),
        (("--core_type=torch", *TINY), "UNUSED"),
    ],
)
def test_which_cores_follow_fields_of_rows(tmp_path: Path, words: tuple[str, ...], use: str) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"prompt": "a", "temperature": 0.5, "stop": "b"}\n')
    if use == "SAMPLING":
        with pytest.raises(ConfigError, match=r'own.jsonl:1: stop is "b"; only a server can follow it'):
            load(tmp_path, *words, "--dataset_path", lines)
        return
    dataset = load(tmp_path, *words, "--dataset_path", lines)
    assert bool(dataset.sampling) == (use == "ALL") and ("stop, temperature" in dataset.note)
    assert (dataset.sample(0)[0] == 255) == (use == "ALL")


@pytest.mark.parametrize(("output", "is_noted"), [(5, True), (40, False)])
def test_lengths_that_a_core_cannot_follow(tmp_path: Path, output: int, is_noted: bool) -> None:
    synthetic = ("--dataset", "synthetic", "--output_mean", output, "--max_output_len", 40)
    dataset = load(tmp_path, "--core_type", "examples.llmlib_harness:EchoCore", *synthetic)
    assert ("its output lengths have no effect: --core_type" in dataset.note) == is_noted
    assert "lengths" not in load(tmp_path, *DUMMY, *synthetic).note


def test_prompts_of_a_chat_endpoint_are_messages(tmp_path: Path) -> None:
    """Also where the model has a tokenizer: the server applies the chat template, and counts tokens."""
    chat = ("--url", "h:1", "--endpoint_type", "chat")
    lines = tmp_path / "own.jsonl"
    lines.write_text(
        '{"prompt": "Où"}\n{"messages": [{"role": "system", "content": "x"}], "max_tokens": 3}\n'
    )
    dataset = load(tmp_path, *chat, "--dataset_path", lines)
    assert dataset.sends_text and dataset.output_lengths is not None and dataset.output_lengths[1] == 3
    assert [bytes(dataset.sample(i).tolist()).decode() for i in range(2)] == [
        '"messages":[{"role":"user","content":"Où"}',
        '"messages":[{"role":"system","content":"x"}',
    ]
    for more in ("--save_outputs", "--test_mode=AccuracyOnly"):
        with pytest.raises(ConfigError, match="needs the tokens of answers, which a chat endpoint does not"):
            load(tmp_path, *chat, "--dataset_path", lines, more)
    lines.write_text('{"prompt": "a"}\n{"input_tokens": [1]}\n')
    with pytest.raises(
        ConfigError, match=r"own.jsonl:2: prompts are token ids, which cannot be sent as a chat"
    ):
        load(tmp_path, *chat, "--dataset_path", lines)
    with pytest.raises(ConfigError, match="prompts are token ids, which cannot be sent as a chat"):
        load(tmp_path, *chat, "--dataset_path", arrays(tmp_path))
    with pytest.raises(ConfigError, match="a text has no tokens without it"):
        load(tmp_path, *chat, "--dataset", "synthetic")
    lines.write_text('{"input_length": 9}\n')
    own = ("--server", "mpillm", "--model_path", "tiny-llama", *chat[2:])
    traced = load(tmp_path, *own, "--harness", "conversations", "--dataset_path", lines)
    assert traced.sends_text and bytes(traced.sample(0).tolist()).startswith(b'"messages":[{"role":"user",')
    drawn = load(tmp_path, *own, "--dataset", "synthetic")
    assert drawn.sends_text and len(drawn.texts) == len(drawn) == 1024
