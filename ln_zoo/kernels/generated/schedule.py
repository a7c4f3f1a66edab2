"""Schedule the expressions of one pass over a row.

Products divide a step into levels: level k is what needs the first k products. Reductions of a row
divide a level into loops over its units. Each value is computed in the first loop that can; a later
loop recomputes it if that is cheap, and reads it back otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ln_zoo.kernels.generated.rows import REDUCTIONS, UNIT, Node, in_order
from ln_zoo.kernels.generated.trace import Unsupported

#: Cost of an operation from which on its result is kept rather than recomputed.
DEAR = 6.0
_COSTS = {
    "exp": 9, "log": 9, "log1p": 12, "expm1": 9, "sigmoid": 9, "tanh": 9, "div": 4, "sqrt": 4,
    "reciprocal": 4, "rsqrt": 4, "sin": 50, "cos": 50, "erf": 50, "pow": 50, "cumsum": 30,
    "const": 0, "load": 0.5, "flag": 0.5,
}  # fmt: skip

#: Level and loop.
Time = tuple[int, int]
#: Level, loop and number of units.
Loop = tuple[int, int, int]
_LAST_LOOP = 10**6


@dataclass(frozen=True)
class Sink:
    """A vector that a pass stores: in block ``block`` of the row ``name``."""

    name: str
    block: int
    width: int
    node: Node
    adds: bool = False
    level: int | None = None  # the level until which it must be stored; None: any


@dataclass(frozen=True)
class NumberSink:
    """A number of the row that a pass stores, or adds to a sum."""

    name: str
    place: int
    node: Node
    adds: bool = False


class Pass:
    """Schedule of one pass.

    Args:
        levels: first level that can read each load, by name.
        sinks: vectors to store.
        numbers: numbers to store.
        count: the last level.
    """

    def __init__(
        self,
        levels: Mapping[str, int],
        sinks: Sequence[Sink],
        numbers: Sequence[NumberSink],
        count: int,
    ) -> None:
        self.sinks, self.numbers, self.count = sinks, numbers, count
        #: Vectors that are kept, by slot.
        self.spilled: dict[Node, int] = {}
        #: Numbers that later levels read, by slot.
        self.crossing: dict[Node, int] = {}
        #: Whether later levels read vectors that are kept.
        self.rows_apart = False
        #: Reductions and kept vectors of each loop.
        self.loops: dict[Loop, set[Node]] = {}
        self._first = self._first_levels(levels)
        self._wanted = self._wanted_levels()
        self._times = self._all_times()
        self.stored = {s.node: s for s in sinks if not s.adds and s.name[:2] != "ps"}
        self._plan()

    def time(self, node: Node) -> Time:
        """Level and loop of a value."""
        return self._times[node]

    def loop_of(self, sink: Sink) -> Loop:
        return (*self.time(sink.node), sink.width)

    def of_level(self, level: int) -> list[Loop]:
        """Loops of a level, in order."""
        found = {*self.loops, *map(self.loop_of, self.sinks)}
        return sorted(loop for loop in found if loop[0] == level)

    @property
    def _roots(self) -> list[Node]:
        return [*(s.node for s in self.sinks), *(n.node for n in self.numbers)]

    def _first_levels(self, levels: Mapping[str, int]) -> dict[Node, int]:
        found: dict[Node, int] = {}
        for node in in_order(self._roots):
            if node.op in ("load", "flag"):
                found[node] = levels[node.data[0]]
            else:
                found[node] = max((found[a] for a in node.args), default=0)
        return found

    def _wanted_levels(self) -> dict[Node, int]:
        """The first level that needs each value."""
        wanted: dict[Node, int] = {}
        for sink in self.sinks:
            level = self._first[sink.node]
            if sink.level is not None and level > sink.level:
                raise Unsupported(f"{sink.name} needs a later product")
            level = level if sink.level is None else sink.level
            wanted[sink.node] = min(level, wanted.get(sink.node, level))
        for number in self.numbers:
            level = self.count if not number.adds else self._first[number.node]
            wanted[number.node] = min(level, wanted.get(number.node, level))
        for node in reversed(in_order(self._roots)):
            for a in node.args:
                wanted[a] = min(wanted[node], wanted.get(a, wanted[node]))
        return wanted

    def _all_times(self) -> dict[Node, Time]:
        found: dict[Node, Time] = {}
        for node in in_order(self._roots):
            if node.op in ("load", "flag", "const"):
                found[node] = (self._first[node], 0)
                continue
            level = self._wanted[node]
            loops = [loop for at, loop in (found[a] for a in node.args) if at == level]
            found[node] = (level, max(loops, default=0) + (node.op in REDUCTIONS))
        return found

    def _is_dear(self, node: Node) -> bool:
        """Whether computing a vector again costs as much as reading it back."""
        total, left = 0.0, [node]
        while left and total < DEAR:
            now = left.pop()
            if now.kind != UNIT:
                continue
            if now in self.spilled and now is not node:
                total += 0.5
                continue
            total += _COSTS.get(now.op, 1)
            left += now.args
        return total >= DEAR

    def _plan(self) -> None:
        """Decide what is kept: walk from the sinks to the loads."""
        done: set[tuple[Node, Time]] = set()
        left: list[tuple[Node, Time]] = []
        for sink in self.sinks:
            self.loops.setdefault(self.loop_of(sink), set())
            left.append((sink.node, self.time(sink.node)))
        left += [(n.node, (self.time(n.node)[0], _LAST_LOOP)) for n in self.numbers]
        # Later loops first, so that a value's first use decides last.
        while left:
            node, at = left.pop()
            if (node, at) in done or node.op in ("load", "flag", "const"):
                continue
            done.add((node, at))
            at = self._place_number(node, at) if node.kind != UNIT else self._place(node, at)
            left += [(a, at) for a in node.args]

    def _place_number(self, node: Node, at: Time) -> Time:
        own = self.time(node)
        if at[0] > own[0]:
            self.crossing.setdefault(node, len(self.crossing))
            at = (own[0], _LAST_LOOP)
        if node.op in REDUCTIONS:
            at = (own[0], own[1] - 1)
            self.loops.setdefault((*at, node.args[0].width), set()).add(node)
        return at

    def _place(self, node: Node, at: Time) -> Time:
        own = self.time(node)
        if own < at and not node.condition and self._is_dear(node):
            self.spilled.setdefault(node, len(self.spilled))
            self.loops.setdefault((*own, node.width), set()).add(node)
            self.rows_apart |= own[0] < at[0]
            return own
        return at
