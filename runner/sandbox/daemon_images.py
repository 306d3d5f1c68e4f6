"""The part of a provider that has images: those of its daemon, and of the registries that the daemon can ask."""

from __future__ import annotations

from collections.abc import Mapping

from runner.core.errors import ImageMissing
from runner.core.model import Pull
from runner.ports.provider import ImageStart, PullReport
from runner.sandbox.docker_api import Engine


class DaemonImages:
    _engine: Engine

    async def image(self, name: str, when: Pull = "missing") -> str:
        from runner.sandbox.image_registry import pin_of, resolve

        is_id = name.startswith("sha256:")
        if when != "always" or is_id:
            try:
                return pin_of(name, await self._engine.image(name))
            except ImageMissing:
                if when == "never" or is_id:
                    raise
        return await resolve(self._engine, name)

    async def pull(self, image: str, name: str, report: PullReport | None = None) -> None:
        from runner.sandbox.image_registry import pull, split_name

        try:
            await self._engine.image(image)
        except ImageMissing:
            if image.startswith("sha256:"):
                raise
            await pull(self._engine, image, report)
            if "@" not in split_name(name)[1]:
                await self._name(image, name)

    async def _name(self, image: str, name: str) -> None:
        """Give a pulled image its name, unless another has it, so that the registry is not asked again."""
        try:
            await self._engine.image(name)
        except ImageMissing:
            await self._engine.tag(image, name)

    async def labels(self, image: str) -> Mapping[str, str]:
        try:
            labels: Mapping[str, str] | None = (await self._engine.image(image))["Config"].get("Labels")
        except ImageMissing:
            return {}
        return labels or {}

    async def start_of(self, image: str) -> ImageStart:
        config = (await self._engine.image(image))["Config"]
        pairs = (one.partition("=") for one in config.get("Env") or ())
        return ImageStart(
            command=(*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())),
            env={name: value for name, _, value in pairs},
            cwd=config.get("WorkingDir") or "",
        )
