"""The command ``oobleck-worker``: the agent of one node.

Owns the command line, the keys' files and the lock that keeps a node from being run twice. What an
agent does is in ``node``.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import zmq
import zmq.auth

from oobleckd.host import gpus, journald, sd, urgency
from oobleckd.host.needs import agent_files
from oobleckd.host.program import ConfiguredProgram, Seconds
from oobleckd.host.rlimits import RAISE_FILES, raise_file_limit, too_few_files
from oobleckd.host.starts import forget_failed
from oobleckd.protocol.z85 import why_none
from oobleckd.worker.agent.daemon_link import CurveKeys
from oobleckd.worker.agent.node import Agent, AgentConfig
from oobleckd.worker.agent.notices import NONE, NoticeSource, UnknownSource, find_source
from oobleckd.worker.fork.forking import Forker
from oobleckd.worker.processes.children import ChildSetting
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.telemetry.loglines import LogKeeper

EXIT_FAILED, EXIT_USAGE = 1, 2
_PATH = click.Path(path_type=Path)
_CARRY = "make keys with `oobleckctl keygen` at the daemon, and carry this file here"
_log = logging.getLogger(__name__)


class AgentError(Exception):
    """Something that a user must mend: ``problem``, ``hint`` and the exit code."""

    def __init__(self, problem: str, hint: str, code: int = EXIT_USAGE) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.code = code


@click.command(
    "oobleck-worker",
    cls=ConfiguredProgram,
    table="worker",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--node", required=True, help="Name of this node, as in the daemon's list of keys.")
@click.option(
    "--daemon",
    default="tcp://127.0.0.1:7077",
    show_default=True,
    help="The daemon's endpoint, such as tcp://10.0.0.1:7077.",
)
@click.option(
    "--keys-dir",
    type=_PATH,
    help="Key folder that holds both keys; of a service, keys below its state folder. Without keys the "
    "daemon's curve must be off.",
)
@click.option(
    "--key",
    type=_PATH,
    help="Key pair of this node (CURVE certificate with the secret key); else that of keys-dir.",
)
@click.option("--server-key", type=_PATH, help="Public key of the daemon; else that of keys-dir.")
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    help="Number of devices, or auto: all visible GPUs, or one CPU device.",
)
@click.option(
    "--kind",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What devices are: processes on the CPU, or NVIDIA GPUs.",
)
@click.option(
    "--spare/--no-spare",
    default=True,
    show_default=True,
    help="Keep a process warm for a dead device's place.",
)
@click.option(
    "--realtime/--no-realtime",
    default=True,
    show_default=True,
    help="Answer before ordinary programs have their turn, where the system allows it.",
)
@click.option(
    "--run-dir",
    type=_PATH,
    help="Folder for sockets and records of this node; required but for a service, which has one.",
)
@click.option(
    "--compiled-dir",
    type=_PATH,
    help="Folder for what jobs with train.compile compile. Nodes may share it: what one has compiled the "
    "others load. Default: below the state folder of a service, else the run-dir.",
)
@click.option(
    "--bind", default="127.0.0.1", show_default=True, help="IP address at which other nodes reach us."
)
@click.option(
    "--host",
    default="",
    help="Name of this machine; devices with the same one share sockets. Empty: its host name and this boot.",
)
@click.option(
    "--zone",
    default="",
    help="What this node fails together with, such as a zone of a cloud; plans keep neighbours apart.",
)
@click.option(
    "--notice-s",
    type=Seconds(),
    default=0.0,
    show_default=True,
    help="Seconds between SIGTERM and the end: what the node holds moves elsewhere first. 0: leave at once.",
)
@click.option(
    "--notices",
    default=NONE,
    show_default=True,
    help="Who else tells of the end: aws, gcp, azure, or an entry point of oobleckd.notices.",
)
@click.option(
    "--fork/--no-fork",
    default=True,
    show_default=True,
    help="Start devices as forks of a process that has torch loaded; else each loads it anew.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged: this level and above.",
)
def main(
    node: str,
    daemon: str,
    keys_dir: Path | None,
    key: Path | None,
    server_key: Path | None,
    devices: str,
    kind: str,
    spare: bool,
    realtime: bool,
    run_dir: Path | None,
    compiled_dir: Path | None,
    bind: str,
    host: str,
    zone: str,
    notice_s: float,
    notices: str,
    fork: bool,
    log_level: str,
) -> None:
    """Run the devices of this machine for an oobleck daemon.

    Values also come from OOBLECK_* variables, ./oobleck.toml, ~/.config/oobleck/config.toml and
    /etc/oobleck/config.toml ([worker]), in this order.
    """
    log = _set_up_logging(node, log_level)
    max_files = raise_file_limit()
    if realtime and not urgency.hurry():
        _log.info("no real-time scheduling (RLIMIT_RTPRIO): answers come later where all cores compute")
    try:
        _check_bind(bind)
        setting = ChildSetting(
            kind,
            find_run_dir(run_dir),
            bind,
            host or host_identity(),
            compiled_dir=find_compiled_dir(compiled_dir),
        )
        files = find_keys(node, keys_dir, key, server_key)
        config = AgentConfig(
            node,
            daemon,
            num_devices(devices, kind),
            setting,
            load_keys(*files),
            partial(reload_keys, *files),
            spare,
            zone,
            notice_s,
            notice_source(notices),
            fork,
            log,
        )
        _check_files(max_files, config)
        code = run_agent(config)
    except AgentError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr)
        code = error.code
    sys.exit(code)


def run_agent(config: AgentConfig) -> int:
    """Run an agent until it is told to end; its exit code. Raises AgentError."""
    with _only_one(config):
        forget_failed(config.setting.run_dir)
        orphans = Orphans()
        # Before there are a loop and threads: a fork wants one thread.
        forker = start_forker(config.node, orphans) if config.fork else None
        try:
            return asyncio.run(_run(config, forker, orphans))
        except zmq.ZMQError as error:
            raise AgentError(
                f"{config.daemon!r} is no endpoint: {error}", "write it as tcp://host:port"
            ) from error
        except OSError as error:
            raise AgentError(
                f"cannot run the devices of {config.node}: {error}",
                "see the message above and the limits of this service (ulimit -a)",
                EXIT_FAILED,
            ) from error
        finally:
            if forker is not None:
                forker.close()


def start_forker(node: str, orphans: Orphans) -> Forker | None:
    """The forker of this agent; None where the kernel has no way for it, or no room."""
    try:
        return Forker(node, orphans) if orphans.adopt() else None
    except OSError as error:
        _log.warning("devices are started by exec: %s", error)
        return None


async def _run(config: AgentConfig, forker: Forker | None, orphans: Orphans) -> int:
    return await Agent(config, forker, orphans).run()


def num_devices(text: str, kind: str) -> int:
    """How many devices ``--devices`` asks for. "auto" is all visible GPUs, or one CPU device. Raises
    AgentError, also where GPUs are wanted that cannot be had.
    """
    if text == "auto":
        return _have_gpus(gpus.ALL) if kind == "cuda" else 1
    if not text.isdecimal() or int(text) == 0:
        raise AgentError(f"--devices {text!r} is no number of devices", "write a number above 0, or auto")
    return _have_gpus(int(text)) if kind == "cuda" else int(text)


def notice_source(name: str) -> NoticeSource | None:
    """Whom ``--notices`` names. Raises AgentError."""
    try:
        return find_source(name)
    except UnknownSource as error:
        raise AgentError(f"--notices: {error}", f"known: {', '.join(error.known)}") from error


def find_run_dir(run_dir: Path | None) -> Path:
    """--run-dir, or the folder that systemd made. Raises AgentError when there is neither."""
    given = run_dir or os.environ.get("RUNTIME_DIRECTORY")
    if not given:
        raise AgentError(
            "there is no folder to run in", "name one with --run-dir, such as /run/user/1000/node-1"
        )
    return Path(given).resolve()


def find_compiled_dir(compiled_dir: Path | None) -> Path | None:
    """--compiled-dir, or a folder below the state folder of a service, where what lies outlives a restart of
    the machine; None where there is neither.
    """
    state = os.environ.get("STATE_DIRECTORY")
    folder = compiled_dir or (Path(state) / "compiled" if state else None)
    return folder.expanduser().resolve() if folder is not None else None


def find_keys(
    node: str, keys_dir: Path | None, key: Path | None, server_key: Path | None
) -> tuple[Path | None, Path | None]:
    """--key and --server-key; what is not given lies in --keys-dir, is a credential of a service, or lies
    below its state folder.
    """
    state = os.environ.get("STATE_DIRECTORY")
    folder = keys_dir or (Path(state) / "keys" if state else None)
    if keys_dir is None:
        key = key or sd.credential(f"oobleck.{node}.key_secret")
        server_key = server_key or sd.credential("oobleck.server.key")
    if folder is None:
        return key, server_key
    return key or folder / "nodes" / f"{node}.key_secret", server_key or folder / "server.key"


def load_keys(key: Path | None, server_key: Path | None) -> CurveKeys | None:
    """The keys in two certificate files; None when neither is given. Raises AgentError."""
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        missing = "--key" if key is None else "--server-key"
        raise AgentError(f"{missing} is missing", "CURVE needs both keys; `oobleckctl keygen` makes them")
    public, secret = _certificate(key)
    if secret is None:
        raise AgentError(f"{key}: holds no secret key", "name the file that ends in .key_secret")
    if zmq.curve_public(secret) != public:
        raise AgentError(f"{key}: its secret key is not that of its public key", _CARRY)
    return CurveKeys(public, secret, _certificate(server_key)[0])


def reload_keys(key: Path | None, server_key: Path | None) -> CurveKeys | None:
    """The same while the agent runs, which goes on with the keys that it has where they cannot be read."""
    try:
        return load_keys(key, server_key)
    except AgentError as error:
        _log.error("the keys stay as they are: %s; %s", error.problem, error.hint)
        return None


def host_identity() -> str:
    """A name of this boot of this machine, as far as it shares a file system's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/mnt').stat().st_ino}"


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        problem = error if path.exists() else "there is no such key"
        raise AgentError(f"{path}: {problem}", _CARRY) from error
    for key in (public, secret):
        if key is not None and (wrong := why_none(key)):
            raise AgentError(f"{path}: {wrong}", _CARRY)
    return public, secret


