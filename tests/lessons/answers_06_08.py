"""Answers to the exercises of lessons 6 to 8, by lesson and exercise; `answers.py` says how they are written and
read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["06_length_penalty"] = {
    1: """
# wrong: as if q were one
def bend(x, share, q):
    return (1 / share - 1) / x

# wrong: the sign of the exponent
def bend(x, share, q):
    return (share ** (1 / q) - 1) / x

# wrong: the share over the effort
def bend(x, share, q):
    return 1 / (x * share)

# right: logarithms
def bend(x, share, q):
    return np.expm1(-np.log(share) / q) / x

# right: bisection
def bend(x, share, q):
    low, high = 0.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if length_penalty.marginal_cost(x, middle, q) > share else (low, middle)
    return low
""",
    2: """
# wrong: always at the linear price
def saving(counts, k, q):
    return 1 - length_penalty.effort(replace(counts, turns=1)) / length_penalty.effort(counts)

# wrong: the cost saved, not its share
def saving(counts, k, q):
    before, after = (length_penalty.length_penalty(length_penalty.effort(c), k, q) \
for c in (counts, replace(counts, turns=1)))
    return before - after

# wrong: the share that is left
def saving(counts, k, q):
    before, after = (length_penalty.length_penalty(length_penalty.effort(c), k, q) \
for c in (counts, replace(counts, turns=1)))
    return after / before

# wrong: the cost of the effort saved
def saving(counts, k, q):
    before, after = (length_penalty.effort(c) for c in (counts, replace(counts, turns=1)))
    return length_penalty.length_penalty(before - after, k, q) / length_penalty.length_penalty(before, k, q)

# wrong: calls made one as well
def saving(counts, k, q):
    one = replace(counts, turns=1, tool_calls=min(1, counts.tool_calls))
    before, after = (length_penalty.length_penalty(length_penalty.effort(c), k, q) for c in (counts, one))
    return 1 - after / before

# right: a hundred for each turn
def saving(counts, k, q):
    before = length_penalty.effort(counts)
    return 1 - length_penalty.length_penalty(before - 100 * (counts.turns - 1), k, q) \
/ length_penalty.length_penalty(before, k, q)

# right: a tensor
def saving(counts, k, q):
    efforts = torch.tensor([length_penalty.effort(c) for c in (counts, replace(counts, turns=1))], dtype=torch.float64)
    before, after = length_penalty.length_penalty(efforts, k, q)
    return 1 - after / before
""",
    3: """
# wrong: the cost of the mean
def matched_price(efforts, k, q, budget):
    return budget / length_penalty.length_penalty(efforts.mean(), k, q)

# wrong: the sum of the costs
def matched_price(efforts, k, q, budget):
    return budget / length_penalty.length_penalty(efforts, k, q).sum()

# wrong: the mean of the prices
def matched_price(efforts, k, q, budget):
    return (budget / length_penalty.length_penalty(efforts, k, q)).mean()

# right: plain Python
def matched_price(efforts, k, q, budget):
    return budget * len(efforts) / sum(length_penalty.length_penalty(float(x), k, q) for x in efforts)

# right: torch
def matched_price(efforts, k, q, budget):
    return budget / length_penalty.length_penalty(torch.tensor(efforts), k, q).mean()
""",
    4: """
# wrong: below zero
def best_effort(tau, price):
    return -tau * np.log(price * tau)

# wrong: the distance from zero
def best_effort(tau, price):
    return abs(tau * np.log(price * tau))

# wrong: where all is paid away
def best_effort(tau, price):
    return max(0.0, 1 / price - tau)

# right: two cases
def best_effort(tau, price):
    if price * tau >= 1:
        return 0
    return tau * np.log(1 / (price * tau))

# right: float32 in torch
def best_effort(tau, price):
    return (-tau * torch.tensor(price * tau).log()).clamp(min=0)
""",
}

TEXTS["07_self_summary"] = {
    1: """
# wrong: what the chain says
def reused(chain, chaining):
    return chain.saved

# wrong: without the instruction
def reused(chain, chaining):
    ending = [s for s in chain.segments if s.summary.any()]
    return sum(int((s.sampled & ~s.summary).nonzero()[-1]) + 1 for s in ending)

