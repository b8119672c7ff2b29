"""Splits a function into its runs of straight-line statements, each as a function of its own that can be compiled.

def forward(self, x, counts):                   def part_0(self, x):
    x = F.embedding(x, self.wte)                    x = F.embedding(x, self.wte)
    for block in self.blocks:                       return (x,)
        x = block(x)                      ──►   def forward(self, x, counts):
    x = F.layer_norm(x, self.norm)                  (x,) = self._part_0(x)
    return F.linear(x, self.head).sum()             for block in self.blocks: …
                                                    return self._part_1(x)

Writes the parts that a block calls into its forward, so that graphs do not end between them.

def forward(self, x):                           def forward(self, x):
    attention, mlp = self._parts          ──►       attention, mlp = self._parts
    x = attention(x)                                _0_self, _0_x = (attention, x)
    …                                               _0_out = F.linear(_0_x, _0_self.attn.out.weight)
                                                    x = _0_out
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby

from torch import Tensor

PART = "_part_"
_SIMPLE = (ast.Assign, ast.Return)
# a graph is for tensors: sizes and devices are read outside and enter it as values
_ON_HOST = ("size", "item", "tolist", "numel", "dim", "backward")
_AXES = ("tp", "cp", "ep", "dp")
_UNFIT = (ast.Lambda, ast.JoinedStr, ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.NamedExpr, ast.Yield, ast.Await)


def split(function: ast.FunctionDef, compiles: Callable[[ast.Call], bool]) -> list[ast.FunctionDef]:
    """Move each run of statements that can be compiled into a function; return those, and change `function` to call
    them as methods `_part_0`, …

    compiles: whether a call of a function of F, torch or ops can be. Methods of tensors can. A statement that does
    anything else, such as calling a block, or is more than an assignment or `return`, stays where it is.
    """
    local = {arg.arg for arg in function.args.args} | set(_names(function.body, ast.Store))
    within = set[str]()  # variables of parts alone
    parts: list[ast.FunctionDef] = []
    body: list[ast.stmt] = []
    runs = [(fits, list(run)) for fits, run in groupby(function.body, _Fitting(compiles))]
    for index, (fits, run) in enumerate(runs):
        if not fits or not any(isinstance(node, ast.Call) for statement in run for node in ast.walk(statement)):
            within -= set(_names(run, ast.Store))
            body += _without_deletion(run, within)
            continue
        later = set(_names([s for _, others in runs[index + 1 :] for s in others], ast.Load))
        given = [name for name in _read_first(run) if name in local and name != "self"]
        gone, run = _deleted(run), [s for s in run if not isinstance(s, ast.Delete)]
        made = dict.fromkeys(_names(run, ast.Store))
        kept = [name for name in made if name in later and name not in gone]
        within = (within | set(made)) - set(kept)
        part = _function(f"part_{len(parts)}", given, run, kept)
        call = ast.Call(ast.Attribute(_load("self"), PART + str(len(parts)), ast.Load()), [_load(n) for n in given], [])
        parts.append(part)
        if isinstance(run[-1], ast.Return):
            body.append(ast.Return(call))
            continue
        body.append(_assigned(kept, call))
        if outer := [name for name in given if name in gone | within]:
            body.append(ast.Delete([ast.Name(name, ast.Del()) for name in outer]))
    function.body = body
    return parts


def inline(function: ast.FunctionDef, called: Mapping[str, ast.FunctionDef]) -> None:
    """Replace each statement of `function` that calls a variable of `called` by the body of that method."""
    body: list[ast.stmt] = []
    for statement in function.body:
        call = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(call, ast.Call) and _called(call) in called:
            number = list(called).index(_called(call))
            body += _inlined(statement.targets, call, copy.deepcopy(called[_called(call)]), f"_{number}_")
        else:
            body.append(statement)
    function.body = body


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _inlined(targets: list[ast.expr], call: ast.Call, method: ast.FunctionDef, prefix: str) -> Iterator[ast.stmt]:
    """Yield the statements of a method, the names of whose local variables get a prefix."""
    rename = _Rename(prefix, method)
    given: list[ast.expr] = [ast.Name(rename.of(arg.arg), ast.Store()) for arg in method.args.args]
    yield ast.Assign([ast.Tuple(given, ast.Store())], ast.Tuple([call.func, *call.args], ast.Load()))
    for statement in map(rename.visit, method.body):
        if isinstance(statement, ast.Return):
            assert statement.value is not None
            yield ast.Assign(targets, statement.value)
        else:
            yield statement


class _Rename(ast.NodeTransformer):
    """Puts a prefix before the names of all local variables of a function."""

    def __init__(self, prefix: str, function: ast.FunctionDef) -> None:
        nodes = list(ast.walk(function))
        self._prefix, self._names = prefix, set(_names(function.body, ast.Store))
        self._names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        self._names |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}

    def of(self, name: str) -> str:
        return self._prefix + name if name in self._names else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self.of(node.id), node.ctx), node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(self.of(node.arg), node.annotation), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self.of(node.name)
        self.generic_visit(node)
        return node


def _fits(statement: ast.stmt, compiles: Callable[[ast.Call], bool]) -> bool:
    if not isinstance(statement, _SIMPLE) or any(isinstance(node, _UNFIT) for node in ast.walk(statement)):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    sizes = any(isinstance(node, ast.Attribute) and node.attr in ("shape", "device") for node in ast.walk(statement))
    return not sizes and all(_can(call, compiles) for call in calls)


def _can(call: ast.Call, compiles: Callable[[ast.Call], bool]) -> bool:
    called = call.func
    if not isinstance(called, ast.Attribute):
        return False
    if isinstance(called.value, ast.Name) and called.value.id in ("F", "torch", "ops"):
        return compiles(call)
    if isinstance(called.value, ast.Name) and called.value.id in _AXES:  # some methods are called as those of tensors
        return False
    return called.attr not in _ON_HOST and callable(getattr(Tensor, called.attr, None))


class _Fitting:
    """Tells which statements a graph may have; a `del` belongs to the statement before it."""

    def __init__(self, compiles: Callable[[ast.Call], bool]) -> None:
        self._compiles, self._before = compiles, False

    def __call__(self, statement: ast.stmt) -> bool:
        if not isinstance(statement, ast.Delete):
            self._before = _fits(statement, self._compiles)
        return self._before


def _without_deletion(run: Sequence[ast.stmt], names: Collection[str]) -> Iterator[ast.stmt]:
    """Yield statements but for the deletion of these names."""
    for statement in run:
        if not isinstance(statement, ast.Delete):
            yield statement
        elif targets := [t for t in statement.targets if not (isinstance(t, ast.Name) and t.id in names)]:
            yield ast.copy_location(ast.Delete(targets), statement)


def _deleted(run: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a run deletes and does not assign again."""
    found: set[str] = set()
    for statement in run:
        found.update(_names([statement], ast.Del))
        found.difference_update(_names([statement], ast.Store))
    return found


def _names(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, context):
                yield node.id


def _read_first(run: Sequence[ast.stmt]) -> list[str]:
    """Return the names that a run reads before it assigns them, in order."""
    assigned: set[str] = set()
    found: dict[str, None] = {}
    for statement in run:
        found.update(dict.fromkeys(name for name in _names([statement], ast.Load) if name not in assigned))
        assigned.update(_names([statement], ast.Store))
    return list(found)


def _function(name: str, given: Sequence[str], run: Sequence[ast.stmt], kept: Sequence[str]) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg(n) for n in ("self", *given)], None, [], [], None, [])
    body = copy.deepcopy(list(run))
    if not isinstance(run[-1], ast.Return):
        body.append(ast.Return(ast.Tuple([_load(n) for n in kept], ast.Load())))
    made = ast.FunctionDef(name, arguments, body, [])
    return ast.copy_location(made, run[0])


def _assigned(kept: Sequence[str], call: ast.Call) -> ast.stmt:
    if not kept:
        return ast.Expr(call)
    return ast.Assign([ast.Tuple([ast.Name(n, ast.Store()) for n in kept], ast.Store())], call)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
