"""Line coverage of the concurrent floors, of every gcov run together: `line_coverage.py ROOT OBJECT_FOLDER...`.

Prints each file's share and the lines that nothing ran; exits with 1 below LEAST percent.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FLOORS = ("memory", "io", "handle")
LEAST = 90.0


def lines_run(root: Path, folders: list[Path]) -> dict[str, dict[int, int]]:
    """How often each line of csrc's FLOORS ran, by file and line number."""
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for data in (path.resolve() for folder in folders for path in folder.rglob("*.gcda")):
        told = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(data)], cwd=data.parent, capture_output=True, text=True, check=True
        )
        for report in map(json.loads, told.stdout.splitlines()):
            for file in report["files"]:
                # Names are relative to the folder in which the compiler ran.
                path = (Path(report["current_working_directory"]) / file["file"]).resolve()
                if not path.is_relative_to(root / "csrc"):
                    continue
                name = str(path.relative_to(root / "csrc"))
                if name.split("/")[0] in FLOORS:
                    for line in file["lines"]:
                        counts[name][line["line_number"]] += line["count"]
    return counts


def main(root: Path, folders: list[Path]) -> int:
    counts = lines_run(root.resolve(), folders)
    total = covered = 0
    for name in sorted(counts):
        missed = [number for number, count in sorted(counts[name].items()) if count == 0]
        total += len(counts[name])
        covered += len(counts[name]) - len(missed)
        share = 100 * (1 - len(missed) / len(counts[name]))
        sys.stdout.write(f"{share:6.1f} %  {name}\n")
        source = (root / "csrc" / name).read_text().splitlines()
        for number in missed:
            sys.stdout.write(f"              {number}: {source[number - 1].strip()}\n")
    if total == 0:
        sys.stderr.write("no .gcda files were found: run the tests first\n")
        return 2
    sys.stdout.write(f"{100 * covered / total:6.1f} %  {covered} of {total} lines\n")
    return 0 if 100 * covered >= LEAST * total else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]]))
