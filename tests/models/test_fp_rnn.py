"""FP-RNN: the dense recurrence in numpy, the map, the output, gradients and decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import MIXERS, dense_matrix, random, tiny, to_numpy
from torch import Tensor

from fpexp.errors import UserError
from fpexp.evaluation.metrics import summed_loss
from fpexp.fixed_point import Anderson, Cap, Gradient, Implicit, Lagged, OneStep, Picard, Sequential, Solver, Status
from fpexp.fixed_point.iterate import token_residual
from fpexp.models.fp_rnn import FPRNNLayer
from fpexp.models.fp_rnn_problem import FPRNNProblem, State
from fpexp.ops.backend import only_reference
from fpexp.training.optimizer import make_optimizer

CAP = Cap(5000)
SOLVERS: dict[str, Any] = {
    "picard": lambda tolerance: Picard(tolerance=tolerance),
    "anderson": lambda tolerance: Anderson(tolerance=tolerance),
    "lagged": lambda tolerance: Lagged(tolerance=tolerance),
    "sequential": lambda tolerance: Sequential(tolerance=tolerance, inner_max_iterations=1000, backend="reference"),
    "fused": lambda tolerance: Sequential(tolerance=tolerance, inner_max_iterations=1000, backend="cpu"),
}
mixers = pytest.mark.parametrize("mixer", MIXERS)
solvers = pytest.mark.parametrize("solver", SOLVERS)
dependence = pytest.mark.parametrize("hidden_dependence", [False, True], ids=["blind", "dependent"])


def make_rnn(
    mixer: str,
    solver: Solver | str = "picard",
    *,
    hidden_dependence: bool = True,
    weight_norm: bool = False,
    a_max: float = 0.5,
    gradient: Gradient | None = None,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> FPRNNLayer:
    """A float64 layer, d_model 4, width 6, with every parameter away from its special initial value."""
    solver = SOLVERS[solver](tolerance) if isinstance(solver, str) else solver
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channel_mixer = MIXERS[mixer](6, a_max)
        layer = FPRNNLayer(4, 6, channel_mixer, solver, gradient or OneStep(), hidden_dependence, weight_norm).double()
        with torch.no_grad():
            layer.mixer_bias.normal_()
            layer.norm.weight.uniform_(0.5, 1.5)
            for projection in (layer.in_projection, layer.x_projection):
                for parameter in projection.parameters():
                    parameter.mul_(2)
    return layer


@dataclasses.dataclass
class Numpy:
    """What a layer computes from one sequence u (T, d_model), before any solving: (T, d) each, and Q (T, d, d)."""

    layer: FPRNNLayer
    u: Tensor

    def __post_init__(self) -> None:
        layer, d = self.layer, self.layer.width
        self.m = m = layer.channel_mixer.coefficient_size
        self.x, self.z = np.split(to_numpy(self.u) @ to_numpy(layer.in_projection.weight).T, 2, axis=-1)
        parts = np.split(self.x @ to_numpy(layer.x_projection.weight).T, [m, m + d, m + 2 * d], axis=-1)
        self.coefficients = parts[0] + to_numpy(layer.mixer_bias)
        self.decay, self.v, self.c = oracle.sigmoid(parts[1]), oracle.silu(parts[2]) * self.x, parts[3]
        self.W_s = to_numpy(layer.s_weight)

    def mixer(self, t: int, s: np.ndarray) -> np.ndarray:
        coefficients = self.coefficients[t]
        if len(self.W_s):
            coefficients = coefficients + self.W_s[: self.m] @ s
        return dense_matrix(self.layer.channel_mixer, coefficients)

    def evaluate(self, y: np.ndarray) -> np.ndarray:
        """f(y), by plain loops over time with dense Q."""
        h, s, images = np.zeros(self.layer.width), np.zeros(self.layer.width), []
        for t in range(len(y)):
            Q = self.mixer(t, s)
            h = self.decay[t] * h + (1 - self.decay[t]) * (Q @ self.v[t] + (np.eye(len(Q)) - Q) @ y[t])
            s = y[t]
            images.append(h)
        return np.stack(images)

    def dense_recurrence(self) -> np.ndarray:
        """h_t = A_t h_{t-1} + (I - A_t) v_t, A_t = (Lambda_t + (I - Lambda_t) Q_t)^-1 Lambda_t, with its own s."""
        h, identity, states = np.zeros(self.layer.width), np.eye(self.layer.width), []
        for t in range(len(self.x)):
            decay = np.diag(self.decay[t])
            A = np.linalg.solve(decay + (identity - decay) @ self.mixer(t, h), decay)
            h = A @ h + (identity - A) @ self.v[t]
            states.append(h)
        return np.stack(states)

    def output(self, h: np.ndarray) -> np.ndarray:
        s = np.concatenate([np.zeros((1, h.shape[1])), h[:-1]])
        c = self.c + (s @ self.W_s[self.m :].T if len(self.W_s) else 0)
        gated = oracle.silu(self.z) * oracle.silu(c) * h
        normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5) * to_numpy(self.layer.norm.weight)
        return np.asarray(normed @ to_numpy(self.layer.out_projection.weight).T)


@solvers
@mixers
@dependence
def test_golden_the_fixed_point_is_the_dense_recurrence(mixer: str, solver: str, hidden_dependence: bool) -> None:
    """Paper app. B.2; the mixer that sees h is given the recurrence's own h_{t-1}, so the same holds for it."""
    layer = make_rnn(mixer, solver, hidden_dependence=hidden_dependence)
    u = random(3, 12, 4)
    problem = layer.problem(u)
    result = layer.solver.solve(problem, CAP, training=False)
    assert (result.status == Status.CONVERGED).all()
    for i in range(len(u)):
        dense = Numpy(layer, u[i]).dense_recurrence()
        assert np.abs(dense).max() > 0.1
        np.testing.assert_allclose(to_numpy(result.value[i]), dense, rtol=0, atol=1e-8)
    torch.testing.assert_close(problem.evaluate(result.value), result.value, rtol=0, atol=1e-10)


