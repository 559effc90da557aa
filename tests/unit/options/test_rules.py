"""The rules by which one option's value follows from others': what they read and write, and their order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.found import Found
from mpillm.options.options import parse
from mpillm.options.resolution import RULES, Rule, in_order, resolve, way

# Command lines that let each rule change something.
COMMANDS = (
    "--core_type dummy",
    "--core_type dummy --benchmarks llama2-70b --gpu_batch_size llama2-70b:5",
    "--core_type dummy --gpu_batch_size 9 --max_batch_size 5 --trtllm_build_flags max_num_tokens:99",
    "--core_type dummy --trtllm_runtime_flags batching_strategy:V1,max_num_tokens:77",
    "--core_type dummy --trtllm_runtime_flags num_ctx_servers:1,num_gen_servers:1 --mode disaggregated",
    "--core_type dummy --trtllm_build_flags tensor_parallelism:2,max_batch_size:9",
    "--model_path tiny-llama --precision fp8",
    "--use_triton --engine_dir e",
    "--core_type trtllm_disagg",
    "--server vllm",
    "--url a:1",
    "--min_duration 30000",
)


class Recorded(dict[str, Found]):
    """Values that note which are read."""

    def __init__(self, values: Mapping[str, Found]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Found:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Found]]:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "enable_chunked_context:true")
    return [parse(line.split(), Parser(prog="mpillm x"), FIELDS).stated for line in COMMANDS]


def test_rules_read_and_write_what_they_declare(stated: list[dict[str, Found]]) -> None:
    changed = set()
    for found in stated:
        for rule in RULES:
            recorded = Recorded(found)
            changes = rule.changes(recorded)
            assert recorded.read & {*found} <= {*rule.reads}, rule.name
            assert {*changes} <= {*rule.writes}, rule.name
            if any(found[name] != value for name, value in changes.items()):
                changed.add(rule.name)
            found |= changes
    assert changed == {rule.name for rule in RULES}


def _tied(one: Rule, other: Rule) -> bool:
    """Return whether the table's order decides between two."""
    forth, back = {*one.writes} & {*other.reads}, {*other.writes} & {*one.reads}
    return bool(forth) == bool(back) and bool(forth or {*one.writes} & {*other.writes})


def shuffled(rules: Sequence[Rule], random: random.Random) -> list[Rule]:
    """Return the rules in another order, but those between which the table's order decides."""
    rules = list(rules)
    for _ in range(300):
        i = random.randrange(len(rules) - 1)
        if not _tied(rules[i], rules[i + 1]):
            rules[i], rules[i + 1] = rules[i + 1], rules[i]
    return rules


def test_their_order_follows_from_what_they_read_and_write(
    stated: list[dict[str, Found]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [resolve(found) for found in stated]
    assert in_order(RULES) == RULES
    moved = 0
    for seed in range(10):
        table = shuffled(RULES, random.Random(seed))
        moved += tuple(table) != RULES
        monkeypatch.setattr("mpillm.options.resolution.RULES", in_order(table))
        assert [resolve(found) for found in stated] == expected
    assert moved > 5, "or nothing is shuffled"


def _rule(name: str, reads: str, writes: str) -> Rule:
    return Rule(name, tuple(reads), tuple(writes), "a test", lambda _: {})


def test_a_writer_comes_before_readers() -> None:
    rules = [_rule("c", "z", "w"), _rule("b", "y", "z"), _rule("a", "x", "y")]
    assert [rule.name for rule in in_order(rules)] == ["a", "b", "c"]
    both = [_rule("b", "xy", "xy"), _rule("a", "xy", "xy")]
    assert [rule.name for rule in in_order(both)] == ["b", "a"]
    with pytest.raises(ValueError, match="circle: a, b, c"):
        in_order([_rule("a", "x", "y"), _rule("b", "y", "z"), _rule("c", "z", "x")])


def test_the_way_of_a_value(stated: list[dict[str, Found]]) -> None:
    (rule, found), *more = way(stated[1], "max_batch_size")
    assert not more and rule.name.startswith("gpu_batch_size sets max_batch_size")
    assert found.value == 5 and found.origin.where == "command line: gpu_batch_size"
    assert way(stated[0], "model_path") == []
