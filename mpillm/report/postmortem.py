"""Complete the files of a run whose rank 0 could not write them, or did not know why it ended.

The launcher calls `amend`. Under srun, another rank calls `amend_for_rank0`. Few runs need this, so most
imports are local.
"""

from __future__ import annotations

from pathlib import Path

from disagg.errors import ConfigError
from launch.exits import RankExit, sentence
from launch.launcher_monitor import Cause


def amend(path: Path, cause: Cause | None, code: int) -> tuple[str, int]:
    """Ensure that result.json of the run in `path` states why it ended, and that the run has an HTML report.

    A run that has ended by itself stays as it is.

    Args:
        cause: From the launcher; None if rank 0 has recorded the cause.
        code: mpirun's exit code.

    Returns:
        A text for the user, and the exit code of the run: 0 if it had ended with a valid result.
    """
    try:
        return _amended(path, cause, code)
    except (ConfigError, OSError) as error:  # a file can't be read or written
        return f"{cause.text if cause else 'the run has failed'}\n  its files stay as they are: {error}", code


def amend_for_rank0(path: Path, host: str, pid: int, rank: int, code: int) -> str:
    """Do as `amend`, on a rank that detects the exit of rank 0; return a text for the user.

    `host`, `pid`: rank 0's. All ranks may call this: the first one writes, the others return "". A cause that
    rank 0 has written stays.
    """
    from mpillm.files import read_object
    from mpillm.report.run_directory import POSTMORTEM_CLAIM, UNFINISHED

    claim = path / POSTMORTEM_CLAIM
    try:
        claim.open("x").close()
    except OSError:  # another rank writes, or this host does not have the folder
        return ""
    try:
        result = read_object(path / "result.json")
        causes = [failure.get("cause") for failure in result.get("failures") or ()]
        rank0 = sentence([RankExit(0, host, pid, "ended without an exit code")])
        cause = Cause(f"{rank0}; rank {rank} reports this", 0)
        return amend(path, cause if causes == [UNFINISHED] else None, code)[0]
    except ConfigError:
        return ""
    finally:
        claim.unlink(missing_ok=True)


def _amended(path: Path, cause: Cause | None, code: int) -> tuple[str, int]:
    from mpillm.errors import Failure
    from mpillm.files import as_written, read_object, write_json
    from mpillm.report.page.page import write_page
    from mpillm.report.run_directory import PAGE, display_path, failures_json
    from mpillm.telemetry.rank_log import how_it_ended, log_name

    result = read_object(path / "result.json")
    if result.get("status") not in ("FAILED", "SERVED"):
        is_valid = result.get("status") == "VALID"
        text = f"{cause.text}{'; the run had ended by then' if is_valid else ''}" if cause else ""
        return text, 0 if is_valid else code
    if cause:
        how = "" if cause.rank is None else f"\n{how_it_ended(path / log_name(cause.rank))}"
        failure = Failure(f"{cause.text}{how}".rstrip(), cause.rank)
        result |= {"status": "FAILED", "exit_code": code, "failures": failures_json((failure,))}
        write_json(path / "result.json", result)
    if cause or not (path / PAGE).exists():
        write_page(path)
    with as_written(path / "result.json"):
        failures = [(one["rank"], one["cause"]) for one in result.get("failures", ())]
    causes = "; ".join(f"rank {rank}: {cause}" if rank else str(cause) for rank, cause in failures)
    where = f"failed in phase '{result['phase']}'" if result.get("phase") else "failed"
    lines = f"{where}: {causes}\nsee {display_path(path / 'result.json')} and {PAGE} beside it".splitlines()
    return "\n  ".join(line.strip() for line in lines) if causes else "", code
