"""``runner cluster``: what a cluster lacks for workspaces in pods; exit 4 when it lacks something."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from runner.cli.output import Output

SUMMARY = "the cluster that workspaces and Jobs run in: what it lacks, and the rights that an account needs"
GROUP = "this host"
EXAMPLES = (
    "runner cluster check",
    "runner cluster check --image docker.io/library/debian:bookworm-slim",
    "runner cluster manifest --namespace agents",
)


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "try the cluster step by step, up to the first thing that is missing; also a Job, where an image is named"
    check = verbs.add_parser("check", help=summary, description=summary, allow_abbrev=False)
    words = "also make a workspace of this image, run a command in it, and remove it"
    check.add_argument("--image", metavar="IMAGE", help=words)
    check.add_argument("--output", choices=("text", "json"), default="text")
    summary = "print the objects of a namespace for workspaces, and of an account with the rights that they take"
    manifest = verbs.add_parser("manifest", help=summary, description=summary, allow_abbrev=False)
    manifest.add_argument("--namespace", metavar="NAME", default="agents", help="(default: agents)")
    words = "with the rights for Sandboxes of kubernetes-sigs/agent-sandbox"
    manifest.add_argument("--agent-sandbox", action="store_true", help=words)
    words = "with the right to read this RuntimeClass, for RUNNER_KUBERNETES_RUNTIME_CLASS"
    manifest.add_argument("--runtime-class", metavar="NAME", help=words)


def main(args: Namespace, out: Output) -> int:
    from runner.core.errors import PlatformError, UsageError
    from runner.core.settings import current, kubernetes_name
    from runner.ops.host.cluster_check import access_manifest, check_cluster

    def named(option: str, text: str) -> str:
        try:
            return kubernetes_name(text)
        except ValueError as error:
            raise UsageError(f"`{option}` is `{text}`", hint=f"write {error}") from None

    if args.what == "manifest":
        namespace, runtime_class = named("--namespace", args.namespace), None
        if args.runtime_class is not None:
            runtime_class = named("--runtime-class", args.runtime_class)
        out.verbatim(access_manifest(namespace, sandboxes=args.agent_sandbox, runtime_class=runtime_class))
        return 0
    from runner.cli.signals import run_cancellable
    from runner.core.codec import plain
    from runner.core.sanitize import sanitize

    findings = run_cancellable(check_cluster, current(), args.image)
    if args.output == "json":
        out.json(plain(findings))
    else:
        for one in findings:
            out.line(f"{'ok     ' if one.ok else 'MISSING'} {one.name:<10} {sanitize(one.found, 1_000)}")
            if one.hint is not None:
                out.line(f"        {'':<10} hint: {sanitize(one.hint, 1_000)}")
    return 0 if all(one.ok for one in findings) else PlatformError.exit_code
