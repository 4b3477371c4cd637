"""Challenge 17: prices that move habits and nothing else.

A policy has eight ways of working. They differ in how often they succeed and in how much of three habits they show: of the first, those
that succeed more show more. One way does nothing at all, and so has no bad habit. Training follows the gradient of success minus price
times habit. Prices that are too high teach to do nothing; prices that are too low teach nothing.

prices(ways, success, habits): 1,500 rollouts of the policy before training: the way of each, from 0 to 7, whether it succeeded, and how
often it showed each habit, [1500, 3]; return three prices from 0 to 100. You are asked in sixteen worlds.

Score: the share of the habits that goes away, compared with training without prices, averaged over habits and worlds. More is better.
Prices that cost more than one point of success in the mean are refused. Training takes 120 steps of size 1 on the logits of the policy.
"""


def prices(ways, success, habits):
    """Next to nothing."""
    return [0.001, 0.001, 0.001]
