"""What the tests share: folders on a real disk and on tmpfs, every engine, and what a skip means."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import locked_tensor as lt

TMPFS = "/dev/shm"
ROOT = Path(__file__).parent.parent


class Log(TorchDispatchMode):
    """The operators that a mode sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def file_system_of(path: Path) -> str:
    asked = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def missing(what: str) -> None:
    """Skips the test for want of something; where everything must be there (CI), fails it."""
    if os.environ.get("LOCKED_TENSOR_MUST_HAVE"):
        pytest.fail(f"this machine must have it: {what}")
    pytest.skip(what)


@pytest.fixture
def disk_folder(tmp_path):
    """A folder on a disk file system: pytest's own, or one in LOCKED_TENSOR_TEST_FOLDER."""
    folder = Path(os.environ.get("LOCKED_TENSOR_TEST_FOLDER", tmp_path))
    if file_system_of(folder) in ("tmpfs", "overlayfs"):
        missing(f"{folder} is not on a disk file system; set LOCKED_TENSOR_TEST_FOLDER")
    made = Path(tempfile.mkdtemp(dir=folder))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def tmpfs_folder():
    if not os.path.isdir(TMPFS) or file_system_of(Path(TMPFS)) != "tmpfs":
        missing(f"{TMPFS} is not a tmpfs")
    made = Path(tempfile.mkdtemp(dir=TMPFS, prefix="locked_tensor_test_"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)], capture_output=True)
    if mounted.returncode:
        missing("mounting a small tmpfs (root)")
    yield point
    subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def files_of_at_most():
    """A context in which a write past so many bytes of a file fails with EFBIG."""

    @contextlib.contextmanager
    def limit(nbytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))  # Python ignores SIGXFSZ
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def is_interrupted():
    """Runs a function that a signal's handler leaves by an exception after some seconds: did it?"""

    class Interrupt(Exception):
        pass

    def interrupt(*arguments):
        raise Interrupt

    def run(function, seconds):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return True
        return False

    before = signal.signal(signal.SIGALRM, interrupt)
    yield run
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request):
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture(params=["io_uring", "libaio", "threads"])
def engine(request):
    found = {info.name: info for info in lt.engines()}[request.param]
    if not found.usable:
        missing(f"{found.name}: {found.reason}")
    return found.name


@pytest.fixture
def run_with_memlock():
    """Runs python with arguments in a process that may lock so many KiB and no more, as a user's."""

    def run(kib: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash"]
        if os.geteuid() == 0:  # whose CAP_IPC_LOCK knows no limit
            if shutil.which("capsh") is None:
                missing("capsh (Debian: libcap2-bin)")
            shell = ["capsh", "--drop=cap_ipc_lock", "--"]
        command = [*shell, "-c", f'ulimit -l {kib} && exec "$@"', "bash", sys.executable, *arguments]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="120")
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture(autouse=True)
def _no_cuda_no_test(request):
    if request.node.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
