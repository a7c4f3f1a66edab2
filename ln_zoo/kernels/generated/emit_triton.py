"""Triton for the passes of a step: the schedule of emit.py, one program for each row.

A program holds a row of at most `TILE` units in registers, so the loops of a level are one block of
operations. It runs loops over the tiles of a wider row, and keeps vectors in memory between them.
The kernel of a level follows the product before it. Addresses come from a table, as in `triton`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from ln_zoo.kernels.generated.emit import INFIX
from ln_zoo.kernels.generated.plan import Plan, blocks_of
from ln_zoo.kernels.generated.rows import CONST, REDUCTIONS, UNIT, Node
from ln_zoo.kernels.generated.schedule import Loop, NumberSink, Pass, Sink
from ln_zoo.kernels.generated.trace import Unsupported
from ln_zoo.kernels.triton import steps

#: Most units of a vector that a program holds at once, four in each thread. The backward pass of an
#: sLSTM with layer norm then takes up to 218 of a thread's 255 registers.
TILE = 1024

#: Functions by operation: of Triton, of kernels.py and of function_kernels.py.
FUNCTIONS = {
    **{op: f"tl.{op}" for op in ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor")},
    **{op: f"tl.{op}" for op in ("log", "log2", "sin")},
    **{op: f"kernels._{op}" for op in ("sigmoid", "tanh")},
    **{op: f"f.{op}" for op in ("expm1", "log1p", "maximum", "minimum", "relu", "sign", "trunc")},
    "sqrt": "tl.sqrt_rn",
    "reciprocal": "1.0 / ",
    "rsqrt": "1.0 / tl.sqrt_rn",
}
_HEADER = """import triton
import triton.language as tl

from ln_zoo.kernels.triton import function_kernels as f
from ln_zoo.kernels.triton import kernels
"""
_ARGUMENTS = "table, row, now, SAVES: tl.constexpr, HAS_DOUT: tl.constexpr"


def source(plan: Plan) -> str:
    """The Triton of a step: ``hoist``, and ``forward_0`` and ``backward_0`` for each level."""
    found = [_HEADER, *_Hoist(plan).text("hoist")]
    for name, pass_ in (("forward", plan.forward), ("backward", plan.backward)):
        read: set[Node] = set()
        for level in reversed(range(pass_.count + 1)):
            kernel = _Level(plan, pass_, level, read)
            found += kernel.text(f"{name}_{level}")
            read |= kernel.read
    return "\n".join(found)


def slots(plan: Plan) -> dict[str, int]:
    """Slots of the table of addresses."""
    states, products = range(len(plan.trace.widths)), range(len(plan.trace.products))
    names = ["v", "dv", "dout", "dropped", "reset", "stats", "hoisted", "spill", "crossing", "sums"]
    # States before the first step and after each, masks, gradients after and before even steps.
    names += [f"{kind}{i}" for kind in ("first", "n", "held", "odd", "even") for i in states]
    # Buffers: product, left operand, gradient of the latter; rows saved: u, l and du.
    names += [f"{k}{i}" for k in ("product", "operand", "dl", "u", "l", "du") for i in products]
    names += [f"p{i}" for i in range(len(plan.trace.parameters))]
    return {name: slot for slot, name in enumerate(names)}


def warps(plan: Plan) -> int:
    """Warps of a program."""
    return steps.warps(min(units(plan), TILE))


def units(plan: Plan) -> int:
    """Width of the widest block, and of the memory for a kept or hoisted vector."""
    return max(plan.trace.units)


def sum_places(plan: Plan) -> dict[str, int]:
    """First element of each parameter's gradient in a row of sums, and their number as ``""``."""
    found, start = {}, 0
    weights = {p.weight for p in plan.trace.products}  # their gradients are products, not sums
    for i, a in enumerate(plan.trace.parameters):
        found[f"d_p{i}"] = start
        start += 0 if f"p{i}" in weights else a.numel()
    return found | {"": start}


def literal(value: float) -> str:
    """A float of Triton."""
    if value != value or math.isinf(value):
        return f'float("{value}")'
    if abs(value) > 3.4028234e38:
        raise Unsupported(f"the constant {value}, which is no float32")
    return repr(value)


