"""Which keys go with chats and completions, and which do not."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobdata import Chat
from oobleckd.protocol.jobtable import JobError

ROWS = {"source": "jsonl", "path": "t.jsonl", "tokenizer": "tok"}


def job(**data: Any) -> Job:
    train = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 8}
    return parse_job({"name": "a", "train": train, "data": {**ROWS, **data}})


def source(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "jsonl", "path": f"{name}.jsonl", "weight": 1, **more}


def mixed(*sources: dict[str, Any], **data: Any) -> Job:
    train = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 8}
    table = {"tokenizer": "tok", "source": list(sources), **data}
    return parse_job({"name": "a", "train": train, "data": table})


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"format": "chat", "source": "text"}, "data.format"),
        ({"format": "completion", "source": "tokens"}, "data.format"),
        ({"format": "chat", "column": "messages"}, "data.column"),
        ({"format": "completion", "column": "prompt"}, "data.column"),
        ({"format": "chat", "sequences": "windows"}, "data.sequences"),
        ({"format": "chat", "bos": True}, "data.bos"),
        ({"format": "chat", "eos": False}, "data.eos"),
        ({"chat": {"unroll": True}}, "data.chat"),
        ({"format": "completion", "chat": {"roles": ["user"]}}, "data.chat"),
        ({"format": "chat", "chat": {"roles": []}}, "data.chat.roles"),
        ({"format": "chat", "chat": {"role": ["user"]}}, "data.chat.role"),
        ({"format": "chats"}, "data.format"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as refused:
        job(**data)
    assert refused.value.path == key


def test_what_goes_together() -> None:
    assert (job(format="chat").data.row_kind, job(format="chat").data.is_separate) == ("packed", True)
    assert job(format="chat", sequences="padded").data.weighs_targets
    assert not job(format="chat").data.writes_eos
    completions = job(format="completion", eos=False, bos=True).data
    assert (completions.writes_eos, completions.bos) == (False, True)
    assert job().data.writes_eos


def test_of_several_sources_each_has_its_own_format() -> None:
    data = mixed(source("a", format="chat"), source("b"), chat={"unroll": True}, bos=True).data
    chats, text = (data.only(each) for each in data.sources)
    assert (chats.chat, chats.bos, chats.row_kind) == (Chat(unroll=True), False, "packed")
    assert (text.chat, text.bos, text.row_kind) == (Chat(), True, "packed")
    for sources, more, key in (
        ([source("a"), source("b")], {"chat": {"unroll": True}}, "data.chat"),
        ([source("a", format="chat")], {"bos": True}, "data.bos"),
        ([source("a", format="chat", column="b"), source("b")], {}, "data.source[0].column"),
        ([source("a", format="chat", kind="text"), source("b")], {}, "data.source[0].format"),
        ([source("a", format="chat"), source("b")], {"sequences": "windows"}, "data.sequences"),
    ):
        with pytest.raises(JobError) as refused:
            mixed(*sources, **more)
        assert refused.value.path == key
