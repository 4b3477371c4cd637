"""Versions that 1, 2 and 4 ranks write are what any other layout reads, bit for bit; and what is wrong with one rank,
all say."""

import random
import threading
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.settings import RunError
from ref import weight_sync as ref
from ref.network import Config
from scaled import weight_sync
from scaled.runtime import store as stores
from scaled.runtime.store import Folder, StoreError, open_store
from tests.mirror import syncing
from tests.mirror.layouts import EVERY, layouts, play, seeds
from tests.mirror.workers import ranks

few = settings(max_examples=10, deadline=None, derandomize=True)


def config(experts: int) -> Config:
    shape = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
    )
    return Config.tiny(40, **shape, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=8)


def bits(state: dict) -> dict:
    return {name: x.view(torch.int16) for name, x in state.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@few
@given(layouts, layouts, seeds, st.sampled_from([4, 12]), st.booleans())
def test_written_by_one_layout_read_by_another(tmp_path_factory, writers, readers, seed, experts, behind):
    """Experts that divide over the ranks, and experts that do not; a whole network on every rank, too."""
    folder, shape = str(tmp_path_factory.mktemp("store")), config(experts)
    play(writers, syncing.publish, folder, shape, seed, 5, 0, {"merge_every": 2, "anchor_every": 4}, behind)
    wanted = syncing.versions(shape, seed, 5)
    served, state, _ = play(readers, syncing.follow, folder, shape, [1, None])
    assert served == [1, 4] and same(state, bits(wanted[4]))
    served, state, read = play(readers, syncing.follow, folder, shape, [2], True)
    assert served == [2] and same(state, bits(wanted[2])) and read >= writers["dp"] * writers["cp"]


@few
@given(layouts, layouts, seeds, st.sampled_from(["flip", "cut", "gone"]), st.sampled_from([None, 0]))
def test_a_damaged_shard_is_found_by_every_layout(tmp_path_factory, writers, readers, seed, how, anchors):
    """One file of version 2 is damaged. Ranks that do not need it hear of it, too. With an anchor there, all get the
    right bits by way of it; without, all keep what they serve."""
    folder, shape, g = tmp_path_factory.mktemp("store"), config(4), random.Random(seed)
    play(writers, syncing.publish, str(folder), shape, seed, 3, 0, {"anchor_every": 100 if anchors is None else 2})
    path = g.choice(sorted((folder / "00000002").glob("delta-*")))
    data = path.read_bytes()
    at = g.randrange(len(data))
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(
            data[:at] + (bytes([data[at] ^ g.randrange(1, 256)]) + data[at + 1 :] if how == "flip" else b"")
        )
    served, state = play(readers, syncing.tried, str(folder), shape, 1, 2)
    assert served == (1 if anchors is None else 2)
    assert same(state, bits(syncing.versions(shape, seed, 3)[served]))


def test_a_manifest_says_the_same_for_every_layout(tmp_path):
    """Names, shapes and digests: those of the reference, which has everything in one place."""
    shape = config(4)
    store: dict[str, bytes] = {}
    here = syncing.Parted(shape, whole=True)
    here.put(syncing.versions(shape, 1, 1)[0])
    wanted = ref.Writer(store).publish(0, here.parts())
    for number, layout in enumerate(EVERY):
        found = play(layout, syncing.publish, str(tmp_path / str(number)), shape, 1, 1)
        assert found["digests"] == wanted["digests"] and found["shapes"] == wanted["shapes"]


def test_ranks_share_the_rows():
    """By hand: four ranks hold each row of each tensor once, and none holds everything."""
    shape = config(4)
    found = ranks(4).run(dict(dp=4, cp=1, ep=2), syncing.rows_of, shape)
    whole = {part.name: part.rows for part in syncing.Parted(shape, whole=True).parts()}
    rows = [(name, first + n) for part in found for name, first, count in part for n in range(count)]
    assert len(rows) == len(set(rows)) == sum(whole.values())
    assert max(sum(count for *_, count in part) for part in found) < 0.5 * len(rows)


def test_readers_fetch_only_shards_that_hold_their_rows(tmp_path):
    """Written by four ranks, with experts on their own ranks: a reader of one expert needs two of the four shards at
    most."""
    shape = config(4)
    play(dict(dp=4, cp=1, ep=4), syncing.publish, str(tmp_path), shape, 0, 2)
    parts = [part for part in syncing.Parted(shape, whole=True).parts() if ".experts.2." in part.name]
    reader = weight_sync.Reader(open_store(str(tmp_path)), parts)
    read, get = set(), reader.get
    reader.get = lambda shard: read.add(shard["key"]) or get(shard)
    reader.fetch()
    assert read and {key.partition("-")[2][0] for key in read} == {"2"}


@few
@given(seeds, st.integers(0, 40), st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_the_fast_comparison_is_the_plain_one(seed, size, share):
    g = torch.Generator().manual_seed(seed)
    old, other = (torch.randint(-(2**15), 2**15, (size, 3), generator=g).to(torch.int16) for _ in range(2))
    new = torch.where(torch.rand(size, 3, generator=g) < share, other, old).view(torch.bfloat16)
    for a, b in (
        (old.view(torch.bfloat16), new),
        (old.view(torch.bfloat16).T, new.T),
        (old.view(torch.bfloat16)[::2], new[::2]),
    ):
        found, wanted = syncing.encoded(a, b)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        assert torch.equal(weight_sync.apply_delta(a, *found).view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_do_all_say(tmp_path, rank):
    layout = dict(dp=2, cp=1, ep=1)
    first, second = ranks(2).run(layout, syncing.failing, str(tmp_path), config(4), 0, rank)
    assert first == second
    assert first[0] == f"version 1 was not published: rank {rank} could not write its rows (OSError: disk full)"
    assert first[1:] == ["torn", "0", "25"]


def test_a_resumed_trainer_publishes_the_same_again(tmp_path):
    """It was killed after version 3 and its last checkpoint is of version 2: what it publishes again is what lies there
    already."""
    shape, folder = config(4), str(tmp_path)
    play(dict(dp=2, cp=1, ep=1), syncing.publish, folder, shape, 3, 4)
    play(dict(dp=1, cp=2, ep=2), syncing.publish, folder, shape, 3, 6, 2)
    served, state, _ = play(dict(dp=1, cp=1, ep=1), syncing.follow, folder, shape, [3, None])
    assert served == [3, 5] and same(state, bits(syncing.versions(shape, 3, 6)[5]))


@pytest.mark.parametrize(("layout", "n"), [(dict(dp=1, cp=1, ep=1), 27), (dict(dp=2, cp=2, ep=2), 4)], ids=str)
def test_rl_reads_its_samplers_weights_from_the_store(tmp_path, layout, n):
    """After the first version only differences travel; and what lies behind the last anchor goes."""
    sizes, exact, left = play(layout, syncing.loaded, str(tmp_path), config(4), 5, n)
    assert exact and max(sizes[1:]) < 0.5 * sizes[0]
    assert left == (
        ["00000025", "00000026", "readers"] if n > 25 else [*(f"{version:08d}" for version in range(n)), "readers"]
    )


# Stores.


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path / "s") if request.param == "folder" else f"memory://{tmp_path.name}")


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_store_is_a_mapping(tmp_path_factory, data):
    """What a dict does, folder and memory do."""
    name, wanted = tmp_path_factory.mktemp("map"), {}
    made = [open_store(str(name)), open_store(f"memory://{name.name}")]
    for _ in range(data.draw(st.integers(0, 12))):
        key = data.draw(st.sampled_from(["a", "0001/b-0-x", "0001/manifest", "readers/c"]))
        value, what = data.draw(st.binary(max_size=20)), data.draw(st.sampled_from(["set", "create", "pop"]))
        answers = []
        for one in [wanted, *made]:
            if what == "set":
                one[key] = value
            else:
                answers.append(one.setdefault(key, value) if what == "create" else one.pop(key, None))
        assert not answers or answers == answers[:1] * 3
    assert all(dict(one) == wanted and len(one) == len(wanted) for one in made)


def test_a_missing_key(store):
    assert list(store) == [] and len(store) == 0
    with pytest.raises(KeyError):
        store["0001/manifest"]
    with pytest.raises(KeyError):
        del store["0001/manifest"]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    store = Folder(tmp_path)
    store["1/a"] = b"old"
    with mock.patch("os.fsync", side_effect=OSError("disk full")):
        for write in (lambda: store.__setitem__("1/a", b"new"), lambda: store.setdefault("1/b", b"new")):
            with pytest.raises(OSError):
                write()
    assert dict(store) == {"1/a": b"old"}


def test_a_store_that_is_down_is_asked_a_few_times(monkeypatch):
    store = open_store("memory://down", attempts=3)
    calls = []

    def down(*args, **kwargs):
        calls.append(args)
        raise ConnectionError("refused")

    monkeypatch.setattr(stores.time, "sleep", lambda _: None)
    monkeypatch.setattr(store.fs, "cat_file", down)
    with pytest.raises(StoreError, match="the store memory://down does not answer for 1/a: ConnectionError: refused"):
        store["1/a"]
    assert len(calls) == 3
    monkeypatch.setattr(store.fs, "cat_file", lambda path: down() if len(calls) < 4 else b"x")
    assert store["1/a"] == b"x"


@pytest.mark.parametrize("address", ["", "nothing://bucket", "s3nothing://x"])
def test_an_address_that_is_none(address):
    with pytest.raises(RunError, match="a store needs an address|cannot be opened"):
        open_store(address)


def one_part(values: torch.Tensor) -> list[ref.Part]:
    return [ref.Part("w", tuple(values.shape), 0, values)]


def test_a_version_that_is_started_has_the_weights_of_that_moment():
    """The trainer goes on with the same tensors while a thread publishes them; bfloat16 ones, too, which need no
    rounding."""
    store, before = {}, torch.arange(12.0).bfloat16().view(4, 3)
    writer, weights, go_on = weight_sync.Writer(store), before.clone(), threading.Event()
    publish = writer.publish
    writer.publish = lambda *arguments: go_on.wait(30) and publish(*arguments)
    writer.start(0, one_part(weights))
    weights.fill_(7.0)
    go_on.set()
    writer.finish()
    served = torch.zeros(4, 3).bfloat16()
    reader = weight_sync.Reader(store, one_part(served))
    assert reader.fetch() == 0 and reader.swap() == 0 and served.equal(before)


def test_what_fails_in_the_background_is_raised_once_by_whoever_comes_next():
    class Down(dict):
        down = True

        def setdefault(self, key, default=None):
            if self.down:
                raise OSError("no route")
            return super().setdefault(key, default)

    writer = weight_sync.Writer(store := Down())
    writer.start(0, one_part(torch.ones(2, 3)))
    with pytest.raises(ref.SyncError, match="version 0 was not published: no route"):
        writer.start(1, one_part(torch.ones(2, 3)))
    store.down = False
    writer.start(1, one_part(torch.ones(2, 3)))
    writer.finish()
    assert writer.version == 1 and "00000001/manifest" in store and "00000000/manifest" not in store


def test_a_store_that_cannot_be_pruned_is_said():
    store = {"readers/a": b"?"}
    with pytest.raises(ref.SyncError, match="nothing is pruned"):
        weight_sync.prune(store)
