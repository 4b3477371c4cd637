"""Real networks on two ranks: `etude figure cpt-real`, what its verdicts say of made-up numbers, and the full recipe
from SmolLM2."""

import io
import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from etude import catalog
from etude.ledger import figures
from etude.tasks.build import make_all
from kit.settings import RunError
from recipe.full import stages as chain
from ref import cpt
from ref.network import load_hf
from ref.network.model import config_of
from sims.base_evaluations import packages
from sims.cpt_real import experiment as cpt_real
from sims.cpt_real.experiment import Experiment, concluded, corpus_of, losses, texts
from tests import elsewhere
from tests.mirror.recipes import ROOT, hash_results, words

SMALL = Experiment(
    budgets=(512, 1024, 2048), rows=2, length=128, windows=5, window=64, seeds=2, resamples=20, dtype="float32"
)


def wheel(**files: bytes | str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return made.getvalue()


def test_a_wheels_python_files_without_what_stands_at_their_heads():
    made = wheel(
        **{
            "a__b.py": "# Copyright\n#\n\n# more\nimport os  # x\n# kept\n",
            "a__c.txt": "no",
            "a__bad.py": b"\xff",
            "a__empty.py": "# only\n",
        }
    )
    assert texts(made) == {"a/b.py": "import os  # x\n# kept\n"}
    assert texts(wheel(**{"..__..__out.py": "x = 1\n", "__root.py": "x = 1\n", "in.py": "\n\ny = 2"})) == {
        "in.py": "y = 2"
    }


def test_the_corpus_is_a_folder_or_a_known_wheel(tmp_path, monkeypatch):
    assert corpus_of(str(tmp_path), tmp_path / "x") == tmp_path and not (tmp_path / "x").exists()
    with pytest.raises(RunError, match="package 'rm -rf' is neither a folder nor a known wheel"):
        corpus_of("rm -rf", tmp_path / "x")
    package, data = (
        next(iter(cpt_real.WHEELS)),
        wheel(**{"top__one__a.py": "a = 1\n", "top__one__sub__b.py": "b = 2\n"}),
    )

    def download(command, **_):
        assert command[-1] == package and "--only-binary" in command and "--no-deps" in command
        (Path(command[-2]) / "p.whl").write_bytes(data)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(
        RunError, match="not the one that this version knows; pass a folder of code with --set package=FOLDER"
    ):
        corpus_of(package, tmp_path / "x")
    monkeypatch.setitem(cpt_real.WHEELS, package, cpt_real.hashlib.sha256(data).hexdigest())
    found = corpus_of(package, tmp_path / "x")
    assert {str(path.relative_to(found)): path.read_text() for path in found.rglob("*.py")} == {
        "a.py": "a = 1\n",
        "sub/b.py": "b = 2\n",
    }
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is there already"))
    assert corpus_of(package, tmp_path / "x") == found
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="a\nno network\n"))
    with pytest.raises(RunError, match=r"pip cannot download .* \(no network\); unpack its wheel yourself"):
        corpus_of(package, tmp_path / "y")


def test_windows_are_scored_like_codebase_perplexity(tiny_run):
    """All windows together score what `codebase_nll` scores, but for the half of the first that has no context."""
    model, tokenizer = (
        load_hf(tiny_run / "checkpoints" / "cpt"),
        cpt.load_tokenizer(tiny_run / "data" / "tokenizer.json"),
    )
    held = cpt.Corpus({"a.py": "def f(x):\n    return x + 1\n" * 12})
    found = cpt.windows(model.config, tokenizer, held, 64, None, None, 4)
    cut = replace(held, files={"a.py": tokenizer.decode(found.ids[: 64 + 32 * (len(found.starts) - 2)].tolist())})
    every = losses(model, tokenizer, cut, replace(SMALL, windows=1000))
    whole = cpt.codebase_nll(model, tokenizer, cut, 64)
    with torch.no_grad():
        rows = found.ids[None, :32]
        first = -model.logprob(model(rows, logits=False).hidden[0, :-1], rows[0, 1:]).double().sum().item()
    assert (
        sum(nats for nats, _ in every) == pytest.approx(whole.nll - first, rel=1e-6)
        and sum(n for _, n in every) == whole.tokens - 31
    )
    few = losses(model, tokenizer, cut, replace(SMALL, windows=2))
    assert few == [pytest.approx(every[0]), pytest.approx(every[-1])]
    with pytest.raises(ValueError, match="fewer than a window of 64"):
        losses(model, tokenizer, cpt.Corpus({"a.py": "x = 1\n"}), SMALL)


