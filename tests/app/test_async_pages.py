"""Pages of asynchronous RL and of weight sync: every control, what they show against `ref`, and a real run's folder,
whole and broken."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.explorer.drawing import Look
from etude.explorer.pages import async_rl, async_strips, weight_chain, weight_sync
from kit.disk import atomic_write
from kit.settings import RunError
from recipe.asynchronous import timeline
from ref import async_rl as ref_async
from ref import weight_sync as ref_sync
from ref.rollout import Rollout
from ref.self_summary import Chain, Segment
from scaled.async_rl.records import pack


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Where no run lies."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["async-rl", "weight-sync"])
def test_every_control_goes_to_both_ends(page, drive, name):
    at = page(name)
    before = dict(at.query_params)
    assert drive(at) > 20 and not at.error
    after = dict(at.query_params)
    moved = {key: after.pop(key) for key in after.keys() - before.keys()}
    assert after == before, "every control is back where it began, and the URL with it"
    clocks = [key for key in moved if key.startswith("async-clock-")]
    assert [*moved] == clocks and len(clocks) == (name == "async-rl"), (
        "only the clock has moved on: its button comes last"
    )


@pytest.mark.parametrize(
    ("name", "kind", "key", "value", "least", "most"),
    [
        ("async-rl", "slider", "staleness", 3, 2, 2),
        ("async-rl", "slider", "step-time", 2.5, 2, 2),
        ("weight-sync", "select_slider", "lr", 3e-5, 4, 4),
        ("weight-sync", "slider", "behind", 7, 2, 2),
        ("weight-sync", "slider", "newest", 27, 2, 2),
    ],
)
def test_a_control_draws_what_it_changes_and_nothing_else(page, redrawn, name, kind, key, value, least, most):
    at = page(name)
    assert least <= redrawn(at, getattr(at, kind)(key=key), value) <= most


# ------------------------------------------------------------------------------------------- asynchronous RL


def test_the_table_says_what_the_simulator_says(page, table):
    at = page(
        "async-rl",
        **{
            "tail": "0.5",
            "latency": "0.5",
            "staleness": "3",
            "groups": "2",
            "per-group": "3",
            "slots": "8",
            "step-time": "0.4",
        },
    )
    shown = table(at, "steps per minute").set_index("run")
    assert list(shown.index) == list(async_rl.MODES)
    for mode in async_rl.MODES:
        load = ref_async.Load(
            ref_async.heavy_tailed(0.5, sigma=0.5),
            rollouts=3,
            slots=8,
            token_s=async_rl.token_s,
            train_s=0.4,
            publish_s=0.0,
        )
        out = ref_async.simulate(mode, ref_async.Rules(2, 3, async_rl.STEPS), load)
        row = shown.loc[mode]
        assert row["steps per minute"] == pytest.approx(60 * async_rl.STEPS / out.seconds)
        assert row["trainer idle"] == pytest.approx(out.trainer_idle) and row["workers idle"] == pytest.approx(
            out.sampler_idle
        )
        assert (
            row["mean age"] == pytest.approx(out.mean_age)
            and row["dropped groups"] == out.dropped
            and row["oldest"] == max(out.token_ages)
        )


def test_one_way_alone(page, table):
    shown = table(page("async-rl", mode="in-flight"), "steps per minute")
    assert shown["run"].tolist() == ["in-flight"]


def test_what_to_look_for_is_so():
    """At the page's own settings and with slower tools; without tools; with a tail."""

    def of(mode, latency, sigma=1.0):
        return async_rl.simulated(mode, 2, latency, sigma, 32, 4, 4, 1.0, 0.0)

    slow, fast = of("synchronous", 1.0), of("in-flight", 1.0)
    assert slow.trainer_idle > 0.5 and fast.steps_per_minute > 1.5 * slow.steps_per_minute
    assert of("in-flight", 0.0).steps_per_minute < 1.05 * of("one-step-off", 0.0).steps_per_minute
    assert of("in-flight", 0.2, 0.0).dropped < of("in-flight", 0.2, 1.0).dropped < of("in-flight", 0.2, 2.0).dropped


