"""`tasks.reward`: a function of the user's own that adds terms to the grader's reward."""

from types import SimpleNamespace

import pytest

from environments.harness.environment import HarnessEnvironment
from environments.harness.task_set import HarnessTasks
from kit.settings import RunError, fill
from recipe.packages.own_reward import OwnRewardEnvironment, load_reward, trust_reward
from recipe.packages.settings import PackageSettings
from recipe.packages.tasks import PackageTasks
from ref.environment import Reward
from tests.test_readme import PAGES

BEFORE = {"words.py": b"def a():\n    ...\n", "other.py": b"x = 1\n"}
AFTER = {"words.py": b"def a():\n    x = 1\n    return x\n"}


@pytest.fixture
def environment(monkeypatch):
    """A function → an episode that is over: it changed one file, of two, by three lines."""
    grader_terms, metrics = {"tests": 1.0, "succinctness": 0.1}, {"success": 1.0, "turns": 3}
    monkeypatch.setattr(HarnessEnvironment, "reward", lambda self: Reward(grader_terms, metrics))

    def make(function):
        made = OwnRewardEnvironment.__new__(OwnRewardEnvironment)
        exam = SimpleNamespace(given_tree=BEFORE, editable={"words.py"})
        made.task = SimpleNamespace(exam=exam, job=SimpleNamespace(task="words-1.0:a", prompt="Write a."))
        made.grade = SimpleNamespace(collected=SimpleNamespace(files=AFTER))
        made.function, made.lines = (
            function,
            [{"kind": "reply", "calls": [{"name": "read", "arguments": '{"path": "words.py"}'}]}, {"kind": "answer"}],
        )
        return made

    return make


def test_its_terms_are_added_and_logged(environment, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward(episode):\n"
        "    assert episode.before['other.py'] == episode.after['other.py'] and episode.terms['tests'] == 1\n"
        "    assert [(call.tool, call.args['path']) for call in episode.calls] == [('read', 'words.py')]\n"
        "    return {'short': -0.01 * episode.changed_lines, 'quick': float(episode.metrics['turns'] < 4)}\n"
    )
    trust_reward(path)
    reward = environment(load_reward(path)).reward()
    assert reward.terms == {"tests": 1.0, "succinctness": 0.1, "short": -0.03, "quick": 1.0}
    assert reward.metrics == {"success": 1.0, "turns": 3, "reward_short": -0.03, "reward_quick": 1.0}


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda episode: {"short": float("nan")}, "gives nan for 'short'"),
        (lambda episode: {"tests": 2}, "names a term 'tests', which the grader has"),
        (lambda episode: 1.0, "AttributeError"),
        (lambda episode: {"short": "little"}, "could not convert string to float"),
        (lambda episode: {"short": episode.nothing}, "no attribute 'nothing'"),
    ],
)
def test_what_it_must_not_return_is_one_line(environment, function, why):
    with pytest.raises(RunError, match=r"^reward\(episode\) of tasks.reward [^\n]*" + why):
        environment(function).reward()


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "cannot be read"),
        ("x = 1\n", r"has no function reward\(episode\)"),
        ("def reward(:\n", "cannot be run: SyntaxError"),
        ("reward = 1\n", r"has no function reward\(episode\)"),
        ("1 / 0\n", "cannot be run: ZeroDivisionError"),
    ],
)
def test_a_file_without_a_reward_is_one_line(tmp_path, text, why):
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match=f"tasks.reward={path} {why}") as caught:
        trust_reward(path)
        load_reward(path)
    assert "\n" not in str(caught.value)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_a_program_in_a_folder_that_somebody_sent_is_not_run(tmp_path):
    """Neither one that no run began with, nor one that was changed since."""
    path, mark = tmp_path / "reward.py", tmp_path / "mark"
    path.write_text(f"open({str(mark)!r}, 'w')\ndef reward(episode):\n    return {{}}\n")
    with pytest.raises(RunError, match="no run of yours has begun") as caught:
        load_reward(path)
    assert not mark.exists() and "\n" not in str(caught.value)
    trust_reward(path)
    assert load_reward(path)(None) == {} and mark.exists()
    mark.unlink()
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RunError, match="no run of yours has begun"):
        load_reward(path)
    assert not mark.exists()


def test_tasks_make_episodes_with_it_only_if_it_is_set(monkeypatch):
    """From a run's copy of the file."""
    monkeypatch.setattr(HarnessTasks, "environment", lambda self, task, number: "plain")
    tasks = PackageTasks.__new__(PackageTasks)
    tasks.judges = SimpleNamespace(expect=lambda: None)
    tasks.own_reward = None
    assert tasks.environment(None, 0) == "plain"
    tasks.own_reward = lambda episode: {}
    tasks.fork, tasks.store, tasks.grader, tasks.seconds, tasks.call_seconds = None, None, None, 5.0, 2.0
    monkeypatch.setattr(HarnessEnvironment, "__init__", lambda self, *args: setattr(self, "args", args))
    made = tasks.environment("task", 0)
    assert isinstance(made, OwnRewardEnvironment) and made.args == ("task", None, None, None, 5.0, 2.0)


def test_the_example_of_the_page_is_one(environment, tmp_path):
    """docs/your-own-environment.md shows a file reward.py."""
    page = PAGES["docs/your-own-environment.md"]
    text = page.partition("```python\n# reward.py\n")[2].partition("```")[0]
    (tmp_path / "reward.py").write_text(text)
    trust_reward(tmp_path / "reward.py")
    terms = environment(load_reward(tmp_path / "reward.py")).reward().terms
    assert {"short", "no_print"} <= terms.keys() and terms["short"] < 0
    assert fill(PackageSettings, {"reward": "reward.py"}).reward == "reward.py"
