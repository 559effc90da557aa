"""Text from outside on its way to terminals, logs and messages."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from launch.live_lines import LiveLines, frame
from launch.logs import log_handler
from launch.safe_text import one_line, printable

CLEAR = "\x1b[2J"
EVIL = f"a{CLEAR}\x1b]0;title\x07\x9b31m\u202eb\r\nc\x00"


def is_tame(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t \u3000" for c in text)


def test_control_characters_are_escaped_and_lines_stay() -> None:
    assert printable("plain\ttext\n\u3000\u4e2d\u6587\u200d") == "plain\ttext\n\u3000\u4e2d\u6587\u200d"
    assert printable(EVIL) == "a\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\u202eb\nc\\x00"
    assert printable("\x1b[31mred\x1b[0m 10%\r20%\r\n") == "red 10%\n20%\n"


def test_half_a_character_is_escaped_in_files_and_on_terminals(tmp_path: Path) -> None:
    """A file cannot hold one; the logger would print a traceback on the console."""
    assert printable("ouch \ud800") == one_line("ouch \ud800") == "ouch \\ud800"
    log = tmp_path / "log"
    code = (
        "import logging; from launch.logs import log_to\n"
        f"log_to(open({str(log)!r}, 'w', encoding='utf-8'), '%(message)s')\n"
        "logging.error('ouch %s', chr(0xd800))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert log.read_text() == "ouch \\ud800\n"


def test_a_line_has_a_limit() -> None:
    assert one_line("two\nlines") == "two\\nlines"
    assert one_line("x" * 10**6, 20) == "x" * 18 + " …"
    assert one_line(b"\xff\x1b" + b"y" * 10**6, 20) == "\\xff\\x1b" + "y" * 10 + " …"
    assert len(one_line("\x00" * 100, 50)) == 50
    assert one_line("") == one_line(b"") == ""


def test_what_a_command_prints_is_tame() -> None:
    """Also its errors, and what is written through a console: whatever a file or a server has put into it."""
    code = (
        "import sys; from mpillm import cli; from mpillm.report.console import Console\n"
        "def run(words):\n"
        "    print(words[0]); print(words[0], file=sys.stderr)\n"
        "    console = Console(); console.line(words[0]); console.answers([(1, words[0], words[0])])\n"
        "    raise cli.ConfigError(words[0])\n"
        f"sys.exit(cli.main([{EVIL!r}], run))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 2
    out, err = done.stdout.decode(), done.stderr.decode()
    assert out.count("\\x1b[2J") == 4 and err.count("\\x1b[2J") == 2
    assert is_tame(out + err), out + err


def on_terminal(columns: int, code: str) -> str:
    """Return what a terminal gets of a command that runs `code`: its stdout and stderr are that terminal."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = f"import sys\nfrom mpillm import cli\ndef run(words):\n    {code}\nsys.exit(cli.main([], run))"
    subprocess.run([sys.executable, "-c", code], stdin=end, stdout=end, stderr=end, timeout=120, check=False)
    os.close(end)
    try:
        return os.read(screen, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(screen)


def test_messages_fit_the_terminal() -> None:
    """No word is broken. Text with its own layout stays: stdout, a command line in several lines."""
    long = "a message of many words that goes on and on /and/has/a/path/that/is/longer/than/the/terminal"
    message = f"{long} end\n  indented: {long}"
    error = f"raise cli.ConfigError({message!r})"
    assert on_terminal(40, error) == (
        "mpillm: a message of many words that\n  goes on and on\n"
        "  /and/has/a/path/that/is/longer/than/the/terminal\n  end\n"
        "  indented: a message of many words that\n    goes on and on\n"
        "    /and/has/a/path/that/is/longer/than/the/terminal\n"
    )
    assert on_terminal(400, error).startswith(f"mpillm: {long} end\n")
    assert on_terminal(0, error).startswith(f"mpillm: {long} end\n"), "one whose size nobody has said"
    laid_out = f"print({long!r}); print({long + chr(92)!r}, file=sys.stderr); return 0"
    assert on_terminal(40, laid_out) == f"{long}\n{long}\\\n"


def test_a_launcher_wraps_messages_of_its_ranks() -> None:
    """A progress bar is cut."""
    code = (
        "from launch.live_lines import LiveLines; lines = LiveLines(sys.stdout, sys.stderr);"
        " lines.draw(['b' * 50]); lines.write('mpillm: ' + 'word ' * 9 + chr(10), lines.err); return 0"
    )
    output = on_terminal(40, code)
    assert f"\x1b[?7l{'b' * 38} …\x1b[?7h" in output
    assert output.endswith("mpillm: word word word word word word\n  word word word\n")


def test_a_bar_is_drawn_and_nothing_else_moves_the_cursor() -> None:
    out = io.StringIO()
    lines = LiveLines(out, out)
    lines.draw([EVIL])
    assert CLEAR not in out.getvalue() and "\x1b[?7l" in out.getvalue()
    lines.write(EVIL)
    assert CLEAR not in out.getvalue()
    assert CLEAR not in frame([EVIL]) and frame([EVIL]).count("\n") == 1


@pytest.fixture
def log() -> io.StringIO:
    """Return the text that `logger` writes."""
    return io.StringIO()


@pytest.fixture
def logger(log: io.StringIO) -> logging.Logger:
    """Return a logger of this test."""
    made = logging.Logger("test")
    made.addHandler(log_handler(log, "LOG %(levelname)s %(message)s"))
    return made


def test_no_line_of_a_stranger_looks_like_a_record(logger: logging.Logger, log: io.StringIO) -> None:
    logger.warning("from outside: %s", f"{EVIL}\nLOG ERROR forged")
    try:
        raise ValueError("no\nLOG ERROR forged")
    except ValueError:
        logger.exception("it failed")
    text = log.getvalue()
    assert is_tame(text) and "Traceback" in text
    assert [line[:9] for line in text.splitlines() if line.startswith("LOG")] == ["LOG WARNI", "LOG ERROR"]
    assert text.count("forged") == 3  # the second one in its own source, too


def test_a_record_has_a_limit(logger: logging.Logger, log: io.StringIO) -> None:
    logger.warning("%s", "x" * 10**7)
    assert len(log.getvalue()) < 20_000 and "(10000012 characters)" in log.getvalue()


@pytest.mark.long
def test_a_stranger_fills_no_disk(logger: logging.Logger, log: io.StringIO) -> None:
    """So many records come from one place in the code; others are there, and it says how many are not."""
    at = 1e9

    def say(text: str, n: int) -> None:
        for _ in range(n):
            record = logging.LogRecord("a", logging.WARNING, "file", 1, text, (), None)
            record.created = at
            logger.handle(record)

    say("bad request", 100_000)
    logger.warning("something else")
    assert log.getvalue().count("bad request") == 50 and "something else" in log.getvalue()
    at += 11
    say("bad request", 2)
    assert log.getvalue().endswith(
        "LOG WARNING bad request (before it 99950 of these were left out)\nLOG WARNING bad request\n"
    )


def test_a_log_on_a_full_disk_is_named_once() -> None:
    """Logging itself prints a stack of calls for each record."""
    code = (
        "import logging; from launch.logs import log_to\n"
        "log_to(open('/dev/full', 'w'), '%(message)s')\n"
        "for i in range(3): logging.error('record %i', i)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stderr.splitlines()[0] == "/dev/full can't be written: No space left on device"
    assert "Call stack" not in ended.stderr and ended.stderr.count("/dev/full") == 1, ended.stderr
