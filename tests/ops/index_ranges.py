"""Whether a kernel's 32-bit index arithmetic can wrap: ranges of all integers in its Triton IR.

Each integer value gets the range of all its elements, over all programs of a launch and whatever
the loaded memory holds. A 32-bit sum, difference, product, negation or truncation whose range does
not fit 32 bits may have wrapped; what is computed from it may be wrong. An address computed from it
is reported. Ranges are upper bounds: what is not reported cannot wrap; what is reported might.

This covers the instructions that our kernels compile to. An unknown instruction that returns
integers is taken to return anything.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

LIMIT = 2**31
WIDE = 2**63
SAME = {
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.split", "tt.join",
    "tt.gather", "tt.unsplat", "tt.cat", "ttg.convert_layout", "arith.extsi", "arith.index_cast",
    "ub.poison", "arith.bitcast",
}  # fmt: skip
VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")


@dataclass(frozen=True)
class Range:
    """Integers low to high; `wrapped` says which instructions may have wrapped before."""

    low: int
    high: int
    wrapped: frozenset[str] = frozenset()

    def join(self, other: "Range") -> "Range":
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Range(low, high, self.wrapped | other.wrapped)


@dataclass(frozen=True)
class Pointer:
    """Into the memory that a kernel's argument of this name points to."""

    name: str


Value = Range | Pointer | None  # None: neither, such as a float
ANY = {1: Range(0, 1), 8: Range(-128, 255), 16: Range(-(2**15), 2**16 - 1)}
ANY |= {32: Range(-LIMIT, LIMIT - 1), 64: Range(-WIDE, WIDE - 1)}


@dataclass
class Op:
    """A line of the IR, with the lines nested in it; "" where it closes a region."""

    text: str
    regions: list[list["Op"]] = field(default_factory=list)


def parse(lines: Iterator[str]) -> list[Op]:
    """The operations up to the brace that closes the region; the last one is that line."""
    found: list[Op] = []
    for line in lines:
        text = line.strip()
        if text.startswith("}"):
            return [*found, Op(text)]
        if not text:
            continue
        op = Op(text)
        found.append(op)
        while text.endswith("{"):
            *region, last = parse(lines)
            op.regions.append(region)
            text = last.text
        op.text += " " + text if op.regions else ""
    return found


def element(kind: str) -> str:
    """The element type of a type's text: "i32", "f32", "!tt.ptr<f32>"."""
    kind = kind.strip()
    if match := re.match(r"tensor<(?:\d+x)*(!tt\.ptr<[^>]*>|\w+)", kind):
        return match[1]
    return kind


def bits(kind: str) -> int:
    """The width of an integer type; 0: it is none."""
    kind = element(kind)
    if kind == "index":
        return 64
    match = re.fullmatch(r"[su]?i(\d+)", kind)
    return int(match[1]) if match else 0


def elements(text: str) -> int:
    """Of the first tensor in a line."""
    shape = re.search(r"tensor<((?:\d+x)+)", text)
    return math.prod(map(int, shape[1].rstrip("x").split("x"))) if shape else 1


def result_kind(text: str) -> str:
    """The first result's type: what stands last in a line."""
    for separator in (" -> ", " to ", " : "):
        if separator in text:
            return text.rpartition(separator)[2].strip("( ").split(", ")[0].rstrip(")")
    return ""


