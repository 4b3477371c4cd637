"""The pairs of axes in which the curves of training runs are drawn: which metrics of which stages."""

from dataclasses import dataclass

from recipe.small.monitored import NAMES

__all__ = ["PANELS", "SPEED", "Panel"]


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes."""

    name: str
    """Name of its files."""
    title: str
    """Title."""
    stages: tuple[str, ...]
    """Stages that train one after another; steps and tokens count on from stage to stage."""
    series: dict[str, str]
    """Curves: key in the metrics, and name in the legend."""
    unit: str
    """Label of the vertical axis."""
    words: str
    """Caption."""
    x: str = "step"
    log: bool = False


SPEED = "Speed"
SPEED_STAGES = tuple(f"speed {stage}" for stage in ("cpt", "mtp", "long", "sft", "rl"))
"""As `etude.explorer.runs.lines.speed_in` names them."""
_DRAFT_NAMES = {1: "one ahead", 2: "two", 3: "three"}
PANELS: dict[str, tuple[Panel, ...]] = {
    "RL: reward": (
        Panel(
            "reward",
            "Reward and success",
            ("rl",),
            {"success": "success", "reward": "reward"},
            "mean over the batch",
            "Every step uses new prompts, so memorisation cannot raise this curve. Reward is success "
            "minus the penalties.",
        ),
        Panel(
            "success",
            "Held-out success",
            (),
            {},
            "share of tasks",
            "Before RL and after it. Whiskers are 95% intervals over held-out tasks.",
        ),
    ),
    "RL: length, drift": (
        Panel(
            "length",
            "Tokens per rollout",
            ("rl",),
            {"tokens": "tokens"},
            "tokens",
            "The length penalty reduces it. A sudden fall towards zero would mean that the agent stops without trying.",
        ),
        Panel(
            "drift",
            "Distance from the policy before RL",
            ("rl",),
            {"kl": "k1"},
            "nats per rollout",
            "A slow rise is normal; a jump means that training is unstable.",
        ),
    ),
    "RL: calls, entropy": (
        Panel(
            "calls",
            "Invalid calls",
            ("rl",),
            {"invalid_calls": "invalid calls"},
            "a rollout",
            "Calls that the environment could not parse. They cost reward and should not increase.",
        ),
        Panel(
            "entropy",
            "Entropy, estimated from samples",
            ("rl",),
            {"nll": "entropy"},
            "nats a token",
            "The policy's remaining uncertainty; near zero it no longer explores.",
        ),
    ),
    "RL: monitor": (
        Panel(
            "evidence",
            "Evidence of a change",
            ("rl",),
            {f"evidence_{name}": words for name, words in NAMES.items()} | {"alarm_at": "an alarm from here on"},
            "log of the e-process, nats",
            "Evidence that the statistics of rollouts have changed since the first steps. At most one unchanged run "
            "in a hundred reaches the alarm.",
        ),
        *(
            Panel(
                f"watch-{name.replace('_', '-')}",
                f"{words[0].upper()}{words[1:]}",
                ("rl",),
                {f"watch_{name}": "mean of a step", f"low_{name}": "usual: from", f"high_{name}": "usual: to"},
                "share",
                "Between the lines, the mean does not count as changed. Evidence above the threshold means that it "
                "has changed, for better or worse.",
            )
            for name, words in NAMES.items()
        ),
    ),
    "Pretraining": (
        Panel(
            "loss",
            "Training loss",
            ("cpt", "long", "sft"),
            {"loss": "loss"},
            "nats a token",
            "Short context, long context, demonstrations. Each phase has its own data, so a jump "
            "between phases is normal.",
            "tokens",
        ),
        Panel(
            "perplexity",
            "Held-out codebase",
            ("cpt", "long", "sft"),
            {"codebase_ppl": "perplexity"},
            "perplexity per token",
            "On held-out code, during training on code. It is not measured during SFT, which trains on demonstrations "
            "only.",
            "tokens",
            True,
        ),
    ),
    "Drafts": (
        Panel(
            "draft-kl",
            "Distance of the draft heads from the main head",
            ("mtp", "long", "sft", "rl"),
            {f"kl_{depth}": words for depth, words in _DRAFT_NAMES.items()},
            "KL, nats",
            "KL from the main head to each draft layer, which is first distilled, then trained jointly.",
        ),
        Panel(
            "draft-agreement",
            "Drafts that match",
            ("mtp", "long", "sft", "rl"),
            {f"agree_{depth}": words for depth, words in _DRAFT_NAMES.items()},
            "share of positions",
            "Share of positions where draft layer and main head have the same most likely token. The higher, the more "
            "drafts are accepted.",
        ),
    ),
    SPEED: (
        Panel(
            "step-seconds",
            "Where a step's time goes",
            SPEED_STAGES,
            {"seconds": "whole step", "sample": "sampling", "wait": "waiting", "train": "training", "update": "update"},
            "seconds",
            "Waiting: ranks that have sampled, for those that have not. Means over ranks; the whole step is that of "
            "the slowest rank.",
        ),
        Panel(
            "mfu",
            "Model FLOPs utilisation",
            SPEED_STAGES,
            {"mfu": "MFU"},
            "share of peak",
            "FLOPs of the forward and backward passes of the tokens trained on, without what is recomputed, over what "
            "the ranks' peak would do while they train.",
        ),
        Panel(
            "tokens-per-second",
            "Tokens trained on",
            SPEED_STAGES,
            {"tokens_per_second": "a rank"},
            "tokens a second",
            "Without padding, over the seconds of the whole step.",
        ),
        Panel(
            "memory",
            "Memory",
            SPEED_STAGES,
            {"peak": "peak", "memory": "at the end of the step"},
            "bytes",
            "Of the rank that has most. On a CPU the memory of its process, whose peak is that since it began.",
        ),
    ),
}
"""Options of the radio button; most have two pictures, because a redraw waits for the drawing."""
