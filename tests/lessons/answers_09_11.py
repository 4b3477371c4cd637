"""Answers to the exercises of lessons 9 to 11, by lesson and exercise; `answers.py` says how they are written and
read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["09_packing"] = {
    1: """
# wrong: the least cost of all
def bound(costs, rank_of, ranks):
    return float(costs.sum() / ranks + (1 - 1 / ranks) * costs.min())

# wrong: the whole of the last cost
def bound(costs, rank_of, ranks):
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    return float(loads.mean() + costs[rank_of == loads.argmax()].min())

# wrong: the largest cost of the fullest rank
def bound(costs, rank_of, ranks):
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    return float(loads.mean() + (1 - 1 / ranks) * costs[rank_of == loads.argmax()].max())

# wrong: the emptiest rank
def bound(costs, rank_of, ranks):
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    return float(loads.mean() + (1 - 1 / ranks) * costs[rank_of == loads.argmin()].min())

# right: plain Python
def bound(costs, rank_of, ranks):
    dealt = [[cost for cost, owner in zip(costs.tolist(), rank_of.tolist()) if owner == rank] for rank in range(ranks)]
    return costs.sum().item() / ranks + (1 - 1 / ranks) * min(max(dealt, key=sum))
""",
    2: """
# wrong: a lower bound
def best(costs, ranks):
    return max(costs.sum().item() / ranks, costs.max().item())

# wrong: what the rule makes
def best(costs, ranks):
    return packing.imbalance(costs, packing.balance(costs, ranks), ranks) * costs.sum().item() / ranks

# wrong: the least that any rank can have
def best(costs, ranks):
    ways = torch.tensor(list(itertools.product(range(ranks), repeat=len(costs))))
    loads = torch.stack([(costs * (ways == rank)).sum(1) for rank in range(ranks)])
    return loads.amin(0).max().item()

# right: plain Python
def best(costs, ranks):
    costs, least = costs.tolist(), float("inf")
    for way in itertools.product(range(ranks), repeat=len(costs)):
        loads = [0.0] * ranks
        for cost, rank in zip(costs, way):
            loads[rank] += cost
        least = min(least, max(loads))
    return least
""",
    3: """
# wrong: chunks of equal work
def pairs(T, chunks):
    return [T * (T + 1) // 2 // chunks] * chunks

# wrong: without the token itself
def pairs(T, chunks):
    size = T // chunks
    return [sum(range(c * size, (c + 1) * size)) for c in range(chunks)]

# wrong: whole rectangles
def pairs(T, chunks):
    size = T // chunks
    return [size * (c + 1) * size for c in range(chunks)]

# right: in closed form
def pairs(T, chunks):
    size = T // chunks
    return [size * size * c + size * (size + 1) // 2 for c in range(chunks)]

# right: torch
def pairs(T, chunks):
    return torch.arange(1, T + 1).view(chunks, -1).sum(1).tolist()
""",
    4: """
# wrong: as if sequences could be cut
def filled(lengths, width):
    total = lengths.sum().item()
    return total / (-(-total // width) * width)

# wrong: a sequence a row
def filled(lengths, width):
    return lengths.double().mean().item() / width

# wrong: a row too few
def filled(lengths, width):
    row, _ = packing.rows(lengths, width)
    return lengths.sum().item() / (max(row.max().item(), 1) * width)

# right: different rows
def filled(lengths, width):
    row, _ = packing.rows(lengths, width)
    return lengths.sum().item() / (len(set(row.tolist())) * width)

# right: the mean share of a row
def filled(lengths, width):
    row, _ = packing.rows(lengths, width)
    return (row.bincount(weights=lengths.double()) / width).mean().item()
""",
}

TEXTS["10_quant"] = {
    1: """
# wrong: ties to the smaller
def nearest(x):
    grid = torch.tensor(formats.E2M1)
    return grid[(x.abs()[:, None] - grid).abs().argmin(1)] * x.sign()

# wrong: ties to the larger
def nearest(x):
    grid = torch.tensor(formats.E2M1).flip(0)
    return grid[(x.abs()[:, None] - grid).abs().argmin(1)] * x.sign()

# wrong: beyond six
def nearest(x):
    a = x.abs()
    return torch.where(a < 2, (2 * a).round() / 2, torch.where(a < 4, a.round(), 2 * (a / 2).round())) * x.sign()

# wrong: without the sign
def nearest(x):
    a = x.abs().clamp(max=6)
    return torch.where(a < 2, (2 * a).round() / 2, torch.where(a < 4, a.round(), 2 * (a / 2).round()))

# right: rounded piece by piece
def nearest(x):
    a = x.abs().clamp(max=6)
    return torch.where(a < 2, (2 * a).round() / 2, torch.where(a < 4, a.round(), 2 * (a / 2).round())) * x.sign()

# right: plain Python
def nearest(x):
    near = [min(range(8), key=lambda code: (abs(abs(v) - formats.E2M1[code]), code % 2)) for v in x.tolist()]
    return torch.tensor([formats.E2M1[code] for code in near]).copysign(x)
""",
    2: """
# wrong: without the scale of the token
def bits(form, width):
    return {"mxfp8": 8 + 8 / 32, "fp8": 8 + 32 / 128, "nvfp4-token": 4 + 8 / 16}[form]

# wrong: bytes
def bits(form, width):
    quantise = {"mxfp8": quant.mxfp8_quantize, "fp8": quant.blockwise_fp8_quantize, \
"nvfp4-token": quant.nvfp4_quantize}[form]
    return sum(part.numel() * part.element_size() for part in quantise(torch.ones(1, width))) / width

# wrong: without scales
def bits(form, width):
    quantise = {"mxfp8": quant.mxfp8_quantize, "fp8": quant.blockwise_fp8_quantize, \
"nvfp4-token": quant.nvfp4_quantize}[form]
    return 8 * quantise(torch.ones(1, width))[0].nbytes / width

# stops: a vector, which has no rows to scale
def bits(form, width):
    quantise = {"mxfp8": quant.mxfp8_quantize, "fp8": quant.blockwise_fp8_quantize, \
"nvfp4-token": quant.nvfp4_quantize}[form]
    return 8 * sum(part.numel() * part.element_size() for part in quantise(torch.ones(width))) / width

# right: of several tokens
def bits(form, width):
    quantise = {"mxfp8": quant.mxfp8_quantize, "fp8": quant.blockwise_fp8_quantize, \
"nvfp4-token": quant.nvfp4_quantize}[form]
    return 8 * sum(part.nbytes for part in quantise(torch.randn(4, width))) / (4 * width)
""",
    3: """
# wrong: along the width
def weight_gradient(x, grad, form):
    return quant.rounded(grad, form, 1).T @ quant.rounded(x, form, 1)

# wrong: one operand rounded
def weight_gradient(x, grad, form):
    return grad.T @ quant.rounded(x, form, 0)

# wrong: the product rounded
def weight_gradient(x, grad, form):
    return quant.rounded(grad.T @ x, form, 0)

# right: transposed first
def weight_gradient(x, grad, form):
    return quant.rounded(grad.T, form, -1) @ quant.rounded(x.T, form, -1).T

# right: a sum of outer products
def weight_gradient(x, grad, form):
    return torch.einsum("no,nd->od", quant.rounded(grad, form, 0), quant.rounded(x, form, 0))
""",
    4: """
# wrong: compares only the first row
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], 100 * x[-1:]))
    return not torch.equal(function(x)[0], function(changed_x)[0])

# wrong: compares only the last token but one
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], 100 * x[-1:]))
    return not torch.equal(function(x)[-2], function(changed_x)[-2])

