"""Answers to the exercises of lessons 3 to 5, by lesson and exercise; `answers.py` says how they are written and
read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["03_mtp"] = {
    1: """
# wrong: the mean over tokens
def stands(p, q):
    return (p / q).clamp(max=1).mean()

# wrong: less the distance, not half of it
def stands(p, q):
    return 1 - (p - q).abs().sum(-1)

# wrong: drafts drawn from p
def stands(p, q):
    return (p * (p / q).clamp(max=1)).sum(-1)

# wrong: the chance that two draws agree
def stands(p, q):
    return (p * q).sum(-1)

# right: the rule's expectation
def stands(p, q):
    return (q * (p / q).clamp(max=1)).sum(-1)

# right: the total variation distance
def stands(p, q):
    return 1 - (p - q).abs().sum(-1) / 2

# right: plain Python
def stands(p, q):
    return sum(map(min, p.tolist(), q.tolist()))
""",
    2: """
# wrong: not a number where every draft stands
def emitted(p, q):
    stood, missing = torch.minimum(p, q), (p - q).clamp(min=0)
    return stood, (1 - stood.sum()) * missing / missing.sum()

# wrong: p, and nothing replaced
def emitted(p, q):
    return p, torch.zeros_like(p)

# wrong: not times the chance that a draft falls
def emitted(p, q):
    missing = (p - q).clamp(min=0)
    return torch.minimum(p, q), missing / missing.sum().clamp(min=1e-30)

# wrong: draws again from p
def emitted(p, q):
    stood = torch.minimum(p, q)
    return stood, (1 - stood.sum()) * p

# wrong: the drafts that fall, not what replaces them
def emitted(p, q):
    return torch.minimum(p, q), (q - p).clamp(min=0)

# right: what p lacks
def emitted(p, q):
    stood = torch.minimum(p, q)
    return stood, p - stood

# right: the rule, step by step
def emitted(p, q):
    stood, missing = q * (p / q).clamp(max=1), (p - q).clamp(min=0)
    return stood, (q - stood).sum() * missing / missing.sum().clamp(min=1e-30)
""",
    3: """
# wrong: every draft counts, whatever fell before it
def tokens_a_pass(chances):
    return 1 + sum(chances)

# wrong: the geometric series of the mean chance
def tokens_a_pass(chances):
    mean = sum(chances) / max(len(chances), 1)
    return sum(mean**reached for reached in range(len(chances) + 1))

# wrong: without the model's own token
def tokens_a_pass(chances):
    total, reached = 0.0, 1.0
    for chance in chances:
        reached *= chance
        total += reached
    return max(total, 1)

# right: float32 in torch
def tokens_a_pass(chances):
    return 1 + torch.tensor(chances).cumprod(0).sum()

# right: products of prefixes
def tokens_a_pass(chances):
    import math

    return sum(math.prod(chances[:reached]) for reached in range(len(chances) + 1))
""",
    4: """
# wrong: always a draft
def best(alpha, cost, max_drafts):
    return max(range(1, max_drafts + 1), key=lambda drafts: drafting.predicted(alpha, drafts, cost))

# wrong: drafts cost nothing
def best(alpha, cost, max_drafts):
    return max(range(max_drafts + 1), key=lambda drafts: drafting.predicted(alpha, drafts, 0.0))

# wrong: as many as do not slow down
def best(alpha, cost, max_drafts):
    return max(drafts for drafts in range(max_drafts + 1) if drafting.predicted(alpha, drafts, cost) >= 1)

# right: more for as long as it pays
def best(alpha, cost, max_drafts):
    drafts = 0
    while drafts < max_drafts and drafting.predicted(alpha, drafts + 1, cost) > drafting.predicted(alpha, drafts, cost):
        drafts += 1
    return drafts

# right: the formula
def best(alpha, cost, max_drafts):
    return max(range(max_drafts + 1), \
key=lambda drafts: (1 - alpha ** (drafts + 1)) / (1 - alpha) / (drafts * cost + 1))
""",
}

TEXTS["04_dr_grpo"] = {
    1: """
