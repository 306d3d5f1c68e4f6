"""Step kinds: a folder each, ``plan.py`` (pure: does this run need it, and with what) and ``run.py`` (does it).

``plan.py`` has ``NEEDS``, for each thing to wait for the kinds that can stand for it, best first, of which
the first one present counts; and ``plan(spec, facts, needs) -> Step | None``, where ``needs`` are those that
do. ``inputs(body)`` has what decides the result, by names for people: times do not, nor where something was
written. A kind without it, or with ``ANEW``, is done anew in a run that resumes another. ``run.py`` has
``async perform(body, run) -> Outcome``: what went wrong with the work is an outcome, what went wrong with the
platform is raised; and ``async take_over(body, run)`` if what an earlier run did has to be brought back.
"""
