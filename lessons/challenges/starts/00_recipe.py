"""Challenge 0: the best agent that 3,840 rollouts can buy.

After SFT the agent of `etude run recipe --scale small --out runs/compositions`, whose world has compositions alone,
solves about three of five sampled rollouts. Train it on: RL on fresh tasks, with settings of your choice. That recipe
takes a hundred and ten steps of 128 rollouts, and you have as many as thirty of those cost. Fewer and larger steps,
other prices, more rollouts a prompt or harder tasks may do better, and a learning rate that is too high destroys the
agent.

settings(rollouts): `rollouts` is 3,840, what steps × prompts × rollouts may come to; return a dictionary with some of
steps, prompts, rollouts, lr, warmup, decay, temperature, clip_low, clip_high, budget_tokens, later, upsampling, replay,
replay_alpha, payment.effort_price, payment.k, payment.q, payment.invalid_call and payment.kl. `etude run recipe --help`
says what they are.

Score: the share of rollouts of 150 held-out tasks, four each, that pass all hidden tests; sampled at temperature 1.
More is better. One scoring takes about ten minutes with settings near the recipe's, and longer with more steps or a
larger budget of tokens."""


def settings(rollouts):
    """No training."""
    return {"steps": 0}
