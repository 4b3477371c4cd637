"""Plurals and lists of English nouns: a package of a few lines from which tasks can be made."""

IRREGULAR = {"man": "men", "woman": "women", "child": "children", "mouse": "mice", "foot": "feet"}


def plural(noun):
    """The plural of a noun."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        stem = noun[:-1]
        return stem + "ies"
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    return noun + "s"


def counted(number, noun):
    """A number and the noun in the form that it asks for."""
    form = noun if abs(number) == 1 else plural(noun)
    return f"{number} {form}"


def listed(nouns, last="and"):
    """Nouns in a row as people write them: commas, and a word before the last one."""
    nouns = list(nouns)
    if len(nouns) < 3:
        return f" {last} ".join(nouns)
    head = ", ".join(nouns[:-1])
    return f"{head} {last} {nouns[-1]}"


def article(noun):
    """The indefinite article and the noun, by its first letter."""
    first = noun[:1].lower()
    return f"an {noun}" if first in "aeiou" else f"a {noun}"
