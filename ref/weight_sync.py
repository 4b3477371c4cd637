"""Weight sync: the trainer publishes what changed in its bfloat16 weights, and engines rebuild the same bits from the
chain.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1 and §6.2. Why most bits stay: arXiv:2602.03839.

RL runs at learning rates near 1e-6. A weight of 0.02 has a bfloat16 neighbour at a distance of 1.2e-4, and one step
moves its float32 master by about 1e-6: the rounded weight changes in one step out of a hundred. If the master lies
anywhere between two rounding boundaries with equal probability, a move by Δ crosses one with probability |Δ|/ulp, hence

    changed share = E[min(1, |Δ|/ulp(w))]                                   `changed_share`

So a trainer sends differences. Bits are compared, not numbers: −0 and 0 are equal as numbers, and a NaN is not equal to
itself. For each changed weight it sends where and how far (`ref/weight_codec.py`): the gap since the last changed
weight, and the step. Steps count along one line of all 65,536 bit patterns: … −1, −0, 0, 1, …, ∞, NaNs. They add up, so
eight deltas merge into one without the weights.

A store maps keys to bytes. A version is what its manifest says, and the manifest is created last, so an unfinished
version is invisible:

    00000007/delta-R-DIGEST      rank R's rows, from version 6
    00000008/merged-R-DIGEST     from version 0, for a reader that is late
    00000025/anchor-R-DIGEST     all bits
    00000025/manifest            bases, keys, sizes, digests of shards and of the *resulting* weights
    readers/NAME                 the version that a reader serves

The trap: a difference must be applied exactly once, to exactly its base. A reader therefore works on a copy, checks the
digest of the result, and only then swaps. A digest is a sum over rows, so readers that hold other rows than the writers
did can check it together.

Where this file departs from the report
1. The report names neither codec nor digest. Ours are gap and step under zstd, and BLAKE2b.
2. Full anchors, merged deltas, and the choice of the cheapest way to a version (`cheapest`) are ours.
3. Everything here is done in turn. The report compresses, uploads and loads in the background.

Run it
    etude run weight-sync --scale small      seconds; the same as: python -m ref.weight_sync
    etude figure weight-sync                 real RL steps: sizes, the law, a chain; wants runs/small
    etude run weight-sync --scale full       scaled/weight_sync.py: every rank publishes its own rows after each step of
                                             RL

Glossary
    symbol    variable     shape     where
    Δ         updates      any       what an optimiser step adds to the float32 masters
    ulp(w)    ulp          any       distance of neighbouring bfloat16 numbers at w
    n, C      size         scalar    weights, and changed weights
    –         positions    C         of changed weights in the flattened rows, ascending
    –         steps        C         new − old, in bfloat16 numbers
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ref.checks import parse_json
from ref.network.checkpoint import tensor_parts
from ref.weight_codec import SyncError, apply_delta, encode_delta, merge_deltas, pack, pack_full, unpack, unpack_full

__all__ = [
    "Demo",
    "Part",
    "Reader",
    "SyncError",
    "Writer",
    "apply_delta",
    "changed_share",
    "demo",
    "digest",
    "encode_delta",
    "merge_deltas",
    "pack",
]
__all__ += ["parts", "prune", "ulp", "unpack"]


# The law.


def ulp(weights: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Distance of neighbouring bfloat16 numbers at |w|, float64: 2^(e−7) where 2^e ≤ |w| < 2^(e+1), and 2^−133 below
    2^−126."""
    exponent = torch.frexp(weights.double())[1].clamp(min=-125)  # e + 1, where 2^e ≤ |w| < 2^(e+1)
    # ulp(w) = 2^(e−7)
    return torch.ldexp(torch.ones_like(weights, dtype=torch.float64), torch.where(weights == 0, -125, exponent) - 8)


def changed_share(weights: Float[Tensor, "*shape"], updates: Float[Tensor, "*shape"]) -> float:
    """Expected share of bfloat16 weights that one update changes: the mean of min(1, |Δ|/ulp(w)). It holds where
    masters lie evenly between rounding boundaries. Masters just loaded from bfloat16 do not: they lie in the middle,
    and small updates change nothing at first."""
    return (updates.double().abs() / ulp(weights)).clamp(max=1).mean().item()  # E[min(1, |Δ|/ulp(w))]


