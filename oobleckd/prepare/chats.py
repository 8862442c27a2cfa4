"""Chats and completions as text, with the stretches of it that the loss asks for.

Owns which these are: those that a template marks by itself; without marks, what the text of a chat has more
than that of the messages before. Markers of a role are never searched for, as what people write has them too.
What a chat looks like as text ``chat_template`` says.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from oobleckd.prepare.columns import RowColumns
from oobleckd.prepare.rows import RowProblem
from oobleckd.protocol.unreadable import UNREADABLE, shown
from oobleckd.tokens.errors import DataError

if TYPE_CHECKING:
    from oobleckd.prepare.chat_template import ChatTemplate, Messages, Span

_ANSWERS = "assistant"
_WRITTEN = {"bos_token", "eos_token"}
"""A template writes nothing for a name that is unknown: a model would not learn where an answer ends."""
_UNROLL = "set data.chat.unroll = true: a row for each answer, with what came before it"
_OTHER = "name a template in data.chat.template that writes a message alike, whatever follows"
_MARK = (
    "put {% generation %} and {% endgeneration %} around what the model says in a copy of the template, and "
    "name that in data.chat.template"
)


class ChatSetup(msgspec.Struct, frozen=True):
    """How rows of ``format`` become text. ``templates``: by name; ``words``: of the tokenizer, for templates
    to write; ``special``: its special tokens, as text. The others as ``[data.chat]`` has them.
    """

    format: Literal["chat", "completion"]
    roles: tuple[str, ...] = ()
    unroll: bool = False
    templates: dict[str, str] = {}
    words: dict[str, str] = {}
    special: tuple[str, ...] = ()


class RowText(NamedTuple):
    """What is tokenized as one document. ``asked``: the stretches that the loss asks for; None: all of it."""

    text: str
    asked: Sequence[Span] | None = None


class RowReader(Protocol):
    """What makes text of rows that have ``columns``."""

    columns: RowColumns

    def texts(self, row: Mapping[str, Any]) -> Iterator[RowText]:
        """Of the values of ``columns``. Raises RowProblem."""
        ...


def reader_of(column: str, chat: ChatSetup | None) -> RowReader:
    """Of rows of text in ``column``, or of chats. Raises DataError where a template cannot be read."""
    if chat is None:
        return _Texts(column)
    return _Completions() if chat.format == "completion" else _Chats(chat)


def check_templates(setup: ChatSetup, folder: Path, known: Container[str]) -> None:
    """Whether templates can be read, and write no token that nothing in ``folder`` knows. Raises
    DataError.
    """
    for name in (name for template in _opened(setup).values() for name in sorted(template.names & _WRITTEN)):
        if name not in known:
            raise DataError(
                f"data.chat: the chat template writes {name}, and {folder} does not say which that is",
                f'put {{"{name}": "…"}} into {folder / "tokenizer_config.json"}; null for none',
            )


def _opened(setup: ChatSetup) -> dict[str, ChatTemplate]:
    from oobleckd.prepare.chat_template import ChatTemplate  # rows of text need no Jinja

    return {name: ChatTemplate(text, setup.words) for name, text in setup.templates.items()}


class _Texts:
    """Rows of text."""

    def __init__(self, column: str) -> None:
        self._column, self.columns = column, RowColumns(text=(column,))

    def texts(self, row: Mapping[str, Any]) -> Iterator[RowText]:
        yield RowText(row[self._column])


class _Completions:
    """Rows of a prompt, and what is to follow it."""

    columns = RowColumns(text=("prompt", "completion"))

    def texts(self, row: Mapping[str, Any]) -> Iterator[RowText]:
        prompt, completion = row["prompt"], row["completion"]
        yield RowText(prompt + completion, [(len(prompt), len(prompt) + len(completion))])


class _Chats:
    """Rows of messages."""

    columns = RowColumns(lists=("messages",), more=("tools",))

    def __init__(self, setup: ChatSetup) -> None:
        self._setup, self._templates = setup, _opened(setup)

    def texts(self, row: Mapping[str, Any]) -> Iterator[RowText]:
        """One, or of a chat that is unrolled one for each message that is asked for."""
        messages, tools = _messages_of(row["messages"]), _tools_of(row.get("tools"))
        roles = self._setup.roles
        wanted = [index for index, message in enumerate(messages) if message["role"] in roles]
        if not wanted:
            raise RowProblem(f"has no message of role {' or '.join(map(repr, roles))}")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        chat = _Chat(self._templates[name], tools, self._setup)
        if self._setup.unroll:
            yield from (chat.unrolled(messages[: index + 1]) for index in wanted)
        else:
            yield chat.whole(messages, wanted)


class _Chat:
    """A row under a template."""

    def __init__(self, template: ChatTemplate, tools: Sequence[Any] | None, setup: ChatSetup) -> None:
        self._template, self._tools, self._special = template, tools, setup.special
        # What a template marks is what the model says: of other roles it knows nothing.
        self._by_marks = template.has_marks and setup.roles == (_ANSWERS,)

    def whole(self, messages: Messages, wanted: Sequence[int]) -> RowText:
        """All ``messages``, of which the loss asks for those that are ``wanted``."""
        if self._by_marks:
            return self._marked(messages, 0)
        text = self._rendered(messages)
        return RowText(text, [self._span(messages, index, text) for index in wanted])

    def unrolled(self, messages: Messages) -> RowText:
        """All ``messages``, of which the loss asks for the last."""
        last = len(messages) - 1
        if self._by_marks:
            return self._marked(messages, last)
        text = self._rendered(messages)
        return RowText(text, [self._span(messages, last, text)])

    def _marked(self, messages: Messages, first: int) -> RowText:
        """All ``messages``, of which the loss asks for what is marked of those from ``first`` on."""
        text, spans = self._template.marked(messages, self._tools)
        begin = self._past(messages[:first], text, f"message {first + 1}")
        found = [span for span in spans if span[0] >= begin]
        if not found:
            raise RowProblem("the chat template marks nothing of it by {% generation %}")
        return RowText(text, found)

    def _span(self, messages: Messages, index: int, text: str) -> Span:
        """What ``text`` has of message ``index``: from behind what comes before it, with an answer's own
        header, to the end of its turn.
        """
        where = f"message {index + 1} of {len(messages)}"
        upto = text if index + 1 == len(messages) else self._rendered(messages[: index + 1])
        # A template that writes the past otherwise than the present has no one text of both: whoever took the
        # whole chat would train on answers to what the model was never shown. (D-data-022)
        if not text.startswith(upto):
            raise RowProblem(f"{where}: the chat template writes it differently once others follow", _UNROLL)
        is_answer = messages[index]["role"] == _ANSWERS
        begin = (self._prompt if is_answer else self._past)(messages[:index], upto, where)
        turn = upto[begin:]
        if (said := turn.rstrip()).endswith(self._special):
            turn = said  # a line's end behind the end of a turn is not the model's
        if not turn:
            raise RowProblem(f"{where}: the chat template writes nothing of it")
        return begin, begin + len(turn)

    def _prompt(self, messages: Messages, upto: str, where: str) -> int:
        """How much of ``upto`` are ``messages`` and the template's prompt for an answer to them."""
        if not messages:
            with suppress(RowProblem):
                if (prompt := self._rendered([], prompt=True)) and upto.startswith(prompt):
                    return len(prompt)
            raise RowProblem(f"{where} is an answer, and the chat template begins no chat with one")
        if upto.startswith(prompt := self._rendered(messages, prompt=True)):
            return len(prompt)
        self._past(messages, upto, where)
        raise RowProblem(f"{where} does not begin with the chat template's prompt for an answer", _MARK)

    def _past(self, messages: Messages, upto: str, where: str) -> int:
        """How much of ``upto`` are ``messages``."""
        past = self._rendered(messages) if messages else ""
        if not upto.startswith(past):
            problem = f"{where}: the chat template writes what comes before it differently once it is there"
            raise RowProblem(problem, _OTHER)
        return len(past)

    def _rendered(self, messages: Messages, *, prompt: bool = False) -> str:
        return self._template.render(messages, self._tools, prompt=prompt)


