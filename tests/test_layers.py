"""Imports point one way: the order of modules that docs/design.md lists is the order in which they may be read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}
LIGHT_LAYERS = ("ground", "problems", "sandbox", "grading", "recipe", "rules", "play", "records")
LIGHT_ENTRIES = (
    *(
        "api",
        "cli",
        "cli_options",
        "cli_data",
        "cli_look",
        "cli_play",
        "cli_sandbox",
        "cli_study",
        "cli_team",
        "cli_train",
    ),
    "display",
)


def layers() -> dict[str, list[str]]:
    """Return layer name -> its modules in order, from the page's block of layers."""
    block = re.search(r"<!-- layers -->\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert block, "docs/design.md has no block of layers"
    found: dict[str, list[str]] = {}
    name = ""
    for line in block[1].splitlines():
        head, modules = line[:10].strip(), line[10:].split()
        name = head or name
        found.setdefault(name, []).extend(modules)
    return found


def order() -> list[str]:
    return [module for modules in layers().values() for module in modules]


def module_name(path: Path) -> str:
    """Return ``envs.maze`` for src/coterie/envs/maze.py, and ``envs`` for the package itself."""
    parts = path.relative_to(SRC / "coterie").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((SRC / "coterie").rglob("*.py"))}


def imported(path: Path, known: set[str]) -> list[tuple[int, str]]:
    """Return (line, module) of every import, wherever it stands; our own modules without the package's name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are written in full"
            module = node.module or ""
            parts = [f"{module}.{alias.name}" for alias in node.names]
            inner = [part for part in parts if part.removeprefix("coterie.") in known]
            found += [(node.lineno, name) for name in inner or [module]]
    return [(line, name.removeprefix("coterie.")) for line, name in found]


def wrong_imports(path: Path, name: str, ranks: dict[str, int]) -> list[str]:
    """Return the imports of a module that point to a later one, or to itself."""
    return [
        f"{name}:{line} imports {other}"
        for line, other in imported(path, set(ranks))
        if other in ranks and ranks[other] >= ranks[name]
    ]


def packages_without_code() -> set[str]:
    """Return the packages that are a docstring and nothing else."""
    bare = set()
    for name, path in source_modules().items():
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if path.name == "__init__.py" and len(body) == 1:
            bare.add(name)
    return bare


def test_every_module_has_one_place_in_the_order() -> None:
    listed = order()
    assert {"envs", "models"} <= packages_without_code()
    assert sorted(listed) == sorted(set(source_modules()) - {""} - packages_without_code())
    assert len(listed) == len(set(listed))


def test_no_module_imports_a_later_one() -> None:
    ranks = {name: rank for rank, name in enumerate(order())}
    wrong = [
        text for name, path in source_modules().items() if name in ranks for text in wrong_imports(path, name, ranks)
    ]
    assert wrong == []


def test_the_package_itself_imports_only_what_it_exports() -> None:
    known = set(source_modules())
    assert {name for _, name in imported(source_modules()[""], known)} == {"api", "env", "machine", "types"}


def test_a_wrong_import_would_be_found_also_inside_a_function(tmp_path: Path) -> None:
    path = tmp_path / "low.py"
    path.write_text("from coterie import high\n\ndef f() -> None:\n    from coterie.high import thing\n")
    assert wrong_imports(path, "low", {"low": 0, "high": 1}) == ["low:1 imports high", "low:4 imports high"]


def test_the_light_layers_name_no_heavy_library() -> None:
    """Modules of records, rules and play are numbers and text; tensors begin with the models."""
    known = source_modules()
    light = [module for layer in LIGHT_LAYERS for module in layers()[layer]]
    lazy = {("trackers", "torch.utils.tensorboard")}  # inside the function that opens that tracker
    heavy = [
        (name, other)
        for name in light
        for _, other in imported(known[name], set(known))
        if other.split(".")[0] in HEAVY and (name, other) not in lazy
    ]
    assert heavy == []


def test_importing_the_light_layers_and_the_command_line_loads_no_torch() -> None:
    names = [f"coterie.{name}" for layer in LIGHT_LAYERS for name in layers()[layer]]
    names += [f"coterie.{name}" for name in LIGHT_ENTRIES]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"sys.stdout.write(','.join(sorted(set({sorted(HEAVY)!r}) & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
