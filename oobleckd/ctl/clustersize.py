"""How large the cluster is that this machine is to be enough for: the one that runs, the local one that was
started last, or the one whose nodes have keys.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from oobleckd.client import Client, socket_of, state_dir
from oobleckd.ctl.local import Cluster
from oobleckd.host.needs import ClusterSize
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.protocol.unreadable import UNREADABLE
from oobleckd.unixhttp import ClientError


def measure(asked: Client | None, keys: Sequence[Path], kind: str, devices: int) -> tuple[ClusterSize, bool]:
    """Of the cluster of the daemon that ``asked`` reaches (None: of none that runs), and whether its programs
    are there by now. ``keys``: its key folders; a node that is not known better has ``devices`` devices of
    ``kind``.
    """
    nodes: Sequence[NodeView] = ()
    if asked is not None:
        try:
            nodes = [node for node in asked.nodes() if node.devices]
        except ClientError:
            nodes = ()
    if nodes:
        return of_nodes(nodes, kind), True
    local = _local()
    if local is not None:
        count = len(local.nodes)
        return ClusterSize(count, count * local.devices, count, count * local.devices, kind), False
    known = max([1, *(len(list((folder / "nodes").glob("*.key_secret"))) for folder in keys)])
    return ClusterSize(known, known * devices, 1, devices, kind), False


def of_nodes(nodes: Sequence[NodeView], kind: str) -> ClusterSize:
    """Of these nodes, some of which are on this machine."""
    ours = [node for node in nodes if node.host.startswith(f"{socket.gethostname()}-")]
    total, here = (sum(len(node.devices) for node in some) for some in (nodes, ours))
    on_gpus = kind == "cuda" or any("cuda" in node.kinds for node in nodes)
    return ClusterSize(len(nodes), total, len(ours), here, "cuda" if on_gpus else kind)


def _local() -> Cluster | None:
    """The local cluster that was started last."""
    file = socket_of(state_dir()).parents[1] / "cluster.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Cluster)
    except (OSError, *UNREADABLE):
        return None
