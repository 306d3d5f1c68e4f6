"""CI job that installs what the repository needs, then runs its manifests as a person would.

Manifests of a pull request from a fork are applied with ``--untrusted``.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner import DISTRIBUTION, __version__
from runner.ops.init.survey import Survey, install_words

GITHUB = ".github/workflows/runner.yml"
GITLAB = ".gitlab-ci.yml"

_TOOLS = {  # by language: the action that installs it, its options, and the file that says which version
    "python": (
        "actions/setup-python@v5",
        "python-version-file",
        (".python-version", "pyproject.toml"),
        "python-version",
        "3.x",
    ),
    "node": ("actions/setup-node@v4", "node-version-file", (".nvmrc", ".node-version"), "node-version", "lts/*"),
    "go": ("actions/setup-go@v5", "go-version-file", ("go.mod",), "go-version", "stable"),
    "ruby": ("ruby/setup-ruby@v1", "ruby-version", (), "ruby-version", "3.3"),
    "java": ("actions/setup-java@v4", "java-version-file", (".java-version",), "java-version", "21"),
}

_CACHES = {  # by language: the file whose digest names a cache, and what the action above then keeps
    "python": {"pyproject.toml": "pip", "requirements.txt": "pip"},
    "node": {"package-lock.json": "npm", "yarn.lock": "yarn"},
    "java": {"pom.xml": "maven", "build.gradle": "gradle"},
}


def github_job(seen: Survey) -> str:
    """Return a workflow for pull requests, on a machine that GitHub hosts."""
    steps = "".join(step for language in seen.languages for step in _github_steps(seen, language))
    return _GITHUB.replace("INSTALL\n", steps).replace("PACKAGE", package())


def gitlab_job(seen: Survey) -> str:
    """Return a job for merge requests, whose runner allows namespaces."""
    lines = "".join(f"    - {_install(seen, language)}\n" for language in seen.languages if _install(seen, language))
    return _GITLAB.replace("INSTALL\n", lines).replace("PACKAGE", package())


def package() -> str:
    """Return this program's distribution and version, as pip reads it."""
    return f"{DISTRIBUTION}=={__version__}"


def _github_steps(seen: Survey, language: str) -> Iterator[str]:
    if language in _TOOLS:
        action, key, files, otherwise, fallback = _TOOLS[language]
        file = next((name for name in files if (seen.top / name).is_file()), None)
        chosen = f"{key}: {file}" if file else f'{otherwise}: "{fallback}"'
        kept = next((kept for name, kept in _CACHES.get(language, {}).items() if (seen.top / name).is_file()), None)
        more = (", distribution: temurin" if language == "java" else "") + (f", cache: {kept}" if kept else "")
        yield f"      - uses: {action}\n        with: {{{chosen}{more}}}\n"
    if words := _install(seen, language):
        yield f"      - run: {words}\n"


def _install(seen: Survey, language: str) -> str:
    """Return what installs the dependencies in the manifests, or what a toolchain has for everybody."""
    needed = bool(seen.dependencies) or language in ("go", "rust")
    return install_words(seen.top, language) if needed else ""


_GITHUB = """\
name: runner
on: [pull_request]

permissions:
  contents: read

jobs:
  runner:
    runs-on: ubuntu-24.04
    timeout-minutes: 45
    env:
      # a pull request from a fork brings manifests of a stranger
      TRUST: ${{ github.event.pull_request.head.repo.fork && '--untrusted' || '' }}
    steps:
      - uses: actions/checkout@v4
        with: {persist-credentials: false}
      # what the manifests name by `toolchains` and `dependencies`
INSTALL
      # 24.04 forbids the namespaces that the sandbox is made of
      - run: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0
      - run: pipx install PACKAGE
      - run: runner validate .
      - run: runner plan --task-from github $TRUST
      - run: runner apply --task-from github $TRUST --junit runs.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: runs, path: runs.xml, if-no-files-found: ignore}
"""
_GITLAB = """\
runner:
  image: python:3.13
  script:
INSTALL
    - pip install PACKAGE
    - if [ "$CI_MERGE_REQUEST_SOURCE_PROJECT_ID" != "$CI_MERGE_REQUEST_PROJECT_ID" ]; then TRUST=--untrusted; fi
    - runner validate .
    - runner apply --task-from gitlab ${TRUST:-} --junit runs.xml   # where `runner doctor` finds namespaces
  artifacts:
    when: always
    reports: {junit: runs.xml}
"""
