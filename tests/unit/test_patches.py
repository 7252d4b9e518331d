"""patches/: what each one cures, and `glm53 patch` on trees that fit, have drifted, are others.

The code before and after a patch is taken from the patch itself: its hunks show the functions
whole. Where SGLang 0.5.22 is installed, or unpacked in the folder that TEST_SGLANG_0522 names, the
same is shown on its files.
"""

from __future__ import annotations

import ast
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_glm53 import cli
from sglang_glm53.compat import SUPPORTED, sglang_version
from sglang_glm53.errors import Glm53Error
from sglang_glm53.patching import book, tree, unified

PATCHES = {patch.name: patch for patch in book.load()}
VERSION = "0.5.22"
MHA = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mha.py"
SHARE = "sglang/srt/layers/attention/index_topk_share.py"


def real_tree() -> Path | None:
    """The folder that holds SGLang 0.5.22's `sglang/`, where one is at hand."""
    if named := os.environ.get("TEST_SGLANG_0522"):
        return Path(named)
    return tree.find(None).root if sglang_version() == VERSION else None


def sources(name: str, path: str, after: bool) -> str:
    """The lines of a file that a patch shows, before or after it."""
    hunks = PATCHES[name].hunks[path]
    return b"\n".join(b"".join(h.after if after else h.before) for h in hunks).decode()


