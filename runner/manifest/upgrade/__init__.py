"""One file per old version of the format, named after it; the file is the registration.

It exports ``NEXT``, the version that it upgrades to, and ``upgrade``, which is given a document's tree and
its ``Rewrite``, makes the changes there, and returns the ``data`` that the new text must have (``None`` when it
gave up), with everything that cannot be upgraded. What is wrong in the new version is found by reading the result.
"""
