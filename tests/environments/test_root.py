"""The root file system holds what it lists, runs by itself, and shows nothing of this machine."""

import json
import marshal
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from environments.sandbox import bytecode
from environments.sandbox import root as building
from environments.sandbox.cache import keep
from kit.settings import RunError


def run_python(sandbox, program):
    """What a Python program says inside, as JSON."""
    heard = sandbox.call(
        "shell", {"command": f"cat > /tmp/p.py <<'END'\nimport json, os, sys\n{program}\nEND\npython3 /tmp/p.py"}
    )
    assert heard.ok, heard
    return json.loads(heard.text)


@pytest.fixture
def short(monkeypatch):
    """A root is built without most of the standard library: what is tested has nothing to do with what is in it."""
    whole = building.sources
    monkeypatch.setattr(
        building,
        "sources",
        lambda names: {
            path: found
            for path, found in whole(names).items()
            if path.startswith(f"{building.LIBRARY}/json") or building.LIBRARY not in path
        },
    )


def test_it_is_built_once_and_is_readable_by_all(root):
    since = time.time_ns()
    building.find.cache_clear()  # as another process would ask
    assert building.root_file_system() == root and root.stat().st_ctime_ns < since
    assert all(os.stat(folder).st_mode & 0o777 == 0o755 for folder, _, _ in os.walk(root))
    assert not [
        name
        for name in os.listdir(root.parent)
        if name.startswith(".building-") and (root.parent / name).stat().st_ctime_ns > since
    ]


def test_its_name_is_its_content(root, open_folder):
    """Built anew, elsewhere, of the same files."""
    again = building.root_file_system(cache=open_folder)
    assert again.name == root.name and again != root
    files = {path.relative_to(again) for path in again.rglob("*") if "__pycache__" not in path.parts}
    assert files == {path.relative_to(root) for path in root.rglob("*") if "__pycache__" not in path.parts}


def test_a_build_that_fails_leaves_nothing(open_folder, monkeypatch, short):
    monkeypatch.setattr(bytecode, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="No space left"):
        building.root_file_system(cache=open_folder)
    assert not list((open_folder / "roots").iterdir())


def test_roots_that_nobody_asks_for_are_removed_in_the_end(open_folder):
    home = open_folder / "roots"
    for name in ("known", "kept", "old", ".building-x"):
        (home / name).mkdir(parents=True)
    for name in ("kept", "old"):
        (home / "known" / name).write_text(f"{name}\n")
    os.utime(home / "known" / "old", (1, 1))
    building.forget(home, time.time() - 100)
    assert {path.name for path in home.iterdir()} == {"known", "kept", "old", ".building-x"}, "all folders are young"
    assert os.listdir(home / "known") == ["kept"]
    building.forget(home, time.time() + 100)
    assert [path.name for path in home.iterdir()] == ["known"]


def test_a_root_that_is_used_stays(open_folder):
    """A sandbox whose root is removed under it has no /proc any more."""
    home = open_folder / "roots"
    for name in ("known", "used"):
        (home / name).mkdir(parents=True)
    handle = keep(home / "used")
    building.forget(home, time.time() + 100)
    assert (home / "used").is_dir()
    os.close(handle)
    building.forget(home, time.time() + 100)
    assert not (home / "used").exists()


