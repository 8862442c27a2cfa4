"""Chats and completions become folders with a loss.bin, whatever their format, and whoever is killed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors

from oobleckd.prepare import build, sources, wanted
from oobleckd.prepare.build import MadeFolder, prepare
from oobleckd.protocol.job import Job
from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import (
    FORMAT_OF_CHATS,
    INDEX,
    LOSS,
    MANIFEST,
    TOKENS,
    Manifest,
    checksums,
    read_manifest,
)
from tests.helpers import chat_templates as templates
from tests.helpers.chats import CHATS, SPECIAL, asked_of, chat, chat_tokenizer, chatml_text, write_lines
from tests.helpers.corpora import job_of, save_to_disk
from tests.helpers.one_process import OneProcess


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Pool", OneProcess)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("chatml") / "tokenizer", templates.CHATML)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "t.jsonl", *({"id": i, "messages": each} for i, each in enumerate(CHATS)))


def made(job: Job, processes: int = 1) -> MadeFolder:
    return prepare(job, processes, lambda _progress: None)


def of_chats(source: str, path: Path, tokenizer: Path, **more: Any) -> Job:
    job = job_of(source, path, tokenizer, format="chat", **more)
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, sequence=256))


def wanted_of_all() -> list[tuple[str, str]]:
    """Text and what is asked for of ``CHATS``, written out."""
    found = []
    for messages in CHATS:
        said = [each["content"] for each in messages if each["role"] == "assistant"]
        found.append((chatml_text(messages), "".join(f"{each}<|im_end|>" for each in said)))
    return found


def _gz(folder: Path, lines: Path) -> tuple[str, Path]:
    file = folder / "t.jsonl.gz"
    file.write_bytes(gzip.compress(lines.read_bytes()))
    return "jsonl", file


def _table() -> Any:
    return pa.table({"id": range(len(CHATS)), "messages": [list(each) for each in CHATS]})


def _parquet(folder: Path, _lines: Path) -> tuple[str, Path]:
    pq.write_table(_table(), folder / "t.parquet", row_group_size=3)
    return "parquet", folder / "t.parquet"


def _arrow(folder: Path, _lines: Path) -> tuple[str, Path]:
    save_to_disk(folder / "saved", _table())
    return "arrow", folder / "saved"


FORMATS: dict[str, Callable[[Path, Path], tuple[str, Path]]] = {
    "jsonl": lambda _folder, lines: ("jsonl", lines), "gz": _gz, "parquet": _parquet, "arrow": _arrow,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same(
    lines: Path, tokenizer: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 700)
    source, path = FORMATS[name](tmp_path, lines)
    done = made(of_chats(source, path, tokenizer, cache=str(tmp_path / "cache")))
    assert asked_of(done.folder, tokenizer) == wanted_of_all()
    told = read_manifest(done.folder)
    assert told == done.manifest
    assert (told.format, told.documents, told.eos, told.bos) == (FORMAT_OF_CHATS, len(CHATS), -1, -1)
    bits = np.unpackbits(np.fromfile(done.folder / LOSS, np.uint8))
    assert told.asked == bits.sum()
    assert told.loss_bytes == (done.folder / LOSS).stat().st_size
    assert (told.loss_sha256, told.loss_crcs) == checksums(done.folder / LOSS)
    names = {path.name for path in done.folder.iterdir()}
    assert {TOKENS, INDEX, MANIFEST, LOSS} < names
    assert {name.partition("-")[0] for name in names} - {TOKENS, INDEX, MANIFEST, LOSS} == {"plan"}


def test_pieces_do_not_show_and_processes_do_not(
    lines: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [of_chats("jsonl", lines, tokenizer, cache=str(tmp_path / name)) for name in "ab"]
    whole = made(jobs[0])
    monkeypatch.undo()
    monkeypatch.setattr(sources, "PIECE_BYTES", 333)
    assert made(jobs[1], 2).manifest == whole.manifest
    assert (tmp_path / "a" / whole.folder.name / LOSS).read_bytes() == (
        tmp_path / "b" / whole.folder.name / LOSS
    ).read_bytes()


def test_what_was_done_before_a_kill_is_not_done_again(
    lines: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a piece whose bits are torn is."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 700)
    job = of_chats("jsonl", lines, tokenizer, cache=str(tmp_path))

    class Killed(BaseException):
        pass

    def until(share: float) -> int:
        seen: list[int] = []

        def told(now: build.PrepareProgress) -> None:
            if now.phase == "tokenize":
                seen.append(now.done)
                if now.done >= share * now.total:
                    raise Killed

        with pytest.raises(Killed):
            prepare(job, 1, told)
        return seen[0]

    until(0.9)
    (building,) = tmp_path.glob(".*.building")
    whole = sorted(building.glob("*.done"))
    assert len(whole) >= 4
    assert until(0.0) == 700 * len(whole)
    whole[0].with_suffix(".loss").unlink()
    whole[1].with_suffix(".loss").write_bytes(b"")
    assert until(0.0) == 700 * (len(whole) - 2)
    damaged = whole[2].with_suffix(".loss")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(DataError, match=r"\.loss is damaged"):
        made(job)
    assert asked_of(made(job).folder, tokenizer) == wanted_of_all()


def test_settings_name_the_folder(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(templates.ALPACA)
    other = chat_tokenizer(tmp_path / "other", templates.MARKED)

    def name(by: Path = tokenizer, **of_chat: Any) -> str:
        return made(of_chats("jsonl", lines, by, cache=str(tmp_path / "cache"), chat=of_chat)).folder.name

    names = [
        name(),
        name(by=other),
        name(template=str(template)),
        name(roles=["user"]),
        name(roles=["user", "assistant"]),
        name(unroll=True),
    ]
    assert len(set(names)) == 6
    assert name() == names[0]
    text = write_lines(tmp_path / "text.jsonl", {"text": "a", "messages": CHATS[0]})
    plain = made(job_of("jsonl", text, tokenizer)).folder
    assert read_manifest(plain).format == 1
    assert not (plain / LOSS).exists()


def test_a_chat_that_is_unrolled_is_a_document_for_each_answer(tmp_path: Path) -> None:
    qwen3 = chat_tokenizer(tmp_path / "tokenizer", templates.QWEN3)
    file = write_lines(tmp_path / "t.jsonl", {"messages": chat("a", "b", "c", "d")})
    with pytest.raises(DataError, match=r"t\.jsonl:1: message 2 of 4") as refused:
        made(of_chats("jsonl", file, qwen3))
    assert "data.chat.unroll" in refused.value.hint
    with pytest.raises(DataError, match=r"t\.jsonl:1: message 2 of 4"):  # it is the job that is wrong
        made(of_chats("jsonl", file, qwen3, on_bad_row="skip"))
    done = made(of_chats("jsonl", file, qwen3, chat={"unroll": True}))
    assert [asked for _, asked in asked_of(done.folder, qwen3)] == [
        "<think>\n\n</think>\n\nb<|im_end|>",
        "<think>\n\n</think>\n\nd<|im_end|>",
    ]


def test_completions_ask_for_what_follows_the_prompt(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "One and", "completion": " two"},
        {"prompt": "It is ", "completion": "number"},
        {"prompt": "", "completion": "all"},
        {"prompt": "none", "completion": ""},
    ]
    file = write_lines(tmp_path / "t.jsonl", *rows)
    done = made(job_of("jsonl", file, tokenizer, format="completion"))
    # " number" is one token, which reaches into the completion.
    assert asked_of(done.folder, tokenizer) == [
        ("One and two</s>", " two</s>"),
        ("It is number</s>", " number</s>"),
        ("all</s>", "all</s>"),
        ("none</s>", "</s>"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    table = made(job_of("parquet", tmp_path / "t.parquet", tokenizer, format="completion", bos=True))
    assert asked_of(table.folder, tokenizer)[0] == ("<bos>One and two</s>", " two</s>")


def test_blanks_of_an_answer_are_asked_for_whatever_a_token_is_said_to_cover(tmp_path: Path) -> None:
    """As with Llama 3, whose tokenizer leaves blanks out."""
    folder = chat_tokenizer(tmp_path / "tokenizer", templates.LLAMA)
    file = folder / "tokenizer.json"
    loaded = Tokenizer.from_file(str(file))
    loaded.post_processor = processors.ByteLevel(trim_offsets=True)
    loaded.save(str(file))
    lines = write_lines(tmp_path / "t.jsonl", {"messages": chat("Code", "if x:\n        y  =  1")})
    ((text, asked),) = asked_of(made(of_chats("jsonl", lines, folder)).folder, folder)
    assert asked == "if x:\n        y  =  1<|eot_id|>"
    assert text.startswith("<bos><|start_header_id|>system")


# --------------------------------------------------------------------------- what is refused

BAD = {
    "no chat": ({"other": 1}, "t.jsonl:2: has no column 'messages'"),
    "no list": ({"messages": "a"}, "t.jsonl:2: its 'messages' is no list, but 'a'"),
    "null": ({"messages": None}, "t.jsonl:2: its 'messages' is no list, but nothing"),
    "no table": ({"messages": ["a"]}, "t.jsonl:2: its 'messages' has 'a' where a table is to be"),
    "no answer": ({"messages": chat("a")}, "t.jsonl:2: has no message of role 'assistant'"),
    "twice": (
        {"messages": chat("<bos>a", "b")}, "t.jsonl:2: begins with '<bos>' twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "says"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    folder = chat_tokenizer(
        tmp_path / "tokenizer",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    )
    file = write_lines(tmp_path / "t.jsonl", {"messages": chat("a", "b")}, row, {"messages": chat("c", "d")})
    with pytest.raises(DataError, match=says) as refused:
        made(of_chats("jsonl", file, folder))
    assert "on_bad_row" in refused.value.hint
    left = made(of_chats("jsonl", file, folder, on_bad_row="skip"))
    assert [(each.line, left.manifest.num_bad_rows) for each in left.manifest.bad_rows] == [(2, 1)]
    assert [text for text, _ in asked_of(left.folder, folder)] == [
        "<bos>a<|im_end|>b<|im_end|>",
        "<bos>c<|im_end|>d<|im_end|>",
    ]


def test_a_row_of_which_no_token_is_asked_for_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", {"prompt": "", "completion": "a"})
    assert len(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("a").ids) == 1
    with pytest.raises(DataError, match="has no token that the loss asks for"):
        made(job_of("jsonl", file, tokenizer, format="completion", eos=False))


@pytest.mark.parametrize(
    ("template", "says", "hint"),
    [
        ("", "has no chat template", "chat_template.jinja"),
        ("{% if %}", "line 1 of the chat template cannot be read", "data.chat.template"),
        ("{{ raise_exception('never') }}", r"t\.jsonl:1: the chat template says: never", "on_bad_row"),
        ("{{ messages | nofilter }}", "cannot be read: No filter named 'nofilter'", "data.chat.template"),
        ("{{ 1 + messages }}", r"t\.jsonl:1: the chat template fails: TypeError", "on_bad_row"),
        ("all the same", r"t\.jsonl:1: message 2 of 2: the chat template writes nothing of it", "on_bad_row"),
        ("{% generation %}{% endgeneration %}", r"marks nothing of it by \{% generation %\}", "on_bad_row"),
    ],
)
def test_a_template_that_takes_no_chat_is_found_before_all_is_read(
    tmp_path: Path, template: str, says: str, hint: str
) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", template)
    file = write_lines(tmp_path / "t.jsonl", {"messages": chat("a", "b")})
    with pytest.raises(DataError, match=says) as refused:
        wanted.look_at(wanted.wanted_of(of_chats("jsonl", file, folder)))
    assert hint in refused.value.hint


def test_columns_that_are_not_there_are_named(tokenizer: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", {"conversations": [], "id": 1})
    pq.write_table(pa.table({"messages": ["a"], "id": [1]}), tmp_path / "t.parquet")
    for source, path, says in (
        ("jsonl", file, r"data\.format: .* has no column 'messages'; it has conversations, id"),
        ("parquet", tmp_path / "t.parquet", "'messages' of .* is of string, and no list of tables"),
    ):
        with pytest.raises(DataError, match=says) as refused:
            made(of_chats(source, path, tokenizer))
        assert "`messages`" in refused.value.hint
    with pytest.raises(DataError, match="has no column 'prompt'"):
        made(job_of("jsonl", file, tokenizer, format="completion"))


# --------------------------------------------------------------------------- where templates are found


def test_a_template_is_looked_for_where_transformers_does(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", {"messages": chat("a", "b"), "tools": [{"name": "f"}]})

    def text(folder: Path, **of_chat: Any) -> str:
        ((text, _),) = asked_of(made(of_chats("jsonl", file, folder, chat=of_chat)).folder, folder)
        return text

    several = [
        {"name": "default", "template": templates.ALPACA},
        {"name": "tool_use", "template": templates.ZEPHYR},
    ]
    folder = chat_tokenizer(tmp_path / "tokenizer", chat_template=several)
    assert text(folder).startswith("<|user|>")
    (folder / "chat_template.jinja").write_text(templates.MARKED)
    assert text(folder).startswith("<|im_start|>user")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates.HERMES)
    assert "<tools>" in text(folder)
    named = tmp_path / "mine.jinja"
    named.write_text(templates.ALPACA)
    assert text(folder, template=str(named)).startswith("### Instruction")
    with pytest.raises(DataError, match=r"data\.chat\.template: .*none: No such file"):
        text(folder, template=str(tmp_path / "none"))
    only_tools = chat_tokenizer(tmp_path / "other", chat_template=several[1:])
    with pytest.raises(DataError, match="has no chat template that is the default; it has tool_use"):
        text(only_tools)


def test_a_token_that_a_template_writes_has_to_be_known(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", {"messages": chat("a", "b")})
    folder = chat_tokenizer(tmp_path / "tokenizer", templates.ZEPHYR)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": templates.ZEPHYR}))
    with pytest.raises(DataError, match=r"writes eos_token, and .* does not say which that is") as refused:
        made(of_chats("jsonl", file, folder))
    assert "tokenizer_config.json" in refused.value.hint
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": SPECIAL[1]}}))
    ((_, asked),) = asked_of(made(of_chats("jsonl", file, folder)).folder, folder)
    assert asked == "b<|im_end|>"
    template = templates.ALPACA + "{{ eos_token }}"
    config.write_text(json.dumps({"chat_template": template, "eos_token": None}))
    ((text, _),) = asked_of(made(of_chats("jsonl", file, folder)).folder, folder)
    assert text == "### Instruction:\na\n\n### Response:\nb\n\n"


def test_a_folder_is_refused_where_its_bits_are_not_whole(lines: Path, tokenizer: Path) -> None:
    folder = made(of_chats("jsonl", lines, tokenizer)).folder
    data = (folder / LOSS).read_bytes()
    (folder / LOSS).write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"loss\.bin has 1 byte less"):
        read_manifest(folder)
    (folder / LOSS).write_bytes(data)
    told = json.loads((folder / MANIFEST).read_bytes())
    for key, value in (("loss_sha256", ""), ("loss_crcs", ""), ("format", 1)):
        (folder / MANIFEST).write_text(json.dumps({**told, key: value}))
        with pytest.raises(DataError, match="contradicts itself"):
            read_manifest(folder)
    assert AskedTokens(np.frombuffer(data, np.uint8)).mask(0, Manifest(**_fields(told)).tokens).any()


def _fields(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key in Manifest.__struct_fields__}
