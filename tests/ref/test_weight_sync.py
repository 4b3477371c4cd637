"""Weight sync: the law of changed shares, digests, and a chain that is the trainer's bits or an error."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import weight_sync
from ref.network import Config, Transformer
from ref.weight_sync import Part, Reader, SyncError, Writer, changed_share, digest, encode_delta, parts, prune, ulp

SHAPES = {"a": (7, 5), "b": (11,), "c": (), "d": (3, 2, 4)}


def bits(x):
    return x.view(torch.int16)


def weights(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {name: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in SHAPES.items()}


def whole(state: dict) -> list[Part]:
    return [Part(name, tuple(x.shape), 0, x) for name, x in state.items()]


def moved(state: dict, seed: int, share: float) -> dict:
    """Another version: some weights take any other bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, x in state.items():
        other = torch.randint(-(2**15), 2**15, x.shape, generator=generator).to(torch.int16)
        out[name] = torch.where(torch.rand(x.shape, generator=generator) < share, other, bits(x)).view(torch.bfloat16)
    return out


def chain(n: int, share: float = 0.2, seed: int = 0, **how) -> tuple[dict, list[dict]]:
    """A store of n versions, and what the trainer had."""
    store, states = {}, [weights(seed)]
    writer = Writer(store, **how)
    for version in range(n):
        if version:
            states.append(moved(states[-1], seed + version, share))
        writer.publish(version, whole(states[-1]))
    return store, states


def follower(store: dict, **how) -> tuple[Reader, dict]:
    served = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    return Reader(store, whole(served), **how), served


def serves(served: dict, state: dict) -> bool:
    return all(torch.equal(bits(served[name]), bits(state[name])) for name in SHAPES)


def moves(reader: Reader, want: int | None = None) -> int | None:
    reader.fetch(want)
    return reader.swap()


# The law.


def test_ulp_by_hand():
    """1 has neighbours at 2^−7 above; 0.02 lies between 2^−6 and 2^−5; nothing is finer than 2^−133."""
    found = ulp(torch.tensor([1.0, -1.99, 0.02, 2.0, 0.0, 1e-40]))
    assert found.tolist() == [2**-7, 2**-7, 2**-13, 2**-6, 2.0**-133, 2.0**-133]


