"""What ranks are asked to do. Every call gets the whole problem, cuts this rank's part, and returns whole results,
float64."""

import contextlib
import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from etude.run import budget_ladder
from etude.run import rank as full_rank
from etude.run import settings as full_settings
from kit.disk import read_lines
from recipe.full import stages as chain
from recipe.full.stages import quiet, reinforced
from recipe.small.micro_world import CheckpointTasks
from ref import muon as ref_muon
from ref.engine.sampler import Sampler
from ref.lora import is_adapter
from ref.network import Config
from ref.network import fast as ref_model
from ref.network.gradients import experts_swiglu
from ref.rollout import Limits, Rollout
from scaled import (
    cpt,
    dr_grpo,
    feature_deletion,
    mtp,
    muon,
    packing,
    pretrain,
    quant,
    rl,
    router_replay,
    self_summary,
    sft,
    supervised,
)
from scaled.network import checkpoint
from scaled.network import model as network
from scaled.network.dispatch import on_owners
from scaled.runtime import engine, launch, sharding
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.comm import Traffic, all_reduce_sum, all_to_all, gathered, sum_over, total
from scaled.runtime.cut import ahead, cut, full, joined, places
from scaled.runtime.exchange import exchange
from scaled.runtime.mesh import computing, current
from scaled.runtime.step_times import StepTimes, count, part


def leaf(x):
    """This rank's part, to be differentiated."""
    return cut(x).clone().requires_grad_()


def laws(x, k):
    """What `cut.py` promises, and the gradient of a function that crosses every border between ranks."""
    mine = leaf(x)
    whole, next_ = full(mine), ahead(mine, k)
    loss = total((mine * next_).sum() + (sum_over(mine.square().sum(1, keepdim=True), "cp") * mine).sum())
    loss.backward()
    group = current().group("dp")
    rows = x.chunk(group.size)[group.rank]
    return joined(mine), bool(torch.equal(whole, rows)), joined(next_), loss.detach(), joined(mine.grad)


def everyone(T):
    """The places of every rank of a row."""
    return gathered(places(T), "cp")


def to_owners(x, owner):
    """Rows to the ep ranks that `owner` names, and their sum of squares back through the same door."""
    group = current().group("ep")
    mine = leaf(x)
    to = cut(owner) % group.size
    order = to.argsort(stable=True)
    counts = to.bincount(minlength=group.size)
    coming = torch.stack(gathered(counts, "ep"))[:, group.rank] if group.size > 1 else counts
    sent = all_to_all(mine[order], counts.tolist(), coming.tolist(), "ep")
    back = all_to_all(sent * (group.rank + 1), coming.tolist(), counts.tolist(), "ep")
    found = torch.empty_like(back).index_copy(0, order, back)
    total((found * found).sum()).backward()
    return joined(found), joined(mine.grad)


