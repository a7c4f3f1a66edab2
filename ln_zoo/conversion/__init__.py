"""Models and weights of other libraries: normalise their layers, or run them on our kernels."""

from ln_zoo.conversion.adopt import adopt_
from ln_zoo.conversion.formats import DIALECTS, from_dialect, to_dialect
from ln_zoo.conversion.normalize import denormalize_, normalize_
from ln_zoo.conversion.report import Adopted, Adoption, Conversion, Converted, Refused

__all__ = [
    "DIALECTS",
    "Adopted",
    "Adoption",
    "Conversion",
    "Converted",
    "Refused",
    "adopt_",
    "denormalize_",
    "from_dialect",
    "normalize_",
    "to_dialect",
]
