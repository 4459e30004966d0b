"""Triton's interpreter without work that it repeats, where many tests spend most of their time, and out of order."""

import functools
import inspect
import random

import pytest


class AnyOrder:
    """A kernel of a grid of one or two axes whose programs run in an order of chance (``seed`` 1 and on), or the
    reverse one; one that must wait is tried again later."""

    def __init__(self, kernel, seed):
        self.kernel, self.seed, self.postponed = kernel, seed, 0

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            wide, high = (*grid, 1)[:2]
            programs = [(i, j, 0) for j in range(high) for i in range(wide)][::-1]
            if self.seed:
                random.Random(self.seed).shuffle(programs)
            while programs:
                waiting = [p for p in programs if not self.ends(p, args, kwargs)]
                assert len(waiting) < len(programs), "every program waits for another"
                self.postponed += len(waiting)
                programs = waiting

        return launch

    def ends(self, program, args, kwargs):
        from triton.runtime.interpreter import InterpreterError, interpreter_builder

        with pytest.MonkeyPatch.context() as patch:
            place = functools.partial(setattr, interpreter_builder, "grid_idx", program)
            patch.setattr(interpreter_builder, "set_grid_idx", lambda *_: place())
            try:
                self.kernel[(1,)](*args, **kwargs)
            except InterpreterError as error:
                if "a program waits" not in repr(error):
                    raise
                return False
        return True


def patch_language_once() -> None:
    """Let a kernel's call of another function leave `triton.language` as the launch has patched it already.

    Triton's interpreter replaces the language's functions for the time of a launch, and does so over again at every
    call of a jit function within it, which takes about half of all its time. What a launch does stays as it is.
    """
    from triton.runtime import interpreter

    language, real = interpreter.tl, interpreter._patch_lang
    if hasattr(real, "real"):  # done before
        return
    patched: set = set()  # modules, from the start of a launch to its end

    def patch_lang(fn):
        modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)]
        launch = not patched
        if not launch and patched.issuperset(modules):
            return None  # nobody restores what a call within a launch has patched
        scope = real(fn)
        patched.update(modules)
        if launch:
            restore = scope.restore

            def restore_and_forget():
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    patch_lang.real = real
    interpreter._patch_lang = patch_lang
