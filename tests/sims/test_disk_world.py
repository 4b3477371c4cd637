"""The small world on disk says what it says in memory, byte for byte, and its verdicts are the same."""

import pickle
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from kit.runs import Run
from recipe.microrepo import Session, WorldConfig, demonstration, disk, generate
from recipe.microrepo.corpus import NoiseConfig
from recipe.microrepo.disk import DiskSession, files_of
from recipe.microrepo.environment import TextSession
from sims.disk_world import experiment as disk_world
from sims.policies import read_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

NOISY = NoiseConfig(wrong_body=0.6, invalid_call=0.4)


def both(task, turns):
    """What both say to the same turns, and their verdicts."""
    found = []
    for kind in (Session, DiskSession):
        session, said = kind(task), []
        for turn in turns:
            if session.done:
                break
            said.append(session.step(turn))
        session.judge()
        session.close()
        found.append((said, session.verify()))
    return found


@pytest.mark.parametrize(("seed", "multi_hop_share"), [*((seed, 0.0) for seed in range(6)), (6, 1.0), (7, 1.0)])
def test_a_demonstration_hears_the_same(seed, multi_hop_share):
    rng = random.Random(seed)
    task = generate(rng, "train", config=WorldConfig(multi_hop_share=multi_hop_share))
    memory, other = both(task, demonstration(task, rng, NOISY))
    assert memory == other and memory[0]


TASK = generate(random.Random(3), "train", depth=1)
ARGS = TASK.files[TASK.target].args


def body(*lines):
    return f"write {TASK.target}\n" + "\n".join(f"    {line}" for line in lines)


def test_bodies_of_all_kinds_hear_the_same():
    """Right, wrong, comparisons, large numbers, errors of Python's, refused ones, and a file that is written twice
    within a second."""
    a, b = ARGS[:2]
    turns = [
        "test",
        body("return 1 // 0") + "\ntest",
        body(f"return {a} % ({b} - {b})") + "\ntest",
        body(f"return {a} < {b}") + "\ntest",
        body(f"return -{a} ** 9 - 999999999999") + "\ntest",
        body(f"return {a} * 10000000 ** 40") + "\ntest",
        body("x = 3", f"return x if {a} > 100 else x - {b}") + "\ntest",
        body("return m7(1, 2)") + "\n" + body("import os") + f"\nread {TASK.target}",
        body("return 1") + "\ntest\n" + body("return 2") + "\ntest",
        body(*TASK.answer.split("\n")) + f"\ntest\nread {TASK.target}\nread nothing",
        "done",
    ]
    memory, other = both(TASK, turns)
    assert memory == other
    assert (
        memory[1].tests == 1.0
        and "division by zero" in memory[0][1]
        and "want" in memory[0][3]
        and "large" in memory[0][5]
    )


def test_what_python_knows_and_the_world_does_not(monkeypatch):
    """A negative power, and a number of more than 4,096 bits: failures in memory, values on disk, and success
    nowhere."""
    monkeypatch.setattr(disk, "LIMITS", replace(disk.LIMITS, seconds=2.0))
    turns = [
        body("return 2 ** -1") + "\ntest",
        body("return 10 ** 2000") + "\ntest",
        body("return 9 ** 9 ** 9 ** 9") + "\ntest",
    ]
    memory, other = both(TASK, turns)
    assert ["fails, negative power" in memory[0][0], "fails, number too large" in memory[0][1]] == [True, True]
    assert " is 0.5, want" in other[0][0] and " is large, want" in other[0][1] and "fails, no answer" in other[0][2]
    assert memory[1] == other[1]


def test_a_fork_goes_on_alone_and_a_verdict_outlives_the_sandbox():
    session = DiskSession(TASK)
    assert isinstance(session, TextSession)
    session.step(body("return 1"))
    twin = session.fork()
    session.step(body(*TASK.answer.split("\n")))
    assert "return 1" in twin.step(f"read {TASK.target}") and TASK.answer in session.step(f"read {TASK.target}")
    assert session.verify().tests == 1.0 and twin.verify().tests == 0.0
    session.judge()
    session.close(), twin.close()
    again = pickle.loads(pickle.dumps(session))
    assert again.verify() == session.verify() and again.verify().tests == 1.0


