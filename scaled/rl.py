"""Reinforcement learning on many ranks: what `etude run dr-grpo --scale full` runs. kl, length-penalty, behaviour,
self-summary, router-replay, weight-sync and textual-feedback turn on one more part each; monitor, packing and all of
these are watched.

One step (Composer 2 technical report, §4.1, §6.1, §6.2):

    every rank  gathers the newest weights into its sampler and samples its share of G·N rollouts    `share`
    dp ranks    get all segments, balanced by attention's quadratic cost, and pack them in rows      `make_microbatches`
    cp ranks    take their two chunks of each row, with the experts that the sampler chose there
    all         drift from the reference → rewards → advantages over groups → a policy-gradient step `improve`
                (`rl.variant`: Dr. GRPO or another member of its family)
                a rollout whose environment failed is in no mean and no sum
    where hints are given: the same segments' teachers in rows of their own, without gradient,       `send_hinted`
                before that step
    where a monitor watches: what each group did, on all ranks together                              `watching.py`

Where this file departs from the report
1. Sampler and trainer take turns on the same ranks, so every step is on-policy.
2. The sampler is `ref.engine.sampler`: it needs memory for the complete network on every rank.
3. k1 is charged to the reward. The report uses k1 and does not say where (`ref/kl.py`).
4. Tasks of the small world always follow its mix; only small runs upsample harder ones
   (`recipe/small/reinforcement.py`). On packages a curriculum may climb levels of difficulty (`curriculum.py`).

The caller provides tasks, which make environments (`ref/environment.py`), and a chat format; nothing here depends on
what they say.

| symbol | here | shape |
|---|---|---|
| G, N | `prompts`, `rollouts` | rollout n of a step belongs to group n // N |
| r − β·KL | `rewards` | G·N over all ranks, in order of n |
| A | `advantages` | G·N, the same on every rank |
| w | `weights` | G·N, the same on every rank |
| this rank's tokens | `Batch` | micro_rows, T/cp |
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ref import rl as ref_rl
from ref.engine.continuous import make_sampler
from ref.engine.sampler import Sampler
from ref.environment import ChatFormat, EnvironmentFailure, TaskSet
from ref.network import Output, load_extra, release
from ref.network import fast as ref
from ref.rl import Curriculum, Settings, score_rollouts
from ref.rollout import (
    Limits,
    MapFunction,
    Rollout,
    check_failures,
    common_names,
    hash_seed,
    map_in_order,
    sample_rollouts,
)
from ref.textual_feedback import Hinted, hinted
from ref.weight_sync import parts as whole_parts
from scaled import muon, weight_sync
from scaled.curriculum import FollowedCurriculum
from scaled.dr_grpo import group_advantages, policy_loss
from scaled.kl import token_kl
from scaled.network.adapters import save_adapter
from scaled.network.model import Transformer, load_hf, save_hf
from scaled.optimise import CPU, Log, Ranks, make_card_facts, optimise, training_context
from scaled.packing import Cost, balance, imbalance, lay, rows
from scaled.router_replay import compare_experts, mismatch, replay
from scaled.runtime import sharding
from scaled.runtime.comm import all_reduce_max, all_reduce_sum, gathered
from scaled.runtime.cut import ahead, places
from scaled.runtime.exchange import exchange
from scaled.runtime.launch import Watchdog, meet, stay_alive
from scaled.runtime.mesh import current
from scaled.runtime.step_times import count, part
from scaled.runtime.store import open_store
from scaled.textual_feedback import compute_teacher_states, head_loss, pack_hinted, predictions, select_range
from scaled.watching import Look, Watcher, shortened, watching

__all__ = ["Batch", "Rl", "Show", "Step", "make_microbatches", "improve", "sample_and_improve", "share", "train"]

Show = Callable[[int, Sequence[Rollout], Sequence[float]], None]
"""(step, counted from 0; rank 0's rollouts of the step's first group; their rewards after the KL penalty): for people
who watch."""


@dataclass(frozen=True)
class Rl(Ranks):
    """RL on a cluster; the layout is the report's for RL (§6.1), CP 8 and EP 8."""

    cp: int = 8
    """Ranks that split the tokens of each row."""
    rl: Settings = field(
        default_factory=lambda: Settings(
            steps=1000, prompts=64, rollouts=16, lr=1e-6, warmup=20, decay=200, max_len=32_768, budget_tokens=4096
        )
    )
    """What small runs are told as well."""
    join: Literal["self", "none"] = "none"
    """How contexts are joined: by self-summaries, or not at all, which leaves a single context."""
    micro_rows: int = 1
    """Rows per dp rank in one forward pass."""
    sampler_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the sampler's copy of the weights."""
    engine: Literal["lockstep", "continuous"] = "lockstep"
    """How rollouts are sampled: all at one position, in waves (`ref/engine/sampler.py`), or each where it is, and the
    next one as soon as a slot is free (`ref/engine/continuous.py`)."""
    slots: int = 32
    """Rollouts that a continuous engine samples at once, at most."""
    sync: str = ""
    """Store to which the weights of every step are published, and from which every sampler reads them: a folder, or an
    address of fsspec such as s3://bucket/run. A relative folder lies in that of the run. Empty: samplers gather the
    weights from the ranks."""
    heldout: int = 128
    """Held-out tasks for the evaluation before and after training; 0 skips it."""
    max_failed_share: float = 0.2
    """Share of a step's rollouts whose environments may fail; the run stops where more do."""

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "micro_rows", "slots")
        self.at_least(0, "heldout")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share must lie between 0 and 1, got {self.max_failed_share}")
        if self.rl.steps < 1:
            raise ValueError(f"rl.steps must be at least 1, got {self.rl.steps}")
        if self.rl.shuffle_rewards or self.rl.micro_tokens:
            raise ValueError(
                "rl.shuffle_rewards and rl.micro_tokens are for small runs; micro_rows and length say "
                "how large a micro-batch is"
            )
        if self.rl.max_len > self.length:
            raise ValueError(f"length must hold a context of rl.max_len = {self.rl.max_len} tokens, got {self.length}")

    @classmethod
    def rehearsal(cls) -> "Rl":
        """The same on CPUs, in the small world."""
        rl_settings = Settings(steps=20, warmup=2, decay=4)
        return cls(
            **CPU, rl=rl_settings, length=256, micro_rows=32, heldout=64, checkpoint="runs/small/checkpoints/sft"
        )

    @property
    def schedule(self) -> Settings:
        return self.rl

    def limits(self, limits: Limits) -> Limits:
        """The caller's limits, and those of the settings."""
        return replace(
            limits,
            turn_tokens=self.rl.turn_tokens or limits.turn_tokens,
            tokens=self.rl.episode_tokens or limits.tokens,
        )

    def optimizers(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return muon.optimizers(model, 0.0, self.rl.lr, use_muon=False)

    def check(self, dp: int) -> None:
        ranks = dp * self.cp
        for name, n in (
            ("rl.prompts · rl.rollouts", self.rl.prompts * self.rl.rollouts),
            ("heldout", self.heldout or ranks),
        ):
            if n < ranks:
                raise ValueError(
                    f"{name} must be at least the number of ranks, {ranks}, to give each rank a conversation; got {n}"
                )


@dataclass
class Batch:
    """Rows for one forward pass; this rank's tokens, [B, T/cp]."""

    ids: Tensor
    doc: Tensor
    """Number of the segment; −1 for padding."""
    target: Tensor
    """The next token."""
    keep: Tensor
    """Whether the policy chose the next token."""
    behavior: Tensor
    """Its log-prob under the sampler, nats."""
    conversation: Tensor
    """Its conversation n."""
    experts: Tensor | None
    """[B, T/cp, L, K] experts that the sampler chose; −1 where it did not run. None for a dense network."""
    hinted_tokens: Hinted
    """The tokens that hints correct, in all chunks of these rows; their teacher's positions are those in `Teachers`."""


@dataclass
class Teachers:
    """What this dp rank's teachers read, in packed rows."""

    positions: Hinted
    """Its tokens, and for every corrected token its position there and in the student's rows."""
    doc: Tensor
    """[R, U] number of the segment; −1 for padding."""


@dataclass
class Step(ref_rl.Step):
    """Results of a step: `gradients` and `gap` are this rank's parts, everything else covers all ranks."""

    mismatch: dict[str, float] = field(default_factory=dict)
    """Median and 99th percentile of |log π − log μ| over the policy's own tokens, nats."""
    load: float = 1.0
    """The highest work of a dp rank over the mean."""
    differs: float | None = None
    """Share of the experts that the training pass used but the sampler did not; None for a dense network."""


def train(
    technique: str,
    c: Rl,
    folder: str | Path,
    tasks: TaskSet,
    chat_format: ChatFormat,
    limits: Limits,
    *,
    curriculum: Curriculum | None = None,
    log: Log = lambda *_, **__: None,
    watcher: Watcher | None = None,
    show: Show | None = None,
    map_fn: MapFunction = map_in_order,
) -> dict[str, float]:
    """The complete training on this rank; `log(step, steps, **metrics)` and `show` are called on rank 0. `curriculum`
    chooses the tasks (None: those of the stream "rl" in order). `watcher` is told what the rollouts of every step did.
    `map_fn`: see `ref.rl.train`; rollouts are sampled by it. Returns the metrics of the last step, the alarms among
    them as their number, and success on held-out tasks before and after. FOLDER/checkpoints/final holds the final
    network, and with `rl.lora` final-adapter the adapter beside it; other files: `scaled/optimise.py`,
    `scaled/watching.py`, `scaled/curriculum.py`."""
    folder, rank = Path(folder), dist.get_rank()
    assert c.checkpoint is not None, "RL starts from a policy"
    with training_context(c, folder, rank):
        model = load_hf(c.checkpoint, lora=c.rl.lora, seed=c.seed)
        reference = load_hf(c.checkpoint) if c.rl.payment.kl else None
        with torch.device("meta"):  # no memory is allocated before the dtype is known: `fetch` fills it
            sampler = make_sampler(c.engine, ref.Transformer(model.config), getattr(torch, c.sampler_dtype), c.slots)
        sampler.model.to_empty(device=current().device)
        metrics, limits = {}, c.limits(limits)
        sample = partial(sample_tasks, c, sampler, tasks, chat_format, limits, map_fn)
        if c.heldout:
            with Watchdog(folder / "ranks", c.timeout):
                metrics["heldout_before"] = heldout(c, reference or model, sampler, sample)
        load = synced(c, folder, sampler, model) if c.sync else partial(fetch, sampler, model)
        look = watching(watcher, folder, c.rl.prompts, c.rl.rollouts) if watcher else None
        show = show if rank == 0 else None
        followed = None if curriculum is None else FollowedCurriculum(curriculum, folder, c.rl.prompts, c.rl.rollouts)
        gradients = partial(
            sample_and_improve, c, model, reference, sample, tasks, load, curriculum=followed, look=look, show=show
        )
        metrics |= shortened(optimise(c, folder, technique, model, gradients, log))
        if c.heldout:
            with Watchdog(folder / "ranks", c.timeout):
                metrics["heldout_after"] = heldout(c, model, sampler, sample)
        extra = load_extra(c.checkpoint) or None  # draft layers go along unchanged
        card = release.make_model_card(
            f"etude {technique}",
            f"An agent after reinforcement learning ({c.rl.algorithm}).",
            model.config,
            make_card_facts(technique, c, metrics),
            opening="what the environment says first",
            drafts=extra is not None,
        )
        final = folder / "checkpoints" / "final"
        sidecar_files = release.make_sidecar_files(c.checkpoint, model.config, card)
        save_hf(model, final, extra=extra, sidecar_files=sidecar_files)
        save_adapter(model, final, c.checkpoint, "the policy before RL")
        return metrics


def sample_tasks(
    c: Rl,
    sampler: Sampler,
    tasks: TaskSet,
    chat_format: ChatFormat,
    limits: Limits,
    map_fn: MapFunction,
    stream: str,
    numbers: Sequence[int],
    *generator_names: object,
    curriculum_tasks: Sequence[Any] | None = None,
) -> list[Rollout]:
    """This rank's rollouts of tasks, given by number in a stream, or of those that a curriculum has chosen;
    `generator_names` names the generator. With slow environments ranks take unequal times: this one returns once all
    have sampled."""
    stream_tasks = [tasks.task(stream, number) for number in numbers] if curriculum_tasks is None else curriculum_tasks
    draws = generator(c.seed, stream, *generator_names)
    with part("sample"):
        rollouts = sample_rollouts(
            sampler,
            tasks.environment,
            stream_tasks,
            1,
            chat_format,
            limits,
            c.rl.temperature,
            draws,
            map_fn,
            tasks.is_slow,
            lambda _: stay_alive(),
        )
    with part("wait"):
        if tasks.is_slow:
            meet()
        elif dist.get_world_size() > 1:
            dist.barrier()
    return rollouts


def sample_and_improve(
    c: Rl,
    model: Transformer,
    reference: Transformer | None,
    sample: Callable[..., list[Rollout]],
    tasks: TaskSet,
    load: Callable[[int], dict[str, float]],
    step: int,
    curriculum: FollowedCurriculum | None = None,
    look: Look | None = None,
    show: Show | None = None,
) -> dict[str, float]:
    """Samples the rollouts of a step, leaves their policy gradient in `model`, and returns the metrics of the step.
    load(step) gives the sampler its weights, and returns metrics; `sample(stream, numbers, step)` gives rollouts, of
    the tasks that `curriculum` chooses, if there is one. `look` watches them, and `show` shows some."""
    numbers = share(c.rl.prompts * c.rl.rollouts).tolist()
    sync_metrics = load(step)
    task_numbers = [step * c.rl.prompts + n // c.rl.rollouts for n in numbers]
    step_tasks = None if curriculum is None else curriculum.choose(step)
    assigned = {} if step_tasks is None else {"curriculum_tasks": [step_tasks[n // c.rl.rollouts] for n in numbers]}
    rollouts = sample("rl", task_numbers, step, **assigned)
    num_failed = count_failed(c, rollouts)
    curriculum_metrics = {} if curriculum is None else curriculum.update(step, step_tasks or (), rollouts)
    score_rollouts(c.rl, tasks, rollouts, hash_seed(c.seed, "hints", step))
    result = improve(c, model, reference, rollouts)
    if show:
        first_group = [rollout for number, rollout in zip(numbers, rollouts, strict=True) if number < c.rl.rollouts]
        show(step, first_group, result.rewards[: len(first_group)].tolist())
    metrics = {"loss": result.loss, "reward": result.rewards.nanmean().item()} | means(rollouts)
    metrics |= {
        "drift": result.drift.nanmean().item(),
        "engine_kl": result.engine.nanmean().item(),
        "imbalance": result.load,
    }
    metrics |= (
        sync_metrics
        | curriculum_metrics
        | {"mismatch": result.mismatch["p50"], "mismatch_p99": result.mismatch["p99"], "tokens": float(result.tokens)}
    )
    metrics |= (
        {} if result.divergence is None else {"distilled": float(result.distilled), "divergence": result.divergence}
    )
    metrics |= {} if result.differs is None else {"routing_differs": result.differs}
    metrics |= {"failed": float(num_failed)}
    return metrics | (look(step, numbers, rollouts) if look else {})


def count_failed(c: Rl, rollouts: Sequence[Rollout]) -> int:
    """How many of the step's rollouts failed, on all ranks; `rollouts` are this rank's. Raises EnvironmentFailure, on
    all of them, where they are more than a share of `max_failed_share`."""
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    total = c.rl.prompts * c.rl.rollouts
    num_failed = int(all_reduce_sum(torch.tensor(len(failures), device=current().device)))
    if num_failed > c.max_failed_share * total:
        reasons: list = [failures[:1]]
        if (group := current().group("all")).size > 1:
            reasons *= group.size
            dist.all_gather_object(reasons, failures[:1])
        check_failures(num_failed, total, c.max_failed_share, sum(reasons, [])[0])
    return num_failed


def improve(c: Rl, model: Transformer, reference: Transformer | None, rollouts: Sequence[Rollout]) -> Step:
    """`ref.rl.improve` for the rollouts of all ranks; `rollouts` are this rank's (`share`). The gradient is in `model`,
    too."""
    G, N, device = c.rl.prompts, c.rl.rollouts, current().device
    numbers, failed = share(G * N), [bool(rollout.failure) for rollout in rollouts]
    # A dp rank has the rollouts of its cp ranks; other dp ranks have the rest of their groups.
    dp_numbers, dp_failed = (torch.cat(gathered(x.to(device), "cp")) for x in (numbers, torch.tensor(failed)))
    kept_numbers = dp_numbers[~dp_failed]
    num_left = int(all_reduce_sum(torch.tensor(len(kept_numbers), device=device), "dp"))
    if not num_left:
        raise EnvironmentFailure(f"no rollout of this step is left to train on: {rollouts[0].failure}")
    valid_rollouts = [rollout for rollout, has_failed in zip(rollouts, failed, strict=True) if not has_failed]
    valid_numbers = numbers[~torch.tensor(failed)]
    count(model, torch.tensor([len(s.tokens) for rollout in valid_rollouts for s in rollout.chain.segments]))
    batches, teachers, load = make_microbatches(c, model, valid_rollouts, valid_numbers)

    # Policy and reference compute in the same way, with their own experts: differences in the sampler are not drift.
    drift, engine = torch.zeros(2, G * N, dtype=torch.float64, device=device).unbind()
    if reference is not None:
        with torch.no_grad():
            for batch in batches:
                policy_logp, reference_logp = (
                    own_logp(network, batch, None, c.rl.temperature)[0] for network in (model, reference)
                )
                # k1 = −log r (ref/kl.py), summed over the tokens of each rollout.
                for sums, terms in (
                    (drift, token_kl(policy_logp, reference_logp, "k1")),
                    (engine, batch.behavior - policy_logp),
                ):
                    sums.index_add_(0, batch.conversation[batch.keep], terms[batch.keep].double())
        drift, engine = all_reduce_sum(torch.stack((drift, engine))).unbind()  # all rollouts', on every rank
    is_failed = torch.ones(G * N, dtype=torch.bool, device=device).index_fill(
        0, torch.cat(gathered(kept_numbers, "dp")), False
    )
    local_rewards = torch.tensor([rollout.reward for rollout in valid_rollouts], dtype=torch.float64, device=device)
    # r − β·KL (table above).
    rewards = torch.cat(gathered(local_rewards, "cp")) - c.rl.payment.kl * drift[kept_numbers]
    order = torch.cat(gathered(kept_numbers, "dp"))

    def scatter(values: Tensor, fill_value: float) -> Tensor:
        return values.new_full((G * N,), fill_value).index_copy(0, order, torch.cat(gathered(values, "dp")))

    objective = c.rl.objective  # a row of the table in ref/dr_grpo.py
    # Eq. 1 (ref/dr_grpo.py): A, over the rollouts of all ranks.
    relative = group_advantages(rewards, baseline=objective.baseline, scale=objective.scale, groups=kept_numbers // N)
    advantages = scatter(relative, 0.0)
    # Eq. 3: the weight w of each token of a rollout, and the budget, from the lengths of all rollouts.
    chains, totals = [rollout.chain for rollout in valid_rollouts], torch.zeros(2, G * N, dtype=torch.long)
    totals[0, valid_numbers] = torch.tensor([chain.num_sampled_tokens for chain in chains], dtype=torch.long)
    totals[1, valid_numbers] = torch.tensor([chain.finished for chain in chains], dtype=torch.long)
    lengths, is_finished = all_reduce_sum(totals.to(device)).unbind()
    weights = objective.token_weights(lengths, is_finished > 0)
    policy_budget = objective.budget(num_left, int(lengths.sum()), c.rl.budget_tokens)
    mean_log_ratio = None
    if objective.ratio == "sequence":  # log ρ of entire rollouts, whose tokens lie on several ranks
        log_ratio_sums = torch.zeros(G * N, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in batches:
                log_ratio = own_logp(model, batch, routing(c, batch), c.rl.temperature)[0] - batch.behavior
                log_ratio_sums.index_add_(0, batch.conversation[batch.keep], log_ratio[batch.keep].double())
        mean_log_ratio = all_reduce_sum(log_ratio_sums) / lengths.clamp(min=1)

    total, divergence_sum, budget, pairs, routed_pairs = 0.0, 0.0, float(num_left * c.rl.budget_tokens), [], []
    teacher_states = (
        None if teachers is None else compute_teacher_states(model, teachers.positions, teachers.doc, c.micro_rows)
    )
    for batch in batches:
        logp, out = own_logp(model, batch, routing(c, batch), c.rl.temperature)
        current_logp, behavior_logp = logp, batch.behavior
        if mean_log_ratio is not None:  # GSPO-token: the value of the rollout's log ρ, with the gradient of this token
            current_logp = logp - logp.detach() + mean_log_ratio[batch.conversation]
            behavior_logp = torch.zeros_like(logp)
        # Eq. 3 (ref/dr_grpo.py). A packed row holds tokens of several rollouts, so each token is passed as its own row.
        loss = policy_loss(
            current_logp.reshape(-1, 1),
            behavior_logp.reshape(-1, 1),
            advantages[batch.conversation.flatten()],
            (batch.keep * weights[batch.conversation]).reshape(-1, 1),
            budget=policy_budget,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
        )
        total += loss.item()
        if teachers is not None and teacher_states is not None:
            pair = predictions(
                out.hidden.flatten(0, 1), teacher_states, batch.hinted_tokens, rows=(len(batch.ids), len(teachers.doc))
            )
            student, teacher = (x / c.rl.temperature for x in pair)
            ones = torch.ones(len(student), device=device)
            # Eq. 1 (ref/textual_feedback.py).
            feedback_term = head_loss(model, student, teacher, ones, budget=budget, kind=c.rl.feedback.divergence)
            loss, divergence_sum = loss + c.rl.feedback.weight * feedback_term, divergence_sum + feedback_term.item()
        loss.backward()
        pairs.append((logp.detach(), batch.behavior, batch.keep))
        if batch.experts is not None:
            is_routed = batch.experts.flatten(0, 1)[:, 0, 0] >= 0
            routed_pairs.append((torch.stack(out.experts, 1)[is_routed], batch.experts.flatten(0, 1)[is_routed]))
    logp, behavior, keep = (torch.cat([x.flatten() for x in column]) for column in zip(*pairs, strict=True))
    differs = None
    if routed_pairs:
        trained_experts, sampled_experts = (torch.cat(x).unbind(1) for x in zip(*routed_pairs, strict=True))
        differs = compare_experts(trained_experts, sampled_experts)["decisions"]
    tokens, sampled_logp = all_reduce_sum(torch.stack((keep.sum().double(), behavior[keep].sum().double()))).tolist()
    num_distilled = (
        0
        if teachers is None
        else int(all_reduce_sum(torch.tensor([len(teachers.positions.student)], device=device), "dp"))
    )
    return Step(
        loss=total,
        gradients=[p.grad for p in model.parameters()],
        rewards=scatter(rewards, math.nan),
        drift=drift.masked_fill(is_failed, math.nan),
        engine=engine.masked_fill(is_failed, math.nan),
        gap=(logp - behavior)[keep],
        tokens=int(tokens),
        nll=-sampled_logp / tokens,
        mismatch=mismatch(logp, behavior, keep),
        load=load,
        differs=differs,
        distilled=num_distilled,
        divergence=divergence_sum * budget / num_distilled if num_distilled else None,
    )


def share(n: int) -> Tensor:
    """This rank's numbers below n: equal consecutive ranges, in order of ranks."""
    group = current().group("all")
    return torch.arange(n).tensor_split(group.size)[group.rank]


def generator(seed: int, *names: object) -> torch.Generator:
    """This rank's generator for one step, on the CPU; it depends only on seed, step and rank, so a resumed run
    repeats it."""
    name = "-".join(map(str, (seed, *names, current().group("all").rank)))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


def fetch(sampler: Sampler, model: Transformer, version: int) -> dict[str, float]:
    """Gathers the newest weights into this rank's sampler; all ranks call it together. It has no metrics."""
    with torch.no_grad():
        for (_, weight), sampler_weight in zip(sharding.wholes(model), sampler.model.parameters(), strict=True):
            sampler_weight.copy_(weight)
    sampler.version = version
    return {}


def synced(c: Rl, folder: Path, sampler: Sampler, model: Transformer) -> Callable[[int], dict[str, float]]:
    """A function that publishes a version to the store of the run, and loads it into this rank's sampler from there;
    all ranks call it together. The sampler's weights are then those that any engine beside the store has: rounded to
    bfloat16. `sync_bytes` is the size of what was read: a difference, but for the first version after a start and every
    25th."""
    writer = weight_sync.Writer(store := open_store(c.sync if "://" in c.sync else str(folder / c.sync)))
    reader = weight_sync.Reader(store, whole_parts(sampler.model), "samplers")

    def load(version: int) -> dict[str, float]:
        manifest = writer.publish(version, weight_sync.parts(model))
        reader.fetch(version)
        sampler.version = reader.swap() or 0
        sizes = {link["base"]: sum(shard["bytes"] for shard in link["shards"]) for link in manifest["links"]}
        weight_sync.prune(store)
        return {"sync_bytes": float(sizes.get(version - 1, sizes.get(None, 0)))}

    return load


def make_microbatches(
    c: Rl, model: Transformer, rollouts: Sequence[Rollout], numbers: Tensor
) -> tuple[list[Batch], Teachers | None, float]:
    """Assigns the rollouts of all ranks to dp ranks by cost and packs them in rows. Returns this rank's tokens, in the
    same number of batches as every other rank; what its teachers read, or None if `rl.feedback` gives no hints; and the
    highest load of a rank over the mean."""
    device, config = current().device, model.config
    dp = current().group("dp").size
    segments = [(n, s) for n, p in zip(numbers.tolist(), rollouts, strict=True) for s in p.chain.segments]
    precision = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    shapes = {
        "behavior": ((), precision),
        "experts": ((config.num_hidden_layers, config.num_experts_per_tok), torch.int32),
    }
    columns = {
        "ids": [s.tokens for _, s in segments],
        "sampled": [s.sampled.long() for _, s in segments],
        "behavior": [s.logp.to(precision) for _, s in segments],
        "conversation": [torch.full_like(s.tokens, n) for n, s in segments],
    }
    if config.num_experts:
        # The last token of a context predicts nothing and was not routed.
        columns["experts"] = [
            torch.nn.functional.pad(s.experts.int(), (0, 0, 0, 0, 0, 1), value=-1) for _, s in segments
        ]
    sizes = torch.cat(
        gathered(torch.tensor([len(s.tokens) for _, s in segments], dtype=torch.long, device=device), "cp")
    )
    costs = Cost.of(config)(sizes)
    rank_of = balance(costs, dp)
    local_columns = {}
    for name, column in columns.items():
        dp_column = torch.cat(gathered(concat_column(column, *shapes.get(name, ((), torch.long))).to(device), "cp"))
        local_columns[name] = exchange(list(dp_column.split(sizes.tolist())), rank_of)
    sizes = torch.tensor([len(x) for x in local_columns["ids"]], dtype=torch.long)
    row, start = rows(sizes, c.length)
    # Where fewer segments are left than ranks, a rank has none: its rows are padding.
    R = int(all_reduce_max((row.max() + 1 if len(row) else torch.tensor(0)).to(device), "dp"))
    shape = (-(-R // c.micro_rows) * c.micro_rows, c.length)
    local_columns["doc"] = [torch.full((int(T),), i, device=device) for i, T in enumerate(sizes)]
    empty = {"doc": -1, "experts": -1}
    packed_columns = {}
    for name, column in local_columns.items():
        trailing_shape, dtype = shapes.get(name, ((), torch.long))
        padding = torch.full((*shape, *trailing_shape), empty.get(name, 0), dtype=dtype)
        packed_columns[name] = (lay(column, row, start, shape, empty.get(name, 0)) if column else padding).to(device)
    teachers = send_hinted(c, rollouts, rank_of, row * c.length + start) if c.rl.feedback.weight else None
    hinted_positions = empty_hint() if teachers is None else teachers.positions
    # Rows already belong to this dp rank: only split their tokens.
    cp_positions, batches = places(c.length).to(device), []
    for first in range(0, shape[0], c.micro_rows):
        part = {name: x[first : first + c.micro_rows, cp_positions] for name, x in packed_columns.items()}
        batches.append(
            Batch(
                part["ids"],
                part["doc"],
                ahead(part["ids"]),
                ahead(part["sampled"]) > 0,
                ahead(part["behavior"]),
                part["conversation"],
                part.get("experts"),
                select_range(hinted_positions, first * c.length, (first + c.micro_rows) * c.length),
            )
        )
    return batches, teachers, imbalance(costs, rank_of, dp)


def concat_column(column: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A column in one tensor. A rank whose environments have all failed has an empty one, of this shape and dtype."""
    return torch.cat([*column]) if column else torch.zeros(0, *shape, dtype=dtype)


def empty_hint() -> Hinted:
    """What the teacher of a segment without a hint reads."""
    return Hinted(*torch.zeros(3, 0, dtype=torch.long).unbind())


def send_hinted(c: Rl, rollouts: Sequence[Rollout], rank_of: Tensor, starts: Tensor) -> Teachers:
    """Sends what the teachers of this rank's segments read to the dp ranks that train on them, and packs what comes.
    `starts`: where this dp rank's segments begin in their rows, flattened."""
    device, cp = current().device, current().group("cp").size
    hints = [
        hinted(s, p.hints[n]) if p.hints else empty_hint() for p in rollouts for n, s in enumerate(p.chain.segments)
    ]
    received_columns = []
    for name in ("tokens", "student", "teacher"):
        column = [getattr(hint, name).to(device) for hint in hints]
        # Where nothing is corrected, nothing is read.
        column = [x if len(hint.student) else x[:0] for x, hint in zip(column, hints, strict=True)]
        sizes = torch.cat(gathered(torch.tensor([len(x) for x in column], dtype=torch.long, device=device), "cp"))
        dp_column = torch.cat(gathered(concat_column(column, (), torch.long).to(device), "cp"))
        received_columns.append(exchange(list(dp_column.split(sizes.tolist())), rank_of))
    local_hints = [Hinted(*hint_fields) for hint_fields in zip(*received_columns, strict=True)]
    longest = int(
        all_reduce_max(torch.tensor(max((len(hint.tokens) for hint in local_hints), default=0), device=device), "dp")
    )
    positions, doc = pack_hinted(local_hints, starts, max(c.length, -(-longest // (2 * cp)) * 2 * cp))
    return Teachers(positions, doc)


def routing(c: Rl, batch: Batch) -> list | None:
    """The experts to use in the training pass, per layer."""
    if c.rl.replay == "none" or batch.experts is None:
        return None
    K = batch.experts.shape[-1]
    # Where the sampler did not run: K distinct experts; these positions have no gradient.
    experts = batch.experts.where(
        batch.experts >= 0, torch.arange(K, device=batch.experts.device, dtype=batch.experts.dtype)
    )
    layers = experts.long().flatten(0, 1).unbind(1)
    return (
        list(layers)
        if c.rl.replay == "plain"
        else [partial(replay, replayed=e, k=K, alpha=c.rl.replay_alpha) for e in layers]
    )


def own_logp(model: Transformer, batch: Batch, experts: list | None, temperature: float) -> tuple[Tensor, Output]:
    """Log-probs [B, T/cp] of the tokens that the policy chose, at the sampling temperature; zero elsewhere, where the
    head does not run. Also what else the forward pass gave."""
    out = model(batch.ids, doc=batch.doc, logits=False, experts=experts)
    own_positions = batch.keep.nonzero(as_tuple=True)
    logp = model.logprob(out.hidden[own_positions] / temperature, batch.target[own_positions])
    return logp.new_zeros(batch.keep.shape).index_put(own_positions, logp), out


def heldout(c: Rl, model: Transformer, sampler: Sampler, sample: Callable[..., list[Rollout]]) -> float:
    """Sampled success on held-out tasks, one rollout each."""
    fetch(sampler, model, 0)
    rollouts = sample("heldout", share(c.heldout).tolist())
    metrics = means(rollouts)
    if not metrics:
        raise EnvironmentFailure(
            f"no held-out rollout is left to evaluate: {rollouts[0].failure if rollouts else 'there are none'}"
        )
    return metrics["success"]


def mean_over_ranks(values: Sequence[float]) -> float:
    """The mean over all ranks' values."""
    local_sums = torch.tensor([sum(values), len(values)], dtype=torch.float64, device=current().device)
    sums = all_reduce_sum(local_sums)
    return (sums[0] / sums[1]).item()


def means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each metric over the rollouts of all ranks whose environment did not fail, and of their tokens and
    contexts. Empty if all failed. A metric that a rollout does not have, such as one of an earlier version's record, is
    left out."""
    logged_metrics = [rollout.logged for rollout in rollouts if not rollout.failure]
    names_by_rank: list = [sorted(common_names(logged_metrics)) if logged_metrics else None]
    if (group := current().group("all")).size > 1:
        names_by_rank *= group.size
        dist.all_gather_object(names_by_rank, names_by_rank[0])  # a rank may have nothing left
    names = common_names([dict.fromkeys(names) for names in names_by_rank if names is not None])
    return {name: mean_over_ranks([metrics[name] for metrics in logged_metrics]) for name in names}
