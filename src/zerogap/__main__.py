"""`python -m zerogap`: the same commands as `zerogap`."""

from zerogap.cli import main

if __name__ == "__main__":
    main()
