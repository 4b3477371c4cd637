"""An agent's turns with an environment, decoded at batch 1 (`ref/engine/decoder.py`).

What `ref/engine/sampler.py` does for many conversations at a time, `converse` does for one, as fast as it goes. The
environment can be forked (report §6.2: snapshot and fork), and so a turn need not wait for the proof of its
last tokens: it is carried out, and the pass that reads the answer verifies the turn too. That saves a pass a
turn. Where the turn falls, the answer is dropped and the fork takes the environment's place.
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
        """A copy that lives on by itself."""
        ...


F = TypeVar("F", bound=Forkable)


def converse(decoder: Decoder, conversation: F, max_new: int | None = None, ahead: bool = True) -> F:
    """Play a conversation from its prompt to its end, to a turn of `max_new` tokens that does not stop, or to
    the decoder's max_len; `decoder.tokens` then holds the context. `ahead`: see `Decoder.generate`; where a
    turn is taken back, so is the answer to it. Returns the conversation as it ended: the one given, or a fork
    of it."""
    stop, forks = conversation.stop, []
    decoder.reset()
    decoder.feed(conversation.prompt)
    turn = decoder.generate(stop, max_new, ahead)
    while turn[-1:] == [stop]:
        # One fork for each turn that may be taken back, as it was before the turn.
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
