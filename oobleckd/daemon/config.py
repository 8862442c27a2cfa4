"""The daemon's configuration: its fields, and which values go together.

Owns the model; where values come from and which one wins is ``host.settings``. Files hold the fields in a
table ``[daemon]``. Owns neither the command line nor the folders it names.

Errors: ConfigError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from oobleckd.host.settings import FILES_ALONE, ConfigError, LoadedSettings, load
from oobleckd.protocol.jobsinks import SINK_KIND
from oobleckd.protocol.sinks import EventRule, problem_of_rule
from oobleckd.words import plain, seconds

TABLE = "daemon"
Seconds = Annotated[float, Meta(gt=0)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one daemon. Empty paths have defaults, which the ``*_path`` properties know."""

    state_dir: Annotated[
        str,
        Meta(
            description="Folder of journal, secrets and default checkpoints; empty: systemd's, "
            "/var/lib/oobleck for root, else oobleck below XDG_STATE_HOME or ~/.local/state."
        ),
    ] = ""
    socket: Annotated[
        str,
        Meta(
            description="Unix socket of the HTTP API, where systemd gives none; empty: oobleckd.sock in "
            "systemd's runtime folder, in /run/oobleck for root, else in run below state_dir."
        ),
    ] = ""
    endpoint: Annotated[
        str, Meta(description="tcp://ADDRESS:PORT where agents connect; port 0 takes a free one.")
    ] = "tcp://127.0.0.1:7077"
    curve: Annotated[
        bool,
        Meta(
            description="Encrypt and authenticate the links of agents; off only where endpoint is of this "
            "machine alone."
        ),
    ] = True
    udp: Annotated[
        bool, Meta(description="Take heartbeats of idle nodes as UDP datagrams, at the endpoint.")
    ] = True
    keys_dir: Annotated[
        str, Meta(description="Key folder, as made by oobleckctl keygen; empty: keys below state_dir.")
    ] = ""
    api: Annotated[
        str,
        Meta(
            description="ADDRESS:PORT on which the API is served over HTTPS, to whoever has a token; empty: "
            "on the unix socket alone."
        ),
    ] = ""
    tls_cert: Annotated[str, Meta(description="Certificate chain (PEM) for api, which needs one.")] = ""
    tls_key: Annotated[str, Meta(description="Private key (PEM) of tls_cert.")] = ""
    group: Annotated[
        str, Meta(description="Unix group whose members may act, as root and the daemon's own user may.")
    ] = "oobleck"
    realtime: Annotated[
        bool, Meta(description="Answer before ordinary programs have their turn, where the system allows it.")
    ] = True
    allow_injection: Annotated[bool, Meta(description="Allow faults on demand: kill-node and drill.")] = False
    heartbeat_s: Annotated[Seconds, Meta(description="Seconds between signs of life of an agent.")] = 0.25
    lease_s: Annotated[
        Seconds,
        Meta(
            description="Longest silence of a node, in seconds; what its heartbeats teach is shorter. At "
            "least 2 * heartbeat_s."
        ),
    ] = 10.0
    grace_s: Annotated[Seconds, Meta(description="Seconds after a restart in which no node is lost.")] = 5.0
    history: Annotated[int, Meta(ge=100, description="Changes kept for the event stream.")] = 10_000
    replay_mb: Annotated[
        int, Meta(ge=0, description="MiB of the past kept on disk for replay; 0 keeps none.")
    ] = 64
    replay_h: Annotated[Seconds, Meta(description="Hours of the past kept at most.")] = 24.0
    keep_steps_days: Annotated[
        int,
        Meta(
            ge=0,
            description="Days for which the steps of a job that is over are kept; its curves stay. 0 keeps "
            "them for ever.",
        ),
    ] = 90
    artifacts_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of what nodes compiled (train.compile) kept for other nodes; 0 keeps none, and "
            "each node compiles for itself.",
        ),
    ] = 1024
    metrics: Annotated[
        str,
        Meta(
            description="ADDRESS:PORT for a Prometheus on this machine, such as 127.0.0.1:9464; empty: "
            "metrics on the unix socket alone."
        ),
    ] = ""
    traces: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of every "
            "recovery; empty: none."
        ),
    ] = ""
    sinks: Annotated[
        tuple[str, ...],
        Meta(
            description="Sinks that a job may choose with `[[sink]]`: csv, jsonl, tensorboard, wandb, and "
            "those of installed packages (docs/sinks.md). As a flag or variable with commas between."
        ),
    ] = ("csv", "jsonl", "tensorboard")
    sinks_dir: Annotated[
        str,
        Meta(description="Folder that sinks write below; empty: sinks below state_dir."),
    ] = ""
    on_event: Annotated[
        tuple[EventRule, ...],
        Meta(
            description="What is run or called when something happens: `[[daemon.on_event]]`, in files alone "
            "(docs/sinks.md).",
            extra=FILES_ALONE,
        ),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="What is logged: this level and above."),
    ] = "info"

    @property
    def state_path(self) -> Path:
        """The state folder: systemd's, /var/lib/oobleck for root, else below XDG_STATE_HOME or
        ~/.local/state.
        """
        if self.state_dir:
            return Path(self.state_dir).expanduser().absolute()
        if given := os.environ.get("STATE_DIRECTORY"):
            return Path(given)
        if os.geteuid() == 0:
            return Path("/var/lib/oobleck")
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "oobleck"

    @property
    def socket_path(self) -> Path:
        """The socket: where systemd or root's default state puts it, under /run, else under the
        state folder.
        """
        if self.socket:
            return Path(self.socket).expanduser().absolute()
        if given := os.environ.get("RUNTIME_DIRECTORY"):
            return Path(given) / "oobleckd.sock"
        if not self.state_dir and os.geteuid() == 0:
            return Path("/run/oobleck/oobleckd.sock")
        return self.state_path / "run" / "oobleckd.sock"

    @property
    def keys_path(self) -> Path:
        """The key folder."""
        return Path(self.keys_dir).expanduser().absolute() if self.keys_dir else self.state_path / "keys"

    @property
    def sinks_path(self) -> Path:
        """The folder that sinks write below."""
        return Path(self.sinks_dir).expanduser().absolute() if self.sinks_dir else self.state_path / "sinks"


