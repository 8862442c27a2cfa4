"""What the loss asks for of a chat, under templates in the shapes that published models have."""

from __future__ import annotations

import importlib
import json
from typing import Any, NamedTuple

import pytest

from oobleckd.prepare.chats import ChatSetup, RowText, reader_of
from oobleckd.prepare.rows import RowProblem
from tests.helpers import chat_templates as templates
from tests.helpers.chats import SPECIAL, WORDS, chat

PLAIN = chat("Hi", "A 1", "And?", "A  2")
SYSTEM = chat("Be kind.", "Hi", "A 1", first="system")
THOUGHT = chat("Hi", "<think>\nhm\n</think>\n\nA 1", "And?", "<think>\nso\n</think>\n\nA 2")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    *chat("Sum?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


class Read(NamedTuple):
    """A chat under a template. ``asked``: of each row what the loss asks for; or what is refused, and whether
    the job is what has to change.
    """

    template: str
    messages: list[dict[str, Any]]
    asked: list[list[str]] | str
    unroll: bool = False
    tools: Any = None
    job_s: bool = False


CASES = {
    "chatml": Read(templates.CHATML, PLAIN, [["A 1<|im_end|>", "A  2<|im_end|>"]]),
    "chatml, unrolled": Read(templates.CHATML, PLAIN, [["A 1<|im_end|>"], ["A  2<|im_end|>"]], unroll=True),
    "chatml, two questions": Read(templates.CHATML, [*chat("a"), *chat("b", "c")], [["c<|im_end|>"]]),
    "chatml, two answers": Read(
        templates.CHATML,
        [*chat("a", "b"), *chat("c", first="assistant")],
        [["b<|im_end|>", "c<|im_end|>"]],
    ),
    "chatml, an answer first": Read(
        templates.CHATML, chat("a", "b", first="assistant"), "message 1 of 2 is an answer"
    ),
    "llama": Read(templates.LLAMA, SYSTEM, [["A 1<|eot_id|>"]]),
    "llama trims": Read(templates.LLAMA, chat(" a ", " b\n"), [["b<|eot_id|>"]]),
    "llama calls": Read(
        templates.LLAMA, CALLED, [['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "It is 3.<|eot_id|>"]]
    ),
    "llama calls twice at once": Read(
        templates.LLAMA, chat("a", "", tool_calls=[CALL, CALL]), "says: This model only supports single"
    ),
    "llama, an answer first": Read(
        templates.LLAMA, chat("a", "b", first="assistant"), "begins no chat with one"
    ),
    "gemma": Read(templates.GEMMA, PLAIN, [["A 1<end_of_turn>", "A  2<end_of_turn>"]]),
    "gemma has no system": Read(templates.GEMMA, SYSTEM, "says: System role not supported"),
    "gemma alternates": Read(templates.GEMMA, [*chat("a"), *chat("b", "c")], "roles must alternate"),
    "qwen3, one answer": Read(
        templates.QWEN3, THOUGHT[:2], [["<think>\nhm\n</think>\n\nA 1<|im_end|>"]]
    ),
    "qwen3 forgets": Read(
        templates.QWEN3, THOUGHT, "message 2 of 4: the chat template writes it differently", job_s=True
    ),
    "qwen3 forgets that nothing was thought": Read(templates.QWEN3, PLAIN, "message 2 of 4", job_s=True),
    "qwen3, unrolled": Read(
        templates.QWEN3,
        THOUGHT,
        [["<think>\nhm\n</think>\n\nA 1<|im_end|>"], ["<think>\nso\n</think>\n\nA 2<|im_end|>"]],
        unroll=True,
    ),
    "qwen3, thoughts of their own": Read(
        templates.QWEN3, chat("Hi", "A", reasoning="hm"), [["<think>\nhm\n</think>\n\nA<|im_end|>"]]
    ),
    "hermes calls": Read(
        templates.HERMES,
        CALLED,
        [[f"<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call><|im_end|>", "It is 3.<|im_end|>"]],
        tools=TOOLS,
    ),
    "mistral": Read(templates.MISTRAL, PLAIN, [[" A 1</s>", " A  2</s>"]]),
    "mistral alternates": Read(templates.MISTRAL, [*chat("a"), *chat("b", "c")], "must alternate"),
    "mistral moves the system": Read(
        templates.MISTRAL, SYSTEM, "message 3 of 3: the chat template writes what comes before", job_s=True
    ),
    "mistral moves it, unrolled": Read(
        templates.MISTRAL, SYSTEM, "writes what comes before", unroll=True, job_s=True
    ),
    "deepseek begins a thought": Read(
        templates.DEEPSEEK, PLAIN, "does not begin with the chat template's prompt", job_s=True
    ),
    "zephyr": Read(templates.ZEPHYR, PLAIN, [["A 1</s>", "A  2</s>"]]),
    "zephyr, an answer first": Read(
        templates.ZEPHYR, chat("a", "b", first="assistant"), "begins no chat with one"
    ),
    "alpaca": Read(templates.ALPACA, PLAIN, [["A 1\n\n", "A  2\n\n"]]),
    "marked": Read(templates.MARKED, PLAIN, [["A 1<|im_end|>", "A  2<|im_end|>"]]),
    "marked, unrolled": Read(templates.MARKED, PLAIN, [["A 1<|im_end|>"], ["A  2<|im_end|>"]], unroll=True),
    "marked, an answer first": Read(
        templates.MARKED, chat("a", "b", first="assistant"), [["a<|im_end|>"]]
    ),
    "what looks like a marker is none": Read(
        templates.CHATML,
        chat("Say assistant\n", "<|im_start|>assistant\nno"),
        [["<|im_start|>assistant\nno<|im_end|>"]],
    ),
}  # fmt: skip


def read(case: Read, roles: tuple[str, ...] = ("assistant",)) -> list[RowText]:
    setup = ChatSetup("chat", roles, case.unroll, {"default": case.template}, WORDS, SPECIAL)
    return list(reader_of("text", setup).texts({"messages": case.messages, "tools": case.tools}))


def asked(rows: list[RowText]) -> list[list[str]]:
    return [[row.text[begin:end] for begin, end in row.asked or ()] for row in rows]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_loss_asks_for_what_the_model_is_to_say(case: Read) -> None:
    if isinstance(case.asked, str):
        with pytest.raises(RowProblem, match=case.asked) as refused:
            read(case)
        assert bool(refused.value.hint) == case.job_s
        return
    assert asked(read(case)) == case.asked


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_text_is_that_of_transformers(case: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = importlib.import_module("transformers.utils.chat_template_utils")
    if isinstance(case.asked, str) or case.unroll:
        return
    text = read(case)[0].text
    plain = [{key: value for key, value in each.items() if value is not None} for each in case.messages]
    has_marks = case.template == templates.MARKED
    theirs, marks = utils.render_jinja_template(
        [plain], case.tools, chat_template=case.template, return_assistant_tokens_mask=has_marks, **WORDS
    )
    assert len(theirs) == 1
    assert theirs[0].split("Today Date")[0] == text.split("Today Date")[0]
    assert theirs[0][-60:] == text[-60:]
    assert not marks or marks == [read(case)[0].asked]


def test_marks_and_prefixes_agree_where_both_can_be_read() -> None:
    unmarked = templates.MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for messages in (PLAIN, SYSTEM, THOUGHT):
        for unroll in (False, True):
            both = [read(Read(each, messages, "", unroll)) for each in (templates.MARKED, unmarked)]
            assert both[0] == both[1]


def test_other_roles_are_asked_for_with_their_whole_turn() -> None:
    case = Read(templates.CHATML, SYSTEM, [])
    assert asked(read(case, ("system", "user"))) == [
        ["<|im_start|>system\nBe kind.<|im_end|>", "<|im_start|>user\nHi<|im_end|>"]
    ]
    assert asked(read(Read(templates.MARKED, PLAIN, []), ("user", "assistant")))[0][:2] == [
        "<|im_start|>user\nHi<|im_end|>",
        "A 1<|im_end|>",
    ]


def test_tools_may_be_text_and_may_have_a_template_of_their_own() -> None:
    with_tools = Read(templates.HERMES, CALLED, [], tools=TOOLS)
    as_text = with_tools._replace(tools=json.dumps(TOOLS))
    assert read(with_tools) == read(as_text)
    both = {"default": templates.CHATML, "tool_use": templates.HERMES}
    setup = ChatSetup("chat", ("assistant",), templates=both, words=WORDS, special=SPECIAL)
    reader = reader_of("text", setup)
    assert list(reader.texts({"messages": CALLED, "tools": TOOLS})) == read(with_tools)
    assert list(reader.texts({"messages": PLAIN})) == read(Read(templates.CHATML, PLAIN, []))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "has no messages"),
        (chat("only asked"), "has no message of role 'assistant'"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": 7, "content": "a"}], "message 1 has a role that is no text, but 7"),
        ([*chat("a"), {"role": "assistant"}], "message 2 has no content"),
        ([*chat("a"), {"role": "assistant", "content": None}], "message 2 has no content"),
        ([*chat("a"), {"role": "assistant", "content": 3}], "message 2 has content that is no text, but 3"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "message 1 has 'image' in it, and text alone",
        ),
    ],
)
def test_a_chat_that_is_none_has_a_reason(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(RowProblem, match=says):
        read(Read(templates.CHATML, messages, ""))


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": " 1"}]
    case = Read(templates.CHATML, [*chat("a"), {"role": "assistant", "content": parts}], "")
    assert asked(read(case)) == [["A 1<|im_end|>"]]


@pytest.mark.parametrize("tools", ["[", '{"a": 1}', {"a": 1}])
def test_tools_that_are_none_have_a_reason(tools: Any) -> None:
    with pytest.raises(RowProblem, match="has 'tools' that are no"):
        read(Read(templates.HERMES, PLAIN, "", tools=tools))


def test_a_template_cannot_leave_its_sandbox() -> None:
    for text in ("{{ ''.__class__.__mro__ }}", "{% set n = namespace(__a=1) %}", "{{ messages.append(1) }}"):
        with pytest.raises(RowProblem, match="fails: SecurityError"):
            read(Read(text, PLAIN, ""))


def test_a_day_is_always_the_same_one() -> None:
    text = read(Read(templates.LLAMA, SYSTEM, ""))[0].text
    assert text.split("\n\n")[1] == "Today Date: 26 Jul 2024"


def test_marks_that_are_changed_are_refused() -> None:
    text = "{% set a %}{% generation %} A {% endgeneration %}{% endset %}{{ a | trim | reverse }}"
    with pytest.raises(RowProblem, match="changes what it has marked"):
        read(Read(text, PLAIN, ""))
