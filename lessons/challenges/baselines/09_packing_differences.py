"""Karmarkar and Karp's differencing for many ranks: the two most uneven partial deals are joined, fullest with
emptiest."""

import heapq


def deal(costs, ranks):
    heap = []
    for i, cost in enumerate(costs):
        loads = [(0.0, ())] * (ranks - 1) + [(float(cost), (i,))]
        heap.append((-float(cost), i, loads))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted((a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second)))
        least = joined[0][0]
        number += 1
        heapq.heappush(heap, (least - joined[-1][0], number, [(load - least, sequences) for load, sequences in joined]))
    rank_of = [0] * len(costs)
    for rank, (_, sequences) in enumerate(heap[0][2]):
        for i in sequences:
            rank_of[i] = rank
    return rank_of