class _Block:
    """Statements of a kernel."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._units, self._slots = plan, units(plan), slots(plan)
        self._is_tiled = self._units > TILE
        self._lines: list[str] = []
        self._outside = self._lines  # of a loop
        self._names: dict[Node, str] = {}
        self._pointers: dict[str, str] = {}
        self._widths: set[int] = set()

    def text(self, name: str) -> list[str]:
        """The function, or nothing if it does nothing."""
        if not self._lines:
            return []
        start = ["n = tl.program_id(0).to(tl.int64)", "at = row.to(tl.int64) + n"]
        for width in () if self._is_tiled else sorted(self._widths):
            start += self._lanes(width)
        lines = [*start, *self._pointers.values(), *self._lines]
        options = "do_not_specialize=['row', 'now']"
        header = [f"@triton.jit({options})", f"def {name}({_ARGUMENTS}):"]
        return ["", "", *header, *(f"    {line}" for line in lines)]

    @contextlib.contextmanager
    def _units_of(self, width: int) -> Iterator[None]:
        """What is added is for all units of vectors of this width."""
        self._lines = []
        yield
        body, self._lines = self._lines, self._outside
        self._widths.add(width)
        if self._is_tiled and body:
            lines = [*self._lanes(width, "start + "), *body]
            body = [f"for start in range(0, {width}, {TILE}):", *(f"    {line}" for line in lines)]
        self._lines += body

    def _lanes(self, width: int, start: str = "") -> list[str]:
        lanes = f"c{width} = {start}tl.arange(0, {self._block(width)})"
        return [lanes, f"m{width} = c{width} < {width}"]

    def _block(self, width: int) -> int:
        return TILE if self._is_tiled else steps.block(width)

    # Memory

    def _pointer(self, name: str) -> str:
        """The variable with the address of what the program's row has under a name."""
        if name not in self._pointers:
            self._pointers[name] = f"{name} = {self._start(name)}"
        return name

    def _start(self, name: str) -> str:
        kind, i = name.rstrip("0123456789"), int("0" + name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        trace, slot = self._plan.trace, self._slots
        if kind in ("s", "ds", "ps"):
            width = trace.widths[i]
            if kind == "s":
                places = f"{slot[f'first{i}']}, {slot[f'n{i}']}"
                return f"f.before(table, {places}, row.to(tl.int64), {width}) + n * {width}"
            one, other = slot[f"odd{i}"], slot[f"even{i}"]
            if kind == "ps":
                one, other = other, one
            place = f"tl.where(now % 2 == 0, {one}, {other})"
            return f"f.pointer(table, {place}, tl.float32) + n * {width}"
        dtype = "tl.int8" if kind in ("reset", "held") else "tl.float32"
        start = f"f.pointer(table, {slot[name]}, {dtype})"
        if kind in ("p", "hoisted"):
            return start
        row = "n" if kind in ("dropped", "spill", "crossing", "sums", *_BUFFERS) else "at"
        return f"{start} + {row} * {self._row_width(kind, i)}"

    def _row_width(self, kind: str, i: int) -> int:
        plan, trace = self._plan, self._plan.trace
        if kind in ("n", "held"):
            return trace.widths[i]
        if kind in ("u", "du", "product"):
            return trace.products[i].width
        if kind in ("l", "dl"):
            return trace.products[i].inner
        return {
            "v": trace.gates, "dv": trace.gates, "dropped": trace.widths[0], "reset": 1,
            "dout": trace.widths[0], "stats": max(1, plan.stats), "sums": sum_places(plan)[""],
        }[kind]  # fmt: skip

    def _load(self, name: str, start: int, width: int) -> str:
        pointer = self._pointer(name)
        if not width:
            return f"tl.load({pointer} + {start})"
        return f"tl.load({pointer} + {start} + c{width}, mask=m{width}, other=0)"

    def _store(self, name: str, start: int, width: int, value: str, indent: str = "") -> None:
        pointer = self._pointer(name)
        where = f"{pointer} + {start} + c{width}"
        self._lines.append(f"{indent}tl.store({where}, {value}, mask=m{width})")

    # Values

    def _value(self, node: Node) -> str:
        """Name of a value, defined if necessary, or a literal."""
        if node.op == "const":
            return literal(node.data)
        if node not in self._names:
            text = self._text(node)
            lines = self._lines if node.kind == UNIT else self._outside
            lines.append(f"x{node.number} = {text}")
            self._names[node] = f"x{node.number}"
            if node.op == "load" and node.data[0] == "ds0":  # the state is also the output
                dout = self._load("dout", node.data[1] * node.width, node.width)
                self._lines += ["if HAS_DOUT:", f"    x{node.number} += {dout}"]
        return self._names[node]

    def _text(self, node: Node) -> str:
        if node.op in ("load", "flag"):
            name, place = node.data
            wide = self._units if name == "hoisted" else node.width or 1
            text = self._load(self._source(name), place * wide, node.width)
            return f"{text} != 0" if node.op == "flag" else text
        args = [self._value(a) for a in node.args]
        if node.op == "cumsum":
            before = f"c{node.number}"  # the sum of earlier tiles
            self._outside.append(f"{before} = 0.0")
            self._lines.append(f"a{node.number} = tl.where(m{node.width}, {args[0]}, 0.0)")
            self._lines.append(f"x{node.number} = {before} + tl.cumsum(a{node.number}, axis=0)")
            self._lines.append(f"{before} += tl.sum(a{node.number}, axis=0)")
            return f"x{node.number}"
        if node.kind == CONST:
            args = [f"tl.full((), {a}, tl.float32)" for a in args]
        return _expression(node.op, args)

    def _source(self, name: str) -> str:
        return name


#: Memory at fixed addresses around a product, by example.
_BUFFERS = ("product", "operand", "dl")


def _expression(op: str, args: Sequence[str]) -> str:
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    if op == "where":
        return f"tl.where({', '.join(args)})"
    if op == "neg":
        return f"-({args[0]})"
    if op in ("and", "or"):
        return f"{args[0]} {'&' if op == 'and' else '|'} {args[1]}"
    if op == "not":
        return f"{args[0]} == 0"
    if op not in FUNCTIONS:
        raise Unsupported(f"the function {op} on a GPU")
    return f"{FUNCTIONS[op]}({', '.join(args)})"


class _Hoist(_Block):
    """Vectors of parameters alone."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        for node, slot in plan.hoisted.items():
            with self._units_of(node.width):
                self._store("hoisted", slot * self._units, node.width, self._value(node))


class _Level(_Block):
    """One level of a pass; `read`: values of earlier levels that it or a later one reads back."""

    def __init__(self, plan: Plan, pass_: Pass, level: int, later: set[Node]) -> None:
        super().__init__(plan)
        self._pass, self._level = pass_, level
        self._is_forward = pass_ is plan.forward
        self._later, self.read = later, set[Node]()
        self._time = level, 0
        if self._is_forward and level:
            self._save_product(level - 1)
            self._copy_early_state(level - 1)
        for loop in pass_.of_level(level):
            self._add_loop(loop)
        for number in filter(lambda s: self._is_here(s.node), pass_.numbers):
            self._add_number(number)
        for node in filter(self._is_here, pass_.crossing):
            value = self._value(node)
            value = f"tl.where({value}, 1.0, 0.0)" if node.condition else value
            place = f"{self._pointer('crossing')} + {pass_.crossing[node]}"
            self._lines.append(f"tl.store({place}, {value})")

    def _is_here(self, node: Node) -> bool:
        return self._pass.time(node)[0] == self._level

    def _add_loop(self, loop: Loop) -> None:
        kept, stored, width = self._pass.spilled, self._pass.stored, loop[2]
        self._time = loop[:2]
        nodes = sorted(self._pass.loops.get(loop, ()), key=lambda node: node.number)
        reductions = [node for node in nodes if node.op in REDUCTIONS]
        for node in reductions:
            start = 0.0 if node.op == "sum" else "float('-inf')"
            block = self._block(width)
            self._lines.append(f"t{node.number} = tl.full(({block},), {start}, tl.float32)")
        with self._units_of(width):
            for node in nodes:
                if node in reductions:
                    self._reduce(node, width)
                    continue
                value = self._value(node)
                if node not in stored and (self._is_tiled or node in self._later):
                    self._store("spill", kept[node] * self._units, node.width, value)
            for sink in self._pass.sinks:
                if self._pass.loop_of(sink) == loop:
                    self._add_sink(sink)
        for node in reductions:
            function = "tl.sum" if node.op == "sum" else "f.largest"
            self._lines.append(f"x{node.number} = {function}(t{node.number})")
            self._names[node] = f"x{node.number}"
        self._forget()

    def _reduce(self, node: Node, width: int) -> None:
        total, args = f"t{node.number}", [self._value(a) for a in node.args]
        if node.op == "sum":
            self._lines.append(f"{total} += tl.where(m{width}, {' + '.join(args)}, 0.0)")
            return
        for a in args:
            a = f"tl.where(m{width}, {a}, float('-inf'))"
            self._lines.append(f"{total} = f.maximum({total}, {a})")

    def _forget(self) -> None:
        """Leave no vectors of a loop in registers, or only those that are kept."""
        kept = () if self._is_tiled else self._pass.spilled
        self._names = {a: x for a, x in self._names.items() if a.kind != UNIT or a in kept}
        if self._is_tiled:
            self._lines.append("tl.debug_barrier()")  # the next loop may read what others stored

    def _row_width(self, kind: str, i: int) -> int:
        if kind == "operand":
            product = self._plan.trace.products[i]
            return product.inner if self._is_forward else product.width
        if kind == "spill":
            return max(1, len(self._pass.spilled)) * self._units
        if kind == "crossing":
            return max(1, len(self._pass.crossing))
        return super()._row_width(kind, i)

    def _source(self, name: str) -> str:
        return f"product{name[1:]}" if self._is_forward and name[0] == "u" else name

    def _text(self, node: Node) -> str:
        if node.op in ("load", "flag") or self._pass.time(node) >= self._time:
            return super()._text(node)
        if node.kind != UNIT and node.op != "const" and node in self._pass.crossing:
            text = self._load("crossing", self._pass.crossing[node], 0)
            return f"{text} != 0" if node.condition else text
        if node.kind == UNIT and node in self._pass.spilled:
            self.read.add(node)
            sink = self._pass.stored.get(node)
            if sink is None:
                return self._load("spill", self._pass.spilled[node] * self._units, node.width)
            return self._load(self._places(sink.name)[0], sink.block * sink.width, sink.width)
        return super()._text(node)

    def _places(self, name: str) -> list[str]:
        """Where a vector is stored; a second place in the forward pass, of l, is saved."""
        kind, i = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
        if kind == "n":
            left = self._plan.left_states.items()
            free = [k for k, state in left if state == int(i) and k < self._level]
            return [name, *(f"operand{k}" for k in free)]
        return [f"operand{i}", name] if kind in ("l", "du") else [name]

    def _add_sink(self, sink: Sink) -> None:
        value, start = self._value(sink.node), sink.block * sink.width
        if sink.adds:
            start += sum_places(self._plan)[sink.name]
            self._store(
                "sums", start, sink.width, f"{self._load('sums', start, sink.width)} + {value}"
            )
            return
        for place in self._places(sink.name):
            saved = place[0] == "l"
            if saved:
                self._lines.append("if SAVES:")
            self._store(place, start, sink.width, value, "    " * saved)

    def _add_number(self, number: NumberSink) -> None:
        value, place = self._value(number.node), number.place
        if number.adds:
            place += sum_places(self._plan)[number.name]
            value = f"{self._load('sums', place, 0)} + {value}"
            self._lines.append(f"tl.store({self._pointer('sums')} + {place}, {value})")
            return
        target = f"{self._pointer(number.name)} + {place}"
        self._lines += ["if SAVES:", f"    tl.store({target}, {value})"]

    def _copy_early_state(self, k: int) -> None:
        """After product k, replace its operand by a state that was stored before it."""
        state = self._plan.left_states.get(k)
        for s in self._pass.sinks:
            if s.name == f"n{state}" and self._pass.time(s.node)[0] <= k:
                with self._units_of(s.width):
                    value = self._load(s.name, s.block * s.width, s.width)
                    self._store(f"operand{k}", s.block * s.width, s.width, value)

    def _save_product(self, k: int) -> None:
        blocks, unit = blocks_of(self._plan.trace, self._plan.trace.products[k].width)
        with self._units_of(unit):
            self._lines.append("if SAVES:")
            for b in range(blocks):
                value = self._load(f"product{k}", b * unit, unit)
                self._store(f"u{k}", b * unit, unit, value, "    ")
