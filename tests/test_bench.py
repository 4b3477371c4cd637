"""The benchmark runs, and shows no speed when what it times computes something else."""

import json
import logging.handlers

import pytest
import torch

from etude.bench import decode, step
from etude.bench import training as bench
from kit.process import in_fresh_process, keep_freed_memory
from kit.settings import RunError
from ref.network import Transformer

SMALL = dict(batch=2, length=8, dtypes=("float32",), rounds=2)


def test_bench_model_writes_what_it_prints(tmp_path, capsys):
    record = bench.model(tmp_path, **SMALL)
    [path] = tmp_path.iterdir()
    assert path.name.startswith("model-") and json.loads(path.read_text()) == record
    shown = capsys.readouterr().out
    for result in record["results"]:
        assert set(result["tokens_per_second"]) == set(result["gate"]["loss"]) and len(result["gate"]["loss"]) == 6
        assert f"{result['ratio']:.2f} times the fastest of theirs" in shown and result["their_fastest"].startswith(
            "transformers"
        )
        assert f"{result['over_plain']:.2f} times the plain network" in shown
    assert {"cpu", "cores", "torch", "transformers", "commit"} <= set(record["machine"])


@pytest.mark.parametrize("spoil, message", [(2.0, "the loss of etude is"), (-1.0, "the loss of etude is")])
def test_a_wrong_loss_shows_no_speed(monkeypatch, capsys, spoil, message):
    right = Transformer.logprob
    monkeypatch.setattr(
        Transformer, "logprob", lambda self, h, t: right(self, h, t) * (spoil if h.dtype == torch.float32 else 1)
    )
    with pytest.raises(RunError, match=message):
        bench.model(None, **SMALL)
    assert "tokens/s" not in capsys.readouterr().out


def test_a_wrong_gradient_shows_no_speed(monkeypatch, capsys):
    right = Transformer.logprob

    def stale(self, hidden, targets):
        logp = right(self, hidden, targets)
        return logp + 0.1 * (logp - logp.detach()) if hidden.dtype == torch.float32 else logp

    monkeypatch.setattr(Transformer, "logprob", stale)
    with pytest.raises(RunError, match="relative error of our gradient"):
        bench.model(None, **SMALL)
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Intel(R) Xeon(R) Processor", "intel-xeon-processor"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "intel-core-i7-8550u-cpu-1-80ghz"),
        ("NVIDIA H200", "nvidia-h200"),
    ],
)
def test_a_record_is_named_after_the_device(tmp_path, device, name):
    record = {"what": "x"}
    assert bench.write_record(record, None, "plan", device) is record and not list(tmp_path.iterdir())
    assert bench.write_record(record, tmp_path / "new", "plan", device) is record
    assert json.loads((tmp_path / "new" / f"plan-{name}.json").read_text()) == record


def test_unknown_dtype():
    with pytest.raises(RunError, match="dtype expects bfloat16 or float32, got 'int8'"):
        bench.model(None, dtypes=("int8",))


def test_batches_repeat_or_do_not():
    for fresh in (True, False):
        ids = bench.batches(50, 2, 4, fresh)
        assert torch.equal(next(ids), next(ids)) != fresh


def test_the_order_turns():
    seen = []
    bench.take_turns({name: lambda ids, name=name: seen.append(name) or 1.0 for name in "abc"}, iter(range(9)), 2)
    assert "".join(seen) == "abcbcacababc"


def count_page_faults(progress):
    """Of three buffers of 64 MiB, each freed before the next and after a first one; None where memory is not kept."""
    if not keep_freed_memory():
        return None
    import resource

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    return [faults() for _ in range(3)]


def test_kept_memory_is_used_again():
    """After a large buffer is freed, the next one of its size takes its place, without new pages. In a process of its
    own: the heap of one that has run thousands of tests may have no place that is large enough."""
    counts = in_fresh_process(count_page_faults, progress=lambda n: None, fresh=0)
    assert counts is None or min(counts) < 1000  # 64 MiB fresh from the kernel are 16384 pages of 4 KiB


