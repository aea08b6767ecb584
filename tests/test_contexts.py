"""locked_memory(): tasks, generators, threads, order and depth; used as an object and as a decorator."""

import asyncio
import contextlib
import gc
import inspect
import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from conftest import Log
from torch.utils._python_dispatch import _disable_current_modes

import locked_tensor as lt


def allocates_locked() -> bool:
    """What this thread allocates now is locked and tagged, or neither."""
    made = [torch.ones(10), torch.tensor([1.0, 2.0]), torch.arange(3) + 1]
    answers = {(lt.is_locked(tensor), isinstance(tensor, lt.LockedTensor)) for tensor in made}
    assert answers in ({(True, True)}, {(False, False)}), answers
    return answers == {(True, True)}


def modes_on_the_stack() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    gc.collect()
    assert modes_on_the_stack() == 0 and not allocates_locked()


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- tasks --------------------------------------------------------------------------------------


def test_tasks_that_wait_inside_leave_each_other_as_they_are():
    async def inside(begin, end):
        await asyncio.sleep(begin)
        with lt.locked_memory():
            answers = [allocates_locked()]
            await asyncio.sleep(end)
            answers.append(allocates_locked())
        return answers + [allocates_locked()]

    async def outside():
        answers = []
        for _ in range(8):
            answers.append(allocates_locked())
            await asyncio.sleep(0.005)
        return answers

    async def all_of_them():
        return await asyncio.gather(inside(0, 0.02), outside(), inside(0.01, 0.03), outside())

    first, second, third, fourth = asyncio.run(all_of_them())
    assert first == third == [True, True, False]
    assert second == fourth == [False] * 8


def test_a_hundred_tasks_enter_and_leave_at_random():
    async def task(seed):
        choose = random.Random(seed)
        for _ in range(10):
            assert not allocates_locked()
            await asyncio.sleep(choose.random() / 1000)
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(choose.randint(1, 3)):
                    stack.enter_context(lt.locked_memory())
                    await asyncio.sleep(choose.random() / 1000)
                    assert allocates_locked()

    async def all_of_them():
        await asyncio.gather(*(task(seed) for seed in range(100)))

    asyncio.run(all_of_them())


def test_a_task_made_inside_is_inside_until_the_context_is_left():
    async def child(left):
        answers = [allocates_locked()]
        await left.wait()
        return answers + [allocates_locked()]

    async def parent():
        left = asyncio.Event()
        with lt.locked_memory():
            task = asyncio.create_task(child(left))
            await asyncio.sleep(0)
        left.set()
        return await task, await asyncio.to_thread(allocates_locked)

    assert asyncio.run(parent()) == ([True, False], False)


def test_a_thread_that_copies_the_logical_context_is_not_inside():
    async def parent():
        with lt.locked_memory():
            return await asyncio.to_thread(allocates_locked), allocates_locked()

    assert asyncio.run(parent()) == (False, True)


def test_one_object_serves_many_tasks():
    context = lt.locked_memory()

    async def task(begin, end):
        await asyncio.sleep(begin)
        with context:
            await asyncio.sleep(end)
            answer = allocates_locked()
        return answer, allocates_locked()

    async def all_of_them():
        return await asyncio.gather(task(0, 0.02), task(0.01, 0.03), task(0.015, 0.001))

    assert asyncio.run(all_of_them()) == [(True, False)] * 3


def test_where_no_context_decides_operators_are_as_ever():
    plain = lt.lock_(torch.arange(12.0))
    locked = lt.lock(torch.arange(12.0))
    matrix = torch.randn(4, 3, dtype=torch.complex128)
    expected = torch.linalg.pinv(matrix)

    async def waits(done):
        with lt.locked_memory():
            await done.wait()

    async def works():
        done = asyncio.Event()
        waiting = asyncio.create_task(waits(done))
        await asyncio.sleep(0)
        assert modes_on_the_stack() == 1
        assert type(plain[2:5]) is torch.Tensor and type(plain.view(3, 4)) is torch.Tensor
        assert type(locked[2:5]) is lt.LockedTensor and type(locked + 1) is torch.Tensor
        assert plain.add_(0) is plain and locked.add_(0) is locked
        assert [type(each) for each in plain.chunk(2) + locked.chunk(2)] == [torch.Tensor] * 2 + [lt.LockedTensor] * 2
        assert torch.equal(torch.linalg.pinv(matrix), expected)
        done.set()
        await waiting

    asyncio.run(works())


