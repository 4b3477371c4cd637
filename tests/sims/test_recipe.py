"""The whole recipe at a size of seconds: it ends, its checkpoints open elsewhere, and no kill changes a number."""

import itertools
import json
import pickle
import random
import shutil
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kit.disk import seal_record
from kit.runs import Run
from kit.settings import fill
from lessons.talks import Ids
from recipe.microrepo import transcript
from recipe.packages.checkpoint_tasks import find_package_run
from recipe.small import data as corpus
from recipe.small import reinforcement
from recipe.small import stages as recipe
from recipe.small.agent import Language, single
from recipe.small.latest_rollouts import MAX_ROLLOUTS
from recipe.small.learner import Learner, language_of, load_checkpoint
from recipe.small.micro_world import origin
from recipe.small.tasks import compute_keep_probabilities
from ref import rl
from ref.network import Transformer, load_hf
from ref.rl import Step
from ref.rollout import Rollout
from ref.self_summary import Chain, Segment
from sims.policies import SMOKE
from tests import elsewhere, forks

ROOT = Path(__file__).resolve().parents[2]


def deterministic(out: Path) -> dict[str, bytes]:
    """Everything that two runs of one configuration must share: metrics, results, weights. Not the clock's readings."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted((out / "metrics").glob("*.jsonl"))}
    found |= {str(p.relative_to(out)): p.read_bytes() for p in sorted((out / "checkpoints").rglob("*.safetensors"))}
    return found | {p.name: p.read_bytes() for p in sorted((out / "stages").glob("*.json")) if p.stem != "decode"}


def test_every_stage_leaves_its_result(tiny_run):
    assert {p.stem for p in (tiny_run / "stages").glob("*.json")} == {
        "data",
        "cpt",
        "mtp",
        "long",
        "sft",
        "rl",
        "eval",
        "decode",
    }
    report = json.loads((tiny_run / "report.json").read_text())
    assert (tiny_run / "report.html").read_text().startswith("<!")
    assert 0 <= report["stages"]["eval"]["before"]["success"]["value"] <= 1
    rl = [json.loads(line) for line in (tiny_run / "metrics/rl.jsonl").read_text().splitlines()]
    assert len(rl) == 4 and all(np.isfinite(v) for line in rl for v in line.values())
    newest = json.loads((tiny_run / "rollouts/rl.json").read_text())
    assert (
        newest["step"] == 4
        and len(newest["rollouts"]) == min(SMOKE["rl"]["rollouts"], MAX_ROLLOUTS)
        and all(one["text"] for one in newest["rollouts"])
    )
    cpt_loss = [json.loads(line)["loss"] for line in (tiny_run / "metrics/cpt.jsonl").read_text().splitlines()]
    assert cpt_loss[-1] < cpt_loss[0] - 1
    decode = json.loads((tiny_run / "stages/decode.json").read_text())["result"]
    assert list(decode["ways"]) == ["mtp", "mtp+recall", "mtp+recall+ahead"]
    full = decode["ways"]["mtp+recall+ahead"]
    same = ("identical", "acceptance", "tokens_per_cycle", "retracted", "speedup")
    assert {key: decode[key] for key in same} == {key: full[key] for key in same}
    for way in decode["ways"].values():
        assert way["identical"] == 1 and 0 <= way["retracted"] < 1
        assert all(way[f"speedup{by}"]["low"] > 0 for by in ("", "_with_environment"))
    assert not decode["ways"]["mtp"]["recall_acceptance"] and len(full["recall_acceptance"]) == 4


def test_a_run_trains_another_member_of_the_family(tiny_run, tmp_path):
    """The same run until RL, and other weights after it; its model card names the algorithm."""
    out = tmp_path / "run"
    forks.play(*forks.smallest(out, "--set", "rl.variant=rloo"), said=tmp_path / "said")
    assert json.loads((out / "config.json").read_text())["config"]["rl"]["variant"] == "rloo"
    rl = [json.loads(line) for line in (out / "metrics/rl.jsonl").read_text().splitlines()]
    assert len(rl) == 4 and all(np.isfinite(v) for line in rl for v in line.values())
    plain, changed = tiny_run / "checkpoints", out / "checkpoints"
    sft, final = "sft/model.safetensors", "final/model.safetensors"
    assert (plain / sft).read_bytes() == (changed / sft).read_bytes()
    assert (plain / final).read_bytes() != (changed / final).read_bytes()
    assert "reinforcement learning (Dr. GRPO)" in (plain / "final/README.md").read_text(encoding="utf-8")
    assert "reinforcement learning (RLOO)" in (changed / "final/README.md").read_text(encoding="utf-8")


def test_the_final_checkpoint_opens_in_transformers_with_the_same_logits(tiny_run):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    path = tiny_run / "checkpoints/final"
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("def m3(a, b):\n    return max(a, b)\n")])
    with torch.no_grad():
        torch.testing.assert_close(load_hf(path)(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mid-cpt", "mtp", "cpt", "sft", "final"])
def test_transformers_reads_and_plays_every_checkpoint_as_we_do(tiny_run, name):
    elsewhere.check(tiny_run / "checkpoints" / name, drafts=name != "mid-cpt")
    card = (tiny_run / "checkpoints" / name / "README.md").read_text(encoding="utf-8")
    last = {"final": "success, tasks of the last step", "mtp": "loss of the draft layers in the last step"}.get(
        name, "loss in the last step"
    )
    assert "held-out part" in card and last in card
    recorded = {
        file for stage in (tiny_run / "stages").glob("*.json") for file in json.loads(stage.read_text())["files"]
    }
    assert f"checkpoints/{name}/tokenizer_config.json" in recorded and f"checkpoints/{name}/README.md" not in recorded


def test_a_demonstration_is_a_chat(tiny_run, demonstration_tokens):
    """Token for token what the agent was shown, and a turn that has ended says so."""
    from transformers import AutoTokenizer

    tokenizer, language = AutoTokenizer.from_pretrained(tiny_run / "checkpoints/sft"), language_of(tiny_run)
    for task, turns in itertools.islice(corpus.shown_episodes(recipe.Recipe()), 20):
        said = transcript(task, turns)
        assert said[-1] == ("env", "")
        ids, _ = demonstration_tokens(language, task, turns)
        for roles in ({"env": "env", "agent": "agent"}, {"env": "user", "agent": "assistant"}):
            chat = [{"role": roles[role], "content": text} for role, text in said[:-1]]
            assert tokenizer.apply_chat_template(chat)["input_ids"] == ids


def test_draft_layers_are_read_where_they_lay_before(tiny_run, tmp_path):
    """Beside the weights, under names of their own."""
    config = fill(recipe.Recipe, SMOKE)
    _, wanted = load_checkpoint(tiny_run, config, "mtp")
    shutil.copytree(tiny_run / "checkpoints/mtp", tmp_path / "checkpoints/mtp")
    shutil.rmtree(tmp_path / "checkpoints/mtp/mtp")
    assert load_checkpoint(tmp_path, config, "mtp")[1] is None
    save_file(wanted.state_dict(), tmp_path / "checkpoints/mtp/mtp.safetensors")
    _, found = load_checkpoint(tmp_path, config, "mtp")
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in wanted.state_dict().items())


@pytest.mark.parametrize("seed", range(2))
def test_neither_kills_nor_a_truncated_checkpoint_change_anything(tiny_run, tmp_path, seed):
    """SIGKILL once there are two checkpoints, of which the newer is cut short: it is named, and the one before goes on.
    Then SIGKILL at random moments of the life of the process, and --resume under one thread or two, until it ends: bit
    for bit the uninterrupted run."""
    rng, out, said, kills = random.Random(seed), tmp_path / "killed", tmp_path / "said", 0
    # Every step is a checkpoint, so that a kill may also hit a half-written one.
    words = forks.smallest(out, "--resume", "--checkpoint-seconds", "0")
    process = forks.start(*words, said=said, threads=2)
    deadline = time.time() + 120
    # Not those still being written, whose names begin with a dot.
    while len(list(out.glob("state/[!.]*.json"))) < 2 and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    newest = max(out.glob("state/[!.]*.json")).with_suffix(".pt")
    newest.write_bytes(newest.read_bytes()[:-100])
    while True:
        process = forks.start(*words, said=said, threads=2 - kills % 2)
        process.join(rng.uniform(0.5, 4.0) if kills < 5 else 300)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
    assert process.exitcode == 0, said.read_text()
    assert kills > 0 and f"{newest.name} is damaged" in said.read_text() and "continuing from" in said.read_text()
    expected, found = deterministic(tiny_run), deterministic(out)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_threads_are_the_runs_whatever_the_variable_says(tmp_path):
    """Of a run of two threads: whole under OMP_NUM_THREADS=1, and begun under 2, killed and ended under 1. Rollouts are
    played by one process or by two."""
    words = ("--checkpoint-seconds", "0", "--set", "training.threads=2")
    whole, killed, said = tmp_path / "whole", tmp_path / "killed", tmp_path / "said"
    forks.play(*forks.smallest(whole, *words), said=said)
    process, deadline = forks.start(*forks.smallest(killed, *words), said=said, threads=2), time.time() + 120
    while not list(killed.glob("state/rl-*.json")) and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert list(killed.glob("state/rl-*")) and not (killed / "stages/eval.json").exists()
    forks.play(*forks.smallest(killed, "--resume", *words), said=said)
    assert deterministic(killed) == deterministic(whole)


class Payload:
    """What a hostile file holds: unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def a_state(out, mark):
    (out / "stages/cpt.json").unlink()
    state = out / "state/cpt-000002.pt"
    torch.save({"step": 2, "trunk": Payload(mark)}, state)
    content = state.read_bytes()
    record = {"step": 2, "bytes": len(content), "sha256": sha256(content).hexdigest()}
    record |= {"metrics_bytes": 0, "metrics_sha256": sha256().hexdigest()}
    state.with_suffix(".json").write_text(json.dumps(record))


