-- Leases, and journals for what happens to a workspace outside of any run.

CREATE TABLE leases (
    workspace TEXT NOT NULL PRIMARY KEY,
    fence INTEGER NOT NULL,
    id TEXT NOT NULL,  -- empty, as the holder, while nobody has it
    holder TEXT NOT NULL,
    acquired INTEGER NOT NULL,
    refreshed INTEGER NOT NULL,
    expires INTEGER NOT NULL
) STRICT;

CREATE TABLE workspace_events (
    workspace TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    type TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (workspace, seq)
) STRICT, WITHOUT ROWID;
