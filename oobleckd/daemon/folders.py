"""The folders that jobs of this daemon write checkpoints into: made for each, with the mark of its journal,
and looked at when an incarnation begins.

Owns which name a folder gets: that of the job with the next number that nobody has in its ``checkpoint.dir``.
The mark is ``host.folder``'s. Everything here reads or writes a disk that may be slow or away, so it runs in
threads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oobleckd.core.events import FolderFound
from oobleckd.host.folder import FolderMark, ForeignFolder, claim, enter, mark_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Of a job that is not over: where its folder lies, and its name ("": that of the job, by an older
    version that put no mark there).
    """

    job: str
    name: str
    root: Path
    folder: str


@dataclass(frozen=True, slots=True)
class Folders:
    """Of the journal with these ``names``, the present one first; under the others it was written before it
    was copied.
    """

    names: Sequence[str]

    def new(self, root: Path, name: str, number: int) -> str:
        """Make the folder of a job called ``name`` in ``root``, with ``number`` or the next one that is free;
        what it is called. Raises OSError.
        """
        for free in itertools.count(number):
            folder = f"{name}-{free}"
            # Made exclusively when the job is submitted, and the job's id has its number: ids counted from
            # one journal alone, so two daemons pruned each other's checkpoints. (D-checkpoints-013)
            if claim(root / folder, FolderMark(self.names[0], folder)):
                return folder
        raise AssertionError("numbers do not end")

    def enter(self, job: str, folder: Path) -> None:
        """See that a checkpoint may be completed in ``folder``, into which devices of ``job`` have written.
        Raises ForeignFolder, OSError.
        """
        if folder.exists():  # else its disk is away, and nothing is put in its place
            enter(folder, FolderMark(self.names[0], job), self.names[1:], known=True)

    def owns(self, folder: Path) -> bool:
        """Whether ``folder`` has the mark of this journal, or none: that of one that it is a copy of may be
        in use there. Raises OSError.
        """
        mark = mark_of(folder)
        return mark is None or mark.journal == self.names[0]

    def look(self, job: JobFolder, number: int) -> FolderFound | None:
        """Where the checkpoints of a job go that another incarnation began, or an older version; None where
        that cannot be known now. Raises OSError.
        """
        path = job.root / (job.folder or job.job)
        mark = mark_of(path)
        if mark is None and not path.exists():
            return None  # who writes there makes it
        # Folders under a former name are completed, as live devices wrote there, and never taken over: the
        # daemon that this journal was copied from may be at work. (D-checkpoints-015)
        if mark is not None and mark.journal in self.names[1:]:
            why = f"{path} belongs to the journal that this one is a copy of"
        else:
            try:
                enter(path, FolderMark(self.names[0], job.job), known=not job.folder)
            except ForeignFolder as error:
                why = str(error)
            else:
                return FolderFound(job.job, path.name)
        return FolderFound(job.job, self.new(job.root, job.name, number), why)
