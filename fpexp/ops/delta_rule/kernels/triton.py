"""The delta rule's kernels. `fpexp.ops.delta_rule.triton` has the equations, what each makes, and what it costs.

A program is a chunk of a head, or all of a head's where it carries a state; all columns of V, or some. The place of a
chunk is 64-bit, places inside it are 32-bit. i and j are a chunk's steps as rows and as columns. A step past the end
has beta and k 0: it changes no state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fpexp.ops.launch.triton import product


@triton.jit
def _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS: tl.constexpr, COMPUTE: tl.constexpr):
    """Log decays (STEPS,) of steps from `first` on; a token's is that of its first step."""
    log = tl.zeros([STEPS], COMPUTE)
    if log_decay is not None:
        step = first + tl.arange(0, STEPS)
        token = (sequence * (length // n) + first // n) * heads + head
        place = log_decay + token + (step // n - first // n) * heads
        log = tl.load(place, (step < length) & (step % n == 0), other=0).to(COMPUTE)
    return log


@triton.jit
def _pairs(log, STEPS: tl.constexpr):
    """D of `log` (STEPS,)."""
    i, j = tl.arange(0, STEPS)[:, None], tl.arange(0, STEPS)[None, :]
    return tl.where(i >= j, tl.exp(tl.cumsum(tl.where(i > j, log[:, None], 0), 0)), 0)


@triton.jit
def _load(place, row, column, of_row, of_column, COMPUTE: tl.constexpr):
    """A tile, 0 where it is not `of_row` and `of_column`; `row` are offsets."""
    mask = of_row[:, None] & of_column[None, :]
    return tl.load(place + row[:, None] + column[None, :], mask, other=0).to(COMPUTE)


@triton.jit
def _store(place, row, column, of_row, of_column, tile):
    mask = of_row[:, None] & of_column[None, :]
    tl.store(place + row[:, None] + column[None, :], tile.to(place.dtype.element_ty), mask)


@triton.jit
def _with(blocks, block):
    blocks += (block,)
    return blocks


@triton.jit
def solve(
    q, k, beta, log_decay, inverse, scores, length, heads, n, K,
    STEPS: tl.constexpr, JOINS: tl.constexpr, KEYS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """T and A of each chunk."""
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    i = tl.arange(0, STEPS)
    step, at = first + i, (sequence * length + first) * heads + head
    token, in_token = (sequence * (length // n) + first // n) * heads + head, (step // n - first // n) * heads
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    keys, queries = tl.zeros([STEPS, STEPS], COMPUTE), tl.zeros([STEPS, STEPS], COMPUTE)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
        q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
        keys += product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
        queries += product(q_tile, tl.trans(k_tile), COMPUTE, PRECISION)
    D = _pairs(_log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE), STEPS)
    place, square = program * STEPS * STEPS, i[:, None] * STEPS + i[None, :]
    tl.store(scores + place + square, queries * D)
    rate = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)
    M = tl.where(i[:, None] > i[None, :], rate[:, None] * keys * D, 0)
    T = tl.where(i[:, None] == i[None, :], 1, 0).to(COMPUTE)
    T -= tl.where(i[:, None] // 2 == i[None, :] // 2, M, 0)
    size = 2
    for _ in tl.range(JOINS, disable_licm=True):
        same, apart = i[:, None] // (2 * size) == i[None, :] // (2 * size), i[:, None] // size != i[None, :] // size
        between = tl.where(same & apart, M, 0)
        T -= product(T, product(between, T, COMPUTE, INVERSE), COMPUTE, INVERSE)
        size *= 2
    tl.store(inverse + place + square, T)


@triton.jit
def forward(
    k, v, beta, log_decay, inverse, state, final, kept, length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """The states before chunks and the last one, each a tuple of blocks of K."""
    columns, chunks = tl.cdiv(V, VALUES), tl.cdiv(length, STEPS)
    row = (tl.program_id(0) // columns).to(tl.int64)
    sequence, head = row // heads, row % heads
    i = tl.arange(0, STEPS)
    value = tl.program_id(0) % columns * VALUES + tl.arange(0, VALUES)
    square = i[:, None] * STEPS + i[None, :]
    S = ()
    for block in tl.static_range(BLOCKS):
        key = block * KEYS + tl.arange(0, KEYS)
        if state is None:
            S = _with(S, tl.zeros([KEYS, VALUES], COMPUTE))
        else:
            S = _with(S, _load(state + row * K * V, key * V, value, key < K, value < V, COMPUTE))
    for chunk in tl.range(0, chunks, num_stages=1, disable_licm=True):
        first, program = chunk * STEPS, row * chunks + chunk
        inside, at = first + i < length, (sequence * length + first) * heads + head
        found = tl.zeros([STEPS, VALUES], COMPUTE)
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            _store(kept + program * K * V, key * V, value, key < K, value < V, S[block])
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            found += product(k_tile, S[block], COMPUTE, PRECISION)
        log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
        E = _load(v + at * V, i * heads * V, value, inside, value < V, COMPUTE)
        E -= tl.exp(tl.cumsum(log, 0))[:, None] * found
        rate = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)
        T = tl.load(inverse + program * STEPS * STEPS + square)
        U = product(T, rate[:, None] * E, COMPUTE, SQUARE)
        later = _log_decays(log_decay, sequence, head, first + 1, length, heads, n, STEPS, COMPUTE)
        U *= tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))[:, None]
        before, S = S, ()
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            S = _with(S, tl.exp(tl.sum(log, 0)) * before[block] + product(tl.trans(k_tile), U, COMPUTE, PRECISION))
    for block in tl.static_range(BLOCKS):
        key = block * KEYS + tl.arange(0, KEYS)
        _store(final + row * K * V, key * V, value, key < K, value < V, S[block])


@triton.jit
def backward(
    q, k, beta, log_decay, inverse, grad_o, grad_final, adjoints, residuals, dv, dstate,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """dv, the gradients of the states after chunks (`adjoints`), and dR in place of A^T do (`residuals`)."""
    columns, chunks = tl.cdiv(V, VALUES), tl.cdiv(length, STEPS)
    row = (tl.program_id(0) // columns).to(tl.int64)
    sequence, head = row // heads, row % heads
    i = tl.arange(0, STEPS)
    value = tl.program_id(0) % columns * VALUES + tl.arange(0, VALUES)
    square = i[:, None] * STEPS + i[None, :]
    dS = ()
    for block in tl.static_range(BLOCKS):
        key = block * KEYS + tl.arange(0, KEYS)
        if grad_final is None:
            dS = _with(dS, tl.zeros([KEYS, VALUES], COMPUTE))
        else:
            dS = _with(dS, _load(grad_final + row * K * V, key * V, value, key < K, value < V, COMPUTE))
    for back in tl.range(0, chunks, num_stages=1, disable_licm=True):
        chunk = chunks - 1 - back
        first, program = chunk * STEPS, row * chunks + chunk
        step, at = first + i, (sequence * length + first) * heads + head
        token, in_token = (sequence * (length // n) + first // n) * heads + head, (step // n - first // n) * heads
        inside, reads = step < length, (step < length) & (step % n == n - 1)
        dU = tl.zeros([STEPS, VALUES], COMPUTE)
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            _store(adjoints + program * K * V, key * V, value, key < K, value < V, dS[block])
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            dU += product(k_tile, dS[block], COMPUTE, PRECISION)
        later = _log_decays(log_decay, sequence, head, first + 1, length, heads, n, STEPS, COMPUTE)
        until = tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))
        dU = until[:, None] * dU + _load(residuals + at * V, i * heads * V, value, inside, value < V, COMPUTE)
        tl.debug_barrier()  # before any thread writes dR over what another has yet to load
        T = tl.load(inverse + program * STEPS * STEPS + square)
        dR = product(tl.trans(T), dU, COMPUTE, SQUARE)
        _store(residuals + at * V, i * heads * V, value, inside, value < V, dR)
        dE = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)[:, None] * dR
        _store(dv + at * V, i * heads * V, value, inside, value < V, dE)
        log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
        since, whole = tl.exp(tl.cumsum(log, 0)), tl.exp(tl.sum(log, 0))
        do = since[:, None] * _load(grad_o + token * V, in_token * V, value, reads, value < V, COMPUTE)
        dE = since[:, None] * dE
        after, dS = dS, ()
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
            before = whole * after[block] + product(tl.trans(q_tile), do, COMPUTE, PRECISION)
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            dS = _with(dS, before - product(tl.trans(k_tile), dE, COMPUTE, PRECISION))
    if dstate is not None:
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            _store(dstate + row * K * V, key * V, value, key < K, value < V, dS[block])


@triton.jit
def outputs(
    q, k, v, beta, log_decay, inverse, scores, kept, o, grad_o, written, residuals, length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Some columns of o of a chunk, or, with `grad_o`, of U (`written`) and A^T do (`residuals`)."""
    columns, chunks = tl.cdiv(V, VALUES), tl.cdiv(length, STEPS)
    program = (tl.program_id(0) // columns).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) // columns % chunks * STEPS
    i, value = tl.arange(0, STEPS), tl.program_id(0) % columns * VALUES + tl.arange(0, VALUES)
    step, at = first + i, (sequence * length + first) * heads + head
    token, in_token = (sequence * (length // n) + first // n) * heads + head, (step // n - first // n) * heads
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    found, o_tile = tl.zeros([STEPS, VALUES], COMPUTE), tl.zeros([STEPS, VALUES], COMPUTE)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        S = _load(kept + program * K * V, key * V, value, key < K, value < V, COMPUTE)
        k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
        found += product(k_tile, S, COMPUTE, PRECISION)
        if o is not None:
            q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
            o_tile += product(q_tile, S, COMPUTE, PRECISION)
    log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
    since = tl.exp(tl.cumsum(log, 0))[:, None]
    E = _load(v + at * V, i * heads * V, value, inside, value < V, COMPUTE) - since * found
    rate = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)
    place, square = program * STEPS * STEPS, i[:, None] * STEPS + i[None, :]
    U = product(tl.load(inverse + place + square), rate[:, None] * E, COMPUTE, SQUARE)
    A = tl.load(scores + place + square)
    if o is not None:
        o_tile = since * o_tile + product(A, U, COMPUTE, SQUARE)
        _store(o + token * V, in_token * V, value, reads, value < V, o_tile)
    if grad_o is not None:
        _store(written + at * V, i * heads * V, value, inside, value < V, U)
        do = _load(grad_o + token * V, in_token * V, value, reads, value < V, COMPUTE)
        dU = product(tl.trans(A), do, COMPUTE, SQUARE)
        _store(residuals + at * V, i * heads * V, value, inside, value < V, dU)


@triton.jit
def of_squares(
    k, v, beta, log_decay, scores, written, residuals, grad_o, dA, dM, inner_dbeta, inner_dlog,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Gradients inside a chunk: of A and, with its transpose, of k k^T, as factors; what beta and log decays get."""
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    row = tl.arange(0, STEPS)
    i, j = row[:, None], row[None, :]
    step, at = first + row, (sequence * length + first) * heads + head
    token, in_token = (sequence * (length // n) + first // n) * heads + head, (step // n - first // n) * heads
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    in_k, in_v = row * heads * K, row * heads * V
    of_A, of_M = tl.zeros([STEPS, STEPS], COMPUTE), tl.zeros([STEPS, STEPS], COMPUTE)
    dbeta_row = tl.zeros([STEPS], COMPUTE)
    for start in range(0, V, VALUES):
        value = start + tl.arange(0, VALUES)
        U = _load(written + at * V, in_v, value, inside, value < V, COMPUTE)
        dR = _load(residuals + at * V, in_v, value, inside, value < V, COMPUTE)
        dbeta_row += tl.sum(dR * _load(v + at * V, in_v, value, inside, value < V, COMPUTE), 1)
        do = _load(grad_o + token * V, in_token * V, value, reads, value < V, COMPUTE)
        of_M -= product(dR, tl.trans(U), COMPUTE, PRECISION)
        of_A += product(do, tl.trans(U), COMPUTE, PRECISION)
    products = tl.zeros([STEPS, STEPS], COMPUTE)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = _load(k + at * K, in_k, key, inside, key < K, COMPUTE)
        products += product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
    rate = tl.load(beta + at + row * heads, inside, other=0).to(COMPUTE)
    log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
    D = _pairs(log, STEPS)
    of_M = tl.where(i > j, of_M * D, 0)
    weighted = of_M * products
    tl.store(inner_dbeta + at + row * heads, dbeta_row + tl.sum(weighted, 1), inside)
    if log_decay is not None:  # a term [i, j] holds the decays s with j < s <= i
        weighted = rate[:, None] * weighted + of_A * tl.load(scores + program * STEPS * STEPS + i * STEPS + j)
        from_before = product(weighted, tl.where(i < j, 1, 0).to(COMPUTE), COMPUTE, SQUARE)
        dlog = tl.sum(tl.where(i >= j, from_before, 0), 0)
        tl.store(inner_dlog + token + in_token, dlog, inside & (step % n == 0))
    square = program * STEPS * STEPS + i * STEPS + j
    tl.store(dA + square, of_A * D)
    of_M *= rate[:, None]
    tl.store(dM + square, of_M + tl.trans(of_M))


@triton.jit
def of_q_and_k(
    q, k, beta, log_decay, kept, adjoints, written, residuals, grad_o, dA, dM, inner_dbeta, inner_dlog,
    dq, dk, dbeta, dlog_decay,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """The rest: what goes through the states, and the sums with what `of_squares` has found."""
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    row = tl.arange(0, STEPS)
    i, j = row[:, None], row[None, :]
    step, at = first + row, (sequence * length + first) * heads + head
    token, in_token = (sequence * (length // n) + first // n) * heads + head, (step // n - first // n) * heads
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    in_k, in_v = row * heads * K, row * heads * V

    rate = tl.load(beta + at + row * heads, inside, other=0).to(COMPUTE)
    log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
    since = tl.exp(tl.cumsum(log, 0))
    later = _log_decays(log_decay, sequence, head, first + 1, length, heads, n, STEPS, COMPUTE)
    until = tl.exp(tl.cumsum(tl.where(row < STEPS - 1, later, 0), 0, reverse=True))
    dbeta_row = tl.load(inner_dbeta + at + row * heads, inside, other=0)
    from_start, to_end = tl.zeros([STEPS], COMPUTE), tl.zeros([STEPS], COMPUTE)
    of_states = tl.zeros([KEYS], COMPUTE)
    square = program * STEPS * STEPS + i * STEPS + j
    for start in tl.range(0, K, KEYS, disable_licm=PRECISION == "bf16"):  # each spills the other way
        key = start + tl.arange(0, KEYS)
        to_q, to_in = tl.zeros([STEPS, KEYS], COMPUTE), tl.zeros([STEPS, KEYS], COMPUTE)
        to_out = tl.zeros([STEPS, KEYS], COMPUTE)
        for start_of_value in tl.range(0, V, VALUES, num_stages=2):
            value = start_of_value + tl.arange(0, VALUES)
            S = _load(kept + program * K * V, key * V, value, key < K, value < V, COMPUTE)
            do = _load(grad_o + token * V, in_token * V, value, reads, value < V, COMPUTE)
            to_q += product(do, tl.trans(S), COMPUTE, PRECISION)
            dR = _load(residuals + at * V, in_v, value, inside, value < V, COMPUTE)
            to_in -= product(dR, tl.trans(S), COMPUTE, PRECISION)
            dS = _load(adjoints + program * K * V, key * V, value, key < K, value < V, COMPUTE)
            of_states += tl.sum(S * dS, 1)
            U = _load(written + at * V, in_v, value, inside, value < V, COMPUTE)
            to_out += product(U, tl.trans(dS), COMPUTE, PRECISION)
        k_tile = _load(k + at * K, in_k, key, inside, key < K, COMPUTE)
        q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
        to_q, to_in, to_out = since[:, None] * to_q, since[:, None] * to_in, until[:, None] * to_out
        of_k = tl.sum(k_tile * to_in, 1)
        dbeta_row += of_k
        from_start += tl.sum(q_tile * to_q, 1) + rate * of_k
        to_end += tl.sum(k_tile * to_out, 1)
        to_q += product(tl.load(dA + square), k_tile, COMPUTE, SQUARE)
        _store(dq + token * K, in_token * K, key, reads, key < K, to_q)
        to_k = rate[:, None] * to_in + to_out + product(tl.load(dM + square), k_tile, COMPUTE, SQUARE)
        to_k += product(tl.trans(tl.load(dA + square)), q_tile, COMPUTE, SQUARE)
        _store(dk + at * K, in_k, key, inside, key < K, to_k)
    tl.store(dbeta + at + row * heads, dbeta_row.to(dbeta.dtype.element_ty), inside)
    if log_decay is not None:
        acts = inside & (step % n == 0)
        dlog = tl.load(inner_dlog + token + in_token, acts, other=0)
        dlog += tl.exp(tl.sum(log, 0)) * tl.sum(of_states, 0)
        dlog += tl.sum(tl.where(i >= j, from_start[:, None], 0), 0) + tl.sum(tl.where(i < j, to_end[:, None], 0), 0)
        tl.store(dlog_decay + token + in_token, dlog.to(dlog_decay.dtype.element_ty), acts)
