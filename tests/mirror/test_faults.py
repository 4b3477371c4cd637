"""Faults of asynchronous RL, and what they must do. Each row is played with the real processes, or, where processes add
nothing, with the functions.

| fault | what must be | test |
|---|---|---|
| a worker is killed in a rollout | its groups go on elsewhere; none is trained on twice | \
`test_a_kill_at_any_place[worker: …]`, `test_async_rl.py` |
| all workers are dead | the trainer's log says so within one timeout | \
`test_the_trainer_notices_that_nobody_works`, `test_places.py` |
| the trainer is killed around a commit | it goes on from its last step | `test_a_kill_at_any_place[trainer: …]` |
| the reconciler is killed | the journal is replayed; the bound holds | \
`test_a_kill_at_any_place[reconciler: …]`, `test_reconciler.py` |
| a delta is damaged, cut or missing | the old weights serve; an anchor comes | \
`test_a_delta_that_cannot_be_read`, `tests/ref/test_weight_sync.py` |
| a version is pruned | behind every reader only; a new one takes an anchor | `test_pruning_waits_for_every_reader` |
| versions come out of order | the newest is served | `test_versions_out_of_order` |
| a worker is killed while it applies | its successor has the right weights | \
`test_a_kill_at_any_place[worker: in the middle of a swap]` |
| the store is down | sampling to the bound on age, then waiting | \
`test_the_store_is_down`, `test_the_whole_store_is_down`, `test_store_s3.py` |
| the store stays down | tries are bounded; one clear line | `test_a_store_that_stays_down_ends_the_run` |
| a tool takes too long | it is tried again, then its rollout has failed; others stay the same | \
`test_a_slow_tool_fails_its_rollout_only` |
| a task never comes | its worker is killed; its group is dropped | `test_a_task_that_hangs`, `test_places.py` |
| a disk is full | one clear line; the step before it is whole; the run goes on later | `test_a_full_disk` |
| a zombie comes back | its epoch is over | `test_a_zombie_is_refused` |
| a worker is replaced | no work before it holds weights | \
`check`, after every test; `test_a_standby_takes_the_place_of_a_worker` |
| the last step | everybody ends by itself | `test_the_last_step_ends_clean` |
| an update during a forward pass | weights change between two steps only | `test_weights_change_between_steps_only` |

After each the journal is audited, and replaying it gives the weights that the trainer has, to the bit.
"""

import errno
import itertools
import os
import signal
import threading
import time

import pytest
import torch

from kit.disk import read_lines
from kit.settings import RunError
from ref import weight_sync
from ref.async_rl import Rules
from ref.engine.continuous import Continuous
from ref.engine.sampler import Sampler
from scaled.async_rl import services
from scaled.async_rl.evaluator import read_measurements
from scaled.async_rl.local import Plan, play
from scaled.async_rl.messages import Done, Hello, Loaded, Published, Ready, Refused, decode, encode
from scaled.async_rl.player import Player
from scaled.async_rl.wire import ConnectionLost, Line, meeting_place
from scaled.async_rl.worker import Own, Weights
from scaled.runtime.store import open_store
from tests.mirror.async_parts import Tiny, measure
from tests.mirror.fault_parts import FAULTS, Faulty
from tests.mirror.test_async_rl import events, trained
from tests.mirror.test_player import Quiz, setup
from tests.mirror.test_player import play as play_out
from tests.ref.test_async_rl import audit
from tests.ref.test_continuous import MODELS

RULES = Rules(4, 2, 4)


def log(folder, name):
    return read_lines(folder / "events" / f"{name}.jsonl")


def facts(folder, name, what):
    return [line for line in log(folder, name) if line["what"] == what]


def check(folder, rules, parts, store=""):
    """What must be after every run that has come to its end. Returns how many processes died."""
    mine, again, version, groups = trained(folder, parts, store)
    assert version == rules.steps and all(a.equal(b) for a, b in zip(mine, again, strict=True))
    counts, _ = audit(rules, events(folder))
    assert counts["trained"] == rules.groups * rules.steps and set(counts) <= {"trained", "dropped"}
    trainings = [event.groups for event in events(folder) if event.kind == "train"]
    assert trainings[-1] == groups and len(set(itertools.chain(*trainings))) == rules.groups * rules.steps
    died = 0
    for path in (folder / "events").iterdir():
        lines = read_lines(path)
        died += max(line["epoch"] for line in lines)
        if path.stem not in ("trainer", "evaluator"):
            for _, of_epoch in itertools.groupby(lines, lambda line: line["epoch"]):
                whats = [line["what"] for line in of_epoch]
                assert "work" not in whats or "load" in whats[: whats.index("work")]  # no work before it holds weights
    return died


