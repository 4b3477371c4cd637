"""Answers to the exercises of lessons 0 to 2, by lesson and exercise; `answers.py` says how they are written and
read."""

TEXTS: dict[str, dict[int, str]] = {}

TEXTS["00_recipe"] = {
    1: """
# wrong: the smallest value
def last_look(lines, key):
    measurements = [(line[key], line["tokens"]) for line in lines if key in line]
    return min(measurements) if measurements else None

# wrong: the first value
def last_look(lines, key):
    return next(((line[key], line["tokens"]) for line in lines if key in line), None)

# wrong: the tokens of the last line
def last_look(lines, key):
    values = [line[key] for line in lines if key in line]
    return (values[-1], lines[-1]["tokens"]) if values else None

# right: from the end
def last_look(lines, key):
    for line in reversed(lines):
        if key in line:
            return line[key], line["tokens"]
""",
    2: """
# wrong: draws with replacement
def within_reach(c, n, k):
    return 1 - (1 - c / n) ** k

# wrong: the expected number of successes
def within_reach(c, n, k):
    return min(1.0, k * c / n)

# right: draw by draw
def within_reach(c, n, k):
    none = 1.0
    for drawn in range(k):
        none *= max(0, n - c - drawn) / (n - drawn)
    return 1 - none

# right: a product in numpy
def within_reach(c, n, k):
    return 1.0 if n - c < k else 1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))
""",
    3: """
# wrong: resamples attempts
def gained(before, after):
    return bootstrap((after.astype(float) - before).ravel())

# wrong: subtracts two intervals
def gained(before, after):
    first, then = bootstrap(before.mean(1)), bootstrap(after.mean(1))
    return {"value": then["value"] - first["value"], "low": then["low"] - first["high"], \
"high": then["high"] - first["low"]}

# wrong: resamples before and after apart
def gained(before, after):
    draw, b, a = np.random.default_rng(0), before.mean(1), after.mean(1)
    drawn = [draw.choice(a, len(a)).mean() - draw.choice(b, len(b)).mean() for _ in range(2000)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": a.mean() - b.mean(), "low": low, "high": high}

# wrong: the best attempt of each task
def gained(before, after):
    return bootstrap(after.max(1).astype(float) - before.max(1))

# right: differences of attempts, averaged by task
def gained(before, after):
    return bootstrap((after - before).mean(1))

# right: rows of differences, which bootstrap draws whole
def gained(before, after):
    return bootstrap(after.astype(float) - before)
""",
}

TEXTS["01_cpt"] = {
    1: """
# wrong: counts padding
def scored(doc):
    return doc[:, 1:] == doc[:, :-1]

# wrong: across the borders of documents
def scored(doc):
    return doc[:, 1:] >= 0

# wrong: loses document 0
def scored(doc):
    return (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] > 0)

# wrong: a place for every token
def scored(doc):
    inside = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)
    return torch.cat((torch.zeros(len(doc), 1, dtype=torch.bool), inside), 1)

# right: differences
def scored(doc):
    return (doc.diff(dim=1) == 0) & (doc[:, 1:] != -1)

# right: plain Python
def scored(doc):
    return torch.tensor([[a == b != -1 for a, b in zip(row, row[1:])] for row in doc.tolist()])
""",
    2: """
# wrong: divides by each part's own count
def accumulate(model, parts, total):
    for ids, doc in parts:
        loss, count = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)
        (loss / count).backward()

# wrong: the mean of the parts' means
def accumulate(model, parts, total):
    for ids, doc in parts:
        loss, count = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)
        (loss / count / len(parts)).backward()

# wrong: does not divide
def accumulate(model, parts, total):
    for ids, doc in parts:
        cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)[0].backward()

# wrong: does not hand doc to the network
def accumulate(model, parts, total):
    for ids, doc in parts:
        loss, _ = cpt.next_token_loss(model, model(ids, logits=False).hidden, ids, doc)
        (loss / total).backward()

# wrong: does not hand doc to the loss
def accumulate(model, parts, total):
    for ids, doc in parts:
        loss, _ = cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids)
        (loss / total).backward()

# right: one backward pass for the sum
def accumulate(model, parts, total):
    losses = [cpt.next_token_loss(model, model(ids, doc=doc, logits=False).hidden, ids, doc)[0] for ids, doc in parts]
    (sum(losses) / total).backward()

# right: from the logits
def accumulate(model, parts, total):
    for ids, doc in parts:
        logp = model(ids, doc=doc).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        (-logp[scored(doc)].sum() / total).backward()
""",
    3: """
# wrong: nats
def bits(perplexity, tokens, size):
    return tokens * math.log(perplexity) / size

# wrong: per token
def bits(perplexity, tokens, size):
    return math.log2(perplexity)

# wrong: bytes a token the wrong way round
def bits(perplexity, tokens, size):
    return math.log2(perplexity) * size / tokens

# right: numpy
def bits(perplexity, tokens, size):
    return np.log2(perplexity) * tokens / size

# right: nats over the logarithm of two
def bits(perplexity, tokens, size):
    return math.log(perplexity) / math.log(2) * (tokens / size)
""",
    4: """
# wrong: the last window is not pulled back
def contexts(n, window, stride):
    return [t - next(start for start in range(0, n, stride) if start + window > t) for t in range(1, n)]

# wrong: the latest window that holds a token
def contexts(n, window, stride):
    width = min(window, n)
    starts = [*range(0, n - width, stride), n - width]
    return [t - max(start for start in starts if start < t) for t in range(1, n)]

# wrong: as if the stride were one
def contexts(n, window, stride):
    return [min(t, window - 1) for t in range(1, n)]

# wrong: counts the token itself
def contexts(n, window, stride):
    width = min(window, n)
    starts = [*range(0, n - width, stride), n - width]
    return [t - next(start for start in starts if start + width > t) + 1 for t in range(1, n)]

# right: numpy
def contexts(n, window, stride):
    width, t = min(window, n), np.arange(1, n)
    starts = np.array([*range(0, n - width, stride), n - width])
    return t - starts[np.searchsorted(starts + width, t, side="right")]

# right: in closed form
def contexts(n, window, stride):
    return [t if t < window else t - min(-(-(t - window + 1) // stride) * stride, n - window) for t in range(1, n)]
""",
}

