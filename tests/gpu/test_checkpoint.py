"""The copy of a share on a GPU: what is written is the state at the boundary, whatever the next update does
meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oobleckd.planner.plan import Layout, Range, Segment, holdings_of
from oobleckd.protocol.parts import Counters
from oobleckd.worker.checkpointing.snapshot import take_share
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.models import load_spec
from oobleckd.worker.state.store import Store
from tests.helpers import gpu
from tests.helpers.models import small_job

pytestmark = pytest.mark.gpu
UPDATES = 20


def test_the_copy_is_made_before_the_next_update(tmp_path: Path) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    job = small_job("llama", checkpoint={"every": 2, "dir": str(tmp_path)})
    store = Store(load_spec(job), device)
    held = holdings_of([Segment("node-1/0", Range(0, store.spec.num_layers))])
    store.adopt(held["node-1/0"], {bucket: store.fresh(bucket) for bucket in store.needed(held["node-1/0"])})
    layout = Layout(1, store.spec.num_layers, held, ())
    for update in range(UPDATES):
        before = {
            bucket: [t.cpu().clone() for t in state.tensors()] for bucket, state in store.buckets.items()
        }
        counters = Counters(update, update, update)
        share = take_share("node-1/0", "job-1", job, store, layout, {"node-1/0"}, counters, "", copied=True)
        store.settle()
        with torch.no_grad():
            for state in store.buckets.values():
                for tensor in state.tensors():
                    tensor.add_(1.0)
        for bucket, state in share.states.items():
            for copy, wanted in zip(state.tensors(), before[bucket], strict=True):
                assert copy.device.type == "cpu"
                assert torch.equal(copy, wanted)
