"""What ranks are asked to do with adapters. Every call gets the whole problem, cuts this rank's part, and returns whole
results, float64."""

from functools import partial
from pathlib import Path

import torch

from kit.disk import read_lines
from recipe.full import stages as chain
from ref.engine.sampler import Sampler
from ref.lora import is_adapter
from ref.network import fast as ref_model
from scaled import muon, rl, supervised, weight_sync
from scaled.network import adapters, checkpoint
from scaled.network import model as network
from scaled.runtime import sharding
from tests.mirror.calls import Script, gradients

__all__ = ["phase", "rl_step"]


def given(config, state, rank):
    """The network that holds `state`, adapters of this rank included."""
    model = network.Transformer(config, lora=rank).double()
    for name, p in model.named_parameters():
        sharding.load_slice(name, p, state[name])
    return model


def rl_step(settings, config, state, chains, rewards, folder):
    """Figures and gradients of an RL step; the network after an optimiser step on them, as a sampler and a checkpoint
    get it; its adapters; the names in a state of the training; what weight sync would send from this rank."""
    model = given(config, state, settings.rl.lora)
    sampler, script = Sampler(ref_model.Transformer(config), torch.float64), Script(chains, rewards)
    figures = rl.sample_and_improve(settings, model, None, script, script, partial(rl.fetch, sampler, model), 2)
    before = {name: p.clone() for name, p in sampler.model.named_parameters()}
    grads = gradients(model)
    optimizers = muon.optimizers(model, 0.0, 0.01, use_muon=True)
    for optimizer in optimizers:
        optimizer.step()
    rl.fetch(sampler, model, 3)
    network.save_hf(model, Path(folder) / "net")
    adapters.save_adapter(model, Path(folder) / "net", "base", "what came before")
    frozen = {
        name: sharding.gathered_tensor(p.detach()) for name, p in model.named_parameters() if not is_adapter(name)
        and not sharding.owned(name)
    }  # fmt: skip
    sent = [(part.name, part.first, part.weights.clone()) for part in weight_sync.parts(model)]
    weights = dict(sharding.wholes(model))
    rows = all(
        torch.equal(x.flatten(0, max(0, x.ndim - 2)), weights[name.removeprefix("model.")][first : first + len(x)])
        for name, first, x in sent
        if name.removeprefix("model.") in weights
    )
    names = sorted(checkpoint.state(model, optimizers))
    return (
        figures,
        grads,
        before,
        dict(sampler.model.named_parameters()),
        sharding.adapters(model),
        frozen,
        names,
        rows,
    )


def phase(c, config, state, rank, batches, folder):
    """SFT on given batches: metrics of each step, and the adapters behind them."""
    model = given(config, state, rank)
    found = chain.phase_of(c, "sft", batches[0][0].shape[1], len(batches))
    supervised.train(found, folder, model, None, batches.__getitem__)
    return read_lines(folder / "metrics" / "sft.jsonl"), sharding.adapters(model), dict(sharding.wholes(model))
