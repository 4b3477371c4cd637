"""Parts of the services of asynchronous RL, each by itself and without processes: saved steps, records, stores that
fail, and work in a thread."""

import errno
import hashlib
import json
import threading
from dataclasses import replace

import pytest
import torch

from kit.disk import read_lines
from kit.settings import RunError
from ref import weight_sync
from ref.rollout import Rollout
from ref.self_summary import Chain, Segment
from ref.textual_feedback import Hint
from ref.transcript import Call, Todo, Transcript, Turn
from scaled.async_rl import services, worker
from scaled.async_rl.background import BackgroundThread
from scaled.async_rl.messages import Done
from scaled.async_rl.records import oldest, pack, unpack


class Weight:
    """A learner with one number."""

    def __init__(self, value: float = 0.0):
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.set(value)

    def set(self, value):
        with torch.no_grad():
            self.model.weight.fill_(value)

    def save(self):
        return repr(self.model.weight.item()).encode()

    def restore(self, data):
        self.set(float(data))


@pytest.fixture
def log(tmp_path):
    return services.Log(tmp_path, "trainer", 3)


class Clock:
    """In place of the module `time`: pauses are noted, and take no time."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (services, worker):
        monkeypatch.setattr(module, "time", made)
    return made


def facts(folder, what):
    return [line for line in read_lines(folder / "events" / "trainer.jsonl") if line["what"] == what]


# ---------------------------------------------------------------------------------------------- saved steps


def test_the_last_two_steps_stay_and_the_newest_whole_one_is_restored(tmp_path):
    for version in range(1, 6):
        services.keep(tmp_path, Weight(float(version)), version, (version, 10 + version))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000004.json",
        "000004.state",
        "000005.json",
        "000005.state",
    ]
    learner = Weight()
    assert services.restored(tmp_path, learner) == (5, (5, 15)) and learner.model.weight.item() == 5.0
    (tmp_path / "000005.state").write_bytes(b"7.0")  # other bytes than were written
    assert services.restored(tmp_path, learner) == (4, (4, 14)) and learner.model.weight.item() == 4.0
    (tmp_path / "000005.state").unlink()
    assert services.restored(tmp_path, learner) == (4, (4, 14))
    (tmp_path / "000004.json").write_text('{"version"')
    assert services.restored(tmp_path, Weight()) == (0, ())


# -------------------------------------------------------------------------------------------------- records


def segment(versions, sampled, finished=True):
    length = len(versions)
    flags = torch.tensor(sampled)
    experts = torch.zeros(length - 1, 1, 1, dtype=torch.int16)
    logp = torch.where(flags, -0.5, 0.0)
    return Segment(
        torch.arange(length),
        flags,
        logp,
        torch.tensor(versions),
        experts,
        finished,
        torch.zeros(length, dtype=torch.bool),
    )


def rollout(reward, *segments, finished=True):
    return Rollout(Chain(list(segments), finished, 4), {"tests": reward}, {"success": 1.0})


def test_ages_and_the_oldest_token_by_hand():
    """Tokens that somebody else wrote have version −1, and no age."""
    played = [rollout(0.1, segment([-1, 5, 3], [False, True, True])), rollout(0.2, segment([-1, 6], [False, True]))]
    failed = replace(rollout(0.0, segment([-1, 1], [False, True])), failure="the sandbox is gone")
    assert oldest([*played, failed], 7) == 3
    assert services.ages([*played, failed], 7) == {"age": pytest.approx((2 + 4 + 1) / 3), "oldest": 4.0, "tokens": 3.0}


def test_a_record_keeps_hints_and_transcripts():
    """Of some rollouts, where others have none; what an earlier version wrote has neither."""
    call = Call("write", "m3", "return 1\n", valid=False, ok=False, tests=(1, 3))
    transcript = Transcript((Turn("assistant", "done", (call, Call("read"))),), (Todo("look", "open"),), 1, 2, 3)
    rollouts = [replace(rollout(0.1), hints=[[], [Hint(2, (7, 8), 3, 5)]], transcript=transcript), rollout(0.2)]
    for group in (rollouts, rollouts[::-1], rollouts[1:]):
        assert [(one.hints, one.transcript) for one in unpack(pack(group))] == [
            ([*one.hints], one.transcript) for one in group
        ]


def test_groups_that_were_recorded_without_transcripts_are_not_watched():
    """As an earlier version recorded them; a rollout whose environment failed has none either, and is passed on."""
    rollouts = [replace(rollout(0.1), transcript=Transcript(tokens=n)) for n in range(2)]
    rollouts += [rollout(0.1), replace(rollout(0.1), failure="the sandbox is gone")]
    seen = []

    def look(step, numbers, step_rollouts):
        seen.append((step, numbers, step_rollouts))
        return {"watch_length": 1.0}

    assert services.watch_step(look, 3, range(4, 8), rollouts) == {"watch_length": 1.0}
    assert seen == [(3, [4, 5, 7], [rollouts[0], rollouts[1], rollouts[3]])]
    assert services.watch_step(None, 3, range(4, 8), rollouts) == {}


def test_a_record_tells_the_end_of_a_context_from_that_of_its_chain():
    """A context that a limit cut off within a chain that went on; a reward that float32 does not hold; an expert of
    which a byte is too small."""
    chained = rollout(0.1, segment([-1, 0], [False, True], finished=False), segment([-1, 0, 1], [False, True, True]))
    chained.chain.segments[1].experts[0] = 300
    (back,) = unpack(pack([chained]))
    assert (
        back.reward == 0.1 and back.metrics == {"success": 1.0} and (back.chain.finished, back.chain.saved) == (True, 4)
    )
    assert [(len(s.tokens), s.finished) for s in back.chain.segments] == [(2, False), (3, True)]
    assert back.chain.segments[1].experts.tolist() == [[[300]], [[0]]]


def test_a_record_is_the_one_that_was_announced_and_lies_nowhere_else():
    data = pack([rollout(1.0, segment([-1, 0], [False, True]))])
    digest, groups = hashlib.sha256(data).hexdigest(), {"000001-a-0": data, "../weights/x": data}
    assert [one.reward for one in services.read(groups, ["000001-a-0"], [digest])] == [1.0]
    with pytest.raises(ValueError, match="has changed since the worker wrote it"):
        services.read(groups, ["000001-a-0"], ["0" * 64])
    with pytest.raises(ValueError, match="is no record's name"):
        services.read(groups, ["../weights/x"], [digest])
    with pytest.raises(ValueError, match="the record 000002-a-0 of a group is gone from the store"):
        services.read(groups, ["000002-a-0"], [digest])


# ------------------------------------------------------------------------------------- a store that fails


def failing(times, error):
    """A call that fails so many times first; how often it was made."""
    made = []

    def call():
        made.append(1)
        if len(made) <= times:
            raise error
        return "there"

    return call, made


def test_pauses_grow_to_ten_seconds():
    assert [services.pause(n) for n in (1, 2, 3, 20)] == [0.2, 0.4, 0.8, 10.0]


def test_a_store_that_comes_back_is_asked_until_it_answers(clock, log, tmp_path):
    call, made = failing(3, ConnectionError("no route"))
    assert services.retry_store_call(call, "reading groups", log, 60.0) == "there" and len(made) == 4
    assert clock.pauses == [0.2, 0.4, 0.8]
    (line, *more) = facts(tmp_path, "waits for the store")
    assert len(more) == 2 and (line["doing"], line["why"], line["epoch"]) == ("reading groups", "no route", 3)


@pytest.mark.parametrize(
    ("error", "raised", "most"),
    [
        (OSError(errno.ENOSPC, "full"), OSError, 1),
        (OSError(errno.EDQUOT, "quota"), OSError, 1),
        (weight_sync.SyncError("another writer has published it, with other bits"), RunError, 1),
        (ConnectionError("no route"), RunError, 20),
        (ZeroDivisionError(), ZeroDivisionError, 1),
    ],
)
def test_what_waiting_does_not_mend_ends_the_run(clock, log, error, raised, most):
    call, made = failing(10**6, error)
    with pytest.raises(raised) as found:
        services.retry_store_call(call, "publishing", log, 30.0)
    assert len(made) <= most and "\n" not in str(found.value) and sum(clock.pauses) <= 45
    if most > 1:
        assert (
            "publishing failed for 30 seconds; the last error: no route" in str(found.value) and sum(clock.pauses) > 30
        )


def test_tries_of_a_worker(clock):
    """Its patience begins with the first failure in a row, and success begins anew."""
    tries = worker.RetryPolicy("loading", 10.0)
    assert tries.is_due
    for _ in range(3):
        tries.record_failure(OSError("down"))
        assert not tries.is_due
        clock.now = tries.next
        assert tries.is_due
    tries.record_success()
    clock.now += 100.0
    tries.record_failure(weight_sync.SyncError("gone"))  # the first of a new row
    clock.now += 10.5
    with pytest.raises(RunError, match="loading failed for 10 seconds; the last error: down"):
        tries.record_failure(OSError("down"))
    for error in (OSError(errno.ENOSPC, "full"), KeyError("x")):
        with pytest.raises(type(error)):
            worker.RetryPolicy("loading", 10.0).record_failure(error)


# --------------------------------------------------------------------------------------------- publishing


def test_a_version_is_visible_once_it_was_published_and_is_repaired_whole(log, tmp_path):
    store, learner, seen = {}, Weight(1.0), []
    publisher = services.Publisher(store, learner, log, 60.0)
    assert publisher.visible == -1
    publisher.publish(0)
    learner.set(2.0)
    gate = threading.Event()
    publisher.background.send(gate.wait)  # the background thread is busy until the next step has changed the weights
    publisher.start(1, lambda: seen.append(publisher.visible))
    learner.set(3.0)  # the next step goes on with the same tensors
    gate.set()
    publisher.wait()
    assert seen == [1] == [publisher.visible]
    served = torch.zeros(1, 1).bfloat16()
    (part,) = weight_sync.parts(learner.model)
    reader = weight_sync.Reader(store, [weight_sync.Part(part.name, (1, 1), 0, served)])
    assert reader.fetch() == 1 and reader.swap() == 1 and served.item() == 2.0
    for key in [key for key in store if "anchor" in key or "delta" in key]:
        store[key] = b""
    learner.set(2.0)
    publisher.publish(1, anew=True)
    late = weight_sync.Reader(store, [weight_sync.Part(part.name, (1, 1), 0, served.zero_())])
    assert late.fetch() == 1 and late.swap() == 1 and served.item() == 2.0
    assert [line["version"] for line in facts(tmp_path, "repaired")] == [1]


def test_what_fails_in_the_background_is_raised_later(log):
    class Down(dict):
        def setdefault(self, key, default=None):
            raise OSError("no route")

    publisher = services.Publisher(Down(), Weight(), log, 0.0)
    publisher.start(0)
    with pytest.raises(RunError, match="publishing version 0 failed for 0 seconds; the last error: .* no route"):
        publisher.wait()
    assert publisher.visible == -1
    publisher.check()  # it is raised once


# ---------------------------------------------------------------------------------------- a worker's groups


def done(group, oldest=0):
    return Done("a", 0, group, oldest, f"{group}", "d")


def until_stored(groups, most=1000):
    for _ in range(most):
        stored, wrong = groups.stored()
        if stored or wrong:
            return [one.done.group for one in stored], wrong
        for one in groups.storing.values():
            if one.errand is not None:
                one.errand.done.wait(10)
    raise AssertionError("nothing is stored")


def test_a_group_is_done_once_it_lies_in_the_store():
    store = {}
    groups = worker.Groups(store, 60.0)
    groups.since = {1: 4, 2: 5}
    groups.storing[1] = worker.Storing(done(1, 3), b"one", 9)
    assert groups.oldest() == {1: 3, 2: 5}  # of a finished group that of its own tokens
    assert until_stored(groups) == ([1], None) and store == {"1": b"one"} and not groups.storing
    assert groups.done == {1: done(1, 3)} and groups.oldest() == {1: 3, 2: 5}
    assert groups.stored() == ([], None)
    groups.drop((1, 2, 7))
    assert groups.oldest() == {}


def test_a_group_that_cannot_be_stored_is_kept_and_stored_later(clock):
    class Flaky(dict):
        down = True

        def __setitem__(self, key, value):
            if self.down:
                raise OSError("no route")
            super().__setitem__(key, value)

    groups = worker.Groups(Flaky(), 60.0)
    groups.storing[1] = worker.Storing(done(1), b"one", 9)
    stored, wrong = until_stored(groups)
    assert stored == [] and str(wrong) == "no route" and 1 in groups.storing and not groups.done
    assert groups.stored() == ([], None) and groups.storing[1].errand is None  # after a pause
    groups.store.down, clock.now = False, groups.tries.next
    assert until_stored(groups) == ([1], None) and groups.store == {"1": b"one"}


def test_the_last_groups_are_said_again_and_no_more(monkeypatch):
    monkeypatch.setattr(worker, "MOST_DONE", 2)
    groups = worker.Groups({}, 60.0)
    for group in range(4):
        groups.storing[group] = worker.Storing(done(group), b"x", 1)
        until_stored(groups)
    assert [*groups.done] == [2, 3]


class Follows:
    """An engine whose weights can be built once the store is up."""

    def __init__(self):
        self.up, self.asked, self.forgot = False, [], 0

    def fetch(self, want):
        self.asked.append(want)
        if not self.up:
            raise weight_sync.SyncError("gone")

    def anew(self):
        self.forgot += 1

    def swap(self):
        return {"version": self.asked[-1]}


def go_on(weights):
    if weights.errand is not None:
        weights.errand.done.wait(10)
    return weights.go_on()


def test_a_version_that_cannot_be_built_is_tried_again_later_and_from_the_store(clock):
    weights = worker.Weights(follows := Follows(), 60.0)
    assert go_on(weights) is False and not follows.asked  # nothing is wanted
    weights.wanted_version = 3
    assert go_on(weights) is False  # it is begun
    assert "gone" in str(go_on(weights)) and (weights.errand, follows.forgot) == (None, 1)
    for _ in range(3):
        assert go_on(weights) is False and weights.errand is None  # not yet
    clock.now, follows.up, weights.wanted_version = weights.tries.next, True, 4
    assert go_on(weights) is False and go_on(weights) is True and follows.asked == [3, 4]
    found = weights.swap()
    assert (
        found["version"] == weights.served_version == 4
        and weights.errand is None
        and {"fetch_s", "pause_s"} < found.keys()
    )
    assert go_on(weights) is False and weights.errand is None and follows.asked == [3, 4]


# ------------------------------------------------------------------------------------------------- threads


def test_errands_are_done_in_their_order_by_one_thread_and_an_error_is_kept():
    beside, order, threads = BackgroundThread(), [], set()

    def call(number):
        threads.add(threading.current_thread())  # not its number, which the next thread may have
        order.append(number)
        if number == 1:
            raise ValueError("no")

    errands = [beside.send(lambda number=number: call(number)) for number in range(3)]
    for errand in errands:
        assert errand.done.wait(10)
    assert order == [0, 1, 2] and len(threads) == 1 and threading.current_thread() not in threads
    assert [type(errand.error) for errand in errands] == [type(None), ValueError, type(None)]
    assert all(errand.seconds >= 0 for errand in errands)


def test_a_log_is_a_line_each_with_its_epoch(log, tmp_path):
    log("start", version=2)
    (line,) = [json.loads(text) for text in (tmp_path / "events" / "trainer.jsonl").read_text().splitlines()]
    assert (line["what"], line["version"], line["epoch"]) == ("start", 2, 3) and line["at"] > 1e9