def plan_of(folder, parts, rules=RULES, workers=2, **more):
    return Plan(folder, rules, parts, workers, **{"slots": 6, "rollouts": 2, "timeout": 30.0, **more})


PLACES = [name for name in FAULTS if name.partition(":")[0] in ("trainer", "reconciler", "worker")]
QUICK = (
    "trainer: between shard and manifest",
    "reconciler: before the line of a step",
    "worker: in the middle of a swap",
)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in QUICK else pytest.mark.faults) for name in PLACES]
)
def test_a_kill_at_any_place(tmp_path, fault):
    parts = Faulty(seconds=0.02, steps=4, fault=fault, mark=str(tmp_path / "struck"))
    play(plan_of(tmp_path, parts))
    assert (tmp_path / "struck").exists()
    died = check(tmp_path, RULES, Tiny(steps=4))
    assert died == (0 if fault.startswith("reconciler") else 1)  # the reconciler keeps no log of events


@pytest.mark.parametrize(
    "fault",
    [
        "delta: a byte is flipped",
        *(pytest.param(f"delta: it is {x}", marks=pytest.mark.faults) for x in ("cut", "missing")),
    ],
)
def test_a_delta_that_cannot_be_read(tmp_path, fault):
    """The workers go on with what they have, and the trainer publishes a version anew, whole. Nobody dies of it."""
    rules = Rules(4, 2, 7)  # long enough for what the workers have to become too old
    parts = Faulty(seconds=0.02, steps=7, fault=fault, mark=str(tmp_path / "struck"))
    play(plan_of(tmp_path, parts, rules))
    assert (tmp_path / "struck").exists() and check(tmp_path, rules, Tiny(steps=7)) == 0
    why = [line["why"] for name in ("worker-0", "worker-1") for line in facts(tmp_path, name, "unsynced")]
    assert any(("is missing" if "missing" in fault else "is damaged") in said for said in why)
    assert facts(tmp_path, "trainer", "repaired")


@pytest.mark.faults
def test_pruning_waits_for_every_reader(tmp_path):
    rules, alive = Rules(4, 2, 9), {}

    def kill(step, figures):
        if step == 7:
            alive["worker-0"].kill()

    play(plan_of(tmp_path, Faulty(seconds=0.02, steps=9, fault="often"), rules), kill, alive.__setitem__)
    assert check(tmp_path, rules, Tiny(steps=9)) == 1
    assert sum(line["versions"] for line in facts(tmp_path, "trainer", "pruned")) > 0
    left = {int(key.partition("/")[0]) for key in services.open_stores(str(tmp_path)).weights if key[0].isdigit()}
    assert min(left) % 3 == 0 and 0 < min(left) <= max(left) == 9
    first = next(line for line in log(tmp_path, "worker-0") if line["what"] == "load" and line["epoch"] == 1)
    assert first["version"] >= 7


def changed(version):
    """A network whose weights depend on the version."""
    torch.manual_seed(version)
    model = type(MODELS[0])(MODELS[0].config).bfloat16()
    return model.requires_grad_(False)


def test_versions_out_of_order():
    """News of versions 2, 1 and 0 come in this order: version 2 is served. One that the store does not hold is tried
    again, later."""
    store = {}
    writer = weight_sync.Writer(store)
    for version in range(3):
        writer.publish(version, weight_sync.parts(changed(version)))
    sampler = Sampler(changed(9), torch.bfloat16)
    weights = Weights(Own(store, "one", Continuous(sampler, 2, 9)), 60.0)
    for version in (2, 1, 0):
        weights.wanted_version = max(weights.wanted_version, version)
        while weights.go_on() is not True and sampler.version < weights.wanted_version:
            time.sleep(0.001)
        if sampler.version < weights.wanted_version:
            weights.swap()
    assert sampler.version == 2 and all(
        a.equal(b) for a, b in zip(sampler.model.parameters(), changed(2).parameters(), strict=True)
    )
    weights.wanted_version = 5
    came = False
    while came is False:
        came = weights.go_on()
    assert (
        "version 5 is not in the store" in str(came)
        and weights.tries.failures == 1
        and not weights.tries.is_due
        and sampler.version == 2
    )


