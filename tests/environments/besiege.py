"""Opens a sandbox, plays attempts in it, and prints what each got. A process of its own, so that any user can be the one who asks.

It is started as `besiege.py FILE` with a JSON file that names the kind of sandbox, the root, the store, the folders of code, and the attempts.
"""

import json
import sys
from pathlib import Path


def main():
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, asked["code"])
    from environments.sandbox.interface import Limits
    from environments.sandbox.open import open_sandbox
    from environments.sandbox.store import Store

    how = {"root": Path(asked["root"]), "store": Store(Path(asked["store"])), "limits": Limits(output=1 << 20, seconds=300.0)}
    with open_sandbox(Path(asked["tree"]), asked["kind"], **how) as sandbox:
        inside = {**asked["at"], "own": "/work", "server": 1, "outside": False}
        for path, text in (("runner.py", Path(asked["runner"]).read_text()), ("asked.json", json.dumps({"at": inside, "codes": asked["codes"]}))):
            assert sandbox.call("write", {"path": path, "text": text}).ok
        heard = sandbox.call("shell", {"command": "python3 -I runner.py asked.json"})
        again = sandbox.call("list", {})
        print(json.dumps({"text": heard.text, "ended": heard.ended, "lives": again.ok}))


main()
