"""Tests written as asserts, taken apart: the calls of the program, made inside, and what must hold of their answers."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from coterie.errors import ConfigError
from coterie.grading.evalplus import evalplus_same
from coterie.grading.expressions import is_known, tree_of, work_out
from coterie.grading.report import PASSED, Grade, Mark

BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold of answers: an expression in which ``_0``, ``_1``... are answers, or two values compared."""

    expression: ast.expr
    evalplus_atol: float | None = None
    """With it the expression is a pair (answer, expected), compared as EvalPlus compares."""


@dataclass(frozen=True, slots=True)
class Split:
    """A test in two parts: ``calls`` (sources) and ``setup`` go inside, ``checks`` (call indices, check) stay here."""

    calls: tuple[str, ...]
    setup: str
    checks: tuple[tuple[tuple[int, ...], Check], ...]


@dataclass(frozen=True, slots=True)
class Flat:
    """The statements of a test by their kind, ``check(entry)`` written out."""

    imports: tuple[ast.stmt, ...]
    setup: tuple[ast.stmt, ...]
    checks: tuple[Check, ...]


def parse(code: str) -> ast.Module:
    """Return the tree of a test; ``ConfigError`` when it is no Python."""
    try:
        return tree_of(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the test {code[:80]!r} is no Python: {error}; expected statements that assert") from error


@lru_cache(maxsize=512)
def split(code: str, entry: str) -> Split | None:
    """Return a test taken apart, ``None`` where it has to run as a whole (loops, randomness, its own functions).

    Only calls whose arguments stand written in the test are taken out. Expected values stay here; statements that set
    something up go inside only where a call uses a name they bind and the program has the names they use.
    """
    flat = flatten(parse(code))
    if flat is None:
        return None
    bound = {name for statement in flat.setup for name in names_in(statement, ast.Store)}
    imported = {alias for statement in flat.imports for alias in imported_names(statement)}
    calls: list[ast.expr] = []
    checks: list[tuple[tuple[int, ...], Check]] = []
    for check in flat.checks:
        first = len(calls)
        hollow = TakeCalls(calls, (imported | BUILTINS) - {entry}).visit(check.expression)
        here = tuple(range(first, len(calls)))
        if not is_known(hollow, [f"_{number}" for number in here]):
            return None
        checks.append((here, Check(hollow, check.evalplus_atol)))
    if not calls:
        return None
    used = {name for call in calls for name in names_in(call, ast.Load)}
    setup = [*flat.imports, *flat.setup] if used & bound else list(flat.imports) if used & imported else []
    if used & bound and not any(strange_names(statement, bound | imported) for statement in flat.setup):
        return None  # the setup needs nothing of the program, so it need not go inside
    return Split(tuple(ast.unparse(call) for call in calls), "\n".join(map(ast.unparse, setup)), tuple(checks))


def flatten(tree: ast.Module) -> Flat | None:
    """Return the statements of a test by kind; ``None`` when one is of no kind known here."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    statements: list[ast.stmt] = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name="check" | "assertion" | "is_floats"):
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[ast.Name(id=name)], keywords=[])):
                if "check" not in functions or len(functions["check"].args.args) != 1:
                    return None
                rename = Rename({functions["check"].args.args[0].arg: ast.Name(id=name, ctx=ast.Load())})
                statements += [rename.visit(statement) for statement in functions["check"].body]
            case _:
                statements.append(node)
    return sort_statements(statements, functions)


def sort_statements(statements: list[ast.stmt], functions: Mapping[str, ast.FunctionDef]) -> Flat | None:
    """Return statements by their kind; ``None`` when one is of no kind known here.

    A name stands for a literal only where no other statement mentions it, which could change what it stands for.
    """
    others = [node for node in statements if not isinstance(node, ast.Assert | ast.For)]
    mentions = Counter(name for node in others for name in {*names_in(node, ast.Load), *names_in(node, ast.Store)})
    literals: dict[str, ast.expr] = {}
    imports: list[ast.stmt] = []
    setup: list[ast.stmt] = []
    checks: list[Check] = []
    for node in statements:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case ast.Import() | ast.ImportFrom():
                imports.append(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_known(value) and mentions[name] == 1:
                literals[name] = value
            case ast.Assert():
                checks.append(Check(Rename(literals).visit(node.test)))
            case ast.Assign() | ast.Expr(value=ast.Call()) if not checks:
                setup.append(node)
            case ast.For() if "assertion" in functions:
                cases = evalplus_cases(node, literals)
                if cases is None:
                    return None
                checks += cases
            case _:
                return None
    return Flat(tuple(imports), tuple(setup), tuple(checks))


def evalplus_cases(loop: ast.For, literals: Mapping[str, ast.expr]) -> list[Check] | None:
    """Return the checks of the loop that EvalPlus writes over ``inputs`` and ``results``; ``None`` for another loop."""
    if ast.unparse(loop.target) != "(i, (inp, exp))" or ast.unparse(loop.iter) != "enumerate(zip(inputs, results))":
        return None
    inputs, results = literals.get("inputs"), literals.get("results")
    match loop.body:
        case [
            ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="assertion"),
                    args=[
                        ast.Call(
                            func=ast.Name() as function, args=[ast.Starred(value=ast.Name(id="inp"))], keywords=[]
                        ),
                        ast.Name(id="exp"),
                        ast.Constant(value=int() | float() as atol),
                    ],
                )
            )
        ] if isinstance(inputs, ast.List) and isinstance(results, ast.List):
            checks = []
            for case, expected in zip(inputs.elts, results.elts, strict=False):  # as the published loop does
                if not isinstance(case, ast.List | ast.Tuple):
                    return None
                call = ast.Call(func=function, args=case.elts, keywords=[])
                checks.append(Check(ast.Tuple(elts=[call, expected], ctx=ast.Load()), float(atol)))
            return checks
    return None


class Rename(ast.NodeTransformer):
    """Puts expressions where names are read."""

    def __init__(self, meanings: Mapping[str, ast.expr]) -> None:
        self.meanings = meanings

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what the name stands for."""
        return self.meanings.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class TakeCalls(ast.NodeTransformer):
    """Puts ``_0``, ``_1``... in the place of the program's calls and keeps these in ``calls``."""

    def __init__(self, calls: list[ast.expr], others: set[str]) -> None:
        self.calls = calls
        self.others = others

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return the name that stands for an outermost call of the program, another call with its parts visited."""
        is_ours = isinstance(node.func, ast.Name) and node.func.id not in self.others
        if is_ours:
            self.calls.append(node)
            return ast.Name(id=f"_{len(self.calls) - 1}", ctx=ast.Load())
        self.generic_visit(node)
        return node


def names_in(tree: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    """Yield the names that a tree reads or writes."""
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context))


def imported_names(statement: ast.stmt) -> list[str]:
    """Return the names that an import binds."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return []
    return [alias.asname or alias.name.split(".")[0] for alias in statement.names]


def strange_names(statement: ast.stmt, known: set[str]) -> set[str]:
    """Return the names a statement reads that neither Python nor the test binds: those of the program."""
    return set(names_in(statement, ast.Load)) - known - BUILTINS


def holds(check: Check, answers: Mapping[str, object]) -> Grade:
    """Return the grade of one check of answers."""
    try:
        value = work_out(check.expression, answers)
        atol = check.evalplus_atol
        passed = bool(value) if atol is None else evalplus_same(value[0], value[1], atol)
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        return Grade(Mark.WRONG, f"the answer does not fit the test: {type(error).__name__}: {error}"[:200])
    return PASSED if passed else Grade(Mark.WRONG, "an answer that the test does not accept")