def a_program(out, mark):
    a_state(out, mark)
    state = out / "state/cpt-000002.pt"
    torch.jit.script(torch.nn.Identity()).save(state)
    content, manifest = state.read_bytes(), state.with_suffix(".json")
    manifest.write_text(
        json.dumps(
            seal_record(
                json.loads(manifest.read_text()) | {"bytes": len(content), "sha256": sha256(content).hexdigest()}
            )
        )
    )


def packed_rows(out, mark):
    np.savez(out / "data/short.npz", ids=np.array([Payload(mark)], object), doc=np.zeros(1))
    recorded(out, "data", "data/short.npz")


def a_pickle_for_rows(out, mark):
    (out / "data/short.npz").write_bytes(pickle.dumps(Payload(mark)))
    recorded(out, "data", "data/short.npz")


def weights(out, mark):
    (out / "stages/mtp.json").unlink()
    torch.save({"model.norm.weight": Payload(mark)}, out / "checkpoints/mid-cpt/model.safetensors")
    recorded(out, "cpt", "checkpoints/mid-cpt/model.safetensors")


def recorded(out, stage, name):
    """The hash of what now lies there, and the seal: whoever crafts a file can write these too."""
    record, content = json.loads((out / f"stages/{stage}.json").read_text()), (out / name).read_bytes()
    record["files"][name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (out / f"stages/{stage}.json").write_text(json.dumps(seal_record(record)))


@pytest.mark.parametrize("craft", [a_state, a_program, packed_rows, a_pickle_for_rows, weights])
def test_a_crafted_run_folder_runs_nothing(tiny_run, tmp_path, ask, craft):
    """`--resume` in a folder that someone sent: one line."""
    out, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(tiny_run, out)
    craft(out, mark)
    code, _, error = ask(*forks.smallest(out, "--resume"))
    last = error.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and "Traceback" not in error, error
    assert (
        any(words in last for words in ("refusing to load it", "does not hold packed rows", "damaged or truncated"))
        and not mark.exists()
    )


@pytest.mark.parametrize("name", ["mtp", "low-precision"])
@pytest.mark.parametrize("craft", [packed_rows, a_pickle_for_rows])
def test_an_experiment_on_a_crafted_run_folder_runs_nothing(tiny_run, tmp_path, ask, name, craft):
    folder, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(tiny_run, folder)
    craft(folder, mark)
    code, _, error = ask("figure", name, "--quick", "--set", f"run={folder}", "--out", tmp_path / "figure")
    last = error.splitlines()[-1]
    assert (
        code == 2
        and last.startswith("error: ")
        and "does not hold packed rows" in last
        and "Traceback" not in error
        and not mark.exists()
    )


def test_a_truncated_model_is_named(tiny_run, tmp_path):
    shutil.copytree(tiny_run / "checkpoints/final", tmp_path / "final")
    file = tmp_path / "final/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="model.safetensors"):
        load_hf(tmp_path / "final")


def test_tasks_are_never_used_twice():
    config = recipe.Recipe()
    uses = {
        use: [next_.key for next_, _ in zip(corpus.task_stream(config, use), range(400), strict=False)]
        for use in ("rl", "demonstrations", "evaluation")
    }
    assert all(len(set(keys)) == 400 for keys in uses.values())
    assert not set(uses["evaluation"]) & set(uses["rl"]) and not set(uses["evaluation"]) & set(uses["demonstrations"])


@pytest.mark.parametrize("slow", [0, 2])
def test_later_steps_hold_more_of_the_tasks_that_took_longer(tmp_path, monkeypatch, slow):
    """Which kind is hard is what the rollouts say, not its depth; and a training that died in the later steps asks for
    the same tasks."""
    config = fill(
        recipe.Recipe,
        SMOKE | {"rl": {"steps": 6, "prompts": 60, "rollouts": 2, "gate": 0.0, "later": 0.5, "monitor": {"on": False}}},
    )
    asked: list[list] = []

    def sampled(sampler, environment, tasks, n, *_):
        asked.append(tasks)
        if len(asked) == 5:  # the fifth step: a gate of 0 plays nothing
            raise KeyboardInterrupt
        return [
            written(task, 90, 6) if task.depth == slow else written(task, 30, 4) for task in tasks for _ in range(n)
        ]

    def written(task, tokens, turns):
        own, zeros = torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens)
        segment = Segment(
            zeros.long(), own, zeros, zeros.long(), torch.zeros(tokens - 1, 0, 1, dtype=torch.int16), True
        )
        metrics = {"tests": 0.0, "turns": float(turns), "invalid_calls": 0.0, "tested": 0.0}
        return Rollout(Chain([segment], True), {"tests": 0.0}, metrics, task=task)

    def improve(c, model, reference, rollouts, **_):
        some = torch.zeros(len(rollouts))
        return Step(0.0, [], some, some, some, gap=some, tokens=1, nll=0.0)

    monkeypatch.setattr(rl, "sample_rollouts", sampled)
    monkeypatch.setattr(rl, "improve", improve)
    monkeypatch.setattr(Learner, "apply", lambda *_: {})
    monkeypatch.setattr(reinforcement, "context", lambda *_: single(100))

    def learn(name, resume=False):
        with Run.open(tmp_path / name, "recipe", config, resume=resume, checkpoint_seconds=0) as run:
            stage = run.stage("rl", total=6)
            reinforcement.learn(
                stage, config, *(Transformer(config.model) if part else None for part in (1, 0, 1)), Ids()
            )
        return [
            json.loads(line)["depth"] for line in (tmp_path / name / "metrics" / "rl.jsonl").read_text().splitlines()
        ]

    with pytest.raises(KeyboardInterrupt):
        learn("killed")
    died, asked[:] = asked[:4], [[]] * 6  # what is asked for again is not interrupted
    depths = learn("killed", resume=True)
    tasks = [*died, *asked[6:]]
    assert len({task.key for step in tasks for task in step}) == 6 * 60 and depths == [
        np.mean([t.depth for t in step]) for step in tasks
    ]
    share = [np.mean([task.depth == slow for step in some for task in step]) for some in (tasks[:3], tasks[3:])]
    # It took (6/(14/3) + 90/50)/2 = 1.54 of the mean, the others 0.73: they are kept in 47 of 100 cases.
    mix = config.world.depth_mix[slow]
    assert share[0] == pytest.approx(mix, abs=0.1) and share[1] == pytest.approx(
        mix / (mix + 0.47 * (1 - mix)), abs=0.1
    )
    asked[:] = [[]] * 6
    assert learn("whole") == depths and asked[6:] == tasks


