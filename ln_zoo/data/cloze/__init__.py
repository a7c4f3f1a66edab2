"""Cloze questions."""
