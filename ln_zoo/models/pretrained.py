"""Loading, saving and publishing as methods of models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ln_zoo.zoo.publishing import Publication


class Pretrained:
    """``from_pretrained``, ``save_pretrained`` and ``push_to_hub``, as on the models of others.

    They hand over to `ln_zoo.load`, `ln_zoo.zoo.write_card` and `ln_zoo.zoo.publish`, and import
    them when they are called: the zoo stands above the models.
    """

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """A published model of this class with its weights, in evaluation mode.

        A class of your own reads its own cards, and those of the class of ln_zoo that it derives
        from, if it takes their arguments.

        Args:
            name_or_path: a name, a card folder or a hub id, as for `ln_zoo.load`.
            options: as for `ln_zoo.load`: ``num_classes``, ``norm``, ``revision``, ``cache_dir``.

        Raises:
            ln_zoo.zoo.CardError: as `ln_zoo.load`; for a model of another class.

        Example:
            >>> from ln_zoo.models import MLPClassifier
            >>> MLPClassifier.from_pretrained("mlp.layernorm-digits").card.version
            ''
        """
        from ln_zoo.zoo.pretrained import load_as

        return load_as(cls, name_or_path, **options)  # type: ignore[type-var]

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        metrics: Mapping[str, float] | None = None,
        data: Any = None,
        facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes weights, arguments and card to a folder, which `from_pretrained` reads.

        The card of a loaded model whose weights did not change is kept as it is. `ln-zoo card`
        writes one from a checkpoint and its test run, with everything about that run.

        Args:
            folder: to make; it is exactly a hub repository.
            metrics: what was measured, as ``Trainer.test`` returns it: ``trainer.test(...)[0]``.
                Default: the card says that nothing was.
            data: the data module that the model was trained and tested on, or facts about the data:
                a mapping with ``dataset``, a name.
            facts: license, description and the like; see `ln_zoo.zoo.card_from_checkpoint`.
            name: of the model; default: that of the folder.
            overwrite: whether a card that is there may be replaced.

        Returns:
            The folder.

        Raises:
            ln_zoo.zoo.CardError: if arguments of the model, the name or a fact cannot be stored, or
                there is something in the folder that must not be replaced.

        Example:
            >>> import tempfile
            >>> from ln_zoo.models import MLPClassifier
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = MLPClassifier(64, [8]).save_pretrained(f"{folder}/mine")
            ...     sorted(file.name for file in path.iterdir())
            ['README.md', 'config.json', 'model.safetensors', 'results.json']
        """
        from ln_zoo.zoo.pretrained import save

        return save(
            self,  # type: ignore[arg-type]
            folder,
            metrics=metrics,
            data=data,
            facts=facts,
            name=name,
            overwrite=overwrite,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        metrics: Mapping[str, float] | None = None,
        data: Any = None,
        facts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        name: str | None = None,
        token: str | None = None,
        private: bool = False,
        revision: str | None = None,
        dry_run: bool = False,
    ) -> Publication:
        """Uploads weights, arguments and card to the Hugging Face hub.

        Args:
            repo_id: ``user/repo``; made if it does not exist.
            metrics: as for `save_pretrained`, like ``data``, ``facts`` and ``name``, whose default
                is the repository's.
            data: see there.
            facts: see there.
            name: see there.
            token: as for `ln_zoo.zoo.publish`, like the others.
            private: see there.
            revision: see there.
            dry_run: see there.

        Raises:
            ln_zoo.zoo.CardError: as `save_pretrained` and `ln_zoo.zoo.publish`.
        """
        from ln_zoo.zoo.pretrained import push

        return push(
            self,  # type: ignore[arg-type]
            repo_id,
            metrics=metrics,
            data=data,
            facts=facts,
            name=name,
            token=token,
            private=private,
            revision=revision,
            dry_run=dry_run,
        )
