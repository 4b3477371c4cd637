"""Multi-token prediction: learning from distributions or from labels, and the speed-up from drafts.

    etude figure mtp                        under twenty-five minutes on two cores; checkpoints from runs/small (make
                                            small)
    etude figure mtp --quick

1. MTP layers from scratch on the frozen mid-CPT trunk, as in the recipe: trained to match the main head's distribution,
   or to predict the next token. Both on the same batches in the same order from the same weights, at the recipe's
   learning rates and at half and twice these, because the recipe's rates were chosen with distillation and labels may
   need others. On held-out text (modules of held-out functions and the held-out codebase, mixed as in training), by
   depth: how often the greedy draft is the main head's choice, and the probability that sampling accepts a draft, Σ
   min(p, q). Earlier drafts are assumed to be accepted: the layers read the tokens of the text.
2. Joint training in long context and SFT, with and without gradients into the trunk (`sims/mtp/joint.py`).
3. The run's last agent with its own layers decodes held-out rollouts greedily at batch 1 (`sims/mtp/drafting.py`):
   measured and predicted speed-up. This is a timing, so it needs an idle machine.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.process import in_fresh_process
from kit.runs import Run
from kit.statistics import bootstrap
from recipe.microrepo import document, generate
from recipe.small.data import code_pieces, heldout_codebase, take
from recipe.small.learner import language_of, load_checkpoint, packed_rows
from recipe.small.settings import Recipe
from ref import cpt
from ref.mtp import MTP, mtp_loss
from ref.muon import optimizers
from ref.network import Transformer
from ref.network.masters import Masters
from sims.experiment import above, claim
from sims.mtp import joint as joint_mtp
from sims.mtp.drafting import EXPECTED, FULL, GREEDY, Experiment, acceptance, curve, decode, speed_rows, speed_verdicts
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

KINDS = ("distill", "hard")


class Student:
    """MTP layers in training, with the recipe's master weights, optimisers and schedule."""

    def __init__(self, recipe: Recipe, trunk: Transformer, kind: str, rate: float, seed: int):
        torch.manual_seed(seed)
        mtp = MTP(trunk.config, recipe.mtp.layers)
        self.kind, self.layers = kind, Masters(mtp, getattr(torch, recipe.training.dtype))
        muon = recipe.training.optimizer == "muon"
        self.optimizers = optimizers(mtp, rate * recipe.mtp.muon_lr, rate * recipe.mtp.lr, use_muon=muon)
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]

    def learn(self, trunk: Transformer, out, ids: Tensor, doc: Tensor, factor: float) -> float:
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        loss, count, _ = mtp_loss(self.layers.model, trunk, out, ids, doc, kind=self.kind)
        (loss / count).backward()
        self.layers.step(self.optimizers)
        return loss.item() / count

    def state(self) -> dict:
        return {"mtp": self.layers.masters.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def restore(self, state: dict) -> None:
        self.layers.masters.load_state_dict(state["mtp"])
        self.layers.copy_down()
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)


def heldout(c: Experiment, root: Path, recipe: Recipe) -> tuple[Tensor, Tensor, np.ndarray]:
    """ids and doc [rows, T], and which rows come from the small world; the others are code."""
    tokenizer, rng, T = language_of(root).tokenizer, random.Random(f"{c.seed}-mtp-heldout"), recipe.training.length
    end = tokenizer.token_to_id("<|endoftext|>")
    tasks = (generate(rng, "heldout", config=recipe.world) for _ in itertools.count())
    modules = ([*tokenizer.encode(document(task, rng)).ids, end] for task in tasks)
    files = list(heldout_codebase(root).files.values())
    rng.shuffle(files)
    share = recipe.data.world_share
    code = code_pieces(tokenizer, files, c.heldout_tokens * (1 - share), T, end, rng)
    sources = ((modules, share), (code, 1 - share))
    parts = [cpt.pack(list(take(pieces, c.heldout_tokens * part)), T, end) for pieces, part in sources]
    ids, doc = (torch.from_numpy(np.concatenate([p[i] for p in parts]).astype(np.int64)) for i in (0, 1))
    return ids, doc, np.arange(len(ids)) < len(parts[0][0])


def list_arms(c: Experiment) -> list[tuple[str, float]]:
    return [(kind, rate) for kind in KINDS for rate in c.rates]


