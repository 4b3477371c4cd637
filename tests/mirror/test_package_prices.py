"""`etude plan --recipe FILE --tasks RECIPES`: memory against what is allocated, lengths against files, stages
against the run's."""

import json
import re
import tomllib
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from environments.tasks.generated import generated_package
from environments.tasks.load import list_recipes
from etude.plan import packages
from etude.run.settings import settings
from kernels import linear_logprob
from kit.settings import RunError
from recipe.full.stages import stages_of
from recipe.full.weights import gather
from recipe.packages.tasks import LoadedPackage
from recipe.small.agent import Language, single
from ref import rollout as rollouts
from ref.engine import pages
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.lora import count_parameters
from ref.network import Config, Transformer, fast, save_hf
from ref.rl import Settings
from ref.self_summary import Chain
from scaled.network.model import load_hf
from scaled.plan import HARDWARE, plan
from scaled.runtime import sharding
from scaled.runtime.mesh import Layout, mesh
from tests.chats import bytes_tokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = tomllib.loads((ROOT / "examples" / "one-gpu.toml").read_text())
QWEN = Config.qwen2_5_0_5b()
LARGE = replace(
    QWEN, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, head_dim=128, intermediate_size=8960
)
"""Qwen2.5-1.5B."""
TINY = Config.tiny(
    400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=0
)
EPISODES = packages.Episodes(1000.0, 250.0, 1600, 400, 800, 40, "Counted by hand.")


def of(*sets: str, network: Config = QWEN, hardware: str = "h100", gpus: int = 1, episodes=EPISODES):
    config = settings("recipe", "nccl", EXAMPLE, ["tasks.recipes=tasks", *sets])
    return {price.stage: price for price in packages.prices(config, network, gpus, HARDWARE[hardware], episodes)}


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.before: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)}:
            if storage._cdata not in inputs:
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def free(self, size: int) -> None:
        self.alive -= size


def peak_of(function) -> int:
    """Bytes that a call allocates beside what there was, at the most."""
    with Allocated() as allocated:
        function()
    return allocated.peak


