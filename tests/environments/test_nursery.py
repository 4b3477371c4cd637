"""A nursery's sandboxes keep apart what they do, leave nothing to each other, and hold where the nursery does not.

What is tried from within stands in crosstalk.py, and in attempts.py, which test_escapes.py plays in a nursery, too.
"""

import inspect
import json
import os
import shutil
import signal
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from environments.grading.guarded import grade
from environments.grading.lay import write
from environments.grading.ready import JUDGE, Judges, nursery_of_judges, open_judge_sandbox, start_judge
from environments.sandbox import nursery as nurseries
from environments.sandbox.interface import Limits
from environments.sandbox.nursery import Nursery
from environments.sandbox.open import open_sandbox
from kit.settings import RunError
from tests.environments.hacks import GOLD
from tests.environments.siege import REPOSITORY, played, said
from tests.environments.test_hacks import EXAM
from tests.environments.test_ready import SPY

USERS = ["this user", "nobody"] if os.geteuid() == 0 else ["this user"]
NOTHING = {
    "folder": "/work/exam/tests",
    "tests": {},
    "wanted": [],
    "names": {},
    "folders": ["/work/tree", "/work/tree/src"],
    "support": {},
}


def plan_of(source, name, seconds, key="00" * 16):
    """What a judge is told of a test that is played with the package in one process."""
    apart = {**NOTHING, "asked": [], "each": 1.0, "tops": [], "local": {}}
    inside = {**NOTHING, "tests": {"t.py": source}, "wanted": [f"t.py::{name}"]}
    return json.dumps(
        {
            "key": key,
            "files": {},
            "later": {},
            "tree": "/work/tree",
            "apart": apart,
            "inside": inside,
            "seconds": seconds,
        }
    )


@pytest.fixture(scope="module")
def crossed(root):
    """What crosstalk.py has seen, by user."""
    with tempfile.TemporaryDirectory(prefix="etude-test-") as name:
        folder, found = Path(name), {}
        folder.chmod(0o755)
        for room in ("environments", "kit"):
            shutil.copytree(REPOSITORY / room, folder / "code" / room, ignore=shutil.ignore_patterns("__pycache__"))
        for user in USERS:
            (store := folder / f"store of {user}").mkdir()
            request = folder / "request.json"
            request.write_text(json.dumps({"root": str(root), "store": str(store), "code": str(folder / "code")}))
            found[user] = said(played(user, root, folder, "crosstalk.py", request, store, {}))
        yield found


@pytest.mark.parametrize("user", USERS)
def test_two_gradings_get_nothing_of_each_other(crossed, user):
    found = crossed[user]
    assert found["control"] == "/work /tmp /dev/shm loopback abstract", "whoever planted it finds it"
    for what in ("found", "seen", "signalled", "traced", "opened", "modules", "shared", "above"):
        assert found[what] == [], what
    assert found["session"] == [True, True, True], "a signal to one's own group would reach others"
    assert [one for one in found["handles"] if not str(one).startswith("/tmp/#")] == [1], (
        "the pipe of the verdicts, and what pytest opens itself"
    )
    assert found["environment"] == ["HOME", "LANG", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_VERSION"] and found[
        "marks"
    ] == [False, False]


@pytest.mark.parametrize("user", USERS)
def test_what_ends_its_judge_ends_nobody_else(crossed, user):
    """It has left a daemon and killed its parent. The others wait on, and the next one finds nothing of it, and room
    beside a full one."""
    found = crossed[user]
    assert found["attack"] == {"exit": 137, "text": "", "ended": "3 processes that outlived the call"}
    assert int(found["left"]) == 4, "the server, and a command of three processes"
    assert found["lives"] == [True] * 5
    assert found["full"] == ["more than 8 MiB of disk", True]
    assert found["bomb"] == ["more than 24 processes"] and found["beside a bomb"] == [True, True]
    assert found["late"] == "" and found["below"] == "", "no process is left below the nursery"


@pytest.mark.parametrize("user", USERS)
def test_a_nursery_that_ends_takes_its_sandboxes_with_it(crossed, user):
    assert crossed[user]["orphan"] == "ended" and crossed[user]["anew"] == [True, True]


