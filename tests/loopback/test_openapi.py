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


def examine(folder: Path, examples: int) -> None:
    """``examples``: the most requests of an operation that are drawn, besides those at the edges of its
    schemas.
    """
    certificate = make_certificate(folder)
    with remote_daemon(folder, certificate, "--allow-injection") as (running, port):
        token = tokens.make_token(folder / "keys", "schemathesis", "act", time.time() + 3600)
        running.process.send_signal(signal.SIGHUP)
        assert running.log_until("reloaded")
        said = running.process.stderr
        assert said is not None
        log: list[str] = []
        # A pipe that nobody reads holds up who writes.
        reader = threading.Thread(target=log.extend, args=(said,))
        reader.start()
        ended = subprocess.run(
            [
                Path(sys.executable).with_name("st"), "run", f"https://127.0.0.1:{port}/openapi.json",
                "--tls-verify", certificate[0],
                "-H", f"Authorization: Bearer {token}", "--exclude-path", "/v1/events", "--checks",
                ",".join(CHECKS), "--rate-limit", "auto",
                "--seed", "1", "-n", str(examples), "--no-color",
            ],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        alive = running.process.poll() is None and running.client.healthy()
        running.process.kill()
        reader.join()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert alive
    assert not [line for line in log if line.startswith("Traceback")]


def test_requests_from_the_document_find_no_fault(tmp_path: Path) -> None:
    examine(tmp_path, 10)


@pytest.mark.slow
def test_many_requests_from_the_document_find_no_fault(tmp_path: Path) -> None:
    examine(tmp_path, 500)
