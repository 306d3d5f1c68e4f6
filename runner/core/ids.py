"""Names: the grammar that users' names obey, and the identifiers that the runner makes."""

from __future__ import annotations

from runner.core.patterns import pattern

NAME = pattern(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # an RFC 1123 label
IMAGE_HINT = "a name such as `registry.example.org/team/agent:3`, with `@sha256:...`, or an id `sha256:...`"
BRANCH_HINT = "letters, digits and `. _ - + @ # = ,` between slashes"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
IMAGE = pattern(
    rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{{0,253}}[A-Za-z0-9])?(?::[0-9]{{1,5}})?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?|sha256:[0-9a-f]{64}"
)  # as docker has it
_OBJECT = pattern(r"(?=.{1,253}$)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_COMMIT = pattern(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_BRANCH = pattern(r"[\w#][\w.+@#=,-]*(?:/[\w#][\w.+@#=,-]*)*")
_BRANCH_BYTES = 200  # a ref is a file with ``.lock`` beside it
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def is_name(text: str) -> bool:
    """Tell whether ``text`` may name a document; such a name is also safe as a file name, label and ref component."""
    return NAME.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Tell whether ``text`` may name an object of Kubernetes: an RFC 1123 subdomain."""
    return _OBJECT.fullmatch(text) is not None


def is_commit_id(text: str) -> bool:
    """Tell whether ``text`` is a whole object id of git, of either hash."""
    return _COMMIT.fullmatch(text) is not None


def is_image(text: str) -> bool:
    """Tell whether ``text`` is a name or an id of a container image."""
    return IMAGE.fullmatch(text) is not None


def is_branch(text: str) -> bool:
    """Tell whether ``text`` is a branch name by an allow-list that is narrower than git's.

    A name that looks like a commit id is refused, since git would check out the branch.
    """
    return (
        _BRANCH.fullmatch(text) is not None
        and len(text.encode()) <= _BRANCH_BYTES
        and ".." not in text
        and "@{" not in text
        and not any(part.endswith((".lock", ".")) for part in text.split("/"))
        and text != "HEAD"
        and not is_commit_id(text.lower())
    )


def is_run_id(text: str) -> bool:
    """Tell whether ``text`` is an id as ``run_id`` makes them."""
    return len(text) == 12 and not set(text) - set(_ALPHABET)


def run_id(entropy: bytes) -> str:
    """Encode twelve characters from at least eight random bytes."""
    number = int.from_bytes(entropy[:8], "big") >> 4
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(55, -1, -5))
