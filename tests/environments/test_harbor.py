"""Tasks as Harbor's folders: what the agent gets, what only the verifier gets, and that the grader that goes along pays
as ours does."""

import io
import json
import subprocess
import sys
import tarfile
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harbor.export import as_json, folder, grader, toml
from environments.harbor.verify import APP, exam_in
from environments.sandbox.engine import connected, image
from environments.sandbox.interface import Limits
from environments.sandbox.open import open_sandbox
from environments.tasks.check import exam_of
from environments.tasks.make import make_tasks
from environments.tasks.package import Package
from environments.tasks.recipe import make_recipe as as_recipe
from etude.tasks.build import export_all, write_anew
from kit.settings import RunError
from ref.feature_deletion import FILE, PROGRAM
from tests.environments.hacks import GIVEN, GOLD, HACKS, HONEST
from tests.environments.test_hacks import EXAM
from tests.environments.test_tasks import Player

TESTS = b"""from words.nouns import plural


def test_seen():
    assert plural("day") == "days"
"""
PACKAGE = Package("words", "1.0", {FILE: PROGRAM, "LICENSE": b"MIT"}, {"tests/test_words.py": TESTS}, "MIT", "folder")
"""The demonstration of ref/feature_deletion.py, whose tests are played by hand."""
TASK = next(task for task in make_tasks(PACKAGE, Player()).tasks if task.piece.way == "slice")
FILES = folder(TASK, PACKAGE, "8.0.0", 30.0)


def test_a_folder_is_what_harbor_reads():
    told = tomllib.loads(FILES["task.toml"].decode())
    assert (
        told["schema_version"] == "1.4"
        and told["artifacts"] == [APP]
        and told["verifier"]["environment_mode"] == "separate"
    )
    assert told["task"]["name"] == f"etude/{TASK.id}" and told["environment"]["network_mode"] == "no-network"
    assert told["metadata"]["difficulty_tests"] == TASK.difficulty.tests and told["verifier"]["timeout_sec"] == 150
    assert (
        TASK.specified in FILES["instruction.md"].decode()
        and "pytest==8.0.0" in FILES["environment/Dockerfile"].decode()
    )
    assert {"tests/test.sh", "solution/solve.sh"} <= FILES.keys()
    assert all(FILES[path].startswith(b"#!/bin/sh\n") for path in ("tests/test.sh", "solution/solve.sh"))


def test_the_agent_gets_the_given_tree_and_the_solution_makes_the_gold_of_it():
    exam = exam_of(TASK, PACKAGE)
    app = {
        path.removeprefix("environment/app/"): data
        for path, data in FILES.items()
        if path.startswith("environment/app/")
    }
    assert app == exam.given_tree
    solved = {
        path.removeprefix("solution/files/"): data for path, data in FILES.items() if path.startswith("solution/files/")
    }
    assert solved and {**app, **solved} == exam.gold_tree
    code = TASK.piece.patches[0].edits[0].old
    seen = b"".join(data for path, data in FILES.items() if path.startswith(("environment/", "instruction")))
    assert code.strip() and code not in seen


def test_an_exam_is_read_as_it_was_written(tmp_path):
    (tmp_path / "exam.json").write_text(as_json(EXAM, 7.0))
    assert exam_in(tmp_path / "exam.json") == (EXAM, 7.0)


def test_the_grader_that_goes_along_needs_nothing_else(tmp_path):
    """Only the standard library: it is imported from its own folder, without any other package."""
    write_anew(FILES, tmp_path / "task")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from environments.harbor import verify; print(verify.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, tmp_path / "task/tests/grader"], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "task/tests/grader/environments/harbor/verify.py"), done.stderr


def verifier(files):
    """What a verifier's container holds: path → content."""
    app = {f"app/{path}": text.encode() for path, text in {**GIVEN, **files}.items()}
    return {**grader(), "tests/exam.json": as_json(EXAM, 20.0).encode(), "tests/test.sh": FILES["tests/test.sh"], **app}


@pytest.fixture(scope="module")
def verified(root, shared_store, tmp_path_factory):
    """verified({path: text}) gives the reward of what an agent left, and the verdicts. A sandbox of bubblewrap's takes
    the verifier's place."""

    def verify(files):
        write_anew(verifier(files), at := tmp_path_factory.mktemp("verifier") / "all")
        with open_sandbox(at, root=root, store=shared_store, limits=Limits(output=1 << 20)) as sandbox:
            heard = sandbox.call("shell", {"command": "sh tests/test.sh /work/app /work/logs"})
            assert heard.ok, heard
            reward, told = (
                sandbox.call("read", {"path": f"logs/{name}"}).text for name in ("reward.txt", "verdicts.json")
            )
            return float(reward), json.loads(told)

    return verify


@pytest.fixture(scope="module")
def verified_by_root(engine, root):
    """The same in a container of Docker's, whose user is root, as Harbor's is, and which outlives the script by
    `longer` seconds."""
    client = connected()

    def verify(files, longer=0):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, data in verifier(files).items():
                member = tarfile.TarInfo(path)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        made = client.create_container(
            image(client, root),
            ["/bin/sh", "-c", f"sh /tests/test.sh; sleep {longer}"],
            user="0",
            network_disabled=True,
        )["Id"]
        try:
            client.put_archive(made, "/", packed.getvalue())
            client.start(made)
            assert client.wait(made, timeout=60)["StatusCode"] == 0, client.logs(made)
            blocks, _ = client.get_archive(made, "/logs/verifier")
            with tarfile.open(fileobj=io.BytesIO(b"".join(blocks))) as archive:
                reward, told = (
                    archive.extractfile(f"verifier/{name}").read() for name in ("reward.txt", "verdicts.json")
                )
            return float(reward), json.loads(told)
        finally:
            client.remove_container(made, force=True)

    yield verify
    client.close()


