"""Where the data folders of the package lie: `patches/` and `recipes/`.

A wheel carries them inside the package (`sglang_glm53/patches`); in a checkout, reached through
an editable install or PYTHONPATH, they are siblings of the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """The folder `name` ("patches" or "recipes").

    Raises:
        FileNotFoundError: the folder is in neither place (a broken install).
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir() and any(folder.glob("*.yaml")):
            return folder
    raise FileNotFoundError(
        f"{name}/ is missing beside {_PACKAGE}: the install is incomplete; "
        "reinstall with `pip install --force-reinstall sglang-glm53`"
    )