# Rows of weights, and their digest.


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive rows of one tensor, in the names and shapes of a Hugging Face folder."""

    name: str
    """The tensor."""
    shape: tuple[int, ...]
    """Its full shape."""
    first: int
    """The first of these rows: places along the first dimension."""
    weights: Tensor
    """The rows themselves. A reader's `swap` writes into them."""

    @property
    def rows(self) -> int:
        return len(self.weights) if self.shape else 1

    def bits(self) -> Tensor:
        """The weights rounded to bfloat16, flat; a copy only where needed."""
        return self.weights.detach().to(torch.bfloat16).flatten()

    def place(self) -> tuple[str, int, int]:
        return self.name, self.first, self.rows


def parts(model: nn.Module) -> list[Part]:
    """Every tensor of a network, whole."""
    all_parts = []
    for name, param in model.named_parameters():
        for part, index in tensor_parts(name, tuple(param.shape)).items():
            weights = param.detach()[index]
            all_parts.append(Part(part, tuple(weights.shape), 0, weights))
    return all_parts


def digest(part: Part) -> int:
    """128 bits that change with any bit of the rows, with their order, and with their place. Rows may be summed by
    whoever holds them: the digest of a tensor is the sum over its parts, modulo 2^128."""
    if not part.rows:
        return 0
    rows = part.bits().cpu().view(torch.int16).numpy().reshape(part.rows, -1).view(np.uint8)
    hashes = (
        hashlib.blake2b(row.data, digest_size=16, salt=row_number.to_bytes(16, "little"))
        for row_number, row in enumerate(rows, part.first)
    )
    return sum(int.from_bytes(row_hash.digest(), "little") for row_hash in hashes) % 2**128  # Σ over rows, modulo 2^128


def combined(
    part_digests: Iterable[tuple[tuple[str, int, int], int]], shapes: Mapping[str, Sequence[int]], twice: bool = True
) -> dict[str, str]:
    """Digests of whole tensors from those of parts. Raises SyncError unless the parts cover every row of every tensor
    that they name exactly once. twice: a part that several ranks hold is fine, and counts once."""
    digest_by_place: dict[tuple[str, int, int], int] = {}
    for place, value in part_digests:
        if place in digest_by_place and not twice:
            raise SyncError(f"rows {place[1]} to {place[1] + place[2]} of {place[0]} are published by two ranks")
        if digest_by_place.setdefault(place, value) != value:
            raise SyncError(f"two ranks hold other bits in rows {place[1]} to {place[1] + place[2]} of {place[0]}")
    ends, sums = dict[str, int](), dict[str, int]()
    for (name, first, rows), value in sorted(digest_by_place.items()):
        if first != ends.get(name, 0):
            raise SyncError(
                f"rows {min(first, ends.get(name, 0))} to {max(first, ends.get(name, 0))} of {name} "
                f"are held by none, or by two"
            )
        ends[name], sums[name] = first + rows, sums.get(name, 0) + value
    for name, end in ends.items():
        if name not in shapes or end != (shapes[name][0] if shapes[name] else 1):
            raise SyncError(f"of {name} {end} rows are held; its shape is {list(shapes.get(name, ()))}")
    return {name: f"{value % 2**128:032x}" for name, value in sums.items()}


# The chain.


def hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_manifest(data: bytes) -> dict:
    seal, _, body = data.partition(b"\n")
    if seal.decode(errors="replace") != hashed(body):
        raise SyncError("the manifest is damaged")
    return parse_json(body)


class SingleRank:
    """What many ranks would say to each other: `scaled/weight_sync.py` overrides it."""

    rank = 0
    encode, apply = staticmethod(encode_delta), staticmethod(apply_delta)

    def gather_objects(self, value):
        """What every rank said, by rank."""
        return [value]


