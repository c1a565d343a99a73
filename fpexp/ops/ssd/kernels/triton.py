"""SSD's kernels; a program is a chunk of a head. `fpexp.ops.ssd.triton` has the equations and what they cost.

N goes by in blocks of `ROWS`, so that the factors of a product at a time fit registers; P is one block. The place of a
chunk is 64-bit, places inside it are 32-bit. A token past the end has delta 0: it changes no state. t and s are a
chunk's tokens as rows and as columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fpexp.ops.launch.triton import product


@triton.jit
def _chunk(delta, A, length, heads, groups, TOKENS: tl.constexpr, COMPUTE: tl.constexpr):
    """Return where in (B, T, heads, 1) and in (B, T, groups, 1) a program begins, its tokens, their delta, delta A."""
    chunks = tl.cdiv(length, TOKENS)
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    token, head = tl.arange(0, TOKENS), row % heads
    at = row // heads * length + chunk * TOKENS
    inside = chunk * TOKENS + token < length
    of_head, of_group = at * heads + head, at * groups + head // (heads // groups)
    step = tl.load(delta + of_head + token * heads, inside, other=0).to(COMPUTE)
    return of_head, of_group, head, inside, step, step * tl.load(A + head).to(COMPUTE)


@triton.jit
def _decays(log, TOKENS: tl.constexpr):
    """Return L, since and until."""
    t, s = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    masked = tl.where(t > s, log[:, None], 0)
    return tl.where(t >= s, tl.exp(tl.cumsum(masked, 0)), 0), tl.exp(tl.cumsum(log, 0)), tl.exp(tl.sum(masked, 0))


@triton.jit
def _load(tensor, stride, inside, first, size, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):
    """Return BLOCK columns of a chunk, from the `first`; `size` are there. Rows are `stride` apart."""
    token, column = tl.arange(0, inside.shape[0]), first + tl.arange(0, BLOCK)
    place, there = token[:, None] * stride + column[None, :], inside[:, None] & (column < size)[None, :]
    return tl.load(tensor + place, there, other=0).to(COMPUTE)


@triton.jit
def _store(tensor, value, stride, inside, first, size):
    token, column = tl.arange(0, value.shape[0]), first + tl.arange(0, value.shape[1])
    place, there = token[:, None] * stride + column[None, :], inside[:, None] & (column < size)[None, :]
    tl.store(tensor + place, value.to(tensor.dtype.element_ty), there)


@triton.jit
def _in_state(first_n, first_p, N, P, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where a block (n, p) of a state is, and what of it is there."""
    n, p = first_n + tl.arange(0, ROWS)[:, None], first_p + tl.arange(0, COLUMNS)[None, :]
    return p * N + n, (n < N) & (p < P)


