"""No token older than the bound, no group lost, none trained twice; and what the virtual clock says where it can be
computed by hand."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.async_rl import Demo, Event, Life, Load, Rules, demo, heavy_tailed, sequence_mask, simulate, truncated_ratios

MODES = ("synchronous", "one-step-off", "asynchronous", "in-flight")


def audit(rules, journal):
    """What must hold of any journal, counted without `Life`: ages, admissions, and what became of each group."""
    version, state, oldest = 0, {}, {}
    for event in journal:
        if event.kind == "start":
            alive = sum(x in ("running", "ready", "trained") for x in state.values())
            assert alive < (rules.staleness + version + 1) * rules.groups and alive < rules.steps * rules.groups
            assert event.groups[0] not in state
            state[event.groups[0]] = "running"
        elif event.kind == "ready":
            assert state[event.groups[0]] == "running"
            state[event.groups[0]], oldest[event.groups[0]] = "ready", event.version
        elif event.kind == "drop":
            assert state[event.groups[0]] in ("running", "ready")
            state[event.groups[0]] = "dropped"
        else:
            assert len(set(event.groups)) == rules.groups
            for group in event.groups:
                assert state[group] == "ready" and 0 <= version - oldest[group] <= rules.staleness
                state[group] = "trained"
            version += 1
    return Counter(state.values()), version


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_whatever_happens_in_whatever_order(seed, groups, staleness, steps):
    """Groups start, end in any order with tokens of any versions since their start, are given up, and the service dies
    at any moment: it is rebuilt from its journal, and a step that was not noted has not happened."""
    rng, rules = random.Random(seed), Rules(groups, staleness, steps)
    life, begun, taken = Life(rules), {}, None
    for _ in range(400):
        move = rng.choice(["start", "start", "finish", "finish", "train", "drop", "crash"])
        running = [group for group, state in life.state.items() if state == "running"]
        if move == "start" and life.admissible:
            begun[life.start()] = life.version
        elif move == "finish" and running:
            group = rng.choice(running)
            life.finish(group, rng.randint(begun[group], life.version))
        elif move == "drop" and running and rng.random() < 0.2:
            life.drop(rng.choice(running))
        elif move == "train":
            if taken is None:
                taken = life.take()
            elif rng.random() < 0.7:
                life.train(taken)
                taken = None
        elif move == "crash" and rng.random() < 0.2:
            life, taken = Life(rules, life.journal), None
    counts, version = audit(rules, life.journal)
    assert version == life.version <= steps and counts["trained"] == version * groups
    assert counts == Counter(life.state.values())
    again = Life(rules, life.journal)
    assert (again.state, again.oldest, again.version, again.admissible) == (
        life.state,
        life.oldest,
        life.version,
        life.admissible,
    )


def test_what_cannot_follow_is_refused_and_changes_nothing():
    life = Life(Rules(groups=1, staleness=1, steps=3))
    first, second = life.start(), life.start()
    life.finish(first, 0)
    for event, said in (
        (Event("start", (2,), 0), "no group may start: 2 have, at version 0"),
        (Event("start", (3,), 0), "group 2 starts next, at version 0; got group 3"),
        (Event("train", (second,), 0), "train: group 1 must be ready; it is running"),
        (Event("train", (first,), 1), "train must happen at version 0; got 1"),
        (Event("train", (first, first), 0), "train must name 1 groups, each once"),
        (Event("ready", (first,), 0), "ready: group 0 must be running; it is ready"),
        (Event("ready", (second,), 1), "the oldest version of group 1 must lie between 0 and 0; got 1"),
        (Event("drop", (9,), 0), "drop: group 9 must be running or ready; it is unknown"),
    ):
        before = (dict(life.state), life.version, len(life.journal))
        with pytest.raises(ValueError, match=said):
            life.apply(event)
        assert (life.state, life.version, len(life.journal)) == before
    life.train((first,))
    with pytest.raises(ValueError, match="train: group 0 must be ready; it is trained"):
        life.train((first,))


def test_admission_alone_does_not_bound_the_age():
    """S = 1: group 0 starts first and ends last. When it ends, three steps were made without it, and it is dropped."""
    life = Life(Rules(groups=1, staleness=1, steps=9))
    slow = life.start()
    for _ in range(2):
        quick = life.start()
        life.finish(quick, life.version)
        assert life.take() == (quick,)
        life.train((quick,))
    life.finish(slow, 0)
    assert life.version - 0 > life.rules.staleness and life.take() is None and life.state[slow] == "dropped"
    assert life.admissible == 2


@pytest.mark.parametrize("numbers", [{"groups": 0}, {"staleness": -1}, {"steps": -1}])
def test_bounds_that_make_no_sense(numbers):
    with pytest.raises(ValueError, match=f"{next(iter(numbers))} must be at least"):
        Rules(**numbers)


def even(tokens, wait=0.0, turns=1):
    return lambda group, rollout: [(tokens, wait)] * turns


LOAD = Load(even(10), rollouts=2, slots=8, token_s=lambda rows: 0.1, train_s=3.0, swap_s=0.0)


def test_the_clock_of_a_synchronous_loop():
    """10 tokens of 0.1 s, then 3 s of training, and again; a swap adds its pause. Half of the slots: two waves."""
    rules = Rules(groups=4, staleness=0, steps=5)
    out = simulate("synchronous", rules, LOAD)
    assert out.steps == pytest.approx([4.0, 8.0, 12.0, 16.0, 20.0]) and out.token_ages == {0: 5 * 4 * 2 * 10}
    assert out.trainer_idle == pytest.approx(0.25) and out.sampler_idle == pytest.approx(0.75)
    slower = simulate("synchronous", rules, Load(**{**vars(LOAD), "swap_s": 0.5, "publish_s": 0.25, "slots": 4}))
    assert slower.steps == pytest.approx([5.0, 10.75, 16.5, 22.25, 28.0])


def test_the_clock_one_step_off():
    """Sampling hides behind training: 1 s before the first step, then 3 s each. Where sampling is longer, training
    hides."""
    rules = Rules(groups=4, steps=5)
    out = simulate("one-step-off", rules, LOAD)
    assert out.steps == pytest.approx([4.0, 7.0, 10.0, 13.0, 16.0]) and out.token_ages == {0: 80, 1: 4 * 80}
    long = simulate("one-step-off", rules, Load(**{**vars(LOAD), "turns": even(50)}))
    assert long.steps == pytest.approx([8.0, 13.0, 18.0, 23.0, 28.0])


def test_the_clock_of_shared_processors():
    """At half speed while both compute, one step off gains nothing: 1 s alone, then 1 s of sampling and 3 s of training
    in 4 s."""
    out = simulate("one-step-off", Rules(groups=4, steps=3), Load(**{**vars(LOAD), "shared": 0.5}))
    # 1 s, then 2 s side by side (sampling is done, 1 s of training too), then 2 s of training alone.
    assert out.steps[0] == pytest.approx(1 + 2 + 2) and out.steps[1] - out.steps[0] == pytest.approx(4.0)


def test_a_speed_for_each_number_of_engines():
    """Sampling takes 1 s on two engines or on one, training 3 s: beside it, two engines leave half the speed, one
    leaves 0.8 of it."""

    def first_two(groups, engines):
        speed = lambda decoding: {1: 0.8, 2: 0.5}[decoding]  # noqa: E731
        load = Load(
            even(10),
            rollouts=2,
            slots=8,
            workers=engines,
            token_s=lambda rows: 0.1,
            train_s=3.0,
            swap_s=0.0,
            shared=speed,
        )
        return simulate("one-step-off", Rules(groups=groups, steps=2), load).steps

    # 1 s alone; 2 s at half speed in which all is sampled; 2 s alone for what is left of the step; 3 s for the next.
    assert first_two(groups=4, engines=2) == pytest.approx([5.0, 8.0])
    # 1 s alone; 1.25 s at 0.8; 2 s alone; 3 s.
    assert first_two(groups=4, engines=1) == pytest.approx([4.25, 7.25])


def test_in_flight_a_rollout_goes_on_with_new_weights():
    """One group after the other, each 10 s long, a step of 3 s: in flight a rollout has tokens of several versions, and
    drains are not needed."""
    load = Load(**{**vars(LOAD), "turns": lambda group, rollout: [(20 if group % 2 else 100, 0.0)]})
    rules = Rules(groups=1, staleness=4, steps=8)
    drained, flown = (simulate(mode, rules, load) for mode in ("asynchronous", "in-flight"))
    assert flown.seconds < drained.seconds
    assert len({event.version for event in flown.journal if event.kind == "ready"}) > 2
    assert flown.mean_age < sum(age * n for age, n in flown.group_ages.items()) / flown.trained


@settings(max_examples=60)
@given(
    st.sampled_from(MODES),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 2.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_laws_of_the_virtual_clock(mode, seed, groups, staleness, steps, workers, latency, publish):
    rules = Rules(groups, staleness, steps)
    load = Load(
        heavy_tailed(latency, seed),
        rollouts=3,
        slots=workers + seed % 9,
        workers=workers,
        train_s=0.5,
        publish_s=publish,
        shared=0.7,
    )
    out = simulate(mode, rules, load)
    bound = 0 if mode == "synchronous" else 1 if mode == "one-step-off" else staleness
    counts, version = audit(Rules(groups, bound, steps), out.journal)
    assert (
        version == steps == len(out.steps)
        and counts["trained"] == out.trained == steps * groups
        and counts["dropped"] == out.dropped
    )
    assert max(out.group_ages) <= bound and max(out.token_ages) <= bound and out.group_ages.total() == out.trained
    assert out.steps == sorted(out.steps) and out.seconds == pytest.approx(out.steps[-1])
    assert 0 <= out.trainer_idle <= 1 and 0 <= out.sampler_idle <= 1
    for who in ("trainer", *(f"worker {n}" for n in range(workers))):
        mine = [span for span in out.spans if span.service == who]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine)) and all(
            span.start < span.end for span in mine
        )
    again = simulate(mode, rules, load)
    assert again == out


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.0, 0.5]))
def test_without_staleness_nobody_runs_ahead(seed, groups, latency):
    """S = 0 is the synchronous loop, in flight or not."""
    load = Load(heavy_tailed(latency, seed), rollouts=2, slots=16, train_s=0.5)
    loops = [simulate(mode, Rules(groups, 0, 4), load) for mode in ("synchronous", "asynchronous", "in-flight")]
    assert all(loop.steps == pytest.approx(loops[0].steps) and loop.token_ages == loops[0].token_ages for loop in loops)


def test_waiting_is_what_asynchrony_hides():
    """The study's pattern: with slow tools, in flight beats asynchronous beats synchronous; without tools there is
    little to gain."""
    slow = {
        mode: simulate(mode, Rules(groups=8, steps=10), Load(heavy_tailed(0.5), slots=64)).seconds for mode in MODES
    }
    assert slow["in-flight"] < slow["asynchronous"] < slow["one-step-off"] < slow["synchronous"]
    shared = [
        simulate(mode, Rules(groups=8, steps=10), Load(heavy_tailed(0.0), slots=64, shared=0.6)).seconds
        for mode in ("synchronous", "in-flight")
    ]
    assert shared[1] > 0.8 * shared[0]


def test_the_demonstration_names_measure_mode_and_latency():
    config, said = Demo(latencies=(0.0, 0.5), groups=4, steps=5, slots=16), []
    found = demo(config, lambda number, total, **row: said.append((number, total, row["latency"])))
    assert said == [(n, 8, 0.0 if n <= 4 else 0.5) for n in range(1, 9)]
    measures = {"steps_per_minute", "trainer_idle", "sampler_idle", "mean_age", "dropped"}
    assert set(found) == {
        f"{measure}@{mode},{latency}" for measure in measures for mode in MODES for latency in ("0", "0.5")
    }
    assert (
        found["mean_age@synchronous,0.5"]
        == found["dropped@synchronous,0.5"]
        == 0
        < found["mean_age@in-flight,0.5"]
        <= 2
    )
    pace = [found[f"steps_per_minute@{mode},0.5"] for mode in MODES]
    assert pace[0] < pace[1] < pace[3] and found["sampler_idle@in-flight,0.5"] < found["sampler_idle@synchronous,0.5"]
    assert not demo(Demo(latencies=(0.0,), steps=0))["steps_per_minute@synchronous,0"]


def test_loads_that_make_no_sense():
    for turns in ([], [(0, 0.0)], [(1, -1.0)]):
        with pytest.raises(ValueError, match="rollout 0 of group 0 must have turns"):
            simulate("in-flight", Rules(steps=1), Load(lambda group, rollout, turns=turns: turns))
    with pytest.raises(ValueError, match="each of the 4 workers must have a slot; got 3"):
        simulate("in-flight", Rules(steps=1), Load(even(1), slots=3, workers=4))


def test_weights_and_masks_by_hand():
    log_ratio = torch.tensor(
        [[0.0, math.log(3.0), math.log(0.5)], [math.log(4.0), math.log(4.0), -9.0]]
    ).requires_grad_()
    weights = truncated_ratios(log_ratio, cap=2.0)
    assert not weights.requires_grad and torch.allclose(weights[0], torch.tensor([1.0, 2.0, 0.5]))
    assert torch.allclose(truncated_ratios(log_ratio, math.inf)[0], torch.tensor([1.0, 3.0, 0.5]))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    # Geometric means: 1.5 ** (1/3), and 4.
    assert sequence_mask(log_ratio, mask, 0.5, 2.0).tolist() == [[True] * 3, [False] * 3]
    assert sequence_mask(log_ratio, mask, 0.5, 4.01).tolist() == mask.tolist()
    assert sequence_mask(log_ratio, mask, 0.5, 3.0).tolist() == [
        [True] * 3,
        [False] * 3,
    ]  # a mean over two tokens, not three
    assert sequence_mask(log_ratio, torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[False] * 3] * 2
    with pytest.raises(ValueError, match="cap must be positive"):
        truncated_ratios(log_ratio, 0.0)
    with pytest.raises(ValueError, match="0 ≤ low ≤ high"):
        sequence_mask(log_ratio, mask, 2.0, 1.0)


def gradients(theta, first, second, reward, cap=None):
    """Two tokens of three, the first drawn by weights `first`, the second by `second`: exact gradients at `theta`, by
    enumeration. On policy; with the product of ratios; with each token's own ratio, capped; with none."""
    theta = theta.clone().requires_grad_()

    def logp(w):
        return torch.log_softmax(w[:3], 0), torch.log_softmax(w[3:].view(3, 3), 1)

    (a, b), (behaviour_a, _), (_, behaviour_b) = logp(theta), logp(first), logp(second)
    joint = a[:, None] + b
    on_policy = torch.autograd.grad((joint.exp() * reward).sum(), theta, retain_graph=True)[0]
    mu = (behaviour_a[:, None] + behaviour_b).exp()
    baseline = (mu * reward).sum()
    ratio_a, ratio_b = (a - behaviour_a)[:, None].expand(3, 3), b - behaviour_b
    found = {"on policy": on_policy}
    for name, (w_a, w_b) in {
        "product": ((ratio_a + ratio_b).detach().exp(),) * 2,
        "token": tuple(truncated_ratios(ratio, cap or math.inf) for ratio in (ratio_a, ratio_b)),
        "none": (torch.ones(3, 3, dtype=theta.dtype),) * 2,
    }.items():
        surrogate = (mu * (reward - baseline) * (w_a * a[:, None] + w_b * b)).sum()
        found[name] = torch.autograd.grad(surrogate, theta, retain_graph=True)[0]
    return found


