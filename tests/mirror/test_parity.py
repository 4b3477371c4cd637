"""Every technique of the catalogue, and what else has a twin: `scaled` has the names of `ref`, and their signatures;
more only by keyword, with a default."""

import importlib
import inspect

import pytest

from etude import catalog

BENEATH = ("network/model.py", "sft.py", "textual_feedback.py")
TWINS = [(t.ref, t.scaled) for t in catalog.TECHNIQUES if t.scaled] + [
    (f"ref/{name}", f"scaled/{name}") for name in BENEATH
]
UNSCALED = {"recipe", "async-rl", "environments"}
"""What has no twin: the recipe is made of the others, and `scaled/async_rl/` are services that share `Life` with the
reference (tests/mirror/test_reconciler.py); many sandboxes are many processes, and need no ranks."""


def module(path: str):
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


def test_every_technique_has_a_twin():
    assert {t.name for t in catalog.TECHNIQUES if t.scaled is None} <= UNSCALED


@pytest.mark.parametrize(("ref", "scaled"), TWINS, ids=[ref for ref, _ in TWINS])
def test_names_and_signatures(ref, scaled):
    theirs, ours = module(ref), module(scaled)
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    assert scaled.removeprefix("scaled") == ref.removeprefix("ref")
    for name in theirs.__all__:
        a, b = getattr(theirs, name), getattr(ours, name)
        assert type(a) is type(b) or callable(a) == callable(b)
        if not callable(a) or a is b:
            continue
        wanted, found = (inspect.signature(x).parameters for x in (a, b))
        shared = list(found.values())[: len(wanted)]
        assert [(p.name, p.kind, p.default) for p in shared] == [
            (p.name, p.kind, p.default) for p in wanted.values()
        ], name
        for extra in list(found.values())[len(wanted) :]:
            assert extra.kind is inspect.Parameter.KEYWORD_ONLY and extra.default is not inspect.Parameter.empty, (
                name,
                extra,
            )
        assert inspect.getdoc(b), f"{scaled}: {name} says nothing"
