"""Tasks of the small world: a repository of 2-6 files with one function each, one of which has lost its body.

The agent only sees `repo m2 m3 m7 fix m3`; it must even read the docstring. At depth 0 the docstring says
everything. At depth 1 it refers to one helper and at depth 2 to two, whose bodies the agent must read and
inline, because a body may not call other files.

A multi-hop task is one of search: its docstring says `as m5`, that of m5 says `as m2`, and so on to a file with a body,
which is the target's, too. Writing it is copying it; what is hard is the way there. Its depth is the number of
references, MAX_HOPS at most.

A fifth of all *functions* is held out, not of all spellings: a hash of an expression's values at fixed points
assigns its side. In a held-out task, the target and every helper are held out; in a training task, no function
is, not even a distractor. An agent that solves held-out tasks has therefore composed, not memorised.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from random import Random
from typing import Literal, NamedTuple, get_args

from recipe.microrepo import evaluator
from recipe.microrepo.language import BINARY, Expression, combine, draw_first, draw_step, reference

__all__ = [
    "MAX_HOPS",
    "Case",
    "Kind",
    "Module",
    "Split",
    "Task",
    "WorldConfig",
    "check_hop_mix",
    "generate",
    "held_out",
]

Split = Literal["train", "heldout"]
Kind = Literal["composition", "multi-hop"]
N_VISIBLE, N_HIDDEN = 3, 32
NAMES = tuple(f"m{i}" for i in range(10))
SIGNATURES = (("a", "b"), ("a", "b", "c"))
MAX_HOPS = len(NAMES) - 2
"""References of a multi-hop task, at most: the target has a file of its own, and one file leads nowhere."""


def check_hop_mix(hop_mix: tuple[float, ...]) -> None:
    """Raises ValueError unless these are weights of 1, 2, 3 … references, as many as a task may have at most."""
    if not 1 <= len(hop_mix) <= MAX_HOPS or min(hop_mix) < 0 or sum(hop_mix) <= 0:
        raise ValueError(f"hop_mix must be 1 to {MAX_HOPS} non-negative weights, got {hop_mix}")


@dataclass(frozen=True)
class WorldConfig:
    """Shape of the tasks. Ranges are inclusive."""

    depth_mix: tuple[float, float, float] = (0.45, 0.35, 0.20)
    """Probabilities of depth 0, 1 and 2 of a composition, unless a depth is given."""
    files: tuple[int, int] = (2, 6)
    """Range of files per repository; a task that needs more has exactly as many as it needs."""
    operations: tuple[int, int] = (1, 3)
    """Range of operations in a depth 0 target and in a distractor."""
    helper_operations: tuple[int, int] = (1, 2)
    """Range of operations in a helper."""
    one_helper_steps: tuple[int, int] = (0, 2)
    """Range of steps that a depth 1 target adds to its helper."""
    two_helper_steps: tuple[int, int] = (0, 1)
    """Range of steps that a depth 2 target adds after joining its helpers."""
    digits: float = 0.5
    """Probability that a digit is one operand of a binary operation."""
    three_arguments: float = 0.5
    """Probability of the signature (a, b, c) instead of (a, b)."""
    multi_hop_share: float = 0.0
    """Probability that a task is a multi-hop task instead of a composition, unless a depth is given."""
    hop_mix: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    """Probabilities of 1, 2, 3 … references in a multi-hop task."""

    def __post_init__(self) -> None:
        if len(self.depth_mix) != 3 or min(self.depth_mix) < 0 or sum(self.depth_mix) <= 0:
            raise ValueError(f"depth_mix must be three non-negative weights, got {self.depth_mix}")
        check_hop_mix(self.hop_mix)
        bounds = {"files": (1, 10), "operations": (1, 4), "helper_operations": (1, 3)}
        bounds |= {"one_helper_steps": (0, 3), "two_helper_steps": (0, 3)}
        for name, (minimum, maximum) in bounds.items():
            low, high = getattr(self, name)
            if not minimum <= low <= high <= maximum:
                raise ValueError(f"{name} must be a range within {minimum}..{maximum}, got {(low, high)}")
        for name in ("digits", "three_arguments", "multi_hop_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, got {getattr(self, name)}")


class Module(NamedTuple):
    """One file: a function with the name of the file."""

    args: tuple[str, ...]
    doc: str
    """The docstring: a phrase of `recipe.microrepo.language`, or `as m5`, a reference."""
    expr: str
    """What the function returns, with helpers inlined; for the target this is the solution, which no session shows.
    Empty in a file without a body, which only refers to another."""

    @property
    def body(self) -> str | None:
        """The body that the file has, or None."""
        return f"return {self.expr}" if self.expr else None

    def source(self, name: str, body: str | None) -> str:
        """The text of the file, without a final newline; `body` is None if it is missing."""
        text = f'def {name}({", ".join(self.args)}):\n    """{self.doc}"""'
        return text if body is None else text + "".join(f"\n    {line}" for line in body.split("\n"))


class Case(NamedTuple):
    """One test: arguments and the expected value."""

    inputs: tuple[int, ...]
    want: int


@dataclass(frozen=True)
class Task:
    """A repository and the file to fix."""

    files: dict[str, Module]
    """All files by name, in the order of the prompt."""
    target: str
    """Name of the file whose body is missing."""
    depth: int
    """Number of helpers in the target's docstring; of a multi-hop task, number of references."""
    helpers: tuple[str, ...]
    """The files in the target's docstring, in its order; of a multi-hop task, the files that lead to the body, the
    nearest first."""
    kind: Kind = "composition"
    """What the target's docstring says: an expression, or where to look."""

    @property
    def prompt(self) -> str:
        """All that the agent sees at first: file names."""
        return f"repo {' '.join(self.files)} fix {self.target}"

    @property
    def answer(self) -> str:
        """A correct body."""
        return f"return {self.files[self.target].expr}"

    @cached_property
    def key(self) -> str:
        """Identifies prompt and contents, so a training run can refuse to reuse a task."""
        contents = (f"{name}({','.join(m.args)}) {m.doc}: {m.expr}" for name, m in self.files.items())
        return "\n".join((self.prompt, *contents))

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def _cases(self) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
        module = self.files[self.target]
        body, size = evaluator.parse(self.answer, module.args), len(module.args)
        rng = Random(blake2b(self.key.encode(), digest_size=8).digest())
        visible: dict[tuple[int, ...], None] = {}
        while len(visible) < N_VISIBLE:
            visible[tuple(rng.sample(range(10), size))] = None
        # Which inputs distinguish two functions? Near zero, small digits matter; mixed small numbers show signs
        # and halves; in `max(a * a, b)` one argument must be large where another is small.
        hidden = {(0, 0, 0)[:size]: None, (1, 1, 1)[:size]: None, (997, -501, 64)[:size]: None}
        for spreads, count in (((2,), 8), ((12,), 20), ((2, 12, 100, 1000), N_HIDDEN)):
            while len(hidden) < count:
                inputs = tuple(rng.randint(-spread, spread) for spread in rng.choices(spreads, k=size))
                if inputs not in visible:
                    hidden[inputs] = None
        visible_cases, hidden_cases = (
            tuple(Case(inputs, body.evaluate(inputs)) for inputs in group) for group in (visible, hidden)
        )
        return visible_cases, hidden_cases

    @property
    def visible_tests(self) -> tuple[Case, ...]:
        """The three tests that the agent may run: small arguments, all different within a test."""
        return self._cases[0]

    @property
    def hidden_tests(self) -> tuple[Case, ...]:
        """The 32 hidden tests that decide the reward."""
        return self._cases[1]


