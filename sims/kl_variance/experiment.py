"""Figure 4, plus what a picture of variances does not show: the gradient of each estimator.

    etude figure kl-variance            about three minutes; tokens from runs/small (make small)
    etude figure kl-variance --quick

1. Gaussian pairs q = N(0,1), p = N(m,1): bias and variance of k1, k2, k3 by plain Monte Carlo, compared with their
   closed forms in units of exact standard errors (from the fourth moments, by quadrature: the error estimated from a
   sample is worthless if the tail of k3 dominates).
2. Where k3 stops having less variance than k1: the root on batches of common random numbers, compared with 0.628 nats.
3. The same on real token distributions: the agent after RL, which sampled, and the agent before RL. Both distributions
   are known over the complete vocabulary, so means and variances of the estimators are exact sums at each position.
4. Expected gradients by enumeration, without sampling: each estimator as a loss term and in the reward, on policy and
   off, compared with the exact gradient; for one token and for complete sequences of an autoregressive policy.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.runs import Run
from kit.statistics import bootstrap
from recipe.small.agent import one_row, play, single
from recipe.small.data import task_stream
from recipe.small.learner import language_of
from recipe.small.settings import Recipe
from ref import kl
from ref.engine.sampler import Sampler
from ref.network import load_hf
from ref.rl import pad
from sims.experiment import above, at_least, at_most, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]


@dataclass(frozen=True)
class Experiment:
    """Sizes of the four parts."""

    divergences: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5)
    """True KL of each Gaussian pair, in nats."""
    samples: int = 20_000_000
    """Samples per pair."""
    batches: int = 40
    """Batches of samples for finding the crossing."""
    run: str = "runs/small"
    """A finished run of the recipe, whose agents before and after RL give the token distributions (empty: first run a
    tiny recipe that has learned nothing)."""
    tasks: int = 64
    """Tasks for the agent after RL, four rollouts each."""
    vocab_size: int = 32
    """Vocabulary size of the softmax pairs whose gradients are enumerated."""
    pairs: int = 20
    """Number of such pairs."""
    seed: int = 0
    """Seed of all random numbers."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(divergences=(0.1, 0.6, 1.0), samples=200_000, batches=6, run="", tasks=2, pairs=3)


def moments(m: float, kind: str) -> tuple[float, float, float]:
    """(mean, variance, fourth central moment) of an estimator under q = N(0,1), by quadrature."""
    x = np.linspace(-30, 30 + 4 * m, 400_001)
    weight = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    log_ratio = m * x - m * m / 2
    k = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.expm1(log_ratio) - log_ratio}[kind]
    mean = float((weight * k).sum())
    return mean, float((weight * (k - mean) ** 2).sum()), float((weight * (k - mean) ** 4).sum())


def sampled(run: Run, c: Experiment) -> list[dict]:
    """Part 1: one row per pair and estimator."""
    stage = run.stage("gaussian", total=len(c.divergences), unit="pairs")
    if stage.finished:
        return stage.result()["rows"]
    state = stage.restore() or {"rows": []}
    rows = list(state["rows"])
    for number, divergence in enumerate(c.divergences):
        if number * len(kl.KINDS) < len(rows):
            continue
        m = math.sqrt(2 * divergence)
        generator = torch.Generator().manual_seed(c.seed * 1000 + number)
        sums = {kind: np.zeros(2) for kind in kl.KINDS}
        remaining = c.samples
        while remaining:
            n = min(remaining, 1_000_000)
            x = torch.randn(n, generator=generator, dtype=torch.float64)
            for kind in kl.KINDS:
                k = kl.token_kl(-x.square() / 2, -(x - m).square() / 2, kind) - divergence
                sums[kind] += [k.sum().item(), k.square().sum().item()]
            remaining -= n
        for kind, (first, second) in sums.items():
            mean, variance = kl.gaussian_oracle(m)[kind]
            _, _, fourth = moments(m, kind)
            sample_mean = first / c.samples + divergence
            sample_variance = (second - first**2 / c.samples) / (c.samples - 1)
            rows.append(
                {
                    "part": "gaussian",
                    "kl": divergence,
                    "kind": kind,
                    "mean": sample_mean,
                    "mean_exact": mean,
                    "mean_z": (sample_mean - mean) / math.sqrt(variance / c.samples),
                    "variance": sample_variance,
                    "variance_exact": variance,
                    "variance_z": (sample_variance - variance) / math.sqrt((fourth - variance**2) / c.samples),
                }
            )
        stage.log(number + 1, kl=divergence, k1=rows[-3]["variance"], k3=rows[-1]["variance"])
        stage.progress(number + 1)
        if stage.due():
            stage.save({"rows": rows}, number + 1)
    return stage.finish({"rows": rows})["rows"]


