"""Run a function as soon as a module has been imported, whoever imports it and when.

SGLang imports the modules that we touch at different times in different processes, some before
plugins are loaded, and others take names out of them by `from … import …`. A function that runs at
the end of the module's own import is early enough for all of them, and costs nothing in processes
that never import it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and adds our callbacks to the end of its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            for callback in _waiting.pop(fullname, ()):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _PostImportFinder()


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once module `name` is imported; at once if it already is.

    An exception of the callback leaves through the `import` statement that loaded the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        if _initialising(module):
            raise RuntimeError(f"{name} is being imported already: too late to wait for its end")
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _initialising(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
