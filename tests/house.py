"""How large the package is: `python tests/house.py` prints a line for each room, and the figures that CONTRIBUTING watches.

Counted without annotations and docstrings, so that nothing is gained by leaving them out. A branch within an expression is a conditional
expression, a condition of a comprehension, or an `and` or `or` in place of an `if`.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from test_layers import CORE, MODULES, package_of

Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class _Bare(ast.NodeTransformer):
    """Takes annotations and docstrings out."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Pass()
        return node

    def visit(self, node: ast.AST) -> ast.AST:
        visited = super().visit(node)
        if isinstance(node, Documented):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                node.returns = None
        return visited


def size(path: Path) -> Counter[str]:
    """What a module has of each: nodes, statements, branches within expressions."""
    nodes = list(ast.walk(_Bare().visit(ast.parse(path.read_text(encoding="utf-8")))))
    branches = sum(isinstance(node, ast.IfExp) + len(getattr(node, "ifs", ())) for node in nodes)
    branches += sum(isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp) for node in nodes)
    return Counter(nodes=len(nodes) - 1, statements=sum(isinstance(node, ast.stmt) for node in nodes), branches=branches, modules=1)


if __name__ == "__main__":
    rooms: dict[str, Counter[str]] = {}
    for name, path in MODULES.items():
        rooms.setdefault(package_of(name) if "." in name else "(top level)", Counter()).update(size(path))
    for room, found in sorted(rooms.items(), key=lambda item: -item[1]["nodes"]):
        print(f"{room:14} {found['nodes']:7,} nodes {found['statements']:6,} statements {found['modules']:4} modules")
    whole = sum(rooms.values(), Counter())
    core = sum((size(path) for name, path in MODULES.items() if package_of(name) in CORE), Counter())
    print(f"{whole['nodes']:,} nodes, {whole['statements']:,} statements; of the core {core['nodes']:,} and {core['statements']:,}")
    per_statement, inside = whole["nodes"] / whole["statements"], 100 * whole["branches"] / whole["statements"]
    print(f"{per_statement:.1f} nodes a statement, {inside:.1f} branches within expressions per 100 statements")
