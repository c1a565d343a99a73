"""The delta rule in Triton: chunks of Householder steps as matrix products; the state goes through them in registers.

The n T steps of a sequence are cut into chunks of L, whatever tokens they are of: the first step of a token decays, q of
the last one reads, and those of the others are 0. With S the state before a chunk, D_ij = exp(sum of log decays over
j < s <= i) for i >= j, else 0, since_i that of the sum over s <= i, until_j = D_Lj and M = tril(beta k k^T * D, -1),

    U  = T (beta * (v - since * (k S))),   T = (I + M)^-1         row i of U is what step i writes along k_i
    o  = since * (q S) + A U,              A = q k^T * D
    S' = since_L S + k^T (until * U)

and for the gradient dS' of the state after it, from the last chunk to the first,

    dR = T^T (until * (k dS') + A^T do),   dv = beta * dR
    dS = since_L dS' + q^T (since * do) - k^T (since * dv)

`_solve` makes T and A of all chunks side by side. `_forward` and `_backward` carry S and dS, some columns each, since
columns of V know nothing of each other, and keep what the states before chunks and the gradients after them are, as
factors of products. Before it goes back `_solve` runs once more; `_write` makes U again, `_of_q_and_k` the gradients
that sum over columns.

T comes from its diagonal blocks of 1, 2, 4, ... rows: two neighbours T_1 and T_2 and what M has of both, M_21, are joined
as T_21 = -T_2 M_21 T_1, two products for all pairs at once. This is exact for every M; entries of T stay below beta for
keys of length 1, where powers of M, of which T is a sum as well, may pass 1e20 before they cancel (beta 2, equal keys).

Each exponent is a sum of its own and no difference of sums: a decay of exp(-1e4) costs its neighbours no digits, and
what is above the diagonal is 0 before it is exponentiated.

Factors of products are bfloat16 for bfloat16 v, tf32 for float16, and three tf32 for float32; those that make T are
tf32 for bfloat16 too. Sums and the carried state are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch

_LEAST = 16
"""Rows and columns of a product at least."""

_STEPS = 64
"""In a chunk at most."""

_BLOCK = 64
"""Columns of K or V at most that products inside a chunk take at once."""

_CARRIED = 64 * 128
"""Numbers of a state at most that a program carries."""

_PRECISION = {torch.float64: "ieee", torch.float32: "tf32x3", torch.float16: "tf32", torch.bfloat16: "bf16"}
"""Of the factors of products, by type of v: a state may be past what float16 holds."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.delta_rule`. What is not contiguous is copied."""
    arguments = (q, k, v, beta, log_decay, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(tuple[Tensor, Tensor], _DeltaRule.apply(*arguments))
    o, S, steps = forward(Problem.of(*arguments), kept=None)
    _run(steps)
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
    problem = Problem.of(q, k, v, beta, log_decay, state)
    kept = problem.empty_states()
    o, S, steps = forward(problem, kept)
    return steps | {f"{name}, back": step for name, step in backward(problem, kept, o, S)[1].items()}


def _run(steps: dict[str, Launch]) -> None:
    for step in steps.values():
        step.run()


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
    def steps(self) -> int:
        """Of a chunk."""
        return min(_STEPS, _power(self.length))

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return triton.cdiv(self.length, self.steps)

    @property
    def factor(self) -> torch.dtype:
        """Type of what is kept for products."""
        wide = torch.float64 if self.v.dtype == torch.float64 else torch.float32
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else wide

    def empty_squares(self) -> Tensor:
        """Room for a matrix of steps by steps of each chunk."""
        return self.v.new_empty(self.rows, self.chunks, self.steps, self.steps, dtype=self.factor)

    def empty_states(self) -> Tensor:
        """Room for a state of each chunk."""
        return self.v.new_empty(self.rows, self.chunks, self.k.shape[-1], self.v.shape[-1], dtype=self.factor)

    def launch(self, kernel: Any, names: str, warps: int, carries: bool = False, **others: Any) -> Launch:
        """Return a launch of `kernel` on the arguments of these names and on others.

        A program is a chunk of a head, or, where it carries a state, a head and some columns of V.
        """
        K, V = self.k.shape[-1], self.v.shape[-1]
        keys, values = min(_BLOCK, _power(K)), min(_BLOCK, _power(V))
        if carries:
            keys = _power(K)
            values = min(values, max(_LEAST, _CARRIED // keys))
        programs = self.rows * (triton.cdiv(V, values) if carries else self.chunks)
        sizes = {"length": self.length, "heads": self.q.shape[2], "n": self.k.shape[2], "K": K, "V": V}
        constants = {"STEPS": self.steps, "KEYS": keys, "VALUES": values}
        constants |= {"COMPUTE": COMPUTE.get(self.v.dtype, tl.float32), "PRECISION": _PRECISION[self.v.dtype]}
        needed = {parameter.name for parameter in kernel.params} if hasattr(kernel, "params") else set(kernel.arg_names)
        arguments = {name: getattr(self, name) for name in names.split()} | others
        arguments |= {name: value for name, value in (sizes | constants).items() if name in needed}
        return Launch(kernel, programs, warps, arguments)


def _power(size: int) -> int:
    return max(_LEAST, triton.next_power_of_2(size))


def forward(problem: Problem, kept: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Launch]]:
    """Return o and the last S, not yet filled, and what fills them and `kept`, by name."""
    p = problem
    (batch, _, heads, K), V = p.q.shape, p.v.shape[-1]
    o = p.v.new_empty(*p.q.shape[:3], V)
    S = p.v.new_empty(batch, heads, K, V, dtype=_wide(p.v.dtype))
    squares = {"inverse": p.empty_squares(), "scores": p.empty_squares()}
    steps = {
        "solve": p.launch(_solve, "q k beta log_decay", 4, **squares),
        "states": p.launch(
            _forward, "q k v beta log_decay state", 8, carries=True, **squares, o=o, final=S, kept=kept
        ),
    }
    return o, S, steps


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    squares = {"inverse": p.empty_squares(), "scores": p.empty_squares()}
    adjoints = p.empty_states()
    written, residuals = (torch.empty_like(p.v, dtype=p.factor) for _ in range(2))
    of_v = {"grad_o": grad_o, "grad_final": grad_S, "adjoints": adjoints, "residuals": residuals}
    of_q_and_k = {"kept": kept, "adjoints": adjoints, "written": written, "residuals": residuals, "grad_o": grad_o}
    of_q_and_k |= {"dq": g.dq, "dk": g.dk, "dbeta": g.dbeta, "dlog_decay": g.dlog_decay}
    inverse, scores = squares["inverse"], squares["scores"]
    steps = {
        "solve": p.launch(_solve, "q k beta log_decay", 4, **squares),
        "states": p.launch(
            _backward, "q k beta log_decay", 8, carries=True, **squares, **of_v, dv=g.dv, dstate=g.dstate
        ),
        "write": p.launch(_write, "k v beta log_decay", 4, inverse=inverse, kept=kept, written=written),
        "q and k": p.launch(_of_q_and_k, "q k v beta log_decay", 8, scores=scores, **of_q_and_k),
    }
    return g, steps


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        kept = problem.empty_states()
        o, S, steps = forward(problem, kept)
        _run(steps)
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
        _run(steps)
        return tuple(gradients)


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bits of bfloat16 numbers, as if they were integers."""

# Kernels. The place of a chunk is 64-bit, places inside it are 32-bit. i and j are a chunk's steps as rows and as
# columns. A step past the end has beta and k 0: it changes no state.


@triton.jit
def _product(a, b, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if _INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32" if PRECISION == "bf16" else PRECISION, out_dtype=COMPUTE)


@triton.jit
def _log_decays(log_decay, first_token, head, first, length, heads, n, STEPS: tl.constexpr, COMPUTE: tl.constexpr):
    """Log decays (STEPS,) of steps from `first` on; a token's is that of its first step."""
    log = tl.zeros([STEPS], COMPUTE)
    if log_decay is not None:
        step = first + tl.arange(0, STEPS)
        place = log_decay + (first_token * heads + head) + (step // n) * heads
        log = tl.load(place, (step < length) & (step % n == 0), other=0).to(COMPUTE)
    return log


@triton.jit
def _pairs(log, STEPS: tl.constexpr):
    """D of `log` (STEPS,)."""
    i, j = tl.arange(0, STEPS)[:, None], tl.arange(0, STEPS)[None, :]
    return tl.where(i >= j, tl.exp(tl.cumsum(tl.where(i > j, log[:, None], 0), 0)), 0)


@triton.jit
def _solve(
    q, k, beta, log_decay, inverse, scores, length, heads, n, K,
    STEPS: tl.constexpr, KEYS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T and A of each chunk."""
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    i = tl.arange(0, STEPS)
    step = first + i
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    at, token = sequence * length + first, sequence * (length // n) + first // n
    in_k = i * heads * K
    in_q = (step // n - first // n) * heads * K
    keys, queries = tl.zeros([STEPS, STEPS], COMPUTE), tl.zeros([STEPS, STEPS], COMPUTE)
    for start in range(0, K, KEYS):
        column = start + tl.arange(0, KEYS)
        there = (column < K)[None, :]
        k_place = k + (at * heads + head) * K + in_k[:, None] + column[None, :]
        k_tile = tl.load(k_place, inside[:, None] & there, other=0).to(COMPUTE)
        q_place = q + (token * heads + head) * K + in_q[:, None] + column[None, :]
        q_tile = tl.load(q_place, reads[:, None] & there, other=0).to(COMPUTE)
        keys += _product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
        queries += _product(q_tile, tl.trans(k_tile), COMPUTE, PRECISION)
    log = _log_decays(log_decay, sequence * (length // n), head, first, length, heads, n, STEPS, COMPUTE)
    D = _pairs(log, STEPS)
    square = program * STEPS * STEPS + i[:, None] * STEPS + i[None, :]
    tl.store(scores + square, (queries * D).to(scores.dtype.element_ty))
    rate = tl.load(beta + at * heads + head + i * heads, inside, other=0).to(COMPUTE)
    M = tl.where(i[:, None] > i[None, :], rate[:, None] * keys * D, 0)
    T = tl.where(i[:, None] == i[None, :], 1, 0).to(COMPUTE)
    T -= tl.where(i[:, None] // 2 == i[None, :] // 2, M, 0)
    size = 2
    while size < STEPS:
        same, apart = i[:, None] // (2 * size) == i[None, :] // (2 * size), i[:, None] // size != i[None, :] // size
        between = tl.where(same & apart, M, 0)
        joined = _product(between, T, COMPUTE, "tf32" if PRECISION == "bf16" else PRECISION)
        T -= _product(T, joined, COMPUTE, "tf32" if PRECISION == "bf16" else PRECISION)
        size *= 2
    tl.store(inverse + square, T.to(inverse.dtype.element_ty))


@triton.jit
def _forward(
    q, k, v, beta, log_decay, inverse, scores, state, o, final, kept, length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks, chunks = tl.cdiv(V, VALUES), tl.cdiv(length, STEPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = row // heads, row % heads
    i, key = tl.arange(0, STEPS), tl.arange(0, KEYS)
    value = tl.program_id(0) % blocks * VALUES + tl.arange(0, VALUES)
    present = (key < K)[:, None] & (value < V)[None, :]
    in_state = key[:, None] * V + value[None, :]
    in_square = i[:, None] * STEPS + i[None, :]
    tokens = sequence * (length // n)
    S = tl.zeros([KEYS, VALUES], COMPUTE)
    if state is not None:
        S = tl.load(state + row * K * V + in_state, present, other=0).to(COMPUTE)
    for chunk in range(chunks):
        first = chunk * STEPS
        step = first + i
        inside, reads = step < length, (step < length) & (step % n == n - 1)
        at, token = sequence * length + first, tokens + first // n
        square = (row * chunks + chunk) * STEPS * STEPS + in_square
        if kept is not None:
            tl.store(kept + (row * chunks + chunk) * K * V + in_state, S.to(kept.dtype.element_ty), present)
        log = _log_decays(log_decay, tokens, head, first, length, heads, n, STEPS, COMPUTE)
        since = tl.exp(tl.cumsum(log, 0))
        later = _log_decays(log_decay, tokens, head, first + 1, length, heads, n, STEPS, COMPUTE)
        until = tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))
        k_place = k + (at * heads + head) * K + (i * heads * K)[:, None] + key[None, :]
        k_tile = tl.load(k_place, inside[:, None] & (key < K)[None, :], other=0).to(COMPUTE)
        v_place = v + (at * heads + head) * V + (i * heads * V)[:, None] + value[None, :]
        E = tl.load(v_place, inside[:, None] & (value < V)[None, :], other=0).to(COMPUTE)
        E -= since[:, None] * _product(k_tile, S, COMPUTE, PRECISION)
        rate = tl.load(beta + at * heads + head + i * heads, inside, other=0).to(COMPUTE)
        U = _product(tl.load(inverse + square).to(COMPUTE), rate[:, None] * E, COMPUTE, PRECISION)
        in_token = step // n - first // n
        q_place = q + (token * heads + head) * K + (in_token * heads * K)[:, None] + key[None, :]
        q_tile = tl.load(q_place, reads[:, None] & (key < K)[None, :], other=0).to(COMPUTE)
        o_tile = since[:, None] * _product(q_tile, S, COMPUTE, PRECISION)
        o_tile += _product(tl.load(scores + square).to(COMPUTE), U, COMPUTE, PRECISION)
        o_place = o + (token * heads + head) * V + (in_token * heads * V)[:, None] + value[None, :]
        tl.store(o_place, o_tile.to(o.dtype.element_ty), reads[:, None] & (value < V)[None, :])
        whole = tl.exp(tl.sum(log, 0))
        S = whole * S + _product(tl.trans(k_tile), until[:, None] * U, COMPUTE, PRECISION)
    tl.store(final + row * K * V + in_state, S, present)


@triton.jit
def _backward(
    q, k, beta, log_decay, inverse, scores, grad_o, grad_final, adjoints, residuals, dv, dstate,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, dR (`residuals`) and the gradient of the state after each chunk (`adjoints`)."""
    blocks, chunks = tl.cdiv(V, VALUES), tl.cdiv(length, STEPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = row // heads, row % heads
    i, key = tl.arange(0, STEPS), tl.arange(0, KEYS)
    value = tl.program_id(0) % blocks * VALUES + tl.arange(0, VALUES)
    present = (key < K)[:, None] & (value < V)[None, :]
    in_state = key[:, None] * V + value[None, :]
    in_square = i[:, None] * STEPS + i[None, :]
    tokens = sequence * (length // n)
    dS = tl.zeros([KEYS, VALUES], COMPUTE)
    if grad_final is not None:
        dS = tl.load(grad_final + row * K * V + in_state, present, other=0).to(COMPUTE)
    for back in range(chunks):
        chunk = chunks - 1 - back
        first = chunk * STEPS
        step = first + i
        inside, reads = step < length, (step < length) & (step % n == n - 1)
        at, token = sequence * length + first, tokens + first // n
        square = (row * chunks + chunk) * STEPS * STEPS + in_square
        tl.store(adjoints + (row * chunks + chunk) * K * V + in_state, dS.to(adjoints.dtype.element_ty), present)
        log = _log_decays(log_decay, tokens, head, first, length, heads, n, STEPS, COMPUTE)
        since = tl.exp(tl.cumsum(log, 0))
        later = _log_decays(log_decay, tokens, head, first + 1, length, heads, n, STEPS, COMPUTE)
        until = tl.exp(tl.cumsum(tl.where(i < STEPS - 1, later, 0), 0, reverse=True))
        in_token = step // n - first // n
        do_place = grad_o + (token * heads + head) * V + (in_token * heads * V)[:, None] + value[None, :]
        do = tl.load(do_place, reads[:, None] & (value < V)[None, :], other=0).to(COMPUTE)
        k_place = k + (at * heads + head) * K + (i * heads * K)[:, None] + key[None, :]
        k_tile = tl.load(k_place, inside[:, None] & (key < K)[None, :], other=0).to(COMPUTE)
        dU = until[:, None] * _product(k_tile, dS, COMPUTE, PRECISION)
        dU += _product(tl.trans(tl.load(scores + square).to(COMPUTE)), do, COMPUTE, PRECISION)
        dR = _product(tl.trans(tl.load(inverse + square).to(COMPUTE)), dU, COMPUTE, PRECISION)
        in_v = (at * heads + head) * V + (i * heads * V)[:, None] + value[None, :]
        v_inside = inside[:, None] & (value < V)[None, :]
        tl.store(residuals + in_v, dR.to(residuals.dtype.element_ty), v_inside)
        rate = tl.load(beta + at * heads + head + i * heads, inside, other=0).to(COMPUTE)
        dE = rate[:, None] * dR
        tl.store(dv + in_v, dE.to(dv.dtype.element_ty), v_inside)
        q_place = q + (token * heads + head) * K + (in_token * heads * K)[:, None] + key[None, :]
        q_tile = tl.load(q_place, reads[:, None] & (key < K)[None, :], other=0).to(COMPUTE)
        dS = tl.exp(tl.sum(log, 0)) * dS + _product(tl.trans(q_tile), since[:, None] * do, COMPUTE, PRECISION)
        dS -= _product(tl.trans(k_tile), since[:, None] * dE, COMPUTE, PRECISION)
    if dstate is not None:
        tl.store(dstate + row * K * V + in_state, dS.to(dstate.dtype.element_ty), present)


@triton.jit
def _write(
    k, v, beta, log_decay, inverse, kept, written, length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U of each chunk."""
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    i = tl.arange(0, STEPS)
    inside = first + i < length
    at = sequence * length + first
    log = _log_decays(log_decay, sequence * (length // n), head, first, length, heads, n, STEPS, COMPUTE)
    since = tl.exp(tl.cumsum(log, 0))
    rate = tl.load(beta + at * heads + head + i * heads, inside, other=0).to(COMPUTE)
    T = tl.load(inverse + program * STEPS * STEPS + i[:, None] * STEPS + i[None, :]).to(COMPUTE)
    for start_of_value in range(0, V, VALUES):
        value = start_of_value + tl.arange(0, VALUES)
        found = tl.zeros([STEPS, VALUES], COMPUTE)
        for start in range(0, K, KEYS):
            key = start + tl.arange(0, KEYS)
            k_place = k + (at * heads + head) * K + (i * heads * K)[:, None] + key[None, :]
            k_tile = tl.load(k_place, inside[:, None] & (key < K)[None, :], other=0).to(COMPUTE)
            in_state = program * K * V + key[:, None] * V + value[None, :]
            S = tl.load(kept + in_state, (key < K)[:, None] & (value < V)[None, :], other=0).to(COMPUTE)
            found += _product(k_tile, S, COMPUTE, PRECISION)
        in_v = (at * heads + head) * V + (i * heads * V)[:, None] + value[None, :]
        v_inside = inside[:, None] & (value < V)[None, :]
        E = tl.load(v + in_v, v_inside, other=0).to(COMPUTE) - since[:, None] * found
        U = _product(T, rate[:, None] * E, COMPUTE, PRECISION)
        tl.store(written + in_v, U.to(written.dtype.element_ty), v_inside)


@triton.jit
def _of_q_and_k(
    q, k, v, beta, log_decay, scores, kept, adjoints, written, residuals, grad_o, dq, dk, dbeta, dlog_decay,
    length, heads, n, K, V,
    STEPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(length, STEPS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // chunks // heads, program // chunks % heads
    first = tl.program_id(0) % chunks * STEPS
    row = tl.arange(0, STEPS)
    i, j = row[:, None], row[None, :]
    step = first + row
    inside, reads = step < length, (step < length) & (step % n == n - 1)
    tokens = sequence * (length // n)
    at, token, in_token = sequence * length + first, tokens + first // n, step // n - first // n
    in_k = k + (at * heads + head) * K + (i * heads * K)
    in_q = (token * heads + head) * K + (in_token * heads * K)[:, None]
    in_v = (at * heads + head) * V + i * heads * V
    in_o = (token * heads + head) * V + (in_token * heads * V)[:, None]

    # Inside the chunk: gradients of A and M.
    dA, dM = tl.zeros([STEPS, STEPS], COMPUTE), tl.zeros([STEPS, STEPS], COMPUTE)
    dbeta_row = tl.zeros([STEPS], COMPUTE)
    for start in range(0, V, VALUES):
        value = (start + tl.arange(0, VALUES))[None, :]
        v_inside = inside[:, None] & (value < V)
        U = tl.load(written + in_v + value, v_inside, other=0).to(COMPUTE)
        dR = tl.load(residuals + in_v + value, v_inside, other=0).to(COMPUTE)
        dbeta_row += tl.sum(dR * tl.load(v + in_v + value, v_inside, other=0).to(COMPUTE), 1)
        do = tl.load(grad_o + in_o + value, reads[:, None] & (value < V), other=0).to(COMPUTE)
        dM -= _product(dR, tl.trans(U), COMPUTE, PRECISION)
        dA += _product(do, tl.trans(U), COMPUTE, PRECISION)
    products = tl.zeros([STEPS, STEPS], COMPUTE)
    for start in range(0, K, KEYS):
        key = (start + tl.arange(0, KEYS))[None, :]
        k_tile = tl.load(in_k + key, inside[:, None] & (key < K), other=0).to(COMPUTE)
        products += _product(k_tile, tl.trans(k_tile), COMPUTE, PRECISION)
    rate = tl.load(beta + at * heads + head + row * heads, inside, other=0).to(COMPUTE)
    log = _log_decays(log_decay, tokens, head, first, length, heads, n, STEPS, COMPUTE)
    D = _pairs(log, STEPS)
    dM = tl.where(i > j, dM * D, 0)
    weighted = dM * products
    dbeta_row += tl.sum(weighted, 1)
    dlog = tl.zeros([STEPS], COMPUTE)
    if log_decay is not None:  # a term [i, j] holds the decays s with j < s <= i
        A = tl.load(scores + program * STEPS * STEPS + i * STEPS + j).to(COMPUTE)
        weighted = rate[:, None] * weighted + dA * A
        from_before = _product(weighted, tl.where(i < j, 1, 0).to(COMPUTE), COMPUTE, PRECISION)
        dlog += tl.sum(tl.where(i >= j, from_before, 0), 0)
    dA *= D
    dM *= rate[:, None]
    dM += tl.trans(dM)

    # Through the states.
    since = tl.exp(tl.cumsum(log, 0))
    until = tl.exp(tl.sum(tl.where(i > j, log[:, None], 0), 0))
    from_start, to_end = tl.zeros([STEPS], COMPUTE), tl.zeros([STEPS], COMPUTE)
    of_states = tl.zeros([KEYS, VALUES], COMPUTE)
    for start in range(0, K, KEYS):
        key = start + tl.arange(0, KEYS)
        to_q, to_in, to_out = (tl.zeros([STEPS, KEYS], COMPUTE) for _ in range(3))
        for start_of_value in range(0, V, VALUES):
            value = start_of_value + tl.arange(0, VALUES)
            v_inside = inside[:, None] & (value < V)[None, :]
            in_state = program * K * V + key[:, None] * V + value[None, :]
            present = (key < K)[:, None] & (value < V)[None, :]
            S = tl.load(kept + in_state, present, other=0).to(COMPUTE)
            dS = tl.load(adjoints + in_state, present, other=0).to(COMPUTE)
            of_states += S * dS
            do_place = grad_o + in_o + value[None, :]
            do = tl.load(do_place, reads[:, None] & (value < V)[None, :], other=0).to(COMPUTE)
            dR = tl.load(residuals + in_v + value[None, :], v_inside, other=0).to(COMPUTE)
            U = tl.load(written + in_v + value[None, :], v_inside, other=0).to(COMPUTE)
            to_q += _product(do, tl.trans(S), COMPUTE, PRECISION)
            to_in -= _product(dR, tl.trans(S), COMPUTE, PRECISION)
            to_out += _product(U, tl.trans(dS), COMPUTE, PRECISION)
        there = (key < K)[None, :]
        k_tile = tl.load(in_k + key[None, :], inside[:, None] & there, other=0).to(COMPUTE)
        q_tile = tl.load(q + in_q + key[None, :], reads[:, None] & there, other=0).to(COMPUTE)
        to_q, to_in, to_out = since[:, None] * to_q, since[:, None] * to_in, until[:, None] * to_out
        of_k = tl.sum(k_tile * to_in, 1)
        dbeta_row += of_k
        from_start += tl.sum(q_tile * to_q, 1) + rate * of_k
        to_end += tl.sum(k_tile * to_out, 1)
        to_q += _product(dA, k_tile, COMPUTE, PRECISION)
        tl.store(dq + in_q + key[None, :], to_q.to(dq.dtype.element_ty), reads[:, None] & there)
        to_k = rate[:, None] * to_in + to_out + _product(dM, k_tile, COMPUTE, PRECISION)
        to_k += _product(tl.trans(dA), q_tile, COMPUTE, PRECISION)
        dk_place = dk + (at * heads + head) * K + i * heads * K + key[None, :]
        tl.store(dk_place, to_k.to(dk.dtype.element_ty), inside[:, None] & there)
    tl.store(dbeta + at * heads + head + row * heads, dbeta_row.to(dbeta.dtype.element_ty), inside)
    if log_decay is not None:
        dlog += tl.exp(tl.sum(log, 0)) * tl.sum(tl.sum(of_states, 1), 0)
        dlog += tl.sum(tl.where(i >= j, from_start[:, None], 0), 0) + tl.sum(tl.where(i < j, to_end[:, None], 0), 0)
        place = dlog_decay + (tokens * heads + head) + (step // n) * heads
        tl.store(place, dlog.to(dlog_decay.dtype.element_ty), inside & (step % n == 0))
