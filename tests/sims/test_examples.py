"""The examples that the explorer shows, written from a run whose agent has learned nothing: that they hang together."""

import itertools
import json
from random import Random

import numpy as np
import pytest
import torch

from kit.settings import RunError
from recipe.microrepo import NoiseConfig
from recipe.small.data import task_stream
from recipe.small.demonstrations import context, taught
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.settings import Memory
from ref.router_replay import replay
from sims.examples import runs as examples
from sims.examples.chain_pieces import notes, retold
from sims.policies import read_config
from tests import forks

SIZES = examples.Sizes(
    tasks=3,
    samples=2,
    shown_tasks=2,
    shown_samples=2,
    positions=5,
    routed=4,
    dropping=1,
    alphas=(0.0, 0.9, 1.0),
    drafting_tasks=2,
)


@pytest.fixture(scope="module")
def twice(tiny_run, tmp_path_factory):
    """The folders of examples written from one run in two processes."""
    folder, said = tmp_path_factory.mktemp("examples"), tmp_path_factory.mktemp("said") / "said"
    folders = [folder / "first", folder / "again"]
    for process in [forks.begin(write, tiny_run, out, said=said) for out in folders]:
        forks.end(process, said)
    return folders


def write(run, out):
    torch.set_num_threads(1)  # two of them on two cores
    begun = []
    assert sorted(path.name for path in examples.write(run, out, SIZES, begun.append)) == sorted(
        path.name for path in out.iterdir()
    )
    assert tuple(begun) == examples.PARTS


@pytest.fixture(scope="module")
def written(twice):
    return {path.name: path for path in twice[0].iterdir()}


def told(written, name):
    return json.loads(written[f"{name}.json"].read_text(encoding="utf-8"))


def test_the_same_run_gives_the_same_files(twice):
    first, again = ({path.name: path.read_bytes() for path in out.iterdir()} for out in twice)
    assert first.keys() == again.keys() and not [name for name in first if first[name] != again[name]]


def test_the_command_writes_the_recipes_curves_too(tiny_run, tmp_path, ask, monkeypatch):
    monkeypatch.setattr(examples, "write", lambda run, out, progress: [out / "rollouts.json"])
    code, said, _ = ask("examples", "--run", tiny_run, "--out", tmp_path)
    assert code == 0 and said.splitlines()[:2] == [str(tmp_path / "rollouts.json"), str(tmp_path / "recipe")]
    assert said.splitlines()[2].startswith("next: ")
    assert json.loads((tmp_path / "recipe" / "report.json").read_text())["technique"] == "recipe"


def test_rollouts_say_what_they_cost(written):
    rollouts = told(written, "rollouts")["rollouts"]
    assert len(rollouts) == 4 and len({r["task"] for r in rollouts}) == 2
    for r in rollouts:
        assert (
            r["own_tokens"] > 0
            and r["given_tokens"] >= 0
            and r["calls"] >= r["invalid_calls"]
            and r["task"] in r["text"]
        )


def test_stored_scores_give_the_experts_that_were_taken(written):
    found = told(written, "routing")
    with np.load(written["routing.npz"]) as stored:
        arrays = {name: torch.from_numpy(x) for name, x in stored.items()}
    assert len(arrays["logp"]) == 1 + len(found["alphas"]) and len(arrays["rollout"]) == len(arrays["behavior"])
    for i, rollout in enumerate(found["rollouts"]):
        sampler, own = arrays[f"{i}/sampler"].long(), arrays[f"{i}/own"].long()
        assert len(rollout["tokens"]) == len(rollout["sampled"]) == len(sampler) + 1
        for place, right in ((0, sampler), (len(found["alphas"]) - 1, own)):
            scores = arrays[f"{i}/scores"][int(arrays[f"{i}/pass"][place])]
            for layer in range(scores.shape[1]):
                taken = replay(scores[:, layer], sampler[:, layer], sampler.shape[-1], found["alphas"][place])
                assert torch.equal(taken.sort(-1)[0], right[:, layer].sort(-1)[0])


