#!/usr/bin/env bash
# Tries what `make dist` made: what the sdist and the wheel hold; then both, each installed in a fresh
# environment, do the main job there, away from the source. The wheel was built in the unpacked sdist, with
# liburing inside; the sdist is installed as where liburing's headers are missing, which compiles one file
# more. Torch and rich are those of $PYTHON.
#
#   PYTHON=python3 tests/try_dist.sh dist build/sdist
set -euo pipefail

dist=$(realpath "$1")
unpacked=$(realpath "$2")
python=${PYTHON:-python3}
root=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d "$dist/try.XXXXXX")
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH LOCKED_TENSOR_LIBURING
sdist=$(ls "$dist"/*.tar.gz)
wheel=$(ls "$dist"/*.whl)

same() { # what, the list that there is, the list that there should be
  diff <(LC_ALL=C sort "$2") <(LC_ALL=C sort "$3") || { echo "$1: < has no place there, > is missing" >&2; exit 1; }
}

tar -tzf "$sdist" | sed 's|^[^/]*/||' | grep -Ev '/$|^$|^PKG-INFO$|^setup.cfg$|\.egg-info/' > "$work/in_sdist"
if git -C "$root" rev-parse --git-dir > "$work/git" 2>&1; then
  git -C "$root" ls-files --cached --others --exclude-standard | grep -v '^\.gitignore$' > "$work/in_source"
  same "$sdist" "$work/in_sdist" "$work/in_source"
fi
"$python" -m zipfile -l "$wheel" | awk 'NR > 1 {print $1}' | grep -v '\.dist-info/' > "$work/in_wheel"
{ grep '^locked_tensor/' "$work/in_sdist"; echo "locked_tensor/_C$("$python" -c \
  'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"; } > "$work/in_package"
same "$wheel" "$work/in_wheel" "$work/in_package"
"$python" -m zipfile -l "$wheel" | grep -q '\.dist-info/.*LICENSE' || { echo "$wheel lacks LICENSE" >&2; exit 1; }

environment() { # name: an environment that has what $PYTHON has, after what is its own
  "$python" -m venv --without-pip "$work/$1"
  "$python" -c 'import sys; print(*[path for path in sys.path if path.endswith("-packages")], sep="\n")' \
    > "$("$work/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_builder.pth"
}

install() { # name, package
  "$work/$1/bin/python" -m pip install -q --ignore-installed --no-deps --no-build-isolation "$2"
  if "$work/$1/bin/python" -m pip check | grep '^locked[-_]tensor'; then exit 1; fi
}

use() { # name: README's first example, the doctor and the demo, in a folder of their own
  mkdir "$work/$1/here" && cd "$work/$1/here"
  "$work/$1/bin/python" - <<'PY'
import sysconfig

from locked_tensor import _C

assert _C.__file__.startswith(sysconfig.get_path("purelib")), _C.__file__
PY
  awk '/^```python$/ {inside = 1; next} /^```$/ && inside {exit} inside' "$root/README.md" > "$work/$1/example.py"
  grep -q locked_memory "$work/$1/example.py"
  "$work/$1/bin/python" "$work/$1/example.py"
  "$work/$1/bin/locked-tensor" doctor .
  "$work/$1/bin/locked-tensor" demo
  [ -z "$(ls)" ] || { echo "left behind: $(ls)" >&2; exit 1; }
}

environment wheel
install wheel "$wheel"
use wheel
"$work/wheel/bin/python" - <<'PY'
import os
import subprocess

import locked_tensor as lt
from locked_tensor import _C

needed = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True).stdout
assert "NEEDED" in needed and "liburing" not in needed, "the wheel must carry liburing, not ask for it:\n" + needed
(uring,) = [info for info in lt.engines() if info.name == "io_uring"]
assert "built without liburing" not in uring.reason, uring
assert uring.usable or not os.environ.get("LOCKED_TENSOR_MUST_HAVE"), uring
PY

environment sdist
LOCKED_TENSOR_LIBURING=no install sdist "$unpacked"
use sdist
"$work/sdist/bin/locked-tensor" doctor --json | "$python" -c '
import json, sys

(uring,) = [finding for finding in json.load(sys.stdin) if finding["subject"] == "engine io_uring"]
assert "built without liburing" in uring["found"], uring
assert "liburing-dev" in uring["cure"] and not uring["is_problem"], uring
'
echo "the wheel and the sdist, built without liburing, do the main job"
