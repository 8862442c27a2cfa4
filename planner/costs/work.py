"""What a stage does for one micro-batch: seconds of its ops, and the bytes that they hold.

Owns the costs of ops. Does not order them (``schedule``, ``decoupled``) or run them (``timeline``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import msgspec

from oobleckd.planner.costs.apart import kept_bytes, weight_s
from oobleckd.planner.costs.model import stage_costs
from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.plan import Plan, Range, Recompute
from oobleckd.planner.profile import NOTHING, HeldBesides, Profile
from oobleckd.planner.schedule import Op, ScheduleError


class StageWork(msgspec.Struct, frozen=True):
    """One stage and one micro-batch on one device.

    In seconds: forward, input gradients (I), weight gradients (W), and the sends of activations
    (0 on the last stage) and of gradients (0 on the first). ``activation_bytes`` are held from F on, of them
    ``kept_bytes`` between I and W; ``base_bytes`` always (state, reserve). ``limit_bytes`` of the
    device bounds the sum; 0: nothing does.
    """

    forward_s: float
    input_s: float
    weight_s: float
    send_s: float = 0.0
    return_s: float = 0.0
    activation_bytes: int = 0
    kept_bytes: int = 0
    base_bytes: int = 0
    limit_bytes: int = 0

    def seconds(self, op: Op) -> float:
        """What ``op`` takes; receives, the reduce and the update are free."""
        taken = {
            "F": self.forward_s,
            "B": self.input_s + self.weight_s,
            "I": self.input_s,
            "W": self.weight_s,
            "SA": self.send_s,
            "SG": self.return_s,
        }
        return taken.get(op.kind, 0.0)

    def changes(self) -> dict[str, int]:
        """Kind of op -> the bytes that it adds to what is held; kinds that change nothing are left out."""
        return {
            "F": self.activation_bytes,
            "B": -self.activation_bytes,
            "I": self.kept_bytes - self.activation_bytes,
            "W": -self.kept_bytes,
        }

    def peak_bytes(self, kinds: Iterable[str]) -> int:
        """The most that is held at once when ops of ``kinds`` run in this order."""
        changes = self.changes()
        held = peak = self.base_bytes
        for kind in kinds:
            held += changes.get(kind, 0)
            peak = max(peak, held)
        return peak

    def fits(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` are within the device's limit."""
        return not self.limit_bytes or num_bytes <= self.limit_bytes


class DeviceWork(msgspec.Struct, frozen=True):
    """What a device does: its virtual ``stages``, by number."""

    stages: dict[int, StageWork]

    def seconds(self, op: Op) -> float:
        """What ``op`` takes; receives, the reduce and the update are free."""
        return self.stages[op.stage].seconds(op) if op.stage >= 0 else 0.0

    def peak_bytes(self, ops: Iterable[Op]) -> int:
        """The most that is held at once when ``ops`` run in this order."""
        changes = {stage: work.changes() for stage, work in self.stages.items()}
        held = peak = sum(work.base_bytes for work in self.stages.values())
        for op in ops:
            held += changes[op.stage].get(op.kind, 0) if op.stage >= 0 else 0
            peak = max(peak, held)
        return peak

    @property
    def limit_bytes(self) -> int:
        """What the device has room for; 0: nothing bounds it."""
        return max(work.limit_bytes for work in self.stages.values())


