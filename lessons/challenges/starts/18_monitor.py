"""Challenge 18: the earliest alarm that keeps its word.

A monitor counts in how many of a step's 16 rollouts something suspicious happens, and knows how often it did before. In
some runs the rate rises for good, at a step and by an amount that nobody knows. A look that would be false once in a
hundred is false far more often if one looks thirty times.

alarms(counts, rates, rollouts): counts [runs, steps so far], the known rate of each run before any change, and 16;
return 1 for each run that should raise an alarm now, else 0. It is called after every fourth of 120 steps, with all
that was seen until then.

Score: the mean number of steps from a change to the alarm; a change that is never seen counts to the end of its run.
Less is better. A rule that alarms in more than one of a hundred quiet runs is refused (1.45, since 3,000 runs have some
luck).
"""

import numpy as np


def alarms(counts, rates, rollouts):
    """All steps together, five standard deviations above the known rate."""
    trials = rollouts * counts.shape[1]
    off = counts.sum(1) - rates * trials
    return (off > 5 * np.sqrt(trials * rates * (1 - rates))).astype(int)
