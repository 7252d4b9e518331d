"""A recipe: one deployment as YAML, read and held to its schema with one-line errors."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_glm53.compat.flags import Arguments
from sglang_glm53.compat.versions import SUPPORTED
from sglang_glm53.cookbook.devices import kinds
from sglang_glm53.cookbook.fields import Fields, Hardware, as_mapping, read_yaml
from sglang_glm53.errors import Glm53Error
from sglang_glm53.resources import data_folder

MINIATURE = "miniature"  # the model of a recipe that needs no download
WEIGHTS = ("fp8", "bf16", "nvfp4")
ALONE = "server"  # the role of a deployment's only server
ROUTER = "router"  # what stands in front of several servers
_NEEDS_ROUTER = {"sglang-router": "the router is a package of its own: pip install sglang-router"}


@dataclass(frozen=True)
class Server:
    """One server of a deployment.

    Attributes:
        role: "server", or "prefill" and "decode".
        arguments: flags without their dashes, in the newest spelling.
        environment: variables of its process.
    """

    role: str
    hardware: Hardware
    arguments: Arguments
    environment: dict[str, str]


@dataclass(frozen=True)
class Published:
    """A figure that somebody else reported."""

    figure: str
    source: str


@dataclass(frozen=True)
class Verified:
    """What was really run: when, with which SGLang, where, by which command, with what result."""

    date: str
    sglang: str
    hardware: str
    command: str
    result: str


@dataclass(frozen=True)
class Part:
    """A run of a part of a deployment: which part, and where its figures are kept."""

    date: str
    sglang: str
    hardware: str
    command: str
    part: str
    result: str


@dataclass(frozen=True)
class Recipe:
    """One deployment.

    Attributes:
        weights: form of the checkpoint's projections.
        sglang: versions of SGLang that it is held against.
        why: for each flag and variable, why it is there.
        needs: packages besides SGLang, and for what; a router's own is among them.
        differs: what is not as in the sources, and why.
        router: arguments of the router in front of a prefill and a decode server, else empty.
        options: arguments that a user may add, with their `why`; they are checked too.
        accepts: warnings of `glm53 doctor` that the recipe lives with: rule, and why.
        sources: where the flags were published.
        notes: what to know before it is run.
        verified: runs of the deployment itself by this project; empty where there was none.
        parts: runs of a part of it, as one rank's.
    """

    name: str
    summary: str
    model: str
    weights: str
    sglang: tuple[str, ...]
    servers: tuple[Server, ...]
    why: dict[str, str]
    needs: dict[str, str]
    differs: tuple[str, ...]
    router: Arguments
    options: dict[str, Arguments]
    accepts: dict[str, str]
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    published: tuple[Published, ...]
    verified: tuple[Verified, ...]
    parts: tuple[Part, ...]
    path: Path = field(compare=False)

    @property
    def shipped(self) -> bool:
        """Whether it is one of this package's, not a file of the user's own."""
        return self.path.parent == data_folder("recipes")

    def server(self, role: str | None = None) -> Server:
        """The server of that role; the only one where none is named.

        Raises:
            Glm53Error: no such role, or none was named where there are several.
        """
        roles = [server.role for server in self.servers]
        if role is None and len(roles) == 1:
            return self.servers[0]
        if role not in roles:
            there = ", ".join([*roles, ROUTER] if self.router else roles)
            raise Glm53Error(f"recipe {self.name}: name a role, one of {there} (--role)")
        return self.servers[roles.index(role)]

    def with_options(self, names: tuple[str, ...]) -> Recipe:
        """The recipe with some of its options switched on.

        Raises:
            Glm53Error: it has no such option.
        """
        added: Arguments = {}
        for name in names:
            if name not in self.options:
                there = ", ".join(self.options) or "it has none"
                raise Glm53Error(f"recipe {self.name} has no option {name!r} ({there})")
            added |= self.options[name]
        servers = tuple(
            replace(server, arguments=server.arguments | added) for server in self.servers
        )
        return replace(self, servers=servers)


def names() -> list[str]:
    """The recipes of this package."""
    return sorted(
        path.stem for path in data_folder("recipes").glob("*.yaml") if path.stem != "common"
    )


def load(name: str) -> Recipe:
    """The recipe of that name, or the one in a YAML file.

    Raises:
        Glm53Error: no such recipe, or one that does not meet the schema: file, field, what to do.
    """
    path = (
        Path(name) if name.endswith((".yaml", ".yml")) else data_folder("recipes") / f"{name}.yaml"
    )
    if not path.is_file() or name == "common":
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"do you mean {near[0]}? " if near else ""
        raise Glm53Error(f"no recipe {name!r}; {hint}`glm53 recipe list` names all of them")
    return read(path)


def common_why() -> dict[str, str]:
    """Why a flag is there, where it means the same in every recipe."""
    return _common().named_texts("why")


def common_accepts() -> dict[str, str]:
    """Warnings of `glm53 doctor` that every recipe lives with: rule, and why."""
    return _common().named_texts("accepts")


def _common() -> Fields:
    path = data_folder("recipes") / "common.yaml"
    return Fields(path, "", read_yaml(path))


def read(path: Path) -> Recipe:
    """The recipe in a file; see `load`."""
    content = Fields(path, "", read_yaml(path))
    content.only(*_TOP)
    shared_arguments, shared_environment = content.arguments(), content.environment()
    hardware = content.hardware()
    servers = []
    for role, fields in content.mapping("servers").items():
        own = Fields(path, f"servers.{role}.", as_mapping(path, f"servers.{role}", fields))
        own.only("arguments", "environment", "hardware")
        servers.append(
            Server(
                role,
                own.hardware() if "hardware" in own.content else hardware,
                shared_arguments | own.arguments(),
                shared_environment | own.environment(),
            )
        )
    if not servers:
        servers.append(Server(ALONE, hardware, shared_arguments, shared_environment))
    recipe = Recipe(
        name=content.text("name"),
        summary=content.text("summary"),
        model=content.text("model"),
        weights=content.text("weights"),
        sglang=tuple(content.texts("sglang")),
        servers=tuple(servers),
        why=common_why() | content.named_texts("why"),
        needs=(_NEEDS_ROUTER if content.content.get("router") else {})
        | content.named_texts("needs"),
        differs=tuple(content.texts("differs", needed=False)),
        router=content.arguments("router"),
        options={
            name: Fields(path, f"options.{name}.", {"arguments": value}).arguments()
            for name, value in content.mapping("options").items()
        },
        accepts=content.named_texts("accepts"),
        sources=tuple(content.texts("sources")),
        notes=tuple(content.texts("notes", needed=False)),
        published=tuple(Published(**row) for row in content.rows("published", Published)),
        verified=tuple(Verified(**row) for row in content.rows("verified", Verified)),
        parts=tuple(Part(**row) for row in content.rows("parts", Part)),
        path=path,
    )
    _check(recipe)
    return recipe


_TOP = (
    *("name", "summary", "model", "weights", "hardware", "sglang", "arguments", "environment"),
    *("why", "servers", "router", "options", "accepts", "sources", "notes", "published"),
    *("needs", "differs", "verified", "parts"),
)


def _check(recipe: Recipe) -> None:
    def wrong(text: str) -> Glm53Error:
        return Glm53Error(f"{recipe.path}: {text}")

    if recipe.name != recipe.path.stem:
        raise wrong(f"name is {recipe.name!r}, but the file is {recipe.path.name}; make them agree")
    if recipe.weights not in WEIGHTS:
        raise wrong(f"weights is {recipe.weights!r}; use one of {', '.join(WEIGHTS)}")
    unknown = [version for version in recipe.sglang if version not in SUPPORTED]
    if unknown or not recipe.sglang:
        raise wrong(f"sglang lists {', '.join(unknown) or 'nothing'}; use {', '.join(SUPPORTED)}")
    used = {flag for server in recipe.servers for flag in (*server.arguments, *server.environment)}
    used |= set(recipe.router) | {flag for added in recipe.options.values() for flag in added}
    for flag in sorted(used - {"port"}):
        if flag not in recipe.why:
            raise wrong(f"why.{flag} is missing; say why the recipe has it")
    if recipe.router and len(recipe.servers) < 2:
        raise wrong("router needs servers: prefill and decode")
    for server in recipe.servers:
        if server.hardware.gpu not in kinds():
            raise wrong(f"hardware.gpu is {server.hardware.gpu!r}; use one of {', '.join(kinds())}")
        for flag in server.arguments:
            if flag.startswith("-") or flag in ("model-path", "nnodes", "node-rank"):
                raise wrong(
                    f"arguments.{flag}: flags go without dashes; model and nodes are fields"
                )
