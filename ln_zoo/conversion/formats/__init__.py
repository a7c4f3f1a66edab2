"""State dicts of recurrent layers of other libraries, read into our layers and written from them.

`tables` lists the libraries, `entries` maps tensors to parameters, `adapters` have call signatures.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ln_zoo.conversion.formats.adapters import Adapter
from ln_zoo.conversion.formats.entries import StateKeys, Weights
from ln_zoo.conversion.formats.tables import DIALECTS, Dialect
from ln_zoo.layers import DreamerV3SequenceModel, RecurrentCell, RecurrentLayer


def find_dialect(name: str) -> Dialect:
    """Look up a dialect; ValueError for an unknown name."""
    if name not in DIALECTS:
        near = difflib.get_close_matches(str(name), DIALECTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown dialect {name!r}{hint}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def from_dialect(
    name: str,
    state_dict: Mapping[str, Any],
    *,
    prefix: str | None = None,
    eps: float | None = None,
    **options: Any,
) -> RecurrentLayer | DreamerV3SequenceModel:
    """Build a recurrent layer from another library's weights; it computes the same.

    Sizes, layers and directions follow from the weights. If the library normalises differently from
    our `LSTM` and `GRU`, the result is a `RecurrentLayer` with another cell; for ``torchrl`` and
    ``r2dreamer`` it is a `DreamerV3SequenceModel`.

    Args:
        name: the dialect, a key of `DIALECTS`: ``torch``, ``torchscript`` (torch's benchmark
            example, and NeMo), ``torchaudio``, ``haste``, ``keras``, ``tensorflow-addons``,
            ``di-engine``, ``dreamer-v2``, ``dreamerv3-torch``, ``sheeprl``, ``rllib``,
            ``torchrl``, ``r2dreamer``, ``speechbrain``, ``tflite``, ``xlstm`` or
            ``skip-thoughts``.
        state_dict: the library's tensors or arrays by name, such as an opened ``.npz``.
        prefix: start of this layer's keys in a larger state dict; default: ``"encoder_"`` for
            ``skip-thoughts``, otherwise empty.
        eps: eps of the norms, which state dicts do not store; default: the library's.
        **options: further arguments of the layer, such as ``batch_first``.

    Raises:
        ValueError: for an unknown dialect, missing or unexpected keys, quantised weights,
            mismatched sizes, and layers that ours cannot compute.

    Example:
        >>> lstm = torch.nn.LSTM(3, 5, num_layers=2)
        >>> layer = from_dialect("torch", lstm.state_dict())
        >>> x = torch.randn(4, 2, 3)
        >>> torch.allclose(layer(x)[0], lstm(x)[0], atol=1e-6)
        True
    """
    return read_dialect(name, state_dict, prefix, eps, options)[0]


def read_dialect(
    name: str,
    state_dict: Mapping[str, Any],
    prefix: str | None,
    eps: float | None,
    options: dict[str, Any],
) -> tuple[RecurrentLayer | DreamerV3SequenceModel, list[str]]:
    """The layer of `from_dialect`, and names of its parameters that the library lacks."""
    dialect = find_dialect(name)
    keys = StateKeys(name, state_dict, dialect.prefix if prefix is None else prefix)
    if dialect.scopes:
        keys.strip_scopes(dialect.keys)
    reason = None if dialect.refuse is None else dialect.refuse(keys)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    form = next((form for form in dialect.forms if form.matches(keys)), dialect.forms[-1])
    layer, surplus = form.read(keys, eps, options)
    keys.finish()
    return layer, surplus


def to_dialect(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Write the weights of a layer or an adopted model as another library's state dict.

    The inverse of `from_dialect` and `ln_zoo.adopt_`; a library with one bias gets the sum of our
    two. Tensors are contiguous copies. Other parameters and buffers of a model keep their names.

    Raises:
        TypeError: for a module without layers of ln_zoo or adopted layers.
        ValueError: for an unknown dialect, or a layer that the library lacks.
    """
    dialect = find_dialect(name)
    if isinstance(module, RecurrentLayer | RecurrentCell | DreamerV3SequenceModel):
        found = _write(name, dialect, module)
        return {f"{dialect.prefix}{key}": value for key, value in found.items()}
    adopted = {
        path: part
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, Adapter)
    }
    if not adopted:
        raise TypeError(
            f"module must be a recurrent layer of ln_zoo, or a model with adopted layers, got "
            f"{type(module).__name__}: use from_dialect, normalize_ or adopt_ first"
        )
    state = dict(module.state_dict())
    for path, part in adopted.items():
        if part.dialect != name:
            raise ValueError(
                f"{path or 'the model'} is of the dialect {part.dialect!r}, not {name!r}"
            )
        lead = f"{path}." if path else ""
        state = {key: value for key, value in state.items() if not key.startswith(f"{lead}layer.")}
        found = _write(name, dialect, part.layer)
        state |= {f"{lead}{key.removeprefix(part.lead)}": v for key, v in found.items()}
    return {key: value.detach().clone() for key, value in state.items()}


def _write(name: str, dialect: Dialect, layer: Any) -> Weights:
    reasons = [form.unwritable(layer) for form in dialect.forms]
    if None not in reasons:
        of_cell = [
            reason
            for form, reason in zip(dialect.forms, reasons, strict=True)
            if form.cell.name == layer.cell.name
        ]
        known = " or ".join(dict.fromkeys(form.cell.name for form in dialect.forms))
        other = f"{layer.cell.name} of this form, but {known}"
        raise ValueError(f"{name} has no {of_cell[-1] if of_cell else other}")
    found = dialect.forms[reasons.index(None)].write(name, layer)
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in found.items()}
