"""vLLM as the engine of a worker: `player.Seats`, and weights that follow the store (`player.Follows`).

    pip install -e '.[vllm]'                             in an environment of its own; `make test-vllm` makes one
    pip uninstall torchvision torchaudio torchcodec      which vLLM pulls in and does not need here

A turn of a conversation is a request. What the context already holds lies in vLLM's prefix cache. vLLM decodes in a process of its own, which a
thread listens to here, so a player's step takes what has happened and never waits for a turn.

New weights come while requests run. vLLM stops between two steps and keeps its requests; it is given the new tensors, reads back what it computes
with (`vllm_weights.py`), and goes on only if the sums are the trainer's. Each token has the version of the step that sampled it, and its
log-probability under the distribution that it was drawn from, old keys and values included.

Where this differs from this project's engine
1. Random numbers are vLLM's. A turn has a seed of its own, drawn from the conversation's; but vLLM's products round differently in other batches.
2. Keys and values of a prompt are shared by contexts that began under the same version.
3. Nobody records which experts a token was routed to, so only dense networks are played. Mixtures of experts fail the check on a CPU anyway.
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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kit.settings import RunError
from ref import weight_sync
from ref.engine.sampler import Rollout, check_temperature, check_tokens
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
    """`model`: the shape of the network; its weights come from the store at `address`, where this reader is called `name`. `slots`, `max_len`,
    `temperature`, `cache`: as for `ref.engine.continuous.Engine`. Raises RunError if vLLM is not installed or does not start, and for a mixture of
    experts."""

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
        self.over, self.serving, self.sums, self.serial = queue.SimpleQueue[tuple[Context, Any]](), -1, "", itertools.count()
        self.fetched = -1
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm: Any = self.call(self.start(slots))
        shapes = {part.name: list(part.shape) for part in weight_sync.parts(model)}
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.call(self.llm.init_weight_transfer_engine(WeightTransferInitRequest({"store": address, "name": name, "shapes": shapes})))

    async def start(self, slots: int) -> Any:
        """vLLM with weights of no meaning."""
        # One thread a worker, like our engine; no news to anybody, no lines about what is normal.
        for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ[OWNER] = str(os.getpid())
        installed()
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except Exception as error:  # torchvision, which it pulls in, may raise anything beside another torch
            raise RunError(f"vLLM cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}; {CLEAN}") from None
        c = self.config
        blocks = slots * (self.max_len // 256 + 1) + 1
        room = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 256 * blocks  # keys and values of all contexts, in bfloat16
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
                kv_cache_memory_bytes=room,
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

    def call(self, waited: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(waited, self.loop).result()

    def close(self) -> None:
        """Ends vLLM, for which Python would wait at its end; nothing may be asked of it afterwards."""
        self.llm.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)

    # Seats.

    @property
    def free(self) -> int:
        return self.state.count("free")

    def join(self, prompt: Sequence[int], stop: int, draws: Tensor) -> int:
        """`draws` only give the seeds of the turns."""
        check_tokens("prompt", prompt, self.config.vocab_size, least=1)
        if not self.free:
            raise ValueError(f"all {len(self.state)} seats are taken: `leave` one first")
        seat = self.state.index("free")
        self.contexts[seat] = Context(seat, stop, draws, str(self.serving))
        self.give(seat, prompt)
        return seat

    def answer(self, seat: int, tokens: Sequence[int]) -> None:
        self.must(seat, "over")
        check_tokens("answer", tokens, self.config.vocab_size)
        self.give(seat, tokens)

    def turn(self, seat: int) -> list[int] | None:
        self.must(seat, "over")
        context = self.contexts[seat]
        own = context.tokens[context.begin :]
        return own[:-1] if own and own[-1] == context.stop and context.version[-1] >= 0 else None

    def leave(self, seat: int, finished: bool = True) -> Rollout:
        """A turn that is under way is given up, and no part of what is returned."""
        if self.state[seat] == "free":
            raise ValueError(f"seat {seat} is free")
        context, self.state[seat] = self.contexts.pop(seat), "free"
        self.full = [one for one in self.full if one != seat]
        if context.request is not None:
            context.request.cancel()
        version = torch.tensor(context.version)
        experts = torch.zeros(len(version) - 1, 0, self.config.num_experts_per_tok, dtype=torch.int16)
        return Rollout(torch.tensor(context.tokens), version >= 0, torch.tensor(context.logp), version, experts, finished)

    def step(self) -> list[int]:
        """Seats whose turn is over since the last step, or whose context is full. Waits for a moment if there is none."""
        over, self.full = self.full, []
        wait = NOTICE if "ready" in self.state and not over else 0.0
        while True:
            try:
                context, found = self.over.get(timeout=wait) if wait else self.over.get_nowait()
            except queue.Empty:
                return over
            wait = 0.0
            if self.contexts.get(context.seat) is not context:
                continue  # it has left meanwhile
            if isinstance(found, BaseException):
                raise found
            context.take(found, self.temperature)
            self.state[context.seat] = "over"
            over.append(context.seat)

    def give(self, seat: int, tokens: Sequence[int]) -> None:
        context = self.contexts[seat]
        context.given(tokens[: self.max_len - len(context.tokens)])
        if len(context.tokens) < self.max_len:
            self.state[seat] = "ready"
            context.request = asyncio.run_coroutine_threadsafe(self.speak(context), self.loop)
        else:
            self.state[seat] = "over"
            self.full.append(seat)

    async def speak(self, context: Context) -> None:
        """One turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begin = context.begin
        how = SamplingParams(
            temperature=self.temperature,
            seed=int(context.draws[begin].item() * 2**53) if self.temperature else None,
            max_tokens=self.max_len - begin,
            stop_token_ids=[context.stop],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps contexts apart that began under other versions: else keys could be older than the bound on age allows.
        prompt = {"prompt_token_ids": list(context.tokens), "cache_salt": context.salt}
        try:
            found = None
            async for found in self.llm.generate(prompt, how, f"{context.seat}-{next(self.serial)}"):
                pass
            assert found is not None
            self.over.put((context, found.outputs[0]))
        except Exception as error:
            self.over.put((context, error))

    def must(self, seat: int, state: str) -> None:
        if self.state[seat] != state:
            raise ValueError(f"seat {seat} is {self.state[seat]}, not {state}")

    # Weights.

    def fetch(self, want: int) -> None:
        """`player.Follows`."""
        kind, said = self.call(self.build(want))
        if kind == "store":
            raise StoreError(said)
        if kind:
            raise weight_sync.SyncError(said) if kind == "SyncError" else RuntimeError(f"{kind}: {said}")
        self.fetched = want

    async def build(self, want: int) -> tuple[str, str]:
        await self.llm.collective_rpc("build_version", args=(want,))
        while (told := (await self.llm.collective_rpc("built_version"))[0]) is None:
            await asyncio.sleep(0.02)
        return told

    def anew(self) -> None:
        """`player.Follows`; the reader forgets by itself what it could not read."""

    def swap(self) -> dict[str, float | str]:
        """`player.Follows`; the sum of what serves is told as well. Raises RunError if that is not the trainer's."""
        self.sums = self.call(self.exchange(self.fetched))
        self.serving = self.fetched
        return {"version": self.serving, "sums": self.sums}

    async def exchange(self, version: int) -> str:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.pause_generation(mode="keep", clear_cache=self.cache == "recompute")
        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest({"version": version}))
        await self.llm.finish_weight_update(str(version))
        ((serves, wanted),) = await self.llm.collective_rpc("served_sums")
        if wrong := [name for name, value in wanted.items() if serves.get(name) != value]:
            raise RunError(
                f"--engine vllm cannot serve this network: of version {version}, {len(wrong)} of {len(wanted)} tensors are not the trainer's once "
                f"loaded, the first is {wrong[0]}{WHY if self.config.num_experts else ''}; use --engine own"
            )
        if self.config.num_experts:
            raise RunError("--engine vllm does not tell which experts its tokens were routed to, and the trainer replays them; use --engine own")
        await self.llm.resume_generation()
        return total(serves)


