"""What host tests need: root, namespaces, systemd. Where that is forbidden they fail and say so."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers import bootbox
from tests.helpers.unitcluster import UnitCluster, installation

NODES = ("node-1", "node-2", "node-3", "node-4")


@pytest.fixture(scope="session", autouse=True)
def _host() -> None:
    if os.environ.get("OOBLECK_NO_HOST_TESTS") == "1":
        pytest.skip("OOBLECK_NO_HOST_TESTS is 1")
    if why := bootbox.why_not():
        pytest.fail(f"{why}; OOBLECK_NO_HOST_TESTS=1 leaves the host tests out")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnitCluster]:
    """Daemon and four workers, installed and started as docs/service.md says; tests may slow them down."""
    with installation(tmp_path_factory.mktemp("host")) as box:
        cluster = UnitCluster(box, len(NODES))
        cluster.configure("[daemon]\nallow_injection = true\n")
        cluster.ctl("install-systemd", "--now")
        cluster.ctl("keygen", *NODES)
        cluster.systemctl("reload", "oobleckd")
        cluster.systemctl("start", *(f"oobleck-worker@{node}" for node in NODES))
        cluster.usable(len(NODES))
        yield cluster