def test_weights_change_between_steps_only():
    """A version that is built in the middle of a step changes nothing before it is put in place between two of them."""
    store = {}
    weight_sync.Writer(store).publish(1, weight_sync.parts(changed(1)))
    sampler = Sampler(changed(0), torch.bfloat16)
    weights = Weights(Own(store, "one", Continuous(sampler, 2, 9)), 60.0)
    weights.wanted_version = 1
    assert weights.go_on() is False and weights.errand is not None
    assert weights.errand.done.wait(60)
    assert (
        all(a.equal(b) for a, b in zip(sampler.model.parameters(), changed(0).parameters(), strict=True))
        and sampler.version == -1
    )
    assert weights.go_on() is True and weights.swap()["version"] == 1
    assert (
        all(a.equal(b) for a, b in zip(sampler.model.parameters(), changed(1).parameters(), strict=True))
        and sampler.version == 1
    )


@pytest.mark.faults
def test_no_worker_sees_weights_that_change_in_a_step(tmp_path):
    play(plan_of(tmp_path, Faulty(seconds=0.02, steps=4, fault="watched")))
    assert check(tmp_path, RULES, Tiny(steps=4)) == 0 and len(facts(tmp_path, "worker-0", "load")) > 1


def lift(mark, enough):
    """Brings the store back when there is enough to see, in a thread."""

    def end():
        until = time.monotonic() + 120
        while time.monotonic() < until and not (mark.exists() and enough()):
            time.sleep(0.05)
        mark.unlink(missing_ok=True)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    return thread


def test_the_store_is_down(tmp_path):
    """For versions: the trainer takes one step beside the version that it cannot publish, and waits; workers start
    groups up to the bound on age and no more, and nobody dies. When the store answers again, the run goes on."""
    rules, mark, seen, bound = Rules(4, 2, 6), tmp_path / "down", [], (2 + 2 + 1) * 4

    def enough():
        seen.append(sum(event.kind == "start" for event in events(tmp_path)))
        return seen[-1] == bound and len(facts(tmp_path, "trainer", "waits for the store")) > 1

    thread = lift(mark, enough)
    play(
        plan_of(
            tmp_path, Faulty(seconds=0.02, steps=6, fault="versions cannot be stored", mark=str(mark)), rules, slots=16
        )
    )
    thread.join()
    assert check(tmp_path, rules, Tiny(steps=6)) == 0
    waits = facts(tmp_path, "trainer", "waits for the store")
    assert (
        seen[-1] == bound
        and "the store is down" in waits[0]["why"]
        and {line["doing"] for line in waits} == {"publishing version 2"}
    )


def test_no_step_waits_for_the_store(tmp_path):
    """It takes a version only after the next step has begun, so a trainer that waited for it would wait forever."""
    play(plan_of(tmp_path, Faulty(seconds=0.02, steps=4, fault="the store is slow", mark=str(tmp_path / "none"))))
    assert check(tmp_path, RULES, Tiny(steps=4)) == 0
    told = [
        (line["what"], line["version"])
        for line in log(tmp_path, "trainer")
        if line["what"] in ("train", "publishing", "published")
    ]
    for version in (1, 2, 3):
        assert told.index(("publishing", version)) < told.index(("train", version)) < told.index(("published", version))


@pytest.mark.faults
def test_the_whole_store_is_down(tmp_path):
    """Finished groups wait in their workers."""
    mark, workers = tmp_path / "down", ("worker-0", "worker-1")
    thread = lift(mark, lambda: any(facts(tmp_path, name, "unstored") for name in workers))
    play(plan_of(tmp_path, Faulty(seconds=0.02, steps=4, fault="the store is down", mark=str(mark))))
    thread.join()
    assert check(tmp_path, RULES, Tiny(steps=4)) == 0 and any(facts(tmp_path, name, "unstored") for name in workers)


def test_a_store_that_stays_down_ends_the_run(tmp_path):
    """With one line; later the run goes on."""
    mark = tmp_path / "down"
    parts = Faulty(seconds=0.02, steps=4, fault="the store is down", mark=str(mark))
    with pytest.raises(RunError, match="failed for 1 seconds; the last error: .*the store is down"):
        play(plan_of(tmp_path, parts, store_patience=1.0))
    mark.unlink()
    play(plan_of(tmp_path, parts))
    check(tmp_path, RULES, Tiny(steps=4))


