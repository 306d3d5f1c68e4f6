-- How the wall clock stood to the time since boot when its word was last needed. One row at most.

CREATE TABLE clock (
    id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    boot TEXT NOT NULL,
    difference INTEGER NOT NULL  -- microseconds
) STRICT;
