"""A step of RL in micro-batches on many cores is the step on the whole batch, and its bits do not depend on the number
of cores."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch

from kit import process
from kit.runs import Run
from kit.settings import fill
from recipe.microrepo import documents
from recipe.small import agent, reinforcement
from recipe.small import stages as recipe
from recipe.small.agent import Language, hash_seed, one_row
from recipe.small.data import task_stream
from recipe.small.learner import Learner
from recipe.small.reinforcement import CORES, metrics_of
from recipe.small.tasks import MicroTasks
from ref import cpt, dr_grpo, rl
from ref.engine.sampler import Sampler
from ref.mtp import MTP, mtp_loss
from ref.network import Config, Transformer
from ref.network.masters import Masters
from ref.rl import Done, compute_own_logp, improve, make_routing, pad, score_rollouts
from ref.rollout import Limits
from ref.self_summary import spread
from sims.policies import SMOKE

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)


@pytest.fixture(scope="module")
def played():
    """Configuration, policy, MTP layers, a batch of 40 sampled rollouts of unlike lengths (two micro-batches), and the
    agent's language."""
    language = Language(cpt.train_tokenizer(itertools.islice(documents(random.Random(0)), 300), 400))
    settings = SMOKE | {
        "training": SMOKE["training"] | {"dtype": "float32"},
        "rl": SMOKE["rl"] | {"prompts": 10, "rollouts": 4, "replay": "plain"},
    }
    config = fill(recipe.Recipe, settings)
    torch.manual_seed(1)
    network = Config.tiny(language.tokenizer.get_vocab_size(), **TINY)
    model, mtp = Transformer(network), MTP(network)
    sampler, generator, rollouts = Sampler(model, torch.float32), torch.Generator().manual_seed(0), []
    for n, task in enumerate(itertools.islice(task_stream(config, "rl"), 10)):
        rollouts += agent.play(sampler, language, [task], 4, Limits(agent.single(150 + 8 * n)), 4, generator)
    assert (
        len({len(one_row(one.chain).tokens) for one in rollouts}) > 1
        and min(one.chain.num_sampled_tokens for one in rollouts) > 1
    )
    return config, model, mtp, rollouts, language


def a_step(played, monkeypatch, cores, rewards):
    """The figures of a step on `played` with these rewards, and what it left of the policy and of its MTP layers."""
    config, model, mtp, rollouts, language = played
    monkeypatch.setattr(process, "cores", lambda: cores)
    given = iter(rewards)
    monkeypatch.setattr(rl, "compute_reward_terms", lambda *_: {"tests": next(given), "effort": 0.0})
    learner = Learner(config, copy.deepcopy(model), copy.deepcopy(mtp), 0.0, 0.0)
    learner.optimizers = [torch.optim.SGD(learner.trunk.masters.parameters(), lr=1.0)]
    learner.mtp_optimizers = [torch.optim.SGD(learner.mtp.masters.parameters(), lr=1.0)]
    figures = advance(config, learner, copy.deepcopy(model), rollouts, MicroTasks(config, language))
    return figures, [learner.trunk.masters.state_dict(), learner.mtp.masters.state_dict()]


def advance(config, learner, reference, rollouts, tasks):
    """The first step of `ref.rl.train` on rollouts that were sampled before, at the optimisers' own rates."""
    learner.rates = [[group["lr"] for group in one.param_groups] for one in learner.all_optimizers]
    rollouts = [replace(one) for one in rollouts]
    score_rollouts(config.rl, tasks, rollouts, hash_seed(config.seed, "hints", 0))
    more = {"mtp": learner.drafts(0), "mtp_weight": learner.mtp_weight, "map_fn": CORES}
    result = improve(config.rl, learner.model, reference, rollouts, **more)
    chosen = [one.task for one in rollouts[:: config.rl.rollouts]]
    return metrics_of(config, Done(1, chosen, rollouts, result, learner.apply(result, 1.0)))


REWARDS = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()


