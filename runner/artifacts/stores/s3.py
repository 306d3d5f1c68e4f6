"""Artifacts in a bucket of S3, or of a server that speaks its protocol, by botocore in worker threads.

Keys, profiles, roles, proxies and authorities come from where the AWS tools have them. Objects are small, so each is
written by one request, with its SHA-256 for the server to check.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from msgspec import Struct

from runner.artifacts.stores import check_options
from runner.core.clock import now_microseconds
from runner.core.errors import (
    ArtifactsDamaged,
    ArtifactsMissing,
    ArtifactsRefused,
    ArtifactsUnreachable,
    BadArtifactsUrl,
    RunnerError,
)
from runner.core.sanitize import excerpt
from runner.core.settings import is_url, parse_duration
from runner.ports.artifacts import MAX_OBJECT, ArtifactStore, StoredObject, is_name

try:
    import botocore.session
    from botocore import exceptions as boto
    from botocore.config import Config
except ImportError as error:
    message, hint = "the store of artifacts in S3 is not installed", "pip install 'plan-runner[s3]'"
    raise BadArtifactsUrl(message, hint=hint) from error

CONNECT_SECONDS, ANSWER_SECONDS, ATTEMPTS = 5, 20, 3
CONNECTIONS = 10  # at once
_REMOVED_AT_ONCE = 1000
_OPTIONS: Mapping[str, frozenset[str] | None] = {
    "endpoint": None,
    "region": None,
    "profile": None,
    "addressing": frozenset({"path", "virtual"}),
    "encryption": frozenset({"AES256", "aws:kms"}),
    "kms_key": None,
    "lock": frozenset({"governance", "compliance"}),
    "retain": None,
}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_HINTS = {
    "AccessDenied": "allow s3:PutObject, GetObject, DeleteObject and ListBucket for the prefix",
    "ExpiredToken": "renew the credentials of this host",
    "InvalidAccessKeyId": "look at AWS_ACCESS_KEY_ID, or the profile",
    "InvalidBucketState": "make the bucket with object lock, or leave `lock` out",
    "NoSuchBucket": "make the bucket; `runner` makes none",
    "PermanentRedirect": "name the region of the bucket: ?region=REGION",
    "AuthorizationHeaderMalformed": "name the region of the bucket: ?region=REGION",
    "RequestTimeTooSkewed": "set the clock of this host",
    "SignatureDoesNotMatch": "look at AWS_SECRET_ACCESS_KEY, or the profile",
}
_DAMAGED_ON_THE_WAY = {"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "XAmzContentChecksumMismatch"}

_UNREACHABLE = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ResponseStreamingError)

T = TypeVar("T")


class _Retention(Struct, frozen=True):
    mode: str
    seconds: float


def open_store(bucket: str, path: str, options: Mapping[str, str]) -> ArtifactStore:
    check_options(options, _OPTIONS)
    if not bucket or ":" in bucket or "%" in path:
        raise BadArtifactsUrl("`RUNNER_ARTIFACTS` does not name a bucket", hint="write s3://BUCKET/PREFIX")
    prefix = path.strip("/")
    if prefix and not is_name(prefix):
        hint = "write letters, digits, `-`, `_`, `.` and `/`"
        raise BadArtifactsUrl(f"prefix `{excerpt(prefix)}` of `RUNNER_ARTIFACTS` has other characters", hint=hint)
    endpoint = options.get("endpoint")
    if endpoint is not None and not is_url(endpoint, "http", "https"):
        raise BadArtifactsUrl("the endpoint of `RUNNER_ARTIFACTS` is no URL", hint="write https://HOST:PORT")
    return S3Store(bucket, f"{prefix}/" if prefix else "", options)


def _retention(options: Mapping[str, str]) -> _Retention | None:
    mode, retain = options.get("lock"), options.get("retain")
    if (mode is None) != (retain is None):
        hint = "write lock=governance&retain=90d"
        raise BadArtifactsUrl("`lock` and `retain` of `RUNNER_ARTIFACTS` belong together", hint=hint)
    if mode is None or retain is None:
        return None
    try:
        return _Retention(mode.upper(), parse_duration(retain))
    except ValueError as error:
        raise BadArtifactsUrl(f"`retain` of `RUNNER_ARTIFACTS` is `{excerpt(retain)}`", hint=f"write {error}") from None


def _encryption(options: Mapping[str, str]) -> dict[str, str]:
    algorithm, key = options.get("encryption"), options.get("kms_key")
    if key is not None and algorithm != "aws:kms":
        raise BadArtifactsUrl("`kms_key` of `RUNNER_ARTIFACTS` is for KMS", hint="add encryption=aws:kms")
    named = {"ServerSideEncryption": algorithm, "SSEKMSKeyId": key}
    return {name: value for name, value in named.items() if value is not None}


class S3Store:
    def __init__(self, bucket: str, prefix: str, options: Mapping[str, str]) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._retention, self._written = _retention(options), _encryption(options)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=ANSWER_SECONDS,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=CONNECTIONS,
            s3={"addressing_style": options.get("addressing", "path" if "endpoint" in options else "auto")},
            request_checksum_calculation="when_required",  # we send our own, which every server takes
            response_checksum_validation="when_required",
        )
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            self._client: Any = session.create_client(
                "s3",
                region_name=options.get("region") or session.get_config_variable("region") or "us-east-1",
                endpoint_url=options.get("endpoint"),
                config=config,
            )
        except (boto.BotoCoreError, ValueError) as error:
            message = f"the configuration for {self.url} cannot be used: {excerpt(str(error))}"
            raise BadArtifactsUrl(message, hint="look at `aws configure list`") from error

    def put(self, name: str, content: bytes) -> None:
        assert is_name(name), name
        locked = {}
        if self._retention is not None:
            until = datetime.fromtimestamp(now_microseconds() / 1e6, UTC) + timedelta(seconds=self._retention.seconds)
            locked = {"ObjectLockMode": self._retention.mode, "ObjectLockRetainUntilDate": until}
        digest = base64.b64encode(sha256(content).digest()).decode()
        place = {"Bucket": self._bucket, "Key": self._prefix + name}
        write = partial(self._client.put_object, **place, Body=content)
        write = partial(write, ChecksumSHA256=digest, ChecksumAlgorithm="SHA256")
        self._whole(self._call(name, partial(write, **self._written, **locked)), "ETag")

    def get(self, name: str) -> bytes:
        assert is_name(name), name

        def read() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            with closing(answer["Body"]) as body:
                if self._whole(answer, "ContentLength") > MAX_OBJECT:
                    raise ArtifactsDamaged(f"`{name}` of {self.url} is longer than any object")
                return bytes(body.read())

        for left in range(ATTEMPTS - 1, -1, -1):  # a connection that is lost in a body is not tried again by botocore
            try:
                return self._call(name, read)
            except ArtifactsUnreachable:
                if not left:
                    raise
        raise AssertionError

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        start = {"StartAfter": self._prefix + after} if after else {}
        for page in self._pages(prefix, **start):
            for entry in page.get("Contents", ()):
                name = str(entry["Key"]).removeprefix(self._prefix)
                if is_name(name):
                    yield StoredObject(name, int(entry["Size"]))

    def folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                name = str(entry["Prefix"]).removeprefix(self._prefix + prefix).rstrip("/")
                if is_name(name):
                    yield name

    def remove(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        for first in range(0, len(keys), _REMOVED_AT_ONCE):
            batch = {"Objects": keys[first : first + _REMOVED_AT_ONCE], "Quiet": True}
            answer = self._call("", partial(self._client.delete_objects, Bucket=self._bucket, Delete=batch))
            for failed in answer.get("Errors", ()):
                raise self._refused(str(failed.get("Code", "")), str(failed.get("Message", "")))

    def check(self) -> None:
        name = f"check/{secrets.token_hex(8)}"
        self.put(name, b"runner")
        try:
            if self.get(name) != b"runner":
                raise ArtifactsDamaged(f"{self.url} returns another content than was written")
            if [one.name for one in self.list("check/") if one.name == name] != [name]:
                raise ArtifactsDamaged(f"{self.url} does not list what was written")
        finally:
            self.remove([name])

    def _pages(self, prefix: str, **options: str) -> Iterator[Mapping[str, Any]]:
        token: dict[str, str] = {}
        while True:
            request = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **options, **token}
            page = self._call("", partial(self._client.list_objects_v2, **request))
            truncated = self._whole(page, "IsTruncated")
            yield page
            if not truncated:
                return
            following = page.get("NextContinuationToken")
            if not following or token.get("ContinuationToken") == following:
                raise ArtifactsDamaged(f"a listing of {self.url} is cut, and does not say how it goes on")
            token = {"ContinuationToken": following}

    def _call(self, name: str, act: Callable[[], T]) -> T:
        """Do something, with what botocore raises as our own errors."""
        try:
            return act()
        except boto.ClientError as error:
            told = error.response.get("Error", {})
            code, status = str(told.get("Code", "")), int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))
            if name and code in _MISSING:
                raise ArtifactsMissing(f"`{name}` is not in {self.url}") from error
            if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
                raise ArtifactsUnreachable(f"{self.url} answers {status} {excerpt(code)}") from error
            raise self._refused(code, str(told.get("Message", ""))) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as error:
            hint = "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or give the host a role"
            raise ArtifactsRefused(f"there are no credentials for {self.url}", hint=hint) from error
        except (*_UNREACHABLE, OSError) as error:
            hint = "look at the network, and at the endpoint of `RUNNER_ARTIFACTS`"
            raise ArtifactsUnreachable(f"{self.url} cannot be reached: {_cause(error)}", hint=hint) from error
        except boto.BotoCoreError as error:  # an answer that is none, an option that is wrong
            raise ArtifactsRefused(f"{self.url}: {excerpt(str(error))}") from error

    def _whole(self, answer: Mapping[str, Any], field: str) -> Any:
        """Return a field that every answer has: one that is cut within its headers passes for an empty one."""
        if field not in answer:
            raise ArtifactsUnreachable(f"an answer of {self.url} is cut")
        return answer[field]

    def _refused(self, code: str, message: str) -> RunnerError:
        if code in _DAMAGED_ON_THE_WAY:
            return ArtifactsDamaged(f"{self.url} got another content than was sent: {excerpt(code)}")
        said = f": {excerpt(message)}" if message else ""
        return ArtifactsRefused(f"{self.url} answers {excerpt(code)}{said}", hint=_HINTS.get(code))


def _cause(error: Exception) -> str:
    return excerpt(str(error).rpartition(": ")[2] or type(error).__name__)
