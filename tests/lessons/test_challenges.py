"""The challenges of the course: a scorer passes a baseline, and refuses the starting file and wrong solutions; the
board is what it scores."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli import challenge as challenge_commands
from kit.settings import RunError
from lessons import syllabus
from lessons.challenges import (
    answers,
    behaviour,
    board,
    challenge,
    cpt,
    feature_deletion,
    recipe,
    solver,
    weight_sync,
    wire,
)
from lessons.challenges.challenge import CHALLENGES
from lessons.challenges.solution import LocalSolution, Solution
from tests.lessons.wrong_solutions import WRONG

IDS = [one.stem for one in CHALLENGES]
DEAR = {"00_recipe", "00_recipe_as_in_the_recipe", "01_cpt", "01_cpt_general_first", "01_cpt_warm_and_decay"}
DEAR |= {"12_weight_sync", "12_weight_sync_by_size", "13_async_rl", "14_feature_deletion_pairs"}
"""Files whose scoring takes seconds or minutes: the record stands for them, and tests below play small cases."""
BY_STEM = {one.stem: one for one in CHALLENGES}
GOOD = "def estimate(logp, ref_logp):\n    return (logp - ref_logp).mean(1)\n"


def mine(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return path


@pytest.fixture(scope="module")
def record():
    return json.loads(board.RESULTS.read_text(encoding="utf-8"))["challenges"]


def test_a_challenge_for_each_lesson():
    """In order, called as the technique, with a starting file and a baseline."""
    numbers = {one.number: one.name for one in CHALLENGES}
    assert list(numbers) == [lesson.number for lesson in syllabus.lessons()]
    for number, name in numbers.items():
        assert (
            syllabus.find(number).path.stem == f"{number:02d}_{name.replace('-', '_')}"
            and challenge_commands.number_of(name) == number
        )
    known = {path for one in CHALLENGES for path in (one.start, *one.baselines)}
    assert {path for room in ("starts", "baselines") for path in (challenge.FOLDER / room).glob("*.py")} == known
    assert {stem for stem, *_ in WRONG} == set(IDS)
    with pytest.raises(RunError, match="there is no challenge 99"):
        challenge.find(99)


@pytest.mark.parametrize("one", CHALLENGES, ids=IDS)
def test_what_is_asked_can_be_read(one):
    """The head names challenge and number; the text names every function of the file, the score, and which way is
    better."""
    head = challenge.docstring(one.start).partition("\n")[0]
    assert head.startswith(f"Challenge {one.number}: ") and one.title and one.says
    assert (
        ("Less is better." in one.says) == one.least
        and ("More is better." in one.says) != one.least
        and "\nScore: " in one.says
    )
    begun = solver.loaded(one.start)
    asked = re.findall(r"^(\w+)\([\w, ]+\): ", one.says, re.MULTILINE)
    assert asked and all(callable(vars(begun).get(name)) for name in asked)
    for path in one.baselines:
        assert "\n\n" not in challenge.docstring(path) and set(asked) <= set(vars(solver.loaded(path)))


@pytest.mark.parametrize("one", CHALLENGES, ids=IDS)
def test_the_board_is_what_the_scorer_says(one, record):
    """With the first seed: the starting file does not pass, a baseline does, and all have the score that the record
    has."""
    told = record[one.name]
    assert (told["number"], told["measure"], told["bar"], told["least"]) == (
        one.number,
        one.measure,
        one.bar,
        one.least,
    )
    files = {board.START: one.start} | {
        path.stem.removeprefix(f"{one.stem}_").replace("_", " "): path for path in one.baselines
    }
    assert [row["solution"] for row in told["board"]] == list(files)
    found = {}
    for row in told["board"]:
        path = files[row["solution"]]
        assert row["says"] in ("What a reader begins with.", " ".join(challenge.docstring(path).split()))
        if path.stem not in DEAR:
            found[row["solution"]] = one.score(LocalSolution(path), 0)
            assert found[row["solution"]] == pytest.approx(row["scores"][0], rel=1e-3, abs=1e-9)
    verdicts = [one.passed(score) for row in told["board"] for score in row["scores"]]
    assert not any(verdicts[: one.seeds]) and any(all(map(one.passed, row["scores"])) for row in told["board"][1:])
    assert one.better(board.best(one).score, float(np.mean(told["board"][0]["scores"])))


@pytest.mark.parametrize(("stem", "what", "source", "says"), WRONG, ids=[f"{stem}: {what}" for stem, what, *_ in WRONG])
def test_a_wrong_solution_is_refused_or_fails(stem, what, source, says, tmp_path, monkeypatch, request):
    path = tmp_path / "mine.py"
    path.write_text(source)
    one = BY_STEM[stem]
    if stem == "00_recipe":
        monkeypatch.setattr(recipe, "RUN", request.getfixturevalue("tiny_run"))
    if says is None:
        assert not one.passed(one.score(LocalSolution(path), 1))
        return
    with pytest.raises(RunError) as refused:
        one.score(LocalSolution(path), 1)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_recipe_is_trained_within_a_budget(tiny_run, tmp_path, monkeypatch):
    """A step of RL on four rollouts of the tiny agent, which has learned nothing; and a run that is missing is told."""
    path = mine(
        tmp_path,
        "def settings(rollouts):\n    return {'steps': 1, 'prompts': 2, 'rollouts': rollouts // 2, 'lr': 1e-5}\n",
    )
    for name, value in {"RUN": tiny_run, "ROLLOUTS": 4, "TASKS": 2, "SAMPLES": 2}.items():
        monkeypatch.setattr(recipe, name, value)
    assert recipe.score(LocalSolution(path), 0) in (0.0, 0.25, 0.5, 0.75, 1.0)
    monkeypatch.setattr(recipe, "RUN", tmp_path / "none")
    with pytest.raises(RunError, match="is not a run of the recipe.*make one with"):
        recipe.score(LocalSolution(path), 0)


def test_a_plan_of_pretraining_is_played(tmp_path, monkeypatch):
    """A dozen steps: with a rate of zero nothing is learned, with a good one something; the least loss is that of the
    source."""
    monkeypatch.setattr(cpt, "STEPS", 12)
    monkeypatch.setattr(cpt, "HELD_ROWS", 8)
    still, moved = (
        cpt.score(LocalSolution(mine(tmp_path, f"def plan(steps):\n    return [[{rate}, 0.5]] * steps\n")), 0)
        for rate in (0.0, 0.01)
    )
    assert still > moved + 0.1 and moved > 0
    monkeypatch.setattr(cpt, "FASTEST", 1e30)
    with pytest.raises(RunError, match="plan destroys the model"):
        cpt.score(LocalSolution(mine(tmp_path, "def plan(steps):\n    return [[1e30, 0.5]] * steps\n")), 0)


def test_no_delta_is_needed_where_nothing_changed():
    """And a drift of the masters changes few of the bfloat16 weights."""
    old, new = weight_sync.draw_versions(np.random.default_rng(0))
    assert 0.005 < (old != new).mean() < 0.1
    path = next(path for path in BY_STEM["12_weight_sync"].baselines if path.stem.endswith("by_size"))
    solve = LocalSolution(path)
    for a, b in ((old[:3000], new[:3000]), (old[:3000], old[:3000]), (old[:1000], old[::-1][:1000].copy())):
        delta = solve("encode", a, b)
        assert (solve("decode", a, delta) == b).all()
    assert len(solve("encode", old[:3000], old[:3000])) < 40


@given(st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=10)
def test_what_makes_a_task(seed, count):
    """By its definition, on a table that was drawn."""
    rng = np.random.default_rng(seed)
    table = feature_deletion.draw_coverage(rng)
    deleted = rng.choice(feature_deletion.FUNCTIONS, count, replace=False).tolist()
    fails = [any(row[one] for one in deleted) for row in table]
    kept = [row for row, failing in zip(table, fails) if not failing]
    whole = all(
        any(row[f] for row in kept) or not any(row[f] for row in table)
        for f in range(table.shape[1])
        if f not in deleted
    )
    good = whole and 3 <= sum(fails) <= 40 and all(any(row[one] for row in table) for one in deleted)
    assert (feature_deletion.what_is_wrong(table, deleted) == "") == good


@pytest.mark.parametrize(
    ("baseline", "seed"), [("04_dr_grpo_exact_part", 19), ("17_behaviour_played_ahead", 12), ("18_monitor_sum", 7)]
)
def test_a_pass_is_not_luck(baseline, seed):
    """With seeds whose cases once refused a solution that is good: one prompt with next to no noise, few worlds, many
    small rises."""
    one = next(one for one in CHALLENGES if baseline.startswith(one.stem))
    assert one.passed(one.score(LocalSolution(challenge.FOLDER / "baselines" / f"{baseline}.py"), seed))


def test_training_follows_the_reward():
    """The way with the highest reward wins, and equal rewards move nothing; several rewards at once are trained on one
    by one."""
    policy = np.array([0.2, 0.3, 0.5])
    both = behaviour.trained(policy, np.array([[1.0, 0.0], [0.0, 0.4], [0.0, 0.0]]))
    assert np.allclose(both[:, 1], behaviour.trained(policy, np.array([0.0, 0.4, 0.0]))) and both[:, 0].argmax() == 0
    assert behaviour.trained(policy, np.array([1.0, 0.0, 0.0])).argmax() == 0
    assert np.allclose(behaviour.trained(policy, np.full(3, 0.7)), policy)


def test_another_seed_has_other_cases(tmp_path):
    """And the same one the same: a score can be repeated, and not learned by heart."""
    one = BY_STEM["05_kl"]
    path = one.start
    scores = [one.score(LocalSolution(path), seed) for seed in (1, 1, 2)]
    assert scores[0] == scores[1] != scores[2]


def test_the_command_lists_shows_and_scores(ask, tmp_path, monkeypatch):
    """The starting file is written once; a score is one line; a bar that is not reached is exit code 1."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = ask("challenge")
    assert code == 0 and "unbiased KL" in out and not any(tmp_path.iterdir())
    code, out, _ = ask("challenge", "kl")
    start = tmp_path / "runs" / "challenges" / "05_kl.py"
    assert (
        code == 0
        and "The bar: at most 0.8 passes" in out
        and "exact part" in out
        and f"{start.relative_to(tmp_path)}: start here" in out
    )
    assert start.read_text() == BY_STEM["05_kl"].start.read_text()
    start.write_text("# mine\n" + GOOD)
    code, out, _ = ask("challenge", 5)
    assert code == 0 and "already exists and is kept" in out and start.read_text().startswith("# mine")
    code, out, error = ask("challenge", 5, "--score", "--seed", 0)
    said = (
        "3.555 error over the better of k1 and k3; at most 0.8 passes: not passed, place 5 of 5 on the board (seed 0)"
    )
    assert (code, error) == (1, "") and out == f"challenge 5: {said}\n"
    code, out, _ = ask("challenge", 5, "--json")
    told = json.loads(out)
    assert told["number"] == 5 and [row["solution"] for row in told["board"]][-1] == board.START and told["says"]
    code, out, _ = ask("challenge", "--json")
    assert [one["number"] for one in json.loads(out)] == [one.number for one in CHALLENGES]


