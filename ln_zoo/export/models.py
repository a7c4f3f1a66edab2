"""The inference paths of the zoo's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from ln_zoo.export.errors import ExportError
from ln_zoo.export.loops import Loop, Step, exportable
from ln_zoo.export.paths import (
    STEP,
    Form,
    Input,
    Parts,
    Path,
    Tensors,
    cell_path,
    flat,
    layer_path,
    lengths,
    no_step_form,
    normal,
    numbers,
    of_layer,
    one_hot,
    step_number,
    uniform,
)
from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.layers.draw import _State
from ln_zoo.layers.window import WindowState
from ln_zoo.models import (
    DRAW,
    AttentiveReader,
    ConvClassifier,
    Handwriting,
    MLPClassifier,
    OrderEmbedding,
    SequenceClassifier,
    SkipThought,
)
from ln_zoo.models.attentive_reader import Inputs
from ln_zoo.models.handwriting import HandwritingState

#: ``make(model, copy, form)``: the path of a model, given what `exportable` made of it.
Make = Callable[[Any, Any, Form], Path]


def path_of(model: nn.Module, form: Form, part: str | None = None, operators: bool = False) -> Path:
    """What of a model is exported.

    Args:
        model: one of the zoo's, or a recurrent layer or cell, in evaluation mode.
        form: ``"step"`` or ``"sequence"``.
        part: of a model with several: see `parts_of`; default: the first.
        operators: see `exportable`.

    Raises:
        ExportError: if the model has no such form or part, or cannot be exported.
    """
    makes = _makes(model)
    part = next(iter(makes)) if part is None else part
    if part not in makes:
        raise ExportError(
            f"{type(model).__name__} has no part {part!r}: its parts are {', '.join(makes)}"
        )
    return makes[part](model, exportable(model, operators=operators), form)


def parts_of(model: nn.Module) -> tuple[str, ...]:
    """The parts of a model that are exported one by one, the most used first."""
    return tuple(_makes(model))


def _makes(model: nn.Module) -> dict[str, Make]:
    for cls, makes in _PATHS.items():
        if isinstance(model, cls):
            return makes
    known = ", ".join(cls.__name__ for cls in _PATHS)
    raise ExportError(
        f"{type(model).__name__} is none of those whose inference is known here ({known}): make "
        "its parts exportable with ln_zoo.export.exportable, and export it with torch.export"
    )


# Classifiers


def _classifier(model: Any, copy: Any, form: Form) -> Path:
    if form == "step":
        raise no_step_form(model, "it has no recurrent layer")
    shape = (
        model.image_shape if isinstance(model, ConvClassifier) else (model.network[1].in_features,)
    )

    def run(model: Any, images: Tensor) -> tuple[Tensor, ...]:
        return (model.network(images),)

    images = {"images": uniform("N", *shape)}
    return Path(Parts(copy, run), _logits, images, ("logits",))


def _logits(model: Any, given: Tensors) -> dict[str, Tensor]:
    return {"logits": model(given["images"])}


def _sequence_classifier(model: Any, copy: Any, form: Form) -> Path:
    if form == "sequence":

        def run(model: Any, images: Tensor) -> tuple[Tensor, ...]:
            return (model(images),)

        images = {"images": uniform("N", model.in_features)}
        return Path(Parts(copy, run), _logits, images, ("logits",))
    layer = layer_path(model.recurrent, copy.recurrent, "step")
    count = len(layer.states)

    def step(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        output, after = model.recurrent.step(x, rest[:count], *rest[count:])
        return model.readout(output), *after

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        examples = given["input"].shape[1]
        states = model.initial_states.unsqueeze(2).expand(-1, -1, examples, -1).unbind()
        output, last = model.recurrent(given["input"], of_layer(states))
        last = dict(zip(layer.states.values(), flat(last), strict=True))
        return {"logits": model.readout(output), **last}

    # (L, H) of each state, shared by all examples.
    initial = dict(zip(layer.states, model.initial_states.detach(), strict=True))
    outputs = ("logits", *layer.states.values())
    return Path(Parts(copy, step), steps, layer.inputs, outputs, layer.states, initial, True)


# Handwriting


def _handwriting(model: Any, copy: Any, form: Form) -> Path:
    reads = model.window is not None
    hidden = model.output.in_features
    if model.output_from == "all":
        hidden //= len(model.layers) + reads
    states: dict[str, Input] = {}
    if reads:
        states = {
            "window_h": normal("N", hidden, std=0.5),
            "window_c": normal("N", hidden, std=0.5),
            "kappa": uniform("N", model.window.components),
            "window": uniform("N", model.window.character_size),
        }
    for i in range(len(model.layers)):
        states |= {f"{letter}{i}": normal("N", hidden, std=0.5) for letter in "hc"}
    points = "points" if form == "sequence" else "point"
    inputs = {points: normal(*(("T", "N") if form == "sequence" else ("N",)), 3)}
    if reads:
        inputs["text"] = one_hot("N", "U", model.num_characters)
    inputs |= states
    after = {name: f"next_{name}" for name in states}
    stepping = any(part.by_step for part in copy.modules() if isinstance(part, Loop | Step))
    if form == "step" and stepping:
        inputs[STEP] = step_number()
    of_window = 4 if reads else 0

    def run(model: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        text, rest = rest[0] if reads else None, rest[int(reads) :]
        window, pairs, step = rest[:of_window], rest[of_window : len(states)], rest[len(states) :]
        outputs: list[Tensor] = []
        shown: list[Tensor] = []
        carried: list[Tensor] = []
        if reads and form == "step":
            found, _ = model.window._step(x, text, WindowState(*window), *(step or (None,)))
            outputs, shown, carried = [found.h], [found.window], [*found]
        elif reads:
            h, windows, carried = _windows(model.window, x, text, window)
            outputs, shown = [h], [windows]
        for i, layer in enumerate(model.layers):
            before = pairs[2 * i].unsqueeze(0), pairs[2 * i + 1].unsqueeze(0)
            read = torch.cat([x, *outputs[-1:], *shown], -1)
            go = layer.step(read, before, *step) if form == "step" else layer(read, before)
            outputs.append(go[0])
            carried += [a.squeeze(0) for a in go[1]]
        y = torch.cat(outputs if model.output_from == "all" else outputs[-1:], -1)
        return model.output(y), *carried

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        before = None
        if form == "sequence":
            flat_states = [given[name] for name in states]
            window = WindowState(*flat_states[:4]) if reads else None
            pairs = flat_states[of_window:]
            pairs_too = tuple(zip(pairs[::2], pairs[1::2], strict=True))
            before = HandwritingState(window, pairs_too)
        y, last = model(given[points], given.get("text"), before)
        found = [*(last.window or ()), *(a for pair in last.layers for a in pair)]
        return {"outputs": y, **dict(zip(after.values(), found, strict=True))}

    outputs = ("outputs", *after.values())
    return Path(Parts(copy, run), by_model, inputs, outputs, after, is_step=form == "step")


def _windows(
    layer: Any, points: Tensor, text: Tensor | None, states: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs and windows of the layer that reads a text, (T, N, \\*), and its last states."""

    def body(
        carried: tuple[Tensor, ...], of_step: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        after, _ = layer._step(of_step[0], text, WindowState(*carried), of_step[1])
        return tuple(after), (after.h.clone(), after.window.clone())

    last, (h, windows) = scan(body, states, (points, _count(points)))
    return h, windows, list(last)


def _count(steps: Tensor) -> Tensor:
    """The number of each step, (T,)."""
    return torch.arange(steps.shape[0], device=steps.device)


# DRAW


_LSTM_STATES = ("decoder_h", "decoder_c", "encoder_h", "encoder_c")


def _generate(model: Any, copy: Any, form: Form) -> Path:
    return _draw(model, copy, form, reads=False)


def _reconstruct(model: Any, copy: Any, form: Form) -> Path:
    return _draw(model, copy, form, reads=True)


def _draw(model: Any, copy: Any, form: Form, reads: bool) -> Path:
    """Images from latents alone, or from images and the noise of their latents."""
    network = model.network
    hidden, image = network.hidden_size, model.image_size
    names = (*_LSTM_STATES[: 4 if reads else 2], "canvas")
    noise = "noise" if reads else {"sequence": "latents", "step": "latent"}[form]
    inputs = {"images": uniform("N", 1, *image, constant=True)} if reads else {}
    axes = ("T", "N") if form == "sequence" else ("N",)
    inputs[noise] = normal(*axes, network.latent_size)
    initial = {name: value.detach() for name, value in network.initial.items() if name in names}
    latents = ("means", "log_stds") if reads else ()

    def glimpse(
        network: Any, images: Tensor | None, states: tuple[Tensor, ...], z: Tensor, step: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """States, and mean and log standard deviation of the latents, as far as there are any."""
        *lstms, canvas = states
        decoder = lstms[0], lstms[1]
        encoder = (lstms[2], lstms[3]) if reads else decoder
        after, (_, posterior, _) = network.glimpse(
            images, _State(encoder, decoder, canvas), z, step
        )
        found = (*after.decoder, *(after.encoder if reads else ()), after.canvas)
        if posterior is None:
            return found, ()
        mean, log_std = posterior.chunk(2, 1)
        return found, (mean.clone(), log_std.clamp(-network.log_clamp, network.log_clamp))

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        z = given[noise]
        images = given["images"].squeeze(1) if reads else None
        done = model.network.generate(z) if images is None else model.network(images, z)
        canvas = "logits" if form == "sequence" else "next_canvas"
        return {canvas: done.logits, **{name: getattr(done, name) for name in latents}}

    if form == "step":
        inputs |= {name: normal("N", hidden, std=0.5) for name in names[:-1]}
        inputs["canvas"] = normal("N", *image)
        after = {name: f"next_{name}" for name in names}
        if any(part.by_step for part in copy.modules() if isinstance(part, Step)):
            inputs[STEP] = step_number()

        def step(model: Any, *rest: Tensor) -> tuple[Tensor, ...]:
            images, rest = rest[0].squeeze(1) if reads else None, rest[int(reads) :]
            number = rest[1 + len(names)] if len(rest) > 1 + len(names) else None
            found, said = glimpse(model.network, images, rest[1 : 1 + len(names)], rest[0], number)
            return *said, *found

        outputs = (*latents, *after.values())
        return Path(Parts(copy, step), by_model, inputs, outputs, after, initial, is_step=True)

    def run(model: Any, *rest: Tensor) -> tuple[Tensor, ...]:
        network, z = model.network, rest[-1]
        images = rest[0].squeeze(1) if reads else None
        examples = z.shape[1]
        sizes = dict.fromkeys(names, (hidden,)) | {"canvas": image}
        before = tuple(
            network._initial(name, *sizes[name]).expand(examples, *sizes[name]).clone()
            for name in names
        )

        def body(
            states: tuple[Tensor, ...], of_step: tuple[Tensor, Tensor]
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            return glimpse(network, images, states, *of_step)

        last, said = scan(body, before, (z, _count(z)))
        return last[-1], *said

    return Path(Parts(copy, run), by_model, inputs, ("logits", *latents))


# Texts


def _skip_thought(model: Any, copy: Any, form: Form) -> Path:
    words, hidden = model.embedding.num_embeddings, model.hidden_size

    def vectors(model: Any, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        _, h = model.encoder(model._inputs(model.embedding(tokens)), lengths=sizes)
        return (h.transpose(0, 1).flatten(1),)

    def step(model: Any, token: Tensor, h: Tensor, *number: Tensor) -> tuple[Tensor, ...]:
        return model.encoder.step(model._inputs(model.embedding(token)), (h,), *number)[1]

    def by_model(model: Any, tokens: Tensor, sizes: Tensor) -> Tensor:
        found: Tensor = model(tokens, sizes)
        return found

    return _reader(model, copy, form, "encoder", words, hidden, vectors, step, by_model, "vectors")


def _captions(model: Any, copy: Any, form: Form) -> Path:
    words, hidden = model.words.num_embeddings, model.hidden_size

    def read(model: Any, tokens: Tensor) -> Tensor:
        vectors: Tensor = model.words(tokens)
        return F.pad(vectors, (0, 1), value=1.0) if model.prenorm_bias else vectors

    def unit(model: Any, h: Tensor) -> Tensor:
        found = F.normalize(h, dim=-1)
        return found.abs() if model.absolute else found

    def vectors(model: Any, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        _, h = model.recurrent(read(model, tokens), lengths=sizes)
        return (unit(model, h[0]),)

    def step(model: Any, token: Tensor, h: Tensor, *number: Tensor) -> tuple[Tensor, ...]:
        _, (last,) = model.recurrent.step(read(model, token), (h,), *number)
        return unit(model, last[0]), last

    def by_model(model: Any, tokens: Tensor, sizes: Tensor) -> Tensor:
        found: Tensor = model.embed_captions(tokens, sizes)
        return found

    return _reader(
        model, copy, form, "recurrent", words, hidden, vectors, step, by_model, "embeddings"
    )


def _reader(
    model: Any,
    copy: Any,
    form: Form,
    layer: str,
    words: int,
    hidden: int,
    vectors: Callable[..., tuple[Tensor, ...]],
    step: Callable[..., tuple[Tensor, ...]],
    by_model: Callable[[Any, Tensor, Tensor], Tensor],
    output: str,
) -> Path:
    """A GRU that reads the words of a text and gives a vector of it."""

    def whole(model: Any, given: Tensors) -> dict[str, Tensor]:
        return {output: by_model(model, given["tokens"], given["lengths"])}

    def steps(model: Any, given: Tensors) -> dict[str, Tensor]:
        tokens = given["token"].t()
        sizes = torch.full(tokens.shape[:1], tokens.shape[1])
        # The outputs of the steps before the last are those of shorter texts.
        found = [
            by_model(model, tokens[:, :t], sizes.clamp(max=t))
            for t in range(1, tokens.shape[1] + 1)
        ]
        if len(outputs) > 1:
            return {output: torch.stack(found)}
        return {"next_h": found[-1].unsqueeze(0)}

    if form == "sequence":
        inputs = {"tokens": numbers(words, "N", "T"), "lengths": lengths()}
        return Path(Parts(copy, vectors), whole, inputs, (output,))
    loop = getattr(copy, layer)
    if loop.width > 1:
        raise no_step_form(model, "its encoder reads sentences from both ends")
    inputs = {"token": numbers(words, "N"), "h": normal(1, "N", hidden, std=0.5)}
    if loop.by_step:
        inputs[STEP] = step_number()
    # The vector of a skip-thought is its state.
    outputs = ("next_h",) if output == "vectors" else (output, "next_h")
    return Path(Parts(copy, step), steps, inputs, outputs, {"h": "next_h"}, is_step=True)


def _images(model: Any, copy: Any, form: Form) -> Path:
    if form == "step":
        raise no_step_form(model, "its part images is one matrix")

    def run(model: Any, features: Tensor) -> tuple[Tensor, ...]:
        found = F.normalize(model.image_map(features), dim=-1)
        return (found.abs() if model.absolute else found,)

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        return {"embeddings": model.embed_images(given["features"])}

    features = {"features": uniform("N", model.image_features)}
    return Path(Parts(copy, run), by_model, features, ("embeddings",))


def _attentive_reader(model: Any, copy: Any, form: Form) -> Path:
    if form == "step":
        raise no_step_form(model, "it attends to all of a passage at once")
    # Statistics of single batches, for which padding is left out, do not matter in evaluation.
    copy._skips_padding = False
    words = model.embedding.num_embeddings

    def run(model: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        features, attention = model._read(Inputs(*inputs))
        return model.output(features), attention

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        inputs = Inputs(*given.values())
        return {"logits": model(inputs), "attention": model.attention(inputs)}

    inputs = {
        "passage": numbers(words, "N", "T"),
        "passage_lengths": lengths(),
        "query": numbers(words, "N", "S"),
        "query_lengths": lengths("S"),
    }
    return Path(Parts(copy, run), by_model, inputs, ("logits", "attention"))


_PATHS: dict[type[nn.Module], dict[str, Make]] = {
    MLPClassifier: {"logits": _classifier},
    ConvClassifier: {"logits": _classifier},
    SequenceClassifier: {"logits": _sequence_classifier},
    Handwriting: {"outputs": _handwriting},
    DRAW: {"generate": _generate, "reconstruct": _reconstruct},
    SkipThought: {"vectors": _skip_thought},
    OrderEmbedding: {"captions": _captions, "images": _images},
    AttentiveReader: {"answers": _attentive_reader},
    RecurrentLayer: {"layer": layer_path},
    RecurrentCell: {"cell": cell_path},
}
