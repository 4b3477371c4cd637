"""The ledger: every statement of the sources that a measurement could support or contradict, whether it is tested here
or not.

The sources are the Composer 2 technical report (arXiv:2603.24477v2, §), the release of Composer 2.5, the posts on
self-summarisation, real-time RL and kernels, the training talk, and the papers that they follow. A statement lists the
claims and laws of `etude figure` that test it, as experiment/claim. A statement without a test gives the reason, and
what a test would need. A test checks that every measured claim belongs to a statement, and that every claim listed here
was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sims.experiment import is_law

__all__ = ["STATEMENTS", "Statement", "coverage", "open_statements"]


@dataclass(frozen=True)
class Statement:
    """One testable statement, paraphrased."""

    name: str
    section: str
    """Section of the source."""
    says: str
    tests: tuple[str, ...] = ()
    """Claims and laws that test it: experiment/claim."""
    reason: str = ""
    """Why it is not tested, and what a test would need."""


LAPTOP = "can be tested on a laptop; no experiment does so yet"
JUDGE = "needs a model that can judge code; the monitors here are rules"
GPU = "needs GPUs, where speed and formats can be measured"
CLUSTER = "needs models of the report's size on a cluster"
AGENT = "needs an agent that reasons and edits freely, in real coding environments"
PRODUCT = "was measured on the authors' own product, users or tasks, which are not public"


def _in(experiment: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{experiment}/{name}" for name in names)


PRETRAINING = (
    Statement(
        "log-linear",
        "§3.1, Fig. 2 right",
        "loss on the held-out codebase falls log-linearly in compute",
        _in("cpt-rl", "codebase-loss", "codebase-loss-along") + _in("cpt-real", "real-loss", "real-control"),
    ),
    Statement(
        "loss-foretells-reward",
        "§3.1, Fig. 2 left",
        "the lower the loss after SFT, the higher the reward after the same RL",
        _in("cpt-rl", "loss-success", "loss-reward"),
    ),
    Statement(
        "more-compute-more-reward",
        "§3.1, Fig. 2",
        "a larger pretraining budget ends in a higher RL reward",
        _in("cpt-rl", "budget-order"),
    ),
    Statement(
        "perplexity-foretells-reward",
        "§3.1, App. B",
        "codebase perplexity predicts the reward of RL",
        _in("cpt-rl", "perplexity-success", "perplexity-reward"),
    ),
    Statement(
        "mxfp8-trains", "§3.1", "continued pretraining in MXFP8 trains as in BF16", _in("low-precision", "mxfp8-trains")
    ),
    Statement(
        "benchmarks-foretell-less",
        "App. B",
        "agent benchmarks of a base model predict the result of RL less well than base evaluations do",
        reason=CLUSTER,
    ),
    Statement(
        "strict-accuracy-brittle",
        "App. B",
        "strict accuracy in state tracking is brittle to single characters, a distance is not",
        _in("base-eval", "exact-rejects", "strict-tokens", "one-character"),
    ),
    Statement(
        "state-tracking-parts",
        "App. B, Table 2",
        "rebuilding a file after many diffs discriminates between base models: distances of 66, 86 and "
        "92, lower is better",
        _in("base-eval", "tracking-parts"),
    ),
    Statement(
        "knowledge-parts",
        "App. B, Table 2",
        "knowledge questions, made from turns that needed a look-up, discriminate between base models: "
        "68.9%, 83.2%, 79.2%",
        _in("base-eval", "knowledge-parts"),
    ),
    Statement(
        "codebase-nll-parts",
        "App. B, Table 2",
        "codebase perplexity discriminates between base models: 11.75, 13.81 and 14.11 million nats",
        _in("base-eval", "codebase-parts"),
    ),
    Statement(
        "cpt-knowledge",
        "§3",
        "continued pretraining raises the base model's scores on knowledge benchmarks",
        reason=CLUSTER,
    ),
)

DRAFTS = (
    Statement(
        "distillation-faster",
        "§3.1",
        "draft layers that match the head's distribution learn faster than from token ids",
        _in("mtp", "distill-expected", "distill-greedy"),
    ),
    Statement(
        "drafts-2-3",
        "write-ups (§3.1)",
        "speculative decoding with MTP layers is 2–3 times faster",
        _in("mtp", "speed-up"),
    ),
    Statement(
        "drafts-formula",
        "arXiv:2211.17192, thm. 3.8",
        "the speed-up follows from acceptance and the cost of a draft",
        _in("mtp", "predicted"),
    ),
    Statement(
        "greedy-unchanged",
        "arXiv:2211.17192",
        "speculative decoding does not change greedy output",
        _in("mtp", "identical"),
    ),
    Statement(
        "samples-unchanged",
        "arXiv:2211.17192",
        "acceptance and rejection do not change the distribution of samples",
        reason="verified exactly by tests/ref/test_mtp.py; no experiment measures it",
    ),
    Statement(
        "drafts-from-mid-cpt",
        "§3.1",
        "MTP layers trained on a checkpoint from the middle of pretraining work with the final model",
        _in("mtp", "transplant-text", "transplant-demonstrations"),
    ),
    Statement(
        "joint-training",
        "§3.1",
        "MTP layers trained jointly with the model in long context and SFT draft well and do not harm it",
        _in("mtp", "joint-drafts", "joint-trunk"),
    ),
)

GRADIENT = (
    Statement(
        "dr-grpo-direction",
        "arXiv:2503.20783, §3",
        "without the two divisions the expected gradient has the true direction",
        _in("grpo-bias", "mean-factor", "mean-against-others"),
    ),
    Statement(
        "rloo-unbiased",
        "arXiv:2402.14740",
        "a baseline of the other rollouts makes the gradient unbiased",
        _in("grpo-bias", "rloo-exact"),
    ),
    Statement(
        "length-division",
        "§4.1; arXiv:2503.20783, §3",
        "division by the rollout's length biases length: wrong answers get longer",
        _in("grpo-bias", "length-gradient", "wrong-longer", "right-shorter", "wrong-grow", "wrong-longer-trained"),
    ),
    Statement(
        "deviation-division",
        "§4.1",
        "division by the deviation amplifies small differences in groups of equally correct rollouts",
        _in("grpo-bias", "std-blow-up", "std-share", "std-gradient", "std-gradient-priced"),
    ),
    Statement(
        "dr-grpo-as-good",
        "arXiv:2503.20783, Fig. 1 and 5",
        "Dr. GRPO performs as well, with shorter wrong answers",
        _in("grpo-bias", "as-good"),
    ),
    Statement(
        "overlong-unmasked",
        "§4.1",
        "masking overlong rollouts does not help",
        _in("grpo-bias", "unmasked-cut-off", "masked-cut-off", "masked-longer", "masked-grows"),
    ),
    Statement("overlong-agent", "§4.1", "masking overlong rollouts does not help in the agent's own RL", reason=LAPTOP),
    Statement(
        "average-rises", "§4.1, Fig. 5", "average reward rises along RL", _in("best-of-k", "average", "best-of-4")
    ),
    Statement(
        "best-of-k-rises",
        "§4.1, Fig. 5",
        "best-of-K rises too: RL extends what the policy can solve, and does not only sharpen it",
        _in("best-of-k", "best-of-16"),
    ),
    Statement(
        "rl-composes",
        "arXiv:2509.25123",
        "RL composes skills further than it was trained to; rejection fine-tuning on as many rollouts does less",
        _in("rejection", "greedy", "deeper", "rejection"),
    ),
    Statement(
        "harder-upsampled",
        "§4.1",
        "in later stages, it helps to sample prompts with more turns and tokens more often",
        reason=LAPTOP,
    ),
    Statement(
        "close-to-on-policy",
        "§4.1, §6.2",
        "asynchronous RL stays stable while samples are kept close to on-policy",
        _in("async-rl", "stable"),
    ),
)

KL = (
    Statement(
        "k1-k3-unbiased",
        "§4.1, Fig. 4",
        "k1 and k3 are unbiased, k2 is not",
        _in("kl-variance", "k1-unbiased", "k3-unbiased", "k2-biased"),
    ),
    Statement(
        "k3-near",
        "§4.1, Fig. 4",
        "k3 has less variance than k1 while policies are close",
        _in("kl-variance", "variances", "k3-wins-near", "crossing"),
    ),
    Statement(
        "k3-far",
        "§4.1, Fig. 4",
        "k3 has far more variance than k1 once policies are far apart, hence k1",
        _in("kl-variance", "k3-loses-far", "real-tokens"),
    ),
    Statement(
        "k1-in-loss",
        "arXiv:2510.01555",
        "k1 as a loss term has an expected gradient of zero",
        _in("kl-variance", "k1-loss"),
    ),
    Statement(
        "k2-in-loss",
        "arXiv:2510.01555",
        "k2 as a loss term has the gradient of KL(q‖p)",
        _in("kl-variance", "k2-loss", "sequence-k2"),
    ),
    Statement(
        "k3-in-loss",
        "arXiv:2510.01555",
        "k3 as a loss term has the gradient of the other KL",
        _in("kl-variance", "k3-loss"),
    ),
    Statement(
        "k1-in-reward",
        "arXiv:2510.01555",
        "k1 in the reward has the right gradient, the others do not",
        _in("kl-variance", "k1-reward", "k3-reward", "sequence-k1"),
    ),
    Statement(
        "off-policy-weights",
        "arXiv:2510.01555",
        "samples from another policy need importance weights",
        _in("kl-variance", "off-policy", "off-policy-weight"),
    ),
    Statement(
        "ratio-of-one",
        "arXiv:2510.01555",
        "k3 times a ratio that equals one has another gradient",
        _in("kl-variance", "k3-ratio"),
    ),
)

SUMMARIES = (
    Statement(
        "half-the-error",
        "§4.1, self-summarisation post",
        "self-summaries have about half the error of prompt-based compaction",
        _in("self-summary", "half-error"),
    ),
    Statement(
        "short-summaries",
        "§4.1, self-summarisation post",
        "summaries have about 1,000 tokens where compaction's have 5,000",
        _in("self-summary", "shorter"),
    ),
    Statement(
        "cache-reused",
        "self-summarisation post",
        "a request in the running context reuses its cache, a separate call does not",
        _in("self-summary", "cache"),
    ),
    Statement(
        "reward-on-summaries",
        "§4.1",
        "training every token of the chain on the final reward improves summaries",
        _in("self-summary", "rl-improves"),
    ),
    Statement(
        "chain-weighs-once",
        "§4.1",
        "a chain of more segments has the same weight as one of fewer",
        _in("self-summary", "one-weight"),
    ),
    Statement(
        "fewer-overlong", "§4.1", "with self-summaries, fewer rollouts are cut off for their length", reason=LAPTOP
    ),
    Statement(
        "hard-summarise-more", "self-summarisation post", "the agent summarises more often on hard tasks", reason=LAPTOP
    ),
    Statement(
        "poor-summaries-unlearned",
        "§4.1",
        "summaries that lead to failure are weighted down by the chain's reward",
        reason=LAPTOP,
    ),
    Statement(
        "better-with-exploration",
        "self-summarisation post",
        "results improve together with thinking and exploration during training",
        reason=AGENT,
    ),
)

REWARDS = (
    Statement(
        "penalty-curve",
        "§4.2, Fig. 6",
        "the penalty is C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q)), increasing and concave",
        _in("length-penalty", "formula", "concave", "limits"),
    ),
    Statement(
        "easy-quick", "§4.2", "the length penalty shortens rollouts on easy tasks", _in("length-penalty", "easy-quick")
    ),
    Statement(
        "hard-room",
        "§4.2",
        "the length penalty leaves room on hard tasks",
        _in("length-penalty", "easy-more-than-hard", "hard-room", "hard-success"),
    ),
    Statement(
        "parallel-calls",
        "§4.2",
        "the length penalty teaches parallel tool calls: the same work in fewer turns",
        _in("length-penalty", "parallel"),
    ),
    Statement(
        "bad-calls-penalised",
        "§4.2",
        "a penalty on bad tool calls makes them rarer",
        _in("behaviour", "price-broken", "price-failed", "price-sequential"),
    ),
    Statement(
        "todo-penalised", "§4.2", "a penalty on open to-do items gets them finished", _in("behaviour", "price-todos")
    ),
    Statement(
        "style-rewarded",
        "§4.2",
        "rewards for coding style and communication change both",
        _in(
            "behaviour", "price-lints", "price-diff", "price-comments", "price-silent", "price-untrue", "leaves-success"
        ),
    ),
    Statement(
        "comments-as-thought",
        "§4.2",
        "without a penalty, the agent hides long chains of thought in comments",
        _in("behaviour", "comments-without-price"),
    ),
    Statement(
        "terminal-only",
        "§4.2",
        "without a penalty, the agent collapses to the terminal tool",
        _in("behaviour", "terminal-without-price"),
    ),
    Statement(
        "habits-met",
        "§4.2",
        "unwanted behaviour that monitoring finds, such as comments and use of the terminal, "
        "disappears after a new reward",
        _in("monitor", "planted-found", "answered-comments", "answered-terminal"),
    ),
    Statement(
        "alarms-mean-something",
        "arXiv:2010.09686",
        "bets on bounded means keep their error rate under repeated looks, a threshold does not",
        _in("monitor", "false-alarms", "exact-means", "three-deviations"),
    ),
    Statement(
        "style-calibrated", "Composer 2.5", "separate rewards calibrate communication style and effort", reason=AGENT
    ),
)

REPLAY = (
    Statement(
        "sets-differ",
        "arXiv:2510.11370",
        "about 10% of routers choose another set of experts in the other engine",
        _in("router-mismatch", "decisions-bf16", "decisions-fp8"),
    ),
    Statement(
        "tokens-differ",
        "arXiv:2510.11370",
        "94% of tokens have another set of experts in at least one layer",
        _in("router-mismatch", "tokens-bf16", "tokens-fp8"),
    ),
    Statement(
        "replay-halves",
        "arXiv:2510.11370",
        "replay halves KL(μ‖π), 1.5e-3 → 7.5e-4 nats",
        _in("router-mismatch", "replay-bf16", "replay-fp8"),
    ),
    Statement(
        "moe-against-dense",
        "arXiv:2510.11370",
        "the mismatch of a mixture of experts is 2.4 times that of a dense network",
        reason=LAPTOP,
    ),
    Statement(
        "replay-in-rl",
        "arXiv:2510.11370",
        "replay lowers the mismatch in RL, and keeps RL stable",
        _in("router-mismatch", "rl-mismatch", "rl-p99", "rl-stable"),
    ),
    Statement(
        "filter-p99",
        "§6.2",
        "dropping implausible replayed experts lowers the p99 of the mismatch",
        _in("router-mismatch", "filter-bf16", "filter-fp8", "rl-filter"),
    ),
    Statement(
        "filter-own-choice",
        "§6.2",
        "implausible experts are replaced by the router's own candidates",
        _in("router-mismatch", "alpha-0", "alpha-1", "filter-threshold"),
    ),
    Statement(
        "router-learns",
        "§6.2",
        "the router still computes its scores, so that gradients flow through it under replay",
        reason="verified exactly by tests/ref/test_router_replay.py; no experiment measures it",
    ),
)

SYNC = (
    Statement(
        "faster-without-waiting",
        "§6.2; arXiv:2505.24298, arXiv:2509.19128",
        "asynchronous RL reaches the same success in less time, and costs nothing where there is nothing to wait for",
        _in("async-rl", "half-the-time", "wider", "no-latency", "same-success", "clock"),
    ),
    Statement(
        "later-tokens-fresher",
        "§4.1; arXiv:2509.19128",
        "in-flight weight updates make a rollout's later tokens less stale",
        _in("async-rl", "fresher"),
    ),
    Statement(
        "staleness-balance",
        "§6.2",
        "one reconciler over slots balances throughput against staleness",
        _in("async-rl", "balance"),
    ),
    Statement(
        "outages-survived",
        "§6.2",
        "outages of inference or environments do not end training",
        reason="verified by tests/mirror/test_faults.py and make test-faults on one machine; no experiment measures it",
    ),
    Statement(
        "groups-restored",
        "§6.2",
        "a restart loads ready groups instead of sampling them again",
        reason="verified by tests/mirror/test_async_command.py on one machine; no experiment measures it",
    ),
    Statement(
        "environment-snapshots",
        "§6.2",
        "memory snapshots carry rollouts over a restart and to verifiers",
        reason="needs snapshots of memory; those of tests/environments/test_snapshots.py hold files",
    ),
    Statement(
        "live-code",
        "§6.2",
        "actors are drained and replaced, so that code can change during a run",
        reason="a worker that dies is replaced during the run; draining workers for new code is not implemented",
    ),
    Statement(
        "weights-mostly-equal",
        "§6.2; arXiv:2602.03839",
        "98–99% of bfloat16 weights are the same bits after a step of RL",
        _in("weight-sync", "unchanged", "law"),
    ),
    Statement(
        "delta-size",
        "§6.2; arXiv:2602.03839",
        "a delta is a fiftieth of the weights: 20.3 of 1,024 GiB, 20–35 MB of 1.2 GB",
        _in("weight-sync", "fiftieth", "bits", "xor", "merged"),
    ),
    Statement(
        "delta-lossless",
        "§6.2",
        "weights rebuilt from deltas equal the trainer's, bit for bit",
        _in("weight-sync", "chain"),
    ),
    Statement(
        "sync-in-background",
        "§6.2",
        "compression, upload and hot-load are pipelined, so that a sync every step costs training little",
        _in("async-rl", "background"),
    ),
    Statement(
        "sync-by-chain",
        "§6.2",
        "each inference cluster rebuilds weights from the chain by itself",
        reason="verified by tests/mirror/test_faults.py on one machine; no experiment measures it",
    ),
    Statement(
        "upload-sharded",
        "§6.2",
        "an upload that all trainer ranks share saturates the network's egress",
        reason=CLUSTER,
    ),
    Statement(
        "standby-gpus",
        "§6.2",
        "training survives outages of GPUs with machines on standby",
        reason="there are no standby machines; a dead worker is restarted",
    ),
)

SYSTEMS = (
    Statement(
        "packing-balances",
        "§6.1",
        "repacking all sequences by the cost of attention balances the ranks' work",
        reason="verified by tests/ref/test_packing.py; no experiment times it",
    ),
    Statement(
        "cp-sends-less", "§6.1", "context parallelism sends less than tensor parallelism on long rows", reason=LAPTOP
    ),
    Statement(
        "latents-smaller",
        "§6.1",
        "gathering MLA's latents and projecting them locally sends less than keys and values",
        reason=LAPTOP,
    ),
    Statement(
        "causal-balance",
        "§6.1",
        "2·CP chunks, each early one paired with a late one, balance causal attention",
        reason=LAPTOP,
    ),
    Statement(
        "expert-parallel-free",
        "§6.1",
        "expert parallelism made of DP and CP ranks computes the same as one rank",
        reason="verified by tests/mirror/test_network.py; no experiment measures it",
    ),
    Statement(
        "leaks-batch",
        "§6.1, Kernels",
        "a scale per tensor makes outputs depend on the batch, a scale per token does not",
        _in("low-precision", "batch-leak"),
    ),
    Statement(
        "leaks-future",
        "§6.1, Kernels",
        "a scale per tensor leaks future tokens into past ones",
        _in("low-precision", "later-leak"),
    ),
    Statement(
        "tensor-scale-diverges",
        "§6.1, Kernels",
        "with a scale per tensor RL diverges",
        _in("low-precision", "tensor-training"),
    ),
    Statement(
        "nvfp4-mxfp8-trains", "§6.1, Kernels", "NVFP4 forward and MXFP8 backward train", _in("low-precision", "trains")
    ),
    Statement(
        "fast-division-diverges",
        "§6.1, Kernels",
        "without IEEE division in NVFP4, RL diverges after roughly a hundred steps",
        _in("low-precision", "division-nvfp4"),
    ),
    Statement(
        "fast-division-mxfp8",
        "§6.1, Kernels",
        "fast division is harmless for MXFP8",
        _in("low-precision", "division-mxfp8"),
    ),
    Statement(
        "same-format-matches",
        "§6.1, Kernels",
        "a trainer in NVFP4 matches an engine in NVFP4 better than one in another format",
        reason=LAPTOP,
    ),
    Statement(
        "mxfp8-dispatch",
        "§6.1, Kernels",
        "quantising tokens to MXFP8 before dispatch loses nothing, since experts compute in MXFP8",
        reason=LAPTOP,
    ),
    Statement(
        "two-streams", "§6.1", "micro-batches on two streams hide communication behind matrix products", reason=GPU
    ),
    Statement(
        "kernel-times",
        "kernels post",
        "the post's tables: times of quantisation, grouped products and whole layers, against other libraries",
        reason=GPU,
    ),
    Statement(
        "muon-sharded",
        "Composer 2.5",
        "Muon sharded by attention head and expert takes the same steps as unsharded",
        reason="verified by tests/mirror/test_training.py; no experiment measures it",
    ),
    Statement(
        "dual-mesh",
        "Composer 2.5",
        "separate layouts for expert and other weights send less than one layout for both",
        reason=GPU,
    ),
    Statement(
        "ep-without-tp",
        "§6.1",
        "expert parallelism free of tensor parallelism makes grouped products more efficient",
        reason=GPU,
    ),
    Statement(
        "cp-in-fsdp",
        "§6.1",
        "context parallelism folded into FSDP shards the state over more ranks and saves memory",
        reason=LAPTOP,
    ),
    Statement("latents-hidden", "§6.1", "the gather of latents is hidden behind the projection of queries", reason=GPU),
    Statement(
        "cp-2-ep-8",
        "Composer 2.5",
        "a context parallelism of 2 and an expert parallelism of 8 need 8 ranks, not 16",
        reason=LAPTOP,
    ),
    Statement(
        "muon-overlapped",
        "Composer 2.5",
        "overlapped and sharded, a step of Muon takes 0.2 s at 1T parameters",
        reason=GPU,
    ),
)

ENVIRONMENTS = (
    Statement(
        "same-harness",
        "§6.2",
        "an agent trains in the harness in which it is used: real files, real tools, isolated machines",
        _in("disk-world", "same-curves", "learns-on-disk")
        + _in("real-agent", "rl-sampled", "rl-greedy", "beyond-control", "calls"),
    ),
    Statement("strict-arguments", "§6.2", "stricter checks of tool arguments teach more precise calls", reason=LAPTOP),
    Statement("tools-removed", "§6.2", "training with tools removed makes the agent steerable", reason=LAPTOP),
    Statement(
        "shadow-backend",
        "§6.2",
        "tools with outside dependencies work from a shadow deployment",
        reason="needs such tools, and a backend to deploy twice",
    ),
    Statement(
        "pods-a-second",
        "§6.2",
        "more than 500 virtual machines per second start in a cluster",
        reason="needs a cluster of machines that start virtual ones",
    ),
    Statement(
        "start-dear",
        "§6.2",
        "a pod's start costs far more than its steady state",
        reason="`etude bench sandbox` times starts; no experiment does",
    ),
    Statement(
        "forks",
        "§6.2",
        "a fork of disk and memory continues a rollout exactly, on the same node or another",
        reason="verified for files, on one machine, by tests/environments/test_snapshots.py; memory is not forked",
    ),
    Statement(
        "egress",
        "§6.2",
        "a transparent proxy blocks what no policy allows, without help of the environment",
        reason="verified by tests/environments/test_door_escapes.py; programs must be configured for our "
        "proxy, and no experiment measures it",
    ),
    Statement(
        "auto-install",
        "talk",
        "one model proposes commands and tests, a second one installs: repositories become runnable",
        reason="verified for scripts by tests/environments/test_install.py; it needs models that can set a "
        "repository up",
    ),
    Statement(
        "feature-deletion",
        "Composer 2.5",
        "deleting a feature so that the rest still works gives tasks that tests can grade",
        _in(
            "feature-deletion",
            "slices-are-tasks",
            "more-than-one-place",
            "more-than-scattered",
            "spares-one-place",
            "spares-scattered",
        )
        + _in("feature-deletion", "more-than-functions", "no-fool", "gold-back"),
    ),
    Statement("tasks-25", "Composer 2.5", "25 times as many synthetic tasks keep RL improving", reason=CLUSTER),
    Statement(
        "tasks-harder", "Composer 2.5", "making tasks harder as the model improves keeps it learning", reason=LAPTOP
    ),
    Statement(
        "deletion-hacks",
        "Composer 2.5",
        "deleted features invite reward hacks: signatures are rebuilt from a leftover cache",
        _in("leftover-cache", "finds-the-cache", "learns-the-cache", "costs-the-task", "same-on-disk"),
    ),
    Statement(
        "bytecode-decompiled",
        "Composer 2.5",
        "deleted features invite reward hacks: leftover bytecode is decompiled",
        reason="tests/environments/test_leaks.py checks that such bytecode is found before an agent sees it; "
        "no experiment trains on it",
    ),
    Statement(
        "tests-tampered",
        "arXiv:2510.20270",
        "an agent that can edit the tests that grade it changes them instead of its code",
        _in("tampered-tests", "finds-the-tests", "paid-not-earned", "costs-the-task", "same-on-disk"),
    ),
    Statement(
        "tests-out-of-reach",
        "arXiv:2510.20270",
        "tests that the agent cannot change, hidden or read-only, stop tampering",
        _in("tampered-tests", "guard-ends", "lock-ends"),
    ),
    Statement(
        "tampering-seen",
        "arXiv:2510.20270",
        "monitors detect that tests were changed",
        _in("tampered-tests", "monitor-sees", "watched-ends"),
    ),
    Statement(
        "monitors-catch",
        "Composer 2.5",
        "monitors detect hacks of deleted features",
        _in("leftover-cache", "monitor-sees", "guard-ends"),
    ),
    Statement(
        "agentic-monitors",
        "Composer 2.5",
        "monitors that are agents themselves detect hacks that no rule describes",
        reason=JUDGE,
    ),
    Statement(
        "judges-suffice",
        "arXiv:2511.21654",
        "a model that judges the change finds hacks, and held-out tests add little",
        reason=JUDGE,
    ),
    Statement(
        "broken-calls-hack",
        "real-time RL",
        "discarding rollouts with a broken call teaches broken calls on hard tasks; counting them as negative does not",
        _in("real-time-rl", "broken-calls", "broken-calls-counted"),
    ),
    Statement(
        "questions-hack",
        "real-time RL",
        "a reward for kept edits teaches clarifying questions instead of risky edits",
        _in("real-time-rl", "questions", "questions-priced"),
    ),
    Statement(
        "real-time-gains",
        "real-time RL",
        "in an A/B test kept edits +2.28%, dissatisfied follow-ups −3.13%, latency −10.3%",
        _in("real-time-rl", "edits-kept", "follow-ups", "latency"),
    ),
    Statement(
        "fresh-data",
        "real-time RL",
        "data of the last hours trains better than older data",
        _in("real-time-rl", "day-old", "week-old"),
    ),
    Statement(
        "nearly-on-policy",
        "real-time RL",
        "a loop of hours keeps the data nearly on-policy",
        _in("real-time-rl", "nearly-on-policy"),
    ),
    Statement(
        "evaluated-before-shipping",
        "real-time RL",
        "a candidate is evaluated before release, so that no worse one reaches users",
        reason="verified by tests/sims/test_real_time_rl.py; no experiment runs the loop without its gate",
    ),
    Statement(
        "five-hours", "real-time RL", "a loop from users' reactions to a shipped model takes five hours", reason=PRODUCT
    ),
    Statement(
        "local-hints",
        "Composer 2.5; arXiv:2601.20802",
        "a hint where a rollout went wrong, distilled into the agent without it, fixes that fault and nothing else",
        _in("textual-feedback", "fewer-faults", "mended", "equal-success", "nothing-else", "more-than-prices"),
    ),
    Statement(
        "hinted-knows-better",
        "Composer 2.5",
        "the same model with the hint does not make the mistake, and can be the teacher",
        reason=LAPTOP,
    ),
    Statement(
        "student-pulled",
        "Composer 2.5",
        "a KL at the message pulls the policy without the hint towards the policy with it",
        reason="verified by tests/ref/test_rl.py; no experiment measures it",
    ),
    Statement(
        "hints-say-something",
        "Composer 2.5; arXiv:2601.20802",
        "the content of a hint fixes the fault",
        _in("textual-feedback", "right-hint", "more-than-error"),
    ),
    Statement(
        "environment-feedback",
        "arXiv:2601.20802",
        "an agent that sees the environment's feedback can teach itself without it",
        _in("textual-feedback", "environment-s-error"),
    ),
    Statement(
        "demonstrations-as-hints",
        "arXiv:2601.19897",
        "an agent with a demonstration in context teaches itself the skill, and forgets less than by fine-tuning on it",
        reason=LAPTOP,
    ),
    Statement(
        "solutions-as-hints",
        "arXiv:2601.18734",
        "an agent with a verified solution in context teaches itself with fewer tokens than RL on the outcome",
        reason=LAPTOP,
    ),
    Statement(
        "hints-without-reward",
        "Composer 2.5; arXiv:2601.20802",
        "hints teach tasks on which the outcome reward alone is never reached",
        _in("textual-feedback", "sparse", "direction"),
    ),
    Statement(
        "fork-near",
        "§6.2",
        "a fork on the same node is cheaper than one elsewhere",
        reason="needs two nodes; forks are made on one machine",
    ),
    Statement(
        "longer-loops",
        "real-time RL",
        "with longer tasks the loop's feedback is sparser and less frequent",
        reason=PRODUCT,
    ),
    Statement(
        "organisation-models",
        "real-time RL",
        "models can be trained for single organisations or kinds of work",
        reason=PRODUCT,
    ),
)

EVALUATION = (
    Statement(
        "bench-lines",
        "§5",
        "CursorBench's tasks change 181 lines at the median, variants of SWE-bench 7–10",
        reason=PRODUCT,
    ),
    Statement(
        "bench-prompts",
        "§5",
        "CursorBench's prompts have 390 characters at the median, others' 1,185–3,055",
        reason=PRODUCT,
    ),
    Statement(
        "effort-levels", "§7", "effort levels trade accuracy for tokens, latency and cost along one front", reason=AGENT
    ),
    Statement(
        "composer-2-scores",
        "§7",
        "Composer 2: CursorBench 61.3, SWE-bench Multilingual 73.7, Terminal-Bench 61.7",
        reason=PRODUCT,
    ),
    Statement(
        "over-composer-1.5",
        "§7",
        "on CursorBench Composer 2 scores 37% above Composer 1.5 (61.3 and 44.2 give 38.7%)",
        reason=PRODUCT,
    ),
    Statement(
        "over-the-base",
        "§7",
        "Composer 2 scores above its base, Kimi K2.5, which has 36.0, 65.1 and 47.3 on the same three",
        reason=CLUSTER,
    ),
    Statement(
        "targeted-evaluations",
        "§5",
        "evaluations of intent, instructions, eager edits, code quality and interruption discriminate between models",
        reason=AGENT,
    ),
    Statement(
        "online-evaluation",
        "§5",
        "checkpoints are evaluated during training, each with its weights and a backend of its own",
        reason="verified by tests/mirror/test_faults.py on one machine; no experiment measures it",
    ),
    Statement(
        "suite-separates",
        "§5; talk",
        "the authors' suite separates models that public benchmarks score alike",
        reason=AGENT,
    ),
    Statement(
        "suite-grows",
        "§5, Fig. 9",
        "CursorBench-3 more than doubles lines and files of its first version",
        reason=PRODUCT,
    ),
    Statement(
        "prompts-over-specified",
        "§5",
        "over-specified prompts hide intent, and tests then fail correct alternatives",
        reason=AGENT,
    ),
    Statement("contaminated", "§5", "models reproduce patches of public benchmarks from memory", reason=CLUSTER),
    Statement(
        "near-base-on-swe",
        "§7",
        "Composer 2 is close to its base on SWE-bench Multilingual and far above it on Terminal-Bench",
        reason=CLUSTER,
    ),
)

STATEMENTS: tuple[Statement, ...] = (
    *PRETRAINING,
    *DRAFTS,
    *GRADIENT,
    *KL,
    *SUMMARIES,
    *REWARDS,
    *REPLAY,
    *SYNC,
    *SYSTEMS,
    *ENVIRONMENTS,
    *EVALUATION,
)


def _index_tested(claims: Sequence[dict]) -> dict[str, dict]:
    return {
        f"{claim['experiment']}/{claim['name']}": claim
        for claim in claims
        if claim["verdict"] not in ("not tested", "stale")
    }


def coverage(claims: Sequence[dict]) -> tuple[int, int, int]:
    """Statements that some claim or law of these tests; those of them that laws alone test; all statements."""
    tested_claims = _index_tested(claims)
    claims_by_statement = [
        [tested_claims[name] for name in statement.tests if name in tested_claims] for statement in STATEMENTS
    ]
    return (
        sum(map(bool, claims_by_statement)),
        sum(
            bool(statement_claims) and all(is_law(claim["rule"]) for claim in statement_claims)
            for statement_claims in claims_by_statement
        ),
        len(STATEMENTS),
    )


def open_statements(claims: Sequence[dict]) -> list[tuple[Statement, str]]:
    """Statements that no claim or law of these tests, each with the reason."""
    tested_claims, reasons = (
        _index_tested(claims),
        {f"{claim['experiment']}/{claim['name']}": claim["note"].split("; ")[0] for claim in claims},
    )
    return [
        (
            statement,
            statement.reason
            or "; ".join(dict.fromkeys(reasons.get(name, f"{name} was not run") for name in statement.tests)),
        )
        for statement in STATEMENTS
        if not any(name in tested_claims for name in statement.tests)
    ]
