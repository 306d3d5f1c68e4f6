"""The values of secrets, had before anything is made: from the environment, a file, a command or the keyring.

A value goes from here into the redactor, and into the processes of the steps that name it; nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence

import trio

from runner.core.capture import capture
from runner.core.errors import Rejected, RunnerError, SecretExposed, SecretMissing, UnfitSecret
from runner.core.redact import Redactor, Secret
from runner.core.settings import Settings
from runner.plan.model import RunPlan
from runner.spec.model import FromCommand, FromEnv, FromFile, FromKeyring, SecretSpec

MOST = 64 << 10  # bytes of a value
_IN_HEADER = re.compile(rb"[!-~]+(?: [!-~]+)*")
SECONDS = 60.0  # for a command, which may ask a person


def make_redactor(settings: Settings) -> Redactor:
    """Return a redactor that knows the runner's own secrets, but for values too short or common to hide."""
    redactor = Redactor()
    known = [(key.variable, key.text) for key in settings.model_keys.values()]
    known.append(("RUNNER_TOKEN", settings.server_token))
    if settings.git_token is not None:
        known.append((f"token of {settings.git_token.host}", settings.git_token.text))
    for name, text in known:
        try:
            redactor.register(name, os.fsencode(text))
        except UnfitSecret:
            continue
    return redactor


async def resolve_secrets(
    specs: Mapping[str, Sequence[SecretSpec]],
    plans: Iterable[RunPlan],
    settings: Settings,
    redactor: Redactor,
    *,
    done: Collection[str] = (),
) -> dict[str, dict[str, Secret]]:
    """Read the secrets of each run's steps, by run and name, and register them with the redactor.

    ``specs`` are by run. Secrets that only steps in ``done`` use are skipped. Raises ``Rejected`` with every secret
    that is missing or cannot be hidden, at its place, before anything is made.
    """
    known: dict[object, Secret] = {}
    findings: list[RunnerError] = []
    values: dict[str, dict[str, Secret]] = {}
    for plan in plans:
        names = _needed(plan, done)
        values[plan.name] = found = {}
        for spec in specs.get(plan.name, ()):
            key = (spec.name, spec.source)
            if spec.name not in names:
                continue
            try:
                if key not in known:
                    known[key] = await read_secret(spec, settings, redactor)
                found[spec.name] = known[key]
            except RunnerError as error:
                findings.append(type(error)(error.message, at=spec.at, hint=error.hint))
    if findings:
        raise Rejected(findings)
    return values


def check_secrets(
    specs: Mapping[str, Sequence[SecretSpec]], plans: Iterable[RunPlan], settings: Settings, *, done: Collection[str]
) -> None:
    """Raise ``Rejected`` with every secret that is known to be missing. Starts no command."""
    findings: dict[object, RunnerError] = {}
    for plan in plans:
        names = _needed(plan, done)
        for spec in specs.get(plan.name, ()):
            try:
                if spec.name in names:
                    _look(spec, settings)
            except RunnerError as error:
                findings[spec.at] = type(error)(error.message, at=spec.at, hint=error.hint)
    if findings:
        raise Rejected(findings.values())


def _needed(plan: RunPlan, done: Collection[str]) -> set[str]:
    """Return the names of the secrets of steps that are not done, and of messages."""
    names = {name for step in plan.steps if step.id not in done for name in step.secret_names}
    return names | {name for message in plan.messages for name in message.secret_names}


def _look(spec: SecretSpec, settings: Settings) -> None:
    match spec.source:
        case FromCommand((program, *_)):
            pass
        case FromKeyring():
            program = "keyring"
        case FromEnv() | FromFile() as source:
            _check(spec, _own(spec, source, settings))
            return
    if shutil.which(program, path=settings.variables.get("PATH")) is None:
        raise SecretMissing(f"secret `{spec.name}` is missing: there is no `{program}` on this host")


async def read_secret(spec: SecretSpec, settings: Settings, redactor: Redactor) -> Secret:
    """Read a secret, and register it. Raises ``SecretMissing``, ``SecretExposed`` and ``UnfitSecret``."""
    value = await _read(spec, settings)
    _check(spec, value)
    redactor.register(spec.name, value)
    return Secret(spec.name, value)


def _check(spec: SecretSpec, value: bytes) -> None:
    if len(value) > MOST:
        raise SecretMissing(f"secret `{spec.name}` has more than {MOST >> 10} KiB")
    if not value.strip():
        raise SecretMissing(f"secret `{spec.name}` is empty in {_words(spec)}")
    if spec.injection is not None and not _IN_HEADER.fullmatch(value.rstrip(b"\r\n")):
        raise UnfitSecret(f"secret `{spec.name}` is not one line of visible ASCII, which a header is")
    if not spec.as_file and b"\0" in value:
        raise UnfitSecret(f"secret `{spec.name}` holds a NUL, which no variable can", hint="write as: file")


async def _read(spec: SecretSpec, settings: Settings) -> bytes:
    match spec.source:
        case FromEnv() | FromFile() as source:
            return _own(spec, source, settings)
        case FromCommand(argv):
            return await _printed(spec, argv, settings)
        case FromKeyring(service, user):
            return await _printed(spec, ("keyring", "get", service, user), settings)


def _own(spec: SecretSpec, source: FromEnv | FromFile, settings: Settings) -> bytes:
    """Read a secret that takes no command."""
    if isinstance(source, FromFile):
        home, path = settings.variables.get("HOME", "/"), source.path
        return _file(spec, os.path.join(home, path[2:]) if path.startswith("~/") else path)
    if source.variable not in settings.variables:
        raise SecretMissing(f"secret `{spec.name}` is missing: {_words(spec)} is not set")
    return os.fsencode(settings.variables[source.variable])


def _file(spec: SecretSpec, path: str) -> bytes:
    """Read a secret's file, following links. Raises ``SecretExposed`` when other users can read or change it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretMissing(f"secret `{spec.name}` is missing: `{path}`: {error.strerror}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise SecretMissing(f"secret `{spec.name}` is missing: `{path}` is not a regular file")
        if mode & 0o066:
            message = f"secret `{spec.name}` is in a file that others can read or change: `{path}`"
            raise SecretExposed(message, hint=f"chmod 600 {shlex.quote(path)}")
        return os.read(descriptor, MOST + 1)
    finally:
        os.close(descriptor)


async def _printed(spec: SecretSpec, argv: Sequence[str], settings: Settings) -> bytes:
    """Return what a command prints. Its standard error is not repeated: it may contain the secret."""
    failure = f"secret `{spec.name}` is missing: {_words(spec)}"
    try:
        with trio.move_on_after(SECONDS) as patience:
            done = await capture(argv, settings.variables, most=MOST)
    except OSError as error:
        raise SecretMissing(f"{failure} cannot be started: {error.strerror}") from None
    if patience.cancelled_caught:
        raise SecretMissing(
            f"{failure} took more than {SECONDS:g} s", hint="run it first: it must not wait for a person"
        )
    if done.code != 0 and len(done.out) <= MOST:
        raise SecretMissing(f"{failure} exited {done.code}", hint="run it yourself to see why")
    return done.out


def _words(spec: SecretSpec) -> str:
    match spec.source:
        case FromEnv(variable):
            return f"variable `{variable}`"
        case FromFile(path):
            return f"`{path}`"
        case FromCommand(argv):
            return f"`{argv[0]}`"
        case FromKeyring(service, user):
            return f"`keyring get {service} {user}`"
