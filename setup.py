"""Builds the one extension, `locked_tensor._C`. Everything else is in pyproject.toml."""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent


def compiler_finds(file: str) -> str:
    """The path of a library file as the compiler finds it, or ''."""
    compiler = os.environ.get("CXX", "c++")
    asked = subprocess.run([compiler, f"-print-file-name={file}"], capture_output=True, text=True)
    found = asked.stdout.strip()
    return found if os.path.isabs(found) else ""


def has_header(name: str) -> bool:
    compiler = os.environ.get("CXX", "c++")
    tried = subprocess.run(
        [compiler, "-x", "c++", "-E", "-"],
        input=f"#include <{name}>\n",
        capture_output=True,
        text=True,
    )
    return tried.returncode == 0


def liburing() -> tuple[bool, list[str]]:
    """Whether io_uring can be built in, and how to link it: statically where the archive is found.

    LOCKED_TENSOR_LIBURING=no in the environment builds as where its headers are missing.
    """
    if os.environ.get("LOCKED_TENSOR_LIBURING") == "no":
        return False, []
    if not has_header("liburing.h"):
        print(
            "locked_tensor: liburing.h was not found, so this build has no io_uring engine; install "
            "liburing-dev (Debian) or liburing-devel (Fedora) and build again"
        )
        return False, []
    archive = compiler_finds("liburing.a")
    return True, [archive] if archive else ["-luring"]


has_liburing, link_arguments = liburing()
LEFT_OUT = {"engine_uring_missing.cpp"} if has_liburing else {"engine_uring.cpp", "uring_buffers.cpp"}

setup(
    ext_modules=[
        CppExtension(
            "locked_tensor._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp") if path.name not in LEFT_OUT),
            include_dirs=[str(ROOT / "csrc")],
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h")),
            extra_compile_args=["-O2", "-g1", "-Wall", "-fvisibility=hidden"],
            extra_link_args=link_arguments,
            libraries=["shm"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
