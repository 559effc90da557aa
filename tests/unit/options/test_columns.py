"""Text for terminals of 80 columns."""

from __future__ import annotations

from mpillm.options.columns import WIDTH, indented, table


def test_prose_continues_below_itself() -> None:
    text = " ".join(f"word{i}" for i in range(30))
    lines = indented("  name   ", text).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("  name   word0 ")
    assert all(line.startswith(" " * 9 + "word") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"name {text}"
    assert indented("  name   ", "short") == "  name   short"
    assert indented("  name   ", "") == "  name"


def test_a_path_is_never_broken() -> None:
    path = "/a-folder/" + "x-y/" * 30
    assert path in indented("  page  ", f"in {path}").splitlines()[1]


def test_a_table_that_is_too_wide_continues_below_itself() -> None:
    rows = [["name", "of", *(f"column {i}" for i in range(12))]]
    rows += [[f"row {i}", "x", *(str(100 * i + j) for j in range(12))] for i in range(3)]
    blocks = table(rows, 2, 2).split("\n\n")
    assert len(blocks) == 2
    assert all(len(line) <= WIDTH for block in blocks for line in block.splitlines())
    for block in blocks:
        first, *others = block.splitlines()
        assert first.startswith("name   of  column")
        assert [line[:8] for line in others] == [f"row {i}  x" for i in range(3)]
    assert blocks[0].count("column") + blocks[1].count("column") == 12
    assert "211" in blocks[1].splitlines()[3] and "200" in blocks[0].splitlines()[3]


def test_one_column_may_be_too_wide() -> None:
    assert table([["a", "b", "c"], ["1", "x" * 100, "3"]]).splitlines() == [
        "a" + " " * 101 + "b",
        "1  " + "x" * 100,
        "",
        "a  c",
        "1  3",
    ]


def test_a_row_is_a_line() -> None:
    assert table([["a", "b"], ["1\n2\r3", "4"]]).splitlines() == ["a      b", "1 2 3  4"]
