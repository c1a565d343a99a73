"""Anderson acceleration of the whole-sequence iteration, safeguarded (Anderson 1965; Walker and Ni 2011)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from fpexp.fixed_point.iterate import Stopping, iterate
from fpexp.fixed_point.picard import Damped, Damping
from fpexp.fixed_point.types import Cap, Problem, SolveResult
from fpexp.ranges import Count, Positive, Probability, Range

Safeguard = Annotated[float, Range(above=0, maximum=1)]


class Accelerated:
    """From the last `window` differences dY of iterates and dR of their residuals r = f(y) - y, per sequence,

        gamma = argmin |r - dR gamma|^2,   y <- y + delta r - (dY + delta dR) gamma,

    over all entries of the sequence's real tokens; a padded token takes y + delta r. The columns of dR are brought to
    unit length before `regularisation` is added to the diagonal of their Gram matrix: they shrink with the residual,
    and the newest counts most.

    Guarded by what was last accepted, (y, r): an accelerated iterate whose residual is above `safeguard` times that of
    (y, r) is refused, and a correction beyond `limit` is not made. After a refusal the window is empty and refilled by
    `window` plain steps from (y, r). f is causal, so the plain iteration gets one token after the other exactly right,
    and old iterates spoil that: without the pause acceleration could be refused, or gain next to nothing, at every
    other step.

    `plain` holds delta and observes stagnation: where delta decays, the window starts anew after `plain.patience`
    plain steps, for there acceleration may itself be what keeps the residual up.
    """

    def __init__(
        self, plain: Damped, window: int, regularisation: float, safeguard: float, limit: float, mask: Tensor | None
    ) -> None:
        self.plain, self.window, self.regularisation = plain, window, regularisation
        self.safeguard, self.limit, self.mask = safeguard, limit, mask
        self.y: Tensor | None = None
        self.r: Tensor
        self.residual: Tensor
        self.accelerated: Tensor  # (B,), whether the iterate now under judgement was
        self.pause: Tensor  # (B,), plain steps still to be made
        self.dY: Tensor  # (B, k, T, d), k <= window; zeros stand for what was forgotten
        self.dR: Tensor

    def advance(self, y: Tensor, f_y: Tensor, residual: Tensor) -> Tensor:
        """Return the next iterate, (B, T, d)."""
        with torch.autocast(y.device.type, enabled=False):
            return self._advance(y, f_y - y, residual)

    def select(self, rows: Tensor) -> None:
        """Keep the memory of the sequences `rows` alone."""
        self.plain.select(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.y is not None:
            self.y, self.r, self.residual = self.y[rows], self.r[rows], self.residual[rows]
            self.accelerated, self.pause = self.accelerated[rows], self.pause[rows]
            self.dY, self.dR = self.dY[rows], self.dR[rows]

    def _advance(self, y: Tensor, r: Tensor, residual: Tensor) -> Tensor:
        delta, stalled = self.plain.observe(residual)
        delta = delta[:, None, None]
        y, r = self._judge(y, r, residual, stalled)
        gamma = self._coefficients(y, r)
        correction = torch.einsum("bk,bktd->btd", gamma, self.dY + delta[..., None] * self.dR)
        sane = correction.abs().amax((1, 2)) <= self.limit  # a NaN is not
        self.accelerated = sane & (self.pause == 0) & (gamma != 0).any(-1)
        return torch.where(self.accelerated[:, None, None], y + delta * r - correction, y + delta * r)

    def _judge(self, y: Tensor, r: Tensor, residual: Tensor, stalled: Tensor) -> tuple[Tensor, Tensor]:
        """Accept (y, r) and enter it into the window, or forget the window; return what was last accepted."""
        if self.y is None:
            self.dY = self.dR = y.new_zeros(y.shape[0], 0, *y.shape[1:])
            self.accelerated, self.pause = torch.zeros_like(stalled), torch.zeros_like(residual)
            self.y, self.r, self.residual = y, r, residual
            return y, r
        refused = self.accelerated & ~(residual <= self.safeguard * self.residual)
        forget = (refused | stalled)[:, None, None, None]
        self.dY, self.dR = (
            torch.cat([past, self._real(now - last)[:, None]], dim=1)[:, -self.window :].masked_fill(forget, 0.0)
            for past, now, last in ((self.dY, y, self.y), (self.dR, r, self.r))
        )
        self.pause = torch.where(refused, float(self.window), (self.pause - 1).clamp_min(0))
        self.pause = torch.where(stalled, float(self.plain.patience), self.pause)
        self.residual = torch.where(refused, self.residual, residual)
        self.y, self.r = (torch.where(refused[:, None, None], last, now) for last, now in ((self.y, y), (self.r, r)))
        return self.y, self.r

    def _coefficients(self, y: Tensor, r: Tensor) -> Tensor:
        """Return gamma (B, k), zero for a column that is zero or the rounding of y."""
        rounding = 4 * torch.finfo(r.dtype).eps
        columns = self.dR.flatten(2)
        length = columns.norm(dim=-1)
        floor = rounding * self._real(y).flatten(1).norm(dim=-1, keepdim=True)
        scale = torch.where(length > floor, 1 / length, 0.0)
        unit = columns * scale[..., None]
        gram, projection = unit @ unit.mT, unit @ self._real(r).flatten(1)[..., None]
        ridge = max(self.regularisation, rounding)  # a smaller one drowns in the Gram matrix's own rounding
        system = gram.double() + ridge * torch.eye(gram.shape[-1], dtype=torch.double, device=r.device)
        gamma, _ = torch.linalg.solve_ex(system, projection.double())
        return gamma.squeeze(-1).to(r.dtype) * scale

    def _real(self, tensor: Tensor) -> Tensor:
        return tensor if self.mask is None else tensor.masked_fill(~self.mask[..., None], 0.0)


class Anderson:
    """Whole-sequence solver: one evaluation of f an iteration, as Picard, and a small least-squares problem a sequence.

    It helps where f's slope within a token is large (towards -1 and beyond, where picard is damped or diverges) and
    hinders where exact state is carried from token to token: there it has needed up to 2.2 times picard's iterations.

    The coefficients are one set for the whole sequence, so that before convergence a token depends on those after it;
    at convergence it does within the tolerance. Under a cap that stops short, use picard where that matters.
    """

    whole_sequence = True

    def __init__(
        self,
        *,
        tolerance: Positive,
        tolerance_kind: Literal["relative", "absolute"] = "relative",
        outlier_quantile: Probability = 0.25,
        window: Count = 5,
        regularisation: Positive = 1e-8,
        safeguard: Safeguard = 0.8,
        mixing: Damping = 1.0,
        mixing_decay: Damping = 0.9,
        patience: Count = 15,
        divergence_limit: Positive = 1e8,
    ) -> None:
        self.tolerance, self.tolerance_kind = tolerance, tolerance_kind
        self.outlier_quantile = outlier_quantile
        self.window, self.regularisation, self.safeguard = window, regularisation, safeguard
        self.mixing, self.mixing_decay, self.patience = mixing, mixing_decay, patience
        self.divergence_limit = divergence_limit

    @torch.no_grad()
    def solve(self, problem: Problem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve under `cap`. In training the batch stops together at the outlier quantile."""
        stopping = Stopping(self.tolerance, self.tolerance_kind, self.divergence_limit, training, self.outlier_quantile)
        plain = Damped(self.mixing, self.mixing_decay, self.patience)
        method = Accelerated(
            plain, self.window, self.regularisation, self.safeguard, self.divergence_limit, problem.mask
        )
        return iterate(problem, method, cap, stopping)
