"""The import layers of ARCHITECTURE.md, enforced: a module imports only from lower layers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. Modules of one layer never import each other; a sub-package counts as one module.
CKPT = [
    {"errors", "forks", "types"},
    {"config"},
    {
        *("command", "digest", "events", "findings", "formats", "layout", "metrics", "trust"),
        *("parallel", "terms", "typed", "values"),
    },
    {"machine", "manifest", "nesting", "united"},
    {"index", "schema"},
    {"belonging", "idmaps", "storage"},
    {"identity", "lineage", "pins", "verify"},
    {"catalog", "retention"},
    {"prefetch", "survey", "written"},
    {"prune"},
    {"branch", "doctor"},
    {"tree"},
    {"canonical"},
    {"blocks", "description", "native", "walk"},
    {"live", "pace", "placing", "ring", "rows", "staging", "stretches"},
    {"attach", "budget", "fence", "packing", "proof", "replicas", "threads"},
    {"chunks", "pump", "snapshot"},
    {
        *("commit", "coordinator", "foreign", "outcomes", "plan", "restore", "rng"),
        *("conversions", "giving", "pieces", "writer"),
    },
    {"row_plan"},
    {"kernel_plan", "keyed_plan", "optimizer_plan"},
    {"receipts", "restore_plan", "shared_memory", "stager"},
    {"finish"},
    {"engine", "equality", "export", "persist", "restorer", "specs", "stand_ins"},
    {"checkpointer", "dcp", "explain", "importing"},
    {"cli"},
]
NO_TORCH = set().union(*CKPT[: next(n for n, layer in enumerate(CKPT) if "tree" in layer)])
OUTSIDE = {
    "publisher": NO_TORCH | {"tree", "restore"},
    "trainer": set().union(*CKPT),
}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports anywhere, type-checking blocks aside."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def modules_of(package: str) -> dict[str, set[Path]]:
    """Module (or sub-package) name -> its files."""
    out: dict[str, set[Path]] = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).parts
        if parts != ("__init__.py",):
            out.setdefault(parts[0].removesuffix(".py"), set()).add(path)
    return out


def used_modules(files: set[Path], package: str) -> set[str]:
    names = set().union(*(imports(f) for f in files))
    return {n.split(".")[1] for n in names if n.startswith(f"{package}.")}


def test_ckpt_modules_import_only_lower_layers() -> None:
    rank = {name: n for n, layer in enumerate(CKPT) for name in layer}
    modules = modules_of("ckpt")
    assert set(modules) == set(rank), "a module is missing in the layer table, or gone"
    for name, files in modules.items():
        used = (used_modules(files, "ckpt") & set(modules)) - {name}
        too_high = {u for u in used if rank[u] >= rank[name]}
        assert not too_high, f"ckpt.{name} imports {too_high} of its own layer or above"


@pytest.mark.parametrize("package", sorted(OUTSIDE))
def test_other_packages_use_only_what_they_may(package: str) -> None:
    for name, files in modules_of(package).items():
        used = used_modules(files, "ckpt") & set(modules_of("ckpt"))
        assert used <= OUTSIDE[package], f"{package}.{name} imports ckpt.{used - OUTSIDE[package]}"
        others = {"publisher", "trainer", "benchmarks", "tests"} - {package}
        tops = {n.split(".")[0] for f in files for n in imports(f)}
        assert not tops & others, f"{package}.{name} imports {tops & others}"


def test_publisher_needs_no_torchrec_and_ckpt_neither() -> None:
    for package in ("ckpt", "publisher"):
        for name, files in modules_of(package).items():
            tops = {n.split(".")[0] for f in files for n in imports(f)}
            assert "torchrec" not in tops, f"{package}.{name} imports torchrec"


def test_listing_needs_no_torch() -> None:
    """One after the other: the first that imports it is told."""
    modules = ["ckpt", *(f"ckpt.{m}" for m in sorted(NO_TORCH)), "ckpt.cli"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", ["ckpt", "publisher", "trainer"])
def test_help_needs_no_torch(command: str) -> None:
    code = (
        f"import sys; from {command}.cli import main\n"
        f"sys.argv = ['{command}', '--help']\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
