"""Handwriting prediction and synthesis (Graves 2013; paper, section 6.5)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ln_zoo.layers import LSTM, WindowLSTM, WindowState, set_forget_bias
from ln_zoo.metrics import PenMixture
from ln_zoo.models.base import ZooModule
from ln_zoo.models.graves_rmsprop import GravesRMSprop
from ln_zoo.models.legacy_adam import adam
from ln_zoo.models.ratios import add_ratios, log_ratios
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.ops import clip_derivative
from ln_zoo.utils.checks import check_at_least, check_choice, check_not_negative, check_positive

#: Letters, space and three marks; other characters share one extra class, the 57th (Graves does
#: not list his 57).
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz .,?"

ClipMode = Literal["norm", "value", "graves", "none"]
Reduction = Literal["point", "line"]

#: Default clipping bounds by mode. Graves' derivatives with respect to outputs have ten times the
#: bound of pre-activations.
_BOUNDS: dict[str, float | None] = {"norm": 10.0, "value": 1.0, "graves": 10.0, "none": None}
_OUTPUT_BOUND = 10.0
#: Maximum number of points per character when writing.
_POINTS_PER_CHARACTER = 40


class HandwritingState(NamedTuple):
    """Hidden states of the network.

    ``window`` is None in a network without text; ``layers`` has h and c of each other layer, each
    (N, H), from the bottom.
    """

    window: WindowState | None
    layers: tuple[tuple[Tensor, Tensor], ...]


class Line(NamedTuple):
    """A generated line."""

    #: (T, 3): dx, dy (upwards), and 1 where the pen is lifted after the point, in the units of the
    #: data.
    offsets: Tensor
    text: str  #: the requested text
    phi: Tensor  #: window weights of each character, (T, U); empty without text
    #: Whether the window passed the end of the text; otherwise the line was cut at its maximum
    #: number of points.
    finished: bool


class Handwriting(ZooModule):
    """Prediction of pen offsets and synthesis of a given text (Graves 2013, sections 4 and 5).

    A stack of LSTMs reads the last pen offset. The first moves a window along the text
    (`ln_zoo.layers.WindowLSTM`); the others read the offset, the layer below and the window. The
    outputs of all layers parametrise a mixture of Gaussians for the next offset
    (`ln_zoo.metrics.PenMixture`). Layer normalisation acts in every layer (paper, eq. 20-22).

    The model standardises offsets by `offset_mean` and `offset_std`, set from the first training
    set and stored in checkpoints. Losses, in nats of standardised offsets, are comparable only
    between models with the same scale. They are logged per point and per line (``sequence_nll``).
    ``sse`` is the squared distance from the mean of the mixture, in standardised units, averaged
    over points.

    A batch is a tuple: offsets (N, T + 1, 3), row t being the input of target t + 1 and row 0 zeros
    or the previous point; lengths (N,), the numbers of targets; N texts; and whether lines start
    here. Otherwise states are carried over from the previous batch, without gradients.

    Args:
        hidden_size: size H of each state.
        num_layers: number of LSTM layers.
        text: read a text (section 5); otherwise the network only predicts (section 4).
        window_components: Gaussians K of the window.
        mixture_components: Gaussians M of the output.
        alphabet: the characters, or a text file of them; characters outside the alphabet share one
            extra class, the last. Default: letters, space and ``.,?``, 57 classes.
        strict_text: raise an error for characters outside the alphabet.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
            Window and output are not normalised.
        peephole: gates see cell states, as in Graves; the paper's equations have none.
        forget_bias: initial bias of forget gates, not stated in the sources; ``None``: torch's.
        output_from: ``"all"`` layers, as in both sources, or the ``"top"`` one.
        window_parameters: ``"exp"`` or ``"softplus"``; see `ln_zoo.layers.WindowLSTM`.
        window_input: ``"state"`` or ``"all"``; see `ln_zoo.layers.WindowLSTM`.
        kappa_bias: see `ln_zoo.layers.WindowLSTM`.
        min_log_std: lower bound of log sigma; see `ln_zoo.metrics.PenMixture.of`.
        max_correlation: bound of rho; see `ln_zoo.metrics.PenMixture.of`.
        loss_reduction: nats per ``"point"`` of the batch, or per ``"line"``, the sum over time
            averaged over lines, as in Graves. With Adam they differ only in clipping.
        optimizer: ``"adam"`` (torch's defaults), or ``"graves"``, his RMSprop (eq. 38-41).
        lr: learning rate; Graves has 1e-4.
        clip_mode: ``"norm"`` clips the global gradient norm, ``"value"`` each element. ``"graves"``
            clips the derivatives of the loss with respect to pre-activations to ``clip_bound``, and
            with respect to the outputs to ten times that; it is meant for
            ``loss_reduction="line"``. No hand-written kernel has it. ``"none"`` disables clipping.
            The trainer's ``gradient_clip_val`` overrides ``"norm"`` and ``"value"``.
        clip_bound: default 10 for ``"norm"`` and ``"graves"``, 1 for ``"value"``.
        weight_noise: standard deviation of noise added to all weights in each training step.

    Example:
        >>> model = Handwriting(hidden_size=16, mixture_components=3)
        >>> offsets, lengths = torch.zeros(2, 31, 3), torch.tensor([30, 24])
        >>> model.loss((offsets, lengths, ("Hello", "world"), True)).shape
        torch.Size([])
    """

    input_kinds = ("handwriting",)
    pipeline_tag = "text-to-image"
    offset_mean: Tensor
    offset_std: Tensor
    _warned = False  # of characters outside the alphabet
    _clean: Sequence[Tensor] = ()  # weights without the noise of this step

    @classmethod
    def card_example(cls, preprocessing: Mapping[str, Any]) -> str:
        return (
            'torch.manual_seed(0)\n(line,) = model.write(["hello"], bias=0.7)\n'
            "print(line.offsets)  # of the pen: dx, dy, and 1 where it is lifted\n"
        )

    def __init__(
        self,
        hidden_size: int = 400,
        num_layers: int = 3,
        text: bool = True,
        window_components: int = 10,
        mixture_components: int = 20,
        alphabet: str | None = None,
        strict_text: bool = False,
        norm: Norm | None = None,
        peephole: bool = False,
        forget_bias: float | None = 1.0,
        output_from: Literal["all", "top"] = "all",
        window_parameters: Literal["exp", "softplus"] = "exp",
        window_input: Literal["state", "all"] = "state",
        kappa_bias: float | None = None,
        min_log_std: float = -7.0,
        max_correlation: float = 0.999,
        loss_reduction: Reduction = "point",
        optimizer: Literal["adam", "graves"] = "adam",
        lr: float = 1e-3,
        clip_mode: ClipMode = "norm",
        clip_bound: float | None = None,
        weight_noise: float = 0.0,
    ) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        self.alphabet, self.strict_text = _read_alphabet(alphabet), strict_text
        self.output_from, self.loss_reduction = output_from, loss_reduction
        self.min_log_std, self.max_correlation = min_log_std, max_correlation
        self.optimizer, self.lr, self.weight_noise = optimizer, lr, weight_noise
        self.clip_mode = clip_mode
        self.clip_bound = _BOUNDS.get(clip_mode) if clip_bound is None else clip_bound
        self._check_arguments()
        check_at_least(1, hidden_size=hidden_size, num_layers=num_layers)
        check_at_least(1, window_components=window_components)
        check_at_least(1, mixture_components=mixture_components)
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm, alphabet=self.alphabet, clip_bound=self.clip_bound)
        lstm: Any = {"norm": norm, "peephole": peephole, "derivative_bound": self._derivative_bound}
        self.window: WindowLSTM | None = None
        if text:
            self.window = WindowLSTM(
                3, hidden_size, self.num_characters, window_components, kappa_bias=kappa_bias,
                window_parameters=window_parameters, window_input=window_input, **lstm,
            )  # fmt: skip
        self._add_layers(num_layers, hidden_size, mixture_components, lstm)
        if forget_bias is not None:
            set_forget_bias(self, forget_bias)
        self._add_scale_and_metrics()

    def _check_arguments(self) -> None:
        check_choice("output_from", self.output_from, ("all", "top"))
        check_choice("loss_reduction", self.loss_reduction, get_args(Reduction))
        check_choice("optimizer", self.optimizer, ("adam", "graves"))
        check_choice("clip_mode", self.clip_mode, get_args(ClipMode))
        check_positive(lr=self.lr, clip_bound=self.clip_bound)
        check_not_negative(weight_noise=self.weight_noise)
        if not 0 < self.max_correlation < 1:
            raise ValueError(
                f"max_correlation must lie between 0 and 1, got {self.max_correlation!r}"
            )
        if self.clip_mode == "graves" and self.loss_reduction != "line":
            warnings.warn(
                'clip_mode="graves" has bounds for losses summed over time: with '
                f'loss_reduction="{self.loss_reduction}" derivatives will hardly reach them',
                stacklevel=3,
            )

    def _add_layers(self, number: int, size: int, components: int, lstm: dict[str, Any]) -> None:
        """Add the LSTMs above the window, and the map from their outputs to the mixture."""
        letters = 0 if self.window is None else self.num_characters
        above = [3 + size + letters] * (number - 1)
        inputs = [3, *above] if self.window is None else above
        self.layers = nn.ModuleList(LSTM(features, size, **lstm) for features in inputs)
        read = size * (number if self.output_from == "all" else 1)
        self.output = nn.Linear(read, 1 + 6 * components)

    def _add_scale_and_metrics(self) -> None:
        self.register_buffer("offset_mean", torch.zeros(2))
        self.register_buffer("offset_std", torch.zeros(2))
        for stage in ("val", "test"):
            add_ratios(self, stage, ("point_nll", "sequence_nll", "sse"))
        self._carried: dict[str, HandwritingState] = {}

    # The network

    @property
    def num_characters(self) -> int:
        """Number E of character classes: the alphabet and one for all others."""
        return len(self.alphabet) + 1

    @property
    def _derivative_bound(self) -> float | None:
        """Bound of derivatives with respect to pre-activations, in Graves' clipping only."""
        return self.clip_bound if self.clip_mode == "graves" else None

    def forward(
        self, points: Tensor, text: Tensor | None = None, state: HandwritingState | None = None
    ) -> tuple[Tensor, HandwritingState]:
        """Outputs y^, (T, N, 1 + 6 M), float32 or wider, for `PenMixture.of`, and the final state.

        ``points`` (T, N, 3) are standardised. ``text`` is one-hot, (N, U, E), from `encode`;
        required if the network reads a text. The default state is the start of a line.
        """
        y, state, _ = self._run(points, text, state)
        return y, state

    def _run(
        self,
        points: Tensor,
        text: Tensor | None,
        state: HandwritingState | None,
        trace: bool = False,
    ) -> tuple[Tensor, HandwritingState, Tensor | None]:
        """As `forward`, and with ``trace`` the window weights of each character, (T, N, U)."""
        x, outputs, window, shown, phi = points, [], None, None, None
        if self.window is not None:
            if text is None:
                raise ValueError("this network reads a text: give text=model.encode([...])")
            h, shown, window, phi = self.window(points, text, state and state.window, trace)
            outputs.append(h)
        finals = []
        for i, layer in enumerate(self.layers):
            if outputs:
                parts = [points, outputs[-1]] if shown is None else [points, outputs[-1], shown]
                x = torch.cat([part.to(points.dtype) for part in parts], -1)
            before = None
            if state is not None:
                before = tuple(a.unsqueeze(0) for a in state.layers[i])
            output, (h, c) = layer(x, before)
            finals.append((h[0], c[0]))
            outputs.append(output)
        with torch.autocast(points.device.type, enabled=False):
            read = outputs if self.output_from == "all" else outputs[-1:]
            y = self.output(torch.cat([a.to(self.output.weight.dtype) for a in read], -1))
        if self._derivative_bound is not None:
            y = clip_derivative(y, _OUTPUT_BOUND * self._derivative_bound)
        return y, HandwritingState(window, tuple(finals)), phi

    def mixture(self, outputs: Tensor) -> PenMixture:
        """The mixture of standardised offsets that the network's outputs parametrise."""
        return PenMixture.of(outputs, self.min_log_std, self.max_correlation)

    # Text and offsets

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Texts as one-hot vectors, (N, U, E), float, zero-padded.

        ValueError for an empty text; with ``strict_text`` for a character outside the alphabet.
        """
        for i, text in enumerate(texts):
            if not text:
                raise ValueError(f"text {i} of {len(texts)} is empty: give something to write")
        foreign = {c for text in texts for c in text if c not in self.alphabet}
        if foreign and (self.strict_text or not self._warned):
            shown = " ".join(sorted(map(repr, foreign)))
            message = f"the alphabet {self.alphabet!r} has no {shown}"
            if self.strict_text:
                raise ValueError(f"{message}: leave them out, or make the model with another one")
            warnings.warn(
                f"{message}: such characters are read as one class",
                stacklevel=2,
            )
            self._warned = True
        classes = {character: i for i, character in enumerate(self.alphabet)}
        other, padding = len(self.alphabet), self.num_characters
        codes = [torch.tensor([classes.get(c, other) for c in text]) for text in texts]
        vectors = F.one_hot(pad_sequence(codes, True, padding), padding + 1)[..., :padding]
        return vectors.to(self.output.weight)

    def standardize(self, offsets: Tensor) -> Tensor:
        r"""Standardise offsets (\*, 3); a no-op before the scale is known."""
        dtype = self.output.weight.dtype
        offsets = offsets.to(torch.promote_types(dtype, torch.float32))
        mean, std = self._scale(offsets)
        points = torch.cat([(offsets[..., :2] - mean) / std, offsets[..., 2:]], -1)
        return points.to(dtype)

    def restore(self, points: Tensor) -> Tensor:
        """The inverse of `standardize`."""
        mean, std = self._scale(points)
        return torch.cat([points[..., :2] * std + mean, points[..., 2:]], -1)

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        # Not an `if`, which would synchronise the device.
        known = (self.offset_std > 0).all()
        std = torch.where(known, self.offset_std, torch.ones_like(self.offset_std))
        return self.offset_mean.to(like.dtype), std.to(like.dtype)

    # Losses

    def loss(self, batch: Any, stage: str = "train") -> Tensor:
        """The loss of a batch, a scalar."""
        nll, _, mask = self._score(batch, stage)
        total = nll.sum()
        return total / (mask.sum() if self.loss_reduction == "point" else mask.shape[1])

    def per_example(self, batch: Any) -> dict[str, Tensor]:
        """Nats and points of each line, float64 (N,)."""
        nll, _, mask = self._score(batch, "example")
        return {"sequence_nll": nll.sum(0), "points": mask.sum(0).double()}

    def _score(self, batch: Any, stage: str) -> tuple[Tensor, Tensor, Tensor]:
        """Nats and squared errors of each point, 0 for padding, and the mask of points, (T, N).

        In the weights' dtype for training, otherwise float64.
        """
        offsets, lengths, texts, first = batch
        points = self.standardize(offsets).transpose(0, 1)
        inputs, targets = points[:-1], points[1:]
        state = None
        if first:
            # The first input is the null vector, not a standardised zero.
            inputs = torch.cat([torch.zeros_like(inputs[:1]), inputs[1:]])
        else:
            state = self._carried_state(stage, len(texts))
        text = None if self.window is None else self.encode(texts).to(points.device)
        y, after = self(inputs, text, state)
        tensors = [a.detach() for a in flatten_state(after)]
        self._carried[stage] = unflatten_state(tensors, self.window is not None)
        if stage != "train":
            y = y.double()
        mixture = self.mixture(y)
        targets = targets.to(y.dtype)
        steps = torch.arange(len(targets), device=lengths.device)
        mask = steps.unsqueeze(1) < lengths
        nothing = y.new_zeros(())
        nll = torch.where(mask, mixture.nll(targets), nothing)
        distances = (targets[..., :2] - mixture.expectation()).square().sum(-1)
        return nll, torch.where(mask, distances, nothing), mask

    def _carried_state(self, stage: str, examples: int) -> HandwritingState:
        state = self._carried.get(stage)
        before = 0 if state is None else len(flatten_state(state)[0])
        if state is None or before != examples:
            raise ValueError(
                f"a batch goes on with {examples} lines, and the one before left the states of "
                f"{before}: chunks of lines must come in order, beginning with first=True"
            )
        return state

    # Training

    def setup(self, stage: str) -> None:
        statistics = getattr(self.trainer.datamodule, "offset_statistics", None)  # type: ignore[attr-defined]
        if statistics is not None and not bool((self.offset_std > 0).all()):
            mean, std = statistics
            self.offset_mean.copy_(mean)
            self.offset_std.copy_(std)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nll, _, mask = self._score(batch, "train")
        points, lines = mask.sum(), mask.shape[1]
        total = nll.sum()
        self.log("train_point_nll", total.detach() / points, prog_bar=True, batch_size=lines)
        self.log("train_sequence_nll", total.detach() / lines, batch_size=lines)
        return total / (points if self.loss_reduction == "point" else lines)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        nll, _, mask = self._score(batch, "predict")
        return {"nats": nll.sum(0), "points": mask.sum(0)}

    def _evaluate(self, stage: str, batch: Any) -> None:
        nll, distances, mask = self._score(batch, stage)
        lines = mask.shape[1]
        begun = torch.tensor(lines if batch[3] else 0, device=nll.device)
        sums = {"point_nll": (nll, mask), "sequence_nll": (nll, begun), "sse": (distances, mask)}
        log_ratios(self, stage, sums, lines)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.weight_noise:
            with torch.no_grad():
                self._clean = [p.detach().clone() for p in self.parameters()]
                for p in self.parameters():
                    p.add_(torch.randn_like(p), alpha=self.weight_noise)

    def on_after_backward(self) -> None:
        # The gradient is at the noisy weights; the step starts from the clean ones.
        with torch.no_grad():
            for p, clean in zip(self.parameters(), self._clean, strict=False):
                p.copy_(clean)
        self._clean = ()

    def default_clipping(self) -> tuple[float | None, str | None]:
        by_trainer = self.clip_mode in ("norm", "value")
        return (self.clip_bound, self.clip_mode) if by_trainer else (None, None)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        if self.optimizer == "graves":
            return GravesRMSprop(self.parameters(), lr=self.lr)
        return adam(self, self.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = self._carried.get("train")
        states: list[list[Tensor]] = [[] if state is None else flatten_state(state)]
        states *= self.trainer.world_size
        if len(states) > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["carried"] = states

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._stored = checkpoint.get("carried", [])

    def on_train_start(self) -> None:
        super().on_train_start()
        stored = self.__dict__.pop("_stored", [])
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        if len(stored) != processes or not stored[rank] or self.trainer.ckpt_path is None:
            return
        tensors = [a.to(self.device) for a in stored[rank]]
        self._carried["train"] = unflatten_state(tensors, self.window is not None)

    # Writing

    @torch.no_grad()
    def write(
        self,
        texts: Sequence[str],
        bias: float = 0.0,
        prime: tuple[Tensor, str] | None = None,
        max_points: int | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Line]:
        """Write texts in one batch (Graves 2013, sections 5.3 to 5.5).

        A line ends when the window passes the end of its text: the weight of the place after the
        last character exceeds every character's, or the window has moved further.

        Args:
            texts: N texts.
            bias: concentration on likely points, at least 0; 0.15 to 1 is common.
            prime: offsets (T, 3) of a real line and its text, whose hand the writing continues.
                They are not part of the result.
            max_points: maximum points of a line; default: 40 per character.
            generator: random generator on the model's device; default torch's own.

        Raises:
            ValueError: if the network reads no text, for an empty text, a negative bias, or outputs
                that are not finite (diverged training).

        Example:
            >>> model = Handwriting(hidden_size=8, mixture_components=2)
            >>> [len(line.offsets) <= 5 for line in model.write(["ab", "c"], max_points=5)]
            [True, True]
        """
        if self.window is None:
            raise ValueError("this network reads no text (text=False), so it cannot write one")
        self.encode(texts)  # validates each text without the prime
        before = prime[1] if prime else ""
        lengths = [len(before) + len(text) for text in texts]
        # One more position, for the window's weight after the end of each text.
        vectors = F.pad(self.encode([before + text for text in texts]), (0, 0, 0, 1))
        point, state = self._primed(prime, vectors)
        ends = torch.tensor(lengths, device=vectors.device)
        places = torch.arange(vectors.shape[1], device=vectors.device)
        caps = [max_points or _POINTS_PER_CHARACTER * len(text) for text in texts]
        drawn: list[list[Tensor]] = [[] for _ in texts]
        shown: list[list[Tensor]] = [[] for _ in texts]
        finished = [False] * len(texts)
        writing = set(range(len(texts)))
        while writing:
            y, state, phi = self._run(point, vectors, state, trace=True)
            assert phi is not None
            assert state.window is not None
            behind = phi[0].gather(1, ends[:, None]).squeeze(1)
            shown_most = phi[0].masked_fill(places >= ends[:, None], -math.inf).amax(1)
            # A window far past the end has no weights left to compare.
            passed = (state.window.kappa.amin(1) > ends + 1) | (behind > shown_most)
            # One transfer to the host for all lines.
            finite, *ended = torch.cat([y.isfinite().all()[None], passed]).tolist()
            if not finite:
                raise ValueError("the network's outputs are not finite: its weights are unusable")
            sample = self.mixture(y).sample(bias, generator)
            for n in list(writing):
                finished[n] = ended[n]
                if not finished[n]:
                    drawn[n].append(sample[0, n])
                    shown[n].append(phi[0, n, len(before) : lengths[n]])
                if finished[n] or len(drawn[n]) == caps[n]:
                    writing.remove(n)
            point = sample
        return [
            Line(
                self.restore(torch.stack(points)) if points else vectors.new_zeros(0, 3),
                text,
                torch.stack(shares) if shares else vectors.new_zeros(0, len(text)),
                ended,
            )
            for text, points, shares, ended in zip(texts, drawn, shown, finished, strict=True)
        ]

    def _primed(
        self, prime: tuple[Tensor, str] | None, vectors: Tensor
    ) -> tuple[Tensor, HandwritingState | None]:
        """The point (1, N, 3) from which to continue, and the state before it."""
        start = vectors.new_zeros(1, len(vectors), 3)
        if prime is None:
            return start, None
        given = self.standardize(prime[0].to(vectors)).unsqueeze(1).expand(-1, len(vectors), -1)
        if not len(given):
            raise ValueError("there is no point to begin with: prime must be offsets (T, 3)")
        _, state = self(torch.cat([start, given[:-1]]), vectors)
        return given[-1:], state


def flatten_state(state: HandwritingState) -> list[Tensor]:
    """The tensors of a state, the window's first."""
    return [*(state.window or ()), *(a for pair in state.layers for a in pair)]


def unflatten_state(tensors: Sequence[Tensor], reads: bool) -> HandwritingState:
    """The inverse of `flatten_state`, with or without a text."""
    first = len(WindowState._fields) if reads else 0
    window = WindowState(*tensors[:first]) if reads else None
    pairs = tensors[first:]
    return HandwritingState(window, tuple(zip(pairs[::2], pairs[1::2], strict=True)))


def _read_alphabet(given: str | None) -> str:
    if given is None:
        return ALPHABET
    characters = given
    if given.endswith(".txt"):
        characters = "".join(FilePath(given).read_text(encoding="utf-8").splitlines())
    twice = sorted({c for c in characters if characters.count(c) > 1})
    if not characters or twice:
        what = f"has {twice} twice" if twice else "is empty"
        raise ValueError(f"the alphabet {given!r} {what}: give each character once")
    return characters
