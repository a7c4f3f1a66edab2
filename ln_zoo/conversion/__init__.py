"""Other people's models and weights: plain layers become normalised ones, and back."""

from ln_zoo.conversion.convert import denormalize_, normalize_
from ln_zoo.conversion.dialects import DIALECTS, from_dialect, to_dialect
from ln_zoo.conversion.report import Conversion, Converted, Refused

__all__ = [
    "DIALECTS",
    "Conversion",
    "Converted",
    "Refused",
    "denormalize_",
    "from_dialect",
    "normalize_",
    "to_dialect",
]
