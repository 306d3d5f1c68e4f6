"""Messages in and out of a run, as a manifest has them: what starts it, and who is told of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from runner.manifest.kinds._fields import Shape, Text, no_repeats
from runner.manifest.secret_source import SecretSource

Service = Literal["github", "gitlab", "alertmanager"]
State = Literal["running", "succeeded", "failed", "timed-out", "cancelled", "skipped"]


class Webhook(Shape):
    """Messages of a service that start the run, by a server that was given this manifest."""

    from_: Service = Field(alias="from", description="The service that sends them.")
    secret: SecretSource = Field(
        description="Place of what proves them: GitHub's secret, GitLab's token, or the bearer token of Alertmanager."
    )
    events: Annotated[list[Text], AfterValidator(no_repeats), Field(json_schema_extra={"uniqueItems": True})] = Field(
        description="Events of GitHub and GitLab: `push`, `pull_request`, `merge_request`; after a dot an action."
    )
    labels: dict[str, Text] = Field(description="Labels that an alert must have, with these values.")
    max_parallel: int = Field(ge=1, le=100, description="Runs of these messages at a time; others wait.")
    per_hour: int = Field(ge=1, le=10_000, description="Runs that they may start within an hour.")


class Notification(Shape):
    """Message about the run to a service."""

    to: Literal["json", "slack"] = Field(
        description="`slack` posts a text, as Slack and Mattermost take it; `json` an object, signed with the secret."
    )
    url: Text | None = Field(None, description="Where it is posted, if that is no secret.")
    url_from: SecretSource | None = Field(None, description="Place of the URL, if that is a secret.")
    secret: SecretSource | None = Field(None, description="Place of the secret that signs it (Standard Webhooks).")
    states: Annotated[list[State], AfterValidator(no_repeats)] = Field(
        ["succeeded", "failed", "timed-out", "cancelled"],
        min_length=1,
        description="States that it tells of.",
        json_schema_extra={"uniqueItems": True},
    )
    private: bool = Field(False, description="Lets the host have private addresses, and be reached without TLS.")
