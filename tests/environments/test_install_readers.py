"""What a folder's files say about how it is set up: each kind that there is, and bytes that are none of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.install import readers
from environments.install.propose import BUILT_HERE, VENV, configures, proposed
from environments.install.readers import Project
from environments.install.steps import CHARACTERS, MAX_STEPS, Step, deduplicate_steps, format_steps, parse_steps

PYPROJECT = b"""
[build-system]
requires = ["setuptools"]
[project]
name = "my-app"
dependencies = ["one>=1", "two[x]~=2 ; python_version > '3'", "three @ https://a.test/three.whl"]
scripts = {my-app = "my_app:main"}
[project.optional-dependencies]
test = ["pytest"]
docs = []
[dependency-groups]
dev = ["hypothesis", {include-group = "other"}]
"""
SETUP_PY = b"""
from setuptools import setup
needs = ["one>=1", "two"]
setup(name="old", install_requires=needs, extras_require={"dev": ["three"]}, version=open("v").read())
"""
SETUP_CFG = b"""
[metadata]
name = cfg
[options]
install_requires =
    one
    two>=2; python_version<'3'
[options.extras_require]
tests = pytest
"""
TOX = b"""
[testenv]
deps =
    pytest>=7
    -r{toxinidir}/more.txt
commands =
    pytest {posargs:tests} -x
"""
MAKEFILE = b"""
.PHONY: test
VAR := x
install: deps
\t@$(PIP) install -r extra.txt

clean:
\trm -rf .
test lint:
\t-pytest -q \\
\t  tests
"""
GITHUB = b"""
jobs:
  test:
    steps:
      - uses: actions/checkout@v4
      - run: pip install -r requirements-dev.txt
      - name: both
        run: |
          python -m pip install --upgrade pip
          uv pip install thing==1.0 && pytest -q --strict

          echo ${{ secrets.TOKEN }} | sh
      - run: "python3 -m pytest tests/unit"
"""
GITLAB = b"""
test:
  before_script:
    - pip install 'more>=1'
  script:
  - pytest -x
  tags:
    - docker
