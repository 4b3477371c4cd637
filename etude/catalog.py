"""The table of techniques with their sources, code, experiments and lessons. The command line, the README, docs/ and
the tests read it.

A path is listed only if the file exists; a test checks every path.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Technique:
    """One technique of the recipe, with the paths of its parts from the root of the repository."""

    name: str
    """What `etude run NAME` takes."""
    title: str
    """What it is, in one line."""
    source: str
    """Section of the Composer 2 technical report (arXiv:2603.24477v2), or the paper that the code follows."""
    ref: str | None = None
    """The file to read."""
    scaled: str | None = None
    """The distributed version. None if ranks use the reference itself, as the services of asynchronous RL do."""
    kernel: str | None = None
    """The Triton kernel that `scaled` calls."""
    sim: str | None = None
    """The experiment that shows what the source claims."""
    lesson: str | None = None
    """The lesson that teaches it."""
    page: str | None = None
    """Name of the explorer's page, as in its URL: etude/explorer/pages/NAME.py, where hyphens are underscores."""
    figure: str | None = None
    """The measurement that the README or a page of docs/ shows."""
    tests: tuple[str, ...] = ()
    """Tests of meaning."""
    demo: str | None = None
    """What `etude run NAME` runs, if it is neither the reference nor the experiment: a module with `run`."""

    @property
    def module(self) -> str | None:
        """Import name of what `etude run NAME` runs: the demonstration, the reference file, or the experiment if there
        is neither."""
        path = self.demo or self.ref or self.sim
        return path.removesuffix(".py").replace("/", ".") if path else None


