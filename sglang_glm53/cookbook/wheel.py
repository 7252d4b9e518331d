"""SGLang as a wheel that was unpacked into a folder, beside the installed one."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_glm53.compat.versions import SUPPORTED, require_supported
from sglang_glm53.errors import Glm53Error


def version_in(folder: Path | None) -> str:
    """The version of the SGLang in `folder`; of the installed one without a folder.

    Raises:
        Glm53Error: there is none, or one that is not supported.
    """
    if folder is None:
        return require_supported()
    found = [re.match(r"sglang-([0-9.]+)", path.name) for path in folder.glob("sglang-*.dist-info")]
    versions = [match[1].rstrip(".") for match in found if match]
    if not versions:
        raise Glm53Error(
            f"{folder} holds no SGLang; unpack a wheel there: pip download --no-deps "
            "sglang==VERSION, then python -m zipfile -e WHEEL FOLDER"
        )
    if versions[0] not in SUPPORTED:
        raise Glm53Error(
            f"{folder} holds SGLang {versions[0]}; recipes are held against {', '.join(SUPPORTED)}"
        )
    return versions[0]
