"""An Engine that starts, logs how its memory is laid out, and ends. Arguments: SGLang's."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    Engine(server_args=prepare_server_args(argv)).shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