@dataclass(frozen=True)
class Experiment:
    """One experiment: it reproduces a figure or a claim of the sources."""

    name: str
    """What `etude figure NAME` takes."""
    title: str
    """What it shows, in one line."""
    source: str
    """The figure or section of the Composer 2 technical report (arXiv:2603.24477v2), or the paper."""
    sim: str
    """Its file."""
    tests: tuple[str, ...]
    """Tests of it."""

    @property
    def module(self) -> str:
        """Import name of the file."""
        return self.sim.removesuffix(".py").replace("/", ".")


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="kl-variance",
        title="variance of k1, k2 and k3, and the gradient that each one gives",
        source="§4.1, Fig. 4",
        sim="sims/kl_variance/experiment.py",
        tests=("tests/sims/test_kl_variance.py",),
    ),
    Experiment(
        name="disk-world",
        title="RL on files of Python in sandboxes, with pytest and the guarded grader, against RL in memory",
        source="§6.2; Composer 2.5",
        sim="sims/disk_world/experiment.py",
        tests=("tests/sims/test_disk_world.py",),
    ),
    Experiment(
        name="leftover-cache",
        title="a type checker's cache left after deletion: does RL exploit it, do monitors detect it, which "
        "guard stops it",
        source="Composer 2.5",
        sim="sims/leftover_cache/experiment.py",
        tests=("tests/sims/test_leftover_cache.py",),
    ),
    Experiment(
        name="tampered-tests",
        title="the agent can edit the tests that grade it: does RL exploit that, do monitors detect it, "
        "which guard stops it",
        source="arXiv:2510.20270",
        sim="sims/tampered_tests/experiment.py",
        tests=("tests/sims/test_tampered_tests.py",),
    ),
    Experiment(
        name="textual-feedback",
        title="hints where rollouts went wrong, against the outcome reward alone, also where that reward is "
        "never reached",
        source="Composer 2.5; arXiv:2601.20802",
        sim="sims/textual_feedback/experiment.py",
        tests=("tests/sims/test_textual_feedback.py",),
    ),
    Experiment(
        name="real-time-rl",
        title="RL with simulated users: two reward hacks and their fixes, an A/B test of a release, and the "
        "age of the data",
        source="real-time RL",
        sim="sims/real_time_rl/experiment.py",
        tests=("tests/sims/test_real_time_rl.py",),
    ),
    Experiment(
        name="monitor",
        title="failures planted in RL: time to detection, false alarms, and the effect of a penalty that "
        "follows an alarm",
        source="§4.2; arXiv:2010.09686",
        sim="sims/monitor/experiment.py",
        tests=("tests/sims/test_planted_failures.py",),
    ),
    Experiment(
        name="feature-deletion",
        title="features deleted by rule, against as many lines at random: which become tasks, and what else breaks",
        source="Composer 2.5",
        sim="sims/feature_deletion/experiment.py",
        tests=("tests/sims/test_feature_deletion.py",),
    ),
    Experiment(
        name="best-of-k",
        title="average reward and best-of-K along RL: does it widen what is reachable?",
        source="§4.1, Fig. 5",
        sim="sims/best_of_k/experiment.py",
        tests=("tests/sims/test_best_of_k.py",),
    ),
    Experiment(
        name="rejection",
        title="RL against rejection fine-tuning on as many rollouts: which goes beyond the depths it saw?",
        source="arXiv:2509.25123",
        sim="sims/rejection/experiment.py",
        tests=("tests/sims/test_rejection.py",),
    ),
    Experiment(
        name="length-penalty",
        title="the length penalty's curves, and agents trained with it on easy and hard tasks",
        source="§4.2, Fig. 6",
        sim="sims/length_penalty/experiment.py",
        tests=("tests/sims/test_length_penalty.py",),
    ),
    Experiment(
        name="behaviour",
        title="behaviour penalties, each in two of four arms: effect on the behaviour, on success, and of no penalty",
        source="§4.2",
        sim="sims/behaviour/experiment.py",
        tests=("tests/sims/test_behaviour_prices.py",),
    ),
    Experiment(
        name="router-mismatch",
        title="router replay between a coarse sampler and an exact trainer, in log-probs and in RL",
        source="§6.2; arXiv:2510.11370",
        sim="sims/router_replay/experiment.py",
        tests=("tests/sims/test_router_mismatch.py",),
    ),
    Experiment(
        name="mtp",
        title="draft layers trained on distributions or on labels, and the speed-up of decoding",
        source="§3.1",
        sim="sims/mtp/experiment.py",
        tests=("tests/sims/test_mtp_distillation.py",),
    ),
    Experiment(
        name="grpo-bias",
        title="effect of dividing by length and by deviation, on the gradient and on rollout length",
        source="§4.1",
        sim="sims/grpo_bias/experiment.py",
        tests=("tests/sims/test_grpo_bias.py",),
    ),
    Experiment(
        name="self-summary",
        title="tasks that exceed the context: self-summaries against truncation and separate compaction, "
        "before and after RL",
        source="§4.1",
        sim="sims/self_summary/experiment.py",
        tests=("tests/sims/test_self_summary.py",),
    ),
    Experiment(
        name="cpt-rl",
        title="pretraining budget, loss after SFT, and the reward after RL",
        source="§3.1, Fig. 2",
        sim="sims/cpt_rl/experiment.py",
        tests=("tests/sims/test_cpt_rl.py",),
    ),
    Experiment(
        name="cpt-real",
        title="continued pretraining of a real network on code newer than itself: loss against tokens, a "
        "control, forgetting",
        source="§3.1",
        sim="etude/run/cpt_real.py",
        tests=("tests/mirror/test_real.py",),
    ),
    Experiment(
        name="base-eval",
        title="small open base models and the small run's checkpoints: coding knowledge, state tracking, codebase NLL",
        source="App. B, Table 2",
        sim="sims/base_evaluations/experiment.py",
        tests=("tests/sims/test_base_eval.py", "tests/sims/test_base_tracking.py", "tests/sims/test_base_knowledge.py"),
    ),
    Experiment(
        name="real-agent",
        title="SFT and RL of SmolLM2-135M on tasks of generated packages, with tools, sandboxes and the grader: "
        "held-out success, a control",
        source="§6.2",
        sim="sims/real_agent/experiment.py",
        tests=("tests/sims/test_real_agent.py",),
    ),
    Experiment(
        name="low-precision",
        title="experts in MXFP8 and NVFP4: noise, leaks through per-tensor scales, fast division, training",
        source="§6.1, Kernels",
        sim="sims/low_precision/experiment.py",
        tests=("tests/sims/test_low_precision.py",),
    ),
    Experiment(
        name="weight-sync",
        title="which weights RL changes, the size of a lossless delta, and a chain of versions, bit for bit",
        source="§6.2; arXiv:2602.03839",
        sim="sims/weight_sync/experiment.py",
        tests=("tests/sims/test_weight_sync.py",),
    ),
    Experiment(
        name="async-rl",
        title="asynchronous services against the synchronous loop: time, success over time, staleness, the "
        "virtual clock",
        source="§4.1, §6.2; arXiv:2505.24298",
        sim="sims/async_rl/experiment.py",
        tests=("tests/mirror/test_async_figure.py",),
    ),
)


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="recipe",
        title="the whole recipe: data, CPT, MTP, RL, evaluation and report",
        source="Composer 2",
        sim="recipe/small/stages.py",
        lesson="lessons/00_recipe.py",
        page="recipe",
        figure="results/recipe-small.png",
    ),
    Technique(
        name="cpt",
        title="continued pretraining in phases, and codebase perplexity",
        source="§3.1, App. B",
        ref="ref/cpt.py",
        scaled="scaled/cpt.py",
        sim="sims/cpt_rl/experiment.py",
        lesson="lessons/01_cpt.py",
        page="cpt",
        figure="results/figures/cpt-rl.png",
        tests=("tests/ref/test_cpt.py",),
    ),
    Technique(
        name="muon",
        title="Muon: orthogonalised momentum for matrices",
        source="Composer 2.5",
        ref="ref/muon.py",
        scaled="scaled/muon.py",
        kernel="kernels/muon.py",
        lesson="lessons/02_muon.py",
        page="muon",
        tests=("tests/ref/test_muon.py",),
    ),
    Technique(
        name="mtp",
        title="multi-token prediction, self-distilled, and speculative decoding",
        source="§3.1",
        ref="ref/mtp.py",
        scaled="scaled/mtp.py",
        sim="sims/mtp/experiment.py",
        lesson="lessons/03_mtp.py",
        page="mtp",
        figure="results/figures/mtp.png",
        tests=("tests/ref/test_mtp.py",),
    ),
    Technique(
        name="dr-grpo",
        title="Dr. GRPO and its family in one implementation: GRPO, RLOO, DAPO, GSPO",
        source="§4.1",
        ref="ref/dr_grpo.py",
        scaled="scaled/dr_grpo.py",
        sim="sims/grpo_bias/experiment.py",
        lesson="lessons/04_dr_grpo.py",
        page="advantages",
        figure="results/figures/grpo-bias.png",
        tests=("tests/ref/test_dr_grpo.py",),
    ),
    Technique(
        name="kl",
        title="KL estimators k1, k2, k3: value, variance, gradient",
        source="§4.1, Fig. 4",
        ref="ref/kl.py",
        scaled="scaled/kl.py",
        sim="sims/kl_variance/experiment.py",
        lesson="lessons/05_kl.py",
        page="kl",
        figure="results/figures/kl-variance.png",
        tests=("tests/ref/test_kl.py",),
    ),
    Technique(
        name="length-penalty",
        title="nonlinear length penalty",
        source="§4.2, Fig. 6",
        ref="ref/length_penalty.py",
        scaled="scaled/length_penalty.py",
        sim="sims/length_penalty/experiment.py",
        lesson="lessons/06_length_penalty.py",
        page="penalties",
        figure="results/figures/length-penalty.png",
        tests=("tests/ref/test_length_penalty.py",),
    ),
    Technique(
        name="behaviour",
        title="behaviour penalties: broken calls, open to-do items, missing or untrue messages, style",
        source="§4.2",
        ref="ref/behaviour.py",
        scaled="scaled/behaviour.py",
        sim="sims/behaviour/experiment.py",
        lesson="lessons/17_behaviour.py",
        figure="results/figures/behaviour.png",
        tests=("tests/ref/test_behaviour.py",),
    ),
    Technique(
        name="monitor",
        title="monitoring of rollouts at every step, with alarms of bounded error rate",
        source="§4.2; arXiv:2010.09686",
        ref="ref/monitor.py",
        scaled="scaled/monitor.py",
        sim="sims/monitor/experiment.py",
        lesson="lessons/18_monitor.py",
        figure="results/figures/monitor.png",
        tests=("tests/ref/test_monitor.py",),
    ),
    Technique(
        name="self-summary",
        title="self-summarisation: chains of segments, one reward for all tokens",
        source="§4.1",
        ref="ref/self_summary.py",
        scaled="scaled/self_summary.py",
        sim="sims/self_summary/experiment.py",
        lesson="lessons/07_self_summary.py",
        page="summary",
        figure="results/figures/self-summary.png",
        tests=("tests/ref/test_self_summary.py",),
    ),
    Technique(
        name="router-replay",
        title="router replay: the trainer uses the experts that the inference engine chose",
        source="§6.2; arXiv:2510.11370",
        ref="ref/router_replay.py",
        scaled="scaled/router_replay.py",
        kernel="kernels/router_replay.py",
        sim="sims/router_replay/experiment.py",
        lesson="lessons/08_router_replay.py",
        page="replay",
        figure="results/figures/router-mismatch.png",
        tests=("tests/ref/test_router_replay.py",),
    ),
    Technique(
        name="weight-sync",
        title="weight sync: lossless deltas of bfloat16 weights, a chain with anchors, shards in object storage",
        source="§4.1, §6.2; arXiv:2602.03839",
        ref="ref/weight_sync.py",
        scaled="scaled/weight_sync.py",
        kernel="kernels/weight_sync.py",
        sim="sims/weight_sync/experiment.py",
        lesson="lessons/12_weight_sync.py",
        page="weight-sync",
        figure="results/figures/weight-sync.png",
        tests=("tests/ref/test_weight_sync.py", "tests/ref/test_weight_codec.py"),
    ),
    Technique(
        name="async-rl",
        title="asynchronous RL: sampling and training at the same time, in-flight weight updates, bounded staleness",
        source="§4.1, §6.2; arXiv:2509.19128",
        ref="ref/async_rl.py",
        sim="sims/async_rl/experiment.py",
        lesson="lessons/13_async_rl.py",
        page="async-rl",
        figure="results/figures/async-rl.png",
        tests=("tests/mirror/test_async_command.py", "tests/ref/test_async_rl.py"),
        demo="recipe/asynchronous/run.py",
    ),
    Technique(
        name="packing",
        title="global sequence packing: quadratic cost balanced over ranks, sequences packed into rows",
        source="§6.1",
        ref="ref/packing.py",
        scaled="scaled/packing.py",
        lesson="lessons/09_packing.py",
        page="packing",
        tests=("tests/ref/test_packing.py",),
    ),
    Technique(
        name="quant",
        title="low precision: NVFP4 per token forward, MXFP8 backward, and leaks through per-tensor scales",
        source="§6.1, Kernels",
        ref="ref/quant.py",
        scaled="scaled/quant.py",
        kernel="kernels/quant.py",
        sim="sims/low_precision/experiment.py",
        lesson="lessons/10_quant.py",
        page="low-precision",
        figure="results/figures/low-precision.png",
        tests=(
            "tests/ref/test_quant.py",
            "tests/ref/test_formats.py",
            "tests/kernels/test_quant.py",
            "tests/kernels/test_gemm.py",
            "tests/kernels/test_grouped_gemm.py",
            "tests/kernels/test_experts.py",
            "tests/kernels/test_native.py",
            "tests/kernels/test_orientations.py",
        ),
    ),
    Technique(
        name="feature-deletion",
        title="feature deletion: code removed from a package by syntax tree and coverage, its tests as the reward",
        source="Composer 2.5",
        ref="ref/feature_deletion.py",
        scaled="scaled/feature_deletion.py",
        sim="sims/feature_deletion/experiment.py",
        lesson="lessons/14_feature_deletion.py",
        page="feature-deletion",
        figure="results/figures/feature-deletion.png",
        tests=("tests/ref/test_feature_deletion.py",),
    ),
    Technique(
        name="textual-feedback",
        title="textual feedback: a hint where a rollout went wrong; the policy with the hint is its own teacher",
        source="Composer 2.5; arXiv:2601.20802",
        ref="ref/textual_feedback.py",
        scaled="scaled/textual_feedback.py",
        sim="sims/textual_feedback/experiment.py",
        lesson="lessons/16_textual_feedback.py",
        page="textual-feedback",
        figure="results/figures/textual-feedback.png",
        tests=("tests/ref/test_textual_feedback.py", "tests/sims/test_hints.py"),
    ),
    Technique(
        name="environments",
        title="real coding environments: sandboxes, tools, a harness, a guarded grader",
        source="§6.2; Composer 2.5",
        sim="sims/disk_world/experiment.py",
        lesson="lessons/15_environments.py",
        page="episodes",
        figure="results/figures/disk-world.png",
        tests=(
            "tests/sims/test_environments_demo.py",
            "tests/environments/test_escapes.py",
            "tests/environments/test_hacks.py",
        ),
        demo="sims/environments/demo.py",
    ),
)


def find(name: str) -> Technique | None:
    """The technique of that name; underscores count as hyphens."""
    return next((technique for technique in TECHNIQUES if technique.name == name.replace("_", "-")), None)


def find_experiment(name: str) -> Experiment | None:
    """The experiment of that name; underscores count as hyphens."""
    return next((entry for entry in EXPERIMENTS if entry.name == name.replace("_", "-")), None)
