"""`etude run cpt --scale full --backend gloo` from outside: it trains on a user's folder, a rank that dies is replaced and the curve stays
the same to the last bit, and a rank that hangs is called by name."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from etude import catalog, full
from etude.runs import Run, RunError
from ref.cpt import read_corpus, train_tokenizer
from ref.model import Config, Transformer, load_hf, save_hf

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
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
    shape = Config.tiny(300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                        num_experts=4, moe_intermediate_size=16)  # fmt: skip
    save_hf(Transformer(shape), folder / "net")
    tokenizer.save(str(folder / "net" / "tokenizer.json"))
    return folder


def command(given: Path, out: Path, *more: str, technique: str = "cpt") -> list[str]:
    return [
        sys.executable, "-m", "etude.cli", "run", technique, "--scale", "full", "--backend", "gloo", "--nproc", "2", "--out", str(out),
        "--corpus", str(given / "code"), "--set", f"checkpoint={given / 'net'}", "--set", f"steps={STEPS}", "--set", "rows=4",
        "--set", "length=32", "--set", "ep=2", "--set", "cp=2", "--set", "checkpoint_every=5", "--set", "perplexity_tokens=500", *more,
    ]  # fmt: skip


def start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def through(given, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("through") / "run"
    process = start(command(given, out))
    said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-9000:]
    return out, said


def lines(out: Path) -> list[dict]:
    path = next((out / "metrics").glob("*.jsonl"), out / "metrics" / "none")
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while len(lines(out)) < step:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_it_trains_and_leaves_a_network(given, through):
    out, said = through
    losses = [line["loss"] for line in lines(out)]
    assert [line["step"] for line in lines(out)] == list(range(1, STEPS + 1)) and losses[-1] < losses[0] - 1
    report = json.loads((out / "report.json").read_text())
    assert report["result"]["codebase_perplexity"] < 200 and "codebase_perplexity" in said
    trained, before = load_hf(out / "checkpoints" / "final"), load_hf(given / "net")
    assert not torch.equal(trained.embed_tokens.weight, before.embed_tokens.weight)
    again = start(command(given, out))
    _, error = again.communicate(timeout=60)
    assert again.returncode == 2 and "already holds a run" in error and error.count("\n") == 1


def test_a_rank_that_dies_is_replaced(given, through, tmp_path):
    """SIGKILL of one rank in the middle: exit 0, every loss the same to the last bit, no step twice."""
    process = start(command(given, tmp_path / "run"))
    wait_for_step(tmp_path / "run", 12, process)
    os.kill(int((tmp_path / "run" / "ranks" / "1.pid").read_text()), signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-9000:]
    assert lines(tmp_path / "run") == lines(through[0])


def test_all_killed_and_resumed(given, through, tmp_path):
    """SIGKILL of everything, then --resume."""
    process = start(command(given, tmp_path / "run"))
    wait_for_step(tmp_path / "run", 8, process)
    process.kill()
    for rank in range(2):
        os.kill(int((tmp_path / "run" / "ranks" / f"{rank}.pid").read_text()), signal.SIGKILL)
    process.communicate()
    again = start([*command(given, tmp_path / "run"), "--resume"])
    _, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    assert lines(tmp_path / "run") == lines(through[0])


def test_a_rank_that_hangs_is_named(given, tmp_path):
    process = start(command(given, tmp_path / "run", "--set", "timeout=8", "--set", "restarts=0"))
    wait_for_step(tmp_path / "run", 3, process)
    hung = int((tmp_path / "run" / "ranks" / "1.pid").read_text())
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(RunError, match="in use by another run"):
        Run.open(tmp_path / "run", "cpt full", None, resume=True)
    begun, said = time.monotonic(), ""
    for line in process.stderr:
        said += line
        if "does not answer" in line:
            break
    assert "rank 1 does not answer" in said and "no step after step" in said
    assert time.monotonic() - begun < 30
    os.kill(hung, signal.SIGKILL)  # torchrun would give it half a minute
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 2 and "Go on with: etude run cpt --scale full" in rest


def test_layers_are_distilled(given, tmp_path):
    """In bfloat16, activations made again, rows to experts in FP8: what a cluster would be told."""
    how = [part for one in ("layers=2", "dtype=bfloat16", "rematerialise=true", "dispatch=fp8") for part in ("--set", one)]
    process = start(command(given, tmp_path / "run", *how, technique="mtp"))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-9000:]
    kl = [line["kl_1"] for line in lines(tmp_path / "run")]
    assert len(kl) == STEPS and kl[-1] < 0.7 * kl[0]
    from ref.model import load_extra

    assert any(name.startswith("mtp.layers.1.") for name in load_extra(tmp_path / "run" / "checkpoints" / "final"))


def play_rl(given: Path, out: Path, *more: str, technique: str = "length-penalty") -> list[str]:
    few = (f"steps={RL_STEPS}", "prompts=2", "rollouts=4", "length=256", "max_len=256", "micro_rows=2", "heldout=4", "checkpoint_every=1", "cp=2", "ep=2",
           f"checkpoint={given / 'net'}", "effort_price=0.01")  # fmt: skip
    sets = [part for one in (*few, *more) for part in ("--set", one)]
    return [sys.executable, "-m", "etude.cli", "run", technique, "--scale", "full", "--backend", "gloo", "--nproc", "2", "--out", str(out), *sets]


def test_reinforcement_learning_in_the_small_world(given, tmp_path):
    """Two ranks share every row and the experts; what is played again is the same, to the last bit."""
    process = start(play_rl(given, tmp_path / "through"))
    said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-9000:]
    steps = lines(tmp_path / "through")
    assert [step["step"] for step in steps] == [1, 2, 3] and "heldout_after" in said
    assert all(step["tokens"] > 0 and step["imbalance"] >= 1 and step["reward"] < step["success"] for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    trained, before = load_hf(tmp_path / "through" / "checkpoints" / "final"), load_hf(given / "net")
    assert not torch.equal(trained.layers[0].self_attn.q_proj.weight, before.layers[0].self_attn.q_proj.weight)
    # As if killed after the second step: what is drawn, sampled and learnt again is the same.
    shutil.rmtree(tmp_path / "through" / "state" / f"step-{RL_STEPS:08d}")
    again = start([*play_rl(given, tmp_path / "through"), "--resume"])
    _, error = again.communicate(timeout=300)
    assert again.returncode == 0, error[-9000:]
    assert lines(tmp_path / "through") == steps


@pytest.mark.parametrize(
    ("technique", "sets", "says"),
    [
        ("dr-grpo", ["checkpoint=nowhere"], "is no folder with config.json, weights and tokenizer.json"),
        ("kl", ["rollouts=1"], "rollouts must be at least 2"),
        ("self-summary", ["length=64", "max_len=64"], "length must hold a context of"),
        ("packing", ["prompts=1", "rollouts=2", "heldout=1"], "number of ranks, 2"),
        ("recipe", [], "recipe has no full run of its own"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_played_is_said_in_one_line(given, tmp_path, technique, sets, says):
    few = ["rollouts=4", "prompts=2", "length=256", "max_len=256", f"checkpoint={given / 'net'}", *sets]
    with pytest.raises(RunError, match=says) as error:
        full.run(catalog.find(technique), tmp_path / "run", {}, few, False, 2, "gloo")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
