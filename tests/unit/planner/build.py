"""Small profiles, templates and clusters for planner tests, and the reference data."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from oobleckd.planner.plan import Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "reference.json").read_text())


def profile_of(
    rows: Sequence[Sequence[float]], *, reserve_bytes: int = 0, shared_bytes: int = 0, **link: float
) -> Profile:
    """From rows of (forward_s, backward_s, parameters, activation bytes, output bytes)."""
    layers = tuple(
        LayerCost(f"layer{i}", f, b, 4 * int(p), 18 * int(p), int(a), int(o))
        for i, (f, b, p, a, o) in enumerate(rows)
    )
    return Profile("test", "cpu", layers, reserve_bytes=reserve_bytes, shared_bytes=shared_bytes, **link)


def even_profile(num_layers: int, *, params: int = 10, activation_bytes: int = 20) -> Profile:
    """Equal layers of 1 + 2 ms, 180 state bytes and 20 activation bytes each."""
    return profile_of([(1e-3, 2e-3, params, activation_bytes, 1000)] * num_layers)


def setup_of(profile: Profile, **changes: Any) -> Setup:
    fields = {
        "num_micro_batches": 8,
        "f": 1,
        "device_memory_bytes": 0,
        "devices_per_node": 1,
        "max_nodes": len(profile.layers),
    }
    return Setup(profile=profile, **(fields | changes))


def bare_template(size: int, fill_s: float, period_s: float) -> Template:
    return Template(size, 1, (), fill_s, period_s)


def multisets(total: int, smallest: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ascending tuples of sizes with sum ``total``."""
    if total == 0:
        yield ()
    for size in range(smallest, min(largest, total) + 1):
        for rest in multisets(total - size, size, largest):
            yield (size, *rest)


@st.composite
def profiles(draw: st.DrawFn, max_layers: int = 6, even_cuts: bool = False) -> Profile:
    whole = st.integers(1, 9)
    output = st.just(draw(st.integers(0, 5))) if even_cuts else st.integers(0, 5)
    row = st.tuples(whole, whole, st.integers(1, 50), st.integers(0, 200), output)
    rows = draw(st.lists(row, min_size=1, max_size=max_layers))
    return profile_of(
        [(f / 8, b / 8, p, a, o) for f, b, p, a, o in rows],
        reserve_bytes=draw(st.integers(0, 100)),
        shared_bytes=draw(st.sampled_from([0, 40])),
        link_latency_s=0.0625,
        link_bytes_per_s=8.0,
    )
