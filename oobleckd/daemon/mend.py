"""Finds a journal whose bytes have changed before it is read, mends it from its copy, and keeps the damaged
file for people.

Owns the look before a daemon starts, which is at what the journal says of itself, the newest snapshot of the
state and all records after it, in both files; and what replaces a file that is damaged. Older records are
looked at by ``verify``, while the daemon works. Both files have every record, each with a seal, so what is
damaged in one is taken from the other. What neither has of the records after the snapshot is lost, with all
that came after it, and the daemon goes on from what the workers hold (``core.machine``).

A whole file is read, and written, a record at a time.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.daemon import bins
from oobleckd.daemon.records import CopyHead, Row, format_row, snapshot_row
from oobleckd.daemon.segments import (
    Copied,
    close_present,
    closed_segments,
    look_into,
    new_of,
    records_in,
    write_copy,
)
from oobleckd.daemon.tables import (
    DROPPED,
    FORMAT,
    KEPT_SNAPSHOTS,
    OLDER,
    SEALED,
    WITH_SNAPSHOTS,
    Table,
    create,
    dropped_in,
    format_of,
    insert,
    is_damage,
    named,
    names_in,
    new_name,
    opened,
)
from oobleckd.host.durable import move, sync_file

Decode = Callable[[bytes], object | None]
"""The state in a snapshot; None where this version cannot read it."""

_TRACES = ("identity", "transport.secret")  # of an earlier incarnation of a daemon in the state folder
CHECK = "journal.check"
"""The file that tells the next start to have SQLite look at all of the journal."""
_log = logging.getLogger(__name__)


class OtherFormat(Exception):
    """The journal is of a version of which nothing is known."""

    def __init__(self, found: int) -> None:
        super().__init__(f"format {found}")
        self.found = found


@dataclass(frozen=True, slots=True)
class Damage:
    """What was found, for people, where the damaged files lie (None: nothing was left of them), and whether
    records are gone for good, as far as anybody can know.
    """

    what: str
    aside: Path | None
    lost: bool


@dataclass(slots=True)
class Ground:
    """What a daemon starts from: ``state`` after record ``seq``, as it was decoded (None: there is no
    snapshot), and the records after it (with no snapshot they are in the database alone).

    ``newest``: the number of the last record. ``num_rows``: how many were read, in both files. ``first``:
    with which number the present file of the copy begins.
    """

    meta: dict[str, str] = field(default_factory=dict)
    seq: int = 0
    state: object | None = None
    rows: list[Row] = field(default_factory=list)
    newest: int = 0
    num_rows: int = 0
    first: int = 1
    damage: Damage | None = None

    @property
    def dropped(self) -> int:
        """Up to which number steps may be missing, that were kept for long enough."""
        return dropped_in(self.meta)


@dataclass(slots=True)
class _Look:
    """What was seen: ``wrong`` with the database, ``stale`` of the copy; ``top`` is the newest snapshot
    in it, whether this version can read it or not.
    """

    ground: Ground
    top: tuple[int, bytes] | None = None
    wrong: str = ""
    stale: bool = False


def mend(path: Path, copy: Path, decode: Decode) -> Ground:
    """Look at the newest part of the journal ``path``, bring it to the present format and mend it if need be,
    or make it. Raises OtherFormat, and OSError, sqlite3.Error where even a new file cannot be written.
    """
    for left in _left_over(path, copy):
        left.unlink(missing_ok=True)
    present = look_into(copy)
    head = _head(copy, present)
    damage = None
    if not path.exists():
        damage = _restore(path, copy, present, head, decode)
        present = look_into(copy)
    format_ = _format(path, head.format)
    look = _look(path, copy, present, format_, head, decode)
    if look.wrong or format_ != FORMAT:
        damage = _replace(path, copy, present, format_, head, look, decode)
        present = look_into(copy)
        look = _look(path, copy, present, FORMAT, head, decode)
        if look.wrong:
            raise sqlite3.DatabaseError(look.wrong)
    _settle(path, copy, present, look)
    path.with_name(CHECK).unlink(missing_ok=True)
    look.ground.damage = damage
    return look.ground


def _left_over(path: Path, copy: Path) -> list[Path]:
    """Of a start that was cut short, by a full disk for one, and of a file of the copy that was not
    finished.
    """
    parts = copy.parent.glob(f"{copy.name}.*.tmp")
    return [_new(path), path.with_name(f"{_new(path).name}-journal"), new_of(copy), *parts]


def _head(copy: Path, present: Copied) -> CopyHead:
    """What the copy says of the journal: the newest of its files that says anything."""
    if present.head.format:
        return present.head
    heads = (look_into(segment.path).head for segment in reversed(closed_segments(copy)))
    return next((head for head in heads if head.format), CopyHead())


def _format(path: Path, said: int) -> int:
    """Of which the journal is; ``said``: its copy. Raises OtherFormat."""
    told = format_of(path)
    known = {told, said} & SEALED
    if known:
        # Both, where they differ: a start was cut short between the two files, or a bit flipped. The newer
        # one is read as well where it has nothing of what is new in it.
        return max(format_ for format_ in known if format_ is not None)
    if told is None:
        return FORMAT
    if told not in OLDER:
        raise OtherFormat(told)
    return told


# --------------------------------------------------------------------------- looking


def _look(path: Path, copy: Path, present: Copied, format_: int, head: CopyHead, decode: Decode) -> _Look:
    look = _Look(Ground())
    with closing(opened(path)) as database:
        table = Table(database, sealed=format_ in SEALED)
        table.read_meta(format_)
        look.ground.meta = table.meta
        if head.dropped > look.ground.dropped:
            table.blame("what it says of itself is gone")
            look.ground.meta[DROPPED] = str(head.dropped)
        if format_ >= WITH_SNAPSHOTS:
            _choose(table, present, look, decode)
        # All of a long journal took half a minute: older records are looked at while the daemon works, and no
        # decision rests on them. (D-daemon-020)
        if not look.ground.seq or path.with_name(CHECK).exists():
            table.check()
        _compare(table, copy, present, look)
        table.check_writing()
        look.wrong = table.wrong
    names = names_in(look.ground.meta) or head.names
    look.stale |= present.head != CopyHead(FORMAT, names, look.ground.dropped) or not present.whole
    look.stale |= look.top is not None and look.top[0] not in present.snapshots
    return look


def _choose(table: Table, present: Copied, look: _Look, decode: Decode) -> None:
    """Take the newest snapshot that can be read."""
    kept = dict(table.snapshots())
    look.top = max(kept.items(), default=None)
    if max(present.snapshots, default=0) > max(kept, default=0):
        table.blame("a snapshot of the state was gone")
    look.ground.seq, look.ground.state = _newest(kept | present.snapshots, decode)


def _newest(snapshots: Mapping[int, bytes], decode: Decode) -> tuple[int, object | None]:
    """The newest that can be read; 0 and None where none can."""
    for seq in sorted(snapshots, reverse=True):
        state = decode(snapshots[seq])
        if state is not None:
            return seq, state
    return 0, None


def _compare(table: Table, copy: Path, present: Copied, look: _Look) -> None:
    """The records after the snapshot in both files, and none may be missing between them."""
    ground, top = look.ground, look.top[0] if look.top else 0
    ground.newest = ground.seq
    num_mine, gap = 0, False
    beside = side_by_side(table.rows(ground.seq), records_in(copy, present, ground.seq))
    for seq, there, row, copied in beside:
        ground.num_rows += there + (copied is not None)
        num_mine += row is not None
        gap = gap or (seq != ground.newest + 1 and not _may_lack(ground, seq))
        if gap or row is None:
            table.blame(f"records after number {ground.newest} were gone")
            gap = True
            continue
        ground.newest = seq
        look.stale |= copied != row and seq > top
        if ground.seq:
            ground.rows.append(row)
    if ground.newest < top:  # by one that can be read nothing before it is missed
        table.blame(f"records after number {ground.newest} were gone")
    if num_mine and present.empty and ground.newest > top:
        _log.warning("the journal's copy %s was gone, and is written anew", copy)


def _may_lack(ground: Ground, seq: int) -> bool:
    """Whether the numbers before ``seq`` may be missing: they were kept for long enough."""
    return not ground.seq and seq - 1 <= ground.dropped


def side_by_side(
    mine: Iterator[tuple[int, Row | None]], copied: Iterator[Row]
) -> Iterator[tuple[int, bool, Row | None, Row | None]]:
    """By number, whether the database has the record, that record if it is intact, and the copy's."""
    one, other = next(mine, None), next(copied, None)
    while one is not None or other is not None:
        seq = min(([one[0]] if one else []) + ([other[1]] if other else []))
        row, there, second = None, False, None
        if one is not None and one[0] == seq:
            row, there, one = one[1], True, next(mine, None)
        if other is not None and other[1] == seq:
            second, other = other, next(copied, None)
        yield seq, there, row, second