def test_distributions_are_of_the_agents_own_positions(written):
    with np.load(written["token-distributions.npz"]) as stored:
        policy, reference = stored["policy"], stored["reference"]
    assert policy.shape == reference.shape == (5, 400) and policy.dtype == np.float16
    assert np.abs(np.exp(policy.astype(np.float64)).sum(1) - 1).max() < 1e-2


def test_a_draft_stands_or_falls(written):
    found = told(written, "drafting")
    assert found["identical"] == found["tasks"] == 2
    for g, way in found["drafts"].items():
        assert len(way["drafted"]) == int(g) and all(
            a <= d for a, d in zip(way["accepted"], way["drafted"], strict=True)
        )
        assert (
            way["stood"] == sum(way["accepted"]) <= way["tried"] <= sum(way["drafted"])
            and way["passes"] <= way["tokens"]
        )
    for step in found["steps"]:
        if step["kind"] != "given":
            assert step["accepted"] <= len(step["drafted"]) and step["accepted"] + len(step["added"]) >= 1


def shown(root, memory):
    """The scripted agent on a task of which it had to go on in a second context, twice: a group of two."""
    recipe, language = read_config(root), language_of(root)

    def played(tasks):
        return taught(tasks, language, context(language, recipe), NoiseConfig.clean(), memory, Random(0))

    tasks = itertools.islice(task_stream(recipe, "demonstrations"), 200)
    task = next(
        one.task
        for one in played(tasks)
        if one.task.helpers and [n["scripted"].startswith("def ") for n in notes(language, one.task, one)] == [True]
    )
    return recipe, language, list(played([task, task]))


def test_a_right_summary_keeps_every_fact(tiny_run):
    _, language, (lesson, _) = shown(tiny_run, Memory(wordy=0.0, forgetful=0.0))
    (note,) = notes(language, lesson.task, lesson)
    assert note["summary"] == note["scripted"]
    assert {fact["fate"] for fact in note["facts"] if fact["needed"]} == {"kept"}


def test_what_a_summary_leaves_out_is_lost(tiny_run):
    _, language, (lesson, _) = shown(tiny_run, Memory(wordy=0.0, forgetful=1.0))
    (note,) = notes(language, lesson.task, lesson)
    assert [fact["fate"] for fact in note["facts"] if fact["needed"]].count("lost") == 1


def test_a_chain_retold(tiny_run):
    recipe, language, group = shown(tiny_run, Memory(wordy=0.0, forgetful=0.0))
    before, after = (load_checkpoint(tiny_run, recipe, name, with_mtp=False)[0] for name in ("sft", "final"))
    found = retold(after, before, recipe, language, [group[0].task], group, n=2)
    assert found["several"] == found["rollouts"] == 2 and len(found["chains"]) == 1, "two chains alike are one"
    chain = found["chains"][0]
    assert chain["success"] and chain["saved"] == group[0].chain.saved > 0
    for one in chain["group"]:
        assert one["reward"] == pytest.approx(sum(one[part] for part in ("tests", "effort", "invalid", "kl")), abs=1e-6)
    for segment, counts, some in zip(
        group[0].chain.segments, chain["group"][0]["contexts"], chain["contexts"], strict=True
    ):
        sizes = [(piece["role"], len(piece["tokens"])) for piece in some]
        own, summary = (sum(n for role, n in sizes if role in roles) for roles in (("turn", "summary"), ("summary",)))
        assert [sum(n for _, n in sizes) - own, own, summary] == counts
        assert language.decode(segment.tokens.tolist()) == "".join(
            itertools.chain(*(piece["tokens"] for piece in some))
        )
    first, second = chain["contexts"]
    assert [piece["role"] for piece in second][:3] == ["prompt", "summary, given", "resume"] and first[-2][
        "role"
    ] == "request"
    assert second[1]["tokens"] == first[-1]["tokens"] and second[0] == first[0]


def test_what_cannot_be_written_is_said_in_one_line(tmp_path):
    with pytest.raises(RunError, match="not a run of the recipe"):
        examples.write(tmp_path / "nowhere", tmp_path)
    assert not list(tmp_path.iterdir())
