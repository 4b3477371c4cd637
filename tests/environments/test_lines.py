"""The server's JSON is the package's, character for character."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.sandbox.inside import lines

ANY = st.text(st.characters(codec=None, exclude_categories=()))
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | ANY
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_it_writes_and_reads_what_the_package_does(value):
    assert lines.encode(value) == json.dumps(value)
    assert lines.decode(json.dumps(value)) == json.loads(json.dumps(value))


@given(st.text(max_size=12) | st.text('[]{}",:019.eE-tfn \\u', max_size=12))
def test_what_is_no_json_is_refused(text):
    try:
        found = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            lines.decode(text)
        return
    if text == text.strip():  # nothing that is sent begins or ends with a space
        assert repr(lines.decode(text)) == repr(found)  # NaN differs from itself


def test_it_takes_the_fast_way_here_and_starts_without_regular_expressions():
    """The point of it. A Python where this fails still works, and starts ten milliseconds later."""
    assert lines.decode.__module__ == lines.__name__
    here = str(Path(lines.__file__).parents[1])
    slow = (
        "[name for name in ('re', 'json', 'enum', 'typing', 'dataclasses', 'hashlib', 'shutil') if name in sys.modules]"
    )
    program = f"import sys; sys.path.insert(0, {here!r}); import inside.server; print({slow})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
