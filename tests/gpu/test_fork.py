"""A device on a GPU as a fork: nothing that it was forked from has touched the driver."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers import gpu

pytestmark = pytest.mark.gpu
CODE = """
import json, os, sys
from oobleckd.worker.fork import forker
forker.load()
told, tell = os.pipe()
if os.fork() == 0:
    import torch
    bad = torch.cuda._is_in_bad_fork()
    total = torch.ones(8, device=sys.argv[1]).sum().item() if not bad else 0
    os.write(tell, json.dumps([bad, total]).encode())
    os._exit(0)
os.close(tell)
print(os.fdopen(told).read())
"""


def test_a_fork_of_a_process_that_has_torch_loaded_can_use_the_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, gpu.KIND], capture_output=True, text=True, check=True)
    bad, total = json.loads(done.stdout)
    assert not bad
    assert total == 8
