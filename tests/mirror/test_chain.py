"""`etude run recipe --scale full`: all stages, on two ranks that stay from test to test. The ranks of torchrun are
tested in test_full.py."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.plan import recipe as prices
from etude.run.settings import settings
from kit.disk import hash_file, read_lines
from recipe.full import stages as chain
from recipe.full import weights
from ref import lora
from ref.network import Transformer, load_extra, load_hf, save_hf
from ref.network.model import config_of
from scaled.plan import HARDWARE
from scaled.runtime import launch
from tests import chats, elsewhere
from tests.mirror.recipes import ROOT, words


def kept(out: Path) -> dict[str, str]:
    """What must not depend on interruptions."""
    files = [
        *out.glob("metrics/*.jsonl"),
        *out.glob("checkpoints/*/*.safetensors"),
        *out.glob("checkpoints/*/mtp/*"),
        out / "stages" / "eval.json",
    ]
    return {str(path.relative_to(out)): hash_file(path) for path in files if path.name != "decode.jsonl"}


def test_every_stage_is_played_and_survives_sigkill(tiny_run, tmp_path, ask, here):
    """From the checkpoint of a small run to a report; killed in each stage and resumed, the same figures and weights to
    the last bit."""
    start, out, killed = tiny_run / "checkpoints" / "mid-cpt", tmp_path / "through", tmp_path / "killed"
    code, said, error = ask(*words(out, start))
    assert code == 0 and not error and f"report: {out / 'report.html'}" in said, error
    record = json.loads((out / "report.json").read_text())
    assert record["technique"] == "recipe full" and {"data", *chain.STAGES} <= record["stages"].keys()
    assert (
        "The recipe at full scale" in (out / "report.html").read_text()
        and "Unfinished" not in (out / "report.html").read_text()
    )

    shapes = config_of(start)
    for name in ("mid-cpt", "mtp", "cpt", "sft", "final"):
        assert config_of(out / "checkpoints" / name) == shapes and bool(load_extra(out / "checkpoints" / name)) == (
            name != "mid-cpt"
        )
    first, mid, last = (
        load_hf(path).state_dict() for path in (start, *(out / "checkpoints" / name for name in ("mid-cpt", "mtp")))
    )
    assert any(not (mid[name] == x).all() for name, x in first.items()) and all(
        (last[name] == x).all() for name, x in mid.items()
    )
    elsewhere.check(out / "checkpoints" / "final", drafts=True)
    assert read_lines(out / "metrics" / "sft.jsonl")[-1]["tokens"] > 0 and not list((out / "work").iterdir())

    for stage in chain.trained(settings("recipe", "gloo", record["config"])):
        lines = read_lines(out / "speed" / f"{stage}.jsonl")
        assert [line["step"] for line in lines] == [*range(1, record["stages"][stage]["steps"] + 1)]
        assert all(line["mfu"] > 0 and line["seconds"] >= line["train"] > 0 for line in lines)
    assert "<h2>Speed</h2>" in (out / "report.html").read_text()
    config = settings("recipe", "gloo", record["config"])
    talk = prices.conversations(config, out / "checkpoints" / "final")
    for one in prices.prices(config, shapes, 2, HARDWARE["h200"], talk)[:5]:  # `etude plan --recipe` said how many
        played = record["stages"][one.stage]["steps"]
        assert abs(one.steps - played) <= 1 + played // 5, one

    here += chain.STAGES
    for number, stage in enumerate(chain.STAGES):
        code, _, error = ask(*words(killed, start), *(["--resume"] if number else []))
        assert (
            code == 2
            and "Continue with: etude run recipe --scale full --out" in error
            and not (killed / "stages" / f"{stage}.json").exists()
        )
    assert ask(*words(killed, start), "--resume")[0] == 0
    for path in (out / "speed").glob("*.jsonl"):
        steps = [line["step"] for line in read_lines(killed / "speed" / path.name)]
        assert steps == [line["step"] for line in read_lines(path)]
    assert kept(killed) == kept(out) and len(kept(out)) >= 7 + 5 + 4 + 1

    code, _, error = ask(*words(out, start))
    assert code == 2 and "already holds a run; add --resume" in error
    code, _, error = ask(*words(out, start, "--set", "rl.lr=0.5"), "--resume")
    assert code == 2 and "was started with rl.lr" in error


@pytest.mark.parametrize(("long_length", "expected"), [(64, 8), (65, 4), (512, 4)])
def test_windows_that_are_read_at_once(monkeypatch, long_length, expected):
    """On 4 dp ranks, with micro-batches of 2 rows of 64 tokens in pretraining: as many tokens, but one window at
    least."""
    monkeypatch.setattr(weights, "current", lambda: SimpleNamespace(group=lambda name: SimpleNamespace(size=4)))
    c = settings("recipe", "gloo", {"training": {"length": 64, "long_length": long_length, "batch_tokens": 1024},
                                    "cluster": {"micro_rows": 2}})  # fmt: skip
    assert weights.count_windows(c) == expected


def test_a_network_from_elsewhere_speaks_with_the_tokens_of_its_chats(tiny_run, tmp_path, ask, here):
    """A dense Llama whose tokenizer has ChatML's tokens: SFT on conversations reads them in its own template, which
    goes with that checkpoint; the agent's turns begin with them, in RL and for transformers."""
    start, out = tmp_path / "llama", tmp_path / "out"
    shape = config_of(tiny_run / "checkpoints" / "mid-cpt")
    dense = {"num_experts": 0, "intermediate_size": 32, "qk_norm": False, "rope_theta": 1e4}
    save_hf(Transformer(type(shape)(**{**vars(shape), **dense})), start)
    text = (tiny_run / "data" / "tokenizer.json").read_text(encoding="utf-8")
    (start / "tokenizer.json").write_text(
        text.replace("<|env|>", "<|im_end|>").replace("<|agent|>", "<|im_start|>"), encoding="utf-8"
    )
    (start / "chat_template.jinja").write_text(chats.CHATML)
    asked = [{"role": "user", "content": "fix m0"}, {"role": "assistant", "content": "read m0"}]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": asked * n}) + "\n" for n in range(1, 60)) + "{\n"
    )
    file = f"sft.conversations={tmp_path / 'chats.jsonl'}"
    new = (
        file,
        "training.long_yarn=2",
        "training.long_length=512",
        "training.long_tokens=8192",
        "rl.steps=2",
        "sft.lora=4",
        "rl.lora=2",
        "cluster.ep=1",
        "cluster.rl_cp=2",
        "evaluation.decode_rounds=0",
    )
    code, said, error = ask(*words(out, start, *(word for one in new for word in ("--set", one))))
    assert code == 0, error
    assert f"router replay: {start} has no experts, so there is nothing to replay" in said
    assert "sft.lora=4: adapters of all projections, " in said
    check_adapters(out)
    assert not (out / "stages" / "decode.json").exists() and "Unfinished" not in (out / "report.html").read_text()
    assert f"skipped: {tmp_path / 'chats.jsonl'}:60: not a line of JSON" in said
    told = json.loads((out / "stages" / "data.json").read_text())["result"]["conversations"]
    assert told["conversations"] == 59 and told["skipped"] == 1 and told["learned"] > 0 and told["cut"] > 0
    assert json.loads((out / "stages" / "sft.json").read_text())["result"]["steps"] == 2 * (told["rows"] // 4)
    assert (out / "checkpoints" / "sft" / "chat_template.jinja").read_text() == chats.CHATML
    assert (out / "checkpoints" / "mid-cpt" / "chat_template.jinja").exists() and not (
        out / "checkpoints" / "final" / "chat_template.jinja"
    ).exists()
    elsewhere.check(out / "checkpoints" / "final", drafts=True)
    stretched = [config_of(out / "checkpoints" / name).rope_scaling for name in ("mtp", "cpt", "final")]
    assert [one.rope_type for one in stretched] == ["default", "yarn", "yarn"] and stretched[
        -1
    ].original_max_position_embeddings == 512


def check_adapters(out: Path) -> None:
    """Both stages trained adapters: a checkpoint is the one before it with its adapter merged."""
    for name, before, rank in (("sft", "cpt", 4), ("final", "sft", 2)):
        folder = out / "checkpoints" / f"{name}-adapter"
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(base) == (out / "checkpoints" / before).resolve()
        start, adapted = load_hf(Path(base)), lora.load_adapter(load_hf(Path(base)), folder)
        assert lora.rank_of(adapted) == rank
        trained = load_hf(out / "checkpoints" / name)
        for (weight_name, merged), p in zip(lora.weights(adapted), trained.parameters(), strict=True):
            assert (p - merged).abs().max() < 1e-6
            assert p.equal(start.get_parameter(weight_name)) != weight_name.endswith("_proj.weight")
        stage = json.loads((out / "stages" / f"{'sft' if name == 'sft' else 'rl'}.json").read_text())
        assert f"checkpoints/{name}-adapter/adapter_model.safetensors" in stage["files"]


def test_what_cannot_work_is_said_before_a_rank_starts(tiny_run, tmp_path, ask, monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks were started"))
    start, out = tiny_run / "checkpoints" / "mid-cpt", tmp_path / "out"
    bare = tmp_path / "bare"
    shutil.copytree(start, bare)
    text = (bare / "tokenizer.json").read_text(encoding="utf-8")
    (bare / "tokenizer.json").write_text(
        text.replace("<|env|>", "<|a|>").replace("<|agent|>", "<|b|>"), encoding="utf-8"
    )
    for more, why in (
        (["cluster.cp=3"], "cluster.cp=3 must divide the number of ranks, 2; see --set cluster.cp=… and --nproc"),
        (["cluster.rl_cp=4"], "cluster.rl_cp=4 must divide the number of ranks, 2"),
        (["sft.rows=3"], "sft.rows = 3 rows per step must be a multiple of dp = 2"),
        (
            ["training.length=2048"],
            "training.length=2048 is more than the network's 512 positions; see --set training.length",
        ),
        (
            ["training.batch_tokens=100"],
            "training.batch_tokens / training.length = 0 rows per step must be a multiple of dp = 2",
        ),
        (
            ["training.long_length=1024"],
            "training.long_length=1024 is more than the network's 512 positions; see --set training.long_length",
        ),
        (["training.length=127", "cluster.cp=2"], "training.length=127 must be a multiple of 2 · cp = 4"),
        (
            ["rl.max_len=300"],
            "training.long_length must hold a context of rl.max_len = 300 tokens, got 256; see --set "
            "training.long_length=…",
        ),
        (
            ["context.trigger=300"],
            "training.long_length must hold a context of 375 tokens, got 256; see --set training.long_length=…",
        ),
        (
            ["context.trigger=300", "cluster.agent_length=128"],
            "cluster.agent_length must hold a context of 375 tokens, got 128; see --set cluster",
        ),
        (["evaluation.tasks=1"], "evaluation.tasks must be at least the number of ranks, 2"),
        (["rl.steps=0"], "rl.steps must be at least 1, got 0"),
        (["rl.lora=9999"], "rl.lora=9999 must be less than the network's width"),
        (["cluster.ranks=2"], "cluster.ranks"),
        (tmp_path / "nowhere", "nowhere is not a folder with config.json, weights and tokenizer.json"),
        ([f"sft.conversations={tmp_path / 'no'}"], "is not a file; name a JSONL file of conversations"),
        (bare, "has no tokens <|env|> and <|agent|>, nor those of a chat"),
    ):
        sets, other = ([], more) if isinstance(more, Path) else (more, start)
        code, _, error = ask(*words(out, other), *(word for one in sets for word in ("--set", one)))
        assert code == 2 and why in error and error.count("\n") == 1, (more, error)
    given = [word for word in words(out, start) if word not in ("--checkpoint", start)]
    code, _, error = ask(*given)
    assert code == 2 and "a full run starts from a checkpoint: --checkpoint FOLDER" in error and error.count("\n") == 1
    code, _, error = ask("run", "recipe", "--checkpoint", start, "--out", out)
    assert code == 2 and "--checkpoint is for full runs" in error
    for more in ([], ["--resume"]):
        code, _, error = ask(*words(start.parent, start, *more))
        assert code == 2 and "is not empty and holds no run; choose another --out" in error
    assert not out.exists()


def test_small_and_full_runs_read_one_toml(tmp_path, ask, monkeypatch):
    """A small run leaves out what only ranks have, and says so."""
    from etude.run import technique as technique_run

    monkeypatch.setattr(technique_run, "play_technique", lambda entry, out, toml, *_: print(sorted(toml)))
    code, said, _ = ask("run", "recipe", "--config", ROOT / "examples" / "rehearsal.toml", "--out", tmp_path / "out")
    assert code == 0 and "rehearsal.toml: a small run ignores cluster and study, for other runs with this file" in said
    assert "'training'" in said and "'cluster'" not in said.splitlines()[-1]