@pytest.fixture(scope="module")
def nursery(root, shared_store):
    with nursery_of_judges(Limits(output=1 << 20), root, shared_store) as found:
        yield found


@pytest.fixture(scope="module")
def fresh(root, shared_store):
    return partial(open_sandbox, root=root, store=shared_store, limits=Limits(output=1 << 20))


def left(folder, files):
    """The folder that an agent leaves."""
    write({**EXAM.given_tree, **{name: text.encode() for name, text in files.items()}}, folder)
    return folder


def test_it_holds_nothing_and_does_what_any_sandbox_does(nursery, shared_store):
    with nursery.sandbox() as sandbox:
        assert [*shared_store.manifest(sandbox.snapshot())] == [""]
        assert sandbox.begin(JUDGE).ok and sandbox.waits()
        assert sandbox.begin("echo ready; exec cat").text == "ready" and sandbox.tell("told").text == "told"
        assert sandbox.call("write", {"path": "a/b", "text": "x"}).ok
        with sandbox.fork(sandbox.snapshot()) as fork:
            assert fork.call("read", {"path": "a/b"}).text == "x"
        assert "nothing has begun before" in sandbox.begin(JUDGE).text, "it would have in its memory what was told"


def test_a_grading_has_one_and_closes_it(nursery, fresh, tmp_path):
    given = []

    class Counted:
        refused = False

        def sandbox(self):
            given.append(nursery.sandbox())
            return given[-1]

    with Judges(fresh, nursery=Counted()) as judges:
        judges.expect()
        judges.settle()
        assert len(given) == 1 and given[0].waits()
        for number, (files, paid) in enumerate([(GOLD, 1.0), ({}, 0.0)]):
            assert grade(EXAM, left(tmp_path / str(number), files), fresh, judges=judges).reward.total == paid
    assert len(given) == 2 and all(one.call("list", {}).end_reason == "the sandbox is closed" for one in given)
    assert len({one.first for one in given}) == 2


def test_who_is_graded_cannot_look_into_the_judge(nursery, fresh, tmp_path):
    exam = replace(
        EXAM,
        tests={"spy.py": "from words.nouns import FOUND\n\ndef test_spy():\n    assert FOUND == []\n"},
        required_tests=("spy.py::test_spy",),
    )
    with Judges(fresh, nursery=nursery) as judges:
        for number, (code, seen) in enumerate(
            [(SPY, False), (SPY.replace('path != f"/proc/{os.getpid()}"', "True"), True)]
        ):
            found = grade(exam, left(tmp_path / str(number), {**GOLD, "words/nouns.py": code}), fresh, judges=judges)
            assert bool(found.verdicts.failed) == seen, "the control looks at itself"


LOOK = """
import ctypes, gc, json, locale, os, resource, signal, stat, sys

def test_look():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    found = {
        "python": [sys.flags, sys.path, sys.argv, sys.orig_argv, sys.executable, \
locale.getencoding(), sys.stdout.encoding, __name__],
        "main": sorted(vars(sys.modules["__main__"]).keys() - {"__cached__", "__annotations__", "__file__"}),
        "environment": dict(os.environ),
        "signals": {number.name: repr(signal.getsignal(number)) \
for number in signal.valid_signals() if isinstance(number, signal.Signals)},
        "masks": [status[name] \
for name in "SigBlk SigCgt CapEff CapBnd CapPrm NoNewPrivs Seccomp Uid Gid Groups".split()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) \
for name in dir(resource) if name.startswith("RLIMIT_")},
        "process": [os.getcwd(), os.umask(0o22), os.getpriority(0, 0), open("/proc/self/oom_score_adj").read()],
        "readable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
        "memory": [gc.isenabled(), gc.get_threshold()],
        "files": {path: [os.stat(path).st_mode, os.statvfs(path).f_flag, os.statvfs(path).f_blocks] \
for path in ("/", "/work", "/tmp", "/dev/shm")},
        "proc": sorted(name for name in os.listdir("/proc") if not name.isdigit()),
        "namespaces": open("/proc/sys/user/max_user_namespaces").read(),
        "network": open("/proc/net/dev").read().count("\\n"),
        "mounts": sorted(line.split()[4] for line in open("/proc/self/mountinfo")),
    }
    open("/work/found.json", "w").write(json.dumps(found, default=str))
"""