@triton.jit
def _scores(left, right, stride, inside, size, BLOCK: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """Return left right^T, of every token with every other."""
    scores = tl.zeros([inside.shape[0], inside.shape[0]], COMPUTE)
    for i in tl.range(0, size, BLOCK, num_stages=1):
        rows = _load(left, stride, inside, i, size, BLOCK, COMPUTE)
        columns = _load(right, stride, inside, i, size, BLOCK, COMPUTE)
        scores += product(rows, tl.trans(columns), COMPUTE, PRECISION)
    return scores


@triton.jit
def _of_states(
    rows, states, stride, inside, p, N, P, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return rows S^T, of columns from `p` on."""
    found = tl.zeros([inside.shape[0], COLUMNS], COMPUTE)
    for n in tl.range(0, N, ROWS, num_stages=1):
        in_state, there = _in_state(n, p, N, P, ROWS, COLUMNS)
        row = _load(rows, stride, inside, n, N, ROWS, COMPUTE)
        found += product(row, tl.load(states + in_state, there, other=0), COMPUTE, PRECISION)
    return found


@triton.jit
def across(
    delta, A, rows, columns, decays, sums, length, heads, groups, N, P, BACK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each chunk b^T (until u), or, going back, c^T (since dy): (B, heads, chunks, P, N); and its whole decay."""
    of_head, of_group, _, inside, step, log = _chunk(delta, A, length, heads, groups, TOKENS, COMPUTE)
    program, token = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    if BACK:
        weight = tl.exp(tl.cumsum(log, 0))
    else:
        weight = step * tl.exp(tl.sum(tl.where(token[:, None] > token[None, :], log[:, None], 0), 0))
    tl.store(decays + program, tl.exp(tl.sum(log, 0)))
    for p in tl.range(0, P, COLUMNS, num_stages=1):
        column = weight[:, None] * _load(columns + of_head * P, heads * P, inside, p, P, COLUMNS, COMPUTE)
        for n in tl.range(0, N, ROWS, num_stages=1):
            row = _load(rows + of_group * N, groups * N, inside, n, N, ROWS, COMPUTE)
            in_state, there = _in_state(n, p, N, P, ROWS, COLUMNS)
            found = product(tl.trans(row), column, COMPUTE, PRECISION)
            tl.store(sums + program * N * P + in_state, found, there)


@triton.jit
def outputs(
    x, delta, A, b, c, D, states, y, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of each chunk, from the state before it."""
    of_head, of_group, head, inside, step, log = _chunk(delta, A, length, heads, groups, TOKENS, COMPUTE)
    c += of_group * N
    weighted = _scores(c, b + of_group * N, groups * N, inside, N, ROWS, COMPUTE, PRECISION)
    L, since, _ = _decays(log, TOKENS)
    weighted *= L
    states += tl.program_id(0).to(tl.int64) * N * P
    skip = tl.load(D + head).to(COMPUTE)
    for p in tl.range(0, P, COLUMNS, num_stages=1):
        y_tile = _of_states(c, states, groups * N, inside, p, N, P, ROWS, COLUMNS, COMPUTE, PRECISION)
        x_tile = _load(x + of_head * P, heads * P, inside, p, P, COLUMNS, COMPUTE)
        y_tile = since[:, None] * y_tile + product(weighted, step[:, None] * x_tile, COMPUTE, PRECISION)
        _store(y + of_head * P, y_tile + skip * x_tile, heads * P, inside, p, P)


@triton.jit
def of_b_or_c(
    x, delta, A, rows, states, grad_y, found, length, heads, groups, N, P, OF_B: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of c of each head, from the states before the chunks and rows b; of b, from those after and c."""
    of_head, of_group, _, inside, step, log = _chunk(delta, A, length, heads, groups, TOKENS, COMPUTE)
    x, grad_y, rows, found = x + of_head * P, grad_y + of_head * P, rows + of_group * N, found + of_head * N
    states += tl.program_id(0).to(tl.int64) * N * P
    L, since, until = _decays(log, TOKENS)
    if OF_B:
        columns, weight = x, until * step
        dscores = _scores(x, grad_y, heads * P, inside, P, COLUMNS, COMPUTE, PRECISION) * tl.trans(L) * step[:, None]
    else:
        columns, weight = grad_y, since
        dscores = _scores(grad_y, x, heads * P, inside, P, COLUMNS, COMPUTE, PRECISION) * L * step[None, :]
    for n in tl.range(0, N, ROWS, num_stages=1):
        tile = tl.zeros([TOKENS, ROWS], COMPUTE)
        for p in tl.range(0, P, COLUMNS, num_stages=1):
            in_state, there = _in_state(n, p, N, P, ROWS, COLUMNS)
            column = _load(columns, heads * P, inside, p, P, COLUMNS, COMPUTE)
            tile += product(column, tl.trans(tl.load(states + in_state, there, other=0)), COMPUTE, PRECISION)
        row = _load(rows, groups * N, inside, n, N, ROWS, COMPUTE)
        tile = weight[:, None] * tile + product(dscores, row, COMPUTE, PRECISION)
        _store(found, tile, heads * N, inside, n, N)


@triton.jit
def of_x_and_delta(
    x, delta, A, b, c, D, states, adjoints, grad_y, dx, ddelta, dA, dD, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of x and delta, of A and D those of each chunk; from the same."""
    of_head, of_group, head, inside, step, log = _chunk(delta, A, length, heads, groups, TOKENS, COMPUTE)
    program, token = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    t, s = token[:, None], token[None, :]
    x, grad_y, dx, b, c = x + of_head * P, grad_y + of_head * P, dx + of_head * P, b + of_group * N, c + of_group * N
    states, adjoints = states + program * N * P, adjoints + program * N * P

    # Inside the chunk: a term [t, s] holds the decays j with s < j <= t.
    weighted = _scores(c, b, groups * N, inside, N, ROWS, COMPUTE, PRECISION)
    L, since, until = _decays(log, TOKENS)
    weighted *= L
    terms = weighted * step[None, :] * _scores(grad_y, x, heads * P, inside, P, COLUMNS, COMPUTE, PRECISION)
    dlog = tl.sum(tl.where(t > s, tl.cumsum(terms, 0, reverse=True), 0), 1)

    # Through the states: from_start holds the decays up to its token, to_end those after it, whole all of them.
    weighted = tl.trans(weighted)
    to_end, from_start = tl.zeros([TOKENS], COMPUTE), tl.zeros([TOKENS], COMPUTE)
    of_u, of_D = tl.zeros([TOKENS], COMPUTE), tl.zeros([TOKENS], COMPUTE)
    skip = tl.load(D + head).to(COMPUTE)
    for p in tl.range(0, P, COLUMNS, num_stages=1):
        y_tile = _of_states(c, states, groups * N, inside, p, N, P, ROWS, COLUMNS, COMPUTE, PRECISION)
        from_start += tl.sum(_load(grad_y, heads * P, inside, p, P, COLUMNS, COMPUTE) * y_tile, 1)
        du = _of_states(b, adjoints, groups * N, inside, p, N, P, ROWS, COLUMNS, COMPUTE, PRECISION) * until[:, None]
        x_tile = _load(x, heads * P, inside, p, P, COLUMNS, COMPUTE)
        dy = _load(grad_y, heads * P, inside, p, P, COLUMNS, COMPUTE)
        to_end += tl.sum(x_tile * du, 1)
        of_D += tl.sum(dy * x_tile, 1)
        du += product(weighted, dy, COMPUTE, PRECISION)
        of_u += tl.sum(du * x_tile, 1)
        _store(dx, step[:, None] * du + skip * dy, heads * P, inside, p, P)
    whole = tl.zeros([512], COMPUTE)
    for i in tl.range(0, N * P, 512, num_stages=1):
        place = i + tl.arange(0, 512)
        S = tl.load(states + place, place < N * P, other=0)
        whole += S * tl.load(adjoints + place, place < N * P, other=0)
    from_start, to_end = since * from_start, step * to_end
    dlog += tl.sum(tl.where(t >= s, from_start[:, None], 0), 0) + tl.sum(tl.where(t < s, to_end[:, None], 0), 0)
    dlog += tl.exp(tl.sum(log, 0)) * tl.sum(whole, 0)

    ddelta_tile = of_u + tl.load(A + head).to(COMPUTE) * dlog
    tl.store(ddelta + of_head + token * heads, ddelta_tile.to(ddelta.dtype.element_ty), inside)
    tl.store(dA + program, tl.sum(step * dlog, 0))
    tl.store(dD + program, tl.sum(of_D, 0))
