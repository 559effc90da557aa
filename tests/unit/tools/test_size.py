"""What `make size` counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.size import Size, main, package_sizes, read_table, size, table

CODE = '''"""A docstring
of two lines."""

import os  # a comment

# another


class A:
    """A docstring."""

    text = """no
docstring"""  # two lines, one token

    def f(self) -> str:
        r"""A docstring."""
        "no docstring"
        return f"{self.text!r:>{os.getpid()}} {f'{1}'}"
'''


def test_code_is_what_is_no_comment_and_no_docstring() -> None:
    #                import A text f "no" return
    assert size(CODE) == Size(1 + 1 + 2 + 1 + 1 + 1, 2 + 3 + 3 + 8 + 1 + 2)
    assert size("") == Size(0, 0)


def test_an_f_string_is_one_token_in_every_python() -> None:
    assert size("f\"{a} {b + f'{c}'}\"\n").tokens == size('"abc"\n"def"\n').tokens == 1


def test_package_layers_beside_those_of_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {
        "disagg/a.py": "a = 1\n",
        "mpillm/b.py": "b = 1\nc = 2\n",
        "mpillm/nvidia/c.py": "c = 1\n",
        "mpillm/room/__init__.py": '"""Nothing."""\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").mkdir()
    assert package_sizes(tmp_path) == {
        "disagg": Size(1, 3),
        "mpillm": Size(2, 6),
        "mpillm/nvidia": Size(1, 3),
        "mpillm/room": Size(0, 0),
    }
    main(["--root", str(tmp_path), "--write", "0.1.0"])
    assert read_table(tmp_path / "docs" / "size.txt") == ("0.1.0", package_sizes(tmp_path))
    (tmp_path / "mpillm" / "b.py").rename(tmp_path / "mpillm" / "room" / "b.py")
    (tmp_path / "disagg" / "a.py").write_text("a = 1\nb = 1\n")
    main(["--root", str(tmp_path)])
    rows = {words[0]: words[1:] for words in map(str.split, capsys.readouterr().out.splitlines()[1:])}
    assert rows == {
        "disagg": ["2", "1", "6", "3", "+100.0%"],
        "mpillm": ["0", "2", "0", "6", "gone"],
        "mpillm/nvidia": ["1", "1", "3", "3", "+0.0%"],
        "mpillm/room": ["2", "0", "6", "0", "new"],
        "core": ["4", "3", "12", "9", "+33.3%"],
        "all": ["5", "4", "15", "12", "+25.0%"],
    }


def test_the_committed_table() -> None:
    """The table can be read, and adds up."""
    release, before = read_table(Path(__file__).parents[3] / "docs" / "size.txt")
    assert release and sum(before.values(), Size()).tokens > 0
    assert table(release, before, before).splitlines()[-1].endswith("+0.0%")
