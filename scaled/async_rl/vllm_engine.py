"""vLLM as the engine of a worker: `ref.engine.sampler.Engine`, and weights that follow the store (`player.Follows`).

    pip install -e '.[vllm]'                             in an environment of its own; `make test-vllm` makes one
    pip uninstall torchvision torchaudio torchcodec      which vLLM pulls in and does not need here

A turn of a conversation is a request. What the context already holds lies in vLLM's prefix cache. vLLM decodes in a
process of its own, which a thread listens to here, so a player's step takes what has happened and never waits for a
turn.

New weights come while requests run. vLLM stops between two steps and keeps its requests; it is given the new tensors,
reads back what it computes with (`vllm_weights.py`), and goes on only if the sums are the trainer's. Each token has the
version of the step that sampled it, and its log-probability under the distribution that it was drawn from, old keys and
values included.

Where this differs from this project's engine
1. Random numbers are vLLM's. A turn has a seed of its own, drawn from the conversation's; but vLLM's products round
   differently in other batches.
2. Keys and values of a prompt are shared by contexts that began under the same version.
3. Nobody records which experts a token was routed to, so only dense networks are played. Mixtures of experts fail the
   check on a CPU anyway.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import queue
import tempfile
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kit.settings import RunError
from ref import weight_sync
from ref.engine.sampler import SampledTurn, Segment, check_context, check_state, check_temperature, check_tokens
from ref.network import Transformer
from ref.network.checkpoint import write_config
from scaled.runtime.store import StoreError

__all__ = ["VLLM", "installed", "total"]

T = TypeVar("T")

INSTALL = "in an environment of its own: pip install -e '.[vllm]'"
CLEAN = "if torchvision, torchaudio or torchcodec is at fault: pip uninstall torchvision torchaudio torchcodec"
OWNER = "ETUDE_VLLM_OWNER"
"""Variable with the process whose end is that of vLLM's processes."""
NOTICE = 0.01
"""Seconds that a step waits for a turn to end."""


