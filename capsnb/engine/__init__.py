"Exact, fast twins of the reference routings."

from . import moments  # noqa: F401  the fast plans of `Routing` make themselves known
from . import compiled  # noqa: F401  and those of fields
from . import triton_loop  # noqa: F401  and those for a GPU
