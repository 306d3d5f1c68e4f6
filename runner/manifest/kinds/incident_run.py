"""One piece of work for an agent, and how its result is judged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from runner.manifest.kinds._fields import (
    Body,
    Command,
    Distinct,
    Duration,
    Fault,
    Faults,
    ModelNames,
    Namespace,
    RelativePath,
    Shape,
    Text,
    Word,
    no_repeats,
)
from runner.manifest.messages import Notification, Webhook

KIND = "IncidentRun"


class Task(Shape):
    """The task's repository; the command line and its environment may say more."""

    repository_url: Text | None = Field(None, description="The repository that the task is about.")
    branch: Text | None = Field(None, description="The branch to work on.")
    base_branch: Text | None = Field(None, description="The branch that the work will be merged into.")
    pull_request_number: int | None = Field(None, ge=1, description="The pull request that the task is about.")
    commit: Text | None = Field(None, description="The commit to work on, as a full id.")


_OF_CLUSTERS = ("context", "namespace")
_WRITTEN: JsonDict = {"not": {"type": "null"}}


class Incident(Shape):
    """Incident directory and cluster that the agent investigates."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["kubeconfig"], "properties": {"kubeconfig": _WRITTEN}},
                {"properties": {name: {"type": "null"} for name in _OF_CLUSTERS}},
            ]
        }
    )

    directory: Text | None = Field(
        None,
        description="The incident's files: in the manifest's project, relative to it, or an absolute path on this host."
        " Left out only beside a matrix of incidents.",
    )
    kubeconfig: Word | None = Field(
        None,
        description="The kubeconfig of the cluster that commands may read, relative to the manifest or to `~/`; several"
        " with `:` between them are merged. It stays on this host.",
    )
    context: Word | None = Field(None, description="Context of the kubeconfig; default: the current one.")
    namespace: Namespace | None = Field(None, description="Namespace; default: that of the context.")
    access: Literal["read"] = Field(
        description="Access of commands to the cluster: `read` means get, list, watch and logs, never secrets."
    )

    @model_validator(mode="after")
    def _a_cluster_needs_a_kubeconfig(self) -> Incident:
        if self.kubeconfig is not None:
            return self
        given = [name for name in _OF_CLUSTERS if getattr(self, name) is not None]
        if given:
            words, hint = "is of a cluster, and no `kubeconfig` is named", "add it, or remove this"
            raise Faults(*(Fault((name,), f"`{name}` {words}", hint) for name in given))
        return self


class Context(Shape):
    """Context that is put before the agent's prompts."""

    preload: Annotated[
        list[Literal["incident", "permissions", "baseline"]],
        AfterValidator(no_repeats),
        Field(json_schema_extra={"uniqueItems": True}),
    ] = Field(
        description="Context between the system prompt and the prompt: `incident.json`, the cluster rights, and the"
        " output of the skill's triage script."
    )


class Files(Shape):
    """Files of the result, on a clean checkout."""

    required: list[Text] = Field(
        description="Patterns of which each must match a file; one without `/` matches at any depth."
    )
    forbidden: list[Text] = Field(description="Patterns that must match no file, in upper or lower case.")


class Report(Shape):
    """The report that the agent writes."""

    path: RelativePath = Field(description="The report's path.")
    min_bytes: int = Field(ge=0, description="The least size of the report.")
    sections: list[Text] = Field(description="Sections that the report must have, each with something in it.")


class Check(Shape):
    """A command on a clean checkout of the result."""

    run: Command = Field(description="The command.")
    timeout: Duration | None = Field(None, description="Time limit; default: that of verify.")
    exit: int = Field(0, ge=0, le=255, description="The exit status that it must have.")


class Verify(Shape):
    """Checks of the result."""

    files: Files | None = Field(None, description="Files that must, or must not, be there.")
    report: Report | None = Field(None, description="The report that must be there.")
    commands: list[Check] = Field(description="Commands and their expected exit status.")
    setup: list[Command] = Field(description="Commands that prepare the clean checkout.")


class Snapshot(Shape):
    """The commit that holds the result."""

    message: Text | None = Field(None, description="The commit's message; a template.")
    branch: Text | None = Field(None, description="The branch that it is for; a template.")
    allow_empty: bool = Field(description="Lets a run succeed that changed nothing.")


class Matrix(Shape):
    """Matrix: one run for each combination, in the order written."""

    agent_type: Distinct | None = Field(None, description="Agent types by name, instead of `agent_type`.")
    model: ModelNames | None = Field(None, description="Models, instead of the agent type's `model`.")
    incident: Distinct | None = Field(None, description="Incident directories, instead of `incident.directory`.")
    max_parallel: int | None = Field(None, ge=1, description="Number of runs at a time.")


class Output(Shape):
    """A file that later runs may read."""

    file: RelativePath = Field(description="The file's path in the output directory.")


class Spec(Body):
    """One piece of work for an agent, and how its result is judged."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"incident": {"type": "null"}}},
                {"properties": {"incident": {"required": ["directory"], "properties": {"directory": _WRITTEN}}}},
                {
                    "required": ["matrix"],
                    "properties": {"matrix": {"required": ["incident"], "properties": {"incident": _WRITTEN}}},
                },
            ]
        }
    )

    project: Text | None = Field(None, description="The project that it belongs to, by name.")
    agent_type: Text | None = Field(None, description="The agent type that does the work, by name.")
    matrix: Matrix | None = Field(None, description="Matrix: one run for each combination.")
    needs: list[Text] = Field(description="Runs that must have succeeded before this one starts.")
    outputs: dict[str, Output] = Field(
        description="Files that later runs read as `outputs.RUN.NAME`; of a matrix, a list in member order."
    )
    policy: str | None = Field(None, description="A policy by name; it adds to that of the agent type.")
    prompt: str = Field(description="Task for the agent; a template.")
    task: Task | None = Field(None, description="The repository that it is about.")
    incident: Incident | None = Field(None, description="The incident that it is about.")
    context: Context = Field(description="Context that the agent gets besides its prompts.")
    verify: Verify | None = Field(None, description="Checks of the result.")
    post_hooks: list[Command] = Field(description="Commands after the agent, after those of its type.")
    snapshot: Snapshot | None = Field(None, description="The commit that holds the result.")
    timeout: Duration = Field(description="Time limit of the whole run.")
    webhook: Webhook | None = Field(None, description="Messages that start it, by a server.")
    notify: list[Notification] = Field(description="Messages about it, to people and programs.")
    debug: bool = Field(description="Keeps the transcripts of the agent's session and the log of its commands.")

    @model_validator(mode="after")
    def _an_incident_has_a_directory(self) -> Spec:
        of_matrix = self.matrix is not None and self.matrix.incident is not None
        if self.incident is not None and self.incident.directory is None and not of_matrix:
            hint = "name the incident's directory, or several in `matrix.incident`"
            raise Faults(Fault(("incident",), "`directory` is missing", hint))
        return self
