#!/usr/bin/env bash
# Tries what `make dist` made: the wheel, which was built from the sdist alone, is installed in a fresh
# environment and does the main job there, away from the source. Torch and rich are those of $PYTHON.
#
#   PYTHON=python3 tests/try_dist.sh dist
set -euo pipefail

dist=$(realpath "$1")
python=${PYTHON:-python3}
work=$(mktemp -d "$dist/try.XXXXXX")
trap 'rm -rf "$work"' EXIT

sdist=$(ls "$dist"/*.tar.gz)
for file in csrc/io/engine_uring.cpp locked_tensor/_C.pyi tests/cpp/Makefile tutorials/01_locked_memory.ipynb \
            CONTRIBUTING.md .ci/run; do
  tar -tzf "$sdist" | grep "/$file\$" >/dev/null || { echo "$sdist lacks $file" >&2; exit 1; }
done

"$python" -m venv "$work/venv"
clean=$work/venv/bin/python
# One folder more at the end of the path: nothing there is installed again, nothing there hides the wheel.
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > "$("$clean" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_the_builder.pth"
unset PYTHONPATH
cd "$work"
"$clean" -m pip install -q --ignore-installed --no-deps "$dist"/*.whl
if "$clean" -m pip check | grep '^locked[-_]tensor'; then exit 1; fi

"$clean" - <<'PY'
import subprocess, sysconfig
from importlib.resources import files

import locked_tensor as lt
from locked_tensor import _C

assert _C.__file__.startswith(sysconfig.get_path("purelib")), _C.__file__
for name in ("_C.pyi", "py.typed"):
    assert (files("locked_tensor") / name).is_file(), name
linked = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True).stdout
assert "liburing" not in linked, "the wheel must carry liburing, not ask for it:\n" + linked
for info in lt.engines():
    assert "built without liburing" not in info.reason, info
PY
"$work/venv/bin/locked-tensor" doctor .
"$work/venv/bin/locked-tensor" demo
