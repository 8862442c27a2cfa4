"""When layers are compiled, where that is kept, who loads it, and whose error it is where one cannot be.

Nothing is compiled here: a stand-in for a layer writes into the folder of torch's compiler what that would.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.protocol.artifactmessages import ArtifactHere, ArtifactMade, NoArtifact, WantArtifact
from oobleckd.protocol.message import Message
from oobleckd.worker.artifacts import folder as artifact
from oobleckd.worker.artifacts.asking import Asking
from oobleckd.worker.device import compiling
from oobleckd.worker.device.compiling import Compiling, folder_of, load_kept
from oobleckd.worker.device.measure import bind
from oobleckd.worker.device.traits import traits
from oobleckd.worker.models import Layer, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import CPU, small_job

JOB = small_job("gpt2")
SPEC = load_spec(JOB)
LAYERS = range(1, SPEC.num_layers)
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


class Compiler:
    """What it has compiled, by the folder; a program that is there it loads."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def bind(self, layer: int) -> Layer:
        program = Path(os.environ[FOLDER]) / "ab" / "program.so"
        if not program.exists():
            program.parent.mkdir(exist_ok=True)
            program.write_bytes(b"\x7fELF")
            self.compiled.append(program.parents[1].name)
        return bind(SPEC, layer, CPU)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setenv(FOLDER, "")  # put back
    monkeypatch.setattr(compiling, "check_compiler", lambda _: None)
    monkeypatch.setattr(compiling, "find_instructions", lambda: Path(os.environ[FOLDER], "isa.so").touch())
    monkeypatch.setattr(compiling, "headers_in", lambda _: None)
    monkeypatch.setattr(compiling, "bind", lambda _spec, layer, device: made.bind(layer))
    return made


def run(here: Compiling, compiler: Compiler) -> None:
    here.missing(JOB, LAYERS)
    here.begin()
    here.run(SPEC, LAYERS, compiler.bind)


def answering(root: Path, archives: dict[str, Path], said: list[Message]) -> Asking:
    """A device's questions, with an agent that has ``archives``."""

    def say(message: Message) -> None:
        said.append(message)
        if isinstance(message, WantArtifact):
            path = str(shutil.copy(archives[message.key], root)) if message.key in archives else ""
            asking.heard(ArtifactHere("of another question", ""))
            asking.heard(ArtifactHere(message.key, path))
        if isinstance(message, ArtifactMade):
            archives[message.key] = Path(shutil.move(message.path, root.parent / message.key))

    asking = Asking(say)
    return asking


def test_another_compiler_torch_or_place_of_it_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(traits(CPU))
    folders = {folder_of(tmp_path, CPU)}
    for name in ("torch", "C++", "instructions", "transformers", "oobleckd"):
        other = found | {name: "another"}
        monkeypatch.setattr(compiling, "traits", lambda _, other=other: other)
        folders.add(folder_of(tmp_path, CPU))
    monkeypatch.setenv("CXX", "/opt/bin/g++")
    folders.add(folder_of(tmp_path, CPU))
    assert len(folders) == 7
    assert all(folder.parent == tmp_path for folder in folders)


def test_each_kind_is_compiled_once_and_loaded_by_the_next_process(
    tmp_path: Path, compiler: Compiler
) -> None:
    first, next_one = Compiling(tmp_path, CPU), Compiling(tmp_path, CPU)
    run(first, compiler)
    run(next_one, compiler)
    assert (first.num_compiled, first.num_loaded) == (2, 0)  # a block and the head
    assert (next_one.num_compiled, next_one.num_loaded) == (0, 2)
    assert len(compiler.compiled) == 2
    assert first.missing(JOB, LAYERS) == []
    other = msgspec.structs.replace(JOB, train=msgspec.structs.replace(JOB.train, sequence=4))
    assert first.missing(other, LAYERS) == list(LAYERS)


def test_another_node_compiles_nothing_where_one_has(tmp_path: Path, compiler: Compiler) -> None:
    archives: dict[str, Path] = {}
    said: dict[str, list[Message]] = {}
    for node in ("one", "two", "three"):
        (tmp_path / node).mkdir()
        here = Compiling(tmp_path / node, CPU)
        here.asking = answering(tmp_path / node, archives, said.setdefault(node, []))
        run(here, compiler)
        assert here.num_loaded == (0 if node == "one" else 2)
        assert not list((tmp_path / node).glob(".*"))  # nothing is left of what came, or goes
    assert len(compiler.compiled) == 2
    kinds = [type(message) for message in said["two"]]
    assert kinds == [WantArtifact, WantArtifact]
    assert [type(message) for message in said["one"]] == [WantArtifact, ArtifactMade] * 2


