"""The C programs from their sources: the commands that compile them, and the hook by which an installation does.

A wheel is for one machine: this one, or that which ``WHEEL_MACHINE`` names. The pinned ``ziglang`` compiles for either,
the same source to the same bytes wherever it lies and whatever compiles there. An editable install uses the system's
compiler where that can. This module belongs to the build: no wheel has it, and nothing of the product imports it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess  # noqa: TID251  # a build, without a loop
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = ("x86_64", "aarch64")
PROGRAMS = ("guest", "lister")
TAG = "py3-none-manylinux_2_28_{}"  # our programs need no C library, but bubblewrap's wheels need this one
SUMS = "SHA256SUMS"
COMPILE = (
    *("-c", "-std=gnu11", "-Os", "-Wall", "-Wextra", "-fno-pie"),
    *("-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"),
)
LINK = ("-static", "-nostdlib", "-no-pie", "-s", "-Wl,--build-id=none")


class Compiler(NamedTuple):  # no dataclass: hatchling runs this file without making a module of it
    """The first words of each of its commands, and their whole environment (``None``: ours)."""

    words: tuple[str, ...]
    env: Mapping[str, str] | None = None


def system_compiler() -> Compiler | None:
    """The one that is called ``cc`` here, for this machine only."""
    found = shutil.which("cc")
    return Compiler((found,)) if found else None


def pinned_compiler(machine: str, cache: Path) -> Compiler | None:
    """``ziglang``, if it can be imported here. It writes nowhere but to ``cache``."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        return None
    program = Path(package.origin).with_name("zig")
    env = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    return Compiler((str(program), "cc", "-target", f"{machine}-linux-musl"), env)


def compile_program(compiler: Compiler, source: Path, name: str, target: Path) -> None:
    """Make ``target`` of a program in the folder ``source``. Raises ``CalledProcessError`` with the compiler's words.

    Compiled and linked apart, because ``ziglang`` has no headers of a C library for a program without one; and from
    within the folder, so that its place gets into no byte.
    """
    with TemporaryDirectory() as scratch:
        compiled = os.path.join(scratch, "program.o")
        for arguments in ([*COMPILE, f"{name}.c", "-o", compiled], [*LINK, compiled, "-o", str(target.absolute())]):
            subprocess.run(
                [*compiler.words, *arguments], cwd=source, env=compiler.env, check=True, capture_output=True, text=True
            )


def make_portable(source: Path, folder: Path, machine: str) -> None:
    """The programs of a wheel and their hashes into ``folder``. Raises ``RuntimeError`` without ``ziglang``."""
    with TemporaryDirectory() as cache:
        compiler = pinned_compiler(machine, Path(cache))
        if compiler is None:
            raise RuntimeError("a wheel needs the `ziglang` that pyproject.toml names")
        for name in PROGRAMS:
            compile_program(compiler, source, name, folder / f"{name}-{machine}")
    _record(folder)


def make_native(source: Path, folder: Path) -> bool:
    """This machine's programs and their hashes into ``folder``; whether there is a compiler for it.

    A compiler that fails, as one without headers does, is made up for by the next; the last one's words are raised.
    """
    machine = platform.machine()
    with TemporaryDirectory() as cache:
        found = [compiler for compiler in (system_compiler(), pinned_compiler(machine, Path(cache))) if compiler]
        if not found or machine not in MACHINES:
            return False
        for compiler in found:
            try:
                for name in PROGRAMS:
                    compile_program(compiler, source, name, folder / f"{name}-{machine}")
            except subprocess.CalledProcessError as error:
                words = error.stderr
            else:
                _record(folder)
                return True
    raise RuntimeError(f"the `{name}` program does not compile:\n{words}")


def _record(folder: Path) -> None:
    programs = sorted(path for name in PROGRAMS for path in folder.glob(f"{name}-*"))
    lines = [f"{hashlib.sha256(program.read_bytes()).hexdigest()}  {program.name}\n" for program in programs]
    (folder / SUMS).write_text("".join(lines))


def wheel_machine() -> str:
    """The machine that a wheel is made for. Raises ``RuntimeError`` where that is none that ``runner`` works on."""
    named = os.environ.get("WHEEL_MACHINE")  # noqa: TID251  # nothing else reaches a hook through pip
    machine = named or platform.machine()
    if not named and sys.platform != "linux":
        raise RuntimeError("runner works on Linux only; WHEEL_MACHINE=x86_64 or aarch64 makes a wheel for there")
    if machine not in MACHINES:
        raise RuntimeError(f"runner works on {' and '.join(MACHINES)} only, not on {machine}")
    return machine


class GuestHook(BuildHookInterface[BuilderConfig]):
    """Hatchling's hook for wheels, of which an editable install is a kind."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "runner", "guest")
        if version == "editable":
            self._put_beside(source)
            return
        machine = wheel_machine()
        self.app.display_info(f"compiling {' and '.join(PROGRAMS)} for {machine}")
        self.scratch = TemporaryDirectory()  # until the wheel is written
        make_portable(source, Path(self.scratch.name), machine)
        build_data["force_include"][self.scratch.name] = "runner/guest/bin"
        build_data["tag"], build_data["pure_python"] = TAG.format(machine), False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.scratch.cleanup()

    def _put_beside(self, source: Path) -> None:
        """Replace what an earlier installation made. A program that runs is not written to."""
        folder = source / "bin"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        if not make_native(source, folder):
            self.app.display_warning("no C compiler found: without a guest no provider is available")