@given(st.integers(0, 0x7F7E), st.booleans())
def test_ulp_is_the_distance_to_the_next_number(pattern, negative):
    pair = torch.tensor([pattern, pattern + 1], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    value = -pair[0] if negative else pair[0]
    assert ulp(value.float()).item() == (pair[1] - pair[0]).item()


@pytest.mark.parametrize("size", [0.003, 0.3, 1.0, 2.5])
def test_the_law_by_sampling(size):
    """Masters anywhere between two boundaries of one binade: an update of `size` ulps changes min(1, size) of them."""
    n, generator = 200_000, torch.Generator().manual_seed(0)
    masters = 1.2 + 0.5 * torch.rand(n, dtype=torch.float64, generator=generator)
    update = torch.full((n,), size * 2**-7, dtype=torch.float64)
    after = masters + update
    changed = (after.bfloat16() != masters.bfloat16()).double().mean().item()
    assert abs(changed - min(1, size)) < 5 * math.sqrt(max(size * (1 - size), 1e-3) / n) if size < 1 else changed == 1
    assert changed_share(masters, update) == pytest.approx(min(1, size))


@given(st.integers(0, 2**20), st.floats(1e-8, 1.0), st.booleans())
def test_the_law_is_a_share_and_grows_with_the_update(seed, size, sign):
    generator = torch.Generator().manual_seed(seed)
    w, update = torch.randn(2, 50, generator=generator)
    update = size * (-update if sign else update)
    share = changed_share(w, update)
    assert (
        0 <= share <= 1
        and share == changed_share(-w, -update)
        and share <= changed_share(w, 2 * update) <= 2 * share + 1e-12
    )
    assert changed_share(w, torch.zeros(50)) == 0


def test_masters_from_bfloat16_lie_in_the_middle():
    """The trap of the law: straight after loading, updates of 0.4 ulp change nothing, where the law says 40%."""
    w = torch.full((1000,), 1.5)
    update = torch.full((1000,), 0.4 * 2**-7)
    assert changed_share(w, update) == pytest.approx(0.4) and bool(((w + update).bfloat16() == w.bfloat16()).all())


# Digests.


@given(st.integers(0, 2**20), st.integers(0, 7), st.integers(0, 7))
def test_digests_of_parts_add_up(seed, a, b):
    x = weights(seed)["a"]
    cuts = sorted({0, min(a, 7), min(b, 7), 7})
    pieces = [digest(Part("a", (7, 5), low, x[low:high])) for low, high in zip(cuts, cuts[1:])]
    assert sum(pieces) % 2**128 == digest(Part("a", (7, 5), 0, x))


@given(st.integers(0, 34), st.integers(0, 15))
def test_every_bit_counts(at, bit):
    x = weights(0)["a"]
    y = bits(x).clone()
    y.view(-1)[at] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
    assert digest(Part("a", (7, 5), 0, x)) != digest(Part("a", (7, 5), 0, y.view(torch.bfloat16)))


def test_order_and_place_count():
    x = weights(0)["a"]
    assert digest(Part("a", (7, 5), 0, x)) != digest(Part("a", (7, 5), 0, x.flip(0)))
    assert digest(Part("a", (7, 5), 0, x[:3])) != digest(Part("a", (7, 5), 1, x[:3]))


def test_digests_of_ranks_are_put_together():
    """Two rows each, by hand. A part that two ranks hold counts once, and must be the same for both; a writer's must
    not be there twice."""
    a, b, shapes = ("w", 0, 2), ("w", 2, 2), {"w": [4]}
    assert (
        weight_sync.combined([(b, 5), (a, 7)], shapes)
        == {"w": f"{12:032x}"}
        == weight_sync.combined([(a, 7), (b, 5), (a, 7)], shapes)
    )
    assert weight_sync.combined([(a, 2**128 - 1), (b, 3)], shapes) == {"w": f"{2:032x}"}
    with pytest.raises(SyncError, match="two ranks hold other bits in rows 0 to 2 of w"):
        weight_sync.combined([(a, 7), (b, 5), (a, 8)], shapes)
    with pytest.raises(SyncError, match="rows 0 to 2 of w are published by two ranks"):
        weight_sync.combined([(a, 7), (b, 5), (a, 7)], shapes, twice=False)
    for some in ([(b, 5)], [(a, 7)], [(a, 7), (("w", 1, 3), 5)], [(a, 7), (b, 5), (("w", 4, 1), 5)]):
        with pytest.raises(SyncError, match="held"):
            weight_sync.combined(some, shapes)


# The chain.


@settings(max_examples=40)
@given(
    st.integers(0, 2**20),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.03, 0.8]),
    st.integers(1, 6),
    st.integers(2, 5),
    st.data(),
)
def test_a_reader_has_the_trainers_bits(seed, n, share, anchor_every, merge_every, data):
    """Whenever it looks, and whatever it holds; with any bits, NaN payloads among them."""
    store, states = chain(n, share, seed, anchor_every=anchor_every, merge_every=merge_every)
    reader, served = follower(store)
    for want in sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))):
        assert moves(reader, want) == want and serves(served, states[want])
    assert moves(reader) == n - 1 and serves(served, states[-1])


def test_a_merged_delta_is_taken_and_is_smaller():
    store, states = chain(17, 0.05, anchor_every=100)
    reader, served = follower(store)
    moves(reader, 0)
    read, fetch = [], reader.get
    reader.get = lambda shard: read.append(shard["key"]) or fetch(shard)
    assert moves(reader, 16) == 16 and serves(served, states[16])
    assert [key[:15] for key in read] == ["00000008/merged", "00000016/merged"]


def test_a_delta_is_small():
    """Of 100,000 weights 300 change by a step: about two bytes each before zstd, and under 100 of head and frames."""
    x = torch.randn(1000, 100).bfloat16()
    y = x.clone()
    at = torch.randperm(100_000)[:300]
    bits(y).view(-1)[at] += 1
    delta = encode_delta(x, y)
    assert len(weight_sync.pack(*delta, 100_000)) < 2.5 * 300 + 100


def test_nothing_is_served_before_the_swap():
    store, states = chain(2)
    reader, served = follower(store)
    moves(reader, 0)
    assert reader.fetch() == 1 and reader.version == 0 and serves(served, states[0])
    assert "readers/reader" in store and store["readers/reader"] == b"0"
    assert reader.swap() == 1 and serves(served, states[1]) and store["readers/reader"] == b"1"


