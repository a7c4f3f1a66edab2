"""Slots of the address table of the window kernels, in order."""

#: Addresses, and the length of texts.
FORWARD_SLOTS = (
    "v",
    "input_weight",
    "weight",
    "bias",
    "text",
    "characters",
    "window",
    "kappa",
    "shown",
    "terms",
)
BACKWARD_SLOTS = (
    "v",
    "stats",
    "gain_input",
    "work",
    "dv",
    "weight",
    "text",
    "characters",
    "dshown",
    "dkappa",
    "terms",
    "parameters",
)
