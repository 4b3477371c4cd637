"""Opens a sandbox, plays attempts in it, and prints what each got. A process of its own, so that any user can be the
one who asks.

It is started as `besiege.py FILE` with a JSON file that names the kind of sandbox, the root, the store, the folders of
code, and the attempts. In a sandbox of the kind "nursery" they are played where graded code runs, by a test, in the
process that plays tests; one that would end the judge, by a command.
"""

import json
import sys
from pathlib import Path

TEST = """
import sys, types

def test_it():
    runner = types.ModuleType("runner")
    exec(open("/work/runner.py").read(), runner.__dict__)
    sys.argv[:] = ["runner", "/work/asked.json"]
    sys.stdout = open("/work/found.json", "w")
    runner.main()
    sys.stdout.close()
"""
EVERYBODY = "processes: signalling every process"
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


def main():
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, asked["code"])
    from environments.grading.ready import JUDGE, nursery_of_judges
    from environments.sandbox.interface import Limits
    from environments.sandbox.open import open_sandbox
    from environments.sandbox.store import Store

    how = {
        "root": Path(asked["root"]),
        "store": Store(Path(asked["store"])),
        "limits": Limits(output=1 << 20, seconds=300.0),
    }
    nursery = nursery_of_judges(**how) if asked["kind"] == "nursery" else None
    with open_sandbox(Path(asked["tree"]), asked["kind"], **how) if nursery is None else nursery.sandbox() as sandbox:
        inside = {**asked["at"], "own": "/work", "server": 1, "outside": False}
        last = {} if nursery is None else {EVERYBODY: asked["codes"].pop(EVERYBODY)}
        files = {
            "asked.json": json.dumps({"at": inside, "codes": asked["codes"]}),
            "last.json": json.dumps({"at": inside, "codes": last}),
        }
        for path, text in {"runner.py": Path(asked["runner"]).read_text(), **files}.items():
            assert sandbox.call("write", {"path": path, "text": text}).ok
        if nursery is None:
            heard = sandbox.call("shell", {"command": "python3 -I runner.py asked.json"})
        else:
            assert sandbox.begin(JUDGE).ok
            heard = sandbox.tell(plan_of(TEST, "test_it", 290))
            assert heard.ok and '["t.py::test_it","passed"]' in heard.text, heard
            heard = sandbox.call("shell", {"command": "cat found.json"})
        found = json.loads(heard.text)
        if last:
            heard = sandbox.call("shell", {"command": "python3 -I runner.py last.json"})
            found |= json.loads(heard.text)
        again = sandbox.call("list", {})
        print(json.dumps({"found": found, "ended": heard.end_reason, "lives": again.ok}))


main()
