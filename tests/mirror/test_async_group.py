"""The trainer of asynchronous RL as a group of ranks: what one process would train, a store that workers with whole
tensors read, and a run that outlives its ranks."""

import copy
import dataclasses
import itertools
import json
import os
import select
import signal
import socket

import pytest
import torch

from kit.disk import read_lines
from kit.settings import RunError
from recipe.asynchronous import timeline as async_timeline
from ref import weight_sync
from ref.async_rl import Rules
from ref.network import Transformer, load_hf, save_hf
from scaled.async_rl.group import interface_to, restored
from scaled.async_rl.local import Plan, play
from scaled.runtime.store import open_store
from tests.mirror.async_parts import check_watched, watched
from tests.mirror.group_parts import FAULTS, Grouped, plain, replayed
from tests.mirror.layouts import close
from tests.mirror.test_async_command import FEW
from tests.mirror.test_async_rl import events
from tests.mirror.workers import ranks
from tests.ref.test_async_rl import audit

PARTS = Grouped()


def left(folder) -> tuple[int, dict]:
    """The steps of a run, and the weights that its trainer saved last."""
    network = PARTS.whole()
    return restored(folder, network), {name: p.detach() for name, p in network.named_parameters()}


def served(folder) -> tuple[int, dict, set]:
    """The newest version in the store as a worker reads it, which holds whole tensors; and how many ranks wrote each
    version."""
    network = PARTS.whole().bfloat16().requires_grad_(False)
    reader = weight_sync.Reader(open_store(str(folder / "weights")), weight_sync.parts(network))
    version = reader.fetch()
    reader.swap()
    written = {len(link["shards"]) for manifest in reader.manifests.values() for link in manifest["links"]}
    return version, dict(network.named_parameters()), written


@pytest.fixture(scope="module")
def synchronous():
    """The weights of the loop without services, by `ref.rl.improve`, and the digests of its groups' records."""
    return plain(PARTS, Rules(4, 0, 3))


def check_synchronous(folder, synchronous, layout: dict, play) -> None:
    """Weights within 1e-10 in float64, whatever is cut over ranks; what workers get, they round to bfloat16, so
    rollouts are the same to the bit."""
    weights, digests = synchronous
    said, group = [], PARTS.group(**layout)
    play(Plan(folder, Rules(4, 0, 3), PARTS, 1, slots=8, rollouts=2, group=group, watch=watched), say=said.append)
    assert said == check_watched(folder, 3)
    version, mine = left(folder)
    assert version == 3 and mine.keys() == weights.keys()
    for name, x in weights.items():
        close(mine[name], x)
    assert {
        line["groups"][0]: line["digest"] for line in read_lines(folder / "journal.jsonl") if line["kind"] == "ready"
    } == digests
    version, theirs, written = served(folder)
    assert version == 3 and written == {layout.get("dp", 1) * layout.get("cp", 1)}
    assert all(x.equal(mine[name].bfloat16()) for name, x in theirs.items())
    assert not all(
        x.equal(p.bfloat16()) for (name, x), p in zip(theirs.items(), PARTS.whole().parameters(), strict=True)
    )


def check_killed(folder, play) -> list[str]:
    """Other ranks than the first, and the first, in the middle of a run with tools: all ranks begin again together, no
    group is trained on twice, and the journal replays to the same bits on as many ranks. Returns the process that was
    seen to die first, each time."""
    parts, rules, alive, begun = Grouped(seconds=0.02, steps=8), Rules(4, 2, 8), {}, []
    kills = {2: "trainer-1", 4: "trainer", 5: "trainer-1"}

    def started(name, process):
        begun.append(name)
        alive[name] = os.pidfd_open(process.pid)

    def kill(step, figures):
        if step in kills:
            signal.pidfd_send_signal(alive[kills.pop(step)], signal.SIGKILL)

    plan = Plan(folder, rules, parts, 2, slots=6, rollouts=2, group=parts.group(dp=2), watch=watched)
    play(plan, kill, started)
    check_watched(folder, 8)
    assert (
        not kills
        and begun.count("trainer") == begun.count("trainer-1") == 4
        and begun.count("worker-0") == begun.count("reconciler") == 1
    )
    counts, _ = audit(rules, events(folder))
    assert counts["trained"] == 32 and set(counts) <= {"trained", "dropped"}
    trainings = [event.groups for event in events(folder) if event.kind == "train"]
    assert len(set(itertools.chain(*trainings))) == 32
    lines = read_lines(folder / "events" / "trainer.jsonl")
    assert [line["epoch"] for line in lines if line["what"] == "start"] == [0, 1, 2, 3]
    version, mine = left(folder)
    again, other = ranks(2).run(dict(dp=2), replayed, folder, parts)
    assert version == 8 and all(x.equal(again[name]) and x.equal(other[name]) for name, x in mine.items())
    assert all(x.equal(mine[name].bfloat16()) for name, x in served(folder)[1].items())
    return [line["process"] for line in lines if line["what"] == "died"]


