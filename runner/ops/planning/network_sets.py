"""Hosts that tools are configured to use: asked of the tool on this host, and read from the repository.

What this host's own configuration names may be a private mirror. What a repository's configuration names is public, or
it is not reached. Passwords and tokens in a URL stay here.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import trio
from msgspec import Struct, convert, field

from runner.core.errors import BadValue
from runner.core.hosts import NetworkRule, NetworkSpec, canonical_host
from runner.core.sanitize import excerpt

LIMIT = 256 << 10  # bytes of a file of the repository
_SECONDS = 20.0
_PORTS = {"http": 80, "https": 443, "ssh": 22, "git": 9418}
_SCP = re.compile(r"(?:[^@/:]+@)?([^/:@]{2,}):(?!//)")
_USER = re.compile(r"(?<=://)[^/?#]*@")
_APT = re.compile(r"^deb(?:-src)?\s+(?:\[[^\]]*\]\s+)?(\S+)", re.MULTILINE)
_PYPI = ("https://pypi.org", "https://files.pythonhosted.org")
_INDEX = re.compile(r"^\s*(?:-i|--index-url|--extra-index-url|-f|--find-links)[ =]+(\S+)", re.MULTILINE)

F = TypeVar("F")
Read = Callable[[str], Awaitable[bytes | None]]


class _Index(Struct):
    url: str
    default: bool = False


class _UvPip(Struct, rename="kebab"):
    index_url: str | None = None


class _Uv(Struct, rename="kebab"):
    """The part of uv's configuration that names hosts."""

    index: list[_Index] = []
    index_url: str | None = None
    extra_index_url: list[str] = []
    find_links: list[str] = []
    pip: _UvPip = field(default_factory=_UvPip)

    @property
    def main(self) -> str | None:
        """Return the index that takes the place of PyPI."""
        return next((one.url for one in self.index if one.default), None) or self.index_url or self.pip.index_url

    @property
    def more(self) -> list[str]:
        named = [one.url for one in self.index if not one.default]
        return [*named, *self.extra_index_url, *self.find_links]


class _Tool(Struct):
    uv: _Uv = field(default_factory=_Uv)


class _Project(Struct):
    tool: _Tool = field(default_factory=_Tool)


class _Source(Struct):
    registry: str = ""
    git: str = ""


class _Registry(Struct):
    index: str = ""


class _Cargo(Struct):
    """The part of cargo's configuration that names hosts."""

    source: dict[str, _Source] = {}
    registries: dict[str, _Registry] = {}

    @property
    def urls(self) -> list[str]:
        """Return where sources and registries are."""
        return [
            *(one.registry or one.git for one in self.source.values()),
            *(one.index for one in self.registries.values()),
        ]


