"""Calls of library functions in a process that can do nothing else: what they return, and which error they raise.

The process is `python -I -S`: no environment, no site-packages, no current folder on its path. It has a time limit, a
limit on memory, an empty working folder, and an audit hook that refuses files to write, sockets, processes, signals and
ctypes. It calls the functions of `PURE` and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from kit.disk import parse_json
from kit.settings import RunError

__all__ = ["PURE", "called"]

PURE = {
    "base64": "b16encode b32encode b64decode b64encode b85encode",
    "binascii": "crc32 hexlify unhexlify",
    "bisect": "bisect_left bisect_right",
    "calendar": "isleap leapdays monthrange weekday",
    "colorsys": "hls_to_rgb hsv_to_rgb rgb_to_hls rgb_to_hsv rgb_to_yiq",
    "difflib": "get_close_matches",
    "fnmatch": "filter fnmatchcase translate",
    "heapq": "nlargest nsmallest",
    "html": "escape unescape",
    "json": "dumps loads",
    "keyword": "iskeyword issoftkeyword",
    "math": "ceil comb copysign dist factorial floor fmod gcd hypot isclose isqrt lcm ldexp perm prod "
    "remainder sqrt trunc",
    "ntpath": "basename commonprefix dirname isabs join normpath split splitdrive splitext",
    "operator": "add concat contains countOf eq floordiv getitem index indexOf lshift lt mod mul neg not_ or_ sub "
    "truediv truth xor",
    "posixpath": "basename commonpath commonprefix dirname isabs join normpath split splitext",
    "re": "escape findall split",
    "shlex": "join quote split",
    "statistics": "fmean geometric_mean harmonic_mean mean median median_high median_low mode multimode pstdev "
    "pvariance quantiles stdev variance",
    "string": "capwords",
    "textwrap": "dedent fill indent shorten wrap",
    "unicodedata": "bidirectional category combining decimal digit lookup name numeric",
    "urllib.parse": "parse_qs parse_qsl quote quote_plus unquote urldefrag urlencode urljoin",
}
"""Module → functions that compute from their arguments alone."""

PROGRAM = (
    r"""
import ast, importlib, inspect, json, resource, sys
pure, calls = json.load(sys.stdin)
modules = {name: importlib.import_module(name) for name in pure}
import encodings.idna, urllib.parse
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
sys.set_int_max_str_digits(640)
def refuse(event, given):
    if event.startswith(("socket.", "subprocess.", "os.", "shutil.", """
    r""""ctypes.", "signal.", "urllib.Request", "ftplib.", "http.", "syslog.")):
        raise PermissionError(event)
    if event == "open" and (not isinstance(given[1], str) or set(given[1]) & set("wax+")):
        raise PermissionError(event)
def answer(module, name, arguments):
    function = getattr(modules[module], name)
    values = ast.literal_eval(arguments)
    try:
        inspect.signature(function).bind(*values)
    except TypeError:
        return None  # another number of arguments teaches nothing
    except ValueError:
        pass  # a function in C without a signature
    try:
        found = function(*values)
    except RecursionError:
        return None
    except Exception as error:
        return {"error": type(error).__name__}
    try:
        text = repr(found)
        return {"value": text} if len(text) < 200 and ast.literal_eval(text) == found else None
    except Exception:
        return None
sys.addaudithook(refuse)
assert all(name in pure[module].split() for module, name, _ in calls)
print(json.dumps([answer(*call) for call in calls]))
"""
)


def called(calls: Sequence[tuple[str, str, str]], seconds: float = 60) -> list[dict | None]:
    """The outcome of each call (module, function of `PURE`, arguments as the text of a tuple of literals): {value: its
    repr} if that is the text of a literal, {error: the class's name} if it raised, None if the arguments do not fit or
    the value is no literal.

    Raises ValueError for a function that is not allowed, and RunError if the process fails or takes longer than
    `seconds`."""
    for module, name, _ in calls:
        if name not in PURE.get(module, "").split():
            raise ValueError(f"only functions of PURE are called; got {module}.{name}")
    functions = {module: PURE[module] for module in sorted({call[0] for call in calls})}
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [sys.executable, "-I", "-S", "-c", PROGRAM],
                input=json.dumps([functions, calls]),
                capture_output=True,
                text=True,
                timeout=seconds,
                cwd=folder,
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"{len(calls)} calls of library functions took longer than {seconds:g} s; set fewer questions"
            ) from None
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise RunError(f"the process that calls library functions failed ({reason})")
    return parse_json(process.stdout)
