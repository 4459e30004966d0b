"""Triton's interpreter without work that it repeats: many tests spend most of their time there."""

import inspect


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