def _settle(path: Path, copy: Path, present: Copied, look: _Look) -> None:
    """See that the present file of the copy has the newest snapshot and all after it."""
    ground, top = look.ground, look.top[0] if look.top else 0
    ground.first = present.first or top + 1
    if not look.stale:
        return
    if present.first and present.first <= top:
        close_present(copy, present.first, max(present.last, present.first))
    beginning = [format_row(FORMAT, names_in(ground.meta), ground.dropped)]
    beginning += [snapshot_row(*look.top)] if look.top else []
    with closing(opened(path)) as database:
        rows = (row for _, row in Table(database).rows(top) if row is not None)
        write_copy(copy, itertools.chain(beginning, rows))
    ground.first = top + 1


# --------------------------------------------------------------------------- replacing


@dataclass(slots=True)
class _Made:
    """Of a new file: how many records it has, the newest of them, and the newest that is known of."""

    num_rows: int = 0
    newest: int = 0
    known: int = 0


def _replace(
    path: Path, copy: Path, present: Copied, format_: int, head: CopyHead, look: _Look, decode: Decode
) -> Damage | None:
    """A journal of the present format with all that both files have, in place of one that is damaged or of
    an older format.
    """
    if look.wrong and format_ not in SEALED:
        raise sqlite3.DatabaseError(look.wrong)
    damaged = bool(look.wrong) or format_ == FORMAT
    aside = _set_aside(path) if damaged else None
    before = _keep_older(path, format_) if format_ != FORMAT else None
    names = names_in(look.ground.meta) or head.names or (new_name(),)
    meta = look.ground.meta | named(names)
    with closing(opened(path)) as database:
        table = Table(database, sealed=format_ in SEALED)
        made = _write_all(path, copy, present, table, meta, decode)
    wrong = look.wrong or table.wrong
    lossy = _part_with_later(copy, present, made)
    if before is not None:
        _log.warning("%s was brought from format %d to %d; as it was it is %s", path, format_, FORMAT, before)
    if not damaged:
        return None
    # Two files lose nothing to one flip anywhere. Where both lack an end, what devices hold came of
    # decisions that nobody knows, and jobs roll back. (D-daemon-008, D-daemon-009)
    lost = lossy or present.empty or not present.whole
    return _said(path, made, Damage(wrong or "it is no sound database", aside, lost))


