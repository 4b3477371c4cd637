"""Rank 0 hears the logsumexps as float16 and the sum of the targets' logits, and tells the others the loss."""

import struct

import numpy as np


def talk(rank, ranks, logits, targets, inbox):
    own = targets // logits.shape[1] == rank
    hit = float(logits[own, targets[own] % logits.shape[1]].astype(np.float64).sum())
    logsumexps = np.logaddexp.reduce(logits.astype(np.float64), 1)
    if rank:
        if not inbox:
            return {"0": struct.pack("<f", hit) + logsumexps.astype(np.float16).tobytes()}
        return struct.unpack("<f", inbox[-1]["0"])[0] if inbox[-1] else {}
    if not inbox:
        return {}
    if len(inbox) == 1:
        every, hits = [logsumexps], hit
        for message in inbox[0].values():
            hits += struct.unpack_from("<f", message)[0]
            every.append(np.frombuffer(message, dtype=np.float16, offset=4).astype(np.float64))
        loss = float((np.logaddexp.reduce(every).sum() - hits) / len(targets))
        return {str(receiver): struct.pack("<f", loss) for receiver in range(1, ranks)}
    every, hits = [logsumexps], hit
    for message in inbox[0].values():
        hits += struct.unpack_from("<f", message)[0]
        every.append(np.frombuffer(message, dtype=np.float16, offset=4).astype(np.float64))
    return float((np.logaddexp.reduce(every).sum() - hits) / len(targets))
