"""Card folders to the Hugging Face hub: each folder is exactly a repository."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd, HfApi

from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import catalog, source
from ln_zoo.zoo.catalog import Card
from ln_zoo.zoo.errors import CardError, first_line
from ln_zoo.zoo.readme import render_card


@dataclass(frozen=True)
class Publication:
    """Result of `publish`."""

    url: str  #: of the repository, or of the commit once there is one
    files: dict[str, int]  #: names and sizes in bytes
    commit: str | None  #: its hash; None after a dry run


def publish(
    name: str,
    repo_id: str,
    *,
    norm: Norm | None = None,
    model: type[ZooModule] | None = None,
    token: str | None = None,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Upload a card folder to the hub after loading and checking the model.

    Sends exactly the card's files in one commit, to ``HF_ENDPOINT`` or huggingface.co.

    Args:
        name: of a published model on this machine, or its folder.
        repo_id: ``user/repo``; the repository is made if it does not exist.
        norm: the normalisation of the model, if it is not one of ln_zoo's own (see `ln_zoo.load`).
        model: class of the model, likewise.
        token: of the hub; default: the one stored by ``hf auth login``, or ``HF_TOKEN``.
        private: whether a repository made here is private.
        revision: branch to send to, made if it does not exist; default ``main``.
        dry_run: check everything and send nothing.

    Raises:
        CardError: if the card is damaged, its README is outdated, or the hub refuses.
    """
    card: Card = source.load(name, norm=norm, model=model).__dict__["card"]
    readme = card.folder / catalog.README
    if not readme.is_file() or readme.read_text(encoding="utf-8") != render_card(card.folder):
        raise CardError(
            f"{readme} was edited, or is older than {catalog.CONFIG} and {catalog.RESULTS}: "
            f"regenerate it with ln_zoo.zoo.cards.refresh({str(card.folder)!r}); text belongs in "
            "the facts of the card"
        )
    names = sorted({*catalog.CARD_FILES, *card.config.files})
    files = {name: card.path(name).stat().st_size for name in names}
    api = HfApi(token=token)
    if dry_run:
        return Publication(f"{api.endpoint}/{repo_id}", files, None)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id=repo_id,
            # One by one: the weights may lie in another folder.
            operations=[CommitOperationAdd(name, card.path(name)) for name in names],
            revision=revision,
            commit_message=f"{card.name}, written by ln_zoo",
        )
    except Exception as error:
        # Which classes a lost connection raises depends on the version of the hub's client.
        raise CardError(f"{card.name} not published as {repo_id!r}: {first_line(error)}") from error
    return Publication(commit.commit_url, files, commit.oid)
