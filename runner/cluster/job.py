"""Jobs of Kubernetes that carry out one run each, as the API takes them, and what their state says. Pure.

A Job is tried once: what may be repeated of a run, the runner repeats itself. Its plan is in a ConfigMap that belongs
to it, and everything secret in a Secret that somebody else has made and that nobody here reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from runner.core.sanitize import excerpt, sanitize

ACCOUNT = "runner"  # the service account of ``runner cluster manifest``
SUBMISSION, RUN = "runner.submission", "runner.run"  # labels
QUEUE = "kueue.x-k8s.io/queue-name"  # the label that Kueue looks for
PLAN_PLACE, HOME_PLACE = "/run/runner-plan", "/var/lib/runner"
PLAN_KEY = "plan.json"
KUBECONFIG_KEY = "config"
KUBECONFIG = f"/run/runner-kubeconfig/{KUBECONFIG_KEY}"
BATCH = "batch/v1"
MAX_PLAN = (1 << 20) - 1024  # bytes of a ConfigMap, less what its other fields take
START_SECONDS = 600  # that a node may take for the image and the start, beside the run's own time
KEPT_SECONDS = 3600  # that a Job is kept after its end, when nobody has seen it
_CONTAINER = "runner"
_USER = 65532
_GRACE = 30  # seconds to tell the store and to send files, after a run has finalized
_LAST = 300  # characters of what a worker said at last

_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff")  # for now: a registry may be away for a while
_NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
_NO_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

Object = Mapping[str, Any]


class JobShape(Struct, frozen=True, kw_only=True):
    """The properties of a run's Job. ``environment`` holds nothing secret; ``secret`` is the name of what does."""

    run: str
    name: str
    submission: str
    image: str
    secret: str
    seconds: float  # after which the run is over for sure
    stop_seconds: float
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    command: Sequence[str] = ()  # in the place of the run
    queue: str | None = None
    priority_class: str | None = None
    kubeconfig: str | None = None  # a Secret that the worker needs not find to start


def job_name(run: str) -> str:
    return f"runner-{run}"


def job(shape: JobShape) -> dict[str, Any]:
    """Return the Job of a run. One with a queue is made suspended: Kueue starts it when there is room."""
    labels = {"runner.part": "job", RUN: shape.run, SUBMISSION: shape.submission}
    queue = {} if shape.queue is None else {QUEUE: shape.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(shape.run),
            "labels": {**labels, **queue},
            "annotations": {"runner.name": shape.name},
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            **({} if shape.queue is None else {"suspend": True}),
            "template": {"metadata": {"labels": labels}, "spec": _pod(shape)},
        },
    }


def plan_map(run: str, plan: str, owner: Object) -> dict[str, Any]:
    """Return the ConfigMap with the plan of a run, which goes with its Job."""
    belongs = {"apiVersion": "batch/v1", "kind": "Job", "name": job_name(run), "uid": owner["metadata"]["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job_name(run), "labels": {RUN: run}, "ownerReferences": [belongs]},
        "data": {PLAN_KEY: plan},
        "immutable": True,
    }


def _pod(shape: JobShape) -> dict[str, Any]:
    # The label of workspaces is left out on purpose: their policy would close the network of the worker as well.
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # as the first process of its own, a worker that only begins would not hear TERM
        "activeDeadlineSeconds": round(shape.seconds) + START_SECONDS,
        "terminationGracePeriodSeconds": round(shape.stop_seconds) + _GRACE,
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "plan", "configMap": {"name": job_name(shape.run)}},
            {"name": "home", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "containers": [_container(shape)],
    }
    if shape.priority_class is not None:
        spec["priorityClassName"] = shape.priority_class
    if shape.kubeconfig is not None:
        secret = {"secretName": shape.kubeconfig, "defaultMode": 0o440, "optional": True}
        spec["volumes"].append({"name": "kubeconfig", "secret": secret})
        # The file itself: what is mounted whole consists of links, which no kubeconfig may be.
        mount = {"name": "kubeconfig", "mountPath": KUBECONFIG, "subPath": KUBECONFIG_KEY, "readOnly": True}
        spec["containers"][0]["volumeMounts"].append(mount)
    return spec


