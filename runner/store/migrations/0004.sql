-- Projects outlive the runs that name them: a manifest that was applied owns its record, `project create` the others.

CREATE TABLE projects (
    name TEXT NOT NULL PRIMARY KEY,
    root TEXT NOT NULL,
    workspace_isolation INTEGER NOT NULL CHECK (workspace_isolation IN (0, 1)),
    protected_paths TEXT NOT NULL,  -- a JSON list
    manifest TEXT,
    updated INTEGER NOT NULL
) STRICT;
