"""The tables `[schedule]` and `[resources]` of a job.toml: in which order devices work, what they hold
meanwhile, and what the job may use.

Owns their fields. Which of them go with each other, and with a policy, the whole job says (``job``).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from oobleckd.protocol.jobtable import JobError, JobTable
from oobleckd.protocol.units import parse_rate, parse_size

FIRST_NAMES = {"shadow_memory": "redundant_memory"}
"""Keys of ``[schedule]`` by their first names, which stay in journals, manifests and the API, and what a
job.toml calls them.
"""
_MIN_LINK = 1000.0  # bytes a second: whoever says less forgot the unit


class Schedule(JobTable, frozen=True):
    """In which order a device works (docs/schedules.md)."""

    backward: Annotated[
        Literal["fused", "decoupled"],
        Meta(
            description="fused: a backward pass as a whole. decoupled: input gradients first, for which the "
            "stage before waits; "
            "weight gradients fill the bubbles, in an order that the planner made."
        ),
    ] = "fused"

    chunks: Annotated[
        Literal["auto", 1, 2],
        Meta(
            description="Parts of a pipeline that a device has, where the backward is decoupled. 2: one of "
            "the first half and its "
            "counterpart of the second, so that the first device begins and ends a micro-batch; less "
            "waiting, twice the messages. A pipeline whose devices have "
            "no two layers each, or no room for both parts, has one. auto: whichever is faster as modelled."
        ),
    ] = "auto"
    update: Annotated[
        Literal["flushed", "staggered"],
        Meta(
            description="flushed: weights are updated when all devices have reduced all gradients. "
            "staggered: a device updates its own "
            "as soon as it can and goes on with the next step; where a step turns out to be clipped or "
            "skipped, that is taken back."
        ),
    ] = "flushed"
    boundary_memory: Annotated[
        str | int,
        Meta(
            description="Bytes of a device's boundary cache, which keeps what it sent to its neighbours "
            "until the step is committed "
            "(beside a GPU: of the host's memory), so that only a lost device's own work is done again; 0: "
            "none."
        ),
    ] = "1GiB"
    sum_copies: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="How often in a step a device sends a copy of its gradient sums to a peer with the "
            "same layers, so that a lost "
            "device's work since the last copy alone is done again; 0: never. Each costs as much traffic as "
            "the exchange of all "
            "gradients, and the host memory of its sums three times (sent, arriving, kept).",
        ),
    ] = 0
    recompute: Annotated[
        Literal["none", "selective", "blocks", "auto"],
        Meta(
            description="What of a block's activations is not held for the backward, but computed again "
            "there (activation checkpointing): none; selective: all but what matrix products and attention "
            "make; blocks: all but a block's input. auto: what the planner chooses for each stage: as little "
            "as its memory allows. The bits are the same."
        ),
    ] = "none"
    redundant_memory: Annotated[
        str | int,
        Meta(
            description="Bytes that a device may use, where it also holds layers for another, to keep that "
            "one's forward passes, "
            "which it runs while it would wait (beside a GPU: of the host's memory), so that after a loss "
            "only backward passes "
            "are left to do; 0: none is run."
        ),
    ] = msgspec.field(default="1GiB", name="shadow_memory")  # its first name, see ``FIRST_NAMES``

    @property
    def apart(self) -> bool:
        """Whether the backward is decoupled."""
        return self.backward == "decoupled"

    @property
    def num_chunks(self) -> int:
        """``chunks`` as a number, 0 for auto."""
        return 0 if self.chunks == "auto" else self.chunks

    @property
    def boundary_bytes(self) -> int:
        """``boundary_memory`` in bytes."""
        return parse_size(self.boundary_memory)

    @property
    def redundant_bytes(self) -> int:
        """``redundant_memory`` in bytes."""
        return parse_size(self.redundant_memory)


class Resources(JobTable, frozen=True):
    """What the job may use."""

    device_memory: Annotated[
        str | int,
        Meta(
            description='Cap on what the job takes of each device\'s memory, such as "48MiB"; 0: all of it, '
            "on a CPU its "
            "share of the host's less the spares'. What the runtime itself takes of a GPU is not counted."
        ),
    ] = 0
    max_nodes: Annotated[
        int,
        Meta(ge=0, description="Nodes to use at most; 0: all. The others stand by for a dead one's place."),
    ] = 0
    min_pipeline_nodes: Annotated[
        int,
        Meta(ge=1, description="Nodes of a pipeline at least, even where the model fits fewer."),
    ] = 1

    link: Annotated[
        str | int,
        Meta(
            description='What a node sends to another one, as achieved, such as "25Gbit/s" or "2.5GB/s": '
            "what copies after a loss, tensors between stages and the exchange of gradients are planned "
            "with. 0: for copies and tensors 1 GB/s, or in a simulation what the device's data sheet has; "
            "the exchange is then not in the time of a step."
        ),
    ] = 0

    devices_per_stage: Annotated[
        Literal["auto", 1, 2, 4, 8],
        Meta(
            description="Devices of a node that hold the state of a stage between them and compute as many "
            "micro-batches at a time. auto: the fastest of those that fit, chosen when the job starts and "
            "again when nodes come or go. "
            "On GPUs, where more than 1 has not run yet, auto is 1."
        ),
    ] = 1

    @property
    def link_bytes_per_s(self) -> float:
        """The link's bandwidth in bytes a second, one way; 0 when it is not said."""
        return parse_rate(self.link)

    @property
    def device_memory_bytes(self) -> int:
        """The cap in bytes; 0 when there is none."""
        return parse_size(self.device_memory)


def check_stages(resources: Resources, *, compiled: bool) -> None:
    """Raises JobError for stages of several devices that compute with ``compiled`` layers."""
    wanted = resources.devices_per_stage
    if wanted != 1 and compiled:
        raise JobError(
            "resources.devices_per_stage",
            f"{wanted!r} beside train.compile: layers whose weights are gathered cannot be compiled yet",
            "set train.compile to false, or leave resources.devices_per_stage out",
        )


def check_link(resources: Resources) -> None:
    """Raises JobError for a link that is no rate."""
    hint = 'write a number with a unit, such as "25Gbit/s" or "2.5GB/s"'
    try:
        rate = resources.link_bytes_per_s
    except ValueError as error:
        raise JobError("resources.link", str(error), hint) from error
    if resources.link != 0 and rate < _MIN_LINK:
        raise JobError("resources.link", f"{resources.link!r} is less than a kilobyte a second", hint)
