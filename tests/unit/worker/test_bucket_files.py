"""A checkpoint gives back every bit, and anything torn, missing or foreign is named."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from oobleckd.host.checkpoint import checkpoints, complete, discard_partial, room, set_aside
from oobleckd.host.folder import MARK, FolderMark, claim
from oobleckd.host.hold import held
from oobleckd.protocol.checkpoint import Manifest, manifest_of, model_digest
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.parts import Counters
from oobleckd.worker.models import Bucket, ModelSpec, load_spec
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state import bucket_files
from oobleckd.worker.state.bucket_files import (
    DamagedCheckpoint,
    enter_folder,
    read_bucket,
    read_manifest,
    step_name,
    write_bucket,
)
from oobleckd.worker.state.bucket_state import BucketState
from tests.helpers.models import CPU, small_config, small_job
from tests.helpers.optimizers import shape_of

JOB = small_job("llama", small_config("llama", tie_word_embeddings=True))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec(JOB)


def state(spec: ModelSpec, bucket: int) -> BucketState:
    generator = torch.Generator().manual_seed(bucket)
    shapes = spec.buckets[bucket].shapes
    found = BucketState.fresh(shape_of(shapes), [torch.zeros(shape) for shape in shapes])
    for tensor in found.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    found.exponents = tuple(range(40, 40 + len(shapes)))
    return found


def read(directory: Path, manifest: Manifest, bucket: Bucket) -> BucketState:
    return read_bucket(directory, manifest, bucket, shape_of(bucket.shapes), CPU)


def write_all(root: Path, spec: ModelSpec, step: int = 7, keep: int = 2) -> Path:
    directory = root / f"{step_name(step)}.partial"
    parts = []
    for bucket in spec.buckets:
        file, num_bytes, digest, tensors = write_bucket(directory, bucket, state(spec, bucket.index))
        parts.append(
            CheckpointPart(
                "n0/0", "job-1", Counters(step, step, step), str(directory), bucket.index, len(spec.buckets),
                file, num_bytes, digest, tensors,
            )
        )  # fmt: skip
    return complete(directory, manifest_of(JOB, parts[::-1]), keep)


def test_every_bit_comes_back(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    assert directory == tmp_path / "step-00000007"
    manifest = read_manifest(directory)
    assert manifest.counters == Counters(7, 7, 7)
    assert manifest.spec == JOB
    for bucket in spec.buckets:
        wanted, found = state(spec, bucket.index), read(directory, manifest, bucket)
        assert found.exponents == wanted.exponents
        assert len(found.tensors()) == 3 * len(bucket.keys)
        assert all(torch.equal(a, b) for a, b in zip(wanted.tensors(), found.tensors(), strict=True))
        assert all(value.data_ptr() % 64 == 0 for value in found.tensors())
        assert all(param.is_leaf and param.requires_grad for param in found.params)


def test_the_parts_say_what_is_on_disk(spec: ModelSpec, tmp_path: Path) -> None:
    file, num_bytes, digest, tensors = write_bucket(tmp_path, spec.buckets[1], state(spec, 1))
    data = (tmp_path / file).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, digest)
    with safe_open(str(tmp_path / file), framework="np") as opened:
        assert set(opened.keys()) == set(tensors)
        assert all(
            hashlib.sha256(opened.get_tensor(name).tobytes()).hexdigest() == sha
            for name, sha in tensors.items()
        )
    assert f"exp_avg_sq/{spec.buckets[1].keys[0]}" in tensors
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_checkpoint_is_completed_once(spec: ModelSpec, tmp_path: Path) -> None:
    manifest = read_manifest(write_all(tmp_path, spec))
    assert complete(tmp_path / "step-00000007.partial", manifest, 1) == tmp_path / "step-00000007"


def test_only_the_newest_are_kept(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "step-00000099.partial").mkdir()
    for step in (2, 10, 11):
        write_all(tmp_path, spec, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000010", "step-00000011", "step-00000099.partial"]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000010", "step-00000011"]


def test_a_step_can_be_written_again_after_a_rollback(spec: ModelSpec, tmp_path: Path) -> None:
    write_all(tmp_path, spec, 5)
    write_all(tmp_path, spec, 9)
    (tmp_path / "step-00000005" / "mark").touch()
    write_all(tmp_path, spec, 5)
    assert not (tmp_path / "step-00000005" / "mark").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000009"]


def test_model_digest_is_the_models_alone() -> None:
    other = small_job("llama", small_config("llama", tie_word_embeddings=True), train={"steps": 99})
    assert model_digest(other) == model_digest(JOB)
    assert model_digest(small_job("llama", small_config("llama"))) != model_digest(JOB)


# --------------------------------------------------------------------------- damage


def test_a_torn_file_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    path = directory / "bucket-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"bucket-00001\.safetensors is torn"):
        read(directory, read_manifest(directory), spec.buckets[1])


def test_a_flipped_bit_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    path = directory / "bucket-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        read(directory, read_manifest(directory), spec.buckets[1])


def test_a_missing_file_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    (directory / "bucket-00001.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read: .*No such file"):
        read(directory, read_manifest(directory), spec.buckets[1])


def test_one_that_is_set_aside_while_it_is_read(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device has found it damaged meanwhile; what safetensors raises then has no errno."""
    directory = write_all(tmp_path, spec)
    monkeypatch.setattr(bucket_files, "_check_file", lambda path, *_: path.unlink())
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read(directory, read_manifest(directory), spec.buckets[1])


