"""Layers are compiled before a device says that it is ready, and not in the middle of a step.

Owns when that is, and where what was compiled is kept: an artifact for each kind of layer, which is a folder
of its own, made by one device of the cluster and loaded by all others, those that come later and spares among
them. How a layer is compiled is ``oobleckd.worker.models.compiled``'s, and how an artifact gets from one node
to another ``oobleckd.worker.artifacts``'.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import logging
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.worker.artifacts import folder as artifact
from oobleckd.worker.artifacts.asking import Asking
from oobleckd.worker.device.context import give_back_memory
from oobleckd.worker.device.measure import bind
from oobleckd.worker.device.sample import calls_of, sample_batch
from oobleckd.worker.device.traits import traits
from oobleckd.worker.models import Batch, Call, Layer, ModelSpec, gradients, load_spec, seed_layer
from oobleckd.worker.models.compiled import check_compiler, find_instructions, forget, headers_in, keep_in
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.runtime.errors import UserError

_INSTRUCTIONS, _HEADERS = "instructions", "headers"
_KEY_BYTES = 8
_KEPT_S = 90 * 86_400.0
"""Without anybody who loads it."""
_log = logging.getLogger(__name__)


def folder_of(root: Path, device: torch.device) -> Path:
    """Where in ``root`` what is compiled for ``device`` is: by all that decides bits there, and by where the
    compiler and its headers are, which is part of what torch looks for.
    """
    built = (os.environ.get("CXX", ""), sysconfig.get_path("include"), torch.__file__)
    return root / _digest((traits(device), built))


def load_kept(
    compiling: Compiling, device: torch.device, job: Job, is_wanted: Callable[[], bool] = lambda: False
) -> int:
    """Load what is here of the compiled layers of ``job``, with weights of their own, one kind after the
    other until the process ``is_wanted`` elsewhere; how many kinds there are. Compiles nothing, and waits for
    nobody.
    """
    # What a device does when it begins: kernels are made for so many threads.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    spec = load_spec(job)
    kept = compiling.kept(spec)
    missing = compiling.missing(job, kept)
    if missing:
        compiling.begin()
    for kind in sorted({_kind(spec, layer) for layer in missing}):
        if is_wanted():
            break
        layers = [layer for layer in missing if _kind(spec, layer) == kind]
        compiling.run(spec, layers, partial(bind, spec, device=device))
    give_back_memory()
    return compiling.num_kinds


class Compiling:
    """What this process has compiled, or loaded, of the job that it trains; kept in ``root``, which others
    may share.
    """

    def __init__(self, root: Path, device: torch.device) -> None:
        self._root, self._device = root, device
        self.who = "the spare"  # for the log
        self.asking: Asking | None = None  # of a device, which has an agent to ask
        self._done: set[int] = set()  # layers
        self._kinds: set[str] = set()
        self._job: Job | None = None
        self.num_compiled = self.num_loaded = 0  # kinds of layers, since this process began

    @property
    def num_kinds(self) -> int:
        """Kinds of layers that are in this process's memory."""
        return len(self._kinds)

    def missing(self, job: Job, layers: Sequence[int]) -> list[int]:
        """Those of ``layers`` that are yet to be compiled. Of a job before nothing is called any more."""
        if self._job is not None and _graphs(job) != _graphs(self._job):
            # What is in memory would be in no artifact of this job.
            forget()
            self._done, self._kinds = set(), set()
        self._job = job
        return [layer for layer in layers if layer not in self._done and layer > 0]

    def begin(self) -> None:
        """Make ready to compile. Raises UserError where nothing can be compiled here."""
        keep_in(self._root)
        _drop_old(self._root, folder_of(self._root, self._device))
        check_compiler(self._device)

    def run(self, spec: ModelSpec, layers: Sequence[int], bind: Callable[[int], Layer]) -> None:
        """Compile ``layers``, or load what others compiled; ``bind``: what makes one of them. Raises
        UserError naming the layer that cannot be compiled.

        Each computes one micro-batch, forward and backward: what comes of it is thrown away, and no parameter
        changes.
        """
        batch = sample_batch(spec).to(self._device)
        calls, x = calls_of(spec, batch), _embedded(spec, batch, self._device)
        for kind in sorted({_kind(spec, layer) for layer in layers}):
            with self._artifact(spec.job, kind):
                for index in layers:
                    if _kind(spec, index) == kind:
                        with _named(spec, index):
                            self._try(bind(index), x, batch, calls.get(index))
        # As after the imports: their objects are no garbage collector's business. (D-devices-007)
        gc.collect()
        gc.freeze()

    def kept(self, spec: ModelSpec) -> list[int]:
        """Layers of which the artifact is here."""
        folder = folder_of(self._root, self._device)
        kinds = {_kind(spec, layer) for layer in range(1, spec.num_layers)}
        here = {kind for kind in kinds if artifact.is_intact(folder / _name(spec.job, kind))}
        return [layer for layer in range(1, spec.num_layers) if _kind(spec, layer) in here]

    @contextlib.contextmanager
    def _artifact(self, job: Job, kind: str) -> Iterator[None]:
        """Within, layers of ``kind`` are compiled, or loaded."""
        folder = folder_of(self._root, self._device) / _name(job, kind)
        if kind in self._kinds:
            keep_in(folder)
            yield  # another layer of those that are in memory
            return
        with contextlib.ExitStack() as held:
            if not artifact.is_intact(folder):
                held.enter_context(_alone(folder))
            if artifact.is_intact(folder) or self._fetched(folder):
                held.close()
                self._prepare(folder, made=True)
                yield
                self._loaded(folder, kind)
            else:
                with self._made(folder, kind):
                    yield
        self._kinds.add(kind)

    def _loaded(self, folder: Path, kind: str) -> None:
        artifact.used(folder)
        if artifact.has_grown(folder):
            _log.warning("%s: compiled %s anew, as what is in %s did not fit", self.who, _short(kind), folder)
            artifact.seal(folder)
            self.num_compiled += 1
        else:
            _log.info("%s: loaded %s, as it was compiled before", self.who, _short(kind))
            self.num_loaded += 1

    @contextlib.contextmanager
    def _made(self, folder: Path, kind: str) -> Iterator[None]:
        """Within, it is compiled; then it is in ``folder``, and on its way to others."""
        began = time.monotonic()
        # Not torch's one folder for everything, nor its archive, which has no C++ programs. (D-compile-010)
        made = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(made, ignore_errors=True)
        try:
            self._prepare(made, made=False)
            yield
            shutil.copytree(folder.parent / _INSTRUCTIONS, made / _INSTRUCTIONS, dirs_exist_ok=True)
            artifact.seal(made)
            artifact.place(made, folder)
            keep_in(folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            if self.asking is not None:
                self.asking.not_made(_key(folder))
            raise
        self.num_compiled += 1
        _log.info("%s: compiled %s in %.1f s", self.who, _short(kind), time.monotonic() - began)
        if self.asking is not None:
            self._offer(folder)

    def _fetched(self, folder: Path) -> bool:
        """Whether another node had it, and it is in ``folder`` now."""
        shutil.rmtree(folder, ignore_errors=True)
        archive = self.asking.want(_key(folder)) if self.asking is not None else None
        if archive is None:
            return False
        come = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(come, ignore_errors=True)
        try:
            artifact.unpack(archive, come)
            artifact.place(come, folder)
        except (OSError, artifact.DamagedArtifact) as error:
            _log.warning("what another node compiled cannot be used: %s", error)
            shutil.rmtree(come, ignore_errors=True)
            return False
        finally:
            archive.unlink(missing_ok=True)
        return True

    def _offer(self, folder: Path) -> None:
        assert self.asking is not None
        key = _key(folder)
        archive = self._root / f".{key}.{os.getpid()}.made"
        try:
            archive.unlink(missing_ok=True)
            artifact.pack(folder, archive)
        except OSError as error:
            _log.warning("what was compiled here cannot be sent to others: %s", error)
            self.asking.not_made(key)
        else:
            self.asking.made(key, archive)

    def _prepare(self, folder: Path, *, made: bool) -> None:
        """Have the compiler look into ``folder``, and write there. It knows by then which instructions it may
        use: what that takes to find out comes with an artifact that was ``made``.
        """
        if self._device.type == "cpu":
            found = folder.parent / _INSTRUCTIONS
            with _alone(found):
                if not artifact.is_intact(found):
                    shutil.rmtree(found, ignore_errors=True)
                    if made and (folder / _INSTRUCTIONS).is_dir():
                        shutil.copytree(folder / _INSTRUCTIONS, found)
                keep_in(found)
                find_instructions()
                artifact.seal(found)
        keep_in(folder)
        headers_in(None if made else folder.parent / _HEADERS)

    def _try(self, layer: Layer, x: Tensor, batch: Batch, call: Call | None) -> None:
        assert self._job is not None
        seed_layer(self._job.train.seed, 0, 0, layer.index, self._device)
        out = layer(x, batch, call)
        gradients(out, [*layer.leaves, x], None if layer.is_head else torch.ones_like(out))
        self._done.add(layer.index)


def _kind(spec: ModelSpec, index: int) -> str:
    return "head" if index == spec.num_layers - 1 else spec.kind_of(index)


def _embedded(spec: ModelSpec, batch: Batch, device: torch.device) -> Tensor:
    """What goes into a block: as the embedding makes it, of weights that take no memory."""
    zero = torch.zeros((), device=device)
    buckets = [spec.buckets[bucket] for bucket in spec.buckets_of(0)]
    params = {
        key: zero.expand(shape)
        for bucket in buckets
        for key, shape in zip(bucket.keys, bucket.shapes, strict=True)
    }
    with torch.no_grad():
        return spec.layer(0, params, device)(None, batch).requires_grad_()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, nobody else of those who share it makes ``folder``."""
    with contextlib.ExitStack() as held:
        # The kernel lets go of it however this process ends. Where there are no locks, or there is no room,
        # others compile the same at the same time, each in a folder of its own.
        with contextlib.suppress(OSError):
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            lock = held.enter_context(folder.with_name(f"{folder.name}.lock").open("w", encoding="ascii"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _drop_old(root: Path, present: Path) -> None:
    """Let go of what nobody has loaded for long: artifacts in ``present``, and folders of other versions with
    all that is in them.
    """
    before = time.time() - _KEPT_S
    with contextlib.suppress(OSError):
        for path in (*present.glob("*"), *root.glob("*")):
            kept = path == present or path.name in {_INSTRUCTIONS, _HEADERS}
            if kept or max(each.stat().st_mtime for each in (path, *path.glob("*"))) > before:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _graphs(job: Job) -> tuple[object, ...]:
    """What of ``job`` shows in the graphs of its layers."""
    train = job.train
    shapes = train.micro_batch, train.sequence, train.precision, train.loss_chunk_size
    experts = ("experts in bf16",) if train.experts_precision == "bf16" else ()
    return job.model, *shapes, job.data.is_separate, *experts


def _name(job: Job, kind: str) -> str:
    return _digest((_graphs(job), kind))


def _short(kind: str) -> str:
    """The class of a kind of layer, without all that is in it."""
    return kind.partition(" ")[0]


def _key(folder: Path) -> str:
    """What an artifact in ``folder`` is called in the whole cluster."""
    return f"{folder.parent.name}-{folder.name}"


@contextlib.contextmanager
def _named(spec: ModelSpec, index: int) -> Iterator[None]:
    """Whatever torch's compiler says of layer ``index`` is a user's to mend; too little memory is not."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = "the head" if index == spec.num_layers - 1 else f"block {index - 1}"
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UserError(
            f"train.compile: {what} of {spec.architecture} cannot be compiled: {why}",
            "see that the C++ compiler works (oobleckctl doctor), or set train.compile = false",
        ) from error


def _digest(what: object) -> str:
    identity = msgspec.json.encode(what, order="deterministic")
    return hashlib.blake2b(identity, digest_size=_KEY_BYTES).hexdigest()
