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
