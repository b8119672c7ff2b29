"""Expand the `repeat` nodes of a traced graph: each becomes a copy of the first traced call, with its own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autoptd.passes.graph import TRACED, op_name
from autoptd.passes.trace.repeats import ENTER, LEAVE, REPEAT, Capture, is_size

_SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def expand_repeats(graph: fx.Graph, captures: Mapping[int, Capture], paths: Mapping[int, list[str]]) -> None:
    """Replace every `repeat` by a copy of the call it repeats, and drop the marks. Regions must be inlined already."""
    entered: dict[int, fx.Node] = {}
    bodies: dict[int, _CallBody] = {}
    turn = {key: iter(names) for key, names in paths.items()}
    _restore_users(graph)
    for node in list(graph.nodes):
        if node.target is ENTER:
            entered[node.args[0]] = node  # type: ignore[index]
        elif node.target is REPEAT:
            key: Any = node.args[0]
            if key not in bodies:
                bodies[key] = _CallBody(entered[key], captures[key].path)
            bodies[key].copy_to(graph, node, next(turn[key]))
    for node in reversed(list(graph.nodes)):
        if node.target in (ENTER, LEAVE):
            graph.erase_node(node)


def _restore_users(graph: fx.Graph) -> None:
    """Restore missing entries of `users`: torch (2.13.0, `torch._export.utils.node_inline_`) drops marks from the users
    of a node that it takes for the only result of a no-grad region."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


class _CallBody:
    """The nodes between two marks."""

    def __init__(self, enter: fx.Node, path: str) -> None:
        self.enter, self.path = enter, path.removeprefix(TRACED)
        self.given: Any = enter.args[1]
        self.nodes: list[fx.Node] = []
        node = enter.next
        while not (node.target is LEAVE and node.args[0] == enter.args[0]):
            dead = not node.users and op_name(node) in _SKIPPED
            if not (dead or is_size(node) or node.target in (ENTER, LEAVE)):
                self.nodes.append(node)
            node = node.next
        self.made: Any = node.args[1]
        self.stack = _stack(enter)
        self.trace = enter.meta.get("stack_trace") or ""

    def copy_to(self, graph: fx.Graph, repeat: fx.Node, path: str) -> None:
        """Replace `repeat`, a call of the module at `path`, by a copy of these nodes."""
        env: dict[fx.Node, fx.Node] = dict(zip(self.given, repeat.args[1], strict=True))  # type: ignore[arg-type]
        stacks: dict[tuple[str, ...], dict[str, tuple[str, Any]]] = {}
        path, stack, trace = path.removeprefix(TRACED), _stack(repeat), repeat.meta.get("stack_trace") or ""
        with graph.inserting_before(repeat):
            for node in self.nodes:
                env[node] = new = graph.node_copy(node, lambda n: env.get(n, n))
                if "nn_module_stack" in node.meta:
                    below = _stack(node)
                    key = tuple(below)
                    if key not in stacks:
                        stacks[key] = {**stack, **_below(below, self.stack, self.path, path)}
                    new.meta["nn_module_stack"] = stacks[key]
                if node.meta.get("stack_trace"):
                    new.meta["stack_trace"] = trace + node.meta["stack_trace"].removeprefix(self.trace)
        for user in list(repeat.users):
            user.replace_all_uses_with(env[self.made[user.args[1]]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(repeat)


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return found


def _below(
    stack: Mapping[str, tuple[str, Any]], above: Mapping[str, tuple[str, Any]], old: str, new: str
) -> dict[str, tuple[str, Any]]:
    """Return the entries of a module stack that are not in `above`, with paths inside `old` moved to `new`."""

    def renamed(path: str) -> str:
        return new + path[len(old) :] if path == old or path.startswith(old + ".") else path

    return {
        key.replace(path, renamed(path), 1): (renamed(path), kind)
        for key, (path, kind) in stack.items()
        if key not in above
    }
