"""Verbs about one node: ``kill-node``, ``drain``, ``undrain``, ``forget-node``."""

from __future__ import annotations

from typing import Any, cast, get_args

import click
from click.shell_completion import CompletionItem

from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.names import bare, node_names
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import emit_item, note
from oobleckd.host.program import Seconds
from oobleckd.protocol.parts import AT_A_POINT, How, Point
from oobleckd.protocol.requests import Accepted

_SLOWEST = 1000


def told(answer: Accepted) -> None:
    """Say what the daemon answered to an act."""
    if wants_json():
        emit_item("Accepted", answer)
    elif answer.message:
        note(answer.message)


class _Failure(click.ParamType[tuple[How, float]]):
    """A ``How``, slow with how many times as long: (how, times)."""

    name = "how"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[How, float]:
        """Of what was typed. Raises BadParameter."""
        how, _, times = str(value).partition("=")
        if how not in get_args(How) or (times and how != "slow"):
            self.fail(f"{value!r} is none of {', '.join(get_args(How))}", param, ctx)
        try:
            factor = float(times or 1)
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= _SLOWEST:
            self.fail(f"{times!r} is not from 1 to {_SLOWEST}: write slow=3", param, ctx)
        return cast("How", how), factor

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """What there is."""
        return [CompletionItem(how) for how in get_args(How) if how.startswith(incomplete)]


@click.command("kill-node")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…", callback=bare, shell_complete=node_names)
@click.option(
    "--how",
    "failure",
    type=_Failure(),
    metavar=f"[{'|'.join('slow=K' if how == 'slow' else how for how in get_args(How))}]",
    default=None,
    show_default="sigkill; with --at: device",
    help="sigkill, sigstop: agent and devices; sigterm: an orderly leave; flip-weight, flip-moment, "
    "flip-sum, flip-mean: one bit of a device's "
    "memory; hang: a device process, its interpreter "
    "locked; net-drop: nothing leaves or arrives; agent-only, device: SIGKILL of that process; host: sigkill "
    "of every node on the host of NODE; slow=K: a device takes K times as long for every layer.",
)
@click.option(
    "--device",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    show_default=True,
    help="Where it is one device's: the number of that among its node's.",
)
@click.option(
    "--at",
    type=click.Choice(get_args(Point)),
    default=None,
    metavar="POINT",
    help="Not now, but when the device reaches this fault point; with "
    f"{' or '.join(AT_A_POINT)}. "
    f"POINT: {', '.join(get_args(Point))}.",
)
@click.option(
    "--round",
    "round_",
    default=-1,
    metavar="N",
    help="With --at: in round N, or at the next chance after it.",
)
@click.option(
    "--for",
    "seconds",
    type=Seconds(),
    default=0.0,
    metavar="S",
    help="sigstop, net-drop and slow: they end after so many seconds.",
)
@connected
def kill_node(
    client: Client,
    nodes: tuple[str, ...],
    failure: tuple[How, float] | None,
    device: int,
    at: Point | None,
    round_: int,
    seconds: float,
) -> None:
    """Inject a failure into NODE, or into several at once, where the daemon allows injection."""
    if round_ >= 0 and at is None:
        raise click.UsageError("--round needs --at: it says from which round on the fault point counts")
    how, times = failure or ("sigkill" if at is None else "device", 1.0)
    if at is not None and how not in AT_A_POINT:
        raise click.UsageError(
            f"--at goes with --how {' or '.join(AT_A_POINT)}: {how} waits for no fault point"
        )
    for node in nodes:
        told(client.kill(node, how, at=at or "", round=round_, seconds=seconds, times=times, device=device))


@click.command()
@click.argument("node", callback=bare, shell_complete=node_names)
@click.option("--reason", default="", help="Why, for those who look later.")
@connected
def drain(client: Client, node: str, reason: str) -> None:
    """Take NODE out of the plan at a step's boundary, without a failure."""
    told(client.drain(node, reason))


@click.command()
@click.argument("node", callback=bare, shell_complete=node_names)
@click.option("--reason", default="", help="Why, for those who look later.")
@connected
def undrain(client: Client, node: str, reason: str) -> None:
    """Let a drained NODE take part again."""
    told(client.undrain(node, reason))


@click.command("forget-node")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…", callback=bare, shell_complete=node_names)
@connected
def forget_node(client: Client, nodes: tuple[str, ...]) -> None:
    """Expect NODE, which is gone for good, no more. One that leaves in order, or had notice of its end, is
    forgotten by itself.
    """
    for node in nodes:
        told(client.forget(node))
