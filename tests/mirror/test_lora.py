"""Adapters on ranks: cut like the weights that they belong to, trained as on one rank, and merged wherever weights go
out."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch

from recipe.small.learner import RATES, Learner, train
from ref import lora, rl
from ref.cpt import train_tokenizer
from ref.network import Config, Transformer, load_hf, save_hf
from ref.self_summary import Chain
from tests.contexts import CONFIG, segment
from tests.mirror import calls, lora_parts
from tests.mirror.layouts import close, play, same
from tests.mirror.test_rl import ASKED, SMALL
from tests.mirror.test_supervised import Silent, settings_of

G, N = SMALL.prompts, SMALL.rollouts
DENSE = dataclasses.replace(CONFIG, num_experts=0, intermediate_size=20, qk_norm=False, attention_bias=True)


def network(config: Config, rank: int, seed: int) -> Transformer:
    """A network with adapters that matter, float64."""
    torch.manual_seed(seed)
    model = Transformer(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
        lora.adapt(model, rank, seed)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize(
    "layout, dense, rank, replay",
    [
        (dict(dp=1, cp=1, ep=1), True, 1, "none"),
        (dict(dp=2, cp=1, ep=1), True, 3, "none"),
        (dict(dp=2, cp=1, ep=2), False, 3, "plain"),
        (dict(dp=1, cp=2, ep=1), False, 1, "none"),
    ],
    ids=str,
)
def test_a_step_of_rl(tmp_path, layout, dense, rank, replay):
    """Loss and gradients of the adapters are those of `ref`; frozen weights have neither gradient nor moments, nor a
    place in a state, and keep their bits. A sampler, a checkpoint and weight sync get the merged weights."""
    seed, folder = 7 * rank + dense, tmp_path
    config = DENSE if dense else CONFIG
    model, g = network(config, rank, seed % 5), torch.Generator().manual_seed(seed)
    chains = [Chain([bare(segment(g, model), dense)], finished=True) for _ in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    c = dataclasses.replace(
        ASKED, rl=dataclasses.replace(SMALL, lora=rank, replay=replay), cp=layout["cp"], ep=layout["ep"]
    )
    state = {name: p.detach() for name, p in model.named_parameters()}
    figures, grads, before, after, tensors, frozen, names, sent = play(
        layout, lora_parts.rl_step, c, config, state, chains, rewards, str(folder)
    )
    script = calls.Script(chains, rewards)
    found = rl.improve(c.rl, model, None, [script.rollout(n) for n in range(G * N)])
    wanted = {name: x for (name, _), x in zip(model.named_parameters(), found.gradients, strict=True) if x is not None}
    close(figures["loss"], found.loss)
    assert grads.keys() == wanted.keys() == tensors.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in wanted.items():
        close(grads[name], x, largest)
    for name, x in lora.weights(model):
        close(before[name], x)
    assert frozen.keys() <= state.keys() and all(torch.equal(x, state[name]) for name, x in frozen.items())
    assert set(names) == {f"model.{name}" for name in tensors} | {
        f"optimizer.model.{name}.{key}" for name in tensors for key in ("step", "exp_avg", "exp_avg_sq")
    }
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors.get(name, p))
    for (name, x), saved in zip(lora.weights(model), load_hf(folder / "net", torch.float64).parameters(), strict=True):
        close(after[name], x)
        assert torch.equal(after[name], saved), name
    assert sent
    base = Transformer(config).double()
    again = lora.load_adapter(base, folder / "net-adapter")
    assert all(torch.equal(x, tensors[name]) for name, x in lora.adapters(again).items())


def bare(one, dense):
    """A context of a network without experts."""
    return dataclasses.replace(one, experts=one.experts[:, :0, :0]) if dense else one


def test_sft_is_that_of_one_rank_and_resumes(tmp_path):
    """Three steps of AdamW, though `training.optimizer` is Muon. Repeated from a state, without the frozen weights in
    it, they end in the same bits."""
    layout = dict(dp=2, cp=1, ep=2)
    model, draw, batches = network(CONFIG, 2, 0), torch.Generator().manual_seed(1), []
    for _ in range(3):
        doc = (torch.rand(4, 16, generator=draw) < 0.2).cumsum(1)
        weight = (torch.rand(4, 16, generator=draw) < 0.6).float()
        batches.append((torch.randint(0, 30, (4, 16), generator=draw), doc, weight))
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    c = settings_of(True)
    c = dataclasses.replace(
        c, sft=dataclasses.replace(c.sft, lora=2), cluster=dataclasses.replace(c.cluster, checkpoint_every=1)
    )
    first = play(layout, lora_parts.phase, c, CONFIG, state, 2, batches, tmp_path)
    learner = Learner(c, copy.deepcopy(model), None, c.sft.muon_lr, c.sft.adamw_lr)
    silent = Silent()
    train(silent, c, learner, batches.__getitem__, 3, lambda step: RATES["sft"](step, 3), "sft")
    for ours, theirs in zip(first[0], silent.lines, strict=True):
        close(ours["loss"], theirs["loss"])
    wanted = lora.adapters(learner.trunk.masters)
    assert wanted.keys() == first[1].keys()
    for name, x in wanted.items():
        close(first[1][name], x)
        assert not torch.equal(x, state[name])
    for name, x in lora.weights(learner.trunk.masters):
        close(first[2][name], x)
    shutil.rmtree(tmp_path / "state" / "step-00000003")
    again = play(layout, lora_parts.phase, c, CONFIG, state, 2, batches, tmp_path)
    assert same(first, again)


def test_rl_with_adapters_resumes(tmp_path):
    """`etude run dr-grpo --set rl.lora=…` on two ranks: killed after a step and resumed, the same bits. The network
    that it leaves is its start with the adapter merged."""
    start, tokenizer = tmp_path / "start", train_tokenizer(["def f(x):\n    return x\n"], 300)
    config = dataclasses.replace(CONFIG, vocab_size=300)
    save_hf(network(config, 0, 0).float(), start)
    tokenizer.save(str(start / "tokenizer.json"))
    sets = ("rl.prompts=2", "rl.rollouts=4", "rl.steps=2", "rl.max_len=256", "length=256", "micro_rows=2", "heldout=0",
            "checkpoint_every=1", "rl.payment.kl=0.01", f"checkpoint={start}", "cp=2", "ep=2", "rl.lr=0.01",
            "rl.turn_tokens=6", "rl.episode_tokens=40", "rl.payment.effort_price=0.01", "timeout=900")  # fmt: skip
    out, layout = tmp_path / "out", dict(dp=1, cp=2, ep=2)
    found = play(layout, calls.training, "dr-grpo", [*sets, "rl.lora=2"], out)
    final = out / "checkpoints" / "final"
    record = json.loads((out / "checkpoints" / "final-adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(start) and record["r"] == 2
    trained = lora.load_adapter(load_hf(start), out / "checkpoints" / "final-adapter")
    for (name, x), p in zip(lora.weights(trained), load_hf(final).parameters(), strict=True):
        torch.testing.assert_close(p, x, rtol=0, atol=1e-6)
        assert torch.equal(p, load_hf(start).get_parameter(name)) != ("self_attn" in name and "proj" in name), name
    kept = {path: path.read_bytes() for path in out.rglob("checkpoints/*/*.safetensors")}
    lines = (out / "metrics" / "dr-grpo.jsonl").read_bytes()
    shutil.rmtree(out / "state" / "step-00000002")
    shutil.rmtree(out / "checkpoints")
    assert play(layout, calls.training, "dr-grpo", [*sets, "rl.lora=2"], out) == found
    assert (out / "metrics" / "dr-grpo.jsonl").read_bytes() == lines and len(kept) == 3
    assert all(path.read_bytes() == data for path, data in kept.items())
