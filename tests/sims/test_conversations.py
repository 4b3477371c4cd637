"""Conversations of the recipe: demonstrations as JSONL train as they do directly, a file becomes rows, and a template
can do no harm."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.runs import Run
from kit.settings import RunError, fill
from recipe.small import stages
from recipe.small.agent import Language
from recipe.small.chat_template import Template, template_of
from recipe.small.conversations import ROWS, kept_rows, pack_conversations
from recipe.small.data import data
from recipe.small.demonstrations import make_sft_rollouts, sft_batches
from recipe.small.export import calls_of, export, spoken
from recipe.small.learner import language_of
from recipe.small.settings import Recipe
from ref import sft
from ref.network import load_hf
from tests import chats


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory):
    """Settings of the tiny run, its demonstrations as a file, and the agent's language."""
    config = fill(Recipe, json.loads((tiny_run / "config.json").read_text())["config"])
    file, language = tmp_path_factory.mktemp("exported") / "chats.jsonl", language_of(tiny_run)
    assert export(config, language, file)[0] == config.sft.demonstrations
    return config, file, language


def test_every_context_comes_back_token_by_token(tiny_run, exported):
    """More of them than the tiny run has: chains of several contexts, several calls in a turn, misspelled calls."""
    config, _, language = exported
    many = replace(config, sft=replace(config.sft, demonstrations=150))
    file = exported[1].with_name("many.jsonl")
    count, lines = export(many, language, file)
    chats_read, refused = sft.read_conversations(file)
    assert count == 150 < lines == len(chats_read) and not refused
    render = template_of(tiny_run / "checkpoints" / "sft", language)
    found = [sft.tokens_and_mask(chat, render, language.tokenizer) for _, chat in chats_read]
    segments = [segment for lesson in make_sft_rollouts(many, language) for segment in lesson.chain.segments]
    whole = 0
    for [(ids, mask)], segment in zip(found, segments, strict=True):
        T = len(ids)
        assert torch.equal(ids, segment.tokens[:T]) and torch.equal(mask, segment.sampled[:T])
        whole += T == len(segment.tokens)
        left = segment.tokens[T:].tolist()
        assert (
            not left or left[-1] != language.env and language.env not in left[left.index(language.agent) :]
        )  # a turn that the limit cut off
    assert whole > 0.9 * len(found)
    own = [m for _, chat in chats_read for m in chat.messages if m.role == "assistant"]
    called = [call.name for m in own for call in m.tool_calls]
    assert {"read", "write", "test", "done"} < set(called) and any(len(m.tool_calls) > 1 for m in own)
    assert any(not m.learn for m in own) and any(
        m.learn and not m.tool_calls for m in own
    )  # given summaries, and written ones
    for _, chat in chats_read:
        asked = [call.id for m in chat.messages for call in m.tool_calls]
        assert len({*asked}) == len(asked)


def test_the_file_trains_the_same_weights(tiny_run, exported, tmp_path):
    """The SFT stage on the file: the rows, the metrics and the weights of the run that was not given one, to the last
    bit."""
    config, file, _ = exported
    config = replace(config, sft=replace(config.sft, conversations=str(file)))
    with Run.open(tmp_path / "run", "recipe", config, False, 20.0) as run:
        data(run, config)
        told = run.stage("data", total=5).result()["conversations"]
        ids, doc, weight = kept_rows(run.root)
        assert (
            told["conversations"] == told["contexts"]
            and not told["cut"]
            and not told["skipped"]
            and told["learned"] == weight.sum()
        )
        mine, theirs = sft_batches(run.root, config, 256), sft_batches(tiny_run, exported[0], 256)
        assert mine[0] == theirs[0] and all(
            torch.equal(a, b) for step in range(3) for a, b in zip(mine[1](step), theirs[1](step), strict=True)
        )
        shutil.copytree(tiny_run / "checkpoints" / "cpt", run.root / "checkpoints" / "cpt")
        stages.finetune(run, config)
        assert (run.root / "metrics" / "sft.jsonl").read_bytes() == (tiny_run / "metrics" / "sft.jsonl").read_bytes()
        ours, before = (load_hf(root / "checkpoints" / "sft").state_dict() for root in (run.root, tiny_run))
        assert all(torch.equal(ours[name], x) for name, x in before.items())
        file_was = file.read_bytes()
        file.write_text("")  # the rows are kept
        assert torch.equal(sft_batches(run.root, config, 256)[1](0)[0], mine[1](0)[0])
        file.write_bytes(file_was)
        (run.root / "data" / ROWS).write_bytes(b"PK")
        with pytest.raises(RunError, match="does not hold packed conversations.*delete .*data.json"):
            kept_rows(run.root)