# wrong: compares sums over tokens
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], 100 * x[-1:]))
    return not torch.allclose(function(x)[:-1].sum(0), function(changed_x)[:-1].sum(0), atol=1e-4)

# wrong: compares the changed token as well
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], 100 * x[-1:]))
    return not torch.equal(function(x), function(changed_x))

# wrong: a change too small to be seen
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], x[-1:] / 2))
    return not torch.equal(function(x)[:-1], function(changed_x)[:-1])

# right: a tensor
def sees_the_future(function):
    x = torch.randn(32, 64)
    changed_x = torch.cat((x[:-1], 100 * x[-1:]))
    return (function(x)[:-1] != function(changed_x)[:-1]).any()

# right: the last token cut off
def sees_the_future(function):
    x = torch.randn(32, 64)
    x[-1] *= 100
    return not torch.equal(function(x)[:-1], function(x[:-1]))
""",
}

TEXTS["11_mirror"] = {
    1: """
# wrong: the sum that others go on to use
def mean_nll(nll, scored):
    return sum_over((nll * scored).sum(), "all") / all_reduce_sum(scored.sum())

# wrong: the mean of the ranks' means
def mean_nll(nll, scored):
    return total(nll[scored].mean()) / 2

# wrong: divides by all places here
def mean_nll(nll, scored):
    return total((nll * scored).sum() / nll.numel())

# right: divided after the sum
def mean_nll(nll, scored):
    return total(nll[scored].sum()) / all_reduce_sum(scored.sum())
""",
    2: """
# wrong: the mean of this rank's rollouts
def advantages_here(rewards):
    return rewards - rewards.mean(1, keepdim=True)

# wrong: as if all ranks held equally many
def advantages_here(rewards):
    return rewards - all_reduce_sum(rewards.sum(1, keepdim=True), "dp") / (2 * rewards.shape[1])

# right: in place, with a count of ones
def advantages_here(rewards):
    counts = all_reduce_sum(torch.ones_like(rewards).sum(1, keepdim=True), "dp")
    rewards -= all_reduce_sum(rewards.sum(1, keepdim=True), "dp") / counts
    return rewards
""",
    3: """
# wrong: divides by the ranks
def rows_to(experts, num_experts, ep):
    return (experts.flatten() // ep).bincount(minlength=ep).tolist()

# wrong: leaves out ranks that get nothing
def rows_to(experts, num_experts, ep):
    return (experts.flatten() // (num_experts // ep)).bincount().tolist()

# wrong: two ranks and four experts
def rows_to(experts, num_experts, ep):
    return [int((experts < 2).sum()), int((experts >= 2).sum())]

# wrong: experts dealt in turn
def rows_to(experts, num_experts, ep):
    return (experts.flatten() % ep).bincount(minlength=ep).tolist()

# right: a loop
def rows_to(experts, num_experts, ep):
    rows = [0] * ep
    for expert in experts.flatten().tolist():
        rows[expert * ep // num_experts] += 1
    return rows
""",
}
