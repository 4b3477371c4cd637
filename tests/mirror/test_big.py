"""A folder that is larger than what a rank may hold: read and written slice by slice. `make test-big` plays the same
with 4 GB, and says by how much each rank's process grew."""

import os
import shutil

import pytest
import torch

from ref.network import Config, Transformer, load_hf, save_hf
from tests.mirror import calls
from tests.mirror.layouts import play
from tests.mirror.workers import ranks

BYTES = float(os.environ.get("ETUDE_TEST_GB", "0.2")) * 1e9
ROOM = min(0.15 * BYTES, 300e6)
"""What a process may hold besides its part of the network and the largest tensor: far less than the rest of the
network."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture of experts of that size in two layers, so that all experts of a layer together are a third of it; and
    the bytes of its largest tensor on disk, an expert's matrix."""
    D, E = 512, 8
    config = Config.tiny(
        512, hidden_size=D, moe_intermediate_size=round(BYTES / 4 / 2 / (3 * D * E)), num_experts=E, num_hidden_layers=2
    )
    path = tmp_path_factory.mktemp("big")
    save_hf(Transformer(config), path / "in", max_shard_bytes=int(BYTES / 3))
    yield path, 4 * D * config.moe_intermediate_size
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def fresh_ranks():
    """What ranks have used before they keep, and it would not count as growth."""
    ranks(2).stop()


@pytest.mark.parametrize("layout", [dict(dp=2, cp=1, ep=1), dict(dp=2, cp=1, ep=2)], ids=str)
def test_no_rank_holds_the_whole(folder, layout):
    path, largest = folder
    for mine, read, written in play(layout, calls.big_folder, path / "in", path / "out", int(BYTES / 3)):
        print(
            f"{layout}: {mine / 1e6:.0f} MB of weights; while it read {read / 1e6:+.0f} MB, while it "
            f"wrote {written / 1e6:+.0f} MB"
        )
        assert 0.4 * BYTES < mine < 0.6 * BYTES
        assert read < largest + ROOM and written < largest + ROOM
    if BYTES < 1e9:
        one, other = (load_hf(path / name).state_dict() for name in ("in", "out"))
        assert all(torch.equal(x, other[name]) for name, x in one.items())
    shutil.rmtree(path / "out")
