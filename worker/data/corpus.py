"""Samples: which tokens micro-batch i of step t has, a pure function of (seed, step, micro-batch).

Each source of a job has rows, and an ``order`` says which row of which source a sample is. Owns how sources
are opened, and no tokenizer: text that was not prepared is trained on as bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobdata import in_source
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens as _Tokens
from oobleckd.tokens.files import file_of, read_tokens
from oobleckd.tokens.mixture import mixture_of
from oobleckd.tokens.vocabulary import check_largest, check_vocabulary
from oobleckd.words import count
from oobleckd.worker.data.inputs import (
    Opened,
    Signature,
    joined,
    opened_while,
    signature_at,
    signature_of,
    together,
)
from oobleckd.worker.data.masking import Masking
from oobleckd.worker.data.order import Place, SampleOrder
from oobleckd.worker.data.prepared import open_prepared
from oobleckd.worker.data.windows import Windows, of_job
from oobleckd.worker.models import MASKED, Batch, load_config
from oobleckd.worker.runtime.errors import UserError

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
# A file that changed within the last 3 s may change once more within the same tick of its file system's
# clock, unseen. (D-data-010)
_TICK_NS = 3_000_000_000  # more than of any file system, FAT's 2 s included
NOTHING = Opened(Input("data", "", 0, 0))
"""Of a corpus that was not read from files."""


class Corpus:
    """The rows of a job's sources, in an ``order``. ``inputs``: the files that they are mapped from."""

    def __init__(
        self, sources: Sequence[Windows], order: SampleOrder, job: Job, masking: Masking | None = None,
        inputs: Opened = NOTHING,
    ) -> None:  # fmt: skip
        self.inputs, self.sources, self._order, self._masking = inputs, tuple(sources), order, masking
        self._micro_batch, self._global_batch = job.train.micro_batch, job.train.global_batch
        self._drawn: dict[int, tuple[tuple[int, ...], ...]] = {}

    def batch(self, step: int, micro_batch: int) -> Batch:
        """A micro-batch as the model is trained on it: with tokens hidden for a masked language model."""
        tokens = self.tokens(step, micro_batch)
        return self._masking(tokens, step, micro_batch) if self._masking else Batch(tokens, tokens)

    def tokens(self, step: int, micro_batch: int) -> Tensor:
        """Tokens of a micro-batch, int64 (micro_batch_size, sequence). Raises Misread, UserError."""
        places = [self.place(sample) for sample in self.sample_ids(step, micro_batch)]
        rows = np.stack([self.sources[place.source].row(place.row) for place in places])
        return torch.from_numpy(rows.astype(np.int64))

    def place(self, sample: int) -> Place:
        """Where the sample of that number lies."""
        return self._order.place(sample)

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, ...]:
        """The samples of a micro-batch, by numbers that come once in a whole run."""
        return self.of_step(step)[micro_batch]

    def of_step(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The samples of every micro-batch of ``step``. Remembered for this step and the one before: who
        calls it early has them at once later.
        """
        if step not in self._drawn:
            firsts = range(step * self._global_batch, (step + 1) * self._global_batch, self._micro_batch)
            drawn = (tuple(self._order(first + i) for i in range(self._micro_batch)) for first in firsts)
            kept = {number: samples for number, samples in self._drawn.items() if number == step - 1}
            self._drawn = {**kept, step: tuple(drawn)}
        return self._drawn[step]

    def targets_of(self, step: int) -> tuple[int, ...]:
        """How many tokens each micro-batch of ``step`` asks for; zeros in a job that does not weigh them."""
        return tuple(self.batch(step, mb).num_targets for mb in range(len(self.of_step(step))))

    @property
    def digest(self) -> str:
        """Size and SHA-256 of the bytes that were read: equal on two nodes exactly if their corpora are. ""
        until all have been read.
        """
        return self.inputs.part.whole


def open_corpus(job: Job) -> Corpus:
    """The corpus of ``job``, mapped into memory. Raises UserError when it is missing or does not fit."""
    found = []
    for name, part in jobs_of_sources(job):
        with of_source(name):
            found.append(_open(part))
    order, inputs = order_of(job, [windows.count for windows, _ in found]), found[0][1]
    if names := [source.name for source in job.data.sources]:
        inputs = together(job.name, list(zip(names, (held for _, held in found), strict=True)))
    masking = masking_of(job, load_config(job).vocab_size)
    return Corpus([windows for windows, _ in found], order, job, masking, inputs)


def order_of(job: Job, rows: Sequence[int]) -> SampleOrder:
    """The order of a job whose sources have so many ``rows``. Raises UserError where they do not last."""
    if not job.data.sources:
        return SampleOrder(job.train.seed, rows)
    try:
        mixture = mixture_of(job, rows)
    except DataError as error:
        raise UserError(error.problem, error.hint) from error
    return SampleOrder(job.train.seed, rows, [source.name for source in job.data.sources], mixture)


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """What is wrong with a source of several is said of that one."""
    try:
        yield
    except UserError as error:
        raise UserError(in_source(name, error.problem), error.hint) from error


def _open(job: Job) -> tuple[Windows, Opened]:
    """Of a job on one source."""
    if job.data.is_prepared:
        return _open_prepared(job)
    name = job.data.path
    match job.data.kind:
        case "stdlib":
            name = "the standard library"
            inputs, tokens = _joined(stdlib_files, name, Path(sysconfig.get_path("stdlib")))
        case "text" if Path(name).is_dir():
            inputs, tokens = _joined(lambda: files_in(Path(name)), name, Path(name))
        case "text":
            inputs, tokens = _held(Path(name), _text)
        case source:
            file = file_of(Path(name), source)
            inputs, tokens = _held(file, lambda path: read_tokens(path, job.data.dtype, source))
    check_length(job, name, len(tokens))
    vocab_size = load_config(job).vocab_size
    spare, text = spare_of(job), job.data.is_bytes
    checked = partial(check_vocabulary, name=name, vocab_size=vocab_size, spare=spare, text=text)
    if not inputs.small:  # to look at all of it takes minutes
        return Windows(tokens, job.train.sequence, partial(checked, part=True)), inputs
    with of_job("data"):
        checked(tokens)
    return Windows(tokens, job.train.sequence), inputs


def _open_prepared(job: Job) -> tuple[Windows, Opened]:
    """Of what was prepared: what is to be known of its tokens its manifest says."""
    name = job.data.prepared
    if not name:
        raise UserError(
            f"data.path: {job.data.path} is not prepared", "run `oobleckctl data prepare` on the job first"
        )
    with of_job("data.prepared"), _readable("data.prepared", name):
        found = open_prepared(Path(name))
    check_length(job, name, found.manifest.tokens)
    with of_job("data"):
        check_largest(found.manifest, name, load_config(job).vocab_size, spare_of(job))
    return Windows(found.tokens, job.train.sequence, first=found.first), found.inputs


@contextmanager
def _readable(key: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}: {name}: {error.strerror or error}", "name a file or folder that every node can read"
        ) from error


def check_length(job: Job, name: str, num_tokens: int) -> None:
    """Whether ``num_tokens`` of ``name`` make a sequence. Raises UserError."""
    if num_tokens < job.train.sequence:
        raise UserError(
            f"data.path: {name} has {count(num_tokens, 'token')}, fewer than "
            f"train.sequence = {job.train.sequence}",
            "name a longer text, or make train.sequence smaller",
        )


def spare_of(job: Job) -> int:
    """How many numbers at the vocabulary's end are not for data: the mask token's."""
    return int(job.model.family in MASKED and job.data.mask_token < 0)


def _held(file: Path, read: Callable[[Path], _Tokens]) -> tuple[Opened, _Tokens]:
    """``file``, held open, and its tokens."""
    with of_job("data.path"), _readable("data.path", str(file)):
        return opened_while(file, str(file), lambda: read(file))


def masking_of(job: Job, vocab_size: int) -> Masking | None:
    """What hides tokens of ``job``; None where it names the next one. Raises UserError."""
    if job.model.family not in MASKED:
        return None
    mask_token = job.data.mask_token if job.data.mask_token >= 0 else vocab_size - 1
    if mask_token >= vocab_size:
        raise UserError(
            f"data.mask_token: {mask_token} is not in the model's vocabulary of {vocab_size}",
            "set it to the mask token's number, or leave it out for the last of the vocabulary",
        )
    return Masking(job.train.seed, mask_token, vocab_size)


def files_in(path: Path) -> list[Path]:
    """All files of a folder, in the order in which they are read. Raises UserError where there is none."""
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=Path.as_posix)
    if not files:
        raise UserError(f"data.path: {path} has no files", "name a folder with text, or a file")
    return files


def _text(path: Path) -> _Tokens:
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def stdlib_files() -> list[Path]:
    """The source files of Python's standard library, in the order in which they are read."""
    root = sysconfig.get_path("stdlib")
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        found += [f"{folder}/{name}" for name in names if name.endswith(".py")]
    return [Path(file) for file in sorted(found, key=lambda file: file[len(root) + 1 :])]


class _Known(msgspec.Struct, frozen=True):
    """What came of files whose stats have the digest ``seen``: their identity, and the cache file as it was
    when it was compared with them.
    """

    seen: str
    part: Input
    digest: str
    cache: Signature


def _joined(listed: Callable[[], Sequence[Path]], name: str, root: Path) -> tuple[Opened, _Tokens]:
    """All bytes of the ``listed`` files, from a cache file that the device processes of a host share in
    memory. That is what is mapped: whoever writes into the files changes it for those who open them later.
    They are read once, and again when a stat tells of another file or of a change.
    """
    files = listed()
    seen = _seen(lambda: files)
    try:
        # Every device read all files for every job: 90 to 180 ms of a core for the standard library, and
        # all bytes of a large folder. (D-data-010)
        known = _recall(root, seen)
        if known is not None:
            return _of_cache(known, name, lambda: _seen(listed) == seen)
    except OSError:
        pass  # it is just being written anew, or nobody may read it
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise UserError(f"data: {name}: {error}", "make it readable for the worker's user") from error
    data = np.frombuffer(b"".join(contents), np.uint8)
    digest = hashlib.sha256(data.data).hexdigest()
    named = [file.relative_to(root).as_posix() for file in files]
    part = joined(name, named, contents, f"{len(data)}-{digest}")
    path = _cached(digest)
    try:
        if not _holds(path, data):
            _write_atomically(path, data.data)
        if data.size:
            known = _Known(_digest_of(seen), part, digest, signature_of(path.stat()))
            held = _of_cache(known, name, lambda: _seen(listed) == seen)
            _remember(root, seen, known)
            return held
    except OSError:  # no cache that can be written: every process keeps a copy of its own
        pass
    return Opened(part, fresh=lambda: _seen(listed) == seen), data


def _of_cache(known: _Known, name: str, fresh: Callable[[], bool]) -> tuple[Opened, _Tokens]:
    """Raises OSError where it is another file by now."""
    path = _cached(known.digest)
    held, tokens = opened_while(path, name, lambda: np.memmap(path, np.uint8, mode="r"), known.part)
    if held.stat() != (known.cache,):
        held.close()
        raise OSError(f"{path} was changed")
    held.watched, held.fresh = False, fresh
    return held, tokens


def _recall(root: Path, seen: Mapping[Path, Signature | None]) -> _Known | None:
    """What is known of the files under ``root`` if they are as ``seen``; None where nothing is. Raises
    OSError.
    """
    try:
        known = msgspec.json.decode(_note_of(root).read_bytes(), type=_Known)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return known if seen and known.seen == _digest_of(seen) else None


def _remember(root: Path, seen: Mapping[Path, Signature | None], known: _Known) -> None:
    """Note it, unless a file changed so lately that it may change again within the same tick of its file
    system's clock. Raises OSError.
    """
    newest = max((max(each[3:]) if each else 2**63 for each in seen.values()), default=2**63)
    if newest < time.time_ns() - _TICK_NS:
        _write_atomically(_note_of(root), msgspec.json.encode(known))


def _note_of(root: Path) -> Path:
    return _cache_dir() / f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.known"


def _cached(digest: str) -> Path:
    return _cache_dir() / f"{digest}.bytes"


def _digest_of(seen: Mapping[Path, Signature | None]) -> str:
    return hashlib.sha256(
        repr([(str(path), each and tuple(each)) for path, each in seen.items()]).encode()
    ).hexdigest()


def _seen(listed: Callable[[], Sequence[Path]]) -> dict[Path, Signature | None]:
    """The files and what a stat tells of them (None: gone meanwhile)."""
    try:
        return {path: signature_at(path) for path in listed()}
    except (OSError, UserError):
        return {}


def _holds(path: Path, data: npt.NDArray[np.uint8]) -> bool:
    return (
        path.exists()
        and path.stat().st_size == len(data)
        and np.array_equal(np.fromfile(path, np.uint8), data)
    )


def _cache_dir() -> Path:
    """Of systemd's unit (CacheDirectory=), else of the user."""
    service = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    if service:
        return Path(service)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oobleck"


def _write_atomically(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)
