"""Permissions in ``incident_cluster_permissions.json``: what the credential of a triage may read in its cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from runner.core.sanitize import excerpt
from runner.triage.strict_json import read_object, written

FILE = "incident_cluster_permissions.json"
MINIMUM = ("pods", "logs", "events")  # without any of them an investigation is guesswork


@dataclass(frozen=True)
class Permissions:
    """Permissions by the file's own field names; a right that is missing is denied, and ``null`` means unknown.

    ``validated_at`` is when the rights were checked, in RFC 3339. ``secrets_access_allowed`` is what this installation
    allows, ``can_get_secrets`` what the cluster would.
    """

    cluster_name: str = ""
    validated_at: str = ""
    can_get_pods: bool | None = False
    can_get_logs: bool | None = False
    can_get_events: bool | None = False
    can_get_deployments: bool | None = False
    can_get_services: bool | None = False
    secrets_access_allowed: bool = False
    can_get_secrets: bool | None = False
    can_get_configmaps: bool | None = False
    can_get_nodes: bool | None = False
    warnings: tuple[str, ...] = ()

    @property
    def lacking(self) -> tuple[str, ...]:
        """Return the rights of the minimum that are denied."""
        return tuple(what for what in MINIMUM if getattr(self, f"can_get_{what}") is False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the rights of the minimum that are unknown."""
        return tuple(what for what in MINIMUM if getattr(self, f"can_get_{what}") is None)

    def complaints(self) -> tuple[str, ...]:
        """Return warnings about the investigation: missing rights first, then the file's own warnings.

        Unknown rights are listed when no warning explains them.
        """
        few = (f"too few rights in the cluster: it cannot read {', '.join(self.lacking)}",) if self.lacking else ()
        unknown = f"whether {', '.join(self.unknown)} can be read is not known"
        return (*few, *(self.warnings or ((unknown,) if self.unknown else ())))


def read_permissions(content: bytes) -> tuple[Permissions, dict[str, object]]:
    """Read the permissions of a file, and its whole content. Raises ``ValueError`` with a message for people."""
    document = read_object(content, FILE)
    return permissions_of(document), document


def permissions_of(document: Mapping[str, object]) -> Permissions:
    """Read the permissions of a document, whatever else is in it. Raises ``ValueError`` with a message for people."""
    known: dict[str, object] = {}
    for field in fields(Permissions):
        value = document.get(field.name)
        if value is None and (field.name not in document or not field.name.startswith("can_get_")):
            continue
        if value is not None and not _fits(field.default, value):
            raise ValueError(f"`{field.name}` of {FILE} is not {_KINDS[type(field.default)]}")
        known[field.name] = tuple(value) if isinstance(value, list) else value
    return Permissions(**known)  # type: ignore[arg-type]  # each was compared with its default


_KINDS: Mapping[type, str] = {str: "text", bool: "true or false", tuple: "a list of texts"}


def _fits(default: object, value: object) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is type(default)


def differences(stated: Permissions, written: Mapping[str, object], probed: Permissions) -> tuple[str, ...]:
    """List where the file, as far as ``written`` mentions a right, differs from the cluster's answer."""
    names = [field.name for field in fields(Permissions) if field.name not in ("validated_at", "warnings")]
    pairs = ((name, getattr(stated, name), getattr(probed, name)) for name in names if name in written)
    return tuple(
        f"{name} is {_word(here)} in the file and {_word(there)} in the cluster"
        for name, here, there in pairs
        if here != there and None not in (here, there)
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"`{excerpt(str(value))}`"


def both_texts(probed: str, stated: str, differing: Sequence[str]) -> str:
    """Format the cluster's answer and the file's permissions for a prompt."""
    told = f"They differ: {'; '.join(differing)}.\n" if differing else ""
    return f"{probed}\n\nThat is what the cluster answers, and it holds. {FILE} says this:\n{told}{stated}"


def permissions_text(document: Mapping[str, object]) -> str:
    """Format a file's permissions for a prompt, and as they are written: JSON."""
    return written(document)