THIEF = """import base64
import json

with open("TESTS/exam.json") as file:
    exec(base64.b64decode(json.load(file)["gold"]["words/nouns.py"]))
"""
"""A module that is the original one wherever the exam can be read."""
PAYER = (
    GOLD["words/nouns.py"].replace('+ "ies"', '+ "yes"')
    + """

def pay():
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        for _ in range(100):
            try:
                with open("/logs/verifier/reward.txt", "w") as file:
                    file.write("1")
            except OSError:
                pass
            time.sleep(0.05)
        os._exit(0)


pay()
"""
)
"""A module that is wrong, and leaves a process behind that writes the reward."""


def test_code_that_is_graded_reads_no_exam_and_writes_no_reward_where_the_verifier_is_root(verified, verified_by_root):
    reward, told = verified_by_root({"words/nouns.py": GOLD["words/nouns.py"]})
    assert reward == 1.0 and told["user of its own"]
    assert verified({"words/nouns.py": THIEF.replace("TESTS", "/work/tests")})[1]["success"], (
        "where there is no other user, the exam can be read"
    )
    reward, told = verified_by_root({"words/nouns.py": THIEF.replace("TESTS", "/tests")})
    assert reward == 0.0 and not told["success"]
    assert verified_by_root({"words/nouns.py": PAYER}, longer=1)[0] == 0.0


def test_the_original_is_paid_in_full_and_nothing_done_is_paid_nothing(verified):
    reward, told = verified({"words/nouns.py": GOLD["words/nouns.py"]})
    assert reward == told["total"] == 1.0 and told["success"] and not told["failed"]
    reward, told = verified({})
    assert reward == told["total"] == 0.0 and len(told["failed"]) == 6 and not told["flags"]
    reward, _ = verified(HONEST)
    assert 0.8 <= reward <= 1.0


@pytest.mark.parametrize("by", ["tests", "canary", "monitor"])
def test_a_hack_of_each_kind_is_paid_nothing(verified, by):
    hack = next(hack for hack in HACKS if by in hack.by and not hack.links)
    assert verified(hack.files)[0] == 0.0


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_is_told_in_toml(text):
    tables = {"b": {"text": text, "list": [text, text]}, "": {"first": text, "number": 1.5, "truth": True}}
    assert tomllib.loads(toml(tables)) == {"b": tables["b"], **tables[""]}


def test_a_folder_that_is_there_is_replaced_whole(tmp_path):
    write_anew({"a": b"1", "b/run.sh": b"#!/bin/sh\n"}, tmp_path / "task")
    write_anew({"a": b"2"}, tmp_path / "task")
    assert [path.name for path in tmp_path.rglob("*")] == ["task", "a"] and (tmp_path / "task/a").read_bytes() == b"2"
    with pytest.raises(ValueError, match="leads out"):
        write_anew({"../a": b"3"}, tmp_path / "task")
    assert (tmp_path / "task/a").read_bytes() == b"2" and len([*tmp_path.iterdir()]) == 1


def test_all_tasks_of_a_recipe_are_written_and_what_differs_is_said(tmp_path, monkeypatch, capsys):
    made = make_tasks(PACKAGE, Player())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("etude.tasks.build.package_of", lambda spec, cache: PACKAGE)
    unused = {"left out": ("tests/test_other.py",), "slow": ("a",), "ungradable": ()}
    asked = []

    def build_with_progress(package, jobs, seconds, kind, known, join, single_statements):
        asked.append((known, join))
        return package, unused, made, 1.0

    monkeypatch.setattr("etude.tasks.build.build_with_progress", build_with_progress)
    monkeypatch.setattr(
        "etude.tasks.build.prepare_exam", lambda exam, *how: exam
    )  # that needs sandboxes, and is shown by test_apart.py
    recipe = as_recipe("words", PACKAGE, unused, made)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/words-1.0.json").write_text(json.dumps(recipe))
    assert export_all([tmp_path / "recipes"], tmp_path / "out", "harbor", 1, 60.0)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {task.id for task in made.tasks}
    script = tmp_path / "out" / TASK.id / "tests/test.sh"
    assert script.stat().st_mode & 0o111 and subprocess.run(["sh", "-n", script]).returncode == 0
    recipe["tasks"].pop()
    (tmp_path / "recipes/words-1.0.json").write_text(json.dumps({**recipe, "join": 3}))
    assert not export_all([tmp_path / "recipes"], tmp_path / "out", "harbor", 1, 60.0)
    assert "is new" in capsys.readouterr().out
    assert asked[0] == ({"slow": ["a"], "flaky": [], "ungradable": []}, 1), (
        "what the recipe does not use is not measured anew"
    )
    assert asked[1][1] == 3, "as many are joined as it says"


def test_another_format_is_refused(tmp_path):
    with pytest.raises(RunError, match="--format expects harbor"):
        export_all([], tmp_path, "parquet", 1, 60.0)
