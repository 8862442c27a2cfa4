"""``oobleckctl data prepare`` as people run it: with processes of its own, interrupted and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.index import write_index
from oobleckd.tokens.manifest import INDEX, TOKENS, checksums, read_manifest, write_manifest
from tests.helpers.corpora import DOCUMENTS, make_tokenizer
from tests.helpers.othernode import named
from tests.helpers.prepared import prepared

WITHIN_S = 60.0
NUM_DOCUMENTS = 600_000
COMMAND = (sys.executable, "-P", "-m", "oobleckd.ctl.main", "data", "prepare")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A second of work for two processes."""
    make_tokenizer(tmp_path / "tokenizer")
    lines = "".join(json.dumps({"text": f"{text} {n}" * 40}) + "\n" for n, text in enumerate(DOCUMENTS * 12))
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(lines)
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 8\n[data]\n'
        f'source = "jsonl"\npath = "{tmp_path}/*.jsonl"\ntokenizer = "{tmp_path}/tokenizer"\n'
    )
    return file


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_its_processes_end_with_it_and_the_next_one_finishes(job: Path, number: int) -> None:
    prepared = job.parent / "prepared"
    # A background job of a shell ignores it, and so would whatever it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(
        [*COMMAND, str(job), "--jobs=2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    until(lambda: list(prepared.glob(".*.building/*.part")))
    started = children_of(program.pid)
    assert started
    os.kill(program.pid, number)
    said = program.communicate(timeout=WITHIN_S)
    assert program.returncode == (-number if number == signal.SIGKILL else 130), said
    until(lambda: not any(is_alive(pid) for pid in started))
    done = subprocess.run([*COMMAND, str(job)], capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert read_manifest(folder).documents == 3 * 12 * len(DOCUMENTS)
    assert read_manifest(folder).bin_sha256 == checksums(folder / TOKENS)[0]
    assert [path.name for path in prepared.iterdir()] == [folder.name]


def test_two_nodes_at_once_make_one_folder(job: Path) -> None:
    both = [on_node("n1", job), on_node("n2", job)]
    printed = {program.communicate(timeout=WITHIN_S)[0] for program in both}
    assert [program.returncode for program in both] == [0, 0]
    (line,) = printed
    assert [path.name for path in (job.parent / "prepared").iterdir()] == [Path(line.strip()).name]


def test_of_two_nodes_one_is_killed_and_the_other_finishes(job: Path) -> None:
    """Both are in the middle of the same piece."""
    prepared = job.parent / "prepared"
    first = on_node("n1", job)
    until(lambda: list(prepared.glob(".*.building/*.n1.*.part")))
    (worker,) = children_of(first.pid)
    for pid in (first.pid, worker):
        os.kill(pid, signal.SIGSTOP)
    second = on_node("n2", job)
    until(lambda: list(prepared.glob(".*.building/*.n2.*.part")))
    first.kill()
    os.kill(worker, signal.SIGKILL)
    first.communicate(timeout=WITHIN_S)
    line, _ = second.communicate(timeout=WITHIN_S)
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 0)
    folder = Path(line.strip())
    assert read_manifest(folder).documents == 3 * 12 * len(DOCUMENTS)
    assert read_manifest(folder).bin_sha256 == checksums(folder / TOKENS)[0]
    assert [path.name for path in prepared.iterdir()] == [folder.name]


def test_a_plan_is_whole_or_not_there_whenever_it_is_killed(tmp_path: Path) -> None:
    """Of many documents, in a folder whose text is gone."""
    folder = prepared(tmp_path / ("0" * 32), [np.zeros(3 * NUM_DOCUMENTS)], "uint16")
    told = read_manifest(folder)
    write_index(folder / INDEX, NAMED["uint16"], np.full(NUM_DOCUMENTS, 3, np.int32))
    manifest = msgspec.structs.replace(
        told, idx_sha256=checksums(folder / INDEX)[0],
        idx_bytes=(folder / INDEX).stat().st_size, documents=NUM_DOCUMENTS,
    )  # fmt: skip
    write_manifest(folder, manifest)
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 8\n[data]\n'
        f'source = "jsonl"\npath = "/gone.jsonl"\nprepared = "{folder}"\nsequences = "packed"\n'
    )
    killed = subprocess.Popen([*COMMAND, str(job)], stdout=subprocess.PIPE)
    until(lambda: [path for path in folder.glob(".plan-*/tokens.bin") if path.stat().st_size])
    killed.kill()
    killed.communicate(timeout=WITHIN_S)
    assert (killed.returncode, list(folder.glob("plan-*"))) == (-signal.SIGKILL, [])
    done = subprocess.run([*COMMAND, str(job), "-o", "json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"] == NUM_DOCUMENTS / 2
    assert [path.name for path in folder.glob("*plan-*")] == [path.name for path in folder.glob("plan-*")]


def on_node(name: str, job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(named(name, *COMMAND, str(job), "--jobs=1"), stdout=subprocess.PIPE, text=True)
