"""The length penalty's experiment: curves, matched prices and figures by hand, and verdicts that a wrong agent does not
get."""

import itertools
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.runs import Run
from recipe.microrepo import Session, Verdict
from recipe.small.data import task_stream
from recipe.small.settings import Recipe
from ref.length_penalty import length_penalty
from ref.rollout import Rollout
from ref.self_summary import Chain, Segment
from sims.behaviour import effort as behaviour
from sims.behaviour.effort import MEASURES
from sims.length_penalty import curves as length_curves
from sims.length_penalty import experiment
from sims.length_penalty.experiment import SETTINGS, Experiment

BENDS, EXPONENTS = Experiment().bends, Experiment().exponents


def test_printed_formula_by_hand():
    assert float(length_curves.printed(1, 1, 2)) == 0.5
    assert float(length_curves.printed(3, 1, 0.5)) == 2
    assert float(length_curves.printed(1, 1, 1)) == pytest.approx(math.log(2), rel=1e-15)
    assert float(length_curves.printed(7, 1, 0)) == float(length_curves.printed(7, 0, 2)) == 7


def curve_verdicts() -> dict[str, str]:
    rows = length_curves.curves(BENDS, EXPONENTS)
    return {c["name"]: c["verdict"] for c in length_curves.verdicts(rows, BENDS, EXPONENTS)}


def naive(x, k, q):
    return length_penalty(x, k, q) if q in (0, 1) or k < 1e-9 else ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        (length_penalty, set()),
        (naive, {"formula", "limits"}),  # as printed, in floats: no digits left near q = 1
        (lambda x, k, q: length_penalty(x, k, 2 * q), {"formula", "concave", "limits"}),
        (lambda x, k, q: x + k * q * x * x / 2, {"formula", "concave", "limits"}),
        (lambda x, k, q: length_penalty(x, k, min(q, 1)), {"formula", "concave", "limits"}),
    ],
    ids=["right", "naive", "twice q", "convex", "not bounded"],
)
def test_curves_tell_right_from_wrong(monkeypatch, wrong, fails):
    monkeypatch.setattr(length_curves, "length_penalty", wrong)
    assert {name for name, verdict in curve_verdicts().items() if verdict != "holds"} == fails


def verdict(**more) -> Verdict:
    zero = dict.fromkeys(("tests", "passed", "calls", "invalid_calls", "reads", "writes", "test_runs"), 0)
    return Verdict(**{**zero, "tests": 0.0, "turns": 1, "tested": False, "finished": True, **more})


STOP = 0
LANGUAGE = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)), env=STOP)


def episode(said: list[str], answer: str = "answer", **outcome) -> Rollout:
    """A finished episode in which every character is a token."""
    tokens, own = [ord(c) for c in "prompt"], [False] * 6
    for turn in said:
        tokens += [*map(ord, turn), STOP, *map(ord, answer)]
        own += [True] * (len(turn) + 1) + [False] * len(answer)
    zeros, nothing = torch.zeros(len(own)), torch.zeros(len(own) - 1, 0, 1, dtype=torch.int16)
    segment = Segment(torch.tensor(tokens), torch.tensor(own), zeros, zeros.long(), nothing, True)
    found = verdict(**outcome)
    return Rollout(Chain([segment], True), {"tests": found.tests}, asdict(found), opening=6)


def test_turns_are_what_the_policy_said():
    assert behaviour.turns_of(episode(["read m1\nread m2", "done"]), LANGUAGE) == ["read m1\nread m2", "done"]
    assert behaviour.turns_of(episode(["read m1", "", "done"], answer=""), LANGUAGE) == ["read m1", "", "done"]
    cut = episode(["read m1", "wri"])
    (segment,) = cut.chain.segments
    segment.tokens, segment.sampled = segment.tokens[:-7], segment.sampled[:-7]  # without stop and answer
    assert behaviour.turns_of(cut, LANGUAGE) == ["read m1", "wri"]


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        (["read m0", "read m1\nread m2", "done"], (True, True)),
        (["read m0", "read m1", "read m2", "done"], (True, False)),
        (["read m0\nread m1", "read m2"], (True, False)),
        (["read m0\nread m1", "done"], (False, False)),
        (["write m0\n    read m1\n    read m2"], (False, False)),
        (["raed m1\nread m2"], (False, False)),
    ],
)
def test_helpers_read(turns, found):
    assert behaviour.helpers_read(SimpleNamespace(helpers=("m1", "m2")), turns) == found
    assert behaviour.helpers_read(SimpleNamespace(helpers=("m1",)), turns) == (False, False)


