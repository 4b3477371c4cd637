"""Challenge 9: a deal of sequences that leaves no rank waiting.

A step is as slow as its fullest rank. 160 sequences are dealt to 32 ranks, five on average; what each costs
is known, attention included. The greedy rule that the trainer uses, longest first to the emptiest rank, is quick and
not the best.

deal(costs, ranks): costs [160], in units of a rank's mean load; return the rank of each sequence, from 0 to ranks − 1.
You are asked twelve times, and have a minute for all of them.

Score: how much higher the highest load is than what no dealing can beat (the mean load, or the longest sequence), in
percent, averaged over twelve steps. Less is better.
"""


def deal(costs, ranks):
    """Longest first, each to the emptiest rank."""
    loads, rank_of = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank_of[i] = loads.index(min(loads))
        loads[rank_of[i]] += costs[i]
    return rank_of
