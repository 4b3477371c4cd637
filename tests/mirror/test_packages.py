"""`etude run recipe --tasks`: SFT and RL on packages in sandboxes, on two ranks, from a tiny network whose SFT teaches
it to call tools."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from environments.harness import record
from environments.tasks.generated import generated_package
from etude.bench import packages as bench_packages
from etude.console.progress_line import Line
from etude.plan import packages as plan_packages
from etude.run.settings import settings
from etude.tasks.build import make_all
from kit.disk import read_lines
from kit.settings import RunError, fill
from recipe.asynchronous.run import Async, Small
from recipe.full.package_stages import make_package_tasks
from recipe.full.stages import make_rl_config, stages_of
from recipe.packages.chat_format import DEFAULT_TEMPLATE
from recipe.packages.data import add_empty_rows
from recipe.packages.tasks import PackageTasks
from ref.engine.continuous import Continuous, make_sampler
from ref.engine.sampler import Lockstep
from ref.network import Config, Transformer, load_hf, save_hf
from ref.network.model import config_of
from scaled.plan import HARDWARE
from scaled.runtime import launch
from tests.mirror.async_parts import synchronous
from tests.mirror.recipes import hash_results

STAGES = ("tasks", "data", "sft", "measure", "rl", "eval")
SETS = (
    "training.dtype=float32",
    "sft.rows=4",
    "sft.epochs=60",
    "sft.muon_lr=0.02",
    "sft.adamw_lr=0.01",
    "rl.steps=2",
    "rl.prompts=1",
    "rl.rollouts=4",
    "rl.lr=0.001",
    "rl.max_len=1000",
    "rl.turn_tokens=100",
    "rl.budget_tokens=100",
    "rl.payment.effort_price=0.001",
    "rl.payment.kl=0.001",
    "evaluation.tasks=2",
    "evaluation.samples=3",
    "evaluation.resamples=20",
    "cluster.agent_length=1024",
    "cluster.drafts=false",
    "cluster.micro_rows=2",
    "cluster.checkpoint_every=1",
    "tasks.demonstrations=7",
    "tasks.styles=direct",
    "tasks.turns=4",
    "tasks.threads=false",
    "tasks.levels=2",
    "tasks.level_rollouts=4",
    "tasks.min_valid_calls=0",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A tiny dense network with a tokenizer of its own, which has ChatML's tokens and no template."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    packages = [generated_package(number) for number in range(10)]
    texts = [data.decode() for package in packages for data in (*package.files.values(), *package.tests.values())]
    control, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=control, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*texts, DEFAULT_TEMPLATE], trainer)
    shape = Config.tiny(
        tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=0,
        intermediate_size=128,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    save_hf(Transformer(shape), folder / "net")
    tokenizer.save(str(folder / "net" / "tokenizer.json"))
    return folder / "net"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Two packages, of which one is held out."""
    folder = tmp_path_factory.mktemp("recipes")
    assert make_all(("generated:0", "generated:heldout:0"), folder, 1, 60.0, overwrite=False)
    return folder


def words(out, start, recipes, *sets):
    """The command."""
    options = ("--scale", "full", "--backend", "gloo", "--nproc", "2", "--out", out, "--checkpoint", start)
    return "run", "recipe", *options, "--tasks", recipes, *(word for item in (*SETS, *sets) for word in ("--set", item))


def async_words(out, checkpoint, *options, **changes):
    """The command of asynchronous RL from a checkpoint of such a run, with some settings changed."""
    sets = {"checkpoint": checkpoint, "workers": 1, "rl.steps": 2, "rl.prompts": 1, "rl.rollouts": 4} | {
        "rl.replay": "none", "rl.max_len": 1000, "rl.turn_tokens": 100, "rl.payment.effort_price": 0.001, **changes,
    }  # fmt: skip
    return "run", "async-rl", "--out", out, *options, *(w for k, v in sets.items() for w in ("--set", f"{k}={v}"))


