"""Handwriting as pen trajectories."""