def test_slots_are_all_there_and_versions_go_on():
    """At any moment a worker's slots decode, wait or are free; the versions that it holds rise; the picture's rows are
    those."""
    one = async_rl.simulated("in-flight", 2, 0.2, 1.0, 10, 3, 4, 0.5, 0.1)
    assert list(one.slots) == ["worker 0"]
    for who, lines in one.slots.items():
        assert all(sum(line[1:]) == 10 for line in lines) and [line[0] for line in lines] == sorted(
            line[0] for line in lines
        )
        versions = [version for _, version in one.version_changes[who]]
        assert versions == sorted(set(versions)) and versions[0] == 0
    assert [version for *_, version in one.steps] == list(range(1, async_rl.STEPS + 1))
    found = timeline.rows([one])
    assert sum(row["what"] == "step" for row in found) == async_rl.STEPS
    assert {row["version"] for row in found if row["what"] == "holds"} >= {0, async_rl.STEPS - 1}


def boxes(drawn):
    """All rectangles of a chart, by whether they are states of slots."""
    rows = [row for layer in drawn.layers if layer.kind == "box" for row in layer.rows]
    return [row for row in rows if "state" in row], [row for row in rows if "state" not in row]


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.0, 1.0))
def test_the_clock_cuts_the_time_and_nothing_else(share):
    """Until any time the strips are those of the whole run, cut there; slots fill their strip without gap or
    overlap."""
    both = [async_rl.simulated(mode, 2, 0.2, 1.0, 10, 3, 4, 0.5, 0.1) for mode in ("synchronous", "in-flight")]
    longest = max(one.seconds for one in both)
    shares, versions = boxes(async_strips.strips(both, longest))
    until = share * longest
    some, made = boxes(async_strips.strips(both, until))
    assert [row for row in shares if row["to"] <= until] == [row for row in some if row["to"] <= until]
    assert sorted(row["version"] for row in made) == sorted(row["version"] for row in versions if row["from"] < until)
    assert all(row["from"] < row["until"] <= until for row in [*some, *made])
    for run in {row["run"] for row in some}:
        mine = [row for row in some if row["run"] == run]
        area = sum((row["until"] - row["from"]) * (row["high"] - row["low"]) for row in mine)
        begin, end = min(row["from"] for row in mine), max(row["until"] for row in mine)
        assert area == pytest.approx(end - begin), "the strip is one unit high"


def test_a_version_has_one_colour_and_each_step_is_a_box():
    one = async_rl.simulated("in-flight", 2, 0.2, 1.0, 10, 3, 4, 0.5, 0.1)
    drawn = async_strips.strips([one], one.seconds)
    for layer in drawn.layers:
        if layer.kind == "box" and layer.by is None:
            assert {timeline.colour(row["version"]) for row in layer.rows} == {layer.look.hex}
    steps = sorted((row["from"], row["to"], row["version"]) for row in boxes(drawn)[1] if row["what"] == "step")
    assert steps == one.steps
    numbers = {row["number"] for layer in drawn.layers if layer.kind == "text" for row in layer.rows}
    assert numbers <= {str(version) for *_, version in one.steps} and len(numbers) > 4


def test_buttons_move_the_clock_to_the_end_of_each_step(page, whole, plays):
    at = page("async-rl", mode="in-flight")
    one = async_rl.simulated("in-flight", 2, 0.2, 1.0, 32, 4, 4, 1.0, 0.0)

    def clock():
        return next(slider for slider in at.slider if "-clock-" in slider.key)

    def done():
        drawn = async_strips.strips([one], clock().value)
        return sum(row["what"] == "step" and row["until"] == row["to"] for row in boxes(drawn)[1])

    assert clock().value == clock().max and done() == async_rl.STEPS
    seen = []
    for _ in range(3):
        at.button(key=f"{clock().key}-next").click()
        whole(at.run())
        seen.append((done(), clock().value))
    assert [steps for steps, _ in seen] == [1, 2, 3] and all(
        steps[1] <= at_ for steps, (_, at_) in zip(one.steps, seen)
    )
    assert plays(at, clock().key) == seen[-1][1], "from where it is"
    whole(clock().set_value(clock().max).run())
    assert plays(at, clock().key) == seen[0][1], "and from the end once more from the beginning"
    whole(clock().set_value(0.0).run())
    assert done() == 0 and dict(at.query_params), "the link says the time"


BEGIN = 1.7e9