@pytest.fixture(scope="module")
def finished(start, recipes, tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "through"


def test_every_stage_runs_and_survives_sigkill(start, recipes, finished, tmp_path, ask, here):
    """From recipes to a report with episodes. A copy of the run is killed in each stage after SFT and resumed: the same
    bits. test_chain.py and `make test-real` kill SFT, too."""
    out, killed = finished, tmp_path / "killed"
    here += ["measure"]
    code, said, error = ask(*words(out, start, recipes))
    assert code == 2 and "Continue with" in error and not (out / "stages" / "measure.json").exists()
    assert "6 of 1 packages" not in said and "held out, of generated-heldout.0" in said
    shutil.copytree(out, killed)
    measured = [*(out / "state").glob("measure-*")]
    assert measured, "the copy resumes in the middle of the stage, and the run plays it from its start"
    for path in measured:
        path.unlink()
    code, more, error = ask(*words(out, start, recipes), "--resume")
    assert code == 0 and not error, error
    said += more
    assert "chat format: the default one" in said and f"report: {out / 'report.html'}" in said
    report = json.loads((out / "report.json").read_text())
    assert report["stages"].keys() == {*STAGES}
    page = (out / "report.html").read_text()
    assert "Unfinished" not in page and "Trained on" in page and "generated-heldout.0" in page
    assert "is the first that the agent after RL" in page and "<h3>before RL</h3>" in page
    assert (out / "checkpoints" / "final" / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE
    result = report["stages"]["eval"]
    assert result["tasks"] == 2 and {"checkpoint", "before", "after", "difference"} <= result.keys()
    assert result["checkpoint"]["valid_calls"]["value"] == 0, "an untrained network calls nothing"
    for line in read_lines(out / "metrics" / "rl.jsonl"):
        assert line["calls"] > line["invalid_calls"], "SFT has taught it to call tools in tasks that it knows"
        assert line["level"] == 0, "no level was left in two steps whose rollouts fail"
    episodes = sorted((out / "episodes" / "after").glob("*.jsonl"))
    assert len(episodes) == 2
    for path in episodes:
        lines = record.read(path)
        assert lines[-1]["kind"] == "grade" and ask("show", path)[0] == 0

    stages = ("rl", "eval")
    here += stages
    for stage in stages:
        code, _, error = ask(*words(killed, start, recipes), "--resume")
        assert code == 2 and "Continue with" in error and not (killed / "stages" / f"{stage}.json").exists()
    assert ask(*words(killed, start, recipes), "--resume")[0] == 0
    assert hash_results(killed) == hash_results(out) and len(hash_results(out)) >= len(STAGES) + 2 + 6 + 2


def test_a_stored_tree_earns_its_reward_again(start, recipes, finished, ask, here):
    """The reward of every kept episode, computed anew from the tree that it left."""
    if not (finished / "report.json").exists():
        assert ask(*words(finished, start, recipes))[0] == 0
    c = settings("recipe", "gloo", json.loads((finished / "config.json").read_text())["config"])
    tasks = make_package_tasks(c, finished)
    by_name = {task.key: task for stream in tasks.streams.values() for task in stream}
    for path in sorted(finished.glob("episodes/*/*.jsonl")):
        lines = record.read(path)
        task, tree = by_name[lines[0]["task"]], [line["tree"] for line in lines if "tree" in line][-1]
        again = tasks.grade(task, tree, [*record.calls(lines)])
        assert record.grade_fields(again, len(task.exam.required_tests)) == {
            name: value for name, value in lines[-1].items() if name != "kind"
        }


def test_an_agent_is_watched_on_a_task(start, recipes, finished, ask, here):
    if not (finished / "report.json").exists():
        assert ask(*words(finished, start, recipes))[0] == 0
    name = json.loads((finished / "stages" / "measure.json").read_text())["result"]["grids"]["before"]["tasks"][0]
    code, said, error = ask("play", finished, "--task", name, "--before", "sft", "--greedy")
    assert code == 0 and said.count(f"task {name}, by ") == 2 and said.count("reward ") == 2, error
    stored = [
        line for line in record.read(finished / "episodes" / "after" / f"{name}.jsonl") if line["kind"] == "reply"
    ]
    code, said, _ = ask("play", finished, "--task", name, "--greedy", "--json")
    lines = [json.loads(text) for text in said.splitlines()]
    assert [line["text"] for line in lines if line["kind"] == "reply"] == [line["text"] for line in stored]
    for wrong, why in (("zebra", "the run has no task zebra"), ("generated", "tasks begin with generated")):
        code, _, error = ask("play", finished, "--task", wrong)
        assert code == 2 and why in error and error.count("\n") == 1


def test_what_cannot_work_is_said_before_a_rank_starts(start, recipes, tmp_path, ask, monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(Line, "__call__", lambda *_: None)
    out, one, empty = tmp_path / "out", tmp_path / "one", tmp_path / "empty"
    one.mkdir()
    empty.mkdir()
    (one / "a.json").write_bytes((recipes / "generated-0.json").read_bytes())
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_bytes((start / name).read_bytes())
    text = (start / "tokenizer.json").read_text(encoding="utf-8")
    (plain / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|a|>"), encoding="utf-8")
    for checkpoint, tasks, sets, why in (
        (start, tmp_path / "nowhere", (), "does not exist; `etude tasks make PACKAGE` writes recipes"),
        (start, empty, (), "contains no recipes"),
        (start, broken, (), "is not a recipe of tasks"),
        (start, one, (), "has no package to train on beside those that are held out (generated-0)"),
        (start, recipes, ("tasks.heldout=zebra",), "tasks.heldout names zebra"),
        (start, recipes, ("rl.max_len=200",), "leave no room for an answer"),
        (start, recipes, ("tasks.summary_at=900",), "must hold tasks.summary_at"),
        (start, recipes, ("tasks.tools=read",), "tools must hold finish"),
        (start, recipes, ("tasks.styles=zebra",), "styles must be of direct"),
        (start, recipes, ("tasks.summary_at=500",), "leave no room for an answer"),
        (start, recipes, ("tasks.levels=99",), "tasks.levels=99 must be at most the number of tasks to train on, "),
        (start, recipes, ("tasks.levels=-1",), "levels must be at least 0"),
        (start, recipes, ("rl.steps=0",), "rl.steps must be at least 1"),
        (start, recipes, ("cluster.cp=3",), "cluster.cp=3 must divide the number of ranks"),
        (start, recipes, ("context.join=none",), "see tasks.summary_at"),
        (start, recipes, ("rl.environment_timeout=60",), "must exceed tasks.episode_seconds=600"),
        (start, recipes, ("tasks.max_failed_share=1.5",), "max_failed_share must lie between 0 and 1"),
        (plain, recipes, (), "the default one needs the token <|im_start|>"),
    ):
        code, _, error = ask(*words(out, checkpoint, tasks, *sets))
        assert code == 2 and why in error and error.count("\n") == 1, (why, error)
        assert not (out / "config.json").exists()
    for more in (("--scale", "small"), ()):
        code, _, error = ask("run", "recipe", "--tasks", recipes, *more)
        assert code == 2 and "--tasks is for full runs of the recipe" in error


def test_a_policy_that_calls_nothing_is_refused(start, recipes, tmp_path, ask, here):
    """Before RL, with its most frequent reply."""
    sets = ("sft.epochs=1", "sft.muon_lr=0", "sft.adamw_lr=0", "tasks.min_valid_calls=0.05")
    for more in ((), ("--resume",)):
        code, _, error = ask(*words(tmp_path / "out", start, recipes, *sets), *more)
        assert code == 2 and error.count("\n") == 1, error
        assert "after SFT 0% of the calls are valid" in error and "the most frequent reply is '" in error
    assert not (tmp_path / "out" / "checkpoints" / "final").exists()


def test_stages_of_a_run_with_a_corpus():
    """Pretraining comes before SFT, and draft layers go along."""
    on_packages = {"checkpoint": "x", "tasks": {"recipes": "y"}}
    assert stages_of(settings("recipe", "gloo", on_packages)) == STAGES[2:]
    with_corpus = settings("recipe", "gloo", on_packages | {"data": {"corpus": "z"}})
    assert stages_of(with_corpus) == ("cpt", "mtp", "long", *STAGES[2:]) and with_corpus.has_drafts


def test_full_runs_sample_packages_with_the_engine_of_the_settings():
    """The small world keeps its engine, and its bits."""
    on_packages = {"checkpoint": "x", "tasks": {"recipes": "y", "engine": "continuous", "slots": 5}}
    c = make_rl_config(settings("recipe", "gloo", on_packages), 0)
    assert (c.engine, c.slots) == ("continuous", 5)
    assert make_rl_config(settings("recipe", "gloo", {"checkpoint": "x"}), 0).engine == "lockstep"
    torch.manual_seed(0)
    network = Transformer(Config.tiny(9, num_experts=0))
    engines = [make_sampler(name, network, torch.float32, 2).engine(3, 8) for name in ("lockstep", "continuous")]
    assert [type(engine) for engine in engines] == [Lockstep, Continuous]
    assert [engine.free_slots for engine in engines] == [3, 2]
    with pytest.raises(RunError, match="tasks.slots must be at least 1, got 0"):
        settings("recipe", "gloo", {"checkpoint": "x", "tasks": {"slots": 0}})


def test_bench_packages(start, recipes, tmp_path, capsys):
    """Every rollout solves its task, whatever the network writes, so tools and graders have done their work; the
    engine's time is part of the time of sampling."""
    record = bench_packages.bench(start, recipes, (2,), turn_tokens=7, max_len=1000, out=tmp_path)
    assert [cell["engine"] for cell in record["cells"]] == ["lockstep", "continuous"]
    for cell in record["cells"]:
        assert (
            cell["solved"] == cell["rollouts"] == 2 and min(cell[name] for name in ("prefill", "decode", "train")) > 0
        )
        assert (
            cell["waiting"] == pytest.approx(1 - cell["engine_seconds"] / cell["seconds"]) and 0 < cell["waiting"] < 1
        )
        assert cell["sampled_tokens"] % 7 == 0 and cell["sampled_tokens"] >= 2 * 3 * 7, "turns end by their length"
    (path,) = tmp_path.glob("packages-*.json")
    assert json.loads(path.read_text()) == record and "2 rollouts, continuous" in capsys.readouterr().out


def test_bench_packages_refuses_what_is_no_checkpoint(recipes, tmp_path, ask):
    code, _, error = ask("bench", "packages", "--checkpoint", tmp_path, "--tasks", recipes)
    assert code == 2 and "is not a folder with config.json" in error and error.count("\n") == 1


def test_few_conversations_fill_rows_with_padding():
    ids, doc, weight = add_empty_rows((np.ones((1, 4), np.int32), np.zeros((1, 4), np.int32), np.ones((1, 4), bool)), 3)
    assert ids.shape == (3, 4) and (doc[1:] == -1).all() and not weight[1:].any() and weight[0].all()
    assert all(len(rows) == 1 for rows in add_empty_rows((ids[:1], doc[:1], weight[:1]), 1))


def test_grades_are_those_of_the_grader(start, recipes, finished, ask, here):
    """The oracle's tree is paid in full and the given tree nothing."""
    if not (finished / "report.json").exists():
        assert ask(*words(finished, start, recipes))[0] == 0
    c = settings("recipe", "gloo", json.loads((finished / "config.json").read_text())["config"])
    tasks = make_package_tasks(c, finished)
    task = tasks.task("heldout", 0)
    assert tasks.grade(task, task.job.tree, []).reward.total == 0


def test_services_go_on_with_the_tasks_of_the_run(start, recipes, finished, tmp_path, ask, here):
    """Asynchronous RL from the run's SFT checkpoint: on its packages, in its chat format; where nothing may be stale,
    the weights of the synchronous loop to the bit."""
    if not (finished / "report.json").exists():
        assert ask(*words(finished, start, recipes))[0] == 0
    out, checkpoint = tmp_path / "async", finished / "checkpoints" / "sft"
    code, _, error = ask(*async_words(out, checkpoint, staleness=0, slots=4, heldout=1, samples=1))
    assert code == 0, error
    report = json.loads((out / "report.json").read_text())
    assert report["result"]["oldest"] == 0 and {"success_before", "success_after"} <= report["result"].keys()
    c = fill(Async, report["config"])
    setup = Small(c).setup()
    assert isinstance(setup.tasks, PackageTasks) and setup.chat_format.family == "xml"
    parts = SimpleNamespace(
        learner=Small(c).learner, sampler=Small(c).sampler, setup=Small(c).setup, rollouts=c.rl.rollouts
    )
    wanted = synchronous(parts, c.rules, 1, c.seed).model
    left = load_hf(out / "checkpoints" / "final", torch.bfloat16)
    assert all(a.equal(b) for a, b in zip(wanted.parameters(), left.parameters(), strict=True))
    before = load_hf(checkpoint, torch.bfloat16)
    assert not all(a.equal(b) for a, b in zip(before.parameters(), left.parameters(), strict=True))


def test_the_plan_measures_episodes_of_a_few_tasks(start, recipes):
    """Recorded in sandboxes, if no run has any: one of each style for each of four tasks."""
    config = settings("recipe", "gloo", {}, SETS)
    episodes = plan_packages.measure_episodes(config, start, recipes)
    assert "Measured: 4 scripted episodes, recorded now" in episodes.source  # in the style of SETS
    assert 0 < episodes.own < episodes.tokens <= episodes.longest and episodes.opening > 100
    assert not (recipes.parent / "demonstrations.jsonl").exists()


def test_the_plan_has_the_stages_and_steps_of_the_run(finished, start):
    """Planned from the run's own episodes. How full packed rows are is a guess, which may be wrong by a batch in each
    epoch."""
    config = settings("recipe", "gloo", {}, [*SETS, f"tasks.recipes={finished / 'data' / 'recipes'}"])
    episodes = plan_packages.measure_episodes(config, start, finished / "data" / "recipes")
    assert f"scripted episodes of {finished / 'data' / 'demonstrations.jsonl'}" in episodes.source
    planned = plan_packages.prices(config, config_of(start), 2, HARDWARE["h100"], episodes)
    stages = json.loads((finished / "report.json").read_text())["stages"]
    assert [price.stage for price in planned] == [stage for stage in STAGES if stage not in ("tasks", "data")]
    steps = {price.stage: price.steps for price in planned}
    assert steps["rl"] == stages["rl"]["steps"]
    assert abs(steps["sft"] - stages["sft"]["steps"]) <= config.sft.epochs