def test_a_score_as_json(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "scored", lambda one, path, seed: 0.25)
    code, out, _ = ask("challenge", "kl", mine(tmp_path, GOOD), "--score", "--json")
    told = json.loads(out)
    assert code == 0 and told["score"] == 0.25 and told["passed"] and told["place"] == 1 and 0 <= told["seed"] < 2**31


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["challenge", 99], "there is no challenge 99; there are 0, 1"),
        (["challenge", "best-of-k"], "best-of-k is a figure: etude figure best-of-k; etude challenge lists them"),
        (
            ["challenge", "nothing"],
            "NUMBER must be the number of a challenge or the name of a technique; got 'nothing'; etude "
            "challenge lists them",
        ),
        (["challenge", 5, ".", "--score"], ". is not a file; name the file of your solution"),
        (
            ["challenge", 5, "--score"],
            "runs/challenges/05_kl.py does not exist; etude challenge 5 writes a file to start from",
        ),
        (["challenge", 5, "mine.py", "--score"], "mine.py does not exist; check its name"),
        (["challenge", 5, "mine.py"], "to score a file: etude challenge 5 --score mine.py"),
        (["challenge", "--score"], "name a challenge"),
    ],
)
def test_bad_input_gets_a_line(words, says, ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = ask(*words)
    assert (
        code == 2
        and out == ""
        and says in error
        and error.startswith("error: ")
        and error.count("\n") == 1
        and not any(tmp_path.iterdir())
    )


@pytest.mark.parametrize(
    ("blocks", "says"),
    [("runs", "cannot be created"), ("dir", "is not a file; move it away"), ("link", "is a broken link")],
)
def test_what_stands_in_the_way_is_said_first(blocks, says, ask, tmp_path, monkeypatch):
    """Before anything is printed, and nothing is replaced."""
    monkeypatch.chdir(tmp_path)
    start = tmp_path / "runs" / "challenges" / "05_kl.py"
    if blocks == "runs":
        (tmp_path / "runs").write_text("mine")
    elif blocks == "dir":
        start.mkdir(parents=True)
    else:
        start.parent.mkdir(parents=True)
        start.symlink_to(tmp_path / "nowhere")
    code, out, error = ask("challenge", 5)
    assert code == 2 and out == "" and says in error and error.count("\n") == 1 and not (tmp_path / "nowhere").exists()


def test_a_process_of_its_own(tmp_path, capfd):
    """It prints to stderr, knows nothing of another interpreter or of the scorer, and may not write."""
    path = mine(
        tmp_path,
        "kept = []\n\ndef keep(x):\n    print('seen')\n    kept.append(x)\n    return len(kept), x\n\n"
        "def write(name):\n    open(name, 'w')\n\ndef begin():\n    import subprocess\n    subprocess.run(['true'])\n\n"
        "def know():\n    from lessons.challenges import kl\n    return kl.draw_samples\n\n"
        "def look():\n    import os\n    return open(f'/proc/{os.getppid()}/cmdline').read()\n\n"
        "def stop():\n    import os\n    os._exit(3)\n",
    )
    marker = tmp_path / "marker"
    with Solution(path, 20) as one:
        assert one("keep", b"a") == [1, b"a"] and one("keep", np.arange(3))[0] == 2
        with one.fresh() as other:
            assert other("keep", 5) == [1, 5]
        with pytest.raises(RunError, match="line 9: PermissionError: a solution may not write files"):
            one("write", str(marker))
        with pytest.raises(
            RunError, match="PermissionError: a solution may not do this once it is loaded: subprocess.Popen"
        ):
            one("begin")
        with pytest.raises(RunError, match="line 16: PermissionError: a solution may not read the scorers"):
            one("know")
        with pytest.raises(RunError, match="line 21: PermissionError: a solution may not look into another process"):
            one("look")
        with pytest.raises(RunError, match="ended with exit code 3"):
            one("stop")
    captured = capfd.readouterr()
    assert not marker.exists() and captured.out == "" and captured.err.count("seen") == 3


def test_no_file_passes_anything_on(tmp_path, capfd):
    """Not one that a library writes, which no audit hook sees, nor a database; and none that was opened before."""
    leak, heard = (
        tmp_path / "leak",
        "import torch\n\ndef f(name):\n    print('heard')\n    torch.save(torch.zeros(3), name)\n",
    )
    with Solution(mine(tmp_path, heard + "\ndef g(name):\n    import sqlite3\n    sqlite3.connect(name)\n"), 20) as one:
        with pytest.raises(RunError, match="line 5"):
            one("f", str(leak))
        with pytest.raises(RunError, match="may not do this once it is loaded: sqlite3.connect"):
            one("g", str(leak))
    assert not leak.exists() or not leak.stat().st_size
    assert capfd.readouterr().err == "heard\n"
    kept = f"log = open({str(leak)!r}, 'a+b', buffering=0)\n\ndef f():\n    return 1\n"
    with (
        pytest.raises(RunError, match="may not keep a file open to write to: .*leak"),
        Solution(mine(tmp_path, kept), 20),
    ):
        ...


def test_what_a_function_imports_is_there(tmp_path):
    """Although imports look for a place to write to; a dataclass, a byte order mark and an import that is missing are
    no trouble either."""
    source = (
        "from dataclasses import dataclass\n\n@dataclass\nclass P:\n    x: int = 2\n\ndef f(x):\n    "
        "import tempfile, uuid, json.tool\n"
    )
    source += "    return len(tempfile.gettempdir()) > 0, P().x, f.__annotations__\n\ndef g(x: P):\n    import torch\n"
    source += "    return [g.__annotations__['x'] is P, torch.from_numpy(x) + 1]\n\ndef h():\n    import not_there\n"
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8-sig")
    with Solution(path, 20) as one:
        assert one("f", 1) == [True, 2, {}]
        right, more = one("g", np.arange(2))
        assert right and more.tolist() == [1, 2]
        with pytest.raises(RunError, match="line 16: ModuleNotFoundError: No module named 'not_there'"):
            one("h")


def test_a_slow_solution_is_ended(tmp_path):
    path = mine(tmp_path, "import time\n\ndef wait():\n    time.sleep(1000)\n")
    with Solution(path, 20) as one:
        one.clock.left = 0.3
        with pytest.raises(RunError, match="too slow; all calls together may take 20 seconds"):
            one("wait")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:\n", ", line 1: SyntaxError: "),
        ("x = 1\nx.nothing\n", ", line 2: AttributeError: "),
        ("import sys\nsys.exit(4)\n", ", line 2: SystemExit: 4"),
    ],
)
def test_a_file_that_does_not_load(source, says, tmp_path):
    path = mine(tmp_path, source)
    said = solver.answer(path, lambda: solver.loaded(path))
    assert f", line {said['line']}: {said['raised']}".startswith(says)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def other():\n    return 1\n", "mine.py: the file has no function f"),
        ("def f():\n    return 1 / 0\n", "line 2: ZeroDivisionError"),
        ("def f():\n    return {1, 2}\n", "a value of type set is no plain data"),
        ("def f():\n    return {1: 2}\n", "keys of a dictionary must be text"),
        ("import numpy\n\ndef f():\n    return numpy.array([None])\n", "an array of object is no plain data"),
        ("def f(x):\n    return x\n", "TypeError"),
        ("def f():\n    raise ValueError('two\\nlines ' + 'x' * 900)\n", r"line 2: ValueError: two lines x{270,280}…$"),
    ],
)
def test_what_a_solution_does_wrong_is_said_in_a_line(source, says, tmp_path):
    with pytest.raises(RunError, match=says) as said:
        LocalSolution(mine(tmp_path, source))("f")
    assert "\n" not in str(said.value)


