"""Examples in processes of their own, which may die without taking the tests along."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Seconds after which an example is taken to hang.
_PATIENCE = 60


def outcomes(examples: Sequence[Callable[[], str]], together: bool = False) -> list[str]:
    """What became of each example: the word it gives, ``"raised ..."`` or ``"died ..."``.

    A process is forked for each, which costs milliseconds where a new one would take seconds.

    Args:
        examples: functions that give a word, or raise.
        together: whether one process runs examples until it dies, and the next one goes on after
            the example that it died in. What an example does to memory may then be the death of a
            later one.
    """
    # What torch imports at its first such error, each process would import anew.
    with contextlib.suppress(RuntimeError):
        torch.ones(1) - torch.ones(1, device="meta")
    found: list[str] = []
    while len(found) < len(examples):
        rest = examples[len(found) :]
        found += _run(rest if together else rest[:1])
    return found


def _run(examples: Sequence[Callable[[], str]]) -> list[str]:
    """Outcomes up to the first example that its process dies in."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        faulthandler.disable()
        torch.set_num_threads(1)
        for example in examples:
            signal.alarm(_PATIENCE)
            os.write(write, (json.dumps(_outcome(example)) + "\n").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    if len(found) < len(examples):
        code = os.waitstatus_to_exitcode(status)
        found.append(f"died {signal.Signals(-code).name if code < 0 else code}")
    return found


def _outcome(example: Callable[[], str]) -> str:
    try:
        return example()
    except Exception as error:
        return f"raised {type(error).__name__}: {error}".splitlines()[0]


def example(
    run: Callable[[], Sequence[Tensor]],
    expected: Sequence[Tensor],
    close: Callable[[Tensor, Tensor], bool],
) -> Callable[[], str]:
    """Return "same" if results have these values and devices, else "other"."""

    def found() -> str:
        results = run()
        same = len(results) == len(expected) and all(
            a.device == b.device and close(a, b) for a, b in zip(results, expected, strict=True)
        )
        return "same" if same else "other"

    return found


#: The wrong form of a tensor that has its numbers, so that it may be taken.
STRIDED = "strided"


def wrong_forms(a: Tensor) -> dict[str, Tensor]:
    """A tensor in all forms that a kernel must not take for the right one, by name."""
    b = a.detach()
    forms = {
        "meta": b.to("meta"),
        "rank": b.unsqueeze(0).clone(),
        STRIDED: torch.stack([b, b + 1], -1)[..., 0],
        "fewer dimensions": b.flatten()[:1].sum(),
    }
    if b.is_floating_point():
        forms |= {"float64": b.double(), "bfloat16": b.bfloat16()}
    else:
        forms |= {"int32": b.int(), "float": b.float()}
    if b.dim():
        forms |= {"long": torch.cat([b, b]), "empty": b[:0].clone()}
        forms |= {"short": b[:-1].clone(), "one": b[:1].clone()}
    if b.dim() > 1:
        forms |= {"narrow": b[..., :-1].clone(), "wide": torch.cat([b, b], -1)}
    same = (STRIDED, "meta", "float64", "bfloat16", "int32", "float")
    return {
        name: form.requires_grad_(a.requires_grad and form.is_floating_point())
        for name, form in forms.items()
        if name in same or form.shape != b.shape
    }
