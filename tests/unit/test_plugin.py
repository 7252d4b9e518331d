"""Failing loudly: one line, exit code 1, through SGLang's own `except Exception`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
from fresh_process import run

from sglang_glm53 import errors, plugin, registration
from sglang_glm53.errors import Glm53Error


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLM53_ON_ERROR", "GLM53_DEBUG", errors._PARENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(errors, "_degraded", None)
    monkeypatch.setattr(errors, "_code", None)


def test_importing_the_package_is_instant_and_imports_nothing() -> None:
    done = run(
        """
        import sys, time
        began = time.perf_counter()
        import sglang_glm53
        took = time.perf_counter() - began
        heavy = {"torch", "sglang", "yaml", "transformers"} & set(sys.modules)
        print(took < 0.1, sorted(heavy), sglang_glm53.__version__)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.stdout.split(maxsplit=2)[:2] == ["True", "[]"], done


@pytest.mark.parametrize("name", ["plugin", "host", "errors", "tripwire"])
def test_entry_points_import_nothing_of_ours(name: str) -> None:
    done = run(
        f"""
        import sys
        import sglang_glm53.{name}
        print(sorted(m for m in sys.modules if m.startswith("sglang_glm53.")))
        """
    )
    assert done.stdout.strip() == f"['sglang_glm53.{name}']"


def test_register_ends_the_process_past_except_exception(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'nothing'")

    monkeypatch.setattr(registration, "register_all", broken)
    with pytest.raises(SystemExit) as caught:
        try:
            plugin.register()
        except Exception:  # what SGLang does around a plugin
            pytest.fail("swallowed")
    assert caught.value.code == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("sglang-glm53: registering with SGLang: ModuleNotFoundError: No module")


def test_our_own_error_is_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        errors.failed(Glm53Error("what at where;\n  do this"), doing="anything")
    assert capfd.readouterr().err == "sglang-glm53: what at where; do this\n"


def test_on_error_stock_goes_on_and_tells_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLM53_ON_ERROR", "stock")
    errors.failed(Glm53Error("first"), doing="x")
    errors.failed(Glm53Error("second"), doing="x")
    assert errors.degraded() == "first"
    assert capfd.readouterr().err == (
        "sglang-glm53: first; GLM53_ON_ERROR=stock: SGLang's own class serves\n"
    )


def test_describe_names_our_innermost_line() -> None:
    try:
        registration.catalog.parse("- [1")
    except Exception as error:
        line = errors.describe(error)
    assert " at sglang_glm53/catalog.py:" in line and "\n" not in line


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLM53_DEBUG", "1")
    with pytest.raises(SystemExit):
        try:
            raise ValueError("inner")
        except ValueError as error:
            errors.failed(error, doing="testing")
    assert "Traceback" in capfd.readouterr().err


def test_a_thread_ends_the_whole_process() -> None:
    done = run(
        """
        import threading, time
        from sglang_glm53.errors import fatal
        threading.Thread(target=fatal, args=("from a thread",)).start()
        time.sleep(60)
        """
    )
    assert (done.returncode, done.stderr) == (1, "sglang-glm53: from a thread\n")
    assert threading.active_count() >= 1


def test_a_child_process_tells_its_parent_by_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            from sglang_glm53.errors import announce_process, fatal

            def worker(announced):
                announce_process()
                fatal("in the child")

            if __name__ == "__main__":
                codes = []
                for announced in (False, True):
                    if announced:
                        announce_process()
                    process = multiprocessing.get_context("spawn").Process(
                        target=worker, args=(announced,)
                    )
                    process.start()
                    process.join()
                    codes.append(process.exitcode)
                print(codes)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == f"[1, {errors.TOLD}]", done.stderr


@pytest.mark.parametrize(("rank", "slept"), [(0, []), (1, [errors.FIRST_RANK_SECONDS])])
def test_other_ranks_let_the_first_one_speak(
    monkeypatch: pytest.MonkeyPatch, rank: int, slept: list[float]
) -> None:
    group = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank
    )
    waited: list[float] = []
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors, "_code", errors.TOLD)
    with pytest.raises(SystemExit):
        errors.fatal("x")
    assert waited == slept


def test_our_line_is_not_appended_to_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=2), pytest.raises(SystemExit):
        errors.fatal("x")
    assert "sglang-glm53: x" in capfd.readouterr().err.splitlines()


def test_the_guard_ends_a_process_that_sglang_left_us_out_of() -> None:
    """SGLANG_PLUGINS names another plugin: SGLang runs nothing of ours, the tripwire does.

    Two children of one process that has imported SGLang: in one the user wants SGLang's class on
    an error.
    """
    code = """
        import os
        import types
        import sglang.srt.model_loader.utils as utils

        names = ["GlmMoeDsaForCausalLM"]
        config = types.SimpleNamespace(
            hf_config=types.SimpleNamespace(architectures=names), quantization=None, model_impl=None
        )
        for wish in ("stock", ""):
            child = os.fork()
            if child == 0:
                os.environ["GLM53_ON_ERROR"] = wish
                try:
                    print("served by", utils.get_model_architecture(config)[0].__module__)
                except Exception as error:
                    print("swallowed", error)
                break
            print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    done = run(code, SGLANG_PLUGINS="another")
    said = ["served by sglang.srt.models.glm4_moe", "ended with 0", "ended with 1"]
    assert done.stdout.splitlines() == said, done.stderr
    first, second = [x for x in done.stderr.splitlines() if x.startswith("sglang-glm53: ")]
    assert first.endswith("GLM53_ON_ERROR=stock: SGLang's own class serves")
    assert second.startswith(
        "sglang-glm53: GlmMoeDsaForCausalLM would be served by sglang.srt.models.glm4_moe."
    )
    assert "SGLANG_PLUGINS" in second