def test_answers_are_checked():
    assert (
        answers.number("f", 2) == 2.0 and answers.check_integer("f", 3, 0, 3) == 3 and answers.data("f", b"x") == b"x"
    )
    assert answers.check_integer("f", True, 0, 1) == 1 and answers.text("f", "") == ""
    assert answers.wholes("f", [1.0, 2], 0, 2, 2).dtype == np.int64
    for call in (
        lambda: answers.number("f", float("nan")),
        lambda: answers.number("f", True),
        lambda: answers.number("f", "1"),
        lambda: answers.number("f", 10**400),
        lambda: answers.number("f", 10**5000),
        lambda: answers.check_integer("f", 10**5000, 0, 3),
        lambda: answers.check_integer("f", True, 0, 3),
        lambda: answers.array("f", [10**400], 1),
        lambda: answers.text("f", 12),
        lambda: answers.check_integer("f", 1.0, 0, 3),
        lambda: answers.check_integer("f", 4, 0, 3),
        lambda: answers.data("f", "x" * 100),
        lambda: answers.array("f", [1, 2], 3),
        lambda: answers.array("f", [[1], [2, 3]], 2, 2),
        lambda: answers.array("f", [1, float("inf")], 2),
        lambda: answers.wholes("f", [0.5], 0, 1, 1),
    ):
        with pytest.raises(RunError, match="^f must return ") as said:
            call()
        assert len(str(said.value)) < 150


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=25)
@given(PLAIN)
def test_plain_data_comes_back(value):
    """Also dictionaries that look like the marks of the wire."""
    line = wire.packed(value)
    assert "\n" not in line and wire.unpacked(line) == value