@pytest.fixture
def run(tmp_path):
    """A run of two steps with two groups of one rollout, interrupted for 100 seconds between them; times can be
    reckoned by hand."""
    folder = tmp_path / "runs" / "mine"
    services = folder / "services"
    for part in ("events", "groups"):
        (services / part).mkdir(parents=True)
    machine = {"cpu": "A Desk Computer", "cores": 2, "torch": "2.13", "commit": "c0ffee"}
    (folder / "config.json").write_text(
        json.dumps({"technique": "async-rl", "config": {"seed": 7}, "machine": machine})
    )
    journal = []
    for group, versions in enumerate([[0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1]]):
        n = len(versions)
        segment = Segment(
            torch.arange(n),
            torch.tensor([False, True, True]),
            torch.zeros(n),
            torch.tensor(versions),
            torch.zeros(n - 1, 1, 1, dtype=torch.int16),
            True,
            torch.zeros(n, dtype=torch.bool),
        )
        data = pack([Rollout(Chain([segment], True, 0), {"tests": 1.0}, {"success": 1.0})])
        atomic_write(services / "groups" / f"{group}", data)
        journal.append({"kind": "start", "groups": [group], "version": group // 2})
        journal.append(
            {
                "kind": "ready",
                "groups": [group],
                "version": min(versions[1:]),
                "key": f"{group}",
                "digest": hashlib.sha256(data).hexdigest(),
            }
        )
        if group % 2:
            journal.append({"kind": "train", "groups": [group - 1, group], "version": group // 2})
    journal.append({"kind": "drop", "groups": [9], "version": 2})
    (services / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))

    def write(name, *lines):
        keys = ("at", "epoch", "what")
        text = "".join(json.dumps(dict(zip(keys, (BEGIN + line[0], *line[1:3])), **line[3])) + "\n" for line in lines)
        (services / "events" / f"{name}.jsonl").write_text(text)

    figures = {"age": 0.0, "oldest": 0.0, "tokens": 4.0}
    write(
        "trainer",
        (0.0, 0, "start", {"version": 0}),
        (4.0, 0, "train", {"version": 0}),
        (6.0, 0, "saved", {"version": 1, **figures}),
        (7.0, 0, "train", {"version": 1}),
        (107.0, 0, "start", {"version": 1}),
        (108.0, 0, "train", {"version": 1}),
        (110.0, 0, "saved", {"version": 2, **figures}),
    )
    write(
        "worker-0",
        (0.5, 0, "load", {"version": 0, "fetch_s": 0.1, "pause_s": 0.1}),
        (1.0, 0, "slots", {"version": 0, "decoding": 2, "tools": 1, "free": 1, "queued": 0}),
        (5.0, 0, "slots", {"version": 0, "decoding": 0, "tools": 0, "free": 4, "queued": 0}),
        (107.5, 0, "load", {"version": 1, "fetch_s": 0.1, "pause_s": 0.1}),
        (108.0, 0, "slots", {"version": 1, "decoding": 0, "tools": 4, "free": 0, "queued": 0}),
    )
    return folder


def test_a_real_run_is_read_as_it_was(run):
    """The interruption costs no time: 10 seconds in all, 4 of them steps."""
    one = async_rl.load_timeline(run)
    assert one.seconds == pytest.approx(10.0) and [(round(a, 3), round(b, 3), v) for a, b, v in one.steps] == [
        (4, 6, 1),
        (8, 10, 2),
    ]
    assert one.trainer_idle == pytest.approx(0.6) and one.steps_per_minute == pytest.approx(12.0)
    assert one.ages == {0: 8, 1: 0} or one.ages == {0: 8}
    assert one.sampler_idle == pytest.approx(2 / 3) and one.dropped == 1
    assert [(round(at, 3), *rest) for at, *rest in one.slots["worker-0"]] == [(1, 2, 1, 1), (5, 0, 0, 4), (8, 0, 4, 0)]
    assert [(round(at, 3), version) for at, version in one.version_changes["worker-0"]] == [(0.5, 0), (7.5, 1)]


def test_the_page_shows_a_real_run_and_names_it(page, run, table):
    at = page("async-rl")
    assert not at.error and at.selectbox(key="async-run").options == ["mine"]
    said = " ".join(caption.value for caption in at.caption)
    assert "Shown: **mine**, your run in runs/mine · seed 7 · A Desk Computer" in said and "commit c0ffee" in said
    (real,) = [shown.value for shown in at.dataframe if "mine" in shown.value.get("run", [""]).tolist()]
    assert real["steps per minute"].tolist() == pytest.approx([12.0]) and real["dropped groups"].tolist() == [1]


def test_without_a_run_the_page_says_what_makes_one(page):
    at = page("async-rl")
    assert any("`etude run async-rl` makes one" in info.value for info in at.info) and not at.error


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda run: (run / "services" / "journal.jsonl").unlink(), "FileNotFoundError"),
        (lambda run: (run / "services" / "groups" / "1").write_bytes(b"x"), "has changed since the worker wrote it"),
        (
            lambda run: (run / "services" / "events" / "trainer.jsonl").write_text(
                '{"at": 1.0, "epoch": 0, "what": "start"}\n'
            ),
            "has not finished a step yet",
        ),
        (
            lambda run: (run / "services" / "events" / "worker-0.jsonl").write_text(
                '{"at": 1700000001.0, "what": "slots"}\n'
            ),
            "KeyError",
        ),
        (
            lambda run: (run / "services" / "events" / "trainer.jsonl").write_text('{"what": "saved", "version": 1}\n'),
            "KeyError",
        ),
    ],
)
def test_a_broken_run_is_one_line_and_the_simulation_shows(page, run, table, spoil, says):
    spoil(run)
    at = page("async-rl")
    (line,) = [error.value for error in at.error]
    assert says in line and "mine" in line and "\n" not in line
    assert len(table(at, "steps per minute")) == 4
    with pytest.raises(RunError):
        async_rl.load_timeline(run)


