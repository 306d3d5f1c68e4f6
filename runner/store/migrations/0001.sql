-- The journal is the truth; every other table is a projection that the same transaction writes.
-- Times are microseconds since the epoch, UTC.

CREATE TABLE meta (
    nonce TEXT NOT NULL,
    schema_version INTEGER NOT NULL,
    runner TEXT NOT NULL  -- the version that wrote this schema, for older ones to name when they refuse it
) STRICT;

CREATE TABLE runs (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    status TEXT NOT NULL,
    exit_code INTEGER,
    plan TEXT NOT NULL,
    created INTEGER NOT NULL,
    ended INTEGER
) STRICT;

CREATE TABLE events (
    run TEXT NOT NULL REFERENCES runs (id),
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    type TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX one_end_each_run ON events (run) WHERE type = 'RunEnded';

CREATE TABLE snapshots (
    run TEXT NOT NULL REFERENCES runs (id),
    "commit" TEXT NOT NULL,
    tree TEXT NOT NULL,
    base TEXT,
    branch TEXT,
    at INTEGER NOT NULL,
    PRIMARY KEY (run, "commit")
) STRICT;

CREATE TABLE agent_workspaces (
    id TEXT NOT NULL PRIMARY KEY,
    agent_session_id TEXT,
    container_type TEXT NOT NULL CHECK (container_type IN ('agent_workspace', 'mcp_server')),
    provider TEXT NOT NULL,
    provider_workspace_id TEXT,
    repository_url TEXT,
    branch TEXT,
    deployment_mode TEXT,
    lifecycle TEXT NOT NULL CHECK (lifecycle IN ('ephemeral', 'persistent')),
    status TEXT NOT NULL CHECK (
        status IN ('creating', 'provisioning', 'ready', 'stopping', 'stopped', 'destroying', 'destroyed', 'error')
    ),
    created_at INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    expires_at INTEGER,
    resource_limits TEXT,
    snapshot_id TEXT,
    mcp_config TEXT,
    metadata TEXT NOT NULL
) STRICT;
