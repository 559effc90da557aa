"""Data sets: JSONL files good and bad, synthetic ones, and the prompts that come with the program."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from disagg.text_file import read_text
from mpillm.data import gguf
from mpillm.data.dataset import BUILTIN_PROMPTS, Dataset, PromptLimits, Synthetic, load_dataset
from mpillm.data.preprocessed.loader import LENGTHS_FILE, TOKENS_FILE, PreprocessedLoader, loader_of
from mpillm.data.random_tokens import token_source
from mpillm.data.row_files import read_rows
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.files import read_json
from mpillm.loadgen.audit import prepare_audit
from mpillm.submission.references import read_references
from mpillm.triton.client.client_options import load_array
from mpillm.triton.client.prompts_file import read_prompts
from mpillm.triton.client.token_client import _tokens_of
from mpillm.workloads import WORKLOADS

BYTES = ByteTokenizer()


def write(folder: Path, *lines: Any) -> Path:
    """Return a data set with these lines: bytes as they are, anything else as JSON."""
    file = folder / "data.jsonl"
    file.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return file


def prompts_of(dataset: Dataset) -> list[list[int]]:
    return [dataset.sample(i).tolist() for i in range(len(dataset))]


def test_prompts_and_tokens_may_be_mixed(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        b"\xef\xbb\xbf",
        {"prompt": "ab", "id": 1},
        b"\n",
        {"input_tokens": [7, 8, 9]},
        b"  \r\n",
        {"prompt": "é"},
        b'{"input_tokens": [255]}',
    )
    dataset = load_dataset(file, BYTES)
    assert prompts_of(dataset) == [[97, 98], [7, 8, 9], [0xC3, 0xA9], [255]]
    assert dataset.texts == {0: "ab", 2: "é"}
    assert dataset.name == "data.jsonl"
    assert dataset.output_lengths is None
    assert [dataset.tokens.dtype, dataset.n_tokens.dtype] == [np.dtype(np.int32), np.dtype(np.int64)]
    assert dataset.n_tokens.tolist() == [2, 3, 2, 1]


def test_gather(tmp_path: Path) -> None:
    rows = [list(range(n)) for n in (3, 1, 5, 2)]
    dataset = load_dataset(write(tmp_path, *({"input_tokens": row} for row in rows)), BYTES)
    for dtype in (np.int64, np.uint32, np.uint64):
        lengths, tokens = dataset.gather(np.array([2, 0, 2, 3], dtype))
        assert lengths.tolist() == [5, 3, 5, 2]
        assert tokens.tolist() == rows[2] + rows[0] + rows[2] + rows[3]
    lengths, tokens = dataset.gather(np.array([], np.int64))
    assert len(lengths) == len(tokens) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "cut', "not valid JSON.*truncated"),
        (b'{"prompt": "x"} {"prompt": "y"}\n', "not valid JSON"),
        (b"[" * 100_000 + b"\n", "not valid JSON"),
        (b'{"prompt": "\xff"}\n', "byte 13 is not UTF-8"),
        (["x"], 'a JSON array, not an object with "prompt"'),
        ({}, 'neither "prompt" nor "input_tokens", but no key'),
        ({"promt": "x"}, r"but promt \(did you mean 'prompt'\?\)"),
        ({"prompt": "x", "input_tokens": [1]}, 'both "prompt" and "input_tokens"'),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n\t"}, "prompt is empty"),
        ({"prompt": None}, "prompt is a JSON null"),
        ({"prompt": ["x"]}, "prompt is a JSON array"),
        ({"prompt": "\ud83d"}, "half a surrogate pair at character 1"),
        ({"input_tokens": []}, "input_tokens is empty"),
        ({"input_tokens": "1 2"}, "input_tokens is a JSON string"),
        ({"input_tokens": 5}, "input_tokens is a JSON number"),
        ({"input_tokens": [1, 2.5]}, "has 2.5, which is not an integer"),
        ({"input_tokens": [1, "2"]}, 'has "2", which is not an integer'),
        ({"input_tokens": [True, 1]}, "has true, which is not an integer"),
        ({"input_tokens": [1, None]}, "has null, which is not an integer"),
        ({"input_tokens": [[1]]}, r"has \[1\], which is not an integer"),
        ({"input_tokens": [3, -1]}, "has -1; token ids are 0 to 255"),
        ({"input_tokens": [3, 256]}, "has 256; token ids are 0 to 255"),
        ({"input_tokens": [2**70]}, "token ids are 0 to 255"),
    ],
)
def test_bad_line(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path, {"prompt": "good"}, b"\n", line)
    with pytest.raises(ConfigError, match=rf"data\.jsonl:3: .*{message}"):
        load_dataset(file, BYTES)


def test_bad_file(tmp_path: Path) -> None:
    write(tmp_path, b"\n  \n")
    with pytest.raises(ConfigError, match=r"data\.jsonl is empty"):
        load_dataset(tmp_path / "data.jsonl", BYTES)
    with pytest.raises(ConfigError, match=r"dta\.jsonl does not exist \(did you mean 'data\.jsonl'\?\)"):
        load_dataset(tmp_path / "dta.jsonl", BYTES)
    with pytest.raises(ConfigError, match=r"nowhere.* does not exist"):
        load_dataset(tmp_path / "nowhere" / "x.jsonl", BYTES)
    with pytest.raises(ConfigError, match="is a directory"):
        load_dataset(tmp_path, BYTES)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dataset(tmp_path / "data.jsonl" / "x", BYTES)


def test_sequence_length(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "short"}, {"prompt": "x" * 20}, {"prompt": "x" * 30})
    assert len(load_dataset(file, BYTES, PromptLimits(max_seq_len=40, max_output_len=10))) == 3
    with pytest.raises(
        ConfigError,
        match=r"jsonl:3: the prompt has 30 tokens and does not fit max_seq_len 39 with max_output_len 10$",
    ):
        load_dataset(file, BYTES, PromptLimits(max_seq_len=39, max_output_len=10))
    with pytest.raises(
        ConfigError, match=r"jsonl:3: .* max_seq_len 16 with max_output_len 1 \(2 of 3 samples are too long"
    ):
        load_dataset(file, BYTES, PromptLimits(max_seq_len=16))
    with pytest.raises(ConfigError, match=r"jsonl:3: the prompt has 30 tokens .* max_seq_len 5 with"):
        load_dataset(file, BYTES, PromptLimits(max_seq_len=5, max_output_len=10))


def test_the_models_vocabulary_counts(tmp_path: Path) -> None:
    file = write(tmp_path, {"input_tokens": [999]}, {"prompt": "~"})
    assert prompts_of(load_dataset(file, BYTES, PromptLimits(vocab_size=1000))) == [[999], [126]]
    with pytest.raises(ConfigError, match="jsonl:1: input_tokens has 999; token ids are 0 to 998"):
        load_dataset(file, BYTES, PromptLimits(vocab_size=999))
    with pytest.raises(
        ConfigError, match="jsonl:1: the tokenizer makes token 126, the model knows 100 tokens"
    ):
        load_dataset(write(tmp_path, {"prompt": "~"}), BYTES, PromptLimits(vocab_size=100))


def test_a_prompt_without_tokens(tmp_path: Path) -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, prompts: Any) -> list[list[int]]:
            return [[] for _ in prompts]

    with pytest.raises(ConfigError, match="jsonl:1: the tokenizer makes no token"):
        load_dataset(write(tmp_path, {"prompt": "x"}), Silent())


# Synthetic


class RequestExtras(ByteTokenizer):
    vocab_size = 300
    plain_tokens = range(10, 290)


def test_synthetic() -> None:
    spec = Synthetic(input_mean=50, input_stdev=10, output_mean=20, output_stdev=5, num_samples=4000, seed=3)
    dataset = load_dataset(spec, RequestExtras())
    assert dataset.output_lengths is not None
    assert len(dataset) == len(dataset.output_lengths) == 4000
    for lengths, mean, stdev in ((dataset.n_tokens, 50, 10), (dataset.output_lengths, 20, 5)):
        assert abs(lengths.mean() - mean) < 0.1 * stdev
        assert abs(lengths.std() - stdev) < 0.1 * stdev
        assert lengths.min() >= 1
    assert dataset.tokens.dtype == np.int32
    assert np.unique(dataset.tokens).tolist() == list(range(10, 290))
    assert dataset.name == "synthetic"
    again, other = (
        load_dataset(spec, RequestExtras()),
        load_dataset(Synthetic(50, 20, 10, 5, 4000, seed=4), RequestExtras()),
    )
    assert np.array_equal(again.tokens, dataset.tokens)
    assert np.array_equal(again.output_lengths, dataset.output_lengths)  # type: ignore[arg-type]
    assert not np.array_equal(other.tokens[:100], dataset.tokens[:100])


def test_synthetic_lengths_are_clipped_and_fixed_ones_exact() -> None:
    wide = load_dataset(
        Synthetic(input_mean=2, input_stdev=50, output_mean=1, output_stdev=50, num_samples=500), BYTES
    )
    assert wide.output_lengths is not None
    assert wide.n_tokens.min() == wide.output_lengths.min() == 1
    fixed = load_dataset(
        Synthetic(input_mean=128, output_mean=16, num_samples=10), BYTES, PromptLimits(max_seq_len=144)
    )
    assert fixed.output_lengths is not None
    assert set(fixed.n_tokens.tolist()) == {128}
    assert set(fixed.output_lengths.tolist()) == {16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_mean": 1e300}, "which does not fit max_seq_len 100"),
        ({"num_samples": 10**14}, "100000000000000 samples .--num_samples. do not fit the memory"),
        ({"num_samples": 10**30}, "samples .--num_samples. do not fit the memory"),
        (
            {"input_mean": 100},
            "sample 0 has 100 input and 20 output tokens, which does not fit max_seq_len 100",
        ),
    ],
)
def test_bad_synthetic(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(
            Synthetic(**{"input_mean": 10, "output_mean": 20, "num_samples": 5, **change}),
            BYTES,
            PromptLimits(max_seq_len=100),
        )


def test_synthetic_for_a_small_vocabulary() -> None:
    assert load_dataset(Synthetic(10, 10), RequestExtras(), PromptLimits(vocab_size=12)).tokens.max() == 11
    with pytest.raises(ConfigError, match="none of the model's 10 tokens"):
        load_dataset(Synthetic(10, 10), RequestExtras(), PromptLimits(vocab_size=10))


# The prompts that come with the program


def test_builtin_prompts() -> None:
    dataset = load_dataset(None, BYTES)
    prompts = list(dataset.texts.values())
    assert len(dataset) == len(prompts) >= 128
    assert len({" ".join(prompt.lower().split()) for prompt in prompts}) == len(prompts)
    assert prompts[0] == "What is the capital of France?"
    assert all(prompt == prompt.strip() for prompt in prompts)
    words = np.array([len(prompt.split()) for prompt in prompts])
    assert np.count_nonzero(words <= 4) >= 10
    assert np.count_nonzero((words > 8) & (words <= 25)) >= 40
    assert np.count_nonzero((words > 40) & (words <= 150)) >= 10
    assert np.count_nonzero(words > 150) >= 8
    assert words.max() >= 400
    assert sum(not prompt.isascii() for prompt in prompts) >= 15
    assert BUILTIN_PROMPTS.read_bytes().endswith(b"\n")
    assert dataset.note == ""


@pytest.mark.parametrize(
    ("limits", "longest", "why"),
    [
        (
            PromptLimits(max_prompt_len=1024),
            1024,
            "they do not fit --max_num_tokens 1024 without `--enable_chunked_context true`",
        ),
        (
            PromptLimits(max_seq_len=256, max_output_len=56),
            200,
            "they do not fit max_seq_len 256 with max_output_len 56",
        ),
        (
            PromptLimits(max_seq_len=256, max_output_len=56, max_prompt_len=100),
            100,
            "they do not fit max_seq_len 256 with max_output_len 56, or --max_num_tokens 100 without"
            " `--enable_chunked_context true`",
        ),
    ],
)
def test_builtin_prompts_that_fit(limits: PromptLimits, longest: int, why: str) -> None:
    """A model with a short context gets the prompts that fit it, in their order, with their texts; a line
    says how many."""
    whole, dataset = load_dataset(None, BYTES), load_dataset(None, BYTES, limits)
    kept = [prompt for prompt in prompts_of(whole) if len(prompt) <= longest]
    assert prompts_of(dataset) == kept and 20 < len(kept) < len(whole)
    assert [list(dataset.texts[i].encode()) for i in range(len(dataset))] == kept
    assert dataset.note == f"{len(whole) - len(kept)} of its {len(whole)} prompts are left out: {why}"


def test_no_builtin_prompt_fits() -> None:
    with pytest.raises(
        ConfigError,
        match=r"prompts.jsonl:\d+: the prompt has \d+ tokens and does not fit max_seq_len 12 with"
        r" max_output_len 8",
    ):
        load_dataset(None, BYTES, PromptLimits(max_seq_len=12, max_output_len=8))


def test_nothing_is_left_out_of_a_persons_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit max_seq_len 12"):
        load_dataset(
            write(tmp_path, {"prompt": "a"}, {"prompt": "a longer one"}),
            BYTES,
            PromptLimits(max_seq_len=12, max_output_len=1),
        )


@pytest.mark.parametrize("special", ["pipe", "link to a device"])
@pytest.mark.parametrize("name", ["data.jsonl", "frame.pkl", "frame.pkl.gz", "frame.json", "a folder"])
def test_a_pipe_or_a_device_is_refused(special: str, name: str, tmp_path: Path) -> None:
    """To open a pipe waits for a writer; /dev/zero has no end."""
    path = tmp_path / name
    if name == "a folder":
        path.mkdir()
        np.save(path / TOKENS_FILE, np.ones((2, 3), np.int32))
        file = path / LENGTHS_FILE
    else:
        file = path
    os.mkfifo(file) if special == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{file}: neither a file nor a folder"):
        source = loader_of(path, None) if PreprocessedLoader.reads(path) else path
        load_dataset(source, BYTES)


@pytest.mark.parametrize(
    "read",
    [
        read_text,
        lambda file: read_json(Path(file)),
        lambda file: read_prompts(Path(file)),
        lambda file: read_references(WORKLOADS["llama2-70b"], file),
        lambda file: load_array(file),
        lambda file: _tokens_of(Path(file)),
        lambda file: prepare_audit(None, file, Path("nowhere")),
        lambda file: gguf.convert(Path(file), Path("nowhere")),
        lambda file: token_source(BYTES, 256, Path(file)),
        lambda file: [*read_rows(Path(file))],
    ],
)
@pytest.mark.parametrize("special", ["pipe", "link to a device"])
def test_readers_of_files_refuse_pipes_and_devices(read: Any, special: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    os.mkfifo(file) if special == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{file}: neither a file nor a folder"):
        read(str(file))
