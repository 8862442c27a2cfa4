"""Objects in S3 and the stores of Google and Azure, read by ranges through obstore (the extra
``oobleckd[s3]``), which is imported when the first one is named.

Owns their identity (address, size and ETag), what a pattern finds among them, and what is said of a store
that does not give them. An object is read as the one that was listed: where another one lies there meanwhile,
the store refuses. Credentials, region and endpoint are the environment's, as obstore reads it. Nothing is
kept on disk, and no more than a range of each object in memory.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from oobleckd.tokens.errors import DataError, MissingPackage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

RANGE_BYTES = 4 << 20
"""Of an object are asked for at a time."""
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_MAGIC = re.compile(r"[*?[]")
_STORES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme -> how the variables begin that have its credentials."""
_RETRIES, _RETRY_WITHIN, _CONNECT_WITHIN = 8, timedelta(seconds=60), "5s"
_FIRST_WAIT = timedelta(milliseconds=300)
_MAX_SAID = 200
_STATUS = re.compile(r"status code: (\d+)")
_NO_CREDENTIALS = ("169.254.", "metadata.google.internal", "redential", "must be specified")
"""In what is said where the environment has none, and who was asked for them did not answer."""


class StoredObject(msgspec.Struct, frozen=True):
    """An object as it was when it was listed."""

    url: str
    size: int
    etag: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> str:
        """What it lies in."""
        return self.url.rpartition("/")[0]


SourcePath = Path | StoredObject


def is_url(path: str) -> bool:
    """Whether ``path`` names what lies in a store, and no file."""
    return _URL.match(path) is not None


def is_pattern_of(url: str) -> bool:
    """Whether ``url`` is to find objects by ``*``, ``?`` or ``[…]`` in its key."""
    return _MAGIC.search(_split(url)[1]) is not None


def root_of_url(url: str) -> str:
    """The folder that a pattern begins in; else ``url`` without a slash at its end."""
    bucket, key = _split(url)
    fixed = []
    for part in key.split("/"):
        if _MAGIC.search(part):
            break
        fixed.append(part)
    return "/".join((bucket, *fixed)).rstrip("/")


def objects_of(url: str) -> list[StoredObject]:
    """The object that ``url`` is; else all below it, or that it finds as a pattern, in the order of their
    keys. Raises DataError.
    """
    bucket, key = _split(url)
    store = _store(bucket)
    if key and not key.endswith("/") and not is_pattern_of(url):
        with _in_words(url):
            try:
                return [_object(bucket, _obstore().head(store, key))]
            except FileNotFoundError:
                pass
    root = root_of_url(url)
    with _in_words(root):
        pages = _obstore().list(store, prefix=root[len(bucket) + 1 :] or None, chunk_size=1000)
        found = [_object(bucket, meta) for page in pages for meta in page]
    if is_pattern_of(url):
        wanted = key.split("/")
        found = [each for each in found if _matches(each.url[len(bucket) + 1 :].split("/"), wanted)]
    return sorted(found, key=lambda each: each.url)


def open_file(file: SourcePath, buffer_bytes: int = 1 << 20) -> IO[bytes]:
    """To be read from its begin. Raises OSError; DataError where a store does not give it, also later."""
    if isinstance(file, Path):
        return file.open("rb", buffering=buffer_bytes)
    return cast("IO[bytes]", io.BufferedReader(_Ranges(file), RANGE_BYTES))


def open_places(file: StoredObject) -> IO[bytes]:
    """To be read here and there: each read is one range."""
    return cast("IO[bytes]", _Ranges(file))


def size_of(file: SourcePath) -> int:
    """In bytes. Raises OSError."""
    return file.stat().st_size if isinstance(file, Path) else file.size


class _Ranges(io.RawIOBase):
    """An object as a file, of which each read asks for one range."""

    def __init__(self, file: StoredObject) -> None:
        self._file, self._at = file, 0
        bucket, self._key = _split(file.url)
        self._store = _store(bucket)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._file.size)
        if self._at >= stop:
            return 0
        options = {"range": (self._at, stop), "if_match": self._file.etag}
        with _in_words(self._file.url):
            data = _obstore().get(self._store, self._key, options=options).bytes()
        num_bytes = len(data)
        view[:num_bytes] = memoryview(data)
        self._at += num_bytes
        return num_bytes


