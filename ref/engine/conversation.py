"""An agent's turns with an environment, decoded at batch 1 (`ref/engine/decoder.py`).

`ref/engine/sampler.py` runs many conversations at a time; `converse` runs one, as fast as possible. The
environment can be forked (report §6.2: snapshot and fork), so a turn does not have to wait until its last tokens
are verified: it is carried out, and the pass that reads the answer also verifies the turn. That saves one pass
per turn. If the turn is rejected, the answer is dropped and the fork replaces the environment.
"""

from typing import Protocol, TypeVar, runtime_checkable

from ref.engine.decoder import Decoder
from ref.engine.sampler import Conversation

__all__ = ["Forkable", "converse"]

Me = TypeVar("Me")


@runtime_checkable
class Forkable(Conversation, Protocol):
    """The other side of a rollout, in tokens, that can be forked as well."""

    def fork(self: Me) -> Me:
        """A copy that continues independently."""
        ...


F = TypeVar("F", bound=Forkable)


def converse(decoder: Decoder, conversation: F, max_new: int | None = None, ahead: bool = True) -> F:
    """Run a conversation from its prompt to its end, to a turn of `max_new` tokens without a stop token, or to
    the decoder's max_len; `decoder.tokens` then holds the context. `ahead`: see `Decoder.generate`; if a turn is
    taken back, its answer is too. Returns the conversation in its final state: the one given, or a fork of it."""
    stop, forks = conversation.stop, []
    decoder.reset()
    decoder.feed(conversation.prompt)
    turn = decoder.generate(stop, max_new, ahead)
    while turn[-1:] == [stop]:
        # One fork for each turn that may be taken back, made before the turn was carried out.
        forks = [*forks[: len(decoder.pending) - 1], conversation.fork()] if decoder.pending else []
        answer = conversation.reply(turn[:-1])
        if answer is None:
            turn = decoder.generate(stop, 0)
        else:
            decoder.feed(answer[: decoder.max_len - decoder.length])
            turn = decoder.generate(stop, max_new, ahead)
        if decoder.retracted:
            conversation = forks[-decoder.retracted]
    return conversation
