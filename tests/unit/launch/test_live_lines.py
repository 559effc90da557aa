"""Lines that are drawn again and again, and what is written between."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
import threading

import pytest

from launch.live_lines import LiveLines, frame
from tests.helpers.screen import screen

BAR = ["  test    " + "#" * 60, "  out 5", "  now"]


def test_a_bar_longer_than_the_terminal_leaves_nothing_behind() -> None:
    """A bar is cut to one line of the terminal, and other lines go on in the next line."""
    out = io.StringIO()
    lines = LiveLines(out, out)
    for _ in range(3):
        lines.draw(BAR)
    assert screen(out.getvalue(), 40) == ["  test    " + "#" * 30, "  out 5", "  now"]
    lines.write("d" * 50 + "\n")
    assert screen(out.getvalue(), 40) == ["d" * 40, "d" * 10]


def test_a_line_that_is_cut_ends_in_dots() -> None:
    """A terminal that does not go on in the next line writes all that is left over its last column."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    with open(theirs, "w", encoding="utf-8") as out:  # noqa: PTH123
        LiveLines(out, out).draw(["  load    after 3 s  rank 1: starts, 2 s of CPU so far", "  now"])
        drawn = os.read(ours, 4096).decode()
    os.close(ours)
    assert screen(drawn, 40) == ["  load    after 3 s  rank 1: starts, 2 …", "  now"]


def test_what_a_person_types_is_cleared_with_the_bar() -> None:
    out = io.StringIO()
    lines = LiveLines(out, out)
    lines.draw(BAR)
    out.write("^C")
    lines.write("stopping\n")
    assert screen(out.getvalue()) == ["stopping"]


def test_a_line_without_an_end_is_not_taken_along() -> None:
    out = io.StringIO()
    lines = LiveLines(out, out)
    lines.draw(BAR)
    lines.write("no newline")
    lines.draw(BAR)
    lines.draw(BAR)
    lines.end()
    assert screen(out.getvalue()) == ["no newline"]


def test_no_line_of_another_stream_is_drawn_over() -> None:
    """Whichever comes first, and however the bytes are cut; what isn't text is shown as well as it can be."""
    terminal = io.StringIO()
    lines = LiveLines(terminal, terminal)
    ends = [os.pipe(), os.pipe()]
    pumps = [threading.Thread(target=lines.pump, args=(os.fdopen(end, "rb"), terminal)) for end, _ in ends]
    for pump in pumps:
        pump.start()
    for number in range(50):
        for i in frame(BAR).encode():
            os.write(ends[0][1], bytes([i]))
        os.write(ends[1][1], f"line {number} \u2026\n".encode() + b"\xff\n")
    os.write(ends[1][1], b"no newline")
    for _, end in ends:
        os.close(end)
    for pump in pumps:
        pump.join(300)
    lines.end()
    expected = [text for number in range(50) for text in (f"line {number} …", "\ufffd")]
    assert screen(terminal.getvalue()) == [*expected, "no newline"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")  # noqa: PTH110
@pytest.mark.parametrize("from_rank", [False, True])
def test_an_alarm_is_red_on_a_terminal_only(from_rank: bool) -> None:
    """The launcher writes the alarm of a rank."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal:  # noqa: PTH123
        lines = LiveLines(terminal, terminal)
        if from_rank:
            rank = io.StringIO()
            LiveLines(rank, rank).alarm("no page: \x07", sends=True)
            lines.pump(io.BytesIO(rank.getvalue().encode()), terminal)
        else:
            lines.alarm("no page: \x07")
        assert os.read(ours, 4096).decode() == "\x1b[1;31mno page: \\x07\x1b[0m\r\n"
    os.close(ours)
    pipe = io.StringIO()
    LiveLines(pipe, pipe).alarm("no page")
    assert pipe.getvalue() == "no page\n"


def test_a_reader_that_takes_no_more() -> None:
    with open("/dev/full", "w") as out:  # noqa: PTH123
        lines = LiveLines(out, out)
        lines.draw(BAR)
        lines.write("the run goes on\n")