def test_what_is_written_since_is_seen(run):
    assert len(async_rl.load_timeline(run).steps) == 2
    with open(run / "services" / "events" / "trainer.jsonl", "a") as file:
        for line in (
            {"at": BEGIN + 111, "what": "train", "version": 2},
            {"at": BEGIN + 112, "what": "saved", "version": 3},
        ):
            file.write(json.dumps({"epoch": 0, **line}) + "\n")
    assert [version for *_, version in async_rl.load_timeline(run).steps] == [1, 2, 3]


def test_other_runs_are_none_of_its_business(run):
    shutil.copytree(run, run.parent / "other")
    config = json.loads((run / "config.json").read_text())
    (run.parent / "other" / "config.json").write_text(json.dumps(config | {"technique": "recipe"}))
    (run.parent / "broken").mkdir()
    (run.parent / "broken" / "config.json").write_text("{")
    assert list(async_rl.runs()) == ["mine"]


# ------------------------------------------------------------------------------------------- weight sync


def test_shares_and_bits_are_those_of_ref(page, table):
    shown = table(page("weight-sync", std="0.05", updates=weight_chain.EVEN), "gap + step").set_index("learning rate")
    masters, unit = weight_chain.sample_weights(0.05, weight_chain.EVEN)
    assert set(unit.abs().tolist()) == {1.0}
    for lr in weight_sync.LRS:
        old, new = masters.bfloat16(), (masters + lr * unit).bfloat16()
        positions, steps = ref_sync.encode_delta(old, new)
        row = shown.loc[lr]
        assert row["changed share"] == len(positions) / weight_chain.WEIGHTS
        assert row["law, changed share"] == pytest.approx(ref_sync.changed_share(masters, lr * unit))
        assert row["gap + step"] == pytest.approx(
            8 * len(ref_sync.pack(positions, steps, weight_chain.WEIGHTS)) / len(positions)
        )
        error = (row["law, changed share"] / weight_chain.WEIGHTS) ** 0.5
        assert abs(row["changed share"] - row["law, changed share"]) < 5 * error


def test_the_entropy_by_hand():
    """Every weight moves by a quarter of a neighbour's distance: one in four changes, by ±1. Then by one and a half:
    all change, by ±1 or ±2."""
    quarter = weight_sync.entropy_bits(np.full(1000, 0.25))
    assert quarter == pytest.approx((-0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)) / 0.25 + 1)
    mixed = weight_sync.entropy_bits(np.array([0.0, 1.5]))
    assert mixed == pytest.approx(2.0 + 2.0)  # H(1/2) = 1 bit a weight, two a changed one; ±1 and ±2, equally likely
    assert weight_sync.entropy_bits(np.zeros(4)) == 0.0


def test_no_code_is_far_below_the_entropy_and_gap_and_step_is_near_it():
    for row in weight_sync.coded(0.02, weight_chain.NORMAL)[2:7]:
        assert 0.97 * row["law"] < row["gap + step"] < 1.35 * row["law"]
        assert row["gap + step"] < row["XOR"] < row["index + value"] or row["learning rate"] > 1e-5


class Recorded(dict):
    """A store that notes what is read."""

    def __init__(self, *known):
        super().__init__(*known)
        self.read = []

    def __getitem__(self, key):
        self.read.append(key)
        return super().__getitem__(key)


