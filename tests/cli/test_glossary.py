"""The glossary: sorted, without a dead reference, and every term occurs where it is said to be at work."""

import ast
import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.explorer import PAGES
from etude.glossary import TERMS, Term, explain_terms, find, used
from kit.settings import RunError
from lessons import syllabus

WORDS = [term.word for term in TERMS]
DRAWN = {page.name: page.draw for page in PAGES}


def said(path: Path) -> str:
    """The texts of a page that may be shown: all but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside]
    return "\n".join(node.value for node in texts if isinstance(node.value, str))


def text_of(place: str | int) -> str:
    """What a lesson, or a page of the explorer, says."""
    if isinstance(place, int):
        return syllabus.find(place).path.read_text(encoding="utf-8")
    return said(Path(inspect.getfile(DRAWN[place])))


def test_terms_are_sorted_and_each_is_there_once():
    assert WORDS == sorted(WORDS, key=str.casefold) and len({word.casefold() for word in WORDS}) == len(WORDS) > 40


@pytest.mark.parametrize("term", TERMS, ids=WORDS)
def test_a_term_says_what_it_means_and_leads_to_where_it_occurs(term):
    assert term.says.endswith(".") and term.says[0].isupper() and term.places
    assert set(term.see) <= set(WORDS) - {term.word}
    assert [place for place in term.places if not term.pattern.search(text_of(place))] == []


def test_a_term_that_does_not_occur_is_seen():
    page = "\n".join(["'''A token.'''", "def f():", "    '''A token.'''", "    return 'a word' + f'{1} rollouts'"])
    term = Term("token", "A word.", (0,))
    assert (
        term.pattern.search(page)
        and term.pattern.search("Tokens")
        and not term.pattern.search("tokenizer")
        and not term.pattern.search("x-token")
    )
    assert Term("KL", "", ()).pattern.search("a KL of") and not Term("nat", "", ()).pattern.search("nature")


@given(
    st.sampled_from(TERMS),
    st.sampled_from([str.upper, str.lower, str.title]),
    st.sampled_from(["", "s"]),
    st.sampled_from([" ", "  ", "\n"]),
)
def test_a_term_is_found_in_any_case_and_in_the_plural(term, case, plural, space):
    assert find(case(term.word + plural).replace(" ", space)) == term


@given(st.lists(st.sampled_from(TERMS), max_size=5))
def test_the_terms_of_a_text_are_explained_once(some):
    text = " and ".join(term.word for term in some)
    found = used(text)
    assert set(some) <= set(found) and [*map(TERMS.index, found)] == sorted(map(TERMS.index, found))
    assert all(explain_terms(text).count(f"**{term.word}**") == 1 for term in found) and bool(
        explain_terms(text)
    ) == bool(some)


def test_the_terminal_explains_one_or_all(ask):
    code, out, _ = ask("glossary", "acceptance", "rate")
    assert (
        code == 0
        and out.startswith("acceptance rate\n  The share of drafts")
        and "See also: draft, depth. Used in: etude lesson 3." in " ".join(out.split())
    )
    code, out, _ = ask("glossary")
    assert code == 0 and [line for line in out.splitlines() if not line.startswith("  ")] == WORDS
    assert all(len(line) <= 100 for line in out.splitlines())
    code, out, error = ask("glossary", "advantag")
    assert (
        code == 2
        and not out
        and error
        == "error: the glossary has no term 'advantag'; did you mean advantage? etude glossary lists all terms\n"
    )
    with pytest.raises(RunError, match="etude glossary lists all"):
        find("")
