"""One file per manifest kind, exporting ``KIND`` and ``Spec``; the file is the registration."""
