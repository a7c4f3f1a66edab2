"""Fast implementations of recurrent layers, DRAW and the window, for the calls that they support.

`ln_zoo.ops.registry` imports this package; nothing else imports from it. Modules of an engine are
imported when a call needs them.
"""

from __future__ import annotations

from typing import Any

from ln_zoo.kernels.cluster.engine import ClusterEngine
from ln_zoo.kernels.draw import DrawKernel
from ln_zoo.kernels.generated.engine import GeneratedLayers, GeneratedTriton
from ln_zoo.kernels.native.engine import NativeEngine, NativeLayers
from ln_zoo.kernels.native.mixed_precision import MixedPrecision
from ln_zoo.kernels.triton.engine import TritonEngine
from ln_zoo.kernels.window import WindowKernel
from ln_zoo.ops import registry
from ln_zoo.ops.recurrent_kernel import Recurrence

_TRITON, _NATIVE = TritonEngine(), NativeEngine()


def _call_cache() -> Any:
    from ln_zoo.kernels.native.call_cache import CallCache

    return CallCache()


def _native_report() -> registry.Library:
    from ln_zoo.kernels.native.report import NativeReport

    return NativeReport()


def _recorded_scan(*call: Any) -> Any:
    from ln_zoo.kernels.cuda_graphs.recorded import recorded_scan

    return recorded_scan(*call)


registry.register(
    Recurrence(ClusterEngine()),
    Recurrence(_TRITON),
    MixedPrecision(NativeLayers()),
    MixedPrecision(Recurrence(_NATIVE)),
    MixedPrecision(NativeLayers(), "step"),
    NativeLayers(),
    Recurrence(_NATIVE),
    WindowKernel(_TRITON),
    WindowKernel(_NATIVE),
    DrawKernel(_TRITON),
    DrawKernel(_NATIVE),
    GeneratedLayers(),
    GeneratedTriton(),
)
registry.SCANS["cuda"] = _recorded_scan
registry.CALL_CACHES["cpu"] = _call_cache
registry.LIBRARIES.append(_native_report)
