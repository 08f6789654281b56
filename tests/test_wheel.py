"""The wheel: what is in it, and that it works where there is no source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "train.steps=1",
    "train.tasks_per_step=2",
    "train.threads=1",
    "imitate.steps=2",
    "imitate.episodes=2",
    "imitate.batch_acts=2",
    "eval.every=0",
    "eval.tasks=2",
    "eval.final_tasks=2",
)
pytestmark = pytest.mark.slow


def done(command: list[str], folder: Path) -> str:
    """Return what a command printed; it must succeed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)], folder)
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True, slots=True)
class Installed:
    """A fresh environment that holds the wheel; everything else it takes from the one that runs the tests."""

    python: Path
    command: Path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("fresh")
    done([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    python = folder / "bin" / "python"
    site = Path(done([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # Lines of a .pth file are put on the path as they are: .pth files in there, such as that of an editable install of
    # this very project, are not read again.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check", "--quiet"]
    done([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)], folder)
    return Installed(python, folder / "bin" / "coterie")


def test_the_wheel_holds_the_package_its_recipes_and_licence_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = [str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")]
    recipes = [f"coterie/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")]
    package = [name for name in names if ".dist-info/" not in name]
    assert sorted(package) == sorted([*source, *recipes, "coterie/py.typed"])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_installed_package_is_the_one_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    code = "import coterie, coterie.shipped as s; print(coterie.__file__); print(*s.shipped_recipes().values())"
    places = done([str(installed.python), "-c", code], tmp_path).split()
    assert len(places) >= 2
    assert all(Path(place).is_relative_to(installed.python.parent.parent) for place in places)


def test_the_installed_command_lists_its_recipes_and_trains_one_from_an_empty_folder(
    installed: Installed, tmp_path: Path
) -> None:
    assert "plan_path-tiny" in done([str(installed.command), "recipes"], tmp_path)
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    printed = done([str(installed.command), "train", "plan_path-tiny", *arguments], tmp_path)
    assert "coterie play runs/plan_path-tiny" in printed
    rows = [json.loads(line) for line in (tmp_path / "runs/plan_path-tiny/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["episodes_failed"]) for row in rows] == [(0, 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "nothing else is written to the folder"
    assert "task plan_path:test:0" in done([str(installed.command), "play", "runs/plan_path-tiny"], tmp_path)
