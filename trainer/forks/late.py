"""Settings that a program makes too late for what its fork has imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "FBGEMM_"),
)
# What is read later than at import, and anew by each process.
_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_EXTENSIONS_DIR", "TORCH_HOME")


def read_at_import(name: str) -> bool:
    """Is it the kind of environment variable that torch and what lies below read once, when imported?"""
    return name.startswith(_PREFIXES) and not name.startswith(_LATER)


def set_too_late(program: Path, environment: Mapping[str, str]) -> str | None:
    """The first such variable that a program changes before it imports torch, as far as its text says so.

    A program that can't be read changes none: Python will say why.
    """
    try:
        tree = ast.parse(program.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.stmt | ast.expr)]
    until = min((n.lineno for n in nodes if _imports_torch(n)), default=float("inf"))
    changed = sorted(
        (node.lineno, name)
        for node in nodes
        if node.lineno < until
        for name, value, default in _changes(node)
        if read_at_import(name) and value != environment.get(name)
        if not (default and name in environment)
    )
    return changed[0][1] if changed else None


def _imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(a.name.split(".")[0] == "torch" for a in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"


def _changes(node: ast.AST) -> Iterator[tuple[str, object, bool]]:
    """(name, value as far as it is a constant, only as a default) of what one node sets in os.environ."""
    if isinstance(node, ast.Assign | ast.Delete):
        value = _constant(node.value) if isinstance(node, ast.Assign) else None
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield str(_constant(target.slice)), value, False
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    method, arguments = node.func.attr, node.args
    if method == "putenv" or (_is_environ(node.func.value) and method in {"setdefault", "pop"}):
        if arguments:
            value = _constant(arguments[1]) if len(arguments) > 1 and method != "pop" else None
            yield str(_constant(arguments[0])), value, method == "setdefault"
    elif _is_environ(node.func.value) and method == "update":
        for keyword in node.keywords:
            yield str(keyword.arg), _constant(keyword.value), False
        for one in arguments:
            if isinstance(one, ast.Dict):
                for key, given in zip(one.keys, one.values, strict=True):
                    yield str(_constant(key)), _constant(given), False


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", None) == "environ" or getattr(node, "id", None) == "environ"


def _constant(node: ast.AST | None) -> object:
    """Its value; an object equal to nothing where only running it would tell."""
    return node.value if isinstance(node, ast.Constant) else object()
