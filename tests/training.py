"""What tests that train share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A trainer on the CPU without output; it saves only through a given checkpoint callback."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **quiet | options)


class Resumable(list[Any]):
    """Batches; a resumed run continues after the last one it was given."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.first = self.first, 0
        for i in range(begin, len(self)):
            self.given = i + 1
            yield self[i]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]