def test_a_demonstration_with_parallel_reads_counts_as_such():
    """On a real task of the world, through its session."""
    task = next(t for t in experiment.heldout(Recipe(), Experiment(tasks=1)) if t.depth == 2)
    first, second = task.helpers
    for turns, together in (([f"read {first}\nread {second}"], True), ([f"read {first}", f"read {second}"], False)):
        session = Session(task)
        for turn in turns:
            session.step(turn)
        v = session.verify()
        assert behaviour.helpers_read(task, turns) == (True, together) and v.reads == 2 and v.turns == len(turns)


def test_measures_by_hand():
    tasks = [SimpleNamespace(helpers=("m1", "m2")), SimpleNamespace(helpers=())]
    first = episode(
        ["read m1\nread m2", "done"], tests=1.0, turns=2, calls=3, reads=2, writes=1
    )  # 16 + 5 own tokens, 12 given
    second = episode(["read m1", "read m2"], turns=2, calls=3, invalid_calls=1)  # 8 + 8 own tokens
    payment = Recipe().rl.payment  # weights: tokens 1, given tokens 0.1, calls 2, turns 4
    got = behaviour.measure([first, second, second, second], tasks, 2, payment, LANGUAGE)
    by_name = dict(zip(MEASURES, got.T.tolist(), strict=True))
    assert by_name == {
        "success": [0.5, 0],
        "tokens": [18.5, 16],
        "turns": [2, 2],
        "calls": [2.5, 2],
        "invalid": [0.5, 1],
        "effort": pytest.approx([18.5 + 1.2 + 6 + 8, 16 + 1.2 + 6 + 8]),
        "finished": [1, 1],
        "tried": [0.5, 0],
        "both": [1, 0],
        "together": [0.5, 0],
        "solved_tokens": [10.5, 0],
    }
    mean = got.mean(0)
    assert behaviour.figure(mean, "calls_per_turn") == 2.25 / 2 and behaviour.figure(mean, "read_together") == 0.5
    assert behaviour.figure(mean, "tokens_if_solved") == 21 and behaviour.figure(got[1], "tokens_if_solved") == 0