# --- order, depth, objects ----------------------------------------------------------------------


def test_contexts_may_be_left_in_any_order():
    choose = random.Random(0)
    for _ in range(50):
        open_contexts = []
        for _ in range(60):
            if open_contexts and choose.random() < 0.5:
                open_contexts.pop(choose.randrange(len(open_contexts))).__exit__(None, None, None)
            else:
                context = choose.choice(open_contexts) if open_contexts and choose.random() < 0.3 else lt.locked_memory()
                context.__enter__()
                open_contexts.append(context)
            assert allocates_locked() == bool(open_contexts)
            assert modes_on_the_stack() == bool(open_contexts)
        while open_contexts:
            open_contexts.pop(choose.randrange(len(open_contexts))).__exit__(None, None, None)


def test_the_innermost_open_one_decides():
    def huge_pages_are_asked_for():
        lt.empty_cache()
        before = lt.memory_stats()["huge_page_bytes.current"]
        tensor = torch.empty(4 << 20, dtype=torch.uint8)
        assert lt.is_locked(tensor)
        return lt.memory_stats()["huge_page_bytes.current"] > before

    outer, inner = lt.locked_memory(huge_pages="auto"), lt.locked_memory(huge_pages="off")
    outer.__enter__()
    assert huge_pages_are_asked_for()
    inner.__enter__()
    assert not huge_pages_are_asked_for()
    outer.__exit__(None, None, None)
    assert not huge_pages_are_asked_for()
    outer.__enter__()
    assert huge_pages_are_asked_for()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def test_a_context_that_overlaps_the_next_for_ever_keeps_nothing():
    before = lt.locked_memory()
    before.__enter__()
    for _ in range(20_000):
        after = lt.locked_memory()
        after.__enter__()
        before.__exit__(None, None, None)
        before = after
    assert allocates_locked()
    before.__exit__(None, None, None)


@pytest.mark.parametrize("depth", [300, 20_000])
def test_depth_does_not_matter(depth):
    with contextlib.ExitStack() as stack:
        for _ in range(depth):
            stack.enter_context(lt.locked_memory())
        assert modes_on_the_stack() == 1 and allocates_locked()


def test_a_chain_of_closed_contexts_of_any_length_is_let_go():
    async def parent():
        contexts = [lt.locked_memory() for _ in range(100_000)]
        for context in contexts:
            context.__enter__()
        done = asyncio.Event()
        child = asyncio.create_task(done.wait())  # its logical context knows them all
        await asyncio.sleep(0)
        while contexts:
            contexts.pop().__exit__(None, None, None)
        done.set()
        await child

    asyncio.run(parent())


def test_one_object_may_be_entered_again_and_inside_itself():
    context = lt.locked_memory()
    for _ in range(3):
        with context:
            with context, lt.locked_memory():
                with context:
                    assert allocates_locked()
            assert allocates_locked()
        assert not allocates_locked()


def test_leaving_what_was_not_entered_is_told_and_changes_nothing():
    context = lt.locked_memory()
    with pytest.raises(RuntimeError, match="without having been entered"):
        context.__exit__(None, None, None)
    with context:
        pass
    with lt.locked_memory():
        with pytest.raises(RuntimeError, match="without having been entered"):
            context.__exit__(None, None, None)
        assert allocates_locked()


def test_only_the_thread_that_entered_may_leave():
    context = lt.locked_memory()
    entered, tried = threading.Event(), threading.Event()
    answers = []

    def enter_and_leave():
        with context:
            entered.set()
            tried.wait(10)
            answers.append(allocates_locked())
        answers.append(allocates_locked())

    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    entered.wait(10)
    with pytest.raises(RuntimeError, match="another thread"):
        context.__exit__(None, None, None)
    assert not allocates_locked()
    with lt.locked_memory():
        with pytest.raises(RuntimeError, match="another thread"):
            context.__exit__(None, None, None)
        assert allocates_locked()
    tried.set()
    thread.join()
    assert answers == [True, False]


