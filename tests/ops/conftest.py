"""What is no file of tests unless it is asked for."""

import os

# Test modules are collected for their doctests too, whatever their names.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["gpu_in_interpreter.py"]
