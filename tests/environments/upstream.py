"""A server on loopback behind a door: it gives what a path asks for, or breaks, and remembers all that it was asked."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["answering"]


@contextmanager
def answering(other: str = ""):
    """Gives the server's address, and what it was asked: (method, path, headers). `other`: an address that it redirects
    to."""
    heard: list[tuple[str, str, dict]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            heard.append(("HEAD", self.path, dict(self.headers)))
            self._begin(200, **{"Content-Length": "1234", "Content-Type": "text/html"})

        def do_GET(self):
            heard.append(("GET", self.path, dict(self.headers)))
            here = f"http://127.0.0.1:{self.server.server_port}"
            if self.path == "/away":
                self._begin(302, Location=f"{other}/secret")
            elif self.path == "/tricky":
                self._begin(302, Location=f"{here}@{other.removeprefix('http://')}/secret")
            elif self.path == "/near":
                self._begin(302, Location="plain")
            elif self.path == "/claims":
                self._begin(200, **{"Content-Length": str(10**12)})
            elif self.path == "/endless":
                self._begin(200)
                while not over.is_set():
                    self.wfile.write(b"x" * 65536)
            elif self.path in ("/slow", "/silent", "/dribbles"):
                if self.path != "/silent":
                    self._begin(200, **({"Content-Length": "1000"} if self.path == "/slow" else {}))
                while not over.wait(0.05) and self.path != "/silent":
                    self.wfile.write(b"x")
                over.wait(20)
            elif self.path == "/short":
                self._begin(200, **{"Content-Length": "1000"})
                self.wfile.write(b"x")
            elif self.path == "/packed":
                self._begin(200, **{"Content-Encoding": "gzip"})
            elif self.path == "/page":
                self._begin(200, **{"Content-Type": "text/html", "Set-Cookie": "a=b"})
                self.wfile.write(
                    f'<a href="{here}/files/a.whl">a</a><a href="{other}/b.whl">b</a><a href="{here}0/c">c</a>'.encode()
                )
            else:
                self._begin(
                    200, **{"Content-Type": "text/plain", "Content-Length": "5", "Set-Cookie": "a=b", "X-More": "c"}
                )
                self.wfile.write(b"plain")

        def _begin(self, status, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def handle(self):
            try:
                super().handle()
            except OSError:
                pass  # the door has left

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        over.set()
        server.shutdown()
        server.server_close()