def test_the_bits_are_the_same_on_any_number_of_cores(played, monkeypatch):
    one, two = (a_step(played, monkeypatch, cores, REWARDS) for cores in (1, 2))
    assert one[0] == two[0]
    assert all(
        torch.equal(x, y)
        for a, b in zip(one[1], two[1], strict=True)
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def with_feedback(played, **hints):
    config, *rest = played
    return replace(config, rl=replace(config.rl, feedback=replace(config.rl.feedback, **hints))), *rest


def test_hints_change_a_step_only_where_they_have_a_weight(played, monkeypatch):
    """And their bits do not depend on the number of cores either."""
    plain, silent = (
        a_step(one, monkeypatch, 1, REWARDS)
        for one in (played, with_feedback(played, source="shuffled", divergence="js"))
    )
    assert plain[0] == silent[0] and "hints" not in plain[0] and "divergence" not in plain[0]
    assert all(
        torch.equal(x, y)
        for a, b in zip(plain[1], silent[1], strict=True)
        for x, y in zip(a.values(), b.values(), strict=True)
    )
    one, two = (a_step(with_feedback(played, weight=1.0), monkeypatch, cores, REWARDS) for cores in (1, 2))
    assert one[0] == two[0] and one[0]["hints"] > 0.5 and one[0]["divergence"] > 0
    assert all(
        torch.equal(x, y)
        for a, b in zip(one[1], two[1], strict=True)
        for x, y in zip(a.values(), b.values(), strict=True)
    )
    (before, drafts), (after, others) = plain[1], one[1]
    assert plain[0]["loss"] == one[0]["loss"] and any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(drafts[name], others[name]) for name in drafts), "draft layers have no part in it"


def test_a_step_may_be_given_other_hints(played, monkeypatch):
    """The function is asked once, and its hints are those that count."""
    asked = []

    def none(rollouts, seed):
        asked.append(len(rollouts))
        return [[[] for _ in one.chain.segments] for one in rollouts]

    config, model, _, rollouts, language = with_feedback(played, weight=1.0)
    learner = Learner(config, copy.deepcopy(model), None, 0.0, 0.0)
    figures = advance(config, learner, copy.deepcopy(model), rollouts, MicroTasks(config, language, hinting=none))
    assert asked == [40] and figures["hints"] == 0 and "divergence" not in figures


def test_between_the_processes_a_step_computes_with_one_thread(played, tmp_path, monkeypatch):
    """Two threads wait for each other in every sum and in Adam: beside busy programs that was a tenth of the step."""
    seen, step, before = [], Masters.step, torch.get_num_threads()
    monkeypatch.setattr(rl, "improve", lambda *a, **k: (seen.append(torch.get_num_threads()), improve(*a, **k))[1])
    monkeypatch.setattr(Masters, "step", lambda *a, **k: (seen.append(torch.get_num_threads()), step(*a, **k))[1])
    monkeypatch.setattr(process, "cores", lambda: 1)
    config, model, mtp, _, language = played
    short = replace(config.rl, steps=1, prompts=2, rollouts=2, max_turns=2)
    config = replace(config, training=replace(config.training, threads=2), rl=short)
    try:
        with Run.open(tmp_path / "run", "recipe", config) as run:
            stage = run.stage("rl", total=1)
            reinforcement.learn(stage, config, copy.deepcopy(model), copy.deepcopy(mtp), copy.deepcopy(model), language)
        assert seen == [1, 1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_step_is_the_one_on_the_whole_batch(played, monkeypatch, cores):
    """Written out on one padded batch, by autograd: the same weights after a step of plain gradient descent, which is
    clipped to norm 1."""
    config, model, mtp, rollouts, _ = played
    r = config.rl
    figures, (after, drafts) = a_step(played, monkeypatch, cores, REWARDS)
    chains = [one.chain for one in rollouts]
    segments = [s for chain in chains for s in chain.segments]
    ids, mask, behavior = pad(segments)
    advantages = spread(dr_grpo.group_advantages(torch.tensor(REWARDS).view(10, 4)).flatten(), chains)
    plain, layers = copy.deepcopy(model), copy.deepcopy(mtp)
    out = plain(ids, logits=False, experts=make_routing(segments, ids.shape[1], "plain", 0.0))
    logp = compute_own_logp(plain, out.hidden, ids, mask, r.temperature)
    loss = dr_grpo.policy_loss(logp, behavior[:, 1:], advantages, mask[:, 1:], budget=float(40 * r.budget_tokens))
    doc = torch.where(torch.arange(ids.shape[1]) < torch.tensor([len(s.tokens) for s in segments])[:, None], 0, -1)
    distilled, _, _ = mtp_loss(layers, plain, out, ids, doc, mask.float())
    (config.mtp.weight * distilled / mask.sum()).backward()
    loss.backward()
    assert figures["loss"] == pytest.approx(loss.item(), abs=1e-6) and figures["grad_norm"] > 1e-3
    for network, left in ((plain, after), (layers, drafts)):
        moved = torch.nn.utils.clip_grad_norm_([p for p in network.parameters() if p.grad is not None], 1.0)
        assert moved > 1e-3
        for name, p in network.named_parameters():
            wanted = p.detach() - (p.grad if p.grad is not None else 0)
            torch.testing.assert_close(left[name], wanted, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
