"""When layers are compiled, where that is kept, and whose error it is where one cannot be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from oobleckd.worker.device import compiling
from oobleckd.worker.device.compiling import Compiling, folder_of
from oobleckd.worker.device.traits import traits
from oobleckd.worker.models import Layer, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import CPU, small_job

JOB = small_job("gpt2", train={"compile": True})


def test_another_compiler_or_torch_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(traits(CPU))
    folders = set()
    for name in ("torch", "C++", "instructions", "transformers", "oobleckd"):
        other = found | {name: "another"}
        monkeypatch.setattr(compiling, "traits", lambda _, other=other: other)
        folders.add(folder_of(tmp_path, CPU))
    assert len(folders) == 4  # graphs tell versions of transformers, and ours, from each other
    assert all(folder.parent == tmp_path for folder in folders)


def test_what_cannot_be_compiled_is_named_with_its_layer(tmp_path: Path) -> None:
    def bind(_: int) -> Layer:
        raise RuntimeError("graph break\nand where")

    tmp_path.mkdir(exist_ok=True)
    here = Compiling(tmp_path, CPU)
    folder_of(tmp_path, CPU).mkdir()
    assert here.missing(JOB, range(4)) == [1, 2, 3]
    with pytest.raises(
        UserError, match=r"block 0 of GPT2LMHeadModel cannot be compiled: graph break$"
    ) as caught:
        here.run(load_spec(JOB), [1], bind)
    assert str(folder_of(tmp_path, CPU)) in caught.value.hint


def test_too_little_memory_is_none_of_it(tmp_path: Path) -> None:
    def bind(_: int) -> Layer:
        raise torch.OutOfMemoryError("CUDA out of memory")

    here = Compiling(tmp_path, CPU)
    here.missing(JOB, range(4))
    with pytest.raises(torch.OutOfMemoryError):
        here.run(load_spec(JOB), [3], bind)


def test_one_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    began, may_end, second = threading.Event(), threading.Event(), threading.Event()

    def compiles() -> None:
        with compiling._first(tmp_path, "what"):
            began.set()
            may_end.wait()

    def loads() -> None:
        with compiling._first(tmp_path, "what"):
            second.set()

    one, other = threading.Thread(target=compiles), threading.Thread(target=loads)
    one.start()
    began.wait()
    other.start()
    with compiling._first(tmp_path, "something else"):
        assert not second.is_set()
    may_end.set()
    one.join()
    other.join()
    assert second.is_set()
    with compiling._first(tmp_path, "what"), compiling._first(tmp_path, "what"):
        pass  # what is there is loaded by all at once


def test_a_folder_without_locks_is_no_error(tmp_path: Path) -> None:
    with compiling._first(tmp_path / "gone", "what"):
        pass
