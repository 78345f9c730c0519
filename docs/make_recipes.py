"""Write docs/recipes.md from the recipes in tests/recipes."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "tests" / "recipes"
_HEAD = """# Recipes beside plain loops

<!-- Written by docs/make_recipes.py -->

Each recipe trains a small model twice: with nbtrain, and by a loop of plain PyTorch. Both must end with the same weights, bit for bit
(`torch.equal`); the tests of nbtrain run them all. The code is in `tests/recipes`, a function for each recipe, to be copied. A linked
recipe has a how-to page.

A step is *automatic* if it returns the loss, and *manual* if it calls `optimizer.step()` itself: see
[Manual optimization](../nbs/howto/manual_optimization.ipynb).
The lines are those of code in which the two differ; what both use, such as the function of the loss, is not counted.
"""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_NAMES = {name.lower(): name for name in ("AdamW", "CTC", "DQN", "GAN", "Muon", "PINN", "PPO", "REINFORCE", "SAM", "VAE")}
_PAGES = {  # the how-to page of a recipe, by the name of its test
    "active_learning": "active_learning",
    "curriculum": "growing_data",
    "k_fold": "cross_validation",
    "truncated_backpropagation_through_time": "truncated_bptt",
    "ctc": "ctc",
    "contrastive_learning": "self_supervised",
    "queue_and_momentum_encoder": "self_supervised",
    "distillation": "distillation",
    "diffusion_with_averaged_weights": "diffusion",
    "full_batch_graph_network": "graph_network",
    "ppo": "reinforcement_learning",
    "dqn": "reinforcement_learning",
    "muon_and_adamw": "several_optimizers",
    "gan_with_n_critic": "manual_optimization",
    "sam": "manual_after_automatic",
    "pinn": "physics_informed",
    "manual_after_automatic": "manual_after_automatic",
    "growing_batch_size": "growing_data",
    "learned_task_weights": "learned_task_weights",
    "meta_learning": "meta_learning",
}
Definition = ast.FunctionDef | ast.ClassDef


def _definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    return {item.name: item for item in body if isinstance(item, Definition)}


def _code_lines(source: str, node: ast.AST) -> set[int]:
    """The numbers of the lines of `node` that have code: no comments, no docstrings."""
    first, last = node.lineno, node.end_lineno or 0  # type: ignore[attr-defined]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {n for token in tokens if token.type not in _NO_CODE for n in range(token.start[0], token.end[0] + 1)}
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str):
            found -= set(range(part.lineno, (part.end_lineno or 0) + 1))
    return {n for n in found if first <= n <= last}


def _used(node: ast.AST, known: Mapping[str, Definition]) -> set[str]:
    """The definitions in `known` that the code of `node` needs, directly or by others."""
    names, found = [node], set[str]()
    for part in names:  # which grows meanwhile
        for item in ast.walk(part):
            if isinstance(item, ast.Name) and item.id in known and item.id not in found:
                found.add(item.id)
                names.append(known[item.id])
    return found


def _row(source: str, test: ast.FunctionDef, shared: Mapping[str, Definition]) -> str:
    known = {**shared, **_definitions(test.body)}
    call = next(node for node in ast.walk(test) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "equal")
    ways = call.args[:2]
    used = [_used(way, known) for way in ways]
    lines = []
    for way, own, other in zip(ways, used, reversed(used)):
        nodes = [known[name] for name in own - other] + ([way] if isinstance(way, ast.Lambda) else [])
        lines.append(len(set[int]().union(*(_code_lines(source, node) for node in nodes))))
    manual = any("automatic_optimization = False" in ast.unparse(known[name]) for name in used[0])
    name = test.name.removeprefix("test_")
    title = " ".join(_NAMES.get(word, word) for word in name.split("_"))
    title = title[0].upper() + title[1:]
    title = f"[{title}](../nbs/howto/{_PAGES[name]}.ipynb)" if name in _PAGES else title
    what = " ".join((ast.get_docstring(test) or "").split())
    return f"| {title} | {what} | {'manual' if manual else 'automatic'} | {lines[0]} | {lines[1]} |"


def rows() -> Iterator[str]:
    """The sections of the page: a table for each file of recipes."""
    for path in sorted(RECIPES.glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        tests = [item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")]
        yield f"\n## {path.stem.removeprefix('test_').replace('_', ' ').capitalize()}\n\n{ast.get_docstring(tree)}\n"
        yield "| recipe | what is special | step | lines, nbtrain | lines, plain loop |\n|---|---|---|---|---|"
        yield from (_row(source, test, _definitions(tree.body)) for test in tests)


def pages() -> dict[Path, str]:
    """The page as it should be."""
    return {PAGE: "\n".join([_HEAD.rstrip("\n"), *rows()]) + "\n"}