def crossings(c: Experiment) -> list[float]:
    """Part 2: in each batch, the KL at which the sample variances of k1 and k3 are equal (bisection, with the same
    normal numbers at every divergence)."""
    roots = []
    for batch in range(c.batches):
        generator = torch.Generator().manual_seed(c.seed * 1000 + 500 + batch)
        x = torch.randn(max(1000, c.samples // c.batches), generator=generator, dtype=torch.float64)

        def excess(divergence: float, x: Tensor = x) -> float:
            m = math.sqrt(2 * divergence)
            logs = -x.square() / 2, -(x - m).square() / 2
            return (kl.token_kl(*logs, "k3").var() - kl.token_kl(*logs, "k1").var()).item()

        low, high = 0.2, 1.5
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) < 0 else (low, middle)
        roots.append((low + high) / 2)
    return roots


@torch.no_grad()
def measure_tokens(run: Run, c: Experiment, root: Path, config: Recipe) -> dict:
    """Part 3: exact KL and exact variances of k1, k2, k3 at each position of the agent's own tokens."""
    stage = run.stage("tokens", total=c.tasks, unit="tasks")
    if stage.finished:
        return stage.result()
    stage.restore()
    language, r = language_of(root), config.rl
    after, before = (load_hf(root / "checkpoints" / name) for name in ("final", "sft"))
    sampler, tasks = Sampler(after, torch.float32), list(itertools.islice(task_stream(config, "evaluation"), c.tasks))
    generator = torch.Generator().manual_seed(c.seed)
    columns: dict[str, list] = {
        name: [] for name in ("rollout", "kl", "k1", "k2", "k3", "k2_bias", "sampled_k1", "sampled_k3")
    }
    for start in range(0, len(tasks), 16):
        episodes = play(
            sampler, language, tasks[start : start + 16], 4, r.limits(single(r.max_len)), r.max_turns, generator
        )
        ids, mask, _ = pad([one_row(e.chain) for e in episodes])
        logq, logp = (model(ids[:, :-1]).logits.double().log_softmax(-1) for model in (after, before))
        is_own = mask[:, 1:]
        q, log_ratio = logq[is_own].exp(), (logp - logq)[is_own]
        exact = kl.exact_kl(logq[is_own], logp[is_own])
        for kind in kl.KINDS:
            k = kl.token_kl(torch.zeros_like(log_ratio), log_ratio, kind)
            mean = (q * k).sum(1)
            columns[kind] += (q * (k - mean[:, None]).square()).sum(1).tolist()
            if kind == "k2":
                columns["k2_bias"] += (mean - exact).tolist()
            else:
                sampled_values = k.gather(1, ids[:, 1:][is_own][:, None])[:, 0]
                columns[f"sampled_{kind}"] += sampled_values.tolist()
        columns["kl"] += exact.tolist()
        columns["rollout"] += (is_own.nonzero()[:, 0] + 4 * start).tolist()
        stage.progress(min(start + 16, len(tasks)))
    stage.log(1, kl=float(np.mean(columns["kl"])))
    return stage.finish({name: np.round(values, 10).tolist() for name, values in columns.items()})


def relative_distance(value: Tensor, target: Tensor) -> float:
    return ((value - target).norm() / target.norm()).item()


def gradients_of_one_token(c: Experiment) -> dict[str, list[float]]:
    """Part 4, one token: relative distance of each estimator's expected gradient, and of its norm, from the true
    gradient, for random softmax pairs."""
    distances: dict[str, list[float]] = {}
    for pair in range(c.pairs):
        generator = torch.Generator().manual_seed(c.seed * 1000 + pair)
        logits, ref, old = torch.randn(3, c.vocab_size, dtype=torch.float64, generator=generator)
        logits.requires_grad_()
        logp, reference, behavior = (x.log_softmax(-1) for x in (logits, ref, old))
        q, mu = logp.detach().exp(), behavior.exp()

        def gradient(value: Tensor, logits: Tensor = logits) -> Tensor:
            return torch.autograd.grad(value, logits, retain_graph=True)[0]

        true_gradient, reverse_gradient = gradient(kl.exact_kl(logits, ref)), gradient(kl.exact_kl(ref, logits))
        row = {}
        for kind in kl.KINDS:
            k = kl.token_kl(logp, reference, kind)
            loss, reward = gradient((q * k).sum()), gradient((q * k.detach() * logp).sum())
            row |= {
                f"{kind} as loss, size": (loss.norm() / true_gradient.norm()).item(),
                f"{kind} as loss, from ∇KL(q‖p)": relative_distance(loss, true_gradient),
                f"{kind} as loss, from ∇KL(p‖q)": relative_distance(loss, reverse_gradient),
                f"{kind} in reward, from ∇KL(q‖p)": relative_distance(reward, true_gradient),
            }
        k1, k3 = (kl.token_kl(logp, reference, kind) for kind in ("k1", "k3"))
        weight = (logp - behavior).exp()
        row |= {
            "off policy, k1 in reward, no weight": relative_distance(
                gradient((mu * k1.detach() * logp).sum()), true_gradient
            ),
            "off policy, k1 in reward, weight π/μ": relative_distance(
                gradient((mu * weight.detach() * k1.detach() * logp).sum()), true_gradient
            ),
            "on policy, k3 × ratio, from ∇KL(q‖p)": relative_distance(
                gradient((q * (logp - logp.detach()).exp() * k3).sum()), true_gradient
            ),
            "off policy, k3 × ratio, from ∇KL(q‖p)": relative_distance(
                gradient((mu * weight * k3).sum()), true_gradient
            ),
        }
        for name, value in row.items():
            distances.setdefault(name, []).append(value)
    return distances


def gradients_of_sequences(c: Experiment) -> dict[str, list[float]]:
    """Part 4, all sequences of four symbols out of three: distance from the gradient of the sequence's KL."""
    words = torch.tensor(list(itertools.product(range(3), repeat=4)))
    distances: dict[str, list[float]] = {}
    for pair in range(c.pairs):
        generator = torch.Generator().manual_seed(c.seed * 1000 + 700 + pair)
        logits, ref = torch.randn(2, 4, 4, 3, dtype=torch.float64, generator=generator)  # position, previous, symbol
        logits.requires_grad_()
        previous = torch.cat((torch.full_like(words[:, :1], 3), words[:, :-1]), 1)
        logp, reference = (x.log_softmax(-1)[torch.arange(4), previous, words] for x in (logits, ref))
        q = logp.detach().sum(1).exp()

        def gradient(value: Tensor, logits: Tensor = logits) -> Tensor:
            return torch.autograd.grad(value, logits, retain_graph=True)[0]

        true_gradient = gradient((logp.sum(1).exp() * (logp - reference).sum(1)).sum())
        k = {kind: kl.token_kl(logp, reference, kind) for kind in kl.KINDS}
        k1_reward = k["k1"].detach()
        row = {
            "sequence: k1 in reward, summed over the rollout": relative_distance(
                gradient((q * k1_reward.sum(1) * logp.sum(1)).sum()), true_gradient
            ),
            "sequence: k1 in reward, each token its own only": relative_distance(
                gradient((q[:, None] * k1_reward * logp).sum()), true_gradient
            ),
            "sequence: k2 as loss": relative_distance(gradient((q * k["k2"].sum(1)).sum()), true_gradient),
            "sequence: k3 as loss": relative_distance(gradient((q * k["k3"].sum(1)).sum()), true_gradient),
        }
        for name, value in row.items():
            distances.setdefault(name, []).append(value)
    return distances


def experiment(run: Run, config: Experiment) -> dict:
    """All four parts, and the verdicts."""
    c, policies = config, agent(run, config.run, config.seed)
    rows = sampled(run, c)
    stage = run.stage("crossing", total=1, unit="searches")
    roots = stage.result()["kl"] if stage.finished else stage.finish({"kl": crossings(c)})["kl"]
    tokens = {name: np.array(values) for name, values in measure_tokens(run, c, *policies).items()}
    gradients = gradients_of_one_token(c) | gradients_of_sequences(c)
    largest = {name: float(np.max(values)) for name, values in gradients.items()}
    smallest = {name: float(np.min(values)) for name, values in gradients.items()}
    rows += [
        {"part": "gradient", "kind": name, "mean": float(np.mean(v)), "low": smallest[name], "high": largest[name]}
        for name, v in gradients.items()
    ]
    rows += bin_tokens(tokens)
    return {"rows": rows, "claims": verdicts(rows, roots, tokens, largest, smallest), "crossings": roots}


def bin_tokens(tokens: dict[str, np.ndarray]) -> list[dict]:
    """Positions of the agent's tokens, binned by exact KL, with mean variances."""
    edges = [0.0, 1e-4, 1e-3, 1e-2, 1e-1, 0.628, math.inf]
    rows = []
    for low, high in itertools.pairwise(edges):
        in_bin = (tokens["kl"] >= low) & (tokens["kl"] < high)
        if in_bin.any():
            rows.append(
                {
                    "part": "tokens",
                    "kl": float(tokens["kl"][in_bin].mean()),
                    "low": low,
                    "high": None if high == math.inf else high,
                    "positions": int(in_bin.sum()),
                    **{f"{k}_variance": float(tokens[k][in_bin].mean()) for k in kl.KINDS},
                    "k3_below_k1": float((tokens["k3"] < tokens["k1"])[in_bin].mean()),
                }
            )
    return rows


def verdicts(rows: list[dict], roots: list[float], tokens: dict, largest: dict, smallest: dict) -> list[dict]:
    gaussian = [row for row in rows if row["part"] == "gaussian"]
    distance_note, source = "widest distance over the sweep, in exact standard errors", "§4.1, Fig. 4"

    def z(kind: str, moment: str) -> float:
        return max(abs(row[f"{moment}_z"]) for row in gaussian if row["kind"] == kind)

    last = {row["kind"]: row for row in gaussian if row["kl"] == gaussian[-1]["kl"]}
    closest = {row["kind"]: row for row in gaussian if row["kl"] == gaussian[0]["kl"]}
    k2 = {row["kl"]: row["mean"] - row["kl"] for row in gaussian if row["kind"] == "k2"}
    largest_kl = max(k2)
    mean_root, error = float(np.mean(roots)), float(np.std(roots, ddof=1) / math.sqrt(len(roots)))
    claims = [
        claim(
            f"{kind}-unbiased",
            f"{kind} is unbiased",
            source,
            z(kind, "mean"),
            at_most(4.0),
            unit="σ",
            note=distance_note,
        )
        for kind in ("k1", "k3")
    ]
    claims += [
        claim(
            "k2-biased",
            "k2 is biased: by u²/8 on the Gaussian pair",
            source,
            z("k2", "mean"),
            at_most(4.0),
            unit="σ",
            note=f"{distance_note}; bias at KL = {largest_kl:g}: {k2[largest_kl]:.4g} nats, closed form "
            f"{largest_kl**2 / 2:.4g}",
        ),
        claim(
            "variances",
            "variances of k1, k2, k3 are u, u²/2 + u³/4, e^u − 1 − u",
            "closed forms",
            max(z(k, "variance") for k in kl.KINDS),
            at_most(4.0),
            unit="σ",
            note=distance_note,
        ),
        claim(
            "k3-wins-near",
            "k3 has less variance than k1 when p and q are close",
            source,
            closest["k3"]["variance"] / closest["k1"]["variance"],
            at_most(1.0),
            unit="× k1's",
            note=f"at KL = {gaussian[0]['kl']:g}",
        ),
        claim(
            "k3-loses-far",
            "k3's variance is far larger once they are not, hence k1",
            source,
            last["k3"]["variance"] / last["k1"]["variance"],
            at_least(2.0),
            unit="× k1's",
            note=f"at KL = {gaussian[-1]['kl']:g}, and growing as e^(2 KL)",
        ),
        claim(
            "crossing",
            "k3 stops winning at KL = 0.628 nats",
            "closed form e^u = 1 + 2u",
            abs(mean_root - kl.crossing()) / error,
            at_most(4.0),
            unit="σ",
            note=f"distance of the mean of {len(roots)} searches, {mean_root:.4f} nats, from {kl.crossing():.4f}",
        ),
    ]
    per_rollout = np.array(
        [[tokens[k][tokens["rollout"] == r].sum() for k in ("k3", "k1", "kl")] for r in np.unique(tokens["rollout"])]
    )
    ratio = bootstrap(per_rollout, lambda sample: sample[:, 0].sum() / max(sample[:, 1].sum(), 1e-300))
    share = float((tokens["k3"] > tokens["k1"]).mean())
    claims += [
        claim(
            "real-tokens",
            "on a policy's own tokens too, k3's variance is the larger once policy and reference have parted",
            source,
            ratio["value"],
            above(1.0),
            (ratio["low"], ratio["high"]),
            "× k1's",
            f"summed over {len(tokens['kl'])} positions of the agent after RL against before, exact "
            f"over the vocabulary, bootstrap over "
            f"rollouts; mean KL {tokens['kl'].mean():.4f} nats a token; k3's is the larger at "
            f"{100 * share:.1f}% of positions",
        )
    ]
    gradient = "arXiv:2510.01555"

    def make_law_claim(name: str, says: str, key: str, limit: float = 1e-9) -> dict:
        note = f"relative distance, the worst of all pairs, by enumeration: {key}"
        return claim(name, says, gradient, largest[key], at_most(limit), note=note)

    def make_difference_claim(name: str, says: str, key: str, source: str = gradient) -> dict:
        note = (
            f"relative distance from the right gradient, the least of all pairs, by enumeration; the "
            f"largest {largest[key]:.3g}: {key}"
        )
        return claim(name, says, source, smallest[key], at_least(0.05), note=note)

    claims += [
        make_law_claim("k1-loss", "k1 as a loss term has an expected gradient of zero", "k1 as loss, size"),
        make_law_claim(
            "k2-loss",
            "k2 as a loss term has the gradient of KL(q‖p), though its value is biased",
            "k2 as loss, from ∇KL(q‖p)",
        ),
        make_law_claim(
            "k3-loss", "k3 as a loss term has the gradient of the other KL, KL(p‖q)", "k3 as loss, from ∇KL(p‖q)"
        ),
        make_law_claim("k1-reward", "k1 in the reward has the gradient of KL(q‖p)", "k1 in reward, from ∇KL(q‖p)"),
        make_difference_claim("k3-reward", "k3 in the reward has another gradient", "k3 in reward, from ∇KL(q‖p)"),
        make_law_claim(
            "k3-ratio",
            "k3 times a ratio that equals one has another gradient than k3: that of KL(q‖p)",
            "on policy, k3 × ratio, from ∇KL(q‖p)",
        ),
        make_difference_claim(
            "off-policy",
            "samples of an older policy without importance weights give a wrong gradient",
            "off policy, k1 in reward, no weight",
        ),
        make_law_claim(
            "off-policy-weight", "with weights π/μ it is right again", "off policy, k1 in reward, weight π/μ"
        ),
        make_law_claim(
            "sequence-k1",
            "over a sequence, k1 in the reward is right when every token is paid the whole rollout's k1",
            "sequence: k1 in reward, summed over the rollout",
        ),
        make_difference_claim(
            "sequence-k2",
            "over a sequence, k2 as a loss misses what a token does to the states behind it",
            "sequence: k2 as loss",
            "derived here",
        ),
    ]
    return claims


def picture(results: dict, path: Path) -> None:
    """Left, Figure 4: variance against divergence. Middle: the same on an agent's tokens. Right: gradients."""
    from kit.plots import COLOURS, save, sheet

    figure, (left, middle, right) = sheet(
        3, "Three estimates of KL(π‖π_ref): variance, and the gradient they really give"
    )
    rows = results["rows"]
    for kind, colour in zip(kl.KINDS, COLOURS, strict=False):
        pair_rows = [row for row in rows if row["part"] == "gaussian" and row["kind"] == kind]
        x_values = np.geomspace(pair_rows[0]["kl"], pair_rows[-1]["kl"], 100)
        left.plot(x_values, [kl.gaussian_oracle(math.sqrt(2 * x))[kind][1] for x in x_values], color=colour, label=kind)
        left.plot(
            [row["kl"] for row in pair_rows], [row["variance"] for row in pair_rows], "o", color=colour, markersize=4
        )
        token_rows = [row for row in rows if row["part"] == "tokens"]
        middle.plot(
            [r["kl"] for r in token_rows],
            [r[f"{kind}_variance"] for r in token_rows],
            "o-",
            color=colour,
            label=kind,
            markersize=4,
        )
    left.axvline(kl.crossing(), color="#8A97A3", linestyle=":")
    left.text(kl.crossing(), 0.05, " 0.628", color="#5A6773", fontsize=9, transform=left.get_xaxis_transform())
    left.set(
        xscale="log",
        yscale="log",
        xlabel="KL(q‖p), nats",
        ylabel="variance, nats²",
        title="Gaussians: lines exact, dots sampled",
    )
    middle.set(
        xscale="log",
        yscale="log",
        xlabel="KL at the position, nats (bins)",
        title="Tokens of the agent, after against before RL",
    )
    left.legend(frameon=False)
    bars = [
        ("k1 as loss", "k1 as loss, from ∇KL(q‖p)"),
        ("k2 as loss", "k2 as loss, from ∇KL(q‖p)"),
        ("k3 as loss", "k3 as loss, from ∇KL(q‖p)"),
        ("k1 in reward", "k1 in reward, from ∇KL(q‖p)"),
        ("k2 in reward", "k2 in reward, from ∇KL(q‖p)"),
        ("k3 in reward", "k3 in reward, from ∇KL(q‖p)"),
    ]
    by_name = {row["kind"]: row for row in rows if row["part"] == "gradient"}
    for index, (label, key) in enumerate(reversed(bars)):
        row = by_name[key]
        right.barh(index, row["mean"], color=COLOURS[kl.KINDS.index(label[:2])], height=0.6)
        right.text(
            row["mean"], index, f" {row['mean']:.2g}" if row["mean"] > 1e-6 else " exact", va="center", fontsize=9
        )
    right.set_yticks(range(len(bars)), [label for label, _ in reversed(bars)])
    right.set(xlabel="relative distance from ∇KL(q‖p)", title="Expected gradient, enumerated", xlim=(0, None))
    right.margins(x=0.2)
    save(figure, path)
