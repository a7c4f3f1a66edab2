"""The LightningCLI behind ``ln-zoo fit|validate|test|predict``."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace, set_parsing_settings
from jsonargparse.typing import register_type
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn
from torch import Tensor

# Imported to register their classes: short names on the command line need an import.
import ln_zoo.callbacks
import ln_zoo.data
import ln_zoo.models
import ln_zoo.norms  # noqa: F401
from ln_zoo.callbacks import (
    CurvesInCheckpoint,
    CurvesPlot,
    FiniteLoss,
    LastCheckpoint,
    Normalize,
    PredictionWriter,
)
from ln_zoo.callbacks.last_checkpoint import Interrupted
from ln_zoo.callbacks.normalize import normalize_as_trained, states_of
from ln_zoo.cli import (
    notes,
    optimizers,
    plain_modules,
    run_folders,
    run_output,
    scores,
    signals,
    threads,
)
from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.commands import add_parsers
from ln_zoo.cli.errors import OneLineErrors, report_error
from ln_zoo.cli.table import COMMANDS
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import to_config
from ln_zoo.utils.checkpoints import newest_whole, use_atomic_checkpoints
from ln_zoo.utils.class_paths import import_path
from ln_zoo.utils.files import relative
from ln_zoo.zoo import loading
from ln_zoo.zoo.loading import Source

#: Properties of data modules that set the model's argument of the same name.
_LINKS = (
    "alphabet", "image_features", "image_shape", "in_features", "num_classes", "vocab_size",
    "vocabulary",
)  # fmt: skip


def _no_tensor(value: object) -> Tensor:
    raise ValueError(f"a tensor cannot be written as {value!r}")


# As a class whose constructor takes a tensor (torch 2.14), completion would offer arguments of
# tensors of tensors of tensors, in 150 MB.
register_type(Tensor, deserializer=_no_tensor)


def run_trainer(argv: list[str], given: Arguments | None = None) -> int:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``, and returns the exit code.

    0; 1 if the run failed; 2 if the input is wrong and nothing was run; 130 or 143 after Ctrl-C
    or SIGTERM. ``given`` are the arguments, if they have been parsed.
    """
    set_parsing_settings(add_print_completion_argument=True)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")  # between Lightning and torch
    if argv[0] != "fit":
        # Lightning warns about training callbacks, which do not matter outside `fit`.
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        warnings.filterwarnings("ignore", "The dirpath has changed")
    # Adam's moments of mostly blank pixels decay into denormal numbers, which are a hundred times
    # slower. Set before torch starts its threads, which inherit it.
    torch.set_flush_denormal(True)
    code = 2
    cli: ZooCLI | None = None
    try:
        with signals.raised(), run_output.quiet_writers():
            # Installed packages may register norms, with short names here.
            for entry_point in entry_points(group="ln_zoo.norms"):
                entry_point.load()
            cli = ZooCLI(argv, given)
            code = 1
            cli.run()
    except Interrupted as end:
        if cli is not None and not end.on_all_processes:
            signals.end_others(cli.trainer)
        return signals.report_stop(argv[0], end)
    except Exception as error:
        full = run_output.full_disk(error, cli.trainer if cli is not None else None)
        return report_error(full or signals.lost_process(error) or error, argv[0], code)
    return 0


class ZooParser(OneLineErrors, LightningArgumentParser):
    """A parser whose errors are one line: the cause, the nearest name, exit code 2."""

    #: Completes the text of a configuration, given whether it has arguments that data determine.
    #: None in parsers of nested classes.
    complete: Callable[[str, bool], str] | None = None

    def dump(self, namespace: Namespace, skip_link_targets: bool = True, **options: Any) -> str:
        if "skip_none" in options:  # its former name, which Lightning gives
            options["skip_unset"] = options.pop("skip_none")
        text: str = super().dump(namespace, skip_link_targets=skip_link_targets, **options)
        return self.complete(text, not skip_link_targets) if self.complete else text

    def save(self, namespace: Namespace, path: Any, **_: Any) -> None:
        Path(path).write_text(self.dump(namespace, skip_unset=False), encoding="utf-8")

    def get_completion_script(self, completion_type: str, **kwargs: Any) -> str:
        """Prints completion of all commands, including those without training."""
        if completion_type.startswith("shtab-"):
            add_parsers(self._subcommands_action, COMMANDS)
        script: str = super().get_completion_script(completion_type, **kwargs)
        return script


