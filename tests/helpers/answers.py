"""Check the answers of a run: outputs.jsonl, and what LoadGen logged."""

from __future__ import annotations

from tests.helpers.support import (
    DONE,
    Command,
    Ended,
    Samples,
    wait_until,
)


def check_outputs(ended: Ended, samples: Samples, n_output: int, n_samples: int | None = None) -> None:
    """Check that every line of outputs.jsonl has the prompt and the answer of its index, and that none is
    missing."""
    ended.must(DONE)
    outputs = ended.outputs()
    for line in outputs:
        assert line["input_tokens"] == samples.prompts[line["index"]]
        assert line["output_tokens"] == samples.answer(line["index"], n_output)
    assert len(outputs) == ended.result["samples"]
    assert len(outputs) == (len(samples.prompts) if n_samples is None else n_samples)
    assert ended.result["tokens"] == n_output * len(outputs)
    assert sum(instance["tokens"] for instance in ended.result["per_instance"]) == ended.result["tokens"]


def check_each_index_once(ended: Ended, samples: Samples, n_output: int) -> None:
    """Check that LoadGen has logged every sample once, with the answer of its index."""
    log = ended.accuracy_log()
    assert sorted(index for index, _ in log) == list(range(len(samples.prompts)))
    for index, tokens in log:
        assert tokens == samples.answer(index, n_output)
    assert sorted(line["index"] for line in ended.outputs()) == list(range(len(samples.prompts)))


def wait_for_answers(command: Command, n: int) -> None:
    """Wait until outputs.jsonl has so many lines: work is under way everywhere."""
    outputs = command.log_dir / "outputs.jsonl"
    wait_until(
        lambda: (
            (outputs.exists() and outputs.read_bytes().count(b"\n") >= n)
            or command.process.poll() is not None
        ),
        f"{n} answers",
    )
    assert command.process.poll() is None, repr(command.end())


def check_answers(ended: Ended, expected: list[list[int]]) -> None:
    """LoadGen has the answer to each sample, once, and it is the one of an undisturbed run."""
    ended.must(DONE)
    answered = sorted(ended.accuracy_log())
    assert [index for index, _ in answered] == list(range(len(expected))), repr(ended)
    assert [tokens for _, tokens in answered] == expected
    assert len(ended.outputs()) == len(expected)
