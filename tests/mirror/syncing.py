"""What ranks are asked to do with weights in a store. Every call gets whole versions, and publishes or fills this
rank's rows."""

import os
from pathlib import Path

import torch

from ref import weight_sync as ref
from ref.engine.sampler import Sampler
from ref.network import Config
from ref.network import fast as whole_network
from ref.rl import Settings
from scaled import rl, weight_sync
from scaled.network import model as network
from scaled.runtime import sharding
from scaled.runtime.store import open_store

__all__ = ["Parted", "elsewhere", "encoded", "failing", "follow", "loaded", "publish", "rows_of", "tried", "versions"]


class Parted:
    """A network in bfloat16 on this rank's mesh, or whole."""

    def __init__(self, config: Config, whole: bool = False):
        self.whole = whole
        self.model = (whole_network if whole else network).Transformer(config).to(torch.bfloat16)

    @torch.no_grad()
    def put(self, state: dict) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(state[name]) if self.whole else sharding.load_slice(name, p, state[name])

    def parts(self) -> list[ref.Part]:
        return (ref if self.whole else weight_sync).parts(self.model)

    def state(self) -> dict:
        """Whole tensors as bit patterns."""
        found = (
            ((name, p.detach()) for name, p in self.model.named_parameters())
            if self.whole
            else sharding.wholes(self.model)
        )
        return {name: x.view(torch.int16).clone() for name, x in found}


def versions(config: Config, seed: int, n: int, share: float = 0.05) -> list[dict]:
    """Versions of a network: a share of weights takes any other bits, NaN among them."""
    torch.manual_seed(seed)
    states = [{name: p.detach().bfloat16() for name, p in whole_network.Transformer(config).named_parameters()}]
    for _ in range(n - 1):
        last, new = states[-1], {}
        for name, x in last.items():
            other = torch.randint(-(2**15), 2**15, x.shape).to(torch.int16)
            new[name] = torch.where(torch.rand(x.shape) < share, other, x.view(torch.int16)).view(torch.bfloat16)
        states.append(new)
    return states


def publish(
    address: str, config: Config, seed: int, n: int, first: int = 0, how: dict | None = None, behind: bool = False
) -> dict:
    """Publishes versions first to n − 1; returns the last manifest, without its shards. behind: in the background."""
    here, manifest = Parted(config), {}
    writer = weight_sync.Writer(open_store(address, timeout=2.0), **(how or {}))
    for version, state in enumerate(versions(config, seed, n)):
        here.put(state)
        if version < first:
            continue
        if behind:
            writer.start(version, here.parts())
            here.put({name: torch.zeros_like(x) for name, x in state.items()})  # training goes on meanwhile
        else:
            manifest = writer.publish(version, here.parts())
    writer.finish()
    return {key: value for key, value in manifest.items() if key != "links"}


def follow(address: str, config: Config, wants: list, whole: bool = False) -> tuple[list, dict, int]:
    """Serves these versions in turn. Which, with what weights at last, and how many shards this rank read of how
    many."""
    here = Parted(config, whole)
    reader = weight_sync.Reader(open_store(address, timeout=2.0), here.parts())
    read, get = [], reader.get
    reader.get = lambda shard: read.append(shard["key"]) or get(shard)
    served = []
    for want in wants:
        reader.fetch(want)
        served.append(reader.swap())
    assert len(set(read)) == len(read)
    return served, here.state(), len(read) if whole else 0


def tried(address: str, config: Config, have: int, want: int) -> tuple[int | None, dict]:
    """Serves `have`, then tries to serve `want`: what it serves at last."""
    here = Parted(config)
    reader = weight_sync.Reader(open_store(address), here.parts())
    reader.fetch(have)
    reader.swap()
    try:
        reader.fetch(want)
        reader.swap()
    except weight_sync.SyncError:
        pass
    return reader.version, here.state()


def loaded(folder: str, config: Config, seed: int, n: int) -> tuple[list[float], bool, list[str]]:
    """What RL does where `sync` is set: after each version, whether this rank's sampler has the network's weights,
    rounded."""
    here, exact, sizes = Parted(config), True, []
    sampler = Sampler(whole_network.Transformer(config), torch.bfloat16)
    load = rl.synced(
        rl.Rl(sync="weights", length=128, cp=1, ep=1, rl=Settings(max_len=64)), Path(folder), sampler, here.model
    )
    for version, state in enumerate(versions(config, seed, n)):
        here.put(state)
        sizes.append(load(version)["sync_bytes"])
        mine = {name: p.detach().bfloat16().view(torch.int16) for name, p in sampler.model.named_parameters()}
        exact &= sampler.version == version and all(torch.equal(mine[name], x) for name, x in here.state().items())
    return sizes, exact, sorted({key.partition("/")[0] for key in open_store(str(Path(folder) / "weights"))})


def elsewhere(environment: dict, call, *args):
    """call(*args), with these variables in the environment of this rank."""
    os.environ.update(environment)
    return call(*args)


def rows_of(config: Config) -> list[tuple[str, int, int]]:
    """This rank's rows."""
    return [part.place() for part in Parted(config).parts()]


def encoded(old, new):
    """The delta as the twin finds it, and as the reference does."""
    return weight_sync.encode_delta(old, new), ref.encode_delta(old, new)


def failing(address: str, config: Config, seed: int, rank: int) -> list:
    """Version 1 cannot be written by one rank; all learn it, and publish it again. Then one rank reads a store with a
    hole."""
    here, said = Parted(config), []
    states = versions(config, seed, 3)
    writer = weight_sync.Writer(open_store(address))
    put = writer.upload_shard

    def broken(key, blob):
        raise OSError("disk full")

    here.put(states[0])
    writer.publish(0, here.parts())
    here.put(states[1])
    if writer.rank == rank:
        writer.upload_shard = broken
    try:
        writer.publish(1, here.parts())
    except weight_sync.SyncError as error:
        said.append(str(error))
    writer.upload_shard = put
    writer.publish(1, here.parts())
    reader = weight_sync.Reader(open_store(address), here.parts())
    get = reader.get

    def torn(shard):
        if reader.rank == rank and "delta" in shard["key"]:
            raise weight_sync.SyncError("torn")
        return get(shard)

    reader.fetch(0)
    reader.swap()
    reader.get = torn
    try:
        reader.fetch(1)
    except weight_sync.SyncError as error:
        said.append(str(error))
    said.append(str(reader.version))
    here.put(states[2])
    writer.publish(25, here.parts())
    reader.fetch(25)
    said.append(str(reader.swap()))
    assert weight_sync.prune(reader.store) == 2
    return said
