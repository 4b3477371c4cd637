"""All settings of the recipe: frozen dataclasses with one docstring per field, filled from TOML and `--set
key=value`."""

from dataclasses import dataclass, field, replace
from typing import Literal

from recipe.microrepo import NoiseConfig, WorldConfig
from recipe.microrepo.task import check_hop_mix
from recipe.small.checks import check_ranges
from ref.mtp import MTPConfig
from ref.network import Config, RopeScaling
from ref.rl import Feedback, RewardCoefficients, Settings

__all__ = [
    "Context",
    "Data",
    "Evaluation",
    "Hints",
    "Memory",
    "Mtp",
    "RewardCoefficients",
    "Recipe",
    "Rl",
    "RuleName",
    "Sft",
    "Training",
]


@dataclass(frozen=True)
class Memory:
    """How often a scripted summary is not the shortest sufficient one. All zero: it always is."""

    wordy: float = 0.4
    """Probability of keeping what is not needed: other files, docstrings of helpers, facts that a passed test has
    settled."""
    forgetful: float = 0.1
    """Probability of leaving out a file that is needed; the agent then reads it again."""
    longest: int = 42
    """Most tokens in a wordy summary; a longer one is replaced by the shortest."""


@dataclass(frozen=True)
class Data:
    """Training data."""

    corpus: str | None = None
    """Folder of code; none means the source of the running Python's standard library."""
    vocab_size: int = 1024
    """Number of byte-level BPE tokens, including three special ones."""
    world_share: float = 0.75
    """Share of pretraining tokens from modules of the small world, the "internal codebase"."""
    heldout_share: float = 0.03
    """Target size of the held-out codebase, as a share of the corpus."""

    def __post_init__(self):
        check_ranges(self, least={"vocab_size": 260}, shares=("world_share", "heldout_share"))