def stage_works(
    stages: Sequence[Range],
    profile: Profile,
    device_memory_bytes: int = 0,
    chunks: int = 1,
    besides: Sequence[int] = (),
    held: HeldBesides = NOTHING,
    recompute: Sequence[Recompute] = (),
    *,
    apart: bool = False,
) -> tuple[StageWork, ...]:
    """The work of a pipeline of ``stages``, of which a device has as many as ``chunks``, and so much memory
    (0: unlimited).

    With two the pipeline has the shape of a V: the stages in its middle are neighbours on one device, between
    which nothing is sent; what the runtime takes counts for the first of a device. ``besides``: bytes that a
    stage's device holds of others (as a redundant holder); ``held``: what it keeps besides its stages.
    ``recompute``: what each stage computes again (none: nothing), of which a device does one block at a time;
    that is in its B, or its I. ``apart``: as much is held from F on as from I on, at least (``recomputed``).
    """
    costs = stage_costs(profile)
    nothing: Recompute = "none"
    modes = recompute or (nothing,) * len(stages)
    by_mode = {mode: recomputed(profile, mode, apart=apart) for mode in modes}
    once = [by_mode[mode].once_bytes(part.layers()) for part, mode in zip(stages, modes, strict=True)]
    works = []
    middle = stages[len(stages) // 2].start if chunks > 1 else -1
    for place, part in enumerate(stages):
        second = chunks > 1 and place >= len(stages) // 2
        in_mode = by_mode[modes[place]].profile
        layers = [in_mode.layers[layer] for layer in part.layers()]
        backward_s = sum(layer.backward_s for layer in layers)
        of_weights = sum(map(weight_s, layers))
        works.append(
            StageWork(
                forward_s=sum(layer.forward_s for layer in layers),
                input_s=backward_s - of_weights,
                weight_s=of_weights,
                send_s=float(costs.cut_s[part.stop]) if part.stop != middle else 0.0,
                return_s=float(costs.cut_s[part.start]) if part.start != middle else 0.0,
                activation_bytes=in_mode.activation_bytes(part.layers()),
                kept_bytes=sum(map(kept_bytes, layers)),
                base_bytes=ceil(
                    (1 + held.state_copies)
                    * sum(layer.state_bytes for layer in layers)
                    / profile.devices_per_stage
                )
                + (not second) * profile.reserve_bytes
                + (0 if second else max(once[place], once[-1 - place] if chunks > 1 else 0))
                + held.device_bytes
                + (besides[place] if besides else 0),
                limit_bytes=device_memory_bytes,
            )
        )
    return tuple(works)


def plan_works(plan: Plan, profile: Profile, device_memory_bytes: int = 0) -> dict[str, DeviceWork]:
    """Device -> its work, for every device of ``plan``."""
    made: dict[tuple[tuple[Range, ...], int, tuple[Recompute, ...]], tuple[StageWork, ...]] = {}
    works: dict[str, DeviceWork] = {}
    for pipeline in plan.pipelines:
        stages = tuple(segment.layers for segment in pipeline.segments)
        key = stages, pipeline.chunks, plan.modes_of(pipeline)
        if key not in made:
            made[key] = stage_works(stages, profile, device_memory_bytes, key[1], recompute=key[2])
        for stage, (segment, work) in enumerate(zip(pipeline.segments, made[key], strict=True)):
            works.setdefault(segment.device, DeviceWork({})).stages[stage] = work
    return works


def check_room(works: Sequence[StageWork], chunks: int = 1) -> None:
    """Raises ScheduleError where a device has no room for a single micro-batch in each of its stages: no
    order helps there.
    """
    for first in range(len(works) // chunks):
        stages = [first, len(works) - 1 - first][:chunks]
        min_bytes, limit = (
            sum(works[s].peak_bytes("F") for s in stages),
            max(works[s].limit_bytes for s in stages),
        )
        if 0 < limit < min_bytes:
            raise ScheduleError(
                f"stage {' and '.join(map(str, stages))} needs {min_bytes:,} bytes for one micro-batch in "
                "flight and the device "
                f"has {limit:,}: raise resources.device_memory, or lower train.micro_batch"
            )


def max_in_flight(works: Sequence[StageWork]) -> tuple[int, ...]:
    """Stage -> the micro-batches in flight with which 1F1B fits; never more than it wants.

    A stage cannot hold more than the one before it has sent, hence the running minimum. Raises
    ScheduleError.
    """
    check_room(works)
    caps: list[int] = []
    for stage, work in enumerate(works):
        cap = min([len(works) - stage, *caps[-1:]])
        while not work.fits(work.peak_bytes("F" * cap)):
            cap -= 1
        caps.append(cap)
    return tuple(caps)
