"""Writes the measured numbers of README.md and docs/: python -m etude.readme.build

The function of BLOCKS with that name makes the text between <!-- NAME --> and <!-- /NAME --> from results/ and the
catalogue. A test fails when a page and the files disagree, so a number can only change together with its measurement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from etude.ledger import figures
from etude.play import recording
from etude.readme import front, tables
from kit.disk import atomic_write
from kit.settings import RunError

__all__ = ["BLOCKS", "filled", "pages"]

ROOT = Path(__file__).resolve().parents[2]


def _make_claims_block(make: Callable[[list[dict]], str]) -> Callable[[], str]:
    return lambda: make(figures.load(ROOT / "results" / "claims.json"))


BLOCKS: dict[str, Callable[[], str]] = {
    "commands": front.commands,
    "gain": front.gain,
    "verdicts": front.verdicts,
    "techniques": front.techniques,
    "rollout": front.rollout,
    "bundled": front.bundled,
    "report-figures": front.report_figures,
    "catalogue": front.catalogue,
    "recording": recording.block,
    "recipe": tables.recipe,
    "by-depth": tables.by_depth,
    "behaviours": tables.behaviours,
    "perplexity": tables.perplexity,
    "decode": tables.decode,
    "bench": tables.bench,
    "crowded": tables.crowded,
    "delta": tables.delta,
    "explorer": tables.explorer,
    "gpu-step": tables.gpu_step,
    "gpu-decode": tables.gpu_decode,
    "kernels": tables.kernels,
    "covered": _make_claims_block(figures.covered),
    "claims": _make_claims_block(figures.markdown),
    "laws": _make_claims_block(figures.markdown_laws),
    "untested": _make_claims_block(figures.markdown_open),
    "distributed": tables.distributed,
    "plan-output": tables.plan_output,
    "recipe-plan-output": tables.recipe_plan_output,
    "packages-plan-output": tables.packages_plan_output,
    "published-plan-output": tables.published_plan_output,
    "kernels-plan-output": tables.kernels_plan_output,
    "plan": tables.plan,
}


def pages() -> list[Path]:
    """The files that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, folder: Path = ROOT) -> str:
    """The text of a page in `folder` with every block made anew, and links of blocks relative to `folder`. RunError for
    a block that no function makes, or that does not end."""
    path_prefix = "../" * len(folder.relative_to(ROOT).parts)

    def block(match: re.Match) -> str:
        if match[1] not in BLOCKS:
            raise RunError(f"a page has a block {match[1]}; there are {', '.join(BLOCKS)}")
        content = re.sub(r"\]\((?!https?:|#)", f"]({path_prefix}", BLOCKS[match[1]]())
        return f"<!-- {match[1]} -->\n{content}\n<!-- /{match[1]} -->"

    filled_text, number = re.subn(r"<!-- ([a-z-]+) -->\n.*?<!-- /\1 -->", block, text, flags=re.DOTALL)
    if number != len(re.findall(r"<!-- [a-z-]+ -->", text)):
        raise RunError("a page has a block that does not end: <!-- NAME --> needs its <!-- /NAME -->")
    return filled_text


if __name__ == "__main__":
    for page in pages():
        atomic_write(page, filled(page.read_text(encoding="utf-8"), page.parent))