words = st.lists(st.sampled_from(["read", "m1", "write", "    x", "", "test", " ", "raed", "-"]), max_size=4)


@settings(max_examples=100)
@given(st.lists(words.map(" ".join), max_size=4).map("\n".join))
def test_calls_are_a_turn_or_nothing(turn):
    found = calls_of(turn)
    assert not found or "\n".join(spoken(*call) for call in found) == turn
    assert calls_of("read m1\nwrite m2\n    a\n    b\ntest") == [
        ("read", {"file": "m1"}),
        ("write", {"file": "m2", "body": "    a\n    b"}),
        ("test", {}),
    ]


def test_lines_that_are_skipped_are_named_and_counted(tmp_path, capsys):
    language, file = Language(chats.bytes_tokenizer()), tmp_path / "c.jsonl"
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]}
    long = {"messages": [{"role": "user", "content": "q" * 50}, {"role": "assistant", "content": "ok"}]}
    longer = {"messages": [*good["messages"], *long["messages"]]}
    silent = {"messages": good["messages"][:1]}
    odd = [{"messages": [{"role": "user", "content": "\ufdd0"}, good["messages"][1]]}] * 6
    file.write_text("".join(json.dumps(one) + "\n" for one in (good, long, "x", silent, longer, *odd)))
    (ids, doc, weight), told = pack_conversations(file, Template(chats.AGENT), language, 12)
    assert told == {
        "conversations": 3,
        "contexts": 2,
        "cut": 1,
        "dropped": 1,
        "skipped": 8,
        "rows": 1,
        "tokens": 12,
        "learned": 6,
    }
    assert ids.shape == (1, 12) and weight.sum() == 6 and doc.max() == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith(f"skipped: {file}:3: a conversation must be")
        and lines[1] == f"skipped: {file}:4: the assistant has no turn to learn"
    )
    assert (
        lines[5] == f"skipped: 3 more lines of {file}"
        and "1 contexts longer than a row of 12 tokens are cut" in lines[6]
    )
    for content, why in (
        ("", "has no conversation to learn from$"),
        ('"x"', r"; the first: .*c.jsonl:1: "),
        (json.dumps(long), "no turn ends within a row of 12"),
    ):
        file.write_text(content)
        with pytest.raises(RunError, match=why):
            pack_conversations(file, Template(chats.AGENT), language, 12)


# ------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum() }}",
        "{{ cycler('a').__init__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{{ range(10 ** 9) | list }}",
        "{% for k in messages[0] %}{% do messages[0].pop(k) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ strftime_now.__self__ }}",
    ],
)
def test_a_hostile_template_can_do_nothing(source):
    """It is refused, or says nothing; what it was given is as it was."""
    messages = [{"role": "user", "content": "q"}]
    try:
        text, _ = Template(source)(messages, [], False)
    except ValueError as error:
        assert "template" in str(error) and "\n" not in str(error)
    else:
        assert text.strip() in ("", "x") and "root" not in text
    assert messages == [{"role": "user", "content": "q"}]


@settings(max_examples=40)
@given(
    st.sampled_from([chats.CHATML, chats.MARKED, chats.QWEN25, chats.QWEN3, chats.LLAMA3, chats.AGENT]),
    st.lists(st.text(max_size=6), min_size=2, max_size=4),
)
def test_a_template_means_what_it_means_to_transformers(source, contents):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=chats.bytes_tokenizer(), bos_token="<|bos|>")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": contents[0], "y": "<é>"}}}
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]
    messages[1] |= {"tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "f", "description": contents[-1]}}]
    for prompt in (False, True):
        text, _ = chats.template(source)(messages, tools, prompt)
        assert text == theirs.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
        )