@dataclass(frozen=True)
class Training:
    """Optimisation of the supervised phases."""

    tokens: int = 1_000_000
    """Tokens of the short-context phase."""
    length: int = 128
    """Context length of the short phase."""
    long_tokens: int = 300_000
    """Tokens of the long-context phase."""
    long_length: int = 256
    """Context length of the long phase and of the rolling perplexity window."""
    long_rope_theta: float = 0.0
    """Base of the rotary embedding from the long-context phase on; 0 keeps the network's."""
    long_yarn: float = 0.0
    """Factor by which YaRN stretches the rotary embedding from the long-context phase on; 0 does not."""
    batch_tokens: int = 4096
    """Tokens per optimiser step."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices and AdamW for the rest, or AdamW for everything."""
    muon_lr: float = 0.02
    """Learning rate of Muon: the spectral norm of an update."""
    adamw_lr: float = 3e-3
    """Learning rate of AdamW."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of training; master weights are float32."""
    threads: int = 2
    """Torch threads in training. Float32 sums depend on their number, so it is a setting of the run and overrides
    OMP_NUM_THREADS. Rollouts use one thread each, on all cores."""
    sampler_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the sampler's copy of the weights. On a CPU, float32 is faster, because the matrix products of a
    decoding step are small."""
    sampler_weights: Literal["full", "fp8"] = "full"
    """The sampler's weight matrices in RL: the same as in training (rounded to `dtype`), or FP8 E4M3 with one scale per
    output channel."""
    perplexity_every: int = 60
    """Steps between two measurements of codebase perplexity."""
    perplexity_tokens: int = 16_384
    """Tokens of the held-out codebase scored in each measurement; the final evaluation scores all."""

    def __post_init__(self):
        least_one = ("tokens", "long_tokens", "batch_tokens", "threads", "perplexity_every")
        least_two = ("length", "long_length", "perplexity_tokens")
        check_ranges(
            self,
            least={name: 1 for name in least_one}
            | {name: 2 for name in least_two}
            | {"long_rope_theta": 0, "long_yarn": 0},
        )

    def stretched(self, config: Config) -> Config:
        """The shape of the network from the long-context phase on."""
        if not (self.long_rope_theta or self.long_yarn):
            return config
        scaling = config.rope_scaling
        if self.long_yarn:
            scaling = RopeScaling(
                "yarn", self.long_yarn, original_max_position_embeddings=config.max_position_embeddings
            )
        longest = max(config.max_position_embeddings, self.long_length)
        return replace(
            config,
            rope_theta=self.long_rope_theta or config.rope_theta,
            rope_scaling=scaling,
            max_position_embeddings=longest,
        )


@dataclass(frozen=True)
class Context:
    """The agent's context. A task that outgrows one context continues in a new one, after the agent's own summary.
    Lengths in tokens."""

    join: Literal["self", "none"] = "self"
    """How contexts are joined: by self-summaries, or not at all, which leaves a single context of `rl.max_len`
    tokens."""
    trigger: int = 120
    """Length at which the agent must summarise, after the current turn and its tool output."""
    room: int = 28
    """Tokens by which that turn and its output may exceed the trigger."""
    longest_summary: int = 43
    """Maximum length of a summary, including its stop token."""
    max_segments: int = 2
    """Maximum number of contexts per rollout."""
    memory: Memory = field(default_factory=lambda: Memory(wordy=0.2, forgetful=0.05))
    """How imperfect the summaries in the SFT data are."""


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning, on imperfect demonstrations or on conversations."""

    conversations: str | None = None
    """JSONL file of conversations (`messages` with tool calls); none means demonstrations by the scripted agent."""
    demonstrations: int = 1400
    """Number of episodes by the scripted agent."""
    epochs: int = 5
    """Passes over the demonstrations."""
    depth_mix: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of tasks of depth 0, 1 and 2; depth 0 needs the least teaching."""
    hop_mix: tuple[float, ...] = (0.6, 0.4)
    """Shares of 1, 2, 3 … references among the multi-hop tasks. Less deep than those of RL (`world.hop_mix`), so that
    RL has something to find."""
    rows: int = 10
    """Packed rows of `training.long_length` tokens per optimiser step; a row holds about three episodes."""
    muon_lr: float = 0.005
    """Learning rate of Muon."""
    adamw_lr: float = 1e-3
    """Learning rate of AdamW."""
    lora: int = 0
    """Rank of low-rank adapters, which are trained in place of the weights (`ref/lora.py`), at full scale. 0: all
    weights are trained. Adapters are always trained by AdamW; a good rate is about ten times that for all weights."""
    noise: NoiseConfig = field(default_factory=lambda: NoiseConfig(wrong_body=0.25, invalid_call=0.15))
    """How imperfect the scripted agent is."""

    def __post_init__(self):
        check_ranges(
            self, least=dict.fromkeys(("demonstrations", "epochs", "rows"), 1) | {"lora": 0}, mixes=("depth_mix",)
        )
        check_hop_mix(self.hop_mix)


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction."""

    layers: MTPConfig = field(default_factory=MTPConfig)
    """Shape of the layers."""
    tokens: int = 400_000
    """Tokens of the first distillation, on a frozen trunk from the middle of CPT."""
    lr: float = 3e-3
    """Learning rate of AdamW in the first distillation and in the joint phases."""
    muon_lr: float = 0.02
    """Learning rate of Muon for the matrices of the MTP layers."""
    weight: float = 1.0
    """Weight of the distillation loss in the joint phases."""
    detach_trunk: bool = True
    """Whether the distillation loss leaves the trunk alone in the joint phases; false trains the trunk on it, too
    (`etude figure mtp` compares both)."""
    rl_every: int = 2
    """RL steps between two updates of the MTP layers."""

    def __post_init__(self):
        check_ranges(self, least={"tokens": 1, "rl_every": 1})


RuleName = Literal["tool", "argument", "unread", "summary", "unfinished", "untested", "needless"]
"""A rule of `recipe/small/hints.py`."""


