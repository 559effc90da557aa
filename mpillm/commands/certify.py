"""``python -m mpillm certify``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.commands import mpirun
from mpillm.core_names import DUMMY
from mpillm.errors import ExitCode
from mpillm.files import as_writable, as_written, write_json
from mpillm.options import json_output
from mpillm.options.command_line import Parser
from mpillm.options.field import Field
from mpillm.options.fields import FIELDS, SIZES
from mpillm.options.fields.effects import DISAGG
from mpillm.options.fields.mpirun_options import MPIRUN_OPTIONS
from mpillm.options.fields.results import OutputFields
from mpillm.options.values import Values, collect
from mpillm.report.certificate import certificate, format_certificate
from mpillm.report.repeat import repeated, without
from mpillm.report.run_directory import CERTIFICATE
from mpillm.report.run_files import RunFiles
from mpillm.report.run_list import run_path

FOLDER = "certify"  # default run directory, in the original one


def _is_for_dummy(field: Field) -> bool:
    return any(not use.cores or {*DUMMY}.intersection(use.cores) for use in field.effect.uses)


# Options of the core. Options of the dummy core and the layout of instances remain.
_CORE_GROUPS = ("checkpoint", "build", "harness", "triton", "server", "model")
_CORE_OPTIONS = {
    *("core_type", "core_options", "harness_type", "use_triton", "on_instance_loss"),
    *(field.name for field in FIELDS if field.group in _CORE_GROUPS or not _is_for_dummy(field)),
} - {"max_batch_size", "max_seq_len"}
# With --server, a rank is the client of a server, which has this layout.
_SERVER_LAYOUT = {
    *("mode", "disagg_config", *SIZES),
    *(field.name for field in FIELDS if field.effect is DISAGG),
}


class _Options(Values):
    """Options of ``certify``."""

    log_dir = OutputFields.log_dir
    mpirun_options = MPIRUN_OPTIONS


def on_dummy(args: Sequence[str], n_tokens: int) -> list[str]:
    """Return options of a run with the dummy core in place of its own; `n_tokens`: of each answer."""
    names = _CORE_OPTIONS | (_SERVER_LAYOUT if "--server" in args[::2] else set())
    return [*without(args, names), "--core_type", "dummy", "--core_options", f"output_mean:{n_tokens}"]


def main(argv: Sequence[str]) -> int:
    """Run the test with the dummy core and write `CERTIFICATE`. Returns that run's exit code."""
    parser = Parser(
        prog="mpillm certify",
        figures=True,
        usage="python -m mpillm certify RUN_DIR [options]",
        description="Measure the harness's own share of each latency and of the throughput. Runs the same"
        " test on as many ranks, with a core that answers immediately with the same length.",
        epilog=f"example:\n  python -m mpillm certify {RUNS}/first",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory")
    options = collect(argv, _Options, parser)
    run = RunFiles.read(run_path(parser.parse_args(argv).run_dir))
    if not run.result.get("samples") or run.result.get("status") not in ("VALID", "INVALID"):
        raise ConfigError(f"{run.path}: this run has no result of LoadGen, so there is nothing to certify")
    with as_written(run.path):  # report errors before the test, which may take long
        format_certificate(certificate(run, run))
        length = max(1, round(run.result["tokens"] / run.result["samples"]))
    argv, _ = repeated(run)
    folder = Path(options.log_dir or run.path / FOLDER)
    argv = on_dummy(argv, length)
    argv += ["--log_dir", str(folder), *(["--force"] if options.log_dir is None else [])]
    code = mpirun.main(["-n", str(run.world_size), *options.mpirun_options, "run", *argv])
    if code != ExitCode.DONE:
        return code
    figures = certificate(run, RunFiles.read(folder))
    with as_writable(run.path / CERTIFICATE):
        write_json(run.path / CERTIFICATE, figures)
    print("\n" + format_certificate(figures))
    json_output.set_figures(figures)
    print(f"  {run.path / CERTIFICATE}")
    return ExitCode.DONE