def test_graded_code_finds_what_it_finds_in_a_sandbox_of_its_own(nursery, fresh):
    """Else there would be two graders. Three things differ, and no guard hangs on them. What /proc tells of the words
    and of the environment that a process began with are the nursery's: a language, and no secret. Signals 32 and 33
    belong to the C library: it lets them be ignored in a process that posix_spawn starts, and sets them itself where it
    needs them. And a file may be as large as the disk and the tree that lies there before, which is empty in a fork."""
    plan = plan_of(LOOK, "test_look", 50)
    found = []
    for sandbox in (start_judge(nursery.sandbox()), open_judge_sandbox(fresh)):
        with sandbox:
            said = sandbox.tell(plan)
            assert '"passed"' in said.text, said
            found.append(json.loads(sandbox.call("shell", {"command": "cat /work/found.json"}).text))
    largest = [one["limits"].pop("RLIMIT_FSIZE") for one in found]
    assert largest[0] == [Limits().disk] * 2 < largest[1] and found[0]["mounts"].count("/proc") == 2, (
        "one above that of the nursery"
    )
    found[0]["mounts"].remove("/proc")
    for name, value in found[0].items():
        assert value == found[1][name], name


def scanned(process, words):
    """How often 16 of each of these follow each other in the memory of a process. The one who asks holds no more than
    four of them in a row."""
    found = [0] * len(words)
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            try:
                memory.seek(start)
                block = memory.read(end - start)
            except (OSError, OverflowError, ValueError):
                continue  # the kernel's own pages, and what may not be read
            for number, word in enumerate(words):
                at = block.find(4 * word)
                while at >= 0:
                    found[number] += all(block.startswith(word, at + 2 * more) for more in range(16))
                    at = block.find(4 * word, at + 1)
    return found


def test_no_memory_holds_what_was_judged_before(nursery):
    """Nor the key of its own plan. The first sandbox is judged before the second one begins."""
    key, others = b"5e", {"first": b"6f", "second": b"7a"}
    words = [key, *others.values()]
    for name, seen in (("first", [False, True, False]), ("second", [False, False, True])):
        source = f"{inspect.getsource(scanned)}\nSECRET = {others[name].decode() * 16!r}\n\ndef test_scan():\n"
        source += f"    open('/work/found', 'w').write(str(scanned('self', {words!r})))\n"
        with start_judge(nursery.sandbox()) as sandbox:
            said = sandbox.tell(plan_of(source, "test_scan", 50, key.decode() * 16))
            assert '"passed"' in said.text, said
            assert scanned(sandbox.first, [key])[0] > 0, "the server has passed it on"
            assert [count > 0 for count in json.loads(sandbox.call("read", {"path": "found"}).text)] == seen
            assert scanned(nursery.first, words) == [0, 0, 0]


REFUSED = """
import sys

def refuse():
    raise PermissionError(1, "Operation not permitted")

def nursed():
    pass

sys.modules["inside.kernel"].leave_namespaces = refuse
"""


def test_one_that_is_refused_is_said_once(nursery, root, shared_store, fresh, tmp_path, capsys):
    """Gradings then have sandboxes of their own."""
    with Nursery(JUDGE, {"judge": REFUSED}, nursery.limits, root, shared_store) as other:
        with pytest.raises(RunError, match="allows no sandboxes within sandboxes: PermissionError: .*not permitted"):
            other.sandbox()
        assert other.first is None, "it would hold a namespace, of which a machine may allow few"
        with Judges(fresh, nursery=other) as judges:
            assert grade(EXAM, left(tmp_path / "left", GOLD), fresh, judges=judges).reward.total == 1.0
            with judges.take() as another:
                assert another.waits()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "each grading starts pytest anew: this machine allows no sandboxes within sandboxes"
    )


