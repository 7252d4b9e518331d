"""Which SGLang is installed, and which ones this release was tested with."""

from __future__ import annotations

from importlib import metadata

from sglang_glm53.errors import Glm53Error

SUPPORTED: tuple[str, ...] = ("0.5.22", "0.5.23")
# Of these, with which our classes were run on a GPU; elsewhere they stand down there.
GPU_TESTED: tuple[str, ...] = ("0.5.23",)


def sglang_version() -> str | None:
    """The installed SGLang's version without a local part ("0.5.23"), or None if there is none."""
    try:
        return metadata.version("sglang").split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def require_supported() -> str:
    """The installed version.

    Raises:
        Glm53Error: no SGLang, or one that this release was not tested with.
    """
    version = sglang_version()
    supported = ", ".join(SUPPORTED)
    if version is None:
        raise Glm53Error(
            f"SGLang is not installed in this environment; install one of the supported versions: "
            f"{supported} (`pip install sglang=={SUPPORTED[-1]}`)"
        )
    if version not in SUPPORTED:
        raise Glm53Error(
            f"SGLang {version} is not supported by this release of sglang-glm53; supported "
            f"versions: {supported}. Install one of them, or uninstall sglang-glm53"
        )
    return version
