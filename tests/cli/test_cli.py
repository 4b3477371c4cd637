"""The command line as a user meets it: bad input costs one line and touches nothing."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from etude import catalog
from etude.cli import main as cli
from etude.cli import suggestions
from etude.console.options import read_toml, stored_config
from etude.run import settings as full_settings
from etude.run import technique as technique_run
from kit.runs import Run
from kit.settings import fill
from recipe.full import stages as chain
from tests.durations import ends_within

ROOT = Path(__file__).resolve().parents[2]


def call(*arguments: object, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


NODES = ("--nodes", "2", "--rendezvous", "host:29500")
BAD = [
    (["run", "krl"], "unknown technique 'krl'; did you mean kl?"),
    (["run", "zebra"], "unknown technique 'zebra'; choose from: recipe"),
    (["run", "kl", "--scale", "huge"], "--scale expects small or full, got 'huge'"),
    (["run", "kl", "--scale", "full", "--nproc", "8"], "needs 8 CUDA GPUs (ep=8, cp=8); this machine has"),
    (
        ["run", "recipe", "--scale", "full", "--nproc", "8"],
        "recipe at full scale needs 8 CUDA GPUs (ep=8, cp=2); this machine has",
    ),
    (
        ["run", "recipe", "--scale", "full", "--nproc", "8"],
        "--backend gloo --nproc 2 --config examples/rehearsal.toml --checkpoint runs/small/ch",
    ),
    (
        ["run", "recipe", "--scale", "full", "--backend", "gloo"],
        "a full run starts from a checkpoint: --checkpoint FOLDER, a Hugging Face folder",
    ),
    (["run", "cpt", "--scale", "full", "--nproc", "8"], "needs 8 CUDA GPUs (ep=8, cp=2); this machine has"),
    (["run", "cpt", "--scale", "full", "--backend", "mpi"], "--backend expects nccl or gloo"),
    (["run", "cpt", "--scale", "full", "--backend", "gloo", "--nproc", "0"], "--nproc must be at least 1"),
    (
        ["run", "cpt", "--scale", "full", "--backend", "gloo", "--nproc", "3", "--set", "cp=2"],
        "cp=2 must divide the number of ranks, 3",
    ),
    (
        ["run", "cpt", "--scale", "full", "--backend", "gloo", "--set", "ep=4"],
        "ep=4 must divide the number of ranks, 2",
    ),
    (
        ["run", "cpt", "--scale", "full", "--backend", "gloo", "--set", "length=100", "--set", "cp=4"],
        "length must be a multiple of 2 · cp = 8",
    ),
    (["run", "cpt", "--scale", "full", "--backend", "gloo", "--set", "rows=5"], "rows=5 must be a multiple of dp = 2"),
    (
        ["run", "mtp", "--scale", "full", "--backend", "gloo", "--set", "checkpoint=none"],
        "a full run starts from a checkpoint: --checkpoint",
    ),
    (
        ["run", "mtp", "--scale", "full", "--backend", "gloo", "--set", "checkpoint=other"],
        "checkpoint other is not a folder",
    ),
    (["run", "kl", "--nproc", "2"], "--nproc is for full runs"),
    (["run", "kl", "--nodes", "2"], "--nodes, --node and --rendezvous are for full runs"),
    (["run", "kl", "--resume", "--resume-or-begin"], "leave out --resume"),
    (["run", "cpt", "--scale", "full", "--nodes", "2"], "need each other, on every machine: --nodes N --node I"),
    (["run", "cpt", "--scale", "full", *NODES, "--node", "2"], "--node must be from 0 to 1, one for each of the 2"),
    (["run", "cpt-rl", "--scale", "full", *NODES, "--node", "0"], "cpt-rl runs on one machine"),
    (["run", "cpt", "--scale", "full", "--backend", "gloo", "--nproc", "1e99"], "expected a whole number, got '1e99'"),
    (["run", "kl", "--seed", "x"], "--seed"),
    (["run", "kl", "--checkpoint-seconds", "-1"], "--checkpoint-seconds"),
    (["run", "kl", "--bogus"], "--bogus"),
    (["run", "kl", "--set", "sed=1"], "unknown key 'sed'"),
    (["run", "kl", "--set", "seed"], "KEY=VALUE"),
    (["run", "kl", "--set", "seed=many"], "seed expects a whole number"),
    (["run", "kl", "--seed", "-1"], "seed must lie between 0 and 9007199254740991, got -1"),
    (["run", "recipe", "--seed", f"{2**64}"], f"seed must lie between 0 and 9007199254740991, got {2**64}"),
    (["run", "recipe", "--set", f"seed={2**63 - 1}"], "seed must lie between"),
    (["figure", "kl-variance", "--seed", f"{2**62}"], "seed must lie between"),
    (["run", "cpt", "--scale", "full", "--backend", "gloo", "--seed", "-3"], "seed must be at least 0, got -3"),
    (["run", "cpt", "--scale", "full", "--backend", "gloo", "--seed", f"{2**64}"], "seed must lie between"),
    (["run", "cpt", "--set", "steps=-5"], "steps must not be negative"),
    (["run", "recipe", "--set", "rl.steps=-4"], "rl.steps must be at least 0, got -4"),
    (["run", "recipe", "--set", "rl.rollouts=1"], "error: rl.rollouts must be at least 2"),
    (["run", "recipe", "--set", "rl.variant=ppo"], "expects dr-grpo or grpo or rloo or dapo or gspo, got 'ppo'"),
    (["run", "recipe", "--set", "rl.clip_high=-1"], "rl.clip_high must be at least 0, got -1"),
    (["run", "recipe", "--set", "rl.gate=1.5"], "rl.gate must lie between 0 and 1"),
    (["run", "recipe", "--set", "sft.lora=-1"], "sft.lora must be at least 0, got -1"),
    (["run", "recipe", "--set", "sft.lora=4"], "sft.lora and rl.lora are for full runs: etude run recipe --scale full"),
    (["run", "recipe", "--set", "rl.lora=4"], "sft.lora and rl.lora are for full runs"),
    (["run", "async-rl", "--set", "rl.lora=4"], "rl.lora is for synchronous RL, such as etude run recipe --scale full"),
    (["run", "recipe", "--set", "sft.depth_mix=0,0,0"], "sft.depth_mix must not be"),
    (["run", "recipe", "--set", "model.num_key_value_heads=0"], "error: model.num_key_value_heads must be at least 1"),
    (["run", "recipe", "--set", "mtp.layers.depth=0"], "error: mtp.layers.depth must be a whole number of at least 1"),
    (["run", "kl", "--config", "missing.toml"], "missing.toml"),
    (["run", "kl", "--config", "bad.toml"], "bad.toml is not valid TOML"),
    (["run", "kl", "--config", "latin.toml"], "latin.toml is not valid TOML"),
    (["run", "kl", "--config", "."], "Is a directory"),
    (["run", "kl", "--corpus", "."], "does not read a corpus"),
    (["run", "recipe", "--corpus", "missing"], "corpus missing does not exist"),
    (["run", "recipe", "--corpus", "bad.toml"], "is not a folder"),
    (["run", "recipe", "--set", "nonsense.key=1"], "unknown key 'nonsense"),
    (["run", "kl", "--out", "bad.toml"], "bad.toml is a file"),
    (["run", "kl", "--out", "other"], "holds no run"),
    (["run", "kl", "--out", "other", "--resume"], "holds no run"),
    (["run", "kl", "--out", "bad.toml/below"], "bad.toml"),
    (["plan", "--cp", "3"], "3 does not divide 8"),
    (["plan", "--hardware", "abacus"], "unknown hardware 'abacus'; choose from h200"),
    (["plan", "--model", "missing"], "--model expects qwen3_30b_a3b, qwen2_5_0_5b, tiny, or a Hugging Face folder"),
    (["plan", "--length", "33"], "length of 2 · cp = 4"),
    (["plan", "--gpus", "12", "--ep", "8"], "ep must divide dp · cp = 12"),
    (["plan", "--launches", "int4"], "--launches expects nvfp4-token, mxfp8 or bfloat16, got 'int4'"),
    (["plan", "--launches", "mxfp8", "--ep", "2"], "--ep does not apply to --launches"),
    (["plan", "--ep", "5", "--gpus", "10"], "--ep must divide the network's 128 experts, got 5"),
    (
        ["run", "kl-variance"],
        "kl-variance is a figure: etude figure kl-variance; to run the technique behind it: etude run kl",
    ),
    (["run", "best-of-k"], "best-of-k is a figure: etude figure best-of-k"),
    (["figure", "kl"], "kl is a technique: etude run kl; to reproduce its figure: etude figure kl-variance"),
    (["figure", "muon"], "muon is a technique: etude run muon; it has no figure of its own"),
    (["frob"], "frob"),
    (["bench", "frob"], "frob"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input(arguments, says, tmp_path, monkeypatch, ask):
    (tmp_path / "bad.toml").write_text("seed = = 1")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    code, _, error = ask(*arguments)
    assert code == 2
    assert error.count("\n") == 1 and error.startswith("error: ") and says in error
    assert tree(tmp_path) == before


def test_bad_input_from_outside():
    """Once as a real process: nothing but the line on stderr, no traceback, no stdout."""
    done = call("run", "krl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "did you mean kl?" in done.stderr


@pytest.mark.parametrize("stored", ["[1]", "null", "3"])
def test_settings_that_are_none_are_named(tmp_path, ask, stored):
    (tmp_path / "config.json").write_text(f'{{"technique": "recipe", "config": {stored}}}')
    code, _, error = ask("run", "recipe", "--resume", "--out", tmp_path)
    assert code == 2 and error.count("\n") == 1 and str(tmp_path) in error


def test_unreadable_corpus(tmp_path, ask, monkeypatch):
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")  # also true for root
    code, _, error = ask("run", "recipe", "--corpus", tmp_path / "closed", "--out", tmp_path / "out")
    assert code == 2 and error.count("\n") == 1 and "cannot be read" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["none", "Null", "true", "1e3", " blank ", "a=b", "(x)", "caf\udce9"])
def test_a_path_is_never_read_as_a_word(tmp_path, ask, monkeypatch, name):
    """--corpus, --out and --config are the folders and the file of that name, in small and in full runs, and so is the
    corpus of a run that goes on."""
    from etude.run import full
    from etude.run.settings import settings

    (tmp_path / name).mkdir()
    (tmp_path / f"{name}.toml").write_text("seed = 7")
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(
        technique_run,
        "play_technique",
        lambda entry, out, toml, sets, *_: told.append((out, fill(technique_run.config_class(entry), toml, sets))),
    )
    monkeypatch.setattr(
        full,
        "run",
        lambda entry, out, toml, sets, resume, nproc, backend, node: told.append(
            (out, settings(entry.name, backend, toml, sets))
        ),
    )
    words = ("--corpus", name, "--out", name, "--config", f"{name}.toml", "--set", "corpus=elsewhere")
    for technique, *more in (
        ("recipe", "--set", "data.corpus=x"),
        ("cpt", *words[-2:]),
        ("cpt", *words[-2:], "--scale", "full", "--backend", "gloo"),
    ):
        assert ask("run", technique, *more, *words[:-2]) == (0, "", "")
    (first, recipe), (second, demo), (third, rehearsal) = told
    assert {first, second, third} == {Path(name)} and {recipe.seed, demo.seed, rehearsal.seed} == {7}
    assert (recipe.data.corpus, demo.corpus, rehearsal.corpus) == (name, name, str(tmp_path / name))

    with Run.open("run", "recipe", recipe):
        pass
    assert fill(type(recipe), stored_config(Path("run"), "recipe")) == recipe


@pytest.mark.parametrize(
    "failure",
    [PermissionError(13, "Permission denied", "corpus/a.py"), OSError(28, "No space left on device")],
    ids=["permission", "disk full"],
)
def test_an_operating_system_error_is_one_line(tmp_path, ask, monkeypatch, failure):
    import ref.kl

    def fail(config, log):
        raise failure

    monkeypatch.setattr(ref.kl, "demo", fail)
    code, _, error = ask("run", "kl", "--out", tmp_path / "out")
    assert code == 2 and error.count("\n") == 1 and failure.strerror in error and not (tmp_path / "out").exists()


def test_folder_in_use(tmp_path, ask):
    config = technique_run.config_class(catalog.find("kl"))()
    with Run.open(tmp_path, "kl", config):
        before = tree(tmp_path)
        for extra in ((), ("--resume",)):
            code, _, error = ask("run", "kl", "--out", tmp_path, *extra)
            assert code == 2 and error.count("\n") == 1 and "in use by another run" in error
        assert tree(tmp_path) == before


def test_an_error_on_the_way_leaves_no_half_run(tmp_path, ask, monkeypatch):
    import ref.kl
    from kit.settings import RunError

    def fail(config, log):
        log(1, 2, loss=1.0)
        raise RunError("the corpus is empty; choose another --corpus")

    monkeypatch.setattr(ref.kl, "demo", fail)
    code, _, error = ask("run", "kl", "--out", tmp_path / "out")
    assert (code, error) == (2, "error: the corpus is empty; choose another --corpus\n")
    assert not (tmp_path / "out").exists()


def test_a_bug_is_not_hidden(tmp_path, monkeypatch):
    import ref.kl

    monkeypatch.setattr(ref.kl, "demo", lambda config, log: {}["missing"])
    monkeypatch.setattr(sys, "argv", ["etude", "run", "kl", "--out", str(tmp_path / "out")])
    with pytest.raises(KeyError):
        cli.main()


def test_interruption_says_how_to_go_on(tmp_path, monkeypatch, ask):
    import ref.kl

    def interrupt(config, log):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ref.kl, "demo", interrupt)
        code, _, error = ask("run", "kl", "--out", tmp_path / "out", "--seed", 5)
        blank = ask("run", "kl", "--out", tmp_path / "my run")
    assert code == 130 and error == f"interrupted; continue with: etude run kl --out {tmp_path}/out --resume\n"
    assert blank[2] == f"interrupted; continue with: etude run kl --out '{tmp_path}/my run' --resume\n"
    monkeypatch.setattr(ref.kl, "demo", lambda config, log: {"seed": config.seed})
    code, out, error = ask("run", "kl", "--out", tmp_path / "out", "--resume")  # the seed is remembered
    assert code == 0 and json.loads((tmp_path / "out" / "report.json").read_text())["result"] == {"seed": 5}
    code, _, error = ask("run", "kl", "--out", tmp_path / "out", "--resume", "--seed", 6)
    assert code == 2 and "seed = 5, not 6" in error


def test_a_demonstration(tmp_path, ask):
    """etude run kl: progress, a table, report.json; a second --resume shows the same without computing."""
    out = tmp_path / "out"
    code, shown, error = ask("run", "kl", "--out", out)
    assert (code, error) == (0, "")
    assert f"report: {out}/report.json" in shown and "result" in shown
    record = json.loads((out / "report.json").read_text())
    assert record["technique"] == "kl" and record["result"] and record["machine"]["cores"] >= 1
    assert ends_within(2, lambda: ask("run", "kl", "--out", out, "--resume"))
    assert ask("run", "kl", "--out", out, "--resume")[0] == 0
    code, _, error = ask("run", "kl", "--out", out)
    assert code == 2 and "already holds a run" in error


def test_paths_that_are_no_text(tmp_path, ask, monkeypatch):
    """A line that names one is shown, whatever the terminal can show; a run lies only where all its writers can
    write."""
    import ref.kl

    odd = tmp_path / os.fsdecode(b"caf\xe9")
    code, _, error = ask("run", "kl", "--out", odd / "out")
    assert (
        code == 2 and error.count("\n") == 1 and f"{tmp_path}/caf\\udce9/out is not UTF-8" in error and not odd.exists()
    )
    monkeypatch.setattr(ref.kl, "demo", lambda config, log: {"seed": config.seed})
    odd.mkdir()
    (odd / "settings.toml").write_text("seed = 7")
    code, _, error = ask("run", "kl", "--config", odd / "settings.toml", "--out", tmp_path / "out")
    assert (code, error) == (0, "") and json.loads((tmp_path / "out" / "report.json").read_text())["result"] == {
        "seed": 7
    }
    code, said, error = ask("plan", "--model", "tiny", "--length", 512, "--out", odd / "plan")
    assert (code, error) == (0, "") and "caf\\udce9/plan/plan.json" in said and (odd / "plan" / "plan.json").is_file()


def test_a_demonstration_is_simply_played_again(tmp_path, ask, monkeypatch):
    """It takes seconds. What lies in its folder stays, whosever it is; only a folder that was asked for is not
    exchanged for another."""
    import ref.kl

    monkeypatch.setattr(ref.kl, "demo", lambda config, log: {"seed": config.seed})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "kl-3").mkdir(parents=True)
    (tmp_path / "runs" / "kl-3" / "letter.txt").write_text("dear")
    assert ask("run", "kl")[0] == 0
    (tmp_path / "runs" / "kl" / "report.json").write_text("my own notes")
    before = tree(tmp_path)
    for number, name in ((1, "kl-2"), (2, "kl-4")):
        code, shown, error = ask("run", "kl", "--seed", number)
        assert (code, error) == (0, "") and f"runs/kl is not empty; writing to runs/{name}\n" in shown
        assert f"report: runs/{name}/report.json" in shown and (tmp_path / "runs" / name / "report.json").exists()
    assert before.items() <= tree(tmp_path).items()
    code, shown, _ = ask("run", "kl", "--resume")
    assert code == 0 and "report: runs/kl/report.json" in shown
    assert ask("run", "kl", "--out", "runs/kl")[0] == 2


def test_list_and_help(ask):
    code, shown, _ = ask("list")
    assert code == 0 and all(technique.name in shown for technique in catalog.TECHNIQUES)
    code, shown, _ = ask("run", "kl", "--help")
    assert code == 0 and "--checkpoint-seconds" in shown and "setting" in shown and "seed" in shown
    code, shown, _ = ask("--help")
    assert code == 0 and "run" in shown and "bench" in shown


def test_help_is_quick_because_torch_stays_out():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "etude.cli.main", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "recipe" in done.stdout
    assert not any(name in done.stderr for name in (" torch\n", "matplotlib\n", "transformers\n"))


def test_plan(tmp_path, ask):
    """A table for 8, 64 and 512 GPUs with what it assumes, and the same as numbers and a picture."""
    import json

    code, said, _ = ask("plan", "--out", tmp_path / "plan")
    assert (
        code == 0
        and "30.53 B parameters" in said
        and "512 GPUs" in said
        and "Guessed: 50% of peak" in " ".join(said.split())
    )
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [one["gpus"] for one in found] == [8, 64, 512] and found[0]["parameters"] == 30_532_122_624
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 10_000


def test_plan_of_a_layers_launches(ask):
    """The list of kernels/launches.py, row by row, with its sums."""
    from kernels.launches import launches

    code, said, error = ask("plan", "--launches", "nvfp4-token")
    listed = launches(32768, 2048, 768, 128, 8)
    assert (code, error) == (0, "") and f"{len(listed)} launches" in said
    assert f"{sum(one.bytes_read for one in listed) / 1e6:,.2f} MB" in said and "backward: d_act = dy w2" in said


def test_plan_of_a_small_network(tmp_path, ask):
    """In units that show something, and with rows that it has positions for."""
    from ref.network import Config, Transformer, save_hf

    save_hf(
        Transformer(Config.tiny(vocab_size=400, hidden_size=32, num_hidden_layers=1, moe_intermediate_size=16)),
        tmp_path / "net",
    )
    for model in ("tiny", tmp_path / "net"):
        code, said, error = ask("plan", "--model", model, "--gpus", 2, "--gpus", 8)
        assert (
            code == 0
            and error
            == "warning: rows have 512 tokens, not 32,768: the network's max_position_embeddings allows no more\n"
        )
        told = " ".join(said.split())  # wide titles are wrapped
        assert "rows of 512 tokens" in told
        assert not re.search(r"\b0(\.0+)? ?[kMGTmµ]?(B|s|%|M)\b", said), said
        assert re.search(
            r"\d\.\d\d M parameters, 0\.\d\d M active per token" if model == "tiny" else r"\d\d\.\d\d k parameters",
            told,
        ), told
    assert ask("plan", "--model", "tiny", "--gpus", 8, "--length", 256, "--out", tmp_path / "plan")[2] == ""
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())[0]["length"] == 256


@pytest.mark.parametrize("bias", [False, True], ids=["llama", "qwen2"])
def test_plan_of_another_family(tmp_path, ask, bias):
    from ref.network import Config, RopeScaling, Transformer, save_hf

    config = Config.tiny(
        400, num_experts=0, qk_norm=False, attention_bias=bias, rope_scaling=RopeScaling("yarn", 4.0, 128)
    )
    save_hf(Transformer(config), tmp_path / "net")
    assert ask("plan", "--model", tmp_path / "net", "--gpus", 4, "--out", tmp_path / "plan")[0] == 0
    [found] = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert found["parameters"] == found["active"] == config.parameters()


@pytest.mark.parametrize(
    ("values", "unit", "digits", "shown"),
    [
        ([15.27e9, 1.91e9, 0.239e9], "B", 2, ["15.27 GB", "1.91 GB", "0.24 GB"]),
        ([135e9], "B", 2, ["135.00 GB"]),
        ([2_690_000.0, 0.0], "B", 2, ["2.69 MB", "0"]),
        ([3.2e-5, 9e-6], "s", 2, ["32.00 µs", "9.00 µs"]),
        ([1e-9], "s", 2, ["1.00 ns"]),
        ([932e12], "", 0, ["932 T"]),
        ([0.0, 0.0], "B", 2, ["0", "0"]),
    ],
)
def test_units_fit(values, unit, digits, shown):
    from etude.plan import step as planning

    assert planning.cells(values, unit, digits) == shown


def test_the_help_shows_commands_in_groups(ask):
    code, out, _ = ask("--help")
    titles = [line.split()[1] for line in out.splitlines() if line.startswith("╭")]
    assert code == 0 and titles == ["Options", "Start", "Train", "Reproduce", "Environments", "Develop"]
    group = typer.main.get_command(cli.app)
    names = [name for names in suggestions.PANELS.values() for name in names]
    assert group.list_commands(typer.Context(group)) == names and sorted(names) == sorted(group.commands)


def test_the_help_of_every_command_begins_with_a_short_line():
    def walk(command, path):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}")

    for path, command in walk(typer.main.get_command(cli.app), "etude"):
        first = (command.help or "").split("\n\n")[0]
        assert first and (path == "etude" or len(first) <= 70 and "\n" not in first and first.endswith(".")), path


@pytest.mark.parametrize("name", ["recipe", "cpt-rl", "async-rl", *full_settings.PRETRAINING, *full_settings.RL])
def test_without_enough_gpus_the_error_names_the_options_for_one(name, ask, monkeypatch):
    """And those for CPUs. The options are valid settings that a single rank can train with."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, error = ask("run", name, "--scale", "full", "--nproc", "8")
    assert code == 2 and error.count("\n") == 1 and "needs 8 CUDA GPUs" in error and "this machine has 1. " in error
    one_gpu, cpus = re.findall(rf"On (?:one GPU|CPUs): etude run {name} --scale full (.*?)(?:, after|\. )", error)
    assert "--backend gloo" in cpus
    words = shlex.split(one_gpu)
    values = {
        option: [value for word, value in zip(words, words[1:]) if word == option]
        for option in ("--set", "--config", "--nproc")
    }
    assert values["--nproc"] == ["1"]
    toml = {key: value for path in values["--config"] for key, value in read_toml(Path(path)).items()}
    if name == "recipe":
        toml.pop("study")
    config = full_settings.settings(name, "nccl", toml, values["--set"])
    if name == "async-rl":
        grouped = full_settings.grouped(toml, values["--set"], 1, "nccl")
        assert full_settings.settings(name, "nccl", toml, [*values["--set"], *grouped]).grouped
    elif name in ("recipe", "cpt-rl"):
        assert all(chain.layout(config, 1, stage)["dp"] == 1 for stage in chain.trained(config))
        assert config.training.dtype == "float32"
    else:
        assert full_settings.layout(config, 1) == {"dp": 1, "cp": 1, "ep": 1} and config.dtype == "float32"


def test_the_version(ask):
    from etude import __version__

    code, out, _ = ask("--version")
    assert (
        code == 0
        and out.startswith(f"etude {__version__}, torch 2")
        and out.rstrip().endswith(f"Python {sys.version.split()[0]}")
    )


def test_a_shell_completes_commands_and_names():
    """As bash asks; the script that makes it ask is printed."""

    def complete(*words: str) -> list[str]:
        done = call(_ETUDE_COMPLETE="complete_bash", COMP_WORDS=" ".join(("etude", *words)), COMP_CWORD=str(len(words)))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert complete("pl") == ["play", "plan"]
    assert (
        complete("run", "ml") == [] and complete("run", "kl") == ["kl"] and complete("figure", "kl") == ["kl-variance"]
    )
    assert complete("claims", "--figure", "mt") == ["mtp"]
    for shell in ("bash", "zsh", "fish"):
        done = call(_ETUDE_COMPLETE=f"source_{shell}")
        assert done.returncode == 0 and "_ETUDE_COMPLETE" in done.stdout
