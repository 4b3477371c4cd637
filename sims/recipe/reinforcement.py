"""RL on the small world: rollouts of fresh tasks with the newest weights, one policy-gradient step on them, again.

`sims/recipe/stages.py` runs this loop once; the experiments run it with other settings.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kit.process import on_cores, one_thread
from kit.runs import Stage
from kit.settings import RunError
from ref.behaviour import Behaviour
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Transformer
from ref.rl import Played, improve
from ref.self_summary import Chaining
from ref.textual_feedback import Hint
from sims.hints import given
from sims.microrepo import Environment, Session, Task
from sims.microrepo.disk import DiskSession
from sims.recipe.agent import Episode, Language, hash_seed, pay, play
from sims.recipe.data import task_stream
from sims.recipe.demonstrations import context
from sims.recipe.latest import Latest
from sims.recipe.learner import Learner
from sims.recipe.settings import Recipe
from sims.recipe.watching import Watching
from sims.rounding import fp8_rows
from sims.transcripts import Record, priced, transcript_of

__all__ = ["Hinting", "advance", "choose", "gate", "kept", "learn"]

Hinting = Callable[[Sequence[Episode], int], list[list[list[Hint]]]]
"""The hints of finished episodes, for every context of every chain; the number is a seed."""
KINDS = 3
"""Kinds of tasks, by depth: how many helpers a task's docstring refers to."""


def learn(
    stage: Stage,
    config: Recipe,
    model: Transformer,
    mtp: MTP | None,
    reference: Transformer,
    language: Language,
    look: Callable[[int, Learner, Sampler], dict] | None = None,
    how: Chaining | None = None,
    opened: Callable[[Task, int], Environment] | None = None,
    told: Callable[[list[Episode]], dict[str, float]] = lambda episodes: {},
    record: Record | None = None,
    watch: Watching | None = None,
    hinting: Hinting | None = None,
    latest: Latest | None = None,
) -> tuple[Learner, dict[str, int]]:
    """Dr. GRPO: every step samples G·N rollouts of fresh tasks with the newest weights and takes one Adam step on them.
    A rollout is a chain of contexts under `how`, by default the recipe's. In the later steps (`rl.later`) harder tasks are
    upsampled: the kinds of tasks are the world's depths, and the rollouts so far tell which are hard (`kept`).

    model and mtp start from the end of SFT; `reference` prices drift; `look(step, learner, sampler)` is called before the first
    step and after each, and its result is logged with the metrics of the step; so is that of `told`, which sees the step's episodes. `opened` begins
    an episode of a task with so many turns at most, by default one in the world of `rl.world`; where behaviour has prices, `record` says what an
    episode of such a world was. `watch` is the monitor, by default that of `rl.monitor`; a world of the caller's has none by default. `hinting` gives
    the hints of a step's episodes if `rl.feedback.weight` is above 0, by default those of `sims/hints.py`. `latest` keeps the newest rollouts for
    people who watch. Resumes from the stage's state. Returns the learner and what was consumed. Raises RunError if the policy's success is too low at
    the start (`rl.gate`), and for prices in a world without a record."""
    r, t, how = config.rl, config.training, how or context(language, config)
    learner = Learner(config, model, mtp, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=r.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = reference.to(learner.dtype)
    if opened is None and r.monitor.on:
        watch = watch or Watching.recipe(r.monitor, r.max_len)
    if opened and not record and r.behaviour.most:
        raise RunError("behaviour has no record in this experiment's world; start from a run without prices of behaviour (rl.behaviour)")
    opened, record = opened or (DiskSession if r.world == "disk" else Session), record or transcript_of
    rounding = fp8_rows if t.sampler_weights == "fp8" else None
    sampler = ContinuousSampler(learner.trunk.model, getattr(torch, t.sampler_dtype), rounding=rounding)

    state = stage.restore()
    first = learner.restore(state) if state else 0
    seen, consumed, played = (state[name] for name in ("seen", "consumed", "played")) if state else (0, 0, np.zeros((KINDS, 3)))
    if state and watch:
        watch.restore(state["watch"])
    if not state:
        if r.gate and (success := gate(config, sampler, language, how)) < r.gate:
            raise RunError(
                f"sampled success after SFT is {success:.3f}, below rl.gate={r.gate}: penalties would only teach the "
                "policy to stop; train longer (--set training.tokens=…) or lower --set rl.gate=…"
            )
        if look and (found := look(0, learner, sampler)):
            stage.log(0, **found)
    tasks = itertools.islice(task_stream(config, "rl"), consumed, None)
    for step in range(first, r.steps):
        learner.schedule(r.rate(step))
        sampler.load(learner.trunk.model, version=step)
        keep = kept(played, r.upsampling) if step >= r.steps * (1 - r.later) else np.ones(KINDS)
        chosen, passed = choose(tasks, r.prompts, keep, random.Random(hash_seed(config.seed, "harder", step)))
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "rl", step))
        episodes = play(sampler, language, chosen, r.rollouts, how, r.max_turns, generator, r.temperature, opened=opened)
        behaved = priced(r.behaviour, episodes, [task for task in chosen for _ in range(r.rollouts)], record)
        rewards: list[float] = []
        figures = advance(config, learner, reference, episodes, step, behaved, hinting, rewards.extend) | told(episodes)
        consumed += len(chosen) + passed
        seen += sum(len(e.rollout.tokens) for e in episodes)
        for kind, e in zip(np.repeat([task.depth for task in chosen], r.rollouts), episodes, strict=True):
            played[kind] += 1, e.verdict.turns, e.chain.written
        figures["depth"] = float(np.mean([task.depth for task in chosen]))
        if watch:
            watched, lines = watch.step(watch.seen(episodes, chosen))
            figures |= watched
            for line in lines:
                stage.say(line)
        if look:
            sampler.load(learner.trunk.model, version=step + 1)
            figures |= look(step + 1, learner, sampler)
        if latest and latest.due(step + 1 == r.steps):
            group = episodes[: r.rollouts]
            latest.keep(step + 1, chosen[0].prompt, [e.chain for e in group], rewards, [bool(e.verdict.tests) for e in group])
        stage.log(step + 1, **figures)
        stage.progress(step + 1, seen, reward=figures["reward"], success=figures["success"])
        if stage.due():
            more = {"watch": watch.state()} if watch else {}
            stage.save(learner.state(step + 1, seen=seen, consumed=consumed, played=played, **more), step + 1)
    prompts = r.steps * r.prompts
    return learner, {"steps": r.steps, "prompts": prompts, "rollouts": prompts * r.rollouts, "tokens": seen}


