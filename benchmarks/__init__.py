"""Measurements of ln_zoo against torch.nn and against what people write by hand.

Not part of the installed package: run from a checkout, ``python -m benchmarks.rnn --help``.
"""