@pytest.mark.parametrize("kind", ["bool", "uint8", "uint16", "int64", "float32", "float64"])
def test_arrays_come_back_bit_for_bit(kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (3, 0, 2)).astype(kind), rng.normal(0, 9, (2, 3)).astype(kind)
    for before, after in zip(x, wire.unpacked(wire.packed(x)), strict=True):
        assert after.dtype == before.dtype and after.shape == before.shape and after.tobytes() == before.tobytes()


def test_a_place_on_the_board():
    least, most = BY_STEM["05_kl"], BY_STEM["10_quant"]
    rows = [board.Row("a", "", (1.0, 3.0)), board.Row("b", "", (4.0,))]
    assert rows[0].score == 2.0 and rows[0].spread == 1.0
    assert [board.place(least, x, rows) for x in (1.0, 2.0, 3.0, 9.0)] == [1, 1, 2, 3]
    assert [board.place(most, x, rows) for x in (1.0, 2.0, 3.0, 9.0)] == [3, 2, 2, 1]
    assert least.passed(least.bar) and most.passed(most.bar)


def test_a_record_that_is_none_is_told(tmp_path):
    path = tmp_path / "challenges.json"
    assert board.board(BY_STEM["05_kl"], path) == []
    path.write_text("[]")
    with pytest.raises(RunError, match="is not a valid board"):
        board.board(BY_STEM["05_kl"], path)