def made(fall: float = 0.1, control: float = 1.9, forget: float = 0.05) -> list[dict]:
    """Numbers as the experiment leaves them: loss 2 as it came, less `fall` per tenfold tokens in the package, with
    noise of 0.001."""
    rng = np.random.default_rng(0)

    def one(arm: str, budget: int, seed: int, loss: float, library: float) -> dict:
        windows = 20 + np.linspace(-5, 5, 6)
        scored = {
            part: [[float((mean + rng.normal(0, 1e-3)) * n), float(n)] for n in windows]
            for part, mean in (("package", loss), ("library", library))
        }
        return {"arm": arm, "budget": budget, "seed": seed} | scored

    found = [one("base", 0, 0, 2.0, 1.0)]
    for budget in SMALL.budgets:
        found += [one("package", budget, seed, 2 - fall * np.log10(budget / 51.2), 1 + forget) for seed in range(2)]
    return found + [one("control", 2048, seed, control, 0.9) for seed in range(2)]


def test_verdicts_follow_from_the_numbers():
    found = concluded(made(), SMALL)
    line, versus = found["claims"]
    assert line["verdict"] == "reproduced" and line["measured"] == pytest.approx(-0.1, abs=0.005)
    assert versus["verdict"] == "reproduced" and versus["measured"] == pytest.approx(
        -0.1 * np.log10(40) + 0.1, abs=0.005
    )
    fits = found["fits"]
    assert fits["forgotten"]["difference"] == pytest.approx(0.05, abs=0.005) and fits["control_library"][
        "difference"
    ] == pytest.approx(-0.1, abs=0.005)
    assert len(found["rows"]) == 1 + 3 * 2 + 2 and found["rows"][0]["codebase_loss"] == pytest.approx(2, abs=0.005)
    assert "+0.05" in versus["note"] or "+0.049" in versus["note"]
    assert concluded(made(control=1.7), SMALL)["claims"][1]["verdict"] == "contradicted"
    assert concluded(made(fall=-0.1), SMALL)["claims"][0]["verdict"] == "contradicted"
    assert not any(figures.contradiction(claim) for claim in found["claims"])
    alone = [one for one in made() if one["seed"] == 0]
    assert {claim["verdict"] for claim in concluded(alone, replace(SMALL, seeds=1))["claims"]} == {"not tested"}