def test_a_slow_tool_fails_its_rollout_only():
    """The environment of rollout 1 of group 0 does not answer its first turn, whenever it is tried."""
    found = []
    for quiz in (Quiz(), Quiz(bad=1, times=99)):
        player = Player(Sampler(MODELS[0], torch.float64), setup(quiz, seconds=0.5), 4, 2, 3)
        player.give([0, 1, 2])
        found.append(play_out(player))
    assert player.failures == 2
    for group, number in itertools.product(range(3), range(2)):
        a, b = (one[group][number] for one in found)
        if (group, number) == (0, 1):
            assert (
                b.failure == "the environment did not answer in 0.5 seconds"
                and not b.chain.segments
                and not b.terms
                and not a.failure
            )
        else:
            assert all(x.tokens.equal(y.tokens) for x, y in zip(a.chain.segments, b.chain.segments, strict=True))
            assert (a.terms, a.metrics) == (b.terms, b.metrics)


@pytest.mark.faults
def test_a_task_that_hangs(tmp_path):
    """Its worker, whoever that is, is given up and killed. Its group is dropped, when it is too old or was lost three
    times; as many others as the steps need are trained on."""
    play(plan_of(tmp_path, Faulty(seconds=0.02, steps=4, fault="a task hangs", mark=str(tmp_path / "x")), timeout=2.0))
    assert check(tmp_path, RULES, Tiny(steps=4)) >= 1
    assert (2,) in [event.groups for event in events(tmp_path) if event.kind == "drop"]


def test_a_full_disk(tmp_path):
    """The trainer cannot save version 3: the run ends with the operating system's words, version 2 is whole, and with
    room it goes on."""
    parts = Faulty(seconds=0.02, steps=4, fault="disk full", mark=str(tmp_path / "struck"))
    with pytest.raises(OSError) as left:
        play(plan_of(tmp_path, parts))
    assert left.value.errno == errno.EFBIG
    learner = Tiny(steps=4).learner()
    assert services.restored(tmp_path / "trainer", learner)[0] == 2 and not list((tmp_path / "trainer").glob(".tmp-*"))
    play(plan_of(tmp_path, parts))
    check(tmp_path, RULES, Tiny(steps=4))


def test_a_zombie_is_refused(tmp_path):
    """A worker that was taken for dead wakes up when its successor plays its groups; and a reconciler with nobody to
    talk to ends with its thread."""
    rules = Rules(1, 0, 1)
    with meeting_place() as at:
        thread = threading.Thread(target=services.reconcile, args=(tmp_path, at, rules, ["a"], 20.0))
        thread.start()
        old, new, trainer = (Line.to(at, 5.0) for _ in range(3))
        old.say(encode(Hello("a", 0, 1, 0)))
        new.say(encode(Hello("a", 1, 1, 0)))
        trainer.say(encode(Ready("trainer", 0, 0)))
        trainer.say(encode(Published("trainer", 0, 0)))
        heard = wait_for(new, "Update")
        old.say(encode(Done("a", 0, 0, 0, "key", "digest")))
        refused = wait_for(old, "Refused")
        assert isinstance(refused, Refused) and "epoch 0 of a is over: 1 has begun" in refused.reason and heard
        assert [event.kind for event in events(tmp_path)] == ["start"]
        new.say(encode(Loaded("a", 1, 0)))
        new.say(encode(Done("a", 1, 0, 0, "key", "digest")))
        wait_for(trainer, "Batch")
        trainer.say(encode(Published("trainer", 0, 1)))
        trainer.say(encode(Ready("trainer", 0, 1, (0,))))
        wait_for(trainer, "Stop")
        for line in (old, new, trainer):
            line.close()
        thread.join(20.0)
        assert not thread.is_alive()
    counts, _ = audit(rules, events(tmp_path))
    assert counts == {"trained": 1}


def wait_for(line, kind):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            for data in line.receive(0.5):
                if type(decode(data)).__name__ == kind:
                    return decode(data)
        except ConnectionLost:
            break
    raise AssertionError(f"no {kind} came")


def test_the_trainer_notices_that_nobody_works(tmp_path):
    """All workers freeze. The reconciler gives them up, tells the trainer, and has them killed; others take their
    places. And the run has a store of its own, elsewhere."""
    rules, alive, store = Rules(4, 2, 4), {}, tmp_path / "elsewhere"

    def freeze(step, figures):
        if step == 1:
            for name in ("worker-0", "worker-1"):
                os.kill(alive[name].pid, signal.SIGSTOP)

    folder = tmp_path / "run"
    play(plan_of(folder, Tiny(seconds=0.02, steps=4), rules, timeout=5.0, store=str(store)), freeze, alive.__setitem__)
    assert check(folder, rules, Tiny(steps=4), str(store)) >= 2
    told = [line["alive"] for line in facts(folder, "trainer", "workers")]
    assert told[0] == 0 and told[1] > 0
    assert not (folder / "weights").exists() and not (folder / "groups").exists() and (store / "weights").is_dir()
    with pytest.raises(RunError, match="holds another run"):
        play(plan_of(tmp_path / "other", Tiny(), store=str(store)))


