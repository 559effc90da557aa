"""``python -m mpillm certify``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.commands import mpirun
from mpillm.errors import ExitCode
from mpillm.files import as_writable, as_written, write_json
from mpillm.options import json_output
from mpillm.options.command_line import Parser
from mpillm.options.fields import BY_NAME
from mpillm.options.fields.mpirun_options import MPIRUN_OPTIONS
from mpillm.options.fields.results import OutputFields
from mpillm.options.values import Values, collect
from mpillm.report.certificate import certificate, format_certificate
from mpillm.report.repeat import repeated
from mpillm.report.run_directory import CERTIFICATE
from mpillm.report.run_files import RunFiles
from mpillm.report.run_list import run_path

BESIDE = "certify"  # the run's folder in the run directory
# Options of what computes: the dummy core takes none of them, and its instances are laid out alike.
_OF_THE_CORE = ("checkpoint", "build", "harness", "triton", "server", "model")
_KEPT = ("enable_chunked_context", "max_batch_size", "max_num_tokens", "max_seq_len")


class _Options(Values):
    """Options of ``certify``."""

    log_dir = OutputFields.log_dir
    mpirun_options = MPIRUN_OPTIONS


def main(argv: Sequence[str]) -> int:
    """Run the test with a core that costs nothing; write `CERTIFICATE`. Returns that run's exit code."""
    parser = Parser(
        prog="mpillm certify",
        figures=True,
        usage="python -m mpillm certify RUN_DIR [options]",
        description="Run the same test on as many ranks, with a core that takes no time for answers of"
        " the same length, and state how much of each latency and of the throughput is the harness's own.",
        epilog=f"example:\n  python -m mpillm certify {RUNS}/first",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = RunFiles.read(run_path(parser.parse_args(argv).run_dir))
    if not run.result.get("samples") or run.result.get("status") not in ("VALID", "INVALID"):
        raise ConfigError(f"{run.path}: this run has no result of LoadGen, so there is nothing to certify")
    with as_written(run.path):  # before the test, which may take long
        format_certificate(certificate(run, run))
        length = max(1, round(run.result["tokens"] / run.result["samples"]))
    words, _ = repeated(run)
    folder = Path(options.log_dir or run.path / BESIDE)
    words = [*_of_the_test(words), "--core_type", "dummy", "--core_options", f"output_mean:{length}"]
    words += ["--log_dir", str(folder), *(["--force"] if options.log_dir is None else [])]
    code = mpirun.main(["-n", str(run.world_size), *options.mpirun_options, "run", *words])
    if code != ExitCode.DONE:
        return code
    found = certificate(run, RunFiles.read(folder))
    with as_writable(run.path / CERTIFICATE):
        write_json(run.path / CERTIFICATE, found)
    print("\n" + format_certificate(found))
    json_output.set_figures(found)
    print(f"  {run.path / CERTIFICATE}")
    return ExitCode.DONE


def _of_the_test(words: list[str]) -> list[str]:
    """Drop the options that are about the core."""
    kept: list[str] = []
    for name, value in zip(words[::2], words[1::2], strict=True):
        field = BY_NAME[name.removeprefix("--")]
        if field.name in ("core_type", "core_options") or (
            field.group in _OF_THE_CORE and field.name not in _KEPT
        ):
            continue
        kept += [name, value]
    return kept
