"""The commands ``ln-zoo list``, ``cards``, ``card`` and ``publish``.

The first two import no torch, unless cards are refreshed; the others import it when they run, not
when they parse.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ln_zoo.zoo import catalog, trust
from ln_zoo.zoo.catalog import CardError


def run(command: str, argv: list[str]) -> int:
    """Runs one of the commands and returns its exit code: 0, or 1 with a line on standard error.

    Args:
        command: ``list``, ``cards``, ``card`` or ``publish``.
        argv: its arguments.

    Raises:
        SystemExit: with code 2 for arguments that cannot be parsed, with 0 after ``--help``.

    Example:
        >>> run("list", ["no-such-*"])
        no ...
        0
    """
    make, execute = _COMMANDS[command]
    parser = argparse.ArgumentParser(prog=f"ln-zoo {command}", allow_abbrev=False)
    make(parser)
    arguments = parser.parse_args(argv)
    try:
        print(execute(arguments))
    except (CardError, trust.OwnModuleError) as error:
        if os.environ.get("LN_ZOO_DEBUG") == "1":
            raise
        print(f"ln-zoo {command}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _make_list(parser: argparse.ArgumentParser) -> None:
    parser.description = "Published models on this machine: class, norm, data, score, size."
    parser.add_argument("pattern", nargs="?", default="*", help="pattern of names, such as 'mlp.*'")
    parser.add_argument("--model", help="class name, such as MLPClassifier")
    parser.add_argument("--norm", help="class name, such as LayerNorm")
    parser.add_argument("--dataset", help="name of a dataset of the results, such as mnist")
    parser.add_argument(
        "--csv", metavar="FILE", help="write a table of all measured metrics, one per row"
    )


def _list(arguments: argparse.Namespace) -> str:
    if arguments.csv:
        names = catalog.list_models(
            arguments.pattern, model=arguments.model, norm=arguments.norm, dataset=arguments.dataset
        )
        text = catalog.results_csv(names)
        try:
            Path(arguments.csv).write_text(text, encoding="utf-8")
        except OSError as error:
            raise CardError(f"{arguments.csv} cannot be written: {error}") from error
        return f"results: {arguments.csv} ({len(names)} models)"
    return catalog.list_text(
        arguments.pattern, model=arguments.model, norm=arguments.norm, dataset=arguments.dataset
    )


def _make_cards(parser: argparse.ArgumentParser) -> None:
    parser.description = "The card of one model, or the folders of all."
    parser.add_argument("name", nargs="?", help="name of a published model, or a card folder")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="regenerate the README of this card, or of all, from config.json and results.json",
    )
    parser.add_argument(
        "--facts",
        help="with --refresh NAME: facts of the author, as for `ln-zoo card`, that "
        "replace the card's own",
    )


def _cards(arguments: argparse.Namespace) -> str:
    if arguments.facts and not arguments.refresh:
        raise CardError("--facts goes with --refresh")
    if not arguments.refresh:
        return catalog.cards_text(arguments.name).rstrip("\n")
    from ln_zoo.zoo.cards import refresh

    name = arguments.name
    if arguments.facts and name is None:
        raise CardError("--facts applies to one card: give its name")
    folders = list(catalog.card_folders().values()) if name is None else [catalog.folder(name)]
    for folder in folders:
        refresh(folder, arguments.facts)
    return "\n".join(f"card: {folder / catalog.README}" for folder in folders)


def _make_card(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a model's card from its checkpoint and its test run."
    parser.add_argument("checkpoint", help="a .ckpt file of one of the zoo's models")
    parser.add_argument(
        "--results", required=True, help="the test_results.json that ln-zoo test wrote for it"
    )
    parser.add_argument("--out", required=True, help="card folder to write")
    parser.add_argument("--name", help="name of the model; default: that of the folder")
    parser.add_argument(
        "--facts",
        help="YAML or JSON file with facts that only the author knows: license, "
        "license_name, license_link, language, description, intended_use, "
        "limitations, uncertainty, training_time, notes, differences, "
        "training_commands, datasets, tags, main_metric, size, pictures, version",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing card")
    trust.add_import_option(parser)


def _card(arguments: argparse.Namespace) -> str:
    trust.import_own(arguments)
    from ln_zoo.zoo.cards import card_from_checkpoint

    folder = card_from_checkpoint(
        arguments.checkpoint,
        arguments.results,
        arguments.out,
        name=arguments.name,
        facts=arguments.facts,
        overwrite=arguments.overwrite,
    )
    return f"card: {folder}"


def _make_publish(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Uploads a model's card folder to the Hugging Face hub, with the token of `hf auth login` "
        "or HF_TOKEN."
    )
    parser.add_argument("name", help="name of a published model, or a card folder")
    parser.add_argument("--repo_id", required=True, help="user/repo; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", help="branch to upload to; default: main")
    parser.add_argument("--dry_run", action="store_true", help="check everything, upload nothing")


def _publish(arguments: argparse.Namespace) -> str:
    from ln_zoo.zoo.publishing import publish

    sent = publish(
        arguments.name,
        arguments.repo_id,
        private=arguments.private,
        revision=arguments.revision,
        dry_run=arguments.dry_run,
    )
    lines = [f"{size:>12,} bytes  {name}" for name, size in sent.files.items()]
    what = "would be sent to" if sent.commit is None else "published:"
    return "\n".join([*lines, f"{what} {sent.url}"])


_COMMANDS: dict[
    str,
    tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], str]],
] = {
    "list": (_make_list, _list),
    "cards": (_make_cards, _cards),
    "card": (_make_card, _card),
    "publish": (_make_publish, _publish),
}
