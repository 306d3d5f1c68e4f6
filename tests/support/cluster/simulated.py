"""A cluster of many nodes in one process, on a clock that jumps: Jobs, their pods and a quota; no program runs.

Requests are answered as text, so that what asks is the product's own code, and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import trio

from runner.cluster import job
from runner.cluster.objects import ClusterObjects

_ANSWER_SECONDS = 0.01
_QUOTA = "exceeded quota: jobs, requested: count/jobs.batch=1"

Work = Callable[[str], Awaitable[None]]


class SimulatedCluster(ClusterObjects):
    """``nodes`` with room for ``pods`` each, and a quota of ``jobs``. ``work`` is what a worker does."""

    def __init__(self, nursery: trio.Nursery, work: Work, *, nodes: int, pods: int, jobs: int) -> None:
        self.server, self.namespace = "https://cluster.example", "agents"
        self.requests = 0
        self._nursery, self._work, self._most = nursery, work, jobs
        self._room = nodes * pods
        self._objects: dict[str, dict[str, dict[str, Any]]] = {"jobs": {}, "pods": {}, "configmaps": {}}
        self._waiting: deque[str] = deque()

    async def _ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        self.requests += 1
        await trio.sleep(_ANSWER_SECONDS)
        url = urlsplit(target)
        if "selfsubjectaccessreviews" in url.path:
            return 201, b'{"status": {"allowed": true}}'
        resource, _, name = url.path.partition("/namespaces/agents/")[2].partition("/")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        status, answer = self._answer(method, resource, name, query, msgspec.json.decode(body) if body else {})
        return status, msgspec.json.encode(answer)

    def _answer(
        self, method: str, resource: str, name: str, query: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, Any]:
        kept = self._objects.get(resource, {})
        match method:
            case "POST" if resource == "jobs" and len(kept) >= self._most:
                return 403, {"kind": "Status", "message": _QUOTA}
            case "POST":
                return 201, self._make(resource, body)
            case "DELETE":
                self._objects["pods"].pop(name, None)
                self._objects["configmaps"].pop(name, None)
                return (200, {}) if kept.pop(name, None) else (404, {})
            case _ if name:
                return (200, kept[name]) if name in kept else (404, {})
        label, _, value = query["labelSelector"].partition("=")
        found = [one for one in kept.values() if one["metadata"]["labels"].get(label) == value]
        first, size = int(query.get("continue", 0)), int(query["limit"])
        more = {"continue": str(first + size)} if len(found) > first + size else {}
        return 200, {"metadata": more, "items": found[first : first + size]}

    def _make(self, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        body["metadata"]["uid"] = name
        self._objects[resource][name] = body
        if resource == "jobs":
            told = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/1000 nodes are available"}
            pod = {"metadata": {"name": name, **body["spec"]["template"]["metadata"]}, "status": {"conditions": [told]}}
            self._objects["pods"][name] = {**pod, "spec": body["spec"]["template"]["spec"]}
            self._waiting.append(name)
        else:
            self._start()
        return body

    def _start(self) -> None:
        """Start the pods that have a plan, as far as there is room."""
        while self._waiting and self._room and self._waiting[0] in self._objects["configmaps"]:
            self._room -= 1
            self._nursery.start_soon(self._run, self._waiting.popleft())

    async def _run(self, name: str) -> None:
        self._objects["pods"][name]["status"] = {"phase": "Running"}
        await self._work(self._objects["jobs"][name]["metadata"]["labels"][job.RUN])
        self._objects["jobs"][name]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        self._room += 1
        self._start()
