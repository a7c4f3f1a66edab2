"""C++ for the passes of a step: the only part that changes from cell to cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ln_zoo.kernels.generated.plan import Plan, blocks_of
from ln_zoo.kernels.generated.rows import REDUCTIONS, UNIT, Node
from ln_zoo.kernels.generated.schedule import Loop, Pass, Sink
from ln_zoo.kernels.generated.trace import Product, Trace, Unsupported

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "gt": ">", "le": "<=", "ge": ">=",
    "eq": "==", "ne": "!=",
}  # fmt: skip
#: Functions of loop.h, for vectors and for numbers alike.
_FUNCTIONS = frozenset(
    {
        "exp", "log", "log1p", "expm1", "sigmoid", "tanh", "abs", "maximum", "minimum", "sqrt",
        "rsqrt", "relu", "sign", "erf", "sin", "cos", "pow", "reciprocal", "atan", "tan",
        "sinh", "cosh", "exp2", "log2", "floor", "ceil", "trunc", "round",
    }
)  # fmt: skip

#: The expression of a node, defined before if necessary.
Namer = Callable[[Node], str]


def literal(value: float) -> str:
    """A float of C++."""
    if value != value:
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if abs(value) > 3.4028234e38:
        raise Unsupported(f"the constant {value}, which is no float32")
    return f"{value!r}f" if set(repr(value)) & set("e.") else f"{value!r}.0f"


def source(plan: Plan) -> str:
    """The C++ of a step."""
    lines = [*_constants(plan), *_hoist(plan)]
    lines += _levels("forward", plan, plan.forward, _forward_pointers(plan))
    lines += _levels("backward", plan, plan.backward, _backward_pointers(plan))
    body = "\n".join(lines)
    return (
        f'#include "loop.h"\n\nnamespace {{\n\n{body}\n\n}}  // namespace\n\n#include "calls.h"\n'
    )


# Expressions


def _expression(node: Node, args: Sequence[str]) -> str:
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    if node.op == "where":
        return f"chosen({', '.join(args)})"
    if node.op == "neg":
        return f"-{args[0]}"
    if node.op in ("and", "or"):
        return f"{args[0]} {'&' if node.op == 'and' else '|'} {args[1]}"
    if node.op == "not":
        return f"negated({args[0]})"
    if node.op not in _FUNCTIONS:
        raise Unsupported(
            "units in reverse order" if node.op == "flip" else f"the function {node.op}"
        )
    return f"of_{node.op}({', '.join(args)})"


def _at(name: str, block: int, width: int) -> str:
    return f"{name} + {block * width}" if block else name


class _Level:
    """Statements of one level of a pass, for one row; ``width`` of hoisted and kept vectors."""

    def __init__(self, pass_: Pass, level: int, width: int) -> None:
        self._pass, self._level, self._width = pass_, level, width
        self.lines: list[str] = []
        self._names: dict[Node, str] = {}  # of numbers
        for loop in pass_.of_level(level):
            self._add_loop(loop)
        for number in pass_.numbers:
            if self._is_here(number.node):
                sign = "+=" if number.adds else "="
                place = f"{number.name}[{number.place}]"
                self.lines.append(f"{place} {sign} {self._number(number.node)};")
        for node, slot in pass_.crossing.items():
            if self._is_here(node):
                self.lines.append(f"numbers[{slot}] = {self._number(node)};")

    def _is_here(self, node: Node) -> bool:
        return self._pass.time(node)[0] == self._level

    def _number(self, node: Node) -> str:
        """Name of a number of the row, defined if necessary."""
        if node.op == "const":
            return literal(node.data)
        if node not in self._names:
            self._names[node] = self._defined(node)
        return self._names[node]

    def _defined(self, node: Node) -> str:
        if node.op in ("load", "flag"):
            return "reset" if node.op == "flag" else f"{node.data[0]}[{node.data[1]}]"
        if self._pass.time(node)[0] < self._level:
            kept = f"numbers[{self._pass.crossing[node]}]"
            return f"({kept} != 0.0f)" if node.condition else kept
        kind = "bool" if node.condition else "float"
        text = _expression(node, [self._number(a) for a in node.args])
        self.lines.append(f"const {kind} r{node.number} = {text};")
        return f"r{node.number}"

    def _kept_at(self, node: Node) -> str:
        """Where a kept vector is: where it is stored anyway, or in memory for it."""
        sink = self._pass.stored.get(node)
        if sink is not None:
            return _at(sink.name, sink.block, sink.width)
        return _at("spill", self._pass.spilled[node], self._width)

    def _add_loop(self, loop: Loop) -> None:
        body = _LoopBody(self._pass, loop, self._number, self._kept_at, self._width)
        self.lines += body.before
        if body.lines:
            self.lines.append(f"for_units({loop[2]}, [&](int64_t j, auto block) {{")
            self.lines += [f"  {line}" for line in body.lines]
            self.lines.append("});")
        for node in body.reductions:
            how = "total" if node.op == "sum" else "largest"
            self.lines.append(f"const float r{node.number} = {how}(t{node.number});")
            self._names[node] = f"r{node.number}"


class _LoopBody:
    """Statements of one loop over units."""

    def __init__(
        self, pass_: Pass, loop: Loop, number: Namer, kept_at: Callable[[Node], str], width: int
    ) -> None:
        self._pass, self._time, self._width = pass_, loop[:2], width
        self._number, self._kept_at = number, kept_at
        self._names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.before: list[str] = []
        found = sorted(pass_.loops.get(loop, ()), key=lambda node: node.number)
        self.reductions = [node for node in found if node.op in REDUCTIONS]
        for node in found:
            self._add(node)
        for sink in pass_.sinks:
            if pass_.loop_of(sink) == loop:
                self._store(sink)

    def _add(self, node: Node) -> None:
        if node.op not in REDUCTIONS:
            if node not in self._pass.stored:
                self._write(self._kept_at(node), self._vector(node))
            return
        args = [self._vector(a) for a in node.args]
        name = f"t{node.number}"
        if node.op == "sum":
            self.before.append(f"vec {name}{{}};")
            self.lines.append(f"{name} += block.keep({' + '.join(args)});")
            return
        self.before.append(f"vec {name} = all(-INFINITY);")
        for arg in args:
            self.lines.append(f"{name} = of_maximum({name}, only(block, {arg}, -INFINITY));")

    def _store(self, sink: Sink) -> None:
        to, value = _at(sink.name, sink.block, sink.width), self._vector(sink.node)
        if sink.adds:
            self.lines.append(f"accumulate(block, {to} + j, {value});")
        else:
            self._write(to, value)

    def _write(self, to: str, value: str) -> None:
        self.lines.append(f"block.write({to} + j, {value});")

    def _vector(self, node: Node) -> str:
        """Name of a vector, defined if necessary."""
        if node in self._names:
            return self._names[node]
        if node.kind != UNIT:
            what = "all_flags" if node.condition else "all"
            return f"{what}({self._number(node)})"
        if node.op == "load":
            width = self._width if node.data[0] == "hoisted" else node.width
            text = f"block.read({_at(node.data[0], node.data[1], width)} + j)"
            if node.data[0] == "ds0":  # the state is also the output
                text += f" + block.read({_at('dout', node.data[1], node.width)} + j)"
        elif node.op == "flag":
            text = f"flags_of(block, {_at(node.data[0], node.data[1], node.width)} + j)"
        elif node in self._pass.spilled and self._pass.time(node) < self._time:
            text = f"block.read({self._kept_at(node)} + j)"
        elif node.op == "cumsum":
            self.before.append(f"float c{node.number} = 0.0f;")
            text = f"cumulated(block.keep({self._vector(node.args[0])}), c{node.number})"
        else:
            text = _expression(node, [self._vector(a) for a in node.args])
        kind = "ivec" if node.condition else "vec"
        self.lines.append(f"const {kind} x{node.number} = {text};")
        self._names[node] = f"x{node.number}"
        return self._names[node]


# Parts of the source


def _array(name: str, values: Iterable[int]) -> str:
    numbers = list(values)
    return f"constexpr std::array<int64_t, {len(numbers)}> {name}{{{_numbers(numbers)}}};"


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(str(int(value)) for value in values)


def _groups(plan: Plan, name: str, width: int) -> str:
    """For each block of a product, the first of its group; -1: not centred."""
    blocks, _ = blocks_of(plan.trace, width)
    found = [-1] * blocks
    for first, end in plan.groups.get(name, ()):
        found[first:end] = [first] * (end - first)
    return "{" + ", ".join(map(str, found)) + "}"


def _constants(plan: Plan) -> list[str]:
    trace, products = plan.trace, plan.trace.products
    unit = {k: blocks_of(trace, p.width)[1] for k, p in enumerate(products)}
    names = [f"p{i}" for i in range(len(trace.parameters))]
    sizes = zip(names, (a.numel() for a in trace.parameters), strict=True)
    used = {p.weight for p in products}
    # A parameter without gradient is its own sum of zeros.
    same = [int(plan.same_sums.get(name, name)[1:]) for name in names]
    rows = ", ".join(
        f"{{{_weight(trace, p)}, {p.first}, {p.rows}, {p.width}, {p.inner}, {p.blocks}, "
        f"{unit[k]}, {plan.left_states.get(k, -1)}, {_numbers(plan.added.get(k, (-1, 0)))}, "
        f"{_groups(plan, f'u{k}', p.width)}}}"
        for k, p in enumerate(products)
    )
    return [
        f"constexpr int64_t G = {trace.gates}, H = {trace.hidden}, STATS = {max(1, plan.stats)};",
        f"constexpr int64_t HOISTED = {len(plan.hoisted) * max(trace.units)};",
        f"constexpr int64_t INPUT_GROUPS[] = {_groups(plan, 'v', trace.gates)};",
        f"const std::vector<Product> PRODUCTS{{{rows}}};",
        _array("WIDTHS", trace.widths),
        _array("KEPT", plan.kept),
        # Gradients of weights are products, not sums.
        _array("SIZES", (0 if name in used else size for name, size in sizes)),
        _array("SAME_SUMS", same),
        # Whether an earlier product has written to some of the same rows.
        _array("ADDS", (_overlaps(products, k) for k in range(len(products)))),
        "",
    ]


def _weight(trace: Trace, product: Product) -> int:
    """Number of the weight of a product, in the order of `Call::given`, without x and w_ih."""
    if product.weight in ("hh", "hr"):
        return int(product.weight == "hr")
    return 2 + len(trace.widths) + int(product.weight.removeprefix("p"))


def _overlaps(products: Sequence[Product], k: int) -> bool:
    now = products[k]
    return any(
        p.weight == now.weight and p.first < now.first + now.width and now.first < p.first + p.width
        for p in products[:k]
    )


def _hoist(plan: Plan) -> list[str]:
    width = max(plan.trace.units)
    lines = ["void hoist(const Work& a, float* hoisted) {"]
    for i in range(len(plan.trace.parameters)):
        lines += [f"  const float* const p{i} = a.parameters[{i}];", f"  (void)p{i};"]
    lines.append("  (void)a, (void)hoisted;")
    for node, slot in plan.hoisted.items():
        lines.append(f"  for_units({node.width}, [&](int64_t j, auto block) {{")
        lines.append(f"    block.write(hoisted + {slot * width} + j, {_inline(node)});")
        lines.append("  });")
    return [*lines, "}", ""]


def _inline(node: Node) -> str:
    """An expression of parameters."""
    if node.op == "const":
        return f"all({literal(node.data)})"
    if node.op == "load":
        name, block = node.data
        if node.width:
            return f"block.read({_at(name, block, node.width)} + j)"
        return f"all({name}[{block}])"
    return f"({_expression(node, [_inline(a) for a in node.args])})"


def _levels(name: str, plan: Plan, pass_: Pass, pointers: Sequence[str]) -> list[str]:
    """Functions for the levels of a pass, and the pass."""
    width, lines, functions = max(plan.trace.units), [], []
    spills, crossing = len(pass_.spilled) * width, len(pass_.crossing)
    pointers = [
        *pointers,
        f"float* const spill = part.spills{_row_of(spills) if pass_.rows_apart else ''};",
        f"float* const numbers = part.crossing{_row_of(crossing)};",
    ]
    parameters = range(len(plan.trace.parameters))
    outside = [f"const float* const p{i} = a.parameters[{i}];" for i in parameters]
    outside += [f"float* const d_p{i} = part.sums[{i}];" for i in parameters]
    outside.append("const float* const hoisted = a.hoisted;")
    for level in range(len(plan.trace.products) + 1):
        code = _Level(pass_, level, width).lines
        functions.append(f"{name}_{level}" if code else "nullptr")
        if not code:
            continue
        used = _words("\n".join(code))
        lines += [
            f"void {name}_{level}(const Work& a, const Part& part, int64_t t) {{",
            *(f"  {p}" for p in outside if _name_of(p) in used),
            "  const int64_t end = std::min(part.last, a.sizes[t]);",
            "  for (int64_t n = part.first; n < end; n++) {",
            "    const int64_t row = a.offsets[t] + n;",
            "    (void)row;",
            *(f"    {p}" for p in pointers if _name_of(p) in used),
            *(f"    {c}" for c in code),
            "  }",
            "}",
            "",
        ]
    flags = f"{str(pass_.rows_apart).lower()}, {str(name == 'backward').lower()}"
    levels = f"{{{', '.join(functions)}}}"
    return [*lines, f"const Pass {name.upper()}{{{levels}, {spills}, {crossing}, {flags}}};", ""]


def _row_of(size: int) -> str:
    return f" + (n - part.first) * {size}"


def _name_of(declaration: str) -> str:
    return declaration.partition(" =")[0].rpartition(" ")[2]


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def _pointers(plan: Plan) -> list[str]:
    """Declarations of what both passes read in a row."""
    trace = plan.trace
    found = [
        "const float* const v = a.term(t) + n * G;",
        "const float* const dropped = a.dropped + n * WIDTHS[0];",
        "const bool reset = a.reset[row];",
    ]
    for i, width in enumerate(trace.widths):
        found.append(f"const float* const s{i} = a.before(t, {i}) + n * {width};")
        found.append(f"const bool* const held{i} = a.held({i}) + row * {width};")
    for k, product in enumerate(trace.products):
        found.append(f"const float* const u{k} = a.product(t, {k}) + n * {product.width};")
    return found


def _forward_pointers(plan: Plan) -> list[str]:
    trace, found = plan.trace, _pointers(plan)
    for i, width in enumerate(trace.widths):
        found.append(f"float* const n{i} = a.after(t, {i}) + n * {width};")
    for k, product in enumerate(trace.products):
        found.append(f"float* const l{k} = a.left(t, {k}) + n * {product.inner};")
    found.append("float* const stats = a.stats + (a.saves ? row : n) * STATS;")
    return found


def _backward_pointers(plan: Plan) -> list[str]:
    trace, found = plan.trace, _pointers(plan)
    found.append("float* const dv = a.dv + row * G;")
    for i, width in enumerate(trace.widths):
        found.append(f"const float* const n{i} = a.after(t, {i}) + n * {width};")
        found.append(f"const float* const ds{i} = a.gradient(t + 1, {i}) + n * {width};")
        found.append(f"float* const ps{i} = a.gradient(t, {i}) + n * {width};")
    for k, product in enumerate(trace.products):
        found.append(f"float* const du{k} = a.du[{k}] + row * {product.width};")
        found.append(f"const float* const dl{k} = a.dlefts[{k}] + n * {product.inner};")
    found.append("const float* const stats = a.stats + row * STATS;")
    outer = "(a.outer_row(t) + n) * WIDTHS[0]"
    found.append(f"const float* const dout = a.dout ? a.dout + {outer} : a.zeros;")
    return found
