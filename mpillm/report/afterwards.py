"""The files of a run whose rank 0 could not finish them, or did not know why it ended: its launcher does, or
another rank under srun, which knows nothing of runs.

What this needs is imported only then.
"""

from __future__ import annotations

from pathlib import Path

from disagg.errors import ConfigError
from launch.exits import RankExit, sentence
from launch.witness import Cause


def amend(path: Path, cause: Cause | None, code: int) -> tuple[str, int]:
    """See that result.json of the run in `path` says why it ended, and that the run has a page.

    `cause`: what its launcher knows; None: rank 0 has said why. `code`: mpirun's exit code. Returns a text
    for the user, and the exit code of the run: 0 if it had ended with a valid result. A run that has ended is
    left as it is.
    """
    try:
        return _amended(path, cause, code)
    except (ConfigError, OSError) as error:  # a file can't be read or written
        return f"{cause.text if cause else 'the run has failed'}\n  its files stay as they are: {error}", code


def stand_in(path: Path, host: str, pid: int, rank: int, code: int) -> str:
    """Do as `amend`, on a rank that finds that rank 0 has ended; return a text for the user.

    `host`, `pid`: rank 0's. All ranks may call this; the first one does it, for the others it is "". A cause
    that rank 0 has written stays.
    """
    from mpillm.files import read_object
    from mpillm.report.run_directory import STANDS_IN, UNFINISHED

    claim = path / STANDS_IN
    try:
        claim.open("x").close()
    except OSError:  # another rank does it, or the folder is not seen here
        return ""
    try:
        result = read_object(path / "result.json")
        said = [failure.get("cause") for failure in result.get("failures") or ()]
        rank0 = sentence([RankExit(0, host, pid, "ended without an exit code")])
        cause = Cause(f"{rank0}; rank {rank} says so", 0)
        return amend(path, cause if said == [UNFINISHED] else None, code)[0]
    except ConfigError:
        return ""
    finally:
        claim.unlink(missing_ok=True)


def _amended(path: Path, cause: Cause | None, code: int) -> tuple[str, int]:
    from mpillm.errors import Failure
    from mpillm.files import as_written, read_object, write_json
    from mpillm.report.page.page import write_page
    from mpillm.report.ranklog import how_it_ended, log_name
    from mpillm.report.run_directory import PAGE, failures_json, path_shown

    result = read_object(path / "result.json")
    if result.get("status") not in ("FAILED", "SERVED"):
        over = result.get("status") == "VALID"
        text = f"{cause.text}{'; the run had ended by then' if over else ''}" if cause else ""
        return text, 0 if over else code
    if cause:
        how = "" if cause.rank is None else f"\n{how_it_ended(path / log_name(cause.rank))}"
        failure = Failure(f"{cause.text}{how}".rstrip(), cause.rank)
        result |= {"status": "FAILED", "exit_code": code, "failures": failures_json((failure,))}
        write_json(path / "result.json", result)
    if cause or not (path / PAGE).exists():
        write_page(path)
    with as_written(path / "result.json"):
        told = "; ".join(
            failure["cause"]
            if failure["rank"] in (None, 0)
            else f"rank {failure['rank']}: {failure['cause']}"
            for failure in result.get("failures", ())
        )
    where = f"failed in phase '{result['phase']}'" if result.get("phase") else "failed"
    lines = f"{where}: {told}\nsee {path_shown(path / 'result.json')} and {PAGE} beside it".splitlines()
    return "\n  ".join(line.strip() for line in lines) if told else "", code