def test_the_repository_holds_no_answer():
    files = files_of(TASK)
    assert {*files} == {*(f"{name}.py" for name in TASK.files), f"test_{TASK.target}.py"}
    assert TASK.answer.encode() not in b"".join(files.values())


def test_a_session_that_did_nothing_starts_no_sandbox(monkeypatch):
    monkeypatch.setattr("recipe.microrepo.disk.open_sandbox", lambda *_, **__: pytest.fail("a sandbox was started"))
    session = DiskSession(TASK)
    session.step("test")
    session.judge()
    session.close()
    assert session.verify().passed == 0.0


# The experiment.


def made(apart=0.0, gain=0.1, unequal=()):
    """Rows of two trainings of three steps, and held-out successes of forty tasks."""
    c = disk_world.Experiment(trainings=2, steps=3, tasks=40)
    rows = [
        {
            "training": n,
            "arm": arm,
            "step": s,
            "success": 0.5 + 0.1 * s + apart * (arm == "disk"),
            "reward": 0.4,
            "step_s": 1.0 + 9 * (arm == "disk"),
        }
        for arm in ("memory", "disk")
        for n in range(2)
        for s in (1, 2, 3)
    ]
    before = np.tile(np.linspace(0.2, 0.8, 40), (2, 1))
    solved = {arm: np.stack([before, before + gain], 1) for arm in ("memory", "disk")}
    return disk_world.verdicts(rows, solved, [n not in unequal for n in range(2)], c)


def test_rules():
    def verdicts(**how):
        return [one["verdict"] for one in made(**how)]

    assert verdicts() == ["holds", "reproduced"]
    assert verdicts(apart=1e-3)[0] == "broken" and verdicts(unequal=(1,))[0] == "broken"
    assert verdicts(gain=0.0)[1] == "not at this scale" and verdicts(gain=-0.1)[1] == "contradicted"
    assert "64 rollouts takes 10.0 s on disk and 1.0 s in memory" in made()[0]["note"]


def test_both_arms_train_the_same_weights(tiny_run, tmp_path, monkeypatch):
    """A tiny agent that calls what it likes: one arm plays on disk, the other does not, and they end alike."""
    opened = []

    class Counted(DiskSession):
        def __init__(self, *how):
            opened.append(how)
            super().__init__(*how)

        def step(self, text):
            """Whatever the agent says, it writes first."""
            return super().step(
                f"write {self.task.target}\n    return {self.task.files[self.task.target].args[0]}\ntest\n{text}"
            )

    class Same(Session):
        def step(self, text):
            return super().step(
                f"write {self.task.target}\n    return {self.task.files[self.task.target].args[0]}\ntest\n{text}"
            )

    monkeypatch.setattr("recipe.small.tasks.DiskSession", Counted)
    monkeypatch.setattr("recipe.small.tasks.Session", Same)
    monkeypatch.setattr("kit.process.cores", lambda: 1)  # in this process, where it is counted
    c = disk_world.Experiment(run=str(tiny_run), trainings=1, steps=2, prompts=1, rollouts=2, tasks=2, samples=2)
    recipe = read_config(tiny_run)
    with Run.open(tmp_path / "run", "figure disk-world", c) as run:
        memory = disk_world.training(run, c, tiny_run, recipe, "memory", 0)
        assert not opened
        other = disk_world.training(run, c, tiny_run, recipe, "disk", 0)
        assert len(opened) == 4 and other["weights"] == memory["weights"] and other["solved"] == memory["solved"]
        assert disk_world.training(run, c, tiny_run, recipe, "disk", 0) == other and len(opened) == 4
        found = disk_world.experiment(run, c)
    assert [one["step"] for one in other["steps"]] == [1, 2] and len(found["rows"]) == 4 and len(found["heldout"]) == 2
    assert found["claims"][0]["verdict"] == "holds"
    disk_world.picture(found, tmp_path / "drawn.png")
    assert len(np.unique(imread(tmp_path / "drawn.png")[..., :3].reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("wrong", [{"trainings": 0}, {"steps": 0}, {"samples": 0}])
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1, got 0"):
        disk_world.Experiment(**wrong)
