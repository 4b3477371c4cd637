"""Challenge 1: a schedule and a mix for 150 steps.

A small network learns from two sources of words. General text never ends. Of the domain there are 24 rows, exactly
three steps' worth, and it follows the same rules as general text after three quarters of the words. How many steps
should read which, in which order, and how fast? Reading the same rows again and again learns them by heart.

plan(steps): return a pair [learning rate, share], both from 0 to 1, for each of the 150 steps. A step takes eight rows
of 48 words; each is a row of the domain with chance `share`, and new general text otherwise. The optimiser is AdamW,
gradients are clipped to norm one.

Score: the loss on held-out text of the domain, less that of the source itself, in nats a token. Less is better.
"""


def plan(steps):
    """One rate, half and half."""
    return [[1e-3, 0.5]] * steps