TEXTS["02_muon"] = {
    1: """
# wrong: five steps of Newton–Schulz
def polar(G):
    return muon.newton_schulz(G)

# wrong: only divided by its spectral norm
def polar(G):
    return G / torch.linalg.matrix_norm(G, 2)

# wrong: another orthogonal matrix
def polar(G):
    return torch.linalg.qr(G).Q if len(G) >= G.shape[1] else torch.linalg.qr(G.T).Q.T

# wrong: up the hill
def polar(G):
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    return -U @ Vh

# right: torch.svd
def polar(G):
    U, _, V = torch.svd(G)
    return U @ V.T

# right: an iteration that converges
def polar(G):
    X = G / G.norm()
    for _ in range(60):
        X = 1.5 * X - 0.5 * X @ X.T @ X
    return X
""",
    2: """
# wrong: in place
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    M.mul_(momentum).add_((1 - momentum) * G)
    U = (1 - momentum) * G + momentum * M
    W.mul_(1 - lr * weight_decay).sub_(lr * max(1, m / n) ** 0.5 * muon.newton_schulz(U))
    return W, M

# wrong: without Nesterov
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    M = momentum * M + (1 - momentum) * G
    return (1 - lr * weight_decay) * W - lr * max(1, m / n) ** 0.5 * muon.newton_schulz(M), M

# wrong: without the factor of the shape
def step(W, M, G, lr, momentum, weight_decay):
    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M
    return (1 - lr * weight_decay) * W - lr * muon.newton_schulz(U), M

# wrong: decay is not times lr
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M
    return (1 - weight_decay) * W - lr * max(1, m / n) ** 0.5 * muon.newton_schulz(U), M

# wrong: orthogonalises before the mean
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    G = muon.newton_schulz(G)
    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M
    return (1 - lr * weight_decay) * W - lr * max(1, m / n) ** 0.5 * U, M

# right: lerp
def step(W, M, G, lr, momentum, weight_decay):
    M = M.lerp(G, 1 - momentum)
    scale = lr * max(1, G.shape[0] / G.shape[1]) ** 0.5
    return W - lr * weight_decay * W - scale * muon.newton_schulz(G.lerp(M, momentum)), M

# right: the update times a factor
def step(W, M, G, lr, momentum, weight_decay):
    m, n = G.shape
    M = momentum * M + (1 - momentum) * G
    U = G + momentum / (1 - momentum) * M
    return W * (1 - lr * weight_decay) - lr * max(1, m / n) ** 0.5 * muon.newton_schulz(U), M
""",
    3: """
# wrong: as a whole
def per_head(G, heads):
    return muon.newton_schulz(G)

# wrong: heads of equal size, then as a whole
def per_head(G, heads):
    split = G.unflatten(0, (heads, -1))
    return muon.newton_schulz((split / split.norm(dim=(1, 2), keepdim=True)).flatten(0, 1))

# wrong: keeps the size of each head's gradient
def per_head(G, heads):
    return torch.cat([muon.newton_schulz(head) * head.norm() for head in G.chunk(heads)])

# wrong: heads out of columns
def per_head(G, heads):
    return muon.newton_schulz(G.T.unflatten(0, (heads, -1))).flatten(0, 1).T

# wrong: heads interleaved
def per_head(G, heads):
    return muon.newton_schulz(G.unflatten(0, (-1, heads)).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

# right: a loop
def per_head(G, heads):
    return torch.cat([muon.newton_schulz(head) for head in G.chunk(heads)])

# right: exactly
def per_head(G, heads):
    return torch.cat([polar(head) for head in G.chunk(heads)])
""",
}
