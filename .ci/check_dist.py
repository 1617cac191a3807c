"""Look into the wheel and the sdist in DIST, and import the wheel that is unpacked in FOLDER.

python .ci/check_dist.py DIST FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

IMPORT = """
import sys, pathlib, importlib.metadata, compile_callbacks
folder = pathlib.Path(sys.argv[1])
assert pathlib.Path(compile_callbacks.__file__).is_relative_to(folder), compile_callbacks.__file__
assert [compile_callbacks.__name__ and getattr(compile_callbacks, name) for name in compile_callbacks.__all__]
print(importlib.metadata.version("compile-callbacks"))
"""

# A user's script, which does not name this library.
SCRIPT = """
import sys, torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = pl.Trainer(accelerator="cpu", max_steps=30, limit_val_batches=1, logger=False, enable_checkpointing=False)
trainer.fit(BoringModel())
added = [callback for callback in trainer.callbacks if type(callback).__module__.startswith("compile_callbacks")]
print([(callback.report.train.mode, callback.report.train.graphs > 0) for callback in added])
"""


def run_script(folder: Path, mode: str | None) -> str:
    """Run the script with the wheel that is unpacked in a folder, and return its last line."""
    environment = {name: value for name, value in os.environ.items() if name != "COMPILE_CALLBACKS"}
    environment |= {"PYTHONPATH": str(folder.resolve())} | ({"COMPILE_CALLBACKS": mode} if mode else {})
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    return subprocess.run(
        command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]


def main(dist: Path, folder: Path) -> None:
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    tops = {name.split("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"compile_callbacks"}, tops
    assert "compile_callbacks/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert any(name.endswith("entry_points.txt") for name in inside)
    modules = {str(path.relative_to(Path.cwd())) for path in Path.cwd().glob("compile_callbacks/**/*.py")}
    assert modules <= set(inside), modules - set(inside)
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "examples/README.md", ".ci/run"}
    assert needed <= files, needed - files
    version = subprocess.run(
        [sys.executable, "-c", IMPORT, str(folder.resolve())],
        env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert version in wheel.name, (version, wheel.name)
    assert version in sdist.name, (version, sdist.name)
    assert run_script(folder, None) == "[]"
    assert run_script(folder, "default") == "[('default', True)]"
    print(f"{wheel.name}: {len(inside)} files; {sdist.name}: {len(files)} files; imports as {version}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
