"""`python -m capsnb`, which is also what `torchrun -m capsnb` starts."""

from .cli import main

if __name__ == '__main__':
    main()