def advantages(rewards, how, scattered):
    """Rollouts of a group over dp: equal shares of each group's, or scattered with their groups' numbers."""
    group = current().group("dp")
    if not scattered:
        parts = rewards.tensor_split(group.size, 1)
        found = dr_grpo.group_advantages(parts[group.rank].contiguous(), **how)
        return torch.cat(gathered(found.T.contiguous(), "dp")).T.contiguous()
    G, N = rewards.shape
    number = torch.arange(G * N)
    mine = number[number * 7 % group.size == group.rank]
    found = dr_grpo.group_advantages(rewards.flatten()[mine], groups=mine // N, **how)
    out = torch.empty(G * N, dtype=found.dtype)
    out[torch.cat(gathered(mine, "dp"))] = torch.cat(gathered(found, "dp"))
    return out.view(G, N)


def policy(logp, behavior, advantages, mask, keep, how):
    mine = leaf(logp)
    args = mine, cut(behavior), cut(advantages), cut(mask)
    loss = dr_grpo.policy_loss(*args, budget=7.0, keep=None if keep is None else cut(keep), **how)
    loss.backward()
    how = {key: value for key, value in how.items() if key != "length"}
    return loss.detach(), joined(mine.grad), dr_grpo.ratio_statistics(*args, n_tokens=11.0, **how)


def family(name, logp, behavior, rewards, mask, finished):
    """The rollouts of every group over dp: row g·n + i is this rank's rollout i of group g."""
    group, (G, N) = current().group("dp"), rewards.shape
    n = N // group.size

    def part(x):
        some = x.unflatten(0, (G, N))[:, group.rank * n : (group.rank + 1) * n].flatten(0, 1)
        return some if x.ndim == 1 else some[:, places(x.shape[1])]

    mine = part(logp).clone().requires_grad_()
    loss = dr_grpo.family_loss(
        dr_grpo.FAMILY[name],
        mine,
        part(behavior),
        part(rewards.flatten()).view(G, n),
        part(mask),
        budget=5.0,
        finished=part(finished),
    )
    loss.backward()
    grad = full(mine.grad).unflatten(0, (G, n))
    return loss.detach(), torch.cat([part for part in gathered(grad.transpose(0, 1).contiguous(), "dp")]).transpose(
        0, 1
    ).flatten(0, 1)


def replay_statistics(logp, behavior, mask, ours, theirs):
    a, b = ([cut(layer).flatten(0, 1) for layer in layers] for layers in (ours, theirs))
    return router_replay.mismatch(cut(logp), cut(behavior), cut(mask)), router_replay.compare_experts(a, b)


def on_the_first(ours, theirs):
    """`differing` where rank 0 holds every token."""
    first = current().group("all").rank == 0
    return router_replay.compare_experts(
        *([layer if first else layer[:0] for layer in layers] for layers in (ours, theirs))
    )


def chain_of(segments: int) -> self_summary.Chain:
    """A chain of so many contexts of three tokens."""
    one = self_summary.Segment(
        torch.arange(3),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(2, 0, 0, dtype=torch.long),
        True,
        summary=torch.zeros(3, dtype=torch.bool),
    )
    return self_summary.Chain([one] * segments)


def chain_advantages(advantages, chains):
    """Segment s of every chain on dp rank s mod dp → (chain, advantage) of all segments."""
    group = current().group("dp")
    mine = [self_summary.Chain(chain.segments[group.rank :: group.size]) for chain in chains]
    found = self_summary.spread(advantages, mine)
    of = torch.tensor([c for c, chain in enumerate(mine) for _ in chain.segments], dtype=torch.long)
    pairs = sorted(zip(torch.cat(gathered(of, "dp")).tolist(), torch.cat(gathered(found, "dp")).tolist(), strict=True))
    return pairs


def packed(costs, n):
    """Balanced over all ranks' sequences, then sent: who has which afterwards, and the imbalance."""
    group = current().group("dp")
    mine = torch.arange(len(costs)).tensor_split(group.size)[group.rank]
    rank_of = packing.balance(costs[mine], n)
    off = packing.imbalance(costs[mine], rank_of, n)
    came = exchange([torch.full((int(i) % 5 + 1,), int(i)) for i in mine], rank_of % group.size)
    dealt = torch.empty(len(costs), dtype=torch.long)
    dealt[torch.cat(gathered(mine, "dp"))] = torch.cat(gathered(rank_of, "dp"))
    held = torch.tensor([[int(x[0]), len(x), group.rank] for x in came], dtype=torch.long).view(-1, 3)
    return dealt, off, sorted(map(tuple, torch.cat(gathered(held, "dp")).tolist()))


def deleted(tree, coverage, least, most):
    """Pieces of all ways, where each rank has the coverage of its share of the tests, and all have what ran at import;
    and what each is worth."""
    group = current().group("all")
    mine = {test: coverage[test] for test in sorted(coverage)[group.rank :: group.size]} | {"": coverage.get("", ())}
    found = [
        feature_deletion.slices(tree, mine, least, most),
        feature_deletion.bodies(tree),
        feature_deletion.symbols(tree),
        feature_deletion.statements(tree),
    ]
    return [(pieces, [feature_deletion.difficulty(tree, piece) for piece in pieces]) for pieces in found]


def deleted_from_others(tree, coverage):
    """Where ranks differ in a file."""
    group = current().group("all")
    return feature_deletion.slices(tree | {"odd.py": b"x = %d\n" % group.rank}, coverage)


def timed(path):
    """A step of which the second rank samples for longer. Returns what this rank took."""
    config, rank = Config.tiny(20, num_experts=0, intermediate_size=16), current().group("all").rank
    with StepTimes(path, torch.device("cpu"), torch.float32) as times:
        with part("train"):
            with part("sample"):
                time.sleep(0.3 * rank)
            with part("wait"):
                dist.barrier()
            count(ref_model.Transformer(config), torch.tensor([2, 3]))
            time.sleep(0.01)
        rank_seconds = {"seconds": times.mark - times.started, **times.seconds}
        times.end(1)
    return rank_seconds


def dealt(n, wrong):
    """Ten more than each of n numbers, by the rank that it falls to; one of them is refused there."""

    def more(items):
        if wrong in items:
            raise ValueError(f"{wrong} is wrong")
        return [item + 10 for item in items]

    return feature_deletion.map_over_ranks(range(n), more)


def given(config: Config, state: dict) -> network.Transformer:
    """The network that holds `state`."""
    model = network.Transformer(config).double()
    for name, p in model.named_parameters():
        sharding.load_slice(name, p, state[name])
    return model


def gradients(model) -> dict:
    """Whole gradients by name, as `sharding.wholes` gathers them one after the other: here every rank adds its parts to
    zeros, all at once."""
    ep, parts = current().group("ep"), {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        whole = torch.zeros(sharding.whole_shape(name, p), dtype=p.grad.dtype)
        mine = whole.chunk(ep.size)[ep.rank] if sharding.owned(name) else whole
        if isinstance(p.grad, DTensor):
            local, (size, offset) = (
                p.grad.to_local(),
                compute_local_shape_and_global_offset(p.grad.shape, p.grad.device_mesh, p.grad.placements),
            )
            mine[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))] = local
        else:
            mine.copy_(p.grad)
        parts[name] = whole
    if not parts:
        return parts
    together = all_reduce_sum(torch.cat([x.flatten() for x in parts.values()]))
    return {
        name: x.view_as(parts[name])
        for name, x in zip(parts, together.split([x.numel() for x in parts.values()]), strict=True)
    }


