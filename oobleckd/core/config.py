"""What the core must know of the daemon's configuration. Owns no file and no default path."""

from __future__ import annotations

import msgspec


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for an incarnation of the daemon.

    ``daemon``: its name. ``lease_s``: the longest silence of a node that is borne; what its heartbeats teach
    is shorter (``lease``). ``grace_s``: time after a restart in which nobody is declared dead.
    ``link_grace_s``: how long a link between two live devices may stay down before one end is evicted.
    ``batch_s``: how long to wait for more nodes after one has joined. ``secret``: hex key from which the
    transport secrets of jobs are derived. ``checkpoint_dir``: used by jobs that name none. ``journal``: the
    name of the journal, which stands in the folders of its jobs. ``look_s``: how finely the sleep of this
    process itself is told (``Membership.attend``); inf: it never sleeps. ``snapshot_every``: after so many
    entries of the journal it gets a snapshot of the state (0: never). ``figures_s``: how often agents tell of
    their devices, where nodes are not very many (0: never). ``artifacts``: the daemon keeps what nodes
    compile, and sends it to others. ``simulated``: there is no engine behind it, and so nothing that one
    cannot do.
    """

    daemon: str = ""
    version: str = ""
    state_dir: str = ""
    endpoint: str = ""
    checkpoint_dir: str = ""
    journal: str = ""
    secret: str = ""
    allow_injection: bool = False
    heartbeat_s: float = 0.25
    lease_s: float = 10.0
    grace_s: float = 5.0
    link_grace_s: float = 2.0
    batch_s: float = 0.3
    look_s: float = 0.2
    snapshot_every: int = 8_000
    figures_s: float = 5.0
    artifacts: bool = False
    simulated: bool = False
