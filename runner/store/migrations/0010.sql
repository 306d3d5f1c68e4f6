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
    ended INTEGER,
    key TEXT,  -- a second start with the same one is refused, so that it can attach to the run that the first one made
    resumes TEXT,
    rehearsal TEXT,
    manifests TEXT,
    runner TEXT  -- who works on it; one that is not in the table of runners has ended in good order
) STRICT;

CREATE INDEX runs_by_age ON runs (created, id);

CREATE UNIQUE INDEX one_run_each_key ON runs (key, name) WHERE key IS NOT NULL;

CREATE TABLE events (
    run TEXT NOT NULL REFERENCES runs (id),
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    body TEXT NOT NULL,
    type TEXT GENERATED ALWAYS AS (substr(body, 10, instr(substr(body, 10), '"') - 1)),  -- after `{"type":"`
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

-- Leases, and journals for what happens to a workspace outside of any run.

CREATE TABLE leases (
    workspace TEXT NOT NULL PRIMARY KEY,
    fence INTEGER NOT NULL,
    id TEXT NOT NULL,  -- empty while nobody has it
    holder TEXT,  -- JSON
    acquired INTEGER NOT NULL,
    refreshed INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    runner TEXT
) STRICT;

-- Processes that work on runs or hold leases.

CREATE TABLE runners (
    id TEXT NOT NULL PRIMARY KEY,
    host TEXT NOT NULL,
    boot TEXT NOT NULL,
    home TEXT NOT NULL,
    pid INTEGER NOT NULL,
    ticks INTEGER NOT NULL,  -- from the boot to the start of the process, so that its number is nobody else's
    started INTEGER NOT NULL,
    heartbeat INTEGER NOT NULL
) STRICT;

CREATE TABLE workspace_events (
    workspace TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    body TEXT NOT NULL,
    type TEXT GENERATED ALWAYS AS (substr(body, 10, instr(substr(body, 10), '"') - 1)),  -- after `{"type":"`
    PRIMARY KEY (workspace, seq)
) STRICT, WITHOUT ROWID;

-- Projects outlive the runs that name them: a manifest that was applied owns its record, `project create` the others.

CREATE TABLE projects (
    name TEXT NOT NULL PRIMARY KEY,
    root TEXT NOT NULL,
    workspace_isolation INTEGER NOT NULL CHECK (workspace_isolation IN (0, 1)),
    protected_paths TEXT NOT NULL,  -- a JSON list
    manifest TEXT,
    updated INTEGER NOT NULL
) STRICT;

-- How the wall clock stood to the time since boot when its word was last needed. One row at most.

CREATE TABLE clock (
    id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    boot TEXT NOT NULL,
    difference INTEGER NOT NULL  -- microseconds
) STRICT;

-- Warm pools: how many workspaces should be ready, those that are, and what came of asking for one.

CREATE TABLE pools (
    name TEXT NOT NULL PRIMARY KEY,
    key TEXT NOT NULL,  -- JSON
    size INTEGER NOT NULL CHECK (size >= 0)
) STRICT;

CREATE TABLE slots (
    id TEXT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('warming', 'ready', 'claimed', 'draining')),
    keeper TEXT NOT NULL,
    created INTEGER NOT NULL,
    workspace TEXT UNIQUE
) STRICT;

CREATE TABLE pool_counts (
    what TEXT NOT NULL PRIMARY KEY,
    count INTEGER NOT NULL
) STRICT;
