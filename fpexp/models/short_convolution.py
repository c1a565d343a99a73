"""The short causal convolution in front of a sequence mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def activate(convolution: ShortConvolution | None, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `convolution.decode(x, before)`; silu(x) and no inputs without a convolution."""
    return (functional.silu(x), None) if convolution is None else convolution.decode(x, before)


class ShortConvolution(nn.Conv1d):
    """silu(conv(x)) over the last `kernel` tokens, each channel by itself; (B, T, d) -> (B, T, d), any T >= 1."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(width, width, kernel, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation at each token from that token and the ones before it."""
        return self._convolve(functional.pad(x, (0, 0, self.kernel_size[0] - 1, 0)))

    def decode(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the activation, and the inputs (B, kernel - 1, d) that the tokens after x will see.

        `before` are those that x sees; None at the start of a sequence.
        """
        if before is None:
            before = x.new_zeros(x.shape[0], self.kernel_size[0] - 1, x.shape[2])
        window = torch.cat([before, x], dim=1)
        return self._convolve(window), window[:, x.shape[1] :].clone()

    def _convolve(self, window: Tensor) -> Tensor:
        """(B, kernel - 1 + T, d) -> (B, T, d). On a CPU torch's depthwise convolution is slower than its definition."""
        if not window.is_cpu:
            return functional.silu(super().forward(window.mT)).mT
        assert self.bias is not None
        kernel, length = self.weight.squeeze(1).T, window.shape[1] - self.kernel_size[0] + 1
        total = self.bias.expand(*window.shape[:1], length, -1)
        for j, weight in enumerate(kernel):
            total = torch.addcmul(total, window[:, j : j + length], weight)
        return functional.silu(total)