@pytest.mark.parametrize("layout", [dict(dp=1), dict(dp=2), dict(cp=2, ep=2)], ids=str)
def test_without_staleness_it_is_the_synchronous_loop(tmp_path, synchronous, layout):
    check_synchronous(tmp_path, synchronous, layout, play)


def test_whichever_rank_is_killed_the_run_ends_and_replays(tmp_path):
    assert check_killed(tmp_path, play) == ["trainer-1", "trainer", "trainer-1"]


def test_who_was_killed_is_named_though_its_partner_was_seen_to_end_as_well(tmp_path):
    """Whoever looks after them looks away until the first rank, which lost its connection, has ended with an error,
    too."""
    parts, alive, kills = Grouped(seconds=0.02, steps=3), {}, [1]

    def kill(step, figures):
        if step in kills:
            kills.remove(step)
            signal.pidfd_send_signal(alive["trainer-1"], signal.SIGKILL)
            ended, _, _ = select.select([alive["trainer"]], [], [], 60)
            assert ended

    def started(name, process):
        alive[name] = os.pidfd_open(process.pid)

    play(Plan(tmp_path, Rules(4, 2, 3), parts, 1, slots=6, rollouts=2, group=parts.group(dp=2)), kill, started)
    died = [line["process"] for line in read_lines(tmp_path / "events" / "trainer.jsonl") if line["what"] == "died"]
    assert died == ["trainer-1"] and not kills


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if "between" in name else pytest.mark.faults) for name in FAULTS]
)
def test_a_rank_that_dies_where_others_wait_for_it(tmp_path, fault):
    """In the middle of what all ranks do together: it is done again, and neither a step nor a version is there by
    halves."""
    parts, rules = Grouped(steps=3, fault=fault, mark=str(tmp_path / "struck")), Rules(4, 1, 3)
    play(Plan(tmp_path / "run", rules, parts, 1, slots=8, rollouts=2, group=parts.group(dp=2)))
    assert (tmp_path / "struck").exists()
    version, mine = left(tmp_path / "run")
    again, other = ranks(2).run(dict(dp=2), replayed, tmp_path / "run", PARTS)
    assert version == 3 and all(x.equal(again[name]) and x.equal(other[name]) for name, x in mine.items())
    newest, theirs, written = served(tmp_path / "run")
    assert newest == 3 and written == {2} and all(x.equal(mine[name].bfloat16()) for name, x in theirs.items())
    audit(rules, events(tmp_path / "run"))


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    play(Plan(tmp_path, Rules(4, 0, 1), PARTS, 1, slots=8, rollouts=2, group=PARTS.group()))
    (path,) = (tmp_path / "trainer").glob("step-*/*.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"distcp is damaged: \d+ of \d+ bytes$"):
        play(Plan(tmp_path, Rules(4, 0, 2), PARTS, 1, slots=8, rollouts=2, group=PARTS.group(), timeout=2.0))


def test_ranks_speak_over_the_interface_that_leads_to_their_meeting(monkeypatch):
    """Over another one they would never meet, so none is guessed."""
    assert interface_to("127.0.0.1", 9).startswith("lo")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "nothing0")])
    with pytest.raises(
        RunError,
        match=r"^no network interface of .* has the address 127\.0\.0\.1, by which it reaches the other ranks at",
    ):
        interface_to("127.0.0.1", 9)


