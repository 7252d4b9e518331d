"""The commands of a recipe, as they are pasted into a shell, for a version of SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_glm53.compat.flags import Arguments, Value, translate
from sglang_glm53.cookbook.recipe import MINIATURE, ROUTER, Recipe, Server
from sglang_glm53.errors import Glm53Error

SERVER_PORT = 30000
MASTER_PORT = 20000  # where the ranks of several machines find each other
WIDTH = 100


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        title: which server, and on which machine, it starts.
        program: words before the arguments.
        argv: the arguments.
        environment: variables that it is given.
        server: the recipe's server; None for the router.
    """

    title: str
    program: tuple[str, ...]
    argv: tuple[str, ...]
    environment: dict[str, str]
    server: Server | None = None

    def shell(self) -> str:
        """For a shell: a flag and its values a line. `$NAME` in an address is left to the shell."""
        head = [f"{name}={quote(value)}" for name, value in self.environment.items()]
        lines = [" ".join([*head, *self.program])]
        for word in self.argv:
            if word.startswith("--"):
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {quote(word)}"
        return " \\\n".join(_joined(lines))


def server_commands(
    recipe: Recipe, version: str, *, model: str | None = None, addresses: Mapping[str, str]
) -> list[Command]:
    """One command for each server and machine.

    Args:
        version: of SGLang, whose spelling of the flags is used.
        model: path or repository of the checkpoint; default: the recipe's.
        addresses: by upper-case name (NODE0, PREFILL, DECODE); others stay shell variables.
    """
    commands = []
    for server in recipe.servers:
        several = len(recipe.servers) > 1
        for node in range(server.hardware.nodes):
            path = model or (recipe.model if recipe.model != MINIATURE else "miniature")
            argv = ["--model-path", path, *argv_of(server.arguments, version)]
            if server.hardware.nodes > 1:
                first = f"{_address('NODE0', addresses)}:{MASTER_PORT}"
                argv += ["--nnodes", str(server.hardware.nodes), "--node-rank", str(node)]
                argv += ["--dist-init-addr", first]
            if several and "port" not in server.arguments:
                argv += ["--port", str(SERVER_PORT)]
            title = server.role if several else "server"
            if server.hardware.nodes > 1:
                title += f", machine {node + 1} of {server.hardware.nodes}"
            commands.append(
                Command(title, ("sglang", "serve"), tuple(argv), dict(server.environment), server)
            )
    return commands


def router_command(recipe: Recipe, *, addresses: Mapping[str, str]) -> Command | None:
    """The router in front of a prefill and a decode server; None where the recipe has none."""
    if not recipe.router:
        return None
    argv = _words(recipe.router)
    for server in recipe.servers:
        port = server.arguments.get("port", SERVER_PORT)
        argv += [f"--{server.role}", f"http://{_address(server.role.upper(), addresses)}:{port}"]
        if server.role == "prefill":
            argv.append(str(server.arguments["disaggregation-bootstrap-port"]))
    return Command(ROUTER, ("python", "-m", "sglang_router.launch_router"), tuple(argv), {})


def placeholders(recipe: Recipe) -> tuple[str, ...]:
    """The addresses that the recipe's commands ask for."""
    first = ("NODE0",) if any(each.hardware.nodes > 1 for each in recipe.servers) else ()
    return (*first, *(each.role.upper() for each in recipe.servers if recipe.router))


def choose(recipe: Recipe, found: Sequence[Command], role: str | None, node: int | None) -> Command:
    """The command of one server's machine, or the router's, among all of the deployment.

    Raises:
        Glm53Error: no such role or machine, or none was named where there are several.
    """
    if role == ROUTER:
        if found[-1].server is not None:
            raise Glm53Error(f"recipe {recipe.name} has no router")
        return found[-1]
    server = recipe.server(role)
    count = server.hardware.nodes
    if node is None and count > 1:
        last = count - 1
        raise Glm53Error(
            f"recipe {recipe.name} runs on {count} machines; name one: --node 0 to --node {last}"
        )
    if not 0 <= (node or 0) < count:
        machines = "1 machine" if count == 1 else f"{count} machines"
        raise Glm53Error(f"recipe {recipe.name} has {machines}; --node counts from 0")
    return [each for each in found if each.server == server][node or 0]


def argv_of(arguments: Mapping[str, Value], version: str) -> list[str]:
    """Words of a command line, in the spelling of `version`."""
    return _words(translate(arguments, version))


def quote(word: str) -> str:
    """A word for the shell; an address with a variable in double quotes."""
    return f'"{word}"' if "${" in word else shlex.quote(word)


def _words(arguments: Arguments) -> list[str]:
    words: list[str] = []
    for flag, value in arguments.items():
        words.append(f"--{flag}")
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, tuple) else (value,))]
    return words


def _address(name: str, addresses: Mapping[str, str]) -> str:
    return addresses.get(name) or f"${{{name}:?set it to the address of that machine}}"


def _joined(lines: Sequence[str]) -> list[str]:
    """Flags on as few lines as fit."""
    joined = [lines[0]]
    for line in lines[1:]:
        if len(joined) > 1 and len(joined[-1]) + len(line) - 1 <= WIDTH - 2:
            joined[-1] += line[1:]
        else:
            joined.append(line)
    return joined
