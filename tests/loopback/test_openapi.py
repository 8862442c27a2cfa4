"""Schemathesis on what the daemon says of its own API: no request that the document allows, or does not,
finds a fault; answers are as described.

It is given a token that may act. Left out: the stream, which does not end by itself and has its tests in
``test_daemon_api``; and that every request which fits the document is taken, since what makes a job is more
than a schema can say.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oobleckd.daemon import tokens
from tests.helpers.tls import make_certificate, remote_daemon

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
    "allow_header_conformance",
)  # fmt: skip


PARTS = {
    "submit": "^/v1/jobs$",
    "jobs": "^/v1/jobs/",
    "nodes": "^/v1/nodes",
    "others": "^/v1/(?!jobs|nodes|events)",
}
"""Of the API, asked at the same time. Each has a token of its own: how often one may act is limited."""
ALL_PHASES = "examples,coverage,fuzzing,stateful"


def examine(folder: Path, examples: int, submit_phases: str) -> None:
    """``examples``: the most requests of an operation that are drawn, besides those at the edges of its
    schemas; ``submit_phases``: of schemathesis, where jobs are submitted.
    """
    certificate = make_certificate(folder)
    with remote_daemon(folder, certificate, "--allow-injection") as (running, port):
        expiry = time.time() + 3600
        made = {name: tokens.make_token(folder / "keys", name, "act", expiry) for name in PARTS}
        running.process.send_signal(signal.SIGHUP)
        assert running.log_until("reloaded")
        said = running.process.stderr
        assert said is not None
        log: list[str] = []
        # A pipe that nobody reads holds up who writes.
        reader = threading.Thread(target=log.extend, args=(said,))
        reader.start()

        def asked(name: str) -> subprocess.CompletedProcess[str]:
            (folder / name).mkdir()
            phases = submit_phases if name == "submit" else ALL_PHASES
            return subprocess.run(
                [
                    Path(sys.executable).with_name("st"), "run", f"https://127.0.0.1:{port}/openapi.json",
                    "--tls-verify", certificate[0],
                    "-H", f"Authorization: Bearer {made[name]}", "--include-path-regex", PARTS[name],
                    "--checks", ",".join(CHECKS), "--rate-limit", "auto", "--phases", phases,
                    "--seed", "1", "-n", str(examples), "--no-color",
                ],
                cwd=folder / name, capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip

        with ThreadPoolExecutor() as pool:
            ended = list(pool.map(asked, PARTS))
        alive = running.process.poll() is None and running.client.healthy()
        running.process.kill()
        reader.join()
    assert not any(part.returncode for part in ended), "\n".join(part.stdout + part.stderr for part in ended)
    assert alive
    assert not [line for line in log if line.startswith("Traceback")]


def test_requests_from_the_document_find_no_fault(tmp_path: Path) -> None:
    # The edges of a job's schema are some 1,500 requests, more than a minute at 20 a second.
    examine(tmp_path, 6, "fuzzing")


@pytest.mark.slow
def test_many_requests_from_the_document_find_no_fault(tmp_path: Path) -> None:
    examine(tmp_path, 500, ALL_PHASES)
