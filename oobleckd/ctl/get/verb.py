"""The command line of ``get``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from oobleckd.client import Client
from oobleckd.ctl.connect import connected_with
from oobleckd.ctl.get.fields import ordered, terms_of
from oobleckd.ctl.get.formats import MORE, ListFormat, show, show_several
from oobleckd.ctl.get.kinds import (
    ItemsWanted,
    ListedKind,
    fail_missing,
    items_of,
    listed,
    say_remark,
    table_of_words,
)
from oobleckd.ctl.get.watching import ItemPrinter, watch
from oobleckd.ctl.names import bare, job_names, listed_names
from oobleckd.ctl.options import output_format
from oobleckd.ctl.output import USAGE, fail, note


class Kinds(click.Command):
    """Adds the table of kinds to the help."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The text, and the words for each kind."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Kinds, and what else they may be called"):
            for line in table_of_words().splitlines():
                formatter.write(f"  {line}\n")


@click.command(cls=Kinds)
@click.argument("words", metavar="KIND [NAME...]", nargs=-1, required=True, shell_complete=listed_names)
@click.option(
    "-l",
    "--selector",
    "--field-selector",
    "selector",
    default="",
    metavar="FIELD=VALUE,...",
    help="Only those whose fields (as -o json has them) are so, or with != are not.",
)
@click.option(
    "--sort-by", default="", metavar="FIELD", help="In the order of a field; -FIELD: the most first."
)
@click.option("-w", "--watch", "watching", is_flag=True, help="Go on with rows that change, until Ctrl-C.")
@click.option("--no-headers", is_flag=True, help="Without the line of titles.")
@click.option(
    "--since", type=click.IntRange(min=1), metavar="N", help="Of steps, evaluations: from that step on."
)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Of steps, evaluations: the newest N.")
@click.option(
    "--job",
    default="",
    metavar="JOB",
    shell_complete=job_names,
    callback=bare,
    help="Of pipelines, templates, layers, incidents and what is of a job: of this one.",
)
@connected_with(*MORE)
def get(
    client: Client,
    words: tuple[str, ...],
    selector: str,
    sort_by: str,
    watching: bool,
    no_headers: bool,
    since: int | None,
    last: int | None,
    job: str,
) -> None:
    """List what there is of a KIND, or what is named: get jobs, get node node-1, get job/gpt2-3, get
    jobs,nodes, get all. Steps, evaluations and goodput are of the JOB that is named, or of the newest.
    """
    wanted = listed(words)
    how: ListFormat = output_format()  # type: ignore[assignment] # one of those that the option has
    if since is not None or last is not None:
        _check_parts([kind for kind, _ in wanted])
    if how == "csv" and len(wanted) > 1:
        fail("-o csv prints one table", "name one kind", USAGE)
    if selector or sort_by:
        _check_lists([kind for kind, _ in wanted])
    job = _scope(client, wanted, job)
    if watching:
        asked = ItemsWanted(wanted[0][1], since, last, job)
        _watch(client, wanted, asked, selector, sort_by, headers=not no_headers)
        return
    found, missing = [], []
    for kind, names in wanted:
        items, unknown = items_of(client, kind, ItemsWanted(names, since, last, job))
        found.append((kind, _chosen(kind, items, selector, sort_by)))
        missing.append((kind, unknown))
    if len(found) > 1:
        show_several(found, how, headers=not no_headers)
    else:
        (kind, items), (_, names) = found[0], wanted[0]
        single = len(names) == 1 and not kind.of_job and not selector
        if items or not any(unknown for _, unknown in missing):
            show(kind, items, how, single=single, headers=not no_headers)
    if how in {"table", "wide"}:
        _say(found)
    for kind, unknown in missing:
        if unknown:
            fail_missing(kind, unknown, kind.fetch(client, ItemsWanted(job=job)))


def _scope(client: Client, wanted: Sequence[tuple[ListedKind, tuple[str, ...]]], job: str) -> str:
    """The id of ``--job``; "" where nobody said. Raises Failure."""
    if not job:
        return ""
    for kind, names in wanted:
        if not kind.scoped and not kind.of_job:
            fail(f"--job is of what a job has, not of {kind.plural}", "leave it out", USAGE)
        if kind.of_job and names:
            fail(f"the job of {kind.plural} is said twice: {names[0]}, --job {job}", "say it once", USAGE)
    return client.job(job).id


def _check_parts(kinds: list[ListedKind]) -> None:
    for kind in kinds:
        if kind.plural not in {"steps", "evaluations"}:
            fail(
                f"--since and --last are of steps and evaluations, not of {kind.plural}",
                "leave them out",
                USAGE,
            )


def _watch(
    client: Client,
    listed_kinds: list[tuple[ListedKind, tuple[str, ...]]],
    wanted: ItemsWanted,
    selector: str,
    sort_by: str,
    *,
    headers: bool,
) -> None:
    if len(listed_kinds) > 1:
        fail("--watch is of one kind", "name one kind", USAGE)
    kind = listed_kinds[0][0]
    how: ListFormat = output_format()  # type: ignore[assignment] # as above
    if wanted.names and kind.of_job:
        client.job(wanted.names[0])  # nobody of that name is an error at the start

    def look(asked: ItemsWanted) -> Any:
        return _chosen(kind, items_of(client, kind, asked)[0], selector, sort_by)

    if wanted.names and not kind.of_job:
        fail_missing(kind, items_of(client, kind, wanted)[1], kind.fetch(client, ItemsWanted(job=wanted.job)))
    watch(client, kind, wanted, look, ItemPrinter(kind, how, headers=headers))


def _check_lists(kinds: list[ListedKind]) -> None:
    for kind in kinds:
        if kind.one:
            fail(f"-l and --sort-by are of lists, not of {kind.plural}", "leave them out", USAGE)


def _chosen(kind: ListedKind, items: Any, selector: str, sort_by: str) -> Any:
    """Those that -l wants, in the order of --sort-by."""
    if not selector and not sort_by:
        return items
    of = kind.view_type
    if selector:
        terms = terms_of(selector, of)
        items = [item for item in items if all(term.holds(item) for term in terms)]
    return ordered(items, sort_by, of) if sort_by else items


def _say(found: list[tuple[ListedKind, Any]]) -> None:
    """Words beside the tables."""
    for kind, items in found:
        say_remark(kind, items)
    if not any(items for _, items in found):
        note(f"no {' and no '.join(kind.plural for kind, _ in found)}")
