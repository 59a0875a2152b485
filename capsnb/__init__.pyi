# What type checkers and editors read in place of the lazy imports of __init__.py.
__version__: str

from .data.mnist import load_cifar10 as load_cifar10
from .data.embed import FrozenEncoder as FrozenEncoder
from .data.eth80 import load_eth80 as load_eth80
from .data.norb import load_smallnorb as load_smallnorb
from .data.sst import load_sst as load_sst
from .data.toys import load_toys as load_toys
from .engine.dstep import Routing as Routing
from .engine.dynamic import dynamic_routing as dynamic_routing
from .engine.dynamic import route_capsules as route_capsules
from .engine.em import em_routing as em_routing
from .engine.layers import ClassCaps as ClassCaps
from .engine.layers import ConvCaps as ConvCaps
from .engine.layers import PrimaryCaps as PrimaryCaps
from .engine.mixture import GaussianMixture as GaussianMixture
from .lab.assembly import AssemblyNet as AssemblyNet
from .lab.capsnet import CapsNet as CapsNet
from .lab.capsnet import EfficientCapsNet as EfficientCapsNet
from .lab.losses import margin_loss as margin_loss
from .lab.losses import spread_loss as spread_loss
from .lab.matrix_caps import MatrixCapsNet as MatrixCapsNet
from .lab.hub import RoutingClassifier as RoutingClassifier
from .lab.text import SSTNet as SSTNet
from .lab.vision import BaselineCNN as BaselineCNN
from .lab.vision import DStepNet as DStepNet
from .lab.vision import RoutingNet as RoutingNet
from .lab.vision import SmallNORBNet as SmallNORBNet
from .routing.dstep import Routed as Routed
from .routing.dstep import routing_ref as routing_ref
from .routing.dynamic import squash as squash
from .zoo.routers import DynamicRouting as DynamicRouting
from .zoo.routers import EMRouting as EMRouting
from .zoo.routers import routing_layer as routing_layer
from .zoo.blocks import RoutedPool as RoutedPool
from .zoo.vectors import VectorRouting as VectorRouting