def _check_bind(bind: str) -> None:
    try:
        unspecified = ipaddress.ip_address(bind).is_unspecified
    except ValueError as error:
        raise AgentError(f"--bind {bind!r} is no address", "write an IP address of this machine") from error
    if unspecified:
        raise AgentError(
            f"--bind {bind} is no address that others could reach", "name the one of the cluster's network"
        )


def _have_gpus(wanted: int) -> int:
    """How many devices have a GPU each: ``wanted``, or all there are. Raises AgentError."""
    # Asked of another process, and before there are devices: each would say the same after seconds, again
    # and again, and CUDA must not begin in what forks them. (D-devices-020)
    count, trouble = gpus.usable(wanted)
    if trouble is not None:
        raise AgentError(trouble.problem, trouble.hint, EXIT_FAILED if trouble.passing else EXIT_USAGE)
    return count


def _check_files(max_files: int, config: AgentConfig) -> None:
    """Whether the agent may have the files open that it needs. Raises AgentError."""
    if few := too_few_files(max_files, agent_files(config.num_devices), f"an agent of {config.node}"):
        raise AgentError(few, RAISE_FILES)


@contextmanager
def _only_one(config: AgentConfig) -> Iterator[None]:
    """Hold the lock of this node in its run directory; the kernel lets go of it however we end."""
    run_dir = config.setting.run_dir
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (run_dir / f"{config.node}.lock").open("w", encoding="ascii")
    except OSError as error:
        raise AgentError(f"{run_dir}: {error}", "name a --run-dir that this user can write to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AgentError(
                f"an agent of {config.node} is running in {run_dir} already",
                "end it first, or give this one another --node and --run-dir",
                EXIT_FAILED,
            ) from error
        yield


def _set_up_logging(node: str, level: str) -> LogKeeper:
    """Log from now on; what keeps the newest lines."""
    keeper = LogKeeper()
    formatter = journald.LineFormatter(f"%(asctime)s %(levelname).1s {node} %(name)s: %(message)s")
    journald.set_up(level, formatter, node=node)
    keeper.setFormatter(formatter)
    logging.getLogger().addHandler(keeper)
    return keeper


if __name__ == "__main__":
    main()
