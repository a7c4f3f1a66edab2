"""Search for settings with Optuna: a study for each norm, in a journal in the sweep's folder.

``sweep.json`` lists the trials, so that their runs resume, and are reported, without Optuna. Any
number of processes on any machines may share a search: one at a time asks for a trial.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ln_zoo.plots.comparison import read_curves
from ln_zoo.sweeps.grid import Grid, Run, SweepError, norm_name
from ln_zoo.sweeps.manifest import existing_grid, write_grid
from ln_zoo.sweeps.ranges import parse_range, value_text
from ln_zoo.sweeps.results import FinishedRun, validation_metric
from ln_zoo.sweeps.selection import validation_score
from ln_zoo.sweeps.speed import higher_is_better
from ln_zoo.sweeps.state import FINISHED, PRUNED, State, metrics_of, state_of, write_pruned
from ln_zoo.utils.names import nearest

#: Optuna's storage, in the folder of the sweep.
JOURNAL = "search.journal"
#: Proposals in a row that the sweep has already, after which a search is complete.
_REPEATS = 50
#: Seconds between two looks at the curve of a run.
_LOOK_EVERY = 2.0


class Search:
    """The search of a sweep.

    ``locked`` gives a context in which ``sweep.json`` may be written; ``select`` is the logged
    metric to improve, by default the test's main metric in validation.

    Raises:
        SweepError: if Optuna is not installed, or has no such sampler or pruner.
    """

    def __init__(
        self,
        out: Path,
        locked: Callable[[], AbstractContextManager[None]],
        search: Mapping[str, Any],
        select: str | None,
    ) -> None:
        try:
            import optuna
        except ImportError:
            raise SweepError(
                "--search optuna needs the package optuna: pip install 'ln-zoo[optuna]'"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        self.optuna = optuna
        self.out = out
        self.locked = locked
        self.select = select
        self.sampler = _named(optuna.samplers, "--sampler", search["sampler"])
        self.pruner = _named(optuna.pruners, "--pruner", search["pruner"])()
        self._pruning = search["pruner"] != "NopPruner"
        self._looked: dict[str, float] = {}

    def ask(self, known: set[str]) -> list[Run]:
        """The runs of a new trial, or runs of other processes' trials; [] if all are known."""
        with self.locked():
            grid = existing_grid(self.out)
            self._tell_finished(grid)
            numbers = dict.fromkeys(grid.norms, 0)
            for trial in grid.trials:
                numbers[trial["norm"]] += 1
            norm = min(numbers, key=numbers.__getitem__)
            if numbers[norm] < grid.search["trials"] and (found := self._propose(grid, norm)):
                grid = replace(grid, trials=[*grid.trials, found])
                write_grid(grid, self.out)
        return [run for run in grid.runs() if run.name not in known]

    def tell(self) -> None:
        """Tell the studies the scores of all finished trials."""
        with self.locked():
            self._tell_finished(existing_grid(self.out))

    def _propose(self, grid: Grid, norm: str) -> dict[str, Any] | None:
        study = self._study(norm)
        tried = [trial["settings"] for trial in grid.trials if trial["norm"] == norm]
        for _ in range(_REPEATS):
            trial = study.ask(_distributions(self.optuna, grid.settings))
            settings = {
                option: value_text((parse_range(values[0]) or ("",))[0], trial.params[option])
                for option, values in grid.settings.items()
            }
            if settings not in tried:
                return {"norm": norm, "number": trial.number, "settings": settings}
            study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return None

    def _study(self, norm: str) -> Any:
        optuna, path = self.optuna, str(self.out / JOURNAL)
        backend = optuna.storages.journal.JournalFileBackend(
            path, optuna.storages.journal.JournalFileOpenLock(path)
        )
        study = optuna.create_study(
            study_name=norm_name(norm),
            storage=optuna.storages.JournalStorage(backend),
            pruner=self.pruner,
            load_if_exists=True,
        )
        # A seed of its own for each proposal, whichever process asks for it.
        with contextlib.suppress(TypeError):
            study.sampler = self.sampler(seed=len(study.get_trials(deepcopy=False)))
            return study
        study.sampler = self.sampler()
        return study

    def _tell_finished(self, grid: Grid) -> None:
        """Tell the studies the scores of finished trials, also of processes that were killed."""
        running = self.optuna.trial.TrialState.RUNNING
        for norm in grid.norms:
            study = self._study(norm)
            open_ = {t.number for t in study.get_trials(deepcopy=False, states=[running])}
            for trial in grid.trials:
                if trial["norm"] != norm or trial["number"] not in open_:
                    continue
                runs = [run for run in grid.runs() if run.trial == (norm, trial["number"])]
                states = [state_of(self.out / run.name) for run in runs]
                if any(state.kind == PRUNED for state in states):
                    study.tell(trial["number"], state=self.optuna.trial.TrialState.PRUNED)
                elif all(state.kind == FINISHED for state in states):
                    scores = map(self._score, runs, states, [grid.test] * len(runs))
                    study.tell(trial["number"], sum(scores) / len(runs))

    def _score(self, run: Run, state: State, test: str) -> float:
        """The score of a run to minimize; studies cannot know the metric before the first run."""
        table = metrics_of(self.out / run.name)
        assert table is not None
        finished = FinishedRun(run, {}, table)
        if self.select is None:
            self.select = validation_metric(state.metrics, finished.logged())
        if self.select not in finished.logged():
            raise SweepError(f"--select: {run.name} has not logged {self.select!r}")
        sign = -1 if higher_is_better(self.select) else 1
        return sign * validation_score(finished, self.select, test)

    def prunes(self, run: Run) -> bool:
        """Whether to stop a run, which is then marked as pruned."""
        table = metrics_of(self.out / run.name)
        early = time.monotonic() - self._looked.get(run.name, 0.0) < _LOOK_EVERY
        if not (self._pruning and self.select and table) or early or run.trial is None:
            return False
        self._looked[run.name] = time.monotonic()
        try:
            curve = read_curves(table, [self.select], "epoch")[self.select]
        except (KeyError, ValueError):
            return False  # not logged yet, or being written
        sign = -1 if higher_is_better(self.select) else 1
        with self.locked():
            study = self._study(run.trial[0])
            stored = study.get_trials(deepcopy=False)[run.trial[1]]
            if stored.state.is_finished():
                return False
            trial = self.optuna.trial.Trial(study, stored._trial_id)
            for epoch in sorted(curve.keys() - stored.intermediate_values.keys()):
                trial.report(sign * curve[epoch], int(epoch))
            if not trial.should_prune():
                return False
            write_pruned(self.out / run.name, self.select, curve[max(curve)], int(max(curve)))
            return True


def _distributions(optuna: Any, settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    found = {}
    for option, values in settings.items():
        if (span := parse_range(values[0])) is None:
            found[option] = optuna.distributions.CategoricalDistribution(list(values))
        elif span[0] == "int":
            found[option] = optuna.distributions.IntDistribution(int(span[1]), int(span[2]))
        else:
            log = span[0] == "log"
            found[option] = optuna.distributions.FloatDistribution(span[1], span[2], log=log)
    return found


def _named(module: Any, option: str, name: str) -> Any:
    suffix = option.removeprefix("--").capitalize()
    known = [x for x in dir(module) if x.endswith(suffix) and not x.startswith("Base")]
    if name not in known:
        raise SweepError(
            f"{option}: Optuna has no {name!r}{nearest(name, known)} ({', '.join(known)})"
        )
    return getattr(module, name)