def test_a_thread_that_ends_inside_takes_its_context_along():
    context = lt.locked_memory()
    thread = threading.Thread(target=context.__enter__)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="another thread"):
        context.__exit__(None, None, None)
    with context:
        assert allocates_locked()
    results = []
    thread = threading.Thread(target=lambda: results.append(allocates_locked()))  # perhaps of the same number
    thread.start()
    thread.join()
    assert results == [False]


def test_arguments_are_checked_where_they_are_given():
    for wrong, match in (({"huge_pages": "4M"}, "4M"), ({"huge_pages": None}, "huge_pages"), ({"on_limit": 3}, "on_limit")):
        with pytest.raises(ValueError, match=match):
            lt.locked_memory(**wrong)
    with pytest.raises(TypeError):
        lt.locked_memory(numa_node="0")


# --- other modes --------------------------------------------------------------------------------


def test_a_context_is_left_from_under_another_mode():
    context = lt.locked_memory()
    context.__enter__()
    with Log() as log:
        assert allocates_locked()
        context.__exit__(None, None, None)
        assert modes_on_the_stack() == 1
        log.seen.clear()
        assert not allocates_locked()
        assert "aten.ones.default" in log.seen


def test_another_mode_is_left_from_within_a_context():
    log, context = Log(), lt.locked_memory()
    log.__enter__()
    context.__enter__()
    assert allocates_locked() and "aten.ones.default" in log.seen
    log.__exit__(None, None, None)
    log.seen.clear()
    assert allocates_locked() and log.seen == []
    context.__exit__(None, None, None)


def test_a_fake_mode_around_or_inside_makes_its_own_tensors():
    fakes = torch._subclasses.fake_tensor.FakeTensorMode
    with fakes(), lt.locked_memory(), Log():
        around = torch.ones(3) + 1
    with lt.locked_memory(), fakes():
        inside = torch.ones(3) + 1
    for tensor in (around, inside):
        assert type(tensor) is torch._subclasses.FakeTensor and not lt.is_locked(tensor)


def test_a_context_entered_where_modes_are_put_aside_tags():
    with lt.locked_memory():
        with _disable_current_modes():
            with lt.locked_memory():
                assert allocates_locked()
        assert modes_on_the_stack() == 1 and allocates_locked()


def test_an_operator_of_the_users_may_enter_one_itself():
    @torch.library.custom_op("locked_tensor_tests::doubled", mutates_args=())
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        with lt.locked_memory():
            return tensor * 2

    ordinary = torch.ones(3)
    assert lt.is_locked(doubled(ordinary)) and torch.equal(doubled(ordinary), ordinary * 2)
    assert modes_on_the_stack() == 0
    with lt.locked_memory():
        result = doubled(ordinary)
        assert type(result) is lt.LockedTensor and modes_on_the_stack() == 1


# --- generators ---------------------------------------------------------------------------------


def two_answers():
    with lt.locked_memory():
        yield allocates_locked()
        yield allocates_locked()


def test_a_generator_that_waits_inside_keeps_its_caller_inside_until_it_ends():
    generator = two_answers()
    assert next(generator) and allocates_locked() and next(generator)
    generator.close()
    assert not allocates_locked()


def test_a_generator_that_ends_inside_another_context_leaves_that_one_open():
    generator = two_answers()
    next(generator)
    with lt.locked_memory():
        generator.close()
        assert allocates_locked()
    assert not allocates_locked()
    with lt.locked_memory():
        generator = two_answers()
        next(generator)
    assert allocates_locked()
    del generator
    assert not allocates_locked()


# --- the decorator ------------------------------------------------------------------------------


def test_a_decorated_generator_is_inside_only_while_it_runs():
    @lt.locked_memory()
    def generator(first):
        sent = yield first, allocates_locked()
        try:
            yield sent, allocates_locked()
        except KeyError as error:
            yield error.args, allocates_locked()
        return "ended", allocates_locked()

    assert inspect.isgeneratorfunction(generator) and generator.__name__ == "generator"
    running = generator("begun")
    assert next(running) == ("begun", True) and not allocates_locked()
    assert running.send("sent") == ("sent", True) and not allocates_locked()
    assert running.throw(KeyError("thrown")) == (("thrown",), True) and not allocates_locked()
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == ("ended", True)


