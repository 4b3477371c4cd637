"""Challenge 17: prices that move habits and nothing else.

A policy has eight ways of working. They differ in how often they succeed and in how much of three habits they show: of
the first, those that succeed more show more. One way does nothing at all, and so has no bad habit. Training follows the
gradient of success minus price times habit: 120 steps of size 1 on the logits of the policy. Prices that are too high
teach to do nothing; prices that are too low teach nothing.

prices(ways, success, habits): 6,000 rollouts of the policy before training: the way of each, from 0 to 7, whether it
succeeded, and how often it showed each habit, [6000, 3]; return three prices from 0 to 1. You are asked in 64 worlds.

Score: prices gain the share of the habits that goes away, compared with training without prices and averaged over
habits, minus five times the success that is lost; success that is won counts for them. The score is what you gain in
all worlds, as a share of what the best of 125 prices gain for one who knows each world. More is better. The best prices
that are the same in all worlds gain about half."""


def prices(ways, success, habits):
    """Next to nothing."""
    return [0.001, 0.001, 0.001]
