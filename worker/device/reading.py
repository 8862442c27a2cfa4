"""Keeps the text that a device reads for its job open, and tells the daemon what it is and whether it
changed.

Owns which corpus is open and what the daemon is told of it. That a device goes no further where its text has
changed is ``executor``'s; who is kept out of the plan, and how far the job rolls back, is the core's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import msgspec

from oobleckd.protocol.datamessages import (
    Identified,
    Identify,
    InputsChanged,
    InputsChecked,
    InputsMoved,
)
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import FromWorker
from oobleckd.protocol.parts import Counters
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.data.input_watch import Changed, Checked, Finding, InputWatch, Moved
from oobleckd.worker.runtime.errors import UserError


class Unread(UserError):
    """What the job reads cannot be used on this device."""


# A rollback begins the job anew on every device; 1,790 files were read, hashed and compared once more, 0.1
# s of a core each while all stood still. (D-data-001)
class Reading:
    """Of one device. ``changed``: what has happened to what it reads, "" while it is what it was."""

    def __init__(self, device: str, tell: Callable[[FromWorker], None], wake: Callable[[], None]) -> None:
        self.device, self._tell, self._wake = device, tell, wake
        self._of: tuple[str, Job] | None = None
        self._corpus: Corpus | None = None
        self._watch: InputWatch | None = None
        self.changed = ""
        self._at = Counters()
        self._checked: Counters | None = None

    @property
    def inputs(self) -> Inputs:
        """The identity of what is open, and how many tokens it has."""
        if self._corpus is None:
            return ()
        return (msgspec.structs.replace(self._corpus.inputs.part, tokens=self._corpus.num_tokens),)

    def corpus(self, job_id: str, job: Job) -> Corpus:
        """Its samples. They stay open until another job comes: one that rolls back to its checkpoint begins
        anew, and all would stand still while many files are read and hashed once more. Another job may find
        other text in the same place. Raises Unread.
        """
        if self._corpus is None or self._of != (job_id, job) or not self._as_it_was(self._corpus):
            self.close()
            try:
                self._corpus = self._open(job)
            except UserError as error:
                raise Unread(error.problem, error.hint) from error
            self._of = job_id, job
        if self._watch is None:
            self._watch = self._look_at(self._corpus)
            if not self._corpus.inputs.part.whole:
                self._watch.check(Counters())  # nobody has read all of it yet
        self._watch.go_on()
        return self._corpus

    def _open(self, job: Job) -> Corpus:
        return open_corpus(job)

    def _look_at(self, corpus: Corpus) -> InputWatch:
        return InputWatch(corpus.inputs, self._wake)

    def _as_it_was(self, corpus: Corpus) -> bool:
        """Whether what is open can be read from once more."""
        held = corpus.inputs
        if self.changed:
            return False
        return held.stat() == held.seen or (bool(held.part.whole) and held.digest() == held.part.whole)

    def identify(self, message: Identify, *, reads: bool) -> None:
        """Say what this device would read, or does: it ``reads`` from what is open."""
        if reads:
            self._tell(Identified(self.device, message.job, self.inputs, self.changed))
            return
        held = self._corpus.inputs if self._corpus is not None else None
        if held is not None and not (held.lies_there() and held.fresh()):
            self.close()
        try:
            self.corpus(message.job, message.spec)
        except UserError as error:
            self._tell(Identified(self.device, message.job, (), error.problem, error.hint))
        else:
            self._tell(Identified(self.device, message.job, self.inputs))
        self.rest()

    def check(self, counters: Counters, *, hurry: bool) -> None:
        """A checkpoint of the boundary ``counters`` is begun; ``hurry``: nobody trains meanwhile."""
        if self._watch is not None:
            self._watch.check(counters, hurry=hurry)

    def leave(self, counters: Counters) -> None:
        """The device takes no part from ``counters`` on; what it gave until then counts, so it is still said
        where that was of another text.
        """
        if self._watch is not None:
            if counters.round and (self._checked is None or self._checked.round < counters.round):
                self._watch.check(counters, hurry=True)
            self._watch.rest()

    def rest(self) -> None:
        """The device holds nothing of the job for now."""
        if self._watch is not None:
            self._watch.rest()

    def hear(self, counters: Counters | None) -> bool:
        """Tell the daemon what was found. ``counters``: where this device stands; None: where it stood last.
        Returns whether it has found only now that something has changed.
        """
        was, self._at = self.changed, counters or self._at
        for finding in self._watch.hear() if self._watch is not None else ():
            self._found(finding)
        return self.changed != was

    def misread(self, what: str, counters: Counters) -> None:
        """Bytes that were to be trained on at ``counters`` are not what they were when they were prepared."""
        self.changed, self._at = what, counters
        self.tell_again()

    def tell_again(self) -> None:
        """Whoever asks where this device stands is to know that it goes no further."""
        if self.changed and self._of is not None:
            self._tell(InputsChanged(self.device, self._of[0], self._at, self.changed))

    def close(self) -> None:
        """Let go of what is open."""
        if self._watch is not None:
            self._watch.stop()
        self._of, self._corpus, self._watch, self.changed, self._checked = None, None, None, "", None
        self._at = Counters()

    def _found(self, finding: Finding) -> None:
        assert self._of is not None
        job_id = self._of[0]
        match finding:
            case Checked():
                self._checked = finding.counters
                self._tell(InputsChecked(self.device, job_id, finding.counters, (finding.part,)))
            case Changed():
                self.changed = finding.what
                self.tell_again()
            case Moved():
                self._tell(InputsMoved(self.device, job_id, finding.path, finding.now))
            case _:
                assert_never(finding)