def test_the_last_step_ends_clean(tmp_path):
    """Nobody is killed, nobody waits for a version that never comes, and the evaluator, which can never end its
    measurement, holds nobody up."""
    processes = {}
    parts = Faulty(seconds=0.02, steps=4, fault="measuring never ends", mark=str(tmp_path / "struck"))
    play(plan_of(tmp_path, parts, evaluate_every=1, standby=1), started=processes.__setitem__)
    assert check(tmp_path, RULES, Tiny(steps=4)) == 0
    assert {name: process.exitcode for name, process in processes.items() if name != "evaluator"} == dict.fromkeys(
        ("reconciler", "trainer", "worker-0", "worker-1", "standby-0"), 0
    )
    assert all(log(tmp_path, name)[-1]["what"] == "stop" for name in ("trainer", "worker-0", "worker-1", "standby-0"))
    assert [line["what"] for line in log(tmp_path, "evaluator")] == ["start", "load"] and read_measurements(
        tmp_path
    ) == []


def test_a_standby_takes_the_place_of_a_worker(tmp_path):
    """It plays nothing before; then it has weights at once, and plays the groups of the one that was killed."""
    parts = Faulty(seconds=0.02, steps=4, fault="a standby is needed", mark=str(tmp_path / "struck"))
    play(plan_of(tmp_path, parts, standby=1))
    assert check(tmp_path, RULES, Tiny(steps=4)) == 1
    struck = (tmp_path / "struck").stat().st_mtime
    work = facts(tmp_path, "standby-0", "work")
    assert work and min(line["at"] for line in work) >= struck - 0.01
    assert {line["epoch"] for line in log(tmp_path, "standby-0")} == {0} and facts(tmp_path, "standby-0", "load")[0][
        "at"
    ] < struck + 0.01
    journal = read_lines(tmp_path / "journal.jsonl")
    played = {line["groups"][0] for line in journal if "standby-0" in line.get("key", "")}
    begun = [line["groups"][0] for line in journal if line["kind"] == "start"]
    assert played and len(begun) == len(set(begun))


def test_the_evaluator_follows_and_comes_back_when_it_dies(tmp_path):
    """Each value is that of the version's weights; none is measured twice, nor by the trainer's clock."""
    parts = Faulty(seconds=0.02, steps=5, fault="the evaluator dies", mark=str(tmp_path / "struck"))
    rules = Rules(4, 2, 5)
    play(plan_of(tmp_path, parts, rules, evaluate_every=2))
    assert check(tmp_path, rules, Tiny(steps=5)) <= 1 and (tmp_path / "struck").exists()
    found = read_measurements(tmp_path)
    versions = [line["version"] for line in found]
    assert (
        versions[0] in (0, 2)
        and 2 in versions
        and versions == sorted(set(versions))
        and all(version % 2 == 0 for version in versions)
    )
    sampler = Tiny().sampler()
    reader = weight_sync.Reader(services.open_stores(str(tmp_path)).weights, weight_sync.parts(sampler.model))
    for line in found:
        reader.fetch(line["version"])
        reader.swap()
        assert line["success"] == pytest.approx(measure(sampler)) and line["seconds"] >= 0


def test_weights_and_groups_through_a_store_of_fsspec(tmp_path):
    """memory:// is one process's own, so the functions are called in this one."""
    stores = services.open_stores("memory://faults/run")
    learner = Tiny().learner()
    publisher = services.Publisher(stores.weights, learner, services.Log(tmp_path, "trainer", 0), 5.0)
    publisher.publish(0)
    sampler = Tiny().sampler()
    weights = Weights(Own(services.open_stores("memory://faults/run/").weights, "one", Continuous(sampler, 4, 9)), 5.0)
    weights.wanted_version = 0
    while weights.go_on() is not True:
        time.sleep(0.001)
    weights.swap()
    assert all(a.equal(b) for a, b in zip(sampler.model.parameters(), learner.model.parameters(), strict=True))
    publisher.publish(0, anew=True)
    assert (
        facts(tmp_path, "trainer", "repaired") and list(open_store("memory://faults/run/weights"))[-1] == "readers/one"
    )
    with pytest.raises(ValueError, match="memory://faults is one process's own"):
        plan_of(tmp_path, Tiny(), store="memory://faults")
    with pytest.raises(RunError, match="the store nothing://there cannot be opened"):
        play(plan_of(tmp_path, Tiny(), store="nothing://there"))
