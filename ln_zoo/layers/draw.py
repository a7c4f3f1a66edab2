"""A network that draws images glimpse by glimpse (Gregor et al. 2015; paper, section 6.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import init

from ln_zoo.layers.cells import LSTMCell, sites_by_role, start_sequence
from ln_zoo.layers.initialization import set_forget_bias
from ln_zoo.norms import Identity, Norm
from ln_zoo.ops import (
    CELLS,
    Affine,
    DrawLSTM,
    DrawSettings,
    DrawWeights,
    FilterNorm,
    attention,
    check_devices,
    check_parameters,
    draw_forward,
    filterbank,
    select_draw_kernel,
)
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional, check_positive

#: Numbers that place a grid of filters, and the place of log delta~ among them.
_ATTENTION, _LOG_STRIDE = 5, 3
#: Of ``log_clamp``: squares of strides in units of sigma reach exp(3 log_clamp) times thousands.
_LARGEST_LOG = 20.0


class DRAWTrace(NamedTuple):
    """Glimpses of a `DRAWNetwork`, without gradients."""

    canvases: Tensor  #: logits, (T + 1, N, B, A), the initial canvas first
    #: Attention of the reader, (T, N, 5): x and y of the centre, stride and sigma in pixels from 0,
    #: and the intensity; None if no image is read, or read whole.
    read: Tensor | None
    write: Tensor | None  #: attention of the writer, likewise


class DRAWOutput(NamedTuple):
    """Output of a `DRAWNetwork`."""

    logits: Tensor  #: the last canvas, (N, B, A); its sigmoid is the probability of each pixel
    #: Means of the latents given the image, (T, N, Z); None for generated images.
    means: Tensor | None
    log_stds: Tensor | None  #: their log standard deviations, likewise
    #: Number of log standard deviations, variances and strides beyond `log_clamp`, a scalar.
    clamped: Tensor
    trace: DRAWTrace | None  #: the glimpses, if requested


class DRAWNetwork(nn.Module):
    r"""Encoder, decoder and a canvas, with moving attention (Gregor et al. 2015, eq. 3-8).

    With learned initial states and canvas C_0, at each glimpse t:

    .. math:: \begin{aligned}
        \hat x_t &= x - \sigma(C_{t-1}) \\
        r_t &= \operatorname{read}(x, \hat x_t, h^d_{t-1}) \\
        h^e_t &= \operatorname{encoder}(h^e_{t-1}, [r_t, h^d_{t-1}]) \\
        z_t &= \mu(h^e_t) + s(h^e_t) \odot e_t, \quad e_t \sim N(0, I) \\
        h^d_t &= \operatorname{decoder}(h^d_{t-1}, z_t) \\
        C_t &= C_{t-1} + \operatorname{write}(h^d_t)
        \end{aligned}

    ``read`` takes a patch of R x R of both images by a grid of Gaussian filters that h^d places
    (`ln_zoo.ops.filterbank`); ``write`` adds one of W x W. The norm acts in both LSTMs, in the
    paper on the cell state that the output gate sees (eq. 29-31). Attention, canvas, latents and
    cell states stay float32 under autocast.

    Args:
        height: image height B in pixels.
        width: image width A.
        hidden_size: size H of both LSTMs.
        latent_size: size Z of the latents of a glimpse.
        read_size: filters R on a side; ``None``: the encoder reads both images whole.
        write_size: filters W on a side; ``None``: the decoder adds to every pixel.
        norm: the normalisation; default `Identity`.
        normalize: normalised sites of both LSTMs; default ``("cell",)``, as in the paper, or
            ``("input", "recurrent")`` for norms that act on weights only.
        peephole: see `LSTM`.
        forget_bias: initial bias of the forget gates; ``None``: see ``init_std``.
        learn_initial_state: learn the initial states of both LSTMs; otherwise zeros.
        learn_initial_canvas: learn C_0; otherwise zeros.
        filter_norm: see `ln_zoo.ops.filterbank`, as for ``filter_eps``.
        log_clamp: bound of log standard deviations of latents, log sigma^2 and log strides.
        init_std: standard deviation of all initial weights, with biases 0 (released code: 0.01).
            ``None``: torch's initial values, except for the map to the latents (0.01, biases 0),
            since a large KL divergence would result.
        read_stride_bias: initial bias of the read's log stride, log delta~. No source states it.
            ``None``: see ``init_std``. From a bias near 0 the filters span the image, so those of
            ``read_size`` 2 lie in its corners, which are blank in MNIST: until a run happens to
            shrink the stride, the encoder sees a constant (``docs/results/draw.md``). With -1
            they lie inside the image.

    Parameters: as `LSTMCell` under ``encoder.`` and ``decoder.``; ``posterior`` (2Z, H),
    means first; ``read`` and ``write`` (5, H) in the order g~_X, g~_Y, log sigma^2, log delta~, log
    gamma; ``patch`` (W W, H); ``initial.encoder_h``, ``initial.encoder_c``, ``initial.decoder_h``,
    ``initial.decoder_c`` (H,) and ``initial.canvas`` (B, A).

    Raises:
        ValueError: for sizes below 1, an unknown name in ``normalize``, an unknown ``filter_norm``,
            a ``filter_eps`` or ``init_std`` that is not positive, a ``log_clamp`` outside (0, 20],
            or a ``read_stride_bias`` beyond ``log_clamp`` or without a ``read_size``.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> network = DRAWNetwork(28, 28, norm=LayerNorm())
        >>> output = network(torch.rand(2, 28, 28), torch.randn(3, 2, 100))
        >>> output.logits.shape, output.means.shape
        (torch.Size([2, 28, 28]), torch.Size([3, 2, 100]))
    """

    def __init__(
        self,
        height: int,
        width: int,
        *,
        hidden_size: int = 256,
        latent_size: int = 100,
        read_size: int | None = 2,
        write_size: int | None = 5,
        norm: Norm | None = None,
        normalize: Sequence[str] | None = None,
        peephole: bool = False,
        forget_bias: float | None = None,
        learn_initial_state: bool = True,
        learn_initial_canvas: bool = True,
        filter_norm: FilterNorm = "softmax",
        filter_eps: float = 1e-8,
        log_clamp: float = 10.0,
        init_std: float | None = None,
        read_stride_bias: float | None = None,
    ) -> None:
        super().__init__()
        check_at_least(
            1, height=height, width=width, hidden_size=hidden_size, latent_size=latent_size
        )
        check_optional(1, read_size=read_size, write_size=write_size)
        check_choice("filter_norm", filter_norm, get_args(FilterNorm))
        check_positive(filter_eps=filter_eps, init_std=init_std)
        if not 0 < log_clamp <= _LARGEST_LOG:
            raise ValueError(
                f"log_clamp must be positive and at most {_LARGEST_LOG}, beyond which filters "
                f"leave the range of float32; got {log_clamp!r}"
            )
        if read_stride_bias is not None:
            if read_size is None:
                raise ValueError(
                    f"read_stride_bias={read_stride_bias!r} needs a read_size: without one, images "
                    "are read whole"
                )
            if not abs(read_stride_bias) <= log_clamp:
                raise ValueError(
                    f"read_stride_bias must lie within log_clamp={log_clamp!r} of 0, got "
                    f"{read_stride_bias!r}"
                )
        self.height, self.width = height, width
        self.hidden_size, self.latent_size = hidden_size, latent_size
        self.read_size, self.write_size = read_size, write_size
        self.forget_bias, self.init_std = forget_bias, init_std
        self.read_stride_bias = read_stride_bias
        self.filter_norm, self.filter_eps, self.log_clamp = filter_norm, filter_eps, log_clamp
        norm = Identity() if norm is None else norm
        if normalize is None:
            of_sums = type(norm).normalize is not Norm.normalize
            normalize = ("cell",) if of_sums else ("input", "recurrent")
        pixels = height * width
        glimpse = 2 * (pixels if read_size is None else read_size**2)
        self.encoder, self.decoder = (
            LSTMCell(inputs, hidden_size, norm=norm, normalize=normalize, peephole=peephole)
            for inputs in (glimpse + hidden_size, latent_size)
        )
        self.posterior = nn.Linear(hidden_size, 2 * latent_size)
        self.read = None if read_size is None else nn.Linear(hidden_size, _ATTENTION)
        self.write = None if write_size is None else nn.Linear(hidden_size, _ATTENTION)
        self.patch = nn.Linear(hidden_size, pixels if write_size is None else write_size**2)
        self.initial = nn.ParameterDict()
        if learn_initial_state:
            for name in ("encoder_h", "encoder_c", "decoder_h", "decoder_c"):
                self.initial[name] = nn.Parameter(torch.zeros(hidden_size))
        if learn_initial_canvas:
            self.initial["canvas"] = nn.Parameter(torch.zeros(height, width))
        self._compile_mode: str | None = None
        self._start_weights()

    def reset_parameters(self) -> None:
        """Re-initialise weights and the norm."""
        for module in (self.encoder, self.decoder, self.posterior, self.read, self.write):
            if module is not None:
                module.reset_parameters()
        self.patch.reset_parameters()
        with torch.no_grad():
            for parameter in self.initial.values():
                init.zeros_(parameter)
        self._start_weights()

    @torch.no_grad()
    def _start_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if ".sites." in name:  # the norm's parameters
                continue
            if self.init_std is None and not name.startswith("posterior."):
                continue
            if "weight" in name:
                init.normal_(parameter, std=0.01 if self.init_std is None else self.init_std)
            else:
                init.zeros_(parameter)
        if self.read_stride_bias is not None:
            assert self.read is not None
            self.read.bias[_LOG_STRIDE] = self.read_stride_bias
        for cell in (self.encoder, self.decoder):
            if self.forget_bias is not None:
                set_forget_bias(cell, self.forget_bias)
            cell.reset_norm()

    def compile_glimpse(self, mode: str) -> None:
        """Compile glimpses with `torch.compile` from now on, if gradients are enabled.

        ``"reduce-overhead"`` uses CUDA graphs. ValueError for an unknown mode.
        """
        try:
            _compiled(type(self).glimpse, mode)
        except RuntimeError as error:  # torch's error for an unknown mode
            raise ValueError(f"compile_mode: {error}") from None
        self._compile_mode = mode

    # Running

    def forward(self, images: Tensor, noise: Tensor, trace: bool = False) -> DRAWOutput:
        """Reconstruct images x (N, B, A), from 0 to 1, in T glimpses.

        ``noise``: standard normal samples, (T, N, Z). ValueError for mismatched sizes.
        """
        if images.dim() != 3 or tuple(images.shape[1:]) != (self.height, self.width):
            raise ValueError(
                f"images must be (N, {self.height}, {self.width}), got {tuple(images.shape)}"
            )
        self._check_noise("noise", noise, len(images))
        check_devices(images, noise=noise, **dict(self.named_parameters()))
        self._start_sequence(len(noise))
        found = None if trace else self._run_kernel(images, noise)
        return self._run(images, noise, trace) if found is None else found

    def generate(self, latents: Tensor, trace: bool = False) -> DRAWOutput:
        """Generate images with decoder and writer (Gregor et al. 2015, section 2.3).

        ``latents``: z, standard normal samples, (T, N, Z). ValueError for mismatched sizes.
        """
        self._check_noise("latents", latents, latents.shape[1] if latents.dim() == 3 else 1)
        check_devices(latents, **dict(self.named_parameters()))
        self._start_sequence(len(latents))
        return self._run(None, latents, trace)

    def _start_sequence(self, glimpses: int) -> None:
        cells = self.encoder, self.decoder
        start_sequence([sites_by_role(cell.sites) for cell in cells], glimpses)

    def _check_noise(self, name: str, noise: Tensor, examples: int) -> None:
        if noise.dim() != 3 or not len(noise) or noise.shape[1:] != (examples, self.latent_size):
            raise ValueError(
                f"{name} must be (T, {examples}, {self.latent_size}) with T at least 1, got "
                f"{tuple(noise.shape)}"
            )

    def _run_kernel(self, images: Tensor, noise: Tensor) -> DRAWOutput | None:
        """`_run` in one call, or None if no kernel supports it."""
        unsupported = None
        if self.read is None or self.write is None:
            unsupported = "it has no filters"
        elif self._runs_compiled():
            unsupported = "its glimpses are compiled"
        elif not self.encoder.cell.in_torch:
            unsupported = f"no kernel knows this cell, {self.encoder.cell.name}"
        if unsupported is not None:
            select_draw_kernel(images, noise, None, unsupported)
            return None
        assert self.read is not None
        assert self.write is not None
        assert self.read_size is not None
        assert self.write_size is not None
        dtype = self.patch.weight.dtype

        def lstm(name: str, cell: LSTMCell) -> DrawLSTM:
            records = {r: site.to_spec() for r, site in sites_by_role(cell.sites).items()}
            h, c = (self._initial(f"{name}_{letter}", self.hidden_size) for letter in "hc")
            weights = cell.effective_weights()
            sizes = cell.input_size, self.hidden_size, self.hidden_size
            check_parameters(CELLS["LSTM"], records, weights, images, sizes)
            return DrawLSTM(weights, records, h, c)

        read, write, patch, posterior = (
            Affine(layer.weight, layer.bias)
            for layer in (self.read, self.write, self.patch, self.posterior)
        )
        settings = DrawSettings(
            self.read_size, self.write_size, self.filter_norm, self.filter_eps, self.log_clamp
        )
        images, noise = images.to(dtype), noise.to(dtype)
        weights = DrawWeights(
            lstm("encoder", self.encoder),
            lstm("decoder", self.decoder),
            posterior,
            read,
            write,
            patch,
            self._initial("canvas", self.height, self.width),
        )
        kernel = select_draw_kernel(images, noise, weights)
        if kernel is None:
            return None
        done = draw_forward(kernel, settings, images, noise, weights)
        return DRAWOutput(done.logits, done.means, done.log_stds, done.clamped.sum(), None)

    def _runs_compiled(self) -> bool:
        """Whether glimpses are compiled; without gradients, CUDA graphs overwrite the last one."""
        return self._compile_mode is not None and torch.is_grad_enabled()

    def _run(self, images: Tensor | None, noise: Tensor, trace: bool) -> DRAWOutput:
        dtype = torch.promote_types(self.patch.weight.dtype, torch.float32)
        images, noise = None if images is None else images.to(dtype), noise.to(dtype)
        state = self._start(noise.shape[1], dtype)
        canvases, outputs = [state.canvas], []
        glimpse = type(self).glimpse
        if self._runs_compiled():
            assert self._compile_mode is not None
            glimpse = _compiled(glimpse, self._compile_mode)
        for t, z in enumerate(noise):
            state, maps = glimpse(self, images, state, z, t)
            outputs.append(maps)
            if trace:
                canvases.append(state.canvas)
        reads, posteriors, writes = (_stacked(parts) for parts in zip(*outputs, strict=True))
        clamped = state.canvas.new_zeros((), dtype=torch.int64)
        for grid in (reads, writes):
            if grid is not None:
                clamped = clamped + (grid[..., 2:4].abs() > self.log_clamp).sum()
        means, log_stds = None, None
        if posteriors is not None:
            means, log_stds = posteriors.chunk(2, -1)
            clamped = clamped + (log_stds.abs() > self.log_clamp).sum()
            log_stds = log_stds.clamp(-self.log_clamp, self.log_clamp)
        glimpses = None
        if trace:
            glimpses = DRAWTrace(
                torch.stack(canvases).detach(),
                self._places(reads, self.read_size),
                self._places(writes, self.write_size),
            )
        return DRAWOutput(state.canvas, means, log_stds, clamped, glimpses)

    def _start(self, examples: int, dtype: torch.dtype) -> DRAWState:
        def initial(name: str) -> Tensor:
            return self._initial(name, self.hidden_size).expand(examples, -1)

        canvas = self._initial("canvas", self.height, self.width).to(dtype)
        return DRAWState(
            (initial("encoder_h"), initial("encoder_c")),
            (initial("decoder_h"), initial("decoder_c")),
            canvas.expand(examples, -1, -1),
        )

    def _initial(self, name: str, *shape: int) -> Tensor:
        if name in self.initial:
            return self.initial[name]
        return self.patch.weight.new_zeros(shape)

    def glimpse(
        self, images: Tensor | None, state: DRAWState, noise: Tensor, t: int
    ) -> tuple[DRAWState, tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Glimpse t; without images, the noise (N, Z) is z.

        Returns the next state, and the outputs of reader (N, 5), latents (N, 2Z) and writer (N, 5).
        """
        dtype = state.canvas.dtype
        reads = posterior = writes = None
        encoder, decoder, z = state.encoder, state.decoder, noise
        if images is not None:
            both = torch.stack([images, images - state.canvas.sigmoid()], 1)
            if self.read is not None and self.read_size is not None:
                reads = self._without_autocast(self.read, decoder[0], dtype)
                both = self._look(both, reads)
            seen = torch.cat([both.flatten(1).to(decoder[0].dtype), decoder[0]], 1)
            encoder = self.encoder(seen, encoder, step=t)
            posterior = self.posterior(encoder[0]).to(dtype)
            mean, log_std = posterior.chunk(2, 1)
            z = mean + log_std.clamp(-self.log_clamp, self.log_clamp).exp() * noise
        decoder = self.decoder(z.to(decoder[0].dtype), decoder, step=t)
        patch = self.patch(decoder[0]).to(dtype)
        if self.write is not None and self.write_size is not None:
            writes = self._without_autocast(self.write, decoder[0], dtype)
            patch = self._spread(patch.unflatten(1, (self.write_size, self.write_size)), writes)
        canvas = state.canvas + patch.view_as(state.canvas)
        return DRAWState(encoder, decoder, canvas), (reads, posterior, writes)

    @staticmethod
    def _without_autocast(layer: nn.Linear, h: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply a map without autocast: bfloat16 moves the centre by tenths of a pixel."""
        with torch.autocast(h.device.type, enabled=False):
            places: Tensor = layer(h)
            return places.to(dtype)

    def _look(self, both: Tensor, parameters: Tensor) -> Tensor:
        with torch.autocast(both.device.type, enabled=False):
            places, f_y, f_x = self._grid(parameters, self.read_size)
            patches = f_y.unsqueeze(1) @ both @ f_x.unsqueeze(1).mT
            return places[:, 4, None, None, None] * patches

    def _spread(self, patch: Tensor, parameters: Tensor) -> Tensor:
        with torch.autocast(patch.device.type, enabled=False):
            places, f_y, f_x = self._grid(parameters, self.write_size)
            return f_y.mT @ patch @ f_x / places[:, 4, None, None]

    def _grid(self, parameters: Tensor, grid: int | None) -> tuple[Tensor, Tensor, Tensor]:
        assert grid is not None
        places = attention(parameters, grid, self.height, self.width, self.log_clamp)
        sizes = (grid, self.height, self.width)
        return places, *filterbank(places, *sizes, self.filter_norm, self.filter_eps)

    def _places(self, parameters: Tensor | None, grid: int | None) -> Tensor | None:
        if parameters is None or grid is None:
            return None
        return attention(parameters.detach(), grid, self.height, self.width, self.log_clamp)


class DRAWState(NamedTuple):
    """h and c of both LSTMs, each (N, H), and the canvas (N, B, A)."""

    encoder: tuple[Tensor, Tensor]
    decoder: tuple[Tensor, Tensor]
    canvas: Tensor


@cache
def _compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`torch.compile`, cached outside the network, which stays picklable and copyable."""
    return torch.compile(function, mode=mode)


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.stack(found) if found else None
