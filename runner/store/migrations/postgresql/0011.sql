-- The project that a run belongs to; earlier runs recorded none.

ALTER TABLE kb.runs ADD COLUMN project TEXT NOT NULL DEFAULT 'default';

CREATE INDEX runs_of_project ON kb.runs (project, created, id);
