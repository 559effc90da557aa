"""The reference's own evaluator of an accuracy run, as a child process.

The scripts of deepseek-r1 and gpt-oss-120b in mlcommons/inference read LoadGen's accuracy log and the
published data frame. They execute code that the model wrote (LiveCodeBench).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ConfigError
from launch.children import Children, end_of
from launch.command import Command
from mpillm.data.preprocessed.loader import loader_of
from mpillm.errors import StageError
from mpillm.files import as_writable
from mpillm.loadgen.logs import ACCURACY
from mpillm.options.field import option
from mpillm.options.parsers import seconds
from mpillm.options.values import Values
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.references import read_references
from mpillm.submission.score_run import data_set_of, tokenizer_folder

LOG = "evaluator.log"
_MAX_CHARS = 300  # of the evaluator's output in a message
_STOP_S = 5.0
_LOOK_S = 0.2
_IMPORT_ERROR = re.compile(r"^(?:ModuleNotFoundError|ImportError): .*", re.MULTILINE)
# By a part of a data set's name: what the evaluator needs below submodules/, and a call of eval_accuracy.py
# that fails without it. The evaluator itself would count the answers as wrong.
_NEEDS = {
    "livecodebench": ("LiveCodeBench/lcb_runner", "load_lcb_benchmark()"),
    "math500": ("prm800k/prm800k", "evaluate_math500('1', '1')"),
}


class EvaluatorOptions(Values, group="evaluator"):
    """Options of the reference's evaluator."""

    evaluated = option(
        "deepseek-r1, gpt-oss-120b: a file with the output of the reference's evaluator, if it ran elsewhere"
    )
    inference_repo = option(
        "deepseek-r1, gpt-oss-120b: a clone of mlcommons/inference with its submodules, whose evaluator"
        " scores the answers. It executes code that the model wrote: use a container"
    )
    evaluator_python = option(
        "a Python with the evaluator's requirements [default: the one that runs mpillm]"
    )
    evaluator_timeout = option("longest time of the evaluator, seconds", seconds, default=14400.0)


@dataclass(frozen=True)
class Evaluator:
    """An evaluator with its inputs."""

    script: Path
    arguments: tuple[str, ...]
    needs: tuple[str, ...]  # keys of `_NEEDS`
    python: str
    tokenizer: Path  # a folder
    hub_name: str  # by which the script loads the tokenizer
    log: Path
    timeout_s: float
    max_log_bytes: int = 64 << 20

    def run(self) -> Path:
        """Run the evaluator; this may take hours. Returns the file with its output, in the run directory.

        Raises StageError if it fails, runs too long, or prints too much.
        """
        check = "import sys; sys.path.insert(0, sys.argv[1]); import eval_accuracy"
        check = "; ".join([check, *(f"eval_accuracy.{_NEEDS[name][1]}" for name in self.needs)])
        commands = (
            Command((self.python, "-c", check, str(self.script.parent))),
            Command((self.python, str(self.script), *self.arguments)),
        )
        until = time.monotonic() + self.timeout_s
        with tempfile.TemporaryDirectory(prefix="mpillm-evaluator-") as folder:
            # A folder with this name in the working directory takes precedence over the hub.
            link = Path(folder, self.hub_name)
            link.parent.mkdir(parents=True)
            link.symlink_to(self.tokenizer)
            with as_writable(self.log):
                self.log.write_text("", encoding="utf-8")
            for command in commands:
                self._run(command, Path(folder), until)
        return self.log

    def _run(self, command: Command, folder: Path, until: float) -> None:
        with as_writable(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(f"$ {command}\n")
        with Children(_STOP_S) as children:
            child = children.start(
                self.script.name, command.argv, command.environment(), self.log, cwd=folder
            )
            while children.wait(child, _LOOK_S) is None:
                if time.monotonic() > until:
                    self._fail(f"did not end within {self.timeout_s:g} s (--evaluator_timeout)")
                if self.log.stat().st_size > self.max_log_bytes:
                    self._fail(f"printed more than {self.max_log_bytes:,} bytes")
        if child.process.returncode == 0:
            return
        end = end_of(self.log)
        if missing := _IMPORT_ERROR.findall(end):
            self._fail(
                f"{missing[-1][:_MAX_CHARS]}; install the requirements of {self.script.parent} in"
                f" {self.python}, or name another Python with --evaluator_python"
            )
        self._fail(
            f"exit code {child.process.returncode}: {end.rstrip().rpartition(chr(10))[2][:_MAX_CHARS]}"
        )

    def _fail(self, why: str) -> None:
        raise StageError(f"{self.script.name}: {why}; its output: {self.log}")


def evaluator_of(
    run: JudgedRun, options: EvaluatorOptions, dataset_path: str | None, tokenizer: str | None
) -> Evaluator | None:
    """Return the evaluator of a run; None without --inference_repo.

    Raises ConfigError if an option has no effect, or if the evaluator lacks an input or a submodule.
    """
    accuracy, repo = run.workload.accuracy, options.inference_repo
    if repo is None:
        for name in ("evaluator_python", "evaluator_timeout"):
            if options.is_user_set(name):
                raise ConfigError(f"--{name}: only with --inference_repo")
        for name, value in (("dataset_path", dataset_path), ("tokenizer", tokenizer)):
            if accuracy.evaluator and value:
                raise ConfigError(f"--{name}: {run.benchmark} needs it only with --inference_repo")
        return None
    if not accuracy.evaluator:
        raise ConfigError(f"--inference_repo {repo}: the answers of {run.benchmark} are scored without it")
    if options.evaluated:
        raise ConfigError("--evaluated and --inference_repo: name only one of them")
    script = Path(repo, accuracy.evaluator).absolute()
    if not script.is_file():
        raise ConfigError(
            f"--inference_repo {repo}: no {accuracy.evaluator}; name a clone of mlcommons/inference"
        )
    data_set = Path(data_set_of(run, dataset_path))
    frame = None if data_set.suffix == ".jsonl" else loader_of(data_set, run.workload).frame
    if frame is None:
        raise ConfigError(
            f"{data_set}: {script.name} reads the published data frame; name it: --dataset_path"
        )
    names = {row["dataset"].lower() for row in read_references(run.workload, str(frame))}
    needs = tuple(part for part in _NEEDS if any(part in name for name in names))
    for part in needs:
        if not (needed := script.parent / "submodules" / _NEEDS[part][0]).is_dir():
            raise ConfigError(
                f"--inference_repo {repo}: no {needed}, which scores {part}; get the submodules:"
                f" `git -C {shlex.quote(repo)} submodule update --init language/deepseek-r1/submodules`"
            )
    folder = tokenizer_folder(run, tokenizer)
    if folder is None:
        raise ConfigError(f"{run.path}: the tiny model has no tokenizer.json; name one with --tokenizer")
    log_option, frame_option = accuracy.evaluator_options
    python = options.evaluator_python or sys.executable
    return Evaluator(
        script=script,
        arguments=(log_option, str((run.path / ACCURACY).absolute()), frame_option, str(frame.absolute())),
        needs=needs,
        python=str(Path(python).absolute()) if os.sep in python else python,
        tokenizer=folder.absolute(),
        hub_name=run.workload.hf_model,
        log=run.path.absolute() / LOG,
        timeout_s=options.evaluator_timeout,
    )
