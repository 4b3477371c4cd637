"""The tools as a model sees them: one description for all wires, the arguments that the sandbox takes, and what is said
of broken calls."""

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harness.index import K1, B, Index, words
from environments.harness.tools import INSIDE, OWN, TOOLS, BadCall, anthropic, mcp, openai, select_tools
from environments.sandbox.inside import server

KINDS = {"string": str, "integer": int, "boolean": bool}


def test_the_sandbox_takes_what_the_schemas_promise():
    assert [tool.name for tool in INSIDE] == [*server.TOOLS]
    for tool in INSIDE:
        _, needed, allowed = server.TOOLS[tool.name]
        assert {one.name: KINDS[one.kind] for one in tool.arguments if one.needed} == needed
        assert {one.name: KINDS[one.kind] for one in tool.arguments if not one.needed} == allowed


@pytest.mark.parametrize("strict", [False, True])
def test_one_schema_on_three_wires(strict):
    tools = select_tools([*TOOLS])
    one, other, third = openai(tools, strict), anthropic(tools), mcp(tools)
    for a, b, c in zip(one, other, third, strict=True):
        function = a["function"]
        assert a["type"] == "function" and function.get("strict", False) == strict
        assert (
            function["name"] == b["name"] == c["name"]
            and function["description"] == b["description"] == c["description"]
        )
        assert b["input_schema"] == c["inputSchema"] and (strict or function["parameters"] == b["input_schema"])
        assert function["parameters"]["additionalProperties"] is False
        if strict:  # what OpenAI's strict mode demands: all are required, and null stands for what is not given
            assert function["parameters"]["required"] == [*function["parameters"]["properties"]]
    read = next(tool for tool in one if tool["function"]["name"] == "read")["function"]["parameters"]["properties"]
    assert read["start"]["type"] == (["integer", "null"] if strict else "integer") and read["path"]["type"] == "string"


VALUES = {"string": st.text(max_size=20), "integer": st.integers(), "boolean": st.booleans()}
TODOS = st.lists(
    st.fixed_dictionaries(
        {"text": st.text(max_size=9), "state": st.sampled_from(["open", "started", "done", "cancelled"])}
    ),
    max_size=3,
)


@given(st.data(), st.sampled_from([*INSIDE, *OWN]), st.booleans())
def test_every_call_that_fits_its_schema_is_taken_as_it_is(data, tool, strict):
    args = {}
    for one in tool.arguments:
        if one.needed or data.draw(st.booleans()):
            args[one.name] = data.draw(VALUES.get(one.kind, TODOS))
    assert tool.parse_arguments(json.dumps(args), strict) == args
    if tool in INSIDE:
        assert server.checked(tool.name, args) == args
    nothing = {one.name: None for one in tool.arguments if one.name not in args}
    assert tool.parse_arguments({**args, **nothing}, strict) == args


@given(
    st.sampled_from([*TOOLS.values()]),
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5),
    st.booleans(),
)
def test_whatever_is_written_is_taken_or_refused_in_one_line(tool, value, strict):
    for written in (
        json.dumps(value),
        json.dumps(dict.fromkeys(["path", "text", "items", "x"], value)),
        str(value),
        "{" + str(value),
    ):
        try:
            found = tool.parse_arguments(written, strict)
        except BadCall as error:
            assert str(error).isprintable() and tool.name in str(error)
        else:
            assert {*found} <= {one.name for one in tool.arguments}


@pytest.mark.parametrize(
    ("tool", "written", "lenient", "strict"),
    [
        ("read", '{"path": "a", "start": "3"}', {"path": "a", "start": 3}, "start of read must be a "
            "whole number; got \"3\""),
        ("read", '{"path": "a", "start": 3.0}', {"path": "a", "start": 3}, "start of read must be a "
            "whole number; got 3.0"),
        ("edit", '{"path": "a", "old": "", "new": "", "every": '
            '"True"}', {"path": "a", "old": "", "new": "", "every": True}, "must be true or false"),
        ("read", '{"path": "a", "why": "so"}', {"path": "a"}, "read has no argument 'why'; it has path, start, lines"),
        ("read", "{}", "read needs path, text", "read needs path, text"),
        ("read", '{"path": 3}', "path of read must be text; got 3", "path of read must be text; got 3"),
        ("read", '{"path": "a"', "the arguments of read are no JSON", "the arguments of read are no JSON"),
        ("read", '["a"]', "must be a JSON object", "must be a JSON object"),
        ("read", "[" * 100_000, "no JSON", "no JSON"),
        ("read", '{"path": "a", "start": true}', "must be a whole number; got "
            "true", "must be a whole number; got true"),
        ("todo", '{"items": [{"text": "a", "state": '
            '"finished"}]}', "a state: open, started, done, cancelled", "a state: open, started, done"),
    ],
)  # fmt: skip
def test_broken_calls_by_hand(tool, written, lenient, strict):
    for how, wanted in ((False, lenient), (True, strict)):
        if isinstance(wanted, dict):
            assert TOOLS[tool].parse_arguments(written, how) == wanted
        else:
            with pytest.raises(BadCall) as said:
                TOOLS[tool].parse_arguments(written, how)
            assert wanted in str(said.value)


def test_an_environment_chooses_its_tools():
    assert [tool.name for tool in select_tools(["read", "finish"])] == ["read", "finish"]
    for names, says in (
        (["read", "fly", "finish"], "no tool 'fly'"),
        (["read"], "must hold finish"),
        (["finish", "finish"], "each once"),
    ):
        with pytest.raises(ValueError, match=says):
            select_tools(names)


# Search.


def test_names_are_taken_apart():
    assert words("parseHTTP_date2(café)") == ["parse", "http", "date", "2", "caf", "é"]


def test_scores_by_hand():
    """Two pieces of 4 and 2 words, names included: "cat" stands twice in the first, once in the second."""
    index = Index({"a": "cat cat dog", "b": "cat"})
    idf = math.log(1 + 0.5 / 2.5)
    first, second = index.find("cat")
    assert (first.name, first.line, first.text) == ("a", 1, "cat cat dog")
    assert first.score == pytest.approx(idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3)))
    assert second.score == pytest.approx(idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3)))
    assert index.find("bird") == [] and Index({}).find("cat") == []


TEXTS = st.dictionaries(st.sampled_from("abc"), st.text("xyz \n", max_size=30), max_size=3)


@given(TEXTS, st.text("xyz ", max_size=6), st.integers(1, 3))
def test_the_index_is_the_formula(texts, query, height):
    """Against the formula over all pieces, written out."""
    pieces = []
    for name in sorted(texts):
        lines = texts[name].splitlines()
        pieces += [(name, at + 1, "\n".join(lines[at : at + height])) for at in range(0, len(lines), height)]
    counts = [Counter(words(f"{name}\n{text}")) for name, _, text in pieces]
    scores = []
    for count in counts:
        score, mean = 0.0, sum(c.total() for c in counts) / len(counts)
        for word in words(query):
            n = sum(word in c for c in counts)
            idf = math.log(1 + (len(counts) - n + 0.5) / (n + 0.5))
            score += (
                idf * count[word] * (K1 + 1) / (count[word] + K1 * (1 - B + B * count.total() / mean))
                if count[word]
                else 0
            )
        scores.append(score)
    wanted = sorted((n for n in range(len(pieces)) if scores[n] > 0), key=lambda n: (-scores[n], n))
    found = Index(texts, height).find(query, 10**6)
    assert [hit.score for hit in found] == pytest.approx([scores[n] for n in wanted])
    assert {(hit.name, hit.line, hit.text) for hit in found} == {pieces[n] for n in wanted}
