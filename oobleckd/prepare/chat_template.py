"""A chat template (Jinja), rendered as transformers renders it, in a sandbox.

Owns the sandbox, with what transformers gives to a template, and the stretches that the template marks as
said by the model (``{% generation %}``). Which chats it is given is ``chats``', and where it is looked for
``tokenizer``'s. It comes with a model's folder, from anywhere: it is run as foreign code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import islice
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from oobleckd.prepare.rows import RowProblem
from oobleckd.tokens.errors import DataError

Span = tuple[int, int]
"""Characters of a text, from the first to before the second."""
Messages = Sequence[Mapping[str, Any]]
# The day of preparing would be in the tokens, and two nodes that prepare around midnight would make other
# ones. This day is what Llama 3's template has where it is told none. (D-data-023)
_TODAY = date(2024, 7, 26)
_MARKS = range(0xFDD0, 0xFDF0)
"""Characters that Unicode keeps for the inside of programs."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """``words``: what the tokenizer calls its special tokens (``bos_token`` and so on), for the template to
    write. Raises DataError where it cannot be read.
    """

    def __init__(self, text: str, words: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise, "strftime_now": _TODAY.strftime, "dict": _Dict(),
            "namespace": _Namespace,
        }  # fmt: skip
        try:
            self._template = environment.from_string(text)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(text)))
        except TemplateSyntaxError as error:
            raise DataError(
                f"data.chat: line {error.lineno} of the chat template cannot be read: {error.message}",
                "mend it, or name another one in data.chat.template",
            ) from error
        self._words, self._generation = words, _generation_of(environment)

    @property
    def has_marks(self) -> bool:
        """Whether it says by itself what of a chat the model is to say."""
        return self._generation.is_used

    def render(self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """The text of a chat; ``prompt``: with what stands before the answer that is to follow. Raises
        RowProblem.
        """
        return self._render(messages, tools, prompt, ("", ""))

    def marked(self, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """The text of a chat, and what of it is marked. Raises RowProblem."""
        text = self.render(messages, tools)
        begin, end = islice((chr(mark) for mark in _MARKS if chr(mark) not in text), 2)
        spans, parts, at = list[Span](), list[str](), 0
        for number, part in enumerate(self._render(messages, tools, False, (begin, end)).split(begin)):
            said, _, rest = part.partition(end) if number else ("", "", part)
            if said:
                spans.append((at, at + len(said)))
            parts.append(said + rest)
            at += len(said + rest)
        if "".join(parts) != text:
            raise RowProblem("the chat template changes what it has marked by {% generation %}")
        return text, spans

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, prompt: bool, marks: tuple[str, str]
    ) -> str:
        self._generation.marks = marks
        try:
            return self._template.render(
                self._words,
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
            )
        except _Said as error:
            raise RowProblem(f"the chat template says: {error}") from error
        except Exception as error:  # whatever foreign code may raise
            raise RowProblem(f"the chat template fails: {type(error).__name__}: {error}") from error


class _Generation(Extension):
    """The block ``{% generation %}``. ``marks``: what is put around what is in one."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.is_used, self.marks = False, ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        """As transformers does: what is set in the block is not known behind it."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        begin, end = self.marks
        return f"{begin}{caller()}{end}"


def _generation_of(environment: ImmutableSandboxedEnvironment) -> _Generation:
    (found,) = (each for each in environment.extensions.values() if isinstance(each, _Generation))
    return found


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it thought, by all names that templates know it by."""
    said = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


# --------------------------------------------------------------------------- what a template may call


class _Said(TemplateError):
    """What a template says of a chat that it does not take."""


def _raise(message: str) -> None:
    raise _Said(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own is for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """``dict`` without its attributes, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As dict's."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` without the names of Python's inside, for the same reason."""

    def __init__(*args: Any, **more: Any) -> None:  # as jinja's: `self` is a name like others
        self, *given = args
        names = dict(*given, **more)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"{name!r} may not be set")
