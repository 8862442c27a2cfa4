"""Verbs that tell what happened and what happens: ``events`` and ``story``."""

from __future__ import annotations

import click
import msgspec

from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.names import bare
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import NOT_FOUND, emit_item, emit_page, fail, note, when
from oobleckd.protocol.changes import Change
from oobleckd.protocol.text import visible

_COLOURS = {"debug": "bright_black", "info": None, "warn": "yellow", "error": "red"}


def _show(change: Change) -> None:
    if wants_json():
        emit_item("Change", change)
        return
    level = "" if change.level in {"info", "debug"} else f"{change.level}: "
    line = f"{when(change.at)}  {change.seq:>6}  {change.kind:<10}  {level}{change.text}"
    emit_page(click.style(visible(line), fg=_COLOURS[change.level]))


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", type=int, metavar="SEQ", help="Begin after this event; 0: with all that are kept.")
@connected
def events(client: Client, follow: bool, since: int | None) -> None:
    """Show events, the oldest first, one a line (with -o json, one document a line)."""

    def on_link(up: bool) -> None:
        if not up:
            note("the daemon is away; training goes on without it, and so does this once it is back")

    first = 0 if since is None and not follow else since
    if follow:
        client.status()  # An absent daemon is an error at the start, and a pause later on.
    with client.events(first, follow=follow, on_link=on_link if follow else None) as stream:
        for change in stream:
            _show(change)


@click.command()
@click.argument("key", callback=bare)
@connected
def story(client: Client, key: str) -> None:
    """Show the causal chain of KEY: node:NAME, incident:ID or job:ID."""
    if ":" not in key:
        key = _with_kind(client, key)
    chain = client.story(key)
    if not chain:
        fail(f"nothing is known of {key!r}", "keys are node:NAME, incident:ID and job:ID", NOT_FOUND)
    for change in chain:
        _show(change)


def _with_kind(client: Client, name: str) -> str:
    """A bare name is looked up, so that people need not type what can only be one thing."""
    known: dict[str, list[msgspec.Struct]] = {
        f"node:{name}": [node for node in client.nodes() if node.name == name],
        f"incident:{name}": [found for found in client.incidents() if found.id == name],
    }
    jobs = [job.id for job in client.jobs() if name in {job.id, job.name}]
    keys = [key for key, found in known.items() if found] + [f"job:{job}" for job in jobs[-1:]]
    return keys[0] if keys else name