def test_how_hard_a_kind_is_by_hand():
    played = np.array([[10, 40, 300], [5, 30, 300], [0, 0, 0]])
    # 4 and 6 turns, 30 and 60 tokens: (4/5 + 30/45)/2 against (6/5 + 60/45)/2. What was never played is kept.
    assert compute_keep_probabilities(played, 1.0).tolist() == pytest.approx([(0.8 + 2 / 3) / (1.2 + 4 / 3), 1, 1])
    assert (
        compute_keep_probabilities(played, 0.0).tolist()
        == compute_keep_probabilities(0 * played, 1.0).tolist()
        == [1, 1, 1]
    )
    assert compute_keep_probabilities(played, 2.0)[0] == pytest.approx(compute_keep_probabilities(played, 1.0)[0] ** 2)


def test_smoke_settings_are_settings(tiny_run):
    """On the command line as where experiments play them."""
    wanted = fill(recipe.Recipe, SMOKE | {"data": SMOKE["data"] | {"corpus": str(forks.CORPUS)}})
    assert json.loads((tiny_run / "config.json").read_text())["config"] == json.loads(json.dumps(asdict(wanted)))


def test_world_words_are_single_tokens_in_the_small_run():
    """File names and digits must be one token each, or a small model cannot copy them (the run's own tokenizer
    recipe)."""
    from recipe.microrepo import documents
    from ref import cpt

    code = [Path(cpt.__file__).read_text(), Path(recipe.__file__).read_text()] * 3
    tokenizer = cpt.train_tokenizer([*code, *itertools.islice(documents(random.Random(0)), 4000)], 1024)
    language = Language(tokenizer)
    for word in [f" m{i}" for i in range(10)] + [f" {d}" for d in range(10)] + ["\n    ", " max", " min", '"""']:
        assert len(language.encode(word)) == 1, word


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["checkpoint", "tasks", "recipes", "seed"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(
    st.fixed_dictionaries(
        {}, optional={"technique": st.sampled_from(["recipe", "recipe full", "kl full"]) | VALUES, "config": VALUES}
    )
    | VALUES
)
@example({"technique": "recipe", "config": [1]})
def test_a_folder_with_an_odd_record_is_no_run(tmp_path_factory, record):
    """Whatever stands in the config.json beside a checkpoint: it comes from a run with settings, or from none."""
    root = tmp_path_factory.mktemp("odd")
    (root / "config.json").write_text(json.dumps(record))
    checkpoint = root / "checkpoints" / "final"
    run_root, run_settings = origin(checkpoint)
    is_run = isinstance(record, dict) and record.get("technique") in ("recipe", "recipe full")
    assert (run_root is not None) == (is_run and isinstance(record.get("config"), dict))
    assert isinstance(run_settings, dict)
    package_run = find_package_run(checkpoint)
    assert package_run is None or isinstance(package_run[1]["tasks"], dict)
