"""The command `etude glossary`."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from etude.glossary import TERMS, Term, find

__all__ = ["glossary"]


def glossary(
    term: Annotated[
        list[str] | None,
        typer.Argument(
            help="A term, such as advantage.",
            metavar="TERM",
            show_default="all terms",
            autocompletion=lambda: [definition.word for definition in TERMS],
        ),
    ] = None,
) -> None:
    """Explain a term of the field."""
    for definition in [find(" ".join(term))] if term else TERMS:
        print(format_term(definition))


def format_term(term: Term) -> str:
    """A term as text for the terminal."""
    places = [
        f"etude lesson {place}" if isinstance(place, int) else f"the explorer's page {place}" for place in term.places
    ]
    also = f" See also: {', '.join(term.see)}." if term.see else ""
    says = textwrap.fill(
        f"{term.says}{also} Used in: {', '.join(places)}.", 100, initial_indent="  ", subsequent_indent="  "
    )
    return f"{term.word}\n{says}"