def test_where_a_template_is_found(tmp_path):
    foreign = Language(chats.bytes_tokenizer(control=("<|im_start|>", "<|im_end|>")))
    with pytest.raises(RunError, match="has no chat template, which sft.conversations needs"):
        template_of(tmp_path, foreign)
    ours = Language(chats.bytes_tokenizer(control=("<|endoftext|>", "<|env|>", "<|agent|>")))
    assert template_of(tmp_path, ours).source == chats.AGENT
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}a", "bos_token": {"content": "<B>"}})
    )
    assert template_of(tmp_path, foreign)([], [], False)[0] == "<B>a"
    several = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert template_of(tmp_path, foreign).source == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert template_of(tmp_path, foreign).source == "j"
    for wrong in ("{% if %}", "{% for x in"):
        (tmp_path / "chat_template.jinja").write_text(wrong)
        with pytest.raises(RunError, match="is not one that Jinja reads"):
            template_of(tmp_path, foreign)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(RunError, match="tokenizer_config.json is damaged"):
        template_of(tmp_path, foreign)


def test_templates_by_name_and_the_date(tmp_path, monkeypatch):
    """As transformers chooses: `tool_use` for chats with tools, `default` for others; files before
    tokenizer_config.json."""
    foreign, tools = Language(chats.bytes_tokenizer(control=("<|im_start|>", "<|im_end|>"))), [{"name": "read"}]

    def written(given):
        return template_of(tmp_path, foreign)([], given, False)[0]

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert written([]) == "legacy"
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert (written([]), written(tools)) == ("d", "t1")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several[1:]}))
    assert written(tools) == "t1"
    with pytest.raises(ValueError, match="none for chats without tools"):
        written([])
    (tmp_path / "chat_template.jinja").write_text("j")
    assert (written([]), written(tools)) == ("j", "j")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert (written([]), written(tools)) == ("j", "02 Jan 1970") and template_of(tmp_path, foreign).date == "1970-01-02"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(RunError, match="SOURCE_DATE_EPOCH=today is not a number of seconds"):
        written([])


# ------------------------------------------------------------------------------------------------ the command line


def test_commands_refuse_in_one_line(tiny_run, exported, tmp_path, ask):
    _, file, _ = exported
    before = file.read_bytes()
    for words, why in (
        (("export-sft", tiny_run, "--out", file), "exists already; name another file with --out"),
        (("export-sft", tmp_path, "--out", tmp_path / "x"), "is not a small run of the recipe"),
        (
            ("run", "recipe", "--set", f"sft.conversations={tmp_path / 'no'}", "--out", tmp_path / "run"),
            "is not a file; name a JSONL file",
        ),
    ):
        code, _, error = ask(*words)
        assert code == 2 and why in error and error.count("\n") == 1
    assert file.read_bytes() == before and not list(tmp_path.iterdir())
    code, said, _ = ask("export-sft", tiny_run, "--out", tmp_path / "deep" / "chats.jsonl")
    assert (
        code == 0
        and (tmp_path / "deep" / "chats.jsonl").read_bytes() == before
        and said.startswith("24 demonstrations, ")
    )


@pytest.mark.real
def test_smollm2_s_own_template(tmp_path_factory):
    """The folder keeps it; what is learned of a chat is what the assistant says, and the tokens are transformers'
    own."""
    from transformers import AutoTokenizer

    from ref.cpt import load_tokenizer
    from sims.base_evaluations.packages import folder_of

    folder = folder_of("smollm2-135m", Path(os.environ.get("ETUDE_MODELS") or tmp_path_factory.mktemp("models")))
    language = Language(load_tokenizer(folder / "tokenizer.json"))
    turns = [
        ("u", "Fix x = 1"),
        ("a", "\nread a.py\n"),
        ("u", "<|im_end|> 12"),
        ("a", ""),
        ("u", "né"),
        ("a", "dönè 😀"),
    ]
    chat, render = chats.spoken(*turns), template_of(folder, language)
    contexts = sft.tokens_and_mask(chat, render, language.tokenizer)
    assert [text.strip("\n") for text in chats.said(contexts, language.tokenizer)[0]] == [
        "read a.py\n<|im_end|>",
        "<|im_end|>",
        "dönè 😀<|im_end|>",
    ]
    plain = chats.spoken(*[(role, text.replace("|", "")) for role, text in turns])
    [(ids, mask)] = sft.tokens_and_mask(plain, render, language.tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (
        ids.tolist() == theirs.apply_chat_template([m.plain() for m in plain.messages], return_dict=True)["input_ids"]
    )
    assert 0 < mask.float().mean() < 0.5 and np.all(mask.numpy()[:5] == 0)