"""


def test_each_kind_of_file():
    assert readers.pyproject(PYPROJECT) == Project(
        "my-app", ("one", "three"), ("test", "docs"), ("my-app",), ("hypothesis",), True
    )
    assert readers.setup_py(SETUP_PY) == Project("old", ("one", "two"), ("dev",))
    assert readers.setup_cfg(SETUP_CFG) == Project("cfg", ("one",), ("tests",))
    assert readers.requirements(b"# no\none==1 --hash=sha256:0\n-r more.txt\ntwo # why\nhttps://a.test/x.whl\n") == (
        "one",
        "two",
    )
    assert readers.tox(TOX) == (("pytest>=7",), ("pytest  -x",))
    assert readers.make_commands(MAKEFILE) == ("pip install -r extra.txt", "pytest -q  \t  tests")
    found = [
        "pip install -r requirements-dev.txt",
        "python -m pip install --upgrade pip",
        "uv pip install thing==1.0 && pytest -q --strict",
    ]
    assert readers.ci_commands(GITHUB) == (*found, "echo ${{ secrets.TOKEN }} | sh", "python3 -m pytest tests/unit")
    assert readers.ci_commands(GITLAB) == ("pip install 'more>=1'", "pytest -x")
    poetry = b'[tool.poetry]\nname = "poem"\n[tool.poetry.dependencies]\npython = "^3.11"\none = "*"\n'
    assert readers.pyproject(poetry) == Project("poem", ("one",))
    assert readers.setup_py(b"def setup(**_): pass\nsetup(name='first')\nsetuptools.setup(name='last')\n") == Project(
        "last"
    )


@pytest.mark.parametrize(
    "path, data, command",
    [
        ("pyproject.toml", PYPROJECT, "pip install -e '.[test]'"),
        ("setup.py", SETUP_PY, f"{BUILT_HERE} -e '.[dev]'"),
        ("setup.cfg", SETUP_CFG, f"{BUILT_HERE} -e '.[tests]'"),
        ("requirements.txt", b"one\n", "pip install -r requirements.txt"),
        ("requirements/test.txt", b"one\n", "pip install -r requirements/test.txt"),
        ("tox.ini", TOX, "pip install 'pytest>=7'"),
        ("Makefile", b"test:\n\tpip install thing\n", "pip install thing"),
        (".github/workflows/ci.yml", GITHUB, "pip install thing==1.0"),
        (".gitlab-ci.yml", GITLAB, "pip install 'more>=1'"),
    ],
)
def test_each_kind_of_file_becomes_a_step(path, data, command):
    assert configures(path)
    found = proposed({path: data, "tests/test_a.py": b"", "src/mine/__init__.py": b""})
    assert found[0] == VENV and command in [step.command for step in found]
    checks = [step.check for step in found]
    assert "python -c 'import mine'" in checks and checks[-2:] == [
        "python -m pytest -q --collect-only",
        "python -m pytest -q",
    ]
    assert all(step.source for step in found)


def test_what_is_proposed_of_all_of_them():
    """What all need comes first, what tells whether it worked last; nothing twice, nothing that leads to a shell's
    variables or to missing files."""
    files = {
        "pyproject.toml": PYPROJECT,
        "setup.py": SETUP_PY,
        "tox.ini": TOX,
        "Makefile": MAKEFILE,
        ".github/workflows/a.yml": GITHUB,
    }
    found = proposed(
        {
            **files,
            "requirements.txt": b"one",
            "my_app/__init__.py": b"",
            "other/__init__.py": b"",
            "tests/test_a.py": b"",
        }
    )
    commands = [step.command for step in found]
    assert len(found) == MAX_STEPS and commands[:3] == [
        VENV.command,
        "pip install -r requirements.txt",
        "pip install -e '.[test]'",
    ]
    assert not [one for one in commands if "TOKEN" in one or "dev.txt" in one or "upgrade" in one or "extra.txt" in one]
    assert [step.check for step in found][-4:-2] == ["python -c 'import my_app'", "my-app --help"]
    assert proposed({}) == [VENV]


WHOLE = [PYPROJECT, SETUP_PY, SETUP_CFG, TOX, MAKEFILE, GITHUB, GITLAB]
PIECES = st.sampled_from(
    [*WHOLE, b"[", b"((((", b"\xff\xfe", b"\0", b'"""', b"run: |\n", b"%(a)s", b"\r\n", b"setup(", b"[project]\n"]
)
BYTES = st.binary(max_size=60) | st.lists(PIECES | st.binary(max_size=8), max_size=4).map(b"".join)
PATHS = st.sampled_from(
    [
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
        "tox.ini",
        "Makefile",
        ".gitlab-ci.yml",
        "requirements.txt",
        "a-requirements-dev.txt",
    ]
    + [f".github/workflows/{name}.yml" for name in "abc"]
    + ["a/__init__.py", "src/b/__init__.py", "tests/test_a.py"]
)


@given(st.dictionaries(PATHS, BYTES, max_size=8))
def test_any_bytes_give_at_most_ten_steps_each_once(files):
    found = proposed(files)
    assert found[0] == VENV and 1 <= len(found) <= MAX_STEPS
    assert len({(step.command or step.check) for step in found}) == len(found)
    assert parse_steps(format_steps(found)) == found


@given(
    st.lists(st.builds(Step, st.sampled_from(["", "a", "b"]), st.sampled_from(["x", "y"])), max_size=20),
    st.integers(1, 5),
)
def test_steps_are_kept_in_their_order_and_once(steps, most):
    found = deduplicate_steps(steps, most)
    assert len(found) <= most and deduplicate_steps(found, most) == found
    assert [steps.index(step) for step in found] == sorted(steps.index(step) for step in found)


def test_two_commands_may_have_one_check_and_checks_alone_stand_once():
    steps = [
        Step("a", "pip check"),
        Step("b", "pip check"),
        Step("", "pip check"),
        Step("a", "other"),
        Step("", "pip check"),
    ]
    assert deduplicate_steps(steps) == steps[:3]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        {},
        "a",
        [1],
        [{}],
        [{"command": ""}],
        [{"command": 1}],
        [{"command": "a", "check": None}],
        [{"check": "a", "needed": 1}],
    ]
    + [[{"command": "a" * (CHARACTERS + 1)}], [{"check": "a" * (CHARACTERS + 1)}], [{"check": "a\0"}]]
    + [[{"command": "a"}] * 101],
)
def test_rows_that_are_no_steps(rows):
    with pytest.raises(ValueError) as found:
        parse_steps(rows)
    assert str(found.value) and "\n" not in str(found.value)
