"""`etude run cpt --scale full --backend gloo` from outside: it trains on a user's folder, a rank that dies is replaced
and the curve stays the same to the last bit, and a rank that hangs is called by name."""

import dataclasses
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from etude import catalog
from etude.run import full
from etude.run import rank as full_rank
from etude.run import settings as full_settings
from kit.disk import read_lines
from kit.runs import Run
from kit.settings import RunError
from recipe.full.weights import check_files
from recipe.small.micro_world import CheckpointTasks
from recipe.small.settings import Recipe
from ref.cpt import read_corpus, train_tokenizer
from ref.network import Config, Transformer, load_hf, save_hf
from scaled.runtime import launch
from scaled.runtime.checkpoint import Checkpoints
from tests import elsewhere, forks
from tests.mirror import calls
from tests.mirror.layouts import play
from tests.mirror.workers import free_port

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
RL_STEPS = 3


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder of code, and a network with its tokenizer to begin from."""
    folder, draw = tmp_path_factory.mktemp("given"), random.Random(0)
    for n in range(12):
        lines = [f"def f{i}(x):\n    return x + {draw.randrange(100)}\n" for i in range(40)]
        (folder / "code" / f"p{n}").mkdir(parents=True)
        (folder / "code" / f"p{n}" / "a.py").write_text("\n".join(lines))
    tokenizer = train_tokenizer(read_corpus(folder / "code").files.values(), 300)
    torch.manual_seed(0)
    shape = Config.tiny(
        300,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
    )
    save_hf(Transformer(shape), folder / "net")
    tokenizer.save(str(folder / "net" / "tokenizer.json"))
    save_hf(Transformer(dataclasses.replace(shape, num_experts=0, intermediate_size=16)), folder / "dense")
    (folder / "bare").mkdir()
    for name in ("dense", "bare"):
        tokenizer.save(str(folder / name / "tokenizer.json"))
    for name, wrong in {"yarn": {"rope_scaling": "yarn"}, "tied": {"tie_word_embeddings": "false"}}.items():
        shutil.copytree(folder / "net", folder / name)
        (folder / name / "config.json").write_text(
            json.dumps(json.loads((folder / name / "config.json").read_text()) | wrong)
        )
    return folder


def settings(given: Path) -> tuple[str, ...]:
    return (
        f"checkpoint={given / 'net'}",
        f"steps={STEPS}",
        "rows=4",
        "length=32",
        "ep=2",
        "cp=2",
        "checkpoint_every=5",
        "perplexity_tokens=500",
    )


def command(given: Path, out: Path, *more: str) -> list[object]:
    sets = (word for one in (*settings(given), *more) for word in ("--set", one))
    return [
        "run",
        "cpt",
        "--scale",
        "full",
        "--backend",
        "gloo",
        "--nproc",
        "2",
        "--out",
        out,
        "--corpus",
        given / "code",
        *sets,
    ]


@pytest.fixture(scope="module")
def through(given, tmp_path_factory):
    """A training that nothing disturbed, on ranks that are none of torchrun's: its folder, and what came out."""
    out = tmp_path_factory.mktemp("through")
    return out, on_two("cpt", out, f"corpus={given / 'code'}", *settings(given))


def lines(out: Path) -> list[dict]:
    # not the file that replaces it
    return read_lines(next((out / "metrics").glob("[!.]*.jsonl"), out / "metrics" / "none"))


def wait_for_step(out: Path, step: int, process) -> None:
    deadline = time.monotonic() + 120
    while len(lines(out)) < step:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)


def test_it_trains_and_leaves_a_network(given, through):
    out, found = through
    losses = [line["loss"] for line in lines(out)]
    assert [line["step"] for line in lines(out)] == list(range(1, STEPS + 1)) and losses[-1] < losses[0] - 1
    assert found["codebase_perplexity"] < 200
    trained, before = load_hf(out / "checkpoints" / "final"), load_hf(given / "net")
    assert not torch.equal(trained.embed_tokens.weight, before.embed_tokens.weight)
    elsewhere.check(out / "checkpoints" / "final")
    assert (
        f"codebase_perplexity | {found['codebase_perplexity']:.4g}"
        in (out / "checkpoints" / "final" / "README.md").read_text()
    )


