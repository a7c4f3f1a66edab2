"""Sweeps: the grid, the processes and the state of its runs, statistics, verdicts, the report.

The commands are `ln_zoo.cli.sweep` and `ln_zoo.cli.reproduce`.
"""
