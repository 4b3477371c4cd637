"""Challenge 3: how far to draft, when nobody says how hard the text is.

A cycle of speculative decoding costs 1, and 0.15 more for every token that is drafted. It writes the drafts that stand,
and one token besides. Easy stretches of a text keep almost every draft, hard ones few, and the text changes between
them without a word. What was kept lately tells.

drafts(history, longest, cost): `history` holds the last 24 cycles of this text as [drafted, kept], oldest first, and is
empty at the start; return how many tokens to draft next, from 0 to `longest`, which is 8.

Score: tokens per unit of cost over six texts, as a multiple of what the best fixed length has, chosen in hindsight.
More is better."""


def drafts(history, longest, cost):
    """Always three."""
    return 3
