"""Twelve optimiser steps on four ranks are those of one; what one layout saves, another reads, bit for bit."""

import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from kernels.gate import excess
from ref import muon
from ref.cpt import next_token_loss
from ref.network import Config, Transformer, load_balancing_loss, load_hf, save_hf
from ref.network.checkpoint import CheckpointError
from scaled.network import checkpoint
from scaled.network import model as scaled_network
from scaled.network.model import load_hf as scaled_load
from scaled.optimise import keep_lines
from scaled.runtime.checkpoint import Checkpoints, checksum
from tests import forks
from tests.mirror import calls
from tests.mirror.layouts import EVERY, NAMES, close, play

FOUR = [dict(dp=4, cp=1, ep=1), dict(dp=2, cp=2, ep=2), dict(dp=1, cp=4, ep=4), dict(dp=4, cp=1, ep=2)]
CONFIG = Config.tiny(
    40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    moe_intermediate_size=8,
)
STEPS, EXACT = 12, 4


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    state = {name: p.detach().double() for name, p in Transformer(CONFIG).named_parameters()}
    first = torch.randint(0, 40, (STEPS, 4, 1), generator=torch.Generator().manual_seed(1))
    return state, (first + torch.arange(16)) % 40  # counting, which can be learnt


def reference(state, batches, dtype, use_muon):
    """One rank: losses of all steps, and the weights after them, flat."""
    model = Transformer(CONFIG).to(dtype)
    model.load_state_dict({name: x.to(dtype) for name, x in state.items()})
    steps = calls.in_own_dtype(muon.optimizers(model, muon_lr=0.01, adamw_lr=1e-3, weight_decay=0.1, use_muon=use_muon))
    losses = []
    for ids in batches:
        out = model(ids, logits=False)
        loss, count = next_token_loss(model, out.hidden, ids)
        loss = loss / count + 0.01 * load_balancing_loss(out.router_logits, out.experts).to(dtype)
        loss.backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([model.get_parameter(name).detach().flatten() for name in state])


@pytest.fixture(scope="module")
def one_rank():
    """`reference`, each played once."""
    held: dict = {}

    def found(state, batches, dtype, use_muon):
        key = len(batches), dtype, use_muon
        if key not in held:
            held[key] = reference(state, batches, dtype, use_muon)
        return held[key]

    return found


@pytest.mark.parametrize("layout", FOUR, ids=str)
@pytest.mark.parametrize("use_muon", [False, True], ids=["adamw", "muon"])
def test_twelve_steps(start, one_rank, layout, use_muon):
    """In float32 by the three-way rule: as near to float64 as one rank is, at most twice as far. In float64, for some
    steps, nothing shows of the layout."""
    state, batches = start
    exact, theirs = (one_rank(state, batches, dtype, use_muon) for dtype in (torch.float64, torch.float32))
    assert exact[0][-1] < exact[0][0] - 0.1  # it learns
    for found, single, wanted in zip(flat(layout, state, batches, torch.float32, use_muon), theirs, exact, strict=True):
        assert excess(found, single, wanted) <= 1
    some = batches[:EXACT]
    for found, wanted in zip(
        flat(layout, state, some, torch.float64, use_muon), one_rank(state, some, torch.float64, use_muon), strict=True
    ):
        close(found, wanted)


def flat(layout, state, batches, dtype, use_muon):
    """What `reference` gives, of many ranks."""
    losses, weights = play(layout, calls.trained, CONFIG, state, batches, dtype, use_muon)
    return losses, torch.cat([weights[name].flatten() for name in state])


