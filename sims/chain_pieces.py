"""Chains in pieces, to show what happened in them: roles, credit, and which known facts their summaries kept."""

import itertools
import re
from collections.abc import Sequence
from random import Random

from ref.messages import Message
from ref.network import Transformer
from ref.rl import pad, reference_kl, reward_terms
from ref.rollout import SUMMARY, Rollout
from sims.microrepo import MicroRepo, Session, Task
from sims.recipe.agent import Language, parted
from sims.recipe.demonstrations import Lesson, context
from sims.recipe.settings import Memory, Recipe

__all__ = ["notes", "pieces", "priced", "retold", "words"]

STATES = ("ok", "passed", "failed")
"""What a summary says about the current body (`sims/recipe/demonstrations.py`)."""


def words(language: Language, tokens: Sequence[int]) -> list[str]:
    """The text of every token."""
    return [language.decode([token]) for token in tokens]


def retold(
    after: Transformer, before: Transformer, recipe: Recipe, language: Language, tasks: list[Task], episodes: Sequence[Rollout], n: int
) -> dict:
    """Chains of several contexts played by `after`: among the successes, the one whose summaries kept the most facts and the one whose
    summaries kept the fewest, and the same among the failures. Taken from groups of n rollouts with different outcomes, or from all groups if
    there are none. Each comes with its complete group, which its advantage depends on. Empty if no rollout needed a second context."""
    several = [number for number, e in enumerate(episodes) if len(e.chain.segments) > 1]
    groups = {number: episodes[number // n * n :][:n] for number in several}
    differ = [number for number in several if len({e.metrics["tests"] for e in groups[number]}) > 1] or several
    said = {number: notes(language, tasks[number // n], episodes[number]) for number in differ}
    kept = {number: sum(fact["fate"] == "kept" for note in said[number] for fact in note["facts"]) for number in differ}
    chosen: set[int] = set()
    for success in (1.0, 0.0):
        some = [number for number in differ if episodes[number].metrics["tests"] == success]
        chosen |= {best(some, key=kept.__getitem__) for best in (max, min) if some}
    found = []
    for number in sorted(chosen, key=lambda number: (-kept[number], number)):
        e = episodes[number]
        found.append(
            {
                "task": e.environment.session.prompt,
                "depth": tasks[number // n].depth,
                "success": bool(e.metrics["tests"]),
                "finished": e.chain.finished,
                "saved": e.chain.saved,
                "place": number % n,
                "group": [priced(after, before, recipe, other) for other in groups[number]],
                "contexts": pieces(language, recipe, e),
                "notes": said[number],
            }
        )
    c = recipe.context
    return {
        "trigger": c.trigger,
        "room": c.room,
        "longest_summary": c.longest_summary,
        "max_segments": c.max_segments,
        "several": len(several),
        "rollouts": len(episodes),
        "chosen": "successes and failures whose summaries kept most and fewest facts",
        "chains": found,
    }


def priced(after: Transformer, before: Transformer, recipe: Recipe, episode: Rollout) -> dict:
    """The reward of a rollout of `after` in named parts, with the charge for drift from `before`, and the [given, written, summary] token counts
    of its contexts."""
    segments, payment = episode.chain.segments, recipe.rl.payment
    drift = reference_kl(after, before, *pad(segments), recipe.rl.temperature)[0].sum().item()
    paid = reward_terms(episode, payment)
    return {
        "success": bool(episode.metrics["tests"]),
        "tests": paid["tests"],
        "effort": paid["effort"],
        "invalid": paid["invalid"],
        "kl": -payment.kl * drift,
        "reward": sum(paid.values()) - payment.kl * drift,
        "contexts": [[int((~s.sampled).sum()), int(s.sampled.sum()), int(s.summary.sum())] for s in segments],
    }


def pieces(language: Language, recipe: Recipe, episode: Rollout) -> list[list[dict]]:
    """The pieces of each context in order: role and tokens. Roles: prompt, turn, answer, request, summary; `summary, given` and `resume`
    if a context opens with the summary of the previous one."""
    how, contexts, summary = context(language, recipe), [], 0
    for number, s in enumerate(episode.chain.segments):
        tokens, found = words(language, s.tokens.tolist()), []
        for where, own in parted(s, language.env):
            piece = tokens[where]
            if own:
                found.append({"role": "summary" if s.summary[where.start] else "turn", "tokens": piece})
            elif where.start == 0:
                ends = [0, episode.opening, episode.opening + summary, len(piece)] if number else [0, len(piece)]
                roles = ("prompt", "summary, given", "resume")
                found += [{"role": role, "tokens": piece[a:b]} for role, (a, b) in zip(roles, itertools.pairwise(ends), strict=False)]
            else:
                asked = where.stop < len(tokens) and bool(s.summary[where.stop])
                answer = len(piece) - (len(how.request) if asked else 0)
                found.append({"role": "answer", "tokens": piece[:answer]})
                found += [{"role": "request", "tokens": piece[answer:]}] if asked else []
        contexts.append(found)
        summary = int(s.summary.sum())
    return contexts


def notes(language: Language, task: Task, episode: Rollout) -> list[dict]:
    """For each summary: its text, the one that the scripted agent would have written, and the fate of every fact. A fact is what the scripted
    agent says about a file or about the current body: "kept" word for word; "changed": mentioned in other words; "lost"; "invented": about
    a file that no context showed."""
    scripted = Lesson(language, task, [], Random(0), Memory(wordy=0.0, forgetful=0.0))
    environment, messages = MicroRepo(Session(task)), [Message("user", task.prompt)]
    found: list[dict] = []
    left = sum(one.role == "assistant" and one.name != SUMMARY for one in episode.messages)  # turns that the environment received
    for s in episode.chain.segments:
        for where, own in parted(s, language.env):
            turn = s.tokens[where].tolist()
            is_ended = turn[-1] == language.env
            turn = turn[:-1] if is_ended else turn
            if not own or s.summary[where.start] and not is_ended:  # given, or cut off
                continue
            if not s.summary[where.start]:
                left -= 1
                if left >= 0 and not environment.session.done:
                    messages.append(language.decode_turn(turn))
                    messages += environment.step(messages[-1]).messages
                    scripted.hear(messages)
                continue
            said, known, facts = language.decode(turn), list(scripted.known), []
            spoken = re.findall(r"\b(m\d)(?:\([^)]*\):| is )", said)
            for name in dict.fromkeys([*known, *spoken]):
                fact = scripted.fact(name, wordy=False) if name in task.files else ""
                fate = "kept" if name in known and fact in said else "lost" if name not in spoken else "changed" if name in known else "invented"
                facts.append(
                    {"file": name, "fact": fact if name in known else "", "needed": name == task.target or name in task.helpers, "fate": fate}
                )
            if scripted.state:
                last = next((state for state in STATES if said.endswith(state)), "")
                fate = "kept" if last == scripted.state else "changed" if last else "lost"
                facts.append({"file": "", "fact": scripted.state, "needed": True, "fate": fate})
            found.append({"summary": said, "facts": facts, "scripted": scripted.summary()})
            scripted.known = [fact["file"] for fact in facts if fact["fate"] == "kept" and fact["file"]]
    return found
