"""The judge: starts the process that plays the tests and the one that runs the package, hears the first on a private
pipe, and says the verdicts under seal.

It may be started long before there is anything to grade, since to import pytest takes longer than most tests. It says a
line once the other process has done that, and then waits for its plan on standard input: the key, the tests, and files
of the tree, which it lays. So nothing of a tree is there while anything is imported, and the key and the tests are
never on the disk. No process of the same user can look into the judge, because it lets nobody read its memory, and it
imports nothing of the tree. Of each test the first line counts.

The plan has two parts. "apart" are tests that can be carried over a pipe (remote.py): they run in the examiner, the
package in the examinee, which is ended before the second part begins. "inside" are the others: they run with the
package in one process, and their verdicts come on another pipe.

    python3 -I -B judge.py FOLDER        FOLDER holds play.py, examinee.py, remote.py and fresh.py

In a sandbox of a nursery (environments/sandbox/nursery.py) all are forks of a process that has imported them and
pytest."""

import base64
import ctypes
import hashlib
import hmac
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_DUMPABLE = 4
READY, END, NO_TREE = b"ready\n", b"end\n", 3
"""What is said when a plan may come, and once the first part is played; and how the judge ends where the tree finds no
room."""
BUSY, PATIENCE = 20, 4
"""Tests whose seconds are over, by the wall clock, are ended where they have used less than one of so many; and in any
case after so many times their seconds."""
MAX_OUTPUT = 4 << 20
"""Bytes that the other process may say."""
ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Of the other process."""
EXAM = "/work/exam"
"""The folder in a sandbox of a nursery. Nothing lies in it but the folder of the tests."""


def seal(key: bytes, test: str, outcome: str) -> bytes:
    """As in environments/grading/verdicts.py."""
    body = json.dumps([test, outcome], separators=(",", ":"), ensure_ascii=True)
    return f"{hmac.new(key, body.encode(), hashlib.sha256).hexdigest()} {body}\n".encode()


class Clock:
    """Tells when the time of the tests is over. What counts is the processor time of the sandbox's processes, since a
    crowded machine makes every test slow; but a test that waits for something may wait for ever."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.since = seconds, time.monotonic()
        self.before = self.count_ticks()

    def used(self) -> float:
        """Seconds of processor time since the clock began."""
        return (self.count_ticks() - self.before) / os.sysconf(
            "SC_CLK_TCK"
        )  # whole numbers are subtracted: 30 ticks are 0.3 s at any uptime

    def count_ticks(self) -> int:
        """Clock ticks of all processes, of those, too, that have ended and were waited for."""
        ticks = 0
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        ticks += sum(
                            map(int, file.read().rpartition(b")")[2].split()[11:15])
                        )  # its own, and of children that it has waited for
                except OSError:
                    pass  # it has ended
        return ticks

    def is_over(self) -> bool:
        wall_seconds = time.monotonic() - self.since
        if wall_seconds <= self.seconds:  # nothing is over before that, on however many cores
            return False
        cpu_seconds = self.used()
        return cpu_seconds > self.seconds or cpu_seconds < wall_seconds / BUSY or wall_seconds > PATIENCE * self.seconds


def read_output(reader: int, child: "subprocess.Popen | Forked", clock: Clock, end_marker: bytes = b"") -> bytes:
    """What the child said until it ended, said `end_marker`, or until its time was over. Others may hold the pipe open,
    so its end is not waited for."""
    output = b""
    while len(output) < MAX_OUTPUT and not clock.is_over() and not (end_marker and output.endswith(end_marker)):
        ready, _, _ = select.select([reader], [], [], 0.02)
        if ready:
            block = os.read(reader, 1 << 16)
            if not block:
                break
            output += block
        elif child.poll() is not None:
            break
    return output


def parse_verdicts(output: bytes, answers: bool = False) -> dict[str, str]:
    """The first outcome of each test, and with `answers` the first answer to each question. What is no line of ours
    counts as a test that nobody asked for."""
    outcomes: dict[str, str] = {}
    for line in output.decode(errors="replace").splitlines():
        outcome, _, test = line.partition(" ")
        if outcome in ("passed", "failed", "skipped") and test:
            outcomes.setdefault(test, outcome)
        elif outcome == "answer" and answers:
            number, _, answer = test.partition(" ")
            outcomes.setdefault(f"answer {number}", answer)
        else:
            outcomes.setdefault("a line that is none", "failed")
    return outcomes


