"""Challenge 8: experts that came from another place.

A sampler records which two of sixteen experts each token took, and the trainer replays them. Where both engines merely
round differently, the record is right although the trainer would choose otherwise. Where the record slipped by one
token, replaying it trains the wrong experts. In half of the sequences it slips somewhere, for a while or until the end.

slipped(scores, experts): the trainer's router scores of a sequence, [96, 16], and the recorded experts, [96, 2]; return
1 for each token whose experts came from the token before it, else 0. Neighbours have similar scores, more so in some
sequences, and how far the engines are apart differs, too.

Score: F1 over all tokens of 80 sequences. A slipped token that by chance has its own experts does not count as one.
More is better."""

import numpy as np


def slipped(scores, experts):
    """Whatever the trainer would not choose."""
    own = np.sort(np.argsort(-scores, 1)[:, :2], 1)
    return (own != experts).any(1).astype(int)
