"""Challenge 13: full slots, fresh samples.

A hundred and twenty-eight slots sample rollouts; the more are busy, the slower is each. A trainer takes sixteen
finished samples, oldest first, works on them for four seconds, and makes a new version. A sample that began more than
two versions ago is dropped, wherever it is. If all slots are always busy, most of the work is thrown away, and the
longest rollouts first; if few are, the trainer waits.

start(state): called whenever something happens; return how many rollouts to start now, at most `free`. The state has
free; running, a pair [age in versions, seconds since its start] for each busy slot; finished, the ages of what waits
for the trainer; training, whether a step is being computed; batch (16), bound (2) and version. How much work a rollout
is has a heavy tail, and nobody knows it before.

Score: the work of all rollouts that were trained on, over what a trainer that never waits would train on if long
rollouts were never dropped, in two runs of 120 seconds on a virtual clock. More is better.
"""


def start(state):
    """All slots, always."""
    return state["free"]
