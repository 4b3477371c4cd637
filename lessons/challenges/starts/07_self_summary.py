"""Challenge 7: the most facts in 120 characters.

A session goes on for 150 lines, in six contexts of 25. What crosses from one context to the next is a summary of 120
characters that you write. At the end come questions. Names that are used often are asked about often, and the values
are those of the end.

summarise(summary, lines, longest): the summary so far (empty at first) and the lines of this context, each `set NAME
VALUE`, `add NAME MORE` or `look NAME`; return the new summary, at most `longest` characters of printable ASCII.
answer(summary, name): return the value of a name at the end, as text; 0 for a name that never got one. A name has four
letters, consonants and vowels in turn; values stay below 100,000, most of them below 5,000.

Every context, and the questions, are read by a new process: only the summary is known there.

Score: the share of questions that are answered rightly, over 30 sessions with 25 questions each. More is better.
"""


def summarise(summary, lines, longest):
    """Every value as it was set last, the newest ones behind."""
    values = dict(part.split("=") for part in summary.split())
    for line in lines:
        verb, name, *arguments = line.split()
        if verb == "set":
            values.pop(name, None)
            values[name] = arguments[0]
    text = " ".join(f"{name}={value}" for name, value in values.items())
    return text[-longest:].partition(" ")[2] if len(text) > longest else text


def answer(summary, name):
    """What the summary says, or 0."""
    return dict(part.split("=") for part in summary.split()).get(name, "0")
