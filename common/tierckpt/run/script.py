"""Run of the script as `__main__`, as the interpreter itself runs it."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn
from zipimport import zipimporter

from .options import Options

_kept: list[types.ModuleType] = []
"""The shim's own `__main__`: its functions need its names."""


def forget_first_path() -> None:
    """Remove the path entry that the interpreter added for the shim itself."""
    if not sys.flags.safe_path and sys.path:
        del sys.path[0]


def run(options: Options) -> None:
    """Run the program to its end in this process; returns at its end, or raises its exception.

    An exception is printed as without the shim, by `sys.excepthook` and without the shim's frames,
    before it is raised: the interpreter does the rest."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = [options.program, *options.arguments]
    if options.is_module:
        _insert(os.getcwd())
        runpy_main: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
        _call(runpy_main, options.program)
    elif os.path.isdir(options.program) or _is_zip(options.program):
        _insert(os.path.abspath(options.program))
        runpy_main = runpy._run_module_as_main  # type: ignore[attr-defined]
        _call(runpy_main, "__main__", False)
    else:
        _insert(os.path.dirname(os.path.realpath(options.program)))
        _call(_run_file, os.path.abspath(options.program), main)


def _insert(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _is_zip(path: str) -> bool:
    try:
        zipimporter(path)
    except ImportError:
        return False
    return True


def _run_file(path: str, main: types.ModuleType) -> None:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _end(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _end(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        error.with_traceback(_without_own(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on; None if there is none (a SyntaxError)."""
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_own(file: str) -> bool:
    return file in (__file__, runpy.__file__, "<frozen runpy>")


__all__ = ["forget_first_path", "run"]
