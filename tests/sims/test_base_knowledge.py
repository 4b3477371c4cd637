"""Questions on a library's source: their answers are what running says, wrong ones are wrong, and nothing else is
called."""

import ast
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.settings import RunError
from sims.base_evaluations import isolated, knowledge
from sims.base_evaluations.isolated import called
from sims.base_evaluations.knowledge import KINDS, choose_answer, modules_of, questions, verified


@pytest.fixture(scope="module")
def asked():
    return questions(None, 80, 3, tries=20)


def test_every_answer_is_verified_and_a_wrong_one_is_seen(asked):
    assert len(asked) == 80 and Counter(q.kind for q in asked) == dict.fromkeys(KINDS, 20)
    assert all(verified(asked))
    swapped = [knowledge.Question(q.kind, q.subject, q.prompt, q.answers, (q.right + 1) % 4, q.check) for q in asked]
    assert not any(verified(swapped))


def test_four_answers_differ_and_none_pays_for_being_named_every_time(asked):
    assert len({q.prompt for q in asked}) == 80 and all(
        len(set(q.answers)) == 4 and "\n" not in "".join(q.answers) for q in asked
    )
    for kind in KINDS:
        counts = Counter(q.answers[q.right] for q in asked if q.kind == kind)
        assert max(counts.values()) <= 5
    assert min(Counter(q.right for q in asked).values()) > 5


def test_questions_follow_from_the_seed(asked):
    assert questions(None, 80, 3, tries=20) == asked != questions(None, 80, 4, tries=20)


def test_values_and_errors_by_hand():
    calls = [
        ("math", "gcd", "(12, 18,)"),
        ("posixpath", "join", "('a', '/b',)"),
        ("math", "isqrt", "(-1,)"),
        ("math", "comb", "(1,)"),
    ]
    assert called(calls) == [{"value": "6"}, {"value": "'/b'"}, {"error": "ValueError"}, None]


def test_a_package_is_read_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "lonely").mkdir()
    code = "".join(f"def f{n}(first_{n}, second={n}, *, flag_{n}={n % 2 == 0}):\n    return None\n" for n in range(8))
    (tmp_path / "lonely" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "lonely" / "work.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = questions("lonely", 12, 0)
    assert {q.kind for q in found} == {"signature", "default"} and all(verified(found))
    one = next(q for q in found if q.kind == "signature" and q.subject == "lonely.work.f3")
    assert one.answers[one.right] == "first_3, second=3, *, flag_3=False):" and one.prompt.endswith(
        "# lonely.work\ndef f3("
    )


def test_what_is_asked_for_in_vain_is_one_line():
    with pytest.raises(RunError, match="package 'no_such_thing' is not installed here as Python source"):
        modules_of("no_such_thing")
    with pytest.raises(RunError, match="gives only [0-9]+ questions, not 10000"):
        questions(None, 10_000, 0, tries=1)


def test_only_pure_functions_are_called():
    with pytest.raises(ValueError, match="only functions of PURE are called; got os.system"):
        called([("os", "system", "('true',)")])


@pytest.mark.parametrize(
    "body",
    [
        "open('x', 'w')",
        "__import__('socket').socket()",
        "__import__('subprocess').run(['true'])",
        "__import__('os').system('true')",
    ],
)
def test_the_process_refuses_all_else(body, monkeypatch):
    """A function that does such a thing raises there, and does nothing."""
    sneaky = isolated.PROGRAM.replace("found = function(*values)", f"found = {body}")
    assert sneaky != isolated.PROGRAM
    monkeypatch.setattr(isolated, "PROGRAM", sneaky)
    assert called([("math", "gcd", "(1, 2,)")]) == [{"error": "PermissionError"}]


def test_a_call_that_does_not_end_is_one_line(monkeypatch):
    monkeypatch.setattr(
        isolated, "PROGRAM", isolated.PROGRAM.replace("found = function(*values)", "[None for _ in iter(int, 1)]")
    )
    with pytest.raises(RunError, match="took longer than 0.5 s|failed"):
        called([("math", "gcd", "(1, 2,)")], seconds=0.5)


def test_a_failed_process_is_one_line(monkeypatch):
    monkeypatch.setattr(isolated, "PROGRAM", "raise SystemExit('broken')")
    with pytest.raises(RunError, match="the process that calls library functions failed .broken."):
        called([("math", "gcd", "(1, 2,)")])


@given(
    st.lists(st.floats(-50, -0.1), min_size=4, max_size=4),
    st.lists(st.text("abé", min_size=1, max_size=9), min_size=4, max_size=4),
)
def test_the_choice_is_the_best_rate_per_byte(logp, answers):
    rates = [value / len(answer.encode()) for value, answer in zip(logp, answers, strict=True)]
    assert rates[choose_answer(logp, answers)] == max(rates)


def test_length_does_not_decide():
    assert choose_answer([-2.0, -6.0], ["70", "'replace'"]) == 1 and choose_answer([-2.0, -6.0], ["70", "'re'"]) == 0


def test_literals_are_literals():
    import random

    draw = random.Random(0)
    assert all(ast.literal_eval(knowledge.literal(draw)) is not ... for _ in range(300))
