"""Account that a triage reads a cluster with: its manifest, and how its kubeconfig is made.

``READS`` is the one list of what the skill's scripts read and which rights are checked; tests compare it with both.
"""

from __future__ import annotations

from collections.abc import Mapping

READER = "triage-reader"
HOME = "runner-triage"  # the namespace of an account that reads all of them

# What is read in a namespace and, below, of the cluster itself, by API group. No secrets, here or in what others add.
READS: Mapping[str, tuple[str, ...]] = {
    "": (
        "pods",
        "pods/log",
        "events",
        "services",
        "configmaps",
        "persistentvolumeclaims",
        "resourcequotas",
        "limitranges",
    ),
    "apps": ("deployments", "statefulsets", "daemonsets", "replicasets"),
    "autoscaling": ("horizontalpodautoscalers",),
    "batch": ("jobs", "cronjobs"),
    "discovery.k8s.io": ("endpointslices",),
    "gateway.networking.k8s.io": ("gateways", "httproutes"),
    "metrics.k8s.io": ("pods",),
    "networking.k8s.io": ("ingresses", "networkpolicies"),
    "policy": ("poddisruptionbudgets",),
}
OF_CLUSTER: Mapping[str, tuple[str, ...]] = {
    "": ("nodes", "namespaces", "persistentvolumes"),
    "metrics.k8s.io": ("nodes",),
    "storage.k8s.io": ("storageclasses", "volumeattachments"),
}


def reader_manifest(namespace: str | None) -> str:
    """Write the manifest of an account that may read what a triage reads, but no secrets; in one namespace, or in
    all.
    """
    home = namespace or HOME
    kind = "Role" if namespace else "ClusterRole"
    where = f', namespace: "{namespace}"' if namespace else ""
    groups = [*READS.items(), *(() if namespace else OF_CLUSTER.items())]
    rules = "".join(
        f'  - apiGroups: ["{group}"]\n    resources: [{", ".join(resources)}]\n    verbs: [get, list, watch]\n'
        for group, resources in groups
    )
    parts = [
        _recipe(namespace, home),
        "" if namespace else f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {home}}}\n",
        f"apiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {READER}, namespace: '{home}'}}\n"
        "automountServiceAccountToken: false\n",
        f"apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\nmetadata: {{name: {READER}{where}}}\nrules:\n{rules}",
        f"apiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}Binding\nmetadata: {{name: {READER}{where}}}\n"
        f"roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: {kind}, name: {READER}}}\n"
        f"subjects:\n  - {{kind: ServiceAccount, name: {READER}, namespace: '{home}'}}\n",
    ]
    return "---\n".join(filter(None, parts))


def _recipe(namespace: str | None, home: str) -> str:
    """Return the comments before it: commands to type, one a line."""
    what = f"in namespace {namespace}" if namespace else "in every namespace"
    option = f" --namespace {namespace}" if namespace else ""
    own = "kubectl --kubeconfig triage.kubeconfig config"
    return f"""\
# {READER}: reads what `runner triage` looks at {what}, and no secrets.
# Leave out what yours must not see, such as configmaps: a triage says what it could not read.
# To have it, and a kubeconfig that is nobody else's:
#
#   runner triage --reader-manifest{option} | kubectl apply -f -
#   umask 077
#   kubectl config view --minify --flatten --raw > triage.kubeconfig
#   {own} unset users
#   {own} set users.{READER}.tokenFile triage.token
#   {own} set-context --current --user {READER}{option}
#   kubectl --namespace {home} create token {READER} --duration 24h > triage.token
#   runner triage --check --kubeconfig triage.kubeconfig
#
# The last but one again when the token has ended; a run under way takes the new one.
"""
