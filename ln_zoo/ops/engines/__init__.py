"""Engines that run the time steps of recurrent layers, and their interface."""
