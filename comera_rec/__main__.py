"""`python -m comera_rec`, the same as `comera`, for environments whose scripts aren't on the path."""

from comera_rec.cli.main import main

if __name__ == "__main__":
    main()