@pytest.mark.parametrize("layout", EVERY, ids=NAMES)
def test_one_seed_is_one_network(layout):
    """Whatever the layout; and of the distribution that `ref` draws from."""
    found, wanted = play(layout, calls.drawn, CONFIG, 5), play(dict(dp=2, cp=1, ep=1), calls.drawn, CONFIG, 5)
    if layout["dp"] * layout["cp"] == 1:  # one rank draws as `ref` does
        torch.manual_seed(5)
        wanted = {name: p.detach() for name, p in Transformer(CONFIG).named_parameters()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name, x in found.items():
        std = 1 if x.ndim < 2 else CONFIG.initializer_range / (2 if "o_proj" in name or "down_proj" in name else 1)
        assert x.ndim < 2 and bool((x == 1).all()) or abs(x.std() / std - 1) < 0.2


@pytest.mark.parametrize("after", [dict(dp=2, cp=2, ep=2), dict(dp=1, cp=1, ep=1), dict(dp=1, cp=2, ep=2)], ids=str)
@pytest.mark.parametrize("before", [dict(dp=4, cp=1, ep=4), dict(dp=2, cp=1, ep=1)], ids=str)
def test_a_checkpoint_is_read_by_another_layout(start, before, after, tmp_path):
    """Bit for bit; and training goes on from it, moments included, as if nothing had happened."""
    state, batches = start
    first, saved = play(before, calls.trained, CONFIG, state, batches, torch.float64, False, (tmp_path, 4))
    step, found = play(after, calls.read_back, CONFIG, tmp_path, None, torch.float64)
    assert step == 4 and all(torch.equal(found[name], saved[name]) for name in state)
    assert json.loads((tmp_path / "step-00000004" / "meta.json").read_text())["layout"] == before
    losses, _ = play(after, calls.trained, CONFIG, state, batches, torch.float64, False, (tmp_path, 8))
    close(torch.cat((first, losses)), reference(state, batches[:8], torch.float64, False)[0])


def test_the_same_layout_goes_on_bit_for_bit(start, tmp_path):
    state, batches = start
    layout = dict(dp=2, cp=2, ep=2)
    play(layout, calls.trained, CONFIG, state, batches, torch.float32, True, (tmp_path, 3))
    losses, weights = play(layout, calls.trained, CONFIG, state, batches, torch.float32, True, (tmp_path, 6))
    through, wanted = play(layout, calls.trained, CONFIG, state, batches[:6], torch.float32, True)
    assert torch.equal(losses, through[3:]) and all(torch.equal(weights[name], wanted[name]) for name in wanted)


def damage(path, how):
    if how == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-5] if how == "truncated" else data)


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit"])
def test_a_damaged_shard_is_named_and_the_one_before_still_loads(start, how, tmp_path):
    state, batches = start
    layout = dict(dp=2, cp=1, ep=2)
    for until in (2, 4):
        _, saved = play(layout, calls.trained, CONFIG, state, batches, torch.float32, False, (tmp_path, until))
        if until == 2:
            wanted = saved
    assert Checkpoints(tmp_path).steps() == [2, 4]
    shard = next((tmp_path / "step-00000004").glob("__1_*.distcp"))
    damage(shard, how)
    with pytest.raises(RuntimeError, match=rf"{shard}.*(missing|damaged).*previous checkpoint is of step 2"):
        play(layout, calls.read_back, CONFIG, tmp_path)
    step, found = play(layout, calls.read_back, CONFIG, tmp_path, 2)
    assert step == 2 and all(torch.equal(found[name], wanted[name]) for name in state)


def write_for_ever(folder):
    """One process that writes the same large tensor, step after step."""
    shelf, x = Checkpoints(folder), torch.arange(2_000_000.0)
    for step in range(max(shelf.steps(), default=0) + 1, 10_000):
        shelf.save(step, {"x": x + step})
        shelf.finish()


def test_killed_while_writing(tmp_path):
    """SIGKILL at moments that differ: what stays is a whole checkpoint, and it loads."""
    for pause in (0.0, 0.013, 0.031, 0.05):
        process = forks.begin(write_for_ever, tmp_path)
        seen, deadline = sorted(tmp_path.glob("step-*")), time.monotonic() + 60
        while sorted(tmp_path.glob("step-*")) == seen:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        shelf, x = Checkpoints(tmp_path), {"x": torch.zeros(2_000_000)}
        step = shelf.load(x)["step"]
        assert step == shelf.steps()[-1] and torch.equal(x["x"], torch.arange(2_000_000.0) + step)


def test_what_a_kill_left_half_written_goes(tmp_path):
    """And what it left whole under its old name takes the new one."""
    shelf = Checkpoints(tmp_path)
    for step in (1, 2):
        shelf.save(step, {"x": torch.full((3,), float(step))})
        shelf.finish()
    os.rename(tmp_path / "step-00000002", tmp_path / ".step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000003")
    os.rename(tmp_path / ".step-00000003" / "manifest.json", tmp_path / ".step-00000003" / ".manifest")
    assert Checkpoints(tmp_path).steps() == [1, 2] and not list(tmp_path.glob(".step-*"))


def test_damaged_names_of_tensors_are_named(tmp_path):
    shelf = Checkpoints(tmp_path)
    shelf.save(1, {"x": torch.ones(3)})
    shelf.finish()
    for damage in (b"", b"\x80nonsense"):
        (tmp_path / "step-00000001" / ".metadata").write_bytes(damage)
        with pytest.raises(CheckpointError, match=".metadata is missing or damaged"):
            shelf.names()


class Payload:
    """What a hostile file holds: unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def description(change):
    """`.metadata` with something of it changed."""

    def crafted(path, mark):
        with open(path / ".metadata", "rb") as file:
            found = pickle.load(file)
        change(found, mark)
        (path / ".metadata").write_bytes(pickle.dumps(found))

    return crafted


def in_the_shard(path, mark):
    """A tensor's place there, taken by a payload."""
    torch.save(Payload(mark), path / "__0_0.distcp")

    def point(found, _):
        for place in found.storage_data.values():
            place.offset, place.length = 0, (path / "__0_0.distcp").stat().st_size

    description(point)(path, mark)


def bytes_that_dcp_would_unpickle(path, mark):
    in_the_shard(path, mark)

    def change(found, _):
        found.state_dict_metadata["x"] = metadata.BytesStorageMetadata()
        found.storage_data[metadata.MetadataIndex("x")] = next(iter(found.storage_data.values()))

    description(change)(path, mark)