@given(st.integers(0, 2**32))
def test_only_the_product_of_ratios_is_exact(seed):
    g = torch.Generator().manual_seed(seed)
    theta, step = torch.randn(12, dtype=torch.float64, generator=g), torch.randn(12, dtype=torch.float64, generator=g)
    reward = torch.rand(3, 3, dtype=torch.float64, generator=g)
    far = gradients(theta, theta - 2 * 0.3 * step, theta - 0.3 * step, reward)
    assert torch.allclose(far["product"], far["on policy"], atol=1e-12)
    same = gradients(theta, theta, theta, reward, cap=2.0)
    assert all(torch.allclose(found, same["on policy"], atol=1e-12) for found in same.values())


def test_own_ratios_err_less_than_none():
    """Over 200 policies whose two tokens are two updates and one update old: the relative error of the gradient,
    paired."""
    gains = []
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        theta, step = (
            torch.randn(12, dtype=torch.float64, generator=g),
            0.2 * torch.randn(12, dtype=torch.float64, generator=g),
        )
        found = gradients(
            theta, theta - 2 * step, theta - step, torch.rand(3, 3, dtype=torch.float64, generator=g), cap=2.0
        )
        error = {
            name: float((one - found["on policy"]).norm() / found["on policy"].norm()) for name, one in found.items()
        }
        gains.append(error["none"] - error["token"])
    gain = torch.tensor(gains)
    assert gain.mean() > 4 * gain.std() / len(gain) ** 0.5
