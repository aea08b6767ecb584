"""The types of the commands' options: what cannot be is refused by argparse, before any work."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def count(text: str) -> int:
    """A whole number of 1 or more, of at most 63 bits."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**63:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return number


def duration(text: str) -> float:
    """A time that ends: more than 0, and finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def new_file(text: str) -> Path:
    """A file that a command is to write at its end: refused now where it could not be."""
    path = Path(text)
    folder = path.parent
    if path.is_dir() or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, not a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {os.fspath(folder)!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be written")
    return path
