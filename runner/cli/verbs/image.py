"""``runner image``: build and check the image in which agents investigate incidents, and build the one of a server.

``check`` exits with 4 when it differs from what this runner would build.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.output import Output

if TYPE_CHECKING:
    from runner.core.settings import Settings
    from runner.ops.host.image import ImageCheck

SUMMARY = "the image k8s-triage-agent: build, check; and that of a server: build"
GROUP = "on call"
EXAMPLES = (
    "runner image build --base debian:bookworm-slim",
    "runner image check",
    "runner image build --server --tag registry.example.org/plan-runner:1",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    told = "build it from what this runner ships, without anything of this host"
    build = verbs.add_parser("build", help=told, description=told, allow_abbrev=False)
    words = "build the image of this runner instead, with all its extras, which serves"
    build.add_argument("--server", action="store_true", help=words)
    words = "with --server: this runner's wheel, in place of that which the package index has"
    build.add_argument("--wheel", metavar="FILE", type=Path, help=words)
    build.add_argument("--base", metavar="IMAGE", help="a Debian, by name or digest (default: the Dockerfile's)")
    words = "the image's name (default: k8s-triage-agent, or plan-runner:VERSION)"
    build.add_argument("--tag", metavar="NAME", help=words)
    build.add_argument("--ca", metavar="FILE", type=Path, help="certificate authorities of this network, PEM")
    build.add_argument("--npmrc", metavar="FILE", type=Path, help="npm's settings: where its registry is, and a token")
    words = "with --server: pip's settings: where its index is, and a token"
    build.add_argument("--pip-conf", metavar="FILE", type=Path, help=words)
    build.add_argument("--apt-sources", metavar="FILE", type=Path, help="apt's sources, in either of its two forms")
    build.add_argument("--network", choices=("default", "host"), default="default", help="the build's")
    build.add_argument(
        "--save-context", metavar="FILE", type=Path, help="build nothing; write what a builder gets, a new tar"
    )
    told = "start it, and compare its content with what this runner ships"
    check = verbs.add_parser("check", help=told, description=told, allow_abbrev=False)
    check.add_argument("image", metavar="IMAGE", nargs="?", default="k8s-triage-agent", help="its name, or its id")
    for verb in verbs.choices.values():
        verb.add_argument("--output", choices=("text", "json"), default="text")


def main(args: Namespace, out: Output) -> int:
    from runner.core.settings import current

    return _build(args, current(), out) if args.what == "build" else _check(args, current(), out)


def _build(args: Namespace, settings: Settings, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.errors import UsageError
    from runner.core.sanitize import sanitize
    from runner.ops.host import image, recipe, server_image

    for option, given, of_server in (
        ("--wheel", args.wheel, True),
        ("--pip-conf", args.pip_conf, True),
        ("--npmrc", args.npmrc, False),
    ):
        if given is not None and args.server is not of_server:
            which = "only that of a server is" if of_server else "that of a server is not"
            raise UsageError(f"`{option}` is for an image that is built with it; {which}", hint="runner image build -h")
    wanted = recipe.ImageRecipe(
        tag=args.tag or (server_image.TAG if args.server else image.NAME),
        base=args.base,
        ca=args.ca,
        npmrc=args.npmrc,
        pip_conf=args.pip_conf,
        apt_sources=args.apt_sources,
        host_network=args.network == "host",
    )
    if args.save_context is not None:
        content = server_image.context(wanted, args.wheel) if args.server else image.context(wanted)
        recipe.save_context(content, args.save_context)
        dockerfile = server_image.DOCKERFILE if args.server else image.DOCKERFILE
        out.line(f"{args.save_context}: build it with `-f {dockerfile}`")
        return 0
    show = out.complain if args.output == "json" else out.line

    def say(line: str) -> None:
        show(sanitize(line, 1_000))

    async def build() -> str:
        if args.server:
            return await server_image.build(settings, wanted, args.wheel, say)
        return await image.build(settings, wanted, say)

    id = run_cancellable(build)
    if args.output == "json":
        out.json({"image": id, "tag": wanted.tag})
    else:
        out.line(f"built {wanted.tag}  {id}")
    return 0


def _check(args: Namespace, settings: Settings, out: Output) -> int:
    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.ops.host.image import check

    checked = run_cancellable(lambda: check(settings, args.image))
    if args.output == "json":
        out.json({**plain(checked), "is_right": checked.is_right})
    else:
        _print(args.image, checked, out)
    return 0 if checked.is_right else 4


def _print(name: str, checked: ImageCheck, out: Output) -> None:
    from runner.core.sanitize import sanitize

    out.line(f"{sanitize(name)}  {checked.image}  {checked.size_bytes / 1e9:.2f} GB, user {sanitize(checked.user)}")
    for found in checked.found:
        out.line(f"{'✓' if found.is_right else '✗'} {found.what:<32} {found.told}")
    if not checked.is_right:
        out.line("= hint: runner image build")
