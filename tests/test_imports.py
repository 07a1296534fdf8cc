"""The architecture in imports: they run downward only, kernels know torch and triton alone, none touches a GPU."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import turbo_rcm_patch

PACKAGE = Path(turbo_rcm_patch.__file__).parent
# A module may import from its own layer and those before it.
LAYERS = [
    *(
        "wording",
        "versions",
        "tables",
        "tiers",
        "keep_list",
        "latents",
        "config",
        "shapes",
        "coefficients",
        "plain",
        "kernels",
        "modules",
    ),
    *("recipes", "solvers", "scheduler", "checkpoints", "patching", "memory", "embedded", "bench", "cli"),
]
DIFFUSERS_ALLOWED = {"scheduler", "patching", "memory", "embedded", "bench", "cli"}


def imported_modules(path):
    """Absolute names of everything a file imports."""
    here = ["turbo_rcm_patch", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(here[: -node.level])
            yield from (f"{base}.{node.module or alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def layer_of(module):
    return module.split(".")[1] if module.startswith("turbo_rcm_patch.") else None


def test_imports_run_downward():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if layer == "__init__":
            continue
        for module in imported_modules(path):
            imported = layer_of(module)
            if imported in LAYERS and LAYERS.index(imported) > LAYERS.index(layer):
                wrong.append(f"{path.name} imports {module}")
            if module.split(".")[0] == "diffusers" and layer not in DIFFUSERS_ALLOWED:
                wrong.append(f"{path.name} imports diffusers")
            if layer in ("shapes", "kernels") and module.split(".")[0] in ("diffusers", "transformers", "numpy"):
                wrong.append(f"{path.name} imports {module}")
    assert not wrong


def test_the_commands_import_each_other_in_no_circle():
    """Imports within functions count too."""
    names = {path.stem for path in (PACKAGE / "cli").glob("*.py")} - {"__init__", "__main__"}
    imports = {
        name: {
            module.split(".")[2]
            for module in imported_modules(PACKAGE / "cli" / f"{name}.py")
            if module.startswith("turbo_rcm_patch.cli.")
        }
        for name in names
    }
    list(TopologicalSorter(imports).static_order())  # raises CycleError


def test_importing_the_package_alone_is_light():
    code = "import sys, turbo_rcm_patch; assert not {'torch', 'diffusers', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
