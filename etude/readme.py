"""README.md and docs/, whose numbers are written from the files that were measured: python -m etude.readme

Between <!-- NAME --> and <!-- /NAME --> stands what the function of that name makes from results/ and the catalogue. A test
fails when a page and the files disagree, so a number there can only change together with the measurement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from etude import catalog, figures, front, recording, tables
from kit.disk import atomic_write
from kit.settings import RunError

__all__ = ["BLOCKS", "filled", "pages"]

ROOT = Path(__file__).resolve().parent.parent


def _of_claims(make: Callable[[list[dict]], str]) -> Callable[[], str]:
    return lambda: make(figures.load(ROOT / "results" / "claims.json"))


BLOCKS: dict[str, Callable[[], str]] = {
    "rollout": front.rollout,
    "gain": front.gain,
    "report-figures": front.report_figures,
    "techniques": catalog.table,
    "recording": recording.block,
    "recipe": tables.recipe,
    "by-depth": tables.by_depth,
    "perplexity": tables.perplexity,
    "decode": tables.decode,
    "bench": tables.bench,
    "crowded": tables.crowded,
    "delta": tables.delta,
    "explorer": tables.explorer,
    "gpu-step": tables.gpu_step,
    "gpu-decode": tables.gpu_decode,
    "kernels": tables.kernels,
    "covered": _of_claims(figures.covered),
    "claims": _of_claims(figures.markdown),
    "laws": _of_claims(figures.markdown_laws),
    "untested": _of_claims(figures.markdown_open),
    "twins": tables.twins,
    "plan-output": tables.plan_output,
    "recipe-plan-output": tables.recipe_plan_output,
    "kernels-plan-output": tables.kernels_plan_output,
    "plan": tables.plan,
}


def pages() -> list[Path]:
    """The files that hold blocks, or may."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, folder: Path = ROOT) -> str:
    """The text of a page in `folder` with every block made anew; the blocks' links lead on from there. RunError for a block that nobody
    makes, or that does not end."""
    up = "../" * len(folder.relative_to(ROOT).parts)

    def block(match: re.Match) -> str:
        if match[1] not in BLOCKS:
            raise RunError(f"a page has a block {match[1]}; there are {', '.join(BLOCKS)}")
        made = re.sub(r"\]\((?!https?:|#)", f"]({up}", BLOCKS[match[1]]())
        return f"<!-- {match[1]} -->\n{made}\n<!-- /{match[1]} -->"

    made, number = re.subn(r"<!-- ([a-z-]+) -->\n.*?<!-- /\1 -->", block, text, flags=re.DOTALL)
    if number != len(re.findall(r"<!-- [a-z-]+ -->", text)):
        raise RunError("a page has a block that does not end: <!-- NAME --> needs its <!-- /NAME -->")
    return made


if __name__ == "__main__":
    for page in pages():
        atomic_write(page, filled(page.read_text(encoding="utf-8"), page.parent))
