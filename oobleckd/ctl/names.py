"""Names that a shell may complete: jobs, nodes and incidents, if the daemon says them at once.

Owns nothing that a verb needs: where no daemon answers in time there is simply nothing to complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from oobleckd.client import Client
from oobleckd.ctl.connect import client
from oobleckd.ctl.output import Failure
from oobleckd.unixhttp import ClientError

_PATIENCE_S = 0.3
Verb = TypeVar("Verb", bound=Callable[..., Any])


def job_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Jobs by id and by name; their state is the explanation."""
    return _completed(ctx, incomplete, _jobs)


def node_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Nodes; their state is the explanation."""
    return _completed(ctx, incomplete, _nodes)


def incident_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Incidents; what happened is the explanation."""
    return _completed(ctx, incomplete, _incidents)


def described_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What ``describe`` takes behind its first word."""
    kinds = {"job": _jobs, "node": _nodes, "incident": _incidents, "schedule": _jobs}
    before = ctx.params.get("words") or ()
    if not before:
        return [CompletionItem(kind) for kind in kinds if kind.startswith(incomplete)]
    return _completed(ctx, incomplete, kinds.get(before[0], lambda _client: ()))


def bare(_ctx: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """An argument's callback: ``gpt2-3`` of ``job/gpt2-3``, as ``get -o name`` prints it."""
    from oobleckd.ctl.get.kinds import bare_name

    if isinstance(value, tuple):
        return tuple(map(bare_name, value))
    return bare_name(value) if isinstance(value, str) else value


def job_argument(verb: Verb) -> Verb:
    """Give a verb JOB, by id, by name, or as job/NAME."""
    return click.argument("job", callback=bare, shell_complete=job_names)(verb)


def logged_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What ``logs`` takes: jobs, nodes, the daemon."""
    return _completed(ctx, incomplete, lambda asked: [*_jobs(asked), *_nodes(asked), ("oobleckd", "daemon")])


def listed_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What ``get`` takes: a kind, then names of that kind, or jobs for what is of a job."""
    from oobleckd.ctl.get.kinds import KINDS, WORDS

    before = ctx.params.get("words") or ()
    if not before:
        return [CompletionItem(word) for word in WORDS if word.startswith(incomplete)]
    kinds = {word: kind for kind in KINDS for word in (kind.plural, kind.singular, *kind.short)}
    kind = kinds.get(before[0])
    ask = {"jobs": _jobs, "nodes": _nodes, "incidents": _incidents}
    plural = "jobs" if kind is not None and kind.of_job else kind.plural if kind is not None else ""
    return _completed(ctx, incomplete, ask.get(plural, lambda _client: ()))


def _completed(
    ctx: click.Context, incomplete: str, ask: Callable[[Client], Iterable[tuple[str, str]]]
) -> list[CompletionItem]:
    root = ctx.find_root()
    root.obj = {**root.params, **(root.obj or {})}  # the root command was parsed, but not run
    try:
        with ctx.scope(cleanup=False):
            found = dict(ask(client(_PATIENCE_S)))
    except (ClientError, Failure):
        return []
    return [CompletionItem(name, help=text) for name, text in found.items() if name.startswith(incomplete)]


def _jobs(asked: Client) -> Iterable[tuple[str, str]]:
    jobs = asked.jobs()
    return [*((job.name, job.state) for job in jobs), *((job.id, job.state) for job in jobs)]


def _nodes(asked: Client) -> Iterable[tuple[str, str]]:
    return ((node.name, node.state) for node in asked.nodes())


def _incidents(asked: Client) -> Iterable[tuple[str, str]]:
    return ((incident.id, incident.cause) for incident in asked.incidents())