def kept(played: np.ndarray, power: float) -> np.ndarray:
    """The probability of keeping a task of each kind, 1 for the hardest. The difficulty of a kind follows from its rollouts (§4.1: "number of
    turns, thinking tokens"): their turns and tokens relative to those of all kinds, averaged over the two.

    played: [kinds, (rollouts, turns, tokens)], sums. A kind that was never played is kept."""
    known = played[:, 0] > 0
    if not known.any():
        return np.ones(len(played))
    each = played[known, 1:] / played[known, :1]
    hard = (each / each.mean(0).clip(min=1e-9)).mean(1)
    found = np.ones(len(played))
    found[known] = (hard / hard.max().clip(min=1e-9)) ** power
    return found


def choose(tasks: Iterator[Task], n: int, keep: np.ndarray, rng: random.Random) -> tuple[list[Task], int]:
    """The next n tasks, each kept with the probability of its kind, and the number of dropped tasks."""
    chosen, passed = [], 0
    while len(chosen) < n:
        task = next(tasks)
        if rng.random() < keep[task.depth]:
            chosen.append(task)
        else:
            passed += 1
    return chosen, passed


def gate(config: Recipe, sampler: Sampler, language: Language, how: Chaining) -> float:
    """Sampled success on 64 training tasks that RL does not use."""
    tasks = list(itertools.islice(task_stream(config, "gate"), 64))
    generator = torch.Generator().manual_seed(hash_seed(config.seed, "gate"))
    episodes = play(sampler, language, tasks, 4, how, config.rl.max_turns, generator)
    return float(np.mean([e.verdict.tests for e in episodes]))


