"""Engines in functions of torch, for every device and precision."""
