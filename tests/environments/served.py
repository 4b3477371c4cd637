"""A model behind an OpenAI-compatible address on loopback: it says what a script says, or breaks as it says."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["CUT", "SILENT", "answer", "serving"]

CUT, SILENT = "cut", "silent"
"""Instead of an answer: the connection is cut in its middle; nothing comes."""


def answer(text="", *calls, usage=(100, 7), **more) -> dict:
    """Of chat completions. `calls`: name and arguments, which are sent as they are where they are text."""
    made = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
        }
        for n, (name, args) in enumerate(calls)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "tool_calls": made},
        "finish_reason": "stop",
        **more,
    }
    return {"choices": [choice], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}


def _readable(call: dict) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except ValueError:
        return False


@contextmanager
def serving(say: Callable[[int, dict], object]):
    """say(number of the request, what was asked) → an answer; or a status with a text; or bytes; or CUT or SILENT.
    Gives the address and the requests so far, each with its headers."""
    asked: list[tuple[dict, dict]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((body, dict(self.headers)))
            said, status = say(len(asked) - 1, body), 200
            if not all(_readable(call) for message in body["messages"] for call in message.get("tool_calls", ())):
                said = 400, "arguments in the history must be JSON objects"  # as vLLM and llama.cpp do
            if said == SILENT:
                over.wait(20)
                return
            if isinstance(said, tuple):
                status, said = said
            data = (
                said
                if isinstance(said, bytes)
                else said.encode()
                if isinstance(said, str) and said != CUT
                else json.dumps(said).encode()
            )
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", data.decode())
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data) + 100 * (said == CUT)))
            self.end_headers()
            self.wfile.write(data)
            if said == CUT:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            over.set()
            server.shutdown()
