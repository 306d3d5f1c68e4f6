-- The journal is the truth; every other table is a projection that the same transaction writes.
-- Times are microseconds since the epoch, UTC. Ids are compared by their bytes, as SQLite does.

CREATE TABLE kb.meta (
    nonce TEXT NOT NULL,
    schema_version BIGINT NOT NULL,
    runner TEXT NOT NULL  -- the version that wrote this schema, for older ones to name when they refuse it
);

CREATE TABLE kb.runs (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    name TEXT COLLATE "C" NOT NULL,
    status TEXT NOT NULL,
    exit_code BIGINT,
    plan TEXT NOT NULL,
    created BIGINT NOT NULL,
    ended BIGINT,
    key TEXT,  -- a second start with the same one is refused, so that it can attach to the run that the first one made
    resumes TEXT,
    rehearsal TEXT,
    manifests TEXT,
    runner TEXT  -- who works on it; one that is not in the table of runners has ended in good order
);

CREATE INDEX runs_by_age ON kb.runs (created, id);

CREATE UNIQUE INDEX one_run_each_key ON kb.runs (key, name) WHERE key IS NOT NULL;

CREATE TABLE kb.events (
    run TEXT COLLATE "C" NOT NULL REFERENCES kb.runs (id),
    seq BIGINT NOT NULL,
    at BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (run, seq)
);

CREATE UNIQUE INDEX one_end_each_run ON kb.events (run) WHERE substr(body, 10, 9) = 'RunEnded"';  -- after `{"type":"`

CREATE TABLE kb.snapshots (
    run TEXT COLLATE "C" NOT NULL REFERENCES kb.runs (id),
    "commit" TEXT COLLATE "C" NOT NULL,
    tree TEXT NOT NULL,
    base TEXT,
    branch TEXT,
    at BIGINT NOT NULL,
    PRIMARY KEY (run, "commit")
);

CREATE TABLE kb.agent_workspaces (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
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
    created_at BIGINT NOT NULL,
    last_used_at BIGINT NOT NULL,
    expires_at BIGINT,
    resource_limits TEXT,
    snapshot_id TEXT,
    mcp_config TEXT,
    metadata TEXT NOT NULL
);

-- Leases, and journals for what happens to a workspace outside of any run.

CREATE TABLE kb.leases (
    workspace TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    fence BIGINT NOT NULL,
    id TEXT NOT NULL,  -- empty while nobody has it
    holder TEXT,  -- JSON
    acquired BIGINT NOT NULL,
    refreshed BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    runner TEXT
);

-- Processes that work on runs or hold leases.

CREATE TABLE kb.runners (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    host TEXT NOT NULL,
    boot TEXT NOT NULL,
    home TEXT NOT NULL,
    pid BIGINT NOT NULL,
    ticks BIGINT NOT NULL,  -- from the boot to the start of the process, so that its number is nobody else's
    started BIGINT NOT NULL,
    heartbeat BIGINT NOT NULL
);

CREATE TABLE kb.workspace_events (
    workspace TEXT COLLATE "C" NOT NULL,
    seq BIGINT NOT NULL,
    at BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (workspace, seq)
);

-- Projects outlive the runs that name them: a manifest that was applied owns its record, `project create` the others.

CREATE TABLE kb.projects (
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    root TEXT NOT NULL,
    workspace_isolation BOOLEAN NOT NULL,
    protected_paths TEXT NOT NULL,  -- a JSON list
    manifest TEXT,
    updated BIGINT NOT NULL
);

-- How the wall clock stood to the time since boot when its word was last needed. One row at most.

CREATE TABLE kb.clock (
    id BIGINT NOT NULL PRIMARY KEY CHECK (id = 1),
    boot TEXT NOT NULL,
    difference BIGINT NOT NULL  -- microseconds
);

-- Warm pools: how many workspaces should be ready, those that are, and what came of asking for one.

CREATE TABLE kb.pools (
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    key TEXT NOT NULL,  -- JSON
    size BIGINT NOT NULL CHECK (size >= 0)
);

CREATE TABLE kb.slots (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('warming', 'ready', 'claimed', 'draining')),
    keeper TEXT NOT NULL,
    created BIGINT NOT NULL,
    workspace TEXT UNIQUE
);

CREATE TABLE kb.pool_counts (
    what TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    count BIGINT NOT NULL
);

-- SQLite's function for a pattern in which `*` stands for others, and `[[]` and `[?]` for the sign inside.

CREATE FUNCTION kb.glob(pattern TEXT, value TEXT) RETURNS BOOLEAN LANGUAGE SQL IMMUTABLE AS $$
    SELECT value LIKE replace(replace(replace(replace(replace(replace(
        pattern, '[[]', '['), '[?]', '?'), '\', '\\'), '%', '\%'), '_', '\_'), '*', '%')
$$;