def test_a_reader_of_some_rows_fetches_only_their_shards():
    """Two writers' shards by hand: a reader of rows in the second one does not touch the first."""
    x, told, store, second = weights(0)["a"], [], {}, {}
    none = Writer({})
    none.publish(0, [])
    none.publish(1, [])  # a rank without rows has empty shards
    other = Writer(second)
    other.rank, other.gather_objects = 1, lambda mine: told.append(mine) or [mine]
    other.publish(0, [Part("a", (7, 5), 4, x[4:])])
    writer = Writer(store)
    writer.gather_objects = lambda mine: [mine, told[0]] if len(mine) == 4 else [mine]
    writer.publish(0, [Part("a", (7, 5), 0, x[:4])])
    store |= second
    reads = []
    reader = Reader(store, [Part("a", (7, 5), 0, torch.zeros(7, 5).bfloat16())])
    get = reader.get
    reader.get = lambda shard: reads.append(shard["key"]) or get(shard)
    assert moves(reader) == 0 and len(reads) == 2 and torch.equal(bits(reader.parts[0].weights), bits(x))
    some = Reader(store, [Part("a", (7, 5), 5, torch.zeros(2, 5).bfloat16())])
    some.get = reader.get
    reads.clear()
    with pytest.raises(SyncError, match="cannot be checked"):  # nobody holds the other rows
        some.fetch()
    assert len(reads) == 1 and "anchor-1" in reads[0]


@settings(max_examples=60)
@given(st.data())
def test_every_damaged_byte_is_found(data):
    """One byte of one value of the store is flipped, or the value is cut, or it is gone: the reader ends with the
    trainer's bits, by another way, or says SyncError and serves what it served."""
    store, states = chain(7, 0.3, anchor_every=3, merge_every=2)
    reader, served = follower(store)
    have = data.draw(st.sampled_from([None, 0, 2, 4]))
    if have is not None:
        moves(reader, have)
    key = data.draw(st.sampled_from(sorted(key for key in store if not key.startswith("readers/"))))
    how = data.draw(st.sampled_from(["flip", "cut", "gone"]))
    if how == "gone":
        del store[key]
    else:
        at = data.draw(st.integers(0, len(store[key]) - 1))
        end = b"" if how == "cut" else bytes([store[key][at] ^ data.draw(st.integers(1, 255))]) + store[key][at + 1 :]
        store[key] = store[key][:at] + end
    reader.manifests = {}
    try:
        assert moves(reader, 6) == 6 and serves(served, states[6])
    except SyncError:
        assert reader.version == have and (have is None or serves(served, states[have]))
        assert key == "00000006/manifest", "any other value can be done without: version 6 has an anchor, and deltas"


@pytest.mark.parametrize("want", [3, 4])
def test_a_drifted_reader_falls_back_to_the_anchor(want):
    """Its base is not the trainer's, which no digest of a shard can tell: the digest of the result does. The delta,
    which is smaller, is tried first; then version 4 has an anchor of its own, and version 3 is reached from that of
    version 0, over the same delta."""
    store, states = chain(5, 0.02, anchor_every=4)
    reader, served = follower(store)
    moves(reader, want - 1)
    bits(reader.weights[0])[3] ^= 1
    reads = []
    get = reader.get
    reader.get = lambda shard: reads.append(shard["key"]) or get(shard)
    assert moves(reader, want) == want and serves(served, states[want])
    assert "delta" in reads[0] and any("anchor" in key for key in reads)


def test_a_result_with_other_bits_is_not_served():
    """A manifest whose digests are not those of what its shards lead to: no way ends at the trainer's bits."""
    store, states = chain(2, anchor_every=100)
    reader, served = follower(store)
    moves(reader, 0)
    reader.manifests = {}
    body = json.loads(store["00000001/manifest"].partition(b"\n")[2])
    body["digests"]["b"] = body["digests"]["a"]
    new = json.dumps(body).encode()
    store["00000001/manifest"] = weight_sync.hashed(new).encode() + b"\n" + new
    with pytest.raises(SyncError, match="version 1 came out with other bits than the trainer has in b"):
        reader.fetch()
    assert reader.swap() == 0 and serves(served, states[0])


