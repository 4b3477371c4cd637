"""vLLM as the engine of asynchronous RL: its tokens, log-probs and versions, its weights after every swap, and the
networks that it does not serve. `make test-vllm` installs it into an environment of its own, and plays this file
there."""

import json
import random
import threading
import time

import pytest
import torch

from kit.disk import read_lines
from kit.settings import RunError
from recipe.asynchronous.run import Async, Small
from ref import weight_sync
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.network import KVCache, load_hf
from ref.rl import RewardCoefficients, Settings
from scaled.async_rl import services
from scaled.async_rl.local import Plan, play
from scaled.async_rl.player import Player
from scaled.async_rl.vllm_engine import VLLM, total
from tests import forks
from tests.mirror.test_async_rl import events, weights
from tests.mirror.test_player import play as play_out
from tests.mirror.test_player import setup
from tests.ref.test_async_rl import audit
from tests.talks import contexts_of
from tests.vllm.parts import Mixture, dense

pytestmark = pytest.mark.vllm

MAX, SEATS, STOP = 96, 8, 0


class Served:
    """An engine, and the versions that it was given, as the trainer has them."""

    def __init__(self, folder):
        self.writer, self.models = weight_sync.Writer(services.open_stores(str(folder)).weights), [dense()]
        self.writer.publish(0, weight_sync.parts(self.models[0]))
        self.engine = VLLM(dense(1), str(folder), "one", SEATS, MAX)
        self.swap()

    @torch.no_grad()
    def publish(self):
        """A version whose tokens are others."""
        model, version = dense(), len(self.models)
        for p, before, q in zip(
            model.parameters(), self.models[-1].parameters(), dense(version).parameters(), strict=True
        ):
            p.copy_(before + 0.3 * q * (p.ndim > 1))
        self.models.append(model)
        self.writer.publish(version, weight_sync.parts(model))

    def swap(self):
        """Serve the newest version, and compare what is served with the trainer's own weights."""
        version = len(self.models) - 1
        self.engine.fetch(version)
        told = self.engine.swap()
        own = {part.name: f"{weight_sync.digest(part):032x}" for part in weight_sync.parts(self.models[version])}
        assert told == {"version": version, "sums": total(own)} and self.engine.version == version

    def made(self):
        """Tokens of turns under way, as far as vLLM has told."""
        return sum(
            state.detokenizer.num_output_tokens() for state in self.engine.llm.output_processor.request_states.values()
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    found = Served(tmp_path_factory.mktemp("store"))
    yield found
    found.engine.close()


def prompts(number, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(1, 61) for _ in range(rng.randint(1, 9))] for _ in range(number)]


