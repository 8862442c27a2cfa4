"""Text in a store of objects is prepared as that in a folder is, from a server of S3's protocol that runs
beside the tests.

The server is ours: moto's needs some forty packages, for which pip finds no versions within minutes, and it
answers neither 503 nor with an object that changes. It is tested here as well.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oobleckd.prepare import arrows, build, objects, sources
from oobleckd.prepare.build import MadeFolder, PrepareProgress, prepare
from oobleckd.prepare.objects import StoredObject, objects_of, open_file
from oobleckd.prepare.sources import files_of
from oobleckd.protocol.job import Job
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import MANIFEST, TOKENS, checksums, read_manifest
from tests.helpers import chat_templates
from tests.helpers.chats import CHATS, chat_tokenizer, write_lines
from tests.helpers.corpora import DOCUMENTS, job_of, make_tokenizer, write_corpora
from tests.helpers.one_process import OneProcess
from tests.helpers.s3_server import PAGE, S3, s3_server

WITHIN_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
IN_STORE = {
    "jsonl": ("jsonl", "all/a.jsonl"),
    "gz": ("jsonl", "all/b.jsonl.gz"),
    "zst": ("jsonl", "all/c.jsonl.zst"),
    "folder": ("jsonl", "all/several"),
    "pattern": ("jsonl", "all/several/*json*"),
    "parquet": ("parquet", "all/d.parquet"),
    "saved": ("arrow", "all/saved/"),
    "arrow": ("arrow", "all/e.arrow"),
    "text": ("text", "all/texts"),
    "texts": ("text", "all/texts/**/*.txt"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as s3:
        (s3.folder / "corpus").mkdir()
        write_corpora(s3.folder / "corpus" / "all")
        for bucket in ("forbidden", "broken", "flaky", "empty"):
            (s3.folder / bucket).mkdir()
        yield s3


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """In this process, too."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    objects._store.cache_clear()
    yield server
    objects._store.cache_clear()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Pool", OneProcess)


def made(job: Job) -> MadeFolder:
    return prepare(job, 2, lambda _progress: None)


# --------------------------------------------------------------------------- the server


