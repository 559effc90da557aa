"""Blocks in host memory are found, loaded and replaced."""

from __future__ import annotations

from mpillm.engine.schedule.host_blocks import BlockCopy, HostBlocks
from mpillm.engine.schedule.prefix_cache import PrefixCache
from tests.helpers.hashing_engine import answer, make_engine, run, sequence


def test_content_without_room_is_loaded_again() -> None:
    engine = make_engine(n_blocks=10, reuse=True, host_blocks=10)
    assert isinstance(engine.blocks, PrefixCache) and engine.blocks.host is not None
    first, other = list(range(30)), list(range(40, 70))
    for i, prompt in enumerate((first, other, [*first, 5])):  # each needs eight of the ten blocks
        engine.add(s := sequence(i, prompt, 2))
        run(engine)
        assert s.output == answer(prompt, 2)
    assert s.n_reused == 28
    assert engine.blocks.host.loaded_blocks > 0


def test_a_reset_cache_finds_nothing() -> None:
    engine = make_engine(n_blocks=10, reuse=True, host_blocks=10)
    prompts = [list(range(30)), list(range(40, 70))]
    for i, prompt in enumerate(prompts):
        engine.add(sequence(i, prompt, 2))
        run(engine)
    engine.reset_prefix_cache()
    for i, prompt in enumerate([*prompts, *prompts]):
        engine.add(s := sequence(2 + i, prompt, 2))
        run(engine)
        assert s.output == answer(prompt, 2)
        assert (s.n_reused > 0) == (i >= 2)


def test_less_is_found_without_host_memory() -> None:
    engine = make_engine(n_blocks=10, reuse=True)
    first, other = list(range(30)), list(range(40, 70))
    for i, prompt in enumerate((first, other, [*first, 5])):
        engine.add(s := sequence(i, prompt, 2))
        run(engine)
    assert s.n_reused < 28


def test_the_longest_unused_content_is_replaced() -> None:
    host = HostBlocks(2)
    host.save(b"a", 1)
    host.save(b"b", 2)
    host.save(b"a", 3)  # host memory has it already
    host.save(b"c", 4)
    assert b"a" in host and b"c" in host and b"b" not in host
    (a, b, c) = host.take_copies()
    assert [a.block, b.block, c.block] == [1, 2, 4] and c.host_block == b.host_block
    assert host.take_copies() == []


def test_held_content_is_not_replaced() -> None:
    host = HostBlocks(1)
    host.save(b"a", 1)
    held = host.hold([b"a"])
    host.save(b"b", 2)  # there is no room
    host.load([b"a"], held, [5])
    assert b"a" in host and b"b" not in host
    assert host.take_copies() == [BlockCopy(1, held[0], False), BlockCopy(5, held[0], True)]
    assert host.loaded_blocks == 1
