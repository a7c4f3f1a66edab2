"""Sweeps: the grid, the processes and the state of its runs, statistics, the report.

The command is `ln_zoo.cli.sweep`.
"""