# wrong: the sum over a group
def average_gradient(logits, rewards, N, baseline):
    logp, total = logits.log_softmax(0), 0.0
    for group in itertools.product(range(len(logits)), repeat=N):
        group_logp = logp[list(group)]
        advantages = dr_grpo.group_advantages(rewards[list(group)][None], baseline=baseline)[0]
        total = total + group_logp.sum().exp().detach() * (advantages * group_logp).sum()
    return torch.autograd.grad(total, logits)[0]

# wrong: all groups equally likely
def average_gradient(logits, rewards, N, baseline):
    logp, total = logits.log_softmax(0), 0.0
    for group in itertools.product(range(len(logits)), repeat=N):
        advantages = dr_grpo.group_advantages(rewards[list(group)][None], baseline=baseline)[0]
        total = total + (advantages * logp[list(group)]).mean() / len(logits) ** N
    return torch.autograd.grad(total, logits)[0]

# wrong: a gradient through the chance of the group
def average_gradient(logits, rewards, N, baseline):
    logp, total = logits.log_softmax(0), 0.0
    for group in itertools.product(range(len(logits)), repeat=N):
        group_logp = logp[list(group)]
        advantages = dr_grpo.group_advantages(rewards[list(group)][None], baseline=baseline)[0]
        total = total + group_logp.sum().exp() * (advantages * group_logp).mean()
    return torch.autograd.grad(total, logits)[0]

# wrong: groups without their order
def average_gradient(logits, rewards, N, baseline):
    logp, total = logits.log_softmax(0), 0.0
    for group in itertools.combinations_with_replacement(range(len(logits)), N):
        group_logp = logp[list(group)]
        advantages = dr_grpo.group_advantages(rewards[list(group)][None], baseline=baseline)[0]
        total = total + group_logp.sum().exp().detach() * (advantages * group_logp).mean()
    return torch.autograd.grad(total, logits)[0]

# right: without autograd
def average_gradient(logits, rewards, N, baseline):
    p, total = logits.detach().softmax(0), torch.zeros(len(logits), dtype=logits.dtype)
    for group in map(list, itertools.product(range(len(logits)), repeat=N)):
        advantages = dr_grpo.group_advantages(rewards[group][None], baseline=baseline)[0]
        total += p[group].prod() * (advantages[:, None] * (torch.eye(len(p), dtype=p.dtype)[group] - p)).mean(0)
    return total
""",
    2: """
# wrong: clipped on both sides
def pushed(ratio, advantage, clip_low, clip_high):
    return (ratio > 1 - clip_low) & (ratio < 1 + clip_high) & (advantage != 0)

# wrong: an advantage of zero pushes
def pushed(ratio, advantage, clip_low, clip_high):
    return torch.where(advantage >= 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)

# wrong: sides exchanged
def pushed(ratio, advantage, clip_low, clip_high):
    return ((advantage > 0) & (ratio >= 1 - clip_low)) | ((advantage < 0) & (ratio <= 1 + clip_high))

# wrong: widths exchanged
def pushed(ratio, advantage, clip_low, clip_high):
    return ((advantage > 0) & (ratio <= 1 + clip_low)) | ((advantage < 0) & (ratio >= 1 - clip_high))

# right: times the sign
def pushed(ratio, advantage, clip_low, clip_high):
    return (advantage.sign() * (ratio - 1) <= torch.where(advantage > 0, clip_high, clip_low)) & (advantage != 0)

# right: plain Python
def pushed(ratio, advantage, clip_low, clip_high):
    pairs = zip(ratio.tolist(), advantage.tolist())
    return torch.tensor([r <= 1 + clip_high if a > 0 else r >= 1 - clip_low if a < 0 else False for r, a in pairs])
""",
    3: """
# wrong: not cleared
def accumulated(sizes, budget):
    for rows in torch.arange(B).split(list(sizes)):
        part(rows, budget).backward()
    return table.grad

# wrong: each part divided by its share of the budget
def accumulated(sizes, budget):
    table.grad = None
    for rows in torch.arange(B).split(list(sizes)):
        part(rows, budget * len(rows) / B).backward()
    return table.grad

