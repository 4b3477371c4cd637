"""Drafts looked back upon: greedy ones are those of the decoder, and sampled ones are kept as often as its rule keeps
them."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.play import draft_acceptance, example_agent, play, tokens
from etude.play.draft_acceptance import Drafter
from recipe.microrepo import MicroRepo, Session
from recipe.small.demonstrations import context
from ref.engine.decoder import Decoder, Generation, accept
from ref.mtp import MTP
from ref.rollout import Limits, decode_rollout


def layers_of(agent) -> MTP:
    """An agent's draft layers in float32."""
    layers = agent.drafts()
    assert layers is not None
    return layers.float()


def decoded(agent, model, mtp, task) -> tuple[list[int], Generation]:
    """The greedy rollout of a decoder that drafts."""
    how = context(agent.language, agent.recipe)
    decoder = Decoder(model, mtp, max_len=how.limit)
    environment = MicroRepo(Session(task, agent.recipe.rl.max_turns))
    parts = [decoder.total for _ in decode_rollout(decoder, environment, agent.language, Limits(how), ahead=False)]
    total = sum(parts[1:], parts[0])
    return total.tokens, total


@pytest.mark.parametrize("name", ["", example_agent.BEFORE])
def test_greedy_drafts_are_those_of_the_decoder(name):
    """As many tokens come from each layer, in as many passes."""
    agent = play.agent_in(example_agent.FOLDER / name)
    mtp = layers_of(agent)
    kept = 0
    for number in range(4):
        task = play.task_of(agent.recipe, number, None)
        episode, model = play.episode_of(agent, task, 0.0, 0)
        turns = tokens.turns(model, episode, agent.language, 0.0, Drafter(mtp, 0.0, 0))
        written, total = decoded(agent, model, mtp, task)
        assert written == [one for part in episode.chain.segments for one in part.tokens[part.sampled].tolist()]
        found = draft_acceptance.tally([token.draft for token in turn] for turn in turns)
        layers = [token.draft for turn in turns for token in turn]
        assert [layers.count(layer) for layer in (1, 2, 3)] == total.accept_counts
        assert (found.tokens, found.passes, found.accepted) == (len(written), total.cycles, sum(total.accept_counts))
        kept += found.accepted
    assert kept > 20


def rows(draw_from: list[list[int]]) -> torch.Tensor:
    """Distributions from weights."""
    weights = torch.tensor(draw_from, dtype=torch.float64) + 1e-3
    return weights / weights.sum(-1, keepdim=True)


WEIGHTS = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@given(p=WEIGHTS, q=WEIGHTS)
@settings(max_examples=25, deadline=None)
def test_a_token_is_a_kept_draft_as_often_as_the_rule_keeps_it(p, q):
    """Over a grid of random numbers: P(kept, x) of the rule of arXiv:2211.17192 is p(x) times the share of x that is
    marked."""
    chances, offers, grid = rows([p, p, p]), rows([q, q, q]), [(n + 0.5) / 200 for n in range(200)]

    class Given(Random):
        def __init__(self, value: float):
            super().__init__()
            self.value = value

        def random(self) -> float:
            return self.value

    for x in range(3):
        rule = float(offers[0, x]) * sum(accept(chances[:2], offers[:1], [x], [u, 0.5])[0] for u in grid) / 200
        marked = (
            sum(
                draft_acceptance.of_turn(chances, [offers], [0, 1, x], range(1, 3), Given(u)) == [None, 1] for u in grid
            )
            / 200
        )
        assert float(chances[0, x]) * marked == pytest.approx(rule, abs=0.01)


@given(
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    offers=st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=0, max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_passes_and_kept_drafts_are_all_tokens(wanted, offers):
    """A pass writes one token of its own, unless its last draft ended the turn; no pass keeps more drafts than there
    are layers."""
    ids, depth = [0, *wanted], len(offers)
    chances = torch.eye(3)[torch.tensor([*wanted, 0])]
    q = [torch.eye(3)[torch.tensor(row)] for row in offers]
    found = draft_acceptance.of_turn(chances, q, ids, range(1, len(ids)), None)
    total = draft_acceptance.tally([found, []])
    assert len(found) == total.tokens == len(wanted) and found[0] is None
    assert total.passes + total.accepted - bool(found[-1]) == total.tokens
    for before, one in zip(found, found[1:]):
        assert one is None and (depth == 0 or before == depth) or one == 0 or one == (before or 0) + 1
    for place, one in enumerate(found[1:], 2):
        if one:
            assert offers[one - 1][place - 1 - one] == ids[place], (
                "layer k reads k + 1 tokens further back than what it drafts"
            )


def test_the_same_seed_marks_the_same_tokens():
    agent = play.agent_in(example_agent.FOLDER)
    episode, model = play.episode_of(agent, play.task_of(agent.recipe, 1, None), 1.0, 3)
    drafter = Drafter(layers_of(agent), 1.0, 3)
    first, again, other = (
        tokens.turns(model, episode, agent.language, 1.0, one) for one in (drafter, drafter, replace(drafter, seed=4))
    )
    unmarked = [tuple(replace(token, draft=None) for token in turn) for turn in other]
    assert first == again and unmarked == tokens.turns(model, episode, agent.language, 1.0), "marks change nothing else"
