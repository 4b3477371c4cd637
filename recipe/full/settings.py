"""The settings of a full run: those of the small recipe, the tasks of packages, and the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from recipe.packages.settings import PackageSettings
from recipe.small.checks import check_ranges
from recipe.small.settings import Recipe, Training

__all__ = ["Cluster", "FullRecipe"]


@dataclass(frozen=True)
class Cluster:
    """What only a full run has: the ranks."""

    cp: int = 2
    """Ranks that split the tokens of each row."""
    long_cp: int = 8
    """The same in the long-context phase and in SFT."""
    rl_cp: int = 8
    """The same in RL."""
    ep: int = 8
    """Ranks that split the experts of each layer."""
    drafts: bool = True
    """Distil draft layers and train them along; without them the stages mtp and decode are left out."""
    agent_length: int = 0
    """Tokens of a packed row in SFT and RL; 0 takes `training.long_length`."""
    micro_rows: int = 1
    """Rows per dp rank in one forward pass."""
    rematerialise: bool = True
    """Recompute the activations of each block in the backward pass instead of keeping them."""
    dispatch: Literal["model", "fp8", "mxfp8"] = "model"
    """Format of tokens sent to their experts: the dtype of training, E4M3 with a scale per 128 values, or MXFP8 (per
    32), which is the report's."""
    experts: Literal["model", "mxfp8", "nvfp4-token"] = "model"
    """Format of the experts' products: the dtype of training, or quantised (then MXFP8 in the backward pass, as in the
    report)."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    timeout: float = 900.0
    """Seconds that a step may take before the run stops and names the hanging rank."""
    restarts: int = 3
    """Number of restarts after a rank dies."""

    def __post_init__(self):
        check_ranges(
            self,
            least=dict.fromkeys(("cp", "long_cp", "rl_cp", "ep", "micro_rows", "checkpoint_every", "timeout"), 1)
            | {"restarts": 0, "agent_length": 0},
        )


@dataclass(frozen=True)
class FullRecipe(Recipe):
    """The recipe on ranks: the settings of the small recipe, from which `model` and `data.vocab_size` are not used, and
    two more."""

    checkpoint: str | None = None
    """Hugging Face folder to start from: weights, tokenizer and shape of the network."""
    tasks: PackageSettings = field(default_factory=PackageSettings)
    """Tasks of real packages, in place of the small world."""
    cluster: Cluster = field(default_factory=Cluster)
    """The ranks."""

    @classmethod
    def rehearsal(cls) -> FullRecipe:
        """The same on CPUs."""
        ranks = Cluster(
            cp=1, long_cp=1, rl_cp=1, ep=1, micro_rows=32, rematerialise=False, checkpoint_every=10, timeout=120.0
        )
        return cls(cluster=ranks, training=Training(dtype="float32"))

    @property
    def agent_length(self) -> int:
        """Tokens of a packed row in SFT and RL."""
        return self.cluster.agent_length or self.training.long_length

    @property
    def on_packages(self) -> bool:
        """Whether the agent works on real packages."""
        return self.tasks.recipes is not None

    @property
    def has_pretraining(self) -> bool:
        """Whether the network is pretrained on: not for packages without a corpus."""
        return not self.on_packages or self.data.corpus is not None

    @property
    def has_drafts(self) -> bool:
        """Whether draft layers are distilled and trained along."""
        return self.cluster.drafts and self.has_pretraining

    @property
    def small(self) -> Recipe:
        """The settings that the small recipe has, too."""
        return Recipe(**{setting.name: getattr(self, setting.name) for setting in fields(Recipe)})
