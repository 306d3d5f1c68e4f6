-- What clients of a server make: agent types, tokens, sessions. A change names the version that it is a change of.

CREATE TABLE entries (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,  -- empty where a kind has none
    version INTEGER NOT NULL,
    created INTEGER NOT NULL,
    body TEXT NOT NULL,  -- JSON
    PRIMARY KEY (kind, name)
) STRICT;

CREATE INDEX entries_by_age ON entries (kind, state, created, name);

CREATE INDEX runs_by_status ON runs (status, created, id, exit_code);
