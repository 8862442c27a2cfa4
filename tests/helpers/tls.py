"""A certificate for this machine, and a daemon whose API is on TCP."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oobleckd.host.ports import free_port
from tests.helpers.daemons import Daemon, daemon


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1, with its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@contextmanager
def remote_daemon(folder: Path, certificate: tuple[Path, Path], *flags: str) -> Iterator[tuple[Daemon, int]]:
    """A daemon that serves its API over HTTPS, and the port."""
    cert, key = certificate
    port = free_port()
    api = ("--api", f"127.0.0.1:{port}", "--tls-cert", str(cert), "--tls-key", str(key))
    with daemon(folder, *api, *flags) as running:
        yield running, port