def test_prices_by_hand(tmp_path, monkeypatch):
    """Four rollouts of an easy task of effort 20 and four of a hard one of effort 40, of which a turn is 10: every
    price from the definition. Under the linear price the next unit of the easy one costs what it does under the bent
    one."""
    played = [episode(["x" * 9], "")] * 4 + [episode(["x" * 29], "")] * 4
    monkeypatch.setattr(experiment, "playing", lambda *_: played)
    monkeypatch.setattr(experiment, "task_stream", lambda *_: [SimpleNamespace(depth=0), SimpleNamespace(depth=2)])
    monkeypatch.setattr(experiment, "policy", lambda *_: None)
    monkeypatch.setattr(experiment, "language_of", lambda *_: None)
    c, recipe = Experiment(matching=2), Recipe()
    with Run.open(tmp_path / "run", "figure length-penalty", c) as run:
        found = experiment.matched(run, c, tmp_path, recipe)
    assert list(found) == list(SETTINGS) and [
        found[name]["penalty"] for name in ("none", *SETTINGS[2:])
    ] == pytest.approx([0, 0.2, 0.2])
    slope = found["nonlinear"]["price"] / (1 + 20 / 30) ** 2
    assert found["linear"]["price"] == pytest.approx(slope) and found["linear"]["k"] == found["linear"]["q"] == 0
    assert found["linear"]["penalty"] == pytest.approx(30 * slope)
    assert (
        found["linear"]["next_unit_easy"] == pytest.approx(found["nonlinear"]["next_unit_easy"]) == pytest.approx(slope)
    )
    # q = 2: C(x) = x / (1 + kx), with k = 1/30, and 1/20 where turns are free.
    assert found["nonlinear"]["k"] == pytest.approx(1 / 30)
    assert found["nonlinear"]["price"] == pytest.approx(0.2 / ((20 / (5 / 3) + 40 / (7 / 3)) / 2))
    assert found["turns free"]["k"] == pytest.approx(1 / 20) and found["turns free"]["turn"] == 0
    assert found["turns free"]["price"] == pytest.approx(0.2 / ((10 / 1.5 + 30 / 2.5) / 2))
    # The next unit costs less at the larger effort, and the same everywhere where the price is linear.
    assert found["nonlinear"]["next_unit_low"] > 1.3 * found["nonlinear"]["next_unit_high"]
    assert found["linear"]["next_unit_low"] == found["linear"]["next_unit_high"] == pytest.approx(slope)
    assert found["nonlinear"]["next_unit_high"] < slope
    base = recipe.rl.payment
    for payment in experiment.payments(recipe, c, found).values():  # nothing but the price of effort differs
        same = replace(payment, effort_price=base.effort_price, k=base.k, q=base.q, weights=base.weights)
        assert same == base and replace(payment.weights, turns=base.weights.turns) == base.weights


def test_heldout_tasks_of_each_depth():
    tasks = experiment.heldout(Recipe(), Experiment(tasks=3))
    assert [t.depth for t in tasks] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and len({t.key for t in tasks}) == 9
    measured_by_the_recipe = {t.key for t in itertools.islice(task_stream(Recipe(), "evaluation"), 300)}
    assert {t.key for t in tasks} <= measured_by_the_recipe


