# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryTypeIgnoreComment=true
"""A user's program, read by pyright and never run: names, arguments and results have types."""

import torch
from typing_extensions import assert_type
from capsnb import CapsNet, ConvCaps, DStepNet, GaussianMixture, MatrixCapsNet, Routing, SSTNet
from capsnb import dynamic_routing, em_routing, squash
from capsnb.engine.dynamic import Agreed
from capsnb.routing.dstep import Routed, RoutedR
from capsnb.routing.em import EMRouted

assert_type(Routing(d_cov=4, d_inp=4, d_out=4, n_out=10), Routing)
assert_type(Routing(4, 4, 4).forward(torch.ones(2), torch.ones(2, 4, 4)), Routed | RoutedR)
assert_type(ConvCaps(8, 16, kernel=3, stride=2), ConvCaps)
assert_type(MatrixCapsNet(64, 8, 16, 16), MatrixCapsNet)
assert_type(CapsNet.from_pretrained('folder'), CapsNet)
assert_type(DStepNet.from_pretrained('folder', strict=True), DStepNet)
assert_type(SSTNet.from_published('file'), SSTNet)

votes = torch.randn(2, 8, 3, 4)
assert_type(dynamic_routing(votes), Agreed)
assert_type(em_routing(torch.rand(2, 8), votes, 0.0, 0.0), EMRouted)
assert_type(squash(votes), torch.Tensor)
assert_type(GaussianMixture(3).fit(votes), GaussianMixture)
assert_type(GaussianMixture(3).fit(votes).predict_proba(votes), torch.Tensor)

# What does not fit is an error, or this line is one
Routing(d_cov='four', d_inp=4, d_out=4)  # pyright: ignore[reportArgumentType]
CapsNet(no_such_option=1)  # pyright: ignore[reportCallIssue]
