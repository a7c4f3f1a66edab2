"""Fast implementations of recurrent layers, DRAW and the window, for the calls they support."""

import ln_zoo.ops  # noqa: F401  (imports the kernels in an order that works)
