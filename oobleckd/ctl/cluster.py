"""Verbs for a whole cluster on this machine: ``up``, ``down``, ``start-node``; and ``keygen``."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import click

from oobleckd.client import SERVICE_STATE, Client, state_dir
from oobleckd.ctl import processes
from oobleckd.ctl.local import DAEMON, Cluster, Home, free_endpoint, free_memory_bytes, spares_fit
from oobleckd.ctl.names import bare, node_names
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import (
    FAILED,
    NOT_FOUND,
    REFUSED,
    USAGE,
    OutputLost,
    emit_json,
    emit_line,
    fail,
    note,
)
from oobleckd.ctl.processes import ClusterProcess
from oobleckd.ctl.startcheck import check_gpus, check_machine
from oobleckd.ctl.starting import Starting
from oobleckd.host.needs import ClusterSize
from oobleckd.host.program import Seconds
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.unixhttp import ClientError

_LOOK_EVERY_S = 0.05
_END_S = 5.0


def state_option(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb ``--state``, as its argument ``home``."""
    return click.option(
        "--state", "home", metavar="DIR", callback=lambda _ctx, _param, value: _home(value),
        help="Folder of the cluster (or OOBLECK_STATE).",
    )(verb)  # fmt: skip


def _home(text: str | None) -> Home:
    return Home(Path(text).expanduser().absolute() if text else state_dir())


# --------------------------------------------------------------------------- up and down


