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
    print(f"{wheel.name}: {len(inside)} files; {sdist.name}: {len(files)} files; imports as {version}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
