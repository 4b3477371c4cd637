"""Multi-token prediction: learning from distributions or from labels, and the speed-up from drafts.

    etude figure mtp                        under twenty-five minutes on two cores; checkpoints from runs/small (make small)
    etude figure mtp --quick

1. MTP layers from scratch on the frozen mid-CPT trunk, as in the recipe: trained to match the main head's distribution, or to predict
   the next token. Both on the same batches in the same order from the same weights, at the recipe's learning rates and at
   half and twice these, because the recipe's rates were chosen with distillation and labels may need others. On held-out text
   (modules of held-out functions and the held-out codebase, mixed as in training), by depth: how often the greedy draft is the
   main head's choice, and the probability that sampling accepts a draft, Σ min(p, q). Earlier drafts are assumed to be
   accepted: the layers read the tokens of the text.
2. Joint training in long context and SFT, with and without gradients into the trunk (`sims/joint_mtp.py`).
3. The run's last agent with its own layers decodes held-out rollouts greedily at batch 1 (`sims/drafting.py`): measured
   and predicted speed-up. This is a timing, so it needs an idle machine.
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
from ref import cpt
from ref.mtp import MTP, mtp_loss
from ref.muon import optimizers
from ref.network import Transformer
from ref.network.masters import Masters
from sims import joint_mtp
from sims.drafting import EXPECTED, FULL, GREEDY, Experiment, acceptance, curve, decode, speed_rows, speed_verdicts
from sims.experiment import above, claim
from sims.microrepo import document, generate
from sims.policies import agent
from sims.recipe.data import code_pieces, heldout_codebase, take
from sims.recipe.learner import language_of, load_checkpoint, packed_rows
from sims.recipe.settings import Recipe
from sims.statistics import bootstrap

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
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


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


def arms_of(c: Experiment) -> list[tuple[str, float]]:
    return [(kind, rate) for kind in KINDS for rate in c.rates]


def trained(run: Run, c: Experiment, root: Path, recipe: Recipe, number: int) -> tuple[np.ndarray, list[int]]:
    """One repetition, all kinds and rates in lockstep: counts [arms, looks, rows, depth, 3], and the tokens seen at each look."""
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
    students = {f"{kind} {rate:g}": Student(recipe, trunk, kind, rate, 1000 * c.seed + number) for kind, rate in arms_of(c)}
    order = np.random.default_rng([c.seed, number]).permutation(len(rows))
    state, counts, tokens, seen = stage.restore(), [], [], 0
    if state:
        counts, tokens, seen = list(state["counts"]), list(state["tokens"]), state["seen"]
        for name, student in students.items():
            student.restore(state["students"][name])
    looks = {max(1, round(share * steps)) for share in c.looks}
    for step in range(state["step"] if state else 0, steps):
        batch = order[np.arange(step * B, (step + 1) * B) % len(order)]
        some, where = (torch.from_numpy(x[batch].astype(np.int64)) for x in (rows, docs))
        with torch.no_grad():
            out = teacher(some, doc=where, logits=False)
        factor = cpt.wsd(step, steps, steps // 10, 0)
        losses = {name: student.learn(teacher, out, some, where, factor) for name, student in students.items()}
        seen += int((where >= 0).sum())
        if step + 1 in looks:
            tokens.append(seen)
            counts.append(np.stack([acceptance(s.layers.masters, trunk, *text) for s in students.values()]))
            total = counts[-1].sum(1)
            shares = {f"accepted {name}": (total[i, :, EXPECTED] / total[i, :, 0]).mean() for i, name in enumerate(students)}
            stage.log(step + 1, tokens=seen, **losses, **shares)
        stage.progress(step + 1, seen, loss=losses["distill 1"])
        if stage.due():
            states = {name: student.state() for name, student in students.items()}
            stage.save({"step": step + 1, "seen": seen, "tokens": tokens, "counts": counts, "students": states}, step + 1)
    found = np.stack(counts, 1)
    np.save(path, found)
    stage.finish({"steps": steps, "tokens": tokens}, [path])
    return found, tokens


def fewer(distill: np.ndarray, hard: np.ndarray, tokens: np.ndarray) -> float:
    """Factor by which distillation needs fewer tokens to reach the final acceptance of labels (below one: it needs more). Acceptance is
    interpolated linearly in log tokens between looks; before the first look, the result is a bound."""

    def reached(line: np.ndarray, level: float) -> float:
        at = int(np.argmax(line >= level))
        if at == 0:
            return float(tokens[0])
        part = (level - line[at - 1]) / (line[at] - line[at - 1])
        return float(np.exp(np.log(tokens[at - 1]) + part * np.log(tokens[at] / tokens[at - 1])))

    if distill[-1] >= hard[-1]:
        return tokens[-1] / reached(distill, hard[-1])
    return reached(hard, distill[-1]) / tokens[-1]


def experiment(run: Run, config: Experiment) -> dict:
    """All parts, and the verdicts."""
    c, (root, recipe) = config, agent(run, config.run, config.seed)
    repetitions = [trained(run, c, root, recipe, number) for number in range(c.seeds)]
    ids, doc, world = heldout(c, root, recipe)
    joint = {arm: [joint_mtp.training(run, c, root, recipe, arm, number, (ids, doc)) for number in range(c.repetitions)] for arm in joint_mtp.ARMS}
    # rows first, because the bootstrap resamples them: rows, repetitions, arms, looks, depth, 3
    counts = np.stack([found for found, _ in repetitions]).transpose(3, 0, 1, 2, 4, 5)
    tokens = np.array(repetitions[0][1], dtype=float)
    stage = run.stage("decode", total=c.rounds * c.tasks, unit="tasks")
    if not stage.finished:
        stage.restore()
        stage.finish(in_fresh_process(decode, root, recipe, c, progress=stage.progress))
    speeds = speed_rows(c, stage.result())
    rows = training_rows(c, counts, tokens, world) + joint_mtp.joint_rows(c, joint) + speeds
    claims = learning_verdicts(c, counts, tokens) + joint_mtp.joint_verdicts(c, joint) + joint_mtp.transplanted(rows) + speed_verdicts(rows)
    return {"rows": rows, "claims": claims}


def training_rows(c: Experiment, counts: np.ndarray, tokens: np.ndarray, world: np.ndarray) -> list[dict]:
    """One row per kind, rate, look, depth and text, averaged over repetitions; intervals over the rows of text, and the range over
    repetitions."""
    rows = []
    for text, here in (("all", world | True), ("world", world), ("code", ~world)):
        for (kind, rate), look, k in itertools.product(arms_of(c), range(len(tokens)), range(counts.shape[4])):
            some = counts[here][:, :, arms_of(c).index((kind, rate)), look, k]  # rows, repetitions, 3
            row = {
                "part": "training",
                "text": text,
                "kind": kind,
                "rate": rate,
                "tokens": tokens[look],
                "depth": k + 1,
                "positions": int(some[:, 0, 0].sum()),
            }
            for name, column in (("greedy", GREEDY), ("expected", EXPECTED)):
                each = some[..., column].sum(0) / some[..., 0].sum(0)
                row |= {name: each.mean(), f"{name}_least": each.min(), f"{name}_most": each.max()}
                if text == "all":
                    share = bootstrap(some.sum(1), lambda d, i=column: d[:, i].sum() / d[:, 0].sum(), n=c.resamples, seed=c.seed)
                    row |= {f"{name}_low": share["low"], f"{name}_high": share["high"]}
            rows.append({key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()})
    return rows


def learning_verdicts(c: Experiment, counts: np.ndarray, tokens: np.ndarray) -> list[dict]:
    """Rules, fixed before measuring. Distillation is faster if its acceptance, averaged over looks and depths, is higher by the interval
    over rows of text at the recipe's rates, in every repetition, and with each kind at its own best rate. The best rate is chosen on
    one half of the rows and judged on the other."""
    arms, claims = arms_of(c), []

    def line(drawn: np.ndarray, kind: str, rate: float, column: int) -> np.ndarray:
        return curve(drawn[:, :, arms.index((kind, rate))].sum(1), column)

    def gain(drawn: np.ndarray, column: int, rates: tuple[float, float] = (1.0, 1.0)) -> float:
        return float((line(drawn, "distill", rates[0], column) - line(drawn, "hard", rates[1], column)).mean())

    def over(values: np.ndarray, statistic: Callable) -> tuple[dict[str, float], str]:
        found = bootstrap(values, statistic, n=c.resamples, seed=c.seed)
        return found, f"{found['value']:.4f} [{found['low']:.4f}, {found['high']:.4f}]"

    words = {EXPECTED: ("expected", "the chance of acceptance, Σ min(p, q)"), GREEDY: ("greedy", "greedy drafts that match")}
    for i, (name, what) in words.items():
        best = tuple(max(c.rates, key=lambda rate, kind=kind, i=i: line(counts[::2], kind, rate, i)[-1]) for kind in KINDS)
        found, _ = over(counts, lambda d, i=i: gain(d, i))
        at_best, at_best_told = over(counts[1::2], lambda d, i=i, best=best: gain(d, i, best))
        each = [gain(counts[:, [number]], i) for number in range(c.seeds)]
        _, times = over(counts, lambda d, i=i: fewer(line(d, "distill", 1.0, i), line(d, "hard", 1.0, i), tokens))
        needs = {"every repetition": min(each) > 0, "each kind at its best rate": at_best["low"] > 0}
        ends = [line(counts, kind, 1.0, i)[-1] for kind in KINDS]
        claims.append(
            claim(
                f"distill-{name}",
                f"distilling the main head converges faster than hard labels at equal tokens: {what}",
                "§3.1",
                found["value"],
                above(),
                (found["low"], found["high"]),
                "of acceptance",
                f"mean over {len(tokens)} looks up to {tokens[-1]:.0f} tokens and over depths, {c.seeds} repetitions "
                f"({', '.join(f'{x:+.4f}' for x in each)}), bootstrap over {len(counts)} rows of held-out text; at the end {ends[0]:.4f} "
                f"against {ends[1]:.4f}; tokens that labels need over those that distillation needs for the same: {times}; each at its "
                f"best rate of {c.rates} ({best[0]:g} and {best[1]:g} times the recipe's), on the other half of the rows: {at_best_told}",
                needs,
            )
        )
    return claims


def picture(found: dict, path: Path) -> None:
    """Acceptance against tokens seen, by depth, after joint training; speed-up."""
    from sims.drawing import COLOURS, GREY, save, sheet

    figure, (left, middle, joint, right) = sheet(4, "Drafts of multi-token prediction: learned from distributions or from labels", width=5.0)
    some = [row for row in found["rows"] if row["part"] == "training" and row["text"] == "all" and row["rate"] == 1]
    tokens, depths = (sorted({row[key] for row in some}) for key in ("tokens", "depth"))
    names = {"distill": "distribution", "hard": "hard labels"}
    for (kind, label), colour in zip(names.items(), COLOURS, strict=False):
        for key, style, word in (("expected", "o-", "Σ min(p, q)"), ("greedy", "s--", "greedy match")):
            mine = [row for row in some if row["kind"] == kind]
            line = [np.mean([row[key] for row in mine if row["tokens"] == t]) for t in tokens]
            left.plot(tokens, line, style, color=colour, markersize=4, label=f"{label}, {word}")
            last = [row for row in mine if row["tokens"] == tokens[-1]]
            errors = np.abs(np.array([[row[key] - row[f"{key}_low"], row[f"{key}_high"] - row[key]] for row in last])).T
            at = [k + 0.03 * (1 if kind == "hard" else -1) for k in depths]  # offset, so intervals do not hide each other
            middle.errorbar(at, [row[key] for row in last], errors, fmt=style, color=colour, markersize=4, capsize=3)
    left.set(xscale="log", xlabel="tokens seen", ylabel="acceptance, mean over depths", title="Held-out text, equal tokens")
    left.set_xticks(tokens, [f"{t / 1000:.0f}k" for t in tokens], fontsize=8, rotation=30)
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8.5)
    middle.set(xlabel="depth of the draft", ylabel="acceptance, earlier drafts given")
    middle.set_title(f"After {tokens[-1] / 1000:.0f}k tokens, 95% intervals")
    middle.set_xticks(depths)
    for where, colour, style in (("text", COLOURS[1], "s"), ("demonstrations", COLOURS[0], "o")):
        mine = [row for row in found["rows"] if row["part"] == "joint" and row["text"] == where]
        errors = np.abs(np.array([[row["accepted"] - row["accepted_low"], row["accepted_high"] - row["accepted"]] for row in mine])).T
        words = {"text": "held-out text, after long context", "demonstrations": "agent's tokens, after SFT"}[where]
        joint.errorbar(range(len(mine)), [row["accepted"] for row in mine], errors, fmt=style, color=colour, capsize=3, label=words)
        joint.set_xticks(range(len(mine)), [row["arm"].replace(" ", "\n") for row in mine], fontsize=8.5)
    joint.set(ylabel="acceptance, mean over depths", title="Joint training: the layers' loss beside or through")
    joint.margins(x=0.2, y=0.25)
    joint.legend(frameon=False, fontsize=8.5)
    ways = {row["way"]: row for row in found["rows"] if row["part"] == "decode"}
    counted = [row for way, row in ways.items() if way.isdigit()]
    at = [int(row["way"]) for row in counted]
    right.axhspan(2, 3, color="#EEF1F3", label="reported: 2–3×")
    in_full = [max(at) + 1], [ways[FULL]], COLOURS[2], "measured, ours in full"
    for place, row, colour, label in ((at, counted, COLOURS[0], "measured"), in_full):
        errors = np.abs(np.array([[r["speedup"] - r["speedup_low"], r["speedup_high"] - r["speedup"]] for r in row])).T
        right.errorbar(place, [r["speedup"] for r in row], errors, fmt="o", color=colour, capsize=3, label=label)
    right.plot(at, [row["predicted"] for row in counted], "--", color=GREY, label="theory, from α and c")
    right.plot(at, [row["with_turns"] for row in counted], ":", color=COLOURS[1], label="with openings of turns")
    right.axhline(1, color=GREY, linewidth=0.8)
    right.set(xlabel="drafts a pass", ylabel="speed-up over plain decoding", title="The agent's own rollouts, greedy, batch 1")
    right.set_xticks([*at, max(at) + 1], [*map(str, at), f"{max(at)} + ours"])
    right.set_ylim(0, max(3.9, right.get_ylim()[1]))
    right.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper left")
    save(figure, path)
