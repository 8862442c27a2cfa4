"""Runs of the engine without failures, with which those with failures are compared; transports that are
closed at the end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from oobleckd.worker.models import spec, weights
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, Reference, job
from tests.helpers.transports import Device, MakeDevice

_DRAWN = functools.lru_cache(maxsize=64)(weights.fresh)


@pytest.fixture(autouse=True)
def _first_weights_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all devices of a world: a tenth of what a world took."""
    monkeypatch.setattr(spec, "fresh", _DRAWN)


@pytest.fixture(scope="session")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    tmp_path = tmp_path_factory.mktemp("reference")
    world = World(job(tmp_path), STAGES, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.fixture(scope="session", params=["never", "at times", "always"])
def clipped(request: pytest.FixtureRequest, reference, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A job of which no, some, or all rounds are clipped, and what it comes to with a flushed update."""
    clip_norm = {"never": 0.0, "at times": 2.2, "always": 0.01}[request.param]
    optimizer = msgspec.structs.replace(reference[0].optimizer, clip_norm=clip_norm)
    train = msgspec.structs.replace(reference[0].train, steps=8)
    changed = msgspec.structs.replace(reference[0], optimizer=optimizer, train=train)
    world = World(changed, STAGES, 0, tmp_path_factory.mktemp("clipped"))
    world.run()
    return changed, world.losses, world.weights()


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    tmp_path = tmp_path_factory.mktemp("deep")
    usual = job(tmp_path)
    model = msgspec.structs.replace(usual.model, config={**usual.model.config, "n_layer": 4})
    world = World(msgspec.structs.replace(usual, model=model), {"x": [(0, 6)]}, 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.fixture
def make_device(tmp_path: Path) -> Iterator[MakeDevice]:
    """What starts transports: ``make_device(name, host, handshake_s)``. None of their threads is
    left behind.
    """
    made: list[Device] = []

    def start(name: str, host: str = "here", handshake_s: float = 10.0) -> Device:
        made.append(Device(name, tmp_path, host, handshake_s))
        return made[-1]

    yield start
    for device in made:
        device.transport.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("transport-")]