# wrong: each part divided by its own tokens
def accumulated(sizes, budget):
    table.grad = None
    for rows in torch.arange(B).split(list(sizes)):
        (part(rows, mask[rows].sum().item()) / len(sizes)).backward()
    return table.grad

# wrong: the mean of the parts
def accumulated(sizes, budget):
    table.grad = None
    for rows in torch.arange(B).split(list(sizes)):
        (part(rows, budget) / len(sizes)).backward()
    return table.grad

# right: gradients, then their sum
def accumulated(sizes, budget):
    return sum(torch.autograd.grad(part(rows, budget), table)[0] for rows in torch.arange(B).split(list(sizes)))
""",
}

TEXTS["05_kl"] = {
    1: """
# wrong: the spread of one token
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(logp, ref_logp, kind)
    return value.mean().item(), value.std().item()

# wrong: policies exchanged
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(ref_logp, logp, kind)
    return value.mean().item(), (value.std() / len(value) ** 0.5).item()

# wrong: always k1
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(logp, ref_logp, "k1")
    return value.mean().item(), (value.std() / len(value) ** 0.5).item()

# right: tensors
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(logp, ref_logp, kind)
    return value.mean(), (value.var() / len(value)).sqrt()

# right: numpy
def estimate(logp, ref_logp, kind):
    value = kl.token_kl(logp, ref_logp, kind).numpy()
    return value.mean(), value.std() / len(value) ** 0.5
""",
    2: """
# wrong: a gradient through k1
def reward_gradient(logits, reference):
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k1 = kl.token_kl(logp, ref_logp, "k1")
    return torch.autograd.grad((logp.detach().exp() * k1 * logp).sum(), logits)[0]

# wrong: a gradient through the probabilities too
def reward_gradient(logits, reference):
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k1 = kl.token_kl(logp, ref_logp, "k1").detach()
    return torch.autograd.grad((logp.exp() * k1 * logp).sum(), logits)[0]

# wrong: the sign
def reward_gradient(logits, reference):
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k1 = kl.token_kl(logp, ref_logp, "k1").detach()
    return -torch.autograd.grad((logp.detach().exp() * k1 * logp).sum(), logits)[0]

# right: the score function's identity
def reward_gradient(logits, reference):
    logp, ref_logp = logits.log_softmax(-1), reference.log_softmax(-1)
    k1 = kl.token_kl(logp, ref_logp, "k1").detach()
    return torch.autograd.grad((logp.exp() * k1).sum(), logits)[0]

# right: without autograd
def reward_gradient(logits, reference):
    logp = logits.detach().log_softmax(-1)
    k1 = logp - reference.log_softmax(-1)
    return logp.exp() * (k1 - (logp.exp() * k1).sum())
""",
    3: """
# wrong: takes the divergence for the distance of the means
def choose(divergence, n):
    oracle = kl.gaussian_oracle(divergence)
    name = min(("k1", "k3"), key=lambda kind: oracle[kind][1])
    return name, math.sqrt(oracle[name][1] / n)

# wrong: the spread of one token
def choose(divergence, n):
    oracle = kl.gaussian_oracle(math.sqrt(2 * divergence))
    name = min(("k1", "k3"), key=lambda kind: oracle[kind][1])
    return name, math.sqrt(oracle[name][1])

# wrong: 400 tokens, however many there are
def choose(divergence, n):
    oracle = kl.gaussian_oracle(math.sqrt(2 * divergence))
    name = min(("k1", "k3"), key=lambda kind: oracle[kind][1])
    return name, math.sqrt(oracle[name][1]) / 20

# wrong: always k3
def choose(divergence, n):
    return "k3", math.sqrt(kl.gaussian_oracle(math.sqrt(2 * divergence))["k3"][1] / n)

# right: by the crossing
def choose(divergence, n):
    name = "k3" if divergence < kl.crossing() else "k1"
    return name, (kl.gaussian_oracle((2 * divergence) ** 0.5)[name][1] / n) ** 0.5
""",
}
