"""Broken on purpose, the server ends with one line; it never serves SGLang's class silently."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang_glm53
from sglang_glm53.compat import SUPPORTED

from .conftest import FLOAT32
from .harness import START, Server, free_port, on_path
from .test_eagle import eagle_arguments

pytestmark = pytest.mark.server("alone")

OURS = "sglang_glm53.models.glm_moe_dsa.GlmMoeDsaForCausalLM"


@dataclass
class Ended:
    """A server that ended by itself: its exit code and what it printed."""

    code: int
    output: str

    @property
    def line(self) -> str:
        """Our one line."""
        lines = [text for text in self.output.splitlines() if text.startswith("sglang-glm53: ")]
        assert len(lines) == 1, f"{len(lines)} lines of ours in:\n{self.output[-4000:]}"
        return lines[0]


def run_to_its_end(model: Path, *arguments: str, **environment: str) -> Ended:
    """`sglang serve` that is expected to end before it is ready."""
    command = [str(Path(sys.executable).parent / "sglang"), "serve", "--model-path", str(model)]
    done = subprocess.run(
        [*command, "--port", str(free_port()), *FLOAT32, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        env=on_path({**os.environ, **environment}, START),
        start_new_session=True,
    )
    assert "Uvicorn running" not in done.stdout, "it serves"
    return Ended(done.returncode, done.stdout)


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A folder to put in front of the installed packages (PYTHONPATH)."""
    folder = tmp_path / "overlay"
    folder.mkdir()
    return folder


def copy_ours(overlay: Path) -> Path:
    """A copy of the installed package in the overlay, to be broken."""
    installed = Path(sglang_glm53.__file__).parent
    copy = overlay / "sglang_glm53"
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("patches", "recipes"):
        if not (copy / name).is_dir():  # a checkout has them beside the package
            shutil.copytree(installed.parent / name, copy / name)
    return copy


def mirror_sglang(overlay: Path) -> Path:
    """The installed SGLang as a tree of links in the overlay, whose files can be replaced.

    Its byte code is linked too, or each process of the server would compile all of SGLang.
    """
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source, mirror = Path(spec.origin).parent, overlay / "sglang"
    for folder, _, files in os.walk(source):
        target = mirror / Path(folder).relative_to(source)
        target.mkdir()
        for file in files:
            (target / file).symlink_to(Path(folder) / file)
    return mirror


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