def test_bench_explorer_times_every_slider_of_a_page(tmp_path, monkeypatch, capsys):
    """And prints nothing else: Streamlit warns a driver that runs in no session."""
    from etude import explorer
    from etude.bench import explorer as bench_explorer

    monkeypatch.setattr(explorer, "PAGES", [page for page in explorer.PAGES if page.name == "summary"])
    monkeypatch.setattr(bench_explorer, "VALUES", 2)
    warned = logging.handlers.BufferingHandler(100)
    contexts = logging.getLogger("streamlit.runtime.scriptrunner_utils.script_run_context")
    monkeypatch.setattr(contexts, "handlers", [warned])
    contexts.setLevel("WARNING")
    record = bench_explorer.bench(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.name.startswith("explorer-") and json.loads(path.read_text()) == record
    [control] = record["controls"]
    assert [page["page"] for page in record["pages"]] == ["summary"] and record["pages"][0]["cold_s"] == record[
        "slowest_cold_s"
    ] > 0
    assert control["control"] == "piece-1" and len(control["seconds"]) == 2 and min(control["seconds"]) > 0
    assert f"median {record['median_s'] * 1e3:.0f} ms" in capsys.readouterr().out and not warned.buffer


def test_bench_explorer_times_a_slider_that_another_slider_renames():
    from streamlit.testing.v1 import AppTest

    from etude.bench.explorer import redraws

    page = """
import streamlit as st
most = st.slider("Task", 2, 9, 5, key="task")
st.slider("Turn", 1, most, 1, key=f"turn-{most}")
"""
    assert [one["control"] for one in redraws(AppTest.from_string(page).run(), "page")] == ["task", "turn-5"]


def test_a_select_slider_says_its_options_as_text():
    from etude.bench.explorer import number

    assert [number(text) for text in ("3", "0.5", "1e-06", "all")] == [3, 0.5, 1e-6, "all"]


def test_bench_delta_times_three_ways_that_give_the_weights_back(tmp_path, capsys):
    from etude.bench import delta

    record = delta.bench(tmp_path, weights=2**14, rounds=2)
    assert capsys.readouterr().out.count("gap + step") == len(delta.SHARES) and len(record["rows"]) == 3 * len(
        delta.SHARES
    )
    assert all(row["encode_gb_s"] > 0 and row["decode_of_all"] > 0 for row in record["rows"])
    smaller = {row["way"]: row["times_smaller"] for row in record["rows"] if row["share"] == 0.012}
    assert smaller["gap + step"] > smaller["XOR"] > smaller["all"] > 1


def test_bench_delta_shows_no_speed_of_a_codec_that_changes_a_bit(monkeypatch):
    from etude.bench import delta
    from kit.settings import RunError

    monkeypatch.setattr(
        delta, "unpack", lambda blob, size: (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    )
    with pytest.raises(RunError, match="gap . step does not give the weights back"):
        delta.bench(None, weights=2**12, rounds=1)


def test_bench_step_writes_what_it_prints(tmp_path, capsys):
    record = step.bench("tiny", 2, 64, 32, tmp_path, rounds=1)
    [path] = tmp_path.iterdir()
    assert path.name.startswith("step-") and json.loads(path.read_text()) == record
    assert [cell["formats"] for cell in record["cells"]] == [*step.CELLS]
    plain, recomputed, quantised = record["cells"]
    assert plain["loss"] == pytest.approx(recomputed["loss"], abs=1e-5) == pytest.approx(quantised["loss"], abs=0.05)
    assert (
        plain["flops"] == recomputed["flops"]
        and plain["planned_bytes"]["activations"] > recomputed["planned_bytes"]["activations"]
    )
    assert plain["moments_bytes"] >= 2 * plain["weights_bytes"]
    assert capsys.readouterr().out.count("tokens/s") == 3


def test_bench_decode_counts_tokens_after_the_prompts(tmp_path, capsys):
    record = decode.bench("tiny", 1, [1, 3], prompt=5, new=4, out=tmp_path, rounds=1)
    assert json.loads(next(tmp_path.iterdir()).read_text()) == record
    assert [(cell["sampler"], cell["rows"]) for cell in record["cells"]] == [
        (s, n) for s in ("Sampler", "ContinuousSampler") for n in (1, 3)
    ]
    assert all(
        cell["tokens"] == 3 * cell["rows"] for cell in record["cells"]
    )  # the first token of each belongs to the prompt's pass
    assert capsys.readouterr().out.count("tokens/s") == 4


def test_rows_that_do_not_fill_a_step_are_one_line(ask):
    code, _, said = ask("bench", "step", "--model", "tiny", "--tokens", 100, "--length", 64)
    assert code and "--tokens must be a multiple of --length" in said and said.count("\n") == 1
