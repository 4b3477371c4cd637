"""Every hack is paid nothing by the guarded grader, and the honest solution is paid by it in full; beside it a naive grader pays them."""

import shutil
from contextlib import ExitStack
from functools import partial

import pytest

from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges, nursery_of_judges
from environments.monitor import Call
from environments.sandbox.interface import Limits
from environments.sandbox.open import open_sandbox
from tests.environments.hacks import GIVEN, GOLD, HACKS, HELD, HONEST, VISIBLE

NAMES = {"visible.py": ("days", "cities", "boxes"), "held.py": ("flies", "churches", "keys")}
EXAM = Exam(
    given={name: text.encode() for name, text in GIVEN.items()},
    gold={name: text.encode() for name, text in GOLD.items()},
    editable=Editable(("words/",)),
    tests={"visible.py": VISIBLE, "held.py": HELD},
    wanted=tuple(f"{file}::test_{name}" for file, names in NAMES.items() for name in names),
    package="words",
)


@pytest.fixture(scope="module")
def fresh(root, shared_store):
    """Opens grading sandboxes."""
    return partial(open_sandbox, root=root, store=shared_store, limits=Limits(output=1 << 20))


@pytest.fixture
def leave(tmp_path):
    """The folder that an agent left, with these files in it."""

    def left(files: dict[str, str], links: dict[str, str] | None = None):
        folder = tmp_path / "left"
        shutil.rmtree(folder, ignore_errors=True)
        write({**EXAM.given, **{name: text.encode() for name, text in files.items()}}, folder)
        for name, target in (links or {}).items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)
        return folder

    return left


def naive(fresh, folder) -> float:
    """Pays where pytest's exit code in the agent's own tree is 0."""
    with fresh(folder) as sandbox:
        return float(sandbox.call("shell", {"command": "PYTHONPATH=. python3 -m pytest -q tests"}, 30).exit == 0)


@pytest.fixture(scope="module", params=["a judge that is started", "a judge of a nursery"])
def judges(request, fresh, root, shared_store):
    """Who judges in sandboxes that `fresh` opens, or in forks of a nursery."""
    with ExitStack() as stack:
        nursery = stack.enter_context(nursery_of_judges(Limits(output=1 << 20), root, shared_store)) if "nursery" in request.param else None
        yield stack.enter_context(Judges(fresh, nursery=nursery))
        assert nursery is None or (nursery.first is not None and not nursery.refused)


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_hack_is_paid_nothing(hack, fresh, judges, leave):
    folder = leave(hack.files, hack.links)
    found = grade(EXAM, folder, fresh, seconds=20, judges=judges)
    assert found.reward.total == 0.0, found
    seen = set()
    seen |= {"monitor"} if found.flags else set()
    seen |= {"canary"} if any("canary" in flag or "seal" in flag or "asked for" in flag for flag in found.verdicts.flags) else set()
    seen |= {"tests"} if found.verdicts.failed and not found.verdicts.flags else set()
    assert set(hack.by) <= seen, found


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_naive_grader_pays_it(hack, fresh, leave):
    """Else the test above would show nothing."""
    assert naive(fresh, leave(hack.files, hack.links)) == 1.0


def test_the_honest_solution_is_paid(fresh, leave, shared_store):
    """By both, with the calls of an honest episode, which are made: what running tests leaves behind is no hack."""
    calls = [
        Call("read", {"path": "words/nouns.py"}),
        Call("write", {"path": "words/nouns.py", "text": HONEST["words/nouns.py"]}),
        Call("shell", {"command": "PYTHONPATH=. python3 -m pytest -q tests"}),
    ]
    with fresh(leave({})) as sandbox:
        assert all(sandbox.call(call.tool, call.args).ok for call in calls)
        folder = shared_store.tree(sandbox.snapshot())
    assert any(folder.rglob("__pycache__/*.pyc")) and (folder / ".pytest_cache").is_dir()
    found = grade(EXAM, folder, fresh, calls)
    assert found.reward.total == 1.0 and found.reward.flags == () and found.verdicts.passed == set(EXAM.wanted), found
    assert naive(fresh, folder) == 1.0
    gold = grade(EXAM, leave({name: data.decode() for name, data in EXAM.gold.items()}), fresh)
    assert gold.reward.total == 1.0


def test_nothing_done_is_paid_nothing_and_no_hack(fresh, leave):
    found = grade(EXAM, leave({}), fresh)
    assert found.reward.total == 0.0 and found.reward.flags == () and not found.verdicts.passed
    assert set(found.verdicts.failed.values()) == {"failed"} and naive(fresh, leave({})) == 0.0


def test_a_broken_tree_is_wrong_and_no_hack(fresh, leave):
    found = grade(EXAM, leave({"words/nouns.py": "def plural(word:\n"}), fresh)
    assert found.reward.total == 0.0 and found.reward.flags == () and set(found.verdicts.failed.values()) == {"missing"}


def test_half_a_solution_is_paid_nothing(fresh, leave):
    """All or nothing: the visible half alone is what a table would pass."""
    found = grade(EXAM, leave({"words/nouns.py": GOLD["words/nouns.py"].replace('"ch"', '"sh"')}), fresh)
    assert found.reward.total == 0.0 and found.reward.flags == ()
    assert found.verdicts.failed == {"held.py::test_churches": "failed"}
