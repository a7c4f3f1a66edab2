"""The table that the kernels of a window read: its slots, in order."""

#: What kernels find in the table, in this order: addresses, and the length of texts.
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