def test_a_shard_is_asked_for_twice():
    """A broken answer is not a broken store."""
    store, states = chain(2, anchor_every=100)

    class Flaky(dict):
        broken = 1

        def __getitem__(self, key):
            if "delta" in key and self.broken:
                self.broken -= 1
                return super().__getitem__(key)[:-1]
            return super().__getitem__(key)

    reader, served = follower(Flaky(store))
    moves(reader, 0)
    assert moves(reader) == 1 and serves(served, states[1])


def test_a_trainer_changes_its_weights_in_place():
    """The writer keeps bits of its own to compare with: those of the trainer are gone by the next step."""
    store, state = {}, weights(0)
    writer = Writer(store)
    writer.publish(0, whole(state))
    state["a"][2, 3] = 5.0
    writer.publish(1, whole(state))
    reader, served = follower({key: value for key, value in store.items()})
    moves(reader, 0)
    assert moves(reader) == 1 and serves(served, state)


@pytest.mark.parametrize(
    ("cut", "says"), [(True, r"is damaged: \d+ of \d+ bytes"), (False, "is damaged: other bytes than were written")]
)
def test_a_damaged_shard_is_named(cut, says):
    store, _ = chain(1)
    [key] = [key for key in store if "anchor" in key]
    store[key] = store[key][:-1] + (b"" if cut else bytes([store[key][-1] ^ 1]))
    with pytest.raises(SyncError, match=f"shard {key} {says}"):
        follower(store)[0].fetch()


def test_what_stands_in_the_way_is_said():
    store, _ = chain(3, anchor_every=100)
    reader, _ = follower({})
    with pytest.raises(SyncError, match="no version yet"):
        reader.fetch()
    reader, _ = follower(store)
    with pytest.raises(SyncError, match="version 7 is not in the store: not published, or pruned"):
        reader.fetch(7)
    moves(reader)
    [gone] = [key for key in store if key.startswith("00000001/delta")]
    del store[gone]
    late, _ = follower({key: value for key, value in store.items() if "anchor" not in key})
    with pytest.raises(SyncError, match="anchor-0-.* is missing"):
        late.fetch()
    other = Reader(store, [Part("a", (5, 7), 0, torch.zeros(5, 7).bfloat16())])
    with pytest.raises(
        SyncError, match=r"a has shape \[5, 7\]; version 2 has \[7, 5\]|a has shape \[5, 7\]; version 0 has \[7, 5\]"
    ):
        other.fetch()


class Down(dict):
    """A store that can be out of order."""

    down = False

    def __setitem__(self, key, value):
        if self.down:
            raise OSError("no route to host")
        super().__setitem__(key, value)

    def setdefault(self, key, default=None):
        if self.down == "commit":
            raise OSError("no route to host")
        return super().setdefault(key, default)


def test_the_base_moves_only_with_the_manifest():
    store, states = Down(), [weights(0)]
    for seed in (1, 2, 3):
        states.append(moved(states[-1], seed, 0.2))
    writer = Writer(store)
    writer.publish(0, whole(states[0]))
    store.down = True
    with pytest.raises(
        SyncError, match="version 1 was not published: rank 0 could not write its rows .OSError: no route"
    ):
        writer.publish(1, whole(states[1]))
    store.down = False
    reader, served = follower(store)
    assert moves(reader) == 0 and writer.version == 0
    writer.publish(2, whole(states[2]))
    assert moves(reader) == 2 and serves(served, states[2])


def test_a_commit_that_fails_leaves_nothing_to_see(monkeypatch):
    store, states = Down(), [weights(0), moved(weights(0), 1, 0.2)]
    writer = Writer(store)
    writer.publish(0, whole(states[0]))
    monkeypatch.setattr(Down, "setdefault", lambda *_: (_ for _ in ()).throw(OSError("no route to host")))
    with pytest.raises(SyncError, match="version 1 was not published: no route"):
        writer.publish(1, whole(states[1]))
    monkeypatch.undo()
    reader, _ = follower(store)
    assert moves(reader) == 0
    writer.publish(1, whole(states[1]))
    assert moves(reader) == 1


def test_of_two_writers_one_wins():
    """The other learns it. Where both have the same weights, as a trainer that was killed and resumed has, both are
    right."""
    store, state = {}, weights(0)
    Writer(store).publish(0, whole(state))
    Writer(store, level=0).publish(0, whole(state))
    with pytest.raises(SyncError, match="another writer has published it, with other bits"):
        Writer(store).publish(0, whole(weights(1)))
    reader, served = follower(store)
    assert moves(reader) == 0 and serves(served, state)


