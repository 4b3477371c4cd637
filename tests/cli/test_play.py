"""`etude play`: what is shown is what was played, and the committed agent is the one that was measured."""

import hashlib
import io
import itertools
import json
import shlex
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from etude.play import example_agent, play, recording, terminal
from etude.play.difference import DELTA, drafts, network, store
from etude.play.rollout import Piece, difference, of_episode, of_session, pieces
from kit.settings import RunError
from recipe.microrepo import Session
from recipe.small.agent import hash_seed
from recipe.small.demonstrations import make_sft_rollouts
from recipe.small.evaluation import measure_policy
from recipe.small.learner import load_checkpoint
from recipe.small.settings import Evaluation, Recipe
from ref.network import load_hf, save_hf

FOLDER = example_agent.FOLDER
RECORD = json.loads((FOLDER / example_agent.RECORD).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def agent():
    return play.agent_in(FOLDER)


@pytest.fixture
def run(tmp_path):
    """A run's folder with the committed agent as both of its checkpoints."""
    for name in ("sft", "final"):
        shutil.copytree(FOLDER, tmp_path / "run" / "checkpoints" / name, ignore=shutil.ignore_patterns("record.json"))
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"technique": "recipe", "config": {**RECORD["config"], "seed": 7}})
    )
    return tmp_path / "run"


def typed(task, *turns: str) -> str:
    """What a reader types."""
    return "".join(f"{turn}\n\n" for turn in turns)


def solution(task) -> tuple[str, ...]:
    return f"read {task.target}", f"write {task.target}\n    {task.answer}", "test", "done"


def scripted(agent, number: int = 0, *turns: str):
    """A rollout of given turns, of a right solution without them."""
    task = play.task_of(agent.recipe, number, None)
    session, said = Session(task), [Piece("environment", task.prompt)]
    for turn in turns or solution(task):
        said += [Piece("agent", turn), Piece("environment", session.step(turn))]
    return of_session("a script", session, tuple(said), 10)


def text_of(rollouts, **how) -> str:
    file = io.StringIO()
    terminal.show(rollouts, Console(file=file, **how))
    return file.getvalue()


# ------------------------------------------------------------------------------------------ the committed agent


