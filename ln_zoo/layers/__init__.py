"""Layers with torch's signatures and semantics that take a norm."""

from ln_zoo.layers.cells import GRUCell, LSTMCell, RecurrentCell, RNNCell, without_blocks
from ln_zoo.layers.conv import Conv2d
from ln_zoo.layers.draw import DRAWNetwork, DRAWOutput, DRAWTrace
from ln_zoo.layers.dreamer_v3 import DreamerV3GRU, DreamerV3SequenceModel
from ln_zoo.layers.initialization import (
    data_dependent_init,
    orthogonal_,
    orthogonal_init,
    set_forget_bias,
)
from ln_zoo.layers.linear import Linear
from ln_zoo.layers.recurrent import RecurrentLayer
from ln_zoo.layers.rnn import GRU, LSTM, RNN, layer_config, recurrent_layer
from ln_zoo.layers.slstm import SLSTM, SLSTMCell
from ln_zoo.layers.window import WindowLSTM, WindowOutput, WindowState

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "SLSTM",
    "Conv2d",
    "DRAWNetwork",
    "DRAWOutput",
    "DRAWTrace",
    "DreamerV3GRU",
    "DreamerV3SequenceModel",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "RNNCell",
    "RecurrentCell",
    "RecurrentLayer",
    "SLSTMCell",
    "WindowLSTM",
    "WindowOutput",
    "WindowState",
    "data_dependent_init",
    "layer_config",
    "orthogonal_",
    "orthogonal_init",
    "recurrent_layer",
    "set_forget_bias",
    "without_blocks",
]