def test_a_decorated_generator_is_closed_inside_and_its_errors_pass():
    seen = []

    @lt.locked_memory()
    def generator():
        try:
            yield
        finally:
            seen.append(allocates_locked())

    running = generator()
    next(running)
    running.close()
    running = generator()
    next(running)
    with pytest.raises(ZeroDivisionError):
        running.throw(ZeroDivisionError())
    assert seen == [True, True]


def test_a_decorated_coroutine_is_inside_across_its_awaits():
    @lt.locked_memory()
    async def work(seconds):
        answers = [allocates_locked()]
        await asyncio.sleep(seconds)
        return answers + [allocates_locked()]

    async def all_of_them():
        working = [asyncio.create_task(work(seconds)) for seconds in (0.02, 0.01, 0.03)]
        await asyncio.sleep(0.015)
        assert not allocates_locked()
        return await asyncio.gather(*working)

    assert inspect.iscoroutinefunction(work)
    assert asyncio.run(all_of_them()) == [[True, True]] * 3


def test_a_decorated_async_generator_is_inside_only_while_it_runs():
    closed = []

    @lt.locked_memory()
    async def generator():
        try:
            await asyncio.sleep(0)
            sent = yield allocates_locked()
            try:
                yield sent, allocates_locked()
            except KeyError:
                yield "caught", allocates_locked()
        finally:
            await asyncio.sleep(0)
            closed.append(allocates_locked())

    async def use():
        running = generator()
        assert await anext(running) is True and not allocates_locked()
        assert await running.asend(5) == (5, True) and not allocates_locked()
        assert await running.athrow(KeyError()) == ("caught", True) and not allocates_locked()
        await running.aclose()
        assert [answer async for answer in generator()] == [True, (None, True)]

    assert inspect.isasyncgenfunction(generator)
    asyncio.run(use())
    assert closed == [True, True]


def test_callable_objects_and_methods_are_decorated_as_what_they_are():
    class Coroutine:
        async def __call__(self):
            await asyncio.sleep(0)
            return allocates_locked()

    class Methods:
        @lt.locked_memory()
        def method(self):
            return self, allocates_locked()

        @classmethod
        @lt.locked_memory(huge_pages="off")
        def of_the_class(cls):
            return cls, allocates_locked()

    assert asyncio.run(lt.locked_memory()(Coroutine())())
    methods = Methods()
    assert methods.method() == (methods, True) and Methods.of_the_class() == (Methods, True)

    @lt.locked_memory()
    def recursive(depth):
        return allocates_locked() if depth == 0 else recursive(depth - 1)

    assert recursive(20)


def test_what_cannot_be_decorated_is_told_at_once():
    with pytest.raises(TypeError, match="a class cannot be decorated, got Linear"):
        lt.locked_memory()(torch.nn.Linear)
    with pytest.raises(TypeError, match="only functions"):
        lt.locked_memory()(classmethod(lambda cls: None))
    with pytest.raises(TypeError, match="only functions"):
        lt.locked_memory()(None)


# --- what is imported and warned ----------------------------------------------------------------


def test_the_first_locked_tensors_and_views_do_not_import_dynamo():
    program = """
    import sys, torch, locked_tensor as lt
    with lt.locked_memory():
        tensor = torch.empty(16, 16)
        total = tensor.fill_(1).sum() + torch.tensor(1.0)
    views = [tensor[2:], tensor.view(-1), tensor.t(), tensor.chunk(2)]
    lt.lock(torch.ones(3)); lt.lock_(torch.ones(3))
    assert int(total) == 257
    print([name for name in sys.modules if name.startswith("torch._dynamo")])
    """
    assert run_python(program) == "[]"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give privileges up")
def test_each_context_warns_of_its_own_allocations_only():
    program = """
    import ctypes, os, resource, warnings
    import torch, locked_tensor as lt
    assert ctypes.CDLL(None).prctl(24, 14, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_IPC_LOCK
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    os.setgid(65534); os.setuid(65534)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer, inner = lt.locked_memory(on_limit="fall_back"), lt.locked_memory(on_limit="fall_back")
        with outer:
            with inner:
                large = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2)]
            assert len(caught) == 1, caught
            assert torch.ones(10).is_locked()
        assert len(caught) == 1, caught
        with inner, outer:
            large = torch.ones(64 << 20, dtype=torch.uint8)
        assert len(caught) == 2 and not lt.is_locked(large)
    print(caught[0].filename)
    """
    assert run_python(program) == "<string>"  # where the with statement stands
