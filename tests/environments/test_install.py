"""Folders are set up in sandboxes: what is tried, what is kept, what is said where it cannot be done, and what a
hostile package gets."""

import io
import json
import zipfile
from functools import partial
from pathlib import Path

import pytest

from environments.harness.messages import Reply
from environments.harness.scripted import Script, call
from environments.install.attempt import Outcome, explain_failure, revised, run_attempts
from environments.install.propose import BUILT_HERE, VENV
from environments.install.steps import Step
from environments.install.wheels import make_install_files, wheel
from environments.sandbox.interface import Observation
from etude.tasks.install import hosts_of, install, policy_of
from kit.disk import read_lines
from kit.settings import RunError
from tests.environments.planted import planted
from tests.environments.siege import REPOSITORY

HOSTILE = """
import os, socket, urllib.request
from setuptools import setup
said = []
def tried(what):
    try:
        said.append(str(what()))
    except Exception as error:
        said.append(type(error).__name__)
tried(lambda: open({marker!r}).read())
tried(lambda: open({writable!r} + "/written", "w"))
tried(lambda: os.kill({process}, 9))
tried(lambda: socket.create_connection(("127.0.0.1", {port}), 2).recv(100))
tried(lambda: urllib.request.urlopen("http://127.0.0.1:{port}/").read())
tried(lambda: urllib.request.urlopen(urllib.request.Request("http://pypi.index/simple/", b"planted", \
{{"Cookie": "planted"}})).read())
open("/work/said", "w").write(" ".join(said))
setup(name="app", version="1", py_modules=["app"])
"""
TESTED = """
import app, dep

def test_dep():
    assert dep.X == 1

def test_what_the_package_got():
    assert open("/work/said").read() == \
"FileNotFoundError FileNotFoundError ProcessLookupError ConnectionRefusedError HTTPError HTTPError"
"""


def made_wheel(folder, name):
    """A wheel with one module."""
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "X = 1\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{about}/RECORD": "".join(f"{path},,\n" for path in files)}.items():
            archive.writestr(path, text)