@click.command()
@click.option("--nodes", "num_nodes", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option("--devices", type=click.IntRange(1, 64), default=1, show_default=True, help="Per node.")
@click.option(
    "--kind",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What devices compute on; the first one of each node is on the first GPU.",
)
@click.option(
    "--spare/--no-spare", "spares", default=None,
    help="Keep a process warm in every node for a dead device's place. Default: if the free memory holds "
         "them.",
)  # fmt: skip
@state_option
@click.option(
    "--allow-injection/--no-allow-injection", default=True, show_default=True, help="Let kill-node act."
)
@click.option(
    "--adopt",
    is_flag=True,
    help="Go on with a state folder that is a copy, where the one it was copied from is gone or to go on by "
    "itself.",
)
@click.option("--foreground", is_flag=True, help="Stay, and end the cluster on Ctrl-C or SIGTERM.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=120.0, show_default=True, help="For all to join."
)
@output_option
def up(
    num_nodes: int,
    devices: int,
    kind: str,
    spares: bool | None,
    home: Home,
    allow_injection: bool,
    adopt: bool,
    foreground: bool,
    timeout_s: float,
) -> None:
    """Start a whole cluster on this machine: a daemon and N nodes, each a node of its own."""
    home.check()
    if running := home.alive():
        fail(
            f"a cluster runs already in {home.state}: {', '.join(sorted(running))}",
            "end it with `oobleckctl down`, or choose another folder with --state",
            REFUSED,
        )
    check_gpus(kind, devices, num_nodes)
    check_machine(home, ClusterSize(num_nodes, num_nodes * devices, num_nodes, num_nodes * devices, kind))
    nodes = tuple(f"node-{index}" for index in range(1, num_nodes + 1))
    if spares is None:
        spares = spares_fit(num_nodes, devices, free_memory_bytes())
        if not spares:
            note("no warm spares: they would not fit into the free memory (--spare starts them all the same)")
    cluster = Cluster(nodes, devices, free_endpoint(), allow_injection, kind, spares)
    with _ended_on_failure(home), _interruptible():
        _start_all(home, cluster, timeout_s, adopt=adopt)
        # Nor is it that nobody takes what is printed.
        lost = _printed(home, cluster)
        if foreground:
            note("up; Ctrl-C ends it")
            wait_for_interrupt()
    if lost is not None:
        raise lost


def _printed(home: Home, cluster: Cluster) -> Exception | None:
    """Print the nodes; what kept them from being printed."""
    try:
        _print_nodes(home, cluster)
    except (OSError, OutputLost) as error:
        return error
    return None


def _start_all(home: Home, cluster: Cluster, timeout_s: float, *, adopt: bool) -> None:
    make_keys(home.keys, cluster.nodes)
    home.save(cluster)
    home.begin_base()
    starting, client = Starting(home), Client(home.socket)
    starting.begin(DAEMON, lambda: home.start_daemon(cluster, adopt=adopt))
    starting.wait(lambda: () if _answers(client) else (DAEMON,), timeout_s, "the daemon does not answer")
    for node in cluster.nodes:
        starting.begin(node, partial(home.start_node, cluster, node))
    starting.wait(lambda: set(cluster.nodes) - _joined(client), timeout_s, "not all nodes joined")


@contextmanager
def _ended_on_failure(home: Home) -> Iterator[None]:
    """Half a cluster is not left behind, whatever ends the command."""
    try:
        yield
    except BaseException:
        _end_all(home, 10.0)
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, by way of the clean-up. The terminal's end is nothing: neither
    the cluster's nor that of its start.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    before_hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, before_hup)


def wait_for_interrupt() -> None:
    """Wait for SIGINT or SIGTERM, in the main thread. Raises KeyboardInterrupt."""
    # Neither signal.pause nor blocked signals and sigwait: another thread may take the signal as the waiting
    # begins, and this one would hear of it after its call, which never ends. What Python has a handler for is
    # written to this socket, whichever thread took it; earlier ones raise in the line that sets it.
    read, write = socket.socketpair()
    with read, write:
        write.setblocking(False)
        before = signal.set_wakeup_fd(-1)
        try:
            signal.set_wakeup_fd(write.fileno())
            while read.recv(1)[0] not in {signal.SIGINT, signal.SIGTERM}:
                pass
        finally:
            signal.set_wakeup_fd(before)
    raise KeyboardInterrupt


def _answers(client: Client) -> bool:
    try:
        return client.healthy()
    except ClientError:
        return False


def _joined(client: Client) -> set[str]:
    try:
        return {
            node.name for node in client.nodes() if node.state in {"standby", "active", "draining", "drained"}
        }
    except ClientError:
        return set()


def _print_nodes(home: Home, cluster: Cluster) -> None:
    alive = home.alive()
    if wants_json():
        pids = {name: process.pid for name, process in alive.items()}
        emit_json("Cluster", {"state": str(home.state), "socket": str(home.socket), "pids": pids})
        return
    for name in (DAEMON, *cluster.nodes):
        emit_line(f"{name}  pid {alive[name].pid}  log {home.log(name)}")
    if home.state != state_dir():
        note(f"for other commands: export OOBLECK_STATE={home.state}")


@click.command()
@state_option
@click.option(
    "--grace", "grace_s", type=Seconds(), default=10.0, show_default=True, help="Seconds before SIGKILL."
)
@output_option
def down(home: Home, grace_s: float) -> None:
    """End the cluster that `up` started, and nothing else. Checkpoints and the journal stay."""
    ended, killed = _end_all(home, grace_s)
    if wants_json():
        emit_json("Ended", {"ended": ended, "killed": killed})
    elif not ended:
        note(f"no cluster runs in {home.state}")
    else:
        note(f"ended: {', '.join(ended)}{f' ({killed} by SIGKILL)' if killed else ''}")


def _end_all(home: Home, grace_s: float) -> tuple[list[str], int]:
    """The daemon first: to it a node that ends before it is a node lost."""
    alive = home.alive()
    daemon = [alive[DAEMON]] if DAEMON in alive else []
    nodes = [process for name, process in alive.items() if name != DAEMON]
    # To say first that all are about to go would be one more thing to say, and to take back where the command
    # ends before it is done. (D-recovery-026)
    killed = processes.end(daemon, grace_s) + processes.end(nodes, grace_s) + home.base.end(grace_s)
    for name in processes.recall(home.run):
        processes.forget(name, home.run)
    return sorted(alive), killed


@click.command("start-node")
@click.argument("node", callback=bare, shell_complete=node_names)
@state_option
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=120.0, show_default=True, help="For it to join."
)
@output_option
def start_node(node: str, home: Home, timeout_s: float) -> None:
    """Start NODE of the local cluster again; `oobleckd` for its daemon."""
    cluster = home.load()
    if cluster is None:
        fail(f"there is no cluster in {home.state}", "start one with `oobleckctl up`", NOT_FOUND)
    known = (DAEMON, *cluster.nodes)
    if node not in known:
        fail(f"no node {node!r} in this cluster", f"known: {', '.join(known)}", NOT_FOUND)
    if not processes.recall(home.run):  # `down` forgets them; who died is remembered
        fail(f"the cluster in {home.state} was ended", "`oobleckctl up` starts all of it again", REFUSED)
    if node == DAEMON and node in home.alive() and not home.socket.exists():
        # It runs, and nobody can reach it: agents and devices go on without it meanwhile.
        processes.end([home.alive()[node]], _END_S)
    if node in home.alive():
        fail(
            f"{node} runs already",
            "an agent starts lost devices by itself; see `oobleckctl get nodes`",
            REFUSED,
        )
    process = _start(home, cluster, node, timeout_s)
    if wants_json():
        emit_json("Started", {"node": node, "pid": process.pid})
    else:
        emit_line(f"{node}  pid {process.pid}  log {home.log(node)}")