def test_a_root_that_cannot_be_removed_is_said_and_never_taken_for_a_whole_one(open_folder, monkeypatch, short):
    """Its removal fails in the middle; the next one goes on with what is left, however young it is."""
    home = open_folder / "roots"
    for name in ("known", "old/bin"):
        (home / name).mkdir(parents=True)
    (home / "old" / "python").touch()
    rmtree = building.shutil.rmtree

    def fails(folder, *_, **how):
        os.unlink(folder / "python")
        if not how.get("ignore_errors"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(building.shutil, "rmtree", fails)
    with pytest.raises(OSError, match="Input/output"):
        building.forget(home, time.time() + 100)
    assert not (home / "old").exists() and [path.name for path in home.iterdir() if (path / "bin").is_dir()] == [
        ".removed-old"
    ]
    monkeypatch.setattr(building, "forget", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(
        RunError, match=r"what no sandbox uses any more cannot be removed from .*roots: .*Input/output error"
    ):
        building.root_file_system(("iniconfig",), open_folder)
    monkeypatch.undo()
    assert building.shutil.rmtree is rmtree
    building.forget(home, time.time() - 100)
    assert not (home / ".removed-old").exists()


def test_threads_build_one_root(open_folder, short):
    """One builds it, and the others wait for it."""
    building.find.cache_clear()
    with ThreadPoolExecutor(3) as pool:
        found = {*pool.map(lambda _: building.root_file_system((), open_folder), range(3))}
    assert len(found) == 1 and sorted(os.listdir(open_folder / "roots")) == sorted(["known", next(iter(found)).name])


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch):
    with pytest.raises(RunError, match="pip install no-such-thing"):
        building.sources(["no-such-thing"])
    monkeypatch.setattr(building.shutil, "which", lambda *_, **__: None)
    with pytest.raises(RunError, match="apt-get install"):
        building.sources(())


def test_no_package_comes_along_but_those_that_are_listed(sandbox):
    found = run_python(
        sandbox,
        "from importlib import metadata\nprint(json.dumps([d.metadata['Name'].lower() for d in "
        "metadata.distributions()]))",
    )
    assert sorted(found) == sorted(building.DISTRIBUTIONS)
    for name in ("pip", "setuptools", "ensurepip", "pkg_resources", "hypothesis", "torch", "numpy", "idlelib"):
        assert not run_python(
            sandbox, f"import importlib.util\nprint(json.dumps(importlib.util.find_spec({name!r}) is not None))"
        ), name


def test_no_copy_of_a_package_hides_in_it(root):
    """pip and setuptools vendor packages; so may others. No file of the root outside its site-packages has the name of
    a third party's package."""
    names = {
        "more_itertools",
        "tomli",
        "toolz",
        "cachetools",
        "tabulate",
        "slugify",
        "humanize",
        "inflection",
        "_vendor",
        "vendored",
    }
    assert not [path for path in root.rglob("*") if path.stem in names]
    assert not [path for path in root.rglob("*") if path.suffix in (".whl", ".zip", ".gz", ".egg")]


def test_no_path_of_this_machine_stands_in_its_texts(root):
    here = {sys.prefix, sys.base_prefix, str(Path.home()), str(Path(building.__file__).parents[2])} - {
        "/usr",
        "/",
        "/root",
    }
    for path in root.rglob("*"):
        if path.suffix in (".py", ".pyc", ".txt", ".json") or path.parent == root / "etc":
            data = path.read_bytes()
            assert not [there for there in here if there.encode() in data], path


def test_python_runs_as_it_is_and_finds_its_library(sandbox):
    program = "import ssl, sqlite3, ctypes, zlib, lzma, bz2, hashlib, decimal, asyncio, sysconfig, json, threading\n"
    program += "threading.Thread(target=print, args=('',)).start()\n"
    program += (
        "print(json.dumps([sys.version, sys.prefix, sysconfig.get_path('stdlib'), sys.path, os.environ['PATH']]))"
    )
    version, prefix, library, path, programs = run_python(sandbox, program)
    assert (version, prefix, library, programs) == (sys.version, "/usr", f"/usr/lib/{building.PYTHON}", "/usr/bin")
    assert all(found.startswith(("/usr/lib/python", "/tmp")) for found in path)


def test_pytest_runs(sandbox):
    sandbox.call(
        "write",
        {"path": "test_it.py", "text": "def test_a():\n    assert 1 == 1\n\ndef test_b():\n    assert 1 == 2\n"},
    )
    heard = sandbox.call("shell", {"command": "pytest -q -p no:cacheprovider"})
    assert heard.exit == 1 and "1 failed, 1 passed" in heard.text, heard
    sandbox.call("shell", {"command": "rm -r test_it.py __pycache__"})


def test_packages_lie_where_the_python_of_debian_looks(sandbox):
    """It does not read site-packages. On Debian and Ubuntu with their own Python no test of a package could be run."""
    program = """
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + ["/usr/lib/python3/dist-packages"]
import iniconfig, packaging, pluggy, pygments, pytest
print(json.dumps(pytest.__file__))"""
    assert run_python(sandbox, program).startswith("/usr/lib/python3/dist-packages/pytest/")


def test_every_utility_starts(sandbox, root):
    """No shared library is missing."""
    names = sorted(os.listdir(root / "usr" / "bin"))
    assert set(building.NEEDED) <= set(names)
    quiet = (
        "timeout 5 $n --version </dev/null >/dev/null 2>/tmp/said; grep -l 'shared librar\\|not found' "
        "/tmp/said >/dev/null && echo $n"
    )
    heard = sandbox.call(
        "shell",
        {
            "command": f"for n in "
            f"{' '.join(name for name in names if name not in ('[', 'pytest', 'kill', 'yes'))}; do {quiet}; done"
        },
    )
    assert heard.text.strip() == "" and heard.end_reason is None, heard


def test_it_runs_by_its_own_loader(root):
    """Outside, too: nothing is taken from this machine's libraries."""
    loader = next((root / "usr" / "lib").glob("ld-*"))
    program = [
        loader,
        "--library-path",
        root / "usr" / "lib",
        root / "usr" / "bin" / building.PYTHON,
        "-I",
        "-c",
        "import ssl; print(ssl.__file__)",
    ]
    done = subprocess.run(program, capture_output=True, text=True, env={})
    assert done.returncode == 0 and done.stdout.startswith(str(root)), done.stderr


def test_bytecode_names_the_file_inside_and_is_what_python_compiles(tmp_path):
    source = tmp_path / "m.py"
    source.write_text("def f():\n    return lambda: [i for i in 'ab']\n")
    subprocess.run([sys.executable, "-c", "import m"], cwd=tmp_path, check=True)
    for original in (source, None, tmp_path / "missing.py"):
        target = tmp_path / "out" / "m.py"
        target.parent.mkdir(exist_ok=True)
        bytecode.write(target, source.read_bytes(), "/usr/m.py", original)
        (made,) = (tmp_path / "out" / "__pycache__").iterdir()
        assert marshal.loads(made.read_bytes()[16:]) == compile(
            source.read_bytes(), "/usr/m.py", "exec", dont_inherit=True
        )
        assert str(tmp_path).encode() not in made.read_bytes()
        made.unlink()
    source.write_text("x = 1\n")
    os.utime(source, (1, 1))
    bytecode.write(target, source.read_bytes(), "/usr/m.py", source)  # its own bytecode is that of yesterday
    assert marshal.loads(next((tmp_path / "out" / "__pycache__").iterdir()).read_bytes()[16:]).co_names == ("x",)


def test_what_is_listed_needs_nothing_more():
    """Of what pytest requires here, nothing is forgotten."""
    wanted = {
        line.partition(";")[0].split(">")[0].split("<")[0].split("=")[0].strip()
        for line in metadata.requires("pytest") or ()
        if "extra" not in line
    }
    older = {"exceptiongroup", "tomli", "colorama"}  # for Python 3.10, and for Windows
    assert wanted - older <= set(building.DISTRIBUTIONS)
