"""Mutation of the product's source: small faults, a fixed random set of them, and the record of it.

A mutant is known by its module, function, line of text and change, so that it outlives code that
moves; it is put in behind a switch, beside all others. mutmut and cosmic-ray know theirs by number
or position in one version of the source: they could not keep such a record.

Lines are drawn with equal chance from the bodies of functions, then one mutant of the line. Not
mutated are messages, annotations, assertions, and constants of modules and classes.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "mutants.json"
FOLDERS = ("core", "agent", "storage", "coordination", "restore", "snapshot")
MODULES = ("checkpointer/loop.py",)
SEED = 20261129
COUNT = 500
SWITCH = "_mutant_here"
"""Function that the copy of the product under trial calls at each mutant's place."""

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
Place = ast.expr | ast.stmt
OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One small fault, and what became of it."""

    module: str
    """Path of the file, from the root of the checkout."""
    function: str
    line: str
    """Text of the line on which it is."""
    operator: str
    becomes: str
    """Code of the changed expression; empty for a statement that is dropped."""
    nth: int = 0
    """The number of equal ones before it in the function."""
    status: str = "not run"
    """`killed`, `survived`, `timeout`: with it a test did not end, `unreached`: no test that was
    chosen runs its line, `gone`: the source has no such line now."""
    by: str = ""
    """The test that killed it, or that did not end."""
    tests: int = 0
    """The number of tests that were tried."""

    @property
    def place(self) -> Mutant:
        """The mutant without its fate."""
        return replace(self, status="not run", by="", tests=0)


@dataclass(frozen=True)
class Change:
    """A mutant in a syntax tree: `node` is replaced, or dropped."""

    mutant: Mutant
    node: Place
    replacement: ast.expr | None


# --- all mutants of a source ---------------------------------------------------------------------


def changes(module: str, source: str, tree: ast.Module) -> list[Change]:
    """All mutants of a file, in the order of the source."""
    lines = source.splitlines()
    found: list[Change] = []
    equal: dict[Mutant, int] = defaultdict(int)
    for function, node in _mutable(tree, (), body=False):
        for operator, place, new in _variants(node):
            becomes = ast.unparse(new) if new is not None else ""
            line = lines[place.lineno - 1].strip()
            mutant = Mutant(module, function, line, operator, becomes)
            found.append(Change(replace(mutant, nth=equal[mutant]), place, new))
            equal[mutant] += 1
    return found


def _mutable(node: ast.AST, inside: tuple[str, ...], body: bool) -> Iterator[tuple[str, ast.AST]]:
    """The nodes that may be mutated, each with the qualified name of its function."""
    if body:
        yield ".".join(inside), node
    children: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            inside = (*inside, node.name)
            body = not isinstance(node, ast.ClassDef)
            children = node.body
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.pattern():
            children = ()
        case ast.AnnAssign():
            children = [node.value] if node.value is not None else ()
        case ast.Lambda():
            children = [node.body]
    for child in children:
        yield from _mutable(child, inside, body)


def _variants(node: ast.AST) -> Iterator[tuple[str, Place, ast.expr | None]]:
    """The mutants at a node: an operator, what is replaced, and by what; None: it is dropped."""
    match node:
        case ast.Compare():
            for i, old in enumerate(node.ops):
                for kind in COMPARISONS[type(old)]:
                    ops = [*node.ops[:i], kind(), *node.ops[i + 1 :]]
                    yield "comparison", node, ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", node, ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _joins(node):
            yield "arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(number) | float(number)):
            yield "constant", node, ast.Constant(number + 1)
        case ast.Call():
            yield from _variants_of_call(node)
        case ast.If() | ast.IfExp():
            yield "if", node.test, ast.Constant(True)
            yield "if", node.test, ast.Constant(False)
        case ast.While() if not isinstance(node.test, ast.Constant):
            yield "if", node.test, ast.Constant(False)
        case ast.ExceptHandler(type=ast.expr() as caught):
            yield "exception not caught", caught, ast.Tuple([], ast.Load())
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp() as value):
            yield "return", value, ast.Constant(True)
            yield "return", value, ast.Constant(False)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, ast.Constant(None)
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Delete()
            | ast.Continue()
            | ast.Break()
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
        ):
            yield "statement dropped", node, None


def _variants_of_call(node: ast.Call) -> Iterator[tuple[str, Place, ast.expr | None]]:
    match node.func:
        case ast.Name(id=name) if name in OTHER_FUNCTION:
            function = ast.Name(OTHER_FUNCTION[name], ast.Load())
            yield "min, max", node, ast.Call(function, node.args, node.keywords)
        case ast.Attribute(attr="suppress"):
            yield "exception not caught", node, ast.Call(node.func, [], [])
    match node.args:
        case [first, second, *rest] if not any(
            isinstance(argument, ast.Starred) for argument in node.args
        ) and ast.dump(first) != ast.dump(second):
            swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
            yield "arguments swapped", node, swapped


def _joins(node: ast.BinOp) -> bool:
    """True if an operator makes a text or a list, as far as can be seen."""
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


# --- the product with all mutants of the set, of which a switch turns one on ---------------------


class _Insert(ast.NodeTransformer):
    """Puts mutants into a tree, each behind a call of the switch with its number."""

    def __init__(self, chosen: dict[int, Change]) -> None:
        self._at: dict[int, list[tuple[int, ast.expr | None]]] = defaultdict(list)
        for number, change in chosen.items():
            # The inserted code has no other mutant inside.
            self._at[id(change.node)].append((number, copy.deepcopy(change.replacement)))

    def visit(self, node: ast.AST) -> ast.AST:
        mutants = self._at.get(id(node), [])
        new: Any = self.generic_visit(node)
        for number, replacement in mutants:
            here = ast.Call(ast.Name(SWITCH, ast.Load()), [ast.Constant(number)], [])
            if replacement is None:
                new = ast.If(here, [ast.Pass()], [new])
            else:
                new = ast.IfExp(here, replacement, new)
        return new  # type: ignore[no-any-return]


def with_mutants(tree: ast.Module, chosen: dict[int, Change], switch_module: str) -> str:
    """The source of a module that has its mutants: `switch_module` has the switch, a function of a
    mutant's number that is true if it is the one on trial."""
    _Insert(chosen).visit(tree)  # in place
    after_head = next(
        number
        for number, statement in enumerate(tree.body)
        if not isinstance(statement, ast.Expr)
        and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
    )
    tree.body.insert(after_head, ast.ImportFrom(switch_module, [ast.alias(SWITCH)], 0))
    return ast.unparse(ast.fix_missing_locations(tree))


