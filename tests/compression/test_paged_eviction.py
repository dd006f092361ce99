"""PagedEviction's score; that whole blocks go is the engine's to prove."""

import torch
from compression_oracles import layer_facts, layer_view, with_kv

from kvreclaim.compression.policies.paged_eviction import PagedEviction
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


def test_is_the_ratio_of_the_norms():
    keys = torch.tensor([[[3.0, 4.0], [0.6, 0.8]], [[5.0, 12.0], [0.0, 2.0]]])
    values = torch.tensor([[[10.0, 0.0], [0.0, 3.0]], [[0.0, 26.0], [3.0, 4.0]]])
    view = with_kv(layer_view(layer_facts(head_dim=2), None, num_tokens=2), keys, values)
    torch.testing.assert_close(PagedEviction().score(view), torch.tensor([[2.0, 3.0], [2.0, 2.5]]))


def test_moves_nothing_and_takes_whole_blocks():
    assert PagedEviction().eviction_method is EvictionMethod.BLOCKS