def _keep_older(path: Path, format_: int) -> Path:
    """The file as it was, for the version that wrote it."""
    with closing(sqlite3.connect(path)) as database:
        try:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except UnicodeDecodeError:  # of a flipped bit in what SQLite says of it
            pass
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
    before = path.with_name(f"{path.name}.format-{format_}")
    shutil.copyfile(path, before)
    sync_file(before)
    return before


def _write_all(
    path: Path, copy: Path, present: Copied, table: Table | None, meta: Mapping[str, str], decode: Decode
) -> _Made:
    """The new file, complete under another name before it has its own."""
    made = _Made()

    def fill(database: sqlite3.Connection) -> None:
        snapshots = _snapshots(copy, present, table)
        base, _ = _newest(snapshots, decode)
        made.newest = made.known = base
        rows = table.rows() if table is not None else iter(())
        curves = bins.Bins()
        for seq, _, row, copied in side_by_side(rows, records_in(copy, present)):
            made.known = max(made.known, seq)
            found = row or copied
            after_gap = (
                seq > made.newest + 1 and seq > base and not (not base and seq - 1 <= dropped_in(meta))
            )
            if found is None or after_gap:
                if seq > base:
                    break  # what comes after it has no ground
                continue
            insert(database, found)
            curves.add(database, found)
            made.num_rows, made.newest = made.num_rows + 1, max(made.newest, seq)
        curves.flush(database)
        made.known = max([made.known, *snapshots])
        for seq in sorted((seq for seq in snapshots if seq <= made.newest), reverse=True)[:KEPT_SNAPSHOTS]:
            insert(database, snapshot_row(seq, snapshots[seq]))
        if table is not None:
            with table.guarded():
                bins.copy_of(database, table.database)

    write_database(path, meta, fill)
    return made


