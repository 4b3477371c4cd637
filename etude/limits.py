"""What a measurement does not carry: a qualification for each claim whose short form would say more than its record
shows.

The ledger prints it in brackets behind the claim, and the README behind the statement. A qualification says under which
condition the number was measured, or what it leaves open. It holds no measured number: those come from the record.
"""

from __future__ import annotations

__all__ = ["LIMITS", "qualified"]

SEEDED_HACK = "RL amplifies a hack that some rollouts show before it"
SMALL_LEARNING_RATE = "at a learning rate of 1e-6; fewer weights stay equal at the recipe's own 1e-4"
FEW_STEPS = "80 supervised steps of a tiny network, where float32 differs from bfloat16 by about as much"
LIMITS: dict[str, str] = {
    "best-of-k/best-of-4": "it rises under mere sharpening, too",
    "best-of-k/best-of-16": "inconclusive in this world: before RL 16 rollouts solve nearly every task, so there is "
    "no head-room",
    "base-eval/tracking-parts": "two small models; scored by similarity, where Table 2 has a distance, lower is better",
    "async-rl/half-the-time": "faster, by less than the claimed factor",
    "async-rl/same-success": "less time; the interval leaves open how much less",
    "async-rl/stable": "20 steps with a staleness of at most 4; no arm was stale enough to do harm",
    "async-rl/balance": "with twice the slots; a bound of one version then drops groups",
    "async-rl/background": "weights of a 2.6 M network, written to a folder",
    "weight-sync/unchanged": SMALL_LEARNING_RATE,
    "weight-sync/fiftieth": "at most a fiftieth, at a learning rate of 1e-6; several times more at the recipe's own "
    "1e-4",
    "low-precision/trains": FEW_STEPS,
    "low-precision/mxfp8-trains": FEW_STEPS,
    "low-precision/division-mxfp8": "an identity of the formats; in RL not tested",
    "self-summary/cache": "an identity: it follows from what a chain holds",
    "disk-world/same-curves": "the four calls of the small world, carried out on real files; the harness of "
    "environments/ is not part of it",
    "disk-world/learns-on-disk": "the four calls of the small world, carried out on real files; the harness of "
    "environments/ is not part of it",
    "leftover-cache/finds-the-cache": SEEDED_HACK,
    "leftover-cache/monitor-sees": "one readable path, which the monitor's rules name",
    "tampered-tests/finds-the-tests": SEEDED_HACK,
    "tampered-tests/monitor-sees": "rules find what they name",
    "real-time-rl/questions": "in a world whose edits mostly fail, after demonstrations that ask",
    "real-time-rl/broken-calls": "not in every training",
    "real-time-rl/day-old": "borderline: by the experiment's own estimate five trainings hardly suffice",
    "feature-deletion/slices-are-tasks": "hardly more often than as many lines deleted at random in one place",
    "feature-deletion/more-than-one-place": "by little",
    "cpt-rl/loss-success": "carried by SFT: RL adds about as much whatever the loss",
    "cpt-rl/loss-reward": "carried by SFT: RL adds about as much whatever the loss",
    "router-mismatch/replay-bf16": "a simulated engine, which rounds",
    "router-mismatch/replay-fp8": "a simulated engine, which rounds",
    "router-mismatch/rl-mismatch": "a simulated engine, which rounds",
    "router-mismatch/rl-p99": "a simulated engine, which rounds",
    "grpo-bias/unmasked-cut-off": "an enumerated toy, derived here; in the agent not tested",
    "grpo-bias/masked-cut-off": "an enumerated toy, derived here; in the agent not tested",
    "grpo-bias/masked-longer": "an enumerated toy, derived here; in the agent not tested",
    "kl-variance/real-tokens": "in sum; most of it comes from few tokens",
    "textual-feedback/nothing-else": "other faults are reported with their sign, each training by itself",
}
"""experiment/claim → its qualification."""


def qualified(claim: dict) -> str:
    """A claim's text with its qualification. A claim that names no experiment, as in a run's own record, has none."""
    limit = LIMITS.get(f"{claim.get('experiment')}/{claim['name']}")
    return f"{claim['claim']} ({limit})" if limit else claim["claim"]
