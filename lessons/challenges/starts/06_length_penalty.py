"""Challenge 6: the penalty that saves most and teaches nobody to give up.

An agent that spends the effort x on a task of scale d succeeds with chance 1 − exp(−x/d). It knows d, and chooses x for
the highest chance minus penalty, price · C(x) with C(x) = ((1 + kx)^(1−q) − 1)/(k(1 − q)). Three tasks of four are
easy, d around 60; the others are hard, d around 2500. A high price makes agents quick on the easy ones, and then the
hard ones stop being worth a try.

Effort itself costs 0.00001 a unit; the share is of what the agent spends without a penalty; efforts end at 100,000.

penalty(scales): the scales of 400 tasks, in token equivalents; return price and k from 0 to a million, and q from 0 to
100.

Score: the share of effort that is saved, averaged over 400 other tasks. More is better. A penalty that costs more than
one point of success is refused.
"""


def penalty(scales):
    """A small linear price."""
    return 0.00001, 0.0, 0.0