def of_one_rank(path, mark):
    """Where DCP looks when it finds no metadata of all ranks."""
    (path / ".metadata").unlink()
    (path / "__0.metadata").write_bytes(pickle.dumps(Payload(mark)))


ELSEWHERE = filesystem._StorageInfo("../../elsewhere.distcp", 0, 10)
CRAFTED = {
    "a payload": (
        lambda path, mark: (path / ".metadata").write_bytes(pickle.dumps(Payload(mark))),
        "refers to '.*', which does not describe a",
    ),
    "a payload in the planner's data": (
        description(lambda found, mark: found.planner_data.update(y=Payload(mark))),
        "refers to",
    ),
    "a payload as a name": (
        description(lambda found, mark: found.storage_data.update({Payload(mark): 1})),
        "refers to",
    ),
    "bytes, not tensors": (
        bytes_that_dcp_would_unpickle,
        "refers to 'torch.distributed.checkpoint.metadata.BytesStorageMetadata'",
    ),
    "a payload in a shard": (in_the_shard, "cannot be read"),
    "another folder": (
        description(lambda found, _: found.storage_data.update({next(iter(found.storage_data)): ELSEWHERE})),
        "of its folder",
    ),
    "a list": (
        lambda path, _: (path / ".metadata").write_bytes(pickle.dumps([1])),
        "describes something other than tensors",
    ),
    "one rank's": (of_one_rank, "is missing"),
}


def committed(path):
    """The manifest of what the folder now holds: whoever crafts a file can write that too."""
    names = sorted(one.name for one in path.iterdir() if one.name != "manifest.json")
    (path / "manifest.json").write_text(
        json.dumps({name: [(path / name).stat().st_size, checksum(path / name)] for name in names})
    )


@pytest.mark.parametrize("craft, message", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_checkpoint_runs_nothing(tmp_path, craft, message):
    shelf, x = Checkpoints(tmp_path / "state"), torch.ones(3)
    shelf.save(1, {"x": x})
    shelf.finish()
    craft(shelf.path(1), tmp_path / "mark")
    committed(shelf.path(1))
    with pytest.raises(CheckpointError, match=message) as refused:
        shelf.load({"x": x})
    assert (
        "\n" not in str(refused.value) and str(shelf.path(1)) in str(refused.value) and not (tmp_path / "mark").exists()
    )
    if craft is not in_the_shard:
        with pytest.raises(CheckpointError, match=message):
            shelf.names()


def test_an_optimiser_that_goes_on_has_its_count_where_its_weights_are():
    """The fused AdamW asks for it there."""
    model = torch.nn.Linear(2, 3, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.create_optimizer_state(
        model,
        [optimizer],
        [f"optimizer.model.{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg")],
    )
    assert (
        all(x.device == p.device for p, values in optimizer.state.items() for x in values.values())
        and len(optimizer.state) == 2
    )


def test_on_one_rank_too_the_network_is_the_scaled_one(start, tmp_path):
    """Else what it is told of experts and activations would go unheard."""
    save_hf(Transformer(CONFIG), tmp_path)
    assert type(scaled_load(tmp_path)) is scaled_network.Transformer


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoints(tmp_path).load({})


@pytest.mark.parametrize(
    "layout",
    [
        dict(dp=4, cp=1, ep=4),
        dict(dp=2, cp=2, ep=2),
        dict(dp=4, cp=1, ep=2),
        dict(dp=2, cp=1, ep=1),
        dict(dp=1, cp=1, ep=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hugging_face_folders(layout, tied, tmp_path):
    """Read by many ranks and written by them again, in files of at most 20 kB: the same bits, and transformers opens
    it."""
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    config = replace(CONFIG, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = Transformer(config)
    save_hf(model, tmp_path / "in")
    found = play(layout, calls.through_a_folder, tmp_path / "in", tmp_path / "out", torch.float32)
    again = load_hf(tmp_path / "out")
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p) and torch.equal(again.get_parameter(name), p)
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("model-*")) < 30_000
    ids = torch.randint(0, 40, (1, 9))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    close(theirs.double().round(decimals=4), again(ids).logits.double().round(decimals=4), scale=1e7)


def test_a_folder_of_another_network_is_named(tmp_path):
    torch.manual_seed(0)
    save_hf(Transformer(CONFIG), tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match="model.safetensors is damaged"):
        play(dict(dp=2, cp=1, ep=2), calls.through_a_folder, tmp_path / "in", tmp_path / "out", torch.float32)


def test_metrics_of_a_training_that_goes_on_are_cut_back(tmp_path):
    """To the step that it goes on from; what a kill tore goes with what is beyond. Lines that stay are the same to the
    last digit."""
    path = tmp_path / "metrics" / "cpt.jsonl"
    keep_lines(path, 3)
    assert path.read_text() == ""
    lines = [
        json.dumps({"step": step, "loss": 0.1 / step, "norm": float("nan"), "rate": 1e-17}) + "\n"
        for step in (1, 2, 3, 4)
    ]
    for rest in ("", '{"step": 5, "lo'):
        path.write_text("".join(lines) + rest)
        keep_lines(path, 3)
        assert path.read_text() == "".join(lines[:3])
