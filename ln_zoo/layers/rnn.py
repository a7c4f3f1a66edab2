"""LSTM, GRU and simple RNN as in `torch.nn`, with a norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.layers.cells import GRUCell, LSTMCell, RecurrentCell, RNNCell, rnn_cell
from ln_zoo.layers.recurrent import RecurrentLayer, RecurrentOptions
from ln_zoo.ops import CELLS, lstm_cell
from ln_zoo.utils.class_paths import class_path, import_path


class LSTM(RecurrentLayer):
    r"""Long short-term memory (paper, eq. 20-22): `torch.nn.LSTM` with a norm.

    With gates i, f, g, o cut from ``input(W x) + recurrent(U h) + b_ih + b_hh``, where ``input``,
    ``recurrent`` and ``cell`` are the normalised sites:

    .. math:: \begin{aligned}
        c' &= \sigma(f) \odot c + \sigma(i) \odot \tanh(g) \\
        h' &= \sigma(o) \odot \tanh(\operatorname{cell}(c'))
        \end{aligned}

    The carried c' is not normalised. With ``proj_size``, ``h' = W_hr h'``. As in torch and unlike
    the paper, there are two biases (their sum is the paper's b), and gates are in torch's order.

    Args:
        peephole: gates see cell states (Graves 2013, eq. 7-10): i and f the previous one, o the new
            one, each by a weight per unit. No hand-written kernel has them.
        derivative_bound: clip the derivative of the loss with respect to each gate's sum to this
            size (Graves 2013, section 2.1), in no hand-written kernel; default: no clipping.

    Further arguments: see `RecurrentLayer`. Parameters: as there, with G = 4H; gains (4H,) at the
    sites ``"input"`` and ``"recurrent"``, gain and shift (H,) at ``"cell"``; ``weight_peephole_l0``
    (3, H) to i, f, o.

    Raises:
        ValueError: as `RecurrentLayer`, and for a ``derivative_bound`` that is not positive.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = LSTM(3, 5, num_layers=2, batch_first=True, norm=LayerNorm())
        >>> output, (h, c) = layer(torch.randn(4, 7, 3))
        >>> output.shape, h.shape, c.shape
        (torch.Size([4, 7, 5]), torch.Size([2, 4, 5]), torch.Size([2, 4, 5]))
    """

    cell = CELLS["LSTM"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        peephole: bool = False,
        derivative_bound: float | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype, cell=lstm_cell(peephole, derivative_bound), **options,
        )  # fmt: skip
        self.derivative_bound = derivative_bound

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        peephole = bool(self.cell.weights)
        return LSTMCell(peephole=peephole, derivative_bound=self.derivative_bound, **arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            peephole = "weight_peephole_l0" in self._parameters
            self.cell = lstm_cell(peephole, state.get("derivative_bound"))

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        reset: Tensor | PackedSequence | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """Outputs and final states.

        Args:
            input: (T, N, I), (N, T, I) with ``batch_first``, (T, I) for one example, or packed.
            hx: initial (h, c), (L, N, H or P) and (L, N, H), or (L, H or P) and (L, H) for one
                example, with L = layers * directions; default zeros.
            reset: steps before which states are set to zero: boolean, (T, N), (N, T) with
                ``batch_first``, (T,) for one example, or packed as the input is. The result equals
                running the pieces as separate sequences; only the first one starts from ``hx``,
                unless it is reset too. A second direction reads each piece backwards, and only the
                last one starts from ``hx``. Norms with statistics per time step (`BatchNorm`) count
                steps from the start of a piece. Then all pieces run as one packed batch, and
                recurrent dropout draws a mask for each piece, otherwise for each sequence.
            mask: valid steps of padded sequences: boolean, (T, N), or (N, T) with ``batch_first``,
                true at the first steps of each sequence. Such a call runs the sequences packed,
                which synchronises with the device. Outputs are zero where the mask is false; final
                states are taken after the last valid step.

        Returns:
            The output, (T, N, D * H) for D directions, or (T, N, D * P) with ``proj_size``, in the
            layout of the input; and the final states (h, c) in the shapes of ``hx``.

        Raises:
            RuntimeError: for mismatched sizes.
            TypeError: if ``hx`` is not a tuple of two, or only one of ``reset`` and the input is
                packed.
            ValueError: if the input is neither 2D nor 3D, or ``reset`` or ``mask`` does not fit it;
                under batch normalisation in training, for a batch of one.
        """
        output, (h, c) = self._run(input, hx, reset, mask)
        return output, (h, c)


class GRU(RecurrentLayer):
    r"""Gated recurrent units (paper, eq. 26-28): `torch.nn.GRU` with a norm.

    With r, z, n cut from ``input(W x) + b_ih`` and, marked ', from ``recurrent(U h) + b_hh``:

    .. math:: \begin{aligned}
        \bar n &= \tanh(n + \sigma(r + r') \odot n') \\
        h' &= (1 - \sigma(z + z')) \odot \bar n + \sigma(z + z') \odot h
        \end{aligned}

    The two gates share statistics over 2H features, the candidate n has its own. As in torch and
    unlike the paper, there are two biases, added after normalisation, and z weights the old state.

    Arguments and errors: see `RecurrentLayer`. Parameters: as there, with G = 3H and gains (3H,) at
    the sites ``"input"`` and ``"recurrent"``.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> output, h = GRU(3, 5, bidirectional=True, norm=LayerNorm())(torch.randn(7, 4, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 4, 10]), torch.Size([2, 4, 5]))
    """

    cell = CELLS["GRU"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **options,
        )  # fmt: skip

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return GRUCell(**arguments)


class RNN(RecurrentLayer):
    """Simple recurrent units (paper, eq. 4): `torch.nn.RNN` with a norm.

    ``h' = f(sum(W x + U h) + b_ih + b_hh)``: the sum of both terms is normalised.

    Args:
        nonlinearity: f, ``"tanh"`` or ``"relu"``.

    Further arguments: see `RecurrentLayer`. Parameters: as there, with G = H; gain (H,) at the site
    ``"sum"``. Norms that act on weights have scales (H,) at ``"input"`` and ``"recurrent"``
    instead.

    Raises:
        ValueError: as `RecurrentLayer`, and for another nonlinearity.
    """

    cell = CELLS["RNN_TANH"]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, cell=rnn_cell(nonlinearity), **options,
        )  # fmt: skip
        self.nonlinearity = nonlinearity

    def _new_cell(self, **arguments: Any) -> RecurrentCell:
        return RNNCell(nonlinearity=self.nonlinearity, **arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "cell" not in state:  # pickled by version 0.1
            self.cell = rnn_cell(self.nonlinearity)


def recurrent_layer(kind: str | Mapping[str, str] | type[RecurrentLayer]) -> type[RecurrentLayer]:
    """Resolve a name, class or config to a class of recurrent layers.

    ``kind`` is ``"lstm"``, ``"gru"`` or ``"rnn"``, in any case; a class; or a value of
    `layer_config`, whose class path is imported: use only your own files and checkpoints.

    Raises:
        ValueError: for an unknown name, or a path that is not a class of recurrent layers.
    """
    found: Any = kind
    if isinstance(kind, str):
        found = {cls.__name__: cls for cls in (LSTM, GRU, RNN)}.get(kind.upper())
    elif isinstance(kind, Mapping):
        try:
            found = import_path(str(kind.get("class_path")))
        except ImportError as error:
            raise ValueError(f"cell {error}") from error
    if not (isinstance(found, type) and issubclass(found, RecurrentLayer)):
        raise ValueError(
            "cell must be one of ['gru', 'lstm', 'rnn'], or a class of ln_zoo.layers."
            f"RecurrentLayer or its class_path; got {kind!r}"
        )
    return found


def layer_config(kind: str | Mapping[str, str] | type[RecurrentLayer]) -> str | dict[str, str]:
    """Serialise a class of recurrent layers as ``"lstm"`` or ``{"class_path": ...}``."""
    cls = recurrent_layer(kind)
    if cls in (LSTM, GRU, RNN):
        return cls.__name__.lower()
    return {"class_path": class_path(cls)}
