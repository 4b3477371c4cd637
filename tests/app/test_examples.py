"""The committed examples: small, whole, and such that what `ref` computes from them is what they say."""

import json

import pytest
import torch

from etude.explorer import examples, kl
from etude.runs import RunError
from ref.self_summary import Chain

NAMES = ("chain", "drafting", "rollouts", "routing")


def test_they_are_small():
    files = [examples.FOLDER / f"{name}.json" for name in NAMES] + [examples.FOLDER / f"{name}.npz" for name in ("routing", "token-distributions")]
    assert sum(path.stat().st_size for path in files) < 700_000


def test_rollouts_of_a_task_differ():
    rollouts = examples.load("rollouts")["rollouts"]
    assert len(rollouts) >= 20 and {r["success"] for r in rollouts} == {True, False}
    by_task = {r["task"]: [one for one in rollouts if one["task"] == r["task"]] for r in rollouts}
    assert all(len(some) > 1 for some in by_task.values())
    for r in rollouts:
        assert r["text"].count("<|agent|>") >= r["turns"] >= 1 and r["calls"] >= r["invalid_calls"]


def test_token_distributions_feed_the_kl_page():
    policy, reference = kl.token_heads()
    assert policy.shape == reference.shape and 64 <= len(policy) <= 128
    assert torch.allclose(policy.exp().sum(1), torch.ones(len(policy), dtype=torch.float64))
    rows, _ = kl.estimates(kl.FAMILIES[2], 0.2, 30_000, 0)
    for row in rows:
        if row["estimator"] in ("k1", "k3"):
            assert abs(row["mean"] - row["exact KL"]) < 5 * row["standard error"]


def test_chains_have_two_contexts_and_both_outcomes():
    found = examples.load("chain")
    assert {chain["success"] for chain in found["chains"]} == {True, False}
    for chain in found["chains"]:
        assert len(chain["contexts"]) > 1 and isinstance(Chain(saved=chain["saved"]).prefill, int)
        largest = max(sum(len(p["tokens"]) for p in pieces) for pieces in chain["contexts"])
        assert found["trigger"] <= largest


@pytest.mark.parametrize("broken", [None, "{"])
def test_what_is_missing_or_broken_is_said_in_one_line(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    if broken is not None:
        (tmp_path / "chain.json").write_text(broken)
        (tmp_path / "routing.npz").write_text(broken)
    for read, name in ((examples.load, "chain"), (examples.arrays, "routing")):
        read.cache_clear()
        with pytest.raises(RunError, match=f"example {name}.*etude examples") as caught:
            read(name)
        assert "\n" not in str(caught.value)
        read.cache_clear()


def test_json_is_text_that_a_diff_can_show():
    for name in NAMES:
        text = (examples.FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert text.endswith("}\n") and text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
