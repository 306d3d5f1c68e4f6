-- What clients of a server make: agent types, tokens, sessions. A change names the version that it is a change of.

CREATE TABLE kb.entries (
    kind TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    state TEXT NOT NULL,  -- empty where a kind has none
    version BIGINT NOT NULL,
    created BIGINT NOT NULL,
    body TEXT NOT NULL,  -- JSON
    PRIMARY KEY (kind, name)
);

CREATE INDEX entries_by_age ON kb.entries (kind, state, created, name);

CREATE INDEX runs_by_status ON kb.runs (status, created, id, exit_code);
