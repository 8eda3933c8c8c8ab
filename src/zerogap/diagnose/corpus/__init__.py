"""Planted faults: small stacks with one thing wrong each, and harmless differences that must not be blamed.

A fault is one Python file in a subfolder: a docstring (what is wrong, and who met it), `EXPECTED`, the cause as
`subject/field` of verdict.SUBJECTS (a tuple where two descriptions are both true; `clean` for a control), and
`sides(workshop)`, which makes the two sides. EXPECTED is decided from what was planted, never from what the tool says.
`zerogap diagnose --self-test` runs all files and scores the tool; `--faults FOLDER` runs a folder of your own.
"""