def laid_out(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_a_hostile_package_and_a_dependency_from_the_index(root, ask, shared_store, tmp_path):
    """Its setup.py runs in the sandbox alone: it reads, writes, signals and reaches nothing, and then installs what it
    should. What worked is kept; what was tried and what was asked of the index is written down; nothing in the folder
    changes."""
    made_wheel(tmp_path / "wheels", "dep")
    with planted(REPOSITORY, shared_store.folder) as at:
        setup = HOSTILE.format(**{name: at[name] for name in ("marker", "writable", "process", "port")})
        files = {
            "requirements.txt": "dep>=1\n",
            "setup.py": setup,
            "app.py": "",
            "test_app.py": TESTED,
            ".env": "planted",
            ".git/config": "planted",
        }
        app, out, index = (
            laid_out(tmp_path / "app", files),
            tmp_path / "out" / "app.json",
            ("--index", tmp_path / "wheels"),
        )
        code, said, wrong = ask("tasks", "install", app, *index, "--out", out)
        assert code == 0 and "6 steps work, after 1 try" in said, said + wrong
        assert (
            at["secret"]
            not in out.with_suffix(".tried.jsonl").read_text() + out.with_suffix(".requests.jsonl").read_text()
        )
        assert not [*Path(at["writable"]).iterdir()] and Path(f"/proc/{at['process']}").exists()
    commands = [step["command"] for step in json.loads(out.read_text())["steps"]]
    assert commands == [VENV.command, "pip install -r requirements.txt", f"{BUILT_HERE} -e .", "", "", ""]
    lines = read_lines(out.with_suffix(".tried.jsonl"))
    assert [line["kind"] for line in lines] == ["begin", "proposed", *["step"] * 12, "end"]
    assert [line["passed"] for line in lines if line["kind"] == "step"] == [False] * 3 + [True] + [False] * 2 + [
        True
    ] * 6
    asked = read_lines(out.with_suffix(".requests.jsonl"))
    allowed = {line["path"] for line in asked if line["verdict"] == "allowed"}
    assert allowed == {"/simple/dep/", "/files/dep-1.0-py3-none-any.whl"}
    assert {(line["method"], line["status"]) for line in asked if line["verdict"] != "allowed"} == {
        ("GET", 400),
        ("POST", 405),
    }
    assert sorted(path.name for path in app.iterdir()) == sorted({path.partition("/")[0] for path in files})
    code, _, wrong = ask("tasks", "install", app, *index, "--out", out)
    assert code == 2 and wrong.count("\n") == 1 and "already exists; --again" in wrong


def test_a_dependency_that_is_nowhere(ask, tmp_path):
    """One clear line, and nothing kept but what was tried."""
    made_wheel(tmp_path / "wheels", "dep")
    app, out = laid_out(tmp_path / "app", {"requirements.txt": "nosuch>=1\n"}), tmp_path / "app.json"
    code, _, wrong = ask("tasks", "install", app, "--index", tmp_path / "wheels", "--out", out)
    assert code == 2 and wrong.count("\n") == 1 and not out.exists()
    assert (
        "is not set up after 1 try: `pip install -r requirements.txt`: No matching distribution found for nosuch>=1; "
        in wrong
    )
    assert read_lines(out.with_suffix(".tried.jsonl"))[-1] == {"kind": "end", "good": False, "tries": 1}


def test_a_model_proposes_and_installs(root, ask, tmp_path):
    """Two runs of the harness. The checks of the first are those that count, whatever the second says; only commands
    that it names are played."""
    first = [
        {"command": "false", "check": "test -e made", "needed": False},
        {"command": "", "check": "python3 -c 'import app, made.mod'"},
    ]
    claims = ["mkdir -p made", "touch made/mod.py"]
    policy = Script(
        [
            Reply(
                "",
                (
                    call("list"),
                    call("write", path=".install/steps.json", text=json.dumps(first)),
                    call("finish", message="proposed"),
                ),
            ),
            Reply("", (call("shell", command="mkdir made; touch made/mod.py; python3 -c 'import app, made.mod'"),)),
            Reply(
                "",
                (
                    call("write", path=".install/worked.json", text=json.dumps(claims[:1])),
                    call("finish", message="all is well"),
                ),
            ),
            Reply(
                "", (call("write", path=".install/worked.json", text="[1, "), call("finish", message="this is no list"))
            ),
            Reply(
                "",
                (
                    call("write", path=".install/worked.json", text=json.dumps(claims)),
                    call("finish", message="now it is"),
                ),
            ),
        ]
    )
    app, out = laid_out(tmp_path / "app", {"app.py": ""}), tmp_path / "runs" / "app.json"
    found = install(app, None, out, 4, policy, "a script")
    assert found.good and found.tries == 4 and policy.reply_count == 5
    kept = json.loads(out.read_text())["steps"]
    assert [step["command"] or step["check"] for step in kept] == [*claims, *(step["check"] for step in first)]
    assert sorted(path.name for path in (tmp_path / "runs" / "app").iterdir()) == [
        "propose-1.jsonl",
        *(f"try-{n}.jsonl" for n in (1, 2, 3)),
    ]
    second = read_lines(tmp_path / "runs" / "app" / "try-2.jsonl")[0]["prompt"]
    assert (
        "No module named 'made.mod'" in second
        and "worked: mkdir -p made" in second
        and "no network and no index" in second
    )
    code, said, wrong = ask("tasks", "install", app, "--replay", out)
    assert (
        code == 0
        and "all 4 steps work; the result is the recorded tree" in said
        and json.loads(out.read_text())["steps"] == kept
    ), wrong
    laid_out(app, {"app.py": "raise SystemExit('broken')"})
    code, _, wrong = ask("tasks", "install", app, "--replay", out)
    assert (
        code == 2
        and wrong.count("\n") == 1
        and "a recorded step fails now: `python3 -c 'import app, made.mod'`: broken" in wrong
    )
    with pytest.raises(RunError, match="the model proposes no steps: steps must be a list"):
        install(
            app, None, tmp_path / "other.json", 3, Script([Reply("", (call("finish", message="done"),))]), "a script"
        )


def test_an_index_at_an_address_that_is_not_public(root, tmp_path):
    """pip would say that there is no such package; the line says what the door had against it."""
    steps = [
        {"command": "", "check": "python3 -c 'import urllib.request as u; u.urlopen(\"http://pypi.index/simple/\")'"}
    ]
    reply = Reply(
        "", (call("write", path=".install/steps.json", text=json.dumps(steps)), call("finish", message="proposed"))
    )
    with pytest.raises(
        RunError,
        match=r"HTTP Error 502: .*; the index: localhost leads to .*no public address \(--private-index allows it\)",
    ):
        install(
            laid_out(tmp_path / "app", {"a.py": ""}),
            "http://localhost:1/simple",
            tmp_path / "app.json",
            1,
            Script([reply]),
            "a script",
        )


class Told:
    """A sandbox in which a word is known to work behind others: `rules` has for each what it needs, and what is said
    where that is missing."""

    def __init__(self, rules):
        self.rules, self.done = rules, set()

    def call(self, tool, args, timeout=None):
        word = args["command"].partition("\n")[2]
        needs, text = self.rules.get(word, ((), ""))
        if not {*needs} <= self.done:
            return Observation(text, False, 1)
        self.done.add(word)
        return Observation("", True, 0)

    def snapshot(self):
        return "tree"

    def fork(self, snapshot):
        raise AssertionError

    def close(self):
        pass


def test_modules_that_are_missing_are_installed_once():
    """Under the name of their distribution, and never one that the folder has itself: an index may hold another package
    of that name."""
    rules = {
        "check": (
            ("pip install PyYAML", "pip install other"),
            "No module named 'yaml'\nNo module named 'other.part'\nNo module named 'mine'",
        ),
        "mine": (("never",), "No module named 'mine'"),
    }
    steps = [Step("", "check"), Step("", "mine", needed=False)]
    found = run_attempts(steps, partial(Told, rules), partial(revised, {"mine"}), 5)
    assert found.good and found.tries == 2
    assert [one.step.command for one in found.outcomes] == ["pip install PyYAML", "pip install other", "", ""]
    assert [one.passed for one in found.outcomes] == [True, True, True, False]
    rules["check"] = (("never",), "No module named 'yaml'")
    assert run_attempts(steps, partial(Told, rules), partial(revised, {"mine"}), 5).tries == 2  # nothing is left to try


def test_what_an_index_lacks_to_build_and_to_test_with():
    no = "ERROR: none\nERROR: No matching distribution found for "
    rules = {"pip install -e '.[test]'": (("never",), f"{no}x"), "pip install -e .": (("never",), f"{no}wheel")}
    rules["check"] = ((f"{BUILT_HERE} -e .",), "")
    heard = []
    found = run_attempts(
        [Step("pip install -e '.[test]'", "check")],
        partial(Told, rules),
        partial(revised, ()),
        5,
        lambda *one: heard.append(one),
    )
    assert found.good and found.tries == 3 and [number for number, _ in heard] == [0, 1, 2, 3]
    assert explain_failure(heard[1][1]) == "No matching distribution found for x" and heard[1][1].check is None


@pytest.mark.parametrize(
    "command, check, good", [("any", "true", False), ("any", "after", True), ("any", "", False), ("x", "x", False)]
)
def test_checks_that_pass_before_tell_nothing(command, check, good):
    assert (
        run_attempts([Step(command, check)], partial(Told, {"after": (("any",), "")}), lambda *_: None, 2).good == good
    )


def test_why_a_step_did_not_work_is_one_line():
    def said(text):
        return explain_failure(Outcome(Step("a", ""), 1, None, text, 0.0))

    assert said("") == "it says nothing" and said("a\nlast \x1b[31m\n\n") == "last \\x1b[31m"


def test_indices():
    """A folder, or an address; what belongs to no index is said in one line."""
    hosts, pages = hosts_of("https://pypi.org/simple", False)
    assert {name: host.upstream for name, host in hosts.items()} == {
        "pypi.index": "https://pypi.org",
        "files.index": "https://files.pythonhosted.org",
    }
    assert (
        pages == "/simple/" and hosts_of("http://127.0.0.1:8080/root/pypi/+simple/", True)[1] == "/root/pypi/+simple/"
    )
    for index in ("nowhere", "https://user:word@a.test/simple", "ftp://a.test/", "https://[::1"):
        with pytest.raises(RunError, match="--index"):
            hosts_of(index, False)
    for address, name in (("http://localhost:1", ""), ("localhost:1", "a")):
        with pytest.raises(RunError, match="--name NAME|no address of a model"):
            policy_of(address, name, {})


def test_wheels_of_this_environment():
    """They are whole; where there is no index, pip is told so."""
    name, data = wheel("iniconfig") or pytest.fail("pytest has come without what it needs")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        rows = {
            line.partition(",")[0]
            for path in archive.namelist()
            if path.endswith("/RECORD")
            for line in archive.read(path).decode().split()
        }
        assert rows == {*archive.namelist()} and "iniconfig/__init__.py" in rows
    assert name.startswith("iniconfig-") and wheel("no-such-distribution") is None
    closed, open_ = (make_install_files(index)[".install/pip.conf"].decode() for index in (None, "/simple/"))
    assert "no-index = true" in closed and "proxy" not in closed
    assert "index-url = http://pypi.index/simple/\n" in open_ and "proxy = http://127.0.0.1:3128\n" in open_
