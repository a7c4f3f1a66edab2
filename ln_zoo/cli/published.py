"""``ln-zoo list``, ``cards``, ``card`` and ``publish``: published models. Imports no torch."""

from __future__ import annotations

from ln_zoo.cli import listing
from ln_zoo.cli.commands import File, OwnModules
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import CardError


def list_(
    pattern: str = "*",
    *,
    model: str | None = None,
    norm: str | None = None,
    dataset: str | None = None,
    csv: File | None = None,
) -> None:
    """Lists the published models on this machine: class, norm, data, score, size.

    Args:
        pattern: pattern of names, such as 'mlp.*'
        model: class name, such as MLPClassifier
        norm: class name, such as LayerNorm
        dataset: name of a dataset of the results, such as mnist
        csv: file to write with all measured metrics, one per row, in place of the list
    """
    if csv is None:
        print(listing.list_text(pattern, model=model, norm=norm, dataset=dataset))
        return
    names = catalog.list_models(pattern, model=model, norm=norm, dataset=dataset)
    csv.write_text(listing.results_csv(names), encoding="utf-8")
    print(f"results: {csv} ({len(names)} models)")


def cards(name: str | None = None, *, refresh: bool = False, facts: str | None = None) -> None:
    """Prints the card of one model, or the folders of all.

    Args:
        name: name of a published model, or a card folder
        refresh: regenerate the README of this card, or of all, from config.json and results.json
        facts: with --refresh NAME: file of facts, as for `ln-zoo card`, that replace the card's
    """
    if facts and not refresh:
        raise CardError("--facts goes with --refresh")
    if facts and name is None:
        raise CardError("--facts applies to one card: give its name")
    if not refresh:
        print(listing.cards_text(name).rstrip("\n"))
        return
    from ln_zoo.zoo.publishing import refresh as write

    folders = list(catalog.card_folders().values()) if name is None else [catalog.folder(name)]
    for folder in folders:
        write(folder, facts)
        print(f"card: {folder / catalog.README}")


def card(
    checkpoint: str,
    *,
    results: str,
    out: str,
    name: str | None = None,
    facts: str | None = None,
    overwrite: bool = False,
    import_: OwnModules = [],  # noqa: B006
) -> None:
    """Writes a model's card from its checkpoint and its test run.

    Args:
        checkpoint: a .ckpt file of one of the zoo's models
        results: the test_results.json that ln-zoo test wrote for it
        out: card folder to write
        name: name of the model; default: the folder's name
        facts: YAML or JSON file with the author's facts: license, license_name, license_link,
            language, description, intended_use, limitations, uncertainty, training_time, notes,
            differences, training_commands, datasets, tags, main_metric, size, pictures, version
        overwrite: replace an existing card
        import_: module that defines the checkpoint's own class
    """
    from ln_zoo.zoo.catalog import read_card
    from ln_zoo.zoo.publishing import card_from_checkpoint

    folder = card_from_checkpoint(
        checkpoint, results, out, name=name, facts=facts, overwrite=overwrite
    )
    print(f"card: {folder}")
    if "license" not in read_card(folder).results.card:
        print("note: the card states no license, which `ln-zoo publish` needs: give it in --facts")


def publish(
    name: str,
    *,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> None:
    """Uploads a model's card folder to the Hugging Face hub.

    The token comes from `hf auth login` or HF_TOKEN.

    Args:
        name: name of a published model, or a card folder
        repo_id: user/repo; created if it does not exist
        private: make the repository private
        revision: branch to upload to; default: main
        dry_run: check everything, upload nothing
    """
    from ln_zoo.zoo.publishing import publish as upload

    sent = upload(name, repo_id, private=private, revision=revision, dry_run=dry_run)
    for file, size in sent.files.items():
        print(f"{size:>12,} bytes  {file}")
    print("would be uploaded to" if sent.commit is None else "published:", sent.url)
