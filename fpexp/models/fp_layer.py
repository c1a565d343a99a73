"""What the layers of fixed points share, whatever their sequence mixer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Cap, Gradient, Sequential, Solver, SolveResult, TokenwiseProblem
from fpexp.models.lm import SequenceLayer


class FPLayer(SequenceLayer):
    """A layer of inner width d whose tokens solve a fixed-point equation, (B, T, d_model) -> (B, T, d_model).

    A subclass makes `x_projection` and `s_weight`, what multiplies x and s_t = y_{t-1} of the given iterate.
    """

    x_projection: nn.Linear
    s_weight: nn.Parameter

    def __init__(
        self, d_model: int, width: int, channel_mixer: ChannelMixer, solver: Solver, gradient: Gradient
    ) -> None:
        super().__init__()
        self.width, self.output_size = width, d_model
        self.channel_mixer, self.solver, self.gradient = channel_mixer, solver, gradient
        self.iterations_depend_on_length = solver.whole_sequence
        self.in_projection = nn.Linear(d_model, 2 * width, bias=False)

    def _norm_weights(self) -> None:
        """Let length and direction of the weights on x and s be parameters of their own."""
        parametrizations.weight_norm(self.x_projection)
        if self.s_weight.numel():
            parametrizations.weight_norm(self, "s_weight")

    def _solve(self, problem: TokenwiseProblem, cap: Cap) -> tuple[Tensor, SolveResult]:
        """Solve without gradient, then attach it."""
        return self.gradient.attach(problem, self.solver.solve(problem, cap, training=self.training))

    def _carry(self, problem: TokenwiseProblem) -> tuple[Tensor, SolveResult, Any]:
        """Solve by the sequential sweep, whose state goes on: another solver lends it its tolerance.

        To rounding what one pass over all tokens gives with that sweep; with gradient=unrolled, whose later
        evaluations have other states, within the tolerance.
        """
        result, state = Sequential.like(self.solver).carry(problem)
        return *self.gradient.attach(problem, result), state