def write_files(files: dict[str, str], tree: str) -> None:
    """Lays files of a tree, which are new."""
    for name, data in files.items():
        os.makedirs(os.path.dirname(f"{tree}/{name}"), exist_ok=True)
        with open(f"{tree}/{name}", "xb") as file:
            file.write(base64.b64decode(data))


def start_process(folder: str, program: str, *handles: int) -> subprocess.Popen:
    """A process that runs a program of the folder. It knows nothing yet."""
    return subprocess.Popen(
        [sys.executable, "-I", "-B", f"{folder}/{program}.py", *map(str, handles)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        pass_fds=handles,
        start_new_session=True,
    )


class Forked:
    """The same as a fork of this one, in which all is imported. It has these handles and what it reads from, and no
    other."""

    def __init__(self, folder: str, program: str, *handles: int) -> None:
        self.status: int | None = None
        reader, writer = os.pipe()
        self.stdin = os.fdopen(writer, "wb")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(program, reader, handles)
            finally:
                os._exit(1)
        os.close(reader)

    def poll(self) -> int | None:
        """How it has ended, if it has."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status


def _become(program: str, reader: int, handles: tuple[int, ...]) -> None:
    """As `start_process` does it: a session of its own, little in its environment, and modules under no other names
    than there."""
    os.setsid()
    null_handle = os.open(os.devnull, os.O_RDWR)
    for number, handle in enumerate((reader, null_handle, null_handle)):
        os.dup2(handle, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in handles:
            try:
                os.close(int(name))
            except OSError:
                pass  # that of the folder itself
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    unused_programs = {"judge", "play", "examinee"} - {program}
    for name in unused_programs:
        del sys.modules[name]
    sys.modules["__main__"] = sys.modules.pop(program)
    vars(sys.modules["__main__"])["__name__"] = "__main__"
    sys.modules["__main__"].main(*handles)


def nursed() -> None:
    """In a sandbox of a nursery, which has imported this module and the other programs."""
    os.makedirs(f"{EXAM}/tests")
    main(EXAM, Forked)


def send_plan(child: "subprocess.Popen | Forked", plan: dict, first: bytes) -> None:
    """Tells a process its plan."""
    assert child.stdin is not None
    try:
        child.stdin.write(first + json.dumps(plan).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass


def end_process(child: "subprocess.Popen | Forked") -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while child.poll() is None:  # until it is gone
        time.sleep(0.001)


def main(folder: str, start=start_process) -> None:
    """`start`: gives a process that runs a program."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    (
        (reader, writer),
        (request_reader, request_writer),
        (answer_reader, answer_writer),
        (inner_plan_reader, inner_plan_writer),
        (inner_reader, inner_writer),
    ) = (os.pipe() for _ in range(5))
    examinee = start(folder, "examinee", request_reader, answer_writer)
    child = start(folder, "play", writer, request_writer, answer_reader, inner_plan_reader, inner_writer)
    for handle in (
        writer,
        request_reader,
        request_writer,
        answer_reader,
        answer_writer,
        inner_plan_reader,
        inner_writer,
    ):
        os.close(handle)
    if os.read(reader, len(READY)) != READY:
        sys.exit("the tests cannot be played: pytest is not there")
    os.write(1, READY)
    if reader in select.select([0, reader], [], [])[0]:
        sys.exit(1)  # who shall play is gone, or has said something before it was asked
    plan = json.load(sys.stdin.buffer)
    key = bytes.fromhex(plan["key"])
    apart_plan, inside_plan = plan["apart"], plan["inside"]
    try:
        write_files(plan["files"], plan["tree"])
        clock = Clock(plan["seconds"])
        send_plan(child, apart_plan, b"1" if inside_plan["wanted"] else b"0")
        outcomes = parse_verdicts(read_output(reader, child, clock, END).removesuffix(END), answers=True)
        end_process(examinee)
        if inside_plan["wanted"]:
            write_files(plan["later"], plan["tree"])
            try:
                with os.fdopen(inner_plan_writer, "wb") as stream:
                    stream.write(json.dumps(inside_plan).encode())
            except BrokenPipeError:
                pass  # who shall play is gone
            for test, outcome in parse_verdicts(read_output(inner_reader, child, clock)).items():
                outcomes.setdefault(test, outcome)  # of what was played apart nothing else is believed
    except OSError as error:
        sys.stderr.write(f"the tree cannot be laid: {error}\n")
        sys.exit(NO_TREE)
    for process in (child, examinee):
        end_process(process)
    sys.stdout.buffer.write(b"".join(seal(key, test, outcome) for test, outcome in outcomes.items()))
    sys.stdout.flush()


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