def forward(config, state, ids, doc, experts, remake, explicit=True):
    """Logits, a loss over them with the balance loss, gradients; experts replayed where given. `explicit=False`: as in
    rows too long for an explicit product."""
    model = given(config, state)
    with (
        computing(rematerialise=remake),
        mock.patch.object(ref_model, "EXPLICIT_ATTENTION", 512 * 512 if explicit else 0),
    ):
        chosen = None if experts is None else [cut(layer).flatten(0, 1) for layer in experts]
        out = model(cut(ids), doc=None if doc is None else cut(doc), experts=chosen)
        loss = total((out.logits * out.logits.sin()).sum())
        if config.num_experts:
            loss = loss + 10 * network.load_balancing_loss(out.router_logits, out.experts).double()
        loss.backward()
    picks = [joined(layer.unflatten(0, cut(ids).shape)) for layer in out.experts]
    return joined(out.logits.detach()), loss.detach(), picks, gradients(model)


def next_token(config, state, ids, doc, weight):
    model = given(config, state)
    part = {name: None if x is None else cut(x) for name, x in (("doc", doc), ("weight", weight))}
    hidden = model(cut(ids), doc=part["doc"], logits=False).hidden
    loss, count = cpt.next_token_loss(model, hidden, cut(ids), **part)
    loss.backward()
    return loss.detach(), count, gradients(model)


def conversations(config, state, ids, doc, weight):
    """The count, the loss and the balance loss of rows of conversations, and the gradients of both losses."""
    model, part = given(config, state), [cut(x) for x in (ids, doc, weight)]
    n_tokens = sft.count_learned(*part[1:])
    loss, balance = sft.sft_loss(model, *part, n_tokens)
    (loss + 0.5 * balance).backward()
    return n_tokens, loss.detach(), balance.detach(), gradients(model)