def test_one_that_ends_takes_no_honest_grading_along(root, shared_store, fresh, tmp_path):
    """Its forks end with it. What was graded in them is graded once more, in a sandbox of its own."""
    with nursery_of_judges(Limits(), root, shared_store) as other:

        class Doomed:
            refused, has_forked = False, True

            def sandbox(self):
                one = other.sandbox()
                real, one.tell = one.tell, lambda *plan: (os.kill(other.first, signal.SIGKILL), real(*plan))[1]
                return one

        with Judges(fresh, nursery=Doomed()) as judges:
            for name, (files, paid) in {"honest": (GOLD, 1.0), "idle": ({}, 0.0)}.items():
                assert grade(EXAM, left(tmp_path / name, files), fresh, judges=judges).reward.total == paid


@pytest.mark.parametrize(
    "error",
    [RunError("fork: Resource temporarily unavailable"), RuntimeError("no judge"), OSError(24, "Too many open files")],
    ids=repr,
)
def test_what_passes_refuses_no_nursery(fresh, error):
    class Short:
        refused, has_forked = False, True

        def sandbox(self):
            raise error

    with Judges(fresh, nursery=Short()) as judges, judges.take() as sandbox:
        assert sandbox.waits()


def test_one_that_cannot_begin_says_why(nursery, root, shared_store):
    with pytest.raises(RunError, match="ModuleNotFoundError: No module named 'nowhere'"):
        Nursery("x", {"x": "import nowhere"}, nursery.limits, root, shared_store).sandbox()


def test_closing_ends_all_and_asking_starts_again(root, shared_store):
    before = {*os.listdir("/proc/self/fd")}
    nursery = nursery_of_judges(Limits(), root, shared_store)
    assert nursery.first is None
    sandboxes = [nursery.sandbox() for _ in range(3)]
    first = nursery.first
    nursery.close()
    nursery.close()
    assert nursery.first is None and not Path(f"/proc/{first}").exists()
    assert all(sandbox.call("list", {}).end_reason for sandbox in sandboxes)
    with nursery, nursery.sandbox() as sandbox:
        assert not any(
            os.get_inheritable(int(name))
            for name in set(os.listdir("/proc/self/fd")) - before
            if os.path.exists(f"/proc/self/fd/{name}")
        )
        assert sandbox.call("list", {}).ok and nursery.first != first
    for sandbox in sandboxes:
        sandbox.close()
    assert {*os.listdir("/proc/self/fd")} == before


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["it is stopped", "who waits is interrupted"])
def test_one_that_does_not_answer_is_asked_no_more_and_its_sandboxes_go_on(how, root, shared_store, monkeypatch):
    """An answer that comes late would name another sandbox's process, and its memory would be watched in place of that
    of the right one."""
    with nursery_of_judges(Limits(), root, shared_store) as nursery, start_judge(nursery.sandbox()) as sandbox:
        first = nursery.first
        with monkeypatch.context() as patch:
            if how == "it is stopped":
                patch.setattr(nurseries, "FORK", 0.2)
                os.kill(first, signal.SIGSTOP)
            else:
                patch.setattr(socket, "recv_fds", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    nursery.sandbox()
                patch.undo()
            with nursery.sandbox() as other:
                assert nursery.first != first and other.call("list", {}).ok
        said = sandbox.tell(plan_of("def test_it():\n    pass\n", "test_it", 50))
        assert '"passed"' in said.text and Path(f"/proc/{first}").exists()
        nursery.close()
        assert not Path(f"/proc/{first}").exists()


def test_threads_share_one_and_a_forked_process_has_its_own(nursery):
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: nursery.sandbox(), range(6))]
    assert len({one.first for one in found}) == 6 and all(one.call("list", {}).ok for one in found)
    first = nursery.first
    child = os.fork()
    if not child:
        ours = nursery.first
        nursery.close()
        found[0].close()
        os._exit(0 if ours is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nursery.first == first and found[0].call("list", {}).ok
    for one in found:
        one.close()
