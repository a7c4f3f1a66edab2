"""Generated Triton kernels, as far as they can be tested without a GPU.

Their numbers are checked in triton's interpreter (`gpu_in_interpreter.py`, in a process of its
own), and they are compiled for compute capability 9.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.generated.generated_case import gated_cell
from kernels.triton.test_engine import check, compile_for_sm_90, in_the_interpreter, needs_triton
from own_norm import PNorm

from ln_zoo.kernels.generated import emit_triton
from ln_zoo.kernels.generated.engine import GeneratedLayers, GeneratedTriton
from ln_zoo.kernels.generated.trace import StepForm, Unsupported
from ln_zoo.layers import LSTM, SLSTM, RecurrentLayer
from ln_zoo.norms import LayerNorm
from ln_zoo.ops.recurrence import RecurrentCall

INTERPRETED = Path(__file__).with_name("gpu_in_interpreter.py")
LAYERS: dict[str, Any] = {
    "peepholes": lambda H: LSTM(3, H, norm=LayerNorm(), peephole=True, derivative_bound=0.3),
    "sLSTM": lambda H: SLSTM(3, H, norm=LayerNorm()),
    "own norm": lambda H: LSTM(3, H, norm=PNorm()),
}


def call_of(layer: RecurrentLayer) -> RecurrentCall:
    calls: list[RecurrentCall] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LN_ZOO_KERNELS", "generated")
        patch.setattr(
            GeneratedLayers, "unsupported_reason", lambda self, call: calls.append(call) or ""
        )
        layer(torch.randn(2, 2, 3))
    return calls[0]


def made(layer: RecurrentLayer) -> Any:
    from ln_zoo.kernels.generated import triton_passes

    call = call_of(layer)
    return triton_passes.make(call.cell, call.sites[0], call.weights[0], StepForm())


@needs_triton
def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    assert in_the_interpreter(tmp_path / "report.xml", INTERPRETED) > 10


@needs_triton
@pytest.mark.slow
def test_all_in_the_interpreter(tmp_path: Path) -> None:
    assert in_the_interpreter(tmp_path / "report.xml", INTERPRETED, slow=True) > 40


@needs_triton
@pytest.mark.parametrize("hidden", [400, pytest.param(2400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_for_an_h100(
    name: str, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel per step and pass, whose numbers stay in registers, also of rows in tiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = made(LAYERS[name](hidden))
    functions = {k: f for k, f in kernel.functions.items() if k[-2:] in ("_0", "_1", "st")}
    assert sorted(functions) == ["backward_0", "forward_1", "hoist"]
    for key, function in functions.items():
        constants = {"SAVES": True, "HAS_DOUT": key == "backward_0"}
        warps = emit_triton.warps(kernel.plan)
        check(compile_for_sm_90(function, ["*i64", "i32", "i32"], constants, warps), tmp_path)


@needs_triton
def test_functions_that_triton_lacks() -> None:
    layer = RecurrentLayer(3, 6, cell=gated_cell(torch.atan), norm=LayerNorm())
    with pytest.raises(Unsupported, match="atan"):
        made(layer)


def test_refusals_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call = GeneratedTriton(), call_of(LAYERS["peepholes"](6))
    assert "cpu" in str(kernel.unsupported_reason(call))
    assert "meta" in str(GeneratedLayers().unsupported_reason(call._replace(x=call.x.to("meta"))))
    monkeypatch.setattr(GeneratedTriton, "device", "cpu")
    monkeypatch.delenv("LN_ZOO_KERNELS")
    assert "LN_ZOO_KERNELS" in str(kernel.unsupported_reason(call))