def test_neither_dead_nor_hanging_ranks_nor_a_killed_command_change_anything(given, through, tmp_path):
    """SIGKILL of a rank: it is replaced. Then of the command: the ranks end too. Resumed, SIGSTOP of a rank: it is
    named, and replaced. In the end every loss and weight is the same to the last bit, no step is there twice, exit
    0."""
    out, said = tmp_path / "run", tmp_path / "said"
    process = forks.start(*command(given, out), said=tmp_path / "killed")
    wait_for_step(out, 6, process)
    os.kill(pids(out)[1], signal.SIGKILL)
    wait_for_step(out, 12, process)
    left = pids(out)
    process.kill()
    wait_for_end(left)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL and 12 <= len(lines(out)) < STEPS

    process = forks.start(*command(given, out, "timeout=4"), "--resume", said=said)
    wait_for_step(out, 18, process)
    hung = pids(out)[1]
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(RunError, match="in use by another run"):
        Run.open(out, "cpt full", None, resume=True)
    deadline = time.monotonic() + 30
    while "does not answer" not in said.read_text():
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)
    assert "rank 1 does not answer" in said.read_text() and "no step after step" in said.read_text()
    os.kill(hung, signal.SIGKILL)  # torchrun would give it half a minute
    forks.end(process, said)
    assert lines(out) == lines(through[0])
    assert same_files(out / "checkpoints" / "final", through[0] / "checkpoints" / "final")
    assert (
        json.loads((out / "report.json").read_text())["result"] == through[1]
        and "codebase_perplexity" in said.read_text()
    )
    again = forks.start(*command(given, out), said=tmp_path / "again")
    again.join(60)
    error = (tmp_path / "again").read_text()
    assert again.exitcode == 2 and "already holds a run" in error and error.count("\n") == 1