def test_a_score_that_is_no_number_is_told(tmp_path, monkeypatch):
    """Whatever a scorer may compute from strange numbers: no nan comes first on the board."""
    for score in (float("nan"), float("-inf")):
        monkeypatch.setattr(challenge.Challenge, "score", lambda *_, score=score: score)
        with pytest.raises(RunError, match=f"mine.py: the score is {score}"):
            board.scored(BY_STEM["05_kl"], mine(tmp_path, GOOD), 0)


def test_a_record_is_written_and_kept(tmp_path, monkeypatch, capsys):
    """Measuring one challenge anew leaves the others as they were."""
    path = tmp_path / "challenges.json"
    monkeypatch.setattr(board, "scored", lambda one, file, seed: float(one.number + seed))
    board.write([5, 10], path)
    first = json.loads(path.read_text())["challenges"]
    assert list(first) == ["kl", "quant"] and first["kl"]["board"][0]["scores"] == [5.0, 6.0, 7.0]
    monkeypatch.setattr(board, "scored", lambda one, file, seed: 0.0)
    board.write([10], path)
    second = json.loads(path.read_text())["challenges"]
    assert second["kl"] == first["kl"] and second["quant"]["board"][0]["scores"] == [0.0, 0.0, 0.0]
    assert "kl: the starting file 6" in capsys.readouterr().out
