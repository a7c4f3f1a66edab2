"""Loops that have an LSTM within: a window over a text, DRAW."""
