"""Channel mixers Q_t: structured d x d matrices that mix the channels of one token (paper sec. 3.3, app. C.3)."""

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.channel_mixers.dplr import DPLR
from fpexp.channel_mixers.householder import Householder
from fpexp.channel_mixers.kronecker import Kronecker

__all__ = ["DPLR", "ChannelMixer", "Householder", "Kronecker"]