def test_import_error_in_a_model_file(overlay: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model_file = copy_ours(overlay) / "models" / "glm_moe_dsa.py"
    text = model_file.read_text()
    model_file.write_text(text.replace("import torch\n", "import torch\nimport not_there\n", 1))
    ended = run_to_its_end(tiny_checkpoint(), PYTHONPATH=str(overlay))
    assert ended.code == 1
    assert "No module named 'not_there'" in ended.line
    assert re.search(r"at sglang_glm53/models/glm_moe_dsa.py:\d+", ended.line)
    assert "Traceback" not in ended.output.partition("sglang-glm53: ")[2]


def test_renamed_sglang_symbol(overlay: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """SGLang itself still works: the method has another name in all its uses."""
    mirror = mirror_sglang(overlay)
    replace(mirror / "srt/speculative/draft_utils.py", "_create_backend(", "_make_backend(")
    ended = run_to_its_end(tiny_checkpoint(), PYTHONPATH=str(overlay))
    assert ended.code == 1
    assert re.match(
        r"sglang-glm53: patches/catalog.yaml:\d+: sglang.srt.speculative.draft_utils:"
        r"DraftBackendFactory._create_backend: symbol is missing in SGLang",
        ended.line,
    )


def test_changed_signature(overlay: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    mirror = mirror_sglang(overlay)
    replace(
        mirror / "srt/model_loader/utils.py",
        "(model_config: ModelConfig) -> Tuple",
        "(config) -> Tuple",
    )
    ended = run_to_its_end(tiny_checkpoint(), PYTHONPATH=str(overlay))
    assert ended.code == 1
    assert "get_model_architecture: parameter model_config is gone (it takes config)" in ended.line


def test_another_sglang_version(overlay: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    metadata = overlay / "sglang-0.5.99.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    ended = run_to_its_end(tiny_checkpoint(), PYTHONPATH=str(overlay))
    assert ended.code == 1
    assert "SGLang 0.5.99 is not supported" in ended.line
    assert all(version in ended.line for version in SUPPORTED)


def test_left_out_of_sglang_plugins(tiny_checkpoint: Callable[..., Path]) -> None:
    """SGLang then runs nothing of ours, not even what makes a machine without a GPU usable."""
    ended = run_to_its_end(tiny_checkpoint(), SGLANG_PLUGINS="another")
    assert ended.code == 1
    assert "GlmMoeDsaForCausalLM would be served by SGLang: SGLang did not run" in ended.line
    assert "Traceback" not in ended.output


def test_a_config_that_gives_garbage_is_refused_before_anything_is_started(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), model)
    config = model / "config.json"
    config.write_text(
        config.read_text().replace(
            '"indexer_rope_interleave": true', '"indexer_rope_interleave": false'
        )
    )
    ended = run_to_its_end(model)
    assert ended.code == 1 and "indexer_rope_interleave" in ended.line
    assert "Init parallel begin" not in ended.output


@pytest.mark.parametrize(
    "ranks", [("--tp-size", "2"), ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")]
)
def test_a_checkpoint_without_a_tensor_is_refused_by_name(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], ranks: tuple[str, ...]
) -> None:
    """Found while weights are loaded, by each rank: still one line and no traceback.

    With data parallelism there is a process between the first one and the ranks.
    """
    from safetensors.torch import load_file, save_file

    name = "model.layers.3.self_attn.o_proj.weight"
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), model)
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        if tensors.pop(name, None) is not None:
            save_file(tensors, shard, metadata={"format": "pt"})
            index = model / "model.safetensors.index.json"
            index.write_text(re.sub(rf'"{re.escape(name)}":[^,}}]*,?', "", index.read_text()))
            break
    else:
        pytest.fail(f"the checkpoint has no {name}")
    ended = run_to_its_end(model, *ranks)
    assert ended.code == 1
    assert "layers.3.self_attn.o_proj" in ended.line
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kv-cache-dtype", "fp8_e4m3"), "FP8 cache on a CPU"),
        (("--speculative-algorithm", "NGRAM"), "another speculative algorithm on a CPU"),
        ((*eagle_arguments(3, 4), "--speculative-eagle-topk", "2"), "tree of drafts on a CPU"),
        (
            ("--enable-single-batch-overlap",),
            "batch overlap: our layers run a batch as one, and SGLang's own",
        ),
    ],
)
def test_refused_options(
    tiny_checkpoint: Callable[..., Path], arguments: tuple[str, ...], told: str
) -> None:
    ended = run_to_its_end(tiny_checkpoint(), *arguments)
    assert ended.code == 1 and told in ended.line
    assert "Init parallel begin" not in ended.output


def test_on_error_stock_says_so_and_goes_on(
    overlay: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """What then happens is SGLang's: without a GPU its own GLM class cannot be built."""
    models = copy_ours(overlay) / "models" / "glm_moe_dsa.py"
    models.write_text("import not_there\n")
    ended = run_to_its_end(tiny_checkpoint(), PYTHONPATH=str(overlay), GLM53_ON_ERROR="stock")
    assert "GLM53_ON_ERROR=stock: SGLang's own class serves" in ended.line
    assert "sglang/srt/models/deepseek_v2.py" in ended.output, ended.output[-3000:]


def test_external_model_package_without_any_kernel_package(
    overlay: Path, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """SGLANG_EXTERNAL_MODEL_PACKAGE names us, and `import sgl_kernel` finds nothing."""
    kernels = overlay / "sgl_kernel"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("raise ModuleNotFoundError('No module sgl_kernel')\n")
    server = Server(
        tiny_checkpoint(),
        FLOAT32,
        tmp_path / "server",
        probe=False,
        environment={
            "PYTHONPATH": str(overlay),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_glm53.models",
        },
    )
    server.start()
    try:
        block = server.get("/server_info")["internal_states"][0]["glm53"]
        assert block["serving"] == "ours" and block["model"] == OURS
        (answer,) = server.generate([[5, 6, 7, 8]], 4)
        assert len(answer.tokens) == 4
        assert server.stop() == 0
    finally:
        server.kill()
