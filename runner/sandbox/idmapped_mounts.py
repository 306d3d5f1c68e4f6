"""Idmapped mounts: a directory of one user shown to another as its own.

Files made through the mount belong to the directory's owner on the disk. The kernel maps one user and one group, on a
mount that only one sandbox has; nothing on the disk changes its owner.
"""

from __future__ import annotations

import os
from pathlib import Path

from runner.safefs import linux
from runner.sandbox import child_process


def is_idmapped(directory: int, idmapped: Path | None, uid: int) -> bool:
    """Tell whether an open directory is the one to idmap, and ``uid`` does not own it already."""
    found = os.fstat(directory)
    return idmapped is not None and found.st_uid != uid and os.path.samestat(found, idmapped.stat())


def idmap_mount(directory: int, uid: int, target: Path) -> None:
    """Mount an open directory at ``target``, with the files of its owner and group shown as those of ``uid``.

    Mounts below it are not shown. Raises ``OSError`` where the kernel or the file system cannot do it.
    """
    mount = clone_idmapped(directory, uid)
    try:
        linux.move_mount(mount, target)
    finally:
        os.close(mount)


def why_no_idmap(directory: int, uid: int) -> str | None:
    """Return why a directory cannot be idmapped to a user; ``None`` when it can be."""
    try:
        os.close(clone_idmapped(directory, uid))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def clone_idmapped(directory: int, uid: int) -> int:
    """Make the detached mount that ``idmap_mount`` attaches; the caller closes it. Raises ``OSError``."""
    owner = os.fstat(directory)
    mount = linux.clone_mount(directory, recursive=False)
    try:
        with child_process.user_namespace((owner.st_uid, uid), (owner.st_gid, uid)) as namespace:
            attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
            linux.set_mount_attributes(mount, attributes, user_namespace=namespace)
    except OSError:
        os.close(mount)
        raise
    return mount