def _start(home: Home, cluster: Cluster, node: str, timeout_s: float) -> ClusterProcess:
    """Start one program of the cluster and wait until it takes part."""
    starting, client = Starting(home), Client(home.socket)
    if node == DAEMON:
        process = starting.begin(node, lambda: home.start_daemon(cluster))
        holds = partial(_answers, client)
    else:
        check_gpus(cluster.kind, cluster.devices, len(cluster.nodes))
        before = {view.name: view.incarnation for view in _nodes(client)}.get(node, "")
        process = starting.begin(node, lambda: home.start_node(cluster, node))
        holds = partial(_is_back, client, node, before)
    starting.wait(lambda: () if holds() else (node,), timeout_s, f"{node} did not come back")
    return process


def start_again(home: Home, node: str, timeout_s: float) -> None:
    """Start ``node`` of the local cluster anew, whatever is left of it (it may be stopped, or cut off)."""
    cluster = home.load()
    if cluster is None or node not in cluster.nodes:
        fail(
            f"{node} is no node of the cluster in {home.state}",
            "only those of `oobleckctl up` can be started",
        )
    if node in (alive := home.alive()):
        processes.end([alive[node]], _END_S)
    _start(home, cluster, node, timeout_s)


def _nodes(client: Client) -> tuple[NodeView, ...]:
    try:
        return client.nodes()
    except ClientError:
        return ()


def _is_back(client: Client, node: str, before: str) -> bool:
    """Joined, and in another incarnation than ``before``: the daemon may not have noticed the end of that one
    yet.
    """
    return node in _joined(client) and any(
        view.name == node and view.incarnation != before for view in _nodes(client)
    )


# --------------------------------------------------------------------------- keys


def make_keys(keys: Path, nodes: Sequence[str], how: Literal["make", "rotate", "retire"] = "make") -> None:
    """The daemon's key pair and one for each node, where what is there stays; or ``rotate`` or ``retire``
    those of the nodes.
    """
    from oobleckd.daemon.keys import (
        KeyFileError,
        has_server_keys,
        make_node_keys,
        make_server_keys,
        retire_node_key,
        rotate_node_keys,
    )

    act = {"make": make_node_keys, "rotate": rotate_node_keys, "retire": retire_node_key}[how]
    try:
        if not has_server_keys(keys):
            make_server_keys(keys)
        for node in nodes:
            act(keys, node)
    except KeyFileError as error:
        fail(error.problem, error.hint, USAGE)
    except OSError as error:
        fail(f"{keys}: keys cannot be written: {error.strerror}", "choose another folder with --dir", FAILED)


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Key folder; if not given, the service's for root where one is installed, else the local cluster's.",
)
@click.option("--rotate", is_flag=True, help="A new key for each NODE, beside the present one.")
@click.option("--retire", is_flag=True, help="End a rotation: the key before lets nobody in any more.")
@output_option
def keygen(nodes: tuple[str, ...], directory: Path | None, rotate: bool, retire: bool) -> None:
    """Make the daemon's key pair and one for each NODE, and let these nodes join.

    Carry nodes/NODE.key_secret and server.key to the node; the daemon keeps the rest. To change a key while
    all runs: --rotate, reload the daemon, carry the new file to the node, reload its worker, --retire, reload
    the daemon.
    """
    if rotate and retire:
        fail("--rotate and --retire are two steps", "the node gets its new key between them", USAGE)
    keys = directory or usual_keys()
    make_keys(keys, nodes, "rotate" if rotate else "retire" if retire else "make")
    files = [keys / "server.key", *(keys / "nodes" / f"{node}.key_secret" for node in nodes)]
    if wants_json():
        emit_json("Keys", {"dir": str(keys), "files": [str(file) for file in files]})
        return
    for file in files:
        emit_line(str(file))
    if rotate or retire:
        note("reload the daemon (SIGHUP): it then knows")
    elif keys == _service_keys():
        note("if the daemon runs: `systemctl reload oobleckd` lets these nodes join")


def usual_keys() -> Path:
    """The key folder that the daemon of this user and machine looks into."""
    if os.geteuid() == 0 and "OOBLECK_STATE" not in os.environ and _service_keys().exists():
        return _service_keys()
    return Home(state_dir()).keys


def _service_keys() -> Path:
    return SERVICE_STATE / "keys"