def load_config(
    flags: Mapping[str, Any], env: Mapping[str, str], files: Iterable[Path]
) -> LoadedSettings[Config]:
    """Merge all sources; ``flags`` that are None were not given, ``files`` come winning first.

    Raises ConfigError for unknown keys, wrong values, and values that do not go together.
    """
    loaded = load(Config, TABLE, flags, env, files)
    _check(loaded.config, loaded.origins)
    return loaded


def is_loopback(endpoint: str) -> bool:
    """Whether ``tcp://host:port`` (or ipc) can be reached from this machine alone."""
    scheme, _, address = endpoint.partition("://")
    if scheme in {"ipc", "inproc"}:
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(config: Config, origins: Mapping[str, str]) -> None:
    scheme, found, address = config.endpoint.partition("://")
    if not found or scheme not in {"tcp", "ipc"} or not address:
        raise ConfigError(
            origins["endpoint"], f"endpoint = {config.endpoint!r} is none", "write tcp://ADDRESS:PORT"
        )
    if scheme == "tcp" and not address.rpartition(":")[2].isdigit():
        raise ConfigError(
            origins["endpoint"], f"endpoint = {config.endpoint!r} has no port", "write tcp://ADDRESS:PORT"
        )
    if not config.curve and not is_loopback(config.endpoint):
        raise ConfigError(
            origins["endpoint"],
            f"{config.endpoint} reaches beyond this machine, and curve is off",
            "switch curve on and make keys with `oobleckctl keygen`, or bind to 127.0.0.1",
        )
    _check_metrics(config, origins["metrics"])
    if config.traces and not config.traces.startswith(("http://", "https://")):
        raise ConfigError(
            origins["traces"], f"traces = {config.traces!r} is no URL", "write http://127.0.0.1:4318"
        )
    _check_api(config, origins["api"])
    _check_sinks(config, origins)
    if config.lease_s < 2 * config.heartbeat_s:
        raise ConfigError(
            origins["lease_s"],
            f"lease_s = {plain(config.lease_s)} is shorter than two heartbeats of "
            f"{seconds(config.heartbeat_s)}",
            "a lost packet would cost a node: make lease_s at least 2 * heartbeat_s",
        )


def _check_api(config: Config, origin: str) -> None:
    """Beyond this machine it wants a port, and TLS."""
    if config.api and not config.api.rpartition(":")[2].isdigit():
        raise ConfigError(
            origin, f"api = {config.api!r} has no port", "write ADDRESS:PORT, such as 10.0.0.1:7078"
        )
    if config.api and not (config.tls_cert and config.tls_key):
        raise ConfigError(
            origin,
            "the API is served beyond this machine over TLS alone, and tls_cert or tls_key is missing",
            "name the PEM files of a certificate, or leave api away",
        )


def _check_sinks(config: Config, origins: Mapping[str, str]) -> None:
    """Names of sinks are names of folders, and rules make sense."""
    for kind in config.sinks:
        if not re.fullmatch(SINK_KIND, kind):
            raise ConfigError(origins["sinks"], f"sinks: {kind!r} is no name of a sink", "see docs/sinks.md")
    for index, rule in enumerate(config.on_event):
        if (found := problem_of_rule(rule)) is not None:
            raise ConfigError(origins["on_event"], f"on_event[{index}]: {found[0]}", found[1])


def _check_metrics(config: Config, origin: str) -> None:
    """It has neither keys nor encryption: what it shows is for this machine."""
    if not config.metrics:
        return
    if not config.metrics.rpartition(":")[2].isdigit():
        raise ConfigError(origin, f"metrics = {config.metrics!r} has no port", "write 127.0.0.1:9464")
    # Prometheus reads no unix socket, so metrics have a port of their own, with neither keys nor TLS:
    # others than this machine's users must not reach it. (D-watching-011)
    if not is_loopback(f"tcp://{config.metrics}"):
        raise ConfigError(
            origin,
            f"metrics = {config.metrics!r} would be read by everybody, beyond this machine too",
            "bind to 127.0.0.1, and scrape it from an agent here (docs/observability.md)",
        )
