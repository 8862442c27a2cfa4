"""An S3 server as a process: ``python -m tests.helpers.s3_server FOLDER``. A folder below FOLDER is a bucket,
a file in it an object. It says its port in a line on stdout, and ends with its stdin.

Lists (version 2, in pages), heads and gets, by range and under a condition; that is all that obstore asks
for, of Google's store as well. Signatures are not looked at. A bucket by the name "forbidden" answers 403,
"broken" 503, and "flaky" 503 to every second request. Every request is a line in FOLDER/requests.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3
"""Objects of a list are told at a time."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True)
class S3:
    """A server that runs. ``folder``: put objects into a folder below it."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What leads obstore here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def requests(self) -> list[tuple[str, str, int]]:
        """Method, path, and how many bytes were sent, of each until now."""
        lines = (self.folder / "requests").read_text().splitlines()
        return [(method, path, int(num)) for method, path, num in (line.split() for line in lines)]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.s3_server", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield S3(folder, int(process.stdout.readline()), process)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


# --------------------------------------------------------------------------- the process


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    root: Path
    numbers = count()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        split = urlsplit(self.path)
        bucket, _, key = unquote(split.path).lstrip("/").partition("/")
        asked = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        folder = self.root / bucket
        if bucket == "forbidden":
            self._error(403, "AccessDenied")
        elif bucket == "broken" or (bucket == "flaky" and next(self.numbers) % 2 == 0):
            self._error(503, "SlowDown")
        elif not bucket or not folder.is_dir():
            self._error(404, "NoSuchBucket")
        elif not key:
            self._list(folder, asked)
        elif (folder / key).is_file():
            self._object(folder / key)
        else:
            self._error(404, "NoSuchKey")

    def _list(self, folder: Path, asked: dict[str, str]) -> None:
        prefix, after = asked.get("prefix", ""), asked.get("continuation-token", "")
        keys = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        contents = ""
        for key in keys[:PAGE]:
            file = folder / key
            contents += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(_etag(file))}</ETag><Size>{file.stat().st_size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        more = ""
        if len(keys) > PAGE:
            more = f"<NextContinuationToken>{escape(keys[PAGE - 1])}</NextContinuationToken>"
        self._send(
            200,
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{folder.name}</Name>'
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{contents}"
            "</ListBucketResult>".encode(),
        )

    def _object(self, file: Path) -> None:
        data, etag = file.read_bytes(), _etag(file)
        if self.headers.get("If-Match", etag) != etag:
            self._error(412, "PreconditionFailed")
            return
        headers = {"ETag": etag, "Last-Modified": formatdate(0, usegmt=True)}
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            begin, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
            if begin >= len(data):
                self._error(416, "InvalidRange")
                return
            headers["Content-Range"] = f"bytes {begin}-{stop - 1}/{len(data)}"
            self._send(206, data[begin:stop], headers)
        else:
            self._send(200, data, headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        whole = self.command != "HEAD"
        with (self.root / "requests").open("a") as log:
            log.write(f"{self.command} {urlsplit(self.path).path} {len(data) if whole else 0}\n")
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if whole:
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return f'"{hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()}"'


def main() -> None:
    _Handler.root = Path(sys.argv[1])
    (_Handler.root / "requests").touch()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)  # connections that are kept open are nobody's any more


if __name__ == "__main__":
    main()