def kinds_of(store: dict, version: int) -> list[str]:
    return [link["kind"] for link in json.loads(store[f"{version:08d}/manifest"].partition(b"\n")[2])["links"]]


@pytest.mark.parametrize("first", [5, 6])
def test_a_writer_begins_in_the_middle_of_a_chain(first):
    """A trainer that was killed and goes on at version 5, or on a version that its log has lost. What the one before
    held is gone: the version is whole, what follows is a delta from it, and merged deltas are merged from as many as
    are said."""
    store, states = chain(5, anchor_every=100, merge_every=4)
    writer, readers = Writer(store, anchor_every=100, merge_every=4), [follower(store) for _ in range(3)]
    for (reader, _), have in zip(readers[1:], (2, 4)):
        moves(reader, have)
    for version in range(first, first + 8):
        states = [
            *states,
            *[None] * (version - len(states)),
            moved(states[4 if version == first else -1], version, 0.2),
        ]
        writer.publish(version, whole(states[-1]))
    expected = {5: ["anchor"], 6: ["delta"], 7: ["delta"], 8: ["delta"], 9: ["delta"], 12: ["delta", "merged"]}
    if first == 6:
        expected |= {6: ["anchor"]}
    found = {version: kinds_of(store, version) for version in expected if version >= first}
    assert found == {version: kinds for version, kinds in expected.items() if version >= first}
    for reader, served in readers:
        for want in (first, first + 1, 12):
            assert moves(reader, want) == want and serves(served, states[want])


def test_versions_ascend_and_rows_stay():
    store, state = {}, weights(0)
    writer = Writer(store)
    writer.publish(3, whole(state))
    with pytest.raises(ValueError, match="version 3 must be above 3"):
        writer.publish(3, whole(state))
    with pytest.raises(ValueError, match="the rows that the last version had"):
        writer.publish(4, whole(state)[1:])
    with pytest.raises(ValueError, match="merge_every at least 2"):
        Writer(store, merge_every=1)
    writer.publish(9, whole(moved(state, 1, 0.1)))
    reader, _ = follower(store)
    assert moves(reader) == 9


def test_a_manifest_that_cannot_be_read_is_named_where_it_is_wanted():
    """A damaged one that is newer than what a reader serves; not an old one, and not one that it can pass by."""
    store, states = chain(4, anchor_every=2)
    reader, served = follower(store)
    store["00000003/manifest"] = store["00000003/manifest"][:-1]
    assert moves(reader) == 2 and serves(served, states[2])  # the newest that can be read
    with pytest.raises(SyncError, match="version 3 cannot be read: the manifest is damaged"):
        reader.fetch()
    with pytest.raises(SyncError, match="version 3 cannot be read"):
        reader.fetch(3)
    assert reader.swap() == 2
    del store["00000003/manifest"]
    store["00000001/manifest"], reader.manifests = b"", {}
    assert moves(reader) == 2 and moves(reader, 0) == 0 and serves(served, states[0])


def test_a_store_that_does_not_answer_is_said_and_what_serves_goes_on():
    class Deaf(dict):
        deaf = ""

        def __iter__(self):
            if self.deaf == "list":
                raise OSError("no route to host")
            return super().__iter__()

        def __getitem__(self, key):
            if self.deaf and self.deaf in key:
                raise OSError("no route to host")
            return super().__getitem__(key)

        def __setitem__(self, key, value):
            if self.deaf == "write":
                raise OSError("no route to host")
            super().__setitem__(key, value)

    plain, states = chain(4, anchor_every=2)
    store = Deaf(plain)
    (reader, served), (late, _) = follower(store), follower(store)
    moves(reader, 1)
    store.deaf = "list"
    with pytest.raises(SyncError, match="the store does not answer: no route to host"):
        reader.fetch()
    assert reader.swap() == 1 and serves(served, states[1])
    store.deaf = "anchor"
    with pytest.raises(SyncError, match=r"shard .*anchor.* cannot be read \(no route to host\)"):
        late.fetch()
    assert moves(reader) == 3 and serves(served, states[3])
    store.deaf = "write"
    assert moves(reader, 2) == 2 and serves(served, states[2]) and store["readers/reader"] == b"3"


