"""What a URL may say: whatever it is, the page opens, and no name in it means two things."""

from collections import Counter

import pytest

from etude.explorer import PAGES

NAMES = [page.name for page in PAGES]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Where no run lies."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_what_no_control_allows_is_its_default(page, controls, name):
    """Of every control at once, because one exception is enough to see."""
    before = {
        control.key: control.value for control in controls(page(name)) if control.type != "text_input"
    }  # which takes any text
    for value in ("inf", "-inf", "nan", "1e999", "-1e999", "9" * 5000, "x"):
        at = page(name, **dict.fromkeys(before, value))
        assert {key: control.value for control in controls(at) if (key := control.key) in before} == before, value
        assert not at.error
    for value in ("", "1.5", "0", ["1", "2"]):
        assert not page(name, **dict.fromkeys(before, value)).error


def test_a_name_in_the_url_means_one_thing(page, controls):
    """Streamlit carries the value of a name from page to page. Which run is shown is one choice for all pages."""
    times = Counter(control.key for name in NAMES for control in controls(page(name)) if control.key != "examples")
    assert len(times) > 30 and not [key for key, n in times.items() if n > 1]