@mixers
@dependence
@pytest.mark.parametrize("weight_norm", [False, True])
def test_evaluate_is_the_formula(mixer: str, hidden_dependence: bool, weight_norm: bool) -> None:
    layer = make_rnn(mixer, hidden_dependence=hidden_dependence, weight_norm=weight_norm, a_max=2.0)
    u, y = random(2, 5, 4), random(2, 5, 6, seed=1)
    expected = np.stack([Numpy(layer, u[i]).evaluate(to_numpy(y[i])) for i in range(2)])
    problem = layer.problem(u)
    np.testing.assert_allclose(to_numpy(problem.evaluate(y)), expected, rtol=0, atol=1e-10)
    with only_reference():
        np.testing.assert_allclose(to_numpy(problem.evaluate(y)), expected, rtol=0, atol=1e-10)
    state, tokens = problem.initial_state(), []
    for t in range(5):  # the token map is the whole map, whatever y the tokens before had
        token = problem.token_problem(t, state)
        tokens.append(token.evaluate(y[:, t : t + 1]))
        state = problem.advance(token, y[:, t : t + 1])
    np.testing.assert_allclose(to_numpy(torch.cat(tokens, dim=1)), expected, rtol=0, atol=1e-10)


def test_mixer_and_scan_have_states_of_their_own() -> None:
    """The mixer sees the iterate before; the scan carries its image, or, lagged, that of the iterate before."""
    layer = make_rnn("H2")
    u, y, memory = random(1, 5, 4), random(1, 5, 6, seed=1), random(1, 5, 6, seed=2)
    state = State(y=random(1, 1, 6, seed=3), h=random(1, 1, 6, seed=4))
    plain, h = Numpy(layer, u[0]), to_numpy(state.h[0, 0])
    s, before = (to_numpy(torch.cat(pair, dim=1)[0]) for pair in ((state.y, y), (state.h, memory)))
    scanned, lagged = [], []
    for t in range(5):
        Q = plain.mixer(t, s[t])
        write = (1 - plain.decay[t]) * (Q @ plain.v[t] + (np.eye(6) - Q) @ to_numpy(y[0, t]))
        h = plain.decay[t] * h + write
        scanned.append(h)
        lagged.append(plain.decay[t] * before[t] + write)
    problem = layer.problem(u, state=state)
    np.testing.assert_allclose(to_numpy(problem.evaluate(y)[0]), np.stack(scanned), rtol=0, atol=1e-12)
    for part in problem.evaluate_lagged(y, memory):
        np.testing.assert_allclose(to_numpy(part[0]), np.stack(lagged), rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", ["picard", "sequential", "fused"])
@dependence
def test_output(solver: str, hidden_dependence: bool) -> None:
    """W_out(norm(silu(z) * silu(W_c [x, h_{t-1}]) * h))."""
    layer = make_rnn("H2", solver, hidden_dependence=hidden_dependence)
    u = random(2, 6, 4)
    output, (result,) = layer(u, CAP, None)
    for i in range(2):
        expected = Numpy(layer, u[i]).output(to_numpy(result.value[i]))
        np.testing.assert_allclose(to_numpy(output[i]), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_swept_tokens_residual_is_that_under_the_whole_map(backend: str) -> None:
    layer = make_rnn("H2", a_max=2.0)
    problem = layer.problem(random(2, 7, 4))
    solver = Sequential(tolerance=1e-3, inner_max_iterations=3, backend=backend)  # type: ignore[arg-type]
    result = solver.solve(problem, CAP, training=False)
    assert result.tokens is not None
    assert result.tokens.residual.max() > 1e-3
    measured = token_residual(problem.evaluate(result.value), result.value)
    torch.testing.assert_close(measured, result.tokens.residual, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("hidden_dependence", [True, False])
def test_the_start_is_that_of_one_linear_layer(hidden_dependence: bool) -> None:
    """W_x and W_s uniform in 1 / sqrt(2 d), what sees x alone in 1 / sqrt(d), the bias zero."""
    d = 64
    layer = FPRNNLayer(32, d, MIXERS["H2"](d, 2.0), Picard(tolerance=0.1), OneStep(), hidden_dependence, False)
    m = layer.channel_mixer.coefficient_size
    coefficients, alone, read_out = layer.x_projection.weight.detach().split([m, 2 * d, d])
    parts = [(coefficients, 2 * d), (alone, d), (read_out, 2 * d)]
    if hidden_dependence:
        parts.append((layer.s_weight.detach(), 2 * d))
    else:
        assert layer.s_weight.numel() == 0
    for weight, inputs in parts:
        assert 0.98 < weight.abs().max() * inputs**0.5 <= 1
    assert not layer.mixer_bias.any()


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-rows"])
@pytest.mark.parametrize("solver", ["picard", "fused"])
def test_implicit_gradient_is_that_of_unrolling(mixer: str, solver: str) -> None:
    """CASES.md 4: against autograd through 200 steps of the map, in every parameter and the input."""
    gradient = Implicit(tolerance=1e-12, max_iterations=200, restart=50)
    layer = make_rnn(mixer, solver, gradient=gradient)
    u, weights = random(2, 4, 4).requires_grad_(), random(2, 4, 4, seed=1)
    wanted = [u, *layer.parameters()]
    found = torch.autograd.grad((layer(u, CAP, None)[0] * weights).sum(), wanted)
    problem = layer.problem(u)
    h = problem.start()
    with only_reference():
        for _ in range(200):
            h = problem.evaluate(h)
    x, z = layer.in_projection(u).chunk(2, dim=-1)
    expected = torch.autograd.grad((layer._read_out(x, z, problem.state, h) * weights).sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-rows", "K-spectral"])
@pytest.mark.parametrize("solver", ["sequential", "fused", "picard"])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_one_step_gradient(mixer: str, solver: str, weight_norm: bool) -> None:
    """Every parameter's is finite, not zero, and that of one plain evaluation at h*, also where kernels take over."""
    layer = make_rnn(mixer, solver, weight_norm=weight_norm)
    u, weights = random(2, 5, 4), random(2, 5, 4, seed=1)
    parameters = list(layer.parameters())
    output, (result,) = layer(u, CAP, None)
    found = torch.autograd.grad((output * weights).sum(), parameters)
    with only_reference():
        problem = layer.problem(u)
        x, z = layer.in_projection(u).chunk(2, dim=-1)
        output = layer._read_out(x, z, problem.state, problem.evaluate(result.value))
    expected = torch.autograd.grad((output * weights).sum(), parameters)
    for (name, _), a, b in zip(layer.named_parameters(), found, expected, strict=True):
        assert a.isfinite().all(), name
        assert a.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11, msg=name)


def swept(problem: FPRNNProblem, backend: str, **settings: Any) -> tuple[Any, Any]:
    """Result and last state."""
    return Sequential(**{"tolerance": 1e-6, "backend": backend, **settings}).carry(problem)


@mixers
@dependence
@pytest.mark.parametrize("a_max", [0.5, 2.0])
def test_the_fused_sweep_is_the_plain_one(mixer: str, hidden_dependence: bool, a_max: float) -> None:
    """The same iterates, counts, residuals, statuses and state, also where damping and the cap decide."""
    layer = make_rnn(mixer, hidden_dependence=hidden_dependence, a_max=a_max)
    settings: dict[str, Any] = {}
    if a_max == 2.0:
        settings = {"patience": 3, "inner_max_iterations": 20, "tolerance": 1e-4}
    with torch.no_grad():
        first, more = layer.problem(random(7, 9, 4)), random(7, 3, 4, seed=5)
        _, state = swept(first, "reference", **settings)
        problem = layer.problem(more, state=state)
    for part in (first, problem):
        (expected, expected_state), (found, found_state) = (swept(part, b, **settings) for b in ("reference", "cpu"))
        assert torch.equal(found.tokens.iterations, expected.tokens.iterations)
        assert torch.equal(found.tokens.status, expected.tokens.status)
        torch.testing.assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.tokens.residual, expected.tokens.residual, rtol=1e-5, atol=1e-9)
        for name in ("y", "h"):
            torch.testing.assert_close(
                getattr(found_state, name), getattr(expected_state, name), rtol=1e-9, atol=1e-9, msg=name
            )


def test_what_a_sweep_is_given_may_be_strided() -> None:
    """CASES.md 12: transposed views give what contiguous copies give."""
    problem = make_rnn("H2").problem(random(5, 4, 4))
    views = problem._map(lambda tensor: tensor.detach().mT.contiguous().mT, problem.state)
    views = dataclasses.replace(views, loop_weight=views.loop_weight.detach().T.contiguous().T)
    assert not any(tensor.is_contiguous() for tensor in (views.v, views.from_x, views.loop_weight))
    (expected, expected_state), (found, found_state) = (swept(part, "cpu") for part in (problem, views))
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found_state.h, expected_state.h)


@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
def test_extreme_decays(mixer: str) -> None:
    """CASES.md 9 and 10: lambda before its sigmoid from -3e4 to 3e4, so 0 and 1 beside each other."""
    layer, values = make_rnn(mixer), [0.0, 10, -10, 20, -20, 88, -88, 1e3, -1e3, 3e4, -3e4, 1]
    problem = layer.problem(random(2, 12, 4))
    coefficients, decay = problem.from_x.detach().split([problem.columns.sizes[0], 6], dim=-1)
    logits = torch.tensor(values, dtype=torch.float64)[:, None] * torch.tensor([1.0, -1, 1, 0, -1, 1])
    from_x = torch.cat([coefficients, logits.expand_as(decay)], dim=-1)
    problem = dataclasses.replace(problem, from_x=from_x)
    (expected, _), (found, _) = (swept(problem, backend, inner_max_iterations=30) for backend in ("reference", "cpu"))
    assert expected.value.isfinite().all()
    torch.testing.assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.status, expected.status)
    results = []
    for dtype, plain in ((torch.float64, True), (torch.float64, False), (torch.float32, False)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (from_x, problem.v.detach())]
        weight = problem.loop_weight.detach().to(dtype)
        state = State(*(tensor.to(dtype) for tensor in (problem.state.y, problem.state.h)))
        given = dataclasses.replace(problem, from_x=leaves[0], v=leaves[1], loop_weight=weight, state=state)
        with only_reference() if plain else contextlib.nullcontext():
            f_y = given.evaluate(random(2, 12, 6, seed=1).to(dtype))
            results.append([f_y.detach(), *torch.autograd.grad(f_y.sum(), leaves)])
    for truth, exact, rounded in zip(*results, strict=True):
        assert (exact - truth).abs().max() <= 1e-10 * truth.abs().max()
        assert (rounded - truth).abs().max() <= 1e-4 * truth.abs().max()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_padding_changes_nothing(backend: str) -> None:
    """CASES.md 18: the shorter sequences alone and padded in a batch; padded tokens are solved at once."""
    layer = make_rnn("K-rows")
    u, mask = random(6, 8, 4), torch.arange(8) < torch.tensor([8, 3, 5, 1, 8, 2])[:, None]
    solver = Sequential(tolerance=1e-9, backend=backend)  # type: ignore[arg-type]
    together = solver.solve(layer.problem(u, mask=mask), CAP, training=False)
    assert together.tokens is not None
    assert (together.tokens.iterations[~mask] == 1).all()
    for i, length in enumerate(mask.sum(-1).tolist()):
        alone = solver.solve(layer.problem(u[i : i + 1, :length]), CAP, training=False)
        torch.testing.assert_close(together.value[i : i + 1, :length], alone.value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("model", ["fp_rnn_h", "fp_rnn_k", "fp_rnn_dplr"])
@pytest.mark.parametrize("gradient", ["one_step", "implicit"])
@pytest.mark.parametrize(("backend", "length"), [("reference", 34), ("cpu", 130)])
def test_any_cut_decodes_as_one_pass(model: str, gradient: str, backend: str, length: int) -> None:
    """CASES.md 17, two layers; the plain loop takes its time."""
    words = ["precision=float64", "model.layers=2", "model.channel_mixer.a_max=0.5", f"gradient={gradient}"]
    sequential = ["solver=sequential", "solver.tolerance=1e-10", f"solver.backend={backend}"]
    built = tiny(f"model={model}", *words, *sequential).model.eval()
    inputs = torch.randint(12, (3, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = built(inputs).logits
    for parts in ([length // 2 - 1, length // 2 + 1], [1, length - 1], [1] * length):
        state, logits, sizes = None, [], set()
        for part in inputs.split(parts, dim=1):
            output, state = built.decode(part, state)
            logits.append(output.logits)
            held = itertools.chain.from_iterable((layer.y, layer.h) for layer in state.layers)
            sizes.add(sum(tensor.untyped_storage().nbytes() for tensor in held))
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-8)
        assert len(sizes) == 1, "the state does not grow"


@pytest.mark.parametrize("gradient", ["one_step", "implicit"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_loose_tolerance_costs_no_agreement(backend: str, gradient: str) -> None:
    """The read-out sees f(h*) and the mixer h*; mixed up they would differ by what the tolerance leaves."""
    words = ["model=fp_rnn_k", "precision=float64", f"gradient={gradient}", "solver.tolerance=0.1"]
    built = tiny(*words, "solver=sequential", f"solver.backend={backend}").model.eval()
    inputs = torch.randint(12, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = built(inputs)
    assert max(float(solve.residual.max()) for solve in whole.solves) > 1e-3
    state, logits = None, []
    for part in inputs.split([7, 1, 1, 11], dim=1):
        output, state = built.decode(part, state)
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, rtol=0, atol=1e-10)


def test_picard_decodes_by_the_sweep() -> None:
    words = ["model=fp_rnn_h", "solver=picard", "solver.tolerance=1e-9", "model.channel_mixer.a_max=0.5"]
    built = tiny(*words, "precision=float64").model.eval()
    inputs = torch.randint(12, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = built(inputs, Cap(1000)).logits
    first, state = built.decode(inputs[:, :12])
    assert all(solve.tokens is not None for solve in first.solves), "token by token"
    rest, _ = built.decode(inputs[:, 12:], state)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], dim=1), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("words", [["solver=auto"], ["solver=picard"], ["model.weight_norm=true", "solver=lagged"]])
def test_two_training_steps_lower_the_loss(words: list[str]) -> None:
    experiment = tiny("model=fp_rnn_h", "model.mlp_expand=1", "training.lr=1e-2", *words)
    optimizer = make_optimizer(experiment.model, experiment.config.training)
    source = torch.Generator().manual_seed(0)
    batch = experiment.task.sample(16, 5, source)
    losses = []
    for _ in range(3):
        output = experiment.model(batch.inputs, experiment.schedule.training_cap(5, source), batch.mask)
        loss = summed_loss(output.logits, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in experiment.model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_bfloat16_autocast_keeps_the_states_in_float32() -> None:
    built = tiny("model=fp_rnn_k", "model.channel_mixer.a_max=0.5", "solver.tolerance=1e-3").model.eval()
    inputs = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(0))
    exact = built(inputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        output, state = built.decode(inputs)
    assert output.logits.dtype == torch.bfloat16
    assert (output.logits - exact).abs().max() < 4e-2 * exact.abs().max()
    assert {tensor.dtype for layer in state.layers for tensor in (layer.y, layer.h)} == {torch.float32}


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="inner width of 0"):
        tiny("model=fp_rnn_h", "model.expand=0.01")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sequence_that_is_not_finite_stays_by_itself(backend: str) -> None:
    """CASES.md 1: it is said of its tokens alone, in whatever task of the kernel they are."""
    layer = make_rnn("K-spectral", "sequential")
    u = random(9, 5, 4)
    solver = Sequential(tolerance=1e-9, backend=backend)  # type: ignore[arg-type]
    expected = solver.solve(layer.problem(u), CAP, training=False)
    u[1, 2] = float("nan")
    result = solver.solve(layer.problem(u), CAP, training=False)
    assert result.tokens is not None
    assert (result.tokens.status[1, 2:] == Status.NON_FINITE).all()
    others = torch.arange(9) != 1
    assert torch.equal(result.value[others], expected.value[others])
    assert torch.equal(result.value[1, :2], expected.value[1, :2])


def test_terms_that_do_not_fit_are_refused() -> None:
    """A kernel would read past the end."""
    problem = make_rnn("H2").problem(random(2, 3, 4))
    with pytest.raises(ValueError, match="do not fit"):
        Sequential(tolerance=0.1).solve(
            dataclasses.replace(problem, from_x=problem.from_x[..., 1:]), CAP, training=False
        )
    wrong = dataclasses.replace(problem.columns, from_s=(problem.columns.sizes[0], 0, 0, 6, 0))
    longer = torch.zeros(problem.columns.sizes[0] + 6, 6, dtype=torch.float64)
    changed = dataclasses.replace(problem, columns=wrong, loop_weight=longer)
    with pytest.raises(ValueError, match="only mixer coefficients depend on s"):
        Sequential(tolerance=0.1).solve(changed, CAP, training=False)
