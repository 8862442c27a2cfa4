"""Which attention kernel a card chooses, beside the rule by which ``plan -v`` says it without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.worker.canary.attention import attention_of, chosen, chosen_by_cuda
from oobleckd.worker.canary.canary import sung
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.models import load_spec
from tests.helpers import gpu
from tests.helpers.models import small_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "falcon", "gpt2", "llama", "modernbert"])
def test_the_rule_is_what_torch_does_in_strict_mode(tmp_path: Path, family: str, precision: str) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    spec = load_spec(small_job(family, train={"precision": precision}))
    for call, _ in attention_of(spec):
        assert call is not None
        assert chosen(call, device) == chosen_by_cuda(call)[0]


@pytest.mark.parametrize("family", ["bert", "falcon", "gemma2", "gpt2", "llama"])
def test_a_canary_repeats_on_a_card(tmp_path: Path, family: str) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    spec = load_spec(small_job(family, train={"precision": "bf16"}))
    assert sung(spec, device) == sung(spec, device)
