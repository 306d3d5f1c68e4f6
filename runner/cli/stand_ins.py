"""Stand-ins for modules that libraries import for what this program seldom or never wants of them.

Who uses something of one gets it of the module itself, which is imported then.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

# ``shutil`` imports the first two in case it unpacks an archive, trio the others in case it speaks TLS or DTLS.
_SELDOM_USED = ("bz2", "lzma", "ssl", "hmac")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Plugins(_StandIn):
    """pydantic's look for packages that hook into it: there are none."""

    @staticmethod
    def get_plugins(*_: object) -> tuple[()]:
        return ()


def set_stand_ins() -> None:
    """Let no package that happens to be installed hook into how manifests are validated, and import less.

    pydantic imports ``importlib.metadata`` to look for such packages also where it is told not to, which takes a tenth
    of validating.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # noqa: TID251  # written, never read
    sys.modules.setdefault("pydantic.plugin._loader", _Plugins("pydantic.plugin._loader"))
    for name in _SELDOM_USED:
        sys.modules.setdefault(name, _StandIn(name))