def installed() -> None:
    """Raises RunError if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise RunError(f"--engine vllm needs vLLM, {INSTALL}")


class VLLM:
    """`model`: the shape of the network; its weights come from the store at `address`, where this reader is called
    `name`. `slots`, `max_len`, `temperature`, `cache`: as for `ref.engine.continuous.Continuous`. Raises RunError if
    vLLM is not installed or does not start, and for a mixture of experts."""

    def __init__(
        self,
        model: Transformer,
        address: str,
        name: str,
        slots: int,
        max_len: int,
        temperature: float = 1.0,
        cache: Literal["keep", "recompute"] = "keep",
    ):
        check_temperature(temperature)
        self.config, self.max_len, self.temperature, self.cache = model.config, max_len, temperature, cache
        self.state: list[Literal["free", "ready", "over"]] = ["free"] * slots
        self.full: list[int] = []
        self.contexts: dict[int, Context] = {}
        self.finished_turns, self.version, self.sums, self.serial = (
            queue.SimpleQueue[tuple[Context, Any]](),
            -1,
            "",
            itertools.count(),
        )
        self.fetched_version = -1
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm: Any = self.call(self.start(slots))
        shapes = {part.name: list(part.shape) for part in weight_sync.parts(model)}
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.call(
            self.llm.init_weight_transfer_engine(
                WeightTransferInitRequest({"store": address, "name": name, "shapes": shapes})
            )
        )

    async def start(self, slots: int) -> Any:
        """vLLM with weights of no meaning."""
        # One thread a worker, like our engine; no news to anybody, no lines about what is normal.
        for name, value in {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ[OWNER] = str(os.getpid())
        installed()
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except Exception as error:  # torchvision, which it pulls in, may raise anything beside another torch
            raise RunError(
                f"vLLM cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}; {CLEAN}"
            ) from None
        c = self.config
        blocks = slots * (self.max_len // 256 + 1) + 1
        # Keys and values of all contexts, in bfloat16.
        cache_bytes = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 256 * blocks
        with tempfile.TemporaryDirectory(prefix="etude-") as folder:
            shape = replace(c, max_position_embeddings=max(c.max_position_embeddings, self.max_len))
            Path(folder, "config.json").write_text(write_config(asdict(shape), torch.bfloat16))
            settings = AsyncEngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype="bfloat16",
                max_model_len=self.max_len,
                max_num_seqs=slots,
                kv_cache_memory_bytes=cache_bytes,
                enable_prefix_caching=True,
                enforce_eager=not torch.cuda.is_available(),
                logprobs_mode="processed_logprobs",
                async_scheduling=False,
                weight_transfer_config={"backend": "etude"},
                worker_extension_cls="scaled.async_rl.vllm_weights.Extension",
                disable_log_stats=True,
            )
            try:
                return AsyncLLM.from_engine_args(settings)
            except Exception as error:
                raise RunError(f"vLLM does not start: {type(error).__name__}: {' '.join(str(error).split())}") from None

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """Ends vLLM, for which Python would wait at its end; nothing may be asked of it afterwards."""
        self.llm.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)

    # Slots.

    in_waves = False

    @property
    def free_slots(self) -> int:
        return self.state.count("free")

    @property
    def is_idle(self) -> bool:
        return not self.full and "ready" not in self.state

    def add(
        self,
        prompt: Sequence[int],
        stop_ids: Collection[int],
        draws: Tensor | None = None,
        longest_turn: int | None = None,
    ) -> int:
        """`draws` only give the seeds of the turns."""
        check_context(self, prompt, draws, self.config.vocab_size, self.temperature)
        slot = self.state.index("free")
        self.contexts[slot] = Context(slot, stop_ids, draws, longest_turn, str(self.version))
        self.give(slot, prompt)
        return slot

    def extend(self, slot: int, tokens: Sequence[int], longest_turn: int | None = None) -> None:
        check_state(self.state, slot, "over")
        check_tokens("answer", tokens, self.config.vocab_size)
        self.contexts[slot].longest_turn = longest_turn
        self.give(slot, tokens)

    def turn(self, slot: int) -> SampledTurn | None:
        check_state(self.state, slot, "over")
        context = self.contexts[slot]
        turn_tokens = context.tokens[context.begin :]
        if turn_tokens and turn_tokens[-1] in context.stop_ids and context.versions[-1] >= 0:
            return SampledTurn(turn_tokens[:-1], turn_tokens[-1])
        return None if len(context.tokens) == self.max_len else SampledTurn(turn_tokens, None)

    def remove(self, slot: int, finished: bool = True) -> Segment:
        """A turn that is under way is given up, and no part of what is returned."""
        if self.state[slot] == "free":
            raise ValueError(f"slot {slot} is free")
        context, self.state[slot] = self.contexts.pop(slot), "free"
        self.full = [full_slot for full_slot in self.full if full_slot != slot]
        if context.request is not None:
            context.request.cancel()
        version = torch.tensor(context.versions)
        experts = torch.zeros(len(version) - 1, 0, self.config.num_experts_per_tok, dtype=torch.int16)
        return Segment(
            torch.tensor(context.tokens), version >= 0, torch.tensor(context.logp), version, experts, finished
        )

    def step(self) -> list[int]:
        """Slots whose turn is over since the last step, or whose context is full. Waits for a moment if there is
        none."""
        finished_slots, self.full = self.full, []
        wait = NOTICE if "ready" in self.state and not finished_slots else 0.0
        while True:
            try:
                context, result = self.finished_turns.get(timeout=wait) if wait else self.finished_turns.get_nowait()
            except queue.Empty:
                return finished_slots
            wait = 0.0
            if self.contexts.get(context.slot) is not context:
                continue  # it has left meanwhile
            if isinstance(result, BaseException):
                raise result
            context.take(result, self.temperature)
            self.state[context.slot] = "over"
            finished_slots.append(context.slot)

    def give(self, slot: int, tokens: Sequence[int]) -> None:
        context = self.contexts[slot]
        context.append_given(tokens[: self.max_len - len(context.tokens)])
        if len(context.tokens) < self.max_len:
            self.state[slot] = "ready"
            context.request = asyncio.run_coroutine_threadsafe(self.sample_turn(context), self.loop)
        else:
            self.state[slot] = "over"
            self.full.append(slot)

    async def sample_turn(self, context: Context) -> None:
        """One turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begin = context.begin
        params = SamplingParams(
            temperature=self.temperature,
            seed=int(context.draws[begin].item() * 2**53) if context.draws is not None else None,
            max_tokens=min(self.max_len - begin, context.longest_turn or self.max_len),
            stop_token_ids=[*context.stop_ids],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps contexts apart that began under other versions: else keys could be older than the bound on age
        # allows.
        prompt = {"prompt_token_ids": list(context.tokens), "cache_salt": context.salt}
        try:
            output = None
            async for output in self.llm.generate(prompt, params, f"{context.slot}-{next(self.serial)}"):
                pass
            assert output is not None
            self.finished_turns.put((context, output.outputs[0]))
        except Exception as error:
            self.finished_turns.put((context, error))

    # Weights.

    def fetch(self, want: int) -> None:
        """`player.Follows`."""
        kind, message = self.call(self.build(want))
        if kind == "store":
            raise StoreError(message)
        if kind:
            raise weight_sync.SyncError(message) if kind == "SyncError" else RuntimeError(f"{kind}: {message}")
        self.fetched_version = want

    async def build(self, want: int) -> tuple[str, str]:
        await self.llm.collective_rpc("build_version", args=(want,))
        while (status := (await self.llm.collective_rpc("built_version"))[0]) is None:
            await asyncio.sleep(0.02)
        return status

    def anew(self) -> None:
        """`player.Follows`; the reader forgets by itself what it could not read."""

    def swap(self) -> dict[str, float | str]:
        """`player.Follows`; the sum of what serves is told as well. Raises RunError if that is not the trainer's."""
        self.sums = self.call(self.exchange(self.fetched_version))
        self.version = self.fetched_version
        return {"version": self.version, "sums": self.sums}

    async def exchange(self, version: int) -> str:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.pause_generation(mode="keep", clear_cache=self.cache == "recompute")
        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest({"version": version}))
        await self.llm.finish_weight_update(str(version))
        ((served_sums, trainer_sums),) = await self.llm.collective_rpc("served_sums")
        if different_names := [name for name, value in trainer_sums.items() if served_sums.get(name) != value]:
            raise RunError(
                f"--engine vllm cannot serve this network: of version {version}, {len(different_names)} of "
                f"{len(trainer_sums)} tensors are not the trainer's once "
                f"loaded, the first is {different_names[0]}{EXPERTS_NOTE if self.config.num_experts else ''}; use "
                "--engine own"
            )
        if self.config.num_experts:
            raise RunError(
                "--engine vllm does not tell which experts its tokens were routed to, and the trainer "
                "replays them; use --engine own"
            )
        await self.llm.resume_generation()
        return total(served_sums)