def test_parts_must_cover_every_row():
    store, state = {}, weights(0)
    with pytest.raises(SyncError, match="of a 6 rows are held"):
        Writer(store).publish(0, [Part("a", (7, 5), 0, state["a"][:6])])
    with pytest.raises(SyncError, match="rows 0 to 1 of a are held by none, or by two"):
        Writer(store).publish(0, [Part("a", (7, 5), 1, state["a"][1:])])
    with pytest.raises(SyncError, match="rows 0 to 11 of b are published by two ranks"):
        Writer(store).publish(0, [*whole(state), Part("b", (11,), 0, state["b"])])
    assert not any(key.endswith("manifest") for key in store)


def test_pruning_waits_for_every_reader():
    store, states = chain(9, anchor_every=3, merge_every=2)
    assert prune(store) == 0, "no reader has said what it serves"
    fast, _ = follower(store, name="fast")
    slow, served = follower(store, name="slow")
    moves(fast)
    moves(slow, 4)
    assert prune(store) == 3 and min(int(key[:8]) for key in store if key[0] == "0") == 3
    assert moves(slow) == 8 and serves(served, states[8])
    assert prune(store) == 3
    late, served = follower(store)
    assert moves(late) == 8 and serves(served, states[8])
    with pytest.raises(SyncError, match="version 2 is not in the store"):
        late.fetch(2)
    store["readers/other"] = b"?"
    with pytest.raises(SyncError, match="nothing is pruned"):
        prune(store)


def test_pruning_leaves_a_way_to_every_version_that_is_left_wherever_it_is_killed():
    """A version is invisible before its shards go. An anchor of which the manifest never came is none: what leads past
    it stays. Readers that knew what is gone say so."""
    whole_store, states = chain(7, anchor_every=3, merge_every=2)
    knows, _ = follower(whole_store)
    moves(knows)
    assert len(knows.manifests) == 7
    del whole_store["00000006/manifest"]  # its writer was killed before it
    whole_store["readers/reader"] = b"6"

    class Killed(BaseException):
        pass

    class Mortal(dict):
        left = 0

        def pop(self, key, default=None):
            if not self.left:
                raise Killed
            self.left -= 1
            return super().pop(key, default)

    done = False
    for deletions in range(99):
        store = Mortal(whole_store)
        store.left = deletions
        try:
            assert prune(store) == 3
            done = True
        except Killed:
            pass
        late, served = follower(store)
        assert moves(late) == 5 and serves(served, states[5])
        for version in late.manifests:
            for link in late.manifests[version]["links"]:
                assert all(shard["key"] in store for shard in link["shards"])
        if done:
            break
    assert done and min(late.manifests) == 3
    knows.store = store
    with pytest.raises(SyncError, match="version 2 is not in the store: not published, or pruned"):
        knows.fetch(2)


def test_a_network_round_trip():
    """Names of a Hugging Face folder, every expert by itself; masters in float32 publish their rounded bits."""
    torch.manual_seed(0)
    model, engine = Transformer(Config.tiny(40)), Transformer(Config.tiny(40)).bfloat16()
    store = {}
    Writer(store).publish(0, parts(model))
    reader = Reader(store, parts(engine))
    assert moves(reader) == 0
    assert any("experts.1.gate_proj.weight" in part.name for part in reader.parts)
    for p, q in zip(model.parameters(), engine.parameters()):
        assert torch.equal(bits(p.detach().bfloat16()), bits(q.detach()))


def test_demo():
    """By hand: |w| lies between 128 and 256 ulps, so the share is about E[min(1, 181 |Δ|/|w|)]; with normal numbers of
    1e-6 and 0.02 that is 0.0362 · E[min(|Δ|/|w|, 1/0.0362)], near 0.035."""
    found = weight_sync.demo(weight_sync.Demo(weights=20_000, versions=9))
    for lr in ("1e-06", "1e-05", "0.0001"):
        assert found[f"exact@{lr}"] == 1
        assert abs(found[f"changed@{lr}"] / found[f"law@{lr}"] - 1) < 0.1
    assert 0.025 < found["changed@1e-06"] < 0.045 < found["changed@1e-05"] < 0.4
    assert found["bits@1e-06"] > found["bits@0.0001"] and found["merged@1e-05"] > 1