def draws(seed):
    return torch.rand(MAX, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def scored(models, rollout, dtype, shift=0):
    """Log-probs of a rollout's own tokens, each under the version that sampled it, with the keys and values that the
    versions before it left. `shift`: pretends that every token but those of the last version came a version later."""
    tokens, last = rollout.tokens, len(models) - 1
    cache = KVCache(models[0].config, 1, len(tokens), dtype)
    versions = [min(int(v) + shift, last) for v in rollout.version]
    first = int(rollout.sampled.int().argmax())
    found = []
    out = models[versions[first]](tokens[None, :first], cache=cache)
    for t in range(first, len(tokens)):
        found.append(out.logits[0, -1].float().log_softmax(-1)[tokens[t]])
        if t + 1 < len(tokens):
            out = models[versions[t + 1]](tokens[None, t : t + 1], cache=cache)
    return torch.stack(found)


def test_five_swaps_under_running_requests(served):
    """Contexts of one turn, and a new one for each that ends. None is lost; versions never go back; and under its
    version, with the older keys, each token has the log-probability that this project's network gives it, up to
    rounding."""
    engine, waiting, found, first = served.engine, prompts(32), [], len(served.models) - 1

    def go_on():
        while waiting and engine.free_slots:
            engine.add(waiting[-1], [STOP], draws(len(waiting)))
            waiting.pop()
        for slot in engine.step():
            found.append(engine.remove(slot, engine.turn(slot) is not None))

    for _ in range(5):
        served.publish()  # which takes its time, in which those that run may end
        while served.made() < 2 * SEATS and (waiting or engine.free_slots < SEATS):
            go_on()
        running = engine.state.count("ready")
        served.swap()
        assert running > 0
    while waiting or engine.free_slots < SEATS:
        go_on()
    assert len(found) == 32 and served.made() == 0
    exact, ours, shifted, theirs, changes = [], [], [], [], 0
    wide = [model.float() for model in (dense() for _ in served.models)]
    for a, b in zip(wide, served.models, strict=True):
        a.load_state_dict(b.state_dict())
    for rollout in found:
        own = rollout.version[rollout.sampled]
        assert bool((own.diff() >= 0).all()) and first <= int(own.min()) and int(own.max()) <= first + 5
        assert rollout.finished == (int(rollout.tokens[-1]) == STOP) and (
            rollout.finished or len(rollout.tokens) == MAX
        )
        assert STOP not in rollout.tokens[rollout.sampled][:-1].tolist() and rollout.experts.shape == (
            len(own) + int((~rollout.sampled).sum()) - 1,
            0,
            2,
        )
        changes += int((own.diff() > 0).sum())
        exact.append(scored(wide, rollout, torch.float32))
        shifted.append(scored(wide, rollout, torch.float32, 1))
        ours.append(scored(served.models, rollout, torch.bfloat16))
        theirs.append(rollout.logp[rollout.sampled])
    exact, ours, shifted, theirs = map(torch.cat, (exact, ours, shifted, theirs))
    rounding, other = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    print(
        f"\n{len(theirs)} tokens, {changes} turns of a version under them; rms of log-probs: vLLM "
        f"{other:.4f}, ours in bfloat16 {rounding:.4f}"
    )
    assert changes >= 5 and other <= 2 * rounding
    assert (theirs - shifted).square().mean().sqrt() > 10 * other, "other versions would show"


def test_conversations_of_many_turns(served):
    """A player's: tools answer, and groups come and go. Every token has its log-probability under the whole context."""
    player = Player(served.engine, setup(), SEATS, 2, 0)
    player.give(range(10))
    for _ in range(5):
        player.tick()
    player.forget([9])
    found = play_out(player)
    assert sorted(found) == list(range(9)) and served.engine.free_slots == SEATS
    wide = dense().float()
    wide.load_state_dict(served.models[-1].state_dict())
    segments = [s for played in found.values() for p in played for s in p.chain.segments if bool(s.sampled.any())]
    assert any(int(s.sampled.int().diff().clamp(min=0).sum()) > 1 for s in segments), "some context has several turns"
    errors = []
    for model in (wide, served.models[-1]):
        for s in segments:
            logp = model(s.tokens[None]).logits[0, :-1].float().log_softmax(-1).gather(1, s.tokens[1:, None])[:, 0]
            errors.append((logp - s.logp[1:])[s.sampled[1:]] if model is wide else (logp, s))
    theirs = torch.cat(errors[: len(segments)]).square().mean().sqrt()
    ours = []
    for (logp, s), error in zip(errors[len(segments) :], errors[: len(segments)], strict=True):
        ours.append(logp[s.sampled[1:]] - (s.logp[1:][s.sampled[1:]] + error))
    assert theirs <= 2 * torch.cat(ours).square().mean().sqrt()


def test_greedy_tokens_are_our_sampler_s(served):
    """Up to the first two tokens that bfloat16 cannot tell apart."""

    class Alone:
        stop = STOP

        def __init__(self, prompt):
            self.prompt = prompt

        def reply(self, turn):
            return None

    engine, asked, model = served.engine, prompts(SEATS, 1), served.models[-1]
    wanted = contexts_of(Sampler(model, torch.bfloat16), [Alone(prompt) for prompt in asked], MAX, 0.0)
    engine.temperature = 0.0
    try:
        slots, found = {engine.add(prompt, [STOP], draws(0)): n for n, prompt in enumerate(asked)}, {}
        while len(found) < SEATS:
            for slot in engine.step():
                found[slots[slot]] = engine.remove(slot)
    finally:
        engine.temperature = 1.0
    same = 0
    for n, want in enumerate(wanted):
        mine, theirs = want.tokens.tolist(), found[n].tokens.tolist()
        assert not found[n].logp.any()
        t = next((t for t, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        same += t - len(asked[n])
        if mine != theirs:
            logits = model(torch.tensor([mine[:t]])).logits[0, -1].float()
            assert abs(logits[mine[t]] - logits[theirs[t]]) <= 2**-6 * logits.abs().max(), (
                "four units in the last place"
            )
    print(f"\n{same} greedy tokens are the same")
    assert same > 8 * SEATS


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A dense agent of the small world."""
    folder = tmp_path_factory.mktemp("agent")
    forks.play(
        *forks.smallest(
            folder / "recipe", "--set", "model.num_experts=0", "--set", "model.head_dim=32", "--set", "rl.steps=0"
        ),
        said=folder / "said",
        seconds=900,
    )
    return folder / "recipe" / "checkpoints" / "sft"


def test_six_steps_of_rl_in_the_small_world(agent, tmp_path):
    """With the services: nobody dies, no group is lost, the served sums are the trainer's at every version, and the
    journal replays."""
    rl = Settings(
        steps=6,
        prompts=4,
        rollouts=4,
        lr=1e-3,
        warmup=0,
        decay=0,
        max_len=96,
        payment=RewardCoefficients(effort_price=0.002),
    )
    parts, rules = Small(Async(str(agent), tool_s=0.05, rl=rl)), Rules(4, 2, 6)
    play(Plan(tmp_path, rules, parts, 1, slots=12, rollouts=4, timeout=60.0, engine="vllm"))
    counts, version = audit(rules, events(tmp_path))
    assert version == 6 and counts["trained"] == 24
    log = read_lines(tmp_path / "events" / "worker-0.jsonl")
    assert not [line for line in log if line["what"] in ("died", "lost", "unsynced")] and {
        line["epoch"] for line in log
    } == {0}

    torch.set_num_threads(1)
    learner, sums, sampled = parts.learner(), {}, []
    for number, played in services.trained(tmp_path):
        sums[number] = total(
            {part.name: f"{weight_sync.digest(part):032x}" for part in weight_sync.parts(learner.model)}
        )
        own = [s.version[s.sampled] for p in played for s in p.chain.segments]
        assert all(bool((v.diff() >= 0).all()) for v in own)
        sampled += [int(v) for v in torch.cat(own).unique()]
        learner.step(played)
    loads = [(line["version"], line["sums"]) for line in log if line["what"] == "load"]
    assert len(set(sums.values())) == 6 and loads and all(sums[v] == value for v, value in loads if v < 6)
    assert set(sampled) <= {v for v, _ in loads} and len(set(sampled)) > 1
    again = parts.learner()
    services.restored(tmp_path / "trainer", again)
    assert all(a.equal(b) for a, b in zip(weights(learner), weights(again), strict=True))
    print(f"\nversions loaded {[v for v, _ in loads]}, sampled from {sorted(set(sampled))}")


def test_ranks_vllm_and_a_store_on_ray_are_one_run(agent, tmp_path, monkeypatch):
    """`--scale full` on CPUs: every rank writes its shard of each version, and vLLM serves what these say, swapped
    under running requests."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # no cluster that somebody else has started
    how = (
        "--scale",
        "full",
        "--backend",
        "gloo",
        "--nproc",
        2,
        "--runtime",
        "ray",
        "--engine",
        "vllm",
        "--store",
        tmp_path / "store",
    )
    rl = {"steps": 5, "prompts": 4, "rollouts": 4, "replay": "none", "lr": 1e-3, "warmup": 0, "decay": 0, "max_len": 96}
    few = {
        "workers": 1,
        "slots": 12,
        "heldout": 0,
        "timeout": 60,
        "tool_s": 0.05,
        **{f"rl.{name}": value for name, value in rl.items()},
    }
    sets = (word for name, value in few.items() for word in ("--set", f"{name}={value}"))
    words = "run", "async-rl", *how, "--checkpoint", agent, "--out", tmp_path / "run", *sets
    said = forks.play(*words, said=tmp_path / "said", seconds=900)
    folder = tmp_path / "run" / "services"
    counts, version = audit(Rules(4, 2, 5), events(folder))
    log, report = (
        read_lines(folder / "events" / "worker-0.jsonl"),
        json.loads((tmp_path / "run" / "report.json").read_text()),
    )
    assert version == 5 and counts["trained"] == 20 and report["result"]["restarts"] == 0, said
    assert not [line for line in log if line["what"] in ("died", "lost", "unsynced")]
    network = load_hf(agent).bfloat16()
    reader = weight_sync.Reader(services.open_stores(str(tmp_path / "store")).weights, weight_sync.parts(network))
    sums = {}
    for number in range(6):
        assert reader.fetch(number) == number
        reader.swap()
        sums[number] = total({part.name: f"{weight_sync.digest(part):032x}" for part in weight_sync.parts(network)})
    assert {len(link["shards"]) for manifest in reader.manifests.values() for link in manifest["links"]} == {2}
    loads = [(line["version"], line["sums"]) for line in log if line["what"] == "load"]
    assert len(loads) > 1 and all(sums[number] == value for number, value in loads) and len(set(sums.values())) > 1
    print(f"\nversions loaded {[number for number, _ in loads]}")


def test_a_mixture_of_experts_is_refused_in_one_line(tmp_path):
    """On a CPU. Nothing of vLLM is left behind."""
    import psutil  # one of vLLM's own needs

    seen, stop = {}, threading.Event()

    def watch(pid):
        while not stop.wait(0.2):
            try:
                seen.update({child.pid: child for child in psutil.Process(pid).children(recursive=True)})
            except psutil.NoSuchProcess:
                return

    def started(name, process):
        if name.startswith("worker"):
            threading.Thread(target=watch, args=(process.pid,), daemon=True).start()

    try:
        with pytest.raises(RunError) as refused:
            play(
                Plan(tmp_path, Rules(4, 1, 2), Mixture(steps=2), 1, slots=8, rollouts=2, timeout=60.0, engine="vllm"),
                started=started,
            )
    finally:
        stop.set()
    said = str(refused.value)
    assert (
        "of version 0" in said
        and "tensors are not the trainer's once loaded, the first is model.layers.0.mlp.experts" in said
    )
    assert "on a CPU vLLM lays experts out once" in said and said.endswith("use --engine own") and "\n" not in said
    assert not [event for event in events(tmp_path) if event.kind == "start"], "no token was sampled"
    until = time.monotonic() + 60
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in seen.values()):
        assert time.monotonic() < until, seen
        time.sleep(0.2)
    assert len(seen) >= 2


def test_experts_are_checked_by_what_they_compute():
    """The check itself: experts in order pass, and in another order fail, although what is stored is the same."""
    from scaled.async_rl.vllm_weights import experts

    class Layer:
        def __init__(self, order):
            generator = torch.Generator().manual_seed(0)
            self.w13_weight = (0.1 * torch.randn(3, 8, 16, generator=generator)).bfloat16()
            self.w2_weight = (0.1 * torch.randn(3, 16, 4, generator=generator)).bfloat16()
            self.order, self.quant_method = order, self

        def apply(self, layer, x, shares, ids, *_):
            w13, w2 = self.w13_weight[int(ids[0])][self.order], self.w2_weight[int(ids[0])]
            gate, up = (x @ w13.T).chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up) @ w2.T

    assert len(dict(experts("e", Layer(torch.arange(8))))) == 9
    assert not dict(experts("e", Layer(torch.arange(8).roll(1))))