def test_the_committed_agent_is_the_one_that_was_measured():
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert RECORD["weights"] == {
        "dtype": "bfloat16",
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 9_000_000
    assert (RECORD["held_out"]["tasks"], RECORD["held_out"]["samples"]) == (100, 4)
    assert "+changes" not in RECORD["machine"]["commit"]


def test_rounding_costs_the_agent_nothing_that_can_be_seen():
    lost = RECORD["held_out"]["difference"]["original"]["success"]
    assert lost["low"] <= 0 <= lost["high"] and abs(lost["value"]) < 0.05


def test_rl_gained_what_the_record_says():
    """The interval of the gain leaves zero out, and every mean is that of the tasks that are listed."""
    found = RECORD["held_out"]
    for name in ("original", "sft", "agent"):
        assert sum(found[name]["solved"]) / 400 == pytest.approx(found[name]["success"]["value"])
    gain = found["difference"]["sft"]["success"]
    assert gain["low"] > 0 and gain["value"] == pytest.approx(
        found["agent"]["success"]["value"] - found["sft"]["success"]["value"]
    )


@pytest.mark.parametrize("name", ["agent", "sft"])
def test_the_agents_of_the_clone_play_as_the_record_says(name):
    """The first tasks, with the random numbers of the record: as many rollouts of each succeed."""
    one = play.agent_in(FOLDER if name == "agent" else FOLDER / name)
    sized = replace(one.recipe, evaluation=Evaluation(tasks=2, samples=4))
    tasks = [play.task_of(one.recipe, number, None) for number in range(2)]
    found = measure_policy(one.network(), one.language, tasks, sized, hash_seed(one.recipe.seed, example_agent.STREAM))
    assert found["success"].sum(1).tolist() == RECORD["held_out"][name]["solved"][:2]


def test_a_difference_makes_the_same_bits_and_only_from_its_base(tmp_path, agent):
    layers = agent.recipe.mtp.layers
    shutil.copytree(FOLDER, tmp_path / "agent")
    model, mtp = load_hf(FOLDER), drafts(FOLDER, layers)
    assert mtp is not None
    with torch.no_grad():
        model.norm.weight[3], mtp.layers[1].norm.weight[5] = -0.0, 2.5
    store(tmp_path / "agent" / "other", model, mtp, layers, {"README.md": b"another"})
    found = network(tmp_path / "agent" / "other", layers), drafts(tmp_path / "agent" / "other", layers)
    for made, wanted in zip(found, (model, mtp), strict=True):
        assert made is not None and all(map(torch.equal, made.state_dict().values(), wanted.state_dict().values()))
    assert (tmp_path / "agent" / "other" / DELTA).stat().st_size < 1000
    save_hf(model, tmp_path / "agent", extra={f"mtp.{name}": x for name, x in mtp.state_dict().items()})
    with pytest.raises(RunError, match="is the difference from another checkpoint than the one above it"):
        network(tmp_path / "agent" / "other", layers)
    (tmp_path / "agent" / "other" / DELTA).write_bytes(b"no delta")
    with pytest.raises(RunError, match="contains no difference from the checkpoint above it"):
        network(tmp_path / "agent" / "other", layers)
    with pytest.raises(RunError, match="do not have the shape of its run's settings"):
        drafts(FOLDER, replace(layers, depth=1))
    shutil.rmtree(tmp_path / "agent" / "mtp")
    with pytest.raises(RunError, match="weights, but the difference stored in"):
        store(tmp_path / "agent" / "third", model, mtp, layers, {})


def test_a_rollout_is_the_one_that_the_evaluation_counts(agent):
    """Sampled and greedy: the same tokens, turns and verdict as those of `measure_policy` with the same seed."""
    tasks = [play.task_of(agent.recipe, number, None) for number in range(2)]
    sized = replace(agent.recipe, evaluation=Evaluation(tasks=2, samples=1))
    found = measure_policy(load_hf(FOLDER).to(torch.bfloat16), agent.language, tasks, sized, 5)
    for number, task in enumerate(tasks):
        sampled, greedy = (play.play_one(agent, task, heat, 5) for heat in (agent.recipe.rl.temperature, 0.0))
        assert (sampled.own_tokens, sampled.reward.turns) == (found["tokens"][number, 0], found["turns"][number, 0])
        assert (sampled.success, greedy.success) == (bool(found["success"][number, 0]), bool(found["greedy"][number]))


def test_the_agent_of_a_run_is_written_and_measured(tiny_run, tmp_path):
    path = example_agent.write(tiny_run, tmp_path / "agent", tasks=2, samples=1)
    record, (mine, theirs) = (
        json.loads(path.read_text()),
        (load_hf(folder) for folder in (path.parent, tiny_run / "checkpoints" / "final")),
    )
    assert all(
        torch.equal(a, b.bfloat16().float()) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )
    held_out = record["held_out"]
    assert (
        held_out["agent"].keys() == held_out["original"].keys() == held_out["sft"].keys()
        and len(held_out["sft"]["solved"]) == 2
    )
    layers = play.agent_in(path.parent).recipe.mtp.layers
    for stored, name in ((path.parent, "final"), (path.parent / "sft", "sft")):
        for made, wanted in zip(
            (network, drafts), load_checkpoint(tiny_run, play.agent_in(stored).recipe, name), strict=True
        ):
            both = [part.parameters() for part in (made(stored, layers), wanted) if part is not None]
            assert len(both) == 2 and all(torch.equal(a, b.bfloat16().float()) for a, b in zip(*both, strict=True))
    assert play.agent_in(path.parent).recipe == play.agent_in(tiny_run / "checkpoints" / "final").recipe
    with pytest.raises(RunError, match="already exists"):
        example_agent.write(tiny_run, path.parent)
    with pytest.raises(RunError, match="is not a run of the recipe"):
        example_agent.write(tmp_path, tmp_path / "other")


def test_the_recording_is_what_the_command_prints(ask):
    record = json.loads(recording.PATH.read_text(encoding="utf-8"))
    code, out, error = ask(*shlex.split(recording.COMMAND)[1:])
    first, *lines = out.splitlines()
    assert (
        code == 0
        and not error
        and first.startswith(f"held-out task {recording.TASK}, ")
        and record["command"] == recording.COMMAND
    )
    assert lines == record["lines"] and "+changes" not in record["machine"]["commit"]
    verdicts = [line for line in lines if line.startswith("verdict")]
    assert [line.split(maxsplit=1)[1] for line in verdicts] == ["not solved", "solved"]


# --------------------------------------------------------------------------------------------------- what is shown


def test_what_is_shown_is_what_was_said(agent):
    """The agent's pieces, played again, get the environment's pieces as their answers; a summary follows its
    request."""
    several = 0
    for lesson in itertools.islice(make_sft_rollouts(agent.recipe, agent.language), 60):
        told, session = [*pieces(lesson, agent.language)], Session(lesson.task)
        assert told[0] == Piece("environment", session.prompt)
        answers = [piece.text for piece in told[1:] if piece.role == "environment" and piece.text != "note"]
        assert answers == [answer for piece in told if piece.role == "agent" if (answer := session.step(piece.text))]
        for before, piece in itertools.pairwise(told):
            assert (piece.role == "summary") == (before == Piece("environment", "note"))
        several += sum(piece.role == "context" for piece in told) > 0
        assert sum(piece.role == "context" for piece in told) == len(lesson.chain.segments) - 1
        assert of_episode("a script", lesson, agent.language).reward == session.verify()
    assert several


def test_a_rollout_that_a_limit_cut_says_so(agent):
    lesson = next(iter(make_sft_rollouts(agent.recipe, agent.language)))
    lesson.chain.finished = False
    assert [*pieces(lesson, agent.language)][-1].text.startswith("cut off")


@given(
    st.lists(st.text(alphabet="ab\\ ", max_size=4), max_size=5),
    st.lists(st.text(alphabet="ab\\ ", max_size=4), max_size=5),
)
def test_a_difference_holds_both_texts(before, after):
    lines = difference("\n".join(before), "\n".join(after))
    for text, other in ((before, "+"), (after, "-")):
        kept = [line[1:] for line in lines if line[0] != other]
        assert not lines and "\n".join(before) == "\n".join(after) or "\n".join(kept) == "\n".join(text)


def test_verdicts(agent):
    good, bad = scripted(agent), scripted(agent, 0, "write m99\n    return 1", "test")
    assert good.success and "verdict      solved\n" in text_of([good]) and "hidden: passed 32 of 32" in text_of([good])
    text = text_of([bad])
    assert (
        not bad.success
        and "not solved, and not ended by itself" in text
        and "changed      nothing" in text
        and f"a right body: {bad.solution}" in text
    )


def test_two_rollouts_stand_side_by_side_where_there_is_room(agent):
    two = [replace(scripted(agent), policy_name=name) for name in ("first", "second")]

    def beside(text: str) -> bool:
        return any("first" in line and "second" in line for line in text.split("\n"))

    wide = text_of(two, force_terminal=True, width=140)
    assert beside(wide) and "\x1b" in wide
    assert not beside(text_of(two, force_terminal=True, width=80))
    piped = text_of(two, force_terminal=False, width=140)
    assert not beside(piped) and "\x1b" not in piped and piped.count("verdict") == 2


def test_what_a_model_writes_does_not_reach_the_terminal_as_it_is(agent):
    text = text_of([scripted(agent, 0, "[bold]read\x1b[2J")], force_terminal=False)
    assert "[bold]read\\x1b[2J" in text and "\x1b" not in text


# ------------------------------------------------------------------------------------------------------- the reader


@given(
    st.lists(st.lists(st.sampled_from(["read m1", "    return a", "test"]), min_size=1, max_size=3), max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=30)
def test_empty_lines_part_turns(wanted, gap, last):
    lines = [line for turn in wanted for line in [*(f"{one}\n" for one in turn), *["\n"] * gap]]
    assert [*play.turns(lines[:-gap] if last and lines else lines)] == ["\n".join(turn) for turn in wanted]


def test_the_reader_plays(agent, ask, monkeypatch):
    task = play.task_of(agent.recipe, 1, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" + typed(task, *solution(task)) + "frobnicate\n\n"))
    code, out, error = ask("play", "--me", "--task", "1")
    assert (
        code == 0 and not error and "verdict      solved\n" in out and out.count(task.answer) == 2
    )  # what was written, and what changed
    assert "frobnicate" not in out, "the episode was over"
    monkeypatch.setattr(sys, "stdin", io.StringIO("test\n"))
    code, out, _ = ask("play", "--me", "--task", "1")
    assert code == 0 and "passed 0 of 3: no body" in out and "not solved, and not ended by itself" in out


def test_what_a_reader_typed_on_a_terminal_is_not_printed_again(agent):
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    task, file = play.task_of(agent.recipe, 1, None), io.StringIO()
    played = play.listen(agent, task, Typed(typed(task, "read m0", "frob")), Console(file=file))
    assert "read m0" not in file.getvalue() and "error: no such call" in file.getvalue()
    assert [piece.text for piece in played.pieces if piece.role == "agent"] == [
        "read m0",
        "frob",
    ] and played.reward.invalid_calls == 1


def test_the_reader_s_rollout_is_a_line_of_json(agent, ask, monkeypatch):
    task = play.task_of(agent.recipe, 1, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed(task, *solution(task))))
    code, out, error = ask("play", "--me", "--task", "1", "--json")
    found = json.loads(out)
    assert (
        code == 0 and found["success"] and found["who"] == "you" and found["temperature"] is None and "verdict" in error
    )


# ------------------------------------------------------------------------------------------------- tasks and agents


def test_a_line_of_json_for_each_rollout(run, ask):
    code, out, error = ask("play", run, "--before", "sft", "--json", "--greedy", "--task", "2")
    first, second = map(json.loads, out.splitlines())
    assert (
        code == 0
        and not error
        and (first.pop("who"), second.pop("who")) == tuple(str(run / "checkpoints" / name) for name in ("sft", "final"))
    )
    assert first == second and (first["task"], first["temperature"], first["new"]) == (2, 0.0, False)
    documented = (FOLDER.parents[2] / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in [*first, "who", *first["hidden"], *first["pieces"][0]])
    assert (
        first["success"] == (first["hidden"]["passed"] == first["hidden"]["of"] == 32)
        and first["pieces"][0]["text"] == first["prompt"]
    )


def test_without_a_number_a_new_task_is_drawn_and_its_seed_said(agent, ask):
    """Twice by chance, and once more from the first one's seed, which draws the same task and plays it alike."""
    first, second = (json.loads(ask("play", "--json")[1]) for _ in range(2))
    assert first["new"] and first["task"] is None and first["seed"] != second["seed"]
    assert json.loads(ask("play", "--json", "--seed", first["seed"])[1]) == first
    assert json.loads(ask("play", "--json", "--new", "--seed", first["seed"])[1]) == first


def test_tasks_are_held_out_and_a_seed_draws_the_same_one(agent):
    first, again, other = (play.task_of(agent.recipe, 0, seed) for seed in (3, 3, 4))
    assert first == again != other
    known = {play.task_of(agent.recipe, number, None).key for number in range(20)}
    assert len(known) == 20 and first.key not in known


def test_settings_come_from_beside_the_checkpoint_or_from_its_run(run, agent, tmp_path):
    assert agent.recipe.seed == RECORD["config"]["seed"] and play.agent_in(run / "checkpoints" / "sft").recipe.seed == 7
    shutil.copytree(run / "checkpoints" / "sft", tmp_path / "alone")
    assert play.agent_in(tmp_path / "alone").recipe == Recipe()


BAD = [
    (["missing"], "missing is neither a run nor a checkpoint; make a run with: etude run recipe"),
    (["--before", "base"], "got base; there are sft"),
    (["run/checkpoints/../../half/checkpoints/sft", "--before", "base"], "got base; there are sft"),
    (["alone", "--before", "sft"], "got sft; name a run, whose checkpoint it is"),
    (["run", "--before", "base"], "got base; there are final, sft"),
    (["half"], "half has no checkpoint final yet; it has sft"),
    (["mute"], "mute has no tokenizer.json"),
    (["foreign"], "has no tokens <|env|> and <|agent|>"),
    (["broken"], "broken/model.safetensors"),
    (["lost/checkpoints/final"], "lost/config.json contains no settings of a run"),
    (["--greedy", "--temperature", "1"], "--greedy means --temperature 0"),
    (["--temperature", "-1"], "--temperature must be finite and not negative, got -1.0"),
    (["--temperature", "nan"], "got 'nan'"),
    (["--me", "--greedy"], "--me does not sample an agent"),
    (["--new", "--task", "3"], "leave one of them out"),
    (["--task", "-1"], "--task"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input(run, arguments, says, tmp_path, monkeypatch, ask):
    shutil.copytree(run, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "final")
    shutil.copytree(run / "checkpoints" / "final", tmp_path / "alone", ignore=shutil.ignore_patterns("sft"))
    for name in ("mute", "foreign", "broken"):
        shutil.copytree(run / "checkpoints" / "final", tmp_path / name)
    (tmp_path / "mute" / "tokenizer.json").unlink()
    text = (tmp_path / "foreign" / "tokenizer.json").read_text()
    (tmp_path / "foreign" / "tokenizer.json").write_text(text.replace("<|env|>", "<|other|>"))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    shutil.copytree(run, tmp_path / "lost")
    (tmp_path / "lost" / "config.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    code, out, error = ask("play", *arguments)
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: ") and says in error
