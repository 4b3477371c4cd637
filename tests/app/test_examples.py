"""The committed examples: small, whole, and such that what `ref` computes from them is what they say. Damaged ones are
one line."""

import io
import json
import os
import shutil

import numpy as np
import pytest
import torch

from etude.explorer import examples, files
from etude.explorer.pages import kl, mtp, replay, summary
from kit.disk import describe_mismatch, seal_record
from kit.settings import RunError

NAMES = ("chain", "drafting", "rollouts", "routing")
ARRAYS = ("routing", "token-distributions")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of all that the pages read, to be damaged or written again."""
    shutil.copytree(examples.FOLDER, tmp_path / "examples")
    shutil.copy(mtp.RECORD_PATH, tmp_path / "examples")
    monkeypatch.setattr(examples, "FOLDER", tmp_path / "examples")
    monkeypatch.setattr(mtp, "RECORD_PATH", tmp_path / "examples" / mtp.RECORD_PATH.name)
    return tmp_path / "examples"


def put(path, content):
    """Writes a file so that it is seen to be another one, however coarse the clock of the file system is."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9,) * 2)


def test_they_are_small():
    files = [examples.FOLDER / f"{name}.json" for name in NAMES] + [examples.FOLDER / f"{name}.npz" for name in ARRAYS]
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
        counts = [summary.count_tokens(pieces) for pieces in chain["contexts"]]
        assert len(counts) > 1 and counts == chain["group"][chain["place"]]["contexts"], (
            "its pieces are those of its place in the group"
        )
        assert chain["saved"] > 0, "a summary in a separate call would have read the context again"
        largest = max(sum(len(p["tokens"]) for p in pieces) for pieces in chain["contexts"])
        assert found["trigger"] <= largest


def spoilt(whole):
    """Ways to damage a file, by name."""
    half, middle = len(whole) // 2, bytearray(whole)
    middle[half : half + 64] = bytes(64)
    return {
        "missing": None,
        "empty": b"",
        "half": whole[:half],
        "rotten": bytes(middle),
        "another": b"{}",
        "a list": b"[]",
        "text": b"{",
        "deep": b"[" * 10**5,
    }


def spoil(path, way):
    content = spoilt(path.read_bytes())[way]
    path.unlink() if content is None else put(path, content)


@pytest.mark.parametrize("way", list(spoilt(b"")))
def test_what_is_missing_or_broken_is_said_in_one_line(copied, way):
    for read, names in ((examples.load, NAMES), (examples.arrays, ARRAYS)):
        for name in names:
            if way == "rotten" and read is examples.load:
                continue  # text that has lost a few words may still be read
            spoil(copied / f"{name}.{'json' if read is examples.load else 'npz'}", way)
            with pytest.raises(RunError, match=f"example {name}.*etude examples") as caught:
                read(name)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("way", ["missing", "empty", "half", "another"])
@pytest.mark.parametrize(
    ("name", "file", "query"),
    [
        ("summary", "chain.json", {}),
        ("replay", "routing.json", {}),
        ("replay", "routing.npz", {}),
        ("mtp", "drafting.json", {}),
        ("mtp", "mtp.json", {}),
        ("penalties", "rollouts.json", {}),
        ("kl", "token-distributions.npz", {"family": kl.FAMILIES[2]}),
    ],
)
def test_a_page_says_in_one_line_what_is_broken(page, copied, name, file, query, way):
    spoil(copied / file, way)
    at = page(name, **query)
    (line,) = [error.value for error in at.error]
    assert file in line and "again with: etude" in line and "\n" not in line


def without(found, *path):
    """A copy of what JSON holds, less what lies there."""
    found = json.loads(json.dumps(found))
    *before, last = path
    inside = found
    for key in before:
        inside = inside[key]
    del inside[last]
    return found


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("chain", ("trigger",)),
        ("chain", ("chains", 0, "saved")),
        ("chain", ("chains", 1, "group", 2, "kl")),
        ("chain", ("chains", 0, "contexts", 0, 1, "role")),
        ("chain", ("chains", 0, "notes", 0, "facts", 0, "fate")),
        ("routing", ("rollouts", 1, "sampled")),
        ("routing", ("alphas",)),
        ("drafting", ("drafts", "2", "accepted")),
        ("drafting", ("drafts", "1")),
        ("drafting", ("steps", 1, "added")),
        ("drafting", ("steps", 0, "tokens")),
        ("rollouts", ("rollouts", 3, "turns")),
    ],
)
def test_what_an_example_lacks_is_named(copied, name, path):
    put(copied / f"{name}.json", json.dumps(without(examples.load(name), *path)).encode())
    with pytest.raises(RunError, match=f"example {name}.json cannot be read .*{path[-1]}: missing"):
        examples.load(name)


def test_values_of_another_kind_are_none():
    assert not describe_mismatch({"a": [1, 2.5], "b": "x"}, {"a": [files.NUMBER, ...], "b": str})
    assert describe_mismatch({"a": [1, True]}, {"a": [int]}) == "a: 1: unexpected value true"
    assert describe_mismatch({"a": []}, {"a": [int, ...]}) == "a: empty" and not describe_mismatch(
        {"a": []}, {"a": [int]}
    )
    assert (
        describe_mismatch([1], {"a": int}) == "not a JSON object"
        and describe_mismatch({"a": 1}, {"a": [int]}) == "a: not a list"
    )


def test_arrays_of_other_rollouts_are_none(page, copied):
    """routing.json was written again and routing.npz was not."""
    found = examples.load("routing")
    found = found | {"rollouts": found["rollouts"][::-1]}
    put(copied / "routing.json", json.dumps(found).encode())
    (line,) = [error.value for error in page("replay").error]
    assert "routing.npz" in line and "does not belong to routing.json" in line


def reckoned():
    """What pages make of the files, and keep."""
    return summary.group_rows(0), replay.quantiles(), replay.replay_experts(0, 3)[1], kl.token_heads()[0]


def test_what_is_written_again_is_seen(page, copied):
    """While the explorer runs: what was read, and what was reckoned from it."""
    at = page("mtp", drafts="3")
    before = reckoned()
    assert all(a is b for a, b in zip(before, reckoned(), strict=True)), "kept while nothing changes"
    chain, drafts = examples.load("chain"), examples.load("drafting")
    chain["chains"][0]["group"][0]["reward"] += 1
    drafts["drafts"]["3"]["accepted"][0] = 1
    measured = json.loads(mtp.RECORD_PATH.read_text(encoding="utf-8"))
    for row in measured["rows"]:
        row |= {"speedup": 7.0, "speedup_low": 6.5, "speedup_high": 7.5}
    for name, found in (("chain", chain), ("drafting", drafts), ("mtp", seal_record(measured))):
        put(copied / f"{name}.json", json.dumps(found).encode())
    for name in ARRAYS:
        file = io.BytesIO()
        np.savez(file, **{key: x * 2 if x.dtype.kind == "f" else x for key, x in examples.arrays(name).items()})
        put(copied / f"{name}.npz", file.getvalue())
    after = reckoned()
    assert before[0] != after[0] and before[1] != after[1]
    assert not torch.equal(before[2], after[2]) and not torch.equal(before[3], after[3])
    at.run()
    assert not at.exception and [one.value for one in at.metric if one.label == "Measured"] == ["7.00×"]
    assert mtp.depths(0.9, 3)[0]["accepted"] == 1


def test_json_is_text_that_a_diff_can_show():
    for name in NAMES:
        text = (examples.FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert text.endswith("}\n") and text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