class ZooCLI(LightningCLI):
    """One command line for every model, dataset and norm.

    Additions to Lightning's CLI: ``--weights`` starts from published or stored weights; class and
    arguments of the model come from weights or checkpoint, with a note for each ignored argument;
    data use the vocabulary of a stored model; ``--optimizer`` and ``--lr_scheduler`` replace the
    model's own, also in a resumed run; ``--ckpt_path last`` finds the newest run of the same name;
    ``test`` prints measured and reported numbers, and ``predict`` writes a file.

    The constructor parses the arguments and builds model, data and trainer; `run` runs them.
    """

    def __init__(self, argv: list[str], given: Arguments | None = None) -> None:
        self.argv = argv
        self.given = given or Arguments(argv)
        #: The model of ``--weights`` or ``--ckpt_path``.
        self.source: Source | None = None
        self._resumes = False
        #: ``--optimizer`` and its like, of the user or of the checkpoint.
        self._optimization: Any = None
        self._claimed: list[Path] = []
        self._loaded: dict[str, torch.Tensor] = {}
        with self._releasing():
            self._build()

    def _build(self) -> None:
        commands = self.subcommands()
        if self.argv and self.argv[0] in commands:
            # The parsers of all commands take as long to build as the run takes to start.
            asked = {self.argv[0]: commands[self.argv[0]]}
            self.subcommands = lambda: asked  # type: ignore[method-assign]
        loggers = [_logger("CSVLogger")]
        if find_spec("tensorboard"):
            loggers.append(_logger("TensorBoardLogger", default_hp_metric=False))
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=ZooParser,
            # Without abbreviations: a misspelt option must not be taken for another.
            parser_kwargs={"env_prefix": "LN_ZOO", "prog": "ln-zoo"}
            | {"default_env": True, "allow_abbrev": False}
            | {command: {"allow_abbrev": False} for command in self.subcommands()},
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"logger": loggers},
            auto_configure_optimizers=False,  # `optimizers` does, with the model's as default
            args=self._completed(),
        )

    def _completed(self, ckpt_path: str | None = None) -> list[str]:
        """The arguments, after the model of weights or checkpoint."""
        start = self.given.start()
        path = ckpt_path or start["ckpt_path"]
        self._resumes = start["weights"] is None
        model = None
        if text := start["weights"] or (path if path != "last" else None):
            read = loading.find if start["weights"] else loading.of_checkpoint
            asked = self.given.last("model")
            self.source = read(text, "give --{place} {path}", self.given.named(), asked)
            self.source.check()
            model = self.source.classes
        return self.given.complete(model, ckpt_path)

    @contextlib.contextmanager
    def _releasing(self) -> Iterator[None]:
        """Remove empty run folders if the run fails before it writes anything."""
        try:
            yield
        except BaseException:
            run_folders.release(self._claimed)
            raise

    # Parsing

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        parser.complete = self._complete  # type: ignore[attr-defined]
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in _LINKS:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        optimizers.add_arguments(parser)
        parser.add_argument(
            "--weights",
            type=str | None,
            default=None,
            help="Start from these weights: the name of a published model, a card's folder, "
            "a hub id or a .ckpt file. Model arguments that you give override the "
            "stored ones. For data with another number of classes, fit initialises a "
            "new last layer.",
        )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="After fit, score the last weights on the test set and print the table.",
        )

    def _prepare_subcommand_parser(self, *given: Any, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(*given, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":  # Lightning's text promises more
                action.help = "A .ckpt file, or last: the newest whole checkpoint of this name."
        return parser

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        # `scores` replaces Lightning's own table.
        return kwargs | {"verbose": False} if subcommand in ("test", "validate") else kwargs

    def _waits_for_data(self) -> bool:
        """Whether the model has an argument without a default that only the data determine."""
        settings = self.config[self.config.subcommand]
        path = (settings.get("model") or {}).get("class_path")
        parameters = inspect.signature(import_path(path)).parameters if path else {}
        given = settings.model.get("init_args") or {} if path else {}
        return any(
            name in parameters and parameters[name].default is inspect.Parameter.empty
            for name in _LINKS
            if given.get(name) is None
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        # Not earlier: jsonargparse then writes None for null to config.yaml.
        set_parsing_settings(unset_sentinel=True)
        try:
            if not self._waits_for_data():
                parser.validate(self.config)  # null too must fit the type of its argument
        except TypeError as error:
            parser.error(str(error), error)
        finally:
            set_parsing_settings(unset_sentinel=False)
        notes.check_numbers(self.settings)
        if self.settings.get("ckpt_path") == "last":
            self._name_loggers()
            newest, damaged = newest_whole(self._runs())
            if damaged:
                notes.print_note(f"{'; '.join(damaged)}. {newest} is the newest whole checkpoint")
            # Parsed again with the checkpoint's model as default: other values are the user's.
            self.config = parser.parse_args(self._completed(str(newest)))

    def _parse_ckpt_path(self) -> None:
        if path := self.settings.get("ckpt_path"):
            assert self.source is not None
            mine = self.settings.model.clone()
            # Only the class: values of a file are no settings, which the parser reads.
            model = {"model": {"class_path": self.source.class_path}}
            self.config = self.parser.parse_object({self.config.subcommand: model}, self.config)
            notes.note_ignored(self.given, mine, self.source, path)
        # After the checkpoint's model is known, whose norm is part of the folder's name.
        self._name_loggers()
        self._rate_of_model = self._settle_optimizer()

    def _is_given(self, argument: str) -> bool:
        """Whether the user's value of a model argument replaces that of the weights."""
        return not self._resumes and self.given.sets(f"model.{argument}")

    def _argument(self, name: str) -> Any:
        """An argument of the model as plain data: the user's, or that of weights or checkpoint."""
        if self.source and name in self.source.stored and not self._is_given(name):
            return self.source.stored[name]
        return (self.settings.model.get("init_args") or Namespace()).get(name)

    def _settle_optimizer(self) -> bool:
        """Use the optimizer and schedule of the resumed checkpoint, or the user's.

        Returns whether the optimizer's learning rate is the model's.
        """
        path = self.settings.get("ckpt_path")
        asked = Namespace({option: self.settings[option] for option in optimizers.OPTIONS})
        self._optimization = asked
        if not path or self.config.subcommand != "fit":
            return optimizers.use_rate_of_model(asked.optimizer, self._argument("lr"), self.given)
        assert self.source is not None
        assert self.source.checkpoint is not None
        trained = optimizers.of_checkpoint(self.source.checkpoint, path, self.given)
        optimizers.note_ignored(asked, trained, self.given, path)
        self._optimization = trained
        return False

    def _complete(self, text: str, links: bool) -> str:
        """The text of a configuration with what weights or checkpoint determine.

        ``links``: with arguments that the data determine. The vocabulary stays in its file:
        thousands of words take seconds to write.
        """
        if self.source is None:
            return text
        whole = yaml.safe_load(text)
        content = whole.get(self.given.command, whole)
        own = content["model"].setdefault("init_args", {})
        for name, value in self.source.stored.items():
            if name == "vocabulary" or (name in _LINKS and not links):
                continue
            mine = own.get(name)
            if not self._is_given(name):
                own[name] = value
            elif name == "norm" and mine and value and mine["class_path"] == value["class_path"]:
                kept = (value.get("init_args") or {}).items()
                mine["init_args"] = (mine.get("init_args") or {}) | {
                    k: v for k, v in kept if not self._is_given(f"norm.{k}")
                }
        if self._optimization is not None:
            content |= notes.plain(self._optimization)
        header = text[: text.index("\n") + 1] if text.startswith("#") else ""
        return header + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)

    @property
    def settings(self) -> Namespace:
        return self.config[self.config.subcommand]

    def _name_loggers(self) -> None:
        """Name loggers ``<model>-<norm>`` unless the user did, and apply the root folder."""
        loggers = self.settings.trainer.get("logger")
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if run_folders.place(loggers):
            return
        arguments = [x.get("init_args") or Namespace() for x in loggers if isinstance(x, Namespace)]
        named = any(g.name == "trainer.logger" and g.where[:2] == "--" for g in self.given.options)
        if not named:
            # Apply trainer.logger.* to all loggers; jsonargparse sets only the last one.
            for option in ("save_dir", "name", "version"):
                if self.given.last(f"trainer.logger.{option}") is not None:
                    for init_args in arguments:
                        init_args[option] = arguments[-1][option]
        root = self.settings.trainer.get("default_root_dir")
        if root and self.given.last("trainer.logger.save_dir") is None:
            for init_args in arguments:
                if init_args.get("save_dir") == run_folders.DEFAULT:
                    init_args.save_dir = str(root)
        nameless = [x for x in arguments if "name" in x and x.name is None]
        if nameless:
            name = self._run_name()
            for init_args in nameless:
                init_args.name = name
        if self.config.subcommand != "fit":
            for init_args in arguments:
                run_folders.spare_training(init_args, self.config.subcommand)

    def _runs(self) -> Path:
        """The folder of the runs of this name; FileNotFoundError if the logger has none."""
        trainer = self.settings.trainer
        loggers = trainer.get("logger")
        first = loggers[0] if isinstance(loggers, list) and loggers else loggers
        if _no_logger(loggers):
            return Path(trainer.get("default_root_dir") or run_folders.DEFAULT) / self._run_name()
        init_args = first.get("init_args") if isinstance(first, Namespace) else None
        if not init_args or not init_args.get("save_dir"):
            raise FileNotFoundError(
                "--ckpt_path last needs a logger with a folder: give the checkpoint's path"
            )
        return Path(init_args.save_dir) / (init_args.name or "")

    def _run_name(self) -> str:
        settings = self.settings.clone()
        chosen = self.settings.trainer.get("callbacks") or []
        chosen = chosen if isinstance(chosen, list) else [chosen]
        found = [c for c in chosen if str(c.get("class_path")).endswith(".Normalize")]
        norm = (found[0].get("init_args") or {}).get("norm") if found else self._argument("norm")
        if self.source and (states := states_of(self.source.checkpoint or {}, self.source.where)):
            norm = to_config(states[0].norm)
        if norm is None:
            # The default is known only to an instance.
            settings.pop("trainer")
            built = self._subcommand_parsers[self.config.subcommand].instantiate_classes(settings)
            norm = plain_modules.norm_of(built.model)
        names = [settings.model.class_path, *([norm["class_path"]] if norm else [])]
        return "-".join(name.rpartition(".")[2] for name in names)

    # Instantiating

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        build = self._build_model if self.source is None else self._build_stored
        self.parser.add_instantiator(build, LightningModule, subclasses=True)

    def _build_model(
        self,
        cls: type[LightningModule],
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> LightningModule:
        """The model. Its hyperparameters contain only linked arguments that its class takes."""
        links = applied_instantiation_links.items()
        taken = {name: value for name, value in links if name.rpartition(".")[2] in kwargs}
        build = _InstantiatorFn(self, "model")
        model: LightningModule = build(cls, *args, applied_instantiation_links=taken, **kwargs)
        return model

    def _build_stored(
        self,
        cls: type[LightningModule],
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> LightningModule:
        """The model with the arguments of weights or checkpoint, as objects."""
        assert self.source is not None
        linked = {name.rpartition(".")[2] for name in applied_instantiation_links}
        stored = self.source.arguments
        known = inspect.signature(cls).parameters.values()
        takes = {p.name for p in known} | set(kwargs)
        others = any(p.kind is p.VAR_KEYWORD for p in known)
        for name, value in stored.items():
            if name not in linked and not self._is_given(name) and (others or name in takes):
                kwargs[name] = value
        norm: Any = kwargs.get("norm")
        if self._is_given("norm") and norm and type(norm) is type(stored.get("norm")):
            given = {k: v for k, v in vars(norm).items() if self._is_given(f"norm.{k}")}
            kwargs["norm"] = replace(stored["norm"], **given)
        links = {"applied_instantiation_links": applied_instantiation_links}
        return self._build_model(cls, *args, **links, **kwargs)

    def instantiate_classes(self) -> None:
        data = self.settings.data.get("init_args") or Namespace()
        if self.source is None or self.source.words is None or "vocabulary" not in data:
            return super().instantiate_classes()
        # Both must number words alike. The configuration holds them only here.
        self._dump_config()
        kept, data.vocabulary = data.vocabulary, self.source.words
        super().instantiate_classes()
        data.vocabulary = kept

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self._get(self.config_init, "trainer")
        callbacks = settings.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        own = _no_logger(settings.logger) and not settings.fast_dev_run
        if own and run_folders.is_first_process():
            # Without a logger, Lightning would write to the current folder, among the user's files.
            folder = run_folders.claim(self._runs())
            self._claimed.append(folder)
            settings.default_root_dir = str(folder)
        trainer = super().instantiate_trainer(callbacks=callbacks + self._additional(callbacks))
        use_atomic_checkpoints(trainer.strategy)
        signals.prepare(trainer)
        run_output.check_writable(trainer, self.model if self.subcommand == "fit" else None)
        self._claimed += run_folders.claim_for(trainer.loggers)
        return trainer

    def _additional(self, callbacks: list[Callback]) -> list[Callback]:
        settings = self._get(self.config_init, "trainer")
        wanted: list[type[Callback]] = []
        extra: list[Callback] = []
        if self.subcommand == "predict":
            wanted = [PredictionWriter]
        elif self.subcommand == "fit":
            extra += optimizers.install(self.model, self._optimization, self._rate_of_model)
            if not isinstance(self.model, ZooModule):
                stored = self.settings.model.get("init_args") or Namespace()
                extra += [
                    plain_modules.StoreModule(self.settings.model.class_path, notes.plain(stored))
                ]
            wanted = [FiniteLoss]
            if not settings.fast_dev_run:
                wanted += [CurvesPlot] if find_spec("matplotlib") else []
                wanted += [CurvesInCheckpoint]
                wanted += [LastCheckpoint] if settings.enable_checkpointing is not False else []
        if not any(isinstance(each, Normalize) for each in callbacks) and self.source:
            extra += states_of(self.source.checkpoint or {}, self.source.where)
        added = [cls() for cls in wanted if not any(isinstance(each, cls) for each in callbacks)]
        return added + extra

    def after_instantiate_classes(self) -> None:
        settings, given = self.settings, self.given
        notes.check_fit(self.model, self.datamodule)
        own = settings.model.get("init_args") or ()
        if "norm" in own:
            notes.note_default_norm(given, self.model)
        for name in _LINKS:
            # A file may contain arguments of another model.
            if name in own and hasattr(self.datamodule, name):
                notes.note_linked(given, name)
        if self.source is None:
            if self.subcommand != "fit":
                notes.print_note(
                    f"the weights are untrained. `ln-zoo {self.subcommand}` uses their random "
                    "initial values; give --ckpt_path FILE or --weights NAME.",
                    "WARNING",
                )
            return
        if self.source.words is not None:
            notes.check_words(self.datamodule, self.source.words, given, self.source.where)
        if settings.get("ckpt_path"):
            assert self.source.checkpoint is not None
            self._loaded = self.source.state
            if not plain_modules.is_late(self.model):
                normalize_as_trained(self.model, self.source.checkpoint, self.source.where)
                loading.fill(self.model, self._loaded, self.source.where)
            notes.check_complete(self.source.checkpoint, self.source.where, str(self.subcommand))
        else:
            normalize_as_trained(self.model, self.source.checkpoint or {}, self.source.where)
            head = self.source.load_into(self.model, new_head=self.subcommand == "fit")
            if head:
                notes.print_note(
                    f"new weights for {self.model.hparams.get('num_classes')} classes: "
                    f"{', '.join(head)}; all others come from {self.settings.weights}"
                )
            self._loaded = self.model.state_dict()

    # Running

    def _run_subcommand(self, subcommand: str) -> None:
        """Deferred to `run`, which separates wrong input from failing runs."""

    def run(self) -> None:
        """Fits, validates, tests or predicts; ValueError if weights or results are not finite."""
        with self._releasing(), threads.limited(self.model, self.datamodule):
            start = self.settings.get("ckpt_path") or self.settings.get("weights")
            notes.check_finite(self._loaded, f"the weights of {start}")
            self._loaded = {}
            super()._run_subcommand(str(self.subcommand))

    def after_fit(self) -> None:
        if self.settings.test_after_fit and not self.trainer.interrupted:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
            self._report_test()
        run_output.print_paths(self.trainer)

    def after_validate(self) -> None:
        notes.check_finite(self.trainer.callback_metrics, "the scores of validation")
        scores.report_validation(self._evaluated())
        run_output.print_written(self.trainer)

    def after_test(self) -> None:
        self._report_test()
        run_output.print_written(self.trainer)

    def _report_test(self) -> None:
        notes.check_finite(self.trainer.callback_metrics, "the scores of the test")
        scores.report(self._evaluated())

    def _evaluated(self) -> scores.Evaluated:
        parts = self.trainer, self.model, self.datamodule
        return scores.Evaluated(*parts, self.settings.as_dict(), self.argv, str(self.subcommand))

    def after_predict(self) -> None:
        run_output.print_written(self.trainer)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            written = getattr(callback, "written", None)
            if isinstance(written, list) and written:
                # Pictures by a callback of ours or of the user's.
                names = ", ".join(picture.name for picture in written)
                print(f"pictures: {relative(written[0].parent)}: {names}")


class CLIWithoutTrainer(ZooCLI):
    """Parses the arguments and builds model and data, but no trainer."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer | None:  # type: ignore[override]
        return None


def settings_of(argv: list[str]) -> Namespace:
    """All settings of a ``fit``; builds model and data, but trains nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # silences which seed was set
    try:
        return CLIWithoutTrainer(argv).settings
    finally:
        logging.disable(before)


def _logger(name: str, **extra: Any) -> dict[str, Any]:
    return {
        "class_path": f"lightning.pytorch.loggers.{name}",
        "init_args": {"save_dir": "runs", "name": None, **extra},
    }


def _no_logger(loggers: Any) -> bool:
    return loggers is False or loggers == []


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "💡" not in record.getMessage()
