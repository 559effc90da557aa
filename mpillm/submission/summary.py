"""What the user reads of a submission that was made: its results, what is missing, how to check it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mpillm.submission.package import Submission
from mpillm.submission.rules import Problem
from mpillm.submission.system import unknown
from mpillm.workloads.rounds import Round


def summary(submission: Submission, of_round: Round | None, problems: Sequence[Problem], output: Path) -> str:
    """Return a line for each result and problem, and the checker's command line.

    `of_round`: the one whose seeds the runs have.
    """
    lines = [
        f"  {result.benchmark} {result.scenario}: {', '.join(result.runs)}" for result in submission.results
    ]
    if blank := unknown(dict(submission.system)):
        names = ", ".join(blank)
        lines.append(f'  the system description has "N/A" for: {names} (give them with --system_description)')
    for problem in problems:
        why = (
            f"rejected by the checker ({', '.join(problem.checks)})"
            if problem.checks
            else "against the rules"
        )
        lines.append(f"  {why}: {problem.text}")
    checker = "python3 -m inference.tools.submission.submission_checker.main"
    return "\n".join(
        [
            *lines,
            "  the checker, from a clone of mlcommons/inference in the current directory:",
            f"    {checker} --input {shlex.quote(str(output))}"
            f" --version {of_round.name if of_round else 'VERSION'} --submitter {submission.submitter}",
            "  keep the run directories: MLCommons may ask for the whole accuracy logs",
        ]
    )