EXPERTS_NOTE = " (on a CPU vLLM lays experts out once, when it starts, and reads later ones in the wrong order)"


class Context:
    """One context of a conversation, as far as it is known."""

    def __init__(self, slot: int, stop_ids: Collection[int], draws: Tensor | None, longest_turn: int | None, salt: str):
        self.slot, self.stop_ids, self.draws, self.longest_turn, self.salt = slot, stop_ids, draws, longest_turn, salt
        self.tokens: list[int] = []
        self.logp: list[float] = []
        self.versions: list[int] = []
        self.begin = 0
        self.request: Any = None

    def append_given(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.begin = len(self.tokens)

    def take(self, completion: Any, temperature: float) -> None:
        """A turn: vLLM's `CompletionOutput`."""
        self.request = None
        spans = [(int(span.version), span.end - span.start) for span in completion.weight_versions]
        tokens, versions = list(completion.token_ids), [version for version, count in spans for _ in range(count)]
        assert len(tokens) == len(versions) == len(completion.logprobs)
        self.tokens += tokens
        self.versions += versions
        # As everywhere here, a greedy token has probability one.
        self.logp += [
            row[token].logprob if temperature else 0.0 for row, token in zip(completion.logprobs, tokens, strict=True)
        ]


def total(sums: Mapping[str, str]) -> str:
    """One digest of the digests of all tensors."""
    return weight_sync.hashed(repr(sorted(sums.items())).encode())
