"""Callback of a run: CPU time of each epoch's steps and resident memory, one line an epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

PAGE = 4096


class Meter(Callback):
    """Appends time, steps, CPU seconds of a step and MB of memory to ``meter.csv``."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self._seconds, self._steps, self._begin = 0.0, 0, 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self._seconds += time.process_time() - self._begin
        self._steps += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20
        with Path("meter.csv").open("a") as file:
            row = time.monotonic(), self._steps, self._seconds / self._steps, memory
            file.write(",".join(map(str, row)) + "\n")