@pytest.mark.parametrize(
    ("lr", "have", "want"), [(1e-6, 17, 30), (1e-6, None, 30), (1e-4, 3, 31), (1e-3, 0, 26), (1e-6, 8, 16)]
)
def test_a_reader_fetches_what_the_page_draws(lr, have, want):
    """A reader of `ref.weight_sync` on a store with the same chain reads these shards, and no others."""
    std, updates, anchor, merge = 0.02, weight_chain.NORMAL, 25, 8
    masters, _ = weight_chain.sample_weights(std, updates)
    masters, store, generator = (
        masters[: weight_chain.SMALL].view(weight_chain.ROWS, -1).clone(),
        Recorded(),
        torch.Generator().manual_seed(1),
    )
    writer = ref_sync.Writer(store, anchor, merge)
    served = torch.zeros(masters.shape, dtype=torch.bfloat16)
    reader = ref_sync.Reader(store, [ref_sync.Part("w", tuple(masters.shape), 0, served)])
    for version in range(want + 1):
        writer.publish(version, [ref_sync.Part("w", tuple(masters.shape), 0, masters)])
        if version == have:
            reader.fetch()
            reader.swap()
        if version < want:
            masters += lr * torch.randn(masters.shape, generator=generator)
    store.read.clear()
    assert reader.fetch() == want
    read = [key for key in store.read if "manifest" not in key]
    way = weight_chain.way(weight_chain.chain(lr, std, updates, anchor, merge), have, want)
    assert [key.partition("/")[0] for key in read] == [f"{link['version']:08d}" for link in way]
    assert [key.partition("/")[2].partition("-")[0] for key in read] == [link["link"] for link in way]
    assert [len(dict.__getitem__(store, key)) for key in read] == [link["bytes"] for link in way]


@pytest.mark.parametrize(("have", "want"), [(12, 30), (None, 30), (30, 30), (0, 1)])
def test_every_link_of_the_chain_is_drawn_and_those_fetched_are_thick(have, want):
    manifests = weight_chain.chain(1e-6, 0.02, weight_chain.NORMAL, 25, 8)
    some = weight_chain.links(manifests, have, want)
    assert len(some) == sum(len(manifests[version]["links"]) for version in range(want + 1))
    fetched = [(link["version"], link["from"]) for link in weight_chain.way(manifests, have, want)]
    assert sorted((link["version"], link["from"]) for link in some if link["fetched"]) == sorted(fetched)
    drawn = weight_chain.diagram(some, have, want, 8)
    arcs = [layer for layer in drawn.layers if layer.kind == "line"]
    assert len({row["arc"] for layer in arcs for row in layer.rows}) == len(some)
    for layer in arcs:
        assert {row["fetched"] for row in layer.rows} == {not layer.thin}
        for row in layer.rows:
            assert layer.thin or layer.look == Look(weight_chain.KINDS[row["link"]], mark="^")
        ends = {(row["version"], row["from"]): row["x"] for row in layer.rows}  # the last point of each
        assert all(x == pytest.approx(version) for (version, _), x in ends.items()), (
            "an arc ends at the version that it makes"
        )
    held = [
        row["version"]
        for layer in drawn.layers
        for row in layer.rows
        if row.get("this version") == "held by the reader"
    ]
    assert held == ([] if have is None else [have])


def test_what_to_look_for_in_weight_sync_is_so(page, table):
    rows = {row["learning rate"]: row for row in weight_sync.coded(0.02, weight_chain.NORMAL)}
    assert rows[1e-6]["law, changed share"] < 0.05 and rows[1e-6]["gap + step"] < 1.25 * rows[1e-6]["law"]
    small, large = (
        weight_chain.late(weight_chain.chain(lr, 0.02, weight_chain.NORMAL, 25, 8), 30) for lr in (1e-6, 1e-4)
    )
    assert all(row["cheapest way"] < row["from nothing"] for row in small)
    assert any(
        link["link"] == "merged"
        for link in weight_chain.way(weight_chain.chain(1e-6, 0.02, weight_chain.NORMAL, 25, 8), 12, 30)
    )
    assert any(row["delta by delta"] > row["from nothing"] for row in large)
    for row in [*small, *large]:
        assert row["cheapest way"] <= min(row["delta by delta"], row["from nothing"])


def test_a_reader_without_anything_and_one_that_is_up_to_date(page, table, plays):
    links = table(page("weight-sync", empty="true", newest="30"), "link")
    assert links["link"].tolist()[0] == "anchor" and links["version"].tolist()[-1] == 30
    at = page("weight-sync", behind="0")
    assert any("has the newest version" in line.value for line in at.markdown) and plays(at, "newest") == 30