# wrong: up to the summary
def reused(chain, chaining):
    ending = [s for s in chain.segments if s.summary.any()]
    return sum(len(chaining.instruction) + int(s.summary.nonzero()[0]) for s in ending)

# wrong: up to the request
def reused(chain, chaining):
    ending = [s for s in chain.segments if s.summary.any()]
    return sum(len(chaining.instruction) + int(s.summary.nonzero()[0]) - len(chaining.request) for s in ending)

# wrong: without the last token of the turn
def reused(chain, chaining):
    ending = [s for s in chain.segments if s.summary.any()]
    return sum(len(chaining.instruction) + int((s.sampled & ~s.summary).nonzero()[-1]) for s in ending)

# right: plain Python
def reused(chain, chaining):
    total = 0
    for segment in chain.segments:
        if True in segment.summary.tolist():
            kinds = zip(segment.sampled.tolist(), segment.summary.tolist())
            turns = [at for at, (own, summary) in enumerate(kinds) if own and not summary]
            total += len(chaining.instruction) + turns[-1] + 1
    return total

# right: a tensor
def reused(chain, chaining):
    ending = [s for s in chain.segments if s.summary.any()]
    return sum((len(chaining.instruction) + (s.sampled & ~s.summary).nonzero().amax() + 1 \
for s in ending), torch.tensor(0))
""",
    2: """
# wrong: equal credit for each segment
def credit(rewards, episode_chains):
    pairs = zip(dr_grpo.group_advantages(rewards).flatten(), episode_chains)
    parts = [(a * chain.num_sampled_tokens / len(chain.segments), s) for a, chain in pairs for s in chain.segments]
    return [torch.where(s.sampled, a / s.sampled.sum(), 0.0) for a, s in parts]

# wrong: all on the last token of a segment
def credit(rewards, episode_chains):
    out = []
    for a, chain in zip(dr_grpo.group_advantages(rewards).flatten(), episode_chains):
        for s in chain.segments:
            out.append(torch.zeros(len(s.tokens), dtype=a.dtype))
            out[-1][s.sampled.nonzero()[-1]] = a * s.sampled.sum()
    return out

# wrong: all on the summary
def credit(rewards, episode_chains):
    out = []
    for a, chain in zip(dr_grpo.group_advantages(rewards).flatten(), episode_chains):
        for s in chain.segments:
            those = s.summary if s.summary.any() else s.sampled
            out.append(torch.where(those, a * s.sampled.sum() / those.sum(), 0.0))
    return out

# wrong: a baseline over rows
def credit(rewards, episode_chains):
    rows = torch.tensor([len(chain.segments) for chain in episode_chains]).view(rewards.shape)
    advantages = rewards - (rewards * rows).sum(1, keepdim=True) / rows.sum(1, keepdim=True)
    return [torch.where(s.sampled, a, 0.0) \
for a, chain in zip(advantages.flatten(), episode_chains) for s in chain.segments]

# wrong: given tokens too
def credit(rewards, episode_chains):
    advantages = self_summary.spread(dr_grpo.group_advantages(rewards).flatten(), episode_chains)
    segments = [s for chain in episode_chains for s in chain.segments]
    return [a.expand(len(s.tokens)) for a, s in zip(advantages, segments, strict=True)]

# right: times the mask
def credit(rewards, episode_chains):
    advantages = self_summary.spread((rewards - rewards.mean(1, keepdim=True)).flatten(), episode_chains)
    return [a * s.sampled for a, s in zip(advantages, (s for chain in episode_chains for s in chain.segments))]

# right: float32, without spread
def credit(rewards, episode_chains):
    pairs = zip(dr_grpo.group_advantages(rewards).flatten().float(), episode_chains)
    return [torch.where(s.sampled, a, 0.0) for a, chain in pairs for s in chain.segments]
""",
    3: """
# wrong: the sign
def row_bias(rewards, segments):
    return (rewards * segments).sum() / segments.sum() - rewards.mean()

# wrong: the covariance of a sample
def row_bias(rewards, segments):
    return -torch.cov(torch.stack((rewards, segments.double())))[0, 1] / segments.double().mean()

# wrong: not over the mean
def row_bias(rewards, segments):
    segments = segments.double()
    return rewards.mean() * segments.mean() - (rewards * segments).mean()