# --------------------------------------------------------------------------- the store


def _split(url: str) -> tuple[str, str]:
    """Bucket, with its scheme, and key. Raises DataError."""
    scheme = url.partition("://")[0]
    if scheme not in _STORES:
        raise DataError(
            f"data.path: {url} is in no store that is read",
            "s3://, gs:// and az:// are; else name a folder that this machine sees",
        )
    name, _, key = url[len(scheme) + 3 :].partition("/")
    if not name:
        raise DataError(f"data.path: {url} names no bucket", f"write {scheme}://bucket/folder")
    return f"{scheme}://{name}", key


def _obstore() -> Any:
    return _imported("obstore")


def _imported(module: str) -> Any:
    """Raises DataError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(
            "objects of s3://, gs:// and az:// are read by obstore, which is not installed",
            "pip install 'oobleckd[s3]'",
        ) from error


@cache
def _store(bucket: str) -> Any:
    from_url: Callable[..., Any] = _imported("obstore.store").from_url
    with _in_words(bucket):
        return from_url(
            bucket,
            client_options={"allow_http": True, "connect_timeout": _CONNECT_WITHIN},
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": _RETRY_WITHIN,
                "backoff": {"init_backoff": _FIRST_WAIT, "max_backoff": _RETRY_WITHIN / 6, "base": 2},
            },
        )


def _object(bucket: str, meta: Any) -> StoredObject:
    url = f"{bucket}/{meta['path']}"
    if not meta["e_tag"]:
        raise DataError(
            f"data.path: the store tells no ETag of {url}, and so not whether it is the same tomorrow",
            "copy it into a folder that this machine sees",
        )
    return StoredObject(url, meta["size"], meta["e_tag"])


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """As of a shell: ``*`` stays in its folder and finds nothing that begins with a dot, ``**`` goes through
    folders.
    """
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == "**" and _matches(names, rest):
        return True
    if not names or (names[0].startswith(".") and not first.startswith(".")):
        return False
    if first == "**":
        return _matches(names[1:], pattern)
    return fnmatchcase(names[0], first) and _matches(names[1:], rest)


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """What a store says becomes a sentence."""
    errors = _imported("obstore.exceptions")
    try:
        yield
    except errors.PreconditionError as error:
        raise DataError(
            f"{url} was changed while it was prepared", "run it again once nobody writes there"
        ) from error
    except (FileNotFoundError, errors.NotFoundError) as error:
        raise _no_such(url) from error
    except (PermissionError, errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise _denied(url) from error
    except errors.BaseError as error:
        raise _failed(url, str(error)) from error


def _no_such(url: str) -> DataError:
    return DataError(
        f"data.path: {url} does not exist", "see that bucket and key are written as they are there"
    )


def _denied(url: str) -> DataError:
    return DataError(
        f"data.path: {url} may not be read with these credentials",
        f"let them list the bucket and read its objects, or set others ({_variables(url)})",
    )


def _variables(url: str) -> str:
    return f"{_STORES[url.partition('://')[0]]}…"


def _failed(url: str, said: str) -> DataError:
    """Of a library's report of many lines."""
    s3 = url.startswith("s3:")
    if any(word in said for word in _NO_CREDENTIALS):
        public = ", or AWS_SKIP_SIGNATURE=true for a bucket that all may read" if s3 else ""
        return DataError(
            f"data.path: {url} needs credentials, and the environment has none",
            f"set them ({_variables(url)}){public}",
        )
    status = _STATUS.search(said)
    if status and status[1] in _ANSWERS:  # a list has no errors of its own for these
        return _ANSWERS[status[1]](url)
    first = said.partition("\n")[0].rpartition(" - ")[2].rstrip(".: ")[:_MAX_SAID]
    endpoint = " (AWS_ENDPOINT_URL, AWS_REGION)" if s3 else ""
    return DataError(
        f"data.path: {url} cannot be reached: {first}",
        f"see that this machine reaches the store{endpoint}, and run it again: what is done stays",
    )


_ANSWERS = {"401": _denied, "403": _denied, "404": _no_such}
