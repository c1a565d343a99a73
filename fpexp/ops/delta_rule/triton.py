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

`solve` makes T and A of all chunks side by side. `forward` and `backward` carry S and dS through the chunks, some
columns of V each, which know nothing of each other. What the states before chunks and the gradients after them are is
kept, as factors of products; `outputs` makes o, or, for the way back, U and A^T do. `of_squares` and `of_q_and_k`
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

Occupancy: `forward` and `backward` are B heads V / 32 programs of 8 warps (V / 16 from K 129 on), one to an SM
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

from fpexp.ops.delta_rule.kernels import triton as kernels
from fpexp.ops.launch.triton import COMPUTE, Launch, run_all

_LEAST = 16
"""Rows and columns of a product at least."""


class _Tile(NamedTuple):
    """Sizes at most, so that nothing spills from registers on sm_80, sm_90 and sm_100.

    But for 16 bytes a thread of `backward` in bfloat16 on sm_100, where the assembler keeps to 128 registers, so that a
    multiprocessor has room for two programs; without spills it takes 142.
    """

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
        if kernel in (kernels.forward, kernels.backward):
            keys, values, programs = self.tile.keys, min(32, self.tile.carried), self.rows
        elif kernel in (kernels.solve, kernels.of_q_and_k):
            keys = values = min(32, self.tile.block)
        keys, values = min(keys, _power(K)), min(values, _power(V))
        if kernel not in (kernels.solve, kernels.of_squares, kernels.of_q_and_k):
            programs *= triton.cdiv(V, values)
        arguments = {name: getattr(self, name) for name in names.split()} | others
        arguments |= {"length": self.length, "heads": self.q.shape[2], "n": self.k.shape[2], "K": K, "V": V}
        arguments["JOINS"] = self.tile.steps.bit_length() - 2  # from blocks of 2 rows on
        arguments |= {"STEPS": self.tile.steps, "KEYS": keys, "BLOCKS": triton.cdiv(K, keys), "VALUES": values}
        arguments |= dict(zip(("PRECISION", "SQUARE", "INVERSE"), _PRECISION[self.v.dtype], strict=True))
        arguments["COMPUTE"] = COMPUTE.get(self.v.dtype, tl.float32)
        needed = {name: arguments[name] for name in kernel.arg_names}
        return Launch(kernel, programs, 4 if kernel is kernels.outputs else 8, needed)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, dict[str, Launch]]:
    """Return o, the last S and the states before chunks, not yet filled, and what fills them, by name."""
    p = problem
    (batch, length, heads, K), V = p.q.shape, p.v.shape[-1]
    o, S = p.v.new_empty(batch, length, heads, V), p.v.new_empty(batch, heads, K, V, dtype=p.wide)
    kept, inverse, scores = p.empty_states(), p.empty_squares(), p.empty_squares()
    no_gradient = {"grad_o": None, "written": None, "residuals": None}
    steps = {
        "solve": p.launch(kernels.solve, "q k beta log_decay", inverse=inverse, scores=scores),
        "states": p.launch(kernels.forward, "k v beta log_decay state", inverse=inverse, final=S, kept=kept),
        "outputs": p.launch(
            kernels.outputs, "q k v beta log_decay", inverse=inverse, scores=scores, kept=kept, o=o, **no_gradient
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
        "solve": p.launch(kernels.solve, "q k beta log_decay", **squares),
        "write": p.launch(kernels.outputs, "q k v beta log_decay", **squares, kept=kept, o=None, **of_v),
        "states": p.launch(kernels.backward, "q k beta log_decay", **carried),
        "squares": p.launch(
            kernels.of_squares, "k v beta log_decay", scores=squares["scores"], **of_v, **of_squares, **inner
        ),
        "q and k": p.launch(kernels.of_q_and_k, "q k beta log_decay", **states, **of_v, **of_squares, **inner, **last),
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
