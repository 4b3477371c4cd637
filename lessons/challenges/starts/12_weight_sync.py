"""Challenge 12: the smallest delta.

Eight steps of Adam lie between two versions of bfloat16 weights. Each float32 master moved by a millionth or so, and
one weight in twenty-two has other bits, seven of eight of them by one number. How likely a weight is to change depends
on how large it is, and the decoder has the old version: it knows that too.

encode(old, new): the bits of 200,000 weights, uint16, twice; return bytes.
decode(old, delta): in another process, which knows the old bits and the bytes alone; return the new bits.

Score: bits sent per weight. Less is better. A single wrong bit is refused.
"""

import zlib

import numpy as np


def encode(old, new):
    """What is different, bit by bit, under zlib."""
    return zlib.compress((old ^ new).tobytes(), 9)


def decode(old, delta):
    """The reverse."""
    return old ^ np.frombuffer(zlib.decompress(delta), dtype=np.uint16)
