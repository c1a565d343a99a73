"""The delta rule in Triton: chunks of Householder steps as matrix products; the state goes through them in registers.

The n T steps of a sequence are cut into chunks of L, whatever tokens they are of: the first step of a token decays, q
of the last one reads, and those of the others are 0. With S the state before a chunk, D_ij = exp(sum of log decays over
j < s <= i) for i >= j, else 0, since_i that of the sum over s <= i, until_j = D_Lj and M = tril(beta k k^T * D, -1),

    U  = T (beta * (v - since * (k S))),   T = (I + M)^-1         row i of U is what step i writes along k_i
    o  = since * (q S) + A U,              A = q k^T * D
    S' = since_L S + k^T (until * U)

and for the gradient dS' of the state after it, from the last chunk to the first,

    dR = T^T (until * (k dS') + A^T do),   dv = beta * dR
    dS = since_L dS' + q^T (since * do) - k^T (since * dv)

`_solve` makes T and A of all chunks side by side. `_forward` and `_backward` carry S and dS through the chunks, some
columns of V each, which know nothing of each other. What the states before chunks and the gradients after them are is
kept, as factors of products; `_outputs` makes o, or, for the way back, U and A^T do. `_of_squares` and `_of_q_and_k`
make the gradients that sum over columns. The backward keeps the states, and computes all else again.

T comes from its diagonal blocks of 1, 2, 4, ... rows: two neighbours T_1 and T_2 and what M has of both, M_21, are
joined as T_21 = -T_2 M_21 T_1, two products for all pairs at once. Every block is an inverse itself, and no entry of T
is above 2 for keys of length 1 and beta up to 2, where powers of M, of which T is a sum as well, may pass 1e20 before
they cancel.

Each exponent is a sum of its own and no difference of sums: a decay of exp(-1e4) costs its neighbours no digits, and
what is above the diagonal is 0 before it is exponentiated.

For bfloat16 v the factors of products with states are bfloat16, those of products with T, A or their gradients tf32,
and T is made with three bfloat16 products for one. It is tf32 throughout for float16, whose range states may leave,
except for T; three tf32 for one for float32. Sums and the carried state are float32.

Occupancy: `_forward` and `_backward` are B heads V / 32 programs of 8 warps (V / 16 from K 129 on), one to an SM
by their registers; the others one a chunk, or one a chunk and 64 columns. B 64, T 1024, 2 heads, K 128, V 256 (Gated
DeltaNet at gpu scale): 1024 programs that carry, 8 rounds on 132 SMs of 16 chunks each.

Roofline for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16, half of it in tf32) at that size, bfloat16: the states before
chunks are 1 KB a step and head, T and A 512 B, v and o 512 B each, q and k 256 B each. Forward 6 KB (the states written
and read), 0.8 GB or 190 us; 295 kFLOP in bfloat16, 98 in tf32, 82 thrice for T: 120 us. Backward 19 KB, 2.6 GB or 590
us; 190 us of products. But a chunk of a program that carries is three products, each of which waits for the one before,
some 2.5 us: 8 rounds of 16 are 0.3 ms forward and 0.4 ms backward. Predicted: forward 0.6 to 0.9 ms, backward 1.5 to
2.5 ms. B 256, T 16, 2 heads, K 32, V 64 (cpu scale): 13 MB forward, 3 us, below what three and five launches cost. Not
measured yet. float32 has chunks of 16 steps, for want of registers: four times as many states, twice the bytes each.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, INTERPRETED, Launch, run_all

_LEAST = 16
"""Rows and columns of a product at least."""


class _Tile(NamedTuple):
    """Sizes at most, so that nothing spills from registers on sm_80, sm_90 and sm_100."""

    steps: int
    """Of a chunk."""
    keys: int
    """Rows of a state that take part in a product at once where a program carries it."""
    carried: int
    """Numbers of a state that a program carries, or the least number of columns."""
    block: int
    """Columns of K or V that products inside a chunk take at once."""


_TILE = {torch.bfloat16: _Tile(64, 64, 64 * 64, 64), torch.float64: _Tile(16, 32, 16 * 128, 16)}
_WIDE_TILE = _Tile(16, 128, 16 * 128, 32)
"""For other types: float32 is three factors for one, all of them in registers."""

_PRECISION = {
    torch.float64: ("ieee", "ieee", "ieee"),
    torch.float32: ("tf32x3", "tf32x3", "tf32x3"),
    torch.float16: ("tf32", "tf32", "tf32x3"),
    torch.bfloat16: ("bf16", "tf32", "bf16x3"),
}
"""Of factors, by type of v: where products are of arguments, states and U; with T, A or their gradients; for T."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.delta_rule`. What is not contiguous is copied, q and k are taken in the type of v."""
    arguments = (q.to(v.dtype), k.to(v.dtype), v, beta, log_decay, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(tuple[Tensor, Tensor], _DeltaRule.apply(*arguments))
    o, S, _, steps = forward(Problem.of(*arguments))
    run_all(steps)
    return o, S


def launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    problem = Problem.of(q.to(v.dtype), k.to(v.dtype), v, beta, log_decay, state)
    o, S, kept, steps = forward(problem)
    return steps | {f"{name}, back": step for name, step in backward(problem, kept, o, S)[1].items()}


def _power(size: int) -> int:
    return max(_LEAST, triton.next_power_of_2(size))


class Problem(NamedTuple):
    """The arguments, contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    state: Tensor | None

    @classmethod
    def of(cls, *arguments: Tensor | None) -> Problem:
        """Copy what is not contiguous."""
        return cls(*(None if tensor is None else tensor.contiguous() for tensor in arguments))  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """Heads of all sequences."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def length(self) -> int:
        """Householder steps of a sequence."""
        return self.k.shape[1] * self.k.shape[2]

    @property
    def tile(self) -> _Tile:
        """Sizes of what a program works on."""
        most = _TILE.get(self.v.dtype, _WIDE_TILE)
        K = _power(self.k.shape[-1])
        carried = max(_LEAST, most.carried // K)
        return _Tile(min(most.steps, _power(self.length)), min(most.keys, K), carried, most.block)

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return triton.cdiv(self.length, self.tile.steps)

    @property
    def wide(self) -> torch.dtype:
        """Type of sums."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def factor(self) -> torch.dtype:
        """Type of what is kept for products."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else self.wide

    def empty_squares(self) -> Tensor:
        """Room for a matrix of steps by steps of each chunk."""
        return self.v.new_empty(self.rows, self.chunks, self.tile.steps, self.tile.steps, dtype=self.wide)

    def empty_states(self) -> Tensor:
        """Room for a state of each chunk."""
        return self.v.new_empty(self.rows, self.chunks, self.k.shape[-1], self.v.shape[-1], dtype=self.factor)

    def launch(self, kernel: Any, names: str, **others: Any) -> Launch:
        """Return a launch of `kernel` on the arguments of these names and on others.

        A program is a chunk of a head, or all of them where it carries a state; all columns of V, or some.
        """
        K, V = self.k.shape[-1], self.v.shape[-1]
        keys = values = self.tile.block
        programs = self.rows * self.chunks
        if kernel in (_forward, _backward):
            keys, values, programs = self.tile.keys, min(32, self.tile.carried), self.rows
        elif kernel in (_solve, _of_q_and_k):
            keys = values = min(32, self.tile.block)
        keys, values = min(keys, _power(K)), min(values, _power(V))
        if kernel not in (_solve, _of_squares, _of_q_and_k):
            programs *= triton.cdiv(V, values)
        arguments = {name: getattr(self, name) for name in names.split()} | others
        arguments |= {"length": self.length, "heads": self.q.shape[2], "n": self.k.shape[2], "K": K, "V": V}
        arguments["JOINS"] = self.tile.steps.bit_length() - 2  # from blocks of 2 rows on
        arguments |= {"STEPS": self.tile.steps, "KEYS": keys, "BLOCKS": triton.cdiv(K, keys), "VALUES": values}
        arguments |= dict(zip(("PRECISION", "SQUARE", "INVERSE"), _PRECISION[self.v.dtype], strict=True))
        arguments["COMPUTE"] = COMPUTE.get(self.v.dtype, tl.float32)
        needed = {name: arguments[name] for name in kernel.arg_names}
        return Launch(kernel, programs, 4 if kernel is _outputs else 8, needed)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, dict[str, Launch]]:
    """Return o, the last S and the states before chunks, not yet filled, and what fills them, by name."""
    p = problem
    (batch, length, heads, K), V = p.q.shape, p.v.shape[-1]
    o, S = p.v.new_empty(batch, length, heads, V), p.v.new_empty(batch, heads, K, V, dtype=p.wide)
    kept, inverse, scores = p.empty_states(), p.empty_squares(), p.empty_squares()
    no_gradient = {"grad_o": None, "written": None, "residuals": None}
    steps = {
        "solve": p.launch(_solve, "q k beta log_decay", inverse=inverse, scores=scores),
        "states": p.launch(_forward, "k v beta log_decay state", inverse=inverse, final=S, kept=kept),
        "outputs": p.launch(
            _outputs, "q k v beta log_decay", inverse=inverse, scores=scores, kept=kept, o=o, **no_gradient
        ),
    }
    return o, S, kept, steps


class Gradients(NamedTuple):
    """Of the arguments."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dlog_decay: Tensor | None
    dstate: Tensor | None


def backward(
    problem: Problem, kept: Tensor, grad_o: Tensor, grad_S: Tensor | None
) -> tuple[Gradients, dict[str, Launch]]:
    """Return gradients, not yet filled, and what fills them, by name."""
    p = problem
    g = Gradients(*(None if tensor is None else torch.empty_like(tensor) for tensor in p))  # type: ignore[arg-type]
    states = {"kept": kept, "adjoints": p.empty_states()}
    squares = {"inverse": p.empty_squares(), "scores": p.empty_squares()}
    of_squares = {"dA": p.empty_squares(), "dM": p.empty_squares()}
    of_v = {
        "grad_o": grad_o,
        "written": torch.empty_like(p.v, dtype=p.factor),
        "residuals": torch.empty_like(p.v, dtype=p.wide),
    }
    inner = {
        "inner_dbeta": torch.empty_like(p.beta, dtype=p.wide),
        "inner_dlog": None if p.log_decay is None else torch.empty_like(p.log_decay, dtype=p.wide),
    }
    carried = {"inverse": squares["inverse"], "grad_final": grad_S, "adjoints": states["adjoints"]}
    carried |= {"grad_o": grad_o, "residuals": of_v["residuals"], "dv": g.dv, "dstate": g.dstate}
    last = {"dq": g.dq, "dk": g.dk, "dbeta": g.dbeta, "dlog_decay": g.dlog_decay}
    steps = {
        "solve": p.launch(_solve, "q k beta log_decay", **squares),
        "write": p.launch(_outputs, "q k v beta log_decay", **squares, kept=kept, o=None, **of_v),
        "states": p.launch(_backward, "q k beta log_decay", **carried),
        "squares": p.launch(_of_squares, "k v beta log_decay", scores=squares["scores"], **of_v, **of_squares, **inner),
        "q and k": p.launch(_of_q_and_k, "q k beta log_decay", **states, **of_v, **of_squares, **inner, **last),
    }
    return g, steps


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        o, S, kept, steps = forward(problem)
        run_all(steps)
        ctx.save_for_backward(*problem, kept)
        ctx.set_materialize_grads(False)
        return o, S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_S: Tensor | None) -> tuple[Tensor | None, ...]:
        *arguments, kept = ctx.saved_tensors
        problem = Problem(*arguments)
        if grad_o is None:
            grad_o = problem.v.new_zeros(*problem.q.shape[:3], problem.v.shape[-1])
        grad_S = None if grad_S is None else grad_S.contiguous()
        gradients, steps = backward(problem, kept, grad_o.contiguous(), grad_S)
        run_all(steps)
        return tuple(gradients)


# Kernels. The place of a chunk is 64-bit, places inside it are 32-bit. i and j are a chunk's steps as rows and as
# columns. A step past the end has beta and k 0: it changes no state.


@triton.jit
def _product(a, b, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if INTERPRETED:
        product = tl.dot(a.to(COMPUTE), b.to(COMPUTE), input_precision="ieee", out_dtype=COMPUTE)
    elif PRECISION == "bf16":
        product = tl.dot(a, b, out_dtype=COMPUTE)
    else:
        product = tl.dot(a, b, input_precision=PRECISION, out_dtype=COMPUTE)
    return product


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
def _solve(
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
        keys += _product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
        queries += _product(q_tile, tl.trans(k_tile), COMPUTE, PRECISION)
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
        T -= _product(T, _product(between, T, COMPUTE, INVERSE), COMPUTE, INVERSE)
        size *= 2
    tl.store(inverse + place + square, T)


@triton.jit
def _forward(
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
            found += _product(k_tile, S[block], COMPUTE, PRECISION)
        log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
        E = _load(v + at * V, i * heads * V, value, inside, value < V, COMPUTE)
        E -= tl.exp(tl.cumsum(log, 0))[:, None] * found
        rate = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)
        T = tl.load(inverse + program * STEPS * STEPS + square)
        U = _product(T, rate[:, None] * E, COMPUTE, SQUARE)
        later = _log_decays(log_decay, sequence, head, first + 1, length, heads, n, STEPS, COMPUTE)
        U *= tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))[:, None]
        before, S = S, ()
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            S = _with(S, tl.exp(tl.sum(log, 0)) * before[block] + _product(tl.trans(k_tile), U, COMPUTE, PRECISION))
    for block in tl.static_range(BLOCKS):
        key = block * KEYS + tl.arange(0, KEYS)
        _store(final + row * K * V, key * V, value, key < K, value < V, S[block])


@triton.jit
def _backward(
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
            dU += _product(k_tile, dS[block], COMPUTE, PRECISION)
        later = _log_decays(log_decay, sequence, head, first + 1, length, heads, n, STEPS, COMPUTE)
        until = tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))
        dU = until[:, None] * dU + _load(residuals + at * V, i * heads * V, value, inside, value < V, COMPUTE)
        tl.debug_barrier()  # before any thread writes dR over what another has yet to load
        T = tl.load(inverse + program * STEPS * STEPS + square)
        dR = _product(tl.trans(T), dU, COMPUTE, SQUARE)
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
            before = whole * after[block] + _product(tl.trans(q_tile), do, COMPUTE, PRECISION)
            k_tile = _load(k + at * K, i * heads * K, key, inside, key < K, COMPUTE)
            dS = _with(dS, before - _product(tl.trans(k_tile), dE, COMPUTE, PRECISION))
    if dstate is not None:
        for block in tl.static_range(BLOCKS):
            key = block * KEYS + tl.arange(0, KEYS)
            _store(dstate + row * K * V, key * V, value, key < K, value < V, dS[block])


@triton.jit
def _outputs(
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
        found += _product(k_tile, S, COMPUTE, PRECISION)
        if o is not None:
            q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
            o_tile += _product(q_tile, S, COMPUTE, PRECISION)
    log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
    since = tl.exp(tl.cumsum(log, 0))[:, None]
    E = _load(v + at * V, i * heads * V, value, inside, value < V, COMPUTE) - since * found
    rate = tl.load(beta + at + i * heads, inside, other=0).to(COMPUTE)
    place, square = program * STEPS * STEPS, i[:, None] * STEPS + i[None, :]
    U = _product(tl.load(inverse + place + square), rate[:, None] * E, COMPUTE, SQUARE)
    A = tl.load(scores + place + square)
    if o is not None:
        o_tile = since * o_tile + _product(A, U, COMPUTE, SQUARE)
        _store(o + token * V, in_token * V, value, reads, value < V, o_tile)
    if grad_o is not None:
        _store(written + at * V, i * heads * V, value, inside, value < V, U)
        do = _load(grad_o + token * V, in_token * V, value, reads, value < V, COMPUTE)
        dU = _product(tl.trans(A), do, COMPUTE, SQUARE)
        _store(residuals + at * V, i * heads * V, value, inside, value < V, dU)


@triton.jit
def _of_squares(
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
        of_M -= _product(dR, tl.trans(U), COMPUTE, PRECISION)
        of_A += _product(do, tl.trans(U), COMPUTE, PRECISION)
    products = tl.zeros([STEPS, STEPS], COMPUTE)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = _load(k + at * K, in_k, key, inside, key < K, COMPUTE)
        products += _product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
    rate = tl.load(beta + at + row * heads, inside, other=0).to(COMPUTE)
    log = _log_decays(log_decay, sequence, head, first, length, heads, n, STEPS, COMPUTE)
    D = _pairs(log, STEPS)
    of_M = tl.where(i > j, of_M * D, 0)
    weighted = of_M * products
    tl.store(inner_dbeta + at + row * heads, dbeta_row + tl.sum(weighted, 1), inside)
    if log_decay is not None:  # a term [i, j] holds the decays s with j < s <= i
        weighted = rate[:, None] * weighted + of_A * tl.load(scores + program * STEPS * STEPS + i * STEPS + j)
        from_before = _product(weighted, tl.where(i < j, 1, 0).to(COMPUTE), COMPUTE, SQUARE)
        dlog = tl.sum(tl.where(i >= j, from_before, 0), 0)
        tl.store(inner_dlog + token + in_token, dlog, inside & (step % n == 0))
    square = program * STEPS * STEPS + i * STEPS + j
    tl.store(dA + square, of_A * D)
    of_M *= rate[:, None]
    tl.store(dM + square, of_M + tl.trans(of_M))


@triton.jit
def _of_q_and_k(
    q, k, beta, log_decay, kept, adjoints, written, residuals, grad_o, dA, dM, inner_dbeta, inner_dlog,
    dq, dk, dbeta, dlog_decay,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """The rest: what goes through the states, and the sums with what `_of_squares` has found."""
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
            to_q += _product(do, tl.trans(S), COMPUTE, PRECISION)
            dR = _load(residuals + at * V, in_v, value, inside, value < V, COMPUTE)
            to_in -= _product(dR, tl.trans(S), COMPUTE, PRECISION)
            dS = _load(adjoints + program * K * V, key * V, value, key < K, value < V, COMPUTE)
            of_states += tl.sum(S * dS, 1)
            U = _load(written + at * V, in_v, value, inside, value < V, COMPUTE)
            to_out += _product(U, tl.trans(dS), COMPUTE, PRECISION)
        k_tile = _load(k + at * K, in_k, key, inside, key < K, COMPUTE)
        q_tile = _load(q + token * K, in_token * K, key, reads, key < K, COMPUTE)
        to_q, to_in, to_out = since[:, None] * to_q, since[:, None] * to_in, until[:, None] * to_out
        of_k = tl.sum(k_tile * to_in, 1)
        dbeta_row += of_k
        from_start += tl.sum(q_tile * to_q, 1) + rate * of_k
        to_end += tl.sum(k_tile * to_out, 1)
        to_q += _product(tl.load(dA + square), k_tile, COMPUTE, SQUARE)
        _store(dq + token * K, in_token * K, key, reads, key < K, to_q)
        to_k = rate[:, None] * to_in + to_out + _product(tl.load(dM + square), k_tile, COMPUTE, SQUARE)
        to_k += _product(tl.trans(tl.load(dA + square)), q_tile, COMPUTE, SQUARE)
        _store(dk + at * K, in_k, key, inside, key < K, to_k)
    tl.store(dbeta + at + row * heads, dbeta_row.to(dbeta.dtype.element_ty), inside)
    if log_decay is not None:
        acts = inside & (step % n == 0)
        dlog = tl.load(inner_dlog + token + in_token, acts, other=0)
        dlog += tl.exp(tl.sum(log, 0)) * tl.sum(of_states, 0)
        dlog += tl.sum(tl.where(i >= j, from_start[:, None], 0), 0) + tl.sum(tl.where(i < j, to_end[:, None], 0), 0)
        tl.store(dlog_decay + token + in_token, dlog.to(dlog_decay.dtype.element_ty), acts)
