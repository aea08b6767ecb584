"""The public names, and that the stubs are equal to the compiled module."""

import ast
from pathlib import Path

from expecttest import assert_expected_inline

import locked_tensor as lt
from locked_tensor import _C


def test_the_public_names():
    assert_expected_inline(
        "\n".join(lt.__all__),
        """\
AioHandle
EngineInfo
FileWriter
InternalError
IoRequest
IoStats
IoTicket
LockLimitError
LockedTensor
MemlockLimit
SafetensorsFile
ShortReadError
aio_handle
as_plain
empty_cache
engines
is_locked
load
lock
lock_
locked_memory
max_memory_allocated
memlock_limit
memory_allocated
memory_reserved
memory_stats
memory_summary
open_safetensors
open_writer
reset_peak_memory_stats
save
set_cache_limit
set_log_milestone
unlock_""",
    )
    assert all(getattr(lt, name).__doc__ for name in lt.__all__)


def test_the_stubs_name_what_the_module_has():
    stubs = ast.parse((Path(lt.__file__).parent / "_C.pyi").read_text())
    top = {node.name: node for node in stubs.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(top) == {name for name in dir(_C) if not name.startswith("__")}
    for name, node in top.items():
        if isinstance(node, ast.ClassDef):
            methods = {
                each.name
                for each in node.body
                if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")
            }
            own = {each for each in vars(getattr(_C, name)) if not each.startswith("__")}
            assert methods == own - {"_pybind11_conduit_v1_"}, name