def taught(config, state, batches, micro_rows):
    """Steps of SFT on batches of packed rows: figures and final weights."""
    model = given(config, state)
    steps = in_own_dtype(muon.optimizers(model, muon_lr=0.01, adamw_lr=1e-3))
    found = [sft.sft_step(model, steps, *map(cut, batch), micro_rows) for batch in batches]
    return found, dict(sharding.wholes(model))


def perplexity(config, state, tokenizer, corpus, how):
    found = cpt.codebase_nll(given(config, state), tokenizer, corpus, **how)
    return found.nll, found.tokens, found.bytes


def distilled(config, state, shape, layers, ids, doc, weight, how):
    model = given(config, state)
    heads = mtp.MTP(config, shape).double()
    for name, p in heads.named_parameters():
        sharding.load_slice(name, p, layers[name])
    part = {name: None if x is None else cut(x) for name, x in (("doc", doc), ("weight", weight))}
    out = model(cut(ids), doc=part["doc"], logits=False)
    generator = torch.Generator().manual_seed(3)
    loss, count, figures = mtp.mtp_loss(heads, model, out, cut(ids), **part, generator=generator, **how)
    loss.backward()
    return loss.detach(), count, figures, gradients(heads), gradients(model)


def sent(config, state, ids, experts, how):
    """The logits, and the bytes that all ranks' all-to-alls send, dispatch and combine together."""
    with computing(dispatch=how[0], combine=how[1]):
        model = given(config, state).to(torch.bfloat16)
        with Traffic() as traffic, torch.no_grad():
            out = model(cut(ids), experts=[cut(layer).flatten(0, 1) for layer in experts])
    return joined(out.logits.float()), int(all_reduce_sum(torch.tensor(traffic.bytes_sent.get("alltoall_base", 0))))


def in_own_dtype(steps):
    """Optimisers whose Newton–Schulz runs in the dtype that is trained in. In bfloat16, its default, a digit that tips
    weighs more than any order of sums, in float64 too: two runs would differ by that, and say nothing of what is to be
    compared."""
    for one in steps:
        if isinstance(one, ref_muon.Muon):
            one.ns_dtype = None
    return steps


def trained(config, state, batches, dtype, use_muon, saves=None):
    """Losses and final weights of training steps on `batches` [steps, B, T]; from a checkpoint on, and into one, where
    told."""
    model = given(config, state).to(dtype)
    steps = in_own_dtype(muon.optimizers(model, muon_lr=0.01, adamw_lr=1e-3, weight_decay=0.1, use_muon=use_muon))
    first, until, shelf = 0, len(batches), None
    if saves is not None:
        folder, until = saves
        shelf = Checkpoints(folder)
        if shelf.steps():
            checkpoint.create_optimizer_state(model, steps, shelf.names())
            first = shelf.load(checkpoint.state(model, steps))["step"]
    losses = []
    for batch in batches[first:until]:
        ids = cut(batch)
        out = model(ids, logits=False)
        loss, count = cpt.next_token_loss(model, out.hidden, ids)
        loss = loss / count + 0.01 * network.load_balancing_loss(out.router_logits, out.experts).to(dtype)
        loss.backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    if shelf is not None:
        shelf.save(until, checkpoint.state(model, steps), {"seen": until})
        shelf.finish()
    return torch.stack(losses) if losses else torch.empty(0), dict(sharding.wholes(model))


def phase(c, config, stage, trunk, layers, batches, folder):
    """A supervised stage of the full recipe on given batches, from given weights: the metrics of each step, and the
    weights after them."""
    model, heads = given(config, trunk), None
    if layers is not None:
        heads = mtp.MTP(config, c.mtp.layers).double()
        for name, p in heads.named_parameters():
            sharding.load_slice(name, p, layers[name])
    found = chain.phase_of(c, stage, batches[0][0].shape[1], len(batches))
    optimizers = muon.optimizers
    with mock.patch.object(supervised.muon, "optimizers", lambda *args, **how: in_own_dtype(optimizers(*args, **how))):
        supervised.train(found, folder, model, heads, batches.__getitem__, trunk=stage != "mtp")
    lines = [
        {key: value for key, value in line.items() if key != "step"}
        for line in read_lines(folder / "metrics" / f"{stage}.jsonl")
    ]
    return lines, dict(sharding.wholes(model)), {} if heads is None else dict(sharding.wholes(heads))


