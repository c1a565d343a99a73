"""What several test files share: toy problems for the solvers, tiny layers, and the same layers in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import oracle
import torch
from torch import Tensor

from fpexp.build import Experiment, build
from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.channel_mixers.dplr import LowRank
from fpexp.config.compose import compose
from fpexp.fixed_point import Gradient, OneStep, Solver
from fpexp.models.fp_mamba import Dependence, FPMambaLayer
from fpexp.models.fp_mamba_problem import FPMambaProblem

LENGTHS = [1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 129, 257]
"""CASES.md 7."""

MIXERS: dict[str, Callable[[int, float], ChannelMixer]] = {
    "H1": lambda width, a_max: Householder(width, rank=1, a_max=a_max),
    "H2": lambda width, a_max: Householder(width, rank=2, a_max=a_max),
    "H4": lambda width, a_max: Householder(width, rank=4, a_max=a_max),
    "DPLR2": lambda width, a_max: DPLR(width, rank=2, a_max=a_max),
    "K-spectral": lambda width, a_max: Kronecker(width, a_max=a_max, normalise="spectral"),
    "K-rows": lambda width, a_max: Kronecker(width, a_max=a_max, normalise="rows"),
}

SWITCHES = ("lambda_", "Q", "b", "c", "gate")
NOTHING = Dependence(lambda_=False, Q=False, b=False, c=False, gate=False)
EVERYTHING = Dependence(lambda_=True, Q=True, b=True, c=True, gate=True)


class Toy:
    """y -> f(y, *parameters) in float64; every parameter has the batch first. `batches` lists the calls' sizes."""

    def __init__(
        self,
        f: Callable[..., Tensor],
        *parameters: Tensor,
        length: int = 1,
        width: int = 1,
        mask: Tensor | None = None,
        batches: list[int] | None = None,
    ) -> None:
        self.f, self.parameters, self.length, self.width, self.mask = f, parameters, length, width, mask
        self.batches = [] if batches is None else batches

    def start(self) -> Tensor:
        return torch.zeros(len(self.parameters[0]), self.length, self.width, dtype=torch.float64)

    def evaluate(self, y: Tensor) -> Tensor:
        self.batches.append(len(y))
        return self.f(y, *self.parameters)

    def select(self, rows: Tensor) -> Self:
        mask = None if self.mask is None else self.mask[rows]
        parameters = (parameter[rows] for parameter in self.parameters)
        return type(self)(self.f, *parameters, length=self.length, width=self.width, mask=mask, batches=self.batches)


def affine(slope: list[float], offset: list[float] | float = 1.0, **settings: Any) -> Toy:
    """y -> slope y + offset, one slope (and offset) for each sequence."""
    slopes = torch.tensor(slope, dtype=torch.float64)[:, None, None]
    offsets = torch.zeros_like(slopes) + torch.tensor(offset, dtype=torch.float64).reshape(-1, 1, 1)
    return Toy(lambda y, a, b: a * y + b, slopes, offsets, **settings)