class Writer(SingleRank):
    """Publishes versions. It keeps the bits of the last one, which move on only once the manifest of the next one
    stands."""

    def __init__(self, store: MutableMapping[str, bytes], anchor_every: int = 25, merge_every: int = 8, level: int = 1):
        """anchor_every: versions from one full anchor to the next; the first version of a writer is always one.
        merge_every: deltas that a merged one replaces. level: that of zstd. `store.setdefault` must be atomic, as that
        of a dict is."""
        if anchor_every < 1 or merge_every < 2:
            raise ValueError(
                f"anchor_every must be at least 1 and merge_every at least 2; got {anchor_every} and {merge_every}"
            )
        self.store, self.anchor_every, self.merge_every, self.level = store, anchor_every, merge_every, level
        self.version: int | None = None
        self.base_weights: list[Tensor] = []
        self.recent: list[tuple[int, tuple[Tensor, Tensor]]] = []
        """Bases and deltas of the last versions."""

    def publish(self, version: int, parts: Sequence[Part]) -> dict:
        """Writes a version, and returns its manifest once it is visible. Raises SyncError if it does not become so:
        then nothing has moved, and it can be published again. Raises ValueError for a version that is not above the
        last, and for other rows than before."""
        if self.version is not None and version <= self.version:
            raise ValueError(f"version {version} must be above {self.version}, the last one")
        if self.base_weights and [len(tensor) for tensor in self.base_weights] != [
            part.weights.numel() for part in parts
        ]:
            raise ValueError("parts must be the rows that the last version had, in the same order")
        new_weights, recent = [part.bits() for part in parts], self.recent
        try:
            links: list[tuple[str, int | None, bytes]] = []
            if self.version is not None:
                delta = self.difference(new_weights)
                recent = [*recent, (self.version, delta)][-self.merge_every :]
                links.append(("delta", self.version, pack(*delta, sum(map(len, new_weights)), self.level)))
                if version % self.merge_every == 0 and len(recent) == self.merge_every:
                    links.append(
                        (
                            "merged",
                            recent[0][0],
                            pack(*merge_deltas([d for _, d in recent]), sum(map(len, new_weights)), self.level),
                        )
                    )
            if self.version is None or version % self.anchor_every == 0:
                links.append(("anchor", None, pack_full(new_weights, self.level)))
            places = [part.place() for part in parts]
            shards = [
                (kind, base, self.upload_shard(f"{version:08d}/{kind}-{self.rank}", blob) | {"parts": places})
                for kind, base, blob in links
            ]
            report = (
                None,
                shards,
                [(part.place(), digest(part)) for part in parts],
                {part.name: part.shape for part in parts},
            )
        except Exception as error:  # whatever it is: the other ranks must hear of it, or they would wait forever
            report = f"{type(error).__name__}: {error}", [], [], {}
        for rank, (failure, *_) in enumerate(reports := self.gather_objects(report)):
            if failure:
                raise SyncError(
                    f"version {version} was not published: rank {rank} could not write its rows ({failure})"
                )
        manifest = self.commit(version, reports)
        self.base_weights = [tensor.clone() for tensor in new_weights]
        self.version, self.recent = version, recent
        return manifest

    def difference(self, new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Delta of all rows, laid behind each other."""
        deltas, offset = [(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))], 0
        for a, b in zip(self.base_weights, new, strict=True):
            positions, steps = self.encode(a, b)
            deltas.append((positions.cpu() + offset, steps.cpu()))
            offset += len(b)
        return torch.cat([part_positions for part_positions, _ in deltas]), torch.cat([steps for _, steps in deltas])

    def upload_shard(self, key: str, blob: bytes) -> dict:
        """A shard under a name that holds its digest, so that nobody's attempt overwrites another's."""
        seal = hashed(blob)
        self.store[f"{key}-{seal[:12]}"] = blob
        return {"key": f"{key}-{seal[:12]}", "bytes": len(blob), "digest": seal}

    def commit(self, version: int, reports: Sequence[tuple]) -> dict:
        """Rank 0 creates the manifest, unless there is one; all learn what came of it."""
        failure, manifest = None, {}
        if self.rank == 0:
            shapes = {name: list(shape) for *_, rank_shapes in reports for name, shape in rank_shapes.items()}
            try:
                digests = combined(
                    (part_digest for _, _, digests, _ in reports for part_digest in digests), shapes, twice=False
                )
                links = [
                    {"kind": kind, "base": base, "shards": [shards[link_number][2] for _, shards, *_ in reports]}
                    for link_number, (kind, base, _) in enumerate(reports[0][1])
                ]
                body = json.dumps({"version": version, "shapes": shapes, "digests": digests, "links": links}).encode()
                data = hashed(body).encode() + b"\n" + body
                manifest = read_manifest(self.store.setdefault(f"{version:08d}/manifest", data))
                if manifest["digests"] != digests:
                    failure = "another writer has published it, with other bits"
            except Exception as error:
                failure = str(error)
        failure, manifest = self.gather_objects((failure, manifest))[0]
        if failure:
            raise SyncError(f"version {version} was not published: {failure}")
        return manifest


def cheapest(manifests: Mapping[int, dict], have: int | None, want: int, bad: set) -> list[tuple[int, int]] | None:
    """The way with the fewest bytes from version `have`, or from nothing, to `want`: (version, number of its link) in
    order. None if there is none without links that are `bad`."""
    best: dict[int | None, tuple[int, list]] = {None: (0, [])} | ({} if have is None else {have: (0, [])})
    for version in sorted(candidate for candidate in manifests if candidate <= want and candidate != have):
        for link_number, link in enumerate(manifests[version]["links"]):
            if (version, link_number) not in bad and link["base"] in best:
                base_cost, path = best[link["base"]]
                cost = base_cost + sum(shard["bytes"] for shard in link["shards"])
                if version not in best or cost < best[version][0]:
                    best[version] = cost, [*path, (version, link_number)]
    return best[want][1] if want in best else None


class Reader(SingleRank):
    """Follows the chain. `fetch` builds the next version beside the one that serves; `swap` puts it in its place."""

    def __init__(self, store: MutableMapping[str, bytes], parts: Sequence[Part], name: str = "reader"):
        """parts: the rows to fill; other rows than a writer's may be asked for. name: under which `swap` says what it
        serves."""
        self.store, self.parts, self.name = store, list(parts), name
        self.version: int | None = None
        self.weights: list[Tensor] = []
        self.manifests: dict[int, dict] = {}
        self.staged_weights: tuple[int, list[Tensor]] | None = None

    def read_manifests(self) -> dict[int, str]:
        """Reads manifests that are new; returns what is wrong with the others, by version."""
        manifest_keys = [key for key in self.store if key.endswith("/manifest")]
        versions = {int(key.partition("/")[0]): key for key in manifest_keys if key.partition("/")[0].isdigit()}
        self.manifests = {version: manifest for version, manifest in self.manifests.items() if version in versions}
        errors = {}
        for version in sorted(versions.keys() - self.manifests.keys()):
            try:
                self.manifests[version] = read_manifest(self.store[versions[version]])
            except (SyncError, KeyError, OSError) as error:
                errors[version] = f"version {version} cannot be read: {error}"
        return errors

    def fetch(self, want: int | None = None) -> int:
        """Builds version `want`, by default the newest, and checks its digest. It returns the version, and serves
        nothing yet. Where a shard is damaged or missing, it takes another way, from the nearest anchor if need be.
        Raises SyncError if there is none."""
        state: tuple = (None, {}, {})
        if self.rank == 0:
            try:
                errors = self.read_manifests()
                state = None, self.manifests, errors
            except OSError as error:
                state = f"the store does not answer: {error}", {}, {}
        rank_reports = self.gather_objects((self.version, state))
        outage, manifests, errors = rank_reports[0][1]
        have = self.version if all(version == self.version for version, _ in rank_reports) else None
        if outage:
            raise SyncError(outage)
        if want is None:
            want = max(manifests, default=None)
            newer_versions = [version for version in errors if want is None or version > want]
            if want is None or want == have and newer_versions:
                raise SyncError(errors[newer_versions[0]] if newer_versions else "the store holds no version yet")
        if want not in manifests:
            raise SyncError(errors.get(want, f"version {want} is not in the store: not published, or pruned"))
        bad_links, reason = set[tuple[int, int]](), f"no delta or anchor in the store leads to version {want}"
        while want != have:
            path = cheapest(manifests, have, want, bad_links)
            if path is None:
                raise SyncError(reason)
            num_applied, failure, shadow, sums = 0, None, [tensor.clone() for tensor in self.weights], []
            try:
                for version, link_number in path:
                    shadow = self.follow(manifests[version], link_number, shadow)
                    num_applied += 1
                new_parts = [
                    replace(part, weights=tensor.view(part.weights.shape)) for part, tensor in zip(self.parts, shadow)
                ]
                sums = [(part.place(), digest(part)) for part in new_parts]
            except Exception as error:
                failure = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            rank_reports = self.gather_objects((failure, num_applied, sums))
            failures = [(step, text) for text, step, _ in rank_reports if text]
            if not failures:
                try:
                    digests = combined(
                        (part_digest for *_, sums in rank_reports for part_digest in sums), manifests[want]["shapes"]
                    )
                except SyncError as error:
                    raise SyncError(f"version {want} cannot be checked: {error}") from None
                mismatches = [name for name, value in digests.items() if manifests[want]["digests"][name] != value]
                if not mismatches:
                    self.staged_weights = want, shadow
                    return want
                failures = [(0, f"version {want} came out with other bits than the trainer has in {mismatches[0]}")]
                version, link_number = path[0]
                # The rows held may be what is wrong: now from an anchor
                if manifests[version]["links"][link_number]["base"] is not None:
                    have, reason = None, failures[0][1]
                    continue
            step, reason = min(failures)
            bad_links.add(path[step])
        self.staged_weights = None
        return want

    def follow(self, manifest: dict, link_number: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """The rows after one link; of its shards only those are fetched that hold some of them."""
        link, shapes, out = manifest["links"][link_number], manifest["shapes"], list(rows)
        if link["base"] is None:
            out = [
                torch.empty(part.weights.numel(), dtype=torch.bfloat16, device=part.weights.device)
                for part in self.parts
            ]
        missing = [part.rows for part in self.parts]
        for part in self.parts:
            if list(part.shape) != shapes.get(part.name):
                raise SyncError(
                    f"{part.name} has shape {list(part.shape)}; version {manifest['version']} has "
                    f"{shapes.get(part.name)}"
                )
        part_indices: dict[str, list[int]] = {}
        for index, part in enumerate(self.parts):
            part_indices.setdefault(part.name, []).append(index)
        for shard in link["shards"]:
            cuts, offset = [], 0
            for name, first, count in shard["parts"]:
                width = int(np.prod(shapes[name][1:]))
                for index in part_indices.get(name, ()):
                    low, high = (
                        max(first, self.parts[index].first),
                        min(first + count, self.parts[index].first + self.parts[index].rows),
                    )
                    if low < high:
                        cuts.append(
                            (
                                index,
                                offset + (low - first) * width,
                                (low - self.parts[index].first) * width,
                                (high - low) * width,
                            )
                        )
                        missing[index] -= high - low
                offset += count * width
            if cuts:
                self.patch(out, self.get(shard), offset, cuts, link["base"] is None)
        if any(missing):
            raise SyncError(
                f"version {manifest['version']} has no shard with some rows of "
                f"{self.parts[np.flatnonzero(missing)[0]].name}"
            )
        return out

    def patch(
        self, out: list[Tensor], blob: bytes, size: int, cuts: Sequence[tuple[int, int, int, int]], full: bool
    ) -> None:
        """Applies a shard of `size` weights. cuts: (which rows, where in the shard, where in the rows, how many
        weights)."""
        if full:
            bits = unpack_full(blob, size)
            for index, shard_start, row_start, count in cuts:
                out[index][row_start : row_start + count].copy_(bits[shard_start : shard_start + count])
            return
        positions, steps = unpack(blob, size)
        for index, shard_start, row_start, count in cuts:
            a, b = torch.searchsorted(positions, torch.tensor([shard_start, shard_start + count])).tolist()
            local_positions, local_steps = (x.to(out[index].device) for x in (positions[a:b] - shard_start, steps[a:b]))
            out[index][row_start : row_start + count].view(torch.int16).copy_(
                self.apply(out[index][row_start : row_start + count], local_positions, local_steps).view(torch.int16)
            )

    def get(self, shard: Mapping) -> bytes:
        """A shard whose digest is right; asked for twice."""
        problem = ""
        for _ in range(2):
            try:
                blob = self.store[shard["key"]]
            except (KeyError, OSError) as error:
                problem = "is missing" if isinstance(error, KeyError) else f"cannot be read ({error})"
                continue
            if hashed(blob) == shard["digest"]:
                return blob
            length = f"{len(blob)} of {shard['bytes']} bytes"
            problem = f"is damaged: {length if len(blob) != shard['bytes'] else 'other bytes than were written'}"
        raise SyncError(f"shard {shard['key']} {problem}")

    def swap(self) -> int | None:
        """Puts what `fetch` built in place of the weights that serve, which takes no more than a copy, and says so in
        the store. Nothing may compute with the weights meanwhile. Returns the version that serves from now on."""
        if self.staged_weights is not None:
            self.version, self.weights = self.staged_weights
            self.staged_weights = None
            for part, x in zip(self.parts, self.weights):
                part.weights.copy_(x.view(part.weights.shape))
            if self.rank == 0:
                with contextlib.suppress(OSError):  # unheard, it only makes pruning wait
                    self.store[f"readers/{self.name}"] = str(self.version).encode()
        return self.version


def prune(store: MutableMapping[str, bytes]) -> int:
    """Deletes what lies behind the newest anchor that is not newer than the oldest version a reader serves; returns the
    number of versions. A reader that is gone for good keeps them until its key readers/NAME is deleted. Raises
    SyncError for a key there that is no version."""
    keys = list(store)
    try:
        served_versions = [int(store[key]) for key in keys if key.startswith("readers/")]
    except (ValueError, KeyError) as error:
        raise SyncError(f"nothing is pruned: a reader's version cannot be read ({error})") from None
    versions: dict[int, list[str]] = {}
    for key in keys:
        if key.partition("/")[0].isdigit():
            versions.setdefault(int(key.partition("/")[0]), []).append(key)
    anchors = [
        v
        for v, version_keys in versions.items()
        if any("/anchor-" in key for key in version_keys) and any(key.endswith("/manifest") for key in version_keys)
    ]
    last = max((v for v in anchors if served_versions and v <= min(served_versions)), default=None)
    stale_versions = [v for v in versions if last is not None and v < last]
    for version in stale_versions:
        for key in sorted(
            versions[version], key=lambda key: not key.endswith("/manifest")
        ):  # without its manifest it is invisible
            store.pop(key, None)
    return len(stale_versions)


@dataclass(frozen=True)
class Demo:
    """A chain of versions of made-up weights, published and followed."""

    weights: int = 300_000
    """Weights, normal."""
    std: float = 0.02
    """Their standard deviation."""
    lrs: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    """Sizes of updates: each moves a weight by a normal number of this standard deviation."""
    versions: int = 17
    """Versions of each chain after the first."""
    seed: int = 0
    """Seed of all random numbers."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each size of updates: the changed share and the law's, bits for each changed weight, how much smaller a delta
    is than the weights, and than its share of a merged one; and whether a reader that comes late has the trainer's
    bits."""
    metrics: dict[str, float] = {}
    for number, lr in enumerate(config.lrs, 1):
        generator = torch.Generator().manual_seed(config.seed)
        masters = config.std * torch.randn(config.weights // 100, 100, generator=generator)
        shape, store = tuple(masters.shape), dict[str, bytes]()
        writer, served_weights = Writer(store), torch.zeros(shape, dtype=torch.bfloat16)
        reader, changed_shares, expected_shares, sizes, merged_sizes = (
            Reader(store, [Part("w", shape, 0, served_weights)]),
            [],
            [],
            [],
            [],
        )
        for version in range(config.versions + 1):
            previous_weights = masters.bfloat16()
            if version:
                update = lr * torch.randn(shape, generator=generator)
                expected_shares.append(changed_share(masters, update))
                masters = masters + update
                changed_shares.append((masters.bfloat16() != previous_weights).double().mean().item())
            manifest = writer.publish(version, [Part("w", shape, 0, masters)])
            for link in manifest["links"]:
                {"delta": sizes, "merged": merged_sizes}.get(link["kind"], []).append(
                    sum(shard["bytes"] for shard in link["shards"])
                )
            if version in (0, config.versions):
                reader.fetch()
                reader.swap()
        row = {
            "changed": float(np.mean(changed_shares)),
            "law": float(np.mean(expected_shares)),
            "bits": 8 * sum(sizes) / (sum(changed_shares) * masters.numel()),
            "smaller": 2 * masters.numel() / float(np.mean(sizes)),
            "merged": (
                writer.merge_every * float(np.mean(sizes)) / float(np.mean(merged_sizes)) if merged_sizes else 1.0
            ),
            "exact": float(torch.equal(served_weights.view(torch.int16), masters.bfloat16().view(torch.int16))),
        }
        metrics |= {f"{name}@{lr:g}": value for name, value in row.items()}
        log(number, len(config.lrs), lr=lr, **row)
    return metrics


if __name__ == "__main__":
    print(demo())
