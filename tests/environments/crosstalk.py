"""Sandboxes of one nursery beside each other and after each other: what one gets of another, and what it leaves. It
prints what was seen.

It is started as `crosstalk.py FILE` with a JSON file that names the root, the store and the folder of code, so that any
user can be the one who asks. Every target is a sandbox that was made here.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

SECRET = "planted-314159"
SEARCH = f"""
import os, socket

def search():
    found = [folder for folder in ("/work", "/tmp", "/dev/shm", "/base", "/run") if os.path.exists(folder + "/secret")]
    for name, family, address in (("loopback", socket.AF_INET, ("127.0.0.1", 5555)), \
("abstract", socket.AF_UNIX, chr(0) + {SECRET!r})):
        try:
            socket.socket(family).connect(address)
            found.append(name)
        except OSError:
            pass
    return found
"""
PLANT = f"""{SEARCH}
import sys
for folder in ("/work", "/tmp", "/dev/shm"):
    open(folder + "/secret", "w").close()
kept = [socket.create_server(("127.0.0.1", 5555)), socket.socket(socket.AF_UNIX)]
kept[1].bind(chr(0) + {SECRET!r})
kept[1].listen()
print(*search(), flush=True)
sys.stdin.read()
"""
ATTACK = (
    SEARCH
    + """
import ctypes, fcntl, json, pytest, signal, subprocess, sys, time
from pathlib import Path

def test_attack():
    judge = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
    own = {1, os.getpid(), os.getppid(), judge}
    found = {"found": search(), "seen": sorted({int(n) for n in os.listdir("/proc") if n.isdigit()} - own), \
"signalled": []}
    for number in set(range(2, 2000)) - own:
        try:
            os.kill(number, 0)
            found["signalled"].append(number)
        except OSError:
            pass
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.killpg(0, signal.SIGUSR1)
    found["session"] = [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), \
os.getsid(os.getppid()) == os.getppid()]
    libc = ctypes.CDLL(None)
    found["traced"] = [number for number in own if libc.ptrace(16, number, None, None) == 0]
    found["opened"] = []
    for number in own - {os.getpid()}:
        for part in ("mem", "fd/0", "fd/1", "environ", "root"):
            try:
                os.close(os.open(f"/proc/{number}/{part}", os.O_RDONLY | os.O_NONBLOCK))
                found["opened"].append(f"{number} {part}")
            except OSError:
                pass
    handles = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    kinds = sorted(os.readlink(path).partition(":")[0] for path in handles if os.path.lexists(path))
    found["handles"] = [kind for kind in kinds if kind not in ("/dev/null", "pipe")] + [kinds.count("pipe")]
    found["shared"] = [line for line in open("/proc/self/maps") if line.split()[1].endswith("s")]
    found["above"] = []
    for kind, request in (("user", 0xB701), ("user", 0xB702), ("pid", 0xB702)):
        try:
            found["above"].append([kind, fcntl.ioctl(os.open("/proc/self/ns/" + kind, os.O_RDONLY), request)])
        except PermissionError:
            pass
    found["environment"] = sorted(os.environ)
    found["modules"] = sorted(name for name in sys.modules if name.partition(".")[0] in ("inside", "judge", "play"))
    found["marks"] = [hasattr(pytest, "planted"), os.path.exists("/work/marked")]
    pytest.planted = True
    Path("/work/marked").touch()
    open("/work/found.json", "w").write(json.dumps(found))
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (1, 2, 10, 12, 15):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
    os.kill(judge, signal.SIGKILL)
    time.sleep(60)
"""
)
HONEST = (
    SEARCH
    + """
def test_honest():
    import pytest
    open("/tmp/room", "wb").write(bytes(6 << 20))
    assert not hasattr(pytest, "planted") and search() == [] and not os.path.exists("/work/marked")
    assert len([name for name in os.listdir("/proc") if name.isdigit()]) == 4
"""
)
NOTHING = {
    "folder": "/work/exam/tests",
    "tests": {},
    "wanted": [],
    "names": {},
    "folders": ["/work/tree", "/work/tree/src"],
    "support": {},
}
BOMB = "for i in $(seq 200); do sleep 60 & done; wait"


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
    from environments.sandbox.store import Store

    limits = Limits(processes=24, memory=256 << 20, disk=8 << 20, inodes=300, output=1 << 18, seconds=60.0)
    with nursery_of_judges(limits, Path(asked["root"]), Store(Path(asked["store"]))) as nursery:

        def judged(sandbox, source, seconds=50.0, waiting=False):
            """What a judge says of the last test of a text."""
            name = source.rpartition("def test_")[2].partition("(")[0]
            assert waiting or sandbox.begin(JUDGE).ok
            return sandbox.tell(plan_of(source, f"test_{name}", seconds))

        def honest(sandbox=None):
            """Whether an honest test passes, in a new sandbox or in one whose judge waits."""
            with sandbox or nursery.sandbox() as one:
                return '"passed"' in judged(one, HONEST, waiting=sandbox is not None).text

        found = {}
        with nursery.sandbox() as planted, nursery.sandbox() as victim:
            first = nursery.first
            assert victim.begin(JUDGE).ok
            assert planted.call("write", {"path": "plant.py", "text": PLANT}).ok
            found["control"] = planted.begin("exec python3 plant.py").text
            with nursery.sandbox() as attacker:
                said = judged(attacker, ATTACK)
                found["attack"] = {"exit": said.exit, "text": said.text, "ended": said.end_reason}
                found |= json.loads(attacker.call("shell", {"command": "cat found.json"}).text)
                found["left"] = attacker.call("shell", {"command": "ls /proc | grep -c '^[0-9]'"}).text
            found["lives"] = [nursery.first == first, planted.waits(), victim.waits(), honest(victim), honest()]
        with nursery.sandbox() as full:
            found["full"] = [full.call("shell", {"command": "head -c 64M /dev/zero > /tmp/full"}).end_reason, honest()]
        with nursery.sandbox() as bomb:
            heard = []
            thread = threading.Thread(target=lambda: heard.append(bomb.call("shell", {"command": BOMB}).end_reason))
            thread.start()
            found["beside a bomb"] = [honest() for _ in range(2)]
            thread.join()
            found["bomb"] = heard
        with nursery.sandbox() as late:
            found["late"] = judged(late, "def test_late():\n    import time\n    time.sleep(60)\n", 0.5).text
        until = time.monotonic() + 5
        below = Path(f"/proc/{first}/task/{first}/children")
        while below.read_text() and time.monotonic() < until:
            time.sleep(0.01)
        found["below"] = below.read_text()
        with nursery.sandbox() as orphan:
            os.kill(nursery.first, 9)
            found["orphan"] = judged(orphan, HONEST).end_reason if orphan.begin(JUDGE).ok else "ended"
        found["anew"] = [honest(), nursery.first != first]
    print(json.dumps(found))


main()
