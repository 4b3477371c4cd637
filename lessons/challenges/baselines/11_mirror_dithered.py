"""Rank 0 hears each logsumexp in a byte, rounded up or down by a shared random number, so that errors cancel in the
mean."""

import struct

import numpy as np


def draw_shifts(rank, count):
    return np.random.default_rng(rank).uniform(0, 1, count)


def decode_message(message, rank, count):
    """A rank's sum of target logits, and its logsumexps."""
    hit, low, step = struct.unpack_from("<ffe", message)
    codes = np.frombuffer(message, dtype=np.uint8, offset=10)
    return hit, low + step * (codes - draw_shifts(rank, count) + 0.5)


def talk(rank, ranks, logits, targets, inbox):
    count, own = len(targets), targets // logits.shape[1] == rank
    hit = float(logits[own, targets[own] % logits.shape[1]].astype(np.float64).sum())
    logsumexps = np.logaddexp.reduce(logits.astype(np.float64), 1)
    if rank:
        if not inbox:
            low = float(np.float32(logsumexps.min()))
            step = float(np.float16((logsumexps.max() - low) / 254))
            codes = np.clip(np.floor((logsumexps - low) / step + draw_shifts(rank, count)), 0, 255).astype(np.uint8)
            return {"0": struct.pack("<ffe", hit, low, step) + codes.tobytes()}
        return struct.unpack("<f", inbox[-1]["0"])[0] if inbox[-1] else {}
    if not inbox:
        return {}
    every = [decode_message(message, int(sender), count) for sender, message in inbox[0].items()]
    loss = float(
        (np.logaddexp.reduce([logsumexps, *(part[1] for part in every)]).sum() - hit - sum(part[0] for part in every))
        / count
    )
    return {str(receiver): struct.pack("<f", loss) for receiver in range(1, ranks)} if len(inbox) == 1 else loss