# wrong: the mean over rows
def row_bias(rewards, segments):
    advantages = rewards - (rewards * segments).sum() / segments.sum()
    return (advantages * segments).sum() / segments.sum()

# right: the difference of two means
def row_bias(rewards, segments):
    return rewards.mean() - rewards.repeat_interleave(segments).mean()

# right: the covariance of a population
def row_bias(rewards, segments):
    return -torch.cov(torch.stack((rewards, segments.double())), correction=0)[0, 1] / segments.double().mean()

# right: numpy
def row_bias(rewards, segments):
    import numpy as np

    return float(rewards.mean()) - np.average(rewards.numpy(), weights=segments.numpy())
""",
}

TEXTS["08_router_replay"] = {
    1: """
# wrong: against the likeliest expert
def plausible(scores, replayed, k, alpha):
    p = scores.softmax(-1)
    return p.gather(1, replayed) >= alpha * p.amax(-1, keepdim=True)

# wrong: against the first that was not chosen
def plausible(scores, replayed, k, alpha):
    p = scores.softmax(-1)
    return p.gather(1, replayed) >= alpha * p.topk(k + 1, -1)[0][:, -1:]

# wrong: strictly more
def plausible(scores, replayed, k, alpha):
    p = scores.softmax(-1)
    return p.gather(1, replayed) > alpha * p.topk(k, -1)[0][:, -1:]

# wrong: alpha is a probability
def plausible(scores, replayed, k, alpha):
    return scores.softmax(-1).gather(1, replayed) >= alpha

# wrong: scores are no probabilities
def plausible(scores, replayed, k, alpha):
    return scores.gather(1, replayed) >= alpha * scores.topk(k, -1)[0][:, -1:]

# right: the logarithm of the formula
def plausible(scores, replayed, k, alpha):
    slack = math.log(alpha) if alpha else -math.inf
    return scores.gather(1, replayed) >= scores.topk(k, -1)[0][:, -1:] + slack

# right: sorted
def plausible(scores, replayed, k, alpha):
    p = scores.softmax(-1)
    return p.gather(1, replayed) >= alpha * p.sort(-1, descending=True)[0][:, k - 1, None]
""",
    2: """
# wrong: an equal part
def per_layer(share, layers):
    return share / layers

# wrong: if it differed in all layers
def per_layer(share, layers):
    return share ** (1 / layers)

# wrong: for small shares only
def per_layer(share, layers):
    return -math.log(1 - share) / layers

# right: logarithms
def per_layer(share, layers):
    return -math.expm1(math.log1p(-share) / layers)

# right: a tensor
def per_layer(share, layers):
    return 1 - (1 - torch.tensor(share, dtype=torch.float64)) ** (1 / layers)
""",
    3: """
# wrong: as if gates did not share
def router_gradient(scores, experts, values):
    return torch.zeros_like(scores).scatter(1, experts, router_replay.gates(scores, experts) * values)

# wrong: each gate by its own score only
def router_gradient(scores, experts, values):
    g = router_replay.gates(scores, experts)
    return torch.zeros_like(scores).scatter(1, experts, g * (1 - g) * values)

# wrong: the sign
def router_gradient(scores, experts, values):
    g = router_replay.gates(scores, experts)
    return torch.zeros_like(scores).scatter(1, experts, g * ((g * values).sum(-1, keepdim=True) - values))

# wrong: gates over all experts
def router_gradient(scores, experts, values):
    g = scores.softmax(-1).gather(1, experts)
    return torch.zeros_like(scores).scatter(1, experts, g * (values - (g * values).sum(-1, keepdim=True)))

# right: the Jacobian of the gates
def router_gradient(scores, experts, values):
    g = router_replay.gates(scores, experts)
    jacobian = g.diag_embed() - g[:, :, None] * g[:, None]
    return torch.zeros_like(scores).scatter_(1, experts, torch.einsum("nij,nj->ni", jacobian, values))

# right: a loop
def router_gradient(scores, experts, values):
    out, g = torch.zeros_like(scores), router_replay.gates(scores, experts)
    for n, chosen in enumerate(experts.tolist()):
        for i, expert in enumerate(chosen):
            out[n, expert] = g[n, i] * (values[n, i] - g[n] @ values[n])
    return out
""",
}
