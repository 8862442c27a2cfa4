"""What can be listed: one table of kinds, with every word that may stand for one, as kubectl has them.

Owns how the first words of ``get`` and ``describe`` are read, and where the items of each kind come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from oobleckd.client import Client
from oobleckd.ctl.get import columns
from oobleckd.ctl.output import NOT_FOUND, USAGE, fail, note, when
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, PipelineView, RouterView, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.protocol.watch import GoodputView, LayerView
from oobleckd.words import count, seconds

_FEW = 20  # steps or evaluations, where nobody says how many


class ItemsWanted(NamedTuple):
    """Which items: the names that stood behind the kind, of which job ("": nobody said), and of steps and
    evaluations a part.
    """

    names: tuple[str, ...] = ()
    since: int | None = None
    last: int | None = None
    job: str = ""

    @property
    def part(self) -> dict[str, Any]:
        """For the client: the newest few where nobody says which."""
        if self.since is None and self.last is None:
            return {"since": 0, "last": _FEW}
        return {"since": self.since or 0, "last": self.last}


def _itself(view: Any) -> Sequence[Any]:
    return (view,)


class ListedKind(NamedTuple):
    """``singular`` and ``short`` mean the same as ``plural``. ``fetch``: all items, or of a kind ``of_job``
    those of the job that is named. ``names``: of an item, the one to call it by first. ``rows``: an item's
    lines in a table, each a ``row_type`` where that is not the item itself. ``scoped``: every
    job has some, and ``--job`` says of which. ``one``: there is one item a job, no list. ``remark``: words
    beside a table.
    """

    plural: str
    singular: str
    short: tuple[str, ...]
    document: str
    about: str
    fetch: Callable[[Client, ItemsWanted], Sequence[Any]]
    names: Callable[[Any], tuple[str, ...]]
    view_type: type[msgspec.Struct]
    columns: tuple[columns.Column[Any], ...]
    of_job: bool = False
    scoped: bool = False
    one: bool = False
    rows: Callable[[Any], Sequence[Any]] = _itself
    row_type: type[msgspec.Struct] | None = None
    remark: Callable[[Any], str] | None = None


def newest(client: Client) -> str:
    """The job that runs, else the last."""
    jobs = client.jobs()
    if not jobs:
        fail("no job", "hand one in with `oobleckctl submit`", NOT_FOUND)
    active = [job for job in jobs if job.finished_at is None and job.nodes]
    return (active or jobs)[-1].id


def _job(client: Client, wanted: ItemsWanted) -> str:
    return wanted.names[0] if wanted.names else wanted.job or newest(client)


def _incidents(client: Client, wanted: ItemsWanted) -> Sequence[IncidentView]:
    found = client.incidents()
    return [each for each in found if each.job == wanted.job] if wanted.job else found


def _paces(found: GoodputView) -> str:
    """What a step takes now: measured beside the best measured, and the plan beside the best plan."""
    told = []
    if found.step_s and found.best_step_s:
        best = f"the best so far {seconds(found.best_step_s)}, at {when(found.best_at, 0)}"
        told.append(f"a step takes {seconds(found.step_s)}, {best}")
    if found.plan_step_s and found.best_plan_step_s:
        share = found.best_plan_step_s / found.plan_step_s
        nodes = count(found.best_plan_nodes, "node")
        told.append(f"as modelled, the plan is {share:.1%} of the best one of all {nodes} that joined")
    paces = "; ".join(told or ["no steps are measured yet"])
    return f"{found.job}: {seconds(found.total_s)} of devices; {paces}"


KINDS: tuple[ListedKind, ...] = (
    ListedKind(
        "jobs", "job", ("j",), "Job", "what was submitted",
        lambda client, _: client.jobs(), lambda job: (job.id, job.name), JobView, columns.JOB,
    ),
    ListedKind(
        "nodes", "node", ("no", "n"), "Node", "who trains, and who is lost",
        lambda client, _: client.nodes(), lambda node: (node.name,), NodeView, columns.NODE,
    ),
    ListedKind(
        "incidents", "incident", ("inc",), "Incident", "losses, and what was done",
        _incidents, lambda incident: (incident.id,), IncidentView, columns.INCIDENT, scoped=True,
    ),
    ListedKind(
        "pipelines", "pipeline", ("pl",), "Pipeline", "of the plan in force",
        lambda client, wanted: client.pipelines(wanted.job), lambda pipeline: (str(pipeline.index),),
        PipelineView, columns.PIPELINE, scoped=True,
    ),
    ListedKind(
        "templates", "template", ("tpl",), "Template", "pipelines for so many nodes",
        lambda client, wanted: client.templates(wanted.job), lambda template: (str(template.num_nodes),),
        TemplateView, columns.TEMPLATE, scoped=True,
    ),
    ListedKind(
        "layers", "layer", ("l",), "Layer", "who has a copy",
        lambda client, wanted: client.layers(wanted.job), lambda layer: (str(layer.layer),),
        LayerView, columns.LAYER, scoped=True,
    ),
    ListedKind(
        "steps", "step", ("st",), "Step", "of JOB, or of the newest",
        lambda client, wanted: client.steps(_job(client, wanted), **wanted.part),
        lambda step: (str(step.step),), StepView, columns.STEP, of_job=True,
    ),
    ListedKind(
        "evaluations", "evaluation", ("eval", "evals"), "Evaluation", "of JOB, or of the newest",
        lambda client, wanted: client.evaluations(_job(client, wanted), **wanted.part),
        lambda found: (str(found.step),), EvaluationView, columns.EVALUATION, of_job=True,
        rows=columns.sources_of, row_type=columns.EvaluatedSource,
    ),
    ListedKind(
        "routers", "router", ("rt", "experts"), "Router", "load of experts in JOB's newest step",
        lambda client, wanted: client.routers(_job(client, wanted)),
        lambda router: (str(router.layer),), RouterView, columns.ROUTER, of_job=True,
    ),
    ListedKind(
        "goodput", "goodput", ("gp",), "Goodput", "where the time of JOB's devices went",
        lambda client, wanted: (client.goodput(_job(client, wanted)),),
        lambda found: (found.job,), GoodputView, columns.GOODPUT, of_job=True, one=True,
        rows=columns.spent, row_type=columns.SpentTime, remark=_paces,
    ),
)  # fmt: skip

_ALL = ("jobs", "nodes", "pipelines", "incidents")  # of `get all`
_BY_WORD: Mapping[str, ListedKind] = {
    word: kind for kind in KINDS for word in (kind.plural, kind.singular, *kind.short)
}
_INSTEAD = {
    "checkpoint": "`oobleckctl describe job JOB` names the newest",
    "device": "`oobleckctl describe node NODE` shows its devices",
    "event": "`oobleckctl events` shows what happens",
    "schedule": "`oobleckctl describe schedule JOB` draws one",
}
"""What can be had, but not as a list."""
WORDS = tuple(kind.plural for kind in KINDS)


def table_of_words() -> str:
    """For ``get --help``: each kind, and what else it may be called."""
    rows = [
        (kind.plural, ", ".join(dict.fromkeys((kind.singular, *kind.short))), kind.about) for kind in KINDS
    ]
    rows.append(("all", "", f"{', '.join(_ALL[:-1])} and {_ALL[-1]}"))
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{one:<{wide[0]}}  {two:<{wide[1]}}  {three}" for one, two, three in rows)


def kind_of(word: str) -> ListedKind:
    """Whatever its case. Raises Failure with exit code 2 for a word that means none."""
    found = _BY_WORD.get(word.lower())
    if found is None and (instead := _INSTEAD.get(word.lower().removesuffix("s"))):
        fail(f"no kind {word!r}", instead, USAGE)
    if found is None:
        close = get_close_matches(word.lower(), _BY_WORD, n=1)
        also = f"; did you mean {_BY_WORD[close[0]].plural!r}?" if close else ""
        fail(f"no kind {word!r}{also}", f"there are {', '.join(WORDS)}, and short forms: see --help", USAGE)
    return found


def means_kind(word: str) -> bool:
    """Whether the word stands for a kind."""
    return word.lower() in _BY_WORD


def bare_name(word: str) -> str:
    """``NAME`` of ``KIND/NAME``, as ``-o name`` prints it; any other word as it is."""
    kind, slash, name = word.partition("/")
    return name if slash and name and means_kind(kind) else word


def listed(words: Sequence[str]) -> list[tuple[ListedKind, tuple[str, ...]]]:
    """Kinds and names of ``KIND [NAME...]``, ``KIND,KIND``, ``all`` or ``KIND/NAME...``. Raises Failure with
    exit code 2.
    """
    first, *names = words
    if "/" in first:
        return _by_kind(words)
    kinds = [kind_of(word) for word in (_ALL if first == "all" else first.split(","))]
    if any(bare_name(name) != name for name in names):
        fail("KIND/NAME stands alone", f"write every one so, as in {first}/{names[0].split('/')[-1]}", USAGE)
    if names and len(kinds) > 1:
        fail(
            f"names are of one kind: {names[0]}",
            "write KIND/NAME for each, as in job/gpt2 node/node-1",
            USAGE,
        )
    if kinds[0].of_job and len(names) > 1:
        fail(f"too many words: {' '.join(names[1:])}", f"{kinds[0].plural} are of one job", USAGE)
    return [(kind, tuple(names)) for kind in dict.fromkeys(kinds)]


def _by_kind(words: Sequence[str]) -> list[tuple[ListedKind, tuple[str, ...]]]:
    found: dict[str, list[str]] = {}
    for word in words:
        kind, slash, name = word.partition("/")
        if not slash or not name:
            fail(f"{word!r} is no KIND/NAME", "write all of them so, or the kind once: KIND NAME NAME", USAGE)
        found.setdefault(kind_of(kind).plural, []).append(name)
    return [(kind_of(kind), tuple(names)) for kind, names in found.items()]


def items_of(client: Client, kind: ListedKind, wanted: ItemsWanted) -> tuple[Sequence[Any], tuple[str, ...]]:
    """The items that are wanted, and the names that nobody has."""
    items = kind.fetch(client, wanted)
    if kind.of_job or not wanted.names:
        return items, ()
    names = set(wanted.names)
    known = {name for item in items for name in kind.names(item)}
    missing = tuple(name for name in wanted.names if name not in known)
    return [item for item in items if names & set(kind.names(item))], missing


def fail_missing(kind: ListedKind, names: Sequence[str], known: Sequence[Any]) -> None:
    """End with exit code 3 where some names are nobody's."""
    if names:
        those = ", ".join(kind.names(item)[0] for item in known[-10:]) or "none"
        fail(f"no {kind.singular} {', '.join(map(repr, names))}", f"known: {those}", NOT_FOUND)


def say_remark(kind: ListedKind, items: Sequence[Any]) -> None:
    """Words beside the table, for people."""
    for item in items if kind.remark is not None else ():
        assert kind.remark is not None
        note(kind.remark(item))
