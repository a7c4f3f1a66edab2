"""Fused loops around an LSTM: a window over a text, DRAW, captured generic loops."""
