"""trio, imported when something of it is first used.

For modules on the way of a verb that may need no loop: importing trio takes as long as all else that such a verb does.
They import this in its place, and trio itself for the type checker.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    import trio

    return globals().setdefault(name, getattr(trio, name))
