__version__ = "0.1.0"

from .dstep import Routed, Routing, routing_ref
from . import moments as _moments   # adds the plans 'moments' and 'stream' to Routing

__all__ = ['Routed', 'Routing', 'routing_ref']
