"""Formulas, titles and menus: every symbol is defined, no two titles are alike, and every chart has one menu."""

import re
from itertools import permutations

import pytest

from etude.explorer import PAGES

FORMULAS = [page for page in PAGES if page.formula]
NOTATION = frozenset(
    """begin end frac tfrac sum min max log ln exp left right quad qquad cdot le ge ne in iff to approx mid underbrace
    Bigl Bigr bigcup varnothing subseteq leftarrow top mathbb""".split()
)
"""Commands of LaTeX that are no symbols."""


def list_symbols(latex: str) -> set[str]:
    """Letters, Greek letters and names in \\mathrm; \\text is prose."""
    latex = re.sub(r"\\\\|\\(?:text|begin|end)\{[^{}]*\}", " ", latex)
    names = set(re.findall(r"\\mathrm\{([^{}]*)\}", latex))
    latex = re.sub(r"\\mathrm\{[^{}]*\}", " ", latex)
    commands = set(re.findall(r"\\([A-Za-z]+)", latex)) - NOTATION
    return names | commands | set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", latex)))


def test_symbols_by_hand():
    latex = r"\hat A_i = \frac{\pi_{\mathrm{ref}}(x)}{\epsilon}\ \text{if it is so}"
    assert list_symbols(latex) == {"hat", "A", "i", "pi", "ref", "x", "epsilon"}


@pytest.mark.parametrize("entry", FORMULAS, ids=lambda entry: entry.name)
def test_every_symbol_of_a_formula_is_defined(entry):
    symbols = list_symbols(entry.formula)
    assert symbols and symbols == set().union(*map(list_symbols, entry.symbols)), "and no other symbol is"
    assert all(meaning and not meaning.endswith(".") for meaning in entry.symbols.values())


def test_definitions_stand_below_the_formula(page):
    (entry,) = [entry for entry in FORMULAS if entry.name == "kl"]
    at = page("kl")
    assert len(at.latex) == 1 and at.caption[0].value.startswith("$k_1")
    assert all(meaning in at.caption[0].value for meaning in entry.symbols.values())


def test_only_a_page_with_a_formula_has_symbols():
    assert len(FORMULAS) > 15 and not [page.name for page in PAGES if page.symbols and not page.formula]


def test_titles_are_clearly_different():
    titles = [page.title.casefold() for page in PAGES]
    assert not [pair for pair in permutations(titles, 2) if pair[0] in pair[1]]


@pytest.mark.parametrize("name", [page.name for page in PAGES])
def test_every_chart_has_one_menu_with_its_data(page, open_menus, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at = page(name)
    charts, images = len(at.get("vega_lite_chart")), len(at.image)
    tables, downloads = len(at.dataframe), len(at.get("download_button"))
    menus = at.get("popover")
    assert len(menus) == charts + images and len({menu.key for menu in menus}) == len(menus)
    open_menus(at)
    assert len(at.dataframe) == tables + len(menus), "each has a table"
    assert len(at.get("download_button")) == downloads + 2 * len(menus), "and its CSV and PNG"
    assert not at.error
