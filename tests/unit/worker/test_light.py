"""What a worker does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

from oobleckd.worker.models.light import _without_a_look_at_all_families

_SPLIT = """
import sys
import oobleckd.worker.device.device
from oobleckd.planner.plan import Layers, Range
from tests.helpers.models import CPU, layered_step, small_job, some_batch
from oobleckd.worker.models import load_spec
from oobleckd.worker.state.store import Store
spec = load_spec(small_job(sys.argv[1], train={"precision": "bf16"}))
whole, store = Layers.of(Range(0, spec.num_layers)), Store(spec, CPU)
store.adopt(whole, {bucket: store.fresh(bucket) for bucket in store.needed(whole)})
layered_step(spec, list(store.layers.values()), some_batch(spec))
heavy = {"scipy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
if sys.argv[1] == "gpt2":  # the others make rotary tables or positions on the meta device, which needs it
    heavy.add("sympy")
heavy &= set(sys.modules)
assert not heavy, heavy
"""
_WANTS_THEM = """
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


_NEEDS_THE_COMPILER = "from torch._dynamo.utils import is_compile_supported\n"
_BREAKS_ONCE = """
import sys

class Breaks:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.loss.loss_utils" and sys.modules.get("scipy", "") is None:
            raise ImportError("no scipy, no loss")

sys.meta_path.insert(0, Breaks())
import oobleckd.worker.models
from tests.helpers.models import small_job
from oobleckd.worker.models import load_spec
import scipy.optimize, transformers
assert transformers.modeling_utils.PreTrainedModel
assert load_spec(small_job("llama")).num_layers
"""


_FORKS = """
import json, os, sys
import torch
sys.stdout.flush()
for name, program, arguments in json.load(sys.stdin):
    if not os.fork():
        sys.argv[1:] = arguments
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
        break
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Each program in a fork of one process that has torch, as a worker's is, and nothing else of it."""
_BESIDE = "import sys; sys.path.insert(0, sys.argv[2])\n"
_PROGRAMS = (
    ("without them, and whoever wants them finds them", _SPLIT + _WANTS_THEM, ["gpt2"]),
    ("of experts", _SPLIT, ["qwen3_moe"]),
    ("libraries that a GPU machine has are left alone", _BESIDE + _SPLIT + _WANTS_THEM, ["llama", "beside"]),
    ("where that does not work it comes as it is", _BREAKS_ONCE, []),
)


def test_a_worker_imports_no_compiler_and_no_scipy_and_whoever_wants_them_finds_them(tmp_path: Path) -> None:
    """Also beside libraries of which some need the compiler or scipy as soon as they are imported; and where
    it does not work, transformers comes with all its parts.
    """
    for library in ("torchvision", "sklearn", "accelerate", "peft", "timm", "librosa"):
        folder = tmp_path / "beside" / library
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(_NEEDS_THE_COMPILER)
        info = folder.with_name(f"{library}-99.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 99.0\n")
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        input=json.dumps(_PROGRAMS), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = {name: (tmp_path / name).read_text() for name, _, _ in _PROGRAMS}
    assert done.stdout.splitlines() == [f"{name} 0" for name in said], said
    without = said.pop("where that does not work it comes as it is")
    assert "imported with all its parts, which takes longer: without them, no scipy, no loss" in without
    assert not any(said.values()), said


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