@pytest.mark.parametrize("harm", ["archive", "program", "foreign"])
def test_what_is_damaged_or_does_not_fit_is_compiled_anew(
    tmp_path: Path, compiler: Compiler, harm: str
) -> None:
    archives: dict[str, Path] = {}
    first = Compiling(tmp_path / "one", CPU)
    first.asking = answering(tmp_path / "one", archives, [])
    run(first, compiler)
    second = Compiling(tmp_path / "two", CPU)
    if harm == "archive":
        (tmp_path / "two").mkdir()
        second.asking = answering(tmp_path / "two", archives, [])
        for path in archives.values():
            path.write_bytes(path.read_bytes()[:-300])
    else:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        for path in (tmp_path / "two").rglob("program.so"):
            if harm == "program":
                path.write_bytes(b"\x7fELf")
            else:  # of another graph: torch looks for another name
                path.rename(path.with_name("of_another_graph.so"))
                artifact.seal(path.parents[1])
    run(second, compiler)
    assert second.num_compiled == 2
    assert len(compiler.compiled) == 4
    third = Compiling(tmp_path / "two", CPU)
    run(third, compiler)
    assert third.num_loaded == 2


def test_a_spare_loads_what_is_there_and_nothing_is_left_for_its_place(
    tmp_path: Path, compiler: Compiler
) -> None:
    spare = Compiling(tmp_path, CPU)
    assert load_kept(spare, CPU, JOB) == 0
    assert not compiler.compiled  # it never compiles
    run(Compiling(tmp_path, CPU), compiler)
    assert load_kept(spare, CPU, JOB) == 2
    assert spare.missing(JOB, LAYERS) == []
    assert len(compiler.compiled) == 2


def test_a_spare_that_is_wanted_stops_loading(tmp_path: Path, compiler: Compiler) -> None:
    run(Compiling(tmp_path, CPU), compiler)
    spare, asked = Compiling(tmp_path, CPU), iter([False, True])
    assert load_kept(spare, CPU, JOB, lambda: next(asked)) == 1
    assert 0 < len(spare.missing(JOB, LAYERS)) < len(LAYERS)


def test_what_cannot_be_compiled_is_named_with_its_layer(tmp_path: Path, compiler: Compiler) -> None:
    def bind(_: int) -> Layer:
        raise RuntimeError("graph break\nand where")

    said: list[Message] = []
    here = Compiling(tmp_path / "in", CPU)
    here.asking = answering(tmp_path, {}, said)
    assert here.missing(JOB, range(4)) == [1, 2, 3]
    here.begin()
    with pytest.raises(UserError, match=r"block 0 of GPT2LMHeadModel cannot be compiled: graph break$"):
        here.run(SPEC, [1], bind)
    assert [type(message) for message in said] == [WantArtifact, NoArtifact]  # so that others go on
    assert not [path for path in folder_of(tmp_path / "in", CPU).iterdir() if path.name.startswith(".")]


def test_too_little_memory_is_none_of_it(tmp_path: Path, compiler: Compiler) -> None:
    def bind(_: int) -> Layer:
        raise torch.OutOfMemoryError("CUDA out of memory")

    here = Compiling(tmp_path, CPU)
    here.missing(JOB, range(4))
    here.begin()
    with pytest.raises(torch.OutOfMemoryError):
        here.run(SPEC, [3], bind)


def test_one_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    began, may_end, second = threading.Event(), threading.Event(), threading.Event()
    folder = tmp_path / "traits" / "what"

    def compiles() -> None:
        with compiling._alone(folder):
            began.set()
            may_end.wait()

    def loads() -> None:
        with compiling._alone(folder):
            second.set()

    one, other = threading.Thread(target=compiles), threading.Thread(target=loads)
    one.start()
    began.wait()
    other.start()
    with compiling._alone(folder.with_name("something else")):
        assert not second.is_set()
    may_end.set()
    one.join()
    other.join()
    assert second.is_set()


def test_a_folder_without_locks_is_no_error(tmp_path: Path) -> None:
    with compiling._alone(tmp_path / "gone" / "too" / "what"):
        pass


def test_what_nobody_has_loaded_for_long_goes(tmp_path: Path, compiler: Compiler) -> None:
    run(Compiling(tmp_path, CPU), compiler)
    folder = folder_of(tmp_path, CPU)
    old = [path for path in folder.iterdir() if path.is_dir() and path.name != "instructions"]
    (tmp_path / "of another torch" / "headers").mkdir(parents=True)
    for path in (*old, tmp_path / "of another torch", tmp_path / "of another torch" / "headers"):
        for each in (path, *path.iterdir()):
            os.utime(each, (0, 0))
    run(Compiling(tmp_path, CPU), compiler)
    assert len(compiler.compiled) == 4
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]
