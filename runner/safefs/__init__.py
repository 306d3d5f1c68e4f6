"""File trees that somebody hostile may have written: opened, listed, copied and removed without following a link."""