def asked(s3: S3, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    url = f"{s3.environment['AWS_ENDPOINT_URL']}/{path}"
    request = urllib.request.Request(
        url, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_server_answers_as_s3_does(server: S3) -> None:
    (server.folder / "corpus" / "few.txt").write_bytes(b"0123456789")
    assert asked(server, "corpus/few.txt") == (200, b"0123456789")
    assert asked(server, "corpus/few.txt", Range="bytes=2-4") == (206, b"234")
    assert asked(server, "corpus/few.txt", Range="bytes=8-40") == (206, b"89")
    assert asked(server, "corpus/few.txt", Range="bytes=10-12")[0] == 416
    assert asked(server, "corpus/few.txt", If_Match='"other"')[0] == 412
    assert asked(server, "corpus/few.txt", "HEAD") == (200, b"")
    assert asked(server, "corpus/none")[0] == 404
    assert asked(server, "none/few.txt")[0] == 404
    assert asked(server, "forbidden/x")[0] == 403
    assert asked(server, "broken/x")[0] == 503
    status, told = asked(server, "corpus?list-type=2&prefix=all/texts/")
    assert (status, told.count(b"<Key>")) == (200, PAGE)
    assert b"<IsTruncated>true</IsTruncated>" in told


# --------------------------------------------------------------------------- reading


@pytest.mark.thin(6)
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", IN_STORE)
def test_every_format_gives_the_tokens_of_the_folder(
    s3: S3, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    source, key = IN_STORE[name]
    local = made(job_of(source, s3.folder / "corpus" / key, tokenizer, cache=str(tmp_path / "local")))
    job = job_of(source, f"s3://corpus/{key}", tokenizer, cache=str(tmp_path / "stored"))
    done = made(job)
    assert (done.folder / TOKENS).read_bytes() == (local.folder / TOKENS).read_bytes()
    assert done.manifest.documents == len(DOCUMENTS)
    assert all(file.etag and not file.sha256 and not file.mtime_ns for file in done.manifest.sources)
    assert [Path(file.path).name for file in done.manifest.sources] == [
        Path(file.path).name for file in local.manifest.sources
    ]
    before = len(s3.requests())
    assert made(job) == done._replace(new=False)
    read = {path for method, path, _ in s3.requests()[before:] if method == "GET"}
    assert read <= {"/corpus", "/corpus/all/saved/state.json"}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.parquet", "t.arrow"])
def test_of_an_object_a_range_is_asked_for_at_a_time(
    s3: S3, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 16_384)
    monkeypatch.setattr(arrows, "RANGE_BYTES", 16_384)
    folder = s3.folder / "large"
    folder.mkdir(exist_ok=True)
    texts = [os.urandom(50).hex() for _ in range(2000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    table = pa.table({"text": texts})
    if name == "t.parquet":
        pq.write_table(table, folder / name, row_group_size=1000, data_page_size=8192)
    elif name == "t.arrow":
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, 100)
    else:
        (folder / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    before = len(s3.requests())
    source = {"parquet": "parquet", "arrow": "arrow"}.get(name.rpartition(".")[2], "jsonl")
    assert (
        made(job_of(source, f"s3://large/{name}", tokenizer, cache=str(tmp_path))).manifest.documents == 2000
    )
    read = [num for method, path, num in s3.requests()[before:] if method == "GET" and path != "/large"]
    size = (folder / name).stat().st_size
    # Of Parquet the text of a row group, and 64 KiB in which the footer may lie.
    assert max(read) <= (0.6 * size if source == "parquet" else 16_384)
    assert sum(read) < 2 * size + 4 * 65_536


@pytest.mark.usefixtures("one_process")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_chats_are_those_of_the_folder(s3: S3, tmp_path: Path, name: str) -> None:
    by = chat_tokenizer(tmp_path / "tokenizer", chat_templates.CHATML)
    there = s3.folder / "corpus" / "chats"
    there.mkdir(exist_ok=True)
    write_lines(there / "t.jsonl", *({"messages": each} for each in CHATS))
    pq.write_table(pa.table({"messages": [list(each) for each in CHATS]}), there / "t.parquet")
    source, more = Path(name).suffix[1:], {"format": "chat", "on_long_document": "cut"}
    local = made(job_of(source, there / name, by, cache=str(tmp_path / "local"), **more))
    stored = made(job_of(source, f"s3://corpus/chats/{name}", by, cache=str(tmp_path / "stored"), **more))
    assert stored.manifest.loss_sha256 == local.manifest.loss_sha256
    assert stored.manifest.bin_sha256 == local.manifest.bin_sha256
    assert stored.plans == local.plans
    assert stored.manifest.sources[0].etag


def test_googles_store_is_read_as_well(
    s3: S3, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = tmp_path / "account.json"
    base = s3.environment["AWS_ENDPOINT_URL"]
    empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account.write_text(json.dumps({"gcs_base_url": base, "disable_oauth": True, **empty}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    done = made(job_of("jsonl", "gs://corpus/all/several", tokenizer, cache=str(tmp_path)))
    assert done.manifest.documents == len(DOCUMENTS)


def test_patterns_find_what_they_find_in_folders(s3: S3, tmp_path: Path) -> None:
    names = ("a.txt", "b/c.txt", "b/d/e.txt", "b/.f/g.txt", ".h.txt", "i j/ü.txt", "k.jsonl", "b/c.txt.gz")
    for root in (tmp_path, s3.folder / "patterns"):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
    for pattern in ("**/*.txt", "*.txt", "*/*", "**", "b/**/*.txt", "?.txt", "b/[cd]*", ".*", "*/.f/*"):
        found = files_of("text", f"s3://patterns/{pattern}", tmp_path / "none")
        local = files_of("text", f"{tmp_path}/{pattern}", tmp_path / "none")
        assert [str(file).removeprefix("s3://patterns/") for file in found] == [
            Path(str(file)).relative_to(tmp_path).as_posix() for file in local
        ], pattern


def test_a_store_that_is_busy_now_and_then_is_asked_again(s3: S3) -> None:
    (s3.folder / "flaky" / "x").write_bytes(os.urandom(100))
    (found,) = objects_of("s3://flaky")
    with open_file(found) as file:
        assert file.read() == (s3.folder / "flaky" / "x").read_bytes()


# --------------------------------------------------------------------------- refusals


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("source", "url", "said"),
    [
        ("jsonl", "s3://corpus/none/", "does not exist: it is no object"),
        ("jsonl", "s3://corpus/none/*.jsonl", "matches no file"),
        ("jsonl", "s3://none/x.jsonl", "s3://none/x.jsonl does not exist"),
        ("jsonl", "s3://forbidden/x.jsonl", "may not be read with these credentials"),
        ("jsonl", "s3://forbidden", "may not be read with these credentials"),
        ("jsonl", "s3://broken/x.jsonl", "cannot be reached: .*503"),
        ("jsonl", "s3://corpus/all/texts", "has no .jsonl or .ndjson file"),
        ("parquet", "s3://corpus/all/a.jsonl", "a.jsonl cannot be read"),
        ("arrow", "s3://corpus/all/texts", "has no .arrow file"),
        ("text", "s3://hidden", r"s3://hidden/\.git/index is hidden"),
        ("text", "s3://hidden/*.png", "x.png is no text"),
        ("jsonl", "hdfs://corpus/x", "in no store that is read"),
        ("jsonl", "s3:///x", "names no bucket"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    s3: S3, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, url: str, said: str
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 1)
    (s3.folder / "hidden" / ".git").mkdir(parents=True, exist_ok=True)
    (s3.folder / "hidden" / ".git" / "index").write_text("x")
    (s3.folder / "hidden" / "x.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(DataError, match=said) as caught:
        made(job_of(source, url, tokenizer, cache=str(tmp_path)))
    assert caught.value.hint
    assert "\n" not in caught.value.problem


def test_nobody_answers_and_nobody_has_credentials(
    monkeypatch: pytest.MonkeyPatch, s3: S3, tokenizer: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    job = job_of("jsonl", "s3://corpus/x", tokenizer, cache=str(tmp_path))
    with pytest.raises(DataError, match="cannot be reached") as caught:
        made(job)
    assert "AWS_ENDPOINT_URL" in caught.value.hint


def test_without_obstore_or_cache_a_sentence_says_what_to_do(
    s3: S3, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"data\.cache: is missing"):
        made(job_of("jsonl", "s3://corpus/all/a.jsonl", tokenizer))

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(objects, "import_module", absent)
    with pytest.raises(DataError, match="obstore, which is not installed") as caught:
        objects_of("s3://corpus/all/a.jsonl")
    assert "oobleckd[s3]" in caught.value.hint


@pytest.mark.usefixtures("one_process")
def test_another_object_in_its_place_is_never_mixed_with_the_first(
    s3: S3, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(objects, "RANGE_BYTES", 500)
    place = s3.folder / "changing" / "t.jsonl"
    place.parent.mkdir()
    place.write_text('{"text": "good"}\n' * 300)
    job = job_of("jsonl", "s3://changing/t.jsonl", tokenizer, cache=str(tmp_path))

    def told(now: PrepareProgress) -> None:
        if now.phase == "tokenize" and now.done * 2 > now.total:
            place.write_text('{"text": "poor"}\n' * 300)

    with pytest.raises(DataError, match=r"s3://changing/t\.jsonl was changed"):
        prepare(job, 1, told)
    assert not list(tmp_path.rglob(MANIFEST))
    first = made(job)
    place.write_text('{"text": "fine"}\n' * 300)
    second = made(job)
    assert second.new
    assert second.folder != first.folder
    place.unlink()
    gone = StoredObject("s3://changing/t.jsonl", 5100, first.manifest.sources[0].etag)
    with pytest.raises(DataError, match="does not exist"), open_file(gone) as file:
        file.read(1)


# --------------------------------------------------------------------------- as people run it

KILLED = """
import os, signal, sys
from pathlib import Path
from oobleckd.host.jobfile import load_job
from oobleckd.prepare import build, objects, sources
sources.PIECE_BYTES = 20_000

def told(now):
    if now.phase == "tokenize":
        print(now.done, now.total, flush=True)
        if sys.argv[2] == "kill" and now.done * 3 > now.total:
            os.kill(os.getpid(), signal.SIGKILL)

print(build.prepare(load_job(Path(sys.argv[1])), 2, told).folder)
"""


def run(*words: object, s3: S3) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=WITHIN_S,
        env={**os.environ, **s3.environment}, cwd=ROOT,
    )  # fmt: skip


def test_killed_it_goes_on_with_the_objects_that_are_left(s3: S3, tokenizer: Path, tmp_path: Path) -> None:
    for number in range(12):
        file = s3.folder / "killed" / f"{number}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in DOCUMENTS))
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 8\n[data]\n'
        f'source = "jsonl"\npath = "s3://killed/*.jsonl"\ntokenizer = "{tokenizer}"\n'
        f'cache = "{tmp_path}/cache"\n'
    )
    killed = run("-c", KILLED, job, "kill", s3=s3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = run("-c", KILLED, job, "end", s3=s3)
    first, *_, folder = finished.stdout.splitlines()
    done, total = map(int, first.split())
    assert 0 < done < total
    manifest = read_manifest(Path(folder))
    assert manifest.bin_sha256 == checksums(Path(folder) / TOKENS)[0]
    assert manifest.documents == 12 * len(DOCUMENTS)
    shutil.rmtree(folder)
    whole = run("-m", "oobleckd.ctl.main", "data", "prepare", job, s3=s3)  # in one go
    assert whole.stdout.strip() == folder
    assert read_manifest(Path(folder)).bin_sha256 == manifest.bin_sha256


def test_the_command_says_it_in_one_sentence(s3: S3, tokenizer: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    begin = 'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 8\n[data]\n'
    job.write_text(
        f'{begin}source = "jsonl"\npath = "s3://forbidden/x"\ntokenizer = "{tokenizer}"\n'
        f'cache = "{tmp_path}/c"\n'
    )
    ended = run("-m", "oobleckd.ctl.main", "data", "prepare", job, s3=s3)
    assert ended.returncode == 2
    assert "s3://forbidden/x may not be read" in ended.stderr
    assert "Traceback" not in ended.stderr
    job.write_text(f'{begin}source = "tokens"\npath = "s3://corpus/x.bin"\n')
    ended = run("-m", "oobleckd.ctl.main", "submit", "--dry-run", job, s3=s3)
    assert ended.returncode == 2
    assert "is in a store" in ended.stderr
