"""Data sheets of devices: what a plan assumes where nothing was measured, and the peaks of MFU. Owns the
numbers, computes nothing.

Peaks are those of dense matrices. Sources, by name of the maker's document:

- A40: "NVIDIA A40 datasheet" (PCIe, 48 GB of GDDR6, 696 GB/s; 37.4 TFLOPS float32, 149.7 bfloat16).
- A100: "NVIDIA A100 Tensor Core GPU datasheet" (SXM, 80 GB of HBM2e, 2,039 GB/s; 19.5 and 312).
- H100, H200: "NVIDIA H100 / H200 Tensor Core GPU datasheet" (SXM; 80 GB, 3.35 TB/s and
  141 GB, 4.8 TB/s; 67 float32, 989 bfloat16, half of the 1,979 that are printed for sparse matrices).
- Links: a port for each GPU, as in DGX A100 (200 Gb/s) and DGX H100 and H200 (400 Gb/s); for A40 100 Gb/s.
- Among the GPUs of a node, through NVSwitch: NVLink 3 (A100, 600 GB/s both ways together) and 4 (H100 and
  H200, 900 GB/s); A40: 16 lanes of PCIe 4.0.
- To the host: 16 lanes of PCIe 4.0 (A40, A100) or 5.0 (H100, H200), of the same data sheets.
- cpu: one core of 2.5 GHz with two AVX2 multiply-adds a cycle, and 10 Gb/s.

How much of a peak training gets (``utilisation``): 42 to 54 % were reported on A100 (Korthikanti et al.
2022), 38 to 43 % on H100 (Llama 3, 2024), for fused layers of large models. Layers here are not fused, so we
take less. Links and memory give four fifths of their rate. A layer's pass is some thirty operations, and
Python starts one in about 10 us.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Positive = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(gt=0, le=1)]


class DeviceSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device as its maker describes it, and how much of that training gets.

    ``fp32_flops``, ``bf16_flops``: peaks, in operations a second. ``utilisation``: the share of the peak that
    matrix products get. ``memory_bytes``: 0 where nobody knows of a limit; ``reserve_bytes`` of it the
    runtime takes. ``memory_bytes_per_s``, ``link_bytes_per_s`` (to another node, one way),
    ``host_bytes_per_s`` (from the host's memory; 0: it is the same), ``node_bytes_per_s`` (from all other
    devices of its node together, one way; 0: not known): as achieved. ``dispatch_s``: what starting the
    operations of a layer takes in each pass, however small they are. ``fused_attention``: dropout of
    attention's probabilities keeps none of them (on a CPU it does).
    """

    name: str
    fp32_flops: _Positive
    bf16_flops: _Positive
    memory_bytes_per_s: _Positive
    link_bytes_per_s: _Positive
    utilisation: _Share = 0.35
    link_latency_s: Annotated[float, Meta(ge=0)] = 20e-6
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    reserve_bytes: Annotated[int, Meta(ge=0)] = 0
    host_bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0
    dispatch_s: Annotated[float, Meta(ge=0)] = 300e-6
    fused_attention: bool = True
    node_bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0

    def flops(self, precision: str) -> float:
        """Operations a second that matrix products get in ``precision``, "fp32" or "bf16"."""
        return self.utilisation * self.peak(precision)

    def peak(self, precision: str) -> float:
        """Operations a second at most, in ``precision``."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


_ACHIEVED = 0.8
_PCIE_4, _PCIE_5 = 32e9, 64e9  # 16 lanes, one way
_NVLINK_3, _NVLINK_4 = 300e9, 450e9  # one way
_CUDA_BYTES = 2 << 30  # context, cuBLAS workspaces, NCCL buffers, fragments


def _gpu(
    name: str,
    fp32_flops: float,
    bf16_flops: float,
    memory_bytes: float,
    memory_rate: float,
    link_bits: float,
    host_rate: float,
    node_rate: float,
) -> DeviceSheet:
    """A GPU; ``memory_rate``, ``host_rate`` and ``node_rate`` in bytes a second and ``link_bits`` a second as
    the maker gives them.
    """
    return DeviceSheet(
        name=name,
        fp32_flops=fp32_flops,
        bf16_flops=bf16_flops,
        memory_bytes=int(memory_bytes),
        memory_bytes_per_s=_ACHIEVED * memory_rate,
        link_bytes_per_s=_ACHIEVED * link_bits / 8,
        reserve_bytes=_CUDA_BYTES,
        host_bytes_per_s=_ACHIEVED * host_rate,
        node_bytes_per_s=_ACHIEVED * node_rate,
    )


SHEETS: dict[str, DeviceSheet] = {
    "a40": _gpu("NVIDIA A40", 37.4e12, 149.7e12, 48e9, 696e9, 100e9, _PCIE_4, _PCIE_4),
    "a100": _gpu("NVIDIA A100 SXM 80 GB", 19.5e12, 312e12, 80e9, 2039e9, 200e9, _PCIE_4, _NVLINK_3),
    "h100": _gpu("NVIDIA H100 SXM", 67e12, 989e12, 80e9, 3.35e12, 400e9, _PCIE_5, _NVLINK_4),
    "h200": _gpu("NVIDIA H200 SXM", 67e12, 989e12, 141e9, 4.8e12, 400e9, _PCIE_5, _NVLINK_4),
    "cpu": DeviceSheet(
        name="one CPU core",
        fp32_flops=80e9,
        bf16_flops=80e9,
        memory_bytes_per_s=_ACHIEVED * 10e9,
        link_bytes_per_s=_ACHIEVED * 10e9 / 8,
        link_latency_s=100e-6,
        fused_attention=False,
    ),
}
"""By the name that ``oobleckctl plan --device`` knows."""

# A name that only resembles these is another board's, with another peak. (D-progress-003)
CARDS: dict[str, str] = {
    "NVIDIA A40": "a40",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}
"""By the name that the driver has for a card, whose peaks are those of that sheet. PCIe and NVL boards of the
same chips have others, and a CPU's follow from its clock, its cores and what else runs there: of these
no peak is known.
"""


def has_peak(sheet: DeviceSheet) -> bool:
    """Whether the sheet's peaks are a maker's, and not what is assumed of a core of any CPU."""
    core = SHEETS["cpu"]
    return (sheet.fp32_flops, sheet.bf16_flops) != (core.fp32_flops, core.bf16_flops)


def sheet_of(card: str) -> DeviceSheet | None:
    """The data sheet of a card by its driver's name; None where none is known."""
    key = CARDS.get(card)
    return SHEETS[key] if key is not None else None
