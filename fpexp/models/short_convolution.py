"""The short causal convolution in front of a sequence mixer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ShortConvolution(nn.Conv1d):
    """silu(conv(x)) over the last `kernel` tokens, each channel by itself; (B, T, d) -> (B, T, d), any T >= 1."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(width, width, kernel, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation at each token from that token and the ones before it."""
        padded = functional.pad(x.mT, (self.kernel_size[0] - 1, 0))
        return functional.silu(super().forward(padded)).mT
