"""How the help of a command is written."""

from __future__ import annotations

import argparse


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds each option's default to its help, but for one that says nothing: none or an empty list.

    Example:
        >>> parser = argparse.ArgumentParser(prog="p", formatter_class=DefaultsFormatter)
        >>> _ = parser.add_argument("--seed", type=int, default=0, help="of the noise")
        >>> _ = parser.add_argument("--csv", help="file to write")
        >>> print(parser.format_help().partition("exit")[2].strip())
        --seed SEED  of the noise (default: 0)
          --csv CSV    file to write
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, []):
            return action.help
        return super()._get_help_string(action)
