"""The engine for GPUs, as far as it can be tested without one.

Its numbers are checked in triton's interpreter (`gpu_in_interpreter.py`, in a process of its own),
its kernels compiled for compute capability 9.0, that of an H100.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from cli_support import python as forked_python
from kernels import engine_case

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.triton import batch, draw, engine, steps, window
from ln_zoo.kernels.triton.engine import TritonEngine
from ln_zoo.ops.engines.base import Masks
from ln_zoo.ops.spec import Rows, Spec

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"
)

SPECS = {
    "LSTM": engine_case.LSTM,
    "GRU": engine_case.GRU,
    "RNN_TANH": engine_case.RNN,
    "joint carried LSTM": engine_case.BOTH,
    "carried LSTM": engine_case.CARRIED,
    "joint GRU": engine_case.JOINT_GRU,
}

#: Kernels of steps: cell, whether backward, units, precision; each value with several others.
STEPS = [
    ("LSTM", True, 100, "fp32"),
    ("LSTM", True, 2400, "bf16"),
    ("GRU", False, 100, "bf16"),
    ("RNN_TANH", True, 256, "fp32"),
    ("carried LSTM", False, 2400, "fp32"),
    ("joint carried LSTM", True, 2400, "fp32"),
    ("joint GRU", True, 400, "fp32"),
]

#: The same of steps with noise, of packed sequences.
NOISY_STEPS = [
    ("LSTM", False, 400, "fp32"),
    ("GRU", True, 1024, "bf16"),
    ("joint carried LSTM", True, 2400, "fp32"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OVER_EXAMPLES = {spec.cell: spec for spec in engine_case.OVER_BATCH.values()}
#: Kernels of steps over a batch: cell, whether backward, examples, units, precision. The examples
#: are those of a program of one warp and of several, and more than registers hold.
BATCH_STEPS = [
    ("LSTM", False, 128, 257, "bf16"),
    ("LSTM", True, 128, 256, "fp32"),
    ("GRU", False, 128, 256, "fp32"),
    ("GRU", True, 1000, 256, "fp32"),
    ("RNN_TANH", True, 8, 400, "fp32"),
]

INTERPRETED = Path(__file__).parent / "gpu_in_interpreter.py"
DRAW = Path(__file__).parents[1] / "test_draw.py"
#: Those of DRAW that are tried; all of them with -m slow.
FEW_OF_DRAW = (
    "test_against_the_equations[triton-3-3-7-9-20-5-2-3-softmax-layer]",
    "test_against_the_equations[triton-1-1-1-1-1-1-1-1-eps-none]",
    "test_graphs_give_the_same_numbers[triton]",
)

WINDOW = Path(__file__).parents[1] / "test_window.py"
#: Those of the window that are tried; all of them with -m slow.
FEW_OF_WINDOW = (
    "test_graphs_give_the_same_numbers[triton]",
    "test_kernels_stay_within_their_memory[triton-layer]",
)

#: Kernels of the window, and the types of their tensors and numbers.
WINDOW_TYPES = {
    "add_window": "*i64 i32 i32",
    "window_forward": "*i64 *fp32 i32",
    "window_backward": "*i64 *fp32 *fp32 i32",
    "input_gradient_of_step": "*i64 *fp32 i32",
}

#: Kernels of DRAW, and the types of their tensors.
DRAW_TYPES = {
    "paint": "*fp32 " * 8 + "*i64",
    "unpaint": "*fp32 " * 6,
    "lstm_forward": "*fp32 " * 11,
    "lstm_backward": "*fp32 " * 13,
    "latent_forward": "*fp32 " * 6 + "*i64",
    "latent_backward": "*fp32 " * 7,
}
DRAW_CONSTANTS: dict[str, Any] = {
    **{"B": 28, "BP": 32, "A": 28, "AP": 32, "R": 2, "RP": 2, "W": 5, "WP": 8, "HEADS": 35},
    **{"H": 256, "HP": 256, "Z": 100, "ZP": 128, "INPUTS_STRIDE": 520, "STATES_STRIDE": 356},
    **{"STRIDE_1": 520, "STRIDE_2": 356, "STRIDE_3": 256, "READ_SPAN": 27.0, "WRITE_SPAN": 6.75},
    **{"BOUND": 10.0, "EPS": 1e-8, "ADDS_EPS": True, "RULE": 2, "GAIN": True, "SHIFT": True},
    **{"READ": True, "WRITE": True, "OF_MEANS": True, "OF_LOG_STDS": True},
}


def in_the_interpreter(report: Path, *tests: str | Path, slow: bool = False) -> int:
    """Runs tests in a process of their own; how many passed. Slow ones run if asked to."""
    command = [sys.executable, "-m", "pytest", *tests, "-n", "0", f"--junitxml={report}"]
    command += ["-m", ""] * slow
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
    return len(list(ElementTree.parse(report).iter("testcase")))


@needs_triton
def test_numbers_in_the_interpreter(tmp_path: Path) -> None:
    few = [f"{DRAW}::{name}" for name in FEW_OF_DRAW]
    few += [f"{WINDOW}::{name}" for name in FEW_OF_WINDOW]
    assert in_the_interpreter(tmp_path / "report.xml", INTERPRETED, *few) > 100


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "least"),
    [(INTERPRETED, 100), (DRAW, 60), (WINDOW, 70)],
    ids=["layers", "draw", "window"],
)
def test_all_in_the_interpreter(tmp_path: Path, file: Path, least: int) -> None:
    assert in_the_interpreter(tmp_path / "report.xml", file, slow=True) > least


def refusal(
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    hidden: int = 400,
    capability: tuple[int, int] = (9, 0),
    triton: bool = True,
    spec: Spec = SPECS["LSTM"],
) -> str | None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(engine, "_has_triton", lambda: triton)
    x: Any = SimpleNamespace(device=torch.device(device))
    w_hh = torch.empty(4 * hidden, hidden, device="meta")
    return TritonEngine().unsupported_reason(spec, x, w_hh, dtype)


def test_refusals_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch) is None
    assert refusal(monkeypatch, dtype=torch.bfloat16, capability=(8, 0)) is None
    assert refusal(monkeypatch, capability=(7, 0), hidden=4096) is None
    batch = OVER_EXAMPLES["LSTM"]
    assert refusal(monkeypatch, spec=batch, hidden=5000) is None
    for cell in ("carried LSTM", "joint GRU"):
        assert refusal(monkeypatch, spec=SPECS[cell]) is None
    differ = replace(batch, out=engine_case.UNBIASED)
    for options, reason in (
        ({"device": "cpu"}, "cpu"),
        ({"triton": False}, "triton"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": torch.float16}, "torch.float16"),
        ({"spec": batch, "device": "cpu"}, "cpu"),
        ({"spec": Spec("light GRU", Rows(), Rows(), Rows())}, "light GRU"),
        ({"spec": differ}, "correction"),
        ({"hidden": 4097}, "4097"),
        ({"capability": (6, 1)}, "6.1"),
        ({"dtype": torch.bfloat16, "capability": (7, 5)}, "8.0"),
    ):
        assert reason in str(refusal(monkeypatch, **options))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "other makers" in str(refusal(monkeypatch))


def test_kernels_are_not_made_before_a_gpu_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "triton,aten")
    code = (
        "import sys, torch\n"
        "from ln_zoo.layers import LSTM; from ln_zoo.norms import LayerNorm\n"
        "LSTM(3, 4, norm=LayerNorm())(torch.randn(5, 2, 3))[0].sum().backward()\n"
        "names = 'triton.steps', 'triton.kernels', 'cluster.persistent', 'cuda_graphs.recorded'\n"
        "assert 'ln_zoo.kernels.triton.engine' in sys.modules\n"
        "assert not any(f'ln_zoo.kernels.{name}' in sys.modules for name in names)\n"
        "import ln_zoo.kernels.triton.steps\n"
        "assert 'ln_zoo.kernels.triton.kernels' not in sys.modules"
    )
    done = forked_python(tmp_path, code)
    assert done.code == 0, done.err


def test_a_kind_is_recorded_when_it_comes_again_and_the_oldest_makes_room() -> None:
    cache = graphs.Cache(size=2, patience=5)
    tensors: dict[str, torch.Tensor] = {}
    assert cache.get("a", lambda: tensors) is None
    entry = cache.get("a", lambda: tensors)
    assert entry is not None
    assert cache.get("a", lambda: pytest.fail("made twice")) is entry
    for key in "bb":
        cache.get(key, dict)
    # Full, and both were used lately.
    assert [cache.get("c", dict) for _ in range(3)] == [None] * 3
    assert cache.get("c", dict) is not None
    assert cache.get("b", lambda: pytest.fail("was kept")) is not None
    assert cache.get("a", lambda: tensors) is None


def test_many_kinds_in_turn_do_not_drive_each_other_out() -> None:
    cache = graphs.Cache(size=2, patience=8)
    made: list[int] = []
    for _ in range(10):
        for key in range(5):
            cache.get(key, lambda key=key: made.append(key) or {})  # type: ignore[misc]
    assert made == [0, 1]


@pytest.mark.parametrize("inference", [False, True])
def test_products_that_reserve_workspaces_run_anywhere_and_save_nothing(inference: bool) -> None:
    def fail(a: torch.Tensor) -> None:
        pytest.fail("a tensor was saved")

    with (
        torch.profiler.profile() as profile,
        torch.inference_mode(inference),
        torch.autograd.graph.saved_tensors_hooks(fail, fail),
    ):
        graphs._products(torch.device("cpu"))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::linear"] == 4


@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 500])
def test_pieces_are_all_steps_in_order(count: int) -> None:
    pieces = graphs.pieces(count)
    assert [start + k for start, length in pieces for k in range(length)] == list(range(count))
    assert {length for _, length in pieces} <= set(graphs.LENGTHS)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is chosen")
class TestCompiled:
    """For an H100: no memory of threads, not too much of blocks, wide accesses."""

    @pytest.fixture
    def compiled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """`compile_for_sm_90` and `check`."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

        def checked(*arguments: Any) -> Any:
            found = compile_for_sm_90(*arguments)
            check(found, tmp_path)
            return found

        return checked

    @pytest.mark.parametrize(
        ("cell", "backward", "hidden", "kind", "everything"),
        [*((*of, False) for of in STEPS), *((*of, True) for of in NOISY_STEPS)],
    )
    def test_steps(
        self,
        cell: str,
        backward: bool,
        hidden: int,
        kind: str,
        everything: bool,
        compiled: Callable[..., Any],
    ) -> None:
        """Everything: zoneout, recurrent dropout, resets, packed sequences."""
        spec, stats = SPECS[cell], TritonEngine().stats(SPECS[cell])
        kernels, dtype = steps._kernels(), DTYPES[kind]
        found = steps.constants(spec, hidden, kernels.KINDS[dtype], backward, True, stats)
        found |= {"HAS_DOUT" if backward else "SAVE": True}
        if everything:
            there = torch.empty(0)
            masks = Masks(there, there, there if spec.cell == "LSTM" else None, there)
            found |= steps.noise_constants(masks) | {"PACKED": True, "FLAG_ALIGN": 4}
            found |= {"PASSES": True} if backward else {}
        # Operands are aligned as the engine's.
        found |= {"KIND_ALIGN": min(16, dtype.itemsize * 4), "WIDE_ALIGN": 16}
        types, kernel = ["*i64", "*fp32", f"*{kind}", "i32"], kernels.STEPS[spec.cell, backward]
        made = compiled(kernel, types, found, steps.warps(hidden))
        if everything:
            # Four flags of a thread are read at once: none byte by byte, but those of whole rows.
            assert accesses(made, "ld")["b8"] <= 1
            return
        # A thread takes four units at a time: 16 bytes, or 8 in bfloat16. Single numbers are the
        # addresses, and the statistics of a row.
        widths = {"v4.b32"} if kind == "fp32" else {"v4.b32", "v2.b32"}
        for access in ("ld", "st"):
            counts = accesses(made, access)
            single = counts.pop("b32", 0)
            addresses = counts.pop("b64", 0)
            assert set(counts) <= widths, counts
            assert counts["v4.b32"] > 0
            assert single <= 4 * stats
            assert addresses <= (0 if access == "st" else len(kernels.SLOTS))

    @pytest.mark.parametrize(("cell", "backward", "examples", "hidden", "kind"), BATCH_STEPS)
    def test_steps_over_a_batch(
        self,
        cell: str,
        backward: bool,
        examples: int,
        hidden: int,
        kind: str,
        compiled: Callable[..., Any],
    ) -> None:
        kernels, dtype = batch._kernels(), DTYPES[kind]
        rows, units, many, warps = batch.tile(examples)
        found = batch.constants(OVER_EXAMPLES[cell], hidden, kernels.KINDS[dtype], True)
        found |= {"HAS_DOUT" if backward else "SAVE": True}
        for name, size in (("KIND_ALIGN", dtype.itemsize), ("WIDE_ALIGN", 4)):
            found[name] = min(16, hidden * size & -(hidden * size))
        found |= {"ROWS": rows, "UNITS": units, "MANY": many}
        types = ["*i64", "*fp32", f"*{kind}", "i32", "i32", "i32"]
        made = compiled(kernels.STEPS[cell, backward], types, found, warps)
        # Warps exchange sums and nothing else: no tile changes its layout.
        assert made.metadata.shared <= 4 * warps * units * 12
        assert made.asm["ptx"].count("bar.sync") <= (0 if warps == 1 else 20)
        # As many units at a time as rows of H are aligned to.
        width = min(4, hidden & -hidden, rows * units // (32 * warps), units)
        widest = "b32" if width == 1 else f"v{width}.b32"
        assert accesses(made, "ld")[widest] > 0
        assert accesses(made, "ld").keys() <= {widest, "b64", "b16"}

    def test_rows_less_means(self, compiled: Callable[..., Any]) -> None:
        types = ["*fp32", "*i64", "*fp32", "*fp32", "i32", "i32"]
        compiled(
            batch._kernels().rows_less_means, types, {"ROWS": 16, "COLS": 64, "PACKED": True}, 4
        )

    @pytest.mark.parametrize(("gates", "hidden"), [(3, 400), (4, 100), (4, 2400)])
    def test_input_gradients(self, gates: int, hidden: int, compiled: Callable[..., Any]) -> None:
        spec = SPECS["LSTM" if gates == 4 else "GRU"]
        found = {"H": hidden, "BLOCK": steps.block(hidden), "GATES": gates}
        found |= {"STARTS": steps.starts(spec.input), "STATS_SIZE": TritonEngine().stats(spec)}
        kernel = steps._kernels().input_gradient
        made = compiled(kernel, ["*fp32"] * 5, found, steps.warps(hidden))
        assert accesses(made, "st") == {"v4.b32": gates}

    @pytest.mark.parametrize(
        "name",
        [pytest.param(n, marks=pytest.mark.slow if n != "unpaint" else []) for n in DRAW_TYPES],
    )
    def test_draw(self, name: str, compiled: Callable[..., Any]) -> None:
        """At the paper's size, with all that there may be."""
        kernel = getattr(importlib.import_module(f"{draw.__name__}_kernels"), name)
        found = {key: value for key, value in DRAW_CONSTANTS.items() if key in kernel.arg_names}
        warps = draw.IMAGE_WARPS if "paint" in name else draw.ROW_WARPS
        compiled(kernel, DRAW_TYPES[name].split(), found, warps)

    @pytest.mark.parametrize(
        ("name", "hidden"), [*zip(WINDOW_TYPES, (64, 400, 400, 64), strict=True)]
    )
    def test_window(self, name: str, hidden: int, compiled: Callable[..., Any]) -> None:
        """At the sizes of the quickstart and of Graves."""
        kernel = getattr(window._kernels(), name)
        found = window.constants(10, 57, hidden) | {
            **{"G": 4 * hidden, "BLOCK": steps.block(hidden), "STARTS": 1, "STATS_SIZE": 4},
            **{"ROWS": window.TILE_ROWS, "COLS": window.TILE_COLS, "DEPTH": window.TILE_DEPTH},
            "HAS_DSHOWN": True,
        }
        found = {key: value for key, value in found.items() if key in kernel.arg_names}
        warps = steps.warps(hidden) if "gradient" in name else window.WARPS
        compiled(kernel, WINDOW_TYPES[name].split(), found, warps)

    @pytest.mark.parametrize("own_mean", [False, True])
    def test_column_sums(self, own_mean: bool, compiled: Callable[..., Any]) -> None:
        found = {
            **{"H": 400, "GATES": 1 if own_mean else 4, "WIDTH": 5, "SKIP": 0, "STARTS": 1},
            **{"OWN_MEAN": own_mean, "STATS_SIZE": 4, "SHARE": 64},
            **{"ROWS": steps.TILE_ROWS, "COLS": steps.TILE_COLS},
        }
        made = compiled(steps._kernels().column_sums, ["*fp32"] * 4 + ["i32"] * 2, found, 4)
        assert accesses(made, "ld")["v4.b32"] > 0

    def test_the_table_of_addresses(self, compiled: Callable[..., Any]) -> None:
        kernels = steps._kernels()
        made = compiled(kernels.write_table, ["*i64"] + ["i64"] * len(kernels.SLOTS), {}, 1)
        assert sum(accesses(made, "st").values()) > 0


def compile_for_sm_90(kernel: Any, types: list[str], constants: dict[str, Any], warps: int) -> Any:
    """The kernel as it is launched: pointers are known to be aligned.

    ``types``: triton's names of the types of its arguments but for compile-time ones, which are
    ``constants``; ``warps``: of a program.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    left = iter(types)
    signature = {name: "constexpr" if name in constants else next(left) for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, **steps.OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check(compiled: Any, folder: Path) -> None:
    """No number left the registers for memory, and shared memory suffices."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", cubin], check=True, capture_output=True, text=True
    ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, shared, local = (int(n) for n in found)
    assert (stack, local) == (0, 0), usage
    assert registers * compiled.metadata.num_warps * 32 <= 65536
    assert max(shared, compiled.metadata.shared) <= 227 * 1024


def accesses(compiled: Any, kind: str) -> Counter[str]:
    """Loads ("ld") or stores ("st") of device memory by width, as "v4.b32"."""
    found = re.findall(rf"\b{kind}\.global\S*?\.((?:v\d\.)?b\d+)\s", compiled.asm["ptx"])
    return Counter(found)