def test_more_ranks_than_conversations(tmp_path):
    with pytest.raises(ValueError, match="4 ranks cannot share the 2 conversations of a step"):
        Plan(tmp_path, Rules(1, 0, 1), PARTS, 1, slots=8, rollouts=2, group=PARTS.group(dp=4))


def test_the_command(tiny_run, tmp_path, ask):
    """`--scale full` rehearsed on CPUs, with a price on drift and replayed experts: what it leaves are the weights that
    workers got last."""
    out, few = tmp_path / "run", {**FEW, "rl.steps": 3, "cluster.ep": 2, "cluster.dtype": "bfloat16"}
    sets = (word for name, value in few.items() for word in ("--set", f"{name}={value}"))
    how = "--scale", "full", "--backend", "gloo", "--nproc", 2, "--checkpoint", tiny_run / "checkpoints" / "sft"
    code, said, error = ask("run", "async-rl", *how, "--out", out, *sets)
    assert code == 0, error
    report = json.loads((out / "report.json").read_text())
    assert "success_after" in said and report["config"]["trainers"] == 2 and report["result"]["restarts"] == 0
    steps = async_timeline.trainings(async_timeline.events(out / "services")["trainer"])
    assert [step["version"] for step in steps] == [1, 2, 3] and all(0 <= step["oldest"] <= 2 for step in steps)
    # The policy drifts from where it began as soon as a step has had a gradient: where all rewards of all groups are
    # alike, there is none.
    drifted = [any(before["grad_norm"] > 0 for before in steps[:n]) for n in range(3)]
    assert [step["kl"] != 0 for step in steps] == drifted
    network = load_hf(out / "checkpoints" / "final", torch.bfloat16)
    newest = copy.deepcopy(network).requires_grad_(False)
    reader = weight_sync.Reader(open_store(str(out / "services" / "weights")), weight_sync.parts(newest))
    assert reader.fetch() == 3 and {len(link["shards"]) for link in reader.manifests[3]["links"]} == {2}
    for p in newest.parameters():
        p.zero_()
    reader.swap()
    assert all(a.equal(b) for a, b in zip(network.parameters(), newest.parameters(), strict=True))
    code, said, error = ask("run", "async-rl", "--scale", "full", "--backend", "gloo", "--out", out, "--resume")
    assert code == 0 and "success_after" in said, error


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["--scale", "full"],
            "async-rl at full scale needs 1 CUDA GPU (ep=1, cp=1); this machine has 0. On CPUs: etude run async-rl",
        ),
        (
            ["--scale", "full", "--backend", "gloo", "--nproc", "3", "--set", "cluster.cp=2"],
            "cluster: cp=2 must divide the number of trainers, 3",
        ),
        (
            ["--scale", "full", "--runtime", "ray"],
            "async-rl at full scale on Ray needs --nproc, the number of ranks that train",
        ),
        (["--set", "trainers=0"], "trainers must be at least 1, got 0"),
        (["--set", "trainers=2", "--set", "cluster.ep=2"], "cluster.ep=2 must divide the network's 3 experts"),
        (
            ["--set", "trainers=2", "--set", "cluster.length=8", "--set", "rl.max_len=8"],
            "cluster.length must hold a context of",
        ),
        (
            ["--set", "trainers=8", "--set", "rl.prompts=1", "--set", "rl.rollouts=4"],
            "cluster: rl.prompts · rl.rollouts must be at least",
        ),
        (
            ["--set", "trainers=2", "--set", "cluster.backend=nccl"],
            "2 trainers over nccl need as many GPUs, and this machine has 0",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_bad_settings_are_one_line(tiny_run, tmp_path, ask, monkeypatch, words, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    checkpoint = tiny_run / "checkpoints" / "sft"
    if "experts" in says:
        torch.manual_seed(0)
        config = dataclasses.replace(load_hf(checkpoint).config, num_experts=3, num_experts_per_tok=2)
        save_hf(
            Transformer(config),
            tmp_path / "three",
            sidecar_files={"tokenizer.json": (checkpoint / "tokenizer.json").read_bytes()},
        )
        checkpoint = tmp_path / "three"
    code, _, said = ask("run", "async-rl", "--out", tmp_path / "run", "--set", f"checkpoint={checkpoint}", *words)
    assert code == 2 and says in said and said.count("\n") == 1
