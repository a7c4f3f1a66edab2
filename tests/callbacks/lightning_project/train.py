"""Entry point: python train.py fit --config config.yaml."""

from __future__ import annotations

from forecasting.data import Waves
from forecasting.model import Forecaster
from lightning.pytorch.cli import LightningCLI


def main(args: list[str] | None = None) -> LightningCLI:
    return LightningCLI(Forecaster, Waves, save_config_kwargs={"overwrite": True}, args=args)


if __name__ == "__main__":
    main()
