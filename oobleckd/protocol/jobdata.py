"""The table `[data]` of a job.toml: where its text comes from, and how sequences are made of it.

Owns its fields, and what is wrong with them before anything is read. Tables of several sources are
``mixtures``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from oobleckd.protocol.jobeval import EvalSource
from oobleckd.protocol.jobtable import JobError, JobTable
from oobleckd.protocol.mixtures import DataSource, DataStage, DTypeName, RowFormat, SourceKind, wrong_with
from oobleckd.words import count

_ROWS = frozenset({"jsonl", "parquet", "arrow"})
"""Sources that are prepared before they can be trained on."""
_WITHOUT_DOCUMENTS = frozenset({"npy", "llmc", "bin"})
SourceTable = Literal["data", "eval"]
"""Which table of a job a source stands in."""
_OF_ALL_PREPARED = ("tokenizer", "eos", "bos", "on_bad_row", "cache")
_OF_PREPARED = (*_OF_ALL_PREPARED, "prepared")
OF_SOURCE = frozenset(
    {"data", "data.path", "data.column", "data.dtype", "data.format", "data.prepared", "eval.held_out"}
)
"""Keys that each source has for itself, or that are said of one."""
_NAMES_DATA = ("source", "path", "tokenizer", "column", "eos", "bos", "format", "chat")
FROM_CHECKPOINT = "model.checkpoint"
"""In place of a tokenizer's path: that beside the weights."""
_SEVERAL = "what belongs to one of several sources stands in its own [[data.source]] table"


class Chat(JobTable, frozen=True):
    """How rows of `format = "chat"` become tokens, and which of them the loss asks for."""

    roles: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="Whose messages the loss asks for. Of an answer (`assistant`) what the model is to "
            "say, of another role its whole turn.",
        ),
    ] = ("assistant",)
    template: Annotated[
        str,
        Meta(
            description="A file with a Jinja template, in place of the tokenizer's own chat template "
            "(`chat_template.jinja`, or that in its `tokenizer_config.json`)."
        ),
    ] = ""
    unroll: Annotated[
        bool,
        Meta(
            description="A row for each message that is asked for, with what came before it: for templates "
            "that write the past differently from the last message."
        ),
    ] = False