def sample(sampler, rows, max_len, opening):
    """Rollouts of one turn that fill their contexts, but for a few that end early and leave the batch."""
    engine = sampler.engine(rows, max_len)
    for row in range(rows):
        draws = torch.rand(max_len, dtype=torch.float64)
        engine.add([row % 7 + 1] * opening, (), draws, longest_turn=4 if row < rows // 5 else None)
    while not engine.is_idle:
        for slot in engine.step():
            engine.remove(slot)


@pytest.mark.parametrize(
    "changes, rows, max_len, opening",
    [
        ({"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 32}, 20, 60, 2),
        ({"vocab_size": 5000}, 20, 20, 4),
        ({"intermediate_size": 512}, 10, 230, 200),
    ],
    ids=["keys-and-values", "logits", "prompts"],
)
@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_memory_of_sampling(changes, rows, max_len, opening, dtype, size):
    """Keys and values for all of `max_len` at once, and what a step, the prompts or the leaving of rollouts add."""
    config = replace(TINY, **changes)
    torch.manual_seed(0)
    sampler = Sampler(fast.Transformer(config), dtype)
    peak = peak_of(partial(sample, sampler, rows, max_len, opening))
    assert packages.sampling_bytes(config, rows, max_len, opening, size) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("rows, max_len, opening", [(20, 64, 2), (10, 256, 200)], ids=["keys-and-values", "prompts"])
def test_continuous_batching_takes_at_most_as_much(monkeypatch, rows, max_len, opening):
    """With pages that are allocated at once, as on a GPU, and without what lies in the host's memory there."""
    monkeypatch.setattr(pages, "mmap", SimpleNamespace(PAGESIZE=4096, mmap=None))
    config = replace(TINY, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(0)
    sampler = ContinuousSampler(fast.Transformer(config), torch.float32)
    host = rows * max_len * (8 + 1 + 4 + 8 + 8)  # tokens, whether they are sampled, log μ, versions, draws
    peak = peak_of(partial(sample, sampler, rows, max_len, opening))
    assert (
        rows * max_len * 2 * 2 * 2 * 32 * 4 < peak <= packages.sampling_bytes(config, rows, max_len, opening, 4) + host
    )


def test_an_engine_has_as_many_slots_as_the_settings_say():
    """With fewer slots sampling takes longer, and less memory where it needs most; lockstep samples a whole batch."""
    sets = "rl.max_len=32768", "cluster.agent_length=32768", "evaluation.samples=32"
    few, many = of("tasks.slots=4", *sets)["eval"], of("tasks.slots=32", *sets)["eval"]
    lockstep = of("tasks.slots=4", "tasks.engine=lockstep", *sets)["eval"]
    assert few.memory < many.memory == lockstep.memory and few.seconds > many.seconds == lockstep.seconds


def test_rollouts_that_are_sampled_together(monkeypatch):
    """An engine has as many slots as the plan has keys and values for."""
    slots = []

    def count_slots(sampler, make, *_):
        slots.append(len(make))
        return [rollouts.Rollout(Chain()) for _ in make]

    monkeypatch.setattr(rollouts, "rollout", count_slots)
    network, limits, language = fast.Transformer(TINY), Settings().limits(single(100)), Language(bytes_tokenizer())
    for engine, sampler in (("lockstep", Sampler(network)), ("continuous", ContinuousSampler(network))):
        c = settings("recipe", "nccl", EXAMPLE, [f"tasks.engine={engine}", f"tasks.slots={sampler.slots or 1}"])
        for tasks, count in ((8, 8), (1, 3), (60, 16)):
            slots.clear()
            named = [SimpleNamespace(key=str(number)) for number in range(tasks)]
            rollouts.sample_rollouts(
                sampler, lambda task, number: None, named, count, language, limits, 0.0, None, threads=True
            )
            together = [min(number, sampler.slots or number) for number in slots]
            assert max(together) == packages.count_slots(c, tasks * count) and sum(slots) == tasks * count


def test_memory_of_the_heads_gradients(monkeypatch):
    """The kernel's tensors, without what its programs compute: slices of the vocabulary as on a GPU."""
    launches = []
    launcher = type(
        "Launcher", (), {"__getitem__": lambda self, grid: lambda *args, **options: launches.append(grid)}
    )()
    for name in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(linear_logprob, name, launcher)
    monkeypatch.setattr(linear_logprob, "SLICES", packages.SLICES)
    config, own = replace(TINY, vocab_size=8000, hidden_size=64), 300
    hidden, weight = (torch.randn(n, 64, requires_grad=True) for n in (own, 8000))
    targets = torch.randint(8000, (own,))
    peak = peak_of(lambda: linear_logprob.linear_logprob(hidden, weight, targets)[0].sum().backward())
    assert packages.head_bytes(config, own, 4) == pytest.approx(peak, rel=0.1) and len(launches) == 1 + packages.SLICES
    program = Path(linear_logprob.__file__).read_text()
    assert f"SLICES = 3 if INTERPRETED else {packages.SLICES}\n" in program


def test_memory_of_clipping():
    """The largest gradient twice in float64."""
    model = torch.nn.ModuleDict({"small": torch.nn.Linear(40, 40), "large": torch.nn.Linear(300, 200, bias=False)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with mesh(dp=1, cp=1, ep=1):
        assert peak_of(lambda: sharding.clip(model, 1.0)) == pytest.approx(16 * 300 * 200, rel=0.05)


def test_memory_of_an_evaluations_checkpoints(tmp_path):
    """While the second checkpoint is loaded, the sampler of the first is still there."""
    config = replace(TINY, hidden_size=64, vocab_size=20_000)
    save_hf(Transformer(config), tmp_path)

    with mesh(dp=1, cp=1, ep=1):
        loaded = [load_hf(tmp_path)]
        peak = 4 * config.parameters()  # of which nothing is free before the network is whole
        peak += peak_of(lambda: Sampler(gather(loaded[0], torch.bfloat16), torch.bfloat16, copy=False))
    sets = "rl.max_len=8", "evaluation.tasks=1", "tasks.slots=1"
    planned = of(*sets, network=config, episodes=replace(EPISODES, longest=2, opening=1))
    sampler = 2 * config.parameters()  # of the first checkpoint
    assert planned["measure"].memory - planned["eval"].memory == sampler
    assert planned["eval"].memory == pytest.approx(peak, rel=0.05)


def test_the_example_fits_on_24_gb():
    """With the stages of the run, in its order, `measure` among them."""
    for hardware in ("rtx-4090", "h100"):
        planned = of(hardware=hardware)
        config = settings("recipe", "nccl", EXAMPLE, ["tasks.recipes=tasks"])
        assert tuple(planned) == stages_of(config) == ("sft", "measure", "rl", "eval")
        assert all(price.fits and price.layout.world == 1 for price in planned.values())
    assert of("data.corpus=code", "data.world_share=0").keys() == {"cpt", "long", "sft", "measure", "rl", "eval"}


def test_a_peak_is_that_of_the_phase_that_needs_most():
    """State, activations and the head's gradients, beside the sampler's weights."""
    planned = of()
    step = plan(QWEN, Layout(), 1, 4096, computed=4)
    assert step.gathered == 0 and step.weights == 4 * QWEN.parameters()
    own = 4096 * packages.FULLNESS / 4
    training = step.memory + packages.head_bytes(QWEN, own, 4)
    clipping = step.memory - step.activations + 16 * QWEN.vocab_size * QWEN.hidden_size
    assert planned["sft"].memory == max(training, clipping)
    sampling = 3 * step.weights + packages.sampling_bytes(QWEN, 32, 4096, 400, 2)
    assert planned["rl"].memory == 2 * QWEN.parameters() + max(training, clipping, sampling)
    assert of("rl.payment.kl=0.001")["rl"].memory == planned["rl"].memory + step.weights
    # All logits of a row's own tokens would take twice what the head's gradients do.
    assert packages.head_bytes(QWEN, 4096, 4) < 4 * 4096 * QWEN.vocab_size / 2


def test_adapters_are_priced():
    """Gradients and moments of the adapters alone; the sampler holds all weights as before. Weights that are not
    trained take a third less arithmetic."""
    whole, planned = of(), of("sft.lora=16", "rl.lora=16")
    adapters = count_parameters(QWEN, 16)
    step = plan(QWEN, Layout(), 1, 4096, computed=4, lora=16)
    assert step.weights + step.gradients + step.moments == 4 * QWEN.parameters() + 16 * adapters
    own = 4096 * packages.FULLNESS / 4
    training = step.memory + packages.head_bytes(QWEN, own, 4, is_trained=False)
    assert planned["sft"].memory == training
    sampling = packages.sampling_bytes(QWEN, 32, 4096, 400, 2) + step.weights + step.moments
    assert planned["rl"].memory == 2 * QWEN.parameters() + max(training, sampling)
    assert 0.7 * whole["sft"].seconds < planned["sft"].seconds < 0.8 * whole["sft"].seconds  # 3 of 4 with rematerialise
    assert planned["eval"] == whole["eval"]


def test_time_is_that_of_steps_tools_and_tests():
    """Rounds of 32 rollouts, each with a step of all layers per token, and a core for each episode's tools."""
    planned, steps = of(), EPISODES.longest - EPISODES.opening
    rollouts_of_step, layers = 64, steps * QWEN.num_hidden_layers * packages.LAYER_SECONDS
    tools = rollouts_of_step * packages.TOOL_SECONDS / packages.CORES
    assert planned["rl"].seconds / 60 > 2 * layers + tools
    faster = of("rl.prompts=4")["rl"]  # one round
    assert planned["rl"].seconds / 60 == pytest.approx(2 * faster.seconds / 60, rel=0.1)
    # 40 tasks: 4 samples of 8 at a time, and a greedy rollout of 32 at a time.
    for stage, moments in (("measure", 2), ("eval", 1)):
        seconds = moments * ((5 + 2) * layers + 40 * 5 * packages.TOOL_SECONDS / packages.CORES)
        assert seconds < planned[stage].seconds < 1.2 * seconds
    assert planned["sft"].steps == 3 * int(-(-800 * 1000 // (packages.FULLNESS * 4096)) // 8)


def test_figures_of_other_machines_are_those_of_the_records():
    sandboxes, decoding = (
        json.loads((ROOT / "results" / f"{name}.json").read_text())
        for name in ("sandbox-amd-epyc", "decode-nvidia-h200")
    )
    rate = sandboxes["episodes"]["a_second"]["oracle"]
    assert packages.TOOL_SECONDS == pytest.approx(sandboxes["machine"]["cores"] / rate, rel=0.02)
    cells = [cell for cell in decoding["cells"] if cell["sampler"] == "Sampler"]
    steps = decoding["new"] - 1
    launches = [(min(cell["seconds"]) - cell["planned_seconds"]) / steps / decoding["layers"] for cell in cells]
    assert packages.LAYER_SECONDS == pytest.approx(sum(launches) / len(launches), rel=0.02)


def test_float32_is_priced_without_tensor_cores():
    slow, fast_training = of(), of("training.dtype=bfloat16")
    assert slow["sft"].seconds > 5 * fast_training["sft"].seconds


@hypothesis.settings(max_examples=20)
@given(
    st.sampled_from(["micro_rows=2", "rematerialise=false", "micro_rows=1"]),
    st.sampled_from([1024, 2048, 4096]),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(1, 16),
)
def test_more_gpus_never_need_more_memory_each(cluster, length, dtype, rollouts_of_group):
    sets = (
        f"cluster.{cluster}",
        f"rl.max_len={length}",
        f"training.sampler_dtype={dtype}",
        f"rl.rollouts={rollouts_of_group + 1}",
    )
    one, two = of(*sets), of(*sets, gpus=2)
    for stage, price in two.items():
        assert price.memory <= one[stage].memory + QWEN.parameters() * 4, stage  # gathered weights, on several ranks
    assert two["sft"].steps == one["sft"].steps


def test_what_does_not_fit_says_what_helps():
    """A setting where one suffices, else more GPUs, else a smaller checkpoint; and what it names really fits."""
    config = settings("recipe", "nccl", EXAMPLE, ["tasks.recipes=tasks"])
    small, large = HARDWARE["rtx-4090"], HARDWARE["h100"]
    assert packages.advise(config, QWEN, 1, small, EPISODES) == packages.advise(config, LARGE, 1, large, EPISODES) == ""
    told = packages.advise(config, LARGE, 1, small, EPISODES)
    adapters = ["sft.lora=16", "rl.lora=16"]
    assert "full-parameter training holds 24.7 GB" in told
    assert told.endswith(f"It fits with {' '.join(f'--set {item}' for item in adapters)}, or with --nproc 2.")
    for sets, gpus in ((adapters, 1), ([], 2)):
        assert all(price.fits for price in of(*sets, network=LARGE, hardware="rtx-4090", gpus=gpus).values())
    wide = settings(
        "recipe", "nccl", EXAMPLE, ["tasks.recipes=tasks", "cluster.rematerialise=false", "cluster.micro_rows=2"]
    )
    told = packages.advise(wide, QWEN, 1, small, EPISODES)
    (setting,) = re.findall(r"--set (\S+)\.$", told)
    assert all(
        price.fits
        for price in of("cluster.rematerialise=false", "cluster.micro_rows=2", setting, hardware="rtx-4090").values()
    )
    told = packages.advise(config, Config.qwen3_30b_a3b(), 1, small, EPISODES)
    assert "choose a smaller checkpoint" in told


@pytest.fixture
def checkpoint(tmp_path):
    """The shape of a network, and a tokenizer of bytes that has ChatML's tokens."""
    folder = tmp_path / "checkpoint"
    save_hf(Transformer(TINY), folder)
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A run's folder data/recipes. Its tasks, which take sandboxes to make, have names only."""
    folder = tmp_path / "run" / "data" / "recipes"
    folder.mkdir(parents=True)
    loaded = {
        f"generated-{spec}.json": LoadedPackage(
            Path(spec), generated_package(0, heldout=spec != "0"), dict.fromkeys("abcdef")
        )
        for spec in ("0", "heldout.0")
    }
    for name in loaded:
        about = {"spec": name, "digest": "0", "left out": [], "slow": [], "flaky": [], "ungradable": []}
        (folder / name).write_text(json.dumps({"package": about, "tasks": []}))
    monkeypatch.setattr(
        packages, "load_packages", lambda settings, path: [loaded[file.name] for file in list_recipes([path])]
    )
    return folder


def conversation(words: int) -> str:
    messages = [
        {"role": "system", "content": "Work."},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "x" * words},
    ]
    return json.dumps({"messages": messages}) + "\n"


def test_lengths_are_those_of_the_runs_episodes(checkpoint, recipes):
    """Counted in the checkpoint's tokens: here a token for each byte. Lines that are no conversations are left out."""
    config = settings("recipe", "nccl", EXAMPLE, [f"tasks.recipes={recipes}"])
    stored = recipes.parent / "demonstrations.jsonl"
    stored.write_text(conversation(10) + "{}\n" + conversation(30))
    episodes = packages.measure_episodes(config, checkpoint, recipes)
    assert episodes.own == 20 + 1 and episodes.longest == episodes.tokens + 10  # with the token that ends a turn
    assert episodes.opening == episodes.tokens - 20 - 2  # a line break follows the turn
    assert episodes.conversations == 3 * 6 and episodes.heldout == 6
    assert f"Measured: 2 scripted episodes of {stored}" in episodes.source


def test_lengths_are_those_of_the_users_conversations(checkpoint, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(conversation(10) * 5)
    config = settings("recipe", "nccl", EXAMPLE, [f"sft.conversations={path}"])
    episodes = packages.measure_episodes(config, checkpoint, None)
    assert (episodes.own, episodes.conversations) == (11, 5) and f"5 conversations of {path}" in episodes.source


def test_without_sandboxes_or_tasks_lengths_are_bounds(checkpoint, recipes, monkeypatch, tmp_path):
    """And the assumptions say so."""

    def closed(*args, **options):
        raise RunError("bubblewrap does not work here")

    config = settings("recipe", "nccl", EXAMPLE)
    monkeypatch.setattr(packages, "record_scripted", closed)
    bounds = {
        "bubblewrap does not work here": packages.measure_episodes(config, checkpoint, recipes),
        "--tasks": packages.measure_episodes(config, checkpoint, None),
        "has no tokenizer.json": packages.measure_episodes(config, tmp_path, recipes),
    }
    for why, episodes in bounds.items():
        assert (episodes.tokens, episodes.own, episodes.longest, episodes.opening) == (4096, 4096, 4096, 0)
        assert episodes.source.startswith("Upper bound: contexts of rl.max_len = 4,096") and why in episodes.source
        assert episodes.source in packages.describe(config, episodes, HARDWARE["h100"])
    summaries = settings("recipe", "nccl", EXAMPLE, ["tasks.summary_at=2048", "tasks.contexts=3"])
    assert packages.measure_episodes(summaries, checkpoint, None).tokens == 3 * 4096


def test_from_the_command_line(checkpoint, recipes, tmp_path, ask):
    example = ROOT / "examples" / "one-gpu.toml"
    code, said, error = ask(
        "plan", "--recipe", example, "--model", "qwen2_5_0_5b", "--hardware", "rtx-4090", "--out", tmp_path
    )
    assert code == 0 and not error and "qwen2_5_0_5b on 1 × rtx-4090" in said
    assert "Upper bound" in " ".join(said.split()) and "!" not in said
    stages = [price["stage"] for price in json.loads((tmp_path / "recipe-plan.json").read_text())]
    assert stages == ["sft", "measure", "rl", "eval"]
    code, said, error = ask("plan", "--recipe", example, "--model", "qwen3_30b_a3b")
    assert code == 0 and "GB!" in said and "full-parameter training holds 488.5 GB" in " ".join(said.split())
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    code, adapted, _ = ask(
        "plan", "--recipe", example, "--model", "qwen2_5_0_5b", "--set", "sft.lora=16", "--set", "rl.lora=16"
    )
    assert code == 0 and re.search(r"sft .* 3\.2 GB", adapted) and re.search(r"eval .* 4\.0 GB", adapted)
    for words, why in (
        (["--tasks", recipes], "--tasks needs --recipe"),
        (["--set", "rl.lora=16"], "--set needs --recipe"),
        (["--recipe", example, "--model", "tiny", "--tasks", tmp_path / "none"], "does not exist"),
        (["--recipe", example, "--model", "tiny", "--tasks", tmp_path / "empty"], "contains no recipes"),
        (["--recipe", example, "--model", "tiny", "--tasks", tmp_path / "broken.json"], "is not a recipe of tasks"),
        (["--recipe", example, "--model", "tiny", "--tasks", recipes / "generated-0.json"], "two packages are needed"),
        (
            ["--recipe", example, "--checkpoint", checkpoint, "--gpus", 2, "--tasks", recipes, "--hardware", "abacus"],
            "abacus",
        ),
    ):
        code, _, error = ask("plan", *words)
        assert code == 2 and why in error and error.count("\n") == 1, (words, error)
