"""What every lesson needs: code shown from its source, exercises that check themselves, experiments run live.

    source(ref.kl.token_kl)          the code, as it stands in the repository
    check(1, test)                   runs an exercise's test and says whether it is solved, and if not what is missing
    run(kl_variance.sampled, c)      runs a part of an experiment of `sims/`
    tiny_run()                       a small finished run of the recipe, for what needs one
    claims("kl-variance")            what the committed run of an experiment found
    verdicts("kl-variance")          the same, printed: a line for each claim
    quick(1_000_000, 10_000)         the first; the second where ETUDE_QUICK is set, as it is under test

A lesson never defines again what `ref/` defines: it imports it, and takes it apart.
"""

import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kit.disk import read_json
from kit.runs import Run
from kit.settings import fill
from recipe.small import stages as recipe
from sims.policies import SMOKE

__all__ = ["QUICK", "check", "claims", "hushed", "quick", "run", "source", "tiny_folder", "tiny_run", "verdicts"]

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "lessons"

T = TypeVar("T")
QUICK = bool(os.environ.get("ETUDE_QUICK"))
"""Whether sizes are cut down: the course's own tests do it. What is shown then proves nothing."""


def quick(full: T, small: T) -> T:
    """`full`, or `small` under test."""
    return small if QUICK else full


def source(*parts: Any) -> None:
    """Shows functions or classes as they stand in the repository."""
    for part in parts:
        code = inspect.getsource(part)
        try:
            get_ipython  # type: ignore[name-defined]  # noqa: B018  (there in a notebook only)
        except NameError:
            print(code)
        else:
            from IPython.display import Markdown, display

            display(Markdown(f"```python\n{code}```"))


class Solved(int):
    """Whether an exercise is solved. A notebook shows nothing of it under the sentence that says so."""

    def _ipython_display_(self) -> None:
        pass


def check(number: int, test: Callable[[], None]) -> Solved:
    """Runs the test of an exercise: whether it is solved, said in one line. Nothing is raised, so that a lesson runs
    through unsolved."""
    try:
        test()
    except NotImplementedError:
        print(f"Exercise {number}: not begun")
    except AssertionError as error:
        print(f"Exercise {number}: not yet. {str(error) or 'The check does not hold.'}")
    except Exception as error:  # a learner's code may raise anything
        print(f"Exercise {number}: not yet. It stopped with {type(error).__name__}: {error}")
    else:
        print(f"Exercise {number}: solved")
        return Solved(True)
    return Solved(False)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Nothing is written to the terminal: a stage's progress goes to stdout, a library's warnings to stderr. And a
    process that is begun meanwhile is not told the script of this one: a lesson run as a script would be run again in
    it."""
    main = vars(sys.modules["__main__"])
    script = main.pop("__file__", None)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        main.update({} if script is None else {"__file__": script})


def run(part: Callable[..., T], *arguments: Any) -> T:
    """Calls a part of an experiment of `sims/` that keeps its state in a run, `part(run, *arguments)`, in a folder that
    is thrown away."""
    with tempfile.TemporaryDirectory() as folder, hushed(), Run.open(Path(folder) / "run", "lesson", {}) as lesson_run:
        return part(lesson_run, *arguments)


def tiny_folder() -> Path:
    """Where the tiny run lies. The settings are in its name: a run of other settings is another run, and cannot be gone
    on with."""
    settings = json.dumps(asdict(fill(recipe.Recipe, SMOKE)), sort_keys=True)
    return RUNS / f"tiny-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def tiny_run() -> Path:
    """A finished run of the recipe at its smallest, in runs/lessons/: made once (half a minute), then found there until
    its settings change. Its agent has learned nothing; what lessons show with it is how things hang together."""
    root, config = tiny_folder(), fill(recipe.Recipe, SMOKE)
    has_config = (root / "config.json").exists()
    if not has_config:
        print("a tiny run of the recipe comes first, once: half a minute", file=sys.stderr)
        for old_folder in RUNS.glob("tiny*"):
            # what a learner has put here stays
            if re.fullmatch("tiny(-[0-9a-f]{8})?", old_folder.name) and (old_folder / "config.json").is_file():
                shutil.rmtree(old_folder)
    with hushed(), Run.open(root, "recipe", config, resume=has_config) as recipe_run:
        recipe.run(recipe_run, config)
    return root


def claims(experiment: str) -> list[dict]:
    """The claims of an experiment as its committed run found them, `results/claims.json`: claim, measured, interval,
    unit, verdict, note."""
    all_claims = read_json(ROOT / "results" / "claims.json", list)
    return [claim for claim in all_claims if claim["experiment"] == experiment]


def verdicts(experiment: str) -> None:
    """Prints the claims of an experiment, a line each: verdict, claim, what was measured and within what interval."""
    for claim in claims(experiment):
        interval_text = " [{:.3g}, {:.3g}]".format(*claim["interval"]) if claim["interval"] else ""
        measured_text = (
            "no number"
            if claim["measured"] is None
            else f"{claim['measured']:.3g}{interval_text} {claim['unit']}".rstrip()
        )
        print(f"{claim['verdict']:18s} {claim['claim']}: {measured_text}")