def held_out(expression: Expression) -> bool:
    """Whether the function of `expression` is in the held-out fifth; the same in every process."""
    digest = blake2b(repr(expression.values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 5 == 0


def _draw_between(rng: Random, bounds: tuple[int, int]) -> int:
    return bounds[0] + int(rng.random() * (bounds[1] - bounds[0] + 1))


def _extend(
    rng: Random, start: Expression | None, args: tuple[str, ...], count: int, config: WorldConfig
) -> Expression:
    """`start`, or a first operation if it is None, grown by random steps to `count` operations in total."""
    expression = start
    for _ in range(count):
        if expression is None:
            expression = draw_first(rng, args, config.digits)
        else:
            expression = draw_step(rng, expression, args, config.digits)
    assert expression is not None
    return expression


def _draw_expression(
    rng: Random, args: tuple[str, ...], bounds: tuple[int, int], is_held_out: bool | None, config: WorldConfig
) -> Expression:
    """A random expression on the given side of the split (None: either)."""
    count = _draw_between(rng, bounds)  # before any rejection: otherwise the sides would differ in length
    while True:
        expression = _extend(rng, None, args, count, config)
        if not expression.trivial and (is_held_out is None or held_out(expression) is is_held_out):
            return expression


def _draw_target(
    rng: Random,
    args: tuple[str, ...],
    helpers: dict[str, Expression],
    steps: int,
    is_held_out: bool,
    config: WorldConfig,
) -> Expression | None:
    """The target of a task with helpers, or None if these helpers seem to allow none."""
    mentions = [reference(name, helper) for name, helper in helpers.items()]
    for _ in range(50):
        start = mentions[0]
        if len(mentions) == 2:
            start = combine(BINARY[int(rng.random() * len(BINARY))], *mentions)
        expression = _extend(rng, start, args, steps, config)
        if not expression.trivial and held_out(expression) is is_held_out:
            return expression
    return None


def generate(rng: Random, split: Split, depth: int | None = None, config: WorldConfig | None = None) -> Task:
    """A random task of `split`; generators in equal states give equal tasks.

    Raises ValueError for an unknown split or depth."""
    config = config or WorldConfig()
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    if depth not in (None, 0, 1, 2):
        raise ValueError(f"depth must be 0, 1, 2 or None, got {depth!r}")
    is_held_out = split == "heldout"
    if depth is None and config.multi_hop_share and rng.random() < config.multi_hop_share:
        return _generate_multi_hop(rng, is_held_out, config)
    if depth is None:
        depth = rng.choices((0, 1, 2), config.depth_mix)[0]
    count = max(_draw_between(rng, config.files), depth + 1)
    target, *file_names = rng.sample(NAMES, count)
    args = SIGNATURES[rng.random() < config.three_arguments]
    steps = _draw_between(rng, config.one_helper_steps if depth == 1 else config.two_helper_steps)
    target_expression = None
    while target_expression is None:
        helper_expressions = (
            _draw_expression(rng, args, config.helper_operations, is_held_out, config) for _ in range(depth)
        )
        helpers = dict(zip(file_names, helper_expressions, strict=False))
        if depth:
            target_expression = _draw_target(rng, args, helpers, steps, is_held_out, config)
        else:
            target_expression = _draw_expression(rng, args, config.operations, is_held_out, config)
    modules = {target: Module(args, target_expression.phrase, target_expression.code)}
    modules |= {name: Module(args, e.phrase, e.code) for name, e in helpers.items()}
    modules |= {name: _draw_distractor(rng, is_held_out, config) for name in file_names[depth:]}
    return Task({name: modules[name] for name in sorted(modules)}, target, depth, tuple(helpers))


def _draw_distractor(rng: Random, is_held_out: bool, config: WorldConfig) -> Module:
    """A file that the task does not need."""
    args = SIGNATURES[rng.random() < config.three_arguments]
    expression = _draw_expression(rng, args, config.operations, None if is_held_out else False, config)
    return Module(args, expression.phrase, expression.code)


def _generate_multi_hop(rng: Random, is_held_out: bool, config: WorldConfig) -> Task:
    """A random task whose target refers to a file that refers to a file, and so on to one with a body."""
    hops = rng.choices(range(1, len(config.hop_mix) + 1), config.hop_mix)[0]
    count = max(_draw_between(rng, config.files), hops + 2)
    names = rng.sample(NAMES, count)
    target, *helpers = names[: hops + 1]
    args = SIGNATURES[rng.random() < config.three_arguments]
    expression = _draw_expression(rng, args, config.helper_operations, is_held_out, config)
    modules = {target: Module(args, f"as {helpers[0]}", expression.code)}
    modules |= {name: Module(args, f"as {reference}", "") for name, reference in zip(helpers, helpers[1:])}
    modules[helpers[-1]] = Module(args, expression.phrase, expression.code)
    modules |= {name: _draw_distractor(rng, is_held_out, config) for name in names[hops + 1 :]}
    return Task({name: modules[name] for name in sorted(modules)}, target, hops, tuple(helpers), "multi-hop")
