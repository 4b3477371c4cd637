"""Chains in pieces, to show what happened in them: roles, credit, and which known facts their summaries kept."""

import itertools
import re
from collections.abc import Sequence
from random import Random

from recipe.microrepo import MicroRepo, Session, Task
from recipe.small.agent import Language, parted
from recipe.small.demonstrations import Lesson, context
from recipe.small.settings import Memory, Recipe
from ref.messages import Message
from ref.network import Transformer
from ref.rl import compute_reference_kl, compute_reward_terms, pad
from ref.rollout import SUMMARY, Rollout

__all__ = ["notes", "pieces", "compute_reward_parts", "retold", "words"]

STATES = ("ok", "passed", "failed")
"""What a summary says about the current body (`recipe/small/demonstrations.py`)."""


def words(language: Language, tokens: Sequence[int]) -> list[str]:
    """The text of every token."""
    return [language.decode([token]) for token in tokens]


def retold(
    after: Transformer,
    before: Transformer,
    recipe: Recipe,
    language: Language,
    tasks: list[Task],
    episodes: Sequence[Rollout],
    n: int,
) -> dict:
    """Chains of several contexts played by `after`: among the successes, the one whose summaries kept the most facts
    and the one whose summaries kept the fewest, and the same among the failures. Taken from groups of n rollouts with
    different outcomes, or from all groups if there are none. Each comes with its complete group, which its advantage
    depends on. Empty if no rollout needed a second context."""
    chained_numbers = [number for number, e in enumerate(episodes) if len(e.chain.segments) > 1]
    groups = {number: episodes[number // n * n :][:n] for number in chained_numbers}
    candidate_numbers = [
        number for number in chained_numbers if len({e.metrics["tests"] for e in groups[number]}) > 1
    ] or chained_numbers
    notes_by_number = {number: notes(language, tasks[number // n], episodes[number]) for number in candidate_numbers}
    kept_counts = {
        number: sum(fact["fate"] == "kept" for note in notes_by_number[number] for fact in note["facts"])
        for number in candidate_numbers
    }
    selected_numbers: set[int] = set()
    for success in (1.0, 0.0):
        same_outcome = [number for number in candidate_numbers if episodes[number].metrics["tests"] == success]
        selected_numbers |= {choose(same_outcome, key=kept_counts.__getitem__) for choose in (max, min) if same_outcome}
    chains = []
    for number in sorted(selected_numbers, key=lambda number: (-kept_counts[number], number)):
        e = episodes[number]
        chains.append(
            {
                "task": e.environment.session.prompt,
                "depth": tasks[number // n].depth,
                "success": bool(e.metrics["tests"]),
                "finished": e.chain.finished,
                "saved": e.chain.saved,
                "place": number % n,
                "group": [
                    compute_reward_parts(after, before, recipe, group_episode) for group_episode in groups[number]
                ],
                "contexts": pieces(language, recipe, e),
                "notes": notes_by_number[number],
            }
        )
    c = recipe.context
    return {
        "trigger": c.trigger,
        "room": c.room,
        "longest_summary": c.longest_summary,
        "max_segments": c.max_segments,
        "several": len(chained_numbers),
        "rollouts": len(episodes),
        "chosen": "successes and failures whose summaries kept most and fewest facts",
        "chains": chains,
    }


def compute_reward_parts(after: Transformer, before: Transformer, recipe: Recipe, episode: Rollout) -> dict:
    """The reward of a rollout of `after` in named parts, with the charge for drift from `before`, and the [given,
    written, summary] token counts of its contexts."""
    segments, payment = episode.chain.segments, recipe.rl.payment
    drift = compute_reference_kl(after, before, *pad(segments), recipe.rl.temperature)[0].sum().item()
    terms = compute_reward_terms(episode, payment)
    return {
        "success": bool(episode.metrics["tests"]),
        "tests": terms["tests"],
        "effort": terms["effort"],
        "invalid": terms["invalid"],
        "kl": -payment.kl * drift,
        "reward": sum(terms.values()) - payment.kl * drift,
        "contexts": [[int((~s.sampled).sum()), int(s.sampled.sum()), int(s.summary.sum())] for s in segments],
    }


def pieces(language: Language, recipe: Recipe, episode: Rollout) -> list[list[dict]]:
    """The pieces of each context in order: role and tokens. Roles: prompt, turn, answer, request, summary; `summary,
    given` and `resume` if a context opens with the summary of the previous one."""
    chaining, contexts, summary = context(language, recipe), [], 0
    for number, s in enumerate(episode.chain.segments):
        tokens, context_pieces = words(language, s.tokens.tolist()), []
        for span, is_own in parted(s, language.env):
            piece = tokens[span]
            if is_own:
                context_pieces.append({"role": "summary" if s.summary[span.start] else "turn", "tokens": piece})
            elif span.start == 0:
                bounds = [0, episode.opening, episode.opening + summary, len(piece)] if number else [0, len(piece)]
                roles = ("prompt", "summary, given", "resume")
                context_pieces += [
                    {"role": role, "tokens": piece[a:b]}
                    for role, (a, b) in zip(roles, itertools.pairwise(bounds), strict=False)
                ]
            else:
                has_request = span.stop < len(tokens) and bool(s.summary[span.stop])
                answer = len(piece) - (len(chaining.request) if has_request else 0)
                context_pieces.append({"role": "answer", "tokens": piece[:answer]})
                context_pieces += [{"role": "request", "tokens": piece[answer:]}] if has_request else []
        contexts.append(context_pieces)
        summary = int(s.summary.sum())
    return contexts


def notes(language: Language, task: Task, episode: Rollout) -> list[dict]:
    """For each summary: its text, the one that the scripted agent would have written, and the fate of every fact. A
    fact is what the scripted agent says about a file or about the current body: "kept" word for word; "changed":
    mentioned in other words; "lost"; "invented": about a file that no context showed."""
    scripted_agent = Lesson(language, task, [], Random(0), Memory(wordy=0.0, forgetful=0.0))
    environment, messages = MicroRepo(Session(task)), [Message("user", task.prompt)]
    records: list[dict] = []
    # Turns that the environment received
    remaining_turns = sum(message.role == "assistant" and message.name != SUMMARY for message in episode.messages)
    for s in episode.chain.segments:
        for span, is_own in parted(s, language.env):
            turn = s.tokens[span].tolist()
            is_ended = turn[-1] == language.env
            turn = turn[:-1] if is_ended else turn
            if not is_own or s.summary[span.start] and not is_ended:  # given, or cut off
                continue
            if not s.summary[span.start]:
                remaining_turns -= 1
                if remaining_turns >= 0 and not environment.session.done:
                    messages.append(language.decode_turn(turn))
                    messages += environment.step(messages[-1]).messages
                    scripted_agent.hear(messages)
                continue
            summary_text, known_files, facts = language.decode(turn), list(scripted_agent.known_files), []
            mentioned_files = re.findall(r"\b(m\d)(?:\([^)]*\):| is )", summary_text)
            for name in dict.fromkeys([*known_files, *mentioned_files]):
                fact = scripted_agent.fact(name, wordy=False) if name in task.files else ""
                fate = (
                    "kept"
                    if name in known_files and fact in summary_text
                    else "lost"
                    if name not in mentioned_files
                    else "changed"
                    if name in known_files
                    else "invented"
                )
                facts.append(
                    {
                        "file": name,
                        "fact": fact if name in known_files else "",
                        "needed": name == task.target or name in task.helpers,
                        "fate": fate,
                    }
                )
            if scripted_agent.state:
                last_state = next((state for state in STATES if summary_text.endswith(state)), "")
                fate = "kept" if last_state == scripted_agent.state else "changed" if last_state else "lost"
                facts.append({"file": "", "fact": scripted_agent.state, "needed": True, "fate": fate})
            records.append({"summary": summary_text, "facts": facts, "scripted": scripted_agent.summary()})
            scripted_agent.known_files = [fact["file"] for fact in facts if fact["fate"] == "kept" and fact["file"]]
    return records
