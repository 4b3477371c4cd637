"""Limits of measurements: a qualification for each claim whose short form would say more than its record shows.

The ledger and docs/claims.md print it in brackets behind the claim or statement. A qualification gives the condition
under which the number was measured, or what it leaves open. It contains no measured number: those come from the record.
"""

from __future__ import annotations

__all__ = ["LIMITS", "qualified"]

SEEDED_HACK = "RL amplifies a hack that some rollouts contain before RL"
SMALL_LEARNING_RATE = "at a learning rate of 1e-6; fewer weights stay equal at the recipe's own 1e-4"
FEW_STEPS = "80 supervised steps of a tiny network, where float32 differs from bfloat16 by about as much"
GENERATED = "a 135M language model; real files, tools, sandboxes and grader, but generated packages"
LIMITS: dict[str, str] = {
    "best-of-k/best-of-4": "mere sharpening raises it, too",
    "best-of-k/best-of-16": "inconclusive in this world: before RL 16 rollouts solve nearly every task, so there is "
    "no headroom",
    "rejection/greedy": "one round of sampling from the policy after SFT; references to follow are most of the tasks",
    "rejection/deeper": "one round of sampling from the policy after SFT; five and six references, where RL had one to "
    "four",
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
    "low-precision/division-mxfp8": "an identity of the formats; not tested in RL",
    "self-summary/cache": "an identity: it follows from the contents of a chain",
    "disk-world/same-curves": "the four calls of the small world, executed on real files; the harness of "
    "environments/ is not part of it",
    "disk-world/learns-on-disk": "the four calls of the small world, executed on real files; the harness of "
    "environments/ is not part of it",
    "real-agent/rl-sampled": GENERATED,
    "real-agent/rl-greedy": GENERATED,
    "real-agent/beyond-control": GENERATED,
    "real-agent/calls": GENERATED,
    "leftover-cache/finds-the-cache": SEEDED_HACK,
    "leftover-cache/monitor-sees": "a single readable path, which the monitor's rules name",
    "tampered-tests/finds-the-tests": SEEDED_HACK,
    "tampered-tests/monitor-sees": "rules find only what they name",
    "real-time-rl/questions": "in a world in which most edits fail, after demonstrations that ask questions",
    "real-time-rl/broken-calls": "not in every training run",
    "real-time-rl/day-old": "borderline: by the experiment's own estimate five training runs are barely enough",
    "feature-deletion/slices-are-tasks": "hardly more often than as many lines deleted at random in one place",
    "feature-deletion/more-than-one-place": "by a small margin",
    "cpt-rl/loss-success": "due to SFT: RL adds about as much at every loss",
    "cpt-rl/loss-reward": "due to SFT: RL adds about as much at every loss",
    "router-mismatch/replay-bf16": "a simulated engine, which rounds",
    "router-mismatch/replay-fp8": "a simulated engine, which rounds",
    "router-mismatch/rl-mismatch": "a simulated engine, which rounds",
    "router-mismatch/rl-p99": "a simulated engine, which rounds",
    "grpo-bias/unmasked-cut-off": "an enumerated toy problem, derived here; not tested in the agent",
    "grpo-bias/masked-cut-off": "an enumerated toy problem, derived here; not tested in the agent",
    "grpo-bias/masked-longer": "an enumerated toy problem, derived here; not tested in the agent",
    "kl-variance/real-tokens": "in total; most of it comes from a few tokens",
    "textual-feedback/nothing-else": "other faults are reported with their sign, for each training run",
}
"""experiment/claim → its qualification."""


def qualified(claim: dict) -> str:
    """A claim's text with its qualification. Claims that name no experiment, as in a run's own record, have none."""
    limit = LIMITS.get(f"{claim.get('experiment')}/{claim['name']}")
    return f"{claim['claim']} ({limit})" if limit else claim["claim"]
