"""Pages of HTML: a run, a plan or a comparison as one file that needs no script and asks no other host for anything.

Pure over the same values as the other reports. Texts are written by agents and strangers: each value that a template
shows is escaped for people (controls and direction marks become visible), then for HTML, and cut. Templates are made of
fragments (``parts/``) that take a record or a plan, so that another page can show the same.
"""
