"""Step kinds, one folder each: ``plan.py`` is pure and decides whether a run needs the step, ``run.py`` performs it.

``plan.py`` has ``NEEDS``: for each thing to wait for, the kinds that can provide it, best first; the first one present
counts. ``plan(spec, facts, needs) -> Step | None`` gets the ids of those. ``inputs(body)`` names the values that decide
the result; times and paths of this host do not. A kind without ``inputs``, or with ``ANEW``, runs again in a run that
resumes another.

``run.py`` has ``async perform(body, run) -> Outcome``. A failure of the work is an outcome, a failure of the platform
is raised. ``async restore(body, run)``, where present, brings back the result of an earlier run.
"""
