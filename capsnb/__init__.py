__version__ = "0.1.0"

from .mixture import GaussianMixture
from .dstep import Routed, Routing, routing_ref
from . import moments as _moments   # adds the plans 'moments' and 'stream' to Routing

__all__ = ['GaussianMixture', 'Routed', 'Routing', 'routing_ref']
