"""The LoadGen settings of MLCommons' compliance tests: ``audit.config`` in mlcommons/inference."""

from __future__ import annotations

from pathlib import Path

from disagg.errors import ConfigError
from disagg.text_file import check_file

# They override every other LoadGen setting; the sample indices follow no permutation.
_ALL = {"mode": 2, "accuracy_log_rng_seed": 720381539243781796, "min_duration": 0}
_ALL |= {"sample_concatenate_permutation": 0}
AUDITS: dict[str, dict[str, int]] = {
    "TEST06": {**_ALL, "accuracy_log_sampling_target": 100, "min_query_count": 100},
    # Each sample of the test's own data set once.
    "TEST07": {
        **_ALL,
        "accuracy_log_sampling_target": 990,
        "min_query_count": 990,
        "performance_issue_unique": 1,
    },
    "TEST09": {
        **_ALL,
        "accuracy_log_sampling_target": 10000,
        "min_query_count": 6396,
        "performance_issue_unique": 1,
    },
}
"""LoadGen's settings, by test."""


def prepare_audit(
    compliance_test: str | None, audit_conf: str | None, run_directory: Path, n_samples: int | None = None
) -> str:
    """Write a compliance run's ``audit.config`` and return its path; "" for another run. Raises OSError.

    `n_samples`: size of a scaled-down data set, which is smaller than the test's minimum.
    """
    file = run_directory / "audit.config"
    if audit_conf:
        check_file(audit_conf, f"--audit_conf {audit_conf}")
        try:
            text = Path(audit_conf).read_bytes()
        except OSError as error:
            raise ConfigError(f"--audit_conf {audit_conf}: {error.strerror}", about=["audit_conf"]) from error
        if Path(audit_conf).resolve() != file.resolve():
            file.write_bytes(text)
    elif compliance_test:
        settings = dict(AUDITS[compliance_test])
        if n_samples is not None and "performance_issue_unique" in settings:
            settings["min_query_count"] = min(n_samples, settings["min_query_count"])
        lines = (f"*.*.{key} = {value}\n" for key, value in settings.items())
        file.write_text("".join(lines), encoding="utf-8")
    else:
        return ""  # a file of an earlier run does not count
    return str(file)