def _snapshots(copy: Path, present: Copied, table: Table | None) -> dict[int, bytes]:
    """All that are intact in the journal and in the newest two files of its copy."""
    found = dict(present.snapshots)
    for segment in closed_segments(copy)[-1:]:
        found |= look_into(segment.path).snapshots
    if table is not None:
        wrong = table.wrong  # of an older format there are none
        found |= dict(table.snapshots())
        table.wrong = wrong
    return found


def _part_with_later(copy: Path, present: Copied, made: _Made) -> bool:
    """Whether records are known that have no ground any more: then what has them is set aside, as their
    numbers are used again.
    """
    if made.known <= made.newest:
        return False
    for segment in closed_segments(copy):
        if segment.last > made.newest:
            segment.path.replace(free_name(segment.path, "damaged"))
    if present.last > made.newest or max(present.snapshots, default=0) > made.newest:
        copy.replace(free_name(copy, "damaged"))
    return True


def _restore(path: Path, copy: Path, present: Copied, head: CopyHead, decode: Decode) -> Damage | None:
    """There is no journal: one of what its copy has. It is the first start where nothing else is there
    either.
    """
    if head.format and head.format not in SEALED:
        raise sqlite3.DatabaseError(f"it is gone, and its copy {copy.name} has format {head.format}")
    left = any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-shm"))
    aside = _set_aside(path) if left else None
    closed = closed_segments(copy)
    names = head.names or (new_name(),)
    meta = named(names) | ({DROPPED: str(head.dropped)} if head.dropped else {})
    if not present.empty or closed or head.names:
        made = _write_all(path, copy, present, None, meta, decode)
        lossy = _part_with_later(copy, present, made)
        if not made.num_rows and not made.newest and not left and not closed:
            return None  # nothing was ever written
        lost = lossy or not present.whole or (present.empty and not present.head.format)
        return _said(path, made, Damage("the file was gone", aside, lost))
    garbled = copy.exists() and copy.stat().st_size
    if garbled:
        aside = free_name(copy, "damaged")
        copy.replace(aside)
    write_database(path, meta, lambda _: None)
    if not (garbled or left or any((path.parent / trace).exists() for trace in _TRACES)):
        return None
    what = f"the file was gone, and {'nothing in its copy can be read' if garbled else 'its copy with it'}"
    return _said(path, _Made(), Damage(what, aside, lost=True))


def _said(path: Path, made: _Made, damage: Damage) -> Damage:
    kept = f"; the damaged file is {damage.aside}" if damage.aside is not None else ""
    _log.error("the journal %s was damaged (%s); it has %d records again, %s%s", path, damage.what,
        made.num_rows,
               "and more are lost" if damage.lost else "which are all", kept)  # fmt: skip
    return damage


def write_database(path: Path, meta: Mapping[str, str], fill: Callable[[sqlite3.Connection], None]) -> None:
    """A new journal, which ``fill`` writes the records into, complete under another name before it has its
    own. ``meta``: what it says of itself, besides its format.
    """
    new = _new(path)
    new.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.execute("BEGIN")
            create(database, meta)
            fill(database)
            database.execute("COMMIT")
        new.chmod(0o640)
        sync_file(new)
    except (OSError, sqlite3.Error):
        new.unlink(missing_ok=True)
        new.with_name(f"{new.name}-journal").unlink(missing_ok=True)
        raise
    for suffix in ("-wal", "-shm"):  # of the file before: they must never meet the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    move(new, path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _set_aside(path: Path) -> Path:
    """Keep a damaged database and what belongs to it under another name. The file itself stays until the new
    one takes its place, so that a start that is cut short begins again with all there is.
    """
    aside = free_name(path, "damaged")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, aside.with_name(aside.name + suffix))
    return aside


def free_name(path: Path, what: str) -> Path:
    """A name beside ``path``, of something that it was before, which nothing has."""
    number = 1
    while path.with_name(f"{path.name}.{what}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{what}-{number}")