def test_a_folder_that_is_gone_is_damage(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    shutil.rmtree(directory)
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read_manifest(directory)


def test_a_node_that_does_not_see_the_folder_of_checkpoints_says_nothing_of_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file") as raised:
        read_manifest(tmp_path / "not mounted" / "step-00000007")
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_one_that_is_set_aside_is_none_any_more_and_stays(spec: ModelSpec, tmp_path: Path) -> None:
    for number in range(2):
        directory = write_all(tmp_path, spec)
        (directory / "number").write_text(str(number))
        set_aside(directory)
        assert checkpoints(tmp_path) == []
    write_all(tmp_path, spec, 8, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007.damaged", "step-00000008"]
    assert (tmp_path / "step-00000007.damaged" / "number").read_text() == "1", "the newer one"
    set_aside(directory)  # as it is there no more


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"num_hidden_layers": 5}, "has"),
        ({"intermediate_size": 56}, r"has param/.* as torch\.float32 \(48, 32\)"),
        ({"tie_word_embeddings": False}, "other tensors"),
    ],
)
def test_another_model_is_named(spec: ModelSpec, tmp_path: Path, config: dict, what: str) -> None:
    directory = write_all(tmp_path, spec)
    other = load_spec(small_job("llama", small_config("llama", **{"tie_word_embeddings": True, **config})))
    manifest = read_manifest(directory)
    with pytest.raises(UserError, match=f"is of another model: it .*{what}") as raised:
        [read(directory, manifest, bucket) for bucket in other.buckets]
    assert "[model]" in raised.value.hint


def test_a_manifest_of_format_1_knows_the_text_by_its_digest(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    path = directory / "manifest.json"
    plain = msgspec.json.decode(path.read_bytes())
    assert plain["format"] == 2
    del plain["inputs"]
    path.write_bytes(msgspec.json.encode({**plain, "format": 1, "corpus": "83-ab"}))
    (read,) = read_manifest(directory).read
    assert (read.kind, read.num_bytes, read.whole) == ("data", 83, "83-ab")
    path.write_bytes(msgspec.json.encode({**plain, "format": 1, "corpus": ""}))
    assert read_manifest(directory).read == ()


def test_manifests_that_are_none_are_named(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    path = directory / "manifest.json"
    plain = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**plain, "format": 3}))
    with pytest.raises(UserError, match="has format 3, this version reads 1 to 2"):
        read_manifest(directory)
    path.write_text("{}")
    with pytest.raises(UserError, match="is no manifest"):
        read_manifest(directory)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        read_manifest(directory)
    with pytest.raises(UserError, match="never completed"):
        read_manifest(tmp_path / "step-00000008.partial")


