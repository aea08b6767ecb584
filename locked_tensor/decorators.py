"""Running a function's body inside a context, whatever kind of function it is."""

from __future__ import annotations

import functools
import inspect
from typing import Any, AsyncGenerator, Callable, ContextManager, Generator

MakeContext = Callable[[], ContextManager[None]]


def run_inside(make_context: MakeContext, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its body inside a context of its own at each call.

    A coroutine holds the context until it returns; a generator, of either kind, from each time that it
    is resumed until it yields.

    Raises:
        TypeError: it is a class, or cannot be called.
    """
    if inspect.isclass(function):
        raise TypeError(
            f"a class cannot be decorated, got {function.__name__}: decorate its methods, or make its instances inside"
        )
    if not callable(function):
        raise TypeError(f"only functions can be decorated (below @classmethod), got {function!r}")
    if _is_kind(inspect.isasyncgenfunction, function):
        return _of_async_generator(make_context, function)
    if _is_kind(inspect.iscoroutinefunction, function):
        return _of_coroutine(make_context, function)
    if _is_kind(inspect.isgeneratorfunction, function):
        return _of_generator(make_context, function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return function(*args, **kwargs)

    return wrapper


def _is_kind(is_kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    return is_kind(function) or is_kind(type(function).__call__)


def _of_coroutine(make_context: MakeContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return await function(*args, **kwargs)

    return wrapper


def _of_generator(make_context: MakeContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        try:
            with make_context():
                value = next(generator)
            while True:
                try:
                    sent = yield value
                except GeneratorExit:
                    with make_context():
                        generator.close()
                    raise
                except BaseException as error:
                    with make_context():
                        value = generator.throw(error)
                else:
                    with make_context():
                        value = generator.send(sent)
        except StopIteration as end:
            return end.value

    return wrapper


def _of_async_generator(make_context: MakeContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        try:
            with make_context():
                value = await generator.asend(None)
            while True:
                try:
                    sent = yield value
                except GeneratorExit:
                    with make_context():
                        await generator.aclose()
                    raise
                except BaseException as error:
                    with make_context():
                        value = await generator.athrow(error)
                else:
                    with make_context():
                        value = await generator.asend(sent)
        except StopAsyncIteration:
            return

    return wrapper
