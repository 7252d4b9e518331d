"""A GPU that is not there, for a process that only resolves SGLang's arguments.

SGLang decides about attention backends, cache formats and graphs by asking torch and the driver.
`before_import` answers for torch and stands in for kernel packages whose libraries need a driver;
`after_import` answers for the driver's tools. No kernel runs, and nothing is allocated.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_glm53.cookbook.devices import Device

# Imported by SGLang's configuration code for names that it only calls on a GPU.
_KERNELS = ("sgl_kernel", "aiter")
MIB = 2**20


def before_import(device: Device) -> None:
    """Answer torch's questions as a machine with `device` would. Call before importing SGLang."""
    import torch

    properties = types.SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.processors,
        gcnArchName=device.gfx,
    )
    answers = {
        "is_available": True,
        "is_initialized": False,
        "device_count": device.count,
        "current_device": 0,
        "get_device_capability": device.capability,
        "get_device_properties": properties,
        "get_device_name": device.name,
        "mem_get_info": (device.memory_bytes, device.memory_bytes),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answer(answer))
    if device.platform == "rocm":
        torch.version.hip, torch.version.cuda = "7.0", None
    sys.meta_path.insert(0, _StandIn(_KERNELS))


def after_import(device: Device) -> None:
    """Answer for nvidia-smi and rocminfo, and forget what was asked before.

    Call it again to pretend another device of the same platform.
    """
    from sglang.srt.utils import common

    for name in ("get_nvgpu_memory_capacity", "get_amdgpu_memory_capacity"):
        setattr(common, name, _answer(device.memory_bytes / MIB))
    for value in vars(common).values():
        forget = getattr(value, "cache_clear", None)
        if forget is not None:
            forget()


def _answer(value: Any) -> Any:
    return lambda *args, **kwargs: value


class _Anything:
    """Whatever a kernel package has: it can be imported, called and asked for attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of some packages, each holding anything."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _Anything().__getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""