class Ranges:
    """The analysis of one kernel.

    Attributes:
        found: addresses computed from what may have wrapped.
    """

    def __init__(
        self,
        arguments: Sequence[tuple[str, Any]],
        grid: Sequence[int],
        loaded: Mapping[str, tuple[int, int]],
    ) -> None:
        """arguments: by name, in order: an int's range or None. loaded: what memory holds."""
        self.arguments, self.grid, self.loaded = arguments, [*grid, 1, 1, 1], loaded
        self.found: dict[str, None] = {}
        self.functions: dict[str, Op] = {}

    def run(self, ir: str) -> list[str]:
        top = parse(iter(ir.splitlines()))
        (module,) = (op for op in top if op.text.startswith("module"))
        for op in module.regions[0]:
            if op.text.startswith("tt.func"):
                name = re.search(r"@([^(]+)\(", op.text)
                assert name
                self.functions[name[1]] = op
        (entry,) = (op for op in self.functions.values() if op.text.startswith("tt.func public"))
        self.call(entry, self.bind(entry))
        return list(self.found)

    def bind(self, entry: Op) -> list[Value]:
        """A descriptor is followed by its shape and strides."""
        kinds = [kind for _, kind in parameters(entry)]
        values: list[Value] = []
        given = iter(self.arguments)
        while len(values) < len(kinds):
            name, value = next(given)
            kind = kinds[len(values)]
            if "tensordesc" in kind:
                rank = re.search(r"<((?:\d+x)+)", kind)
                assert rank
                values += [None, *[Range(0, LIMIT - 1)] * 2 * rank[1].count("x")]
            elif "!tt.ptr" in kind:
                values.append(Pointer(name))
            elif bits(kind):
                assert value is not None, name
                values.append(value)
            else:
                values.append(None)
        assert not list(given)
        return values

    def call(self, function: Op, values: Sequence[Value]) -> list[Value]:
        names = [name for name, _ in parameters(function)]
        return self.block(function.regions[0], dict(zip(names, values, strict=True)))

    def block(self, ops: list[Op], known: dict[str, Value]) -> list[Value]:
        """What the region's last operation passes on."""
        passed: list[Value] = []
        operands: list[Value] = []
        for op in ops:
            text = op.text
            if text.startswith("^"):
                if "no predecessors" in text:  # after a return
                    break
                continue
            if text.startswith("ttg.warp_specialize"):
                operands = self.operands(text.partition(")")[0], known)
            elif text.startswith("default {"):
                self.block(op.regions[0], known.copy())
            elif text.startswith("partition"):
                names = [name for name, _ in parameters(op)]
                self.block(op.regions[0], known | dict(zip(names, operands, strict=True)))
            elif re.match(r"(scf\.yield|scf\.condition|tt\.return|ttg\.warp_yield)", text):
                passed = self.operands(text.partition(" : ")[0], known)
                passed = passed[1:] if text.startswith("scf.condition") else passed
            else:
                self.operation(op, known)
        return passed

    def operands(self, text: str, known: dict[str, Value]) -> list[Value]:
        return [known[name] for name in VALUE.findall(text)]

    def operation(self, op: Op, known: dict[str, Value]) -> None:
        names, _, right = op.text.partition(" = ") if op.text.startswith("%") else ("", "", op.text)
        match = re.match(r'"?([\w.]+)"?', right)
        assert match, op.text
        name = match[1]
        if name == "scf.for":
            results = self.loop(op, right, known)
        elif name == "scf.while":
            results = self.repeat(op, right, known)
        elif name == "scf.if":
            parts = [self.block(region, known.copy()) for region in op.regions]
            results = [join(values) for values in zip(*parts, strict=False)]
        elif name == "tt.call":
            target = re.search(r"@([^(]+)\(", right)
            assert target
            inputs = right.partition("(")[2].partition(") : ")[0]
            results = self.call(self.functions[target[1]], self.operands(inputs, known))
        else:
            inputs = right.rpartition(" : ")[0].partition(" : ")[0]
            if name == "tt.elementwise_inline_asm":
                inputs = right.rpartition("} ")[2].partition(" : ")[0]
            values = [known.get(name) for name in VALUE.findall(inputs)]
            results = [self.result(name, right, op, values)]
        assign(names, results, known)

    def result(self, name: str, text: str, op: Op, values: list[Value]) -> Value:
        if name == "tt.addptr":
            pointer, offset = values
            assert isinstance(pointer, Pointer)
            if isinstance(offset, Range) and offset.wrapped:
                self.found[f"{pointer.name}: {', '.join(sorted(offset.wrapped))}"] = None
            return pointer
        kind = result_kind(op.text)
        if name == "arith.select" and "tensor<" in kind:  # after the condition's type
            kind = "tensor<" + op.text.rpartition("tensor<")[2]
        pointers = [value for value in values if isinstance(value, Pointer)]
        if pointers and "!tt.ptr" in kind and name not in ("tt.load", "tt.atomic_rmw"):
            return pointers[0]
        if name in ("tt.load", "tt.atomic_rmw", "tt.atomic_cas"):
            match = re.search(r"ptr<(\w+)", op.text)
            width = bits(match[1]) if match else 0
            return self.memory(pointers[0].name, width) if width else None
        width = bits(kind)
        if name in ("arith.cmpi", "arith.cmpf", "tt.store") or not width:
            return None if not width else ANY[1]
        if width == 1:
            return ANY[1]
        integers = [value for value in values if isinstance(value, Range)]
        if name == "arith.select":
            return reduce(Range.join, integers[-2:])
        if name in SAME or '"mov.b32 $0, $1;"' in text:
            return reduce(Range.join, integers) if integers else ANY[width]
        if name in ("tt.reduce", "tt.scan"):
            return combined(op, text, integers, width)
        found = self.primitive(name, text, integers, width)
        if found is None:
            taint = frozenset().union(*(value.wrapped for value in integers))
            return replace(ANY[width], wrapped=taint)
        return fitted(found, name, text, width, self.label(integers))

    def label(self, integers: list[Range]) -> str:
        return " and ".join(f"{value.low}..{value.high}" for value in integers)

    def memory(self, name: str, width: int) -> Range:
        low, high = self.loaded.get(name, (ANY[width].low, ANY[width].high))
        return Range(low, high)

    def primitive(self, name: str, text: str, values: list[Range], width: int) -> Range | None:
        """The exact range; None: anything."""
        if name == "arith.constant":
            match = re.search(r"(?:dense<)?(-?\d+|true|false)>? : ", text)
            if not match:
                return None
            number = {"true": 1, "false": 0}.get(match[1])
            number = int(match[1]) if number is None else number
            return Range(number, number)
        if name == "tt.get_program_id":
            return Range(0, self.grid["xyz".index(text.split()[1])] - 1)
        if name == "tt.get_num_programs":
            programs = self.grid["xyz".index(text.split()[1])]
            return Range(programs, programs)
        if name == "tt.make_range":
            bounds = dict(re.findall(r"(end|start) = (\d+)", text))
            return Range(int(bounds["start"]), int(bounds["end"]) - 1)
        if name == "tt.histogram":
            return Range(0, elements(text))
        if name in ("arith.trunci", "tt.bitcast", "arith.extui") and len(values) == 1:
            source = values[0]
            return source if name == "arith.trunci" or source.low >= 0 else None
        if name not in BINARY or len(values) != 2:
            return None
        taint = values[0].wrapped | values[1].wrapped
        found = BINARY[name](*values)
        return found and replace(found, wrapped=taint)

    def loop(self, op: Op, text: str, known: dict[str, Value]) -> list[Value]:
        match = re.match(
            r"scf\.for (?:unsigned )?(\S+) = (\S+) to (\S+) step (\S+)(?: iter_args\((.*?)\) ->)?",
            text,
        )
        assert match, text
        first, last, step = (known[match[i]] for i in (2, 3, 4))
        assert isinstance(first, Range) and isinstance(last, Range) and isinstance(step, Range)
        taint = first.wrapped | last.wrapped | step.wrapped
        known = known | {match[1]: Range(first.low, max(first.low, last.high - 1), taint)}
        times = max(0, -(-(last.high - first.low) // max(step.low, 1)))
        return self.fixed(op.regions[0], match[5], known, times)

    def repeat(self, op: Op, text: str, known: dict[str, Value]) -> list[Value]:
        match = re.match(r"scf\.while \((.*?)\) : ", text)
        assert match, text
        before, after = op.regions
        inside = [name for name, _ in parameters(after[0])]
        names, values = carried(match[1], known)

        def body(values: list[Value]) -> list[Value]:
            values = while_true(before, names, values)
            passed = self.block(before, known | dict(zip(names, values, strict=True)))
            return self.block(after, known | dict(zip(inside, passed, strict=True)))

        values = steady(body, values, LIMIT)
        return self.block(before, known | dict(zip(names, values, strict=True)))

    def fixed(
        self, region: list[Op], args: str | None, known: dict[str, Value], times: int
    ) -> list[Value]:
        names, values = carried(args or "", known)
        return steady(
            lambda values: self.block(region, known | dict(zip(names, values, strict=True))),
            values,
            times,
        )


def steady(
    body: Callable[[list[Value]], list[Value]], first: list[Value], times: int
) -> list[Value]:
    """Ranges of the values that a loop carries, over all its iterations.

    A range that grows in an iteration by no more than in the first is followed; any other range
    is taken as unbounded.
    """
    once = body(first)
    guess = [spread(a, b, times) for a, b in zip(first, once, strict=True)]
    again = body(guess)
    kept = []
    for a, b, wide, wider in zip(first, once, guess, again, strict=True):
        if isinstance(a, Range) and isinstance(b, Range):
            assert isinstance(wide, Range) and isinstance(wider, Range)
            grows, shrinks = max(0, b.high - a.high), max(0, a.low - b.low)
            linear = wider.high - wide.high <= grows and wide.low - wider.low <= shrinks
            kept.append(wide.join(replace(a, wrapped=wider.wrapped)) if linear else None)
        else:
            kept.append(wide)
    guess = [
        anything(a) if k is None and isinstance(a, Range) else k
        for a, k in zip(first, kept, strict=True)
    ]
    guess = [
        replace(k, wrapped=k.wrapped | b.wrapped)
        if isinstance(k, Range) and isinstance(b, Range)
        else k
        for k, b in zip(guess, body(guess), strict=True)
    ]
    # Each iteration ends with one of these values; the first one begins with the initial value.
    last = body(guess)
    return [
        a.join(b) if isinstance(a, Range) and isinstance(b, Range) else k
        for a, b, k in zip(first, last, guess, strict=True)
    ]


def while_true(before: list[Op], names: list[str], values: list[Value]) -> list[Value]:
    """The values of an iteration whose condition compares two of them by `<`."""
    known = dict(zip(names, values, strict=True))
    conditions = [op.text for op in before if op.text.startswith("scf.condition")]
    match = re.match(r"scf\.condition\((%[\w.$-]+)\)", conditions[0])
    assert match
    for op in before:
        compared = re.match(r"(\S+) = arith\.cmpi slt, (\S+), (\S+) :", op.text)
        if compared and compared[1] == match[1]:
            a, b = known.get(compared[2]), known.get(compared[3])
            if isinstance(a, Range) and isinstance(b, Range):
                known[compared[2]] = replace(a, high=max(a.low, min(a.high, b.high - 1)))
                known[compared[3]] = replace(b, low=min(b.high, max(b.low, a.low + 1)))
    return [known[name] for name in names]


def anything(value: Range) -> Range:
    width = 32 if value.low >= -LIMIT and value.high < LIMIT else 64
    return replace(ANY[width], wrapped=value.wrapped)


def spread(first: Value, once: Value, times: int) -> Value:
    if not isinstance(first, Range) or not isinstance(once, Range):
        return first
    low = first.low - times * max(0, first.low - once.low)
    high = first.high + times * max(0, once.high - first.high)
    return Range(low, high, first.wrapped | once.wrapped)


def fitted(found: Range, name: str, text: str, width: int, label: str) -> Range:
    """Values of 64 bits do not wrap at any size that a memory has."""
    whole = ANY[width]
    if width >= 64:
        return Range(max(found.low, whole.low), min(found.high, whole.high), found.wrapped)
    if found.low >= whole.low and found.high <= whole.high:
        return found
    wrapped = found.wrapped
    if width == 32:
        wrapped |= {f"{name} of {label}"}
    return replace(whole, wrapped=wrapped)


def combined(op: Op, text: str, values: list[Range], width: int) -> Range:
    """Of several operands, the results together have the range of all."""
    found = reduce(Range.join, values)
    inner = " ".join(inside.text for inside in op.regions[0])
    if "arith.addi" in inner:
        count = elements(op.text)
        found = replace(found, low=min(found.low * count, 0), high=max(found.high * count, 0))
    return fitted(found, text.split("(")[0], text, width, "sums of all")


def parameters(op: Op) -> list[tuple[str, str]]:
    """The arguments of a function, a block or a partition: name and type."""
    head = op.text.partition("(")[2]
    head = re.split(r"\) (?:attributes|num_warps|\{)|\):|\) ->", head)[0]
    head = re.sub(r"\{[^}]*\}", "", head)
    pairs = re.findall(r"(%[\w$-]+): ((?:[^,<(]|<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)+)", head)
    return [(name, kind.strip()) for name, kind in pairs]


def carried(text: str, known: dict[str, Value]) -> tuple[list[str], list[Value]]:
    pairs = re.findall(r"(%[\w$-]+) = (%[\w.$#-]+)", text)
    return [name for name, _ in pairs], [known[value] for _, value in pairs]


def assign(names: str, results: list[Value], known: dict[str, Value]) -> None:
    """ "%3 = ", "%3:2 = " or "%a, %b = "."""
    if not names:
        return
    targets = []
    for name in names.split(", "):
        base, _, count = name.strip().partition(":")
        targets += [f"{base}#{i}" for i in range(int(count))] if count else [base]
    results = results if len(results) == len(targets) else results[:1] * len(targets)
    known.update(zip(targets, results, strict=True))


def join(values: Sequence[Value]) -> Value:
    ranges = [value for value in values if isinstance(value, Range)]
    return reduce(Range.join, ranges) if len(ranges) == len(values) else values[0]


def product(a: Range, b: Range) -> Range:
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(corners), max(corners))


def quotient(a: Range, b: Range) -> Range | None:
    """Rounded towards zero."""
    largest = max(abs(a.low), abs(a.high))
    if b.low <= 0:
        return Range(-largest, largest)
    corners = [
        abs(x) // y * (1 if x >= 0 else -1) for x in (a.low, a.high) for y in (b.low, b.high)
    ]
    return Range(min(corners), max(corners))


def remainder(a: Range, b: Range) -> Range | None:
    if b.low <= 0:
        return None
    limit = b.high - 1
    return Range(max(a.low, -limit) if a.low < 0 else 0, min(max(a.high, 0), limit))


def shifted(a: Range, b: Range) -> Range | None:
    return product(a, Range(2**b.low, 2**b.high)) if b.low >= 0 and b.high < 64 else None


def shifted_back(a: Range, b: Range) -> Range | None:
    if b.low < 0 or b.high > 64:
        return None
    corners = [x >> y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(corners), max(corners))


def both_bits(a: Range, b: Range) -> Range | None:
    """`and` with a number that is not negative keeps at most its bits."""
    highs = [value.high for value in (a, b) if value.low >= 0]
    return Range(0, min(highs)) if highs else None


def either_bits(a: Range, b: Range) -> Range | None:
    if a.low < 0 or b.low < 0:
        return None
    return Range(0, 2 ** max(a.high.bit_length(), b.high.bit_length()) - 1)


BINARY: dict[str, Callable[[Range, Range], Range | None]] = {
    "arith.addi": lambda a, b: Range(a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: Range(a.low - b.high, a.high - b.low),
    "arith.muli": product,
    "arith.divsi": quotient,
    "arith.divui": lambda a, b: quotient(a, b) if a.low >= 0 else None,
    "arith.remsi": remainder,
    "arith.remui": lambda a, b: remainder(a, b) if a.low >= 0 else None,
    "arith.maxsi": lambda a, b: Range(max(a.low, b.low), max(a.high, b.high)),
    "arith.minsi": lambda a, b: Range(min(a.low, b.low), min(a.high, b.high)),
    "arith.shli": shifted,
    "arith.shrsi": shifted_back,
    "arith.shrui": lambda a, b: shifted_back(a, b) if a.low >= 0 else None,
    "arith.andi": both_bits,
    "arith.ori": either_bits,
    "arith.xori": either_bits,
}
