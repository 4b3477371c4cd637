"""A door out of sandboxes that have no network: it takes requests at a socket within a sandbox, and judges, answers and
writes down each.

A sandbox keeps its network namespace, in which there is nothing but loopback. Its first process opens a listening
socket there, before any code of a task is near, and hands it out; this process accepts what connects to it. So no
process inside stands in the middle, no file of this machine is mounted, and a sandbox without a door has nothing to
reach. Programs inside use it as a proxy, 127.0.0.1:3128.

    with Door(Rules({"pypi.index": Host(Path("wheels"))}), Path("requests.jsonl")) as door, open_sandbox(tree,
    door=door) as sandbox:
        sandbox.call("shell", {"command": "…/pip install --proxy $http_proxy --index-url http://pypi.index/simple/ …"})

The log has a line for each connection, written before anything goes in: time, sandbox, what was asked, verdict
(allowed, refused, failed), why, status, bytes, seconds, and the names of headers that were dropped; never their values.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from environments.deadline import Deadline
from environments.egress.rules import HEAD, Refused, Rules, check_request
from environments.egress.upstream import Answer, answer_request
from environments.sandbox.inside.places import PROXY
from environments.sandbox.visible import one_line
from kit.disk import Journal

__all__ = ["Door"]

WAIT = 10.0
"""Seconds for which a connection may say nothing."""


class Door:
    """See the top of this file. It may serve several sandboxes, by threads of this process."""

    environment = {"http_proxy": f"http://{PROXY[0]}:{PROXY[1]}"}
    """What commands in a sandbox with a door are told."""

    def __init__(self, rules: Rules, log: Path) -> None:
        """Requests are written to `log`, behind what stands there. Raises OSError where it cannot be written."""
        self.rules, self.lock = rules, threading.Lock()
        self.sandboxes = self.requests = self.bytes = 0
        self.leaving: dict[int, Callable[[], None]] = {}
        self.journal: Journal | None = Journal(log)
        if self.journal.torn():
            self.journal.append(b"\n")

    def serve(self, listener: socket.socket) -> Callable[[], None]:
        """Answers what connects to a listening socket, until what this gives is called, or the door is closed."""
        with self.lock:
            self.sandboxes += 1
            number = self.sandboxes
        thread = threading.Thread(target=self._accept, args=(listener, number), daemon=True, name=f"door {number}")
        thread.start()

        def leave() -> None:
            self.leaving.pop(number, None)
            try:
                listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
            except OSError:
                pass
            listener.close()

        self.leaving[number] = leave
        return leave

    def close(self) -> None:
        """No more requests. What is under way ends without an answer that could not be written down."""
        for leave in [*self.leaving.values()]:
            leave()
        with self.lock:
            if self.journal is not None:
                self.journal.close()
                self.journal = None

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket, number: int) -> None:
        slots = threading.BoundedSemaphore(self.rules.together)
        while True:
            slots.acquire()
            try:
                guest, _ = listener.accept()
            except OSError:
                return
            with self.lock:
                self.requests += 1
                is_exhausted = self.requests > self.rules.requests
            if is_exhausted:
                self._log({"sandbox": number, "verdict": "closed", "why": f"more than {self.rules.requests} requests"})
                guest.close()
                listener.close()
                return
            threading.Thread(
                target=self._serve, args=(guest, number, slots), daemon=True, name=f"door {number}"
            ).start()

    def _serve(self, guest: socket.socket, number: int, slots: threading.BoundedSemaphore) -> None:
        since, line, answer = time.monotonic(), {"sandbox": number, "verdict": "allowed"}, None
        try:
            with guest, Deadline(self.rules.seconds) as deadline:
                deadline.watch(guest, socket.SHUT_RD)  # who was late is still told so
                try:
                    answer = self._answer(guest, line, deadline)
                    line |= {"status": answer.status, "bytes": answer.size}
                except (Refused, OSError, ValueError, http.client.HTTPException) as error:
                    line |= self._describe_failure(error, deadline)
                if self._log(line | {"seconds": round(time.monotonic() - since, 3)}):
                    with Deadline(self.rules.seconds) as write_deadline:
                        write_deadline.watch(guest)
                        _write_response(guest, answer, line)
        except OSError:
            pass  # the guest has left, or what happened could not be written down
        finally:
            if answer is not None:
                answer.body.close()
            slots.release()

    def _describe_failure(self, error: Exception, deadline: Deadline) -> dict[str, object]:
        """What is written down where nothing goes in."""
        about = error.about if isinstance(error, Refused) else {}
        # a socket waits as long as the deadline, and may be first; a timeout of the system's own has an errno
        has_waited = isinstance(error, TimeoutError) and error.errno is None
        if deadline.late or has_waited:
            return {**about, "verdict": "failed", "why": f"more than {self.rules.seconds:g} seconds", "status": 504}
        if isinstance(error, Refused):
            return {**about, "verdict": "refused", "why": error.reason, "status": error.status}
        return {"verdict": "failed", "why": one_line(str(error)) or type(error).__name__, "status": 502}

    def _answer(self, guest: socket.socket, line: dict, deadline: Deadline) -> Answer:
        """Raises Refused, OSError, ValueError and http.client.HTTPException. `line`: what is found of the request."""
        request = check_request(_head(guest), self.rules)
        line |= {
            "method": request.method,
            "host": request.host,
            "path": request.path[:300],
            "dropped": [*request.dropped],
        }
        with self.lock:
            remaining = self.rules.total - self.bytes
        if remaining <= 0:
            raise Refused(429, f"more than {self.rules.total} bytes came in")
        answer = answer_request(request, self.rules, min(self.rules.largest, remaining), deadline.watch)
        if deadline.late:
            answer.body.close()
            raise TimeoutError
        with self.lock:
            self.bytes += answer.size
        return answer

    def _log(self, line: dict) -> bool:
        """Writes a line; whether it is there."""
        with self.lock:
            if self.journal is None:
                return False
            self.journal.append(json.dumps({"at": round(time.time(), 3), **line}).encode() + b"\n")
            return True


def _head(guest: socket.socket) -> bytes:
    """A request up to its empty line. Raises Refused, and OSError for a guest that says nothing."""
    data = b""
    guest.settimeout(WAIT)
    while b"\r\n\r\n" not in data:
        if len(data) > HEAD:
            raise Refused(431, f"a request has at most {HEAD} bytes")
        if not (block := guest.recv(4096)):
            raise Refused(400, "this is no request", {"said": data[:200].decode("latin-1")})
        data += block
    return data.partition(b"\r\n\r\n")[0]


def _write_response(guest: socket.socket, answer: Answer | None, line: dict) -> None:
    status = line["status"]
    text = b"" if answer else f"{line['why']}\n".encode("ascii", "backslashreplace")
    headers = {"content-type": "text/plain"} if answer is None else dict(answer.headers)
    headers |= {"content-length": str(answer.size if answer else len(text)), "connection": "close"}
    reason = http.client.responses.get(status, "Answer")
    guest.sendall(
        f"HTTP/1.1 {status} {reason}\r\n".encode()
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        + b"\r\n"
    )
    if line.get("method") == "HEAD":
        return
    if answer is None:
        guest.sendall(text)
        return
    with guest.makefile("wb") as file:
        shutil.copyfileobj(answer.body, file, 1 << 16)