def test_two_machines_of_which_one_is_taken_away_leave_with_a_state_and_go_on_the_same(given, through, tmp_path):
    """SIGTERM to the agent of the second machine: both machines leave after the same step, which no setting would have
    saved, with the code of a preemption and one line. Started again by the same command, they end with every loss and
    weight of an undisturbed run."""
    out, port = tmp_path / "run", free_port()
    words = [str(word) for word in command(given, out, "checkpoint_every=1000")]
    words[words.index("--nproc") + 1] = "1"
    words += ["--resume-or-begin", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--node"]
    for code in (75, 0):
        logs = [tmp_path / f"log-{code}-{node}" for node in range(2)]
        machines = [forks.begin(on_loopback, *words, str(node), said=logs[node]) for node in range(2)]
        if code:
            wait_for_step(out, 6, machines[0])
            agents = {parent(parent(pid)): parent(pid) for pid in pids(out)}
            os.kill(agents[machines[1].pid], signal.SIGTERM)
        for machine, path in zip(machines, logs, strict=True):
            machine.join(120)
            text = path.read_text()
            assert machine.exitcode == code and "Traceback" not in text, text
            assert ("stopped by a signal" in text.splitlines()[-1] and "Continue with" in text) == (code == 75), text
        assert Checkpoints(out / "state").steps()[-1] == len(lines(out)) and (len(lines(out)) < STEPS) == (code == 75)
    assert lines(out) == lines(through[0])
    assert same_files(out / "checkpoints" / "final", through[0] / "checkpoints" / "final")


def on_loopback(*words: str) -> None:
    """`etude words` on what stands in for a machine."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": "127.0.0.1"}
    forks.command_line(1, *words)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("PPid:")[2].split()[0])


def pids(out: Path) -> list[int]:
    return [int((out / "ranks" / f"{rank}.pid").read_text()) for rank in range(2)]


def wait_for_end(ranks: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path("/proc", str(pid)).exists() for pid in ranks):
        assert time.monotonic() < deadline, "ranks go on alone"
        time.sleep(0.05)


def same_files(one: Path, other: Path) -> bool:
    files = [{path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    return files[0] == files[1]


@pytest.mark.parametrize("size", [20_000, 100_000], ids=["rows", "state"])
def test_a_full_disk_is_one_line(given, tmp_path, size):
    """Where this process packs the rows, and where ranks write a state: no traceback of ours, of torch or of
    torchrun."""
    process = forks.begin(
        limited, size, *map(str, command(given, tmp_path / "run", "restarts=0")), said=tmp_path / "said"
    )
    process.join(120)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 2 and "Traceback" not in said and "error: File too large: " in said, said
    assert (tmp_path / "run").exists() == ("; free some space" in said) == (size > 20_000), said


def limited(size: int, *words: str) -> None:
    """`etude words` in a process that may write no file larger than `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    forks.command_line(1, *words)


def test_ranks_end_with_torchrun(given, tmp_path):
    """Instead of training on beside the resumed run."""
    process = forks.start(*command(given, tmp_path / "run"), said=tmp_path / "said")
    wait_for_step(tmp_path / "run", 1, process)
    left = pids(tmp_path / "run")
    [torchrun] = {parent(pid) for pid in left}
    os.kill(torchrun, signal.SIGKILL)
    wait_for_end(left)
    process.join(20)
    assert process.exitcode == 2 and "Continue with: etude run cpt --scale full" in (tmp_path / "said").read_text()
    assert len(lines(tmp_path / "run")) < STEPS


def on_two(technique: str, out: Path, *sets: str) -> dict:
    """The training on two ranks that stay from test to test, cp 2 and ep 2."""
    return play(dict(dp=1, cp=2, ep=2), calls.training, technique, [*sets, "cp=2", "ep=2"], out)


def test_layers_are_distilled(given, tmp_path):
    """In bfloat16, activations made again, rows to experts in FP8: what a cluster would be told."""
    on_two(
        "mtp",
        tmp_path,
        f"checkpoint={given / 'net'}",
        f"corpus={given / 'code'}",
        f"steps={STEPS}",
        "rows=4",
        "length=32",
        "depth=2",
        "dtype=bfloat16",
        "rematerialise=true",
        "dispatch=fp8",
    )
    kl = [line["kl_1"] for line in lines(tmp_path)]
    assert len(kl) == STEPS and kl[-1] < 0.7 * kl[0]
    from ref.network import load_extra

    final = tmp_path / "checkpoints" / "final"
    assert any(name.startswith("mtp.layers.1.") for name in load_extra(final))
    # The trunk is only looked at: what it was gathered in must not reach what is saved.
    for (name, after), before in zip(
        load_hf(final).named_parameters(), load_hf(given / "net").parameters(), strict=True
    ):
        assert torch.equal(after, before), name
    assert json.loads((final / "config.json").read_text())["dtype"] == "float32"
    elsewhere.check(final, drafts=True)


FEW = (
    "rl.prompts=2",
    "rl.rollouts=4",
    "length=256",
    "rl.max_len=256",
    "micro_rows=2",
    "heldout=4",
    "checkpoint_every=1",
    "rl.payment.effort_price=0.01",
)


def test_reinforcement_learning_in_the_small_world(given, tmp_path):
    """Two ranks share every row and the experts; what is played again is the same, to the last bit."""
    few = (*FEW, f"rl.steps={RL_STEPS}", "rl.monitor.learn=1", f"checkpoint={given / 'net'}")
    found = on_two("length-penalty", tmp_path, *few)
    steps = lines(tmp_path)
    assert (
        "watch_broken" in steps[0]
        and "evidence_broken" in steps[1]
        and found["alarms"] == 0
        and "watch_broken" not in found
    )
    assert [step["step"] for step in steps] == [1, 2, 3] and {"heldout_before", "heldout_after"} <= found.keys()
    assert all(step["tokens"] > 0 and step["imbalance"] >= 1 and step["reward"] < step["success"] for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    newest = json.loads((tmp_path / "rollouts" / "rl.json").read_text())
    assert newest["step"] == RL_STEPS and all(
        one["text"] and one["reward"] < one["success"] for one in newest["rollouts"]
    )
    trained, before = load_hf(tmp_path / "checkpoints" / "final"), load_hf(given / "net")
    assert not torch.equal(trained.layers[0].self_attn.q_proj.weight, before.layers[0].self_attn.q_proj.weight)
    elsewhere.check(tmp_path / "checkpoints" / "final")
    # As if killed after the second step: what is drawn, sampled and learnt again is the same.
    shutil.rmtree(tmp_path / "state" / f"step-{RL_STEPS:08d}")
    (tmp_path / "rollouts" / "rl.json").unlink()
    assert on_two("length-penalty", tmp_path, *few) == found
    assert lines(tmp_path) == steps and json.loads((tmp_path / "rollouts" / "rl.json").read_text()) == newest


def test_tasks_are_those_of_the_run_that_a_checkpoint_goes_back_to(given, tmp_path):
    """Its own, or that of the checkpoint from which its full run began."""

    def settings(checkpoint):
        return full_settings.settings(
            "dr-grpo", "gloo", {}, [f"checkpoint={checkpoint}", "length=256", "rl.max_len=256"]
        )

    def run(name, technique, config):
        shutil.copytree(given / "net", tmp_path / name / "checkpoints" / "final")
        (tmp_path / name / "config.json").write_text(json.dumps({"technique": technique, "config": config}))
        return tmp_path / name / "checkpoints" / "final"

    first = run("small", "recipe", {"rl": {"max_turns": 3}})
    second = run("full", "dr-grpo full", {"checkpoint": str(first)})
    third = run("again", "kl full", {"checkpoint": str(second)})
    for checkpoint in (first, second, third):
        world = CheckpointTasks(settings(checkpoint))
        assert world.root == tmp_path / "small" and world.recipe.rl.max_turns == 3
    circle = run("circle", "kl full", {"checkpoint": str(tmp_path / "circle" / "checkpoints" / "final")})
    for checkpoint in (given / "net", run("alone", "cpt full", {"checkpoint": None}), circle):
        world = CheckpointTasks(settings(checkpoint))
        assert world.root is None and world.recipe == Recipe()


def test_reinforcement_learning_from_the_command_line(given, tmp_path):
    sets = [
        word for one in (*FEW, "rl.steps=1", "cp=2", "ep=2", f"checkpoint={given / 'net'}") for word in ("--set", one)
    ]
    command = [
        "run",
        "self-summary",
        "--scale",
        "full",
        "--backend",
        "gloo",
        "--nproc",
        "2",
        "--out",
        tmp_path / "run",
        *sets,
    ]
    said = forks.play(*command, said=tmp_path / "said")
    assert (
        "the recipe's defaults" in said
        and "heldout_after" in said
        and [step["step"] for step in lines(tmp_path / "run")] == [1]
    )


@pytest.mark.parametrize(
    ("technique", "sets", "says"),
    [
        ("dr-grpo", ["checkpoint=nowhere"], "is not a folder with config.json, weights and tokenizer.json"),
        ("kl", ["rl.rollouts=1"], "rl.rollouts must be at least 2"),
        ("self-summary", ["length=64", "rl.max_len=64"], "length must hold a context of"),
        ("textual-feedback", ["rl.feedback.weight=-1"], "rl.feedback.weight must be at least 0"),
        ("packing", ["rl.prompts=1", "rl.rollouts=2", "heldout=1"], "number of ranks, 2"),
        ("dr-grpo", ["ep=3"], "ep=3 must divide the number of ranks"),
        ("dr-grpo", ["checkpoint={given}/bare"], "config.json"),
        ("cpt", ["checkpoint={given}/yarn"], "config.json.*rope_scaling"),
        ("dr-grpo", ["checkpoint={given}/tied"], "config.json.*tie_word_embeddings"),
        ("router-replay", ["checkpoint={given}/dense"], "needs a network with experts, and .* has none"),
        (
            "dr-grpo",
            ["rl.max_len=2", "length=8"],
            "a prompt has about .* tokens; contexts of 2 leave no room for an answer",
        ),
        ("cpt", ["corpus=/nowhere", "checkpoint={given}/net"], "corpus /nowhere is not a folder"),
        ("cpt", ["checkpoint=none"], "a full run starts from a checkpoint: --checkpoint FOLDER"),
        (
            "muon",
            [],
            "checkpoint runs/small/checkpoints/mid-cpt is not a folder .*make small writes "
            "runs/small/checkpoints/mid-cpt",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_played_is_said_in_one_line(given, tmp_path, monkeypatch, technique, sets, says):
    monkeypatch.chdir(tmp_path)  # where no run is, whatever was run in this checkout
    rl = (
        ["rl.rollouts=4", "rl.prompts=2", "length=256", "rl.max_len=256", f"checkpoint={given / 'net'}"]
        if technique in full_settings.RL
        else []
    )
    few = [*rl, *(one.format(given=given) for one in sets)]
    with pytest.raises(RunError, match=says) as error:
        full.run(catalog.find(technique), tmp_path / "run", {}, few, False, 2, "gloo")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


class Payload:
    """What a hostile file holds: unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def crafted_state(out, mark):
    shelf = Checkpoints(out / "state")
    shelf.save(5, {"x": torch.zeros(3)})
    shelf.finish()
    (shelf.path(5) / ".metadata").write_bytes(pickle.dumps(Payload(mark)))


def crafted_rows(out, mark):
    (out / "data").mkdir()
    np.save(out / "data" / "rows.npy", np.array([Payload(mark)], object))


def a_pickle_for_documents(out, mark):
    (out / "data").mkdir()
    (out / "data" / "doc.npy").write_bytes(pickle.dumps(Payload(mark)))


@pytest.mark.parametrize("craft", [crafted_state, crafted_rows, a_pickle_for_documents])
def test_a_crafted_run_folder_runs_nothing(given, tmp_path, ask, monkeypatch, craft):
    """`--resume` in a folder that someone sent: refused before any rank begins."""
    out, words = tmp_path / "run", [str(word) for word in command(given, tmp_path / "run")]
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks are started"))
    Run.open(
        out, "cpt full", full_settings.settings("cpt", "gloo", {}, [f"corpus={given / 'code'}", *settings(given)])
    ).close()
    craft(out, tmp_path / "mark")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, _, error = ask(*words, "--resume")
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and "; delete " in error, error
    assert (
        not (tmp_path / "mark").exists()
        and {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_crafted_network_runs_nothing(given, tmp_path, ask, monkeypatch, name):
    """`--set checkpoint=` a folder with a pickle for weights."""
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks are started"))
    shutil.copytree(given / "net", tmp_path / "net")
    (tmp_path / "net" / "model.safetensors").unlink()
    torch.save(Payload(tmp_path / "mark"), tmp_path / "net" / name)
    words = [str(word) for word in command(given, tmp_path / "run", f"checkpoint={tmp_path / 'net'}")]
    code, _, error = ask(*words)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and "model.safetensors" in error
    assert not (tmp_path / "mark").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("technique", ["recipe", "cpt", "dr-grpo"])
@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_file_of_the_checkpoint_that_is_missing_is_named_first(
    given, tmp_path, ask, monkeypatch, technique, is_cut_off
):
    """Before data is read for hours: no output folder is there yet."""
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks are started"))
    net, names = tmp_path / "net", [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    shutil.copytree(given / "net", net)
    tensors = load_file(net / "model.safetensors")
    (net / "model.safetensors").unlink()
    weight_map = {key: names[number % 2] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: x for key, x in tensors.items() if weight_map[key] == name}, net / name)
    (net / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_files(net)
    if is_cut_off:
        (net / names[1]).write_bytes((net / names[1]).read_bytes()[:-1])
    else:
        (net / names[1]).unlink()
    out = tmp_path / "run"
    code, _, error = ask("run", technique, "--scale", "full", "--backend", "gloo", "--checkpoint", net, "--out", out)
    assert code == 2 and error.count("\n") == 1 and str(net / names[1]) in error and not out.exists(), error


def test_one_rank_is_told_what_it_cannot_do(given, tmp_path):
    one = [
        f"checkpoint={given / 'net'}",
        "rl.rollouts=4",
        "rl.prompts=2",
        "length=256",
        "rl.max_len=256",
        "dtype=bfloat16",
    ]
    with pytest.raises(RunError, match="dtype=bfloat16 needs more than one rank.*--set dtype=float32"):
        full.run(catalog.find("dr-grpo"), tmp_path / "run", {}, one, False, 1, "gloo")


def test_ranks_on_cpus_keep_what_they_have_freed(monkeypatch):
    """Each gathered weight would come as new pages otherwise, which the system clears one by one. On GPUs weights are
    not there."""
    kept = []
    monkeypatch.setattr(full_rank, "keep_freed_memory", lambda: kept.append(backend))
    monkeypatch.setattr(launch, "world", lambda backend, timeout: pytest.fail(backend))
    for backend in ("nccl", "gloo"):
        with pytest.raises(pytest.fail.Exception, match=backend):
            full_rank.rank(Path("run"), {"technique": "cpt", "backend": backend, "config": {}})
    assert kept == ["gloo"]