def whole(out, told, kill=None):
    """All stages of the full recipe; both ranks die, as by SIGKILL, in the middle of the stage `kill`."""
    marker, note, save = out / "dead", chain.Note.log, chain.Stage.save

    def die() -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def follow() -> None:
        while not marker.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def log(self, step, steps, **metrics) -> None:
        note(self, step, steps, **metrics)
        if self.name == kill and step == min(3, steps):
            die()

    def saved(self, *args) -> None:
        save(self, *args)
        if self.name == kill and kill in ("eval", "measure"):
            die()

    def fresh(function, *args, progress):
        return die() if kill == "decode" else function(*args, progress=progress)

    if kill and current().group("all").rank:
        threading.Thread(target=follow, daemon=True).start()
    with (
        mock.patch.object(chain.Note, "log", log),
        mock.patch.object(chain.Stage, "save", saved),
        mock.patch.object(chain, "in_fresh_process", fresh),
    ):
        config = full_settings.settings(told["technique"], "gloo", told["config"])
        if told["technique"] == "cpt-rl":
            budget_ladder.play(out, config, told["ranks"], config.seed // 1000)
        elif told["technique"] == "cpt":
            full_rank.train(out, told, config, current().group("all").rank)
        else:
            chain.play(out, config, told["ranks"])


def read_back(config, folder, step=None, dtype=torch.float32):
    """The weights in a checkpoint, whole."""
    model = network.Transformer(config).to(dtype)
    shelf = Checkpoints(folder)
    meta = shelf.load(checkpoint.state(model), step)
    return meta["step"], dict(sharding.wholes(model))


def through_a_folder(path, out, dtype):
    """A Hugging Face folder read, its weights whole, and written again."""
    model = network.load_hf(path, dtype)
    network.save_hf(model, out, max_shard_bytes=20_000)
    return dict(sharding.wholes(model))


def grown(call):
    """What a call returns, and by how many bytes this process grows meanwhile, at its peak."""
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    found = call()
    return found, resident("VmHWM") - before


def big_folder(path, out, shard):
    """A Hugging Face folder read and written again: bytes of this rank's part of the network, and by how much the
    process grows beyond it."""
    model, read = grown(lambda: network.load_hf(path, torch.float32))
    mine = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    _, written = grown(lambda: network.save_hf(model, out, max_shard_bytes=shard))
    return [tuple(map(int, one)) for one in torch.stack(gathered(torch.tensor([mine, read - mine, written])))]


def drawn(config, seed):
    """The weights that a seed gives."""
    torch.manual_seed(seed)
    return dict(sharding.wholes(network.Transformer(config)))


def traffic(config, state, ids, lora=0):
    """Activations kept, and made again: what each rank sends in a forward and a backward pass, by collective, and how
    many rows it dispatched and received, by layer. `lora`: rank of adapters, which are trained alone then."""
    model = with_adapters(config, lora) if lora else given(config, state).float()
    ep, E = current().group("ep"), config.num_experts
    found = []
    for remake in (False, True):
        with computing(rematerialise=remake), Traffic() as counted:
            out = model(cut(ids))
            out.logits.square().sum().backward()
        rows = []
        for picks in out.experts:
            to = picks.flatten() // (E // ep.size)
            load = to.bincount(minlength=ep.size)
            coming = torch.stack(gathered(load, "ep"))[:, ep.rank]
            rows.append((int(load.sum() - load[ep.rank]), int(coming.sum() - coming[ep.rank])))
        every = [None] * current().layout.world
        torch.distributed.all_gather_object(every, (remake, counted.bytes_sent, rows))
        found += every
    return found


def with_adapters(config, lora):
    """A network with adapters of this rank, which hold some numbers; without any for 0."""
    model = network.Transformer(config, lora=lora)
    for name, p in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(p.data, std=0.1)
    return model


def held(config):
    """Parameters on each rank."""
    model = network.Transformer(config)
    mine = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return [int(n) for n in gathered(torch.tensor([mine]))]


def kept(config, ids, remake, doc=None, lora=0):
    """Bytes on each rank at the peak of a step: weights, gradients, moments; what autograd keeps from the forward pass;
    and by how much the process grows during both passes. `lora`: rank of adapters, which are trained alone then."""
    model = with_adapters(config, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    seen: dict[int, int] = {}

    def pack(x):
        # FSDP frees whole weights after a block, and gets them again: they are not kept.
        if not isinstance(x, torch.nn.Parameter):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    alive: list = []

    def passes():
        with computing(rematerialise=remake), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(cut(ids), doc=None if doc is None else cut(doc), logits=False)
        total(out.hidden.square().sum()).backward()

    _, more = grown(passes)
    optimizer.step()
    state = [
        x
        for p in model.parameters()
        for x in (p, *([p.grad] if p.requires_grad else []), *(v for v in optimizer.state[p].values() if v.ndim))
    ]
    local = sum((x.to_local() if isinstance(x, DTensor) else x).numel() * 4 for x in state)
    return [tuple(map(int, one)) for one in torch.cat(gathered(torch.tensor([[local, sum(seen.values()), more]])))]


def resident(what):
    """Bytes of memory of this process: now (VmRSS) or at its peak (VmHWM)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return 1024 * int(line.split()[1])


def quantised(x, gates, w13, w2, experts, up, forward, backward):
    """Values and gradients of the quantised mixture; the weights' gradients whole, added up over the ranks that share
    them."""
    ep = current().group("ep")
    mine, mine_gates = cut_rows(x).requires_grad_(), cut_rows(gates).requires_grad_()
    a, b = (w.chunk(ep.size)[ep.rank].clone().requires_grad_() for w in (w13, w2))
    y = quant.experts_swiglu(mine, mine_gates, a, b, cut_rows(experts), forward, backward)
    total((y * up).sum()).backward()
    weights = [torch.cat(gathered(all_reduce_sum(w.grad, "efsdp"), "ep")) for w in (a, b)]
    return [torch.cat(gathered(part.detach())) for part in (y, mine.grad, mine_gates.grad)], weights


def of_the_first(x, gates, w13, w2, experts, how):
    """The mixture where rank 0 has every token, dispatched and combined as told: values and gradients."""
    ep, first = current().group("ep"), current().group("all").rank == 0
    mine, mine_gates, chosen = (t.clone() if first else t[:0] for t in (x, gates, experts))
    mine.requires_grad_(), mine_gates.requires_grad_()
    a, b = (w.chunk(ep.size)[ep.rank].clone().requires_grad_() for w in (w13, w2))
    with computing(dispatch=how[0], combine=how[1]):
        y = on_owners(
            mine, mine_gates, chosen, len(w13), lambda rows, ones, local: experts_swiglu(rows, ones, a, b, local)
        )
        total((y * torch.linspace(-1, 1, y.shape[1])).sum()).backward()
    weights = [torch.cat(gathered(all_reduce_sum(w.grad, "efsdp"), "ep")) for w in (a, b)]
    return [torch.cat(gathered(part.detach())) for part in (y, mine.grad, mine_gates.grad)] + weights


def of_interpreted_kernels(x, gates, w13, w2, experts, dispatch):
    """This rank's experts in MXFP8 by kernels, on rows dispatched as told: values, gradients, and which kernels were
    asked, in rank order."""
    ep, dp = current().group("ep"), current().group("all")
    asked = []
    with mock.patch.object(engine, "INTERPRETED", True):
        own, rows = engine.kernel("experts"), engine.kernel("expert_rows")

        def watched(module, name):
            real = getattr(module, name)
            return mock.patch.object(module, name, lambda *a, **k: asked.append(name) or real(*a, **k))

        mine = [t.chunk(dp.size)[dp.rank].clone() for t in (x, gates, experts)]
        mine[0].requires_grad_(), mine[1].requires_grad_()
        a, b = (w.chunk(ep.size)[ep.rank].clone().requires_grad_() for w in (w13, w2))
        names = [
            (own, "experts_swiglu"),
            (own, "received_swiglu"),
            (rows, "sort_by_expert"),
            (rows, "permute"),
            (rows, "unpermute"),
        ]
        with computing(dispatch=dispatch), contextlib.ExitStack() as watch:
            for module, name in names:
                watch.enter_context(watched(module, name))
            y = quant.experts_swiglu(mine[0], mine[1], a, b, mine[2], "mxfp8", "mxfp8")
            total((y * torch.linspace(-1, 1, y.shape[1])).sum()).backward()
    weights = [torch.cat(gathered(w.grad, "ep")) for w in (a, b)]
    return [torch.cat(gathered(part.detach())) for part in (y, mine[0].grad, mine[1].grad)] + weights, sorted(
        set(asked)
    )


def waits_of_the_host(x, gates, experts, num_experts):
    """How often the dispatch asks for numbers, and the operations among its own for which a GPU makes the host wait."""
    asked, seen, tolist = [], [], torch.Tensor.tolist

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name, known = str(function), kwargs or {}
            if any(word in name for word in ("bincount", "_local_scalar", "nonzero", "unique")):
                seen.append(name)
            if "repeat_interleave" in name and known.get("output_size") is None:
                seen.append(name)
            return function(*args, **known)

    with mock.patch.object(torch.Tensor, "tolist", lambda self: asked.append(1) or tolist(self)), Look():
        on_owners(x, gates, experts, num_experts, lambda rows, ones, local: rows)
    return len(asked), seen


def cut_rows(x):
    """Rows over all ranks."""
    group = current().group("all")
    return x.chunk(group.size)[group.rank].clone()


def training(technique, sets, folder):
    """A whole training on these ranks, as `etude run TECHNIQUE --scale full` has its own ranks play it."""
    c = full_settings.settings(technique, "gloo", {}, sets)
    if not isinstance(c, rl.Rl):
        return pretrain.train(technique, c, folder)
    tasks = CheckpointTasks(c)
    return reinforced(technique, c, folder, folder, tasks, tasks.language, tasks.limits, quiet, lambda line: None)


def prepared_rows(sets, folder, step):
    """The rows of a step of continued pretraining, put together from what each rank has of them."""
    c = full_settings.settings("cpt", "gloo", {}, sets)
    _, rows, held, _ = pretrain.data(
        c, folder, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    )
    model = ref_model.Transformer(Config.tiny(2, num_experts=0, intermediate_size=8))
    ids, doc = pretrain.batch_of(rows, step, model)
    return joined(ids), joined(doc), sorted(held.files)


def hung(folder, how):
    """What the watches say where rank 1 dawdles before a collective that the others wait in, or wait for somewhere
    else, or before it meets them."""
    heard: list[str] = []

    class Told(launch.Watchdog):
        GRACE = 1.0

        def exit_process(self, reason, say):
            heard.append(reason if say else "")

    with Told(folder, 1.0):
        all_reduce_sum(torch.ones(1))
        if torch.distributed.get_rank() == 1:
            dawdle(heard)
        if how == "meets":
            launch.meet()
        else:
            work = torch.distributed.all_reduce(torch.ones(1), async_op=how == "elsewhere")
            while how == "elsewhere" and not work.is_completed():
                time.sleep(0.01)
    return torch.distributed.get_rank(), heard


def hung_outside(where, checkpoint, corpus, folder):
    """The same where rank 1 dawdles outside the optimiser's loop: while held-out tasks are played, or a codebase is
    scored."""
    heard: list[str] = []

    class Told(launch.Watchdog):
        GRACE = 1.0

        def exit_process(self, reason, say):
            heard.append(reason if say else "")

    def late(function):
        def waits(*args, **kwargs):
            if torch.distributed.get_rank() == 1:
                dawdle(heard)
            return function(*args, **kwargs)

        return waits

    technique = "dr-grpo" if where == "heldout" else "cpt"
    more = ["heldout=2"] if where == "heldout" else [f"corpus={corpus}", "rows=2", "length=128", "perplexity_tokens=64"]
    c = full_settings.settings(technique, "gloo", {}, [f"checkpoint={checkpoint}", "timeout=1", *more])
    with (
        mock.patch.object(rl, "Watchdog", Told),
        mock.patch.object(pretrain, "Watchdog", Told),
        mock.patch.object(rl, "optimise", side_effect=InterruptedError),
        mock.patch.object(pretrain, "optimise", return_value={}),
        mock.patch.object(pretrain, "save_hf", side_effect=InterruptedError),
        mock.patch.object(pretrain.cpt, "codebase_nll", late(pretrain.cpt.codebase_nll)),
        contextlib.suppress(InterruptedError),
    ):
        if isinstance(c, rl.Rl):
            script = Script([chain_of(1), chain_of(1)], [0.0, 1.0])
            with mock.patch.object(rl, "sample_tasks", late(lambda *asked: script(*asked[6:]))):
                rl.train(technique, c, folder, script, script, Limits(self_summary.Chaining(20, 1, 0, join="none")))
        else:
            pretrain.train(technique, c, folder)
    return torch.distributed.get_rank(), heard


def dawdle(heard):
    while not heard:
        time.sleep(0.01)


def busy(seconds):
    """Computes for so many seconds of processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def idle(seconds):
    time.sleep(seconds)


def spoilt(x):
    """Ranks take turns to write into what each was sent."""
    group = current().group("cp")
    for rank in range(group.size):
        if rank == group.rank:
            x.sub_(x + 1)
        all_reduce_sum(torch.ones(1))
    return x


class Script:
    """Rollouts that went as written down: each rank gets its share. It stands for a sampler and for a task set. `lost`:
    numbers of those whose environment failed."""

    is_slow, tools = False, ()

    def __init__(self, chains, rewards, hints=None, lost=()):
        self.chains, self.rewards, self.told, self.asked, self.lost = (
            chains,
            rewards,
            hints or [[]] * len(chains),
            [],
            lost,
        )

    def __call__(self, stream, numbers, *what):
        self.asked += numbers
        mine = rl.share(len(self.chains)).tolist()
        return [self.rollout(n) for n in mine]

    def rollout(self, n):
        if n in self.lost:
            return Rollout(self.chains[n], failure="the sandbox is gone")
        return Rollout(
            self.chains[n], {"tests": float(self.rewards[n])}, {"success": float(n % 3 == 0)}, hints=self.told[n]
        )

    def transcript(self, rollout):
        return rollout.transcript

    def hints(self, rollouts, seed):
        return [one.hints for one in rollouts]

    def task(self, stream, number):
        return SimpleNamespace(key=f"{stream}-{number}")

    def environment(self, task, number):
        raise AssertionError("nothing is sampled")


def rl_step(settings, config, state, before, chains, rewards, hints=None, lost=()):
    """Figures and gradients of one RL step on conversations that are given, and which tasks all ranks asked for."""
    model, reference = given(config, state), given(config, before)
    sampler = Sampler(ref_model.Transformer(config), torch.float64)
    script = Script(chains, rewards, hints, lost)
    reference = reference if settings.rl.payment.kl else None
    figures = rl.sample_and_improve(settings, model, reference, script, script, partial(rl.fetch, sampler, model), 2)
    norm = sharding.clip(model, 0.0)
    # Whole weights have come to the sampler.
    arrived = all(torch.equal(p, state[name]) for name, p in sampler.model.named_parameters())
    return (
        figures | {"grad_norm": norm},
        gradients(model),
        torch.cat(gathered(torch.tensor(script.asked))).tolist(),
        arrived,
    )


def clipped(config, state, share):
    """The norm of a gradient, and the gradient before and after it is clipped to `share` of that."""
    model = given(config, state)
    ids = cut(torch.arange(64).view(4, 16) % config.vocab_size)
    total(model(ids).logits.sin().sum()).backward()
    before = {name: x.clone() for name, x in sharding.wholes(model, grad=True)}
    norm = sharding.clip(model, 0.0)
    assert sharding.clip(model, share * norm) == norm
    return norm, before, gradients(model)