@one_thread()  # the work between the processes is short; with other programs running, two threads would mostly wait for each other
def advance(
    config: Recipe,
    learner: Learner,
    reference: Transformer,
    episodes: list[Episode],
    step: int,
    behaved: Sequence[Behaviour] = (),
    hinting: Hinting | None = None,
    rewarded: Callable[[list[float]], None] = lambda rewards: None,
) -> dict[str, float]:
    """One policy-gradient step (`ref.rl.improve`) on a batch of finished episodes, computed on all cores; returns the metrics of the
    batch. `kl` is the policy's drift from the reference and `engine_kl` the difference to its sampler, in nats per rollout; `dropped` is
    the share of replayed experts that the filter removed. `behaved`: what each episode did on its way, if that is priced. With `rl.feedback`, `hints`
    is their number per rollout, and `divergence` how far the policy is from itself under its hints, in nats per token of the messages that they
    correct. `rewarded` is told every episode's reward, after the price of drift."""
    r = config.rl
    G, N = r.prompts, r.rollouts
    paid = [pay(e, r.payment, one) for e, one in zip(episodes, behaved, strict=True)] if behaved else [pay(e, r.payment) for e in episodes]
    chains = [e.chain for e in episodes]
    mtp = learner.mtp if step % config.mtp.rl_every == 0 else None
    hints: Sequence[list[list[Hint]]] = [[]] * len(episodes)
    if r.feedback.weight:
        hints = (hinting or partial(given, how=r.feedback))(episodes, hash_seed(config.seed, "hints", step))

    def shuffled(rewards: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "shuffle", step))
        return rewards[torch.randperm(len(rewards), generator=generator)]

    found = improve(
        r,
        learner.trunk.model,
        reference,
        [Played(chain, p["reward"], hints=told) for chain, p, told in zip(chains, paid, hints, strict=True)],
        mtp=mtp.model if mtp else None,
        mtp_weight=config.mtp.weight,
        each=partial(on_cores, each=2),  # next to two busy programs, four processes get two thirds of two cores; two get half
        **({"rearranged": shuffled} if r.shuffle_rewards else {}),
    )
    rewarded(found.rewards.tolist())
    norm = learner.trunk.step(learner.optimizers, gradients=found.gradients)
    if mtp is not None and found.mtp_gradients is not None:
        mtp.step(learner.mtp_optimizers, gradients=found.mtp_gradients)

    verdicts = [e.verdict for e in episodes]
    ratio, size = found.gap.exp(), found.gap.abs()

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return float(sum(values) / len(values))

    figures = {
        "reward": mean(found.rewards.tolist()),
        "success": mean(v.tests for v in verdicts),
        "best": mean(max(v.tests for v in verdicts[g * N : (g + 1) * N]) for g in range(G)),
        "tokens": found.tokens / len(episodes),
        "turns": mean(v.turns for v in verdicts),
        "invalid_calls": mean(v.invalid_calls for v in verdicts),
        "tested": mean(float(v.tested) for v in verdicts),
        "effort": mean(p["effort"] for p in paid),
        "kl": mean(found.drift.tolist()),
        "engine_kl": mean(found.engine.tolist()),
        "loss": found.loss,
        "nll": found.nll,
        "grad_norm": norm.item(),
        "mismatch": size.mean().item(),
        "mismatch_p99": float(np.quantile(size.numpy(), 0.99)),
        "mismatch_max": size.max().item(),
        "outside_clip": ((ratio < 1 - r.clip_low) | (ratio > 1 + r.clip_high)).double().mean().item(),
        "finished": mean(float(c.finished) for c in chains),
        "segments": sum(len(c.segments) for c in chains) / len(chains),
        "summary_tokens": mean(c.summary_tokens for c in chains),
    }
    figures |= {f"behaviour_{name}": mean(p[name] for p in paid) for name in (behaved[0].parts if behaved else ())}
    figures |= {"hints": mean(sum(map(len, told)) for told in hints)} if r.feedback.weight else {}
    return figures | {name: value for name in ("mtp_loss", "dropped", "divergence") if (value := getattr(found, name)) is not None}
