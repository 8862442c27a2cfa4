"""Whatever a person names as a file: it is read, or one sentence says why not, and soon."""

from __future__ import annotations

import os
import socket
import threading
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.host import anyfile, tomlwords
from oobleckd.host.anyfile import FileError
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.jobtable import JobError

JOB = 'name = "d"\n[train]\nsteps = 3\nglobal_batch = 4\nmicro_batch = 2\nsequence = 8\n'


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * 3000 + b"]" * 3000,
        b"a = " + b"{b=" * 3000 + b"1" + b"}" * 3000,
        b".".join([b"a"] * 3000) + b" = 1",
        b"[" + b".".join([b"a"] * 3000) + b"]",
        b"a = " + b"9" * 5000,
        b"a = 0x" + b"f" * 5000 + b"\nb = " + b"9" * 5000,
        b'a = "\xff"',
        b"\0",
        JOB.encode("utf-16"),
        b"#" * (2 * anyfile.MAX_BYTES),
    ],
    ids=["lists", "tables", "dots", "head", "digits", "hex", "bytes", "nul", "utf-16", "size"],
)
def test_what_is_no_table_of_ours_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    """Of any depth, size and encoding."""
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60) | st.text(alphabet="[]{}=.\"'\n\r a1-:T_", max_size=60).map(str.encode))
def test_any_bytes_are_a_table_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Nothing else comes out of it."""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    with suppress(FileError):
        assert isinstance(anyfile.toml(file), dict)


def test_the_mark_of_an_editor_is_no_part_of_the_text(tmp_path: Path) -> None:
    """UTF-8 with a byte order mark."""
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8-sig")
    assert load_job(file).name == "d"


def test_files_without_an_end_folders_and_sockets_are_refused(tmp_path: Path) -> None:
    """None of them is read to the end of the memory, or waited for."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        for path in (Path("/dev/zero"), tmp_path, tmp_path / "s"):
            with pytest.raises(FileError):
                anyfile.read(path)
    with pytest.raises(FileNotFoundError):
        anyfile.read(tmp_path / "none")
    with pytest.raises(FileError):
        anyfile.read(tmp_path / "nul\0")
    with pytest.raises(FileError):
        anyfile.read(tmp_path / ("x" * 300))


def test_a_pipe_is_read_to_its_end_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell's ``<(…)`` gives one; nobody may ever write into it."""
    pipe = tmp_path / "p"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(JOB,))
    writer.start()
    assert load_job(pipe).name == "d"
    writer.join()
    monkeypatch.setattr(anyfile, "_PIPE_S", 0.01)
    with pytest.raises(FileError):
        anyfile.read(pipe)


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ('name = "a"\n[train]\nsteps = 3\nsteps = 4\n', 4, "the key steps is there twice"),
        ("[a]\nx = 1\n[b]\n[a]\n", 4, "the table [a] is there twice"),
        ("a = 1\n[a]\n", 2, "[a]"),
        ("a = {b = 1, b = 2}\n", 1, "the key b is there twice"),
        ("name = many\n", 1, "the value of name is none: text stands in quotes"),
        ("name = 'a\n", 1, "no quotes at its end"),
        ("name\n", 1, "no = behind it"),
        ("x = [1, 2\n", 1, "no ] at its end"),
        ("= 3\n", 1, "this is neither KEY = VALUE nor [TABLE]"),
        ("x = 1 2\n", 1, "something stands behind the value"),
        ("[train\n", 1, "no ] behind it"),
        ('x = "\\q"\n', 1, "written twice"),
        ("a = {b = 1}\na.c = 2\n", 2, "nothing is added"),
    ],
)
def test_what_is_no_toml_is_told_by_line_and_key(tmp_path: Path, text: str, line: int, named: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(anyfile.FileError) as caught:
        anyfile.toml(path)
    assert f"line {line}" in caught.value.problem
    assert named in caught.value.problem
    assert "(at " not in caught.value.problem


@given(st.text(alphabet="ab=[]{}\"'\\.,\n# 1", max_size=24))
def test_no_text_is_refused_in_the_words_of_a_library(text: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = tomlwords.problem_of(error, text)
    else:
        return
    assert told.startswith("is no TOML: line ")
    assert "(at " not in told
