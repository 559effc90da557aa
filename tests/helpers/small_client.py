"""``python -m tests.helpers.small_client …``: a client program that does what a test says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


def main() -> int:
    """Send the requests in a file, some at once, and leave a report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--urls", required=True)
    parser.add_argument("--bodies", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--pause_s", type=float, default=0.0, help="before each request")
    parser.add_argument("--sends", type=int, default=1 << 30, help="at most so many requests")
    parser.add_argument("--breaks", type=int, default=0, help="so many of them ask for what nobody has")
    parser.add_argument("--sums", action="store_true", help="report no single requests")
    parser.add_argument("--report_text", default="", help="what the report is instead")
    parser.add_argument("--silent", action="store_true", help="leave no report")
    parser.add_argument("--hangs", action="store_true", help="before the first request")
    parser.add_argument("--worker", action="store_true", help="have a process that does nothing")
    parser.add_argument("--code", type=int, default=0, help="exit code, after it has printed 'enough'")
    options = parser.parse_args()
    if options.worker:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if options.hangs:
        time.sleep(600)
    bodies = [json.loads(line) for line in options.bodies.read_text().splitlines()][: options.sends]
    for body in bodies[: options.breaks]:
        body["model"] = "none"
    urls = options.urls.split(",")

    def ask(place: int) -> list[Any]:
        time.sleep(options.pause_s)
        return _ask(urls[place % len(urls)], bodies[place])

    began = time.perf_counter()
    with ThreadPoolExecutor(options.concurrency) as pool:
        rows = [*pool.map(ask, range(len(bodies)))]
    lasted = time.perf_counter() - began
    good = [row for row in rows if len(row) == 4]
    report = {
        "version": "1.0",
        "completed": len(good),
        "failed": len(rows) - len(good),
        "duration_s": lasted,
        "tokens": sum(row[3] for row in good),
        "ttft_ms": {"mean": 1e3 * sum(first - issued for issued, first, *_ in good) / max(1, len(good))},
    }
    if not options.sums:
        report["requests"] = rows
    if not options.silent:
        options.report.write_text(options.report_text or json.dumps(report))
    print("enough", flush=True)
    return int(options.code)


def _ask(url: str, body: dict[str, Any]) -> list[Any]:
    """Return when it was sent, when its first token came and when it ended, its tokens, and its error."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
    issued = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        text = reply.read().decode()
        return [issued, None, time.perf_counter(), 0, f"{reply.status}: {text}"]
    first, tokens = None, 0
    for line in reply:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            chunk = json.loads(line.removeprefix(b"data: "))
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    return [issued, first, time.perf_counter(), tokens]


if __name__ == "__main__":
    sys.exit(main())