def test_a_disk_that_refuses_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written") as raised:
        write_bucket(tmp_path / "file" / "below", spec.buckets[1], state(spec, 1))
    assert "checkpoint.dir" in raised.value.hint


@pytest.mark.parametrize("late", ["_fill", "sync_directory"])
def test_written_once_more_while_it_is_completed(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """After a loss in the last step buckets are written again; the daemon may have all it needs before that
    is over.
    """
    written = {
        b.index: write_bucket(tmp_path / "step-00000007.partial", b, state(spec, b.index))
        for b in spec.buckets
    }
    before = getattr(bucket_files, late)

    def meanwhile(*args: object) -> object:
        (tmp_path / "step-00000007.partial" / "manifest.json").touch()
        (tmp_path / "step-00000007.partial").rename(tmp_path / "step-00000007")
        return before(*args)

    monkeypatch.setattr(bucket_files, late, meanwhile)
    assert write_bucket(tmp_path / "step-00000007.partial", spec.buckets[1], state(spec, 1)) is None
    assert all(written.values())


def test_a_writer_that_stops_in_the_middle_leaves_nothing_that_counts(
    spec: ModelSpec, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def stop() -> None:
        seen.append([path.name for path in tmp_path.iterdir()])
        assert next(tmp_path.iterdir()).stat().st_size > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bucket(tmp_path, spec.buckets[1], state(spec, 1), halfway=stop)
    assert len(seen[0]) == 1
    assert seen[0][0].startswith("bucket-00001.safetensors.")
    assert seen[0][0].endswith(".tmp")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_does_not_get_into_the_checkpoint(spec: ModelSpec, tmp_path: Path) -> None:
    torn = tmp_path / "step-00000007.partial" / "bucket-00001.safetensors.17-0.tmp"
    torn.parent.mkdir()
    torn.write_bytes(b"half")
    directory = write_all(tmp_path, spec)
    assert not list(directory.glob("*.tmp"))
    for bucket in spec.buckets:
        read(directory, read_manifest(directory), bucket)


def test_the_checkpoint_to_roll_back_to_stays_until_the_journal_knows_a_newer_one(
    spec: ModelSpec, tmp_path: Path
) -> None:
    directories = []
    for step in (2, 4, 6):
        before = write_all(tmp_path, spec, step)
        directories.append(before)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000006"]
    last = tmp_path / "step-00000008.partial"
    parts = []
    for bucket in spec.buckets:
        file, num_bytes, digest, tensors = write_bucket(last, bucket, state(spec, bucket.index))
        parts.append(
            CheckpointPart(
                "n0/0", "job-1", Counters(8, 8, 8), str(last), bucket.index, len(spec.buckets), file,
                num_bytes,
                digest, tensors,
            )
        )  # fmt: skip
    complete(last, manifest_of(JOB, parts), 1, (str(tmp_path / "x" / ".." / "step-00000004"),))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000008"]


def test_a_file_that_somebody_removed_to_make_room_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    """Complete is what is whole: the folder stays partial."""
    directory = write_all(tmp_path, spec)
    manifest = read_manifest(directory)
    partial = directory.rename(tmp_path / "step-00000009.partial")
    (partial / manifest.buckets[1].file).unlink()
    with pytest.raises(ValueError, match=r"bucket-00001.safetensors is gone"):
        complete(partial, manifest, 2)
    assert partial.exists()


def test_room_is_given_back_and_seen(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000004.partial", "step-00000006.partial", "else.partial"):
        (tmp_path / name).mkdir()
    discard_partial(tmp_path / "step-00000004.partial")
    discard_partial(tmp_path / "step-00000004.partial")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "else.partial",
        "step-00000002",
        "step-00000006.partial",
    ]
    discard_partial(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["else.partial", "step-00000002"]
    discard_partial(tmp_path / "nowhere")
    free_bytes, free_files = room(tmp_path / "not" / "there" / "yet")
    assert free_bytes > 0
    assert free_files != 0


def test_a_folder_that_was_given_up_meanwhile_is_no_error(spec: ModelSpec, tmp_path: Path) -> None:
    directory = tmp_path / "step-00000007.partial"
    assert (
        write_bucket(directory, spec.buckets[1], state(spec, 1), halfway=lambda: shutil.rmtree(directory))
        is None
    )
    assert not directory.exists()


class Planted:
    """A pickle that makes a file where somebody loads it."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trap,)


def put_in_place(directory: Path, data: bytes, file: str = "") -> Manifest:
    """``data`` in place of a bucket's file, with a manifest that says so."""
    manifest = read_manifest(directory)
    entry = manifest.buckets[0]
    (directory / entry.file).write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    changed = msgspec.structs.replace(entry, num_bytes=len(data), sha256=sha256, file=file or entry.file)
    return msgspec.structs.replace(manifest, buckets=(changed, *manifest.buckets[1:]))


def test_a_pickle_in_a_checkpoint_is_never_loaded(spec: ModelSpec, tmp_path: Path) -> None:
    directory, trap = write_all(tmp_path, spec), tmp_path / "trap"
    for data in (pickle.dumps(Planted(trap)), pickle.dumps(Planted(trap), protocol=0)):
        with pytest.raises(UserError, match="cannot be read"):
            read(directory, put_in_place(directory, data), spec.buckets[0])
    assert not trap.exists()


def test_a_manifest_that_points_elsewhere_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    for file in ("../bucket", "/etc/passwd", ""):
        data = (directory / read_manifest(directory).buckets[0].file).read_bytes()
        changed = put_in_place(directory, data, file or "..")
        with pytest.raises(UserError, match=r"no name of a file|cannot be read|torn"):
            read(directory, changed, spec.buckets[0])


def test_a_file_without_exponents_is_of_another_model(spec: ModelSpec, tmp_path: Path) -> None:
    directory, bucket = write_all(tmp_path, spec), spec.buckets[0]
    tensors = {f"{kind}/{key}": torch.zeros(s) for kind in ("param", "exp_avg", "exp_avg_sq") for key,
        s in zip(bucket.keys, bucket.shapes, strict=True)}  # fmt: skip
    for metadata in (None, {"exponents": "x"}, {"exponents": str([1] * 99)}):
        data = save(tensors, metadata)
        with pytest.raises(UserError, match="exponents of bucket 0"):
            read(directory, put_in_place(directory, data), bucket)


def test_what_somebody_reads_stays_until_it_is_read(spec: ModelSpec, tmp_path: Path) -> None:
    first = write_all(tmp_path, spec, 2)
    with held(first) as there, held(first) as there_too:
        assert there
        assert there_too
        for step in (4, 6, 8):
            write_all(tmp_path, spec, step)
        assert read_manifest(first).counters.step == 2
        assert [path.name for path in checkpoints(tmp_path)] == [
            "step-00000002",
            "step-00000006",
            "step-00000008",
        ]
    write_all(tmp_path, spec, 10)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000008", "step-00000010"]
    with held(first) as there:
        assert not there, "it is gone"


# ---------------------------------------------------------------------- whose folder it is


def test_a_share_is_not_written_into_a_folder_of_another_journal(spec: ModelSpec, tmp_path: Path) -> None:
    foreign = tmp_path / "job-1"
    assert claim(foreign, FolderMark("theirs", "job-1"))
    with pytest.raises(UserError, match="of another journal") as raised:
        enter_folder(foreign, FolderMark("ours", "job-1"))
    assert raised.value.hint
    assert [path.name for path in foreign.iterdir()] == [MARK]


def test_a_checkpoint_of_another_optimizer_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    directory = write_all(tmp_path, spec)
    bucket = spec.buckets[1]
    shape = shape_of(bucket.shapes, Optimizer(name="sgd"))
    with pytest.raises(
        UserError, match="other optimizer: beside weights it has exp_avg, exp_avg_sq"
    ) as raised:
        read_bucket(directory, read_manifest(directory), bucket, shape, CPU)
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert "[optimizer] table" in raised.value.hint
