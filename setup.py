"""The list of packages: everything under sglang_glm53, and two data folders of the repository.

`patches/` and `recipes/` stand at the top of the repository, since people edit them, and are
shipped as `sglang_glm53/patches` and `sglang_glm53/recipes` (mapped in pyproject.toml), so that
every command works from a plain install outside a checkout.
"""

from setuptools import find_packages, setup

DATA_FOLDERS = ["sglang_glm53.patches", "sglang_glm53.recipes"]

setup(packages=find_packages(include=["sglang_glm53", "sglang_glm53.*"]) + DATA_FOLDERS)