def _container(shape: JobShape) -> dict[str, Any]:
    words = shape.command or ["runner", "execute", f"{PLAN_PLACE}/{PLAN_KEY}", "--id", shape.run, *shape.arguments]
    given = {"HOME": f"{HOME_PLACE}/home", "RUNNER_HOME": f"{HOME_PLACE}/state", **shape.environment}
    pod = {"RUNNER_POD_NAME": "metadata.name", "RUNNER_POD_UID": "metadata.uid"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in pod.items()]
    return {
        "name": _CONTAINER,
        "image": shape.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*words],
        "workingDir": HOME_PLACE,
        "env": [*({"name": name, "value": value} for name, value in given.items()), *own],
        "envFrom": [{"secretRef": {"name": shape.secret}}],
        "resources": {
            "limits": {"cpu": "2", "memory": "2Gi"},
            "requests": {"cpu": "100m", "memory": "256Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_PLACE, "readOnly": True},
            {"name": "home", "mountPath": HOME_PLACE},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


# --- its state -----------------------------------------------------------------------------------


class JobState(Struct, frozen=True, kw_only=True):
    """State of a Job. ``waits`` says for what it waits, ``hopeless`` why it will never start; while it is ``failing``
    its node tries again, and that may be in vain.

    ``over``: its worker has ended, or never will have begun; ``why`` says how, in words, where it did not end well.
    """

    waits: str = ""
    failing: bool = False
    hopeless: str = ""
    hint: str | None = None
    over: bool = False
    why: str = ""


GONE = JobState(over=True, why="somebody deleted it")


def judge(job: Object, pods: Sequence[Object], events: Iterable[Object] = ()) -> JobState:
    """Tell the state of a Job from its pods, and from the events about it, which are only needed without any."""
    status = job.get("status") or {}
    failed = next((one for one in _true(status) if one.get("type") == "Failed"), None)
    if any(one.get("type") == "Complete" for one in _true(status)):
        return JobState(over=True)
    ended = _how_it_ended(pods)
    if failed is not None:
        said = f"{failed.get('reason') or 'it failed'}: {failed.get('message') or 'no message'}"
        return JobState(over=True, why=ended or sanitize(said))
    if (job.get("spec") or {}).get("suspend"):
        queue = (job.get("metadata") or {}).get("labels", {}).get(QUEUE, "")
        return JobState(waits=f"it waits in queue `{excerpt(queue)}`", hint="kubectl get workloads; ask who runs Kueue")
    if "deletionTimestamp" in (job.get("metadata") or {}):
        return GONE
    return _judge_pods(pods) if pods else _judge_events(events)


def _true(status: Object) -> list[Object]:
    return [one for one in status.get("conditions") or () if one.get("status") == "True"]


def _judge_pods(pods: Sequence[Object]) -> JobState:
    for pod in pods:
        status = pod.get("status") or {}
        for one in status.get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            reason, said = str(waiting.get("reason", "")), sanitize(str(waiting.get("message", "")))
            image = excerpt(str(one.get("image", "")))
            if reason in (*_NOT_PULLED, *_NO_IMAGE):
                hint = "name an image in RUNNER_WORKER_IMAGE that the nodes can pull"
                why = f"its node cannot pull image `{image}`: {reason}: {said}"
                if reason in _NO_IMAGE:
                    return JobState(hopeless=why, hint=hint)
                return JobState(waits=why, failing=True, hint=hint)
            if reason in _NO_CONTAINER:
                hint = "the Secret of RUNNER_WORKER_SECRET must be in the namespace, and `runner` in the image"
                return JobState(hopeless=f"its container cannot be started: {reason}: {said}", hint=hint)
        for one in status.get("conditions") or ():
            if one.get("reason") == "Unschedulable":
                hint = "free a node, or ask for less; Ctrl-C gives it up"
                return JobState(waits=f"no node has room for it: {sanitize(str(one.get('message', '')))}", hint=hint)
    return JobState()


def _judge_events(events: Iterable[Object]) -> JobState:
    """Tell why a Job has no pod: the cluster refuses one, for now or for good."""
    refused = [str(one.get("message", "")) for one in events if one.get("reason") == "FailedCreate"]
    if not refused:
        return JobState()
    said = sanitize(refused[-1])
    if is_quota(said):
        hint = "it starts when others have ended; Ctrl-C gives it up"
        return JobState(waits=f"the quota of the namespace is used up: {said}", hint=hint)
    hint = "`runner cluster manifest` makes a namespace and the account that are fit"
    return JobState(hopeless=f"the cluster refuses its pod: {said}", hint=hint)


def is_quota(said: str) -> bool:
    """Tell whether the cluster refused something only for as long as a quota is used up."""
    return "exceeded quota" in said


def _how_it_ended(pods: Sequence[Object]) -> str:
    """Say how the worker of a failed Job ended, with the last that it said."""
    for pod in pods:
        status = pod.get("status") or {}
        if reason := str(status.get("reason") or ""):
            return sanitize(f"its pod has failed: {reason}: {status.get('message') or 'no message'}")
        for one in status.get("containerStatuses") or ():
            ended = (one.get("state") or {}).get("terminated") or {}
            if ended.get("reason") == "OOMKilled":
                return "its worker ran out of memory"
            if ended.get("exitCode"):
                return f"its worker ended with exit code {ended['exitCode']}{_last(str(ended.get('message') or ''))}"
    return ""


def _last(said: str) -> str:
    """Return the error that a worker has printed with its hint, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    begins = next((at for at, line in enumerate(lines) if line.startswith("error[")), len(lines) - 1)
    text = sanitize(" ".join(lines[begins:]), _LAST * 10)
    return f": {text if len(text) <= 2 * _LAST else f'{text[:_LAST]} ... {text[-_LAST:]}'}" if lines else ""