def test_two_ranks_train_and_what_was_measured_stays(tiny_run, tmp_path, ask, here):
    from tests import forks

    entry = catalog.find_experiment("cpt-real")
    assert entry is not None
    words = ["figure", "cpt-real", "--out", tmp_path / "out"]
    sets = {
        "model": tiny_run / "checkpoints" / "cpt",
        "package": forks.CORPUS,
        "budgets": "512,1024,2048",
        "rows": 2,
        "length": 128,
        "windows": 4,
    }
    sets |= {"window": 32, "seeds": 1, "resamples": 20, "dtype": "float32", "lr": 0.003}
    code, said, error = ask(*words, *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")))
    assert code == 0 and not error, error
    record = json.loads((tmp_path / "out" / "cpt-real.json").read_text())
    assert [(row["arm"], row["budget"]) for row in record["rows"]] == [
        ("base", 0),
        *(("package", b) for b in (512, 1024, 2048)),
        ("control", 2048),
    ]
    assert len({row["codebase_loss"] for row in record["rows"]}) == 5
    assert (tmp_path / "out" / "cpt-real.png").stat().st_size > 10_000 and not list(
        (tmp_path / "out").glob("runs/*/checkpoints/final")
    )
    assert (
        not list((tmp_path / "out").glob("runs/*/state"))
        and (tmp_path / "out" / "runs" / "package-2048-0" / "report.json").exists()
    )


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"budgets": (512, 1024)}, "three or more"),
        ({"budgets": (512, 600, 2048)}, "multiples of rows · length = 256"),
        ({"windows": 0}, "windows"),
        ({"window": 2}, "window"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(changed, why):
    with pytest.raises(ValueError, match=why):
        replace(SMALL, **changed)


def test_a_model_that_is_none(tmp_path, ask):
    code, _, error = ask("figure", "cpt-real", "--out", tmp_path / "out", "--set", f"model={tmp_path}")
    assert (
        code == 2
        and "is neither one of smollm2-135m" in error
        and error.count("\n") == 1
        and not (tmp_path / "out").exists()
    )


@pytest.mark.real
def test_the_full_recipe_from_smollm2(tmp_path, ask, here):
    """Every stage, a few steps each: 135 million weights, a tokenizer and a chat of somebody else's."""
    start, out = packages.folder_of("smollm2-135m", os.environ.get("ETUDE_MODELS") or tmp_path), tmp_path / "out"
    few = (
        "training.tokens=2048", "training.long_tokens=2048", "training.long_length=256",
        "mtp.tokens=1024", "mtp.layers.intermediate_size=256",
        "sft.demonstrations=8", "sft.epochs=1", "rl.steps=1", "rl.prompts=2", "rl.max_len=160",
        "context.trigger=150", "evaluation.tasks=2",
        "cluster.ep=1", "cluster.rl_cp=2", "cluster.timeout=900",
    )  # fmt: skip
    code, said, error = ask(*words(out, start, *(word for one in few for word in ("--set", one))))
    assert code == 0 and f"report: {out / 'report.html'}" in said, error
    record = json.loads((out / "report.json").read_text())
    assert {"data", *chain.STAGES} <= record["stages"].keys() and "Unfinished" not in (out / "report.html").read_text()
    assert config_of(out / "checkpoints" / "final") == config_of(start)
    elsewhere.check(out / "checkpoints" / "final", drafts=True)


@pytest.mark.real
def test_rl_on_packages_from_smollm2(tmp_path, ask, here):
    """Tasks of six packages, SFT, three steps of RL, evaluation and report, with a language model whose template knows
    no tools; killed in each stage and resumed, the same bits."""
    start = packages.folder_of("smollm2-135m", os.environ.get("ETUDE_MODELS") or tmp_path)
    recipes, out, killed = (tmp_path / name for name in ("recipes", "out", "killed"))
    specs = (*(f"generated:{number}" for number in range(5)), "generated:heldout:0")
    assert make_all(specs, recipes, 2, 60.0, overwrite=False)
    few = (
        "training.dtype=bfloat16", "cluster.agent_length=1024", "rl.max_len=1024", "rl.turn_tokens=96",
        "rl.steps=3", "rl.prompts=1", "rl.rollouts=4", "rl.lr=1e-5", "sft.epochs=1", "sft.rows=2", "sft.adamw_lr=3e-4",
        "evaluation.tasks=2", "evaluation.samples=1", "evaluation.resamples=100", "cluster.checkpoint_every=1",
        "tasks.demonstrations=32", "tasks.styles=direct", "tasks.tools=read,edit,shell,finish", "tasks.turns=4",
        "tasks.threads=false",
    )  # fmt: skip
    options = ("--scale", "full", "--backend", "gloo", "--nproc", "2", "--config", ROOT / "examples" / "one-gpu.toml")
    sets = [word for item in few for word in ("--set", item)]

    def run(out, *more):
        return ask("run", "recipe", *options, "--out", out, "--checkpoint", start, "--tasks", recipes, *sets, *more)

    code, printed, error = run(out)
    assert code == 0 and f"report: {out / 'report.html'}" in printed, error
    assert "chat format: the default one" in printed
    result = json.loads((out / "report.json").read_text())["stages"]["eval"]
    assert result["checkpoint"]["valid_calls"]["value"] == 0 and result["before"]["valid_calls"]["value"] > 0.5
    assert len(list((out / "episodes").glob("*/*.jsonl"))) == 3 * 2
    stages = ("sft", "measure", "rl", "eval")
    here += stages
    for number, stage in enumerate(stages):
        code, _, error = run(killed, *(["--resume"] if number else []))
        assert code == 2 and "Continue with" in error and not (killed / "stages" / f"{stage}.json").exists()
    assert run(killed, "--resume")[0] == 0
    assert hash_results(killed) == hash_results(out)
