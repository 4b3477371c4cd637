"""Answers to the exercises of lesson 13, by lesson and exercise; `answers.py` says how they are written and read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["13_async_rl"] = {
    1: """
# wrong: as if nothing were shared
def pace(sample, train, shared):
    return sample + train, max(sample, train)

# wrong: the longer one is slow to its end
def pace(sample, train, shared):
    return sample + train, max(sample, train) / shared

# wrong: taking turns is slow as well
def pace(sample, train, shared):
    return (sample + train) / shared, min(sample, train) / shared + abs(sample - train)

# wrong: the other way round
def pace(sample, train, shared):
    return min(sample, train) / shared + abs(sample - train), sample + train

# right: what is lost while both run is added
def pace(sample, train, shared):
    return sample + train, max(sample, train) + min(sample, train) * (1 / shared - 1)
""",
    2: """
# wrong: dropped groups keep their room
def may_start(journal, groups, staleness):
    n = Counter(event.kind for event in journal)
    return (staleness + n["train"] + 1) * groups - n["start"]

# wrong: a step too few
def may_start(journal, groups, staleness):
    n = Counter(event.kind for event in journal)
    return (staleness + n["train"]) * groups - (n["start"] - n["drop"])

# wrong: what was trained counts no more
def may_start(journal, groups, staleness):
    n = Counter(event.kind for event in journal)
    return (staleness + n["train"] + 1) * groups - (n["start"] - n["drop"] - groups * n["train"])

# wrong: the version of the last event
def may_start(journal, groups, staleness):
    n = Counter(event.kind for event in journal)
    version = journal[-1].version if journal else 0
    return (staleness + version + 1) * groups - (n["start"] - n["drop"])

# right: state by state
def may_start(journal, groups, staleness):
    version, alive = 0, set()
    for event in journal:
        if event.kind == "start":
            alive |= set(event.groups)
        elif event.kind == "drop":
            alive -= set(event.groups)
        elif event.kind == "train":
            version += 1
    return (staleness + version + 1) * groups - len(alive)
""",
    3: """
# wrong: a given token counts
def age(rollouts, version):
    return version - min(token_version for rollout in rollouts for token_version in rollout)

# wrong: the youngest token
def age(rollouts, version):
    return version - max(token_version for rollout in rollouts for token_version in rollout)

# wrong: the first rollout alone
def age(rollouts, version):
    return version - min(token_version for token_version in rollouts[0] if token_version >= 0)

# wrong: the youngest rollout
def age(rollouts, version):
    return min(version - min(token_version for token_version in rollout if token_version >= 0) for rollout in rollouts)

# right: the first token that was sampled, of each rollout
def age(rollouts, version):
    return max(version - next(token_version for token_version in rollout if token_version >= 0) for rollout in rollouts)
""",
    4: """
# wrong: each token's own ratio
def exact(log_ratio):
    return log_ratio.exp()

# wrong: the ratios up to the token
def exact(log_ratio):
    return log_ratio.cumsum(1).exp()

# wrong: the ratios from the token on
def exact(log_ratio):
    return log_ratio.flip(1).cumsum(1).flip(1).exp()

# wrong: the geometric mean
def exact(log_ratio):
    return log_ratio.mean(1, keepdim=True).exp().expand_as(log_ratio)

# wrong: a weight for each rollout
def exact(log_ratio):
    return log_ratio.sum(1, keepdim=True).exp()

# right: a product
def exact(log_ratio):
    return log_ratio.exp().prod(1)[:, None].repeat(1, log_ratio.shape[1])
""",
}