def agents(T: int = 80, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Measures [settings, 2, depths, T, MEASURES] of agents that behave as the report says, and of an SFT policy. A
    change {setting__measure: values at depths 0, 1, 2} makes them behave otherwise."""
    draw = np.random.default_rng(0)
    means = {"success": (0.9, 0.6, 0.03), "tokens": (30, 50, 70), "both": (0, 0, 0.5), "together": (0, 0, 0.1)}
    own = {
        "linear": {"tokens": (20, 32, 45), "together": (0, 0, 0.25)},
        "nonlinear": {"tokens": (20, 44, 60), "together": (0, 0, 0.25)},
        "turns free": {"tokens": (20, 44, 60)},
    }
    for change, values in changes.items():
        own.setdefault(change.split("__")[0].replace("_", " "), {})[change.split("__")[1]] = values
    data = np.zeros((len(SETTINGS), 2, 3, T, len(MEASURES)))
    task = draw.normal(0, 1, (3, T))  # shared by settings and trainings: what pairing takes out
    for s, name in enumerate(SETTINGS):
        for what, values in {**means, **own.get(name, {})}.items():
            noise = {"tokens": (5.0, 2.0), "success": (0.1, 0.03)}.get(what, (0.0, 0.02))
            scatter = noise[0] * task + draw.normal(0, noise[1], (2, 3, T))
            data[s, :, :, :, MEASURES.index(what)] = np.array(values)[:, None] + scatter
    return data, data[0, 0]


def decided(*found) -> dict[str, dict]:
    prices = {name: {"penalty": 0.2} for name in SETTINGS}
    c = Experiment(tasks=80, resamples=200)
    return {claim["name"]: claim for claim in experiment.behaviour_claims(*found, prices, c)}


def test_agents_as_the_report_says_get_every_verdict():
    claims = decided(*agents())
    assert {claim["verdict"] for claim in claims.values()} == {"reproduced"}
    # Easy: both save 1/3. Hard: linear saves 36%, nonlinear 12%.
    assert claims["easy-quick"]["measured"] == pytest.approx(1 / 3, abs=0.03)
    assert claims["easy-more-than-hard"]["measured"] == pytest.approx(0.36 - 0.12, abs=0.03)
    assert claims["hard-room"]["measured"] == pytest.approx(12, abs=1)
    assert claims["parallel"]["measured"] == pytest.approx(0.25 / 0.5 - 0.1 / 0.5, abs=0.03)


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        ({"nonlinear__tokens": (31, 44, 60)}, "easy-quick", "contradicted"),
        ({"nonlinear__tokens": (20, 30, 45)}, "hard-room", "contradicted"),
        ({"nonlinear__tokens": (20, 31, 45)}, "easy-more-than-hard", "contradicted"),
        ({"nonlinear__success": (0.9, 0.4, 0.03)}, "hard-success", "contradicted"),
        ({"none__success": (0.9, 0.05, 0.03), "linear__success": (0.9, 0, 0)}, "hard-success", "not tested"),
        ({"nonlinear__together": (0, 0, 0.05)}, "parallel", "contradicted"),
        # Rarer than before RL, though not as rare as where turns are free: nothing was taught.
        ({"nonlinear__together": (0, 0, 0.06), "turns_free__together": (0, 0, 0.01)}, "parallel", "contradicted"),
        ({"nonlinear__both": (0, 0, 0), "nonlinear__together": (0, 0, 0)}, "parallel", "not tested"),
    ],
)
def test_agents_that_behave_otherwise_are_found_out(change, name, verdict):
    assert decided(*agents(**change))[name]["verdict"] == verdict


def test_what_is_too_rare_is_not_judged():
    data, sft = agents(none__success=(0.9, 0.05, 0.03))
    assert decided(data, sft)["hard-success"]["measured"] is None
    data[..., MEASURES.index("both")] = 0.001
    assert decided(data, sft)["parallel"]["measured"] is None


def test_a_training_that_disagrees_prevents_reproduced():
    data, sft = agents()
    tokens = MEASURES.index("tokens")
    data[SETTINGS.index("nonlinear"), 1, 0, :, tokens] = data[0, 1, 0, :, tokens] + 1
    assert decided(data, sft)["easy-quick"]["verdict"] == "partly"


def test_hard_is_what_can_be_solved():
    data, sft = agents()
    assert "Hard is depth 1" in decided(data, sft)["easy-more-than-hard"]["note"]
    sft[2, :, MEASURES.index("success")] = 0.2
    assert "Hard is depth 2" in decided(data, sft)["easy-more-than-hard"]["note"]


def test_a_quick_run(tmp_path, play_figure):
    record = play_figure("length-penalty", tmp_path)
    verdicts = {claim["name"]: claim["verdict"] for claim in record["claims"]}
    assert verdicts["formula"] == verdicts["concave"] == verdicts["limits"] == "holds"
    prices = {row["setting"]: row for row in record["rows"] if row["part"] == "price"}
    assert [prices[name]["penalty"] for name in ("none", "nonlinear", "turns free")] == pytest.approx([0, 0.2, 0.2])
    assert prices["linear"]["next_unit_easy"] == pytest.approx(prices["nonlinear"]["next_unit_easy"])
    rows = [(row["setting"], row["depth"]) for row in record["rows"] if row["part"] == "behaviour"]
    assert rows == list(itertools.product(("SFT", *SETTINGS), (0, 1, 2)))
    trained = {p.stem for p in (tmp_path / "stages").glob("*.json")}
    assert trained == {"matching", "sft-0", "none-0", "linear-0", "nonlinear-0", "turns-free-0"}
    # The first batch is the same rollouts under every setting; only what they are paid for differs.
    metrics = [tmp_path / f"metrics/{name}-0.jsonl" for name in SETTINGS[:3]]
    first = [json.loads(path.read_text().splitlines()[0]) for path in metrics]
    assert len({(line["tokens"], line["turns"], line["success"]) for line in first}) == 1
    assert first[0]["effort"] == 0 > first[1]["effort"] != first[2]["effort"]
    assert (tmp_path / "length-penalty.png").stat().st_size > 20_000