class Look(Struct, frozen=True, kw_only=True):
    """A look at this host and at one repository.

    ``read`` reads a file of the commit. ``source`` is the URL that is cloned, or the directory of the repository.
    """

    variables: Mapping[str, str]
    read: Read
    source: str | None

    async def ask(self, *argv: str) -> str:
        """Return what a tool of this host prints, as it is configured for its user; nothing without the tool."""
        program = shutil.which(argv[0], path=self.variables.get("PATH"))
        if program is None:
            return ""
        with trio.move_on_after(_SECONDS):
            done = await trio.run_process(
                [program, *argv[1:]],
                cwd="/",
                env=dict(self.variables),
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
            return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
        raise BadValue(f"`{argv[0]}` has not said in {_SECONDS:g}s which hosts it is configured to use")

    async def text(self, name: str) -> str:
        """Return a file of the repository."""
        return (await self.read(name) or b"").decode(errors="replace")

    async def toml(self, form: type[F], name: str) -> F:
        return _toml(form, await self.text(name), name)

    def own_toml(self, form: type[F], *places: str) -> F:
        """Return the first of some files of this host that is there."""
        path = next((path for path in map(Path, places) if path.is_absolute() and path.is_file()), None)
        return _toml(form, path.read_text(errors="replace") if path is not None else "", str(path))


class _Set:
    """The hosts of one tool, as they are found."""

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self._rules: dict[tuple[str, int], NetworkRule] = {}
        self.environment: dict[str, str] = {}

    def add(self, urls: Sequence[str], *, default: bool = False) -> list[str]:
        """Add the hosts that this host's configuration names; return the URLs that lead to one."""
        return self._add(urls, "default" if default else "this host's configuration", private=True)

    def add_theirs(self, urls: Sequence[str], file: str) -> None:
        """Add the hosts that a file of the repository names."""
        self._add(urls, f"{file} of the repository", private=False)

    def _add(self, urls: Sequence[str], where: str, *, private: bool) -> list[str]:
        used = []
        for url in urls:
            if (place := _place(url)) is None:
                continue  # a directory of this host, which no workspace sees
            host = canonical_host(place[0])
            if host is None:
                raise BadValue(f"`{excerpt(_public(url))}`, which `{self._tool}` is configured to use, names no host")
            used.append(_public(url))
            self._rules.setdefault((host, place[1]), NetworkRule(host, place[1], private, where))
        return used

    def spec(self) -> NetworkSpec:
        return NetworkSpec(tuple(self._rules.values()), environment=self.environment)


async def find_network_sets(names: Sequence[str], look: Look) -> dict[str, NetworkSpec]:
    """Return the hosts of each tool. Raises ``BadValue`` for configuration that cannot be read."""
    found = {name: _Set(name) for name in names}
    for name, into in found.items():
        await _TOOLS[name](look, into)
    return {name: into.spec() for name, into in found.items()}


async def _pip(look: Look, found: _Set) -> None:
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for line in (await look.ask("pip", "config", "list")).splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = str(ast.literal_eval(value))
    variables = {name: value for name, value in look.variables.items() if name.startswith("PIP_")}
    own = {name.removeprefix("PIP_").lower().replace("_", "-"): value for name, value in variables.items()}
    values = {**sections["global"], **sections["install"], **own}
    index = found.add([values["index-url"]]) if "index-url" in values else []
    links, extra = found.add(values.get("find-links", "").split()), found.add(values.get("extra-index-url", "").split())
    if "index-url" not in values and values.get("no-index") not in ("1", "true"):
        found.add(_PYPI, default=True)
    found.add_theirs(_INDEX.findall(await look.text("requirements.txt")), "requirements.txt")
    named = {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": extra, "PIP_FIND_LINKS": links}
    found.environment |= {name: " ".join(urls) for name, urls in named.items() if urls}
    if hosts := values.get("trusted-host"):
        found.environment["PIP_TRUSTED_HOST"] = " ".join(hosts.split())


async def _uv(look: Look, found: _Set) -> None:
    variables = look.variables
    base = variables.get("XDG_CONFIG_HOME") or f"{variables.get('HOME', '')}/.config"
    mine = look.own_toml(_Uv, variables.get("UV_CONFIG_FILE", ""), f"{base}/uv/uv.toml", "/etc/uv/uv.toml")
    own_file = await look.toml(_Uv, "uv.toml")
    theirs = own_file if own_file != _Uv() else (await look.toml(_Project, "pyproject.toml")).tool.uv
    named = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL") or mine.main
    if named is None and theirs.main is None:
        found.add(_PYPI, default=True)
    index = found.add([named]) if named else []
    extra = found.add([*(variables.get("UV_INDEX") or variables.get("UV_EXTRA_INDEX_URL") or "").split(), *mine.more])
    found.add_theirs([*([theirs.main] if theirs.main else []), *theirs.more], "uv.toml or pyproject.toml")
    if index and theirs.main is None:
        found.environment["UV_DEFAULT_INDEX"] = index[0]
    if extra:
        found.environment["UV_INDEX"] = " ".join(extra)


async def _npm(look: Look, found: _Set) -> None:
    answer = await look.ask("npm", "config", "list", "--json")
    mine = json.loads(answer) if answer else {}
    lines = [line.partition("=") for line in (await look.text(".npmrc")).splitlines()]
    theirs = {name.strip(): value.strip().strip("\"'") for name, _, value in lines}
    registry = mine.get("registry") or look.variables.get("npm_config_registry")
    if "registry" in theirs:
        found.add_theirs([theirs["registry"]], ".npmrc")
    elif registry is None:
        raise _absent("npm")
    elif used := found.add([str(registry)]):
        found.environment["npm_config_registry"] = used[0]
    found.add([str(url) for name, url in mine.items() if name.endswith(":registry")])
    found.add_theirs([url for name, url in theirs.items() if name.endswith(":registry")], ".npmrc")


async def _go(look: Look, found: _Set) -> None:
    names = ("GOPROXY", "GOSUMDB", "GOPRIVATE", "GONOPROXY", "GONOSUMDB", "GOINSECURE")
    answer = await look.ask("go", "env", "-json", *names)
    mine = json.loads(answer) if answer else {}
    default = {"GOPROXY": "https://proxy.golang.org,direct", "GOSUMDB": "sum.golang.org"}
    values = {name: mine.get(name) or look.variables.get(name) or default.get(name, "") for name in names}
    name, _, url = values["GOSUMDB"].partition(" ")
    found.add(re.split("[,|]", values["GOPROXY"]), default=values["GOPROXY"] == default["GOPROXY"])
    if name != "off":
        found.add([url or f"https://{name.partition('+')[0]}"], default=values["GOSUMDB"] == default["GOSUMDB"])
    values["GOPROXY"] = re.sub("[^,|]+", lambda url: _public(url[0]), values["GOPROXY"])
    found.environment |= {name: value for name, value in values.items() if value != default.get(name, "")}


async def _cargo(look: Look, found: _Set) -> None:
    home = look.variables.get("CARGO_HOME") or f"{look.variables.get('HOME', '')}/.cargo"
    mine = look.own_toml(_Cargo, f"{home}/config.toml", f"{home}/config")
    theirs = await look.toml(_Cargo, ".cargo/config.toml")
    found.add(mine.urls)
    found.add_theirs(theirs.urls, ".cargo/config.toml")
    if not {"crates-io"} & {*mine.source, *theirs.source}:
        found.add(["https://index.crates.io", "https://static.crates.io"], default=True)
    for name, registry in mine.registries.items():
        if _place(registry.index):
            found.environment[f"CARGO_REGISTRIES_{name.upper().replace('-', '_')}_INDEX"] = _public(registry.index)


async def _apt(look: Look, found: _Set) -> None:
    asked = (await look.ask("apt-get", "indextargets", "--format", "$(REPO_URI)")).split()
    theirs = _APT.findall(await look.text("sources.list"))
    if not asked and not theirs:
        raise _absent("apt")
    found.add(asked)
    found.add_theirs(theirs, "sources.list")


async def _git(look: Look, found: _Set) -> None:
    if look.source is not None and not look.source.startswith("/"):
        found.add([look.source])
    elif look.source is not None:
        said = await look.ask("git", "-C", look.source, "config", "--get-regexp", r"^remote\..*\.url$")
        found.add([line.partition(" ")[2] for line in said.splitlines()])
    for name in (".gitmodules", ".lfsconfig"):
        urls = re.findall(r"^\s*url\s*=\s*(\S+)", await look.text(name), re.MULTILINE)
        found.add_theirs([url for url in urls if not url.startswith(("./", "../"))], name)


_TOOLS = {"apt": _apt, "cargo": _cargo, "git": _git, "go": _go, "npm": _npm, "pip": _pip, "uv": _uv}


def _absent(tool: str) -> BadValue:
    return BadValue(f"nothing on this host says which hosts `{tool}` uses", hint=f"install `{tool}`, or name hosts")


def _place(url: str) -> tuple[str, int] | None:
    """Return the host and port of a URL, or of git's ``HOST:PATH``; ``None`` for what is on this host."""
    try:
        parts = urlsplit(url.removeprefix("sparse+").removeprefix("registry+"))
        if parts.scheme in _PORTS:
            return parts.hostname or "", parts.port or _PORTS[parts.scheme]
    except ValueError:
        return "", 0
    found = _SCP.match(url) if "://" not in url else None
    return (found[1], 22) if found else None


def _public(url: str) -> str:
    """Return a URL without its user and password."""
    return _USER.sub("", url, count=1)


def _toml(form: type[F], text: str, name: str) -> F:
    try:
        return convert(tomllib.loads(text), form)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"`{name}` cannot be read: {excerpt(str(error))}") from error
