"""Slow, dense float64 truth for the tests: numpy only, plain loops over batch and time.

It imports nothing of the project, so that an error in the project cannot hide in it. Arguments are float64
arrays (cast before calling). B batch, T time, d inner width, N state size, r rank. In the functions for one
sequence, t counts from 0 and s_t = y_{t-1}, with s_0 = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
MixerMatrix = Callable[[int, Array], Array]  # (t, s_t) -> Q_t, dense (d, d)
Permutation = tuple[int, ...]


def softplus(x: ArrayLike) -> Array:
    """log(1 + exp(x)), elementwise."""
    return np.logaddexp(0.0, np.asarray(x, dtype=np.float64))


def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + exp(-x)), elementwise; exp only ever sees -|x|."""
    x = np.asarray(x, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def silu(x: ArrayLike) -> Array:
    """x * sigmoid(x), elementwise."""
    return np.asarray(x, dtype=np.float64) * sigmoid(x)


def l2norm(v: ArrayLike, eps: float = 1e-6) -> Array:
    """v / sqrt(sum(v^2) + eps) over the last axis; zero stays zero."""
    v = np.asarray(v, dtype=np.float64)
    return v / np.sqrt((v**2).sum(axis=-1, keepdims=True) + eps)


def layer_norm(v: ArrayLike, weight: Array, bias: Array, eps: float = 1e-6) -> Array:
    """(v - mean) / sqrt(var + eps) * weight + bias over the last axis, var biased; weight, bias: (d,)."""
    v = np.asarray(v, dtype=np.float64)
    centred = v - v.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias


def householder_matrix(u: Array, a: Array) -> Array:
    """Q = (I - a_1 u_1 u_1^T)(I - a_2 u_2 u_2^T) ... (I - a_r u_r u_r^T); u: (r, d), a: (r,); Q: (d, d).

    The product runs from left to right, so Q v applies factor r first and factor 1 last. `u` is used as it is,
    `a` includes a_max. Paper sec. 3.3, app. C.3.
    """
    rank, d = u.shape
    q = np.eye(d)
    for i in range(rank):
        q = q @ (np.eye(d) - a[i] * np.outer(u[i], u[i]))
    return q


def dplr_matrix(u: Array, a: Array) -> Array:
    """Q = I - sum_i a_i u_i u_i^T; u: (r, d), a: (r,), with a_max in it; Q: (d, d). Paper app. C.3."""
    rank, d = u.shape
    q = np.eye(d)
    for i in range(rank):
        q = q - a[i] * np.outer(u[i], u[i])
    return q


def kronecker_matrix(k1: Array, k2: Array, a_max: float) -> Array:
    """Q = I - a_max (K1 (x) K2); K1: (d1, d1), K2: (d2, d2); Q: (d1 d2, d1 d2). Paper app. C.3.

    (K1 (x) K2) v = K1 . mat(v) . K2^T with mat(v) of shape (d1, d2) in row-major order.
    """
    return np.eye(len(k1) * len(k2)) - a_max * np.kron(k1, k2)


def kronecker_factor(diagonal_logits: Array, upper: Array, normalise: str) -> Array:
    """K = diag(sigmoid(diagonal_logits)) . normalise(U U^T), (n, n). Paper app. C.3.

    `diagonal_logits`: (n,). `upper`: (n (n + 1) / 2,), the entries of the upper triangular U before the silu,
    row by row as in `np.triu_indices(n)`. `normalise`: 'spectral' divides by the largest eigenvalue + 1e-6,
    'rows' divides each row by sqrt(sum of its squares + 1e-6). ValueError for anything else.
    """
    n = len(diagonal_logits)
    factor = np.zeros((n, n))
    factor[np.triu_indices(n)] = silu(upper)
    gram = factor @ factor.T
    if normalise == "spectral":
        normalised = gram / (np.linalg.eigvalsh(gram)[-1] + 1e-6)
    elif normalise == "rows":
        normalised = l2norm(gram, eps=1e-6)
    else:
        raise ValueError(f"unknown normalise {normalise!r} (rows, spectral)")
    return np.diag(sigmoid(diagonal_logits)) @ normalised


def selective_scan(
    x: Array, delta: Array, A: Array, b: Array, c: Array, D: Array, h0: Array | None = None
) -> tuple[Array, Array]:
    """H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T,  y_t = H_t . c_t + D * x_t.

    x, delta: (B, T, d); A: (d, N); b, c: (B, T, N); D: (d,); h0: (B, d, N), zero if None. b and c are used as
    they are, delta is positive already. Returns y (B, T, d) and the last H (B, d, N).
    """
    batch, length, d = x.shape
    y = np.zeros((batch, length, d))
    final = np.zeros((batch, d, A.shape[1]))
    for i in range(batch):
        h = np.zeros(A.shape) if h0 is None else h0[i]
        for t in range(length):
            decay = np.exp(delta[i, t][:, None] * A)
            h = decay * h + np.outer(delta[i, t] * x[i, t], b[i, t])
            y[i, t] = h @ c[i, t] + D * x[i, t]
        final[i] = h
    return y, final


def selective_scan_gradients(
    x: Array,
    delta: Array,
    A: Array,
    b: Array,
    c: Array,
    D: Array,
    grad_y: Array,
    h0: Array | None = None,
) -> dict[str, Array]:
    """Gradients of sum(grad_y * y) for `selective_scan`, by the adjoint recurrence G_t = dL/dH_t:

        G_t = exp(delta_{t+1} A) * G_{t+1} + grad_y_t c_t^T
        dL/dx_t = delta_t * (G_t . b_t) + D * grad_y_t
        dL/ddelta_t = x_t * (G_t . b_t) + sum_n (G_t * H_{t-1} * exp(delta_t A) * A)
        dL/dA = sum_t G_t * H_{t-1} * exp(delta_t A) * delta_t
        dL/db_t = G_t^T (delta_t * x_t),  dL/dc_t = H_t^T grad_y_t,  dL/dD = sum_t grad_y_t * x_t
        dL/dh0 = exp(delta_1 A) * G_1

    Shapes as in `selective_scan`, grad_y: (B, T, d). Returns the keys x, delta, A, b, c, D, h0, each of the
    shape of its argument; A and D are summed over the batch, h0 is (B, d, N) also where it was None.
    """
    batch, length, d = x.shape
    grads = {
        "x": np.zeros_like(x),
        "delta": np.zeros_like(delta),
        "A": np.zeros_like(A),
        "b": np.zeros_like(b),
        "c": np.zeros_like(c),
        "D": np.zeros_like(D),
        "h0": np.zeros((batch, d, A.shape[1])),
    }
    for i in range(batch):
        states = [np.zeros(A.shape) if h0 is None else h0[i]]
        for t in range(length):
            decay = np.exp(delta[i, t][:, None] * A)
            states.append(decay * states[-1] + np.outer(delta[i, t] * x[i, t], b[i, t]))

        adjoint = np.zeros(A.shape)
        for t in reversed(range(length)):
            before, after = states[t], states[t + 1]
            decay = np.exp(delta[i, t][:, None] * A)
            adjoint = adjoint + np.outer(grad_y[i, t], c[i, t])
            grad_exponent = adjoint * before * decay
            grad_input = adjoint @ b[i, t]
            grads["x"][i, t] = delta[i, t] * grad_input + D * grad_y[i, t]
            grads["delta"][i, t] = x[i, t] * grad_input + (grad_exponent * A).sum(axis=1)
            grads["A"] += grad_exponent * delta[i, t][:, None]
            grads["b"][i, t] = adjoint.T @ (delta[i, t] * x[i, t])
            grads["c"][i, t] = after.T @ grad_y[i, t]
            grads["D"] += grad_y[i, t] * x[i, t]
            adjoint = decay * adjoint
        grads["h0"][i] = adjoint
    return grads


def fp_mamba_evaluate(
    y: Array,
    x: Array,
    z: Array,
    delta_x: Array,
    b_x: Array,
    c_x: Array,
    A: Array,
    D: Array,
    Q: MixerMatrix,
    W_bs: Array | None,
    W_cs: Array | None,
    W_ls: Array | None,
    W_zs: Array | None,
    norm_weight: Array | None,
    norm_bias: Array | None,
    gate_inside: bool,
) -> tuple[Array, Array]:
    """One evaluation f(y) of the FP-Mamba map for one sequence (paper sec. 4, eqs. 12-14).

        Delta_t = softplus(delta_x_t + W_ls s_t)
        b_t = l2norm(b_x_t + W_bs s_t),  c_t = l2norm(c_x_t + W_cs s_t)
        xt_t = Q_t . (x_t - y_t) + y_t
        H_t = exp(Delta_t A) * H_{t-1} + (Delta_t * xt_t) b_t^T
        f(y)_t = norm(silu(z_t + W_zs s_t) * (H_t . c_t + D * xt_t))        # silu only if gate_inside

    y, x, z, delta_x: (T, d), delta_x before the softplus, bias included; b_x, c_x: (T, N); A: (d, N), negative;
    D: (d,). W_bs, W_cs: (N, d), W_ls, W_zs: (d, d); None leaves its term out. norm_weight, norm_bias: (d,) of
    a LayerNorm, or None for no norm. s comes from the given iterate y. Returns f(y) (T, d) and all H (T, d, N).
    """
    length, d = x.shape
    f_y = np.zeros((length, d))
    states = np.zeros((length, *A.shape))
    h = np.zeros(A.shape)
    for t in range(length):
        s = y[t - 1] if t > 0 else np.zeros(d)
        delta = softplus(delta_x[t] if W_ls is None else delta_x[t] + W_ls @ s)
        b = l2norm(b_x[t] if W_bs is None else b_x[t] + W_bs @ s)
        c = l2norm(c_x[t] if W_cs is None else c_x[t] + W_cs @ s)
        mixed = Q(t, s) @ (x[t] - y[t]) + y[t]
        h = np.exp(delta[:, None] * A) * h + np.outer(delta * mixed, b)
        out = h @ c + D * mixed
        if gate_inside:
            out = silu(z[t] if W_zs is None else z[t] + W_zs @ s) * out
        f_y[t] = out if norm_weight is None else layer_norm(out, norm_weight, norm_bias)
        states[t] = h
    return f_y, states


def fp_mamba_picard(
    evaluate: Callable[[Array], tuple[Array, Array]], shape: tuple[int, ...], iterations: int
) -> tuple[Array, Array | None]:
    """y <- f(y), `iterations` times from y = 0 of `shape`, undamped; `evaluate` returns f(y) and its states.

    Returns the last f(y) and the states that this evaluation made from the iterate before it.
    """
    y = np.zeros(shape)
    states = None
    for _ in range(iterations):
        y, states = evaluate(y)
    return y, states


def fp_mamba_sweep(
    x: Array,
    z: Array,
    delta_x: Array,
    b_x: Array,
    c_x: Array,
    A: Array,
    D: Array,
    Q: MixerMatrix,
    W_bs: Array | None,
    W_cs: Array | None,
    W_ls: Array | None,
    W_zs: Array | None,
    norm_weight: Array | None,
    norm_bias: Array | None,
    gate_inside: bool,
    inner_iterations: int,
) -> tuple[Array, Array]:
    """The fixed point of `fp_mamba_evaluate` token by token, each token iterated from y_t = 0.

        base = (exp(Delta_t A) * H_{t-1}) . c_t,  g = (b_t . c_t) Delta_t + D
        y_t <- norm(silu(z_t + W_zs y_{t-1}) * (base + g * (x_t - (I - Q_t) . (x_t - y_t))))

    Everything but y_t is fixed by y_{t-1} and H_{t-1}. Arguments as in `fp_mamba_evaluate`; always runs
    `inner_iterations` per token. Returns y* (T, d) and H (T, d, N), H_t made from the y_t returned.
    """
    length, d = x.shape
    identity = np.eye(d)
    y = np.zeros((length, d))
    states = np.zeros((length, *A.shape))
    s = np.zeros(d)
    h = np.zeros(A.shape)
    for t in range(length):
        delta = softplus(delta_x[t] + (0.0 if W_ls is None else W_ls @ s))
        b = l2norm(b_x[t] + (0.0 if W_bs is None else W_bs @ s))
        c = l2norm(c_x[t] + (0.0 if W_cs is None else W_cs @ s))
        gate = silu(z[t] + (0.0 if W_zs is None else W_zs @ s)) if gate_inside else np.ones(d)
        complement = identity - Q(t, s)
        decayed = np.exp(delta[:, None] * A) * h
        base = decayed @ c
        g = (b @ c) * delta + D

        token = np.zeros(d)
        for _ in range(inner_iterations):
            token = gate * (base + g * (x[t] - complement @ (x[t] - token)))
            if norm_weight is not None:
                token = layer_norm(token, norm_weight, norm_bias)

        h = decayed + np.outer(delta * (x[t] - complement @ (x[t] - token)), b)
        y[t], states[t], s = token, h, token
    return y, states


def linear_recurrence(
    x: Array, delta_x: Array, b_x: Array, c_x: Array, A: Array, D: Array, Q: MixerMatrix
) -> tuple[Array, Array]:
    """The dense linear recurrence behind FP-Mamba without dependence, norm or inner gate (paper sec. 4).

        (I - diag(g) (I - Q_t)) y_t = base + g * (Q_t . x_t)
        base = (exp(Delta_t A) * H_{t-1}) . c_t,  g = (b_t . c_t) Delta_t + D

    solved directly, so it needs no contraction. Shapes as in `fp_mamba_evaluate`; Q is given s_t = y_{t-1},
    which it should ignore. Returns y (T, d) and H (T, d, N). LinAlgError where the system is singular.
    """
    length, d = x.shape
    identity = np.eye(d)
    y = np.zeros((length, d))
    states = np.zeros((length, *A.shape))
    h = np.zeros(A.shape)
    for t in range(length):
        delta, b, c = softplus(delta_x[t]), l2norm(b_x[t]), l2norm(c_x[t])
        q = Q(t, y[t - 1] if t > 0 else np.zeros(d))
        decayed = np.exp(delta[:, None] * A) * h
        g = (b @ c) * delta + D
        system = identity - np.diag(g) @ (identity - q)
        y[t] = np.linalg.solve(system, decayed @ c + g * (q @ x[t]))
        h = decayed + np.outer(delta * (q @ (x[t] - y[t]) + y[t]), b)
        states[t] = h
    return y, states


def implicit_gradient(jacobian: Array, grad: Array) -> Array:
    """v = (I - J)^-T g, dense; J[i, j] = df_i / dy_j, (n, n); g of any shape with n entries, as v (app. B.3)."""
    transposed = (np.eye(len(jacobian)) - jacobian).T
    return np.linalg.solve(transposed, np.ravel(grad)).reshape(np.shape(grad))


def sequence_residual(f_y: Array, y: Array, mask: NDArray[np.bool_] | None = None, eps: float = 1e-6) -> float:
    """max_t ||f(y)_t - y_t||_inf / max(||f(y)_t||_inf, eps) over the real tokens (paper sec. 3.4, app. D.3).

    f_y, y: (T, d); mask: (T,), True for a real token, all real if None. 0 if no token is real; a NaN in a
    real token gives NaN.
    """
    residuals = [0.0]
    for t in range(len(y)):
        if mask is None or mask[t]:
            scale = np.maximum(np.abs(f_y[t]).max(), eps)
            residuals.append(np.abs(f_y[t] - y[t]).max() / scale)
    return float(np.max(residuals))


def permutation_table(elements: Sequence[Permutation]) -> NDArray[np.int64]:
    """table[i, j] = index of elements[i] * elements[j], with (p q)(k) = p[q[k]]; (n, n).

    `elements` are permutations of range(m). KeyError if they are not closed under the product.
    """
    index = {element: i for i, element in enumerate(elements)}
    table = np.zeros((len(elements), len(elements)), dtype=np.int64)
    for i, p in enumerate(elements):
        for j, q in enumerate(elements):
            table[i, j] = index[tuple(p[q[k]] for k in range(len(q)))]
    return table


def symmetric_group(n: int) -> list[Permutation]:
    """All n! permutations of range(n) in lexicographic order; the identity comes first."""
    return sorted(permutations(range(n)))


def alternating_group(n: int) -> list[Permutation]:
    """The permutations of range(n) with an even number of inversions, in lexicographic order."""

    def inversions(p: Permutation) -> int:
        return sum(p[i] > p[j] for i in range(n) for j in range(i + 1, n))

    return [p for p in symmetric_group(n) if inversions(p) % 2 == 0]


def running_products(sequence: Sequence[int], table: NDArray[np.int64]) -> NDArray[np.int64]:
    """y_t = y_{t-1} x_t from the identity, which is index 0; sequence: (T,) indices; returns (T,)."""
    product = 0
    products = []
    for element in sequence:
        product = int(table[product, element])
        products.append(product)
    return np.array(products, dtype=np.int64)