# --- the set and its record ----------------------------------------------------------------------


def mutated_files() -> list[Path]:
    """The files that have mutants, from the root of the checkout."""
    package = ROOT / "common" / "tierckpt"
    paths = [path for folder in FOLDERS for path in (package / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in [*paths, *map(package.joinpath, MODULES)])


def choose(count: int = COUNT, seed: int = SEED) -> list[Mutant]:
    """A random set from the present source, in random order."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in mutated_files():
        source = (ROOT / path).read_text()
        for change in changes(str(path), source, ast.parse(source)):
            lines[str(path), change.node.lineno].append(change.mutant)
    chance = random.Random(seed)
    return [chance.choice(lines[line]) for line in chance.sample(sorted(lines), count)]


def located(mutants: Sequence[Mutant]) -> dict[str, tuple[ast.Module, dict[int, Change]]]:
    """The mutants of a set that the present source has: for each module its tree, and the mutants
    in it by their numbers. One whose function has moved to another module is found there."""
    trees: dict[str, ast.Module] = {}
    at: dict[Mutant, tuple[str, Change]] = {}
    elsewhere: dict[Mutant, list[tuple[str, Change]]] = defaultdict(list)
    for path in mutated_files():
        source = (ROOT / path).read_text()
        trees[str(path)] = ast.parse(source)
        for change in changes(str(path), source, trees[str(path)]):
            at[change.mutant] = str(path), change
            elsewhere[replace(change.mutant, module="")].append((str(path), change))
    found: dict[str, tuple[ast.Module, dict[int, Change]]] = {}
    for number, mutant in enumerate(mutants):
        moved = elsewhere.get(replace(mutant.place, module=""), [])
        place = at.get(mutant.place) or (moved[0] if len(moved) == 1 else None)
        if place is not None:
            module, change = place
            found.setdefault(module, (trees[module], {}))[1][number] = change
    return found


def read_record() -> list[Mutant]:
    """The recorded mutants, in their random order."""
    return [Mutant(**each) for each in json.loads(RECORD.read_text())["mutants"]]


def write_record(mutants: Sequence[Mutant]) -> None:
    """Write them, one to a line, with the sums."""
    sums = Counter(mutant.status for mutant in mutants)
    rows = ",\n".join(json.dumps(asdict(mutant)) for mutant in mutants)
    text = f'{{"seed": {SEED}, "sums": {json.dumps(sums)}, "mutants": [\n{rows}\n]}}\n'
    new = RECORD.with_suffix(".new")
    new.write_text(text)
    new.replace(RECORD)
