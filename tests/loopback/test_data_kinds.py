"""Kills, nodes that come and go, a rollback and `--resume`, on each kind of data: bit-identical."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster
from tests.helpers.datakinds import KINDS, NODES, DataKind, go_through
from tests.helpers.manners import Manner


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kinds"), NODES) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_bit_tells_what_happened(cluster: Cluster, tmp_path: Path, kind: DataKind) -> None:
    cluster.verify(go_through(cluster, kind, tmp_path, Manner("adaptive"), "backward"))