class Data(JobTable, frozen=True):
    """Where the text comes from. Samples of a step are a pure function of seed and step."""

    source: Annotated[
        SourceKind | tuple[DataSource, ...],
        Meta(
            description="stdlib: source files of the Python standard library, as bytes. text: every file "
            "under path, as bytes, or with a tokenizer as its tokens. jsonl, parquet, arrow: rows with a "
            "column of text, which `oobleckctl data prepare` tokenizes once (docs/data.md). tokens: path is "
            "a file of token numbers of any of the kinds that follow, by its content. megatron: Megatron's "
            ".bin beside its .idx. npy: numpy's .npy. llmc: one with llm.c's header. bin: little-endian "
            "numbers and nothing else (dtype). Several: a table `[[data.source]]` for each, below."
        ),
    ] = "stdlib"
    path: Annotated[str, Meta(description="File or folder of the source; unused for stdlib.")] = ""
    dtype: Annotated[
        DTypeName,
        Meta(
            description="What a file of token numbers has. auto: what its own header says, and without one "
            "uint16; a file that looks like uint32 "
            "is refused then, and never read as uint16. Of prepared data: what is written; auto: uint16, "
            "or int32 for a tokenizer of 65,500 tokens or more."
        ),
    ] = "auto"
    mask_token: Annotated[
        int,
        Meta(
            ge=-1,
            description="Number that stands in for a hidden token, where a masked language model is trained; "
            "-1: the last of the vocabulary.",
        ),
    ] = -1
    tokenizer: Annotated[
        str,
        Meta(
            description="Folder with a tokenizer.json, or such a file, for text that is prepared; "
            "`model.checkpoint`: that of the folder beside the weights, which jsonl, parquet and arrow also "
            "take without this key."
        ),
    ] = ""
    column: Annotated[
        str, Meta(min_length=1, description="Column, or key of a JSON object, that has the text of a row.")
    ] = "text"
    eos: Annotated[
        bool, Meta(description="Prepared data: the tokenizer's end of text after each document.")
    ] = True
    bos: Annotated[
        bool, Meta(description="Prepared data: the tokenizer's beginning of text before each document.")
    ] = False
    on_bad_row: Annotated[
        Literal["fail", "skip"],
        Meta(
            description="What `oobleckctl data prepare` does with a row that is no JSON, no UTF-8 or has no "
            "text, or no chat that the template takes. fail: it ends and names the row. skip: it leaves the "
            "row out and counts it."
        ),
    ] = "fail"
    cache: Annotated[
        str,
        Meta(description="Folder for prepared data, seen by every node; empty: `prepared`, beside the path."),
    ] = ""
    prepared: Annotated[
        str,
        Meta(
            description="Folder that `oobleckctl data prepare` made of the source; empty: `submit` looks for "
            "it in the cache, and where there is none a node makes it."
        ),
    ] = ""
    sequences: Annotated[
        Literal["auto", "windows", "packed", "padded"],
        Meta(
            description="How rows of train.sequence tokens are made. windows: cut out of all documents, one "
            "after another. packed: several documents beside each other, hardly any of them cut. padded: one "
            "document, and padding behind it. auto: windows; of chats packed."
        ),
    ] = "auto"
    documents: Annotated[
        Literal["auto", "joined", "separate"],
        Meta(
            description="Whether a token sees the documents before its own in a row. separate: no, and "
            "positions begin anew with every document. auto: joined in windows, else separate."
        ),
    ] = "auto"
    on_long_document: Annotated[
        Literal["auto", "cut", "skip", "fail"],
        Meta(
            description="What becomes of a document longer than train.sequence, packed or padded. cut: full "
            "rows, and a rest. skip: it is left out, and counted. fail: it is refused. auto: cut; of chats "
            "fail."
        ),
    ] = "auto"
    format: Annotated[
        RowFormat,
        Meta(
            description="What a row of jsonl, parquet or arrow has. text: data.column, and the loss asks for "
            "all of it. chat: `messages`, with a role and content each, of which it asks for those that "
            "[data.chat] says. completion: `prompt` and `completion`, of which it asks for the second."
        ),
    ] = "text"
    chat: Annotated[Chat, Meta(description="How chats become tokens: `[data.chat]`, below.")] = Chat()
    stage: Annotated[
        tuple[DataStage, ...],
        Meta(description="Other weights of several sources from a step on: `[[data.stage]]`, below."),
    ] = ()

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The tables of several; of a single one there are none."""
        return self.source if isinstance(self.source, tuple) else ()

    @property
    def kind(self) -> SourceKind:
        """Of a single source."""
        assert not isinstance(self.source, tuple)
        return self.source

    @property
    def row_kind(self) -> Literal["windows", "packed", "padded"]:
        """How its rows are made: ``sequences``, where that is said."""
        if self.sequences != "auto":
            return self.sequences
        return "packed" if self.has_chats else "windows"

    @property
    def is_separate(self) -> bool:
        """Whether documents of a row do not see each other."""
        if self.documents != "auto":
            return self.documents == "separate"
        return self.row_kind != "windows"

    @property
    def has_chats(self) -> bool:
        """Whether its rows are chats, or some of them."""
        return any(source.format != "text" for source in self.sources) or self.format != "text"

    @property
    def weighs_targets(self) -> bool:
        """Whether a micro-batch may ask for more tokens than another one, by what the job says."""
        return self.row_kind != "windows" or self.is_separate or self.has_chats

    @property
    def writes_eos(self) -> bool:
        """Whether documents end as ``eos`` says; chats end as their template has it."""
        return self.eos and self.format != "chat"

    @property
    def is_prepared(self) -> bool:
        """Whether it is trained on as prepared, in a folder of its own. Of several sources: any of them."""
        if self.sources:
            return any(self.only(source).is_prepared for source in self.sources)
        return self.source in _ROWS or (self.source == "text" and bool(self.tokenizer or self.prepared))

    @property
    def lacks_folder(self) -> bool:
        """Whether a folder of it is still to be prepared. Of several sources: of any of them."""
        if self.sources:
            return any(self.only(source).lacks_folder for source in self.sources)
        return self.is_prepared and not self.prepared

    @property
    def is_bytes(self) -> bool:
        """Whether its tokens are the bytes of files. Of several sources: of all of them."""
        if self.sources:
            return all(self.only(source).is_bytes for source in self.sources)
        return self.source in {"stdlib", "text"} and not self.is_prepared

    @property
    def is_ready_made(self) -> bool:
        """Whether it is a file of token numbers that somebody else made."""
        return not self.sources and not self.is_prepared and not self.is_bytes

    def only(self, source: DataSource | EvalSource) -> Data:
        """What a job has that trains on ``source`` of several alone. Its rows are made as those of all."""
        is_text = source.kind in _ROWS or (source.kind == "text" and bool(self.tokenizer))
        is_chat = source.format == "chat"
        return msgspec.structs.replace(
            self if is_text else Data(mask_token=self.mask_token),
            **({"eos": True, "bos": False} if is_chat else {"chat": Chat()}),
            source=source.kind,
            path=source.path,
            dtype=source.dtype,
            column=source.column,
            format=source.format,
            prepared=source.prepared,
            sequences=self.row_kind,
            documents="separate" if self.is_separate else "joined",
            on_long_document=self.on_long_document,
            stage=(),
        )

    def evaluated(self, source: EvalSource) -> Data:
        """What a job has that evaluates on ``source`` alone. Its rows are made as those of all; but chats,
        where rows are windows, are not cut: each has a row of its own.
        """
        found = self.only(source)
        if source.format == "text" or self.row_kind != "windows":
            return found
        return msgspec.structs.replace(found, sequences="padded", on_long_document="auto")

    def words(self) -> str:
        """In short, for people."""
        if self.sources:
            return f"{count(len(self.sources), 'source')}: {', '.join(each.name for each in self.sources)}"
        return f"{self.kind} {self.path}".strip()


def same_data(one: Data, other: Data) -> bool:
    """Whether two jobs name the same data and make rows of it alike, whatever lies there and however it is
    mixed.
    """
    return _named(one) == _named(other)


def _named(data: Data) -> list[tuple[object, ...]]:
    each = [data.only(source) for source in data.sources] or [data]
    rows = data.row_kind, data.is_separate, data.on_long_document
    return [(*rows, *(getattr(one, name) for name in _NAMES_DATA)) for one in each]


def with_parts(data: Data, parts: Sequence[Data]) -> Data:
    """``data`` with paths and folders as the ``parts`` have them, one for each source."""
    if not isinstance(data.source, tuple):
        return parts[0]
    tables = tuple(
        msgspec.structs.replace(source, path=part.path, prepared=part.prepared)
        for source, part in zip(data.source, parts, strict=True)
    )
    return msgspec.structs.replace(data, source=tables)


def in_source(name: str, problem: str, table: SourceTable = "data") -> str:
    """What is wrong with the job of a source of a ``table``, said of the whole job; ``name`` "": it is the
    whole job.
    """
    if not name:
        return problem
    key, colon, rest = problem.partition(": ")
    if not colon or key not in OF_SOURCE:
        return problem
    return (
        f"{table}.source {name!r}: {rest if key in {'data', 'data.path'} else problem.removeprefix('data.')}"
    )


def check_data(data: Data, steps: int, *, has_folder: bool, evaluated: Sequence[EvalSource] = ()) -> None:
    """What the types cannot say, of a job of so many ``steps`` that is ``evaluated`` on these.
    ``has_folder``: it starts from `model.checkpoint`. Raises JobError.
    """
    also = [data.evaluated(source) for source in evaluated]
    if data.row_kind == "windows" and data.on_long_document != "auto":
        raise JobError(
            "data.on_long_document",
            "is of packed and padded rows, and windows are cut out of all documents",
            'leave it out, or set data.sequences = "packed"',
        )
    if isinstance(data.source, tuple):
        _check_mixture(data, steps, also, has_folder=has_folder)
        return
    if data.stage:
        raise JobError("data.stage", "is of several sources, and there is one", _SEVERAL)
    # Keys that hold for all parts may be those of what is evaluated alone.
    alone = data
    if any(part.format == "chat" for part in also) and data.format != "chat":
        alone = msgspec.structs.replace(alone, chat=Chat())
    if any(part.is_prepared for part in also) and not data.is_prepared:
        alone = msgspec.structs.replace(alone, **{key: getattr(Data(), key) for key in _OF_ALL_PREPARED})
    check_source(alone, has_folder=has_folder)
    check_rows(data, f"data.source is {data.source!r}")


def _check_mixture(data: Data, steps: int, also: Sequence[Data], *, has_folder: bool) -> None:
    usual = Data()
    for key in ("path", "column", "dtype", "prepared"):
        if getattr(data, key) != getattr(usual, key):
            raise JobError(f"data.{key}", "is of one source, and there are tables of several", _SEVERAL)
    if wrong := wrong_with(data.sources, data.stage, steps):
        raise JobError(f"data.{wrong.key}", wrong.problem, wrong.hint)
    parts = [(source.name, data.only(source)) for source in data.sources]
    for index, (_, part) in enumerate(parts):
        try:
            check_source(part, has_folder=has_folder)
        except JobError as error:
            path = error.path
            if path in OF_SOURCE:
                path = f"data.source[{index}].{path.removeprefix('data.')}"
            raise JobError(path, error.problem, error.hint) from error
    for name, part in parts:
        check_rows(part, f"source {name!r} is of kind {part.source!r}")
    for key in () if data.is_prepared or any(part.is_prepared for part in also) else _OF_PREPARED:
        if getattr(data, key) != getattr(usual, key):
            raise JobError(
                f"data.{key}", "is of text that is prepared, and no source is such", "leave it out"
            )
    _check_mixed_chats(data, also)
    _check_alike(parts)


def _check_alike(parts: Sequence[tuple[str, Data]]) -> None:
    """Whether the numbers of all sources, by name, mean the same."""
    odd = [name for name, part in parts if part.is_bytes]
    if odd and len(odd) < len(parts):
        other = next(name for name, part in parts if not part.is_bytes)
        raise JobError(
            "data.source",
            f"{odd[0]!r} is read as bytes, and {other!r} as tokens, which are other numbers",
            "name a data.tokenizer, and no source of kind stdlib",
        )


def check_rows(data: Data, but: str) -> None:
    """Whether rows of one source can be made as they are asked for; ``but``: what stands in the way else."""
    if data.row_kind != "windows" and not data.is_prepared:
        raise JobError(
            "data.sequences",
            f"{data.row_kind!r} needs text that is prepared, and {but}",
            'name its text in place of its tokens, or set data.sequences = "windows"'
            if data.is_ready_made
            else 'set data.source = "text" and name a data.tokenizer, or set data.sequences = "windows"',
        )
    if data.is_separate and (data.is_bytes or data.source in _WITHOUT_DOCUMENTS):
        raise JobError(
            "data.documents",
            f"'separate' needs to know where documents begin, and {but}, which says nothing of that",
            "leave it out, or name a Megatron data set, whose index says it"
            if data.is_ready_made
            else 'leave it out, or set data.source = "text" and name a data.tokenizer',
        )


def check_source(data: Data, *, has_folder: bool) -> None:
    """Of a job on one source, whether its keys go together. Raises JobError."""
    if data.source != "stdlib" and not data.path:
        raise JobError("data.path", f"is missing, and {data.source!r} needs it", "name a file or folder")
    if data.is_bytes and data.dtype != "auto":
        raise JobError(
            "data.dtype",
            f"is of token numbers, and data.source is {data.source!r}",
            'leave it out, or set data.source = "tokens"',
        )
    _check_format(data)
    if data.is_prepared:
        _check_prepared(data, has_folder=has_folder)
        return
    usual = Data()
    for key in ("column", *_OF_PREPARED):
        if getattr(data, key) != getattr(usual, key):
            raise JobError(
                f"data.{key}",
                f"is of text that is prepared, and data.source is {data.source!r}",
                "leave it out, or name a data.tokenizer too"
                if data.source == "text"
                else 'leave it out, or set data.source = "jsonl", "parquet", "arrow" or "text"',
            )


def _check_mixed_chats(data: Data, also: Sequence[Data]) -> None:
    """Whether keys that hold for all sources are of some."""
    are_chats = [source.format == "chat" for source in data.sources]
    if data.chat != Chat() and not any(are_chats) and not any(part.format == "chat" for part in also):
        raise _not_of_chats("no source is such")
    if all(are_chats):
        _check_ends(data)


def _check_format(data: Data) -> None:
    if data.format != "chat" and data.chat != Chat():
        raise _not_of_chats(f"data.format is {data.format!r}")
    if data.format == "text":
        return
    if data.source not in _ROWS:
        raise JobError(
            "data.format",
            f"{data.format!r} is of rows, and data.source is {data.source!r}",
            'set data.source = "jsonl", "parquet" or "arrow"',
        )
    if data.column != Data().column:
        raise JobError("data.column", f"is of text, and data.format is {data.format!r}", "leave it out")
    if data.sequences == "windows":
        raise JobError(
            "data.sequences",
            f"windows cut through what belongs together, and data.format is {data.format!r}",
            'set data.sequences = "packed" or "padded", or leave it out',
        )
    if data.format == "chat":
        _check_ends(data)


def _check_ends(data: Data) -> None:
    for key, said in (("eos", not data.eos), ("bos", data.bos)):
        if said:
            raise JobError(
                f"data.{key}", "is of text, and chats begin and end as their template has it", "leave it out"
            )


def _not_of_chats(why: str) -> JobError:
    return JobError("data.chat", f"is of chats, and {why}", 'leave it out, or set format = "chat"')


def _check_prepared(data: Data, *, has_folder: bool) -> None:
    if data.source == "text" and data.column != Data().column:
        raise JobError("data.column", "is of rows, and data.source is 'text': a file is a document")
    if data.dtype == "uint32":
        raise JobError(
            "data.dtype",
            "prepared data has no uint32, as Megatron's files have none",
            'leave it out, or set data.dtype = "int32"',
        )
    if data.tokenizer in {"", FROM_CHECKPOINT} and not has_folder and not data.prepared:
        raise JobError(
            "data.tokenizer",
            "is missing, and there is no model.checkpoint with one"
            if not data.tokenizer
            else "is that of model.checkpoint, which is not set",
            "name a folder with a tokenizer.json, or such a file",
        )