class Recurrence:
    """f(y)_t = slope_t y_t + y_{t-1} + 1 on (B, T, 1); the state before t is y_{t-1}."""

    def __init__(self, slope: Tensor, before: Tensor | None = None, mask: Tensor | None = None) -> None:
        self.slope, self.mask = slope, mask
        self.before = torch.zeros_like(slope[:, :1]) if before is None else before

    @property
    def length(self) -> int:
        return self.slope.shape[1]

    def start(self) -> Tensor:
        return torch.zeros_like(self.slope)

    def evaluate(self, y: Tensor) -> Tensor:
        return self.slope * y + torch.cat([self.before, y[:, :-1]], dim=1) + 1

    def select(self, rows: Tensor) -> Self:
        mask = None if self.mask is None else self.mask[rows]
        return type(self)(self.slope[rows], self.before[rows], mask)

    def initial_state(self) -> Tensor:
        return self.before

    def token_problem(self, t: int, state: Tensor) -> Recurrence:
        mask = None if self.mask is None else self.mask[:, t : t + 1]
        return type(self)(self.slope[:, t : t + 1], state, mask)

    def advance(self, token: Recurrence, y: Tensor) -> Tensor:
        return y

    def split(self) -> list[Recurrence]:
        masks = [None] * self.length if self.mask is None else self.mask.split(1, dim=1)
        slopes = self.slope.split(1, dim=1)
        return [type(self)(slope, self.before, mask) for slope, mask in zip(slopes, masks, strict=True)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_layer(
    mixer: str | ChannelMixer,
    solver: Solver,
    *,
    state_size: int = 3,
    dependence: Dependence = NOTHING,
    gate: str = "outside",
    norm: str = "none",
    conv_width: int = 0,
    weight_norm: bool = False,
    contracting: bool = True,
    seed: int = 0,
    gradient: Gradient | None = None,
) -> FPMambaLayer:
    """A float64 layer, d_model 4, with every parameter away from its special initial value; a named mixer has width 6.

    `contracting`: a_max 0.5, D and norm so small that the token map contracts.
    """
    if isinstance(mixer, str):
        mixer = MIXERS[mixer](6, 0.5 if contracting else 2.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = FPMambaLayer(
            d_model=4,
            width=mixer.width,
            state_size=state_size,
            dt_rank=2,
            conv_width=conv_width,
            channel_mixer=mixer,
            solver=solver,
            gradient=gradient or OneStep(),
            dependence=dependence,
            gate=gate,
            norm=norm,
            norm_epsilon=1e-6,
            delta_range=(1e-3, 1e-1),
            weight_norm=weight_norm,
        ).double()
        with torch.no_grad():
            layer.mixer_bias.normal_()
            layer.A_log.add_(torch.randn_like(layer.A_log), alpha=0.3)
            layer.D.uniform_(-0.3, 0.3) if contracting else layer.D.uniform_(0.5, 1.5)
            if layer.norm is not None:
                scale = 0.05 if contracting else 1.0
                layer.norm.weight.uniform_(scale / 2, scale)
                layer.norm.bias.normal_()
    return layer


def dense_matrix(mixer: ChannelMixer, coefficients: np.ndarray) -> np.ndarray:
    """Q (width, width) of one token's coefficients, by the oracle.

    With `normalise: spectral` the factors K1 and K2 are the mixer's own, since its power iteration stops early;
    tests/channel_mixers measures how far they are from the oracle's.
    """
    if isinstance(mixer, Kronecker):
        d1, d2 = mixer.sizes
        sizes = [d1, d1 * (d1 + 1) // 2, d2, d2 * (d2 + 1) // 2]
        diagonal1, upper1, diagonal2, upper2 = np.split(coefficients, np.cumsum(sizes)[:-1])
        if mixer.normalise == "spectral":
            k1, k2 = (factor.numpy() for factor in mixer.factors(torch.from_numpy(coefficients)))
        else:
            k1 = oracle.kronecker_factor(diagonal1, upper1, mixer.normalise)
            k2 = oracle.kronecker_factor(diagonal2, upper2, mixer.normalise)
        return oracle.kronecker_matrix(k1, k2, mixer.a_max)
    assert isinstance(mixer, LowRank)
    vectors, weights = np.split(coefficients, [mixer.rank * mixer.width])
    u = oracle.l2norm(oracle.silu(vectors.reshape(mixer.rank, mixer.width)))
    a = mixer.a_max * oracle.sigmoid(weights)
    matrix = oracle.dplr_matrix if isinstance(mixer, DPLR) else oracle.householder_matrix
    return matrix(u, a)


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def oracle_arguments(layer: FPMambaLayer, u: Tensor) -> dict[str, Any]:
    """The arguments of `oracle.fp_mamba_evaluate`, without y, for one sequence u (T, d_model): weights to numpy."""
    x, z = np.split(to_numpy(u) @ to_numpy(layer.in_projection.weight).T, 2, axis=-1)
    if layer.convolution is not None:
        x = convolve(x, to_numpy(layer.convolution.weight)[:, 0], to_numpy(layer.convolution.bias))
    parts = np.split(x @ to_numpy(layer.x_projection.weight).T, np.cumsum(layer.x_sizes)[:-1], axis=-1)
    coefficients, b, c, dt = parts
    coefficients = coefficients + to_numpy(layer.mixer_bias)
    blocks = np.split(to_numpy(layer.s_weight), np.cumsum(layer.columns.from_s))
    W_ps, W_bs, W_cs, W_ls, W_zs = (block if len(block) else None for block in blocks[:5])
    norm = layer.norm
    return {
        "x": x,
        "z": z,
        "delta_x": dt @ to_numpy(layer.dt_projection.weight).T + to_numpy(layer.dt_projection.bias),
        "b_x": b,
        "c_x": c,
        "A": -np.exp(to_numpy(layer.A_log)),
        "D": to_numpy(layer.D),
        "Q": lambda t, s: dense_matrix(
            layer.channel_mixer, coefficients[t] if W_ps is None else coefficients[t] + W_ps @ s
        ),
        "W_bs": W_bs,
        "W_cs": W_cs,
        "W_ls": W_ls,
        "W_zs": W_zs,
        "norm_weight": None if norm is None else to_numpy(norm.weight),
        "norm_bias": None if norm is None else to_numpy(norm.bias),
        "gate_inside": layer.gate_inside,
    }


def convolve(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """silu(sum_j kernel[:, j] * x[t - (width - 1) + j] + bias), tokens before the first are zero; x (T, d)."""
    width = kernel.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return oracle.silu(sum(padded[j : j + len(x)] * kernel[:, j] for j in range(width)) + bias)


def oracle_evaluate(layer: FPMambaLayer, u: Tensor, y: Tensor) -> np.ndarray:
    """f(y) (B, T, d) of a batch, by the oracle."""
    pairs = zip(u, y, strict=True)
    return np.stack([oracle.fp_mamba_evaluate(to_numpy(y_i), **oracle_arguments(layer, u_i))[0] for u_i, y_i in pairs])


def all_states(problem: FPMambaProblem, y: Tensor) -> Tensor:
    """H after every token, (B, T, d, N), when the tokens are y."""
    state, states = problem.initial_state(), []
    for t in range(problem.length):
        state = problem.advance(problem.token_problem(t, state), y[:, t : t + 1])
        states.append(state.H)
    return torch.stack(states, dim=1)


TINY_SIZES = {"state_size": 4, "head_size": 8, "heads": 2}


def tiny(*overrides: str) -> Experiment:
    """The experiment that `fpexp train` would build for A4 on a CPU, at d_model 8 and the sizes of `TINY_SIZES`."""
    words = ["task=a4", "device=cpu", "model.d_model=8"]
    settings = compose([*words, *overrides]).model.settings
    sizes = [f"model.{name}={size}" for name, size in TINY_SIZES.items() if name in settings]
    return build(compose([*words, *sizes, *overrides]))
