"""The checks of a diagnosis, one module each, in the order in which a cause is ruled out.

Every `check(a, b, facts)` returns a `Finding`. `evidence["accounts"]` says whether the causes account for the logdiff:
True where a substitution or an exact relation shows it, False where one shows that they do not, None where that could
not be tried. What could not be looked at is `not checked`, with what to record; it never passes.
"""