def function(source: str, name: str, **globals_: Any) -> Callable[..., Any]:
    """A function or method of a source, or of a part of one, compiled by itself."""
    lines = source.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith(f"def {name}("))
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next(
        (
            n
            for n in range(start + 2, len(lines))
            if lines[n].strip()
            and len(lines[n]) - len(lines[n].lstrip()) <= indent
            and not lines[n].strip().startswith(")")
        ),
        len(lines),
    )
    text = "from __future__ import annotations\n" + textwrap.dedent("\n".join(lines[start:end]))
    scope = dict(globals_)
    exec(compile(ast.parse(text), name, "exec"), scope)
    return scope[name]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put modules in the place of SGLang's, for the imports inside a function."""

    def put(name: str, **content: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    return put


# --- index-key-move ------------------------------------------------------------------------------

PAGE, KEY, SCALE = 64, 128, 4  # tokens, bytes, bytes


def token(number: int) -> bytes:
    """A token's key and scale, unlike any other's."""
    return bytes((number * 7 + k * 3 + number // 64) % 251 for k in range(KEY + SCALE))


def pages(tokens: list[bytes]) -> torch.Tensor:
    """Pages as SGLang lays them out: the keys of all tokens, then their scales."""
    rows = []
    for first in range(0, len(tokens), PAGE):
        page = tokens[first : first + PAGE]
        rows.append(b"".join(t[:KEY] for t in page) + b"".join(t[KEY:] for t in page))
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def moved(move: Callable[..., None], count: int, to: list[int], from_: list[int]) -> bool:
    """Whether `move` does what it should with `count` tokens, on a buffer beside an empty one."""
    tokens = [token(number) for number in range(count)]
    buffer = pages(tokens)
    pool = SimpleNamespace(index_kpool=1, index_page_size=PAGE, index_head_dim=KEY)
    cache = SimpleNamespace(
        pool=pool, buffer=[buffer, torch.zeros(0, buffer.shape[1])], _kernel_view=lambda b: b
    )
    move(cache, torch.tensor(to), torch.tensor(from_))
    wanted = list(tokens)
    for target, source in zip(to, from_, strict=True):
        wanted[target] = tokens[source]
    return torch.equal(buffer, pages(wanted))


def show_index_key_move(before: str, after: str, modules: Callable[..., None]) -> None:
    modules("sglang.srt.layers.attention.dsa.utils", aiter_can_use_preshuffle_paged_mqa=bool)
    stock, ours = function(before, "move"), function(after, "move")
    assert not moved(stock, 256, [1], [2]), "the fault: whole pages are copied"
    with pytest.raises(IndexError):
        moved(stock, 256, [70], [130])
    assert moved(ours, 256, [1], [2])
    assert moved(ours, 256, [70, 71, 0, 255], [130, 70, 255, 3])
    assert moved(ours, 256, [], [])


def test_index_key_move(modules: Callable[..., None]) -> None:
    path = "sglang/srt/mem_cache/index_key_cache.py"
    texts = [sources("index-key-move", path, after) for after in (False, True)]
    show_index_key_move(*texts, modules)


def test_a_preshuffled_layout_is_refused(modules: Callable[..., None]) -> None:
    modules("sglang.srt.layers.attention.dsa.utils", aiter_can_use_preshuffle_paged_mqa=lambda: 1)
    after = sources("index-key-move", "sglang/srt/mem_cache/index_key_cache.py", True)
    with pytest.raises(RuntimeError, match="preshuffled"):
        moved(function(after, "move"), 128, [1], [2])


# --- ragged-mtp-seed -----------------------------------------------------------------------------

TABLE = torch.tensor([[640, 641, 642, 0, 0], [128, 129, 130, 131, 132]], dtype=torch.int32)
LENGTHS = [3, 5]
# The first request's positions 2 and 0, the second's 0 and 4, laid end to end.
RAGGED = torch.tensor([[2, 0, -1], [3, 7, -1]], dtype=torch.int32)
SLOTS = [[642, 640, -1], [128, 132, -1]]


def backend(method: str, *, flattened: bool, fused: bool = True) -> SimpleNamespace:
    flat = torch.cat([TABLE[n, :length] for n, length in enumerate(LENGTHS)])
    metadata = SimpleNamespace(
        page_table_1=TABLE,
        page_table_1_flattened=flat if flattened else None,
        indexer_seq_lens_cpu=torch.tensor(LENGTHS),
    )
    return SimpleNamespace(
        use_fused_topk=fused,
        forward_metadata=metadata,
        get_topk_transform_method=lambda mode: SimpleNamespace(name=method),
    )


def seeded(source: str, rows: Callable[..., Any] | None, select: torch.Tensor | None) -> list:
    """What `publish` leaves in the buffer that seeds the draft."""
    seed = torch.full((2, 3), -9, dtype=torch.int32)
    spec = SimpleNamespace(dsa_seed_topk_select=select)
    state = SimpleNamespace(
        _topk_indices=RAGGED,
        should_publish=True,
        enabled=False,
        _seed_buf=seed,
        _forward_batch=SimpleNamespace(spec_info=spec, forward_mode=None),
    )
    # The hunk starts inside the method.
    body = source if "def publish(" in source else "    def publish(self):\n" + source
    function(body, "publish", glm53_physical_rows=rows)(state)
    return seed.tolist()


def show_ragged_mtp_seed(before: str, after: str, modules: Callable[..., None]) -> None:
    used: list[Any] = []
    modules(MHA.removesuffix(".py").replace("/", "."), resolve_attn_backend=lambda b: used[-1])
    rows = function(after, "glm53_physical_rows")
    for select, wanted in ((None, SLOTS), (torch.tensor([1, 0]), SLOTS[::-1])):
        used.append(backend("RAGGED", flattened=False))
        assert seeded(before, None, select) != wanted, "the fault: positions in place of slots"
        for flattened in (False, True):
            used.append(backend("RAGGED", flattened=flattened))
            assert seeded(after, rows, select) == wanted
    for other in (
        backend("PAGED", flattened=True),
        backend("RAGGED", flattened=True, fused=False),
        SimpleNamespace(),
    ):
        used.append(other)
        assert seeded(after, rows, None) == RAGGED.tolist(), "what is right stays"


def test_ragged_mtp_seed(modules: Callable[..., None]) -> None:
    texts = [sources("ragged-mtp-seed", SHARE, after) for after in (False, True)]
    show_ragged_mtp_seed(*texts, modules)


# --- on SGLang's own files -----------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A copy of the patched files of SGLang 0.5.22."""
    root = real_tree()
    if root is None:
        pytest.skip("no SGLang 0.5.22 here; TEST_SGLANG_0522 names a folder with its sglang/")
    for patch in PATCHES.values():
        for path in patch.files:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, tmp_path / path)
    version = tmp_path / "sglang" / "_version.py"
    version.write_text(f"__version__ = version = '{VERSION}'\n")
    return tmp_path


def test_the_patches_fit_the_real_files(real: Path, modules: Callable[..., None]) -> None:
    before = {path: (real / path).read_text() for p in PATCHES.values() for path in p.files}
    assert cli.main(["patch", "apply", "--tree", str(real)]) == 0
    after = {path: (real / path).read_text() for path in before}
    for path in before:
        assert after[path] != before[path]
        compile(after[path], path, "exec")
    path = "sglang/srt/mem_cache/index_key_cache.py"
    show_index_key_move(before[path], after[path], modules)
    show_ragged_mtp_seed(before[SHARE], after[SHARE], modules)
    assert "glm53_physical_rows(forward_batch, src)" in after[MHA]
    assert cli.main(["patch", "revert", "--tree", str(real)]) == 0
    assert {path: (real / path).read_text() for path in before} == before


# --- the command ---------------------------------------------------------------------------------

FILE = "sglang/srt/thing.py"
BEFORE = b"def f():\n    return 1\n\n\ndef g():\n    return 2\n"
DIFF = b"""--- a/sglang/srt/thing.py
+++ b/sglang/srt/thing.py
@@ -1,3 +1,4 @@
 def f():
-    return 1
+    # cured
+    return 10
 
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one file, and one patch of it."""
    import hashlib

    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "a.patch").write_bytes(DIFF)
    (folder / "patches.yaml").write_text(
        f"- {{name: cure, versions: ['{VERSION}'], patch: a.patch, why: w, when: w, upstream: u, "
        f"test: t, files: {{{FILE}: {hashlib.sha256(BEFORE).hexdigest()}}}}}\n"
    )
    monkeypatch.setattr(book, "data_folder", lambda name: folder)
    root = tmp_path / "python"
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_bytes(BEFORE)
    (root / FILE).chmod(0o640)
    (root / "sglang" / "_version.py").write_text(f"__version__ = version = '{VERSION}+cu1'\n")
    return root


def told(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    assert cli.main(["patch", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_there_and_back(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = small / FILE
    os.link(file, small / "in a cache")
    assert "cure: would be applied" in told(capsys, 0, "apply", "--dry-run", "--tree", small)
    assert file.read_bytes() == BEFORE
    assert "cure: applied" in told(capsys, 0, "apply", "--tree", small)
    assert (
        file.read_bytes() == b"def f():\n    # cured\n    return 10\n\n\ndef g():\n    return 2\n"
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert (small / "in a cache").read_bytes() == BEFORE, "another link keeps its bytes"
    assert "cure: applied" in told(capsys, 0, "apply", "cure", "--tree", small.parent)
    assert "cure               applied" in told(capsys, 0, "status", "--tree", small / "sglang")
    assert "+    return 1\n" in told(capsys, 0, "revert", "--dry-run", "--tree", small)
    assert "cure: reverted" in told(capsys, 0, "revert", "--tree", small)
    assert file.read_bytes() == BEFORE
    assert "cure: not applied" in told(capsys, 0, "revert", "--tree", small)
    assert not [p for p in file.parent.iterdir() if p.name.startswith(".")], "nothing is left over"


@pytest.mark.parametrize("applied", [False, True])
def test_a_drifted_file_is_refused(
    applied: bool, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other byte, even where no hunk looks."""
    file = small / FILE
    if applied:
        told(capsys, 0, "apply", "--tree", small)
    file.write_bytes(file.read_bytes().replace(b"return 2", b"return 3"))
    kept = file.read_bytes()
    for action in ("apply", "revert"):
        said = told(capsys, 1, action, "--tree", small)
        assert str(file) in said and "nothing was written" in said and said.count("\n") == 1
    assert file.read_bytes() == kept
    assert cli.main(["patch", "status", "--tree", str(small)]) == 1
    assert "drifted" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_command_that_was_killed_between_two_files_is_completed(
    action: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = FILE.replace(".py", "_2.py")
    folder = book.data_folder("patches")
    (folder / "a.patch").write_bytes(DIFF + DIFF.replace(FILE.encode(), second.encode()))
    rows = (folder / "patches.yaml").read_text()
    sha = rows.rpartition(": ")[2].rstrip("}\n")
    (folder / "patches.yaml").write_text(rows.replace(sha, f"{sha}, {second}: {sha}"))
    (small / second).write_bytes(BEFORE)
    told(capsys, 0, "apply", "--tree", small)
    (small / second).write_bytes(BEFORE)
    assert cli.main(["patch", "status", "--tree", str(small)]) == 1
    said = capsys.readouterr().out
    assert "some files only" in said and "apply or revert cure completes it" in said
    told(capsys, 0, action, "--tree", small)
    assert (small / FILE).read_bytes() == (small / second).read_bytes()
    assert ((small / FILE).read_bytes() == BEFORE) is (action == "revert")


def test_another_version_is_told(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "sglang" / "_version.py").write_text("__version__ = version = '9.9.9'\n")
    (small / FILE).write_bytes(b"another\n")
    assert "cure: not for this version" in told(capsys, 0, "apply", "--tree", small)
    assert f"cure is for SGLang {VERSION}" in told(capsys, 1, "apply", "cure", "--tree", small)
    assert "not for this version" in told(capsys, 0, "status", "--tree", small)


@pytest.mark.parametrize("inside", ["", "sglang"])
def test_the_tree_is_found_from_inside(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    monkeypatch.chdir(small / inside)
    assert "not applied" in told(capsys, 0, "status", "--tree", ".")


def test_a_version_that_is_no_text_is_unknown(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "sglang" / "_version.py").write_bytes(b"\xff\xfe")
    assert "SGLang of unknown version" in told(capsys, 0, "status", "--tree", small)


def test_what_is_not_there_is_one_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no patch 'other'" in told(capsys, 1, "apply", "other", "--tree", small)
    assert "holds no SGLang" in told(capsys, 1, "status", "--tree", small / "sglang" / "srt")
    (small / FILE).unlink()
    assert str(small / FILE) in told(capsys, 1, "apply", "--tree", small)


def test_all_or_none(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written puts those before it back."""
    other = small / "sglang" / "other.py"
    other.write_bytes(b"old\n")
    real_replace = tree._replace

    def fail(path: Path, content: bytes) -> None:
        if path == other and content != b"old\n":
            raise OSError("no space")
        real_replace(path, content)

    monkeypatch.setattr(tree, "_replace", fail)
    with pytest.raises(OSError, match="no space"):
        tree.write([tree.Change(small / FILE, b"new\n"), tree.Change(other, b"new\n")])
    assert (small / FILE).read_bytes() == BEFORE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"hello\n", "line 1 is no part"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n", "fewer lines"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n?one\n", "fewer lines"),
    ],
    ids=["no diff", "cut", "another sign"],
)
def test_what_is_no_diff_is_told(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        unified.parse(text)


def test_a_hunk_fits_at_its_line_alone() -> None:
    hunks = unified.parse(DIFF)[FILE]
    assert unified.apply(b"# one line more\n" + BEFORE, hunks) is None
    assert unified.apply(BEFORE, hunks) is not None


def test_every_patch_is_for_a_supported_version_and_names_its_test() -> None:
    assert {"index-key-move", "ragged-mtp-seed"} <= set(PATCHES)
    for patch in PATCHES.values():
        assert set(patch.versions) <= set(SUPPORTED)
        assert patch.hunks, "the diff is read, and of the files that the row says"
        path, _, name = patch.test.partition("::")
        assert path == "tests/unit/test_patches.py" and name in globals()


def test_no_file_is_in_two_patches_of_a_version() -> None:
    """The state of one would hide that of the other."""
    seen = [(v, path) for p in PATCHES.values() for v in p.versions for path in p.files]
    assert len(seen) == len(set(seen))


def test_a_row_with_a_missing_field_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "patches.yaml").write_text("- {name: a}\n")
    with pytest.raises(Glm53Error, match="row 1 must have"):
        book.load(tmp_path)
