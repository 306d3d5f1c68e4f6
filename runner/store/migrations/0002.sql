-- A second start with the same key is refused, so that it can attach to the run that the first one made.

ALTER TABLE runs ADD COLUMN key TEXT;

CREATE UNIQUE INDEX one_run_each_key ON runs (key, name) WHERE key IS NOT NULL;