# --------------------------------------------------------------------------- what a row has


def _messages_of(row: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As templates expect them: without keys that say nothing, and with their content as one text. Raises
    RowProblem.
    """
    if not row:
        raise RowProblem("has no messages")
    messages = []
    for number, each in enumerate(row, 1):
        # As transformers does: a template takes a key that is there for one that says something.
        message = {key: value for key, value in each.items() if value is not None}
        if not isinstance(role := message.get("role"), str):
            said = f"has a role that is no text, but {shown(role)}" if "role" in message else "has no role"
            raise RowProblem(f"message {number} {said}")
        if "content" in message:
            message["content"] = _content_of(number, message["content"])
        elif message.keys() <= {"role", "name"}:
            raise RowProblem(f"message {number} has no content")
        messages.append(message)
    return messages


def _content_of(number: int, content: Any) -> str:
    """A template without a case for parts would write them as Python does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowProblem(f"message {number} has content that is no text, but {shown(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RowProblem(f"message {number} has {shown(kind)} in it, and text alone is trained on")
        texts.append(text)
    return "".join(texts)


def _tools_of(value: Any) -> list[Any] | None:
    """A list, or the JSON of one, as tables have it. Raises RowProblem."""
    if isinstance(value, str) and value:
        try:
            value = msgspec.json.decode(value)
        except (*UNREADABLE, RecursionError) as error:
            raise RowProblem("has 'tools' that are no JSON") from error
    if value and not isinstance(value, list):
        raise RowProblem(f"has 'tools' that are no list, but {shown(value)}")
    return value or None
