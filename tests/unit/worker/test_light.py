"""What a worker does not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.models.light import _without_a_look_at_all_families

_SPLIT = """
import sys
import worker.device
from planner.plan import Layers, Range
from tests.helpers.models import CPU, layered_step, small_job, some_batch
from worker.models import load_spec
from worker.store import Store
spec = load_spec(small_job(sys.argv[1]))
whole, store = Layers.of(Range(0, spec.num_layers)), Store(spec, CPU)
store.adopt(whole, {bucket: store.fresh(bucket) for bucket in store.needed(whole)})
layered_step(spec, list(store.layers.values()), some_batch(spec))
heavy = {"scipy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
if sys.argv[1] == "gpt2":  # the others make their rotary tables or positions on the meta device, which needs it
    heavy.add("sympy")
heavy &= set(sys.modules)
assert not heavy, heavy
import torch
from transformers.utils import is_torch_available
assert torch.distributed.is_available() and is_torch_available()
import scipy.optimize
import torch._dynamo
import transformers
assert "T5Config" not in dir(transformers), "all families were read"
from transformers.models.t5 import T5Config
assert type(transformers.AutoConfig.for_model("t5")) is T5Config
assert torch._dynamo.config is not torch._dynamo.disable
"""


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "bert"])
def test_a_worker_imports_no_compiler_and_no_scipy_and_whoever_wants_them_finds_them(family: str) -> None:
    done = subprocess.run([sys.executable, "-c", _SPLIT, family], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_may_scan_other_folders_in_any_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with _without_a_look_at_all_families():
        for folder in (descriptor, str(tmp_path), os.fsencode(tmp_path), tmp_path):
            with os.scandir(folder) as entries:
                (entry,) = entries
                assert os.fsdecode(entry.name) == "file"
    os.close(descriptor)


def test_of_the_families_one_is_seen_whoever_scans_and_however(tmp_path: Path) -> None:
    models = tmp_path / "transformers" / "models"
    for family in ("auto", "gpt2", "t5"):
        (models / family).mkdir(parents=True)
    with _without_a_look_at_all_families():
        assert [entry.name for entry in os.scandir(models)] == ["auto"]
        with os.scandir(str(models)) as entries:
            assert next(entries).name == "auto"
            assert next(entries, None) is None
        scan = os.scandir(models)
        with scan:  # as pathlib does from Python 3.12 on
            assert [entry.name for entry in scan] == ["auto"]
        assert [path.name for path in models.rglob("*")] == ["auto"]
    assert len(list(os.scandir(models))) == 3