WHY = " (on a CPU vLLM lays experts out once, when it starts, and reads later ones in the wrong order)"


class Context:
    """One context of a conversation, as far as it is known."""

    def __init__(self, seat: int, stop: int, draws: Tensor, salt: str):
        self.seat, self.stop, self.draws, self.salt = seat, stop, draws, salt
        self.tokens: list[int] = []
        self.logp: list[float] = []
        self.version: list[int] = []
        self.begin = 0
        self.request: Any = None

    def given(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.version += [-1] * len(tokens)
        self.begin = len(self.tokens)

    def take(self, found: Any, temperature: float) -> None:
        """A turn: vLLM's `CompletionOutput`."""
        self.request = None
        spans = [(int(span.version), span.end - span.start) for span in found.weight_versions]
        tokens, versions = list(found.token_ids), [version for version, count in spans for _ in range(count)]
        assert len(tokens) == len(versions) == len(found.logprobs)
        self.tokens += tokens
        self.version += versions
        # As everywhere here, a greedy token has probability one.
        self.logp += [row[token].logprob if temperature else 0.0 for row, token in zip(found.logprobs, tokens, strict=True)]


def total(sums: Mapping[str, str]) -> str:
    """One digest of the digests of all tensors."""
    return weight_sync.hashed(repr(sorted(sums.items())).encode())