def trained(run: Run, c: Experiment, root: Path, recipe: Recipe, number: int) -> tuple[np.ndarray, list[int]]:
    """One repetition, all kinds and rates in lockstep: counts [arms, looks, rows, depth, 3], and the tokens seen at
    each look."""
    rows, docs = packed_rows(root, "short")
    B = max(1, recipe.training.batch_tokens // recipe.training.length)
    steps = max(len(c.looks), min(len(rows) // B, c.tokens // recipe.training.batch_tokens))
    stage, path = run.stage(f"mtp-{number}", total=steps), run.path("counts", f"{number}.npy")
    if stage.finished:
        return np.load(path), stage.result()["tokens"]
    trunk = load_checkpoint(root, recipe, "mid-cpt", with_mtp=False)[0].requires_grad_(False)
    ids, doc, _ = heldout(c, root, recipe)
    with torch.no_grad():
        text = trunk(ids, doc=doc, logits=False), ids, doc
    teacher = load_checkpoint(root, recipe, "mid-cpt", with_mtp=False)[0].requires_grad_(False)
    teacher = teacher.to(getattr(torch, recipe.training.dtype))
    students = {
        f"{kind} {rate:g}": Student(recipe, trunk, kind, rate, 1000 * c.seed + number) for kind, rate in list_arms(c)
    }
    order = np.random.default_rng([c.seed, number]).permutation(len(rows))
    state, counts, tokens, seen_tokens = stage.restore(), [], [], 0
    if state:
        counts, tokens, seen_tokens = list(state["counts"]), list(state["tokens"]), state["seen"]
        for name, student in students.items():
            student.restore(state["students"][name])
    looks = {max(1, round(share * steps)) for share in c.looks}
    for step in range(state["step"] if state else 0, steps):
        batch = order[np.arange(step * B, (step + 1) * B) % len(order)]
        batch_ids, batch_docs = (torch.from_numpy(x[batch].astype(np.int64)) for x in (rows, docs))
        with torch.no_grad():
            out = teacher(batch_ids, doc=batch_docs, logits=False)
        factor = cpt.wsd(step, steps, steps // 10, 0)
        losses = {
            name: student.learn(teacher, out, batch_ids, batch_docs, factor) for name, student in students.items()
        }
        seen_tokens += int((batch_docs >= 0).sum())
        if step + 1 in looks:
            tokens.append(seen_tokens)
            counts.append(np.stack([acceptance(s.layers.masters, trunk, *text) for s in students.values()]))
            total = counts[-1].sum(1)
            shares = {
                f"accepted {name}": (total[i, :, EXPECTED] / total[i, :, 0]).mean() for i, name in enumerate(students)
            }
            stage.log(step + 1, tokens=seen_tokens, **losses, **shares)
        stage.progress(step + 1, seen_tokens, loss=losses["distill 1"])
        if stage.due():
            states = {name: student.state() for name, student in students.items()}
            stage.save(
                {"step": step + 1, "seen": seen_tokens, "tokens": tokens, "counts": counts, "students": states},
                step + 1,
            )
    all_counts = np.stack(counts, 1)
    np.save(path, all_counts)
    stage.finish({"steps": steps, "tokens": tokens}, [path])
    return all_counts, tokens


def fewer(distill: np.ndarray, hard: np.ndarray, tokens: np.ndarray) -> float:
    """Factor by which distillation needs fewer tokens to reach the final acceptance of labels (below one: it needs
    more). Acceptance is interpolated linearly in log tokens between looks; before the first look, the result is a
    bound."""

    def find_tokens(line: np.ndarray, level: float) -> float:
        index = int(np.argmax(line >= level))
        if index == 0:
            return float(tokens[0])
        fraction = (level - line[index - 1]) / (line[index] - line[index - 1])
        return float(np.exp(np.log(tokens[index - 1]) + fraction * np.log(tokens[index] / tokens[index - 1])))

    if distill[-1] >= hard[-1]:
        return tokens[-1] / find_tokens(distill, hard[-1])
    return find_tokens(hard, distill[-1]) / tokens[-1]


def experiment(run: Run, config: Experiment) -> dict:
    """All parts, and the verdicts."""
    c, (root, recipe) = config, agent(run, config.run, config.seed)
    repetitions = [trained(run, c, root, recipe, number) for number in range(c.seeds)]
    ids, doc, world = heldout(c, root, recipe)
    joint = {
        arm: [joint_mtp.training(run, c, root, recipe, arm, number, (ids, doc)) for number in range(c.repetitions)]
        for arm in joint_mtp.ARMS
    }
    # rows first, because the bootstrap resamples them: rows, repetitions, arms, looks, depth, 3
    counts = np.stack([repetition_counts for repetition_counts, _ in repetitions]).transpose(3, 0, 1, 2, 4, 5)
    tokens = np.array(repetitions[0][1], dtype=float)
    stage = run.stage("decode", total=c.rounds * c.tasks, unit="tasks")
    if not stage.finished:
        stage.restore()
        stage.finish(in_fresh_process(decode, root, recipe, c, progress=stage.progress))
    speeds = speed_rows(c, stage.result())
    rows = training_rows(c, counts, tokens, world) + joint_mtp.joint_rows(c, joint) + speeds
    claims = (
        learning_verdicts(c, counts, tokens)
        + joint_mtp.joint_verdicts(c, joint)
        + joint_mtp.transplanted(rows)
        + speed_verdicts(rows)
    )
    return {"rows": rows, "claims": claims}


def training_rows(c: Experiment, counts: np.ndarray, tokens: np.ndarray, world: np.ndarray) -> list[dict]:
    """One row per kind, rate, look, depth and text, averaged over repetitions; intervals over the rows of text, and the
    range over repetitions."""
    rows = []
    for text, row_mask in (("all", world | True), ("world", world), ("code", ~world)):
        for (kind, rate), look, k in itertools.product(list_arms(c), range(len(tokens)), range(counts.shape[4])):
            selected_counts = counts[row_mask][:, :, list_arms(c).index((kind, rate)), look, k]  # rows, repetitions, 3
            row = {
                "part": "training",
                "text": text,
                "kind": kind,
                "rate": rate,
                "tokens": tokens[look],
                "depth": k + 1,
                "positions": int(selected_counts[:, 0, 0].sum()),
            }
            for name, column in (("greedy", GREEDY), ("expected", EXPECTED)):
                by_repetition = selected_counts[..., column].sum(0) / selected_counts[..., 0].sum(0)
                row |= {
                    name: by_repetition.mean(),
                    f"{name}_least": by_repetition.min(),
                    f"{name}_most": by_repetition.max(),
                }
                if text == "all":
                    share = bootstrap(
                        selected_counts.sum(1),
                        lambda d, i=column: d[:, i].sum() / d[:, 0].sum(),
                        n=c.resamples,
                        seed=c.seed,
                    )
                    row |= {f"{name}_low": share["low"], f"{name}_high": share["high"]}
            rows.append({key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()})
    return rows


def learning_verdicts(c: Experiment, counts: np.ndarray, tokens: np.ndarray) -> list[dict]:
    """Rules, fixed before measuring. Distillation is faster if its acceptance, averaged over looks and depths, is
    higher by the interval over rows of text at the recipe's rates, in every repetition, and with each kind at its own
    best rate. The best rate is chosen on one half of the rows and judged on the other."""
    arms, claims = list_arms(c), []

    def line(sample: np.ndarray, kind: str, rate: float, column: int) -> np.ndarray:
        return curve(sample[:, :, arms.index((kind, rate))].sum(1), column)

    def gain(sample: np.ndarray, column: int, rates: tuple[float, float] = (1.0, 1.0)) -> float:
        return float((line(sample, "distill", rates[0], column) - line(sample, "hard", rates[1], column)).mean())

    def estimate_interval(values: np.ndarray, statistic: Callable) -> tuple[dict[str, float], str]:
        estimate = bootstrap(values, statistic, n=c.resamples, seed=c.seed)
        return estimate, f"{estimate['value']:.4f} [{estimate['low']:.4f}, {estimate['high']:.4f}]"

    words = {
        EXPECTED: ("expected", "the chance of acceptance, Σ min(p, q)"),
        GREEDY: ("greedy", "greedy drafts that match"),
    }
    for i, (name, description) in words.items():
        best_rates = tuple(
            max(c.rates, key=lambda rate, kind=kind, i=i: line(counts[::2], kind, rate, i)[-1]) for kind in KINDS
        )
        estimate, _ = estimate_interval(counts, lambda d, i=i: gain(d, i))
        at_best, at_best_text = estimate_interval(
            counts[1::2], lambda d, i=i, best_rates=best_rates: gain(d, i, best_rates)
        )
        gains = [gain(counts[:, [number]], i) for number in range(c.seeds)]
        _, token_ratio_text = estimate_interval(
            counts, lambda d, i=i: fewer(line(d, "distill", 1.0, i), line(d, "hard", 1.0, i), tokens)
        )
        needs = {"every repetition": min(gains) > 0, "each kind at its best rate": at_best["low"] > 0}
        final_levels = [line(counts, kind, 1.0, i)[-1] for kind in KINDS]
        claims.append(
            claim(
                f"distill-{name}",
                f"distilling the main head converges faster than hard labels at equal tokens: {description}",
                "§3.1",
                estimate["value"],
                above(),
                (estimate["low"], estimate["high"]),
                "of acceptance",
                f"mean over {len(tokens)} looks up to {tokens[-1]:.0f} tokens and over depths, {c.seeds} repetitions "
                f"({', '.join(f'{x:+.4f}' for x in gains)}), bootstrap over {len(counts)} rows of held-out text; at "
                f"the end {final_levels[0]:.4f} "
                f"against {final_levels[1]:.4f}; tokens that labels need over those that distillation needs for the "
                f"same: {token_ratio_text}; each at its "
                f"best rate of {c.rates} ({best_rates[0]:g} and {best_rates[1]:g} times the recipe's), on the other "
                f"half of the rows: {at_best_text}",
                needs,
            )
        )
    return claims


def picture(results: dict, path: Path) -> None:
    """Acceptance against tokens seen, by depth, after joint training; speed-up."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, joint, right) = sheet(
        4, "Drafts of multi-token prediction: learned from distributions or from labels", width=5.0
    )
    training_points = [
        row for row in results["rows"] if row["part"] == "training" and row["text"] == "all" and row["rate"] == 1
    ]
    tokens, depths = (sorted({row[key] for row in training_points}) for key in ("tokens", "depth"))
    names = {"distill": "distribution", "hard": "hard labels"}
    for (kind, label), colour in zip(names.items(), COLOURS, strict=False):
        for key, style, word in (("expected", "o-", "Σ min(p, q)"), ("greedy", "s--", "greedy match")):
            kind_rows = [row for row in training_points if row["kind"] == kind]
            line = [np.mean([row[key] for row in kind_rows if row["tokens"] == t]) for t in tokens]
            left.plot(tokens, line, style, color=colour, markersize=4, label=f"{label}, {word}")
            last = [row for row in kind_rows if row["tokens"] == tokens[-1]]
            errors = np.abs(np.array([[row[key] - row[f"{key}_low"], row[f"{key}_high"] - row[key]] for row in last])).T
            # Offset, so intervals do not hide each other
            depth_positions = [k + 0.03 * (1 if kind == "hard" else -1) for k in depths]
            middle.errorbar(
                depth_positions, [row[key] for row in last], errors, fmt=style, color=colour, markersize=4, capsize=3
            )
    left.set(
        xscale="log", xlabel="tokens seen", ylabel="acceptance, mean over depths", title="Held-out text, equal tokens"
    )
    left.set_xticks(tokens, [f"{t / 1000:.0f}k" for t in tokens], fontsize=8, rotation=30)
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8.5)
    middle.set(xlabel="depth of the draft", ylabel="acceptance, earlier drafts given")
    middle.set_title(f"After {tokens[-1] / 1000:.0f}k tokens, 95% intervals")
    middle.set_xticks(depths)
    for text_name, colour, style in (("text", COLOURS[1], "s"), ("demonstrations", COLOURS[0], "o")):
        text_rows = [row for row in results["rows"] if row["part"] == "joint" and row["text"] == text_name]
        errors = np.abs(
            np.array(
                [[row["accepted"] - row["accepted_low"], row["accepted_high"] - row["accepted"]] for row in text_rows]
            )
        ).T
        words = {"text": "held-out text, after long context", "demonstrations": "agent's tokens, after SFT"}[text_name]
        joint.errorbar(
            range(len(text_rows)),
            [row["accepted"] for row in text_rows],
            errors,
            fmt=style,
            color=colour,
            capsize=3,
            label=words,
        )
        joint.set_xticks(range(len(text_rows)), [row["arm"].replace(" ", "\n") for row in text_rows], fontsize=8.5)
    joint.set(ylabel="acceptance, mean over depths", title="Joint training: the layers' loss beside or through")
    joint.margins(x=0.2, y=0.25)
    joint.legend(frameon=False, fontsize=8.5)
    ways = {row["way"]: row for row in results["rows"] if row["part"] == "decode"}
    draft_rows = [row for way, row in ways.items() if way.isdigit()]
    draft_numbers = [int(row["way"]) for row in draft_rows]
    right.axhspan(2, 3, color="#EEF1F3", label="reported: 2–3×")
    full_series = [max(draft_numbers) + 1], [ways[FULL]], COLOURS[2], "measured, ours in full"
    for positions, row, colour, label in ((draft_numbers, draft_rows, COLOURS[0], "measured"), full_series):
        errors = np.abs(np.array([[r["speedup"] - r["speedup_low"], r["speedup_high"] - r["speedup"]] for r in row])).T
        right.errorbar(positions, [r["speedup"] for r in row], errors, fmt="o", color=colour, capsize=3, label=label)
    right.plot(draft_numbers, [row["predicted"] for row in draft_rows], "--", color=GREY, label="theory, from α and c")
    right.plot(
        draft_numbers, [row["with_turns"] for row in draft_rows], ":", color=COLOURS[1], label="with openings of turns"
    )
    right.axhline(1, color=GREY, linewidth=0.8)
    right.set(
        xlabel="drafts a pass", ylabel="speed-up over plain decoding", title="The agent's own rollouts, greedy, batch 1"
    )
    right.set_xticks(
        [*draft_numbers, max(draft_numbers) + 1], [*map(str, draft_numbers), f"{max(draft_numbers)} + ours"]
    )
    right.set_ylim(0, max(3.9, right.get_ylim()[1]))
    right.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper left")
    save(figure, path)
