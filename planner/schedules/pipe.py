"""A pipeline as orders of ops see it: virtual stages, the devices that they are on, and who waits for whom.

Owns the letters of an order: F, I and W are forward, input gradient and weight gradient of a device's first
chunk, f, i and w those of its second. With two chunks a device (Qi et al., Pipeline Parallelism with
Controllable Memory, 2024) S devices have 2·S virtual stages and the pipeline has the shape of a V: device s
has the stages s and 2·S - 1 - s, so the first begins and ends a micro-batch, and the last has two neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleckd.planner.costs.work import StageWork

CHUNKS = (("F", "I", "W"), ("f", "i", "w"))
"""The letters of a device's first chunk, and of its second."""

Link = tuple[int, str]  # device, letter


def homes(num_stages: int, chunks: int = 1) -> tuple[int, ...]:
    """The device of each virtual stage."""
    if chunks == 1:
        return tuple(range(num_stages))
    assert chunks == 2, "one chunk a device, or two"
    assert num_stages % 2 == 0, "two chunks a device"
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class Pipe:
    """Device by device: its virtual ``stages``, and by letter ``times``, ``sources`` (whose op of the same
    micro-batch an op waits for), ``feeds`` (which F or I waits for it) and ``changes`` of what is held.
    """

    works: tuple[StageWork, ...]
    stages: tuple[tuple[int, ...], ...]
    times: tuple[dict[str, float], ...]
    sources: tuple[dict[str, Link | None], ...]
    feeds: tuple[dict[str, Link], ...]
    changes: tuple[dict[str, int], ...]
    base_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]

    @classmethod
    def of(cls, works: Sequence[StageWork], chunks: int = 1) -> Pipe:
        """Of ``works``, one for each virtual stage."""
        where = homes(len(works), chunks)
        stages = tuple(
            tuple(stage for stage, device in enumerate(where) if device == wanted)
            for wanted in range(len(works) // chunks)
        )
        times: list[dict[str, float]] = [{} for _ in stages]
        sources: list[dict[str, Link | None]] = [{} for _ in stages]
        feeds: list[dict[str, Link]] = [{} for _ in stages]
        changes: list[dict[str, int]] = [{} for _ in stages]
        letters = [CHUNKS[stages[device].index(stage)] for stage, device in enumerate(where)]
        for stage, (device, work) in enumerate(zip(where, works, strict=True)):
            f, i, w = letters[stage]
            times[device] |= {
                f: work.forward_s + work.send_s,
                i: work.input_s + work.return_s,
                w: work.weight_s,
            }
            changes[device] |= {letter: work.changes()[letter.upper()] for letter in (f, i, w)}
            before = (where[stage - 1], letters[stage - 1][0]) if stage else None
            last = stage == len(works) - 1
            behind = (device, f) if last else (where[stage + 1], letters[stage + 1][1])
            sources[device] |= {f: before, i: behind, w: (device, i)}
            for letter, source in ((f, before), (i, behind)):
                if source is not None:
                    feeds[source[0]][source[1]] = (device, letter)
        return cls(
            tuple(works),
            stages,
            tuple(times),
            tuple(sources),
            tuple(feeds),
            tuple(changes),
            tuple(sum(works[stage].base_bytes for stage in each) for each in stages),
            tuple(max(works[stage].limit_bytes for stage in each) for each in stages),
        )

    @property
    def chunks(self) -> int:
        """How many virtual stages a device has."""
        return len(self.stages[0])

    def cap(self, device: int, chunk: int) -> int:
        """How many micro-batches are in flight in 1F1B, from that stage of the device to the end."""
        return len(self.works) - self.stages[device][chunk]

    def peak_bytes(self, device: int, order: str) -> int:
        """The most that ``device`` holds at once in ``order``."""
        held = peak = self.base_bytes[device]
        changes = self.changes[device]
        for letter in order:
            held += changes[letter]
            peak = max(peak, held)
        return peak

    def fits(self, device: int, num_bytes: int) -> bool:
        """Whether ``num_bytes`` are within the limit of ``device``."""
        limit = self.limit_bytes[device]
        return not limit or num_bytes <= limit
