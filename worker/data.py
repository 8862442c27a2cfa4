"""Samples: which tokens micro-batch i of step t has, a pure function of (seed, step, micro-batch).

The corpus is cut into non-overlapping windows of one sequence. Every pass over it visits all windows in an
order of its own, a seeded permutation that is computed and never stored (a Feistel network with cycle
walking, Black and Rogaway 2002), so no window is read twice within a pass. Owns no tokenizer: text is
trained on as bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from worker.errors import UserError
from worker.masking import Masking
from worker.models import MASKED, Batch, load_config
from worker.tokenfile import Tokens as _Tokens
from worker.tokenfile import check_vocabulary, read_tokens

_BLOCK = 1 << 20
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_NUM_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1


class Corpus:
    """All tokens of a job's data, in windows of ``sequence`` tokens."""

    def __init__(self, tokens: _Tokens, job: Job, name: str, masking: Masking | None = None) -> None:
        train = job.train
        # Of the plain kind: to cut a window out of numpy's mapped one takes ten times as long.
        self._tokens = tokens.view(np.ndarray)
        self._name = name
        self._sequence, self._micro_batch, self._global_batch = (
            train.sequence,
            train.micro_batch,
            train.global_batch,
        )
        self._seed = train.seed
        self._masking = masking
        self.num_windows = len(tokens) // train.sequence
        self._order: tuple[int, Permutation] | None = None
        self._drawn: dict[int, tuple[tuple[int, ...], ...]] = {}

    def batch(self, step: int, micro_batch: int) -> Batch:
        """A micro-batch as the model is trained on it: with tokens hidden for a masked language model."""
        tokens = self.tokens(step, micro_batch)
        return self._masking(tokens, step, micro_batch) if self._masking else Batch(tokens, tokens)

    def tokens(self, step: int, micro_batch: int) -> Tensor:
        """Tokens of a micro-batch, int64 (micro_batch_size, sequence)."""
        windows = [sample % self.num_windows for sample in self.sample_ids(step, micro_batch)]
        rows = [self._tokens[w * self._sequence : (w + 1) * self._sequence] for w in windows]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, ...]:
        """The samples of a micro-batch: pass * windows + window, so an id comes once in a whole run."""
        return self.of_step(step)[micro_batch]

    def of_step(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The samples of every micro-batch of ``step``. Remembered for this step and the one before: who calls it early has them at once later."""
        if step not in self._drawn:
            firsts = range(step * self._global_batch, (step + 1) * self._global_batch, self._micro_batch)
            drawn = (tuple(self._sample(first + i) for i in range(self._micro_batch)) for first in firsts)
            kept = {number: samples for number, samples in self._drawn.items() if number == step - 1}
            self._drawn = {**kept, step: tuple(drawn)}
        return self._drawn[step]

    @cached_property
    def digest(self) -> str:
        """Size and SHA-256 of the tokens' bytes: equal on two nodes exactly if their corpora are."""
        whole = hashlib.sha256()
        data = self._tokens.view(np.uint8)
        for start in range(0, len(data), _BLOCK):
            whole.update(data[start : start + _BLOCK].data)
        return f"{len(data)}-{whole.hexdigest()}"

    def _sample(self, ordinal: int) -> int:
        number, position = divmod(ordinal, self.num_windows)
        if self._order is None or self._order[0] != number:
            self._order = number, Permutation(self.num_windows, f"{self._seed}:{number}")
        return number * self.num_windows + self._order[1](position)


@dataclass(slots=True)
class Permutation:
    """A seeded permutation of ``range(size)``: call it with a position.

    A Feistel network permutes the smallest power of four that is not below ``size``; positions that fall
    outside are sent through again until they fall inside, fewer than four times on average.
    """

    size: int
    keys: tuple[int, ...]
    half_bits: int

    def __init__(self, size: int, seed: str) -> None:
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(f"order:{seed}".encode(), digest_size=8 * _NUM_FEISTEL_ROUNDS).digest()
        self.keys = tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8))

    def __call__(self, position: int) -> int:
        """Where ``position`` goes."""
        position = self._network(position)
        while position >= self.size:
            position = self._network(position)
        return position

    def _network(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half_bits | right


def _mix(value: int) -> int:
    """A well-mixed 64-bit hash (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def open_corpus(job: Job) -> Corpus:
    """The corpus of ``job``, mapped into memory. Raises UserError when it is missing or does not fit."""
    tokens: _Tokens
    match job.data.source:
        case "stdlib":
            name = "the standard library"
            tokens = _joined(_stdlib_files(), name)
        case "text":
            name = job.data.path
            tokens = _text(Path(name))
        case "tokens":
            name = job.data.path
            tokens = read_tokens(Path(name), job.data.dtype)
    if len(tokens) < job.train.sequence:
        raise UserError(
            f"data.path: {name} has {len(tokens)} tokens, fewer than train.sequence = {job.train.sequence}",
            "name a longer text, or make train.sequence smaller",
        )
    vocab_size = load_config(job).vocab_size
    masked = job.model.family in MASKED
    spare, text = int(masked and job.data.mask_token < 0), job.data.source != "tokens"
    check_vocabulary(tokens, name, vocab_size, spare, text=text)
    return Corpus(tokens, job, name, _masking(job, vocab_size) if masked else None)


def _masking(job: Job, vocab_size: int) -> Masking:
    mask_token = job.data.mask_token if job.data.mask_token >= 0 else vocab_size - 1
    if mask_token >= vocab_size:
        raise UserError(
            f"data.mask_token: {mask_token} is not in the model's vocabulary of {vocab_size}",
            "set it to the mask token's number, or leave it out for the last of the vocabulary",
        )
    return Masking(job.train.seed, mask_token, vocab_size)


def _text(path: Path) -> _Tokens:
    if path.is_dir():
        files = sorted((file for file in path.rglob("*") if file.is_file()), key=Path.as_posix)
        if not files:
            raise UserError(f"data.path: {path} has no files", "name a folder with text, or a file")
        return _joined(files, str(path))
    return _mapped(path)


def _mapped(path: Path) -> _Tokens:
    try:
        return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError(
            f"data.path: {path}: {error.strerror}", "name a file or folder that every node can read"
        ) from error


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _joined(files: Iterable[Path], name: str) -> _Tokens:
    """All bytes of ``files``, from a cache file that the device processes of a host share in memory."""
    try:
        data = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    except OSError as error:
        raise UserError(f"data: {name}: {error}", "make it readable for the worker's user") from error
    path = _cache_dir() / f"{hashlib.sha256(data.data).hexdigest()}.bytes"
    try:
        if not _holds(path, data):
            _write_atomically(path, data)
        return np.memmap(path, np.uint8, mode="r") if data.size else data
    except OSError:  # no cache that can be written: every process keeps a copy of its own
        return data


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


def _write_atomically(path: Path, data: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data.data)
    Path(file.name).replace(path)
