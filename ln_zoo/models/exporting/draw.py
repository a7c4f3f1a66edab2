"""Export of DRAW: generating and reconstructing images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch._higher_order_ops.scan import scan

from ln_zoo.export import Form, Part, Parts, Path, export_parts, paths
from ln_zoo.export.loops import step_numbers, steps_differ
from ln_zoo.export.paths import STEP, Input, Tensors
from ln_zoo.layers.draw import DRAWState
from ln_zoo.models.draw import DRAW


@export_parts.register
def _parts(model: DRAW) -> Mapping[str, Part]:
    return {
        "generate": partial(_path, model, reads=False),
        "reconstruct": partial(_path, model, reads=True),
    }


def _path(model: DRAW, copy: Any, form: Form, reads: bool) -> Path:
    network = model.network
    names = ("decoder_h", "decoder_c", *(("encoder_h", "encoder_c") if reads else ()), "canvas")
    sizes = dict.fromkeys(names, (network.hidden_size,)) | {"canvas": model.image_size}
    noise = "noise" if reads else {"sequence": "latents", "step": "latent"}[form]
    inputs: dict[str, Input] = {}
    if reads:
        inputs["images"] = paths.uniform("N", 1, *model.image_size, constant=True)
    axes = ("T", "N") if form == "sequence" else ("N",)
    inputs[noise] = paths.normal(*axes, network.latent_size)
    latents = ("means", "log_stds") if reads else ()
    canvas = "logits" if form == "sequence" else "next_canvas"

    def by_model(model: Any, given: Tensors) -> dict[str, Tensor]:
        z = given[noise]
        done = model(given["images"], z) if reads else model.network.generate(z)
        return {canvas: done.logits, **{name: getattr(done, name) for name in latents}}

    if form == "step":
        inputs |= {name: paths.normal("N", *sizes[name], std=0.5) for name in names}
        if steps_differ(copy):
            inputs[STEP] = paths.step_number()
        after = {name: f"next_{name}" for name in names}

        def step(model: Any, *rest: Tensor) -> tuple[Tensor, ...]:
            images, rest = rest[0].squeeze(1) if reads else None, rest[int(reads) :]
            states, number = rest[1 : 1 + len(names)], rest[1 + len(names) :]
            found, posterior = _glimpse(model.network, images, states, rest[0], *number)
            return *posterior, *found

        outputs = (*latents, *after.values())
        known = network.initial
        initial = {name: known[name].detach() for name in names if name in known}
        return Path(Parts(copy, step), by_model, inputs, outputs, after, initial, is_step=True)

    def run(model: Any, *rest: Tensor) -> tuple[Tensor, ...]:
        network, z = model.network, rest[-1]
        images = rest[0].squeeze(1) if reads else None
        before = tuple(
            network._initial(name, *size).expand(z.shape[1], *size).clone()
            for name, size in sizes.items()
        )

        def body(
            states: tuple[Tensor, ...], of_step: tuple[Tensor, Tensor]
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            return _glimpse(network, images, states, *of_step)

        last, posteriors = scan(body, before, (z, step_numbers(z)))
        return last[-1], *posteriors

    return Path(Parts(copy, run), by_model, inputs, ("logits", *latents))


def _glimpse(
    network: Any,
    images: Tensor | None,
    states: tuple[Tensor, ...],
    z: Tensor,
    step: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Next states; mean and log standard deviation of the latents if images are read."""
    *lstms, canvas = states
    decoder = lstms[0], lstms[1]
    encoder = decoder if images is None else (lstms[2], lstms[3])
    after, (_, posterior, _) = network.glimpse(images, DRAWState(encoder, decoder, canvas), z, step)
    found = (*after.decoder, *(() if images is None else after.encoder), after.canvas)
    if posterior is None:
        return found, ()
    mean, log_std = posterior.chunk(2, 1)
    return found, (mean.clone(), log_std.clamp(-network.log_clamp, network.log_clamp))
