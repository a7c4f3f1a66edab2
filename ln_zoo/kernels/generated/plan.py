"""What the forward and the backward pass of a step compute, store and read.

The backward pass recomputes what the forward pass had between its products; products, states and
numbers of a row (its statistics) are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ln_zoo.kernels.generated.lowering import KNOWN, Lowering
from ln_zoo.kernels.generated.rows import (
    REDUCTIONS,
    ROW,
    UNIT,
    Node,
    Rewrite,
    Rows,
    in_order,
    loads,
)
from ln_zoo.kernels.generated.schedule import NumberSink, Pass, Sink
from ln_zoo.kernels.generated.trace import StepForm, Trace, Unsupported
from ln_zoo.kernels.generated.trace import trace as trace_of
from ln_zoo.ops.cells import Cell, Sites, Weights

Outputs = Mapping[str, Sequence[Node]]
#: First block and end of each group of gates whose weight is centred, by product (``v``, ``u0``).
Groups = dict[str, list[tuple[int, int]]]


@dataclass
class Plan:
    """Both passes of a step, and the layout of its tensors."""

    trace: Trace
    forward: Pass
    backward: Pass
    stats: int  # numbers saved per row
    hoisted: dict[Node, int]  # expressions of parameters alone, by slot
    groups: Groups
    #: State that is the left operand of a product; other products store theirs.
    left_states: dict[int, int]
    #: State whose gradient a product writes, or adds to.
    added: dict[int, tuple[int, bool]]
    #: Parameter whose sum is that of each parameter.
    same_sums: dict[str, str]
    kept: list[bool]  # states of which the backward pass reads the values of all steps


def plan_of(cell: Cell, sites: Sites, weights: Weights, form: StepForm, centres: bool) -> Plan:
    """Trace and plan a step; `Unsupported` with a reason. ``centres``: see `plan`."""
    try:
        return _plan_of_parts(cell, sites, weights, form, centres, 1)
    except Unsupported:
        if (blocks := cell.blocks(weights)) == 1:
            raise
        return _plan_of_parts(cell, sites, weights, form, centres, blocks)  # it norms by block


def _plan_of_parts(
    cell: Cell, sites: Sites, weights: Weights, form: StepForm, centres: bool, parts: int
) -> Plan:
    traced = trace_of(cell, sites, weights, form, KNOWN, parts)
    return plan(traced, Lowering(traced), centres)


def plan(trace: Trace, lowering: Lowering, centres: bool = True) -> Plan:
    """Plan both passes; ``centres``: whether weights may be centred while packing."""
    rows, count = lowering.rows, len(trace.products)
    groups: Groups = {}
    outputs: Outputs = lowering.outputs
    if centres:
        # Over several blocks, the mean of rows would not be in blocks.
        whole = {"v", *(f"u{k}" for k, p in enumerate(trace.products) if p.blocks == 1)}
        groups, outputs = _without_means(outputs, rows, whole)
    hoisted, outputs = _hoisted(outputs, rows)
    left_states = _left_states(trace, outputs, rows)
    saved, back = _saved(trace, outputs, rows)
    numbers = [NumberSink("stats", slot, node) for node, slot in saved.items()]
    constant = {"hoisted": 0, "dropped": 0, "reset": 0, "stats": 0, "v": 0}
    constant |= {f"p{i}": 0 for i in range(len(trace.parameters))}
    constant |= {f"{kind}{i}": 0 for i in range(len(trace.widths)) for kind in ("s", "held")}
    levels = constant | {f"u{k}": k + 1 for k in range(count)}
    forward = Pass(levels, _forward_sinks(trace, outputs, left_states), numbers, count)
    added, of_states = _gradients_of_states(trace, back, left_states, rows)
    of_parameters = [name for name in back if name.startswith("d_p")]
    same = {
        name: next(other for other in of_parameters if back[other] == back[name])
        for name in of_parameters
    }
    sinks = _backward_sinks(trace, back, of_states, rows)
    totals: list[NumberSink] = []
    for name in sorted(set(same.values())):
        _add_sums(trace, name, back[name], sinks, totals)
    levels = constant | {f"u{k}": 0 for k in range(count)}
    levels |= {f"{kind}{i}": 0 for i in range(len(trace.widths)) for kind in ("n", "ds")}
    levels |= {f"dl{k}": count - k for k in range(count)}
    backward = Pass(levels, sinks, totals, count)
    read = {node.data[0] for node in loads([*(s.node for s in sinks), *(t.node for t in totals)])}
    left = left_states.values()
    kept = [i in (0, *left) or bool({f"s{i}", f"n{i}"} & read) for i in range(len(trace.widths))]
    return Plan(
        trace,
        forward,
        backward,
        len(saved),
        hoisted,
        groups,
        left_states,
        added,
        {name.removeprefix("d_"): other.removeprefix("d_") for name, other in same.items()},
        kept,
    )


def blocks_of(trace: Trace, total: int) -> tuple[int, int]:
    """Number and width of the blocks of a row of this size."""
    for unit in trace.units:
        if total % unit == 0:
            return total // unit, unit
    raise Unsupported("rows of different widths")


# Rewriting


def _without_means(
    outputs: Outputs, rows: Rows, products: Collection[str]
) -> tuple[Groups, Outputs]:
    """Find groups of blocks of each of these products that are used only without their mean.

    The weight is centred instead: the mean over a group of its rows is subtracted, so the mean of
    the product is 0. Returns the groups, and outputs without the means.
    """
    users: dict[Node, set[Node]] = {}
    everything = in_order(node for nodes in outputs.values() for node in nodes)
    for node in everything:
        for a in node.args:
            users.setdefault(a, set()).add(node)
    final = {node for nodes in outputs.values() for node in nodes}
    groups: Groups = {}
    gone: dict[Node, Node] = {}
    for node in everything:
        found = _centred(node, users, final)
        if found is not None and found[0] in products:
            name, first, end, differences = found
            groups.setdefault(name, []).append((first, end))
            gone |= {d: d.args[0] for d in differences}
    rewrite = Rewrite(rows, gone.get)
    return groups, {name: [rewrite(node) for node in nodes] for name, nodes in outputs.items()}


def _centred(
    node: Node, users: Mapping[Node, set[Node]], final: set[Node]
) -> tuple[str, int, int, set[Node]] | None:
    """Product, blocks, and the differences with the mean, if a sum serves for nothing else."""
    if node.op != "sum" or any(a.op != "load" or a.data[0][0] not in "vu" for a in node.args):
        return None
    names, blocks = {a.data[0] for a in node.args}, [a.data[1] for a in node.args]
    width, means = node.args[0].width, users.get(node, set())
    first, end = min(blocks), max(blocks) + 1
    if len(names) > 1 or len(means) != 1 or sorted(blocks) != [*range(first, end)]:
        return None
    (mean,) = means
    share = 1 / (len(blocks) * width)
    if mean.op != "mul" or mean in final or node in final:
        return None
    if not any(a.op == "const" and abs(a.data / share - 1) < 1e-6 for a in mean.args):
        return None
    differences, read = users[mean], set(node.args)
    if any(d.op != "sub" or d.args[1] is not mean or d.args[0] not in read for d in differences):
        return None
    if any(not users[a] <= {node, *differences} or a in final for a in read):
        return None
    return names.pop(), first, end, differences


def _hoisted(outputs: Outputs, rows: Rows) -> tuple[dict[Node, int], Outputs]:
    """Vectors of parameters alone, which are computed once per call."""
    constant: dict[Node, bool] = {}
    for node in in_order(node for nodes in outputs.values() for node in nodes):
        if node.op in ("load", "flag"):
            constant[node] = node.data[0][0] == "p"
        else:
            alone = node.op not in REDUCTIONS and node.op != "cumsum"
            constant[node] = alone and all(constant[a] for a in node.args)
    slots: dict[Node, int] = {}

    def choose(node: Node) -> Node | None:
        # Parameters too: in one place they do not share lines of the cache.
        if node.kind != UNIT or node.condition or not constant.get(node) or node.op == "flip":
            return None
        return rows.load("hoisted", slots.setdefault(node, len(slots)), node.width)

    once = Rewrite(rows, choose)
    return slots, {name: [once(node) for node in nodes] for name, nodes in outputs.items()}


def _saved(
    trace: Trace, outputs: Outputs, rows: Rows
) -> tuple[dict[Node, int], dict[str, list[Node]]]:
    """Gradients that read new states instead of computing them, and saved numbers of a row."""
    given: dict[Node, Node] = {}
    for i, width in enumerate(trace.widths):
        _, unit = blocks_of(trace, width)
        for b, node in enumerate(outputs[f"n{i}"]):
            if node.kind == UNIT:
                given[node] = rows.load(f"n{i}", b, unit)
    of_forward: dict[Node, bool] = {}
    names = [name for name in outputs if name.startswith("d_")]
    for node in in_order(node for name in names for node in outputs[name]):
        if node.op in ("load", "flag"):
            of_forward[node] = node.data[0][:2] not in ("ds", "dl")
        else:
            of_forward[node] = all(of_forward[a] for a in node.args)
    slots: dict[Node, int] = {}

    def choose(node: Node) -> Node | None:
        if node in given:
            return given[node]
        computed = node.kind == ROW and node.op not in ("load", "flag")
        if computed and not node.condition and of_forward.get(node):
            return rows.load("stats", slots.setdefault(node, len(slots)), 0)
        return None

    replace = Rewrite(rows, choose)
    return slots, {name: [replace(node) for node in outputs[name]] for name in names}


# Sinks


def _left_states(trace: Trace, outputs: Outputs, rows: Rows) -> dict[int, int]:
    found = {}
    for k, product in enumerate(trace.products):
        blocks = list(outputs[f"l{k}"])
        for i, width in enumerate(trace.widths):
            _, unit = blocks_of(trace, width)
            same = blocks == [rows.load(f"s{i}", b, unit) for b in range(len(blocks))]
            if same and width == product.inner:
                found[k] = i
                break
    return found


def _forward_sinks(trace: Trace, outputs: Outputs, left_states: Mapping[int, int]) -> list[Sink]:
    sinks = []
    for i, width in enumerate(trace.widths):
        _, unit = blocks_of(trace, width)
        nodes = outputs[f"n{i}"]
        sinks += [Sink(f"n{i}", b, unit, n, level=len(trace.products)) for b, n in enumerate(nodes)]
    for k, product in enumerate(trace.products):
        if k not in left_states:
            _, unit = blocks_of(trace, product.inner)
            nodes = outputs[f"l{k}"]
            sinks += [Sink(f"l{k}", b, unit, n, level=k) for b, n in enumerate(nodes)]
    return sinks


def _gradients_of_states(
    trace: Trace, back: Mapping[str, list[Node]], left_states: Mapping[int, int], rows: Rows
) -> tuple[dict[int, tuple[int, bool]], dict[int, list[Node]]]:
    """Products that write or add to the gradient of a state, and the rest of each gradient."""
    added: dict[int, tuple[int, bool]] = {}
    rest: dict[int, list[Node]] = {}
    for i, width in enumerate(trace.widths):
        blocks, unit = blocks_of(trace, width)
        nodes = list(back.get(f"d_s{i}", [rows.const(0.0)] * blocks))
        for k in (k for k, state in left_states.items() if state == i):
            parts = _others(nodes, [rows.load(f"dl{k}", b, unit) for b in range(blocks)], rows)
            if parts is not None and _are_early(parts, k):
                zero = all(part.op == "const" and part.data == 0 for part in parts)
                added[k] = i, not zero
                nodes = [] if zero else parts
                break
        rest[i] = nodes
    return added, rest


def _are_early(parts: Sequence[Node], k: int) -> bool:
    """Whether they are stored before the backward product k adds to them."""
    names = [node.data[0] for node in loads(parts)]
    return all(int(name[2:]) > k for name in names if name.startswith("dl"))


def _others(nodes: Sequence[Node], terms: Sequence[Node], rows: Rows) -> list[Node] | None:
    """Each node without its term, if that is one of a sum and occurs nowhere else."""
    found = []
    for node, term in zip(nodes, terms, strict=True):
        if node is term:
            found.append(rows.const(0.0))
            continue
        if node.op != "add" or term not in node.args:
            return None
        found.append(next((a for a in node.args if a is not term), term))
    below = loads(found)
    return None if any(term in below for term in terms) else found


def _backward_sinks(
    trace: Trace,
    back: Mapping[str, list[Node]],
    of_states: Mapping[int, Sequence[Node]],
    rows: Rows,
) -> list[Sink]:
    sinks, zero = [], rows.const(0.0)
    for i, nodes in of_states.items():
        _, unit = blocks_of(trace, trace.widths[i])
        sinks += [Sink(f"ps{i}", b, unit, node) for b, node in enumerate(nodes)]
    blocks, unit = blocks_of(trace, trace.gates)
    gates = back.get("d_v", [zero] * blocks)
    sinks += [Sink("dv", b, unit, node) for b, node in enumerate(gates)]
    last = len(trace.products) - 1
    for k, product in enumerate(trace.products):
        blocks, unit = blocks_of(trace, product.width)
        nodes = back.get(f"d_u{k}", [zero] * blocks)
        sinks += [Sink(f"du{k}", b, unit, n, level=last - k) for b, n in enumerate(nodes)]
    return sinks


def _add_sums(
    trace: Trace,
    name: str,
    nodes: Sequence[Node],
    sinks: list[Sink],
    totals: list[NumberSink],
) -> None:
    """Add the sums of a parameter's gradient, of vectors or single numbers."""
    parameter = trace.parameters[int(name.removeprefix("d_p"))]
    unit = parameter.numel() // len(nodes)
    of_numbers = unit == 1 and all(node.width == 0 for node in nodes)
    for b, node in enumerate(nodes):
        if node.op == "const" and node.data == 0:
            continue
        if of_numbers:
            totals.append(NumberSink(name, b, node, adds=True))
        else:
            sinks.append(Sink(name, b, unit, node, adds=True))