@dataclass(frozen=True)
class Hints(Feedback):
    """Hints in the small world."""

    # What `Feedback` says of weight and divergence holds.
    rules: tuple[RuleName, ...] = ("tool", "argument", "unread", "needless")
    """Rules of `recipe/small/hints.py`: a message that breaks one is hinted at."""
    source: Literal["rules", "error", "shuffled", "bare"] = "rules"
    """What a hint says: what its rule says; the error with which the environment will answer (SDPO's setting, which
    needs no rules); as a control, what was said of a fault in another rollout, or nothing but `error`."""

    def __post_init__(self):
        super().__post_init__()
        if not self.rules or len(set(self.rules)) < len(self.rules):
            raise ValueError(f"rules must be different, and one at least, got {', '.join(self.rules) or 'none'}")


@dataclass(frozen=True)
class Rl(Settings):
    """Dr. GRPO in the small world. At lr = 1.5e-4 some policies unlearned testing; 1e-3 destroys the policy."""

    # What `Settings` says of these holds; only the defaults are others.
    payment: RewardCoefficients = field(default_factory=RewardCoefficients)
    replay: Literal["none", "plain", "filtered"] = "filtered"
    feedback: Hints = field(default_factory=Hints)
    max_turns: int = 10
    """Maximum number of turns in an episode."""
    later: float = 0.5
    """Share of the steps, at the end, that upsample harder tasks (report §4.1); earlier steps use the world's task
    mix."""
    upsampling: float = 1.0
    """Strength: tasks are kept in proportion to this power of the turns and tokens that their kind has needed so far; 0
    keeps all alike."""
    world: Literal["memory", "disk"] = "memory"
    """Where training episodes are played: in this process, or on files of Python in a sandbox, with pytest and the
    grader of real environments. Both say the same; disk takes a hundred times as long for an episode's tools, and needs
    Linux with bubblewrap."""
    gate: float = 0.10
    """Minimum sampled success after SFT. Below it the run stops, because the penalties would only teach the agent to
    give up at once. 0: no minimum."""

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, least={"max_turns": 1, "upsampling": 0}, shares=("later", "gate"))


@dataclass(frozen=True)
class Evaluation:
    """Held-out measurements."""

    tasks: int = 300
    """Held-out tasks."""
    samples: int = 8
    """Rollouts per task (best-of-8)."""
    hop_mix: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    """Shares of 1, 2, 3 … references among the multi-hop tasks; deeper than those of RL."""
    decode_tasks: int = 24
    """Tasks used to time speculative and plain decoding, at batch size 1."""
    decode_rounds: int = 5
    """How often each decoding method plays those tasks. Its speed is the median. 0: the stage decode is left out."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""

    def __post_init__(self):
        check_ranges(
            self, least={"decode_rounds": 0} | dict.fromkeys(("tasks", "samples", "decode_tasks", "resamples"), 1)
        )
        check_hop_mix(self.hop_mix)


@dataclass(frozen=True)
class Recipe:
    """The recipe, sized for two cores and ten minutes."""

    seed: int = 0
    """Seed of all random numbers."""
    data: Data = field(default_factory=Data)
    """Corpus, tokenizer and mix."""
    model: Config = field(default_factory=Config.tiny)
    """The network."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The small world."""
    training: Training = field(default_factory=Training)
    """Pretraining."""
    mtp: Mtp = field(default_factory=Mtp)
    """Multi-token prediction."""
    context: Context = field(default_factory=Context)
    """Contexts and self-summaries, starting with SFT."""
    sft: Sft = field(default_factory=Sft)
    """Supervised fine-tuning."""
    rl: Rl = field(default_factory=Rl)
    """Reinforcement learning."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Held-out measurements."""

    def __post_init__(self):
        if self.world.multi_hop_share and self.rl.feedback.weight:
            raise ValueError("rl.feedback.weight must be 0 with world.multi_hop_share: hints know compositions only")
